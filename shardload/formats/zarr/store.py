"""What does zarr-python read from a store, and where does it come from? A store in between checks every value.

1. `WatchedStore` passes on the values of the store below it. It remembers which keys do not exist. It refuses keys and symbolic
   links that lead out of the store, pipes and other things that are not files, and values that are longer than a stored chunk
   (or metadata) can be.
2. `open_store` makes such a store from a folder, a zip file or a URL. `watch` puts one under an array that is open already.
3. `local_folder` finds the folder of another library's store. A store is refused if it leads elsewhere by design (references),
   or reaches folders in a way that symbolic links cannot be checked.
4. `read_metadata`, `check_metadata` and `zip_entries` limit the size of metadata, and of the directory of a zip file.
5. `nodes_in` finds the arrays and groups of a store that is a folder.
"""

from __future__ import annotations

import io
import json
import os
import stat
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import zarr
import zarr.storage
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from shardload.errors import SourceError
from shardload.formats.containment import TARGET_HINT, Fence, NotAFileError, OutsideError, kind_of, open_file
from shardload.formats.contract.ranges import state_of
from shardload.formats.zarr.codecs import checked

__all__ = [
    "WatchedStore",
    "close_store",
    "inner_store",
    "nodes_in",
    "open_store",
    "read_metadata",
    "watch",
    "zip_entries",
    "zip_state",
]

_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
_MOST_LAYERS = 16  # file systems on top of each other
# Limits of one metadata file. Ten thousand arrays described in one file take 15 MB, and have a million values. For a value,
# which may be two characters, Python takes a hundred bytes.
MOST_METADATA_NBYTES, _MOST_VALUES = 1 << 25, 1 << 21
# Limit of the directory of a zip file: a million entries. For an entry, which may be 47 bytes, Python takes 600.
_MOST_DIRECTORY_NBYTES = 1 << 26


class WatchedStore(zarr.storage.WrapperStore[Any]):
    """A store for reading that checks what is read.

    Parameters
    ----------
    store : zarr.abc.store.Store
        The store that it wraps.
    fence : Fence
        For a store that is a folder: where its files may be.
    opened_in : tuple of int, optional
        The state of a zip file before it was opened.

    Attributes
    ----------
    missing : set of str
        Keys that were requested and do not exist, since the set was last emptied.
    most_nbytes : int or None
        The most bytes that a value may have, except metadata.
    """

    def __init__(self, store: Any, fence: Fence | None = None, opened_in: tuple[int, ...] | None = None) -> None:
        super().__init__(store)
        self._fence, self._opened_in = fence or Fence(), opened_in
        self._seen: dict[str, tuple[int, ...] | None] = {}
        self._folder = local_folder(store)
        self.missing: set[str] = set()
        self.most_nbytes: int | None = None

    @property
    def inner(self) -> Any:
        """The store below."""
        return self._store

    def another_watch(self) -> WatchedStore:
        """A new watch over the same store, so that each array has its own `missing` and `most_nbytes`."""
        return self._with_store(self._store)

    def _with_store(self, store: Any) -> WatchedStore:
        return type(self)(store, self._fence, self._opened_in)

    def state_before(self, key: str) -> tuple[int, ...] | None:
        """The state that a metadata file, or the zip file that it is in, had before it was read; None if it is not known."""
        return self._opened_in or self._seen.get(key)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """The value of `key`; None if it does not exist.

        Raises
        ------
        OSError
            If it leads out of the store, is a link without a target, or is not a file.
        ValueError
            If it is longer than a stored chunk can be.
        """
        self._check_key(key)
        is_metadata = key.rpartition("/")[2] in _METADATA
        if self._folder is not None and is_metadata:
            state = state_of(os.path.join(self._folder, key))
            self._seen.setdefault(key, state)
            self._check_length(key, 0 if state is None else state[0], is_metadata)  # before memory is allocated
        elif self._folder is not None and self.most_nbytes is not None:
            self._check_length(key, self._stored_nbytes(key, byte_range), is_metadata)
        archive = _unwrapped(self._store)
        if isinstance(archive, zarr.storage.ZipStore):
            found = _of_zip(archive, key, prototype, byte_range, MOST_METADATA_NBYTES if is_metadata else self.most_nbytes)
        else:
            found = await self._store.get(key, prototype, byte_range)
        if found is None:
            self.missing.add(key)
        else:
            self._check_length(key, len(found), is_metadata)
            if is_metadata:
                check_metadata(key, found.to_bytes())
        return found

    def _stored_nbytes(self, key: str, byte_range: Any) -> int:
        """The number of bytes requested from a file; 0 if it does not exist."""
        try:
            nbytes = os.stat(os.path.join(self._folder or "", key)).st_size
        except OSError:
            return 0
        ends = [getattr(byte_range, name, None) for name in ("start", "end", "offset", "suffix")]
        start, end, offset, suffix = (nbytes if n is None else int(n) for n in ends)
        return min(nbytes, end - start if end > start else nbytes, nbytes - offset if offset < nbytes else nbytes, suffix)

    def _check_length(self, key: str, nbytes: int, is_metadata: bool) -> None:
        if is_metadata and nbytes > MOST_METADATA_NBYTES:
            raise ValueError(f"'{key}' has {nbytes} bytes; metadata has {MOST_METADATA_NBYTES} at most")
        if not is_metadata and self.most_nbytes is not None and nbytes > self.most_nbytes:
            raise ValueError(f"'{key}' has {nbytes} bytes, what is stored of this array {self.most_nbytes} at most")

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]) -> list[Any]:
        """Byte ranges of several values."""
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
        try:
            mode = os.stat(path).st_mode
        except OSError:
            if os.path.islink(path):
                raise OSError(f"'{path}' is a link to '{os.readlink(path)}', which is not there") from None
            return
        if not stat.S_ISREG(mode):  # zarr-python would wait for a pipe, and take a folder as a missing chunk
            raise NotAFileError(f"'{path}' is {kind_of(mode)}, expected a file")


def open_store(path: str, allow_external: bool = False) -> Any:
    """A watched store for `path`, which `zarr.open` takes."""
    if "://" in path:
        if not allow_external and "reference" in path.lower().split("://")[0].split("::"):
            raise OutsideError(f"it {_REFERENCES}; {TARGET_HINT}")
        try:
            store = zarr.storage.FsspecStore.from_url(path, read_only=True)
        except ValueError as error:  # nothing has been read yet
            raise SourceError(f"'{path}' is a URL that cannot be opened here: {error}. Check it.", path=path) from error
        return WatchedStore(store, _fence_of(store, path, allow_external))
    if os.path.isdir(path):
        return WatchedStore(zarr.storage.LocalStore(path, read_only=True), Fence.around_store(path, allow_external))
    opened_in = state_of(path)
    for entry in zip_entries(path):
        if entry.filename.rpartition("/")[2] in _METADATA and entry.file_size > MOST_METADATA_NBYTES:
            raise ValueError(
                f"'{entry.filename}' would have {entry.file_size} bytes; metadata has {MOST_METADATA_NBYTES} at most"
            )
    return WatchedStore(zarr.storage.ZipStore(path, mode="r", read_only=True), opened_in=opened_in)


def check_metadata(name: str, text: bytes) -> None:
    """Raise ValueError if JSON metadata is too long, or has so many values that Python would take far more memory."""
    if len(text) > MOST_METADATA_NBYTES:
        raise ValueError(f"'{name}' has more than {MOST_METADATA_NBYTES} bytes, the most that metadata has")
    n_values = sum(map(text.count, (b",", b"[", b"{")))
    if n_values > _MOST_VALUES:
        raise ValueError(
            f"'{name}' has some {n_values} values; metadata has {_MOST_VALUES} at most. Put long data into an array"
        )


def read_metadata(path: str) -> tuple[bytes, int] | None:
    """A metadata file, and when it was last changed, in ns; None if there is none. ValueError if it is too long."""
    try:
        descriptor = open_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(descriptor, "rb") as file:
        changed, text = os.fstat(descriptor).st_mtime_ns, file.read(MOST_METADATA_NBYTES + 1)
    check_metadata(path, text)
    return text, changed


def nodes_in(
    path: str, fence: Fence, unread: Callable[[str, OSError], None], name: str = "/", above: frozenset[str] = frozenset()
) -> Iterator[tuple[str, str, bool]]:
    """The arrays of a store that is a folder, and its other folders: name in the store, folder, and whether it is an array.

    Folders need no metadata to have arrays below them. Links that lead out of the store, or to a folder above this one, are not
    followed. `unread` is told of folders that cannot be listed.
    """
    folder = path if name == "/" else os.path.join(path, name.strip("/"))
    real = os.path.realpath(folder)
    if real in above or not fence.holds_real(real):
        return
    is_array = _is_array(folder, fence)
    yield name, folder, is_array
    if is_array:  # its folder is never listed: it may hold a million chunks
        return
    try:
        with os.scandir(folder) as entries:
            below = sorted(entry.name for entry in entries if _may_be_folder(entry))
    except OSError as error:
        if name == "/":
            raise
        unread(name, error)
        return
    for entry in below:
        yield from nodes_in(path, fence, unread, f"{name.rstrip('/')}/{entry}", above | {real})


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to where this user may not look: an array may not be overlooked
        return True


def _is_array(folder: str, fence: Fence) -> bool:
    """True if a folder of a store is an array, by its metadata. Broken or unread metadata counts as an array, to be listed."""
    file = os.path.join(folder, "zarr.json")
    if not fence.holds(file):
        return True
    try:
        found = read_metadata(file)
        if found is None:
            os.stat(os.path.join(folder, ".zarray"))
            return True
        return bool(json.loads(found[0])["node_type"] == "array")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError, LookupError, TypeError):
        return True


def zip_state(store: Any) -> tuple[int, ...] | None:
    """Size and time of last change of an open zip file, whatever has its path now; None if it is not a plain file."""
    if store.path is None:
        return None
    if not getattr(store, "_is_open", False):
        return state_of(os.fspath(store.path))
    try:
        found = state_of(store._zf.fp.fileno())
    except (AttributeError, OSError, ValueError):  # it was closed, or is a file object's
        return None
    return None if found is None else found[:2]  # as by its path, before it is opened


def zip_entries(path: str) -> list[zipfile.ZipInfo]:
    """The entries of a zip file; ValueError if its directory is too long to read."""
    with _ShortReads(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
        return archive.infolist()


def _of_zip(store: zarr.storage.ZipStore, key: str, prototype: Any, byte_range: Any, most_nbytes: int | None) -> Any:
    """A value in a zip file, or a byte range of it; None if it does not exist.

    It never unpacks more than the zip file declares. zarr-python asks Python's zipfile for the whole value, which may unpack
    gigabytes and then cut them. With bzip2 and LZMA, zipfile has no limit at all.
    """
    archive = _archive(store)
    with store._lock:
        try:
            entry = archive.getinfo(key)
        except KeyError:
            return None
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"'{key}' is compressed in the zip file (method {entry.compress_type}) in a way that has no bound; it can be "
                "stored as it is, or deflated. Unpack the zip file, or write it anew"
            )
        start, stop = _range_of(byte_range, entry.file_size)
        if most_nbytes is not None and stop - start > most_nbytes:
            raise ValueError(f"'{key}' would have {stop - start} bytes; {most_nbytes} are the most")
        with archive.open(entry) as file:
            if start:
                file.seek(start)
            return prototype.buffer.from_bytes(file.read(stop - start))


def _archive(store: zarr.storage.ZipStore) -> zipfile.ZipFile:
    """The open archive. It may be a file object's, which has no path, so it is not opened anew."""
    if not store._is_open:
        store._sync_open()
    return store._zf


def _range_of(byte_range: Any, nbytes: int) -> tuple[int, int]:
    """Start and stop of a byte range in a value of `nbytes` bytes, cut at its end."""
    start, stop = 0, nbytes
    if isinstance(byte_range, RangeByteRequest):
        start, stop = byte_range.start, byte_range.end
    elif isinstance(byte_range, OffsetByteRequest):
        start = byte_range.offset
    elif isinstance(byte_range, SuffixByteRequest):
        start = nbytes - byte_range.suffix
    elif byte_range is not None:
        raise TypeError(f"a part of a value given as {byte_range!r}")
    start = min(max(0, start), nbytes)
    return start, max(start, min(stop, nbytes))


class _ShortReads(io.BufferedReader):
    """A file that refuses a single read of too many bytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as from any file; ValueError if it is too much."""
        left = os.fstat(self.fileno()).st_size - self.tell()
        nbytes = left if size is None or size < 0 else min(size, left)
        if nbytes > _MOST_DIRECTORY_NBYTES:
            raise ValueError(
                f"the list of what is in the zip file has {nbytes} bytes; {_MOST_DIRECTORY_NBYTES} are read at most. Unpack it"
            )
        return super().read(size)


def watch(array: Any, allow_external: bool = False) -> Any:
    """The same open array, read through a `WatchedStore` and with `checked` decoders."""
    store = array.store
    if not isinstance(store, WatchedStore):
        store = WatchedStore(store, _fence_of(store, f"the {type(store).__name__} handed in", allow_external))
    below = array.async_array if hasattr(array, "async_array") else array._async_array
    place = zarr.storage.StorePath(store, array.path)
    settings = getattr(below, "config", None) or below._config
    return zarr.Array(zarr.AsyncArray(metadata=checked(array.metadata), store_path=place, config=settings))


_REFERENCES = "names a place for each chunk, which may be anywhere"


def _fence_of(store: Any, name: str, allow_external: bool) -> Fence:
    """Where files of `store` may be; SourceError if that cannot be checked."""
    if allow_external:
        return Fence()
    store = _unwrapped(store)
    if not isinstance(store, _KNOWN_STORES) and type(store).__name__ != "ObjectStore":
        raise SourceError(
            f"'{name}' cannot be loaded: a {type(store).__name__} may read files anywhere, and symbolic links are not looked "
            f"at there. Pass the path of the folder or file, or the store below it, or {TARGET_HINT}."
        )
    kinds = [_kind_of_layer(layer) for layer in _layers(store)]
    if "references" in kinds:
        raise SourceError(f"'{name}' cannot be loaded: it {_REFERENCES}; {TARGET_HINT}.")
    folder = local_folder(store)
    if folder is None and "folder" in kinds:
        raise SourceError(
            f"'{name}' cannot be loaded: it reads a folder through another layer, where symbolic links are not looked at. Pass "
            f"the path of the folder, or {TARGET_HINT}."
        )
    return Fence() if folder is None else Fence.around_store(folder)


def local_folder(store: Any) -> str | None:
    """The folder on this machine that a store reads directly; else None."""
    store = _unwrapped(store)
    if isinstance(store, zarr.storage.LocalStore):
        return os.fspath(store.root)
    layers = _layers(store)
    kinds = [_kind_of_layer(layer) for layer in layers]
    if kinds in (["folder"], ["", "folder"]) and (len(kinds) == 1 or hasattr(layers[0], "sync_fs")):
        if isinstance(store, zarr.storage.FsspecStore):
            return str(store.path).removeprefix("file://")
        return os.fspath(getattr(layers[0], "prefix", None) or "/")
    return None


# It is known where these stores read: in a folder, a file, memory, or through their layers. ObjectStore needs its own library.
_KNOWN_STORES = (zarr.storage.LocalStore, zarr.storage.ZipStore, zarr.storage.MemoryStore, zarr.storage.FsspecStore)


def _unwrapped(store: Any) -> Any:
    """The store below zarr-python's wrappers that only pass requests on. Other wrappers may request anything else."""
    while type(store) in (zarr.storage.WrapperStore, zarr.storage.LoggingStore):
        store = store._store
    return store


def _layers(store: Any) -> list[Any]:
    """The layers through which a store of fsspec or obstore reads, the outermost first."""
    if isinstance(store, zarr.storage.FsspecStore):
        layers: list[Any] = []
        below = store.fs
        while below is not None and len(layers) < _MOST_LAYERS:
            layers.append(below)
            below = getattr(below, "sync_fs", None) or getattr(below, "fs", None)
        return layers
    return [store.store] if type(store).__name__ == "ObjectStore" and hasattr(store, "store") else []


def _kind_of_layer(layer: Any) -> str:
    """``"references"``, ``"folder"`` or ``""``, by the names of its classes: neither library need be installed."""
    names = {kind.__name__ for kind in type(layer).__mro__}
    if "ReferenceFileSystem" in names:
        return "references"
    return "folder" if names & {"LocalFileSystem", "LocalStore"} else ""


def inner_store(store: Store) -> Store:
    """The store below a `WatchedStore`; any other store itself."""
    return store.inner if isinstance(store, WatchedStore) else store


def check_zip(array: Any, most_nbytes: int) -> None:
    """Raise ValueError if a zip file declares more than `most_nbytes` bytes for a stored value of `array`."""
    store = inner_store(array.store)
    if not isinstance(store, zarr.storage.ZipStore):
        return
    prefix = f"{array.path}/" if array.path else ""
    archive = _archive(store)
    with store._lock:
        entries = archive.infolist()
    for entry in entries:
        name = entry.filename
        if name.startswith(prefix) and name.rpartition("/")[2] not in _METADATA and entry.file_size > most_nbytes:
            raise ValueError(f"'{name}' would have {entry.file_size} bytes, what is stored of this array {most_nbytes} at most")


def close_store(store: Any) -> None:
    """Close a store that `open_store` opened."""
    below = inner_store(store)
    # Zarr opens an archive when it first reads from it, and cannot close one that is not open.
    if isinstance(below, zarr.storage.ZipStore) and getattr(below, "_is_open", True):
        store.close()
