"""Where does the coordinate of a stream's steps have a gap, over which no sample may reach?

time      0   6  12  18  48  54
                        ^ a gap: 30, where most differences are 6
"""

from __future__ import annotations

import numpy as np

from shardload.errors import ConfigError
from shardload.jobs.streaming.plan import StreamArray
from shardload.planning.sample_order import Ints

_LONGEST = 1.5  # times the median of all differences


def find_gaps(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Ints:
    """The steps before which a coordinate has a gap: it goes on by more than 1.5 times the median, or back.

    >>> find_gaps(np.array([0.0, 6, 12, 18, 48, 54])), find_gaps(np.array([3.0, 2, 1, 2]))
    (array([4]), array([3]))
    """
    if len(values) < 2:
        return np.empty(0, dtype=np.int64)
    differences = np.diff(values)
    median = np.median(differences)
    if not median or not np.isfinite(median):  # it counts nothing
        return np.empty(0, dtype=np.int64)
    is_regular = (differences / median > 0) & (differences / median <= _LONGEST)
    return np.flatnonzero(~is_regular) + 1


def gaps_in(array: StreamArray, is_error: bool) -> Ints:
    """The gaps of an array's steps; none if they have no coordinate of numbers. ConfigError if there may be none."""
    selection, info = array.source.selection, array.info
    axis = selection.kept[array.schedule.axis]
    name = info.dims[axis]
    values = None if name is None or name not in info.coords else info.coords[name].values
    if values is None or values.shape != (info.shape[axis],) or values.dtype.kind not in "iuf":
        return np.empty(0, dtype=np.int64)
    values = values[selection.region.start[axis] : selection.region.stop[axis]].astype(np.float64)
    gaps = find_gaps(values)
    if is_error and len(gaps):
        k = int(gaps[0])
        more = f", and {len(gaps) - 1} more gaps" if len(gaps) > 1 else ""
        raise ConfigError(
            f"{name!r} of {info} has a gap between steps {k - 1} and {k} of the selection: it goes from {values[k - 1]:.12g} "
            f"to {values[k]:.12g}, and by {np.median(np.diff(values)):.12g} from most steps to the next{more}. Pass "
            "gaps='skip' to leave out the samples whose window reaches over one, or gaps='ignore' if that is no matter"
        )
    return gaps
