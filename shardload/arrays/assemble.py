"""How do pieces become a `jax.Array`, with every shard in the right place?

JAX asks for shards by index, one device after the other, and accepts any values of the right shape. So:

1. Turn every index into a region. Answer with the piece of exactly that region, shape and dtype, or raise.
2. Compare the finished array, device by device, with the same regions.

On CPU, JAX uses an aligned piece without copying it. After `assemble` a piece belongs to the array and must not be written
again. (Donating the array does not write into the piece either; a test checks that.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from shardload.arrays.sharding import device_regions, region_of
from shardload.errors import ConfigError, ShardloadError
from shardload.planning.region import Array, Region
from shardload.transfer.buffers import view_of


@contextmanager
def plain_jax(mesh: Mesh | None = None) -> Iterator[None]:
    """JAX on a mesh of our own, without what the program has set for its computations.

    There transfers may be forbidden, and a NaN an error, which files have. The mesh that is set may have other devices. And
    without 64 bits, as in the threads of a stream that was made below `jax.enable_x64`, JAX cuts values, and takes other
    elements beyond 2**31 of an axis, without an error.
    """
    module: Any = jax if hasattr(jax, "enable_x64") else import_module("jax.experimental")  # where older releases have it
    with module.enable_x64(True), jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False):
        try:
            on_mesh: Any = nullcontext() if mesh is None else jax.set_mesh(mesh)
        except ValueError:
            raise ConfigError(
                "JAX cuts an array on devices only while no function is traced. Call this outside of jax.jit, and pass what it "
                "returns as an argument"
            ) from None
        with on_mesh:
            yield


class DeviceShard(NamedTuple):
    """A shard of an array on a device of this process, as JAX describes it."""

    device: Any
    index: Any
    data: jax.Array


def addressable_shards(array: jax.Array) -> Sequence[DeviceShard | jax.Shard]:
    """The shards on the devices of this process.

    JAX 0.10 fails to give them if this process has one device, and `jax.device_put` made replicas of an array there.
    """
    if len(array.sharding.addressable_devices) != 1:
        return array.addressable_shards
    ((device, index),) = array.sharding.addressable_devices_indices_map(array.shape).items()
    return [DeviceShard(device, index, array.addressable_data(0))]


def early_devices(sharding: NamedSharding, shape_global: tuple[int, ...]) -> dict[Region, Any]:
    """The device to which each piece of this process can go as soon as it is complete, while others are still being read.

    None on CPU, where JAX uses a piece without a copy. A region that several local devices hold goes to the first of them; JAX
    copies it from there.
    """
    devices: dict[Region, Any] = {}
    for device, region in device_regions(sharding, shape_global).items():
        if not has_host_memory(device):
            devices.setdefault(region, device)
    return devices


def put_shard(data: Any, device: Any, sharding: NamedSharding) -> jax.Array:
    """Begin to copy a shard to a device, into the memory that the sharding names (``memory_kind="pinned_host"``)."""
    with plain_jax():
        shard: jax.Array = jax.device_put(data, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    return shard


def assemble(
    shape_global: tuple[int, ...],
    sharding: NamedSharding,
    dtype: np.dtype[Any],
    pieces: Iterable[tuple[Region, Array]],
    early: Mapping[Region, jax.Array] = MappingProxyType({}),
) -> jax.Array:
    """Make the global array from this process's pieces. Not collective, but every process of the mesh must do it.

    Parameters
    ----------
    shape_global : tuple of int
        Shape of the global array.
    sharding : NamedSharding
        Its sharding.
    dtype : dtype
        Dtype of the pieces and of the array.
    pieces : iterable of (Region, ndarray)
        Each distinct region that this process's devices hold, once, with its values. Replicas share a piece.
    early : mapping of Region to jax.Array, optional
        The pieces that are already on their way to a device.

    Returns
    -------
    jax.Array
        Shape `shape_global`, dtype `dtype`, sharding `sharding`; each shard checked.

    Raises
    ------
    ShardloadError
        If a device asks for a region that this process has no piece of, or the shape or dtype of a piece or shard is wrong.
    """
    piece_of = dict(pieces)
    for region, data in piece_of.items():
        if data.shape != region.shape or data.dtype != dtype:
            raise ShardloadError(
                f"the piece for {region} has shape {data.shape} and dtype {data.dtype}, expected {region.shape} and {dtype}"
            )

    def answer(index: tuple[slice, ...] | None) -> Any:
        region = region_of(index, shape_global)
        if not devices_here:  # JAX asks for the values of a replicated array even if this process has no device of the mesh
            return np.broadcast_to(np.zeros((), dtype), region.shape)
        if region not in piece_of:
            raise ShardloadError(_not_held(region, piece_of, sharding, shape_global))
        return early.get(region, piece_of[region])

    devices_here = sharding.addressable_devices
    with plain_jax():
        array = jax.make_array_from_callback(shape_global, sharding, answer, dtype=dtype)
    _verify_shards(array, sharding, piece_of, dtype, shape_global)
    return array


def has_host_memory(device: Any) -> bool:
    """True if JAX uses memory of the host for a device as it is: on CPU."""
    return bool(device.platform == "cpu")


def device_values(data: Any, region: Region, shard_region: Region) -> Array:
    """The values of `region`. `data` is the shard, which holds `shard_region`. In memory of the host they are a view."""
    is_on_host = isinstance(data, np.ndarray) or has_host_memory(next(iter(data.devices())))
    return view_of(np.asarray(data), region, shard_region) if is_on_host else copy_from_device(data, region, shard_region)


def copy_from_device(data: jax.Array, region: Region, shard_region: Region) -> Array:
    """A copy of `region` alone, of a shard that holds `shard_region`."""
    start = [a - o for a, o in zip(region.start, shard_region.start, strict=True)]
    with plain_jax(Mesh(np.array(list(data.devices())), ("device",))):
        return np.asarray(jax.lax.dynamic_slice(data, start, region.shape))


def _not_held(region: Region, pieces: dict[Region, Array], sharding: NamedSharding, shape: tuple[int, ...]) -> str:
    devices = [str(device) for device, device_region in device_regions(sharding, shape).items() if device_region == region]
    askers = f"devices {', '.join(devices)} ask" if len(devices) > 1 else f"device {''.join(devices) or '(unknown)'} asks"
    return (
        f"{askers} for {region}, but this process holds "
        f"{', '.join(str(r) for r in sorted(pieces)) or 'nothing'}. A wrong piece is never handed over: no array was made"
    )


def _verify_shards(
    array: jax.Array, sharding: NamedSharding, pieces: dict[Region, Array], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    if array.shape != shape or array.dtype != dtype or array.sharding != sharding:
        raise ShardloadError(
            f"JAX made an array of shape {array.shape}, {array.dtype}, {array.sharding}; expected {shape}, {dtype}, {sharding}"
        )
    places = device_regions(sharding, shape)
    for shard in addressable_shards(array):
        region = places.get(shard.device)  # the same as its index, which JAX takes from the sharding too
        if region is None:
            raise ShardloadError(f"JAX put a shard on {shard.device}, which {sharding} does not have here")
        if region not in pieces or shard.data.shape != region.shape or shard.data.dtype != dtype:
            raise ShardloadError(
                f"{shard.device} holds {region} as {shard.data.shape}, {shard.data.dtype}; expected one of "
                f"{', '.join(str(r) for r in sorted(pieces))} as {dtype}"
            )
