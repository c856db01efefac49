"""In which format is a new file written? In the one that the caller names, or that its suffix tells."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from shardload.errors import ConfigError
from shardload.formats.netcdf import unreadable_name
from shardload.formats.sink import ArraySpec, Sink, groups_above
from shardload.storage.remote import StorageOptions, is_remote, without_secrets

FORMATS = ("hdf5", "netcdf4", "zarr")
_SUFFIXES = {
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".he5": "hdf5",
    ".hdf": "hdf5",
    ".nc": "netcdf4",
    ".nc4": "netcdf4",
    ".zarr": "zarr",
}
SUFFIXES = tuple(_SUFFIXES)


def format_for(path: str, name: str | None = None) -> str:
    """One of `FORMATS`. ConfigError if neither `name` nor the suffix is one.

    >>> format_for("out.nc"), format_for("out.zarr/"), format_for("out", "hdf5")
    ('netcdf4', 'zarr', 'hdf5')
    """
    if name is not None:
        if name not in FORMATS:
            fix = ". For Zarr format 2: zarr-python, or xarray's to_zarr(path, zarr_format=2)" if name == "zarr2" else ""
            raise ConfigError(f"format is {name!r}; expected one of {', '.join(map(repr, FORMATS))}{fix}")
        return name
    suffix = os.path.splitext(os.fspath(path).rstrip("/"))[1].lower()
    if suffix not in _SUFFIXES:
        raise ConfigError(
            f"the suffix of '{path}' does not tell a format: expected one of {', '.join(_SUFFIXES)}. Rename it, or pass "
            f"format=, one of {', '.join(map(repr, FORMATS))}"
        )
    return _SUFFIXES[suffix]


def check_target(path: str) -> None:
    """Raise ConfigError if the path of a new file has the form FILE:/NAME: a load would take NAME for an array in FILE."""
    file, colon, name = path.rpartition(":")
    if colon and file.lower().endswith(SUFFIXES) and not name.lower().endswith(SUFFIXES):
        raise ConfigError(
            f"'{path}' names an array in a file; expected the file alone, '{file}'. `save` takes names of arrays as keys, such "
            f"as {{{(name.strip('/') or 'rho')!r}: x}}; in a copy arrays keep theirs"
        )


def make_sink(
    path: str,
    specs: Mapping[str, ArraySpec],
    *,
    format: str | None = None,
    mode: str = "w-",
    alignment: int = 1,
    group_attrs: Mapping[str, Mapping[str, Any]] | None = None,
    about: Mapping[str, str] | None = None,
    storage: StorageOptions | None = None,
) -> Sink:
    """The sink of a new file. Touches no disk. Not collective: each rank makes its own, with the same arguments.

    Parameters
    ----------
    path : str
        The name that the file will have.
    specs : mapping of str to ArraySpec
        Its arrays by name, with groups (``"g/rho"``).
    format : str, optional
        One of `FORMATS`; else the suffix tells.
    mode : str
        ``"w-"``: the name must not exist. ``"w"``: what has it is replaced.
    alignment : int
        HDF5: see `Hdf5Sink`.
    group_attrs : mapping
        Attributes of the file (``"/"``) and of its groups, by their full names. Groups without arrays are made too.
    about, storage : mapping, optional
        Zarr: see `ZarrSink`.

    Raises
    ------
    ConfigError
        If the format cannot hold what is asked for.
    """
    kind, path = format_for(path, format), os.fspath(path)
    if "://" in path and not (kind == "zarr" and is_remote(path)):
        place = "a URL of S3, Google or Azure, to which Zarr is saved alone: name it .zarr" if is_remote(path) else "a URL"
        raise ConfigError(f"'{without_secrets(path)}' is {place}. Or save to a file in a folder, and upload it")
    full_specs: dict[str, ArraySpec] = {}
    for name, spec in specs.items():
        full_name = "/" + name.strip("/")
        is_root = full_name == "/" and len(specs) == 1 and kind == "zarr"
        if not is_root and any(map(_is_no_name, full_name.split("/")[1:])):
            raise ConfigError(f"an array is called {name!r}; expected a name such as 'rho' or 'group/rho'")
        if full_name in full_specs:
            raise ConfigError(f"two arrays are called '{full_name}'. Rename one of them")
        full_specs[full_name] = spec
    if not full_specs:
        raise ConfigError("there are no arrays to save")
    for name in full_specs:
        for group in groups_above(name):
            if group in full_specs:
                raise ConfigError(f"'{group}' and '{name}' are both arrays, and an array holds no other. Rename one of them")
    for name in group_attrs or {}:  # (an axis that gets its name later is in the way later: see `write_axis_names`)
        reason = refused_group(kind, name, full_specs)
        if reason is not None:
            raise ConfigError(f"a group is called {name!r}, {reason}. Leave its attributes out, or choose another name")
    # Imported here, because a load needs neither the libraries nor their compressors.
    if kind == "zarr":
        from shardload.formats.zarr.sink import ZarrSink

        return ZarrSink(path, full_specs, mode=mode, group_attrs=group_attrs, about=about, storage=storage)
    from shardload.formats.hdf5.sink import Hdf5Sink

    is_netcdf = kind == "netcdf4"
    return Hdf5Sink(path, full_specs, mode=mode, is_netcdf=is_netcdf, alignment=alignment, group_attrs=group_attrs)


def refused_group(kind: str, name: str, arrays: Iterable[str], axes: Iterable[str | None] = ()) -> str | None:
    """Why a group that has attributes cannot be in a file with these arrays, in words that follow its name; None if it can.

    A group that has arrays is as good as their names, which are checked with them. In netCDF, `axes` take names too.

    >>> refused_group("zarr", "/g/..", ["/x"]), refused_group("zarr", "/g", ["/x"])
    ("which is no name: one between slashes is empty, '.' or '..', or has a zero byte", None)
    """
    group, full_names = f"/{name.strip('/')}", set(arrays)
    if group == "/" or any(array.startswith(f"{group}/") for array in full_names):
        return None
    parts = group.split("/")[1:]
    if any(map(_is_no_name, parts)):
        return "which is no name: one between slashes is empty, '.' or '..', or has a zero byte"
    if not full_names.isdisjoint((group, *groups_above(group))):
        return "which is an array, or below one"
    if kind == "netcdf4":
        if parts[0] in axes:
            return "as is an axis, for which netCDF has a dimension of that name"
        return next((f"a name {why}, which netCDF programs do not read" for why in map(unreadable_name, parts) if why), None)
    if kind == "zarr":
        from shardload.formats.zarr.sink import refused_name

        return refused_name(group)
    return None


def _is_no_name(part: str) -> bool:
    """True for a part of a name that no format has. ``..`` is a folder outside of a Zarr store."""
    return part in ("", ".", "..") or "\0" in part
