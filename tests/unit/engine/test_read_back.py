"""Is what another rank has written compared chunk by chunk, in little memory?"""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np

from shardload.engine.read_back import N_FIELDS, ReadBack
from shardload.formats.sink import Ticket


def test_chunks_that_wait_take_little_more_than_their_rows() -> None:
    """Wrong if an object were kept for each chunk of the file: of a million chunks that was more than most caps on memory."""
    rows = np.zeros((20_000, N_FIELDS), dtype=np.int64)
    rows[:, 1], rows[:, 3] = np.random.default_rng(0).permutation(len(rows)), 1 << 20
    sink: Any = SimpleNamespace(stored=lambda _: None, arrays={})
    tracemalloc.start()
    try:
        tasks = list(ReadBack(sink, Ticket(""), rows.reshape(-1), 1, 0).stored())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    numbers = np.concatenate([task.args[0][:, 1] for task in tasks])  # type: ignore[attr-defined]
    assert np.array_equal(numbers, np.arange(len(rows))) and len(tasks) == 1 + len(rows) // 8
    assert most < 4 * rows.nbytes, most / rows.nbytes
