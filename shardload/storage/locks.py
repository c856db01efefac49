"""Who appends to this file or store? One at a time: a small file beside it, which only its maker removes.

``NAME.appending`` is made with O_EXCL, so that of two appends at once one finds it. A killed append leaves it behind; then the
next one says so, and what to type when nothing is at work there any more. Nothing of others is deleted.

Programs that know nothing of that file are kept away from an HDF5 file as HDF5 itself does it: see `changes.GrowingFile`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shlex
import socket
import time
from collections.abc import Callable

from shardload.errors import ConfigError
from shardload.storage.containment import open_file
from shardload.storage.target import named, put_at

_LOCK_SUFFIX = ".appending"
_LOCK_BEGINS = b"shardload append "


def locked_path(path: str) -> str | None:
    """The path that this lock is for; None if it is none, by its name and its first bytes."""
    if not path.endswith(_LOCK_SUFFIX):
        return None
    if not os.path.isfile(path):
        return None
    head = _content(path)
    return path[: -len(_LOCK_SUFFIX)] if head.startswith(_LOCK_BEGINS) or not head else None


class AppendLock:
    """The right to append to `path`, a path without links.

    Raises
    ------
    ConfigError
        If another append has it, or it cannot be made.
    """

    def __init__(self, path: str) -> None:
        self.path = path + _LOCK_SUFFIX
        about = f"{secrets.token_hex(8)} {os.path.basename(path)} {socket.gethostname()} {os.getpid()}\n"
        self._text = _LOCK_BEGINS + os.fsencode(about)
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            words = _content(self.path).decode(errors="replace").split()
            by = f" (process {words[-1]} of {words[-2]})" if len(words) >= 6 else ""
            raise ConfigError(
                f"'{path}' is being appended to, or such an append was killed: there is '{self.path}'{by}. "
                f"Wait for it; if none runs there any more, remove that file: rm {shlex.quote(self.path)}"
            ) from None
        except PermissionError:
            raise ConfigError(f"'{path}' cannot grow: no right to write in its folder '{os.path.dirname(path)}'") from None
        try:
            with named(path):
                put_at(descriptor, self._text, 0)
        except BaseException:
            os.unlink(self.path)
            raise
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Give it back. May be called again. If somebody has removed it meanwhile, that of another append stays."""
        if _content(self.path) == self._text:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def changed_meanwhile(path: str) -> ConfigError:
    """The error about a file or store that is not what was planned for any more."""
    return ConfigError(f"'{path}' was changed by somebody else during this append. Nothing was appended; run it again")


def _content(path: str) -> bytes:
    """The first bytes of a lock; none if it is gone."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            return file.read(4096)
    except OSError:
        return b""


_WAIT_SECONDS, _PAUSE_SECONDS = 10.0, 0.05
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}  # of a file system


def take_lock(descriptor: int, kind: int) -> bool:
    """Take the system's lock of an open file, without waiting. False if another has it; True if the file system has none."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def wait_for(take: Callable[[], bool]) -> bool:
    """Try to take a lock until that succeeds. False if it takes longer than a program that does not keep it."""
    stop = time.monotonic() + _WAIT_SECONDS
    while not take():
        if time.monotonic() > stop:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True
