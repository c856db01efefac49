"""What will a stream read, in which order, and in which rounds? Frozen facts, the same on every rank.

An epoch is planned when it begins, because all of its samples are known then (`Readings`). Readings that follow each other are
put into one round until the round is worth its two agreements and every reader has a block. The first one has no more than the
first batch needs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from shardload.arrays.sharding import spec_text
from shardload.formats.concatenation import Concatenation
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.lookup import split_path
from shardload.jobs.consistency import State
from shardload.options import OPTIONS, Options
from shardload.planning.batch_flow import BatchSchedule, CutFlow, Runs, share_blocks
from shardload.planning.sample_order import ORDER_VERSION, Readings, SampleOrder
from shardload.planning.schedule import Schedule, SourceLayout
from shardload.planning.shards import Shards
from shardload.planning.staging import Staging, plan_staging
from shardload.storage.remote import MOST_AHEAD_NBYTES, is_remote
from shardload.units import PrintedReport, counted, format_nbytes

Array = np.ndarray[Any, Any]

_ROUND_NBYTES = 8 << 20  # of each reader: less is not worth two agreements
# Of each reader: small ones take up to half a millisecond each, and the first batch waits for a whole round.
_ROUND_BLOCKS = 256
_USE_NBYTES = 130  # measured, at most: what the order of an epoch takes for each step of each sample
_RUN_NBYTES = 1 << 18  # of a piece that holds steps of a shuffled stream: all are let go together


def file_of(handle: Any, info: ArrayInfo) -> str:
    """Which file an array is in. `ArrayInfo.path` of a URL lacks the query, by which two files may differ."""
    return split_path(handle)[0] if is_remote(handle) else info.path


OF_LEAVES = ("window", "scale")  # options that each array of a batch has for itself


@dataclass(frozen=True)
class Sampling:
    """The options of a stream that no load has, without `OF_LEAVES`. `shardload.stream` says what they mean."""

    along: str | int
    batch: int | None
    shuffle: int | None
    epochs: int | None
    remainder: str
    border: str
    gaps: str
    pool: int | str
    prefetch: int

    @classmethod
    def check(cls, keywords: Mapping[str, Any]) -> Sampling:
        """Check the options. ConfigError names the one that is wrong."""
        return cls(**{field.name: OPTIONS[field.name].check(keywords[field.name]) for field in fields(cls)})


@dataclass(frozen=True, eq=False)
class StreamArray:
    """An array of a file that a stream reads once for all leaves that name it.

    Attributes
    ----------
    info : ArrayInfo
        Its metadata.
    handle : object
        The path or object that opens it.
    options : Options
        What was asked of it.
    source : SourceLayout
        How the selected elements lie in the file, and how stored numbers become values.
    cuts : sequence of BatchSchedule
        The columns cut into blocks, and the batch into shards: in each way in which leaves ask for it.
    offsets : tuple of int
        The steps that samples have of it, from the anchor.
    sum_of_values : int or None
        A checksum of some values, which tells its file from others; None if they could not be read.
    state : State
        That of its file when the stream was made: each rank that opens it later must find the same one.
    """

    info: ArrayInfo
    handle: Any
    options: Options
    source: SourceLayout
    cuts: Sequence[BatchSchedule]
    offsets: tuple[int, ...]
    sum_of_values: int | None
    state: State

    @property
    def schedule(self) -> BatchSchedule:
        """For the blocks, which are the same in all cuts."""
        return self.cuts[0]

    @property
    def chunk_steps(self) -> int:
        """Steps of a column."""
        return self.schedule.blocks.cell[self.schedule.axis]

    @property
    def start(self) -> int:
        """The first selected step, counted in the file; 0 if that has no chunks."""
        return self.source.selection.offset[self.schedule.axis] if self.source.has_chunks else 0

    @property
    def n_steps(self) -> int:
        """Steps of the selection."""
        return self.schedule.blocks.shape[self.schedule.axis]

    @cached_property
    def step_nbytes(self) -> int:
        """Bytes of one step of all of the array, as it is held."""
        return math.prod(self.schedule.rest.shape) * self.source.dtype.itemsize

    @cached_property
    def stored_step_nbytes(self) -> int:
        """Bytes of one step of all of the array in the file's dtype."""
        return math.prod(self.schedule.rest.shape) * self.source.file_dtype.itemsize


@dataclass(frozen=True, eq=False)
class Leaf:
    """An array of a batch.

    Attributes
    ----------
    array, cut : int
        The number of the `StreamArray` that it has values of, and of the one of its cuts.
    places : tuple of int
        Which of that array's offsets it has.
    has_window_axis : bool
        Whether it has an axis for them, behind that of the samples.
    sharding : NamedSharding
        Of the jax.Array.
    shape : tuple of int
        Of the jax.Array.
    dtype : dtype
        Of the jax.Array.
    pad : object
        What is where no sample or no element is.
    scale : tuple of ndarray or None
        What is subtracted, and by what the rest is divided; each fits the axes behind those of samples and window.
    """

    array: int
    cut: int
    places: tuple[int, ...]
    has_window_axis: bool
    sharding: NamedSharding
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pad: Any
    scale: tuple[Array, Array] | None


@dataclass(frozen=True, eq=False)
class Stack:
    """Leaves that are one array of a batch.

    Attributes
    ----------
    leaves : tuple of int
        Their numbers, in order.
    axis : int
        The axis of the jax.Array along which they lie.
    is_new : bool
        Whether they have no such axis themselves.
    sharding : NamedSharding
        Of the jax.Array.
    shape : tuple of int
        Of the jax.Array.
    """

    leaves: tuple[int, ...]
    axis: int
    is_new: bool
    sharding: NamedSharding
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class StreamPlan(PrintedReport):
    """What a stream will do: inspect it, print it.

    Attributes
    ----------
    arrays : sequence of StreamArray
        What is read.
    leaves : sequence of Leaf
        What a batch has.
    sample_order : SampleOrder
        In which order.
    sampling : Sampling
        The options of the stream.
    pool_nbytes : int
        Bytes from which the order was made, of the whole job.
    n_ranks, n_threads : int
        Ranks of the job, and cores of each.
    staging_nbytes : int
        Cap on the buffers through which blocks go, of each rank.
    names : tuple of str
        The place of each leaf in the tree, for people.
    stacks : tuple of Stack
        Leaves that are one array of a batch.
    """

    arrays: Sequence[StreamArray]
    leaves: Sequence[Leaf]
    sample_order: SampleOrder
    sampling: Sampling
    pool_nbytes: int
    n_ranks: int
    n_threads: int
    staging_nbytes: int
    names: tuple[str, ...]
    stacks: tuple[Stack, ...]

    @property
    def batch(self) -> int:
        """Samples of a batch."""
        return self.sampling.batch or 1

    @property
    def n_samples(self) -> int:
        """Samples of an epoch."""
        return len(self.sample_order.anchors)

    def n_batches(self, n_samples: int) -> int:
        """The batches of so many samples."""
        return -(-n_samples // self.batch) if self.sampling.remainder == "pad" else n_samples // self.batch

    @cached_property
    def in_place(self) -> dict[tuple[int, int], int]:
        """By array and cut: the leaf into whose batches steps are read at once, without a copy in between.

        Each step then has one place, in a batch that comes soon: steps of long chunks that are shuffled wait for batches that
        are far apart, which would all be in memory.
        """
        leaves_of_cut: dict[tuple[int, int], list[int]] = {}
        for number, leaf in enumerate(self.leaves):
            array = self.arrays[leaf.array]
            comes_soon = self.sample_order.seed is None or array.chunk_steps == 1
            if comes_soon and len(array.offsets) == 1:
                leaves_of_cut.setdefault((leaf.array, leaf.cut), []).append(number)
        return {cut: leaves[0] for cut, leaves in leaves_of_cut.items() if len(leaves) == 1}

    @cached_property
    def horizon(self) -> int:
        """Batches that a step waits in memory at most between two samples."""
        return self.sample_order.horizon(self.batch, max(array.chunk_steps for array in self.arrays))

    @cached_property
    def staging(self) -> Staging:
        """The buffers of each rank: no more than the blocks that it reads in a round."""
        needs = []
        for array in self.arrays:  # the same blocks as those of a load that nothing cuts
            blocks, owners, shape = array.schedule.blocks, array.schedule.owners, array.schedule.blocks.shape
            whole = Shards(shape, (1,) * len(shape), np.zeros((1, 1), dtype=np.int64))
            needs.append((Schedule(blocks, whole, array.source.dtype.itemsize, self.n_ranks, owners), array.source))
        staging = plan_staging(needs, self.staging_nbytes, self.n_threads)
        block_nbytes = min(schedule.max_block_size * schedule.itemsize for schedule, _ in needs)
        return replace(staging, n_slots=min(staging.n_slots, 1 + -(-_ROUND_NBYTES // max(1, block_nbytes))))

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What an order follows from, for a state that is used again: nothing of ranks or meshes."""
        order, infos = self.sample_order, [array.info for array in self.arrays]
        offsets: dict[str, set[int]] = {}  # not those of a `StreamArray`: which leaves share one follows from their specs
        for array in self.arrays:
            offsets.setdefault(array.info.dataset, set()).update(array.offsets)
        pool = "all steps" if order.spread >= order.n_blocks else f"mixes {order.spread} blocks of {order.block} steps"
        files = sorted({array.handle.fingerprint for array in self.arrays if isinstance(array.handle, Concatenation)})
        return {
            **({"files": files} if files else {}),
            "order": ORDER_VERSION,
            "n_steps": order.n_steps,
            "window": {name: sorted(steps) for name, steps in sorted(offsets.items())},
            "phase": order.phase,
            "seed": order.seed,
            "pool": None if order.seed is None else pool,
            "samples": f"{self.n_samples}, CRC {zlib.crc32(order.anchors.tobytes()):08x}",
            "arrays": sorted({f"{info.dataset} {info.dtype} {info.shape} in chunks {info.chunks}" for info in infos}),
            "values": sorted({f"{a.info.dataset} checksum {a.sum_of_values or 0:08x}" for a in self.arrays}),
            "selections": sorted({str(array.source.selection.region) for array in self.arrays}),
        }

    @cached_property
    def cost(self) -> tuple[float, int, int]:
        """Of epoch 0: how often each chunk is decoded, the rounds, and the most bytes of steps that all ranks hold."""
        epoch = EpochRounds(self, 0, 0)
        n_columns = sum(array.schedule.blocks.counts[array.schedule.axis] for array in self.arrays)
        rounds = epoch.rounds()
        return sum(map(len, epoch.readings)) / max(1, n_columns), len(rounds), epoch.most_held_nbytes(rounds)

    def __str__(self) -> str:
        """Text for a person."""
        order = self.sample_order
        lines = [repr(self)]
        for name, leaf in zip(self.names, self.leaves, strict=True):
            array = self.arrays[leaf.array]
            steps = ", ".join(f"{array.offsets[k]:+d}" if array.offsets[k] else "0" for k in leaf.places)
            window = "" if steps == "0" else f", window {steps}"
            lines.append(f"  batch{name}: {leaf.dtype} {list(leaf.shape)}, {spec_text(leaf.sharding.spec)}{window}")
        for stack in self.stacks:
            names = ", ".join(self.names[k] for k in stack.leaves)
            lines.append(f"  {names} as one: {list(stack.shape)}, {spec_text(stack.sharding.spec)}")
        n = self.n_batches(self.n_samples)
        endless = "without end" if self.sampling.epochs is None else counted(self.sampling.epochs, "epoch")
        lines.append(f"  {self.n_samples:,} samples, {n:,} batches of {self.batch} an epoch, {endless}")
        if order.seed is None:
            lines.append("  order: ascending")
        elif order.spread >= order.n_blocks:
            lines.append(f"  order: all samples shuffled (seed {order.seed})")
        else:
            lines.append(
                f"  order: {order.n_blocks:,} shuffled blocks of {order.block:,} steps, samples of {order.spread + 1} of them "
                f"mixed (seed {order.seed}, pool {format_nbytes(self.pool_nbytes)})"
            )
            chunk = max(array.chunk_steps for array in self.arrays)
            n_steps = (order.spread + 1) * (order.block + 2 * chunk * (order.last > order.first))
            lines.append(f"  going on from a state: reads at most {min(1, n_steps / order.n_steps):.0%} of the steps first")
        n_times, n_rounds, held_nbytes = self.cost
        lines.append(f"  chunks decoded in epoch 0: {n_times:.2f} times each, in {counted(n_rounds, 'round')}")
        in_store = any(array.info.is_in_store for array in self.arrays)
        ahead = f", {format_nbytes(MOST_AHEAD_NBYTES)} fetched ahead" if in_store else ""
        lines.append(
            f"  memory of the job: {format_nbytes(held_nbytes)} of steps, {self.sampling.prefetch + 1} x "
            f"{format_nbytes(self.batch_nbytes)} of batches; of each rank up to {format_nbytes(self.staging_nbytes)} of buffers"
            f"{ahead}"
        )
        order_nbytes = _USE_NBYTES * self.n_samples * sum(len(array.offsets) for array in self.arrays)
        lines.append(f"  to plan an epoch: up to {format_nbytes(order_nbytes)} more on each rank, for its order")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """One line."""
        return f"stream of {', '.join(dict.fromkeys(str(array.info) for array in self.arrays))}"

    @property
    def batch_nbytes(self) -> int:
        """Bytes of a batch."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)


@dataclass(frozen=True, eq=False)
class RoundReadings:
    """What one round reads.

    Attributes
    ----------
    epoch : EpochRounds
        The epoch that it belongs to.
    batch : int
        The first batch that needs it, among all that are given.
    readings : dict of int to range
        For the number of each array that is read, those of its readings.
    """

    epoch: EpochRounds
    batch: int
    readings: dict[int, range]

    @property
    def is_single(self) -> bool:
        """True if it is one reading of one array."""
        return sum(map(len, self.readings.values())) == 1


class EpochRounds:
    """The batches of one epoch from some sample on, and the rounds that read what they need.

    Attributes
    ----------
    anchors : ndarray of int
        The samples, in the order in which they are given.
    n_batches : int
        How many batches they are.
    first_batch : int
        The number of the first of them among all that are given.
    readings : list of Readings
        When which column of each array is read.
    """

    def __init__(
        self, plan: StreamPlan, epoch: int, first_sample: int, n_batches: int | None = None, first_batch: int = 0
    ) -> None:
        self._plan, self.epoch, self.first_sample, self.first_batch = plan, epoch, first_sample, first_batch
        anchors = plan.sample_order.epoch(epoch)[first_sample:]
        self.n_batches = plan.n_batches(len(anchors)) if n_batches is None else n_batches
        self.anchors = anchors[: self.n_batches * plan.batch]
        self.readings = [
            Readings(
                self.anchors,
                batch=plan.batch,
                offsets=array.offsets,
                chunk=array.chunk_steps,
                horizon=plan.horizon,
                phase=array.schedule.blocks.phase[array.schedule.axis],
            )
            for array in plan.arrays
        ]

    def rounds(self) -> list[RoundReadings]:
        """All rounds, in the order in which they are done."""
        plan = self._plan
        batches = np.concatenate([readings.batches for readings in self.readings])
        arrays = np.repeat(np.arange(len(self.readings)), list(map(len, self.readings)))
        order = np.lexsort((arrays, batches))
        batches, arrays = batches[order], arrays[order]
        places = [np.flatnonzero(arrays == number) for number in range(len(plan.arrays))]
        n_blocks = np.array([array.schedule.rest.n_cells for array in plan.arrays])
        nbytes = np.array([array.chunk_steps * array.step_nbytes for array in plan.arrays])
        parts = np.maximum(nbytes * _ROUND_BLOCKS, n_blocks * _ROUND_NBYTES)  # of what is enough for a reader in a round
        n_readers, enough = max(array.schedule.owners.n for array in plan.arrays), plan.n_ranks * _ROUND_BLOCKS * _ROUND_NBYTES
        blocks_before, parts_before = (np.append(0, np.cumsum(sizes[arrays])) for sizes in (n_blocks, parts))
        rounds: list[RoundReadings] = []
        begin = 0
        while begin < len(arrays):
            worth_sharing = int(np.searchsorted(blocks_before, blocks_before[begin] + n_readers))
            end = max(worth_sharing, int(np.searchsorted(parts_before, parts_before[begin] + enough)))
            if not begin and not self.first_batch:  # the program waits for it
                end = min(end, int(np.searchsorted(batches, batches[0], side="right")))
            elif end < len(arrays):  # whole batches if that is worth it: then ranks read what they need, and equally many
                whole = int(np.searchsorted(batches, batches[end]))
                end = whole if whole >= worth_sharing else end
            spans = [range(*np.searchsorted(where, (begin, end)).tolist()) for where in places]
            batch = self.first_batch + int(batches[begin])
            rounds.append(RoundReadings(self, batch, {array: span for array, span in enumerate(spans) if span}))
            begin = end
        return rounds

    def one_by_one(self, round_: RoundReadings) -> list[RoundReadings]:
        """The readings of a round, each as a round of its own, in the order in which batches need them."""
        pairs = [(array, k) for array, places in round_.readings.items() for k in places]
        first = self.first_batch
        rounds = [RoundReadings(self, first + int(self.readings[a].batches[k]), {a: range(k, k + 1)}) for a, k in pairs]
        return sorted(rounds, key=lambda round_: round_.batch)

    def flows(self, array: int, places: range) -> list[CutFlow]:
        """For each cut of an array, what moves in a round whose readings of the array are `places`."""
        columns, cuts = self.readings[array].chunks[places.start : places.stop].tolist(), self._plan.arrays[array].cuts
        flows: list[CutFlow] = []
        for cut, (schedule, runs) in enumerate(zip(cuts, self._runs(array, places), strict=True)):
            owners = flows[0].owners if flows else share_blocks(schedule, runs, len(columns))
            flows.append(CutFlow(schedule, columns, runs, owners, cut, len(cuts)))
        return flows

    def _runs(self, array: int, places: range) -> Iterator[Runs]:
        """For each cut of an array, the runs of steps that some of its readings bring."""
        stream_array, plan = self._plan.arrays[array], self._plan
        column, step, sample = self.readings[array].uses(places.start, places.stop)
        for cut, schedule in enumerate(stream_array.cuts):
            step_nbytes = stream_array.step_nbytes * schedule.shards.cuts[0] // max(1, schedule.shards.n_shards)
            most = 1 << 30 if plan.sample_order.seed is None else max(1, _RUN_NBYTES // max(1, step_nbytes))
            part = sample % plan.batch // schedule.shards.shard_shape[0]
            yield Runs.of(column, part, step, sample, most, plan.batch if (array, cut) in plan.in_place else None)

    def most_held_nbytes(self, rounds: Sequence[RoundReadings]) -> int:
        """Most bytes of steps that all ranks hold for later batches. A run of them is let go as a whole."""
        change = np.zeros(self.n_batches + 1, dtype=np.int64)
        begins = [round_.batch - self.first_batch for round_ in rounds]
        if self._plan.sampling.prefetch:  # a round begins when the first batch of the one before is made
            begins = [0, *begins][: len(begins)]
        begin_of = [np.empty(len(readings), dtype=np.int64) for readings in self.readings]
        for batch, round_ in zip(begins, rounds, strict=True):
            for number, places in round_.readings.items():
                begin_of[number][places.start : places.stop] = batch
        for number, (array, readings) in enumerate(zip(self._plan.arrays, self.readings, strict=True)):
            for cut, runs in enumerate(self._runs(number, range(len(readings)))):
                begin, end = begin_of[number][runs.column], runs.last // self._plan.batch
                if (number, cut) in self._plan.in_place:  # from the first step of a batch on
                    first_of_batch = np.full(self.n_batches, self.n_batches)
                    np.minimum.at(first_of_batch, end, begin)
                    begin = first_of_batch[end]
                nbytes = (runs.stop - runs.start) * array.step_nbytes
                np.add.at(change, begin, nbytes)
                np.subtract.at(change, end + 1, nbytes)
        return int(np.cumsum(change).max(initial=0))
