"""What do the attributes of an HDF5 object say? None is read before its type was looked at.

HDF5's functions for dimension scales take attributes of any type for those that they write, and there are types that h5py
cannot read: both then read memory that is not theirs, and the process crashes. So `read` looks at type and size first, and
reads text and numbers only. `scales_of` and `axis_texts_of` do what HDF5's functions for dimension scales do. Nothing calls
these for a file that was not written here.
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

from shardload.formats.contract.array import json_value
from shardload.formats.hdf5.names import decoded
from shardload.formats.hdf5.opened import OpenDataset
from shardload.formats.labels import Note

_MOST_PLAIN_NBYTES = 1 << 16
_NUMBERS = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.ENUM)
_ERRORS = (KeyError, OSError, RuntimeError, TypeError, ValueError)


# What HDF5 and the netCDF library keep in attributes for themselves.
_HIDDEN = {"CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST", "DIMENSION_LABELS", "_NCProperties", "_nc3_strict"}


class UnreadableError(Exception):
    """An attribute is not read; the text says why."""


def names_of(owner: Any) -> list[str]:
    """The names of all attributes. Only they are looked at, not the attributes."""
    names: list[bytes] = []
    if h5py.h5a.get_num_attrs(owner.id):
        h5py.h5a.iterate(owner.id, names.append)
    return [decoded(name) for name in names]


def is_hidden(owner: h5py.Dataset | h5py.Group, key: str) -> bool:
    """True for an attribute that is no author's. HDF5 needs CLASS and NAME for dimension scales only; others have their own."""
    return key.startswith("_Netcdf4") or (key in _HIDDEN and (key not in ("CLASS", "NAME") or is_scale(owner)))


def author_s(owner: h5py.Dataset | h5py.Group, most_nbytes: int) -> dict[str, Any]:
    """All attributes but those that HDF5 and the netCDF library keep for themselves, as h5py gives them; a `Note` in the place
    of one that is not read.
    """
    found: dict[str, Any] = {}
    for key in names_of(owner):
        if not is_hidden(owner, key):
            try:
                found[key] = read(owner, key, most_nbytes)
            except UnreadableError as error:
                found[key] = Note(str(error))
    return found


def has(owner: Any, key: str) -> bool:
    """True if there is such an attribute: as ``key in owner.attrs``, in a third of the time."""
    return bool(h5py.h5a.exists(owner.id, key.encode()))


def is_plain(owner: Any, key: str) -> bool:
    """True if an attribute is numbers, or text of a fixed length."""
    kind = h5py.h5a.open(owner.id, key.encode()).get_type()
    return kind.get_class() in _NUMBERS or (kind.get_class() == h5py.h5t.STRING and not kind.is_variable_str())


def read(owner: Any, key: str, most_nbytes: int) -> Any:
    """An attribute as h5py gives it: text or numbers.

    Raises
    ------
    UnreadableError
        If it is something else, is longer, or is damaged.
    """
    try:
        found = h5py.h5a.open(owner.id, key.encode())  # UnicodeError, a ValueError, for a name that is not UTF-8
        kind = found.get_type()
        nbytes = found.get_space().get_simple_extent_npoints() * kind.get_size()
        if nbytes > most_nbytes:
            raise UnreadableError(f"{nbytes} bytes, not shown")
        if not _is_readable(kind):
            raise UnreadableError("neither text nor numbers")
        return owner.attrs[key]
    except _ERRORS as error:
        raise UnreadableError(f"unreadable ({error})") from None


def _is_readable(kind: Any) -> bool:
    """True for text, numbers, and small arrays of numbers."""
    while kind.get_class() == h5py.h5t.ARRAY:
        kind = kind.get_super()
        if kind.get_class() == h5py.h5t.STRING:
            return False
    if kind.get_class() in (h5py.h5t.COMPOUND, getattr(h5py.h5t, "COMPLEX", None)):
        return bool(kind.dtype.kind == "c")
    return kind.get_class() in (*_NUMBERS, h5py.h5t.STRING)


def scales_of(dataset: OpenDataset) -> tuple[list[list[tuple[str, Any]]], str]:
    """The dimension scales of each axis, in order: the full name of each, and the open dataset; and why there are none, or not
    all.

    A scale with several names has that in the dataset's group. What has none was deleted, although HDF5 may still open it.
    """
    none: list[Any] = [[] for _ in dataset.shape or ()]
    if not has(dataset, "DIMENSION_LIST"):
        return none, ""
    try:
        found = h5py.h5a.open(dataset.id, b"DIMENSION_LIST")
        kind = found.get_type()
        is_list = kind.get_class() == h5py.h5t.VLEN and kind.get_super().equal(h5py.h5t.STD_REF_OBJ)
        if not is_list or found.shape != (len(none),):
            return none, "DIMENSION_LIST is of another type than HDF5's dimension scales have"
        told = [list(references) for references in dataset.attrs["DIMENSION_LIST"]]
    except _ERRORS as error:
        return none, f"DIMENSION_LIST is unreadable ({error})"
    each = [[_scale(dataset, reference) for reference in references] for references in told]
    gone = [axis for axis, scales in enumerate(each) if None in scales]
    there = [[scale for scale in scales if scale is not None] for scales in each]
    return there, f"the dimension scales of axes {gone} are not in the file" if gone else ""


def _scale(dataset: OpenDataset, reference: h5py.Reference) -> tuple[str, Any] | None:
    """What a reference leads to, if that is a dimension scale with a name."""
    try:
        found = h5py.h5r.dereference(reference, dataset.id) if reference else None
        if not isinstance(found, h5py.h5d.DatasetID) or not is_scale(h5py.Dataset(found)):
            return None
        names = dataset.facts.places.get(int(h5py.h5o.get_info(found).addr), ())
    except _ERRORS:
        return None
    above = str(dataset.name or "").rpartition("/")[0]
    nearest = sorted(names, key=lambda name: name.rpartition("/")[0] != above)[:1]
    return (nearest[0], h5py.Dataset(found)) if nearest else None


def is_scale(dataset: h5py.Dataset) -> bool:
    """True for a dimension scale, as for HDF5: by a text of fixed length."""
    return bool(plain(dataset, "CLASS") == "DIMENSION_SCALE")


def plain(owner: Any, key: str) -> Any:
    """An attribute that is numbers, or text of a fixed length, as plain Python; None if there is no such one."""
    if not has(owner, key) or not is_plain(owner, key):
        return None
    try:
        value = read(owner, key, _MOST_PLAIN_NBYTES)
    except UnreadableError:
        return None
    return None if isinstance(value, h5py.Empty) else json_value(value)


def axis_texts_of(dataset: h5py.Dataset) -> tuple[list[str], str]:
    """The label of each axis of a dataset, empty for an axis without one; and why they are not read."""
    none = [""] * len(dataset.shape or ())
    if not has(dataset, "DIMENSION_LABELS"):
        return none, ""
    try:
        texts = read(dataset, "DIMENSION_LABELS", _MOST_PLAIN_NBYTES)
    except UnreadableError as error:
        return none, f"DIMENSION_LABELS is {error}"
    if not isinstance(texts, np.ndarray) or texts.shape != (len(none),) or texts.dtype.kind not in "SO":
        return none, "DIMENSION_LABELS is not a text for each axis"
    return list(map(decoded, texts)), ""
