"""What are the axes of an array called, and what do they count? Names of dimensions, attributes, and coordinates.

netCDF and Zarr name axes, and store the coordinates of an axis (longitudes, times) in an array of that name. A load needs none
of it, so it is read only where it is asked for: by `shardload.open`, for a selection by name, and when a plan's names are first
looked at (`OnDemand`).

1. `Source.labels` gives a format's own names and attributes, and says which other arrays are coordinates.
2. `labelling.Labeller` reads those coordinates, if they are small.
3. `Labels` are part of an `ArrayInfo`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

Dims = tuple[str | None, ...]
LONGEST_NAME, MOST_ATTRS = 4096, 256  # that one rank takes from another process
MIXED = (-1, -1)  # in the place of the state of a file that changed while labels were read: no file has it


class Note(str):
    """In the place of an attribute's value: a text for people that says why the value is not here."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Coordinate:
    """A coordinate of an array.

    Attributes
    ----------
    dataset : str
        Its full name in the file.
    dims : tuple of str or None
        The names of its axes.
    attrs : mapping
        Its attributes, as plain Python.
    values : ndarray or None
        Its values, decoded (times are numbers); None if they are not small, or no numbers.
    """

    dataset: str
    dims: Dims = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    values: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True, eq=False)
class Labels:
    """The names and attributes of one array.

    Attributes
    ----------
    dims : tuple of str or None
        The name of each axis; None for an axis without one.
    attrs : mapping
        All attributes that are the author's, as plain Python.
    coords : mapping of str to Coordinate
        The coordinates, by name.
    is_brief : bool
        True if there is only what a selection by names needs: attributes, and other coordinates, were not asked for.
    of_group : mapping
        The attributes of the group that the array is in (of the file, for the root): title, history. Only of a single array.
    read_in : tuple of int or None
        The state of the file in which they were read (`Source.state`); None if it has none.
    """

    dims: Dims
    attrs: Mapping[str, Any] = field(default_factory=dict)
    coords: Mapping[str, Coordinate] = field(default_factory=dict)
    is_brief: bool = False
    of_group: Mapping[str, Any] = field(default_factory=dict)
    read_in: tuple[int, ...] | None = None


class OnDemand:
    """Labels that are read from the file when they are first looked at.

    Parameters
    ----------
    read : callable
        Returns the labels.
    brief : Labels, optional
        Those in which a selection by names was looked up.
    """

    def __init__(self, read: Callable[[], Labels], brief: Labels | None = None) -> None:
        self._read, self.brief = read, brief

    @cached_property
    def found(self) -> Labels:
        """The labels."""
        return self._read()

    def read_again(self) -> None:
        """Read them anew, because the file is another one than it was then."""
        self.__dict__.pop("found", None)


def names_in(text: Any) -> list[str]:
    """The names in a ``coordinates`` attribute: ``"lat lon"``.

    >>> names_in("lat  lon"), names_in(None)
    (['lat', 'lon'], [])
    """
    return text.split() if isinstance(text, str) else []
