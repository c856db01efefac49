"""A rank is killed in the middle of a save or an append, or its file system hangs: what was there is whole, and what is left
names itself. The second table of `docs/design/faults.md`: each row is a job of 2 ranks (`scripts/writes.py`).
"""

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

from shardload.storage.leftovers import Leftover, find_leftover
from shardload.storage.target import temporary_of
from tests.jobs.launch import ROOT, Job, run_job
from tests.tiers import quick_ones, thorough

SCRIPT = Path(__file__).parent / "scripts" / "writes.py"
VALUES = np.arange(9 * 8 * 5, dtype="float32").reshape(9, 8, 5)
SAVES = ["put", "finish", "read back", "commit"]


def write(folder: Path, what: str, phase: str) -> Job:
    """A save or an append, in which one rank is killed (or hangs) when it comes to a phase."""
    return run_job([SCRIPT, folder, what, phase], 2, timeout=240, env={"PYTHONPATH": str(ROOT)})


def old_file_and_rest(folder: Path) -> list[str]:
    """What a save left beside the old file, which is whole."""
    with h5py.File(folder / "out.h5") as file:
        assert list(file) == ["old"]
        values = file["old"][...]
    np.testing.assert_array_equal(values, np.arange(values.size, dtype="float32").reshape(values.shape))
    found = sorted(path.name for path in folder.iterdir() if path.name != "out.h5")
    for name in found:
        assert temporary_of(str(folder / name)) == (str(folder / "out.h5"), "unfinished"), name
    return found


def make_store(path: Path) -> None:
    """Five rows in chunks of two, as zarr-python makes them."""
    root: Any = zarr.open_group(str(path), mode="w")
    root.create_array("rho", data=VALUES[:5], chunks=(2, 3, 5), dimension_names=("time", "y", "x"))
    root.create_array("time", data=np.arange(5.0), chunks=(3,), dimension_names=("time",))
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        zarr.consolidate_metadata(str(path))


def make_file(path: Path) -> None:
    """The same, as h5py makes them."""
    with h5py.File(path, "w") as file:
        file.create_dataset("rho", data=VALUES[:5], chunks=(2, 3, 5), maxshape=(None, 8, 5), compression="gzip")
        file.create_dataset("time", data=np.arange(5.0), chunks=(3,), maxshape=(None,)).make_scale("time")
        file["rho"].dims[0].attach_scale(file["time"])
        for name in ("rho", "time"):
            file[name].dims[0].label = "time"


def lengths(path: Path) -> tuple[int, int, int]:
    """Rows of rho, of time, and of both in the consolidated metadata; each has its values."""
    rho, time = (np.asarray(zarr.open_array(str(path / name), mode="r")[...]) for name in ("rho", "time"))
    np.testing.assert_array_equal(rho, VALUES[: len(rho)])
    np.testing.assert_array_equal(time, np.arange(float(len(time))))
    with xarray.open_zarr(path, decode_times=False) as found:
        np.testing.assert_array_equal(found.rho.values, VALUES[: len(found.time)])
        np.testing.assert_array_equal(found.time.values, np.arange(float(len(found.time))))
        return len(rho), len(time), len(found.time)


def leftovers(path: Path) -> list[Leftover]:
    """What is left beside a store or a file, each of which says whose it is."""
    left = {one.name: find_leftover(str(one)) for one in path.parent.iterdir() if one != path}
    assert all(one is not None and one.target == str(path) and not one.is_whole for one in left.values()), left
    return sorted((one for one in left.values() if one is not None), key=lambda one: one.kind)


def killed(folder: Path, what: str, phase: str) -> None:
    job = write(folder, what, phase)
    assert job.returncode != 0, job.tail()
    assert "Traceback" not in job.stderr, job.tail()


@pytest.mark.parametrize("phase", thorough(SAVES, ["put", "read back"]))
def test_a_save_that_is_killed(tmp_path: Path, phase: str) -> None:
    """Wrong if the name led to half a file, or to none, or what was left could be taken for a file before it was whole."""
    killed(tmp_path, "save", phase)
    (name,) = old_file_and_rest(tmp_path)
    assert h5py.is_hdf5(tmp_path / name) == (phase in ("read back", "commit"))


def test_a_file_system_that_hangs(tmp_path: Path) -> None:
    """Wrong if a rank waited for ever for a thread that writes, or the error did not say which rank writes what."""
    job = write(tmp_path, "save", "hang")
    said = [line for lines in job.said() for line in lines]
    assert {one["rank"] for one in said} == {0, 1}, job.tail()
    assert {one["type"] for one in said} == {"StallError"}
    assert len({one["text"] for one in said}) == 1
    assert "rank 1 is writing [" in said[0]["text"] and "'/new'" in said[0]["text"], said
    assert old_file_and_rest(tmp_path) == []


STATES = [
    ("put", (5, 5, 5)),
    ("read back", (5, 5, 5)),
    ("first new chunk", (5, 5, 5)),
    ("metadata", (5, 5, 5)),
    ("second metadata", (9, 5, 5)),
    ("consolidated", (9, 9, 5)),
]


@pytest.mark.parametrize(("phase", "expected"), quick_ones(STATES, STATES[1], STATES[3], STATES[5]))
def test_an_append_that_is_killed(tmp_path: Path, phase: str, expected: tuple[int, int, int]) -> None:
    """Wrong if a reader saw a row without its values, the old rows changed, or the next append did not know of this one."""
    path = tmp_path / "run.zarr"
    make_store(path)
    killed(tmp_path, "append", phase)
    assert lengths(path) == expected
    assert [one.kind for one in leftovers(path)] in (["appended", "appending"], ["appending", "unfinished"])


@pytest.mark.parametrize("what", thorough(["append", "replace"], ["append"]))
def test_an_append_to_a_file_that_is_killed(tmp_path: Path, what: str) -> None:
    """In the middle of the last writes. Wrong if the next one that opens the file did not find all rows, or h5py found some;
    or, where rows are replaced (`at`), old values among the new ones.

    tests/unit/formats/test_hdf5_growth.py looks at every state of the file; here a real process ends.
    """
    path, expected = tmp_path / "run.h5", VALUES.copy()
    if what == "replace":
        expected[3:] += 1000
    make_file(path)
    killed(tmp_path, what, "changes")
    assert not h5py.is_hdf5(path)
    assert [one.kind for one in leftovers(path)] == ["appending", "changes"]
    told = run_job(["-m", "shardload", "info", path], 1, timeout=240, env={"PYTHONPATH": str(ROOT)})
    assert told.returncode == 0 and "9 x 8 x 5" in told.stdout, told.tail()
    assert sorted(os.listdir(tmp_path)) == ["run.h5", "run.h5.appending"]
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["rho"][...], expected)
        np.testing.assert_array_equal(file["time"][...], np.arange(9.0))


@pytest.mark.thorough
@pytest.mark.parametrize("phase", ["put", "read back"])
def test_rows_that_a_killed_append_would_have_replaced(tmp_path: Path, phase: str) -> None:
    """Wrong if values of the new rows were written over old ones before all of them are there."""
    path = tmp_path / "run.h5"
    make_file(path)
    killed(tmp_path, "replace", phase)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["rho"][...], VALUES[:5])
        np.testing.assert_array_equal(file["time"][...], np.arange(5.0))
