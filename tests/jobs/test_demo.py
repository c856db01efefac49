"""The demo, as a newcomer runs it, on a small field."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.jobs.launch import run_job

EXAMPLES = Path(__file__).parents[2] / "examples"

# Checks that nothing is open when a load begins: HDF5 keeps decoded chunks of what is.
DEMO = f"""
import sys
import h5py
sys.path.insert(0, {str(EXAMPLES)!r})
import demo

timed, slices = demo._Demo.timed, demo._slice

def check():
    n = h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET)
    if n:
        raise RuntimeError(f"{{n}} files or datasets are open when a load begins")

demo._REPEATS = 1
demo._Demo.timed = lambda self, load: timed(self, lambda: (check(), load())[1])
SPOILED
demo.run(SIZE)
"""


@pytest.mark.parametrize(("n", "size"), [(1, 31), (4, 32)])  # the mesh does not divide 31
def test_demo(n: int, size: int, tmp_path: Path) -> None:
    """Wrong if a way were timed with what HDF5 decoded in an earlier run, or for another."""
    program = DEMO.replace("SPOILED", "").replace("SIZE", str(size))
    job = run_job(["-W", "error", "-c", program], n, timeout=90, env={"TMPDIR": str(tmp_path), "COLUMNS": "200"}).check()
    assert "all 7 loads verified element by element" in job.stdout and f"saving {size}^3 float32" in job.stdout
    table = [re.split("  +", line.strip()) for line in job.stdout.splitlines() if "  " in line.strip()]
    for file in ("field.h5", "field.zarr"):
        load = next(row for row in table if row[0] == f"{file}:/density")
        assert load[3] == {1: "31 x 31 x 31", 4: "32 x 16 x 16"}[n]
        assert float(load[1]) > 0
    assert [row[0] for row in table].count("every process slices") == 2
    ffts = re.findall(r"its FFT, within (\S+) of NumPy's", job.stdout)
    assert len(ffts) == 2 and all(0 < float(error) < 1e-5 for error in ffts)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("shardload-demo")]


def test_a_demo_that_fails_ends_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    """Wrong if a load that is not right were said to be, or a rank waited for others that have failed."""
    spoiled = "demo._slice = lambda path, sharding: slices(path, sharding) + 1"
    program = DEMO.replace("SPOILED", spoiled).replace("SIZE", "16")
    job = run_job(["-W", "error", "-c", program], 2, timeout=60, env={"TMPDIR": str(tmp_path)})
    assert job.returncode != 0 and "verified element by element" not in job.stdout
    assert "differ" in job.stderr
    assert not [name for name in os.listdir(tmp_path) if name.startswith("shardload-demo")]
