"""How are single chunks of a Zarr array read from a local folder, without zarr-python? By position, in any number of threads.

1. `chunk_reader` gives a reader if that is possible: the store is a plain folder, and `metadata` understands the metadata.
2. `ChunkFiles` reads files with one chunk each, `ShardFiles` ranges of shard files.
3. Decoding is the same for all formats: see `stored_chunks`.

Before memory is allocated, each size that a file declares is compared with the file's own size, and with the most that a chunk
can have. docs/design/zarr.md has measurements against zarr-python, zarrs and TensorStore.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

import numpy as np
import zarr
import zarr.storage

from shardload.formats.codecs.chains import Chain
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.chunk_reader import Encoded, Room, check_box, fresh
from shardload.formats.contract.dtypes import native_dtype
from shardload.formats.stored_chunks import Extents, StoredChunks
from shardload.formats.zarr.metadata import MOST_INDEX_NBYTES, NotCovered, ZarrLayout, layout_of
from shardload.formats.zarr.nodes import ArrayNode
from shardload.formats.zarr.store import inner_store, open_in
from shardload.storage.containment import Fence
from shardload.storage.local import LocalFile

# The most shards whose file and index are kept. A limit of 1024 open files is common.
_MOST_SHARDS = 64

_PLAIN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW

# Offset and length, in a shard's index, of a missing chunk.
_MISSING = 2**64 - 1


def chunk_reader(array: Any, node: ArrayNode, info: ArrayInfo, fence: Fence) -> ZarrChunks | None:
    """A reader of an open array's chunks, if they can be read without zarr-python; else None.

    Parameters
    ----------
    array : zarr.Array
        An open array; only its store and settings are used.
    node : ArrayNode
        Its metadata.
    info : ArrayInfo
        Its description in the source.
    fence : Fence
        The folders where its files may be.
    """
    layout, dtype = chunk_layout(array.store, node, getattr(array, "config", None)), native_dtype(node.dtype)
    if layout is None:
        return None
    try:
        fill = np.zeros((), dtype) if node.fill is None else np.asarray(node.fill, dtype)
    except (TypeError, ValueError):
        return None
    if layout.chunk_shape != info.chunks or fill.shape != ():
        return None
    store: Any = inner_store(array.store)
    folder = os.path.join(os.fspath(store.root), array.path)
    kind = ChunkFiles if layout.per_shard is None else ShardFiles
    return kind(folder, layout, info.shape, dtype, fill, fence)


def chunk_layout(store: Any, node: ArrayNode, settings: Any = None) -> ZarrLayout | None:
    """Where the chunks of an array are and how they are encoded, if this module knows both; else None."""
    # A class derived from LocalStore may keep chunks elsewhere, or change them.
    if type(inner_store(store)) is not zarr.storage.LocalStore:
        return None
    # Newer versions of zarr-python can be told to refuse missing chunks instead of filling them.
    if not (getattr(settings, "read_missing_chunks", True) and zarr.config.get("array.read_missing_chunks", True)):
        return None
    try:
        layout = layout_of(node.document, node.dtype)
        return layout if sum(stage.n_more is None for stage in layout.stages) < 2 else None
    except (NotCovered, LookupError, TypeError, ValueError):  # metadata of an unexpected form is not covered either
        return None


class ZarrChunks(StoredChunks):
    """The chunks of one array in a local folder. Safe to use from several threads at once.

    Parameters
    ----------
    folder : str
        The array's folder.
    layout : ZarrLayout
        Where the chunks are and how they are encoded.
    shape : tuple of int
        Elements along each axis of the array.
    dtype : dtype
        Type of the decoded values, in native byte order.
    fill : ndarray
        The value of missing chunks, as a 0-d array.
    fence : Fence
        The folders where its files may be.
    """

    def __init__(
        self,
        folder: str,
        layout: ZarrLayout,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        fill: np.ndarray[Any, Any],
        fence: Fence,
    ) -> None:
        counts = tuple(-(-n // m) for n, m in zip(shape, layout.chunk_shape, strict=True))
        super().__init__(counts, dtype, Chain(layout.stages, math.prod(layout.chunk_shape) * dtype.itemsize), fill)
        self._folder, self._layout, self._fence = folder, layout, fence

    def close(self) -> None:
        """Close what is kept open."""


class ChunkFiles(ZarrChunks):
    """Chunks each of which is a file."""

    def locate(self, box: Sequence[range]) -> list[Extents]:
        """Where a single chunk is; nothing for several, each of which is a file of its own."""
        if math.prod(map(len, box)) != 1:
            return []
        path = os.path.join(self._folder, self._layout.key(tuple(axis.start for axis in box)))
        file = open_in(path, self._fence)
        return [] if file is None else [Extents(file, np.zeros(1, np.int64), np.array([file.nbytes]))]

    def fetch(self, box: Sequence[range], room: Room = fresh) -> Encoded:
        """Read chunks as they are stored, file after file.

        Raises
        ------
        OSError
            If a file cannot be read, is not a file, or is cut while it is read.
        ValueError
            If it is far longer than such a chunk can be, or the box is outside the grid.
        """
        if math.prod(map(len, box)) == 1:
            return super().fetch(box, room)
        check_box(box, self.counts)
        *outer, inner = box
        data: list[Any] = []
        with ExitStack() as opened:
            folders: dict[str, _Folder] = {}
            for row in itertools.product(*outer):
                first = os.path.join(self._folder, self._layout.key((*row, 0)))
                name, _, stem = first[:-1].rpartition("/")  # only the number of the last axis differs in a row
                if name not in folders:
                    folders[name] = opened.enter_context(closing(_Folder(name, self._fence)))
                data += [folders[name].read(f"{stem}{k}", self.chain.most_stored_nbytes) for k in inner]
        return Encoded(data)


class ShardFiles(ZarrChunks):
    """Chunks in shard files, of which the last few that were used stay open, each with its index.

    So the file system's server looks a shard up once, not once per chunk, and the index and the chunks come from the same file,
    even if another program replaces it.
    """

    def __init__(self, folder: str, layout: ZarrLayout, *array: Any) -> None:
        super().__init__(folder, layout, *array)
        self._per_shard = layout.per_shard or ()
        self._most_kept = max(1, min(_MOST_SHARDS, MOST_INDEX_NBYTES // (16 * math.prod(self._per_shard))))
        self._lock = threading.Lock()  # protects the table; never held while a file is read
        self._slots: OrderedDict[tuple[int, ...], _Slot] = OrderedDict()

    def locate(self, box: Sequence[range]) -> list[Extents]:
        """Where the chunks of a box are in the shards that have them."""
        numbers = np.arange(math.prod(map(len, box))).reshape(tuple(map(len, box)))
        axes = [range(axis.start // n, -(-axis.stop // n)) for axis, n in zip(box, self._per_shard, strict=True)]
        extents: list[Extents] = []
        for at in itertools.product(*axes):
            shard = self._shard(at)
            if shard is None:
                continue
            bounds = [
                (max(axis.start, i * n), min(axis.stop, (i + 1) * n))
                for axis, i, n in zip(box, at, self._per_shard, strict=True)
            ]
            inside = tuple(slice(a - i * n, b - i * n) for (a, b), i, n in zip(bounds, at, self._per_shard, strict=True))
            here = tuple(slice(a - axis.start, b - axis.start) for (a, b), axis in zip(bounds, box, strict=True))
            places = shard.index[inside].reshape(-1, 2)
            is_stored = (places != _MISSING).any(axis=1)
            if places[is_stored].max(initial=0) >= 1 << 62:
                raise ValueError(f"the index of '{shard.path}' has a chunk at {places[is_stored].max()}: it is damaged")
            offsets, sizes = places[is_stored].astype(np.int64).T
            is_all = len(offsets) == numbers.size
            extents.append(Extents(shard.file, offsets, sizes, None if is_all else numbers[here].reshape(-1)[is_stored]))
        return extents

    def close(self) -> None:
        """Close the shards that are kept open."""
        with self._lock:
            self._slots.clear()

    def _shard(self, at: tuple[int, ...]) -> _Shard | None:
        with self._lock:
            slot = self._slots.setdefault(at, _Slot())
            self._slots.move_to_end(at)
            if len(self._slots) > self._most_kept:
                self._slots.popitem(last=False)
        with slot.lock:
            if not slot.is_opened:
                path = os.path.join(self._folder, self._layout.key(at))
                file = open_in(path, self._fence)
                slot.shard = None if file is None else _Shard(file, path, self._layout)
                slot.is_opened = True
            return slot.shard


class _Shard:
    """One open shard file and its index."""

    def __init__(self, file: LocalFile, path: str, layout: ZarrLayout) -> None:
        self.file, self.path, file_nbytes = file, path, file.nbytes
        self.index = np.empty((*(layout.per_shard or ()), 2), dtype="<u8")
        chain = Chain(layout.index_stages, self.index.nbytes)
        nbytes = chain.nbytes + sum(stage.n_more or 0 for stage in layout.index_stages)
        if nbytes > file_nbytes:
            raise ValueError(f"'{path}' has {file_nbytes} bytes, its index alone would take {nbytes}")
        stored = fresh(nbytes)
        file.read_into(stored, 0 if layout.is_index_first else file_nbytes - nbytes)
        try:
            chain.decode([stored], self.index)
        except ValueError as error:
            raise ValueError(f"the index of '{path}' is damaged: {error}") from None


class _Slot:
    """One requested shard. The first thread that has `lock` opens it; `shard` stays None if there is no such file."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_opened = False
        self.shard: _Shard | None = None


class _Folder:
    """An open folder with chunk files: a file in it is found by its name alone.

    Only what cannot be wrong is done here: regular files, no links. The rest is left to `open_in`, which says what is wrong.
    """

    def __init__(self, path: str, fence: Fence) -> None:
        self._path, self._fence, self._fd = path, fence, -1
        with suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if self._fd >= 0 and not fence.holds_open(self._fd, path):
            self.close()

    def read(self, name: str, most: int) -> Any | None:
        """The content of a file of at most `most` bytes; None if there is no such file."""
        if self._fd >= 0:
            try:
                fd = os.open(name, _PLAIN, dir_fd=self._fd)
            except FileNotFoundError:
                return None
            except OSError:  # a link, a socket
                pass
            else:
                try:
                    found = os.fstat(fd)
                    if stat.S_ISREG(found.st_mode) and found.st_size <= most:
                        data = os.pread(fd, found.st_size, 0)
                        if len(data) == found.st_size:
                            return data
                finally:
                    os.close(fd)
        file = open_in(os.path.join(self._path, name), self._fence)
        if file is None:
            return None
        if file.nbytes > most:
            raise ValueError(f"'{name}' has {file.nbytes} bytes, a stored chunk of this array {most} at most")
        content = fresh(file.nbytes)
        file.read_into(content, 0)
        return content

    def close(self) -> None:
        """Close the folder. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
