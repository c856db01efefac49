"""Which chunk of the file is that? Names a place in the file for people: in an error, or while it is being read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from shardload.comm.watchdog import Activity
from shardload.errors import SourceError
from shardload.formats.contract.format import ChangedError, HelperError, Source, UndecodedError
from shardload.planning.region import Grid, Region
from shardload.planning.selection import Selection
from shardload.storage.local import NotAFileError, OutsideError
from shardload.storage.remote import RemoteError

# Errors that a new copy of the file would not fix.
_SAYS_WHY = (ChangedError, OutsideError, NotAFileError, HelperError, MemoryError, RemoteError, UndecodedError)


class Naming:
    """Names of places in one open source.

    Parameters
    ----------
    source : Source
        Open array.
    selection : Selection
        The elements of the source that make up the loaded array.
    chunks : Grid or None
        The loaded array cut into the file's chunks; None if the file has none.
    """

    def __init__(self, source: Source, selection: Selection, chunks: Grid | None) -> None:
        self._source, self._selection, self._chunks = source, selection, chunks
        self._chunk_shape = source.info.chunks or ()
        self._reading: dict[int, Region] = {}  # for each thread, the region that it is reading
        self._n_read = 0
        self._lock = threading.Lock()

    @contextmanager
    def at(self, region: Region) -> Iterator[None]:
        """Note that this thread reads a region of the file, so that `activity` can say so."""
        self._reading[threading.get_ident()] = region
        try:
            yield
        finally:
            del self._reading[threading.get_ident()]
            with self._lock:
                self._n_read += 1

    def activity(self) -> Activity:
        """How many chunks and blocks have been read, and the oldest of those that are being read."""
        for region in [*self._reading.values()][:1]:
            return Activity(self._n_read, f"reading {self.being_read(region)}")
        return Activity(self._n_read)

    def index(self, region: Region) -> tuple[int, ...]:
        """The index of the chunk in which a region begins, in the file's grid of chunks."""
        place = self._selection.to_file(region)
        return tuple(a // c for a, c in zip(place.start, self._chunk_shape, strict=True))

    def elements(self, place: Region) -> str:
        """Name elements of the file."""
        return f"{self._source.info}, elements {place},"

    def being_read(self, region: Region) -> str:
        """Name the region that is being read: by its chunk, if it lies in one."""
        info, place = self._source.info, self._selection.to_file(region)
        if self._chunks is not None and self._chunks.n_meeting(region) == 1:
            return f"chunk {self.index(region)} of {info}"
        return f"elements {place} of {info}"

    def explain(self, error: Exception, region: Region) -> SourceError:
        """Turn a read error into one that names the chunk. To find it, the chunks of the region are read again one by one."""
        for _, cell in () if self._chunks is None else self._chunks.cut(region):
            place = self._selection.to_file(cell)
            try:
                self._source.read_into(place, np.empty(place.shape, dtype=self._source.dtype))
            except Exception as closer:
                return self.unreadable(closer, cell, self.index(cell))
        return self.unreadable(error, region, None)

    def unreadable(self, error: Exception, region: Region | None = None, chunk: tuple[int, ...] | None = None) -> SourceError:
        """The error for a region, or an array, that could not be read. It names the chunk, if that is known."""
        info = self._source.info
        subject = f"chunk {chunk} of {info}" if chunk is not None else str(info)
        where = "" if region is None else f" (elements {self._selection.to_file(region)})"
        text = f"{subject} could not be read{where}: {type(error).__name__}: {error}. "
        if self._has_changed(error):
            text += (
                "The file has changed since it was opened, which may be the cause; nothing was loaded. Load it again when "
                "nothing writes to it any more"
            )
        elif isinstance(error, _SAYS_WHY):
            text += "Nothing was loaded"
        else:
            text += (
                "The file may be damaged, incomplete or out of reach there; nothing was loaded. Copy it again or recreate it"
            )
        return SourceError(text, path=info.path, dataset=info.dataset, chunk=chunk)

    def _has_changed(self, error: Exception) -> bool:
        """True if the file is another one than when it was opened. (A helper that has failed is asked nothing.)"""
        before = self._source.opened_in
        if before is None or isinstance(error, ChangedError | HelperError | MemoryError):  # the first says so already
            return False
        with suppress(RemoteError):  # of a store that refuses this, too
            return self._source.state() != before
        return False
