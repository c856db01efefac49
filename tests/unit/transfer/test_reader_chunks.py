"""Does a rank's reader decode chunks, one or many at a time, into the right places, and say which one is damaged?"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.errors import ConfigError, PeerError, SourceError
from shardload.planning.region import Grid, Region
from shardload.planning.schedule import Block, Part, SourceLayout
from shardload.planning.selection import Selection, select_axes
from shardload.planning.tuning import Tuning
from shardload.transfer.buffers import Resources, Slots
from shardload.transfer.counters import chunk_numbers
from shardload.transfer.pieces import LocalPieces
from tests.tiers import examples
from tests.unit.brute_force import Case, cases, chunks_read
from tests.unit.fakes import (
    TABLE,
    FakeSource,
    chunked,
    failure,
    fetch,
    piece_of,
    pieces_of,
    reader_as_planned,
    reader_of,
    rows,
    tune,
    values_of,
    whole,
)

Array = np.ndarray[Any, Any]
WIDE = np.arange(96, dtype="f4").reshape(8, 12)


@pytest.fixture(autouse=True, scope="module")
def small_chunks_too_and_in_threads() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        tune(patch, min_chunk_nbytes=1, batched_chunk_nbytes=0, inline_nbytes=-1)
        yield


# --- where chunks go


def test_a_cast_that_values_do_not_fit_is_an_error_and_not_the_files() -> None:
    reader = reader_of(chunked(TABLE * 1e4, (2, 4)), {0: piece_of(rows(0, 8), "f2")}, dtype=np.dtype("f2"))
    for rank in (0, 1):
        error = failure(reader, whole(rows(4, 8), rank=rank))
        assert isinstance(error, ConfigError) and "float16 cannot hold" in str(error) and "[4:6, 0:4]" in str(error)


# --- threads


def test_as_many_chunks_at_a_time_as_there_are_threads() -> None:
    """Wrong if the threads took turns: three must be inside `fetch` at a time for any of them to go on."""
    data = np.arange(9 * 4, dtype="f4").reshape(9, 4)
    source = chunked(data, (1, 4), meet=threading.Barrier(3))
    piece = piece_of(rows(0, 5))
    with reader_of(source, {0: piece}, n_threads=3, slots=Slots(1, 9 * 64)) as reader:
        assert reader.n_ahead == 4
        block = fetch(reader, Block(rows(0, 9), (Part(rows(0, 5), 0, 0), Part(rows(5, 9), 1, 1))))
    assert len(source.stored.threads) == 3
    np.testing.assert_array_equal(piece.data, data[:5])
    np.testing.assert_array_equal(values_of(block, rows(5, 9), "f4"), data[5:])
    assert reader.counters.chunks_decoded == 9 and reader.counters.nbytes_read == data.nbytes


def test_a_read_is_done_when_all_its_chunks_are() -> None:
    """Wrong if a block left while another thread was still decoding a part of it."""
    held = threading.Event()

    def hold(index: tuple[int, ...]) -> None:
        if index == (3, 0):
            assert held.wait(20)

    source = chunked(TABLE, (2, 4), fails_to_decode=hold)
    with reader_of(source, n_threads=4) as reader:
        reading = reader.start(whole(rows(0, 8), rank=1))
        for task in reading.tasks[:3]:
            task.result(20)
        assert not reading.done()
        held.set()
        np.testing.assert_array_equal(values_of(reading.result(), rows(0, 8), "f4"), TABLE)
        assert reading.done()


# --- failures


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("where", ["fails_to_fetch", "fails_to_decode"])
@pytest.mark.parametrize("stays", [True, False])
def test_the_damaged_chunk_is_named(n_threads: int, where: str, stays: bool) -> None:
    data = np.arange(20 * 30, dtype="f4").reshape(20, 30)
    broken = ValueError("inflate failed")
    source = chunked(data, (4, 10), **{where: lambda index: broken if index == (3, 2) else None})
    selection = select_axes((slice(9, 19), slice(12, 29)), data.shape)
    region = Region.whole((10, 17))
    chunks = Grid((10, 17), (4, 10), (1, 2))
    with reader_of(source, {0: piece_of(region)}, selection=selection, chunks=chunks, n_threads=n_threads) as reader:
        error = failure(reader, whole(region, rank=0 if stays else 1))
    assert isinstance(error, SourceError) and error.__cause__ is broken
    assert (error.path, error.dataset, error.chunk, error.rank) == ("f.h5", "/rho", (3, 2), None)
    assert str(error).startswith(
        "chunk (3, 2) of '/rho' in 'f.h5' could not be read (elements [12:16, 20:29]): ValueError: inflate failed. The file may"
    )
    assert (3, 2) in source.stored.fetched and reader.counters.chunks_decoded < 6, "what failed was not decoded"


# --- what is read together


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, batched_chunk_nbytes=1 << 17)


@pytest.mark.usefixtures("batches")
def test_fewer_chunks_than_threads_are_shared_by_the_threads() -> None:
    """Wrong if one thread got all of them in one batch."""
    source = chunked(WIDE, (2, 6))
    piece = piece_of(Region((0, 0), (8, 12)))
    resources = Resources(Slots(1, 1 << 10), n_threads=3)
    with resources, reader_of(source, {0: piece}, resources=resources) as reader:
        fetch(reader, whole(Region((0, 0), (4, 12))))  # 4 chunks
        fetch(reader, whole(Region((4, 0), (6, 12))))  # 2
    assert sorted(len(box) for box in source.stored.boxes) == [1, 1, 2, 2]
    np.testing.assert_array_equal(piece.data[:6], WIDE[:6])


@pytest.mark.usefixtures("batches")
def test_a_batch_that_lies_in_the_piece_as_in_the_file_is_decoded_there() -> None:
    line = np.arange(40, dtype="i4")
    source = chunked(line, (4,))
    piece = piece_of(Region((4,), (32,)), "i4")
    with reader_of(source, {0: piece}) as reader:
        fetch(reader, whole(Region((8,), (24,))))
    assert [len(batch) for batch in source.stored.boxes] == [4]
    assert all(np.shares_memory(out, piece.data) for out in source.stored.outs)
    np.testing.assert_array_equal(piece.data[4:20], line[8:24])
    assert (piece.data[:4] == -1).all() and (piece.data[20:] == -1).all() and reader.counters.nbytes_copied == 0


@pytest.mark.usefixtures("batches")
@pytest.mark.parametrize("how", ["fails_to_fetch", "fails_to_decode"])
@pytest.mark.parametrize("bad", [(0, 0), (1, 2), (3, 3)])
def test_an_error_names_the_damaged_chunk_of_a_batch(how: str, bad: tuple[int, int]) -> None:
    source = chunked(WIDE, (2, 3), **{how: lambda index: ValueError("rotten") if index == bad else None})
    reader = reader_of(source, {0: piece_of(Region((0, 0), (8, 12)))})
    error = failure(reader, whole(Region((0, 0), (8, 12))))
    assert isinstance(error, SourceError) and error.chunk == bad and "rotten" in str(error)
    assert len(source.stored.boxes[0]) == 16 and source.stored.boxes[-1] == [bad], "read together, then one by one"


@pytest.mark.usefixtures("batches")
def test_a_copy_that_changes_is_an_error_where_checksums_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    copyto = np.copyto

    def wrong(to: Array, what: Any, **options: Any) -> None:
        copyto(to, what, **options)
        to[(-1,) * to.ndim] += 1

    source = chunked(WIDE, (2, 3))
    reader = reader_of(source, {0: piece_of(Region((0, 0), (8, 12)))}, checksums=True)
    monkeypatch.setattr("shardload.transfer.pieces.np.copyto", wrong)
    error = failure(reader, whole(Region((1, 0), (4, 12))))
    assert isinstance(error, PeerError) and "a checksum after the copy differs" in str(error) and source.stored.boxes


@pytest.mark.usefixtures("batches")
def test_out_of_memory_is_not_tried_again() -> None:
    source = chunked(WIDE, (2, 3), fails_to_fetch=lambda index: MemoryError("full"))
    error = failure(reader_of(source, {0: piece_of(Region((0, 0), (8, 12)))}), whole(Region((0, 0), (4, 12))))
    assert isinstance(error, MemoryError) and len(source.stored.fetched) == 1


# --- which chunks are missing


@pytest.mark.parametrize("select", [None, (slice(3, 6), slice(5, 9)), (slice(1, None), 7), (4, slice(2, 10), 1)])
def test_number_of_a_missing_chunk_in_the_selection(select: Any) -> None:
    shape, cells = (7, 10, 3), (2, 4, 3)
    selection = select_axes(select, shape)
    cell = tuple(cells[k] for k in selection.kept)
    chunks = Grid(selection.shape, cell, tuple(o % c for o, c in zip(selection.offset, cell, strict=True)))
    boxes = [selection.to_file(chunks.region(number)) for number in range(chunks.n_cells)]
    indices = [tuple(a // c for a, c in zip(box.start, cells, strict=True)) for box in boxes]
    assert chunk_numbers(indices, selection, cells, chunks).tolist() == list(range(chunks.n_cells))


# --- everything at once


@examples(200)
@given(
    cases(), st.booleans(), st.booleans(), st.sampled_from([0, 1, 3]), st.integers(0, 9), st.sampled_from([-1, 64]), st.data()
)
def test_all_ranks_readers_together_read_a_selection(
    case: Case, casts: bool, checksums: bool, n_threads: int, n_batch: int, inline_nbytes: int, data: st.DataObject
) -> None:
    """Parts are handed over in memory; each piece must then be its part of the selection of the file.

    Without threads the library reads. Otherwise some chunks are missing, and the next batch uses the memory of the one before.
    """
    before = tuple(p + c * data.draw(st.integers(0, 2)) for p, c in zip(case.phase, case.cell, strict=True))
    index: list[Any] = [slice(b, b + n) for b, n in zip(before, case.shape, strict=True)]
    shape = [b + n + data.draw(st.integers(0, 2)) for b, n in zip(before, case.shape, strict=True)]
    cell = list(case.cell)
    at = data.draw(st.integers(0, len(shape)))
    index.insert(at, 2)
    shape.insert(at, 4)
    cell.insert(at, 3)
    table = np.arange(math.prod(shape), dtype="i4").reshape(shape)
    grid = [-(-n // c) for n, c in zip(shape, cell, strict=True)]
    lost = data.draw(st.frozensets(st.tuples(*(st.integers(0, max(0, n - 1)) for n in grid)), max_size=3 if n_threads else 0))
    filled = table.copy()
    for chunk in lost:
        filled[tuple(slice(i * c, (i + 1) * c) for i, c in zip(chunk, cell, strict=True))] = 55
    expected = filled[tuple(index)]
    selection: Selection = select_axes(tuple(index), shape)
    plan = case.plan()
    dtype = np.dtype("f8" if casts else "i4")
    pieces = [pieces_of(plan, rank, dtype) for rank in range(case.n_ranks)]
    for rank in range(case.n_ranks):
        decoded = sum(len(numbers) for numbers in chunks_read(plan, case.chunks, rank))
        source = chunked(table, tuple(cell), missing=lost) if n_threads else FakeSource(table, tuple(cell))
        layout = SourceLayout(selection, case.chunks, tuple(cell), source.dtype, dtype)
        slots, batch_nbytes = Slots(1, plan.max_block_size * dtype.itemsize), n_batch * math.prod(cell) * 4
        resources = Resources(slots, n_threads=max(1, n_threads), batch_nbytes=batch_nbytes)
        tuning = Tuning(min_chunk_nbytes=1, inline_nbytes=inline_nbytes)
        local = LocalPieces(rank, pieces[rank], checksums)
        with resources, reader_as_planned(source, layout, local, resources, tuning=tuning) as reader:
            for read in plan.outgoing(rank):
                assert reader.has_room(read)
                block = fetch(reader, read)
                for part in read.parts:
                    if part.rank != rank:
                        pieces[part.rank][part.target].view(part.region)[...] = values_of(block, part.region, dtype)
                block.release()
        nbytes = 4 * sum(read.region.size for read in plan.outgoing(rank))
        has_gaps = nbytes > 4 * sum(part.region.size for read in plan.outgoing(rank) for part in read.parts)
        if case.is_merged and has_gaps:  # chunks in them are not read, and the library reads what lies around them by itself
            assert reader.counters.nbytes_read <= nbytes
            assert n_threads == 0 or reader.counters.chunks_decoded == decoded
        else:
            assert reader.counters.chunks_decoded == decoded and reader.counters.nbytes_read == nbytes
        if n_threads:
            assert max(map(len, source.stored.boxes), default=0) <= max(1, n_batch) and len(source.stored.fetched) == decoded
    for mine in pieces:
        for shard, piece in mine.items():
            true = plan.target(shard)
            wanted = np.full(piece.region.shape, -1, dtype)
            if true is not None:
                wanted[true.slices(piece.region.start)] = expected[true.slices()]
            np.testing.assert_array_equal(piece.data, wanted, strict=True)
