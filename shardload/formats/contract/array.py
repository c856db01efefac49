"""What is known of an array before its values are read?

1. Which values can JAX hold, and is a buffer fit for them? `refusal`, `check_request`.
2. What are the axes called, and what do they count? `Labels`: names of dimensions, attributes, and coordinates. netCDF and Zarr
   name axes, and store the coordinates of an axis (longitudes, times) in an array of that name. A load needs none of it. So it
   is read only for `shardload.open`, for a selection by name, and when the labels of a plan are first used (`OnDemand`).
   `Source.labels` gives a format's own names and attributes, and says which other arrays are coordinates; `labelling.Labeller`
   reads those coordinates, if they are small.
3. `ArrayInfo` is what a load needs, `Properties` what another array like it needs besides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shardload.errors import printable
from shardload.planning.region import Region
from shardload.storage.remote import is_remote
from shardload.system.caller import warnings_caught
from shardload.values.decoding import ATTRIBUTES, Packing

Dims = tuple[str | None, ...]
LONGEST_NAME, MOST_ATTRS = 4096, 256  # that a rank takes from a helper process
MIXED = (-1, -1)  # as `Labels.read_in`: the file changed while labels were read. No file has this state


class Note(str):
    """A text for people in the place of an attribute's value: why the value is left out."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Coordinate:
    """A coordinate of an array.

    Attributes
    ----------
    dataset : str
        Its full name in the file.
    dims : tuple of str or None
        The names of its axes.
    attrs : mapping
        Its attributes, as plain Python.
    values : ndarray or None
        Its values, decoded (times are numbers); None if they are not small, or no numbers.
    """

    dataset: str
    dims: Dims = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    values: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True, eq=False)
class Labels:
    """The names and attributes of one array.

    Attributes
    ----------
    dims : tuple of str or None
        The name of each axis; None for an axis without one.
    attrs : mapping
        All attributes that are the author's, as plain Python.
    coords : mapping of str to Coordinate
        The coordinates, by name.
    is_brief : bool
        True if there is only what a selection by names needs: attributes, and other coordinates, were not asked for.
    of_group : mapping
        The attributes of the group that the array is in (of the file, for the root): title, history. Only of a single array.
    read_in : tuple of int or None
        The state of the file in which they were read (`Source.state`); None if it has none.
    """

    dims: Dims
    attrs: Mapping[str, Any] = field(default_factory=dict)
    coords: Mapping[str, Coordinate] = field(default_factory=dict)
    is_brief: bool = False
    of_group: Mapping[str, Any] = field(default_factory=dict)
    read_in: tuple[int, ...] | None = None


class OnDemand:
    """Labels that are read from the file when they are first needed.

    Parameters
    ----------
    read : callable
        Returns the labels. It takes `handle`, `info`, `access` and who reads them (`labelling.Labeller`); None: it opens the
        file itself.
    handle : str, PathLike or object
        The file, or the open array.
    info : ArrayInfo
        The array.
    access : Access
        What the caller allows.
    brief : Labels, optional
        The labels that a selection by names used.
    """

    def __init__(
        self, read: Callable[..., Labels], handle: Any, info: ArrayInfo, access: Any, brief: Labels | None = None
    ) -> None:
        self._read, self.handle, self.info, self.access, self.brief = read, handle, info, access, brief

    @cached_property
    def full(self) -> Labels:
        """All labels."""
        return self._read(self.handle, self.info, self.access, None)

    @property
    def is_read(self) -> bool:
        """True if `full` was read."""
        return "full" in vars(self)

    def read_by(self, labeller: Any) -> None:
        """Have `full` read now, unless it was."""
        if not self.is_read:
            vars(self)["full"] = self._read(self.handle, self.info, self.access, labeller)

    def read_again(self) -> None:
        """Forget `full`, because the file has changed: it is read again when it is next needed."""
        vars(self).pop("full", None)


def names_in(text: Any) -> list[str]:
    """The names in a ``coordinates`` attribute: ``"lat lon"``.

    >>> names_in("lat  lon"), names_in(None)
    (['lat', 'lon'], [])
    """
    return text.split() if isinstance(text, str) else []


_MOST_ELEMENTS, _WIDEST = 2**63 - 1, 16  # bytes of complex128
MOST_AXES = 64  # NumPy's


_KINDS = {
    "f": "extended precision floats, which JAX does not have",
    "c": "extended precision complex numbers, which JAX does not have",
    "S": "strings",
    "U": "strings",
    "T": "variable-length strings",
    "O": "Python objects",
    "M": "dates",
    "m": "time spans",
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
    """True for a type that another package has added to NumPy: bfloat16 and smaller floats. Some have the kind of a NumPy type.

    >>> is_added(np.dtype("float16"))
    False
    """
    return dtype.isbuiltin == 2


def dtype_text(dtype: np.dtype[Any]) -> str:
    """A type as text that `np.dtype` takes. The text of an added type is its name, without a byte order.

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
    if len(shape) > MOST_AXES:
        return f"an array of {len(shape)} axes; NumPy has {MOST_AXES} at most"
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


def cast_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Numbers in another type; None if that type cannot hold them. Floating point numbers are rounded.

    >>> cast_value(1e20, np.dtype("f4")), cast_value(300, np.dtype("u1")), cast_value(1e300, np.dtype("f4"))
    (np.float32(1e+20), None, None)
    """
    try:
        before = np.asarray(value)
        with np.errstate(all="ignore"), warnings_caught(action="ignore"):
            after = before.astype(native_dtype(dtype))
        is_rounded = dtype.kind in "fc" and not (before.dtype.kind == "c" and dtype.kind == "f")
        same = np.isfinite(after) == np.isfinite(before) if is_rounded else (after == before)
    except (TypeError, ValueError, OverflowError):  # text, or an integer that is too large for any type
        return None
    return after[()] if np.all(same) else None


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


# The names in `ArrayInfo.attributes`: all attributes that a load reads.
TOLD = (*ATTRIBUTES, "units", "calendar")


_MOST_SHOWN = 1024  # values, or characters, of an attribute that people are shown
MOST_KEPT = 1 << 16  # the same of one that the caller gets


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
        nothing, because HDF5 goes through the index of all chunks for it.
    shards : tuple of int or None
        Zarr: elements per shard file, a multiple of `chunks`.
    refused : str or None
        Why the array cannot be loaded (``"variable-length strings"``); None if it can.
    is_coordinate : bool
        True for a coordinate of other arrays (an HDF5/netCDF dimension scale).
    is_dimension : bool
        True for one without values, which stands for an axis only (a netCDF dimension without a variable).
    attributes : mapping
        The attributes that are needed to decode values, with units and calendar (`TOLD`), for people.
    packing : mapping
        The attributes by which stored numbers become values, each with its type (`shardload.values.decoding`); applied with
        ``decode=True``.
    parts : mapping or None
        What ranks that read must know, as plain JSON, so that each of them need not look: if the values are in many other
        files, of these (HDF5: `tiles.tell_parts`; ``"versions"`` has an item for each); if the file is at a URL, its metadata.
        The format that wrote it understands it.
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
        """In JSON's types, without the labels."""
        return {**vars(self), "attributes": dict(self.attributes), "packing": dict(self.packing), "labels": None}

    @classmethod
    def from_dict(cls, metadata: dict[str, Any]) -> ArrayInfo:
        """The inverse of `to_dict`, also after JSON made lists of its tuples."""
        sizes = {name: None if metadata[name] is None else tuple(metadata[name]) for name in ("shape", "chunks", "shards")}
        return cls(**metadata | sizes)

    @property
    def _full_labels(self) -> Labels:
        """The labels, read now if they are read on demand."""
        if self.labels is None:
            return Labels((None,) * len(self.shape), self.attributes)
        return self.labels.full if isinstance(self.labels, OnDemand) else self.labels

    @property
    def dims(self) -> tuple[str | None, ...]:
        """The name of each axis; None for an axis without one, or if names were not asked for."""
        return self._full_labels.dims

    @property
    def n_parts(self) -> int:
        """How many parts it has, if its values are in many other files and `parts` says so; else 0."""
        return 0 if self.parts is None else len(self.parts.get("versions", ()))

    @property
    def is_in_store(self) -> bool:
        """True if its values come from a store, where each read takes long: its path is a URL, or parts of it are at URLs."""
        return is_remote(self.path) or bool(self.parts and self.parts.get("in_store"))

    @property
    def attrs(self) -> Mapping[str, Any]:
        """All attributes, as plain Python; only those of `attributes` if no more were asked for."""
        return self._full_labels.attrs

    @property
    def coords(self) -> Mapping[str, Coordinate]:
        """The coordinates by name, with their values if they are small; none if they were not asked for."""
        return self._full_labels.coords

    @property
    def group_attrs(self) -> Mapping[str, Any]:
        """The attributes of the group that the array is in (of the file, for the root); none if they were not asked for."""
        return self._full_labels.of_group

    def __str__(self) -> str:
        """As messages name it: ``'/density' in 'data.h5'``."""
        return f"'{printable(self.dataset)}' in '{printable(self.path)}'"


@dataclass(frozen=True)
class Properties:
    """What must be known of an array, besides `ArrayInfo`, to make another one like it.

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
        How chunks are compressed: the keywords of `sink.Compression`. Or why no new array can be compressed in this way, in
        words that follow the array's name.
    checksum : bool
        Whether chunks have a checksum of the format's own.
    fill_value : object
        Value of elements that are not stored; None if the format's default.
    unlimited : tuple of int
        Axes that may grow.
    coordinates : tuple of str
        Full names of the arrays that are its coordinates.
    unread : tuple of str
        Which attributes could not be read, in words.
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
    unread: tuple[str, ...] = ()
    stored_name: str | None = None
    texts: np.ndarray[Any, Any] | None = None
    scales: tuple[tuple[str, ...], ...] = ()
    axis_labels: tuple[str, ...] = ()
    scale_name: str | None = None

    @classmethod
    def of(cls, labels: Labels, dtype: np.dtype[Any], attrs: Mapping[str, Any], **fields: Any) -> Properties:
        """Make them with the names of axes and coordinates that `labels` has."""
        coordinates = tuple(coordinate.dataset for coordinate in labels.coords.values())
        return cls(dtype, labels.dims, attrs, coordinates=coordinates, **fields)


MOST_NAMED = 8


def some(texts: Sequence[str], more: str = "") -> str:
    """The first few texts, and how many more there are; `more` stands in the place of that number.

    >>> some([str(n) for n in range(10)])
    '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    n_left = len(texts) - MOST_NAMED
    return ", ".join(texts[:MOST_NAMED]) + (f" and {more or n_left} more" if n_left > 0 else "")


NOTHING = "nothing"  # as a type: there are no values


def nbytes_of(info: ArrayInfo, shape: tuple[int, ...] | None = None) -> int:
    """Bytes of the whole array, or of a region of the given shape."""
    n = math.prod(info.shape if shape is None else shape)
    try:
        return n * np.dtype(info.dtype).itemsize
    except (TypeError, ValueError):  # a name of ml_dtypes that nobody registered with NumPy, or of a type that it lacks
        return n


def json_value(value: Any, most: int = _MOST_SHOWN) -> Any:
    """An attribute's value as plain Python: bytes become text, NumPy scalars numbers, arrays lists.

    An object of JSON becomes a dict, other values (references, records) their text. An array of one element becomes that
    element, because netCDF stores scalars so. A value longer than `most`, or a list or dict with such a part, becomes a `Note`
    with its length: attributes are sent to every rank and shown to people.

    >>> json_value(np.array([1.5], dtype=">f4")), json_value(b"K"), json_value(np.int16(3)), json_value([0] * 5000)
    (1.5, 'K', 3, '5000 values, not shown')
    """
    n = value.size if isinstance(value, np.ndarray) else len(value) if isinstance(value, list | tuple | Mapping) else 0
    if n > most:
        return Note(f"{n} values, not shown")
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value.tolist()
    if isinstance(value, bytes):
        value = value[: 4 * most + 1].decode("utf-8", errors="replace")
    if isinstance(value, list | tuple):
        values = [json_value(part, most) for part in value]
        return Note(f"{n} values, too long, not shown") if any(isinstance(part, Note) for part in values) else values
    if isinstance(value, Mapping):
        by_key = {str(key): json_value(part, most) for key, part in value.items()}
        return Note(f"{n} values, too long, not shown") if any(isinstance(part, Note) for part in by_key.values()) else by_key
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= most else Note(f"{text[:_MOST_SHOWN]}... (not all shown)")
