"""How is a file copied into another layout or format, by many ranks, whatever its size? In rounds, without devices.

1. Rank 0 finds the arrays, and what is asked of the new file (`request`).
2. All ranks plan the same slabs and rounds (`plan_copy`, `planning.copying`).
3. In each round a rank reads its slabs, or its piece of one that all ranks read together (`CopySource`). A `FileTarget` encodes
   and writes the chunks of the target meanwhile.

A round's slabs are arrays of their own for the engine: with blocks, and with pieces on one rank (`plan_direct`: nothing is
sent) or on all (`plan_shared`: each chunk is read by one rank, which sends parts to others).

JAX is not needed, and not imported.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from operator import itemgetter
from typing import Any, cast

import numpy as np

from shardload.comm.group import Group, Topology
from shardload.comm.mpi import HOW_ALONE, HOW_WITHOUT_MPI, mpi_is_off, refuse_singletons
from shardload.comm.store import jax_processes
from shardload.engine.call import Call, begin_request, warn_all
from shardload.engine.file_source import FileMove, FileSource
from shardload.engine.file_target import Chunk, FileTarget, WriteCounts
from shardload.engine.session import Round, Session, shared_nbytes
from shardload.errors import ConfigError, LeftOutWarning, printable
from shardload.formats.contract.format import Source
from shardload.formats.likeness import KEEP
from shardload.formats.sink import Sink
from shardload.jobs.consistency import SINCE_FOUND, ArrayToRead, KeptSources, check_same_objects
from shardload.jobs.copying.request import CopyRequest, SourceArray, find, new_sink
from shardload.jobs.progress import progress_of
from shardload.options import AUTO, CHECKSUM, DEFAULTS, TIMEOUT, Progress
from shardload.planning.copying import CopiedArray, SlabLayout, plan_copy_rounds, plan_slab_layout
from shardload.planning.region import Grid, Region
from shardload.planning.saving import page_nbytes, plan_rows
from shardload.planning.schedule import Owners, SourceLayout, plan_direct, plan_shared
from shardload.planning.shards import Shards
from shardload.planning.staging import RoundMemory, least_memory, least_staging, plan_memory, plan_staging, threads_that_write
from shardload.storage.remote import is_remote, without_secrets
from shardload.units import PrintedReport, counted, format_nbytes, number_text

_STAGING_NBYTES = 512 << 20  # with staging="auto"
_BLOCKS_IN_CAP = 8
_MOST_OPEN = 64  # sources
_LEAST_READING_NBYTES = 4 << 20
_RUN_NBYTES = 4 << 20  # of a contiguous array

Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, repr=False)
class CopyPlan(PrintedReport):
    """What a copy will do, the same on all ranks.

    Attributes
    ----------
    target : str
        The new file.
    sources : tuple of SourceArray
        The arrays, with their specs in the target as it will be.
    arrays : tuple of SlabLayout
        Their slabs.
    memory : RoundMemory
        How a rank uses its staging memory.
    staging_nbytes : int
        The cap.
    n_ranks : int
        Ranks.
    notes : tuple of str
        What is left out.
    """

    target: str
    sources: tuple[SourceArray, ...]
    arrays: tuple[SlabLayout, ...]
    memory: RoundMemory
    staging_nbytes: int
    n_ranks: int
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all values in memory."""
        return sum(copied.nbytes for copied in self.arrays)

    def __str__(self) -> str:
        """Text for people, of several lines."""
        arrays, ranks = counted(len(self.sources), "array"), counted(self.n_ranks, "rank")
        lines = [f"copy of {arrays}, {format_nbytes(self.nbytes)}, to '{printable(self.target)}' on {ranks}"]
        for array, slab_layout in zip(self.sources, self.arrays, strict=True):
            slabs = slab_layout.slabs
            way = "all ranks read a slab together" if slab_layout.is_together else "each slab is read by one rank"
            if slabs.n_cells == 1 and not slab_layout.is_together:
                way = "one rank reads it"
            elif slabs.n_cells:
                way += f", {slabs.n_cells} slabs of {_text(tuple(map(min, slabs.cell, slabs.shape)))}"
            spec, chunks = array.spec, f"chunks {_text(array.info.chunks)} -> {_text(array.spec.chunks)}"
            lines.append(f"{printable(array.name)}: {_text(spec.shape)} {spec.dtype}, {chunks}; {way}")
            if slab_layout.array.is_decoded and slab_layout.factor > 1:
                lines.append(
                    f"  each chunk of the source is decoded {number_text(slab_layout.factor, 2)} times: slabs with whole "
                    "chunks of both do not fit. More staging= or more ranks make it less"
                )
            elif slab_layout.array.is_decoded:
                lines.append("  each chunk of the source is decoded once")
        memory = self.memory
        lines.append(
            f"memory of a rank: at most {format_nbytes(memory.nbytes)} of {format_nbytes(self.staging_nbytes)}, "
            f"{format_nbytes(memory.round_nbytes)} a round"
        )
        return "\n".join([*lines, *map(printable, self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON's types."""
        arrays = [
            {
                "name": array.name,
                "source": array.info.dataset,
                "shape": array.spec.shape,
                "dtype": str(array.spec.dtype),
                "chunks_before": array.info.chunks,
                "chunks": array.spec.chunks,
                "shards": array.spec.shards,
                "slab": slab_layout.slabs.cell,
                "n_slabs": slab_layout.slabs.n_cells,
                "is_together": slab_layout.is_together,
                "decoded": slab_layout.factor,
            }
            for array, slab_layout in zip(self.sources, self.arrays, strict=True)
        ]
        sizes = {"nbytes": self.nbytes, "staging_nbytes": self.staging_nbytes, "memory_nbytes": self.memory.nbytes}
        return {"arrays": arrays, **sizes, "n_ranks": self.n_ranks, "notes": self.notes}


def _text(shape: Sequence[int] | None) -> str:
    return "in one piece" if shape is None else " x ".join(map(str, shape)) or "scalar"


def plan_copy(
    request: CopyRequest, sources: Sequence[SourceArray], sink: Sink, n_ranks: int, machine: Topology, notes: Sequence[str] = ()
) -> CopyPlan:
    """The plan of a copy. ConfigError if it does not fit into the staging memory."""
    page = page_nbytes(machine.n_nodes)
    units, reading = [], _LEAST_READING_NBYTES
    arrays = tuple(replace(array, spec=sink.arrays[array.name].spec) for array in sources)
    for array in arrays:
        spec, layout = array.spec, array.layout()
        if spec.chunks is None:
            unit, fits = plan_rows(spec.shape, layout.dtype.itemsize, _RUN_NBYTES, page)
        else:
            # A file that has chunks at any byte is written by one rank if there are several nodes.
            unit = spec.shards if spec.shards is not None and machine.n_nodes > 1 else spec.chunks
            fits = True
        chunks = layout.chunks if array.info.chunks is not None else _runs(layout)
        units.append(CopiedArray(spec.shape, unit, chunks, array.info.chunks is not None, layout.dtype.itemsize, not fits))
        reading = max(reading, least_staging(layout))
    name, largest = max(((array.name, unit.unit_nbytes) for array, unit in zip(arrays, units, strict=True)), key=itemgetter(1))
    least = least_memory(largest, largest, reading)
    staging = max(_STAGING_NBYTES, least)
    if request.options.staging != AUTO:
        reason = (
            f"what a rank writes at once of '{name}' is {format_nbytes(largest)} (a chunk, a file of chunks, or some rows), "
            f"and copying it takes {format_nbytes(least)}"
        )
        staging = request.options.staging_cap(least, reason, fix=", or smaller chunks=")
    n_threads = threads_that_write(machine.n_threads, staging, is_remote(request.target))
    memory = plan_memory(staging, largest, largest, reading, n_threads)
    slabs = tuple(plan_slab_layout(unit, n_ranks, memory.round_nbytes) for unit in units)
    return CopyPlan(without_secrets(request.target), arrays, slabs, memory, staging, n_ranks, tuple(notes))


def _runs(layout: SourceLayout) -> Grid:
    """Stand-ins for the chunks of an array that has none: runs of at most 64 KiB, which are worth a read."""
    shape = layout.chunks.shape
    cell, _ = plan_rows(shape, layout.file_dtype.itemsize, 64 << 10)
    return Grid(shape, tuple(max(1, n) for n in cell), (0,) * len(shape))


@dataclass(frozen=True, repr=False)
class CopyReport(PrintedReport):
    """What a copy did, in the whole job.

    Attributes
    ----------
    plan : CopyPlan
        What was planned.
    written : WriteCounts or None
        What was written; None if it was only planned.
    seconds : float
        On this rank.
    n_decoded : int
        Chunks of the source that were decoded.
    notes : tuple of str
        What a reader of the copy should know: what was left out, and chunks that the source does not store.
    n_resumed : int
        Chunks that an earlier job had written.
    """

    plan: CopyPlan
    written: WriteCounts | None = None
    seconds: float = 0.0
    n_decoded: int = 0
    notes: tuple[str, ...] = ()
    n_resumed: int = 0

    def __str__(self) -> str:
        """Text for a person: one line; several if it was only planned."""
        plan, written, seconds = self.plan, self.written, max(self.seconds, 1e-9)
        if written is None:
            return str(plan)
        stored, rate = format_nbytes(written.nbytes_stored), format_nbytes(int(written.nbytes / seconds))
        text = f"{counted(len(plan.sources), 'array')}, {format_nbytes(plan.nbytes)} ({stored} stored) in "
        text += f"{number_text(seconds, 3)} s, {rate}/s on {counted(plan.n_ranks, 'rank')}"
        if written.n_read_back:
            text += f"; {written.n_read_back:,} of {written.n_chunks:,} chunks read back, {written.n_decoded:,} decoded"
        return text


def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dataset: str | Sequence[str] = (),
    select: Any = None,
    dtype: Any = None,
    chunks: Any = KEEP,
    shards: Any = KEEP,
    compression: Any = KEEP,
    unlimited: Any = (),
    format: str | None = None,
    mode: str = "w-",
    staging: str | int = AUTO,
    verify: str = CHECKSUM,
    resume: bool = False,
    only_plan: bool = False,
    progress: Progress = None,
    timeout: float | None = TIMEOUT,
    comm: Any = None,
    allow_external: bool = DEFAULTS.allow_external,
    allow_filters: Any = DEFAULTS.allow_filters,
    untrusted: bool = DEFAULTS.untrusted,
    storage: Mapping[str, Any] | None = DEFAULTS.storage,
) -> CopyReport:
    """Copy a file into other chunks, another compression, another format, by all ranks: what ``shardload copy`` does.

    Names of axes, attributes and coordinates are carried over. The new file has its name only when it is whole.

    Collective: yes, over `comm`. It needs neither devices nor `initialize`.

    Parameters
    ----------
    source : str or PathLike
        The file, with or without the name of an array (``"in.h5:/rho"``); or what `concat` returns.
    target : str or PathLike
        The new file, as `path` of `save`.
    dataset : str or sequence of str
        Names of arrays, and patterns such as ``"group/*"``; by default all arrays.
    select, dtype : object, optional
        As in `load`. By names of axes, a selection counts for every array that has them.
    chunks, shards : tuple of int, "keep" or None
        A size for each axis. ``"keep"``: those of the source. None: in one piece, or without shards.
    compression : str, dict, "keep" or None
        As in `save`. ``"keep"``: that of the source. None: none.
    unlimited : str, int or tuple of them
        Axes that can grow, beside those that can in the source.
    format, mode, staging, verify, progress, timeout, comm
        As in `save`; `verify` is ``"checksum"``, ``"full"`` or ``"index"``.
    resume : bool
        True goes on with what a copy to Zarr that was killed has left.
    only_plan : bool
        True writes nothing.
    allow_external, allow_filters, untrusted, storage
        As in `load`.

    Returns
    -------
    CopyReport
        What was planned, and what was written.

    Raises
    ------
    ConfigError, SourceError, VerifyError, PeerError, StallError
        As `save` does.

    Warns
    -----
    LeftOutWarning
        What is left out (`CopyReport.notes`), before anything is written.

    Examples
    --------
    >>> import h5py, numpy as np, shardload
    >>> with h5py.File("in.h5", "w") as file:
    ...     file["rho"] = np.arange(24.0).reshape(4, 6)
    >>> report = shardload.copy("in.h5", "out.h5", chunks=(2, 3), compression="gzip", mode="w")
    >>> with h5py.File("out.h5") as file:
    ...     file["rho"].chunks, file["rho"].compression, float(file["rho"][3, 5])
    ((2, 3), 'gzip', 23.0)
    """
    arguments = {name: value for name, value in locals().items() if name not in ("only_plan", "comm")}
    started = time.perf_counter()
    read = partial(CopyRequest.check, **arguments)
    with begin_request("copy", f"copy of '{without_secrets(str(source))}'", read, comm=comm) as (call, request):
        if comm is None and call.group.size == 1 and not mpi_is_off(os.environ):
            refuse_singletons(HOW_ALONE)  # each would write the whole file
            if (n := jax_processes()[2]) > 1:
                raise ConfigError(
                    f"JAX sees {n} processes, but COMM_WORLD has size 1: each would write the whole file. {HOW_WITHOUT_MPI}. "
                    "To copy in one process alone, pass comm=MPI.COMM_SELF"
                )
        sink, plan = _plan(call, request)
        if only_plan:
            return CopyReport(plan, notes=plan.notes)
        if plan.notes:
            warn_all(f"'{printable(plan.target)}': {'; '.join(plan.notes)}", LeftOutWarning, call.group)
        return _copy(call, request, sink, plan, started)


def _plan(call: Call, request: CopyRequest) -> tuple[Sink, CopyPlan]:
    """Rank 0 looks for the arrays, all ranks plan. Collective: yes."""
    group, n_nodes = call.group, call.group.machine.n_nodes
    on_root: list[Sink] = []

    def look() -> tuple[list[SourceArray], list[str]]:
        arrays, groups, notes = find(request)
        try:
            on_root.append(new_sink(request, arrays, groups, n_nodes))
        except ConfigError as error:
            is_as_stored = (request.dtype, request.chunks, request.shards, request.compression) == (None, KEEP, KEEP, KEEP)
            has_others = is_as_stored and not request.dataset and len(arrays) > 1  # that the new format may hold
            fix = ". Or name the arrays to copy, those alone, with dataset=" if has_others else ""
            raise ConfigError(f"{error}{fix}") from None
        copied = [array for array in arrays if not array.is_text]  # of which other ranks need no labels and attributes
        return [replace(a, info=replace(a.info, labels=None), spec=replace(a.spec, attrs={})) for a in copied], notes

    def make(arrays_and_notes: tuple[list[SourceArray], list[str]]) -> tuple[Sink, CopyPlan]:
        arrays, notes = arrays_and_notes
        sink = on_root[0] if on_root else new_sink(request, arrays, None, n_nodes)
        return sink, plan_copy(request, arrays, sink, group.size, group.machine, notes)

    return call.plan(look, make, lambda sink_and_plan: json.dumps(sink_and_plan[-1].to_dict(), default=str))


def _copy(call: Call, request: CopyRequest, sink: Sink, plan: CopyPlan, started: float) -> CopyReport:
    """Copy what was planned. Collective: yes."""
    group, notes, memory = call.group, list(plan.notes), plan.memory
    done, n_done = find_done(group, sink, plan) if request.resume else [], 0
    if request.resume:
        n_done, n_all = (sum(int(count(flags)) for flags in done) for count in (np.count_nonzero, np.size))
        resumed = f"{n_done:,} of {n_all:,} chunks were there already, and were not read back"
        notes += [resumed if n_done else "no chunk was left of an earlier copy, so this one began anew"]
    source = CopySource(group, request, plan, done)
    together = takewhile(lambda round_: round_.is_shared, source.rounds())
    shared = max((shared_nbytes(round_.staging) for round_ in together), default=None)
    options, (n_rounds, nbytes) = request.options, source.totals()
    with (
        progress_of(options.progress, f"copy to {request.target}", nbytes, group.rank) as advance,
        source.kept,
        Session(group, f"{call.invocation.digest:016x}", shared_nbytes=shared, checksums=options.checksums) as session,
        FileTarget(
            session,
            sink,
            round_nbytes=memory.round_nbytes,
            verify=options.verify,
            n_threads=memory.n_threads,
            on_progress=advance,
        ) as target,
    ):
        target.begin()
        session.run_own(source.rounds(), n_rounds, source, target)
        with session.errors:
            source.kept.check_unchanged()
        check_same_objects(group, source.kept.versions_read)
        written = target.end()
    n_decoded, *missing = group.agree(None, [source.n_decoded, *source.n_missing])
    not_stored = [
        f"{counted(n, 'chunk')} of {array.info} {'are' if n != 1 else 'is'} not stored, and the copy has the fill value"
        for array, n in zip(plan.sources, missing, strict=True)
        if n
    ]
    seconds = time.perf_counter() - started
    return CopyReport(plan, written, seconds, n_decoded, (*notes, *not_stored), n_done)


# --- what one rank reads


class CopySource(FileSource):
    """The source of a copy on one rank, and its rounds. Files and arrays stay open from round to round.

    Parameters
    ----------
    group : Group
        The ranks.
    request : CopyRequest
        What is asked for.
    plan : CopyPlan
        What is copied.
    done : sequence of ndarray
        Of each array which chunks of the target are there already; empty if none are.

    Attributes
    ----------
    n_decoded : int
        Chunks that this rank has decoded.
    n_missing : list of int
        For each array, those of them that are not stored.
    kept : KeptSources
        The open arrays.
    """

    def __init__(self, group: Group, request: CopyRequest, plan: CopyPlan, done: Sequence[Bools]) -> None:
        super().__init__(group.rank, request.options.checksums)
        self._n_ranks, self._request, self._plan, self._done = group.size, request, plan, done
        self._n_threads = group.machine.n_threads  # that decode
        self._grids: list[Grid] = []  # each array cut into what is written as a chunk
        for array, slab_layout in zip(plan.sources, plan.arrays, strict=True):
            cell = tuple(max(1, n) for n in array.spec.chunks or slab_layout.array.unit)
            self._grids.append(Grid(array.spec.shape, cell, (0,) * len(cell)))
        path, access = request.source, request.options.access
        arrays = [ArrayToRead(path, array.info, access, array.state) for array in plan.sources]
        self.kept = KeptSources(arrays, SINCE_FOUND)
        self.n_decoded = 0
        self.n_missing = [0] * len(plan.sources)

    def open(self, moves: Sequence[FileMove], opened: ExitStack) -> list[Source | None]:
        """See `FileSource`."""
        opened.callback(self.kept.close_first, _MOST_OPEN)
        opened.callback(self._count, moves)
        return [self.kept.open(move.array) for move in moves]

    def _count(self, moves: Sequence[FileMove]) -> None:
        for move in moves if all(move.producer for move in moves) else ():
            self.n_decoded += move.producer.counters.chunks_decoded if move.layout.has_chunks else 0
            self.n_missing[move.array] += move.producer.counters.chunks_missing

    # --- rounds

    def slabs(self) -> Iterator[tuple[list[tuple[int, Region]], bool]]:
        """For each round, its slabs, each with the number of its array; and whether all ranks read them together."""
        plan = self._plan
        rounds = plan_copy_rounds(plan.arrays, self._n_ranks, plan.memory.round_nbytes, self._rank)
        for items, is_together in rounds:
            slabs = [(item.array, plan.arrays[item.array].slabs.region(number)) for item in items for number in item.units]
            slabs = [(array, slab) for array, slab in slabs if not self._is_done(array, slab)]
            if slabs:
                yield slabs, is_together

    def totals(self) -> tuple[int, int]:
        """How many rounds there are, and about how many bytes this rank writes in them."""
        n_rounds = total = 0
        for slabs, is_together in self.slabs():
            nbytes = sum(slab.size * self._plan.arrays[array].array.itemsize for array, slab in slabs)
            total += nbytes // self._n_ranks if is_together else nbytes
            n_rounds += 1
        return n_rounds, total

    def rounds(self) -> Iterator[Round]:
        """The rounds of this rank."""
        memory = self._plan.memory
        for slabs, is_together in self.slabs():
            moves = [self._move(array, slab, is_together) for array, slab in slabs]
            layouts = [(move.flow, move.layout) for move in moves]
            staging = plan_staging(layouts, memory.moving_nbytes, min(memory.n_threads, self._n_threads))
            yield Round(moves, staging, is_together, partial(self._chunks, moves, [slab for _, slab in slabs]))

    def _move(self, array: int, slab: Region, is_together: bool) -> FileMove:
        layout = self._plan.sources[array].layout(slab)
        most = self._plan.memory.moving_nbytes // _BLOCKS_IN_CAP
        if is_together:
            shards = self._plan.arrays[array].pieces(slab, self._n_ranks)
            schedule = plan_shared(layout, shards, self._n_ranks, Owners(self._n_ranks), max_nbytes=most)
        else:
            shards = Shards(slab.shape, (1,) * slab.ndim, np.array([[self._rank]], dtype=np.int64))
            schedule = plan_direct(layout, shards, self._n_ranks, max_nbytes=most)
        info, is_cut = self._plan.sources[array].info, [start > 0 for start in slab.start]
        return FileMove(array, schedule, layout.dtype, str(info), info=info, layout=layout, is_cut=is_cut)

    def _chunks(self, moves: Sequence[FileMove], slabs: Sequence[Region]) -> Iterator[Chunk]:
        """The chunks of the target that lie in this rank's pieces of slabs."""
        for move, slab in zip(moves, slabs, strict=True):
            chunks = self._grids[move.array]
            for piece in move.targets.values():
                for region in map(chunks.region, chunks.meeting(piece.region.moved(slab.start))):
                    if not self._is_done(move.array, region):
                        values = piece.view(region.moved(tuple(-start for start in slab.start)))
                        yield Chunk(self._plan.sources[move.array].name, region, values)

    def _is_done(self, array: int, region: Region) -> bool:
        """Whether all chunks of the target that meet a region are there already."""
        if not self._done:
            return False
        box = tuple(slice(axis.start, axis.stop) for axis in self._grids[array].meeting_axes(region))
        return bool(self._done[array][box].all())


def find_done(group: Group, sink: Sink, plan: CopyPlan) -> list[Bools]:
    """For each array, which of its chunks a job that was killed has left; an empty list if it left nothing. Collective.

    Raises
    ------
    ConfigError
        If what is left is of something else, another job is writing it, or files like this one begin anew.
    """
    group.watch.enter("look at what is there")

    def look() -> bytes:
        is_there = sink.take_up()
        done = [] if is_there is None else [is_there[array.name].reshape(array.spec.grid) for array in plan.sources]
        return pickle.dumps(done)

    return cast(list[Bools], pickle.loads(group.tell(look, 0)))  # of a rank of this job, never of a file
