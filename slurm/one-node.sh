#!/bin/bash
# One node, one process for each GPU. Each process sees all four GPUs of the node and uses the one with its local number
# (shardload.initialize does that), so that NCCL can copy from GPU to GPU.
#SBATCH --job-name=one-node
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#
# It prints (lines of several processes in any order):
#   I am 0, I see 1/4 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 1, I see 1/4 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 2, I see 1/4 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 3, I see 1/4 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3

set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file: submit it from the top folder of the repository
source slurm/site.sh

srun --mpi="$SITE_MPI" "$SITE_PYTHON" slurm/run.py slurm/hello.py
