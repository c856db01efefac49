"""How is a process used that may crash, hang or lie? With limits on memory and time, by a parent that can end it.

1. A `Helper` is such a process. Its parent starts it for one file, and ends it. It runs `SCRIPT` (`untrusted_process`), which
   opens and decodes the file; the parent never does. If the helper dies or takes too long, that is a `HelperError`.
2. Values come through memory that both processes have mapped, and that the helper cannot make shorter. Everything else comes as
   JSON. Each message begins with its length (4 bytes, little-endian).
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
from shardload.formats.contract.format import UndecodedError
from shardload.formats.untrusted.answers import LONGEST_TEXT, HelperError, clean, lie
from shardload.system.thread_pool import Pool
from shardload.units import format_nbytes

__all__ = ["SCRIPT", "Helper"]

# The script that a helper runs: started by its path, never imported here.
_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(_FOLDER, "untrusted_process.py")

# With one of these variables a helper would act as a rank of this job. MPI4PY_... below: a parallel HDF5 would start MPI.
_LAUNCHERS = ("ALPS_", "FLUX_", "HYDI_", "HYDRA_", "I_MPI_", "MPI", "MV2_", "OMPI_", "OPAL_", "PALS_", "PMI", "PRTE", "SLURM")
_OTHERS = ("JAX_", "XLA_", "PYTHON", "SHARDLOAD_")  # PYTHON...: the command line and `do_begin` configure Python
_KEPT = ("PYTHONHOME",)
_SET = {
    "MPI4PY_RC_INITIALIZE": "0",
    "MALLOC_ARENA_MAX": "2",  # each arena takes 64 MiB of address space, which the limit counts
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "BLOSC_NTHREADS": "1",
    "ZARR_THREADING__MAX_WORKERS": "2",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONIOENCODING": "utf-8:backslashreplace",
}

_START_SECONDS = 300.0  # to import NumPy from a file system that a thousand ranks use at once
_SLOWEST = 1 << 20  # bytes per second that even the slowest decoder gives
_TICK_SECONDS = 0.5
_END_SECONDS = 1.0  # do not wait longer for a process that is held in the kernel

_FIRST_NBYTES = 1 << 16  # shared memory at first
_MOST_ANSWER_NBYTES = 1 << 20  # as Python objects they take twenty times as much
_HEAD_NBYTES = 4  # the length before each message

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ConfigError, SourceError, OutsideError, NotAFileError, UndecodedError, KeyError, ValueError, RuntimeError)
}

Array = np.ndarray[Any, Any]


@cache
def _starter(process: int) -> Pool:
    """A thread of this process that starts helpers. It never ends while the process runs.

    (A process can ask for a signal at its parent's death. That signal comes when the thread ends that started the process.)
    """
    return Pool(1, "shardload-helpers")


class Helper:
    """One helper process, and the exchange of requests and answers with it.

    Parameters
    ----------
    limits : Limits
        Its limits on memory and time.

    Raises
    ------
    ConfigError
        If it cannot be started. It has not seen any file then.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._holds = _Holds(os.getpid())
        self._finalize = weakref.finalize(self, self._holds.end)
        try:
            self._log = self._holds.keep(os.memfd_create("shardload-helper-log"))
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self._values = self._holds.keep(_above_standard(os.memfd_create("shardload-helper-values", flags)))
            os.ftruncate(self._values, _FIRST_NBYTES)
            # Otherwise the helper could make it shorter, and this process would die of reading memory that no longer exists.
            fcntl.fcntl(self._values, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self._values, 0, prot=mmap.PROT_READ)
            self._channel, other = socket.socketpair()
            self._holds.channel = self._channel
            other = socket.socket(fileno=_above_standard(other.detach()))
            with other:  # only the helper may hold this end, or its death would not be noticed
                self._start(other)
            begin = {"do": "begin", "places": _places(), "memory_nbytes": limits.memory_nbytes}
            self._exchange(begin, _START_SECONDS, _START_SECONDS)
        except (AttributeError, OSError, ValueError, RuntimeError) as error:  # AttributeError: not Linux
            self.end()
            raise ConfigError(
                f"untrusted=True opens files in helper processes, and one could not be started here ({sys.executable!r}): "
                f"{type(error).__name__}: {error}. Fix that, or load without untrusted=True if you trust the file"
            ) from error
        except BaseException:
            self.end()
            raise

    def _start(self, other: socket.socket) -> None:
        given = [str(number) for number in (other.fileno(), self._values, os.getpid())]
        # -S -P: no start-up files, and no imports from the script's folder. It gets this process's import paths.
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
        except BaseException:  # Ctrl-C: the helper may be about to start
            future.add_done_callback(lambda done: None if done.exception() else _kill(done.result()))
            raise

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return None if self._holds.process is None else self._holds.process.pid

    @property
    def is_alive(self) -> bool:
        """True until the helper is ended."""
        return self._finalize.alive

    def ask(
        self, do: str, nbytes: int = 0, factor: float = 1.0, most: int = _MOST_ANSWER_NBYTES, **what: Any
    ) -> dict[str, Any]:
        """Send one request and return the answer. Not from two threads at once.

        Parameters
        ----------
        do : str
            Name of the request: a method ``do_...`` of the helper.
        nbytes : int
            The most bytes that the answer puts into the shared memory.
        factor : float
            Factor on the limit of CPU time.
        most : int
            The most bytes of the answer itself.
        **what
            Arguments of the request.

        Raises
        ------
        HelperError
            If there is no answer, or an impossible one. The helper is ended.
        ConfigError, SourceError, KeyError, OSError, ValueError, RuntimeError
            The helper's own errors.
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
            self._raise(answer, what)
        return answer

    def values(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0) -> Array:
        """The shared memory as an array. Copy it before you check or use it: the helper may write it at any time."""
        return np.frombuffer(self._memory, dtype, math.prod(shape), offset).reshape(shape)

    def end(self) -> None:
        """End the helper, whatever it is doing. May be called from any thread, and again."""
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
        """The error about a helper that has died."""
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
        """The last line that the helper, or a library in it, has printed."""
        try:
            size = os.fstat(self._log).st_size
            lines = os.pread(self._log, LONGEST_TEXT, max(0, size - LONGEST_TEXT)).decode(errors="replace").splitlines()
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; it had printed '{clean(last)[:200]}'" if last else ""

    def _raise(self, answer: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        kind, text = answer.get("error"), answer.get("text")
        if not isinstance(kind, str) or not isinstance(text, str):
            raise lie("an error without a kind or a text")
        text = clean(text)[:LONGEST_TEXT]
        if kind == "MemoryError":
            raise HelperError(
                f"it takes more memory than a helper process may have ({format_nbytes(self._limits.memory_nbytes)} and what "
                "its libraries take). Pass a larger staging= if you think that it needs so much"
            )
        if kind == "KeyError":  # its text is quoted
            text = str(name) if isinstance(name := request.get("dataset"), str) else text
        raise _KINDS.get(kind, OSError)(text)


def _places() -> list[str]:
    """The import paths of a helper: those of this process, and this package's folder if it is not among them."""
    places = [os.path.abspath(place) for place in sys.path]
    home = os.path.dirname(os.path.dirname(_FOLDER))
    return places if home in places else [*places, home]


class _Clock:
    """Measures the time of one request against its limits."""

    def __init__(self, pid: int, seconds: float | None, cpu_seconds: float) -> None:
        self._pid, self._seconds, self._cpu_seconds = pid, seconds, cpu_seconds
        self._since, self._computed = time.monotonic(), self._cpu()

    def _cpu(self) -> float:
        """CPU seconds of the process, from the kernel's clock of a process (as clock_getcpuclockid gives it)."""
        try:
            return time.clock_gettime(~self._pid << 3 | 2)
        except OSError:  # it has ended
            return 0.0

    def late(self) -> str:
        """Why the time is over; empty if it is not."""
        if self._seconds is not None and time.monotonic() - self._since > self._seconds:
            return f"it gave no answer for {self._seconds:g} s (a quarter of timeout=)"
        if self._cpu() - self._computed > self._cpu_seconds:
            return f"it computed for more than {self._cpu_seconds:.0f} s, which no sound chunk takes: a loop without an end"
        return ""


class _Holds:
    """The system resources of a helper, released once."""

    def __init__(self, owner: int) -> None:
        self._owner, self._descriptors = owner, list[int]()
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None

    def keep(self, descriptor: int) -> int:
        """Return `descriptor`, and close it at the end."""
        self._descriptors.append(descriptor)
        return descriptor

    def end(self) -> None:
        """Release everything. In a forked copy of this process, close only the copies of the descriptors."""
        if self.process is not None and os.getpid() == self._owner:
            _kill(self.process)  # first, because it wakes a thread that waits for an answer
        if self.channel is not None:
            self.channel.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


def _above_standard(descriptor: int) -> int:
    """Give a descriptor a number above those of the standard streams, which in the helper would take its place.

    A process that has closed its own streams gives such numbers to whatever it opens next.
    """
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # a file system holds it in the kernel; it ends when that call returns
        process.wait(_END_SECONDS)
