"""Is the machine the one that the user names, and does a plan say what it was made with?"""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.errors import ConfigError
from shardload.jobs.machine_file import VARIABLE, configuration_file, machine_for
from shardload.planning.machine import WORKSTATION
from shardload.planning.presets import PRESETS


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a configuration."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_the_option_comes_first_then_the_variable_then_the_users_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = write(home / "site.toml", 'base = "perlmutter"\n[file_system]\nrate = 1e9\n')
    assert machine_for(None) is WORKSTATION
    write(Path(configuration_file()), "[file_system]\nrate = 2e9\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "other"))
    write(Path(configuration_file()), "[file_system]\nrate = 3e9\n")
    found = machine_for(None)
    assert (found.name, found.fs_rate, found.target_rate) == ("machine", 3e9, np.inf)
    monkeypatch.setenv(VARIABLE, "ibex")
    assert machine_for(None) == PRESETS["ibex"]
    found = machine_for(site)
    assert (found.name, found.fs_rate, found.target_rate) == ("site", 1e9, PRESETS["perlmutter"].target_rate)
    assert machine_for("workstation") == WORKSTATION


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[file_system\nrate = 1", "is no TOML"),
        ('base = "permutter"', "base is 'permutter'; expected the name of a preset"),
        ("[file_system]\nrate = -1", "file_system.rate is -1"),
        ("#" * (1 << 20) + "\n", "1,048,577 bytes"),
    ],
)
def test_a_wrong_file_is_named(home: Path, text: str, says: str) -> None:
    path = write(home / "wrong.toml", text)
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        machine_for(path)
    assert path in str(caught.value)


def test_an_unknown_name_is_named_with_the_option_or_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="machine is 'nowhere'; expected one of ibex, jean-zay, perlmutter, workstation"):
        machine_for("nowhere")
    monkeypatch.setenv(VARIABLE, "nowhere")
    with pytest.raises(ConfigError, match="SHARDLOAD_MACHINE is 'nowhere'"):
        machine_for(None)


@pytest.fixture
def path(home: Path) -> str:
    with h5py.File(home / "a.h5", "w") as file:
        file.create_dataset("x", (512,) * 3, "f4", chunks=(1, 512, 512), compression="gzip")
    return str(home / "a.h5")


@pytest.mark.parametrize("readers", ["auto", "parallel"])
def test_a_plan_for_many_nodes(path: str, readers: str) -> None:
    """What is taken, who reads, from where, and why; each figure with its origin; in 80 columns."""
    mesh = AbstractMesh((128, 128), ("a", "b"))
    plan = shardload.plan(path, mesh, P(None, "a", "b"), readers=readers, machine="perlmutter")
    assert (plan.readers, plan.ranks_per_node, plan.machine) == ("parallel", 4, PRESETS["perlmutter"])
    assert plan.n_readers == 512 and "512 readers, on every 8th node, by the model" in plan.why
    text = str(plan)
    assert max(len(line) for line in text.splitlines() if "/a.h5" not in line) <= 80
    said = " ".join(text.split())
    assert "perlmutter, 4,096 nodes, 4 ranks on each; given: node.ranks 4" in said
    assert (
        "file_system.rate 5 TB/s" in said.partition("assumed: ")[0] and "stream_rate 2 GB/s" in said.partition("assumed: ")[2]
    )
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["slowest", "from", "disk"]
    two = shardload.plan(path, mesh, P(None, "a", "b"), machine="perlmutter", ranks_per_node=2)
    assert two.ranks_per_node == 2 and two.costs["direct"].fs_nbytes == 2 * plan.costs["direct"].fs_nbytes
    nine = shardload.plan(path, mesh, P(None, "a", "b"), readers=9, machine="perlmutter")
    assert nine.n_readers == 9 and "by the model" not in nine.why


def test_a_plan_says_if_it_knows_no_machine(path: str) -> None:
    large, small = (str(shardload.plan(path, AbstractMesh((n, n), ("a", "b")), P(None, "a", "b"))) for n in (16, 8))
    assert "machine not known: all 256 ranks on one node" in " ".join(large.split())
    assert "machine" not in small, "as before"


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "4"])
def test_wrong_ranks_per_node(path: str, given: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"ranks_per_node is {given!r}; expected how many processes")):
        shardload.plan(path, AbstractMesh((4,), ("a",)), P("a"), ranks_per_node=given)


def test_wrong_machines(path: str) -> None:
    for given in (3, "", b"perlmutter", ["ibex"]):
        with pytest.raises(ConfigError, match=re.escape(f"machine is {given!r}; expected the name of a machine")):
            shardload.plan(path, AbstractMesh((4,), ("a",)), P("a"), machine=given)
