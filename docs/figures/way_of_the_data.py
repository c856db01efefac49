"""Draw the README's figure: `python docs/figures/way_of_the_data.py` (needs matplotlib) writes the .svg beside this file.

Four ranks decode the planes of a file, each plane once, and cut what they have along the edges of the shards: each rank has a
part of each pencil. Which rank has which planes is shardload's own plan of a small array.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle

from shardload.planning.region import Grid, plan_blocks
from shardload.planning.schedule import Owners, Schedule
from shardload.planning.shards import plan_shards

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
    """Three columns: chunks in the file, blocks in the ranks that decode them, pencils on the devices; a line for each part."""
    plan = schedule()
    fig, ax = plt.subplots(figsize=(10, 4.6), facecolor="white")
    ax.set_axis_off()
    ax.set_aspect("equal")
    ax.set_xlim(0, 32)
    ax.set_ylim(-2.2, 11.6)
    title = dict(ha="center", va="bottom", fontsize=11, color=INK, weight="bold")
    note = dict(ha="center", va="top", fontsize=9.5, color=INK)

    unit = 0.55
    for rank in reversed(range(N_RANKS)):
        for block in reversed(plan.blocks_of(rank)):
            for i in reversed(range(plan.blocks.region(block).start[0], plan.blocks.region(block).stop[0])):
                box(ax, (i, 0, 0), (i + 0.8, 8, 8), (0.2, 6.4), unit, COLORS[rank])
    ax.text(3.9, 10.9, "file: compressed planes", **title)
    ax.text(3.6, -0.4, "each plane is decoded once, by the\nrank whose colour it has", **note)

    side, step = 1.7, 2.5
    tops = [8.3 - k * step for k in range(N_RANKS)]  # of ranks, and of pencils
    unit, width = 0.33, 4
    pencil_at = [(25.2, low + side / 2 + unit * width / 2 - 0.3) for low in tops]
    for rank, low in enumerate(tops):
        ax.text(11.6, low + side / 2, f"rank {rank}", ha="right", va="center", fontsize=10, color=INK)
        for shard in range(N_RANKS):
            row, column = divmod(shard, 2)
            x, y = 12 + column * side / 2, low + (1 - row) * side / 2
            ax.add_patch(Rectangle((x, y), side / 2, side / 2, facecolor=COLORS[rank], edgecolor="white", linewidth=1.5))
            ax.text(x + side / 4, y + side / 4, str(shard), ha="center", va="center", fontsize=8, color="white")
            begin = (12 + side + 0.15, low + side / 2 + 0.27 * (1.5 - shard))
            end = (pencil_at[shard][0] - 0.35, pencil_at[shard][1] - unit * width / 2 + 0.27 * (1.5 - rank))
            ax.add_patch(
                FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=7, color=COLORS[rank], shrinkA=0, shrinkB=0)
            )
    ax.text(12.8, 10.9, "ranks: decode, cut", **title)
    ax.text(12.6, -0.4, "a few planes at a\ntime in memory", **note)
    ax.text(19.6, -0.4, "every rank sends a part\nto every device", **note)

    for shard in range(N_RANKS):
        for rank in reversed(range(N_RANKS)):
            planes = [plan.blocks.region(block) for block in plan.blocks_of(rank)]
            box(ax, (planes[0].start[0], 0, 0), (planes[-1].stop[0], width, width), pencil_at[shard], unit, COLORS[rank])
        ax.text(
            pencil_at[shard][0] + unit * 9.3, tops[shard] + side / 2, f"device {shard}", va="center", fontsize=10, color=INK
        )
    ax.text(27.5, 10.9, "devices: one pencil each", **title)
    ax.text(28.2, -0.4, "each part is matched to the index\nthat JAX asks for, or refused", **note)
    here = Path(__file__).parent
    fig.savefig(here / "way_of_the_data.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    main()
