"""Which launcher started this process? Reads the environment variables of launchers and Slurm, independently of MPI.

No MPI, no JAX.
"""

from __future__ import annotations

import errno
import glob
import random
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

# How many tasks a launcher started. For Slurm that of the step: a batch script has SLURM_NTASKS too, but is one process.
_LAUNCHERS = {"mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE", "srun": "SLURM_STEP_NUM_TASKS"}
# The number of a task, as the same launchers count.
_TASKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
# Ports for JAX's coordinator, the same range as in JAX: above the ports that the system gives to outgoing connections.
_PORTS = range(61440, 65536)


def launched(environ: Mapping[str, str]) -> tuple[str, int]:
    """The launcher that started several tasks, and how many; the innermost if one launcher started another.

    >>> launched({"SLURM_STEP_NUM_TASKS": "4"}), launched({"SLURM_NTASKS": "4"}), launched({"PMI_SIZE": "1"})
    (('srun', 4), ('', 1), ('', 1))
    >>> launched({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "8"}), launched({"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "4"})
    (('mpiexec', 8), ('srun', 4))
    """
    told = {launcher: environ.get(variable, "") for launcher, variable in _LAUNCHERS.items()}
    if told["mpiexec"] == told["srun"]:  # srun --mpi=pmi2 sets what an MPICH-like mpiexec sets
        del told["mpiexec"]
    for launcher, n in told.items():
        if n.isdecimal() and int(n) > 1:
            return launcher, int(n)
    return "", 1


def task(environ: Mapping[str, str]) -> int:
    """The number of this task, as its launcher counts; 0 without a launcher.

    >>> task({"SLURM_PROCID": "3"}), task({"SLURM_PROCID": "0", "PMI_RANK": "2"}), task({})
    (3, 2, 0)
    """
    found = (environ.get(name, "") for name in _TASKS)
    return next((int(text) for text in found if text.isdecimal()), 0)


def mpi_is_off(environ: Mapping[str, str]) -> bool:
    """True if the user has turned MPI off.

    >>> mpi_is_off({"SHARDLOAD_MPI": "0"}), mpi_is_off({})
    (True, False)
    """
    return environ.get("SHARDLOAD_MPI") == "0"


def gpu_files() -> list[str]:
    """The device files of all NVIDIA GPUs of this node, including those that this process may not use."""
    return [path for path in glob.glob("/dev/nvidia[0-9]*") if path[len("/dev/nvidia") :].isdigit()]


@dataclass(frozen=True)
class SlurmStep:
    """The task of an srun step that this process is."""

    task: int
    n_tasks: int
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
    SlurmStep(task=3, n_tasks=6, local_id=1, n_local=2, coordinator='n3:61554')
    """
    try:
        job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
        n_tasks, task = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_PROCID"])
        local, node = int(environ.get("SLURM_LOCALID", "0")), int(environ.get("SLURM_NODEID", "0"))
    except (KeyError, ValueError):
        return None
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(found[1])] * int(found[2] or 1) if found else []
    n_local = counts[node] if node < len(counts) else 1
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or socket.gethostname()
    host = "127.0.0.1" if n_local == n_tasks else _first_node(nodes)
    # The port is the same for all tasks of a step, and different for two steps of a job.
    return SlurmStep(task, n_tasks, local, n_local, f"{host}:{_PORTS[(16 * job + step) % len(_PORTS)]}")


def free_port() -> int:
    """A port of this machine that is free now.

    The port is not chosen by the system: it could give that port to an outgoing connection before it is used.
    """
    for port in random.SystemRandom().sample(_PORTS, 64):
        if is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """True if a process could listen at this port now, on all addresses of this machine."""
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not count
        if both:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
        except OSError as found:
            return found.errno != errno.EADDRINUSE
    return True


def _first_node(nodes: str) -> str:
    """The first host of a list in Slurm's notation.

    >>> [_first_node(text) for text in ("n1", "n[1-4]", "gpu-[007,9-12],cpu1", "a,b")]
    ['n1', 'n1', 'gpu-007', 'a']
    """
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return (found[1] + (found[2] or "")) if found else nodes
