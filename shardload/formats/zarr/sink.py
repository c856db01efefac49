"""How is a Zarr store written by many processes? Each puts whole chunk files, or chunks into shard files; metadata comes last.

1. Without shards a chunk is a file of its own: nobody is asked where it goes.
2. The chunks of a shard are encoded by anyone. The catalog gives each its offset by a running sum, and at the end writes the
   index behind the last one, with its CRC-32C.
3. The store is a folder with a temporary name, without metadata. `ZarrCatalog.finish` writes that of the arrays, then that of
   the groups, the root's last.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import google_crc32c
import numpy as np

from shardload.errors import ConfigError
from shardload.formats.codecs.chains import EncodeChain
from shardload.formats.sink import (
    ArraySpec,
    Catalog,
    Encoder,
    Places,
    Sink,
    Stored,
    Ticket,
    Writer,
    with_dims,
)
from shardload.formats.zarr.encodings import document_of, fill_of, group_document, plain_attrs
from shardload.formats.zarr.left import PART, UnfinishedStore, find_left, open_locked, whole_files
from shardload.formats.zarr.metadata import Json, ZarrLayout
from shardload.planning.grid import unravel
from shardload.planning.region import Region
from shardload.storage.leftovers import ROOTS
from shardload.storage.target import FOLDER_MARK, GROWTH_MARK, Target, check_mark, mark, named, put_at, sync_folder

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
_MOST_OPEN = 64  # files that wait for their fsync
_MOST_BEHIND = 4096  # writes into them
_MOST_BEHIND_NBYTES = 64 << 20  # if another job may go on: about what a kill costs a rank
_MISSING = np.uint64(2**64 - 1)

_MOST_NAME_NBYTES = 255  # of a file or folder
_TAKEN = {"zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata", FOLDER_MARK}


class ZarrEncoder(Encoder):
    """See `Encoder`."""

    def __init__(self, path: str, name: str, spec: ArraySpec, document: Json, layout: ZarrLayout, fill: Any) -> None:
        is_asked = layout.per_shard is not None
        super().__init__(path, name, spec, f"Zarr v{layout.version}", layout.codec, is_asked=is_asked)
        self.document, self.layout = document, layout
        self._chain = EncodeChain(layout.steps, spec.chunks, spec.dtype, fill)

    @classmethod
    def new(cls, path: str, name: str, spec: ArraySpec, version: int) -> ZarrEncoder:
        """That of a new array."""
        document = document_of(name, spec, version)
        return cls(path, name, spec, document, ZarrLayout.of(document, spec.dtype), fill_of(spec))

    def _encode(self, values: np.ndarray[Any, Any]) -> Stored:
        return Stored(self._chain.encode(values))

    def shard_of(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """The shard of a chunk; the chunk's own position if there are no shards."""
        per = self.layout.per_shard
        return index if per is None else tuple(k // n for k, n in zip(index, per, strict=True))

    @property
    def shard_grid(self) -> tuple[int, ...]:
        """Shard files along each axis."""
        per = self.layout.per_shard or (1,) * len(self.spec.grid)
        return tuple(-(-n // m) for n, m in zip(self.spec.grid, per, strict=True))

    def file_of(self, index: tuple[int, ...]) -> str:
        """The file of a chunk, relative to the store."""
        return os.path.join(self.name.strip("/"), self.layout.key(self.shard_of(index)))


class ZarrSink(Sink):
    """A new Zarr store in a folder.

    Parameters
    ----------
    path : str
        The name that it will have.
    specs : mapping of str to ArraySpec
        Its arrays, by their full names. The only array may be called ``"/"``: the store is then that array.
    mode : str
        See `Sink`.
    version : int
        Of the format: 3 or 2.
    attrs : mapping
        Attributes of the root.
    group_attrs : mapping
        Attributes of groups, by their full names.
    about : mapping of str to str, optional
        What is written, of which source, if another job may go on with it after a kill (see `left`). Ranks that do not call
        `create` may have an empty one. A store with shards always begins anew.
    """

    about: Mapping[str, str] | None = None
    left: UnfinishedStore | None = None

    def __init__(
        self,
        path: str,
        specs: Mapping[str, ArraySpec],
        *,
        mode: str = "w-",
        version: int = 3,
        attrs: Mapping[str, Any] | None = None,
        group_attrs: Mapping[str, Mapping[str, Any]] | None = None,
        about: Mapping[str, str] | None = None,
    ) -> None:
        Target(path, mode)  # checks the mode
        self.path, self.mode, self.version, self.about = path, mode, version, about
        self.attrs = plain_attrs("/", attrs or {})
        self.group_attrs = {name.strip("/"): plain_attrs(name, found) for name, found in (group_attrs or {}).items()}
        self.arrays: dict[str, ZarrEncoder] = {}
        self._texts: dict[str, ArraySpec] = {}
        for name, checked in with_dims({name: spec.checked(name) for name, spec in specs.items()}).items():
            if checked.texts is not None:
                self._texts[name] = checked
            elif checked.chunks is None and checked.shape and 0 not in checked.shape:
                _check_single(name, checked)
                self.arrays[name] = ZarrEncoder.new(path, name, replace(checked, chunks=checked.shape), version)  # one chunk
            else:
                self.arrays[name] = ZarrEncoder.new(path, name, checked, version)
        if any(one.is_asked for one in self.arrays.values()):
            self.about = None  # several ranks write a shard: its file is whole at the end only
        for name in specs:
            if why := refused_name(name):
                raise ConfigError(f"an array is called '{name}', {why}. Rename it")

    def create(self) -> Catalog:
        """See `Sink`."""
        return ZarrCatalog(self)

    def take_up(self) -> dict[str, Bools] | None:
        """See `Sink`."""
        if self.about is None:
            return super().take_up()
        self.left = find_left(self.path, self.about)
        if self.left is None:
            return None
        names = whole_files(self.left.temporary)
        is_there = {}
        for name, one in self.arrays.items():
            numbers = range(math.prod(one.spec.grid))
            flags = [one.file_of(unravel(number, one.spec.grid)) in names for number in numbers]
            is_there[name] = np.array(flags, dtype=bool).reshape(one.spec.grid)
        return is_there

    def writer(self, ticket: Ticket) -> Writer:
        """See `Sink`."""
        return _ZarrWriter(self, ticket)

    def file_of(self, ticket: Ticket, name: str, number: int) -> str:
        """See `Sink`."""
        one = self.arrays[name]
        return os.path.join(ticket.temporary, one.file_of(unravel(number, one.spec.grid)))

    def documents(self) -> Iterator[tuple[str, Any]]:
        """The files of metadata, in the order in which they are written: name in the store, and content. Arrays of text are
        among them, with their chunks, as bytes.
        """
        groups = groups_above([*self.arrays, *self._texts, *(f"{group}/" for group in self.group_attrs)])
        if set(self.arrays) == {"/"}:
            groups = set()
        documents: dict[str, Any] = {}  # those of arrays, then of groups; "", the root, is the last
        for name, array in self.arrays.items():
            folder = name.strip("/")
            if self.version == 3:
                documents[os.path.join(folder, "zarr.json")] = array.document
            else:
                attrs = plain_attrs(name, array.spec.attrs) | {"_ARRAY_DIMENSIONS": list(array.spec.dims or ())}
                documents |= {os.path.join(folder, ".zattrs"): attrs, os.path.join(folder, ".zarray"): array.document}
        for name, spec in self._texts.items():
            for file, content in _written(spec, self.version).items():
                key = os.path.join(name.strip("/"), file)
                if file.startswith((".z", "zarr.json")):
                    documents[key] = json.loads(content)
                else:
                    yield key, content
        for folder in sorted(groups, reverse=True):
            attrs = self.attrs if not folder else self.group_attrs.get(folder, {})
            if self.version == 2:
                documents[os.path.join(folder, ".zattrs")] = attrs
            key = os.path.join(folder, "zarr.json" if self.version == 3 else ".zgroup")
            documents[key] = group_document(self.version, attrs)
        if groups:  # all in one, as zarr-python's `consolidate_metadata` has it
            last = next(reversed(documents))
            root = documents.pop(last)
            if self.version == 3:
                below = {os.path.dirname(key): document for key, document in sorted(documents.items())}
                root |= {"consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": below}}
            else:
                # In order: zarr-python loses all but the last of siblings that do not follow each other.
                every = dict(sorted({**documents, last: root}.items()))
                documents[".zmetadata"] = {"zarr_consolidated_format": 1, "metadata": every}
            documents[last] = root
        yield from documents.items()


def groups_above(names: Iterable[str]) -> set[str]:
    """The groups that arrays are in, without a slash in front; the root is "".

    >>> sorted(groups_above(["/x", "/g/h/y"]))
    ['', 'g', 'g/h']
    """
    groups = {""}
    for name in names:
        parts = name.lstrip("/").split("/")
        groups.update("/".join(parts[:k]) for k in range(1, len(parts)))
    return groups


def _written(spec: ArraySpec, version: int) -> dict[str, bytes]:
    """The files of an array of text, as zarr-python writes it."""
    import zarr  # here, because numbers need it not

    attrs = plain_attrs("", spec.attrs) | ({"_ARRAY_DIMENSIONS": list(spec.dims or ())} if version == 2 else {})
    files: dict[str, Any] = {}
    made = zarr.create_array(
        zarr.storage.MemoryStore(files),
        shape=spec.shape,
        dtype="str",
        chunks=tuple(max(1, n) for n in spec.shape),
        attributes=attrs,
        dimension_names=list(spec.dims or ()) if version == 3 else None,
        zarr_format=3 if version == 3 else 2,
    )
    made[...] = np.asarray(spec.texts)
    return {key: content.to_bytes() for key, content in files.items()}


def refused_name(name: str) -> str | None:
    """Why no array or group of a store can have this name, in words that follow it; None if one can."""
    parts = name.split("/")
    if any(part in _TAKEN or "\\" in part for part in parts):  # (zarr-python makes another name of a backslash)
        return "and a Zarr store has files of such names itself"
    if any(len(part.encode(errors="replace")) > _MOST_NAME_NBYTES for part in parts):
        return "which is too long for a folder"
    return None


def _check_single(name: str, spec: ArraySpec) -> None:
    if math.prod(spec.shape) * spec.dtype.itemsize > 2**31 - 1:
        raise ConfigError(f"'{name}' has {spec.shape} elements and no chunks: one rank would have to hold it. Pass chunks=")


class ZarrCatalog(Catalog):
    """See `Catalog`."""

    def __init__(self, sink: ZarrSink) -> None:
        self._sink, self._target = sink, Target(sink.path, sink.mode, is_folder=True, known=ROOTS)
        self._is_finished, self._mark = False, None if sink.left is None else sink.left.mark
        if sink.left is None:
            temporary = self._target.create()
        else:
            temporary = sink.left.temporary
            self._target.adopt(temporary, sink.left.token)
        try:
            with named(sink.path):
                if self._mark is None:
                    self._write_mark(temporary)
                else:
                    self._remove_metadata(temporary)
                for name in sink.arrays:
                    os.makedirs(os.path.join(temporary, name.strip("/")), exist_ok=True)
            places = {n: Places([0], [0], 0) for n, e in sink.arrays.items() if not e.is_asked}
            self.ticket = Ticket(temporary, self._target.token, places)
            self._shards = {name: _Shards(one) for name, one in sink.arrays.items() if one.is_asked}
        except BaseException:
            if sink.left is None:
                self.abandon()
            else:
                self.leave()  # what another job has done is not undone
            raise

    def _write_mark(self, temporary: str) -> None:
        path, about = os.path.join(temporary, FOLDER_MARK), self._sink.about
        content = mark(self._target.token, self._sink.path)
        write_file(path, content if about is None else content + json.dumps(dict(about)).encode())
        if about is not None:
            self._mark = open_locked(path)

    def _remove_metadata(self, temporary: str) -> None:
        """What the other job may have written last, the root's first: this is no store until all is there."""
        for name in reversed([key for key, _ in self._sink.documents()]):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(temporary, name))

    def allocate(self, name: str, numbers: Sequence[int] | Int64s, nbytes: Sequence[int] | Int64s, masks: Any = 0) -> Int64s:
        """See `Catalog`."""
        if name not in self._shards:
            raise ValueError(f"the chunks of '{name}' are files of their own")
        which = np.asarray(numbers, dtype=np.int64)
        return self._shards[name].allocate(name, which, np.broadcast_to(np.asarray(nbytes, dtype=np.int64), which.shape))

    def finish(self) -> None:
        """See `Catalog`."""
        if self._is_finished:
            raise ValueError("the catalog is finished")
        root = self.ticket.temporary
        with named(self._sink.path):
            for name, one in self._sink.arrays.items():
                if name in self._shards:
                    self._write_indexes(name, one)
                else:
                    self._check_files(name, one)
            for key, content in self._sink.documents():
                os.makedirs(os.path.join(root, os.path.dirname(key)), exist_ok=True)  # a group without arrays
                is_text = isinstance(content, bytes)
                write_file(
                    os.path.join(root, key), content if is_text else json.dumps(content, indent=2, allow_nan=False).encode()
                )
            os.unlink(os.path.join(root, FOLDER_MARK))
            for folder in sorted({os.path.dirname(os.path.join(root, key)) for key, _ in self._sink.documents()}):
                sync_folder(folder)
        self._is_finished = True

    def _write_indexes(self, name: str, one: ZarrEncoder) -> None:
        shards, grid = self._shards[name], one.shard_grid
        absent = np.flatnonzero(shards.sizes < 0)
        if len(absent):
            first = unravel(int(absent[0]), one.spec.grid)
            raise ValueError(f"{len(absent)} of {len(shards.sizes)} chunks of '{name}' have no place; the first is {first}")
        for number in range(math.prod(grid)):
            at = unravel(number, grid)
            path = os.path.join(self.ticket.temporary, name.strip("/"), one.layout.key(at))
            with named(self._sink.path, name):
                descriptor = os.open(path, os.O_WRONLY)
                try:
                    put_at(descriptor, shards.index(at), int(shards.ends[number]))
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def _check_files(self, name: str, one: ZarrEncoder) -> None:
        """ValueError unless each chunk has a file."""
        n, folder = math.prod(one.spec.grid), os.path.join(self.ticket.temporary, name.strip("/"))
        n_here = sum(len({*files} - {FOLDER_MARK, GROWTH_MARK}) for _, _, files in os.walk(folder))
        if n_here != n:
            raise ValueError(f"'{name}' has {n_here} files in place of one for each of its {n} chunks")

    def commit(self) -> None:
        """See `Catalog`."""
        if not self._is_finished:
            raise ValueError("finish the catalog first")
        self._target.commit()
        self._unlock()

    def leave(self) -> None:
        """See `Catalog`."""
        if self._mark is None:
            self.abandon()
        else:
            self._target.temporary = None
            self._unlock()

    def _unlock(self) -> None:
        if self._mark is not None:
            self._mark.close()

    def abandon(self) -> None:
        """See `Catalog`."""
        if self._target.temporary is not None:  # first of all: a part of a store must not look like a whole one
            for name in ROOTS:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._target.temporary, name))
        self._target.abandon()
        self._unlock()


class _Shards:
    """Where the chunks of one sharded array are in their shard files."""

    def __init__(self, one: ZarrEncoder) -> None:
        self._one = one
        self.offsets = np.zeros(math.prod(one.spec.grid), dtype=np.int64)
        self.sizes = np.full(math.prod(one.spec.grid), -1, dtype=np.int64)
        self.ends = np.zeros(math.prod(one.shard_grid), dtype=np.int64)

    def allocate(self, name: str, which: Int64s, sizes: Int64s) -> Int64s:
        one, per = self._one, self._one.layout.per_shard or ()
        if len(which) and (which.min() < 0 or which.max() >= len(self.sizes) or sizes.min() < 1):
            raise ValueError(f"'{name}' has chunks 0 to {len(self.sizes) - 1} of 1 byte or more; asked for others")
        if np.any(self.sizes[which] >= 0) or len(np.unique(which)) < len(which):
            raise ValueError(f"a chunk of '{name}' has a place already")
        index = np.unravel_index(which, one.spec.grid)
        shard = np.ravel_multi_index([k // n for k, n in zip(index, per, strict=True)], one.shard_grid)
        # A running sum in each shard: of all chunks in the order of their shards, less the sum where the shard begins.
        order = np.argsort(shard, kind="stable")
        sorted_shards, sums = shard[order], np.cumsum(sizes[order]) - sizes[order]
        offsets = np.empty(len(which), dtype=np.int64)
        offsets[order] = self.ends[sorted_shards] + sums - sums[np.searchsorted(sorted_shards, sorted_shards)]
        np.add.at(self.ends, shard, sizes)
        self.offsets[which], self.sizes[which] = offsets, sizes
        return offsets

    def index(self, at: tuple[int, ...]) -> bytes:
        """The index of a shard: offset and length of each chunk in C order, then the CRC-32C. Chunks outside of the array are
        missing.
        """
        one, per = self._one, self._one.layout.per_shard or ()
        table = np.full((*per, 2), _MISSING, dtype="<u8")
        box = tuple(slice(k * n, min((k + 1) * n, m)) for k, n, m in zip(at, per, one.spec.grid, strict=True))
        sizes, offsets = self.sizes.reshape(one.spec.grid)[box], self.offsets.reshape(one.spec.grid)[box]
        part = table[tuple(slice(n) for n in sizes.shape)]
        part[..., 0], part[..., 1] = offsets, sizes
        data = table.tobytes()
        return data + int(google_crc32c.value(data)).to_bytes(4, "little")


def write_file(path: str, content: bytes) -> None:
    """A small new file, on disk."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        put_at(descriptor, content, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _OpenFile:
    """A file that chunks are written to. It is closed with its last reference, so that no thread loses it while it writes."""

    def __init__(self, path: str, final: str, flags: int, name: str, index: tuple[int, ...]) -> None:
        self.path, self.final = path, final  # its name, and the one that it gets when it is on disk
        self.name, self.index = name, index  # the array, and the first chunk
        self.descriptor = -1
        self.descriptor = os.open(path, flags, 0o666)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class _ZarrWriter(Writer):
    """See `Writer`. Files stay open until their fsync, because some file systems tell only then that there was no room."""

    def __init__(self, sink: ZarrSink, ticket: Ticket) -> None:
        self._sink, self._ticket = sink, ticket
        self._lock = threading.Lock()
        # By path: the chunks of a shard share a descriptor, and its fsync.
        self._opened: WeakValueDictionary[str, _OpenFile] = WeakValueDictionary()
        self._unsynced: dict[str, _OpenFile] = {}  # those that were written to
        self._n_behind = self._nbytes_behind = 0
        self._made = {ticket.temporary}  # folders that are there
        self._folders: set[str] = set()  # those with new names that are not synced
        self._is_open = True
        check_mark(os.path.join(ticket.temporary, FOLDER_MARK), ticket.token, sink.path)

    def put(self, name: str, number: int, offset: int, stored: Stored) -> None:
        if not self._is_open:
            raise ValueError(f"the writer of '{self._sink.path}' is closed")
        one = self._sink.arrays[name]
        index, path = unravel(number, one.spec.grid), self._sink.file_of(self._ticket, name, number)
        with named(self._sink.path, name, lambda: index):
            self._make_folder(os.path.dirname(path))
            file = self._file(path, name, index, is_shared=one.is_asked)
            self._note_folder(os.path.dirname(path))
            put_at(file.descriptor, stored.data, offset)
        with self._lock:
            self._unsynced[file.path] = file  # not before, so that a sync of another thread does not end it
            self._n_behind += 1
            self._nbytes_behind += stored.nbytes
            is_long = self._sink.about is not None and self._nbytes_behind >= _MOST_BEHIND_NBYTES
            is_late = len(self._unsynced) >= _MOST_OPEN or self._n_behind >= _MOST_BEHIND or is_long
            files = self._take() if is_late else []
        self._sync_files(files)

    def _file(self, final: str, name: str, index: tuple[int, ...], *, is_shared: bool) -> _OpenFile:
        """The file of a chunk, open."""
        path, flags = final if self._sink.about is None else final + PART, os.O_CREAT | os.O_WRONLY
        if not is_shared:  # it is written once: a second time would be a defect of the caller
            return _OpenFile(path, final, flags | os.O_EXCL, name, index)
        with self._lock:
            file = self._opened.get(path)
        if file is None:
            file = _OpenFile(path, final, flags, name, index)  # without the lock: a file server takes its time
            with self._lock:
                file = self._opened.setdefault(path, file)
        return file

    def _take(self) -> list[_OpenFile]:
        """The files that were written to, for the caller to sync. With the lock."""
        files, self._unsynced = [*self._unsynced.values()], {}
        self._n_behind = self._nbytes_behind = 0
        return files

    def put_region(self, name: str, region: Region, stored: Stored) -> None:
        spec = self._sink.arrays[name].spec
        if spec.chunks is not None or region != Region.whole(spec.shape):
            raise ValueError(f"'{name}' is written by whole chunks, or as a whole if it has none")
        if not region.size:
            return
        self.put(name, 0, 0, stored)

    def _make_folder(self, folder: str) -> None:
        """Make a folder, and those above it; not the store itself: who has removed it wants it gone."""
        if folder not in self._made:
            self._make_folder(os.path.dirname(folder))
            with contextlib.suppress(FileExistsError):  # another thread, or rank
                os.mkdir(folder)
            self._made.add(folder)

    def _note_folder(self, folder: str) -> None:
        """A file in it has its name, which is to be synced. Not before: a sync of another thread would not be one of that."""
        with self._lock:
            while len(folder) > len(self._ticket.temporary) and folder not in self._folders:
                self._folders.add(folder)
                folder = os.path.dirname(folder)

    def _sync_files(self, files: list[_OpenFile]) -> None:
        for file in files:
            with named(self._sink.path, file.name, lambda file=file: file.index):  # type: ignore[misc]
                os.fsync(file.descriptor)
                if file.final != file.path:
                    os.rename(file.path, file.final)

    def sync(self) -> None:
        with self._lock:
            files, folders, self._folders = self._take(), sorted(self._folders, reverse=True), set()
        self._sync_files(files)
        with named(self._sink.path):
            for folder in [*folders, self._ticket.temporary]:
                sync_folder(folder)

    def close(self) -> None:
        self._is_open = False
        with self._lock:
            files = self._take()
        if self._sink.about is not None:  # for a job that goes on: whole chunks get their names
            with contextlib.suppress(OSError):
                self._sync_files(files)
