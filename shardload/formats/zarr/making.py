"""What must be known of a Zarr array to make another one like it? Its codecs with their options, and its attributes."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import zarr

from shardload.formats.codecs.table import ZARR_CODECS
from shardload.formats.codecs.words import compression_told
from shardload.formats.contract.array import Properties
from shardload.formats.contract.dtypes import is_added, native_dtype, refusal
from shardload.formats.labels import Labels
from shardload.formats.zarr.codecs import parameters_of
from shardload.formats.zarr.metadata import codecs_of_2

__all__ = ["groups_of", "properties_of"]

_MOST_TEXT_NBYTES = 1 << 20  # of the values of an array of text
_OF_TEXT = {"bytes", "vlen-utf8", *(name for name, codec in ZARR_CODECS.items() if codec.decoder is not None)}
_NOT_COPIED = ("bytes", "transpose", "sharding_indexed")  # how values lie, not how they are compressed


def properties_of(array: Any, labels: Labels) -> Properties:
    """The properties of an open array."""
    metadata, attrs = array.metadata, dict(array.metadata.attributes)
    attrs.pop("_ARRAY_DIMENSIONS", None)
    dtype = array.dtype
    is_number = refusal(dtype) is None and not is_added(dtype)
    if is_number and "_FillValue" in attrs:
        attrs["_FillValue"] = _marker(attrs["_FillValue"], native_dtype(dtype))
    fill = metadata.fill_value if refusal(dtype) is None else None
    if metadata.zarr_format == 2 and is_number and fill is not None:  # in this format it marks missing data, too
        attrs["_FillValue"] = np.asarray(fill, native_dtype(dtype))[()]
    if not is_number:
        return Properties.of(labels, dtype, attrs, texts=_texts(array))
    if metadata.zarr_format == 2:
        compression, checksum = _compression(codecs_of_2(metadata.to_dict()), dtype.itemsize)
    else:
        chain = [_named(entry) for entry in metadata.to_dict()["codecs"]]
        inside = [options for name, options in chain if name == "sharding_indexed"]
        chain = [_named(entry) for entry in inside[0]["codecs"]] if inside else chain
        compression, checksum = _compression([one for one in chain if one[0] not in _NOT_COPIED], dtype.itemsize)
        dtype = dtype.newbyteorder(">" if _is_big(chain) else "<") if refusal(dtype) is None else dtype
    return Properties.of(labels, dtype, attrs, compression=compression, checksum=checksum, fill_value=fill)


def _texts(array: Any) -> np.ndarray[Any, Any] | None:
    """The values of a short array of text; None for another one. Only codecs are used that make nothing but text."""
    metadata = array.metadata.to_dict()
    if array.metadata.zarr_format == 2:
        names = [name for name, _ in codecs_of_2(metadata)]
    else:
        names = [name for name, _ in map(_named, metadata["codecs"])]
    is_text = array.dtype.kind in "SUT" or (array.dtype.kind == "O" and "vlen-utf8" in names)
    n = max(array.size, math.prod(array.chunks))
    if not is_text or not set(names) <= _OF_TEXT or n * array.dtype.itemsize > _MOST_TEXT_NBYTES:
        return None
    array.store.most_nbytes = _MOST_TEXT_NBYTES
    found = np.asarray(array[...])
    return found if found.dtype.kind == "S" else found.astype(object)


def groups_of(root: Any) -> dict[str, dict[str, Any]]:
    """The attributes of all groups of a store."""
    if not isinstance(root, zarr.Group):
        return {}
    found = {"/": dict(root.metadata.attributes)}
    for name, member in root.members(max_depth=None):
        if isinstance(member, zarr.Group):
            found[f"/{name}"] = dict(member.metadata.attributes)
    return found


def _marker(found: Any, dtype: np.dtype[Any]) -> Any:
    """``_FillValue`` as a scalar of the array's type; xarray writes a float as base64 of a float64's bytes."""

    def number(part: Any) -> Any:
        if not isinstance(part, str):
            return part
        try:
            return struct.unpack("<d", base64.b64decode(part, validate=True))[0]
        except (ValueError, struct.error):
            return float(part)  # "NaN"

    try:
        if dtype.kind == "c" and isinstance(found, list):
            return dtype.type(complex(*map(number, found)))
        return np.asarray(number(found), dtype)[()]
    except (TypeError, ValueError, OverflowError):
        return found


def _is_big(chain: list[tuple[str, Mapping[str, Any]]]) -> bool:
    return any(name == "bytes" and str(options.get("endian")).endswith("big") for name, options in chain)


def _named(entry: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(entry, str):
        return entry, {}
    return str(entry["name"]).removeprefix("numcodecs."), dict(entry.get("configuration") or {})


def _compression(chain: list[tuple[str, Any]], itemsize: int) -> tuple[dict[str, Any] | str | None, bool]:
    """The compression, as in `Properties`, and whether there is a checksum."""
    names = [name for name, _ in chain]
    rest = [(name, options) for name, options in chain if name not in ("shuffle", "crc32c")]
    others = [ZARR_CODECS[name].word if name in ZARR_CODECS else name for name, _ in rest]
    return compression_told(others, "shuffle" in names, lambda: _options(*rest[0], itemsize)), "crc32c" in names


def _options(name: str, options: Mapping[str, Any], itemsize: int) -> dict[str, Any]:
    """What a compressor was told, in the words of `sink.Compression`."""
    codec = ZARR_CODECS.get(name)
    return {} if codec is None or not codec.levels else codec.told(parameters_of(name, options, itemsize))
