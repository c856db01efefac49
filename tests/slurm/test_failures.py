"""What does a user see when a process of a job dies? That the job has ended, and why.

A job that did not end would be cancelled by `Cluster.run`, long after, and fail the test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.jobs.launch import ROOT
from tests.mpi.support import ramp
from tests.slurm import daemons
from tests.slurm.cluster import Cluster
from tests.slurm.daemons import marked, why_not
from tests.unit.files import write_hdf5

Site = Callable[..., dict[str, str]]

DIES = "tests/slurm/scripts/dies.py"


@pytest.mark.parametrize(
    ("mpi", "how", "cause"),
    [
        pytest.param("mpich", "raise", "RuntimeError: rank 1: the scratch disk is full", marks=pytest.mark.thorough),
        ("openmpi", "raise", "RuntimeError: rank 1: the scratch disk is full"),
        pytest.param("mpich", "exit", "SystemExit: rank 1: no such option", marks=pytest.mark.thorough),
        ("mpich", "kill", "Killed"),
        ("mpich", "cancel", "Terminated"),
    ],
)
def test_rank_that_dies(cluster: Cluster, site: Site, run_script: Path, tmp_path: Path, mpi: str, how: str, cause: str) -> None:
    """Wrong if the others waited for it until the time limit, or ended without a word of the cause."""
    path = write_hdf5(tmp_path / "field.h5", {"x": ramp((8, 12, 20))})
    env = site(mpi)
    command = ("srun", f"--mpi={env['SITE_MPI']}", "-K1", env["SITE_PYTHON"], "slurm/run.py", DIES, path, how)
    done = cluster.run(run_script, "--nodes=2", "--ntasks-per-node=1", env=env, arguments=command)
    assert done.state == "FAILED" and done.code != 0
    assert cause in done.output, done.output


def test_job_that_hangs_is_ended(cluster: Cluster, run_script: Path) -> None:
    """The tests here believe `Cluster.run`: a job that does not end must fail, and say where it is."""
    command = ("srun", sys.executable, "-c", "import time\ndef waits_here(): time.sleep(600)\nwaits_here()")
    with pytest.raises(AssertionError, match=r"HUNG: run.sh(.|\n)*waits_here"):
        cluster.run(run_script, "--nodes=2", arguments=command, seconds=2)


def test_nothing_is_left_of_a_cluster_whose_owner_is_killed() -> None:
    """Wrong if daemons, jobs or folders outlived tests that were ended by a signal, as by their own time limit."""
    program = (
        "import os, signal, subprocess\n"
        "from tests.slurm.cluster import Cluster\n"
        "with Cluster() as cluster:\n"
        "    subprocess.run(['sbatch', '-N4', '--wrap', 'srun sleep 600'], env=cluster.env, check=True, cwd=cluster.folder)\n"
        "    print(cluster.folder, cluster.keeper.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder, _, keeper = done.stdout.splitlines()[-1].rpartition(" ")
    psutil.wait_procs([psutil.Process(int(keeper))] if psutil.pid_exists(int(keeper)) else [], timeout=60)
    assert not psutil.pid_exists(int(keeper))
    assert marked(Path(folder)) == []
    assert not Path(folder).exists()


def test_why_there_can_be_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a machine that cannot was said to be one that can, or the other way round."""
    assert why_not() == ""
    monkeypatch.setattr(daemons, "PROGRAMS", ("sh", "no-such-program"))
    assert why_not().startswith("not installed: no-such-program ")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not().startswith("not root")
