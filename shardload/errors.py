"""Who erred: the caller, this file, or another rank?

The type of an error answers that question and nothing else, so that a script can react to it:

===============  ====================================================================================
`ConfigError`    the caller: an argument, the launch, the environment. Change the call.
`SourceError`    the file: missing, damaged, of a kind that cannot be loaded. Change the data.
`PeerError`      a rank: ranks disagree, or one of them failed for a reason of its own. Look at that rank.
`StallError`     a rank too (it is a `PeerError`): nothing has moved for `timeout` seconds. End the job.
`VerifyError`    a rank too (it is a `PeerError`): its devices hold other values than the file.
===============  ====================================================================================

Law: in a collective call *every* rank raises the *same* type with the *same* text, whichever rank failed. A script that
catches `SourceError` and loads something else therefore branches the same way on all ranks, and nobody waits for a rank
that went another way. `rank` says where it happened.
"""

from __future__ import annotations

import unicodedata

__all__ = [
    "ConfigError",
    "MissingChunksWarning",
    "PeerError",
    "ShardloadError",
    "SourceError",
    "StallError",
    "VerifyError",
    "printable",
]


def printable(text: str, kept: str = "") -> str:
    r"""Text as a terminal may show it: control characters, and whatever else is not to be seen, as their escapes.

    Names in a file can hold codes that clear the screen, or type. Characters in `kept` stay.

    Examples
    --------
    >>> print(printable("rho\x1b[2J\n\u202e"), printable("Dichte ρ, 密度"))
    rho\x1b[2J\n\u202e Dichte ρ, 密度
    """
    if text.isprintable():
        return text
    return "".join(c if _is_seen(c) or c in kept else c.encode("unicode_escape").decode() for c in text)


def _is_seen(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


class ShardloadError(Exception):
    """Base class of everything shardload raises on purpose.

    Attributes
    ----------
    rank : int or None
        Rank (in the communicator of the call) on which the error arose; None where there is one process, or where the
        error is no rank's in particular (all ranks found it).
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(printable(message, kept="\n\t"))
        self.rank = rank


class ConfigError(ShardloadError, ValueError):
    """The caller's error: an argument, the launch or the environment. The same on all ranks."""


class SourceError(ShardloadError, OSError):
    """This file's error: it is missing, damaged, or holds something that cannot be loaded.

    Attributes
    ----------
    path, dataset : str or None
        The file and the array inside it.
    chunk : tuple of int or None
        Index of the chunk in the file's chunk grid that could not be read, where it is known.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        dataset: str | None = None,
        chunk: tuple[int, ...] | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message, rank=rank)
        self.path = path
        self.dataset = dataset
        self.chunk = chunk

    def __str__(self) -> str:  # OSError would print its (errno, text) pair
        return str(self.args[0])


class PeerError(ShardloadError, RuntimeError):
    """A rank's error: the ranks disagree, or one failed for a reason that is neither the call nor the file."""


class VerifyError(PeerError):
    """Values that were verified are not what they must be. A type of its own, so that who asks can tell "no" from "cannot say".

    Attributes
    ----------
    index : tuple of int or None
        The first element that differs, where it is known.
    """

    def __init__(self, message: str, *, rank: int | None = None, index: tuple[int, ...] | None = None) -> None:
        super().__init__(message, rank=rank)
        self.index = index


class StallError(PeerError):
    """Nothing has moved on any rank for `timeout` seconds; the text names who is late, and with what.

    The ranks are then in different places, and cannot agree on anything again: every later call over the same communicator
    raises this error at once, and the job ends when the first process does.
    """


class MissingChunksWarning(UserWarning):
    """Chunks of the file that was loaded are not stored: their values are its fill value. Raised once in the job, on rank 0."""
