"""How do loaded arrays get their names, coordinates and attributes back? As objects of xarray.

The values stay where they are: a `DataArray` wraps the `jax.Array`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from itertools import combinations
from typing import Any

import jax
import numpy as np

from shardload.arrays.padding import version_of
from shardload.errors import ConfigError, LeftOutWarning, SourceError
from shardload.formats.contract.array import ArrayInfo, Labels, Note, OnDemand, names_in, some
from shardload.formats.labelling import COORDINATE_NBYTES, read_now
from shardload.jobs.consistency import version_of_state
from shardload.jobs.loading.plan import Plan, TreePlan
from shardload.jobs.trees import Where, node_of, rebuilt, text_of
from shardload.planning.selection import Selection
from shardload.system.caller import warn_once
from shardload.units import format_nbytes
from shardload.values.decoding import ATTRIBUTES, VALID_RANGE

_NAMES_OF_COORDINATES = "coordinates"  # an attribute that objects of xarray do not have: their coordinates say it
UNPADDED = "unpadded_dtype"  # an encoding of a coordinate: its type, before it went on with NaN
_EXACT = 2**53  # up to which floating point numbers are all integers
_ONE_BY_ONE = "Wrap each by itself: jax.tree.map(shardload.to_xarray, arrays, plan.plans)"


def to_xarray(tree: Any, plan: Any) -> Any:
    """Wrap loaded arrays with the names of their axes, their coordinates and attributes.

    The values are not copied, and stay sharded. Coordinates are those that the plan knows (at most 16 MiB each), cut as the
    array was selected. Attributes that were applied by `decode` are in ``encoding``, as xarray has them. Along an axis with
    padding, coordinates go on with NaN (`save` writes integers again); along an axis with a halo, they are left out. A
    coordinate that is shorter than its axis, because the file is not complete, goes on with NaN.

    Collective: no.

    Parameters
    ----------
    tree : jax.Array, or a tree of them
        What `load`, `Plan.execute` or `unpad` returned.
    plan : Plan, TreePlan, or a tree of Plan
        The plan that was executed, or that `plan` makes of the same arguments.

    Returns
    -------
    xarray.DataArray, or a tree of them
        A dict of arrays with names as keys becomes an `xarray.Dataset`; what is a coordinate of the others becomes one there.
        Its attributes are those of the file, or of the group that the arrays are in; of several groups, those alike in all.

    Warns
    -----
    LeftOutWarning
        On rank 0: names the coordinates that are left out because they are too large, hold no numbers, or do not fit the
        axes of their arrays.

    Raises
    ------
    ConfigError
        If xarray is not installed, the plan is not that of the arrays, or arrays of a dict do not share their axes.
    SourceError
        If the file, in which names and coordinates are looked up now, cannot be read by this process, or has changed since the
        arrays were loaded.

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
    xarray = import_xarray("to_xarray")
    tree_of_plans = plan.plans if isinstance(plan, TreePlan) else plan
    plans = [leaf for leaf in jax.tree.leaves(tree_of_plans) if isinstance(leaf, Plan)]  # `_wrap_tree` says what is none
    read_now(each_plan.info.labels for each_plan in plans if isinstance(each_plan.info.labels, OnDemand))
    wrapped = _wrap_tree(xarray, tree, tree_of_plans, ())
    _warn_of_left_out(plans, isinstance(plan, Plan))
    return wrapped


def import_xarray(call: str) -> Any:
    """The package; ConfigError if it is not installed."""
    try:
        import xarray
    except ImportError:
        raise ConfigError(f"{call} needs xarray. Type: pip install 'shardload[xarray]'") from None
    return xarray


def _warn_of_left_out(plans: Sequence[Plan], is_single: bool) -> None:
    """Say which coordinates and attributes the objects of xarray do not have, because a plan does not."""
    rank, infos = jax.process_index(), [plan.info for plan in plans]
    taken, coords = {info.dataset for info in infos}, set[str]()
    for plan in plans:
        for name, coord in plan.info.coords.items():
            axes = None if coord.values is None else _axes_of_coordinate(name, coord.dims, coord.values.shape, plan)
            if axes is None and (coord.values is None or {*coord.dims} - {None} <= {*_dims(plan)}):
                coords.add(coord.dataset)
            elif axes is not None:
                taken.add(coord.dataset)
    if coords := coords - taken:
        limit = format_nbytes(COORDINATE_NBYTES)
        why = f"they hold no numbers, or more than {limit} of them, or an array has many so large, or they do not fit its axes"
        warn_once(f"left out coordinates, because {why}: {some(sorted(coords))}", LeftOutWarning, rank)
    left_out: dict[str, None] = {}
    for info in infos:
        owners = {info.dataset: info.attrs} | ({} if is_single else {"the group": info.group_attrs})
        owners |= {coord.dataset: coord.attrs for coord in info.coords.values()}
        left_out |= dict.fromkeys(
            f"{key!r} of {owner}" for owner, attrs in owners.items() for key in attrs if isinstance(attrs[key], Note)
        )
    if left_out:
        names = some(list(left_out))
        hint = "Set them by hand, or save with like= or copy the file"
        text = f"left out attributes that are too long, or cannot be read: {names}. {hint}"
        warn_once(text, LeftOutWarning, rank)


def _wrap_tree(xarray: Any, tree: Any, plan: Any, where: Where) -> Any:
    """`to_xarray` of the part of a tree to which the keys `where` lead."""
    if isinstance(tree, (jax.Array, np.ndarray)) and isinstance(plan, Plan):
        return _wrap(xarray, tree, plan)
    children, plans = node_of(tree), dict(node_of(plan) or ())
    keys = [key for key, _ in children or ()]
    if not keys or set(keys) != set(plans):
        place = f" at {text_of(where)}" if where else ""
        kinds = f"{type(tree).__name__} and {type(plan).__name__}"
        if keys and plans:
            kinds = f"arrays {', '.join(map(str, keys))} and plans {', '.join(map(str, plans))}"
        raise ConfigError(
            f"expected arrays and the plan that loaded them{place}, both alone or both in a tree with the same keys; found "
            f"{kinds}. Pass what load returned, and what shardload.plan returns for the same arguments; with one array of a "
            "tree, its plan: plan.plans['name']"
        )
    wrapped = [_wrap_tree(xarray, child, plans[key], (*where, key)) for key, child in children or ()]
    names = [getattr(key, "key", key) for key in keys]
    of_arrays = all(isinstance(array, xarray.DataArray) for array in wrapped)
    if not of_arrays or not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in names):
        return rebuilt(tree, wrapped)
    return _dataset(xarray, dict(zip(names, wrapped, strict=True)), {getattr(key, "key", key): plans[key] for key in keys})


def _dataset(xarray: Any, wrapped: dict[str, Any], plans: Mapping[str, Plan]) -> Any:
    """The Dataset of some arrays.

    Raises
    ------
    ConfigError
        If the arrays do not share their axes and coordinates.
    """
    infos = {key: plan.info for key, plan in plans.items()}
    lengths: dict[str, tuple[tuple[int, int], str]] = {}  # with padding and without
    coords: dict[str, Any] = {}
    for key, array in wrapped.items():
        for dim, n in zip(array.dims, zip(array.shape, plans[key].shape, strict=True), strict=True):
            first_length, first_key = lengths.setdefault(dim, (n, key))
            if first_length != n:
                k = int(first_length[0] == n[0])
                raise ConfigError(
                    f"{dim!r} has {first_length[k]} elements in [{first_key!r}] and {n[k]} in [{key!r}], so these arrays "
                    f"cannot share a Dataset. {_ONE_BY_ONE}"
                )
        for name, coordinate in array.coords.variables.items():
            if name in coords and not coords[name].identical(coordinate):
                raise ConfigError(
                    f"the arrays have different coordinates {name!r}, so they cannot share a Dataset. {_ONE_BY_ONE}"
                )
            coords[name] = coordinate
    coordinate_names = {name: coord.dataset for info in infos.values() for name, coord in info.coords.items()}
    for key in wrapped:
        if key in coords and coordinate_names[key] != infos[key].dataset:
            raise ConfigError(f"[{key!r}] has the name of a coordinate of the arrays, and is another one: give it another key")
    values = {key: array.variable for key, array in wrapped.items() if key not in coords}
    # A variable with the name of its axis would become an index, for which xarray copies all values to each process.
    plain = {key: values.pop(key) for key in list(values) if key in lengths}
    coords_of_group = [
        key for key in values if coordinate_names.get(key) == infos[key].dataset or _is_coordinate_of_group(infos[key])
    ]
    dataset = xarray.Dataset(values, coords, _of_all([info.group_attrs for info in infos.values()])).set_coords(coords_of_group)
    return dataset.assign_coords(xarray.Coordinates(plain, indexes={})) if plain else dataset


def _is_coordinate_of_group(info: ArrayInfo) -> bool:
    """True if the group names the array: xarray notes coordinates there that share no axis with other variables."""
    return info.dataset.rpartition("/")[2] in names_in(info.group_attrs.get(_NAMES_OF_COORDINATES))


def _of_all(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The attributes that are the same in all groups, without the names of coordinates.

    >>> _of_all([{"title": "a run", "step": 1}, {"title": "a run", "step": 2}]), _of_all([])
    ({'title': 'a run'}, {})
    """
    first, *rest = groups or [{}]
    return {
        key: deepcopy(value)
        for key, value in first.items()
        if all(key in other and repr(other[key]) == repr(value) for other in rest)  # NaN, too, is the same
        and not isinstance(value, Note)
        and key != _NAMES_OF_COORDINATES
    }


def _wrap(xarray: Any, array: Any, plan: Plan) -> Any:
    if array.shape not in (plan.shape, plan.shape_global):
        raise ConfigError(
            f"the array has shape {array.shape}, but this plan of {plan.info} gives {plan.shape_global}. Pass the plan "
            "that loaded it"
        )
    _check_version(plan, array)
    info, dims = plan.info, axes_of(plan)
    lengths = dict(zip(dims, array.shape, strict=True))
    # With a halo, rows are in the array more than once, and a row does not lie where its coordinate does.
    halo = plan.extent.halo if array.shape == plan.shape_global else [0] * len(dims)
    coords = _coordinates_of(xarray, plan, lengths, {dim for dim, width in zip(dims, halo, strict=True) if width})
    attrs, encoding = _split(info.attrs) if plan.is_decoded else (_copied(info.attrs), {})
    attrs.pop(_NAMES_OF_COORDINATES, None)
    wrapped = xarray.DataArray(array, dims=dims, coords=coords, attrs=attrs, name=info.dataset.rpartition("/")[2])
    wrapped.encoding.update(encoding)
    return wrapped


def _check_version(plan: Plan, array: Any) -> None:
    """Raise SourceError if names and coordinates are those of another version of the file than the one that was loaded.

    They are looked up when somebody asks for them, and the file may be another one then. If they were looked up for an earlier
    version, they are read again.
    """
    labels, info, version = plan.info.labels, plan.info, version_of(array)
    version = plan._version if version is None else version
    if version is None or not isinstance(labels, Labels | OnDemand):
        return
    if _is_other(labels, version) and isinstance(labels, OnDemand):
        labels.read_again()
    if _is_other(labels, version):
        raise SourceError(
            f"{info} has changed since it was loaded, so its names and coordinates may be those of other values. Load it "
            "again; or look at plan.info.coords right after the load, when nothing writes to the file",
            path=info.path,
            dataset=info.dataset,
        )


def _is_other(labels: Labels | OnDemand, version: tuple[int, ...]) -> bool:
    labels = labels.full if isinstance(labels, OnDemand) else labels
    return labels.read_in is not None and version_of_state(labels.read_in) != version


def axes_of(plan: Plan) -> list[str]:
    """The names of the axes of the array that a plan loads.

    Raises
    ------
    ConfigError
        If two axes have the same name.
    """
    dims = _dims(plan)
    if len(set(dims)) < len(dims):
        raise ConfigError(f"{plan.info} has the axes {dims}, and xarray takes each name once only. Pass the array as it is")
    return [dims[axis] for axis in plan._layout.source.selection.kept]


def _coordinates_of(xarray: Any, plan: Plan, n: Mapping[str, int], haloed: Set[str]) -> dict[str, Any]:
    """The coordinates that a plan knows, by name: variables of xarray, cut as its array is selected, for axes of lengths `n`.

    Along an axis with padding, they go on with NaN. Those that have an axis of `haloed` in the file are left out.
    """
    dims, selection = _dims(plan), plan._layout.source.selection
    coordinates = {}
    for name, coord in plan.info.coords.items():
        if coord.values is None:
            continue
        axes = _axes_of_coordinate(name, coord.dims, coord.values.shape, plan)
        if axes is not None and haloed.isdisjoint(axes):
            cut = xarray.Variable(*_cut(coord.values, axes, dims, selection, n), *_split(coord.attrs))
            tails = {dim: (0, n[dim] - size) for dim, size in cut.sizes.items() if n[dim] != size}
            coordinates[name] = pad_variable(cut, tails)
    return coordinates


def _axes_of_coordinate(
    coordinate: str, names: Sequence[str | None], lengths: Sequence[int], plan: Plan
) -> tuple[str, ...] | None:
    """The names of a coordinate's axes among those of its array; None if they are not there, or more than one way fits.

    Axes without names are found by their lengths, as the array has them one after the other. A coordinate that is longer than
    its axis (the edges of cells) fits in netCDF4 alone, where an array may have fewer rows than an axis that can grow.
    """
    dims, shape = _dims(plan), plan.info.shape
    if None not in names:
        axes = tuple(map(str, names))
        if not set(axes) <= set(dims):
            return None
        is_longer = any(n > shape[dims.index(name)] for name, n in zip(axes, lengths, strict=True))
        return None if is_longer and plan.info.format != "netCDF4" else axes
    fitting = [
        tuple(dims[axis] for axis in axes)
        for axes in combinations(range(len(dims)), len(names))
        if all(shape[axis] == n and name in (None, dims[axis]) for axis, name, n in zip(axes, names, lengths, strict=True))
    ]
    if coordinate in dims:  # the axis of its name, or none
        return (coordinate,) if (coordinate,) in fitting else None
    return fitting[0] if len(fitting) == 1 else None


def _dims(plan: Plan) -> list[str]:
    return [name or f"dim_{axis}" for axis, name in enumerate(plan.info.dims)]


def _split(attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes that describe values, and those that were applied to the stored numbers.

    xarray's ``dtype`` is applied if it is bool; another one (``timedelta64[ns]``) says what `xarray.decode_cf` makes of them.
    """
    applied = (key for key in ATTRIBUTES if key in attrs and key not in VALID_RANGE)
    encoding = {key: attrs[key] for key in applied if key != "dtype" or attrs[key] == "bool"}
    plain = {key: value for key, value in attrs.items() if key not in (*encoding, _NAMES_OF_COORDINATES)}
    return _copied(plain), _copied(encoding)


def _copied(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that the caller may change: the plan's stay as they are. None of them is a note in the place of a value."""
    return {key: deepcopy(value) for key, value in attrs.items() if not isinstance(value, Note)}


def pad_variable(variable: Any, tails: Mapping[Any, tuple[int, int]]) -> Any:
    """A variable with NaN or NaT behind its values. It keeps its encoding, in which `save` finds the units of dates, and notes
    there the type of integers and booleans.

    Integers that floating point numbers would round, as identifiers, become objects of Python.
    """
    padded = variable.to_base_variable()
    if tails:  # xarray does not pad a single number, not even by nothing
        if padded.dtype.kind in "iu" and ((padded.values > _EXACT) | (padded.values < -_EXACT)).any():
            padded = padded.astype(object)
        padded = padded.pad(tails)
        padded.encoding = variable.encoding | ({UNPADDED: variable.dtype} if variable.dtype.kind in "iub" else {})
    return padded


def as_unpadded(variable: Any) -> np.ndarray[Any, Any]:
    """The values of a coordinate whose padding was cut off: integers again, if they were that (`UNPADDED`) and are whole."""
    values: np.ndarray[Any, Any] = variable.data
    if UNPADDED not in variable.encoding or values.dtype.kind in "mM":  # numbers of which somebody made dates
        return values
    try:
        with np.errstate(invalid="ignore"):
            numbers = values.astype(variable.encoding[UNPADDED])
    except (OverflowError, TypeError, ValueError):  # NaN among objects
        return values
    return numbers if (numbers == values).all() else values


def _cut(
    values: np.ndarray[Any, Any], axes: tuple[str, ...], dims: list[str], selection: Selection, n: Mapping[str, int]
) -> tuple[list[str], np.ndarray[Any, Any]]:
    """The names of the axes and the values of a coordinate of a selected array, without padding."""
    region, places = selection.region, [dims.index(name) for name in axes]
    lacking = [(0, max(0, region.stop[k] - size)) for k, size in zip(places, values.shape, strict=True)]
    if any(tail for _, tail in lacking):  # of an axis that can grow, and has grown in the array alone
        values = np.pad(values.astype("f8") if values.dtype.kind in "iub" else values, lacking, constant_values=np.nan)
    index = (slice(region.start[k], region.stop[k]) if dims[k] in n else region.start[k] for k in places)
    cut = np.array(values[tuple(index)])  # a copy: the caller may write to it
    return [name for name in axes if name in n], cut
