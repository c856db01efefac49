"""How does a test hand a script to Slurm and get back what it printed, without ever hanging?

`Cluster` has a cluster of four nodes kept for it (`daemons.py`, in a process of its own), submits scripts with ``sbatch`` and
asks ``scontrol`` until they have ended. Every wait has an end; a job that is not done by then says where its processes are
(Python's faulthandler), is cancelled, and fails.

By hand::

    python -m tests.slurm.cluster            # a shell in which sinfo, sbatch, srun reach the cluster; it ends with the shell
    python -m tests.slurm.cluster --check    # can there be one here? exit status 0 or 1, and why not
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.jobs.launch import FOREIGN
from tests.slurm.daemons import MARK, NODES, client_environment, why_not

__all__ = ["NODES", "Cluster", "Done", "why_not"]

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90.0
STOP_SECONDS = 60.0
RUNNING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED")
TAIL_LINES = 80


@dataclass(frozen=True)
class Done:
    """A job that has ended.

    Attributes
    ----------
    state : str
        Slurm's word: COMPLETED, FAILED, CANCELLED, TIMEOUT, ...
    code : int
        The script's exit status; 128 + the signal where one ended it.
    output : str
        What the script and its steps printed, both streams.
    seconds : float
        From the start of the job to its end, as seen from outside.
    """

    state: str
    code: int
    output: str
    seconds: float

    def check(self) -> Done:
        """Return this job if it ended well; AssertionError with its last output if not."""
        if self.state != "COMPLETED" or self.code:
            raise AssertionError(f"{self.state}, exit status {self.code}, after {self.seconds:.1f} s\n{tail(self.output)}")
        return self

    def said(self) -> list[dict[str, Any]]:
        """The lines of JSON in the output."""
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]


class Cluster:
    """Four nodes, from ``with`` to its end.

    Attributes
    ----------
    env : dict of str to str
        For commands that are to reach the cluster: ``subprocess.run(["sinfo"], env=cluster.env)``.
    keeper : subprocess.Popen or None
        Runs `daemons.py`; it stops everything when its standard input ends, as it does when this process does.
    """

    def __init__(self) -> None:
        self.keeper: subprocess.Popen[bytes] | None = None
        self._n_jobs = 0
        self._make_folder()

    def _make_folder(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shardload-slurm-"))  # the keeper removes it
        # What a job, or MPI, around this process left in the environment would mislead those that start here.
        foreign = (*FOREIGN, "SBATCH_", "SITE_", "SLURM", "SRUN_", MARK)
        own = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        self.env = {**own, **client_environment(self.folder)}

    def __enter__(self) -> Cluster:
        try:
            return self._start()
        except RuntimeError as error:  # a port that was free a moment ago, perhaps
            print(f"*** {error}\n*** started again", file=sys.stderr, flush=True)
        self._make_folder()
        return self._start()

    def _start(self) -> Cluster:
        # Not in this process's session: Ctrl-C is for the tests, and the keeper sees the end of its input.
        self.keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.slurm.daemons", str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            said = _first_line(self.keeper, START_SECONDS)
            if said["state"] != "ready":
                raise RuntimeError(f"no Slurm cluster: {said['why']}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.keeper is not None:
            for stream in (self.keeper.stdin, self.keeper.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
            self.keeper.wait(STOP_SECONDS)
            self.keeper = None
        shutil.rmtree(self.folder, ignore_errors=True)  # there still if the keeper never came so far

    def run(
        self,
        script: Path,
        *options: str,
        env: Mapping[str, str] | None = None,
        arguments: tuple[str, ...] = (),
        seconds: float = 240.0,
        cwd: Path = ROOT,
    ) -> Done:
        """Submit a script, with more options for sbatch and variables on top of this process's, and wait for its end.

        Raises
        ------
        AssertionError
            If sbatch refuses it, or if it has not ended after `seconds`.
        """
        self._n_jobs += 1
        log = self.folder / f"job-{self._n_jobs}.out"
        command = ["sbatch", "--parsable", f"--output={log}", f"--chdir={cwd}", *options, str(script), *arguments]
        environment = {**self.env, "PYTHONFAULTHANDLER": "1", **(env or {})}
        sent = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
        if sent.returncode:
            raise AssertionError(f"sbatch {script.name}: {sent.stderr}")
        job = sent.stdout.strip().partition(";")[0]
        began = time.monotonic()
        try:
            record = self._wait(job, began + seconds)
        except BaseException:
            self._ask("scancel", job)
            raise
        if record is None:
            where = self._end(job, log)
            raise AssertionError(f"HUNG: {script.name} had not ended after {seconds} s\n{where}")
        code, _, number = record["ExitCode"].partition(":")
        output = log.read_text(errors="replace") if log.exists() else ""
        return Done(record["JobState"], int(code) or (int(number) and 128 + int(number)), output, time.monotonic() - began)

    def _wait(self, job: str, deadline: float) -> dict[str, str] | None:
        """The job's record once it has ended; None if it has not by the deadline."""
        while True:
            words = (word.partition("=") for word in self._ask("scontrol", "show", "job", "-o", job).split())
            record = {name: value for name, _, value in words}
            if record.get("JobState", "PENDING") not in RUNNING:
                return record
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)

    def _end(self, job: str, log: Path) -> str:
        """Have the steps of a job say where they are, and cancel it."""
        self._ask("scancel", "--signal=ABRT", job)
        self._wait(job, time.monotonic() + 3)
        self._ask("scancel", job)
        self._wait(job, time.monotonic() + 10)
        return tail(log.read_text(errors="replace")) if log.exists() else "(it printed nothing)"

    def _ask(self, *command: str) -> str:
        """What a command prints; nothing if the controller does not answer for long: whoever waits asks again."""
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=30, check=False).stdout
        return ""


def tail(output: str) -> str:
    """The last lines of an output."""
    return "\n".join(output.splitlines()[-TAIL_LINES:])


def _first_line(keeper: subprocess.Popen[bytes], seconds: float) -> dict[str, str]:
    assert keeper.stdout is not None
    ready, _, _ = select.select([keeper.stdout], [], [], seconds)
    line = keeper.stdout.readline() if ready else b""
    if not line:
        why = "its keeper ended" if ready else f"nothing heard of its keeper for {seconds} s"
        return {"state": "failed", "why": why}
    return json.loads(line)  # type: ignore[no-any-return]


def main() -> int:
    """A shell with a cluster, or whether there can be one."""
    parser = argparse.ArgumentParser(description="A Slurm cluster of four nodes on this machine.")
    parser.add_argument("--check", action="store_true", help="only say whether one can be started here")
    parser.add_argument("command", nargs="*", help="what to run (default: a shell)")
    arguments = parser.parse_args()
    if why := why_not():
        print(f"no Slurm cluster can be started here: {why}", file=sys.stderr)
        return 1
    if arguments.check:
        return 0
    with Cluster() as cluster:
        command = arguments.command or [os.environ.get("SHELL", "/bin/sh")]
        print(f"nodes {', '.join(NODES)}; the cluster ends with this shell", file=sys.stderr)
        return subprocess.run(command, env=cluster.env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
