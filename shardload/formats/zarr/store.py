"""How is a Zarr store read? Through a `WatchedStore`, which checks every value.

1. `WatchedStore` has the values of a folder of objects, here or at a URL, or of a store of another library. It
   remembers which keys do not exist. It refuses symbolic links that lead out of the store (names that do are refused by `node`
   and zarr-python), pipes and other things that are not files, and values that are longer than a stored chunk (or metadata)
   can be.
2. `WatchedStore.read` gives one file of metadata, `node` what is in one folder (module `nodes`), and `nodes` all arrays and
   groups. At a URL, where each answer takes long, the metadata of many folders are fetched at once, and kept.
3. `open_store` makes such a store from a folder, a set of references or a URL. `watch` opens an array of it, `watched` puts it
   under an array that is open already.
4. A store of another library is refused if it leads elsewhere by design (references), or reads folders in a way in which
   symbolic links cannot be checked.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import zarr
import zarr.storage
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from shardload.errors import SourceError, is_unread
from shardload.formats.access import STRICT, Access
from shardload.formats.zarr.nodes import ArrayNode, GroupNode, Node, checked, parse_node
from shardload.formats.zarr.references import SUFFIXES, ReferenceFolder, folders_of, is_references
from shardload.storage.leftovers import METADATA, NODE_FILES
from shardload.storage.local import TARGET_HINT, Fence, LocalFolder, state_of
from shardload.storage.objects import NoListingError, ObjectFolder, RemoteError, read_content
from shardload.storage.remote import RemoteFolder, is_remote, open_remote, without_secrets
from shardload.storage.target import FOLDER_MARK
from shardload.system.steps import step_done

State = tuple[int, ...] | None

_NO_STORE = "there is no Zarr store: none of zarr.json, .zarray, .zgroup and .zmetadata"
_MANY_FOLDERS = 8  # from so many on, the first one is asked for alone, and says which format it is
_UNFINISHED = f"is no store yet: a save to it goes on, or was killed ('{FOLDER_MARK}' is there, and no metadata of the root)"
# Limits of one metadata file. Ten thousand arrays described in one file take 15 MB, and have a million values. For a value,
# which may be two characters, Python takes a hundred bytes.
MOST_METADATA_NBYTES, _MOST_VALUES = 1 << 25, 1 << 21
_MOST_VALUE_NBYTES = 1 << 40  # of a value without another limit


class WatchedStore(zarr.storage.WrapperStore[Any]):
    """A store for reading that checks what is read.

    Parameters
    ----------
    store : zarr.abc.store.Store
        The store that it wraps.
    fence : Fence
        For a store that is a folder: where its files may be.
    folder : ObjectFolder, optional
        What is read in place of the store.

    Attributes
    ----------
    folder : ObjectFolder or None
        The store below, if its objects can be read by ranges.
    missing : set of str
        Keys that were requested and do not exist, since the set was last emptied.
    most_nbytes : int
        The most bytes that a value may have, except metadata.
    """

    def __init__(self, store: Any, fence: Fence | None = None, folder: ObjectFolder | None = None) -> None:
        super().__init__(store)
        self.fence = fence or Fence()
        self._states: dict[str, State] = {}  # of metadata files, before they were read
        self._remote_files: dict[str, tuple[bytes | OSError | None, State]] = {}  # metadata at a URL: content, state
        self._listing: Mapping[str, list[str]] | None = None  # the folders below each folder, if these cannot be listed
        below = _unwrapped(store)
        is_local = folder is None and type(below) is zarr.storage.LocalStore
        self.folder = LocalFolder(os.fspath(below.root), self.fence) if is_local else folder
        self.missing: set[str] = set()
        self.most_nbytes = _MOST_VALUE_NBYTES

    def another_watch(self) -> WatchedStore:
        """A new watch over the same store, so that each array has its own `missing` and `most_nbytes`."""
        watch = self._with_store(self._store)
        watch._remote_files = self._remote_files
        return watch

    def _with_store(self, store: Any) -> WatchedStore:
        return type(self)(store, self.fence, None if isinstance(self.folder, LocalFolder) else self.folder)

    # --- metadata

    def read(self, key: str) -> bytes | None:
        """A file of metadata; None if it does not exist. Errors are those of `get`."""
        if isinstance(self.folder, RemoteFolder):
            return self._read_remote(key)
        if not isinstance(self.folder, ReferenceFolder):
            self._states.setdefault(key, self.state(key))
        if self.folder is not None:
            return self._value(self.folder, key, None)
        value = sync(self.get(key, default_buffer_prototype()))
        return None if value is None else bytes(value.to_bytes())

    def _read_remote(self, key: str) -> bytes | None:
        """The same at a URL. Where keys may not be listed, S3 refuses those that are absent: no error if others are there."""
        folder, _, name = key.rpartition("/")
        if name in NODE_FILES:
            self._fetch_nodes([folder])
        else:
            self._fetch([key])
        content, _ = self._remote_files.get(key, (None, None))
        if isinstance(content, OSError):
            siblings = [self._remote_files.get(os.path.join(folder, sibling), (None,))[0] for sibling in NODE_FILES]
            if content.errno != errno.EACCES or not any(isinstance(sibling, bytes) for sibling in siblings):
                raise content
            return None
        return content

    def _fetch_nodes(self, folders: Iterable[str]) -> None:
        """Fetch the metadata of some folders at a URL, all together. The first one says which format it is, so that of many
        others only those files are asked for that they have.
        """
        if not isinstance(self.folder, RemoteFolder):
            return
        folders = list(folders)
        for some_folders in (folders[:1], folders) if len(folders) >= _MANY_FOLDERS else (folders,):
            if self._is_format_3:
                self._fetch([os.path.join(folder, "zarr.json") for folder in some_folders])
                some_folders = [folder for folder in some_folders if not self._has(os.path.join(folder, "zarr.json"))]
            self._fetch([os.path.join(folder, name) for folder in some_folders for name in NODE_FILES])

    def _has(self, key: str) -> bool:
        """True if a metadata file at a URL was fetched, and exists."""
        return isinstance(self._remote_files.get(key, (None, None))[0], bytes)

    @property
    def _is_format_3(self) -> bool:
        """True if the first metadata file at a URL that was found is one of format 3."""
        first = next(filter(self._has, list(self._remote_files)), "")  # (other threads add to it)
        return first.endswith("zarr.json")

    def _fetch(self, keys: Sequence[str]) -> None:
        """Fetch files of metadata at a URL, and keep them, unless they were fetched before."""
        new_keys = [key for key in keys if key not in self._remote_files]
        if isinstance(self.folder, RemoteFolder) and new_keys:
            for key, answer in zip(new_keys, self.folder.look(new_keys, MOST_METADATA_NBYTES), strict=True):
                content, version = answer if isinstance(answer, tuple) else (answer, None)
                if isinstance(content, bytes):
                    self._check(key, len(content), partial(bytes, content))
                self._remote_files[key] = content, version

    def expect(self, names: Iterable[str]) -> None:
        """Fetch the metadata of some arrays and groups of a store at a URL."""
        with suppress(OSError, ValueError):  # `node` says why
            self._fetch_nodes(dict.fromkeys(name.strip("/") for name in names))

    def node(self, name: str) -> ArrayNode | GroupNode | None:
        """The array or group of this name; None if there is none. KeyError for names that Zarr cannot have."""
        step_done()
        folder = name.strip("/")
        if folder and any(part in ("", ".", "..") for part in folder.split("/")):
            raise KeyError(name)
        return parse_node(lambda key: self.read(os.path.join(folder, key)))

    def nodes(self, name: str = "/") -> Iterator[tuple[str, Node]]:
        """All arrays and groups by their names, sorted: a folder, perhaps one itself, and all folders below it.

        zarr-python's own walk stops at the first array that it cannot read, warns of every stray file, and leaves out what is
        below folders without metadata. Here the error stands in the place of a node that cannot be read, unless it is the root,
        and folders without metadata are listed, too. Consolidated metadata may be out of date: they only name the arrays, where
        folders cannot be listed.

        Raises
        ------
        NoListingError
            If folders cannot be listed, and nothing names the arrays.
        """
        node: Node | None
        try:
            node = self.node(name)
        except Exception as error:
            if name == "/" or is_unread(error):
                raise
            node = error.with_traceback(None)  # which has this frame, and so the error: a cycle
        if node is not None:
            yield name, node
        if isinstance(node, ArrayNode | Exception):
            return  # an array's folder is never listed: it may hold a million chunks
        try:
            below = [f"{name.rstrip('/')}/{entry}" for entry in self._folders(name.strip("/"))]
            if name == "/" and node is None and isinstance(self.folder, RemoteFolder):
                if self.folder.version(FOLDER_MARK) is not None:
                    raise RemoteError(errno.EBUSY, f"'{self.folder.name}' {_UNFINISHED}")
                if not below:
                    raise FileNotFoundError(_NO_STORE)
        except OSError as error:
            if name == "/":
                raise
            yield name, error
            return
        self._fetch_nodes(entry.strip("/") for entry in below)
        for entry in below:
            yield from self.nodes(entry)

    def _folders(self, name: str) -> list[str]:
        """The names of the folders below a folder. Where they cannot be listed, those that consolidated metadata name."""
        if self._listing is None and self.folder is not None:
            try:
                return self.folder.folders(name)
            except NoListingError as error:
                keys = self._consolidated_keys(error)
                self._listing = folders_of(keys)
                self._fetch_nodes({key.rpartition("/")[0] for key in keys})
        return (self._listing or {}).get(name, [])

    def _consolidated_keys(self, error: NoListingError) -> list[str]:
        """The keys of metadata files that the root's consolidated metadata name. `error` says why folders cannot be listed."""
        for file in ("zarr.json", ".zmetadata"):
            document = json.loads(self.read(file) or b"{}")
            consolidated = document.get("consolidated_metadata") or {} if file == "zarr.json" else document
            if isinstance(names := consolidated.get("metadata"), dict):
                return list(names) if file == ".zmetadata" else [f"{name}/zarr.json" for name in names]
        if not any(map(self._has, self._remote_files)):
            raise FileNotFoundError(_NO_STORE)
        raise NoListingError(
            f"{error}, and its root has no consolidated metadata, which would name the arrays. Pass the name of one: URL:/NAME"
        )

    # --- states

    def state(self, key: str) -> tuple[int, ...] | None:
        """The present state of a file, or of the zip file handed in that it is in; None if it is not known."""
        if self.folder is not None:
            return self.folder.version(key)
        store = _unwrapped(self._store)
        has_path = isinstance(store, zarr.storage.ZipStore) and store.path is not None
        return state_of(os.fspath(store.path)) if has_path else None

    def state_before(self, key: str) -> tuple[int, ...] | None:
        """The state of a metadata file, or of a set of references, before it was read; None if it is not known."""
        if isinstance(self.folder, ReferenceFolder):
            return self.folder.opened_in
        return self._states.get(key) or self._remote_files.get(key, (None, None))[1]

    # --- values, as zarr-python asks for them

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """The value of `key`; None if it does not exist.

        Raises
        ------
        OSError
            If it leads out of the store, is a link without a target, or is not a file.
        ValueError
            If it is longer than a stored chunk (or metadata) can be.
        """
        if self.folder is not None:
            value = await asyncio.to_thread(self._value, self.folder, key, byte_range)
            buffer = None if value is None else prototype.buffer.from_bytes(value)
        else:
            buffer = await self._store.get(key, prototype, byte_range)
            if buffer is not None:
                self._check(key, len(buffer), buffer.to_bytes)
        if buffer is None:
            self.missing.add(key)
        return buffer

    def _value(self, folder: ObjectFolder, key: str, byte_range: Any) -> bytes | None:
        """A value in a folder, or a byte range of it; None if it does not exist."""
        most = self._most(key)
        if byte_range is None and not isinstance(folder, LocalFolder):  # of which opening one is a request, or reads it
            (content,) = folder.read_many([key], most)
            value = None if content is None else bytes(content)
        else:
            file = folder.open(key)
            value = None if file is None else read_content(file, key, most, _range_of(byte_range, file.nbytes)).tobytes()
        if value is not None:
            self._check(key, len(value), lambda: value)
        return value

    def _most(self, key: str) -> int:
        """The most bytes that a value can have."""
        return MOST_METADATA_NBYTES if key.rpartition("/")[2] in METADATA else self.most_nbytes

    def _check(self, key: str, nbytes: int, content: Callable[[], bytes] | None = None) -> None:
        """ValueError if a value is longer than it can be, or metadata have so many values that Python would take far more."""
        is_metadata, most = key.rpartition("/")[2] in METADATA, self._most(key)
        if nbytes > most:
            raise ValueError(f"'{key}' has {nbytes} bytes, what is stored there {most} at most")
        if is_metadata and content is not None and (n := sum(map(content().count, (b",", b"[", b"{")))) > _MOST_VALUES:
            raise ValueError(f"'{key}' has some {n} values; metadata has {_MOST_VALUES} at most. Put long data into an array")

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]) -> list[Any]:
        """Byte ranges of several values."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    _get_many = Store._get_many  # calls `get` for each


def open_store(path: str, access: Access = STRICT) -> WatchedStore:
    """A watched store for a path."""
    is_url = is_remote(path)
    if is_url or is_references(path):
        nothing = zarr.storage.MemoryStore(read_only=True)
        if is_url and not without_secrets(path).rstrip("/").lower().endswith(SUFFIXES):
            return WatchedStore(nothing, folder=open_remote(path, access.storage))
        return WatchedStore(nothing, folder=ReferenceFolder(path, access))
    return WatchedStore(zarr.storage.LocalStore(path, read_only=True), Fence.around_store(path, access.allow_external))


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


def watch(node: ArrayNode, store: WatchedStore, path: str, settings: Any = None) -> Any:
    """An array of a store, open, with `checked` decoders."""
    place = zarr.storage.StorePath(store, path.strip("/"))
    return zarr.Array(zarr.AsyncArray(metadata=checked(node.metadata), store_path=place, config=settings))


def watched(array: Any, allow_external: bool = False) -> Any:
    """An open array, read through a `WatchedStore`."""
    store = WatchedStore(array.store, _fence_of(array.store, allow_external))
    below = array.async_array if hasattr(array, "async_array") else array._async_array
    return watch(ArrayNode.of(array), store, array.path, getattr(below, "config", None) or below._config)


def _fence_of(store: Any, allow_external: bool) -> Fence:
    """Where files of a store that was handed in may be; SourceError if that is not known."""
    below = _unwrapped(store)
    if allow_external or isinstance(below, zarr.storage.MemoryStore | zarr.storage.ZipStore):
        return Fence()
    if type(below) is zarr.storage.LocalStore:  # one derived of it may read anywhere
        return Fence.around_store(os.fspath(below.root))
    kind = type(below).__name__
    raise SourceError(
        f"an array of a {kind} was handed in, which may read files anywhere. Pass the path or URL of the store in place of the "
        f"array, or {TARGET_HINT}"
    )


def _unwrapped(store: Any) -> Any:
    """The store below zarr-python's wrappers that only pass requests on. Other wrappers may request anything else."""
    while type(store) in (zarr.storage.WrapperStore, zarr.storage.LoggingStore):
        store = store._store
    return store
