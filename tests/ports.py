"""Ports of this machine: free ones for what the tests start, and where somebody listens."""

from __future__ import annotations

import random
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path

__all__ = ["catches_sigterm", "free_ports", "listeners"]

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


def listeners(port: int) -> list[str]:
    """The addresses of this machine at which somebody listens at a port, as ``ss -ltn`` would show."""
    found = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            host, _, hexadecimal = local.partition(":")
            if state == "0A" and int(hexadecimal, 16) == port:
                words = [int(host[k : k + 8], 16) for k in range(0, len(host), 8)]  # each in this machine's byte order
                number = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
                found.append(number.removeprefix("::ffff:"))  # of IPv4, at a socket for both
    return sorted(set(found))


def catches_sigterm() -> bool:
    """Whether this process has a handler of SIGTERM, of whatever language."""
    (caught,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
