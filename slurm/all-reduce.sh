#!/bin/bash
# Is everything started right? `shardload doctor` shows a row for each process, adds a number of every device up over all of
# them (the all-reduce), moves data with checksums, and says which flag mends what is wrong. Exit status 0: all is well.
#SBATCH --job-name=all-reduce
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#
# It prints (lines of several processes in any order):
#   ...

set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file: submit it from the top folder of the repository
source slurm/site.sh

srun --mpi="$SITE_MPI" "$SITE_PYTHON" -m shardload doctor
