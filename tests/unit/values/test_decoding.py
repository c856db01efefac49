"""Are decoded values bit by bit what xarray makes of the same numbers and attributes?

Compared with xarray's own decoder over drawn combinations of types, factors, offsets and fill values. Whole files are in
tests/unit/formats/test_packing.py.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import example, given
from hypothesis import strategies as st

from shardload.errors import ConfigError
from shardload.values.decoding import decoding_of, packed_by, typed
from tests.tiers import examples

INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
FLOATS = ["f2", "f4", "f8"]
Array = np.ndarray[Any, Any]


def by_xarray(stored: Array, attributes: dict[str, Any]) -> Array:
    """What xarray makes of it. Its warnings are about attributes that are against the conventions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        variable = xr.Variable(tuple("xyz"[: stored.ndim]), stored, dict(attributes))
        return np.asarray(xr.conventions.decode_cf_variable("v", variable, decode_times=False).values)


def ours(stored: Array, attributes: dict[str, Any]) -> Array:
    """The same by this package, through the JSON in which attributes reach other ranks."""
    native = stored.astype(stored.dtype.newbyteorder("="))
    packing = json.loads(json.dumps({key: typed(value) for key, value in attributes.items()}))
    rule = decoding_of(native.dtype, packing, "'/v' in 'a.nc'")
    return native if rule is None else rule.values(native)


def assert_same(found: Array, expected: Array) -> None:
    native = expected.astype(expected.dtype.newbyteorder("="))
    assert found.dtype == native.dtype and found.shape == native.shape
    assert found.tobytes() == native.tobytes()


def numbers(dtype: str) -> Array:
    """Every kind of number that a type has: small ones, its ends and, of floating point types, NaN and infinities."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        limits = np.finfo(kind)
        found = [*range(-20, 20), 0.1, -2.5, limits.max, limits.min, limits.tiny, np.nan, np.inf, -np.inf]
    else:
        ends = np.iinfo(kind)
        found = [n for n in range(-20, 20) if n >= ends.min] + [
            *range(ends.min, ends.min + 4),
            *range(ends.max - 3, ends.max + 1),
        ]
    return np.array(found, dtype)


@st.composite
def packings(draw: st.DrawFn) -> tuple[Array, dict[str, Any]]:
    """Stored numbers and attributes, as files have them."""
    dtype = draw(st.sampled_from([order + name for name in INTEGERS + FLOATS for order in "<>"]))
    stored = numbers(dtype)
    attributes: dict[str, Any] = {}
    factor = st.sampled_from([0.01, 0.5, 1.0, -3.7e-5, 2.0, 1e30, 0.0])
    of_type = st.sampled_from([np.float32, np.float64, float])
    for key in ("scale_factor", "add_offset"):
        if draw(st.booleans()):
            attributes[key] = draw(of_type)(draw(factor))
    if "scale_factor" in attributes and draw(st.integers(0, 9)) == 0:
        attributes["scale_factor"] = draw(st.sampled_from([np.int16, np.int32, int]))(3)
    value = st.sampled_from(stored.tolist())
    if draw(st.booleans()):
        attributes["_FillValue"] = stored.dtype.type(draw(value))
    how = draw(st.integers(0, 3))
    if how == 1:
        attributes["missing_value"] = stored.dtype.type(draw(value))
    elif how == 2:
        attributes["missing_value"] = np.array([draw(value), draw(value)], stored.dtype)
    elif how == 3:
        with np.errstate(over="ignore"):  # 1e300 as a float32 is infinity, which files have too
            attributes["missing_value"] = draw(st.sampled_from([np.float32, np.float64]))(draw(value))
    if draw(st.integers(0, 2)) == 0:
        attributes["_Unsigned"] = draw(st.sampled_from(["true", "false", "True"]))
    if draw(st.integers(0, 9)) == 0:
        attributes["dtype"] = "bool"
    if draw(st.booleans()):  # xarray does not look at the valid range
        ends = np.array(sorted((draw(value), draw(value))), stored.dtype)
        attributes |= draw(st.sampled_from([{"valid_range": ends}, {"valid_min": ends[0], "valid_max": ends[1]}]))
    return stored, attributes


@examples(400)
@given(packings())
@example((np.arange(-4, 4, dtype="i1"), {"_Unsigned": "true", "_FillValue": np.int8(-1), "scale_factor": np.float32(0.1)}))
@example((np.array([0.1, np.nan], "f4"), {"_FillValue": np.float32(np.nan), "scale_factor": np.float64(0.1)}))
@example((np.array([2**63 - 1, 2**63 - 2], "i8"), {"_FillValue": np.int64(2**63 - 1)}))
@example((np.arange(-4, 4, dtype=">i2"), {"_Unsigned": "true", "_FillValue": np.int16(-3)}))
@example((np.array([255, 1], "u1"), {"_Unsigned": "false", "_FillValue": np.uint8(255), "missing_value": np.uint8(1)}))
@example((np.array([7, 8], "i4"), {"scale_factor": np.float32(0.1), "add_offset": np.float32(0.1)}))
@example((np.array([7, 8], "i2"), {"scale_factor": np.float32(0.1), "add_offset": np.float64(0.1)}))
@example((np.array([1, 0], "i1"), {"dtype": "bool"}))
@example((np.array([7, 8], "f4"), {"add_offset": np.float64(0.1), "missing_value": np.array([], "f4")}))
@example((np.array([0.1, 8], "f8"), {"scale_factor": np.float32(0.1), "missing_value": np.array([], "f8")}))
@example((np.array([7, 8], "i2"), {"add_offset": np.float32(0.1), "missing_value": np.array([], "i2")}))
def test_decoded_as_xarray_does(case: tuple[Array, dict[str, Any]]) -> None:
    """Wrong if a type were chosen by another rule, a step done in another type or order, a fill value compared otherwise, or
    a valid range applied.
    """
    stored, attributes = case
    # xarray reads the fill value of numbers of the other byte order in the wrong one, if their sign changes as well.
    swaps = "_Unsigned" in attributes and "_FillValue" in attributes
    try:
        expected = by_xarray(stored.astype(stored.dtype.newbyteorder("=")) if swaps else stored, attributes)
    except (ValueError, OverflowError, TypeError) as error:  # NaN as an integer
        with pytest.raises(ConfigError, match=r"'/v' in 'a\.nc' cannot be decoded"):
            ours(stored, attributes)
        assert "NaN" in str(error)
        return
    assert_same(ours(stored, attributes), expected)


@pytest.mark.parametrize(
    ("dtype", "attributes", "says"),
    [
        ("i2", {"scale_factor": "a half"}, "scale_factor is the text 'a half', expected a number"),
        ("f4", {"_FillValue": "none"}, "_FillValue is the text 'none'"),
        ("i2", {"add_offset": np.array([1.0, 2.0])}, "add_offset is [1.0, 2.0], expected one number"),
        ("i2", {"scale_factor": np.complex64(1j)}, "expected one number"),
        ("bool", {"_FillValue": np.bool_(True)}, "its values are bool, which has no NaN"),
        ("i2", {"_FillValue": np.int16(1), "scale_factor": np.int16(2)}, "its values are int16, which has no NaN"),
        ("c8", {"scale_factor": np.float32(2)}, "its scale_factor is real"),
        ("i2", {"missing_value": np.zeros(1000)}, "missing_value is 1000 values of type float64"),
    ],
)
def test_what_cannot_be_decoded(dtype: str, attributes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ours(np.zeros(3, dtype), attributes)
    assert str(raised.value).startswith("'/v' in 'a.nc' cannot be decoded: ") and says in str(raised.value)
    assert "Pass decode=False to load the stored numbers" in str(raised.value)


def test_what_counts_as_packed() -> None:
    """Wrong if every file that xarray wrote were said to be packed, because it has fill values."""
    told = [
        ({"scale_factor": np.float32(0.5), "add_offset": 1.0}, ["scale_factor=0.5", "add_offset=1.0"]),
        ({"scale_factor": 1.0, "add_offset": np.float64(0)}, []),
        ({"_FillValue": np.int16(-9), "missing_value": np.int16(-9), "valid_range": np.array([0, 1])}, []),
        ({"_Unsigned": "true"}, ["_Unsigned=true"]),
        ({"_Unsigned": "false"}, []),
    ]
    for attributes, expected in told:
        assert packed_by(np.dtype("i2"), {key: typed(value) for key, value in attributes.items()}) == expected


# --- blocks
