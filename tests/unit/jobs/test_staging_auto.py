"""Is `staging="auto"` what the chunks need, within the memory that a process may use?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.comm.group import Group
from shardload.errors import ConfigError
from shardload.jobs.loading.plan import staging_of

MIB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Arrays with chunks of 64 MiB, 16 MiB and 20 KiB, of which next to nothing is stored."""
    path = str(tmp_path_factory.mktemp("large") / "a.h5")
    with h5py.File(path, "w") as file:
        for name, chunks in (("large", (1, 4096, 4096)), ("middle", (1, 2048, 2048)), ("small", (1, 64, 80))):
            file.create_dataset(name, (2, *chunks[1:]), "f4", chunks=chunks, compression="gzip")
        file["large"][0, 0, :3] = 1, 2, 3
    return path


def with_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """A process that may use so much."""
    real = Group.machine.fget
    monkeypatch.setattr(Group, "machine", property(lambda group: replace(real(group), memory_nbytes=nbytes, n_threads=2)))


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("a",))


def plan(path: str, name: Any, **more: Any) -> Any:
    return shardload.plan(path, mesh(), P("a"), dataset=name, missing="fill", **more)


def test_it_stays_within_a_quarter_of_the_memory(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 4 * 400 * MIB)
    assert plan(path, "large").staging_nbytes == 400 * MIB
    x = shardload.load(path, mesh(), P("a"), dataset="large", missing="fill")
    with h5py.File(path) as file:
        assert np.array_equal(x, file["large"][...])  # 128 MiB: `assert_array_equal` would look for NaN in them, too


def test_an_error_only_where_that_does_not_do(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how much there is, how much is needed, and what to do."""
    with_memory(monkeypatch, 4 * 319 * MIB)
    says = "takes 320.0 MiB (the chunk as stored, as decompressed, as decoded, as read and as sent), but staging is 'auto'"
    with pytest.raises(ConfigError, match=re.escape(f"{says}, at most 319.0 MiB")) as caught:
        plan(path, "large")
    assert "Start fewer processes on a node, or pass staging='320MiB' or more" in str(caught.value)
    with_memory(monkeypatch, 100 * MIB)
    assert plan(path, "small").staging_nbytes == 256 * MIB, "what files with small chunks always got"
    assert plan(path, "large", staging="320MiB").staging_nbytes == 320 * MIB, "who asks for it knows better"


def test_several_arrays_share_the_largest(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the plan of the small one said that its chunks need so much."""
    with_memory(monkeypatch, 1 << 40)
    both = plan(path, {"a": "small", "b": "large"})
    assert [one.staging_nbytes // MIB for one in both.leaves] == [704, 704]
    assert both.staging_nbytes == 704 * MIB and staging_of(both.leaves[:1])
    assert ["because of chunks" in " ".join(str(one).split()) for one in both.leaves] == [False, True]


def test_what_fits_alone_and_not_together_gets_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_arrays_that_fit_alone_but_not_together`, which asks for a cap, and is refused."""
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("wide", (13 * MIB,), "f4", chunks=(13 * MIB,))
        file.create_dataset("cast", (16 * MIB,), "u1", chunks=(16 * MIB,))
    wide, cast, both = (
        shardload.plan(tmp_path / "b.h5", AbstractMesh((1,), ("a",)), P("a"), dataset=d, dtype="f4")
        for d in ("wide", "cast", {"w": "wide", "c": "cast"})
    )
    assert wide.staging_nbytes >= 256 * MIB and cast.staging_nbytes == 256 * MIB
    assert both.staging_nbytes >= max(wide.staging_nbytes, cast.staging_nbytes)
    used = both.leaves[0]._layout
    assert used is not None and {one.staging_nbytes for one in both.leaves} == {both.staging_nbytes}


def test_a_plan_without_a_job_says_what_may_be_used(path: str) -> None:
    """On a login node memory and cores of the job's nodes are not known. Wrong if it said what a rank with one core takes."""
    found = shardload.plan(path, AbstractMesh((64,), ("a",)), P(None, "a"), dataset="large")
    assert found.staging_nbytes == (3 + 2 + 4 * 3) * 64 * MIB, "buffers, and scratch memory of four threads"


def test_requests_of_a_save_to_a_store_fit_into_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if there were 16 for each cap: what was read back took twice a cap of 32 MiB, where chunks are not compressed."""
    pytest.importorskip("obstore")
    with_memory(monkeypatch, 1 << 40)
    x = jax.device_put(np.zeros((8, 256, 1024), "f4"))
    for staging, n_threads in (("8MiB", 2), ("32MiB", 8), ("1GiB", 16)):
        plan = shardload.plan_save("s3://b/a.zarr", x, staging=staging, chunks=(1, 256, 1024), compression=None)
        assert plan.n_threads == n_threads
