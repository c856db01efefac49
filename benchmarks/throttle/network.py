"""How long does a message between two nodes take? For ranks that `Cluster.env` started.

`slow_down` limits their exchanges. A message leaves when the network of `throttle.c` would
have delivered it: out of the sender's node and into the receiver's, each one message after the other, then the latency. Until
then the sender keeps it.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shardload.comm import group
from shardload.comm.transport import MpiTransport

__all__ = ["slow_down"]


class LateTransport(MpiTransport):
    """A transport whose values between nodes arrive as late as the network has them."""

    arrival: Callable[[int, int, int], float]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._late: list[tuple[float, int, int, np.ndarray[Any, Any], Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._late) or super().__bool__()

    def send(self, rank: int, values: np.ndarray[Any, Any], on_done: Callable[[], None]) -> None:
        """Send values when the network has room."""
        when = type(self).arrival(self.rank, rank, values.nbytes)
        if when <= 0:
            super().send(rank, values, on_done)
            return
        heapq.heappush(self._late, (when, next(self._numbers), rank, values, on_done))

    def test(self) -> bool:
        """Send what is due, and test as always."""
        is_due = False
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, rank, values, on_done = heapq.heappop(self._late)
            super().send(rank, values, on_done)
            is_due = True
        return super().test() or is_due


def slow_down() -> None:
    """Limit the messages of this process."""
    arrival = ctypes.CDLL(os.environ["LD_PRELOAD"]).throttle_message
    arrival.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_double)
    arrival.restype = ctypes.c_double
    LateTransport.arrival = staticmethod(arrival)
    group.MpiTransport = LateTransport  # type: ignore[misc]
