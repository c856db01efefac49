"""What stays open while values move between the ranks of a call? Their messages, and the buffers that hold values on the way.

    session = Session(group, digest, shared_nbytes=..., checksums=...)      # on all ranks
    session.stage(n_slots, slot_nbytes, n_packs, pack_nbytes)               # on a rank that moves something
    for each round:
        session.begin_round()                                               # on all ranks, also on one that has failed
        failed = session.move(moves)                                        # on all ranks, when they have agreed to

A load is a session of one round; a save and a copy have as many as their memory cap asks for. Between rounds a rank does what
needs no other rank: it reads, encodes, writes. What a round moves, and from where to where, its `ArrayMove`s say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

from shardload.comm.group import Group
from shardload.comm.shared_memory import Bell
from shardload.planning.blocks import aligned
from shardload.transfer.buffers import Slots
from shardload.transfer.exchange import Buffers, Moved, exchange
from shardload.transfer.moves import ArrayMove

__all__ = ["Session"]

_NO_TAGS = (0, 0)  # of a round without messages


class Session:
    """The rounds of one call, on one rank. To make one is collective.

    Parameters
    ----------
    group : Group
        The ranks.
    digest : str
        What all ranks have agreed on, as text. A part of another session is never taken for one of this.
    shared_nbytes : int, optional
        Bytes of memory for staged blocks that this rank shares with those of its node; None, on all ranks, if none shares any.
    checksums : bool
        Whether each part is checksummed on both sides.

    Attributes
    ----------
    moved : Moved
        Statistics of all rounds on this rank.
    """

    def __init__(self, group: Group, digest: str, *, shared_nbytes: int | None, checksums: bool) -> None:
        self._group, self._digest, self._checksums = group, digest, checksums
        self._segments = {} if shared_nbytes is None else group.shared_memory(shared_nbytes)
        self._shared_nbytes = shared_nbytes or 0
        self._tags = _NO_TAGS
        self._buffers: Buffers | None = None
        self._n_rounds = 0
        self.moved = Moved()

    @property
    def buffers(self) -> Buffers:
        """The buffers of the next round."""
        if self._buffers is None:
            raise ValueError("nothing is staged: there are no buffers")
        return self._buffers

    def stage(self, n_slots: int, slot_nbytes: int, n_packs: int, pack_nbytes: int, *, is_alone: bool = False) -> Buffers:
        """Make the buffers for the next rounds: slots for blocks, in shared memory if there is any, and for packed parts.

        `is_alone`: none of these rounds has a part for another rank.
        """
        segments = {} if is_alone else self._segments
        segment = segments.get(self._group.rank)
        shared = segment.data[: n_slots * aligned(slot_nbytes)] if segment is not None and self._shared_nbytes else None
        bell = Bell() if segment is None else segment.bell
        self._buffers = Buffers(Slots(n_slots, slot_nbytes, shared), Slots(n_packs, pack_nbytes), segments, bell)
        return self._buffers

    def begin_round(self) -> None:
        """Count a round that all ranks take part in. A rank that fails before it moves anything counts it too."""
        self._n_rounds += 1
        self._tags = self._group.next_tags()

    def move(self, moves: Sequence[ArrayMove], on_progress: Callable[[int], None] | None = None) -> BaseException | None:
        """Move every part of every array to its target. Errors are returned, not raised: the ranks have to agree on them.

        Collective, unless no part goes to another rank: then there is no round to begin.
        """
        tags = self._tags
        seed = crc32(f"{self._digest} {self._n_rounds} {tags}".encode())
        moves = [replace(move, seed=seed) for move in moves]
        failed, moved = exchange(
            self._group, moves, self.buffers, tags=tags, checksums=self._checksums, on_progress=on_progress
        )
        self.moved += moved
        self._tags = _NO_TAGS
        return failed
