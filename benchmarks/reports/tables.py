"""What do the records say? Tables in Markdown: every cell, and goals with what was measured.

A ratio is the median of a way divided by shardload's median in the same cell: above 1, shardload is faster.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases.cells import (
    BEST_PEER_AT_LEAST,
    FIELD_AT_LEAST,
    FLOOR,
    FLOOR_AT_MOST,
    KIB_AT_MOST_SECONDS,
    LAYOUTS,
    MANY_WAYS,
    MODES,
    MUSTS,
    OURS,
    PEERS,
    SERIES_AT_LEAST,
    SMALL_CHUNKS_AT_LEAST,
    SPECS,
    TINY_AT_MOST_SECONDS,
    Cell,
    spec_text,
)
from benchmarks.runs.devices import devices_table
from benchmarks.runs.extras import ALLOWANCE_NBYTES, MIB, memory_text
from benchmarks.runs.measure import median
from benchmarks.runs.rechunking import copy_table
from benchmarks.runs.saves import save_memory_table, save_musts, save_table
from benchmarks.runs.verification import verification_table

KINDS = (
    "run",
    "cold",
    "field",
    "chunks",
    "scatter",
    "small",
    "many",
    "memory",
    "verify",
    "devices",
    "save",
    "save-memory",
    "streams",
    "stores",
    "copy",
)
SCATTER_AT_LEAST = {"scatter": 8.0, "scatterv": 1.0}
SMALL_AT_MOST_SECONDS = 0.010
Record = dict[str, Any]


def read_records(folder: Path) -> dict[str, Record]:
    """The newest record of each kind: one file each."""
    return {kind: json.loads(path.read_text()) for kind in KINDS if (path := folder / f"{kind}.json").exists()}


def ratio(cell: Record, way: str) -> float | None:
    """Median of `way` over shardload's."""
    ours, other = seconds(cell, OURS), seconds(cell, way)
    return None if ours is None or other is None else other / ours


def seconds(cell: Record, way: str) -> float | None:
    """Median, or None where the way was not measured."""
    samples = cell["ways"].get(way, {}).get("seconds")
    return median(samples) if samples else None


def best_peer(cell: Record) -> tuple[str, float] | None:
    """The fastest peer and its ratio."""
    found = [(value, way) for way in PEERS if (value := ratio(cell, way)) is not None]
    return None if not found else (min(found)[1], min(found)[0])


def in_order(record: Record) -> list[Record]:
    """The cells by layout, sharding and number of ranks."""

    def place(row: Record) -> tuple[int, int, int]:
        layout = LAYOUTS.index(row["layout"]) if row["layout"] in LAYOUTS else len(LAYOUTS)
        return layout, SPECS.index(row["spec"]), row["ranks"]

    return sorted(record["cells"], key=place)


def cell_of(row: Record) -> Cell:
    return Cell(row["layout"], row["spec"], row["ranks"])


def write_report(folder: Path, records: dict[str, Record]) -> Path:
    """``table.md`` in `folder`."""
    parts = ["# Benchmarks\n", *(f"{part}\n" for part in _head(records)), *must_table(records)]
    for kind in ("run", "cold", "field", "chunks"):
        if kind in records:
            parts += run_table(records[kind])
    parts += [*scatter_table(records.get("scatter")), *small_table(records.get("small"))]
    parts += [*many_table(records.get("many")), *memory_table(records.get("memory"))]
    parts += verification_table(records.get("verify"))
    parts += devices_table(records.get("devices"))
    parts += save_table(records.get("save"))
    parts += save_memory_table(records.get("save-memory"))
    parts += copy_table(records.get("copy"))
    parts += failures(records)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "table.md"
    path.write_text("\n".join(parts).rstrip() + "\n")
    return path


def _head(records: dict[str, Record]) -> list[str]:
    if not records:
        return ["Nothing was measured yet."]
    record = records.get("run") or next(iter(records.values()))
    machine = record["machine"]
    lines = [
        f"{record['date']}; {machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB, "
        f"Python {machine['python']}. Medians; in brackets the fastest and the slowest repeat.",
        "A ratio is the time of the other way divided by shardload's: above 1, shardload is faster. Bold: goal not reached. "
        "If one axis is cut, all ranks cut it; two axes are cut as square as possible, rows <= columns.",
    ]
    lines += [
        f"{job}: " + ", ".join(f"{name} {version}" for name, version in v.items()) for job, v in record["versions"].items()
    ]
    return lines


def run_table(record: Record) -> list[str]:
    """A row per cell."""
    shapes = " and ".join(sorted({" x ".join(map(str, shape)) for shape in record["shapes"].values()}))
    cache = "dropped before each load" if record["cold"] else "warm"
    ways = [way for way in (*PEERS, *MODES) if any(way in cell["ways"] for cell in record["cells"])]
    lines = [
        f"## {shapes} float32, page cache {cache}, {record['repeats']} repeats",
        "",
        "| layout | sharding | ranks | shardload, s | chosen | "
        + " | ".join(f"{way}" for way in ways)
        + " | best peer | floor, s | x floor |",
        "|---|---|--:|--:|---|" + "--:|" * len(ways) + "---|--:|--:|",
    ]
    for cell in in_order(record):
        ours, floor, best = cell["ways"].get(OURS, {}), seconds(cell, FLOOR), best_peer(cell)
        row = [cell["layout"], f"`{spec_text(cell['spec'])}`", cell["ranks"], _spread(ours.get("seconds", []))]
        row += [ours.get("report", {}).get("readers", ""), *(_times(ratio(cell, way)) for way in ways)]
        row += [
            f"{best[0]} {_times(best[1])}" if best else "",
            "" if floor is None else f"{floor:.3f}",
            _times(over_floor(cell)),
        ]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return [*lines, ""]


def over_floor(cell: Record) -> float | None:
    """Shardload's time over the floor's."""
    found = ratio(cell, FLOOR)
    return None if not found else 1 / found


def must_table(records: dict[str, Record]) -> list[str]:
    """Goals, what was measured, and whether the goal is met."""
    lines = ["## Goals", "", "| cell | goal | measured | |", "|---|---|---|---|"]
    rows = {cell_of(row): row for row in records.get("run", {}).get("cells", [])}
    for must in MUSTS:
        row = rows.get(must.cell)
        for way, least in must.at_least:
            found = None if row is None else ratio(row, way)
            lines.append(_must(must.cell.label, f"{least:g}x {way}", _times(found), None if found is None else found >= least))
    others = [(row, best[1]) for cell, row in rows.items() if cell not in {m.cell for m in MUSTS} and (best := best_peer(row))]
    lines += _worst("every other cell", f"{BEST_PEER_AT_LEAST:g}x the best peer", others, lambda x: x >= BEST_PEER_AT_LEAST)
    floors = [(row, -over) for cell, row in rows.items() if cell.has_chunks and (over := over_floor(row))]
    lines += _worst("any chunked cell", f"at most {FLOOR_AT_MOST:g}x the floor", floors, lambda x: -x <= FLOOR_AT_MOST)
    small = [(row, best[1]) for row in records.get("chunks", {}).get("cells", []) if (best := best_peer(row))]
    promised = f"{SMALL_CHUNKS_AT_LEAST:g}x the best peer"
    lines += _worst("small chunks", promised, small, lambda x: x >= SMALL_CHUNKS_AT_LEAST) if small else []
    lines += [
        *_scatter_musts(records.get("scatter")),
        *_small_musts(records.get("small")),
        *_many_musts(records.get("many")),
        *_memory_musts(records.get("memory")),
        *(_must(*must) for must in save_musts(records.get("save"))),
    ]
    return [*lines, ""]


def _must(cell: str, promised: str, found: str, met: bool | None) -> str:
    return f"| {cell} | {promised} | {found or 'not measured'} | {'' if met is None else 'met' if met else '**not met**'} |"


def _worst(name: str, promised: str, found: Sequence[tuple[Record, float]], is_met: Any) -> list[str]:
    """One line: the worst cell, and how many cells meet the goal."""
    if not found:
        return [_must(name, promised, "", None)]
    row, value = min(found, key=lambda pair: pair[1])
    good = sum(is_met(v) for _, v in found)
    text = f"{good} of {len(found)}; worst {abs(value):.2f}x: {cell_of(row).label}"
    return [_must(name, promised, text, good == len(found))]


def _scatter_musts(record: Record | None) -> list[str]:
    lines = []
    for cell in (record or {}).get("cells", []):
        name = f"scatter of {cell['nbytes'] / MIB:.0f} MiB, {record['ranks']} ranks, {spec_text(cell['spec'])}"  # type: ignore[index]
        for way, least in SCATTER_AT_LEAST.items():
            found = ratio(cell, way)
            lines.append(_must(name, f"{least:g}x {way}", _times(found), None if found is None else found >= least))
    return lines or [_must("scatter of 512 MiB, 4 ranks", "8x scatter, 1x scatterv", "", None)]


def _small_musts(record: Record | None) -> list[str]:
    promised = f"under {SMALL_AT_MOST_SECONDS * 1e3:g} ms"
    for cell in (record or {}).get("cells", []):
        if cell["way"] == OURS:
            text = f"{cell['second'] * 1e3:.1f} ms"
            return [_must("1 KiB, 4 ranks, second call", promised, text, cell["second"] < SMALL_AT_MOST_SECONDS)]
    return [_must("1 KiB, 4 ranks, second call", promised, "", None)]


def _many_musts(record: Record | None) -> list[str]:
    lines = []
    for cell in (record or {}).get("cells", []):
        name, ours = f"{cell['layout']}, {cell['ranks']} ranks", seconds(cell, OURS)
        least = {"series-of-40": SERIES_AT_LEAST, "real-field": FIELD_AT_LEAST}.get(cell["layout"])
        most = {"many-tiny": TINY_AT_MOST_SECONDS, "one-kib": KIB_AT_MOST_SECONDS}.get(cell["layout"])
        if least is not None:
            found = ratio(cell, "slice")
            lines.append(_must(name, f"{least:g}x slice", _times(found), None if found is None else found >= least))
        if most is not None:
            text = "" if ours is None else f"{ours * 1e3:.1f} ms"
            lines.append(_must(name, f"at most {most * 1e3:g} ms", text, None if ours is None else ours <= most))
    return lines


def _memory_musts(record: Record | None) -> list[str]:
    promised = f"pieces + staging + {ALLOWANCE_NBYTES // MIB} MiB"
    cells = (record or {}).get("cells", [])
    good = sum(bool(cell.get("ok")) for cell in cells)
    text = f"{good} of {len(cells)} loads" if cells else ""
    return [_must("peak host memory, every rank, every mode", promised, text, good == len(cells) if cells else None)]


def scatter_table(record: Record | None) -> list[str]:
    if record is None:
        return []
    lines = [
        f"## From rank 0's memory, {record['size']}^3 float32, {record['ranks']} ranks",
        "",
        "| sharding | shardload.scatter, s | comm.scatter, s | comm.Scatterv, s |",
        "|---|--:|--:|--:|",
    ]
    for cell in record["cells"]:
        row = [
            f"`{spec_text(cell['spec'])}`",
            *(_spread(cell["ways"][way]["seconds"]) for way in (OURS, "scatter", "scatterv")),
        ]
        lines.append("| " + " | ".join(row) + " |")
    return [*lines, ""]


def small_table(record: Record | None) -> list[str]:
    if record is None:
        return []
    lines = [f"## 1 KiB, {record['ranks']} ranks", "", "| way | first call, ms | second, ms | later, ms |", "|---|--:|--:|--:|"]
    for cell in record["cells"]:
        lines.append(
            f"| {cell['way']} | {cell['first'] * 1e3:.1f} | {cell['second'] * 1e3:.1f} | {median(cell['seconds']) * 1e3:.1f} |"
        )
    return [*lines, ""]


def many_table(record: Record | None) -> list[str]:
    """A row per cell: milliseconds of each way."""
    if record is None:
        return []
    lines = [
        f"## Many arrays in one call, and small ones, warm, {record['repeats']} repeats",
        "",
        "| arrays | sharding | ranks | " + " | ".join(f"{way}, ms" for way in MANY_WAYS) + " | slice / shardload |",
        "|---|---|--:|" + "--:|" * len(MANY_WAYS) + "--:|",
    ]
    for cell in record["cells"]:
        name = f"{cell['layout']}: {cell['n_arrays']}, {cell['nbytes'] / MIB:.3g} MiB"
        found = [seconds(cell, way) for way in MANY_WAYS]
        row = [name, f"`{spec_text(cell['spec'])}`", cell["ranks"], *("" if s is None else f"{s * 1e3:.1f}" for s in found)]
        lines.append("| " + " | ".join(map(str, [*row, _times(ratio(cell, "slice"))])) + " |")
    return [*lines, ""]


def memory_table(record: Record | None) -> list[str]:
    if record is None:
        return []
    lines = [
        f"## Peak host memory, {record['ranks']} ranks, {spec_text(record['spec'])}, "
        f"staging {record['staging_nbytes'] / MIB:.0f} MiB",
        "",
        "| layout | readers | the rank with the highest peak |",
        "|---|---|---|",
    ]
    for cell in record["cells"]:
        text = memory_text(cell) if "ranks" in cell else "failed"
        lines.append(f"| {cell['layout']} | {cell['readers']} | {text} |")
    return [*lines, ""]


def failures(records: dict[str, Record]) -> list[str]:
    """Ways that failed, with the first line of why."""
    found = []
    for kind, record in records.items():
        for row in record["cells"] if kind not in ("stores", "streams") else ():  # their own tables say it
            for way, took in row.get("ways", {}).items():
                if "error" in took:
                    found.append(f"* {kind}, {cell_of(row).label}, {way}: {took['error'].splitlines()[0]}")
    return ["## Failed", "", *found, ""] if found else []


def _spread(samples: Sequence[float]) -> str:
    return f"{median(samples):.3f} ({min(samples):.3f}-{max(samples):.3f})" if samples else "failed"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x" if value < 10 else f"{value:.0f}x"
