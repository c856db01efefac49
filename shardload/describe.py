"""What does a plan say to a person?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from shardload.cost import Cost
from shardload.plan import ReadPlan
from shardload.sources.base import ArrayInfo
from shardload.units import format_nbytes

__all__ = ["Described", "describe_job", "describe_plan"]


class Described(Protocol):
    """The fields of a plan that are shown."""

    info: ArrayInfo
    shape: tuple[int, ...]
    shape_global: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any
    decomposition: str
    shard_shape: tuple[int, ...]
    n_replicas: int
    n_ranks: int
    readers: str
    n_readers: int
    why: str
    costs: Mapping[str, Cost]
    staging_nbytes: int

    @property
    def read_plan(self) -> ReadPlan:
        """Who reads what."""
        ...


def describe_plan(plan: Described) -> str:
    """A plan as a short table of text."""
    info = plan.info
    nbytes = math.prod(plan.shape_global) * plan.dtype.itemsize
    shard_nbytes = math.prod(plan.shard_shape) * plan.dtype.itemsize
    mesh = ", ".join(f"{name}={size}" for name, size in plan.sharding.mesh.shape.items())
    spec = "P(" + ", ".join(repr(e) for e in plan.sharding.spec) + ")"
    padded = f", padded to {_shape(plan.shape_global)}" if plan.shape_global != plan.shape else ""
    selected = f" of {_shape(info.shape)}" if plan.shape != info.shape else ""
    cast = f" cast to {plan.dtype}" if str(plan.dtype) != info.dtype else ""
    chunks = f"chunks {_shape(info.chunks)}, {info.codec}" if info.chunks is not None else "no chunks (any part can be read)"
    replicas = f", {plan.n_replicas} replicas" if plan.n_replicas > 1 else ""
    lines = [
        f"load {info}, {info.format}",
        f"  array     {_shape(plan.shape)}{selected}{padded}, {info.dtype}{cast}, {format_nbytes(nbytes)}; {chunks}",
        f"  sharding  {plan.decomposition}: {spec} on mesh {mesh or '(none)'}{replicas}; "
        f"shard {_shape(plan.shard_shape)}, {format_nbytes(shard_nbytes)}",
        f"  ranks     {plan.n_ranks}, {plan.n_readers} of them read; staging cap {format_nbytes(plan.staging_nbytes)} per rank",
        f"  taken     {plan.readers}: {plan.why}",
        "",
        *_table(plan),
    ]
    return "\n".join(lines)


def _table(plan: Described) -> list[str]:
    head = [
        "",
        "",
        "readers",
        "decoded",
        "amplif.",
        "per reader",
        "messages",
        "between ranks",
        "in node",
        "peak host",
        "est. s",
    ]
    rows = [head]
    for mode, cost in plan.costs.items():
        bound = "" if cost.is_exact else "<= "
        rows.append(
            [
                "->" if mode == plan.readers else "",
                mode,
                f"{cost.n_readers}",
                f"{cost.chunks_decoded:,} chunks" if plan.info.chunks is not None else format_nbytes(cost.decoded_nbytes),
                f"{cost.amplification:.2f}x",
                format_nbytes(cost.reader_nbytes) + (f" in {cost.runs:,} runs" if cost.runs > 1 else ""),
                f"{bound}{cost.messages:,}",
                f"{bound}{format_nbytes(cost.moved_nbytes)}",
                f"{'' if cost.is_exact else '~'}{cost.same_node:.0%}" if cost.moved_nbytes else "-",
                format_nbytes(cost.peak_nbytes),
                f"{cost.seconds:.2g}",
            ]
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    return [
        "  " + "  ".join(c.ljust(w) if k < 2 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "(" + ", ".join(str(n) for n in shape or ()) + ")"


def describe_job(made: Described) -> str:
    """What every rank must have planned alike, as text."""
    p = made.read_plan
    return (
        f"{made.readers} of {made.shape} {made.dtype} as {made.shape_global}, blocks {p.blocks}, {p.n_readers} readers of "
        f"{p.n_ranks}, shards {p.shards.cuts} on ranks {p.shards.describe_ranks()}"
    )
