"""How does a call of `verify` come from its arguments to a comparison? It plans the load that would give these arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload.errors import ConfigError
from shardload.jobs.loading.call import LoadCall
from shardload.jobs.loading.endpoints import ArrayLoad
from shardload.jobs.trees import ArrayTree, Place, in_array, text_of
from shardload.options import OPTIONS


class VerifyCall(LoadCall):
    """One call that compares arrays with their files, on this rank. The arguments are as the caller passed them."""

    def __init__(self, x: Any, path: Any, given: dict[str, Any]) -> None:
        self._x, self._text = x, "nothing"
        super().__init__("verify", path, None, None, given | {"verify": given["how"]})

    def _join(self) -> ArrayTree:
        leaves = jax.tree_util.tree_flatten_with_path(self._x)[0] or [((), self._x)]
        for where, array in leaves:
            _check_values(f"x{text_of(where)}", array)
        OPTIONS["how"].check(self._given["how"])  # `Options` would call it by the other name
        seed = self._given["seed"]
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ConfigError(f"seed is {seed!r}; expected an integer, 0 or more")
        tree = super()._join()
        tree.spread("x", self._x)
        texts = (f"{text_of(where)} an array of shape {array.shape}, {array.dtype}".strip() for where, array in leaves)
        self._text, self._mesh = "; ".join(texts), jax.tree_util.tree_map(_sharding_of, self._x)
        return tree

    def _what(self, place: Place) -> dict[str, str]:
        return {**super()._what(place), "x": self._text, "seed": str(self._given["seed"])}

    def verify(self) -> Any:
        """Plan, and compare: what was proven of each array, in the structure of the tree. Collective."""
        loads = self.plan()
        return self.tree.build(self.loader(loads).verify(self._arrays(), int(self._given["seed"])))

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
    return x.sharding
