"""Do the links of `benchmarks grid --links` have the rate that they were given, and are they gone afterwards? As root."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.throttle.links import Links, why_not
from tests.jobs.launch import job_command, job_environment

SEND = """
import time
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
data = np.arange(1 << 20, dtype=np.uint8) if comm.rank == 0 else np.zeros(1 << 20, np.uint8)
comm.Barrier()
began = time.monotonic()
if comm.rank == 0:
    comm.Send(data, 1)
    comm.Recv(data[:1], 1)
    print(time.monotonic() - began, comm.Split_type(MPI.COMM_TYPE_SHARED).size)
else:
    comm.Recv(data, 0)
    assert data[-1] == 255
    comm.Send(data[:1], 0)
    comm.Split_type(MPI.COMM_TYPE_SHARED)
"""


def test_a_message_takes_as_long_as_its_link_says(tmp_path: Path) -> None:
    """Wrong if ranks reached each other through memory, or around the link. A token bucket lets its burst (32 KB) pass."""
    assert not why_not()
    before = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    with Links(2, 2e6, tmp_path) as links:
        command = job_command(["-c", SEND], 2)
        env = job_environment(2) | links.env
        command = [*command[:3], *links.command(command[3:])]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    seconds, n_here = done.stdout.split()
    assert float(seconds) >= ((1 << 20) - 2 * (32 << 10)) / 2e6 and n_here == "1"
    assert subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout == before
