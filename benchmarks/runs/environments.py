"""Which environment does each way need, and is it installed? Commands that start the jobs, or what to install."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks.remote import RemoteError, RemoteJob
from tests.jobs.launch import job_command, job_environment

ROOT = Path(__file__).resolve().parents[2]
HEAT = ROOT / ".venv-heat"
SYSTEM_PYTHON = Path("/usr/bin/python3")
DEBIAN_PACKAGES = "python3-h5py-mpi python3-mpi4py openmpi-bin"
# In this order: torch alone first, so that nothing chooses another; Heat without its torchvision (see peers/heat.py).
HEAT_STEPS = (
    ("torch==2.13.0",),
    ("scipy", "mpi4py", "mpich", "h5py", "zarr>=3.1.3", "hdf5plugin"),
    ("--no-deps", "heat==1.8.0"),
)


def heat_python() -> Path:
    """The interpreter of Heat's environment; SHARDLOAD_BENCHMARK_HEAT names another folder."""
    return Path(os.environ.get("SHARDLOAD_BENCHMARK_HEAT", HEAT)) / "bin" / "python"


def make_heat() -> None:
    """Make Heat's environment, once. PyTorch is large: this takes a minute or more."""
    python = heat_python()
    if _imports(python, "mpi4py", "heat"):
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(python.parents[1])], check=True)
    for step in HEAT_STEPS:
        subprocess.run([str(python), "-m", "pip", "install", "-q", *step], check=True)


def add_peers() -> None:
    """Find packages of other ways in the folder SHARDLOAD_BENCHMARK_PEERS too (``pip install --target``), after all others."""
    folder = os.environ.get("SHARDLOAD_BENCHMARK_PEERS", "")
    if folder and folder not in sys.path:
        sys.path.append(folder)


@cache
def missing(job: str) -> str:
    """Why a job cannot run here, and what to install; empty where it can."""
    if job == "heat" and not _imports(heat_python(), "mpi4py", "heat"):
        return "Heat has no environment yet: python -m benchmarks heat"
    if job == "orbax":
        add_peers()
        if importlib.util.find_spec("orbax") is None:
            return "Orbax is not installed: pip install orbax-checkpoint"
    if job == "parallel-hdf5":
        script = "import h5py, mpi4py, sys; sys.exit(not h5py.get_config().mpi)"
        there = SYSTEM_PYTHON.exists() and shutil.which("mpiexec.openmpi")
        if (
            not there
            or subprocess.run([SYSTEM_PYTHON, "-c", script], env=_system_env(os.environ), capture_output=True).returncode
        ):
            return f"no h5py built with MPI: on Debian and Ubuntu, apt-get install {DEBIAN_PACKAGES}"
    return ""


def start(job: str, n: int, program: Sequence[str] | None = None, devices: int = 1) -> RemoteJob:
    """Start the ranks of a job, with so many devices each; `program` replaces the JAX job's arguments to the interpreter."""
    why = missing(job)
    if why:
        raise RemoteError(why)
    env = job_environment(n, devices_per_process=devices) | {"PYTHONPATH": str(ROOT), "HDF5_PLUGIN_PATH": _hdf5_plugins()}
    if job == "jax":
        return RemoteJob(job, job_command(program or ["-m", "benchmarks.peers.job"], n), n, env)
    if job == "floor":
        return RemoteJob(job, job_command(["-m", "benchmarks.peers.floor"], n), n, env)
    if job == "heat":
        return RemoteJob(job, job_command(["-m", "benchmarks.peers.heat"], n, python=heat_python()), n, env)
    command = ["mpiexec.openmpi", "--oversubscribe", "--bind-to", "none", "-n", str(n)]
    command += [str(SYSTEM_PYTHON), "-m", "benchmarks.peers.parallel_hdf5"]
    return RemoteJob(job, command, n, _system_env(env))


def _system_env(env: Mapping[str, str]) -> dict[str, str]:
    """For Debian's Python: none of this environment's libraries."""
    added = {
        "H5PY_ALWAYS_USE_MPI": "1",  # Debian's h5py is two, one with MPI
        "OMPI_ALLOW_RUN_AS_ROOT": "1",  # containers are root
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl_base_warn_component_unused": "0",
    }
    return {**{k: v for k, v in env.items() if k != "VIRTUAL_ENV"}, **added}


def _hdf5_plugins() -> str:
    """hdf5plugin's filters, for the HDF5 libraries of the other environments."""
    found = importlib.util.find_spec("hdf5plugin")
    return "" if found is None or found.origin is None else str(Path(found.origin).parent / "plugins")


def _imports(python: Path, *packages: str) -> bool:
    if not python.exists():
        return False
    script = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {packages!r})))"
    return subprocess.run([python, "-c", script], capture_output=True).returncode == 0
