"""How are values read from a file? Through one small interface that every format implements.

1. A `Format` says which files are its own, and opens them.
2. An `OpenFile` is one such file, opened once.
3. A `Source` is one open array.

None of them knows ranks, devices or plans. The functions below help to write a format: which values JAX can hold (`refusal`,
`native_dtype`), checks of a request (`check_request`), and reading chunk by chunk (`read_by_chunks`).
"""

from __future__ import annotations

import abc
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np

from shardload.errors import printable
from shardload.formats.access import STRICT, Access
from shardload.formats.labels import Coordinate, Labels, Note, OnDemand, from_plain, to_plain
from shardload.planning.batches import cut_box
from shardload.planning.region import Region
from shardload.system.scratch import empty_bytes
from shardload.values.decoding import TEXTS, VALID_RANGE, Packing

__all__ = [
    "GROUP",
    "MOST_KEPT",
    "MOST_NAMED",
    "TOLD",
    "ArrayInfo",
    "BatchReader",
    "ChangedError",
    "ChunkReader",
    "Encoded",
    "Format",
    "OpenFile",
    "Properties",
    "Room",
    "Scratch",
    "Source",
    "Spans",
    "UndecodedError",
    "a_few_chunks",
    "check_chunk",
    "check_request",
    "chunks_met",
    "dtype_text",
    "fresh",
    "group_info",
    "has_missing",
    "index_in_parts",
    "is_added",
    "json_value",
    "native_dtype",
    "nbytes_of",
    "read_at",
    "read_by_chunks",
    "read_chunks",
    "read_plain_chunks",
    "refusal",
    "settle_bools",
    "some",
    "state_of",
    "unaddressable",
]


# `ArrayInfo.attributes`
TOLD = ("scale_factor", "add_offset", "_FillValue", "missing_value", *TEXTS, *VALID_RANGE, "units", "calendar")
_MOST_SHOWN = 1024  # values or characters of an attribute to show
MOST_KEPT = 1 << 16  # ... to give to the caller
_MOST_AXES = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
_MOST_ELEMENTS, _WIDEST = 2**63 - 1, 16  # bytes of complex128


class ChangedError(OSError):
    """A file is another one than that which was looked at when the plan was made. The text says what to do."""


class UndecodedError(ValueError):
    """A chunk is encoded in a way that is not decoded here, though it may be whole. The text says what reads it."""


@dataclass(frozen=True)
class ArrayInfo:
    """The metadata of one array, known without reading any of its values.

    Attributes
    ----------
    path : str
        File or store, as the user named it.
    dataset : str
        Full name in the file, with a leading ``/`` (``"/group/rho"``); ``"/"`` if the store is itself one array.
    format : str
        For people: ``"HDF5"``, ``"Zarr v3"``.
    shape : tuple of int
        Elements along each axis, as in the file.
    dtype : str
        NumPy's name in native byte order (``"float32"``), or the file's own name for a type that cannot be loaded
        (``"string"``).
    chunks : tuple of int or None
        Elements per chunk (the unit of decode) along each axis; None if any region can be read by itself (contiguous).
    codec : str
        How chunks are encoded, for people and for the cost model: ``"none"``, ``"gzip+shuffle"``, ``"zstd"``.
    nbytes_stored : int or None
        Bytes on disk, if they are known. In a list of the arrays of a file they are; of the array of a load only if that costs
        nothing, because HDF5 goes through the index of all chunks for it (`Source.nbytes_stored`).
    shards : tuple of int or None
        Zarr: elements per shard file, a multiple of `chunks`.
    refused : str or None
        Why the array cannot be loaded (``"variable-length strings"``); None if it can.
    is_coordinate : bool
        True for a coordinate of other arrays (an HDF5/netCDF dimension scale).
    is_dimension : bool
        True for one without values, which stands for an axis only (a netCDF dimension without a variable).
    attributes : mapping
        Attributes that change what values mean (`TOLD`), for people.
    packing : mapping
        The attributes by which stored numbers become values, each with its type (`shardload.values.decoding`); applied with
        ``decode=True``.
    parts : mapping or None
        If the values are in many other files: what ranks that read must know of these, as plain JSON, so that each of them need
        not look at all. The format that wrote it understands it (HDF5: `tiles.tell_parts`); ``"versions"`` has an item for
        each.
    labels : Labels, OnDemand or None
        Names of the axes, all attributes, coordinates; None if they were not asked for.
    """

    path: str
    dataset: str
    format: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...] | None = None
    codec: str = "none"
    nbytes_stored: int | None = None
    shards: tuple[int, ...] | None = None
    refused: str | None = None
    is_coordinate: bool = False
    is_dimension: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict)
    packing: Packing = field(default_factory=dict)
    parts: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    labels: Labels | OnDemand | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types, for another rank. Names that nobody has looked at are not read for that."""
        # Not `asdict`: it copies all values, and small loads call this often.
        known = None if isinstance(self.labels, OnDemand) else self.labels
        return {
            **vars(self),
            "attributes": dict(self.attributes),
            "packing": dict(self.packing),
            "labels": None if known is None else to_plain(known),
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> ArrayInfo:
        """The inverse of `to_dict`, also after JSON made lists of its tuples."""
        chunks, shards, labels = found["chunks"], found["shards"], found["labels"]
        shape = tuple(found["shape"])
        return cls(
            **{
                **found,
                "shape": shape,
                "chunks": None if chunks is None else tuple(chunks),
                "shards": None if shards is None else tuple(shards),
                "labels": None if labels is None else from_plain(labels),
            }
        )

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> ArrayInfo:
        """The inverse of `to_json`."""
        return cls.from_dict(json.loads(text))

    @property
    def dims(self) -> tuple[str | None, ...]:
        """The name of each axis; None for an axis without one, or if names were not asked for."""
        return (None,) * len(self.shape) if self.labels is None else self.labels.dims

    @property
    def n_parts(self) -> int:
        """How many parts it has, if its values are in many other files and `parts` says so; else 0."""
        return 0 if self.parts is None else len(self.parts["versions"])

    @property
    def attrs(self) -> Mapping[str, Any]:
        """All attributes, as plain Python; only those of `attributes` if no more were asked for."""
        return self.attributes if self.labels is None else self.labels.attrs

    @property
    def coords(self) -> Mapping[str, Coordinate]:
        """The coordinates by name, with their values if they are small; none if they were not asked for."""
        return {} if self.labels is None else self.labels.coords

    @property
    def group_attrs(self) -> Mapping[str, Any]:
        """The attributes of the group that the array is in (of the file, for the root); none if they were not asked for."""
        return {} if self.labels is None else self.labels.of_group

    def __str__(self) -> str:
        """As messages name it: ``'/density' in 'data.h5'``."""
        return f"'{printable(self.dataset)}' in '{printable(self.path)}'"


@dataclass(frozen=True)
class Properties:
    """What else must be known of an array to make another one like it.

    Attributes
    ----------
    dtype : dtype
        Type of the values as they are stored, in the file's byte order.
    dims : tuple of str or None
        The name of each axis; None for an axis without one.
    attrs : mapping
        The author's attributes, with their types. ``_FillValue``, a scalar of the array's type, is there if a value marks
        missing data, however the format says that.
    compression : mapping, str or None
        How chunks are compressed: the keywords of `sink.Compression`. Text says why no other array can be compressed like this
        one, in words that follow its name.
    checksum : bool
        Whether chunks have a checksum of the format's own.
    fill_value : object
        Value of elements that are not stored; None if the format's default.
    unlimited : tuple of int
        Axes that may grow.
    coordinates : tuple of str
        Full names of the arrays that are its coordinates.
    is_dimension : bool
        True for an array without values that stands for an axis (a netCDF dimension without a variable).
    unread : tuple of str
        What could not be read of the attributes, in words.
    stored_name : str or None
        The last part of its name in the file, if that is another one: netCDF has its own names over those of HDF5.
    texts : ndarray or None
        The values of a short array of text: bytes or str, as elements or as objects. Other arrays are read by regions.
    scales, axis_labels, scale_name
        What HDF5 says of its axes: as in `sink.ArraySpec`.
    """

    dtype: np.dtype[Any]
    dims: tuple[str | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    compression: Mapping[str, Any] | str | None = None
    checksum: bool = False
    fill_value: Any = None
    unlimited: tuple[int, ...] = ()
    coordinates: tuple[str, ...] = ()
    is_dimension: bool = False
    unread: tuple[str, ...] = ()
    stored_name: str | None = None
    texts: np.ndarray[Any, Any] | None = None
    scales: tuple[tuple[str, ...], ...] = ()
    axis_labels: tuple[str, ...] = ()
    scale_name: str | None = None

    @classmethod
    def of(cls, labels: Labels | OnDemand, dtype: np.dtype[Any], attrs: Mapping[str, Any], **more: Any) -> Properties:
        """With names of axes and coordinates as an array's labels say them."""
        return cls(dtype, labels.dims, attrs, coordinates=tuple(one.dataset for one in labels.coords.values()), **more)


class Source(abc.ABC):
    """One open array. Not collective: each reading rank opens its own.

    A format must implement `info`, `dtype`, `read_into`, `state` and `close`. It may override the other methods if it can do
    better than their defaults.
    """

    @property
    @abc.abstractmethod
    def info(self) -> ArrayInfo:
        """Shape, dtype, chunks and the other metadata; reads no values."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Type of the values that `read_into` writes: the file's, in native byte order."""

    @abc.abstractmethod
    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        """Write the values of `region` (in the file's coordinates) into `out`.

        `out` is C-contiguous and writable, and has exactly `region.shape` and `dtype`. Call `check_request` first: it raises
        ValueError for anything else. Decode each chunk that meets `region` once. Empty regions are allowed and read nothing.
        Calls come from one thread at a time, not always the same thread. If something in the file is wrong, raise OSError,
        ValueError, RuntimeError or the library's own exception; the caller knows the chunk and adds it to the message. Never
        return values after `close`.
        """

    @abc.abstractmethod
    def state(self) -> tuple[int, ...] | None:
        """Size and time of last change of the open file, then other numbers that tell it from another file on this machine.
        None if there is no such thing. Never raises. See `state_of`.
        """

    def opened_in(self) -> tuple[int, ...] | None:
        """`state` as it was before the metadata of this array were read: what has changed since, also while it was opened, is
        noticed. Never raises.

        The default is the state of now. A format that reads metadata when it opens an array takes the state first.
        """
        return self.state()

    def interrupt(self) -> None:
        """Told after an error, also by another thread: nobody waits any more for values that are being read. The default does
        nothing.
        """
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Close what this object opened. An object that the caller passed in stays open. May be called again."""

    def expect(self, region: Region) -> None:
        """Told once, before anything is read: only `region` will be, or a part of it. The default does nothing.

        A format may then look for nothing but what lies there. Other reads are still right, if slower.
        """
        return None

    def nbytes_stored(self) -> int | None:
        """Bytes on disk; None if the format does not know them. It may take long. The default is that of `info`."""
        return self.info.nbytes_stored

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """The values of `region` by the format library's own indexing, without code of this package: for verification.

        In any byte order. The default calls `read_into`; then ``verify="file"`` compares the devices with another read by the
        same code.
        """
        out = np.empty(region.shape, self.dtype)
        self.read_into(region, out)
        return out

    def missing(self, region: Region) -> Sequence[tuple[int, ...]]:
        """The indices of the missing chunks (not stored) that meet `region`; their values are the fill value. ``[()]`` if an
        array without chunks has no stored values. The default is that no chunk is missing.

        It is called right after `read_into` of the same region, so that a format can use what it noticed there. If the format's
        library hides some missing chunks, the result lacks them.
        """
        return ()

    def view(self, region: Region) -> np.ndarray[Any, Any] | None:
        """The values without a copy, if they are in memory already, with any dtype and strides. The default is None."""
        return None

    def labels(self) -> Labels:
        """The names of the axes, all attributes, and the names of the arrays that are its coordinates (without their values).

        Called only if somebody asks. By default axes have no names.
        """
        return Labels((None,) * len(self.info.shape), self.info.attributes)

    def axes(self, names: Collection[str]) -> Labels:
        """The names of the axes, and for those of `names` the arrays that are their coordinates: what a selection needs.

        The default is all of `labels`.
        """
        return self.labels()

    def group_attrs(self) -> Mapping[str, Any]:
        """The attributes of the group that the array is in, as plain Python. The default is none.

        Called only if somebody asks.
        """
        return {}

    def properties(self) -> Properties:
        """What else must be known to make another array like this one (`Properties`).

        By default as much as `info` and `labels` say: the usual options of its compressor, and attributes as plain Python.
        """
        info, labels = self.info, self.labels()
        attrs = dict(labels.attrs)
        for key, (kind, values) in info.packing.items():
            if kind not in ("number", "text", "unreadable"):
                attrs[key] = np.array(values[0] if len(values) == 1 else values, dtype=kind)[()]
        words = info.codec.replace("(", "+").replace(")", "").split("+")
        named = [word for word in words if word not in ("none", "shuffle", "fletcher32", "crc32c")]
        compression: dict[str, Any] | None = None
        if named or "shuffle" in words:
            name = named[0] if named else "none"
            compression = {"name": name, "shuffle": "shuffle" in words or name == "blosc"}
            if len(named) > 1:
                compression["options"] = {"cname": named[1]}
        is_dimension = info.is_coordinate and info.nbytes_stored == 0
        return Properties.of(labels, self.dtype, attrs, compression=compression, is_dimension=is_dimension)

    def chunk_reader(self) -> ChunkReader | None:
        """A reader of whole chunks as they are stored, to decode them in several threads. The default, None, means that only
        `read_into` can read.

        Called once per load. The reader is valid until `close`.
        """
        return None


def state_of(file: int | str) -> tuple[int, ...] | None:
    """The `Source.state` of a file, by its descriptor or path; None if the file does not exist.

    For a path the state has no inode, because some network file systems give a new one each time.
    """
    try:
        found = os.stat(file)
    except OSError:
        return None
    state = found.st_size, found.st_mtime_ns
    return (*state, found.st_ino, found.st_dev) if isinstance(file, int) else state


def fresh(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """New memory."""
    return empty_bytes(nbytes)


Room = Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]]


class Scratch:
    """A `Room` that uses its memory again, because new memory is slow. For one thread at a time.

    Each call may give the same bytes as the call before, and so end the use of the earlier ones.
    """

    def __init__(self) -> None:
        self._memory = fresh(0)

    def __call__(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Memory of `nbytes` bytes, with any content."""
        if len(self._memory) < nbytes:
            self._memory = fresh(0)  # free the old memory before asking for more
            self._memory = fresh(nbytes)
        return self._memory[:nbytes]


def read_at(descriptor: int, out: np.ndarray[Any, Any], offset: int) -> int:
    """Fill `out`, a C-contiguous array of bytes, from an open file at `offset`; returns the number of bytes read.

    The read is positional, so that threads do not share a file offset.
    """
    room, done = out.data, 0
    while done < len(room):  # one call reads 2 GiB at the most, and less on some file systems
        n = os.preadv(descriptor, [room[done:]], offset + done)
        if n == 0:
            break
        done += n
    return done


class ChunkReader(Protocol):
    """Reads the chunks of one open array, one by one. Several threads may call both methods at once."""

    def fetch(self, index: tuple[int, ...], room: Room = fresh) -> Encoded | None:
        """Read the chunk at `index` (its position along each axis of the file's chunk grid) as it is stored.

        `room` gives the memory to read into: memory that was used before is much faster than new memory. Returns None if the
        chunk is missing: its values are the fill value. Errors in the file are OSError (also for a short read) or ValueError.
        """
        ...

    def decode(self, encoded: Encoded | None, out: np.ndarray[Any, Any]) -> None:
        """Decode a chunk that `fetch` returned into `out`, which is C-contiguous, has the chunk's full shape (also at the
        array's edge) and the source's `dtype`. Raises ValueError if the chunk is damaged.
        """
        ...


@runtime_checkable
class BatchReader(Protocol):
    """What a `ChunkReader` may do in addition: many small chunks with few calls. Several threads may call both methods at once.

    If a method finds anything wrong or unusual, the caller reads the same chunks one by one: that names the chunk.
    """

    def fetch_many(self, box: Sequence[range], room: Room = fresh) -> list[Any] | None:
        """Read all chunks of a box of the file's chunk grid as they are stored, in C order.

        The result has a bytes-like object for each chunk, or None if it is missing. They are valid until `room` is called
        again. The result as a whole is None if these chunks must be read one by one. Errors are those of `ChunkReader.fetch`.
        """
        ...

    def decode_many(self, stored: Sequence[Any], out: np.ndarray[Any, Any]) -> None:
        """Decode what `fetch_many` returned into `out`, which is C-contiguous and has the chunks one after the other, each with
        its full shape. Raises ValueError if one is damaged.
        """
        ...


@runtime_checkable
class PlainReader(Protocol):
    """What a `ChunkReader` may do in addition: chunks that are stored as plain values need not be copied."""

    def read_plain(self, box: Sequence[range], out: np.ndarray[Any, Any]) -> bool:
        """Read all chunks of a box of the file's chunk grid into `out`, which is C-contiguous and has them one after the other.

        False, and `out` may hold anything, if they are encoded, missing, scattered or unusual. Raises OSError if a read fails.
        """
        ...


def has_missing(stored: Sequence[Any] | np.ndarray[Any, Any]) -> bool:
    """True if a chunk that `BatchReader.fetch_many` returned is missing. It takes no step of Python for each chunk.

    >>> has_missing([b"", None]), has_missing([b"", b"1"])
    (True, False)
    """
    return any(map(is_, stored, itertools.repeat(None)))


Ints = np.ndarray[Any, np.dtype[np.int64]]


class Spans:
    """Pieces of one file that are read with few calls: pieces that follow each other, or almost, are read together.

    Parameters
    ----------
    offsets, sizes : ndarray of int64
        Where each piece begins, and its bytes.

    Attributes
    ----------
    nbytes : int
        Bytes of memory that `read` needs.

    Examples
    --------
    >>> import tempfile
    >>> spans = Spans(np.array([40, 10, 20]), np.array([2, 10, 5]), most_gap=4)
    >>> spans.nbytes
    17
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(bytes(range(200)))
    ...     file.flush()
    ...     [one.tolist() for one in spans.read(file.fileno(), fresh(17))]
    [[40, 41], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [20, 21, 22, 23, 24]]
    """

    def __init__(self, offsets: Ints, sizes: Ints, most_gap: int = 1 << 12) -> None:
        self._spans: list[tuple[int, int, int]]  # where each lies in memory, its bytes, where it begins in the file
        n, stops = len(offsets), offsets + sizes
        gaps = offsets[1:] - stops[:-1]
        if n and (n == 1 or int(gaps.min()) >= 0):
            self._join_in_order(offsets, sizes, gaps, most_gap)
        else:
            self._join_sorted(offsets, sizes, stops, most_gap)

    def _join_in_order(self, offsets: Ints, sizes: Ints, gaps: Ints, most_gap: int) -> None:
        """For pieces in the order of the file, as chunks mostly are: in a third of the time."""
        cuts = (gaps > most_gap).nonzero()[0]
        gaps[cuts] = 0
        at = np.zeros(len(offsets), dtype=np.int64)  # where each piece lies in memory
        np.cumsum(gaps + sizes[:-1], out=at[1:])
        starts, ends, last = at.tolist(), (at + sizes).tolist(), cuts.tolist()
        first = [0, *[k + 1 for k in last]]
        self._spans = [
            (starts[a], ends[b] - starts[a], offset)
            for a, b, offset in zip(first, [*last, len(starts) - 1], offsets[first].tolist(), strict=True)
        ]
        self._places, self.nbytes = list(map(slice, starts, ends)), ends[-1]

    def _join_sorted(self, offsets: Ints, sizes: Ints, stops: Ints, most_gap: int) -> None:
        """For pieces in any order, which may overlap."""
        n, order = len(offsets), np.argsort(offsets, kind="stable")
        start, stop = offsets[order], np.maximum.accumulate(stops[order])
        first = np.flatnonzero(np.concatenate([[True], start[1:] > stop[:-1] + most_gap])[:n])
        last = np.append(first[1:], n)[: len(first)] - 1
        length = stop[last] - start[first]
        begin = np.cumsum(length) - length
        at = np.empty(n, dtype=np.int64)
        at[order] = start - np.repeat(start[first] - begin, last - first + 1)
        self._spans = list(zip(begin.tolist(), length.tolist(), start[first].tolist(), strict=True))
        self._places, self.nbytes = list(map(slice, at.tolist(), (at + sizes).tolist())), int(length.sum())

    def read(self, descriptor: int, room: np.ndarray[Any, Any]) -> list[memoryview]:
        """The pieces, in the order in which they were given, read into `room`. OSError if the file ends before one of them."""
        whole = room.data
        for begin, length, offset in self._spans:
            if os.preadv(descriptor, [whole[begin : begin + length]], offset) < length:  # it may give less than was asked for
                done = read_at(descriptor, room[begin : begin + length], offset)
                if done < length:
                    raise OSError(f"the file ends at byte {offset + done}, but chunks are stored up to byte {offset + length}")
        return list(map(whole.__getitem__, self._places))


@dataclass(frozen=True, slots=True)
class Encoded:
    """One chunk as stored.

    Attributes
    ----------
    data : bytes-like
        Its bytes in the file.
    skipped : frozenset of int
        Stages of the decoding chain that were not applied to this chunk.
    """

    data: Any
    skipped: frozenset[int] = frozenset()


def check_chunk(index: Sequence[int], counts: Sequence[int]) -> None:
    """Raise ValueError if there is no chunk at `index` in a grid of so many chunks along each axis."""
    if len(index) != len(counts) or not all(0 <= k < n for k, n in zip(index, counts, strict=True)):
        raise ValueError(f"there is no chunk {tuple(index)} in a grid of {tuple(counts)}")


def chunks_met(region: Region, chunk_shape: Sequence[int]) -> list[range]:
    """The chunks that a non-empty region meets, along each axis.

    >>> chunks_met(Region((0, 5), (2, 30)), (1, 10))
    [range(0, 2), range(0, 3)]
    """
    return [range(a // c, -(-b // c)) for a, b, c in zip(region.start, region.stop, chunk_shape, strict=True)]


def read_by_chunks(
    reader: ChunkReader, chunk_shape: tuple[int, ...], region: Region, out: np.ndarray[Any, Any]
) -> list[tuple[int, ...]]:
    """Read a non-empty region into a buffer of its shape, chunk by chunk; returns the indices of missing chunks."""
    whole, missing, room = np.empty(chunk_shape, out.dtype), [], Scratch()
    for index in itertools.product(*chunks_met(region, chunk_shape)):
        encoded = reader.fetch(index, room)
        if encoded is None:
            missing.append(index)
        reader.decode(encoded, whole)
        start = tuple(i * c for i, c in zip(index, chunk_shape, strict=True))
        common = Region(start, tuple(a + c for a, c in zip(start, chunk_shape, strict=True))).intersect(region)
        if common is not None:
            into: Any = (*common.slices(region.start), ...)
            part: Any = (*common.slices(start), ...)
            out[into] = whole[part]
    return missing


def read_plain_chunks(reader: Any, chunk_shape: tuple[int, ...], region: Region, out: np.ndarray[Any, Any]) -> bool:
    """Read a region straight into a buffer of its shape, if its chunks are plain values and lie there as in the buffer.

    False, and the buffer may hold anything, if the region must be read another way. Errors are those of `PlainReader`.

    >>> read_plain_chunks(None, (2,), Region((0,), (4,)), np.empty(4))
    False
    """
    box = chunks_met(region, chunk_shape)
    return _lies_as_chunks(box, chunk_shape, out) and isinstance(reader, PlainReader) and reader.read_plain(box, out)


def _lies_as_chunks(box: Sequence[range], chunk_shape: tuple[int, ...], out: np.ndarray[Any, Any]) -> bool:
    """True if the chunks of a box, one after the other, lie as in the buffer `out` of a region that meets them."""
    counts = list(map(len, box))
    return out.size == math.prod(counts) * math.prod(chunk_shape) and all(n == 1 for n in counts[1:])


def read_chunks(reader: Any, chunk_shape: tuple[int, ...], region: Region, out: np.ndarray[Any, Any]) -> bool:
    """Read a region of many small chunks with few calls of its `ChunkReader`, into a buffer of its shape.

    False, and the buffer may hold anything, if the chunks must be read another way: the reader is no `BatchReader`, or there
    is anything unusual, such as a missing chunk. Errors are those of `BatchReader`.

    >>> read_chunks(None, (2,), Region((0,), (4,)), np.empty(4))
    False
    """
    if not isinstance(reader, BatchReader):
        return False
    box = chunks_met(region, chunk_shape)
    stored = reader.fetch_many(box)
    if stored is None or has_missing(stored):
        return False
    if _lies_as_chunks(box, chunk_shape, out):
        reader.decode_many(stored, out.reshape(-1, *chunk_shape))
        return True
    counts, ndim = list(map(len, box)), len(box)
    chunks = np.empty((math.prod(counts), *chunk_shape), out.dtype)
    reader.decode_many(stored, chunks)
    order = [axis for k in range(ndim) for axis in (k, ndim + k)]  # the chunks along an axis, then the elements of a chunk
    padded = (
        chunks.reshape((*counts, *chunk_shape))
        .transpose(order)
        .reshape([n * c for n, c in zip(counts, chunk_shape, strict=True)])
    )
    np.copyto(out, padded[region.slices([axis.start * c for axis, c in zip(box, chunk_shape, strict=True)])])
    return True


def a_few_chunks(region: Region, chunk_shape: Sequence[int], most: int) -> Iterator[Region]:
    """Cut a non-empty region into regions of about equal size that meet at most `most` chunks each, in C order.

    Libraries need some kilobytes for each chunk of one read, however small the chunks are.

    >>> [str(part) for part in a_few_chunks(Region((0, 1), (2, 30)), (1, 10), most=2)]
    ['[0:1, 1:20]', '[0:1, 20:30]', '[1:2, 1:20]', '[1:2, 20:30]']
    """
    for box in cut_box(chunks_met(region, chunk_shape), most):
        start = tuple(max(a, axis.start * c) for a, axis, c in zip(region.start, box, chunk_shape, strict=True))
        yield Region(start, tuple(min(b, axis.stop * c) for b, axis, c in zip(region.stop, box, chunk_shape, strict=True)))


def index_in_parts(array: Any, region: Region, parts: Callable[[Region], Iterator[Region]]) -> np.ndarray[Any, np.dtype[Any]]:
    """The values of a region by the own indexing of a library's open array, a part at a time, as `parts` cuts the region."""
    first = itertools.islice(parts(region), 2) if region.ndim and region.size else ()
    if len(list(first)) < 2:
        return np.asarray(array[region.slices()])
    out = np.empty(region.shape, array.dtype)
    for part in parts(region):
        out[part.slices(region.start)] = array[part.slices()]
    return out


class Format(abc.ABC):
    """One file format. `registry` finds it by an entry point; nothing else in shardload knows it.

    A format must implement `name`, `claims_path`, `list_arrays`, `open_path` and a `Source`. It may override the other methods
    if it can do better than their defaults. An `Access` says what the caller allows. If files of the format can name other
    files, open those only with `Access.open_file`, or ask `Access.fence` before the library opens them.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def claims_path(self, path: str) -> bool:
        """True if the existing file or folder at `path` has this format, by its content, not its suffix. Raises nothing
        but OSError, if the content cannot be read.
        """

    @abc.abstractmethod
    def list_arrays(self, path: str, access: Access = STRICT) -> list[ArrayInfo]:
        """Every array in the file, in the file's order, from metadata alone. Includes arrays that cannot be loaded, with the
        reason.
        """

    @abc.abstractmethod
    def open_path(self, path: str, dataset: str, access: Access = STRICT) -> Source:
        """Open one array by its full name. Raises ``KeyError(dataset)`` if there is no array of that name."""

    def open_planned(self, path: str, info: ArrayInfo, access: Access = STRICT) -> Source:
        """Open an array that was described before, maybe on another rank: what that cost need not be done again.

        The caller compares shape, dtype and chunks of the source with `info`. By default the same as `open_path`.
        """
        return self.open_path(path, info.dataset, access)

    def claims_url(self, url: str) -> bool:
        """True if `url`, which has a ``://``, is for this format. Decides by the text alone. Never raises."""
        return False

    def claims_object(self, obj: object) -> bool:
        """True if `obj` is an open array or an open group of this format's library. Never raises."""
        return False

    def open_object(self, obj: Any, access: Access = STRICT) -> Source:
        """Make a source of an open array that `claims_object` claims. The caller closes the array. Raises ConfigError for an
        open group, with the names of its arrays.
        """
        raise NotImplementedError(f"{self.name} claims objects, but does not open them")

    def sketch_arrays(self, path: str, access: Access = STRICT, most: int | None = None, like: str = "") -> list[ArrayInfo]:
        """At most `most` + 1 arrays of the file, each under one name, to say which the caller could mean. By default a
        `list_arrays` that is quick.

        If the result has more than `most` arrays, the file has more. The result then includes arrays below `like`, or with a
        similar name, if the format lists names quickly. If `like` is a group without arrays, the result may begin with
        `group_info`. Text attributes may be left out: in some formats it is not safe to read those of a damaged file.
        """
        return self.list_arrays(path, access)[: None if most is None else most + 1]

    def list_linked(self, path: str, group: str, access: Access = STRICT, in_full: bool = True) -> list[ArrayInfo]:
        """The arrays below `group`, if links lead to it, under the names by which `open_path` opens them. By default none.

        `list_arrays` follows no links, so it has none of these. With `in_full` they are described as there, else as in
        `sketch_arrays`. Raises SourceError for a link without a target, and for one that the caller does not allow.
        """
        return []

    def open_file(self, path: str, access: Access = STRICT) -> OpenFile:
        """Open the file once, for several of its arrays. By default each array opens the file by itself."""
        return _OpenedByEach(self, path, access)


class OpenFile(abc.ABC):
    """A file that is opened once for several of its arrays. Use it in a ``with`` statement."""

    @abc.abstractmethod
    def open(self, dataset: str) -> Source:
        """Open one array by its full name, as `Format.open_path` does. It is valid until it or this file is closed."""

    def open_planned(self, info: ArrayInfo) -> Source:
        """The same for an array that was described before: see `Format.open_planned`."""
        return self.open(info.dataset)

    def open_any(self, dataset: str) -> Source:
        """The same, also of an array that cannot be loaded, for its attributes, or short text (`Properties.texts`)."""
        return self.open(dataset)

    def state(self) -> tuple[int, ...] | None:
        """The state of the file itself, as `Source.state` has it; None if there is no such thing. Never raises.

        With it a job sees if the arrays of one file were read in different versions of it.
        """
        return None

    def only_name(self) -> str | None:
        """The name of the only array, if one look tells that there is no other one and no group; else None."""
        return None

    def groups(self) -> Mapping[str, Mapping[str, Any]]:
        """The attributes of the file (``"/"``) and of its groups, by their full names. By default none."""
        return {}

    def unread(self) -> Sequence[str]:
        """What could not be read of these attributes, in words, and what else is in the file."""
        return ()

    def links(self) -> Mapping[str, str]:
        """The links by which something has another name, or lies in another file: by their full names, and what each leads to,
        in words. By default none.

        What is behind them may not be among the arrays of this file.
        """
        return {}

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file. Close its arrays first. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OpenedByEach(OpenFile):
    """For formats that open the file again for each array."""

    def __init__(self, file_format: Format, path: str, access: Access) -> None:
        self._format, self._path, self._access = file_format, path, access

    def open(self, dataset: str) -> Source:
        return self._format.open_path(self._path, dataset, self._access)

    def close(self) -> None:
        pass


MOST_NAMED = 8


def some(texts: Sequence[str], more: str = "") -> str:
    """The first few texts, and how many more there are. `more` replaces that number.

    >>> some([str(n) for n in range(10)])
    '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    rest = len(texts) - MOST_NAMED
    return ", ".join(texts[:MOST_NAMED]) + (f" and {more or rest} more" if rest > 0 else "")


GROUP = "group"


def group_info(path: str, name: str, format_name: str, attributes: Sequence[str], how: str) -> ArrayInfo:
    """What stands for a group without arrays among the arrays that the caller could mean. `how` reads its attributes.

    >>> group_info("a.h5", "/Header", "HDF5", ["Time"], "f['/Header'].attrs").refused
    "a group without arrays. It has attributes ('Time'), which f['/Header'].attrs reads"
    """
    names = some([f"'{printable(key)}'" for key in attributes])
    told = f". It has attributes ({names}), which {how} reads" if attributes else ""
    return ArrayInfo(path, name, format_name, (), GROUP, refused=f"a group without arrays{told}")


_KINDS = {
    "f": "extended precision floats, which JAX does not have",
    "c": "extended precision complex numbers, which JAX does not have",
    "S": "strings",
    "U": "strings",
    "T": "variable-length strings",
    "O": "Python objects",
    "M": "dates: load them as the integers they are stored as",
    "m": "time spans: load them as the integers they are stored as",
}


_NOT_IN_JAX = re.compile("float6|b?complex")


def refusal(dtype: np.dtype[Any]) -> str | None:
    """Why values of `dtype` cannot become a `jax.Array`, in words that follow "holds"; None if they can.

    Booleans, integers, floats and complex numbers that JAX has are accepted in any byte order. So are the types of `ml_dtypes`
    (``bfloat16`` and smaller floats), which have the same NumPy kind as records.

    Examples
    --------
    >>> refusal(np.dtype(">f8")) is None
    True
    >>> refusal(np.dtype("S4"))
    'strings'
    """
    if dtype.kind in "biu" or (dtype.kind in "fc" and dtype.itemsize <= {"f": 8, "c": 16}[dtype.kind]):
        return None
    if dtype.subdtype is not None:
        return f"small arrays of shape {dtype.subdtype[1]} as elements"
    if dtype.names is not None:
        return f"records with fields {', '.join(dtype.names)}"
    if dtype.type.__module__ == "ml_dtypes":
        return f"numbers of type {dtype.name}, which JAX does not have" if _NOT_IN_JAX.match(dtype.name) else None
    return _KINDS.get(dtype.kind, "raw bytes without a type")


def is_added(dtype: np.dtype[Any]) -> bool:
    """True for a type that another package has added to NumPy: bfloat16 and smaller floats, which may have the kind of NumPy's.

    >>> is_added(np.dtype("float16"))
    False
    """
    return dtype.isbuiltin == 2


def dtype_text(dtype: np.dtype[Any]) -> str:
    """A type as text of which `np.dtype` makes it again. Added types have a name alone, without a byte order.

    >>> dtype_text(np.dtype(">f8"))
    '>f8'
    """
    return dtype.name if is_added(dtype) else dtype.str


def unaddressable(shape: Sequence[int], chunks: Sequence[int] | None) -> str | None:
    """Why no region of an array with this shape and these chunks can be loaded, in words that follow "holds"; None if it can.

    (A small region of an array that is too large as a whole can be loaded.)

    >>> unaddressable((2**62,), (4,)), unaddressable((1,) * 65, None)
    (None, 'an array of 65 axes; NumPy has 64 at most')
    """
    if len(shape) > _MOST_AXES:
        return f"an array of {len(shape)} axes; NumPy has {_MOST_AXES} at most"
    if max(shape, default=0) > _MOST_ELEMENTS:
        return f"an array with an axis of {max(shape)} elements, which 64 bits cannot count"
    if chunks is not None and _WIDEST * math.prod(max(1, n) for n in chunks) > _MOST_ELEMENTS:
        return f"chunks of shape {tuple(chunks)}, of which 64 bits cannot count the bytes"
    return None


def native_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in this machine's byte order, without metadata such as HDF5 enum names. A refused type is returned unchanged.

    >>> native_dtype(np.dtype(">f4")) == np.dtype("float32")
    True
    """
    return np.dtype(dtype.type) if refusal(dtype) is None else dtype


def check_request(info: ArrayInfo, dtype: np.dtype[Any], region: Region, out: np.ndarray[Any, Any]) -> None:
    """Raise ValueError unless `region` is inside the array and `out` is a buffer as `Source.read_into` requires.

    Without this check, libraries silently clamp a region that reaches outside the array, or broadcast into a buffer of another
    shape.
    """
    if region.ndim != len(info.shape) or not Region.whole(info.shape).contains(region):
        raise ValueError(f"region {region} reaches outside {info}, which has shape {info.shape}")
    if out.shape != region.shape or out.dtype != dtype:
        raise ValueError(
            f"the buffer for region {region} of {info} is {out.shape} {out.dtype}, expected {region.shape} {dtype}"
        )
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError(f"the buffer for region {region} of {info} must be C-contiguous and writable")


def nbytes_of(info: ArrayInfo, shape: tuple[int, ...] | None = None) -> int:
    """Bytes of the whole array, or of a region of the given shape."""
    n = math.prod(info.shape if shape is None else shape)
    try:
        return n * np.dtype(info.dtype).itemsize
    except (TypeError, ValueError):  # a name of ml_dtypes that nobody registered with NumPy, or of a type that it lacks
        return n


def json_value(value: Any, most: int = _MOST_SHOWN) -> Any:
    """An attribute's value as plain Python: text for bytes, numbers for NumPy scalars, lists for arrays.

    Other values (references, records) become their text. An array of one element becomes that element, because netCDF stores
    scalars so. A value longer than `most`, or a list of which a part is, is replaced by a `Note` with its length: attributes
    are sent to every rank and shown to people.

    >>> json_value(np.array([1.5], dtype=">f4")), json_value(b"K"), json_value(np.int16(3)), json_value([0] * 5000)
    (1.5, 'K', 3, '5000 values, not shown')
    """
    n = value.size if isinstance(value, np.ndarray) else len(value) if isinstance(value, list | tuple) else 0
    if n > most:
        return Note(f"{n} values, not shown")
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value.tolist()
    if isinstance(value, bytes):
        value = value[: 4 * most + 1].decode("utf-8", errors="replace")
    if isinstance(value, list | tuple):
        found = [json_value(part, most) for part in value]
        return Note(f"{n} values, too long, not shown") if any(isinstance(part, Note) for part in found) else found
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= most else Note(f"{text[:_MOST_SHOWN]}... (not all shown)")


def settle_bools(values: np.ndarray[Any, Any]) -> None:
    """Make every byte of booleans 0 or 1, in place. Arrays of other types are not changed.

    A file can hold other bytes, if its writer took any number but 0 as true. NumPy does too. XLA expects 0 or 1, and its
    `where`, sums and comparisons give wrong results for other bytes.

    >>> values = np.array([0, 1, 2, 128], dtype="u1").view(bool)
    >>> settle_bools(values)
    >>> values.view("u1").tolist()
    [0, 1, 1, 1]
    """
    if values.dtype.kind == "b":
        number = values.view(np.uint8)
        np.minimum(number, 1, out=number)
