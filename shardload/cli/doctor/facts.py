"""What does this process see of the job that it is part of?

One `Facts` a rank: plain values, so that they can be sent, compared, made up in a test, and printed as JSON. Gathering them
never raises: what is not there is a fact too.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import Any, TypeVar

import jax

from shardload.comm.environment import gpu_files, launched, task
from shardload.comm.group import Group
from shardload.comm.mpi import library_version, mpi_problem, thread_level, world_rank_and_size

__all__ = ["SHARED_NBYTES", "Facts", "before_jax", "from_json", "to_json", "with_jax", "with_node"]

# What tells how a job was started, and what changes what comes of it.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
    "HDF5_USE_FILE_LOCKING",
    "SHARDLOAD_MPI",
    "SHARDLOAD_RANKS_PER_NODE",
    "SHARDLOAD_SHARED_MEMORY",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD",
    "OMPI_MCA_mpi_yield_when_idle",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_GPUS_ON_NODE",
)
_PACKAGES = ("shardload", "jax", "jaxlib", "numpy", "mpi4py", "h5py", "zarr")
SHARED_NBYTES = 8 << 20  # of memory that the ranks of a node share, to see whether they can and how fast it is

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What one process sees.

    Attributes
    ----------
    host : str
        Its own name.
    task : int
        Its number as the launcher counts.
    launcher, n_launched : str, int
        Who started it with how many others; empty and 1 where nobody says so.
    rank, size : int
        In the group that examines: COMM_WORLD, or JAX's processes where there is no MPI.
    mpi_size : int
        Of COMM_WORLD; 1 without MPI.
    mpi_library, mpi_threads, mpi_problem : str
        Name and version, thread level, and why there is no MPI.
    jax_process, jax_processes : int or None
        None where JAX was not started.
    platform : str
        Of JAX's devices: cpu, gpu.
    devices : tuple of int
        Ids of this process's devices.
    n_devices : int
        Devices of the job.
    gpus : tuple of str
        Which GPUs those of its devices are that are GPUs: the same names on ranks that use the same ones.
    n_gpus : int
        GPUs of this node that the system shows.
    jax_problem : str
        Why JAX could not be started.
    environ : dict of str to str
        The variables looked at, where they are set.
    cores : tuple of int
        Where it may run.
    shm_nbytes : int or None
        Free in /dev/shm; None where there is none.
    n_files : int
        Files it may have open.
    versions : dict of str to str
        Of python and of packages that are installed.
    node : tuple of int
        The ranks with which it shares a machine, as MPI says (or the names of the hosts, without MPI), itself among them.
    shares_memory : bool
        Whether it could look into the memory of the other ranks in `node`.
    """

    host: str = ""
    task: int = 0
    launcher: str = ""
    n_launched: int = 1
    rank: int = 0
    size: int = 1
    mpi_size: int = 1
    mpi_library: str = ""
    mpi_threads: str = ""
    mpi_problem: str = ""
    jax_process: int | None = None
    jax_processes: int | None = None
    platform: str = ""
    devices: tuple[int, ...] = ()
    n_devices: int = 0
    gpus: tuple[str, ...] = ()
    n_gpus: int = 0
    jax_problem: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    shm_nbytes: int | None = None
    n_files: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    node: tuple[int, ...] = (0,)
    shares_memory: bool = True


def before_jax(environ: Mapping[str, str]) -> Facts:
    """What can be known before JAX has devices. Starts MPI."""
    launcher, n_launched = launched(environ)
    facts = Facts(
        host=_or("", socket.gethostname),
        task=task(environ),
        launcher=launcher,
        n_launched=n_launched,
        n_gpus=_or(0, lambda: len(gpu_files())),
        environ={name: environ[name] for name in _VARIABLES if name in environ},
        cores=_or((), lambda: tuple(sorted(os.sched_getaffinity(0)))),
        shm_nbytes=_or(None, lambda: shutil.disk_usage("/dev/shm").free),
        n_files=_or(0, lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        versions={"python": platform.python_version()} | _versions(),
    )
    if facts.n_files == resource.RLIM_INFINITY:
        facts = replace(facts, n_files=1 << 30)
    problem = mpi_problem()
    if problem:
        return replace(facts, mpi_problem=problem)
    rank, size = world_rank_and_size()
    return replace(facts, rank=rank, size=size, mpi_size=size)


def with_node(facts: Facts, group: Group) -> Facts:
    """`facts`, and what the group says of MPI and of this machine. Collective."""
    if not group.has_mpi:
        return facts
    ranks = group.node.ranks
    return replace(
        facts,
        mpi_library=_or("unknown", lambda: _library_name(library_version())),
        mpi_threads=_or("", thread_level),
        node=ranks,
        shares_memory=len(ranks) == 1 or bool(group.shared_memory(SHARED_NBYTES)),
    )


def with_jax(facts: Facts) -> Facts:
    """`facts`, and what JAX sees; the first call starts its devices, and so waits for the other processes."""
    try:
        local = jax.local_devices()
        return replace(
            facts,
            jax_process=jax.process_index(),
            jax_processes=jax.process_count(),
            platform=local[0].platform if local else jax.default_backend(),
            devices=tuple(int(device.id) for device in local),
            n_devices=jax.device_count(),
            gpus=_gpus(local),
        )
    except Exception as error:  # whatever JAX, its plugins and drivers raise is what is to be told
        return replace(facts, jax_problem=f"{type(error).__name__}: {error}")


def to_json(facts: Facts) -> str:
    """`facts` as one line."""
    return json.dumps(asdict(facts))


def from_json(text: str) -> Facts:
    """What `to_json` wrote."""
    found: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(text).items()}
    return Facts(**found)


def _or(missing: T, find: Callable[[], T]) -> T:
    try:
        return find()
    except Exception:  # a system without it: that is the fact
        return missing


def _versions() -> dict[str, str]:
    found = {name: _or("", lambda name=name: metadata.version(name)) for name in _PACKAGES}  # type: ignore[misc]
    from shardload import __version__  # a folder on PYTHONPATH has no metadata

    found["shardload"] = __version__
    return {name: version for name, version in found.items() if version}


def _library_name(text: str) -> str:
    r"""Name and version, of what may be a page: Open MPI's ends in a comma, MPICH's goes on for lines.

    >>> _library_name("MPICH Version:      5.0.2\nMPICH Release date: ..."), _library_name("Open MPI v5.0.8, package: ...")
    ('MPICH 5.0.2', 'Open MPI v5.0.8')
    >>> _library_name("MPI VERSION    : CRAY MPICH version 8.1.28 (ANL base 3.4a2)\nMPI BUILD INFO : ...")
    'CRAY MPICH version 8.1.28 (ANL base 3.4a2)'
    """
    line = text.partition("\n")[0].partition(",")[0].replace("Version:", "")
    return " ".join(line.split()).removeprefix("MPI VERSION : ")


def _gpus(devices: list[Any]) -> tuple[str, ...]:
    """Names of the GPUs behind these devices that do not depend on what each process may see of them."""
    own = [device for device in devices if device.platform in ("gpu", "cuda")]
    return tuple(_or(f"number {_ordinal(device)}", lambda device=device: _uuid(_ordinal(device))) for device in own)  # type: ignore[misc]


def _ordinal(device: Any) -> int:
    found = getattr(device, "local_hardware_id", None)
    return int(device.id if found is None else found)


def _uuid(ordinal: int) -> str:
    # Asked of the driver, which JAX has started. CUDA_VISIBLE_DEVICES would not tell: under Slurm each task of a node may
    # see a GPU of its own, and each call it 0.
    driver = ctypes.CDLL("libcuda.so.1")
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), ordinal):
        raise OSError(f"no GPU {ordinal}")
    if driver.cuDeviceGetUuid(ctypes.byref(uuid), device):
        raise OSError(f"no name for GPU {ordinal}")
    return "GPU-" + bytes(uuid).hex()
