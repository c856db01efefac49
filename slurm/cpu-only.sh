#!/bin/bash
# No GPUs: two processes, each with four devices that JAX simulates on the CPU. The program is the same, so you can try a
# decomposition on a CPU partition before you use GPUs. The same on a laptop, without Slurm:
#
#     export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4
#     mpiexec -n 2 python slurm/hello.py
#SBATCH --job-name=cpu-only
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#
# It prints (lines of several processes in any order):
#   I am 0, I see 4/8 devices; on n1, CUDA_VISIBLE_DEVICES=(not set)
#   I am 1, I see 4/8 devices; on n1, CUDA_VISIBLE_DEVICES=(not set)
#   field  (32, 32, 16) float32, shard (32, 8, 8) on each of 8 devices
#   modes  (32, 32, 16) complex64, shard (8, 16, 16)
#   strongest mode (the mean aside) (..., ..., ...): 8192
#   Parseval: sum of squares 8192 before, 8192 after

set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file: submit it from the top folder of the repository
source slurm/site.sh

export JAX_PLATFORMS=cpu
export XLA_FLAGS=--xla_force_host_platform_device_count=4
srun --mpi="$SITE_MPI" "$SITE_PYTHON" slurm/run.py slurm/hello.py
srun --mpi="$SITE_MPI" "$SITE_PYTHON" slurm/run.py examples/pencil_fft.py
