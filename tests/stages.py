"""How are all checks and tests run, in as little time as two cores allow? ``make test`` is this program, and ``make test-all``.

Stages in lanes: those of a lane run one after the other, lanes beside each other. What a stage prints is kept in a file and
shown whole when it has ended, so that stages do not mix their lines. The quick checks come first, and end everything if one
of them fails; after them all stages run, whatever fails, and those that failed are named at the end.

At the end: the seconds and CPU seconds of each stage, and how many tests passed. (Each stage names its slowest tests.)
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
LOGS = ROOT / ".test-logs"
END_SECONDS = 30.0
SHARED_MEMORY = Path("/dev/shm")
SCRATCH_NBYTES = 4 << 30  # what tests write at most, several times over


@dataclass(frozen=True)
class Stage:
    """A command, and what people call it."""

    name: str
    command: tuple[str, ...]
    in_memory: bool = True  # whether temporary files may lie there

    @property
    def log(self) -> Path:
        return LOGS / ("-".join("".join(c if c.isalnum() else " " for c in self.name).split()) + ".log")


def make(name: str, target: str, *variables: str, in_memory: bool = True) -> Stage:
    """A target of the Makefile."""
    return Stage(name, (os.environ.get("MAKE", "make"), target, *variables), in_memory)


def tool(name: str, *command: str) -> Stage:
    """A program of the environment."""
    return Stage(name, (str(BIN / command[0]), *command[1:]))


QUICK = (
    tool("ruff check", "ruff", "check", "."),
    tool("ruff format", "ruff", "format", "--check", "."),
    tool("import direction", "lint-imports", "--no-cache"),
)
# Two lanes that end at about the same time, so that both cores have something to do until the end. The third waits more than it
# works, for the nodes that it starts and for jobs in a queue.
LANES = (
    (make("pytest: 1 process and the jobs it starts", "test-plain"),),
    (
        tool("mypy", "mypy"),
        make("pytest: 4 ranks with Open MPI", "test-openmpi", "N=4"),
        make("pytest: 2 ranks with the oldest versions", "test-oldest", "N=2"),
        make("doctests", "test-doctests"),
        *((make("the site of docs/", "docs"),) if os.environ.get("ALL") else ()),
        make("pytest: 4 ranks", "test-mpi", "N=4"),
    ),
    (make("pytest: slurm", "test-slurm", in_memory=False),),  # each node has a /dev/shm of its own
)


class Run:
    """Stages that have been started, and what came of them."""

    def __init__(self, scratch: Path | None = None) -> None:
        self.scratch = scratch
        self.seconds: dict[str, tuple[float, float]] = {}  # by the clock, and of CPUs by processes that were waited for
        self.counts = {"passed": 0, "failed": 0}  # tests of all runs of pytest
        self.failed: list[str] = []
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._ended = False

    def run(self, stage: Stage) -> bool:
        """Run a stage and show what it printed. Whether all was well."""
        began = time.monotonic()
        env = {**os.environ, "SHARDLOAD_STAGE": stage.name}
        if self.scratch is not None and stage.in_memory:
            env["TMPDIR"] = str(self.scratch)
        with stage.log.open("wb") as log:
            with self._lock:
                if self._ended:
                    return False
                process = subprocess.Popen(
                    stage.command,
                    cwd=ROOT,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for this program, which passes it on
                )
                self._running[stage.name] = process
            _, status, used = os.wait4(process.pid, 0)
            code = process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        said = stage.log.read_text(errors="replace").strip()
        with self._lock:
            del self._running[stage.name]
            self.seconds[stage.name] = (seconds, used.ru_utime + used.ru_stime)
            for n, outcome in re.findall(r"(\d+) (passed|failed|error)", summary_of(said)):
                self.counts["passed" if outcome == "passed" else "failed"] += int(n)
            how = f"FAILED with exit status {code} after" if code else "passed in"
            lines = [f"\n=== {stage.name}", *([said] if said else []), f"=== {stage.name}: {how} {seconds:.1f} s"]
            if code:
                self.failed.append(stage.name)
                lines[-1] = f"*** {lines[-1][4:]}"
            print("\n".join(lines), flush=True)
        return code == 0

    def lane(self, stages: tuple[Stage, ...]) -> None:
        """Run stages one after the other."""
        for stage in stages:
            self.run(stage)

    def end(self) -> None:
        """Begin nothing more, and end what runs: by Ctrl-C, so that it ends the jobs that it has started."""
        with self._lock:
            self._ended = True
            running = [*self._running.values()]
        for number, seconds in ((signal.SIGINT, END_SECONDS), (signal.SIGKILL, None)):
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, number)
            deadline = None if seconds is None else time.monotonic() + seconds
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))


@contextmanager
def scratch() -> Iterator[Path | None]:
    """A folder in memory for temporary files, where there is room: a tenth of the work of all tests is that of a disk's file
    system. None where there is not."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
        folder = Path(tempfile.mkdtemp(prefix="shardload-tests-", dir=SHARED_MEMORY)) if free >= SCRATCH_NBYTES else None
        if folder is not None:
            folder.chmod(0o711)  # a test takes the rights of another user, who must come to what that one may read
    except OSError:
        folder = None
    try:
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def segments() -> set[Path]:
    """Shared memory of MPICH. What belongs to ranks that tests have killed stays when they are gone."""
    return {*SHARED_MEMORY.glob("mpich_shm_*")}


def remove_unused(found: set[Path]) -> None:
    """Remove those of some segments that no process has mapped."""
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            used += maps.read_text()
    for segment in found:
        if str(segment) not in used:
            with suppress(OSError):
                segment.unlink()


def summary_of(said: str) -> str:
    """The last line that pytest prints, such as ``=== 2 failed, 7 passed, 1 error in 3.00s ===``."""
    lines = re.findall(r"^=* ?\d+ (?:passed|failed|error|deselected).* in [\d.]+s.*$", said, re.MULTILINE)
    return lines[-1] if lines else ""


def report(run: Run, seconds: float) -> None:
    """Say how long everything took."""
    print("\n--- seconds of each stage (some run beside each other), CPU seconds")
    for name, (took, of_cpus) in sorted(run.seconds.items(), key=lambda item: -item[1][0]):
        print(f"{took:8.1f} {of_cpus:8.1f}  {name}")
    print()
    if run.failed:
        print(f"*** FAILED after {seconds:.0f} s: {'; '.join(run.failed)}")
    else:
        print(f"make test{'-all' if os.environ.get('ALL') else ''}: all stages passed in {seconds:.0f} s")
    print(f"{run.counts['passed']} passed, {run.counts['failed']} failed")


def share_cores_for_long() -> None:
    """Have a process that wakes wait for its turn. There are more ranks than cores, and each wakes another with each message:
    to change places at once is a tenth of all their time."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> int:
    """Run all stages; 1 if one failed."""
    parser = argparse.ArgumentParser(description="All checks and tests.")
    parser.add_argument("--began", type=float, default=time.time(), help="when `make` began, in seconds since 1970")
    began: float = parser.parse_args().began
    share_cores_for_long()
    LOGS.mkdir(exist_ok=True)
    for old in LOGS.glob("*.log"):
        old.unlink()
    before = segments()
    with scratch() as folder:
        code = run_all(Run(folder), began)
    remove_unused(segments() - before)
    return code


def run_all(run: Run, began: float) -> int:
    """Run all stages and report; 1 if one failed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background of a shell Ctrl-C is ignored, also by what starts there
        signal.signal(number, signal.default_int_handler)
    try:
        quick = all([run.run(stage) for stage in QUICK])
        lanes = [threading.Thread(target=run.lane, args=(lane,), daemon=True) for lane in (LANES if quick else ())]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
    except KeyboardInterrupt:
        run.end()
        print(f"\n*** interrupted; what the stages printed so far is in {LOGS}", flush=True)
        return 130
    planned = [stage.name for lane in (QUICK, *(LANES if quick else ())) for stage in lane]
    run.failed += [name for name in planned if name not in run.seconds]  # a lane that broke off
    report(run, time.time() - began)
    return int(bool(run.failed))


if __name__ == "__main__":
    sys.exit(main())
