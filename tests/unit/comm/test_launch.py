"""How `tests.jobs.launch` builds a job; and is what we say of the oldest versions the same everywhere?"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.jobs.launch import IS_TEST, ROOT, Job, job_command, job_environment, mpiexec_of

PYTHON = {"python_version": "3.11"}  # the oldest


def test_another_jobs_traces_do_not_reach_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "PRTE_X", "HYDRA_X", "MPI_LOCALNRANKS", "MPI4PY_MPIABI")
    for name in traces:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MPIR_CVAR_DEBUG_SUMMARY", "1")  # a user's choice, not a trace
    environment = job_environment(2)
    assert not set(traces) & set(environment)
    assert environment["MPIR_CVAR_DEBUG_SUMMARY"] == "1"


def test_environment_shows_the_devices_asked_for() -> None:
    assert job_environment(2, devices_per_process=3)["XLA_FLAGS"] == "--xla_force_host_platform_device_count=3"


@pytest.mark.parametrize("n", [1, 10_000])
@pytest.mark.parametrize("is_test", [False, True])
def test_waiting_ranks_sleep_where_cores_are_short(n: int, is_test: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPIR_CVAR_ENABLE_HEAVY_YIELD", *(() if is_test else IS_TEST)):
        monkeypatch.delenv(name, raising=False)
    assert ("MPIR_CVAR_ENABLE_HEAVY_YIELD" in job_environment(n)) == (is_test or n > (os.cpu_count() or 1))


def test_script_and_arguments_come_after_the_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "python"
    (tmp_path / "mpiexec").touch()
    start = [str(tmp_path / "mpiexec"), "-n", "3"]
    assert job_command(Path("a.py"), 3, python=python) == [*start, str(python), "a.py"]
    assert job_command(["-m", "shardload"], 3, python=python) == [*start, str(python), "-m", "shardload"]


def test_open_mpi_comes_from_its_own_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLOAD_OPENMPI", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="make setup"):
        mpiexec_of("openmpi")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpiexec").touch()
    assert job_command("a.py", 2, mpi="openmpi")[:2] == [str(tmp_path / "bin" / "mpiexec"), "--oversubscribe"]
    assert job_environment(2, mpi="openmpi")["MPI4PY_LIBMPI"] == str(tmp_path / "lib" / "libmpi.so.40")


def test_unknown_library_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'mpich' or 'openmpi'"):
        mpiexec_of("lam")


def test_check_shows_every_ranks_end() -> None:
    job = Job(3, "hello\n", "first\nsecond\nlauncher\n", 1.0, ("hello\n", ""), ("first\n", "second\n"))
    with pytest.raises(AssertionError, match=r"(?s)ended with 3 .*rank 0 stdout\nhello.*rank 1 stderr\nsecond.*mpiexec\n"):
        job.check()


def test_lower_bounds_are_the_versions_tested_as_oldest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for text in project["dependencies"]]
    bounds = {r.name: one.version for r in asked for one in r.specifier if one.operator == ">="}
    lines = (ROOT / "tests" / "oldest-requirements.txt").read_text().splitlines()
    oldest = [
        r for line in lines if line[:1].isalpha() and ((r := Requirement(line)).marker is None or r.marker.evaluate(PYTHON))
    ]
    pins = {r.name: str(r.specifier).removeprefix("==") for r in oldest}
    assert pins.pop("jaxlib") == pins["jax"]
    # Below 4.1.0 there is no wheel that finds an installed MPI, and building one takes minutes: declared, not tested.
    assert (pins.pop("mpi4py"), bounds.pop("mpi4py")) == ("4.1.0", "4.0.0")
    assert pins == bounds
