"""Does `shardload doctor --measure` write figures that plans can use, and leave nothing behind?"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from shardload.cli.doctor import measure as module
from shardload.cli.doctor import probe
from shardload.cli.doctor.measure import measure
from shardload.cli.doctor.probe import Probe, System
from shardload.cli.main import app
from shardload.comm.tracebacks import share
from shardload.errors import ConfigError
from shardload.jobs.machine_file import machine_for


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to measure, with little to write; and a user without a configuration."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SHARDLOAD_MACHINE", raising=False)
    monkeypatch.setattr(module, "_FILE_NBYTES", 2 << 20)
    monkeypatch.setattr(module, "_SECONDS", dict.fromkeys(module._SECONDS, 0.05))
    monkeypatch.setattr(probe, "_COPY_NBYTES", 1 << 20)
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def test_the_figures_are_found_and_measured(folder: Path) -> None:
    """Wrong if a figure had another name in the file than in a machine, or if anything were left in the folder."""
    done = CliRunner().invoke(app, ["doctor", "--measure", str(folder)])
    assert done.exit_code == 0, done.output
    machine = machine_for(None)
    assert machine.name == "measured" and machine.has_file_system and not os.listdir(folder)
    figures = machine.figures()
    expected = {"node.ranks", "node.cores", "node.memory_nbytes", "node.memory_rate"}
    expected |= {
        f"file_system.{name}" for name in ("node_rate", "stream_rate", "operations_rate", "open_seconds", "read_seconds")
    }
    expected |= {"decode.gzip", "decode.zstd", "decode.blosc"}
    assert set(figures) == expected, "the rates of several nodes and between them are not known on one"
    assert all(machine.origin_of(name) == "measured" and value > 0 for name, value in figures.items())
    assert figures["node.ranks"] == 1 and str(folder.parent / "config") in done.output


def test_a_file_of_figures_is_not_overwritten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = folder.parent / "site.toml"
    site.write_text("mine")
    with pytest.raises(ConfigError, match=r"site.toml' exists: rename it, or pass --output"):
        measure(str(folder), str(site))
    assert site.read_text() == "mine" and not os.listdir(folder)


@pytest.mark.parametrize("what", ["a file", "read-only"])
def test_a_home_that_cannot_be_written_is_told_before_it_measures(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if two minutes of measuring were lost at their end."""
    config = folder.parent / "config"
    if what == "a file":
        config.write_text("")
    else:  # root may write everywhere
        monkeypatch.setattr(os, "access", lambda path, mode: os.path.samefile(path, folder.parent) is not bool(mode & os.W_OK))
    monkeypatch.setattr(Probe, "write", lambda *_: pytest.fail("something was measured"))
    why = f"'{config}' is not a folder" if what == "a file" else f"nothing can be written to '{folder.parent}'"
    with pytest.raises(ConfigError, match=re.escape(f"cannot be written: {why}. Pass --output with the name of a new file")):
        measure(str(folder))
    assert not os.listdir(folder)


def test_a_folder_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be measured: .*No such file.*Pass a folder that all ranks can write to"):
        measure(str(folder / "nowhere"))


def test_nothing_is_left_after_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Probe, "small", fail)
    with pytest.raises(ConfigError, match="No space left on device"):
        measure(str(folder))
    assert not os.listdir(folder) and not (folder.parent / "config").exists()


def test_the_bytes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if many ranks wrote as much each as few."""
    asked: list[int] = []
    write = Probe.write

    def look(self: Probe, path: str, nbytes: int, *how: Any) -> int:
        asked.append(nbytes)
        written = write(self, path, nbytes, *how)
        assert written == os.path.getsize(path) <= nbytes
        return written

    monkeypatch.setattr(Probe, "write", look)
    monkeypatch.setattr(module, "_MOST_NBYTES", 1 << 20)
    measure(str(folder))
    assert asked == [1 << 20]


# --- budgets


class SlowSystem(System):
    """A disk with a rate and a latency, and a clock on which nothing else takes time. Writes may go to memory."""

    def __init__(self, rate: float, latency: float, write_rate: float) -> None:
        self.rate, self.latency, self.write_rate, self.time = rate, latency, write_rate, 1000.0
        self.n_read = self.n_written = self.n_calls = 0

    def now(self) -> float:  # type: ignore[override]
        self.time += 1e-6  # a loop that only looks at the clock ends too
        return self.time

    def _take(self, nbytes: int, rate: float) -> None:
        self.n_calls += 1
        self.time += self.latency + nbytes / rate

    def open(self, path: str) -> int:
        self._take(0, 1.0)
        return super().open(path)

    def write(self, file: int, data: bytes) -> None:
        self._take(len(data), self.write_rate)
        self.n_written += len(data)
        os.write(file, data)

    def read(self, file: int, into: memoryview, offset: int) -> int:
        n = super().read(file, into, offset)
        self._take(n, self.rate)
        self.n_read += n
        return n


@pytest.mark.each_value
@pytest.mark.parametrize("write_rate", [None, 1e9])
@pytest.mark.parametrize(
    ("rate", "latency"), [(1e9, 1e-4), (1e9, 0.0), (1e7, 1e-2), (1e6, 0.5), (3e4, 0.01), (1e4, 1.0), (1e9, 2.0)]
)
def test_time_and_bytes_are_kept_on_any_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, latency: float, write_rate: float | None
) -> None:
    """Wrong if a step went by its bytes alone (64 MiB at 10 kB/s are two hours), or by its time alone (a full disk)."""
    monkeypatch.setattr(module, "_FILE_NBYTES", 4 << 20)
    monkeypatch.setattr(probe, "_COPY_NBYTES", 1 << 16)
    system = SlowSystem(rate, latency, write_rate or rate)

    def decode(self: Probe, seconds: float) -> dict[str, float]:  # it takes all its time, on any disk
        system.time += seconds
        return dict.fromkeys(module._CODECS, 1e9)

    monkeypatch.setattr(Probe, "decode", decode)
    measure(str(tmp_path), str(tmp_path / "machine.toml"), system)
    assert system.time - 1000 < 120, "two minutes"
    assert 0 < system.n_written <= 4 << 20
    assert system.n_read <= 4 * system.n_written
    machine = machine_for(str(tmp_path / "machine.toml"))
    assert machine.read_seconds == pytest.approx(latency + min(4096, system.n_written) / rate, rel=0.05, abs=1e-5)
    assert machine.stream_rate <= 1.01 * rate
    if latency < 0.01:
        assert machine.stream_rate == pytest.approx(rate, rel=0.9), "the latency of small first reads counts too"


@given(st.floats(1e3, 1e9), st.floats(0, 100))
def test_steps_grow_while_they_are_quick(rate: float, end: float) -> None:
    """Wrong if a step of which the last took long could take far longer, or if a slow disk had none."""
    at, sizes = [0.0], []
    for size in probe.growing(lambda: at[0], end, 1 << 10, 1 << 20):
        sizes.append(size)
        at[0] += size / rate + 1e-2
    assert sizes[0] == 1 << 10 and max(sizes) <= 1 << 20
    assert all(b == min(1 << 20, 2 * a) if a / rate < 0.09 - 1e-6 else b in (a, 2 * a) for a, b in itertools.pairwise(sizes))
    assert at[0] - sizes[-1] / rate - 1e-2 < end or len(sizes) == 1, "a step began after the end"
    assert at[0] < end + max(0.3, 2 * sizes[0] / rate)


def test_decoders_are_counted_in_seconds_of_a_core() -> None:
    """Wrong if what other ranks do on the same core counted: here a second of a core is a hundred on the clock."""
    system = System()
    system.now = lambda: 100 * time.process_time()  # type: ignore[method-assign]
    busy = Probe(system).decode(3.0)
    alone = Probe().decode(0.03)
    assert set(busy) == {"gzip", "zstd", "blosc"}
    assert all(0.1 < busy[codec] / alone[codec] < 10 for codec in busy)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_all_ranks_raise_is_told_once(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which `share` changes
    error = ConfigError("'nodir' cannot be measured", rank=0)
    share(error, rank, 2)

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, "measure", fails)
    done = CliRunner().invoke(app, ["doctor", "--measure", "nodir"])
    assert (done.exit_code, done.stderr) == (1, "error: 'nodir' cannot be measured\n" if rank == 0 else "")
