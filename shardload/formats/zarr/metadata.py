"""What does the metadata of a Zarr array say of its chunks: where they are, and how they are encoded? JSON alone.

`ZarrLayout.of` reads a document (``zarr.json``, or ``.zarray``), of an array that is read, written or grown. It raises
ValueError (of an odd form also LookupError or TypeError) unless it understands every key, codec and option, in words that
follow "is stored with". Then zarr-python reads the array, or says why it cannot, and nothing is appended to it.

May a chunk be decoded? `SURVIVED` has the codecs that did not crash, hang or end the process in many thousands of tests with
damaged chunks and configurations (``python -m benchmarks fuzz-filters``, docs/trust-files.md). Other codecs, which zarr-python
finds among the installed packages, are used only if the caller names them (`allow_filters`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardload.errors import ConfigError, printable
from shardload.formats.access import STRICT, Access
from shardload.formats.codecs.algorithms import Stage, Step, decode_byte_order, decode_crc32c
from shardload.formats.codecs.table import BLOSC_CODES, BLOSC_SHUFFLES, ZARR_CODECS, Codec, Parameters
from shardload.formats.contract.array import native_dtype, refusal

Json = dict[str, Any]
Chain = Sequence[tuple[str, Mapping[str, Any]]]

SURVIVED = frozenset(name for name, codec in ZARR_CODECS.items() if codec.is_safe)
SIZED = frozenset(name for name, codec in ZARR_CODECS.items() if codec.is_sized)

MOST_INDEX_NBYTES = 1 << 26  # of a shard, which is read as a whole, and kept
INDEX_CODECS: list[Json] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]

_INDEX_CHAIN = [("bytes", {"endian": "little"}), ("crc32c", {})]
_SHARDING = "sharding_indexed"
_SERIALIZERS = ("bytes", "vlen-utf8", "vlen-bytes", "zfpy", "pcodec")
_KEYS_3 = {
    *("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs"),
    *("attributes", "storage_transformers", "dimension_names"),
}


def metadata_key(name: str, version: int) -> str:
    """The key of the object with the metadata of an array."""
    return f"{name}/{'zarr.json' if version == 3 else '.zarray'}".strip("/")


def json_number(number: float) -> float | str:
    """A number as Zarr's JSON has it.

    >>> json_number(-1.5), json_number(-math.inf)
    (-1.5, '-Infinity')
    """
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


# --- codecs by name


def chain_of(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and options of each codec of an array."""
    if document.get("zarr_format") == 3:
        return list(map(_name_and_options, document["codecs"]))
    entries = [*(document.get("filters") or ()), *filter(None, [document.get("compressor")])]
    return [(str(entry["id"]), {key: value for key, value in entry.items() if key != "id"}) for entry in entries]


def inner_chain(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The same of the chunks inside of shards, if the array has some."""
    chain = chain_of(document)
    inside = [options for name, options in chain if name == _SHARDING]
    return list(map(_name_and_options, inside[0]["codecs"])) if inside else chain


def codec_of(document: Mapping[str, Any]) -> str:
    """The codecs of a chunk for people: compressors, then filters."""
    names = [_plain(name) for name, _ in inner_chain(document)]
    if document["zarr_format"] == 2:
        names.reverse()
    else:  # compressors are behind what makes bytes of values, filters before it
        serializer = next((k for k, name in enumerate(names) if name in _SERIALIZERS), 0)
        names = [*names[serializer + 1 :], *names[:serializer]]
    return "+".join(names) or "none"


def names_of(document: Mapping[str, Any]) -> list[str]:
    """The names of an array's codecs as `ZARR_CODECS` has them, including those inside of shards."""
    names = []
    for name, options in chain_of(document):
        inside = [*options.get("codecs", ()), *options.get("index_codecs", ())] if name == _SHARDING else []
        names += [name, *(inner for inner, _ in map(_name_and_options, inside))]
    return list(map(_plain, names))


def _plain(name: str) -> str:
    return name.removeprefix("numcodecs.").lower()


def _name_and_options(entry: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and options of an extension point of format 3, which may be given as a name alone."""
    if isinstance(entry, str):
        return entry, {}
    options = {key: value for key, value in entry.items() if key not in ("name", "configuration")}
    return str(entry["name"]), options | dict(entry.get("configuration") or {})


def grid_of(document: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
    """Elements along each axis of a chunk, and of a shard, if there are shards; None if the grid is not regular."""
    if document["zarr_format"] == 2:
        return _ints(document["chunks"]), None
    name, grid = _name_and_options(document["chunk_grid"])
    if name != "regular":
        return None
    outer, chain = _ints(grid["chunk_shape"]), chain_of(document)
    if [name for name, _ in chain] != [_SHARDING]:
        return outer, None
    return _ints(chain[0][1]["chunk_shape"]), outer


def is_stacked(document: Mapping[str, Any], access: Access = STRICT) -> bool:
    """True if chunks are compressed more than once. Each compressor can expand one byte to a thousand.

    Codecs that the caller allows are not always counted: see `Access.counts`.
    """
    names = [name for name in names_of(document) if name not in SIZED]
    return sum(access.counts(name, f"numcodecs.{name}", survived=name in SURVIVED) for name in names) > 1


def n_in_shard(document: Mapping[str, Any]) -> int:
    """The chunks in each shard: each has an entry in an index. 0 if there are no shards."""
    inner = [options["chunk_shape"] for name, options in chain_of(document) if name == _SHARDING]
    if not inner:
        return 0
    outer = _ints(_name_and_options(document["chunk_grid"])[1]["chunk_shape"])
    return -(-math.prod(outer) // max(1, math.prod(map(int, inner[0]))))


# --- their options, and whether they may be used


def parameters_of(name: str, options: Mapping[str, Any], itemsize: int) -> Parameters:
    """The parameters of a codec from its options in the metadata. LookupError, TypeError or ValueError if they are odd."""
    level, levels = options.get("level", options.get("clevel")), ZARR_CODECS[name].levels
    if levels and (not isinstance(level, int) or (name == "zstd" and level == 0)):
        level = levels[0]
    if name == "shuffle":
        return Parameters(itemsize=int(options["elementsize"]))
    if name != "blosc":
        return Parameters(level or 0)
    shuffle, inner = (getattr(option, "value", option) for option in (options.get("shuffle", 1), options.get("cname", "lz4")))
    if shuffle == -1:  # numcodecs chooses
        shuffle = 2 if itemsize == 1 else 1
    number = BLOSC_SHUFFLES.index(shuffle) if isinstance(shuffle, str) else range(3)[shuffle]
    return Parameters(level, int(options.get("typesize") or itemsize), str(inner), number)


def options_of(codec: Codec, parameters: Parameters) -> dict[str, Any]:
    """The options in the metadata of a new array, for the parameters of a codec."""
    if codec.zarr == "blosc":
        shuffle = BLOSC_SHUFFLES[parameters.shuffle]
        options = {"cname": parameters.inner, "clevel": parameters.level, "shuffle": shuffle, "blocksize": 0}
        return {**options, "typesize": parameters.itemsize}
    return {"level": parameters.level} | ({"checksum": False} if codec.zarr == "zstd" else {})


def refuse_codecs(names: Iterable[str], access: Access) -> str | None:
    """Why chunks that were encoded with these codecs are not decoded, in words that follow "holds"; None if they are."""
    for name in names:
        if name not in SURVIVED and not access.may_use(name, f"numcodecs.{name}"):
            codec = printable(name[:80])
            return (
                f"chunks encoded with the codec '{codec}', which is not decoded by default: it is not known how it handles "
                f"damaged data. If you trust who wrote the store, pass allow_filters='{codec}'"
            )
    return None


# --- chunks


@dataclass(frozen=True)
class ZarrLayout:
    """Where the chunks of an array are and how they are encoded.

    Attributes
    ----------
    version : int
        Of the format: 2 or 3.
    chunk_shape : tuple of int
        Elements along each axis of a chunk, the unit of decode.
    prefix, separator : str
        How the position of a chunk (or of its shard file, if there are shards) becomes the name of its file.
    dtype : dtype
        The type as it is stored.
    chain : sequence of (str, mapping)
        Name and options of each codec of a chunk, in the order in which they are applied to its values.
    per_shard : tuple of int or None
        Chunks along each axis of a shard file.
    has_index_checksum, is_index_first : bool
        Whether the index of a shard has a CRC-32C behind it, and whether it is at the start of the shard or at its end.
    """

    version: int
    chunk_shape: tuple[int, ...]
    prefix: str
    separator: str
    dtype: np.dtype[Any]
    chain: Chain = ()
    per_shard: tuple[int, ...] | None = None
    has_index_checksum: bool = True
    is_index_first: bool = False

    @classmethod
    def of(cls, document: Mapping[str, Any], dtype: np.dtype[Any]) -> ZarrLayout:
        """Read a document of an array of this type. ValueError if anything in it is unknown here."""
        if refusal(dtype) is not None:
            raise ValueError(f"values of type {dtype}")
        layout = {2: _layout_2, 3: _layout_3}[document["zarr_format"]](document, native_dtype(dtype))
        if 0 in layout.chunk_shape:
            raise ValueError("chunks without elements")
        return layout

    def key(self, position: tuple[int, ...]) -> str:
        """Name of the file of a chunk, or shard, at a position in their grid, relative to the array's folder.

        >>> ZarrLayout(3, (2, 2), "c/", "/", np.dtype("i4")).key((0, 3))
        'c/0/3'
        """
        if not position:
            return self.prefix.rstrip("/.") or "0"
        return self.prefix + self.separator.join(map(str, position))

    @property
    def shards(self) -> tuple[int, ...] | None:
        """Elements along each axis of a shard file."""
        return self.per_shard and tuple(n * c for n, c in zip(self.per_shard, self.chunk_shape, strict=True))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that undo the codecs, in that order. ValueError if one is not decoded here."""
        stages = [self._stage(name, options) for name, options in reversed(self.chain)]
        return (*stages, *(() if self.dtype.isnative else (decode_byte_order(_part_nbytes(self.dtype)),)))

    @property
    def index_stages(self) -> tuple[Stage, ...]:
        """The same of a shard's index."""
        return (decode_crc32c(),) if self.has_index_checksum else ()

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps that apply the codecs, in order. ValueError if one is not applied here."""
        return tuple(self._step(name, options) for name, options in self.chain)

    def _stage(self, name: str, options: Mapping[str, Any]) -> Stage:
        codec, parameters = self._codec(name, options, 1)
        if codec.decoder is None:
            raise ValueError(f"the codec {name!r}")
        return codec.decoder(parameters)

    def _step(self, name: str, options: Mapping[str, Any]) -> Step:
        with contextlib.suppress(KeyError, ValueError, TypeError, IndexError, ConfigError):
            codec, parameters = self._codec(name, options, self.dtype.itemsize)
            if codec.levels:
                codec.checked_level(parameters.level)
            if codec.encoder is not None and parameters.inner in BLOSC_CODES:
                return codec.encoder(parameters)
        raise ValueError(f"the codec {name!r}" + (f" with {options}" if options else ""))

    def _codec(self, name: str, options: Mapping[str, Any], itemsize: int) -> tuple[Codec, Parameters]:
        codec = ZARR_CODECS.get(name.removeprefix("numcodecs."))
        if codec is None or ("n" if name.startswith("numcodecs.") else str(self.version)) not in codec.forms:
            raise ValueError(f"the codec {name!r}")
        _check_known(f"the codec {name!r}", options, codec.options)
        parameters = parameters_of(str(codec.zarr), options, itemsize)
        nbytes = math.prod(self.chunk_shape) * self.dtype.itemsize
        if codec.zarr == "shuffle" and (parameters.itemsize < 1 or nbytes % parameters.itemsize):
            raise ValueError(f"a shuffle of elements of {parameters.itemsize} bytes")
        return codec, parameters


def _layout_2(document: Mapping[str, Any], dtype: np.dtype[Any]) -> ZarrLayout:
    stored, separator = document["dtype"], document.get("dimension_separator") or "."
    if not isinstance(stored, str) or native_dtype(np.dtype(stored)) != dtype:
        raise ValueError(f"the data type {stored!r}")
    if document.get("order", "C") != "C" or separator not in (".", "/"):
        raise ValueError(f"values in the order {document.get('order')!r}, or keys with {separator!r}")
    return ZarrLayout(2, _ints(document["chunks"]), "", separator, np.dtype(stored), chain_of(document))


def _layout_3(document: Mapping[str, Any], dtype: np.dtype[Any]) -> ZarrLayout:
    _check_known("metadata", document, _KEYS_3)
    if document["data_type"] != dtype.name or document.get("storage_transformers"):
        raise ValueError(f"the data type {document['data_type']!r}, or storage transformers")
    grid_name, grid = _name_and_options(document["chunk_grid"])
    key_name, key = _name_and_options(document["chunk_key_encoding"])
    separator = key.get("separator", "/" if key_name == "default" else ".")
    if grid_name != "regular" or set(grid) != {"chunk_shape"}:
        raise ValueError(f"the chunk grid {grid_name!r}")
    if key_name not in ("default", "v2") or not set(key) <= {"separator"} or separator not in (".", "/"):
        raise ValueError(f"the chunk keys {key_name!r} with {dict(key)}")
    prefix, chain = "c" + separator if key_name == "default" else "", chain_of(document)
    inner, outer = grid_of(document) or ((), None)
    if outer is None:
        return ZarrLayout(3, inner, prefix, separator, *_serialized(chain, dtype))
    options = chain[0][1]
    _check_known("shards", options, {"chunk_shape", "codecs", "index_codecs", "index_location"})
    index, place = list(map(_name_and_options, options["index_codecs"])), options.get("index_location", "end")
    if len(inner) != len(outer) or 0 in (*inner, *outer) or any(n % m for n, m in zip(outer, inner, strict=True)):
        raise ValueError("shards that are no multiple of their chunks")
    if index not in (_INDEX_CHAIN, _INDEX_CHAIN[:1]) or place not in ("start", "end"):
        raise ValueError(f"shards whose index has the codecs {index} at {place!r}")
    per_shard = tuple(n // m for n, m in zip(outer, inner, strict=True))
    layout = ZarrLayout(3, inner, prefix, separator, *_serialized(inner_chain(document), dtype), per_shard)
    return replace(layout, has_index_checksum=index == _INDEX_CHAIN, is_index_first=place == "start")


def _serialized(chain: Chain, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], Chain]:
    """The type as it is stored, and the codecs behind "bytes", which puts the values in order."""
    (name, options), *codecs = chain
    is_ordered = _part_nbytes(dtype) > 1
    endian = options.get("endian") or (None if is_ordered else sys.byteorder)
    if name != "bytes" or not set(options) <= {"endian"} or endian not in ("little", "big"):
        raise ValueError(f"the codec {name!r} with {dict(options)}")
    return dtype.newbyteorder("<" if endian == "little" else ">") if is_ordered else dtype, codecs


def _part_nbytes(dtype: np.dtype[Any]) -> int:
    """Bytes of a number with a byte order: a complex number has two such numbers."""
    return dtype.itemsize // (2 if dtype.kind == "c" else 1)


def _ints(numbers: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, numbers))


def _check_known(text: str, options: Mapping[str, Any], known: set[str] | frozenset[str]) -> None:
    if not set(options) <= known:
        raise ValueError(f"{text} with {', '.join(sorted(set(options) - known))}")
