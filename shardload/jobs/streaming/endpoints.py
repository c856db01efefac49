"""What are the two ends of a stream?

A `StreamSource` keeps files open, and a `BatchTarget` makes batches of the steps that came.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from shardload.arrays.assemble import assemble
from shardload.engine.file_source import FileSource, OpenArray
from shardload.engine.session import Round
from shardload.errors import SourceError, StallError
from shardload.formats.contract.format import Source
from shardload.formats.lookup import open_source
from shardload.jobs.consistency import State, check_unchanged
from shardload.jobs.streaming.plan import EpochRounds, Leaf, RoundReadings, Stack, StreamArray, StreamPlan
from shardload.options import pad_value
from shardload.planning.batch_flow import BatchFlow
from shardload.planning.region import Region
from shardload.transfer.buffers import Piece
from shardload.transfer.counters import Counters
from shardload.transfer.missing import describe_missing, settle_missing
from shardload.transfer.moves import ArrayMove

Array = np.ndarray[Any, Any]


class StreamMove(ArrayMove):
    """What moves of one array in a round."""

    def __init__(self, array: int, of: StreamArray, flow: BatchFlow, epoch: EpochRounds, places: Sequence[int]) -> None:
        super().__init__(array, flow, of.source.dtype, str(of.info))
        self.of, self.batches, self.epoch, self.places = of, flow, epoch, places


def moves_of(plan: StreamPlan, epoch: EpochRounds, round_: RoundReadings) -> list[ArrayMove]:
    """What moves in a round."""
    moves: list[ArrayMove] = []
    for array, of in enumerate(plan.arrays):
        places = [k for number, k in round_.readings if number == array]
        if places:
            moves.append(StreamMove(array, of, epoch.flow(array, places), epoch, places))
    return moves


class StreamSource(FileSource):
    """The arrays of a stream on one rank. They are opened when this rank first reads them, and stay open.

    Attributes
    ----------
    n_decoded, nbytes_read : int
        Chunks that this rank has decoded, and bytes of values that it has read, since they were set to zero.
    """

    def __init__(self, plan: StreamPlan, rank: int) -> None:
        super().__init__(rank, plan.arrays[0].options.checksums)
        self._sources: dict[int, tuple[Source, State]] = {}
        self._plan = plan
        self.n_decoded = self.nbytes_read = 0
        self._missing: dict[int, Counters] = {}  # of this round, by array
        self._told: set[int] = set()

    def open(self, moves: Sequence[Any], opened: ExitStack) -> list[OpenArray]:
        """See `FileSource`."""
        opened.push(lambda kind, *_: self._count(moves) if kind is None else None)
        found = []
        for move in moves:
            reads = bool(move.batches.blocks_of(self._rank))
            source = self._source(move.array) if reads else None
            found.append(OpenArray(move.of.info, source, move.of.source, move.batches, move.of.decoding))
        return found

    def _count(self, moves: Sequence[StreamMove]) -> None:
        for move in moves:
            if move.producer is not None:
                counters = move.producer.counters
                self.n_decoded += counters.chunks_decoded
                self.nbytes_read += counters.nbytes_read
                if counters.missing:
                    self._missing[move.array] = counters

    def _source(self, number: int) -> Source:
        if number not in self._sources:
            of = self._plan.arrays[number]
            source = open_source(of.handle, of.info.dataset, of.options.access, of.info)
            here = source.info
            if (here.shape, here.dtype, here.chunks) != (of.info.shape, of.info.dtype, of.info.chunks):
                source.close()
                raise SourceError(
                    f"{here} has shape {here.shape}, {here.dtype}, chunks {here.chunks} here, but the stream was planned for "
                    f"{of.info.shape}, {of.info.dtype}, {of.info.chunks}: the file has changed, or this rank sees another file",
                    path=of.info.path,
                    dataset=of.info.dataset,
                )
            self._sources[number] = source, source.opened_in()
        return self._sources[number][0]

    def check(self) -> None:
        """Raise SourceError if a file has changed since it was opened, or if chunks are missing and `missing` forbids it."""
        missing, self._missing = self._missing, {}
        for number, counters in missing.items():
            of = self._plan.arrays[number]
            if number not in self._told or of.options.missing == "error":
                self._told.add(number)
                found = counters.chunks_missing, counters.missing
                text = describe_missing(*found, of.info, of.source.selection, of.source.chunks)
                settle_missing(text, of.options.missing, 0, of.info)
        for number, (source, before) in self._sources.items():
            info = self._plan.arrays[number].info
            check_unchanged(str(info), before, source.state(), info.path, info.dataset)

    def close(self, kind: type[BaseException] | None = None) -> None:
        """Close what is open, but not after a stall: a thread may hang in a read."""
        if kind is None or not issubclass(kind, StallError):
            for source, _ in self._sources.values():
                source.close()
        self._sources.clear()


class Steps:
    """Steps of a shard that one reading has brought."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self._runs: list[Array] = []  # with the steps as their first axis

    def add(self, start: int, run: Array) -> None:
        """Add the run that begins at a step; runs ascend."""
        self.starts.append(start)
        self._runs.append(run)

    def at(self, step: int) -> Array:
        """The values of a step."""
        k = bisect_right(self.starts, step) - 1
        values: Array = self._runs[k][step - self.starts[k]]
        return values

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
        self._steps: dict[tuple[EpochRounds, int, int, int], Steps] = {}
        self._ends: dict[tuple[EpochRounds, int], list[tuple[tuple[EpochRounds, int, int, int], int]]] = {}

    def make_room(self, moves: Sequence[ArrayMove]) -> None:
        """See `TargetEndpoint`."""
        for move in moves:
            targets = {number: move.flow.target(number) for number in move.flow.targets(self._rank)}
            move.targets = {
                number: Piece(region, np.empty(region.shape, dtype=move.dtype))
                for number, region in targets.items()
                if region is not None
            }

    def take(self, round_: Round) -> None:
        """See `TargetEndpoint`. The ranks have agreed that all has come."""
        for move in round_.moves:
            self._keep(move)

    def _keep(self, move: Any) -> None:
        flow, axis = move.batches, move.of.schedule.axis
        for shard in flow.schedule.shards.shards_of(self._rank):
            if flow.schedule.held(shard) is None:
                continue
            runs = flow.runs[flow.schedule.part_of_batch(shard)]
            for k, (place, start, last) in enumerate(
                zip(runs.column.tolist(), runs.start.tolist(), runs.last.tolist(), strict=True)
            ):
                key = move.epoch, move.array, move.places[place], shard
                piece = move.targets[flow.number(shard, k)]
                self._steps.setdefault(key, Steps()).add(start, np.moveaxis(piece.data, axis, 0))
                self._ends.setdefault((move.epoch, last // self._plan.batch), []).append((key, start))
        move.targets = {}

    def batch(self, epoch: EpochRounds, number: int) -> list[jax.Array]:
        """Make the arrays of a batch, and let go of the steps that no later batch needs. Collective: no.

        There is one for each leaf; leaves of a stack have the same.
        """
        stacked: dict[int, jax.Array] = {}
        for stack in self._plan.stacks:
            stacked |= dict.fromkeys(stack.leaves, self._stack(stack, epoch, number))
        made = [
            stacked[k] if k in stacked else assemble(leaf.shape, leaf.sharding, leaf.dtype, self._pieces(leaf, epoch, number))
            for k, leaf in enumerate(self._plan.leaves)
        ]
        for key, start in self._ends.pop((epoch, number), ()):
            steps = self._steps[key]
            steps.drop(start)
            if not steps.starts:
                del self._steps[key]
        return made

    def _stack(self, stack: Stack, epoch: EpochRounds, number: int) -> jax.Array:
        leaves = [self._plan.leaves[k] for k in stack.leaves]
        pieces = []
        for same in zip(*(self._pieces(leaf, epoch, number) for leaf in leaves), strict=True):  # one shard of each leaf
            join = np.stack if stack.is_new else np.concatenate
            data = join([data for _, data in same], axis=stack.axis)
            bounds = list(zip(same[0][0].start, same[0][0].stop, strict=True))
            bounds[stack.axis : stack.axis + (not stack.is_new)] = [(0, stack.shape[stack.axis])]
            pieces.append((Region(*zip(*bounds, strict=True)), data))
        return assemble(stack.shape, stack.sharding, leaves[0].dtype, pieces)

    def _pieces(self, leaf: Leaf, epoch: EpochRounds, number: int) -> list[tuple[Region, Array]]:
        """What this rank's devices have of a leaf."""
        plan, of = self._plan, self._plan.arrays[leaf.array]
        schedule, readings = of.schedule, epoch.readings[leaf.array]
        first = number * plan.batch
        anchors = epoch.anchors[first : first + plan.batch].tolist()
        pieces = []
        for shard in schedule.shards.shards_of(self._rank):
            region = schedule.shards.region(shard)
            samples, rest = range(region.start[0], region.stop[0]), region.shape[1:]
            out = np.empty((len(samples), len(leaf.places), *rest), dtype=of.source.dtype)
            held = schedule.held(shard)
            if held is None or held.shape != rest or samples.stop > len(anchors):
                out[...] = pad_value(0 if of.options.pad is None else of.options.pad, of.source.dtype)
            inside = () if held is None else tuple(slice(n) for n in held.shape)
            for slot in samples if held is not None else ():
                if slot >= len(anchors):
                    break
                of_sample = readings.of_use[first + slot].tolist()
                for k, place in enumerate(leaf.places):
                    steps = self._steps[epoch, leaf.array, of_sample[place], shard]
                    index: tuple[int | slice, ...] = (slot - samples.start, k, *inside)
                    out[index] = steps.at(anchors[slot] + of.offsets[place])
            if leaf.scale is not None and held is not None:
                real: tuple[slice, ...] = (slice(max(0, len(anchors) - samples.start)), slice(None), *inside)
                self._scale(out[real], leaf, held)  # not the padding
            pieces.append(self._piece(leaf, region, out))
        return pieces

    def _scale(self, out: Array, leaf: Leaf, held: Region) -> None:
        def of_shard(values: Array) -> Array:
            bounds = zip(held.start, held.stop, values.shape, strict=True)
            part: Array = values[tuple(slice(a, b) if n > 1 else slice(None) for a, b, n in bounds)]
            return part

        mean, deviation = map(of_shard, leaf.scale or ())
        np.subtract(out, mean, out=out)
        np.divide(out, deviation, out=out)

    def _piece(self, leaf: Leaf, region: Region, out: Array) -> tuple[Region, Array]:
        start, stop = list(region.start), list(region.stop)
        data = out
        if leaf.has_window_axis:
            start.insert(1, 0)
            stop.insert(1, len(leaf.places))
        else:
            data = data[:, 0]
        if not self._plan.has_batch_axis:
            data, start, stop = data[0], start[1:], stop[1:]
        return Region(tuple(start), tuple(stop)), data
