"""Does `shardload doctor --measure` write figures that plans can use, and leave nothing behind?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardload.cli.doctor import measure as module
from shardload.cli.doctor.measure import measure
from shardload.cli.main import app
from shardload.errors import ConfigError
from shardload.jobs.machine_file import machine_for


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to measure, with little to write; and a user without a configuration."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SHARDLOAD_MACHINE", raising=False)
    for name, value in (("_FILE_NBYTES", 2 << 20), ("_OPS_SECONDS", 0.05), ("_COPY_NBYTES", 1 << 20)):
        monkeypatch.setattr(module, name, value)
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def test_the_figures_are_found_and_measured(folder: Path) -> None:
    """Wrong if a figure had another name in the file than in a machine, or if anything were left in the folder."""
    done = CliRunner().invoke(app, ["doctor", "--measure", str(folder)])
    assert done.exit_code == 0, done.output
    machine = machine_for(None)
    assert machine.name == "measured" and machine.has_file_system and not os.listdir(folder)
    figures = machine.figures()
    expected = {"node.ranks", "node.cores", "node.memory_rate"}
    expected |= {
        f"file_system.{name}" for name in ("node_rate", "stream_rate", "operations_rate", "open_seconds", "read_seconds")
    }
    assert set(figures) == expected, "the rate of several nodes is not known on one"
    assert all(machine.origin_of(name) == "measured" and value > 0 for name, value in figures.items())
    assert figures["node.ranks"] == 1 and str(folder.parent / "config") in done.output


def test_a_file_of_figures_is_not_overwritten(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = folder.parent / "site.toml"
    site.write_text("mine")
    with pytest.raises(ConfigError, match=r"site.toml' exists: rename it, or pass --output"):
        measure(str(folder), str(site))
    assert site.read_text() == "mine" and not os.listdir(folder)


def test_a_folder_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be measured: .*No such file.*Pass a folder that all ranks can write to"):
        measure(str(folder / "nowhere"))


def test_nothing_is_left_after_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> float:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module._Measurement, "_read_small", fail)
    with pytest.raises(ConfigError, match="No space left on device"):
        measure(str(folder))
    assert not os.listdir(folder) and not (folder.parent / "config").exists()


def test_the_bytes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if many ranks wrote as much each as few."""
    written: list[int] = []
    drop = module._Measurement._drop

    def look(self: module._Measurement, rank: int) -> float:
        written.append(os.path.getsize(self._name(rank)))
        return drop(self, rank)

    monkeypatch.setattr(module._Measurement, "_drop", look)
    monkeypatch.setattr(module, "_MOST_NBYTES", 1 << 20)
    measure(str(folder))
    assert set(written) == {1 << 20}
