"""What does the record of saves say, on the page for users? A table and a figure, both made from the record alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.cases.cells import FLOOR, OURS, spec_text
from benchmarks.cases.saves import SAVE_LAYOUTS, SAVE_PEERS
from benchmarks.reports.tables import ratio, seconds
from benchmarks.runs.rechunking import copy_table
from benchmarks.runs.saves import MIB, in_order, peak_nbytes, save_musts

BEGIN, END = "<!-- made by python -m benchmarks report: {} -->\n", "<!-- end of what was made -->\n"
NAMES = {
    "gather": "gather to rank 0, h5py or zarr-python",
    "parallel-hdf5": "parallel HDF5, collective",
    "zarr-python": "zarr-python in every process",
    "tensorstore": "TensorStore in every process",
    FLOOR: "floor: encode and write each chunk once",
}
MARKS = {
    "gather": ("o", "#0072B2"),
    "parallel-hdf5": ("P", "#56B4E9"),
    "zarr-python": ("s", "#D55E00"),
    "tensorstore": ("^", "#009E73"),
    FLOOR: ("|", "black"),
}
COLUMNS = 3
matplotlib.rcParams["svg.hashsalt"] = "shardload"

Record = dict[str, Any]


def save_section(record: Record | None) -> str:
    """The table, what Orbax takes, and goals that were missed. In Markdown."""
    if record is None or not record["cells"]:
        return "Not measured yet: `python -m benchmarks save`.\n"
    machine, cells = record["machine"], in_order(record)
    ways = [way for way in (*SAVE_PEERS, FLOOR) if way != "orbax" and any(way in cell["ways"] for cell in cells)]
    where = "into memory" if record["is_memory"] else "to a disk"
    shape = " x ".join(map(str, record["shape"]))
    lines = [
        f"{shape} float32 ({record['nbytes'] / MIB:.0f} MiB) {where}, {machine['cores']} cores of {machine['processor']}; "
        f"seconds, medians of {record['repeats']} (of a slow peer: one). In brackets how many times as long as shardload. "
        "MiB: memory beyond the arrays, of the rank that took most, beside rank 0 that gathers. "
        "The floor copies and encodes each chunk once on all cores and writes it, and does nothing else.",
        "",
        "| file | sharding | ranks | shardload | " + " | ".join(ways) + " | MiB | gather, MiB |",
        "|---|---|--:|--:|" + "--:|" * len(ways) + "--:|--:|",
    ]
    for cell in cells:
        row = [cell["layout"], f"`{spec_text(cell['spec'])}`", str(cell["ranks"]), _text(seconds(cell, OURS))]
        row += [_text(seconds(cell, way), ratio(cell, way)) for way in ways]
        row += [_mib(peak_nbytes(cell, OURS)), _mib(peak_nbytes(cell, "gather", 0))]
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", "![Times of other ways over that of shardload, by file, sharding and ranks](../figures/save.svg)"]
    orbax = [(cell, took) for cell in cells if (took := seconds(cell, "orbax")) is not None]
    if orbax:
        told = ", ".join(f"{took:.2f} s (`{spec_text(cell['spec'])}`, {cell['ranks']} ranks)" for cell, took in orbax)
        lines += ["", f"Orbax, which writes a checkpoint in a format of its own: {told}."]
    missed = [f"{label}: {goal}, measured {found}" for label, goal, found, is_met in save_musts(record) if is_met is False]
    goals = [one for one in save_musts(record) if one[3] is not None]
    lines += ["", f"Of {len(goals)} goals {len(goals) - len(missed)} are met" + ("." if not missed else ". Not met:")]
    lines += ["", *(f"* {one}" for one in missed)] if missed else []
    return "\n".join(lines) + "\n"


def _text(value: float | None, times: float | None = None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" + ("" if times is None else f" ({times:.2g}x)")


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:.0f}"


def section_of(page: Path, name: str) -> str:
    """What stands between the marks of a page. ValueError if there are none."""
    _, begin, rest = page.read_text().partition(BEGIN.format(name))
    text, end, _ = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for {name}: expected {BEGIN.format(name)!r} and {END!r}")
    return text


def put_section(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of a page."""
    before, begin = page.read_text(), BEGIN.format(name)
    page.write_text(before.replace(f"{begin}{section_of(page, name)}{END}", f"{begin}{text}{END}"))


def copy_section(record: Record | None) -> str:
    """The table of copies. In Markdown."""
    if record is None or not record["cells"]:
        return "Not measured yet: `python -m benchmarks copy`.\n"
    return "\n".join(copy_table(record)[2:]).rstrip() + "\n"


def plot_saves(record: Record, path: Path) -> None:
    """A panel per layout, a row per sharding and number of ranks, a mark per way: its time over shardload's."""
    cells = in_order(record)
    layouts = [layout for layout in SAVE_LAYOUTS if any(cell["layout"] == layout for cell in cells)]
    of = {layout: [cell for cell in cells if cell["layout"] == layout] for layout in layouts}
    columns = min(COLUMNS, len(layouts) + 1)
    rows, most = -(-(len(layouts) + 1) // columns), max(map(len, of.values()))
    figure = Figure(figsize=(1.5 + 3.1 * columns, 0.8 + rows * (0.9 + 0.26 * most)), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
    names_differ = len({tuple(map(_name, cells)) for cells in of.values()}) > 1
    found = [value for cell in cells for way in MARKS if (value := ratio(cell, way))]
    low, high = min([0.5, *(0.8 * value for value in found)]), max([2.0, *(1.25 * value for value in found)])
    for k, (panel, layout) in enumerate(zip(panels, layouts, strict=False)):
        _panel(panel, layout, of[layout], names=names_differ or k % columns == 0)
        panel.set_xlim(low, high)
    for panel in panels[len(layouts) :]:
        panel.axis("off")
    lines = [Line2D([], [], ls="", marker=mark, color=colour, ms=8) for mark, colour in MARKS.values()]
    title = "time of ... / time of shardload"
    panels[-1].legend(lines, [NAMES[way] for way in MARKS], loc="center", frameon=False, fontsize=8, title=title)
    shape = " x ".join(map(str, record["shape"]))
    text = f"saving {shape} float32 on {record['machine']['cores']} cores: right of the line, shardload is faster"
    figure.suptitle(text, fontsize=12)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)


def _name(cell: Record) -> str:
    return f"{spec_text(cell['spec'])}, {cell['ranks']} ranks"


def _panel(panel: Axes, layout: str, cells: list[Record], *, names: bool) -> None:
    panel.set_title(layout, fontsize=10)
    panel.set_xscale("log")
    panel.axvline(1, color="black", lw=1.2)
    panel.grid(axis="x", which="major", color="0.85", lw=0.8)
    panel.set_axisbelow(True)
    for row, cell in enumerate(cells):
        if row and cell["spec"] != cells[row - 1]["spec"]:
            panel.axhline(row - 0.5, color="0.85", lw=0.8)
        for way, (mark, colour) in MARKS.items():
            value = ratio(cell, way)
            if value:
                panel.plot(
                    value, row, mark, color=colour, ms=9 if way == FLOOR else 6, mew=2 if way == FLOOR else 0.5, alpha=0.9
                )
    panel.set_yticks(range(len(cells)), [_name(cell) if names else "" for cell in cells], fontsize=8)
    panel.set_ylim(len(cells) - 0.5, -0.5)
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.tick_params(axis="x", labelbottom=True, labelsize=8)
