"""How is the memory of one rank shared out that reading may take beside its pieces? From integers alone.

`StagingNeeds` says how large the buffers must be for one array; those of several arrays that are read together are `joined`.
`share_out` says how many of them, and how many threads, fit under the cap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardload.planning.tuning import Tuning

__all__ = ["ALIGNMENT", "Staging", "StagingNeeds", "aligned", "block_caps", "chunk_needs_nbytes", "share_out"]

ALIGNMENT = 64
# What one reading rank holds in blocks: three slots, two buffers with packed parts, and as much again in the threads that
# decode.
_BLOCKS_HELD = 7
_SLOTS = 3  # one is filled, one is full, one is being copied from
_MOST_THREADS = 16
_MOST_CHUNKS = 1 << 14  # in a block: each takes some hundred bytes of Python, beside its own
_ANY_NUMBER = 1 << 62


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment.

    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def block_caps(
    staging_nbytes: int, tuning: Tuning, *, one_machine: bool, chunk_shape: Sequence[int] | None = None, itemsize: int = 1
) -> tuple[int, int]:
    """Bytes and chunks that a block has at most.

    Parameters
    ----------
    staging_nbytes : int
        Cap on a rank's memory.
    tuning : Tuning
        Has the sizes that are worth reading and sending at once.
    one_machine : bool
        Whether all ranks are on one.
    chunk_shape, itemsize : tuple of int, int
        A whole chunk of the file and its widest element; None where it has no chunks. A chunk is decoded, and kept, as a
        whole, however little of it was selected.
    """
    most = tuning.block_nbytes if one_machine else tuning.block_between_nodes_nbytes
    nbytes = min(most, staging_nbytes // _BLOCKS_HELD)
    if chunk_shape is None:
        return nbytes, _ANY_NUMBER
    return nbytes, max(1, min(_MOST_CHUNKS, nbytes // aligned(math.prod(chunk_shape) * itemsize)))


def chunk_needs_nbytes(chunk_size: int, file_itemsize: int, itemsize: int, casts: bool) -> int:
    """Memory that one chunk at a time takes: as stored, as decompressed, as decoded, as read and as sent (and cast)."""
    return chunk_size * (2 * max(file_itemsize, itemsize) + 3 * file_itemsize + casts * itemsize)


@dataclass(frozen=True, slots=True)
class StagingNeeds:
    """How large the buffers of a reading rank must be.

    Attributes
    ----------
    slot_nbytes, pack_nbytes : int
        One block as it is read, and as it is packed for messages.
    thread_nbytes : int
        What one thread that decodes holds.
    n_chunks : int
        Chunks of a block, at most; 0 where there are none.
    """

    slot_nbytes: int
    pack_nbytes: int
    thread_nbytes: int
    n_chunks: int

    @classmethod
    def of(
        cls, block_size: int, n_chunks: int, chunk_size: int, *, file_itemsize: int, itemsize: int, casts: bool
    ) -> StagingNeeds:
        """The needs of one array.

        Parameters
        ----------
        block_size : int
            Elements of the largest block, or of the longest message where that is less.
        n_chunks, chunk_size : int
            Chunks that a block meets at most, and elements of one; 0 where there are none.
        file_itemsize, itemsize : int
            Bytes per element in the file, and as they are loaded.
        casts : bool
            Whether they are cast.
        """
        wide = max(file_itemsize, itemsize)
        slot_nbytes = max(block_size * itemsize, n_chunks * aligned(chunk_size * wide))
        # As stored, as decompressed, as decoded; or, by the library and cast, a block in the file's dtype.
        thread_nbytes = max(chunk_size * (3 * file_itemsize + casts * itemsize), casts * block_size * file_itemsize)
        return cls(slot_nbytes, block_size * itemsize, thread_nbytes, n_chunks)

    @classmethod
    def joined(cls, needs: Iterable[StagingNeeds]) -> StagingNeeds:
        """What serves each of several arrays that share buffers and threads.

        >>> StagingNeeds.joined([StagingNeeds(8, 4, 3, 0), StagingNeeds(6, 6, 9, 2)])
        StagingNeeds(slot_nbytes=8, pack_nbytes=6, thread_nbytes=9, n_chunks=2)
        """
        every = list(needs)
        fewest = min((n.n_chunks for n in every if n.n_chunks), default=0)  # so that as many blocks as threads need are there
        return cls(
            max(n.slot_nbytes for n in every), max(n.pack_nbytes for n in every), max(n.thread_nbytes for n in every), fewest
        )


@dataclass(frozen=True, slots=True)
class Staging:
    """How a reading rank uses its staging memory.

    Attributes
    ----------
    n_threads : int
        Chunks decoded at a time.
    n_slots, slot_nbytes : int
        Slots that blocks wait in.
    n_pack, pack_nbytes : int
        Buffers that parts with gaps are packed into for messages.
    """

    n_threads: int
    n_slots: int
    slot_nbytes: int
    n_pack: int
    pack_nbytes: int


def share_out(cap_nbytes: int, needs: StagingNeeds, n_threads: int) -> Staging:
    """Threads that decode (no more than `n_threads`), slots that blocks wait in, and buffers for messages, under a cap."""
    slot_nbytes, pack_nbytes = needs.slot_nbytes, needs.pack_nbytes
    room = (cap_nbytes - 2 * slot_nbytes - 2 * pack_nbytes) // max(1, needs.thread_nbytes)
    n_threads = max(1, min(n_threads, _MOST_THREADS, room))
    left = cap_nbytes - n_threads * needs.thread_nbytes
    n_pack = 2 if 2 * (slot_nbytes + pack_nbytes) <= left else 1
    wanted = max(_SLOTS, n_threads * 2 // max(1, needs.n_chunks) + 2)
    n_slots = max(1, min(wanted, (left - n_pack * pack_nbytes) // max(1, slot_nbytes)))
    return Staging(n_threads, n_slots, slot_nbytes, n_pack, pack_nbytes)
