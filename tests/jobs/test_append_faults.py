"""A rank is killed in the middle of an append: what it grows has its old length and values, and what is left names itself."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray
import zarr

from shardload.storage.leftovers import find_leftover
from tests.jobs.launch import ROOT, run_job
from tests.tiers import quick_ones

SCRIPT = Path(__file__).parent / "scripts" / "appends.py"
VALUES = np.arange(9 * 8 * 5, dtype="float32").reshape(9, 8, 5)


def make(path: Path) -> None:
    """Five rows in chunks of two, as zarr-python makes them."""
    root: Any = zarr.open_group(str(path), mode="w")
    root.create_array("rho", data=VALUES[:5], chunks=(2, 3, 5), dimension_names=("time", "y", "x"))
    root.create_array("time", data=np.arange(5.0), chunks=(3,), dimension_names=("time",))
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        zarr.consolidate_metadata(str(path))


def lengths(path: Path) -> tuple[int, int, int]:
    """Rows of rho, of time, and of both in the consolidated metadata; each has its values."""
    rho, time = (np.asarray(zarr.open_array(str(path / name), mode="r")[...]) for name in ("rho", "time"))
    np.testing.assert_array_equal(rho, VALUES[: len(rho)])
    np.testing.assert_array_equal(time, np.arange(float(len(time))))
    with xarray.open_zarr(path, decode_times=False) as found:
        np.testing.assert_array_equal(found.rho.values, VALUES[: len(found.time)])
        np.testing.assert_array_equal(found.time.values, np.arange(float(len(found.time))))
        return len(rho), len(time), len(found.time)


STATES = [
    ("put", (5, 5, 5)),
    ("read back", (5, 5, 5)),
    ("first new chunk", (5, 5, 5)),
    ("metadata", (5, 5, 5)),
    ("second metadata", (9, 5, 5)),
    ("consolidated", (9, 9, 5)),
]


@pytest.mark.parametrize(("phase", "expected"), quick_ones(STATES, STATES[1], STATES[3], STATES[5]))
def test_a_rank_that_is_killed(tmp_path: Path, phase: str, expected: tuple[int, int, int]) -> None:
    """Wrong if a reader saw a row without its values, the old rows changed, or the next append did not know of this one."""
    path = tmp_path / "run.zarr"
    make(path)
    job = run_job([SCRIPT, tmp_path, phase], 2, timeout=240, env={"PYTHONPATH": str(ROOT)})
    assert job.returncode != 0, job.tail()
    assert "Traceback" not in job.stderr, job.tail()
    assert lengths(path) == expected
    left = {one.name: find_leftover(str(one)) for one in tmp_path.iterdir() if one != path}
    assert sorted(one.what for one in left.values() if one) in (["appended", "appending"], ["appending", "unfinished"])
    assert all(one is not None and one.target == str(path) and not one.is_whole for one in left.values()), left


def test_a_rank_that_is_killed_at_a_file(tmp_path: Path) -> None:
    """In the middle of the last writes. Wrong if the next one that opens the file did not find all rows, or h5py found some.

    tests/unit/formats/test_hdf5_growth.py looks at every state of the file; here a real process ends.
    """
    path = tmp_path / "run.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("rho", data=VALUES[:5], chunks=(2, 3, 5), maxshape=(None, 8, 5), compression="gzip")
        file.create_dataset("time", data=np.arange(5.0), chunks=(3,), maxshape=(None,)).make_scale("time")
        for name in ("rho", "time"):
            file[name].dims[0].label = "time"
    job = run_job([SCRIPT, tmp_path, "changes"], 2, timeout=240, env={"PYTHONPATH": str(ROOT)})
    assert job.returncode != 0, job.tail()
    assert "Traceback" not in job.stderr, job.tail()
    assert not h5py.is_hdf5(path)
    left = {one.name: find_leftover(str(one)) for one in tmp_path.iterdir() if one != path}
    assert sorted(one.what for one in left.values() if one) == ["appending", "changes"]
    assert all(one is not None and one.target == str(path) and not one.is_whole for one in left.values()), left
    told = run_job(["-m", "shardload", "info", path], 1, timeout=240, env={"PYTHONPATH": str(ROOT)})
    assert told.returncode == 0 and "9 x 8 x 5" in told.stdout, told.tail()
    assert sorted(os.listdir(tmp_path)) == ["run.h5", "run.h5.appending"]
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["rho"][...], VALUES)
        np.testing.assert_array_equal(file["time"][...], np.arange(9.0))
