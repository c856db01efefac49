"""How fast are this file system, network and cores, for the ranks of this job? ``srun ... shardload doctor --measure FOLDER``.

Each rank writes a small file of its own into a new folder, and the ranks read each other's: first one alone, then all of one
node, then all. The reader asks the kernel to drop what it has of a file (`posix_fadvise`), and where there are several nodes, a
file is read on another node than it was written on. So most of it is not from a cache of this node; what the servers have in
theirs, nobody can drop.

Then the ranks of one node send to those of another, and each decodes chunks that it has made.

All of it is bounded: bytes (`_MOST_NBYTES` in all), and seconds for each step (`_SECONDS`). What a rank does in a step is in
`probe`. The folder is removed also after an error. Rank 0 writes the figures as a TOML file.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardload.cli.doctor.probe import Probe, System, growing
from shardload.comm.group import Group, group_of
from shardload.comm.topology import UNKNOWN_NBYTES
from shardload.errors import ConfigError
from shardload.jobs.machine_file import configuration_file
from shardload.planning.machine import MEASURED

__all__ = ["measure", "to_toml"]

_FILE_NBYTES, _MOST_NBYTES = 64 << 20, 4 << 30  # of one rank's file, and of all files together
_LEAST_NBYTES = 1 << 16  # of one rank's file, however many ranks there are
_CODECS = ("gzip", "zstd", "blosc")
_N_SMALL, _N_OPENS, _N_ROUNDS = 64, 16, 100
_MESSAGE_NBYTES, _SENT_NBYTES = 4 << 20, 64 << 20  # of a message at most, and of all that one rank sends
# Seconds of each step at most. With what a step may run over its end, the sum stays below two minutes.
_SECONDS = {"write": 20.0, "open": 3.0, "small": 3.0, "stream": 10.0, "node": 10.0, "all": 10.0, "operations": 3.0}
_SECONDS |= {"copy": 3.0, "decode": 6.0, "latency": 3.0, "network": 8.0}


def measure(folder: str, output: str | None = None, system: System | None = None) -> str:
    """Measure a file system, the network and the decoders, and write the figures to a TOML file.

    Collective: yes, over COMM_WORLD.

    Parameters
    ----------
    folder : str
        A folder of the file system that every rank sees, and may write to.
    output : str, optional
        The TOML file to write; default: that of the user, which all loads find.
    system : System, optional
        Files and clocks, for tests.

    Returns
    -------
    str
        What was measured, for people; the same on every rank.

    Raises
    ------
    ConfigError
        On every rank, if the folder cannot be written to, or the TOML file exists or cannot be written.
    """
    group, path = group_of(), output or configuration_file()
    error: ConfigError | None = None
    if group.rank == 0:
        why = _why_not_written(path)
        if os.path.lexists(path):
            error = ConfigError(f"{path!r} exists: rename it, or pass --output with the name of a new file")
        elif why is not None:  # before two minutes of measuring
            error = ConfigError(f"{path!r} cannot be written: {why}. Pass --output with the name of a new file")
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
        figures = _Measurement(group, own, Probe(system)).figures()
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


def _why_not_written(path: str) -> str | None:
    """Why no file can be made at `path`, as far as that can be seen without making it; None if it can."""
    above = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        return f"{above!r} is not a folder"
    return None if os.access(above, os.W_OK | os.X_OK) else f"nothing can be written to {above!r}"


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

    def __init__(self, group: Group, folder: str, probe: Probe) -> None:
        self.group, self.folder, self.probe = group, folder, probe
        leaders = group.machine.leaders
        self.is_first = leaders[group.rank] == leaders[0]  # on the node of rank 0
        self.n_nodes = len(set(leaders))
        self.n_here = leaders.count(leaders[0])
        self.nbytes = max(_LEAST_NBYTES, min(_FILE_NBYTES, _MOST_NBYTES // group.size))
        # The file of a rank on another node, if there is one.
        self.other = self._name((group.rank + group.machine.ranks_per_node) % group.size if self.n_nodes > 1 else group.rank)

    def figures(self) -> dict[str, float]:
        """All of them, by name."""
        rank, probe = self.group.rank, self.probe
        self._together(lambda: [probe.write(self._name(rank), self.nbytes, _SECONDS["write"], rank)])
        self._together(self._forget)
        names = [self._name(k) for k in range(min(self.group.size, _N_OPENS))]
        opened = self._together(lambda: [probe.open(names, _SECONDS["open"])], rank == 0)
        small = self._together(lambda: [statistics.median(probe.small(self.other, 1, _N_SMALL, _SECONDS["small"]))], rank == 0)
        stream, node = self._rate("stream", rank == 0), self._rate("node", self.is_first)
        everyone = self._rate("all", True) if self.n_nodes > 1 else 0.0
        operations = self._together(self._count_operations)
        copied = self._together(lambda: [probe.copy(_SECONDS["copy"])], self.is_first)
        rates = self._together(self._decode, self.is_first, len(_CODECS))
        latency, sent = (self._together(work) for work in (self._ping_pong, self._send))
        found: dict[str, float] = {"node.ranks": self.n_here, "node.cores": self.group.machine.n_cores}
        if self.group.machine.memory_nbytes < UNKNOWN_NBYTES:
            found["node.memory_nbytes"] = self.n_here * self.group.machine.memory_nbytes
        found["node.memory_rate"] = float(copied.sum())
        found |= {"network.rate": float(sent[:, 0].sum()), "network.latency": float(latency[0, 0])}
        found |= {"file_system.rate": everyone, "file_system.node_rate": node, "file_system.stream_rate": stream}
        found["file_system.operations_rate"] = float(operations.sum())
        found |= {"file_system.open_seconds": float(opened[0, 0]), "file_system.read_seconds": float(small[0, 0])}
        medians = [statistics.median(column[column > 0].tolist() or [0.0]) for column in rates.T]
        found |= {f"decode.{codec}": rate for codec, rate in zip(_CODECS, medians, strict=True)}
        return {name: value for name, value in found.items() if value > 0 and math.isfinite(value)}

    def _together(
        self, work: Callable[[], list[float]], does_work: bool = True, n: int = 1
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Run `work` on some ranks at the same time; its `n` results, a row for each rank. An error is one of all ranks."""
        self.group.gather_int(0)  # all begin together
        values, error = [0.0] * n, None
        try:
            values = work() if does_work else values
        except OSError as found:
            error = ConfigError(f"{self.folder!r} cannot be measured: {found}")
        self.group.agree(error)
        return self.group.gather_ints([int(np.float64(value).view(np.int64)) for value in values]).view(np.float64)  # as bits

    def _rate(self, step: str, is_reader: bool) -> float:
        """Bytes per second of all ranks that read at the same time: all bytes, by the seconds of the slowest."""
        self._together(self._forget)
        read = self._together(lambda: [*self.probe.read(self.other, _SECONDS[step])], is_reader, 2)
        return float(read[:, 0].sum() / max(1e-9, read[:, 1].max()))

    def _name(self, rank: int) -> str:
        return os.path.join(self.folder, str(rank))

    def _forget(self) -> list[float]:
        self.probe.forget(self.other)
        return [0.0]

    def _count_operations(self) -> list[float]:
        """Small reads per second of this rank, while all others read too."""
        times = self.probe.small(self.other, 2 + self.group.rank, self.nbytes, _SECONDS["operations"])
        return [len(times) / max(1e-9, sum(times))]

    def _decode(self) -> list[float]:
        rates = self.probe.decode(_SECONDS["decode"])
        return [rates[codec] for codec in _CODECS]

    # --- between nodes

    def _partner(self) -> int | None:
        """For each rank of the first node the rank of the second one that it sends to, and the inverse; else None."""
        leaders, rank = self.group.machine.leaders, self.group.rank
        if self.n_nodes < 2 or not self.group.has_mpi:
            return None
        second = next(leader for leader in leaders if leader != leaders[0])
        here, there = ([r for r, leader in enumerate(leaders) if leader == of] for of in (leaders[0], second))
        pairs = dict(zip(here, there, strict=False))
        return pairs.get(rank, {b: a for a, b in pairs.items()}.get(rank))

    def _ping_pong(self) -> list[float]:
        """Seconds of a small message between two nodes: of the quickest one, because others wait for a core too."""
        partner, tag, now = self._partner(), self.group.next_tags()[0], self.probe.system.now
        if partner is None or 0 not in (self.group.rank, partner):
            return [0.0]
        word, times, end = np.ones(1, dtype=np.uint8), [], now() + _SECONDS["latency"]
        for _ in range(_N_ROUNDS):
            began = now()
            if self.group.rank == 0:
                word[0] = now() < end  # rank 0 says when it ends
                self.group.send_now(word, partner, tag)
                self.group.receive_now(word, partner, tag)
            else:
                self.group.receive_now(word, partner, tag)
                self.group.send_now(word, partner, tag)
            times.append((now() - began) / 2)
            if not word[0]:
                break
        return [min(times)]

    def _send(self) -> list[float]:
        """Bytes per second that this rank of the first node sends to one of another, while the others of its node send too."""
        partner, tag, now = self._partner(), self.group.next_tags()[0], self.probe.system.now
        if partner is None:
            return [0.0]
        data, n_sent, n_all, largest, began = np.ones(_MESSAGE_NBYTES, dtype=np.uint8), 0, 0, 0, now()
        if not self.is_first:
            while data[0]:  # the last message is a 0
                self.group.receive_now(data, partner, tag)
            return [0.0]
        for n in growing(now, began + _SECONDS["network"], _LEAST_NBYTES, _MESSAGE_NBYTES):
            if n > largest:  # those of the largest size count
                n_sent, largest, began = 0, n, now()
            self.group.send_now(data[:n], partner, tag)
            n_sent, n_all = n_sent + n, n_all + n
            if n_all >= _SENT_NBYTES:
                break
        seconds = now() - began
        self.group.send_now(np.zeros(1, dtype=np.uint8), partner, tag)
        return [n_sent / max(1e-9, seconds)]
