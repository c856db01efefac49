"""How are files of a climate model loaded as one Dataset of xarray, in one call? By `concat`, a load, and `to_xarray`.

1. Rank 0 says which variables of the file are data, and along which axes they lie; all ranks agree.
2. They are loaded together, each by what `select` and `spec` say of its axes, and wrapped by `to_xarray`.
3. Dates are decoded, and an axis with padding gets an index that knows the file's rows alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardload.arrays.padding import loaded_as
from shardload.errors import ConfigError, LeftOutWarning, PaddingWarning, SourceError
from shardload.formats.concatenation import Concatenation
from shardload.formats.contract.array import ArrayInfo, some
from shardload.formats.labelling import COORDINATE_NBYTES, Labeller
from shardload.formats.lookup import Finder, split_path
from shardload.formats.sink import UNITS
from shardload.jobs.contents import Contents, arrays_in
from shardload.jobs.joining.join import concat
from shardload.jobs.joining.request import is_one_file
from shardload.jobs.loading.call import LoadCall, look_at
from shardload.jobs.loading.endpoints import ArrayLoad
from shardload.jobs.loading.labelled import UNPADDED, as_unpadded, import_xarray, pad_variable, to_xarray
from shardload.jobs.loading.request import read_requests
from shardload.jobs.trees import ArrayTree, Place
from shardload.options import check_names, with_defaults
from shardload.storage.remote import with_store
from shardload.system.caller import warn_once

_OF_COORDINATES = ("bounds", "climatology")  # attributes of coordinates that name other arrays
_CONTAINERS = ("grid_mapping", "mesh", "geometry")  # attributes that name variables of which only the attributes mean something
Axes = dict[str, list[str | None]]


def load_dataset(
    files: Any,
    mesh: Any,
    spec: Any = None,
    *,
    along: str | int | None = None,
    dataset: str | Sequence[str] | None = None,
    select: Any = None,
    decode: Any = True,
    **options: Any,
) -> Any:
    """Load the variables of a file, or of many, as an `xarray.Dataset` over sharded arrays; values and dates decoded.

    The coordinates, dates and attributes are those of `xarray.open_mfdataset`; attributes that differ from file to file (often
    ``history``) are left out. Along an axis with padding, coordinates go on
    with NaN (dates with NaT), and the index knows the file's rows alone: ``.sel`` never gives padding, also with
    ``method="nearest"``; and `unpad` takes the Dataset, and what was computed from it.

    Collective: yes, over `comm`. Every rank passes the same arguments, and all return or all raise the same error.

    Parameters
    ----------
    files : str, PathLike, or sequence of them
        A file, a group in it (``"run.nc:/atmosphere"``), a URL; or several files or a pattern, ``"era5_*.nc"``, as for
        `concat`; or what that has returned.
    mesh : jax.sharding.Mesh
        The mesh of devices.
    spec : dict or PartitionSpec, optional
        ``{"lat": "a"}`` cuts each variable that has the axis. By default all are whole on each device.
    along : str or int, optional
        The axis along which several files follow each other.
    dataset : str or sequence of str, optional
        The variables; of several files, those that must agree in all. By default all of the file (of the group) that hold
        numbers and are no coordinates, nor the bounds of one.
    select : dict, optional
        As in `load`, by names of axes; each variable takes what it has of them.
    decode : bool or None
        As in `load`.
    **options
        All other options of `load`, but `halo`, `edge` and `like`. With `pad`, NaN is what xarray leaves out of means. A grid
        mapping or a mesh, of which only the attributes mean something, keeps its type where `dtype` is one for all.

    Returns
    -------
    xarray.Dataset
        Times that are data variables, not coordinates, stay numbers.

    Warns
    -----
    LeftOutWarning
        On rank 0: names the variables that hold no numbers, or have an axis twice, and coordinates that no variable has.
    PaddingWarning
        On rank 0: names the variables with padding that is a number, which means count.

    Raises
    ------
    ConfigError, SourceError, PeerError, StallError
        As `load`, `concat` and `to_xarray` do.

    Examples
    --------
    >>> import jax, numpy as np, shardload, xarray
    >>> from jax.sharding import Mesh
    >>> shardload.initialize()
    >>> if jax.process_index() == 0:
    ...     time = ("time", [0.0, 6.0], {"units": "hours since 2000-01-01"})
    ...     made = xarray.Dataset({"t": (("time", "lat"), np.ones((2, 8), "f4"))}, {"time": time, "lat": np.arange(8.0)})
    ...     made.to_netcdf("climate.nc", engine="h5netcdf")
    >>> ds = shardload.load_dataset("climate.nc", Mesh(np.array(jax.devices()), "a"), {"lat": "a"})
    >>> ds.t.dims, str(ds.time.values[1])[:13], float(ds.t.sel(lat=5.2, method="nearest").sum())
    (('time', 'lat'), '2000-01-01T06', 2.0)
    """
    xarray = import_xarray("load_dataset")
    options |= {"select": select, "decode": decode}
    keywords = with_defaults("load_dataset", options)
    files, keywords["storage"] = with_store(files, keywords["storage"])
    if not isinstance(files, Concatenation) and (along is not None or not is_one_file(files)):
        of_files = {name: keywords[name] for name in ("allow_external", "storage", "timeout", "comm")}
        files = concat(files, along, dataset=dataset, **of_files)
    with DatasetCall(files, dataset, mesh, spec, keywords).begin() as call:
        loads = call.plan()
        plan: Any = call.hand_out(loads)
        rank = call.call.group.rank
    _warn_of_counted_padding(loads, rank)
    return _with_dates(xarray, to_xarray(plan.execute(), plan), plan)


class DatasetCall(LoadCall):
    """The call of `load_dataset`. Rank 0 finds the variables, their axes and coordinates, and tells all ranks.

    Parameters
    ----------
    path : str or Concatenation
        The file, perhaps with a group.
    names : str or sequence of str, optional
        The variables, as the caller passed them; None: all.
    mesh, spec, keywords : object, object, mapping
        As for `LoadCall`; `spec` and ``select`` may name axes that some variables lack.
    """

    def __init__(self, path: Any, names: Any, mesh: Any, spec: Any, keywords: Mapping[str, Any]) -> None:
        self._full_path, self._names = path, names
        file, group = (path, None) if isinstance(path, Concatenation) else split_path(os.fspath(path))
        self._group = f"/{group.strip('/')}" if group and group.strip("/") else ""
        spec = PartitionSpec() if spec in (None, {}) else spec
        super().__init__("load_dataset", file, mesh, spec, {**keywords, "dataset": f"{self._group}/*"})

    def _join(self) -> ArrayTree:
        self._names = None if self._names is None else check_names(self._names)
        return super()._join()

    def _source_text(self, place: Place) -> dict[str, str]:
        return {**super()._source_text(place), "variables": repr(self._names)}

    def _find_all(self, finder: Finder) -> Any:
        """The axes of each variable by its full name; the variables whose value means nothing; a `FoundArray` for each."""
        finder.file(self._path, is_loaded=True)
        labeller = Labeller(finder, COORDINATE_NBYTES, of_groups=True)
        if self._names is None:
            infos, _, _ = arrays_in(os.fspath(self._full_path), labeller, 0)
            contents = Contents(self._path, infos, self._group or "/", finder.access)
            of_group = [info for info in contents.values() if info.dataset.rpartition("/")[0] == self._group]
            infos = labeller.label_all(self._path, [info for info in of_group if not info.is_dimension])
            axes, mappings = self._variables(contents, infos)
        else:  # a server may list nothing
            names = [f"{self._group}/{name}" for name in self._names]
            finder.expect((self._path, name) for name in names)
            infos = [finder.find(self._path, name, lambda info, _: (info, None)).info for name in names]
            infos = labeller.label_all(self._path, infos)
            axes, mappings = {info.dataset: list(info.dims) for info in infos}, []
        labels = {info.dataset: info.labels for info in infos}
        parts, arrays = _selections(self._keywords["select"], axes), {}
        for name in axes:
            arrays[name] = finder.find(self._path, name, partial(look_at, labels[name], parts[name] or None))
        return axes, mappings, arrays

    def _variables(self, contents: Contents, infos: Sequence[ArrayInfo]) -> tuple[Axes, list[str]]:
        """Of the arrays of the group, with labels, the full names of those that are data, and the names of their axes; and of
        these the names of those whose value means nothing.
        """
        group = self._group
        coords = [coord for info in infos for coord in info.coords.values()]
        beside = (f"{group}/{coord.attrs[key]}" for coord in coords for key in _OF_COORDINATES if key in coord.attrs)
        not_data = {*beside, *(coord.dataset for coord in coords)}
        data = {info.dataset: list(info.dims) for info in infos if not info.refused and info.dataset not in not_data}
        twice = [name for name, dims in data.items() if len(set(filter(None, dims))) < len([dim for dim in dims if dim])]
        data = {name: dims for name, dims in data.items() if name not in twice}
        refused = [info.dataset for info in infos if info.refused and info.dataset not in not_data]
        of_data = {
            coord.dataset
            for info in infos
            for coord in info.coords.values()
            if info.dataset in data and (None in coord.dims or set(coord.dims) <= set(info.dims))
        }
        apart = [name for name in {coord.dataset: None for coord in coords} if name in contents and name not in of_data]
        if left_out := [*refused, *twice, *apart]:
            why = "hold no numbers, have an axis twice, or are coordinates of no variable along its axes"
            warn_once(f"'{contents.path}': left out, because they {why}: {some(left_out)}", LeftOutWarning, 0)
        if not data:
            names = some(list(contents)) or "none"
            raise ConfigError(f"'{contents.path}' has no data variables in its group '{group}/'; its arrays are {names}")
        words = {word.rstrip(":") for info in infos for key in _CONTAINERS for word in str(info.attrs.get(key, "")).split()}
        return data, [name for name in data if name.rpartition("/")[2] in words and not data[name]]

    def make(self, arrays: Any) -> list[ArrayLoad]:
        """Plan the variables that `_find_all` has found, each by what `select` and `spec` say of its axes."""
        axes_by_full_name, mappings, arrays = arrays
        full_names = {name.rpartition("/")[2]: name for name in axes_by_full_name}
        if len(full_names) < len(axes_by_full_name):
            raise ConfigError(
                f"dataset is {self._names!r}; variables of several groups have the same last name, and a Dataset has each name "
                "once. Load one group after the other"
            )
        parts = _selections(self._keywords["select"], {name: axes_by_full_name[full] for name, full in full_names.items()})
        keywords = {**self._keywords, "select": {name: part or None for name, part in parts.items()}}
        dtype = keywords["dtype"]
        if dtype is not None and not isinstance(dtype, Mapping) and mappings:
            keywords["dtype"] = {name: None if full_name in mappings else dtype for name, full_name in full_names.items()}
        self.tree = ArrayTree.join(self._path, full_names)
        self.requests = read_requests(self.tree, self._mesh, self._spec, keywords)
        return super().make([arrays[place.dataset] for place in self.tree.places])


def _selections(select: Any, axes: Axes) -> dict[str, dict[str | None, Any]]:
    """What each variable has of a selection by names of axes. ConfigError if none has one of these."""
    if not isinstance(select, Mapping | None):
        raise ConfigError(f"select is {select!r}; expected a dict by names of axes, since variables have different ones")
    all_dims = list(dict.fromkeys(dim for dims in axes.values() for dim in dims if dim))
    for name in select or ():
        if name not in all_dims:
            raise ConfigError(f"select names the axis {name!r}; the variables have {some(all_dims) or 'none with a name'}")
    return {name: {dim: select[dim] for dim in dims if select and dim in select} for name, dims in axes.items()}


def _warn_of_counted_padding(loads: Sequence[ArrayLoad], rank: int) -> None:
    """Warn once if an array has padding that is a number: a mean of xarray over the axis would be wrong."""
    # NaN, which no mean counts, is not equal to itself.
    counted = [load for load in loads if not load.plan.extent.is_whole and load.asked.pad == load.asked.pad]
    if counted:
        names, pad = some([load.info.dataset for load in counted]), counted[0].asked.pad
        text = f"means of xarray count the padding of {names}, which is {pad!r}. Pass pad=np.nan (and dtype='float32' for "
        text += "integers), which they leave out, or take it off first, by shardload.unpad"
        warn_once(text, PaddingWarning, rank)


def _with_dates(xarray: Any, dataset: Any, plan: Any) -> Any:
    """The Dataset with decoded dates, and with all coordinates also along axes with padding."""
    data = {name: variable for name, variable in dataset.variables.items() if isinstance(variable.data, jax.Array)}
    coords_of_file = dataset.drop_vars(list(data))
    if any(each_plan.shape != each_plan.shape_global for each_plan in plan.leaves):
        stand_ins = {name: np.broadcast_to(np.zeros((), p.dtype), p.shape) for name, p in plan.plans.items()}
        coords_of_file = to_xarray(stand_ins, plan).drop_vars(list(data))
    try:
        unpadded = xarray.decode_cf(coords_of_file, mask_and_scale=False)
    except (ArithmeticError, TypeError, ValueError) as error:
        info = next(iter(plan.plans.values())).info
        what = str(error).partition(" Try opening")[0]  # it is not this user who opens it
        raise SourceError(
            f"the coordinates of '{info.path}' cannot be decoded as dates: {what} As numbers they are loaded by: plan = "
            f"shardload.plan(files, mesh, spec or {{}}, dataset={info.dataset!r}); "
            "shardload.to_xarray(plan.execute(), plan)",
            path=info.path,
        ) from error
    for coord in unpadded.variables.values():  # numbers of bounds mean nothing where dates are counted in another way
        for bounds in (data[coord.attrs[key]] for key in _OF_COORDINATES if coord.attrs.get(key) in data):
            bounds.attrs = {key: coord.encoding[key] for key in UNITS if key in coord.encoding} | bounds.attrs
    coords, indexes = dict(unpadded.variables), dict(unpadded.xindexes)
    tails = {dim: (0, dataset.sizes[dim] - n) for dim, n in unpadded.sizes.items() if dataset.sizes.get(dim, n) != n}
    for name, variable in unpadded.variables.items() if tails else ():
        from shardload.jobs.dataset.padded_index import PaddedIndex  # imports xarray

        coords[name] = pad_variable(variable, {dim: tail for dim, tail in tails.items() if dim in variable.dims})
        if name in tails and name in indexes:
            indexes[name] = PaddedIndex(indexes[name], dataset.sizes[name])
    decoded = xarray.Dataset(data, xarray.Coordinates(coords, indexes=indexes), dataset.attrs)
    return decoded.set_coords([name for name in dataset.coords if name in data])


def unpad_labelled(tree: Any, plan: Any, unpad_one: Callable[[str, Any, Any], Any]) -> Any:
    """An object of xarray without padding. `unpad_one` takes an array's name, the array, and its plan or shape."""
    if not hasattr(tree, "data_vars"):  # a DataArray
        name = "x" if tree.name is None else tree.name
        return unpad_labelled(tree.to_dataset(name=name), {name: plan}, unpad_one)[name].rename(tree.name)
    lengths, unpadded, plans = dict[str, int](), dict[str, Any](), getattr(plan, "plans", plan) or {}
    for name, index in tree.xindexes.items():
        labels = tree.coords[name]
        if hasattr(index, "n_unpadded") or labels.notnull().all():  # else NaN is the file's, or `to_xarray` pads
            lengths[labels.dims[0]] = getattr(index, "n_unpadded", labels.size)
    for name, variable in tree.variables.items():
        if isinstance(variable.data, jax.Array):
            shape = tuple(lengths[dim] for dim in variable.dims if dim in lengths)
            is_unknown = loaded_as(variable.data) is not None or len(shape) < variable.ndim
            values = unpad_one(f"'{name}'", variable.data, plans.get(name) or (None if is_unknown else shape))
            unpadded[name] = variable.dims, values, variable.attrs, variable.encoding
            lengths |= dict(zip(variable.dims, values.shape, strict=True))
    rest = tree.drop_vars(list(unpadded)).isel({dim: slice(n) for dim, n in lengths.items()}, missing_dims="ignore")
    padded = (name for name, variable in rest.variables.items() if UNPADDED in variable.encoding and name not in rest.xindexes)
    unpadded |= {name: rest.variables[name].copy(data=as_unpadded(rest.variables[name])) for name in padded}
    return rest.assign(unpadded).set_coords([name for name in tree.coords if name in unpadded])
