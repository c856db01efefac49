"""What will a load do, and what did it do? The caller inspects a `Plan` of one array, or a `TreePlan` of many, prints it and
executes it. A `LoadReport` then has the numbers.

A plan has facts only: it is frozen, and holds no group of ranks and no open file. An executor is passed in for `Plan.execute`;
it finds the ranks by their communicator when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardload.arrays.padding import Extent, version_of
from shardload.arrays.sharding import describe_decomposition, mesh_text, spec_text
from shardload.arrays.verification import VerifyReport
from shardload.errors import ConfigError, printable
from shardload.formats.contract.array import ArrayInfo, some
from shardload.jobs.consistency import Version
from shardload.planning.cost import Cost, plan_cost
from shardload.planning.region import NEAR_NBYTES, Grid
from shardload.planning.schedule import Schedule, SourceLayout
from shardload.planning.staging import Staging, plan_staging
from shardload.storage.remote import PIECE_NBYTES
from shardload.system.terminal import WIDTH, Column, fit_table, width_of_prints, wrap
from shardload.transfer.counters import Counters
from shardload.units import PrintedReport, counted, format_nbytes, number_text

_AT_ONCE, _LATENCY_SECONDS, _CONNECTION_NBYTES = 16, 0.02, 60 * 10**6  # of a store as it is assumed to be: S3 in its region
_WIDE = 60  # from this width on, names have a column of their own


@dataclass(frozen=True)
class Phase:
    """One phase of a load on this rank: seconds (summed over its threads) and bytes."""

    seconds: float
    nbytes: int


@dataclass(frozen=True, repr=False)
class ArrayReport(PrintedReport):
    """What a load did for one array of a tree, in the whole job.

    Attributes
    ----------
    where : str
        Its place in the tree: ``"['gas']"``.
    name : str
        Its name in the file: ``"'/gas' in 'snap.h5'"``.
    chunks_decoded, nbytes_read, chunks_missing : int
        As in `LoadReport`.
    proven : VerifyReport
        What was proven of it.
    """

    where: str
    name: str
    chunks_decoded: int
    nbytes_read: int
    chunks_missing: int
    proven: VerifyReport

    def __str__(self) -> str:
        """For a person: one line."""
        decoded = f"{counted(self.chunks_decoded, 'chunk')} decoded, " if self.chunks_decoded else ""
        missing = f"{self.chunks_missing:,} not stored, " if self.chunks_missing else ""
        return f"{self.where} {self.name}: {decoded}{missing}{format_nbytes(self.nbytes_read)} read; {self.proven}"


@dataclass(frozen=True, repr=False)
class LoadReport(PrintedReport):
    """What an executed plan did.

    Attributes
    ----------
    seconds : float
        Seconds on this rank, from the start of `execute` to the assembled array.
    chunks_decoded : int
        Chunk decodes in the whole job, counted as they happened (0 if the file has no chunks).
    nbytes_read : int
        Bytes of values read from the file in the whole job.
    phases : mapping of str to Phase
        Phases of this rank: ``"read"`` (from the file, as stored), ``"decode"`` (includes reading, if the format's library
        does both), ``"exchange"`` (copies into the pieces), ``"device"`` (handing the pieces to JAX). They overlap.
    peak_staging_nbytes : int
        Most bytes in staging buffers at a time on this rank (without the memory of the decoding threads).
    proven : VerifyReport
        What was proven of the array.
    chunks_missing : int
        Missing chunks in the selection, each counted once in the whole job: they are not stored in the file, and their values
        are its fill value. 1 for an array without chunks that was never written.
    arrays : tuple of ArrayReport
        For a tree: the report of each array. Empty for a load of one array.
    n_requests, nbytes_fetched, n_retries : int
        Requests to stores while values were loaded, in the whole job: how many, what they brought, and how many of them had
        failed before. 0 of local files.
    """

    seconds: float
    chunks_decoded: int
    nbytes_read: int
    phases: Mapping[str, Phase]
    peak_staging_nbytes: int
    proven: VerifyReport
    chunks_missing: int = 0
    arrays: tuple[ArrayReport, ...] = ()
    n_requests: int = 0
    nbytes_fetched: int = 0
    n_retries: int = 0

    def __str__(self) -> str:
        """For a person: one line, and for a tree one line more for each array."""
        phases = ((name, phase) for name, phase in self.phases.items() if phase.nbytes)
        parts = [f"{name} {number_text(p.seconds, 3)} s, {format_nbytes(p.nbytes)}" for name, p in phases]
        missing = f" ({self.chunks_missing:,} not stored)" if self.chunks_missing else ""
        decoded = f"{counted(self.chunks_decoded, 'chunk')} decoded{missing}"
        requests = counted(self.n_requests, "request")
        fetched = f"; {requests}, {format_nbytes(self.nbytes_fetched)} fetched" if self.n_requests else ""
        fetched += f", {self.n_retries:,} again" if self.n_retries else ""
        total = (
            f"{number_text(self.seconds, 3)} s; {decoded} and {format_nbytes(self.nbytes_read)} read{fetched} in the job; "
            f"on this rank: {'; '.join(parts)}; staging at most {format_nbytes(self.peak_staging_nbytes)}; "
            f"{self.proven}"
        )
        return "\n".join([total, *(f"  {array}" for array in self.arrays)])


Loaded = tuple[list[jax.Array], LoadReport]
Executor = Callable[[], Loaded]


def no_devices() -> Loaded:
    """The executor of a plan over an AbstractMesh."""
    raise ConfigError(
        "an AbstractMesh has no devices, so there is nothing to execute this plan on: plan over a jax.sharding.Mesh"
    )


def phases_of(counters: Counters, device: Phase) -> dict[str, Phase]:
    """The phases of this rank."""
    return {
        "read": Phase(counters.read_seconds, counters.nbytes_stored or counters.nbytes_read),
        "decode": Phase(counters.decode_seconds, counters.nbytes_read if counters.chunks_decoded else 0),
        "exchange": Phase(counters.copy_seconds, counters.nbytes_copied + counters.nbytes_received),
        "device": device,
    }


@dataclass(frozen=True, eq=False)
class LoadLayout:
    """How an array lies in its file and over the ranks, and how many threads may read it.

    Attributes
    ----------
    source : SourceLayout
        How it lies in the file, and how stored numbers become values.
    schedule : Schedule
        Which rank reads which block, and which rank needs which part of it.
    n_threads : int
        Chunks that a rank may decode at once, if `staging` has room.
    ahead_nbytes : int
        Bytes of stored values that a reader may have fetched from a store, beside `staging`, before it needs them.
    """

    source: SourceLayout
    schedule: Schedule
    n_threads: int = 1
    ahead_nbytes: int = 0

    def cost(self, cap_nbytes: int, n_nodes: int = 1) -> Cost:
        """What a load costs; with a cap of 0 there are no staging buffers."""
        alone = plan_staging([(self.schedule, self.source)], cap_nbytes, self.n_threads)
        staging_nbytes = min(alone.nbytes, cap_nbytes)
        cost = plan_cost(self.schedule, self.source, staging_nbytes=staging_nbytes, is_one_node=n_nodes == 1)
        return replace(cost, peak_nbytes=cost.peak_nbytes + min(self.ahead_nbytes, cost.reader_nbytes))


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PrintedReport):
    """What a load will do: inspect it, print it, `execute` it.

    Attributes
    ----------
    info : ArrayInfo
        The array in the file: name, format, shape, dtype, chunks, codec.
    sharding : NamedSharding
        Sharding of the jax.Array.
    readers : str
        The chosen way of reading: ``"root"``, ``"parallel"`` or ``"direct"``.
    why : str
        The reason for this way.
    staging_nbytes : int
        Cap on each process's host memory beyond its own pieces.
    staging_is_raised : bool
        True if ``staging="auto"`` is more than usual, because the chunks need it.
    is_decoded : bool
        True if the caller asked for values and not for stored numbers. (They may be the same.)
    n_nodes : int
        Number of nodes of the ranks; 1 if nothing is known of them.
    report : LoadReport or None
        The report of the last `execute`; None before. Only this changes in a plan; each copy has its own.
    """

    info: ArrayInfo
    sharding: NamedSharding
    readers: str
    why: str
    staging_nbytes: int
    staging_is_raised: bool = field(default=False, kw_only=True)
    is_decoded: bool = field(default=False, kw_only=True)
    n_nodes: int = field(default=1, kw_only=True)
    _layouts: Mapping[str, LoadLayout] = field(kw_only=True)  # for each way of reading
    _executor: Executor = field(default=no_devices, kw_only=True)
    report: LoadReport | None = field(default=None, init=False)
    _version: Version | None = field(default=None, init=False)  # of the file, which the last `execute` has read

    @property
    def _layout(self) -> LoadLayout:
        return self._layouts[self.readers]

    @property
    def schedule(self) -> Schedule:
        """Which rank reads which block, and which rank needs which part of it."""
        return self._layout.schedule

    @property
    def costs(self) -> dict[str, Cost]:
        """For each way of reading: chunks decoded, amplification, messages, bytes, memory."""
        return {way: layout.cost(self.staging_nbytes, self.n_nodes) for way, layout in self._layouts.items()}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is loaded: after `select`, without padding and halos."""
        return self.schedule.blocks.shape

    @property
    def shape_global(self) -> tuple[int, ...]:
        """The shape of the jax.Array, with padding and halos."""
        return self.schedule.shards.shape_global

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of the shard that one device holds."""
        return self.schedule.shards.shard_shape

    @property
    def n_ranks(self) -> int:
        """Number of ranks that take part."""
        return self.schedule.n_ranks

    @property
    def n_readers(self) -> int:
        """Number of ranks that read."""
        return self.schedule.n_readers

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the jax.Array."""
        return self._layout.source.dtype

    @property
    def decomposition(self) -> str:
        """``"slab"``, ``"pencil"``, ``"block"``, ``"replicated"`` or ``"whole"``."""
        return describe_decomposition(self.schedule.shards)

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The file's chunk shape; None if it has no chunks."""
        return self.info.chunks

    @property
    def extent(self) -> Extent:
        """Which elements of the jax.Array are the file's, and which are padding or halo."""
        shards = self.schedule.shards
        return Extent(self.shape, shards.shape_global, shards.cuts, shards.halo.widths)

    @property
    def nbytes(self) -> int:
        """Bytes of the jax.Array, each counted once."""
        return math.prod(self.shape_global) * self.dtype.itemsize

    @property
    def ahead_nbytes(self) -> int:
        """Bytes that a rank may have fetched from a store before it needs them, beside `staging`; 0 for local files."""
        return self._layout.ahead_nbytes

    @property
    def pieces_nbytes(self) -> int:
        """Bytes of the pieces of the fullest rank."""
        shards = self.schedule.shards
        return math.prod(shards.shard_shape) * self.dtype.itemsize * shards.most_held

    def __str__(self) -> str:
        """Text for a person, as wide as the terminal. Without a terminal it is exactly the same on all ranks."""
        return describe_plan(self, width_of_prints())

    def __repr__(self) -> str:
        """One line."""
        readers = f"{self.readers}, {self.n_readers} of {self.n_ranks} ranks read"
        array = f"{shape_text(self.shape_global)} {self.dtype} as {self.decomposition} {spec_text(self.sharding.spec)}"
        return f"<Plan of {printable(str(self.info))}: {array} on mesh {mesh_text(self.sharding.mesh)}; {readers}>"

    def execute(self) -> jax.Array:
        """Load the array. Collective: yes, over the ranks that planned. May be called again.

        Returns
        -------
        jax.Array
            As from `load`.

        Raises
        ------
        SourceError, PeerError, ConfigError
            On every rank.
        """
        (array,) = _execute(self, [self])
        return array


@dataclass(frozen=True, eq=False, repr=False)
class TreePlan(PrintedReport):
    """What a load of a tree of arrays will do: inspect it, print it, `execute` it.

    Attributes
    ----------
    plans : pytree of Plan
        The plan of each array, in the structure that the result will have. Each can also be executed by itself.
    where : tuple of str
        The place of each array in the tree (``"['gas']"``), in JAX's order of the leaves.
    left_out : tuple of ArrayInfo
        Arrays below a group that was named with ``*`` which are no part of the tree, because they hold no numbers.
    report : LoadReport or None
        The report of the last `execute`; None before.
    """

    plans: Any
    where: tuple[str, ...]
    left_out: tuple[ArrayInfo, ...] = ()
    _executor: Executor = field(default=no_devices, kw_only=True)
    report: LoadReport | None = field(default=None, init=False)

    @property
    def leaves(self) -> list[Plan]:
        """The plans in JAX's order."""
        return list(jax.tree_util.tree_leaves(self.plans))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, with padding, each counted once."""
        return sum(plan.nbytes for plan in self.leaves)

    @property
    def staging_nbytes(self) -> int:
        """Cap on each process's host memory beyond its own pieces, for all arrays together."""
        return self.leaves[0].staging_nbytes

    @property
    def peak_nbytes(self) -> int:
        """Host memory of the fullest rank, at most: its pieces of all arrays, the memory that they share for reading, and
        what is fetched ahead from stores.
        """
        plans = self.leaves
        pieces = sum(plan.pieces_nbytes for plan in plans)
        staging_nbytes = min(staging_of(plans).nbytes, self.staging_nbytes)
        return pieces + staging_nbytes + max(plan.ahead_nbytes for plan in plans)

    def __str__(self) -> str:
        """Text for a person, as wide as the terminal: a row per array, then totals."""
        return self.describe(width_of_prints())

    def describe(self, width: int) -> str:
        """The same, `width` columns wide."""
        columns, rows = self._table()
        lines = wrap(self._title(), width, "", "  ")
        lines += fit_table(columns, [[printable(cell) for cell in row] for row in rows], width)
        for text in self._totals():
            lines += wrap(text, width, "", "  ")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """One line."""
        return f"<TreePlan of {len(self.where)} arrays: {format_nbytes(self.nbytes)}>"

    def _title(self) -> str:
        first = self.leaves[0]
        files = sorted({plan.info.path for plan in self.leaves})
        more = f" and {counted(len(files) - 1, 'more file')}" if len(files) > 1 else ""
        arrays, ranks = counted(len(self.where), "array"), counted(first.n_ranks, "rank")
        return f"load {arrays} of {printable(files[0])}{more} on mesh {mesh_text(first.sharding.mesh)}, {ranks}"

    def _table(self) -> tuple[list[Column], list[list[str]]]:
        columns = [Column("array"), Column("shape"), Column("dtype"), Column("size", is_number=True)]
        columns += [Column("readers"), Column("name"), Column("spec"), Column("shard"), Column("decoded", is_number=True)]
        rows = []
        for where, plan in zip(self.where, self.leaves, strict=True):
            padded = f" padded to {shape_text(plan.shape_global)}" if plan.shape_global != plan.shape else ""
            decoded = _decoded(plan, plan.costs[plan.readers])
            readers = f"{plan.readers}, {plan.n_readers}"
            row = [where, shape_text(plan.shape) + padded, str(plan.dtype), format_nbytes(plan.nbytes), readers]
            rows.append([*row, plan.info.dataset, spec_text(plan.sharding.spec), shape_text(plan.shard_shape), decoded])
        return columns, rows

    def _totals(self) -> list[str]:
        n_chunks = sum(plan.costs[plan.readers].chunks_decoded for plan in self.leaves)
        totals = [
            f"total: {format_nbytes(self.nbytes)}, {counted(n_chunks, 'chunk')} decoded in the job",
            f"peak host memory of a rank: {format_nbytes(self.peak_nbytes)}, at most, with up to "
            f"{format_nbytes(self.staging_nbytes)} of staging memory for all arrays together",
        ]
        if self.left_out:
            names = [f"'{printable(info.dataset)}' ({info.refused})" for info in self.left_out]
            totals.append(f"left out, because they hold no numbers: {some(names)}")
        return totals

    def execute(self) -> Any:
        """Load the arrays. Collective: yes, over the ranks that planned. May be called again.

        Returns
        -------
        pytree of jax.Array
            As from `load`.

        Raises
        ------
        SourceError, PeerError, ConfigError
            On every rank. Nothing is loaded then.
        """
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(self.plans), _execute(self, self.leaves))


def _execute(plan: Plan | TreePlan, plans: Sequence[Plan]) -> list[jax.Array]:
    """Load the arrays of `plans`. The report and the versions of the files are noted in the plans, frozen as they are."""
    arrays, report = plan._executor()
    object.__setattr__(plan, "report", report)
    for plan_of_array, array in zip(plans, arrays, strict=True):
        object.__setattr__(plan_of_array, "_version", version_of(array))
    return arrays


def staging_of(plans: Sequence[Plan]) -> Staging:
    """How some arrays together use the memory under their cap."""
    layouts = list({id(plan._layout): plan._layout for plan in plans}.values())
    n_threads = max(layout.n_threads for layout in layouts)
    return plan_staging([(layout.schedule, layout.source) for layout in layouts], plans[0].staging_nbytes, n_threads)


# --- for people, and for the comparison of the ranks


def describe_plan(plan: Plan, width: int = WIDTH) -> str:
    """A plan as text that fits `width` columns: what is loaded, and a table of the cost of each way of reading."""
    lines = wrap(f"load '{printable(plan.info.dataset)}', {plan.info.format}", width, "", "  ")
    for name, text in _facts(plan).items():
        first = f"  {name:<10}" if width >= _WIDE else f"  {name}  "
        lines += wrap(text, width, first, None if width >= _WIDE else "    ")
    return "\n".join([*lines, "", *_table(plan, width)])


def shape_text(shape: Sequence[int]) -> str:
    """A shape in brackets, without a comma after a single number."""
    return "(" + ", ".join(map(str, shape)) + ")"


def _facts(plan: Plan) -> dict[str, str]:
    info = plan.info
    shard_nbytes = math.prod(plan.shard_shape) * plan.dtype.itemsize
    nbytes_chunk = math.prod(info.chunks or ()) * np.dtype(info.dtype).itemsize if plan.staging_is_raised else 0
    shards, decoding, padded_shape = plan.schedule.shards, plan._layout.source.decoding, plan.extent.shape_without_halo
    halo = str(shards.halo)
    padded = f", padded to {shape_text(padded_shape)}" if padded_shape != plan.shape else ""
    padded += f", with halos {shape_text(plan.shape_global)}" if halo else ""
    selected = f" of {shape_text(info.shape)}" if plan.shape != info.shape else ""
    cast = "" if decoding is None else f" decoded to {decoding.dtype}"
    cast += f" cast to {plan.dtype}" if str(plan.dtype) != str(info.dtype if decoding is None else decoding.dtype) else ""
    chunks = "no chunks (any part can be read)" if info.chunks is None else f"chunks {shape_text(info.chunks)}, {info.codec}"
    store = {"store": _store(plan)} if info.is_in_store else {}
    replicas = f", {shards.n_replicas} replicas" if shards.n_replicas > 1 else ""
    return {
        "file": printable(info.path),
        **store,
        "array": f"{shape_text(plan.shape)}{selected}{padded}, {info.dtype}{cast}, {format_nbytes(plan.nbytes)}; {chunks}",
        "sharding": f"{plan.decomposition}: {spec_text(plan.sharding.spec)} on mesh {mesh_text(plan.sharding.mesh)}{replicas}; "
        f"shard {shape_text(plan.shard_shape)}, {format_nbytes(shard_nbytes)}" + (f"; halo {halo}" if halo else ""),
        "ranks": f"{plan.n_ranks}{f' on {plan.n_nodes:,} nodes' if plan.n_nodes > 1 else ''}, {plan.n_readers} of them read; "
        f"up to {format_nbytes(plan.staging_nbytes)} of staging memory each"
        + (f", because of chunks of {format_nbytes(nbytes_chunk)}" if plan.staging_is_raised else ""),
        "chosen": f"{plan.readers}: {plan.why}",
    }


def _store(plan: Plan) -> str:
    """What is asked of a store, and how long that takes where nothing else does."""
    info, cost, layout = plan.info, plan.costs[plan.readers], plan._layout.source
    nbytes, ndim = cost.decoded_nbytes, len(info.shape)
    units = Grid(info.shape, info.shards or info.chunks or (1,) * ndim, (0,) * ndim)  # objects, chunks, or elements
    met = list(map(len, units.meeting_axes(layout.selection.region)))
    if info.format.startswith("Zarr"):
        n_objects = math.ceil(math.prod(met) * cost.chunks_decoded / max(1, layout.chunks.n_cells))
        # Of a shard its index, and its chunks.
        n = n_objects if info.shards is None else n_objects + max(n_objects, -(-nbytes // PIECE_NBYTES))
    else:
        n_reads, near_nbytes = min(1, nbytes), 0 if layout.has_chunks else NEAR_NBYTES
        span_nbytes = stride_nbytes = layout.chunk_nbytes or layout.file_dtype.itemsize
        for n_units, n_met in zip(reversed(units.counts), reversed(met), strict=True):
            if n_met > 1 and 1.05 * span_nbytes < stride_nbytes and stride_nbytes > near_nbytes:
                n_reads *= n_met
            elif n_met > 1:  # what lies between is fetched, too
                span_nbytes = n_met * stride_nbytes
            stride_nbytes *= n_units
        nbytes = max(nbytes, n_reads * span_nbytes)
        n = max(n_reads, -(-nbytes // PIECE_NBYTES)) + info.n_parts
    share = cost.reader_nbytes / max(1, cost.decoded_nbytes)
    n_of_reader = n * share
    n_connections = min(_AT_ONCE, max(1, n_of_reader))
    seconds = -(-n_of_reader // _AT_ONCE) * _LATENCY_SECONDS + nbytes * share / (n_connections * _CONNECTION_NBYTES)
    return (
        f"some {counted(n, 'request')} for {format_nbytes(nbytes)}, fewer of both if compression helps; "
        f"{_AT_ONCE} at a time of each reader, {format_nbytes(plan.ahead_nbytes)} at most fetched ahead; "
        f"{seconds:.2g} s at {_LATENCY_SECONDS * 1000:.0f} ms each and {_CONNECTION_NBYTES // 10**6} MB/s a connection"
    )


def _decoded(plan: Plan, cost: Cost) -> str:
    """What all ranks together decode or, without chunks, read."""
    return format_nbytes(cost.decoded_nbytes) if plan.info.chunks is None else counted(cost.chunks_decoded, "chunk")


def _table(plan: Plan, width: int) -> list[str]:
    """A table with a column for each way of reading, and a row for each quantity."""
    costs_by_mode = plan.costs
    if plan.n_ranks == 1 and plan.readers in costs_by_mode:  # each way is the same
        costs_by_mode = {plan.readers: costs_by_mode[plan.readers]}
    ways = [Column(f"-> {mode}" if mode == plan.readers else mode, is_number=True) for mode in costs_by_mode]
    costs = costs_by_mode.values()
    rows = [
        ["readers", *(f"{c.n_readers:,}" for c in costs)],
        ["decoded", *(_decoded(plan, c) for c in costs)],
        ["times decoded", *(f"{c.amplification:.2f}x" for c in costs)],
        ["per reader", *(format_nbytes(c.reader_nbytes) for c in costs)],
        ["messages", *(f"{'<= ' if c.messages else ''}{c.messages:,}" for c in costs)],
        ["between ranks", *(f"{'<= ' if c.messages else ''}{format_nbytes(c.moved_nbytes)}" for c in costs)],
        ["peak host", *(format_nbytes(c.peak_nbytes) for c in costs)],
    ]
    lines = fit_table([Column(""), *ways], rows, width - 2)
    return [f"  {line}" for line in lines]


def describe_job(plan: Plan) -> str:
    """The plan as the text that ranks compare: every rank must have planned the same."""
    schedule, shards = plan.schedule, plan.schedule.shards
    halo = f", halo {shards.halo}" if shards.has_halo else ""
    return (
        f"{plan.readers} of {plan.shape} {plan.dtype} as {plan.shape_global}, blocks {schedule.blocks}, {schedule.owners} of "
        f"{schedule.n_ranks} ranks, shards {shards.cuts} on ranks {shards.describe_ranks()}{halo}"
    )
