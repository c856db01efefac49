"""How is a process asked that may crash, hang and lie? With limits on memory and time, and by parents that can end it.

1. A `Helper` is such a process: started for one file, and ended by its parent. It runs `SCRIPT` (`untrusted_process`), which
   opens and decodes; this process never does. When it dies, or takes too long, it is a `HelperError`.
2. Values come through memory that both have mapped, and that the helper can not make shorter; all else comes as JSON, each
   message with its length before it (4 bytes, little-endian).
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Limits
from shardload.formats.containment import NotAFileError, OutsideError
from shardload.formats.untrusted.answers import LONGEST_TEXT, HelperError, clean, lie
from shardload.system.thread_pool import Pool
from shardload.units import format_nbytes

__all__ = ["FIRST_NBYTES", "SCRIPT", "Helper"]

# What a helper runs: started by its path, never imported here.
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(_FOLDER, "untrusted_process.py")

# A process with one of these would take itself for a rank of this job. MPI4PY_... below: a parallel HDF5 would start MPI.
_LAUNCHERS = ("ALPS_", "FLUX_", "HYDI_", "HYDRA_", "I_MPI_", "MPI", "MV2_", "OMPI_", "OPAL_", "PALS_", "PMI", "PRTE", "SLURM")
_OTHERS = ("JAX_", "XLA_", "PYTHON", "SHARDLOAD_")  # PYTHON...: what Python does is said on the command line and by `do_begin`
_KEPT = ("PYTHONHOME",)
_SET = {
    "MPI4PY_RC_INITIALIZE": "0",
    "MALLOC_ARENA_MAX": "2",  # each takes 64 MiB of addresses, which count
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "BLOSC_NTHREADS": "1",
    "ZARR_THREADING__MAX_WORKERS": "2",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONIOENCODING": "utf-8:backslashreplace",
}

_START_SECONDS = 300.0  # to import NumPy from a file system that a thousand ranks ask at once
_SLOWEST = 1 << 20  # bytes that any decoder makes in a second
_TICK_SECONDS = 0.5
_END_SECONDS = 1.0  # a process that is in the kernel for longer is left to it

FIRST_NBYTES = 1 << 16  # of shared memory: more than `read_small` ever gives
_MOST_ANSWER_NBYTES = 1 << 20  # as objects they take twenty times as much
_HEAD_NBYTES = 4  # before each message: its length

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConfigError, SourceError, OutsideError, NotAFileError, ValueError, RuntimeError)
}

Array = np.ndarray[Any, Any]


@cache
def _starter(process: int) -> Pool:
    """A thread of this process that starts helpers. It never ends, so that no helper is ended with it before the process is.

    (The signal that a process asks for at its parent's death comes when the thread ends that started it.)
    """
    return Pool(1, "shardload-helpers")


class Helper:
    """One process, and what was asked of it and answered.

    Parameters
    ----------
    limits : Limits
        What it may take.

    Raises
    ------
    ConfigError
        If it cannot be started: before it has seen any file.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._holds = _Holds(os.getpid())
        self._finalize = weakref.finalize(self, self._holds.end)
        try:
            self._log = self._holds.keep(os.memfd_create("shardload-helper-log"))
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._values = self._holds.keep(os.memfd_create("shardload-helper-values", flags))
            os.ftruncate(self._values, FIRST_NBYTES)
            # Or the helper could make it shorter, and this process would be ended by looking at what is not there any more.
            fcntl.fcntl(self._values, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self._values, 0, prot=mmap.PROT_READ)
            self._channel, other = socket.socketpair()
            self._holds.channel = self._channel
            with other:  # only the helper may hold it, or its end would not be noticed
                self._start(other)
            begin = {"do": "begin", "places": _places(), "memory_nbytes": limits.memory_nbytes}
            self._exchange(begin, _START_SECONDS, _START_SECONDS)
        except (AttributeError, OSError, ValueError, RuntimeError) as error:  # AttributeError: not Linux
            self.end()
            raise ConfigError(
                f"untrusted=True opens files in helper processes, and one could not be started here ({sys.executable!r}): "
                f"{type(error).__name__}: {error}. Mend that, or load without untrusted=True if you trust the file"
            ) from error
        except BaseException:
            self.end()
            raise

    def _start(self, other: socket.socket) -> None:
        given = [str(number) for number in (other.fileno(), self._values, os.getpid())]
        # -S -P: no start-up files, and the script's folder is no place to import from. It gets this process's places.
        command = [sys.executable, "-S", "-P", "-s", SCRIPT, *given]
        environ = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith((*_LAUNCHERS, *_OTHERS))} | _SET
        numbers = (other.fileno(), self._values)

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environ, pass_fds=numbers
            )

        future = _starter(os.getpid()).submit(start)
        try:
            self._holds.process = future.result()
        except BaseException:  # Ctrl-C: it may be about to start
            future.add_done_callback(lambda done: None if done.exception() else _kill(done.result()))
            raise

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return None if self._holds.process is None else self._holds.process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._finalize.alive

    def ask(
        self, do: str, nbytes: int = 0, factor: float = 1.0, most: int = _MOST_ANSWER_NBYTES, **what: Any
    ) -> dict[str, Any]:
        """The answer to one request: see the methods ``do_...`` of the helper. Not from two threads at once.

        Parameters
        ----------
        do : str
            What.
        nbytes : int
            Bytes that the answer puts into the shared memory, at the most.
        factor : float
            By how much more may be computed for it.
        most : int
            Bytes of the answer itself.
        **what
            The request.

        Raises
        ------
        HelperError
            If there is no answer, or none that could be right. The helper is ended.
        ConfigError, SourceError, OSError, ValueError, RuntimeError
            As the helper says.
        """
        if not self.is_alive:
            raise HelperError("the helper process has ended")
        cpu_seconds = self._limits.cpu_seconds * factor + nbytes / _SLOWEST
        try:
            if nbytes > len(self._memory):
                os.ftruncate(self._values, nbytes)
                self._memory = mmap.mmap(self._values, nbytes, prot=mmap.PROT_READ)
            answer = self._exchange({"do": do, **what}, self._limits.seconds, cpu_seconds, most)
        except BaseException:
            self.end()
            raise
        if "error" in answer:
            self._raise(answer)
        return answer

    def values(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0) -> Array:
        """The shared memory, as an array: to be copied first, and then looked at. The helper may write it at any time."""
        return np.frombuffer(self._memory, dtype, math.prod(shape), offset).reshape(shape)

    def end(self) -> None:
        """End it, whatever it does. May be called from any thread, and again."""
        self._finalize()

    # --- messages

    def _exchange(
        self, request: Mapping[str, Any], seconds: float | None, cpu_seconds: float, most: int = _MOST_ANSWER_NBYTES
    ) -> dict[str, Any]:
        data = json.dumps(request).encode()
        self._channel.setblocking(False)
        clock = _Clock(self.pid or 0, seconds, cpu_seconds)
        self._send(len(data).to_bytes(_HEAD_NBYTES, "little") + data, clock)
        nbytes = int.from_bytes(self._receive(_HEAD_NBYTES, clock), "little")
        if nbytes > most:
            raise lie(f"{nbytes} bytes of text, {most} are the most")
        try:
            answer = json.loads(self._receive(nbytes, clock))
        except (ValueError, RecursionError):
            raise lie("text that is not JSON") from None
        if not isinstance(answer, dict):
            raise lie("JSON that is no object")
        return answer

    def _send(self, data: bytes, clock: _Clock) -> None:
        view = memoryview(data)
        while view:
            self._wait(select.POLLOUT, clock)
            try:
                view = view[self._channel.send(view) :]
            except BlockingIOError:
                continue
            except OSError:
                raise self._lost() from None

    def _receive(self, nbytes: int, clock: _Clock) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            self._wait(select.POLLIN, clock)
            try:
                found = self._channel.recv(min(nbytes - len(data), 1 << 20))
            except BlockingIOError:
                continue
            except OSError:
                found = b""
            if not found:
                raise self._lost()
            data += found
        return bytes(data)

    def _wait(self, event: int, clock: _Clock) -> None:
        try:
            waiting = select.poll()
            waiting.register(self._channel, event)
        except (OSError, ValueError):  # another thread has ended the helper
            raise HelperError("the helper process was ended") from None
        while not waiting.poll(1000 * _TICK_SECONDS):
            late = clock.late()
            if late:
                raise HelperError(f"the helper process that read it was ended: {late}{self._said()}")
            if not self.is_alive:
                raise HelperError("the helper process was ended")

    def _lost(self) -> HelperError:
        """What is said of a helper that is gone."""
        process = self._holds.process
        if process is None or not self.is_alive:
            return HelperError("the helper process was ended")
        try:
            status = process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return HelperError(f"the helper process that read it stopped listening{self._said()}")
        if status >= 0:
            how = f"ended by itself, with status {status}"
        else:
            names = {number.value: number.name for number in signal.Signals}
            how = f"was ended by {names.get(-status, f'signal {-status}')}"
            if status == -signal.SIGABRT:
                how += f" (as where memory is refused: its limit is {format_nbytes(self._limits.memory_nbytes)})"
        return HelperError(f"the helper process that read it {how}{self._said()}")

    def _said(self) -> str:
        """The last line of what it, or a library in it, has printed."""
        try:
            size = os.fstat(self._log).st_size
            lines = os.pread(self._log, LONGEST_TEXT, max(0, size - LONGEST_TEXT)).decode(errors="replace").splitlines()
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; it had printed '{clean(last)[:200]}'" if last else ""

    def _raise(self, answer: Mapping[str, Any]) -> None:
        kind, text = answer.get("error"), answer.get("text")
        if not isinstance(kind, str) or not isinstance(text, str):
            raise lie("an error without a kind or a text")
        text = clean(text)[:LONGEST_TEXT]
        if kind == "MemoryError":
            raise HelperError(
                f"it takes more memory than a helper process may have ({format_nbytes(self._limits.memory_nbytes)} and what "
                "its libraries take). Pass a larger staging= if you think that it needs so much"
            )
        raise _KINDS.get(kind, OSError)(text)


def _places() -> list[str]:
    """Where a helper imports from: where this process does, and where this package is, if that was found in another way."""
    places = [os.path.abspath(place) for place in sys.path]
    home = os.path.dirname(os.path.dirname(_FOLDER))
    return places if home in places else [*places, home]


class _Clock:
    """How long one request may take."""

    def __init__(self, pid: int, seconds: float | None, cpu_seconds: float) -> None:
        self._pid, self._seconds, self._cpu_seconds = pid, seconds, cpu_seconds
        self._since, self._computed = time.monotonic(), self._cpu()

    def _cpu(self) -> float:
        """Seconds of processor time of the process, as clock_getcpuclockid has it: the kernel's own clock of a process."""
        try:
            return time.clock_gettime(~self._pid << 3 | 2)
        except OSError:  # it has ended
            return 0.0

    def late(self) -> str:
        """Why there is no more time; empty where there is."""
        if self._seconds is not None and time.monotonic() - self._since > self._seconds:
            return f"it gave no answer for {self._seconds:g} s (a quarter of timeout=)"
        if self._cpu() - self._computed > self._cpu_seconds:
            return f"it computed for more than {self._cpu_seconds:.0f} s, which no sound chunk takes: a loop without an end"
        return ""


class _Holds:
    """What a helper takes of the system, to be given back once."""

    def __init__(self, owner: int) -> None:
        self._owner, self._descriptors = owner, list[int]()
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None

    def keep(self, descriptor: int) -> int:
        """The same, to be closed in the end."""
        self._descriptors.append(descriptor)
        return descriptor

    def end(self) -> None:
        """Give everything back. In a copy of this process made by fork, only the copies of the descriptors."""
        if self.process is not None and os.getpid() == self._owner:
            _kill(self.process)  # first: a thread that waits for an answer is woken by that
        if self.channel is not None:
            self.channel.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # a file system holds it in the kernel: it ends as soon as that lets it go
        process.wait(_END_SECONDS)
