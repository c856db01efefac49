"""Does a rank's reader put the right values into few buffers, and does it keep its promises when a read fails?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardload.errors import ConfigError, SourceError
from shardload.exchange import Block, Piece
from shardload.plan import Grid, Part, Read
from shardload.reader import SourceReader, aligned_empty
from shardload.region import Region, Selection, select_axes
from shardload.sources.base import ArrayInfo, Source
from tests.unit.planning import Case, cases, chunks_read

Array = np.ndarray[Any, Any]


@dataclass
class FakeSource:
    """An array in memory that counts its reads, and fails where it is told to."""

    data: Array
    chunks: tuple[int, ...] | None = None
    fails: Callable[[Region], Exception | None] = lambda region: None
    shows: Array | None = None
    reads: list[Region] = field(default_factory=list)
    outs: list[Array] = field(default_factory=list)

    @property
    def info(self) -> ArrayInfo:
        return ArrayInfo("f.h5", "/rho", "fake", self.data.shape, self.data.dtype.name, self.chunks)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.data.dtype

    def read_into(self, region: Region, out: Array) -> None:
        assert out.shape == region.shape and out.dtype == self.dtype and out.flags.c_contiguous and out.flags.writeable
        self.reads.append(region)
        self.outs.append(out)
        error = self.fails(region)
        if error is not None:
            out[...] = 99  # half read
            raise error
        out[...] = self.data[region.slices()]

    def view(self, region: Region) -> Array | None:
        return None if self.shows is None else self.shows[region.slices()]

    def close(self) -> None: ...


def reader_of(source: Source, pieces: dict[int, Piece] | None = None, **more: Any) -> SourceReader:
    """A reader of a whole array on rank 0."""
    shape = source.info.shape
    chunks = Grid(shape, source.info.chunks or (1,) * len(shape), (0,) * len(shape))
    options: dict[str, Any] = dict(
        has_chunks=source.info.chunks is not None, block_size=math.prod(shape), n_buffers=2, dtype=source.dtype
    )
    return SourceReader(
        source, more.pop("selection", select_axes(None, shape)), more.pop("chunks", chunks), **options | more,
        pieces=pieces or {}, rank=0,
    )  # fmt: skip


def failure(reader: SourceReader, read: Read) -> Exception:
    """What a read raises."""
    with pytest.raises(Exception) as found:
        reader.fetch(read)
    return found.value


def whole(region: Region, rank: int = 0, shard: int = 0) -> Read:
    return Read(region, (Part(region, shard, rank),))


def rows(start: int, stop: int, n: int = 4) -> Region:
    return Region((start, 0), (stop, n))


TABLE = np.arange(32, dtype="f4").reshape(8, 4)


def piece_of(region: Region) -> Piece:
    return Piece(region, np.full(region.shape, -1, dtype="f4"))


# --- where blocks go


def test_a_block_that_is_all_of_ones_own_goes_straight_into_the_piece() -> None:
    piece = piece_of(rows(2, 6))
    source = FakeSource(TABLE, (2, 4))
    reader = reader_of(source, {3: piece})
    block = reader.fetch(whole(rows(2, 4), shard=3))
    assert block.data is None
    assert np.shares_memory(source.outs[0], piece.data)
    np.testing.assert_array_equal(piece.data, [*TABLE[2:4], [-1] * 4, [-1] * 4])
    for _ in range(5):  # needs no buffer, however often
        reader.fetch(whole(rows(4, 6), shard=3)).release()
    assert reader.has_room() and source.reads == [rows(2, 4)] + [rows(4, 6)] * 5
    with pytest.raises(ValueError, match="straight into a piece"):
        block.view(rows(2, 4))


@pytest.mark.parametrize(
    "read",
    [
        whole(rows(0, 2), rank=1),
        Read(rows(0, 2), (Part(rows(0, 2), 0, 0), Part(rows(0, 2), 0, 1))),  # a replica elsewhere
        Read(rows(0, 2), (Part(rows(0, 1), 0, 0), Part(rows(1, 2), 0, 0))),
        Read(rows(0, 2), (Part(rows(0, 1), 0, 0),)),
        whole(Region((0, 0), (2, 3))),  # has gaps in the piece
    ],
    ids=["another's", "replica", "two parts", "less than the block", "gaps"],
)
def test_any_other_block_is_staged(read: Read) -> None:
    piece = piece_of(rows(0, 8))
    source = FakeSource(TABLE, (2, 4))
    reader = reader_of(source, {0: piece})
    block = reader.fetch(read)
    assert len(source.reads) == 1
    assert block.data is not None and not np.shares_memory(block.data, piece.data)
    np.testing.assert_array_equal(block.data, TABLE[read.region.slices()])
    assert (piece.data == -1).all(), "delivering is the exchange's task"
    part = Region((1, 1), (2, 3))
    np.testing.assert_array_equal(block.view(part), TABLE[part.slices()])


@pytest.mark.parametrize("dtype", ["f8", "i2", "c8", ">f4"])
def test_a_cast_is_staged_even_for_ones_own_piece(dtype: str) -> None:
    wanted = np.dtype(dtype).newbyteorder("=")
    piece = Piece(rows(0, 8), np.zeros((8, 4), dtype=wanted))
    source = FakeSource(TABLE, (2, 4), shows=TABLE)
    reader = reader_of(source, {0: piece}, dtype=wanted)
    for region in (rows(0, 2), rows(2, 6)):
        block = reader.fetch(whole(region))
        if wanted == TABLE.dtype:
            assert block.data is None
            continue
        assert block.data is not None and block.data.dtype == wanted
        np.testing.assert_array_equal(block.data, TABLE[region.slices()].astype(wanted), strict=True)
        assert np.shares_memory(source.outs[0], source.outs[-1]), "one buffer in the file's dtype is enough"


def test_values_in_memory_are_shown_not_copied() -> None:
    source = FakeSource(TABLE, shows=TABLE)
    reader = reader_of(source, {0: piece_of(rows(0, 8))})
    blocks = [reader.fetch(whole(rows(k, k + 2), rank=1)) for k in range(6)]
    for k, block in enumerate(blocks):
        assert block.data is not None and np.shares_memory(block.data, TABLE[k : k + 2])
        np.testing.assert_array_equal(block.data, TABLE[k : k + 2])
        block.release()
    assert source.reads == [] and reader.has_room()
    assert np.array_equal(TABLE.ravel(), np.arange(32)), "releasing a view gives nobody a buffer to write into"
    assert reader.nbytes_read == 0


@pytest.mark.parametrize(
    ("values", "to"),
    [
        (np.array([1.0, 1e300], dtype="f8"), "float32"),
        (np.array([1.0, 70000.0], dtype="f4"), "float16"),
        (np.array([1.0, np.nan], dtype="f4"), "int32"),
        (np.array([1.0, 1e10], dtype="f4"), "int16"),
        (np.array([0, 2**40 + 1], dtype="i8"), "int32"),
        (np.array([0, -1], dtype="i4"), "uint32"),
        (np.array([0, 2**31], dtype="u4"), "int32"),
    ],
)
def test_a_cast_that_values_do_not_fit_is_an_error_and_not_the_files(values: Array, to: str) -> None:
    reader = reader_of(FakeSource(values), dtype=np.dtype(to))
    error = failure(reader, whole(Region((0,), (2,)), rank=1))
    assert isinstance(error, ConfigError)
    assert f"{to} cannot hold" in str(error) and "damaged" not in str(error)


@pytest.mark.parametrize(
    ("values", "to"),
    [
        (np.array([0.1, np.nan, np.inf, 1e-60], dtype="f8"), "float32"),
        (np.array([0.5, -2.7], dtype="f4"), "int8"),
        (np.array([-128, 127], dtype="i8"), "int8"),
        (np.array([2**24 + 1], dtype="i4"), "float32"),
        (np.array([0, 3], dtype="i4"), "bool"),
    ],
)
def test_a_cast_rounds_and_cuts_as_numpy_does(values: Array, to: str) -> None:
    reader = reader_of(FakeSource(values), dtype=np.dtype(to))
    block = reader.fetch(whole(Region((0,), values.shape), rank=1))
    assert block.data is not None
    np.testing.assert_array_equal(block.data, values.astype(to))


@pytest.mark.parametrize("shown", [TABLE[::-1], TABLE.astype(">f4"), TABLE[:, ::-1]], ids=["flipped", "swapped", "mirrored"])
def test_values_that_cannot_be_sent_as_they_are_are_staged(shown: Array) -> None:
    source = FakeSource(TABLE, shows=shown)
    block = reader_of(source).fetch(whole(rows(0, 8), rank=1))
    assert block.data is not None and not np.shares_memory(block.data, shown) and block.data.dtype.isnative
    np.testing.assert_array_equal(block.data, TABLE)


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize(
    ("index", "expected"),
    [((3,), TABLE[3]), ((slice(None), -1), TABLE[:, -1]), ((slice(2, 6), slice(1, 3)), TABLE[2:6, 1:3]), ((1, 2), TABLE[1, 2])],
)
def test_dropped_axes(index: Any, expected: Array, shows: bool) -> None:
    source = FakeSource(TABLE, (2, 3), shows=TABLE if shows else None)
    selection = select_axes(index, TABLE.shape)
    region = Region.whole(expected.shape)
    cell = tuple((2, 3)[k] for k in selection.kept)
    phase = tuple(o % c for o, c in zip(selection.offset, cell, strict=True))
    piece = piece_of(region)
    options: dict[str, Any] = dict(selection=selection, chunks=Grid(expected.shape, cell, phase))
    block = reader_of(source, {0: piece}, **options).fetch(whole(region, rank=1))
    assert block.data is not None and block.data.shape == expected.shape
    np.testing.assert_array_equal(block.data, expected)
    assert reader_of(source, {0: piece}, **options).fetch(whole(region)).data is None
    np.testing.assert_array_equal(piece.data, expected)


# --- staging


@pytest.mark.parametrize("n_buffers", [1, 2, 3])
def test_no_more_buffers_than_allowed_and_none_before_it_is_given_back(n_buffers: int) -> None:
    reader = reader_of(FakeSource(TABLE, (1, 4)), n_buffers=n_buffers, block_size=4)
    held: list[tuple[int, Block]] = []
    addresses = set()
    order = np.random.default_rng(0)
    for k in range(30):
        while not reader.has_room():
            row, block = held.pop(int(order.integers(len(held))))
            assert block.data is not None
            np.testing.assert_array_equal(block.data, TABLE[row : row + 1])  # nobody wrote into it meanwhile
            block.release()
        block = reader.fetch(whole(rows(k % 8, k % 8 + 1), rank=1))
        assert block.data is not None
        addresses.add(block.data.ctypes.data)
        assert block.data.ctypes.data % 64 == 0
        held.append((k % 8, block))
        assert len(held) <= n_buffers
    assert len(addresses) == n_buffers


def test_a_short_block_uses_the_front_of_a_buffer() -> None:
    reader = reader_of(FakeSource(TABLE, (1, 4)), n_buffers=1, block_size=12)
    for region in (rows(0, 3), rows(3, 4), rows(5, 7)):
        block = reader.fetch(whole(region, rank=1))
        assert block.data is not None
        np.testing.assert_array_equal(block.data, TABLE[region.slices()])
        assert block.data.flags.c_contiguous
        block.release()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7)])
@pytest.mark.parametrize("dtype", ["?", "f4", "c16"])
def test_aligned_memory(shape: tuple[int, ...], dtype: str) -> None:
    found = [aligned_empty(shape, np.dtype(dtype)) for _ in range(5)]
    for array in found:
        assert array.shape == shape and array.dtype == dtype and array.flags.c_contiguous and array.flags.writeable
        assert array.ctypes.data % 64 == 0 or array.size == 0
        array[...] = 1
    assert not np.shares_memory(found[0], found[1])


# --- failures


def failing_at(element: tuple[int, ...], error: Exception) -> Callable[[Region], Exception | None]:
    """Fails each read that touches this element of the file."""
    point = Region(element, tuple(i + 1 for i in element))
    return lambda region: error if region.intersect(point) is not None else None


def test_a_failure_names_the_chunk_of_the_file_not_of_the_selection() -> None:
    data = np.arange(20 * 30, dtype="f4").reshape(20, 30)
    # Chunk (3, 2) of the file is elements [12:16, 20:30]; the selection starts inside chunk (2, 1).
    source = FakeSource(data, (4, 10), failing_at((13, 27), OSError("inflate failed")))
    selection = select_axes((slice(9, 19), slice(12, 29)), data.shape)
    chunks = Grid((10, 17), (4, 10), (1, 2))
    reader = reader_of(source, selection=selection, chunks=chunks, block_size=170)
    reader.fetch(whole(Region((0, 0), (3, 17)), rank=1)).release()
    assert (reader.chunks_decoded, reader.nbytes_read) == (2, 3 * 17 * 4)
    error = failure(reader, whole(Region((3, 0), (10, 17)), rank=1))
    assert isinstance(error, SourceError)
    assert (error.path, error.dataset, error.chunk, error.rank) == ("f.h5", "/rho", (3, 2), None)
    assert str(error).startswith(
        "chunk (3, 2) of '/rho' in 'f.h5' could not be read (elements [12:16, 20:29]): OSError: inflate failed. The file is"
    )
    assert isinstance(error.__cause__, OSError)
    assert (reader.chunks_decoded, reader.nbytes_read) == (2, 3 * 17 * 4), "what failed was not decoded"


def test_with_a_dropped_axis_the_chunk_has_all_axes_of_the_file() -> None:
    data = np.zeros((20, 9, 8), dtype="f4")
    source = FakeSource(data, (4, 3, 4), failing_at((13, 7, 5), RuntimeError("bad")))
    selection = select_axes((13, slice(1, None)), data.shape)
    chunks = Grid((8, 8), (3, 4), (1, 0))
    reader = reader_of(source, selection=selection, chunks=chunks, block_size=64)
    error = failure(reader, whole(Region.whole((8, 8)), rank=1))
    assert isinstance(error, SourceError) and error.chunk == (3, 2, 1)
    assert "(elements [13:14, 6:9, 4:8]): RuntimeError: bad" in str(error)


@pytest.mark.parametrize("own", [False, True], ids=["staged", "in place"])
@pytest.mark.parametrize("casts", [False, True])
def test_what_was_read_before_a_failure_is_counted_and_the_failure_is_not(own: bool, casts: bool) -> None:
    source = FakeSource(TABLE, (2, 4), failing_at((3, 0), OSError("first")))
    piece = Piece(rows(0, 8), np.zeros((8, 4), dtype="f8" if casts else "f4"))
    reader = reader_of(source, {0: piece}, dtype=piece.data.dtype, block_size=8)
    reader.fetch(whole(rows(0, 2), rank=0 if own else 1)).release()
    error = failure(reader, whole(rows(2, 4), rank=0 if own else 1))
    assert isinstance(error, SourceError) and error.chunk == (1, 0) and "first" in str(error)
    assert reader.chunks_decoded == 1 and reader.nbytes_read == 32


def test_a_failure_that_does_not_come_again_names_no_chunk() -> None:
    errors = iter([OSError("once")])
    source = FakeSource(TABLE, (2, 4), lambda region: next(errors, None))
    reader = reader_of(source)
    error = failure(reader, whole(rows(0, 4), rank=1))
    assert isinstance(error, SourceError) and error.chunk is None
    assert str(error).startswith("'/rho' in 'f.h5' could not be read (elements [0:4, 0:4]): OSError: once.")


def test_without_chunks_the_elements_are_named() -> None:
    source = FakeSource(TABLE, None, failing_at((3, 3), OSError("short read")))
    reader = reader_of(source)
    error = failure(reader, whole(rows(2, 6), rank=1))
    assert isinstance(error, SourceError) and error.chunk is None and "(elements [2:6, 0:4]): OSError: short" in str(error)
    assert len(source.reads) == 1 and reader.chunks_decoded == 0


@pytest.mark.parametrize("error", [SourceError("told well already", chunk=(9,)), MemoryError("no memory")])
def test_what_is_no_damage_is_passed_on(error: Exception) -> None:
    reader = reader_of(FakeSource(TABLE, (2, 4), lambda region: error))
    assert failure(reader, whole(rows(0, 2), rank=1)) is error


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupt(region: Region) -> None:
        raise KeyboardInterrupt

    reader = reader_of(FakeSource(TABLE, (2, 4), interrupt), n_buffers=1)
    with pytest.raises(KeyboardInterrupt):
        reader.fetch(whole(rows(0, 2), rank=1))


# --- everything at once


@settings(max_examples=120)
@given(cases(), st.booleans(), st.data())
def test_all_ranks_readers_together_read_a_selection(case: Case, casts: bool, data: st.DataObject) -> None:
    """Parts are handed over in memory; each piece must then be its part of the selection of the file."""
    before = tuple(p + c * data.draw(st.integers(0, 2)) for p, c in zip(case.phase, case.cell, strict=True))
    index: list[Any] = [slice(b, b + n) for b, n in zip(before, case.shape, strict=True)]
    shape = [b + n + data.draw(st.integers(0, 2)) for b, n in zip(before, case.shape, strict=True)]
    cell = list(case.cell)
    at = data.draw(st.integers(0, len(shape)))
    index.insert(at, 2)
    shape.insert(at, 4)
    cell.insert(at, 3)
    table = np.arange(math.prod(shape), dtype="i4").reshape(shape)
    expected = table[tuple(index)]
    selection: Selection = select_axes(tuple(index), shape)
    plan = case.plan()
    dtype = np.dtype("f8" if casts else "i4")
    pieces = []
    for rank in range(case.n_ranks):
        held = {s: plan.shards.region(s) for s in plan.shards.shards_of(rank)}
        pieces.append({s: Piece(r, np.full(r.shape, -1, dtype)) for s, r in held.items()})
    for rank in range(case.n_ranks):
        reader = SourceReader(
            FakeSource(table, tuple(cell)), selection, case.chunks, has_chunks=True, block_size=plan.max_read_size,
            n_buffers=1, dtype=dtype, pieces=pieces[rank], rank=rank,
        )  # fmt: skip
        for read in plan.reads(rank):
            assert reader.has_room()
            block = reader.fetch(read)
            for part in read.parts if block.data is not None else ():
                pieces[part.rank][part.shard].view(part.region)[...] = block.view(part.region)
            block.release()
        assert reader.chunks_decoded == sum(map(len, chunks_read(plan, case.chunks, rank)))
        assert reader.nbytes_read == 4 * sum(read.region.size for read in plan.reads(rank))
    for mine in pieces:
        for shard, piece in mine.items():
            true = plan.true_region(shard)
            wanted = np.full(piece.region.shape, -1, dtype)
            if true is not None:
                wanted[true.slices(piece.region.start)] = expected[true.slices()]
            np.testing.assert_array_equal(piece.data, wanted, strict=True)
