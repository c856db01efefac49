"""What does an object of xarray say of its arrays? Their names, axes, attributes and coordinates, as `save` takes them.

The opposite direction of `loading.labelled`. xarray is not imported: whoever has such an object has imported it.

1. Each axis gets its length without padding, by its name: from plans, shapes, and arrays that a load returned (`Lengths`).
2. NumPy values are cut to it.
3. xarray's own encoder says what a file has of them: numbers for dates, and attributes. It never sees values that are sharded.
4. What a caller passed for all arrays at once and coordinates cannot have (chunks of three axes) is for the others.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from shardload.arrays.padding import Extent, extent_of, loaded_as
from shardload.errors import ConfigError
from shardload.formats.contract.array import refusal
from shardload.formats.sink import UNITS, units_of
from shardload.jobs.loading.labelled import as_unpadded, axes_of
from shardload.jobs.loading.plan import Plan
from shardload.jobs.trees import ArrayTree
from shardload.options import AUTO, OPTIONS
from shardload.values.dates import in_full
from shardload.values.decoding import PACKING, VALID_RANGE

# One value of these is for the arrays that are no coordinates.
_OF_DATA = {"chunks": AUTO, "shards": None, "dims": None, "like": None}
# Encodings of a file that was read. They are not written again: values are not packed, and dates get units.
_OF_DATES = {*UNITS, "dtype"}
_OF_FILES = PACKING | _OF_DATES | {"missing_value", "char_dim_name"}


Labels = tuple[tuple[str, ...], dict[str, Any]]  # the names of the axes of an array, and its attributes
Lengths = dict[str, dict[int, int]]  # of axes without padding, by their names and their lengths with it


def is_labelled(tree: Any) -> bool:
    """True for a Dataset, DataArray or DataTree of xarray."""
    xarray = sys.modules.get("xarray")
    kinds = [getattr(xarray, name, None) for name in ("Dataset", "DataArray", "DataTree")]
    return any(kind is not None and isinstance(tree, kind) for kind in kinds)


def of_xarray(
    tree: Any, keywords: Mapping[str, Any], kind: str, grow_along: str | int | None = None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Labels], Mapping[str, Any]]:
    """The arrays of an object of xarray by their names in the file, and the keywords for them. Not collective.

    Also what the object says of each array, by its full name, and its own attributes.

    Parameters
    ----------
    tree : Dataset or DataArray
        The object.
    keywords : mapping
        Those of the caller.
    kind : str
        The format of the file.
    grow_along : str or int, optional
        Of an append: the axis that grows.

    Raises
    ------
    ConfigError
        If the object holds what no file of numbers can hold, or nothing says which of its elements are padding.
    """
    content = _content_of(tree, keywords)
    dims = list(dict.fromkeys(dim for variable in content.variables.values() for dim in variable.dims))
    if grow_along is not None and grow_along not in dims:
        axes = ", ".join(map(repr, dims)) or "none"
        row = f"; a single row keeps its axis by .isel({grow_along}=[-1])" if grow_along in tree.coords else ""
        raise ConfigError(f"dim is {grow_along!r}; the axes of the object that is appended are {axes}. Pass one of these{row}")
    plans = _plans(keywords["plan"])
    lengths = _lengths(content, keywords["shape"], plans)
    for name, index in tree.xindexes.items():
        if hasattr(index, "n_unpadded"):  # that of `load_dataset`: it has the values whose type NaN has changed
            _note(lengths, index.unpadded.dim, index.n, index.n_unpadded)
            content.variables |= index.unpadded.create_variables({name: content.variables[name]})
    if grow_along is not None:
        content.variables = {name: x for name, x in content.variables.items() if grow_along in x.dims}
    shapes = {
        name: tuple(_unpadded(lengths, name, dim, n) for dim, n in zip(variable.dims, variable.shape, strict=True))
        for name, variable in content.variables.items()
    }
    values = {name: _cut(name, variable, shapes[name], lengths) for name, variable in content.variables.items()}
    if grow_along is not None:  # rows are stored as they are, and attributes are the file's: those that count are compared
        encoded = {name: (x, units_of(content.variables[name].attrs)) for name, x in values.items()}
        of_file: Mapping[str, Any] = {}
    else:
        encoded, of_file = _encode(content, values, shapes, kind, plans)
    full_names = {name: content.group + name for name in content.variables}
    data = [full_names[name] for name in content.variables if name not in content.coords]
    overrides: dict[str, Any] = {
        key: dict.fromkeys(data, keywords[key])
        for key, default in _OF_DATA.items()
        if not isinstance(keywords[key], Mapping) and keywords[key] != default
    }
    if content.is_single:
        overrides["dataset"] = OPTIONS["dataset"].default_in("save")  # its name is among the arrays
        overrides["attrs"] = None if keywords["attrs"] is None else {data[0]: keywords["attrs"]}
    overrides["shape"] = None
    overrides["plan"] = {}
    for name, variable in content.variables.items():
        if isinstance(variable.data, jax.Array):
            plan, x = _plan_of(full_names[name], plans), encoded[name][0]
            is_told = plan is not None or shapes[name] != x.shape or {*_cut_axes(variable)} <= {*lengths, *content.coords}
            is_its_plan = plan is not None and (plan.shape, plan.shape_global) == (shapes[name], x.shape)
            if is_told:  # of others nothing says what is padding: `padding_warning`
                extent = Extent(shapes[name], x.shape, (1,) * x.ndim, (0,) * x.ndim)
                overrides["plan"][full_names[name]] = plan if is_its_plan else extent  # a plan says if it was decoded, too
    arrays = {full_names[name]: x for name, (x, _) in encoded.items()}
    labels = {f"/{full_names[name]}": (content.variables[name].dims, attrs) for name, (_, attrs) in encoded.items()}
    return arrays, dict(keywords) | overrides, labels, of_file


def refuse_halo(name: str, extent: Extent) -> None:
    """ConfigError if an array has halos."""
    if any(extent.halo):
        raise ConfigError(
            f"'{name}' has halos, whose elements belong to other shards. Save shardload.unpad(x) instead; of an array that was "
            "computed from it, shardload.unpad(x, plan)"
        )


# --- what is in the object


@dataclass
class _Content:
    """The variables of an object, by name; which of them are coordinates; and the group of the file that they go to."""

    variables: dict[str, Any]
    coords: set[str]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    is_single: bool = False


def _content_of(tree: Any, keywords: Mapping[str, Any]) -> _Content:
    xarray, dataset = sys.modules["xarray"], keywords["dataset"]
    if isinstance(tree, xarray.Dataset):
        content = _Content(dict(tree.variables), set(tree.coords), tree.attrs)
    elif isinstance(tree, xarray.DataArray):
        content = _of_array(tree, dataset)
    else:
        raise ConfigError(
            f"found a {type(tree).__name__}; expected a Dataset. Save each group of it: save(path, tree['g'].to_dataset())"
        )
    for name, variable in content.variables.items():
        if not isinstance(name, str) or "/" in name or not name:
            raise ConfigError(f"a variable is called {name!r}; expected text without '/', such as 'rho'. Rename it")
        if not all(isinstance(dim, str) for dim in variable.dims):
            raise ConfigError(f"'{name}' has the axes {variable.dims!r}; expected text for each. Rename them")
        index = tree.xindexes.get(name) if name in content.coords else None
        if isinstance(index, xarray.indexes.PandasMultiIndex):
            raise ConfigError(
                f"'{name}' is part of an index of several levels, which no file has. Save the object with "
                f".reset_index('{index.dim}')"
            )
    return content


def _of_array(tree: Any, dataset: Any) -> _Content:
    """The variables of a DataArray: its own has the name that the caller passes, or its name, or the usual one."""
    has_its_name = dataset == OPTIONS["dataset"].default_in("save") and tree.name is not None
    name = tree.name if has_its_name else dataset
    if not isinstance(name, str) or not name.strip("/") or (has_its_name and "/" in name):
        raise ConfigError(f"the DataArray is called {name!r}; expected text without '/', such as 'rho'. Pass dataset='rho'")
    group, slash, name = name.strip("/").rpartition("/")
    coords = {key: coord.variable for key, coord in tree.coords.items()}
    if name in coords and coords[name].dims != tree.dims:
        raise ConfigError(f"the DataArray has the name of a coordinate of its own, '{name}'. Pass another one: dataset='rho'")
    coords.pop(name, None)
    return _Content({name: tree.variable} | coords, set(coords), {}, group + slash, True)


# --- padding


def _plans(plan: Any) -> dict[str, Plan]:
    """Plans by the names of their arrays in the new file; that of one array as ""."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(plan)
    plans = {"/".join(str(getattr(key, "key", key)).strip("/") for key in path): leaf for path, leaf in leaves}
    for leaf in plans.values():
        if not isinstance(leaf, Plan):
            raise ConfigError(f"plan has a {type(leaf).__name__}; expected the Plan or TreePlan that loaded the arrays")
    return plans


def _plan_of(full_name: str, plans: Mapping[str, Plan]) -> Plan | None:
    """The plan of an array: the only plan, or the one with its name, with its group or without; None if there is none."""
    names = ("", full_name, full_name.rpartition("/")[2])
    return next((plans[name] for name in names if name in plans), None)


def _note(lengths: Lengths, dim: str, n: int, n_unpadded: int) -> None:
    """Note how many of the `n` elements of an axis are no padding. ConfigError if another number is noted already."""
    before = lengths.setdefault(dim, {}).setdefault(n, n_unpadded)
    if before != n_unpadded:
        raise ConfigError(
            f"the axis '{dim}' of {n} elements has {before} without padding by one array or plan, and {n_unpadded} by "
            "another. Save these arrays in files of their own"
        )


def _unpadded(lengths: Lengths, name: str, dim: str, n: int) -> int:
    """Elements of an axis without padding. ConfigError if nothing says which are padding."""
    lengths_of_dim = lengths.get(dim, {})
    if n in lengths_of_dim:
        return lengths_of_dim[n]
    padded = {n_padded: n_unpadded for n_padded, n_unpadded in lengths_of_dim.items() if n_padded != n_unpadded}
    if not padded or n in lengths_of_dim.values():
        return n
    n_padded, n_unpadded = next(iter(padded.items()))
    raise ConfigError(
        f"'{name}' has {n} elements along '{dim}', which has {n_padded} where it was loaded, {n_unpadded} of them without "
        "padding, so nothing says which of these are padding. Select with select= in the load, or pass shape="
    )


def _lengths(content: _Content, shape: Any, plans: Mapping[str, Plan]) -> Lengths:
    lengths: Lengths = {}
    names = ArrayTree.of_names([f"/{content.group}{name}" for name in content.variables])
    shapes_in_order = names.spread("shape", shape, lambda value: not isinstance(value, Mapping), default=None)
    shapes = {place.dataset.rpartition("/")[2]: each for place, each in zip(names.places, shapes_in_order, strict=True)}
    if not isinstance(shape, Mapping):  # coordinates have other axes
        shapes |= dict.fromkeys(content.coords)
    for plan in plans.values():
        lengths_by_dim = zip(axes_of(plan), plan.shape_global, plan.extent.shape_without_halo, plan.shape, strict=True)
        for dim, n_with_halo, n_padded, n_unpadded in lengths_by_dim:
            if n_with_halo != n_padded and any(x.sizes.get(dim) == n_with_halo for x in content.variables.values()):
                refuse_halo(next(name for name, x in content.variables.items() if dim in x.dims), plan.extent)
            _note(lengths, dim, n_padded, n_unpadded)
    for name, variable in content.variables.items():
        if shapes[name] is not None:
            extent = extent_of(variable, shapes[name], f"'{name}'")
        elif loaded_as(variable.data) is not None:
            extent = extent_of(variable.data, None, f"'{name}'")
            refuse_halo(name, extent)
        else:
            continue
        for dim, n_padded, n_unpadded in zip(variable.dims, variable.shape, extent.shape, strict=True):
            _note(lengths, dim, n_padded, n_unpadded)
    return lengths


def _cut_axes(variable: Any) -> list[str]:
    """The axes along which devices hold parts of a sharded variable: others have no padding."""
    cut = variable.data.sharding.shard_shape(variable.shape)
    return [dim for dim, n, n_of_shard in zip(variable.dims, variable.shape, cut, strict=True) if n != n_of_shard]


def _cut(name: str, variable: Any, shape: tuple[int, ...], lengths: Lengths) -> Any:
    """The values of a variable: those of NumPy without padding."""
    x = variable.data
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray):
        is_lazy = hasattr(x, "compute")  # of dask; others are pandas': categories, intervals, periods, dates of a time zone
        fix = "Pass ds.compute(), or load it with shardload" if is_lazy else f"Leave it out: ds.drop_vars({name!r})"
        raise ConfigError(
            f"'{name}' holds a {type(x).__module__}.{type(x).__name__}; expected a jax.Array or a NumPy array. {fix}"
        )
    index: Any = (*map(slice, shape), ...)  # with the dots an array without axes stays one
    x = as_unpadded(variable[index])
    may_have_padding = shape != variable.shape or variable.size not in lengths.get(name, {})
    if variable.dims == (name,) and may_have_padding and x.dtype.kind in "fM" and np.isnan(x).any():
        raise ConfigError(
            f"the coordinate '{name}' has {np.isnan(x).sum()} NaN among {shape[0]} elements, as to_xarray pads it: nothing "
            f"says which elements along '{name}' are padding, or they are not at its end. Pass the plan that loaded the "
            "arrays, plan=, or shape=; or call shardload.unpad before an axis is flipped or its coordinate replaced; or select "
            "what shall be saved"
        )
    return x


# --- what a file has of it


def _encode(
    content: _Content, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], kind: str, plans: Mapping[str, Plan]
) -> tuple[dict[str, tuple[Any, dict[str, Any]]], Mapping[str, Any]]:
    """The values and attributes that a file has of each variable, as xarray writes them; and its own attributes."""
    xarray = sys.modules["xarray"]
    dataset = _dataset_of(content, values, shapes, plans)
    variables, of_file = xarray.conventions.encode_dataset_coordinates(dataset)
    for name, variable in variables.items():
        if isinstance(values[name], jax.Array):  # attributes do not depend on values, so the encoders get none
            variables[name] = variable._replace(data=np.zeros((0,) * variable.ndim, variable.dtype))
    try:
        for name, variable in variables.items():
            bounds, is_date = variable.attrs.get("bounds"), variable.dtype.kind in "mMO"
            if bounds in variables and is_date and "units" not in variable.encoding:
                units = xarray.conventions.encode_cf_variable(variable, name=name).attrs  # those of its bounds, too
                variable.encoding.update({key: units[key] for key in UNITS if key in units})
        variables, of_file = xarray.conventions.cf_encoder(variables, of_file)
    except (NotImplementedError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"xarray cannot write this: {error}") from None
    return {name: _as_stored(name, variables[name], values[name], content, kind) for name in content.variables}, of_file


def _dataset_of(
    content: _Content, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], plans: Mapping[str, Plan]
) -> Any:
    """A Dataset without padding and packing, with stand-ins of the same shape for sharded values."""
    xarray, variables = sys.modules["xarray"], {}
    for name, variable in content.variables.items():
        plan = None if name in content.coords else _plan_of(content.group + name, plans)
        attrs_in_file = plan.info.attrs if plan is not None and plan.is_decoded else {}
        was_packed = not PACKING.isdisjoint([*variable.encoding, *attrs_in_file])
        x = values[name]
        stand_in = np.broadcast_to(np.zeros((), x.dtype), shapes[name]) if isinstance(x, jax.Array) else x
        variables[name] = _plain_variable(variable, stand_in, was_packed)
    coords = {name: variable for name, variable in variables.items() if name in content.coords or name in variable.dims}
    data = {name: variable for name, variable in variables.items() if name not in coords}
    return xarray.Dataset(data, xarray.Coordinates(coords, indexes={}), content.attrs)


def _plain_variable(variable: Any, x: Any, was_packed: bool) -> Any:
    """A variable with other values, without attributes that only count for packed ones. It keeps the encoding of dates."""
    attrs = {
        key: value
        for key, value in variable.attrs.items()
        if not (was_packed and key in VALID_RANGE and np.asarray(value).dtype.kind in "iu")  # of the packed integers
    }
    is_date = isinstance(x, np.ndarray) and x.dtype.kind in "mMO"
    dropped = _OF_FILES - _OF_DATES if is_date else _OF_FILES
    encoding = {key: value for key, value in variable.encoding.items() if key not in dropped}
    if encoding.get("_FillValue", 0) is not None:
        encoding.pop("_FillValue", None)
    if "units" in encoding:
        encoding["units"] = in_full(encoding["units"])  # xarray reads "h since", and cannot write it
    return sys.modules["xarray"].Variable(variable.dims, x, attrs, encoding)


def _as_stored(name: str, variable: Any, x: Any, content: _Content, kind: str) -> tuple[Any, dict[str, Any]]:
    """The values and attributes of a variable that xarray has encoded."""
    attrs = {key: value for key, value in variable.attrs.items() if value is not None or key != "_FillValue"}
    if x.dtype.kind == "b":
        if kind == "netcdf4":  # which has no booleans
            return x.astype("int8"), attrs
        attrs.pop("dtype", None)
        return x, attrs
    if isinstance(x, jax.Array):
        return x, attrs
    x = variable.values
    if why := refusal(x.dtype):
        role = "coordinate" if name in content.coords else "variable"
        raise ConfigError(f"the {role} '{name}' holds {why}, and save writes numbers. Leave it out: ds.drop_vars('{name}')")
    if variable.dims == (name,) and x.dtype.kind == "f" and not np.isnan(x).any():
        attrs.pop("_FillValue", None)  # CF wants none of the coordinates of an axis
    return x, attrs
