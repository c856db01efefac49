"""Do dates select what xarray selects, and is each the number that cftime says?"""

from __future__ import annotations

import datetime
import warnings
from fractions import Fraction
from typing import Any

import cftime
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import example, given
from hypothesis import strategies as st

from shardload.planning.selection import Near, between, near, positional_index
from shardload.values.dates import as_dates, has_dates, in_numbers, is_dates, numbers_of_dates

CALENDARS = ("standard", "gregorian", "proleptic_gregorian", "noleap", "365_day", "360_day", "all_leap", "366_day", "julian")
UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1, "milliseconds": Fraction(1, 1000)}
ZONES = {"": 0, " +01:00": 3600, " -6:30": -23400, "Z": 0, " UTC": 0, "+0100": 3600}


def number(date: Any, units: str, calendar: str, dtype: str = "f8") -> Any:
    """The number that a date is, as the first end of a range."""
    found = in_numbers(near(date), "time", {"units": units, "calendar": calendar}, np.dtype(dtype))
    assert isinstance(found, Near)
    return found.value


@given(
    st.sampled_from(CALENDARS),
    st.sampled_from(list(UNITS)),
    st.tuples(st.integers(1, 4000), st.integers(1, 12), st.integers(1, 31)),
    st.tuples(st.integers(1, 4000), st.integers(1, 12), st.integers(1, 31)),
    st.integers(0, 86399),
    st.sampled_from(list(ZONES)),
)
@example("standard", "days", (1582, 10, 15), (1582, 10, 4), 0, "")
@example("standard", "days", (1500, 2, 29), (1600, 2, 29), 0, "")
@example("standard", "days", (1700, 2, 29), (1600, 2, 29), 0, "")
@example("noleap", "days", (2000, 2, 28), (2000, 3, 1), 0, "")
def test_each_date_is_the_number_of_cftime(
    calendar: str, unit: str, date: tuple[int, int, int], zero: tuple[int, int, int], seconds: int, zone: str
) -> None:
    """Wrong if a leap year, the change of the calendar, or a time zone were another than for cftime."""
    units = f"{unit} since {zero[0]:04}-{zero[1]}-{zero[2]} 06:30:00"
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    try:
        wanted = cftime.datetime(*date, seconds // 3600, seconds // 60 % 60, seconds % 60, calendar=calendar)
        first = cftime.datetime(*zero, 6, 30, calendar=calendar)
    except ValueError:
        with pytest.raises(ValueError, match="is no date of the calendar"):
            number("{:04}-{:02}-{:02}T".format(*date) + clock, units, calendar)
        return
    text = "{:04}-{:02}-{:02}T".format(*date) + clock
    exact = Fraction((wanted - first) // datetime.timedelta(seconds=1)) / UNITS[unit]
    assert number(text, units, calendar) == exact == number(wanted, units, calendar)
    assert number(text, units + zone, calendar) == exact + Fraction(ZONES[zone]) / UNITS[unit]


def test_arrays_of_dates() -> None:
    """Wrong if the numbers were others than cftime's and xarray's, or a date was taken for another one without a word."""
    attrs = {"units": "hours since 1999-12-31", "calendar": "noleap"}
    dates = cftime.num2date(np.array([[0, 1440], [1441, 9000]]), attrs["units"], attrs["calendar"])
    np.testing.assert_array_equal(numbers_of_dates(dates, attrs, np.dtype("i4")), cftime.date2num(dates, **attrs))
    modern = {"units": "days since 1999-12-31"}
    instants = np.array(["2000-03-01T06:00", "2000-02-29"], "M8[ns]")
    wanted, *_ = xr.coding.times.encode_cf_datetime(instants, modern["units"], dtype=np.dtype("f8"))
    np.testing.assert_array_equal(numbers_of_dates(instants, modern, np.dtype("f8")), wanted)
    assert is_dates(dates) and is_dates(instants) and not is_dates(np.array(["a"], object)) and not is_dates([instants])
    for array, units, dtype, says in (
        (dates, modern, "f8", "calendar 'noleap', the axis has 'standard'"),
        (instants, modern, "i4", "2000-03-01T06:00:00 is 61.25 in these units, which int32 does not have"),
        (instants, {"units": "seconds since 1900-01-01"}, "f4", "would be rounded by more than a millisecond"),
        (np.array(["NaT"], "M8[s]"), modern, "i4", "NaT is among them, which int32 does not have"),
        (np.array([1], "m8[h]"), modern, "f8", "expected those of spans of time, such as 'days'"),
        (np.array([1], "m8[M]"), {"units": "days"}, "f8", "these are timedelta64.M., which have no length"),
        (np.array([1], "m8[h]"), {"units": "days"}, "i4", "0.0416667 days is 0.0416666"),
        (instants, {"units": "days since 1600-01-01"}, "i4", "is 146157.25 in these units"),
        (instants, {}, "f8", "its coordinate has no units"),
    ):
        with pytest.raises(ValueError, match=says):
            numbers_of_dates(array, units, np.dtype(dtype))


@pytest.mark.parametrize("dtype", ["f8", "i8"])
@pytest.mark.parametrize(
    ("times", "attrs"),
    [
        (np.array(["2000-03-01T06:00", "NaT", "1999-02-28"], "M8[ns]"), {"units": "hours since 1999-12-31"}),
        (np.array([[36, "NaT"], [-3, 5]], "m8[h]").astype("m8[ns]"), {"units": "minutes"}),
        (np.array([2, 3], "m8[D]").astype("m8[s]"), {"units": "hours"}),
    ],
)
def test_times_that_are_missing_and_spans_of_time(times: Any, attrs: dict[str, str], dtype: str) -> None:
    encoded = xr.conventions.encode_cf_variable(
        xr.Variable([f"x{k}" for k in range(times.ndim)], times, {}, {**attrs, "dtype": dtype})
    )
    np.testing.assert_array_equal(numbers_of_dates(times, attrs, np.dtype(dtype)), encoded.values)


@st.composite
def axes(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], str, str]:
    """The numbers of an axis of time, ascending or descending, their units and calendar."""
    calendar = draw(st.sampled_from(CALENDARS))
    unit = draw(st.sampled_from(["days", "hours", "minutes", "seconds"]))
    zone = draw(st.sampled_from(["", "", " -06:00", " +01:30"]))
    units = f"{unit} since {draw(st.sampled_from(['1999-12-30', '2001-02-28 12:00:00', '1850-01-01T00:00:00']))}{zone}"
    per_day = int(86400 / UNITS[unit])
    start = draw(st.integers(-3, 400)) + (365 * 150 if "1850" in units else 0)
    step = draw(st.sampled_from([Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(5), Fraction(30), Fraction(365)]))
    offset = draw(st.sampled_from([Fraction(0), Fraction(1, 2), Fraction(3, 4)]))
    numbers = [(start + offset + k * step) * per_day for k in range(draw(st.integers(1, 40)))]
    if all(n.denominator == 1 for n in numbers) and draw(st.booleans()):
        values = np.array([int(n) for n in numbers], draw(st.sampled_from(["i4", "i8"])) if max(numbers) < 2**31 else "i8")
    else:
        values = np.array([float(n) for n in numbers])
    return (values[::-1].copy() if draw(st.booleans()) else values), units, calendar


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Dates around the axes, whole or in part."""
    text = f"{draw(st.integers(1999, 2003)):04}"
    for form in draw(st.sampled_from([(), ("-{:02}",), ("-{:02}", "-{:02}"), ("-{:02}", "-{:02}", "T{:02}:00")])):
        most = {"-{:02}": 12, "T{:02}:00": 23}[form] if text.count("-") == 0 or "T" in form else 28
        text += form.format(draw(st.integers(0 if "T" in form else 1, most)))
    return text


def by_xarray(values: Any, units: str, calendar: str) -> xr.DataArray:
    """Positions along an axis, with the dates that xarray makes of its numbers."""
    time = xr.Variable("time", values, {"units": units, "calendar": calendar})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return xr.decode_cf(xr.Dataset({"at": ("time", np.arange(values.size))}, {"time": time}))["at"]


def position(part: Any, values: Any, units: str, calendar: str) -> Any:
    return positional_index(
        {"time": in_numbers(part, "time", {"units": units, "calendar": calendar}, values.dtype)}, ("time",), {"time": values}
    )[0]


@given(axes(), texts(), texts())
def test_ranges_are_those_of_xarray(axis: Any, low: str, high: str) -> None:
    """Wrong if a month ended before its last day, an end were left out, or an axis that descends were searched as others."""
    is_down = axis[0].size > 1 and axis[0][0] > axis[0][-1]  # there pandas refuses text
    places = np.arange(axis[0].size)[:: -1 if is_down else 1]
    at = by_xarray(axis[0][places], *axis[1:])
    wanted = sorted(places[at.sel(time=slice(low, high)).values].tolist())
    try:
        found = position(between(low, high), *axis)
    except ValueError as error:
        assert not wanted
        assert "no coordinate is in that range" in str(error) or "the lower end comes first" in str(error)
    else:
        assert np.arange(axis[0].size)[found].tolist() == wanted


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("since", ["2001-01-01", "1850-01-01", "0001-01-01"])
def test_times_that_floating_point_does_not_have(since: str, dtype: str) -> None:
    """Wrong if 8:00, stored as the nearest number to a third of a day, were before 8:00. xarray then leaves it out."""
    units, minutes = f"days since {since}", 480 if dtype == "f4" else 20
    first = number("2001-03-01", units, "standard")
    exact = [first + Fraction(k * minutes, 1440) for k in range(200)]
    values = np.array([float(n) for n in exact], dtype)
    if np.unique(values).size < values.size:
        return  # 32 bits do not tell them apart
    instants = np.datetime64("2001-03-01T00:00") + np.arange(200) * np.timedelta64(minutes, "m")
    for k, text in enumerate(map(str, instants)):
        assert position(between(text, text), values, units, "standard") == slice(k, k + 1)
        if k:
            assert position(between(*instants[k - 1 : k + 1]), values, units, "standard") == slice(k - 1, k + 1)
        assert position(near(text), values, units, "standard") == k
    if since == "2001-01-01" and dtype == "f8":  # a model that adds up its time steps
        values = float(first) + np.cumsum(np.full(200, 1 / 72)) - 1 / 72
        assert any(value < float(n) for value, n in zip(values, exact, strict=True))
        for k, text in enumerate(map(str, instants)):
            assert position(between(text, text), values, units, "standard") == slice(k, k + 1)


DAILY = {"units": "days since 2000-01-01", "calendar": "standard"}


@pytest.mark.parametrize(
    ("date", "wanted"),
    [
        ("2000-01-11", 10),
        ("2000-01-11T12", 10.5),
        ("2000-01-11 12:00:00.5Z", 10 + Fraction(86401, 172800)),
        ("2000-01-11T12:00+06:00", 10.25),
        (datetime.date(2000, 1, 11), 10),
        (datetime.datetime(2000, 1, 11, 6, 0, 0, 500000), 10 + Fraction(43201, 172800)),
        (datetime.datetime(2000, 1, 11, 6, tzinfo=datetime.timezone(datetime.timedelta(hours=6))), 10),
        (np.datetime64("2000-01-11"), 10),
        (np.datetime64("2000-02"), 31),
        (np.datetime64("2000-01-11T12:00:00.000000001", "ns"), 10 + Fraction(1, 2) + Fraction(1, 86400 * 10**9)),
        (pd.Timestamp("2000-01-11T12:00:00.000000001"), 10 + Fraction(1, 2) + Fraction(1, 86400 * 10**9)),
        (cftime.DatetimeGregorian(2000, 1, 11), 10),
        (cftime.DatetimeProlepticGregorian(2000, 1, 11), 10),
        (cftime.datetime(2000, 1, 11, calendar=""), 10),
        (10.5, 10.5),
        (np.int32(10), 10),
    ],
)
def test_dates_of_all_kinds(date: Any, wanted: Any) -> None:
    found = in_numbers(near(date), "time", DAILY, np.dtype("f8"))
    assert isinstance(found, Near) and found.value == wanted
    if not isinstance(date, str):  # an instant
        assert position(between(date, date), np.array([wanted - 1, wanted, wanted + 0.25], "f8"), *DAILY.values()) == slice(
            1, 2
        )
    assert has_dates(near(date)) == (not isinstance(date, (float, np.int32)))


def test_near() -> None:
    """Wrong if a distance were in other units, or of a date and the one before the later one were not taken."""
    noon = np.arange(40) + 0.5
    assert position(near("2000-01-11"), noon, *DAILY.values()) == 10
    assert position(near("2000-01-11"), noon[::-1], *DAILY.values()) == 29
    assert position(near("2000-01-11"), (noon * 24).astype("i4"), "hours since 2000-01-01", "standard") == 10
    hour = datetime.timedelta(hours=1)
    for within in (hour, np.timedelta64(60, "m"), 1 / 24):
        assert position(near("2000-01-11T11:00", within=within), noon, *DAILY.values()) == 10
        with pytest.raises(
            ValueError, match=r"nearest coordinate is 2000-01-11T12:00:00 \(position 10\); it goes from 2000-01-01T1"
        ):
            position(near("2000-01-11T10:59", within=within), noon, *DAILY.values())
    assert has_dates(near(3, within=hour)) and position(near(10.6, within=3 * hour), noon, *DAILY.values()) == 10


@pytest.mark.parametrize(
    ("part", "attrs", "says"),
    [
        (near("2000-01-01"), {}, "on the axis 'time': its coordinate has no units; dates need those of time"),
        (near("2000-01-01"), {"units": "m"}, "has the units 'm'; dates need those of time, such as 'days since 2000-01-01'"),
        (near("2000-01-01"), {"units": ["a"]}, "has no units"),
        (near("2000-01-01"), {"units": "months since 2000-01-01"}, "'months' is no unit with a length of its own"),
        (near("2000-01-01"), {"units": "days since the flood"}, "of which the date cannot be read"),
        (near("2000-01-01"), {"units": "days since 2000-01-01+01:30"}, "of which the date cannot be read"),
        (near("2000-01-01"), {"units": "days since 2000-02-30"}, "2000-02-30 is no date of the calendar standard"),
        (near("2000-01-01"), {"units": "days since 0000-01-01"}, "the calendar standard has no year 0"),
        (near("2000-01-01"), {"units": "days since 2000-01-01 00:00 +99"}, "of which the date cannot be read"),
        (near("2000-01-01"), {**DAILY, "calendar": "maya"}, "has the calendar 'maya'; expected one of standard, proleptic"),
        (near("2000-01-01"), {**DAILY, "calendar": 7}, "has the calendar 7"),
        (near("2000-02-30"), DAILY, "2000-02-30 is no date of the calendar standard"),
        (near("2000-02-29"), {**DAILY, "calendar": "noleap"}, "2000-02-29 is no date of the calendar noleap"),
        (between("1582-10-10", "1600"), DAILY, "1582-10-10 is no date of the calendar standard"),
        (near("2000-01-01T24:00"), DAILY, "T24:00:00 is no date of the calendar standard"),
        (near("2000-01"), DAILY, "which day of it? Pass one, near('2000-01-01'), or between('2000-01', '2000-01') for all"),
        (near("2000"), DAILY, "which day of it? Pass one, near('2000-01-01'), or between('2000', '2000')"),
        (near("01/02/2000"), DAILY, "'01/02/2000' is no date that can be read; expected one such as '2001-06-15'"),
        (between("2000-02", "2000-01"), DAILY, "the lower end comes first"),
        (between("2000-02", float("nan")), DAILY, "expected dates or numbers"),
        (near(np.datetime64("NaT", "ns")), DAILY, "NaT is no date"),
        (near("2000-01-01", within=np.timedelta64(1, "M")), DAILY, "has no length"),
        (near(None), DAILY, "a NoneType is neither a number in the units of the coordinate nor a date"),
        (near(cftime.DatetimeNoLeap(2000, 1, 1)), DAILY, "this is a date of the calendar 'noleap', the axis has 'standard'"),
        (near(cftime.DatetimeProlepticGregorian(1500, 1, 1)), DAILY, "this is a date of the calendar 'proleptic_gregorian'"),
    ],
)
def test_what_is_no_date(part: Any, attrs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as raised:
        in_numbers(part, "time", attrs, np.dtype("f8"))
    assert says in str(raised.value) and str(raised.value).startswith(f"select has {part} on the axis 'time'")


@pytest.mark.parametrize("calendar", ["standard", "proleptic_gregorian"])
@pytest.mark.parametrize(
    "since",
    [
        *("2000/06/15", "2000/6/5 12:30", "2000.06.15", "20000615", "20000615T12:30", "2000", "2000-06", "2000-6"),
        *("2000-06-15Z", "2000/06/15 06:00 -3", "2000-06-15 06:00:00.5 +01:30", "1-1-1", "10000-01-01", "1582-10-15"),
    ],
)
def test_dates_of_units_in_other_forms(since: str, calendar: str) -> None:
    """Wrong if units that xarray reads were refused, or read as another date."""
    units = f"hours since {since}"
    time = by_xarray(np.array([36]), units, calendar).time.values[0]
    assert number(time, units, calendar) == 36


@pytest.mark.parametrize("since", ["06/15/2000", "15-06-2000", "2000615", "01/02/03", "20", "2000-06-15 garbage"])
def test_dates_of_units_that_may_be_several(since: str) -> None:
    assert as_dates([1], {"units": f"days since {since}"}) == []


def test_no_coordinate_in_a_range_of_dates() -> None:
    with pytest.raises(ValueError, match="no coordinate is in that range; it goes from 2000-01-01 to 2000-01-10"):
        position(between("2001-06", "2002"), np.arange(10), *DAILY.values())
    with pytest.raises(ValueError, match="no coordinate is in that range"):  # and not that the ends are in the wrong order
        position(between("2000-01-02T01", "2000-01-02T02"), np.arange(10), *DAILY.values())
    assert repr(between("2000", datetime.date(2001, 1, 1))) == "between('2000', datetime.date(2001, 1, 1))"
