"""Is every invalid argument refused, with what was found and what is possible?"""

from __future__ import annotations

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.errors import ConfigError
from shardload.formats.access import Limits
from shardload.options import OPTIONS, Options, pad_value
from shardload.units import format_nbytes, parse_nbytes


def test_what_is_given_is_kept() -> None:
    options = Options.check(
        dataset="/rho", select=(0, ...), dtype=">f4", pad=0, readers=np.int64(3), staging="1kB", verify="checksum",
        progress=False, timeout=60,
    )  # fmt: skip
    assert options == Options(
        dataset="/rho", select=(0, ...), dtype=np.dtype("f4"), pad=0, readers=3, staging=1000, verify="checksum",
        progress=False, timeout=60.0,
    )  # fmt: skip
    assert options.checksums
    assert options.dtype is not None and options.dtype.isnative and type(options.readers) is int


LEVELS = "'index', 'checksum', 'file' or 'full'"
SIZES = "a size for each axis, such as "
BAD: dict[str, tuple[list[Any], str]] = {
    "readers": (
        ["Root", "", "4", 0, -1, True, np.True_, 2.0, None, ["root"], b"root"],
        "'auto', 'root', 'parallel' or 'direct' (or a number of ranks)",
    ),
    "verify": (["", "values", None, True, ["index"], np.array([1, 2]), 1], LEVELS),
    "timeout": ([0, -1, math.inf, math.nan, True, "900", [1], 1j], "seconds, such as 900, or None to wait for ever"),
    "dataset": (["", 3, b"rho", ["rho"], True], "a name inside the file"),
    "progress": ([1, "yes", 0], "True, False, None or a func"),
    "dtype": (
        ["nope", "f4,,", 3, "f4 f4", ("f4", -1), {"names": ["a"], "formats": []}, [("a",)], 1.5],
        "a NumPy dtype such as 'float32'",
    ),
    "missing": (["ignore", None], "'warn', 'error' or 'fill'"),
    "allow_external": ([1, "yes"], "True or False"),
    "untrusted": ([1], "True or False"),
    "halo": (
        [-1, True, np.True_, 1.0, "2", None, (1, -1), (1, True), {0: 1}, [[1]]],
        "the number of rows",
    ),
    "edge": (["Wrap", "reflect", None, True, (0, "x"), {0: 0}, [[0]]], "what lies beyond the ends"),
    "chunks": ([(1, "a"), True, 1.5], SIZES),
    "shards": (["auto", (None,)], SIZES),
    "dims": ([3, ("a", 1)], "a name for each axis"),
    "unlimited": ([True, (1.5,)], "an axis that can grow"),
    "mode": (["a", None], "'w-' or 'w'"),
    "staging": (
        ["", "MiB", "12 parsecs", "1e9", "256M", "-1MiB", "1,5GB", "1_000", "nan", True, None, 1.0, b"1MB", [1]],
        "bytes, as an int or such as '256MiB'",
    ),
    "pool": ([0, -1, "0", "0MiB", "0.1B", np.int64(0)], "more than 0 bytes"),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (values, _) in BAD.items() for value in values])
def test_what_is_no_value_of_an_option(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        OPTIONS[name].check(value)
    assert str(caught.value).startswith(f"{name} is {value!r}; expected ") and BAD[name][1] in str(caught.value)


@pytest.mark.parametrize("timeout", [None, 1, 0.25, np.float32(0.5), np.int64(3)])
def test_timeout(timeout: Any) -> None:
    found = Options.check(timeout=timeout).timeout
    assert found == timeout and type(found) in (float, type(None))
    assert Options.check(timeout=timeout).describe() != Options.check().describe(), "ranks must pass the same"


@pytest.mark.parametrize(
    ("dtype", "what"),
    [
        (object, "Python objects"),
        ("S4", "strings"),
        ("f4,i4", "records with fields f0, f1"),
        ("(2,)f4", "small arrays of shape (2,) as elements"),
        ("M8[s]", "dates"),
        ("V8", "raw bytes"),
    ],
)
def test_a_dtype_that_jax_does_not_have(dtype: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"dtype is {dtype!r}, which holds {what}")):
        Options.check(dtype=dtype)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint64", "float16", "<f8", ">c16", "bfloat16", np.float32, float, ml_dtypes.int4]
)
def test_a_dtype_that_jax_has_is_native(dtype: Any) -> None:
    found = Options.check(dtype=dtype).dtype
    assert found is not None and found.isnative and found == np.dtype(dtype).newbyteorder("=")


def test_how_a_store_is_reached_is_told_by_names_alone() -> None:
    """Wrong if a key were in a text that ranks compare, or in a message."""
    options = Options.check(storage={"secret_access_key": "s3cr3t", "region": "x"})
    assert options.access.storage["secret_access_key"] == "s3cr3t"
    assert options.describe()["storage"] == "{region, secret_access_key}"
    assert "s3cr3t" not in f"{options!r} {options} {options.access!r} {options.access} {vars(options)}"
    for bad in ("s3cr3t", ["s3cr3t"], 3):
        with pytest.raises(ConfigError, match="expected a dict of options of the store") as caught:
            Options.check(storage=bad)
        assert "s3cr3t" not in str(caught.value)


def test_description_tells_different_options_apart() -> None:
    base = Options.check().describe()
    assert all(type(v) is str for v in base.values())
    changed: dict[str, Any] = {"dataset": "a", "select": slice(0, 1), "dtype": "f4", "pad": 0, "readers": "root", "staging": 1}
    changed |= {"verify": "checksum", "missing": "error", "allow_external": True, "untrusted": True, "allow_filters": "zfp"}
    for name, value in (changed | {"halo": (1,), "edge": ("wrap", 0)}).items():
        other = Options.check(**{name: value}).describe()
        assert {k for k in base if base[k] != other[k]} == {name}
    for a, b in ((0, 0.0), (0, False), (math.nan, 0)):  # they fill alike or not, but are not the same call
        assert Options.check(pad=a).describe() != Options.check(pad=b).describe()
    # How a rank shows progress is its own affair.
    assert Options.check(progress=True).describe() == base


@pytest.mark.parametrize("halo", [0, 3, np.int64(2), (1, 0), [np.int32(2)]])
def test_halo(halo: Any) -> None:
    found = Options.check(halo=halo).halo
    assert found == (tuple(halo) if isinstance(halo, list) else halo)
    assert type(found) in (int, tuple)
    assert Options.check(halo=halo).describe() == Options.check(halo=found).describe()


@pytest.mark.parametrize("edge", ["wrap", "edge", 0, math.nan, np.float32(1), 1j, ("wrap", -1)])
def test_edge(edge: Any) -> None:
    assert Options.check(edge=edge).edge is edge or Options.check(edge=edge).edge == edge


def test_helpers_may_take_what_staging_and_timeout_allow() -> None:
    """Wrong if a stall were noticed before the helper that is at fault for it."""
    assert Options.check(staging="64MiB", timeout=100).access.untrusted is None
    assert Options.check(staging="64MiB", timeout=100, untrusted=True).access.untrusted == Limits(64 << 20, 25.0)
    assert Options.check(timeout=None, untrusted=True).access.untrusted == Limits(256 << 20, None)


# --- pad

# By dtype, pads and what becomes of them: rounded, as any number in floating point.
KEPT: dict[Any, list[tuple[Any, Any]]] = {
    "float32": [(0, 0.0), (0.1, np.float32(0.1)), (1e-50, 0.0), (5 + 0j, 5.0), (math.nan, math.nan)],
    "float16": [(-1.5, -1.5), (math.inf, math.inf), (math.nan, math.nan)],
    "float64": [(math.nan, math.nan)],
    "complex64": [(1 + 2j, 1 + 2j), (2, 2), (math.nan, math.nan)],
    "bool": [(0, False), (True, True)],
    "int32": [(3.0, 3)],
    "int16": [(5 + 0j, 5)],
    "int8": [(np.float32(7), 7), (np.array(7), 7)],
    ml_dtypes.bfloat16: [(0.1, ml_dtypes.bfloat16(0.1)), (math.nan, math.nan)],
    ml_dtypes.int4: [(-3, -3)],
}
REFUSED: dict[Any, list[Any]] = {
    "float32": [2**24 + 1, 1e300, 1 + 2j, complex(1, math.nan), None, "0", [0], np.array([0.0]), {}, object()],
    "float16": [1e6, 70000],
    "complex64": [1e300 + 0j],
    "bool": [math.nan, 2, 0.5],
    "int32": [math.nan, 0.5, 1 + 2j],
    "int64": [math.inf, np.datetime64("2020")],
    ml_dtypes.int4: [8, 0.5],
    ml_dtypes.bfloat16: [1e39],
    ml_dtypes.float8_e4m3fn: [1e4],
    # a type without NaN and inf, of which NumPy makes -0.0 and its largest value
    ml_dtypes.float4_e2m1fn: [1000.0, -7.0, math.nan, math.inf],
    ml_dtypes.float8_e8m0fnu: [0],
}


@pytest.mark.parametrize("dtype", KEPT)
def test_pad_that_the_array_can_hold(dtype: Any) -> None:
    for pad, expected in KEPT[dtype]:
        value = pad_value(pad, np.dtype(dtype))
        assert value.dtype == dtype and (value == expected or (pad != pad and value != value)), pad


@pytest.mark.parametrize(("pad", "dtype"), [(pad, dtype) for dtype, pads in REFUSED.items() for pad in pads])
def test_pad_that_the_array_cannot_hold(pad: Any, dtype: Any) -> None:
    """Wrong if what is proposed were what was refused."""
    fix = "pad=1" if dtype == ml_dtypes.float8_e8m0fnu else "pad=0"
    text = f"pad is {pad!r}, which an array of {np.dtype(dtype)} cannot hold; pass a value that it can, such as {fix}"
    with pytest.raises(ConfigError, match=re.escape(text)):
        pad_value(pad, np.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex64", ml_dtypes.bfloat16])
def test_pad_that_says_whether_and_not_what(dtype: Any) -> None:
    """Wrong if pad=False, meant to say that there shall be no padding, padded with zeros."""
    for pad in (True, False, np.True_, np.False_):
        with pytest.raises(
            ConfigError, match=rf"^pad is {re.escape(repr(pad))}, which is no number of .*such as pad=0, or leave it"
        ):
            pad_value(pad, np.dtype(dtype))
        assert pad_value(pad, np.dtype(bool)) == pad


@given(st.integers(-(2**65), 2**65), st.sampled_from(["int8", "uint8", "int16", "uint32", "int64", "uint64"]))
def test_pad_of_any_integer(pad: int, dtype: str) -> None:
    held = np.iinfo(dtype).min <= pad <= np.iinfo(dtype).max
    if held:
        assert int(pad_value(pad, np.dtype(dtype))) == pad
    else:
        with pytest.raises(ConfigError, match="cannot hold"):
            pad_value(pad, np.dtype(dtype))


# --- numbers of bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("256MiB", 256 << 20),
        ("256mib", 256 << 20),
        (" 2 GB ", 2 * 10**9),
        ("1.5KiB", 1536),
        ("0.5kB", 500),
        ("7", 7),
        ("7B", 7),
        ("1TiB", 1 << 40),
        (1, 1),
        (np.int64(5), 5),
        ("9007199254740993", 2**53 + 1),
        ("1" + "0" * 400, 10**400),
    ],
)
def test_bytes_that_can_be_read(text: Any, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes and type(parse_nbytes(text)) is int


@given(st.integers(0, 1 << 60))
def test_bytes_for_people_are_right_and_short(nbytes: int) -> None:
    text = format_nbytes(nbytes)
    number, unit = text.split()
    factor = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert abs(float(number) * factor - nbytes) <= 0.051 * factor
    assert float(number) < 1024 or unit == "PiB"
