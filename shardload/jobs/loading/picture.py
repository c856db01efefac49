"""Which device holds which region, as a picture?

An SVG for notebooks shows two axes of the array: the last two axes that are cut. If fewer are cut, the longest other axes take
their place. If more are cut, each of their intervals gets a drawing of its own. Each rank has a colour; if one rank holds all
shards, each shard has one. Of a large mesh only the first corner is drawn, and a line gives the number of shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import product

from shardload.planning.grid import ravel
from shardload.planning.region import Region
from shardload.planning.shards import Shards

__all__ = ["draw_shards"]

_MOST_ALONG, _MOST_DRAWINGS, _MOST_CELLS = 8, 4, 64
_WIDTH, _LEAST_HEIGHT, _MOST_HEIGHT, _FLAT_HEIGHT = 320, 120, 320, 60
_LETTER = 6.5  # width of a letter at 11 px, with some room
_TURN = 137.508  # degrees of hue from one rank to the next: neighbours look different for any number of ranks


def draw_shards(shards: Shards, devices: Mapping[Region, Sequence[str]] | None = None) -> str:
    """An SVG of the shards.

    Parameters
    ----------
    shards : Shards
        Which rank holds which shard.
    devices : mapping of Region to names, optional
        The devices that hold each region, if they are known.

    Returns
    -------
    str
        HTML: the drawings, and a line if not all shards are drawn. Empty for an array without elements or axes.
    """
    shape, cuts = shards.shape_global, shards.cuts
    if not shape or not math.prod(shape):
        return ""
    rows, columns = _plane(shape, cuts)
    others = [axis for axis in range(len(shape)) if axis not in (rows, columns) and cuts[axis] > 1]
    n_rows, n_columns = (1 if axis is None else min(cuts[axis], _MOST_ALONG) for axis in (rows, columns))
    n_drawings = min(math.prod(cuts[axis] for axis in others), _MOST_DRAWINGS, max(1, _MOST_CELLS // (n_rows * n_columns)))
    drawings = []
    for places in list(_first(product(*(range(cuts[axis]) for axis in others)), n_drawings)):
        at = [0] * len(shape)
        for axis, place in zip(others, places, strict=True):
            at[axis] = place
        drawings.append(_drawing(shards, at, rows, columns, n_rows, n_columns, others, devices))
    drawn = n_rows * n_columns * n_drawings
    rest = f"<p>{drawn:,} of {shards.n_shards:,} shards are drawn, by the ranks that hold them.</p>"
    rest = rest if drawn < shards.n_shards else ""
    return f'<div style="display: flex; flex-wrap: wrap; gap: 12px;">{"".join(drawings)}</div>{rest}'


def _plane(shape: Sequence[int], cuts: Sequence[int]) -> tuple[int | None, int]:
    """The axes that run down (None for a 1-d array) and to the right."""
    cut = [axis for axis, n in enumerate(cuts) if n > 1][-2:]
    uncut = sorted((axis for axis in range(len(shape)) if cuts[axis] == 1), key=lambda axis: (-shape[axis], -axis))
    axes = sorted((cut + uncut)[: min(2, len(shape))])
    return (None, axes[0]) if len(axes) == 1 else (axes[0], axes[1])


def _first(values: product[tuple[int, ...]], n: int) -> list[tuple[int, ...]]:
    return [value for value, _ in zip(values, range(n), strict=False)]


def _drawing(
    shards: Shards,
    at: list[int],
    rows: int | None,
    columns: int,
    n_rows: int,
    n_columns: int,
    others: Sequence[int],
    devices: Mapping[Region, Sequence[str]] | None,
) -> str:
    shape, cuts = shards.shape_global, shards.cuts
    height = _FLAT_HEIGHT
    if rows is not None:
        height = round(min(_MOST_HEIGHT, max(_LEAST_HEIGHT, _WIDTH * shape[rows] / shape[columns])))
    left, top = (1 if rows is None else 20), (20 if others else 1)
    high, wide = height / n_rows, _WIDTH / n_columns
    parts = []
    for i, j in product(range(n_rows), range(n_columns)):
        place = list(at)
        if rows is not None:
            place[rows] = i
        place[columns] = j
        parts.append(_cell(shards, place, devices, left + j * wide, top + i * high, wide, high))
    if others:
        title = ", ".join(f"axis {axis}: {_range(shards, at, axis)}" for axis in others)
        parts.append(_text(left + _WIDTH / 2, 14, title))
    parts.append(_text(left + _WIDTH / 2, top + height + 16, _caption(shape, cuts, columns)))
    if rows is not None:
        middle = top + height / 2
        parts.append(_text(14, middle, _caption(shape, cuts, rows), f' transform="rotate(-90 14 {middle:g})"'))
    return (
        f'<svg width="{left + _WIDTH + 2}" height="{top + height + 24}" '
        f'font-family="sans-serif" font-size="11" text-anchor="middle" fill="currentColor">{"".join(parts)}</svg>'
    )


def _cell(
    shards: Shards,
    place: Sequence[int],
    devices: Mapping[Region, Sequence[str]] | None,
    x: float,
    y: float,
    wide: float,
    high: float,
) -> str:
    shard = ravel(place, shards.cuts)
    region, ranks = shards.region(shard), shards.holders(shard)
    names = list((devices or {}).get(region, ()))
    lines = [_some("rank", [str(rank) for rank in ranks], wide)] + ([_some("device", names, wide)] if names else [])
    colour = ranks[0] if len(shards.shards_of(ranks[0])) < shards.n_shards else shard
    lines = lines[: max(1, int(high // 14))]
    held = [_some(what, some, math.inf) for what, some in (("rank", list(map(str, ranks))), ("device", names)) if some]
    told = f"{region}: {'; '.join(held)}"
    texts = "".join(
        _text(x + wide / 2, y + high / 2 + 4 + 14 * (k - (len(lines) - 1) / 2), line, ' fill="#222"')
        for k, line in enumerate(lines)
    )
    return (
        f'<g><title>{escape(told)}</title><rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" '
        f'fill="hsl({colour * _TURN % 360:.0f}, 60%, 80%)" stroke="#555"/>{texts}</g>'
    )


def _some(what: str, names: Sequence[str], wide: float) -> str:
    """The first names, as many as fit, and the number of the others."""
    most = wide / _LETTER
    shown = list(names[:16])
    while shown:
        rest = f" +{len(names) - len(shown)}" if len(shown) < len(names) else ""
        text = f"{what}{'s' if len(names) > 1 else ''} {', '.join(shown)}{rest}"
        if len(text) <= most:
            return text
        shown.pop()
    return f"{len(names)} {what}s" if len(names) > 1 else names[0]  # no name fits: give the number


def _range(shards: Shards, place: Sequence[int], axis: int) -> str:
    n = shards.shard_shape[axis]
    return f"{place[axis] * n}:{(place[axis] + 1) * n}"


def _caption(shape: Sequence[int], cuts: Sequence[int], axis: int) -> str:
    parts = f" in {cuts[axis]:,} parts" if cuts[axis] > 1 else ""
    return f"axis {axis}: {shape[axis]:,}{parts}"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{more}>{escape(text)}</text>'
