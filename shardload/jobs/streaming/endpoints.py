"""What are the two ends of a stream?

A `StreamSource` keeps files open, and a `BatchTarget` makes batches of the steps that came. A step that has one place, in a
batch that comes soon, is read straight into it (`StreamPlan.in_place`); others wait in `Steps`, from which they are copied.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from shardload.arrays.assemble import assemble
from shardload.engine.file_source import FileMove, FileSource
from shardload.engine.session import Round
from shardload.formats.contract.format import Source
from shardload.jobs.consistency import SINCE_STREAM, ArrayToRead, KeptSources
from shardload.jobs.streaming.plan import EpochRounds, Leaf, Stack, StreamArray, StreamPlan
from shardload.options import pad_value
from shardload.planning.batch_flow import BatchFlow, CutFlow
from shardload.planning.region import Region
from shardload.planning.schedule import Block
from shardload.planning.tuning import default_tuning
from shardload.transfer.buffers import Piece, aligned_empty
from shardload.transfer.counters import Counters, describe_missing, settle_missing

Array = np.ndarray[Any, Any]
_INLINE_NBYTES = 1 << 20  # of a block: decoded while other ranks wait for an answer, a millisecond or two
_Key = tuple[EpochRounds, int, int, int, int]  # epoch, and the numbers of array, reading, cut and shard


class StreamMove(FileMove):
    """What moves of one array in a round; `later` is what moves of it in the next ones."""

    def __init__(
        self, array: int, stream_array: StreamArray, flows: Sequence[CutFlow], epoch: EpochRounds, places: range
    ) -> None:
        info, source = stream_array.info, stream_array.source
        super().__init__(array, BatchFlow(flows), source.dtype, str(info), info=info, layout=source)
        self.stream_array, self.flows, self.epoch, self.places = stream_array, flows, epoch, places
        self.later, self.is_expected = list[StreamMove](), False


class StreamSource(FileSource):
    """The arrays of a stream on one rank. They are opened when this rank first reads them, and stay open.

    Attributes
    ----------
    n_decoded, nbytes_read : int
        Chunks that this rank has decoded, and bytes of values that it has read, since they were set to zero.
    kept : KeptSources
        The open arrays.
    """

    def __init__(self, plan: StreamPlan, rank: int) -> None:
        tuning = default_tuning()
        if plan.staging.n_threads == 1:  # a thread more would only take the core away from this one
            tuning = replace(tuning, inline_nbytes=max(tuning.inline_nbytes, _INLINE_NBYTES))
        super().__init__(rank, plan.arrays[0].options.checksums, tuning)
        self._plan = plan
        arrays = [ArrayToRead(array.handle, array.info, array.options.access, array.state) for array in plan.arrays]
        self.kept = KeptSources(arrays, SINCE_STREAM)
        self.n_decoded = self.nbytes_read = 0
        self._incomplete: set[int] = set()  # arrays of which a warning has said that chunks are missing

    def open(self, moves: Sequence[StreamMove], opened: ExitStack) -> list[Source | None]:
        """See `FileSource`."""
        reads = (any(each_move.flow.blocks_of(self._rank) for each_move in (move, *move.later)) for move in moves)
        return [self.kept.open(move.array) if is_read else None for move, is_read in zip(moves, reads, strict=True)]

    def coming(self, move: StreamMove) -> Iterable[Block]:
        """See `FileSource`: of later rounds, too, which are fetched while this one is decoded."""
        for each_move in (move, *move.later):
            if not each_move.is_expected:
                each_move.is_expected = True
                yield from each_move.flow.outgoing(self._rank)

    def check(self, moves: Sequence[Any]) -> None:
        """Count what a round has read. Raise SourceError if a file has changed since it was opened, or if chunks that the round
        has read are missing, and `missing` forbids it. Those of a round that is only begun do not count yet.
        """
        for move in moves:
            counters, array = Counters() if move.producer is None else move.producer.counters, move.stream_array
            self.n_decoded += counters.chunks_decoded
            self.nbytes_read += counters.nbytes_read
            if counters.chunks_missing and (move.array not in self._incomplete or array.options.missing == "error"):
                self._incomplete.add(move.array)
                missing = counters.chunks_missing, counters.first_missing
                text = describe_missing(*missing, array.info, array.source.selection, array.source.chunks)
                settle_missing(text, array.options.missing, 0, array.info)
        self.kept.check_unchanged()


class Steps:
    """Steps of a shard that one reading has brought."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._runs: list[Array] = []  # with the steps as their first axis

    def add(self, start: int, run: Array) -> None:
        """Add the run that begins at a step; runs ascend."""
        self.starts.append(start)
        self._runs.append(run)

    def copy(self, step: int, out: Array) -> None:
        """Copy as many steps as `out` has along its first axis, from `step` on."""
        n = 0
        while n < len(out):
            k = bisect_right(self.starts, step + n) - 1
            values = self._runs[k][step + n - self.starts[k] :][: len(out) - n]
            if not len(values):
                raise IndexError(f"step {step + n} was not read: a defect in shardload")
            out[n : n + len(values)] = values
            n += len(values)

    def drop(self, start: int) -> None:
        """Let go of the run that begins at a step."""
        k = bisect_right(self.starts, start) - 1
        del self.starts[k], self._runs[k]


class BatchTarget:
    """The `TargetEndpoint` of a stream: memory for steps, and the batches that are made of it.

    Parameters
    ----------
    plan : StreamPlan
        What a batch has.
    rank : int
        This rank.
    """

    def __init__(self, plan: StreamPlan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self._shards = [_shards_of(plan, leaf, rank) for leaf in plan.leaves]
        self._pieces: dict[tuple[EpochRounds, int, int, int], Array] = {}  # by epoch, batch, leaf and shard: read in place
        self._steps: dict[_Key, Steps] = {}
        self._ends: dict[tuple[EpochRounds, int], list[tuple[_Key, int]]] = {}

    def make_room(self, moves: Sequence[Any]) -> None:
        """See `TargetEndpoint`."""
        for move in moves:
            move.targets = {}
            for flow in move.flows:
                for shard, run in flow.runs_held_by(self._rank):
                    number = flow.number(shard, run)
                    region = flow.target(number)
                    if region is not None:
                        move.targets[number] = Piece(region, self._room(move, flow, shard, run, region.shape))

    def _room(self, move: Any, flow: CutFlow, shard_number: int, run: int, shape: tuple[int, ...]) -> Array:
        """Memory for a run of steps of a shard."""
        leaf = self._plan.in_place.get((move.array, flow.cut))
        if leaf is None:
            return np.empty(shape, dtype=move.dtype)
        n, last = shape[move.stream_array.schedule.axis], int(flow.runs.last[run])
        batch, slot = divmod(last + 1 - n, self._plan.batch)
        shard, key = self._shards[leaf][shard_number], (move.epoch, batch, leaf, shard_number)
        if key not in self._pieces:
            self._pieces[key] = self._new_piece(leaf, shard, move.epoch, batch)
        samples = self._pieces[key][slot - shard.first : slot - shard.first + n, 0]
        return np.moveaxis(samples[(slice(None), *shard.inside)], 0, move.stream_array.schedule.axis)

    def take(self, round_: Round) -> None:
        """See `TargetEndpoint`. The ranks have agreed that all has come."""
        moves: Sequence[Any] = round_.moves
        for move in moves:
            for flow in move.flows:
                if (move.array, flow.cut) not in self._plan.in_place:
                    self._keep(move, flow)
            move.targets = {}

    def _keep(self, move: Any, flow: CutFlow) -> None:
        """Keep the steps of a cut until batches need them."""
        axis, runs = move.stream_array.schedule.axis, flow.runs
        places, ends = runs.column.tolist(), (runs.last // self._plan.batch).tolist()
        for shard, run in flow.runs_held_by(self._rank):
            key, start = (move.epoch, move.array, move.places[places[run]], flow.cut, shard), runs.steps[run][0]
            piece = move.targets[flow.number(shard, run)]
            self._steps.setdefault(key, Steps()).add(start, np.moveaxis(piece.data, axis, 0))
            self._ends.setdefault((move.epoch, ends[run]), []).append((key, start))

    def batch(self, epoch: EpochRounds, number: int) -> list[jax.Array]:
        """Make the arrays of a batch, and let go of the steps that no later batch needs. Collective: no.

        There is one for each leaf; leaves of a stack have the same.
        """
        plan, arrays = self._plan, dict[int, jax.Array]()
        for stack in plan.stacks:
            pieces = self._pieces_of_stack(stack, epoch, number)
            stacked = assemble(stack.shape, stack.sharding, plan.leaves[stack.leaves[0]].dtype, pieces)
            arrays |= dict.fromkeys(stack.leaves, stacked)
        for k, leaf in enumerate(plan.leaves):
            if k not in arrays:
                arrays[k] = assemble(leaf.shape, leaf.sharding, leaf.dtype, self._pieces_of(k, epoch, number))
        for key, start in self._ends.pop((epoch, number), ()):
            steps = self._steps[key]
            steps.drop(start)
            if not steps.starts:
                del self._steps[key]
        return [arrays[k] for k in range(len(plan.leaves))]

    def _pieces_of_stack(self, stack: Stack, epoch: EpochRounds, number: int) -> Iterator[tuple[Region, Array]]:
        """The pieces of a stack that this rank's devices hold."""
        join: Any = np.stack if stack.is_new else np.concatenate
        for pieces in zip(*(self._pieces_of(k, epoch, number) for k in stack.leaves), strict=True):  # one shard of each leaf
            bounds = list(zip(pieces[0][0].start, pieces[0][0].stop, strict=True))
            bounds[stack.axis : stack.axis + (not stack.is_new)] = [(0, stack.shape[stack.axis])]
            start, stop = zip(*bounds, strict=True)
            region = Region(start, stop)
            out = aligned_empty(region.shape, pieces[0][1].dtype)
            yield region, join([data for _, data in pieces], axis=stack.axis, out=out)

    def _pieces_of(self, leaf_number: int, epoch: EpochRounds, number: int) -> Iterator[tuple[Region, Array]]:
        """The pieces of a leaf that this rank's devices hold."""
        plan, leaf = self._plan, self._plan.leaves[leaf_number]
        array = plan.arrays[leaf.array]
        samples = slice(number * plan.batch, (number + 1) * plan.batch)
        anchors, reading_of = epoch.anchors[samples], epoch.readings[leaf.array].of_use[samples]
        for shard in self._shards[leaf_number].values():
            in_place = self._pieces.pop((epoch, number, leaf_number, shard.number), None)
            out = self._new_piece(leaf_number, shard, epoch, number) if in_place is None else in_place
            slots = shard.slots(len(anchors))
            n = slots.stop - slots.start
            if shard.held is not None and n:
                real = out[(slice(n), slice(None), *shard.inside)]
                for k, place in enumerate(leaf.places if in_place is None else ()):
                    steps, readings = anchors[slots] + array.offsets[place], reading_of[slots, place]
                    for i, j in _neighbours(steps, readings):
                        key = epoch, leaf.array, int(readings[i]), leaf.cut, shard.number
                        self._steps[key].copy(int(steps[i]), real[i:j, k])
                if shard.scale is not None:
                    np.subtract(real, shard.scale[0], out=real)
                    np.divide(real, shard.scale[1], out=real)
            yield shard.region, out.reshape(shard.region.shape)

    def _new_piece(self, leaf_number: int, shard: _LeafShard, epoch: EpochRounds, number: int) -> Array:
        """Memory for a shard of a batch, padded where there is no sample or no element."""
        leaf, slots = self._plan.leaves[leaf_number], shard.slots(len(epoch.anchors) - number * self._plan.batch)
        out = aligned_empty(shard.shape, leaf.dtype)
        if shard.held is None or shard.held.shape != shard.shape[2:] or slots.stop - slots.start < shard.shape[0]:
            out[...] = pad_value(0 if leaf.pad is None else leaf.pad, leaf.dtype)
        return out


@dataclass(frozen=True)
class _LeafShard:
    """What is the same in all batches of a shard of a leaf.

    Attributes
    ----------
    number : int
        Of the shard.
    region : Region
        In the array of the leaf.
    first : int
        Its first slot.
    shape : tuple of int
        Samples, steps of the window, and the other axes.
    held : Region or None
        What it has of the other axes of the array, without padding.
    scale : tuple of ndarray or None
        The leaf's, for these values.
    """

    number: int
    region: Region
    first: int
    shape: tuple[int, ...]
    held: Region | None
    scale: tuple[Array, Array] | None

    def slots(self, n_samples: int) -> slice:
        """The slots of the shard that a batch of `n_samples` fills."""
        return slice(min(self.first, n_samples), min(self.first + self.shape[0], n_samples))

    @property
    def inside(self) -> tuple[slice, ...]:
        """Where the elements of the array are along the other axes: padding lies behind them."""
        return () if self.held is None else tuple(slice(n) for n in self.held.shape)


def _shards_of(plan: StreamPlan, leaf: Leaf, rank: int) -> dict[int, _LeafShard]:
    schedule, shards_of_rank = plan.arrays[leaf.array].cuts[leaf.cut], dict[int, _LeafShard]()
    for number in schedule.shards.shards_of(rank):
        of_samples, held = schedule.shards.region(number), schedule.held(number)
        start, stop = list(of_samples.start), list(of_samples.stop)
        if leaf.has_window_axis:
            start.insert(1, 0)
            stop.insert(1, len(leaf.places))
        first = len(start) - len(leaf.shape)  # without a batch: behind the axis of the samples
        region = Region(tuple(start[first:]), tuple(stop[first:]))
        shape = (of_samples.shape[0], len(leaf.places), *of_samples.shape[1:])
        scale = None if held is None or leaf.scale is None else (_part(leaf.scale[0], held), _part(leaf.scale[1], held))
        shards_of_rank[number] = _LeafShard(number, region, of_samples.start[0], shape, held, scale)
    return shards_of_rank


def _part(values: Array, held: Region) -> Array:
    """The part of a mean or deviation that belongs to a region; axes of one element count for all."""
    bounds = zip(held.start, held.stop, values.shape, strict=True)
    part: Array = values[tuple(slice(a, b) if n > 1 else slice(None) for a, b, n in bounds)]
    return part


def _neighbours(steps: Array, readings: Array) -> Iterator[tuple[int, int]]:
    """The slices of slots whose steps follow each other in one reading: each is copied at once."""
    ends = np.flatnonzero((np.diff(steps) != 1) | (np.diff(readings) != 0)) + 1
    return pairwise([0, *ends.tolist(), len(steps)])
