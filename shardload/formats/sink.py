"""How are arrays written by many ranks, one chunk by one rank? Through one small interface, the opposite of `Source`.

1. An `ArraySpec` says what an array of the new file will be. A `Sink` is made of the specs of all, the same on every rank.
2. Any thread of any rank encodes values: ``sink.arrays[name].encode(region, values)``.
3. One rank creates the file: its `Sink` makes the temporary, says where stored chunks go, writes the metadata, and renames.
4. Any rank has a `Writer`: it writes stored chunks where that rank said.

None of them knows ranks. What travels between them is integers (numbers of chunks, sizes, offsets) and a `Ticket`.
docs/design/save.md has the protocol, and what is on disk after a kill in each of its phases.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.codecs.algorithms import Step
from shardload.formats.codecs.table import has_own_shuffle, parse_compression
from shardload.formats.contract.array import ArrayInfo, cast_value, json_value, native_dtype, refusal
from shardload.planning.region import Region, ravel, unravel
from shardload.storage.objects import Ints, ObjectFolder
from shardload.storage.target import as_write_error
from shardload.system.scratch import shared_scratch
from shardload.system.steps import step_done
from shardload.values.decoding import PACKING, packed_by, typed

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Decode = Callable[[Region], np.ndarray[Any, Any]]
ONE_LENGTH = "Axes of one name have one length: pass other dims=, or cut the longer one (copy: select=; padding is not saved)"
_ONE_NAME = "Call one of them by another name"
_KEYS = {"name": str, "level": object, "shuffle": bool, "options": Mapping}  # of a compression


@dataclass(frozen=True)
class Compression:
    """How chunks are compressed.

    Attributes
    ----------
    name : str
        ``"gzip"``, ``"zstd"``, ``"blosc"``, ``"lz4"``, or the name of another compressor of the format. ``"none"`` is for a
        shuffle alone.
    level : int or None
        The compressor's level; None for its usual one.
    shuffle : bool
        Whether the bytes of the elements are sorted first: the first byte of each, then the second, ...
    options : mapping
        What else a compressor takes: Blosc's ``cname``; ``cd_values`` for a filter of HDF5 that is given by its number.
    """

    name: str
    level: int | None = None
    shuffle: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Compression | None:
        """From what a caller writes: ``"gzip"``, ``"gzip:6+shuffle"``, ``{"name": "gzip", "level": 6}``, None.

        >>> Compression.of("gzip:6"), Compression.of(None)
        (Compression(name='gzip', level=6, shuffle=False, options={}), None)
        """
        if value is None or isinstance(value, Compression):
            return value
        if isinstance(value, str):
            if value.strip().lower() == "none":
                return None
            value = parse_compression(value) or value
        is_dict = isinstance(value, Mapping) and "name" in value
        if not is_dict or not all(isinstance(part, _KEYS.get(key, ())) for key, part in value.items()):
            raise ConfigError(
                f"compression is {value!r}; expected a name such as compression='gzip' or compression='gzip:6+shuffle', "
                "compression=None, or {'name': 'gzip', 'level': 6, 'shuffle': True}"
            )
        return cls(**{"shuffle": has_own_shuffle(value["name"]), **value})


@dataclass(frozen=True)
class ArraySpec:
    """What one array of a new file will be.

    Attributes
    ----------
    shape : tuple of int
        Elements along each axis.
    dtype : dtype
        Type of the values, in the byte order in which they are stored.
    chunks : tuple of int or None
        Elements of a chunk along each axis, at most those of the array; None for a contiguous array.
    shards : tuple of int or None
        Zarr: elements of a shard file along each axis, a multiple of `chunks`.
    compression : Compression or None
        How chunks are compressed. An array without elements or without axes is stored as it is.
    checksum : bool
        Whether each chunk gets a checksum of the format's own (HDF5: Fletcher-32, Zarr v3: CRC-32C).
    dims : tuple of str or None
        Name of each axis.
    attrs : mapping
        Attributes.
    fill_value : object
        Value of elements that are not stored, and of those that pad chunks at the array's edge; None for the format's default.
    unlimited : tuple of int
        Axes that may grow later.
    texts : ndarray or None
        The values of a short array of text. A sink writes it with the metadata; it is none of `Sink.arrays`.
    scales : tuple of tuple of str
        HDF5: of each axis the full names of its dimension scales, the coordinate first; empty if names of axes tell them.
    axis_labels : tuple of str
        HDF5: the label of each axis, "" for none; empty if names of axes tell them.
    scale_name : str or None
        HDF5: its name as a dimension scale; None if it is none, or only because an axis has its name.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    compression: Compression | None = None
    checksum: bool = False
    dims: tuple[str | None, ...] | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    fill_value: Any = None
    unlimited: tuple[int, ...] = ()
    texts: np.ndarray[Any, Any] | None = None
    scales: tuple[tuple[str, ...], ...] = ()
    axis_labels: tuple[str, ...] = ()
    scale_name: str | None = None

    def checked(self, name: str) -> ArraySpec:
        """This spec with plain types, and chunks no larger than the array. ConfigError if it makes no sense in any format."""
        shape, dtype = tuple(int(n) for n in self.shape), np.dtype(self.dtype)
        refused = refusal(dtype) if self.texts is None else None
        if refused is not None:
            raise ConfigError(f"{name!r} holds {refused}, which cannot be saved")
        if self.dims is not None and len(self.dims) != len(shape):
            raise ConfigError(f"dims of {name!r} are {self.dims!r}; expected {len(shape)} names, one for each axis of {shape}")
        chunks, shards = self._grid(name, shape)
        is_plain = chunks is None and not self.unlimited
        compression, checksum = Compression.of(self.compression), self.checksum
        if is_plain and shape and 0 not in shape and (compression is not None or checksum):
            feature, verb = ("compression", "are compressed") if compression else ("checksums", "have them")
            raise ConfigError(f"{name!r} has {feature} but no chunks; only chunks {verb}. Pass chunks={_example(shape)} or so")
        if chunks is None and self.unlimited and self.texts is None:
            raise ConfigError(f"{name!r} has an axis that may grow, but no chunks. Pass chunks={_example(shape)} or so")
        if chunks is None:
            compression, checksum = None, False
        fill = self.fill_value
        if fill is not None:
            fill = cast_value(fill, dtype) if np.ndim(fill) == 0 else None
            if fill is None:
                raise ConfigError(f"the fill value of {name!r} is {self.fill_value!r}; expected one value of type {dtype}")
        has_dims = not shape or (self.dims is not None and any(self.dims))
        dims = tuple(self.dims or ()) if has_dims else None
        return replace(
            self,
            shape=shape,
            dtype=dtype,
            chunks=chunks,
            shards=shards,
            compression=compression,
            checksum=checksum,
            dims=dims,
            attrs=dict(self.attrs),
            fill_value=fill,
            unlimited=tuple(sorted(self.unlimited)),
        )

    def _grid(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        if self.chunks is None:
            if self.shards is not None:
                raise ConfigError(f"{name!r} has shards {self.shards!r} but no chunks. Pass chunks= too")
            return None, None
        for option, sizes in (("chunks", self.chunks), ("shards", self.shards or self.chunks)):
            if len(sizes) != len(shape) or any(int(n) < 1 for n in sizes):
                raise ConfigError(f"{option} of {name!r} are {sizes!r}; expected a size of 1 or more for each axis of {shape}")
        if not shape or (0 in shape and not self.unlimited):
            return None, None

        def cut(sizes: Sequence[int], lengths: Sequence[int]) -> tuple[int, ...]:
            return tuple(
                int(size) if k in self.unlimited else min(int(size), n)
                for k, (size, n) in enumerate(zip(sizes, lengths, strict=True))
            )

        chunks = cut(self.chunks, [n or 1 for n in shape])
        if self.shards is None:
            return chunks, None
        if any(s % c for s, c in zip(self.shards, self.chunks, strict=True)):
            raise ConfigError(f"shards of {name!r} are {self.shards!r}; expected a multiple of the chunks {self.chunks!r}")
        # (Where a chunk was cut, it is the whole axis, and so is the shard.)
        return chunks, cut(self.shards, [-(-(n or 1) // c) * c for n, c in zip(shape, chunks, strict=True)])

    @property
    def fill(self) -> Any:
        """The value of elements that are not stored."""
        return np.zeros((), self.dtype)[()] if self.fill_value is None else self.fill_value

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        chunks = self.chunks if self.chunks is not None else tuple(max(1, n) for n in self.shape)
        return tuple(-(-n // c) for n, c in zip(self.shape, chunks, strict=True))


def with_dims(specs: Mapping[str, ArraySpec]) -> dict[str, ArraySpec]:
    """The specs with a name for each axis: netCDF needs them, and xarray needs those of Zarr. Axes without one share a name if
    they have the same length.
    """
    taken = {dim for spec in specs.values() for dim in spec.dims or () if dim}
    free = (dim for number in itertools.count() if (dim := f"dim_{number}") not in taken)
    new_names = defaultdict[tuple[int, bool, int], str](lambda: next(free))  # by length, whether it grows, and which of these
    with_names = {}
    for name, spec in specs.items():
        counts, dims = Counter[tuple[int, bool]](), list[str | None](spec.dims or (None,) * len(spec.shape))
        for k, n in enumerate(spec.shape):
            if dims[k] is None:
                counts[n, k in spec.unlimited] += 1
                dims[k] = new_names[n, k in spec.unlimited, counts[n, k in spec.unlimited]]
        with_names[name] = replace(spec, dims=tuple(dims))
    return with_names


def unopened_by_xarray(specs: Mapping[str, ArraySpec]) -> list[tuple[str, str]]:
    """Why xarray would not open a Zarr group with these arrays, and what to do: two axes have one name but two lengths, or an
    axis has the name of a single number. Zarr has such groups.

    >>> x, y, t = (ArraySpec(shape, np.dtype("f4"), dims=("t",) * len(shape)) for shape in ((3,), (4,), ()))
    >>> [what for what, _ in unopened_by_xarray({"/x": x, "/y": y, "/t": t})]
    ["axis 't' has 4 elements in '/y', but 3 in '/x'", "axis 't' of '/x' has the name of '/t', a single number"]
    >>> unopened_by_xarray({"/x": x, "/g/y": y})
    []
    """
    first: dict[tuple[str, str], tuple[int, str]] = {}
    clashes: dict[tuple[str, str], str] = {}
    for name, spec in specs.items():
        for dim, n in zip(spec.dims or (), spec.shape, strict=False):
            axis = (name.rpartition("/")[0], dim or "")
            length, first_name = first.setdefault(axis, (n, name))
            if dim and length != n:
                clashes.setdefault(axis, f"axis {dim!r} has {n} elements in '{name}', but {length} in '{first_name}'")
    numbers = {
        f"axis {dim!r} of '{name}' has the name of '{group}/{dim}', a single number"
        for (group, dim), (_, name) in first.items()
        if dim and f"{group}/{dim}" in specs and not specs[f"{group}/{dim}"].shape
    }
    return [*((text, ONE_LENGTH) for text in clashes.values()), *((text, _ONE_NAME) for text in sorted(numbers))]


def groups_above(name: str) -> Iterator[str]:
    """The groups that an array is in, by full names, the innermost first, without the root.

    >>> list(groups_above("/g/h/y"))
    ['/g/h', '/g']
    """
    while name := name.rpartition("/")[0]:
        yield name


def _example(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(n, 64) or 1 for n in shape)


@dataclass(frozen=True, slots=True)
class Stored:
    """One chunk as it will be stored, or the bytes of a region of a contiguous array.

    Attributes
    ----------
    data : bytes-like
        Its bytes. They may be those of the values that were encoded, so write them before the values change.
    mask : int
        HDF5: a bit for each filter that was left out.
    """

    data: Any
    mask: int = 0

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return memoryview(self.data).nbytes


class Encoder:
    """One array of the new file: how its values are stored. Safe to use from several threads at once.

    Parameters
    ----------
    path, name : str
        The file and the array.
    spec : ArraySpec
        A checked spec.
    format, codec : str
        As in `ArrayInfo`.
    steps : sequence of callable
        Functions that encode the bytes of a chunk, in order. Each takes a flat array of bytes and returns something bytes-like.
    is_placed_by_root : bool
        True if the rank that created the file says where a chunk goes, because that depends on the sizes of other chunks.
        Otherwise `Ticket.offsets` says it.

    Attributes
    ----------
    info : ArrayInfo
        The array as it will be, for planning: its chunks are the units of `encode`, as they are those of decoding.
    """

    def __init__(
        self,
        path: str,
        name: str,
        spec: ArraySpec,
        format: str,
        codec: str,
        steps: Sequence[Step] = (),
        *,
        is_placed_by_root: bool = False,
    ) -> None:
        self.name, self.spec, self.is_placed_by_root = name, spec, is_placed_by_root
        dtype = native_dtype(spec.dtype).name
        self.info = ArrayInfo(path, name, format, spec.shape, dtype, chunks=spec.chunks, codec=codec, shards=spec.shards)
        self._steps, self._scratch = tuple(steps), shared_scratch()
        step_done()

    def encode(self, region: Region, values: np.ndarray[Any, Any]) -> Stored:
        """Encode the values of one chunk, which ends at the array's edge if the chunk reaches over it; any region of an array
        in one piece.

        `values` has any strides, and the array's type in any byte order. Raises ValueError for another type or shape: nothing
        is converted silently.
        """
        if values.shape != region.shape:
            raise ValueError(f"values of shape {values.shape} for region {region} of '{self.name}'")
        data: Any = self._packed(values)
        for step in self._steps:
            data = step(data)
        # A step may leave its result in scratch memory, which the next chunk overwrites.
        is_scratch = bool(self._steps) and isinstance(data, np.ndarray) and data.base is not None
        return Stored(data.copy() if is_scratch else data)

    def _packed(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of values as the file has them before the steps: C order, its byte order, a whole chunk."""
        dtype, shape = self.spec.dtype, self.spec.chunks or values.shape
        # First, because this is all that is done for a contiguous array.
        if values.dtype == dtype and values.flags.c_contiguous and values.shape == shape:
            return values.reshape(-1).view(np.uint8)
        if native_dtype(values.dtype) != native_dtype(dtype):
            raise ValueError(f"values of type {values.dtype} for an array of {dtype}: nothing is converted silently")
        # If a step follows, nobody needs these bytes after `encode`: then they are in memory that the next chunk uses again.
        nbytes = math.prod(shape) * dtype.itemsize
        room = self._scratch.bytes("encode", nbytes) if self._steps else np.empty(nbytes, dtype=np.uint8)
        out = room.view(dtype).reshape(shape)
        for axis, n in enumerate(values.shape if values.shape != shape else ()):  # what reaches over the edge
            out[(*(slice(m) for m in values.shape[:axis]), slice(n, None))] = self.spec.fill
        out[tuple(slice(n) for n in values.shape)] = values
        return room

    def number(self, region: Region) -> int:
        """The number, in C order, of the chunk whose part inside of the array is `region`. ValueError if there is none."""
        chunks = self.spec.chunks
        if chunks is None:
            return 0
        index = tuple(a // c for a, c in zip(region.start, chunks, strict=True))
        if region != self.region(index):
            raise ValueError(f"region {region} of '{self.name}' is no chunk: its chunks have shape {chunks}")
        return ravel(index, self.spec.grid)

    def region(self, index: Sequence[int]) -> Region:
        """The part of a chunk that lies in the array."""
        chunks = self.spec.chunks or self.spec.shape
        start = tuple(k * c for k, c in zip(index, chunks, strict=True))
        stop = tuple(min(a + c, n) for a, c, n in zip(start, chunks, self.spec.shape, strict=True))
        return Region(start, stop)


class Growing(Encoder):
    """An array that grows: an `Encoder` of the appended rows, which are planned as an array of their own. It begins at row
    `base` of the old array.

    A file of chunks (or, without such files, a chunk) begins there, into which new rows go. So its chunks are those of the old
    array, and its first one may have old rows already.

    Attributes
    ----------
    axis : int
        The axis.
    stored_shape : tuple of int
        The shape that the array has.
    old_shape : tuple of int
        The shape of what stays of it: the same, unless rows are replaced.
    base : int
        The row of the old array at which it begins.
    """

    axis: int
    stored_shape: tuple[int, ...]
    old_shape: tuple[int, ...]
    base: int

    def begin(self, details: Mapping[str, Any], axis: int, unit: int, n_new: int) -> tuple[int, ...]:
        """Set the attributes; returns the shape of the appended rows. `unit` is how many rows are written as a whole."""
        self.axis, self.old_shape = axis, tuple(int(n) for n in details["shape"])
        self.stored_shape = tuple(int(n) for n in details.get("stored_shape", self.old_shape))
        self.base = self.old // unit * unit
        shape = list(self.old_shape)
        shape[axis] = self.old + n_new - self.base
        return tuple(shape)

    @property
    def old(self) -> int:
        """How many old rows stay."""
        return self.old_shape[self.axis]

    @property
    def unit(self) -> int:
        """Rows of a chunk."""
        return (self.spec.chunks or self.spec.shape)[self.axis]

    @property
    def new_shape(self) -> tuple[int, ...]:
        """The shape that the array will have."""
        shape = list(self.spec.shape)
        shape[self.axis] += self.base
        return tuple(shape)

    def in_file(self, region: Region) -> Region:
        """A region of the appended rows, in the coordinates of the whole array."""
        return region.moved([self.base * (axis == self.axis) for axis in range(region.ndim)])

    def old_chunks_with(self, index: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The chunks with old rows alone that must be written with this one: those in its file, if it is the first chunk there
        that has a new row.
        """
        return []


class PlacedChunks:
    """Where the chunks of one array have been placed. A chunk without a place has size 0.

    Parameters
    ----------
    name : str
        The array.
    grid : sequence of int
        Chunks along each axis.
    """

    def __init__(self, name: str, grid: Sequence[int]) -> None:
        self.name, self.grid = name, tuple(grid)
        self.offsets, self.sizes = np.zeros((2, math.prod(grid)), np.int64)

    def checked(self, numbers: Any, nbytes: Any) -> tuple[Ints, Ints]:
        """Numbers and sizes of chunks, as arrays. ValueError unless each can get a place of that size."""
        numbers = np.asarray(numbers, dtype=np.int64)
        sizes = np.broadcast_to(np.asarray(nbytes, dtype=np.int64), numbers.shape)
        if len(numbers) and sizes.min() < 1:
            raise ValueError(f"a chunk of '{self.name}' has {sizes.min()} to {sizes.max()} bytes; expected 1 or more")
        if np.any(self.sizes[numbers]) or len(np.unique(numbers)) < len(numbers):
            raise ValueError(f"a chunk of '{self.name}' has a place already, among {numbers.min()} to {numbers.max()}")
        return numbers, sizes

    def check_complete(self) -> None:
        """ValueError if a chunk has no place. A contiguous array has its own from the beginning, or no elements."""
        absent = np.flatnonzero(self.sizes == 0)
        if len(absent) and self.grid:
            first = unravel(int(absent[0]), self.grid)
            raise ValueError(f"{len(absent)} of {len(self.sizes)} chunks of '{self.name}' have no place; the first is {first}")


@dataclass(frozen=True)
class Ticket:
    """What other ranks must know of a file that was created. It is small: integers and text.

    Attributes
    ----------
    temporary : str
        Path of the temporary file or folder. It has a random word, which its content has, too: so a rank notices if it sees
        another file there.
    offsets : mapping
        Where each contiguous array begins; 0 for an array whose chunks are objects of their own.
    """

    temporary: str
    offsets: Mapping[str, int] = field(default_factory=dict)


class Writer:
    """Puts stored chunks where they have their place. Safe to use from several threads at once, up to `close`.

    Parameters
    ----------
    sink : Sink
        What is written.
    storage : object
        Where it is written. It has ``sync()`` and ``close()``.
    put : callable
        Writes bytes there. Its arguments are the array, the number of its chunk, their offset, and the bytes.
    """

    def __init__(self, sink: Sink, storage: Any, put: Callable[[str, int, int, Any], None]) -> None:
        self._sink, self._storage, self._put = sink, storage, put
        self._is_open = True

    def put(self, name: str, number: int, offset: int, stored: Stored) -> None:
        """Write one chunk, or a run of a contiguous array.

        Raises SourceError, with file, array and chunk, if it cannot be written.
        """
        if not self._is_open:
            raise ValueError(f"the writer of '{self._sink.path}' is closed")
        spec = self._sink.arrays[name].spec
        with as_write_error(self._sink.path, name, lambda: unravel(number, spec.grid) if spec.chunks else None):
            self._put(name, number, offset, stored.data)

    def sync(self) -> None:
        """Wait until all that was put is on disk. Raises SourceError if it is not. Other threads may put meanwhile."""
        with as_write_error(self._sink.path):
            self._storage.sync()

    def close(self) -> None:
        """Close what is open. May be called again."""
        self._is_open = False
        with as_write_error(self._sink.path):
            self._storage.close()


class Sink(abc.ABC):
    """A new file: what is in it and how each array is stored. The same on every rank.

    One rank calls `create`. The same rank alone, one thread at a time, then says where each chunk goes, writes the metadata,
    and gives the file its name. A ``with`` statement removes the temporary at its end, if it was not committed.

    Attributes
    ----------
    path : str
        The name that the file will have.
    arrays : mapping of str to Encoder
        Its arrays, by their full names (``"/g/rho"``).
    mode : str
        ``"w-"``: the name must not exist. ``"w"``: what has the name is replaced, when all is written.
    ticket : Ticket
        Once it is created: what other ranks must know.
    """

    path: str
    mode: str
    arrays: Mapping[str, Encoder]
    ticket: Ticket

    @abc.abstractmethod
    def create(self) -> Self:
        """Make the temporary; returns this object. Before it, nothing is touched on disk."""

    @abc.abstractmethod
    def allocate(self, name: str, numbers: Sequence[int] | Ints, nbytes: Sequence[int] | Ints, masks: Any = 0) -> Ints:
        """Give each of some chunks its place; returns their offsets.

        Call it any number of times, with chunks in any order. ``masks`` are those of `Stored`, one for all or one for each.
        Raises ValueError if a chunk has a place already, or is not in the array.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Write the metadata, last what makes the file readable (the superblock, the root's metadata); check it; fsync.

        Call it when all writers have synced. Raises ValueError if chunks have no place.
        """

    @abc.abstractmethod
    def commit(self) -> None:
        """Give the finished file its name. ConfigError if ``mode="w-"`` and the name exists."""

    @abc.abstractmethod
    def abandon(self, *, keeps: bool = False) -> None:
        """Remove the temporary, unless it was committed. May be called again. Never raises OSError.

        With `keeps`, as after Ctrl-C, one stays that another job may go on with (`take_up`).
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    # --- on any rank

    def take_up(self) -> dict[str, Bools] | None:
        """Take up what a job that was killed has left of this file, so that `create` goes on with it. On one rank.

        Returns
        -------
        dict of ndarray or None
            Of each array, for each chunk whether it is on disk, whole; None if nothing was left.

        Raises
        ------
        ConfigError
            If what was left is of another source, if another job is writing it, or if files of this kind always begin anew.
        """
        raise ConfigError(
            f"a copy to '{self.path}' cannot go on after a kill: only one to a Zarr store in a folder, without shards, can. "
            "Remove what is unfinished, and begin again without resume=True"
        )

    @abc.abstractmethod
    def writer(self, ticket: Ticket) -> Writer:
        """Open the temporary that another rank made. ConfigError if it is not to be seen here."""

    @abc.abstractmethod
    def stored(self, ticket: Ticket) -> ObjectFolder:
        """What was written, to be read back before `commit`."""

    @abc.abstractmethod
    def key_of(self, ticket: Ticket, name: str, number: int) -> str:
        """The key in `stored` of the object that has a chunk, from whose beginning the chunk's offset is counted."""

    def decoding(self, ticket: Ticket, name: str) -> AbstractContextManager[Decode] | None:
        """How the format's library reads values of an array after `finish`, and before `commit`; None if it simply opens
        ``ticket.temporary``.
        """
        return None


# --- what stored numbers mean: what is appended must mean the same

UNITS = ("units", "calendar")
_BOUNDS = ("bounds", "climatology")  # the arrays of bounds of a coordinate, in CF: they have its units
HOW_TO_GROW = (
    "Make a file that can: `shardload copy OLD NEW --unlimited AXIS`; or with unlimited= in shardload.save, "
    "maxshape=(None, ...) in h5py, an unlimited dimension in netCDF4, unlimited_dims= in xarray"
)
"""What to type for an HDF5 or netCDF4 array that cannot grow along an axis."""


def meaning_of(dtype: np.dtype[Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """What stored numbers mean, by the attributes of their array, as plain JSON: what is appended must mean the same.

    >>> meaning_of(np.dtype("i2"), {"units": "K", "scale_factor": 0.5, "title": "t"})
    {'attrs': {'units': 'K'}, 'packed': ['scale_factor=0.5'], 'bounds': []}
    """
    packing = {key: typed(attrs[key]) for key in PACKING if attrs.get(key) is not None}
    bounds = list(_texts_of(attrs, _BOUNDS).values())
    meaning = _texts_of(attrs, (*UNITS, "dtype"))
    return {"attrs": meaning, "packed": packed_by(dtype, packing), "bounds": bounds}


def units_of(attrs: Mapping[str, Any]) -> dict[str, str]:
    """The attributes without which numbers mean nothing."""
    return _texts_of(attrs, UNITS)


def _texts_of(attrs: Mapping[str, Any], keys: Sequence[str]) -> dict[str, str]:
    values = {key: json_value(attrs[key]) for key in keys if key in attrs}
    return {key: text for key, text in values.items() if isinstance(text, str)}
