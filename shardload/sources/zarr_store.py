"""What does zarr-python get from a store, and where does that come from? Looked at on its way.

1. `WatchedStore` passes on what the store below it has. It remembers which keys were asked for and are not there, refuses keys
   and symbolic links that lead out of the store, and values that are longer than a stored chunk can be.
2. `open_store` makes a path, a zip file or a URL into one; `watch` puts one under an array that is open already.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

import zarr
import zarr.storage
from zarr.abc.store import Store

from shardload.sources.fence import TARGET_HINT, Fence, OutsideError
from shardload.sources.zarr_codecs import checked

__all__ = ["WatchedStore", "close_store", "inner_store", "open_store", "watch"]

_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
_MOST_METADATA_NBYTES = 1 << 28


class WatchedStore(zarr.storage.WrapperStore[Any]):
    """A store for reading that is looked at.

    Parameters
    ----------
    store : zarr.abc.store.Store
        What it wraps.
    fence : Fence
        Where files of a store that is a folder may be.

    Attributes
    ----------
    absent : set of str
        Keys that were asked for and are not there, since it was last emptied.
    most_nbytes : int or None
        How long a value other than metadata may be.
    """

    def __init__(self, store: Any, fence: Fence | None = None) -> None:
        super().__init__(store)
        self._fence = fence or Fence()
        self._folder = os.fspath(store.root) if isinstance(store, zarr.storage.LocalStore) else None
        self.absent: set[str] = set()
        self.most_nbytes: int | None = None

    @property
    def inner(self) -> Any:
        """The store below."""
        return self._store

    def _with_store(self, store: Any) -> WatchedStore:
        return type(self)(store, self._fence)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """The value of `key`; None where there is none.

        Raises
        ------
        OSError
            If it leads out of the store, or to a link without a target.
        ValueError
            If it is longer than a stored chunk can be.
        """
        self._check_key(key)
        found = await self._store.get(key, prototype, byte_range)
        if found is None:
            if self._folder is not None and os.path.exists(os.path.join(self._folder, key)):
                raise OSError(f"'{os.path.join(self._folder, key)}' is no file")  # zarr-python takes a folder for a lost chunk
            self.absent.add(key)
        elif self.most_nbytes is not None and len(found) > self.most_nbytes and key.rpartition("/")[2] not in _METADATA:
            raise ValueError(f"'{key}' has {len(found)} bytes, what is stored of this array {self.most_nbytes} at most")
        return found

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]) -> list[Any]:
        """Parts of several values."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    def _get_many(self, requests: Iterable[tuple[str, Any, Any]]) -> AsyncGenerator[tuple[str, Any], None]:
        return self._one_by_one(requests)

    async def _one_by_one(self, requests: Iterable[tuple[str, Any, Any]]) -> AsyncGenerator[tuple[str, Any], None]:
        for request in requests:
            yield request[0], await self.get(*request)

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Names directly below `prefix`."""
        return self._store.list_dir(prefix)  # type: ignore[no-any-return]

    def _check_key(self, key: str) -> None:
        if ".." in key.split("/"):
            raise OutsideError(f"the key '{key}' leads out of the store")
        if self._folder is None:
            return
        path = os.path.join(self._folder, key)
        if not self._fence.holds(path):
            raise OutsideError(f"'{path}' is a link to '{os.path.realpath(path)}', outside the store; {TARGET_HINT}")
        if os.path.islink(path) and not os.path.exists(path):
            raise OSError(f"'{path}' is a link to '{os.readlink(path)}', which is not there")


def open_store(path: str, outside: bool = False) -> Any:
    """What `zarr.open` takes for `path`: a watched store, or the URL itself."""
    if "://" in path:
        return path
    if os.path.isdir(path):
        return WatchedStore(zarr.storage.LocalStore(path, read_only=True), Fence.around_store(path, outside))
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.rpartition("/")[2] in _METADATA and entry.file_size > _MOST_METADATA_NBYTES:
                raise ValueError(f"'{entry.filename}' would have {entry.file_size} bytes, which is no metadata")
    return WatchedStore(zarr.storage.ZipStore(path, mode="r", read_only=True))


def watch(array: Any, outside: bool = False) -> Any:
    """The same open array, read through a `WatchedStore`, and by decoders that are `checked`."""
    store = array.store
    if not isinstance(store, WatchedStore):
        fence = Fence.around_store(os.fspath(store.root), outside) if isinstance(store, zarr.storage.LocalStore) else Fence()
        store = WatchedStore(store, fence)
    below = array.async_array if hasattr(array, "async_array") else array._async_array
    place = zarr.storage.StorePath(store, array.path)
    settings = getattr(below, "config", None) or below._config
    return zarr.Array(zarr.AsyncArray(metadata=checked(array.metadata), store_path=place, config=settings))


def inner_store(store: Store) -> Store:
    """The store itself, where `store` is one that watches it."""
    return store.inner if isinstance(store, WatchedStore) else store


def check_zip(array: Any, most_nbytes: int) -> None:
    """ValueError if a zip file declares more than `most_nbytes` bytes for something stored of `array`."""
    store = inner_store(array.store)
    if not isinstance(store, zarr.storage.ZipStore):
        return
    prefix = f"{array.path}/" if array.path else ""
    with zipfile.ZipFile(store.path) as archive:
        for entry in archive.infolist():
            name = entry.filename
            if name.startswith(prefix) and name.rpartition("/")[2] not in _METADATA and entry.file_size > most_nbytes:
                raise ValueError(
                    f"'{name}' would have {entry.file_size} bytes, what is stored of this array {most_nbytes} at most"
                )


def close_store(store: Any) -> None:
    """Close what `open_store` opened."""
    if isinstance(inner_store(store), zarr.storage.ZipStore):
        store.close()
