"""Are the limits of memory found in the machine, its control groups and the process?"""

from __future__ import annotations

import math
import resource
from pathlib import Path

import pytest

from shardload.system import memory_limit
from shardload.system.memory_limit import keeps_addresses, limit_nbytes

MIB = 1 << 20
HUGE = str(0x7FFFFFFFFFFFF000)  # how the older interface says that there is no limit


class Machine:
    """Files like the kernel's, in a folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name in ("_MEMINFO", "_OVERCOMMIT", "_GROUPS"):
            patch.setattr(memory_limit, name, str(folder / name))
        self.write("_MEMINFO", "MemTotal: 1048576 kB\nMemAvailable: 7 kB\nCached: 1 kB\n")
        self.write("_OVERCOMMIT", "0\n")
        patch.setattr(memory_limit, "_ROOTS", {1: str(folder / "memory"), 2: str(folder / "groups")})
        memory_limit._limits_of.cache_clear()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def newer(self, group: str, **limits: str) -> None:
        self.write(f"{group}/memory.max", limits.get("max", "max") + "\n")
        self.write(f"{group}/memory.high", limits.get("high", "max") + "\n")

    def older(self, group: str, limit: str) -> None:
        self.write(f"{group}/memory.limit_in_bytes", limit + "\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    yield Machine(tmp_path, monkeypatch)
    memory_limit._limits_of.cache_clear()


@pytest.mark.parametrize(
    ("limits", "least"),
    [
        ({"max": str(100 * MIB)}, 100 * MIB),
        ({"high": str(80 * MIB), "max": str(100 * MIB)}, 80 * MIB),
        ({"high": str(100 * MIB)}, 100 * MIB),
        ({}, 1 << 30),
    ],
)
def test_the_limits_of_a_control_group(machine: Machine, limits: dict[str, str], least: int) -> None:
    machine.write("_GROUPS", "0::/job/step\n")
    machine.newer("groups/job/step", **limits)
    assert limit_nbytes() == least


@pytest.mark.parametrize("root", ["/", "/slurm/job7"])
def test_the_older_interface(machine: Machine, root: str) -> None:
    """In a container the mount begins below the path that the process is told."""
    machine.write("_GROUPS", "5:cpuset:/slurm/job7/step\n4:hugetlb,memory:/slurm/job7/step\n0::/\n")
    machine.older("memory/slurm/job7/step" if root == "/" else "memory/step", str(200 * MIB))
    machine.older("memory", HUGE)
    assert limit_nbytes() == 200 * MIB


def test_a_mount_that_does_not_have_the_path(machine: Machine) -> None:
    """As in containers that are told the path on the host: all that is mounted is theirs."""
    machine.write("_GROUPS", "0::/docker/0123\n")
    machine.newer("groups", max=str(3 * MIB))
    assert limit_nbytes() == 3 * MIB


@pytest.mark.parametrize("text", ["", "nonsense", "0::", "1:x", "0::/a"])
def test_what_cannot_be_read_limits_nothing(machine: Machine, text: str) -> None:
    machine.write("_GROUPS", text)
    machine.write("groups/memory.max", "many\n")
    assert limit_nbytes() == 1 << 30


@pytest.mark.parametrize("which", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_limits_of_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    monkeypatch.setattr(memory_limit, "_OVERCOMMIT", str(tmp_path / "nothing"))
    soft, hard = resource.getrlimit(which)
    if soft != resource.RLIM_INFINITY:
        pytest.skip("there is one already")
    assert not keeps_addresses()
    resource.setrlimit(which, (1 << 50, hard))
    try:
        assert keeps_addresses()
    finally:
        resource.setrlimit(which, (soft, hard))


def test_a_machine_that_does_not_overcommit(machine: Machine) -> None:
    found = []
    for text in ("0\n", "1\n", "2\n"):
        machine.write("_OVERCOMMIT", text)
        found.append(keeps_addresses())
    assert found == [False, False, True]


def test_what_each_process_may_use_at_most(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if what is free just now counted, or if each of several processes took all of a limit that they share."""
    assert limit_nbytes() == 1 << 30 and limit_nbytes(3) == (1 << 30) / 3
    machine.write("_GROUPS", "0::/job/step\n")
    machine.newer("groups/job", max=str(100 * MIB))
    machine.newer("groups/job/step", high=str(120 * MIB))
    assert (limit_nbytes(), limit_nbytes(4)) == (100 * MIB, 25 * MIB)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (60 * MIB, resource.RLIM_INFINITY))
    assert (limit_nbytes(), limit_nbytes(4)) == (60 * MIB, 25 * MIB), "a limit of addresses is each process's own"
    machine.write("_MEMINFO", "")
    machine.newer("groups/job")
    machine.newer("groups/job/step")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert limit_nbytes() == math.inf, "nothing says"
