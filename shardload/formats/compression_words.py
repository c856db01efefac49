"""How is it said how an existing array is compressed? In the words of `sink.Compression`, the same for every format.

A format lists the codecs of a chunk and reads their options; what these mean together is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["BLOSC_CODES", "BLOSC_SHUFFLES", "blosc_told", "compression_told"]

BLOSC_CODES = {"blosclz": 0, "lz4": 1, "lz4hc": 2, "zlib": 4, "zstd": 5}
"""The compressors inside of Blosc, with its numbers for them."""

BLOSC_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
"""What Blosc does to the bytes first, by its numbers."""


def compression_told(
    names: Sequence[str], is_shuffled: bool, options: Callable[[], Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The keywords of `sink.Compression`; None for an array that is not compressed.

    Parameters
    ----------
    names : sequence of str
        The compressors of a chunk, in order: no shuffle, no checksum.
    is_shuffled : bool
        Whether there is a shuffle of its own in front of them.
    options : callable
        The other keywords, of an array with one compressor.

    Examples
    --------
    >>> compression_told(["gzip"], True, lambda: {"level": 4})
    {'name': 'gzip', 'shuffle': True, 'level': 4}
    >>> compression_told([], False, dict), compression_told(["zstd", "gzip"], False, dict)
    (None, {'name': 'zstd then gzip', 'shuffle': False})
    """
    if not names:
        return {"name": "none", "shuffle": True} if is_shuffled else None
    told: dict[str, Any] = {"name": " then ".join(names), "shuffle": is_shuffled}
    return told if len(names) > 1 else told | dict(options())  # no format takes two


def blosc_told(level: int, codec: str, shuffle: str) -> dict[str, Any]:
    """The keywords for Blosc, whose shuffle (one of `BLOSC_SHUFFLES`) is inside of it."""
    options = {"cname": codec} | ({"bitshuffle": True} if shuffle == "bitshuffle" else {})
    return {"level": level, "shuffle": shuffle == "shuffle", "options": options}
