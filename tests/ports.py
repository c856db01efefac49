"""Ports of this machine for what the tests start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

__all__ = ["free_ports"]

_PORTS = (20_000, 32_000)


def free_ports(n: int) -> list[int]:
    """Ports that nobody listens at, all different, of those that the system does not give away by itself.

    Any connection may be given one of the others in the moment before it is used.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(*_PORTS), 100 * n):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == n:
            return ports
    raise RuntimeError(f"no {n} free ports from {_PORTS[0]} to {_PORTS[1]}")
