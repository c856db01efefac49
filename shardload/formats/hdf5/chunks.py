"""Where are the chunks of an HDF5 dataset, and how do several threads decode them? The HDF5 library does one at a time.

1. `ChunkPlaces` knows where each chunk is, which ones are missing, and whether the sizes that the file declares are possible.
   It asks the file's own index (`ChunkTree`), or else HDF5: for a few chunks, or a list of all in a microsecond each.
2. `open_chunks` accepts a dataset if this package can do all that HDF5 would do: the type and every filter are known.
3. `Hdf5Chunks` reads the bytes without HDF5 and without its lock, and undoes the filters (`stored_chunks`).

The HDF5 library does not always list a chunk where it is. If exactly one axis of a dataset can grow, the newer rules
(``libver="latest"``) index its chunks as an "extensible array". That numbers them along the growing axis first. But
``H5Dchunk_iter`` turns these numbers into positions as if the axes were in order. So if the growing axis is not the first one,
it gives chunks the positions of others (seen in HDF5 1.14.4 and 2.0.0). Reading values is right. `_true_place` puts that right;
a later library may list all chunks where they are, so the installed one is tried out.

The file's own index. HDF5 tells where chunks are one by one, each as an object of Python: 1.3 microseconds for each, on every
rank that reads. The index of most files is a version 1 B-tree: nodes of some 60 entries, which NumPy takes as they are, in a
tenth of that time.

1. `tree_of` reads the object header of the dataset, of version 1 or 2, in all its blocks, and finds the message that says where
   its B-tree is.
2. `ChunkTree` reads the nodes level by level, down to the leaves: those below which a box of chunks may be, because the chunks
   are in the order of their positions. A leaf has an entry for each chunk: size, filter mask, position and address. The nodes
   of a level are read at once: of an object in a store that takes as long as reading one.
3. An index that contradicts itself is damaged, and an error. HDF5 goes down from the root by the keys, which are positions: an
   entry has those between its key and the next one. If a key is wrong, a search ends in another node, finds nothing there, and
   HDF5 gives fill values, without an error. Chunks that share bytes of the file are damage too.

Source: HDF5 File Format Specification, version 3.0, sections III.A.1 (version 1 B-trees), IV.A (object headers) and IV.A.2.i
(layout message).
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil  # HDF5's lock in h5py, which its raw reads did not always take (h5py issue 2764)

from shardload.formats.codecs.algorithms import Chain, decode_byte_order
from shardload.formats.contract.array import is_added
from shardload.formats.contract.chunk_reader import chunks_met
from shardload.formats.hdf5.filters import CHECKSUM, HELPERS, stage_of
from shardload.formats.hdf5.opened import OpenDataset, are_edges_plain, cached, file_in_memory, number_of, swap_size
from shardload.formats.stored_chunks import ChunkRanges, StoredChunks
from shardload.planning.region import Region, cut_box
from shardload.storage.objects import Ints, Ranges, StoredObject

Entries = np.ndarray[Any, Any]  # of a node of a `ChunkTree`

_UNDEFINED = 2**64 - 1  # an address that is none
_DATASPACE, _LAYOUT, _CONTINUATION = 0x01, 0x08, 0x10  # messages of an object header
_SHARED = 2  # a bit of a message's flags: its content is elsewhere
_MOST_BLOCKS, _MOST_HEADER_NBYTES = 1024, 1 << 20  # of a header; all of its messages are kept
_MOST_ENTRIES = 1 << 17  # chunks to look for at once: they take 50 bytes for each, twice
_MOST_WALKS = 64  # through the index, for which more are looked for at once: most of so many are missing, or a table is larger
_MOST_CHILDREN = 64  # of a node, unless the file's creator chose another number
_CHUNKED = 2
_LOST = "The HDF5 library would not find a stored chunk, and give fill values in its place"
_SUPERBLOCK_NBYTES, _HEADER_NBYTES = 48, 16  # at least
_HEAD = struct.Struct("<4sBBHQQ")  # of a node: mark, type, level, number of entries, siblings
_MOST_KEPT = 1 << 22  # chunks whose places are kept at once, in 24 bytes each
_LISTED_AT_ONCE = 1 << 12  # chunks: HDF5's answers take some hundred bytes for each
FEW = 8  # chunks that HDF5 is asked for one by one: it goes through its index for each, in a tenth of the time of a list
_NOWHERE = -1  # the offset of a missing chunk
_EXTENSIBLE_ARRAY = 4  # H5D_CHUNK_IDX_EARRAY


def _damaged(where: str) -> ValueError:
    """The error about an index of chunks that contradicts itself."""
    return ValueError(f"its index of chunks is damaged: {where}")


@dataclass(frozen=True)
class ChunkTree:
    """A version 1 B-tree of chunks.

    Attributes
    ----------
    stored : StoredObject
        The file.
    header, root : int
        Addresses of the dataset's object header, and of the tree; `_UNDEFINED` if no chunk was ever written.
    chunk : tuple of int
        Elements of a chunk along each axis, then the bytes of an element, as in the keys of nodes.
    largest : tuple of int
        The shape that the array may grow to.
    """

    stored: StoredObject
    header: int
    root: int
    chunk: tuple[int, ...]
    largest: tuple[int, ...]

    def chunks_in(self, box: Sequence[range]) -> tuple[Ints, Entries]:
        """The position in the grid, and the entry, of each stored chunk of a box, in C order. ValueError if the index
        contradicts itself on the way to them.
        """
        # An entry of a node, as it is in the file: bytes of the stored chunk, filters left out, the first element's position
        # (with a zero behind), and the chunk's offset. Above the leaves, the last is the offset of a child node, and the others
        # are those of its first chunk.
        entry = np.dtype([("nbytes", "<u4"), ("mask", "<u4"), ("start", "<u8", (len(box) + 1,)), ("child", "<u8")])
        if self.root == _UNDEFINED:
            return np.zeros((0, len(box)), dtype=np.int64), np.zeros(0, dtype=entry)
        first, last = (np.array([[*(axis[k] for axis in box), 0]], dtype=np.int64) for k in (0, -1))
        nodes, lows, highs = [self.root], None, None  # lows, highs: the keys on both sides of each, as the node above has them
        all_nodes: list[tuple[int, int]] = []  # where each is, and the bytes of its entries
        head = self.stored.read_at_most(self.root, _HEAD.size) if self.root < self.stored.nbytes else b""
        level = int(_HEAD.unpack(head)[2]) if len(head) == _HEAD.size else 0  # `_nodes` says that it is outside of the file
        while True:
            contents = self._entries(nodes, level, entry)
            entries = np.concatenate([of_node for of_node, _ in contents])
            counts = np.array([len(of_node) for of_node, _ in contents])
            all_nodes += zip(nodes, (counts * entry.itemsize).tolist(), strict=True)
            if not len(entries) and not level and nodes == [self.root]:  # an array that was cut to nothing has an empty root
                return np.zeros((0, len(box)), dtype=np.int64), entries
            if not counts.all():
                raise _damaged("a node has no entries")
            keys, rights = self._scaled(entries["start"]), self._scaled(np.concatenate([right for _, right in contents]))
            ends = np.cumsum(counts)
            nexts = np.concatenate([keys[1:], rights[-1:]])
            nexts[ends - 1] = rights
            self._check_order(keys, nexts, ends, lows, highs)
            # A child has the positions from its key up to the next one.
            is_wanted = ~_is_before(last, keys) & (_is_before(first, nexts) if level else ~_is_before(keys, first))
            if level == 0:
                self._check_leaves(entries, keys)
                positions = keys[:, :-1]
                for axis, along_axis in zip(box, positions.T, strict=True):
                    is_wanted &= (along_axis >= axis.start) & (along_axis < axis.stop)
                self._check_places(entries[is_wanted], all_nodes)
                return positions[is_wanted], entries[is_wanted]
            entries, lows, highs = entries[is_wanted], keys[is_wanted], nexts[is_wanted]
            nodes = entries["child"].tolist()
            if not nodes:
                return np.zeros((0, len(box)), dtype=np.int64), entries
            level -= 1

    def _nodes(self, nodes: list[int], nbytes: int) -> list[memoryview]:
        """So many bytes of each node, fewer where the file ends."""
        file_nbytes = self.stored.nbytes
        for node in nodes:
            if node + _HEAD.size > file_nbytes:
                raise _damaged(f"a node at byte {node} lies outside of the file")
        offsets = np.array(nodes, dtype=np.int64)
        ranges = Ranges(offsets, np.minimum(nbytes, file_nbytes - offsets))
        return self.stored.read_ranges(ranges, np.empty(ranges.nbytes, dtype=np.uint8))

    def _entries(self, nodes: list[int], level: int, entry: np.dtype[Any]) -> list[tuple[Entries, Ints]]:
        """The entries of each node, and the position in the key behind the last of them."""
        usual_nbytes = _HEAD.size + (_MOST_CHILDREN + 1) * entry.itemsize - 8  # the last key leads to no child
        contents, stops = self._nodes(nodes, usual_nbytes), list[int]()
        for node, data in zip(nodes, contents, strict=True):
            mark, kind, node_level, n, _, _ = _HEAD.unpack_from(data)
            if (mark, kind, node_level) != (b"TREE", 1, level):
                raise _damaged(f"the node at byte {node} is {mark!r} of level {node_level}, expected level {level}")
            stops.append(_HEAD.size + (n + 1) * entry.itemsize - 8)
        if sum(stops) > self.stored.nbytes:  # they share bytes, and would take any amount of memory
            raise _damaged(f"the {len(nodes)} nodes of level {level} have more bytes than the file")
        if max(stops) > usual_nbytes:
            contents = self._nodes(nodes, max(stops))
        parsed = []
        for node, data, stop in zip(nodes, contents, stops, strict=True):
            if len(data) < stop:
                n = (stop + 8 - _HEAD.size) // entry.itemsize - 1
                raise _damaged(f"the {n} entries of the node at byte {node} reach past the end of the file")
            entries = np.frombuffer(bytes(data[_HEAD.size : stop]) + bytes(8), dtype=entry)
            parsed.append((entries[:-1], entries["start"][-1:]))
        return parsed

    def _scaled(self, starts: Entries) -> Ints:
        """Keys as HDF5 compares them: positions in the grid of all chunks, and a last number that is 0 for a chunk."""
        return (starts // np.array(self.chunk, dtype=np.uint64)).astype(np.int64)

    def _check_order(self, keys: Ints, nexts: Ints, ends: Ints, lows: Ints | None, highs: Ints | None) -> None:
        is_lost = ~_is_before(keys, nexts)
        if lows is not None and highs is not None:
            firsts = np.concatenate([[0], ends[:-1]])
            is_lost[firsts] |= _is_before(keys[firsts], lows)
            is_lost[ends - 1] |= ~_is_before(keys[ends - 1], highs)
        if is_lost.any():
            raise _damaged(f"the entry for the chunk at {tuple(keys[is_lost.argmax(), :-1].tolist())} is out of order. {_LOST}")

    def _check_leaves(self, entries: Entries, keys: Ints) -> None:
        starts = entries["start"]
        is_wrong = (keys * np.array(self.chunk, dtype=np.int64) != starts.astype(np.int64)).any(axis=1) | (starts[:, -1] != 0)
        is_wrong |= (starts[:, :-1] >= np.array(self.largest, dtype=np.uint64)).any(axis=1)
        if is_wrong.any():
            raise _damaged(f"a chunk at element {tuple(starts[is_wrong.argmax(), :-1].tolist())}, where none begins. {_LOST}")

    def _check_places(self, entries: Entries, nodes: list[tuple[int, int]]) -> None:
        """ValueError if bytes of the file belong to two chunks, or to a chunk and to the index, header or superblock."""
        metadata = np.array([(0, _SUPERBLOCK_NBYTES), (self.header, _HEADER_NBYTES), *nodes], dtype=np.uint64)
        starts = np.concatenate([entries["child"], metadata[:, 0]])
        stops = starts + np.concatenate([entries["nbytes"].astype(np.uint64), metadata[:, 1]])
        order = np.argsort(starts)
        starts, stops = starts[order], stops[order]
        overlaps = (stops[:-1] > starts[1:]) & (starts[1:] != _UNDEFINED)
        if overlaps.any():
            k = int(overlaps.argmax())
            raise _damaged(f"a chunk and another one, or metadata, share the bytes {starts[k + 1]} to {stops[k]}")


def _is_before(keys: Ints, others: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For each row of `keys`: does it come before that of `others` in C order?

    >>> _is_before(np.array([[0, 4], [1, 0], [2, 2]]), np.array([[0, 5], [0, 9], [2, 2]])).tolist()
    [True, False, False]
    """
    is_less, is_equal = np.zeros((), dtype=bool), np.ones((), dtype=bool)
    for a, b in zip(keys.T, others.T, strict=True):
        is_less = is_less | (is_equal & (a < b))
        is_equal = is_equal & (a == b)
    return is_less


def _messages_of(stored: StoredObject, address: int) -> list[tuple[int, bytes]]:
    """The messages of an object header that are in it: type and content. ValueError or `struct.error` if the header is of an
    unknown kind, or cut off.

    Checksums are not looked at: HDF5 does that when it opens a dataset.
    """
    head = stored.read_at_most(address, 16)
    is_newer = head.startswith(b"OHDR\2")
    if is_newer:
        flags = head[5]
        size_at = address + 6 + (16 if flags & 32 else 0) + (4 if flags & 16 else 0)
        size_nbytes, prefix_nbytes = 1 << (flags & 3), 6 if flags & 4 else 4
        blocks = [(size_at + size_nbytes, int.from_bytes(stored.read_at_most(size_at, size_nbytes), "little"))]
    elif head[:1] == b"\1":
        prefix_nbytes, blocks = 8, [(address + 16, int.from_bytes(head[8:12], "little"))]
    else:
        raise ValueError(f"an object header that begins with {head[:4]!r} at {address}")
    messages = []
    for k, (start, nbytes) in enumerate(blocks):  # `blocks` grows: each continuation is one more
        if k > _MOST_BLOCKS or sum(length for _, length in blocks) > _MOST_HEADER_NBYTES:
            raise ValueError(f"an object header that is too long, at {start}")
        data, at = stored.read_at_most(start, nbytes), 0
        while at + prefix_nbytes <= nbytes:  # the rest may be a gap that is too short for a message
            kind, size, flags = struct.unpack_from("<BHB" if is_newer else "<HHB", data, at)
            content = data[at + prefix_nbytes : at + prefix_nbytes + size]
            if not flags & _SHARED:
                messages.append((kind, content))
            if kind == _CONTINUATION:  # in the newer version with a mark before its messages, and a checksum behind
                start_next, nbytes_next = struct.unpack_from("<QQ", content)
                blocks.append((start_next + 4, nbytes_next - 8) if is_newer else (start_next, nbytes_next))
            at += prefix_nbytes + size
    return messages


def tree_of(stored: StoredObject, header: int, chunk: Sequence[int]) -> ChunkTree | None:
    """The index of a dataset; None if it is of another kind, or anything is unusual.

    Parameters
    ----------
    stored : StoredObject
        The file.
    header : int
        Address of the dataset's object header.
    chunk : sequence of int
        Elements of a chunk along each axis.
    """
    ndim = len(chunk)
    largest: tuple[int, ...] = (_UNDEFINED,) * ndim
    root = itemsize = 0
    try:
        for kind, content in _messages_of(stored, header):
            if kind == _DATASPACE:
                version, n_axes, flags = content[:3]
                first = (8 if version == 1 else 4) + (8 * ndim if flags & 1 else 0)
                if n_axes == ndim:
                    largest = struct.unpack_from(f"<{ndim}Q", content, first)
            if kind == _LAYOUT:
                version, layout, n_axes = content[:3]
                if (version, layout, n_axes) != (3, _CHUNKED, ndim + 1):
                    return None
                root, *_, itemsize = struct.unpack_from(f"<Q{ndim + 1}I", content, 3)
    except (struct.error, IndexError, OSError, ValueError):
        return None
    return ChunkTree(stored, header, root, (*chunk, itemsize), largest) if itemsize else None


def fill_value(dataset: OpenDataset, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The value of `dataset` where nothing was written, as a 0-d array; zero if HDF5 leaves the reader's buffer as it is.

    HDF5 does that if the dataset's creator chose never to fill, or no fill value. h5py passes HDF5 a buffer of zeros.
    """
    creation = dataset.creation
    # In the file's byte order: to another one HDF5 converts neither bit fields nor the complex numbers of HDF5 2.0.
    value = np.zeros((), np.float32 if is_added(dtype) else dtype.newbyteorder(dataset.kind.dtype.byteorder))
    if not leaves_gaps(dataset):
        creation.get_fill_value(value)
    return value.astype(dtype)


def leaves_gaps(dataset: OpenDataset) -> bool:
    """True if HDF5 writes nothing into the reader's buffer for missing values."""
    creation = dataset.creation
    is_never_filled = creation.get_fill_time() == h5py.h5d.FILL_TIME_NEVER and creation.get_layout() != h5py.h5d.VIRTUAL
    return is_never_filled or bool(creation.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED)


@dataclass(slots=True)
class ChunkTable:
    """Where the chunks of a box are.

    `columns` has offsets, sizes and masks, each with an axis for each axis of the grid. The offset of a missing chunk is -1. If
    bit k of a mask is set, filter k was not applied; there are no other bits.
    """

    box: tuple[range, ...]
    columns: Ints

    def part(self, box: Sequence[range]) -> Ints:
        """Offsets, sizes and masks, a row each, of the chunks of a smaller box, in C order."""
        index = [slice(b.start - a.start, b.stop - a.start) for a, b in zip(self.box, box, strict=True)]
        return self.columns[(slice(None), *index)].reshape(3, -1)

    def add(self, positions: Ints, *columns: Any) -> None:
        """Add chunks by their positions in the grid, a row each. Those that are not in the box are left out."""
        start, stop = (np.array([getattr(axis, end) for axis in self.box], dtype=np.int64) for end in ("start", "stop"))
        is_inside = ((positions >= start) & (positions < stop)).all(axis=1)
        index = (positions[is_inside] - start).T
        self.columns[(slice(None), *index)] = [np.asarray(column)[is_inside].astype(np.int64) for column in columns]


def _is_inside(box: Sequence[range], larger: Sequence[range]) -> bool:
    return all(a.start <= b.start and b.stop <= a.stop for a, b in zip(larger, box, strict=True))


def list_chunks(dataset: h5py.Dataset, take: Callable[[Ints, Ints, Ints, Ints], None], few: Ints | None = None) -> None:
    """Give `take` what HDF5 says of all stored chunks, some at a time: first elements (a row each), offsets, sizes, masks.

    Where HDF5 says a wrong first element (`_true_place`), the true one is given. `few` are the first elements of those that
    matter, if they are few: where HDF5 finds them by these, no others are given.
    """
    chunks: list[Any] = []
    true_place = _true_place(dataset)

    def flush() -> None:
        if chunks:
            starts, masks, offsets, sizes = zip(*chunks, strict=True)
            chunks.clear()
            rows = np.fromiter(itertools.chain.from_iterable(starts), np.int64).reshape(len(offsets), -1)
            rows = rows if true_place is None else np.array(true_place(rows.T)).T
            take(rows, np.array(offsets), np.array(sizes), np.array(masks))

    def append(chunk: Any) -> None:
        chunks.append(chunk)
        if len(chunks) >= _LISTED_AT_ONCE:
            flush()

    with phil:
        if few is not None and true_place is None:
            infos = (dataset.id.get_chunk_info_by_coord(tuple(start)) for start in few.tolist())
            chunks.extend(info for info in infos if info.byte_offset is not None)
        else:
            dataset.id.chunk_iter(append)
        flush()


class ChunkPlaces:
    """Where the chunks of one open, chunked dataset are. Safe to use from several threads at once.

    Parameters
    ----------
    dataset : OpenDataset
        The dataset.
    expected : Region, optional
        Chunks that meet it will be asked for, and hardly any other.
    table : ChunkTable, optional
        Where some chunks are, as another rank has said. No other may be asked for.
    """

    def __init__(self, dataset: OpenDataset, expected: Region | None = None, table: ChunkTable | None = None) -> None:
        creation = dataset.creation
        self.raw, self._dataset, self._expected = dataset.raw, dataset, expected
        self.chunk: tuple[int, ...] = tuple(creation.get_chunk())
        self.counts = tuple(-(-n // c) for n, c in zip(dataset.shape, self.chunk, strict=True))
        self._nbytes = math.prod(self.chunk) * int(dataset.kind.get_size())
        self.filters = [number for number, *_ in dataset.stored_filters]
        reach_over = [axis for axis, (n, c) in enumerate(zip(dataset.shape, self.chunk, strict=True)) if n % c]
        self._plain_axes = reach_over if reach_over and self.filters and are_edges_plain(creation) else []
        self._lock = threading.Lock()
        self._table, self._is_fixed = table, table is not None

    @cached
    def _tree(self) -> ChunkTree | None:
        header = self._dataset.header
        return None if self.raw is None or header is None else tree_of(self.raw, header, self.chunk)

    def of(self, box: Sequence[range]) -> Ints:
        """Offsets, sizes and masks, a row each, of the chunks of a box, in C order: see `ChunkTable`. ValueError if the index
        contradicts itself.
        """
        table = self._table
        if table is None or not _is_inside(box, table.box):
            with self._lock:
                table = self._table
                if table is None or not _is_inside(box, table.box):
                    table = self._table = self._listed(self._worth_listing(box))
        return table.part(box)

    def _worth_listing(self, box: Sequence[range]) -> Sequence[range]:
        """The chunks to list if those of a box are asked for: all that are expected, or all."""
        boxes = [[range(n) for n in self.counts]]
        if self._expected is not None and self._expected.size:
            boxes.insert(0, chunks_met(self._expected, self.chunk))
        for larger in boxes:
            if _is_inside(box, larger) and (self._tree is None or math.prod(map(len, larger)) <= _MOST_KEPT):
                return larger
        return box

    def _listed(self, box: Sequence[range]) -> ChunkTable:
        if self._is_fixed:
            raise ValueError(f"chunks {tuple(box)} were not asked for when the file was open")
        table = ChunkTable(tuple(box), np.zeros((3, *map(len, box)), dtype=np.int64))
        table.columns[0] = _NOWHERE

        def add(positions: Ints, offsets: Any, sizes: Any, masks: Any) -> None:
            is_plain = np.zeros(len(positions), dtype=bool)
            for axis in self._plain_axes:
                is_plain |= positions[:, axis] == self.counts[axis] - 1
            all_filters = (1 << len(self.filters)) - 1
            table.add(positions, offsets, sizes, np.where(is_plain, all_filters, np.asarray(masks) & all_filters))

        n = math.prod(map(len, box))
        if self._tree is not None:
            for part in cut_box(box, max(_MOST_ENTRIES, n // _MOST_WALKS)) if n else ():
                positions, entries = self._tree.chunks_in(part)
                add(positions, entries["child"], entries["nbytes"], entries["mask"])
        elif n:
            chunk = np.array(self.chunk)
            few = np.array(list(itertools.product(*box))) * chunk if n <= FEW else None
            list_chunks(self._dataset, lambda starts, *columns: add(starts // chunk, *columns), few)
        return table

    def missing(self, region: Region) -> list[tuple[int, ...]]:
        """The missing chunks that meet a non-empty region."""
        box = chunks_met(region, self.chunk)
        if self._tree is None and self._table is None and self._dataset.n_stored >= math.prod(self.counts):
            return []
        is_missing = (self.of(box)[0] == _NOWHERE).reshape(tuple(map(len, box)))
        return list(map(tuple, (np.argwhere(is_missing) + [axis.start for axis in box]).tolist()))

    def check(self, region: Region) -> None:
        """Raise ValueError if a stored chunk that meets a region has an impossible size: too long, or too short without
        compression.

        HDF5 does not look. If a chunk is too long, its gzip filter takes memory as long as the stream goes on. If a chunk
        without compression is too short, HDF5 fills the rest with whatever is in its memory, and its Fletcher-32 filter reads
        past the end of memory. With nothing to decode, h5py's LZF filter may go on for ever.
        """
        offsets, sizes, masks = self.of(chunks_met(region, self.chunk))
        is_stored = offsets != _NOWHERE
        sizes, masks = sizes[is_stored], masks[is_stored]
        for mask in np.unique(masks).tolist():
            applied = [number for k, number in enumerate(self.filters) if not mask >> k & 1]
            least = most = self._nbytes + 4 * applied.count(CHECKSUM)  # a shuffle gives as many bytes as it takes
            if not set(applied) <= {*HELPERS}:
                least, most = 4 * applied.count(CHECKSUM) + 1, self._nbytes + self._nbytes // 2 + 4096
            with_mask = sizes[masks == mask]
            wrong = with_mask[(with_mask < least) | (with_mask > most)]
            if len(wrong):
                expected = f"{least} to {most}" if least < most else str(least)
                raise _damaged(f"a stored chunk of {wrong[0]} bytes; expected {expected}")


def open_chunks(dataset: OpenDataset, dtype: np.dtype[Any], places: ChunkPlaces) -> Hdf5Chunks | None:
    """A reader for the chunks of `dataset` as values of `dtype` (a native type); None if only HDF5 may read or decode them."""
    creation = dataset.creation
    swap = swap_size(dataset.kind, dtype)
    stages = [stage_of(number, values) for number, _, values, _ in reversed(dataset.stored_filters)]
    decoders = [stage for stage in stages if stage is not None]
    n_compressors = sum(stage.n_more is None for stage in decoders)
    if dataset.raw is None or swap is None or len(decoders) < len(stages) or n_compressors > 1:
        return None
    if creation.fill_value_defined() == h5py.h5d.FILL_VALUE_UNDEFINED and not dataset.n_stored:
        return None  # no values at all: HDF5 raises an error
    chain = Chain([*decoders, *([decode_byte_order(swap)] if swap else [])], math.prod(places.chunk) * dtype.itemsize)
    return Hdf5Chunks(dataset.raw, places, dtype, chain, fill_value(dataset, dtype))


class Hdf5Chunks(StoredChunks):
    """The chunks of one open HDF5 dataset. Made by `open_chunks`."""

    def __init__(
        self, stored: StoredObject, places: ChunkPlaces, dtype: np.dtype[Any], chain: Chain, fill: np.ndarray[Any, Any]
    ) -> None:
        super().__init__(places.counts, dtype, chain, fill)
        self._stored, self._places = stored, places

    def locate(self, box: Sequence[range]) -> list[ChunkRanges]:
        """Where the chunks of a box are in the file."""
        offsets, sizes, masks = self._places.of(box)
        numbers = None
        if int(offsets[0]) == _NOWHERE if len(offsets) == 1 else bool((offsets == _NOWHERE).any()):
            numbers = np.flatnonzero(offsets != _NOWHERE)
            offsets, sizes = offsets[numbers], sizes[numbers]
        skipped, n = {}, len(self._places.filters)
        if masks[0] if len(masks) == 1 else masks.any():  # the stages of the chain undo the last filter first
            skipped = {
                number: frozenset(n - 1 - k for k in range(n) if mask >> k & 1)
                for number, mask in enumerate(masks.tolist())
                if mask
            }
        return [ChunkRanges(self._stored, offsets, sizes, numbers, skipped)]


def _true_place(dataset: h5py.Dataset) -> Callable[[Any], tuple[Any, ...]] | None:
    """How positions of chunks (their first elements) in the library's list, as an array for each axis, become the true ones;
    None if they are the true ones. ValueError if the list cannot be used.
    """
    chunk, largest = tuple(dataset.chunks), tuple(dataset.maxshape)
    growing = [axis for axis, n in enumerate(largest) if n is None]
    if len(growing) != 1 or growing[0] == 0:
        return None
    counts = [1 if n is None else max(1, -(-n // c)) for n, c in zip(largest, chunk, strict=True)]
    kind = number_of("H5Dget_chunk_index_type", dataset.id)
    if kind not in (None, _EXTENSIBLE_ARRAY) or _is_in_order():
        return None
    return functools.partial(_put_right, chunk, counts, growing[0])


def _put_right(chunk: tuple[int, ...], counts: list[int], growing: int, place: Any) -> tuple[Any, ...]:
    """The true position of a chunk of an extensible array, or of many (arrays of positions along each axis).

    `counts` are the chunks along each axis when all axes are as long as they can be; that of the growing axis is not used.

    >>> _put_right((2, 5), [3, 1], 1, (0, 20)), _put_right((2, 5, 1), [3, 1, 4], 1, (0, 5, 3))
    ((2, 5), (2, 0, 3))
    """
    number: Any = 0
    for start, c, n in zip(place[growing:], chunk[growing:], (1, *counts[growing + 1 :]), strict=True):
        number = number * n + start // c
    true: list[Any] = [0] * len(chunk)
    for axis in reversed([axis for axis in range(len(chunk)) if axis != growing]):
        number, true[axis] = divmod(number, counts[axis])
    true[growing] = number
    return tuple(k * c for k, c in zip(true, chunk, strict=True))


@functools.cache
def _is_in_order() -> bool:
    """True if the library lists the chunks of an extensible array where they are; ValueError if neither there nor where
    `_put_right` expects them.
    """
    shape, chunk, place = (6, 4, 5), (2, 2, 1), (4, 2, 3)
    with phil, file_in_memory(libver="latest") as file:
        dataset = file.create_dataset("x", shape, "u1", maxshape=(6, None, 7), chunks=chunk)
        dataset[tuple(slice(at, at + c) for at, c in zip(place, chunk, strict=True))] = np.uint8(1)
        chunks: list[Any] = []
        dataset.id.chunk_iter(chunks.append)
    listed = tuple(chunks[0].chunk_offset)
    if place not in (listed, _put_right(chunk, [3, 1, 7], 1, listed)):
        raise ValueError(f"the HDF5 library lists a chunk at {listed} that is at {place}")
    return listed == place
