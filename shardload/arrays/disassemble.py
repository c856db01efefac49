"""How do the shards of a `jax.Array` become parts that are sent to the ranks that write?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardload.arrays.local_shards import LocalShards
from shardload.arrays.sharding import layout_shards, read_spec, verify_layout
from shardload.comm.watchdog import Activity
from shardload.errors import PeerError
from shardload.planning.schedule import Block
from shardload.planning.shards import Shards, plan_shards
from shardload.transfer.buffers import Piece, StagedBlock
from shardload.transfer.checksum import checksum
from shardload.transfer.moves import ArrayMove


def shards_of_array(x: Any, rank_of_process: dict[int, int], rank: int, n_ranks: int) -> Shards:
    """Which rank holds which shard of an array. One that each process has by itself (NumPy's, on one device) all ranks hold.

    Raises
    ------
    ConfigError
        If a process of the array's mesh takes no part.
    """
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return plan_shards(x.shape, [()] * x.ndim, np.arange(n_ranks))
    shards = layout_shards(sharding, read_spec(sharding, x.ndim), x.shape, rank_of_process)
    verify_layout(shards, sharding, rank)
    return shards


class ShardSender:
    """Stages the parts of one array's shards that this rank sends: from where they lie."""

    n_at_once = 4

    def __init__(self, shards: LocalShards, rank: int, targets: Mapping[int, Piece], checksums: bool) -> None:
        self._shards, self._rank, self._targets, self._checksums = shards, rank, targets, checksums
        self._n = 0

    def has_room(self, block: Block) -> bool:
        """See `Producer`."""
        return True

    def activity(self) -> Activity:
        """See `Producer`."""
        return Activity(self._n)

    def start(self, block: Block) -> StagedBlock:
        """See `Producer`."""
        tiles = []
        for part in block.parts:
            values = self._shards.view(self._shards.shard_with(part.region), part.region)
            if part.rank != self._rank:
                tiles.append(Piece(part.region, values))
                continue
            into = self._targets[part.target].view(part.region)
            np.copyto(into, values, casting="no")
            if self._checksums and checksum(into) != checksum(values):
                raise PeerError(
                    f"the part {part.region} that stays on rank {self._rank} is not what the device holds: a checksum after "
                    "the copy differs from the one before it. If it happens again, suspect the memory of this node",
                    rank=self._rank,
                )
        self._n += 1
        return StagedBlock(block, tiles)


class DeviceSource:
    """The source of a round whose values the devices of this process hold, or arrays of NumPy that each process has.

    Parameters
    ----------
    shards : sequence of LocalShards
        What this process holds of each array, by `ArrayMove.array`.
    rank : int
        This rank.
    checksums : bool
        Whether what stays on this rank is checksummed, too.
    """

    def __init__(self, shards: Sequence[LocalShards], rank: int, checksums: bool) -> None:
        self._shards, self._rank, self._checksums = shards, rank, checksums

    def stage(self, moves: Sequence[ArrayMove], *_: object) -> None:
        """Give each move its producer."""
        for move in moves:
            move.producer = ShardSender(self._shards[move.array], self._rank, move.targets, self._checksums)
