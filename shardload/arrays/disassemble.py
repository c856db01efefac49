"""How do the shards of a `jax.Array` become values in host memory, and do its replicas agree?

The opposite of `assemble`. On CPU a shard's values are a view of JAX's own memory. From a GPU only the region that is asked for
is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardload.arrays.assemble import device_regions, device_values
from shardload.arrays.sharding import layout_shards, read_spec, verify_layout
from shardload.comm.group import Group
from shardload.errors import PeerError, ShardloadError, VerifyError
from shardload.planning.region import Region
from shardload.planning.schedule import Block
from shardload.planning.shards import Shards, plan_shards
from shardload.transfer.buffers import Piece, StagedBlock, Tile, view_of
from shardload.transfer.checksum import checksum
from shardload.transfer.moves import ArrayMove
from shardload.transfer.reader import Reading

__all__ = ["DeviceSource", "HostShards", "ShardSender", "check_replicas", "shards_of_array"]

Array = np.ndarray[Any, Any]
_AT_ONCE_NBYTES = 32 << 20


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


class HostShards:
    """The shards of one array that this process holds.

    Parameters
    ----------
    x : jax.Array or ndarray
        The array.
    shards : Shards
        Which rank holds which shard.
    rank : int
        This rank.
    """

    def __init__(self, x: Any, shards: Shards, rank: int) -> None:
        self.shape, self.dtype = x.shape, np.dtype(x.dtype)
        self.numbers = shards.shards_of(rank)
        self._held: dict[int, list[tuple[Region, Any]]] = {}
        if isinstance(getattr(x, "sharding", None), jax.sharding.NamedSharding):
            regions = device_regions(x.sharding, x.shape)
            found: dict[Region, list[Any]] = {}
            for shard in x.addressable_shards:
                found.setdefault(regions[shard.device], []).append(shard.data)
        else:
            found = {Region.whole(x.shape): [x]}
        for number in self.numbers:
            region = shards.region(number)
            if region not in found:
                raise ShardloadError(f"JAX holds no shard {region} here, which the sharding gives this process")
            self._held[number] = [(region, data) for data in found[region]]

    def region(self, number: int) -> Region:
        """The elements of a shard."""
        return self._held[number][0][0]

    def view(self, number: int, region: Region, replica: int = 0) -> Array:
        """The values of a region of a shard, as one of the devices that hold it has them."""
        held, data = self._held[number][replica]
        if isinstance(data, np.ndarray):
            return view_of(data, region, held)
        return device_values(data, region, held)

    def shard_with(self, region: Region) -> int:
        """The shard that has all of a region."""
        for number, held in self._held.items():
            if held[0][0].contains(region):
                return number
        raise ShardloadError(f"no shard of this process has {region}")

    def checksums(self, true: Region) -> Iterator[tuple[int, int]]:
        """The CRC-32 of each shard on each device that holds it here, without padding: number of the shard, CRC."""
        for number, held in self._held.items():
            region = held[0][0].intersect(true)
            for replica in range(len(held)) if region is not None and region.size else ():
                crc = 0
                for some in region.split(max(1, _AT_ONCE_NBYTES // self.dtype.itemsize)):  # type: ignore[union-attr]
                    crc = checksum(self.view(number, some, replica), crc)
                yield number, crc


class ShardSender:
    """Stages the parts of one array's shards that this rank sends: from where they lie."""

    n_at_once = 4

    def __init__(self, shards: HostShards, rank: int, targets: Mapping[int, Piece], checksums: bool) -> None:
        self._shards, self._rank, self._targets, self._checksums = shards, rank, targets, checksums
        self._n = 0

    def has_room(self, block: Block) -> bool:
        """See `Producer`."""
        return True

    def now(self) -> tuple[int, str]:
        """See `Producer`."""
        return self._n, ""

    def start(self, block: Block) -> Reading:
        """See `Producer`."""
        tiles = []
        for part in block.parts:
            values = self._shards.view(self._shards.shard_with(part.region), part.region)
            if part.rank != self._rank:
                tiles.append(Tile(part.region, values))
                continue
            into = self._targets[part.shard].view(part.region)
            np.copyto(into, values, casting="no")
            if self._checksums and checksum(into) != checksum(values):
                raise PeerError(
                    f"the part {part.region} that stays on rank {self._rank} is not what the device holds: a checksum after "
                    "the copy differs from the one before it. If it happens again, suspect the memory of this node",
                    rank=self._rank,
                )
        self._n += 1
        return Reading(StagedBlock(block, tiles))


class DeviceSource:
    """The source of a round whose values the devices of this process hold, or arrays of NumPy that each process has.

    Parameters
    ----------
    shards : sequence of HostShards
        What this process holds of each array, by `ArrayMove.array`.
    rank : int
        This rank.
    checksums : bool
        Whether what stays on this rank is checksummed, too.
    """

    def __init__(self, shards: Sequence[HostShards], rank: int, checksums: bool) -> None:
        self._shards, self._rank, self._checksums = shards, rank, checksums

    def stage(self, moves: Sequence[ArrayMove], *_: object) -> None:
        """Give each move its producer."""
        for move in moves:
            move.producer = ShardSender(self._shards[move.array], self._rank, move.targets, self._checksums)


def check_replicas(group: Group, arrays: Sequence[tuple[str, Shards, list[tuple[int, int]]]]) -> None:
    """Raise VerifyError if two devices hold the same shard of an array with other values. Collective.

    Parameters
    ----------
    group : Group
        The ranks.
    arrays : sequence of (str, Shards, list)
        For each array its name, which rank holds which shard, and `HostShards.checksums` of this rank.
    """
    first = np.cumsum([0, *(shards.n_shards for _, shards, _ in arrays)])
    least = np.full(int(first[-1]), 1 << 32, dtype=np.int64)
    most = np.full(int(first[-1]), -1, dtype=np.int64)
    for start, (_, _, found) in zip(first.tolist(), arrays, strict=False):
        for number, crc in found:
            least[start + number] = min(least[start + number], crc)
            most[start + number] = max(most[start + number], crc)
    low, high = group.least_ints(np.stack([least, -most]))
    unlike = np.flatnonzero((low != -high) & (low <= 0xFFFFFFFF))
    if not len(unlike):
        return
    at = int(unlike[0])
    k = int(np.searchsorted(first, at, side="right")) - 1
    name, shards, _ = arrays[k]
    of_rank = group.gather_ints([int(least[at]), int(most[at])]).tolist()
    told = sorted({f"{crc:08x} on rank {rank}" for rank, row in enumerate(of_rank) if row[1] >= 0 for crc in row})
    raise VerifyError(
        f"the devices that hold {shards.region(at - int(first[k]))} of '{name}' have other values: CRC-32 "
        f"{', '.join(told[:8])}{' and others' if len(told) > 8 else ''}. Nothing was saved, because nobody knows which of them "
        "are right. Was the array made from data that differed from process to process?"
    )
