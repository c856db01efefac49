"""Does a region have exactly these elements, and does a selection take exactly what NumPy would take?"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.region import Region
from shardload.planning.selection import select_axes
from tests.tiers import examples

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@functools.cache
@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


def mask(region: Region, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Which elements of an array of `shape` are in the region, by asking each."""
    found = np.zeros(shape, dtype=bool)
    for index in np.ndindex(shape):
        found[index] = all(a <= i < b for a, i, b in zip(region.start, index, region.stop, strict=True))
    return found


@examples(150)
@given(st.data(), SHAPES)
def test_two_regions_against_every_element(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(regions(shape)), data.draw(regions(shape))
    in_a, in_b = mask(a, shape), mask(b, shape)
    assert a.size == in_a.sum() == math.prod(a.shape) and a.ndim == len(shape)
    both = a.intersect(b)
    if both is None:
        assert not (in_a & in_b).any()
    else:
        assert both.size > 0
        np.testing.assert_array_equal(mask(both, shape), in_a & in_b)
    assert both == b.intersect(a)
    if b.size:
        assert a.contains(b) == bool(in_a[in_b].all())
    table = np.arange(math.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(table[a.slices()].ravel(), table[in_a])
    if both is not None:  # a part of a buffer that holds `a` alone
        buffer = table[a.slices()]
        np.testing.assert_array_equal(buffer[both.slices(a.start)], table[both.slices()])


@examples(150)
@given(st.data(), SHAPES, st.integers(1, 40))
def test_split_is_every_element_once_in_c_order(data: st.DataObject, shape: tuple[int, ...], max_size: int) -> None:
    region = data.draw(regions(shape))
    parts = list(region.split(max_size))
    table = np.arange(math.prod(shape)).reshape(shape)
    assert all(p.size <= max_size for p in parts)
    flat = [table[p.slices()].ravel() for p in parts]
    np.testing.assert_array_equal(np.concatenate(flat), table[region.slices()].ravel())
    if region.size:
        assert all(p.size for p in parts)
        # Not in crumbs: two neighbours along one line never fit into one.
        assert len(parts) == 1 or region.size > max_size


@pytest.mark.parametrize(("start", "stop"), [((0,), (1, 2)), ((-1,), (2,)), ((3,), (2,)), ((0, 4), (4, 3)), ((0, -2), (4, -1))])
def test_regions_that_cannot_be(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="region"):
        Region(start, stop)


def test_regions_of_other_ranks_do_not_mix() -> None:
    for f in (Region((0,), (4,)).intersect, Region((0,), (4,)).contains):
        for other in (Region((0, 0), (4, 4)), Region((), ())):
            with pytest.raises(ValueError):
                f(other)


# --- selections


@functools.cache
def parts_of(n: int) -> st.SearchStrategy[Any]:
    """Slices, and numbers if there are any, of an axis of length `n`. Kept, as hypothesis looks at each new one closely."""
    bound = st.none() | st.integers(-n - 2, n + 2)
    pieces = st.builds(slice, bound, bound, st.sampled_from([None, 1]))
    return pieces | st.integers(-n, n - 1) if n else pieces


@functools.cache
@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    parts = [draw(parts_of(n)) for n in shape]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(shape)))
        dropped = draw(st.integers(0, len(shape) - at))
        parts[at : at + dropped] = [...]
    elif draw(st.booleans()):
        parts = parts[: draw(st.integers(0, len(shape)))]
    return parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)


@examples(300)
@given(st.data(), SHAPES)
def test_select_takes_what_numpy_takes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    table = np.arange(math.prod(shape)).reshape(shape)
    index = data.draw(indices(shape))
    selection = select_axes(index, shape)
    expected = table[index]
    assert selection.shape == expected.shape
    assert len(selection.offset) == len(selection.shape) == len(selection.kept)
    np.testing.assert_array_equal(table[selection.region.slices()].reshape(expected.shape), expected)
    # Any region of the selected array is the same elements in the file.
    region = data.draw(regions(expected.shape))
    box = selection.to_file(region)
    assert box.size == region.size and box.ndim == len(shape)
    np.testing.assert_array_equal(table[box.slices()].ravel(), expected[region.slices()].ravel())
    assert all(box.shape[k] == 1 for k in range(len(shape)) if k not in selection.kept)


@pytest.mark.parametrize(
    ("index", "shape", "error", "text"),
    [
        (slice(None, None, 2), (4, 5), ValueError, r"select has step 2 on axis 0; only step 1"),
        ((0, slice(None, None, -1)), (4, 5), ValueError, r"select has step -1 on axis 1"),
        (slice(0, 1.5), (4,), ValueError, r"select has slice\(0, 1.5, None\) on axis 0; each axis takes"),
        (slice("2001-06", "2001-07"), (4,), ValueError, r"on axis 0; .* or shardload.between\("),
        (np.datetime64("2001-06-01"), (4,), ValueError, r"and dates pass select={'lat': shardload.near\(VALUE\)}"),
        (
            np.ones(99, bool),
            (99,),
            ValueError,
            r"select has an array of shape \(99,\) and dtype bool on axis 0; .*np.s_\[0, 10:20\]",
        ),
        ((..., 0, ...), (4, 5), ValueError, r"more than one '...'"),
        ((0, 0, 0), (4, 5), IndexError, r"select names 3 axes, but the array has 2: shape \(4, 5\)"),
        (0, (), IndexError, r"select names 1 axes, but the array has 0"),
        (4, (4, 5), IndexError, r"select has 4 on axis 0, which has 4 elements"),
        ((0, -6), (4, 5), IndexError, r"select has -6 on axis 1, which has 5 elements"),
        (0, (0,), IndexError, r"select has 0 on axis 0, which has 0 elements"),
        (
            ([3, 1], 0),
            (4, 5),
            ValueError,
            r"select has \[3, 1\] on axis 0; .* dataset=\[NAME, NAME\], select=\[\{'lat': 3\}, \{'lat': 17\}\]",
        ),
        ((..., np.array([2, 1])), (4, 5), ValueError, r"on axis 1; .* For several positions pass a slice"),
        (np.array(1.5), (4,), ValueError, r"select has array\(1.5\) on axis 0"),
        ((None, 0), (4, 5), ValueError, r"select has None on axis 0; each axis takes a slice with step 1 or an integer"),
        ([0, 2], (4, 5), ValueError, r"select has \[0, 2\] on axis 0"),
        ((0, False), (4, 5), ValueError, r"select has False on axis 1"),
        ("0:3", (4,), ValueError, r"select has '0:3' on axis 0"),
        (1.0, (4,), ValueError, r"select has 1.0 on axis 0"),
    ],
)
def test_what_numpy_would_read_another_way_is_refused(index: Any, shape: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        select_axes(index, shape)
