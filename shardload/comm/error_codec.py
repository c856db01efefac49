"""How does the error of one rank get to the others? As text, from which every rank makes an error of the same type and text."""

from __future__ import annotations

import errno
import json

import numpy as np

from shardload.errors import ConfigError, PeerError, ShardloadError, SourceError, StallError, VerifyError, chain_of

_TYPES: tuple[type[ShardloadError], ...] = (ShardloadError, ConfigError, SourceError, PeerError, StallError, VerifyError)
_ERRORS = {e.__name__: e for e in _TYPES}
_MORE: dict[type[ShardloadError], tuple[str, ...]] = {SourceError: ("path", "dataset", "chunk"), VerifyError: ("index",)}


def as_shardload(error: BaseException | None, rank: int | None) -> ShardloadError:
    """The error itself if it is a ShardloadError; otherwise a PeerError of `rank` in its place."""
    said = message_of(error)
    if _lacks_descriptors(error):  # also as the cause of another error: neither the file nor the call is to blame
        text = f"{said} (this process may open no more files: `ulimit -n 4096` before the job starts, or close some)"
        return PeerError(text if isinstance(error, ShardloadError) else f"{type(error).__name__}: {text}", rank=rank)
    if isinstance(error, RuntimeError) and "start new thread" in said:
        text = f"{said} (the limit of processes and threads is reached: `ulimit -u`, or pids.max of the job's control group)"
        return PeerError(f"{type(error).__name__}: {text}", rank=rank)
    if isinstance(error, ShardloadError):
        if error.rank is None:
            error.rank = rank
        return error
    return PeerError(f"{type(error).__name__}: {said}", rank=rank)


def message_of(error: object) -> str:
    """Its text. Libraries have errors that fail when they are to say what is wrong, and the other ranks are waiting."""
    try:
        return str(error)
    except Exception as found:
        return f"it has no text, because making it fails ({type(found).__name__})"


def _lacks_descriptors(error: BaseException | None) -> bool:
    return any(isinstance(one, OSError) and one.errno in (errno.EMFILE, errno.ENFILE) for one in chain_of(error))


def to_json(error: ShardloadError) -> str:
    """An error as text. Never fails, whatever values the error has, because the other ranks are waiting."""
    kind = next(name for name, e in reversed(_ERRORS.items()) if isinstance(error, e))
    names = _MORE.get(_ERRORS[kind], ())
    more = {k: getattr(error, k) for k in names}
    return json.dumps({"kind": kind, "text": str(error), "rank": error.rank, **more}, default=_plain)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else str(value)


def from_json(text: str, first: int, n_failed: int, size: int) -> ShardloadError:
    """The error, made from its text. Its message says which rank failed, unless all `size` ranks did."""
    found = json.loads(text)
    kind, message, rank = found.pop("kind"), found.pop("text"), found.pop("rank")
    if n_failed == size:
        rank = None  # all ranks found it: it belongs to no single rank
    else:
        more = f" (and on {n_failed - 1} more)" if n_failed > 1 else ""
        message = f"on rank {first} of {size}{more}: {message}"
    for name in ("chunk", "index"):
        if found.get(name) is not None:
            found[name] = tuple(found[name])
    return _ERRORS[kind](message, rank=rank, **found)
