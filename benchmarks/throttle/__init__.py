"""How does one machine behave like several nodes with a file system and a network of known limits?

For tests and benchmarks only: nothing of it is in the package. `Cluster` compiles `throttle.c`, which every rank preloads, and
holds the file through which all ranks share the limits. `network.slow_down` delays the messages between nodes, in a rank that
was started so. Ranks of a node follow each other, as SHARDLOAD_RANKS_PER_NODE has it.

Not limited: metadata of files (``stat``, listing folders), writes, the few small messages by which ranks agree, memory, cores.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cluster", "Counted", "Limits"]

SOURCE = Path(__file__).with_name("throttle.c")
FILE, FOLDER, RANKS_PER_NODE = "SHARDLOAD_THROTTLE", "SHARDLOAD_THROTTLE_FOLDER", "SHARDLOAD_THROTTLE_RANKS_PER_NODE"
_BURST_SECONDS = 0.005
_COUNTED = 12  # place of the counts in the file, in doubles


@dataclass(frozen=True)
class Limits:
    """What the file system and the network can do. Bytes per second and seconds.

    Attributes
    ----------
    rate, node_rate, stream_rate : float
        Of the file system: to all nodes together, to one, and to one thread.
    operations_rate, open_seconds, read_seconds : float
        Reads and opens that it serves in a second to all, and their latency.
    read_ahead_nbytes : int
        What a read takes one operation for.
    network_rate, network_latency
        Into or out of a node.
    has_cache : bool
        Whether a node keeps what its ranks have read.
    """

    rate: float
    node_rate: float
    stream_rate: float
    operations_rate: float
    open_seconds: float
    read_seconds: float
    read_ahead_nbytes: int
    network_rate: float = 1e12
    network_latency: float = 0.0
    has_cache: bool = True


@dataclass(frozen=True)
class Counted:
    """What the file system and the network did: bytes fetched, requests, opens (they are requests too), bytes sent."""

    nbytes: int
    operations: int
    opens: int
    sent_nbytes: int


class Cluster:
    """Nodes of so many ranks each, with a file system below `folder`. A context manager.

    Attributes
    ----------
    env : dict of str to str
        The variables to start ranks with.
    """

    def __init__(self, folder: str | os.PathLike[str], ranks_per_node: int, limits: Limits) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardload-throttle-")
        library, table = (os.path.join(self._folder.name, name) for name in ("throttle.so", "table"))
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-O2", "-fPIC", "-shared", "-o", library, str(SOURCE), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the throttle cannot be compiled by {compiler!r}:\n{done.stderr}")
        size = ctypes.CDLL(library).throttle_nbytes
        size.restype = ctypes.c_size_t
        with open(table, "w+b") as file:
            file.truncate(size())
            self._table = mmap.mmap(file.fileno(), size())
        self._n_resets = 0
        self.reset(limits)
        self.env = {
            "LD_PRELOAD": library,
            FILE: table,
            FOLDER: os.path.realpath(folder),
            RANKS_PER_NODE: str(ranks_per_node),
            "SHARDLOAD_RANKS_PER_NODE": str(ranks_per_node),
        }

    def reset(self, limits: Limits) -> None:
        """New limits; caches are empty and counts 0. While no rank reads."""
        self._n_resets += 1
        self._table[: 8 * (_COUNTED + 4)] = struct.pack(
            f"={_COUNTED + 4}d",
            limits.rate,
            limits.node_rate,
            limits.stream_rate,
            limits.operations_rate,
            limits.open_seconds,
            limits.read_seconds,
            limits.read_ahead_nbytes,
            limits.has_cache,
            limits.network_rate,
            limits.network_latency,
            _BURST_SECONDS,
            self._n_resets,
            *(0.0,) * 4,
        )

    def counted(self) -> Counted:
        """Since the last reset."""
        return Counted(*map(int, struct.unpack("=4d", self._table[8 * _COUNTED : 8 * (_COUNTED + 4)])))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._table.close()
        self._folder.cleanup()
