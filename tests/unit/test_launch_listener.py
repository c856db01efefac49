"""Do processes come to the coordinator when it is there, and not a second later?"""

from __future__ import annotations

import importlib
import socket

import pytest

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
    with listening() as server:
        port = server.getsockname()[1]
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
