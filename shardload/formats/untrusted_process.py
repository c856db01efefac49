"""What does a helper process do? It opens one untrusted file, and puts the values into memory that its parent can read.

1. `untrusted.helper` starts it as a script, with a socket and shared memory, and imports nothing from it.
2. Before it opens the file, it gives up what it does not need: it ends with its parent, writes no files and no core dumps, and
   has a limit on memory.
3. It answers requests, one at a time, until the socket is closed. Answers are JSON, after their length (4 bytes,
   little-endian); values are in the shared memory.

It finds formats of other packages as the parent does. It imports what reading needs, but neither JAX nor MPI; at the top, only
the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import mmap
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

__all__ = ["main"]

_HEAD_NBYTES = 4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_LIBRARIES_NBYTES = 1 << 30  # limit while libraries are imported; their real use is measured before the file is opened
_BASE_NBYTES = 128 << 20  # beside values: threads, memory that libraries allocate at first use, metadata
_LOG_NBYTES = 1 << 20  # output of libraries
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


def _limit(what: int, most: int) -> None:
    """Set a limit that cannot be raised again. A lower limit stays."""
    _, hard = resource.getrlimit(what)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(what, (most, most))


def _limit_memory(nbytes: int) -> None:
    """Let this process allocate `nbytes` more than now, and never more than that."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * mmap.PAGESIZE
    _limit(resource.RLIMIT_AS, used + nbytes)


class _Server:
    """Answers requests. `untrusted.helper.Helper` is the other side."""

    def __init__(self, channel: socket.socket, values: int) -> None:
        self._channel, self._values = channel, values
        self._memory = mmap.mmap(values, 0)
        self._memory_nbytes = 0
        self._source: Any = None
        self._chunks: Any = None
        self._scratch: Any = None  # memory for stored chunks

    def run(self) -> None:
        """Answer until the parent closes the socket."""
        while (request := self._receive()) is not None:
            todo: Callable[..., Answer] = getattr(self, "do_" + request.pop("do"))
            try:
                answer = todo(**request)
            except Exception as error:
                kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _KINDS), "Exception")
                text = str(error) if kind != "Exception" else f"{type(error).__name__}: {error}"
                if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                    kind = "MemoryError"
                answer = {"error": kind, "text": text[:4096]}
            data = json.dumps(answer).encode()
            self._channel.sendall(len(data).to_bytes(_HEAD_NBYTES, "little") + data)

    def _receive(self) -> dict[str, Any] | None:
        head = self._channel.recv(_HEAD_NBYTES, socket.MSG_WAITALL)
        if len(head) < _HEAD_NBYTES:
            return None
        nbytes = int.from_bytes(head, "little")
        found: dict[str, Any] = json.loads(self._channel.recv(nbytes, socket.MSG_WAITALL))
        return found

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

    def _prepare(self, path: str) -> None:
        """Import what this file needs, then limit memory to what the parent granted."""
        from shardload.formats.lookup import format_of, split_path

        format_of(split_path(path)[0])
        _limit_memory(_BASE_NBYTES + self._memory_nbytes)

    def do_list(self, path: str, allow_external: bool, most_labelled: int, linked: str) -> Answer:
        """List all arrays, or those below a group to which links lead; with names of axes and coordinates, if there are at most
        so many.
        """
        from shardload.formats.lookup import list_labelled

        self._prepare(path)
        infos = list_labelled(path, _access(allow_external), most_labelled, linked)
        return {"infos": [json.loads(info.to_json()) for info in infos]}

    def do_list_below(self, path: str, allow_external: bool, group: str) -> Answer:
        """List all arrays, and if none of them is below the group, those to which links lead from there."""
        from shardload.formats.lookup import list_arrays, list_labelled

        self._prepare(path)
        access = _access(allow_external)
        infos = list_arrays(path, access)
        is_there = not group or any(info.dataset.startswith(f"{group}/") for info in infos)
        linked = [] if is_there else list_labelled(path, access, 0, group)
        return {"infos": [json.loads(one.to_json()) for one in infos], "linked": [json.loads(one.to_json()) for one in linked]}

    def do_find(
        self, path: str, dataset: str | None, allow_external: bool, values: bool, needs_numbers: bool = False
    ) -> Answer:
        """Find the array that the caller means; also read its values, if `values` and the array is small."""
        from shardload.formats.lookup import find_array, read_small
        from shardload.planning.tuning import default_tuning

        self._prepare(path)
        access = _access(allow_external)
        info = find_array(path, dataset, access, needs_numbers)
        tiny = default_tuning().tiny_nbytes  # larger values do not fit into the memory that is shared now
        found = read_small(path, info, access, replace(default_tuning(), small_nbytes=tiny)) if values else None
        if found is not None:
            self._memory[: len(found)] = found
        return {"info": json.loads(info.to_json()), "nbytes": None if found is None else len(found)}

    def do_label(self, path: str, dataset: str, allow_external: bool, small_nbytes: int) -> Answer:
        """The names of an array's axes, its attributes and its coordinates."""
        from shardload.formats.labels import to_plain
        from shardload.formats.lookup import find_array, read_labels

        self._prepare(path)
        access = _access(allow_external)
        return {"labels": to_plain(read_labels(path, find_array(path, dataset, access), access, small_nbytes))}

    def do_open(self, path: str, dataset: str, allow_external: bool) -> Answer:
        """Open the array for the requests below."""
        from shardload.formats.base import Scratch
        from shardload.formats.lookup import open_source

        self._prepare(path)
        self._scratch = Scratch()
        self._source = open_source(path, dataset, _access(allow_external))
        self._chunks = self._source.chunk_reader()
        return {"info": json.loads(self._source.info.to_json()), "state": self._source.opened_in()}

    def do_limit(self, memory_nbytes: int) -> Answer:
        """Lower the limit on memory."""
        _limit_memory(_BASE_NBYTES + memory_nbytes)
        return {}

    # --- of the array that is open

    def do_state(self) -> Answer:
        """See `Source.state`."""
        return {"state": self._source.state()}

    def do_read(self, start: list[int], stop: list[int]) -> Answer:
        """Values of a region; after them the numbers of its missing chunks, counted in the region's own chunk grid."""
        import numpy as np

        region = self._region(start, stop)
        out = self._array(region.shape)
        self._source.read_into(region, out)
        chunks = self._source.info.chunks
        indices = self._source.missing(region)
        if chunks is None:
            numbers = [0] * len(indices)
        else:
            first = [a // c for a, c in zip(start, chunks, strict=True)]
            counts = [-(-b // c) - k for b, c, k in zip(stop, chunks, first, strict=True)]
            numbers = sorted(_number(index, first, counts) for index in indices)
        place = -(-out.nbytes // 8) * 8
        self._bytes(place + 8 * len(numbers))[place:].view(np.int64)[:] = numbers
        return {"n_missing": len(numbers)}

    def do_plain(self, start: list[int], stop: list[int]) -> Answer:
        """Values of a region, by the format's own library."""
        import numpy as np

        region = self._region(start, stop)
        found = np.asarray(self._source.plain(region))
        if found.size != region.size:
            raise ValueError(f"the library gave {found.shape} for the region {region}")
        self._array(region.shape)[...] = found.reshape(region.shape)
        return {}

    def do_chunk(self, index: list[int]) -> Answer:
        """All values of a chunk, also if it reaches over the array's edge."""
        at, shape = tuple(index), self._source.info.chunks
        out = self._array(shape)
        if self._chunks is not None:
            encoded = self._chunks.fetch(at, self._scratch)
            self._chunks.decode(encoded, out)
            return {"nbytes_stored": None if encoded is None else len(encoded.data)}
        start = [k * c for k, c in zip(at, shape, strict=True)]
        stop = [min(a + c, n) for a, c, n in zip(start, shape, self._source.info.shape, strict=True)]
        region = self._region(start, stop)
        if region.shape == shape:
            self._source.read_into(region, out)
        else:
            import numpy as np

            part = np.empty(region.shape, self._source.dtype)
            self._source.read_into(region, part)
            out[tuple(slice(0, n) for n in region.shape)] = part
        return {"nbytes_stored": None if self._source.missing(region) else 0}

    def _region(self, start: list[int], stop: list[int]) -> Any:
        from shardload.planning.region import Region

        return Region(tuple(start), tuple(stop))

    def _bytes(self, nbytes: int) -> Any:
        """The first `nbytes` bytes of the shared memory, which the parent has made long enough for its request."""
        import numpy as np

        if len(self._memory) < nbytes:
            self._memory = mmap.mmap(self._values, 0)
        return np.frombuffer(self._memory, np.uint8, nbytes)

    def _array(self, shape: tuple[int, ...]) -> Any:
        dtype = self._source.dtype
        return self._bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


_KINDS = (
    *("ConfigError", "SourceError", "OutsideError", "NotAFileError", "UndecodedError"),
    *("MemoryError", "OSError", "ValueError", "RuntimeError"),
)


def _access(allow_external: bool) -> Any:
    from shardload.formats.access import Access

    return Access(allow_external, **_MORE)


def _number(index: tuple[int, ...], first: list[int], counts: list[int]) -> int:
    number = 0
    for k, a, n in zip(index, first, counts, strict=True):
        number = number * n + k - a
    return number


if __name__ == "__main__":
    main()
