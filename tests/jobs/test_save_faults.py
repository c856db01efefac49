"""A rank is killed in the middle of a save, or its file system hangs: the old file is whole, and little is left behind."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from shardload.storage.target import temporary_of
from tests.jobs.launch import ROOT, Job, run_job
from tests.tiers import thorough

SCRIPT = Path(__file__).parent / "scripts" / "saves.py"


def save(folder: Path, phase: str) -> Job:
    return run_job([SCRIPT, folder, phase], 2, timeout=240, env={"PYTHONPATH": str(ROOT)})


def left(folder: Path) -> list[str]:
    """What a save left beside the old file, which is whole."""
    with h5py.File(folder / "out.h5") as file:
        assert list(file) == ["old"]
        values = file["old"][...]
    np.testing.assert_array_equal(values, np.arange(values.size, dtype="float32").reshape(values.shape))
    found = sorted(path.name for path in folder.iterdir() if path.name != "out.h5")
    for name in found:
        assert temporary_of(str(folder / name)) == (str(folder / "out.h5"), "unfinished"), name
    return found


@pytest.mark.parametrize("phase", thorough(["put", "finish", "read back", "commit"], ["put", "read back"]))
def test_a_rank_that_is_killed(tmp_path: Path, phase: str) -> None:
    """Wrong if the name led to half a file, or to none, or what was left could be taken for a file before it was whole."""
    job = save(tmp_path, phase)
    assert job.returncode != 0, job.tail()
    assert "Traceback" not in job.stderr, job.tail()
    (name,) = left(tmp_path)
    assert h5py.is_hdf5(tmp_path / name) == (phase in ("read back", "commit"))


def test_a_file_system_that_hangs(tmp_path: Path) -> None:
    """Wrong if a rank waited for ever for a thread that writes, or the error did not say which rank writes what."""
    job = save(tmp_path, "hang")
    said = [line for lines in job.said() for line in lines]
    assert {one["rank"] for one in said} == {0, 1}, job.tail()
    assert {one["type"] for one in said} == {"StallError"}
    assert len({one["text"] for one in said}) == 1
    assert "rank 1 is writing [" in said[0]["text"] and "'/new'" in said[0]["text"], said
    assert left(tmp_path) == []
