"""Does what every load needs work here?

All ranks run each check together and agree on its outcome: a failure on one rank is reported by all, and no rank waits for it.
A rank that hangs inside MPI or JAX is ended by `Deadline`, which says what it was waiting for.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardload.api import scatter
from shardload.cli.doctor.facts import SHARED_NBYTES, Facts
from shardload.comm.group import Group
from shardload.errors import ShardloadError
from shardload.units import counted, format_nbytes

__all__ = ["Check", "Deadline", "run_checks"]

_SCATTER_NBYTES, _WIDTH = 1 << 20, 64
_MESSAGE_NBYTES = 1 << 20  # more than MPI sends without asking the receiver first
# All ranks have the same deadline: let the others print before the launcher ends them because this one exited.
_GRACE_SECONDS = 2.0
_LAST_SECONDS = 10.0

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Check:
    """The outcome of one check: whether it passed on all ranks (None: not tried), and details."""

    name: str
    ok: bool | None
    text: str


class Deadline:
    """Ends this process with exit code 1 after `seconds`, and says what it was waiting for.

    Parameters
    ----------
    seconds : float
        Counted from ``with``.
    who : str
        What this process is called in the message.
    """

    def __init__(self, seconds: float, who: str) -> None:
        self.at = "MPI to start"
        self.problem = ""  # an error on this rank that it could not report to the others
        self._seconds, self._who = seconds, who
        self._done = threading.Event()

    def rename(self, who: str) -> None:
        """Change what this process is called in the message."""
        self._who = who

    def __enter__(self) -> Deadline:
        threading.Thread(target=self._wait, daemon=True).start()
        # A library that hangs while it holds the GIL stops that thread too, but not this one.
        faulthandler.dump_traceback_later(self._seconds + _LAST_SECONDS, exit=True, file=2)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._done.set()
        faulthandler.cancel_dump_traceback_later()

    def _wait(self) -> None:
        if self._done.wait(self._seconds):
            return
        known = f"; {self.problem}" if self.problem else ""
        print(f"{self._who}: after {self._seconds:g} s still waiting for {self.at}{known}", file=sys.stderr, flush=True)
        if not self._done.wait(_GRACE_SECONDS):
            os._exit(1)


def run_checks(group: Group, rows: Sequence[Facts], deadline: Deadline, has_errors: bool) -> list[Check]:
    """Run all checks, in order. Collective. A failed check is returned, not raised.

    Parameters
    ----------
    group : Group
        All ranks.
    rows : sequence of Facts
        One per rank.
    deadline : Deadline
        Is told which check is running.
    has_errors : bool
        Whether the rules found errors: then the checks that need JAX are not tried.
    """
    steps: list[tuple[str, Callable[[], str]]] = []
    can_send = group.has_mpi
    same, other = _partners(rows) if can_send else (0, 0)
    for name, partner in (("messages, same node", same), ("messages, other node", other)):
        if partner:
            steps.append((name, lambda partner=partner: _ping_pong(group, partner)))  # type: ignore[misc]
    if can_send and any(len(row.node) > 1 for row in rows) and all(row.shares_memory for row in rows):
        steps.append(("shared memory", lambda: _look(group)))
    checks = [_take(group, deadline, name, work) for name, work in steps]
    why_not = "not tried, because of the errors below" if has_errors else ""
    for name, work in (("all-reduce", _all_reduce), ("scatter", _scatter)):
        if work is _scatter and group.size > 1 and not can_send:
            why_not = "not tried, because without MPI the processes cannot send each other data"
        if why_not:
            checks.append(Check(name, None, why_not))
            continue
        checks.append(_take(group, deadline, name, lambda work=work: _on_all_devices(group, work)))  # type: ignore[misc]
        why_not = "" if checks[-1].ok else f"not tried, because the {name} failed"
    return checks


def _take(group: Group, deadline: Deadline, name: str, work: Callable[[], str]) -> Check:
    """Run one check and agree on its outcome."""
    deadline.at, deadline.problem = f"the check '{name}'", ""
    text, error = "", None
    try:
        text = work()
    except Exception as found:
        error = found
        deadline.problem = f"here it failed: {type(found).__name__}: {found}"
    try:
        group.agree(error)
    except ShardloadError as shared:
        return Check(name, False, str(shared))
    return Check(name, True, text)


def _partners(rows: Sequence[Facts]) -> tuple[int, int]:
    """The partners of rank 0 for messages: the next rank of its node and the first of another node; 0 where there is none."""
    node = rows[0].node
    return next((rank for rank in node if rank), 0), next((row.rank for row in rows if row.rank not in node), 0)


def _ping_pong(group: Group, partner: int) -> str:
    """Do messages between rank 0 and `partner` arrive unchanged, both ways?"""
    tag = group.next_tags()[0]
    sent = _pattern(_MESSAGE_NBYTES)
    received = np.empty_like(sent)
    if group.rank not in (0, partner):
        return ""
    if group.rank == 0:
        group.send_now(sent, partner, tag)
        group.receive_now(received, partner, tag)
    else:
        group.receive_now(received, 0, tag)
        group.send_now(received, 0, tag)
    if not np.array_equal(received, sent):
        raise ValueError(
            f"a message of {format_nbytes(sent.nbytes)} between ranks 0 and {partner} arrived with other values than were sent"
        )
    return f"{format_nbytes(sent.nbytes)} between ranks 0 and {partner}, both ways"


def _look(group: Group) -> str:
    """Does a rank find in another rank's memory what that rank wrote?"""
    segments = group.shared_memory(SHARED_NBYTES)
    if segments:
        segments[group.rank].data[:SHARED_NBYTES] = _mark(group.rank)
    group.agree(None)  # all have written
    if not segments:
        return ""
    ranks = group.node.ranks
    neighbour = ranks[(ranks.index(group.rank) + 1) % len(ranks)]
    mine = np.empty(SHARED_NBYTES, dtype=np.uint8)
    np.copyto(mine, segments[neighbour].data[:SHARED_NBYTES])
    if not (mine == _mark(neighbour)).all():
        raise ValueError(
            f"rank {group.rank} does not see what rank {neighbour} wrote into shared memory: expected {_mark(neighbour)} "
            f"everywhere, got {sorted({int(value) for value in (mine.min(), mine.max())})}"
        )
    return f"{format_nbytes(mine.nbytes)} of each rank, read by the next one of its node"


def _on_all_devices(group: Group, work: Callable[[list[Any]], str]) -> str:
    """A check on all devices, started only if every rank has devices: otherwise the others would wait for that rank."""
    devices: list[Any] = []
    error = None
    try:
        devices = list(jax.devices())
    except Exception as found:
        error = found
    group.agree(error)
    return work(devices)


def _all_reduce(devices: list[Any]) -> str:
    """Do the devices compute the right sum over all devices?"""
    values = np.arange(len(devices), dtype=np.int32) % 1000 + 1
    mesh = Mesh(np.array(devices), ("d",))
    x = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("d")), lambda index: values[index])
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(x)
    expected = int(values.sum())
    for shard in total.addressable_shards:
        found = int(np.asarray(shard.data))
        if found != expected:
            raise ValueError(
                f"the sum over {_devices(len(devices))} is {found} on device {shard.device.id}, expected {expected}"
            )
    return f"sum over {_devices(len(devices))} is {expected}, as expected"


def _scatter(devices: list[Any]) -> str:
    """Does each device get its own rows, unchanged?"""
    devices = devices[::-1]  # not in process order, so that mixing up the two orders fails the check
    n_rows = max(1, _SCATTER_NBYTES // (4 * _WIDTH * len(devices)))
    shape = (n_rows * len(devices), _WIDTH)
    mesh = Mesh(np.array(devices), ("d",))
    x = scatter(lambda: np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape), mesh, P("d"), verify="checksum")
    for shard in x.addressable_shards:
        first = devices.index(shard.device) * n_rows * _WIDTH
        expected = np.arange(first, first + n_rows * _WIDTH, dtype=np.int32)
        if crc32(np.asarray(shard.data).tobytes()) != crc32(expected.tobytes()):
            raise ValueError(
                f"device {shard.device.id} holds wrong values, expected rows {first // _WIDTH} to {first // _WIDTH + n_rows}"
            )
    shards = f"checksums of all {len(devices)} shards" if len(devices) > 1 else "checksum of its shard"
    return f"{format_nbytes(x.nbytes)} from rank 0 to {counted(len(devices), 'device')}, {shards} as expected"


def _pattern(nbytes: int) -> Bytes:
    return np.resize(np.arange(251, dtype=np.uint8), nbytes)  # 251 is prime: shifted by a power of 2, the pattern differs


def _mark(rank: int) -> int:
    return rank % 251 + 1


def _devices(n: int) -> str:
    return f"{n} device{'' if n == 1 else 's'}"
