"""Is the coordinator where it can be, and do processes come to it when it is there? Who is told of a job without MPI?"""

from __future__ import annotations

import importlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from shardload.comm.group import Group
from shardload.comm.launch import (
    addresses_of,
    await_listener,
    first_here,
    free_port,
    is_free,
    join_address,
    listening_host,
    split_address,
)
from shardload.errors import ConfigError, PeerError
from tests.ports import free_ports
from tests.unit.files import raising
from tests.unit.ranks import on_ranks

launch = importlib.import_module("shardload.comm.launch")


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it slept each time; the clock goes on by that much, and by nothing else."""
    slept: list[float] = []
    monkeypatch.setattr(launch.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(launch.time, "sleep", slept.append)
    return slept


@pytest.mark.parametrize("n", [0, 4])
def test_somebody_listens_now_or_a_little_later(n: int, naps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if one refusal were enough to give up."""
    (port,) = free_ports(1)
    servers: list[socket.socket] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) >= n and not servers:
            servers.append(socket.create_server(("127.0.0.1", port)))

    monkeypatch.setattr(launch.time, "sleep", sleep)
    if not n:
        servers.append(socket.create_server(("127.0.0.1", port)))
    await_listener(f"127.0.0.1:{port}")
    assert len(naps) == n and servers
    servers[0].close()


def test_nobody_listens(naps: list[float]) -> None:
    """Wrong if it raised, in place of JAX, or waited on and on."""
    await_listener("127.0.0.1:1")
    assert launch._LISTENER_SECONDS <= sum(naps) < launch._LISTENER_SECONDS + 0.2
    assert max(naps) <= 0.1, "a late coordinator would be noticed late"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_somebody_else_has_the_port(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if process 0 went to JAX, which ends it by a segmentation fault, or another process refused."""
    started: list[object] = []
    monkeypatch.setattr(launch, "_LISTENER_SECONDS", 0)
    monkeypatch.setattr(launch.jax.distributed, "initialize", lambda *how, **_: started.append(how[2]))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    port = free_ports(1)[0]
    with socket.create_server((host, port), family=family):
        assert not is_free(port)
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: another process .* has port {port}"):
            launch._start(f"127.0.0.1:{port}", 2, 0, None, None)
        launch._start(f"127.0.0.1:{port}", 2, 1, None, None)
    assert started == [1]
    launch._start(f"127.0.0.1:{port}", 2, 0, None, None)  # it has gone
    assert started == [1, 0]


def test_somebody_else_has_the_port_of_another_address() -> None:
    """Wrong if two steps on one node, of which each has a loopback address of its own, kept each other from starting."""
    port = free_ports(1)[0]
    with socket.create_server(("127.0.0.1", port)):
        assert is_free(port, "127.0.1.195") and not is_free(port, "127.0.0.1")
    with socket.create_server(("0.0.0.0", port)):
        assert not is_free(port, "127.0.1.195")


def test_each_step_has_an_address_of_its_own() -> None:
    """Wrong if a task came to the coordinator of another step of its node: JAX would end that one."""
    steps = [(job, step) for job in (1, 2, 257, 258, 4097, 60_000_001, 60_000_257) for step in (0, 1, 16, 17, 63)]
    found = [
        launch.slurm_step({**STEP, "SLURM_PROCID": "1", "SLURM_JOB_ID": str(j), "SLURM_STEP_ID": str(k)}) for j, k in steps
    ]
    addresses = {step.coordinator for step in found if step is not None}
    assert len(addresses) == len(steps)
    assert all(launch.first_here([split_address(address)[0]]) for address in addresses), "not of this machine"


def test_a_port_that_nobody_has() -> None:
    """Wrong if the system could give it to a connection in the meantime, or somebody has it."""
    first, last = (int(part) for part in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    port = free_port()
    assert is_free(port) and not first <= port <= last


# --- where process 0 listens ------------------------------------------------------------------------------------------

ELSEWHERE = "198.51.100.7"  # of a range for examples


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What this machine finds under which name."""
    known: dict[str, list[str]] = {}

    def find(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(0, 0, 0, "", (number, 0)) for number in known[host]]

    monkeypatch.setattr(launch.socket, "getaddrinfo", find)
    return known


@pytest.mark.parametrize(
    ("host", "found", "listens"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("localhost", ["::1", "127.0.0.1"], "::1"),
        ("n1", [ELSEWHERE, "127.0.0.2"], "127.0.0.2"),  # of two, the one that is here
        ("n1", ["127.0.1.1"], ""),  # Debian's, for itself: others find another one
        ("n1", [ELSEWHERE], ""),  # a name of a gateway
        ("n1", [], ""),
        ("n2", None, ""),
    ],
)
def test_where_process_0_listens(host: str, found: list[str] | None, listens: str, names: dict[str, list[str]]) -> None:
    """Wrong if it listened where the others do not come, or on all interfaces where one will do."""
    if found is not None:
        names[host] = found
    if listens == "::1" and not first_here(["::1"]):
        listens = "127.0.0.1"  # a machine without IPv6
    assert listening_host(host) == listens


def test_addresses_of_a_name(names: dict[str, list[str]]) -> None:
    names["n1"] = ["fe80::1%eth0", ELSEWHERE, "fd00::1", ELSEWHERE]
    assert addresses_of("n1") == [ELSEWHERE, "fd00::1"]
    assert all(split_address(join_address(host, 7)) == (host, "7") for host in ("n1", "fd00::1", "10.0.0.1"))


@pytest.mark.parametrize(
    ("mine", "seen", "address", "bind"),
    [
        (["127.0.0.2"], ["127.0.0.2"], "127.0.0.2:61440", "127.0.0.2:61440"),
        # Under its own name the machine finds another address than the others do: they come to theirs.
        (["127.0.1.1"], [ELSEWHERE, "127.0.0.2"], "127.0.0.2:61440", "127.0.0.2:61440"),
        (["127.0.1.1"], [ELSEWHERE], "n1:61440", None),
    ],
)
def test_ranks_on_two_machines(
    mine: list[str],
    seen: list[str],
    address: str,
    bind: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Wrong if rank 0 listened at an address that only it knows, or a rank came to another one."""
    here = threading.local()  # on each rank

    def meet(group: Group) -> tuple[str, str | None]:
        here.found = mine if group.rank < 2 else seen
        return launch._meeting_place(group, group.rank < 2)  # type: ignore[no-any-return]

    monkeypatch.setattr(launch.socket, "gethostname", lambda: "n1")
    monkeypatch.setattr(launch, "free_port", lambda: 61440)
    monkeypatch.setattr(launch, "addresses_of", lambda host: here.found if host == "n1" else [])
    assert on_ranks(4, meet) == [(address, bind)] * 4
    assert ["on all interfaces" in text for text in caplog.messages] == [True] * (bind is None), "rank 0 alone says so"


@pytest.mark.parametrize(
    ("named", "address"),
    [("127.0.0.3:1", "127.0.0.3"), ("127.0.0.3", "127.0.0.3"), ("0.0.0.0:1", "127.0.0.2"), ("[::]:1", "127.0.0.2")],
)
def test_ranks_come_to_the_interface_that_the_user_names(named: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if rank 0 listened there, and the others came to another one: five minutes long."""
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", named)
    monkeypatch.setattr(launch, "free_port", lambda: 61440)
    monkeypatch.setattr(launch, "addresses_of", lambda host: ["127.0.0.2"])
    found = on_ranks(2, lambda group: launch._meeting_place(group, group.rank == 0)[0])
    assert found == [f"{address}:61440"] * 2


def test_rank_0_that_finds_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if it failed alone: the others would wait for it, a quarter of an hour."""

    monkeypatch.setattr(launch, "free_port", raising(OSError(97, "Address family not supported by protocol")))
    first, second = on_ranks(2, lambda group: launch._meeting_place(group, True))
    assert type(first) is type(second) is PeerError
    assert "Address family not supported" in str(first) == str(second)


# --- under Slurm without MPI -------------------------------------------------------------------------------------------

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """How JAX is started, by task 0 of a step without MPI."""
    for name, value in {**STEP, "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "world", lambda: None)
    monkeypatch.setattr(launch, "mpi_problem", lambda: "libmpi.so.40: cannot open shared object file")
    monkeypatch.setattr(launch.jax.distributed, "is_initialized", lambda: False)
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(launch, "_start", lambda *how: started.append(how))
    return started


@pytest.mark.parametrize("named", ["127.0.0.2:61440", "127.0.0.2"])
def test_an_interface_that_the_user_names(
    named: str, monkeypatch: pytest.MonkeyPatch, started: list[tuple[object, ...]]
) -> None:
    """Wrong if the port beside it counted, as of the job in which the address was advised: nobody would come to that one."""
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", named)
    launch.initialize()
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[1-2]")
    launch.initialize()
    on_one_node, on_two_nodes = ((how[0], how[4]) for how in started)
    assert on_one_node == ("127.0.1.195:61554",) * 2, "where all come"
    assert on_two_nodes == ("n1:61554", "127.0.0.2:61554")


def test_task_0_that_is_not_on_the_first_node(monkeypatch: pytest.MonkeyPatch, started: list[tuple[object, ...]]) -> None:
    """Wrong if it waited where nobody comes, five minutes long (``srun --distribution=arbitrary``)."""
    step = {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_STEP_NODELIST": "n[1-4]", "SLURM_NODEID": "2"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="look for it on n1, the first node of this step: leave out --distribution=arbitrary"):
        launch.initialize()
    assert started == []


@pytest.mark.parametrize(("task", "switched_off", "said"), [(0, False, True), (1, False, False), (0, True, False)])
def test_without_mpi_under_slurm(
    task: int,
    switched_off: bool,
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    started: list[tuple[object, ...]],
) -> None:
    """Wrong if a library that is not found made all loads slow in silence, every task said so, or who meant it was told."""
    monkeypatch.setenv("SLURM_PROCID", str(task))
    monkeypatch.setenv("SHARDLOAD_MPI", "0" if switched_off else "1")
    launch.initialize()
    assert [how[1:3] for how in started] == [(4, task)]
    assert [how[0] if how[4] is None else how[4] for how in started] == ["127.0.1.195:61554"], "not on loopback"
    assert ["libmpi.so.40" in text and "SHARDLOAD_MPI=0" in text for text in caplog.messages] == [True] * said


# --- GPUs


def test_more_processes_than_gpus() -> None:
    """Wrong if who has a JAX for the CPU alone, on a machine with a GPU, were told nothing that helps."""
    with pytest.raises(ConfigError, match=r"4 processes of this node see the same 1 GPU: .* set JAX_PLATFORMS=cpu if"):
        launch._device_share(0, 4, True, {"CUDA_VISIBLE_DEVICES": "0"})
