"""Is a save in the background the same as any, while the program changes its arrays, loads, and saves again?"""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, VerifyError
from shardload.engine.file_target import FileTarget
from tests.mpi.support import check, mesh_of, on_disk, on_root, put, same_error
from tests.unit.files import stored_in, write_hdf5

pytestmark = pytest.mark.mpi(min_size=2)
SPEC = P(("a", "b"))

VALUES = np.arange(24 * 10 * 6, dtype="f4").reshape(24, 10, 6)


def made(mesh: Mesh, values: np.ndarray[Any, Any] = VALUES) -> jax.Array:
    """`values` on all devices, cut along the first axis."""
    return put(values, mesh, SPEC)


@pytest.mark.parametrize("suffix", (".h5", ".zarr"))
def test_the_values_of_the_call_are_saved(comm: Any, shared_tmp_path: Path, suffix: str) -> None:
    """Also if the arrays are donated to the next step, or deleted, and if other calls go on beside it."""
    mesh, path = mesh_of(), shared_tmp_path / f"out{suffix}"
    on_root(comm, lambda: write_hdf5(shared_tmp_path / "in.h5", {"x": VALUES}))
    x, small = made(mesh), np.full(3, 7.0)
    save = shardload.save(path, {"x": x, "small": small}, chunks={"x": (1, 10, 6), "small": (3,)}, background=True)
    small[:] = 0
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None
    loaded = shardload.load(shared_tmp_path / "in.h5", mesh, P(None, "a"))
    report = save.wait()
    assert (report.n_arrays, report.n_chunks, report.nbytes) == (2, 25, VALUES.nbytes + 24)
    assert save.is_done and save.wait() is report
    check(loaded, VALUES, mesh, P(None, "a"))
    check(y, VALUES + 1, mesh, SPEC)
    np.testing.assert_array_equal(stored_in(path, "x"), VALUES)
    np.testing.assert_array_equal(stored_in(path, "small"), np.full(3, 7.0))


def test_the_next_save_waits(comm: Any, shared_tmp_path: Path) -> None:
    """Two saves to one name: the second one replaces the first, never the other way round. An append finds the file."""
    mesh, path = mesh_of(), shared_tmp_path / "out.h5"
    dims = {"x": ("time", "y", "z")}
    first = shardload.save(path, {"x": made(mesh)}, dims=dims, unlimited="time", background=True)
    shardload.append(path, {"x": made(mesh, VALUES + 5)}, dim="time")
    assert first.is_done
    np.testing.assert_array_equal(stored_in(path, "x"), np.concatenate([VALUES, VALUES + 5]))
    second = shardload.save(path, {"x": made(mesh)}, mode="w", background=True)
    shardload.save(path, {"x": made(mesh, VALUES + 7)}, mode="w")
    assert second.is_done
    np.testing.assert_array_equal(stored_in(path, "x"), VALUES + 7)


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What the thread of a save waits for before it makes the file."""
    event, begin = threading.Event(), FileTarget.begin

    def begin_later(target: FileTarget) -> None:
        event.wait()
        begin(target)

    monkeypatch.setattr(FileTarget, "begin", begin_later)
    return event


def test_the_program_goes_to_another_folder(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> None:
    """Wrong if the file came into the folder in which the program is when the thread gets there."""
    there, elsewhere = shared_tmp_path / "there", shared_tmp_path / "elsewhere"
    on_root(comm, lambda: [there.mkdir(), elsewhere.mkdir()][0])
    monkeypatch.chdir(there)
    save = shardload.save("out.h5", {"x": made(mesh_of())}, background=True)
    monkeypatch.chdir(elsewhere)
    go_on.set()
    save.wait()
    assert on_disk(comm, there) == ["out.h5"] and on_disk(comm, elsewhere) == []


def test_the_program_changes_attributes(comm: Any, shared_tmp_path: Path, go_on: threading.Event) -> None:
    """Wrong if the file had what the program has written into them since."""
    path, levels, notes = shared_tmp_path / "out.h5", np.arange(3.0), [1, 2]
    attrs = {"x": {"levels": levels}, "/": {"notes": notes}}
    save = shardload.save(path, {"x": made(mesh_of())}, attrs=attrs, background=True)
    levels[...], notes[0] = -1, 7
    go_on.set()
    save.wait()
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["x"].attrs["levels"], np.arange(3.0))
        np.testing.assert_array_equal(file.attrs["notes"], [1, 2])


def unequal(mesh: Mesh) -> jax.Array:
    """An array of which each device has another replica."""
    sharding = NamedSharding(mesh, P())
    shards = [jax.device_put(np.full(4, device.id, "f4"), device) for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays((4,), sharding, shards)


def test_an_error_is_raised_once_on_all_ranks(comm: Any, shared_tmp_path: Path) -> None:
    """By `wait`, or else by the next save, which writes nothing. What had the name before stays."""
    mesh, path = mesh_of(), shared_tmp_path / "out.h5"
    on_root(comm, lambda: path.write_bytes(b"old"))
    save = shardload.save(path, {"x": unequal(mesh)}, mode="w", background=True)
    same_error(comm, save.wait, VerifyError)
    save = shardload.save(path, {"x": unequal(mesh)}, mode="w", background=True)
    same_error(comm, lambda: shardload.save(shared_tmp_path / "other.h5", {"x": made(mesh)}), VerifyError)
    assert "failed" in repr(save)
    assert on_disk(comm, shared_tmp_path) == ["out.h5"] and path.read_bytes() == b"old"
    shardload.save(shared_tmp_path / "other.h5", {"x": made(mesh)})


def test_wrong_arguments_are_an_error_of_the_call(comm: Any, shared_tmp_path: Path) -> None:
    """At once, not by `wait`."""
    mesh, path = mesh_of(), shared_tmp_path / "out.h5"
    for wrong in ({"chunks": (1,)}, {"background": "yes"}, {"compression": "none such"}):
        same_error(comm, lambda: shardload.save(path, {"x": made(mesh)}, **{"background": True} | wrong), ConfigError)  # noqa: B023
    assert on_disk(comm, shared_tmp_path) == []
