"""At which places of a mesh are the devices of each rank, and so which shards does it hold?

There are two implementations of the same `RankTable`:

- `BoxTable` is a formula, for ranks that hold equal boxes of devices in mesh order (every abstract mesh). None of its data is
  as long as the mesh.
- `ListTable` is an array, for a mesh of devices in any other order. It makes an index by rank once.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from shardload.planning.grid import IntArray, strides, unravel

__all__ = ["BoxTable", "ListTable", "RankBoxes", "RankTable", "table_of"]


@dataclass(frozen=True, slots=True)
class RankBoxes:
    """The ranks of a mesh in which each rank holds an equal box of devices: an array of ranks that is never allocated.

    The rank at place ``i`` is ``sum(i[m] // box[m] * stride[m])``.

    Parameters
    ----------
    shape : tuple of int
        Number of devices along each mesh axis.
    box : tuple of int
        Number of devices of one rank along each mesh axis; divides `shape`.
    stride : tuple of int
        Difference in rank between one box and the next along each mesh axis.

    Examples
    --------
    >>> RankBoxes.in_order((2, 4), 2).table().tolist()
    [[0, 0, 1, 1], [2, 2, 3, 3]]
    """

    shape: tuple[int, ...]
    box: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def in_order(cls, shape: Sequence[int], devices_per_rank: int = 1) -> RankBoxes | None:
        """Ranks that hold `devices_per_rank` consecutive devices each; None if these are not equal boxes."""
        box, rest = [], devices_per_rank
        for n in reversed(shape):
            here = min(n, rest)
            if n % here or rest % here:
                return None
            box.append(here)
            rest //= here
        if rest > 1:
            return None
        counts = [n // b for n, b in zip(reversed(shape), box, strict=True)]
        strides = list(itertools.accumulate(counts, lambda a, b: a * b, initial=1))[: len(box)]
        return cls(tuple(shape), tuple(reversed(box)), tuple(reversed(strides)))

    @property
    def ndim(self) -> int:
        """Number of mesh axes."""
        return len(self.shape)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of boxes along each mesh axis."""
        return tuple(n // b for n, b in zip(self.shape, self.box, strict=True))

    def transpose(self, order: Sequence[int]) -> RankBoxes:
        """The same mesh with its axes in another order."""
        return RankBoxes(*(tuple(values[m] for m in order) for values in (self.shape, self.box, self.stride)))

    def on_nodes(self, ranks_per_node: int) -> RankBoxes | None:
        """The same with nodes in the place of ranks; None if the ranks of a node do not hold an equal box.

        >>> RankBoxes.in_order((2, 4), 1).on_nodes(2).table().tolist()
        [[0, 0, 1, 1], [2, 2, 3, 3]]
        """
        box, stride, rest, after = list(self.box), list(self.stride), ranks_per_node, 1
        for m in sorted(range(self.ndim), key=lambda m: (self.stride[m], self.counts[m] > 1)):
            n = self.counts[m]
            if n > 1 and self.stride[m] != after:
                return None
            here = math.gcd(n, rest) if rest < n else n
            if rest % here or n % here or (here < n and here < rest):
                return None
            box[m] *= here
            rest //= here
            after *= n
            stride[m] = max(1, self.stride[m] // ranks_per_node)
        return RankBoxes(self.shape, tuple(box), tuple(stride)) if rest == 1 else None

    def places(self, rank: int) -> list[range] | None:
        """The box of a rank's devices, as a range along each mesh axis; None for a rank without devices."""
        if not 0 <= rank < math.prod(self.counts):
            return None
        axes = zip(self.counts, self.box, self.stride, strict=True)
        return [range((i := rank // s % n) * b, i * b + b) for n, b, s in axes]

    def table(self) -> IntArray:
        """The ranks as an array."""
        ranks: IntArray = np.zeros((), dtype=np.int64)
        for n, b, s in zip(self.shape, self.box, self.stride, strict=True):
            ranks = np.add.outer(ranks, np.arange(n) // b * s)
        return ranks


class RankTable(Protocol):
    """The ranks of the devices that hold each shard: a row for each shard, with an entry for each device."""

    n_replicas: int
    """Number of devices that hold each shard."""

    @property
    def n_holders(self) -> int | None:
        """Number of ranks that hold a shard, if it is the same for all shards and cheap to find out; else None."""
        ...

    @property
    def n_holding(self) -> int:
        """Number of ranks that hold any shard."""
        ...

    @property
    def most_held(self) -> int:
        """Largest number of shards that one rank holds."""
        ...

    @property
    def boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
        """If every rank holds a box of shards: for each array axis, the sizes of the mesh axes that cut it, and the extents of
        a rank's box along them; else None.
        """
        ...

    def holders(self, shard: int) -> tuple[int, ...]:
        """The ranks that hold a shard, ascending, each once."""
        ...

    def holder(self, shard: int, k: int) -> int:
        """The rank at index `k` of `holders`."""
        ...

    def shards_of(self, rank: int) -> tuple[int, ...]:
        """The shards that a rank holds, ascending, each once."""
        ...

    def spans(self) -> list[int]:
        """Along each axis, the number of shards from the first to the last one of a rank; the maximum over the ranks."""
        ...

    def ranks_at(self, shards: IntArray, replicas: IntArray | int) -> IntArray:
        """The rank of the device that holds a shard as a replica, for arrays of shards and replicas, element by element."""
        ...

    def holdings(self) -> tuple[IntArray, IntArray]:
        """All pairs of a shard and a rank that holds it, each pair once. The arrays are as long as the mesh."""
        ...

    def written_out(self) -> IntArray:
        """The table as an array of shape (shards, replicas)."""
        ...

    def describe(self) -> str:
        """A short text that is equal on two ranks if their tables are equal."""
        ...


def table_of(cuts: Sequence[int], ranks: IntArray | RankBoxes) -> RankTable:
    """The table for an array with these cuts and ranks.

    Raises
    ------
    ValueError
        If the cuts and the ranks do not fit together.
    """
    n_shards = math.prod(cuts)
    if isinstance(ranks, RankBoxes):
        if n_shards in _prefixes(ranks.shape):
            return BoxTable(tuple(cuts), ranks)
    elif ranks.shape[:-1] == (n_shards,):
        return ListTable(tuple(cuts), ranks)
    raise ValueError(f"rank table of shape {ranks.shape} does not fit cuts {tuple(cuts)}")


class BoxTable:
    """A `RankTable` that is a formula.

    Parameters
    ----------
    cuts : tuple of int
        Number of shards along each array axis.
    ranks : RankBoxes
        A mesh whose first axes, in C order, are the shards, and whose other axes are the replicas.
    """

    def __init__(self, cuts: tuple[int, ...], ranks: RankBoxes) -> None:
        self._cuts, self._ranks = cuts, ranks
        n_shards = math.prod(cuts)
        self._n_cut_axes = _prefixes(ranks.shape).index(n_shards)  # mesh axes that are the shards
        self.n_replicas = math.prod(ranks.shape) // n_shards

    @property
    def n_holders(self) -> int | None:
        """The same for all shards."""
        return math.prod(self._ranks.counts[self._n_cut_axes :])

    @property
    def n_holding(self) -> int:
        """One rank for each box."""
        return math.prod(self._ranks.counts)

    @property
    def most_held(self) -> int:
        """The same for all ranks."""
        return math.prod(self._ranks.box[: self._n_cut_axes])

    @cached_property
    def boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """See `RankTable`."""
        found, mesh = [], iter(zip(self._ranks.shape, self._ranks.box, strict=True))
        for n in self._cuts:
            axes: list[tuple[int, int]] = []
            while math.prod(size for size, _ in axes) < n:
                axes.append(next(mesh))
            found.append((tuple(size for size, _ in axes), tuple(b for _, b in axes)))
        return found

    def holders(self, shard: int) -> tuple[int, ...]:
        """The ranks that hold a shard."""
        first = self._first_holder(shard)
        return tuple(first + step for step in self._holder_steps)

    def holder(self, shard: int, k: int) -> int:
        """The rank at index `k` of `holders`."""
        return self._first_holder(shard) + self._holder_steps[k]

    def _first_holder(self, shard: int) -> int:
        ranks = self._ranks
        index = unravel(shard, ranks.shape[: self._n_cut_axes])
        return sum(i // b * s for i, b, s in zip(index, ranks.box, ranks.stride, strict=False))

    @cached_property
    def _holder_steps(self) -> tuple[int, ...]:
        """Differences between the holders of a shard and the first holder."""
        ranks, k = self._ranks, self._n_cut_axes
        steps = [range(0, n * s, s) for n, s in zip(ranks.counts[k:], ranks.stride[k:], strict=True)]
        return tuple(sorted(map(sum, itertools.product(*steps))))

    def shards_of(self, rank: int) -> tuple[int, ...]:
        """The shards that a rank holds."""
        places = self._ranks.places(rank)
        if places is None:
            return ()
        steps = [[i * s for i in axis] for axis, s in zip(places, strides(self._ranks.shape[: self._n_cut_axes]), strict=False)]
        return tuple(map(sum, itertools.product(*steps)))

    def spans(self) -> list[int]:
        """The same for all ranks, because all boxes have the same shape."""
        return [sum((b - 1) * s for b, s in zip(boxes, strides(sizes), strict=True)) + 1 for sizes, boxes in self.boxes]

    def ranks_at(self, shards: IntArray, replicas: IntArray | int) -> IntArray:
        """The rank of the device that holds a shard as a replica, for arrays of shards and replicas."""
        mesh, k = self._ranks, self._n_cut_axes
        place: Any = np.asarray(shards), np.asarray(replicas)
        found: Any = 0
        for numbers, axes in ((place[0], range(k)), (place[1], range(k, mesh.ndim))):
            for m in reversed(axes):
                numbers, i = np.divmod(numbers, mesh.shape[m])
                found = found + i // mesh.box[m] * mesh.stride[m]
        ranks: IntArray = np.zeros(np.broadcast(*place).shape, dtype=np.int64)
        ranks += found
        return ranks

    def holdings(self) -> tuple[IntArray, IntArray]:
        """All pairs of a shard and a rank that holds it."""
        return ListTable(self._cuts, self.written_out()).holdings()

    def written_out(self) -> IntArray:
        """The table as an array."""
        return self._ranks.table().reshape(math.prod(self._cuts), -1)

    def describe(self) -> str:
        """The formula as text."""
        return str(self._ranks)


class ListTable:
    """A `RankTable` that is an array.

    Parameters
    ----------
    cuts : tuple of int
        Number of shards along each array axis.
    ranks : ndarray of int, shape (prod(cuts), n_replicas)
        For each shard (C order over `cuts`) the ranks of the devices that hold it.
    """

    boxes = None

    def __init__(self, cuts: tuple[int, ...], ranks: IntArray) -> None:
        self._cuts, self._ranks = cuts, ranks
        self.n_replicas = ranks.shape[1]

    @property
    def n_holders(self) -> int | None:
        """Known if there are no replicas."""
        return 1 if self.n_replicas == 1 else None

    @property
    def n_holding(self) -> int:
        """Number of ranks that hold any shard."""
        return int(np.count_nonzero(self._n_held))

    @property
    def most_held(self) -> int:
        """Largest number of shards that one rank holds."""
        return int(self._n_held.max(initial=0))

    @cached_property
    def _n_held(self) -> IntArray:
        """Number of shards that each rank holds, up to the last rank that holds any."""
        return np.bincount(self.holdings()[1])

    def holders(self, shard: int) -> tuple[int, ...]:
        """The ranks that hold a shard."""
        row = self._ranks[shard].tolist()
        return tuple(row) if len(row) == 1 else tuple(sorted(set(row)))

    def holder(self, shard: int, k: int) -> int:
        """The rank at index `k` of `holders`."""
        return self.holders(shard)[k]

    def shards_of(self, rank: int) -> tuple[int, ...]:
        """The shards that a rank holds."""
        order, first = self._by_rank
        if not 0 <= rank < len(first) - 1:
            return ()
        held = order[first[rank] : first[rank + 1]].tolist()
        return tuple(sorted({place // self.n_replicas for place in held}))

    @cached_property
    def _by_rank(self) -> tuple[IntArray, IntArray]:
        """The entries of the table sorted by rank, and where each rank begins among them."""
        places = self._ranks.ravel()
        if (places < 0).any():
            raise ValueError("rank table has a negative rank")
        counts = np.bincount(places)
        first = np.concatenate([[0], np.cumsum(counts)])
        if counts.max(initial=0) > 1:
            return np.argsort(places, kind="stable"), first
        order = np.empty(len(places), dtype=np.int64)
        order[first[places]] = np.arange(len(places))  # one device per rank: no need to sort
        return order, first

    def spans(self) -> list[int]:
        """See `RankTable`."""
        shard, rank = self.holdings()
        order = np.argsort(rank, kind="stable")
        shard, first = shard[order], np.flatnonzero(np.diff(rank[order], prepend=-1))
        spans = []
        for stride, n in zip(strides(self._cuts), self._cuts, strict=True):
            index = shard // stride % n
            spans.append(1 + int((np.maximum.reduceat(index, first) - np.minimum.reduceat(index, first)).max()))
        return spans

    def ranks_at(self, shards: IntArray, replicas: IntArray | int) -> IntArray:
        """The rank of the device that holds a shard as a replica, for arrays of shards and replicas."""
        ranks: IntArray = self._ranks[shards, replicas]
        return ranks

    def holdings(self) -> tuple[IntArray, IntArray]:
        """All pairs of a shard and a rank that holds it."""
        return self._holdings

    @cached_property
    def _holdings(self) -> tuple[IntArray, IntArray]:
        table = self._ranks
        if table.shape[1] == 1:
            return np.arange(len(table)), table[:, 0]
        rows = np.sort(table, axis=1)
        shard, replica = np.nonzero(np.diff(rows, axis=1, prepend=-1))
        return shard, rows[shard, replica]

    def written_out(self) -> IntArray:
        """The table as an array."""
        return self._ranks

    def describe(self) -> str:
        """The CRC-32 of the array."""
        return f"{zlib.crc32(np.ascontiguousarray(self._ranks).data):08x}"


def _prefixes(shape: Sequence[int]) -> list[int]:
    """Products of the first 0, 1, ... sizes."""
    return list(itertools.accumulate(shape, lambda a, b: a * b, initial=1))
