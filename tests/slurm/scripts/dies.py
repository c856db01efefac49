"""Load again and again; the last rank ends in the middle of it, or all by Slurm. ``dies.py FILE raise|exit|kill|cancel``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import jax
from jax.sharding import PartitionSpec as P

import shardload
from shardload.comm.group import group_of
from tests.mpi.support import mesh_of


def main(path: str, how: str) -> None:
    from mpi4py import MPI  # whose job it is: without MPI srun alone would end it

    shardload.initialize()
    group = group_of()
    assert group.size == MPI.COMM_WORLD.size == jax.process_count()
    mesh = mesh_of()
    shardload.load(path, mesh, P("a"))
    if group.rank == group.size - 1:
        if how == "raise":
            raise RuntimeError(f"rank {group.rank}: the scratch disk is full")
        if how == "exit":
            sys.exit(f"rank {group.rank}: no such option")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        # What `scancel` and the time limit send first; a while later they kill.
        step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
        subprocess.run(["scancel", "--signal=TERM", step], check=True)
    while True:  # the others would wait for ever
        shardload.load(path, mesh, P("a"))


if __name__ == "__main__":
    main(*sys.argv[1:])
