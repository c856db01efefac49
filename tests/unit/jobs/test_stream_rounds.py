"""Does a stream that reads blocks of the next round in advance do no harm to the round that is under way?"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.errors import SourceError
from shardload.jobs.streaming import plan as stream_plan
from shardload.transfer.reader import BoxReader
from tests.unit.fakes import tune

SECONDS = 20.0
N_STEPS = 24
VALUES = np.arange(N_STEPS * 6, dtype="f4").reshape(N_STEPS, 6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with `plain`, without chunks, and `short`, of which chunks are missing from step 8 on."""
    with h5py.File(tmp_path / "rounds.h5", "w") as file:
        file["plain"] = VALUES
        short = file.create_dataset("short", VALUES.shape, "f4", chunks=(1, 6), fillvalue=0)
        short[:8] = VALUES[:8]
    return tmp_path / "rounds.h5"


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = stream_plan.plan_staging
    monkeypatch.setattr(stream_plan, "plan_staging", lambda arrays, cap_nbytes, n_threads: planned(arrays, cap_nbytes, 2))


def stream(path: Path, dataset: str, **more: Any) -> Any:
    return shardload.stream(path, Mesh(np.array(jax.devices()[:1]), ("a",)), P(), dataset=dataset, **more)


def test_missing_chunks_of_a_round_that_is_only_begun(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if they counted for a round before: when that is read again, chunk by chunk, its good batches would be lost."""
    monkeypatch.setattr(stream_plan, "_ROUND_NBYTES", 4 * VALUES[0].nbytes)
    tune(monkeypatch, inline_nbytes=-1, min_chunk_nbytes=0)
    next_is_read, read = threading.Event(), BoxReader._read

    def read_watched(reader: BoxReader, staged: Any, box: Any, region: Any, *rest: Any) -> None:
        step = region.start[0]
        if step == last_of_round:
            assert next_is_read.wait(SECONDS), "nothing of the next round was read"
        read(reader, staged, box, region, *rest)
        if step > last_of_round:
            next_is_read.set()

    ds = stream(path, "short", batch=2, missing="error")
    rounds = stream_plan.EpochRounds(ds.plan, 0, 0, len(ds), 0).rounds
    before = next(k for k, each in enumerate(rounds) if (0, 8) in each.readings)
    last_of_round = rounds[before].readings[-1][1]
    assert rounds[before].readings[0][1] < 8
    monkeypatch.setattr(BoxReader, "_read", read_watched)
    given = 0
    with pytest.raises(SourceError, match=r"needed for sample 0 of batch 4 \(step 8,") as caught, iter(ds) as batches:
        for batch in batches:
            np.testing.assert_array_equal(batch, VALUES[2 * given : 2 * given + 2])
            given += 1
    assert given == 4 and "(8, 0)" in str(caught.value)
