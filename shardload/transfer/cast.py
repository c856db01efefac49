"""Do these values fit into the dtype that was asked for? The cast raises an error for a value that does not."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.contract.dtypes import is_added
from shardload.planning.region import Region

_CAST_SIZE = 1 << 14  # elements: checking a cast takes temporaries of this size, not of a block's
_NEEDS_X64 = ", which needs jax.config.update('jax_enable_x64', True)"

_HOW_TO_ROUND = ". To round integers on purpose, load them as they are and use astype"

Array = np.ndarray[Any, Any]


def cast_into(raw: Array, out: Array, name: str) -> None:
    """Cast values to the dtype of `out`. Floating point numbers are rounded, and lose their fraction in integers.

    A value out of range is an error. So is an integer that would be rounded: identifiers and counts differ by one, and many of
    them would become the same number.

    Parameters
    ----------
    raw, out : ndarray of the same shape
        The values, and the array to write them to.
    name : str
        Name of the values in the error message.

    Raises
    ------
    ConfigError
        If a value does not fit into `out`'s dtype.
    """
    for region in Region.whole(raw.shape).split(_CAST_SIZE):
        index: Any = (*region.slices(), ...)
        if not _fits(raw[index], out[index]):
            keep = f"{raw.dtype}{_NEEDS_X64 if _is_wide(raw.dtype) else ''}"
            raise ConfigError(
                f"{name} have values that {out.dtype} cannot hold, such as {_misfit(raw[index], out.dtype)}. Pass no dtype, to "
                f"keep {keep}, or one that holds all values{_HOW_TO_ROUND if _is_rounded(raw.dtype, out.dtype) else ''}"
            )


def _is_wide(dtype: np.dtype[Any]) -> bool:
    """True if JAX has this type only with `jax_enable_x64`."""
    return dtype.itemsize > (8 if dtype.kind == "c" else 4)


def _misfit(raw: Array, dtype: np.dtype[Any]) -> str:
    """The first value that does not fit, found by bisection."""
    values = raw.reshape(-1)
    while values.size > 1:
        half = values[: values.size // 2]
        values = values[values.size // 2 :] if _fits(half, np.empty(half.shape, dtype)) else half
    return str(values[0])


def _fits(raw: Array, out: Array) -> bool:
    is_integer = out.dtype.kind in "iu"
    try:
        # Floating point types hold NaN, also one that signals (of which NumPy reports that it was invalid).
        with np.errstate(over="raise", invalid="raise" if is_integer else "ignore"):
            np.copyto(out, raw, casting="unsafe")
    except FloatingPointError:
        return False
    if is_added(out.dtype):
        with np.errstate(invalid="ignore"):
            return _fits_foreign(raw, out)
    if _is_rounded(raw.dtype, out.dtype):
        return _is_exact(raw, out, 1 << (np.finfo(out.dtype).nmant + 1))
    if not is_integer:
        return True
    # NumPy reports NaN and values that 32 bits cannot hold, but it silently wraps -1.0 to 255, and integers.
    return np.array_equal(out, np.trunc(raw) if raw.dtype.kind == "f" else raw)


def _is_rounded(raw: np.dtype[Any], out: np.dtype[Any]) -> bool:
    """True if NumPy rounds integers to floating point numbers that cannot hold them all."""
    if raw.kind not in "iu" or out.kind in "iub":
        return False
    return is_added(out) or raw.itemsize * 8 - (raw.kind == "i") > np.finfo(out).nmant + 1


def _is_exact(raw: Array, out: Array, most: int = 0) -> bool:
    """True if integers are the same as floating point numbers. Up to `most` all are, of either sign."""
    if raw.size == 0 or (-most <= int(raw.min()) and int(raw.max()) <= most):
        return True
    try:
        with np.errstate(invalid="raise"):  # 2**63 - 1 becomes 2**63, which is no int64
            return np.array_equal(out.real.astype(raw.dtype), raw)
    except FloatingPointError:
        return False


def _fits_foreign(raw: Array, out: Array) -> bool:
    """For bfloat16, float8, int4 and the like. Out of range, they silently give inf, NaN, 4 (int4 of 100) or their largest."""
    found = out.astype(np.float64)
    if not np.asarray(0.5).astype(out.dtype).astype(np.float64):  # integers
        return np.array_equal(found, np.trunc(raw))
    if _is_rounded(raw.dtype, out.dtype):
        return _is_exact(raw, found)
    largest = np.asarray(np.inf).astype(out.dtype).astype(np.float64)
    if np.isfinite(largest):  # types without inf and NaN, which saturate
        return bool((np.abs(raw) <= largest).all())
    return np.array_equal(np.isnan(found), np.isnan(raw)) and np.array_equal(np.isinf(found), np.isinf(raw))
