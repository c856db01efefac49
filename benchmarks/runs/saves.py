"""How long does a save take, beside what people use today, and how much memory does it take on each rank?

All ways of a cell take turns, as in `measure`; the array is on the devices before, and the old file is removed before each
save. What each way writes is first compared with the plain values by the format's own library, in this process. Files are
written into memory (``/dev/shm``) unless another folder is named: how long a disk takes to sync is not the subject.

Each cell is written to the record when it is done. A run that was stopped, or had no more time, is taken up by the next one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr

from benchmarks.cases.cells import FLOOR, OURS, Cell, spec_text
from benchmarks.cases.layouts import NAME, boxes
from benchmarks.cases.saves import (
    ALLOWANCE_NBYTES,
    AT_LEAST,
    FLOOR_AT_MOST,
    MEMORY_STAGING_NBYTES,
    SAVE_LAYOUTS,
    SAVE_MODES,
    SAVE_PEERS,
    SAVE_SPECS,
    SLOW_SECONDS,
    STAGING_NBYTES,
    VERY_SLOW_SECONDS,
    SaveLayout,
    has_way,
    save_layout,
)
from benchmarks.remote import RemoteError
from benchmarks.runs.environments import missing
from benchmarks.runs.measure import Jobs, Say, median, new_record, turns, warm_free_memory, without_folders, write_record

MIB = 1 << 20
MEMORY = Path("/dev/shm")
Record = dict[str, Any]


def default_ways(say: Say) -> list[str]:
    """All ways that are installed here."""
    found = []
    for way in (OURS, *SAVE_PEERS):
        if missing(way):
            say(f"without {way}: {missing(way)}")
        else:
            found.append(way)
    return [*found, FLOOR]


def default_folder(data: Path, nbytes: int) -> Path:
    """Where files are written: in memory if it has room for four of them, else beside the plain values."""
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * nbytes
    return (MEMORY if has_room else data) / "shardload-saves"


def measure_saves(
    cells: Sequence[Cell],
    reference: Path,
    folder: Path,
    ways: Sequence[str],
    *,
    repeats: int,
    out: Path | None = None,
    say: Say = lambda _: None,
    program: Sequence[str] | None = None,
    resume: bool = False,
    minutes: float = 0.0,
) -> Record:
    """Time all cells; return (and write to `out`) the record of all samples.

    With `resume`, cells that the record in `out` has stay as they are, if it is of the same size, machine and kind of folder.
    After `minutes` no cell is begun that would, by the time of those before, end later.
    """
    values = np.load(reference, mmap_mode="r")
    record = new_record("save", {}, repeats=repeats, shape=list(values.shape), nbytes=int(values.nbytes))
    record["is_memory"] = MEMORY in folder.parents
    if resume and out is not None and out.exists():
        record = _taken_up(json.loads(out.read_text()), record, say)
    there = {(row["layout"], row["spec"], row["ranks"]) for row in record["cells"]}
    todo = [cell for cell in cells if (cell.layout, cell.spec, cell.ranks) not in there]
    folder.mkdir(parents=True, exist_ok=True)
    clock = Clock(todo, minutes)
    for n, of_n in groupby(todo, key=lambda cell: cell.ranks):
        with Jobs(n, program) as jobs:
            for cell in of_n:
                if clock.is_over(cell):
                    say(f"no time for {cell.label}: take it up with --resume")
                    continue
                with clock.timing(cell):
                    layout = save_layout(cell.layout, values.shape[0])
                    found = _measure_cell(jobs, cell, layout, reference, folder, ways, repeats, say)
                record["cells"].append({**vars(cell), "nbytes": int(values.nbytes), **found})
                record["versions"] |= jobs.versions
                if out is not None:
                    write_record(out, record)
                say(clock.told())
    return record


def _taken_up(old: Record, new: Record, say: Say) -> Record:
    """The record that another run has left, if it is of the same thing."""
    for key in ("kind", "shape", "is_memory", "machine"):
        if old.get(key) != new[key]:
            say(f"all anew: the record is of another {key}: {old.get(key)}, now {new[key]}")
            return new
    say(f"{len(old['cells'])} cells are there already")
    return old


class Clock:
    """How long cells take: how many are done, and how many minutes the others will take."""

    def __init__(self, cells: Sequence[Cell], minutes: float) -> None:
        self.began, self.minutes = time.monotonic(), minutes
        self.left = list(cells)
        self.n_all = len(self.left)
        self.took: list[tuple[Cell, float]] = []

    @contextmanager
    def timing(self, cell: Cell) -> Iterator[None]:
        """Measure this cell."""
        began = time.monotonic()
        yield
        self.left.remove(cell)
        self.took.append((cell, time.monotonic() - began))

    def expected(self, cell: Cell) -> float:
        """Seconds, by the longest of its layout, or of all until there is one."""
        of_layout = [seconds for other, seconds in self.took if other.layout == cell.layout]
        return max(of_layout or [seconds for _, seconds in self.took] or [0.0])

    def is_over(self, cell: Cell) -> bool:
        """Whether there is no time for this cell."""
        return bool(self.minutes) and time.monotonic() - self.began + self.expected(cell) > 60 * self.minutes

    def told(self) -> str:
        """Progress, in words."""
        rest = sum(map(self.expected, self.left))
        passed = time.monotonic() - self.began
        return f"  {len(self.took)} of {self.n_all} cells in {passed / 60:.1f} min; about {rest / 60:.1f} min for the rest"


def _measure_cell(
    jobs: Jobs, cell: Cell, layout: SaveLayout, reference: Path, folder: Path, ways: Sequence[str], repeats: int, say: Say
) -> Record:
    """Compare, then take turns."""
    wanted = [way for way in ways if has_way(cell, way)]
    took: dict[str, Record] = {way: {"seconds": [], "cpu_seconds": [], "peaks_nbytes": []} for way in wanted}
    nbytes = int(np.load(reference, mmap_mode="r").nbytes)

    def attempt(way: str, is_first: bool = False) -> None:
        mine = took[way]
        if "error" in mine:
            return
        path = folder / f"{way}{'.zarr' if way == 'orbax' else layout.suffix}"
        remove(path)
        if not is_first or way in SAVE_PEERS:
            warm_free_memory(nbytes)
        request = {"spec": cell.spec, "layout": layout.request(), "path": str(path), "reference": str(reference)}
        try:
            replies = jobs.ask(way, "save", **request)
            seconds = max(r["end"] for r in replies) - min(r["start"] for r in replies)
            mine["stored_nbytes"] = stored_nbytes(path)
            if is_first and way not in (FLOOR, "orbax"):
                check(path, layout, reference)
                mine["verified"] = True
        except (RemoteError, OSError, ValueError) as error:
            mine["error"] = without_folders(error)
            say(f"  {cell.label}: {way} failed: {error}")
            return
        finally:
            remove(path)
        if "peak_nbytes" in replies[0]:  # of the first save too: later ones use memory again that it left
            mine["peaks_nbytes"].append([r["peak_nbytes"] for r in replies])
        if is_first:
            mine["is_slow"] = way in SAVE_PEERS and seconds > SLOW_SECONDS
            if not (mine["is_slow"] and seconds > VERY_SLOW_SECONDS):
                return
        mine["seconds"].append(seconds)
        mine["cpu_seconds"].append(sum(r.get("cpu", 0.0) for r in replies))
        mine["report"] = replies[0].get("report") or {}

    for way in wanted:
        attempt(way, is_first=True)
    for repeat in range(repeats):
        for way in turns(wanted, repeat):
            if not took[way].get("is_slow") or not took[way]["seconds"]:
                attempt(way)
    say(f"save {cell.label}: " + ", ".join(f"{way} {median(t['seconds']):.3f}" for way, t in took.items() if t["seconds"]))
    return {"ways": took}


def measure_save_memory(
    cells: Sequence[Cell],
    reference: Path,
    folder: Path,
    *,
    staging_nbytes: int = MEMORY_STAGING_NBYTES,
    say: Say = lambda _: None,
    program: Sequence[str] | None = None,
) -> Record:
    """The most memory that each rank takes beyond its arrays: shardload under a cap, and gathering on rank 0 beside it."""
    values = np.load(reference, mmap_mode="r")
    record = new_record("save-memory", {}, shape=list(values.shape), staging_nbytes=staging_nbytes)
    folder.mkdir(parents=True, exist_ok=True)
    for n, of_n in groupby(cells, key=lambda cell: cell.ranks):
        for cell in of_n:
            with Jobs(n, program) as jobs:  # each anew: memory that an earlier save left would not be counted
                layout = save_layout(cell.layout, values.shape[0])
                for way in (OURS, "gather"):
                    path = folder / f"{way}{layout.suffix}"
                    remove(path)
                    request = {"spec": cell.spec, "layout": layout.request(), "path": str(path), "reference": str(reference)}
                    more = {"staging": staging_nbytes} if way == OURS else {}
                    try:
                        replies = jobs.ask(way, "save", **request, **more)
                        found: Record = {"peaks_nbytes": [r["peak_nbytes"] for r in replies]}
                        found["ok"] = max(found["peaks_nbytes"]) <= staging_nbytes + ALLOWANCE_NBYTES
                    except RemoteError as error:
                        found = {"error": without_folders(error), "ok": False}
                    finally:
                        remove(path)
                    record["cells"].append({**vars(cell), "way": way, **found})
                    say(f"{cell.label}, {way}: {found.get('error') or [p // MIB for p in found['peaks_nbytes']]} MiB")
            record["versions"] |= jobs.versions
    return record


def remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def stored_nbytes(path: Path) -> int:
    """On disk: what is allocated, since the floor leaves holes."""
    paths = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(os.stat(p).st_blocks * 512 for p in paths)


def check(path: Path, layout: SaveLayout, reference: Path) -> None:
    """ValueError unless the format's own library reads the plain values, in the layout that was asked for."""
    values = np.load(reference, mmap_mode="r")
    slabs = list(boxes(values.shape, (min(64, len(values)), *values.shape[1:])))
    if layout.is_zarr:
        array = zarr.open_group(path, mode="r")[NAME]
        told: Any = array.chunks, array.shards
        same = all(np.array_equal(array[slab], values[slab]) for slab in slabs)
    else:
        with h5py.File(path) as file:
            data = file[NAME]
            told = data.chunks, None
            if data.compression != layout.codec:
                raise ValueError(f"{path.name} is compressed with {data.compression}; expected {layout.codec}")
            same = all(np.array_equal(data[slab], values[slab]) for slab in slabs)
    if told != (layout.chunks, layout.shards):
        raise ValueError(f"{path.name} has chunks and shards {told}; expected {layout.chunks, layout.shards}")
    if not same:
        raise ValueError(f"{path.name} does not hold the values that were saved")


# --- the report


def save_memory_table(record: Record | None) -> list[str]:
    """A row per cell: the rank that took most, and rank 0."""
    if record is None:
        return []
    limit = record["staging_nbytes"] // MIB
    lines = [
        f"## Memory of saving {' x '.join(map(str, record['shape']))} float32",
        "",
        f"MiB beyond the arrays, of the rank that took most / of rank 0; staging {limit} MiB, so at most "
        f"{limit + ALLOWANCE_NBYTES // MIB} MiB on every rank. Gathering has no limit.",
        "",
        "| file | sharding | ranks | shardload | | gather |",
        "|---|---|--:|--:|---|--:|",
    ]

    def told(cell: Record) -> str:
        peaks = cell.get("peaks_nbytes")
        return f"{max(peaks) / MIB:.0f} / {peaks[0] / MIB:.0f}" if peaks else "failed"

    beside = {(c["layout"], c["spec"], c["ranks"]): told(c) for c in record["cells"] if c["way"] != OURS}
    for cell in record["cells"]:
        if cell["way"] == OURS:
            key = cell["layout"], cell["spec"], cell["ranks"]
            row = [cell["layout"], f"`{spec_text(cell['spec'])}`", str(cell["ranks"]), told(cell)]
            lines.append("| " + " | ".join([*row, "met" if cell["ok"] else "**not met**", beside.get(key, "")]) + " |")
    return [*lines, ""]


def _seconds(cell: Record, way: str) -> float | None:
    samples = cell["ways"].get(way, {}).get("seconds")
    return median(samples) if samples else None


def _ratio(cell: Record, way: str) -> float | None:
    ours, other = _seconds(cell, OURS), _seconds(cell, way)
    return None if not ours or other is None else other / ours


def peak_nbytes(cell: Record, way: str, rank: int | None = None) -> int | None:
    """The most memory that a save took beyond the arrays: of one rank, or of all."""
    peaks = cell["ways"].get(way, {}).get("peaks_nbytes")
    return max(max(one) if rank is None else one[rank] for one in peaks) if peaks else None


def in_order(record: Record) -> list[Record]:
    """The cells by layout, sharding and number of ranks."""
    return sorted(
        record["cells"], key=lambda row: (SAVE_LAYOUTS.index(row["layout"]), SAVE_SPECS.index(row["spec"]), row["ranks"])
    )


def save_table(record: Record | None) -> list[str]:
    """A row per cell: shardload's time, ratios, and peaks of memory."""
    if record is None:
        return []
    ways = [way for way in (*SAVE_MODES, *SAVE_PEERS) if any(way in cell["ways"] for cell in record["cells"])]
    where = "into memory" if record["is_memory"] else "to a disk"
    lines = [
        f"## Saving {' x '.join(map(str, record['shape']))} float32 {where}, {record['repeats']} repeats",
        "",
        "MiB: the most memory beyond the arrays that a save took, of the rank that took most / of rank 0. "
        "Orbax writes a checkpoint in a format of its own.",
        "",
        "| file | sharding | ranks | shardload, s | MiB | "
        + " | ".join(f"{way} | MiB" for way in ways)
        + " | floor, s | x floor |",
        "|---|---|--:|--:|--:|" + "--:|--:|" * len(ways) + "--:|--:|",
    ]
    for cell in in_order(record):
        row: list[str] = [cell["layout"], f"`{spec_text(cell['spec'])}`", str(cell["ranks"]), _spread(cell, OURS)]
        row.append(_peaks(cell, OURS))
        for way in ways:
            row += [_times(_ratio(cell, way)) or _spread(cell, way), _peaks(cell, way)]
        floor, over = _seconds(cell, FLOOR), _ratio(cell, FLOOR)
        row += ["" if floor is None else f"{floor:.3f}", _times(1 / over if over else None)]
        lines.append("| " + " | ".join(row) + " |")
    return [*lines, ""]


def save_musts(record: Record | None) -> list[tuple[str, str, str, bool | None]]:
    """Of each goal: where, what, what was measured, and whether it is met."""
    found: list[tuple[str, str, str, bool | None]] = []
    for cell in [] if record is None else in_order(record):
        label = f"save {Cell(cell['layout'], cell['spec'], cell['ranks']).label}"
        for (layout, way), least in AT_LEAST.items():
            value = _ratio(cell, way)
            if layout == cell["layout"] and value is not None:
                found.append((label, f"{least:g}x {way}", _times(value), value >= least))
        floor, peak = _ratio(cell, FLOOR), peak_nbytes(cell, OURS)
        if floor and cell["layout"] != "hdf5-contiguous":
            found.append((label, f"at most {FLOOR_AT_MOST:g}x the floor", _times(1 / floor), 1 / floor <= FLOOR_AT_MOST))
        if peak is not None:
            most = STAGING_NBYTES + ALLOWANCE_NBYTES
            found.append((label, f"at most {most // MIB} MiB beyond the arrays", f"{peak / MIB:.0f} MiB", peak <= most))
    return found


def _spread(cell: Record, way: str) -> str:
    samples = cell["ways"].get(way, {}).get("seconds")
    return f"{median(samples):.3f} s ({min(samples):.3f}-{max(samples):.3f})" if samples else ""


def _peaks(cell: Record, way: str) -> str:
    most, root = peak_nbytes(cell, way), peak_nbytes(cell, way, 0)
    return "" if most is None or root is None else f"{most / MIB:.0f} / {root / MIB:.0f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x" if value < 10 else f"{value:.0f}x"
