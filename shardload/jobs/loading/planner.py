"""How does a load come from metadata and checked arguments to a plan?

1. Check that the array can be loaded: dtype, axes, the sharding against JAX's own index map, one chunk against `staging`.
2. Plan every possible way of reading.
3. Take the way that the caller asked for, or the better one by `planning.cost`.

This module opens no file and sends no message, and a plan holds no open file and no communicator. Ranks that ask for the same
make the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from shardload.arrays.sharding import cuts_of, layout_shards, padded_shape, read_halo, read_spec, verify_layout
from shardload.comm.group import UNKNOWN_NBYTES
from shardload.comm.store import RATE
from shardload.errors import ConfigError, SourceError
from shardload.formats.contract.array import ArrayInfo
from shardload.jobs.loading.plan import LoadLayout, Plan
from shardload.jobs.loading.request import Request
from shardload.options import AUTO, Options, pad_value
from shardload.planning.cost import Cost, choose_mode
from shardload.planning.region import BLOCKS_PER_OWNER, LONGEST_ROW_NBYTES, Grid, plan_blocks, plan_row_chunks
from shardload.planning.schedule import DIRECT, MODES, PARALLEL, ROOT, Owners, Schedule, SourceLayout, plan_direct, plan_shared
from shardload.planning.selection import Selection, select_axes
from shardload.planning.shards import Shards
from shardload.planning.staging import ample_staging, least_staging
from shardload.planning.tuning import default_tuning
from shardload.storage.remote import MOST_AHEAD_NBYTES
from shardload.transfer.cast import is_wide
from shardload.units import format_nbytes
from shardload.values.decoding import decoding_of

# Memory of one reading rank, in blocks: three staging buffers, two buffers of packed parts, and about as much again in the
# threads that decode.
_BLOCKS_HELD = 7
_MOST_NBYTES, _MOST_SHARD_NBYTES = 2**63 - 1, 2**56  # NumPy can count the first; processors can address the second
_MOST_FETCHED_TWICE = 1.05
_UNEVEN = 1.1  # of many arrays, the reader with the most bytes may have so many times the mean
_IN_TURN_NBYTES = 64 << 20  # larger arrays have enough blocks for all readers
_NO_MPI = f"without MPI all that moves between nodes passes through JAX's coordinator, at {RATE}"


@dataclass(frozen=True)
class PlannedRanks:
    """The ranks that a load is planned for, as plain numbers.

    Attributes
    ----------
    rank, n : int
        This rank, and the number of ranks.
    of_process : mapping of int to int, optional
        The rank of each JAX process; None for an abstract mesh, whose devices go to the ranks in mesh order.
    n_nodes : int
        Number of nodes that they run on.
    n_threads : int
        Cores that a rank has for itself.
    memory_nbytes : int
        Bytes of memory that a rank may use.
    has_mpi : bool
        True if the ranks send each other values by MPI.
    devices_per_rank : int
        For an abstract mesh: the number of consecutive devices of one rank.
    n_arrays : int
        Number of arrays that they load together.
    """

    rank: int
    n: int
    of_process: Mapping[int, int] | None = None
    n_nodes: int = 1
    n_threads: int = 1
    memory_nbytes: int = UNKNOWN_NBYTES
    has_mpi: bool = True
    devices_per_rank: int = 1
    n_arrays: int = 1


def max_block_nbytes(ranks: PlannedRanks, staging_nbytes: int, nbytes: int = 0) -> int:
    """Cap on the bytes of a block of an array of `nbytes`."""
    tuning, cap = default_tuning(), default_tuning().block_between_nodes_nbytes
    if ranks.n_nodes == 1:
        cap = max(tuning.block_nbytes, min(tuning.large_block_nbytes, nbytes // (ranks.n * tuning.large_blocks_per_rank)))
    return min(cap, staging_nbytes // _BLOCKS_HELD)


def blocks_for(n_arrays: int) -> int:
    """Fewest blocks for each rank that reads, if so many arrays are loaded together.

    Reading one array overlaps sending another one, so each needs fewer blocks, and each block costs Python.

    >>> [blocks_for(n) for n in (1, 2, 3, 40)]
    [4, 2, 2, 1]
    """
    return -(-BLOCKS_PER_OWNER // max(1, n_arrays))


def plan_array(
    request: Request, ranks: PlannedRanks, info: ArrayInfo, selection: Selection, modes: Sequence[str] = MODES
) -> Plan:
    """Plan the load of an array in a file from its metadata, in one of these ways of reading."""
    source = source_layout_of(request.options, info, selection)
    is_decoded = source.decoding is not None and source.dtype == source.decoding.dtype
    name = f"{info}, decoded," if is_decoded else str(info)
    shards = lay_out_shards(request, ranks, source.selection.shape, source.dtype, name)
    staging_nbytes = staging_for(request, ranks, info, source)
    max_nbytes = max_block_nbytes(ranks, staging_nbytes, math.prod(source.selection.shape) * source.wide_itemsize)
    readers = request.options.readers
    nbytes = math.prod(source.selection.shape) * source.file_dtype.itemsize
    # All share the reads, but on several nodes not of fewer bytes each than are worth opening the file there.
    worth = ranks.n if ranks.n_nodes == 1 else max(1, -(-nbytes // default_tuning().reader_nbytes))
    n_readers = min(readers if isinstance(readers, int) else worth, ranks.n)
    schedules = {DIRECT: plan_direct(source, shards, ranks.n, max_nbytes=max_nbytes)}
    caps = {"max_nbytes": max_nbytes, "per_owner": blocks_for(ranks.n_arrays)}
    owners = {mode: Owners(n_readers) if mode == PARALLEL else Owners() for mode in modes if mode != DIRECT}
    schedules |= {mode: plan_shared(source, shards, ranks.n, owners[mode], **caps) for mode in owners}
    ahead_nbytes = MOST_AHEAD_NBYTES if info.is_in_store else 0
    layouts = {mode: LoadLayout(source, schedules[mode], ranks.n_threads, ahead_nbytes) for mode in modes}
    mode, why = _choose(layouts, readers if len(modes) > 1 else modes[0], ranks, info)
    return Plan(
        info,
        request.sharding,
        mode,
        why,
        staging_nbytes,
        staging_is_raised=staging_nbytes != request.options.staging_nbytes,
        is_decoded=bool(request.options.decode),
        n_nodes=ranks.n_nodes,
        _layouts=layouts,
    )


def plan_scatter(request: Request, ranks: PlannedRanks, info: ArrayInfo, root: int, from_views: bool) -> Plan:
    """Plan the scatter of an array in the memory of `root`; `from_views` if it can be sent from views."""
    file_dtype = np.dtype(info.dtype)
    dtype = _target_dtype(request.options.dtype, info, file_dtype)
    shards = lay_out_shards(request, ranks, info.shape, dtype, f"the array on rank {root}")
    phase, most_nbytes = (0,) * len(info.shape), max_block_nbytes(ranks, request.options.staging_nbytes)
    # A block goes through a staging buffer, which is as long as a message may be: no run may be longer.
    itemsize = max(dtype.itemsize, file_dtype.itemsize)
    chunks = Grid(info.shape, plan_row_chunks(info.shape, itemsize, min(LONGEST_ROW_NBYTES, most_nbytes)), phase)
    if from_views:  # blocks are views: one per shard, however large
        chunks = Grid(info.shape, tuple(max(1, n) for n in shards.shard_shape), phase)
    blocks = chunks if from_views else plan_blocks(chunks, itemsize, max_nbytes=most_nbytes, n_owners=1)
    source = SourceLayout(select_axes(None, info.shape), chunks, None, file_dtype, dtype, info.codec)
    schedule = Schedule(blocks, shards, dtype.itemsize, ranks.n, Owners(root=root), max_message_nbytes=most_nbytes)
    why = f"rank {root} has the array{_cost_without_mpi(ranks)}"
    return Plan(
        info,
        request.sharding,
        ROOT,
        why,
        request.options.staging_nbytes,
        _layouts={ROOT: LoadLayout(source, schedule, ranks.n_threads)},
    )


def read_in_turn(ranks: PlannedRanks, plans: Sequence[Plan]) -> list[Plan]:
    """The plans of many arrays, so that one rank reads each of the small ones which several would have read together.

    A rank then opens fewer arrays, and there are fewer and larger blocks. Arrays of one layout and reader share the new one.
    """
    nbytes, owners = dict[int, int](), set[Owners]()
    for k, plan in enumerate(plans):
        n, of_plan = math.prod(plan.shape) * plan.dtype.itemsize, plan.schedule.owners
        if isinstance(of_plan, Owners) and of_plan.n > 1 and 0 < n <= _IN_TURN_NBYTES:
            nbytes[k] = n
            owners.add(of_plan)
    if len(owners) != 1:
        return list(plans)
    (shared,) = owners
    readers = dict(zip(nbytes, share_out(list(nbytes.values()), shared.n), strict=True))
    per_owner = blocks_for(len(nbytes) // shared.n)
    planned: dict[tuple[int, int], Plan] = {}
    turns = list(plans)
    for k, plan in enumerate(plans):
        reader = readers.get(k)
        if reader is not None:
            key = id(plan._layout), reader
            if key not in planned:
                planned[key] = _read_by(ranks, plan, shared.rank_of(reader, ranks.n), per_owner)
            turns[k] = replace(planned[key], info=plan.info)
    return turns


def share_out(sizes: Sequence[int], n_readers: int) -> list[int | None]:
    """The reader of each of some arrays, by their bytes; None for an array that all read together.

    Each reader gets neighbours. All are None if that would leave one with much more than the others.

    >>> share_out([5] * 8, 4), share_out([5] * 9, 4)
    ([0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 2, 2, 3, 3, None])
    >>> share_out([1, 1, 1, 100], 2), share_out([30, 10, 20, 20], 2)
    ([None, None, None, None], [0, 0, 1, 1])
    """
    n = len(sizes) if len(set(sizes)) > 1 else len(sizes) // n_readers * n_readers
    nbytes = np.array(sizes[:n], dtype=np.int64)
    total = int(nbytes.sum())
    if not total:
        return [None] * len(sizes)
    middle = 2 * np.cumsum(nbytes) - nbytes  # of each array, in half bytes
    readers = np.minimum(middle * n_readers // (2 * total), n_readers - 1)
    if np.bincount(readers, weights=nbytes).max() * n_readers > _UNEVEN * total:
        return [None] * len(sizes)
    return [*readers.tolist(), *[None] * (len(sizes) - n)]


def _read_by(ranks: PlannedRanks, plan: Plan, rank: int, per_owner: int) -> Plan:
    """The plan with one rank as the only reader."""
    layout = plan._layout
    max_nbytes = max_block_nbytes(ranks, plan.staging_nbytes)
    shards = layout.schedule.shards
    schedule = plan_shared(layout.source, shards, ranks.n, Owners(root=rank), max_nbytes=max_nbytes, per_owner=per_owner)
    why = f"{plan.why}; of many arrays, each is read by one rank, this one by rank {rank}"
    return replace(plan, why=why, _layouts={**plan._layouts, PARALLEL: replace(layout, schedule=schedule)})


def source_layout_of(options: Options, info: ArrayInfo, selection: Selection) -> SourceLayout:
    """How the selected array lies in its file, and how stored numbers become values.

    Raises
    ------
    ConfigError
        If they are to be decoded, and its attributes, or the stored values, are no numbers; or if a cast would lose a part.
    """
    stored_dtype, decoding = np.dtype(info.dtype), None
    if options.decode:
        decoding = decoding_of(stored_dtype, info.packing, str(info))
    dtype = _target_dtype(options.dtype, info, stored_dtype if decoding is None else decoding.dtype)
    object_shape = info.shards if info.is_in_store else None
    return SourceLayout.cut(selection, info.chunks, stored_dtype, dtype, info.codec, decoding, object_shape)


def _target_dtype(dtype: np.dtype[Any] | None, info: ArrayInfo, source_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that was asked for, or else `source_dtype`, that of the values. ConfigError if a cast would lose a part."""
    if dtype is not None and source_dtype.kind == "c" and dtype.kind not in "cb":
        raise ConfigError(
            f"{info} is {source_dtype}; as {dtype} its imaginary part would be lost. Pass no dtype, or a complex one, and take "
            "the real part of the result"
        )
    return source_dtype if dtype is None else dtype


def lay_out_shards(request: Request, ranks: PlannedRanks, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> Shards:
    """Cut the array by its sharding, and check dtype, axes, processes and JAX's index map."""
    sharding, pad = request.sharding, request.options.pad
    axes = read_spec(sharding, len(shape))
    fix = None if pad is not None else "pad=np.nan" if dtype.kind in "fc" else "pad=0"  # a mean that counts NaN is seen
    shape_global = padded_shape(shape, axes, sharding, fix, name)
    cuts = cuts_of(sharding, axes)
    halo = read_halo(request.options.halo, request.options.edge, shape, axes, cuts, name)
    shard_with_halo = [n // c + 2 * h for n, c, h in zip(shape_global, cuts, halo.widths, strict=True)]
    shape_with_halo = tuple(n * c for n, c in zip(shard_with_halo, cuts, strict=True))
    # NumPy also counts the other axes if one is empty.
    shapes = shape_with_halo, shard_with_halo
    nbytes, shard_nbytes = (math.prod(max(1, n) for n in shape) * dtype.itemsize for shape in shapes)
    if nbytes > _MOST_NBYTES or shard_nbytes > _MOST_SHARD_NBYTES:
        raise SourceError(
            f"{name} would have shape {shape_with_halo} as {dtype}, {tuple(shard_with_halo)} on each device: more than any "
            "machine can address. If that is no damage, pass select= with the part that is wanted"
        )
    if pad is not None and any(axes):  # an array that no mesh axis cuts is never padded: of a Dataset, often one of integers
        pad_value(pad, dtype)
    for edge in halo.values:
        pad_value(edge, dtype, "edge")
    if ranks.of_process is None:
        return layout_shards(sharding, axes, shape_global, None, devices_per_rank=ranks.devices_per_rank).with_halo(halo)
    _refuse_lossy(dtype, name)
    shards = layout_shards(sharding, axes, shape_global, ranks.of_process).with_halo(halo)
    verify_layout(shards, sharding, ranks.rank)
    return shards


def _refuse_lossy(dtype: np.dtype[Any], name: str) -> None:
    """Raise ConfigError if JAX would cut 64 bits to 32.

    The values are not known yet, so the message gives the limits of each dtype that it proposes.
    """
    if not is_wide(dtype) or jax.config.read("jax_enable_x64"):
        return
    if dtype.kind in "iu":
        loss, alternative = "wrap large values to 32 bits", "pass a dtype= of 32 bits or less that holds every value"
    else:
        small = "complex64" if dtype.kind == "c" else "float32"
        loss = f"lose half the digits, as {small}"
        alternative = f"pass dtype='{small}' if 7 digits, and nothing beyond {np.finfo(np.float32).max:.2g}, are enough"
    raise ConfigError(
        f"{name} would be loaded as {dtype}, but JAX has 64-bit types switched off and would silently {loss}. Switch them on "
        "before the first array: jax.config.update('jax_enable_x64', True), or JAX_ENABLE_X64=1 in the environment. Or "
        f"{alternative}: a value that does not fit is an error"
    )


def staging_for(request: Request, ranks: PlannedRanks, info: ArrayInfo, source: SourceLayout) -> int:
    """The staging cap in bytes: what was asked for, or what the chunks need if that is "auto".

    Raises
    ------
    ConfigError
        If that is too small to read, decode and send one chunk at a time.
    """
    needed = least_staging(source)
    reason = (
        f"one chunk of {info} is {format_nbytes(source.chunk_nbytes)}, and reading it takes {format_nbytes(needed)} (the chunk "
        "as stored, as decompressed, as decoded, as read and as sent)"
    )
    ample = ample_staging(source, ranks.n_threads)
    return request.options.staging_cap(needed, reason, memory_nbytes=ranks.memory_nbytes, ample=ample)


def _choose(layouts: Mapping[str, LoadLayout], readers: str | int, ranks: PlannedRanks, info: ArrayInfo) -> tuple[str, str]:
    """The way of reading that the caller asked for, or the better one, and the reason for it."""
    if readers == AUTO and not ranks.has_mpi:
        return DIRECT, f"each rank reads what it holds{_cost_without_mpi(ranks)}"
    if readers == AUTO:
        costs = {mode: layouts[mode].cost(0, ranks.n_nodes) for mode in (DIRECT, PARALLEL)}
        if info.is_in_store and ranks.n > 1 and not _is_in_order(layouts[DIRECT], costs[DIRECT], info):
            return PARALLEL, "the file is in a store: each byte is fetched once in the job, in large pieces"
        return choose_mode(costs, ranks.n, is_one_node=ranks.n_nodes == 1)
    if isinstance(readers, int):
        return PARALLEL, f"readers={readers} was asked for{_cost_without_mpi(ranks)}"
    return readers, f"readers={readers!r} was asked for{'' if readers == DIRECT else _cost_without_mpi(ranks)}"


def _is_in_order(layout: LoadLayout, cost: Cost, info: ArrayInfo) -> bool:
    """True if ranks that read what they hold read nothing twice, and each a contiguous part of the file. (Of Zarr each reads
    some objects, wherever its part lies.)
    """
    is_cut = layout.schedule.shards.shard_shape[1:] != layout.source.selection.shape[1:]
    is_scattered = is_cut and not info.format.startswith("Zarr")
    return cost.decoded_nbytes == 0 or (not is_scattered and cost.amplification <= _MOST_FETCHED_TWICE)


def _cost_without_mpi(ranks: PlannedRanks) -> str:
    return "" if ranks.has_mpi else f"; {_NO_MPI}"
