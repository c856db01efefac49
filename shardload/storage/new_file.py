"""How is one file written by many ranks? Each puts bytes at offsets, under a temporary name until all are there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from shardload.storage.local import LocalFile
from shardload.storage.target import Target, mark, named, put_at, reserve, sync_folder

Change = tuple[int, bytes]
"""An offset, and the bytes that will be there."""


class WritableFile(LocalFile):
    """An open file that is written, too. It is no link, and must exist, unless `flags` say something else."""

    def __init__(self, path: str, flags: int = os.O_RDWR) -> None:
        super().__init__(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), path)

    @property
    def descriptor(self) -> int:
        """For the locks of the system."""
        return self._descriptor

    def write_at(self, data: Any, offset: int) -> None:
        """Write some bytes, all of them."""
        put_at(self._descriptor, data, offset)

    def resize(self, nbytes: int) -> None:
        """Cut it, or make it longer."""
        os.ftruncate(self._descriptor, nbytes)

    def reserve(self, start: int, stop: int) -> int:
        """Ask the file system for the space of these bytes: see `target.reserve`."""
        return reserve(self._descriptor, start, stop)

    def sync(self) -> None:
        """Wait until it is on disk."""
        os.fsync(self._descriptor)


class NewFile(WritableFile):
    """A new file, open on the rank that makes it. `discard` removes it, unless it was published.

    Parameters
    ----------
    path : str
        The name that it will have.
    mode : str
        See `Target`.

    Attributes
    ----------
    temporary : str
        Its name until then. Other ranks open it, and compare its first bytes (`check_mark`).
    """

    def __init__(self, path: str, mode: str) -> None:
        self._target = Target(path, mode)
        self.temporary = self._target.create()
        try:
            with named(path):
                super().__init__(self.temporary)
                self.write_at(mark(self._target.token, path), 0)
        except BaseException:
            self.discard()
            raise

    def finish(self, nbytes: int, changes: Iterable[Change]) -> None:
        """Write what makes the file a file, when all else is there; and close it."""
        self.resize(nbytes)
        self.sync()
        for offset, data in changes:
            self.write_at(data, offset)
        self.sync()
        sync_folder(self._target.folder)
        self.close()

    def publish(self) -> None:
        """Give the finished file its name. ConfigError if the name is taken."""
        self._target.commit()

    def discard(self) -> None:
        """Remove it, unless it was published. May be called again. Never raises OSError."""
        with suppress(OSError):
            self.close()
        self._target.abandon()
