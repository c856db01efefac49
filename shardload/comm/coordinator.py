"""On which address does JAX's coordinator listen, so that the processes of this job reach it, but as few others as possible?

The coordinator does not authenticate clients. By default JAX lets it listen on all interfaces of its machine. Here it listens
on one: the loopback interface if all processes are on one machine, else the interface whose address the other processes find
under the name of its machine.

No MPI, no JAX.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from shardload.comm.collectives import Backoff

LOOPBACK = "127.0.0.1"
_BACKOFF = Backoff(n_awake=0, first_seconds=2e-3, longest_seconds=0.1, n_before_doubling=1)
_LISTENER_SECONDS = 2.0  # after that JAX itself waits, and reports a coordinator that does not answer


def join(host: str, port: int | str) -> str:
    """The address in the form that JAX expects.

    >>> join("n1", 61440), join("fd00::1", "61440")
    ('n1:61440', '[fd00::1]:61440')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, str]:
    """The host and the port of an address: the inverse of `join`.

    >>> split("n1:61440"), split("[fd00::1]:61440")
    (('n1', '61440'), ('fd00::1', '61440'))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def is_port(text: str) -> bool:
    """True for the number of a port.

    >>> is_port("61440"), is_port("0"), is_port("65536"), is_port("")
    (True, False, False, False)
    """
    return text.isdecimal() and 0 < int(text) < 65536


def addresses_of(host: str) -> list[str]:
    """The addresses that this machine finds under a name, in the order in which it would try them; may be empty."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    numbers = [str(address[0]) for *_, address in found]
    return [number for number in dict.fromkeys(numbers) if "%" not in number]  # "%": valid on one link only


def first_here(addresses: Sequence[str]) -> str:
    """The first of these addresses that belongs to this machine; empty if none does."""
    for address in addresses:
        with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return address
    return ""


def listening_host(host: str) -> str:
    """The address on which process 0 listens if all processes connect to `host`; empty if it cannot be known from here.

    A machine often finds a loopback address under its own name, while others find the address that they can reach.
    """
    found = addresses_of(host)
    if host != "localhost" and not _is_number(host) and all(ipaddress.ip_address(one).is_loopback for one in found):
        return ""
    return first_here(found)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def await_listener(address: str) -> None:
    """Return when a process listens there, or after a while. JAX itself would try once, and again after a whole second."""
    host, port = split(address)
    end, n_tries = time.monotonic() + _LISTENER_SECONDS, 0
    while time.monotonic() < end:
        with suppress(OSError, ValueError, OverflowError), socket.create_connection((host, int(port)), timeout=1):
            return
        n_tries += 1
        time.sleep(_BACKOFF.seconds(n_tries))
