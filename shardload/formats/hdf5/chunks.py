"""How do several threads read and decode the chunks of an HDF5 dataset, although the HDF5 library does one at a time?

1. `open_chunks` accepts a dataset if this module can do all that HDF5 would do: the type and every filter are known.
2. `Hdf5Chunks.fetch` asks HDF5, under its lock, where the chunk is. It reads the bytes without HDF5 and without its lock.
3. `Hdf5Chunks.decode` undoes the filters with `codecs.chains.Chain`. The values of a missing chunk are the fill value.

To find a chunk: the index of most files can be read without HDF5 (`chunk_index`). Of the others, HDF5 lists all chunks in a
microsecond each, but walks the same list to find one (``H5Dget_chunk_info_by_coord``). So all chunks are listed once, as soon
as that costs little compared with the chunks that were asked for. Until then a chunk is read by ``H5Dread_chunk``, which finds
it in the index directly, but copies it under the lock.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil  # HDF5's lock in h5py, which its raw reads did not always take (h5py issue 2764)

from shardload.formats.codecs.chains import Chain, decode_many
from shardload.formats.codecs.transforms import decode_byte_order
from shardload.formats.contract.by_chunks import check_chunk, chunks_met
from shardload.formats.contract.chunk_reader import Encoded, Room, fresh
from shardload.formats.contract.dtypes import is_added
from shardload.formats.contract.ranges import Spans
from shardload.formats.hdf5.chunk_index import MOST_ENTRIES, list_tree
from shardload.formats.hdf5.chunk_order import PutRight, UnknownOrderError, is_listed, is_over_edge, true_place
from shardload.formats.hdf5.filters import stage_of
from shardload.formats.hdf5.integrity import Whole
from shardload.formats.hdf5.missing import MISSING_WORDS
from shardload.formats.hdf5.opened import creation_of, header_of, kind_of
from shardload.formats.hdf5.raw_file import RawFile, swap_size
from shardload.formats.hdf5.unwrapped import are_edges_plain
from shardload.planning.grid import numbers_in, ravel
from shardload.planning.region import Region

__all__ = ["Hdf5Chunks", "fill_value", "open_chunks"]

_LIST_AT_ONCE = 1024  # chunks: listing them takes a millisecond
_LISTED_PER_FETCH = 64  # chunks more to list, at 1-2 microseconds each, per chunk that was asked for
_MOST_LISTED = 1 << 21  # chunks: the list takes 20 bytes for each
_WORTH_A_BOX = 8  # times more chunks than are expected; with fewer, all are listed, and compared with what HDF5 has counted
_MOST_COMPARED = 1 << 16  # chunks of a dataset; of more, only the expected ones are listed
_FASTER_BY_INDEX = 8  # if batches are asked for, so many times more chunks may be listed in that way
_TOLD_AT_ONCE = 1 << 16  # chunks: HDF5's answers take some hundred bytes for each, until they are in the list
_LEAST_IN_A_RUN = 4  # chunks that follow each other in the file; with fewer on average, HDF5 reads them as fast
_NOWHERE = 2**64 - 1


def open_chunks(
    dataset: h5py.Dataset, dtype: np.dtype[Any], raw: RawFile, whole: Whole, expected: Region | None = None
) -> Hdf5Chunks | None:
    """A reader for the chunks of `dataset` as values of `dtype` (a native type); None if only HDF5 may decode them.

    Chunks that meet `expected` (by default: all) will be asked for, and hardly any other.
    """
    creation = creation_of(dataset)
    swap = swap_size(kind_of(dataset), dtype)
    if creation.get_layout() != h5py.h5d.CHUNKED or swap is None:
        return None
    filters = [creation.get_filter(k) for k in range(creation.get_nfilters())]
    stages = [stage_of(number, values) for number, _, values, _ in reversed(filters)]
    known = [stage for stage in stages if stage is not None]
    if len(known) < len(stages):
        return None
    if creation.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED and _is_empty(dataset):
        return None  # no values at all: HDF5 raises an error
    chunk = tuple(creation.get_chunk())
    reaches_over = any(n % c for n, c in zip(dataset.shape, chunk, strict=True))
    has_plain_edges = are_edges_plain(creation) if filters and reaches_over else False
    if has_plain_edges is None:
        return None
    chain = Chain([*known, *([decode_byte_order(swap)] if swap else [])], math.prod(chunk) * dtype.itemsize)
    return Hdf5Chunks(dataset, dtype, raw, whole, chain, len(known), has_plain_edges, expected)


def fill_value(dataset: h5py.Dataset, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The value of `dataset` where nothing was written, as a 0-d array; zero if HDF5 leaves the reader's buffer as it is.

    HDF5 does that if the dataset's creator chose never to fill, or no fill value. h5py passes HDF5 a buffer of zeros.
    """
    creation = creation_of(dataset)
    value = np.zeros((), np.float32 if is_added(dtype) else dtype)
    if not leaves_gaps(dataset):
        creation.get_fill_value(value)
    return value.astype(dtype)


def leaves_gaps(dataset: h5py.Dataset) -> bool:
    """True if HDF5 writes nothing into the reader's buffer for missing values."""
    creation = creation_of(dataset)
    return bool(
        creation.get_fill_time() == h5py.h5d.FILL_TIME_NEVER or creation.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
    )


def _is_empty(dataset: h5py.Dataset) -> bool:
    """True if no chunk was ever written. HDF5 goes through the index of all chunks for that."""
    return bool(dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED)


class _List:
    """Where the chunks of a box are. Offset, size and filter mask of each; if bit k of the mask is set, filter k was left out.

    Attributes
    ----------
    box : sequence of range
        The chunks, along each axis of the grid of all.
    offsets, sizes, masks : ndarray
        Of each chunk of the box, in C order. The offset of a missing chunk is `_NOWHERE`.
    end : int or None
        Where the last chunk in the file ends, if nothing must be looked at for each chunk: see `settle`.
    """

    def __init__(self, box: Sequence[range]) -> None:
        self.box = box
        self._counts = tuple(map(len, box))
        n = math.prod(self._counts)
        self.offsets = np.full(n, _NOWHERE, dtype=np.uint64)
        self.sizes = np.zeros(n, dtype=np.uint64)
        self.masks = np.zeros(n, dtype=np.uint32)
        self.end: int | None = None
        self._usual: tuple[np.ndarray[Any, Any], ...] = ()

    def settle(self, most_nbytes: int) -> None:
        """Ask once, for batches, what would have to be asked for each: is it there, was it filtered, may it be so long?"""
        offsets, sizes = self.offsets.view(np.int64), self.sizes.view(np.int64)  # a missing chunk is at -1
        if not len(offsets) or self.masks.any() or int(offsets.min()) < 0:
            return
        if int(sizes.min()) < 0 or int(sizes.max()) > most_nbytes or int(offsets.max()) > _NOWHERE // 4:
            return
        self._usual = offsets.reshape(self._counts), sizes.reshape(self._counts)
        self.end = int((offsets + sizes).max())

    def note(self, axes: Sequence[np.ndarray[Any, Any]], offsets: Any, sizes: Any, masks: Any) -> None:
        """Add chunks, given by their positions along each axis of the grid. Those that are not of the box are left out."""
        at, is_inside = np.zeros(len(axes[0]), dtype=np.int64), np.ones(len(axes[0]), dtype=bool)
        for place, axis in zip(axes, self.box, strict=True):
            is_inside &= (place >= axis.start) & (place < axis.stop)
            at = at * len(axis) + (place - axis.start)
        at = at[is_inside]
        for column, values in ((self.offsets, offsets), (self.sizes, sizes), (self.masks, masks)):
            column[at] = np.asarray(values, dtype=column.dtype)[is_inside]

    def of(self, index: tuple[int, ...]) -> tuple[int, int, int]:
        """Offset, size and mask of a chunk of the box."""
        at = ravel([k - axis.start for k, axis in zip(index, self.box, strict=True)], self._counts)
        return int(self.offsets[at]), int(self.sizes[at]), int(self.masks[at])

    def of_many(self, box: Sequence[range]) -> tuple[np.ndarray[Any, Any], ...]:
        """Offsets, sizes and masks of chunks of the box, in C order."""
        inside = [range(one.start - axis.start, one.stop - axis.start) for one, axis in zip(box, self.box, strict=True)]
        at = numbers_in(inside, self._counts)
        return self.offsets[at], self.sizes[at], self.masks[at]

    def spans(self, box: Sequence[range]) -> Spans:
        """The same for a list with an `end`, faster."""
        inside = tuple([slice(one.start - axis.start, one.stop - axis.start) for one, axis in zip(box, self.box, strict=True)])
        offsets, sizes = self._usual
        return Spans(offsets[inside].reshape(-1), sizes[inside].reshape(-1))


class Hdf5Chunks:
    """The chunks of one open HDF5 dataset. Made by `open_chunks`.

    Parameters
    ----------
    dataset : h5py.Dataset
        An open, chunked dataset.
    dtype : dtype
        Type of the decoded values, in native byte order.
    raw : RawFile
        The file that holds it.
    whole : Whole
        Checks that the file was not cut.
    chain : Chain
        Undoes its filters, the last one first, and then the byte order.
    n_filters : int
        How many stages of the chain are filters; they come first.
    has_plain_edges : bool
        Whether chunks that reach over the array's edge are stored without filters.
    expected : Region, optional
        Chunks that meet it will be asked for, and hardly any other: only where these are is listed.
    """

    def __init__(
        self,
        dataset: h5py.Dataset,
        dtype: np.dtype[Any],
        raw: RawFile,
        whole: Whole,
        chain: Chain,
        n_filters: int,
        has_plain_edges: bool,
        expected: Region | None = None,
    ) -> None:
        self._whole = whole
        self._identifier, self._dtype, self._raw, self._chain = dataset.id, dtype, raw, chain
        self._n_filters, self._has_plain_edges = n_filters, has_plain_edges
        self._shape: tuple[int, ...] = dataset.shape
        self._chunk: tuple[int, ...] = dataset.chunks
        self._grid = tuple(-(-n // c) for n, c in zip(self._shape, self._chunk, strict=True))
        self._dataset = dataset
        self._most_nbytes = chain.most_stored_nbytes
        self._header = header_of(dataset)
        self._listing = threading.Lock()
        self._listed: _List | None = None
        self._box = [range(n) for n in self._grid]
        if expected is not None and expected.size:
            box, n = chunks_met(expected, self._chunk), math.prod(self._grid)
            if n > _MOST_COMPARED or math.prod(map(len, box)) * _WORTH_A_BOX <= n:
                self._box = box
        self._may_list = math.prod(self._grid) <= _MOST_LISTED and hasattr(self._identifier, "chunk_iter")
        self._may_have_index = self._is_tree = self._header is not None
        self._n_fetched = 0

    @functools.cached_property
    def _fill(self) -> np.ndarray[Any, Any]:
        """The value of missing chunks."""
        with phil:
            return fill_value(self._dataset, self._dtype)

    def fetch(self, index: tuple[int, ...], room: Room = fresh) -> Encoded | None:
        """Read the chunk at `index` as it is stored; None if it is missing.

        Raises
        ------
        OSError
            If the file ends before the chunk does, or cannot be read.
        ValueError
            If `index` is outside the grid, or the file declares a size that no chunk of this dataset can have.
        """
        check_chunk(index, self._grid)
        offsets = tuple(k * c for k, c in zip(index, self._chunk, strict=True))
        listed = self._places([range(k, k + 1) for k in index])
        if listed is None:
            return self._fetch_by_hdf5(offsets, room)
        offset, nbytes, mask = listed.of(index)
        if offset == _NOWHERE:
            return None
        if nbytes > self._most_nbytes:
            raise self._too_long()
        end, end_of_file = offset + nbytes, self._raw.nbytes
        if end > end_of_file:
            raise OSError(f"the file ends at byte {end_of_file}, but the chunk is stored at bytes {offset} to {end}")
        data = room(nbytes)
        self._raw.read_into(data, offset)
        return self._encoded(data, mask, offsets)

    def decode(self, encoded: Encoded | None, out: np.ndarray[Any, Any]) -> None:
        """Decode into `out`, which has the chunk's full shape. ValueError if the chunk is damaged."""
        if encoded is None:
            out[...] = self._fill
        else:
            self._chain.decode(encoded.data, out, encoded.skipped)

    def fetch_many(self, box: Sequence[range], room: Room = fresh) -> list[Any] | None:
        """Read a box of chunks as they are stored: see `BatchReader`. None if filters were left out for any of them."""
        if len(box) != len(self._grid) or any(
            not 0 <= axis.start <= axis.stop <= n for axis, n in zip(box, self._grid, strict=True)
        ):
            raise ValueError(f"there are no chunks {box} in a grid of {self._grid}")
        n = math.prod(map(len, box))
        reaches_over = any(axis.stop * c > end for axis, c, end in zip(box, self._chunk, self._shape, strict=True))
        if not self._chain.takes_many or (self._has_plain_edges and reaches_over):
            return None
        listed = self._places(box)
        if listed is None:
            return self._fetch_many_by_hdf5(box, room)
        if listed.end is not None and listed.end <= self._raw.nbytes:
            spans = listed.spans(box)
            return list(self._raw.read_spans(spans, room(spans.nbytes)))
        offsets, sizes, masks = listed.of_many(box)
        stored = offsets != _NOWHERE
        offsets, sizes = offsets[stored].astype(np.int64), sizes[stored].astype(np.int64)
        is_usual = not masks[stored].any() and (sizes <= self._most_nbytes).all() and (offsets >= 0).all()
        if not is_usual or (offsets + sizes > self._raw.nbytes).any():
            return None
        spans = Spans(offsets, sizes)
        read = self._raw.read_spans(spans, room(spans.nbytes))
        if len(read) == n:
            return list(read)
        found: list[Any] = [None] * n
        for k, one in zip(np.flatnonzero(stored).tolist(), read, strict=True):
            found[k] = one
        return found

    def read_plain(self, box: Sequence[range], out: np.ndarray[Any, Any]) -> bool:
        """Read a box of chunks that are stored as plain values straight into `out`: see `PlainReader`."""
        n = math.prod(map(len, box))
        if self._chain.names or not n or out.nbytes != n * self._chain.nbytes:
            return False
        listed = self._places(box)
        if listed is None:
            return False
        offsets, sizes, masks = listed.of_many(box)
        size = self._chain.nbytes
        if masks.any() or (sizes != size).any() or (offsets == _NOWHERE).any():
            return False
        if int(offsets.max()) > self._raw.nbytes - size:
            return False
        ends = [
            *np.flatnonzero(np.diff(offsets) != size).tolist(),
            n - 1,
        ]  # the last of chunks that follow each other in the file
        if len(ends) * _LEAST_IN_A_RUN > n:
            return False
        whole, first = out.reshape(-1).view(np.uint8), 0
        for last in ends:
            self._raw.read_into(whole[first * size : (last + 1) * size], int(offsets[first]))
            first = last + 1
        return True

    def decode_many(self, stored: Sequence[Any], out: np.ndarray[Any, Any]) -> None:
        """Decode chunks that `fetch_many` returned: see `BatchReader`."""
        decode_many(self._chain, stored, out, self._fill)

    def _encoded(self, data: np.ndarray[Any, Any], mask: int, offsets: tuple[int, ...]) -> Encoded:
        n = self._n_filters
        skipped = frozenset(n - 1 - k for k in range(n) if mask >> k & 1)
        if self._has_plain_edges and is_over_edge(offsets, self._chunk, self._shape):
            skipped = frozenset(range(n))
        return Encoded(data, skipped)

    def _too_long(self) -> ValueError:
        return ValueError(
            f"the file declares more than {self._most_nbytes} stored bytes for a chunk of {self._chain.nbytes}, which its "
            "filters cannot make of it: its index is damaged"
        )

    def _fetch_by_hdf5(self, offsets: tuple[int, ...], room: Room) -> Encoded | None:
        """Do the same as `fetch`, without knowing where the chunk is."""
        try:
            with phil:
                mask, data = self._identifier.read_direct_chunk(offsets, out=room(self._most_nbytes))
        except (MemoryError, OSError, RuntimeError, ValueError) as error:
            # For a missing chunk, versions of HDF5 raise one of several errors, or give an impossible size. The slow question
            # (by coordinates) has a sure answer.
            said = str(error)
            if any(words in said for words in MISSING_WORDS):
                self._check_search(offsets)
                return None
            if _is_empty(self._dataset) or not is_listed(self._dataset, offsets):
                self._check_search(offsets)
                return None
            if isinstance(error, ValueError) and "buffer is only" in said:
                raise self._too_long() from None
            raise OSError(said) from error
        self._whole.check()  # HDF5 gives zeros past the end of the file
        return self._encoded(np.frombuffer(data, dtype=np.uint8), mask, offsets)

    def _check_search(self, offsets: tuple[int, ...]) -> None:
        """DamagedIndexError if HDF5 does not find a chunk only because the index contradicts itself."""
        if self._is_tree and self._header is not None:
            box = [range(at // c, at // c + 1) for at, c in zip(offsets, self._chunk, strict=True)]
            told = list_tree(self._raw.read_at_most, self._header, self._chunk, self._grid, MOST_ENTRIES, box)
            self._is_tree = told is not None

    def _fetch_many_by_hdf5(self, box: Sequence[range], room: Room) -> list[Any] | None:
        """Do the same as `fetch_many`, without knowing where the chunks are."""
        found: list[Any] = []
        for index in itertools.product(*box):
            one = self._fetch_by_hdf5(tuple(k * c for k, c in zip(index, self._chunk, strict=True)), room)
            if one is not None and one.skipped:
                return None
            found.append(None if one is None else one.data.tobytes())  # the next chunk has the same room
        return found

    def _places(self, box: Sequence[range]) -> _List | None:
        """Where the chunks of a box are, and others; None while listing them would cost too much for what was asked for."""
        listed = self._listed
        if listed is None and (self._may_list or self._may_have_index):
            listed = self._list(math.prod(map(len, box)))
        is_there = listed is not None and all(
            axis.start <= one.start and one.stop <= axis.stop for one, axis in zip(box, listed.box, strict=True)
        )
        return listed if is_there else None

    def _list(self, n: int) -> _List | None:
        """List all chunks that are expected, if that is worth it for `n` chunks more."""
        with self._listing:
            self._n_fetched += n
            worth = _LIST_AT_ONCE + _LISTED_PER_FETCH * self._n_fetched
            n_expected, n_all = math.prod(map(len, self._box)), math.prod(self._grid)
            if self._listed is None and self._may_have_index and n_expected <= (worth if n == 1 else _FASTER_BY_INDEX * worth):
                self._keep(self._list_by_index())
                self._may_have_index = False
            if self._listed is None and self._may_list and n_all <= worth:
                self._keep(self._list_by_hdf5())
                self._may_list = self._listed is not None
            return self._listed

    def _keep(self, listed: _List | None) -> None:
        if listed is not None:
            listed.settle(self._most_nbytes)
            self._listed = listed  # last: other threads see the list as soon as it is there

    def _list_by_index(self) -> _List | None:
        """Where all expected chunks are, from the file's own index; None if only HDF5 can say it.

        If all chunks are expected, their number and that of their bytes must be what HDF5 has counted, in the same index.
        """
        n_expected, n_all = math.prod(map(len, self._box)), math.prod(self._grid)
        if self._header is None or n_expected > MOST_ENTRIES:
            return None
        box = None if n_expected == n_all else self._box
        told = list_tree(self._raw.read_at_most, self._header, self._chunk, self._grid, min(n_all, MOST_ENTRIES), box)
        if told is None:
            return None
        numbers, entries = told.numbers, told.entries
        if box is None:
            with phil:
                if self._identifier.get_num_chunks() != len(entries):
                    return None
                if self._identifier.get_storage_size() != int(entries["nbytes"].sum(dtype=np.uint64)):
                    return None
        found = _List(self._box)
        found.note(np.unravel_index(numbers, self._grid), entries["child"], entries["nbytes"], entries["mask"])
        return found

    def _list_by_hdf5(self) -> _List | None:
        """The same as HDF5 says it; None if it contradicts itself."""
        try:
            put_right = true_place(self._dataset)
        except UnknownOrderError:
            return None
        n, found = math.prod(self._grid), _List(self._box)
        told: list[Any] = []
        is_ordered = True

        def tell(chunk: Any) -> None:
            nonlocal is_ordered
            told.append(chunk)
            if len(told) > _TOLD_AT_ONCE:
                is_ordered &= self._note(told, found, put_right)
                del told[:-1]  # the last one is compared below, and with the next one

        with phil:
            # A function in Python takes as long for each chunk as HDF5 itself: only if the list must not grow.
            self._identifier.chunk_iter(told.append if n <= _TOLD_AT_ONCE else tell)
            if not (self._note(told, found, put_right) and is_ordered):
                return None
            if told:
                last = told[-1]
                info = self._identifier.get_chunk_info_by_coord(last.chunk_offset)  # searches the same list: not the true place
                if (info.byte_offset, info.size, info.filter_mask) != (last.byte_offset, last.size, last.filter_mask):
                    return None
        return found

    def _note(self, told: list[Any], found: _List, put_right: PutRight | None) -> bool:
        """Add to a list what HDF5 says of some chunks. False if they are not in order: the index is damaged.

        To find one chunk, HDF5 takes it that they are, so it finds none in such a place, or another one.
        """
        if not told:
            return True
        offsets, masks, places, sizes = zip(*told, strict=True)
        ndim = len(self._grid)
        listed = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, len(told) * ndim).reshape(-1, ndim).T
        coordinates = listed if put_right is None else put_right(listed)
        # Outside of the array: the index is damaged. `note` leaves these out, because the grid has no such chunk.
        found.note([axis // c for axis, c in zip(coordinates, self._chunk, strict=True)], places, sizes, masks)
        return put_right is not None or _is_ascending(listed)


def _is_ascending(coordinates: np.ndarray[Any, Any]) -> bool:
    """True if each point comes after the one before, in C order; `coordinates` has a row for each axis.

    >>> _is_ascending(np.array([[0, 0, 4], [0, 5, 0]])), _is_ascending(np.array([[0, 0], [5, 5]]))
    (True, False)
    """
    steps = np.diff(coordinates)
    return bool((np.take_along_axis(steps, (steps != 0).argmax(axis=0)[np.newaxis], axis=0) > 0).all())
