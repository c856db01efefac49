"""Which number of a time axis is a date? By the ``units`` and ``calendar`` of its coordinate, as CF has them.

`near` and `between` take dates: text, objects of `datetime`, `numpy.datetime64`, objects of cftime. `in_numbers` turns them
into numbers of one coordinate, and `numbers_of_dates` an array of dates. `in_other_units` turns the numbers of one axis into
those of another one.

1. A date is a name: year, month, day, time of day. Which day it is, the axis's calendar says.
2. Text may be a span: ``"2001-06"`` is a month. A range begins where its first span begins, and ends where its last one ends.
3. cftime knows the calendars (`_to_seconds`). All else is exact: only at the end is a number rounded to the type of the
   coordinate, as by the program that wrote the coordinate.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Real
from typing import Any

import cftime
import numpy as np

from shardload.planning.selection import Between, Near

_SECONDS = {
    **dict.fromkeys(("nanosecond", "nanoseconds", "nanosec", "nanosecs", "ns"), Fraction(1, 10**9)),
    **dict.fromkeys(("microsecond", "microseconds", "microsec", "microsecs", "us"), Fraction(1, 10**6)),
    **dict.fromkeys(("millisecond", "milliseconds", "millisec", "millisecs", "msec", "msecs", "ms"), Fraction(1, 1000)),
    **dict.fromkeys(("second", "seconds", "sec", "secs", "s"), Fraction(1)),
    **dict.fromkeys(("minute", "minutes", "min", "mins"), Fraction(60)),
    **dict.fromkeys(("hour", "hours", "hr", "hrs", "h"), Fraction(3600)),
    **dict.fromkeys(("day", "days", "d"), Fraction(86400)),
}
_OF_CALENDARS = {  # units that have a length in one calendar only
    **dict.fromkeys((("360_day", "month"), ("360_day", "months")), Fraction(30 * 86400)),
    **dict.fromkeys((("noleap", "common_year"), ("noleap", "common_years")), Fraction(365 * 86400)),
}
_CALENDARS = {"gregorian": "standard", "365_day": "noleap", "366_day": "all_leap", "": "standard"}
_KNOWN = ("standard", "proleptic_gregorian", "julian", "noleap", "all_leap", "360_day")
_REFORM = (1582, 10, 15)  # the first day of the Gregorian calendar; the day before was 4 October
_FROM_YEAR_1 = ("standard", "julian")
_MOST_ROUNDED = Fraction(1, 1000)  # seconds
_HALF = Fraction(1, 2 * 10**6)  # of a microsecond: to this, floating point times are exact

_ZONE = r"(?:\s*(?P<zone>Z|UTC|GMT|(?P<zone_sign>[+-])(?P<zone_hour>[01]?\d|2[0-3])(?::?(?P<zone_minute>[0-5]\d))?))?"
_CLOCK = r"(?P<hour>\d{1,2})(?::(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:\.(?P<part>\d{0,18}))?)?)?"
_DATE = re.compile(
    r"(?P<year>[+-]?(?:\d{4,6}|\d{1,3}(?=-\d+-\d)))(?:-(?P<month>\d{1,2})(?:-(?P<day>\d{1,2})(?:(?:T|\s+)"
    + _CLOCK
    + r")?"
    + _ZONE
    + r")?)?",
    re.ASCII | re.IGNORECASE,
)
_OTHER_DATE = re.compile(r"(\d{4})(?:[/.](\d{1,2})[/.](\d{1,2})|(\d\d)(\d\d))(?!\d)", re.ASCII)
_UNITS = re.compile(r"\s*(\w+)\s+since\s+(.{1,80}?)\s*", re.ASCII | re.IGNORECASE)
_FIELDS = ("year", "month", "day", "hour", "minute", "second")


def has_dates(part: Near | Between) -> bool:
    """True if something else than numbers is asked for."""
    ends = (part.low, part.high) if isinstance(part, Between) else (part.value,)
    within = part.within if isinstance(part, Near) else None
    return isinstance(within, (datetime.timedelta, np.timedelta64)) or not all(map(_is_number, ends))


def in_numbers(part: Near | Between, name: str, attrs: Mapping[str, Any], dtype: np.dtype[Any]) -> Near | Between:
    """The same part of an axis, by numbers of its coordinate.

    Parameters
    ----------
    part : Near or Between
        What is asked for.
    name : str
        Name of the axis.
    attrs : mapping
        The attributes of its coordinate.
    dtype : dtype
        The type of its numbers.

    Raises
    ------
    ValueError
        If the coordinate counts no time, or what is asked for is no date in its calendar.

    Examples
    --------
    >>> attrs = {"units": "hours since 2000-01-01", "calendar": "noleap"}
    >>> part = in_numbers(Between("2000-02", "2000-02-28"), "time", attrs, np.dtype("i4"))
    >>> part.low, part.high, part
    (744, 1415, between('2000-02', '2000-02-28'))
    """
    try:
        axis = _Axis.of(attrs)
        if isinstance(part, Between):
            return _between(part, axis, dtype)
        return _near(part, axis, dtype)
    except ValueError as error:
        raise ValueError(f"select has {part} on the axis {name!r}: {error}") from error


def in_other_units(values: np.ndarray[Any, Any], attrs: Mapping[str, Any], wanted: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Times by the units and the calendar of `attrs`, as numbers of the same type by those of `wanted`. NaN stays.

    Raises
    ------
    ValueError
        If either counts no time, their calendars differ, or a time is no number of that type. The text follows "because".

    Examples
    --------
    >>> attrs, wanted = ({"units": f"days since {year}-01-01", "calendar": "noleap"} for year in (2002, 2001))
    >>> in_other_units(np.array([0, 1], "i4"), attrs, wanted)
    array([365, 366], dtype=int32)
    """
    try:
        old, new = _Axis.of(attrs), _Axis.of(wanted)
    except ValueError:
        raise ValueError("these are no units of time that have a length of their own and a known calendar") from None
    if old.calendar != new.calendar:
        raise ValueError(f"one is of the calendar {old.calendar!r}, the other of {new.calendar!r}")
    step, zero = old.unit / new.unit, (old.zero - new.zero) / new.unit
    numbers = values.flatten()
    for k, number in enumerate(numbers):
        if values.dtype.kind != "f" or np.isfinite(number):
            numbers[k] = _as_type(_exact(number) * step + zero, values.dtype, new.unit, new.text)
    return numbers.reshape(values.shape)


def count_alike(attrs: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if numbers mean the same times by the units and calendars of both.

    >>> count_alike({"units": "hours since 2000-01-01 06:00:00"}, {"units": "h since 2000-1-1T06", "calendar": "gregorian"})
    True
    """
    try:
        return _Axis.of(attrs) == _Axis.of(other)
    except ValueError:
        return False


def as_dates(numbers: Iterable[Any], attrs: Mapping[str, Any]) -> list[str]:
    """Numbers of a coordinate as dates, for a person; none if it does not count time.

    >>> as_dates([0, 36.5], {"units": "hours since 2000-02-28"})
    ['2000-02-28', '2000-02-29T12:30:00']
    """
    try:
        return list(map(_Axis.of(attrs).text, numbers))
    except ValueError:
        return []


def in_full(units: Any) -> Any:
    """Units of time in a word that xarray's encoder has, too; others as they are.

    >>> in_full("hr since 2000-01-01")
    'hours since 2000-01-01'
    """
    match = _UNITS.fullmatch(units) if isinstance(units, str) else None
    length = _SECONDS.get(match[1].lower()) if match else None
    if match is None or length is None:
        return units
    word = next(word for word, seconds in _SECONDS.items() if seconds == length and word.endswith("s"))
    return f"{word} since {match[2]}"


def is_dates(values: Any) -> bool:
    """True for a NumPy array of dates (``datetime64``, or objects of `datetime` or cftime) or of spans of time."""
    if not isinstance(values, np.ndarray):
        return False
    first = values.flat[0] if values.dtype.kind == "O" and values.size else None
    return values.dtype.kind in "mM" or isinstance(first, datetime.date | cftime.datetime)


def numbers_of_dates(values: np.ndarray[Any, Any], attrs: Mapping[str, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Dates as numbers of a type, by the units and the calendar of `attrs`; spans of time by units such as ``"days"``.

    NaT is NaN, or in ``int64`` the least number, as xarray has it.

    Raises
    ------
    ValueError
        If `attrs` count no time, a date is none of their calendar, or is no number of that type.

    Examples
    --------
    >>> numbers_of_dates(np.array(["2000-01-02", "2000-03-01"], "M8[D]"), {"units": "hours since 2000-01-01"}, np.dtype("i4"))
    array([  24, 1440], dtype=int32)
    """
    numbers = np.zeros(values.shape, dtype)
    is_time = ~np.isnat(values) if values.dtype.kind in "mM" else np.ones(values.shape, bool)
    if not is_time.all():
        if dtype.kind != "f" and dtype != np.int64:
            raise ValueError(f"NaT is among them, which {dtype} does not have")
        numbers[~is_time] = np.nan if dtype.kind == "f" else np.iinfo(np.int64).min
    if values.dtype.kind == "m":
        exact, unit, text = _spans(values[is_time], attrs)
    else:
        axis = _Axis.of(attrs)
        exact, unit, text = [axis.span(date)[0] for date in values[is_time]], axis.unit, axis.text
    numbers[is_time] = [_as_type(count, dtype, unit, text) for count in exact]
    return numbers


def _spans(values: np.ndarray[Any, Any], attrs: Mapping[str, Any]) -> tuple[list[Fraction], Fraction, Callable[[Any], str]]:
    """Spans of time in the units of `attrs`; that unit in seconds; and a function from such a number to text."""
    units = attrs.get("units")
    unit = _SECONDS.get(units.lower()) if isinstance(units, str) else None
    if unit is None:
        raise ValueError(f"the units are {units!r}; expected those of spans of time, such as 'days'")
    name, n = np.datetime_data(values.dtype)
    seconds = {"W": Fraction(7 * 86400), "m": Fraction(60)}.get(name, _SECONDS.get(name.lower()))
    if seconds is None:
        raise ValueError(f"these are {values.dtype}, which have no length of their own, or are shorter than nanoseconds")
    return [int(span) * n * seconds / unit for span in values.astype("i8")], unit, lambda count: f"{float(count):g} {units}"


def _as_type(count: Fraction, dtype: np.dtype[Any], unit: Fraction, text: Callable[[Any], str]) -> Any:
    """A number of an axis, exactly, or as the nearest one of floating point. ValueError if that is another time."""
    if dtype.kind == "f":
        rounded = _rounded(count, dtype)
        if not np.isfinite(rounded) or abs(_exact(rounded) - count) * unit > _MOST_ROUNDED:
            raise ValueError(f"{text(count)} would be rounded by more than a millisecond, as {dtype}")
        return rounded
    limits = np.iinfo(dtype)
    if count.denominator != 1 or not limits.min <= count <= limits.max:
        raise ValueError(f"{text(count)} is {float(count)} in these units, which {dtype} does not have")
    return int(count)


def _between(part: Between, axis: _Axis, dtype: np.dtype[Any]) -> Between:
    begin, _, _ = axis.span(part.low)
    last_begin, end, _ = axis.span(part.high)
    is_open = last_begin != end
    if begin > end or (is_open and begin == end):
        raise ValueError("the lower end comes first, however the coordinate is sorted")
    if dtype.kind == "f":
        slack = _HALF / axis.unit
        low_number = _rounded(begin - slack, dtype)
        high_number = _rounded(end - slack if is_open else end + slack, dtype)
        if is_open:
            # A type that does not tell the end of a span from its begin has both as one number.
            high_number = max(np.nextafter(high_number, dtype.type(-np.inf)), _rounded(last_begin + slack, dtype))
        low, high = float(low_number), float(high_number)
    else:
        low, high = math.ceil(begin), math.ceil(end) - 1 if is_open else math.floor(end)
    return replace(part, low=low, high=high, typed=repr(part), to_text=axis.text)


def _near(part: Near, axis: _Axis, dtype: np.dtype[Any]) -> Near:
    begin, _, n_lacking = axis.span(part.value)
    if n_lacking:
        raise ValueError(
            f"which day of it? Pass one, near('{str(part.value).strip()}{'-01' * n_lacking}'), or "
            f"between({part.value!r}, {part.value!r}) for all of it"
        )
    within: Any = part.within
    if isinstance(within, datetime.timedelta | np.timedelta64):
        try:
            within = Fraction(float(np.timedelta64(within) / np.timedelta64(1, "us"))) / 10**6 / axis.unit
        except (TypeError, ValueError):  # months, or NaT
            raise ValueError(f"within is {within!r}, which has no length. Pass datetime.timedelta(days=1)") from None
    return replace(part, value=begin, within=within, typed=repr(part), to_text=axis.text, tie=2 * _HALF / axis.unit)


def _rounded(number: Fraction, dtype: np.dtype[Any]) -> Any:
    with np.errstate(over="ignore"):
        return dtype.type(float(number))


# --- an axis of time


@dataclass(frozen=True)
class _Axis:
    """What the numbers of a coordinate count."""

    unit: Fraction  # in seconds
    zero: Fraction  # the time of its 0, in seconds
    calendar: str

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> _Axis:
        units, calendar = attrs.get("units"), attrs.get("calendar", "")
        match = _UNITS.fullmatch(units) if isinstance(units, str) else None
        has_units = f"its coordinate has the units {units!r}" if isinstance(units, str) else "its coordinate has no units"
        if match is None:
            raise ValueError(f"{has_units}; dates need those of time, such as 'days since 2000-01-01'. Pass numbers")
        name = calendar.strip().lower() if isinstance(calendar, str) else repr(calendar)
        name = _CALENDARS.get(name, name)
        if name not in _KNOWN:
            raise ValueError(f"its coordinate has the calendar {calendar!r}; expected one of {', '.join(_KNOWN)}. Pass numbers")
        word = match[1].lower()
        unit, date = _SECONDS.get(word, _OF_CALENDARS.get((name, word))), _parse(match[2])
        if unit is None:
            raise ValueError(
                f"{has_units}: {match[1]!r} is no unit with a length of its own, from nanoseconds to days. Pass numbers"
            )
        if date is None:
            raise ValueError(f"{has_units}, of which the date cannot be read. Pass numbers")
        return cls(unit, _span_of_match(date, name)[0], name)

    def span(self, date: Any) -> tuple[Fraction, Fraction, int]:
        """Where a date begins and ends in numbers of the axis, the same for an instant; and how many fields it lacks of a day:
        a month 1, a year 2.
        """
        if _is_number(date):
            if not math.isfinite(date):
                raise ValueError("expected dates or numbers")
            return _exact(date), _exact(date), 0
        begin, end, n_lacking = _span_of(date, self.calendar)
        return (begin - self.zero) / self.unit, (end - self.zero) / self.unit, n_lacking

    def text(self, number: Any) -> str:
        """A number of the axis as a date, for a message."""
        if not math.isfinite(number):
            return str(number)
        try:
            date = _from_seconds(self.calendar, round(_exact(number) * self.unit + self.zero))
            return str(date.isoformat()).removesuffix("T00:00:00")
        except (ValueError, OverflowError):
            return str(number)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, np.timedelta64)


def _exact(number: Any) -> Fraction:
    return Fraction(number.item() if isinstance(number, np.generic) else number)  # else NumPy's integers overflow in it


# --- dates


def _span_of(date: Any, calendar: str) -> tuple[Fraction, Fraction, int]:
    """Where a date begins and ends, in seconds; and how many fields it lacks of a day. ValueError if it is no date."""
    if isinstance(date, np.datetime64):
        if np.isnat(date):
            raise ValueError("NaT is no date. Pass one such as '2001-06-15'")
        begin, _, _ = _span_of(str(date), calendar)  # an instant, as in pandas
        return begin, begin, 0
    if isinstance(date, str):
        match = _parse(date.strip())
        if match is None or len(match["year"].lstrip("+-")) < 4:
            raise ValueError(
                f"{date!r} is no date that can be read; expected one such as '2001-06-15', '2001-06-15T12:30' or '2001-06'"
            )
        begin, length = _span_of_match(match, calendar)
        n_lacking = 2 if match["month"] is None else 1 if match["day"] is None else 0
        return begin, begin + length, n_lacking
    if isinstance(date, datetime.datetime) and date.tzinfo is not None:
        date = date.astimezone(datetime.UTC)
    if not isinstance(date, datetime.date | cftime.datetime):
        raise ValueError(
            f"a {type(date).__name__} is neither a number in the units of the coordinate nor a date. Pass text such as "
            "'2001-06-15', an object of datetime or cftime, or numpy.datetime64"
        )
    fields: Any = date
    year, month, day, hour, minute, second = (int(getattr(fields, key, 0)) for key in _FIELDS)
    name = str(getattr(fields, "calendar", "") or calendar).lower()
    calendar_of_date = _CALENDARS.get(name, name)
    is_modern = {calendar_of_date, calendar} <= {"standard", "proleptic_gregorian"} and (year, month, day) >= _REFORM
    if calendar_of_date != calendar and not is_modern:
        raise ValueError(
            f"this is a date of the calendar {calendar_of_date!r}, the axis has {calendar!r}. Pass text, or such a date"
        )
    parts = Fraction(int(getattr(fields, "microsecond", 0)), 10**6) + Fraction(int(getattr(fields, "nanosecond", 0)), 10**9)
    instant = _to_seconds(calendar, year, month, day, hour, minute, second) + parts
    return instant, instant, 0


def _parse(text: str) -> re.Match[str] | None:
    """The parts of a date: ``2000-01-31``, ``20000131``, ``2000/01/31`` or ``2000.01.31``, with a time of day or not, or a
    month or year alone. None if it is no date, or may be several.
    """
    without_dashes = _OTHER_DATE.match(text)
    if without_dashes is not None:
        text = "-".join(filter(None, without_dashes.groups())) + text[without_dashes.end() :]
    match = _DATE.fullmatch(text)
    if match is None or (match["zone"] or " ")[0] not in "+-" or match["hour"] or match.string[match.start("zone") - 1] == " ":
        return match
    return None  # "2000-01-01+01:30" may be a zone or a time of day


def _span_of_match(match: re.Match[str], calendar: str) -> tuple[Fraction, Fraction]:
    """Where the date of a match begins, and how long it is, in seconds of UTC. ValueError if there is no such date."""
    year, month, day, hour, minute, second = (None if match[key] is None else int(match[key]) for key in _FIELDS)
    y, m, d = year or 0, 1 if month is None else month, 1 if day is None else day
    zone = int(match["zone_hour"] or 0) * 3600 + int(match["zone_minute"] or 0) * 60
    begin = _to_seconds(calendar, y, m, d, hour or 0, minute or 0, second or 0) + (zone if match["zone_sign"] == "-" else -zone)
    length = Fraction(0)
    if month is None or day is None:
        first = (y + 1, 1, 1) if month is None or m == 12 else (y, m + 1, 1)
        length = _to_seconds(calendar, *first) - _to_seconds(calendar, y, m, d)
    elif hour is None:
        length = Fraction(86400)
    elif minute is None:
        length = Fraction(3600)
    elif second is None:
        length = Fraction(60)
    elif not match["part"]:
        length = Fraction(1)
    else:
        begin += Fraction(int(match["part"]), 10 ** len(match["part"]))
    return begin, length


# --- calendars: cftime counts the days of each


def _to_seconds(calendar: str, year: int, month: int, day: int, *clock: int) -> Fraction:
    """A time in seconds. ValueError if the calendar has none such.

    >>> (_to_seconds("standard", 1582, 10, 15) - _to_seconds("standard", 1582, 10, 4)) / 86400
    Fraction(1, 1)
    """
    if year < 1 and calendar in _FROM_YEAR_1:
        raise ValueError(f"the calendar {calendar} has no year {year}")
    try:
        date = cftime.datetime(year, month, day, *clock, calendar=calendar, has_year_zero=True)
    except (ValueError, OverflowError):
        time = "T" + ":".join(f"{part:02}" for part in clock) if any(clock) else ""
        raise ValueError(f"{year:04}-{month:02}-{day:02}{time} is no date of the calendar {calendar}") from None
    return Fraction(86400 * int(date.toordinal()) + 3600 * date.hour + 60 * date.minute + date.second)


def _from_seconds(calendar: str, seconds: int) -> cftime.datetime:
    """The inverse of `_to_seconds`."""
    first = cftime.datetime(1, 1, 1, calendar=calendar, has_year_zero=True)
    days, rest = divmod(seconds, 86400)
    days -= int(first.toordinal())
    if days < 0 and calendar in _FROM_YEAR_1:
        raise ValueError(f"the calendar {calendar} begins with the year 1")
    return first + datetime.timedelta(days=days, seconds=rest)
