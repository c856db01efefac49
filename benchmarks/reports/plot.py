"""One picture of all loads: how many times as long as shardload each other way takes."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.cases.cells import LAYOUTS
from benchmarks.reports.tables import ratio

# Okabe and Ito's colours, which people tell apart whatever their eyes; each way has a shape of its own as well.
MARKS = {
    "slice": ("every process slices the file", "o", "#0072B2"),
    "tensorstore": ("TensorStore", "^", "#009E73"),
    "parallel-hdf5": ("parallel HDF5", "P", "#CC79A7"),
    "heat": ("Heat", "v", "#56B4E9"),
    "jax-power": ("rank 0 reads, a message for each device", "D", "#E69F00"),
    "scatter": ("rank 0 reads, comm.scatter", "s", "#D55E00"),
}
TICKS = (0.5, 1, 2, 5, 10, 20, 50)
matplotlib.rcParams["svg.hashsalt"] = "shardload"  # the same figures give the same file


def plot(record: dict[str, Any], path: Path) -> None:
    """A row for each layout of the file; in it a mark for each way, at its median, and a line from its best to its worst."""
    layouts = [layout for layout in LAYOUTS if any(cell["layout"] == layout for cell in record["cells"])]
    found = {
        (layout, way): ratios
        for layout in layouts
        for way in MARKS
        if (ratios := [r for cell in record["cells"] if cell["layout"] == layout and (r := ratio(cell, way))])
    }
    ways = [way for way in MARKS if any(way == other for _, other in found)]
    figure = Figure(figsize=(8, 1.9 + 0.62 * len(layouts)), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.axvspan(1e-3, 1, color="0.93", lw=0)
    axes.axvline(1, color="black", lw=1.5)
    for way in ways:
        label, mark, colour = MARKS[way]
        rows = [(row, found[layout, way]) for row, layout in enumerate(layouts) if (layout, way) in found]
        heights = [row + 0.13 * (ways.index(way) - (len(ways) - 1) / 2) for row, _ in rows]
        axes.hlines(heights, [min(r) for _, r in rows], [max(r) for _, r in rows], color=colour, lw=2, alpha=0.6)
        axes.plot([median(r) for _, r in rows], heights, mark, color=colour, ms=7, mec="white", mew=0.5, label=label)
    every = [r for ratios in found.values() for r in ratios]
    axes.set_xscale("log")
    axes.set_xlim(min(0.7, min(every) * 0.8), max(2.0, max(every) * 1.3))
    axes.set_xticks([tick for tick in TICKS if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="x", color="0.85", lw=0.8)
    axes.set_axisbelow(True)
    axes.set_yticks(range(len(layouts)), [_name(layout) for layout in layouts])
    axes.set_ylim(len(layouts) - 0.45, -0.55)
    shape = " x ".join(map(str, next(iter(record["shapes"].values()))))
    axes.set_xlabel(
        "times as long as shardload (in grey: faster than shardload)\n"
        f"{shape} float32, {record['machine']['cores']} cores; mark: median, line: best to worst of all shardings and ranks"
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)


def _name(layout: str) -> str:
    """Such as ``HDF5, gzip planes``."""
    kind, _, rest = layout.partition("-")
    return f"{'HDF5' if kind == 'hdf5' else kind.capitalize()}, {rest.replace('-', ' ')}"
