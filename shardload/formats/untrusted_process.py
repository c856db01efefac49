"""What does a helper process do? It opens one untrusted file, and puts the values into memory that its parent can read.

1. `untrusted` starts it as a script, with a socket and shared memory, and imports nothing from it.
2. Before it opens the file, it gives up what it does not need: it ends with its parent, writes no files and no core dumps, and
   has a limit on memory.
3. It answers requests, one at a time, until the socket is closed. It puts the answer, as JSON, into the shared memory, and
   values behind it, and sends the number of bytes of the answer in a packet of 8 bytes.

It finds packages as the parent does. It imports what reading needs, but neither JAX nor MPI; at the top, only
the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

_MOST_REQUEST_NBYTES = 1 << 17
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_LIBRARIES_NBYTES = 1 << 30  # limit while libraries are imported; their real use is measured before the file is opened
_BASE_NBYTES = 128 << 20  # beside values: threads, memory that libraries allocate at first use, metadata
_LOG_NBYTES = 1 << 20  # output of libraries
_MOST_OPEN = 16  # arrays
_STACK_NBYTES = 1 << 20
# What formats may do here beyond what the caller allows, for example use any decoder. That is safe only in a process that may
# crash and has limited memory. This is the one place for it.
_MORE: dict[str, Any] = {"allow_filters": {"all"}, "is_limited": True}

Answer = dict[str, Any]


def main() -> None:
    """Answer requests until there are no more. Arguments: descriptors of the socket and of the memory, id of the parent."""
    channel, values, parent = (int(text) for text in sys.argv[1:4])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # terminals and batch systems send these to all processes:
        signal.signal(number, signal.SIG_IGN)  # the parent answers them and ends this process; else it would blame the file
    _give_up_rights(parent)
    server = _Server(socket.socket(fileno=channel), values)
    server.run()
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
        used = int(file.read().split()[0]) * mmap.PAGESIZE
    _limit(resource.RLIMIT_AS, used + nbytes)


class _Server:
    """Answers requests. `untrusted.Helper` is the other side."""

    def __init__(self, channel: socket.socket, shared: int) -> None:
        self._channel, self._shared = channel, shared
        self._values: mmap.mmap | None = None
        self._memory_nbytes = 0
        self._path = ""
        self._access: Any = None
        self._file: Any = None
        self._sources: dict[str, Any] = {}

    def run(self) -> None:
        """Answer until the parent closes the socket."""
        while packet := self._channel.recv(_MOST_REQUEST_NBYTES):
            request: dict[str, Any] = json.loads(packet)
            method: Callable[..., Answer] = getattr(self, "do_" + request.pop("do"))
            try:
                if method != self.do_begin:
                    self._prepare(request.pop("path"), request.pop("allow_external"))
                answer = method(**request)
            except Exception as error:
                kinds = [kind.__name__ for kind in type(error).__mro__]  # the parent takes the first one that it knows
                if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                    kinds = ["MemoryError"]
                answer = {"error": kinds, "text": str(error)[:4096]}
            data = json.dumps(answer).encode()
            with contextlib.suppress(ValueError), mmap.mmap(self._shared, len(data)) as memory:
                memory[:] = data  # the parent refuses one that is too long, which is not written
            self._channel.send(len(data).to_bytes(8, "little"))

    # --- once

    def do_begin(self, places: list[str], memory_nbytes: int) -> Answer:
        """Import what all formats need."""
        import threading

        threading.stack_size(_STACK_NBYTES)  # a stack counts as memory, used or not
        warnings.simplefilter("ignore")
        sys.path[:] = places
        self._memory_nbytes = memory_nbytes
        _limit_memory(_LIBRARIES_NBYTES + memory_nbytes)
        import numpy  # noqa: F401

        with contextlib.suppress(ImportError):
            import ml_dtypes  # noqa: F401  (JAX would register its types with NumPy)
        import shardload.formats.lookup  # noqa: F401

        return {}

    def _prepare(self, path: str, allow_external: bool) -> None:
        """Import what this file needs, then limit memory to what the parent granted."""
        from shardload.formats.access import Access
        from shardload.formats.lookup import format_of

        if self._path == path:
            return
        format_of(path)
        self._path, self._access = path, Access(allow_external, **_MORE)
        _limit_memory(_BASE_NBYTES + self._memory_nbytes)

    # --- of the file

    def do_list(self, method: str, arguments: dict[str, Any]) -> Answer:
        """See the method of `OpenFile` of this name."""
        infos = getattr(self._open_file(), method)(**arguments)
        return {"infos": [info.to_dict() for info in infos]}

    def do_state(self, dataset: str | None = None) -> Answer:
        """See `OpenFile.state` and `Source.state`."""
        return {"state": (self._open_file() if dataset is None else self._source(dataset)).state()}

    def _open_file(self) -> Any:
        from shardload.formats.lookup import open_file

        if self._file is None:
            self._file = open_file(self._path, self._access)
        return self._file

    # --- of an array

    def _source(self, dataset: str) -> Any:
        if dataset not in self._sources:
            while len(self._sources) >= _MOST_OPEN:
                self._sources.pop(next(iter(self._sources))).close()
            self._sources[dataset] = self._open_file().open(dataset)
        return self._sources[dataset]

    def do_open(self, dataset: str) -> Answer:
        """Open an array."""
        source = self._source(dataset)
        return {"info": source.info.to_dict(), "state": source.opened_in()}

    def do_labels(self, dataset: str, of_group: bool) -> Answer:
        """See `Source.labels` and `Source.group_attrs`."""
        from shardload.formats.contract.array import Labels, Note
        from shardload.formats.labelling import bounded

        source = self._source(dataset)
        labels = Labels((), source.group_attrs()) if of_group else source.labels()
        attrs = bounded(labels.attrs)
        notes = [key for key, value in attrs.items() if isinstance(value, Note)]
        coords = {name: coordinate.dataset for name, coordinate in labels.coords.items()}
        return {"labels": {"dims": labels.dims, "attrs": attrs, "notes": notes, "coords": coords}}

    def do_expect(self, dataset: str, start: list[int], stop: list[int]) -> Answer:
        """See `Source.expect`."""
        from shardload.planning.region import Region

        self._source(dataset).expect(Region(tuple(start), tuple(stop)))
        return {}

    def do_read(self, dataset: str, start: list[int], stop: list[int], method: str, values_at: int) -> Answer:
        """Values of a region, by `Source.read_into` or `Source.plain`, and which of its chunks are missing."""
        import numpy as np

        from shardload.planning.region import Region

        source, region = self._source(dataset), Region(tuple(start), tuple(stop))
        nbytes = region.size * source.dtype.itemsize
        if self._values is None or len(self._values) < nbytes:
            self._values = mmap.mmap(self._shared, nbytes, offset=values_at)
        out = np.frombuffer(self._values, source.dtype, region.size).reshape(region.shape)
        if method == "read_into":
            source.read_into(region, out)
            return {"missing": sorted(map(list, source.missing(region)))}
        values = np.asarray(source.plain(region))
        if values.size != region.size:
            raise ValueError(f"the library gave {values.shape} for the region {region}")
        out[...] = values.reshape(region.shape)
        return {"missing": []}


if __name__ == "__main__":
    main()
