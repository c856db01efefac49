"""One picture of all cells: how many times as long as shardload each way takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.cases.cells import FLOOR, LAYOUTS, PEERS, spec_text
from benchmarks.reports.tables import in_order, ratio

# Okabe and Ito's colours, which people tell apart whatever their eyes; each way has a shape of its own as well.
MARKS = {
    "slice": ("o", "#0072B2"),
    "scatter": ("s", "#D55E00"),
    "jax-power": ("D", "#E69F00"),
    "tensorstore": ("^", "#009E73"),
    "heat": ("v", "#CC79A7"),
    "parallel-hdf5": ("P", "#56B4E9"),
    FLOOR: ("|", "black"),
}
COLUMNS = 4
matplotlib.rcParams["svg.hashsalt"] = "shardload"  # the same figures give the same file


def plot(record: dict[str, Any], path: Path) -> None:
    """A panel per layout, a row per sharding and number of ranks, a mark per way."""
    layouts = [layout for layout in LAYOUTS if any(cell["layout"] == layout for cell in record["cells"])]
    cells = {layout: [cell for cell in in_order(record) if cell["layout"] == layout] for layout in layouts}
    columns = min(COLUMNS, len(layouts) + 1)
    rows = -(-(len(layouts) + 1) // columns)
    most = max(map(len, cells.values()))
    names_differ = len({tuple(map(_name, of_layout)) for of_layout in cells.values()}) > 1
    figure = Figure(figsize=(1.5 + 3.1 * columns, 0.8 + rows * (1.1 + 0.24 * most)), layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
    ratios = [r for cell in record["cells"] for way in MARKS if (r := ratio(cell, way))]
    for i, (panel, layout) in enumerate(zip(panels, layouts, strict=False)):
        _panel(panel, layout, cells[layout], names=names_differ or i % columns == 0)
        panel.set_xlim(min(0.5, min(ratios) * 0.8), max(2.0, max(ratios) * 1.25))
    for panel in panels[len(layouts) :]:
        panel.axis("off")
    lines = [Line2D([], [], ls="", marker=mark, color=colour, ms=8) for mark, colour in MARKS.values()]
    names = [PEERS.get(way, "floor: decode once, copy once").split(" (")[0] for way in MARKS]
    panels[-1].legend(lines, names, loc="center", frameon=False, fontsize=8, title="time of ... / time of shardload")
    shape = " x ".join(map(str, next(iter(record["shapes"].values()))))
    figure.suptitle(
        f"{shape} float32 on {record['machine']['cores']} cores: right of the line, shardload is faster", fontsize=12
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)


def _name(cell: dict[str, Any]) -> str:
    return f"{spec_text(cell['spec'])}, {cell['ranks']} ranks"


def _panel(panel: Axes, layout: str, cells: list[dict[str, Any]], *, names: bool) -> None:
    panel.set_title(layout, fontsize=10)
    panel.set_xscale("log")
    panel.axvline(1, color="black", lw=1.2)
    panel.grid(axis="x", which="major", color="0.85", lw=0.8)
    panel.set_axisbelow(True)
    for i, cell in enumerate(cells):
        if i and cell["spec"] != cells[i - 1]["spec"]:
            panel.axhline(i - 0.5, color="0.85", lw=0.8)
        for way, (mark, colour) in MARKS.items():
            value = ratio(cell, way)
            if value:
                panel.plot(value, i, mark, color=colour, ms=9 if way == FLOOR else 6, mew=2 if way == FLOOR else 0.5, alpha=0.9)
    panel.set_yticks(range(len(cells)), [_name(cell) if names else "" for cell in cells], fontsize=8)
    panel.set_ylim(len(cells) - 0.5, -0.5)
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.tick_params(axis="x", labelbottom=True, labelsize=8)
