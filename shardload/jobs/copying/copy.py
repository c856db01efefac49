"""How is a file copied into another layout or format, by many ranks, whatever its size? In rounds, without devices.

1. Rank 0 finds the arrays, and what is asked of the new file (`request`).
2. All ranks plan the same slabs and rounds (`plan`, `planning.copying`).
3. In each round a rank reads its slabs, or its piece of one that all ranks read together (`reading`). A `FileTarget` encodes
   and writes the chunks of the target meanwhile.

JAX is not needed, and not imported.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NoReturn

import numpy as np

from shardload.comm.agreement import Invocation
from shardload.comm.environment import mpi_is_off
from shardload.comm.singletons import refuse_singletons
from shardload.engine.call import Call, begin_call
from shardload.engine.file_target import FileTarget, WriteCounts
from shardload.engine.session import Round, Session
from shardload.errors import ConfigError
from shardload.formats.sink import Sink
from shardload.jobs.copying.plan import CopyPlan, plan_copy
from shardload.jobs.copying.reading import CopyRounds, CopySource
from shardload.jobs.copying.request import PAGE_NBYTES, CopyRequest, SourceArray, find, new_sink, without_what_is_refused
from shardload.jobs.copying.resume import DoneChunks, find_done
from shardload.jobs.progress import progress_of
from shardload.options import INDEX, TIMEOUT
from shardload.planning.staging import Staging
from shardload.units import counted

_NO_STAGING = Staging(n_threads=1, n_slots=0, n_pack=0, slot_nbytes=0)


@dataclass(frozen=True)
class CopyReport:
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


def copy_file(
    request: CopyRequest,
    *,
    comm: Any = None,
    only_plan: bool = False,
    progress: bool | Callable[[int, int], None] | None = None,
) -> CopyReport:
    """Copy arrays of a file into a new file. Collective: yes.

    Parameters
    ----------
    request : CopyRequest
        What is asked for, the same on all ranks.
    comm : mpi4py.MPI.Comm, optional
        The ranks; default: COMM_WORLD, or this process alone.
    only_plan : bool
        True to write nothing.
    progress : bool, callable or None
        As in `load`.

    Raises
    ------
    ConfigError, SourceError, PeerError, VerifyError, StallError
        On all ranks the same. Nothing was saved, and what had the name of the target is as it was.
    """
    started = time.perf_counter()
    with _call(request.source, request.describe(), request.timeout, comm) as call:
        contents = _plan(call, request)
        if only_plan:
            return CopyReport(contents.plan, notes=contents.plan.notes)
        return _copy(call, request, contents, progress, started)


def refuse_copy(source: str, error: ConfigError, comm: Any = None) -> NoReturn:
    """Raise what is wrong with this rank's arguments on all ranks, in the place of `copy_file`. Collective: yes."""
    with _call(source, {}, TIMEOUT, comm, error) as call:
        call.settle()
    raise error


@contextmanager
def _call(
    source: str, described: Mapping[str, str], timeout: float | None, comm: Any, error: ConfigError | None = None
) -> Iterator[Call]:
    """The call of all ranks, which have not compared its arguments yet."""
    asked = Invocation("copy", f"copy of '{source}'", described)
    with begin_call(asked, error, comm=comm, timeout=timeout) as call:
        if comm is None and call.group.size == 1 and not mpi_is_off(os.environ):
            refuse_singletons()  # each would write the whole file
        yield call


@dataclass(frozen=True)
class _Contents:
    """What all ranks know after planning."""

    found: list[SourceArray]
    sink: Sink
    plan: CopyPlan


def _plan(call: Call, request: CopyRequest) -> _Contents:
    """Rank 0 looks for the arrays, all ranks plan. Collective: yes."""
    group = call.group
    n_nodes = group.machine.n_nodes
    on_root: list[Sink] = []

    def look() -> bytes:
        found, beside, notes = find(request)
        try:
            sink = new_sink(request, found, beside, n_nodes)
        except ConfigError as error:
            found, beside, more = without_what_is_refused(request, found, beside, error)
            notes += more
            sink = new_sink(request, found, beside, n_nodes)
        on_root.append(sink)
        return pickle.dumps(([array.for_others() for array in found], notes))

    def make(told: bytes) -> _Contents:
        found, notes = pickle.loads(told)  # of this job's rank 0, never of a file
        sink = on_root[0] if on_root else new_sink(request, found, None, n_nodes)
        return _Contents(found, sink, plan_copy(request, found, sink, group.size, group.machine, notes))

    return call.plan(look, make, lambda made: json.dumps(made.plan.to_dict(), default=str))


def _copy(call: Call, request: CopyRequest, contents: _Contents, progress: Any, started: float) -> CopyReport:
    """Copy what was planned. Collective: yes."""
    group, found, planned = call.group, contents.found, contents.plan
    notes = list(planned.notes)
    done = DoneChunks(planned.specs)
    if request.resume:
        done = find_done(group, contents.sink, [array.full_name for array in found], planned.specs)
        there = f"{done.n:,} of {done.n_all:,} chunks were there already, and were not read back"
        notes += [there if done.n else "no chunk was left of an earlier copy, so this one began anew"]
    rounds, memory = CopyRounds(group, found, planned, done), planned.memory
    shared = memory.moving_nbytes + PAGE_NBYTES if any(array.is_together for array in planned.arrays) else None
    checksums, (n_rounds, nbytes) = request.verify != INDEX, rounds.totals()
    n_most = -int(group.least_ints(np.array([-n_rounds]))[0])  # of the rank that has most rounds
    with (
        progress_of(progress, f"copy to {request.target}", nbytes, group.rank) as advance,
        CopySource(group, request, found) as source,
        Session(group, f"{call.asked.digest:016x}", shared_nbytes=shared, checksums=checksums) as session,
        FileTarget(
            group,
            contents.sink,
            session.errors,
            round_nbytes=memory.round_nbytes,
            verify=request.verify,
            n_threads=memory.n_threads,
            on_progress=advance,
        ) as target,
    ):
        target.begin()
        session.run(chain(rounds, repeat(Round((), _NO_STAGING, False), n_most - n_rounds)), source, target)
        with session.errors:
            source.check_unchanged()
        written = target.end()
    n_decoded, *missing = group.agree(None, [source.n_decoded, *source.n_missing])
    lost = [
        f"{counted(n, 'chunk')} of {array.info} {'are' if n != 1 else 'is'} not stored, and the copy has the fill value"
        for array, n in zip(found, missing, strict=True)
        if n
    ]
    seconds = time.perf_counter() - started
    return CopyReport(planned, written, seconds, n_decoded, (*notes, *lost), done.n)
