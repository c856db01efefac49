"""Is this the shard that JAX asked for?

JAX asks for shards by index, device after device, and takes whatever it is given. So every index is turned into a region and
answered with the piece of exactly that region, shape and dtype, or not at all; and the array that comes back is compared,
device by device, with the same regions.

On CPU JAX uses an aligned piece as it is, without a copy: after `assemble` a piece belongs to the array and must not be
written again. (Donating the array does not write into it either; there is a test.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardload.errors import ShardloadError
from shardload.planning.region import Region

__all__ = ["EarlyPieces", "assemble", "device_values"]

Array = np.ndarray[Any, Any]


class EarlyPieces:
    """Pieces that go to their device as soon as they are complete, while others are still being read.

    Not on CPU, where JAX uses a piece where it is. A region that several local devices hold goes to the first of them; JAX
    copies it from there.

    Parameters
    ----------
    shape_global : tuple of int
        Shape of the global array.
    sharding : NamedSharding
        Its sharding.
    also_on_cpu : bool
        For tests on machines without a GPU.
    """

    def __init__(self, shape_global: tuple[int, ...], sharding: NamedSharding, also_on_cpu: bool = False) -> None:
        self._devices: dict[Region, Any] = {}
        places: dict[Any, Any] = dict(sharding.addressable_devices_indices_map(shape_global))
        for device, index in places.items():
            if also_on_cpu or device.platform != "cpu":
                self._devices.setdefault(_region(index, shape_global), device)
        self.arrays: dict[Region, jax.Array] = {}

    def start(self, region: Region, data: Array) -> None:
        """Begin to copy a complete piece, which must not be written from now on."""
        device = self._devices.get(region)
        if device is not None and region not in self.arrays:
            self.arrays[region] = jax.device_put(data, device)


def assemble(
    shape_global: tuple[int, ...],
    sharding: NamedSharding,
    dtype: np.dtype[Any],
    pieces: Iterable[tuple[Region, Array]],
    early: EarlyPieces | None = None,
) -> jax.Array:
    """Make the global array from this process's pieces. Not collective, though every process of the mesh must do it.

    Parameters
    ----------
    shape_global : tuple of int
        Shape of the global array.
    sharding : NamedSharding
        Its sharding.
    dtype : dtype
        Its dtype, exactly.
    pieces : iterable of (Region, ndarray)
        Each distinct region that this process's devices hold, once, and its values. Replicas share a piece.
    early : EarlyPieces, optional
        Those of them that are on their way to a device already.

    Returns
    -------
    jax.Array
        Shape `shape_global`, dtype `dtype`, sharding `sharding`; each shard checked.

    Raises
    ------
    ShardloadError
        If a device asks for a region that is not held, or a piece or a shard has another shape or dtype than it must.
    """
    held = dict(pieces)
    for region, data in held.items():
        if data.shape != region.shape or data.dtype != dtype:
            raise ShardloadError(
                f"the piece for {region} has shape {data.shape} and dtype {data.dtype}, expected {region.shape} and {dtype}"
            )

    def answer(index: tuple[slice, ...] | None) -> Any:
        region = _region(index, shape_global)
        if not here:  # JAX asks for the values of a replicated array even where no device takes them
            return np.broadcast_to(np.zeros((), dtype), region.shape)
        if region not in held:
            raise ShardloadError(_not_held(region, held, sharding, shape_global))
        return under_way.get(region, held[region])

    under_way = {} if early is None else early.arrays
    here = sharding.addressable_devices
    array = jax.make_array_from_callback(shape_global, sharding, answer, dtype=dtype)
    _verify_shards(array, held, dtype, shape_global)
    return array


def device_values(data: jax.Array, region: Region, held: Region, view_on_cpu: bool = True) -> Array:
    """The part of a shard, which holds `held`, that is `region`, as it is on the device.

    Of a GPU's memory that part alone is copied; on CPU it is a view (but for tests on machines without a GPU).
    """
    if view_on_cpu and next(iter(data.devices())).platform == "cpu":
        index: tuple[Any, ...] = (*region.slices(held.start), ...)  # an array, also when 0-d
        view: Array = np.asarray(data)[index]
        return view
    start = [a - o for a, o in zip(region.start, held.start, strict=True)]
    return np.asarray(jax.lax.dynamic_slice(data, start, region.shape))


def _region(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Region:
    return Region.from_index((slice(None),) * len(shape) if index is None else index, shape)


def _not_held(region: Region, held: dict[Region, Array], sharding: NamedSharding, shape: tuple[int, ...]) -> str:
    asking = [
        str(device)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
        if _region(index, shape) == region
    ]
    who = f"devices {', '.join(asking)} ask" if len(asking) > 1 else f"device {''.join(asking) or '(unknown)'} asks"
    return (
        f"{who} for {region}, but this process holds "
        f"{', '.join(str(r) for r in sorted(held)) or 'nothing'}. A wrong piece is never handed over: no array was made"
    )


def _verify_shards(array: jax.Array, held: dict[Region, Array], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ShardloadError(f"JAX made an array of shape {array.shape}, {array.dtype}; expected {shape}, {dtype}")
    for shard in array.addressable_shards:
        region = _region(shard.index, shape)
        if region not in held or shard.data.shape != region.shape or shard.data.dtype != dtype:
            raise ShardloadError(
                f"{shard.device} holds {region} as {shard.data.shape}, {shard.data.dtype}; expected one of "
                f"{', '.join(str(r) for r in sorted(held))} as {dtype}"
            )
