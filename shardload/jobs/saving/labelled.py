"""What does an object of xarray say of its arrays? Their names, axes, attributes and coordinates, as `save` takes them.

The opposite direction of `loading.labelled`. xarray is not imported: whoever has such an object has imported it.

1. Each axis gets its length without padding, by its name: from plans, shapes, and arrays that a load returned (`_Lengths`).
2. NumPy values are cut to it. Coordinates that `to_xarray` left out, because no integers can pad them, come from the plan.
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
from shardload.formats.growing import UNITS, units_of
from shardload.jobs.loading.labelled import axes_of, coordinates_of, haloed_axes
from shardload.jobs.loading.plan import Plan
from shardload.jobs.loading.tree_plan import TreePlan
from shardload.jobs.trees import ArrayTree
from shardload.options import AUTO, OPTIONS
from shardload.values.decoding import PACKING, VALID_RANGE

_OF_DATA = {"chunks": AUTO, "shards": None, "dims": None, "like": None}  # one value is for arrays that are no coordinates
# What is packed in a file is written as its values; what `xarray` reads beside values stays.
_OF_DATES = {*UNITS, "dtype"}
_OF_FILES = PACKING | _OF_DATES | {"missing_value", "char_dim_name"}


@dataclass(frozen=True)
class Labelled:
    """What `save` is given, if it is given an object of xarray.

    Attributes
    ----------
    arrays : dict
        Arrays by their names in the file.
    given : dict
        The keywords of the caller, for these arrays.
    dims, attrs : dict
        What the object says of each array, by its full name: the names of its axes, and its attributes.
    of_file : mapping
        Its own attributes.
    """

    arrays: dict[str, Any]
    given: dict[str, Any]
    dims: dict[str, tuple[str, ...]]
    attrs: dict[str, dict[str, Any]]
    of_file: Mapping[str, Any]


def is_labelled(tree: Any) -> bool:
    """True for a Dataset, DataArray or DataTree of xarray."""
    xarray = sys.modules.get("xarray")
    kinds = [getattr(xarray, name, None) for name in ("Dataset", "DataArray", "DataTree")]
    return any(kind is not None and isinstance(tree, kind) for kind in kinds)


def of_xarray(tree: Any, given: Mapping[str, Any], kind: str, dim: str | int | None = None) -> Labelled:
    """The arrays of an object of xarray, and the keywords for them. Not collective.

    Parameters
    ----------
    tree : Dataset or DataArray
        The object.
    given : mapping
        The keywords of the caller.
    kind : str
        The format of the file.
    dim : str or int, optional
        Of an append: the axis that grows.

    Raises
    ------
    ConfigError
        If the object holds what no file of numbers can hold, or nothing says which of its elements are padding.
    """
    found = _parts(tree, given)
    plans = _plans(given["plan"])
    lengths = _lengths(found, given["shape"], plans)
    if dim is not None:
        _keep_growing(found, dim, lengths, plans)
    else:
        _add_left_out(found, plans)
    shapes = {
        name: tuple(lengths.of(name, dim, n) for dim, n in zip(one.dims, one.shape, strict=True))
        for name, one in found.variables.items()
    }
    values = {name: _cut(name, one, shapes[name], found) for name, one in found.variables.items()}
    if dim is not None:  # rows are values as they are stored, and attributes are the file's: those that count are compared
        encoded = {name: (one, units_of(found.variables[name].attrs)) for name, one in values.items()}
        of_file: Mapping[str, Any] = {}
    else:
        encoded, of_file = _encoded(found, values, shapes, kind, plans)
    own = {name: f"{found.group}{name}" for name in found.variables}
    data = [own[name] for name in found.variables if name not in found.coords]
    more = {key: given[key] for key in _OF_DATA if not isinstance(given[key], Mapping) and given[key] != _OF_DATA[key]}
    more = {key: dict.fromkeys(data, value) for key, value in more.items()}
    if found.is_single and given["attrs"] is not None:
        more["attrs"] = {data[0]: given["attrs"]}
    more |= {"dataset": OPTIONS["dataset"].default_in("save"), "shape": None}
    more["plan"] = {
        own[name]: _loaded_by(name, x, shapes[name], plans) for name, (x, _) in encoded.items() if isinstance(x, jax.Array)
    }
    return Labelled(
        arrays={own[name]: x for name, (x, _) in encoded.items()},
        given=dict(given) | more,
        dims={f"/{own[name]}": one.dims for name, one in found.variables.items()},
        attrs={f"/{own[name]}": attrs for name, (_, attrs) in encoded.items()},
        of_file=of_file,
    )


def refuse_halo(name: str, extent: Extent) -> None:
    """ConfigError if an array has halos."""
    if any(extent.halo):
        raise ConfigError(f"'{name}' has halos, whose elements belong to other shards. Save shardload.unpad(x) instead")


# --- what is in the object


@dataclass
class _Parts:
    """The variables of an object, by name; which of them are coordinates; and the group of the file that they go to."""

    variables: dict[str, Any]
    coords: set[str]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    is_single: bool = False


def _parts(tree: Any, given: Mapping[str, Any]) -> _Parts:
    xarray, dataset = sys.modules["xarray"], given["dataset"]
    if isinstance(tree, xarray.Dataset):
        if dataset != OPTIONS["dataset"].default_in("save"):
            raise ConfigError(
                f"dataset is {dataset!r}, the name of an array that is passed by itself, but the variables of a Dataset have "
                "names of their own. Leave it out"
            )
        found = _Parts(dict(tree.variables), set(tree.coords), tree.attrs)
    elif isinstance(tree, xarray.DataArray):
        found = _of_array(tree, dataset)
    else:
        raise ConfigError(
            f"found a {type(tree).__name__}; expected a Dataset. Save each group of it: save(path, tree['g'].to_dataset())"
        )
    for name, one in found.variables.items():
        if not isinstance(name, str) or "/" in name or not name:
            raise ConfigError(f"a variable is called {name!r}; expected text without '/', such as 'rho'. Rename it")
        if not all(isinstance(dim, str) for dim in one.dims):
            raise ConfigError(f"'{name}' has the axes {one.dims!r}; expected text for each. Rename them")
        index = tree.xindexes.get(name) if name in found.coords else None
        if isinstance(index, xarray.indexes.PandasMultiIndex):
            raise ConfigError(
                f"'{name}' is part of an index of several levels, which no file has. Save the object with "
                f".reset_index('{index.dim}')"
            )
    if not found.variables:
        raise ConfigError("there are no arrays to save: the Dataset is empty")
    return found


def _of_array(tree: Any, dataset: Any) -> _Parts:
    """The variables of a DataArray: its own has the name that the caller gives, or its name, or the usual one."""
    is_own = dataset == OPTIONS["dataset"].default_in("save") and tree.name is not None
    name = tree.name if is_own else dataset
    if not isinstance(name, str) or not name.strip("/") or (is_own and "/" in name):
        raise ConfigError(f"the DataArray is called {name!r}; expected text without '/', such as 'rho'. Pass dataset='rho'")
    group, slash, name = name.strip("/").rpartition("/")
    coords = {key: one.variable for key, one in tree.coords.items()}
    if name in coords and coords[name].dims != tree.dims:
        raise ConfigError(f"the DataArray has the name of a coordinate of its own, '{name}'. Pass another one: dataset='rho'")
    return _Parts(
        {name: tree.variable} | {key: one for key, one in coords.items() if key != name},
        set(coords) - {name},
        {},
        group + slash,
        True,
    )


def _keep_growing(found: _Parts, dim: Any, lengths: _Lengths, plans: Mapping[str, Plan]) -> None:
    """Keep the variables with the axis that grows, and no others."""
    dims = list(dict.fromkeys(dim for one in found.variables.values() for dim in one.dims))
    if dim not in dims:
        told = ", ".join(map(repr, dims))
        raise ConfigError(f"dim is {dim!r}; the axes of the object that is appended are {told or 'none'}. Pass one of these")
    _add_left_out(found, plans)
    found.variables = {name: one for name, one in found.variables.items() if dim in one.dims}


# --- padding


def _plans(given: Any) -> dict[str, Plan]:
    """Plans by the names of their arrays; that of one array as ""."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(given.plans if isinstance(given, TreePlan) else given)
    found = {"/".join(str(getattr(key, "key", key)).strip("/") for key in path): one for path, one in leaves}
    for one in found.values():
        if not isinstance(one, Plan):
            raise ConfigError(f"plan has a {type(one).__name__}; expected the Plan or TreePlan that loaded the arrays")
    return found


class _Lengths:
    """The lengths of axes without padding, by their names and their lengths with it."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, int]] = {}

    def note(self, dim: str, n: int, own: int) -> None:
        """An axis of `n` elements has `own` of its own. ConfigError if it is known with others."""
        before = self._found.setdefault(dim, {}).setdefault(n, own)
        if before != own:
            raise ConfigError(
                f"the axis '{dim}' of {n} elements has {before} without padding by one array or plan, and {own} by another. "
                "Save these arrays in files of their own"
            )

    def of(self, name: str, dim: str, n: int) -> int:
        """Elements of an axis without padding. ConfigError if nothing says which are padding."""
        known = self._found.get(dim, {})
        if n in known:
            return known[n]
        padded = {held: own for held, own in known.items() if held != own}
        if not padded or n in known.values():
            return n
        held, own = next(iter(padded.items()))
        raise ConfigError(
            f"'{name}' has {n} elements along '{dim}', which has {held} where it was loaded, {own} of them without padding, so "
            "nothing says which of these are padding. Select with select= in the load, or pass shape="
        )


def _lengths(found: _Parts, shape: Any, plans: Mapping[str, Plan]) -> _Lengths:
    made = _Lengths()
    names = ArrayTree.of_names("", [f"/{found.group}{name}" for name in found.variables])
    each_shape = names.spread("shape", shape, lambda value: not isinstance(value, Mapping), default=None)
    shapes = {place.dataset.rpartition("/")[2]: one for place, one in zip(names.places, each_shape, strict=True)}
    if not isinstance(shape, Mapping):  # coordinates have other axes
        shapes |= dict.fromkeys(found.coords)
    for plan in plans.values():
        each = zip(axes_of(plan), plan.shape_global, plan.shape_padded, plan.shape, strict=True)
        for dim, held, padded, own in each:
            if held != padded and any(one.sizes.get(dim) == held for one in found.variables.values()):
                refuse_halo(next(name for name, one in found.variables.items() if dim in one.dims), plan.extent)
            made.note(dim, padded, own)
    for name, one in found.variables.items():
        if shapes[name] is not None:
            extent = extent_of(one, shapes[name], f"'{name}'")
        elif loaded_as(one.data) is not None:
            extent = extent_of(one.data, None, f"'{name}'")
            refuse_halo(name, extent)
        else:
            continue
        for dim, held, own in zip(one.dims, one.shape, extent.shape, strict=True):
            made.note(dim, held, own)
    return made


def _add_left_out(found: _Parts, plans: Mapping[str, Plan]) -> None:
    """Add coordinates that `to_xarray` left out because they cannot be padded."""
    xarray = sys.modules["xarray"]
    for plan in plans.values():
        if plan.shape == plan.shape_padded:
            continue
        kept = axes_of(plan)
        padded = dict(zip(kept, plan.shape_padded, strict=True))
        haloed = haloed_axes(plan)
        known = coordinates_of(plan, padded)
        for name, one in coordinates_of(plan, dict(zip(kept, plan.shape, strict=True))).items():
            is_here = any(all(x.sizes.get(dim) == padded[dim] for dim in one.dims) for x in found.variables.values())
            if name not in known and name not in found.variables and is_here and haloed.isdisjoint(one.cut):
                found.variables[name] = xarray.Variable(one.dims, one.values, one.attrs, one.encoding)
                found.coords.add(name)


def _cut(name: str, one: Any, shape: tuple[int, ...], found: _Parts) -> Any:
    """The values of a variable: those of NumPy without padding."""
    x = one.data
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray):
        raise ConfigError(
            f"'{name}' holds a {type(x).__module__}.{type(x).__name__}; expected a jax.Array or a NumPy array. Pass "
            "ds.compute(), or load it with shardload"
        )
    index: Any = (*map(slice, shape), ...)  # with the dots an array without axes stays one
    x = x[index]
    if one.dims == (name,) and x.dtype.kind == "f" and np.isnan(x).any() and (shape != one.shape or np.isnan(x[-1])):
        raise ConfigError(
            f"the coordinate '{name}' has {np.isnan(x).sum()} NaN among {shape[0]} elements, as to_xarray pads it: nothing "
            f"says which elements along '{name}' are padding, or they are not at its end. Pass the plan that loaded the "
            "arrays, plan=, or select what shall be saved"
        )
    return x


def _loaded_by(name: str, x: Any, shape: tuple[int, ...], plans: Mapping[str, Plan]) -> Plan | Extent:
    """What `save` needs to know of an array: its plan, which also says if it was decoded, or its shape."""
    plan = _plan_of(name, plans)
    if plan is not None and (plan.shape, plan.shape_global) == (shape, x.shape):
        return plan
    return Extent(shape, x.shape, (1,) * x.ndim, (0,) * x.ndim)


def _plan_of(name: str, plans: Mapping[str, Plan]) -> Plan | None:
    return plans.get("", plans.get(name))


# --- what a file has of it


def _encoded(
    found: _Parts, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], kind: str, plans: Mapping[str, Plan]
) -> tuple[dict[str, tuple[Any, dict[str, Any]]], Mapping[str, Any]]:
    """The values and attributes that a file has of each variable, as xarray writes them; and its own attributes.

    ``encoding`` says how values were stored in the file that they come from. Of it only the units of dates are used.
    """
    xarray = sys.modules["xarray"]
    plain = {}
    for name, one in found.variables.items():
        x = values[name]
        is_packed = not PACKING.isdisjoint(one.encoding)
        plan = _plan_of(name, plans)
        if plan is not None and plan.is_decoded and name not in found.coords:
            is_packed |= not PACKING.isdisjoint(plan.info.attrs)
        attrs = {key: value for key, value in one.attrs.items() if not (is_packed and key in VALID_RANGE and _is_whole(value))}
        is_date = isinstance(x, np.ndarray) and x.dtype.kind in "mMO"
        encoding = {key: value for key, value in one.encoding.items() if key not in _OF_FILES or (is_date and key in _OF_DATES)}
        if encoding.get("_FillValue", 0) is not None:
            encoding.pop("_FillValue", None)
        stand_in = np.broadcast_to(np.zeros((), x.dtype), shapes[name]) if isinstance(x, jax.Array) else x
        plain[name] = xarray.Variable(one.dims, stand_in, attrs, encoding)
    beside = {name: one for name, one in plain.items() if name in found.coords or name in one.dims}
    data = {name: one for name, one in plain.items() if name not in beside}
    whole = xarray.Dataset(data, xarray.Coordinates(beside, indexes={}), found.attrs)
    variables, of_file = xarray.conventions.encode_dataset_coordinates(whole)
    for name, one in variables.items():
        if isinstance(values[name], jax.Array):  # attributes do not depend on values
            variables[name] = one._replace(data=np.zeros((0,) * one.ndim, one.dtype))
    try:
        for name, one in variables.items():
            if one.attrs.get("bounds") in variables and one.dtype.kind in "mMO" and "units" not in one.encoding:
                units = xarray.conventions.encode_cf_variable(one, name=name).attrs  # those of its bounds, too
                one.encoding.update({key: units[key] for key in UNITS if key in units})
        variables, of_file = xarray.conventions.cf_encoder(variables, of_file)
    except (NotImplementedError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"xarray cannot write this: {error}") from None
    made = {name: _as_stored(name, variables[name], values[name], found, kind) for name in found.variables}
    return made, of_file


def _as_stored(name: str, one: Any, x: Any, found: _Parts, kind: str) -> tuple[Any, dict[str, Any]]:
    """The values and attributes of a variable that xarray has encoded."""
    attrs = {key: value for key, value in one.attrs.items() if value is not None or key != "_FillValue"}
    if x.dtype.kind == "b":
        if kind == "netcdf4":  # which has no booleans
            return x.astype("int8"), attrs
        attrs.pop("dtype", None)
        return x, attrs
    if isinstance(x, jax.Array):
        return x, attrs
    x = one.values
    if x.dtype.kind in "OSUTV":
        what = "coordinate" if name in found.coords else "variable"
        raise ConfigError(
            f"the {what} '{name}' holds text or objects, and save writes numbers. Leave it out: ds.drop_vars('{name}')"
        )
    if one.dims == (name,) and x.dtype.kind == "f" and not np.isnan(x).any():
        attrs.pop("_FillValue", None)  # CF wants none of the coordinates of an axis
    return x, attrs


def _is_whole(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "iu"
