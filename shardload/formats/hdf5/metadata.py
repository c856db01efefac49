"""What is known about an HDF5 dataset without reading its values?

`describe` turns its metadata into an `ArrayInfo`. It also decides what cannot be loaded, and why, so that the reading code need
not.
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

from shardload.formats.contract.array import MOST_KEPT, NOTHING, TOLD, ArrayInfo, json_value
from shardload.formats.contract.dtypes import native_dtype, refusal, unaddressable
from shardload.formats.hdf5.attributes import (
    UnreadableError,
    author_s,
    axis_texts_of,
    has,
    is_plain,
    is_scale,
    names_of,
    plain,
    read,
    scales_of,
)
from shardload.formats.hdf5.filters import name_of, refuse_filters
from shardload.formats.hdf5.links import Others
from shardload.formats.hdf5.opened import OpenDataset
from shardload.formats.hdf5.raw_file import type_of_values
from shardload.formats.labels import Coordinate, Labels, Note, names_in
from shardload.values.decoding import ATTRIBUTES, TEXTS, Packing, typed

_HELPERS = (2, 3)  # filters that rearrange or check bytes; listed after the filter that compresses

_REFUSED_CLASSES = {
    h5py.h5t.TIME: ("time", "HDF5 times, a type without a portable meaning"),
    h5py.h5t.STRING: ("string", "strings"),
    h5py.h5t.OPAQUE: ("opaque", "opaque bytes (dates that NumPy wrote, for instance)"),
    h5py.h5t.REFERENCE: ("reference", "references to other objects"),
    h5py.h5t.VLEN: ("vlen", "lists of variable length as elements"),
}
_SMALL_IN_MANY = "small arrays as elements, in a virtual dataset"
_MOST_ATTRIBUTE_NBYTES = 1 << 16
_IN_HEADER = 8  # attributes: more may lie in a heap, and for a list of their names HDF5 reads them whole
_READ = tuple(dict.fromkeys((*TOLD, *ATTRIBUTES)))


def describe(dataset: OpenDataset, path: str, name: str, others: Others, in_full: bool = False) -> ArrayInfo:
    """Describe a dataset without reading its values.

    Parameters
    ----------
    dataset : OpenDataset
        The dataset.
    path, name : str
        File and dataset as the user named them.
    others : Others
        The other files that hold its values.
    in_full : bool
        True for what a load does not need. Bytes of the stored chunks: HDF5 goes through the index of all of them for that (in
        a store it would take a request for each node: they are not counted there).
        Attributes of variable length: they are in the file's global heap, and if that is damaged, HDF5 2.0.0 loops for ever
        (docs/trust-files.md); of these a load needs but the two short texts that change what integers mean (`decoding.TEXTS`).
    """
    creation, filters, access = dataset.creation, dataset.stored_filters, others.access
    number, inner = dataset.element
    dtype, refused = _type_of(number)
    if inner and refused is not None:
        dtype, refused = "array", f"small arrays as elements, of {refused}"
    is_virtual = creation.get_layout() == h5py.h5d.VIRTUAL
    if dataset.shape is None:
        dtype, refused = NOTHING, "no values: its dataspace is null, which is neither an array nor a number"
    elif refused is None:
        refused = _SMALL_IN_MANY if inner and is_virtual else None
        refused = refused or refuse_filters(dataset, access)
    chunks = tuple(creation.get_chunk()) if creation.get_layout() == h5py.h5d.CHUNKED else None
    if is_virtual and refused is None:  # HDF5 decodes the chunks of the datasets behind it, whole, however small a part is read
        chunks, filters = others.smallest_chunk(len(dataset.shape)), others.filters
    shape, chunks = (*(dataset.shape or ()), *inner), chunks and (*chunks, *inner)
    refused = refused or unaddressable(shape, chunks)
    attributes, packing = _attributes(dataset, in_full)
    is_coordinate = is_scale(dataset)
    return ArrayInfo(
        path=path,
        dataset=name,
        format="netCDF4" if dataset.facts.is_netcdf or has(dataset, "_Netcdf4Dimid") else "HDF5",
        shape=shape,
        dtype=dtype,
        chunks=chunks,
        codec=_codec(filters),
        nbytes_stored=None
        if is_virtual or (chunks and (not in_full or dataset.facts.is_in_store))
        else int(dataset.id.get_storage_size()),
        refused=refused,
        is_coordinate=is_coordinate,
        is_dimension=is_coordinate and _has_no_values(dataset),
        attributes=attributes,
        packing=packing,
    )


NO_NAMES = "names of axes"  # in the place of an attribute: why they are not known
NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
NON_COORDINATE = "_nc4_non_coord_"  # the netCDF library's prefix of a variable that has the name of a dimension


def stands_for_axis(dataset: h5py.Dataset) -> bool:
    """True for a netCDF dimension without a variable: a dataset that holds nothing."""
    return is_scale(dataset) and _has_no_values(dataset)


def _has_no_values(scale: h5py.Dataset) -> bool:
    return str(plain(scale, "NAME")).startswith(NO_VARIABLE)


def labels_of(dataset: OpenDataset, has_coords: bool = True) -> Labels:
    """The names of a dataset's axes (HDF5's dimension scales, and labels), its attributes, and where its coordinates are.

    Parameters
    ----------
    dataset : h5py.Dataset
        An open dataset.
    has_coords : bool
        False if its file is another one than that which the caller opens by name.
    """
    axes = axes_of(dataset)
    attrs = _author_s(dataset)
    coords, above = dict(axes.coords), str(dataset.name or "").rpartition("/")[0]
    for name in names_in(attrs.get("coordinates")):
        place = above
        while f"{place}/{name}" not in dataset.file and place:  # netCDF looks in the groups above, too
            place = place.rpartition("/")[0]
        coords[name.rpartition("/")[2]] = Coordinate(f"{place}/{name}" if not name.startswith("/") else name)
    return Labels(axes.dims, {**attrs, **axes.attrs}, coords if has_coords else {})


def group_attrs_of(dataset: h5py.Dataset) -> dict[str, Any]:
    """The attributes of the group that a dataset is in, as plain Python."""
    if not dataset.name:
        return {}
    return {key: value for key, value in _author_s(dataset.parent).items() if value is not None}


def _author_s(owner: h5py.Dataset | h5py.Group) -> dict[str, Any]:
    """The author's attributes as plain Python (`json_value`); None for an empty one, a note for one that is not read."""
    return {
        key: value if isinstance(value, Note) else None if isinstance(value, h5py.Empty) else json_value(value, MOST_KEPT)
        for key, value in author_s(owner, _MOST_ATTRIBUTE_NBYTES).items()
    }


def axes_of(dataset: OpenDataset) -> Labels:
    """Of `labels_of`, the names of the axes and their coordinates.

    Of attributes it has notes only: which names of axes cannot be read, and why.
    """
    dims: list[str | None] = [None] * len(dataset.shape or ())
    inner = (None,) * len(dataset.element[1])
    coords: dict[str, Coordinate] = {}
    if is_scale(dataset):
        last = str(dataset.name or "").rpartition("/")[2]  # in netCDF, one of several axes is the scale of its first one
        notes = {NO_NAMES: Note("all but the first, of a dimension scale of several axes")} if len(dims) > 1 else {}
        return Labels((*[last][: len(dims)], *dims[1:], *inner), notes)
    texts, no_texts = axis_texts_of(dataset)
    scales, no_scales = scales_of(dataset)
    for axis, (text, of_axis) in enumerate(zip(texts, scales, strict=True)):
        dims[axis] = _axis_name(dataset, text, *of_axis[0], coords) if of_axis else text or None
    whys = "; ".join(filter(None, (no_texts, no_scales)))
    notes = {NO_NAMES: Note(whys)} if whys else {}
    return Labels((*dims, *inner), notes, coords)


def _axis_name(dataset: OpenDataset, text: str, full: str, scale: h5py.Dataset, coords: dict[str, Coordinate]) -> str:
    """The name of an axis, of which `text` is the label, and `full` the name of the scale; its coordinate is added to `coords`.

    A scale without values may have another name than the axis, if something else has that name: then the label is right.
    """
    top, _, name = full.rpartition("/")
    has_values = not _has_no_values(scale)
    if text and not has_values:
        name = text
    nearer = _nearer(dataset, name, scale, top)
    if nearer or has_values:
        coords[name] = Coordinate(nearer or full)
    return name


def _nearer(dataset: OpenDataset, name: str, scale: h5py.Dataset, top: str) -> str | None:
    """The coordinate of an axis that is nearer to a dataset than the axis, whose scale is in the group `top`: in the dataset's
    group, or one between. None if there is none.

    In netCDF the variables of a group may lie along an axis of a group above, and have a coordinate of their own.
    """
    above = str(dataset.name or "").rpartition("/")[0]
    while above != top and above.startswith(f"{top}/"):
        if isinstance(dataset.file.get(f"{above}/{name}", getlink=True), h5py.HardLink):
            found = dataset.file[f"{above}/{name}"]
            is_along = isinstance(found, h5py.Dataset) and found.ndim == 1
            its = scales_of(dataset.facts.dataset(found.id))[0] if is_along else [[]]
            if its[0] and its[0][0][1] == scale:
                return f"{above}/{name}"
        above = above.rpartition("/")[0]
    return None


def _type_of(kind: Any) -> tuple[str, str | None]:
    """Name of the values' type, and why it is refused (or None). Bit fields are unsigned integers, as h5py reads them."""
    if kind.get_class() in _REFUSED_CLASSES:
        return _REFUSED_CLASSES[kind.get_class()]
    try:
        dtype = type_of_values(kind)
    except (TypeError, ValueError) as error:  # 3-byte integers, quadruple precision, half precision complex numbers
        return f"{8 * kind.get_size()}-bit number", f"numbers of a type that NumPy does not have ({error})"
    refused = refusal(dtype)
    if kind.get_class() == h5py.h5t.COMPOUND and refused is not None:
        return "compound", refused
    return (dtype.name if refused else native_dtype(dtype).name), refused


def _codec(filters: list[tuple[int, int, Any, bytes]]) -> str:
    """The filter pipeline for people: compressors first, then shuffle and checksum."""
    ordered = sorted(filters, key=lambda f: f[0] in _HELPERS)
    return "+".join(name_of(number, label) for number, _, _, label in ordered) or "none"


def _attributes(dataset: h5py.Dataset, texts: bool) -> tuple[dict[str, Any], Packing]:
    """The attributes that change what values mean, for people and for decoding. No other is read."""
    told: dict[str, Any] = {}
    packing: dict[str, Any] = {}
    is_few = h5py.h5a.get_num_attrs(dataset.id) <= _IN_HEADER
    here = names_of(dataset) if is_few else [key for key in _READ if has(dataset, key)]
    for key in _READ:
        if key not in here:
            continue
        if not (texts or key in TEXTS or is_plain(dataset, key)):
            if key in ATTRIBUTES:
                packing[key] = ["unreadable", ["text, or another type that is no number"]]
            continue
        why, value = "", None
        try:
            value = read(dataset, key, _MOST_ATTRIBUTE_NBYTES)
        except UnreadableError as error:
            why = str(error)
        if isinstance(value, h5py.Empty):  # so the netCDF library stores a list of no numbers
            value = np.zeros(0, value.dtype) if value.dtype.kind in "iuf" else None
        if key in TOLD:
            told[key] = why or json_value(value)
        if key in ATTRIBUTES and (why or value is not None):
            packing[key] = ["unreadable", [why]] if why else typed(value)
    return told, packing
