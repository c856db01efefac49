"""Draw the README's figure: `python docs/figures/way_of_the_data.py` (needs matplotlib) writes the .svg beside this file.

A file of compressed planes is read once, by four readers; every block is cut along the shards' edges; every part goes to the
process that holds its pencil. Drawn from shardload's own plan of a small array: the cuts and arrows are computed, not painted.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle

from shardload.planning.blocks import plan_blocks
from shardload.planning.schedule import Grid, Owners, Schedule, plan_shards

matplotlib.rcParams["svg.hashsalt"] = "shardload"  # else every run gives other ids to the same picture

SHAPE, N_RANKS = (8, 8, 8), 4
COLORS = ("#4477aa", "#ee8866", "#44aa88", "#aa77bb")
INK = "#333333"


def schedule() -> Schedule:
    """An array of 8 planes, one chunk each, as 2 x 2 pencils along axis 0, read by four ranks."""
    chunks = Grid(SHAPE, (1, 8, 8), (0, 0, 0))
    shards = plan_shards(SHAPE, [(), (0,), (1,)], np.arange(N_RANKS).reshape(2, 2))
    blocks = plan_blocks(chunks, 4, max_nbytes=2 * 64 * 4, n_owners=1)
    return Schedule(blocks, shards, 4, N_RANKS, Owners(N_RANKS))


def oblique(i: float, j: float, k: float, at: tuple[float, float], unit: float) -> tuple[float, float]:
    """Axis 0 goes into the page, axis 1 down, axis 2 to the right."""
    return at[0] + unit * (k + 0.55 * i), at[1] + unit * (-j + 0.45 * i)


def box(ax: plt.Axes, start: tuple[int, ...], stop: tuple[int, ...], at: tuple[float, float], unit: float, color: str) -> None:
    """One box of elements: its front, top and right faces."""
    (i, j, k), (i2, j2, k2) = start, stop
    faces = (
        [(i, j, k), (i, j, k2), (i, j2, k2), (i, j2, k)],
        [(i, j, k), (i, j, k2), (i2, j, k2), (i2, j, k)],
        [(i, j, k2), (i, j2, k2), (i2, j2, k2), (i2, j, k2)],
    )
    for face, light in zip(faces, (0.0, 0.45, 0.22), strict=True):
        corners = [oblique(*corner, at, unit) for corner in face]
        shade = tuple(c + (1 - c) * light for c in to_rgb(color))
        ax.add_patch(Polygon(corners, facecolor=shade, edgecolor="white", linewidth=0.8))


def main() -> None:
    """Three columns: chunks in the file, blocks in the readers, pencils on the devices."""
    plan = schedule()
    fig, ax = plt.subplots(figsize=(10, 4.3))
    ax.set_axis_off()
    ax.set_aspect("equal")
    ax.set_xlim(0, 30)
    ax.set_ylim(-1.6, 11.3)
    title = dict(ha="center", va="bottom", fontsize=10.5, color=INK, weight="bold")
    note = dict(ha="center", va="top", fontsize=9, color=INK)

    unit = 0.55
    for rank in reversed(range(N_RANKS)):
        for block in reversed(plan.blocks_of(rank)):
            for i in reversed(range(plan.blocks.region(block).start[0], plan.blocks.region(block).stop[0])):
                box(ax, (i, 0, 0), (i + 0.8, 8, 8), (0.2, 6.2), unit, COLORS[rank])
    ax.text(3.6, 10.0, "file: compressed planes", **title)
    ax.text(3.6, 0.9, "each chunk is decoded once,\nby the rank whose colour it has", **note)

    side, gap = 1.7, 0.75
    corners = {}
    for rank in range(N_RANKS):
        low = 8.0 - rank * (side + gap)
        ax.text(11.2, low + side / 2, f"rank {rank}", ha="right", va="center", fontsize=9, color=INK)
        for shard in range(N_RANKS):
            row, column = divmod(shard, 2)
            x, y = 11.6 + column * side / 2, low + (1 - row) * side / 2
            ax.add_patch(Rectangle((x, y), side / 2, side / 2, facecolor=COLORS[rank], edgecolor="white", linewidth=1.5))
        corners[rank] = (11.6 + side, low + side / 2)
        ax.add_patch(FancyArrowPatch((8.4, 5.0), (9.4, low + side / 2), arrowstyle="-", color="#bbbbbb", linewidth=0.8))
    ax.text(12.6, 10.0, "blocks, cut for the shards", **title)
    ax.text(12.6, 0.2, "staging: a few blocks per rank,\nhowever large the array", **note)

    unit = 0.42
    origin = (20.6, 7.3)
    for shard in (1, 0, 3, 2):  # back to front, so that nearer boxes cover farther ones
        region = plan.shards.region(shard)
        row, column = divmod(shard, 2)
        for rank in reversed(range(N_RANKS)):
            planes = [plan.blocks.region(b) for b in plan.blocks_of(rank)]
            start = (planes[0].start[0], region.start[1] + row * 2.5, region.start[2] + column * 2.5)
            stop = (planes[-1].stop[0], region.stop[1] + row * 2.5, region.stop[2] + column * 2.5)
            box(ax, start, stop, origin, unit, COLORS[rank])
    for rank, (x, y) in corners.items():
        target = (20.1, 7.2 - rank * 1.2)
        ax.add_patch(
            FancyArrowPatch((x + 0.2, y), target, arrowstyle="-|>", mutation_scale=9, color=COLORS[rank], linewidth=1.4)
        )
    ax.text(25, 10.0, "pencils: one shard per device", **title)
    ax.text(25, 0.9, "each piece is matched to the index\nthat JAX asks for, or refused", **note)
    here = Path(__file__).parent
    fig.savefig(here / "way_of_the_data.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    main()
