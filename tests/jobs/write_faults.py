"""What is on disk after a rank was killed in a save or an append? The second table of `docs/design/faults.md`, made anew by
``python -m tests.jobs.faults``: each row is a job of 2 ranks (`scripts/writes.py`).
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray
import zarr

from shardload.storage.leftovers import Leftover, find_leftover
from shardload.storage.target import temporary_of
from tests.jobs.launch import ROOT, Job, run_job

__all__ = ["SAVES", "VALUES", "leftovers", "lengths", "make_file", "make_store", "old_file_and_rest", "rows", "write"]

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


def rows() -> Iterator[tuple[str, str, str, str]]:
    """What was written, the phase, what is there, and what is beside it."""
    for phase in SAVES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write(folder, "save", phase)
            left = [f"unfinished{', whole' if h5py.is_hdf5(folder / one) else ''}" for one in old_file_and_rest(folder)]
            yield 'save(mode="w"), HDF5', phase, "the old file", ", ".join(left)
    for phase in ("put", "read back", "first new chunk", "metadata", "second metadata", "consolidated"):
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "run.zarr"
            make_store(path)
            write(path.parent, "append", phase)
            rho, time, both = lengths(path)
            seen = f"{both} rows of both for xarray; {rho} of `rho` and {time} of `time` for zarr"
            yield "append of 4 rows to 5, Zarr", phase, seen, ", ".join(f"{one.kind}" for one in leftovers(path))
    for phase in ("put", "read back", "changes"):
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "run.h5"
            make_file(path)
            write(path.parent, "append", phase)
            left = ", ".join(f"{one.kind}" for one in leftovers(path))
            is_broken = not h5py.is_hdf5(path)
            if is_broken:
                run_job(["-m", "shardload", "info", path], 1, timeout=240, env={"PYTHONPATH": str(ROOT)}).check()
            with h5py.File(path) as file:
                n = len(file["rho"])
                np.testing.assert_array_equal(file["rho"][...], VALUES[:n])
            seen = f"{n} rows{', after `shardload info` has completed it' if is_broken else ''}"
            yield "append of 4 rows to 5, HDF5", phase, seen, left
