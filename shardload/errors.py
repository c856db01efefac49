"""Who erred: the caller, this file, or another rank?

The type of an error answers this question, so that a script can react to it:

===============  ====================================================================================
`ConfigError`    the caller: an argument, the launch, the environment. Change the call.
`SourceError`    the file: missing, damaged, of a kind that cannot be loaded. Change the data.
`PeerError`      a rank: ranks disagree, or one of them failed for another reason. Look at that rank.
`StallError`     a `PeerError`: nothing has moved on any rank for `timeout` seconds. End the job.
`VerifyError`    a `PeerError`: devices hold other values than the file.
===============  ====================================================================================

Rule: in a collective call *every* rank raises the *same* type with the *same* text, whichever rank failed. So a script that
catches `SourceError` and loads something else takes the same branch on all ranks, and no rank waits for another one.
`rank` says where the error happened.
"""

from __future__ import annotations

import errno
import re
import unicodedata
from collections.abc import Iterator

_BY_SYSTEM = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
_SECRET = re.compile(r"\b(https?://)(?:[^\s/'\"@]+@)?([^\s'\"?]*)(?:\?[^\s'\"]*)?")
_BY_HDF5 = re.compile(r"(?:read failed|open file|lock file).*errno = \d+", re.DOTALL)


def is_unread(error: BaseException) -> bool:
    """True if a file could not be read just now (by a device, a file server, a limit of the process), so that the error says
    nothing of what the file holds.

    >>> is_unread(OSError(5, "Input/output error")), is_unread(OSError("truncated file")), is_unread(KeyError("x"))
    (True, False, False)
    """
    errors = [*chain_of(error, has_contexts=False)]
    by_system = any(isinstance(each, OSError) and each.errno in _BY_SYSTEM for each in errors)
    by_library = any(isinstance(each, (OSError, RuntimeError, KeyError)) and _BY_HDF5.search(str(each)) for each in errors)
    return by_system or by_library


def chain_of(error: BaseException | None, has_contexts: bool = True) -> Iterator[BaseException]:
    """An error, what caused it, what caused that, and so on; `has_contexts`: or what was being handled when it was raised.

    Each comes once, though libraries make circles of them (``raise error from error``).
    """
    ids: set[int] = set()
    while error is not None and id(error) not in ids:
        ids.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if has_contexts else None)


def printable(text: str, kept: str = "") -> str:
    r"""`text` with control characters and other invisible characters as escapes, so that it is safe to print.

    Names in a file can contain codes that clear the screen or imitate input. Characters in `kept` stay.

    Examples
    --------
    >>> print(printable("rho\x1b[2J\n\u202e"), printable("Dichte ρ, 密度"))
    rho\x1b[2J\n\u202e Dichte ρ, 密度
    """
    if text.isprintable():
        return text
    shown = {c for c in text if c.isprintable() or unicodedata.category(c) == "Zs" or c in kept}
    return "".join(c if c in shown else c.encode("unicode_escape").decode() for c in text)


def without_queries(text: str) -> str:
    """A text whose URLs have no user, password or query, which may be secret.

    >>> without_queries("['https://me:pw@host/a.h5?X-Amz-Signature=1', 'b.h5']")
    "['https://host/a.h5', 'b.h5']"
    """
    return _SECRET.sub(r"\1\2", text)


class ShardloadError(Exception):
    """Base class of everything shardload raises on purpose. URLs in its text have no query, which may be a signature.

    Attributes
    ----------
    rank : int or None
        Rank (in the communicator of the call) on which the error arose; None if there is one process, or if all ranks found
        it.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(printable(without_queries(message), kept="\n\t"))
        self.rank = rank


class ConfigError(ShardloadError, ValueError):
    """The caller's error: an argument, the launch or the environment. The same on all ranks."""


class SourceError(ShardloadError, OSError):
    """This file's error: it is missing, damaged, cannot be written, or holds something that cannot be loaded.

    Attributes
    ----------
    path, dataset : str or None
        The file and the array inside it.
    chunk : tuple of int or None
        Index of the chunk that could not be read or written, in the file's chunk grid, if it is known.
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
    """Verified values differ from the expected ones. Its own type, to tell "wrong" from "could not be determined".

    Attributes
    ----------
    index : tuple of int or None
        The first element that differs, if it is known.
    """

    def __init__(self, message: str, *, rank: int | None = None, index: tuple[int, ...] | None = None) -> None:
        super().__init__(message, rank=rank)
        self.index = index


class StallError(PeerError):
    """Nothing has moved on any rank for `timeout` seconds; the text names the late rank and what it is doing.

    The ranks are then at different points of the program and cannot agree on anything again: every later call over the same
    communicator raises this error at once, and the job ends when the first process ends.

    Or: another rank has left the call by an error that only it had (no memory, Ctrl-C). The text says which, and all can go on.
    """


class ShardloadWarning(UserWarning):
    """Base class of everything shardload warns of in a collective call. If warnings are errors, all ranks raise it."""


class LeftOutWarning(ShardloadWarning):
    """Something of a file is not in what was made of it: the text names it. Warned once in the job, on rank 0."""


class MissingChunksWarning(ShardloadWarning):
    """Chunks of the loaded file are missing: their values are the file's fill value. Warned once in the job, on rank 0."""


class PackedWarning(ShardloadWarning):
    """The loaded numbers are packed: the file says how they become values (scale_factor, add_offset), and `decode` does not say
    whether they should. Warned once in the job, on rank 0.
    """


class PaddingWarning(ShardloadWarning):
    """Padding may be taken for data. An array is saved as long as a loaded one was with its padding or halos: it may have been
    computed from that one, and nothing says which of its elements are no padding. Or a Dataset was loaded with padding that is
    a number, which means count. Warned once in the job, on rank 0.
    """
