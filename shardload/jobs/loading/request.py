"""What does the caller ask of each array of a call? From the arguments as they were passed, to one `Request` for each array.

A `Request` has a sharding, checked options, and both as the text that ranks compare. Trees of arguments are spread over the
arrays here; arrays for which the caller passed the same share a `Request`. Nothing here looks at a file or sends a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardload.arrays.sharding import describe_sharding, read_sharding
from shardload.errors import ConfigError
from shardload.formats.contract.array import ArrayInfo
from shardload.jobs.trees import (
    NEEDED,
    ArrayTree,
    in_array,
    is_entry,
    is_one,
    is_one_spec,
    is_tree_of_selections,
    is_tree_of_specs,
    text_of,
)
from shardload.options import OPTIONS, PER_LOADED_ARRAY, Options
from shardload.planning.selection import axes_text

_DATASET = OPTIONS["dataset"]
# What may be another one for each array, each with what tells a single value from a tree of them.
_IS_ONE = {option.name: option.is_one or is_one for option in PER_LOADED_ARRAY} | {"mesh": is_one, "spec": is_one_spec}
_DEFAULTS = {option.name: option.default for option in PER_LOADED_ARRAY}
_TREES = {"select": is_tree_of_selections, "spec": is_tree_of_specs}  # of which a single value may be a dict, too


@dataclass(frozen=True, eq=False)
class Request:
    """What the caller asks of an array, or of several alike.

    Attributes
    ----------
    sharding : NamedSharding
        Of the jax.Array.
    options : Options
        The options. The array's name is not among them.
    text : mapping of str to str
        What every rank must pass alike, by the name of the argument.
    by_name : mapping of str to str or tuple of str, optional
        A spec by names of axes. Until `for_axes` knows these, the sharding cuts nothing.
    """

    sharding: NamedSharding
    options: Options
    text: Mapping[str, str]
    by_name: Mapping[Any, Any] | None = None

    def for_axes(self, info: ArrayInfo, axes: Sequence[str | None]) -> Request:
        """A copy for an array of which these axes are left by a selection: a spec by names becomes one by position.

        Raises
        ------
        ConfigError
            If the array has no such axis, or it was selected away.
        """
        if self.by_name is None:
            return self
        for name in self.by_name:
            if axes.count(name) != 1:
                why = f"{info} {axes_text(name, axes.count(name), info.dims, 'P(...), with an entry for each axis')}"
                if name in info.dims:
                    why = "it is selected away: pass a slice of it"
                raise ConfigError(f"the spec {dict(self.by_name)} names the axis {name!r}, but {why}")
        last = max((k for k, dim in enumerate(axes) if self.by_name.get(dim)), default=-1)
        spec = PartitionSpec(*(self.by_name.get(dim) for dim in axes[: last + 1]))
        return replace(self, sharding=read_sharding(self.sharding.mesh, spec), by_name=None)


def read_requests(tree: ArrayTree, mesh: Any, spec: Any, keywords: Mapping[str, Any]) -> list[Request]:
    """Check the arguments, and return what is asked of each place of a tree.

    Parameters
    ----------
    tree : ArrayTree
        The arrays. Of a pattern, the arguments may be trees still: all values are checked, and the first are returned.
    mesh, spec, keywords : object, object, mapping
        As the caller passed them: `keywords` are the options.

    Raises
    ------
    ConfigError
        If an argument is wrong, or a tree of them does not match the tree of arrays.
    """
    options = {name: value for name, value in keywords.items() if OPTIONS[name].is_kept and name != "dataset"}
    arguments = options | {"mesh": mesh, "spec": spec}
    values = {
        name: tree.spread(name, arguments[name], is_single, _TREES.get(name), _DEFAULTS.get(name, NEEDED))
        for name, is_single in _IS_ONE.items()
        if name in arguments
    }
    shared = {name: value for name, value in options.items() if name not in values}
    requests_by_key: dict[tuple[int, ...], Request] = {}  # `values` keeps alive whatever has its id in a key
    requests = []
    for k, place in enumerate(tree.places):
        values_of_place = {name: per_place[k] for name, per_place in values.items()}
        key = (place.is_pattern, *map(id, values_of_place.values()))
        try:
            if place.dataset is not None:
                _DATASET.check(place.dataset)
            if key not in requests_by_key:
                read = _read_pattern if place.is_pattern else _read
                requests_by_key[key] = read(shared | values_of_place)
        except ConfigError as error:
            has_trees = not all(is_single(arguments[name]) for name, is_single in _IS_ONE.items() if name in arguments)
            raise in_array(tree.where[k] if has_trees else "", error) from None
        requests.append(requests_by_key[key])
    return requests


def _read(keywords: dict[str, Any]) -> Request:
    """The request of an array for which these arguments were passed."""
    options = dict(keywords)
    mesh, spec = options.pop("mesh"), options.pop("spec")
    by_name = dict(sorted(spec.items())) if isinstance(spec, Mapping) else None
    for entry in () if by_name is None else by_name.values():
        if not is_entry(entry):
            raise ConfigError(f"spec is {spec!r}, a tree, but there is one array at that place. Pass one spec: {entry!r}")
        read_sharding(mesh, (entry,))  # each alone: a mesh axis may cut an axis of one variable, and another one of another
    sharding = read_sharding(mesh, spec if by_name is None else ())
    text = describe_sharding(sharding) + ("" if by_name is None else f" by the names {by_name}")
    checked = Options.check(**options)
    return Request(sharding, checked, {"sharding": text, **checked.describe()}, by_name)


def _read_pattern(keywords: dict[str, Any]) -> Request:
    """The request of all arrays below a group. Of trees the first values are checked; the others when the arrays are known."""
    trees = {name: value for name, value in keywords.items() if name in _IS_ONE}
    leaves = {name: jax.tree_util.tree_leaves(value, is_leaf=_IS_ONE[name]) or [None] for name, value in trees.items()}
    first = _read(keywords | {name: values[0] for name, values in leaves.items()})
    of_arrays = [option.name for option in PER_LOADED_ARRAY if option.text and option.name in trees]
    meshes = (mesh if isinstance(mesh, NamedSharding) else NamedSharding(mesh, PartitionSpec()) for mesh in leaves["mesh"])
    text = {"sharding": f"{'; '.join(map(describe_sharding, meshes))}; {_tree_text(keywords['spec'])}"}
    return replace(first, text={**first.text, **text, **{name: _tree_text(trees[name]) for name in of_arrays}})


def _tree_text(tree: Any) -> str:
    """A tree of values as text."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_one_spec)[0]
    return "; ".join(f"{text_of(where)} {value!r}".strip() for where, value in leaves)
