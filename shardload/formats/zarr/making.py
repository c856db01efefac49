"""What must be known of a Zarr array to make another one like it? Its codecs with their options, and its attributes."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardload.formats.codecs.table import ZARR_CODECS, compression_told
from shardload.formats.contract.array import Properties
from shardload.formats.contract.dtypes import is_added, native_dtype, refusal
from shardload.formats.labels import Labels
from shardload.formats.zarr.codecs import parameters_of
from shardload.formats.zarr.metadata import inner_chain, names_of
from shardload.formats.zarr.nodes import ArrayNode

_MOST_TEXT_NBYTES = 1 << 20  # of the values of an array of text
_OF_TEXT = {"bytes", "vlen-utf8", *(name for name, codec in ZARR_CODECS.items() if codec.decoder is not None)}
_NOT_COPIED = ("bytes", "transpose", "sharding_indexed")  # how values lie, not how they are compressed


def properties_of(node: ArrayNode, array: Any, labels: Labels) -> Properties:
    """The properties of an open array."""
    attrs, dtype = {key: value for key, value in node.attributes.items() if key != "_ARRAY_DIMENSIONS"}, node.dtype
    if refusal(dtype) is not None or is_added(dtype):
        return Properties.of(labels, dtype, attrs, texts=_texts(node, array))
    if "_FillValue" in attrs:
        attrs["_FillValue"] = _marker(attrs["_FillValue"], native_dtype(dtype))
    if node.marker is not None:
        attrs["_FillValue"] = np.asarray(node.marker, native_dtype(dtype))[()]
    chain = inner_chain(node.document)
    is_big = any(name == "bytes" and options.get("endian") == "big" for name, options in chain)
    stored = dtype if node.version == 2 else dtype.newbyteorder(">" if is_big else "<")
    chain = [(name.removeprefix("numcodecs."), options) for name, options in chain if name not in _NOT_COPIED]
    rest = [(name, options) for name, options in chain if name not in ("shuffle", "crc32c")]
    names = [name for name, _ in chain]
    others = [ZARR_CODECS[name].word if name in ZARR_CODECS else name for name, _ in rest]
    compression = compression_told(others, "shuffle" in names, lambda: _options(*rest[0], dtype.itemsize))
    return Properties.of(labels, stored, attrs, compression=compression, checksum="crc32c" in names, fill_value=node.fill)


def _texts(node: ArrayNode, array: Any) -> np.ndarray[Any, Any] | None:
    """The values of a short array of text; None for another one. Only codecs are used that make nothing but text."""
    names = set(names_of(node.document))
    is_text = node.dtype.kind in "SUT" or (node.dtype.kind == "O" and "vlen-utf8" in names)
    n = max(array.size, math.prod(array.chunks))
    if not is_text or not names <= _OF_TEXT or n * node.dtype.itemsize > _MOST_TEXT_NBYTES:
        return None
    array.store.most_nbytes = _MOST_TEXT_NBYTES
    found = np.asarray(array[...])
    return found if found.dtype.kind == "S" else found.astype(object)


def _marker(found: Any, dtype: np.dtype[Any]) -> Any:
    """``_FillValue`` as a scalar of the array's type."""

    def number(part: Any) -> Any:
        return float(float_of_base64(part)) if isinstance(part, str) else part  # also of "NaN"

    try:
        if dtype.kind == "c" and isinstance(found, list):
            return dtype.type(complex(*map(number, found)))
        return np.asarray(number(found), dtype)[()]
    except (TypeError, ValueError, OverflowError):
        return found


def float_of_base64(value: Any) -> Any:
    """A float that xarray wrote as base64 of a float64's bytes (JSON has no NaN). Any other value is returned unchanged."""
    try:
        (number,) = struct.unpack("<d", base64.b64decode(value, validate=True))
    except (TypeError, ValueError, struct.error):
        return value
    return math.nan if math.isnan(number) else number


def _options(name: str, options: Mapping[str, Any], itemsize: int) -> dict[str, Any]:
    """What a compressor was told, in the words of `sink.Compression`."""
    codec = ZARR_CODECS.get(name)
    return {} if codec is None or not codec.levels else codec.told(parameters_of(name, options, itemsize))
