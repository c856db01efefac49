"""What has arrived in the targets of this rank, and is it right?

Every element of every target is counted. An error is not raised at once, because the sender still waits for an answer: it is
kept here until the ranks agree. Only the first problem is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardload.errors import PeerError, ShardloadError
from shardload.planning.region import Region
from shardload.planning.schedule import Part
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.buffers import Piece
from shardload.transfer.moves import ArrayMove

__all__ = ["DEFECT", "Arrivals"]

Array = np.ndarray[Any, Any]
DEFECT = "This is a defect in shardload; please report it with the shape, the mesh and the spec"


class Arrivals:
    """Counts what has arrived in this rank's targets, for all arrays of an exchange.

    Parameters
    ----------
    arrays : sequence of ArrayMove
        The arrays.
    on_progress : callable
        Called with the number of bytes of each part that has arrived.
    on_complete : sequence of callable
        For each array, called with each target that has all its elements.

    Attributes
    ----------
    problem : Exception or None
        The first problem found.
    nbytes, n_checksums, copy_seconds : int, int, float
        For parts from other ranks: bytes, compared checksums, seconds of copying out of shared memory.
    """

    def __init__(
        self, arrays: Sequence[ArrayMove], on_progress: Callable[[int], None], on_complete: Sequence[Callable[[Piece], None]]
    ) -> None:
        self._arrays, self._on_progress, self._on_complete = arrays, on_progress, on_complete
        self._n_wanted = [{target: array.flow.n_wanted(target) for target in array.targets} for array in arrays]
        self._n_arrived = [dict.fromkeys(array.targets, 0) for array in arrays]
        self.problem: Exception | None = None
        self.copy_seconds, self.nbytes, self.n_checksums = 0.0, 0, 0

    def view(self, array: int, part: Part, region: Region) -> Array:
        """The memory of `region` in the target of a part."""
        return self._arrays[array].targets[part.shard].view(region)

    def count(self, array: int, part: Part, region: Region) -> None:
        """Count `region` of a part, which is in its target now."""
        move, arrived, target = self._arrays[array], self._n_arrived[array], part.shard
        arrived[target] += region.size
        self._on_progress(region.size * move.dtype.itemsize)
        if arrived[target] == self._n_wanted[array][target]:
            self._on_complete[array](move.targets[target])

    def count_sent(self, array: int, part: Part, region: Region, is_summed: bool) -> None:
        """Count a part that came from another rank. `is_summed`: whether its checksum was computed."""
        self.nbytes += region.size * self._arrays[array].dtype.itemsize
        self.n_checksums += is_summed
        self.count(array, part, region)

    def check_coverage(self) -> None:
        """Check that every element of every target has arrived. One that nobody sent holds whatever was in memory before."""
        for move, wanted, arrived in zip(self._arrays, self._n_wanted, self._n_arrived, strict=True):
            for target, found in arrived.items():
                if found != wanted[target] and self.problem is None:
                    region = move.targets[target].region
                    self.problem = ShardloadError(
                        f"{found} elements arrived for the shard {region}{_of(move)}, which has {wanted[target]}: nothing was "
                        f"loaded. {DEFECT}"
                    )

    def keep(self, error: Exception) -> None:
        """Keep an error that came up while a part was taken: the sender waits for an answer, and the others for this rank."""
        let_interruption_pass(error)
        if self.problem is None:
            self.problem = error

    def report_list(self, region: Region | None, rank: int, array: int | None = None) -> None:
        """Report that a rank sends parts which this rank does not expect."""
        if self.problem is None:
            which = "without a region" if region is None else str(region)
            of = "" if array is None else _of(self._arrays[array])
            self.problem = PeerError(
                f"the part {which}{of} that came from rank {rank} is not what this rank expects: the sender's list of regions "
                f"is not the one that was expected. Nothing was loaded. {DEFECT}",
                rank=rank,
            )

    def report_sum(self, array: int, part: Part, rank: int, ours: int, theirs: int) -> None:
        """Report that the values of a part differ from those that were sent."""
        if self.problem is None:
            self.problem = PeerError(
                f"the part {part.region}{_of(self._arrays[array])} that came from rank {rank} is not what was sent: its "
                f"checksum is {ours:08x}, the sender's is {theirs:08x}. The load is void; if it happens again, suspect the "
                "network or memory of these two nodes",
                rank=rank,
            )


def _of(move: ArrayMove) -> str:
    return f" of {move.name}" if move.name else ""
