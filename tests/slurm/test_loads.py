"""Do values arrive on a cluster: within nodes through shared memory, between nodes as messages, started in every way?

The nodes have hostnames of their own, which is what MPI tells them apart by; nothing is told to shardload.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launch import ROOT
from tests.slurm.cluster import Cluster, Done

Site = Callable[..., dict[str, str]]

RUN = "slurm/run.py"
LOADS = "tests/slurm/scripts/loads.py"
WAYS = {
    "srun pmi2, MPICH": ("mpich", ["srun", "--mpi=pmi2", "-K1"]),
    "srun pmix, Open MPI": ("openmpi", ["srun", "--mpi=pmix", "-K1"]),
    "mpiexec, MPICH": ("mpich", ["mpiexec", "-n", "4"]),
    "mpirun, Open MPI": ("openmpi", ["mpirun", "-n", "4"]),
}


def lines(output: str) -> list[dict[str, Any]]:
    """What each rank said, in the order of ranks."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda line: line["rank"])


def placed(done: Done, n_nodes: int, n_ranks: int) -> None:
    """Every rank is where Slurm put it, knows who is with it, and gave notes to these and messages to all others."""
    found = lines(done.check().output)
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
        assert line["loads"] == 24
        assert line["chunks decoded"] > 0 and line.get("tiles taken", 0) > 0, line


@pytest.mark.parametrize("way", WAYS)
def test_two_nodes(cluster: Cluster, site: Site, run_script: Path, tmp_path: Path, way: str) -> None:
    """Wrong if a launcher's ranks were placed otherwise than believed, or notes named memory of another node."""
    mpi, launcher = WAYS[way]
    env = site(mpi)
    command = (*launcher, env["SITE_PYTHON"], "-W", "error", RUN, LOADS, str(tmp_path))
    placed(cluster.run(run_script, "--nodes=2", "--ntasks-per-node=2", env=env, arguments=command, cwd=ROOT), 2, 4)


def test_four_nodes(cluster: Cluster, site: Site, run_script: Path, tmp_path: Path) -> None:
    """Wrong if only two nodes, each the other's only partner, went well."""
    env = site()
    command = ("srun", "--mpi=pmi2", "-K1", env["SITE_PYTHON"], RUN, LOADS, str(tmp_path))
    placed(cluster.run(run_script, "--nodes=4", "--ntasks-per-node=2", env=env, arguments=command, cwd=ROOT), 4, 8)
