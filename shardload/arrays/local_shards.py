"""Which shards of an array do the devices of this process hold, with which values, and do replicas agree?

The opposite of `assemble`, and the source of a save. On CPU a shard's values are a view of JAX's own memory. From a GPU only
the region that is asked for is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from shardload.arrays.assemble import addressable_shards, device_values, has_host_memory, plain_jax
from shardload.arrays.sharding import layout_shards, read_spec, region_of, verify_layout
from shardload.comm.group import Group
from shardload.comm.watchdog import Activity
from shardload.errors import ShardloadError, VerifyError
from shardload.planning.region import Array, Region
from shardload.planning.schedule import Block
from shardload.planning.shards import Shards, plan_shards
from shardload.transfer.buffers import Piece, StagedBlock
from shardload.transfer.checksum import checksum
from shardload.transfer.counters import Counters
from shardload.transfer.moves import ArrayMove
from shardload.transfer.pieces import LocalPieces
from shardload.units import first_ranks

_AT_ONCE_NBYTES = 32 << 20
_NO_DIGEST = 1 << 32


class LocalShards:
    """The shards of one array that this process holds, each once for every device that holds it here.

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
        self.shape, self.dtype, self.rank, self.numbers = x.shape, np.dtype(x.dtype), rank, shards.shards_of(rank)
        copies: dict[Region, list[tuple[Any, Any]]] = {}
        if isinstance(x, jax.Array):
            for shard in addressable_shards(x):
                copies.setdefault(region_of(shard.index, x.shape), []).append((shard.device, shard.data))
        else:
            copies[Region.whole(x.shape)] = [("host", x)]
        self.regions = {number: shards.region(number) for number in self.numbers}
        missing = [region for region in self.regions.values() if region not in copies]
        if missing:
            raise ShardloadError(f"JAX holds no shard {missing[0]} here, which the sharding gives this process")
        self._copies = {number: copies[region] for number, region in self.regions.items()}

    def devices(self, number: int) -> list[Any]:
        """The devices of this process that hold a shard."""
        return [device for device, _ in self._copies[number]]

    @plain_jax()
    def copy_to_host(self) -> None:
        """From now on, hold copies in host memory: the program may donate or delete its array."""
        self._copies = {n: [(device, np.array(data)) for device, data in copies] for n, copies in self._copies.items()}

    def view(self, number: int, region: Region, copy: int = 0) -> Array:
        """The values of a region of a shard, as one of the devices that hold it has them."""
        return device_values(self._copies[number][copy][1], region, self.regions[number])

    def shard_with(self, region: Region) -> int:
        """The shard that has all of a region."""
        for number, shard in self.regions.items():
            if shard.contains(region):
                return number
        raise ShardloadError(f"no shard of this process has {region}")

    def uses(self, piece: Array, number: int, copy: int) -> bool:
        """True if JAX uses the memory of a piece (on CPU)."""
        data = self._copies[number][copy][1]
        is_on_host = has_host_memory(next(iter(data.devices())))
        return is_on_host and bool(np.asarray(data).ctypes.data == piece.ctypes.data)

    def checksum(self, number: int, region: Region, copy: int, most_nbytes: int = _AT_ONCE_NBYTES) -> int:
        """The CRC-32 of a region of a shard, on one of the devices that hold it; so many bytes are copied at a time."""
        crc = 0
        for part in region.split(max(1, most_nbytes // self.dtype.itemsize)):
            crc = checksum(self.view(number, part, copy), crc)
        return crc

    def checksums(self, true: Region) -> list[tuple[int, int]]:
        """The CRC-32 of each shard on each device that holds it here, without padding: number of the shard, CRC."""
        checksums = []
        for number, copies in self._copies.items():
            region = self.regions[number].intersect(true)
            if region is not None and region.size:
                checksums += [(number, self.checksum(number, region, copy)) for copy in range(len(copies))]
        return checksums


def check_replicas(group: Group, arrays: Sequence[tuple[str, Shards, Iterable[tuple[int, int]]]], consequence: str) -> None:
    """Raise VerifyError if two devices hold the same shard of an array with other values. Collective.

    Parameters
    ----------
    group : Group
        The ranks.
    arrays : sequence of (str, Shards, iterable of (int, int))
        For each array its name, which rank holds which shard, and a digest of each shard on each device of this rank.
    consequence : str
        What to do, for the end of the message.
    """
    first = np.cumsum([0, *(shards.n_shards for _, shards, _ in arrays)])
    least, most = np.full(int(first[-1]), _NO_DIGEST, np.int64), np.full(int(first[-1]), -1, np.int64)
    for start, (_, _, digests) in zip(first.tolist(), arrays, strict=False):
        for number, digest in digests:
            least[start + number] = min(least[start + number], digest)
            most[start + number] = max(most[start + number], digest)
    low, high = group.least_ints(np.stack([least, -most]))
    unlike = np.flatnonzero((low != -high) & (low < _NO_DIGEST))
    if not len(unlike):
        return
    position = int(unlike[0])
    array = int(np.searchsorted(first, position, side="right")) - 1
    name, shards, _ = arrays[array]
    ranks: dict[int, list[int]] = {}
    for rank, (a, b) in enumerate(group.gather_ints([int(least[position]), int(most[position])]).tolist()):
        for digest in {a, b} if b >= 0 else ():
            ranks.setdefault(digest, []).append(rank)
    by_size = sorted(ranks.items(), key=lambda version: -len(version[1]))
    versions = ", ".join(f"{first_ranks(with_digest, 8)} {digest:08x}" for digest, with_digest in by_size[:8])
    is_sure = len(by_size[0][1]) > len(by_size[1][1])
    wrong_ranks = by_size[-1][1]
    blame = f"likelier wrong: {first_ranks(wrong_ranks, 8)}" if is_sure else "either may be wrong"
    raise VerifyError(
        f"the replicas of the shard {shards.region(position - int(first[array]))} of {name} have other values: their CRC-32 is "
        f"on {versions}; {blame}. {consequence}",
        rank=wrong_ranks[0] if is_sure else None,
    )


# --- as the source of a save


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

    n_ahead = 4

    def __init__(self, shards: LocalShards, local: LocalPieces) -> None:
        self._shards, self._local, self._counters, self._n_started = shards, local, Counters(), 0

    def has_room(self, block: Block) -> bool:
        """See `Producer`."""
        return True

    def activity(self) -> Activity:
        """See `Producer`."""
        return Activity(self._n_started)

    def start(self, block: Block) -> StagedBlock:
        """See `Producer`."""
        tiles = []
        for part in block.parts:
            values = self._shards.view(self._shards.shard_with(part.region), part.region)
            if self._local.is_own(part):
                self._local.copy(part.region, values, self._local.view(part, part.region), self._counters)
            else:
                tiles.append(Piece(part.region, values))
        self._n_started += 1
        return StagedBlock(block, tiles)


class DeviceSource:
    """The source of a round whose values the devices of this process hold, or arrays of NumPy that each process has.

    Parameters
    ----------
    shards : sequence of LocalShards
        What this process holds of each array, by `ArrayMove.array`.
    checksums : bool
        Whether what stays on this rank is checksummed, too.
    """

    def __init__(self, shards: Sequence[LocalShards], checksums: bool) -> None:
        self._shards, self._checksums = shards, checksums

    def stage(self, moves: Sequence[ArrayMove], *_: object) -> None:
        """Give each move its producer."""
        for move in moves:
            shards = self._shards[move.array]
            move.producer = ShardSender(shards, LocalPieces(shards.rank, move.targets, self._checksums))
