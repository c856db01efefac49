"""How do I obtain these values? The one small interface that every format satisfies.

A `Format` says which files are its own and opens them; an `OpenFile` is one of them, opened once; a `Source` is one open array.
None of them knows ranks, devices or plans. What follows below them is for whoever writes a format: which values JAX can hold
(`refusal`, `native_dtype`), whether a request is sound (`check_request`), and reading chunk by chunk (`read_by_chunks`).
"""

from __future__ import annotations

import abc
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from shardload.errors import printable
from shardload.formats.access import STRICT, Access
from shardload.planning.region import Region

__all__ = [
    "MOST_NAMED",
    "ArrayInfo",
    "ChunkReader",
    "Encoded",
    "Format",
    "OpenFile",
    "Room",
    "Scratch",
    "Source",
    "a_few_chunks",
    "check_request",
    "fresh",
    "json_value",
    "native_dtype",
    "nbytes_of",
    "read_at",
    "read_by_chunks",
    "refusal",
    "settle_bools",
    "some",
    "state_of",
    "unaddressable",
]


_MOST_SHOWN = 1024  # values, or characters, of an attribute
_MOST_AXES = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
_MOST_ELEMENTS, _WIDEST = 2**63 - 1, 16  # bytes of complex128


@dataclass(frozen=True)
class ArrayInfo:
    """What is known of one array without reading any of its values.

    Attributes
    ----------
    path : str
        File or store, as the user named it.
    dataset : str
        Full name inside it, with a leading ``/`` (``"/group/rho"``); ``"/"`` where the store is itself one array.
    format : str
        For people: ``"HDF5"``, ``"Zarr v3"``.
    shape : tuple of int
        Elements along each axis, as in the file.
    dtype : str
        NumPy's name in native byte order (``"float32"``), or the file's own name for what cannot be loaded
        (``"string"``).
    chunks : tuple of int or None
        Elements per chunk (the unit of decode) along each axis; None where any part can be read by itself (contiguous).
    codec : str
        How chunks are encoded, for people and for the cost model: ``"none"``, ``"gzip+shuffle"``, ``"zstd"``.
    nbytes_stored : int or None
        Bytes on disk, where the format says.
    shards : tuple of int or None
        Zarr: elements per shard file, a multiple of `chunks`.
    refused : str or None
        Why the array cannot be loaded (``"variable-length strings"``), None where it can.
    is_coordinate : bool
        A coordinate of other arrays (an HDF5/netCDF dimension scale), not a field by itself.
    attributes : mapping
        Attributes that change what values mean (scale_factor, add_offset, _FillValue, missing_value, units, calendar):
        reported, never applied.
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
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """As text, for another rank."""
        # Not `asdict`, which copies all that is inside: small loads make this often.
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self)} | {"attributes": dict(self.attributes)})

    @classmethod
    def from_json(cls, text: str) -> ArrayInfo:
        """The inverse of `to_json`."""
        found = json.loads(text)
        for name in ("shape", "chunks", "shards"):
            found[name] = None if found[name] is None else tuple(found[name])
        return cls(**found)

    def __str__(self) -> str:
        """As messages name it: ``'/density' in 'data.h5'``."""
        return f"'{printable(self.dataset)}' in '{printable(self.path)}'"


class Source(abc.ABC):
    """One open array. Not collective: each rank that reads opens its own.

    A format writes `info`, `dtype`, `read_into`, `state` and `close`; the rest is for formats that can do better than what is
    written here.
    """

    @property
    @abc.abstractmethod
    def info(self) -> ArrayInfo:
        """Shape, dtype, chunks and the rest; never touches values."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Type of the values that `read_into` writes: the file's, in native byte order."""

    @abc.abstractmethod
    def read_into(self, region: Region, out: np.ndarray[Any, Any]) -> None:
        """Write the values of `region` (the file's coordinates) into `out`.

        `out` is C-contiguous and writable, has exactly `region.shape` and `dtype`: call `check_request` first, which raises
        ValueError for anything else. Each chunk that meets `region` is decoded once. Empty regions are allowed and read
        nothing. Called from one thread at a time, not always the same one. Whatever goes wrong in the file surfaces as OSError,
        ValueError, RuntimeError or the library's own exception: the caller knows which chunk, and says so. Never returns values
        after `close`.
        """

    @abc.abstractmethod
    def state(self) -> tuple[int, ...] | None:
        """Size and time of the last change of what is open, then whatever else tells it from another on this machine; None
        where there is no such thing. Never raises. See `state_of`.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what this object opened; an object handed in by the caller stays open. May be called again."""

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """The values of `region` by the library's own indexing, with nothing in this package between: to verify with.

        In any byte order. Unless a format says otherwise, by `read_into`, so that ``verify="file"`` then compares what the
        devices hold with another read by the same code.
        """
        out = np.empty(region.shape, self.dtype)
        self.read_into(region, out)
        return out

    def missing(self, region: Region) -> Sequence[tuple[int, ...]]:
        """The chunks that meet `region` and are missing (not stored), so that it has the fill value there; ``[()]`` if an
        array without chunks has no values at all. None are, unless a format says otherwise.

        Asked right after `read_into` of the same region: what was noticed there need not be looked for again. Where the
        format's library hides it, less than all is returned.
        """
        return ()

    def view(self, region: Region) -> np.ndarray[Any, Any] | None:
        """The values without a copy, where they are in memory already (dtype and layout as they are); None unless a format
        says otherwise.
        """
        return None

    def chunk_reader(self) -> ChunkReader | None:
        """Whole chunks as they are stored, to be decoded in several threads; None where only `read_into` will do, which is so
        unless a format says otherwise.

        Looked up once per load. It is valid until `close`.
        """
        return None


def state_of(file: int | str) -> tuple[int, ...] | None:
    """What `Source.state` says of a file by its descriptor or path; None where it is gone.

    Of a path without the inode: some network file systems make up another when they are asked again.
    """
    try:
        found = os.stat(file)
    except OSError:
        return None
    state = found.st_size, found.st_mtime_ns
    return (*state, found.st_ino, found.st_dev) if isinstance(file, int) else state


def fresh(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """New memory."""
    return np.empty(nbytes, dtype=np.uint8)


Room = Callable[[int], np.ndarray[Any, np.dtype[np.uint8]]]


class Scratch:
    """Memory that is used again and again, since new memory is slow: a `Room` for one thread at a time.

    Each call may give the same bytes as the one before, so what is in them is over by then.
    """

    def __init__(self) -> None:
        self._memory = fresh(0)

    def __call__(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """So many bytes, with anything in them."""
        if len(self._memory) < nbytes:
            self._memory = fresh(0)  # given back before more is asked for
            self._memory = fresh(nbytes)
        return self._memory[:nbytes]


def read_at(descriptor: int, out: np.ndarray[Any, Any], offset: int) -> int:
    """Fill `out`, a C-contiguous array of bytes, with those of an open file from `offset` on; how many there were.

    Positional: no offset that two threads would share.
    """
    room, done = out.data, 0
    while done < len(room):  # one call reads 2 GiB at the most, and less on some file systems
        n = os.preadv(descriptor, [room[done:]], offset + done)
        if n == 0:
            break
        done += n
    return done


class ChunkReader(Protocol):
    """The chunks of one open array, one by one. Both methods may be called from several threads at once."""

    def fetch(self, index: tuple[int, ...], room: Room = fresh) -> Encoded | None:
        """Read the chunk at `index` (its position along each axis of the file's chunk grid) as it is stored.

        `room` gives the memory to read into: memory that was used before is much faster than new memory. None where it is
        missing: its values are the fill value. Errors of the file surface as OSError (a short read too) or ValueError.
        """
        ...

    def decode(self, encoded: Encoded | None, out: np.ndarray[Any, Any]) -> None:
        """Decode what `fetch` returned into `out`: C-contiguous, of the chunk's full shape (at the array's edge too) and of
        the source's `dtype`. ValueError where it is damaged.
        """
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """One chunk as stored.

    Attributes
    ----------
    data : bytes-like
        As it is in the file.
    skipped : frozenset of int
        Stages of the decoding chain that were not applied to this chunk.
    """

    data: Any
    skipped: frozenset[int] = frozenset()


def read_by_chunks(
    reader: ChunkReader, chunk_shape: tuple[int, ...], region: Region, out: np.ndarray[Any, Any]
) -> list[tuple[int, ...]]:
    """Read a region, which is not empty, into a buffer of its shape, chunk by chunk; returns the chunks that are missing."""
    whole, missing, room = np.empty(chunk_shape, out.dtype), [], Scratch()
    axes = [range(a // c, -(-b // c)) for a, b, c in zip(region.start, region.stop, chunk_shape, strict=True)]
    for index in itertools.product(*axes):
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


def a_few_chunks(region: Region, chunk_shape: Sequence[int], most: int) -> Iterator[Region]:
    """Cut a region, which is not empty, into parts that meet at most `most` chunks each, in C order and about equal.

    Libraries hold some kilobytes for each chunk of one read, however small the chunks are.

    >>> [str(part) for part in a_few_chunks(Region((0, 1), (2, 30)), (1, 10), most=2)]
    ['[0:1, 1:20]', '[0:1, 20:30]', '[1:2, 1:20]', '[1:2, 20:30]']
    """
    axes = list(zip(region.start, region.stop, chunk_shape, strict=True))
    met = [(a // c, -(-b // c)) for a, b, c in axes]
    steps, room = [1] * len(axes), most
    for k in reversed(range(len(axes))):
        n = met[k][1] - met[k][0]
        steps[k] = -(-n // -(-n // room))
        if steps[k] < n:
            break
        room = max(1, room // n)
    for index in itertools.product(*(range(*ends, step) for ends, step in zip(met, steps, strict=True))):
        cells = list(zip(index, steps, axes, strict=True))
        start = tuple(max(a, i * c) for i, _, (a, _, c) in cells)
        yield Region(start, tuple(min(b, (i + step) * c) for i, step, (_, b, c) in cells))


class Format(abc.ABC):
    """One file format. `registry` finds it by the name of an entry point, and nothing else in shardload knows it.

    A format writes `name`, `claims_path`, `list_arrays` and `open_path`, and a `Source`; the rest is for formats that can do
    better than what is written here. What the caller allows comes as an `Access`: a format whose files name other files opens
    those by `Access.open_file` alone, or asks `Access.fence` before its library does.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def claims_path(self, path: str) -> bool:
        """Whether the file or folder at `path`, which exists, is of this format: by content, not by suffix. Never raises."""

    @abc.abstractmethod
    def list_arrays(self, path: str, access: Access = STRICT) -> list[ArrayInfo]:
        """Every array in the file, in its own order, from metadata alone; what cannot be loaded too, with the reason."""

    @abc.abstractmethod
    def open_path(self, path: str, dataset: str, access: Access = STRICT) -> Source:
        """Open one array by its full name; ``KeyError(dataset)`` if there is none of that name."""

    def claims_url(self, url: str) -> bool:
        """Whether `url`, which has a ``://``, is of this format. Asked without a look at what is there. Never raises."""
        return False

    def claims_object(self, obj: object) -> bool:
        """Whether `obj` is an open array, or an open group, of this format's library. Never raises."""
        return False

    def open_object(self, obj: Any, access: Access = STRICT) -> Source:
        """Take an open array that `claims_object` claims; closing stays with the caller. ConfigError, naming its arrays, for an
        open group.
        """
        raise NotImplementedError(f"{self.name} claims objects, but does not open them")

    def sketch_arrays(self, path: str, access: Access = STRICT, most: int | None = None, like: str = "") -> list[ArrayInfo]:
        """What is needed to say which array could be meant: `list_arrays`, but not more than it takes.

        One more than `most` tells that there are more; those below `like`, or with a name like it, are then among them where
        the format lists names quickly. Attributes that are texts may be left out: reading those of a damaged file is not safe
        in every format.
        """
        return self.list_arrays(path, access)[: None if most is None else most + 1]

    def open_file(self, path: str, access: Access = STRICT) -> OpenFile:
        """Open the file once, for several of its arrays. Here each array opens it by itself."""
        return _OpenedByEach(self, path, access)


class OpenFile(abc.ABC):
    """One file that was opened once, and hands out its arrays. Use it in a ``with`` statement."""

    @abc.abstractmethod
    def open(self, dataset: str) -> Source:
        """Open one array by its full name, as `Format.open_path` does. It is valid until it is closed, or this file is."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file, after its arrays. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OpenedByEach(OpenFile):
    """For formats that open a file for each array of it."""

    def __init__(self, file_format: Format, path: str, access: Access) -> None:
        self._format, self._path, self._access = file_format, path, access

    def open(self, dataset: str) -> Source:
        return self._format.open_path(self._path, dataset, self._access)

    def close(self) -> None:
        pass


MOST_NAMED = 8


def some(texts: Sequence[str], more: str = "") -> str:
    """The first few, and how many more there are; with `more`, that in place of the number.

    >>> some([str(n) for n in range(10)])
    '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    rest = len(texts) - MOST_NAMED
    return ", ".join(texts[:MOST_NAMED]) + (f" and {more or rest} more" if rest > 0 else "")


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


def refusal(dtype: np.dtype[Any]) -> str | None:
    """Why values of `dtype` cannot become a `jax.Array`, in words that follow "holds"; None where they can.

    Booleans, integers, floats and complex numbers that JAX has are accepted in any byte order, and so are the types of
    `ml_dtypes` (``bfloat16`` and smaller floats), which NumPy files under the same kind as records.

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
        return None
    return _KINDS.get(dtype.kind, "raw bytes without a type")


def unaddressable(shape: Sequence[int], chunks: Sequence[int] | None) -> str | None:
    """Why no part of an array of this shape, in these chunks, can be had, in words that follow "holds"; None where it can.

    (A part of an array that is too large as a whole can be.)

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
    """The same type in this machine's byte order, without metadata (HDF5 enum names, say); refused ones as they are.

    >>> native_dtype(np.dtype(">f4")) == np.dtype("float32")
    True
    """
    return np.dtype(dtype.type) if refusal(dtype) is None else dtype


def check_request(info: ArrayInfo, dtype: np.dtype[Any], region: Region, out: np.ndarray[Any, Any]) -> None:
    """Raise ValueError unless `region` is inside the array and `out` is the buffer that `Source.read_into` is promised.

    Libraries clamp a region that reaches outside the array, or broadcast into a buffer of another shape, silently.
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
    """Bytes of the whole array, or of so many of its values."""
    n = math.prod(info.shape if shape is None else shape)
    try:
        return n * np.dtype(info.dtype).itemsize
    except TypeError:  # a name of ml_dtypes that nobody registered with NumPy
        return n


def json_value(value: Any) -> Any:
    """An attribute's value as plain Python: text for bytes, numbers for NumPy scalars, lists for arrays.

    What is neither (references, records) becomes its text. An array of one element counts as that element, since netCDF
    stores scalars so. Of what is long, words say how long it is: attributes go to every rank, and to a person.

    >>> json_value(np.array([1.5], dtype=">f4")), json_value(b"K"), json_value(np.int16(3)), json_value([0] * 5000)
    (1.5, 'K', 3, '5000 values, not shown')
    """
    n = value.size if isinstance(value, np.ndarray) else len(value) if isinstance(value, list | tuple) else 0
    if n > _MOST_SHOWN:
        return f"{n} values, not shown"
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value.tolist()
    if isinstance(value, bytes):
        value = value[: 4 * _MOST_SHOWN + 1].decode("utf-8", errors="replace")
    if isinstance(value, list | tuple):
        return [json_value(part) for part in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... (not all shown)"


def settle_bools(values: np.ndarray[Any, Any]) -> None:
    """Make every byte of booleans 0 or 1, in place; anything else stays as it is.

    Files can hold other bytes, which programs write that take any number but 0 for true. So does NumPy. XLA takes them to be
    0 or 1, and its `where`, sums and comparisons go wrong if they are not.

    >>> values = np.array([0, 1, 2, 128], dtype="u1").view(bool)
    >>> settle_bools(values)
    >>> values.view("u1").tolist()
    [0, 1, 1, 1]
    """
    if values.dtype.kind == "b":
        number = values.view(np.uint8)
        np.minimum(number, 1, out=number)
