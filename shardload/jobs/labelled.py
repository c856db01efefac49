"""How do loaded arrays get their names, coordinates and attributes back? As objects of xarray, which is imported only here.

The values stay where they are: a `DataArray` wraps the `jax.Array`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from shardload.errors import ConfigError
from shardload.jobs.plan import Plan
from shardload.planning.selection import Selection
from shardload.values.decoding import ATTRIBUTES

__all__ = ["to_xarray"]


def to_xarray(tree: Any, plan: Any) -> Any:
    """Wrap loaded arrays with the names of their axes, their coordinates and attributes.

    The values are not copied, and stay sharded. Coordinates are those that the plan knows (at most 64 KiB each), cut as the
    array was selected. Attributes that were applied by `decode` are in ``encoding``, as xarray has them. Along an axis with
    padding, floating point coordinates go on with NaN; other coordinates are left out.

    Collective: no.

    Parameters
    ----------
    tree : jax.Array, or a tree of them
        What `load` or `Plan.execute` returned.
    plan : Plan, or a tree of them
        The plan that was executed, or that `plan` makes of the same arguments.

    Returns
    -------
    xarray.DataArray, or a tree of them
        A dict of arrays with names as keys becomes an `xarray.Dataset`.

    Raises
    ------
    ConfigError
        If xarray is not installed, or the plan is not that of the array.

    Examples
    --------
    >>> import h5py, jax, numpy as np, shardload
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> shardload.initialize()
    >>> if jax.process_index() == 0:
    ...     with h5py.File("named.h5", "w") as file:
    ...         file["density"] = np.ones((8, 4), "float32")
    ...         file["x"] = np.arange(8.0)
    ...         file["x"].make_scale("x")
    ...         file["density"].dims[0].attach_scale(file["x"])
    >>> plan = shardload.plan("named.h5", Mesh(np.array(jax.devices()), "a"), P(), select={"x": slice(2, 5)})
    >>> found = shardload.to_xarray(plan.execute(), plan)
    >>> found.dims, found.coords["x"].values
    (('x', 'dim_1'), array([2., 3., 4.]))
    """
    try:
        import xarray
    except ImportError:
        raise ConfigError("to_xarray needs xarray. Type: pip install 'shardload[xarray]'") from None
    if isinstance(plan, Plan):
        if not isinstance(tree, jax.Array):
            raise ConfigError(
                f"the plan is of one array, but a {type(tree).__name__} was passed. Pass the array that it loaded"
            )
        return _wrap(xarray, tree, plan)
    if isinstance(tree, Mapping):
        wrapped = {key: to_xarray(value, _of(plan, key)) for key, value in tree.items()}
        if all(isinstance(key, str) and isinstance(value, xarray.DataArray) for key, value in wrapped.items()):
            return xarray.Dataset({key: value.variable for key, value in wrapped.items()}, _shared_coords(xarray, wrapped))
        return wrapped
    if isinstance(tree, list | tuple):
        return type(tree)(to_xarray(value, _of(plan, k)) for k, value in enumerate(tree))
    raise ConfigError(f"expected a plan, or a tree of plans like the tree of arrays; found {type(plan).__name__}")


def _of(plan: Any, key: Any) -> Any:
    try:
        return plan[key]
    except (LookupError, TypeError):
        raise ConfigError(f"the plan has nothing for [{key!r}]. Pass the plan that loaded these arrays") from None


def _shared_coords(xarray: Any, wrapped: Mapping[str, Any]) -> dict[str, Any]:
    """The coordinates of all arrays. Raises ConfigError if two of the same name differ."""
    found: dict[str, Any] = {}
    for array in wrapped.values():
        for name, coordinate in array.coords.items():
            if name in found and not found[name].identical(coordinate.variable):
                raise ConfigError(
                    f"the arrays have different coordinates {name!r}, so they cannot share a Dataset. Wrap them one by one"
                )
            found[name] = coordinate.variable
    return found


def _wrap(xarray: Any, array: jax.Array, plan: Plan) -> Any:
    if array.shape not in (plan.shape, plan.shape_global):
        raise ConfigError(
            f"the array has shape {array.shape}, but this plan of {plan.info} gives {plan.shape_global}. Pass the plan "
            "that loaded it"
        )
    info, selection = plan.info, plan._layout.source.selection
    dims = [name or f"dim_{axis}" for axis, name in enumerate(info.dims)]
    if len(set(dims)) < len(dims):
        raise ConfigError(f"{info} has the axes {dims}, and xarray takes each name once only. Pass the array as it is")
    kept = [dims[axis] for axis in selection.kept]
    n = dict(zip(kept, array.shape, strict=True))
    coords: dict[str, Any] = {}
    for name, one in info.coords.items():
        if one.values is not None and set(one.dims) <= set(dims):
            cut = _cut(one.values, tuple(str(dim) for dim in one.dims), dims, selection, n)
            if cut is not None:
                attrs, encoding = _split(one.attrs)
                coords[name] = xarray.Variable(*cut, attrs, encoding)
    attrs, encoding = _split(info.attrs) if plan.is_decoded else (dict(info.attrs), {})
    attrs.pop("coordinates", None)
    found = xarray.DataArray(array, dims=kept, coords=coords, attrs=attrs, name=info.dataset.rpartition("/")[2])
    found.encoding.update(encoding)
    return found


def _split(attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes that describe values, and those that were applied to the stored numbers."""
    encoding = {key: attrs[key] for key in ATTRIBUTES if key in attrs and not key.startswith("valid")}
    return {key: value for key, value in attrs.items() if key not in encoding}, encoding


def _cut(
    values: np.ndarray[Any, Any], own: tuple[str, ...], dims: list[str], selection: Selection, n: Mapping[str, int]
) -> tuple[list[str], np.ndarray[Any, Any]] | None:
    """The names of the axes and the values of a coordinate of a selected and padded array; None if it cannot be padded."""
    region = selection.region
    index: list[Any] = []
    for name in own:
        axis = dims.index(name)
        index.append(slice(region.start[axis], region.stop[axis]) if name in n else region.start[axis])
    cut = np.asarray(values[tuple(index)])
    names = [name for name in own if name in n]
    more = [(0, n[name] - size) for name, size in zip(names, cut.shape, strict=True)]
    if any(tail for _, tail in more):
        if cut.dtype.kind != "f":
            return None
        cut = np.pad(cut, more, constant_values=np.nan)
    return names, cut
