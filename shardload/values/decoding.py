"""How do a file's attributes turn stored numbers into values? By the CF conventions, as xarray reads them.

Many files store a temperature as a 16-bit integer, with the factor and the offset beside it. These attributes take part
(`ATTRIBUTES`): ``scale_factor``, ``add_offset``, ``_FillValue``, ``missing_value``, ``_Unsigned``, ``valid_min``,
``valid_max``, ``valid_range``, and ``dtype`` (by which xarray stores booleans).

1. A format reads them and keeps each with its type (`typed`), because the type of ``scale_factor`` decides the type of the
   values. All of them together are a `Packing`.
2. `decoding_of` makes a `Decoding` from a packing. It says once, before anything is read, of which type the values are, and
   what cannot be decoded.
3. `Decoding.into` decodes a block of stored numbers. Each element is decoded by itself, so blocks may be cut anywhere.

The rules and their order are those of ``xarray.open_dataset(mask_and_scale=True, decode_times=False)``, so that results are the
same bit by bit (docs/values.md has the table, and the few cases in which xarray fails). Neither looks at the valid range,
which is read because copies and joins must not change what it means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.errors import ConfigError

TEXTS = ("_Unsigned", "dtype")
_FILLS = ("missing_value", "_FillValue")
VALID_RANGE = ("valid_range", "valid_min", "valid_max")
ATTRIBUTES = ("scale_factor", "add_offset", *_FILLS, *VALID_RANGE, *TEXTS)
OF_STORED = (*_FILLS, *VALID_RANGE)  # those that are numbers of the stored type
PACKING = frozenset(("scale_factor", "add_offset", "_Unsigned"))  # those by which stored numbers differ from values

Array = np.ndarray[Any, Any]
# By name: the type (a dtype's name; "number" of Python; "text"; "unreadable"), and a list of values. Plain JSON.
Packing = Mapping[str, Sequence[Any]]

_NUMBER, _TEXT, _UNREADABLE = "number", "text", "unreadable"
_MOST_VALUES = 64
_STORED = "Pass decode=False to load the stored numbers"


def typed(value: Any) -> list[Any]:
    """An attribute's value with its type, as plain JSON, for a `Packing`.

    >>> typed(np.float32(0.5)), typed(np.array([1, 2], ">i2")), typed(0.1), typed(b"true")
    (['float32', [0.5]], ['int16', [1, 2]], ['number', [0.1]], ['text', ['true']])
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "OSU":
        return typed(value.item())
    if isinstance(value, str):
        return [_TEXT, [value[:_MOST_VALUES]]]
    if isinstance(value, np.ndarray | np.generic):
        is_long = value.dtype.char in "gG"  # extended precision, which neither JSON nor JAX has
        if value.dtype.kind not in "biufc" or is_long or value.size > _MOST_VALUES:
            return [_UNREADABLE, [f"{value.size} values of type {value.dtype}"]]
        parts: list[Any] = np.ravel(value).tolist()
        if value.dtype.kind == "c":
            parts = [[part.real, part.imag] for part in parts]
        return [value.dtype.name, parts]
    values = list(value) if isinstance(value, list | tuple) else [value]
    if len(values) > _MOST_VALUES or not all(isinstance(part, int | float) for part in values):
        return [_UNREADABLE, [str(value)[:_MOST_VALUES]]]
    return [_NUMBER, values]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How stored numbers become values.

    Attributes
    ----------
    dtype : dtype
        Type of the values.
    stored_as : dtype
        The stored numbers' true type: unsigned, if ``_Unsigned`` says so.
    work : dtype
        The floating point type in which values are masked, multiplied and added; the values' own, unless they are booleans.
    fills : tuple of number
        Numbers that mean "no value": they become NaN.
    scale, offset : number or None
        What is multiplied, and then added.
    """

    dtype: np.dtype[Any]
    stored_as: np.dtype[Any]
    work: np.dtype[Any]
    fills: tuple[Any, ...] = ()
    scale: Any = None
    offset: Any = None

    def into(self, stored: Array, out: Array) -> None:
        """Decode stored numbers into `out`, which has their shape and `dtype`. It takes one more array of booleans."""
        if self.work != self.dtype:  # booleans
            work = np.empty(stored.shape, self.work)
            self._decode(stored, work)
            np.not_equal(work, 0, out=out)
        else:
            self._decode(stored, out)

    def values(self, stored: Array) -> Array:
        """The decoded values of stored numbers, in a new array."""
        out = np.empty(stored.shape, self.dtype)
        self.into(stored, out)
        return out

    def _decode(self, stored: Array, out: Array) -> None:
        if stored.dtype != self.stored_as:
            stored = stored.view(self.stored_as)
        with np.errstate(all="ignore"):  # NaN and infinity are values, and go through as xarray lets them
            np.copyto(out, stored, casting="unsafe")
            # xarray compares converted numbers, not stored ones: of 64-bit integers, neighbours of a fill are masked, too.
            is_absent: Array | None = None
            for fill in self.fills:
                is_fill = np.asarray(out == fill)
                is_absent = is_fill if is_absent is None else is_absent | is_fill
            # Not fused, and in this order: each step rounds, as it does in xarray.
            if self.scale is not None:
                np.multiply(out, self.scale, out=out)
            if self.offset is not None:
                np.add(out, self.offset, out=out)
        if is_absent is not None:
            np.copyto(out, complex(math.nan, math.nan) if self.work.kind == "c" else math.nan, where=is_absent)


def decoding_of(dtype: np.dtype[Any], packing: Packing, name: str) -> Decoding | None:
    """The rule by which an array's stored numbers become values; None if they are the values.

    Parameters
    ----------
    dtype : dtype
        Type of the stored numbers, in native byte order.
    packing : mapping
        The attributes, each with its type.
    name : str
        The array, for messages.

    Raises
    ------
    ConfigError
        If an attribute is not a number, or the values cannot be numbers.

    Examples
    --------
    >>> rule = decoding_of(np.dtype("i2"), {"scale_factor": ["float32", [0.5]], "_FillValue": ["int16", [-1]]}, "t")
    >>> rule.dtype, rule.values(np.array([3, -1], "i2"))
    (dtype('float32'), array([1.5, nan], dtype=float32))
    """
    if not packing:
        return None
    rules = _Rules(dtype, packing, name)
    scale, offset = rules.number("scale_factor"), rules.number("add_offset")
    is_scaled = scale is not None or offset is not None
    stored_as, fills, has_fill = rules.type_and_fills()
    is_masked = bool(fills)
    if is_scaled:
        # A fill value of NaN alone leaves floating point numbers as they are.
        work = _scaled_dtype(stored_as, scale, offset) if is_masked or not has_fill else stored_as
    else:
        work = np.dtype("f4" if stored_as.itemsize <= 2 else "f8") if is_masked and stored_as.kind in "iu" else stored_as
    rules.check(work, is_masked)
    is_bool = rules.text("dtype") == "bool"
    if not is_scaled and not is_masked and work == dtype and not (is_bool and dtype.kind != "b"):
        return None
    out = np.dtype(bool) if is_bool else work
    return Decoding(out, stored_as, work, tuple(fills), scale, offset)


def packed_by(dtype: np.dtype[Any], packing: Packing) -> list[str]:
    """The attributes by which stored numbers differ from values, as text. Fill values alone do not count.

    >>> packed_by(np.dtype("i2"), {"scale_factor": ["float32", [0.5]], "_FillValue": ["int16", [-1]]})
    ['scale_factor=0.5']
    """
    neutral = {"scale_factor": 1, "add_offset": 0}
    texts = [
        f"{key}={packing[key][1][0] if len(packing[key][1]) == 1 else packing[key][1]}"
        for key in neutral
        if key in packing and list(packing[key][1]) not in ([], [neutral[key]])
    ]
    sign = next(iter(packing["_Unsigned"][1]), None) if "_Unsigned" in packing else None
    return texts + ([f"_Unsigned={sign}"] if (dtype.kind, sign) in (("i", "true"), ("u", "false")) else [])


class _Rules:
    """The attributes of one array."""

    def __init__(self, dtype: np.dtype[Any], packing: Packing, name: str) -> None:
        self._dtype, self._packing, self._name = dtype, packing, name
        for key, (kind, values) in packing.items():
            if kind == _UNREADABLE:
                raise self._refused(f"its attribute {key} is {values[0]}")

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{self._name} cannot be decoded: {why}. {_STORED}")

    def text(self, key: str) -> str | None:
        """The text of an attribute; None if it is absent or no text."""
        kind, values = self._packing.get(key, (None, ()))
        return str(values[0]) if kind == _TEXT else None

    def numbers(self, key: str) -> list[Any]:
        """The numbers of an attribute, each with its type; none if it is absent."""
        if key not in self._packing:
            return []
        kind, values = self._packing[key]
        if kind == _TEXT:
            raise self._refused(f"its attribute {key} is the text {values[0]!r}, expected a number")
        if kind == _NUMBER:  # Python's numbers take the type of the array that they meet
            return list(values)
        dtype: Any = np.dtype(kind)
        return [dtype.type(complex(*v)) if dtype.kind == "c" else dtype.type(v) for v in values]

    def number(self, key: str) -> Any:
        """The number of an attribute; None if it is absent."""
        numbers = self.numbers(key)
        if len(numbers) > 1 or (numbers and np.asarray(numbers[0]).dtype.kind not in "iuf"):
            raise self._refused(f"its attribute {key} is {np.asarray(numbers).tolist()}, expected one number")
        return numbers[0] if numbers else None

    def type_and_fills(self) -> tuple[np.dtype[Any], list[Any], bool]:
        """The true type of the stored numbers, the fill values in that type, and whether any is declared."""
        fills: dict[str, list[Any]] = {}
        has_fill = False
        for key in _FILLS:
            # An array, as xarray makes one: this gives Python's numbers a type.
            numbers = list(np.ravel(self.numbers(key))) if key in self._packing else []
            fills[key] = [number for number in numbers if number == number]
            has_fill |= bool(fills[key]) or (key in self._packing and self._dtype.kind not in "iu")  # also without a number
        # ``_Unsigned`` may give integers a sign, or take it away.
        kind = {("i", "true"): "u", ("u", "false"): "i"}.get((self._dtype.kind, self.text("_Unsigned") or ""))
        stored_as = self._dtype if kind is None else np.dtype(f"{kind}{self._dtype.itemsize}")
        if stored_as != self._dtype:  # only `_FillValue` is converted, as in xarray
            fill_values = fills["_FillValue"]
            converted = [np.asarray(number).astype(self._dtype).view(stored_as)[()] for number in fill_values]
            # Where a `missing_value` is the same, xarray drops it.
            fills["missing_value"] = [number for number in fills["missing_value"] if number not in fill_values]
            fills["_FillValue"] = [number.item() for number in converted] if stored_as.kind == "u" else converted
        return stored_as, [*fills["missing_value"], *fills["_FillValue"]], has_fill

    def check(self, work: np.dtype[Any], is_masked: bool) -> None:
        """Raise ConfigError if the values would not be numbers, or lose their imaginary part."""
        if is_masked and work.kind not in "fc":
            raise self._refused(f"its values are {work}, which has no NaN for elements without a value")
        if self._dtype.kind == "c" and work.kind != "c":
            raise self._refused(f"it is {self._dtype}, and its scale_factor is real")


def _scaled_dtype(stored: np.dtype[Any], scale: Any, offset: Any) -> np.dtype[Any]:
    """The type of scaled values: that of the factor and the offset if both have the same, else wide enough."""
    scale_type, offset_type = (None if number is None else np.dtype(type(number)) for number in (scale, offset))
    if offset_type is None:
        return np.dtype(scale_type)
    if scale_type == offset_type and scale_type in (np.float32, np.float64):
        return np.dtype("f8") if stored.itemsize == 4 and stored.kind in "iu" else scale_type
    return np.dtype("f8")
