#!/bin/bash
# Four nodes with four GPUs each, one process for each GPU: 16 processes.
#SBATCH --job-name=four-nodes
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#
# It prints (lines of several processes in any order):
#   I am 0, I see 1/16 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 1, I see 1/16 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 2, I see 1/16 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 3, I see 1/16 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 4, I see 1/16 devices; on n2, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 5, I see 1/16 devices; on n2, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 6, I see 1/16 devices; on n2, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 7, I see 1/16 devices; on n2, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 8, I see 1/16 devices; on n3, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 9, I see 1/16 devices; on n3, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 10, I see 1/16 devices; on n3, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 11, I see 1/16 devices; on n3, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 12, I see 1/16 devices; on n4, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 13, I see 1/16 devices; on n4, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 14, I see 1/16 devices; on n4, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 15, I see 1/16 devices; on n4, CUDA_VISIBLE_DEVICES=0,1,2,3

set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file: submit it from the top folder of the repository
source slurm/site.sh

srun --mpi="$SITE_MPI" "$SITE_PYTHON" slurm/run.py slurm/hello.py
