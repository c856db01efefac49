#!/bin/bash
# A batch script that runs its arguments: tests say on sbatch's command line how many nodes and tasks.
set -euo pipefail
exec "$@"
