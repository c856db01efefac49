"""The demo, as a newcomer runs it, on a small field."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.jobs.launch import run_job
from tests.tiers import thorough


def rows(out: str) -> list[list[str]]:
    """Cells of all table rows, which have two spaces or more between them where there are columns enough."""
    return [re.split("  +", line.strip()) for line in out.splitlines() if "  " in line.strip()]


# Checks that nothing is open when a load begins: HDF5 keeps decoded chunks of what is. The mesh does not divide the size.
DEMO = """
import sys
import h5py
from shardload.cli import demo
from shardload.cli.main import main

timed = demo._Demo.timed

def check():
    n = h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET)
    if n:
        raise RuntimeError(f"{n} files or datasets are open when a load begins")

demo._Demo.timed = lambda self, load: timed(self, lambda: (check(), load())[1])
sys.argv[1:] = ["demo", "--size", "31"]
main()
"""


@pytest.mark.parametrize("n", thorough([1, 2, 4], [1, 4]))
def test_demo(n: int, tmp_path: Path) -> None:
    """Wrong if a way were timed with what HDF5 decoded in an earlier run, or for another."""
    size = 31 if n == 1 else 32
    job = run_job(["-W", "error", "-c", DEMO], n, timeout=90, env={"TMPDIR": str(tmp_path), "COLUMNS": "200"}).check()
    assert "all 7 loads verified element by element" in job.stdout and f"saving {size}^3 float32" in job.stdout
    assert "Gloo" not in job.stdout

    table = rows(job.stdout)
    names = [row[0] for row in table]
    assert names.count("hybrid_height.nc:/air_potential_temperature") == 2
    assert names.count("E1_north_america.nc:/air_temperature") == 2
    for file in ("field.h5", "field.zarr"):
        load = next(row for row in table if row[0] == f"{file}:/density")
        assert load[3] == {1: "31 x 31 x 31", 2: "32 x 16 x 32", 4: "32 x 16 x 16"}[n]
        assert float(load[1]) > 0
    assert names.count("every process slices") == 2
    ffts = re.findall(r"its FFT, within (\S+) of NumPy's", job.stdout)
    assert len(ffts) == 2 and all(0 < float(error) < 1e-5 for error in ffts)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("shardload-demo")]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ("demo._field = fail", "the disk is full"),
        ("demo._slice = lambda path, sharding: slices(path, sharding) + 1", "differ"),
        pytest.param("demo._fft_error = lambda *_: 'nan'", "differs from numpy.fft.fftn by nan", marks=pytest.mark.thorough),
    ],
)
def test_a_demo_that_fails_ends_all_ranks_and_leaves_nothing(tmp_path: Path, spoil: str, told: str) -> None:
    """Wrong if a load or an FFT that is not right were said to be, or a rank waited for others that have failed."""
    program = f"""
import sys
from shardload.cli import demo
from shardload.cli.main import main
slices = demo._slice

def fail(*args):
    raise RuntimeError("the disk is full")

{spoil}
sys.argv[1:] = ["demo", "--size", "16"]
main()
"""
    job = run_job(["-W", "error", "-c", program], 2, timeout=60, env={"TMPDIR": str(tmp_path)})
    assert job.returncode != 0 and "verified element by element" not in job.stdout
    assert max(map(len, job.stdout.splitlines()), default=0) <= 80, "where there is no terminal"
    assert told in job.stderr
    assert not [name for name in os.listdir(tmp_path) if name.startswith("shardload-demo")]


def test_demo_without_the_climate_fields_says_what_to_install() -> None:
    """Not in copies of a process: it has imported the demo, with the fields."""
    program = "import sys; sys.modules['iris_sample_data'] = None; sys.argv[1:] = ['demo']; "
    command = ["-W", "error", "-c", f"{program}from shardload.cli.main import main; main()"]
    job = run_job(command, 2, timeout=60, preloaded=False)
    assert job.returncode == 1
    assert (job.stderr + job.stdout).count("pip install 'shardload[demo]'") == 1
