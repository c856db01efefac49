"""How is a job done? In the same steps for one array and for many:

1. Open the sources and allocate the pieces. Errors here are known before other ranks wait for the values.
2. Agree that every rank is ready. (Skipped if each rank reads what its own devices hold: then no rank waits for another.)
3. Read and exchange all arrays, with one set of threads and staging buffers. Hand the pieces to JAX.
4. Verify and close. Agree on errors, on what was read and on what was proven. Make one report.

A rank that fails also goes through all steps, and reports its error where the ranks agree.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any

import jax
import numpy as np

from shardload.arrays.padding import remember_version
from shardload.arrays.verification import Found, VerifyReport, agree_all
from shardload.comm.group import Group, Invocation, compact
from shardload.engine.call import begin_call
from shardload.engine.session import Session
from shardload.errors import ConfigError, PackedWarning, StallError
from shardload.formats.base import some
from shardload.jobs.consistency import N_SUMS, State, check_same, to_sums, version_in, version_of_state
from shardload.jobs.loading.array_load import ArrayLoad, OpenSources, OwnArray
from shardload.jobs.loading.plan import Layout, Plan
from shardload.jobs.loading.report import ArrayReport, LoadReport, Phase, join_proven, make_report
from shardload.jobs.loading.trees import keys_text
from shardload.jobs.progress import progress_of
from shardload.options import FILE, FULL, Options
from shardload.planning.blocks import aligned
from shardload.planning.staging import Staging, plan_staging
from shardload.planning.tuning import Tuning
from shardload.system.caller import warn_once
from shardload.system.garbage import let_go
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.allocator import empty_pieces_of_many
from shardload.transfer.counters import Counters
from shardload.transfer.exchange import Moved
from shardload.transfer.missing import describe_missing, fold_first, settle_missing, unfold_first
from shardload.transfer.resources import Resources
from shardload.values.decoding import packed_by

__all__ = ["Execution", "ExecutionOfMany", "Job", "Loaded", "Outcome"]

_log = logging.getLogger("shardload")
_MOST_TOLD = 8  # arrays with missing chunks in one message
_NOTHING_OPEN: AbstractContextManager[ExitStack | None] = nullcontext()


@dataclass(frozen=True, eq=False)
class Loaded:
    """The result of a job: the arrays in order, what was proven of each, and what makes one report for all."""

    arrays: list[jax.Array]
    proven: list[VerifyReport]
    make_report: Callable[[], LoadReport]

    @cached_property
    def report(self) -> LoadReport:
        """What the job did. Most callers of `load` never ask."""
        return self.make_report()


@dataclass(frozen=True, eq=False)
class Execution:
    """The executor of a plan. It finds the ranks by their communicator each time it is called.

    Attributes
    ----------
    comm : mpi4py.MPI.Comm or None
        The caller's communicator.
    options, handle : Options, object
        As in `ArrayLoad`.
    agreed : mapping of str to str
        The arguments and the plan on which all ranks agreed. They identify the plan.
    tuning : Tuning
        The tuning constants when the plan was made.
    """

    comm: Any
    options: Options
    handle: Any
    agreed: Mapping[str, str]
    tuning: Tuning

    def __call__(self, plan: Plan) -> tuple[jax.Array, LoadReport]:
        """Agree that all ranks execute the same plan, then load. Collective."""
        loaded = _execute(self.comm, [ArrayLoad(plan, plan.info, self.options, self.handle)], self.agreed, self.tuning)
        return loaded.arrays[0], loaded.report


@dataclass(frozen=True, eq=False)
class ExecutionOfMany:
    """The executor of the plan of a tree. `loads` are its arrays in order; the rest is as in `Execution`."""

    comm: Any
    loads: tuple[ArrayLoad, ...]
    agreed: Mapping[str, str]
    tuning: Tuning

    def __call__(self, plans: Sequence[Plan]) -> tuple[list[jax.Array], LoadReport]:
        """Agree that all ranks execute the same plan, then load. Collective."""
        loads = [replace(load, kind=plan, info=plan.info) for load, plan in zip(self.loads, plans, strict=True)]
        loaded = _execute(self.comm, loads, self.agreed, self.tuning)
        return loaded.arrays, loaded.report


def _execute(comm: Any, loads: list[ArrayLoad], agreed: Mapping[str, str], tuning: Tuning) -> Loaded:
    started, timeout = time.perf_counter(), loads[0].options.timeout
    more = f" and {len(loads) - 1} more" if len(loads) > 1 else ""
    asked = Invocation("execute", f"execute() of the plan for {loads[0].info}{more}", agreed)
    with begin_call(asked, None, comm=comm, timeout=timeout, watched_as=f"{loads[0].info}{more}") as begun:
        begun.settle()
        return Job(begun.group, loads, agreed, tuning).run(started)


class Outcome:
    """What one rank has done for a job, and its first error."""

    def __init__(self, arrays: list[OwnArray]) -> None:
        self.arrays = arrays
        self.error: BaseException | None = None
        self.moved = Moved()
        self.files: dict[str, State] = {}  # by path: files that this rank has open for several arrays

    @cached_property
    def shared_paths(self) -> list[str]:
        """The files that hold several of the arrays and are opened here, in the same order on every rank."""
        is_opened = len(self.arrays) > 1 and not all(own.load.is_here for own in self.arrays)
        n = Counter(own.load.info.path for own in self.arrays) if is_opened else Counter[str]()
        return [path for path, count in n.items() if count > 1]

    def take_error(self) -> BaseException | None:
        """The error, which is not kept any longer: the ranks agree on it."""
        error, self.error = self.error, None
        return error

    def keeping_errors(self) -> AbstractContextManager[None]:
        """Keep an error that is raised inside, until the ranks agree. A stall passes: after it the ranks cannot agree."""
        return _KeepingErrors(self)

    @cached_property
    def counters(self) -> Counters:
        """What reading all arrays cost this rank. Ask for it when this rank has done all it does."""
        if len(self.arrays) == 1:
            return self.arrays[0].counters
        counters = Counters()
        for own in self.arrays:
            counters.add(own.counters)
        return counters

    @property
    def device(self) -> Phase:
        """Handing the pieces of all arrays to JAX."""
        phases = [own.device for own in self.arrays]
        return Phase(sum(phase.seconds for phase in phases), sum(phase.nbytes for phase in phases))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """What the last agreement sums over the ranks: counts for the report, and numbers that compare the ranks' files."""
        cost = self.counters
        counts = [cost.chunks_decoded, cost.nbytes_read, cost.n_checksums + self.moved.n_checksums]
        for own in self.arrays:
            cost = own.counters
            counts += [cost.chunks_missing, cost.chunks_decoded, cost.nbytes_read, *to_sums(own.contents), *own.checked.counts]
        for path in self.shared_paths:
            counts += to_sums(self.files.get(path))
        return tuple(counts)

    @property
    def is_loaded(self) -> bool:
        """True if all arrays are loaded on this rank without an error."""
        return self.error is None and all(own.array is not None for own in self.arrays)


class _KeepingErrors(AbstractContextManager[None]):
    """See `Outcome.keeping_errors`."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def __exit__(self, kind: type[BaseException] | None, found: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(found, Exception) or isinstance(found, StallError):
            return False
        let_interruption_pass(found)
        let_go(found)
        self._outcome.error = self._outcome.error or found
        return True


def _each(arrays: Sequence[OwnArray], do: Callable[[OwnArray], None]) -> None:
    """Do something for each array. An error names its array, as in `ArrayLoad.naming_errors`, which costs each a context."""
    if not arrays[0].load.where:  # the only one
        for own in arrays:
            do(own)
        return
    at = arrays[0]
    try:
        for at in arrays:
            do(at)
    except StallError:
        raise
    except Exception as error:
        let_interruption_pass(error)
        with at.load.naming_errors():
            raise


def _make_room(arrays: Sequence[OwnArray]) -> None:
    """Allocate the pieces of all arrays, at once if there are several: the memory of an earlier load is then used again."""
    if len(arrays) == 1:
        _each(arrays, OwnArray.make_room)
        return
    rooms = iter(empty_pieces_of_many([own.wanted for own in arrays]))
    _each(arrays, lambda own: own.make_room(next(rooms)))


class Job:
    """The arrays that one call loads. Every method is collective, inside a call that all ranks make.

    Parameters
    ----------
    group : Group
        The ranks.
    loads : sequence of ArrayLoad
        The arrays, at least one. Their `staging`, `timeout`, `progress` and `verify` are the same.
    agreed : mapping of str to str
        The arguments and the plan on which all ranks agreed.
    tuning : Tuning
        The sizes from which each optimization pays off.
    """

    def __init__(self, group: Group, loads: Sequence[ArrayLoad], agreed: Mapping[str, str], tuning: Tuning) -> None:
        self.group, self.loads, self.tuning = group, list(loads), tuning
        self._agreed, self._options = agreed, loads[0].options
        self.is_tree = any(load.where for load in loads)

    @cached_property
    def name(self) -> str:
        """What is loaded, for messages."""
        more = f" and {len(self.loads) - 1} more" if len(self.loads) > 1 else ""
        return f"{self.loads[0].info}{more}"

    def begin(self) -> None:
        """Tell the watchdog that this job has begun."""
        self.group.watch.begin(self.name, self._options.timeout)

    @property
    def is_apart(self) -> bool:
        """True if no rank waits for another one until the last agreement, and all come to it soon: the values are here already,
        or each rank reads its own, and these are few.
        """
        if self._is_here:
            return True
        nbytes = sum(math.prod(load.kind.shape) * load.kind.dtype.itemsize for load in self.loads)
        return self._is_direct and nbytes <= self.tuning.apart_nbytes

    @property
    def _is_here(self) -> bool:
        """True if every rank has all values already."""
        return all(load.is_here for load in self.loads)

    def do_apart(self) -> Outcome:
        """Load the arrays as far as this rank can do it alone (`is_apart`). Not collective.

        Errors are kept. `finish` makes the ranks agree on them.
        """
        mine = Outcome([OwnArray(load, self.group.rank) for load in self.loads])
        if self._is_here:
            self._fill_here(mine)
        else:
            self.begin()
            self._do_own(mine, self._session(None))
        self._verify(mine)
        self.group.watch.enter("agree")
        return mine

    def _fill_here(self, mine: Outcome) -> None:
        """Fill the pieces from values in memory, and hand them to JAX."""
        self.group.watch.enter("assemble")
        with mine.keeping_errors():
            _each(mine.arrays, OwnArray.take)
            _make_room(mine.arrays)
            total = sum(own.nbytes for own in mine.arrays)
            with progress_of(self._options.progress, lambda: self.name, total, self.group.rank) as advance:

                def fill(own: OwnArray) -> None:
                    own.fill()
                    own.assemble()
                    advance(own.nbytes)

                _each(mine.arrays, fill)

    def finish(self, mine: Outcome, sums: list[int] | None = None, started: float | None = None) -> Loaded:
        """Agree on what the ranks have done. `sums`: of `Outcome.counts` over the ranks, if they have agreed already."""
        self.group.watch.enter("agree")
        loaded = self._agree(mine, self.group.agree(mine.take_error(), list(mine.counts)) if sums is None else sums, started)
        self.group.watch.close()
        if _log.isEnabledFor(logging.INFO):
            _log.info("loaded %s: %s", self.name, loaded.report)
        return loaded

    def _verify(self, mine: Outcome) -> None:
        """Verify what the devices of this process hold, if all was loaded."""
        if mine.is_loaded:
            self.group.watch.enter("verify")
            is_read = len(mine.arrays) > 1 and self._options.verify in (FILE, FULL)
            with mine.keeping_errors(), ExitStack() if is_read else _NOTHING_OPEN as opened:
                sources = None if opened is None else OpenSources([own.load for own in mine.arrays], opened)
                _each(mine.arrays, lambda own: own.verify(sources))

    def run(self, started: float | None = None) -> Loaded:
        """Load the arrays. The report counts seconds from `started`, a value of `time.perf_counter`."""
        started = time.perf_counter() if started is None else started
        session = self._session(self._slots_nbytes if self._shares else None)
        session.begin_round()
        mine = Outcome([OwnArray(load, self.group.rank) for load in self.loads])
        self._do_own(mine, session)
        self._verify(mine)
        return self.finish(mine, started=started)

    def verify(self, arrays: Sequence[jax.Array], seed: int) -> list[VerifyReport]:
        """Compare arrays with their files. The job has them in the same order."""
        group, mine = self.group, Outcome([])
        states: list[State] = [None] * len(self.loads)
        found = [Found() for _ in self.loads]
        self.begin()
        group.watch.enter("verify")
        with mine.keeping_errors():
            states = [self._contents(load) for load in self.loads]
        sums = group.agree(mine.take_error(), [number for state in states for number in to_sums(state)])
        for k, load in enumerate(self.loads):
            check_same(load.name, sums[k * N_SUMS : (k + 1) * N_SUMS], load.info.path, load.info.dataset, is_open=True)
        with mine.keeping_errors(), ExitStack() as opened:
            sources = OpenSources(self.loads, opened)
            for k, (load, array) in enumerate(zip(self.loads, arrays, strict=True)):
                with load.naming_errors():
                    found[k] = load.verifier(seed, sources).check(array, group.rank)
        counts = group.agree(mine.take_error(), [number for one in found for number in one.counts])
        n_each = len(counts) // len(found)
        sums_of = [counts[k * n_each : (k + 1) * n_each] for k in range(len(found))]
        proven = agree_all(group, self._options.verify, lambda: [load.verifier(seed) for load in self.loads], found, sums_of)
        group.watch.close()
        return proven

    @staticmethod
    def _contents(load: ArrayLoad) -> State:
        with load.naming_errors():
            return load.contents() if load.is_open else None

    # --- what this rank does

    @cached_property
    def _layouts(self) -> list[Layout]:
        return list({id(load.layout): load.layout for load in self.loads}.values())  # many arrays share theirs

    @cached_property
    def staging(self) -> Staging:
        """How all arrays together use the memory under the cap."""
        layouts, cap_nbytes = self._layouts, self._options.staging_nbytes
        if len(layouts) == 1:
            return layouts[0].staging(cap_nbytes)
        n_threads = max(layout.n_threads for layout in layouts)
        return plan_staging([(made.schedule, made.source) for made in layouts], cap_nbytes, n_threads)

    @property
    def _is_direct(self) -> bool:
        """True if no rank sends values to another."""
        return all(load.layout.schedule.is_direct for load in self.loads)

    @property
    def _shares(self) -> bool:
        """True if the ranks of a machine pass blocks in shared memory."""
        least = self.tuning.worth_sharing_nbytes
        schedules = [load.layout.schedule for load in self.loads]
        return any(not made.is_direct and made.max_block_size * made.itemsize >= least for made in schedules)

    @property
    def _slots_nbytes(self) -> int:
        """Bytes of the slots of this rank, which has none if it reads nothing."""
        is_owner = any(load.layout.schedule.is_owner(self.group.rank) for load in self.loads)
        return self.staging.n_slots * aligned(self.staging.slot_nbytes) if is_owner else 0

    def _session(self, shared_nbytes: int | None) -> Session:
        return Session(self.group, compact(self._agreed), shared_nbytes=shared_nbytes, checksums=self._options.checksums)

    def _do_own(self, mine: Outcome, session: Session) -> None:
        """Open, agree, move, assemble, close. What goes wrong is kept: the ranks still have to agree on it."""
        opened = ExitStack()
        try:
            self.group.watch.enter("open")
            advance = None
            with mine.keeping_errors():
                advance = self._get_ready(mine, opened, session)
            if not self._is_direct:
                self.group.agree(mine.take_error())  # a rank that cannot read or receive must say so before anything is sent
            if mine.error is None:
                with mine.keeping_errors():
                    self._fill(mine, session, advance)
        except BaseException:
            with suppress(Exception):  # the first error names the cause better
                opened.__exit__(*sys.exc_info())
            raise
        with mine.keeping_errors():  # the other ranks still wait for this rank in the last agreement
            opened.close()

    def _get_ready(self, mine: Outcome, opened: ExitStack, session: Session) -> Callable[[int], None] | None:
        """Open the sources and make what the exchange needs; returns the function to call with its progress."""
        arrays, staging = mine.arrays, self.staging
        buffers = session.stage(staging.n_slots, staging.slot_nbytes, staging.n_pack, staging.pack_nbytes)
        here = {own.load.info.path for own in arrays if own.reads}
        sources = OpenSources([own.load for own in arrays if own.load.info.path in here], opened)
        _each(arrays, lambda own: own.open(sources))
        mine.files = sources.states(mine.shared_paths, self.loads)
        _make_room(arrays)
        resources = opened.enter_context(Resources(buffers.slots, buffers.bell, staging.n_threads, staging.batch_nbytes))
        _each(arrays, lambda own: own.make_reader(opened, resources, self.tuning))
        total = sum(own.nbytes for own in arrays)
        return opened.enter_context(progress_of(self._options.progress, lambda: self.name, total, self.group.rank))

    def _fill(self, mine: Outcome, session: Session, on_progress: Callable[[int], None] | None) -> None:
        """Read and move all arrays, and hand them to JAX."""
        failed = session.move([own.move(is_named=len(mine.arrays) > 1) for own in mine.arrays], on_progress)
        mine.moved = session.moved
        if failed is not None:
            raise failed
        self.group.watch.enter("assemble")
        _each(mine.arrays, OwnArray.assemble)
        _each(mine.arrays, OwnArray.check_unchanged)

    # --- what all ranks do together

    def _agree(self, mine: Outcome, totals: list[int], started: float | None = None) -> Loaded:
        """What the ranks have agreed on: the report, and whether all read the same file. `totals`: sums of `Outcome.counts`."""
        n_chunks, nbytes, n_parts, *sums = totals
        if not mine.is_loaded:
            raise ConfigError("nothing was loaded")
        n_files = len(mine.shared_paths) * N_SUMS
        of_files, sums = sums[len(sums) - n_files :], sums[: len(sums) - n_files]
        n_each = len(sums) // len(mine.arrays)
        of_arrays = [sums[k * n_each : (k + 1) * n_each] for k in range(len(mine.arrays))]
        n_missing, costs = [one[0] for one in of_arrays], [(one[1], one[2]) for one in of_arrays]
        verified = [one[3 + N_SUMS :] for one in of_arrays]
        for own, one in zip(mine.arrays, of_arrays, strict=True):
            if any(one[3 : 3 + N_SUMS]):  # some rank had the file open
                load = own.load
                check_same(load.name, one[3 : 3 + N_SUMS], load.info.path, load.info.dataset, is_open=load.is_open)
            if own.array is not None:
                state = own.load.read_in if len(mine.arrays) == 1 else None
                version = version_in(one[3 : 3 + N_SUMS]) if state is None else version_of_state(state)
                remember_version(own.array, version)
        for k, path in enumerate(mine.shared_paths):  # also if each array was read by one rank, but not all by the same
            check_same(f"'{path}'", of_files[k * N_SUMS : (k + 1) * N_SUMS], path, "")
        proven = agree_all(
            self.group,
            self._options.verify,
            lambda: [own.load.verifier() for own in mine.arrays],
            [own.checked for own in mine.arrays],
            verified,
        )
        self._settle_missing(mine.arrays, n_missing)
        self._warn_of_packed()
        lines = self._lines(costs, n_missing, proven) if self.is_tree else ()
        counters, moved, device = mine.counters, mine.moved, mine.device
        seconds = 0.0 if started is None else time.perf_counter() - started

        def make() -> LoadReport:
            return replace(
                make_report(counters, moved, device),
                seconds=seconds,
                chunks_decoded=n_chunks,
                nbytes_read=nbytes,
                chunks_missing=sum(n_missing),
                proven=join_proven(proven, n_parts),
                arrays=lines,
            )

        return Loaded([own.array for own in mine.arrays if own.array is not None], proven, make)

    def _warn_of_packed(self) -> None:
        """Warn once if stored numbers were loaded that are not the values, and the caller did not say that this is meant."""
        asked = [load for load in self.loads if load.options.decode is None and load.info.packing]
        found = [(load.name, packed_by(np.dtype(load.info.dtype), load.info.packing)) for load in asked]
        told = [f"{name} ({', '.join(how)})" for name, how in found if how]
        if told:
            text = (
                f"these numbers are packed, and were loaded as they are stored: {some(told)}. Pass decode=True to apply that "
                "and the fill values, decode=False if the stored numbers are meant"
            )
            warn_once(text, PackedWarning, self.group.rank)

    def _lines(self, costs: list[tuple[int, int]], n_missing: list[int], proven: list[VerifyReport]) -> tuple[ArrayReport, ...]:
        """The report of each array of a tree."""
        return tuple(
            ArrayReport(keys_text(load.where), str(load.info), *cost, n, one)
            for load, cost, n, one in zip(self.loads, costs, n_missing, proven, strict=True)
        )

    def _settle_missing(self, arrays: list[OwnArray], n_missing: list[int]) -> None:
        """Warn or raise, as the caller asked, now that all ranks know how many chunks are missing."""
        how = self._options.missing
        found = [(own, n) for own, n in zip(arrays, n_missing, strict=True) if n]
        if how == "fill" or not found:
            return
        first = self.group.least_ints(
            np.array([fold_first(own.counters.missing) for own, _ in found], dtype=np.int64).reshape(-1)
        )
        texts = []
        for (own, n), least in zip(found, first.reshape(len(found), -1).tolist(), strict=True):
            source = own.load.layout.source
            text = describe_missing(n, unfold_first(least), own.load.info, source.selection, source.chunks)
            texts.append(f"{own.load.where}: {text}" if own.load.where else text)
        more = f"; and in {len(texts) - _MOST_TOLD} more arrays" if len(texts) > _MOST_TOLD else ""
        settle_missing("; ".join(texts[:_MOST_TOLD]) + more, how, self.group.rank, found[0][0].load.info)
