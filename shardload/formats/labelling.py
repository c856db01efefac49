"""What are the axes of an array called, and what do other arrays of its file say of it? Coordinates are read, within bounds.

`Source.labels` has the names of an array's coordinates; a `Labeller` opens these arrays, and reads those that are small.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np

from shardload.errors import ConfigError, SourceError, is_unread
from shardload.formats.access import STRICT, Access
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.format import OpenFile, Source
from shardload.formats.diagnosis import as_source_error
from shardload.formats.labels import LONGEST_NAME, MIXED, MOST_ATTRS, Coordinate, Labels, Note
from shardload.formats.lookup import (
    as_path,
    format_of,
    format_of_object,
    list_arrays,
    naming_what_is_gone,
    split_path,
    without_scheme,
)
from shardload.planning.region import Region
from shardload.system.scratch import scratch_of_its_own
from shardload.values.decoding import decoding_of

__all__ = [
    "SMALL_NBYTES",
    "Labeller",
    "bounded",
    "complete",
    "labelled",
    "labelled_below",
    "list_labelled",
    "read_labels",
]

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


def labelled_below(infos: Sequence[ArrayInfo], path: str, access: Access, most: int, group: str) -> list[ArrayInfo]:
    """The arrays of a file that are below a group (empty: the root); if links lead to it, what `list_labelled` has there."""
    below = [info for info in infos if info.dataset.startswith(f"{group}/")]
    return below or (list_labelled(path, access, most, group) if group else [])


def list_labelled(path: str, access: Access, most: int, linked: str = "") -> list[ArrayInfo]:
    """What `list_arrays` says, with the labels of every array that can be loaded, if there are at most `most` arrays.

    With `linked`, the arrays below this group, to which links lead (`Format.list_linked`); none if there is no such group.

    Collective: no. Raises what `list_arrays` raises, and SourceError if a link has no target or leads outside.
    """
    path = without_scheme(path)
    if linked:
        file_format = format_of(path, access)
        with as_source_error(path):
            infos = file_format.list_linked(path, linked, access)
    else:
        infos = list_arrays(path, access)
    if len(infos) > most:
        return infos
    return labelled(infos, path, access)


def labelled(infos: Iterable[ArrayInfo], path: str, access: Access) -> list[ArrayInfo]:
    """Arrays of a file with their labels, from one open of the file."""
    with scratch_of_its_own(), Labeller(access) as labeller:
        return [_labelled(labeller, path, info) for info in infos]


def _labelled(labeller: Labeller, path: str, info: ArrayInfo) -> ArrayInfo:
    """An array with its labels. One that cannot be loaded may be there for its attributes alone (CF's grid mapping)."""
    try:
        return info if info.dtype.startswith("unknown") else labeller.label(path, info)
    except SourceError:
        if info.refused is None:
            raise
        return info


class Labeller:
    """Adds labels to what was found: names of axes, all attributes, coordinates. A context manager; a file is opened once.

    Collective: no. One rank uses it, and tells the others.

    Parameters
    ----------
    access : Access
        What the caller allows.
    small_nbytes : int
        The most bytes of values of a coordinate.
    file : callable, optional
        Gives a file by its path, if somebody has it open already.
    names : collection of str, optional
        For a selection by names (`Labels.is_brief`): the only coordinates to read. Attributes are not read then.
    of_groups : bool
        Whether the attributes of an array's group are asked for, too.
    """

    def __init__(
        self,
        access: Access = STRICT,
        small_nbytes: int = SMALL_NBYTES,
        file: Callable[[str], OpenFile] | None = None,
        names: Collection[str] | None = None,
        of_groups: bool = False,
    ) -> None:
        self._access, self._small_nbytes, self._given, self._names = access, small_nbytes, file, names
        self._of_groups = of_groups
        self._path, self._file = "", ExitStack()
        self._opened: OpenFile | None = None

    def __enter__(self) -> Labeller:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def label(self, path_or_object: Any, info: ArrayInfo, source: Source | None = None) -> ArrayInfo:
        """The same `info`, with labels. `source` is the array, if it is open in this process.

        Raises
        ------
        SourceError
            If the array cannot be opened any more.
        """
        path = as_path(path_or_object)
        if path is None:
            with as_source_error(info.path, info.dataset):
                source = format_of_object(path_or_object, self._access).open_object(path_or_object, self._access)
            return self._complete(info, source, self._beside(info.path))
        file = self._open(split_path(path)[0])
        with naming_what_is_gone(info.path, info.dataset):
            if source is not None:
                return self._complete(info, source, file.open)
            with closing(file.open(info.dataset)) as opened:
                return self._complete(info, opened, file.open)

    def _complete(self, info: ArrayInfo, source: Source, open_other: Callable[[str], Source]) -> ArrayInfo:
        read_in = source.opened_in()
        try:
            labels = source.labels() if self._names is None else source.axes(self._names)
            if self._names is not None and not labels.coords.keys() >= set(self._names):  # attributes may name more
                labels = source.labels()
            own = info.dataset.rpartition("/")[2]
            if labels.dims == (own,):  # the coordinate of an axis is its own coordinate
                labels = replace(labels, coords={**labels.coords, own: Coordinate(info.dataset)})
            if self._names is None:
                labels = complete(labels, open_other, self._small_nbytes, self._of_group(source))
            else:
                named = {name: one for name, one in labels.coords.items() if name in self._names}
                labels = complete(replace(labels, attrs={}, coords=named, is_brief=True), open_other, self._small_nbytes)
        except (LookupError, OSError, RuntimeError, TypeError, ValueError) as error:  # damaged names; the values may be fine
            if is_unread(error):
                raise
            noted = {"attributes": Note(f"cannot be read ({error})")}
            labels = Labels((None,) * len(info.shape), {**info.attributes, **noted})
        if source.state() != read_in:  # these may be of two versions, and no values belong to them
            read_in = MIXED
        return replace(info, labels=replace(labels, read_in=read_in))

    def _of_group(self, source: Source) -> Mapping[str, Any] | None:
        """The attributes of the array's group; a note if they are damaged: then the array's own may be fine."""
        if not self._of_groups:
            return None
        try:
            return source.group_attrs()
        except (LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            if is_unread(error):
                raise
            return {"attributes": Note("cannot be read")}

    def _open(self, path: str) -> OpenFile:
        if self._given is not None:
            with as_source_error(path):
                return self._given(path)
        if self._opened is None or path != self._path:
            self._file.close()
            file_format = format_of(path, self._access)
            with as_source_error(path):
                self._opened = self._file.enter_context(file_format.open_file(path, self._access))
            self._path = path
        return self._opened

    def _beside(self, path: str) -> Callable[[str], Source]:
        """Opens other arrays of the file that an open array is in, by their names; KeyError if it is in no file."""

        def open_other(name: str) -> Source:
            if not os.path.exists(path):
                raise KeyError(name)
            return self._open(path).open(name)

        return open_other


def read_labels(path_or_object: Any, info: ArrayInfo, access: Access = STRICT, small_nbytes: int = SMALL_NBYTES) -> Labels:
    """The names of the axes, the attributes and coordinates of an array that was found; of a single array, by this process.

    Collective: no.

    Raises
    ------
    SourceError
        If the array cannot be opened any more.
    """
    with scratch_of_its_own(), Labeller(access, small_nbytes, of_groups=True) as labeller:
        found = labeller.label(path_or_object, info).labels
    return found if isinstance(found, Labels) else Labels((None,) * len(info.shape), info.attributes)
