"""How does a stream come from metadata and checked arguments to a plan? Every rank makes the same one, and opens no file.

1. Leaves that name the same array, in the same dtype, become one `StreamArray`, which is read once, however they cut it.
2. The order of the samples follows from the steps of the selection, windows, gaps, chunks and `pool`.
3. Each leaf gets its places among the steps of its array, and the sharding of its batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardload.arrays.sharding import cuts_of, read_spec, spec_text
from shardload.errors import ConfigError
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.labelling import COORDINATE_NBYTES
from shardload.jobs.consistency import State
from shardload.jobs.loading.planner import PlannedRanks, lay_out_shards, max_block_nbytes, source_layout_of, staging_for
from shardload.jobs.loading.request import Request
from shardload.jobs.streaming.plan import Leaf, Sampling, Stack, StreamArray, StreamPlan, file_of
from shardload.options import AUTO, pad_value
from shardload.planning.batch_flow import BatchSchedule
from shardload.planning.region import Array, Grid, IntArray, plan_blocks
from shardload.planning.sample_order import SampleOrder, block_steps, spread_in
from shardload.planning.schedule import PARALLEL, ROOT, Owners, SourceLayout
from shardload.planning.selection import Selection, axes_text
from shardload.planning.shards import Shards
from shardload.units import format_nbytes
from shardload.values.dates import as_dates, in_other_units

_SHARE_OF_SELECTION = 10  # pool="auto" is a tenth of what is selected
_LEAST_POOL = 3  # blocks of pool="auto": with less, blocks are not mixed
_MOST_POOL_NBYTES = 64 << 30
_SAME_STEP = 0.01  # of the differences of a coordinate: so much apart two steps are the same
_LONGEST = 1.5  # of the differences of a coordinate, times the median: what is longer is a gap
Window = int | tuple[int, ...]
Steps = np.ndarray[tuple[int], np.dtype[np.float64]]  # values of a coordinate
IGNORE = "ignore"  # of `gaps`
SAMPLES, WINDOW, STACK = "samples", "the axis of the window", "the new axis of stack"  # of a batch, before those of a step


@dataclass(frozen=True, eq=False)
class LeafRequest:
    """What a leaf of a batch asks of an array that was found.

    Attributes
    ----------
    request : Request
        Sharding of the samples (without the axes of a window and a stack), and options.
    info : ArrayInfo
        The array's metadata.
    selection : Selection
        Its elements.
    axis : int
        The stream's axis among those of the selected array.
    handle : object
        The path or object that opens it.
    where : str
        Its place in the tree, for messages.
    spec : PartitionSpec
        Of a batch.
    leading : tuple of str
        Its axes in a batch before those of a step: some of `SAMPLES`, `WINDOW`, `STACK`.
    sum_of_values : int or None
        A checksum of some values of the array.
    state : State
        That of its file, when the values were read.
    window, scale : object
        As the caller passed them.
    """

    request: Request
    info: ArrayInfo
    selection: Selection
    axis: int
    handle: Any
    where: str
    spec: PartitionSpec
    leading: tuple[str, ...]
    sum_of_values: int | None
    state: State
    window: Window
    scale: tuple[Any, Any] | None

    @property
    def offsets(self) -> tuple[int, ...]:
        """The steps of its window."""
        return offsets_of(self.window)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Leaves with the same key are read together."""
        of_values = replace(self.request.options, select=None, pad=None)  # without those that are told apart later
        return file_of(self.handle, self.info), self.info.dataset, self.selection, of_values

    @property
    def cut(self) -> tuple[Any, ...]:
        """Leaves of an array with the same cut hold the same steps on the same ranks."""
        return self.request.sharding, self.request.options.pad is None

    @property
    def rest(self) -> list[int]:
        """The file's axes that a step has."""
        return [axis for k, axis in enumerate(self.selection.kept) if k != self.axis]


def offsets_of(window: Window) -> tuple[int, ...]:
    """The steps of a window."""
    return window if isinstance(window, tuple) else (window,)


def stream_axis(along: str | int, info: ArrayInfo, selection: Selection) -> int:
    """The stream's axis among those of the selected array. ConfigError if it is none of them."""
    kept_axes, n = selection.kept, len(info.shape)
    if isinstance(along, str):
        if along not in info.dims:
            raise ConfigError(f"along is {along!r}, but {info} {axes_text(along, 0, info.dims, 'the number of one: along=0')}")
        axis = info.dims.index(along)
    else:
        axis = along + n if along < 0 else along
        if not 0 <= axis < n:
            raise ConfigError(f"along is {along}, but {info} has shape {info.shape}: pass an axis of it")
    if axis not in kept_axes:
        raise ConfigError(
            f"select takes one index of axis {axis} of {info}, along which the stream goes: pass a slice, or another along="
        )
    return int(kept_axes.index(axis))


class StreamPlanner:
    """Makes the plan of a stream.

    Parameters
    ----------
    sampling : Sampling
        What the stream gives.
    leaves : sequence of LeafRequest
        What a batch has.
    ranks : PlannedRanks
        Who reads.
    stacks : sequence of (str, sequence of int)
        The axis of each stack, and the numbers of its leaves.
    """

    def __init__(
        self,
        sampling: Sampling,
        leaves: Sequence[LeafRequest],
        ranks: PlannedRanks,
        stacks: Sequence[tuple[str, Sequence[int]]] = (),
    ) -> None:
        self._sampling, self._leaves, self._ranks, self._stacks = sampling, leaves, ranks, stacks
        self._batch = sampling.batch or 1

    def plan(self) -> StreamPlan:
        """The plan. ConfigError if there is no such stream."""
        by_key: dict[tuple[Any, ...], dict[tuple[Any, ...], list[LeafRequest]]] = {}  # and by their cuts
        for leaf in self._leaves:
            by_key.setdefault(leaf.key, {}).setdefault(leaf.cut, []).append(leaf)
        arrays, staging_nbytes = zip(*map(self._array, by_key.values()), strict=True)
        self._check_lengths(arrays)
        if self._sampling.gaps != IGNORE:
            check_same_steps(arrays)
        order, pool_nbytes = self._order(arrays)
        numbers = {(key, cut): (k, j) for k, (key, cuts) in enumerate(by_key.items()) for j, cut in enumerate(cuts)}
        leaves = [self._leaf(leaf, arrays, *numbers[leaf.key, leaf.cut]) for leaf in self._leaves]
        plan = StreamPlan(
            arrays=arrays,
            leaves=leaves,
            stacks=tuple(self._stack(name, members, leaves) for name, members in self._stacks),
            sample_order=order,
            sampling=self._sampling,
            pool_nbytes=pool_nbytes,
            n_ranks=self._ranks.n,
            n_threads=self._ranks.n_threads,
            staging_nbytes=max(staging_nbytes),
            names=tuple(leaf.where.removeprefix("array ") for leaf in self._leaves),
        )
        self._check_samples(plan)
        self._check_memory(plan)
        return plan

    def _check_memory(self, plan: StreamPlan) -> None:
        """Raise ConfigError if a rank has too little memory. The order is never changed to fit into it."""
        order, room = plan.sample_order, self._ranks.memory_nbytes - plan.staging_nbytes
        step_nbytes = batch_nbytes = stored_nbytes = 0.0
        for array in plan.arrays:
            step_nbytes += array.step_nbytes * sum(cut.shards.most_held / cut.shards.n_shards for cut in array.cuts)
            stored_nbytes += array.stored_step_nbytes
        for leaf in plan.leaves:
            shards = plan.arrays[leaf.array].cuts[leaf.cut].shards
            batch_nbytes += math.prod(leaf.shape) * leaf.dtype.itemsize * shards.most_held / shards.n_shards
        room -= int((plan.sampling.prefetch + 1) * batch_nbytes)
        if order.seed is None:
            n_steps = 2 * max(array.chunk_steps for array in plan.arrays) + order.last - order.first
        elif order.spread < order.n_blocks:
            n_steps = int(plan.pool_nbytes / max(1.0, stored_nbytes))
        else:
            n_steps = order.n_steps if order.block > 1 else 0  # samples of one step do not wait
        held_nbytes = int(min(n_steps, order.n_steps) * step_nbytes)
        if held_nbytes <= room:
            return
        fits = int(room / max(1.0, step_nbytes)) * stored_nbytes
        fix = "Start more ranks, cut a batch over more of them, pass a smaller batch or prefetch, or write shorter chunks"
        if order.seed is not None and fits >= _LEAST_POOL * order.block * stored_nbytes:
            fix = f"Pass pool={int(fits)} (another order), or start more ranks"
        raise ConfigError(
            f"a rank may use {format_nbytes(self._ranks.memory_nbytes)} of memory, but this stream takes "
            f"{format_nbytes(held_nbytes)} for steps, beside {format_nbytes(plan.staging_nbytes)} of staging and "
            f"{plan.sampling.prefetch + 1} batches of {format_nbytes(int(batch_nbytes))}. {fix}"
        )

    def _check_samples(self, plan: StreamPlan) -> None:
        n, batch, order = plan.n_samples, plan.batch, plan.sample_order
        if not plan.n_batches(n):
            window = f" with a window from {order.first:+d} to {order.last:+d}" if order.first or order.last else ""
            smaller, reach = "batch", ""
            if order.first < order.last:
                smaller, reach = "batch or window", f". Windows reach over gaps ({len(order.breaks)} here) with gaps='ignore', "
                reach += "and over ends of blocks with border='reread'"
            raise ConfigError(
                f"{order.n_steps} steps{window} have {n} samples, which make no batch of {batch}. Select more steps, or pass a "
                f"smaller {smaller}, or remainder='pad'{reach}"
            )
        if plan.sampling.remainder == "error" and n % batch:
            raise ConfigError(
                f"{n} samples are {n // batch} batches of {batch}, and {n % batch} are left, which remainder='error' forbids: "
                "pass remainder='drop' or 'pad', or a batch that divides them"
            )

    # --- arrays

    def _array(self, by_cut: Mapping[Any, Sequence[LeafRequest]]) -> tuple[StreamArray, int]:
        """The array that these leaves have in common, and bytes of staging memory for it."""
        leaves = [leaf for same in by_cut.values() for leaf in same]
        leaf = leaves[0]
        request, info, ranks = leaf.request, leaf.info, self._ranks
        source = source_layout_of(request.options, info, leaf.selection)
        axis, staging_nbytes = leaf.axis, staging_for(request, ranks, info, source)
        blocks = self._blocks(source, axis, staging_nbytes)
        readers = request.options.readers
        n_readers = readers if isinstance(readers, int) else {ROOT: 1, PARALLEL: ranks.n, AUTO: ranks.n}[readers]
        owners = Owners(min(n_readers, ranks.n))
        array = StreamArray(
            info=info,
            handle=leaf.handle,
            options=request.options,
            source=source,
            cuts=[
                BatchSchedule(blocks, axis, self._shards(each[0], source, axis), ranks.n, owners) for each in by_cut.values()
            ],
            offsets=tuple(sorted({step for same in leaves for step in same.offsets})),
            sum_of_values=leaf.sum_of_values,
            state=leaf.state,
        )
        return array, staging_nbytes

    def _shards(self, leaf: LeafRequest, source: SourceLayout, axis: int) -> Shards:
        """A batch without the axis of a window, cut into shards."""
        shape, sharding, name = source.selection.shape, leaf.request.sharding, f"a batch of {leaf.info}"
        rest = (*shape[:axis], *shape[axis + 1 :])
        if len(sharding.spec) > 1 + len(rest):
            axes = ", ".join([*leaf.leading, f"{len(rest)} of a step"])
            raise ConfigError(
                f"{spec_text(leaf.spec)} has {len(leaf.spec)} entries, but the axes of a batch of {leaf.info} are: {axes}"
            )
        n_parts = cuts_of(sharding, read_spec(sharding, 1 + len(rest)))[0]
        if self._batch % n_parts:
            raise ConfigError(
                f"batch is {self._batch}, but {spec_text(sharding.spec)} cuts the samples of a batch into {n_parts}: pass a "
                f"multiple of {n_parts}, such as batch={-(-self._batch // n_parts) * n_parts}"
            )
        return lay_out_shards(leaf.request, self._ranks, (self._batch, *rest), source.dtype, name)

    def _blocks(self, source: SourceLayout, axis: int, staging_nbytes: int) -> Grid:
        """The array cut into blocks: along the stream's axis a chunk long, along the others as long as staging allows."""
        chunks = source.chunks
        if not source.has_chunks:
            chunks = Grid(chunks.shape, tuple(1 if k == axis else n for k, n in enumerate(chunks.cell)), chunks.phase)
        column = chunks.cell[axis]
        first = Grid(
            tuple(min(n, column) if k == axis else n for k, n in enumerate(chunks.shape)),
            chunks.cell,
            tuple(0 if k == axis else phase for k, phase in enumerate(chunks.phase)),
        )
        most = max_block_nbytes(self._ranks, staging_nbytes)
        cell = plan_blocks(first, source.wide_itemsize, max_nbytes=most, n_owners=1).cell
        return Grid(chunks.shape, tuple(column if k == axis else n for k, n in enumerate(cell)), chunks.phase)

    def _check_lengths(self, arrays: Sequence[StreamArray]) -> None:
        if len({array.n_steps for array in arrays}) > 1:
            lengths = ", ".join(f"{array.info} has {array.n_steps:,}" for array in arrays)
            raise ConfigError(
                f"the arrays of a stream must have the same number of steps, but {lengths}. Pass select= to take the same of "
                "each, or, if they are parts of one array, pass shardload.concat(PATHS, along=AXIS) in the place of the path"
            )

    # --- the order

    def _order(self, arrays: Sequence[StreamArray]) -> tuple[SampleOrder, int]:
        """The order, and the pool from which it follows."""
        sampling = self._sampling
        first, last = min(array.offsets[0] for array in arrays), max(array.offsets[-1] for array in arrays)
        longest = max(arrays, key=lambda array: (array.chunk_steps, array.start))
        n_steps, chunk = longest.n_steps, longest.chunk_steps
        block = min(block_steps(chunk, first, last), max(1, -(-n_steps // chunk)) * chunk)
        # Not a sum over `arrays`: whether leaves are read together follows from their specs.
        stored = {(file_of(a.handle, a.info), a.info.dataset, a.source.selection): a.stored_step_nbytes for a in arrays}
        step_nbytes = sum(stored.values())
        block_nbytes = block * step_nbytes
        if isinstance(sampling.pool, int):
            pool = sampling.pool
        else:
            pool = max(_LEAST_POOL * block_nbytes, min(_MOST_POOL_NBYTES, n_steps * step_nbytes // _SHARE_OF_SELECTION))
        if sampling.shuffle is not None and pool < block_nbytes:
            raise ConfigError(
                f"pool is {format_nbytes(pool)}, less than a block of {block} steps, {format_nbytes(block_nbytes)} (a chunk "
                f"has {chunk} steps, and a window goes from {first:+d} to {last:+d}). Pass "
                f"pool={_LEAST_POOL * block_nbytes} for {_LEAST_POOL} blocks, or write shorter chunks "
                "(shardload copy --chunks)"
            )
        looks_at_gaps = first != last and sampling.gaps != IGNORE
        gaps = [gaps_in(array, sampling.gaps == "error") for array in (arrays if looks_at_gaps else ())]
        order = SampleOrder(
            n_steps=n_steps,
            first=first,
            last=last,
            block=block,
            phase=longest.start % block,
            seed=sampling.shuffle,
            spread=spread_in(pool // max(1, step_nbytes), block, chunk, n_steps),
            breaks=np.unique(np.concatenate([np.empty(0, dtype=np.int64), *gaps])),
            crosses_blocks=sampling.border == "reread" or sampling.shuffle is None,
        )
        return order, pool

    # --- leaves

    def _leaf(self, leaf: LeafRequest, arrays: Sequence[StreamArray], number: int, cut: int) -> Leaf:
        array, has_axis, sharding = arrays[number], WINDOW in leaf.leading, leaf.request.sharding
        batch, *rest = array.cuts[cut].shards.shape_global
        shape = (*[batch] * (SAMPLES in leaf.leading), *[len(leaf.offsets)] * has_axis, *rest)
        pad = leaf.request.options.pad
        if pad is not None and self._sampling.remainder == "pad":  # or the last batch of an epoch would be the first to say so
            pad_value(pad, array.source.dtype)
        return Leaf(
            array=number,
            cut=cut,
            places=tuple(array.offsets.index(step) for step in leaf.offsets),
            has_window_axis=has_axis,
            sharding=NamedSharding(sharding.mesh, leaf.spec, memory_kind=sharding.memory_kind),
            shape=shape,
            dtype=array.source.dtype,
            pad=pad,
            scale=None if leaf.scale is None else self._scale(leaf.scale, array, leaf.where.removeprefix("array ")),
        )

    def _stack(self, name: str, members: Sequence[int], leaves: Sequence[Leaf]) -> Stack:
        """One array of some leaves. ConfigError if they are not alike."""
        requests, stacked = [self._leaves[k] for k in members], [leaves[k] for k in members]
        first, spec = stacked[0], requests[0].spec
        has_axis = {name in leaf.info.dims for leaf in requests}
        if len(has_axis) > 1:
            without = next(leaf.info for leaf in requests if name not in leaf.info.dims)
            raise ConfigError(f"stack is {name!r}, an axis that some arrays have, but {without} has not: pass another name")
        n_before = len(first.shape) - len(requests[0].rest)  # axes of samples and window
        axis, is_new = n_before, not has_axis.pop()
        if not is_new:
            axes = requests[0].rest
            if requests[0].info.dims.index(name) not in axes:
                raise ConfigError(
                    f"stack is {name!r}, which is the axis of the stream or one that select drops: pass another axis"
                )
            axis += axes.index(requests[0].info.dims.index(name))
            if any(spec[axis : axis + 1]):
                raise ConfigError(f"stack is {name!r}, but {spec_text(spec)} cuts that axis: leave it whole, by None")
        # Not the lengths in a batch: with padding arrays of different lengths have the same.
        steps = [
            {each.info.dims[k] or k: each.selection.region.shape[k] for k in each.rest if each.info.dims[k] != name}
            for each in requests
        ]
        others = [(str(leaf.dtype), each.window, each.request.sharding) for each, leaf in zip(requests, stacked, strict=True)]
        for request, lengths, other in zip(requests, steps, others, strict=True):
            is_turned = lengths.keys() == steps[0].keys() and list(lengths) != list(steps[0])
            if is_turned or [*lengths.values()] != [*steps[0].values()] or other != others[0]:
                raise ConfigError(
                    f"stack is {name!r}, but {request.info} and {requests[0].info} are not alike: steps of {lengths} and "
                    f"{steps[0]} beside that axis; dtype, window and sharding {other} and {others[0]}. A tree stacks the "
                    f"arrays of each of its parts alone: stack={{'x': {name!r}, 'y': {name!r}}}"
                )
        sizes = [1 if is_new else leaf.shape[axis] for leaf in stacked]
        shape = (*first.shape[:axis], sum(sizes), *first.shape[axis + (not is_new) :])
        sharding = requests[0].request.sharding
        whole = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
        return Stack(tuple(members), axis, is_new, whole, shape)

    def _scale(self, scale: tuple[Any, Any], array: StreamArray, where: str) -> tuple[Any, Any]:
        """A scale with an axis for each axis of a step."""
        dtype, rest = array.source.dtype, array.schedule.rest.shape

        def fits(values: Array) -> bool:
            lengths = zip(values.shape[::-1], rest[::-1], strict=False)
            has_shape = values.ndim <= len(rest) and all(n in (1, length) for n, length in lengths)
            return has_shape and np.can_cast(values.dtype, dtype, "same_kind")

        if dtype.kind not in "fc" or not all(map(fits, scale)):
            given = " and ".join(f"{values.dtype} of shape {values.shape}" for values in scale)
            raise ConfigError(
                f"scale{where} is {given}, which does not fit a step of {array.info}: {dtype} of shape {rest}. Pass numbers or "
                "arrays that are as long as a step, or 1, along each axis; complex ones for complex values only; of integers "
                "dtype='float32', too, with decode=True if they are packed"
            )
        mean, deviation = (values.astype(dtype).reshape((1,) * (len(rest) - values.ndim) + values.shape) for values in scale)
        return mean, deviation


def find_gaps(values: Steps) -> IntArray:
    """The steps before which a coordinate has a gap: it goes on by more than 1.5 times the median, or back. There is one before
    and behind a missing value (NaN), too.

        time      0   6  12  18  48  54
                                ^ a gap: 30, where most differences are 6

    >>> find_gaps(np.array([0.0, 6, 12, 18, 48, 54])), find_gaps(np.array([3.0, 2, 1, 2]))
    (array([4]), array([3]))
    >>> find_gaps(np.array([0.0, 6, np.nan, 18, 24]))
    array([2, 3])
    """
    differences = np.diff(values)
    median = _median_of_known(differences)
    if not median or not np.isfinite(median):  # it counts nothing, or has one value
        return np.empty(0, dtype=np.int64)
    is_regular = (differences / median > 0) & (differences / median <= _LONGEST)
    return np.flatnonzero(~is_regular) + 1


def _median_of_known(differences: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The median without NaN; 0 if all are."""
    without_nan = differences[~np.isnan(differences)]
    return float(np.median(without_nan)) if len(without_nan) else 0.0


def coordinate_of(array: StreamArray) -> tuple[str, Mapping[str, Any], Steps] | None:
    """The name, attributes and values of the coordinate of an array's steps; None if it has none of numbers.

    ConfigError if it is so long that it was not read: it may have gaps.
    """
    selection, info = array.source.selection, array.info
    axis = selection.kept[array.schedule.axis]
    name = info.dims[axis]
    if name is None or name not in info.coords:
        return None
    values = info.coords[name].values
    if values is None and info.shape[axis] * 8 > COORDINATE_NBYTES:
        raise ConfigError(
            f"{name!r} of {info} has {info.shape[axis]:,} values; up to {COORDINATE_NBYTES // 8:,} are searched for gaps. Pass "
            "gaps='ignore' if it has none, or if they are no matter"
        )
    if values is None or values.shape != (info.shape[axis],) or values.dtype.kind not in "iuf":
        return None
    selected = values[selection.region.start[axis] : selection.region.stop[axis]]
    return name, info.coords[name].attrs, selected.astype(np.float64)


def check_same_steps(arrays: Sequence[StreamArray]) -> None:
    """ConfigError if the coordinates of arrays say that their steps are different ones: samples are paired by position."""
    if len(arrays) < 2:
        return
    coordinates = [(array.info, coordinate) for array in arrays if (coordinate := coordinate_of(array)) is not None]
    for info, (name, attrs, values) in coordinates[1:]:
        first_info, (_, first_attrs, first_values) = coordinates[0]
        k = _first_other_step(values, attrs, first_values, first_attrs)
        if k is not None:
            here, there = (
                next(iter(as_dates([step], step_attrs)), f"{step:.12g}")
                for step, step_attrs in ((values[k], attrs), (first_values[k], first_attrs))
            )
            raise ConfigError(
                f"step {k} of the selection is {name} {here} in {info}, and {there} in {first_info}; the arrays of a stream "
                "are paired by position. Pass select= to take the same steps of each, window= for steps that follow others "
                "(window={'y': 1}), or gaps='ignore' if they belong together as they are"
            )


def _first_other_step(
    values: Steps, attrs: Mapping[str, Any], first_values: Steps, first_attrs: Mapping[str, Any]
) -> int | None:
    """The first step at which two coordinates differ; None if none does, or they cannot be compared."""
    steps, compared = np.arange(len(values)), first_values
    if any(attrs.get(key) != first_attrs.get(key) for key in ("units", "calendar")):
        steps = steps[:: max(1, len(steps) - 1)]  # the ends: converting takes some 10 us each
        try:
            compared = in_other_units(first_values[steps], first_attrs, attrs)
        except ValueError:  # no times, or of different calendars
            return None
    step = abs(_median_of_known(np.diff(values))) if len(values) > 1 else math.inf
    # Numbers that were rounded to float32 are apart by 1e-7; but the next step of seconds since 1970 is no further away.
    tolerance = np.minimum(1e-7 * np.abs(compared), step / 4) + (_SAME_STEP * step if math.isfinite(step) else 0.0)
    with np.errstate(invalid="ignore"):  # differences of NaN, which count as equal
        is_same = np.abs(values[steps] - compared) <= tolerance
    differs = ~(is_same | (np.isnan(values[steps]) & np.isnan(compared)))
    return int(steps[differs][0]) if differs.any() else None


def gaps_in(array: StreamArray, is_error: bool) -> IntArray:
    """The gaps of an array's steps; none if they have no coordinate of numbers. ConfigError if gaps are forbidden."""
    coordinate = coordinate_of(array)
    if coordinate is None:
        return np.empty(0, dtype=np.int64)
    name, _, values = coordinate
    gaps = find_gaps(values)
    if is_error and len(gaps):
        k = int(gaps[0])
        more_text = f", and {len(gaps) - 1} more gaps" if len(gaps) > 1 else ""
        raise ConfigError(
            f"{name!r} of {array.info} has a gap between steps {k - 1} and {k} of the selection: it goes from "
            f"{values[k - 1]:.12g} to {values[k]:.12g}, and by {_median_of_known(np.diff(values)):.12g} from most steps to the "
            f"next{more_text}. "
            "Pass gaps='skip' to leave out the samples whose window reaches over one, or gaps='ignore' if that is no matter"
        )
    return gaps
