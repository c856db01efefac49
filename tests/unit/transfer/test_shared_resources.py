"""Can readers share threads, memory and buffers without getting in each other's way, and can one that hangs be left?"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shardload.errors import StallError
from shardload.planning.region import Region
from shardload.transfer.buffers import Resources, Slots
from tests.unit.fakes import TABLE, FakeSource, fetch, piece_of, reader_of, rows, tune, values_of, whole


@pytest.fixture(autouse=True)
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, min_chunk_nbytes=1, inline_nbytes=-1)


class Gate:
    """Holds up each read of a source until it is opened."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    def __call__(self, region: Region) -> None:
        self.begun.set()
        assert self.opened.wait(20)


def test_a_source_is_read_by_one_thread_at_a_time_and_two_sources_by_two() -> None:
    """Wrong if the shared pool called one source from two threads, or made one array wait for the library of another.

    `FakeSource` itself refuses a second thread.
    """
    meeting = threading.Barrier(2)

    def meet(region: Region) -> None:
        meeting.wait(20)

    first, second = (FakeSource(table, None, meet) for table in (TABLE, TABLE + 100))  # type: ignore[arg-type]
    resources = Resources(Slots(4, 1 << 10), n_threads=4)
    with resources, reader_of(first, resources=resources) as one, reader_of(second, resources=resources) as other:
        readings = [reader.start(whole(rows(k, k + 2), rank=1)) for k in (0, 4) for reader in (one, other)]
        blocks = [reading.result() for reading in readings]
    for block, table in zip(blocks, (TABLE, TABLE + 100) * 2, strict=True):
        np.testing.assert_array_equal(values_of(block, block.block.region, "f4"), table[block.block.region.slices()])
    assert first.reads == second.reads == [rows(0, 2), rows(4, 6)], "in the order in which they were started"


def test_leaving_one_reader_waits_for_its_own_reads_and_leaves_the_others_alone() -> None:
    """Wrong if a source could be closed while a thread reads it, if what nobody waits for were read all the same, or if the end
    of one array cancelled the reads of another.
    """
    gates = Gate(), Gate()
    sources = [FakeSource(TABLE, None, gate) for gate in gates]  # type: ignore[arg-type]
    resources = Resources(Slots(4, 1 << 10), n_threads=3)
    with resources:
        other = reader_of(sources[1], resources=resources)
        with reader_of(sources[0], resources=resources) as one:
            reads = [one.start(whole(rows(k, k + 2), rank=1)) for k in (0, 2)]
            staying = other.start(whole(rows(0, 2), rank=1))
            waiting = one.start(whole(rows(4, 6), rank=1))
            assert all(gate.begun.wait(20) for gate in gates)
            waiting.tasks[0].add_done_callback(lambda _: gates[0].opened.set())  # it is cancelled before the others have ended
        assert all(read.done() and read.result().tiles for read in reads)
        assert waiting.tasks[0].cancelled() and len(sources[0].reads) == 2
        assert not staying.done()
        gates[1].opened.set()
        assert staying.result().tiles


# --- what a rank that waits asks


@pytest.mark.parametrize("inline", [-1, 1 << 14], ids=["in threads", "at once"])
def test_what_is_being_read_can_be_asked_for(inline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, inline_nbytes=inline)
    seen: list[tuple[int, str]] = []
    source = FakeSource(TABLE, (2, 4), lambda region: seen.append(reader.activity()))  # type: ignore[arg-type, func-returns-value]
    with reader_of(source, {0: piece_of(rows(0, 8))}) as reader:
        assert reader.activity() == (0, "")
        fetch(reader, whole(rows(2, 4)))
        fetch(reader, whole(rows(2, 6)))
        assert reader.activity() == (2, "")
    assert seen == [(0, "reading chunk (1, 0) of '/rho' in 'f.h5'"), (1, "reading elements [2:6, 0:4] of '/rho' in 'f.h5'")]


def test_after_a_stall_a_read_that_never_ends_is_left_behind() -> None:
    """Wrong if leaving the reader waited for the thread that is held up: then no rank could raise."""
    source = FakeSource(TABLE, (2, 4), gate := Gate())  # type: ignore[arg-type]
    with pytest.raises(StallError), reader_of(source, {0: piece_of(rows(0, 8))}) as reader:
        reading = reader.start(whole(rows(2, 4)))
        assert gate.begun.wait(20)
        raise StallError("nothing has moved")
    assert not reading.done()
    gate.opened.set()
    reading.result()
