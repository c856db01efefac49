"""Where may a file lead? A fence is the folder that a file, or a store, may refer to, and says what is outside of it.

Compared are the places where names really lead: symbolic links and ``..`` are resolved first. What the caller named is inside,
whatever links lead to it. Nothing outside is opened to find out: a pipe or a device there would act on being opened.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

__all__ = ["TARGET_HINT", "Fence", "OutsideError"]

TARGET_HINT = "pass outside=True (on the command line --outside) if you trust it"


class OutsideError(OSError):
    """A file leads to a place outside of its folder."""


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
    def around_file(cls, path: str, outside: bool = False) -> Fence:
        """The folder that `path` is in, and the one that the file itself is in where `path` is a link to it."""
        if outside:
            return cls()
        return cls(tuple({os.path.realpath(os.path.dirname(path) or "."), os.path.dirname(os.path.realpath(path))}))

    @classmethod
    def around_store(cls, path: str, outside: bool = False) -> Fence:
        """The folder `path` itself."""
        return cls() if outside else cls((os.path.realpath(path),))

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


def why_not_a_file(path: str) -> str | None:
    """What is at `path` in the place of a file, in words that follow "which is"; None for a file. Does not open it."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"not there ({error.strerror})"
    return None if stat.S_ISREG(mode) else "no regular file"
