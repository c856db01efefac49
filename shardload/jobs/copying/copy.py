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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np

from shardload.comm.environment import mpi_is_off
from shardload.comm.mpi import refuse_singletons
from shardload.engine.call import Call, begin_request
from shardload.engine.file_target import FileTarget, WriteCounts
from shardload.engine.session import Round, Session
from shardload.errors import ConfigError
from shardload.formats.likeness import KEEP
from shardload.formats.sink import Sink
from shardload.jobs.copying.plan import CopyPlan, plan_copy
from shardload.jobs.copying.reading import CopySource, find_done
from shardload.jobs.copying.request import PAGE_NBYTES, CopyRequest, find, new_sink, without_what_is_refused
from shardload.jobs.progress import progress_of
from shardload.options import AUTO, CHECKSUM, TIMEOUT, Progress
from shardload.planning.staging import Staging
from shardload.units import PrintedReport, counted, format_nbytes, number_text

_NO_STAGING = Staging(n_threads=1, n_slots=0, n_pack=0, slot_nbytes=0)


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
        """For a person: one line; of a plan some."""
        plan, written, seconds = self.plan, self.written, max(self.seconds, 1e-9)
        if written is None:
            return "\n".join(plan.describe("the copy"))
        stored, rate = format_nbytes(written.nbytes_stored), format_nbytes(int(written.nbytes / seconds))
        text = f"{counted(len(plan.found), 'array')}, {format_nbytes(plan.nbytes)} ({stored} stored) in "
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
    **trust: Any,
) -> CopyReport:
    """Copy a file into other chunks, another compression, another format, by all ranks: what ``shardload copy`` does.

    Names of axes, attributes and coordinates are carried over. The new file has its name only when it is whole.

    Collective: yes, over `comm`. It needs neither devices nor `initialize`.

    Parameters
    ----------
    source, target : str or PathLike
        The file, with or without the name of an array (``"in.h5:/rho"``), and the new one. Or what `concat` returns.
    dataset : str or sequence of str
        Names of arrays, and patterns such as ``"group/*"``; by default all arrays.
    select, dtype : object, optional
        As in `load`. By names of axes, a selection counts for every array that has them.
    chunks, shards : tuple of int, "keep" or None
        A size for each axis; None: in one piece.
    compression : str, dict, "keep" or None
        As in `save`.
    unlimited : str, int or tuple of them
        Axes that can grow, beside those that can in the source.
    format, mode, staging, verify, progress, timeout, comm
        As in `save`; `verify` is ``"checksum"``, ``"full"`` or ``"index"``.
    resume : bool
        True goes on with what a copy to Zarr that was killed has left.
    only_plan : bool
        True writes nothing.
    **trust
        `allow_external`, `allow_filters`, `untrusted` and `storage`, as in `load`.

    Returns
    -------
    CopyReport
        What was planned, and what was written.

    Raises
    ------
    ConfigError, SourceError, VerifyError, PeerError, StallError
        As `save` does.

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
    started = time.perf_counter()
    read = partial(
        CopyRequest.check,
        source,
        target,
        dataset=dataset,
        select=select,
        dtype=dtype,
        chunks=chunks,
        shards=shards,
        compression=compression,
        unlimited=unlimited,
        format=format,
        mode=mode,
        staging=staging,
        verify=verify,
        resume=resume,
        progress=progress,
        timeout=timeout,
        **trust,
    )
    with begin_request("copy", f"copy of '{source}'", read, comm=comm) as (call, request):
        if comm is None and call.group.size == 1 and not mpi_is_off(os.environ):
            refuse_singletons()  # each would write the whole file
        sink, plan = _plan(call, request)
        if only_plan:
            return CopyReport(plan, notes=plan.notes)
        return _copy(call, request, sink, plan, started)


def _plan(call: Call, request: CopyRequest) -> tuple[Sink, CopyPlan]:
    """Rank 0 looks for the arrays, all ranks plan. Collective: yes."""
    group, n_nodes = call.group, call.group.machine.n_nodes
    on_root: list[Sink] = []

    def look() -> bytes:
        found, groups, notes = find(request)
        try:
            sink = new_sink(request, found, groups, n_nodes)
        except ConfigError as error:
            found, more = without_what_is_refused(request, found, error)
            notes += more
            sink = new_sink(request, found, groups, n_nodes)
        on_root.append(sink)
        return pickle.dumps(([array.for_others() for array in found if not array.is_text], notes))

    def make(told: bytes) -> tuple[Sink, CopyPlan]:
        found, notes = pickle.loads(told)  # of this job's rank 0, never of a file
        sink = on_root[0] if on_root else new_sink(request, found, None, n_nodes)
        return sink, plan_copy(request, found, sink, group.size, group.machine, notes)

    return call.plan(look, make, lambda made: json.dumps(made[-1].to_dict(), default=str))


def _copy(call: Call, request: CopyRequest, sink: Sink, plan: CopyPlan, started: float) -> CopyReport:
    """Copy what was planned. Collective: yes."""
    group, notes, memory = call.group, list(plan.notes), plan.memory
    done, n_done = find_done(group, sink, plan) if request.resume else [], 0
    if request.resume:
        n_done, n_all = (sum(int(count(flags)) for flags in done) for count in (np.count_nonzero, np.size))
        there = f"{n_done:,} of {n_all:,} chunks were there already, and were not read back"
        notes += [there if n_done else "no chunk was left of an earlier copy, so this one began anew"]
    shared = memory.moving_nbytes + PAGE_NBYTES if any(array.is_together for array in plan.arrays) else None
    source = CopySource(group, request, plan, done)
    options, (n_rounds, nbytes) = request.options, source.totals()
    n_most = -int(group.least_ints(np.array([-n_rounds]))[0])  # of the rank that has most rounds
    with (
        progress_of(options.progress, f"copy to {request.target}", nbytes, group.rank) as advance,
        source,
        Session(group, f"{call.asked.digest:016x}", shared_nbytes=shared, checksums=options.checksums) as session,
        FileTarget(
            group,
            sink,
            session.errors,
            round_nbytes=memory.round_nbytes,
            verify=options.verify,
            n_threads=memory.n_threads,
            on_progress=advance,
        ) as target,
    ):
        target.begin()
        session.run(chain(source.rounds(), repeat(Round((), _NO_STAGING, False), n_most - n_rounds)), source, target)
        with session.errors:
            source.check_unchanged()
        written = target.end()
    n_decoded, *missing = group.agree(None, [source.n_decoded, *source.n_missing])
    lost = [
        f"{counted(n, 'chunk')} of {array.info} {'are' if n != 1 else 'is'} not stored, and the copy has the fill value"
        for array, n in zip(plan.found, missing, strict=True)
        if n
    ]
    seconds = time.perf_counter() - started
    return CopyReport(plan, written, seconds, n_decoded, (*notes, *lost), n_done)
