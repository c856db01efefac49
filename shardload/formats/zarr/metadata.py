"""Where are the chunks of a Zarr array, and how are they encoded? The metadata alone answers this, without opening files.

`layout_of` reads the metadata that zarr-python parsed. It answers only if it understands every key, codec and option. Otherwise
it raises `NotCovered`, and zarr-python reads the array, which knows more or says why it cannot.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.formats.access import STRICT, Access
from shardload.formats.codecs.chains import Stage
from shardload.formats.codecs.table import ZARR_CODECS
from shardload.formats.codecs.transforms import decode_byte_order, decode_crc32c
from shardload.formats.contract.dtypes import refusal
from shardload.formats.zarr.codecs import SIZED, SURVIVED, parameters_of

__all__ = ["MOST_INDEX_NBYTES", "Layout", "NotCovered", "codecs_of_2", "is_stacked", "layout_of", "n_in_shard"]

# The index of a shard is read whole and kept. An array whose shards have longer indexes is not covered.
MOST_INDEX_NBYTES = 2**24


class NotCovered(Exception):
    """The metadata has something that is left to zarr-python."""


_KEYS_2 = {
    *("zarr_format", "shape", "chunks", "dtype", "fill_value", "order", "filters", "dimension_separator", "compressor"),
    "attributes",
}
_KEYS_3 = {
    *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"),
    *("attributes", "storage_transformers", "dimension_names"),
}


@dataclass(frozen=True)
class Layout:
    """Where chunks are and how they are encoded, from the metadata.

    Attributes
    ----------
    chunk_shape : tuple of int
        Elements along each axis of a chunk, the unit of decode.
    prefix, separator : str
        How the position of a chunk (or of its shard file, if there are shards) becomes the name of its file.
    stages : tuple of Stage
        The stages that undo the codecs, in that order.
    per_shard : tuple of int or None
        Chunks along each axis of a shard file.
    index_stages : tuple of Stage
        The stages that undo the codecs of a shard's index.
    is_index_first : bool
        True if the index is at the start of a shard, False if at its end.
    """

    chunk_shape: tuple[int, ...]
    prefix: str
    separator: str
    stages: tuple[Stage, ...]
    per_shard: tuple[int, ...] | None = None
    index_stages: tuple[Stage, ...] = ()
    is_index_first: bool = False

    def key(self, at: tuple[int, ...]) -> str:
        """Name of the file for position `at`, relative to the array's folder.

        >>> Layout((2, 2), "c/", "/", ()).key((0, 3))
        'c/0/3'
        """
        if not at:
            return self.prefix.rstrip("/.") or "0"
        return self.prefix + self.separator.join(map(str, at))


def layout_of(metadata: Mapping[str, Any], dtype: np.dtype[Any]) -> Layout:
    """Read parsed metadata; raises `NotCovered` if anything in it is unknown here."""
    if refusal(dtype) is not None:
        raise NotCovered(f"values of type {dtype}")
    layout = {2: _layout_2, 3: _layout_3}[metadata["zarr_format"]](metadata, dtype)
    if 0 in layout.chunk_shape:
        raise NotCovered("chunks without elements")
    if layout.per_shard is not None and 16 * math.prod(layout.per_shard) > MOST_INDEX_NBYTES:
        raise NotCovered(f"an index of {math.prod(layout.per_shard)} chunks in each shard")
    return layout


def is_stacked(metadata: Mapping[str, Any], access: Access = STRICT) -> bool:
    """True if chunks are compressed more than once. Each compressor can expand one byte to a thousand.

    Codecs that the caller allows are not always counted: see `Access.counts`.
    """
    if metadata.get("zarr_format") == 3:
        return _n_compressors(metadata["codecs"], access) > 1
    return sum(_is_counted(name, access) for name, _ in codecs_of_2(metadata)) > 1


def codecs_of_2(metadata: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and options of each codec of an array of format 2, in the order in which they are applied."""
    return [_codec_2(entry) for entry in (*(metadata.get("filters") or ()), *filter(None, [metadata.get("compressor")]))]


def _is_counted(name: str, access: Access) -> bool:
    name = name.removeprefix("numcodecs.").lower()
    return name not in SIZED and access.counts(name, f"numcodecs.{name}", survived=name in SURVIVED)


def _n_compressors(chain: Sequence[Any], access: Access) -> int:
    """The number of compressors in a chain of format 3, plus the most that any chain inside a shard has."""
    n = 0
    for entry in chain:
        name = entry if isinstance(entry, str) else str(entry["name"])
        n += _is_counted(name, access)
        options = {} if isinstance(entry, str) else entry.get("configuration") or {}
        n += max((_n_compressors(options[key], access) for key in ("codecs", "index_codecs") if key in options), default=0)
    return n


def n_in_shard(metadata: Mapping[str, Any]) -> int:
    """The chunks inside one chunk of a regular grid, in shards of all levels: each has an entry in an index."""
    if metadata.get("zarr_format") != 3:
        return 0
    return _n_inside(metadata["codecs"], math.prod(metadata["chunk_grid"]["configuration"]["chunk_shape"]))


def _n_inside(chain: Sequence[Any], n_elements: int) -> int:
    """`n_in_shard` for a chain of codecs and the elements that it encodes. Other codecs leave their number as it is."""
    for entry in chain:
        if not isinstance(entry, str) and entry["name"] == "sharding_indexed":
            options = entry["configuration"]
            n_inner = max(1, math.prod(map(int, options["chunk_shape"])))
            return -(-n_elements // n_inner) * (1 + _n_inside(options["codecs"], n_inner))
    return 0


def _layout_2(metadata: Mapping[str, Any], dtype: np.dtype[Any]) -> Layout:
    """`layout_of` for format 2."""
    _check_known("metadata", metadata, _KEYS_2)
    stored = metadata["dtype"]
    if not isinstance(stored, str) or np.dtype(stored).newbyteorder("=") != dtype:
        raise NotCovered(f"data type {stored!r}")
    if metadata["order"] != "C":
        raise NotCovered(f"order {metadata['order']!r}")
    chunk_shape = tuple(int(n) for n in metadata["chunks"])
    nbytes = math.prod(chunk_shape) * dtype.itemsize
    stages: list[Stage] = []
    if metadata["compressor"] is not None:
        name, options = _codec_2(metadata["compressor"])
        stages.append(_stage(name, "2", options, nbytes))
    for entry in reversed(metadata["filters"] or ()):
        name, options = _codec_2(entry)
        stages.append(_stage(name, "2", options, nbytes))
    if not np.dtype(stored).isnative:
        stages.append(decode_byte_order(_part_nbytes(dtype)))
    return Layout(chunk_shape, "", _separator(metadata.get("dimension_separator", ".")), tuple(stages))


def _layout_3(metadata: Mapping[str, Any], dtype: np.dtype[Any]) -> Layout:
    """`layout_of` for format 3."""
    _check_known("metadata", metadata, _KEYS_3)
    if metadata["data_type"] != dtype.name or metadata.get("storage_transformers"):
        raise NotCovered(f"data type {metadata['data_type']!r}, or storage transformers")
    grid_name, grid = _named(metadata["chunk_grid"])
    if grid_name != "regular" or set(grid) != {"chunk_shape"}:
        raise NotCovered(f"chunk grid {grid_name!r}")
    chunk_shape = tuple(int(n) for n in grid["chunk_shape"])
    key_name, options = _named(metadata["chunk_key_encoding"])
    if key_name not in ("default", "v2"):
        raise NotCovered(f"chunk key encoding {key_name!r}")
    _check_known("chunk key encoding", options, {"separator"})
    separator = _separator(options.get("separator", "/" if key_name == "default" else "."))
    prefix = "c" + separator if key_name == "default" else ""
    chain = [_named(entry) for entry in metadata["codecs"]]
    if [name for name, _ in chain] != ["sharding_indexed"]:
        return Layout(chunk_shape, prefix, separator, _stages_3(chain, chunk_shape, dtype))
    options = chain[0][1]
    _check_known("sharding", options, {"chunk_shape", "codecs", "index_codecs", "index_location"})
    inner = tuple(int(n) for n in options["chunk_shape"])
    if (
        len(inner) != len(chunk_shape)
        or 0 in (*inner, *chunk_shape)
        or any(n % m for n, m in zip(chunk_shape, inner, strict=True))
    ):
        raise NotCovered("shards that are no multiple of their chunks")
    index_chain = [_named(entry) for entry in options["index_codecs"]]
    if index_chain[0] != ("bytes", {"endian": "little"}) or index_chain[1:] not in ([], [("crc32c", {})]):
        raise NotCovered("index codecs")
    if options["index_location"] not in ("start", "end"):
        raise NotCovered("index location")
    return Layout(
        chunk_shape=inner,
        prefix=prefix,
        separator=separator,
        stages=_stages_3([_named(entry) for entry in options["codecs"]], inner, dtype),
        per_shard=tuple(n // m for n, m in zip(chunk_shape, inner, strict=True)),
        index_stages=(decode_crc32c(),) if index_chain[1:] else (),
        is_index_first=options["index_location"] == "start",
    )


def _stages_3(
    chain: Sequence[tuple[str, Mapping[str, Any]]], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[Stage, ...]:
    """The stages that undo the codecs of one chunk, which start with "bytes"."""
    (name, options), *rest = chain
    part = _part_nbytes(dtype)
    endian = options.get("endian") or (sys.byteorder if part == 1 else None)
    if name != "bytes" or not set(options) <= {"endian"} or endian not in ("little", "big"):
        raise NotCovered(f"codec {name!r} with {options}")
    stages = [decode_byte_order(part)] if part > 1 and endian != sys.byteorder else []
    for name, options in rest:
        form = "n" if name.startswith("numcodecs.") else "3"
        stages.insert(0, _stage(name.removeprefix("numcodecs."), form, options, math.prod(shape) * dtype.itemsize))
    return tuple(stages)


def _stage(name: str, form: str, options: Mapping[str, Any], nbytes: int) -> Stage:
    """The stage that undoes one codec, for chunks of `nbytes` decoded bytes. `form` is one of `Codec.forms`."""
    codec = ZARR_CODECS.get(name)
    if codec is None or codec.decoder is None or form not in codec.forms:
        raise NotCovered(f"codec {name!r}")
    _check_known(name, options, codec.options)
    told = parameters_of(name, options, 1)
    if name == "shuffle" and (told.itemsize < 1 or nbytes % told.itemsize):
        raise NotCovered(f"a shuffle of elements of {told.itemsize} bytes")
    return codec.decoder(told)


def _part_nbytes(dtype: np.dtype[Any]) -> int:
    """Bytes of a number with a byte order: a complex number has two such numbers."""
    return dtype.itemsize // (2 if dtype.kind == "c" else 1)


def _named(entry: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and options of an extension point of format 3, which may be given as a name alone."""
    if isinstance(entry, str):
        return entry, {}
    _check_known("extension", entry, {"name", "configuration"})
    return str(entry["name"]), dict(entry.get("configuration") or {})


def _codec_2(entry: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and options of a codec of format 2, which may be an object of numcodecs."""
    options = dict(entry if isinstance(entry, Mapping) else entry.get_config())
    return str(options.pop("id")), options


def _separator(found: Any) -> str:
    if found not in (".", "/"):
        raise NotCovered(f"separator {found!r}")
    return str(found)


def _check_known(what: str, found: Mapping[str, Any], known: set[str] | frozenset[str]) -> None:
    if not set(found) <= known:
        raise NotCovered(f"{what} with {', '.join(sorted(set(found) - known))}")
