"""How are single chunks of a Zarr array read from a local folder, without zarr-python? By position, in any number of threads.

1. `chunk_reader` gives a reader if that is possible: the store is a plain folder, and `metadata` understands the metadata.
2. `ZarrChunks.fetch` reads one chunk's bytes: a whole file, or a range of a shard file. `_Shards` opens a shard and reads its
   index once, and keeps the last few open.
3. `ZarrChunks.decode` undoes the codecs (`codecs.chains.Chain`) straight into the caller's buffer, or writes the fill value.

Before memory is allocated, each size that a file declares is compared with the file's own size, and with the most that a chunk
can have. docs/design/zarr.md has measurements against zarr-python, zarrs and TensorStore.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import zarr
import zarr.storage

from shardload.formats.codecs.chains import Chain, decode_many
from shardload.formats.containment import TARGET_HINT, Fence, NotAFileError, OutsideError, kind_of
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.by_chunks import check_chunk
from shardload.formats.contract.chunk_reader import Encoded, Room, fresh
from shardload.formats.contract.ranges import Spans, read_at
from shardload.formats.zarr.metadata import MOST_INDEX_NBYTES, Layout, NotCovered, layout_of
from shardload.formats.zarr.store import inner_store

__all__ = ["ZarrChunks", "chunk_layout", "chunk_reader"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# The most shards whose file and index are kept. A limit of 1024 open files is common.
_MOST_SHARDS = 64

_PLAIN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW

# Offset and length, in a shard's index, of a missing chunk.
_MISSING = 2**64 - 1


def chunk_reader(array: Any, info: ArrayInfo, dtype: np.dtype[Any], fence: Fence) -> ZarrChunks | None:
    """A reader of an open array's chunks, if they can be read without zarr-python; else None.

    Parameters
    ----------
    array : zarr.Array
        An open array; only its metadata is used.
    info : ArrayInfo
        Its description in the source.
    dtype : dtype
        Type of the decoded values: the array's, in native byte order.
    fence : Fence
        The folders where its files may be.
    """
    layout = chunk_layout(array, dtype)
    if layout is None:
        return None
    try:
        fill = np.zeros((), dtype) if array.fill_value is None else np.asarray(array.fill_value, dtype)
    except (TypeError, ValueError):
        return None
    if layout.chunk_shape != info.chunks or fill.shape != ():
        return None
    store: Any = inner_store(array.store)
    folder = os.path.join(os.fspath(store.root), array.path)
    return ZarrChunks(folder, layout, info.shape, dtype, fill, fence)


def chunk_layout(array: Any, dtype: np.dtype[Any]) -> Layout | None:
    """Where the chunks of an open array are and how they are encoded, if this module knows both; else None."""
    # A class derived from LocalStore may keep chunks elsewhere, or change them.
    if type(inner_store(array.store)) is not zarr.storage.LocalStore:
        return None
    # Newer versions of zarr-python can be told to refuse missing chunks instead of filling them.
    settings = getattr(array, "config", None)
    if not (getattr(settings, "read_missing_chunks", True) and zarr.config.get("array.read_missing_chunks", True)):
        return None
    try:
        return layout_of(array.metadata.to_dict(), dtype)
    except (NotCovered, LookupError, TypeError, ValueError):  # metadata of an unexpected form is not covered either
        return None


class ZarrChunks:
    """The chunks of one array in a local folder (`ChunkReader`). Safe to use from several threads at once.

    Parameters
    ----------
    folder : str
        The array's folder.
    layout : Layout
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
        layout: Layout,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        fill: np.ndarray[Any, Any],
        fence: Fence,
    ) -> None:
        self._fence = fence
        self._folder, self._layout, self._dtype, self._fill = folder, layout, dtype, fill
        self._n_chunks = tuple(-(-n // m) for n, m in zip(shape, layout.chunk_shape, strict=True))
        self._chain = Chain(layout.stages, math.prod(layout.chunk_shape) * dtype.itemsize)
        self._most = self._chain.most_stored_nbytes
        self._shards = None if layout.per_shard is None else _Shards(folder, layout, fence)

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the codecs, in the order in which they are undone."""
        return self._chain.names

    def fetch(self, index: tuple[int, ...], room: Room = fresh) -> Encoded | None:
        """Read the chunk at `index` as it is stored; None if it is missing.

        Raises
        ------
        OSError
            If the file cannot be read, is not a file, or is cut while it is read.
        ValueError
            If it is far longer than such a chunk can be, if the index of its shard is damaged or points outside the
            shard, or if there is no chunk at `index`.
        """
        check_chunk(index, self._n_chunks)
        if self._shards is not None:
            data = self._shards.read(index, self._most, room)
        else:
            data = _read_file(os.path.join(self._folder, self._layout.key(index)), self._most, room, self._fence)
        return None if data is None else Encoded(data)

    def decode(self, encoded: Encoded | None, out: np.ndarray[Any, Any]) -> None:
        """Decode a chunk that `fetch` returned into `out`, which has a chunk's full shape. ValueError if it is damaged."""
        if out.shape != self._layout.chunk_shape or out.dtype != self._dtype or not out.flags.c_contiguous:
            raise ValueError(f"a buffer of {out.shape} {out.dtype} for a chunk of {self._layout.chunk_shape} {self._dtype}")
        if encoded is None:
            np.copyto(out, self._fill)
        else:
            self._chain.decode(encoded.data, out, encoded.skipped)

    def fetch_many(self, box: Sequence[range], room: Room = fresh) -> list[Any] | None:
        """Read a box of chunks as they are stored: see `BatchReader`. Errors are those of `fetch`."""
        if not self._chain.takes_many or not box:
            return None
        if any(not 0 <= axis.start <= axis.stop <= n for axis, n in zip(box, self._n_chunks, strict=True)):
            raise ValueError(f"there are no chunks {box} in a grid of {self._n_chunks}")
        if self._shards is not None:
            return self._shards.read_many(box, self._most, room)
        *outer, inner = box
        found: list[Any] = []
        with ExitStack() as opened:
            folders: dict[str, _Folder] = {}
            for row in itertools.product(*outer):
                first = os.path.join(self._folder, self._layout.key((*row, 0)))
                name, _, stem = first[:-1].rpartition("/")  # only the number of the last axis differs in a row
                if name not in folders:
                    folders[name] = opened.enter_context(closing(_Folder(name, self._fence)))
                read = folders[name].read
                found += [read(f"{stem}{k}", self._most) for k in inner]
        return found

    def decode_many(self, stored: Sequence[Any], out: np.ndarray[Any, Any]) -> None:
        """Decode chunks that `fetch_many` returned: see `BatchReader`."""
        decode_many(self._chain, stored, out, self._fill)

    def close(self) -> None:
        """Close the shards that are kept open."""
        if self._shards is not None:
            self._shards.clear()


class _Shard:
    """One open shard file and its index. It is closed with its last reference, so that no thread loses it while it reads.

    The file stays open between chunks. So the file system's server looks it up once, not once per chunk, and the index and the
    chunks come from the same file, even if another program replaces it.
    """

    def __init__(self, fd: int, path: str, layout: Layout, per_shard: tuple[int, ...]) -> None:
        self._fd, self._path = fd, path
        self._nbytes = os.fstat(fd).st_size
        chain = Chain(layout.index_stages, 16 * math.prod(per_shard))
        nbytes = chain.nbytes + sum(stage.n_more or 0 for stage in layout.index_stages)
        if nbytes > self._nbytes:
            raise ValueError(f"'{path}' has {self._nbytes} bytes, its index alone would take {nbytes}")
        self._index = np.empty((*per_shard, 2), dtype="<u8")
        stored = _bytes_at(fd, path, 0 if layout.is_index_first else self._nbytes - nbytes, nbytes)
        try:
            chain.decode(stored, self._index)
        except ValueError as error:
            raise ValueError(f"the index of '{path}' is damaged: {error}") from None

    def __del__(self) -> None:
        os.close(self._fd)

    def read(self, at: tuple[int, ...], most: int, room: Room) -> Bytes | None:
        """The stored bytes of the chunk at position `at` in this shard."""
        offset, nbytes = (int(n) for n in self._index[at])
        if offset == nbytes == _MISSING:
            return None
        if offset + nbytes > self._nbytes or nbytes > most:
            raise ValueError(
                f"the index of '{self._path}' has chunk {at} at byte {offset}, {nbytes} bytes long; "
                f"the file has {self._nbytes} bytes, and a stored chunk {most} at most"
            )
        return _bytes_at(self._fd, self._path, offset, nbytes, room)

    def places(self, box: tuple[slice, ...], most: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Offset and size of each chunk in a box of this shard, (-1, -1) if it is missing; None if `read` would raise."""
        found = self._index[box].astype(np.int64)  # a missing chunk has the largest unsigned numbers, which become -1
        offsets, sizes = found[..., 0], found[..., 1]
        is_missing = (offsets == -1) & (sizes == -1)
        fits = (offsets >= 0) & (sizes >= 0) & (sizes <= most) & (offsets <= self._nbytes - sizes)
        return found if bool((fits | is_missing).all()) else None

    def read_spans(self, spans: Spans, room: Bytes) -> list[memoryview]:
        """The stored bytes of several chunks."""
        return spans.read(self._fd, room)


class _Slot:
    """One requested shard. The first thread that has `lock` opens it; `shard` stays None if there is no such file."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_opened = False
        self.shard: _Shard | None = None


class _Shards:
    """The shards of one array: the last few that were used stay open."""

    def __init__(self, folder: str, layout: Layout, fence: Fence) -> None:
        self._folder, self._layout, self._fence = folder, layout, fence
        self._per_shard = layout.per_shard or ()
        self._most_kept = max(1, min(_MOST_SHARDS, MOST_INDEX_NBYTES // (16 * math.prod(self._per_shard))))
        self._lock = threading.Lock()  # protects the table; never held while a file is read
        self._slots: OrderedDict[tuple[int, ...], _Slot] = OrderedDict()

    def read(self, index: tuple[int, ...], most: int, room: Room) -> Bytes | None:
        """The stored bytes of the chunk at `index` in the array's chunk grid."""
        shard = self._shard(tuple(i // n for i, n in zip(index, self._per_shard, strict=True)))
        return (
            None if shard is None else shard.read(tuple(i % n for i, n in zip(index, self._per_shard, strict=True)), most, room)
        )

    def read_many(self, box: Sequence[range], most: int, room: Room) -> list[Any] | None:
        """The stored bytes of a box of chunks, in C order; None if the index of a shard must be looked at chunk by chunk."""
        found = np.full(tuple(map(len, box)), None, dtype=object)
        parts: list[tuple[_Shard, Spans, tuple[slice, ...], Any]] = []
        axes = [range(axis.start // n, -(-axis.stop // n)) for axis, n in zip(box, self._per_shard, strict=True)]
        for at in itertools.product(*axes):
            shard = self._shard(at)
            if shard is None:
                continue
            bounds = [
                (max(axis.start, i * n), min(axis.stop, (i + 1) * n))
                for axis, i, n in zip(box, at, self._per_shard, strict=True)
            ]
            within = tuple(slice(a - i * n, b - i * n) for (a, b), i, n in zip(bounds, at, self._per_shard, strict=True))
            places = shard.places(within, most)
            if places is None:
                return None
            stored = places[..., 0] >= 0
            here = tuple(slice(a - axis.start, b - axis.start) for (a, b), axis in zip(bounds, box, strict=True))
            parts.append((shard, Spans(places[stored][:, 0], places[stored][:, 1]), here, stored))
        if len(parts) == 1 and parts[0][3].size == found.size and bool(parts[0][3].all()):
            shard, spans, *_ = parts[0]
            return list(shard.read_spans(spans, room(spans.nbytes)))
        data, begin = room(sum(spans.nbytes for _, spans, _, _ in parts)), 0
        for shard, spans, here, stored in parts:
            values = np.full(stored.shape, None, dtype=object)
            read = np.empty(int(stored.sum()), dtype=object)
            read[:] = shard.read_spans(spans, data[begin : begin + spans.nbytes])
            values[stored] = read
            found[here] = values
            begin += spans.nbytes
        return list(found.reshape(-1))

    def clear(self) -> None:
        """Forget all shards, which closes them."""
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
                opened = _open_file(path, self._fence)
                slot.shard = None if opened is None else _Shard(opened[0], path, self._layout, self._per_shard)
                slot.is_opened = True
            return slot.shard


class _Folder:
    """An open folder with chunk files: a file in it is found by its name alone.

    Only what cannot be wrong is done here: regular files, no links. The rest is left to `_read_file`, which says what is wrong.
    """

    def __init__(self, path: str, fence: Fence) -> None:
        self._path, self._fence, self._fd, self._is_there = path, fence, -1, True
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._is_there = False
        except OSError:
            return
        if self._fd >= 0 and not fence.holds_open(self._fd, path):
            self.close()

    def read(self, name: str, most: int) -> Any | None:
        """The content of a file of at most `most` bytes; None if there is no such file."""
        if not self._is_there:
            return None
        if self._fd < 0:
            return self._with_care(name, most)
        try:
            fd = os.open(name, _PLAIN, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except OSError:  # a link, a socket
            return self._with_care(name, most)
        try:
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_size <= most:
                data = os.pread(fd, found.st_size, 0)
                if len(data) == found.st_size:
                    return data
        finally:
            os.close(fd)
        return self._with_care(name, most)

    def _with_care(self, name: str, most: int) -> Bytes | None:
        return _read_file(os.path.join(self._path, name), most, fresh, self._fence)

    def close(self) -> None:
        """Close the folder. May be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _open_file(path: str, fence: Fence) -> tuple[int, int] | None:
    """Open a file for reading: its descriptor and its bytes; None if it does not exist.

    OSError if it is not a file, or is outside the fence.

    zarr-python takes a folder with a chunk's name as a missing chunk. Here it is an error: values would be lost.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe would wait for its writer
    except FileNotFoundError:
        if os.path.islink(path):  # the link's target is lost, so the chunk is not simply missing
            raise OSError(errno.ENOENT, f"a link to '{os.readlink(path)}', which is not there", path) from None
        return None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotAFileError(f"'{path}' is a socket, expected a file") from None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise NotAFileError(f"'{path}' is {kind_of(found.st_mode)}, expected a file")
        if not fence.holds_open(fd, path):
            raise OutsideError(f"'{path}' is a link to '{os.path.realpath(path)}', outside the store; {TARGET_HINT}")
        return fd, found.st_size
    except BaseException:
        os.close(fd)
        raise


def _read_file(path: str, most: int, room: Room, fence: Fence) -> Bytes | None:
    """The whole content of a file of at most `most` bytes; None if there is no such file."""
    opened = _open_file(path, fence)
    if opened is None:
        return None
    fd, nbytes = opened
    try:
        if nbytes > most:
            raise ValueError(f"'{path}' has {nbytes} bytes, a stored chunk of this array {most} at most")
        return _bytes_at(fd, path, 0, nbytes, room)
    finally:
        os.close(fd)


def _bytes_at(fd: int, path: str, offset: int, nbytes: int, room: Room = fresh) -> Bytes:
    """Exactly `nbytes` bytes from `offset`; OSError if the file is too short."""
    data = room(nbytes)
    done = read_at(fd, data, offset)
    if done < nbytes:
        raise OSError(errno.EIO, f"the file ends at byte {offset + done}, {nbytes} from {offset} were expected", path)
    return data
