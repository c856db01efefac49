"""How is one file written by many ranks? Each puts bytes at offsets."""

from __future__ import annotations

import os
from typing import Any

from shardload.storage.local import LocalFile
from shardload.storage.target import put_at, reserve


class WritableFile(LocalFile):
    """An open file that is written, too. It must exist, and be no link."""

    def __init__(self, path: str) -> None:
        super().__init__(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), path)

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
