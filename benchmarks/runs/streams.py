"""How fast do batches come, beside what people use? All ways of a cell take turns, in one job.

1. Each way gives a few batches, which are compared with the values that their samples must have. That is not timed.
2. Then, `repeats` times, each way once, in another order each time: an epoch, or, if that takes too long, as many batches as
   fit into `seconds` at the rate of the run before. What is less than an epoch is marked. The clock runs from when a way has
   opened the file to its last batch. CPU time is of all threads of all ranks, until they have ended.
3. In some cells the time to the first batch is measured, from before the file is opened: cold (the file is not in the page
   cache), and resumed, after a tenth of the epoch.

Meanwhile the memory of all ranks is looked at four times a second: what they have (PSS, so that what they share counts once)
over what they had before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numcodecs

from benchmarks.cases.cells import OURS
from benchmarks.cases.streams import MEMORY, NAME, RANKS, StreamCell, StreamFile
from benchmarks.remote import RemoteError
from benchmarks.runs.measure import Jobs, Say, drop_from_page_cache, median, new_record, turns, without_folders, write_record

Record = dict[str, Any]
TWICE_THE_DECODING = -2
N_CHECKED = 2
LEAST = 3  # batches of a run
SLOW = 2.5  # a way that takes so many times its seconds is not repeated, one that takes less is given so many for an epoch
SAMPLED_SECONDS = 0.25


class Memory:
    """The most memory that some processes have together, from `with` on, beyond what they had then."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._is_over = pids, threading.Event()
        self.nbytes = 0

    def __enter__(self) -> Memory:
        self._before = sum(map(pss_nbytes, self._pids))
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLED_SECONDS):
            self._look()

    def _look(self) -> None:
        self.nbytes = max(self.nbytes, sum(map(pss_nbytes, self._pids)) - self._before)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()


def pss_nbytes(pid: int) -> int:
    """The memory of a process; of what it shares with others its part. 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def decode_seconds(file: StreamFile, n_cores: int) -> float:
    """Seconds to decode a step on all cores, if nothing else is done: a chunk alone, by the codec's library."""
    if not file.is_zarr:
        return 0.0
    codec = numcodecs.Zstd() if "zstd" in file.layout else numcodecs.Blosc()
    parts = sorted(path for path in (file.path / NAME / "c").rglob("*") if path.is_file())[:8]
    stored = [path.read_bytes() for path in parts]
    codec.decode(stored[0])
    took = []
    for _ in range(3):
        before = time.perf_counter()
        for chunk in stored:
            codec.decode(chunk)
        took.append((time.perf_counter() - before) / len(stored))
    return median(took) * file.n_chunks / file.n_steps / n_cores


def measure_streams(
    cells: Sequence[StreamCell],
    files: dict[str, StreamFile],
    ways: Sequence[str],
    *,
    repeats: int,
    seconds: float,
    out: Path | None = None,
    say: Say = lambda _: None,
    program: Sequence[str] | None = None,
) -> Record:
    """Measure all cells; return (and write to `out`) the record."""
    n_steps = next(iter(files.values())).n_steps
    record = new_record("streams", {}, repeats=repeats, ranks=RANKS, n_steps=n_steps, missing={})
    record["decode_ms"] = {name: 1e3 * decode_seconds(file, record["machine"]["cores"]) for name, file in files.items()}
    with Jobs(RANKS, program) as jobs:
        record["missing"] = dict(jobs.ask("", "missing_ways")[0])
        for way, why in record["missing"].items():
            if way in ways:
                say(f"without {way}: {why}")
        chosen = [way for way in ways if way not in record["missing"]]
        for cell in cells:
            step = step_seconds(cell, record)
            found = Measurement(jobs, cell, files[cell.layout], step, seconds, say).run(chosen, repeats)
            n_epoch = (n_steps - 2 * cell.has_window) // cell.batch
            record["cells"].append({**cell.request(), "step_seconds": step, "n_epoch": n_epoch, "ways": found})
            record["versions"] |= jobs.versions
            if out is not None:
                write_record(out, record)
    return record


def step_seconds(cell: StreamCell, record: Record) -> float:
    """What the program does with a batch; -1 is the convolution."""
    if cell.step_ms == TWICE_THE_DECODING:
        return 2e-3 * cell.batch * float(record["decode_ms"][cell.layout])
    return cell.step_ms / 1e3 if cell.step_ms >= 0 else -1.0


class Measurement:
    """One cell."""

    def __init__(self, jobs: Jobs, cell: StreamCell, file: StreamFile, step: float, seconds: float, say: Say) -> None:
        self.jobs, self.cell, self.file, self.step, self.seconds, self.say = jobs, cell, file, step, seconds, say
        n_samples = file.n_steps - 2 * cell.has_window
        self.n_epoch = n_samples // cell.batch
        self.took: dict[str, Record] = {}

    def run(self, ways: Sequence[str], repeats: int) -> dict[str, Record]:
        """Check, take turns, and measure the time to the first batch."""
        wanted = [way for way in self.cell.ways if way in ways and self._has_way(way)]
        for way in wanted:
            self.took[way] = {"runs": []}
            self._attempt(way, self._check)
        for repeat in range(repeats):
            for way in turns(wanted, repeat):
                self._attempt(way, self._time)
        for way in wanted if self.cell.is_timed_first else ():
            self._attempt(way, self._first)
        rates = {way: rate(took) for way, took in self.took.items()}
        self.say(f"{self.cell.name}: " + ", ".join(f"{way} {value:.1f}/s" for way, value in rates.items() if value))
        return self.took

    def _has_way(self, way: str) -> bool:
        """Whether a way reads such a file, and gives such samples."""
        if way == "mosaic" and self.cell.has_window:
            return False  # windows would be written as samples, each step three times
        return self.file.is_zarr or way not in ("tensorstore", "xbatcher", "mosaic")

    def _attempt(self, way: str, do: Any) -> None:
        if "error" in self.took[way]:
            return
        try:
            do(way)
        except (RemoteError, ValueError) as error:
            self.took[way]["error"] = without_folders(error)
            self.say(f"  {self.cell.name}: {way} failed: {error}")

    def _ask(self, way: str, n: int, **more: Any) -> list[Record]:
        request = {"cell": self.cell.request(), "file": self.file.request(), "n": n, "step": self.step}
        return self.jobs.ask(way, "stream", **request, **more)

    def _check(self, way: str) -> None:
        n = min(N_CHECKED, self.n_epoch)
        replies = self._ask(way, n, check=True)
        by_part: dict[int, list[Any]] = {}
        for reply in replies:
            if by_part.setdefault(reply["part"], reply["given"]) != reply["given"]:
                raise ValueError(f"{way} gives the parts of different samples as one batch")
        of_all = [anchor for given in by_part.values() for batch in given for anchor in batch]
        if way != MEMORY and len(set(of_all)) != len(of_all):
            raise ValueError(f"{way} gives a sample twice")
        self.took[way]["checked"] = len(of_all)
        took = max(r["end"] for r in replies) - min(r["opened"] for r in replies)
        self.took[way]["expected"] = took / n

    def _time(self, way: str) -> None:
        mine = self.took[way]
        each = max(self.step, 0.0 if way in (OURS, MEMORY) else mine["expected"])  # a first guess
        if mine["runs"]:
            each = mine["runs"][-1]["seconds"] / mine["runs"][-1]["n"]
        if mine["runs"] and mine["runs"][-1]["seconds"] > SLOW * self.seconds:
            return
        is_epoch = each * self.n_epoch < SLOW * self.seconds
        n = self.n_epoch if is_epoch else min(self.n_epoch, max(LEAST, int(self.seconds / each)))
        self.jobs.ask(way, "settle")
        with Memory(self.jobs.running["jax"].pids) as memory:
            replies = self._ask(way, n)
        took = max(r["end"] for r in replies) - min(r["opened"] for r in replies)
        decoded = [r["decoded"] for r in replies]
        n_decoded = None if None in decoded else max(decoded) if way == OURS else sum(decoded)
        part = n * self.cell.batch / self.file.n_steps
        run: Record = {
            "n": n,
            "seconds": took,
            "first": max(r["first"] for r in replies) - min(r["opened"] for r in replies),
            "cpu_seconds": sum(r["cpu"] for r in replies),
            "waited": sum(r["waited"] / (r["end"] - r["opened"]) for r in replies) / len(replies),
            "decodes_per_chunk": None if n_decoded is None else n_decoded / (part * self.file.n_chunks),
            "peak_nbytes": memory.nbytes,
        }
        if n == self.n_epoch:  # better than what was less
            mine["runs"] = [other for other in mine["runs"] if other["n"] == n]
        mine["runs"].append(run)
        mine["is_part"] = n < self.n_epoch  # figures of an epoch are then extrapolated
        mine["cpu_seconds_epoch"] = median([r["cpu_seconds"] / r["n"] for r in mine["runs"]]) * self.n_epoch

    def _first(self, way: str) -> None:
        for name, first in (("first_cold", 0), ("first_resumed", self.n_epoch // 10)):
            if not first:
                drop_from_page_cache(self.file)  # type: ignore[arg-type]
            replies = self._ask(way, 1, first=first)
            self.took[way][name] = max(r["first"] for r in replies) - min(r["start"] for r in replies)


def rate(took: Record | None) -> float | None:
    """Batches a second: the median of the runs."""
    runs = (took or {}).get("runs")
    return median([run["n"] / run["seconds"] for run in runs]) if runs else None


def rate_from_first(took: Record | None) -> float | None:
    """The same from the first batch on: what a long run has."""
    runs = [run for run in (took or {}).get("runs", ()) if "first" in run and run["n"] > 1]
    return median([(run["n"] - 1) / (run["seconds"] - run["first"]) for run in runs]) if runs else None


def figure(took: Record, name: str) -> float | None:
    """The median of a figure over the runs."""
    values = [run[name] for run in took.get("runs", ()) if run[name] is not None]
    return median(values) if values else None
