"""How do several threads read and decode the chunks of an HDF5 dataset, although the HDF5 library does one at a time?

1. `open_chunks` accepts a dataset if this module can do all that HDF5 would do: the type and every filter are known.
2. `Hdf5Chunks.fetch` asks HDF5, under its lock, where the chunk is. It reads the bytes without HDF5 and without its lock.
3. `Hdf5Chunks.decode` undoes the filters with `codecs.Chain`. The values of a missing chunk are the fill value.

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
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil  # HDF5's lock in h5py, which its raw reads did not always take (h5py issue 2764)

from shardload.formats.base import Encoded, Excerpt, Room, Spans, check_chunk, fresh
from shardload.formats.codecs import Chain, Stage, blosc, decode_many, fletcher32, inflate, swap_bytes, unshuffle, unzstd
from shardload.formats.excerpts import Excerpts
from shardload.formats.hdf5.chunk_index import list_tree
from shardload.formats.hdf5.chunk_order import PutRight, UnknownOrderError, is_listed, is_over_edge, true_place
from shardload.formats.hdf5.integrity import Whole
from shardload.formats.hdf5.missing import MISSING_WORDS
from shardload.formats.hdf5.opened import OpenDataset, creation_of, kind_of
from shardload.formats.hdf5.raw_file import RawFile, swap_size
from shardload.planning.grid import numbers_in, ravel

__all__ = ["Hdf5Chunks", "fill_value", "open_chunks"]

_LIST_AT_ONCE = 1024  # chunks: listing them takes a millisecond
_LISTED_PER_FETCH = 64  # chunks more to list, at 1-2 microseconds each, per chunk that was asked for
_MOST_LISTED = 1 << 21  # chunks: the list takes 20 bytes for each
_FASTER_BY_INDEX = 8  # if batches are asked for, so many times more chunks may be listed in that way
_MOST_BY_INDEX = 1 << 17  # chunks: the entries of the index take 50 bytes for each, twice
_TOLD_AT_ONCE = 1 << 16  # chunks: HDF5's answers take some hundred bytes for each, until they are in the list
_LEAST_IN_A_RUN = 4  # chunks that follow each other in the file; with fewer on average, HDF5 reads them as fast
_NOWHERE = 2**64 - 1

# Offset, size and filter mask of each chunk. If bit k of the mask is set, filter k was not applied to it.
_Listed = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]


def open_chunks(dataset: h5py.Dataset, dtype: np.dtype[Any], raw: RawFile, whole: Whole) -> Hdf5Chunks | None:
    """A reader for the chunks of `dataset` as values of `dtype` (a native type); None if only HDF5 may decode them."""
    creation = creation_of(dataset)
    swap = swap_size(kind_of(dataset), dtype)
    if creation.get_layout() != h5py.h5d.CHUNKED or swap is None:
        return None
    filters = [creation.get_filter(k) for k in range(creation.get_nfilters())]
    stages = [_stage_of(number, values) for number, _, values, _ in reversed(filters)]
    known = [stage for stage in stages if stage is not None]
    if len(known) < len(stages):
        return None
    if _is_empty(dataset) and creation.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED:
        return None  # no values at all: HDF5 raises an error
    chunk = tuple(creation.get_chunk())
    chain = Chain([*known, *([swap_bytes(swap)] if swap else [])], math.prod(chunk) * dtype.itemsize)
    return Hdf5Chunks(dataset, dtype, raw, whole, chain, known)


def fill_value(dataset: h5py.Dataset, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The value of `dataset` where nothing was written, as a 0-d array; zero if HDF5 leaves the reader's buffer as it is.

    HDF5 does that if the dataset's creator chose never to fill, or no fill value. h5py passes HDF5 a buffer of zeros.
    """
    creation = creation_of(dataset)
    value = np.zeros((), dtype)
    if not leaves_gaps(dataset):
        creation.get_fill_value(value)
    return value


def leaves_gaps(dataset: h5py.Dataset) -> bool:
    """True if HDF5 writes nothing into the reader's buffer for missing values."""
    creation = creation_of(dataset)
    return bool(
        creation.get_fill_time() == h5py.h5d.FILL_TIME_NEVER or creation.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED
    )


def _is_empty(dataset: h5py.Dataset) -> bool:
    """True if no chunk was ever written.

    HDF5 goes through the index of all chunks for that. So if it was asked before what they take, that is enough.
    """
    if isinstance(dataset, OpenDataset) and dataset.nbytes_stored > 0:
        return False
    return bool(dataset.id.get_space_status() == h5py.h5d.SPACE_STATUS_NOT_ALLOCATED)


def _stage_of(number: int, values: tuple[int, ...]) -> Stage | None:
    """The stage that undoes an HDF5 filter; None for a filter that this module does not know."""
    if number == 1:
        return inflate()
    if number == 2:
        return unshuffle(values[0]) if values and values[0] > 0 else None
    if number == 3:
        return fletcher32()
    if number == 32001:
        return blosc()
    return unzstd() if number == 32015 else None


@dataclass(frozen=True, slots=True)
class _Usual:
    """Where all chunks are, in the grid's shape, if nothing must be looked at for each of them: see `Hdf5Chunks._usual_of`.

    `end` is where the last of them ends.
    """

    offsets: np.ndarray[Any, np.dtype[np.int64]]
    sizes: np.ndarray[Any, np.dtype[np.int64]]
    end: int


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
    filters : sequence of Stage
        The stages of the chain that are filters; they come first.
    """

    def __init__(
        self, dataset: h5py.Dataset, dtype: np.dtype[Any], raw: RawFile, whole: Whole, chain: Chain, filters: Sequence[Stage]
    ) -> None:
        self._whole = whole
        self._identifier, self._dtype, self._raw, self._chain, self._filters = dataset.id, dtype, raw, chain, tuple(filters)
        self._shape: tuple[int, ...] = dataset.shape
        self._chunk: tuple[int, ...] = dataset.chunks
        self._grid = tuple(-(-n // c) for n, c in zip(self._shape, self._chunk, strict=True))
        self._dataset = dataset
        self._most_nbytes = chain.most_stored_nbytes
        self._excerpts = Excerpts(chain)
        # Where the dataset's object header is, if the file has addresses of the usual length, and this package has opened it.
        own = dataset if isinstance(dataset, OpenDataset) else None
        self._header = None if own is None or own.facts.sizes != (8, 8) else getattr(own.about, "addr", None)
        self._nbytes_stored = -1 if own is None else own.nbytes_stored
        self._is_empty = _is_empty(dataset)
        self._listing = threading.Lock()
        self._listed: _Listed | None = None
        self._usual: _Usual | None = None
        self._may_list = math.prod(self._grid) <= _MOST_LISTED and hasattr(self._identifier, "chunk_iter")
        self._may_have_index = self._header is not None
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
        if self._is_empty:
            return None
        offsets = tuple(k * c for k, c in zip(index, self._chunk, strict=True))
        listed = self._places()
        if listed is None:
            return self._fetch_by_hdf5(offsets, room)
        at = ravel(index, self._grid)
        offset, nbytes, mask = (int(column[at]) for column in listed)
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

    @property
    def has_excerpts(self) -> bool:
        """False if chunks can only be decoded whole."""
        return self._excerpts.are_possible

    def fetch_excerpt(
        self, index: tuple[int, ...], first: int, out: np.ndarray[Any, Any], room: Room = fresh
    ) -> Excerpt | None:
        """Read some values of the chunk at `index`: see `ExcerptReader`."""
        if self._is_empty or not self.has_excerpts:
            return None
        check_chunk(index, self._grid)
        listed = self._places()
        if listed is None:
            return None
        at = ravel(index, self._grid)
        offset, nbytes, mask = (int(column[at]) for column in listed)
        if mask or nbytes > self._most_nbytes or offset + nbytes > self._raw.nbytes:  # also a missing chunk
            return None
        if self._filters and nbytes == self._chain.nbytes:  # it may not have been filtered: see `_encoded`
            return None
        return self._excerpts.fetch(self._raw.descriptor, offset, nbytes, first, out, room)

    def decode_excerpt(self, excerpt: Excerpt, out: np.ndarray[Any, Any]) -> None:
        """Decode what `fetch_excerpt` returned: see `ExcerptReader`."""
        self._excerpts.decode(excerpt, out)

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
        if self._is_empty:
            return [None] * n
        if not self._chain.takes_many:
            return None
        listed = self._places(n)
        if listed is None:
            return self._fetch_many_by_hdf5(box, room)
        usual = self._usual
        if usual is not None and usual.end <= self._raw.nbytes:
            inside = tuple([slice(axis.start, axis.stop) for axis in box])
            spans = Spans(usual.offsets[inside].reshape(-1), usual.sizes[inside].reshape(-1))
            return list(self._raw.read_spans(spans, room(spans.nbytes)))
        at = numbers_in(box, self._grid)
        offsets, sizes, masks = (column[at] for column in listed)
        stored = offsets != _NOWHERE
        offsets, sizes = offsets[stored].astype(np.int64), sizes[stored].astype(np.int64)
        is_usual = not masks[stored].any() and (sizes <= self._most_nbytes).all() and (offsets >= 0).all()
        if not is_usual or (offsets + sizes > self._raw.nbytes).any():
            return None
        # A chunk at the array's edge that is as long as its values may not have been filtered: see `_encoded`.
        reaches_over = any(axis.stop * c > end for axis, c, end in zip(box, self._chunk, self._shape, strict=True))
        if reaches_over and self._filters and (sizes == self._chain.nbytes).any():
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
        if self._chain.names or self._is_empty or not n or out.nbytes != n * self._chain.nbytes:
            return False
        listed = self._places(n)
        if listed is None:
            return False
        at = numbers_in(box, self._grid)
        offsets, sizes, masks = (column[at] for column in listed)
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
        n = len(self._filters)
        skipped = frozenset(n - 1 - k for k in range(n) if mask >> k & 1)
        # A dataset may ask HDF5 not to filter chunks that reach over the array's edge (H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS).
        # Here the size shows that: such a chunk is as long as its values. A shuffled chunk is too, so HDF5 has to read it. But
        # HDF5's decoders trust the length that a chunk declares, so HDF5 gets no chunk that may declare an impossible one.
        is_edge = is_over_edge(offsets, self._chunk, self._shape)
        if is_edge and n > len(skipped) and len(data) == self._chain.nbytes:
            applied = [stage for k, stage in enumerate(self._filters) if k not in skipped]
            if _is_safe_for_hdf5(applied, data, self._chain.nbytes):
                return Encoded(self._read_by_hdf5(offsets), frozenset(range(n)))
            if not self._is_stream(applied, data, skipped):
                return Encoded(data, frozenset(range(n)))
        return Encoded(data, skipped)

    def _is_stream(self, applied: Sequence[Stage], data: np.ndarray[Any, Any], skipped: frozenset[int]) -> bool:
        """True if a chunk that is as long as its values was compressed, damaged or not. If False, it is the values."""
        head = _HEADS.get(applied[0].name if applied[0].name != "fletcher32" or len(applied) < 2 else applied[1].name)
        if head is not None and head(data):
            return True
        try:
            self._chain.decode(data, np.empty(self._chunk, self._dtype), skipped)
        except ValueError:
            return False
        return True

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
                return None
            if not is_listed(self._dataset, offsets):
                return None
            if isinstance(error, ValueError) and "buffer is only" in said:
                raise self._too_long() from None
            raise OSError(said) from error
        self._whole.check()  # HDF5 gives zeros past the end of the file
        return self._encoded(np.frombuffer(data, dtype=np.uint8), mask, offsets)

    def _fetch_many_by_hdf5(self, box: Sequence[range], room: Room) -> list[Any] | None:
        """Do the same as `fetch_many`, without knowing where the chunks are."""
        found: list[Any] = []
        for index in itertools.product(*box):
            one = self._fetch_by_hdf5(tuple(k * c for k, c in zip(index, self._chunk, strict=True)), room)
            if one is not None and one.skipped:
                return None
            found.append(None if one is None else one.data.tobytes())  # the next chunk has the same room
        return found

    def _read_by_hdf5(self, offsets: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Values of a chunk, decoded by HDF5, but in the byte order of the file."""
        out = np.zeros(self._chunk, self._dtype)
        shape = tuple(min(c, end - at) for at, c, end in zip(offsets, self._chunk, self._shape, strict=True))
        in_file, in_memory = self._identifier.get_space(), h5py.h5s.create_simple(self._chunk)
        in_file.select_hyperslab(offsets, shape)
        in_memory.select_hyperslab((0,) * len(shape), shape)
        self._identifier.read(in_memory, in_file, out, self._identifier.get_type())
        self._whole.check()
        return out.reshape(-1).view(np.uint8)

    def _places(self, n: int = 1) -> _Listed | None:
        """Where all chunks are; None while listing them would cost too much for the number of chunks asked for so far.

        `n` is the number of chunks that are asked for now.
        """
        if self._listed is not None or not self._may_list:
            return self._listed
        with self._listing:
            self._n_fetched += n
            cells, worth = math.prod(self._grid), _LIST_AT_ONCE + _LISTED_PER_FETCH * self._n_fetched
            if self._listed is None and self._may_have_index and cells <= (worth if n == 1 else _FASTER_BY_INDEX * worth):
                self._keep(self._list_by_index())
                self._may_have_index = False
            if self._listed is None and self._may_list and cells <= worth:
                self._keep(self._list_by_hdf5())
                self._may_list = self._listed is not None
            return self._listed

    def _keep(self, listed: _Listed | None) -> None:
        if listed is not None:
            self._usual = self._usual_of(listed)  # first: other threads see the list as soon as it is there
            self._listed = listed

    def _usual_of(self, listed: _Listed) -> _Usual | None:
        """The list for batches, if each chunk of the dataset is there, was filtered, and may have its size; else None.

        What would have to be asked for each batch again is asked once.
        """
        offsets, sizes = (column.view(np.int64) for column in listed[:2])  # a missing chunk is at -1
        if not len(offsets) or listed[2].any() or int(offsets.min()) < 0:
            return None
        if int(sizes.min()) < 0 or int(sizes.max()) > self._most_nbytes or int(offsets.max()) > _NOWHERE // 4:
            return None
        if self._filters and (sizes == self._chain.nbytes).any():  # see `_encoded`
            return None
        return _Usual(offsets.reshape(self._grid), sizes.reshape(self._grid), int((offsets + sizes).max()))

    def _empty_list(self) -> _Listed:
        n = math.prod(self._grid)
        return np.full(n, _NOWHERE, dtype=np.uint64), np.zeros(n, dtype=np.uint64), np.zeros(n, dtype=np.uint32)

    def _list_by_index(self) -> _Listed | None:
        """Offset, size and filter mask of every chunk, from the file's own index; None if only HDF5 can say it.

        The number of chunks and of their bytes must be what HDF5 has counted, in the same index.
        """
        n = math.prod(self._grid)
        if self._header is None or n > _MOST_BY_INDEX:
            return None
        told = list_tree(self._raw.read_at_most, self._header, len(self._grid), n)
        if told is None or int(told["nbytes"].sum(dtype=np.uint64)) != self._nbytes_stored:
            return None
        with phil:
            if self._identifier.get_num_chunks() != len(told):
                return None
        at = np.zeros(len(told), dtype=np.int64)
        for k, (c, count) in enumerate(zip(self._chunk, self._grid, strict=True)):
            axis = told["at"][:, k].astype(np.int64)
            place = axis // c  # much faster than divmod
            if (place * c != axis).any() or (place < 0).any() or (place >= count).any():
                return None
            at = at * count + place
        found = self._empty_list()
        for column, name in zip(found, ("child", "nbytes", "mask"), strict=True):
            column[at] = told[name]
        is_twice = np.count_nonzero(found[0] != _NOWHERE) != len(told)
        return None if is_twice or told["at"][:, -1].any() else found

    def _list_by_hdf5(self) -> _Listed | None:
        """The same as HDF5 says it; None if it contradicts itself."""
        try:
            put_right = true_place(self._dataset)
        except UnknownOrderError:
            return None
        n, found = math.prod(self._grid), self._empty_list()
        told: list[Any] = []

        def tell(chunk: Any) -> None:
            told.append(chunk)
            if len(told) > _TOLD_AT_ONCE:
                self._note(told, found, put_right)
                del told[:-1]  # the last one is compared below

        with phil:
            # A function in Python takes as long for each chunk as HDF5 itself: only if the list must not grow.
            self._identifier.chunk_iter(told.append if n <= _TOLD_AT_ONCE else tell)
            self._note(told, found, put_right)
            if told:
                last = told[-1]
                info = self._identifier.get_chunk_info_by_coord(last.chunk_offset)  # searches the same list: not the true place
                if (info.byte_offset, info.size, info.filter_mask) != (last.byte_offset, last.size, last.filter_mask):
                    return None
        return found

    def _note(self, told: list[Any], found: _Listed, put_right: PutRight | None) -> None:
        """Add to a list what HDF5 says of some chunks."""
        if not told:
            return
        offsets, masks, places, sizes = zip(*told, strict=True)
        ndim = len(self._grid)
        listed = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, len(told) * ndim).reshape(-1, ndim).T
        coordinates = listed if put_right is None else put_right(listed)
        at, is_inside = np.zeros(len(told), dtype=np.int64), np.ones(len(told), dtype=bool)
        for axis, c, end, count in zip(coordinates, self._chunk, self._shape, self._grid, strict=True):
            is_inside &= (axis >= 0) & (axis < end)  # outside the array: the index is damaged
            at = at * count + axis // c
        for column, values in zip(found, (places, sizes, masks), strict=True):
            column[at[is_inside]] = np.array(values, dtype=column.dtype)[is_inside]


def _is_safe_for_hdf5(applied: Sequence[Stage], data: np.ndarray[Any, Any], nbytes: int) -> bool:
    """True if it is safe to give HDF5 a chunk that may have been stored with these stages, or without them.

    It is safe if no stage expands its data. It is also safe if only gzip does (HDF5's own filter, which reports damage), and
    the data does not expand to more than a chunk.
    """
    names = [stage.name for stage in applied if stage.n_more is None]
    if not names:
        return True
    if names != ["gzip"] or next(stage for stage in applied if stage.n_more != 4).name != "gzip":
        return False
    stream = zlib.decompressobj()
    most = nbytes + 4 * len(applied)
    try:
        return len(stream.decompress(data.tobytes(), most + 1)) <= most
    except zlib.error:  # damaged, before it gave more than that
        return True


# Tests for the first bytes of each compressor's data.
_HEADS: dict[str, Callable[[np.ndarray[Any, Any]], bool]] = {
    "gzip": lambda data: data[0] & 15 == 8 and data[0] >> 4 <= 7 and int.from_bytes(data[:2].tobytes(), "big") % 31 == 0,
    "zstd": lambda data: data[:4].tobytes() == b"\x28\xb5\x2f\xfd",
    "blosc": lambda data: data[0] == 2 and int.from_bytes(data[12:16].tobytes(), "little") in (len(data), len(data) - 4),
}
