"""What does a helper process do? It opens one untrusted file, and sends what its parent asks of it.

1. `untrusted` starts it as a script, with a socket in the place of standard input, and imports nothing from it.
2. Before it opens the file, it gives up what it does not need: it ends with its parent, writes no files and no core dumps, and
   has a limit on memory.
3. A line of JSON names a method of the file, or of an array in it, which are those of the formats. The answer is its length, in
   8 bytes, JSON, and the values behind it if the method reads values. The first answer says that all is imported.

It finds packages as the parent does. It imports what reading needs, but neither JAX nor MPI; at the top, only
the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_LIBRARIES_NBYTES = 1 << 30  # limit while libraries are imported; their real use is measured before the file is opened
_BASE_NBYTES = 128 << 20  # beside values: threads, memory that libraries allocate at first use, metadata
_LOG_NBYTES = 1 << 20  # output of libraries
_MOST_OPEN = 16  # arrays
_STACK_NBYTES = 1 << 20
# What formats may do here beyond what the caller allows, for example use any decoder. That is safe only in a process that may
# crash and has limited memory. This is the one place for it.
_MORE: dict[str, Any] = {"allow_filters": {"all"}, "is_limited": True}


def main() -> None:
    """Answer requests until there are no more. Arguments: id of the parent, and what `_Server` takes, as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # terminals and batch systems send these to all processes:
        signal.signal(number, signal.SIG_IGN)  # the parent answers them and ends this process; else it would blame the file
    _give_up_rights(parent=int(sys.argv[1]))
    _Server(**json.loads(sys.argv[2])).run()
    os._exit(0)  # whatever threads libraries have started


def _give_up_rights(parent: int) -> None:
    system = ctypes.CDLL(None, use_errno=True)
    for option, value in (
        (_PR_SET_PDEATHSIG, int(signal.SIGKILL)),
        (_PR_SET_DUMPABLE, 0),  # RLIMIT_CORE does not limit a core dump that is piped to a program
        (_PR_SET_NO_NEW_PRIVS, 1),
    ):
        if system.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) is refused here")
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, _LOG_NBYTES)


def _limit(kind: int, most: int) -> None:
    """Set a limit that cannot be raised again. A lower limit stays."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def _limit_memory(nbytes: int) -> None:
    """Let this process allocate `nbytes` more than now, and never more than that."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, used + nbytes)


class _Server:
    """Answers requests. `untrusted.UntrustedFile` is the other side."""

    def __init__(self, path: str, allow_external: bool, memory_nbytes: int, places: list[str]) -> None:
        threading.stack_size(_STACK_NBYTES)  # a stack counts as memory, used or not
        warnings.simplefilter("ignore")
        sys.path[:] = places
        _limit_memory(_LIBRARIES_NBYTES + memory_nbytes)
        with contextlib.suppress(ImportError):
            import ml_dtypes  # noqa: F401  (JAX would register its types with NumPy)
        import shardload.formats.lookup  # noqa: F401

        self._path, self._allow_external, self._memory_nbytes = path, allow_external, memory_nbytes
        self._file: Any = None
        self._sources: dict[str, Any] = {}

    def run(self) -> None:
        """Answer until the parent closes the socket."""
        channel = socket.socket(fileno=0)
        channel.sendall(_packed({"value": None}))
        for line in channel.makefile("rb"):
            values: Any = b""
            try:
                answer, values = self._answer(**json.loads(line))
                data = _packed({"value": answer})
            except Exception as error:
                kinds = [kind.__name__ for kind in type(error).__mro__]  # the parent takes the first one that it knows
                if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                    kinds = ["MemoryError"]
                data, values = _packed({"error": kinds, "text": str(error)[:4096]}), b""
            channel.sendall(data)
            channel.sendall(values)

    def _answer(self, method: str, dataset: str | None, arguments: list[Any]) -> tuple[Any, Any]:
        """What the method of an `OpenFile` or of a `Source` returns, and values."""
        import numpy as np

        from shardload.formats.contract.array import Labels
        from shardload.planning.region import Region

        subject = self._opened() if dataset is None else self._source(dataset)
        if method in ("expect", "plain", "read_into"):
            arguments = [Region(*map(tuple, arguments))]
        if method in ("plain", "read_into"):
            shape, dtype, missing = arguments[0].shape, subject.dtype, ()
            if method == "plain":
                values = np.asarray(subject.plain(*arguments), dtype, order="C").reshape(shape)
            else:
                values = np.empty(shape, dtype)
                missing = subject.read_into(*arguments, values)
            return missing, values.reshape(-1).view("u1")
        answer = getattr(subject, method)
        answer = answer(*arguments) if callable(answer) else answer
        return Labels((), answer) if method == "group_attrs" else answer, b""

    def _opened(self) -> Any:
        """The file. What it needs is imported before memory is limited to what the parent granted."""
        from shardload.formats.access import Access
        from shardload.formats.lookup import format_of, open_file

        if self._file is None:
            format_of(self._path)
            _limit_memory(_BASE_NBYTES + self._memory_nbytes)
            self._file = open_file(self._path, Access(self._allow_external, **_MORE))
        return self._file

    def _source(self, dataset: str) -> Any:
        if dataset not in self._sources:
            while len(self._sources) >= _MOST_OPEN:
                self._sources.pop(next(iter(self._sources))).close()
            self._sources[dataset] = self._opened().open(dataset)
        return self._sources[dataset]


def _packed(answer: dict[str, Any]) -> bytes:
    data = json.dumps(answer, default=_plain).encode()
    return len(data).to_bytes(8, "little") + data


def _plain(answer: Any) -> dict[str, Any]:
    """An `ArrayInfo`, or `Labels`, in JSON's types."""
    from shardload.formats.contract.array import ArrayInfo, Note
    from shardload.formats.labelling import bounded

    if isinstance(answer, ArrayInfo):
        return answer.to_dict()
    attrs = bounded(answer.attrs)
    notes = [key for key, value in attrs.items() if isinstance(value, Note)]
    coords = {name: coordinate.dataset for name, coordinate in answer.coords.items()}
    return {"dims": answer.dims, "attrs": attrs, "notes": notes, "coords": coords}


if __name__ == "__main__":
    main()
