"""How is JAX started on all ranks: do MPI and JAX see the same job, and where does JAX's coordinator listen?

MPI ranks and JAX processes are started in different ways and do not know of each other. `initialize` starts JAX from MPI.
`rank_of_process` maps processes to ranks; if the two do not match, its error says which is wrong and what to type.

The coordinator does not authenticate clients. By default JAX lets it listen on all interfaces of its machine. Here it listens
on one, so that as few as possible reach it: the loopback interface if all processes are on one machine, else the interface
whose address the other processes find under the name of its machine.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import random
import re
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax
import numpy as np

from shardload.comm.collectives import backoff
from shardload.comm.group import Group, Invocation, group_of, host_number
from shardload.comm.mpi import HOW_WITHOUT_MPI, end_job, launcher_problem, mpi_is_off, mpi_problem, refuse_singletons, world
from shardload.comm.shared_errors import is_pythons_own, show
from shardload.errors import ConfigError, PeerError, StallError
from shardload.system.gpus import gpu_files, visible_gpus
from shardload.system.interruption import FirstError
from shardload.units import counted

# Ports for JAX's coordinator, the same range as in JAX: above the ports that the system gives to outgoing connections.
_PORTS = range(61440, 65536)
LOOPBACK = "127.0.0.1"
_N_LOOPBACK = 2**24 - 2  # addresses from there on
_LISTENER_SECONDS = 2.0  # after that JAX itself waits, and reports a coordinator that does not answer


def join_address(host: str, port: int | str) -> str:
    """The address in the form that JAX expects.

    >>> join_address("n1", 61440), join_address("fd00::1", "61440")
    ('n1:61440', '[fd00::1]:61440')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, str]:
    """The host and the port of an address: the inverse of `join_address`.

    >>> split_address("n1:61440"), split_address("[fd00::1]:61440")
    (('n1', '61440'), ('fd00::1', '61440'))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def addresses_of(host: str) -> list[str]:
    """The addresses that this machine finds under a name, in the order in which it would try them; may be empty."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = [str(address[0]) for *_, address in entries]
    return [text for text in dict.fromkeys(addresses) if "%" not in text]  # "%": valid on one link only


def first_here(addresses: Sequence[str]) -> str:
    """The first of these addresses that belongs to this machine; empty if none does."""
    for address in addresses:
        with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return address
    return ""


def listening_host(host: str) -> str:
    """The address on which process 0 listens if all processes connect to `host`; empty if it cannot be known from here.

    A machine often finds a loopback address under its own name, while others find the address that they can reach.
    """
    addresses = addresses_of(host)
    is_name = host != "localhost" and host not in addresses
    return "" if is_name and all(ipaddress.ip_address(address).is_loopback for address in addresses) else first_here(addresses)


def await_listener(address: str) -> None:
    """Return when a process listens there, or after a while. JAX itself would try once, and again after a whole second."""
    host, port = split_address(address)
    end, n_tries = time.monotonic() + _LISTENER_SECONDS, 0
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        n_tries += 1
        time.sleep(backoff(n_tries, first_seconds=2e-3, longest_seconds=0.1))


@dataclass(frozen=True)
class SlurmStep:
    """The task of an srun step that this process is."""

    task: int
    n_tasks: int
    node: int
    local_id: int
    n_local: int
    coordinator: str


def slurm_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """The srun step that this process is a task of; None in a batch script, an ssh session, or without Slurm.

    Batch scripts and ssh sessions have some of Slurm's variables too, but only a step has a step number and a task number.

    >>> slurm_step({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None
    True
    >>> of_step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "3"}
    >>> slurm_step({**of_step, "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_NODEID": "1",
    ...             "SLURM_STEP_NODELIST": "n[3-4,7]"})
    SlurmStep(task=3, n_tasks=6, node=1, local_id=1, n_local=2, coordinator='n3:61554')
    """
    try:
        job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
        n_tasks, task = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_PROCID"])
        local, node = int(environ.get("SLURM_LOCALID", "0")), int(environ.get("SLURM_NODEID", "0"))
    except (KeyError, ValueError):
        return None
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        count = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(count[1])] * int(count[2] or 1) if count else []
    n_local = counts[node] if node < len(counts) else 1
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or socket.gethostname()
    # Address and port are the same for all tasks of a step, and others for another step: JAX ends a job to whose coordinator a
    # task of another comes. Jobs whose numbers differ by 256 have the same port, but on one node all of 127/8 is loopback.
    host = str(ipaddress.IPv4Address(LOOPBACK) + (64 * job + step) % _N_LOOPBACK) if n_local == n_tasks else _first_node(nodes)
    return SlurmStep(task, n_tasks, node, local, n_local, f"{host}:{_PORTS[(16 * job + step) % len(_PORTS)]}")


def free_port() -> int:
    """A port of this machine that is free now.

    The port is not chosen by the system: it could give that port to an outgoing connection before it is used.
    """
    return next(filter(is_free, random.SystemRandom().sample(_PORTS, len(_PORTS))))


def is_free(port: int, host: str = "") -> bool:
    """True if a process could listen at this port now, on this address, or on all addresses of this machine."""
    is_dual = not host and socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
        if is_dual:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _first_node(nodes: str) -> str:
    """The first host of a list in Slurm's notation.

    >>> [_first_node(text) for text in ("n1", "n[1-4]", "gpu-[007,9-12],cpu1", "a,b")]
    ['n1', 'n1', 'gpu-007', 'a']
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return (match[1] + (match[2] or "")) if match else nodes


_log = logging.getLogger("shardload")

_NO_MPI_HERE = (
    "MPI cannot be loaded (%s): JAX starts from Slurm's variables alone, and values go from node to node slowly. "
    "If this is intended, set SHARDLOAD_MPI=0"
)
_NOT_FIRST = (
    "task 0 is on {here}, but the other tasks look for it on {first}, the first node of this step: leave out "
    "--distribution=arbitrary (-m, SLURM_HOSTFILE), put task 0 on {first}, or start the job under MPI"
)
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's own variable
_ALL = ("", "0.0.0.0", "::")  # no interface, or all of them
_PREEMPTION = "jax_enable_preemption_service"  # its option
_MEET_SECONDS = 900.0  # how long ranks wait for each other to start JAX; a load waits as long by default
_LAST_WORDS_SECONDS = 1.0  # for other ranks, which may be about to print the same error


def initialize(*, local_device_ids: list[int] | None = None) -> None:
    """Start JAX's distributed runtime to match how this job was launched, and check that MPI and JAX see the same job.

    1. Under MPI (mpiexec, mpirun, ``srun --mpi=pmi2`` or ``pmix``): one JAX process per rank, process index equal to the rank.
    2. Under srun without MPI (``SHARDLOAD_MPI=0``; or no MPI can be loaded, and task 0 warns): one JAX process per task.
    3. In a single process: nothing to start.

    Processes that were started in another way call ``jax.distributed.initialize(address, num_processes, process_id)`` instead.

    JAX's coordinator, in process 0, does not authenticate clients. So it listens on the loopback interface if all processes are
    on one machine, else on the one interface that the others reach, or that ``JAX_COORDINATOR_BIND_ADDRESS`` names (its port
    does not count). Proxies (``http_proxy`` and its like) are not asked for it.

    If mpi4py was told not to start MPI (``mpi4py.rc.initialize``), and nobody has, the first call that needs MPI starts it.

    SIGTERM, which ``scancel``, ``timeout`` and batch systems send, ends a process at once, unless the script has its own
    handler: JAX's preemption service, which would catch it, is not started.

    Under MPI, an uncaught exception ends the whole job from now on, after its traceback; otherwise the other processes would
    wait for that process.

    If a process sees GPUs that no other process sees (``--gpus-per-task``), it takes all of them; otherwise it takes its share
    of the GPUs that the processes of a node see together. Does nothing if JAX was started already. Call it before anything that
    uses JAX devices.

    Collective: yes, over COMM_WORLD (or over the processes to be started).

    Parameters
    ----------
    local_device_ids : list of int, optional
        GPUs that this process uses, of those that it sees; by default chosen as above.

    Raises
    ------
    ConfigError
        If the launcher started several tasks that MPI does not know of, if JAX was started with other processes than MPI has,
        if no MPI library can be loaded, if processes would share GPUs, or if JAX devices were used already. The text says what
        to type.
    StallError
        Under MPI, if a process does not call it within 15 minutes.
    """
    comm = world()
    if jax.distributed.is_initialized():
        from jax._src import distributed  # `jax.process_count()` would start the devices

        n_processes = distributed.global_state.num_processes or 1
        if comm is not None and n_processes > 1:
            _refuse_mismatch(comm.size, n_processes)
        return
    if comm is not None and comm.size > 1:
        _start_from_mpi(comm, local_device_ids)
        return
    step = slurm_step(os.environ)
    if comm is None and step is not None and step.n_tasks > 1:
        if local_device_ids is None and not _cpu_only():
            local_device_ids = _device_share(step.local_id, step.n_local, None, os.environ)
        if step.task == 0 and not mpi_is_off(os.environ):
            _log.warning(_NO_MPI_HERE, mpi_problem())
        if step.task == 0 and step.node:
            raise ConfigError(_NOT_FIRST.format(here=socket.gethostname(), first=split_address(step.coordinator)[0]))
        bind = _named_interface(step.coordinator) or _listen_at(step.coordinator, step.task)
        _start(step.coordinator, step.n_tasks, step.task, local_device_ids, bind)
        return
    refuse_singletons()


def _start_from_mpi(comm: Any, local_device_ids: list[int] | None) -> None:
    group = group_of(comm, _MEET_SECONDS)
    group.watch.begin("initialize()", _MEET_SECONDS)
    _ = group.machine  # as every call begins, so that a rank that makes another one, or none, is named
    group.settle(Invocation("initialize", "initialize()", {}), None)
    visible = zlib.crc32(os.environ.get("CUDA_VISIBLE_DEVICES", "all").encode())
    rows = group.gather_ints([host_number(), visible])
    here = np.flatnonzero(rows[:, 0] == rows[group.rank, 0])
    address, bind = _meeting_place(group, is_beside_0=not here[0])
    errors = FirstError()
    with errors:
        _refuse_devices_in_use(group.size)
        if local_device_ids is None and not _cpu_only():
            see_alike = bool((rows[here, 1] == visible).all())
            local_device_ids = _device_share(int((here < group.rank).sum()), len(here), see_alike, os.environ)
    group.agree(errors.take())  # before any rank waits for the others in JAX
    with errors:
        _start(address, group.size, group.rank, local_device_ids, _named_interface(address) or bind)
    group.agree(errors.take())
    group.watch.close()
    _end_job_on_error()


def _meeting_place(group: Group, is_beside_0: bool) -> tuple[str, str | None]:
    """The address that the processes connect to, and that on which process 0 listens (None: all interfaces). Collective.

    `is_beside_0`: whether this rank is on the machine of rank 0.
    """
    host, port = group.tell(lambda: f"{socket.gethostname()} {free_port()}", 0).split()
    elsewhere = int(group.gather_int(group.size if is_beside_0 else group.rank).min())
    if elsewhere == group.size:
        return (join_address(LOOPBACK, port),) * 2
    # The address that rank 0 finds under its own name is often one that only rank 0 can use.
    addresses = group.send_text(" ".join(addresses_of(host)) if group.rank == elsewhere else None, elsewhere).split()
    named = [_named_host()] if _named_host() not in _ALL else []  # others come where it listens
    address = group.send_text(first_here([*named, *addresses]) if group.rank == 0 else None, 0)
    if not address:
        if group.rank == 0:
            _say_on_all(host, port)
        return join_address(host, port), None
    return (join_address(address, port),) * 2


def _listen_at(address: str, process: int) -> str | None:
    """The address on which process 0 listens if all connect to `address`; None: on all interfaces, or not process 0."""
    if process:
        return None
    host, port = split_address(address)
    interface = listening_host(host)
    if not interface:
        _say_on_all(host, port)
        return None
    return join_address(interface, port)


def _named_interface(address: str) -> str | None:
    """Where process 0 listens if the user has named an interface: at the port of `address`, another one in each job.

    None on one machine, where all come to the loopback interface.
    """
    named, (host, port) = _named_host(), split_address(address)
    return join_address(named, port) if named and not host.startswith("127.") else None


def _named_host() -> str:
    """The interface that the user has named; empty if none is."""
    named = os.environ.get(_BIND, "")
    return split_address(named)[0] or named


def _say_on_all(host: str, port: str) -> None:
    """Warn that the coordinator listens on all interfaces, unless the user has set an address."""
    if not os.environ.get(_BIND):
        _log.warning(
            "JAX's coordinator will listen on all interfaces of this machine, at port %s, and anybody who reaches it can end "
            "the job: the address that the other processes find under %s is not known here. %s=ADDRESS:%s names the interface "
            "(any port will do in the next job)",
            *(port, host, _BIND, port),
        )


def _end_job_on_error() -> None:
    """Let an uncaught exception end the job.

    Otherwise the process would wait for the others at its exit, in JAX's shutdown, for minutes, and they would wait for it in
    the next collective call. Not in an interactive session, and not if another exception hook was set.
    """
    if not is_pythons_own():
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if not isinstance(error, StallError):  # a stall ends the job by itself, when the other ranks know of it
            end_job(_LAST_WORDS_SECONDS)

    sys.excepthook = hook


def _start(address: str, n_processes: int, process: int, local_device_ids: list[int] | None, bind: str | None) -> None:
    if process:
        await_listener(address)
    else:
        _refuse_taken_port(address, bind)
    _leave_out_preemption()
    try:
        with _without_proxies():
            jax.distributed.initialize(address, n_processes, process, local_device_ids, coordinator_bind_address=bind)
    except (RuntimeError, ValueError) as error:
        raise _not_started(n_processes, str(error).rstrip(". ")) from error


def _not_started(n_processes: int, why: str) -> ConfigError:
    return ConfigError(
        f"JAX could not be started as one of {n_processes} processes: {why}. Call shardload.initialize() once, at the top "
        "of the script, before anything that uses JAX devices"
    )


def _refuse_devices_in_use(n_processes: int) -> None:
    """Raise the error that JAX would, before the others wait in JAX for this process: up to five minutes."""
    from jax._src import xla_bridge  # there is no public way to ask

    if xla_bridge.backends_are_initialized():
        raise _not_started(
            n_processes, "devices are in use here already, by a computation, jax.devices, jax.device_put or others"
        )


def _leave_out_preemption() -> None:
    """Keep JAX from starting its preemption service, which catches SIGTERM, and waits until the program asks for it."""
    if hasattr(jax.config, _PREEMPTION):
        jax.config.update(_PREEMPTION, False)
    else:
        from jax._src import distributed  # releases without that option always start it, here

        state: Any = distributed.global_state
        state.initialize_preemption_sync_manager = lambda: None


@contextmanager
def _without_proxies() -> Iterator[None]:
    """Have the processes connect to JAX's coordinator directly. gRPC would ask the proxy of ``http_proxy`` and its like, which
    does not know this machine, or may not connect to it.
    """
    proxies = {name: os.environ.pop(name) for name in tuple(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(proxies)


def _refuse_taken_port(address: str, bind: str | None) -> None:
    """Raise ConfigError if another process has the port: JAX would end this process with a segmentation fault."""
    host, port = split_address(bind) if bind else ("", split_address(address)[1])
    if not is_free(int(port), host):
        raise ConfigError(
            f"JAX cannot be started at {address}: another process of this machine ({socket.gethostname()}) has port {port}. "
            "Start the step again (its port follows from the job's and the step's number), or end the other process: "
            "'ss -ltnp' lists who listens"
        )


def _device_share(local_rank: int, local_size: int, see_alike: bool | None, environ: Mapping[str, str]) -> list[int] | None:
    """The GPUs that a process takes, of those that it sees; None for all of them (or if there are none).

    `see_alike`: whether all processes of this node have the same CUDA_VISIBLE_DEVICES; None if that is unknown. If they
    differ, or there is only one process, each process takes all it sees. Otherwise each takes its share, in order.

    >>> _device_share(2, 4, True, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    [2]
    >>> _device_share(1, 2, True, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    [2, 3]
    >>> _device_share(2, 4, False, {"CUDA_VISIBLE_DEVICES": "2"}) is None
    True
    >>> _device_share(0, 2, True, {"CUDA_VISIBLE_DEVICES": "-1"}) is None
    True
    """
    if local_size == 1 or see_alike is False:
        return None
    visible = visible_gpus(environ)
    n = len(gpu_files() if visible is None else visible)
    if n == 0 or (n == 1 and see_alike is None):  # one GPU: probably --gpus-per-task=1
        return None
    if n % local_size:
        raise ConfigError(
            f"{local_size} processes of this node see the same {counted(n, 'GPU')}: start one process per GPU "
            f"(--ntasks-per-node={n}), give each task its own (--gpus-per-task=1), pass local_device_ids= to initialize(), or "
            "set JAX_PLATFORMS=cpu if JAX is to take the CPU"
        )
    n_each = n // local_size
    return [*range(local_rank * n_each, (local_rank + 1) * n_each)]


def _cpu_only() -> bool:
    return str(getattr(jax.config, "jax_platforms", None) or "").partition(",")[0] == "cpu"


def _refuse_mismatch(n_ranks: int, n_processes: int) -> None:
    """ConfigError unless JAX has a process for each rank."""
    if n_ranks == 1 and n_processes > 1:
        hint = launcher_problem() or "start the job with the mpiexec or srun that belongs to mpi4py's MPI library"
        raise ConfigError(
            f"JAX sees {n_processes} processes, but COMM_WORLD has size 1: MPI was started as {n_processes} singletons. "
            f"{hint}. {HOW_WITHOUT_MPI}"
        )
    if n_ranks != n_processes:
        sees = "one process" if n_processes == 1 else f"{n_processes} processes"
        raise ConfigError(
            f"COMM_WORLD has {n_ranks} ranks, but JAX sees {sees}: "
            "call shardload.initialize() first, before anything that uses JAX devices, and nothing else that starts JAX"
        )


def rank_of_process(group: Group) -> dict[int, int]:
    """The rank in `group` of each JAX process. Collective the first time.

    Raises
    ------
    ConfigError, PeerError
        If MPI and JAX do not see the same processes; the text says which launcher flag or call is missing.
    """
    n_processes = jax.process_count()
    comm = world()
    if comm is None:
        if n_processes == 1:
            if (step := slurm_step(os.environ)) is not None and step.n_tasks > 1:
                raise ConfigError(
                    f"srun started {step.n_tasks} tasks, but JAX sees one process: call shardload.initialize() first, before "
                    "anything that uses JAX devices"
                )
            refuse_singletons()
        return {process: process for process in range(n_processes)} if group.size > 1 else {jax.process_index(): 0}
    if comm.size == 1 and n_processes == 1:
        refuse_singletons()
    _refuse_mismatch(comm.size, n_processes)
    table: dict[int, int] = {}
    for rank, process in enumerate(group.processes(jax.process_index())):
        if process in table:
            raise PeerError(
                f"ranks {table[process]} and {rank} are both JAX process {process} of {n_processes}: JAX was not started from "
                "this MPI job. Call shardload.initialize() first, before anything that uses JAX devices"
            )
        table[process] = rank
    return table
