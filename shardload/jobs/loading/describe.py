"""How is a plan shown to a person? As text of a given width, which a notebook shows too, or as one line."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from shardload.errors import printable
from shardload.planning.cost import Cost
from shardload.system.terminal import WIDTH, wrap, wrap_parts
from shardload.units import counted, format_nbytes, number_text

__all__ = ["as_html", "describe_job", "describe_plan", "describe_plan_in_a_line"]

if TYPE_CHECKING:
    from shardload.jobs.loading.plan import Plan

_MOST_ON_A_NODE = 64  # ranks; more of them are on several nodes, whatever a plan without a machine assumes
_MANY_MESSAGES = 10_000  # of one rank: they take a third of a second or more
_WIDE = 60  # from this width on, names have a column of their own


def describe_plan(plan: Plan, width: int = WIDTH) -> str:
    """A plan as text that fits `width` columns: what is loaded, and a table of the cost of each way of reading."""
    lines = wrap(_title(plan), width, "", "  ")
    for name, text in _facts(plan).items():
        first = f"  {name:<10}" if width >= _WIDE else f"  {name}  "
        parts = [text] if name in ("file", "taken") else text.split("; ")
        lines += wrap_parts(parts, width, first, None if width >= _WIDE else "    ")
    return "\n".join([*lines, "", *_table(plan, width)])


def describe_plan_in_a_line(plan: Plan) -> str:
    """A plan in one line, for its `repr`."""
    taken = f"{plan.readers}, {plan.n_readers} of {plan.n_ranks} ranks read"
    what = f"{_shape(plan.shape_global)} {plan.dtype} as {plan.decomposition} {_spec(plan)} on mesh {_mesh(plan)}; {taken}"
    return f"<Plan of {printable(str(plan.info))}: {what}>"


def as_html(text: str) -> str:
    """A text of several lines as HTML for a notebook."""
    return f"<pre>{escape(text)}</pre>"


def _title(plan: Plan) -> str:
    return f"load '{printable(plan.info.dataset)}', {plan.info.format}"


def _facts(plan: Plan) -> dict[str, str]:
    info = plan.info
    nbytes = math.prod(plan.shape_global) * plan.dtype.itemsize
    shard_nbytes = math.prod(plan.shard_shape) * plan.dtype.itemsize
    nbytes_chunk = math.prod(info.chunks or ()) * np.dtype(info.dtype).itemsize if plan.staging_is_raised else 0
    halo = plan.halo_text
    padded = f", padded to {_shape(plan.shape_padded)}" if plan.shape_padded != plan.shape else ""
    padded += f", with halos {_shape(plan.shape_global)}" if halo else ""
    selected = f" of {_shape(info.shape)}" if plan.shape != info.shape else ""
    cast = "" if plan.decoded_dtype is None else f" decoded to {plan.decoded_dtype}"
    cast += f" cast to {plan.dtype}" if str(plan.dtype) != str(plan.decoded_dtype or info.dtype) else ""
    chunks = f"chunks {_shape(info.chunks)}, {info.codec}" if info.chunks is not None else "no chunks (any part can be read)"
    replicas = f", {plan.n_replicas} replicas" if plan.n_replicas > 1 else ""
    facts = {
        "file": printable(plan.info.path),
        "array": f"{_shape(plan.shape)}{selected}{padded}, {info.dtype}{cast}, {format_nbytes(nbytes)}; {chunks}",
        "sharding": f"{plan.decomposition}: {_spec(plan)} on mesh {_mesh(plan)}{replicas}; "
        f"shard {_shape(plan.shard_shape)}, {format_nbytes(shard_nbytes)}" + (f"; halo {halo}" if halo else ""),
        "ranks": f"{plan.n_ranks}, {plan.n_readers} of them read; staging cap {format_nbytes(plan.staging_nbytes)} per rank"
        + (f", because of chunks of {format_nbytes(nbytes_chunk)}" if plan.staging_is_raised else ""),
        "taken": f"{plan.readers}: {plan.why}",
    }
    cost = plan.costs[plan.readers]
    if max(cost.n_sent, cost.n_received) >= _MANY_MESSAGES or (cost.n_sent and plan.machine.has_limits):
        facts["sent"] = (
            f"between nodes a message for each part, of {format_nbytes(cost.message_nbytes)} on average: about "
            f"{cost.n_sent:,} from each reader, about {cost.n_received:,} to each rank"
        )
    machine = _machine_text(plan)
    return facts | ({"machine": machine} if machine else {})


def _machine_text(plan: Plan) -> str:
    """The figures that the plan was made with; empty if there are none and the ranks are few."""
    per_node, machine = plan.ranks_per_node, plan.machine
    if not machine.has_limits:
        if per_node is not None or plan.n_ranks <= _MOST_ON_A_NODE:
            return ""
        return (
            f"not known: all {plan.n_ranks:,} ranks on one node, its file in the page cache (assumed); pass machine= and "
            "ranks_per_node="
        )
    on_each = per_node or plan.n_ranks
    return f"{counted(-(-plan.n_ranks // on_each), 'node')}, {on_each:,} ranks on each; {str(machine).replace(',', ', ')}"


def _quantities(plan: Plan) -> tuple[list[str], dict[str, list[str]]]:
    """The ways of reading, and a row for each quantity with its value for each way."""
    costs = list(plan.costs.values())
    bounds = ["" if cost.is_exact else "<= " for cost in costs]
    rows = {
        "readers": [f"{c.n_readers:,}" for c in costs],
        "decoded": [_decoded(plan, c) for c in costs],
        "amplification": [f"{c.amplification:.2f}x" for c in costs],
        "per reader": [format_nbytes(c.reader_nbytes) for c in costs],
        "in runs": [f"{c.runs:,}" if c.runs else "-" for c in costs],
        "messages": [f"{b}{c.messages:,}" for b, c in zip(bounds, costs, strict=True)],
        "between ranks": [f"{b}{format_nbytes(c.moved_nbytes)}" for b, c in zip(bounds, costs, strict=True)],
        "in node": [f"{'' if c.is_exact else '~'}{c.same_node:.0%}" if c.moved_nbytes else "-" for c in costs],
        "peak host": [format_nbytes(c.peak_nbytes) for c in costs],
        "est. seconds": [number_text(c.seconds, 2) for c in costs],
    }
    if plan.machine.has_limits:
        rows |= {"slowest": [c.limit or "-" for c in costs]}
    if plan.machine.has_file_system:
        rows |= {
            "from disk": [format_nbytes(c.fs_nbytes) for c in costs],
            "disk operations": [f"{c.operations:,}" for c in costs],
        }
    if all(cost.runs <= 1 for cost in costs):
        del rows["in runs"]
    return list(plan.costs), rows


def _decoded(plan: Plan, cost: Cost) -> str:
    """What all ranks together decode or, without chunks, read."""
    if plan.info.chunks is None:
        return format_nbytes(cost.decoded_nbytes)
    is_whole = cost.decoded_nbytes >= cost.chunks_decoded * math.prod(plan.info.chunks) * np.dtype(plan.info.dtype).itemsize
    return ("" if is_whole else "parts of ") + counted(cost.chunks_decoded, "chunk")


def _table(plan: Plan, width: int) -> list[str]:
    """A table with a column for each way of reading; if it is too wide, one table below the other."""
    modes, rows = _quantities(plan)
    heads = [f"-> {mode}" if mode == plan.readers else mode for mode in modes]
    lines = _columns([["", *heads], *([name, *cells] for name, cells in rows.items())])
    if max(map(len, lines)) <= width:
        return lines
    lines = []
    for k, head in enumerate(heads):
        lines += [f"  {head}", *("  " + line for line in _columns([[name, cells[k]] for name, cells in rows.items()]))]
    return lines


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  " + "  ".join(c.rjust(w) if k else c.ljust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def _mesh(plan: Plan) -> str:
    return ", ".join(f"{name}={size}" for name, size in plan.sharding.mesh.shape.items()) or "(none)"


def _spec(plan: Plan) -> str:
    return "P(" + ", ".join(repr(entry) for entry in plan.sharding.spec) + ")"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "(" + ", ".join(str(n) for n in shape or ()) + ")"


def describe_job(made: Plan) -> str:
    """The plan as the text that ranks compare: every rank must have planned the same."""
    p = made.schedule
    return (
        f"{made.readers} of {made.shape} {made.dtype} as {made.shape_global}, blocks {p.blocks}, {p.strategy} of "
        f"{p.n_ranks} ranks, shards {p.shards.cuts} on ranks {p.shards.table.describe()}"
        f"{', halo ' + p.shards.halo_text if p.shards.halo_text else ''}"
    )
