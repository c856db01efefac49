"""What is known of an array before any of its values is read?

`ArrayInfo` is what a load needs, `Properties` what another array like it needs besides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.errors import printable
from shardload.formats.labels import Coordinate, Labels, Note, OnDemand
from shardload.values.decoding import TEXTS, VALID_RANGE, Packing

# `ArrayInfo.attributes`
TOLD = ("scale_factor", "add_offset", "_FillValue", "missing_value", *TEXTS, *VALID_RANGE, "units", "calendar")


_MOST_SHOWN = 1024  # values or characters of an attribute to show


MOST_KEPT = 1 << 16  # ... to give to the caller


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
    def from_dict(cls, found: dict[str, Any]) -> ArrayInfo:
        """The inverse of `to_dict`, also after JSON made lists of its tuples."""
        sizes = {name: None if found[name] is None else tuple(found[name]) for name in ("shape", "chunks", "shards")}
        return cls(**found | sizes)

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> ArrayInfo:
        """The inverse of `to_json`."""
        return cls.from_dict(json.loads(text))

    @property
    def _known_labels(self) -> Labels:
        """The labels, read now if they are read on demand."""
        if self.labels is None:
            return Labels((None,) * len(self.shape), self.attributes)
        return self.labels.found if isinstance(self.labels, OnDemand) else self.labels

    @property
    def dims(self) -> tuple[str | None, ...]:
        """The name of each axis; None for an axis without one, or if names were not asked for."""
        return self._known_labels.dims

    @property
    def n_parts(self) -> int:
        """How many parts it has, if its values are in many other files and `parts` says so; else 0."""
        return 0 if self.parts is None else len(self.parts.get("versions", ()))

    @property
    def attrs(self) -> Mapping[str, Any]:
        """All attributes, as plain Python; only those of `attributes` if no more were asked for."""
        return self._known_labels.attrs

    @property
    def coords(self) -> Mapping[str, Coordinate]:
        """The coordinates by name, with their values if they are small; none if they were not asked for."""
        return self._known_labels.coords

    @property
    def group_attrs(self) -> Mapping[str, Any]:
        """The attributes of the group that the array is in (of the file, for the root); none if they were not asked for."""
        return self._known_labels.of_group

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
    def of(cls, labels: Labels, dtype: np.dtype[Any], attrs: Mapping[str, Any], **more: Any) -> Properties:
        """With names of axes and coordinates as an array's labels say them."""
        return cls(dtype, labels.dims, attrs, coordinates=tuple(one.dataset for one in labels.coords.values()), **more)


MOST_NAMED = 8


def some(texts: Sequence[str], more: str = "") -> str:
    """The first few texts, and how many more there are. `more` replaces that number.

    >>> some([str(n) for n in range(10)])
    '0, 1, 2, 3, 4, 5, 6, 7 and 2 more'
    """
    rest = len(texts) - MOST_NAMED
    return ", ".join(texts[:MOST_NAMED]) + (f" and {more or rest} more" if rest > 0 else "")


GROUP = "group"
NOTHING = "nothing"  # in the place of a type: there are no values


def group_info(path: str, name: str, format_name: str, attributes: Sequence[str], how: str) -> ArrayInfo:
    """What stands for a group without arrays among the arrays that the caller could mean. `how` reads its attributes.

    >>> group_info("a.h5", "/Header", "HDF5", ["Time"], "f['/Header'].attrs").refused
    "a group without arrays. It has attributes ('Time'), which f['/Header'].attrs reads"
    """
    names = some([f"'{printable(key)}'" for key in attributes])
    told = f". It has attributes ({names}), which {how} reads" if attributes else ""
    return ArrayInfo(path, name, format_name, (), GROUP, refused=f"a group without arrays{told}")


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
