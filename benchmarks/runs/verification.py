"""What does each level of ``verify=`` cost? The same load with each, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases.cells import OURS, spec_text
from benchmarks.cases.layouts import make
from benchmarks.remote import RemoteError
from benchmarks.runs.measure import Jobs, Say, median, new_record, turns, warm_free_memory, without_folders

LEVELS = ("index", "checksum", "file", "full")
CHECKSUM_AT_MOST = 1.10  # of the time of "index", where chunks are compressed


def measure_verification(
    folder: Path, sizes: Sequence[int], layouts: Sequence[str], ranks: int, specs: Sequence[str], repeats: int, say: Say
) -> dict[str, Any]:
    """Seconds of every level in every cell; first once untimed, compared with the plain values."""
    record = new_record("verify", {}, ranks=ranks, repeats=repeats)
    with Jobs(ranks) as jobs:
        for size in sizes:
            for file in make(folder, size, layouts, say).values():
                for spec in specs:
                    record["cells"].append(measure_cell(jobs, file, size, spec, repeats, say))
                    record["versions"] |= jobs.versions
    return record


def measure_cell(jobs: Jobs, file: Any, size: int, spec: str, repeats: int, say: Say) -> dict[str, Any]:
    """One file and sharding."""
    cell: dict[str, Any] = {"layout": file.layout, "size": size, "spec": spec, "nbytes": file.nbytes, "levels": {}}
    request = {"spec": spec, "file": file.request()}
    try:
        for level in LEVELS:
            jobs.time(OURS, "verification", level=level, verify=True, **request)
        for repeat in range(repeats):
            for level in turns(LEVELS, repeat):
                warm_free_memory(file.nbytes)
                found = jobs.ask(OURS, "verification", level=level, **request)
                took = cell["levels"].setdefault(level, {"seconds": [], "cpu_seconds": []})
                took["seconds"].append(max(r["end"] for r in found) - min(r["start"] for r in found))
                took["cpu_seconds"].append(sum(r["cpu"] for r in found))
                took["proven"] = found[0]["report"]["proven"]
    except RemoteError as error:
        cell["error"] = without_folders(error)
    say(f"{file.layout} {size}^3, {spec_text(spec)}: " + cell.get("error", cost_text(cell)))
    return cell


def ratio(cell: dict[str, Any], level: str, what: str = "seconds") -> float:
    """Median, over the repeats, of the time with `level` beside that of "index" in the same repeat."""
    pairs = zip(cell["levels"][level][what], cell["levels"][LEVELS[0]][what], strict=True)
    return median([mine / plain for mine, plain in pairs])


def _ratios(cell: dict[str, Any], level: str) -> str:
    return f"{ratio(cell, level):.2f} ({ratio(cell, level, 'cpu_seconds'):.2f})"


def cost_text(cell: dict[str, Any]) -> str:
    """One line."""
    plain = median(cell["levels"][LEVELS[0]]["seconds"])
    return f"index {plain:.3f} s" + "".join(f", {level} {_ratios(cell, level)}" for level in LEVELS[1:])


def verification_table(record: dict[str, Any] | None) -> list[str]:
    """As Markdown."""
    cells = [cell for cell in (record or {}).get("cells", ()) if "error" not in cell]
    if record is None or not cells:
        return []
    lines = [
        f"## What verifying costs, {record['ranks']} ranks",
        "",
        f'Times as long as `verify="index"` (in brackets: CPU time of all ranks). Goal: "checksum" at most '
        f"{CHECKSUM_AT_MOST:.2f} where chunks are compressed.",
        "",
        '| file | sharding | "index" | "checksum" | "file" | "full" |',
        "|---|---|--:|--:|--:|--:|",
    ]
    for cell in cells:
        found = " | ".join(_ratios(cell, level) for level in LEVELS[1:])
        plain = median(cell["levels"][LEVELS[0]]["seconds"])
        lines.append(f"| {cell['layout']}, {cell['size']}^3 | `{spec_text(cell['spec'])}` | {plain:.3f} s | {found} |")
    return [*lines, ""]
