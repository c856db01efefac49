"""How do calls go whose arguments are arrays: `scatter`, `verify`, and `load(..., like=)`?

Of a `scatter` only one rank knows the array. A `verify` plans the load that would give its arrays. With
`like=`, arrays with a `NamedSharding` are loaded as others are; what each process has for itself (numbers, NumPy arrays, arrays
on one device) is loaded whole by each process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload.arrays.assemble import plain_jax
from shardload.comm.launch import rank_of_process
from shardload.errors import ConfigError
from shardload.formats.contract.array import native_dtype
from shardload.formats.lookup import Finder, split_path
from shardload.formats.memory import MemorySource
from shardload.jobs.loading.call import LoadCall
from shardload.jobs.loading.endpoints import ArrayLoad
from shardload.jobs.loading.execution import Loader
from shardload.jobs.loading.planner import plan_scatter
from shardload.jobs.trees import (
    ArrayTree,
    Place,
    in_array,
    is_pattern,
    key_text,
    node_of,
    text_of,
)
from shardload.options import FILE, FULL, OPTIONS
from shardload.planning.region import Region
from shardload.planning.schedule import ROOT
from shardload.transfer.buffers import sendable
from shardload.units import counted

Array = np.ndarray[Any, Any]
# Options that count for what `like` has a sharding of; and what they are for the rest, which is loaded as it is stored.
_OF_WHOLE = {name: OPTIONS[name].default for name in ("dtype", "halo", "edge")} | {"decode": False}


class ScatterCall(LoadCall):
    """One call of `scatter` on this rank: every process gets its shards of an array which one rank has.

    Parameters
    ----------
    array : array_like or callable
        On the root: the array, or a function that returns it.
    mesh, spec, keywords
        As the caller passed them.
    """

    def __init__(self, array: Any, mesh: Any, spec: Any, keywords: dict[str, Any]) -> None:
        self._array, self._root = array, keywords["root"]
        self._source: MemorySource | None = None
        super().__init__("scatter", "", mesh, spec, keywords | {"readers": ROOT})

    def _join(self) -> ArrayTree:
        verify = self._keywords["verify"]
        if verify in (FILE, FULL):
            raise ConfigError(f"verify is {verify!r}, but scatter has no file to read again; expected 'index' or 'checksum'")
        return ArrayTree(Place("", None))

    def _source_text(self, _: Place) -> dict[str, str]:
        return {"path": f"scatter from rank {self._root!r}"}

    def scatter(self) -> Any:
        """Agree on the root, plan, and move. Collective."""
        self.call.settle()  # before any message from the root: the ranks may not agree on who it is
        root, size = self._root, self.call.group.size
        if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < size:
            raise ConfigError(f"root is {root!r}; expected a rank from 0 to {size - 1}")
        return self.load(int(root))

    def find(self) -> Any:
        """Make the array, and describe it for the other ranks. Runs on the root."""
        self._source = MemorySource(self._as_array(self._array() if callable(self._array) else self._array))
        view = self._source.view(Region.whole(self._source.info.shape))
        return self._source.info, view is not None and sendable(view), str(self._source.dtype)

    def _as_array(self, value: Any) -> np.ndarray[Any, Any]:
        """What the root has, as an array of NumPy."""
        if value is None:
            raise ConfigError(
                f"array is None on rank {self._root}, the root. Pass the array there, or root= the rank that has it"
            )
        # NumPy would make one array of a named tuple, of its parts, and an object of another node.
        if type(value) not in (list, tuple) and not hasattr(value, "__array__") and node_of(value) is not None:
            raise ConfigError(
                f"array is a {type(value).__name__} on rank {self._root}, a tree, and scatter takes one array: call it for each"
            )
        try:
            return value if isinstance(value, np.ma.MaskedArray) else np.asarray(value)  # `MemorySource` looks at the mask
        except jax.errors.TracerArrayConversionError:
            raise ConfigError(
                f"array is traced on rank {self._root}: it has no values yet. Call scatter outside of jax.jit; inside, "
                "jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) shards an array"
            ) from None
        except (RuntimeError, TypeError, ValueError) as error:  # deleted, cut over processes, keys of random numbers, a list
            raise ConfigError(
                f"array is a {type(value).__name__} on rank {self._root} of which NumPy gets no values: {error}. To scatter "
                "several arrays, call it for each"
            ) from None

    def make(self, array: Any) -> list[ArrayLoad]:
        """Plan the scatter. Runs on every rank."""
        (request,), (info, can_be_viewed, dtype) = self.requests, array
        if request.by_name is not None:
            raise ConfigError(f"the spec is {self._spec!r}, by names of axes, and an array in memory has none: pass P(...)")
        wanted_dtype = request.options.dtype
        # Not `in (None, ...)`: NumPy takes None for float64 where it compares types.
        from_views = can_be_viewed and (wanted_dtype is None or wanted_dtype == np.dtype(dtype))
        plan = plan_scatter(request, self.ranks_for(request), info, int(self._root), from_views)
        return [ArrayLoad(plan, request.options, None, self._source)]


class VerifyCall(LoadCall):
    """One call of `verify` on this rank. The arguments are as the caller passed them."""

    def __init__(self, x: Any, path: Any, keywords: dict[str, Any]) -> None:
        self._x, self._text = x, "nothing"
        super().__init__("verify", path, None, None, keywords | {"verify": keywords["how"]})

    def _join(self) -> ArrayTree:
        leaves = jax.tree_util.tree_flatten_with_path(self._x)[0] or [((), self._x)]
        for where, array in leaves:
            _check_values(f"x{text_of(where)}", array)
        OPTIONS["how"].check(self._keywords["how"])  # `Options` would call it by the other name
        OPTIONS["seed"].check(self._keywords["seed"])
        tree = super()._join()
        tree.spread("x", self._x)
        if tree.is_single and leaves[0][0]:
            raise _unnamed(len(leaves), 1)
        texts = (f"{text_of(where)} an array of shape {array.shape}, {array.dtype}".strip() for where, array in leaves)
        self._text, self._mesh = "; ".join(texts), jax.tree_util.tree_map(_sharding_of, self._x)
        return tree

    def _source_text(self, place: Place) -> dict[str, str]:
        return {**super()._source_text(place), "x": self._text, "seed": str(self._keywords["seed"])}

    def verify(self) -> Any:
        """Plan, and compare: what was proven of each array, in the structure of the tree. Collective."""
        loads = self.plan()
        return self.tree.build(Loader(self.call, loads).verify(self._arrays(), int(self._keywords["seed"])))

    def _arrays(self) -> list[Any]:
        """The caller's arrays, in the order of the tree."""
        if self.tree.is_single:
            return [self._x]
        arrays = self.tree.spread("x", self._x)
        n = len(jax.tree_util.tree_leaves(self._x))
        if n != len(arrays):
            raise _unnamed(n, len(arrays))
        return arrays

    @plain_jax()  # which are there, even if JAX makes no more of 64 bits by now
    def make(self, arrays: Any) -> list[ArrayLoad]:
        """Plan the loads that would give these arrays."""
        loads = super().make(arrays)
        for x, load in zip(self._arrays(), loads, strict=True):
            if (load.plan.shape_global, load.plan.dtype) != (x.shape, x.dtype):
                error = ConfigError(
                    f"x has shape {x.shape} and is {x.dtype}, but a load of {load.info} with these arguments has shape "
                    f"{load.plan.shape_global} and is {load.plan.dtype}. Pass the same select=, dtype=, decode=, pad= and "
                    "halo= as to the load"
                )
                raise in_array(load.where, error)
        return loads


def _unnamed(n: int, n_names: int) -> ConfigError:
    return ConfigError(
        f"x is a tree of {counted(n, 'array')}, but dataset and path name {n_names}. Pass dataset= with a name for each array, "
        "in a tree with the same keys"
    )


def _check_values(name: str, x: Any) -> None:
    """Raise ConfigError if something is no array, or has no values that could be compared."""
    if not isinstance(x, jax.Array):
        raise ConfigError(f"{name} is a {type(x).__name__}; expected a jax.Array")
    if isinstance(x, jax.core.Tracer):
        raise ConfigError(f"{name} is traced: it has no values yet. Call verify outside of jax.jit")
    if x.is_deleted():
        raise ConfigError(f"{name} was deleted (donated to a jitted function?), so it has no values. Verify it before that")


def _sharding_of(x: Any) -> Any:
    """Its sharding; for an array on a single device, the same as a NamedSharding over a mesh of one device."""
    if isinstance(x.sharding, jax.sharding.SingleDeviceSharding):
        return NamedSharding(Mesh(np.array(list(x.sharding.device_set)), ("device",)), PartitionSpec())
    if not isinstance(x.sharding, NamedSharding):
        raise ConfigError(
            f"x has a {type(x.sharding).__name__}, and verify takes arrays with a NamedSharding, or on one device. Pass "
            "jax.device_put(x, NamedSharding(mesh, P(...)))"
        )
    return x.sharding


class StateCall(LoadCall):
    """One call of `load(..., like=)` on this rank: `leaves` are those of `like`, by their names in the file.

    A leaf without a `NamedSharding` is loaded whole, on a device of each process, from which `load_state` takes it.
    """

    def __init__(self, path: Any, leaves: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
        # The same on all ranks: a rank that refuses a leaf would do so alone.
        texts = (f"'/{name}' {getattr(leaf, 'dtype', type(leaf).__name__)} {np.shape(leaf)}" for name, leaf in leaves.items())
        self._text = "; ".join(texts)
        self._whole = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("process",)), PartitionSpec())  # until ranks are known
        shardings = [leaf.sharding if _is_sharded(leaf) else self._whole for leaf in leaves.values()]
        options = {
            name: [keywords[name] if _is_sharded(leaf) else default for leaf in leaves.values()]
            for name, default in _OF_WHOLE.items()
        }
        super().__init__("load", path, shardings, None, {**keywords, **options, "dataset": [*leaves]})

    def _source_text(self, place: Place) -> dict[str, str]:
        return {**super()._source_text(place), "like": self._text}

    def _find_all(self, finder: Finder) -> Any:
        """See `LoadCall`."""
        inside = split_path(os.fsdecode(self._path))[1]
        if inside is not None:
            raise ConfigError(
                f"path is '{self._path}', and load(..., like=) takes the path of a file: the keys of `like` are names from its "
                f"root on. Pass them with the groups that lead to '{inside}'"
            )
        return super()._find_all(finder)

    @plain_jax()  # numbers of 64 bits are none of JAX's, if they go on as those of Python or NumPy
    def make(self, arrays: Any) -> list[ArrayLoad]:
        """See `LoadCall`."""
        device_of = {device.process_index: device for device in reversed(jax.devices())}
        devices = [device_of[process] for process in sorted(rank_of_process(self.call.group))]
        whole = NamedSharding(Mesh(np.array(devices), ("process",)), PartitionSpec())
        requests = {id(request): request for request in self.requests}
        requests |= {k: replace(r, sharding=whole) for k, r in requests.items() if r.sharding is self._whole}
        self.requests = [requests[id(request)] for request in self.requests]
        return super().make(arrays)


def load_state(path: Any, like: Any, keywords: Mapping[str, Any]) -> Any:
    """The tree `like`, with values from a file. `keywords` are the options of `load`. Collective: yes."""
    flat, structure = jax.tree_util.tree_flatten_with_path(like)
    named_arrays = [("/".join(map(key_text, keys)).strip("/"), leaf) for keys, leaf in flat]
    ArrayTree.of_names((name for name, _ in named_arrays))  # each has one of its own
    leaves = dict(named_arrays)
    if pattern := next((name for name in leaves if is_pattern(name)), None):
        raise ConfigError(f"an array in `like` is called '/{pattern}', which stands for all arrays of a group. Rename it")
    if not isinstance(path, (str, os.PathLike)) or not leaves:
        raise ConfigError(f"load(..., like=) takes the path of one file and a tree with leaves; found {path!r}, {type(like)}")
    unsharded = next((name for name, leaf in leaves.items() if not _is_sharded(leaf)), None)
    if unsharded is not None and (keywords["select"] is not None or keywords["decode"]):
        option = "decode" if keywords["select"] is None else "select"
        raise ConfigError(
            f"{option} is {keywords[option]!r}, but '/{unsharded}' has no NamedSharding in `like`, and what has "
            "none is read as a whole, as it is stored. Leave that out of `like`, and load it in a call of its own"
        )
    with StateCall(path, leaves, keywords).begin() as call:
        values = dict(zip(leaves, call.load(), strict=True))
    for name, leaf in leaves.items():
        value = values[name] = values[name] if _is_sharded(leaf) else _as(leaf, values[name])
        if np.shape(value) != np.shape(leaf) or not _is_like(leaf, value):
            padded = "" if keywords["pad"] is None or not _is_sharded(leaf) else " with its padding"
            raise ConfigError(
                f"'/{name}' in '{path}' is {value.dtype} {np.shape(value)}{padded}, and in `like` "
                f"{getattr(leaf, 'dtype', type(leaf).__name__)} {np.shape(leaf)}. Pass a state of the shapes and types that "
                "were saved"
            )
    return jax.tree_util.tree_unflatten(structure, [values[name] for name in leaves])


def _is_sharded(leaf: Any) -> bool:
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)


@plain_jax()
def _as(leaf: Any, array: jax.Array) -> Any:
    """An array that each process has whole as the kind of a leaf: a number of Python, an array of NumPy, or one on the devices
    of the leaf. As an array of NumPy if it would not be the same there, which is an error.
    """
    value = np.array(array.addressable_data(0))
    if np.shape(value) != np.shape(leaf):
        return value
    if _is_number(leaf):
        return _number_as(leaf, value)
    dtype = getattr(leaf, "dtype", None)
    if dtype == np.bool_ and value.dtype == np.int8:  # netCDF has no booleans
        value = value.astype(bool)
    if isinstance(leaf, (np.ndarray, np.generic)):
        value = value.astype(leaf.dtype, copy=False) if value.dtype == native_dtype(leaf.dtype) else value  # in its byte order
        return value if isinstance(leaf, np.ndarray) else value[()]
    if dtype is None or value.dtype != dtype:  # JAX would cut 64 bits to 32
        return value
    # JAX computes with what is on no device by choice (`jnp.int32(0)`) beside arrays on any mesh, if that stays so.
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    sharding = None if is_array and not leaf.committed else getattr(leaf, "sharding", None)
    return jax.device_put(value, sharding)


def _is_number(leaf: Any) -> bool:
    """True for a number of Python. (That of NumPy which is derived from `float` has a dtype of its own.)"""
    return isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic)


def _number_as(leaf: Any, value: Array) -> Any:
    """A number of the kind of a leaf; the value itself if it would be another one.

    >>> _number_as(0, np.array(3.0)), _number_as(0.0, np.array(3)), _number_as(0, np.array(0.5))
    (3, 3.0, array(0.5))
    """
    number = value.item()
    try:
        converted = type(leaf)(number)
    except (OverflowError, TypeError, ValueError):  # infinite, complex, not a number
        return value
    is_nan = number != number and isinstance(leaf, (float, complex))
    return converted if converted == number or is_nan else value


def _is_like(leaf: Any, value: Any) -> bool:
    """Whether a value is of the kind of a leaf."""
    if _is_number(leaf):
        return type(value) is type(leaf)
    return hasattr(leaf, "dtype") and bool(value.dtype == leaf.dtype)
