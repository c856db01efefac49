"""May these codecs decode a Zarr array's chunks? The metadata answers this before a chunk is read.

1. `SURVIVED` has the codecs that did not crash, hang or end the process in many thousands of tests with damaged chunks and
   configurations (``python -m benchmarks fuzz-filters``, docs/trust-files.md). Other codecs, which zarr-python finds among the
   installed packages, are used only if the caller names them (`allow_filters`).
2. `checked` replaces numcodecs's Blosc decoder by one that compares a chunk's header with its length. numcodecs's own decoder
   reads past the end of a chunk whose header declares more bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numcodecs

from shardload.formats.access import Access
from shardload.formats.codecs import blosc_error, check_blosc

__all__ = ["SURVIVED", "checked", "refuse_codecs"]

SURVIVED = frozenset(
    {
        *("bytes", "transpose", "sharding_indexed", "zstd", "gzip", "zlib", "blosc", "lz4", "lzma", "bz2", "base64"),
        *("shuffle", "delta", "bitround", "quantize", "fixedscaleoffset", "astype", "packbits"),
        *("crc32", "crc32c", "adler32", "fletcher32", "jenkins_lookup3"),
    }
)


def refuse_codecs(metadata: Any, access: Access) -> str | None:
    """Why an array's chunks are not decoded, in words that follow "holds"; None if they are.

    Parameters
    ----------
    metadata : zarr metadata
        The array's metadata.
    access : Access
        What the caller allows.
    """
    for name in names_of(metadata):
        if name not in SURVIVED and not access.may_use(name, f"numcodecs.{name}"):
            told = "".join(letter for letter in name[:80] if letter.isprintable())
            return (
                f"chunks encoded with the codec '{told}', which is not decoded by default: it is not known how it handles "
                f"damaged data. If you trust who wrote the store, pass allow_filters='{told}'"
            )
    return None


def names_of(metadata: Any) -> Iterator[str]:
    """The names of an array's codecs, in lower case, including those inside shards."""
    if metadata.zarr_format == 2:
        for codec in (metadata.compressor, *(metadata.filters or ())):
            if codec is not None:
                yield str(codec.codec_id).lower()
    else:
        yield from _names(codec.to_dict() for codec in metadata.codecs)


def _names(codecs: Any) -> Iterator[str]:
    for codec in codecs:
        yield str(codec["name"]).removeprefix("numcodecs.").lower()
        inside = codec.get("configuration") or {}
        for key in ("codecs", "index_codecs"):
            yield from _names(inside.get(key) or ())


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
