#!/bin/bash
# For a site like Perlmutter: GPUs are requested per task, and Cray MPICH starts the processes. --gpu-bind=none, because
# --gpus-per-task=1 alone hides the other GPUs of the node from each process, and NCCL would have to go through host memory.
# (Depending on Slurm's version CUDA_VISIBLE_DEVICES then names all four or is not set, which is the same.)
# Before sbatch:
#
#     export SBATCH_ACCOUNT=m1234_g SBATCH_QOS=debug
#     export SITE_MODULES="PrgEnv-gnu cray-mpich cudatoolkit python"
#SBATCH --job-name=perlmutter
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --constraint=gpu
#SBATCH --gpus-per-task=1
#SBATCH --gpu-bind=none
#SBATCH --cpus-per-task=16
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#
# It prints (lines of several processes in any order):
#   I am 0, I see 1/8 devices; on n1, CUDA_VISIBLE_DEVICES=(not set)
#   I am 1, I see 1/8 devices; on n1, CUDA_VISIBLE_DEVICES=(not set)
#   I am 2, I see 1/8 devices; on n1, CUDA_VISIBLE_DEVICES=(not set)
#   I am 3, I see 1/8 devices; on n1, CUDA_VISIBLE_DEVICES=(not set)
#   I am 4, I see 1/8 devices; on n2, CUDA_VISIBLE_DEVICES=(not set)
#   I am 5, I see 1/8 devices; on n2, CUDA_VISIBLE_DEVICES=(not set)
#   I am 6, I see 1/8 devices; on n2, CUDA_VISIBLE_DEVICES=(not set)
#   I am 7, I see 1/8 devices; on n2, CUDA_VISIBLE_DEVICES=(not set)

set -euo pipefail
SITE_MPI=${SITE_MPI-cray_shasta}
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file: submit it from the top folder of the repository
source slurm/site.sh

srun --mpi="$SITE_MPI" "$SITE_PYTHON" slurm/run.py slurm/hello.py
