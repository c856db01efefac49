"""What is known of an HDF5 dataset without reading its values?

1. `describe` turns its metadata into an `ArrayInfo`. It also decides what cannot be loaded, and why, so that the reading code
   need not.
2. `labels_of` has the names of its axes and its attributes, for people and for decoding, as plain Python.
3. `properties_of` has what another dataset like it needs: its filters with their options, its attributes as typed. A copy must
   not change their types: a float32 that became a float64 would be another number.

No attribute is read before its type was looked at. HDF5's functions for dimension scales take attributes of any type for those
that they write, and there are types that h5py cannot read: both then read memory that is not theirs, and the process crashes.
So `read_attribute` looks at type and size first, and reads text and numbers only. `scales_of` and `axis_texts_of` do what
HDF5's functions for dimension scales do. Nothing calls these for a file that was not written here.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import h5py
import numpy as np

from shardload.formats.codecs.table import compression_keywords
from shardload.formats.contract.array import (
    MOST_KEPT,
    NOTHING,
    TOLD,
    ArrayInfo,
    Coordinate,
    Labels,
    Note,
    Properties,
    dtype_text,
    json_value,
    names_in,
    native_dtype,
    refusal,
    unaddressable,
)
from shardload.formats.hdf5.filters import (
    CHECKSUM,
    GZIP,
    HELPERS,
    SHUFFLE,
    Filters,
    changes_values,
    codec_text,
    filter_of,
    parameters_of,
    refuse_filters,
)
from shardload.formats.hdf5.links import OtherFiles
from shardload.formats.hdf5.opened import HDF5_ERRORS, OpenDataset, address_of, decoded, encoded, names_below, type_of_values
from shardload.system.steps import step_done
from shardload.values.decoding import ATTRIBUTES, TEXTS, Packing, typed

NO_NAMES = "names of axes"  # in the place of an attribute: why they are not known
NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
NON_COORDINATE = "_nc4_non_coord_"  # the netCDF library's prefix of a variable that has the name of a dimension

_NUMBERS = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.ENUM)
_ERRORS = (TypeError, *HDF5_ERRORS)
# Attributes that HDF5 and the netCDF library write for themselves.
_HIDDEN = {"CLASS", "NAME", "REFERENCE_LIST", "DIMENSION_LIST", "DIMENSION_LABELS", "_NCProperties", "_nc3_strict"}
_MOST_ATTRIBUTE_NBYTES = 1 << 16
_MOST_NBYTES = 1 << 20  # of one attribute, or the values of an array of text, in a copy

_OF_TEXT = {GZIP, SHUFFLE, CHECKSUM}  # filters of text: HDF5 has them itself
_REFUSED_CLASSES = {
    h5py.h5t.TIME: ("time", "HDF5 times, a type without a portable meaning"),
    h5py.h5t.STRING: ("string", "strings"),
    h5py.h5t.OPAQUE: ("opaque", "opaque bytes (dates that NumPy wrote, for instance)"),
    h5py.h5t.REFERENCE: ("reference", "references to other objects"),
    h5py.h5t.VLEN: ("vlen", "lists of variable length as elements"),
    h5py.h5t.ARRAY: ("array", "small arrays as elements"),
}


P = ParamSpec("P")
T = TypeVar("T")


def asked_once(question: Callable[P, T]) -> Callable[P, T]:
    """A question about a dataset, of which an `OpenDataset` keeps the answer: it is asked again and again (is it a scale?)."""

    @functools.wraps(question)
    def ask(*args: P.args, **kwargs: P.kwargs) -> T:
        dataset, key = args[0], (question, *args[1:])
        answers = dataset.answers if isinstance(dataset, OpenDataset) else {}
        if key not in answers:
            answers[key] = question(*args, **kwargs)
        return answers[key]  # type: ignore[no-any-return]

    return ask


def author_attributes(owner: h5py.Dataset | h5py.Group, most_nbytes: int) -> dict[str, Any]:
    """The author's attributes as h5py gives them; a `Note` in the place of one that is not read. CLASS and NAME are the
    library's in dimension scales only.
    """
    hidden, names = _HIDDEN if is_scale(owner) else _HIDDEN - {"CLASS", "NAME"}, list[bytes]()
    if h5py.h5a.get_num_attrs(owner.id):
        h5py.h5a.iterate(owner.id, names.append)
    keys = [key for key in map(decoded, names) if key not in hidden and not key.startswith("_Netcdf4")]
    return {key: read_attribute(owner, key, most_nbytes) for key in keys}


def has_attribute(owner: Any, key: str) -> bool:
    """True if there is such an attribute. ``key in owner.attrs`` takes three times as long."""
    return bool(h5py.h5a.exists(owner.id, key.encode()))


def is_plain(owner: Any, key: str) -> bool:
    """True if an attribute is numbers, or text of a fixed length."""
    kind = h5py.h5a.open(owner.id, key.encode()).get_type()
    return kind.get_class() in _NUMBERS or (kind.get_class() == h5py.h5t.STRING and not kind.is_variable_str())


def read_attribute(owner: Any, key: str, most_nbytes: int) -> Any:
    """An attribute as h5py gives it: text or numbers. If it is something else, longer, or damaged, a `Note` that says so."""
    try:
        attribute = h5py.h5a.open(owner.id, key.encode())  # UnicodeError, a ValueError, for a name that is not UTF-8
        kind = attribute.get_type()
        nbytes = attribute.get_space().get_simple_extent_npoints() * kind.get_size()
        if nbytes > most_nbytes:
            return Note(f"{nbytes} bytes, not shown")
        if not _is_readable(kind):
            return Note("neither text nor numbers")
        return owner.attrs[key]
    except _ERRORS as error:
        return Note(f"unreadable ({error})")


def _is_readable(kind: Any) -> bool:
    """True for text, numbers, and small arrays of numbers."""
    while kind.get_class() == h5py.h5t.ARRAY:
        kind = kind.get_super()
        if kind.get_class() == h5py.h5t.STRING:
            return False
    if kind.get_class() in (h5py.h5t.COMPOUND, getattr(h5py.h5t, "COMPLEX", None)):
        return bool(kind.dtype.kind == "c")
    return kind.get_class() in (*_NUMBERS, h5py.h5t.STRING)


@asked_once
def scales_of(dataset: OpenDataset) -> tuple[list[list[tuple[str, OpenDataset]]], str]:
    """The dimension scales of each axis, in order: the full name of each, and the open dataset; and why there are none, or not
    all.

    Of a scale with several names, that in the dataset's group is taken. One without a name was deleted, although HDF5 may still
    open it.
    """
    none: list[Any] = [[] for _ in dataset.shape or ()]
    if not has_attribute(dataset, "DIMENSION_LIST"):
        return none, ""
    try:
        attribute = h5py.h5a.open(dataset.id, b"DIMENSION_LIST")
        kind = attribute.get_type()
        is_list = kind.get_class() == h5py.h5t.VLEN and kind.get_super().equal(h5py.h5t.STD_REF_OBJ)
        if not is_list or attribute.shape != (len(none),):
            return none, "DIMENSION_LIST is of another type than HDF5's dimension scales have"
        references = [list(of_axis) for of_axis in dataset.attrs["DIMENSION_LIST"]]
    except _ERRORS as error:
        return none, f"DIMENSION_LIST is unreadable ({error})"
    targets = [[_scale(dataset, reference) for reference in of_axis] for of_axis in references]
    gone = [axis for axis, scales in enumerate(targets) if None in scales]
    scales_of_axes = [[scale for scale in scales if scale is not None] for scales in targets]
    return scales_of_axes, f"the dimension scales of axes {gone} are not in the file" if gone else ""


def _scale(dataset: OpenDataset, reference: h5py.Reference) -> tuple[str, OpenDataset] | None:
    """What a reference leads to, if that is a dimension scale with a name."""
    try:
        scale = h5py.h5r.dereference(reference, dataset.id) if reference else None
        if not isinstance(scale, h5py.h5d.DatasetID):
            return None
        key = address, above = address_of(scale), str(dataset.name or "").rpartition("/")[0]
        scales = dataset.facts.scales
        if key not in scales:
            scales[key] = _named_scale(dataset.facts.dataset(scale), address, above)
        return scales[key]
    except _ERRORS:
        return None


def _named_scale(scale: OpenDataset, address: int, above: str) -> tuple[str, OpenDataset] | None:
    """A dimension scale with its name; None for another dataset, and for one without a name."""
    if not is_scale(scale):
        return None
    names = scale.facts.names_of(address, above, str(plain_attribute(scale, "NAME")))
    nearest = sorted(names, key=lambda name: name.rpartition("/")[0] != above)[:1]
    return (nearest[0], scale) if nearest else None


def is_scale(dataset: h5py.Dataset) -> bool:
    """True for a dimension scale, as for HDF5: by a text of fixed length."""
    return bool(plain_attribute(dataset, "CLASS") == "DIMENSION_SCALE")


@asked_once
def plain_attribute(owner: Any, key: str) -> Any:
    """An attribute that is numbers, or text of a fixed length, as plain Python; None if there is no such one."""
    if not has_attribute(owner, key) or not is_plain(owner, key):
        return None
    value = read_attribute(owner, key, _MOST_ATTRIBUTE_NBYTES)
    return None if isinstance(value, h5py.Empty | Note) else json_value(value)


@asked_once
def axis_texts_of(dataset: OpenDataset) -> tuple[list[str], str]:
    """The label of each axis of a dataset, empty for an axis without one; and why labels are not read, if they are not."""
    none = [""] * len(dataset.shape or ())
    if not has_attribute(dataset, "DIMENSION_LABELS"):
        return none, ""
    texts = read_attribute(dataset, "DIMENSION_LABELS", _MOST_ATTRIBUTE_NBYTES)
    if isinstance(texts, Note):
        return none, f"DIMENSION_LABELS is {texts}"
    if not isinstance(texts, np.ndarray) or texts.shape != (len(none),) or texts.dtype.kind not in "SO":
        return none, "DIMENSION_LABELS is not a text for each axis"
    return list(map(decoded, texts)), ""


def describe(dataset: OpenDataset, path: str, name: str, others: OtherFiles, in_full: bool = False) -> ArrayInfo:
    """Describe a dataset without reading its values.

    Parameters
    ----------
    dataset : OpenDataset
        The dataset.
    path, name : str
        File and dataset as the user named them.
    others : OtherFiles
        The other files that hold its values.
    in_full : bool
        True for what a load does not need. The bytes of the stored chunks: HDF5 goes through the index of all chunks for that.
        (In a store this would take a request for each node; they are not counted there.) And attributes of variable length:
        they are in the file's global heap, and if that is damaged, HDF5 2.0.0 loops for ever (docs/trust-files.md). Of these a
        load needs only the two short texts that change what integers mean (`decoding.TEXTS`).
    """
    step_done()
    creation, filters, access = dataset.creation, dataset.stored_filters, others.access
    dtype, refused = _type_of(dataset.kind)
    is_virtual = creation.get_layout() == h5py.h5d.VIRTUAL
    if dataset.shape is None:
        dtype, refused = NOTHING, "no values: its dataspace is null, which is neither an array nor a number"
    elif refused is None:
        refused = refuse_filters(dataset, access)
    chunks = tuple(creation.get_chunk()) if creation.get_layout() == h5py.h5d.CHUNKED else None
    if is_virtual and refused is None:  # HDF5 decodes chunks of its parts, and whole ones, however little is read
        chunks, filters = others.smallest_chunk(len(dataset.shape)), others.filters
    shape = dataset.shape or ()
    refused = refused or unaddressable(shape, chunks)
    attributes, packing = _meaning(dataset, in_full)
    is_counted = not is_virtual and (not chunks or (in_full and not dataset.facts.is_in_store))
    return ArrayInfo(
        path=path,
        dataset=name,
        format="netCDF4" if dataset.facts.is_netcdf or has_attribute(dataset, "_Netcdf4Dimid") else "HDF5",
        shape=shape,
        dtype=dtype,
        chunks=chunks,
        codec=codec_text(filters),
        nbytes_stored=int(dataset.id.get_storage_size()) if is_counted else None,
        refused=refused,
        is_coordinate=is_scale(dataset),
        is_dimension=stands_for_axis(dataset),
        attributes=attributes,
        packing=packing,
    )


def stands_for_axis(dataset: h5py.Dataset) -> bool:
    """True for a netCDF dimension without a variable: a dataset that holds nothing."""
    return is_scale(dataset) and str(plain_attribute(dataset, "NAME")).startswith(NO_VARIABLE)


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
    attrs = _plain_attributes(dataset)
    coords, above = dict(axes.coords), str(dataset.name or "").rpartition("/")[0]
    for name in names_in(attrs.get("coordinates")):
        place, first = above, name.partition("/")[0]  # what follows may lead to another file, which HDF5 would open
        while f"{place}/{first}" not in dataset.file and place:  # netCDF looks in the groups above, too
            place = place.rpartition("/")[0]
        coords[name.rpartition("/")[2]] = Coordinate(f"{place}/{name}" if not name.startswith("/") else name)
    return Labels(axes.dims, {**attrs, **axes.attrs}, coords if has_coords else {})


def group_attrs_of(dataset: h5py.Dataset) -> dict[str, Any]:
    """The attributes of the group that a dataset is in, as plain Python."""
    if not dataset.name:
        return {}
    return {key: value for key, value in _plain_attributes(dataset.parent).items() if value is not None}


def _plain_attributes(owner: h5py.Dataset | h5py.Group) -> dict[str, Any]:
    """The author's attributes as plain Python (`json_value`); None for an empty one, a note for one that is not read."""
    return {
        key: value if isinstance(value, Note) else None if isinstance(value, h5py.Empty) else json_value(value, MOST_KEPT)
        for key, value in author_attributes(owner, _MOST_ATTRIBUTE_NBYTES).items()
    }


def axes_of(dataset: OpenDataset) -> Labels:
    """Of `labels_of`, the names of the axes and their coordinates.

    Of attributes it has notes only: which names of axes cannot be read, and why.
    """
    dims: list[str | None] = [None] * len(dataset.shape or ())
    coords: dict[str, Coordinate] = {}
    if is_scale(dataset):
        last = str(dataset.name or "").rpartition("/")[2]  # in netCDF, one of several axes is the scale of its first one
        others = dimensions_by_number(dataset)[1:]
        for axis, full in enumerate(others, 1):
            dims[axis] = dim = full.rpartition("/")[2]
            if not stands_for_axis(dataset.file[encoded(full)]):
                coords[dim] = Coordinate(full)
        is_known = len(others) + 1 >= len(dims)
        notes = {} if is_known else {NO_NAMES: Note("all but the first, of a dimension scale of several axes")}
        return Labels((*[last][: len(dims)], *dims[1:]), notes, coords)
    texts, no_texts = axis_texts_of(dataset)
    scales, no_scales = scales_of(dataset)
    for axis, (text, of_axis) in enumerate(zip(texts, scales, strict=True)):
        dims[axis] = _name_by_scale(dataset, *of_axis[0], coords) if of_axis else text or None
    why = "; ".join(filter(None, (no_texts, no_scales)))
    notes = {NO_NAMES: Note(why)} if why else {}
    return Labels(tuple(dims), notes, coords)


def dimensions_by_number(dataset: OpenDataset) -> list[str]:
    """The full names of the scales of all axes of a dimension scale of several axes, to which HDF5 attaches no scale: the
    netCDF library numbers its dimensions, and notes the numbers. Empty if there are none, or a scale is not there.
    """
    numbers = plain_attribute(dataset, "_Netcdf4Coordinates")
    if dataset.ndim < 2 or not isinstance(numbers, list) or len(numbers) != dataset.ndim:
        return []
    names, above = {}, str(dataset.name or "").rpartition("/")[0]
    for name in sorted(itertools.chain(*dataset.facts.places.values()), key=lambda name: name.count("/")):
        if f"{above}/".startswith(f"{name.rpartition('/')[0]}/"):  # in its group, or in one above
            member = dataset.file[encoded(name)]
            if isinstance(member, h5py.Dataset) and is_scale(member):
                names[plain_attribute(member, "_Netcdf4Dimid")] = name
    return [names[number] for number in numbers] if names.keys() >= set(numbers) else []


def _name_by_scale(dataset: OpenDataset, full: str, scale: h5py.Dataset, coords: dict[str, Coordinate]) -> str:
    """The name of an axis with a scale of the name `full`. Its coordinate is added to `coords`.

    A label does not count beside a scale: xarray keeps labels as an attribute, in their order, also if it transposes the array.
    """
    top, _, name = full.rpartition("/")
    nearer = _nearer(dataset, name, scale, top)
    if nearer or not stands_for_axis(scale):
        coords[name] = Coordinate(nearer or full)
    return name


def _nearer(dataset: OpenDataset, name: str, scale: h5py.Dataset, top: str) -> str | None:
    """The coordinate of an axis that is nearer to the dataset than the axis's scale, which is in the group `top`: in the
    dataset's group, or one between. None if there is none.

    In netCDF the variables of a group may lie along an axis of a group above, and have a coordinate of their own.
    """
    above = str(dataset.name or "").rpartition("/")[0]
    while above != top and above.startswith(f"{top}/"):
        if isinstance(dataset.file.get(f"{above}/{name}", getlink=True), h5py.HardLink):
            candidate = dataset.file[f"{above}/{name}"]
            is_along = isinstance(candidate, h5py.Dataset) and candidate.ndim == 1
            scales = scales_of(dataset.facts.dataset(candidate.id))[0][0] if is_along else []
            if scales and scales[0][1] == scale:
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


def _meaning(dataset: h5py.Dataset, texts: bool) -> tuple[dict[str, Any], Packing]:
    """The attributes of `TOLD`, for people and for decoding. No other is read."""
    shown: dict[str, Any] = {}
    packing: dict[str, Any] = {}
    for key in TOLD if h5py.h5a.get_num_attrs(dataset.id) else ():
        if not has_attribute(dataset, key):
            continue
        if not (texts or is_plain(dataset, key) or (key in TEXTS and _is_one(dataset, key))):
            if key in ATTRIBUTES:
                packing[key] = ["unreadable", ["text, or another type that is no number"]]
            continue
        value = read_attribute(dataset, key, _MOST_ATTRIBUTE_NBYTES)
        if isinstance(value, h5py.Empty):  # so the netCDF library stores a list of no numbers
            value = np.zeros(0, value.dtype) if value.dtype.kind in "iuf" else None
        why = str(value) if isinstance(value, Note) else ""
        shown[key] = why or json_value(value)
        if key in ATTRIBUTES and value is not None:
            packing[key] = ["unreadable", [why]] if why else typed(value)
    return shown, packing


def _is_one(owner: Any, key: str) -> bool:
    """True if an attribute has one value at most: many texts may be one long text in the file, and are many in memory."""
    return int(h5py.h5a.open(owner.id, key.encode()).get_space().get_simple_extent_npoints()) <= 1


def properties_of(dataset: OpenDataset, filters: Filters | None = None) -> Properties:
    """The properties of an open dataset. `filters` are those of the parts of a virtual one."""
    creation, labels = dataset.creation, labels_of(dataset)
    attrs, unread = _typed_attributes(dataset, str(dataset.name))
    if isinstance(why := labels.attrs.get(NO_NAMES), Note):
        unread.append(f"what axes of '{dataset.name}' are called ({why})")
    kind, number = dataset.kind, dataset.kind.dtype
    if h5py.check_enum_dtype(number) is not None:
        unread.append(f"what the numbers of '{dataset.name}' stand for (an enumeration)")
    dtype = type_of_values(kind)
    dtype = dtype if refusal(dtype) is not None else np.dtype(dtype_text(dtype))
    compression, checksum = _compression(dataset.stored_filters if filters is None else filters, dtype.kind)
    fill, last = None, str(dataset.name or "").rpartition("/")[2]
    if creation.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED and refusal(number) is None:
        value = np.zeros((), native_dtype(number).newbyteorder(number.byteorder))  # see `chunks.fill_value`
        try:
            creation.get_fill_value(value)
            fill = value.astype(native_dtype(dtype))[()]
        except (OSError, TypeError) as error:  # HDF5 does not convert that of bit fields
            unread.append(f"the fill value of '{dataset.name}' ({error})")
    scales = tuple(tuple(name for name, scale in of_axis if not stands_for_axis(scale)) for of_axis in scales_of(dataset)[0])
    if "_FillValue" in attrs:
        value = np.asarray(attrs["_FillValue"])
        attrs["_FillValue"] = value.reshape(-1)[0] if value.size == 1 else attrs["_FillValue"]
    coordinates = [coordinate.dataset for coordinate in labels.coords.values()]
    return Properties(
        dtype,
        labels.dims,
        attrs,
        compression=compression,
        checksum=checksum,
        fill_value=fill,
        unlimited=tuple(k for k, n in enumerate(dataset.maxshape or ()) if n is None),
        coordinates=tuple(dict.fromkeys(itertools.chain(coordinates, *scales))),
        unread=tuple(unread),
        stored_name=last if last.startswith(NON_COORDINATE) else None,
        texts=_texts(dataset),
        scales=scales,
        axis_labels=tuple(axis_texts_of(dataset)[0]),
        scale_name=plain_attribute(dataset, "NAME") if is_scale(dataset) else None,
    )


def _texts(dataset: OpenDataset) -> np.ndarray[Any, Any] | None:
    """The values of a short array of text; None for another one. HDF5 finds them in this file, and needs no plugin."""
    kind, creation = dataset.kind, dataset.creation
    if kind.get_class() != h5py.h5t.STRING or dataset.shape is None:
        return None
    n = max(dataset.size, math.prod(dataset.chunks or ()))
    is_here = creation.get_layout() != h5py.h5d.VIRTUAL and not creation.get_external_count()
    if not is_here or n * kind.get_size() > _MOST_NBYTES or not {number for number, *_ in dataset.stored_filters} <= _OF_TEXT:
        return None
    texts = np.empty(dataset.shape, dataset.dtype)  # whose metadata say how text is encoded
    if texts.size:
        dataset.read_direct(texts)
    return texts


def groups_of(file: h5py.File) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The attributes of all groups of a file; and what could not be read."""
    attrs, unread = _typed_attributes(file["/"], "/")
    groups = {"/": attrs}
    names, lost = names_below(file["/"])
    for name in names:
        try:
            member = file[encoded(name)]
        except HDF5_ERRORS as error:
            lost[name] = str(error)
            continue
        if isinstance(member, h5py.Group):
            groups[f"/{name}"], unread_here = _typed_attributes(member, f"/{name}")
            unread += unread_here
        elif isinstance(member, h5py.Datatype):
            unread.append(f"the named type '/{name}'")
    unread += [f"what is in '/{name}' ({why})" for name, why in lost.items()]
    return groups, unread


def _typed_attributes(owner: Any, name: str) -> tuple[dict[str, Any], list[str]]:
    """The author's attributes as h5py gives them; and what could not be read."""
    try:
        attrs = author_attributes(owner, _MOST_NBYTES)
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


def _compression(filters: Filters, kind: str) -> tuple[dict[str, Any] | str | None, bool]:
    """The compression of values of this kind, as in `Properties`, and whether there is a checksum."""
    numbers = {number for number, *_ in filters}
    compressors = [(number, tuple(int(v) for v in values)) for number, _, values, _ in filters if number not in HELPERS]
    names = [filter_of(number).word for number, _ in compressors]
    why = _changing(compressors[0][0], kind) if len(compressors) == 1 else ""
    return why or compression_keywords(names, SHUFFLE in numbers, lambda: _options(*compressors[0])), CHECKSUM in numbers


def _changing(number: int, kind: str) -> str:
    """Why a filter is not used for a copy of what it has encoded, in words that follow the array's name; empty if it is.

    A lossy filter changes values, even those that it has changed before: what it rounds by the least value of a chunk is
    rounded to another value in chunks of another shape.
    """
    codec = filter_of(number)
    if changes_values(number, kind):
        return f"is encoded by {codec.word}, which could change the values once more"
    if codec.word == str(number):
        return f"is encoded by HDF5 filter {number}, of which is not known whether it changes values"
    return ""


def _options(number: int, values: tuple[int, ...]) -> dict[str, Any]:
    """Level, shuffle inside of the filter, and its other parameters, as keywords of `sink.Compression`."""
    codec, parameters = filter_of(number), parameters_of(number, values)
    if parameters is not None:
        return codec.keywords(parameters)
    if number == 32004 and values in ((), (0,)):
        return {}
    if number == h5py.h5z.FILTER_SCALEOFFSET:  # of integers: as many bits as a chunk needs, for none is to be lost
        return {"options": {"cd_values": (values[0], 0)}}
    arguments = values[slice(*codec.of_caller)]
    return {"options": {"cd_values": arguments} if arguments else {}}
