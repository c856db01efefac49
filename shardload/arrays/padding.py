"""Which elements of a loaded array are the file's, and which are padding or halo?

A load may give an array that is larger than the file's: `pad` adds elements at the end of an axis, `halo` adds the neighbours'
rows to each shard. An `Extent` says where the file's own elements are, each exactly once: in the core of its shard, before the
padding. It is a few integers, and each axis is independent of the others.

1. `remember` keeps what is known of each array that a load returns, for as long as that array exists; `loaded_as` and
   `extent_of` find it again. They know the array object itself: one that was computed from it is never taken for it.
2. `make_mask` makes the boolean array: each process makes its own shards, and nothing is sent.
3. `to_numpy` and `cut_out` return the file's elements alone: as a NumPy array, or as a `jax.Array` where the mesh can hold it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload.arrays.assemble import addressable_shards, plain_jax, put_shard
from shardload.arrays.sharding import cuts_of, ids_text, read_spec, region_of
from shardload.errors import ConfigError
from shardload.planning.region import Array, IntArray, Region


@dataclass(frozen=True)
class Extent:
    """Where the file's elements are in an array that may have padding and halos.

    Parameters
    ----------
    shape : tuple of int
        Shape without padding and halos.
    shape_global : tuple of int
        Shape of the jax.Array.
    cuts : tuple of int
        Number of shards along each axis. It matters on an axis with a halo only.
    halo : tuple of int
        Rows that each shard has on either side in addition to its own, along each axis.

    Examples
    --------
    Seven elements, padded to eight, over two shards with a halo of one:

    >>> e = Extent((7,), (12,), (2,), (1,))
    >>> e.places(0).tolist()
    [-1, 0, 1, 2, 3, -1, -1, 4, 5, 6, -1, -1]
    """

    shape: tuple[int, ...]
    shape_global: tuple[int, ...]
    cuts: tuple[int, ...]
    halo: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """True if there is neither padding nor halo."""
        return self.shape == self.shape_global

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of a shard, with padding and halo."""
        return tuple(n // c for n, c in zip(self.shape_global, self.cuts, strict=True))

    @property
    def shape_without_halo(self) -> tuple[int, ...]:
        """Shape with padding, without halo."""
        return tuple(n - 2 * c * h for n, c, h in zip(self.shape_global, self.cuts, self.halo, strict=True))

    def places(self, axis: int, start: int = 0, stop: int | None = None) -> IntArray:
        """For each position of the jax.Array along an axis: its index in the file's array; -1 for padding and halo."""
        stop = self.shape_global[axis] if stop is None else stop
        extent, halo = max(1, self.shard_shape[axis]), self.halo[axis]
        shard, offset = np.divmod(np.arange(start, stop, dtype=np.int64), extent)
        offset -= halo
        index: IntArray = shard * (extent - 2 * halo) + offset
        index[(offset < 0) | (offset >= extent - 2 * halo) | (index >= self.shape[axis])] = -1
        return index


# --- which extent has an array?

Version = tuple[int, ...]  # of a file


@dataclass(eq=False)
class LoadedArray:
    """What is known of an array that a load returned.

    Attributes
    ----------
    extent : Extent
        Where the file's elements are in it.
    is_decoded : bool or None
        Whether it was decoded, or has packed numbers as they are stored; None if nothing says so.
    version : tuple of int or None
        Of its file.
    """

    extent: Extent
    is_decoded: bool | None
    version: Version | None = None


# By the id of an array that a load returned. An entry goes when its array does, so an id is never that of another array.
_loaded: dict[int, LoadedArray] = {}
# By the axes with padding or halos, and the lengths along them. These stay: one entry for each shape that was ever loaded.
_padded: dict[tuple[int, ...], dict[Any, Extent]] = {}


def remember(array: jax.Array, extent: Extent, is_decoded: bool | None = None) -> None:
    """Keep what is known of an array that a load returns, for as long as the array exists."""
    _loaded[id(array)] = LoadedArray(extent, is_decoded)
    weakref.finalize(array, _loaded.pop, id(array), None).atexit = False
    if not extent.is_whole:
        axes = tuple(k for k, (n, padded) in enumerate(zip(extent.shape, extent.shape_global, strict=True)) if n != padded)
        _padded.setdefault(axes, {})[_lengths(array, axes)] = extent


def loaded_as(array: Any) -> LoadedArray | None:
    """What is known of this very array; None if no load returned it."""
    return _loaded.get(id(array))


def version_of(array: Any) -> Version | None:
    """Which version of its file a load has read for this very array; None if nothing says so."""
    loaded = loaded_as(array)
    return None if loaded is None else loaded.version


def padded_like(array: jax.Array) -> tuple[Extent, dict[int, int]] | None:
    """The extent of an array with padding or halos that a load has returned, and from which this one may have been computed.
    And of its axes, those that have padding or halos there: from their numbers here to their numbers there.

    Along these it is as long, and cut as that one is. Other axes may have gone, as in a mean over time, or have come, and all
    may have another order. Whether that one still exists does not matter: when it goes depends on garbage collection, and on
    whether it was donated.
    """
    for axes, extents in _padded.items():
        alike = [axes] if axes[-1] < array.ndim else []
        for own_axes in (*alike, *permutations(range(array.ndim), len(axes))):
            if (extent := extents.get(_lengths(array, own_axes))) is not None:
                return extent, dict(zip(own_axes, axes, strict=True))
    return None


def _lengths(array: jax.Array, axes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    cut = array.sharding.shard_shape(array.shape)
    return tuple((array.shape[k], cut[k]) for k in axes)


def extent_of(array: jax.Array, extent: Extent | Sequence[int] | None, name: str) -> Extent:
    """The extent of an array.

    Parameters
    ----------
    array : jax.Array
        The array.
    extent : Extent, shape or None
        What the caller says of it; None: it is an array that a load returned.
    name : str
        Name of the array in error messages.

    Raises
    ------
    ConfigError
        If the array is not known, or what is given does not fit it.
    """
    if extent is None:
        loaded = loaded_as(array)
        if loaded is None:
            raise ConfigError(
                f"{name} of shape {array.shape} is not an array that shardload returned, so nothing says which of its elements "
                "are the file's. (An array that was computed, copied or moved from a loaded one is another array.) Pass the "
                "plan too, or the shape without padding: mask(x, plan), unpad(x, (1000, 3))"
            )
        return loaded.extent
    if not isinstance(extent, Extent):
        extent = _extent_of_shape(array, extent, name)
    if extent.shape_global != array.shape:
        raise ConfigError(
            f"{name} has shape {array.shape}, but an array of this plan has shape {extent.shape_global}. Pass the plan that it "
            "was loaded by"
        )
    return extent


def _extent_of_shape(array: jax.Array, shape: Any, name: str) -> Extent:
    numbers = shape if isinstance(shape, (tuple, list)) else (shape,)
    if not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in numbers):
        shape_text = "a tree" if isinstance(shape, (dict, list)) else repr(shape)
        raise ConfigError(
            f"the plan or shape is {shape_text}; expected the Plan of {name}, or its shape without padding, such as (1000, 3). "
            "If it is the plan of a tree, pass the Plan of this array: plan.plans['name']"
        )
    shape = tuple(map(int, numbers))
    if len(shape) != array.ndim or any(not 0 <= n <= m for n, m in zip(shape, array.shape, strict=True)):
        raise ConfigError(
            f"{name} has shape {array.shape}, which cannot be {shape} with padding: expected {array.ndim} numbers, each at "
            "most as large as that of the array"
        )
    return Extent(shape, array.shape, (1,) * array.ndim, (0,) * array.ndim)


# --- the mask


@plain_jax()
def make_mask(extent: Extent, sharding: Any) -> jax.Array:
    """A boolean array, True where an element is the file's. Not collective, but every process of the mesh must make it.

    Parameters
    ----------
    extent : Extent
        Where the file's elements are.
    sharding : Sharding
        The sharding of the mask.
    """
    shape = extent.shape_global

    @cache  # replicas have the same values
    def values_of(region: Region) -> Array:
        values = np.asarray(True)
        for axis, bounds in enumerate(zip(region.start, region.stop, strict=True)):
            values = np.logical_and.outer(values, extent.places(axis, *bounds) >= 0)
        return values

    return jax.make_array_from_callback(shape, sharding, lambda index: values_of(region_of(index, shape)), dtype=np.dtype(bool))


# --- the file's elements alone


@plain_jax()
def to_numpy(array: jax.Array, extent: Extent, name: str) -> Array:
    """The file's elements as a NumPy array, whole on every process.

    Collective over the processes of the mesh if some of them hold shards that others do not: then each device needs memory for
    the whole array.
    """
    if not array.sharding.addressable_devices:
        raise ConfigError(
            f"this process holds no device of the mesh of {name}, so it has no values to return: call unpad on the others only"
        )
    if array.is_fully_addressable or array.is_fully_replicated:
        out = np.empty(extent.shape, dtype=array.dtype)
        copied = set()
        for shard in addressable_shards(array):
            region = region_of(shard.index, array.shape)
            if region not in copied:
                copied.add(region)
                bounds = zip(region.start, region.stop, strict=True)
                _place(out, np.asarray(shard.data), [extent.places(k, *bound) for k, bound in enumerate(bounds)])
        return out
    mesh = _named(array, name).mesh
    whole = _cut_on_devices(array, extent, NamedSharding(mesh, PartitionSpec()))
    return np.asarray(whole.addressable_data(0))


def _place(out: Array, data: Array, places: list[IntArray]) -> None:
    """Copy the values of a shard to where they belong; `places` is -1 for what belongs nowhere."""
    unpadded = [np.flatnonzero(along >= 0) for along in places]
    into = [along[indices] for along, indices in zip(places, unpadded, strict=True)]
    if all(len(indices) for indices in unpadded):
        out[_index(into)] = data[_index(unpadded)]


def _index(along: list[IntArray]) -> Any:
    """Ascending indices along each axis as a NumPy index: slices where they have no gaps."""
    if all(int(indices[-1]) - int(indices[0]) + 1 == len(indices) for indices in along):
        return (*(slice(int(indices[0]), int(indices[-1]) + 1) for indices in along), ...)
    return np.ix_(*along)


@plain_jax()
def cut_out(array: jax.Array, extent: Extent, sharding: Any, name: str) -> jax.Array:
    """The file's elements as a `jax.Array`. Collective over the processes of the mesh, unless nothing has to move.

    Parameters
    ----------
    array : jax.Array
        The array, with padding and halos.
    extent : Extent
        Where the file's elements are.
    sharding : Sharding or None
        The sharding of the result; None: that of `array`.
    name : str
        Name of the array in error messages.

    Raises
    ------
    ConfigError
        If the shape does not divide over the mesh, or the sharding has other devices than the array, or another order of them.
    """
    if sharding is None and extent.is_whole:
        return array
    target = _named(array, name) if sharding is None else sharding
    if not isinstance(target, NamedSharding) or isinstance(target.mesh, jax.sharding.AbstractMesh):
        raise ConfigError(f"sharding is {target!r}; expected a NamedSharding over a mesh of devices")
    target_ids, array_ids = _device_ids(target, extent.shape), _device_ids(array.sharding, array.shape)
    if target_ids != array_ids:
        raise ConfigError(
            f"sharding is over the devices [{ids_text(target_ids)}], but {name} is on [{ids_text(array_ids)}]. Pass one over "
            "the same devices in this order, such as NamedSharding(x.sharding.mesh, P()), and move the result by jax.device_put"
        )
    _check_holds(target, extent.shape, name)
    is_cut_alike = target == array.sharding and array.sharding.shard_shape(array.shape) == extent.shard_shape
    if is_cut_alike and extent.shape == extent.shape_without_halo:
        return _cut_each_shard(array, extent, target)
    return _cut_on_devices(array, extent, target)


def _device_ids(sharding: Any, shape: tuple[int, ...]) -> list[int]:
    """The ids in the order of the mesh, if there is one: a compiled function of JAX moves nothing between two orders."""
    devices = sharding.mesh.devices.flat if isinstance(sharding, NamedSharding) else sharding.devices_indices_map(shape)
    return [device.id for device in devices]


def _named(array: jax.Array, name: str) -> NamedSharding:
    if isinstance(array.sharding, NamedSharding):
        return array.sharding
    raise ConfigError(
        f"{name} has a {type(array.sharding).__name__}, which says nothing of mesh axes. Pass numpy=True for a NumPy array, or "
        "the sharding of the result: sharding=NamedSharding(mesh, P(...))"
    )


def _check_holds(sharding: NamedSharding, shape: tuple[int, ...], name: str) -> None:
    """Raise ConfigError unless an array of this shape divides evenly."""
    parts = cuts_of(sharding, read_spec(sharding, len(shape)))
    uneven = [axis for axis, (n, p) in enumerate(zip(shape, parts, strict=True)) if n % p]
    if uneven:
        axis, spec = uneven[0], sharding.spec
        fitting = ", ".join(repr(None if k in uneven else entry) for k, entry in enumerate(spec))
        raise ConfigError(
            f"without padding, axis {axis} of {name} has {shape[axis]} elements, which do not divide over {parts[axis]} "
            "devices, so no jax.Array with this sharding can hold it. Pass numpy=True for a NumPy array on every process, or a "
            f"sharding that can hold it: sharding=NamedSharding(mesh, P({fitting})), if the memory of a device is enough. To "
            "leave the padding out of a computation, use mask"
        )


def _cut_each_shard(array: jax.Array, extent: Extent, sharding: NamedSharding) -> jax.Array:
    """Take the halo off each shard where it is."""
    index = tuple(slice(h, n - h) for h, n in zip(extent.halo, extent.shard_shape, strict=True))
    cores = []
    for shard in addressable_shards(array):
        with plain_jax(Mesh(np.array([shard.device]), ("device",))):
            cores.append(put_shard(shard.data[index], shard.device, sharding))
    return jax.make_array_from_single_device_arrays(extent.shape, sharding, cores, dtype=array.dtype)


def _cut_on_devices(array: jax.Array, extent: Extent, sharding: NamedSharding) -> jax.Array:
    """Let JAX cut it out, which moves what has to move. Over Auto axes, because JAX refuses such cuts of Explicit ones."""
    if 0 in extent.shape:  # JAX gives it another sharding than it is told
        empty = np.empty(sharding.shard_shape(extent.shape), array.dtype)
        return jax.make_array_from_callback(extent.shape, sharding, lambda _: empty, dtype=array.dtype)
    target = _auto(sharding)
    with plain_jax(_auto_mesh(sharding)):
        unconstrained = array
        if isinstance(array.sharding, NamedSharding):
            auto = _auto(array.sharding)
            shards = [put_shard(shard.data, shard.device, auto) for shard in addressable_shards(array)]
            unconstrained = jax.make_array_from_single_device_arrays(array.shape, auto, shards, dtype=array.dtype)
        if array.dtype.name in ("int2", "uint2"):
            unconstrained = unconstrained.astype("int8")  # XLA writes beyond its memory where it moves 2 bits
        cut = _cutter(extent, target)(unconstrained).astype(array.dtype)
        shards = [put_shard(shard.data, shard.device, sharding) for shard in addressable_shards(cut)]
        return jax.make_array_from_single_device_arrays(extent.shape, sharding, shards, dtype=array.dtype)


@lru_cache(maxsize=32)  # compiled once for a series of arrays
def _cutter(extent: Extent, sharding: NamedSharding) -> Any:
    return jax.jit(partial(_cut, extent, sharding), out_shardings=sharding)


def _auto(sharding: NamedSharding) -> NamedSharding:
    """The same sharding over Auto axes, in the devices' own memory: older releases of JAX cannot compute elsewhere."""
    return NamedSharding(_auto_mesh(sharding), sharding.spec)


def _auto_mesh(sharding: NamedSharding) -> Mesh:
    return Mesh(sharding.mesh.devices, sharding.mesh.axis_names)


def _cut(extent: Extent, sharding: NamedSharding, x: Any) -> Any:
    """The file's elements of a whole array, moved as integers.

    Where XLA adds zeros to what it moves, -0.0 would become 0.0; and it widens bfloat16, which changes some NaN. Without the
    barriers it takes the types back.
    """
    if jnp.iscomplexobj(x):
        return jax.lax.complex(_cut(extent, sharding, jnp.real(x)), _cut(extent, sharding, jnp.imag(x)))
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = jax.lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")  # type: ignore[no-untyped-call]
        cut = jax.lax.optimization_barrier(_cut(extent, sharding, jax.lax.optimization_barrier(bits)))
        return jax.lax.bitcast_convert_type(cut, x.dtype)
    for axis, (n, cuts, rows, halo) in enumerate(zip(extent.shape, extent.cuts, extent.shard_shape, extent.halo, strict=True)):
        if halo:
            before, after = x.shape[:axis], x.shape[axis + 1 :]
            x = x.reshape(*before, cuts, rows, *after)
            x = jax.lax.slice_in_dim(x, halo, rows - halo, axis=axis + 1)
            x = x.reshape(*before, cuts * (rows - 2 * halo), *after)
        x = jax.lax.slice_in_dim(x, 0, n, axis=axis)
    return jax.lax.with_sharding_constraint(x, sharding)
