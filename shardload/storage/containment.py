"""Which other files may a file refer to? A `Fence` is the folder that a file or store may refer to.

1. Paths are compared after symbolic links and ``..`` are resolved.
2. The file that the caller named is always inside, also if it is reached by links.
3. Nothing outside the fence is opened to find that out.
4. Only regular files are opened: a pipe would wait for its writer, and a device may act or never end.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

TARGET_HINT = "pass allow_external=True if you trust it"


class OutsideError(OSError):
    """A file refers to a path outside its folder."""


class NotAFileError(OSError):
    """The path is not a regular file but, for example, a pipe or a folder."""


@dataclass(frozen=True)
class Fence:
    """The folders that a file may refer to.

    Attributes
    ----------
    folders : tuple of str
        Resolved paths. Empty: everything is inside.
    """

    folders: tuple[str, ...] = ()

    @classmethod
    def around_file(cls, path: str, allow_external: bool = False) -> Fence:
        """The folder of `path`, and the folder of the file itself if `path` is a symbolic link."""
        if allow_external:
            return cls()
        folder = os.path.realpath(os.path.dirname(path) or ".")
        if not os.path.islink(path):  # then the file is in that folder, and nothing else has to be resolved
            return cls((folder,))
        return cls(tuple({folder, os.path.dirname(os.path.realpath(path))}))

    @classmethod
    def around_store(cls, path: str, allow_external: bool = False) -> Fence:
        """The folder `path` itself."""
        return cls() if allow_external else cls((os.path.realpath(path),))

    def holds(self, path: str) -> bool:
        """True if `path`, resolved, is inside. It need not exist."""
        return not self.folders or self._is_inside(os.path.realpath(path))

    def holds_real(self, path: str) -> bool:
        """The same for a path without symbolic links."""
        return not self.folders or self._is_inside(path)

    def holds_open(self, descriptor: int, path: str) -> bool:
        """The same for an open file: by where it really is, even if its name has changed since."""
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
    """The kind of a file by its mode from `os.stat`: ``"a file"``, ``"a pipe"``."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "of an unknown kind")


def why_not_a_file(path: str) -> str | None:
    """What `path` is if it is not a file, in words that follow "which is"; None for a file. Does not open it."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"not there ({error.strerror})"
    except ValueError:  # a byte that is zero
        return "not there (no file has such a name)"
    return None if stat.S_ISREG(mode) else f"{kind_of(mode)}, expected a file"


def open_file(path: str) -> int:
    """Open a regular file for reading and return its descriptor.

    Anything else is not opened. If the file is replaced by a pipe or device meanwhile, the open does not wait.

    Raises
    ------
    NotAFileError
        If it is not a regular file.
    OSError
        If it does not exist or cannot be opened.
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
