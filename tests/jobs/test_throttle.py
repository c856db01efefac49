"""Does the slowed-down machine have the limits that it was given?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.layouts import make
from benchmarks.runs import grid
from benchmarks.throttle import Cluster, Limits


@pytest.mark.thorough  # tests/unit has what it makes of its records
def test_the_grid_times_every_way_and_what_plans_say(tmp_path: Path) -> None:
    """One cell on two ranks, which compare what they load with the file. The bytes show that the limits were there."""
    files = make(tmp_path / "data", 32, ["hdf5-contiguous"])
    record = grid.measure_grid(files, tmp_path / "data", specs=["-,a,b"], ranks=[2], file_systems=["fast"], networks=["slow"])
    (cell,) = record["cells"]
    assert set(cell["ways"]) >= {"root", "parallel 1", "parallel 2", "direct"} and cell["auto"] in cell["ways"]
    nbytes = 4 * 32**3
    for name, took in cell["ways"].items():
        assert "error" not in took, (name, took)
        assert took["seconds"][0] >= nbytes / len(files) / 60e6
        assert nbytes <= took["nbytes"] <= 2 * nbytes + (1 << 17) and took["opens"] >= 3, (name, took)
        assert took["sent_nbytes"] == (0 if name == "direct" else nbytes // 2), (name, took)
    assert grid.replan(record)["cells"][0]["auto"] == cell["auto"]


READS = """
import os, sys, time, threading
def seconds(work):
    began = time.monotonic(); work(); return time.monotonic() - began
def read(file, size, *places):
    for place in places: os.preadv(file, [bytearray(size)], place)
path = sys.argv[1]
file = os.open(path, os.O_RDONLY)
whole = seconds(lambda: read(file, 1 << 20, 0))
again = seconds(lambda: read(file, 1 << 20, 0))
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
small = seconds(lambda: read(file, 1, *range(0, 1 << 20, 1 << 16)))
other = seconds(lambda: open("/proc/self/stat").read())
print(whole, again, small, other)
"""


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_read_takes_as_long_as_its_limits_say(tmp_path: Path, has_cache: bool) -> None:
    """Each at least; how much more depends on the machine. What was fetched is exact."""
    limits = Limits(1e9, 1e9, 4e6, 100, 0.05, 0.01, 1 << 18, has_cache=has_cache)
    path = tmp_path / "values"
    path.write_bytes(bytes(1 << 20))
    with Cluster(tmp_path, 1, limits) as cluster:
        env: dict[str, Any] = {**os.environ, **cluster.env}
        done = subprocess.run([sys.executable, "-c", READS, str(path)], env=env, capture_output=True, text=True, check=True)
        counted = cluster.counted()
    whole, again, small, other = map(float, done.stdout.split())
    assert whole >= (1 << 20) / 4e6 + 0.01 - 0.005
    assert small >= 16 * 0.01
    assert counted.opens == 1
    if has_cache:
        assert counted.nbytes == (1 << 20) + 16 * 4096 and counted.operations == 1 + 4 + 16
        assert again < whole, "a node keeps what it has read"
    else:
        assert counted.nbytes == 2 * (1 << 20) + 16 and counted.operations == 1 + 8 + 16
        assert again >= (1 << 20) / 4e6
    assert other < whole, "files elsewhere are not limited"
