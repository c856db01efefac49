"""May these codecs decode a Zarr array's chunks? The metadata answers this before a chunk is read.

1. `SURVIVED` has the codecs that did not crash, hang or end the process in many thousands of tests with damaged chunks and
   configurations (``python -m benchmarks fuzz-filters``, docs/trust-files.md). Other codecs, which zarr-python finds among the
   installed packages, are used only if the caller names them (`allow_filters`).
2. `checked` replaces numcodecs's Blosc decoder by one that compares a chunk's header with its length. numcodecs's own decoder
   reads past the end of a chunk whose header declares more bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numcodecs

from shardload.errors import printable
from shardload.formats.access import Access
from shardload.formats.codecs.algorithms import blosc_error, check_blosc
from shardload.formats.codecs.table import BLOSC_SHUFFLES, ZARR_CODECS, Codec, Parameters

SURVIVED = frozenset(name for name, codec in ZARR_CODECS.items() if codec.is_safe)
SIZED = frozenset(name for name, codec in ZARR_CODECS.items() if codec.is_sized)


def parameters_of(name: str, options: Mapping[str, Any], itemsize: int) -> Parameters:
    """What a codec was told by its options in the metadata. KeyError, IndexError, TypeError or ValueError if they are odd."""
    level, levels = options.get("level", options.get("clevel")), ZARR_CODECS[name].levels
    if levels and (not isinstance(level, int) or (name == "zstd" and level == 0)):
        level = levels[0]
    if name == "shuffle":
        return Parameters(itemsize=int(options["elementsize"]))
    if name != "blosc":
        return Parameters(level or 0)
    shuffle, inner = (getattr(found, "value", found) for found in (options.get("shuffle", 1), options.get("cname", "lz4")))
    if shuffle == -1:  # numcodecs chooses
        shuffle = 2 if itemsize == 1 else 1
    number = BLOSC_SHUFFLES.index(shuffle) if isinstance(shuffle, str) else range(3)[shuffle]
    return Parameters(level, int(options.get("typesize") or itemsize), str(inner), number)


def options_of(codec: Codec, told: Parameters, version: int) -> dict[str, Any]:
    """The options in the metadata that tell a codec the same."""
    if codec.zarr == "blosc":
        shuffle: Any = told.shuffle if version == 2 else BLOSC_SHUFFLES[told.shuffle]
        options = {"cname": told.inner, "clevel": told.level, "shuffle": shuffle, "blocksize": 0}
        return options if version == 2 else {**options, "typesize": told.itemsize}
    if codec.zarr == "lz4":
        return {"acceleration": 1}
    return {"level": told.level} | ({"checksum": False} if codec.zarr == "zstd" and version == 3 else {})


def refuse_codecs(names: Iterable[str], access: Access) -> str | None:
    """Why chunks that were encoded with these codecs are not decoded, in words that follow "holds"; None if they are."""
    for name in names:
        if name not in SURVIVED and not access.may_use(name, f"numcodecs.{name}"):
            told = printable(name[:80])
            return (
                f"chunks encoded with the codec '{told}', which is not decoded by default: it is not known how it handles "
                f"damaged data. If you trust who wrote the store, pass allow_filters='{told}'"
            )
    return None


class CheckedBlosc(numcodecs.Blosc):  # type: ignore[misc]
    """numcodecs's Blosc, with a check of the header: numcodecs itself trusts the length that a chunk declares."""

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode; ValueError if the header does not fit the chunk's length."""
        data = numcodecs.compat.ensure_contiguous_ndarray(buf).view("u1")
        check_blosc(data)
        try:
            return super().decode(buf, out)
        except RuntimeError as error:
            raise blosc_error(data, error) from None


def checked(metadata: Any) -> Any:
    """The same metadata, with decoders that damaged chunks cannot harm."""
    made = copy.copy(metadata)
    if metadata.zarr_format == 2:
        object.__setattr__(made, "compressor", _checked_decoder(metadata.compressor))
        object.__setattr__(made, "filters", metadata.filters and tuple(_checked_decoder(codec) for codec in metadata.filters))
    else:
        object.__setattr__(made, "codecs", tuple(map(_checked_codec, metadata.codecs)))
    return made


def _checked_decoder(decoder: Any) -> Any:
    if type(decoder) is not numcodecs.Blosc:
        return decoder
    options = decoder.get_config()
    del options["id"]
    return CheckedBlosc(**options)


def _checked_codec(codec: Any) -> Any:
    """Replace Blosc in a codec of format 3: zarr-python's Blosc, numcodecs's, or shards with Blosc inside."""
    kept = next((name for name in ("_blosc_codec", "_codec") if type(getattr(codec, name, None)) is numcodecs.Blosc), None)
    inside = getattr(codec, "codecs", None)
    if kept is None and not isinstance(inside, tuple):
        return codec
    made = copy.copy(codec)
    if kept is not None:
        made.__dict__[kept] = _checked_decoder(getattr(codec, kept))  # these classes cache their decoder there
    elif inside is not None:
        object.__setattr__(made, "codecs", tuple(map(_checked_codec, inside)))
    return made
