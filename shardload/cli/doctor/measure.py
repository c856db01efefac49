"""How fast is this file system, from the nodes of this job? What ``srun ... shardload doctor --measure FOLDER`` does.

Each rank writes a small file of its own into a new folder, and the ranks read each other's: first one alone, then all of one
node, then all. The reader asks the kernel to drop what it has of a file (`posix_fadvise`), and where there are several nodes, a
file is read on another node than it was written on. So most of it is not from a cache of this node; what the servers have in
theirs, nobody can drop.

All of it is bounded: bytes (`_MOST_NBYTES` in all), the number of small reads, and seconds for each step. The folder is removed
also after an error. Rank 0 writes the figures as a TOML file.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardload.comm.group import Group, group_of
from shardload.errors import ConfigError
from shardload.jobs.machine_file import configuration_file
from shardload.planning.machine import MEASURED

__all__ = ["measure", "to_toml"]

_PIECE_NBYTES = 1 << 20  # of a write or a long read
_FILE_NBYTES, _MOST_NBYTES = 64 << 20, 4 << 30  # of one rank's file, and of all files together
_SMALL_NBYTES, _N_SMALL, _N_OPENS = 4096, 64, 16
_STEP_SECONDS = 10.0  # of one step: there are seven
_OPS_SECONDS = 2.0
_COPY_NBYTES = 32 << 20


def measure(folder: str, output: str | None = None) -> str:
    """Measure a file system, and write the figures to a TOML file.

    Collective: yes, over COMM_WORLD.

    Parameters
    ----------
    folder : str
        A folder of the file system that every rank sees, and may write to.
    output : str, optional
        The TOML file to write; default: that of the user, which all loads find.

    Returns
    -------
    str
        What was measured, for people; the same on every rank.

    Raises
    ------
    ConfigError
        On every rank, if the folder cannot be written to, or the TOML file exists.
    """
    group, path = group_of(), output or configuration_file()
    error: ConfigError | None = None
    if group.rank == 0 and os.path.lexists(path):
        error = ConfigError(f"{path!r} exists: rename it, or pass --output with the name of a new file")
    group.agree(error)
    own, error = "", None
    if group.rank == 0:
        try:
            own = tempfile.mkdtemp(prefix=".shardload-measure-", dir=folder)
        except OSError as found:
            error = ConfigError(f"{folder!r} cannot be measured: {found}. Pass a folder that all ranks can write to")
    group.agree(error)
    own = group.send_text(own, 0)
    try:
        figures = _Measurement(group, own).figures()
    finally:
        if group.rank == 0:
            shutil.rmtree(own, ignore_errors=True)
    text = to_toml(figures, folder, group.size, len(set(group.machine.leaders)))
    error = None
    if group.rank == 0:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
        except OSError as found:
            error = ConfigError(f"the figures cannot be written: {found}. Pass --output with the name of a new file")
    group.agree(error)
    return f"{text}\n# written to {path}"


def to_toml(figures: dict[str, float], folder: str, n_ranks: int, n_nodes: int) -> str:
    """The figures, by their names in the text form of a machine, as a TOML file.

    >>> print(to_toml({"node.ranks": 4, "file_system.rate": 2.5e9}, "/scratch", 8, 2))
    # Measured by shardload doctor in /scratch, by 8 ranks on 2 nodes.
    name = "measured"
    <BLANKLINE>
    [node]
    ranks = {value = 4, origin = "measured"}
    <BLANKLINE>
    [file_system]
    rate = {value = 2.5e+09, origin = "measured"}
    """
    lines, group = [f"# Measured by shardload doctor in {folder!s}, by {n_ranks} ranks on {n_nodes} nodes."], ""
    lines.append('name = "measured"')
    for name, value in figures.items():
        of, _, key = name.partition(".")
        if of != group:
            lines += ["", f"[{of}]"]
            group = of
        number = f"{value:d}" if isinstance(value, int) else f"{value:.4g}"
        lines.append(f'{key} = {{value = {number}, origin = "{MEASURED}"}}')
    return "\n".join(lines)


class _Measurement:
    """The steps. All ranks take all steps together, also those in which only some of them work."""

    def __init__(self, group: Group, folder: str) -> None:
        self.group, self.folder = group, folder
        leaders = group.machine.leaders
        self.is_first = leaders[group.rank] == leaders[0]  # on the node of rank 0
        self.n_nodes = len(set(leaders))
        self.n_here = leaders.count(leaders[0])
        self.nbytes = max(_PIECE_NBYTES, min(_FILE_NBYTES, _MOST_NBYTES // group.size) // _PIECE_NBYTES * _PIECE_NBYTES)
        # The file of a rank on another node, if there is one.
        self.other = (group.rank + group.machine.ranks_per_node) % group.size if self.n_nodes > 1 else group.rank

    def figures(self) -> dict[str, float]:
        """All of them, by name."""
        self._together(self._write)
        self._together(lambda: self._drop(self.other))
        opened = self._together(self._open if self.group.rank == 0 else None)
        small = self._together(self._read_small if self.group.rank == 0 else None)
        stream = self._rate(self.group.rank == 0)
        node = self._rate(self.is_first)
        everyone = self._rate(True) if self.n_nodes > 1 else 0.0
        operations = self._together(self._count_operations)
        copied = self._together(self._copy if self.is_first else None)
        found: dict[str, float] = {"node.ranks": self.n_here, "node.cores": self.group.machine.n_cores}
        found["node.memory_rate"] = float(copied.sum())
        if self.n_nodes > 1:
            found["file_system.rate"] = everyone
        found |= {"file_system.node_rate": node, "file_system.stream_rate": stream}
        found["file_system.operations_rate"] = float(operations.sum())
        found |= {"file_system.open_seconds": float(opened[0]), "file_system.read_seconds": float(small[0])}
        return {name: value for name, value in found.items() if value > 0 and math.isfinite(value)}

    def _together(self, work: Callable[[], float] | None) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Run `work` on the ranks that have some, at the same time; its result on every rank. An error is one of all ranks."""
        self.group.gather_int(0)  # all begin together
        value, error = 0.0, None
        try:
            value = 0.0 if work is None else work()
        except OSError as found:
            error = ConfigError(f"{self.folder!r} cannot be measured: {found}")
        self.group.agree(error)
        return self.group.gather_int(int(np.float64(value).view(np.int64))).view(np.float64)  # as bits

    def _rate(self, is_reader: bool) -> float:
        """Bytes per second of all ranks that read at the same time: all bytes, by the seconds of the slowest."""
        self._together(lambda: self._drop(self.other))
        got = [0]

        def read() -> float:
            start = time.perf_counter()
            got[0] = self._read(self.other, start + _STEP_SECONDS)
            return time.perf_counter() - start

        seconds = self._together(read if is_reader else None)
        return int(self.group.gather_int(got[0]).sum()) / max(1e-9, float(seconds.max()))

    def _name(self, rank: int) -> str:
        return os.path.join(self.folder, str(rank))

    def _write(self) -> float:
        """A file that does not compress, as large as there is time for, but one piece at least."""
        random, end = np.random.default_rng(self.group.rank), time.perf_counter() + _STEP_SECONDS
        with open(self._name(self.group.rank), "xb", buffering=0) as file:
            for _ in range(self.nbytes // _PIECE_NBYTES):
                file.write(random.bytes(_PIECE_NBYTES))
                if time.perf_counter() > end:
                    break
            os.fsync(file.fileno())
        return self._drop(self.group.rank)

    def _drop(self, rank: int) -> float:
        """Ask the kernel to drop what it has of a file."""
        file = os.open(self._name(rank), os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
        return 0.0

    def _read(self, rank: int, end: float) -> int:
        """Bytes that were read of a file until it ended, or time did."""
        into, n_read = bytearray(_PIECE_NBYTES), 0
        with open(self._name(rank), "rb", buffering=0) as file:
            while (n := file.readinto(into)) and time.perf_counter() < end:
                n_read += n
        return n_read

    def _open(self) -> float:
        """Median seconds of an open."""
        times = []
        for rank in range(min(self.group.size, _N_OPENS)):
            start = time.perf_counter()
            os.close(os.open(self._name(rank), os.O_RDONLY))
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _small(self, seed: int, n: int, seconds: float) -> list[float]:
        """Seconds of each of up to `n` small reads here and there."""
        file, times, end = os.open(self._name(self.other), os.O_RDONLY), [], time.perf_counter() + seconds
        try:
            n_places = max(1, os.fstat(file).st_size // _SMALL_NBYTES)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            for place in np.random.default_rng(seed).permutation(n_places)[:n].tolist():
                start = time.perf_counter()
                os.pread(file, _SMALL_NBYTES, place * _SMALL_NBYTES)
                times.append(time.perf_counter() - start)
                if time.perf_counter() > end:
                    break
        finally:
            os.close(file)
        return times

    def _read_small(self) -> float:
        """Median seconds of a small read."""
        return statistics.median(self._small(1, _N_SMALL, _OPS_SECONDS))

    def _count_operations(self) -> float:
        """Small reads per second of this rank, while all others read too."""
        times = self._small(2 + self.group.rank, self.nbytes // _SMALL_NBYTES, _OPS_SECONDS)
        return len(times) / max(1e-9, sum(times))

    def _copy(self) -> float:
        """Bytes per second that this rank reads and writes in memory, while the others of its node do."""
        source = np.ones(_COPY_NBYTES, dtype=np.uint8)
        into = np.empty_like(source)
        into[...] = source
        start = time.perf_counter()
        for _ in range(4):
            into[...] = source
        return 8 * _COPY_NBYTES / (time.perf_counter() - start)
