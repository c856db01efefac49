"""Do small chunks, which are read many at a time, end where they belong, and does an error still name the damaged one?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.errors import ConfigError, PeerError, SourceError
from shardload.formats.contract.chunk_reader import Encoded
from shardload.planning.blocks import aligned
from shardload.planning.parts import Block, Part
from shardload.planning.region import Region
from shardload.planning.selection import Selection, select_axes
from shardload.planning.source_layout import SourceLayout
from shardload.planning.tuning import Tuning
from shardload.transfer.buffers import Slots
from shardload.transfer.local_pieces import LocalPieces
from shardload.transfer.reader import SourceReader
from shardload.transfer.resources import Resources
from tests.tiers import examples
from tests.unit.brute_force import Case, cases, chunks_read
from tests.unit.fakes import FakeChunks, FakeSource, failure, fetch, piece_of, pieces_of, reader_of, tune, values_of, whole

Array = np.ndarray[Any, Any]
TABLE = np.arange(96, dtype="f4").reshape(8, 12)


@pytest.fixture(autouse=True, scope="module")
def small_chunks_too_and_in_threads() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        tune(patch, min_chunk_nbytes=1, inline_nbytes=-1)
        yield


def batched(data: Array, chunks: tuple[int, ...], **more: Any) -> tuple[FakeSource, FakeChunks]:
    """A source that must be read chunk by chunk, or many chunks at a time."""

    def refuse(region: Region) -> Exception:
        return AssertionError("read by the library")

    stored = FakeChunks(data, chunks, **more)
    return FakeSource(data, chunks, refuse, stored=stored), stored


# --- what is read together


@pytest.mark.parametrize(("batch_nbytes", "sizes"), [(6 * 4 * 4, [4] * 4), (1 << 20, [16]), (2 * 6 * 4, [2] * 8)])
def test_a_batch_is_no_larger_than_it_may_be(batch_nbytes: int, sizes: list[int]) -> None:
    source, stored = batched(TABLE, (2, 3))  # 4 x 4 chunks of 24 bytes
    piece = piece_of(Region((0, 0), (8, 12)))
    resources = Resources(Slots(1, 1 << 10), batch_nbytes=batch_nbytes)
    with reader_of(source, {0: piece}, resources=resources) as reader:
        fetch(reader, whole(Region((0, 0), (8, 12))))
    assert [len(batch) for batch in stored.boxes] == sizes
    assert sorted(stored.fetched) == [(i, j) for i in range(4) for j in range(4)], "each chunk once"
    np.testing.assert_array_equal(piece.data, TABLE)
    assert reader.counters.chunks_decoded == 16 and reader.counters.nbytes_read == TABLE.nbytes


@pytest.mark.parametrize("batch_nbytes", [0, 2 * 6 * 4 - 1])
def test_chunks_of_which_two_are_too_large_are_read_one_by_one(batch_nbytes: int) -> None:
    source, stored = batched(TABLE, (2, 3))
    resources = Resources(Slots(1, 1 << 10), batch_nbytes=batch_nbytes)
    with reader_of(source, {0: piece_of(Region((0, 0), (8, 12)))}, resources=resources) as reader:
        fetch(reader, whole(Region((0, 0), (2, 12))))
    assert [len(box) for box in stored.boxes] == [1] * 4


def test_fewer_chunks_than_threads_are_shared_by_the_threads() -> None:
    """Wrong if one thread got all of them in one batch."""
    source, stored = batched(TABLE, (2, 6))
    piece = piece_of(Region((0, 0), (8, 12)))
    resources = Resources(Slots(1, 1 << 10), n_threads=3)
    with resources, reader_of(source, {0: piece}, resources=resources) as reader:
        fetch(reader, whole(Region((0, 0), (4, 12))))  # 4 chunks
        fetch(reader, whole(Region((4, 0), (6, 12))))  # 2
    assert sorted(len(box) for box in stored.boxes) == [1, 1, 2, 2]
    np.testing.assert_array_equal(piece.data[:6], TABLE[:6])


def test_a_batch_that_lies_in_the_piece_as_in_the_file_is_decoded_there() -> None:
    line = np.arange(40, dtype="i4")
    source, stored = batched(line, (4,))
    piece = piece_of(Region((4,), (32,)), "i4")
    with reader_of(source, {0: piece}) as reader:
        fetch(reader, whole(Region((8,), (24,))))
    assert [len(batch) for batch in stored.boxes] == [4]
    assert all(np.shares_memory(out, piece.data) for out in stored.outs)
    np.testing.assert_array_equal(piece.data[4:20], line[8:24])
    assert (piece.data[:4] == -1).all() and (piece.data[20:] == -1).all() and reader.counters.nbytes_copied == 0


def test_a_piece_of_whole_rows_is_not_taken_for_one_that_has_the_chunks_one_after_the_other() -> None:
    """The region has no gaps in the piece, but chunks of (2, 3) in it do."""
    source, stored = batched(TABLE, (2, 3))
    piece = piece_of(Region((0, 0), (8, 12)))
    with reader_of(source, {0: piece}) as reader:
        fetch(reader, whole(Region((2, 0), (6, 12))))
    assert not any(np.shares_memory(out, piece.data) for out in stored.outs)
    np.testing.assert_array_equal(piece.data[2:6], TABLE[2:6])


def test_what_travels_lies_in_one_tile_of_the_slot() -> None:
    """Wrong if the part of another rank were sent from memory that the next batch uses again."""
    source, stored = batched(TABLE, (2, 3))
    piece, slots = piece_of(Region((0, 0), (8, 6))), Slots(2, 1 << 10)
    left, right = Part(Region((0, 0), (8, 6)), 0, 0), Part(Region((0, 6), (8, 12)), 1, 1)
    resources = Resources(slots, batch_nbytes=4 * 24)
    with reader_of(source, {0: piece}, resources=resources) as reader:
        block = fetch(reader, Block(Region((0, 0), (8, 12)), (left, right)))
    assert len(stored.boxes) == 4 and block.slot is not None
    (tile,) = block.tiles
    assert tile.region == Region((0, 0), (8, 12)) and np.shares_memory(tile.data, block.slot.data)
    np.testing.assert_array_equal(tile.view(right.region), TABLE[:, 6:])
    np.testing.assert_array_equal(piece.data, TABLE[:, :6])


# --- what is wrong or unusual


@pytest.mark.parametrize("how", ["fails_to_fetch", "fails_to_decode"])
@pytest.mark.parametrize("bad", [(0, 0), (1, 2), (3, 3)])
def test_an_error_names_the_damaged_chunk_of_a_batch(how: str, bad: tuple[int, int]) -> None:
    source, stored = batched(TABLE, (2, 3), **{how: lambda index: ValueError("rotten") if index == bad else None})
    reader = reader_of(source, {0: piece_of(Region((0, 0), (8, 12)))})
    error = failure(reader, whole(Region((0, 0), (8, 12))))
    assert isinstance(error, SourceError) and error.chunk == bad and "rotten" in str(error)
    assert len(stored.boxes[0]) == 16 and stored.boxes[-1] == [bad], "read together, then one by one"


def test_a_value_that_a_cast_can_not_hold_is_named_by_its_chunk() -> None:
    data = TABLE.copy()
    data[5, 7] = 300
    source, _ = batched(data, (2, 3))
    reader = reader_of(source, {0: piece_of(Region((0, 0), (8, 12)), dtype="i1")}, dtype=np.dtype("i1"))
    error = failure(reader, whole(Region((0, 0), (8, 12))))
    assert isinstance(error, ConfigError) and "[4:6, 6:9]" in str(error) and "300" in str(error)


def test_what_lies_outside_of_the_array_is_not_cast() -> None:
    """An edge chunk has 77s there, which would fit; here they would not."""
    source, _ = batched(np.arange(70, dtype="f4").reshape(7, 10), (2, 3), fill=1e9)
    stored = source.stored
    assert stored is not None
    decode = stored.decode

    def rotten(encoded: Encoded, out: Array) -> None:
        decode(encoded, out)
        out[out == 77] = 1e9

    stored.decode = rotten  # type: ignore[method-assign]
    piece = piece_of(Region((0, 0), (7, 10)), dtype="i1")
    with reader_of(source, {0: piece}, dtype=np.dtype("i1")) as reader:
        fetch(reader, whole(Region((0, 0), (7, 10))))
    np.testing.assert_array_equal(piece.data, np.arange(70).reshape(7, 10))


def test_a_copy_that_changes_is_an_error_where_checksums_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    copyto = np.copyto

    def wrong(to: Array, what: Any, **options: Any) -> None:
        copyto(to, what, **options)
        to[(-1,) * to.ndim] += 1

    source, stored = batched(TABLE, (2, 3))
    reader = reader_of(source, {0: piece_of(Region((0, 0), (8, 12)))}, checksums=True)
    monkeypatch.setattr("shardload.transfer.local_pieces.np.copyto", wrong)
    error = failure(reader, whole(Region((1, 0), (4, 12))))
    assert isinstance(error, PeerError) and "a checksum after the copy differs" in str(error) and stored.boxes


def test_out_of_memory_is_not_tried_again() -> None:
    source, stored = batched(TABLE, (2, 3), fails_to_fetch=lambda index: MemoryError("full"))
    error = failure(reader_of(source, {0: piece_of(Region((0, 0), (8, 12)))}), whole(Region((0, 0), (4, 12))))
    assert isinstance(error, MemoryError) and len(stored.fetched) == 1


# --- everything at once


@examples(150)
@given(cases(), st.booleans(), st.booleans(), st.sampled_from([1, 3]), st.integers(2, 9), st.data())
def test_all_ranks_readers_together_read_a_selection_in_batches(
    case: Case, casts: bool, checksums: bool, n_threads: int, n_batch: int, data: st.DataObject
) -> None:
    """Parts are handed over in memory; each piece must then be its part of the selection of the file.

    Some chunks are missing, and the next batch uses the memory of the one before.
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
    lost = data.draw(st.frozensets(st.tuples(*(st.integers(0, max(0, n - 1)) for n in grid)), max_size=3))
    filled = table.copy()
    for one in lost:
        filled[tuple(slice(i * c, (i + 1) * c) for i, c in zip(one, cell, strict=True))] = 55
    expected = filled[tuple(index)]
    selection: Selection = select_axes(tuple(index), shape)
    plan = case.plan()
    dtype = np.dtype("f8" if casts else "i4")
    pieces = [pieces_of(plan, rank, dtype) for rank in range(case.n_ranks)]
    for rank in range(case.n_ranks):
        decoded = [len(numbers) for numbers in chunks_read(plan, case.chunks, rank)]
        room = max(plan.max_block_size * 8, max(decoded, default=0) * aligned(math.prod(cell) * dtype.itemsize))
        source, stored = batched(table, tuple(cell), missing=lost)
        layout = SourceLayout(selection, case.chunks, tuple(cell), source.dtype, dtype)
        resources = Resources(Slots(1, room), n_threads=n_threads, batch_nbytes=n_batch * math.prod(cell) * 4)
        tuning = Tuning(min_chunk_nbytes=1, inline_nbytes=-1)
        local = LocalPieces(rank, pieces[rank], checksums)
        with resources, SourceReader(source, layout, local, resources, tuning=tuning) as reader:
            for read in plan.owned_blocks(rank):
                block = fetch(reader, read)
                for part in read.parts:
                    if part.rank != rank:
                        pieces[part.rank][part.shard].view(part.region)[...] = values_of(block, part.region, dtype)
                block.release()
        assert max(map(len, stored.boxes), default=0) <= n_batch
        assert len(stored.fetched) == sum(decoded) == reader.counters.chunks_decoded, "each chunk once in each of its blocks"
    for mine in pieces:
        for shard, piece in mine.items():
            true = plan.true_region(shard)
            wanted = np.full(piece.region.shape, -1, dtype)
            if true is not None:
                wanted[true.slices(piece.region.start)] = expected[true.slices()]
            np.testing.assert_array_equal(piece.data, wanted, strict=True)
