"""How is a virtual dataset read? Part by part, each as the dataset that it is, with all checks of a load of its own file.

HDF5 would read it in one thread, under its lock. It takes fill values for what it does not find, and decodes chunks of the
parts without the checks that this package makes (docs/trust.md). So:

1. `find_tiles` accepts a virtual dataset if each part is a box of another dataset, in the same order, and no two boxes
   overlap: a *tile*. Others (every other row, patterns of names) are left to HDF5.
2. `Tiles.read_into` cuts a region at the borders of the tiles. The source of each part reads what lies in it. What no part
   covers is the fill value.
3. `Tiles.chunk_reader`: if the chunks of all parts lie on one grid, and are encoded alike, several threads may decode them.

A part is opened when something of it is first read, and the last few stay open: a rank may read a few of a thousand.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import h5py
import numpy as np

from shardload.formats.base import (
    BatchReader,
    ChunkReader,
    Encoded,
    PlainReader,
    Room,
    Source,
    a_few_chunks,
    check_chunk,
    chunks_met,
    fresh,
    native_dtype,
    read_by_chunks,
    read_chunks,
)
from shardload.formats.hdf5.chunks import fill_value
from shardload.planning.region import Region

__all__ = ["Behind", "Opener", "Tiles", "behind", "find_tiles"]

_MOST_OPEN = 32  # parts
_AT_ONCE_NBYTES, _WORTH_BATCHES = 1 << 20, 4  # of small chunks that are read together; how many are worth it
_MOST_TILES = 1 << 16  # of one dataset; asking HDF5 where each is takes 20 microseconds, on every rank
_MOST_COMPARED = 2048  # tiles in two or more rows and columns, each compared with every other one
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Behind:
    """What is known of a dataset in a virtual dataset, from when it was looked at.

    Attributes
    ----------
    path : str
        Where its file was found.
    shape, chunks : tuple of int
        Its shape, and its chunks if it has some.
    kind : h5py.h5t.TypeID
        The type of its values in the file.
    filters : tuple
        Number and parameters of each filter.
    fill : bytes
        Its value where nothing was written, in native byte order.
    """

    path: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    kind: Any
    filters: tuple[tuple[int, tuple[int, ...]], ...]
    fill: bytes


def behind(dataset: h5py.Dataset, path: str) -> Behind:
    """What must be known of a dataset in a virtual dataset, while it is open. `path` is where its file was found."""
    creation = dataset.id.get_create_plist()
    filters = (creation.get_filter(k) for k in range(creation.get_nfilters()))
    fill = b""
    if dataset.dtype.kind in "biufc":
        fill = fill_value(dataset, native_dtype(dataset.dtype)).tobytes()
    chunks = None if dataset.chunks is None else tuple(dataset.chunks)
    told = tuple((number, tuple(values)) for number, _, values, _ in filters)
    return Behind(path, tuple(dataset.shape or ()), chunks, dataset.id.get_type(), told, fill)


class Opener(Protocol):
    """Opens the source of a part."""

    def __call__(self, path: str, dataset: str) -> Source:
        """Open the dataset of this name in the file at `path`."""
        ...


@dataclass(frozen=True)
class _Box:
    """One tile: a region of the virtual dataset, and where it begins in which dataset.

    `axes` has, for each axis of that dataset, the axis of the virtual dataset that it lies along; -1 for an axis with one
    element here that lies along none.
    """

    region: Region
    behind: Behind
    dataset: str
    start: tuple[int, ...]
    axes: tuple[int, ...]

    def inside(self, region: Region) -> Region:
        """What of its dataset a region of the virtual dataset is."""
        low, high = [], []
        for first, axis in zip(self.start, self.axes, strict=True):
            a = 0 if axis < 0 else region.start[axis] - self.region.start[axis]
            n = 1 if axis < 0 else region.stop[axis] - region.start[axis]
            low.append(first + a)
            high.append(first + a + n)
        return Region(tuple(low), tuple(high))

    def outside(self, place: Sequence[int]) -> tuple[int, ...]:
        """The element of the virtual dataset that an element of its dataset is, or the nearest one."""
        at = list(self.region.start)
        for k, (first, axis) in enumerate(zip(self.start, self.axes, strict=True)):
            if axis >= 0:
                at[axis] = min(max(at[axis] + place[k] - first, at[axis]), self.region.stop[axis] - 1)
        return tuple(at)


def find_tiles(
    dataset: h5py.Dataset, known: Mapping[tuple[str, str], Behind], names: Sequence[tuple[str, str] | None], kind: Any
) -> list[_Box] | None:
    """The tiles of a virtual dataset; None if HDF5 has to read it.

    Parameters
    ----------
    dataset : h5py.Dataset
        Open.
    known : mapping
        What was found at each name of a file and of a dataset in it.
    names : sequence
        The names of each mapping; None if they are a pattern.
    kind : h5py.h5t.TypeID
        The type of its values in the file.
    """
    creation, found = dataset.id.get_create_plist(), []
    if len(names) > _MOST_TILES:
        return None
    for k, name in enumerate(names):
        one = None if name is None else known.get(name)
        if name is None or one is None or not one.kind.equal(kind):
            return None
        space = creation.get_virtual_vspace(k)
        if not space.get_select_npoints():
            continue
        region = _box_of(space, dataset.shape)
        its = _box_of(creation.get_virtual_srcspace(k), one.shape)
        axes = None if region is None or its is None else _axes_along(region.shape, its.shape)
        if region is None or its is None or axes is None:
            return None
        if not (Region.whole(dataset.shape).contains(region) and Region.whole(one.shape).contains(its)):
            return None
        found.append(_Box(region, one, name[1], its.start, axes))
    return None if _overlap([one.region for one in found]) else found


def _box_of(space: Any, shape: Sequence[int]) -> Region | None:
    """The elements that are selected, if they are one box."""
    how = space.get_select_type()
    if how == h5py.h5s.SEL_ALL:
        return Region.whole(shape)
    if how != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return None
    start, stride, count, block = space.get_regular_hyperslab()
    if any(n > 1 and step != length for n, step, length in zip(count, stride, block, strict=True)):
        return None
    if any(n * length >= 1 << 63 for n, length in zip(count, block, strict=True)):
        return None
    stop = tuple(int(a + n * length) for a, n, length in zip(start, count, block, strict=True))
    return Region(tuple(map(int, start)), stop)


def _axes_along(shape: Sequence[int], its: Sequence[int]) -> tuple[int, ...] | None:
    """For each axis of a part, the axis of the virtual dataset that it lies along: HDF5 takes elements in C order.

    >>> _axes_along((1, 4, 5), (4, 5)), _axes_along((4, 5), (4, 5)), _axes_along((4, 5), (5, 4)), _axes_along((4, 1), (1, 4))
    ((1, 2), (0, 1), None, (-1, 0))
    """
    if tuple(shape) == (1,) * (len(shape) - len(its)) + tuple(its):
        return tuple(range(len(shape) - len(its), len(shape)))
    long = [k for k, n in enumerate(shape) if n != 1]
    if [shape[k] for k in long] != [n for n in its if n != 1]:
        return None
    along = iter(long)
    return tuple(-1 if n == 1 else next(along) for n in its)


def _overlap(regions: Sequence[Region]) -> bool:
    """True if two regions share an element, or if that would take long to find out."""
    if len(regions) < 2:
        return False
    start, stop = (np.array([getattr(one, end) for one in regions], dtype=np.int64) for end in ("start", "stop"))
    for axis in range(start.shape[1]):  # one after the other along an axis, as mostly
        order = np.argsort(start[:, axis], kind="stable")
        if (start[order[1:], axis] >= stop[order[:-1], axis]).all():
            return False
    if len(regions) > _MOST_COMPARED:
        return True
    meets = ((start[:, None] < stop[None]) & (start[None] < stop[:, None])).all(axis=2)
    return bool(meets.sum() > len(regions))


@dataclass(eq=False)
class _Part:
    """A part that is open."""

    source: Source
    reader: ChunkReader | None = None
    is_asked: bool = False  # whether there is a reader
    n_users: int = 0


class Tiles:
    """The tiles of one open virtual dataset.

    Parameters
    ----------
    boxes : sequence
        From `find_tiles`.
    shape : tuple of int
        Of the virtual dataset.
    chunks : tuple of int or None
        The grid of chunks that is told of it.
    fill : ndarray
        Value of what no part covers: an array without axes.
    open_part : Opener
        Opens the source of a part.
    """

    def __init__(
        self,
        boxes: Sequence[_Box],
        shape: tuple[int, ...],
        chunks: tuple[int, ...] | None,
        fill: np.ndarray[Any, Any],
        open_part: Opener,
    ) -> None:
        self._boxes, self._shape, self._chunks, self._fill, self._open_part = boxes, shape, chunks, fill, open_part
        ends = (np.array([getattr(one.region, end) for one in boxes], dtype=np.int64) for end in ("start", "stop"))
        self._start, self._stop = (end.reshape(len(boxes), len(shape)) for end in ends)
        self._lock = threading.Lock()
        self._open: dict[int, _Part] = {}  # the last used ones last
        self._is_closed = False
        self._expected: Region | None = None

    def expect(self, region: Region) -> None:
        """Told once, before anything is read: only `region` will be."""
        self._expected = region

    def meeting(self, region: Region) -> Iterator[tuple[int, Region]]:
        """The tiles that a non-empty region meets, and what it has in common with each."""
        low, high = np.asarray(region.start, dtype=np.int64), np.asarray(region.stop, dtype=np.int64)
        met = ((self._start < high) & (self._stop > low)).all(axis=1)
        for k in np.flatnonzero(met).tolist():
            common = self._boxes[k].region.intersect(region)
            if common is not None:
                yield k, common

    @contextmanager
    def use(self, k: int) -> Iterator[_Part]:
        """Tile k, open until the end of the ``with`` statement."""
        with self._lock:
            if self._is_closed:
                raise OSError("the file was closed")
            part = self._open.pop(k, None)
            if part is None:
                box = self._boxes[k]
                part = _Part(self._open_part(box.behind.path, box.dataset))
                wanted = None if self._expected is None else box.region.intersect(self._expected)
                if wanted is not None:
                    part.source.expect(box.inside(wanted))
                if part.source.info.shape != box.behind.shape:
                    part.source.close()
                    raise OSError(f"{part.source.info} had the shape {box.behind.shape}, and has {part.source.info.shape}")
            self._open[k] = part
            part.n_users += 1
            for other in [n for n, one in self._open.items() if not one.n_users][: max(0, len(self._open) - _MOST_OPEN)]:
                self._open.pop(other).source.close()
        try:
            yield part
        finally:
            with self._lock:
                part.n_users -= 1

    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        """Write the values of a non-empty region into `out`, as `Source.read_into` does."""
        met = list(self.meeting(region))
        if sum(common.size for _, common in met) < region.size:
            out[...] = self._fill
        for k, common in met:
            box = self._boxes[k]
            its = box.inside(common)
            into = out[common.slices(region.start)] if region.ndim else out
            with self.use(k) as part:
                if into.flags.c_contiguous:
                    self._read(part, box, its, into.reshape(its.shape))
                else:
                    values = np.empty(its.shape, out.dtype)
                    self._read(part, box, its, values)
                    np.copyto(into, values.reshape(common.shape))

    def _read(self, part: _Part, box: _Box, region: Region, out: np.ndarray[Any, Any]) -> None:
        """Read a region of an open part: its chunks without HDF5 where that is possible, which is twice as fast."""
        chunks = box.behind.chunks
        reader = None if chunks is None or not region.ndim else self._reader_of(part)
        if reader is None or chunks is None:
            part.source.read_into(region, out)
            return
        n = max(1, _AT_ONCE_NBYTES // max(1, math.prod(chunks) * out.dtype.itemsize))
        for some in a_few_chunks(region, chunks, n):
            into = out[some.slices(region.start)]
            values = into if into.flags.c_contiguous else np.empty(some.shape, out.dtype)
            if n < _WORTH_BATCHES or not read_chunks(reader, chunks, some, values):
                read_by_chunks(reader, chunks, some, values)
            if values is not into:
                np.copyto(into, values)

    def _reader_of(self, part: _Part) -> ChunkReader | None:
        with self._lock:
            if not part.is_asked:
                part.reader, part.is_asked = part.source.chunk_reader(), True
            return part.reader

    def missing(self, region: Region) -> list[tuple[int, ...]]:
        """The chunks, of the grid that is told, in which chunks of parts are missing, or which no part covers. ``[()]`` without
        chunks.
        """
        found: dict[tuple[int, ...], None] = {}
        met = list(self.meeting(region))
        if sum(common.size for _, common in met) < region.size:
            found |= dict.fromkeys(self._uncovered(region, [common for _, common in met]))
        for k, common in met:
            box = self._boxes[k]
            with self.use(k) as part:
                lost = part.source.missing(box.inside(common))
            if self._chunks is None or box.behind.chunks is None:
                found |= dict.fromkeys([()] if lost else [])
                continue
            for index in lost:
                at = box.outside([i * c for i, c in zip(index, box.behind.chunks, strict=True)])
                found[tuple(a // c for a, c in zip(at, self._chunks, strict=True))] = None
        return list(found)

    def _uncovered(self, region: Region, covered: Sequence[Region]) -> list[tuple[int, ...]]:
        if self._chunks is None:
            return [()]
        box = chunks_met(region, self._chunks)
        is_met = np.zeros(tuple(map(len, box)), dtype=bool)
        for one in covered:
            its = chunks_met(one, self._chunks)
            is_met[tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(its, box, strict=True))] = True
        return list(map(tuple, (np.argwhere(~is_met) + [axis.start for axis in box]).tolist()))

    def chunk_reader(self) -> ChunkReader | None:
        """A reader of the chunks of all parts; None if they do not lie on one grid, or are not encoded alike."""
        if self._chunks is None or not self._boxes or not self._is_one_grid():
            return None
        with self.use(0) as part:
            reader = self._reader_of(part)
            if reader is None:
                return None
            part.n_users += 1  # it decodes for all, until they are closed
        kind = _TileBatches if isinstance(reader, BatchReader) else _TileChunks
        return kind(self, self._chunks, reader, len(self._boxes[0].start))

    def _is_one_grid(self) -> bool:
        """True if each chunk of the grid that is told is one chunk of one part."""
        first = self._boxes[0].behind
        for box in self._boxes:
            one = box.behind
            if one.chunks is None or (one.filters, one.fill) != (first.filters, first.fill) or not one.kind.equal(first.kind):
                return False
            n = len(self._shape) - len(one.chunks)
            if n < 0 or (1,) * n + one.chunks != self._chunks or box.axes != tuple(range(n, len(self._shape))):
                return False
            its_start = (0,) * n + box.start
            for a, b, c, its, length in zip(
                box.region.start, box.region.stop, self._chunks, its_start, self._shape, strict=True
            ):
                if a % c or its % c or (b % c and b != length):
                    return False
        covered = sum(box.region.size for box in self._boxes)
        return covered == math.prod(self._shape) or first.fill == self._fill.tobytes()

    @contextmanager
    def at(self, index: Sequence[int], chunks: tuple[int, ...]) -> Iterator[tuple[ChunkReader, int, tuple[int, ...]] | None]:
        """The reader of the part in which the chunk at `index` lies, and by how much its own index is less; None if no part
        covers it.
        """
        first = np.asarray([i * c for i, c in zip(index, chunks, strict=True)], dtype=np.int64)
        met = np.flatnonzero(((self._start <= first) & (self._stop > first)).all(axis=1))
        if not len(met):
            yield None
            return
        k = int(met[0])
        box = self._boxes[k]
        with self.use(k) as part:
            reader = self._reader_of(part)
            if reader is None:
                raise OSError(f"{part.source.info} can no longer be decoded as it could be when it was first opened")
            n = len(chunks) - len(box.start)
            its_start = (0,) * n + box.start
            steps = tuple((a - b) // c for a, b, c in zip(box.region.start, its_start, chunks, strict=True))
            yield reader, n, steps

    def close(self) -> None:
        """Close the parts."""
        with self._lock:
            self._is_closed = True
            while self._open:
                self._open.popitem()[1].source.close()


class _TileChunks:
    """See `ChunkReader`."""

    def __init__(self, tiles: Tiles, chunks: tuple[int, ...], decoder: Any, n_axes: int) -> None:
        self._tiles, self._chunk, self._decoder, self._n_first = tiles, chunks, decoder, len(chunks) - n_axes
        self._counts = tuple(-(-n // c) for n, c in zip(tiles._shape, chunks, strict=True))

    def fetch(self, index: tuple[int, ...], room: Room = fresh) -> Encoded | None:
        """Read a chunk as it is stored; None if it is missing, or no part covers it."""
        check_chunk(index, self._counts)
        with self._tiles.at(index, self._chunk) as found:
            if found is None:
                return None
            reader, n, steps = found
            return reader.fetch(tuple(i - s for i, s in zip(index, steps, strict=True))[n:], room)

    def decode(self, encoded: Encoded | None, out: np.ndarray[Any, Any]) -> None:
        """Decode it: parts are encoded alike."""
        self._decoder.decode(encoded, out.reshape(out.shape[self._n_first :]))  # axes of one element are missing there


class _TileBatches(_TileChunks):
    """See `BatchReader` and `PlainReader`."""

    def fetch_many(self, box: Sequence[range], room: Room = fresh) -> list[Any] | None:
        """Read a box of chunks that lies in one part; None for others."""
        with self._its(box) as found:
            return None if found is None else found[0].fetch_many(found[1], room)

    def decode_many(self, stored: Sequence[Any], out: np.ndarray[Any, Any]) -> None:
        """Decode them."""
        self._decoder.decode_many(stored, out.reshape(out.shape[:1] + out.shape[1 + self._n_first :]))

    def read_plain(self, box: Sequence[range], out: np.ndarray[Any, Any]) -> bool:
        """Read a box of chunks of plain values that lies in one part; False for others."""
        with self._its(box) as found:
            return found is not None and isinstance(found[0], PlainReader) and found[0].read_plain(found[1], out)

    @contextmanager
    def _its(self, box: Sequence[range]) -> Iterator[tuple[Any, list[range]] | None]:
        """The reader of the part in which a box of chunks lies, and what they are there."""
        shape, chunks = self._tiles._shape, self._chunk
        if any(not 0 <= axis.start < axis.stop <= n for axis, n in zip(box, self._counts, strict=True)):
            yield None
            return
        stop = tuple(min(axis.stop * c, n) for axis, c, n in zip(box, chunks, shape, strict=True))
        region = Region(tuple(axis.start * c for axis, c in zip(box, chunks, strict=True)), stop)
        met = [common for _, common in self._tiles.meeting(region)]
        if met != [region]:
            yield None
            return
        with self._tiles.at([axis.start for axis in box], chunks) as found:
            if found is None:
                yield None
                return
            reader, n, steps = found
            yield reader, [range(axis.start - s, axis.stop - s) for axis, s in zip(box, steps, strict=True)][n:]
