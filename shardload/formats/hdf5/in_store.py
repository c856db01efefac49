"""How is an HDF5 or netCDF4 file in an object store opened, or on an HTTP server? By one rank, through blocks that are kept.

`StoreFile` sends no request before something is asked that was not told. The rank that finds the arrays opens the file; HDF5
reads it as a file object (`BlockCache`). To the others that rank tells where chunks are (`told`).
"""

from __future__ import annotations

from typing import Any

from shardload.errors import SourceError
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.hdf5.file import Hdf5File, open_explained
from shardload.formats.hdf5.opened import OpenFacts, kept
from shardload.formats.hdf5.raw_file import signature_at
from shardload.formats.hdf5.source import Hdf5Source
from shardload.formats.hdf5.told import StoreSource, ToldSource
from shardload.storage.block_cache import BlockCache
from shardload.storage.containment import Fence
from shardload.storage.remote import open_remote, without_secrets


class StoreFile(Hdf5File):
    """A file in a store, which is opened when it is first needed.

    Parameters
    ----------
    url : str
        Its URL.
    access : Access
        What the caller allows, with the options of the store.
    """

    _kind_of_source = StoreSource

    def __init__(self, url: str, access: Access) -> None:
        self._path, self._access = without_secrets(url), access
        self._fence = Fence(("://",))  # no folder: nothing is inside
        self._remote = open_remote(url, access.storage)

    @kept
    def _facts(self) -> OpenFacts:
        cache = BlockCache(self._remote.object())
        start = signature_at(cache.read_at_most, lambda: cache.nbytes)
        if start is None:
            raise SourceError(
                f"'{self._path}' is not an HDF5 file: it begins with {cache.read_at_most(0, 8)!r}", path=self._path
            )
        cache.start = start
        return OpenFacts(open_explained(self._path, cache), stored=cache)

    @kept
    def _file(self) -> Any:
        return self._facts.file

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Hdf5Source:
        """Open a dataset: in the file, or by what was told of it."""
        if planned is None or planned.parts is None:
            return super().open(dataset, planned)

        def open_whole() -> Hdf5Source:
            return super(StoreFile, self).open(dataset)

        return ToldSource(planned, self._remote.object(planned.parts["pin"]), self._access, open_whole)

    def state(self) -> tuple[int, ...] | None:
        """The version of the object; None if nothing was read of it yet. All ranks read the version that was told."""
        return super().state() if "_facts" in self.__dict__ else None

    def close(self) -> None:
        """Close the file, if it was opened."""
        if "_facts" in self.__dict__:
            super().close()
