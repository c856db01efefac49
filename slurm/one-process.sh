#!/bin/bash
# One node, one process with four GPUs: the simplest way to start, for data that fits on one node. MPI is not used.
#SBATCH --job-name=one-process
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#
# It prints (lines of several processes in any order):
#   I am 0, I see 4/4 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3

set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file: submit it from the top folder of the repository
source slurm/site.sh

srun --mpi="$SITE_MPI" "$SITE_PYTHON" slurm/run.py slurm/hello.py
