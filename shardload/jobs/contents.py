"""What is in a file? Every array with its shape, type, packing, names of axes, attributes and coordinates; no values.

`open` reads it on this process alone, without JAX and MPI, and holds nothing open afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from shardload.errors import ConfigError, SourceError, printable
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo, OnDemand, json_value, some
from shardload.formats.labelling import Labeller, labelling, read_labels, read_now
from shardload.formats.lookup import absolute, find_array, open_file, split_path
from shardload.options import Options
from shardload.storage.remote import is_remote, with_store, without_secrets

_MOST_VALUES = 1 << 16  # of an attribute
_MOST_LABELLED = 1000  # arrays of a file whose labels are read at once: a millisecond each


class Contents(Mapping[str, ArrayInfo]):
    """The arrays of a file, by name, in the file's order.

    ``contents["/group/rho"]`` and ``contents["group/rho"]`` are the same array.

    Attributes
    ----------
    path : str
        The file.
    attrs : mapping
        Attributes of the file, or of the group that was named: text and numbers. They are read when they are first looked at.
        None of an untrusted file.
    """

    def __init__(self, path: str, infos: list[ArrayInfo], group: str, access: Access) -> None:
        self.path, self._place, self._infos = without_secrets(path), path, {info.dataset: info for info in infos}
        self._group, self._access = group, access

    @cached_property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes of the file, or of the group that was named."""
        return groups_of(self._place, self._access)[0].get(self._group, {})

    def __getitem__(self, name: str) -> ArrayInfo:
        if not isinstance(name, str):
            raise KeyError(f"{name!r} is no name; '{self.path}' has {some(list(self._infos)) or 'none'}")
        try:
            return self._infos["/" + name.strip("/")]
        except KeyError:
            names_below = [full_name for full_name in self._infos if full_name.startswith(f"/{name.strip('/')}/")]
            if names_below:
                raise KeyError(f"{name!r} in '{self.path}' is a group, not an array; in it are {some(names_below)}") from None
            near = get_close_matches("/" + name.strip("/"), self._infos, 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise KeyError(f"'{self.path}' holds no array {name!r}; it has {some(list(self._infos)) or 'none'}{hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __repr__(self) -> str:
        lines = [f"<{self.path}: {len(self)} {'array' if len(self) == 1 else 'arrays'}>"]
        read_now(info.labels for info in self._infos.values() if isinstance(info.labels, OnDemand))
        for info in self._infos.values():
            names = [f"{name or '-'}={n}" for name, n in zip(info.dims, info.shape, strict=True)]
            axes = f"({', '.join(names)})" if any(info.dims) else str(info.shape)
            kind = "dimension without a variable" if info.is_dimension else info.refused or info.dtype
            lines.append(f"  {info.dataset}  {axes}  {kind}")
        return "\n".join(map(printable, lines))


def open(  # a public name: `shardload.open`
    path: Any,
    *,
    allow_external: bool = False,
    untrusted: bool = False,
    allow_filters: Any = (),
    storage: Mapping[str, Any] | None = None,
) -> Contents:
    """Say what is in a file: shapes, types, packing, names of axes, attributes and coordinates.

    Values are read of coordinates only. Collective: no. It needs neither JAX nor MPI, and leaves nothing open.

    Parameters
    ----------
    path : str, PathLike or (obstore store, str)
        HDF5, netCDF4 or Zarr. With the name of an array or a group (``"data.nc:/group"``): that array, or all below.
    allow_external, untrusted, allow_filters, storage
        As in `load`.

    Returns
    -------
    Contents
        A mapping from names to `ArrayInfo`: ``shape``, ``dtype``, ``chunks``, ``dims``, ``attrs``, ``coords`` (with values, if
        they are at most 64 KiB) and more. Its own ``attrs`` are those of the file, or of the group in `path`.

    Raises
    ------
    SourceError
        If there is no such file, no format claims it, or it is damaged.
    ConfigError
        If the file has no array or group of that name.

    Examples
    --------
    >>> import h5py, numpy as np, shardload
    >>> with h5py.File("named.h5", "w") as file:
    ...     file["density"] = np.ones((8, 4), "float32")
    ...     file["x"] = np.arange(8.0)
    ...     file["x"].make_scale("x")
    ...     file["density"].dims[0].attach_scale(file["x"])
    >>> shardload.open("named.h5")
    <named.h5: 2 arrays>
      /density  (x=8, -=4)  float32
      /x  (x=8)  float64
    >>> shardload.open("named.h5")["density"].coords["x"].values[:3]
    array([0., 1., 2.])
    """
    path, storage = with_store(path, storage)
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"open takes the path of a file, found {type(path).__name__}. Pass the path, such as 'data.nc'")
    options = Options.check(allow_external=allow_external, untrusted=untrusted, allow_filters=allow_filters, storage=storage)
    access = options.access
    with labelling(access) as labeller:
        infos, name, _ = arrays_in(os.fspath(path), labeller, _MOST_LABELLED)
    file_path = split_path(os.fspath(path))[0]
    return Contents(file_path, [_on_demand(file_path, info, access) for info in infos], name or "/", access)


def arrays_in(path: str, labeller: Labeller, n_labelled: int) -> tuple[list[ArrayInfo], str, bool]:
    """The arrays that a path names: all of a file, those below a group, or one. Also that name (empty for a file), and whether
    it is that of an array. Labels are read if there are at most `n_labelled` arrays.
    """
    access, (file, name) = labeller.finder.access, split_path(path)
    full = "/" + (name or "").strip("/")

    def labelled(infos: list[ArrayInfo]) -> list[ArrayInfo]:
        return infos if len(infos) > n_labelled else labeller.label_all(file, infos)

    try:
        opened = labeller.finder.file(file)
        infos = opened.list_arrays()
    except SourceError:
        if name is None or not is_remote(file):
            raise
        return [find_array(file, full, access)], full, True  # of a server that lists nothing
    if name is None:
        return labelled(infos), "", False
    group = full.removesuffix("*").rstrip("/")
    if with_name := [info for info in infos if info.dataset == full]:  # also what `find_array` refuses
        return labelled(with_name), full, True
    below = [info for info in infos if info.dataset.startswith(f"{group}/")] or opened.list_linked(group)
    if below or (group or "/") in groups_of(file, access)[0]:
        return labelled(below), group or "/", False
    return [find_array(file, full, access)], full, True


def groups_of(path: str, access: Access) -> tuple[Mapping[str, Mapping[str, Any]], list[str]]:
    """The attributes of the file (``"/"``) and of its groups, as values of JSON; and what cannot be read of them, in words.
    Nothing of a file that is untrusted.
    """
    with open_file(path, access) as file:
        attributes, unread = file.groups()
    shown = {name: {key: json_value(value, _MOST_VALUES) for key, value in attrs.items()} for name, attrs in attributes.items()}
    return shown, list(unread)


def _on_demand(path: str, info: ArrayInfo, access: Access) -> ArrayInfo:
    """The array, with labels that are read when they are looked at, if it has none yet."""
    if info.refused or info.labels is not None:
        return info
    return replace(info, labels=OnDemand(read_labels, absolute(path), info, access))
