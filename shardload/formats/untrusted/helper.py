"""How is a process used that may crash, hang or lie? With limits on memory and time, by a parent that can end it.

1. A `Helper` is such a process. Its parent starts it for one file, and ends it. It runs `SCRIPT` (`untrusted_process`), which
   opens and decodes the file; the parent never does. If the helper dies or takes too long, that is a `HelperError`.
2. Requests are packets of JSON. The answer as JSON, and values behind it, come through memory that both processes have
   mapped, and that the helper cannot make shorter. A packet says how many bytes the answer has.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any

import numpy as np

from shardload.errors import ConfigError, SourceError, printable
from shardload.formats.access import Limits
from shardload.formats.contract.format import HelperError, UndecodedError
from shardload.storage.local import NotAFileError, OutsideError
from shardload.system.thread_pool import Pool
from shardload.units import format_nbytes

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
_MOST_ANSWER_NBYTES = 1 << 20  # as Python objects they take twenty times as much
VALUES_AT = _MOST_ANSWER_NBYTES  # in the shared memory
_MOST_TEXT = 4096

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ConfigError, SourceError, OutsideError, NotAFileError, UndecodedError, KeyError, ValueError, RuntimeError)
}

Array = np.ndarray[Any, Any]


def lie(what: str) -> HelperError:
    """The error about an impossible answer."""
    return HelperError(f"the helper process that read it gave an answer that cannot be right: {what}")


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
        self._process: subprocess.Popen[bytes] | None = None
        self._resources = ExitStack()
        self._finalize = weakref.finalize(self, self._resources.close)
        try:
            self._log = self._open(os.memfd_create("shardload-helper-log"))
            self._shared = self._open(os.memfd_create("shardload-helper-values", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(self._shared, _MOST_ANSWER_NBYTES)
            # Otherwise the helper could make it shorter, and this process would die of reading memory that no longer exists.
            fcntl.fcntl(self._shared, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self._shared, 0, prot=mmap.PROT_READ)
            self._channel, other = socket.socketpair(type=socket.SOCK_SEQPACKET)
            self._resources.callback(self._channel.close)
            with other:  # only the helper may hold this end, or its death would not be noticed
                self._start(other)
            self._channel.settimeout(_TICK_SECONDS)
            begin = {"do": "begin", "places": _import_paths(), "memory_nbytes": limits.memory_nbytes}
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

    def _open(self, descriptor: int) -> int:
        """A descriptor that is closed at the end, with a number above those of the standard streams.

        A process that has closed its own streams gives such numbers to whatever it opens; in the helper they are the streams.
        """
        if descriptor < 3:
            low, descriptor = descriptor, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
            os.close(low)
        self._resources.callback(os.close, descriptor)
        return descriptor

    def _start(self, other: socket.socket) -> None:
        with ExitStack() as opened:
            number = fcntl.fcntl(other, fcntl.F_DUPFD_CLOEXEC, 3)
            opened.callback(os.close, number)
            # -S -P: no start-up files, and no imports from the script's folder. It gets this process's import paths.
            given = [str(n) for n in (number, self._shared, os.getpid())]
            command = [sys.executable, "-S", "-P", "-s", SCRIPT, *given]
            environ = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith((*_LAUNCHERS, *_OTHERS))} | _SET

            def start() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env=environ,
                    pass_fds=(number, self._shared),
                )

            future = _starter(os.getpid()).submit(start)
            try:
                self._process = future.result()
            except BaseException:  # Ctrl-C: the helper may be about to start
                future.add_done_callback(lambda done: None if done.exception() else _kill(done.result(), os.getpid()))
                raise
        self._resources.callback(_kill, self._process, os.getpid())

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """True until the helper is ended."""
        return self._finalize.alive

    def ask(self, do: str, nbytes: int = 0, most: int = _MOST_ANSWER_NBYTES, **what: Any) -> dict[str, Any]:
        """Send one request and return the answer. Not from two threads at once.

        Parameters
        ----------
        do : str
            Name of the request: a method ``do_...`` of the helper.
        nbytes : int
            Bytes of the values that the answer puts into the shared memory.
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
        cpu_seconds = self._limits.cpu_seconds + nbytes / _SLOWEST
        try:
            if most + nbytes > len(self._memory):
                os.ftruncate(self._shared, most + nbytes)
                self._memory = mmap.mmap(self._shared, most + nbytes, prot=mmap.PROT_READ)
            answer = self._exchange({"do": do, **what}, self._limits.seconds, cpu_seconds, most)
        except BaseException:
            self.end()
            raise
        if "error" in answer:
            self._raise(answer, what)
        return answer

    def values(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The shared memory as an array. Copy it before you check or use it: the helper may write it at any time."""
        return np.frombuffer(self._memory, dtype, math.prod(shape), VALUES_AT).reshape(shape)

    def end(self) -> None:
        """End the helper, whatever it is doing. May be called from any thread, and again."""
        self._finalize()

    def _exchange(
        self,
        request: dict[str, Any],
        seconds: float | None,
        cpu_seconds: float,
        most: int = _MOST_ANSWER_NBYTES,
    ) -> dict[str, Any]:
        since, cpu_before = time.monotonic(), self._cpu_seconds()
        try:
            self._channel.send(json.dumps(request).encode())
            while True:
                try:
                    packet = self._channel.recv(8)
                    break
                except TimeoutError:
                    late = ""
                    if seconds is not None and time.monotonic() - since > seconds:
                        late = f"it gave no answer for {seconds:g} s (a quarter of timeout=)"
                    elif self._cpu_seconds() - cpu_before > cpu_seconds:
                        late = (
                            f"it computed for more than {cpu_seconds:.0f} s, which no sound chunk takes: a loop without an end"
                        )
                    if late:
                        raise HelperError(f"the helper process that read it was ended: {late}{self._last_line()}") from None
        except OSError as error:
            if isinstance(error, HelperError):
                raise
            raise self._lost() from None
        if not packet:
            raise self._lost()
        length = int.from_bytes(packet, "little")
        if length > most:
            raise lie(f"{length} bytes of text, {most} are the most")
        try:
            answer = json.loads(self._memory[:length])
        except (ValueError, RecursionError):
            raise lie("text that is not JSON") from None
        if not isinstance(answer, dict):
            raise lie("JSON that is no object")
        return answer

    def _cpu_seconds(self) -> float:
        """CPU seconds of the process, from the kernel's clock of a process (as clock_getcpuclockid gives it)."""
        try:
            return time.clock_gettime(~(self.pid or 0) << 3 | 2)
        except OSError:  # it has ended
            return 0.0

    def _lost(self) -> HelperError:
        """The error about a helper that has died."""
        if self._process is None or not self.is_alive:
            return HelperError("the helper process was ended")
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return HelperError(f"the helper process that read it stopped listening{self._last_line()}")
        how = f"ended by itself, with status {status}"
        if status < 0:
            how = f"was ended by {next((s.name for s in signal.Signals if s.value == -status), f'signal {-status}')}"
            if status == -signal.SIGABRT:
                how += f" (as where memory is refused: its limit is {format_nbytes(self._limits.memory_nbytes)})"
        return HelperError(f"the helper process that read it {how}{self._last_line()}")

    def _last_line(self) -> str:
        """What the helper, or a library in it, has printed last."""
        try:
            size = os.fstat(self._log).st_size
            lines = os.pread(self._log, _MOST_TEXT, max(0, size - _MOST_TEXT)).decode(errors="replace").splitlines()
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; it had printed '{printable(last)[:200]}'" if last else ""

    def _raise(self, answer: dict[str, Any], request: dict[str, Any]) -> None:
        kind, text = answer.get("error"), answer.get("text")
        if not isinstance(kind, str) or not isinstance(text, str):
            raise lie("an error without a kind or a text")
        if kind == "MemoryError":
            raise HelperError(
                f"it takes more memory than a helper process may have ({format_nbytes(self._limits.memory_nbytes)} and what "
                "its libraries take). Pass a larger staging= if you think that it needs so much"
            )
        text = str(request.get("dataset")) if kind == "KeyError" else printable(text)[:_MOST_TEXT]
        raise _KINDS.get(kind, OSError)(text)


def _import_paths() -> list[str]:
    """The import paths of a helper: those of this process, and this package's folder if it is not among them."""
    paths = [os.path.abspath(path) for path in sys.path]
    home = os.path.dirname(os.path.dirname(_FOLDER))
    return paths if home in paths else [*paths, home]


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a helper. Not from a forked copy of the process that started it."""
    if os.getpid() == owner:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a file system holds it in the kernel; it ends when that call returns
            process.wait(_END_SECONDS)
