"""Draw the picture of docs/design/data-flow.md: `python docs/figures/rooms.py` (needs matplotlib) writes rooms.svg.

The rooms and their order are read from the import linter's layers in pyproject.toml; only the words are written here.
`tests/unit/test_rooms.py` compares the drawn picture with those layers and with the folders of shardload/.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

matplotlib.rcParams["svg.hashsalt"] = "shardload"  # else every run gives other ids to the same picture

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# What each room answers.
ROOMS = {
    "__main__": "python -m shardload",
    "cli": "the commands: what is typed in a shell, and what is printed",
    "api": "the functions: load, plan, stream, verify, save, append, unpad",
    "jobs": "one call: from its arguments to a plan, its execution and its report",
    "engine": "all ranks in one call: beginning, agreement, rounds",
    "arrays": "JAX's side: shardings, pieces to jax.Array, verification",
    "transfer": "blocks of the file ↔ pieces of shards, between ranks",
    "options": "what may a call ask for? each option declared once",
    "formats": "where are the values of this region? one package per format",
    "storage": "where are the bytes? objects that are read by ranges",
    "values": "what do the stored numbers mean? attributes to arithmetic",
    "planning": "who owns which block, and which parts go to whom? integers only",
    "comm": "the ranks: MPI, shared memory, agreement on errors, watchdog",
    "system": "this machine: threads, memory that is left, terminal",
    "units": "sizes in bytes and lists of ranks, as text",
    "errors": "who erred: the caller, the file or a rank?",
}
# What is moved while a call runs: the rooms that hold the values, and the form that they have there.
VALUES = {"arrays": "shards on devices", "transfer": "pieces ↔ blocks", "formats": "chunks in a file"}
# Where an extension goes.
PLACES = {
    "cli": "a new command: one module",
    "api": "a new function: one wrapper of a job",
    "options": "a new option: one declaration",
    "formats": "a new format: one package",
    "storage": "an object store: one class",
    "comm": "a new transport: one class",
}
INK, LINE, GREEN, BLUE = "#333333", "#999999", "#44aa88", "#4477aa"
TALL, LOW, GAP = 0.72, 0.42, 0.13
LEFT, WIDTH = 1.3, 11.6


def layers() -> list[str]:
    """The rooms, top to bottom."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (c for c in contracts if c["type"] == "layers" and c["containers"] == ["shardload"])
    return [room.strip() for layer in contract["layers"] for room in layer.split("|")]


def label(room: str) -> str:
    """A folder ends in a slash, a module in .py."""
    return f"{room}/" if (ROOT / "shardload" / room).is_dir() else f"{room}.py"


def main() -> None:
    """One box per room; the values on the left of the text's end, extensions on the right."""
    rooms = layers()
    untold = [room for room in rooms if room not in ROOMS]
    if untold:
        raise SystemExit(
            f"{', '.join(untold)}: in the layers of pyproject.toml, but ROOMS of {Path(__file__).name} has no text for it"
        )
    heights = [TALL if label(room).endswith("/") else LOW for room in rooms]
    total = sum(heights) + GAP * len(rooms)
    fig, ax = plt.subplots(figsize=(12.5, 0.62 * (total + 1.1)))
    ax.set_axis_off()
    ax.set_xlim(0.3, 21.5)
    ax.set_ylim(-0.2, total + 0.9)
    top, middles = total, {}
    for room, height in zip(rooms, heights, strict=True):
        y = top - height
        middles[room] = y + height / 2
        color = "#e8f0f8" if height == TALL else "#f4f4f4"
        style = "round,pad=0.02,rounding_size=0.08"
        ax.add_patch(FancyBboxPatch((LEFT, y), WIDTH, height, boxstyle=style, facecolor=color, edgecolor=LINE, linewidth=0.8))
        name = ax.text(LEFT + 0.15, middles[room], label(room), va="center", family="monospace", weight="bold", fontsize=9.5)
        name.set_gid(f"room-{room}")
        ax.text(LEFT + 2.35, middles[room], ROOMS[room], va="center", fontsize=8.6, color=INK)
        top = y - GAP
    bottom = top + GAP
    ax.add_patch(FancyArrowPatch((0.95, total), (0.95, bottom), arrowstyle="-|>", mutation_scale=12, color=INK, linewidth=1.2))
    ax.text(0.65, (total + bottom) / 2, "imports run down only", rotation=90, ha="center", va="center", fontsize=9.5, color=INK)

    way = LEFT + WIDTH + 0.4
    high, low = max(middles[room] for room in VALUES) + 0.3, min(middles[room] for room in VALUES) - 0.3
    ax.add_patch(FancyArrowPatch((way, low), (way, high), arrowstyle="-|>", mutation_scale=12, color=BLUE, linewidth=2))
    ax.add_patch(
        FancyArrowPatch((way + 0.35, high), (way + 0.35, low), arrowstyle="-|>", mutation_scale=12, color=BLUE, linewidth=2)
    )
    ax.text(way - 0.02, high + 0.02, "load", ha="center", va="bottom", fontsize=8.6, color=BLUE, weight="bold")
    ax.text(way + 0.37, low - 0.02, "save", ha="center", va="top", fontsize=8.6, color=BLUE, weight="bold")
    for room, text in VALUES.items():
        ax.text(way + 0.75, middles[room] + 0.14, text, va="center", fontsize=8.6, color=BLUE, weight="bold")
    for room, text in PLACES.items():
        y = middles[room] - (0.17 if room in VALUES else 0)
        ax.text(way + 0.75, y, f"+ {text}", va="center", fontsize=8.3, color=GREEN)
    ax.text(LEFT, total + 0.3, "the call", fontsize=9.5, color=INK, weight="bold")
    title = "where the values are, and where an extension goes (+)"
    ax.text(way + 0.75, total + 0.3, title, fontsize=9.5, color=INK, weight="bold")
    fig.savefig(HERE / "rooms.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(fig)


if __name__ == "__main__":
    main()
