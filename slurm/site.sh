# shellcheck shell=bash
# All settings that differ from site to site. Every script here sources this file. Change the values below, or set the
# variables of the same names in the environment, before `sbatch`. docs/slurm.md says which script is for which machine.

# --- For sbatch itself, which does not read this file. Put what your site needs into your shell (or ~/.bashrc).
#   export SBATCH_ACCOUNT=abc@v100        # what --account would say
#   export SBATCH_PARTITION=gpu           # --partition
#   export SBATCH_QOS=debug               # --qos
#   export SBATCH_CONSTRAINT=v100         # --constraint

# --- In the job.
# Modules to load, after `module purge`. Empty: leave the environment as it is.
SITE_MODULES=${SITE_MODULES-}
# A virtual environment to activate. Empty: none.
SITE_VENV=${SITE_VENV-}
# The interpreter.
SITE_PYTHON=${SITE_PYTHON-python}
# The protocol between srun and MPI. `srun --mpi=list` shows what the cluster has: pmix for Open MPI; pmi2 for MPICH, Intel MPI
# and MVAPICH; cray_shasta for Cray MPICH. With the wrong one every process is a job of its own.
SITE_MPI=${SITE_MPI-pmix}
# A container image (ibex.sh), made from slurm/shardload.def.
SITE_IMAGE=${SITE_IMAGE-shardload.sif}
# MPICH with UCX under pmi2 (the PyPI wheel is built so): its start-up messages are sometimes too long for Slurm (docs/slurm.md).
#   export MPIR_CVAR_CH4_NETMOD=ofi

if [ -n "$SITE_MODULES" ]; then
  module purge
  # shellcheck disable=SC2086  # one word a module
  module load $SITE_MODULES
fi
if [ -n "$SITE_VENV" ]; then
  # shellcheck disable=SC1091  # the site's own
  source "$SITE_VENV/bin/activate"
fi

# Since Slurm 22.05 srun no longer takes --cpus-per-task from the batch script: without this each process gets one core.
if [ -n "${SLURM_CPUS_PER_TASK-}" ]; then
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi
# One failed process ends the job; otherwise the others would wait for it until the time limit. (For exceptions see
# slurm/run.py.)
export SLURM_KILL_BAD_EXIT=1
# On many parallel filesystems HDF5's file locks fail or are slow; these jobs only read.
export HDF5_USE_FILE_LOCKING=${HDF5_USE_FILE_LOCKING-FALSE}

echo "job $SLURM_JOB_ID: ${SLURM_NTASKS:-1} tasks on $SLURM_JOB_NUM_NODES nodes, $SITE_PYTHON, --mpi=$SITE_MPI" >&2
: "$SITE_IMAGE" # for the scripts that want one
