"""Which rank copies which part of an array, and when, so that each chunk of the source is decoded as few times as possible?

Pure: integers in, integers out.

1. An array is cut into *slabs* of whole *units*: what of the target is written at once (a chunk, or a run of an array in one
   piece). Their edges are those of chunks of the source, too, wherever that fits into memory: then no chunk is decoded twice.
2. Alone: a slab fits into the memory of one rank, which reads it by itself. No rank waits for another.
3. Together: a slab takes the memory of all ranks. Its chunks are read once, by all, and what others need is sent to them.
4. Slabs are dealt out to the ranks in turn, those of the largest arrays first. Which rank has a slab is a formula, so each rank
   makes its own rounds, one after the other (`plan_rounds`). Rounds of all together come first, as all ranks have equally
   many of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardload.planning.region import Grid, Region, aligned
from shardload.planning.shards import Shards
from shardload.planning.staging import Item, plan_rounds

_MOST_TRIED = 20_000  # shapes of a slab
_ENOUGH_NBYTES = 8 << 20  # of a slab: larger ones save no more work per slab


@dataclass(frozen=True)
class CopiedArray:
    """How one array lies in the source, and how in the target.

    Attributes
    ----------
    shape : tuple of int
        Elements along each axis.
    unit : tuple of int
        Elements of a unit of the target.
    chunks : Grid
        The array cut into chunks of the source; if that has none, into runs that are worth a read.
    is_decoded : bool
        Whether the source has chunks.
    itemsize : int
        Bytes per element in memory.
    is_alone : bool
        True if rank 0 must write all of it.
    """

    shape: tuple[int, ...]
    unit: tuple[int, ...]
    chunks: Grid
    is_decoded: bool
    itemsize: int
    is_alone: bool = False

    @property
    def unit_nbytes(self) -> int:
        """Bytes of a unit in memory."""
        return aligned(math.prod(map(min, self.unit, self.shape)) * self.itemsize)


@dataclass(frozen=True)
class SlabLayout:
    """How one array is copied.

    Attributes
    ----------
    array : CopiedArray
        The array.
    slabs : Grid
        The slabs.
    cuts : tuple of int
        Into how many pieces a slab is cut along each axis; all 1 if one rank copies it alone.
    """

    array: CopiedArray
    slabs: Grid
    cuts: tuple[int, ...]

    @property
    def is_together(self) -> bool:
        """True if all ranks copy a slab."""
        return math.prod(self.cuts) > 1

    @property
    def nbytes(self) -> int:
        """Bytes of all values in memory."""
        return math.prod(self.array.shape) * self.array.itemsize

    @cached_property
    def slab_nbytes(self) -> int:
        """Bytes of a slab in memory."""
        return aligned(math.prod(map(min, self.slabs.cell, self.slabs.shape)) * self.array.itemsize)

    @cached_property
    def n_decoded(self) -> int:
        """How many decodes of chunks of the source the copy takes; a chunk that meets two slabs is decoded twice."""
        return math.prod(_n_met(self.slabs, self.array.chunks, axis) for axis in range(len(self.array.shape)))

    @property
    def factor(self) -> float:
        """How many times a chunk of the source is decoded, on average; 1 for a source without chunks."""
        n = self.array.chunks.n_cells
        return self.n_decoded / n if n and self.array.is_decoded else 1.0

    def pieces(self, slab: Region, n_ranks: int) -> Shards:
        """Which rank has which piece of a slab, in coordinates that begin at the slab."""
        cell = [_round_up(-(-n // c), u) for n, c, u in zip(slab.shape, self.cuts, self.array.unit, strict=True)]
        cuts = tuple(-(-n // c) for n, c in zip(slab.shape, cell, strict=True))
        n = math.prod(cuts)
        ranks = np.arange(n, dtype=np.int64) * min(n, n_ranks) // n
        return Shards(tuple(c * k for c, k in zip(cell, cuts, strict=True)), cuts, ranks[:, None])


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _n_met(slabs: Grid, chunks: Grid, axis: int) -> int:
    """Along one axis, the pairs of a slab and a chunk of the source that share elements.

    Each pair but the first begins where a slab begins, or a chunk, or both.
    """
    n = slabs.shape[axis]
    if not n:
        return 0
    n_both = _n_common(n, (slabs.cell[axis], slabs.phase[axis]), (chunks.cell[axis], chunks.phase[axis]))
    return slabs.counts[axis] + chunks.counts[axis] - 1 - n_both


def _n_common(n: int, first: tuple[int, int], second: tuple[int, int]) -> int:
    """How many edges two cuts of an axis of `n` elements have in common. Each cut is given by its cell and phase.

    >>> _n_common(24, (4, 0), (6, 0)), _n_common(24, (4, 0), (6, 2)), _n_common(24, (4, 0), (6, 1))
    (1, 2, 0)
    """
    (cell, phase), (other, other_phase) = first, second
    common = math.gcd(cell, other)
    if (phase - other_phase) % common:
        return 0
    turns = other // common
    step = (phase - other_phase) // common * pow(cell // common, -1, turns) % turns
    period = cell * turns
    begin = (step * cell - phase) % period or period
    return max(0, (n - 1 - begin) // period + 1)


def plan_slab_layout(array: CopiedArray, n_ranks: int, round_nbytes: int) -> SlabLayout:
    """How an array is copied, if each rank has `round_nbytes` for the values of a round: room for a unit, at least.

    Examples
    --------
    Planes of 1 MiB become cubes of 8 MiB. With 64 MiB on each of 4 ranks, a slab of 256 planes is read once by all:

    >>> planes = Grid((512, 512, 512), (1, 512, 512), (0, 0, 0))
    >>> layout = plan_slab_layout(CopiedArray(planes.shape, (128, 128, 128), planes, True, 4), 4, 64 << 20)
    >>> layout.slabs.cell, layout.cuts, layout.factor
    ((256, 512, 512), (1, 1, 4), 1.0)

    With 256 MiB a rank reads such a slab alone:

    >>> layout = plan_slab_layout(CopiedArray(planes.shape, (128, 128, 128), planes, True, 4), 4, 256 << 20)
    >>> layout.slabs.cell, layout.is_together
    ((128, 512, 512), False)
    """
    ndim = len(array.shape)
    ones = (1,) * ndim
    if 0 in array.shape or not ndim:
        return SlabLayout(array, Grid(array.shape, tuple(max(1, n) for n in array.shape), (0,) * ndim), ones)
    axes = [_candidates(array, axis) for axis in range(ndim)]
    while math.prod(map(len, axes)) > _MOST_TRIED:
        longest = max(range(ndim), key=lambda k: len(axes[k]))
        axes[longest] = axes[longest][::2] if len(axes[longest]) > 2 else axes[longest][:1]
    n_owners = 1 if array.is_alone else n_ranks
    best: dict[bool, tuple[tuple[float, ...], SlabLayout]] = {}
    for chosen in itertools.product(*axes):
        cell, phase, n_met_along, n_slabs_along = zip(*chosen, strict=True)
        nbytes = math.prod(map(min, cell, array.shape)) * array.itemsize
        n_met, n_slabs = math.prod(n_met_along), math.prod(n_slabs_along)
        is_together = nbytes > round_nbytes
        cuts = _cuts(array, cell, n_owners, round_nbytes) if is_together else ones
        if cuts is None or nbytes > n_owners * round_nbytes:
            continue
        uneven = 1.0 if is_together else _round_up(n_slabs, n_owners) / n_slabs
        # Larger slabs are better up to some size; then those whose last axes are long, which lie together in the file.
        enough_nbytes = _ENOUGH_NBYTES * (n_owners if is_together else 1)
        key = (n_met, uneven, -min(nbytes, enough_nbytes), *(-n for n in reversed(cell)))
        if is_together not in best or key < best[is_together][0]:
            best[is_together] = key, SlabLayout(array, Grid(array.shape, cell, phase), cuts)
    # Alone is simpler, and always possible: a slab of one unit fits. What is worse about it: chunks that are decoded again, and
    # ranks that have nothing to do.
    costs = {is_together: key[0] * key[1] for is_together, (key, _) in best.items()}
    return best[True in costs and costs[True] < 0.9 * costs[False]][1]


def _candidates(array: CopiedArray, axis: int) -> list[tuple[int, int, int, int]]:
    """Lengths of a slab along an axis: length, phase, pairs of a slab and a chunk of the source, slabs."""
    n, u = array.shape[axis], min(array.unit[axis], array.shape[axis])
    chunk, phase = array.chunks.cell[axis], array.chunks.phase[axis]
    n_units = -(-n // u)
    steps = {1, 2, 3, 4, 6, n_units} | {2**k for k in range(3, n_units.bit_length())}
    lengths = {(min(n, k * u), 0) for k in steps if k <= n_units}
    common = math.gcd(u, chunk)
    if phase % common == 0:  # edges of chunks of both meet somewhere
        period = u * chunk // common
        turns = chunk // common
        first = -(phase // common) * pow(u // common, -1, turns) % turns * u
        for k in steps:
            if k * period < n:
                lengths.add((k * period, (period - first) % period if k == 1 else (k * period - first) % (k * period)))
    chunks, grids = Grid((n,), (chunk,), (phase,)), [Grid((n,), (length,), (shift,)) for length, shift in sorted(lengths)]
    return [(grid.cell[0], grid.phase[0], _n_met(grid, chunks, 0), grid.counts[0]) for grid in grids]


def _cuts(array: CopiedArray, cell: Sequence[int], n_ranks: int, most_nbytes: int) -> tuple[int, ...] | None:
    """Into how many pieces of whole units a slab is cut along each axis, so that each rank has one; None if it has too few, or
    they are too large.
    """
    counts = [-(-min(c, n) // u) for c, n, u in zip(cell, array.shape, array.unit, strict=True)]
    n_units, cuts = min(
        (math.prod(-(-n // c) for n, c in zip(counts, cuts, strict=True)), cuts) for cuts in _factors(n_ranks, len(counts))
    )
    if n_units >= math.prod(counts):
        return None
    capped = tuple(min(c, n) for c, n in zip(cuts, counts, strict=True))
    axes = zip(cell, array.shape, array.unit, capped, strict=True)
    piece = math.prod(min(_round_up(-(-min(c, n) // k), u), n) for c, n, u, k in axes)
    return capped if aligned(piece * array.itemsize) <= most_nbytes else None


def _factors(n: int, ndim: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `n` as a product of `ndim` numbers.

    >>> list(_factors(4, 2))
    [(1, 4), (2, 2), (4, 1)]
    """
    if ndim == 1:
        yield (n,)
        return
    for k in range(1, n + 1):
        if n % k == 0:
            for factors in _factors(n // k, ndim - 1):
                yield (k, *factors)


# --- rounds


def plan_copy_rounds(
    arrays: Sequence[SlabLayout], n_ranks: int, round_nbytes: int, rank: int
) -> Iterator[tuple[list[Item], bool]]:
    """The rounds of one rank, and whether all ranks have the same slabs in it: first those of all together, then its own.

    Parameters
    ----------
    arrays : sequence of SlabLayout
        The arrays.
    n_ranks : int
        Number of ranks.
    round_nbytes : int
        Bytes of the values of a round.
    rank : int
        The rank.

    Examples
    --------
    >>> array = plan_slab_layout(CopiedArray((8,), (2,), Grid((8,), (2,), (0,)), True, 64), 2, 256)
    >>> [[item.units for items, _ in plan_copy_rounds([array], 2, 256, rank) for item in items] for rank in range(2)]
    [[range(0, 2, 2)], [range(1, 3, 2)]]
    """
    for number, array in enumerate(arrays):
        for slab in range(array.slabs.n_cells if array.is_together else 0):
            yield [Item(number, range(slab, slab + 1))], True
    for items in plan_rounds(_share(arrays, n_ranks, rank), round_nbytes):
        yield items, False


def _share(arrays: Sequence[SlabLayout], n_ranks: int, rank: int) -> Iterator[tuple[int, range, int]]:
    """What a rank copies alone: slabs of each array, largest slabs first. All ranks in turn get a slab, rank 0 the first."""
    n_dealt = 0
    alone = [number for number, array in enumerate(arrays) if not array.is_together]
    for number in sorted(alone, key=lambda number: -arrays[number].slab_nbytes):
        array, n_slabs = arrays[number], arrays[number].slabs.n_cells
        slabs = range((rank - n_dealt) % n_ranks, n_slabs, n_ranks)
        if array.array.is_alone:
            slabs = range(n_slabs if rank == 0 else 0)
        else:
            n_dealt += n_slabs
        if slabs:
            yield number, slabs, array.slab_nbytes
