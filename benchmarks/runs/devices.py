"""How fast is a load if a process has several devices? All of shardload's ways, and what a notebook does without it, in turns.

The machine may be busy with other work. So the results are ratios of two ways in the same repeat, their medians, and ratios of
CPU times.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases.cells import MODES, OURS, spec_text
from benchmarks.cases.layouts import File, make
from benchmarks.remote import RemoteError
from benchmarks.runs.measure import Jobs, Say, median, new_record, turns, warm_free_memory, without_folders

LAYOUTS = ("hdf5-gzip-planes", "hdf5-gzip-cubes", "hdf5-contiguous", "zarr-zstd-planes")
SPECS = ("a", "a,b", "-,a,b")
JOBS = ("1x8", "2x4")  # processes x devices of each
PUT, SLICE = "device-put", "slice"  # what is done without shardload, by one process and by several
SLOWER_AT_MOST = 1.10  # than the best of its own ways


def measure_devices(
    folder: Path, size: int, layouts: Sequence[str], specs: Sequence[str], jobs: Sequence[str], repeats: int, say: Say
) -> dict[str, Any]:
    """Seconds of every way in every cell; first once untimed, compared with the plain values."""
    files = make(folder, size, layouts, say)
    record = new_record("devices", files, size=size, repeats=repeats)
    for job in jobs:
        processes, devices = (int(n) for n in job.split("x"))
        ways = (OURS, *MODES, PUT if processes == 1 else SLICE)
        with Jobs(processes, devices=devices) as running:
            for file in files.values():
                for spec in specs:
                    cell = {"layout": file.layout, "spec": spec, "processes": processes, "devices": devices}
                    record["cells"].append(cell | measure_cell(running, file, spec, ways, repeats))
                    record["versions"] |= running.versions
                    say(table_row(record["cells"][-1]))
    return record


def measure_cell(jobs: Jobs, file: File, spec: str, ways: Sequence[str], repeats: int) -> dict[str, Any]:
    """Warm, verify, take turns."""
    request = {"spec": spec, "file": file.request()}
    took: dict[str, dict[str, list[float]]] = {way: {"seconds": [], "cpu_seconds": []} for way in ways}
    taken = ""
    try:
        for way in ways:
            taken = jobs.time(way, "run", verify=True, **request)["report"].get("readers", "") if way == OURS else taken
            if way != OURS:
                jobs.time(way, "run", verify=True, **request)
        for repeat in range(repeats):
            for way in turns(ways, repeat):
                warm_free_memory(file.nbytes)
                found = jobs.time(way, "run", **request)
                for what, samples in took[way].items():
                    samples.append(found[what])
    except RemoteError as error:
        return {"error": without_folders(error)}
    return {"taken": taken, "ways": took}


def ratio(cell: dict[str, Any], way: str, what: str = "seconds") -> float:
    """Median, over the repeats, of the time of `way` beside that of "auto" in the same repeat."""
    pairs = zip(cell["ways"][way][what], cell["ways"][OURS][what], strict=True)
    return median([other / ours for other, ours in pairs])


def _ratios(cell: dict[str, Any], way: str) -> str:
    return f"{ratio(cell, way):.2f} ({ratio(cell, way, 'cpu_seconds'):.2f})"


def table_row(cell: dict[str, Any]) -> str:
    """As Markdown."""
    head = f"| {cell['processes']} x {cell['devices']} | {cell['layout']} | `{spec_text(cell['spec'])}` | "
    if "error" in cell:
        return f"{head}{cell['error']} |"
    ratios = " | ".join(_ratios(cell, way) for way in cell["ways"] if way != OURS)
    return f"{head}{median(cell['ways'][OURS]['seconds']):.3f} s | {cell['taken']} | {ratios} |"


def devices_table(record: dict[str, Any] | None) -> list[str]:
    """As Markdown."""
    if record is None or not record["cells"]:
        return []
    return [
        f"## Several devices in a process, {record['size']}^3",
        "",
        f'Seconds of `readers="auto"`, and how many times as long the other ways take (medians of {record["repeats"]} ratios, '
        "each of one repeat; in brackets: CPU time of all processes, which other work on the machine does not change). "
        "Without shardload: one process reads all and calls device_put, several slice the file for each device. "
        f"Goal: none of its own ways below {1 / SLOWER_AT_MOST:.2f}.",
        "",
        "| processes x devices | file | sharding | auto | chosen | root | parallel | direct | without shardload |",
        "|---|---|---|--:|---|--:|--:|--:|--:|",
        *map(table_row, record["cells"]),
        "",
    ]
