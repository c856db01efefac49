"""Is the free memory found in the machine, its control groups and the limits of the process?"""

from __future__ import annotations

import math
import resource
from pathlib import Path

import pytest

from shardload.system import spare_memory as spare
from shardload.system.spare_memory import keeps_addresses, limit_nbytes, spare_nbytes

MIB = 1 << 20
HUGE = str(0x7FFFFFFFFFFFF000)  # how the older interface says that there is no limit


class Machine:
    """Files like the kernel's, in a folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.mounts: list[str] = []
        for name in ("_MEMINFO", "_OVERCOMMIT", "_GROUPS", "_MOUNTS"):
            patch.setattr(spare, name, str(folder / name))
        self.write("_MEMINFO", "MemTotal: 999999 kB\nMemAvailable: 1048576 kB\nCached: 1 kB\n")
        self.write("_OVERCOMMIT", "0\n")
        spare._folders.cache_clear()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def mount(self, name: str, kind: str, root: str = "/") -> None:
        self.mounts.append(f"31 23 0:28 {root} {self.folder / name} rw,relatime shared:9 - {kind}\n")
        self.write("_MOUNTS", "22 1 8:1 / / rw - ext4 /dev/root rw\n" + "".join(self.mounts))

    def newer(self, group: str, used: int, cached: tuple[int, int] = (0, 0), **limits: str) -> None:
        self.write(f"{group}/memory.max", limits.get("max", "max") + "\n")
        self.write(f"{group}/memory.high", limits.get("high", "max") + "\n")
        self.write(f"{group}/memory.current", f"{used}\n")
        self.write(f"{group}/memory.stat", f"anon 5\nfile 7\ninactive_file {cached[0]}\nactive_file {cached[1]}\n")

    def older(self, group: str, limit: str, used: int, cached: tuple[int, int] = (0, 0)) -> None:
        self.write(f"{group}/memory.limit_in_bytes", limit + "\n")
        self.write(f"{group}/memory.usage_in_bytes", f"{used}\n")
        lines = f"inactive_file 0\nactive_file 0\ntotal_inactive_file {cached[0]}\ntotal_active_file {cached[1]}\n"
        self.write(f"{group}/memory.stat", lines)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    yield Machine(tmp_path, monkeypatch)
    spare._folders.cache_clear()


def test_what_the_machine_has_left(machine: Machine) -> None:
    assert spare_nbytes() == 1 << 30
    machine.write("_MEMINFO", "")
    assert spare_nbytes() == math.inf, "nothing says"


@pytest.mark.parametrize(
    ("limits", "cached", "left"),
    [
        ({"max": str(100 * MIB)}, (0, 0), 40 * MIB),
        ({"high": str(80 * MIB), "max": str(100 * MIB)}, (0, 0), 20 * MIB),
        ({"high": str(100 * MIB)}, (8 * MIB, 2 * MIB), 50 * MIB),  # of what is used, the kernel takes this first
        ({"max": str(50 * MIB)}, (0, 0), 0),
        ({}, (0, 0), 1 << 30),
    ],
)
def test_what_a_control_group_has_left(machine: Machine, limits: dict[str, str], cached: tuple[int, int], left: int) -> None:
    machine.mount("groups", "cgroup2 cgroup2 rw")
    machine.write("_GROUPS", "0::/job/step\n")
    machine.newer("groups/job/step", 60 * MIB, cached, **limits)
    assert spare_nbytes() == left


def test_a_group_above_may_be_the_one_that_is_full(machine: Machine) -> None:
    machine.mount("groups", "cgroup2 cgroup2 rw")
    machine.write("_GROUPS", "0::/job/step/task\n")
    machine.newer("groups/job", 900 * MIB, max=str(1000 * MIB))
    machine.newer("groups/job/step", 10 * MIB, max=str(600 * MIB))
    machine.newer("groups/job/step/task", 10 * MIB)
    assert spare_nbytes() == 100 * MIB
    machine.newer("groups/job", 300 * MIB, max=str(1000 * MIB))
    assert spare_nbytes() == 590 * MIB, "it is looked at each time"


@pytest.mark.parametrize("root", ["/", "/slurm/job7"])
def test_the_older_interface(machine: Machine, root: str) -> None:
    """In a container the mount begins below the path that the process is told."""
    machine.mount("other", "cgroup cgroup rw,cpuset")
    machine.mount("memory", "cgroup cgroup rw,memory", root)
    machine.write("_GROUPS", "5:cpuset:/slurm/job7/step\n4:hugetlb,memory:/slurm/job7/step\n0::/\n")
    place = "memory/slurm/job7/step" if root == "/" else "memory/step"
    machine.older(place, str(200 * MIB), 150 * MIB, (4 * MIB, 6 * MIB))
    machine.older("memory", HUGE, 900 * MIB)
    assert spare_nbytes() == 60 * MIB


def test_a_mount_that_does_not_have_the_path(machine: Machine) -> None:
    """As in containers that are told the path on the host: all that is mounted is theirs."""
    machine.mount("groups", "cgroup2 cgroup2 rw")
    machine.write("_GROUPS", "0::/docker/0123\n")
    machine.newer("groups", 1 * MIB, max=str(3 * MIB))
    assert spare_nbytes() == 2 * MIB


@pytest.mark.parametrize("text", ["", "nonsense", "0::", "1:x", "4:memory:/\n0::/a"])
def test_what_cannot_be_read_limits_nothing(machine: Machine, text: str) -> None:
    machine.mount("groups", "cgroup2 cgroup2 rw")
    machine.mount("memory", "cgroup cgroup rw,memory")
    machine.write("_GROUPS", text)
    machine.write("groups/memory.max", "many\n")
    machine.write("memory/memory.limit_in_bytes", "7\n")  # without memory.usage_in_bytes
    assert spare_nbytes() == 1 << 30


@pytest.mark.parametrize("which", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_limits_of_addresses(machine: Machine, which: int) -> None:
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
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert limit_nbytes() == 999999 * 1024 and limit_nbytes(3) == 999999 * 1024 / 3
    machine.mount("", "cgroup2 cgroup rw")
    machine.write("_GROUPS", "0::/job/step\n")
    machine.newer("job", 99 * MIB, max=str(100 * MIB))
    machine.newer("job/step", 10 * MIB, high=str(120 * MIB))
    assert (limit_nbytes(), limit_nbytes(4)) == (100 * MIB, 25 * MIB)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (60 * MIB, resource.RLIM_INFINITY))
    assert (limit_nbytes(), limit_nbytes(4)) == (60 * MIB, 25 * MIB), "a limit of addresses is each process's own"
    machine.write("_MEMINFO", "")
    machine.newer("job", 0)
    machine.newer("job/step", 0)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert limit_nbytes() == math.inf, "nothing says"
