"""What do the other arrays of a file say of an array? Its coordinates are read, within bounds.

`Source.labels` has the names of an array's coordinates; `complete` opens these arrays, and reads those that are small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shardload.errors import ConfigError, is_unread
from shardload.formats.base import Source
from shardload.formats.labels import LONGEST_NAME, MOST_ATTRS, Coordinate, Labels, Note
from shardload.planning.region import Region
from shardload.values.decoding import decoding_of

__all__ = ["SMALL_NBYTES", "bounded", "complete"]

SMALL_NBYTES = 1 << 16  # of the values of one coordinate
_MOST_COORDS, _MOST_ALL_NBYTES = 32, 1 << 18
_MOST_ATTRS_OF_COORDINATE = 1 << 13
_MOST_ATTRS_NBYTES, _MOST_ATTRS_IN_FULL = 1 << 16, 1 << 18


def bounded(attrs: Mapping[str, Any], most_nbytes: int = _MOST_ATTRS_IN_FULL) -> dict[str, Any]:
    """The attributes that fit together into `most_nbytes` of JSON; of the others a note. Bounded once more, they stay the same.

    >>> bounded({"a": "x" * 100, "b": 1}, 50)
    {'a': 'attributes are too long, not shown', 'b': 1}
    """
    found: dict[str, Any] = {}
    most = MOST_ATTRS if len(attrs) <= MOST_ATTRS else MOST_ATTRS - 1
    n_left = 0  # that have no place of their own
    for key, value in attrs.items():
        if len(key) > LONGEST_NAME or len(found) >= most:
            n_left += 1
            continue
        nbytes = 0 if isinstance(value, Note) else len(json.dumps([key, value]))
        if nbytes > most_nbytes:
            value, nbytes = Note("attributes are too long, not shown"), 0
        found[key], most_nbytes = value, most_nbytes - nbytes
    return found if not n_left else found | {f"... and {n_left} more": Note("too many, or their names are too long; not shown")}


def complete(
    labels: Labels,
    open_other: Callable[[str], Source],
    small_nbytes: int = SMALL_NBYTES,
    of_group: Mapping[str, Any] | None = None,
) -> Labels:
    """The same labels, with what `open_other` says of each coordinate. Coordinates that cannot be opened are left out.

    Parameters
    ----------
    labels : Labels
        From `Source.labels`: coordinates have their names only.
    open_other : callable
        Opens another array of the file by its full name; KeyError, OSError or ValueError if it cannot.
    small_nbytes : int
        The most bytes of values of a coordinate.
    of_group : mapping, optional
        The attributes of the array's group. Given for a single array: then long attributes are kept, too.
    """
    coords: dict[str, Coordinate] = {}
    room = max(_MOST_ALL_NBYTES, small_nbytes)
    for name, coordinate in list(labels.coords.items())[:_MOST_COORDS]:
        try:
            source = open_other(coordinate.dataset)
        except (KeyError, OSError, ValueError, RuntimeError) as error:
            if is_unread(error):
                raise
            continue
        try:
            found = _read(coordinate, source, min(small_nbytes, room))
        finally:
            source.close()
        room -= 0 if found.values is None else found.values.nbytes
        coords[name] = found
    most = _MOST_ATTRS_NBYTES if of_group is None else _MOST_ATTRS_IN_FULL
    return replace(labels, attrs=bounded(labels.attrs, most), coords=coords, of_group=bounded(of_group or {}, most))


def _read(coordinate: Coordinate, source: Source, most_nbytes: int) -> Coordinate:
    info, labels, values = source.info, source.labels(), None
    whole = Region.whole(info.shape)
    if info.refused is None and whole.size * source.dtype.itemsize <= most_nbytes:
        try:
            values = np.empty(info.shape, source.dtype)
            source.read_into(whole, values)
            rule = decoding_of(values.dtype, info.packing, str(info))
            values = values if rule is None else rule.values(values)
        except (ConfigError, OSError, ValueError, RuntimeError) as error:  # the array itself can be loaded all the same
            if is_unread(error):
                raise
            values = None
    if values is not None:
        values.flags.writeable = False  # they are kept for all who ask
    return replace(coordinate, dims=labels.dims, attrs=bounded(labels.attrs, _MOST_ATTRS_OF_COORDINATE), values=values)
