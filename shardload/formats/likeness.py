"""Which spec makes an array of a new file like one of another file, maybe of another format?

The layout and the compression are those of the source (`Properties`), unless others are asked for. Attributes keep their
types where the format has them. What marks missing data is said as the format says it, so that xarray and others read the same
values.

What a format cannot hold and nobody would miss (an attribute that is NaN, in JSON) is left out, with a note. For
everything else the sink raises an error.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.contract.array import ArrayInfo, Properties, cast_value, names_in, native_dtype
from shardload.formats.netcdf import refused_attribute
from shardload.formats.sink import ArraySpec, Compression, groups_above
from shardload.planning.selection import Selection
from shardload.values.decoding import OF_STORED

KEEP = "keep"
"""As a value of `Overrides`: as in the source."""

# Attributes whose words are names of other variables, in CF. A word with a colon behind it says what the next ones are.
NAMING = (
    *("coordinates", "bounds", "climatology", "grid_mapping", "ancillary_variables", "cell_measures", "formula_terms"),
    *("geometry", "node_coordinates", "node_count", "part_node_count", "interior_ring"),
)

_IN_BLOSC = {"gzip": "zlib", "zstd": "zstd", "lz4": "lz4"}  # compressors that Blosc has inside, by Blosc's names for them


@dataclass(frozen=True)
class Overrides:
    """What the new array has in place of what the source has.

    Attributes
    ----------
    dtype : dtype or None
        Type of the new array; None as in the source, also its byte order.
    chunks, shards : tuple of int, None or ``"keep"``
        None for a contiguous array, or without shards. With other chunks, shards are those that are asked for, or none.
    compression : object
        What `Compression.of` takes, or ``"keep"``. Chunks that are compressed in another way have no checksums.
    unlimited : tuple of int
        Axes of the new array that can grow, beside those of the source. Zarr arrays can grow along each.
    """

    dtype: np.dtype[Any] | None = None
    chunks: tuple[int, ...] | str | None = KEEP
    shards: tuple[int, ...] | str | None = KEEP
    compression: Any = KEEP
    unlimited: tuple[int, ...] = ()


def spec_like(
    info: ArrayInfo, properties: Properties, selection: Selection, kind: str, overrides: Overrides
) -> tuple[ArraySpec, list[str]]:
    """The spec of an array of format `kind` (`saving.FORMATS`) that is like one of another file; and what was left out.

    Raises
    ------
    ConfigError
        If a value that marks missing data is none of the type that is asked for, or no array can be compressed like this one.
    """
    axes, notes, attrs = selection.kept, list(properties.unread), dict(properties.attrs)
    layout: dict[str, Any] = {}
    fill = None
    if properties.texts is not None:
        if kind != "hdf5" and attrs.pop("_FillValue", None) is not None:
            notes.append(f"attribute '_FillValue' of {info} (which is text)")
        encoding = as_text(attrs.get("_Encoding"))
        texts, n_axes = _texts_like(info, properties.texts, selection, kind, encoding if isinstance(encoding, str) else "utf-8")
        if texts.dtype == object:  # the attribute says what bytes mean; xarray opens no text that has it
            attrs.pop("_Encoding", None)
        if n_axes < len(axes):
            notes.append(f"the axis {properties.dims[axes[-1]]!r} of {info} (of the characters of each text)")
        axes, shape, dtype = axes[:n_axes], texts.shape, texts.dtype
        layout["texts"] = texts
        attrs, _, lost_attrs = attrs_for(kind, str(info), attrs)
    else:
        shape, dtype = selection.shape, properties.dtype if overrides.dtype is None else overrides.dtype
        if overrides.dtype is not None:
            attrs = {key: _attr_cast(info, key, value, properties.dtype, dtype) for key, value in attrs.items()}
        if kind == "netcdf4" and dtype.kind == "b":  # which has no booleans: xarray writes them so, and reads them again
            if attrs.pop("_FillValue", None) is not None:  # xarray would take what is missing for True
                notes.append(f"attribute '_FillValue' of {info} (one of two values, which cannot mark missing ones)")
            dtype, attrs = np.dtype("i1"), {**attrs, "dtype": "bool"}
        attrs, fill, lost_attrs = attrs_for(kind, str(info), attrs, dtype, properties.fill_value)
        if overrides.dtype is not None and fill is not None:
            fill = cast_value(fill, dtype)  # without one: all chunks are written, so that it only pads
        layout |= _layout_like(info, properties, axes, kind, overrides)
    growing_axes = {n for n, k in enumerate(axes) if k in properties.unlimited} | set(overrides.unlimited)
    can_grow = kind != "zarr" and (properties.texts is not None or layout["chunks"] or overrides.unlimited)
    if kind == "hdf5":  # the only one that says of axes more than names
        layout["scales"] = tuple(properties.scales[k] for k in axes) if properties.scales else ()
        layout["axis_labels"] = tuple(properties.axis_labels[k] for k in axes) if properties.axis_labels else ()
        is_scale = 0 in axes or not info.shape  # of its first axis: the single number that a selection leaves of it is none
        layout["scale_name"] = properties.scale_name if is_scale else None
    spec = ArraySpec(
        shape=shape,
        dtype=dtype,
        dims=tuple(properties.dims[k] for k in axes),
        attrs=attrs,
        fill_value=fill,
        unlimited=tuple(sorted(growing_axes)) if can_grow else (),
        **layout,
    )
    return spec, [f"{text} was left out" for text in (*notes, *lost_attrs)]


def _layout_like(
    info: ArrayInfo, properties: Properties, axes: Sequence[int], kind: str, overrides: Overrides
) -> dict[str, Any]:
    """Chunks, shards, compression and checksums, for `ArraySpec`."""
    chunks: Any = overrides.chunks
    shards: Any = overrides.shards
    if isinstance(shards, str):
        shards = info.shards if isinstance(chunks, str) and kind == "zarr" and info.shards is not None else None
        shards = None if shards is None else tuple(shards[k] for k in axes)
    if isinstance(chunks, str):
        chunks = None if info.chunks is None else tuple(info.chunks[k] for k in axes)
    if not (isinstance(overrides.compression, str) and overrides.compression == KEEP):
        return {"chunks": chunks, "shards": shards, "compression": Compression.of(overrides.compression)}
    if chunks is None:  # if chunks are given up, so is what is done to them
        return {"chunks": None, "shards": shards}
    if isinstance(properties.compression, str):
        raise ConfigError(f"{info} {properties.compression}. Pass compression='gzip', or compression=None")
    compression = Compression.of(properties.compression)
    if kind == "zarr" and compression is not None and compression.shuffle:
        compression = _shuffled_by_blosc(compression)
    return {"chunks": chunks, "shards": shards, "compression": compression, "checksum": properties.checksum}


def _shuffled_by_blosc(compression: Compression) -> Compression:
    """A compressor after a shuffle, for Zarr format 3, where only Blosc shuffles: the same one inside Blosc, if it has it."""
    if compression.name not in _IN_BLOSC:
        return compression
    level = compression.level
    if compression.name == "zstd" and level is not None:
        level = min(max((level + 1) // 2, 1), 9)  # Blosc's level k is level 2 k - 1 of Zstandard
    return Compression("blosc", level, shuffle=True, options={"cname": _IN_BLOSC[compression.name]})


def _texts_like(
    info: ArrayInfo, texts: np.ndarray[Any, Any], selection: Selection, kind: str, encoding: str
) -> tuple[np.ndarray[Any, Any], int]:
    """The selected values of an array of text as a format holds them, and how many of its axes they have. `encoding` is what
    the attribute of xarray's says of bytes.
    """
    index: Any = (*selection.region.slices(), ...)
    values = np.asarray(texts)[index].reshape(selection.shape)
    n_axes, is_char = values.ndim, values.dtype == np.dtype("S1")
    if kind == "zarr" and is_char and info.format == "netCDF4" and values.ndim and values.shape[-1]:
        # netCDF has text as characters along an axis of their own, which readers join.
        values, n_axes = np.ascontiguousarray(values).view(f"S{values.shape[-1]}")[..., 0], n_axes - 1
    if kind == "zarr" or (kind == "netcdf4" and not is_char):  # text of any length, which both have
        try:
            decoded = [text.decode(encoding) if isinstance(text, bytes) else str(text) for text in values.reshape(-1).tolist()]
        except (UnicodeDecodeError, LookupError) as error:
            raise ConfigError(f"bytes that are no text ({error})") from None
        values = np.array([*decoded, None], dtype=object)[:-1].reshape(values.shape)
    return values, n_axes


def _attr_cast(info: ArrayInfo, key: str, value: Any, before: np.dtype[Any], dtype: np.dtype[Any]) -> Any:
    """An attribute. One that has the type of the values gets their new type."""
    is_number = isinstance(value, np.ndarray | np.generic) and native_dtype(value.dtype) == native_dtype(before)
    if key not in OF_STORED or not is_number:
        return value
    cast = cast_value(value, dtype)
    if cast is None:
        raise ConfigError(
            f"the attribute {key!r} of {info} is {value}, which {dtype} cannot hold. Pass a dtype that can, or leave dtype= out"
        )
    return cast


def attrs_for(
    kind: str, name: str, attrs: Mapping[str, Any], dtype: np.dtype[Any] | None = None, fill: Any = None
) -> tuple[dict[str, Any], Any, list[str]]:
    """Attributes as a format holds them, the fill value, and which attributes it cannot hold, in words.

    Parameters
    ----------
    kind : str
        One of `saving.FORMATS`.
    name : str
        Name of the array or group, for notes.
    attrs : mapping
        Attributes, with ``_FillValue`` for the value that marks missing data.
    dtype : dtype, optional
        Type of the array; None for a group.
    fill : object
        Value of elements that are not stored.

    Examples
    --------
    >>> f4 = np.dtype("f4")
    >>> attrs_for("netcdf4", "x", {"_FillValue": np.float32(-9), "units": "K"}, f4)
    ({'units': 'K'}, np.float32(-9.0), [])
    >>> attrs_for("zarr", "x", {"_FillValue": np.float32(-9)}, f4, 0.0)
    ({'_FillValue': 'AAAAAAAAIsA='}, 0.0, [])
    """
    converted, notes, marker = {}, list[str](), None
    if dtype is not None:
        try:
            attrs, marker = marked(kind, name, attrs, dtype)
        except ConfigError:  # NaN, which NCO leaves where it packs
            notes.append(f"attribute '_FillValue' of {name} ({attrs['_FillValue']}, which no {dtype.name} is)")
            attrs = {key: value for key, value in attrs.items() if key != "_FillValue"}
    for key, value in attrs.items():
        if isinstance(value, np.ndarray) and value.shape == (1,) and kind == "zarr":  # netCDF stores a number so
            value = value[0]
        try:
            converted[key] = as_json(value) if kind == "zarr" else _typed(key, value, is_netcdf=kind == "netcdf4")
        except (TypeError, ValueError) as error:
            notes.append(f"attribute {key!r} of {name} ({error})")
    if dtype is not None and kind == "netcdf4":  # its fill value marks missing data
        fill = marker
    return converted, fill, notes


def marked(kind: str, name: str, attrs: Mapping[str, Any], dtype: np.dtype[Any]) -> tuple[dict[str, Any], Any]:
    """The attributes and the fill value by which a format marks missing data, for a ``_FillValue`` among `attrs`.

    ``_FillValue`` gets the array's type, as CF asks for; numbers without a type of their own are rounded to it. In plain HDF5
    it is an attribute like others, and stays unchanged if the array's type cannot hold it. None marks nothing, as in xarray.

    Raises
    ------
    ConfigError
        If the array's type cannot hold it, in another format.

    Examples
    --------
    >>> marked("netcdf4", "/x", {"_FillValue": 1e20, "units": "K"}, np.dtype("f4"))
    ({'units': 'K'}, np.float32(1e+20))
    """
    other_attrs = dict(attrs)
    value = other_attrs.pop("_FillValue", None)
    if value is None:
        return other_attrs, None
    if kind == "zarr" and dtype.kind == "f" and float_of_base64(value) is not value:
        return other_attrs | {"_FillValue": value}, None
    marker = cast_value(value, dtype) if np.size(value) == 1 else None
    if marker is None and kind != "hdf5":
        raise ConfigError(f"the fill value of {name!r} is {value!r}; expected one value of type {dtype}")
    marker = value if marker is None else marker
    if kind == "netcdf4":
        return other_attrs, marker
    return other_attrs | {"_FillValue": _as_xarray(marker) if kind == "zarr" else marker}, None


def _as_xarray(value: Any) -> Any:
    """``_FillValue`` in Zarr format 3, as xarray writes it."""
    number = np.asarray(value)
    if number.dtype.kind == "c":
        return [_base64(number.real), _base64(number.imag)]
    return _base64(number) if number.dtype.kind == "f" else number.item()


def _base64(value: Any) -> str:
    return base64.b64encode(struct.pack("<d", float(value))).decode()


def float_of_base64(value: Any) -> Any:
    """A float that xarray wrote as base64 of a float64's bytes (JSON has no NaN). Any other value is returned unchanged."""
    try:
        (number,) = struct.unpack("<d", base64.b64decode(value, validate=True))
    except (TypeError, ValueError, struct.error):
        return value
    return math.nan if math.isnan(number) else number


def as_text(value: Any) -> Any:
    """An attribute, with bytes as text: some libraries write text as bytes."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "S" and value.size == 1:
        value = value.reshape(-1)[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def same_value(value: Any, other_value: Any) -> bool:
    """True if two attributes have the same value and type. NaN is equal to itself.

    >>> same_value(np.float32("nan"), np.float32("nan")), same_value(1.0, 1), same_value("K", np.bytes_("K"))
    (True, False, True)
    """
    first, second = np.asarray(as_text(value)), np.asarray(as_text(other_value))
    if first.dtype.kind in "OSU" or second.dtype.kind in "OSU":
        return bool(first.tolist() == second.tolist())
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def bounds_of(name: str, attrs: Mapping[str, Any]) -> list[str]:
    """The full names of the arrays that CF calls the bounds of a coordinate. They are in its group."""
    above, texts = name.rpartition("/")[0], (attrs.get(key) for key in ("bounds", "climatology"))
    return [f"{above}/{word}" for text in texts for word in names_in(as_text(text))]


def named_beside(dataset: str, attrs: Mapping[str, Any]) -> list[list[str]]:
    """The full names that a variable may have which attributes name: it is in the array's group, or in the nearest one above.

    >>> named_beside("/a/x", {"bounds": np.bytes_(b"x_bnds"), "cell_measures": "area: cell_area volume: /g/cell_volume"})
    [['/a/x_bnds', '/x_bnds'], ['/a/cell_area', '/cell_area'], ['/g/cell_volume']]
    """
    texts = [as_text(attrs[key]) for key in NAMING if key in attrs and not is_empty_text(attrs[key])]
    names = [word for text in texts if isinstance(text, str) for word in text.split() if not word.endswith(":")]
    groups = [*groups_above(dataset), ""]
    return [[name] if name.startswith("/") else [f"{group}/{name}" for group in groups] for name in names]


def as_json(value: Any) -> Any:
    """An attribute as Zarr's JSON has it. ValueError, with words that follow "is", if JSON does not have it.

    >>> as_json({"history": b"made", "box": np.eye(2, dtype="i4")})
    {'history': 'made', 'box': [[1, 0], [0, 1]]}
    """
    if is_empty_text(value):
        return ""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "mM":  # NaT, a date, would become null
        value = value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8")  # UnicodeDecodeError is a ValueError
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): as_json(part) for key, part in value.items()}
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"{repr(value)[:80]}, which Zarr's JSON cannot hold")


def is_empty_text(value: Any) -> bool:
    """True for `h5py.Empty`, which has no shape: h5py reads an empty text attribute of netCDF as that."""
    return getattr(value, "shape", ()) is None and value.dtype.kind in "SOU"


def _typed(key: str, value: Any, *, is_netcdf: bool) -> Any:
    """An attribute as HDF5, or netCDF4, has it. TypeError or ValueError if they cannot hold it.

    >>> [_typed("x", value, is_netcdf=False) for value in (["a", "b"], 1.5, [[1, 2]])]
    [['a', 'b'], 1.5, array([[1, 2]])]
    """
    if value is None or isinstance(value, Mapping):
        raise TypeError("a null or an object of JSON, which HDF5 does not have")
    if isinstance(value, int | list | tuple):
        try:
            array = np.array(value)
            leaves = np.array(value, dtype=object).reshape(-1).tolist()
        except (ValueError, OverflowError):
            raise TypeError("a list of JSON whose rows have different lengths") from None
        same = len(leaves) == array.size
        same = same and all(a == b or b != b for a, b in zip(array.reshape(-1).tolist(), leaves, strict=True))
        if array.dtype.kind not in "biufU" or not same:
            raise TypeError("a list of JSON that is no array of numbers or texts, or a number that HDF5 does not hold exactly")
        if array.dtype.kind == "U":
            value = array.astype(object) if array.ndim > 1 else value
        elif not isinstance(value, int):
            value = array
    reason = refused_attribute(key, value, is_netcdf=is_netcdf)
    if reason is not None:
        raise ValueError(reason)
    return value
