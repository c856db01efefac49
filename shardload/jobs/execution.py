"""How is a job done? In the same steps for one array and for many:

1. Open the sources and allocate the pieces. Errors here are known before other ranks wait for the values.
2. Agree that every rank is ready. (Skipped if each rank reads what its own devices hold: then no rank waits for another.)
3. Read and exchange all arrays, with one set of threads and staging buffers. Hand the pieces to JAX.
4. Verify and close. Agree on errors, on what was read and on what was proven. Make one report.

A rank that fails also goes through all steps, and reports its error where the ranks agree.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from zlib import crc32

import jax
import numpy as np

from shardload.arrays.verification import VerifyReport
from shardload.comm.group import Group, Invocation, group_of
from shardload.comm.shared_memory import Bell, Segment
from shardload.errors import ConfigError, PackedWarning, StallError
from shardload.formats.base import some
from shardload.jobs.array_load import ArrayLoad, OpenSources, OwnArray
from shardload.jobs.consistency import N_SUMS, check_same, to_sums
from shardload.jobs.plan import Plan
from shardload.jobs.progress import progress_of
from shardload.jobs.report import LoadReport, Phase, join_proven, make_report
from shardload.options import Options
from shardload.planning.blocks import aligned
from shardload.planning.staging import Staging, plan_staging
from shardload.planning.tuning import Tuning
from shardload.system.caller import warn_once
from shardload.system.interruption import let_interruption_pass, outer_exception
from shardload.transfer.buffers import Slots
from shardload.transfer.counters import Counters
from shardload.transfer.exchange import Buffers, Moved, exchange
from shardload.transfer.missing import describe_missing, fold_first, settle_missing, unfold_first
from shardload.transfer.resources import Resources
from shardload.values.decoding import packed_by

__all__ = ["Execution", "Job", "Loaded"]

_log = logging.getLogger("shardload")


@dataclass(frozen=True, eq=False)
class Loaded:
    """The result of a job: the arrays in order, what was proven of each, and one report for all."""

    arrays: list[jax.Array]
    proven: list[VerifyReport]
    report: LoadReport


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
        started = time.perf_counter()
        group = group_of(self.comm, self.options.timeout)
        with outer_exception(), group.call(self.options.timeout) as refusal:
            asked = Invocation("execute", f"execute() of the plan for {plan.info}", self.agreed)
            job = Job(group, [ArrayLoad(plan, self.options, self.handle)], self.agreed, self.tuning)
            job.begin()
            group.settle(asked, refusal)
            loaded = job.run(started)
        return loaded.arrays[0], loaded.report


class _Outcome:
    """What one rank has done for a job, and its first error."""

    def __init__(self, arrays: list[OwnArray]) -> None:
        self.arrays = arrays
        self.error: BaseException | None = None
        self.moved = Moved(0.0, 0, 0)

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Keep an error that is raised inside, until the ranks agree. A stall passes: after it the ranks cannot agree."""
        try:
            yield
        except StallError:
            raise
        except Exception as found:
            let_interruption_pass(found)
            self.error = self.error or found

    def report(self) -> LoadReport:
        """The report of this rank alone, before the sums over all ranks."""
        counters, device = Counters(), Phase(0.0, 0)
        for own in self.arrays:
            counters.add(own.counters)
            device = Phase(device.seconds + own.device.seconds, device.nbytes + own.device.nbytes)
        return make_report(counters, self.moved, device)

    @property
    def is_loaded(self) -> bool:
        """True if all arrays are loaded on this rank without an error."""
        return self.error is None and all(own.array is not None for own in self.arrays)


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
        more = f" and {len(loads) - 1} more" if len(loads) > 1 else ""
        self.name = f"{loads[0].info}{more}"

    def begin(self) -> None:
        """Tell the watchdog that this job has begun."""
        self.group.watch.begin(self.name, self._options.timeout)

    def run(self, started: float | None = None) -> Loaded:
        """Load the arrays. The report counts seconds from `started`, a value of `time.perf_counter`."""
        started = time.perf_counter() if started is None else started
        tags = self.group.next_tags()  # counted on every rank, also on one that fails before it exchanges anything
        segments = self.group.shared_memory(self._slots_nbytes) if self._shares else {}
        mine = _Outcome([OwnArray(load, self.group.rank) for load in self.loads])
        self._do_own(mine, tags, segments)
        if mine.is_loaded:
            self.group.watch.enter("verify")
            with mine.keeping_errors():
                for own in mine.arrays:
                    own.verify()
        self.group.watch.enter("agree")
        loaded = self._agree(mine)
        self.group.watch.close()
        loaded = replace(loaded, report=replace(loaded.report, seconds=time.perf_counter() - started))
        _log.info("loaded %s: %s", self.name, loaded.report)
        return loaded

    def verify(self, array: jax.Array, seed: int) -> VerifyReport:
        """Compare an array with the file. The job has one array."""
        (load,) = self.loads
        group, state, error = self.group, None, None
        self.begin()
        group.watch.enter("verify")
        if load.is_open:
            try:
                state = load.contents()
            except Exception as found:
                let_interruption_pass(found)
                error = found
        sums = group.agree(error, to_sums(state))
        check_same(str(load.info), sums, load.info.path, load.info.dataset, is_open=True)
        proven = load.verifier(seed).run(group, array)
        group.watch.close()
        return proven

    # --- what this rank does

    @cached_property
    def staging(self) -> Staging:
        """How all arrays together use the memory under the cap."""
        layouts = [load.layout for load in self.loads]
        if len(layouts) == 1:
            return layouts[0].staging(self._options.staging_nbytes)
        n_threads = max(layout.n_threads for layout in layouts)
        return plan_staging([(made.schedule, made.source) for made in layouts], self._options.staging_nbytes, n_threads)

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

    def _make_buffers(self, segments: Mapping[int, Segment]) -> Buffers:
        """Buffers for all arrays: in memory that the ranks of a machine share, where there is some."""
        staging, segment = self.staging, segments.get(self.group.rank)
        shared = segment.data if segment is not None and self._slots_nbytes else None
        return Buffers(
            Slots(staging.n_slots, staging.slot_nbytes, shared),
            Slots(staging.n_pack, staging.pack_nbytes),
            segments,
            Bell() if segment is None else segment.bell,
        )

    def _do_own(self, mine: _Outcome, tags: tuple[int, int, int], segments: Mapping[int, Segment]) -> None:
        """Open, agree, exchange, assemble, close. What goes wrong is kept: the ranks still have to agree on it."""
        opened = ExitStack()
        try:
            self.group.watch.enter("open")
            buffers, advance = None, None
            with mine.keeping_errors():
                buffers = self._make_buffers(segments)
                advance = self._get_ready(mine.arrays, opened, buffers)
            if not self._is_direct:
                self.group.agree(mine.error)  # a rank that cannot read or receive must say so before anything is sent
            if mine.error is None and buffers is not None:
                with mine.keeping_errors():
                    self._fill(mine, tags, buffers, advance)
        except BaseException:
            with suppress(Exception):  # the first error names the cause better
                opened.__exit__(*sys.exc_info())
            raise
        with mine.keeping_errors():  # the other ranks still wait for this rank in the last agreement
            opened.close()

    def _get_ready(self, arrays: list[OwnArray], opened: ExitStack, buffers: Buffers) -> Callable[[int], None] | None:
        """Open the sources and make what the exchange needs; returns the function to call with its progress."""
        sources = OpenSources([own.load for own in arrays if own.reads], opened)
        for own in arrays:
            own.open(sources)
        for own in arrays:
            own.make_room()
        resources = opened.enter_context(Resources(buffers.slots, buffers.bell, self.staging.n_threads))
        for own in arrays:
            own.make_reader(opened, resources, self.tuning)
        total = sum(own.nbytes for own in arrays)
        return opened.enter_context(progress_of(self._options.progress, self.name, total, self.group.rank))

    def _fill(
        self, mine: _Outcome, tags: tuple[int, int, int], buffers: Buffers, on_progress: Callable[[int], None] | None
    ) -> None:
        """Read and exchange all arrays, and hand them to JAX."""
        seed = crc32(json.dumps([*self._agreed.items(), *tags]).encode())
        moves = [own.move(seed, is_named=len(mine.arrays) > 1) for own in mine.arrays]
        failed, mine.moved = exchange(
            self.group, moves, buffers, tags=tags, checksums=self._options.checksums, on_progress=on_progress
        )
        if failed is not None:
            raise failed
        self.group.watch.enter("assemble")
        for own in mine.arrays:
            own.assemble()
        for own in mine.arrays:
            own.check_unchanged()

    # --- what all ranks do together

    def _agree(self, mine: _Outcome) -> Loaded:
        """The last agreement: one reduction of the error, the counts, and the sums that compare the files of all ranks."""
        own_report = mine.report()
        counts = [own_report.chunks_decoded, own_report.nbytes_read, own_report.proven.n_parts]
        for own in mine.arrays:
            counts += [own.counters.chunks_missing, *to_sums(own.contents), *own.checked.counts]
        n_chunks, nbytes, n_parts, *sums = self.group.agree(mine.error, counts)
        if not mine.is_loaded:
            raise ConfigError("nothing was loaded")
        n_each = len(sums) // len(mine.arrays)
        n_missing, proven = [], []
        for k, own in enumerate(mine.arrays):
            n, *of_array = sums[k * n_each : (k + 1) * n_each]
            n_missing.append(n)
            info = own.load.info
            check_same(str(info), of_array[:N_SUMS], info.path, info.dataset, is_open=own.load.is_open)
            proven.append(own.load.verifier().agree(self.group, own.checked, of_array[N_SUMS:]))
        self._settle_missing(mine.arrays, n_missing)
        self._warn_of_packed()
        report = replace(
            own_report,
            chunks_decoded=n_chunks,
            nbytes_read=nbytes,
            chunks_missing=sum(n_missing),
            proven=join_proven(proven, n_parts),
        )
        return Loaded([own.array for own in mine.arrays if own.array is not None], proven, report)

    def _warn_of_packed(self) -> None:
        """Warn once if stored numbers were loaded that are not the values, and the caller did not say that this is meant."""
        asked = [load.info for load in self.loads if load.options.decode is None and load.info.packing]
        found = [(info, packed_by(np.dtype(info.dtype), info.packing)) for info in asked]
        told = [f"{info} ({', '.join(how)})" for info, how in found if how]
        if told:
            text = (
                f"these numbers are packed, and were loaded as they are stored: {some(told)}. Pass decode=True to apply that "
                "and the fill values, decode=False if the stored numbers are meant"
            )
            warn_once(text, PackedWarning, self.group.rank)

    def _settle_missing(self, arrays: list[OwnArray], n_missing: list[int]) -> None:
        """Warn or raise, as the caller asked, now that all ranks know how many chunks are missing."""
        how = self._options.missing
        found = [(own, n) for own, n in zip(arrays, n_missing, strict=True) if n]
        if how == "fill" or not found:
            return
        first = self.group.least_ints(
            np.array([fold_first(own.counters.missing) for own, _ in found], dtype=np.int64).reshape(-1)
        )
        for (own, n), least in zip(found, first.reshape(len(found), -1).tolist(), strict=True):
            source = own.load.layout.source
            text = describe_missing(n, unfold_first(least), own.load.info, source.selection, source.chunks)
            settle_missing(text, how, self.group.rank, own.load.info)
