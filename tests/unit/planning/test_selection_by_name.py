"""Does a selection by names of axes and by coordinates select what xarray selects?"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from shardload.planning.selection import between, near, positional_index, select_axes

DIMS = ("time", "lat", "lon")
SHAPE = (4, 5, 7)
COORDS = {"lat": np.array([60.0, 55.0, 50.0, 45.0, 40.0]), "lon": np.array([0, 1, 3, 4, 8, 9, 20], "i4")}
ARRAY = xr.DataArray(np.arange(140).reshape(SHAPE), dims=DIMS, coords=COORDS)


def selected(select: dict[str, Any]) -> np.ndarray[Any, Any]:
    selection = select_axes(positional_index(select, DIMS, COORDS), SHAPE)
    return ARRAY.values[selection.region.slices()].reshape(selection.shape)


@st.composite
def positions(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dim, n in draw(st.permutations(list(zip(DIMS, SHAPE, strict=True)))):
        kind = draw(st.integers(0, 2))
        if kind == 1:
            found[dim] = draw(st.integers(-n, n - 1))
        elif kind == 2:
            bound = st.one_of(st.none(), st.integers(-n - 2, n + 2))
            found[dim] = slice(draw(bound), draw(bound))
    return found


@given(positions())
def test_positions_are_those_of_isel(select: dict[str, Any]) -> None:
    """Wrong if names were taken in the order in which they are given."""
    np.testing.assert_array_equal(selected(select), ARRAY.isel(select).values)


@given(
    st.sampled_from([0, 2**60, 2**63 - 2, 2**64 - 2]),
    st.lists(st.integers(-3, 3), min_size=1, max_size=6, unique=True),
    st.integers(-4, 4),
)
def test_large_integers_are_compared_exactly(base: int, offsets: list[int], offset: int) -> None:
    """Wrong if identifiers or nanoseconds were compared in float64, which takes many neighbours for one number."""
    for dtype in ("i8", "u8"):
        ends = np.iinfo(dtype)
        numbers = sorted({min(max(base + n, ends.min), ends.max) for n in offsets})
        coords = {"id": np.array(numbers, dtype)}
        distances = [abs(n - base - offset) for n in numbers]
        assert positional_index({"id": near(base + offset)}, ("id",), coords) == (distances.index(min(distances)),)
        inside = [k for k, n in enumerate(numbers) if base - 1 <= n <= base + offset]
        if inside:
            wanted = slice(inside[0], inside[-1] + 1)
            assert positional_index({"id": between(base - 1, base + offset)}, ("id",), coords) == (wanted,)
    for part, place in ((near(6.6), 2), (near(4), 0), (between(3.5, math.inf), slice(1, 3))):
        assert positional_index({"id": part}, ("id",), {"id": np.array([3, 5, 8], "i2")}) == (place,)


@pytest.mark.parametrize("of", [float, np.float64, lambda x: Fraction(str(x)), np.array, xr.DataArray])
def test_bounds_of_any_type_of_number(of: Callable[[float], Any]) -> None:
    """Wrong if NumPy's 0.3 of 64 bits left out the coordinate 0.3 of 32 bits, which Python's 0.3 includes; or if the values of
    a coordinate, ``ds.x[2]`` and its ``.values``, were no numbers.
    """
    coords = {"x": np.array([0.1, 0.2, 0.3, 0.4], "f4")}
    assert positional_index({"x": between(of(0.1), of(0.3))}, ("x",), coords) == (slice(0, 3),)
    assert positional_index({"x": near(of(0.3))}, ("x",), coords) == (2,)
    assert positional_index({"x": between(of(0.2), of(1e300))}, ("x",), coords) == (slice(1, 4),)


@pytest.mark.parametrize(
    ("select", "says"),
    [
        ({"depth": 0}, "names the axis 'depth', but the array has the axes 'time', 'lat', 'lon'; pass one of these"),
        ({"latt": 0}, "names the axis 'latt', but the array has the axes 'time', 'lat', 'lon'. Did you mean 'lat'"),
        ({"lat": 52.5}, "has 52.5 on the axis 'lat'; a position is an integer"),
        ({"time": "2000-01-01"}, "has '2000-01-01' on the axis 'time'; a position is an integer"),
        ({"lat": near("north")}, r"has near\('north'\) on the axis 'lat'; expected numbers in the units"),
        ({"lat": near(47, within=-1)}, r"near\(47, within=-1\) on the axis 'lat': within is a distance"),
        ({0: 1}, "names the axis 0"),
        ({"time": near(3)}, "on the axis 'time', which has no coordinate"),
        ({"lat": near(47, within=1)}, r"the nearest coordinate is 45.0 \(position 3\); it goes from 60.0 to 40.0"),
        ({"lat": near(float("nan"))}, "none of its coordinates is a number"),
        ({"lat": near(float("inf"))}, "none of its coordinates is a number near it"),
        ({"lon": between(float("nan"), 3)}, "no coordinate is in that range"),
        ({"lat": between(41, 42)}, "no coordinate is in that range"),
        ({"lat": between(55, 45)}, r"between\(55, 45\) on the axis 'lat': the lower end comes first"),
    ],
)
def test_what_cannot_be_selected(select: dict[Any, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        positional_index(select, DIMS, COORDS)


def test_the_nearest_of_floating_point_numbers() -> None:
    """Wrong if NaN were the nearest, or distances in float32 made one of two numbers that are not equally near."""
    assert positional_index({"x": near(2.1)}, ("x",), {"x": np.array([np.nan, 1, 2, np.nan, 3])}) == (2,)
    assert positional_index({"x": near(0.20000001)}, ("x",), {"x": np.array([0.1, 0.3], "f4")}) == (1,)


def test_coordinates_of_another_length_than_their_axis() -> None:
    """Wrong if -1 were taken for the last step, where the axis of a netCDF file goes on after this array."""
    for part in (-1, slice(-2, None), slice(1, -1), near(50), between(45, 55)):
        with pytest.raises(ValueError, match="'lat', which has 4 elements in the array, but its coordinate 5"):
            positional_index({"lat": part}, DIMS, COORDS, (4, 4, 7))
    for plain in (2, slice(1, 2), slice(1, None), slice(None)):  # the same whatever the length; edges are one more
        assert positional_index({"lat": plain}, DIMS, COORDS, (4, 4, 7))[1] == plain
    assert positional_index({"lat": near(50)}, DIMS, COORDS, (4, 5, 6))[1] == 2, "an axis that is not named"


def test_numbers_that_float64_does_not_have() -> None:
    """Wrong if they ended in another error than that of a selection: callers look for ValueError."""
    for values in (COORDS["lat"], COORDS["lon"], COORDS["lat"].astype("f2")):
        known = {"x": values}
        with pytest.raises(ValueError, match="none of its coordinates is a number near it"):
            positional_index({"x": near(10**400)}, ("x",), known)
        assert positional_index({"x": between(-(10**400), Fraction(10**400))}, ("x",), known) == (slice(0, values.size),)
        anywhere, nearest = (positional_index({"x": near(20, within=most)}, ("x",), known) for most in (10**400, None))
        assert anywhere == nearest
        for part in (near(np.timedelta64(3, "s")), between(np.timedelta64(3, "s"), np.timedelta64(4, "s"))):
            with pytest.raises(ValueError, match="expected numbers in the units of the coordinate"):
                positional_index({"x": part}, ("x",), known)


def test_names_that_are_not_clear() -> None:
    with pytest.raises(ValueError, match="has 2 axes of that name"):
        positional_index({"x": 0}, ("x", "x"), {})
    with pytest.raises(ValueError, match="has no names of axes; pass positions"):
        positional_index({"x": 0}, (None, None), {})
    with pytest.raises(ValueError, match="not beside each other"):
        positional_index({"x": between(0, 1)}, ("x",), {"x": np.array([0.0, 5.0, 1.0])})
