"""What does the metadata of a new Zarr array say, and how are its chunks encoded? As in zarr-python."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numcodecs.lz4
import numpy as np

from shardload.errors import ConfigError
from shardload.formats import encoding
from shardload.formats.base import dtype_text, is_added, refusal
from shardload.formats.compression_words import BLOSC_SHUFFLES
from shardload.formats.encoding import BLOSC_NAMES, EncodeChain, Step, level_of
from shardload.formats.sink import ArraySpec, Compression

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
    nbytes = math.prod(chunks) * spec.dtype.itemsize
    if version == 2:
        return _layout_2(name, spec, chunks, fill)
    codecs: list[Json] = [_bytes(spec.dtype)]
    steps: list[Step] = []
    text = "none"
    if spec.compression is not None:
        step, entry, text = _compressor_3(name, spec.compression, spec.dtype.itemsize, nbytes)
        steps.append(step)
        codecs.append(entry)
    if spec.checksum:
        steps.append(encoding.crc32c())
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
        if asked.shuffle and asked.name != "blosc" and itemsize > 1:
            filters.append({"id": "shuffle", "elementsize": itemsize})
            steps.append(encoding.shuffle(itemsize))
        if asked.name != "none":
            step, compressor, text = _compressor_2(name, asked, itemsize)
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


def _compressor_3(name: str, asked: Compression, itemsize: int, nbytes: int) -> tuple[Step, Json, str]:
    if asked.shuffle and asked.name != "blosc":
        raise ConfigError(
            f"compression of '{name}' is {asked.name!r} after a shuffle, which Zarr format 3 does not have. "
            "Pass compression='blosc', which shuffles, or leave the shuffle out"
        )
    step, options, text = _compressor(name, asked, itemsize, _IN_3)
    if asked.name == "zstd":
        options["checksum"] = False
    if asked.name == "blosc":
        options |= {"shuffle": BLOSC_SHUFFLES[options["shuffle"]], "typesize": itemsize}
    return step, {"name": asked.name, "configuration": options}, text


def _compressor_2(name: str, asked: Compression, itemsize: int) -> tuple[Step, Json, str]:
    step, options, text = _compressor(name, asked, itemsize, _IN_2)
    return step, {"id": asked.name, **options}, text


def _compressor(name: str, asked: Compression, itemsize: int, known: tuple[str, ...]) -> tuple[Step, Json, str]:
    """The step, its parameters, and the text for people."""
    options = dict(asked.options)
    found: tuple[Step, Json, str]
    if asked.name == "gzip":
        level = level_of("gzip", asked.level, 4, 9)
        found = encoding.gzip(level), {"level": level}, "gzip"
    elif asked.name == "zstd":
        level = level_of("zstd", asked.level, 3, 22, -7)
        found = encoding.zstd(level), {"level": level}, "zstd"
    elif asked.name == "blosc":
        level, inner = level_of("blosc", asked.level, 5, 9), options.pop("cname", "lz4")
        bits = 2 if options.pop("bitshuffle", False) is True else int(asked.shuffle)
        if inner not in BLOSC_NAMES:
            raise ConfigError(f"Blosc's compressor for '{name}' is {inner!r}; expected one of {', '.join(BLOSC_NAMES)}")
        found = (
            encoding.blosc(inner, level, bits, itemsize),
            {"cname": inner, "clevel": level, "shuffle": bits, "blocksize": 0},
            f"blosc({inner})",
        )
    elif asked.name == "lz4" and "lz4" in known and asked.level is None:
        found = numcodecs.lz4.compress, {"acceleration": 1}, "lz4"
    else:
        fix = "compression='zstd', or another of these"
        if asked.name == "lz4":
            fix = "compression='lz4'" if "lz4" in known else "compression='blosc(lz4)', which has it inside"
        found_level = f" with level {asked.level}" if asked.name in known else ""
        raise ConfigError(f"compression of '{name}' is {asked.name!r}{found_level}; Zarr has {', '.join(known)}. Pass {fix}")
    if options:
        raise ConfigError(
            f"compression of '{name}': {asked.name} has no option {', '.join(map(repr, sorted(options)))} in Zarr"
        )
    return found


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
