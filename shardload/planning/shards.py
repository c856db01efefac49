"""Which rank holds which shard?

1. A mesh of ranks says whose device stands at each place of the mesh. Where ranks hold equal boxes of devices in mesh order
   (every abstract mesh) that is a formula, `RankBoxes`, and nothing is as long as the mesh; a mesh of devices in any other
   order is an array.
2. `plan_shards` brings the mesh's axes into the order of the array axes that they cut. Then a place is a shard and a replica.
3. `Shards` answers for one shard (`holders`) or one rank (`shards_of`) at the cost of the answer; of an array an index by
   rank is made once.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardload.planning.grid import Grid
from shardload.planning.region import Region

__all__ = ["RankBoxes", "Shards", "plan_shards"]

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class RankBoxes:
    """The ranks of a mesh whose ranks hold equal boxes of devices: an array of ranks that is never written out.

    The rank at place ``i`` is ``sum(i[m] // box[m] * stride[m])``.

    Parameters
    ----------
    shape : tuple of int
        Devices along each mesh axis.
    box : tuple of int
        Devices of one rank along each mesh axis; divides `shape`.
    stride : tuple of int
        By how much the rank grows from a box to the next one along each mesh axis.

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
        """Ranks that hold `devices_per_rank` consecutive devices each; None where these are not equal boxes."""
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
        """Mesh axes."""
        return len(self.shape)

    @property
    def counts(self) -> tuple[int, ...]:
        """Boxes along each mesh axis."""
        return tuple(n // b for n, b in zip(self.shape, self.box, strict=True))

    def transpose(self, order: Sequence[int]) -> RankBoxes:
        """The same mesh with its axes in another order."""
        return RankBoxes(*(tuple(values[m] for m in order) for values in (self.shape, self.box, self.stride)))

    def places(self, rank: int) -> list[range] | None:
        """The box of places where a rank's devices stand, a range along each mesh axis; None for a rank without any."""
        if not 0 <= rank < math.prod(self.counts):
            return None
        axes = zip(self.counts, self.box, self.stride, strict=True)
        return [range((i := rank // s % n) * b, i * b + b) for n, b, s in axes]

    def table(self) -> IntArray:
        """Written out."""
        ranks: IntArray = np.zeros((), dtype=np.int64)
        for n, b, s in zip(self.shape, self.box, self.stride, strict=True):
            ranks = np.add.outer(ranks, np.arange(n) // b * s)
        return ranks


@dataclass(frozen=True, eq=False)
class Shards:
    """Which rank holds which shard: the sharding as plain integers.

    Parameters
    ----------
    shape_global : tuple of int
        The global array, padded where it was padded, so that every cut divides its axis.
    cuts : tuple of int
        Shards along each axis.
    ranks : ndarray of int, shape (prod(cuts), n_replicas), or RankBoxes
        For each shard (C order over `cuts`) the ranks of the devices that hold it, a row entry per device. As RankBoxes: a
        mesh whose first axes, in C order, are the shards, and whose other axes are the replicas.
    """

    shape_global: tuple[int, ...]
    cuts: tuple[int, ...]
    ranks: np.ndarray[Any, np.dtype[np.int64]] | RankBoxes

    def __post_init__(self) -> None:
        if any(n % c for n, c in zip(self.shape_global, self.cuts, strict=True)):
            raise ValueError(f"shape {self.shape_global} is not divided by cuts {self.cuts}")
        n_shards, ranks = math.prod(self.cuts), self.ranks
        fits = n_shards in _prefixes(ranks.shape) if isinstance(ranks, RankBoxes) else ranks.shape[:-1] == (n_shards,)
        if not fits:
            raise ValueError(f"rank table of shape {ranks.shape} does not fit cuts {self.cuts}")

    @property
    def n_shards(self) -> int:
        """Shards in all."""
        return math.prod(self.cuts)

    @cached_property
    def n_replicas(self) -> int:
        """Devices that hold each shard."""
        return math.prod(self.ranks.shape) // self.n_shards

    @cached_property
    def n_cut_axes(self) -> int:
        """Of `ranks` as RankBoxes: how many of the first mesh axes are the shards."""
        return _prefixes(self.ranks.shape).index(self.n_shards)

    @cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """Elements of one shard along each axis."""
        return tuple(n // c for n, c in zip(self.shape_global, self.cuts, strict=True))

    @cached_property
    def grid(self) -> Grid:
        """The cut as a grid (of an array that is not empty)."""
        return Grid(self.shape_global, tuple(max(1, n) for n in self.shard_shape), (0,) * len(self.cuts))

    def region(self, shard: int) -> Region:
        """The elements of a shard, padding included."""
        start = tuple(i * n for i, n in zip(_unravel(shard, self.cuts), self.shard_shape, strict=True))
        return Region(start, tuple(a + n for a, n in zip(start, self.shard_shape, strict=True)))

    def holders(self, shard: int) -> tuple[int, ...]:
        """The ranks that hold a shard, ascending, each once."""
        if isinstance(self.ranks, RankBoxes):
            first = self._first_holder(self.ranks, shard)
            return tuple(first + step for step in self._holder_steps)
        row = self.ranks[shard].tolist()
        return tuple(row) if len(row) == 1 else tuple(sorted(set(row)))

    def holder(self, shard: int, k: int) -> int:
        """The rank that comes at place `k` in `holders`."""
        if isinstance(self.ranks, RankBoxes):
            return self._first_holder(self.ranks, shard) + self._holder_steps[k]
        return self.holders(shard)[k]

    @cached_property
    def n_holders(self) -> int | None:
        """The ranks that hold a shard, where all shards have as many and that is plain to see; else None."""
        if isinstance(self.ranks, RankBoxes):
            return math.prod(self.ranks.counts[self.n_cut_axes :])
        return 1 if self.n_replicas == 1 else None

    def _first_holder(self, ranks: RankBoxes, shard: int) -> int:
        index = _unravel(shard, ranks.shape[: self.n_cut_axes])
        return sum(i // b * s for i, b, s in zip(index, ranks.box, ranks.stride, strict=False))

    @cached_property
    def _holder_steps(self) -> tuple[int, ...]:
        """Of `ranks` as RankBoxes: how far the holders of a shard are from the first one."""
        ranks, k = self.ranks, self.n_cut_axes
        if not isinstance(ranks, RankBoxes):
            return ()
        steps = [range(0, n * s, s) for n, s in zip(ranks.counts[k:], ranks.stride[k:], strict=True)]
        return tuple(sorted(map(sum, itertools.product(*steps))))

    @cached_property
    def most_held(self) -> int:
        """How many shards the rank holds that holds most."""
        if isinstance(self.ranks, RankBoxes):
            return math.prod(self.ranks.box[: self.n_cut_axes])
        return int(self.held_by_rank.max(initial=0))

    def shards_of(self, rank: int) -> tuple[int, ...]:
        """The shards that a rank holds, ascending, each once."""
        if isinstance(self.ranks, RankBoxes):
            places = self.ranks.places(rank)
            if places is None:
                return ()
            sizes = self.ranks.shape[: self.n_cut_axes]
            steps = [[i * s for i in axis] for axis, s in zip(places, _strides(sizes), strict=False)]
            return tuple(map(sum, itertools.product(*steps)))
        order, first = self._by_rank
        if not 0 <= rank < len(first) - 1:
            return ()
        held = order[first[rank] : first[rank + 1]].tolist()
        return tuple(sorted({place // self.n_replicas for place in held}))

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Elements along each axis, from the first to the last one that a rank holds; of the rank that reaches furthest."""
        if isinstance(self.ranks, RankBoxes):
            spans = [
                sum((b - 1) * s for b, s in zip(boxes, _strides(sizes), strict=True)) + 1 for sizes, boxes in self.mesh_axes
            ]
        else:
            shard, rank = self.holdings
            order = np.argsort(rank, kind="stable")
            shard, first = shard[order], np.flatnonzero(np.diff(rank[order], prepend=-1))
            spans = []
            for stride, n in zip(_strides(self.cuts), self.cuts, strict=True):
                index = shard // stride % n
                spans.append(1 + int((np.maximum.reduceat(index, first) - np.minimum.reduceat(index, first)).max()))
        return tuple(n * e for n, e in zip(spans, self.shard_shape, strict=True))

    @cached_property
    def mesh_axes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of `ranks` as RankBoxes: for each array axis, the sizes and a rank's boxes of the mesh axes that cut it."""
        found, mesh = [], iter(zip(self.ranks.shape, self.ranks.box, strict=True) if isinstance(self.ranks, RankBoxes) else ())
        for n in self.cuts:
            axes: list[tuple[int, int]] = []
            while math.prod(size for size, _ in axes) < n:
                axes.append(next(mesh))
            found.append((tuple(size for size, _ in axes), tuple(b for _, b in axes)))
        return found

    def ranks_at(self, shards: IntArray, replicas: IntArray | int) -> IntArray:
        """The rank of the device that holds each of many shards as each of many replicas, element by element."""
        if not isinstance(self.ranks, RankBoxes):
            ranks: IntArray = self.ranks[shards, replicas]
            return ranks
        mesh, k = self.ranks, self.n_cut_axes
        place: Any = np.asarray(shards), np.asarray(replicas)
        found: Any = 0
        for numbers, axes in ((place[0], range(k)), (place[1], range(k, mesh.ndim))):
            for m in reversed(axes):
                numbers, i = np.divmod(numbers, mesh.shape[m])
                found = found + i // mesh.box[m] * mesh.stride[m]
        ranks = np.zeros(np.broadcast(*place).shape, dtype=np.int64)
        ranks += found
        return ranks

    def table(self) -> IntArray:
        """`ranks` as an array, written out where it was a formula."""
        return self.ranks.table().reshape(self.n_shards, -1) if isinstance(self.ranks, RankBoxes) else self.ranks

    def describe_ranks(self) -> str:
        """A short text that is equal on two ranks when their tables are."""
        return (
            str(self.ranks) if isinstance(self.ranks, RankBoxes) else f"{zlib.crc32(np.ascontiguousarray(self.ranks).data):08x}"
        )

    @cached_property
    def _by_rank(self) -> tuple[IntArray, IntArray]:
        """The places of the table in the order of their ranks, and where each rank begins there."""
        places = self.table().ravel()
        if (places < 0).any():
            raise ValueError("rank table has a negative rank")
        counts = np.bincount(places)
        first = np.concatenate([[0], np.cumsum(counts)])
        if counts.max(initial=0) > 1:
            return np.argsort(places, kind="stable"), first
        order = np.empty(len(places), dtype=np.int64)
        order[first[places]] = np.arange(len(places))  # a rank per device: no need to sort
        return order, first

    @cached_property
    def held_by_rank(self) -> IntArray:
        """How many shards each rank holds, up to the last rank that holds any. As long as the mesh: for arrays of ranks."""
        _, ranks = self.holdings
        return np.bincount(ranks)

    @cached_property
    def holdings(self) -> tuple[IntArray, IntArray]:
        """Each shard and a rank that holds it, once, however many devices of the rank do. As long as the mesh."""
        table = self.table()
        if table.shape[1] == 1:
            return np.arange(len(table)), table[:, 0]
        rows = np.sort(table, axis=1)
        shard, replica = np.nonzero(np.diff(rows, axis=1, prepend=-1))
        return shard, rows[shard, replica]


def plan_shards(shape_global: Sequence[int], axes: Sequence[Sequence[int]], ranks: np.ndarray[Any, Any] | RankBoxes) -> Shards:
    """Cut an array over a mesh.

    Parameters
    ----------
    shape_global : sequence of int
        The array, every axis a multiple of the product of its mesh axes.
    axes : sequence of sequence of int
        For each array axis the mesh axes that cut it, major first; empty for an axis that is not cut.
    ranks : ndarray of int, shape of the mesh, or RankBoxes
        The rank of the device at each place of the mesh.

    Examples
    --------
    A mesh of 2 x 3 whose first axis cuts nothing: each shard is held by the two ranks of a mesh column.

    >>> s = plan_shards((6,), [(1,)], np.arange(6).reshape(2, 3))
    >>> s.cuts, s.holders(2), str(s.region(2))
    ((3,), (2, 5), '[4:6]')
    """
    used = [m for cut in axes for m in cut]
    unused = [m for m in range(ranks.ndim) if m not in used]
    cuts = tuple(math.prod(ranks.shape[m] for m in cut) for cut in axes)
    # Mesh axes in the order of the array axes they cut, the rest last: then a row is a shard and a column a replica.
    turned = ranks.transpose((*used, *unused))
    if isinstance(turned, RankBoxes):
        return Shards(tuple(shape_global), cuts, turned)
    return Shards(tuple(shape_global), cuts, np.ascontiguousarray(turned.reshape(math.prod(cuts), -1), dtype=np.int64))


def _prefixes(shape: Sequence[int]) -> list[int]:
    """Products of the first 0, 1, ... sizes."""
    return list(itertools.accumulate(shape, lambda a, b: a * b, initial=1))


def _strides(shape: Sequence[int]) -> list[int]:
    """By how much the C-order number grows along each axis."""
    return [math.prod(shape[k + 1 :]) for k in range(len(shape))]


def _unravel(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The place along each axis of a C-order number."""
    index = []
    for n in reversed(shape):
        number, i = divmod(number, n)
        index.append(i)
    return tuple(reversed(index))
