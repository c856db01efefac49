"""How do programs share one start of MPI and JAX? ``run_job(..., fresh=False)`` hands them, one by one, to a job that stays.

There is one such job for each MPI library, number of ranks and of devices. It starts when it is first needed (`server.py` is
what its ranks run) and ends with the tests. A program finds in it what it would find in a job of its own (there it says what),
and `run_job` gives back the same `Job`. What fails takes its job along, so that the next program gets a new one: a rank that
ends with another status than 0, one that dies, a program that is not done in time.

Not for programs whose subject is a process: its start, end, signals, memory, or variables that libraries read as they start.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.jobs import launch

__all__ = ["close_all", "run_in_persistent_job"]

SERVER = Path(__file__).with_name("server.py")
START_SECONDS = 120.0
GRACE_SECONDS = 10.0  # for the other ranks, when one has failed: they may wait for it for ever
END_SECONDS = 30.0
# Read when a process, MPI, JAX or a library starts.
TOO_LATE = ("HDF5_", "JAX_", "LD_", "MPI", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTHON", "XLA_", *launch.FOREIGN)


class PersistentJob:
    """Ranks that wait for programs."""

    def __init__(self, n: int, mpi: str, devices_per_process: int) -> None:
        self.n, self.mpi = n, mpi
        self.n_programs = 0
        self._folder = tempfile.TemporaryDirectory(prefix="shardload-jobs-")
        self.folder = Path(self._folder.name)
        self.env = launch.job_environment(n, mpi=mpi, devices_per_process=devices_per_process)
        self.env |= {"PYTHONPATH": str(launch.ROOT), "SHARDLOAD_JOB_DIR": str(self.folder), "SHARDLOAD_JOB_SITE": launch.SITE}
        address = str(self.folder / "socket")
        self._connections: list[socket.socket] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(n)
            listener.settimeout(0.5)
            command = launch.job_command([SERVER, address], n, mpi=mpi, rank_shell=True, env=self.env)
            with (self.folder / "mpiexec").open("wb") as log:
                self.id, self._launcher = launch.start_job(command, self.env, log, log, None)
            try:
                self._meet(listener)
            except BaseException:
                self.kill()
                self._folder.cleanup()
                raise

    def _meet(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_SECONDS
        while len(self._connections) < self.n:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self._launcher.poll() is not None or time.monotonic() > deadline:
                    out, err = self._outputs(self.folder)
                    said = launch.read(self.folder / "mpiexec")
                    raise AssertionError(
                        f"a job of {self.n} ranks ({self.mpi}) did not start\n{launch.tails(out, err, said)}"
                    ) from None
            else:
                connection.setblocking(False)
                self._connections.append(connection)
        ranks = [said["rank"] for said in self._collect(deadline) if said]
        self._connections = [self._connections[ranks.index(rank)] for rank in range(self.n)]

    def run(self, arguments: Sequence[str], timeout: float, env: Mapping[str, str], cwd: str | Path | None) -> launch.Job:
        """Run one program on all ranks. AssertionError if it is not done in time; the job is gone then."""
        self.n_programs += 1
        folder = self.folder / str(self.n_programs)
        folder.mkdir()
        request = {"arguments": [*arguments], "cwd": str(cwd or Path.cwd()), **self._changes(env)}
        began = time.monotonic()
        for rank, connection in enumerate(self._connections):
            files = {"out": str(folder / f"{rank}.out"), "err": str(folder / f"{rank}.err")}
            with suppress(OSError):  # a rank that died meanwhile is found below
                connection.sendall(json.dumps({**request, **files}).encode() + b"\n")
        replies = self._collect(began + timeout)
        seconds = time.monotonic() - began
        codes = [reply["status"] if reply else None for reply in replies]
        failed = next((code for code in codes if code), None)
        is_hung = failed is None and None in codes and seconds >= timeout
        n_killed = self.kill(stacks=is_hung) if any(code != 0 for code in codes) else None
        out, err = self._outputs(folder)
        said = "".join(self._outputs(self.folder)[1]) if n_killed is not None else ""  # of the server itself
        if not self.is_alive:
            self._folder.cleanup()
        if is_hung:
            raise AssertionError(launch.hung(arguments, self.n, self.mpi, timeout, n_killed or 0, out, err, ""))
        code = (failed or self._launcher.returncode or 1) if any(code != 0 for code in codes) else 0
        said += f"run_job: ranks ended with {codes}\n" if code else ""
        return launch.Job(code, "".join(out), "".join(err) + said, seconds, out, err)

    def _changes(self, env: Mapping[str, str]) -> dict[str, Any]:
        """A program's variables beside those that the job was started with. ValueError where it is too late for one."""
        usual = {**launch.job_environment(self.n, mpi=self.mpi), **env}
        ours = ("PYTHONPATH", "SHARDLOAD_JOB_DIR", "SHARDLOAD_JOB_SITE", "XLA_FLAGS", launch.MARK)
        changed = {name: value for name, value in usual.items() if self.env.get(name) != value and name not in ours}
        gone = [name for name in self.env if name not in usual and name not in ours]
        late = [name for name in (*changed, *gone) if name.startswith(TOO_LATE)]
        if "XLA_FLAGS" in env:
            late.append("XLA_FLAGS")
        if late:
            raise ValueError(f"{', '.join(late)}: read when a process starts; this program needs a job of its own, fresh=True")
        paths = [launch.SITE, *filter(None, [usual.get("PYTHONPATH")])]
        return {"set": {**changed, "PYTHONPATH": os.pathsep.join(paths)}, "unset": gone}

    def _outputs(self, folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
        out, err = (tuple(launch.read(folder / f"{rank}.{kind}") for rank in range(self.n)) for kind in ("out", "err"))
        return out, err

    def _collect(self, deadline: float) -> list[dict[str, Any] | None]:
        """A line from each rank; None from one that died, or did not answer in time or soon after another one's failure."""
        parts = [b""] * len(self._connections)
        replies: list[dict[str, Any] | None] = [None] * len(parts)
        with selectors.DefaultSelector() as selector:
            for k, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, k)
            while selector.get_map():
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    break
                for key, _ in events:
                    try:
                        data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    except OSError:
                        data = b""
                    parts[key.data] += data
                    if data and not data.endswith(b"\n"):
                        continue
                    selector.unregister(key.fileobj)
                    reply = json.loads(parts[key.data]) if data else None
                    replies[key.data] = reply
                    if reply is None or reply.get("status"):
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return replies

    @property
    def is_alive(self) -> bool:
        """False once it was killed or closed."""
        return bool(self._connections)

    def kill(self, *, stacks: bool = False) -> int:
        """End it at once; return how many processes that were."""
        n = launch.kill_job(self.id, self._launcher, stacks=stacks)
        self._hang_up()
        return n

    def close(self) -> None:
        """End it: ranks that wait end by themselves when nobody is there to ask."""
        self._hang_up()
        with suppress(Exception):
            self._launcher.wait(END_SECONDS)
        launch.kill_job(self.id, self._launcher, stacks=False)
        self._folder.cleanup()

    def _hang_up(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []


_jobs: dict[tuple[int, str, int], PersistentJob] = {}


def run_in_persistent_job(
    arguments: Sequence[str],
    n: int,
    *,
    timeout: float,
    mpi: str,
    env: Mapping[str, str],
    devices_per_process: int,
    cwd: str | Path | None,
) -> launch.Job:
    """See `run_job`."""
    key = (n, mpi, devices_per_process)
    job = _jobs.get(key)
    if job is None or not job.is_alive:
        job = _jobs[key] = PersistentJob(*key)
    return job.run(arguments, timeout, env, cwd)


def close_all() -> None:
    """End all of them."""
    while _jobs:
        _, job = _jobs.popitem()
        job.close()
