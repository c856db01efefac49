"""Which region does each device and process hold under this sharding?

This module turns JAX's shardings into plain regions, and has all the arithmetic on shardings:

1. Read from the sharding's spec which mesh axes cut each array axis (`read_spec`).
2. Check that every axis divides evenly, or pad it until it does (`padded_shape`).
3. Lay the rank of each device over the mesh, and transpose that by those axes, which gives a table from shard to ranks
   (`layout_shards`). The devices of an abstract mesh go to the ranks in its order.
4. Compare this process's entries in the table with JAX's own index map (`verify_layout`). Each process checks its own entries,
   so together they check the whole table, and a change in JAX's rules is an error instead of a wrong array.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload.errors import ConfigError, ShardloadError
from shardload.planning.region import Region
from shardload.planning.shards import WRAP, Halo, Shards, plan_shards
from shardload.units import counted, shown

MeshAxes = tuple[tuple[int, ...], ...]  # for each array axis, the positions of the mesh axes that cut it


def read_sharding(mesh: Any, spec: Any) -> NamedSharding:
    """The NamedSharding that the caller means by ``(mesh, spec)`` or by a sharding alone.

    Raises
    ------
    ConfigError
        If the two do not fit together or name no mesh.
    """
    if isinstance(mesh, NamedSharding):
        if spec is not None:
            raise ConfigError(
                f"a NamedSharding was given together with a spec {spec!r}: pass the sharding alone, or a mesh and a spec"
            )
        _check_mesh(mesh.mesh)
        refuse_unreduced(mesh.spec)
        return mesh
    if not isinstance(mesh, Mesh | jax.sharding.AbstractMesh):
        raise ConfigError(
            f"expected a jax.sharding.Mesh or NamedSharding, found {type(mesh).__name__}: {shown(mesh)}. Pass it before the "
            "spec; a mesh of all devices is Mesh(np.array(jax.devices()), ('a',))"
        )
    _check_mesh(mesh)
    if not isinstance(spec, PartitionSpec | tuple):
        raise ConfigError(f"the spec after a mesh is {spec!r}; expected a PartitionSpec such as P('a', 'b'), P() to replicate")
    refuse_unreduced(spec)
    mesh_axes = [name for entry in spec for name in _entry_names(entry)]
    for k, name in enumerate(mesh_axes):
        if name not in mesh.axis_names:
            raise ConfigError(f"{spec_text(spec)} names mesh axis {name!r}, but the axes of the mesh are {mesh_text(mesh)}")
        if name in mesh_axes[:k]:
            raise ConfigError(f"{spec_text(spec)} names mesh axis {name!r} twice; a mesh axis can cut one array axis")
    return NamedSharding(mesh, PartitionSpec(*spec))


@lru_cache(maxsize=16)  # a large mesh takes time to check, and many loads use the same mesh
def _check_mesh(mesh: Any) -> None:
    """Raise ConfigError if arrays cannot be on this mesh. JAX would say nothing, fail an assertion or end the process."""
    for name, size in mesh.shape.items():
        if size < 1:
            raise ConfigError(f"the mesh has no devices: its axis {name!r} has size {size}. Pass a mesh of one device or more")
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if str(kind).endswith("Manual"):
            raise ConfigError(
                f"the mesh axis {name!r} is Manual, which means the inside of jax.shard_map, where there are no arrays of the "
                "whole mesh. Load outside of it, with a mesh of Auto or Explicit axes"
            )
    devices = [] if isinstance(mesh, jax.sharding.AbstractMesh) else list(mesh.devices.flat)
    if len(set(devices)) < len(devices):
        raise ConfigError("the mesh has a device twice; a device can hold one shard of an array. Pass each once")


def refuse_unreduced(spec: Any, whose: str = "") -> None:
    """Raise ConfigError if a spec has unreduced or reduced axes: devices then hold parts of sums, of values or of gradients.
    JAX does not iterate over such a spec.
    """
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise ConfigError(
            f"{whose}{spec} has unreduced or reduced axes, and what is in a file has neither. Pass a spec without them; if it "
            "is that of an array x, jax.sharding.reshard(x, P(...)) adds up its parts first"
        )


def read_spec(sharding: NamedSharding, ndim: int) -> MeshAxes:
    """For each array axis, the positions of the mesh axes that cut it, major first.

    Raises
    ------
    ConfigError
        If the spec has more entries than the array has axes, leaves an axis to the compiler, or has unreduced axes.
    """
    spec = sharding.spec
    refuse_unreduced(spec)
    if len(spec) > ndim:
        raise ConfigError(
            f"{spec_text(spec)} has {len(spec)} entries, but the array has {ndim} {'axis' if ndim == 1 else 'axes'}. "
            "Give one entry per axis (None for an axis that is not cut); trailing ones may be left out"
        )
    names = tuple(sharding.mesh.axis_names)
    entries = [_entry_names(entry) for entry in spec] + [()] * (ndim - len(spec))
    return tuple(tuple(names.index(n) for n in entry) for entry in entries)


def cuts_of(sharding: NamedSharding, axes: MeshAxes) -> list[int]:
    """The number of shards along each array axis, given which mesh axes cut it (`read_spec`)."""
    sizes = tuple(sharding.mesh.shape.values())
    return [math.prod(sizes[m] for m in cut) for cut in axes]


def _entry_names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if entry is PartitionSpec.UNCONSTRAINED:
        raise ConfigError("P.UNCONSTRAINED leaves the layout to the compiler; a load needs to know it: use a name or None")
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def spec_text(spec: Any) -> str:
    """A spec as it is typed."""
    return "P(" + ", ".join(map(repr, spec)) + ")"


def mesh_text(mesh: Any) -> str:
    """The axes of a mesh, and their sizes."""
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items()) or "(none)"


def padded_shape(shape: Sequence[int], axes: MeshAxes, sharding: NamedSharding, fix: str | None, name: str) -> tuple[int, ...]:
    """The shape of the global array: `shape`, with axes that do not divide evenly padded, or an error if that needs a `fix`
    (what to pass).

    Raises
    ------
    ConfigError
        If an axis does not divide evenly, and there is a `fix`. The text names the axis, the sizes and what to type.
    """
    padded = []
    for axis, (n, parts) in enumerate(zip(shape, cuts_of(sharding, axes), strict=True)):
        up = -(-n // parts) * parts
        if up != n and fix is not None:
            good = [str(d) for d in range(2, min(n, 64) + 1) if n % d == 0][:5]
            alternative = f", or use a mesh axis of {', '.join(good)}" if good else ""
            raise ConfigError(
                f"axis {axis} of {name} has {n} elements, but {spec_text(sharding.spec)} splits it over {parts} devices. "
                f"Pass {fix} (or another fill value) to pad it to {up}{alternative}"
            )
        padded.append(up)
    return tuple(padded)


def read_halo(halo: Any, edge: Any, shape: Sequence[int], axes: MeshAxes, cuts: Sequence[int], name: str) -> Halo:
    """The halo that the caller means by the options `halo` and `edge`.

    Parameters
    ----------
    halo, edge : object
        The options, as `Option.check` returns them.
    shape : sequence of int
        The array without padding.
    axes : tuple of tuple of int
        From `read_spec`.
    cuts : sequence of int
        Number of shards along each axis.
    name : str
        Name of the array, for messages.

    Raises
    ------
    ConfigError
        If an axis is not one of the array's, is padded, or has shards that are narrower than the halo.
    """
    ndim = len(shape)
    for option, value in (("halo", halo), ("edge", edge)):
        if isinstance(value, tuple) and len(value) > ndim:
            raise ConfigError(f"{option} is {value!r}, for {len(value)} axes, but {name} has {ndim}")
    if isinstance(halo, int):
        if halo and not any(axes):
            raise ConfigError(
                f"halo is {halo}, which is for the axes that the spec cuts, but it cuts none of {name}. Say which axis is "
                f"meant, such as halo=({halo},) for axis 0, or pass no halo"
            )
        widths = {axis: halo for axis, cut in enumerate(axes) if cut}
    else:
        widths = dict(enumerate(halo))
    edges = dict(enumerate(edge if isinstance(edge, tuple) else (edge,) * ndim))
    for axis, h in widths.items():
        n, c = shape[axis], cuts[axis]
        if h and axis not in edges:
            raise ConfigError(f"halo is {h} on axis {axis} of {name}, but edge is {edge!r}, which says nothing of that axis")
        if h and n % c:
            raise ConfigError(
                f"halo is {h} on axis {axis} of {name}, whose {n} elements do not divide over {c} devices: some halos "
                "would be padding, not the file's rows. Pass select= with a part that divides, a mesh axis that divides it, or "
                "no halo on that axis"
            )
        if h > n // c:
            raise ConfigError(
                f"halo is {h} on axis {axis} of {name}, but a shard has {n // c} elements there ({n} over {c} devices), and a "
                f"halo has rows of the nearest neighbours only. Pass at most {n // c}, or cut that axis into fewer shards"
            )
    return Halo(tuple(widths.get(axis, 0) for axis in range(ndim)), tuple(edges.get(axis, WRAP) for axis in range(ndim)))


def layout_shards(
    sharding: NamedSharding,
    axes: MeshAxes,
    shape_global: Sequence[int],
    rank_of_process: Mapping[int, int] | None,
    *,
    devices_per_rank: int = 1,
) -> Shards:
    """Which rank holds which shard.

    Parameters
    ----------
    sharding : NamedSharding
        A sharding over a mesh of devices or an AbstractMesh.
    axes : tuple of tuple of int
        From `read_spec`.
    shape_global : sequence of int
        The padded shape.
    rank_of_process : mapping of int to int, or None
        The MPI rank of each JAX process. None for an abstract mesh: its devices go to the ranks in mesh order.
    devices_per_rank : int
        For an abstract mesh: the number of consecutive devices of one rank.

    Raises
    ------
    ConfigError
        If a device of the mesh belongs to a process that takes no part in the call.
    """
    sizes = tuple(sharding.mesh.shape.values())
    if rank_of_process is None:
        ranks = np.arange(math.prod(sizes)).reshape(sizes) // devices_per_rank
    else:
        processes = np.array([d.process_index for d in sharding.mesh.devices.flat], dtype=np.int64)
        ranks_by_process = np.full(1 + max(int(processes.max(initial=0)), max(rank_of_process, default=0)), -1, dtype=np.int64)
        ranks_by_process[np.fromiter(rank_of_process, np.int64)] = np.fromiter(rank_of_process.values(), np.int64)
        rank_of_device = ranks_by_process[processes]
        if (rank_of_device < 0).any():
            raise ConfigError(
                f"the mesh has devices of JAX process {processes[rank_of_device < 0].min()}, which takes no part in this call: "
                f"the communicator has the processes {sorted(rank_of_process)}. Pass a comm with every process of the mesh, or "
                "a smaller mesh"
            )
        ranks = rank_of_device.reshape(sizes)
    return plan_shards(shape_global, axes, ranks)


def devices_per_process(mesh: Any, processes: Any) -> int:
    """How many devices of an abstract mesh each of `processes` processes has; 1 if `processes` is None.

    The order is JAX's: the first process has the first devices of the mesh, the second process the next ones, and so on.

    Raises
    ------
    ConfigError
        If its devices cannot be divided evenly among the processes.

    Examples
    --------
    >>> devices_per_process(jax.sharding.AbstractMesh((2, 4), ("a", "b")), 2)
    4
    """
    if processes is None:
        return 1
    n_devices = math.prod(mesh.shape.values())
    is_number = isinstance(processes, (int, np.integer)) and not isinstance(processes, bool)
    if not is_number or processes < 1 or n_devices % processes:
        raise ConfigError(
            f"processes is {processes!r}, but the mesh has {counted(n_devices, 'device')}, and each process must have as many "
            f"as the others: expected a number that divides {n_devices}"
        )
    return int(n_devices // processes)


@lru_cache(maxsize=256)
def device_regions(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Any, Region]:
    """The region that each device of this process holds, by JAX's index map. Arrays of one shape and sharding share it."""
    indices: dict[Any, Any] = dict(sharding.addressable_devices_indices_map(shape))
    return {device: region_of(index, shape) for device, index in indices.items()}


def region_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Region:
    """The region that an index of JAX means. None means all: JAX has that for arrays without axes, and in some releases for
    replicated ones.
    """
    return Region.from_index((slice(None),) * len(shape) if index is None else index, shape)


def verify_layout(shards: Shards, sharding: NamedSharding, rank: int) -> None:
    """Compare the table with JAX's index map, for this process.

    Raises
    ------
    ShardloadError
        If they differ. Then devices would get wrong values; nothing has been read or sent yet.
    """
    planned = {shards.region(s) for s in shards.shards_of(rank)}
    regions_of_jax = set(device_regions(sharding, shards.shape_global).values())
    if planned != regions_of_jax:
        texts = [", ".join(map(str, sorted(regions))) or "none" for regions in (planned, regions_of_jax)]
        raise ShardloadError(
            f"the plan gives rank {rank} the regions {texts[0]}, but JAX's index map says that its devices "
            f"hold {texts[1]}: nothing was loaded. This is a defect in shardload (JAX {jax.__version__}); "
            "please report it with the mesh and the spec"
        )


def describe_decomposition(shards: Shards) -> str:
    """As simulators call it: whole, replicated, slab (one axis cut), pencil (two), block (all, or more than two)."""
    n_cut = sum(c > 1 for c in shards.cuts)
    if n_cut == 0:
        return "replicated" if shards.n_replicas > 1 else "whole"
    if n_cut == 1:
        return "slab"
    return "pencil" if n_cut == 2 and len(shards.cuts) > 2 else "block"


def describe_sharding(sharding: NamedSharding) -> str:
    """The sharding as one line of text. It is equal on two ranks exactly when the shardings are equal."""
    mesh = sharding.mesh
    devices = None if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.devices
    ids, whose = "abstract" if devices is None else ids_text([d.id for d in devices.flat]), ""
    if devices is not None and jax.process_count() > 1 and len({d.process_index for d in devices.flat}) == 1:
        whose = " of one process (jax.devices() has those of all)"
    return f"mesh {dict(mesh.shape)} of devices [{ids}]{whose}, {spec_text(sharding.spec)}, memory {sharding.memory_kind}"


def ids_text(ids: Sequence[int]) -> str:
    """The ids of devices in their order, as text."""
    if len(ids) <= 64:
        return ",".join(map(str, ids))
    # All ranks compare this text, and an error shows it, so a long list is replaced by its hash.
    digest = hashlib.blake2b(np.array(ids, dtype=np.int64).tobytes(), digest_size=16).hexdigest()
    return f"{ids[0]}, ... {ids[-1]}; {len(ids)} with hash {digest}"
