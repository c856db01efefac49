"""How is a job done? In the same steps for one array and for many:

1. Open the sources and allocate the pieces. Errors here are known before other ranks wait for the values.
2. Agree that every rank is ready. (Skipped if each rank reads what its own devices hold: then no rank waits for another.)
3. Read and exchange all arrays, with one set of threads and staging buffers. Hand the pieces to JAX.
4. Verify and close. Agree on errors, on what was read and on what was proven. Make one report.

A rank that fails also goes through all steps, and reports its error where the ranks agree.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any

import jax
import numpy as np

from shardload.arrays.padding import loaded_as
from shardload.arrays.verification import Found, VerifyReport, agree_all
from shardload.comm.group import Group, Invocation
from shardload.engine.call import begin_call
from shardload.engine.session import Session
from shardload.errors import ConfigError, PackedWarning, StallError
from shardload.formats.contract.array import some
from shardload.jobs.consistency import N_SUMS, State, check_same, to_sums, version_in, version_of_state
from shardload.jobs.loading.array_load import ArrayLoad, OpenSources, OwnArray
from shardload.jobs.loading.plan import Layout, Plan
from shardload.jobs.loading.report import ArrayReport, LoadReport, Phase, join_proven, make_report
from shardload.jobs.progress import progress_of
from shardload.jobs.trees import keys_text
from shardload.options import FILE, FULL
from shardload.planning.blocks import aligned
from shardload.planning.staging import Staging, plan_staging
from shardload.planning.tuning import Tuning
from shardload.system.caller import warn_once
from shardload.system.garbage import let_go
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.allocator import empty_pieces
from shardload.transfer.counters import Counters
from shardload.transfer.exchange import Moved
from shardload.transfer.missing import describe_missing, fold_first, settle_missing, unfold_first
from shardload.transfer.resources import Resources
from shardload.values.decoding import packed_by

__all__ = ["Loaded", "Loader", "execute"]

_log = logging.getLogger("shardload")
_N_COSTS = 4  # numbers of an array that the last agreement sums for the report
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


def execute(comm: Any, loads: Sequence[ArrayLoad], agreed: Invocation, tuning: Tuning, plans: Sequence[Plan]) -> Loaded:
    """Agree that all ranks execute the same plans, then load. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm or None
        The communicator that the caller passed.
    loads : sequence of ArrayLoad
        The arrays in order.
    agreed : Invocation
        The call in which they were planned, and on which all ranks agreed: it identifies the plans.
    tuning : Tuning
        The tuning constants when the plans were made.
    plans : sequence of Plan
        The plans as the caller has them now.
    """
    started, timeout = time.perf_counter(), loads[0].options.timeout
    loads = [replace(load, kind=plan, info=plan.info) for load, plan in zip(loads, plans, strict=True)]
    name = _name_of(loads)
    asked = replace(agreed, kind="execute", title=f"execute() of the plan for {name}")
    with begin_call(asked, None, comm=comm, timeout=timeout, watched_as=name) as begun:
        begun.settle()
        return Loader(begun.group, loads, begun.asked, tuning).run(started)


def _name_of(loads: Sequence[ArrayLoad]) -> str:
    """What is loaded, for messages."""
    return f"{loads[0].info}{f' and {len(loads) - 1} more' if len(loads) > 1 else ''}"


class _KeepingErrors(AbstractContextManager[None]):
    """See `Loader.keeping_errors`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or isinstance(error, StallError):
            return False
        let_interruption_pass(error)
        let_go(error)
        self._loader.error = self._loader.error or error
        return True


def _each(arrays: Sequence[OwnArray], do: Callable[[OwnArray], None]) -> None:
    """Do something for each array. An error names its array, as in `ArrayLoad.naming_errors`, which costs each a context."""
    array = arrays[0]
    try:
        for array in arrays:
            do(array)
    except StallError:
        raise
    except Exception as error:
        let_interruption_pass(error)
        with array.load.naming_errors():
            raise


class Loader:
    """Loads the arrays of one call. Every public method is collective, inside a call that all ranks make.

    Parameters
    ----------
    group : Group
        The ranks.
    loads : sequence of ArrayLoad
        The arrays, at least one. Their `staging`, `timeout`, `progress` and `verify` are the same.
    agreed : Invocation
        The call, with the plan, on which all ranks agreed.
    tuning : Tuning
        The sizes from which each optimization pays off.

    Attributes
    ----------
    error : Exception or None
        The first error of this rank, kept until the ranks agree.
    """

    def __init__(self, group: Group, loads: Sequence[ArrayLoad], agreed: Invocation, tuning: Tuning) -> None:
        self._group, self._loads, self._agreed, self._tuning = group, list(loads), agreed, tuning
        self._options = loads[0].options
        self._name = _name_of(loads)
        self._arrays = [OwnArray(load, group.rank) for load in loads]
        self._moved = Moved()
        self._files: dict[str, State] = {}  # by path: files that this rank has open for several arrays
        self.error: BaseException | None = None

    def run(self, started: float) -> Loaded:
        """Load the arrays. The report counts seconds from `started`, a value of `time.perf_counter`."""
        self._group.watch.begin(self._name, self._options.timeout)
        if self._is_here:
            self._fill_here()
        else:
            session = Session(
                self._group,
                f"{self._agreed.digest:016x}",
                shared_nbytes=self._slots_nbytes if self._shares else None,
                checksums=self._options.checksums,
            )
            if not self._is_direct:
                session.begin_round()
            self._move(session)
        self._verify()
        self._group.watch.enter("agree")
        loaded = self._agree(self._group.agree(self._take_error(), self._counts()), started)
        self._group.watch.close()
        if _log.isEnabledFor(logging.INFO):
            _log.info("loaded %s: %s", self._name, loaded.report)
        return loaded

    def verify(self, arrays: Sequence[jax.Array], seed: int) -> list[VerifyReport]:
        """Compare arrays, in the order of the loads, with their files."""
        group, loads = self._group, self._loads
        states: list[State] = [None] * len(loads)
        found = [Found() for _ in loads]
        group.watch.begin(self._name, self._options.timeout)
        group.watch.enter("verify")
        with self._keeping_errors():
            states = [self._contents(load) for load in loads]
        sums = group.agree(self._take_error(), [number for state in states for number in to_sums(state)])
        for load, of_array in zip(loads, _shares_of(sums, len(loads)), strict=True):
            check_same(load.name, of_array, load.info.path, load.info.dataset, is_open=True)
        with self._keeping_errors(), ExitStack() as opened:
            sources = OpenSources(loads, opened)
            for k, (load, array) in enumerate(zip(loads, arrays, strict=True)):
                with load.naming_errors():
                    found[k] = load.verifier(seed, sources).check(array, group.rank)
        counts = group.agree(self._take_error(), [number for of_array in found for number in of_array.counts])
        sums_of = _shares_of(counts, len(found))
        proven = agree_all(group, self._options.verify, lambda: [load.verifier(seed) for load in loads], found, sums_of)
        group.watch.close()
        return proven

    @staticmethod
    def _contents(load: ArrayLoad) -> State:
        with load.naming_errors():
            return load.contents() if load.is_open else None

    # --- errors

    def _take_error(self) -> BaseException | None:
        """The error, which is not kept any longer: the ranks agree on it."""
        error, self.error = self.error, None
        return error

    def _keeping_errors(self) -> AbstractContextManager[None]:
        """Keep an error that is raised inside, until the ranks agree. A stall passes: after it the ranks cannot agree."""
        return _KeepingErrors(self)

    # --- facts about the arrays together

    @property
    def _is_here(self) -> bool:
        """True if every rank has all values already."""
        return all(load.is_here for load in self._loads)

    @cached_property
    def _shared_paths(self) -> list[str]:
        """The files that hold several of the arrays and are opened here, in the same order on every rank."""
        n = Counter[str]() if self._is_here else Counter(load.info.path for load in self._loads)
        return [path for path, count in n.items() if count > 1]

    @cached_property
    def _layouts(self) -> list[Layout]:
        return list({id(load.layout): load.layout for load in self._loads}.values())  # many arrays share theirs

    @cached_property
    def _staging(self) -> Staging:
        """How all arrays together use the memory under the cap."""
        layouts, cap_nbytes = self._layouts, self._options.staging_nbytes
        if len(layouts) == 1:
            return layouts[0].staging(cap_nbytes)
        n_threads = max(layout.n_threads for layout in layouts)
        return plan_staging([(made.schedule, made.source) for made in layouts], cap_nbytes, n_threads)

    @property
    def _is_direct(self) -> bool:
        """True if no rank sends values to another."""
        return all(load.layout.schedule.is_direct for load in self._loads)

    @property
    def _shares(self) -> bool:
        """True if the ranks of a machine pass blocks in shared memory."""
        least = self._tuning.worth_sharing_nbytes
        schedules = [load.layout.schedule for load in self._loads]
        return any(not made.is_direct and made.max_block_size * made.itemsize >= least for made in schedules)

    @property
    def _slots_nbytes(self) -> int:
        """Bytes of the slots of this rank, which has none if it reads nothing."""
        is_owner = any(load.layout.schedule.is_owner(self._group.rank) for load in self._loads)
        return self._staging.n_slots * aligned(self._staging.slot_nbytes) if is_owner else 0

    # --- what this rank does

    def _fill_here(self) -> None:
        """Fill the pieces from values in memory, and hand them to JAX."""
        self._group.watch.enter("assemble")
        with self._keeping_errors():
            _each(self._arrays, OwnArray.take)
            self._make_room()
            total = sum(array.nbytes for array in self._arrays)
            with progress_of(self._options.progress, lambda: self._name, total, self._group.rank) as advance:

                def fill(array: OwnArray) -> None:
                    array.fill()
                    array.assemble()
                    advance(array.nbytes)

                _each(self._arrays, fill)

    def _make_room(self) -> None:
        """Allocate the pieces of all arrays at once: the memory of an earlier load is then used again."""
        rooms = iter(empty_pieces([array.wanted for array in self._arrays]))
        _each(self._arrays, lambda array: array.make_room(next(rooms)))

    def _move(self, session: Session) -> None:
        """Open, agree, move, assemble, close. What goes wrong is kept: the ranks still have to agree on it."""
        opened = ExitStack()
        try:
            self._group.watch.enter("open")
            advance = None
            with self._keeping_errors():
                advance = self._get_ready(opened, session)
            if not self._is_direct:
                self._group.agree(self._take_error())  # a rank that cannot read or receive says so before anything is sent
            if self.error is None:
                with self._keeping_errors():
                    self._fill(session, advance)
        except BaseException:
            with suppress(Exception):  # the first error names the cause better
                opened.__exit__(*sys.exc_info())
            raise
        with self._keeping_errors():  # the other ranks still wait for this rank in the last agreement
            opened.close()

    def _get_ready(self, opened: ExitStack, session: Session) -> Callable[[int], None] | None:
        """Open the sources and make what the exchange needs; returns the function to call with its progress."""
        arrays, staging = self._arrays, self._staging
        buffers = session.stage(staging.n_slots, staging.slot_nbytes, staging.n_pack, staging.pack_nbytes)
        here = {array.load.info.path for array in arrays if array.reads}
        sources = OpenSources([load for load in self._loads if load.info.path in here], opened)
        _each(arrays, lambda array: array.open(sources))
        self._files = sources.states(self._shared_paths, self._loads)
        self._make_room()
        resources = opened.enter_context(Resources(buffers.slots, buffers.bell, staging.n_threads, staging.batch_nbytes))
        _each(arrays, lambda array: array.make_reader(opened, resources, self._tuning))
        total = sum(array.nbytes for array in arrays)
        return opened.enter_context(progress_of(self._options.progress, lambda: self._name, total, self._group.rank))

    def _fill(self, session: Session, on_progress: Callable[[int], None] | None) -> None:
        """Read and move all arrays, and hand them to JAX."""
        failed = session.move([array.move(is_named=len(self._arrays) > 1) for array in self._arrays], on_progress)
        self._moved = session.moved
        if failed is not None:
            raise failed
        self._group.watch.enter("assemble")
        _each(self._arrays, OwnArray.assemble)
        _each(self._arrays, OwnArray.check_unchanged)

    def _verify(self) -> None:
        """Verify what the devices of this process hold, if all was loaded."""
        if self.error is not None or any(array.array is None for array in self._arrays):
            return
        self._group.watch.enter("verify")
        is_read = len(self._arrays) > 1 and self._options.verify in (FILE, FULL)
        with self._keeping_errors(), ExitStack() if is_read else _NOTHING_OPEN as opened:
            sources = None if opened is None else OpenSources(self._loads, opened)
            _each(self._arrays, lambda array: array.verify(sources))

    def _counts(self) -> list[int]:
        """What the last agreement sums over the ranks: counts for the report, and numbers that compare the ranks' files."""
        counts = [self._moved.n_checksums]
        for array in self._arrays:
            cost = array.counters
            counts += [cost.chunks_missing, cost.chunks_decoded, cost.nbytes_read, cost.n_checksums]
            counts += [*to_sums(array.contents), *array.checked.counts]
        for path in self._shared_paths:
            counts += to_sums(self._files.get(path))
        return counts

    # --- what all ranks do together

    def _agree(self, totals: list[int], started: float) -> Loaded:
        """What the ranks have agreed on: the report, and whether all read the same file. `totals`: sums of `_counts`."""
        arrays = [array.array for array in self._arrays if array.array is not None]
        if len(arrays) < len(self._arrays):
            raise ConfigError("nothing was loaded")
        n_files = len(self._shared_paths)
        n_parts, *sums = totals[: len(totals) - n_files * N_SUMS]
        of_arrays = _shares_of(sums, len(arrays))
        states = [sums[_N_COSTS : _N_COSTS + N_SUMS] for sums in of_arrays]
        for load, array, state in zip(self._loads, arrays, states, strict=True):
            if any(state):  # some rank had the file open
                check_same(load.name, state, load.info.path, load.info.dataset, is_open=load.is_open)
            read_in = load.read_in if len(arrays) == 1 else None
            known = loaded_as(array)
            if known is not None:
                known.version = version_in(state) if read_in is None else version_of_state(read_in)
        if n_files:  # also if each array was read by one rank, but not all by the same
            for path, state in zip(self._shared_paths, _shares_of(totals[-n_files * N_SUMS :], n_files), strict=True):
                check_same(f"'{path}'", state, path, "")
        proven = agree_all(
            self._group,
            self._options.verify,
            lambda: [load.verifier() for load in self._loads],
            [array.checked for array in self._arrays],
            [sums[_N_COSTS + N_SUMS :] for sums in of_arrays],
        )
        costs = [sums[:_N_COSTS] for sums in of_arrays]
        self._settle_missing([n_missing for n_missing, *_ in costs])
        self._warn_of_packed()
        seconds = time.perf_counter() - started
        return Loaded(arrays, proven, lambda: self._report(costs, n_parts, proven, seconds))

    def _report(self, costs: list[list[int]], n_parts: int, proven: list[VerifyReport], seconds: float) -> LoadReport:
        counters = Counters()
        for array in self._arrays:
            counters.add(array.counters)
        phases = [array.device for array in self._arrays]
        device = Phase(sum(phase.seconds for phase in phases), sum(phase.nbytes for phase in phases))
        n_missing, n_decoded, nbytes_read, n_checksums = map(sum, zip(*costs, strict=True))
        lines = [
            ArrayReport(keys_text(load.where), str(load.info), decoded, nbytes, missing, verified)
            for load, (missing, decoded, nbytes, _), verified in zip(self._loads, costs, proven, strict=True)
            if load.where
        ]
        return replace(
            make_report(counters, self._moved, device),
            seconds=seconds,
            chunks_decoded=n_decoded,
            nbytes_read=nbytes_read,
            chunks_missing=n_missing,
            proven=join_proven(proven, n_parts + n_checksums),
            arrays=tuple(lines),
        )

    def _warn_of_packed(self) -> None:
        """Warn once if stored numbers were loaded that are not the values, and the caller did not say that this is meant."""
        asked = [load for load in self._loads if load.options.decode is None and load.info.packing]
        found = [(load.name, packed_by(np.dtype(load.info.dtype), load.info.packing)) for load in asked]
        told = [f"{name} ({', '.join(how)})" for name, how in found if how]
        if told:
            text = (
                f"these numbers are packed, and were loaded as they are stored: {some(told)}. Pass decode=True to apply that "
                "and the fill values, decode=False if the stored numbers are meant"
            )
            warn_once(text, PackedWarning, self._group.rank)

    def _settle_missing(self, n_missing: list[int]) -> None:
        """Warn or raise, as the caller asked, now that all ranks know how many chunks are missing."""
        how = self._options.missing
        found = [(own, n) for own, n in zip(self._arrays, n_missing, strict=True) if n]
        if how == "fill" or not found:
            return
        first = self._group.least_ints(
            np.array([fold_first(own.counters.missing) for own, _ in found], dtype=np.int64).reshape(-1)
        )
        texts = []
        for (own, n), least in zip(found, first.reshape(len(found), -1).tolist(), strict=True):
            source = own.load.layout.source
            text = describe_missing(n, unfold_first(least), own.load.info, source.selection, source.chunks)
            texts.append(f"{own.load.where}: {text}" if own.load.where else text)
        more = f"; and in {len(texts) - _MOST_TOLD} more arrays" if len(texts) > _MOST_TOLD else ""
        settle_missing("; ".join(texts[:_MOST_TOLD]) + more, how, self._group.rank, found[0][0].load.info)


def _shares_of(numbers: list[int], n: int) -> list[list[int]]:
    """The numbers of each of `n` arrays, which all have equally many."""
    n_each = len(numbers) // n
    return [numbers[k * n_each : (k + 1) * n_each] for k in range(n)]
