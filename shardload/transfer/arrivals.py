"""What has arrived in the targets of this rank, and what is wrong with it?

Every element of every target is counted. What cannot be right is kept here until the ranks agree, and never raised at once: the
sender still waits for an answer. The first problem is the one that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardload.errors import PeerError, ShardloadError
from shardload.planning.region import Region
from shardload.planning.schedule import Part
from shardload.transfer.buffers import Piece
from shardload.transfer.moves import ArrayMove

__all__ = ["Arrivals"]

Array = np.ndarray[Any, Any]
_DEFECT = "This is a defect in shardload; please report it with the shape, the mesh and the spec"


class Arrivals:
    """What this rank's targets have, of all arrays of an exchange.

    Parameters
    ----------
    arrays : sequence of ArrayMove
        The arrays.
    on_progress : callable
        Called with the bytes of each part that has arrived.
    on_complete : sequence of callable
        For each array, called with each target that has all its elements.

    Attributes
    ----------
    problem : Exception or None
        The first thing that was wrong.
    nbytes, n_checksums, copy_seconds : int, int, float
        What came from other ranks: bytes, compared checksums, seconds of copying out of shared memory.
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
        """The memory of the target of a part that is `region`."""
        return self._arrays[array].targets[part.shard].view(region)

    def count(self, array: int, part: Part, region: Region) -> None:
        """`region` of a part is in its target."""
        move, arrived, target = self._arrays[array], self._n_arrived[array], part.shard
        arrived[target] += region.size
        self._on_progress(region.size * move.dtype.itemsize)
        if arrived[target] == self._n_wanted[array][target]:
            self._on_complete[array](move.targets[target])

    def count_sent(self, array: int, part: Part, region: Region, is_summed: bool) -> None:
        """The same of a part that has come from another rank; `is_summed`: its checksum was taken."""
        self.nbytes += region.size * self._arrays[array].dtype.itemsize
        self.n_checksums += is_summed
        self.count(array, part, region)

    def check_coverage(self) -> None:
        """Every element of every target must have arrived: what nobody sent is whatever was in memory before."""
        for move, wanted, arrived in zip(self._arrays, self._n_wanted, self._n_arrived, strict=True):
            for target, found in arrived.items():
                if found != wanted[target] and self.problem is None:
                    region = move.targets[target].region
                    self.problem = ShardloadError(
                        f"{found} elements arrived for the shard {region}{_of(move)}, which has {wanted[target]}: nothing was "
                        f"loaded. {_DEFECT}"
                    )

    def report_list(self, region: Region | None, rank: int, array: int | None = None) -> None:
        """What a rank sends is not what this one expects from it."""
        if self.problem is None:
            which = "without a region" if region is None else str(region)
            of = "" if array is None else _of(self._arrays[array])
            self.problem = PeerError(
                f"the part {which}{of} that came from rank {rank} is not what this rank expects: the sender's list of regions "
                f"is not the one that was expected. Nothing was loaded. {_DEFECT}",
                rank=rank,
            )

    def report_sum(self, array: int, part: Part, rank: int, ours: int, theirs: int) -> None:
        """The values of a part are not those that were sent."""
        if self.problem is None:
            self.problem = PeerError(
                f"the part {part.region}{_of(self._arrays[array])} that came from rank {rank} is not what was sent: its "
                f"checksum is {ours:08x}, the sender's is {theirs:08x}. The load is void; if it happens again, suspect the "
                "network or memory of these two nodes",
                rank=rank,
            )


def _of(move: ArrayMove) -> str:
    return f" of {move.name}" if move.name else ""
