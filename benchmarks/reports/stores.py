"""What does the record of loads from a store say? Tables, the goals, and a plot. All from the record alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.cases.cells import OURS, spec_text
from benchmarks.cases.stores import (
    FLOOR_AT_MOST,
    ROUNDS,
    SMALL,
    STORE_MUSTS,
    STORE_PEERS,
    STORE_WAYS,
    STREAM,
    STREAM_AT_LEAST,
)
from benchmarks.runs.stores import best, floor_seconds, total_rate

Record = dict[str, Any]
MIB = 1 << 20
GREY, BLUE = "#808080", "#2b8ad6"  # both are seen on white and on black
NAMES = {
    "hdf5-gzip-planes": "HDF5, gzip, planes",
    "hdf5-gzip-cubes": "HDF5, gzip, cubes",
    "zarr-zstd-cubes": "Zarr, zstd, cubes",
    "zarr-sharded": "Zarr, shards of cubes",
    SMALL: "HDF5, many small chunks",
}
matplotlib.rcParams["svg.hashsalt"] = "shardload"


def stores_section(record: Record | None) -> str:
    """The table for users: seconds of each way, and the goals. In Markdown."""
    if record is None or not record["cells"]:
        return "Not measured yet: `python -m benchmarks stores`.\n"
    lines = [
        f"{_setting(record)} Seconds, the best of {record['repeats']} (of a way that takes more than 8 s: one); in brackets "
        "how many times as long as shardload. The floor: each chunk decoded once from the page cache, or the stored bytes at "
        f"the highest rate that {record['ranks']} processes get which only fetch, and {ROUNDS} times the latency; whichever "
        "is longer. Requests, MiB fetched, and CPU seconds of all clients: shardload / the fastest peer.",
        "",
        f"| | sharding | {' | '.join((OURS, *STORE_PEERS))} | floor | requests | MiB | CPU, s |",
        "|---|---|" + "--:|" * (len(STORE_PEERS) + 5),
    ]
    lines += ["| " + " | ".join(_row(record, cell)) + " |" for cell in record["cells"]]
    lines += ["", *_notes(record), "", "| asked | measured | |", "|---|--:|---|"]
    lines += [f"| {goal} | {found} | {'met' if is_met else '**not met**'} |" for goal, found, is_met in store_goals(record)]
    return "\n".join(lines) + "\n"


def stores_page(record: Record) -> str:
    """All figures of all ways. In Markdown."""
    lines = [
        "# Loads from a store",
        "",
        stores_section(record),
        "## All figures",
        "",
        "Memory: of all clients together, the most that each had beyond what it had before. `fetch`: all stored bytes once, in "
        "pieces of 8 MiB, thrown away. `decode`: the floor of local loads. The server's CPU seconds: of nginx, "
        "on the same cores.",
        "",
        "| | sharding | way | s | times | requests | MiB fetched | of stored | CPU, s | MiB of memory | server's CPU, s |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for cell in record["cells"]:
        for way in STORE_WAYS:
            if best(cell["ways"].get(way), "seconds") is not None:
                lines.append("| " + " | ".join(_figures(cell, way)) + " |")
    lines += ["", *(f"* {way}: {what}" for way, what in STORE_PEERS.items())]
    versions = record["versions"].get("jax", {})
    lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."]
    return "\n".join(lines) + "\n"


def _setting(record: Record) -> str:
    machine, server = record["machine"], record["server"]
    shapes = sorted({tuple(cell) for cell in record["shapes"].values()}, reverse=True)
    return (
        f"{' and '.join(' x '.join(map(str, shape)) for shape in shapes)} float32, {record['ranks']} ranks, "
        f"{record['date'][:10]}. The store is nginx, which answers each request after {server['latency_ms']} ms and gives "
        f"{server['connection_nbytes'] / 1e6:.0f} MB/s a connection. It is on the same {machine['cores']} cores of "
        f"{machine['processor']} as its clients, and takes part of their time: on machines of its own a store is faster."
    )


def _row(record: Record, cell: Record) -> list[str]:
    ways, ours = cell["ways"], best(cell["ways"].get(OURS), "seconds")
    row = [NAMES.get(cell["layout"], cell["layout"]), f"`{spec_text(cell['spec'])}`"]
    for way in (OURS, *STORE_PEERS):
        value = best(ways.get(way), "seconds")
        times = f" ({value / ours:.1f}x)" if value and ours and way != OURS else ""
        row.append("" if way not in ways else "failed" if value is None else f"{value:.2f}{times}")
    floor = floor_seconds(record, cell)
    row.append("" if floor is None else f"{floor:.2f}")
    both = [ways.get(OURS), ways.get(best_peer(cell) or "")]
    for name, scale, digits in (("requests", 1, 0), ("fetched_nbytes", MIB, 0), ("cpu_seconds", 1, 1)):
        values = [best(took, name) for took in both]
        row.append(" / ".join("" if value is None else f"{value / scale:.{digits}f}" for value in values))
    return row


def _figures(cell: Record, way: str) -> list[str]:
    took, ours = cell["ways"][way], best(cell["ways"].get(OURS), "seconds")
    seconds = best(took, "seconds")
    fetched, peak = best(took, "fetched_nbytes"), best(took, "peak_nbytes")
    server, requests = best(took, "server_cpu_seconds"), best(took, "requests")
    return [
        NAMES.get(cell["layout"], cell["layout"]),
        f"`{spec_text(cell['spec'])}`",
        way,
        f"{seconds:.2f}",
        f"{seconds / ours:.2f}" if seconds and ours else "",
        "" if requests is None else f"{requests:.0f}",
        "" if fetched is None else f"{fetched / MIB:.0f}",
        "" if fetched is None else f"{fetched / cell['stored_nbytes']:.2f}x",
        f"{best(took, 'cpu_seconds'):.2f}",
        "" if peak is None else f"{peak / MIB:.0f}",
        "" if server is None else f"{server:.2f}",
    ]


def _notes(record: Record) -> list[str]:
    lines = []
    rate = total_rate(record)
    if rate is not None:
        lines.append(f"* All clients together fetch {rate / 1e6:.0f} MB/s where nothing is decoded.")
        lines.append(
            "* Clients and server share the cores, so fetching and decoding add up: the floor, the longer one of both "
            "alone, is not reached here. With many small chunks the floor's own decoder, in Python, is slow."
        )
    stream = record.get(STREAM)
    if stream and not stream.get("error"):
        local, store = (max(stream["ways"][way]) for way in ("stream-local", "stream-store"))
        what = f"* A stream of {stream['n_steps']} steps, batches a second"
        lines.append(f"{what}: {local:.1f} from the page cache, {store:.1f} from the store.")
    lines += [f"* {way}: {why}" for way, why in record["missing"].items() if why]
    for cell in record["cells"]:
        where = f"{cell['layout']}, {spec_text(cell['spec'])}"
        lines += [f"* {way} failed, {where}: {took['error']}" for way, took in cell["ways"].items() if "error" in took]
    if stream and stream.get("error"):
        lines.append(f"* The stream failed: {stream['error']}")
    return lines


def best_peer(cell: Record) -> str | None:
    """The fastest one."""
    found = {way: best(cell["ways"].get(way), "seconds") for way in STORE_PEERS}
    known = {way: value for way, value in found.items() if value}
    return min(known, key=lambda way: known[way]) if known else None


def store_goals(record: Record) -> list[tuple[str, str, bool]]:
    """Of each goal: what, what was measured (the worst of its cells), and whether it is met."""
    found: list[tuple[str, str, bool]] = []
    for layout, peer, least in STORE_MUSTS:
        ratios = [
            theirs / ours
            for cell in record["cells"]
            if cell["layout"] == layout
            and (theirs := best(cell["ways"].get(peer), "seconds")) is not None
            and (ours := best(cell["ways"].get(OURS), "seconds"))
        ]
        if ratios:
            found.append((f"{NAMES[layout]}: at least {least:g}x {peer}", f"{min(ratios):.2f}x", min(ratios) >= least))
    floors = [
        (ours / floor, cell)
        for cell in record["cells"]
        if (ours := best(cell["ways"].get(OURS), "seconds")) and (floor := floor_seconds(record, cell))
    ]
    for ratio, cell in floors:
        what = f"{NAMES[cell['layout']]}, `{spec_text(cell['spec'])}`: at most {FLOOR_AT_MOST:g}x the floor"
        found.append((what, f"{ratio:.2f}x", ratio <= FLOOR_AT_MOST))
    cpus = [
        (best(cell["ways"].get(way), "cpu_seconds") for way in (OURS, "tensorstore"))
        for cell in record["cells"]
        if cell["layout"].startswith("zarr")
    ]
    parts = [ours / theirs for ours, theirs in cpus if ours and theirs]
    if parts:
        found.append(("Zarr: CPU seconds at most TensorStore's", f"{max(parts):.2f}x", max(parts) <= 1))
    stream = record.get(STREAM)
    if stream and not stream.get("error"):
        part = max(stream["ways"]["stream-store"]) / max(stream["ways"]["stream-local"])
        what = f"a stream: at least {STREAM_AT_LEAST:.0%} of its rate from the page cache"
        found.append((what, f"{part:.0%}", part >= STREAM_AT_LEAST))
    return found


def plot_stores(record: Record, path: Path) -> None:
    """Bars of seconds: a panel per layout, a bar per way; shorter is better."""
    spec = record["cells"][0]["spec"] if record["cells"] else ""
    cells = [cell for cell in record["cells"] if cell["spec"] == spec and best(cell["ways"].get(OURS), "seconds")]
    if not cells:
        return
    rows = -(-len(cells) // 2)
    figure = Figure(figsize=(9, 1.1 + 1.5 * rows), layout="constrained")
    panels = figure.subplots(rows, 2 if len(cells) > 1 else 1, squeeze=False).ravel()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        for panel, cell in zip(panels, cells, strict=False):
            _panel(panel, record, cell)
        for panel in panels[len(cells) :]:
            panel.axis("off")
        title = f"Seconds to load {spec_text(spec)} from a store on {record['ranks']} ranks: shorter is better"
        figure.suptitle(title, fontsize=12, color=GREY, fontweight="bold")
        figure.savefig(path, transparent=True, metadata={"Date": None})


def _panel(panel: Any, record: Record, cell: Record) -> None:
    found = {way: best(cell["ways"].get(way), "seconds") for way in (OURS, *STORE_PEERS)}
    bars = sorted((value, way) for way, value in found.items() if value)
    longest, ours = bars[-1][0], found[OURS]
    for k, (value, way) in enumerate(bars):
        colour = BLUE if way == OURS else GREY
        panel.barh(k, value, color=colour, height=0.72)
        times = "" if way == OURS or not ours else f"   ({value / ours:.1f}x)"
        panel.text(value + longest * 0.015, k, f"{value:.2f}{times}", va="center", fontsize=9, color=colour)
    floor = floor_seconds(record, cell)
    if floor is not None:
        panel.axvline(floor, color=GREY, lw=1, ls=":")
    panel.set_yticks(range(len(bars)), [way for _, way in bars], fontsize=9, color=GREY)
    panel.set_ylim(len(bars) - 0.5, -0.5)
    panel.set_xlim(0, longest * 1.35)
    panel.set_xticks([])
    panel.set_title(NAMES.get(cell["layout"], cell["layout"]) + "   (dotted: floor)", fontsize=10, color=GREY, loc="left")
    for side in panel.spines.values():
        side.set_visible(False)
    panel.tick_params(length=0)
