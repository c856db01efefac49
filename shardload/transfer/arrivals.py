"""What has arrived in the targets of this rank, and is it right?

Every element of every target is counted. An error is not raised at once, because the sender still waits for an answer: the
first one is kept until the ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardload.errors import PeerError, ShardloadError
from shardload.planning.region import Region
from shardload.planning.schedule import Part
from shardload.system.first_error import FirstError
from shardload.transfer.counters import Counters
from shardload.transfer.moves import ArrayMove

Array = np.ndarray[Any, Any]
DEFECT = "This is a defect in shardload; please report it with the shape, the mesh and the spec"


class Arrivals:
    """Counts what has arrived in this rank's targets, for all arrays of an exchange.

    Parameters
    ----------
    moves : sequence of ArrayMove
        The arrays.
    on_progress : callable, optional
        Called with the number of bytes of each part that has arrived. If it fails, the exchange goes on without it.

    Attributes
    ----------
    errors : FirstError
        The first problem.
    counters : Counters
        For parts from other ranks: bytes, compared checksums, seconds of copying out of shared memory.
    """

    def __init__(self, moves: Sequence[ArrayMove], on_progress: Callable[[int], None] | None = None) -> None:
        self._moves, self._on_progress = moves, on_progress
        self._n_left = [{number: _size(move.flow.target(number)) for number in move.targets} for move in moves]
        self.errors, self.counters = FirstError(), Counters()

    def view(self, array: int, part: Part) -> Array:
        """The memory of a part in its target."""
        return self._moves[array].targets[part.target].view(part.region)

    def count(self, array: int, part: Part) -> None:
        """Count a part, which is in its target now."""
        move, left, target, size = self._moves[array], self._n_left[array], part.target, part.region.size
        left[target] -= size
        if self._on_progress is not None and not self.errors:
            with self.errors:
                self._on_progress(size * move.dtype.itemsize)
        if left[target] == 0 and move.on_complete is not None and not self.errors:
            try:
                move.on_complete(move.targets[target])
            except Exception as error:
                self.errors.keep(move.explain(error))

    def receive(self, array: int, part: Part, is_summed: bool) -> None:
        """Count a part that came from another rank. `is_summed`: whether its checksum was computed."""
        self.counters.nbytes_received += part.region.size * self._moves[array].dtype.itemsize
        self.counters.n_checksums += is_summed
        self.count(array, part)

    def check_coverage(self) -> None:
        """Check that every element of every target has arrived. One that nobody sent holds whatever was in memory before."""
        for move, left in zip(self._moves, self._n_left, strict=True):
            for number, n_left in left.items():
                if n_left:
                    n = _size(move.flow.target(number))
                    self._report(
                        f"{n - n_left} elements arrived for the shard {move.targets[number].region}{_of(move)}, which has {n}"
                    )

    def report_list(self, region: Region | None, rank: int, array: int | None = None) -> None:
        """Report that a rank sends parts which this rank does not expect."""
        which = "without a region" if region is None else str(region)
        of = "" if array is None else _of(self._moves[array])
        self._report(
            f"the part {which}{of} that came from rank {rank} is not what this rank expects: the sender's list of regions "
            "is not the one that was expected",
            rank,
        )

    def _report(self, text: str, rank: int | None = None) -> None:
        text = f"{text}. Nothing was loaded. {DEFECT}"
        self.errors.keep(ShardloadError(text) if rank is None else PeerError(text, rank=rank))

    def report_sum(self, array: int, part: Part, rank: int, ours: int, theirs: int) -> None:
        """Report that the values of a part differ from those that were sent."""
        self.errors.keep(
            PeerError(
                f"the part {part.region}{_of(self._moves[array])} that came from rank {rank} is not what was sent: its "
                f"checksum is {ours:08x}, the sender's is {theirs:08x}. The load is void; if it happens again, suspect the "
                "network or memory of these two nodes",
                rank=rank,
            )
        )


def _size(region: Region | None) -> int:
    return 0 if region is None else region.size


def _of(move: ArrayMove) -> str:
    return f" of {move.name}" if move.name else ""
