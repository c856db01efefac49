"""What does the metadata of a new Zarr array say? The same as zarr-python's would."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.codecs.table import ZARR_CODECS, has_own_shuffle
from shardload.formats.contract.dtypes import dtype_text, is_added
from shardload.formats.sink import ArraySpec, Compression
from shardload.formats.zarr.metadata import INDEX_CODECS, Json, options_of

_NAMES = {3: ("gzip", "zstd", "blosc"), 2: ("gzip", "zstd", "blosc", "lz4")}


def document_of(name: str, spec: ArraySpec, version: int) -> Json:
    """The metadata of an array with a checked spec. ConfigError if this version of the format cannot say it."""
    chunks = spec.chunks or tuple(max(1, n) for n in spec.shape)
    return (_document_2 if version == 2 else _document_3)(name, spec, chunks)


def fill_of(spec: ArraySpec) -> Any:
    """The value of elements that are not stored."""
    return np.zeros((), spec.dtype)[()] if spec.fill_value is None else spec.fill_value


def _document_3(name: str, spec: ArraySpec, chunks: tuple[int, ...]) -> Json:
    codecs: list[Json] = [{"name": "bytes"}]
    if spec.dtype.itemsize > 1:
        is_little = spec.dtype.newbyteorder("<") == spec.dtype
        codecs[0]["configuration"] = {"endian": "little" if is_little else "big"}
    if spec.compression is not None:
        if spec.compression.shuffle and not has_own_shuffle(spec.compression.name):
            raise ConfigError(
                f"compression of '{name}' is {spec.compression.name!r} after a shuffle, which Zarr format 3 does not have. "
                "Pass compression='blosc', which shuffles, or leave the shuffle out"
            )
        options = _compressor(name, spec.compression, spec.dtype.itemsize, 3)
        codecs.append({"name": spec.compression.name, "configuration": options})
    if spec.checksum:
        codecs.append({"name": "crc32c"})
    if spec.shards is not None:
        options = {"chunk_shape": list(chunks), "codecs": codecs, "index_codecs": INDEX_CODECS, "index_location": "end"}
        codecs = [{"name": "sharding_indexed", "configuration": options}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": spec.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(spec.shards or chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill(fill_of(spec)),
        "codecs": codecs,
        "attributes": plain_attrs(name, spec.attrs),
        "dimension_names": list(spec.dims or ()),
    }


def _document_2(name: str, spec: ArraySpec, chunks: tuple[int, ...]) -> Json:
    if spec.shards is not None:
        raise ConfigError(
            f"'{name}' has shards, which Zarr format 2 does not have. Leave shards= out, or save as Zarr format 3"
        )
    if spec.checksum:
        raise ConfigError(
            f"'{name}' has checksums, which Zarr format 2 does not have. Pass compression='zstd', which has none, or save "
            "as Zarr format 3"
        )
    if is_added(spec.dtype) and not spec.dtype.isnative:
        raise ConfigError(f"'{name}' is to be big-endian {spec.dtype.name}, which Zarr 2 cannot say")
    asked, itemsize = spec.compression, spec.dtype.itemsize
    is_shuffled = asked is not None and asked.shuffle and not has_own_shuffle(asked.name) and itemsize > 1
    compressor: Json | None = None
    if asked is not None and asked.name != "none":
        compressor = {"id": asked.name, **_compressor(name, asked, itemsize, 2)}
    return {
        "zarr_format": 2,
        "shape": list(spec.shape),
        "chunks": list(chunks),
        "dtype": dtype_text(spec.dtype),
        "fill_value": None if spec.fill_value is None else _fill(spec.fill_value),
        "order": "C",
        "filters": [{"id": "shuffle", "elementsize": itemsize}] if is_shuffled else None,
        "dimension_separator": ".",
        "compressor": compressor,
        "attributes": plain_attrs(name, spec.attrs) | {"_ARRAY_DIMENSIONS": list(spec.dims or ())},
    }


def _compressor(name: str, asked: Compression, itemsize: int, version: int) -> Json:
    """The options of a compressor in the metadata."""
    names = _NAMES[version]
    codec = ZARR_CODECS[asked.name] if asked.name in names else None
    if codec is None or (asked.level is not None and not codec.levels):
        fix = "compression='zstd', or another of these"
        if asked.name == "lz4":
            fix = "compression='lz4'" if "lz4" in names else "compression='blosc(lz4)', which has it inside"
        level = f" with level {asked.level}" if asked.name in names else ""
        raise ConfigError(f"compression of '{name}' is {asked.name!r}{level}; Zarr has {', '.join(names)}. Pass {fix}")
    return options_of(codec, codec.parameters(name, asked, itemsize, "Zarr", -7 if asked.name == "zstd" else None), version)


def _fill(value: Any) -> Any:
    """A fill value as JSON."""
    if isinstance(value, np.complexfloating):
        return [_fill(value.real), _fill(value.imag)]
    found = value.item()
    if isinstance(found, float) and not math.isfinite(found):
        return "NaN" if math.isnan(found) else "Infinity" if found > 0 else "-Infinity"
    return found


def group_document(version: int, attrs: Mapping[str, Any]) -> Json:
    """The metadata of a group."""
    return {"zarr_format": version, **({"node_type": "group"} if version == 3 else {}), "attributes": dict(attrs)}


def files_of(folder: str, document: Json) -> dict[str, Json]:
    """The files of metadata that say what a document of an array or group says, by their keys, in the order to write them."""
    if document["zarr_format"] == 3:
        return {os.path.join(folder, "zarr.json"): document}
    others = {key: value for key, value in document.items() if key != "attributes"}
    own = ".zarray" if "shape" in document else ".zgroup"
    return {os.path.join(folder, ".zattrs"): document["attributes"], os.path.join(folder, own): others}


def plain_attrs(name: str, attrs: Mapping[str, Any]) -> Json:
    """Attributes as JSON can hold them. ConfigError for others."""
    return {key: _plain(name, key, value) for key, value in attrs.items()}


def _plain(name: str, key: str, value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "mM":  # a date that is none would become null
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, key, one) for one in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(name, key, one) for k, one in value.items()}
    is_plain = value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    if not is_plain:
        text = repr(value)
        raise ConfigError(
            f"the attribute {key!r} of '{name}' is {text if len(text) < 80 else text[:80]}, which Zarr's JSON cannot hold. "
            "Pass text, finite numbers, or lists of them"
        )
    return value
