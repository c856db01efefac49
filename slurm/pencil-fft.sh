#!/bin/bash
# Load a field as pencils and transform it (examples/pencil_fft.py), on two nodes. For your own field (its axes must be
# divisible by the mesh, here 4 x 2: axis 0 by 4, axis 1 by 4, axis 2 by 2):
#
#     DATA=/scratch/me/run7.h5:/density sbatch slurm/pencil-fft.sh
#
# Without DATA it writes a small file, a plane wave of modes (1, 2, 3), into the folder TRY_FOLDER (default: this folder),
# which all nodes must see.
#SBATCH --job-name=pencil-fft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#
# It prints (lines of several processes in any order):
#   field  (64, 96, 160) float32, shard (64, 24, 80) on each of 8 devices
#   modes  (64, 96, 160) complex64, shard (16, 48, 160)
#   strongest mode (the mean aside) (..., ..., ...): 491520
#   Parseval: sum of squares 491520 before, 491520 after

set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file: submit it from the top folder of the repository
source slurm/site.sh

if [ -z "${DATA-}" ]; then
  field=${TRY_FOLDER:-$PWD}/shardload-field.h5
  "$SITE_PYTHON" slurm/field.py "$field"
  DATA=$field:/density
fi
srun --mpi="$SITE_MPI" "$SITE_PYTHON" slurm/run.py examples/pencil_fft.py "$DATA"
