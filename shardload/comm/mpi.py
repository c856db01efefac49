"""Which launcher started this process, is there MPI, and does it see all tasks of the job? The only module that imports mpi4py.

Importing mpi4py starts MPI, so it is imported only when it is needed. If no MPI library can be loaded, or the user has turned
MPI off, the functions here return that, and do not fail.

If launcher and MPI library do not belong together, each of several tasks takes itself for the whole job: each would load
everything, and all would write one file (`refuse_singletons`). No JAX.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, NoReturn

from shardload.errors import ConfigError
from shardload.system.thread_pool import flush

# How many tasks a launcher started. For Slurm that of the step: a batch script has SLURM_NTASKS too, but is one process.
_LAUNCHERS = {"mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE", "srun": "SLURM_STEP_NUM_TASKS"}
# The number of a task, as the same launchers count.
_TASKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def launched(environ: Mapping[str, str]) -> tuple[str, int]:
    """The launcher that started several tasks, and how many; the innermost if one launcher started another.

    >>> launched({"SLURM_STEP_NUM_TASKS": "4"}), launched({"SLURM_NTASKS": "4"}), launched({"PMI_SIZE": "1"})
    (('srun', 4), ('', 1), ('', 1))
    >>> launched({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "8"}), launched({"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "4"})
    (('mpiexec', 8), ('srun', 4))
    """
    counts = {launcher: environ.get(variable, "") for launcher, variable in _LAUNCHERS.items()}
    if counts["mpiexec"] == counts["srun"]:  # srun --mpi=pmi2 sets what an MPICH-like mpiexec sets
        del counts["mpiexec"]
    for launcher, n in counts.items():
        if n.isdecimal() and int(n) > 1:
            return launcher, int(n)
    return "", 1


def task(environ: Mapping[str, str]) -> int:
    """The number of this task, as its launcher counts; 0 without a launcher.

    >>> task({"SLURM_PROCID": "3"}), task({"SLURM_PROCID": "0", "PMI_RANK": "2"}), task({})
    (3, 2, 0)
    """
    numbers = (environ.get(name, "") for name in _TASKS)
    return next((int(number) for number in numbers if number.isdecimal()), 0)


def mpi_is_off(environ: Mapping[str, str]) -> bool:
    """True if the user has turned MPI off.

    >>> mpi_is_off({"SHARDLOAD_MPI": "0"}), mpi_is_off({})
    (True, False)
    """
    return environ.get("SHARDLOAD_MPI") == "0"


@cache
def load_mpi() -> tuple[Any, str]:
    """mpi4py's MPI module and ""; or None and the reason. The first call imports mpi4py, and starts MPI."""
    if mpi_is_off(os.environ):
        return None, "SHARDLOAD_MPI=0 turns it off: unset SHARDLOAD_MPI"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py's wheel finds no MPI library
        return None, str(error) or "unknown"
    if not MPI.Is_initialized():  # mpi4py was told not to (mpi4py.rc.initialize), and then does not finalize it either
        MPI.Init_thread()
        atexit.register(lambda: None if MPI.Is_finalized() else MPI.Finalize())
    return MPI, ""


@cache
def call_before_finalize(function: Callable[[], None]) -> None:
    """Have `function` called when the program itself calls ``MPI.Finalize``: threads of shardload may need MPI still.

    Before MPI hears of it, because MPICH takes no locks after that. Who has imported that function before, or calls it from C,
    meets an attribute of COMM_SELF, which MPI deletes first.
    """
    mpi, _ = load_mpi()
    if mpi is not None:
        finalize = mpi.Finalize

        @wraps(finalize)
        def finalize_afterwards() -> None:
            function()
            finalize()

        mpi.Finalize = finalize_afterwards
        mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=lambda *_: function()), function)


def _running_mpi() -> Any:
    """mpi4py's MPI module; None if no MPI library can be loaded. ConfigError if MPI has been finalized: any call would then end
    the process.
    """
    mpi, _ = load_mpi()
    if mpi is not None and mpi.Is_finalized():
        raise ConfigError(
            "MPI.Finalize() was called in this process, and MPI cannot be started again. Make all calls of shardload before "
            "it, or leave it out: mpi4py finalizes MPI at the end of the program"
        )
    return mpi


def is_connected() -> bool:
    """True if MPI runs in this process, and there are several ranks. Starts nothing."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1


def world() -> Any:
    """COMM_WORLD as an ``mpi4py.MPI.Comm``; None if no MPI library can be loaded. ConfigError if MPI has been finalized."""
    mpi = _running_mpi()
    return None if mpi is None else mpi.COMM_WORLD


def mpi_problem() -> str:
    """Why MPI cannot be loaded; empty if it can."""
    return load_mpi()[1]


def world_rank_and_size() -> tuple[int, int]:
    """Rank in and size of COMM_WORLD; ``(0, 1)`` if no MPI library can be loaded."""
    comm = world()
    return (0, 1) if comm is None else (int(comm.rank), int(comm.size))


def library_name() -> str:
    """Name and version of the MPI library; empty without MPI."""
    mpi, _ = load_mpi()
    return "" if mpi is None else _name_in(mpi.Get_library_version())


def _name_in(text: str) -> str:
    r"""Name and version in the text of an MPI library: Open MPI puts a comma after them, MPICH many more lines.

    >>> _name_in("MPICH Version:      5.0.2\nMPICH Release date: ..."), _name_in("Open MPI v5.0.8, package: ...")
    ('MPICH 5.0.2', 'Open MPI v5.0.8')
    >>> _name_in("MPI VERSION    : CRAY MPICH version 8.1.28 (ANL base 3.4a2)\nMPI BUILD INFO : ...")
    'CRAY MPICH version 8.1.28 (ANL base 3.4a2)'
    """
    line = text.partition("\n")[0].partition(",")[0].replace("Version:", "")
    return " ".join(line.split()).removeprefix("MPI VERSION : ")


def thread_level() -> str:
    """The level of thread support of MPI, ``"SINGLE"`` to ``"MULTIPLE"``; empty without MPI."""
    mpi, _ = load_mpi()
    if mpi is None:
        return ""
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return {getattr(mpi, f"THREAD_{name}"): name for name in names}.get(mpi.Query_thread(), "MULTIPLE")


def check_threads(comm: Any, option: str, instead: str) -> None:
    """Raise ConfigError if a thread of an option's own may not call MPI, and would have to. `instead`: what to pass."""
    n_ranks = world_rank_and_size()[1] if comm is None else comm.size
    if n_ranks > 1 and thread_level() not in ("", "MULTIPLE"):
        raise ConfigError(
            f"{option} needs an MPI that several threads may call (THREAD_MULTIPLE), and this one was started with "
            f"THREAD_{thread_level()}: leave out mpi4py.rc.thread_level, MPI4PY_RC_THREAD_LEVEL and MPI.Init_thread, or pass "
            f"{instead}"
        )


def check_communicator(comm: Any) -> None:
    """Raise ConfigError unless `comm` is an intracommunicator that includes this rank."""
    mpi = _running_mpi()
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise ConfigError(f"comm is {comm!r}; expected an mpi4py communicator such as MPI.COMM_WORLD")
    if comm == mpi.COMM_NULL:
        raise ConfigError("comm is COMM_NULL: this rank is not in it and must not make this call, or comm was freed")
    if comm.Is_inter():
        raise ConfigError("comm is an intercommunicator; expected an ordinary one such as MPI.COMM_WORLD")


@dataclass(eq=False)
class CommunicatorAttribute:
    """A value that is kept on a communicator, as an MPI attribute, and a lock for making it.

    Attributes
    ----------
    value : object
        The value; None until it is made. Its `free`, if it has one, is called when the communicator is freed.
    making : RLock
        Held by the thread that makes it.
    """

    value: Any = None
    making: threading.RLock = field(default_factory=threading.RLock)


# Two threads may make their first calls at the same time. A signal handler may make a call where this thread holds the lock.
_keeping = threading.RLock()


def attribute_of(comm: Any) -> CommunicatorAttribute:
    """The value that is kept on this communicator. A duplicate that the user makes has its own."""
    with _keeping:
        attribute: CommunicatorAttribute | None = comm.Get_attr(_keyval())
        if attribute is None:
            attribute = CommunicatorAttribute()
            comm.Set_attr(_keyval(), attribute)
        return attribute


@cache
def _keyval() -> int:
    mpi, _ = load_mpi()

    def free(_comm: Any, _keyval: int, attribute: CommunicatorAttribute) -> None:
        if hasattr(attribute.value, "free"):
            attribute.value.free()

    return mpi.Comm.Create_keyval(delete_fn=free)  # type: ignore[no-any-return]


def end_job(seconds: float) -> None:
    """End all processes of the job, `seconds` from now. Not collective: one rank that calls it ends all."""
    mpi, _ = load_mpi()
    flush()
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        time.sleep(seconds)
        abort(mpi)


def abort(mpi: Any) -> NoReturn:
    """End all processes of the job, and this one.

    MPI's call may return: that of MPICH does, while the job is being ended. What a program does after that, up to
    ``MPI_Finalize``, can only fail (a segmentation fault, below an error that somebody has to read).
    """
    flush()
    mpi.COMM_WORLD.Abort(1)
    os._exit(1)


HOW_TO_GET_MPI = (
    "module load the site's MPI, and pip install --no-binary=mpi4py mpi4py with it, or MPI4PY_LIBMPI=/path/to/lib/libmpi.so; "
    "on one machine pip install 'shardload[mpich]'"
)
HOW_WITHOUT_MPI = "To run without MPI, where values go from node to node slowly, set SHARDLOAD_MPI=0"
HOW_ALONE = "If each task is to make a file of its own, set SHARDLOAD_MPI=0"


def launcher_fix(launcher: str, library: str) -> str:
    """What to type where a launcher started several tasks, and the MPI library of mpi4py knows nothing of it."""
    library = library or "mpi4py's MPI library"
    if launcher == "srun":
        flavour, other_flavour = ("pmix", "pmi2") if "Open MPI" in library else ("pmi2", "pmix")
        if "cray" in library.lower():
            flavour, other_flavour = "cray_shasta", "pmi2"
        return (
            f"srun --mpi={flavour} ... is right for {library} (--mpi={other_flavour} for the other kind of MPI); 'srun "
            f"--mpi=list' shows what this cluster has; if you typed mpiexec, take the one of {library}"
        )
    start = "Open MPI's mpirun" if launcher == "mpirun" else "the mpiexec of MPICH or Intel MPI"
    return (
        f"mpi4py uses {library}, the job was started by {start}: use the launcher that comes with {library}, or let mpi4py use "
        "the other library: MPI4PY_LIBMPI=/path/to/lib/libmpi.so"
    )


def launcher_problem() -> str:
    """The message for a launcher that started several tasks while MPI sees one; empty if the launcher started one."""
    launcher, n = launched(os.environ)
    return f"{launcher} started {n} tasks, but MPI was not told: {launcher_fix(launcher, library_name())}" if launcher else ""


def refuse_singletons(how_without: str = "") -> None:
    """ConfigError if this process, which is alone, is one of several tasks of a launcher. `how_without`: what else to do."""
    problem = launcher_problem()
    if not how_without and launched(os.environ)[0] == "srun":  # whose variables alone are enough to start JAX
        how_without = HOW_WITHOUT_MPI
    if world() is None:
        if problem:
            raise ConfigError(f"no MPI library can be loaded ({mpi_problem()}): {HOW_TO_GET_MPI}")
    elif problem:
        parts = ["every process believes that it is alone: COMM_WORLD has size 1", problem, how_without]
        raise ConfigError(". ".join(filter(None, parts)))
