"""Do these values fit into the dtype that was asked for? The cast raises an error for a value that does not."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.base import is_added
from shardload.planning.region import Region

__all__ = ["cast_into"]

_CAST_SIZE = 1 << 14  # elements: checking a cast takes temporaries of this size, not of a block's
_NEEDS_X64 = ", which needs jax.config.update('jax_enable_x64', True)"

Array = np.ndarray[Any, Any]


def cast_into(raw: Array, out: Array, name: str) -> None:
    """Cast values to the dtype of `out`. Rounding and cutting off fractions are allowed; a value out of range is an error.

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
                f"keep {keep}, or one that holds all values"
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
    if not is_integer:
        return True
    # NumPy reports NaN and values that 32 bits cannot hold, but it silently wraps -1.0 to 255, and integers.
    return np.array_equal(out, np.trunc(raw) if raw.dtype.kind == "f" else raw)


def _fits_foreign(raw: Array, out: Array) -> bool:
    """For bfloat16, float8, int4 and the like. Out of range, they silently give inf, NaN, 4 (int4 of 100) or their largest."""
    found = out.astype(np.float64)
    if not np.asarray(0.5).astype(out.dtype).astype(np.float64):  # integers
        return np.array_equal(found, np.trunc(raw))
    largest = np.asarray(np.inf).astype(out.dtype).astype(np.float64)
    if np.isfinite(largest):  # types without inf and NaN, which saturate
        return bool((np.abs(raw) <= largest).all())
    return np.array_equal(np.isnan(found), np.isnan(raw)) and np.array_equal(np.isinf(found), np.isinf(raw))
