"""What does MPI say of itself, where there is one and where there is none?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardload.comm import mpi

ABORT_THAT_RETURNS = """
import atexit
from shardload.comm.mpi import abort

class MPI:
    class COMM_WORLD:
        def Abort(code):
            print(f"abort {code}", flush=True)

atexit.register(print, "went on")
print("last words")
abort(MPI)
print("went on")
"""


def test_where_there_is_mpi() -> None:
    """Wrong if the doctor's facts were of another library, or a level of threads had another's name."""
    module, problem = mpi.load_mpi()
    if module is None:
        assert problem and mpi.world() is None
        return
    assert mpi.world_rank_and_size() == (module.COMM_WORLD.Get_rank(), module.COMM_WORLD.Get_size())
    assert mpi.library_name().split()[0] in module.Get_library_version() and mpi.library_name()
    assert module.Query_thread() == getattr(module, f"THREAD_{mpi.thread_level()}")


def test_where_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi.load_mpi.cache_clear()
    monkeypatch.setenv("SHARDLOAD_MPI", "0")
    try:
        assert mpi.world() is None and mpi.world_rank_and_size() == (0, 1)
        assert mpi.library_name() == mpi.thread_level() == "" and "SHARDLOAD_MPI=0" in mpi.mpi_problem()
        with pytest.raises(Exception, match="expected an mpi4py communicator"):
            mpi.check_communicator(object())
    finally:
        mpi.load_mpi.cache_clear()


def test_nothing_follows_an_abort() -> None:
    """MPICH's MPI_Abort returns while another rank ends the job too. Wrong if the program went on, up to MPI_Finalize, or if
    what it had printed was lost."""
    job = subprocess.run([sys.executable, "-c", ABORT_THAT_RETURNS], capture_output=True, text=True, timeout=60)
    assert (job.returncode, job.stdout.split("\n")) == (1, ["last words", "abort 1", ""]), job.stderr
