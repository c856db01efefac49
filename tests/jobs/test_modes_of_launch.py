"""Ranks and devices in numbers and orders other than those of the suite's own runs, and launches that cannot work.

Each test starts a job of its own; one that hangs is ended and fails.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launch import PATHS, ROOT, job_environment, mpiexec_of, run_alone, run_job, start_alone
from tests.mpi.support import ramp
from tests.ports import free_ports
from tests.tiers import IS_QUICK, quick_ones, thorough
from tests.unit.files import write_hdf5

SCRIPTS = Path(__file__).parent / "scripts"
# mpi4py itself warns of the launches that are tried here; what shardload does then must not rest on that.
PYTHON = ["-W", "error", "-W", "ignore:suspicious MPI execution environment"]
ENV = {"PYTHONPATH": PATHS}
SHAPE = (8, 12, 20)
LIBRARIES = thorough(["mpich", "openmpi"], ["openmpi"])  # tests/slurm has such launches with Open MPI too


def lines(text: str) -> list[dict[str, Any]]:
    """The JSON lines of an output, without what libraries print between them."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.fixture
def field(tmp_path: Path) -> str:
    """A file with one array."""
    return write_hdf5(tmp_path / "field.h5", {"x": ramp(SHAPE)}, chunks=(3, 5, 7), compression="gzip")


# --- launches that work -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "devices", "mpi"),
    # test_ways_of_travelling has six ranks
    quick_ones([(3, 2, "mpich"), (1, 4, "mpich"), (2, 3, "openmpi")], (3, 2, "mpich")),
)
def test_ranks_and_devices(tmp_path: Path, n: int, devices: int, mpi: str) -> None:
    """Wrong if a rank were taken for a device, or a number of ranks that is no power of 2 for one that is."""
    command = [*PYTHON, SCRIPTS / "modes.py", tmp_path, "mpi", *["few"] * IS_QUICK]
    job = run_job(command, n, timeout=240, mpi=mpi, devices_per_process=devices, env=ENV).check()
    found = [lines(out)[-1] for out in job.rank_stdout]
    assert [line["rank"] for line in found] == list(range(n))
    assert {line["devices"] for line in found} == {devices}
    mixed = 2 + 3 + 2 if n % 2 else 3 + 2 + 3  # readers of each of three decompositions
    all_loads, few_loads = 4 + mixed + 3 + 4 + 3 + 3 + 4, 7 + (2 if n % 2 else 3)
    assert {line["loads"] for line in found} == {few_loads if IS_QUICK else all_loads}
    assert {line["scatters"] for line in found} == {2 * 7}


def test_proxies_are_not_asked_for_the_coordinator(field: str) -> None:
    """Wrong if JAX's processes looked for each other at a web proxy, which does not know them: for five minutes."""
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    env = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "no_proxy"), nobody)
    job = run_job([*PYTHON, SCRIPTS / "launched.py", field, "initialize"], 2, timeout=90, env=ENV | env).check()
    assert [one["type"] for out in job.rank_stdout for one in lines(out)] == [None] * 6
    assert "proxy" not in job.stderr.lower()


@pytest.mark.parametrize("mpi", LIBRARIES)
def test_mpi_that_importing_mpi4py_does_not_start(field: str, mpi: str) -> None:
    """Wrong if MPI ended the process at the first call; or the job, because nobody finalized it."""
    job = run_job(
        [*PYTHON, SCRIPTS / "launched.py", field, "initialize"], 2, timeout=90, mpi=mpi, env=ENV | {"MPI4PY_RC_INITIALIZE": "0"}
    ).check()
    assert [one["type"] for out in job.rank_stdout for one in lines(out)] == [None] * 6


def test_jax_processes_in_another_order_than_ranks(tmp_path: Path) -> None:
    """Wrong if process k were taken to be rank k: JAX was started by somebody else, who counts backwards."""
    env = {**ENV, "TEST_PORT": str(free_ports(1)[0])}
    command = [*PYTHON, SCRIPTS / "modes.py", tmp_path, "backwards", "few"]
    job = run_job(command, 4, timeout=240, env=env).check()
    assert [lines(out)[-1]["rank"] for out in job.rank_stdout] == [0, 1, 2, 3]


# --- launches that cannot ---------------------------------------------------------------------------------------------


def launched(path: str, *what: str, n: int = 2, env: dict[str, str] | None = None, mpi: str = "mpich") -> list[list[Any]]:
    """What each rank said of each attempt."""
    job = run_job([*PYTHON, SCRIPTS / "launched.py", path, *what], n, timeout=240, env={**ENV, **(env or {})}, mpi=mpi)
    return [lines(out) for out in job.check().rank_stdout]


def same(said: list[list[Any]], *parts: str) -> None:
    """Each attempt raised the same ConfigError on every rank, with `parts` in it."""
    assert all(rank == said[0] for rank in said), said
    for attempt in said[0]:
        assert attempt["type"] == "ConfigError", attempt
        for part in parts:
            assert part in attempt["text"]


@pytest.mark.parametrize("mpi", LIBRARIES)
def test_forgotten_initialize(field: str, mpi: str) -> None:
    """Wrong if four processes each loaded the whole array by themselves, or JAX's own error came up."""
    same(launched(field, "load", mpi=mpi), "COMM_WORLD has 2 ranks", "JAX sees one process", "shardload.initialize() first")


@pytest.mark.parametrize(("mpi", "more"), [("mpich", []), ("openmpi", ["imported"])])  # MPICH takes no locks in the second case
def test_a_load_after_mpi_was_finalized(field: str, mpi: str, more: list[str]) -> None:
    """Wrong if MPI ended the process, or its threads: a save in the background, and a stream that reads ahead. Wrong if they
    still called MPI when it has begun to finalize: MPICH takes no locks then, and gives up if it finds one that was taken.
    """
    started, *loads = zip(*launched(field, "finalized", *more, mpi=mpi), strict=True)
    assert [one["type"] for one in started] == [None, None]
    same([list(one) for one in zip(*loads, strict=True)], "MPI.Finalize() was called in this process", "before it")


@pytest.mark.parametrize(("rank", "who"), [([], ""), (["1"], "on rank 1 of 2: ")], ids=["all ranks", "one rank"])
def test_initialize_too_late(field: str, rank: list[str], who: str) -> None:
    """Wrong if JAX went on as separate processes, or the others waited in JAX for that rank, for five minutes."""
    says = f"{who}JAX could not be started as one of 2 processes: devices are in use here"
    same(launched(field, "late", *rank), says, "others. Call", "at the top", "uses JAX devices")


@pytest.mark.parametrize(
    ("more", "text"),
    [([], "not all ranks of this communicator have made their first call"), (["copied"], "rank 1 did not come to this call")],
)
def test_a_rank_that_never_starts(field: str, more: list[str], text: str) -> None:
    """Wrong if the others waited for it in silence, for ever: inside MPI, too, where they have made calls before."""
    job = run_job([*PYTHON, SCRIPTS / "launched.py", field, "never", "1", *more], 3, timeout=120, env=ENV)
    assert job.returncode != 0
    for rank in (0, 2):
        (said,) = lines(job.rank_stdout[rank])
        assert said["type"] == "StallError" and text in said["text"]


@pytest.mark.parametrize("mpi", LIBRARIES)
def test_an_exception_of_one_rank_ends_the_job(field: str, mpi: str) -> None:
    """Wrong if that process waited in JAX's shutdown for the others, and they for it in their load: five minutes long."""
    job = run_job([*PYTHON, SCRIPTS / "launched.py", field, "dies"], 4, timeout=90, mpi=mpi, env=ENV)
    assert job.returncode != 0
    assert "RuntimeError: only here" in job.rank_stderr[1], job.tail()


@pytest.mark.parametrize(
    ("start", "what"),
    [
        (["-m", "mpi4py"], ("mistyped",)),
        ([], ("mistyped", "initialize")),
        ([ROOT / "slurm" / "run.py"], ("mistyped", "initialize")),
    ],
    ids=["without initialize", "with it", "run.py"],
)
def test_an_error_of_all_ranks_is_shown_once(field: str, start: list[str | Path], what: tuple[str, ...]) -> None:
    """Wrong if every rank printed the calls that led to it, or rank 0 did not, or another rank said nothing at all."""
    job = run_job([*PYTHON, *start, SCRIPTS / "launched.py", field, *what], 2, timeout=240, env=ENV)
    said = (
        "ConfigError: COMM_WORLD has 2 ranks, but JAX sees one" if len(what) == 1 else "ConfigError: '" + field + "' holds no"
    )
    assert job.returncode != 0
    first, second = job.rank_stderr
    shown = [line for line in second.splitlines() if "Gloo" not in line and ("Error" in line or "Traceback" in line)]
    assert all(line.startswith("rank 1: ") and said in line for line in shown) and 'File "' not in second, job.tail()
    is_whole = "Traceback" in first and said in first
    if start[:2] == ["-m", "mpi4py"]:  # the rank that prints first aborts the job: the other one may be gone before it has
        assert is_whole or (not first and shown), job.tail()
    else:
        assert is_whole and len(shown) == 1, job.tail()


def command(path: str, words: list[str]) -> list[Any]:
    """The arguments of the interpreter."""
    return [*PYTHON, SCRIPTS / "launched.py", path, *words]


def singleton(path: str, what: str, *more: str, **env: str) -> list[dict[str, Any]]:
    """What one process, started without a launcher, says of each attempt."""
    return together(path, [[what, *more]], [env])[0]


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, ("srun started 4 tasks", "--mpi=pmix", "--mpi=pmi2")),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, ("mpirun started 3 tasks", "use the launcher that comes with", "MPI4PY_LIBMPI=")),
    ],
)
def test_singletons(field: str, env: dict[str, str], parts: tuple[str, ...]) -> None:
    """Wrong if each of the launcher's tasks took itself for the whole job: all would load all, and overwrite each other."""
    for what, n_attempts in (("initialize", 3), ("load", 2)):
        said = singleton(field, what, **env)
        assert len(said) == n_attempts
        same([said], "every process believes that it is alone", *parts)
        assert ["SHARDLOAD_MPI=0" in one["text"] for one in said] == ["srun" in parts[0]] * n_attempts, (
            "no other can do without"
        )


BATCH: list[dict[str, str]] = [{}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NTASKS": "4"}, {"SLURM_JOB_NUM_NODES": "4"}]


@pytest.mark.parametrize("env", thorough(BATCH, [{}, {"SLURM_JOB_NUM_NODES": "4"}]))
def test_one_process_alone(field: str, env: dict[str, str]) -> None:
    """Wrong if a script in a batch job's shell, which is one process, were refused."""
    assert [said["type"] for said in singleton(field, "initialize", **env)] == [None, None, None]


def test_launcher_of_the_other_library(field: str) -> None:
    """Wrong if MPICH's mpiexec with Open MPI below mpi4py went unnoticed: this is how it really looks.

    The other way round does not come to this: under Open MPI's mpirun, MPICH 5 itself ends the job in MPI_Init.
    """
    env = {k: v for k, v in job_environment(2, mpi="openmpi").items() if k.startswith(("OMPI_", "PRTE_"))}
    env |= {"MPI4PY_MPIABI": "openmpi", "LD_LIBRARY_PATH": str(mpiexec_of("openmpi").parents[1] / "lib")}
    said = launched(field, "load", env=env)
    same(said, "every process believes that it is alone", "mpiexec started 2 tasks", "mpi4py uses Open MPI v")


# --- no MPI library at all --------------------------------------------------------------------------------------------


WITHOUT = ["no library", "no mpi4py"]


@pytest.fixture(params=WITHOUT)
def without_mpi(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """An environment in which mpi4py finds no MPI library, or is not there itself."""
    if request.param == "no library":
        return {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    (tmp_path / "stub" / "mpi4py").mkdir(parents=True)
    (tmp_path / "stub" / "mpi4py" / "__init__.py").write_text("raise ImportError('mpi4py is not for this machine')\n")
    return {"PYTHONPATH": f"{tmp_path / 'stub'}{os.pathsep}{PATHS}"}


def test_one_process_without_mpi(field: str, without_mpi: dict[str, str]) -> None:
    """Wrong if a laptop without MPI could not load a file."""
    for what, n_attempts in (("initialize", 3), ("load", 2)):
        assert [said["type"] for said in singleton(field, what, **without_mpi)] == [None] * n_attempts


def test_srun_without_mpi_and_without_initialize(field: str) -> None:
    """Wrong if who does without MPI were told to get one, where a call is missing."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    said = singleton(field, "load", SHARDLOAD_MPI="0", **step)
    same([said[:1]], "srun started 4 tasks, but JAX sees one process: call shardload.initialize() first")


def test_launcher_without_mpi(field: str, without_mpi: dict[str, str]) -> None:
    """Wrong if the tasks of srun went on as single processes."""
    said = singleton(field, "initialize", SLURM_STEP_NUM_TASKS="4", **without_mpi)
    same([said], "no MPI library can be loaded", "pip install 'shardload[mpich]'")


def together(path: str, what: list[list[str]], envs: list[dict[str, str]]) -> list[list[dict[str, Any]]]:
    """What processes that no launcher of MPI started say, each with its own arguments and variables."""
    ended = run_alone(*(command(path, words) for words in what), env=[{**ENV, **env} for env in envs])
    assert not any(done.returncode for done in ended), ended
    return [lines(done.stdout) for done in ended]


def does_all_without_mpi(said: list[list[dict[str, Any]]], n_nodes: int = 1) -> None:
    """All processes load, save and scatter, right or wrong together."""
    assert all(one == said[0] for one in said), said
    *loads, direct, parallel, everything, too_much, scatters = said[0]
    assert [one["type"] for one in (*loads, everything, scatters)] == [None] * (len(loads) + 2), said[0]
    for failed in (direct, parallel):
        assert failed["type"] == "SourceError" and "on rank 1 of" in failed["text"] and "no file" in failed["text"], failed
    assert too_much["type"] == (None if n_nodes == 1 else "ConfigError"), too_much
    if n_nodes > 1:
        assert "through JAX's coordinator" in too_much["text"] and "under MPI, or pass readers='direct'" in too_much["text"]


@pytest.mark.parametrize("without_mpi", quick_ones(WITHOUT, "no mpi4py"), indirect=True)
def test_several_jax_processes_without_mpi(field: str, without_mpi: dict[str, str]) -> None:
    """Wrong if values did not come through JAX's store, or one that fails left the others waiting."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    said = together(field, [["jax", address, "2", str(k)] for k in range(2)], [without_mpi] * 2)
    does_all_without_mpi(said)


def tasks_of_srun(n: int) -> list[dict[str, str]]:
    """What srun would tell each task of a step on one node, and that they are to do without MPI."""
    step = {"SLURM_JOB_ID": str(random.SystemRandom().randrange(1 << 20)), "SLURM_STEP_ID": "0", "SHARDLOAD_MPI": "0"}
    step |= {"SLURM_STEP_NUM_TASKS": str(n), "SLURM_STEP_TASKS_PER_NODE": str(n)}
    return [step | {"SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)} for k in range(n)]


def test_tasks_of_srun_without_mpi(field: str) -> None:
    """Wrong if the tasks did not find each other, or did not send values from node to node."""
    envs = [task | {"SHARDLOAD_RANKS_PER_NODE": "0,1,0,1"} for task in tasks_of_srun(4)]
    does_all_without_mpi(together(field, [["initialize"]] * 4, envs), n_nodes=2)


def test_sigterm_ends_a_process_wherever_it_is(field: str) -> None:
    """Wrong if one that is idle, in a load or in a collective of JAX's went on when it is told to end."""
    started = [start_alone(command(field, ["waits"]), {**ENV, **task}) for task in tasks_of_srun(3)]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "waits\n"
        for process in started:
            process.terminate()
        assert [process.wait(60) for process in started] == [-signal.SIGTERM] * 3
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("leaves", "rank 1 has come to the end of its program"),
        ("busy", "nothing has moved for 4 s (call: "),
    ],
)
def test_a_process_that_is_not_there_without_mpi(field: str, what: str, text: str) -> None:
    """Wrong if the other waited for it in JAX, for minutes, until JAX ended both, or for ever."""
    started = [start_alone(command(field, [what]), {**ENV, **task}) for task in tasks_of_srun(4)]
    try:
        for process in (started[0], *started[2:]):  # also if the first one, which has JAX's coordinator, has ended
            out, _ = process.communicate(timeout=90)
            (said,) = lines(out)
            assert said["type"] == "StallError" and said["text"].startswith(text)
            assert "rank 1" in said["text"]
            assert process.returncode == 1
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_jax_started_with_other_processes(field: str) -> None:
    """Wrong if four ranks, each the only process of a JAX of its own, each loaded the whole array."""
    said = launched(field, "own jax")
    assert all("COMM_WORLD has 2 ranks" in attempt["text"] for rank in said for attempt in rank), said
