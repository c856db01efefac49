"""How are values read from an untrusted file? By a helper process, which may crash or lie.

1. A `Helper` is such a process. Its parent starts it for one file, with limits on memory and time, and ends it. It runs
   `SCRIPT` (`untrusted_process`), which opens and decodes the file; the parent never does. If the helper dies or takes too
   long, that is a `HelperError`. Requests are packets of JSON. The answer as JSON, and values behind it, come through memory
   that both processes have mapped, and that the helper cannot make shorter. A packet says how many bytes the answer has.
2. An `UntrustedFile` takes the place of a file of any format (`lookup`); the helper asks the formats which claims it.
3. It starts one helper at the first question, and passes on all questions, one at a time.
4. A value may be wrong, as in any untrusted file. Everything else that a helper says is checked as if it were an attack:
   lengths, types, shapes. A process that decodes hostile bytes may have been taken over by them. An answer that could be true
   of some file is accepted. An answer that cannot be true of any file is a `HelperError`.
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
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

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

# With one of these variables a helper would act as a rank of this job. MPI4PY_... below: a parallel HDF5 would start MPI.
_LAUNCHERS = ("ALPS_", "FLUX_", "HYDI_", "HYDRA_", "I_MPI_", "MPI", "MV2_", "OMPI_", "OPAL_", "PALS_", "PMI", "PRTE", "SLURM")
_OTHER_PREFIXES = ("JAX_", "XLA_", "PYTHON", "SHARDLOAD_")  # PYTHON...: the command line and `do_begin` configure Python
_KEPT_VARIABLES = ("PYTHONHOME",)
_NEW_VARIABLES = {
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
VALUES_AT = 32 << 20  # in the shared memory: no answer is longer. As Python objects it takes twenty times as much
_MOST_TEXT = 4096

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(ConfigError, SourceError, OutsideError, NotAFileError, UndecodedError),
        *(KeyError, OSError, ValueError, RuntimeError),
    )
}

Array = np.ndarray[Any, Any]


def lie(answer: str) -> HelperError:
    """The error about an impossible answer."""
    return HelperError(f"the helper process that read it gave an answer that cannot be right: {answer}")


@cache
def _starter(process: int) -> Pool:
    """A thread of this process that starts helpers. It never ends while the process runs.

    (The system ends a helper at its parent's death: it takes for that the end of the thread that started the helper.)
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
            os.ftruncate(self._shared, VALUES_AT)
            # Otherwise the helper could make it shorter, and this process would die of reading memory that no longer exists.
            fcntl.fcntl(self._shared, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._memory = mmap.mmap(self._shared, 0, prot=mmap.PROT_READ)
            self._channel, helper_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
            self._resources.callback(self._channel.close)
            with helper_end:  # only the helper may keep this end open, or its death would not be noticed
                self._start(helper_end)
            self._channel.settimeout(_TICK_SECONDS)
            begin = {"do": "begin", "places": _import_paths(), "memory_nbytes": limits.memory_nbytes}
            self._exchange(begin, _START_SECONDS, _START_SECONDS)
        except (AttributeError, OSError, ValueError, RuntimeError) as error:  # AttributeError: not Linux
            self.end()
            raise ConfigError(
                f"untrusted=True opens files in helper processes, and one could not be started here ({sys.executable!r}): "
                f"{type(error).__name__}: {error}. Fix that, or load without untrusted=True if you trust the file"
            ) from error

    def _open(self, descriptor: int) -> int:
        """A descriptor that is closed at the end, with a number above those of the standard streams.

        A process that has closed its own streams gives such numbers to whatever it opens; in the helper they are the streams.
        """
        low, descriptor = descriptor, fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(low)
        self._resources.callback(os.close, descriptor)
        return descriptor

    def _start(self, helper_end: socket.socket) -> None:
        with ExitStack() as opened:
            number = fcntl.fcntl(helper_end, fcntl.F_DUPFD_CLOEXEC, 3)
            opened.callback(os.close, number)
            # -S -P: no start-up files, and no imports from the script's folder. It gets this process's import paths.
            arguments = [str(n) for n in (number, self._shared, os.getpid())]
            command = [sys.executable, "-S", "-P", "-s", SCRIPT, *arguments]
            dropped = (*_LAUNCHERS, *_OTHER_PREFIXES)
            environ = {k: v for k, v in os.environ.items() if k in _KEPT_VARIABLES or not k.startswith(dropped)}
            start = partial(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environ | _NEW_VARIABLES,
                pass_fds=(number, self._shared),
            )
            # (After Ctrl-C meanwhile a helper that is about to start ends by itself: nobody has the other end of its socket.)
            self._process = _starter(os.getpid()).submit(start).result()
        self._resources.callback(_kill, self._process, os.getpid())

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """True until the helper is ended."""
        return self._finalize.alive

    def ask(self, do: str, nbytes: int = 0, **arguments: Any) -> dict[str, Any]:
        """Send one request and return the answer. Not from two threads at once.

        Parameters
        ----------
        do : str
            Name of the request: a method ``do_...`` of the helper.
        nbytes : int
            Bytes of the values that the answer puts into the shared memory.
        **arguments
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
        with Undo(self.end):
            if VALUES_AT + nbytes > len(self._memory):
                os.ftruncate(self._shared, VALUES_AT + nbytes)
                self._memory = mmap.mmap(self._shared, VALUES_AT + nbytes, prot=mmap.PROT_READ)
            answer = self._exchange({"do": do, **arguments}, self._limits.seconds, cpu_seconds)
        if "error" in answer:
            self._raise(answer, arguments)
        return answer

    def values(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The shared memory as an array. Copy it before you check or use it: the helper may write it at any time."""
        return np.frombuffer(self._memory, dtype, math.prod(shape), VALUES_AT).reshape(shape)

    def end(self) -> None:
        """End the helper, whatever it is doing. May be called from any thread, and again."""
        self._finalize()

    def _exchange(self, request: dict[str, Any], seconds: float | None, cpu_seconds: float) -> dict[str, Any]:
        since, cpu_before = time.monotonic(), self._cpu_seconds()
        try:
            self._channel.send(json.dumps(request).encode())
            while True:
                try:
                    packet = self._channel.recv(8)
                    break
                except TimeoutError:
                    reason = ""
                    if seconds is not None and time.monotonic() - since > seconds:
                        reason = f"it gave no answer for {seconds:g} s (a quarter of timeout=)"
                    elif self._cpu_seconds() - cpu_before > cpu_seconds:
                        reason = (
                            f"it computed for more than {cpu_seconds:.0f} s, which no sound chunk takes: a loop without an end"
                        )
                    if reason:
                        raise HelperError(f"the helper process that read it was ended: {reason}{self._last_line()}") from None
        except OSError as error:
            if isinstance(error, HelperError):
                raise
            raise self._lost() from None
        if not packet:
            raise self._lost()
        length = int.from_bytes(packet, "little")
        if length > VALUES_AT:
            raise lie(f"{length} bytes of text, {VALUES_AT} are the most")
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
        end = f"ended by itself, with status {status}"
        if status < 0:
            end = f"was ended by {next((s.name for s in signal.Signals if s.value == -status), f'signal {-status}')}"
            if status == -signal.SIGABRT:
                end += f" (as where memory is refused: its limit is {format_nbytes(self._limits.memory_nbytes)})"
        return HelperError(f"the helper process that read it {end}{self._last_line()}")

    def _last_line(self) -> str:
        """The last line that the helper, or a library in it, has printed, as the end of a message."""
        try:
            size = os.fstat(self._log).st_size
            lines = os.pread(self._log, _MOST_TEXT, max(0, size - _MOST_TEXT)).decode(errors="replace").splitlines()
        except OSError:
            return ""
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; it had printed '{printable(last)[:200]}'" if last else ""

    def _raise(self, answer: dict[str, Any], request: dict[str, Any]) -> None:
        names, text = answer.get("error"), answer.get("text")
        if not isinstance(names, list) or not names or not isinstance(text, str):
            raise lie("an error without a kind or a text")
        if "MemoryError" in names:
            raise HelperError(
                f"it takes more memory than a helper process may have ({format_nbytes(self._limits.memory_nbytes)} and what "
                "its libraries take). Pass a larger staging= if you think that it needs so much"
            )
        kind = next((_KINDS[name] for name in map(str, names) if name in _KINDS), None)
        if kind is None:
            kind, text = OSError, f"{names[0]}: {text}"
        raise kind(str(request.get("dataset")) if kind is KeyError else printable(text)[:_MOST_TEXT])


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


_INT64 = 2**63
_MOST_VALUES = 64
_LONGEST_STATE = 8


@contextmanager
def _checking(kind: str) -> Iterator[None]:
    """Turn any error while an answer is checked into the error about an impossible answer."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise lie(f"no {kind} ({printable(str(error))[:200]})") from None


def _require(is_so: bool, text: str) -> None:
    if not is_so:
        raise ValueError(text)


def _are_ints(values: Any, start: int, stop: int) -> bool:
    return all(type(n) is int and start <= n < stop for n in values)


def _cleaned(value: Any) -> Any:
    """JSON without control characters, so that it cannot control a terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _cleaned(part) for key, part in value.items()}
    return [_cleaned(part) for part in value] if isinstance(value, list) else value


def state_of(answer: object) -> tuple[int, ...] | None:
    """A helper's answer for `Source.state`, checked."""
    if answer is None:
        return None
    if not isinstance(answer, list) or len(answer) > _LONGEST_STATE or not _are_ints(answer, -_INT64, 2 * _INT64):
        raise lie("no state of a file")
    return tuple(answer)


def missing_of(answer: Any, box: Sequence[range]) -> list[tuple[int, ...]]:
    """Which chunks of a box of the chunk grid are missing, as a helper says, checked: each at most once, in C order."""
    with _checking("list of missing chunks"):
        chunks = [tuple(index) for index in answer]
        for index in chunks:
            _require(all(type(k) is int and k in axis for k, axis in zip(index, box, strict=True)), "where they are")
        _require(all(a < b for a, b in pairwise(chunks)), "their order")
    return chunks


def info_of(answer: Any, path: str) -> ArrayInfo:
    """A helper's description of an array, checked. The path comes from the caller, not from the helper."""
    with _checking("description of an array"):
        _require(type(answer) is dict, "no object")
        cleaned = {key: _cleaned(value) for key, value in answer.items() if key != "dataset"}
        info = ArrayInfo.from_dict(cleaned | {"path": path, "dataset": answer["dataset"], "parts": None, "labels": None})
        texts = (info.dataset, info.format, info.codec, info.dtype, info.refused or "")
        _require(all(type(text) is str for text in texts), "texts")
        _require(len(info.shape) <= MOST_AXES and _are_ints(info.shape, 0, _INT64), "shape")
        for sizes in (info.chunks or (1,) * len(info.shape), info.shards or (1,) * len(info.shape)):
            _require(len(sizes) == len(info.shape) and _are_ints(sizes, 1, _INT64), "chunks")
        _require(info.nbytes_stored is None or _are_ints([info.nbytes_stored], 0, 2 * _INT64), "stored bytes")
        _require(type(info.is_coordinate) is bool and type(info.is_dimension) is bool, "kind")
        _require(type(info.attributes) is dict, "attributes")
        if info.refused is None:
            dtype = np.dtype(info.dtype)
            _require(dtype.name == info.dtype and refusal(dtype) is None, "type of values")
            nbytes = max(math.prod(info.shape), math.prod(info.chunks or ())) * dtype.itemsize
            _require(nbytes < _INT64, "size")
        for name, (kind, values) in info.packing.items():
            _check_packing(name, kind, values)
    return info


def _check_packing(name: str, kind: str, values: Any) -> None:
    """Raise unless an attribute for decoding has a type, and a few numbers or texts of it."""
    _require(name in ATTRIBUTES and 0 < len(values) <= _MOST_VALUES, "packing")
    is_text = kind in ("text", "unreadable")
    leaves = [leaf for value in values for leaf in (value if isinstance(value, list) else [value])]
    _require(all(type(leaf) in ((str,) if is_text else (int, float)) for leaf in leaves), "values of packing")
    if not is_text and kind != "number":
        dtype = np.dtype(kind)
        _require(dtype.name == kind and dtype.kind in "biufc" and refusal(dtype) is None, "type of packing")
        np.array(leaves, dtype)  # raises if they do not fit


def labels_of(answer: Any, n_axes: int) -> Labels:
    """A helper's answer for labels, checked. Of coordinates there are the names."""
    with _checking("labels"):
        dims = tuple(_cleaned(answer["dims"]))
        _require(len(dims) == n_axes and all(name is None or type(name) is str for name in dims), "names of axes")
        attrs = {
            printable(key): Note(printable(value)) if key in answer["notes"] else _cleaned(value)
            for key, value in answer["attrs"].items()
        }
        coords = {printable(name): Coordinate(dataset) for name, dataset in answer["coords"].items()}
        _require(all(type(coordinate.dataset) is str for coordinate in coords.values()), "coordinates")
    return Labels(dims, attrs, coords)


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
        self.path, self._allow_external = path, access.allow_external
        self._limits = access.untrusted or Limits()
        self.lock = threading.RLock()  # around a question, until the values of its answer are copied
        self._helper: Helper | None = None
        self._n_lost, self._last_error, self.is_closed = 0, "", False

    def ask(self, do: str, nbytes: int = 0, **arguments: Any) -> dict[str, Any]:
        """Ask the helper, which is started if there is none. See `Helper.ask`.

        Raises
        ------
        SourceError, KeyError, OSError, ValueError, RuntimeError
            As the file's own format does in the helper.
        HelperError
            If there is no answer. The next question then goes to a new helper, a few times.
        """
        with self.lock:
            helper = self._running()
            if self.is_closed:  # meanwhile, by another thread
                helper.end()
            try:
                return helper.ask(do, nbytes, path=self.path, allow_external=self._allow_external, **arguments)
            except SourceError as error:
                error.path, error.dataset = self.path, arguments.get("dataset")
                raise
            except HelperError as error:
                self._last_error = str(error)
                helper.end()
                raise

    def _running(self) -> Helper:
        if self._helper is not None and not self._helper.is_alive:
            self._helper, self._n_lost = None, self._n_lost + 1
        if self.is_closed:
            raise HelperError("the file was closed")
        if self._n_lost >= _MOST_LOST:
            raise HelperError(f"{self._n_lost} helper processes were lost in this file before; of the last: {self._last_error}")
        if self._helper is None:
            self._helper = Helper(self._limits)
        return self._helper

    def values(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """What the helper has put into shared memory. Copy it while you hold the lock."""
        if self._helper is None:
            raise HelperError("the file was closed")
        return self._helper.values(shape, dtype)

    def list_arrays(self) -> list[ArrayInfo]:
        """Every array in the file."""
        return self._list("list_arrays")

    def sketch(self, most: int | None = None, like: str = "") -> list[ArrayInfo]:
        """Some of them."""
        return self._list("sketch", most=most, like=like)

    def list_linked(self, group: str, in_full: bool = True) -> list[ArrayInfo]:
        """Those below a group to which links lead."""
        return self._list("list_linked", group=group, in_full=in_full)

    def _list(self, method: str, **arguments: Any) -> list[ArrayInfo]:
        infos = self.ask("list", method=method, arguments=arguments).get("infos")
        if not isinstance(infos, list):
            raise lie("no list of arrays")
        return [info_of(info, self.path) for info in infos]

    def open(self, dataset: str, planned: ArrayInfo | None = None) -> Source:
        """Open one array in the helper."""
        return UntrustedSource(self, dataset)

    def state(self) -> tuple[int, ...] | None:
        """The state of the file, as the helper sees it."""
        return self.state_of(None)

    def state_of(self, dataset: str | None) -> tuple[int, ...] | None:
        """The state of the file, or of an array in it; None if it has none, or if the helper cannot say."""
        try:
            return state_of(self.ask("state", dataset=dataset).get("state"))
        except (LookupError, OSError, RuntimeError, ValueError):
            return None

    def groups(self) -> tuple[Mapping[str, Mapping[str, Any]], Sequence[str]]:
        """No attributes, and a text that says so."""
        return {}, ("what attributes of groups say, which are not read from an untrusted file,",)

    def give_up(self) -> None:
        """End the helper. The next question starts another one, unless the file is closed."""
        if self._helper is not None:
            self._helper.end()

    def close(self) -> None:
        """End the helper. A thread that waits for it gets a `HelperError`."""
        self.is_closed = True
        self.give_up()


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
        self._missing: list[tuple[int, ...]] = []
        answer = file.ask("open", dataset=dataset)
        self._info, self._first_state = info_of(answer.get("info"), file.path), state_of(answer.get("state"))
        if self._info.dataset != dataset:
            raise lie(f"the array '{printable(self._info.dataset)}'")

    @property
    def info(self) -> ArrayInfo:
        """Shape, dtype, chunks and the other metadata."""
        return self._info

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values, in native byte order."""
        return native_dtype(np.dtype(self._info.dtype))

    def labels(self) -> Labels:
        """The names of the axes, the attributes as plain Python, and the names of coordinates."""
        return self._labels(False, len(self._info.shape))

    def group_attrs(self) -> Mapping[str, Any]:
        """The attributes of the array's group."""
        return self._labels(True, 0).attrs

    def _labels(self, of_group: bool, n_axes: int) -> Labels:
        answer = self._file.ask("labels", dataset=self._dataset, of_group=of_group)
        return labels_of(answer.get("labels"), n_axes)

    def expect(self, region: Region) -> None:
        """Tell the helper, which may not have memory for the places of all chunks."""
        with suppress(LookupError, OSError, RuntimeError, ValueError):  # who reads it meets the same error
            self._file.ask("expect", dataset=self._dataset, start=region.start, stop=region.stop)

    def read_into(self, region: Region, out: Array) -> None:
        """Have the helper read `region`, a few chunks at a time, and copy the values into `out`."""
        self._missing = []
        self._read("read_into", region, out)

    def missing(self, region: Region) -> list[tuple[int, ...]]:
        """The missing chunks that the helper reported with the values of this region."""
        return self._missing

    def plain(self, region: Region) -> Array:
        """The values by the format's own library, in the helper."""
        out = np.empty(region.shape, self.dtype)
        self._read("plain", region, out)
        return out

    def _read(self, method: str, region: Region, out: Array) -> None:
        check_request(self._info, self.dtype, region, out)
        chunks = self._info.chunks
        for part in self._parts(region) if region.size else ():
            into: Any = (*part.slices(region.start), ...)
            with self._file.lock:
                if self._is_closed:
                    raise HelperError("the file was closed")
                nbytes = part.size * self.dtype.itemsize
                arguments = {"start": part.start, "stop": part.stop, "method": method, "values_at": VALUES_AT}
                answer = self._file.ask("read", nbytes, dataset=self._dataset, **arguments)
                np.copyto(out[into], self._file.values(part.shape, self.dtype))
                with Undo(self._file.give_up):
                    self._missing += missing_of(answer.get("missing"), chunks_met(part, chunks) if chunks else ())
        settle_bools(out)

    def _parts(self, region: Region) -> Iterator[Region]:
        chunks = self._info.chunks
        if not chunks:
            return iter((region,))
        n_chunks = _PART_NBYTES // (math.prod(chunks) * self.dtype.itemsize)
        return a_few_chunks(region, chunks, min(max(1, n_chunks), _MOST_CHUNKS))

    def state(self) -> tuple[int, ...] | None:
        """The state of the file, as the helper sees it."""
        return self._file.state_of(self._dataset)

    def opened_in(self) -> tuple[int, ...] | None:
        """The state that the helper saw when it opened the array."""
        return self._first_state

    def interrupt(self) -> None:
        """End the helper, in the middle of its work."""
        self._file.close()

    def close(self) -> None:
        """Read no more."""
        self._is_closed = True
