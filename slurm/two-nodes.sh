#!/bin/bash
# Two nodes, one process for each GPU: the usual set-up. For more nodes change only --nodes.
#SBATCH --job-name=two-nodes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#
# It prints (lines of several processes in any order):
#   I am 0, I see 1/8 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 1, I see 1/8 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 2, I see 1/8 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 3, I see 1/8 devices; on n1, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 4, I see 1/8 devices; on n2, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 5, I see 1/8 devices; on n2, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 6, I see 1/8 devices; on n2, CUDA_VISIBLE_DEVICES=0,1,2,3
#   I am 7, I see 1/8 devices; on n2, CUDA_VISIBLE_DEVICES=0,1,2,3

set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file: submit it from the top folder of the repository
source slurm/site.sh

srun --mpi="$SITE_MPI" "$SITE_PYTHON" slurm/run.py slurm/hello.py
