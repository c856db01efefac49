"""What does the record of streams say? A table, the goals, and a plot. All from the record alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.cases.cells import OURS
from benchmarks.cases.streams import MAP, MEMORY, STREAM_LAYOUTS, STREAM_PEERS, STREAM_WAYS
from benchmarks.runs.streams import figure, rate, rate_from_first

Record = dict[str, Any]
MIB = 1 << 20
matplotlib.rcParams["svg.hashsalt"] = "shardload"
SHOWN = {  # in the plot: the cell, and what a person sees
    "tiles, in sequence": "samples cut 2 x 2, in sequence",
    "tiles, shuffled": "samples cut 2 x 2, shuffled",
    "tiles, shuffled, window": "samples cut 2 x 2, shuffled, windows of 3",
    "data only, chunks of one step, in sequence": "whole samples, chunks of a step, in sequence",
}
GREY, BLUE = "#808080", "#2b8ad6"  # both are seen on white and on black


def streams_section(record: Record | None) -> str:
    """The table, what is not there, and the goals. In Markdown."""
    if record is None or not record["cells"]:
        return "Not measured yet: `python -m benchmarks streams`.\n"
    machine, n = record["machine"], record["n_steps"]
    nbytes = n * MAP[0] * MAP[1] * MAP[2] * 4
    lines = [
        f"({n}, {', '.join(map(str, MAP))}) float32 ({nbytes / MIB:.0f} MiB) in the page cache, {record['ranks']} ranks on "
        f"{machine['cores']} cores of {machine['processor']}, {record['date'][:10]}. Batches of 8 samples (3.3 MiB) unless "
        "the row says so. Batches a second, of peers with how many times as long they take as shardload (`~`: no whole epoch "
        "was run). The other figures are of shardload / the fastest peer: how often each chunk is decoded in an epoch, CPU "
        "seconds of all ranks for an epoch, part of the time that the program waits for batches, memory of all ranks beyond "
        "what they had before (MiB). Of memory: the rate of shardload, from the first batch on, as a part of that with batches "
        "that are in memory.",
        "",
        "| | chunks | " + " | ".join((OURS, *STREAM_PEERS)) + " | decodes | CPU, s | of memory | stalled | MiB |",
        "|---|---|" + "--:|" * (len(STREAM_PEERS) + 6),
    ]
    for cell in record["cells"]:
        lines.append("| " + " | ".join(_row(cell)) + " |")
    lines += ["", *_firsts(record)]
    lines += [f"* {way}: {why}" for way, why in record["missing"].items() if why]
    for cell in record["cells"]:
        lines += [f"* {way} failed, {cell['name']}: {t['error']}" for way, t in cell["ways"].items() if "error" in t]
    lines += ["", "| asked | measured | |", "|---|--:|---|"]
    lines += [f"| {goal} | {found} | {'met' if is_met else '**not met**'} |" for goal, found, is_met in stream_goals(record)]
    return "\n".join(lines) + "\n"


def _row(cell: Record) -> list[str]:
    ways, ours = cell["ways"], cell["ways"].get(OURS)
    row = [cell["name"], " x ".join(map(str, STREAM_LAYOUTS[cell["layout"]][2]))]
    for way in (OURS, *STREAM_PEERS):
        took, value = ways.get(way), rate(ways.get(way))
        times = "" if way == OURS or not value or not rate(ours) else f" ({rate(ours) / value:.3g}x)"  # type: ignore[operator]
        row.append("" if took is None else "failed" if not value else f"{'~' if took['is_part'] else ''}{value:.3g}{times}")
    best = best_peer(cell)
    both = [ours, ways[best] if best else None]
    row.append(_pair(both, "decodes_per_chunk", lambda x: f"{x:.2f}"))
    row.append(" / ".join("" if t is None or "cpu_seconds_epoch" not in t else f"{t['cpu_seconds_epoch']:.1f}" for t in both))
    of_memory = part_of_memory(cell)
    row.append("" if of_memory is None else f"{of_memory:.0%}")
    row.append(_pair(both, "waited", lambda x: f"{x:.0%}") if cell["step_seconds"] else "")
    row.append(_pair(both, "peak_nbytes", lambda x: f"{x / MIB:.0f}"))
    return row


def _pair(both: list[Record | None], name: str, text: Any) -> str:
    found = [(took, figure(took, name)) for took in both if took]
    return " / ".join("" if value is None else f"{'~' if took['is_part'] else ''}{text(value)}" for took, value in found)


def _firsts(record: Record) -> list[str]:
    lines = []
    for cell in record["cells"]:
        found = {way: took for way, took in cell["ways"].items() if "first_resumed" in took}
        if found:
            told = ", ".join(f"{way} {took['first_cold']:.2f} / {took['first_resumed']:.2f}" for way, took in found.items())
            lines.append(f"* Seconds to the first batch, cold / resumed after a tenth of the epoch; {cell['name']}: {told}.")
    return lines


def best_peer(cell: Record) -> str | None:
    """The fastest one."""
    rates = {way: rate(cell["ways"].get(way)) for way in STREAM_PEERS}
    known = {way: value for way, value in rates.items() if value}
    return max(known, key=lambda way: known[way]) if known else None


def part_of_memory(cell: Record) -> float | None:
    """Our rate over that with batches in memory, both from the first batch on: they are there before the clock starts."""
    ours, most = rate_from_first(cell["ways"].get(OURS)), rate_from_first(cell["ways"].get(MEMORY))
    return ours / most if ours and most else None


def fixed_cpu_ms(record: Record) -> float | None:
    """CPU milliseconds of a rank for a batch of a sample, beside what its samples cost: from batches of 1 and of 8."""
    cells = {cell["name"]: cell for cell in record["cells"]}
    try:
        few, many = (cells[name]["ways"][OURS] for name in ("batches of 8", "batches of 1"))
        n_few, n_many = (cells[name]["n_epoch"] for name in ("batches of 8", "batches of 1"))
        return 1e3 * (many["cpu_seconds_epoch"] - few["cpu_seconds_epoch"]) / (n_many - n_few) / float(record["ranks"])
    except KeyError:
        return None


def stream_goals(record: Record) -> list[tuple[str, str, bool]]:
    """Of each goal: what, what was measured, and whether it is met."""
    cells = {cell["name"]: cell for cell in record["cells"]}
    found: list[tuple[str, str, bool]] = []

    def against(name: str, peer: str | None, least: float) -> None:
        cell = cells.get(name)
        other = None if cell is None else peer or best_peer(cell)
        if cell is None or other is None:
            return
        ours, theirs = rate(cell["ways"].get(OURS)), rate(cell["ways"].get(other))
        if ours and theirs:
            what = f"the best peer ({other})" if peer is None else peer
            found.append((f"{name}: at least {least:g}x {what}", f"{ours / theirs:.2f}x", ours / theirs >= least))

    against("tiles, in sequence", None, 3)
    against("tiles, chunks cut as tiles, in sequence", None, 3)
    against("tiles, shuffled", "slice", 10)
    against("tiles, chunks cut as tiles, shuffled", "slice", 10)
    for name in ("tiles, in sequence, twice the decoding", "tiles, shuffled, twice the decoding"):
        part = part_of_memory(cells[name]) if name in cells else None
        if part is not None:
            found.append((f"{name}: at least 95 % of the rate with batches in memory", f"{part:.1%}", part >= 0.95))
    against("data only, chunks of one step, in sequence", None, 0.9)
    against("data only, chunks of one step, shuffled", None, 0.9)
    fixed = fixed_cpu_ms(record)
    if fixed is not None:
        found.append(("a batch of 416 KiB: at most 2.5 ms of CPU a rank beside its values", f"{fixed:.2f} ms", fixed <= 2.5))
    return found


def plot_streams(record: Record, path: Path) -> None:
    """Bars of batches a second: a panel per cell, a bar per way; longer is better."""
    cells = [cell for name in SHOWN for cell in record["cells"] if cell["name"] == name]
    if not cells:
        return
    figure_ = Figure(figsize=(9, 1.1 + 1.9 * -(-len(cells) // 2)), layout="constrained")
    panels = figure_.subplots(-(-len(cells) // 2), 2 if len(cells) > 1 else 1, squeeze=False).ravel()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        for panel, cell in zip(panels, cells, strict=False):
            _panel(panel, cell)
        for panel in panels[len(cells) :]:
            panel.axis("off")
        title = (
            f"Batches a second (3.3 MiB each), {record['ranks']} ranks on {record['machine']['cores']} cores: longer is better"
        )
        figure_.suptitle(title, fontsize=12, color=GREY, fontweight="bold")
        figure_.savefig(path, transparent=True, metadata={"Date": None})


def _panel(panel: Any, cell: Record) -> None:
    found = {way: rate(cell["ways"].get(way)) for way in STREAM_WAYS if way != MEMORY}
    rates = sorted(((value, way) for way, value in found.items() if value), reverse=True)
    best = rates[0][0] if rates else 1.0
    ours = found[OURS]
    for k, (value, way) in enumerate(rates):
        panel.barh(k, value, color=BLUE if way == OURS else GREY, height=0.72)
        colour = BLUE if way == OURS else GREY
        times = "" if way == OURS or not ours else f"   (shardload: {ours / value:.3g}x)"
        panel.text(value + best * 0.015, k, f"{value:.3g}{times}", va="center", fontsize=9, color=colour)
    panel.set_yticks(range(len(rates)), [way for _, way in rates], fontsize=9, color=GREY)
    panel.set_ylim(len(rates) - 0.5, -0.5)
    panel.set_xlim(0, best * 1.3)
    panel.set_xticks([])
    panel.set_title(SHOWN[cell["name"]], fontsize=10, color=GREY, loc="left")
    for side in panel.spines.values():
        side.set_visible(False)
    panel.tick_params(length=0)
