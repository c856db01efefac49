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
from shardload.formats.hdf5.source import Hdf5Source
from shardload.jobs.streaming import plan as stream_plan
from shardload.transfer.reader import BoxReader, SourceReader
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


def test_a_library_reads_for_one_round_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if each round had a lock of its own: the second one begins while a thread reads the only block of the first.

    A source is promised one thread at a time. What it noticed in one call, such as missing chunks, would be lost to the other.
    """
    monkeypatch.setattr(stream_plan, "_ROUND_NBYTES", 1)
    read, start = Hdf5Source.read_into, SourceReader.start
    is_called, next_is_begun, readers, overlaps = threading.Lock(), threading.Event(), set[SourceReader](), list[Any]()

    def read_watched(source: Hdf5Source, region: Any, out: Any) -> None:
        if not is_called.acquire(blocking=False):
            overlaps.append(region)
            return read(source, region, out)
        try:
            assert next_is_begun.wait(SECONDS), "the next round was not begun"
            return read(source, region, out)
        finally:
            is_called.release()

    def start_watched(reader: SourceReader, block: Any) -> Any:
        if not readers:
            reader._inline_nbytes = -1  # in a thread of its own; later ones are small enough to be read at once
        staged = start(reader, block)
        readers.add(reader)
        if len(readers) > 1:
            next_is_begun.set()
        return staged

    ds = stream(path, "plain", batch=1)
    monkeypatch.setattr(Hdf5Source, "read_into", read_watched)
    monkeypatch.setattr(SourceReader, "start", start_watched)
    with iter(ds) as batches:
        for step, batch in enumerate(batches):
            np.testing.assert_array_equal(batch, VALUES[step : step + 1])
    assert step == N_STEPS - 1 and not overlaps


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
    rounds = stream_plan.EpochRounds(ds.plan, 0, 0, len(ds), 0).rounds()
    before = next(k for k, each in enumerate(rounds) if 8 in each.readings[0])
    last_of_round = rounds[before].readings[0][-1]
    assert rounds[before].readings[0][0] < 8
    monkeypatch.setattr(BoxReader, "_read", read_watched)
    given = 0
    with pytest.raises(SourceError, match=r"needed for sample 0 of batch 4 \(step 8,") as caught, iter(ds) as batches:
        for batch in batches:
            np.testing.assert_array_equal(batch, VALUES[2 * given : 2 * given + 2])
            given += 1
    assert given == 4 and "(8, 0)" in str(caught.value)


def test_an_epoch_begins_while_the_last_round_of_the_one_before_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if it waited for the end of that, and then from a store for its first chunk; or if rounds of two epochs were mixed
    up.
    """
    monkeypatch.setattr(stream_plan, "_ROUND_NBYTES", 4 * VALUES[0].nbytes)
    tune(monkeypatch, inline_nbytes=-1, min_chunk_nbytes=0)
    next_is_begun, read, epochs_begun = threading.Event(), BoxReader._read, list[int]()

    def read_watched(reader: BoxReader, staged: Any, box: Any, region: Any, *rest: Any) -> None:
        step = region.start[0]
        if step == 0:
            epochs_begun.append(step)
            if len(epochs_begun) == 2:
                next_is_begun.set()
        if step == 7 and len(epochs_begun) == 1:
            assert next_is_begun.wait(SECONDS), "nothing of the next epoch was begun"
        read(reader, staged, box, region, *rest)

    ds = stream(path, "short", batch=2, select=slice(0, 8), epochs=3)
    monkeypatch.setattr(BoxReader, "_read", read_watched)
    with iter(ds) as batches:
        given = [np.asarray(batch) for batch in batches]
    np.testing.assert_array_equal(np.concatenate(given), np.concatenate([VALUES[:8]] * 3))


def test_one_epoch_is_planned_ahead_and_none_before_the_first_round(path: Path) -> None:
    """Wrong if a stream from a store planned as many short epochs as it fetches rounds: the first batch would wait for them."""
    reader = stream(path, "plain", batch=8, epochs=None, prefetch=0)._make_reader(0, 0)
    reader._n_fetched = 8
    reader.begin()
    for n_planned in (1, 2, 3):  # each epoch is one round
        assert reader.first_batch_of_next_round() is not None
        assert reader._epochs[-1].epoch == n_planned - 1
        reader.read_round()
    reader.close()
