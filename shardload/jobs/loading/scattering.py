"""How does a call of `scatter` come from its arguments to a plan? Only the rank that has the arrays knows their tree."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

from shardload.errors import ConfigError
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.memory import MemorySource
from shardload.jobs.loading.call import LoadCall, share_staging
from shardload.jobs.loading.endpoints import ArrayLoad
from shardload.jobs.loading.planner import plan_scatter
from shardload.jobs.loading.request import read_requests
from shardload.jobs.trees import (
    ArrayTree,
    Place,
    Where,
    is_one,
    is_one_spec,
    naming_errors,
    node_of,
    text_of,
    where_text,
)
from shardload.options import FILE, FULL, PER_LOADED_ARRAY
from shardload.planning.region import Region
from shardload.planning.schedule import ROOT
from shardload.transfer.buffers import sendable


class ScatterCall(LoadCall):
    """One call that gives every process its shards of arrays which one rank has, on this rank.

    That rank sends the outline of its tree with the metadata. Dicts, lists and tuples are nodes. A list or tuple outside of a
    dict is one array, as NumPy makes it, unless `spec` is a tree.

    Parameters
    ----------
    array : array_like, tree or callable
        On the root: the arrays, or a function that returns them.
    mesh, spec, given
        As the caller passed them.
    """

    def __init__(self, array: Any, mesh: Any, spec: Any, given: dict[str, Any]) -> None:
        self._array, self._root = array, given["root"]
        self._has_tree = not (is_one(mesh) and is_one_spec(spec)) or any(
            not (option.is_one or is_one)(given[option.name]) for option in PER_LOADED_ARRAY if option.name in given
        )
        self._sources: list[MemorySource] | None = None
        super().__init__("scatter", "", mesh, spec, given | {"readers": ROOT})

    def _join(self) -> ArrayTree:
        verify = self._given["verify"]
        if verify in (FILE, FULL):
            raise ConfigError(f"verify is {verify!r}, but scatter has no file to read again; expected 'index' or 'checksum'")
        return ArrayTree(Place("", None, is_pattern=self._has_tree))

    def _what(self, _: Place) -> dict[str, str]:
        return {"path": f"scatter from rank {self._root!r}"}

    def scatter(self) -> Any:
        """Agree on the root, plan, and move: the arrays in the structure of the root's tree. Collective."""
        self.call.settle()  # before any message from the root: the ranks may not agree on who it is
        root, size = self._root, self.call.group.size
        if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < size:
            raise ConfigError(f"root is {root!r}; expected a rank from 0 to {size - 1}")
        return self.load(int(root))

    def find(self) -> list[bytes | memoryview]:
        """Make the arrays, and describe them as text. Runs on the root."""
        array = self._array() if callable(self._array) else self._array
        leaves: list[tuple[str, Any]] = []
        outline = _outline_of(array, self._has_tree, (), leaves)
        if not leaves:
            raise ConfigError(f"array is {array!r}, a tree without an array: there is nothing to scatter")
        self._sources, told = [], []
        for where, value in leaves:
            with naming_errors(where):
                source = MemorySource(self._as_array(value))
            self._sources.append(source)
            view = source.view(Region.whole(source.info.shape))
            told.append([source.info.to_json(), view is not None and sendable(view), str(source.dtype)])
        return [json.dumps([outline, told]).encode()]

    def _as_array(self, value: Any) -> np.ndarray[Any, Any]:
        """What the root has, as NumPy makes an array of it."""
        if value is None:
            raise ConfigError(
                f"array is None on rank {self._root}, the root. Pass the array there, or root= the rank that has it"
            )
        try:
            return value if isinstance(value, np.ma.MaskedArray) else np.asarray(value)  # `MemorySource` looks at the mask
        except jax.errors.TracerArrayConversionError:
            raise ConfigError(
                f"array is traced on rank {self._root}: it has no values yet. Call scatter outside of jax.jit; inside, "
                "jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) shards an array"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"array is a {type(value).__name__} on rank {self._root}, of which NumPy makes no array: {error} A list is one "
                "array by itself; to scatter several, pass a dict of arrays, or a list of specs"
            ) from None

    def make(self, text: Any) -> list[ArrayLoad]:
        """Plan the scatter of all arrays. Runs on every rank."""
        outline, told = json.loads(bytes(text))
        self.tree = ArrayTree(_tree_of(outline))
        if not self.tree.is_single:
            self.requests = read_requests(self.tree, self._mesh, self._spec, self._given)
        if any(request.by_name is not None for request in self.requests):
            raise ConfigError(f"the spec is {self._spec!r}, by names of axes, and an array in memory has none: pass P(...)")
        loads = []
        for k, (request, (info, can_be_viewed, dtype)) in enumerate(zip(self.requests, told, strict=True)):
            where = where_text(self.tree.where[k])
            with naming_errors(where):
                wanted = request.options.dtype
                # Not `in (None, ...)`: NumPy takes None for float64 where it compares types.
                as_it_is = can_be_viewed and (wanted is None or wanted == np.dtype(dtype))
                source = None if self._sources is None else self._sources[k]
                ranks = self.ranks_for(request)
                plan = plan_scatter(request, ranks, ArrayInfo.from_json(info), int(self._root), as_it_is)
                loads.append(ArrayLoad(plan, request.options, source, where=where))
        request = self.requests[0]
        return share_staging(request, self.ranks_for(request), loads) if len(loads) > 1 else loads


def _outline_of(value: Any, has_tree: bool, where: Where, leaves: list[tuple[str, Any]]) -> Any:
    """The structure of a tree in JSON's types; its arrays are appended to `leaves`, each with its place."""
    is_node = isinstance(value, dict) or (
        isinstance(value, (list, tuple)) and (has_tree if not where else any(map(_has_array, value)))
    )
    children = None if isinstance(value, np.ndarray) or hasattr(value, "__array__") else node_of(value)
    # Another node of JAX's, also a named tuple: NumPy would make one array of it, of its parts or of the object.
    is_other = children is not None and type(value) not in (dict, list, tuple) and _has_array(value)
    if not (is_node or is_other):
        leaves.append((where_text(where), value))
        return len(leaves) - 1
    if children is None or type(value) not in (dict, list, tuple):
        raise ConfigError(f"array{text_of(where)} is a {type(value).__name__}; scatter takes trees of dict, list and tuple")
    if isinstance(value, dict) and not all(type(key) in (str, int) for key in value):
        raise ConfigError(f"array{text_of(where)} has keys such as {next(iter(value))!r}; scatter takes text and integers")
    found = [_outline_of(child, has_tree, (*where, key), leaves) for key, child in children]
    if isinstance(value, dict):
        return {"dict": [[key.key, one] for (key, _), one in zip(children, found, strict=True)]}
    return {type(value).__name__: found}


def _has_array(value: Any) -> bool:
    return any(hasattr(leaf, "__array__") for leaf in jax.tree_util.tree_leaves(value))


def _tree_of(outline: Any) -> Any:
    """The inverse of `_outline_of`, with places as leaves."""
    if isinstance(outline, int):
        return Place("", None)
    ((kind, children),) = outline.items()
    if kind == "dict":
        return {key: _tree_of(child) for key, child in children}
    made = [_tree_of(child) for child in children]
    return made if kind == "list" else tuple(made)
