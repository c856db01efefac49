"""Programs that share one start of MPI and JAX: does each find what it would find in a job of its own, whatever came before?"""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest

from tests.jobs import persistent
from tests.jobs.launch import ROOT, Job, run_job
from tests.jobs.preloaded import is_installed

N = 2

# What a program can do to the process in which it runs.
CHANGES = """
import os, signal, sys, warnings, tempfile, threading, atexit, logging, time
import jax, numpy as np
from mpi4py import MPI
import shardload
from tests.mpi import support
print("out", MPI.COMM_WORLD.rank)
os.write(2, b"past Python\\n")
before = shardload.load
shardload.load = None
support.check = None
sys.modules["shardload.errors"].ConfigError = None
os.preadv = None
np.copyto = None
jax.config.update("jax_enable_x64", True)
os.environ["SHARDLOAD_SHARED_MEMORY"] = "0"
del os.environ["HOME"]
os.chdir("/")
sys.path.clear()
sys.argv.append("more")
sys.stdout = None
sys.excepthook = None
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.setitimer(signal.ITIMER_REAL, 600)
warnings.simplefilter("ignore")
logging.getLogger("shardload").setLevel(logging.DEBUG)
"""
# The next one sees nothing of it, and loads.
LOOKS = """
import json, logging, os, signal, sys, warnings
import h5py, jax, numpy as np
from jax.sharding import PartitionSpec as P
from mpi4py import MPI
import shardload
from tests.mpi.support import check, mesh_of, on_root, ramp
assert callable(shardload.load) and callable(os.preadv) and callable(np.copyto)
assert isinstance(sys.modules["shardload.errors"].ConfigError, type)
assert not jax.config.jax_enable_x64
assert "SHARDLOAD_SHARED_MEMORY" not in os.environ and "HOME" in os.environ
assert os.getcwd() == os.path.dirname(os.path.abspath(sys.argv[0])) and sys.argv[1:] == ["a"]
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
assert sys.excepthook is sys.__excepthook__ and "support" not in vars(sys.modules["__main__"])
assert logging.getLogger("shardload").level == logging.NOTSET
try:
    warnings.warn("an error again")
except UserWarning:
    print("well", MPI.COMM_WORLD.rank)
def write():
    with h5py.File("x.h5", "w") as file:
        file["x"] = ramp((4, 6))
shardload.initialize()
on_root(MPI.COMM_WORLD, write)
check(shardload.load("x.h5", mesh_of(), P("a")), ramp((4, 6)), mesh_of(), P("a"))
"""
FAILS = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    raise RuntimeError("only here")
print("about to wait")
MPI.COMM_WORLD.Barrier()
"""
HANGS = "import time\ndef waits_for_ever(): time.sleep(600)\nprint('here')\nwaits_for_ever()\n"
LEAVES_A_MESSAGE = "from mpi4py import MPI\nMPI.COMM_WORLD.isend(1, dest=1 - MPI.COMM_WORLD.rank).Free()\n"


def run(*program: str | Path, timeout: float = 240, cwd: Path | None = None, **env: str) -> Job:
    return run_job(program, N, timeout=timeout, cwd=cwd, env={"PYTHONPATH": str(ROOT), **env}, fresh=False)


def script(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def test_programs_know_nothing_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a test could pass or fail because of the one before: by what it patched, set, printed, or left hanging."""
    first = run("-c", CHANGES).check()
    job = persistent._jobs[N, "mpich", 1]
    assert first.rank_stdout == ("out 0\n", "out 1\n")
    assert ["past Python" in err for err in first.rank_stderr] == [True, True]

    second = run("-W", "error", script(tmp_path, LOOKS), "a", cwd=tmp_path).check()
    assert [out.splitlines()[-1] for out in second.rank_stdout] == ["well 0", "well 1"]
    assert "out" not in second.stdout and "past Python" not in second.stderr
    assert persistent._jobs[N, "mpich", 1] is job, "it was started again"

    assert run("-c", "import sys; print(sys.argv); sys.exit(0)", "a").check().rank_stdout[1] == "['-c', 'a']\n"
    with pytest.raises(ValueError, match="JAX_ENABLE_X64: read when a process starts"):
        run("-c", "", JAX_ENABLE_X64="1")

    monkeypatch.setattr(persistent, "GRACE_SECONDS", 0.5)
    failed = run(script(tmp_path, FAILS))
    assert failed.returncode == 1 and not job.is_alive, "ranks that wait for one that failed met the next program"
    assert "RuntimeError: only here" in failed.rank_stderr[1]

    assert run(script(tmp_path, LEAVES_A_MESSAGE)).returncode == 1, "a message could be taken for the next program's"


def test_what_is_installed() -> None:
    """Wrong if a project below the prefix of Python, which is /usr for a system's, stayed as a program has patched it."""
    project = types.ModuleType("project")
    project.__file__ = str(Path(sys.base_prefix, "src", "project.py"))
    assert [is_installed(module) for module in (json, pytest, project, sys.modules[__name__])] == [True, True, False, False]


def test_a_program_that_hangs_is_killed_with_its_stacks_shown(tmp_path: Path) -> None:
    """Wrong if it held up those that come after it, or nobody could see where it was."""
    with pytest.raises(AssertionError, match="HUNG") as caught:
        run(script(tmp_path, HANGS), timeout=5)
    text = str(caught.value)
    assert len(re.findall(r"--- rank \d stdout\nhere", text)) == N
    assert len(re.findall("in waits_for_ever", text)) == N, text
    assert not persistent._jobs[N, "mpich", 1].is_alive
