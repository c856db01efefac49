"""Where may a file lead? A fence is the folder that a file, or a store, may refer to, and says what is outside of it.

Compared are the places where names really lead: symbolic links and ``..`` are resolved first. What the caller named is inside,
whatever links lead to it. Nothing outside is opened to find out, nor anything that is no file: a pipe waits for whoever writes
to it, and a device may act, or never end.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

__all__ = ["TARGET_HINT", "Fence", "NotAFileError", "OutsideError", "kind_of", "open_file", "why_not_a_file"]

TARGET_HINT = "pass allow_external=True if you trust it"


class OutsideError(OSError):
    """A file leads to a place outside of its folder."""


class NotAFileError(OSError):
    """Something else has the place of a file: a pipe, a folder."""


@dataclass(frozen=True)
class Fence:
    """The folders that a file may lead to.

    Attributes
    ----------
    folders : tuple of str
        Resolved. None at all: everything is inside.
    """

    folders: tuple[str, ...] = ()

    @classmethod
    def around_file(cls, path: str, allow_external: bool = False) -> Fence:
        """The folder that `path` is in, and the one that the file itself is in where `path` is a link to it."""
        if allow_external:
            return cls()
        return cls(tuple({os.path.realpath(os.path.dirname(path) or "."), os.path.dirname(os.path.realpath(path))}))

    @classmethod
    def around_store(cls, path: str, allow_external: bool = False) -> Fence:
        """The folder `path` itself."""
        return cls() if allow_external else cls((os.path.realpath(path),))

    def holds(self, path: str) -> bool:
        """Whether `path` leads to a place inside; it need not exist."""
        return not self.folders or self._is_inside(os.path.realpath(path))

    def holds_open(self, descriptor: int, path: str) -> bool:
        """The same for an open file: where it really is, whatever happened to its name since."""
        if not self.folders:
            return True
        try:
            return self._is_inside(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # no /proc here
            return self.holds(path)

    def _is_inside(self, real: str) -> bool:
        return any(real == folder or real.startswith(folder.rstrip("/") + "/") for folder in self.folders)


_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(mode: int) -> str:
    """What `os.stat` says that something is: ``"a file"``, ``"a pipe"``."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "of an unknown kind")


def why_not_a_file(path: str) -> str | None:
    """What is at `path` in the place of a file, in words that follow "which is"; None for a file. Does not open it."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"not there ({error.strerror})"
    except ValueError:  # a byte that is zero
        return "not there (no file has such a name)"
    return None if stat.S_ISREG(mode) else f"{kind_of(mode)}, expected a file"


def open_file(path: str) -> int:
    """Open a file for reading; its descriptor. What is no file is not opened, nor waited for where it becomes that meanwhile.

    Raises
    ------
    NotAFileError
        If it is none.
    OSError
        If it is not there, or cannot be opened.
    """
    _check_is_file(os.stat(path).st_mode, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_is_file(os.fstat(descriptor).st_mode, path)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _check_is_file(mode: int, path: str) -> None:
    if not stat.S_ISREG(mode):
        raise NotAFileError(f"'{path}' is {kind_of(mode)}, expected a file")
