"""Is the coordinator where it can be, and do processes come to it when it is there, and not a second later?"""

from __future__ import annotations

import importlib
import socket
from pathlib import Path

import pytest

from shardload.errors import ConfigError
from shardload.started import free_port, is_free
from tests.ports import free_ports

launch = importlib.import_module("shardload.launch")


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it slept each time; the clock goes on by that much, and by nothing else."""
    slept: list[float] = []
    monkeypatch.setattr(launch.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(launch.time, "sleep", slept.append)
    return slept


def listening(host: str = "127.0.0.1") -> socket.socket:
    return socket.create_server((host, 0))


def test_somebody_listens(naps: list[float]) -> None:
    with listening() as server:
        launch._await_listener(f"127.0.0.1:{server.getsockname()[1]}")
    assert naps == []


def test_somebody_listens_a_little_later(naps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if one refusal were enough to give up."""
    (port,) = free_ports(1)
    servers: list[socket.socket] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 4:
            servers.append(socket.create_server(("127.0.0.1", port)))

    monkeypatch.setattr(launch.time, "sleep", sleep)
    launch._await_listener(f"127.0.0.1:{port}")
    assert len(naps) == 4 and servers
    servers[0].close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no port", "127.0.0.1:99999"])
def test_nobody_listens(naps: list[float], address: str) -> None:
    """Wrong if it raised, in place of JAX, or waited on and on."""
    launch._await_listener(address)
    assert launch._LISTENER_SECONDS <= sum(naps) < launch._LISTENER_SECONDS + 0.2
    assert max(naps) <= 0.1, "a late coordinator would be noticed late"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_somebody_else_has_the_port(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if process 0 went to JAX, which ends it by a segmentation fault, or another process refused."""
    started: list[object] = []
    monkeypatch.setattr(launch, "_LISTENER_SECONDS", 0)
    monkeypatch.setattr(launch.jax.distributed, "initialize", lambda *how: started.append(how[2]))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: another process .* has port {port}"):
            launch._start(f"127.0.0.1:{port}", 2, 0, None)
        launch._start(f"127.0.0.1:{port}", 2, 1, None)
    assert started == [1]
    launch._start(f"127.0.0.1:{port}", 2, 0, None)  # it has gone
    assert started == [1, 0]


def test_a_port_that_nobody_has() -> None:
    """Wrong if the system could give it to a connection in the meantime, or somebody has it."""
    first, last = (int(part) for part in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    port = free_port()
    assert is_free(port) and not first <= port <= last
