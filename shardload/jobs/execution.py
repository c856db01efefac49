"""What will a load do, and how is it done?

A `Plan` is what the caller inspects, prints and executes. Executing it is one line: open and make room, agree, read and
exchange, assemble, agree.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from zlib import crc32

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardload.arrays.assemble import EarlyPieces, assemble
from shardload.arrays.sharding import devices_of_regions
from shardload.arrays.verification import Found, Verifier, VerifyHow, VerifyReport
from shardload.comm.group import Group, Invocation
from shardload.comm.shared_memory import Bell, Segment
from shardload.errors import ConfigError, SourceError, StallError
from shardload.formats.base import ArrayInfo, Source
from shardload.formats.lookup import open_source
from shardload.formats.memory import MemorySource
from shardload.formats.untrusted import UntrustedSource
from shardload.jobs.consistency import N_SUMS, State, check_same, check_unchanged, contents_of, is_open, to_sums
from shardload.jobs.describe import describe_plan, describe_plan_as_html, describe_plan_in_a_line
from shardload.jobs.picture import draw_shards
from shardload.jobs.progress import progress_of
from shardload.jobs.report import LoadReport, Phase, make_report
from shardload.options import Options, pad_value
from shardload.planning.cost import Cost
from shardload.planning.schedule import Grid, Schedule
from shardload.planning.selection import Selection
from shardload.planning.source_layout import SourceLayout
from shardload.planning.staging import Staging
from shardload.system.interruption import let_interruption_pass, outer_exception
from shardload.system.terminal import width_of_prints
from shardload.transfer import tuning
from shardload.transfer.allocator import empty_pieces
from shardload.transfer.buffers import Piece, Slots, aligned, fill_padding
from shardload.transfer.exchange import exchange
from shardload.transfer.local_pieces import LocalPieces
from shardload.transfer.missing import counter_of, describe_missing, fold_first, settle_missing, unfold_first
from shardload.transfer.reader import SourceReader
from shardload.transfer.resources import Resources

__all__ = ["Job", "LoadReport", "Phase", "Plan", "VerifyReport"]

_log = logging.getLogger("shardload")
_WORTH_SHARING_NBYTES = 1 << 16  # smaller blocks go as messages: MPI has them there in microseconds
_MOST_TOLD = 4096  # devices that are named in a picture; of more, JAX's list takes longer than a reader will wait


@dataclass(eq=False, repr=False)
class Plan:
    """What a load will do: inspect it, print it, `execute` it.

    Attributes
    ----------
    info : ArrayInfo
        The array in the file: name, format, shape, dtype, chunks, codec.
    shape, shape_global : tuple of int
        The true shape that is loaded (after `select`), and the shape of the jax.Array (padded, where it was padded).
    dtype : dtype
        Of the jax.Array.
    sharding : NamedSharding
        Of the jax.Array.
    decomposition : str
        ``"slab"``, ``"pencil"``, ``"block"``, ``"replicated"`` or ``"whole"``.
    shard_shape : tuple of int
        What one device holds.
    n_replicas : int
        Devices that hold each shard.
    n_ranks : int
        Ranks that take part.
    readers : str
        The way of reading that is taken: ``"root"``, ``"parallel"`` or ``"direct"``.
    n_readers : int
        Ranks that read.
    why : str
        Why this way.
    costs : mapping of str to Cost
        For each way of reading: chunks decoded, amplification, messages, bytes, memory, estimated seconds.
    staging_nbytes : int
        The cap on host memory beyond the pieces.
    report : LoadReport or None
        What happened, after `execute`.
    """

    info: ArrayInfo
    shape: tuple[int, ...]
    shape_global: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: NamedSharding
    decomposition: str
    shard_shape: tuple[int, ...]
    n_replicas: int
    n_ranks: int
    readers: str
    n_readers: int
    why: str
    costs: Mapping[str, Cost]
    staging_nbytes: int
    report: LoadReport | None = field(default=None, init=False)
    _job: Job = field(repr=False, kw_only=True)

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The file's chunk shape; None where it has no chunks."""
        return self.info.chunks

    @property
    def schedule(self) -> Schedule:
        """Who reads what, and who needs which part of it: region by region."""
        return self._job.schedule

    def __str__(self) -> str:
        """For a person: fits the terminal that is printed to; exactly the same on all ranks where that is none."""
        return describe_plan(self, width_of_prints())

    def __repr__(self) -> str:
        """One line."""
        return describe_plan_in_a_line(self)

    def _repr_html_(self) -> str:
        """For a notebook: the facts, a picture of which device holds what, and the costs."""
        devices = None
        if not isinstance(self.sharding.mesh, jax.sharding.AbstractMesh) and self.sharding.mesh.size <= _MOST_TOLD:
            devices = devices_of_regions(self.sharding, self.shape_global)
        return describe_plan_as_html(self, draw_shards(self.schedule.shards, devices))

    def execute(self) -> jax.Array:
        """Do it. Collective: yes, over the ranks that planned. May be called again.

        Returns
        -------
        jax.Array
            See `load`.

        Raises
        ------
        SourceError, PeerError, ConfigError
            On every rank.
        """
        return self._report(self._job.run)

    def execute_here(self) -> jax.Array:
        """The same inside the call that made the plan. Collective."""
        return self._report(self._job.run_here)

    def _report(self, run: Callable[[Plan], tuple[jax.Array, LoadReport]]) -> jax.Array:
        started = time.perf_counter()
        array, found = run(self)
        self.report = replace(found, seconds=time.perf_counter() - started)
        _log.info("loaded %s: %s", self.info, self.report)
        return array


@dataclass(frozen=True, eq=False)
class _Ready:
    """What one rank has opened and made for one load."""

    pieces: dict[int, Piece]
    reader: SourceReader
    slots: Slots
    bell: Bell
    early: EarlyPieces
    advance: Callable[[int], None] | None
    source: Source | None
    state: State  # of the source, when it had been opened
    contents: State  # what tells the caller's array from another rank's


@dataclass(eq=False)
class Job:
    """What `Plan.execute` needs and nobody looks at.

    Attributes
    ----------
    group : Group or None
        The ranks; None for an abstract mesh, which cannot be executed.
    handle : object
        A path, an open array, or a source in memory (None on the ranks that do not have it).
    staging : Staging
        How its memory is shared out.
    origin : object
        What opens the file, where `handle` holds its values already.
    agreed : mapping of str to str
        What all ranks passed and planned alike: which plan this is.
    """

    group: Group | None
    options: Options
    schedule: Schedule
    selection: Selection
    chunks: Grid
    has_chunks: bool
    dtype: np.dtype[Any]
    handle: Any
    staging: Staging
    origin: Any = None
    agreed: Mapping[str, str] = field(default_factory=dict)

    def layout(self, info: ArrayInfo) -> SourceLayout:
        """How the array lies in its file."""
        return SourceLayout(self.selection, self.chunks, info.chunks, np.dtype(info.dtype), self.dtype, info.codec)

    def verifier(self, info: ArrayInfo, seed: int = 0) -> Verifier:
        """What compares an array with the file that this plan is for."""
        return Verifier(
            str(info),
            self.schedule,
            self.layout(info),
            VerifyHow(self.options.verify, self.options.staging_nbytes, self.options.pad, seed),
            open_again=lambda: _open(self.handle if self.origin is None else self.origin, info, self.options),
        )

    def run(self, made: Plan) -> tuple[jax.Array, LoadReport]:
        """Agree on which plan it is, then `run_here`. Collective."""
        group = self._ranks()
        with outer_exception(), group.call(self.options.timeout) as refusal:
            asked = Invocation("execute", f"execute() of the plan for {made.info}", self.agreed)
            group.watch.begin(str(made.info), self.options.timeout)
            group.settle(asked, refusal)
            return self._run(made, group)

    def run_here(self, made: Plan) -> tuple[jax.Array, LoadReport]:
        """Open and make room, agree, read and exchange, assemble, agree. Collective; inside a call of all ranks."""
        group = self._ranks()
        group.watch.begin(str(made.info), self.options.timeout)
        return self._run(made, group)

    def verify(self, info: ArrayInfo, array: jax.Array, seed: int) -> VerifyReport:
        """Compare an array with the file. Collective; inside a call of all ranks."""
        group = self._ranks()
        state, error = None, None
        group.watch.begin(str(info), self.options.timeout)
        group.watch.enter("verify")
        if is_open(self.handle):
            try:
                state = self._contents(info)
            except Exception as found:
                let_interruption_pass(found)
                error = found
        check_same(str(info), group.agree(error, to_sums(state)), info.path, info.dataset, is_open=True)
        proven = self.verifier(info, seed).run(group, array)
        group.watch.close()
        return proven

    def _ranks(self) -> Group:
        if self.group is None:
            raise ConfigError(
                "an AbstractMesh has no devices, so there is nothing to execute this plan on: plan over a jax.sharding.Mesh"
            )
        return self.group

    def _run(self, made: Plan, group: Group) -> tuple[jax.Array, LoadReport]:
        tags = group.next_tags()  # counted on every rank, also on one that fails before it exchanges anything
        is_direct = self.schedule.is_direct
        segments = group.shared_memory(self._shared_nbytes(group.rank)) if self._shares() else {}
        array, report, checked, held = None, None, Found(), {}
        error: BaseException | None = None
        ready: _Ready | None = None
        opened = ExitStack()
        try:
            group.watch.enter("open")
            try:
                ready = self._get_ready(made, group.rank, segments.get(group.rank), opened)
            except Exception as found:
                let_interruption_pass(found)
                error = found
            if not is_direct:
                group.agree(error)  # a rank that cannot read or receive must say so before anything is sent
            if ready is not None:
                held = {piece.region: piece.data for piece in ready.pieces.values()}
                try:
                    array, report, error = self._fill(made, ready, group, tags, segments)
                    if error is None and ready.source is not None:
                        check_unchanged(str(made.info), ready.state, ready.source.state(), made.info.path, made.info.dataset)
                except StallError:
                    raise  # the ranks agree on nothing any more, and what is open may be in use for ever
                except Exception as found:
                    let_interruption_pass(found)
                    error = found
        except BaseException:
            with suppress(Exception):  # what is raised already is the better reason
                opened.__exit__(*sys.exc_info())
            raise
        try:
            opened.close()
        except Exception as found:  # the others still wait for what this rank says of the load
            let_interruption_pass(found)
            error = error or found
        verifier = self.verifier(made.info)
        if array is not None and error is None:
            group.watch.enter("verify")
            try:
                checked = verifier.check(array, group.rank, held)
            except Exception as found:
                let_interruption_pass(found)
                error = found
        group.watch.enter("agree")
        counts = [0] * 4
        if report is not None:
            counts = [report.chunks_decoded, report.nbytes_read, report.chunks_missing, report.proven.n_parts]
        seen = to_sums(None if ready is None else ready.contents)
        n_chunks, nbytes, n_missing, n_parts, *sums = group.agree(error, counts + seen + checked.counts)
        if array is None or report is None or ready is None:
            raise ConfigError("nothing was loaded")
        seen, sums = sums[:N_SUMS], sums[N_SUMS:]
        check_same(str(made.info), seen, made.info.path, made.info.dataset, is_open=is_open(self.handle))
        proven = verifier.agree(group, checked, sums, n_parts)
        if n_missing:
            self._settle_missing(made.info, group, n_missing, ready.reader.counters.missing)
        group.watch.close()
        return array, replace(report, chunks_decoded=n_chunks, nbytes_read=nbytes, chunks_missing=n_missing, proven=proven)

    def _settle_missing(self, info: ArrayInfo, group: Group, n: int, found: list[int]) -> None:
        """Warn or raise, as the caller asked, now that all ranks know how many chunks are not stored. Collective."""
        if self.options.missing != "fill":
            first = unfold_first([int(v) for v in group.least_ints(np.array(fold_first(found), dtype=np.int64))])
            text = describe_missing(n, first, info, self.selection, self.chunks)
            settle_missing(text, self.options.missing, group.rank, info)

    def _shares(self) -> bool:
        """Whether the ranks of a machine hand blocks over in shared memory."""
        plan = self.schedule
        return not plan.is_direct and plan.max_block_size * plan.itemsize >= _WORTH_SHARING_NBYTES

    def _shared_nbytes(self, rank: int) -> int:
        return self.staging.n_slots * aligned(self.staging.slot_nbytes) if self.schedule.is_owner(rank) else 0

    def _get_ready(self, made: Plan, rank: int, own: Segment | None, opened: ExitStack) -> _Ready:
        """Open and make all that the exchange needs, so that what cannot be had is known before others wait for it."""
        staging = self.staging
        bell = Bell() if own is None else own.bell
        source = self._open(made.info, rank)
        state = None if source is None else source.state()
        contents = self._contents(made.info) if is_open(self.handle) else state
        if source is not None and source is not self.handle:
            opened.push(partial(_close, source))
        pieces = self._make_pieces(rank)
        slots = Slots(staging.n_slots, staging.slot_nbytes, own.data if own is not None and self._shared_nbytes(rank) else None)
        resources = opened.enter_context(Resources(slots, bell, staging.n_threads))
        reader = SourceReader(
            source or _nothing_to_read(made.info),
            self.layout(made.info),
            LocalPieces(rank, pieces, self.options.checksums),
            resources,
            tuning=tuning.TUNING,
            counts=counter_of(self.schedule, rank),
        )
        opened.enter_context(reader)
        if isinstance(source, UntrustedSource):
            opened.push(partial(_end_helpers, source))  # before the reader waits for its threads, which wait for them
        early = EarlyPieces(made.shape_global, made.sharding)
        total = sum(p.data.nbytes for p in pieces.values())
        advance = opened.enter_context(progress_of(self.options.progress, str(made.info), total, rank))
        return _Ready(pieces, reader, slots, bell, early, advance, source, state, contents)

    def _contents(self, info: ArrayInfo) -> State:
        """What tells the array that the caller has opened from that of another rank."""
        with closing(_open(self.handle, info, self.options)) as source:
            return contents_of(source, self.handle, self.selection, self.chunks if self.has_chunks else None)

    def _open(self, info: ArrayInfo, rank: int) -> Source | None:
        """The source, on the ranks that read; it must be what the plan was made for."""
        if not self.schedule.is_owner(rank):
            return None
        if isinstance(self.handle, MemorySource):
            return self.handle
        return _open(self.handle, info, self.options)

    def _fill(
        self, made: Plan, ready: _Ready, group: Group, tags: tuple[int, int, int], segments: Mapping[int, Segment]
    ) -> tuple[jax.Array | None, LoadReport | None, BaseException | None]:
        """Read, exchange, assemble. What goes wrong is returned: the ranks still have to agree on it."""
        pieces, early = ready.pieces, ready.early
        failed, moved = exchange(
            group,
            self.schedule,
            ready.reader,
            pieces,
            tags=tags,
            dtype=self.dtype,
            slots=ready.slots,
            pack_slots=Slots(self.staging.n_pack, self.staging.pack_nbytes),
            segments=segments,
            bell=ready.bell,
            checksums=self.options.checksums,
            on_progress=ready.advance,
            on_piece=lambda piece: early.start(piece.region, piece.data),
            seed=crc32(json.dumps([*self.agreed.items(), *tags]).encode()),
        )
        array, seconds = None, 0.0
        if failed is None:
            group.watch.enter("assemble")
            started = time.perf_counter()
            held = ((p.region, p.data) for p in pieces.values())
            array = assemble(made.shape_global, made.sharding, self.dtype, held, early)
            seconds = time.perf_counter() - started
        device = Phase(seconds, sum(p.data.nbytes for p in pieces.values()))
        return array, make_report(ready.reader.counters, moved, device), failed

    def _make_pieces(self, rank: int) -> dict[int, Piece]:
        """Buffers for this rank's shards; the padded tails are filled, the rest is to be written by the exchange."""
        pieces = {}
        numbers = list(self.schedule.shards.shards_of(rank))
        regions = [self.schedule.shards.region(shard) for shard in numbers]
        for shard, region, data in zip(numbers, regions, empty_pieces([r.shape for r in regions], self.dtype), strict=True):
            piece = Piece(region, data)
            held = self.schedule.true_region(shard)
            if held != region:
                fill_padding(piece, held, pad_value(self.options.pad, self.dtype) if region.size else 0)
            pieces[shard] = piece
        return pieces


def _open(handle: Any, info: ArrayInfo, options: Options) -> Source:
    """The array of a file, which must be what the plan was made for."""
    source = open_source(handle, info.dataset, options.allow_external, options.allow_filters, options.limits)
    found = source.info
    if (found.shape, found.dtype, found.chunks) != (info.shape, info.dtype, info.chunks):
        source.close()
        raise SourceError(
            f"{found} has shape {found.shape}, {found.dtype}, chunks {found.chunks} here, but the plan was made for "
            f"{info.shape}, {info.dtype}, {info.chunks}: the file has changed, or this rank sees another file",
            path=info.path,
            dataset=info.dataset,
        )
    return source


def _close(source: Source, kind: type[BaseException] | None, *_: object) -> None:
    """Close, unless a thread may be held up in a read of it: the library would wait for that thread."""
    if kind is None or not issubclass(kind, StallError):
        source.close()


def _end_helpers(source: UntrustedSource, kind: type[BaseException] | None, *_: object) -> None:
    """Nobody wants their answers any more: after a stall or Ctrl-C, say."""
    if kind is not None:
        source.close()


def _nothing_to_read(info: ArrayInfo) -> Source:
    """A source for a rank that reads nothing."""
    return MemorySource(np.empty((0,) * len(info.shape), dtype=np.dtype(info.dtype)))
