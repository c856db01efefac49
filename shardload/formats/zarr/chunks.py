"""How are single chunks of a Zarr array read without zarr-python? By position, in any number of threads.

1. `chunk_reader` gives a reader if that is possible: the store is an `ObjectFolder`, and `metadata` understands the metadata.
2. `ChunkFiles` reads objects with one chunk each, `ShardFiles` ranges of shards, `ReferencedChunks` ranges of any objects.
3. Decoding is the same for all formats: see `stored_chunks`.

Before memory is allocated, each size that a file declares is compared with the file's own size, and with the most that a chunk
can have. docs/design/zarr.md has measurements against zarr-python, zarrs and TensorStore.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from shardload.formats.codecs.algorithms import Chain
from shardload.formats.contract.array import ArrayInfo, native_dtype
from shardload.formats.contract.chunk_reader import Encoded, Room, check_box, fresh
from shardload.formats.stored_chunks import ChunkRanges, StoredChunks
from shardload.formats.zarr.metadata import ZarrLayout
from shardload.formats.zarr.nodes import ArrayNode
from shardload.formats.zarr.references import ReferenceFolder
from shardload.storage.objects import ObjectFolder, StoredObject
from shardload.storage.remote import RemoteFolder
from shardload.system.thread_pool import call_together

# The most shards that are kept, each with its open file and its index. Many systems allow 1024 open files. An object of a store
# is no open file, and must be kept if it was fetched ahead.
_MOST_SHARDS, _MOST_REMOTE_SHARDS = 64, 4096
_MOST_INDICES_NBYTES = 1 << 24  # of those that are kept, beside the one in use
_MOST_OPENED_AHEAD, _MOST_BOXES_AHEAD = 32, 1024  # shards of a store whose indices are fetched together, and their boxes

# Offset and length, in a shard's index, of a missing chunk.
_MISSING = 2**64 - 1


def chunk_reader(array: Any, node: ArrayNode, info: ArrayInfo) -> ZarrChunks | None:
    """A reader of the chunks of an open array; None if only zarr-python can read them.

    Parameters
    ----------
    array : zarr.Array
        An open array of a `WatchedStore`; only its store and path are used.
    node : ArrayNode
        Its metadata.
    info : ArrayInfo
        Its description in the source.
    """
    folder = array.store.folder
    try:
        layout, dtype = ZarrLayout.of(node.document, node.dtype), native_dtype(node.dtype)
        n_compressors = sum(stage.n_more is None for stage in layout.stages)
        fill = np.zeros((), dtype) if node.fill is None else np.asarray(node.fill, dtype)
    except (ArithmeticError, LookupError, TypeError, ValueError):  # metadata of an unexpected form is not covered either
        return None
    has_shards, is_referenced = layout.per_shard is not None, isinstance(folder, ReferenceFolder)
    if folder is None or n_compressors > 1 or layout.chunk_shape != info.chunks or fill.shape or (has_shards and is_referenced):
        return None
    kind: type[ZarrChunks] = ReferencedChunks if is_referenced else ShardFiles if has_shards else ChunkFiles
    return kind(folder, f"{array.path}/" if array.path else "", layout, info.shape, dtype, fill)


class ZarrChunks(StoredChunks):
    """The chunks of one array. Safe to use from several threads at once.

    Parameters
    ----------
    folder : ObjectFolder
        The store.
    prefix : str
        What the keys of the array begin with.
    layout : ZarrLayout
        Where the chunks are and how they are encoded.
    shape : tuple of int
        Elements along each axis of the array.
    dtype : dtype
        Type of the decoded values, in native byte order.
    fill : ndarray
        The value of missing chunks, as a 0-d array.
    """

    def __init__(
        self,
        folder: ObjectFolder,
        prefix: str,
        layout: ZarrLayout,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        fill: np.ndarray[Any, Any],
    ) -> None:
        counts = tuple(-(-n // m) for n, m in zip(shape, layout.chunk_shape, strict=True))
        super().__init__(counts, dtype, Chain(layout.stages, math.prod(layout.chunk_shape) * dtype.itemsize), fill)
        self._folder, self._prefix, self._layout, self._is_closed = folder, prefix, layout, False

    def _key(self, position: tuple[int, ...]) -> str:
        return self._prefix + self._layout.key(position)

    def expect(self, boxes: Iterator[Sequence[range]]) -> None:
        """See `ChunkReader`. The reader may be closed before all is read: nothing is fetched after that."""
        super().expect(itertools.takewhile(lambda _: not self._is_closed, boxes))

    def close(self) -> None:
        """Close what is kept open."""
        self._is_closed = True
        if isinstance(self._folder, RemoteFolder):
            self._folder.forget(self._prefix)


class ChunkFiles(ZarrChunks):
    """Chunks each of which is an object."""

    def locate(self, box: Sequence[range]) -> list[ChunkRanges]:
        """Where a single chunk of a local store is. In other cases none: `fetch` and `expect` read chunks by their keys."""
        if math.prod(map(len, box)) != 1 or isinstance(self._folder, RemoteFolder):
            return []
        stored = self._folder.open(self._key(tuple(axis.start for axis in box)))
        return [] if stored is None else [ChunkRanges(stored, np.zeros(1, np.int64), np.array([stored.nbytes]))]

    def fetch(self, box: Sequence[range], room: Room = fresh) -> Encoded:
        """Read chunks as they are stored: see `StoredChunks.fetch`."""
        if math.prod(map(len, box)) == 1 and not isinstance(self._folder, RemoteFolder):  # (where opening it is a request more)
            return super().fetch(box, room)
        check_box(box, self.counts)
        return Encoded(self._folder.read_many(map(self._key, itertools.product(*box)), self.chain.most_stored_nbytes))

    def expect(self, boxes: Iterator[Sequence[range]]) -> None:
        """See `ChunkReader`: the same objects are fetched ahead."""
        if isinstance(self._folder, RemoteFolder):
            open_boxes = itertools.takewhile(lambda _: not self._is_closed, boxes)
            keys = (self._key(position) for box in open_boxes for position in itertools.product(*box))
            self._folder.expect(keys, self.chain.most_stored_nbytes, self.chain.nbytes)


class ReferencedChunks(ZarrChunks):
    """Chunks that are ranges of other objects."""

    _folder: ReferenceFolder

    def locate(self, box: Sequence[range]) -> list[ChunkRanges]:
        """Where the chunks of a box are: a `ChunkRanges` for each object that has some of them."""
        by_object: dict[int, tuple[StoredObject, list[tuple[int, int, int]]]] = {}
        n = 0
        for number, position in enumerate(itertools.product(*box)):
            n += 1
            if (place := self._folder.place(self._key(position))) is not None:
                stored, offset, nbytes = place
                by_object.setdefault(id(stored), (stored, []))[1].append((number, offset, nbytes))
        of_objects = []
        for stored, places in by_object.values():
            numbers, offsets, sizes = np.array(places, dtype=np.int64).T
            of_objects.append(ChunkRanges(stored, offsets, sizes, None if len(places) == n else numbers))
        return of_objects


class ShardFiles(ZarrChunks):
    """Chunks in shard files. The last few that were used stay open, each with its index.

    So a file server looks a shard up once, not once per chunk, and the index and the chunks come from the same file, even if
    another program replaces it.
    """

    def __init__(self, folder: ObjectFolder, prefix: str, layout: ZarrLayout, *array: Any) -> None:
        super().__init__(folder, prefix, layout, *array)
        self._per_shard = layout.per_shard or ()
        self._index_nbytes = 16 * math.prod(self._per_shard) + sum(stage.n_more or 0 for stage in layout.index_stages)
        most = _MOST_REMOTE_SHARDS if isinstance(folder, RemoteFolder) else _MOST_SHARDS
        self._most_kept = max(1, min(most, _MOST_INDICES_NBYTES // (16 * math.prod(self._per_shard))))
        self._lock = threading.Lock()  # protects the table; never held while a file is read
        self._shards: OrderedDict[tuple[int, ...], _Shard] = OrderedDict()

    def locate(self, box: Sequence[range]) -> list[ChunkRanges]:
        """Where the chunks of a box are in the shards that have them."""
        numbers = np.arange(math.prod(map(len, box))).reshape(tuple(map(len, box)))
        of_shards: list[ChunkRanges] = []
        for position in self._shards_met(box):
            shard = self._shard(position)
            if shard.stored is None or shard.index is None:
                continue
            in_shard, in_box = [], []  # the chunks of the box that are in this shard
            for axis, k, n in zip(box, position, self._per_shard, strict=True):
                start, stop = max(axis.start, k * n), min(axis.stop, (k + 1) * n)
                in_shard.append(slice(start - k * n, stop - k * n))
                in_box.append(slice(start - axis.start, stop - axis.start))
            places = shard.index[tuple(in_shard)].reshape(-1, 2)
            is_stored = (places != _MISSING).any(axis=1)
            largest = places[is_stored].max(initial=0)
            if largest >= 1 << 62:
                raise ValueError(f"the index of '{self._key(position)}' has a chunk at {largest}: it is damaged")
            offsets, sizes = places[is_stored].astype(np.int64).T
            has_all = len(offsets) == numbers.size
            stored_numbers = None if has_all else numbers[tuple(in_box)].reshape(-1)[is_stored]
            of_shards.append(ChunkRanges(shard.stored, offsets, sizes, stored_numbers))
        return of_shards

    def _shards_met(self, box: Sequence[range]) -> Iterator[tuple[int, ...]]:
        """The positions of the shards that have chunks of a box."""
        axes = zip(box, self._per_shard, strict=True)
        return itertools.product(*(range(axis.start // n, -(-axis.stop // n)) for axis, n in axes))

    def expect(self, boxes: Iterator[Sequence[range]]) -> None:
        """See `ChunkReader`."""
        super().expect(self._opened_ahead(boxes) if isinstance(self._folder, RemoteFolder) else boxes)

    def _opened_ahead(self, boxes: Iterator[Sequence[range]]) -> Iterator[Sequence[range]]:
        """The same boxes. The indices of the next few shards are fetched together: each answer takes long."""
        n = min(_MOST_OPENED_AHEAD, self._most_kept)
        while not self._is_closed:
            batch, positions = list[Sequence[range]](), dict[tuple[int, ...], None]()
            for box in boxes:
                batch.append(box)
                positions |= dict.fromkeys(self._shards_met(box))
                if len(positions) >= n or len(batch) >= _MOST_BOXES_AHEAD:
                    break
            if not batch:
                return
            with self._lock:
                new = [position for position in positions if position not in self._shards]
            call_together([partial(self._shard, position) for position in new], "shardload-indices", n)
            yield from batch

    def close(self) -> None:
        """Close the shards that are kept open."""
        super().close()
        with self._lock:
            self._shards.clear()

    def _shard(self, position: tuple[int, ...]) -> _Shard:
        with self._lock:
            shard = self._shards.setdefault(position, _Shard())
            self._shards.move_to_end(position)
            if len(self._shards) > self._most_kept:
                self._shards.popitem(last=False)
        with shard.lock:
            if shard.index is None:
                ahead = self._index_nbytes if self._layout.is_index_first else -self._index_nbytes
                shard.stored = self._folder.open(self._key(position), ahead)
                shard.index = self._index_of(shard.stored, self._key(position))
        return shard

    def _index_of(self, stored: StoredObject | None, key: str) -> np.ndarray[Any, Any]:
        """The index of a shard: offset and length of each chunk. All chunks of a shard that does not exist are missing."""
        index, nbytes = np.full((*self._per_shard, 2), _MISSING, dtype="<u8"), self._index_nbytes
        if stored is None:
            return index
        if nbytes > stored.nbytes:
            raise ValueError(f"'{key}' has {stored.nbytes} bytes, its index alone would take {nbytes}")
        encoded = fresh(nbytes)
        stored.read_into(encoded, 0 if self._layout.is_index_first else stored.nbytes - nbytes)
        try:
            Chain(self._layout.index_stages, index.nbytes).decode([encoded], index)
        except ValueError as error:
            raise ValueError(f"the index of '{key}' is damaged: {error}") from None
        return index


class _Shard:
    """A shard that is kept. The first thread that takes `lock` opens it, and reads its index."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stored: StoredObject | None = None
        self.index: np.ndarray[Any, Any] | None = None
