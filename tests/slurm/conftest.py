"""One cluster for all tests here, and what a job on it needs of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs.launch import PATHS, job_environment, mpiexec_of
from tests.slurm.cluster import Cluster

MANY = 1000  # ranks: always more than cores


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


@pytest.fixture(scope="session")
def site() -> Callable[..., dict[str, str]]:
    """The variables that the scripts document, for this machine: which Python, which --mpi, CPU devices for GPUs."""

    def variables(mpi: str = "mpich", devices: int = 1) -> dict[str, str]:
        library = job_environment(MANY, mpi=mpi, devices_per_process=devices)
        # Unbuffered, gloo would write a line in pieces, which mix with those of other processes.
        of_library = {k: v for k, v in library.items() if os.environ.get(k) != v and k != "PYTHONUNBUFFERED"}
        launchers = str(mpiexec_of(mpi).parent)
        return {
            **of_library,
            "JAX_PLATFORMS": "cpu",
            # Between nodes as between real ones, not through the memory of the machine below.
            **{"mpich": {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}, "openmpi": {"UCX_TLS": "tcp,self"}}[mpi],
            "PATH": os.pathsep.join([launchers, os.environ["PATH"]]),
            "PYTHONPATH": PATHS,
            "SITE_MPI": {"mpich": "pmi2", "openmpi": "pmix"}[mpi],
            "SITE_PYTHON": sys.executable,
        }

    return variables


@pytest.fixture
def run_script() -> Path:
    """A batch script that runs its arguments."""
    return Path(__file__).parent / "scripts" / "run.sh"
