"""How are values read from an untrusted file? By a helper process, which may crash or lie.

1. An `UntrustedFile` takes the place of a file of any format (`lookup`). It starts a helper process at the first question,
   with limits on memory and time, passes on all questions, one at a time, and ends it. The helper runs `SCRIPT`
   (`untrusted_process`), which asks the formats who claims the file, opens and decodes it; the parent never does.
2. They talk over a socket: a line of JSON names a method of the file or of an array in it, and back come JSON of limited
   length, and values. If the helper dies or takes too long, that is a `HelperError`.
3. A value may be wrong, as in any untrusted file. Everything else that a helper says is checked as if it were an attack:
   lengths, types, shapes. A process that decodes hostile bytes may have been taken over by them. An answer that could be true
   of some file is accepted. An answer that cannot be true of any file is a `HelperError`, and the end of the helper.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np

from shardload.errors import ConfigError, SourceError, printable
from shardload.formats.access import Access, Limits
from shardload.formats.contract.array import (
    MOST_AXES,
    ArrayInfo,
    Coordinate,
    Labels,
    Note,
    check_request,
    native_dtype,
    refusal,
    settle_bools,
)
from shardload.formats.contract.chunk_reader import a_few_chunks, chunks_met
from shardload.formats.contract.format import HelperError, OpenFile, Source, UndecodedError
from shardload.planning.region import Region
from shardload.storage.local import NotAFileError, OutsideError
from shardload.system.thread_pool import Pool
from shardload.system.undo import Undo
from shardload.units import format_nbytes
from shardload.values.decoding import ATTRIBUTES

# The script that a helper runs: started by its path, never imported here.
_FOLDER = os.path.dirname(os.path.abspath(__file__))
SCRIPT = os.path.join(_FOLDER, "untrusted_process.py")

# A helper has no other variables: no keys, and none by which it would act as a rank of this job.
_KEPT_VARIABLES = ("HDF5_", "HOME", "LANG", "LC_", "LD_", "PATH", "PYTHONHOME", "TMPDIR", "TZ")
_NEW_VARIABLES = {
    "MPI4PY_RC_INITIALIZE": "0",  # a parallel HDF5 would start MPI
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
_MOST_NBYTES = 32 << 20  # of an answer. As Python objects it takes twenty times as much
_MOST_TEXT = 4096

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(ConfigError, SourceError, OutsideError, NotAFileError, UndecodedError),
        *(KeyError, OSError, ValueError, RuntimeError),
    )
}

Array = np.ndarray[Any, Any]
Answer = TypeVar("Answer")


@cache
def _starter(process: int) -> Pool:
    """A thread of this process that starts helpers. It never ends while the process runs.

    (The system ends a helper at its parent's death: it takes for that the end of the thread that started the helper.)
    """
    return Pool(1, "shardload-helpers")


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a helper. Not from a forked copy of the process that started it."""
    if os.getpid() == owner:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a file system holds it in the kernel; it ends when that call returns
            process.wait(_END_SECONDS)


_INT64 = 2**63
_MOST_VALUES = 64
_LONGEST_STATE = 8


def _lie(answer: str) -> HelperError:
    """The error about an impossible answer."""
    return HelperError(f"the helper process that read it gave an answer that cannot be right: {answer}")


def checked(check: Callable[[Any], Answer], answer: Any) -> Answer:
    """What a check makes of an answer. Any error of the check is one about an impossible answer."""
    try:
        return check(answer)
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise _lie(printable(f"{type(error).__name__}: {error}")[:200]) from None


def _require(what: str, *are_so: bool) -> None:
    if not all(are_so):
        raise ValueError(f"no {what}")


def _are_ints(values: Any, start: int, stop: int) -> bool:
    return all(type(n) is int and start <= n < stop for n in values)


def _cleaned(value: Any) -> Any:
    """JSON without control characters, so that it cannot control a terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _cleaned(part) for key, part in value.items()}
    return [_cleaned(part) for part in value] if isinstance(value, list) else value


def state_of(answer: Any) -> tuple[int, ...] | None:
    """A helper's answer for `Source.state`."""
    if answer is None:
        return None
    _require("state", type(answer) is list, len(answer) <= _LONGEST_STATE, _are_ints(answer, -_INT64, 2 * _INT64))
    return tuple(answer)


def missing_of(answer: Any, box: Sequence[range]) -> list[tuple[int, ...]]:
    """Which chunks of a box of the chunk grid are missing, in C order."""
    chunks = sorted(map(tuple, answer))
    for index in chunks:
        _require("chunk", *(type(k) is int and k in axis for k, axis in zip(index, box, strict=True)))
    _require("different chunks", len(set(chunks)) == len(chunks))
    return chunks


def info_of(answer: Any, path: str) -> ArrayInfo:
    """A helper's description of an array. The path comes from the caller, not from the helper."""
    named = {"path": path, "dataset": answer["dataset"], "parts": None, "labels": None}
    info = ArrayInfo.from_dict(_cleaned({**answer, "dataset": None}) | named)
    n_axes, texts = len(info.shape), (info.dataset, info.format, info.codec, info.dtype, info.refused or "")
    _require("texts", *(type(text) is str for text in texts))
    _require("shape", n_axes <= MOST_AXES, _are_ints(info.shape, 0, _INT64))
    for sizes in (info.chunks, info.shards):
        _require("chunks", sizes is None or (len(sizes) == n_axes and _are_ints(sizes, 1, _INT64)))
    _require("stored bytes", info.nbytes_stored is None or _are_ints([info.nbytes_stored], 0, 2 * _INT64))
    _require("kind", type(info.is_coordinate) is bool, type(info.is_dimension) is bool, type(info.attributes) is dict)
    if info.refused is None:
        dtype = np.dtype(info.dtype)
        nbytes = max(math.prod(info.shape), math.prod(info.chunks or ())) * dtype.itemsize
        _require("type of values", dtype.name == info.dtype, refusal(dtype) is None, nbytes < _INT64)
    for name, (kind, values) in info.packing.items():
        leaves = [leaf for value in values for leaf in (value if isinstance(value, list) else [value])]
        kinds = (str,) if kind in ("text", "unreadable") else (bool, int, float)
        _require("packing", name in ATTRIBUTES, 0 < len(values) <= _MOST_VALUES, *(type(leaf) in kinds for leaf in leaves))
        if kind not in ("text", "unreadable", "number"):
            dtype = np.dtype(kind)
            _require("type of packing", dtype.name == kind, dtype.kind in "biufc", refusal(dtype) is None)
            np.array(leaves, dtype)  # raises if they do not fit
    return info


def labels_of(answer: Any, n_axes: int) -> Labels:
    """A helper's answer for labels. Of coordinates there are the names."""
    dims, notes = tuple(_cleaned(answer["dims"])), answer["notes"]
    _require("names of axes", len(dims) == n_axes, *(name is None or type(name) is str for name in dims))
    _require("coordinates", *(type(dataset) is str for dataset in answer["coords"].values()))
    attrs = {
        printable(key): Note(printable(value)) if key in notes else _cleaned(value) for key, value in answer["attrs"].items()
    }
    return Labels(dims, attrs, {printable(name): Coordinate(dataset) for name, dataset in answer["coords"].items()})


_PART_NBYTES, _MOST_CHUNKS = 1 << 24, 1 << 13  # values that are read at once, unless a chunk has more
_MOST_LOST = 3


class UntrustedFile(OpenFile):
    """A file that is open in a helper process.

    Attributes of groups are not read from a file that is not trusted.

    Parameters
    ----------
    path : str
        Path of the file or store.
    access : Access
        What the caller allows, with the limits of the helper. It may use all filters.
    """

    def __init__(self, path: str, access: Access) -> None:
        self.path, self._allow_external, self._limits = path, access.allow_external, access.untrusted or Limits()
        self._lock = threading.RLock()  # around a question
        self._end: weakref.finalize[Any, Any] | None = None  # ends the helper, whatever it is doing, if it is called
        self._n_started, self._last_error, self._is_closed = 0, "", False

    def ask(
        self,
        check: Callable[[Any], Answer],
        method: str,
        *arguments: Any,
        dataset: str | None = None,
        values: Array | None = None,
    ) -> Answer:
        """Ask for what a method of the file returns, or of an array in it.

        Parameters
        ----------
        check : callable
            Makes of the answer, which may be any JSON, what is returned. Any error of it says that the helper lies.
        method : str
            Name of a method, or a property, of `OpenFile`; if there is a `dataset`, of its `Source`.
        *arguments
            Its arguments; in the place of a region its two corners.
        dataset : str, optional
            Full name of the array.
        values : ndarray, optional
            Where the values go of a method that reads some: contiguous, with their type and shape.

        Raises
        ------
        ConfigError
            If no helper can be started. None has seen the file then.
        HelperError
            If there is no answer, or an impossible one. The helper is ended; the next question goes to a new one, a few times.
        SourceError, KeyError, OSError, ValueError, RuntimeError
            As the file's own format does in the helper.
        """
        request = {"method": method, "dataset": dataset, "arguments": arguments}
        into: Any = memoryview(b"" if values is None else values.reshape(-1).view("u1").data)
        with self._lock, Undo(self._stop):
            if not self.is_running:
                self._start()
            if self._is_closed:  # meanwhile, by another thread
                self._stop()
            try:
                answer = self._answer(request, into)
                if "error" not in answer:
                    return checked(lambda answer: check(answer["value"]), answer)
                error = self._error(answer, dataset)
            except HelperError as lost:
                self._last_error = str(lost)
                raise
        try:
            raise error
        finally:
            del error  # a variable with the error that is raised keeps the buffers of the load: see `let_go`

    @property
    def is_running(self) -> bool:
        """True while there is a helper."""
        return self._end is not None and self._end.alive

    def _start(self) -> None:
        if self._is_closed:
            raise HelperError("the file was closed")
        if self._n_started == _MOST_LOST:
            raise HelperError(f"{_MOST_LOST} helper processes were lost in this file before; of the last: {self._last_error}")
        self._n_started += 1
        settings = {
            "path": self.path,
            "allow_external": self._allow_external,
            "memory_nbytes": self._limits.memory_nbytes,
            "places": [*map(os.path.abspath, sys.path), os.path.dirname(os.path.dirname(_FOLDER))],  # of imports
        }
        try:
            with ExitStack() as resources:
                self._log = resources.enter_context(os.fdopen(os.memfd_create("shardload-helper-log"), "rb"))
                self._channel, helper_end = socket.socketpair()
                resources.callback(self._channel.close)
                self._channel.settimeout(_TICK_SECONDS)
                start = partial(
                    subprocess.Popen,
                    # -S -P: no start-up files, and no imports from the script's folder
                    [sys.executable, "-S", "-P", "-s", SCRIPT, str(os.getpid()), json.dumps(settings)],
                    stdin=helper_end,
                    stdout=self._log,
                    stderr=self._log,
                    env={k: v for k, v in os.environ.items() if k.startswith(_KEPT_VARIABLES)} | _NEW_VARIABLES,
                )
                with helper_end:  # only the helper may keep this end open, or its death would not be noticed
                    # (After Ctrl-C here one that is about to start ends by itself: nobody has the other end of its socket.)
                    self._process: subprocess.Popen[bytes] = _starter(os.getpid()).submit(start).result()
                resources.callback(_kill, self._process, os.getpid())
                self._end = weakref.finalize(self, resources.pop_all().close)
            self._receive_answer(_START_SECONDS, _START_SECONDS)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"untrusted=True opens files in helper processes, and one could not be started here ({sys.executable!r}): "
                f"{type(error).__name__}: {error}. Fix that, or load without untrusted=True if you trust the file"
            ) from error

    def _stop(self) -> None:
        if self._end is not None:
            self._end()

    def _answer(self, request: dict[str, Any], into: memoryview) -> dict[str, Any]:
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            raise self._lost() from None
        answer = self._receive_answer(self._limits.seconds, self._limits.cpu_seconds + into.nbytes / _SLOWEST)
        if "error" not in answer:
            self._receive(into)
        return answer

    def _receive_answer(self, seconds: float | None, cpu_seconds: float) -> dict[str, Any]:
        """The next answer. The time for it, and for the values behind it, begins now."""
        self._seconds, self._since = seconds, time.monotonic()
        self._cpu_seconds, self._cpu_since = cpu_seconds, self._cpu_time()
        length = bytearray(8)
        self._receive(memoryview(length))
        nbytes = int.from_bytes(length, "little")
        if nbytes > _MOST_NBYTES:
            raise _lie(f"{nbytes} bytes of text, {_MOST_NBYTES} are the most")
        text = bytearray(nbytes)
        self._receive(memoryview(text))
        return checked(lambda text: dict(**json.loads(text)), text)

    def _receive(self, into: memoryview) -> None:
        while into:
            self._check_time()
            try:
                n_received = self._channel.recv_into(into)
            except TimeoutError:
                continue
            except OSError:
                n_received = 0
            if n_received == 0:
                raise self._lost()
            into = into[n_received:]

    def _check_time(self) -> None:
        reason = ""
        if self._seconds is not None and time.monotonic() - self._since > self._seconds:
            reason = f"it gave no answer for {self._seconds:g} s (a quarter of timeout=)"
        elif self._cpu_time() - self._cpu_since > self._cpu_seconds:
            reason = f"it computed for more than {self._cpu_seconds:.0f} s, which no sound chunk takes: a loop without an end"
        if reason:
            raise HelperError(f"the helper process that read it was ended: {reason}{self._last_line()}")

    def _cpu_time(self) -> float:
        """CPU seconds of the process, from the kernel's clock of a process (as clock_getcpuclockid gives it)."""
        try:
            return time.clock_gettime(~self._process.pid << 3 | 2)
        except OSError:  # it has ended
            return 0.0

    def _lost(self) -> HelperError:
        """The error about a helper that has died."""
        if not self.is_running:
            return HelperError("the helper process was ended")
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return HelperError(f"the helper process that read it stopped listening{self._last_line()}")
        end = f"ended by itself, with status {status}"
        if status < 0:
            end = f"was ended by {next((s.name for s in signal.Signals if s.value == -status), f'signal {-status}')}"
            if status == -signal.SIGABRT:
                end += f" (as where memory is refused: its limit is {format_nbytes(self._limits.memory_nbytes)})"
        return HelperError(f"the helper process that read it {end}{self._last_line()}")

    def _last_line(self) -> str:
        """The last line that the helper, or a library in it, has printed, as the end of a message."""
        try:
            size = os.fstat(self._log.fileno()).st_size
            lines = os.pread(self._log.fileno(), _MOST_TEXT, max(0, size - _MOST_TEXT)).decode(errors="replace").splitlines()
        except (OSError, ValueError):  # closed
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; it had printed '{printable(last)[:200]}'" if last else ""

    def _error(self, answer: dict[str, Any], dataset: str | None) -> Exception:
        """The helper's own error."""
        names, text = answer["error"], answer.get("text")
        if not isinstance(names, list) or not names or not isinstance(text, str):
            raise _lie("an error without a kind or a text")
        if "MemoryError" in names:
            raise HelperError(
                f"it takes more memory than a helper process may have ({format_nbytes(self._limits.memory_nbytes)} and what "
                "its libraries take). Pass a larger staging= if you think that it needs so much"
            )
        kind = next((_KINDS[name] for name in map(str, names) if name in _KINDS), None)
        if kind is None:
            kind, text = OSError, f"{names[0]}: {text}"
        error = kind(str(dataset) if kind is KeyError else printable(text)[:_MOST_TEXT])
        if isinstance(error, SourceError):
            error.path, error.dataset = self.path, dataset
        return error

    def list_arrays(self, most: int | None = None, like: str = "", in_full: bool = True) -> list[ArrayInfo]:
        """Every array in the file, or some of them."""
        return self.ask(self._infos, "list_arrays", most, like, in_full)

    def list_linked(self, group: str, in_full: bool = True) -> list[ArrayInfo]:
        """Those below a group to which links lead."""
        return self.ask(self._infos, "list_linked", group, in_full)

    def _infos(self, answer: list[Any]) -> list[ArrayInfo]:
        return [info_of(info, self.path) for info in answer]

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Source:
        """Open one array in the helper."""
        return UntrustedSource(self, dataset)

    def state(self, dataset: str | None = None) -> tuple[int, ...] | None:
        """The state of the file, or of an array in it; None if it has none, or if the helper cannot say."""
        try:
            return self.ask(state_of, "state", dataset=dataset)
        except (LookupError, OSError, RuntimeError, ValueError):
            return None

    def groups(self) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]:
        """No attributes, and a text that says so."""
        return {}, ("what attributes of groups say, which are not read from an untrusted file,",)

    def close(self) -> None:
        """End the helper. A thread that waits for it gets a `HelperError`."""
        self._is_closed = True
        self._stop()


class UntrustedSource(Source):
    """One array of a file that is open in a helper process.

    Parameters
    ----------
    file : UntrustedFile
        The file.
    dataset : str
        Full name of the array.
    """

    def __init__(self, file: UntrustedFile, dataset: str) -> None:
        self._file, self._dataset, self._is_closed = file, dataset, False
        self.info = self._ask(partial(info_of, path=file.path), "info")
        self.dtype = np.dtype("V1") if self.info.refused is not None else native_dtype(np.dtype(self.info.dtype))
        self.opened_in = self._ask(state_of, "opened_in")
        if self.info.dataset != dataset:
            raise _lie(f"the array '{printable(self.info.dataset)}'")

    def _ask(self, check: Callable[[Any], Answer], method: str, *arguments: Any, values: Array | None = None) -> Answer:
        return self._file.ask(check, method, *arguments, dataset=self._dataset, values=values)

    def labels(self) -> Labels:
        """The names of the axes, the attributes as plain Python, and the names of coordinates."""
        return self._ask(partial(labels_of, n_axes=len(self.info.shape)), "labels")

    def group_attrs(self) -> Mapping[str, Any]:
        """The attributes of the array's group."""
        return self._ask(partial(labels_of, n_axes=0), "group_attrs").attrs

    def expect(self, region: Region) -> None:
        """Tell the helper, which may not have memory for the places of all chunks."""
        with suppress(LookupError, OSError, RuntimeError, ValueError):  # who reads it meets the same error
            self._ask(lambda _: None, "expect", region.start, region.stop)

    def read_into(self, region: Region, out: Array) -> list[tuple[int, ...]]:
        """Have the helper read `region`, a few chunks at a time, into `out`."""
        return self._read("read_into", region, out)

    def plain(self, region: Region) -> Array:
        """The values by the format's own library, in the helper."""
        out = np.empty(region.shape, self.dtype)
        self._read("plain", region, out)
        return out

    def _read(self, method: str, region: Region, out: Array) -> list[tuple[int, ...]]:
        check_request(self.info, self.dtype, region, out)
        chunks, missing = self.info.chunks, list[tuple[int, ...]]()
        for part in self._parts(region) if region.size else ():
            inside: Any = (*part.slices(region.start), ...)
            target = out[inside]
            values = target if target.flags.c_contiguous else np.empty(part.shape, self.dtype)
            if self._is_closed:
                raise HelperError("the file was closed")
            box = chunks_met(part, chunks) if chunks else ()
            missing += self._ask(partial(missing_of, box=box), method, part.start, part.stop, values=values)
            if values is not target:
                target[...] = values
        settle_bools(out)
        return missing

    def _parts(self, region: Region) -> Iterator[Region]:
        chunks = self.info.chunks
        if not chunks:
            return iter((region,))
        n_chunks = _PART_NBYTES // (math.prod(chunks) * self.dtype.itemsize)
        return a_few_chunks(region, chunks, min(max(1, n_chunks), _MOST_CHUNKS))

    def state(self) -> tuple[int, ...] | None:
        """The state of the file, as the helper sees it."""
        return self._file.state(self._dataset)

    def interrupt(self) -> None:
        """End the helper, in the middle of its work."""
        self._file.close()

    def close(self) -> None:
        """Read no more."""
        self._is_closed = True
