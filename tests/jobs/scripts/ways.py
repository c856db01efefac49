"""A pytest plugin: let the small arrays of `tests/mpi` travel as large ones do, and count how they travelled.

Variables of the environment (beside shardload's own): ``WAYS_COUNTS``, a folder for each rank's counts; ``WAYS_THREADS``, how
many threads decode; ``WAYS_WITHOUT``, a rank on which no memory can be shared; ``WAYS_MUST``, how parts must have travelled
when all tests are done: ``notes`` or ``messages`` alone, or ``both``; ``WAYS_HALF``: every second test goes by the usual sizes,
and is not counted.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from shardload.comm import group
from shardload.comm.mpi import world
from shardload.comm.shared_memory import Segment
from shardload.comm.transport import MpiTransport
from shardload.planning.tuning import default_tuning
from shardload.transfer import channels
from shardload.transfer.reader import BoxReader
from tests.tuning import as_large, as_usual

# Large arrays, with chunks of a byte. What these move is not counted.
AS_THEY_ARE = ("test_memory",)
counts: Counter[str] = Counter()

# What there must be many of on every rank, and none of on any.
MUST: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "": ((), ()),
    "notes": (("notes sent", "tiles taken", "boxes decoded"), ("messages sent",)),
    "messages": (("messages sent", "boxes decoded"), ("notes sent", "tiles taken")),
    "both": (("notes sent", "tiles taken", "boxes decoded", "messages sent"), ()),
}

as_large(small_nbytes=0)  # also for scripts that import this, without pytest


def counted(kind: type, method: str, name: str) -> None:
    """Count the calls of a method."""
    right = getattr(kind, method)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        counts[name] += default_tuning().worth_sharing_nbytes == 0
        return right(self, *args, **options)

    setattr(kind, method, call)


counted(channels.Channel, "expect", "senders")
counted(channels.Channels, "offer", "notes sent")
counted(MpiTransport, "send", "messages sent")
counted(channels.Channel, "_copy", "tiles taken")
counted(BoxReader, "_read", "boxes decoded")

machine_of = group.Group.machine.fget
create = Segment.create


def many_threads(self: group.Group) -> group.Topology:
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


def pytest_runtest_setup(item: pytest.Item) -> None:
    as_usual()
    half = "WAYS_HALF" in os.environ and crc32(item.nodeid.encode()) % 2  # the same half on every rank
    if item.path.stem not in AS_THEY_ARE and not half:
        as_large(small_nbytes=0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "WAYS_COUNTS" in os.environ:
        Path(os.environ["WAYS_COUNTS"], f"{world().rank}.json").write_text(json.dumps(counts))
    many, none = MUST[os.environ.get("WAYS_MUST", "")]
    if any(counts[name] <= 30 for name in many) or any(counts[name] for name in none):
        os.write(2, f"rank {world().rank}: parts did not travel as they should: {dict(counts)}\n".encode())
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
