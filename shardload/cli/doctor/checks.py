"""Does what every load needs work here: a sum over all devices, and values from one rank on all of them?

All ranks run each check together and agree on its outcome: a failure on one rank is reported by all, and no rank waits for it.
A rank that hangs inside MPI or JAX is ended by `Deadline`, which says what it was waiting for.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardload.api import scatter
from shardload.comm.group import Group
from shardload.errors import ShardloadError
from shardload.units import counted, format_nbytes

_SCATTER_NBYTES, _WIDTH = 4 << 20, 64  # messages of more than MPI sends without asking the receiver first
# All ranks have the same deadline: let the others print before the launcher ends them because this one exited.
_GRACE_SECONDS = 2.0
_LAST_SECONDS = 10.0


@dataclass(frozen=True)
class Check:
    """The outcome of one check: whether it passed on all ranks (None: not tried), and details."""

    name: str
    ok: bool | None
    text: str


class Deadline:
    """Ends this process with exit code 1 after `seconds`, and says what it was waiting for.

    Attributes
    ----------
    who : str
        What this process is called in the message.
    at : str
        What it waits for.
    """

    def __init__(self, seconds: float) -> None:
        self.who, self.at = "shardload doctor", "MPI to start"
        self._seconds, self._done = seconds, threading.Event()

    @contextmanager
    def watching(self) -> Iterator[Deadline]:
        """The time in which it ends the process."""
        threading.Thread(target=self._wait, daemon=True).start()
        # A library that hangs while it holds the GIL stops that thread too, but not this one.
        faulthandler.dump_traceback_later(self._seconds + _LAST_SECONDS, exit=True, file=2)
        try:
            yield self
        finally:
            self._done.set()
            faulthandler.cancel_dump_traceback_later()

    def _wait(self) -> None:
        if self._done.wait(self._seconds):
            return
        print(f"{self.who}: after {self._seconds:g} s still waiting for {self.at}", file=sys.stderr, flush=True)
        if not self._done.wait(_GRACE_SECONDS):
            os._exit(1)


def run_checks(group: Group, deadline: Deadline, has_errors: bool) -> list[Check]:
    """Run all checks, in order. Collective. A failed check is returned, not raised.

    `has_errors`: whether the rules found errors; then nothing is tried.
    """
    checks: list[Check] = []
    why_not = "not tried, because of the errors below" if has_errors else ""
    for name, work in (("all-reduce", _all_reduce), ("scatter", _scatter)):
        if why_not:
            checks.append(Check(name, None, why_not))
            continue
        deadline.at = f"the check '{name}'"
        try:
            # A rank that JAX gives no devices would keep the others waiting in the work.
            devices: list[Any] = _agreed(group, deadline, lambda: list(jax.devices()))
            checks.append(Check(name, True, _agreed(group, deadline, partial(work, devices))))
        except ShardloadError as error:
            checks.append(Check(name, False, str(error)))
            why_not = f"not tried, because the {name} failed"
    return checks


def _agreed(group: Group, deadline: Deadline, work: Callable[[], Any]) -> Any:
    """What `work` returns; the same ShardloadError on all ranks if it fails on one."""
    result, error = None, None
    try:
        result = work()
    except Exception as failure:
        error = failure
        deadline.at += f"; here it failed: {type(failure).__name__}: {failure}"
    group.agree(error)
    return result


def _all_reduce(devices: list[Any]) -> str:
    """Do the devices compute the right sum over all devices?"""
    values = np.arange(len(devices), dtype=np.int32) % 1000 + 1
    mesh = Mesh(np.array(devices), ("d",))
    x = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("d")), lambda index: values[index])
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(x)
    expected, over = int(values.sum()), counted(len(devices), "device")
    for shard in total.addressable_shards:
        if (found := int(np.asarray(shard.data))) != expected:
            raise ValueError(f"the sum over {over} is {found} on device {shard.device.id}, expected {expected}")
    return f"sum over {over} is {expected}, as expected"


def _scatter(devices: list[Any]) -> str:
    """Does each device get its own rows, unchanged?"""
    devices = devices[::-1]  # not in process order, so that mixing up the two orders fails the check
    n_rows = max(1, _SCATTER_NBYTES // (4 * _WIDTH * len(devices)))
    shape = (n_rows * len(devices), _WIDTH)
    mesh = Mesh(np.array(devices), ("d",))
    x = scatter(lambda: np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape), mesh, P("d"), verify="checksum")
    for shard in x.addressable_shards:
        first = devices.index(shard.device) * n_rows
        rows = np.arange(first * _WIDTH, (first + n_rows) * _WIDTH, dtype=np.int32).reshape(n_rows, _WIDTH)
        if not np.array_equal(np.asarray(shard.data), rows):
            raise ValueError(f"device {shard.device.id} holds wrong values, expected rows {first} to {first + n_rows}")
    return f"{format_nbytes(x.nbytes)} from rank 0 to {counted(len(devices), 'device')}, every element as expected"
