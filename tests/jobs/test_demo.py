"""The demo, as a newcomer runs it, on a small field."""

from __future__ import annotations

import os
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

from shardload.cli import demo
from tests.jobs.launch import run_job

DEMO = ["-W", "error", "-m", "shardload", "demo", "--size", "32"]


def rows(out: str) -> list[list[str]]:
    """Cells of all table rows, which have two spaces or more between them where there are columns enough."""
    return [re.split("  +", line.strip()) for line in out.splitlines() if "  " in line.strip()]


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.thorough), 4])
def test_demo(n: int, tmp_path: Path) -> None:
    job = run_job(DEMO, n, timeout=300, env={"TMPDIR": str(tmp_path), "COLUMNS": "200"}).check()
    assert "all 7 loads verified element by element" in job.stdout
    assert "Gloo" not in job.stdout

    table = rows(job.stdout)
    names = [row[0] for row in table]
    assert names.count("hybrid_height.nc:/air_potential_temperature") == 2
    assert names.count("E1_north_america.nc:/air_temperature") == 2
    for file in ("field.h5", "field.zarr"):
        assert names.count(file) == 3  # shardload and the two usual ways
        load = next(row for row in table if row[0] == f"{file}:/density")
        assert (load[1], load[-1]) == ("32 x 32 x 32", "0")
        assert load[3] == {1: "32 x 32 x 32", 4: "32 x 16 x 16"}[n]
        assert float(load[-3]) > 0
    ffts = [row for row in table if "FFT" in row[0]]
    assert len(ffts) == 2
    assert all(0 < float(row[-1]) < 1e-5 for row in ffts)
    if n == 4:
        assert any("15+1 x 100 x 100" in row for row in table)
        slices = [row for row in table if row[1] == "every process slices"]
        assert [row[-1] for row in slices] == ["4.00", "4.00"]  # each decodes all planes
    assert not [name for name in os.listdir(tmp_path) if name.startswith("shardload-demo")]


NOTHING_OPEN = """
import sys
import h5py
from shardload.cli import demo

time = demo._Demo.median_seconds

def check():
    n = h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET)
    if n:
        raise RuntimeError(f"{n} files or datasets are open when a load begins")

demo._Demo.median_seconds = lambda self, load: time(self, lambda: (check(), load())[1])
sys.exit(demo.run(15))
"""


def test_demo_of_a_size_that_the_mesh_does_not_divide_and_nothing_is_open_when_a_load_begins() -> None:
    """Wrong if a way were timed with what HDF5 decoded in an earlier run, or for another: it keeps chunks of what is open."""
    job = run_job(["-W", "error", "-c", NOTHING_OPEN], 2, timeout=300).check()
    assert "16 x 16 x 16" in job.stdout
    assert max(map(len, job.stdout.splitlines())) <= 80, "where there is no terminal"
    assert "E1_north_america.nc:/air_temperature" in job.stdout and "rank 0 reads, comm.scatter" in job.stdout
    peers = [row for row in rows(job.stdout) if row[1] in ("rank 0 reads, comm.scatter", "every process slices")]
    assert [row[-1] for row in peers] == ["1.00", "2.00", "1.00", "2.00"]


def test_chunk_reads_are_counted_and_not_computed(tmp_path: Path) -> None:
    """Wrong if what a library gives from memory were counted as decoded: the second slice here, by HDF5."""
    values = np.arange(4 * 6 * 6, dtype="f4").reshape(4, 6, 6)
    with h5py.File(tmp_path / "field.h5", "w") as file:
        file.create_dataset("density", data=values, chunks=(1, 6, 6), compression="gzip")
    group = zarr.create_group(tmp_path / "field.zarr", zarr_format=3)
    group.create_array("density", data=values, chunks=(1, 6, 6))
    for name, twice in (("field.h5", 4), ("field.zarr", 8)):
        stored = demo._Stored(tmp_path / name, "density")
        assert (stored.shape, stored.n_chunks) == ((4, 6, 6), 4)
        fetched: list[object] = []
        with stored.opened(fetched) as array:
            np.testing.assert_array_equal(array[:, :3], values[:, :3])
            assert len(fetched) == 4
            np.testing.assert_array_equal(array[:, 3:], values[:, 3:])
        assert len(fetched) == twice
        with stored.opened(fetched) as array:
            array[1:2]
        assert len(fetched) == twice + 1


def test_demo_ends_all_ranks_and_leaves_nothing_when_one_fails(tmp_path: Path) -> None:
    program = """
import sys
from shardload.cli import demo

def fail(*args):
    raise RuntimeError("the disk is full")

demo._write_field = fail
sys.exit(demo.run(16))
"""
    job = run_job(["-W", "error", "-c", program], 2, timeout=240, env={"TMPDIR": str(tmp_path)})
    assert job.returncode != 0
    assert "the disk is full" in job.stderr + job.stdout
    assert not [name for name in os.listdir(tmp_path) if name.startswith("shardload-demo")]


def test_demo_without_the_climate_fields_says_what_to_install() -> None:
    program = "import sys; sys.modules['iris_sample_data'] = None; from shardload.cli import demo; sys.exit(demo.run(16))"
    job = run_job(["-W", "error", "-c", program], 2, timeout=240)
    assert job.returncode == 1
    assert (job.stderr + job.stdout).count("pip install 'shardload[demo]'") == 1
