"""The harness itself: a job that hangs ends, and ranks of pytest that disagree neither hang nor pass.

Without these, every other test that says "nobody hangs" rests on trust.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import psutil
import pytest

from tests.jobs.launch import ROOT, Job, job_environment, run_job
from tests.tiers import quick_ones, thorough

# Tests inside of tests are all run, whichever stage of `make test` this is.
NO_STAGE = {"TESTS_TURN": "", "TESTS_QUICK": "", "TESTS_SHARE": ""}
LIBRARIES = pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
# (Started as outside of the tests: those that compare a copy with it, and one that hangs.)
STARTS = pytest.mark.parametrize("preloaded", thorough([False, True], [False]), ids=["started", "preloaded"])

HELLO = """
import os, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
print("rank", comm.rank, "of", comm.size, MPI.get_vendor()[0])
print("said on stderr by", comm.rank, file=sys.stderr)
"""

# Rank 0 waits inside MPI, where it keeps a core busy, for two that never come; rank 1 has a child process, too, which is in a
# session of its own.
STUCK = """
import subprocess, time
from mpi4py import MPI
def waits_for_ever():
    print(*{line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/" in line})
    print("about to hang")
    if MPI.COMM_WORLD.rank == 1:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    if MPI.COMM_WORLD.rank:
        time.sleep(600)
    MPI.COMM_WORLD.Barrier()
waits_for_ever()
"""


@STARTS
@LIBRARIES
def test_job_returns_each_ranks_output(mpi: str, preloaded: bool) -> None:
    job = run_job(["-c", HELLO], 3, timeout=240, mpi=mpi, preloaded=preloaded).check()
    vendor = {"mpich": "MPICH", "openmpi": "Open MPI"}[mpi]
    assert job.rank_stdout == tuple(f"rank {k} of 3 {vendor}\n" for k in range(3))
    assert job.stdout == "".join(job.rank_stdout)
    assert [f"said on stderr by {k}" in err for k, err in enumerate(job.rank_stderr)] == [True] * 3


WHAT_IT_IS = """
import atexit, json, os, signal, sys, threading
others = ("PMI_", "GFORTRAN_", "SHARDLOAD_JOB", "HYDI_", "MPIR_", "_")
found = {
    "name": __name__, "file": globals().get("__file__"), "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path,
    "folder": os.getcwd(), "env": {name: value for name, value in sorted(os.environ.items()) if not name.startswith(others)},
    "warnings": sys.warnoptions, "umask": os.umask(0o22), "cores": len(os.sched_getaffinity(0)),
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE)],
    "input": os.path.exists("/proc/self/fd/0"), "session": os.getsid(0) > 0,
}
print(json.dumps(found))
def work(): threading.main_thread().join(); print("a thread ends", file=sys.stderr)
threading.Thread(target=work).start()
atexit.register(print, "the last word", file=sys.stderr)
def fails(): raise KeyError("so ends it")
fails() if sys.argv[-1] == "fails" else sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.parametrize("end", ["3", "fails"])
@pytest.mark.parametrize(
    "start",
    [["it.py"], ["-W", "error", "-W", "ignore:nothing", "-m", "it"], ["-c", WHAT_IT_IS]],
    ids=["script", "module", "code"],
)
def test_a_copy_is_what_an_interpreter_would_be(tmp_path: Path, start: list[str], end: str) -> None:
    """Wrong if a program could tell by its arguments, paths, variables, warnings or end that nobody started Python for it."""
    (tmp_path / "it.py").write_text(WHAT_IT_IS)
    env = {"SHARDLOAD_HARNESS_TEST": "some = thing", "HDF5_USE_FILE_LOCKING": "FALSE"}
    started, copied = (run_job([*start, end], 1, timeout=60, cwd=tmp_path, env=env, preloaded=how) for how in (False, True))
    assert json.loads(copied.stdout) == json.loads(started.stdout)
    assert copied.returncode == started.returncode != 0
    assert copied.rank_stderr == started.rank_stderr
    assert copied.stderr.endswith("a thread ends\nthe last word\n")


@LIBRARIES
def test_ranks_are_copies(mpi: str) -> None:
    """Wrong if a launcher's variables made each rank import JAX or load MPI: three times the work, and nobody would notice."""
    code = "import re, sys; print('jax' in sys.modules, {*re.findall(r'libmpi[.]so[.]\\d+', open('/proc/self/maps').read())})"
    job = run_job(["-c", code], 2, timeout=60, mpi=mpi)
    library = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}[mpi]
    assert job.rank_stdout == (f"True {{'{library}'}}\n",) * 2


@LIBRARIES
def test_failing_rank_fails_the_job(mpi: str) -> None:
    code = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: MPI.COMM_WORLD.Abort(7)\nMPI.COMM_WORLD.Barrier()"
    assert run_job(["-c", code], 2, timeout=240, mpi=mpi).returncode != 0


@pytest.mark.parametrize(("mpi", "preloaded"), quick_ones([("mpich", True), ("openmpi", False)], ("mpich", True)))
def test_hung_job_is_killed_with_its_stacks_shown(tmp_path: Path, mpi: str, preloaded: bool) -> None:
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    began = time.monotonic()
    with pytest.raises(AssertionError, match="HUNG") as caught:
        run_job(["-c", STUCK], 3, timeout=8, mpi=mpi, env={"SHARDLOAD_HARNESS_TEST": mark}, preloaded=preloaded)
    assert time.monotonic() - began < 60
    text = str(caught.value)
    for rank in range(3):
        assert re.search(rf"--- rank {rank} stdout\n.*\nabout to hang", text)
    assert len(re.findall(r"in waits_for_ever", text)) == 3, text
    environments = (process.info["environ"] or {} for process in psutil.process_iter(["environ"]))
    assert mark not in [environment.get("SHARDLOAD_HARNESS_TEST") for environment in environments]
    segments = {name for name in re.findall(r"/dev/shm/\S+", text) if not name.startswith(str(tmp_path))}
    assert segments
    assert not [path for path in segments if Path(path).exists()]


def _pytest(folder: Path, body: str, n: int = 2, *options: str, mpi: str = "mpich") -> Job:
    """Run a test file under mpiexec with this project's conftest and configuration, in a folder of its own.

    What is looked at here does without JAX's devices, which each rank would start: so what conftest calls in `shardload` does
    nothing.
    """
    (folder / "tests" / "mpi").mkdir(parents=True)
    (folder / "shardload.py").write_text("def initialize(): ...\n")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    (folder / "tests" / "mpi" / "test_it.py").write_text("import pytest, time\n" + body)
    env = {"PYTHONPATH": str(ROOT), **NO_STAGE}
    loaded = ["-W", "ignore:Module already imported"]  # libraries that have a plugin, which is not used here
    return run_job(["-m", "pytest", "--with-mpi", *loaded, *options, "tests"], n, timeout=240, env=env, cwd=folder, mpi=mpi)


@pytest.mark.parametrize("mpi", thorough(["mpich", "openmpi"], ["openmpi"]))  # where all of tests/mpi shows it
def test_rank_0_alone_prints_when_all_is_well(tmp_path: Path, mpi: str) -> None:
    job = _pytest(tmp_path, "def test_a(comm): assert comm.size == 2\ndef test_b(shared_tmp_path): pass\n", mpi=mpi)
    job.check()
    assert "2 passed" in job.rank_stdout[0]
    assert job.rank_stdout[1:] == ("",)
    assert not (tmp_path / ".pytest_cache").exists()


ONE_RANK_FAILS = """
@pytest.fixture
def broken_before(comm):
    assert comm.rank != {rank}
@pytest.fixture
def broken_after(comm):
    yield
    assert comm.rank != {rank}
def test_call(comm):
    assert comm.rank != {rank}
def test_setup(broken_before): pass
def test_teardown(broken_after): pass
def test_skip(comm):
    if comm.rank == {rank}: pytest.skip("for no good reason")
@pytest.mark.xfail
def test_xfail(comm):
    assert comm.rank == {rank}
def test_after(comm):
    assert comm.allreduce(1) == 2
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_fails_and_all_report_it_and_go_on(tmp_path: Path, rank: int) -> None:
    job = _pytest(tmp_path, ONE_RANK_FAILS.format(rank=rank))
    out = job.rank_stdout[0]
    assert job.returncode != 0
    # test_xfail passes on that rank: strictly a failure. test_teardown passes, and then its teardown does not.
    assert "3 failed, 2 passed, 2 errors" in out
    for name in ("test_call", "test_setup", "test_teardown", "test_skip", "test_xfail"):
        assert re.search(rf"(FAILED|ERROR) .*::{name}\b", out)
    assert out.count(f"assert {rank} != {rank}") >= 3
    assert "for no good reason" in out
    assert job.rank_stdout[1:] == ("",)


def test_rank_that_fails_while_others_wait_is_shown_when_time_is_up(tmp_path: Path) -> None:
    body = "def test_it(comm):\n  assert comm.rank != 1, 'the real reason'\n  comm.Barrier()\n"
    job = _pytest(tmp_path, body, 2, "--timeout", "3")
    assert job.returncode != 0
    assert re.search(r"\[rank 1\] .*AssertionError: the real reason", job.rank_stderr[1])
    assert re.search(r"\[rank 0\] TIMEOUT: .*test_it", job.rank_stderr[0])
    assert "comm.Barrier()" in job.rank_stderr[0]


def test_ranks_that_collect_different_tests_stop(tmp_path: Path) -> None:
    body = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1: raise ImportError('only here')\ndef test_it(): pass\n"
    job = _pytest(tmp_path, body)
    assert job.returncode == 4
    assert "collected different tests" in job.rank_stdout[0]
    assert "only here" in job.rank_stdout[0]


def test_tests_that_need_more_ranks_are_left_out_and_counted(tmp_path: Path) -> None:
    tests = [f"@pytest.mark.mpi(min_size={n})\ndef test_{n}(comm): assert comm.size >= {n}\n" for n in (1, 2, 3)]
    body = "".join(tests)
    job = _pytest(tmp_path, body).check()
    assert "2 tests run here; 1 left to runs with more ranks" in job.stdout
    assert "2 passed, 1 deselected" in job.stdout


def test_another_jobs_traces_do_not_reach_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "PRTE_X", "HYDRA_X", "MPI_LOCALNRANKS", "MPI4PY_MPIABI")
    for name in traces:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MPIR_CVAR_DEBUG_SUMMARY", "1")  # a user's choice, not a trace
    environment = job_environment(2)
    assert not set(traces) & set(environment)
    assert environment["MPIR_CVAR_DEBUG_SUMMARY"] == "1"


def test_check_shows_every_ranks_end() -> None:
    job = Job(3, "hello\n", "first\nsecond\nlauncher\n", 1.0, ("hello\n", ""), ("first\n", "second\n"))
    with pytest.raises(AssertionError, match=r"(?s)ended with 3 .*rank 0 stdout\nhello.*rank 1 stderr\nsecond.*mpiexec\n"):
        job.check()
