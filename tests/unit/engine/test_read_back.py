"""Is what another rank has written compared chunk by chunk, in little memory?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np

from shardload.engine.read_back import N_FIELDS, ReadBack, checksum_of_values
from shardload.formats.sink import Ticket
from shardload.planning.region import Region
from tests.unit.files import python_memory_below


def test_chunks_that_wait_take_little_more_than_their_rows() -> None:
    """Wrong if an object were kept for each chunk of the file: of a million chunks that was more than most caps on memory."""
    rows = np.zeros((20_000, N_FIELDS), dtype=np.int64)
    rows[:, 1], rows[:, 3] = np.random.default_rng(0).permutation(len(rows)), 1 << 20
    sink: Any = SimpleNamespace(stored=lambda _: None, arrays={})
    with python_memory_below(4 * rows.nbytes):
        tasks = list(ReadBack(sink, Ticket(""), rows.reshape(-1), 1, 0).stored())
    numbers = np.concatenate([task.args[0][:, 1] for task in tasks])  # type: ignore[attr-defined]
    assert np.array_equal(numbers, np.arange(len(rows))) and len(tasks) == 1 + len(rows) // 8


def test_one_chunk_is_decoded_without_a_list_of_all(tmp_path: Path) -> None:
    """Wrong if each rank listed the places of all chunks of the file for the one that it decodes."""
    values, n = np.arange(20_000, dtype="f4").reshape(-1, 2), 10_000
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.create_dataset("x", data=values, chunks=(1, 2))
    spec = SimpleNamespace(chunks=(1, 2), grid=(n, 1), dtype=values.dtype)
    encoder = SimpleNamespace(name="/x", spec=spec, region=lambda index: Region((index[0], 0), (index[0] + 1, 2)))
    sink: Any = SimpleNamespace(path="a.h5", stored=lambda _: None, decoding=lambda *_: None, arrays={"/x": encoder})
    row = np.array([0, 7, 0, 8, 0, checksum_of_values(values[7:8])])

    def compare() -> None:
        ReadBack(sink, Ticket(str(tmp_path / "a.h5")), row, 1, 0).compare_values(lambda: True)

    compare()  # what is imported is not counted
    with python_memory_below(1 << 20):
        compare()
