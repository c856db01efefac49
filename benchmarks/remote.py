"""How do ways of loading that need different environments take turns in one run?

Each environment is a job: MPI ranks with JAX, Heat's ranks, parallel HDF5's ranks, the floor. All jobs are started once and
then wait, blocked in a socket without using CPU time, until the benchmark's process (`RemoteJob.ask`) sends one of them a
request. So the repeats of all ways are interleaved, which matters if the speed of the machine drifts.

Requests and replies are one line of JSON. A rank that fails replies with its error; a job that does not answer in time is
killed. When the benchmark's process ends, its sockets close and the ranks end. Only the standard library: `serve` runs in
every environment.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ADDRESS = "SHARDLOAD_BENCHMARK_SOCKET"
GRACE_SECONDS = 20.0  # for the other ranks, after one has failed
LOG_LINES = 25


class RemoteError(RuntimeError):
    """A way failed: the text says on which rank and how."""


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]], rank: int, versions: Mapping[str, str]) -> None:
    """Be one rank of a job: answer requests until the conductor hangs up."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[ADDRESS])
    file = connection.makefile("rw")

    def say(reply: Mapping[str, Any]) -> None:
        file.write(json.dumps(reply, default=str) + "\n")  # a report may hold anything
        file.flush()

    say({"rank": rank, "pid": os.getpid(), "versions": dict(versions)})
    for line in file:
        try:
            reply = handle(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        say(reply)


class RemoteJob:
    """A job that waits for requests.

    Attributes
    ----------
    versions : dict
        Of what rank 0 uses.
    """

    def __init__(self, name: str, command: Sequence[str], n: int, env: Mapping[str, str], start_seconds: float = 120) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="shardload-bench-")
        address = str(Path(self._folder.name, "socket"))
        self._log = Path(self._folder.name, "log")
        self._pids: list[int] = []
        self._connections: list[socket.socket] = []
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(n)
        listener.settimeout(1)
        with self._log.open("wb") as log:
            self._launcher = subprocess.Popen(
                list(command),
                env={**env, ADDRESS: address},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._meet(listener, n, time.monotonic() + start_seconds)
        except BaseException:
            self.close(kill=True)
            raise
        finally:
            listener.close()

    def _meet(self, listener: socket.socket, n: int, deadline: float) -> None:
        while len(self._connections) < n:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._launcher.poll() is not None or time.monotonic() > deadline:
                    raise RemoteError(f"{self.name} did not start\n{self._tail()}") from None
            else:
                connection.setblocking(False)
                self._connections.append(connection)
        hellos = self._collect(deadline)
        order = sorted(range(n), key=lambda i: hellos[i]["rank"])
        self._connections = [self._connections[i] for i in order]
        self._pids = [hellos[i]["pid"] for i in order]
        self.versions: dict[str, str] = hellos[order[0]]["versions"]

    def ask(self, timeout: float, **request: Any) -> list[dict[str, Any]]:
        """Every rank's reply, by rank. RemoteError if one failed; the job is killed if one did not answer."""
        line = json.dumps(request).encode() + b"\n"
        try:
            for connection in self._connections:
                connection.sendall(line)
            replies = self._collect(time.monotonic() + timeout)
        except (OSError, RemoteError) as error:
            self.close(kill=True)
            raise RemoteError(f"{self.name}: {error}\n{self._tail()}") from error
        for rank, reply in enumerate(replies):
            if "error" in reply:
                raise RemoteError(f"{self.name}, rank {rank}: {reply['error']}\n{reply.get('traceback', '')}")
        return replies

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks."""
        return list(self._pids)

    @property
    def is_alive(self) -> bool:
        """False once it was killed or closed."""
        return bool(self._connections)

    def _collect(self, deadline: float) -> list[dict[str, Any]]:
        """A line from each rank, in the order of connections."""
        parts: list[bytes] = [b""] * len(self._connections)
        replies: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for i, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, i)
            while len(replies) < len(parts):
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    failed = [reply["error"] for reply in replies.values() if "error" in reply]
                    raise RemoteError(failed[0] if failed else f"no answer from {len(parts) - len(replies)} ranks in time")
                for key, _ in events:
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    if not data:
                        raise RemoteError("a rank ended")
                    parts[key.data] += data
                    if parts[key.data].endswith(b"\n"):
                        replies[key.data] = json.loads(parts[key.data])
                        selector.unregister(key.fileobj)
                        if "error" in replies[key.data]:
                            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return [replies[i] for i in range(len(parts))]

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]) if self._log.exists() else ""

    def close(self, *, kill: bool = False) -> None:
        """End it: ranks that wait end by themselves."""
        for connection in self._connections:
            connection.close()
        if kill:
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if kill and not self._pids:  # the ranks are not known yet
            self._launcher.terminate()
        for end in (lambda: None, self._launcher.terminate, self._launcher.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                self._launcher.wait(10)
                break
        self._connections, self._pids = [], []
        self._folder.cleanup()

    def __enter__(self) -> RemoteJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
