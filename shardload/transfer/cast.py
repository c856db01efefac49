"""How do stored numbers become the values that were asked for? Decoded by their attributes, and then cast.

The cast raises an error for a value that does not fit. A block is decoded and cast in pieces that stay in the core's cache, so
that no temporary is as large as a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.contract.array import is_added
from shardload.planning.region import Array, Region
from shardload.values.decoding import Decoding

_SIZE = 1 << 14  # elements: decoding, and checking a cast, take temporaries of this size, not of a block's
NEEDS_X64 = ", which needs jax.config.update('jax_enable_x64', True)"

_HOW_TO_ROUND = ". To round integers on purpose, load them as they are and use astype"

# Takes the stored numbers, the array to write the values to, and the numbers' name for messages.
Convert = Callable[[Array, Array, str], None]


def conversion(decoding: Decoding | None) -> Convert:
    """The function that turns stored numbers into the loaded array's values: a cast, after decoding if there is a rule."""
    return cast_into if decoding is None else partial(decode_into, decoding)


def decode_into(decoding: Decoding, stored: Array, out: Array, name: str) -> None:
    """Decode stored numbers into `out`, which has their shape; cast them if it has another dtype than the decoded values.

    Raises
    ------
    ConfigError
        If a decoded value does not fit into `out`'s dtype.
    """
    for region in Region.whole(stored.shape).split(_SIZE):
        index: Any = (*region.slices(), ...)
        if out.dtype == decoding.dtype:
            decoding.into(stored[index], out[index])
        else:
            cast_into(decoding.values(stored[index]), out[index], f"{name} once decoded")


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
    for region in Region.whole(raw.shape).split(_SIZE):
        index: Any = (*region.slices(), ...)
        if not _fits(raw[index], out[index]):
            keep = f"{raw.dtype}{NEEDS_X64 if is_wide(raw.dtype) else ''}"
            raise ConfigError(
                f"{name} have values that {out.dtype} cannot hold, such as {_misfit(raw[index], out.dtype)}. Pass no dtype, to "
                f"keep {keep}, or one that holds all values{_HOW_TO_ROUND if _is_rounded(raw.dtype, out.dtype) else ''}"
            )


def is_wide(dtype: np.dtype[Any]) -> bool:
    """True if JAX has this type only with `jax_enable_x64`."""
    return dtype.kind in "iufc" and dtype.itemsize > (8 if dtype.kind == "c" else 4)


def _misfit(raw: Array, dtype: np.dtype[Any]) -> str:
    """The first value that does not fit, found by bisection: one look at each of some million values takes seconds."""
    values = raw.reshape(-1)
    while values.size > 1:
        half = values[: values.size // 2]
        values = values[values.size // 2 :] if _fits(half, np.empty(half.shape, dtype)) else half
    return str(values[0])


def _fits(raw: Array, out: Array) -> bool:
    is_integer = out.dtype.kind in "iu"
    if is_added(raw.dtype):  # NumPy does not see that a bfloat16 overflows in float16, and has no cast from int4 to uint4
        raw = raw.astype(np.float32)  # which holds all values of these types
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


def _is_exact(raw: Array, out: Array, limit: int = 0) -> bool:
    """True if integers are the same as floating point numbers. Up to `limit` all are, of either sign."""
    if raw.size == 0 or (-limit <= int(raw.min()) and int(raw.max()) <= limit):
        return True
    try:
        with np.errstate(invalid="raise"):  # 2**63 - 1 becomes 2**63, which is no int64
            return np.array_equal(out.real.astype(raw.dtype), raw)
    except FloatingPointError:
        return False


def _fits_foreign(raw: Array, out: Array) -> bool:
    """`_fits` for bfloat16, float8, int4 and the like, which silently turn values out of range into inf, NaN, their largest
    value or another number (4 is the int4 of 100).
    """
    values = out.astype(np.float64)
    if not np.asarray(0.5).astype(out.dtype).astype(np.float64):  # integers
        return np.array_equal(values, np.trunc(raw))
    if _is_rounded(raw.dtype, out.dtype):
        return _is_exact(raw, values)
    largest = np.asarray(np.inf).astype(out.dtype).astype(np.float64)
    if np.isfinite(largest):  # types without inf and NaN, which saturate
        return bool((np.abs(raw) <= largest).all())
    return np.array_equal(np.isnan(values), np.isnan(raw)) and np.array_equal(np.isinf(values), np.isinf(raw))
