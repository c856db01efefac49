"""One cluster for all tests here, and what a job on it needs of this machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.jobs.launch import PATHS, job_environment, mpiexec_of
from tests.jobs.preloaded import prefix
from tests.slurm.cluster import Cluster

MANY = 1000  # ranks: always more than cores


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with Cluster() as running:
        yield running


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, str]], str]:
    """An interpreter for programs with these variables, which has imported JAX already (`tests.jobs.preloaded`)."""
    folder = tmp_path_factory.mktemp("python")

    def interpreter(env: Mapping[str, str]) -> str:
        path = folder / "python"
        path.write_text(f'#!/bin/sh\nexec {shlex.join(prefix(env))} "$@"\n')
        path.chmod(0o755)
        return str(path)

    return interpreter


@pytest.fixture(scope="session")
def site(python: Callable[[Mapping[str, str]], str]) -> Callable[..., dict[str, str]]:
    """The variables that the scripts document, for this machine: which Python, which --mpi, CPU devices for GPUs."""

    def variables(mpi: str = "mpich", devices: int = 1) -> dict[str, str]:
        library = job_environment(MANY, mpi=mpi, devices_per_process=devices)
        # Unbuffered, gloo would write a line in pieces, which mix with those of other processes.
        of_library = {k: v for k, v in library.items() if os.environ.get(k) != v and k != "PYTHONUNBUFFERED"}
        of_library["JAX_PLATFORMS"] = "cpu"
        for name in ("OMPI_MCA_btl", "OMPI_MCA_pml", "UCX_TLS"):  # there are networks here
            of_library.pop(name, None)
        launchers = str(mpiexec_of(mpi).parent)
        return {
            **of_library,
            # Between nodes as between real ones, not through the memory of the machine below.
            **{"mpich": {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}, "openmpi": {"UCX_TLS": "tcp,self"}}[mpi],
            "PATH": os.pathsep.join([launchers, os.environ["PATH"]]),
            "PYTHONPATH": PATHS,
            "SITE_MPI": {"mpich": "pmi2", "openmpi": "pmix"}[mpi],
            "SITE_PYTHON": python({**os.environ, **of_library, "PYTHONFAULTHANDLER": "1"}),
        }

    return variables


@pytest.fixture
def run_script() -> Path:
    """A batch script that runs its arguments."""
    return Path(__file__).parent / "scripts" / "run.sh"
