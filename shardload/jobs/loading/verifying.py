"""How does a call of `verify` come from its arguments to a comparison? It plans the load that would give these arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload.errors import ConfigError
from shardload.jobs.loading.array_load import ArrayLoad
from shardload.jobs.loading.call import LoadCall
from shardload.jobs.trees import ArrayTree, Place, in_array, text_of
from shardload.options import OPTIONS


class VerifyCall(LoadCall):
    """One call that compares arrays with their files, on this rank. The arguments are as the caller passed them."""

    def __init__(self, x: Any, path: Any, dataset: Any, options: dict[str, Any], seed: Any) -> None:
        self._x, self._seed = x, seed
        leaves = jax.tree_util.tree_flatten_with_path(x)[0] or [((), x)]
        error = _wrong(leaves, options, seed) or _unlike(x, path, dataset)
        self._text = "nothing"
        if error is None:
            texts = (f"{text_of(where)} an array of shape {array.shape}, {array.dtype}".strip() for where, array in leaves)
            self._text = "; ".join(texts)
        mesh = None if error else jax.tree_util.tree_map(_sharding_of, x)
        super().__init__("verify", path, mesh, None, options, dataset)
        self.refuse(error)

    def _what(self, place: Place) -> dict[str, str]:
        return {**super()._what(place), "x": self._text, "seed": str(self._seed)}

    def verify(self) -> Any:
        """Plan, and compare: what was proven of each array, in the structure of the tree. Collective."""
        loads = self.plan()
        return self.tree.build(self.loader(loads).verify(self._arrays(), int(self._seed)))

    def _arrays(self) -> list[Any]:
        """The caller's arrays, in the order of the tree."""
        if self.tree.is_single:
            return [self._x]
        arrays = self.tree.spread("x", self._x)
        n = len(jax.tree_util.tree_leaves(self._x))
        if n != len(arrays):
            raise ConfigError(
                f"x has {n} arrays, but dataset and path name {len(arrays)}. Pass one array for each name, in a tree with the "
                "same keys"
            )
        return arrays

    def make(self, told: Any) -> list[ArrayLoad]:
        """Plan the loads that would give these arrays."""
        loads = super().make(told)
        for x, load in zip(self._arrays(), loads, strict=True):
            if (load.plan.shape_global, load.plan.dtype) != (x.shape, x.dtype):
                error = ConfigError(
                    f"x has shape {x.shape} and is {x.dtype}, but a load of {load.info} with these arguments has shape "
                    f"{load.plan.shape_global} and is {load.plan.dtype}. Pass the same select=, dtype=, decode=, pad= and "
                    "halo= as to the load"
                )
                raise in_array(load.where, error)
        return loads


def _wrong(leaves: list[tuple[Any, Any]], options: dict[str, Any], seed: Any) -> ConfigError | None:
    """What is wrong with the arrays, `how` or `seed`; None if nothing is."""
    for where, array in leaves:
        error = _without_values(f"x{text_of(where)}", array)
        if error is not None:
            return error
    try:
        OPTIONS["how"].check(options["verify"])  # `Options` would call it by the other name
    except ConfigError as wrong:
        return wrong
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        return ConfigError(f"seed is {seed!r}; expected an integer, 0 or more")
    return None


def _unlike(x: Any, path: Any, dataset: Any) -> ConfigError | None:
    """How the tree of arrays differs from that of their names; None if it does not, or these are wrong themselves."""
    try:
        tree = ArrayTree.join(path, dataset)
    except ConfigError:
        return None
    try:
        tree.spread("x", x)
    except ConfigError as error:
        return error
    return None


def _without_values(name: str, x: Any) -> ConfigError | None:
    """What is wrong with something that is no array, or has no values that could be compared; None if nothing is."""
    if not isinstance(x, jax.Array):
        return ConfigError(f"{name} is a {type(x).__name__}; expected a jax.Array")
    if isinstance(x, jax.core.Tracer):
        return ConfigError(f"{name} is traced: it has no values yet. Call verify outside of jax.jit")
    if x.is_deleted():
        return ConfigError(f"{name} was deleted (donated to a jitted function?), so it has no values. Verify it before that")
    return None


def _sharding_of(x: Any) -> Any:
    """Its sharding; for an array on a single device, the same as a NamedSharding over a mesh of one device."""
    if isinstance(x.sharding, jax.sharding.SingleDeviceSharding):
        return NamedSharding(Mesh(np.array(list(x.sharding.device_set)), ("device",)), PartitionSpec())
    return x.sharding
