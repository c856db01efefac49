"""How is a virtual dataset read? Part by part, each as the dataset that it is, with all checks of a load of its own file.

HDF5 would read it in one thread, under its lock. It takes fill values for what it does not find, and decodes chunks of the
parts without the checks that this package makes (docs/trust.md). So:

1. `find_boxes` accepts a virtual dataset that is made of boxes of other datasets, in the same order, of which no two overlap:
   *tiles*. A part whose rows lie between those of others (detectors that take turns) has a tile for each run of rows.
2. One rank looks at all parts (`PartMetadata`). What other ranks must know goes to them with the metadata (`tell_parts`):
   which version of each file was seen, and whether chunks lie on one grid.
3. `Tiles.read_into` cuts a region at the borders of the tiles. The source of each part reads what lies in it. What no part
   covers is the fill value.
4. `Tiles.chunk_reader`: if the chunks of all parts lie on one grid, and are encoded alike, several threads may decode them.

A part is opened when something of it is first read, and the last few stay open: a rank may read a few of a thousand.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import h5py
import numpy as np

from shardload.formats.contract.array import ArrayInfo, native_dtype, refusal
from shardload.formats.contract.chunk_reader import (
    ChunkReader,
    Encoded,
    Room,
    check_box,
    chunks_met,
    fresh,
    region_in_box,
)
from shardload.formats.contract.format import ChangedError, Source
from shardload.formats.hdf5.chunks import fill_value
from shardload.formats.hdf5.filters import Filters
from shardload.formats.hdf5.opened import OpenDataset, type_of_values
from shardload.planning.region import Region
from shardload.storage.local import state_of
from shardload.storage.objects import Ints
from shardload.storage.remote import is_remote
from shardload.system.undo import Undo

_NUMBERS = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.COMPOUND, h5py.h5t.ENUM, getattr(h5py.h5t, "COMPLEX", None))
_MOST_OPEN = 8  # parts: with hundreds of open objects, HDF5 takes a millisecond to close a file
_MOST_TILES = 1 << 16  # of one dataset; asking HDF5 where each is takes 20 microseconds, on every rank
_MOST_COMPARED = 2048  # tiles that cannot be parted along an axis, each compared with every other one

Names = tuple[str, str]  # of a file as it is named there, and of a dataset in it
Versions = dict[str, tuple[int, ...]]  # size and time of files, by their paths
PartOpener = Callable[[str, str], tuple[Source, Versions]]
"""From `Names` to the source of a part, and the versions of all files that hold its values; none if it is told what to read."""


@dataclass(frozen=True)
class PartMetadata:
    """What is known of a part of a virtual dataset, or of that itself, from when it was looked at.

    Attributes
    ----------
    version : tuple of int
        The `version_of` all files that hold its values.
    shape, chunks : tuple of int
        Its shape, and its chunks if it has some; if it is virtual, the `smallest_chunk` of its parts.
    dtype : dtype
        The type of its values, in native byte order; void for no numbers.
    kind : bytes
        That in the file, as HDF5 encodes it.
    filters : list
        Those of its chunks.
    fill : bytes
        Its value where nothing was written, in native byte order; empty if not known (of bit fields).
    is_raw : bool
        Whether its chunks can be read without HDF5, as far as its file is concerned.
    info : ArrayInfo or None
        Of an array at a URL: by this it is opened, in this version, without a request.
    """

    version: tuple[int, ...]
    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    dtype: np.dtype[Any]
    kind: bytes
    filters: Filters
    fill: bytes
    is_raw: bool = True
    info: ArrayInfo | None = None

    @classmethod
    def of(cls, dataset: OpenDataset, version: tuple[int, ...]) -> PartMetadata:
        """Of an open dataset, with this version."""
        creation, kind = dataset.creation, dataset.kind
        dtype = np.dtype("V")
        if kind.get_class() in _NUMBERS:
            with suppress(TypeError, ValueError):  # of a size that NumPy does not have, as 24 bits
                dtype = native_dtype(type_of_values(kind))
        fill = b"" if refusal(dtype) is not None else fill_value(dataset, dtype).tobytes()
        chunks = tuple(creation.get_chunk()) if creation.get_layout() == h5py.h5d.CHUNKED else None
        is_raw = not dataset.facts.creation.get_userblock()
        encoded = bytes(kind.copy().encode())
        return cls(version, tuple(dataset.shape or ()), chunks, dtype, encoded, dataset.stored_filters, fill, is_raw)


def version_of(files: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """The bytes of files, and a number that changes if the size or the time of one does."""
    states = sorted(files.values())
    digest = blake2b(repr(states).encode(), digest_size=7).digest()
    return sum(state[0] for state in states), int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Box:
    """One tile: a region of the virtual dataset, and where it begins in a part.

    `names` are those of the part's file and dataset. `axes` has, for each axis of the part, the axis of the virtual dataset
    that it lies along; -1 for an axis along none, of which the tile has one element.
    """

    region: Region
    names: Names
    start: tuple[int, ...]
    axes: tuple[int, ...]

    def inside(self, region: Region) -> Region:
        """A region of the virtual dataset, in the tile, as a region of the part."""
        low, high = [], []
        for first, axis in zip(self.start, self.axes, strict=True):
            offset = 0 if axis < 0 else region.start[axis] - self.region.start[axis]
            n = 1 if axis < 0 else region.stop[axis] - region.start[axis]
            low.append(first + offset)
            high.append(first + offset + n)
        return Region(tuple(low), tuple(high))

    def outside(self, start: Sequence[int], stop: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where a region of the part is in the virtual dataset; it may reach out of the tile."""
        low, high = list(self.region.start), list(self.region.stop)
        for a, b, first, axis in zip(start, stop, self.start, self.axes, strict=True):
            if axis >= 0:
                low[axis], high[axis] = self.region.start[axis] + a - first, self.region.start[axis] + b - first
        return low, high


def find_boxes(dataset: OpenDataset, names: Sequence[Names], shapes: Sequence[Sequence[int]]) -> list[Box] | None:
    """The tiles of a virtual dataset; None if it is not made of boxes.

    Parameters
    ----------
    dataset : OpenDataset
        The virtual dataset.
    names : sequence
        The names of each mapping.
    shapes : sequence
        The shape of the part of each mapping.
    """
    creation, boxes = dataset.creation, list[Box]()
    for k, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        space = creation.get_virtual_vspace(k)
        if not space.get_select_npoints():
            continue
        runs, runs_in_part = _runs_of(space, dataset.shape), _runs_of(creation.get_virtual_srcspace(k), shape)
        if runs is None or runs_in_part is None or any(len(along_axis) > 1 for along_axis in runs_in_part):
            return None
        start = tuple(run.start for (run,) in runs_in_part)
        axes = _axes_along([sum(map(len, along_axis)) for along_axis in runs], [len(run) for (run,) in runs_in_part])
        if axes is None or len(boxes) + math.prod(map(len, runs)) > _MOST_TILES:
            return None
        for index in itertools.product(*map(enumerate, runs)):
            region = Region(tuple(run.start for _, run in index), tuple(run.stop for _, run in index))
            before = [*(i * len(run) for i, run in index), 0]  # elements of the part; none along no axis, which is -1
            boxes.append(Box(region, name, tuple(a + before[k] for a, k in zip(start, axes, strict=True)), axes))
    return None if _overlap(*_ends_of(boxes, dataset.ndim)) else boxes


def tell_parts(
    dataset: OpenDataset, names: Sequence[Names], metadata: Mapping[Names, PartMetadata], chunks: tuple[int, ...] | None
) -> dict[str, Any] | None:
    """What ranks that read must know of the parts, as plain JSON (`ArrayInfo.parts`); None if they cannot be read.

    Parameters
    ----------
    dataset : OpenDataset
        The virtual dataset.
    names : sequence
        The names of each mapping.
    metadata : mapping
        Of the part at each of their names.
    chunks : tuple of int or None
        The grid by which it is read.
    """
    parts, virtual = [metadata[name] for name in names], PartMetadata.of(dataset, ())
    boxes = find_boxes(dataset, names, [part.shape for part in parts])
    if boxes is None or not all(np.can_cast(part.dtype, virtual.dtype) for part in parts):
        return None
    return {
        "versions": [list(part.version) for part in parts],
        "shapes": [part.shape for part in parts],
        "is_one_grid": _is_one_grid(boxes, [metadata[box.names] for box in boxes], virtual, chunks),
        "in_store": any(name in dataset.facts.in_store for name in names),
    }


def _same_kind(kind: bytes, other: bytes) -> bool:
    """True if two encoded types are one. In a file of `libver` "latest", HDF5 encodes records and names in another way."""
    return kind == other or bool(h5py.h5t.decode(kind).equal(h5py.h5t.decode(other)))


def _is_one_grid(
    boxes: Sequence[Box], parts: Sequence[PartMetadata], virtual: PartMetadata, chunks: tuple[int, ...] | None
) -> bool:
    """True if each chunk of the grid is one chunk of one part, and all are encoded alike."""
    if chunks is None or not boxes:
        return False
    shape = virtual.shape
    for box, part in zip(boxes, parts, strict=True):
        if part.chunks is None or not part.is_raw or not part.fill:
            return False
        if (part.chunks, part.filters, part.fill) != (parts[0].chunks, parts[0].filters, parts[0].fill):
            return False
        if part.dtype != virtual.dtype or not _same_kind(part.kind, parts[0].kind):
            return False
        n = len(shape) - len(part.chunks)
        if (1,) * n + part.chunks != chunks or box.axes != tuple(range(n, len(shape))):
            return False
        starts_in_part = (0,) * n + box.start
        for a, b, c, start, length in zip(box.region.start, box.region.stop, chunks, starts_in_part, shape, strict=True):
            if a % c or start % c or (b % c and b != length):
                return False
    return sum(box.region.size for box in boxes) == math.prod(shape) or parts[0].fill == virtual.fill


def _runs_of(space: Any, shape: Sequence[int]) -> list[list[range]] | None:
    """The elements that are selected, as runs along each axis: one along each of a box. None if it is irregular, reaches out of
    the shape, or has too many runs.
    """
    selection = space.get_select_type()
    if selection == h5py.h5s.SEL_ALL:
        return [[range(n)] for n in shape]
    if selection != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        return None
    runs = []
    for start, step, n, length, most in zip(*space.get_regular_hyperslab(), shape, strict=True):
        if start + (n - 1) * step + length > most:
            return None
        if step == length:
            n, length = 1, n * length
        if n > _MOST_TILES:
            return None
        runs.append([range(start + k * step, start + k * step + length) for k in range(n)])
    return runs


def _axes_along(shape: Sequence[int], part_shape: Sequence[int]) -> tuple[int, ...] | None:
    """For each axis of a part, the axis of the virtual dataset that it lies along: HDF5 takes elements in C order.

    >>> _axes_along((1, 4, 5), (4, 5)), _axes_along((4, 5), (4, 5)), _axes_along((4, 5), (5, 4)), _axes_along((4, 1), (1, 4))
    ((1, 2), (0, 1), None, (-1, 0))
    """
    n_more = len(shape) - len(part_shape)
    if tuple(shape) == (1,) * n_more + tuple(part_shape):
        return tuple(range(n_more, len(shape)))
    long_axes = [k for k, n in enumerate(shape) if n != 1]
    if [shape[k] for k in long_axes] != [n for n in part_shape if n != 1]:
        return None
    axes = iter(long_axes)
    return tuple(-1 if n == 1 else next(axes) for n in part_shape)


def _ends_of(boxes: Sequence[Box], ndim: int) -> list[Ints]:
    """Where the tiles begin and end in the virtual dataset: a row each."""
    ends = ([getattr(box.region, end) for box in boxes] for end in ("start", "stop"))
    return [np.array(end, dtype=np.int64).reshape(len(boxes), ndim) for end in ends]


def _overlap(start: Ints, stop: Ints) -> bool:
    """True if two regions (a row each) share an element, or if that would take long to find out."""
    if len(start) < 2:
        return False
    for a, b in zip(start.T, stop.T, strict=True):  # rows of tiles lie apart along one axis, and each row's along another
        order = np.argsort(a, kind="stable")
        cuts = np.flatnonzero(a[order[1:]] >= np.maximum.accumulate(b[order])[:-1]) + 1
        if len(cuts):
            return any(_overlap(start[row], stop[row]) for row in np.split(order, cuts) if len(row) > 1)
    if len(start) > _MOST_COMPARED:
        return True
    overlaps = ((start[:, None] < stop[None]) & (start[None] < stop[:, None])).all(axis=2)
    return bool(overlaps.sum() > len(start))  # more than each with itself


class Tiles(ChunkReader):
    """The tiles of one open virtual dataset, and a reader of their chunks if these lie on one grid and are encoded alike.

    Parameters
    ----------
    boxes : sequence of Box
        From `find_boxes`.
    versions : mapping of Names to tuple of int
        Of the parts, from when they were looked at.
    info : ArrayInfo
        Of the virtual dataset, with `parts`.
    fill : ndarray
        Value of what no part covers: an array without axes.
    open_part : PartOpener
        Opens the source of a part.
    expected : Region or None
        All that will be read; None for the whole.
    """

    def __init__(
        self,
        boxes: Sequence[Box],
        versions: Mapping[Names, Sequence[int]],
        info: ArrayInfo,
        fill: np.ndarray[Any, Any],
        open_part: PartOpener,
        expected: Region | None = None,
    ) -> None:
        self._boxes, self.shape, self._chunks, self._fill, self._open_part = boxes, info.shape, info.chunks, fill, open_part
        self._versions, self._is_one_grid = versions, bool(info.parts and info.parts["is_one_grid"])
        self._start, self._stop = _ends_of(boxes, len(info.shape))
        self._tiles_of: dict[Names, list[Box]] = {}
        for box in boxes:
            self._tiles_of.setdefault(box.names, []).append(box)
        self._lock = threading.Lock()
        self._open: dict[Names, Source] = {}  # the last used ones last
        self._n_users: Counter[Names] = Counter()
        self._is_closed = False
        self._expected = expected or Region.whole(info.shape)
        self._decoder: Any = None
        self._is_read_plain, self._n_at_urls = False, 0  # how many parts at URLs were opened
        self._files: dict[Names, list[str]] = {}  # that hold the values of the parts that were opened

    def n_changed(self) -> int:
        """How many of the parts that were opened have changed since they were looked at."""
        with self._lock:
            files = list(self._files.items())
        states = [(names, {path: state_of(path) or (0, 0) for path in paths}) for names, paths in files if paths]
        return sum(version_of(now) != tuple(self._versions[names]) for names, now in states)

    def meeting(self, region: Region) -> Iterator[tuple[int, Region]]:
        """The tiles that a non-empty region meets, and what it has in common with each."""
        low, high = np.asarray(region.start, dtype=np.int64), np.asarray(region.stop, dtype=np.int64)
        is_met = ((self._start < high) & (self._stop > low)).all(axis=1)
        for k in np.flatnonzero(is_met).tolist():
            common = self._boxes[k].region.intersect(region)
            if common is not None:
                yield k, common

    @contextmanager
    def use(self, k: int) -> Iterator[Source]:
        """The part of tile k, open until the end of the ``with`` statement."""
        names = self._boxes[k].names
        with self._lock:
            if self._is_closed:
                raise OSError("the file was closed")
            source = self._open.pop(names, None) or self._opened(names)
            self._open[names] = source
            self._n_users[names] += 1
            n_more = len(self._open) - _MOST_OPEN - (0 if self._is_read_plain else self._n_at_urls)
            if n_more > 0:
                idle = [key for key, part in self._open.items() if not self._n_users[key] and self._may_close(part)]
                for key in idle[:n_more]:
                    self._open.pop(key).close()
        try:
            yield source
        finally:
            with self._lock:
                self._n_users[names] -= 1

    def _may_close(self, source: Source) -> bool:
        """False for a part at a URL: what was fetched ahead of it would be lost. But `plain` keeps up to 32 MiB of each."""
        return self._is_read_plain or not is_remote(source.info.path)

    def _opened(self, names: Names) -> Source:
        """Open a part. ChangedError if it has changed since it was looked at."""
        source, files = self._open_part(*names)
        with Undo(source.close):
            expected, state = tuple(self._versions[names]), version_of(files)
            if files and state != expected:
                changed = f"had {expected[0]} bytes and has {state[0]}" if state[0] != expected[0] else "has another time"
                raise ChangedError(
                    f"'{source.info.path}' has changed since it was looked at ({changed}). Load it again, or make a new plan"
                )
            self._files[names] = [path for path in files if not is_remote(path)]  # of a URL, each answer has its version
            tiles = [(box, box.region.intersect(self._expected)) for box in self._tiles_of[names]]
            wanted = [box.inside(region) for box, region in tiles if region is not None]
            if wanted:
                starts, stops = ([getattr(region, end) for region in wanted] for end in ("start", "stop"))
                source.expect(Region(tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*stops, strict=True)))))
            self._n_at_urls += is_remote(source.info.path)
            return source

    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> list[tuple[int, ...]]:
        """Write the values of a non-empty region into `out`, as `Source.read_into` does. Returns the chunks of the virtual
        dataset's grid in which chunks of parts are missing, or which no part covers.
        """
        tiles_met = list(self.meeting(region))
        missing = self._uncovered(region, [common for _, common in tiles_met])
        if sum(common.size for _, common in tiles_met) < region.size:
            out[...] = self._fill
        for k, common in tiles_met:
            box = self._boxes[k]
            in_part = box.inside(common)
            into = out[common.slices(region.start)] if region.ndim else out
            with self.use(k) as part:
                is_in_place = into.flags.c_contiguous and part.dtype == out.dtype
                values = into if is_in_place else np.empty(common.shape, part.dtype)
                missing_in_part = part.read_into(in_part, values.reshape(in_part.shape))
                missing |= self._on_grid(missing_in_part, part.info.chunks, box, common)
            if values is not into:
                np.copyto(into, values)
        return list(missing)

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """See `Source`, for parts at URLs, which HDF5 does not open."""
        self._is_read_plain = True
        out = np.full(region.shape, self._fill)
        for k, common in self.meeting(region) if region.size else ():
            with self.use(k) as part:
                out[common.slices(region.start)] = part.plain(self._boxes[k].inside(common)).reshape(common.shape)
        return out

    def _on_grid(
        self, missing_in_part: Sequence[tuple[int, ...]], part_chunks: tuple[int, ...] | None, box: Box, region: Region
    ) -> dict[tuple[int, ...], None]:
        """The missing chunks that a part has in `region`, as those of the virtual dataset's grid."""
        chunks = self._chunks
        if chunks is None or not missing_in_part:
            return dict.fromkeys([()] if missing_in_part else [])
        if part_chunks is None:  # no value of the part is stored
            return dict.fromkeys(itertools.product(*chunks_met(region, chunks)))
        missing: dict[tuple[int, ...], None] = {}
        for index in missing_in_part:
            ends = ([(i + k) * c for i, c in zip(index, part_chunks, strict=True)] for k in (0, 1))
            low, high = box.outside(*ends)
            inside = Region(tuple(map(max, low, region.start)), tuple(map(min, high, region.stop)))
            missing |= dict.fromkeys(itertools.product(*chunks_met(inside, chunks)))
        return missing

    def _uncovered(self, region: Region, covered: Sequence[Region]) -> dict[tuple[int, ...], None]:
        """The chunks of which no part covers any element, of a region whose other elements are `covered`."""
        if sum(part.size for part in covered) == region.size:
            return {}
        if self._chunks is None:
            return {(): None}
        box = chunks_met(region, self._chunks)
        is_met = np.zeros(tuple(map(len, box)), dtype=bool)
        for part in covered:
            chunks = chunks_met(part, self._chunks)
            is_met[tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(chunks, box, strict=True))] = True
        indices = np.argwhere(~is_met) + [axis.start for axis in box]
        return dict.fromkeys(map(tuple, indices.tolist()))

    def chunk_reader(self) -> ChunkReader | None:
        """A reader of the chunks of all parts; None if they do not lie on one grid, or are not encoded alike."""
        if self._chunks is None or not self._is_one_grid:
            return None
        k = next((k for k, _ in self.meeting(self._expected)), 0) if self._expected.size else 0
        with self.use(k) as part:
            reader = part.chunk_reader()
            if reader is None:
                return None
            if self._decoder is None:
                self._n_users[self._boxes[k].names] += 1  # it decodes for all, until they are closed
                self._decoder = reader
        return self

    def expect_in_order(self, regions: Iterator[Region]) -> None:
        """See `Source`, for parts at URLs."""
        met = ((k, self._boxes[k].inside(common)) for region in regions if region.size for k, common in self.meeting(region))
        for k, regions_of_part in itertools.groupby(met, key=lambda pair: pair[0]):
            with suppress(OSError), self.use(k) as part:  # who reads it meets the same error, and raises it
                part.expect_in_order(iter([region for _, region in regions_of_part]))

    def expect(self, boxes: Iterator[Sequence[range]]) -> None:
        """See `ChunkReader`, for parts at URLs."""
        whole = Region.whole(self.shape)
        self.expect_in_order(region_in_box(box, self._chunks or (), whole) for box in boxes)

    def fetch(self, box: Sequence[range], room: Room = fresh) -> Encoded:
        """Read a box of chunks as they are stored; those that no part covers are missing."""
        parts = self._parts_of(box)
        if len(parts) == 1 and parts[0][1] == tuple(box):
            with self.part_at(parts[0][0], box) as (reader, inside):
                return reader.fetch(inside, room)
        data = np.full(tuple(map(len, box)), None, dtype=object)
        numbers, skipped = np.arange(data.size).reshape(data.shape), dict[int, frozenset[int]]()
        for k, common in parts:
            index = tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(common, box, strict=True))
            with self.part_at(k, common) as (reader, inside):
                encoded = reader.fetch(inside)
            chunks = np.empty(len(encoded.data), dtype=object)
            chunks[:] = encoded.data
            data[index] = chunks.reshape(data[index].shape)
            skipped |= {int(numbers[index].flat[number]): stages for number, stages in encoded.skipped.items()}
        return Encoded(data.reshape(-1).tolist(), skipped)

    def _parts_of(self, box: Sequence[range]) -> list[tuple[int, tuple[range, ...]]]:
        """The parts that a box of chunks meets, and which of these chunks each has."""
        chunks = self._chunks or ()
        check_box(box, [-(-n // c) for n, c in zip(self.shape, chunks, strict=True)])
        region = region_in_box(box, chunks, Region.whole(self.shape))
        return [(k, tuple(chunks_met(common, chunks))) for k, common in self.meeting(region)]

    def decode(self, encoded: Encoded, out: np.ndarray[Any, Any]) -> None:
        """Decode them."""
        self._decoder.decode(encoded, out)

    def read_plain(self, box: Sequence[range], out: np.ndarray[Any, Any]) -> bool:
        """Read chunks of plain values that lie in one part straight into `out`."""
        parts = self._parts_of(box)
        if len(parts) != 1 or parts[0][1] != tuple(box):
            return False
        with self.part_at(parts[0][0], box) as (reader, inside):
            return reader.read_plain(inside, out)

    @contextmanager
    def part_at(self, k: int, box: Sequence[range]) -> Iterator[tuple[ChunkReader, list[range]]]:
        """The reader of part k, and a box of the virtual dataset's chunks that lie in it, as one of the part's chunks."""
        tile, chunks = self._boxes[k], self._chunks or ()
        with self.use(k) as part:
            reader = part.chunk_reader()
            if reader is None:
                raise ChangedError(f"{part.info} is encoded in another way than when it was looked at. Make a new plan")
            n = len(chunks) - len(tile.start)
            starts = zip(tile.region.start, (0,) * n + tile.start, chunks, strict=True)
            shifts = [(outside - inside) // c for outside, inside, c in starts]
            yield reader, [range(axis.start - s, axis.stop - s) for axis, s in zip(box, shifts, strict=True)][n:]

    def close(self) -> None:
        """Close the parts."""
        with self._lock:
            self._is_closed = True
            while self._open:
                self._open.popitem()[1].close()
