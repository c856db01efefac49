"""How is it said how an array is compressed? In the words of `sink.Compression`, the same for every format.

A caller may write these words as one text, as in a shell.

A format lists the codecs of a chunk and reads their options; what these mean together is decided here. If a new array cannot be
compressed like that, it is said why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TYPED = re.compile(
    r"(?P<name>[a-z0-9]+)(\((?P<inner>[a-z0-9]+)\))?(:(?P<level>-?\d+))?(?P<shuffle>\+shuffle|\+bitshuffle)?", re.ASCII
)


def has_own_shuffle(name: str) -> bool:
    """True for a compressor that shuffles bytes itself, and does so unless it is told not to."""
    return name == "blosc"


def compression_typed(text: str) -> dict[str, Any] | None:
    """The keywords of `sink.Compression` that a text says, ``NAME(CODEC):LEVEL+shuffle``; None if it cannot be read.

    >>> compression_typed("gzip:6+shuffle"), compression_typed("gzip 6")
    ({'name': 'gzip', 'level': 6, 'shuffle': True}, None)
    >>> compression_typed("gzip(6)") is None, compression_typed("zstd+bitshuffle") is None  # Blosc alone has these inside
    (True, True)
    >>> compression_typed("blosc(zstd):5+bitshuffle")
    {'name': 'blosc', 'level': 5, 'shuffle': False, 'options': {'cname': 'zstd', 'bitshuffle': True}}
    """
    found = _TYPED.fullmatch(text.strip().lower())
    if found is None or (not has_own_shuffle(found["name"]) and (found["inner"] or found["shuffle"] == "+bitshuffle")):
        return None
    options: dict[str, Any] = {} if found["inner"] is None else {"cname": found["inner"]}
    if found["shuffle"] == "+bitshuffle":
        options["bitshuffle"] = True
    is_shuffled = found["shuffle"] == "+shuffle" or (has_own_shuffle(found["name"]) and found["shuffle"] is None)
    level = None if found["level"] is None else int(found["level"])
    told: dict[str, Any] = {"name": found["name"], "level": level, "shuffle": is_shuffled}
    return {**told, "options": options} if options else told


def compression_told(
    names: Sequence[str], is_shuffled: bool, options: Callable[[], Mapping[str, Any]]
) -> dict[str, Any] | str | None:
    """The keywords of `sink.Compression`; None for an array that is not compressed; text as in `Properties`.

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
    (None, 'is encoded by zstd, then by gzip; a new array has one compressor')
    """
    if not names:
        return {"name": "none", "shuffle": True} if is_shuffled else None
    if len(names) > 1:
        return f"is encoded by {', then by '.join(names)}; a new array has one compressor"
    return {"name": names[0], "shuffle": is_shuffled, **options()}
