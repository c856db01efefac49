"""Do batches of a stream get to the devices while the program computes, into the memory that the sharding names?"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardload
from shardload.arrays.assemble import assemble
from tests.mpi.support import check_shards, on_root, ramp
from tests.unit.files import write_hdf5

N_STEPS, BATCH = 24, 4


def shape() -> tuple[int, int, int]:
    n = len(jax.devices())
    return N_STEPS, 2 * n, 3


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices())[::-1], ("lat",))


@pytest.fixture
def path(comm: Any, shared_tmp_path: Path) -> Path:
    def write() -> None:
        write_hdf5(shared_tmp_path / "x.h5", {"x": ramp(shape())}, chunks=(3, shape()[1], 3), compression="gzip")

    on_root(comm, write)
    return shared_tmp_path / "x.h5"


def check_batch(batch: jax.Array, index: Any) -> None:
    check_shards(batch, ramp(shape())[index])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_memory_of_the_host(path: Path, prefetch: int) -> None:
    """Wrong if batches went to the devices' own memory, from where a step would have to fetch them."""
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        pytest.skip("this release of JAX has no such memory here")
    sharding = NamedSharding(mesh(), P(None, "lat"), memory_kind="pinned_host")
    with iter(shardload.stream(path, sharding, dataset="x", batch=BATCH, prefetch=prefetch)) as batches:
        for batch in batches:
            assert batch.sharding.memory_kind == "pinned_host"
            assert {shard.data.sharding.memory_kind for shard in batch.addressable_shards} == {"pinned_host"}
            check_batch(batch, batches.index)


def test_the_next_ones_are_handed_over_while_a_step_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the transfer of a batch began when it is asked for, or in the program's thread, or all were sent at once."""
    sent: list[str] = []

    def noting(*args: Any) -> jax.Array:
        sent.append(threading.current_thread().name)
        return assemble(*args)

    monkeypatch.setattr("shardload.jobs.streaming.endpoints.assemble", noting)
    prefetch = 2
    with iter(shardload.stream(path, mesh(), P(None, "lat"), dataset="x", batch=BATCH, prefetch=prefetch)) as batches:
        for given in range(1, N_STEPS // BATCH + 1):
            check_batch(next(batches), batches.index)
            wanted = min(given + prefetch, N_STEPS // BATCH)
            end = time.monotonic() + 20
            while len(sent) < wanted and time.monotonic() < end:  # the step
                time.sleep(0.01)
            time.sleep(0.02)
            assert len(sent) == wanted
    assert set(sent) == {"shardload-stream-maker"}
