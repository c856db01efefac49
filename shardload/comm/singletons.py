"""Did a launcher start several tasks, each of which takes itself for the whole job?

So it is if launcher and MPI library do not belong together. Each task would load everything, and all would write one file.

No JAX.
"""

from __future__ import annotations

import os

from shardload.comm.environment import launched
from shardload.comm.mpi import mpi_problem, world
from shardload.errors import ConfigError

# Messages for a launcher that started several tasks which MPI did not notice.
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
        "An MPICH-like mpiexec started {n} tasks, but mpi4py uses another MPI library: use the mpirun of that library, "
        "or MPI4PY_LIBMPI=/path/to/mpich/lib/libmpi.so, or rebuild mpi4py against this MPI"
    ),
}
_NO_MPI = (
    "no MPI library can be loaded ({problem}). On a cluster load the site's MPI module and build mpi4py against it "
    "(pip install --no-binary=mpi4py mpi4py); on one machine: pip install 'shardload[mpich]'"
)
WITHOUT = "To run without MPI, where values go from node to node slowly, set SHARDLOAD_MPI=0"


def unnoticed() -> str:
    """The message for a launcher that started several tasks while MPI sees one; empty if the launcher started one."""
    launcher, n = launched(os.environ)
    return _UNNOTICED[launcher].format(n=n) if launcher else ""


def refuse_singletons() -> None:
    """ConfigError if this process, which is alone, is one of several tasks of a launcher."""
    found = unnoticed()
    if world() is None:
        if found:
            raise ConfigError(_NO_MPI.format(problem=mpi_problem()))
    elif found:
        raise ConfigError(f"every process believes that it is alone: COMM_WORLD has size 1. {found}. {WITHOUT}")
