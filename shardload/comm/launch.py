"""Do MPI and JAX see the same job?

MPI ranks and JAX processes are started by different means and know nothing of each other. `initialize` starts JAX from MPI;
`rank_of_process` says which rank is which process, or, where the two do not match, which of them is wrong and what to type.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import jax
import numpy as np

from shardload.comm.coordinator import LOOPBACK, addresses_of, await_listener, first_here, host_of, join, listening_host
from shardload.comm.environment import free_port, gpu_files, is_free, launched, mpi_is_off, slurm_step
from shardload.comm.group import Group, group_of
from shardload.comm.mpi import end_job, mpi_problem, world
from shardload.comm.tracebacks import is_pythons_own, show
from shardload.errors import ConfigError, PeerError, StallError

__all__ = ["initialize", "rank_of_process"]

_log = logging.getLogger("shardload")

# What to say where a launcher started several tasks, and MPI did not notice.
_UNNOTICED = {
    "srun": (
        "srun started {n} tasks, but MPI was not told: add --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI) to srun; "
        "'srun --mpi=list' shows what this cluster has. If you typed mpiexec, take the one of the library that mpi4py uses"
    ),
    "mpirun": (
        "Open MPI's mpirun started {n} tasks, but mpi4py uses another MPI library: use the mpiexec of that library, "
        "or MPI4PY_LIBMPI=/path/to/openmpi/lib/libmpi.so, or rebuild mpi4py against Open MPI"
    ),
    "mpiexec": (
        "an MPICH-like mpiexec started {n} tasks, but mpi4py uses another MPI library: use the mpirun of that library, "
        "or MPI4PY_LIBMPI=/path/to/mpich/lib/libmpi.so, or rebuild mpi4py against this MPI"
    ),
}
_NO_MPI_HERE = (
    "MPI cannot be loaded (%s): JAX starts from Slurm's variables alone, and every process will read for itself. "
    "If that is meant, say so with SHARDLOAD_MPI=0"
)
_NO_MPI = (
    "no MPI library can be loaded ({problem}). On a cluster load the site's MPI module and build mpi4py against it "
    "(pip install --no-binary=mpi4py mpi4py); on one machine: pip install 'shardload[mpich]'"
)

_BIND = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's own variable
_PREEMPTION = "jax_enable_preemption_service"  # its option
_LAST_WORDS_SECONDS = 1.0  # of the other ranks, which may be about to say the same

_WITHOUT = "To do without MPI, every process reading for itself: SHARDLOAD_MPI=0"


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: list[int] | None = None,
    preemption: bool = False,
) -> None:
    """Start JAX's distributed runtime the way this job was launched, and check that all of it sees the same job.

    1. Given a coordinator: as told, without a look at MPI or Slurm.
    2. Under MPI (mpiexec, mpirun, ``srun --mpi=pmi2`` or ``pmix``): one JAX process per rank, process index equal to the rank.
    3. Under srun where there is no MPI (``SHARDLOAD_MPI=0``; or none can be loaded, of which task 0 warns): one JAX process
       per task.
    4. A process alone: nothing to start.

    JAX's coordinator, in process 0, asks nobody who he is: it listens on the loopback interface if all processes are on one
    machine, and else on the one interface that the others come by. ``JAX_COORDINATOR_BIND_ADDRESS`` says otherwise.

    SIGTERM, which ``scancel``, ``timeout`` and batch systems send, ends a process at once, unless the script has a handler of
    its own.

    Under MPI an exception that nobody catches ends the whole job from then on, after its traceback; the other processes would
    wait for that one.

    A process takes all GPUs that it alone sees (``--gpus-per-task``), and else its share of those that the processes of a
    node see together. Does nothing where JAX was started already. Call it before anything that uses JAX devices.

    Collective: yes, over COMM_WORLD (or the processes that are to be).

    Parameters
    ----------
    coordinator_address : str, optional
        ``"host:port"`` of process 0; `num_processes` and `process_id` go with it.
    num_processes, process_id : int, optional
        How many processes there are, and which one this is.
    local_device_ids : list of int, optional
        GPUs of this process, of those that it sees; by default decided as above.
    preemption : bool
        Whether JAX's preemption service is to be started: it takes SIGTERM for a notice, which a program must ask for
        (``jax.experimental.multihost_utils.reached_preemption_sync_point``); SIGTERM then ends nothing.

    Raises
    ------
    ConfigError
        If the launcher started several tasks that MPI does not know of, if JAX was started with other processes than MPI has,
        if no MPI library can be loaded, if processes would share GPUs, or if JAX devices were used already. The text says what
        to type.
    """
    comm = world()
    if _is_initialized():
        _check_started(comm)
        return
    if (coordinator_address, num_processes, process_id) != (None, None, None):
        if coordinator_address is None or num_processes is None or process_id is None:
            raise ConfigError(
                "initialize() was given only a part of where JAX starts: pass coordinator_address='host:port', num_processes= "
                "and process_id= together, or none of them under mpiexec or srun"
            )
        port = coordinator_address.rpartition(":")[2]
        if not host_of(coordinator_address) or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"coordinator_address is {coordinator_address!r}; expected 'host:port', as in 'node1:61440'")
        _start(
            coordinator_address,
            num_processes,
            process_id,
            local_device_ids,
            preemption,
            _listen_at(coordinator_address, process_id),
        )
        return
    if comm is not None and comm.size > 1:
        _start_from_mpi(comm, local_device_ids, preemption)
        return
    step = slurm_step(os.environ)
    if comm is None and step is not None and step.n_tasks > 1:
        if local_device_ids is None and not _cpu_only():
            local_device_ids = _device_share(step.local_id, step.n_local, None, os.environ)
        if step.task == 0 and not mpi_is_off(os.environ):
            _log.warning(_NO_MPI_HERE, mpi_problem())
        _start(step.coordinator, step.n_tasks, step.task, local_device_ids, preemption, _listen_at(step.coordinator, step.task))
        return
    _refuse_singletons()


def _start_from_mpi(comm: Any, local_device_ids: list[int] | None, preemption: bool) -> None:
    group = group_of(comm)
    on_node = comm.Split_type(group.mpi.COMM_TYPE_SHARED)
    visible = zlib.crc32(os.environ.get("CUDA_VISIBLE_DEVICES", "all").encode())
    mine = np.array([visible, group.rank], dtype=np.int64)
    seen = np.empty((on_node.size, 2), dtype=np.int64)
    on_node.Allgather(mine, seen)
    local_rank, local_size = on_node.rank, on_node.size
    on_node.Free()
    address, bind = _meeting_place(group, is_beside_0=not seen[:, 1].min())
    error: Exception | None = None
    try:
        if local_device_ids is None and not _cpu_only():
            local_device_ids = _device_share(local_rank, local_size, bool((seen[:, 0] == visible).all()), os.environ)
    except ConfigError as found:
        error = found
    group.agree(error)  # before any of them waits for the others in JAX
    try:
        _start(address, group.size, group.rank, local_device_ids, preemption, bind)
    except ConfigError as found:
        error = found
    group.agree(error)
    _end_job_on_error()


def _meeting_place(group: Group, is_beside_0: bool) -> tuple[str, str | None]:
    """Where the processes come to, and where process 0 listens (None: on all interfaces). Collective.

    `is_beside_0`: whether this rank is on the machine of rank 0.
    """
    host, port = group.send_text(f"{socket.gethostname()} {free_port()}" if group.rank == 0 else None, 0).split()
    elsewhere = int(group.gather_int(group.size if is_beside_0 else group.rank).min())
    if elsewhere == group.size:
        return (join(LOOPBACK, port),) * 2
    # What rank 0 finds under its own name is often an address of its own use.
    known = addresses_of(host)
    seen = group.send_text(" ".join(known) if group.rank == elsewhere else None, elsewhere).split()
    found = group.send_text(first_here(seen) if group.rank == 0 else None, 0)
    if not found:
        if group.rank == 0:
            _say_on_all(host, port)
        return join(host, port), None
    # The name where it serves: it is what a proxy's exceptions know.
    return join(host if found in known else found, port), join(found, port)


def _listen_at(address: str, process: int) -> str | None:
    """Where process 0 listens if all were told to come to `address`; None: on all interfaces, or this is another process."""
    if process:
        return None
    host, port = host_of(address), address.rpartition(":")[2]
    found = listening_host(host)
    if not found:
        _say_on_all(host, port)
        return None
    return join(found, port)


def _say_on_all(host: str, port: str) -> None:
    """Say that there is nothing better, unless the user has said what is."""
    if not os.environ.get(_BIND):
        _log.warning(
            "JAX's coordinator will listen on all interfaces of this machine, at port %s, and anybody who reaches it can end "
            "the job: the address that the other processes find under %s is not known here. %s=ADDRESS:%s names the interface",
            *(port, host, _BIND, port),
        )


def _end_job_on_error() -> None:
    """Have an exception that nobody catches end the job.

    Otherwise the process waits at its exit, in JAX's shutdown, for the others, minutes long, and they wait for it in the next
    collective call. Not in an interactive session, and not where somebody has a hook of their own.
    """
    if not is_pythons_own():
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        if not isinstance(error, StallError):  # which ends the job by itself, when the others have heard of it
            end_job(_LAST_WORDS_SECONDS)

    sys.excepthook = hook


def _start(
    address: str, n_processes: int, process: int, local_device_ids: list[int] | None, preemption: bool, bind: str | None
) -> None:
    _choose_cpu_collectives()
    if process:
        await_listener(address)
    else:
        _refuse_taken_port(address)
    if os.environ.get(_BIND):
        bind = None  # JAX itself looks there
    try:
        with _preemption_service(preemption):
            jax.distributed.initialize(address, n_processes, process, local_device_ids, coordinator_bind_address=bind)
    except (RuntimeError, ValueError) as found:
        raise ConfigError(
            f"JAX could not be started as one of {n_processes} processes: {found}. Call shardload.initialize() once, at the "
            "top of the script, before anything that uses JAX devices"
        ) from found


@contextmanager
def _preemption_service(wanted: bool) -> Iterator[None]:
    """Have JAX start its preemption service, or not: it catches SIGTERM, and waits until a program asks for it."""
    if hasattr(jax.config, _PREEMPTION):
        jax.config.update(_PREEMPTION, wanted)
        yield
        return
    from jax._src import distributed  # releases without that option always start it, here

    state: Any = distributed.global_state
    if not wanted:
        state.initialize_preemption_sync_manager = _nothing
    try:
        yield
    finally:
        if not wanted:
            del state.initialize_preemption_sync_manager


def _nothing() -> None: ...


def _refuse_taken_port(address: str) -> None:
    """ConfigError where somebody else has the port: JAX would end this process by a segmentation fault."""
    port = address.rpartition(":")[2]
    if port.isdecimal() and 0 < int(port) < 65536 and not is_free(int(port)):
        raise ConfigError(
            f"JAX cannot be started at {address}: another process of this machine ({socket.gethostname()}) has port {port}. "
            "Pass another port in coordinator_address= (under srun without MPI the port follows from the job's and the step's "
            "number: start the step again), or end the other process: 'ss -ltnp' lists who listens"
        )


def _check_started(comm: Any) -> None:
    """JAX runs already: are its processes the ranks?"""
    from jax._src import distributed  # `jax.process_count()` would start the devices

    n_processes = distributed.global_state.num_processes or 1
    if comm is not None and comm.size > 1 and n_processes not in (1, comm.size):
        raise ConfigError(
            f"COMM_WORLD has {comm.size} ranks, but JAX was started with {n_processes} processes: start it with "
            "shardload.initialize() alone, or give jax.distributed.initialize one process per rank"
        )
    if comm is not None and comm.size == 1 and n_processes > 1:
        raise ConfigError(_singletons(n_processes))


def _is_initialized() -> bool:
    known = getattr(jax.distributed, "is_initialized", None)
    if known is not None:
        return bool(known())
    from jax._src import distributed  # before JAX 0.5 there is no public way to ask

    return distributed.global_state.client is not None


def _choose_cpu_collectives() -> None:
    # Without an implementation, collectives between CPU processes fail; older releases have none by default.
    if getattr(jax.config, "jax_cpu_collectives_implementation", "gloo") in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")


def _device_share(local_rank: int, local_size: int, see_alike: bool | None, environ: Mapping[str, str]) -> list[int] | None:
    """Which GPUs of those it sees a process takes; None for all of them (or where there are none).

    `see_alike`: whether all processes of this node have the same CUDA_VISIBLE_DEVICES; None where nobody knows. Where they
    differ, or there is only one process, each has its own. Else each takes its share, in order.

    >>> _device_share(2, 4, True, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    [2]
    >>> _device_share(1, 2, True, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    [2, 3]
    >>> _device_share(2, 4, False, {"CUDA_VISIBLE_DEVICES": "2"}) is None
    True
    """
    if local_size == 1 or see_alike is False:
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    n = len(gpu_files()) if visible is None else len([v for v in visible.split(",") if v])
    if n == 0 or (n == 1 and see_alike is None):  # one GPU, and nobody knows better: --gpus-per-task=1
        return None
    if n % local_size:
        raise ConfigError(
            f"{local_size} processes of this node see the same {n} GPU{'s' * (n > 1)}: start one process per GPU "
            f"(--ntasks-per-node={n}), give each task its own (--gpus-per-task=1), or pass local_device_ids= to initialize()"
        )
    each = n // local_size
    return [*range(local_rank * each, (local_rank + 1) * each)]


def _cpu_only() -> bool:
    return str(getattr(jax.config, "jax_platforms", None) or "").partition(",")[0] == "cpu"


def _unnoticed() -> str:
    """What a launcher says of several tasks, where MPI says there is one; empty where all is well."""
    launcher, n = launched(os.environ)
    return _UNNOTICED[launcher].format(n=n) if launcher else ""


def _refuse_singletons() -> None:
    unnoticed = _unnoticed()
    if world() is None:
        if unnoticed:
            raise ConfigError(_NO_MPI.format(problem=mpi_problem()))
    elif unnoticed:
        raise ConfigError(f"every process believes that it is alone: COMM_WORLD has size 1. {unnoticed}. {_WITHOUT}")


def _singletons(n_processes: int) -> str:
    hint = _unnoticed() or "start the job with the mpiexec or srun that belongs to mpi4py's MPI library"
    return (
        f"JAX sees {n_processes} processes, but COMM_WORLD has size 1: MPI was started as {n_processes} singletons. {hint}. "
        f"{_WITHOUT}"
    )


def rank_of_process(group: Group) -> dict[int, int]:
    """The rank, in `group`, of each JAX process in it. Collective the first time.

    Raises
    ------
    ConfigError, PeerError
        If MPI and JAX do not see the same processes; the text says which launcher flag or call is missing.
    """
    n_processes = jax.process_count()
    comm = world()
    if comm is None:
        if n_processes == 1:
            _refuse_singletons()
        return {process: process for process in range(n_processes)} if group.size > 1 else {jax.process_index(): 0}
    if comm.size == 1 and n_processes == 1:
        _refuse_singletons()
    elif comm.size == 1:
        raise ConfigError(_singletons(n_processes))
    elif n_processes == 1:
        raise ConfigError(
            f"COMM_WORLD has {comm.size} ranks, but JAX sees one process. Call shardload.initialize() first, before anything "
            "that uses JAX devices"
        )
    elif comm.size != n_processes:
        raise ConfigError(
            f"COMM_WORLD has {comm.size} ranks, but JAX sees {n_processes} processes: start one JAX process per rank, "
            "with shardload.initialize()"
        )
    table: dict[int, int] = {}
    for rank, process in enumerate(group.processes(jax.process_index())):
        if process in table:
            raise PeerError(
                f"ranks {table[process]} and {rank} are both JAX process {process} of {n_processes}: JAX was not started from "
                "this MPI job. Call shardload.initialize() first, before anything that uses JAX devices"
            )
        table[process] = rank
    return table
