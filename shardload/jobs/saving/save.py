"""How are arrays saved? The steps of one call, from its arguments to its report.

1. Each rank checks its arguments and plans the file (`plan`). All compare both, in the messages with which every call
   begins.
2. Replicas are compared.
3. In rounds, parts travel from the shards to the owners of chunks, by the exchange that loads use (`PiecesToBlocks`). What an
   owner holds itself does not travel.
4. `FileTarget` encodes and writes the chunks of these rounds, reads the file back, and gives it its name.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 (see `_wait_at_exit`)
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from shardload.arrays.local_shards import DeviceSource, LocalShards, check_replicas
from shardload.comm.group import Group
from shardload.comm.mpi import call_before_finalize, check_threads
from shardload.engine.call import begin_request, warn_all, watched
from shardload.engine.file_target import Chunk, FileTarget, WriteCounts
from shardload.engine.session import Round, Session, shared_nbytes
from shardload.errors import ConfigError, LeftOutWarning, PaddingWarning, ShardloadError
from shardload.jobs.progress import progress_of
from shardload.jobs.saving.arguments import SaveRequest
from shardload.jobs.saving.like import read_like
from shardload.jobs.saving.plan import SavePlan, plan_file
from shardload.options import INDEX
from shardload.planning.region import Region, aligned
from shardload.planning.saving import count_packs, part_nbytes
from shardload.planning.staging import Item, Staging
from shardload.planning.tuning import default_tuning
from shardload.system.garbage import let_go
from shardload.transfer.counters import Counters
from shardload.transfer.moves import ArrayMove, PiecesToBlocks
from shardload.units import PrintedReport, counted, format_nbytes, number_text

_log = logging.getLogger("shardload")

_unfinished: list[BackgroundSave] = []  # and those that have failed without a `wait`
os.register_at_fork(after_in_child=_unfinished.clear)  # a fork does not have their threads

Array = np.ndarray[Any, Any]

_NOTHING_SAVED = (
    "Nothing was saved, because nobody knows which of them are right. Was the array made from data that differed from process "
    "to process?"
)


@dataclass(frozen=True, repr=False)
class SaveReport(PrintedReport, WriteCounts):
    """What a save did.

    Attributes
    ----------
    path, format : str
        The new file.
    seconds : float
        Seconds on this rank.
    n_arrays, n_chunks : int
        Arrays, and chunks of them (a part of a contiguous array counts as a chunk), in the whole job.
    nbytes, nbytes_stored : int
        Bytes of the values, and of the stored chunks, in the whole job.
    nbytes_sent : int
        Bytes of parts that this rank got from others.
    n_read_back, n_decoded : int
        Chunks of which another rank read the stored bytes back, and of which it decoded the values. All were as written.
    n_rounds : int
        Rounds.
    phases : mapping of str to float
        Seconds of this rank: ``"exchange"``; ``"encode"`` and ``"write"``, summed over its threads; ``"sync"``, ``"finish"``,
        ``"read back"``. They overlap.
    """

    path: str
    format: str
    seconds: float
    n_arrays: int
    nbytes_sent: int
    n_rounds: int

    def __str__(self) -> str:
        """For a person: one line."""
        arrays = counted(self.n_arrays, "array")
        phases = "; ".join(f"{name} {number_text(seconds, 3)} s" for name, seconds in self.phases.items() if seconds >= 5e-4)
        read = f"{self.n_read_back:,} read back, {self.n_decoded:,} of them decoded" if self.n_read_back else "none read back"
        return (
            f"saved '{self.path}' ({self.format}) in {number_text(self.seconds, 3)} s: {arrays}, "
            f"{counted(self.n_chunks, 'chunk')}, {format_nbytes(self.nbytes)} as "
            f"{format_nbytes(self.nbytes_stored)}; {read}; on this rank: {phases}"
        )


@contextmanager
def planned(
    kind: str,
    path: Any,
    tree: Any,
    keywords: Mapping[str, Any],
    comm: Any,
    find: Callable[[SaveRequest], Any] = read_like,
    make: Callable[[SaveRequest, Any, Group], tuple[SaveRequest, SavePlan]] = plan_file,
) -> Iterator[tuple[Group, SaveRequest, SavePlan, str]]:
    """Check the arguments of a ``"save"``, ``"plan_save"`` or ``"append"``, plan, and agree on both. Inside, the call goes on.

    `find` reads on rank 0 what existing files say; `make` plans on every rank, and completes the request.
    """
    title = f"{'append to' if kind == 'append' else 'save as'} {path!r}"

    def read() -> SaveRequest:
        if kind != "plan_save":
            for unfinished in list(_unfinished):
                unfinished.wait()  # raises its error, if nobody has seen it
        if keywords.get("background") is True:
            check_threads(comm, "background", "background=False")
        return SaveRequest.of(path, tree, keywords, kind)

    try:
        with begin_request(kind, title, read, comm=comm, process=jax.process_index) as (call, request):
            group = call.group

            def look() -> tuple[list[str], str, Any]:
                return request.names, request.padding_warning(), find(request)

            def plan(found: tuple[list[str], str, Any]) -> tuple[str, SaveRequest, SavePlan]:
                names, padding_warning, existing = found
                places = {name: k for k, name in enumerate(names)}  # of rank 0
                ordered = sorted(request.arrays, key=lambda array: places.get(array.name, len(places)))
                return (padding_warning, *make(replace(request, arrays=ordered), existing, group))

            padding_warning, completed, save_plan = call.plan(look, plan, lambda result: result[2].describe())
            for text, category in ((padding_warning, PaddingWarning), (completed.left_out, LeftOutWarning)):
                if text:
                    warn_all(text, category, group)
            yield group, completed, save_plan, f"{call.invocation.digest:016x}"
    except BaseException as error:
        let_go(error)  # from Python 3.13 on, calls of `contextlib` that have ended keep it, and it keeps the arrays
        raise


def plan_save(path: Any, tree: Any, keywords: Mapping[str, Any], comm: Any) -> SavePlan:
    """See `shardload.plan_save`. Collective."""
    with planned("plan_save", path, tree, keywords, comm) as (_, _, plan, _):
        return plan


def save(path: Any, tree: Any, keywords: Mapping[str, Any], comm: Any) -> SaveReport | BackgroundSave:
    """See `shardload.save`. Collective."""
    started = time.perf_counter()
    with planned("save", path, tree, keywords, comm) as (group, request, plan, digest):
        abstract = [array.name for array in request.arrays if isinstance(array.x, jax.ShapeDtypeStruct)]
        if abstract:
            raise ConfigError(f"'{abstract[0]}' is a jax.ShapeDtypeStruct, which has no values: it can be planned only")
        if not request.options.background:
            return Saving(group, request, plan, digest).run(started)
        timeout = request.options.timeout
        background_group = group.duplicate()

        def write(on_copied: Callable[[], None]) -> SaveReport:
            try:
                with watched(background_group, f"save as {path!r} in the background", timeout):
                    return Saving(background_group, request, plan, digest, on_copied).run(started)
            finally:
                background_group.free()

        return BackgroundSave(plan.path, background_group.rank, write)


class BackgroundSave:
    """A save that goes on while the program computes, as `save(..., background=True)` returns it.

    Parameters
    ----------
    path : str
        The new file.
    rank : int
        This rank. Rank 0 logs an error at once, for the case that nobody waits.
    write : callable
        Saves, and returns the report. It calls the function that it gets when it needs the arrays no longer.
    """

    def __init__(self, path: str, rank: int, write: Callable[[Callable[[], None]], SaveReport]) -> None:
        self.path, self._rank = path, rank
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._are_copied, self._has_ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(write,), name="shardload-save")
        _wait_at_exit()
        _unfinished.append(self)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started, and the other ranks wait for this one
            self._run(write)
        self._are_copied.wait()

    def _run(self, write: Callable[[Callable[[], None]], SaveReport]) -> None:
        try:
            self._report = write(self._are_copied.set)
        except BaseException as error:
            let_go(error)
            self._error = error
            level = logging.DEBUG if self._rank else logging.ERROR
            _log.log(level, "the save of '%s' in the background failed: %s", self.path, error)
        finally:
            self._has_ended.set()
            self._are_copied.set()

    @property
    def is_done(self) -> bool:
        """True if the file is there, or the save has failed. Collective: no; ranks may see it at different times."""
        return self._has_ended.is_set()

    def wait(self) -> SaveReport:
        """Wait until the file is there, and return the report; or raise the error of the save, which all ranks get.

        Collective: no. A rank that never calls it takes part in the save all the same.
        """
        self._has_ended.wait()  # up to Python 3.12, a thread counts as ended after Ctrl-C in `join`
        with suppress(ValueError):  # another thread may have waited for it, too
            _unfinished.remove(self)
        if self._report is None:
            raise self._error or ShardloadError("the save has ended without a report")
        return self._report

    def __repr__(self) -> str:
        state = "done" if self.is_done else "going on"
        return f"<BackgroundSave of {self.path!r}: {'failed' if self._error is not None else state}>"


@cache
def _wait_at_exit() -> None:
    """Let the end of the program wait for the threads, while Python still gives out threads and executors: zarr takes them.

    Python waits for a thread that is no daemon, and calls what `atexit` has, only after it has closed its executors. Of what is
    registered here the last is called first: before `concurrent.futures.thread`, which registers itself when it is imported.
    """
    threading._register_atexit(_join_all)  # type: ignore[attr-defined]
    call_before_finalize(_join_all)


def _join_all() -> None:
    for save in list(_unfinished):
        save._has_ended.wait()


class Saving:
    """One rank's part of one save. Every method is collective."""

    def __init__(
        self, group: Group, request: SaveRequest, plan: SavePlan, digest: str, on_copied: Callable[[], None] | None = None
    ) -> None:
        self._group, self._request, self._plan, self._digest, self._on_copied = group, request, plan, digest, on_copied
        self._layouts, self._options = plan._layouts, request.options
        self._shards: list[LocalShards] = []
        schedules = {k: layout.schedule for k, layout in enumerate(self._layouts)}
        self._flows = {k: PiecesToBlocks(schedule) for k, schedule in schedules.items() if schedule is not None}
        self._units = {k: self._layouts[k].units_of(group.rank) for k, schedule in schedules.items() if schedule is None}
        slot_nbytes = part_nbytes(self._layouts)
        n_packs = count_packs(plan._memory.moving_nbytes, slot_nbytes)
        self._staging = Staging(n_threads=1, n_slots=0, n_pack=n_packs, slot_nbytes=slot_nbytes)

    def run(self, started: float) -> SaveReport:
        """Save the arrays, and return the report."""
        group, plan, options = self._group, self._plan, self._options
        group.watch.enter("compare replicas")
        shares = bool(self._flows) and self._staging.slot_nbytes >= default_tuning().worth_sharing_nbytes
        shared = shared_nbytes(self._staging) if shares else None
        with ExitStack() as opened:
            session = opened.enter_context(Session(group, self._digest, shared_nbytes=shared, checksums=options.checksums))
            advance: Any = None
            with session.errors:
                self._shards = [
                    LocalShards(array.x, layout.shards, group.rank)
                    for array, layout in zip(self._request.arrays, self._layouts, strict=True)
                ]
                if self._on_copied is not None:
                    for shards in self._shards:
                        shards.copy_to_host()
                    self._request.arrays[:] = [array.without_values() for array in self._request.arrays]
                    self._on_copied()
                nbytes = sum(layout.nbytes_of(group.rank) for layout in self._layouts)
                advance = opened.enter_context(progress_of(options.progress, f"'{plan.path}'", nbytes, group.rank))
            self._compare_replicas(session)
            target = FileTarget(
                session,
                plan._sink,
                round_nbytes=max(map(self._nbytes_received, plan._rounds), default=0),
                verify=options.verify,
                n_threads=plan.n_threads,
                on_progress=advance,
            )
            source = DeviceSource(self._shards, options.checksums)
            with target:
                target.begin()
                self._run(session, source, target)
                report = self._report(target.end(), session.counters, started)
        _log.info("%s", report)
        return report

    def _run(self, session: Session, source: DeviceSource, target: FileTarget) -> None:
        session.run(map(self._round, self._plan._rounds), source, target)

    def _report(self, written: WriteCounts, counters: Counters, started: float) -> SaveReport:
        return SaveReport(
            **vars(replace(written, phases={"exchange": counters.exchange_seconds, **written.phases})),
            path=self._plan.path,
            format=self._plan.format,
            seconds=time.perf_counter() - started,
            n_arrays=len(self._layouts),
            nbytes_sent=counters.nbytes_received,
            n_rounds=self._plan.n_rounds,
        )

    def _compare_replicas(self, session: Session) -> None:
        """Compare what is on several devices. VerifyError if it differs."""
        compared = [
            (k, array, layout.shards)
            for k, (array, layout) in enumerate(zip(self._request.arrays, self._layouts, strict=True))
            if layout.shards.n_replicas > 1 and (self._options.verify != INDEX or array.is_everywhere)
        ]
        replicas: list[tuple[str, Any, list[tuple[int, int]]]] = []
        if compared:
            with session.errors:
                for k, array, shards in compared:
                    replicas.append((f"'{array.name}'", shards, self._shards[k].checksums(Region.whole(array.shape))))
            session.agree()
            check_replicas(self._group, replicas, _NOTHING_SAVED)

    def _nbytes_received(self, items: Sequence[Item]) -> int:
        """Bytes of memory for the blocks that this rank gets in a round."""
        total = 0
        for flow in (self._flows[item.array].in_round(item.units) for item in items if item.array in self._flows):
            blocks, itemsize = flow.schedule.blocks, flow.schedule.itemsize
            total += sum(aligned(blocks.region(block).size * itemsize) for block in flow.targets(self._group.rank))
        return total

    # --- rounds

    def _round(self, items: Sequence[Item]) -> Round:
        """What parts travel in a round, and which chunks this rank writes then."""
        moves = []
        for item in items:
            if item.array in self._flows:
                name, dtype = self._request.arrays[item.array].name, self._shards[item.array].dtype
                moves.append(ArrayMove(item.array, self._flows[item.array].in_round(item.units), dtype, f"'{name}'"))
        return Round(moves, self._staging, bool(moves), partial(self._chunks, items, moves))

    def _chunks(self, items: Sequence[Item], moves: Sequence[ArrayMove]) -> Iterator[Chunk]:
        """The chunks of a round: in blocks that have come, and in shards that this rank holds."""
        for move in moves:
            for piece in move.targets.values():
                yield from self._chunks_in(move.array, piece.region, piece.view)
        for item in items:
            if item.array in self._units:
                layout, local_shards = self._layouts[item.array], self._shards[item.array]
                for unit, shard in itertools.islice(self._units[item.array], len(item.units)):
                    yield from self._chunks_in(item.array, layout.units.region(unit), partial(local_shards.view, shard))

    def _chunks_in(self, array: int, region: Region, view: Callable[[Region], Array]) -> Iterator[Chunk]:
        name, chunks = self._request.arrays[array].name, self._layouts[array].chunks
        for number in chunks.meeting(region):
            chunk = chunks.region(number)
            yield Chunk(name, chunk, view(chunk))
