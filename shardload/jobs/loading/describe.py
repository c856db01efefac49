"""How is a plan shown to a person? As text of a given width, which a notebook shows too, or as one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardload.arrays.sharding import spec_text
from shardload.errors import printable
from shardload.planning.cost import Cost
from shardload.storage.remote import PIECE_NBYTES, is_remote
from shardload.system.terminal import WIDTH, Column, fit_table, wrap, wrap_parts
from shardload.units import counted, format_nbytes

if TYPE_CHECKING:
    from shardload.jobs.loading.plan import Plan

_AT_ONCE, _LATENCY_SECONDS, _CONNECTION_NBYTES = 16, 0.02, 60 * 10**6  # of a store as it is assumed to be: S3 in its region
_WIDE = 60  # from this width on, names have a column of their own


def describe_plan(plan: Plan, width: int = WIDTH) -> str:
    """A plan as text that fits `width` columns: what is loaded, and a table of the cost of each way of reading."""
    lines = wrap(f"load '{printable(plan.info.dataset)}', {plan.info.format}", width, "", "  ")
    for name, text in _facts(plan).items():
        first = f"  {name:<10}" if width >= _WIDE else f"  {name}  "
        parts = [text] if name in ("file", "taken") else text.split("; ")
        lines += wrap_parts(parts, width, first, None if width >= _WIDE else "    ")
    return "\n".join([*lines, "", *_table(plan, width)])


def describe_plan_in_a_line(plan: Plan) -> str:
    """A plan in one line, for its `repr`."""
    taken = f"{plan.readers}, {plan.n_readers} of {plan.n_ranks} ranks read"
    what = f"{shape_text(plan.shape_global)} {plan.dtype} as {plan.decomposition} {spec_text(plan.sharding.spec)}"
    return f"<Plan of {printable(str(plan.info))}: {what} on mesh {mesh_text(plan.sharding)}; {taken}>"


def mesh_text(sharding: Any) -> str:
    """The axes of a sharding's mesh."""
    return ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items()) or "(none)"


def shape_text(shape: Sequence[int]) -> str:
    """A shape in brackets, without a comma after a single number."""
    return "(" + ", ".join(map(str, shape)) + ")"


def _facts(plan: Plan) -> dict[str, str]:
    info = plan.info
    shard_nbytes = math.prod(plan.shard_shape) * plan.dtype.itemsize
    nbytes_chunk = math.prod(info.chunks or ()) * np.dtype(info.dtype).itemsize if plan.staging_is_raised else 0
    halo = plan.halo_text
    padded = f", padded to {shape_text(plan.shape_padded)}" if plan.shape_padded != plan.shape else ""
    padded += f", with halos {shape_text(plan.shape_global)}" if halo else ""
    selected = f" of {shape_text(info.shape)}" if plan.shape != info.shape else ""
    cast = "" if plan.decoded_dtype is None else f" decoded to {plan.decoded_dtype}"
    cast += f" cast to {plan.dtype}" if str(plan.dtype) != str(plan.decoded_dtype or info.dtype) else ""
    chunks = "no chunks (any part can be read)" if info.chunks is None else f"chunks {shape_text(info.chunks)}, {info.codec}"
    store = {"store": _store(plan)} if is_remote(info.path) else {}
    replicas = f", {plan.n_replicas} replicas" if plan.n_replicas > 1 else ""
    return {
        "file": printable(info.path),
        **store,
        "array": f"{shape_text(plan.shape)}{selected}{padded}, {info.dtype}{cast}, {format_nbytes(plan.nbytes)}; {chunks}",
        "sharding": f"{plan.decomposition}: {spec_text(plan.sharding.spec)} on mesh {mesh_text(plan.sharding)}{replicas}; "
        f"shard {shape_text(plan.shard_shape)}, {format_nbytes(shard_nbytes)}" + (f"; halo {halo}" if halo else ""),
        "ranks": f"{plan.n_ranks}{f' on {plan.n_nodes:,} nodes' if plan.n_nodes > 1 else ''}, {plan.n_readers} of them read; "
        f"staging cap {format_nbytes(plan.staging_nbytes)} per rank"
        + (f", because of chunks of {format_nbytes(nbytes_chunk)}" if plan.staging_is_raised else ""),
        "taken": f"{plan.readers}: {plan.why}",
    }


def _store(plan: Plan) -> str:
    """What is asked of a store, and how long that takes where nothing else does."""
    info, cost = plan.info, plan.costs[plan.readers]
    per_object = math.prod(info.shards or info.chunks or (1,)) * np.dtype(info.dtype).itemsize
    n_objects = -(-cost.decoded_nbytes // max(1, per_object)) if info.format.startswith("Zarr") else 0
    n = n_objects if n_objects and info.shards is None else -(-cost.decoded_nbytes // PIECE_NBYTES) + n_objects
    share = cost.reader_nbytes / max(1, cost.decoded_nbytes)
    seconds = -(-n * share // _AT_ONCE) * _LATENCY_SECONDS + cost.reader_nbytes / (_AT_ONCE * _CONNECTION_NBYTES)
    return (
        f"some {counted(n, 'request')} for {format_nbytes(cost.decoded_nbytes)}, fewer of both if compression helps; "
        f"{_AT_ONCE} at a time of each reader, {format_nbytes(plan.ahead_nbytes)} at most fetched ahead; "
        f"{seconds:.2g} s at {_LATENCY_SECONDS * 1000:.0f} ms each and {_CONNECTION_NBYTES // 10**6} MB/s a connection"
    )


def _quantities(plan: Plan, costs: Sequence[Cost]) -> dict[str, list[str]]:
    """A row for each quantity with its value for each way."""
    return {
        "readers": [f"{c.n_readers:,}" for c in costs],
        "decoded": [_decoded(plan, c) for c in costs],
        "amplification": [f"{c.amplification:.2f}x" for c in costs],
        "per reader": [format_nbytes(c.reader_nbytes) for c in costs],
        "messages": [f"{'<= ' if c.messages else ''}{c.messages:,}" for c in costs],
        "between ranks": [f"{'<= ' if c.messages else ''}{format_nbytes(c.moved_nbytes)}" for c in costs],
        "peak host": [format_nbytes(c.peak_nbytes) for c in costs],
    }


def _decoded(plan: Plan, cost: Cost) -> str:
    """What all ranks together decode or, without chunks, read."""
    if plan.info.chunks is None:
        return format_nbytes(cost.decoded_nbytes)
    is_whole = cost.decoded_nbytes >= cost.chunks_decoded * math.prod(plan.info.chunks) * np.dtype(plan.info.dtype).itemsize
    return ("" if is_whole else "parts of ") + counted(cost.chunks_decoded, "chunk")


def _table(plan: Plan, width: int) -> list[str]:
    """A table with a column for each way of reading."""
    costs = plan.costs
    if plan.n_ranks == 1 and plan.readers in costs:  # each way is the same
        costs = {plan.readers: costs[plan.readers]}
    ways = [Column(f"-> {mode}" if mode == plan.readers else mode, is_number=True, lead=mode) for mode in costs]
    rows = [[name, *cells] for name, cells in _quantities(plan, list(costs.values())).items()]
    lines = fit_table([Column(""), *ways], rows, width - 2)
    return [f"  {line}" for line in lines]


def describe_job(plan: Plan) -> str:
    """The plan as the text that ranks compare: every rank must have planned the same."""
    schedule, shards = plan.schedule, plan.schedule.shards
    halo = f", halo {plan.halo_text}" if plan.halo_text else ""
    return (
        f"{plan.readers} of {plan.shape} {plan.dtype} as {plan.shape_global}, blocks {schedule.blocks}, {schedule.owners} of "
        f"{schedule.n_ranks} ranks, shards {shards.cuts} on ranks {shards.describe_ranks()}{halo}"
    )
