"""Does a rank of a stream stay under what its plan says, epoch after epoch? Counted by Python's own tracer, which NumPy tells.

Shared memory is not traced: it is counted where it is made.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import h5py
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardload
from shardload.jobs.streaming import plan
from shardload.jobs.streaming.plan import EpochRounds
from tests.mpi.support import mesh_of, on_root, peak_of, unit
from tests.tiers import quick_ones

pytestmark = pytest.mark.any_library

N_STEPS, CHUNK_STEPS, BATCH, EPOCHS = 800, 10, 8, 2
STAGING = 2 << 20
EXTRA_NBYTES = 512 << 10  # Python objects, the plan of an epoch, and what h5py makes for itself


def shape() -> tuple[int, int, int]:
    """Steps of some 32 KiB, of which all ranks have the same."""
    n = unit()
    return N_STEPS, 4 * n, -(-2048 // (n * n)) * n


@pytest.fixture(scope="module")
def path(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file whose values are the numbers of their steps."""

    def write() -> str:
        name = tmp_path_factory.mktemp("memory") / "a.h5"
        with h5py.File(name, "w") as file:
            x = file.create_dataset("x", shape(), "f4", chunks=(CHUNK_STEPS, *shape()[1:]), compression="gzip", shuffle=True)
            for step in range(0, N_STEPS, CHUNK_STEPS):
                numbers = np.arange(step, step + CHUNK_STEPS, dtype="f4")[:, None, None]
                x[step : step + CHUNK_STEPS] = np.broadcast_to(numbers, (CHUNK_STEPS, *shape()[1:]))
        return str(name)

    return str(on_root(comm, write))


OF_TWO, OF_ONE = (-1, 0), (0,)
CASES = [(None, 0, OF_TWO), (None, 2, OF_TWO), (1, 0, OF_TWO), (1, 2, OF_TWO), (None, 2, OF_ONE)]


@pytest.mark.parametrize(("shuffle", "prefetch", "window"), quick_ones(CASES, (1, 2, OF_TWO), (None, 2, OF_ONE)))
def test_peak(
    own_comm: Any, path: str, shuffle: int | None, prefetch: int, window: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """(13) Wrong if steps were kept after their last sample, a rank held more than its share, or an epoch left something.

    Without a window, steps in sequence are read into their batches: wrong if these were kept.
    """
    monkeypatch.setattr(plan, "_ROUND_NBYTES", 1)
    step_nbytes, n = int(np.prod(shape()[1:])) * 4, own_comm.size
    options = {"window": window, "batch": BATCH, "shuffle": shuffle, "pool": 96 * step_nbytes, "epochs": EPOCHS}
    ds = shardload.stream(
        path, mesh_of(), P(None, None, "a", "b"), dataset="x", staging=STAGING, prefetch=prefetch, comm=own_comm, **options
    )
    held_nbytes = max(
        each.most_held_nbytes(each.rounds()) for each in (EpochRounds(ds.plan, epoch, 0) for epoch in range(EPOCHS))
    )
    said_nbytes = held_nbytes // n + (prefetch + 1) * ds.plan.batch_nbytes // n + STAGING

    def take(n: int | None) -> None:
        with iter(ds) as batches:
            for batch in islice(batches, n):
                assert np.asarray(batch.addressable_data(0))[0, -1, 0, 0] == batches.index[0]
                del batch

    take(20)  # what is imported, compiled and kept for later is not counted
    _, most_nbytes = peak_of(partial(take, None), monkeypatch)
    assert max(own_comm.allgather(most_nbytes)) <= said_nbytes + EXTRA_NBYTES, (own_comm.allgather(most_nbytes), said_nbytes)
    assert N_STEPS * step_nbytes // n > said_nbytes + EXTRA_NBYTES, "the test could not see that an epoch's steps are kept"
