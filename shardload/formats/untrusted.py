"""How do I obtain values from a file that nobody vouches for? Through a process that may crash, hang and lie.

1. A `Helper` is such a process: started for one file, with limits on memory and time, and ended by its parent. It opens and
   decodes (`untrusted_process`); this process never does. When it dies, or takes too long, it is a `HelperError`.
2. Values come through memory that both have mapped, and that the helper can not make shorter; all else comes as JSON.
3. Whoever decodes hostile bytes may have been taken over by them. So every answer is checked as if it were meant to harm:
   lengths, types, shapes, numbers. A value may still be wrong, as it may be in any file that nobody vouches for.
4. `UntrustedSource` and `UntrustedChunks` make a `Source` and a `ChunkReader` of it: a helper for each thread that reads, up to
   a few.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import mmap
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from shardload.errors import ConfigError, SourceError
from shardload.formats import untrusted_process
from shardload.formats.base import ArrayInfo, Encoded, Room, check_request, fresh, native_dtype, refusal, settle_bools
from shardload.formats.containment import NotAFileError, OutsideError
from shardload.formats.untrusted_process import LENGTH
from shardload.planning.region import Region
from shardload.system.thread_pool import Pool
from shardload.units import format_nbytes

__all__ = ["Helper", "HelperError", "Limits", "UntrustedChunks", "UntrustedSource", "find", "list_all"]

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
_FIND_FACTOR, _SMALL_FACTOR = 2.0, 0.25  # a file may have many arrays; a small one takes no time
_SLOWEST = 1 << 20  # bytes that any decoder makes in a second
_TICK_SECONDS = 0.5
_END_SECONDS = 1.0  # a process that is in the kernel for longer is left to it

_FIRST_NBYTES = 1 << 16  # of shared memory: more than `read_small` ever gives
_MOST_ANSWER_NBYTES, _MOST_LIST_NBYTES = 1 << 20, 32 << 20  # as objects they take twenty times as much
_MOST_AXES = 64  # NumPy's
_LONGEST_TEXT = 4096
_LONGEST_STATE = 8
_MOST_HELPERS = 4
_WORTH_NBYTES = 64 << 20  # of memory, to have one more
_WORTH_SECONDS = 1.0  # of reading, to have one more: to start it takes half of that
_CHUNKS_HELD = 8  # as stored, as decompressed twice, as decoded, and what libraries keep
_MOST_LOST = 3

_INT64 = 2**63

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ConfigError, SourceError, OutsideError, NotAFileError, ValueError, RuntimeError)
}

Array = np.ndarray[Any, Any]


class HelperError(OSError):
    """A helper process died, took too long, wanted too much memory, or gave an answer that none could give."""


@dataclass(frozen=True)
class Limits:
    """What a helper process may take.

    Attributes
    ----------
    memory_nbytes : int
        Beside its libraries: what `staging` allows. All helpers of an array have so much together.
    seconds : float or None
        In which it must answer; None: without limit. (A file system may stand still for a minute.)
    cpu_seconds : float
        That it may compute for one answer, and a second more for each MiB of values. It does not matter how busy the machine
        is, or how slow its file system; a loop that does not end reaches it.
    """

    memory_nbytes: int = 256 << 20
    seconds: float | None = 225.0
    cpu_seconds: float = 20.0


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
            os.ftruncate(self._values, _FIRST_NBYTES)
            # Or the helper could make it shorter, and this process would be ended by looking at what is not there any more.
            fcntl.fcntl(self._values, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self._values, 0, prot=mmap.PROT_READ)
            self._channel, other = socket.socketpair()
            self._holds.channel = self._channel
            with other:  # only the helper may hold it, or its end would not be noticed
                self._start(other)
            package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            places = [os.path.abspath(place) for place in sys.path]
            begin = {"do": "begin", "places": places, "package": package, "memory_nbytes": limits.memory_nbytes}
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
        command = [sys.executable, "-S", "-P", "-s", os.path.abspath(untrusted_process.__file__), *given]
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
        self._send(LENGTH.pack(len(data)) + data, clock)
        (nbytes,) = LENGTH.unpack(self._receive(LENGTH.size, clock))
        if nbytes > most:
            raise _lie(f"{nbytes} bytes of text, {most} are the most")
        try:
            answer = json.loads(self._receive(nbytes, clock))
        except (ValueError, RecursionError):
            raise _lie("text that is not JSON") from None
        if not isinstance(answer, dict):
            raise _lie("JSON that is no object")
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
            lines = os.pread(self._log, _LONGEST_TEXT, max(0, size - _LONGEST_TEXT)).decode(errors="replace").splitlines()
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; it had printed '{_clean(last)[:200]}'" if last else ""

    def _raise(self, answer: Mapping[str, Any]) -> None:
        kind, text = answer.get("error"), answer.get("text")
        if not isinstance(kind, str) or not isinstance(text, str):
            raise _lie("an error without a kind or a text")
        text = _clean(text)[:_LONGEST_TEXT]
        if kind == "MemoryError":
            raise HelperError(
                f"it takes more memory than a helper process may have ({format_nbytes(self._limits.memory_nbytes)} and what "
                "its libraries take). Pass a larger staging= if you think that it needs so much"
            )
        raise _KINDS.get(kind, OSError)(text)


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


def _clean(text: str) -> str:
    """Text from somebody who may want to write more than text to a terminal."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _lie(what: str) -> HelperError:
    return HelperError(f"the helper process that read it gave an answer that cannot be right: {what}")


# --- what is asked before an array is open


@contextmanager
def _helper(limits: Limits, path: str, dataset: str | None = None) -> Iterator[Helper]:
    """One for what is asked of a file once."""
    helper = Helper(limits)
    try:
        with _named(path, dataset):
            yield helper
    finally:
        helper.end()


@contextmanager
def _named(path: str, dataset: str | None) -> Iterator[None]:
    """Where a helper's error is of this file, it says so."""
    try:
        yield
    except SourceError as error:
        error.path, error.dataset = path, dataset
        raise


def list_all(path: str, allow_external: bool, texts: bool, limits: Limits) -> list[ArrayInfo]:
    """What `list_arrays` says, in a helper."""
    with _helper(limits, path) as helper:
        answer = helper.ask("list", 0, _FIND_FACTOR, _MOST_LIST_NBYTES, path=path, allow_external=allow_external, texts=texts)
    infos = answer.get("infos")
    if not isinstance(infos, list):
        raise _lie("no list of arrays")
    return [_info_of(found, path) for found in infos]


def find(
    path: str, inside: str, dataset: str | None, allow_external: bool, limits: Limits, values: bool = False
) -> tuple[ArrayInfo, bytes | None]:
    """What `find_array` says of `path` (of the file `inside`), and `read_small` if `values` are wanted, in one helper.

    Where values do the helper harm, there are none: whoever reads them then says so, and which chunk it is.
    """
    if values:
        with suppress(HelperError):
            return _find(path, inside, dataset, allow_external, limits, True)
    return _find(path, inside, dataset, allow_external, limits, False)


def _find(
    path: str, inside: str, dataset: str | None, allow_external: bool, limits: Limits, values: bool
) -> tuple[ArrayInfo, bytes | None]:
    with _helper(limits, inside, dataset) as helper:
        factor = _SMALL_FACTOR if values else _FIND_FACTOR
        answer = helper.ask("find", 0, factor, path=path, dataset=dataset, allow_external=allow_external, values=values)
        info = _loadable(_info_of(answer.get("info"), inside))
        if not values or answer.get("nbytes") is None:
            return info, None
        dtype = np.dtype(info.dtype)
        nbytes = math.prod(info.shape) * dtype.itemsize
        if answer["nbytes"] != nbytes or nbytes > _FIRST_NBYTES:
            raise _lie(f"{answer['nbytes']!r} bytes of values, expected {nbytes}")
        found = helper.values((nbytes,), np.dtype(np.uint8)).copy()
    settle_bools(found.view(dtype))
    return info, found.tobytes()


# --- an array


class UntrustedSource:
    """One array of a file, open in helper processes (`Source`).

    Parameters
    ----------
    path : str
        Of the file or store.
    dataset : str
        Full name of the array.
    allow_external : bool
        Whether the file may lead out of its folder.
    limits : Limits
        What all helpers may take together.

    Raises
    ------
    SourceError
        As `open_source` does.
    HelperError
        If the helper that opens it does not survive that.
    """

    def __init__(self, path: str, dataset: str, allow_external: bool, limits: Limits) -> None:
        self._path, self._dataset, self._allow_external, self._limits = path, dataset, allow_external, limits
        self._lock = threading.Condition()
        self._idle: list[Helper] = []
        self._all: list[Helper] = []
        self._n_started, self._n_lost, self._last = 0, 0, ""
        self._worth_from = math.inf  # a time from which on it pays to start another
        self._is_closed = False
        self._absent: list[tuple[int, ...]] = []
        helper, self._info, self._first_state = self._start(limits)
        try:
            self._dtype = native_dtype(np.dtype(self._info.dtype))
            nbytes = math.prod(self._info.chunks or ()) * self._dtype.itemsize
            worth = max(_WORTH_NBYTES, _CHUNKS_HELD * nbytes)
            self._most = max(1, min(_MOST_HELPERS, limits.memory_nbytes // worth)) if self._info.chunks else 1
            self._share = Limits(limits.memory_nbytes // self._most, limits.seconds, limits.cpu_seconds)
            if self._most > 1:
                helper.ask("limit", memory_nbytes=self._share.memory_nbytes)
        except BaseException:
            helper.end()
            raise
        self._idle, self._all, self._n_started = [helper], [helper], 1
        self._worth_from = time.monotonic() + _WORTH_SECONDS

    def _start(self, limits: Limits) -> tuple[Helper, ArrayInfo, tuple[int, ...] | None]:
        helper = Helper(limits)
        try:
            with _named(self._path, self._dataset):
                answer = helper.ask(
                    "open", 0, _FIND_FACTOR, path=self._path, dataset=self._dataset, allow_external=self._allow_external
                )
            info, state = _loadable(_info_of(answer.get("info"), self._path)), _state_of(answer.get("state"))
            if info.dataset != self._dataset:
                raise _lie(f"the array '{_clean(info.dataset)}'")
        except BaseException:
            helper.end()
            raise
        return helper, info, state

    @property
    def info(self) -> ArrayInfo:
        """Shape, dtype, chunks and the rest."""
        return self._info

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values, in native byte order."""
        return self._dtype

    def read_into(self, region: Region, out: Array) -> None:
        """Have a helper read `region`, and copy it into `out`."""
        check_request(self._info, self._dtype, region, out)
        self._absent = []
        if region.size == 0:
            return
        first, counts = self._grid_of(region)
        most = math.prod(counts)
        place = -(-out.nbytes // 8) * 8
        with self._a_helper() as helper:
            answer = helper.ask("read", place + 8 * most, start=region.start, stop=region.stop)
            n: Any = answer.get("n_missing")
            if not _is_int(n, most + 1):
                raise _lie(f"{n!r} chunks that are not stored, of {most}")
            np.copyto(out, helper.values(region.shape, self._dtype))
            numbers = helper.values((n,), np.dtype(np.int64), place).copy()
            if n and (numbers[0] < 0 or numbers[-1] >= most or (np.diff(numbers) <= 0).any()):
                raise _lie("numbers of chunks that are not there")
        settle_bools(out)
        if n:
            at = zip(*(axis.tolist() for axis in np.unravel_index(numbers, counts)), strict=True) if counts else [()]
            self._absent = [tuple(a + k for a, k in zip(first, index, strict=True)) for index in at]

    def missing(self, region: Region) -> list[tuple[int, ...]]:
        """What the helper has said with the values of this region."""
        return self._absent

    def _grid_of(self, region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first chunk that meets a region, and how many do along each axis."""
        chunks = self._info.chunks
        if chunks is None:
            return (), ()
        first = tuple(a // c for a, c in zip(region.start, chunks, strict=True))
        return first, tuple(-(-b // c) - k for b, c, k in zip(region.stop, chunks, first, strict=True))

    def plain(self, region: Region) -> Array:
        """What the format's own library gives, in a helper."""
        out = np.empty(region.shape, self._dtype)
        check_request(self._info, self._dtype, region, out)
        if region.size:
            with self._a_helper() as helper:
                helper.ask("plain", out.nbytes, start=region.start, stop=region.stop)
                np.copyto(out, helper.values(region.shape, self._dtype))
            settle_bools(out)
        return out

    def view(self, region: Region) -> Array | None:
        """None: the values are in a file."""
        return None

    def chunk_reader(self) -> UntrustedChunks | None:
        """Single chunks, by as many helpers as there is memory for; None where the array has no chunks."""
        return None if self._info.chunks is None else UntrustedChunks(self)

    def chunk(self, index: tuple[int, ...], out: Array) -> int | None:
        """Values of one chunk into `out`, of the chunk's shape. Returns its bytes as stored, None where it is not."""
        with self._a_helper() as helper:
            answer = helper.ask("chunk", out.nbytes, index=index)
            np.copyto(out, helper.values(out.shape, self._dtype))
            n = answer.get("nbytes_stored")
            if n is not None and not _is_int(n, _INT64):
                raise _lie(f"{n!r} bytes of a stored chunk")
        settle_bools(out)
        return None if n is None else int(n)

    def state(self) -> tuple[int, ...] | None:
        """Of the file, as the helpers see it; None where there is no such thing, or no helper any more."""
        with self._lock:
            helpers, self._idle = self._idle, []
        found = self._first_state if helpers else None
        try:
            for helper in helpers:
                state = _state_of(helper.ask("state").get("state"))
                if state != self._first_state:
                    found = state
        except (OSError, ValueError, RuntimeError):
            found = None
        finally:
            for helper in helpers:
                self._give(helper)
        return found

    def close(self) -> None:
        """End the helpers, also those that are at work for another thread: it gets a `HelperError`."""
        with self._lock:
            self._is_closed = True
            helpers, self._all, self._idle = self._all, [], []
            self._lock.notify_all()
        for helper in helpers:
            helper.end()

    # --- helpers, each for one thread at a time

    @contextmanager
    def _a_helper(self) -> Iterator[Helper]:
        helper = self._take()
        try:
            yield helper
        except HelperError as error:
            helper.end()
            self._last = str(error)
            raise
        except BaseException as error:
            if not isinstance(error, (OSError, ValueError, RuntimeError)):  # Ctrl-C: who knows what it is at
                helper.end()
            raise
        finally:
            self._give(helper)

    def _take(self) -> Helper:
        with self._lock:
            while not self._idle and not self._is_closed and self._n_started > 0:
                left = self._worth_from - time.monotonic()
                if self._n_started < self._most and left <= 0:
                    break
                self._lock.wait(left if self._n_started < self._most else None)
            if self._is_closed:
                raise HelperError("the file was closed")
            if self._idle:
                return self._idle.pop()
            if self._n_lost >= _MOST_LOST:
                raise HelperError(f"{self._n_lost} helper processes were lost in this file before; of the last: {self._last}")
            self._n_started += 1
        helper = None
        try:
            helper, info, state = self._start(self._share)
            if info.to_json() != self._info.to_json() or state != self._first_state:  # as text: a NaN is not itself
                raise OSError("the file was changed since it was opened")
        except BaseException:
            if helper is not None:
                helper.end()
            with self._lock:
                self._n_started -= 1
                self._lock.notify()
            raise
        self._keep(helper)
        return helper

    def _keep(self, helper: Helper) -> None:
        with self._lock:
            if not self._is_closed:
                self._all.append(helper)
                return
        helper.end()
        raise HelperError("the file was closed")

    def _give(self, helper: Helper) -> None:
        with self._lock:
            if helper.is_alive:
                self._idle.append(helper)
            else:
                self._n_started -= 1
                self._n_lost += 1
                if helper in self._all:
                    self._all.remove(helper)
            self._lock.notify()


class _Values:
    """A chunk's values, decoded; as long as what is stored of it, for whoever counts."""

    def __init__(self, values: Array, nbytes_stored: int) -> None:
        self.values, self._nbytes_stored = values, nbytes_stored

    def __len__(self) -> int:
        return self._nbytes_stored


class UntrustedChunks:
    """The chunks of an array that is open in helpers (`ChunkReader`). A helper fetches and decodes in one go."""

    def __init__(self, source: UntrustedSource) -> None:
        self._source = source
        self._shape = source.info.chunks or ()
        self._counts = tuple(-(-n // c) for n, c in zip(source.info.shape, self._shape, strict=True))
        self._nbytes = math.prod(self._shape) * source.dtype.itemsize
        self._fill: Array = np.zeros((), source.dtype)

    def fetch(self, index: tuple[int, ...], room: Room = fresh) -> Encoded | None:
        """The values of a chunk; None where it is not stored."""
        if len(index) != len(self._counts) or not all(0 <= k < n for k, n in zip(index, self._counts, strict=True)):
            raise ValueError(f"there is no chunk {index} in a grid of {self._counts}")
        values = room(self._nbytes).view(self._source.dtype).reshape(self._shape)
        n = self._source.chunk(index, values)
        if n is None:
            self._fill = values.reshape(-1)[:1].reshape(()).copy()
            return None
        return Encoded(_Values(values, n))

    def decode(self, encoded: Encoded | None, out: Array) -> None:
        """Copy what `fetch` returned."""
        np.copyto(out, self._fill if encoded is None else encoded.data.values)


# --- what a helper may say


def _is_int(value: object, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end


def _text(value: object, what: str, is_clean: bool = True) -> str:
    if not isinstance(value, str) or len(value) > 16 * _LONGEST_TEXT:
        raise _lie(f"no text as {what}")
    return _clean(value) if is_clean else value


def _numbers(value: object, what: str, least: int = 0) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MOST_AXES or not all(_is_int(n, _INT64) and n >= least for n in value):
        raise _lie(f"no lengths as {what}")
    return tuple(value)


def _state_of(found: object) -> tuple[int, ...] | None:
    if found is None:
        return None
    if not isinstance(found, list) or len(found) > _LONGEST_STATE:
        raise _lie("no state of a file")
    if not all(isinstance(n, int) and not isinstance(n, bool) and -_INT64 <= n < 2 * _INT64 for n in found):
        raise _lie("a state of a file that is not made of numbers")
    return tuple(found)


def _info_of(found: object, path: str) -> ArrayInfo:
    """What a helper says of an array, if that could be so of any array. The path is not the helper's to say."""
    if not isinstance(found, dict):
        raise _lie("no description of an array")
    refused = found.get("refused")
    info = ArrayInfo(
        path=path,
        dataset=_text(found.get("dataset"), "name", is_clean=False),
        format=_text(found.get("format"), "format"),
        shape=_numbers(found.get("shape"), "shape"),
        dtype=_text(found.get("dtype"), "dtype"),
        chunks=None if found.get("chunks") is None else _numbers(found["chunks"], "chunks", 1),
        codec=_text(found.get("codec"), "codec"),
        nbytes_stored=found.get("nbytes_stored"),
        shards=None if found.get("shards") is None else _numbers(found["shards"], "shards", 1),
        refused=None if refused is None else _text(refused, "reason"),
        is_coordinate=found.get("is_coordinate") is True,
        attributes=_plain(found.get("attributes")),
    )
    if info.nbytes_stored is not None and not _is_int(info.nbytes_stored, 2 * _INT64):
        raise _lie("no number of stored bytes")
    if any(parts is not None and len(parts) != len(info.shape) for parts in (info.chunks, info.shards)):
        raise _lie("chunks of another number of axes than the array")
    if info.refused is None:
        itemsize = _itemsize(info.dtype)
        if max(math.prod(info.shape), math.prod(info.chunks or ())) * itemsize >= _INT64:
            raise _lie(f"an array of {info.shape} and chunks of {info.chunks}")
    return info


def _itemsize(name: str) -> int:
    """Of a type that values can be given in: a number, or truth."""
    if re.fullmatch(r"[a-z][a-z0-9_]{1,30}", name):
        try:
            dtype = np.dtype(name)
        except TypeError:
            dtype = np.dtype("V")
        if refusal(dtype) is None and dtype.name == name and dtype.isnative:
            return dtype.itemsize
    raise _lie(f"values of the type '{name}'")


def _plain(found: object) -> dict[str, Any]:
    """Attributes, at the end of which nobody has looked: JSON, with texts that are texts."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            raise _lie("an attribute that is an object")
        if isinstance(value, str):
            return _clean(value)
        return [clean(part) for part in value] if isinstance(value, list) else value

    if not isinstance(found, dict):
        raise _lie("no attributes")
    return {_clean(key): clean(value) for key, value in itertools.islice(found.items(), _LONGEST_TEXT)}


def _loadable(info: ArrayInfo) -> ArrayInfo:
    if info.refused is not None:
        raise _lie("an array that cannot be loaded, without an error")
    return info
