"""What will a load of many arrays do? The caller inspects a `TreePlan`, prints it and executes it, as a `Plan` of one array."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from shardload.arrays.padding import version_of
from shardload.arrays.sharding import spec_text
from shardload.errors import ConfigError, printable
from shardload.formats.contract.array import ArrayInfo
from shardload.jobs.loading.describe import mesh_text, shape_text
from shardload.jobs.loading.plan import NO_DEVICES, Executor, Plan, staging_of
from shardload.jobs.loading.report import LoadReport
from shardload.system.terminal import WIDTH, Column, fit_table, width_of_prints, wrap
from shardload.units import as_html, counted, format_nbytes

_MOST_LEFT_OUT = 8


@dataclass(frozen=True, eq=False, repr=False)
class TreePlan:
    """What a load of a tree of arrays will do: inspect it, print it, `execute` it.

    Attributes
    ----------
    plans : pytree of Plan
        The plan of each array, in the structure that the result will have. Each can also be executed by itself.
    where : tuple of str
        The place of each array in the tree (``"['gas']"``), in JAX's order of the leaves.
    left_out : tuple of ArrayInfo
        Arrays below a group that was named with ``*`` which are no part of the tree, because they hold no numbers.
    report : LoadReport or None
        The report of the last `execute`; None before.
    """

    plans: Any
    where: tuple[str, ...]
    left_out: tuple[ArrayInfo, ...] = ()
    _executor: Executor | None = field(default=None, kw_only=True)
    _reports: list[LoadReport] = field(default_factory=list, init=False)

    @property
    def leaves(self) -> list[Plan]:
        """The plans in JAX's order."""
        return list(jax.tree_util.tree_leaves(self.plans))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, with padding, each counted once."""
        return sum(plan.nbytes for plan in self.leaves)

    @property
    def staging_nbytes(self) -> int:
        """Cap on each process's host memory beyond its own pieces, for all arrays together."""
        return self.leaves[0].staging_nbytes

    @property
    def peak_nbytes(self) -> int:
        """Host memory of the fullest rank, at most: its pieces of all arrays, the buffers that they share, and what is fetched
        ahead from stores.
        """
        plans = self.leaves
        pieces = sum(plan.pieces_nbytes for plan in plans)
        used = staging_of(plans)
        blocks = used.n_blocks * used.slot_nbytes
        return pieces + min(blocks, self.staging_nbytes) + max(plan.ahead_nbytes for plan in plans)

    @property
    def report(self) -> LoadReport | None:
        """The report of the last `execute`; None before."""
        return self._reports[-1] if self._reports else None

    def __str__(self) -> str:
        """Text for a person, as wide as the terminal: a row per array, then totals."""
        return self.describe(width_of_prints())

    def describe(self, width: int) -> str:
        """The same, `width` columns wide."""
        columns, rows = self._table()
        lines = wrap(self._title(), width, "", "  ")
        lines += fit_table(columns, [[printable(cell) for cell in row] for row in rows], width)
        for text in self._totals():
            lines += wrap(text, width, "", "  ")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """One line."""
        return f"<TreePlan of {len(self.where)} arrays: {format_nbytes(self.nbytes)}>"

    def _repr_html_(self) -> str:
        """HTML for a notebook: the text."""
        return as_html(self.describe(WIDTH))

    def _title(self) -> str:
        first = self.leaves[0]
        files = sorted({plan.info.path for plan in self.leaves})
        more = f" and {counted(len(files) - 1, 'more file')}" if len(files) > 1 else ""
        what, ranks = counted(len(self.where), "array"), counted(first.n_ranks, "rank")
        return f"load {what} of {printable(files[0])}{more} on mesh {mesh_text(first.sharding)}, {ranks}"

    def _table(self) -> tuple[list[Column], list[list[str]]]:
        columns = [Column("array"), Column("shape", lead=""), Column("dtype", lead=""), Column("size", is_number=True)]
        columns += [Column("readers"), Column("name"), Column("spec"), Column("shard"), Column("decoded", is_number=True)]
        rows = []
        for where, plan in zip(self.where, self.leaves, strict=True):
            cost = plan.costs[plan.readers]
            padded = f" padded to {shape_text(plan.shape_global)}" if plan.shape_global != plan.shape else ""
            is_chunked = plan.info.chunks is not None
            decoded = counted(cost.chunks_decoded, "chunk") if is_chunked else format_nbytes(cost.decoded_nbytes)
            readers = f"{plan.readers}, {plan.n_readers}"
            row = [where, shape_text(plan.shape) + padded, str(plan.dtype), format_nbytes(plan.nbytes), readers]
            rows.append([*row, plan.info.dataset, spec_text(plan.sharding.spec), shape_text(plan.shard_shape), decoded])
        return columns, rows

    def _totals(self) -> list[str]:
        n_chunks = sum(plan.costs[plan.readers].chunks_decoded for plan in self.leaves)
        totals = [
            f"total: {format_nbytes(self.nbytes)}, {counted(n_chunks, 'chunk')} decoded in the job",
            f"peak host memory of a rank: {format_nbytes(self.peak_nbytes)}, at most; staging cap for all arrays together "
            f"{format_nbytes(self.staging_nbytes)}",
        ]
        if self.left_out:
            names = [f"'{printable(info.dataset)}' ({info.refused})" for info in self.left_out[:_MOST_LEFT_OUT]]
            more = len(self.left_out) - len(names)
            totals.append(f"left out, because they hold no numbers: {', '.join(names)}{f' and {more} more' if more else ''}")
        return totals

    def execute(self) -> Any:
        """Load the arrays. Collective: yes, over the ranks that planned. May be called again.

        Returns
        -------
        pytree of jax.Array
            As from `load`.

        Raises
        ------
        SourceError, PeerError, ConfigError
            On every rank. Nothing is loaded then.
        """
        if self._executor is None:
            raise ConfigError(NO_DEVICES)
        loaded = self._executor()
        self._reports[:] = [loaded.report]
        for plan, array in zip(self.leaves, loaded.arrays, strict=True):
            plan._versions[:] = [version_of(array)]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(self.plans), loaded.arrays)
