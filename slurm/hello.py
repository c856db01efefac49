"""Which processes are there, and which devices does each of them see? One line per process.

::

    srun --mpi=pmix python slurm/run.py slurm/hello.py
"""

from __future__ import annotations

import os
import socket

import jax

import shardload


def main() -> None:
    """Start JAX from MPI and print one line."""
    shardload.initialize()
    process, here, everywhere = jax.process_index(), len(jax.local_devices()), len(jax.devices())
    host = socket.gethostname().partition(".")[0]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "(not set)")  # what Slurm gave; not set: all can be seen
    # One write: the lines of several processes do not mix.
    print(f"I am {process}, I see {here}/{everywhere} devices; on {host}, CUDA_VISIBLE_DEVICES={visible}\n", end="", flush=True)


if __name__ == "__main__":
    main()
