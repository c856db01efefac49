"""How long do loads from a store take, beside what people use? All ways of a cell take turns, in one job, at one server.

1. Each way loads once: every shard is compared with the plain values, after the clock has stopped. This load counts only if
   it takes long; such a way is not repeated.
2. Then, `repeats` times, each way once, in another order each time. The best counts: on a machine that is shared with the
   server, what else goes on makes a load longer, never shorter.
3. What a load asked of the server is the difference of the server's own counts. CPU seconds are of all threads of the clients,
   memory is the sum over them of the most that each had beyond what it had before.

Two ways more say what the machine can do: `fetch` takes all stored bytes once and throws them away, `decode` is the floor of
local loads. The floor of a load from the store is the longer one of decoding, and of the stored bytes at the highest rate of
`fetch`, with six times the latency.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cases.layouts import File
from benchmarks.cases.stores import DECODE, FETCH, ROUNDS, STORE_RANKS, STREAM, STREAM_WAYS, StoreCell
from benchmarks.cases.streams import StreamFile
from benchmarks.peers.store_server import CONNECTION_NBYTES, LATENCY_MS, Counts
from benchmarks.remote import RemoteError
from benchmarks.runs.measure import Jobs, Say, new_record, turns, warm_free_memory, without_folders, write_record

Record = dict[str, Any]
SLOW_SECONDS = 8.0
SETTLED_SECONDS = 0.05  # nginx counts a request after its last byte


class Server(Protocol):
    """`StoreServer`, or one of the tests."""

    url: str

    def counts(self) -> Counts: ...


def measure_stores(
    cells: Sequence[StoreCell],
    files: dict[str, File],
    ways: Sequence[str],
    server: Server,
    root: Path,
    *,
    repeats: int,
    ranks: int = STORE_RANKS,
    stream: StreamFile | None = None,
    out: Path | None = None,
    say: Say = lambda _: None,
) -> Record:
    """Measure all cells, and streams; return (and write to `out`) the record. `root` is what the server serves."""
    how = {"latency_ms": LATENCY_MS, "connection_nbytes": CONNECTION_NBYTES}
    record = new_record("stores", files, repeats=repeats, ranks=ranks, server=how, missing={})
    with Jobs(ranks) as jobs:
        record["missing"] = dict(jobs.ask("", "store_missing")[0])
        for way, why in record["missing"].items():
            if way in ways:
                say(f"without {way}: {why}")
        chosen = [way for way in ways if way not in record["missing"]]
        for cell in cells:
            found = Measurement(jobs, cell, files[cell.layout], server, root, say).run(chosen, repeats)
            file = files[cell.layout]
            record["cells"].append({**vars(cell), "stored_nbytes": file.stored_nbytes, "nbytes": file.nbytes, "ways": found})
            record["versions"] |= jobs.versions
            if out is not None:
                write_record(out, record)
        if stream is not None:
            record[STREAM] = measure_stream(jobs, stream, server, root, repeats, say)
            if out is not None:
                write_record(out, record)
    return record


class Measurement:
    """One cell."""

    def __init__(self, jobs: Jobs, cell: StoreCell, file: File, server: Server, root: Path, say: Say) -> None:
        self.jobs, self.cell, self.file, self.server, self.say = jobs, cell, file, server, say
        references = file.path.with_suffix(".references.json")
        key = file.path.relative_to(root).as_posix()
        self.request = {**file.request(), "key": key, "url": server.url, "references": str(references)}
        self.took: dict[str, Record] = {}

    def run(self, ways: Sequence[str], repeats: int) -> dict[str, Record]:
        """Check, and take turns."""
        wanted = [way for way in ways if self.cell.has_way(way)]
        for way in wanted:
            self.took[way] = {"runs": []}
            self._attempt(way, is_check=True)
        for repeat in range(repeats):
            for way in turns(wanted, repeat):
                if not self._is_slow(way):
                    self._attempt(way)
        told = {way: best(self.took[way], "seconds") for way in wanted}
        self.say(f"{self.cell.label}: " + ", ".join(f"{way} {value:.2f}" for way, value in told.items() if value))
        return self.took

    def _is_slow(self, way: str) -> bool:
        seconds = best(self.took[way], "seconds")
        return seconds is not None and seconds > SLOW_SECONDS

    def _attempt(self, way: str, *, is_check: bool = False) -> None:
        mine = self.took[way]
        if "error" in mine:
            return
        try:
            if is_check and way == "virtualizarr":
                self.jobs.ask(way, "store_references", file=self.request)
            self._load(way, mine, is_check=is_check)
        except RemoteError as error:
            mine["error"] = without_folders(error)
            self.say(f"  {self.cell.label}: {way} failed: {error}")

    def _load(self, way: str, mine: Record, *, is_check: bool) -> None:
        if not is_check:
            warm_free_memory(self.file.nbytes)
            self.jobs.ask("", "settle")
        if way == DECODE:
            found = self.jobs.time("floor", "run", file=self.request)
            if not is_check:
                mine["runs"].append({"seconds": found["seconds"], "cpu_seconds": found["cpu_seconds"]})
            return
        before = self.server.counts()
        replies = self.jobs.ask(way, "store", file=self.request, spec=self.cell.spec, verify=is_check)
        time.sleep(SETTLED_SECONDS)
        asked = self.server.counts().since(before)
        seconds = max(r["end"] for r in replies) - min(r["start"] for r in replies)
        if is_check:
            mine["checked"] = way != FETCH
            if seconds < SLOW_SECONDS:
                return
        mine["report"] = replies[0]["report"]
        mine["runs"].append(
            {
                "seconds": seconds,
                "cpu_seconds": sum(r["cpu"] for r in replies),
                "requests": asked.requests,
                "fetched_nbytes": asked.nbytes,
                "server_cpu_seconds": asked.cpu_seconds,
                "peak_nbytes": sum(r["peak_nbytes"] for r in replies),
            }
        )


def measure_stream(jobs: Jobs, file: StreamFile, server: Server, root: Path, repeats: int, say: Say) -> Record:
    """The same stream of batches from the page cache, and from the store: the batches a second of each run."""
    key = file.path.relative_to(root).as_posix()
    found: Record = {"n_steps": file.n_steps, "ways": {way: [] for way in STREAM_WAYS}}
    request = {"file": {**file.request(), "key": key, "url": server.url}}
    for repeat in range(repeats + 1):  # the first one compiles
        for way in turns(STREAM_WAYS, repeat):
            try:
                replies = jobs.ask(way, "store_stream", **request)
            except RemoteError as error:
                found.setdefault("error", without_folders(error))
                say(f"  {way} failed: {error}")
                return found
            if repeat:
                took = max(r["end"] for r in replies) - min(r["start"] for r in replies)
                found["ways"][way].append(replies[0]["n"] / took)
    say("stream: " + ", ".join(f"{way} {max(rates):.1f}/s" for way, rates in found["ways"].items()))
    return found


def best(took: Record | None, name: str) -> float | None:
    """A figure of the fastest run."""
    runs = (took or {}).get("runs")
    return min(runs, key=lambda run: run["seconds"]).get(name) if runs else None


def total_rate(record: Record) -> float | None:
    """Bytes a second that all clients together get: the highest of all runs that only fetch."""
    rates = [
        run["fetched_nbytes"] / run["seconds"]
        for cell in record["cells"]
        for run in cell["ways"].get(FETCH, {}).get("runs", ())
    ]
    return max(rates, default=None)


def floor_seconds(record: Record, cell: Record) -> float | None:
    """The least that a load can take."""
    decoding, rate = best(cell["ways"].get(DECODE), "seconds"), total_rate(record)
    if decoding is None or rate is None:
        return None
    return max(decoding, cell["stored_nbytes"] / rate + ROUNDS * record["server"]["latency_ms"] / 1000)
