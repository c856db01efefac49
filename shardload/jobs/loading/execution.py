"""How are the arrays of one call loaded? In the same steps for one array and for many:

1. Allocate the pieces and open the sources. Errors here are known before other ranks wait for the values.
2. Agree that every rank is ready. (Skipped if each rank reads what its own devices hold: then no rank waits for another.)
3. Read and exchange all arrays, with one set of threads and staging buffers. Hand the pieces to JAX.
4. Verify and close. Agree on errors, on what was read and on what was proven. Make one report.

A rank that fails also goes through all steps, and reports its error where the ranks agree.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from shardload.arrays.padding import loaded_as
from shardload.arrays.verification import COUNTED, ShardFindings, Verifier, VerifyReport, agree_all
from shardload.comm.group import Group, Invocation
from shardload.engine.call import Call, begin_call
from shardload.engine.session import Round, Session, shared_nbytes
from shardload.errors import PackedWarning
from shardload.formats.contract.array import ArrayInfo, some
from shardload.jobs.consistency import State, check_same, check_same_objects, is_open, to_sums, version_in, version_of_state
from shardload.jobs.loading.endpoints import ArrayLoad, DeviceTarget, LoadSource, kept_sources, moves_of
from shardload.jobs.loading.plan import ArrayReport, Loaded, LoadReport, Phase, phases_of, staging_of
from shardload.jobs.progress import progress_of
from shardload.jobs.trees import keys_text
from shardload.options import FILE, FULL, INDEX, CallOptions, Options
from shardload.planning.region import Region
from shardload.planning.tuning import default_tuning
from shardload.storage.remote import Counts, counts
from shardload.system.caller import warn_once
from shardload.system.interruption import FirstError
from shardload.transfer.counters import Counters, describe_missing, settle_missing
from shardload.values.decoding import packed_by

_log = logging.getLogger("shardload")
_Numbers = Mapping[str, list[list[int]]]  # by what they say: a list for each array, or file


def execute(comm: Any, loads: Sequence[ArrayLoad], agreed: Invocation) -> Loaded:
    """Agree that all ranks execute the same plans, then load: the arrays in order, and a report of all. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm or None
        The communicator that the caller passed.
    loads : sequence of ArrayLoad
        The arrays in order.
    agreed : Invocation
        The call in which they were planned, and on which all ranks agreed: it identifies the plans.
    """
    started = time.perf_counter()
    invocation = replace(agreed, kind="execute", title=f"execute() of the plan for {_name_of(loads)}")
    options: CallOptions = loads[0].options
    with begin_call(invocation, comm=comm, timeout=options.timeout) as call:
        call.settle()
        return Loader(call, loads).run(started)


def _name_of(loads: Sequence[ArrayLoad]) -> str:
    """What is loaded, for messages."""
    return f"{loads[0].info}{f' and {len(loads) - 1} more' if len(loads) > 1 else ''}"


class Loader:
    """Loads the arrays of one call. Every public method is collective, inside a call that all ranks make.

    Parameters
    ----------
    call : Call
        The call of all ranks, with the plan on which they agreed.
    loads : sequence of ArrayLoad
        The arrays, at least one. Their `staging`, `timeout`, `progress` and `verify` are the same.
    """

    def __init__(self, call: Call, loads: Sequence[ArrayLoad]) -> None:
        self._group, self._loads, self._agreed = call.group, list(loads), call.invocation
        self._options: CallOptions = loads[0].options
        self._name = _name_of(loads)

    def run(self, started: float) -> Loaded:
        """Load the arrays: in order, with a report of all, which counts seconds from `started` (`time.perf_counter`)."""
        group, loads, options = self._group, self._loads, self._options
        group.watch.begin(self._name, options.timeout)  # again: now it can name the arrays
        schedules, staging = [load.layout.schedule for load in loads], staging_of([load.plan for load in loads])
        sent_nbytes = [schedule.max_block_size * schedule.itemsize for schedule in schedules if not schedule.is_direct]
        nbytes = None
        if not self._is_in_memory and max(sent_nbytes, default=-1) >= default_tuning().worth_sharing_nbytes:
            nbytes = shared_nbytes(staging) if any(schedule.is_owner(group.rank) for schedule in schedules) else 0
        requests_before, checked = counts(), [ShardFindings() for _ in loads]
        with Session(group, f"{self._agreed.digest:016x}", shared_nbytes=nbytes, checksums=options.checksums) as session:
            target = DeviceTarget(loads, group.rank, session.errors)
            source = LoadSource(loads, group.rank)
            with ExitStack() as opened:
                with session.errors:
                    advance = progress_of(options.progress, lambda: self._name, target.nbytes, group.rank)
                    session.on_progress = opened.enter_context(advance)
                if self._is_in_memory:
                    group.watch.enter("assemble")
                    with session.errors:
                        target.fill(session)
                else:
                    moves = moves_of(loads)
                    session.run([Round(moves, staging, bool(sent_nbytes))], source, target)
                    for move in moves if not session.errors else ():
                        target.arrays[move.array].counters = move.producer.counters
            if options.verify in (FILE, FULL):
                session.agree()  # what any rank could not read has no values that could be compared with the file
            if not session.errors:
                group.watch.enter("verify")
                with session.errors:
                    pieces = ({p.region: p.data for p in sharded.pieces.shards.values()} for sharded in target.arrays)
                    checked = self._check([sharded.array for sharded in target.arrays], pieces)
            group.watch.enter("agree")
            numbers = self._numbers(session, source, target, checked, requests_before)
            sums = _sums_over_ranks(group, session.errors, numbers)
            arrays, report = self._finish(sums, session, source, target, checked, started)
        group.watch.close()
        _log.info("loaded %s: %s", self._name, report)
        return arrays, report

    def verify(self, arrays: Sequence[jax.Array], seed: int) -> list[VerifyReport]:
        """Compare arrays, in the order of the loads, with their files."""
        group, loads = self._group, self._loads
        states: list[State] = [None] * len(loads)
        findings, errors, kept = [ShardFindings() for _ in loads], FirstError(), kept_sources(loads)
        group.watch.begin(self._name, self._options.timeout)
        group.watch.enter("verify")
        with errors:
            for k, load in enumerate(loads):
                with load.naming_errors():
                    states[k] = load.contents(kept.open_again(k)) if is_open(load.handle) else None
        sums = _sums_over_ranks(group, errors, {"states": list(map(to_sums, states))})
        for load, state in zip(loads, sums["states"], strict=True):
            check_same(load.name, state, load.info.path, load.info.dataset, is_open=True)
        with errors:
            findings = self._check(arrays, [{}] * len(loads), seed)
        sums = _sums_over_ranks(group, errors, {"proven": [of_array.counts for of_array in findings]})
        proven = self._agree(findings, sums["proven"])
        group.watch.close()
        return proven

    # --- facts about the arrays together

    @cached_property
    def _is_in_memory(self) -> bool:
        """True if every rank has all values already, as they are to be loaded: they came with the metadata."""
        came = (load.handle is not None and load.values is not None for load in self._loads)
        return all(came) and not any(load.layout.source.casts for load in self._loads)

    @cached_property
    def _paths_of_several(self) -> list[str]:
        """The files that hold several of the arrays and are opened here, in the same order on every rank."""
        n = Counter[str]() if self._is_in_memory else Counter(load.info.path for load in self._loads)
        return [path for path, count in n.items() if count > 1]

    # --- what this rank does

    def _check(
        self, arrays: Sequence[Any], pieces: Iterable[Mapping[Region, np.ndarray[Any, Any]]], seed: int = 0
    ) -> list[ShardFindings]:
        """Verify what the devices of this process hold, at the level that the caller asked for. `pieces`: see `Verifier`."""
        if self._options.verify == INDEX:  # who made an array has compared each of its shards with JAX's index map
            return [ShardFindings(Counter(n_shards=len(array.sharding.addressable_devices))) for array in arrays]
        checked = []
        with kept_sources(self._loads) as kept:
            for k, (load, array, pieces_of_load) in enumerate(zip(self._loads, arrays, pieces, strict=True)):
                layout, open_again = load.layout, partial(kept.open_again, k)
                verifier = Verifier(load.name, layout.schedule, layout.source, load.options, seed, open_again)
                with load.naming_errors():
                    checked.append(verifier.check(array, self._group.rank, pieces_of_load))
        return checked

    def _numbers(
        self, session: Session, source: LoadSource, target: DeviceTarget, checked: list[ShardFindings], requests_before: Counts
    ) -> _Numbers:
        """What the last agreement sums over the ranks: counts for the report, and numbers that compare the ranks' files."""
        stores, counters = counts().since(requests_before), [sharded.counters for sharded in target.arrays]
        kept = source.kept
        return {
            "job": [[session.counters.n_checksums, stores.requests, stores.nbytes, stores.retries, len(kept.versions_read)]],
            "costs": [[c.chunks_missing, c.chunks_decoded, c.nbytes_read, c.n_checksums] for c in counters],
            "states": [to_sums(state) for state in source.contents],
            "files": [to_sums(kept.file_states.get(path)) for path in self._paths_of_several],
            "proven": [findings.counts for findings in checked],
        }

    # --- what all ranks do together

    def _finish(
        self,
        sums: _Numbers,
        session: Session,
        source: LoadSource,
        target: DeviceTarget,
        checked: list[ShardFindings],
        started: float,
    ) -> Loaded:
        """Check that all read the same file, warn, and make the result. `sums`: of `_numbers`, over the ranks."""
        arrays = [sharded.array for sharded in target.arrays]
        ((n_parts, n_requests, nbytes_fetched, n_retries, n_objects),) = sums["job"]
        for load, array, state in zip(self._loads, arrays, sums["states"], strict=True):
            if any(state):  # some rank had the file open
                check_same(load.name, state, load.info.path, load.info.dataset, is_open=is_open(load.handle))
            read_in = load.values.read_in if len(arrays) == 1 and load.values is not None else None
            provenance = loaded_as(array)
            if provenance is not None:
                provenance.version = version_in(state) if read_in is None else version_of_state(read_in)
        for path, state in zip(self._paths_of_several, sums["files"], strict=True):  # each array may have had one reader
            check_same(f"'{path}'", state, path, "")
        if n_objects:
            check_same_objects(self._group, source.kept.versions_read)
        proven, costs = self._agree(checked, sums["proven"]), sums["costs"]
        counters = Counters()
        for measured in (session.counters, *(sharded.counters for sharded in target.arrays)):
            counters.add(measured)
        self._settle_missing([n_missing for n_missing, *_ in costs], [sharded.counters for sharded in target.arrays])
        packed = ((load.name, load.info, load.options) for load in self._loads if load.info.packing)
        warn_of_packed(packed, self._group.rank)
        device = Phase(sum(sharded.device_seconds for sharded in target.arrays), target.nbytes)
        n_missing, n_decoded, nbytes_read, n_checksums = map(sum, zip(*costs, strict=True))
        n_proven = map(sum, zip(*sums["proven"], strict=True))
        reports = [
            ArrayReport(keys_text(load.where), str(load.info), decoded, nbytes, missing, verified)
            for load, (missing, decoded, nbytes, _), verified in zip(self._loads, costs, proven, strict=True)
            if load.where
        ]
        report = LoadReport(
            time.perf_counter() - started,
            n_decoded,
            nbytes_read,
            phases_of(counters, device),
            counters.peak_nbytes,
            VerifyReport(self._options.verify, n_parts=n_parts + n_checksums, **dict(zip(COUNTED, n_proven, strict=True))),
            n_missing,
            tuple(reports),
            n_requests,
            nbytes_fetched,
            n_retries,
        )
        return arrays, report

    def _agree(self, checked: list[ShardFindings], sums: list[list[int]]) -> list[VerifyReport]:
        """What was proven of each array. `sums`: the counts of all ranks."""
        arrays = ((load.name, load.layout.schedule.shards) for load in self._loads)
        return agree_all(self._group, self._options.verify, arrays, checked, sums)

    def _settle_missing(self, n_missing: list[int], counters: list[Counters]) -> None:
        """Warn or raise, as the caller asked, now that all ranks know how many chunks are missing."""
        missing = self._options.missing
        incomplete = [k for k, n in enumerate(n_missing) if n]
        if missing == "fill" or not incomplete:
            return
        numbers = [counters[k].first_missing for k in incomplete]
        first_of_all = self._group.least_ints(np.array(numbers, dtype=np.int64)).tolist()
        texts = []
        for k, first in zip(incomplete, first_of_all, strict=True):
            load, source = self._loads[k], self._loads[k].layout.source
            text = describe_missing(n_missing[k], first, load.info, source.selection, source.chunks)
            texts.append(f"{load.where}: {text}" if load.where else text)
        settle_missing(some(texts), missing, self._group.rank, self._loads[incomplete[0]].info)


def _sums_over_ranks(group: Group, errors: FirstError, numbers: _Numbers) -> _Numbers:
    """The sums over the ranks, if nothing went wrong on any; else all raise that. Collective."""
    sums = iter(group.agree(errors.take(), [number for rows in numbers.values() for row in rows for number in row]))
    return {name: [[next(sums) for _ in row] for row in rows] for name, rows in numbers.items()}


def warn_of_packed(arrays: Iterable[tuple[str, ArrayInfo, Options]], rank: int) -> None:
    """Warn once if packed numbers were loaded as they are stored, and the caller did not pass decode=False."""
    undecoded = [(name, info) for name, info, options in arrays if options.decode is None and info.packing]
    packed = [(name, packed_by(np.dtype(info.dtype), info.packing)) for name, info in undecoded]
    texts = list(dict.fromkeys(f"{name} ({', '.join(rules)})" for name, rules in packed if rules))
    if texts:
        text = (
            f"these numbers are packed, and were loaded as they are stored: {some(texts)}. Pass decode=True to apply that "
            "and the fill values, decode=False if the stored numbers are meant"
        )
        warn_once(text, PackedWarning, rank)
