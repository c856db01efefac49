"""How do the axes of a new HDF5 or netCDF4 file get their names? By HDF5's dimension scales, as netCDF writes them.

An array with one axis, whose name is that of the axis, is the coordinate of that axis: it becomes a scale. In netCDF4 each
other axis gets a scale without values; in plain HDF5 a label, or such a scale if the file has coordinates, because the
netCDF library opens no file with an array of which some axes have scales and others have none. A scale can grow if one of its
axes can. An array of plain HDF5 may say itself which scales an axis has: several, in other groups, with names of their own
(`ArraySpec.scales`).

An array may have the name of an axis, and not be its coordinate. In netCDF4 it gets a prefix, as by the netCDF library, which
takes it away when it reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

from shardload.errors import ConfigError
from shardload.formats.hdf5.metadata import NO_VARIABLE, NON_COORDINATE
from shardload.formats.netcdf import NETCDF_TYPES, refused_attribute, unreadable_name
from shardload.formats.sink import ONE_LENGTH, ArraySpec, groups_above
from shardload.system.steps import step_done, steps_of
from shardload.units import shown

_MOST_FIXED = 64_000  # bytes of text that HDF5 keeps beside the array: an attribute has less than 64 KiB with its name
_OF_H5PY = ("lzf", "32000")  # filters that no plugin has


def check_netcdf(name: str, spec: ArraySpec) -> None:
    """ConfigError if netCDF4 has no type for the values, or its library does not read the names or the compression."""
    for part in (*name.strip("/").split("/"), *filter(None, spec.dims or ())):
        why = unreadable_name(part)
        if why is not None:
            raise ConfigError(
                f"'{name}' has a name {why}, which netCDF programs do not read: {shown(part, 80)}. Choose another one"
            )
    if spec.texts is None and f"{spec.dtype.kind}{spec.dtype.itemsize}" not in NETCDF_TYPES:
        instead = "Save it as int8 or float32 (complex numbers as two arrays), or use the suffix .h5 or .zarr"
        raise ConfigError(f"'{name}' holds {spec.dtype.name}, which netCDF4 does not have. {instead}")
    if spec.compression is not None and spec.compression.name in _OF_H5PY:
        raise ConfigError(
            f"compression of '{name}' is {spec.compression.name!r}, which is h5py's own: the netCDF library does not read it. "
            "Pass compression='gzip', or use the suffix .h5"
        )


class _Axes:
    """The axes that have a name, of all arrays of a file. ConfigError for a name that none can have."""

    def __init__(self, specs: Mapping[str, ArraySpec]) -> None:
        self._specs = specs
        self.lengths: dict[tuple[str, str], set[int]] = {}  # by group and name
        for name, spec in specs.items():
            for axis, (dim, n) in enumerate(zip(spec.dims or (), spec.shape, strict=False)):
                if dim is not None and (not dim or "/" in dim or "\0" in dim):  # HDF5 would cut it off at a zero byte
                    raise ConfigError(f"axis {axis} of '{name}' is called {dim!r}; expected a name without '/' or zero bytes")
                if dim:
                    self.lengths.setdefault((name.rpartition("/")[0], dim), set()).add(n)

    def coordinate_of(self, name: str, axis: int) -> str | None:
        """The array that is the coordinate of an axis of `name`: in its group, or in the nearest group above, if it has the
        axis's length there. (In its own group another length is an error.)
        """
        dim, length = (self._specs[name].dims or ())[axis], self._specs[name].shape[axis]
        if attached := self.attached(name, axis):
            return attached[0]
        if not dim:
            return None
        own_group = name.rpartition("/")[0]
        for group in (*groups_above(name), ""):
            candidate = self._specs.get(f"{group}/{dim}")
            if candidate is not None and candidate.dims == (dim,) and (group == own_group or candidate.shape == (length,)):
                return f"{group}/{dim}"
            if self.lengths.get((group, dim), {length}) != {length}:  # that group has an axis of this name for itself
                return None
        return None

    def attached(self, name: str, axis: int) -> list[str]:
        """The scales of an axis that are said to be attached to it, if they are in this file, and no single numbers."""
        scales = self._specs[name].scales
        there = [scale for scale in scales[axis] if scale in self._specs and scale != name] if scales else []
        return [scale for scale in there if self._specs[scale].shape]

    def dimensions(self) -> dict[tuple[str, int], str]:
        """The scale of each axis without a coordinate. It is in the root group, for all groups. But where groups have axes of
        one name with different lengths, as netCDF allows, each group has a scale of its own.
        """
        lengths: dict[str, set[int]] = {}
        for (_, axis_name), lengths_in_group in self.lengths.items():
            lengths.setdefault(axis_name, set()).update(lengths_in_group)
        dimensions = {}
        for name, spec in self._specs.items():
            for axis, dim in enumerate(spec.dims or ()):
                if dim and self.coordinate_of(name, axis) is None:
                    dimensions[name, axis] = f"/{dim}" if len(lengths[dim]) == 1 else f"{name.rpartition('/')[0]}/{dim}"
        return dimensions

    @property
    def has_coordinates(self) -> bool:
        """True if some axis has a coordinate, all axes have a name, and axes of one name in a group have one length."""
        are_named = all(None not in (spec.dims or ()) for spec in self._specs.values())
        have_one_length = all(len(lengths) == 1 for lengths in self.lengths.values())
        has_any = any(spec.dims == (name.rpartition("/")[2],) for name, spec in self._specs.items())
        return are_named and have_one_length and has_any


def netcdf_names(specs: Mapping[str, ArraySpec]) -> dict[str, str]:
    """In netCDF4: the names that arrays have in HDF5. One that has the name of an axis, and is not its coordinate, gets the
    library's prefix. ConfigError for a single number of such a name, which the library has, but xarray does not open.

    >>> x, lat = (ArraySpec((2, 3), np.dtype("f4"), dims=dims) for dims in (("lat", "lon"), ("j", "i")))
    >>> netcdf_names({"/x": x, "/lat": lat})
    {'/x': '/x', '/lat': '/_nc4_non_coord_lat'}
    """
    names, axes = {name: name for name in specs}, _Axes(specs)
    for (name, _), dimension in axes.dimensions().items():
        if dimension not in specs:
            continue
        above, _, last = dimension.rpartition("/")
        names[dimension], why = f"{above}/{NON_COORDINATE}{last}", ""
        if not specs[dimension].shape and (above, last) in axes.lengths:
            why = "is a single number: xarray opens no such file"
        elif names[dimension] in specs or unreadable_name(f"{NON_COORDINATE}{last}") is not None:
            why = f"is not its coordinate, with dims=({last!r},), nor is '{names[dimension]}' free, as netCDF would call it"
        if why:
            raise ConfigError(f"'{dimension}' has the name of an axis of '{name}', and {why}. Call one of them by another name")
    return names


def write_axis_names(file: h5py.File, specs: Mapping[str, ArraySpec], *, is_netcdf: bool) -> None:
    """Give the axes of all arrays their names. ConfigError if two axes of one name have different lengths."""
    lengths: dict[str, tuple[int, str, bool]] = {}
    scale_of: dict[tuple[str, int], str] = {}
    axes = _Axes(specs)
    dimensions = axes.dimensions()
    if not is_netcdf:
        have_scales = axes.has_coordinates
        dimensions = {key: scale for key, scale in dimensions.items() if have_scales and scale not in file}
    for name, spec in steps_of(specs.items()):
        for axis, dim in enumerate(spec.dims or ()):
            if dim is None:
                continue
            scale = axes.coordinate_of(name, axis)
            if axis and spec.scale_name is not None:  # HDF5 attaches no scale to a scale
                file[name].dims[axis].label = dim
                continue
            scale = scale or dimensions.get((name, axis))
            label = (spec.axis_labels[axis] if spec.axis_labels else "") or (dim if scale is None else "")
            if label:
                file[name].dims[axis].label = label
            if scale is None or axes.attached(name, axis):
                continue
            length, first, grows = lengths.setdefault(scale, (spec.shape[axis], name, False))
            lengths[scale] = length, first, grows or axis in spec.unlimited
            if length != spec.shape[axis]:
                raise ConfigError(
                    f"axis {dim!r} has {spec.shape[axis]} elements in '{name}', but {length} in '{first}'. {ONE_LENGTH}"
                )
            scale_of[name, axis] = scale
    numbers = {}
    for number, (scale, (length, _, grows)) in enumerate(steps_of(lengths.items())):
        if scale not in specs:
            _create_dimension(file, scale, length, grows)
        elif specs[scale].scale_name is None:
            file[scale].make_scale(scale.rpartition("/")[2])
        numbers[scale] = number
        if is_netcdf:
            file[scale].attrs["_Netcdf4Dimid"] = np.int32(number)
    for name, spec in specs.items():
        if spec.scale_name is not None:
            file[name].make_scale(spec.scale_name)
    for name, spec in steps_of(specs.items()):
        for axis in range(len(spec.scales)):
            for scale in axes.attached(name, axis):
                file[name].dims[axis].attach_scale(file[scale])
    for (name, axis), scale in steps_of(scale_of.items()):
        if name != scale:
            file[name].dims[axis].attach_scale(file[scale])
    if is_netcdf:
        for name, spec in steps_of(specs.items()):
            if name not in numbers and spec.shape:
                ids = [numbers[scale_of[name, axis]] for axis in range(len(spec.shape))]
                file[name].attrs["_Netcdf4Coordinates"] = np.array(ids, dtype=np.int32)


def _create_dimension(file: h5py.File, scale: str, length: int, grows: bool) -> None:
    """A scale that has a length but no values: a dimension of netCDF without a variable."""
    if scale in file:
        raise ConfigError(
            f"'{scale}' is a group, and the name of an axis without a coordinate. Call one of them by another name"
        )
    extent = {"maxshape": (None,), "chunks": (1024,)} if grows else {}
    created = file.create_dataset(scale, shape=(length,), dtype=">f4", track_order=True, **extent)  # see `let_list_grow`
    created.make_scale(f"{NO_VARIABLE}.{length:10d}")


def write_attrs(owner: Any, name: str, attrs: Mapping[str, Any], *, is_netcdf: bool) -> None:
    """Write attributes. ConfigError for one that HDF5 cannot hold."""
    step_done()
    for key, value in attrs.items():
        value = _plain_text(value)
        why = refused_attribute(str(key), value, is_netcdf=is_netcdf)
        try:
            if why is None:
                owner.attrs[key] = _netcdf_value(value) if is_netcdf else value
        except (TypeError, ValueError, OSError, RuntimeError) as error:
            why = f"{shown(value, 80)}, which HDF5 cannot hold ({error})"
        if why is not None:
            raise ConfigError(
                f"the attribute {key!r} of '{name}' is {why}. Leave it out, or pass text, a number or a row of numbers"
            )


def _plain_text(value: Any) -> Any:
    """Python's text for NumPy's, which h5py does not write, in lists and arrays too; text for long bytes: its length has no
    limit. Other values as they are.
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes) and len(value) > _MOST_FIXED:
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        return value.astype(object) if value.ndim else str(value[()])
    if isinstance(value, list | tuple) and value and all(isinstance(text, str) for text in value):
        return [str(text) for text in value]
    return value


def _netcdf_value(value: Any) -> Any:
    """Text as bytes of fixed length, which every netCDF program reads, if it is short ASCII; booleans as int8. Other values as
    they are.
    """
    if isinstance(value, str):
        return np.bytes_(value) if 0 < len(value) <= _MOST_FIXED and value.isascii() else value
    is_flag = not isinstance(value, h5py.Empty | bytes) and np.asarray(value).dtype.kind == "b"
    return np.asarray(value, dtype=np.int8)[()] if is_flag else value
