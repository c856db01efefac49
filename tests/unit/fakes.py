"""Sources that count what is asked of them and fail where they are told to, and readers of them."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.chunk_reader import ChunkReader, Encoded, Room, fresh
from shardload.formats.contract.format import Source
from shardload.planning.region import Grid, Region
from shardload.planning.schedule import Block, Part, Schedule, SourceLayout
from shardload.planning.selection import select_axes
from shardload.planning.tuning import default_tuning
from shardload.storage.objects import Ranges
from shardload.transfer.buffers import Piece, Resources, Slots, StagedBlock
from shardload.transfer.counters import _beginning_in
from shardload.transfer.pieces import LocalPieces
from shardload.transfer.reader import SourceReader, open_reader

Array = np.ndarray[Any, Any]

TABLE = np.arange(32, dtype="f4").reshape(8, 4)


@dataclass
class ObjectInMemory:
    """A `StoredObject` that counts calls that read, and ranges that they read."""

    content: bytes
    n_reads: int = 0
    n_ranges: int = 0
    version: tuple[int, ...] | None = (1, 1)
    most_gap_nbytes: int = 1 << 12

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def read_at_most(self, offset: int, nbytes: int) -> bytes:
        self.n_reads, self.n_ranges = self.n_reads + 1, self.n_ranges + 1
        return self.content[offset : offset + nbytes]

    def read_into(self, out: Array, offset: int) -> None:
        self.n_reads, self.n_ranges = self.n_reads + 1, self.n_ranges + 1
        if offset < 0 or offset + len(out) > len(self.content):
            raise OSError("the object ends before")
        out[:] = np.frombuffer(self.content, np.uint8, len(out), offset)

    def read_ranges(self, ranges: Ranges, memory: Array) -> list[memoryview]:
        n_reads = self.n_reads
        for begin, nbytes, offset in ranges.requests:
            self.read_into(memory[begin : begin + nbytes], offset)
        self.n_reads = n_reads + 1
        return ranges.pieces(memory)

    def close(self) -> None:
        self.content = b""


@dataclass
class FakeChunks(ChunkReader):
    """Chunks of an array in memory, "encoded" as their own bytes after 3 more. What an edge chunk has too much is 77."""

    data: Array
    chunks: tuple[int, ...]
    fails_to_fetch: Callable[[tuple[int, ...]], Exception | None] = lambda index: None
    fails_to_decode: Callable[[tuple[int, ...]], Exception | None] = lambda index: None
    missing: frozenset[tuple[int, ...]] = frozenset()
    fill: float = 55
    fetched: list[tuple[int, ...]] = field(default_factory=list)
    boxes: list[list[tuple[int, ...]]] = field(default_factory=list)
    outs: list[Array] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    meet: threading.Barrier | None = None

    def region(self, index: tuple[int, ...]) -> Region:
        """The elements of a chunk that exist."""
        start = tuple(i * c for i, c in zip(index, self.chunks, strict=True))
        return Region(start, tuple(min(a + c, n) for a, c, n in zip(start, self.chunks, self.data.shape, strict=True)))

    def fetch(self, box: Sequence[range], room: Room = fresh) -> Encoded:
        assert len(box) == len(self.chunks) and all(type(axis) is range for axis in box)
        indices = list(itertools.product(*box))
        self.boxes.append(indices)
        found = [self.stored(index) for index in indices]
        memory, data, begin = room(sum(stored.size for stored in found if stored is not None)), list[Any](), 0
        for stored in found:
            if stored is None:
                data.append(None)
                continue
            memory[begin : begin + stored.size] = stored
            data.append(memoryview(memory)[begin : begin + stored.size])
            begin += stored.size
        return Encoded(data)

    def stored(self, index: tuple[int, ...]) -> Array | None:
        self.fetched.append(index)
        self.threads.add(threading.current_thread().name)
        if self.meet is not None:
            self.meet.wait(20)
        if (error := self.fails_to_fetch(index)) is not None:
            raise error
        if index in self.missing:
            return None
        region = self.region(index)
        whole = np.full(self.chunks, 77, self.data.dtype)
        whole[tuple(slice(0, n) for n in region.shape)] = self.data[region.slices()]
        return np.frombuffer(b"at:" + repr(index).encode() + b"|" + whole.tobytes(), np.uint8)

    def decode(self, encoded: Encoded, out: Array) -> None:
        assert out.dtype == self.data.dtype and out.flags.c_contiguous and out.flags.writeable
        rows = out.reshape(len(encoded.data), *self.chunks)
        assert np.shares_memory(rows, out)
        for k, data in enumerate(encoded.data):
            self.decode_one(data, rows[k, ...])

    def decode_one(self, data: Any, out: Array) -> None:
        self.outs.append(out)
        if data is None:
            out[...] = self.fill
            return
        name, values = bytes(data).split(b"|", 1)
        index = tuple(int(i) for i in name[3:].strip(b"(), ").split(b",") if i)
        if (error := self.fails_to_decode(index)) is not None:
            out[...] = 99  # half decoded
            raise error
        out[...] = np.frombuffer(values, self.data.dtype).reshape(self.chunks)


@dataclass
class FakeSource(Source):
    """An array in memory that counts its reads, and fails where it is told to."""

    data: Array
    chunks: tuple[int, ...] | None = None
    fails: Callable[[Region], Exception | None] = lambda region: None
    shows: Array | None = None
    stored: Any = None
    reads: list[Region] = field(default_factory=list)
    outs: list[Array] = field(default_factory=list)
    lost: tuple[tuple[int, ...], ...] = ()
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    @property
    def info(self) -> ArrayInfo:
        return ArrayInfo("f.h5", "/rho", "fake", self.data.shape, self.data.dtype.name, self.chunks)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.data.dtype

    def read_into(self, region: Region, out: Array) -> list[tuple[int, ...]]:
        assert self.one_at_a_time.acquire(blocking=False), "called from two threads at once"
        try:
            assert out.shape == region.shape and out.dtype == self.dtype and out.flags.c_contiguous and out.flags.writeable
            self.reads.append(region)
            self.outs.append(out)
            error = self.fails(region)
            if error is not None:
                out[...] = 99  # half read
                raise error
            out[...] = self.data[region.slices()]
            return list(self.lost)
        finally:
            self.one_at_a_time.release()

    def plain(self, region: Region) -> Array:
        return self.data[region.slices()]

    def view(self, region: Region) -> Array | None:
        return None if self.shows is None else self.shows[region.slices()]

    def chunk_reader(self) -> Any:
        return self.stored

    def state(self) -> None:
        return None

    def close(self) -> None: ...


def chunked(data: Array, chunks: tuple[int, ...], **more: Any) -> FakeSource:
    """A source that hands out whole chunks, and must be read in no other way."""

    def refuse(region: Region) -> Exception:
        return AssertionError("read by the library")

    return FakeSource(data, chunks, refuse, stored=FakeChunks(data, chunks, **more))


def reader_as_planned(
    source: FakeSource, layout: SourceLayout, local: LocalPieces, resources: Resources, **more: Any
) -> SourceReader:
    """A reader that casts, and counts each missing chunk with the block in which it begins."""
    usual = {"tuning": default_tuning(), "counts": lambda read, numbers, chunks: _beginning_in(read.region, numbers, chunks)}
    return open_reader(source, layout, local, resources, **{**usual, **more})


def reader_of(source: FakeSource, pieces: dict[int, Piece] | None = None, **more: Any) -> SourceReader:
    """A reader of a whole array on rank 0, with two slots that each have room for all of it."""
    shape = source.info.shape
    chunks = Grid(shape, source.info.chunks or (1,) * len(shape), (0,) * len(shape))
    dtype = more.pop("dtype", source.dtype)
    nbytes = math.prod(shape) * max(dtype.itemsize, source.dtype.itemsize) + 64 * chunks.n_cells
    slots = more.pop("slots", None) or Slots(2, 2 * nbytes)
    selection = more.pop("selection", None) or select_axes(None, shape)
    layout = SourceLayout(selection, more.pop("chunks", chunks), source.info.chunks, source.dtype, dtype)
    local = LocalPieces(0, pieces or {}, more.pop("checksums", False))
    resources = more.pop("resources", None) or Resources(slots, more.pop("bell", None), more.pop("n_threads", 1))
    return reader_as_planned(source, layout, local, resources, **more)


def tune(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Let small blocks and chunks take the way of large ones, or the other way round."""
    monkeypatch.setattr("shardload.planning.tuning._default", replace(default_tuning(), **sizes))


def fetch(reader: SourceReader, read: Block) -> StagedBlock:
    """A block, when all of it is there."""
    return reader.start(read).result()


def failure(reader: SourceReader, read: Block) -> BaseException:
    """What a read raises."""
    with pytest.raises(Exception) as found:
        fetch(reader, read)
    return found.value


def values_of(block: StagedBlock, region: Region, dtype: Any) -> Array:
    """The values of a part of a block."""
    view = block.view(region)
    assert view.dtype == dtype
    return view


def whole(region: Region, rank: int = 0, shard: int = 0) -> Block:
    return Block(region, (Part(region, shard, rank),))


def rows(start: int, stop: int, n: int = 4) -> Region:
    return Region((start, 0), (stop, n))


def piece_of(region: Region, dtype: Any = "f4") -> Piece:
    return Piece(region, np.full(region.shape, -1, dtype=dtype))


def pieces_of(schedule: Schedule, rank: int, dtype: Any, untouched: int = -1) -> dict[int, Piece]:
    """The pieces of a rank, memory as it may well be."""
    regions = {number: schedule.shards.grid.region(number) for number in schedule.shards.sections_of(rank)}
    return {number: Piece(region, np.full(region.shape, untouched, dtype)) for number, region in regions.items()}


def failing_at(element: tuple[int, ...], error: Exception) -> Callable[[Region], Exception | None]:
    """Fails each read that touches this element of the file."""
    point = Region(element, tuple(i + 1 for i in element))
    return lambda region: error if region.intersect(point) is not None else None
