"""What must be known of an HDF5 dataset to make another one like it? Its filters with their options, its attributes as typed.

`metadata` reads attributes for people and for decoding, as plain Python. A copy must not change their types: a float32 that
became a float64 would be another number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import h5py
import numpy as np

from shardload.formats.codecs.table import HDF5_CODECS
from shardload.formats.codecs.words import compression_told
from shardload.formats.contract.array import Properties
from shardload.formats.contract.dtypes import dtype_text, native_dtype, refusal
from shardload.formats.hdf5.attributes import author_s, axis_texts_of, is_hidden, is_scale, names_of, plain, scales_of
from shardload.formats.hdf5.filters import LOSSY, NAMES, parameters_of
from shardload.formats.hdf5.metadata import NO_NAMES, NON_COORDINATE, labels_of, stands_for_axis
from shardload.formats.hdf5.names import encoded, names_below
from shardload.formats.hdf5.opened import OpenDataset
from shardload.formats.hdf5.raw_file import type_of_values
from shardload.formats.labels import Note

_MOST_NBYTES = 1 << 20  # of one attribute, or the values of an array of text
_OF_TEXT = {1, 2, 3}  # filters that HDF5 has itself
_ARGUMENTS = {6: slice(0, 2), 4: slice(0, 2), 32008: slice(3, None), 5: slice(0, 0), 32000: slice(0, 0)}  # the caller's own


def properties_of(dataset: OpenDataset, filters: list[tuple[int, int, Any, bytes]] | None = None) -> Properties:
    """The properties of an open dataset. `filters` are those of the datasets behind a virtual one."""
    creation, labels = dataset.creation, labels_of(dataset)
    attrs, unread = _attributes(dataset, str(dataset.name))
    if isinstance(why := labels.attrs.get(NO_NAMES), Note):
        unread.append(f"what axes of '{dataset.name}' are called ({why})")
    kind, inner = dataset.element  # whose axes, of small arrays as elements, have neither scales nor labels
    number = kind.dtype
    if h5py.check_enum_dtype(number) is not None:
        unread.append(f"what the numbers of '{dataset.name}' stand for (an enumeration)")
    dtype = type_of_values(kind)
    dtype = dtype if refusal(dtype) is not None else np.dtype(dtype_text(dtype))
    compression, checksum = _compression(dataset.stored_filters if filters is None else filters, dtype.kind)
    fill, last = None, str(dataset.name or "").rpartition("/")[2]
    if creation.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED and refusal(number) is None:
        value = np.zeros((), native_dtype(number))
        try:
            creation.get_fill_value(value)
            fill = value.astype(native_dtype(dtype))[()]
        except (OSError, TypeError) as error:  # HDF5 does not convert that of bit fields, and of small arrays
            unread.append(f"the fill value of '{dataset.name}' ({error})")
    scales = tuple(tuple(name for name, scale in of_axis if not stands_for_axis(scale)) for of_axis in scales_of(dataset)[0])
    if "_FillValue" in attrs:
        value = np.asarray(attrs["_FillValue"])
        attrs["_FillValue"] = value.reshape(-1)[0] if value.size == 1 else attrs["_FillValue"]
    found = Properties.of(
        labels,
        dtype,
        attrs,
        compression=compression,
        checksum=checksum,
        fill_value=fill,
        unlimited=tuple(k for k, n in enumerate(dataset.maxshape or ()) if n is None),
        is_dimension=stands_for_axis(dataset),
        unread=tuple(unread),
        stored_name=last if last.startswith(NON_COORDINATE) else None,
        texts=_texts(dataset),
        scales=(*scales, *[()] * len(inner)),
        axis_labels=(*axis_texts_of(dataset)[0], *[""] * len(inner)),
        scale_name=plain(dataset, "NAME") if is_scale(dataset) else None,
    )
    return replace(found, coordinates=tuple(dict.fromkeys([*found.coordinates, *(one for axis in scales for one in axis)])))


def _texts(dataset: OpenDataset) -> np.ndarray[Any, Any] | None:
    """The values of a short array of text; None for another one. HDF5 finds them in this file, and needs no plugin."""
    kind, creation = dataset.kind, dataset.creation
    if kind.get_class() != h5py.h5t.STRING or dataset.shape is None:
        return None
    n = max(dataset.size, math.prod(dataset.chunks or ()))
    is_here = creation.get_layout() != h5py.h5d.VIRTUAL and not creation.get_external_count()
    if not is_here or n * kind.get_size() > _MOST_NBYTES or not {number for number, *_ in dataset.stored_filters} <= _OF_TEXT:
        return None
    found = np.empty(dataset.shape, dataset.dtype)  # whose metadata say how text is encoded
    if found.size:
        dataset.read_direct(found)
    return found


def groups_of(file: h5py.File) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The attributes of all groups of a file; and what could not be read."""
    attrs, unread = _attributes(file["/"], "/")
    found = {"/": attrs}
    names, lost = names_below(file["/"])
    for name in names:
        try:
            thing = file[encoded(name)]
        except (KeyError, OSError, RuntimeError, ValueError) as error:
            lost[name] = str(error)
            continue
        if isinstance(thing, h5py.Group):
            found[f"/{name}"], more = _attributes(thing, f"/{name}")
            unread += more
        elif isinstance(thing, h5py.Datatype):
            unread.append(f"the named type '/{name}'")
    unread += [f"what is in '/{name}' ({why})" for name, why in lost.items()]
    return found, unread


def attribute_names(group: h5py.Group) -> list[str]:
    """The names of the author's attributes of a group."""
    return [key for key in names_of(group) if not is_hidden(group, key)]


def _attributes(owner: Any, name: str) -> tuple[dict[str, Any], list[str]]:
    """The author's attributes as h5py gives them; and what could not be read."""
    try:
        attrs = author_s(owner, _MOST_NBYTES)
    except (OSError, RuntimeError) as error:
        return {}, [f"what attributes '{name}' has ({error})"]
    unread = [f"attribute {key!r} of '{name}' ({value})" for key, value in attrs.items() if isinstance(value, Note)]
    attrs = {key: value for key, value in attrs.items() if not isinstance(value, Note)}
    for key, value in attrs.items():
        kind = h5py.h5a.open(owner.id, key.encode()).get_type()
        if isinstance(value, bytes) and kind.get_cset() == h5py.h5t.CSET_UTF8:  # h5py writes bytes as ASCII
            attrs[key] = np.array(value, kind.dtype)
        if h5py.check_enum_dtype(kind.dtype) is not None:
            unread.append(f"what the numbers of attribute {key!r} of '{name}' stand for (an enumeration)")
    return attrs, unread


def _compression(filters: list[tuple[int, int, Any, bytes]], kind: str) -> tuple[dict[str, Any] | str | None, bool]:
    """The compression of values of this kind, as in `Properties`, and whether there is a checksum."""
    numbers = {number for number, *_ in filters}
    rest = [(number, tuple(int(v) for v in values)) for number, _, values, _ in filters if number not in (2, 3)]
    names = [NAMES.get(number, str(number)) for number, _ in rest]
    why = _changing(*rest[0], kind) if len(rest) == 1 else ""
    return why or compression_told(names, 2 in numbers, lambda: _options(*rest[0])), 3 in numbers


def _changing(number: int, values: tuple[int, ...], kind: str) -> str:
    """Why a filter is not used for a copy of what it has encoded, in words that follow the array's name; empty if it is.

    The values that a lossy filter gives are not those that it was given, also if it has been used on them before: what is
    rounded to the least value of a chunk is rounded to another one in chunks of another shape.
    """
    if number in LOSSY or (number == 6 and kind == "f"):
        return f"is encoded by {NAMES[number]}, which could change the values once more"
    if number not in NAMES:
        return f"is encoded by HDF5 filter {number}, of which is not known whether it changes values"
    return ""


def _options(number: int, values: tuple[int, ...]) -> dict[str, Any]:
    """Level, shuffle inside of the filter, and what else it was told."""
    codec, told = HDF5_CODECS.get(number), parameters_of(number, values)
    if codec is not None and told is not None:
        return codec.told(told)
    if number == 32004 and values in ((), (0,)):
        return {}
    if number == 6:  # of integers: as many bits as a chunk needs, for none is to be lost
        return {"options": {"cd_values": (values[0], 0)}}
    own = values[_ARGUMENTS.get(number, slice(None))]
    return {"options": {"cd_values": own} if own else {}}
