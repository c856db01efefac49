"""How is a file copied into another layout or format, by many ranks, whatever its size? In rounds, without devices.

1. Rank 0 finds the arrays, and what is asked of the new file (`request`).
2. All ranks plan the same slabs and rounds (`plan`, `planning.copying`).
3. In each round a rank reads its slabs, or its piece of one that all ranks read together (`reading`), and hands the chunks
   of the target to `writing.file.write_file`, which encodes and writes them meanwhile.

JAX is not needed, and not imported.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from shardload.comm.environment import mpi_is_off
from shardload.comm.group import Group, Invocation, group_of
from shardload.comm.singletons import refuse_singletons
from shardload.errors import ConfigError
from shardload.formats.sink import Sink
from shardload.jobs.copying.plan import CopyPlan, plan_copy
from shardload.jobs.copying.reading import CopyReading
from shardload.jobs.copying.request import CopyRequest, Found, find, new_sink, without_what_is_refused
from shardload.jobs.copying.resume import Done, find_done
from shardload.jobs.progress import progress_of
from shardload.jobs.writing.file import Written, write_file
from shardload.options import TIMEOUT
from shardload.planning.copying import Round, plan_rounds
from shardload.system.interruption import let_interruption_pass
from shardload.units import counted

__all__ = ["CopyReport", "copy_file", "refuse_copy"]


@dataclass(frozen=True)
class CopyReport:
    """What a copy did, in the whole job.

    Attributes
    ----------
    plan : CopyPlan
        What was planned.
    written : Written or None
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
    written: Written | None = None
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
    with _call(request.source, request.describe(), request.timeout, comm) as group:
        return _Copy(group, request).run(only_plan, progress)


def refuse_copy(source: str, error: ConfigError, comm: Any = None) -> NoReturn:
    """Raise what is wrong with this rank's arguments on all ranks, in the place of `copy_file`. Collective: yes."""
    with _call(source, {}, TIMEOUT, comm, error):
        raise error


@contextmanager
def _call(
    source: str, described: Mapping[str, str], timeout: float | None, comm: Any, error: ConfigError | None = None
) -> Iterator[Group]:
    """The call of all ranks, once they have agreed on its arguments. If any rank has an error, all raise it here."""
    group = group_of(comm, timeout)
    if comm is None and group.size == 1 and not mpi_is_off(os.environ):
        refuse_singletons()  # each would write the whole file
    with group.call(timeout) as refusal:
        title = f"copy of '{source}'"
        group.watch.begin(title, timeout)
        _ = group.machine  # collective the first time, and here every rank is present
        try:
            group.settle(Invocation("copy", title, described), refusal or error)
            yield group
        finally:
            if not group.watch.is_stalled:
                group.watch.close()


class _Copy:
    """One rank's part in a copy."""

    def __init__(self, group: Group, request: CopyRequest) -> None:
        self._group, self._request = group, request
        self._started = time.perf_counter()

    def run(self, only_plan: bool, progress: Any) -> CopyReport:
        group, request = self._group, self._request
        group.watch.enter("metadata")
        own: list[Sink] = []

        def look() -> str:
            found, beside, notes = find(request)
            try:
                own.append(new_sink(request, found, beside, group.machine.n_nodes))
            except ConfigError as error:
                found, beside, more = without_what_is_refused(request, found, beside, error)
                notes += more
                own.append(new_sink(request, found, beside, group.machine.n_nodes))
            return json.dumps([[one.to_dict() for one in found], notes])

        told, notes = json.loads(group.tell(look, 0))
        group.watch.enter("plan")
        made: tuple[list[Found], Sink, CopyPlan] | None = None
        error: Exception | None = None
        try:
            found = [Found.from_dict(one) for one in told]
            sink = own[0] if own else new_sink(request, found, None, group.machine.n_nodes)
            made = found, sink, plan_copy(request, found, sink, group.size, group.machine, notes)
        except Exception as raised:
            let_interruption_pass(raised)
            error = raised
        group.agree(error)
        if made is None:
            raise ValueError("nothing was planned")
        found, sink, planned = made
        if only_plan:
            return CopyReport(planned, notes=tuple(notes))
        done = Done(planned.specs)
        if request.resume:
            done = find_done(group, sink, [one.full_name for one in found], planned.specs)
            there = f"{done.n:,} of {done.n_all:,} chunks were there already, and were not read back"
            notes += [there if done.n else "no chunk was left of an earlier copy, so this one began anew"]
        rounds = plan_rounds(planned.arrays, group.size, planned.memory.round_nbytes, done.holds)
        reading = CopyReading(group, request, found, planned, rounds[group.rank], done)
        total = self._own_nbytes(planned, rounds[group.rank])
        with progress_of(progress, f"copy to {request.target}", total, group.rank) as advance, reading:
            written = write_file(
                group,
                sink,
                reading.rounds(),
                verify=request.verify,
                n_threads=planned.memory.n_threads,
                on_progress=advance,
            )
        n_decoded, *missing = group.agree(None, [reading.n_decoded, *reading.n_missing])
        lost = [
            f"{counted(n, 'chunk')} of {one.info} {'are' if n != 1 else 'is'} not stored, and the copy has the fill value"
            for one, n in zip(found, missing, strict=True)
            if n
        ]
        seconds = time.perf_counter() - self._started
        return CopyReport(planned, written, seconds, n_decoded, (*notes, *lost), done.n)

    def _own_nbytes(self, planned: CopyPlan, rounds: list[Round]) -> int:
        """About how many bytes this rank writes, for its progress."""
        total = 0
        for one in rounds:
            nbytes = sum(item.slab.size * planned.arrays[item.array].unit.itemsize for item in one.items)
            total += nbytes // self._group.size if one.is_together else nbytes
        return total
