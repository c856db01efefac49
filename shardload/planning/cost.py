"""What does each way of reading cost, and which one should be chosen?

Pure, like `schedule`: the numbers are the same on every rank, so every rank chooses the same way. Counts come from `traffic`;
they are exact if that is cheap, else marked as bounds. Seconds come from a model with round constants (see
docs/design/auto.md), which is good for choosing between ways, not for predicting a time.

1. Reading: the bytes that the busiest rank decodes (by codec) or reads, and the number of runs that it reads.
2. Sending: one copy inside a node, a message for each part between nodes, a cost per message of either kind, and one for the
   start: below some tens of megabytes it decides.
3. All at the rates of the cores that the ranks of a node share. The fastest way wins, unless a simpler way is about as fast.
4. On a machine whose file system or network is known (`machine`), a load takes as long as the slowest of these (`limits`), if
   that is longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardload.planning.blocks import NEAR_NBYTES, count_runs, run_stride
from shardload.planning.limits import OnDisk, count_file_reads, seconds_of
from shardload.planning.machine import WORKSTATION, Machine
from shardload.planning.rates import CHUNK_SECONDS, EXCHANGE_SECONDS, WIRE_RATE, decode_rate
from shardload.planning.schedule import Schedule
from shardload.planning.source_layout import SourceLayout
from shardload.planning.strategies import DIRECT, MODES, PARALLEL, ROOT, Direct
from shardload.planning.traffic import Traffic, count_direct, count_held, count_traffic
from shardload.units import format_nbytes, number_text

__all__ = ["DIRECT", "MODES", "PARALLEL", "ROOT", "Cost", "Costs", "Nodes", "choose_mode", "plan_cost"]

# The constants of the model, with those in `rates`; with a warm page cache.
_CALL_SECONDS = 3e-6  # for a contiguous run that is read by itself
_RUN_SECONDS = 5e-8  # for a run that is read together with others and copied out
_COPY_RATE = 5e9  # from a decoded block into a piece, of the same rank or of another one on its node
_HANDOVER_SECONDS = 3e-5  # per block and receiving rank inside a node, at each end
_PART_SECONDS = 3e-5  # per part between nodes, at each end, mostly Python
# A way is chosen over a simpler one only if it is this much better: the model is not more accurate than that.
_MARGIN = 0.9
# Below this, messages take longer than reading anything twice.
_SMALL_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way of reading costs the job.

    Attributes
    ----------
    mode : str
        ``"root"``, ``"parallel"`` or ``"direct"``.
    n_readers : int
        Number of ranks that read.
    chunks_decoded : int
        Number of chunk decodes in the whole job (0 if the file has no chunks).
    decoded_nbytes : int
        Bytes decoded or, without chunks, read, in the whole job.
    amplification : float
        `decoded_nbytes` divided by the bytes of the array; 1.0 means each byte once.
    messages, moved_nbytes : int
        Number of messages between different ranks (inside a node one per block and rank, between nodes one per part, before
        long ones are split), and the bytes of the parts in them.
    is_exact : bool
        Whether these two are exact; otherwise they are upper bounds.
    reader_nbytes : int
        Bytes decoded by the busiest rank (an upper bound: the last blocks may be smaller).
    peak_nbytes : int
        Host memory of the fullest rank: its pieces and its staging blocks.
    seconds : float
        Estimate of the model for the busiest rank.
    same_node : float
        Fraction of `moved_nbytes` that stays inside a node; 1.0 if nothing moves.
    runs : int
        Contiguous runs of the file that the fullest rank reads by itself (0 if blocks or chunks are read).
    fs_nbytes, operations : int
        Bytes that all nodes together fetch from the file system, and the number of reads and opens; 0 if the machine has no
        file system that limits anything.
    limit : str
        What takes longest (`limits.seconds_of`), on a machine that has limits: ``"cores"``, ``"reading"``; else empty.
    n_sent, n_received : int
        Messages between nodes that a reader sends, and that a rank which holds something receives, if they have equal shares.
    message_nbytes : int
        Mean bytes of these.
    """

    mode: str
    n_readers: int
    chunks_decoded: int
    decoded_nbytes: int
    amplification: float
    messages: int
    moved_nbytes: int
    is_exact: bool
    reader_nbytes: int
    peak_nbytes: int
    seconds: float
    same_node: float = 1.0
    runs: int = 0
    fs_nbytes: int = 0
    operations: int = 0
    limit: str = ""
    n_sent: int = 0
    n_received: int = 0
    message_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is read, in total and by the busiest rank. The numbers of chunks are 0 if the file has none.

    `span_nbytes` is the distance between the starts of two runs, if runs are read together with the gaps; otherwise 0.
    """

    n_readers: int
    chunks: int
    nbytes: int
    reader_chunks: int
    reader_nbytes: int
    runs: int
    span_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes that the ranks run on: rank ``r`` runs on node ``r // ranks_per_node``.

    Parameters
    ----------
    ranks_per_node : int, optional
        Default: all ranks on one node.
    n_cores : int, optional
        Cores of a node. Default: one per rank.
    """

    ranks_per_node: int | None = None
    n_cores: int | None = None

    def spread(self, n_ranks: int) -> tuple[int, int]:
        """The number of ranks and of cores of a node, for a job of `n_ranks` ranks."""
        per_node = min(n_ranks, self.ranks_per_node or n_ranks)
        return per_node, self.n_cores or per_node


def plan_cost(
    schedule: Schedule,
    layout: SourceLayout,
    nodes: Nodes | None = None,
    *,
    staging_blocks: int = 2,
    machine: Machine = WORKSTATION,
    stored: OnDisk | None = None,
) -> Cost:
    """Compute what a load by this schedule costs.

    Parameters
    ----------
    schedule : Schedule
        Which rank owns which block.
    layout : SourceLayout
        How the array lies in its file.
    nodes : Nodes, optional
        The nodes that the ranks run on.
    staging_blocks : int
        Number of blocks that an owner holds at once.
    machine : Machine
        What limits a load beside the cores: nothing by default.
    stored : OnDisk, optional
        How the values lie on disk.
    """
    n_ranks, itemsize = schedule.n_ranks, schedule.itemsize
    per_node, cores = (nodes or Nodes()).spread(n_ranks)
    array_nbytes = math.prod(schedule.blocks.shape) * layout.file_dtype.itemsize
    n_holders, fullest = count_held(schedule.shards)
    piece_nbytes = math.prod(schedule.shards.shard_shape) * itemsize * fullest
    reading = _count_reading(schedule, layout)
    traffic = count_traffic(schedule, per_node)
    takes_apart = schedule.strategy == Direct(is_merged=False)  # each shard is read by itself
    is_staged = layout.casts or not takes_apart or _has_gaps(schedule)
    seconds = _read_seconds(reading, n_ranks, per_node, cores, decode_rate(layout.codec, layout.has_chunks))
    is_in_place = takes_apart and reading.runs > 0 and not reading.span_nbytes
    seconds += 0.0 if is_in_place else piece_nbytes / _COPY_RATE / min(1, cores / per_node)
    n_ends, between_nbytes = max(1, min(reading.n_readers, n_holders)), _between(traffic)
    seconds += (between_nbytes / WIRE_RATE + traffic.parts * _PART_SECONDS) / n_ends
    seconds += traffic.handovers * _HANDOVER_SECONDS / n_ends
    if not schedule.is_direct:
        seconds += EXCHANGE_SECONDS / min(1, cores / per_node) + _into_slots_seconds(reading, layout, n_ranks, per_node, cores)
    limits: dict[str, Any] = {}
    if machine.has_limits and array_nbytes:
        reads = count_file_reads(schedule, layout, stored or OnDisk(), per_node, reading.n_readers, reading.reader_nbytes)
        n_nodes = -(-n_ranks // per_node)
        seconds, slowest = seconds_of(seconds, reads, between_nbytes, min(n_ends, n_nodes), machine)
        limits = dict(limit=slowest)
        if machine.has_file_system:
            limits |= dict(fs_nbytes=reads.nbytes, operations=reads.operations)
    staging_itemsize = staging_blocks * itemsize + layout.casts * layout.file_dtype.itemsize
    return Cost(
        mode=schedule.strategy.mode,
        n_readers=reading.n_readers,
        chunks_decoded=reading.chunks,
        decoded_nbytes=reading.nbytes,
        amplification=reading.nbytes / array_nbytes if array_nbytes else 1.0,
        messages=traffic.handovers + traffic.parts,
        moved_nbytes=traffic.moved_nbytes,
        is_exact=traffic.is_exact,
        reader_nbytes=reading.reader_nbytes,
        peak_nbytes=piece_nbytes + is_staged * schedule.max_block_size * staging_itemsize,
        seconds=seconds,
        same_node=traffic.same_node,
        runs=reading.runs,
        n_sent=-(-traffic.parts // max(1, reading.n_readers)),
        n_received=-(-traffic.parts // max(1, n_holders)),
        message_nbytes=int(between_nbytes / max(1, traffic.parts)),
        **limits,
    )


def _count_reading(schedule: Schedule, layout: SourceLayout) -> _Reading:
    """What is read by a schedule."""
    return _count_direct_reading(schedule, layout) if schedule.is_direct else _count_shared_reading(schedule, layout)


def _count_direct_reading(schedule: Schedule, layout: SourceLayout) -> _Reading:
    """Each rank reads what it holds: all chunks that meet it or, without chunks, its elements, in runs."""
    n_holders, fullest = count_held(schedule.shards)
    met, busiest = count_direct(schedule, layout)
    if layout.has_chunks:
        nbytes, of_reader = met * layout.chunk_nbytes, busiest * layout.chunk_nbytes
        return _Reading(n_holders, met, nbytes, busiest, of_reader, 0)
    itemsize, shape, extent = layout.file_dtype.itemsize, schedule.blocks.shape, schedule.extent
    runs = count_runs(shape, extent) * (1 if schedule.strategy == Direct(is_merged=True) else fullest)
    stride = run_stride(shape, extent) * itemsize
    span_nbytes = stride if runs > 1 and stride <= NEAR_NBYTES else 0
    return _Reading(n_holders, 0, met * itemsize, 0, busiest * itemsize, runs, span_nbytes)


def _count_shared_reading(schedule: Schedule, layout: SourceLayout) -> _Reading:
    """Each block is read once, by its owner."""
    blocks, chunks = schedule.blocks, layout.chunks
    n_owners = min(schedule.strategy.n_owners_of(schedule.n_ranks), max(1, blocks.n_cells))
    most = -(-blocks.n_cells // n_owners) * math.prod(blocks.cell)
    if not layout.has_chunks:
        itemsize = layout.file_dtype.itemsize
        nbytes = math.prod(blocks.shape) * itemsize
        return _Reading(n_owners, 0, nbytes, 0, min(nbytes, most * itemsize), 0)
    of_owner, nbytes = min(chunks.n_cells, most // math.prod(chunks.cell)), chunks.n_cells * layout.chunk_nbytes
    return _Reading(n_owners, chunks.n_cells, nbytes, of_owner, -(-of_owner * nbytes // max(1, chunks.n_cells)), 0)


def _read_seconds(reading: _Reading, n_ranks: int, per_node: int, cores: int, rate: float) -> float:
    """Seconds of the busiest reader, which shares the cores of its node with the other readers there."""
    share = cores / _busy(reading, n_ranks, per_node)
    threads = max(1, cores // per_node)  # decoding threads of one rank
    calls = reading.reader_chunks * CHUNK_SECONDS + reading.runs * (_RUN_SECONDS if reading.span_nbytes else _CALL_SECONDS)
    nbytes = max(reading.reader_nbytes, reading.runs * reading.span_nbytes)
    # Calls are made one after the other (h5py has one lock); only decoding runs in several threads.
    return nbytes / rate / min(threads, share) + calls / min(1, share)


def _into_slots_seconds(reading: _Reading, layout: SourceLayout, n_ranks: int, per_node: int, cores: int) -> float:
    """Seconds of the busiest reader for what it reads as it is into staging blocks. They are too large for a core's cache, in
    which decoded chunks, and runs that are read together, stay until they are copied.
    """
    if layout.has_chunks:
        return 0.0
    return reading.reader_nbytes / _COPY_RATE / min(1, cores / _busy(reading, n_ranks, per_node))


def _busy(reading: _Reading, n_ranks: int, per_node: int) -> int:
    """Ranks of a node that read."""
    return max(1, min(per_node, -(-reading.n_readers * per_node // n_ranks)))


def _between(traffic: Traffic) -> float:
    """Bytes that go from one node to another."""
    between = traffic.moved_nbytes * (1 - traffic.same_node)
    return between if traffic.is_exact else between * (1 - traffic.stays)


class Costs(Mapping[str, Cost]):
    """The cost of each way. It is computed when it is first asked for, because a small load takes little longer than that.

    Parameters
    ----------
    count : mapping of str to callable
        For each way, a function that computes its cost.
    known : mapping of str to Cost, optional
        Costs that have been computed already.
    """

    def __init__(self, count: Mapping[str, Callable[[], Cost]], known: Mapping[str, Cost] | None = None) -> None:
        self._count = dict(count)
        self._known = dict(known or {})

    def __getitem__(self, mode: str) -> Cost:
        if mode not in self._known:
            self._known[mode] = self._count[mode]()
        return self._known[mode]

    def __iter__(self) -> Iterator[str]:
        return iter(self._count)

    def __len__(self) -> int:
        return len(self._count)


def choose_mode(costs: Mapping[str, Cost], n_ranks: int) -> tuple[str, str]:
    """Return the way to choose, and the reason as text.

    The simplest way wins unless another is clearly better. Direct is simplest, because it needs no messages; parallel is next,
    because its messages do not all come from one rank. Each way must be better by a margin than the best one before it.
    """
    direct = costs[DIRECT]
    if direct.decoded_nbytes == 0:
        return DIRECT, "the array is empty"
    verb = "decode" if direct.chunks_decoded else "read"
    if n_ranks == 1:  # there is no other rank to share reads with
        return DIRECT, f"one process: it {verb}s what its devices hold, {number_text(direct.amplification, 3)}x the array"
    if direct.decoded_nbytes <= _SMALL_NBYTES:
        return DIRECT, f"so little data that each rank best {verb}s what it holds"
    best = direct
    for mode in (PARALLEL, ROOT):
        if costs[mode].seconds < _MARGIN * best.seconds:
            best = costs[mode]
    if best is direct:
        return DIRECT, (
            f"each rank {verb}s what it holds, {number_text(direct.amplification, 3)}x the array in all: "
            f"no dearer than {_sent(costs[PARALLEL])}{_slowest(direct)}"
        )
    runs = f" in {direct.runs:,} runs of {format_nbytes(direct.reader_nbytes // direct.runs)}" if direct.runs else ""
    who = "once in the job" if best.mode == PARALLEL else "once, by one rank for all"
    return best.mode, (
        f"each rank by itself would {verb} {number_text(direct.amplification, 3)}x the array in all{runs}; "
        f"{who}, and {_sent(best)}, is about {direct.seconds / best.seconds:.1f}x faster"
        f"{_slowest(direct, ' of the former')}{_slowest(best)}"
    )


def _slowest(cost: Cost, of: str = "") -> str:
    """What limits a way of reading, on a machine that has limits."""
    if not cost.limit:
        return ""
    fetched = f", with {format_nbytes(cost.fs_nbytes)} from disk" if cost.fs_nbytes else ""
    return f"; slowest{of}: {cost.limit}{fetched}"


def _sent(cost: Cost) -> str:
    near = "" if cost.same_node == 1 else f" ({cost.same_node:.0%} inside nodes)"
    return f"{format_nbytes(cost.moved_nbytes)} sent between ranks{near}"


def _has_gaps(schedule: Schedule) -> bool:
    """True if some block has gaps in its piece, so that it cannot be read straight into it. (Each shard is read by itself.)"""
    blocks, gapless = schedule.blocks, True
    if schedule.shards.has_halo:
        return True
    axes = zip(blocks.shape, blocks.cell, blocks.phase, schedule.shards.shard_shape, strict=True)
    for size, cell, phase, extent in reversed(list(axes)):
        if not gapless and min(size, cell, extent) > 1:
            return True
        # A block that ends inside a shard leaves gaps between the runs along earlier axes; so does padding.
        gapless = gapless and size % max(1, extent) == 0 and not any(e % extent for e in range(cell - phase, size, cell))
    return False
