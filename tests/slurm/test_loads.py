"""Do values arrive on a cluster? In nodes through shared memory, between nodes as messages, started in every way.

The nodes have hostnames of their own, which is what MPI tells them apart by; nothing is told to shardload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.launch import ROOT
from tests.mpi.support import ramp
from tests.slurm.cluster import Cluster, Done
from tests.tiers import IS_QUICK, thorough
from tests.unit.files import write_hdf5

Site = Callable[..., dict[str, str]]

RUN = "slurm/run.py"
LAUNCHED = "tests/jobs/scripts/launched.py"
LOADS = "tests/slurm/scripts/loads.py"
WAYS = {
    "srun pmi2, MPICH": ("mpich", ["srun", "--mpi=pmi2", "-K1"]),
    "srun pmix, Open MPI": ("openmpi", ["srun", "--mpi=pmix", "-K1"]),
    "mpiexec, MPICH": ("mpich", ["mpiexec", "-n", "4"]),
    "mpirun, Open MPI": ("openmpi", ["mpirun", "-n", "4"]),
}


def placed(done: Done, n_nodes: int, n_ranks: int, few: bool) -> None:
    """Every rank is where Slurm put it, knows who is with it, and gave notes to these and messages to all others."""
    found = sorted(done.check().said(), key=lambda line: line["rank"])
    assert [line["rank"] for line in found] == list(range(n_ranks))
    by_host: dict[str, list[int]] = {}
    for line in found:
        by_host.setdefault(line["host"], []).append(line["rank"])
    assert [*by_host.values()] == [[*range(k, k + n_ranks // n_nodes)] for k in range(0, n_ranks, n_ranks // n_nodes)]
    for line in found:
        here = by_host[line["host"]]
        assert line["node"] == here
        assert line["notes"] == [rank for rank in here if rank != line["rank"]], line
        assert line["messages"] == [rank for rank in range(n_ranks) if rank not in here], line
        assert line["loads"] == (8 if few else 16)
        # Blocks of one chunk on two nodes, of several on four.
        assert line.get("boxes decoded", 0) > 0 and line.get("tiles taken", 0) > 0, line


@pytest.mark.parametrize("way", thorough(WAYS, ["mpiexec, MPICH"]))  # the first has the library, the last such a launcher
def test_two_nodes(cluster: Cluster, site: Site, run_script: Path, tmp_path: Path, way: str) -> None:
    """Wrong if a launcher's ranks were placed otherwise than believed, or notes named memory of another node."""
    mpi, launcher = WAYS[way]
    few = IS_QUICK and way != next(iter(WAYS))  # what a launcher does differently shows in the first loads
    env = site(mpi)
    command = (*launcher, env["SITE_PYTHON"], "-W", "error", RUN, LOADS, str(tmp_path), *["few"] * few)
    placed(cluster.run(run_script, "--nodes=2", "--ntasks-per-node=2", env=env, arguments=command, cwd=ROOT), 2, 4, few)


def test_four_nodes(cluster: Cluster, site: Site, run_script: Path, tmp_path: Path) -> None:
    """Wrong if only two nodes, each the other's only partner, went well."""
    env = site()
    command = ("srun", "--mpi=pmi2", "-K1", env["SITE_PYTHON"], RUN, LOADS, str(tmp_path), *["few"] * IS_QUICK)
    done = cluster.run(run_script, "--nodes=4", "--ntasks-per-node=2", env=env, arguments=command, cwd=ROOT)
    placed(done, 4, 8, IS_QUICK)


def test_without_mpi(cluster: Cluster, site: Site, run_script: Path, tmp_path: Path) -> None:
    """Wrong if the tasks of srun alone did not find each other from node to node, or one that fails left the others waiting."""
    path = write_hdf5(tmp_path / "field.h5", {"x": ramp((8, 12, 20))})
    env = {**site(), "SHARDLOAD_MPI": "0"}
    command = ("srun", "--mpi=none", "-K1", env["SITE_PYTHON"], RUN, LAUNCHED, path, "initialize")
    done = cluster.run(run_script, "--nodes=2", "--ntasks-per-node=2", env=env, arguments=command, cwd=ROOT).check()
    said = Counter((one["type"], one["text"]) for one in done.said())
    # It starts, loads, does all that sends values from node to node, and scatters.
    assert (said.pop((None, "")), sorted(said.values())) == (4 * 4, [4, 8]), done.output
    (_, too_much), (_, failed) = sorted(said)
    assert "through JAX's coordinator" in too_much and "on rank 1 of 4" in failed, done.output
