"""What does the metadata of a new Zarr array say, and how are its chunks encoded? As in zarr-python."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.codecs.chains import EncodeChain, Step
from shardload.formats.codecs.table import ZARR_CODECS
from shardload.formats.codecs.transforms import encode_crc32c, encode_shuffle
from shardload.formats.codecs.words import has_own_shuffle
from shardload.formats.contract.dtypes import dtype_text, is_added, refusal
from shardload.formats.sink import ArraySpec, Compression
from shardload.formats.zarr.codecs import options_of

__all__ = ["Layout", "group_metadata", "layout", "plain_attrs"]

Json = dict[str, Any]
_IN_3, _IN_2 = ("gzip", "zstd", "blosc"), ("gzip", "zstd", "blosc", "lz4")


@dataclass(frozen=True)
class Layout:
    """One array of a new store.

    Attributes
    ----------
    metadata : dict
        Its metadata, without attributes and names of axes in format 2.
    chain : EncodeChain
        How a chunk is encoded.
    codec : str
        The same for people.
    prefix, separator : str
        How the position of a chunk (or of its shard file) becomes the name of its file.
    per_shard : tuple of int or None
        Chunks along each axis of a shard file.
    """

    metadata: Json
    chain: EncodeChain
    codec: str
    prefix: str
    separator: str
    per_shard: tuple[int, ...] | None

    def key(self, index: tuple[int, ...]) -> str:
        """Name of a file, relative to the array's folder."""
        if not index:
            return self.prefix.rstrip("/") or "0"
        return self.prefix + self.separator.join(map(str, index))


def layout(name: str, spec: ArraySpec, version: int) -> Layout:
    """The layout of an array with a checked spec. ConfigError if this version of the format cannot say it."""
    if (refused := refusal(spec.dtype)) is not None:
        raise ConfigError(f"'{name}' holds {refused}, for which Zarr has no type. Save numbers")
    fill = np.zeros((), spec.dtype)[()] if spec.fill_value is None else spec.fill_value
    chunks = spec.chunks or tuple(max(1, n) for n in spec.shape)
    if version == 2:
        return _layout_2(name, spec, chunks, fill)
    codecs: list[Json] = [_bytes(spec.dtype)]
    steps: list[Step] = []
    text = "none"
    if spec.compression is not None:
        if spec.compression.shuffle and not has_own_shuffle(spec.compression.name):
            raise ConfigError(
                f"compression of '{name}' is {spec.compression.name!r} after a shuffle, which Zarr format 3 does not have. "
                "Pass compression='blosc', which shuffles, or leave the shuffle out"
            )
        step, options, text = _compressor(name, spec.compression, spec.dtype.itemsize, 3)
        entry = {"name": spec.compression.name, "configuration": options}
        steps.append(step)
        codecs.append(entry)
    if spec.checksum:
        steps.append(encode_crc32c())
        codecs.append({"name": "crc32c"})
    per_shard = None
    if spec.shards is not None:
        per_shard = tuple(s // c for s, c in zip(spec.shards, chunks, strict=True))
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        options = {"chunk_shape": list(chunks), "codecs": codecs, "index_codecs": index, "index_location": "end"}
        codecs = [{"name": "sharding_indexed", "configuration": options}]
    metadata: Json = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(spec.shape),
        "data_type": spec.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(spec.shards or chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _fill(fill),
        "codecs": codecs,
        "attributes": plain_attrs(name, spec.attrs),
    }
    metadata["dimension_names"] = list(spec.dims or ())
    chain = EncodeChain(steps, spec.chunks, spec.dtype, fill)
    return Layout(metadata, chain, text, "c/", "/", per_shard)


def _layout_2(name: str, spec: ArraySpec, chunks: tuple[int, ...], fill: Any) -> Layout:
    if spec.shards is not None:
        raise ConfigError(
            f"'{name}' has shards, which Zarr format 2 does not have. Leave shards= out, or save as Zarr format 3"
        )
    if spec.checksum:
        raise ConfigError(
            f"'{name}' has checksums, which Zarr format 2 does not have. Leave them out, or save as Zarr format 3"
        )
    if is_added(spec.dtype) and not spec.dtype.isnative:
        raise ConfigError(f"'{name}' is to be big-endian {spec.dtype.name}, which Zarr 2 cannot say. Leave byteorder= out")
    steps: list[Step] = []
    filters: list[Json] = []
    compressor: Json | None = None
    text = "none"
    asked = spec.compression
    if asked is not None:
        itemsize = spec.dtype.itemsize
        if asked.shuffle and not has_own_shuffle(asked.name) and itemsize > 1:
            filters.append({"id": "shuffle", "elementsize": itemsize})
            steps.append(encode_shuffle(itemsize))
        if asked.name != "none":
            step, options, text = _compressor(name, asked, itemsize, 2)
            compressor = {"id": asked.name, **options}
            steps.append(step)
        if filters:
            text = f"{text}+shuffle" if compressor else "shuffle"
    metadata: Json = {
        "zarr_format": 2,
        "shape": list(spec.shape),
        "chunks": list(chunks),
        "dtype": dtype_text(spec.dtype),
        "fill_value": None if spec.fill_value is None else _fill(fill),
        "order": "C",
        "filters": filters or None,
        "dimension_separator": ".",
        "compressor": compressor,
    }
    return Layout(metadata, EncodeChain(steps, spec.chunks, spec.dtype, fill), text, "", ".", None)


def _bytes(dtype: np.dtype[Any]) -> Json:
    if dtype.itemsize == 1:
        return {"name": "bytes"}
    is_big = not dtype.isnative if sys.byteorder == "little" else dtype.isnative
    return {"name": "bytes", "configuration": {"endian": "big" if is_big else "little"}}


def _compressor(name: str, asked: Compression, itemsize: int, version: int) -> tuple[Step, Json, str]:
    """The step, its options in the metadata, and the text for people."""
    known = _IN_3 if version == 3 else _IN_2
    codec = ZARR_CODECS[asked.name] if asked.name in known else None
    if codec is None or codec.encoder is None or (asked.level is not None and not codec.levels):
        fix = "compression='zstd', or another of these"
        if asked.name == "lz4":
            fix = "compression='lz4'" if "lz4" in known else "compression='blosc(lz4)', which has it inside"
        found_level = f" with level {asked.level}" if asked.name in known else ""
        raise ConfigError(f"compression of '{name}' is {asked.name!r}{found_level}; Zarr has {', '.join(known)}. Pass {fix}")
    told = codec.parameters(name, asked, itemsize, "Zarr", -7 if asked.name == "zstd" else None)
    text = f"{codec.word}({told.inner})" if has_own_shuffle(codec.word) else codec.word
    return codec.encoder(told), options_of(codec, told, version), text


def _fill(value: Any) -> Any:
    """A fill value as JSON."""
    if isinstance(value, np.complexfloating):
        return [_fill(value.real), _fill(value.imag)]
    found = value.item()
    if isinstance(found, float) and not math.isfinite(found):
        return "NaN" if math.isnan(found) else "Infinity" if found > 0 else "-Infinity"
    return found


def group_metadata(version: int, attrs: Mapping[str, Any]) -> Json:
    """The metadata of a group; in format 2 without the attributes."""
    return {"zarr_format": 2} if version == 2 else {"zarr_format": 3, "node_type": "group", "attributes": dict(attrs)}


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
