"""A pytest plugin: let the small arrays of `tests/mpi` travel as large ones do, and count how they travelled.

Variables of the environment (beside shardload's own): ``WAYS_COUNTS``, a folder for each rank's counts; ``WAYS_THREADS``, how
many threads decode; ``WAYS_WITHOUT``, a rank on which no memory can be shared; ``WAYS_BOTH``, if there must be many notes and
messages on every rank (with ``SHARDLOAD_RANKS_PER_NODE=2``, on 4 ranks).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardload.comm import group
from shardload.comm.mpi import world
from shardload.comm.shared_memory import Segment
from shardload.transfer import channels
from shardload.transfer.chunk_tasks import ChunkTasks
from tests.tuning import as_large

as_large(small_nbytes=0)
counts: Counter[str] = Counter()


def counted(kind: type, method: str, name: str) -> None:
    """Count the calls of a method."""
    right = getattr(kind, method)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        counts[name] += 1
        return right(self, *args, **options)

    setattr(kind, method, call)


counted(channels.Channel, "expect", "senders")
counted(channels.SharedMemoryChannel, "_offer", "notes sent")
counted(channels.MessageChannel, "send", "messages sent")
counted(channels.SharedMemoryChannel, "_take", "tiles taken")
counted(ChunkTasks, "_read_chunk", "chunks decoded")

machine_of = group.Group.machine.fget
create = Segment.create


def many_threads(self: group.Group) -> group.Machine:
    return replace(machine_of(self), n_threads=int(os.environ["WAYS_THREADS"]))  # type: ignore[misc]


def create_unless(nbytes: int) -> Segment:
    if world().rank == int(os.environ["WAYS_WITHOUT"]):
        counts["segments refused"] += 1
        raise OSError(1, "Operation not permitted")
    return create(nbytes)


if "WAYS_THREADS" in os.environ:
    group.Group.machine = property(many_threads)  # type: ignore[assignment,method-assign]
if "WAYS_WITHOUT" in os.environ:
    Segment.create = create_unless  # type: ignore[method-assign,assignment]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "WAYS_COUNTS" in os.environ:
        Path(os.environ["WAYS_COUNTS"], f"{world().rank}.json").write_text(json.dumps(counts))
    if "WAYS_BOTH" in os.environ and min(counts[name] for name in ("notes sent", "messages sent", "tiles taken")) <= 100:
        os.write(2, f"rank {world().rank}: parts did not travel as they should: {dict(counts)}\n".encode())
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
