#!/bin/bash
# For a site like Ibex: the software is in a Singularity (Apptainer) image, and srun starts one container for each process.
# slurm/shardload.def says how to build the image. --nv lets the container see the GPUs and their driver. Before sbatch:
#
#     export SBATCH_CONSTRAINT=v100
#     export SITE_MODULES=singularity SITE_IMAGE=$HOME/shardload.sif
#SBATCH --job-name=ibex
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
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
SITE_MPI=${SITE_MPI-pmi2} # the image has MPICH
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file: submit it from the top folder of the repository
source slurm/site.sh

container=$(command -v apptainer || command -v singularity)
# The image's run script hands its arguments to python.
srun --mpi="$SITE_MPI" "$container" run --nv --bind "$PWD" --pwd "$PWD" "$SITE_IMAGE" slurm/run.py slurm/hello.py
