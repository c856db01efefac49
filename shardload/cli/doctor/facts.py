"""What does this process see of its job?

One `Facts` per rank: plain values, so that they can be sent, compared, made up in a test, and printed as JSON. Gathering them
never raises: something missing is a fact too.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import Any, TypeVar

import jax

from shardload.comm.group import Group
from shardload.comm.mpi import launched, library_name, mpi_problem, task, thread_level, world_rank_and_size
from shardload.system.gpus import gpu_files

# Variables that show how the job was started, or that change its behaviour.
_VARIABLES: tuple[str, ...] = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD",
    "OMPI_MCA_mpi_yield_when_idle",
)
_VARIABLES += tuple(f"SHARDLOAD_{name}" for name in ("MPI", "RANKS_PER_NODE", "SHARED_MEMORY"))
_VARIABLES += tuple(
    f"SLURM_{name}" for name in ("JOB_ID", "STEP_ID", "PROCID", "NTASKS", "STEP_NUM_TASKS", "LOCALID", "NODEID", "GPUS_ON_NODE")
)
_PACKAGES = ("jax", "jaxlib", "numpy", "mpi4py", "h5py", "zarr")
_SHARED_NBYTES = 1 << 20  # shared between the ranks of a node, to see whether that works

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What one process sees.

    Attributes
    ----------
    host : str
        The host's name.
    task : int
        The launcher's number for this process.
    launcher, n_launched : str, int
        What started the process, and how many tasks it started; empty and 1 if no launcher is recognized.
    rank, size : int
        In COMM_WORLD, or among JAX's processes where there is no MPI.
    mpi_size : int
        Size of COMM_WORLD; 1 without MPI.
    mpi_library, mpi_threads, mpi_problem : str
        Name and version, thread level, and the reason if there is no MPI.
    jax_process, jax_processes : int or None
        Process index and number of processes; None if JAX was not started.
    platform : str
        Platform of JAX's devices: cpu or gpu.
    devices : tuple of int
        Ids of this process's devices.
    n_devices : int
        Number of devices in the job.
    gpus : tuple of str
        A name for each GPU that this process uses, equal on ranks that use the same GPU.
    n_gpus : int
        GPUs of this node that the operating system shows.
    jax_problem : str
        Why JAX could not be started.
    environ : dict of str to str
        The environment variables that matter, as far as they are set.
    cores : tuple of int
        CPU cores on which it may run.
    versions : dict of str to str
        Versions of Python and of installed packages.
    node : tuple of int
        The ranks on the same node, including its own: from MPI, or from host names without MPI.
    shares_memory : bool
        Whether it could read the memory of the other ranks in `node`.
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
    versions: dict[str, str] = field(default_factory=dict)
    node: tuple[int, ...] = (0,)
    shares_memory: bool = True


def before_jax(environ: Mapping[str, str]) -> Facts:
    """The facts that are known before JAX has devices. Starts MPI."""
    from shardload import __version__  # a folder on PYTHONPATH has no metadata

    launcher, n_launched = launched(environ)
    versions = {name: _or("", lambda name=name: metadata.version(name)) for name in _PACKAGES}  # type: ignore[misc]
    rank, size = world_rank_and_size()
    return Facts(
        host=_or("", socket.gethostname),
        task=task(environ),
        launcher=launcher,
        n_launched=n_launched,
        rank=rank,
        size=size,
        mpi_size=size,
        mpi_problem=mpi_problem(),
        n_gpus=_or(0, lambda: len(gpu_files())),
        environ={name: environ[name] for name in _VARIABLES if name in environ},
        cores=_or((), lambda: tuple(sorted(os.sched_getaffinity(0)))),
        versions={"python": platform.python_version(), "shardload": __version__} | {n: v for n, v in versions.items() if v},
    )


def with_node(facts: Facts, group: Group) -> Facts:
    """`facts`, completed with what MPI says about itself and this node. Collective."""
    ranks, segments = group.node.ranks, group.node.shared_memory(_SHARED_NBYTES)
    return replace(
        facts,
        mpi_library=_or("unknown", library_name),
        mpi_threads=_or("", thread_level),
        node=ranks,
        shares_memory=len(ranks) == 1 or bool(segments),
    )


def with_jax(facts: Facts) -> Facts:
    """`facts`, completed with what JAX sees. The first call starts JAX's devices, and so waits for the other processes."""
    try:
        local = jax.local_devices()
        return replace(
            facts,
            jax_process=jax.process_index(),
            jax_processes=jax.process_count(),
            platform=local[0].platform if local else jax.default_backend(),
            devices=tuple(int(device.id) for device in local),
            n_devices=jax.device_count(),
            gpus=tuple(_gpu_name(device) for device in local if device.platform in ("gpu", "cuda")),
        )
    except Exception as error:  # JAX, its plugins or its drivers: report whatever they raise
        return replace(facts, jax_problem=f"{type(error).__name__}: {error}")


def to_json(facts: Facts) -> str:
    """`facts` as one line."""
    return json.dumps(asdict(facts))


def from_json(text: str) -> Facts:
    """What `to_json` wrote."""
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(text).items()}
    return Facts(**values)


def _or(missing: T, find: Callable[[], T]) -> T:
    try:
        return find()
    except Exception:  # not available on this system, which is a fact too
        return missing


def _gpu_name(device: Any) -> str:
    """A name of this device's GPU, the same in every process whatever its CUDA_VISIBLE_DEVICES is."""
    ordinal = getattr(device, "local_hardware_id", None)
    ordinal = int(device.id if ordinal is None else ordinal)
    return _or(f"number {ordinal}", lambda: _uuid(ordinal))


def _uuid(ordinal: int) -> str:
    # From the driver, which JAX has started. CUDA_VISIBLE_DEVICES is not enough: under Slurm each task of a node may see its
    # own GPU as number 0.
    driver = ctypes.CDLL("libcuda.so.1")
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), ordinal):
        raise OSError(f"no GPU {ordinal}")
    if driver.cuDeviceGetUuid(ctypes.byref(uuid), device):
        raise OSError(f"no name for GPU {ordinal}")
    return "GPU-" + bytes(uuid).hex()
