"""Do MPI and JAX see the same job?

MPI ranks and JAX processes are started by different means and know nothing of each other. `initialize` starts JAX from MPI;
`rank_of_process` says which rank is which process, or, where the two do not match, which of them is wrong and what to type.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import jax

from shardload.errors import ConfigError, PeerError
from shardload.group import Group, group_of, mpi_problem, world

__all__ = ["initialize", "rank_of_process"]

# What launchers say of the number of tasks they started, and what to say where MPI did not notice.
_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": (
        "srun started {n} tasks, but MPI was not told: add --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI) to srun; "
        "'srun --mpi=list' shows what this cluster has"
    ),
    "OMPI_COMM_WORLD_SIZE": (
        "Open MPI's mpirun started {n} tasks, but mpi4py uses another MPI library: use the mpiexec of that library, "
        "or MPI4PY_LIBMPI=/path/to/openmpi/lib/libmpi.so, or rebuild mpi4py against Open MPI"
    ),
    "PMI_SIZE": (
        "an MPICH-like mpiexec started {n} tasks, but mpi4py uses another MPI library: use the mpirun of that library, "
        "or MPI4PY_LIBMPI=/path/to/mpich/lib/libmpi.so, or rebuild mpi4py against this MPI"
    ),
}
_NO_MPI = (
    "no MPI library can be loaded ({problem}). On a cluster load the site's MPI module and build mpi4py against it "
    "(pip install --no-binary=mpi4py mpi4py); on one machine: pip install 'shardload[mpich]'"
)


def initialize() -> None:
    """Start JAX's distributed runtime from MPI: one JAX process per rank, process index equal to the rank.

    Does nothing for a single process, or when it has been done already. Call it before anything that uses JAX devices.
    Collective: yes, over COMM_WORLD.

    Raises
    ------
    ConfigError
        If the launcher started several tasks that MPI does not know of, if no MPI library can be loaded, or if JAX devices were
        used already. The text says what to type.
    """
    if _is_initialized():
        return
    comm = world()
    if comm is None or comm.size == 1:
        _refuse_singletons()
        return
    group = group_of(comm)
    error: Exception | None = None
    address = group.send_text(_free_address(group) if group.rank == 0 else None, 0)
    on_node = comm.Split_type(group.mpi.COMM_TYPE_SHARED)
    local_rank, local_size = on_node.rank, on_node.size
    on_node.Free()
    if local_size == group.size:
        address = "127.0.0.1:" + address.rpartition(":")[2]
    _choose_cpu_collectives()
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=group.size,
            process_id=group.rank,
            local_device_ids=_local_device_ids(local_rank, local_size, os.environ),
        )
    except RuntimeError as found:
        error = ConfigError(
            f"JAX could not be started as one of {group.size} processes: {found}. Call shardload.initialize() once, at the top "
            "of the script, before anything that uses JAX devices"
        )
        error.__cause__ = found
    group.agree(error)


def _is_initialized() -> bool:
    known = getattr(jax.distributed, "is_initialized", None)
    if known is not None:
        return bool(known())
    from jax._src import distributed  # before JAX 0.5 there is no public way to ask

    return distributed.global_state.client is not None


def _free_address(group: Group) -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{socket.gethostname()}:{probe.getsockname()[1]}"


def _choose_cpu_collectives() -> None:
    # Without an implementation, collectives between CPU processes fail; older releases have none by default.
    if getattr(jax.config, "jax_cpu_collectives_implementation", "gloo") in (None, "none"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")


def _local_device_ids(local_rank: int, local_size: int, environ: Mapping[str, str]) -> list[int] | None:
    """Which GPUs of those it sees a process takes: one each where ranks share a node, all of them where it sees its own.

    >>> _local_device_ids(2, 4, {}), _local_device_ids(2, 4, {"CUDA_VISIBLE_DEVICES": "2"}), _local_device_ids(0, 1, {})
    ([2], None, None)
    """
    visible = [v for v in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    return None if local_size == 1 or len(visible) == 1 else [local_rank]


def _launched(environ: Mapping[str, str]) -> str:
    """What a launcher says of several tasks, where MPI says there is one; empty where all is well."""
    for variable, text in _LAUNCHERS.items():
        n = environ.get(variable, "")
        # Slurm sets its variables for a batch script too, which is one process: only a step has a rank of its own.
        if n.isdigit() and int(n) > 1:
            return text.format(n=n)
    return ""


def _refuse_singletons() -> None:
    launched = _launched(os.environ)
    if world() is None:
        if launched:
            raise ConfigError(_NO_MPI.format(problem=mpi_problem()))
    elif launched:
        raise ConfigError(f"every process believes that it is alone: COMM_WORLD has size 1. {launched}")


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
        if n_processes > 1:
            raise ConfigError(_NO_MPI.format(problem=mpi_problem()))
        _refuse_singletons()
        return {jax.process_index(): 0}
    if comm.size == 1 and n_processes == 1:
        _refuse_singletons()
    elif comm.size == 1:
        hint = _launched(os.environ) or "start the job with the mpiexec or srun that belongs to mpi4py's MPI library"
        raise ConfigError(
            f"JAX sees {n_processes} processes, but COMM_WORLD has size 1: MPI was started as {n_processes} singletons. {hint}"
        )
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
