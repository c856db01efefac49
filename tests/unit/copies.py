"""Run what a shell would run, in a copy of a process that has imported JAX, h5py and Zarr already (`tests.jobs.preloaded`).

The copy's files, variables and folder are what a new process would have, and it ends as Python does. Programs whose subject is
how an interpreter starts (its locale, what libraries read or import as they are loaded) are started as ever.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import shardload
from tests.jobs.preloaded import prefix, server_for
from tests.jobs.rank import LENGTH

__all__ = ["Copy", "copy_of_a_helper", "run_copy"]

SECONDS = 120.0


def run_copy(arguments: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any) -> Any:
    """``subprocess.run([sys.executable, *arguments], text=True, **options)``, with these variables alone, or this process's."""
    variables = dict(os.environ if env is None else env)
    return subprocess.run([*prefix(variables), *map(str, arguments)], env=variables, text=True, timeout=SECONDS, **options)


class Copy:
    """A copy that runs a program, as `subprocess.Popen` shows it to `shardload.formats.untrusted`.

    Parameters
    ----------
    words : sequence of str
        The interpreter's arguments.
    env : mapping
        All variables.
    files : mapping of int to int
        Which of our open files it has under which number.
    """

    def __init__(self, words: Sequence[str], env: Mapping[str, str], files: Mapping[int, int]) -> None:
        self.returncode: int | None = None
        numbers = " ".join(map(str, files))
        parts = [os.getcwd(), str(os.getpid()), numbers, str(len(words)), *words, *(f"{k}={v}" for k, v in env.items())]
        request = b"\0".join(map(os.fsencode, parts))
        self._connection = socket.socket(socket.AF_UNIX)  # if it closes, the copy is killed
        self._connection.connect(server_for(env).address)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files.values()))]
        self._connection.sendmsg([len(request).to_bytes(LENGTH, "little")], rights)
        self._connection.sendall(request)
        self.pid = int.from_bytes(self._connection.recv(4), "little")

    def kill(self) -> None:
        """As Popen's."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """As Popen's."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                status = int.from_bytes(self._connection.recv(4), "little")
            except TimeoutError:
                raise subprocess.TimeoutExpired("a copy", timeout or 0.0) from None
            self._connection.close()
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def copy_of_a_helper(command: Sequence[str], *, stdin: Any, stdout: Any, stderr: Any, env: Mapping[str, str]) -> Copy:
    """A helper process, from what `shardload.formats.untrusted` gives to Popen."""
    *_, script, _, settings = command
    variables = {**env, "PYTHONPATH": str(Path(shardload.__file__).parents[1])}
    parent = server_for(variables).process.pid  # of which it makes sure, and with which it ends
    files = {number: stream.fileno() for number, stream in enumerate((stdin, stdout, stderr))}
    return Copy([script, str(parent), settings], variables, files)
