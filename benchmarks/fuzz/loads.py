"""Can a damaged file crash shardload, hang it, fill the memory, or give wrong values? Thousands of mutations of good files.

1. Workers (`worker`) are processes that take numbers of cases and report the outcomes. The number alone determines the case.
2. A worker that dies, or exceeds the deadline, is an outcome too; the next case gets a new worker.
3. `Outcomes` counts, and keeps the cases that must not happen. A crash inside the HDF5 library is kept with its versions:
   it can be repeated with ``python -m benchmarks fuzz --seed S --first N --cases 1``.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import h5py

GOOD = ("right", "value", "as declared", "missing", "refused", "large")
DEADLINE_SECONDS = 60.0  # far more than any case takes, on a busy machine too
_START_SECONDS = 300.0
ROOT = Path(__file__).parents[2]


@dataclass
class Outcomes:
    """What came out: how often, by kind of file, and each case that must not happen."""

    seed: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[dict[str, Any]] = field(default_factory=list)

    def add(self, number: int, kind: str, what: str, came: str, text: str) -> None:
        """Note one case."""
        self.counts.setdefault(kind, Counter())[came] += 1
        if came not in GOOD:
            self.bad.append({"number": number, "kind": kind, "what": what, "came": came, "text": text})

    @property
    def n_cases(self) -> int:
        """Cases so far."""
        return sum(sum(found.values()) for found in self.counts.values())

    def total(self) -> Counter[str]:
        """Over all kinds of files."""
        return sum(self.counts.values(), Counter())

    def table(self) -> str:
        """For a person: a row for each kind of file."""
        total = self.total()
        columns = [name for name in GOOD if total[name]] + sorted(name for name in total if name not in GOOD)
        rows = [("", *columns), *((kind, *(str(self.counts[kind][c]) for c in columns)) for kind in sorted(self.counts))]
        rows.append(("all", *(str(total[c]) for c in columns)))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        return "\n".join(
            "  ".join(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        )

    def record(self) -> dict[str, Any]:
        """For a file."""
        packages = ("h5py", "hdf5plugin", "zarr", "numcodecs", "deflate", "numpy", "jax")
        return {
            "kind": "fuzz",
            "seed": self.seed,
            "cases": self.n_cases,
            "outcomes": dict(self.total()),
            "by_kind": {kind: dict(found) for kind, found in sorted(self.counts.items())},
            "bad": sorted(self.bad, key=lambda case: case["number"]),
            "versions": {name: version(name) for name in packages} | {"HDF5": h5py.version.hdf5_version},
        }


class Worker:
    """One process that runs cases."""

    def __init__(self, seed: int) -> None:
        command = [sys.executable, "-m", "benchmarks.fuzz.worker", str(seed)]
        # netCDF4 sets this to filters of its own, which fit its own HDF5 alone.
        environment = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # In a session of its own: else Ctrl-C would look like a crash.
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **pipes)
        self._said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._was_late = False
        if self._answer(_START_SECONDS) is None:
            self.close()
            raise RuntimeError(f"a worker did not start: {''.join(self._said)[-2000:]}")

    def _listen(self) -> None:
        for line in self._process.stderr or ():
            self._said = [*self._said[-20:], line]

    def run(self, number: int) -> list[Any]:
        """What came out of a case: number, kind, what was damaged, outcome, text."""
        if self._process.stdin is None:
            raise RuntimeError("a worker without a standard input")
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        found: list[Any] | None = self._answer(DEADLINE_SECONDS)
        if found is not None:
            return found
        if self._was_late:
            return [number, "?", "?", "HANG", f"no answer for {DEADLINE_SECONDS:.0f} s"]
        status = self._process.wait()
        self._listener.join()
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        return [number, "?", "?", "CRASH", f"{name}: {''.join(self._said)[-600:]}"]

    def _answer(self, seconds: float) -> Any:
        """The next line; None if the process ended, by itself or because it was too late."""

        def too_late() -> None:
            self._was_late = True
            self._process.kill()

        timer = threading.Timer(seconds, too_late)
        timer.start()
        try:
            line = self._process.stdout.readline() if self._process.stdout else ""
        finally:
            timer.cancel()
        return json.loads(line) if line.endswith("\n") else None

    @property
    def is_alive(self) -> bool:
        """Whether it can take another case."""
        return self._process.poll() is None and not self._was_late

    def close(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        if self._process.stderr is not None:
            self._process.stderr.close()


def fuzz(
    seed: int, n_cases: int, *, first: int = 0, n_workers: int = 1, say: Callable[[str], None] = lambda text: None
) -> Outcomes:
    """Run the cases `first` to ``first + n_cases`` of a seed."""
    outcomes, lock = Outcomes(seed), threading.Lock()
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(first, first + n_cases):
        numbers.put(number)
    failures: list[BaseException] = []

    def work() -> None:
        worker = None
        try:
            while True:
                number = numbers.get_nowait()
                worker = worker or Worker(seed)
                found = worker.run(number)
                if found[3] in ("CRASH", "HANG"):
                    found[1:3] = _told(seed, number)
                with lock:
                    outcomes.add(*found)
                    if found[3] not in GOOD:
                        say(f"case {number}: {found}")
                    if outcomes.n_cases % 1000 == 0:
                        say(f"{outcomes.n_cases} cases: {dict(outcomes.total())}")
                if not worker.is_alive:
                    worker.close()
                    worker = None
        except queue.Empty:
            pass
        except BaseException as error:
            failures.append(error)
        finally:
            if worker is not None:
                worker.close()

    threads = [threading.Thread(target=work) for _ in range(n_workers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # interrupted: the threads find no more cases
        with suppress(queue.Empty):
            while True:
                numbers.get_nowait()
    if failures:
        raise failures[0]
    return outcomes


def _told(seed: int, number: int) -> list[str]:
    """Kind and damage of a case whose worker could not say them any more."""
    script = (
        "import pathlib, sys, tempfile\nfrom benchmarks.fuzz.files import make_case, make_kinds\n"
        "with tempfile.TemporaryDirectory() as made:\n"
        "    case = make_case(make_kinds(pathlib.Path(made)), int(sys.argv[1]), int(sys.argv[2]))\n"
        "print(case.kind.name)\nprint(case.what)\n"
    )
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(seed), str(number)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    lines = told.stdout.splitlines()
    return lines[:2] if len(lines) >= 2 else ["?", "?"]
