"""What is known of an HDF5 dataset without reading its values?

`describe` turns its metadata into an `ArrayInfo`. What cannot be loaded, and why, is settled here, so that reading is the
plain case.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import h5py

from shardload.sources.base import ArrayInfo, json_value, native_dtype, refusal
from shardload.sources.hdf5_filters import NAMES, refuse_filters
from shardload.sources.hdf5_links import Others

__all__ = ["describe", "filters_of"]

_HELPERS = (2, 3)  # rearrange or check bytes; named after the filter that makes them fewer

_REFUSED_CLASSES = {
    h5py.h5t.TIME: ("time", "HDF5 times, a type without a portable meaning"),
    h5py.h5t.STRING: ("string", "strings"),
    h5py.h5t.BITFIELD: ("bitfield", "bit fields"),
    h5py.h5t.OPAQUE: ("opaque", "opaque bytes (dates that NumPy wrote, for instance)"),
    h5py.h5t.REFERENCE: ("reference", "references to other objects"),
    h5py.h5t.VLEN: ("vlen", "lists of variable length as elements"),
    h5py.h5t.ARRAY: ("array", "small arrays as elements"),
}
_TOLD = ("scale_factor", "add_offset", "_FillValue", "missing_value", "units", "calendar")


def describe(
    dataset: h5py.Dataset, path: str, name: str, others: Others, texts: bool = False, allow: Collection[str] = ()
) -> ArrayInfo:
    """What is known of a dataset without reading its values.

    Parameters
    ----------
    dataset : h5py.Dataset
        Open.
    path, name : str
        As the user named the file and the dataset.
    others : Others
        The other files that its values are in.
    texts : bool
        Whether attributes of variable length are read, too. They are in the file's global heap, in which HDF5 2.0.0 goes round
        in circles where it is damaged (docs/trust-files.md): nothing that a load needs is there.
    allow : collection of str
        Names and numbers of filters that are used though they are not in `hdf5_filters.SURVIVED`.
    """
    creation = dataset.id.get_create_plist()
    filters = filters_of(dataset)
    dtype, refused = _type_of(dataset.id.get_type())
    is_virtual = creation.get_layout() == h5py.h5d.VIRTUAL
    if dataset.shape is None:
        refused = "nothing: its dataspace is null, which is neither an array nor a number"
    elif refused is None:
        refused = refuse_filters(dataset, allow) or others.refused
    chunked = creation.get_layout() == h5py.h5d.CHUNKED
    has_attributes = h5py.h5a.get_num_attrs(dataset.id) > 0
    return ArrayInfo(
        path=path,
        dataset=name,
        format=_flavour(dataset),
        shape=tuple(dataset.shape or ()),
        dtype=dtype,
        chunks=tuple(creation.get_chunk()) if chunked else None,
        codec=_codec(filters),
        nbytes_stored=None if is_virtual else dataset.id.get_storage_size(),
        refused=refused,
        is_coordinate=has_attributes and _is_plain(dataset, "CLASS") and _attribute(dataset, "CLASS") == "DIMENSION_SCALE",
        attributes=_attributes(dataset, texts) if has_attributes else {},
    )


def filters_of(dataset: h5py.Dataset) -> list[tuple[int, int, Any, bytes]]:
    """The filters of a dataset: number, flags, values, name."""
    creation = dataset.id.get_create_plist()
    return [creation.get_filter(k) for k in range(creation.get_nfilters())]


def _type_of(file_type: Any) -> tuple[str, str | None]:
    """Name of the values' type, and why it is refused."""
    if file_type.get_class() in _REFUSED_CLASSES:
        return _REFUSED_CLASSES[file_type.get_class()]
    try:
        dtype = file_type.dtype
    except (TypeError, ValueError) as error:  # 3-byte integers, quadruple precision, half precision complex numbers
        return f"{8 * file_type.get_size()}-bit number", f"numbers of a type that NumPy does not have ({error})"
    refused = refusal(dtype)
    if file_type.get_class() == h5py.h5t.COMPOUND and refused is not None:
        return "compound", refused
    return (dtype.name if refused else native_dtype(dtype).name), refused


def _codec(filters: list[tuple[int, int, Any, bytes]]) -> str:
    """The filter pipeline for people: what compresses first, then what helps it."""
    ordered = sorted(filters, key=lambda f: f[0] in _HELPERS)
    return "+".join(NAMES.get(n) or f"{label.decode(errors='replace')}#{n}" for n, _, _, label in ordered) or "none"


def _flavour(dataset: h5py.Dataset) -> str:
    """``"netCDF4"`` where the netCDF library left its marks, else ``"HDF5"``."""
    file = dataset.file
    marks = (file, "_NCProperties"), (file, "_nc3_strict"), (dataset, "_Netcdf4Dimid")
    marked = any(h5py.h5a.get_num_attrs(owner.id) and key in owner.attrs for owner, key in marks)
    return "netCDF4" if marked else "HDF5"


def _attributes(dataset: h5py.Dataset, texts: bool) -> dict[str, Any]:
    """Those that change what values mean."""
    return {
        key: _attribute(dataset, key) for key in _TOLD if key in dataset.attrs and (texts or _is_plain(dataset, key))
    }  # fmt: skip


def _is_plain(dataset: h5py.Dataset, key: str) -> bool:
    """Whether an attribute is numbers, or text of a fixed length."""
    if key not in dataset.attrs:
        return False
    kind = h5py.h5a.open(dataset.id, key.encode()).get_type()
    if kind.get_class() == h5py.h5t.STRING:
        return not kind.is_variable_str()
    return kind.get_class() in (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.ENUM)


def _attribute(dataset: h5py.Dataset, key: str) -> Any:
    """An attribute as plain Python; None where there is none, words where h5py cannot read it."""
    if key not in dataset.attrs:
        return None
    try:
        value = dataset.attrs[key]
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        return f"unreadable ({error})"
    return None if isinstance(value, h5py.Empty) else json_value(value)
