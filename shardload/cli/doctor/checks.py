"""Does what every load needs work here, and how fast?

Each check is a step that all ranks take, and after which they agree: what fails on one rank is told on all, and nobody waits
for it. A rank that hangs inside of MPI or of JAX is ended by `Watch`, which says where it was.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
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
from shardload.units import format_nbytes

__all__ = ["Check", "Watch", "run_checks"]

_SCATTER_NBYTES, _WIDTH = 1 << 20, 64
_MESSAGE_NBYTES = 8 << 20
_ROUNDS = 3
# Other ranks have the same time: let them say where they are before a launcher ends them because this one is gone.
_GRACE_SECONDS = 2.0
_LAST_SECONDS = 10.0

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Check:
    """A step that was taken: whether all ranks got through it (None: not tried), and what came of it."""

    name: str
    ok: bool | None
    text: str


class Watch:
    """Ends this process with exit code 1 after so many seconds, and says what it waited for.

    Parameters
    ----------
    seconds : float
        From now on.
    who : str
        This process, for people.
    """

    def __init__(self, seconds: float, who: str) -> None:
        self.at = "MPI to start"
        self.problem = ""  # what this rank knows to be wrong, and could not tell the others
        self._seconds, self._who = seconds, who
        self._done = threading.Event()

    def name(self, who: str) -> None:
        """Call this process otherwise from now on."""
        self._who = who

    def __enter__(self) -> Watch:
        threading.Thread(target=self._wait, daemon=True).start()
        # A library that hangs with the interpreter's lock held would stop that thread too, and this not.
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


def run_checks(group: Group, rows: Sequence[Facts], watch: Watch, has_errors: bool) -> list[Check]:
    """All checks, in order. Collective; returns, never raises, what fails.

    Parameters
    ----------
    group : Group
        All ranks.
    rows : sequence of Facts
        Of all of them.
    watch : Watch
        Is told what is waited for.
    has_errors : bool
        Whether the diagnosis found errors: then what needs JAX is not tried.
    """
    steps: list[tuple[str, Callable[[], str]]] = []
    can_send = group.has_mpi
    same, other = _partners(rows) if can_send else (0, 0)
    for name, partner in (("messages, same node", same), ("messages, other node", other)):
        if partner:
            steps.append((name, lambda partner=partner: _ping_pong(group, partner)))  # type: ignore[misc]
    if can_send and any(len(row.node) > 1 for row in rows) and all(row.shares_memory for row in rows):
        steps.append(("shared memory", lambda: _look(group)))
    checks = [_take(group, watch, name, work) for name, work in steps]
    why_not = "not tried, because of the errors below" if has_errors else ""
    for name, work in (("all-reduce", _all_reduce), ("scatter", _scatter)):
        if work is _scatter and group.size > 1 and not can_send:
            why_not = "not tried, because without MPI the processes can send each other nothing"
        if why_not:
            checks.append(Check(name, None, why_not))
            continue
        checks.append(_take(group, watch, name, lambda work=work: _on_all_devices(group, work)))  # type: ignore[misc]
        why_not = "" if checks[-1].ok else f"not tried, because the {name} failed"
    return checks


def _take(group: Group, watch: Watch, name: str, work: Callable[[], str]) -> Check:
    """One step, after which all ranks agree."""
    watch.at, watch.problem = f"the check '{name}'", ""
    text, error = "", None
    try:
        text = work()
    except Exception as found:
        error = found
        watch.problem = f"here it failed: {type(found).__name__}: {found}"
    try:
        group.agree(error)
    except ShardloadError as shared:
        return Check(name, False, str(shared))
    return Check(name, True, text)


def _partners(rows: Sequence[Facts]) -> tuple[int, int]:
    """With whom rank 0 measures: the next rank of its node, and the first of another; 0 where there is none."""
    node = rows[0].node
    return next((rank for rank in node if rank), 0), next((row.rank for row in rows if row.rank not in node), 0)


def _ping_pong(group: Group, partner: int) -> str:
    """How fast messages go between rank 0 and `partner`, and do they arrive as they were?"""
    tag = group.next_tags()[0]
    sent = _pattern(_MESSAGE_NBYTES)
    found = np.empty_like(sent)
    best = float("inf")
    if group.rank not in (0, partner):
        return ""
    for _ in range(_ROUNDS + 1):  # the first is to warm up
        began = time.perf_counter()
        if group.rank == 0:
            group.send_now(sent, partner, tag)
            group.receive_now(found, partner, tag)
        else:
            group.receive_now(found, 0, tag)
            group.send_now(found, 0, tag)
        best = min(best, time.perf_counter() - began)
    if not np.array_equal(found, sent):
        raise ValueError(
            f"a message of {format_nbytes(sent.nbytes)} between ranks 0 and {partner} did not arrive as it was sent"
        )
    return f"{_rate(2 * sent.nbytes, best)} between ranks 0 and {partner}, {format_nbytes(sent.nbytes)} each"


def _look(group: Group) -> str:
    """How fast does a rank read another's memory, and is it the other's?"""
    segments = group.shared_memory(SHARED_NBYTES)
    if segments:
        segments[group.rank].data[:SHARED_NBYTES] = _mark(group.rank)
    group.agree(None)  # all have written
    if not segments:
        return ""
    ranks = group.node.ranks
    neighbour = ranks[(ranks.index(group.rank) + 1) % len(ranks)]
    theirs = segments[neighbour].data[:SHARED_NBYTES]
    mine = np.empty_like(theirs)
    best = float("inf")
    for _ in range(_ROUNDS + 1 if group.rank == 0 else 1):
        began = time.perf_counter()
        np.copyto(mine, theirs)
        best = min(best, time.perf_counter() - began)
    if not (mine == _mark(neighbour)).all():
        raise ValueError(f"what rank {group.rank} took for the memory of rank {neighbour} is something else")
    return f"{_rate(mine.nbytes, best)} from rank {neighbour} to rank {group.rank}, {format_nbytes(mine.nbytes)}"


def _on_all_devices(group: Group, work: Callable[[list[Any]], str]) -> str:
    """A check of all devices, begun only if every rank has them: the others would wait in the middle of it for one without."""
    devices: list[Any] = []
    error = None
    try:
        devices = list(jax.devices())
    except Exception as found:
        error = found
    group.agree(error)
    return work(devices)


def _all_reduce(devices: list[Any]) -> str:
    """Is the sum over all devices, by the devices themselves, what it must be?"""
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
    """Does each device get its own rows, and as they were?"""
    devices = devices[::-1]  # another order than that of processes: wrong if one were taken for the other
    n_rows = max(1, _SCATTER_NBYTES // (4 * _WIDTH * len(devices)))
    shape = (n_rows * len(devices), _WIDTH)
    mesh = Mesh(np.array(devices), ("d",))
    x = scatter(lambda: np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape), mesh, P("d"), verify="checksum")
    for shard in x.addressable_shards:
        first = devices.index(shard.device) * n_rows * _WIDTH
        expected = np.arange(first, first + n_rows * _WIDTH, dtype=np.int32)
        if crc32(np.asarray(shard.data).tobytes()) != crc32(expected.tobytes()):
            raise ValueError(f"device {shard.device.id} did not get the rows that are its own")
    return (
        f"{format_nbytes(x.nbytes)} from rank 0 to {len(devices)} devices, checksums of all {len(devices)} shards as expected"
    )


def _pattern(nbytes: int) -> Bytes:
    return np.resize(np.arange(251, dtype=np.uint8), nbytes)  # a prime: shifted by any power of 2 it is another


def _mark(rank: int) -> int:
    return rank % 251 + 1


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.1f} GB/s"


def _devices(n: int) -> str:
    return f"{n} device{'' if n == 1 else 's'}"
