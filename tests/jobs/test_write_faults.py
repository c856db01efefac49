"""A rank is killed in the middle of a save or an append, or its file system hangs: what was there is whole, and what is left
names itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.jobs.launch import ROOT, run_job
from tests.jobs.write_faults import SAVES, VALUES, leftovers, lengths, make_file, make_store, old_file_and_rest, write
from tests.tiers import quick_ones, thorough


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
