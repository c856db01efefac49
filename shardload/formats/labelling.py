"""What are the axes of an array called, and which coordinates do they have? Coordinates are read if they are small.

`Source.labels` has the names of an array's coordinates; a `Labeller` opens these arrays, and reads those that are small.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from shardload.errors import ConfigError, SourceError, chain_of, is_unread
from shardload.formats.access import STRICT, Access
from shardload.formats.contract.array import LONGEST_NAME, MIXED, MOST_ATTRS, ArrayInfo, Coordinate, Labels, Note, OnDemand
from shardload.formats.contract.format import OpenFile, Source
from shardload.formats.diagnosis import as_source_error
from shardload.formats.lookup import Finder, answers_slowly, as_path, open_object, split_path
from shardload.planning.region import Region
from shardload.storage.remote import RemoteError
from shardload.system.scratch import scratch_of_its_own
from shardload.system.thread_pool import call_together
from shardload.values.decoding import decoding_of

SMALL_NBYTES = 1 << 16  # of the values of one coordinate, where they are shown
COORDINATE_NBYTES = 1 << 24  # where they are needed
_MOST_COORDS, _MOST_LARGE_COORDS = 256, 4  # of an array
_MOST_ATTRS_OF_COORDINATE = 1 << 13
_MOST_ATTRS_NBYTES, _MOST_ATTRS_IN_FULL = 1 << 16, 1 << 18
_DAMAGED = (LookupError, OSError, RuntimeError, TypeError, ValueError)  # names and attributes


def bounded(attrs: Mapping[str, Any], most_nbytes: int = _MOST_ATTRS_IN_FULL) -> dict[str, Any]:
    """The first attributes, as many as fit into `most_nbytes` of JSON, and notes for the others. A second call changes nothing.

    >>> bounded({"a": "x" * 100, "b": 1}, 50)
    {'a': 'attributes are too long, not shown', 'b': 1}
    """
    attributes: dict[str, Any] = {}
    most = MOST_ATTRS if len(attrs) <= MOST_ATTRS else MOST_ATTRS - 1
    n_dropped = 0  # without a note of their own
    for key, value in attrs.items():
        if len(key) > LONGEST_NAME or len(attributes) >= most:
            n_dropped += 1
            continue
        nbytes = 0 if isinstance(value, Note) else len(json.dumps([key, value]))
        if nbytes > most_nbytes:
            value, nbytes = Note("attributes are too long, not shown"), 0
        attributes[key], most_nbytes = value, most_nbytes - nbytes
    if n_dropped:
        attributes[f"... and {n_dropped} more"] = Note("too many, or their names are too long; not shown")
    return attributes


@contextmanager
def labelling(access: Access, small_nbytes: int = SMALL_NBYTES, *, of_groups: bool = False) -> Iterator[Labeller]:
    """A `Labeller` of files that it opens, each once, for this process alone."""
    with scratch_of_its_own(), Finder(access) as finder:
        yield Labeller(finder, small_nbytes, of_groups=of_groups)


def read_labels(path_or_object: Any, info: ArrayInfo, access: Access = STRICT, labeller: Labeller | None = None) -> Labels:
    """The names of the axes, the attributes and coordinates of an array that was found; of a single array, by this process.

    `labeller` has the file open, if other arrays of it are asked for, too. Collective: no.

    Raises
    ------
    SourceError
        If the array cannot be opened any more.
    """
    if labeller is None:
        with labelling(access, COORDINATE_NBYTES, of_groups=True) as labeller:
            return read_labels(path_or_object, info, access, labeller)
    return cast(Labels, labeller.label(path_or_object, info).labels)


def read_now(labels: Iterable[OnDemand]) -> None:
    """Read those that nobody has looked at yet: each file is opened once, not once for each array."""
    by_file = dict[tuple[Access, str | None], list[OnDemand]]()
    for on_demand in labels:
        if on_demand.is_read:
            continue
        path = as_path(on_demand.handle)
        by_file.setdefault((on_demand.access, path and split_path(path)[0]), []).append(on_demand)
    with ExitStack() as opened:
        labellers = dict[Access, Labeller]()
        for (access, path), of_file in by_file.items():
            if access not in labellers:
                labellers[access] = opened.enter_context(labelling(access, COORDINATE_NBYTES, of_groups=True))
            labeller, infos = labellers[access], [on_demand.info for on_demand in of_file]
            labeller.call_for_all(path, infos, [partial(on_demand.read_by, labeller) for on_demand in of_file])


class Labeller:
    """Adds labels to descriptions of arrays: names of axes, all attributes, coordinates.

    Collective: no. One rank uses it, and tells the others.

    Parameters
    ----------
    finder : Finder
        Opens the files.
    small_nbytes : int
        The most bytes of values of a coordinate. All that an array has together take four times as many at most.
    names : collection of str or int, optional
        For a selection by names (`Labels.is_brief`): the only coordinates to read, some maybe by the number of their axis.
        Attributes are not read then.
    of_groups : bool
        Whether to read the attributes of an array's group, too, and to keep long attributes.
    """

    def __init__(
        self,
        finder: Finder,
        small_nbytes: int = SMALL_NBYTES,
        names: Collection[str | int] | None = None,
        of_groups: bool = False,
    ) -> None:
        self.finder, self._small_nbytes, self._names, self._of_groups = finder, small_nbytes, names, of_groups
        # Each with the bytes of its stored values; None for what cannot be opened. Many arrays have the same coordinates.
        self._coordinates: dict[tuple[OpenFile, str], tuple[Coordinate, int] | None] = {}

    def label_all(self, path: str, infos: Sequence[ArrayInfo]) -> list[ArrayInfo]:
        """Arrays of a file, each with its labels if it can be loaded."""
        return self.call_for_all(path, infos, [partial(self._label_if_possible, path, info) for info in infos])

    def call_for_all(self, path: str | None, infos: Sequence[ArrayInfo], calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of calls, each of which labels one of some arrays of a file (None: open ones). Where each look at one
        takes long, they are made together, after all metadata and coordinates were read, each together.
        """
        if path is None or not infos or not all(map(answers_slowly, infos)):
            return [call() for call in calls]
        file, names = self.finder.file(path), dict[str, None]()
        datasets = [info.dataset for info in infos]
        file.expect([*datasets, *(dataset.rpartition("/")[0] for dataset in datasets)])
        for info in infos:
            with suppress(*_DAMAGED, SourceError), closing(file.open(info.dataset)) as source:  # `label` says why
                names |= dict.fromkeys(coord.dataset for coord in _coords_of(info, source.labels()).values())
        file.expect(names)
        coordinates = call_together([partial(self._coordinate, file, name) for name in names], "shardload-labels")
        self._coordinates |= {(file, name): coordinate for name, coordinate in zip(names, coordinates, strict=True)}
        return call_together(calls, "shardload-labels")

    def _label_if_possible(self, path: str, info: ArrayInfo) -> ArrayInfo:
        """An array with its labels. One that cannot be loaded may still have attributes that matter (CF's grid mapping)."""
        try:
            return info if info.dtype.startswith("unknown") else self.label(path, info)
        except SourceError:
            if info.refused is None:
                raise
            return info

    def label(self, path_or_object: Any, info: ArrayInfo, source: Source | None = None) -> ArrayInfo:
        """The same `info`, with labels. `source` is the array, if it is open in this process.

        Raises
        ------
        SourceError
            If the array cannot be opened any more.
        """
        path = as_path(path_or_object)
        if path is None:
            return self._add(info, open_object(path_or_object, self.finder.access), info.path)
        path = split_path(path)[0]
        with as_source_error(info.path, info.dataset):
            if source is not None:
                return self._add(info, source, path)
            with closing(self.finder.file(path).open(info.dataset, replace(info, parts=None))) as opened:
                return self._add(info, opened, path)

    def _add(self, info: ArrayInfo, source: Source, path: str) -> ArrayInfo:
        read_in = source.opened_in
        try:
            labels = self._labels(info, source, path)
        except _DAMAGED as error:  # the values may be fine
            if is_unread(error) or _is_refused(error):
                raise
            attrs = {"attributes": Note(f"cannot be read ({error})")}
            labels = Labels((None,) * len(info.shape), {**info.attributes, **attrs})
        if source.state() != read_in:  # they may be of two versions: they belong to no values
            read_in = MIXED
        return replace(info, labels=replace(labels, read_in=read_in))

    def _labels(self, info: ArrayInfo, source: Source, path: str) -> Labels:
        labels = source.labels()
        coords = _coords_of(info, labels)
        if self._names is not None:
            dims, numbers = labels.dims, range(-len(labels.dims), len(labels.dims))
            names = {dims[name] if isinstance(name, int) and name in numbers else name for name in self._names}
            coords = {name: coordinate for name, coordinate in coords.items() if name in names}
            return replace(labels, attrs={}, coords=self._read(coords, path), is_brief=True)
        of_group: Mapping[str, Any] = {}
        if self._of_groups:
            try:
                of_group = source.group_attrs()
            except _DAMAGED as error:  # the array's own may be fine
                if is_unread(error):
                    raise
                of_group = {"attributes": Note("cannot be read")}
        most = _MOST_ATTRS_IN_FULL if self._of_groups else _MOST_ATTRS_NBYTES
        attrs, of_group = bounded(labels.attrs, most), bounded(of_group, most)
        if len(coords) > _MOST_COORDS:
            attrs[f"... and {len(coords) - _MOST_COORDS} more coordinates"] = Note("too many; not shown")
        return replace(labels, attrs=attrs, coords=self._read(coords, path), of_group=of_group)

    def _read(self, coords: Mapping[str, Coordinate], path: str) -> dict[str, Coordinate]:
        """Coordinates with what their arrays say. Those that cannot be opened are left out."""
        read_coords: dict[str, Coordinate] = {}
        left_nbytes = _MOST_LARGE_COORDS * self._small_nbytes
        for name, coordinate in list(coords.items())[:_MOST_COORDS] if os.path.exists(path) or "://" in path else ():
            file = self.finder.file(path)
            key = file, coordinate.dataset
            if key not in self._coordinates:
                self._coordinates[key] = self._coordinate(file, coordinate.dataset)
            read = self._coordinates[key]
            if read is None:
                continue
            read_coords[name], nbytes = read
            if nbytes > left_nbytes:
                read_coords[name] = replace(read_coords[name], values=None)
            values = read_coords[name].values
            left_nbytes -= 0 if values is None else values.nbytes
        return read_coords

    def _coordinate(self, file: OpenFile, dataset: str) -> tuple[Coordinate, int] | None:
        try:
            source = file.open(dataset)
        except (KeyError, OSError, ValueError, RuntimeError) as error:
            if is_unread(error):
                raise
            return None
        with closing(source):
            nbytes = Region.whole(source.info.shape).size * source.dtype.itemsize
            values = _values_of(source) if nbytes <= self._small_nbytes else None
            labels = source.labels()
        return Coordinate(dataset, labels.dims, bounded(labels.attrs, _MOST_ATTRS_OF_COORDINATE), values), nbytes


def _coords_of(info: ArrayInfo, labels: Labels) -> dict[str, Coordinate]:
    """Where the coordinates of an array are, by name. The coordinate of an axis is its own coordinate."""
    base_name = info.dataset.rpartition("/")[2]
    return {**labels.coords, base_name: Coordinate(info.dataset)} if labels.dims == (base_name,) else dict(labels.coords)


def _is_refused(error: BaseException) -> bool:
    """True if a store does not give what it has: that says nothing of what it holds."""
    return any(isinstance(link, RemoteError) for link in chain_of(error, has_contexts=False))


def _values_of(source: Source) -> np.ndarray[Any, Any] | None:
    """The values of a coordinate, decoded, if they can be read: the array itself can be loaded all the same."""
    info, whole = source.info, Region.whole(source.info.shape)
    if info.refused is not None:
        return None
    try:
        values = np.empty(info.shape, source.dtype)
        with as_source_error(info.path, info.dataset):
            source.expect_in_order(iter([whole]))
            source.read_into(whole, values)
        rule = decoding_of(values.dtype, info.packing, str(info))
        values = values if rule is None else rule.values(values)
    except (ConfigError, OSError, ValueError, RuntimeError) as error:
        if is_unread(error) or _is_refused(error):
            raise
        return None
    values.flags.writeable = False  # they are kept for all who ask
    return values
