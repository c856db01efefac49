"""How is the staging memory divided: between decoding threads, staging buffers for blocks, buffers for messages, and rounds?

Pure: integers in, integers out. One set of buffers and threads serves all arrays of a job, one after the other, so every size
is that of the array that needs most.

A save and a copy write unit by unit: chunks, blocks of them, or slabs. A rank collects units up to some bytes, which are
encoded and written while it collects the next: that is a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shardload.planning.region import Grid, aligned
from shardload.planning.schedule import Schedule, SourceLayout
from shardload.planning.tuning import default_tuning

_SLOTS = 3  # one is filled, one is full, one is being copied from
MOST_THREADS = 16  # of one rank
_AMPLE_THREADS = 4  # as many large chunks at a time are enough to keep a reader busy
_BATCHES_IN_CAP = 256  # a thread's share of the cap for a batch of small chunks; it has four or five buffers of that size


@dataclass(frozen=True)
class Staging:
    """How a rank that owns blocks uses its staging memory.

    Attributes
    ----------
    n_threads : int
        Number of chunks that are decoded at a time.
    n_slots, n_pack : int
        Number of staging buffers for blocks, and of those into which parts with gaps are packed for messages.
    slot_nbytes : int
        Size of each of them.
    batch_nbytes : int
        Decoded bytes of the small chunks that a thread may hold at once; larger chunks are read one by one.
    scratch_nbytes : int
        What a thread needs at most to decode.
    """

    n_threads: int
    n_slots: int
    n_pack: int
    slot_nbytes: int
    batch_nbytes: int = field(default=0, repr=False)
    scratch_nbytes: int = field(default=0, repr=False, compare=False)  # buffers of other rounds do not depend on it

    @property
    def n_blocks(self) -> int:
        """Number of blocks that are held at once."""
        return self.n_slots + self.n_pack

    @property
    def nbytes(self) -> int:
        """All of it, at most."""
        return self.n_blocks * self.slot_nbytes + self.n_threads * self.scratch_nbytes


def plan_staging(arrays: Sequence[tuple[Schedule, SourceLayout]], cap_nbytes: int, n_threads: int = 1) -> Staging:
    """The sizes of buffers for all arrays of a job under one cap.

    Parameters
    ----------
    arrays : sequence of (Schedule, SourceLayout)
        One or more.
    cap_nbytes : int
        Bytes of staging memory of a rank.
    n_threads : int
        Number of cores of a rank.

    Examples
    --------
    Gzip planes of 1 MiB, in blocks of four, with a cap of 32 MiB; alone, and together with an array of smaller chunks:

    >>> import numpy as np
    >>> from shardload.planning.selection import select_axes
    >>> from shardload.planning.schedule import Owners
    >>> from shardload.planning.shards import plan_shards
    >>> from shardload.planning.schedule import plan_shared
    >>> def planned(shape, chunk_shape):
    ...     f4 = np.dtype("f4")
    ...     layout = SourceLayout.cut(select_axes(None, shape), chunk_shape, f4, f4, "gzip")
    ...     shards = plan_shards(shape, [(), (0,), ()], np.arange(4))
    ...     return plan_shared(layout, shards, 4, Owners(4), max_nbytes=4 << 20), layout
    >>> large, small = planned((512, 512, 512), (1, 512, 512)), planned((512, 512, 512), (1, 16, 512))
    >>> plan_staging([large], 32 << 20, n_threads=2)
    Staging(n_threads=2, n_slots=3, n_pack=2, slot_nbytes=4194304)
    >>> plan_staging([small, large], 32 << 20, n_threads=2) == plan_staging([large], 32 << 20, n_threads=2)
    True
    """
    batch_nbytes = min(default_tuning().batch_nbytes, cap_nbytes // _BATCHES_IN_CAP)
    slot_nbytes, scratch_nbytes, n_chunks = _needs(arrays, batch_nbytes)
    wanted_threads = min(n_threads, MOST_THREADS, (cap_nbytes - 4 * slot_nbytes) // max(1, scratch_nbytes))
    n_threads = max(1, wanted_threads)
    left_nbytes = cap_nbytes - n_threads * scratch_nbytes
    n_pack = 2 if 4 * slot_nbytes <= left_nbytes else 1
    wanted_slots = max(_SLOTS, n_threads * 2 // max(1, n_chunks) + 2)
    n_slots = max(1, min(wanted_slots, left_nbytes // max(1, slot_nbytes) - n_pack))
    return Staging(n_threads, n_slots, n_pack, slot_nbytes, batch_nbytes, scratch_nbytes)


def least_together(arrays: Sequence[tuple[Schedule, SourceLayout]]) -> int:
    """Fewest bytes with which several arrays can share buffers: one buffer of each kind, and scratch memory of one thread."""
    slot_nbytes, scratch_nbytes, _ = _needs(arrays)
    return 2 * slot_nbytes + scratch_nbytes


def _needs(arrays: Sequence[tuple[Schedule, SourceLayout]], batch_nbytes: int = 0) -> tuple[int, int, int]:
    """What some arrays need together: bytes of the largest block, bytes of scratch memory of a thread, and how many chunks a
    block meets, of the array with the fewest.

    The scratch memory is what a thread needs if it decodes chunk by chunk (buffers for stored, decompressed, decoded and cast
    values), or if the library reads whole blocks (in the file's dtype). Each buffer grows to the largest need of any array;
    several arrays may need both kinds.
    """
    slots, of_chunks, of_blocks, n_met = list[int](), list[tuple[int, int, int, int]](), list[int](), list[int]()
    for schedule, layout in arrays:
        itemsize, file_itemsize = layout.dtype.itemsize, layout.file_dtype.itemsize
        n_chunks = _chunks_per_block(schedule, layout.chunks) if layout.has_chunks else 0
        is_small = layout.chunk_nbytes <= default_tuning().batched_chunk_nbytes
        n_batch = max(1, min(n_chunks, batch_nbytes // max(1, layout.chunk_nbytes))) if is_small else 1
        held_nbytes = n_batch * layout.chunk_nbytes  # stored, between two stages, and decoded
        cast_nbytes = n_batch * layout.casts * layout.chunk_size * (itemsize + (n_batch > 1) * file_itemsize)
        block_size = min(schedule.max_block_size, max(1, schedule.max_message_nbytes // schedule.itemsize))
        slots.append(block_size * itemsize)
        of_chunks.append((held_nbytes, held_nbytes * (1 + (n_batch > 1)), held_nbytes, cast_nbytes))
        of_blocks.append(layout.casts * block_size * file_itemsize)
        n_met.append(n_chunks)
    by_chunks, by_blocks = sum(max(sizes) for sizes in zip(*of_chunks, strict=True)), max(of_blocks)
    scratch_nbytes = max(by_chunks, by_blocks) if len(arrays) == 1 else by_chunks + by_blocks
    return max(slots), scratch_nbytes, min(n_met)


def _chunks_per_block(schedule: Schedule, chunks: Grid) -> int:
    """Largest number of chunks that a block meets, or the part of it that a rank needs, which may begin inside a chunk."""
    axes = zip(schedule.blocks.cell, schedule.extent, chunks.cell, chunks.counts, strict=True)
    return math.prod(min(-(-b // c), -(-e // c) + 1, max(1, n)) for b, e, c, n in axes)


def ample_staging(layout: SourceLayout, n_threads: int) -> int:
    """Bytes with which several chunks at a time can be read, decoded and sent: all buffers, and scratch of a few threads.

    >>> import numpy as np
    >>> from shardload.planning.selection import select_axes
    >>> ample_staging(SourceLayout.cut(select_axes(None, (8, 8)), (4, 4), np.dtype("f4"), np.dtype("f4")), 2)
    704
    """
    return _chunks_nbytes(layout, _SLOTS + 2, min(n_threads, _AMPLE_THREADS))


def least_staging(layout: SourceLayout) -> int:
    """Fewest bytes with which one chunk at a time can be read, decoded and sent; 0 without chunks.

    >>> import numpy as np
    >>> from shardload.planning.selection import select_axes
    >>> least_staging(SourceLayout.cut(select_axes(None, (8, 8)), (4, 4), np.dtype("f4"), np.dtype("f4")))
    320
    """
    return _chunks_nbytes(layout, 2, 1)


def _chunks_nbytes(layout: SourceLayout, n_buffers: int, n_threads: int) -> int:
    """Bytes of buffers for a chunk each, and of the memory in which threads decode: stored, in between, decoded, and cast."""
    scratch = 3 * layout.file_dtype.itemsize + layout.casts * layout.dtype.itemsize
    return layout.chunk_size * (n_buffers * layout.wide_itemsize + n_threads * scratch)


KEPT_ROUNDS = 3
"""The values of a round may change when the third round after it is asked for: a ring of three buffers is enough."""

ROUNDS_HELD = KEPT_ROUNDS + 2  # stored bytes take up to two rounds more
_AT_ONCE_IN_STORE, _REQUEST_NBYTES = 16, 4 << 20  # requests of a rank, and what each holds of a chunk that is read back


@dataclass(frozen=True)
class Item:
    """Part of a round: some units of one array.

    Attributes
    ----------
    array : int
        Number of the array.
    units : range
        Numbers of the units.
    """

    array: int
    units: range


def plan_rounds(arrays: Iterable[tuple[int, range, int]], round_nbytes: int) -> Iterator[list[Item]]:
    """Rounds of units: small arrays share one, large ones have several. A unit that is larger than a round has its own.

    Parameters
    ----------
    arrays : iterable of (int, range, int)
        Number of each array, numbers of its units, and bytes of a unit.
    round_nbytes : int
        Bytes of a round.

    Examples
    --------
    >>> for items in plan_rounds([(0, range(3), 100), (1, range(0, 10, 5), 50), (2, range(1), 500)], 200):
    ...     print(*items)
    Item(array=0, units=range(0, 2))
    Item(array=0, units=range(2, 3)) Item(array=1, units=range(0, 10, 5))
    Item(array=2, units=range(0, 1))
    """
    items: list[Item] = []
    left_nbytes = round_nbytes
    for array, units, nbytes in arrays:
        while units:
            n = min(len(units), max(left_nbytes // max(1, nbytes), 0 if items else 1))
            if n:
                items.append(Item(array, units[:n]))
                left_nbytes, units = left_nbytes - n * nbytes, units[n:]
            if units:
                yield items
                items, left_nbytes = [], round_nbytes
    if items:
        yield items


@dataclass(frozen=True)
class RoundMemory:
    """How a rank uses its staging memory.

    Attributes
    ----------
    round_nbytes : int
        Bytes of the values of a round.
    moving_nbytes : int
        For values on their way into a round: chunks that are decoded, blocks and parts that are sent.
    encoding_nbytes : int
        For chunks that are encoded.
    n_threads : int
        Threads that decode, and threads that encode.
    """

    round_nbytes: int
    moving_nbytes: int
    encoding_nbytes: int
    n_threads: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return ROUNDS_HELD * self.round_nbytes + self.moving_nbytes + self.encoding_nbytes


def least_memory(unit_nbytes: int, chunk_nbytes: int, moving_nbytes: int, n_threads: int = 1) -> int:
    """Fewest bytes of staging memory, if the largest unit and the largest chunk to encode have so many bytes."""
    return RoundMemory(aligned(unit_nbytes), moving_nbytes, 2 * n_threads * chunk_nbytes, n_threads).nbytes


def threads_that_write(n_threads: int, cap_nbytes: int, in_store: bool) -> int:
    """Threads of a rank that encode and write: to a store, for whose answers they wait, as many as fit into its staging memory.

    >>> threads_that_write(2, 1 << 28, in_store=True), threads_that_write(2, 1 << 25, in_store=True)
    (16, 8)
    """
    return max(n_threads, min(_AT_ONCE_IN_STORE, cap_nbytes // _REQUEST_NBYTES)) if in_store else n_threads


def plan_memory(
    cap_nbytes: int,
    unit_nbytes: int,
    chunk_nbytes: int,
    moving_nbytes: int,
    n_threads: int,
    most_moving_nbytes: int | None = None,
) -> RoundMemory:
    """Divide the staging memory, which is at least `least_memory`.

    Parameters
    ----------
    cap_nbytes : int
        The staging memory.
    unit_nbytes, chunk_nbytes : int
        Bytes of the largest unit, and of the largest chunk that is work to encode.
    moving_nbytes, most_moving_nbytes : int
        What moving values takes at least, and what it can use.
    n_threads : int
        Threads of a rank.
    """
    while n_threads > 1 and least_memory(unit_nbytes, chunk_nbytes, moving_nbytes, n_threads) > cap_nbytes * 3 // 4:
        n_threads -= 1
    unit, encoding = aligned(unit_nbytes), 2 * n_threads * chunk_nbytes
    moving = max(moving_nbytes, min(cap_nbytes // 4, cap_nbytes - encoding - ROUNDS_HELD * unit))
    if most_moving_nbytes is not None:
        moving = min(moving, most_moving_nbytes)
    return RoundMemory(max(unit, (cap_nbytes - encoding - moving) // ROUNDS_HELD), moving, encoding, n_threads)
