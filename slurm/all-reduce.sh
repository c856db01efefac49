#!/bin/bash
# Is the job started correctly? `shardload doctor` prints a row for each process, sums one number per device over all devices
# (the all-reduce), moves data with checksums, and says which option fixes what is wrong. Exit code 0: loads will work.
#SBATCH --job-name=all-reduce
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#
# It prints, among other lines:
#   n1     0     0            ...
#   n2     7     7            ...
#   ok: scatter: 4.0 MiB from rank 0 to 8 devices...
#   ok: all-reduce: the sum over 8 devices is ... as expected
#   OK: 8 ranks on 2 nodes, 8 devices...

set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # sbatch runs a copy of this file: submit it from the top folder of the repository
source slurm/site.sh

srun --mpi="$SITE_MPI" "$SITE_PYTHON" slurm/run.py -m shardload doctor
