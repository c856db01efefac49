"""What will a copy do, and what does it need? The same on all ranks, and for people (``--dry-run``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from shardload.comm.group import Topology
from shardload.errors import ConfigError
from shardload.formats.sink import Sink
from shardload.jobs.copying.request import PAGE_NBYTES, STAGING_NBYTES, CopyRequest, SourceArray
from shardload.planning.blocks import plan_rows
from shardload.planning.copying import CopiedArray, SlabLayout, count_rounds, plan_array
from shardload.planning.region import Grid
from shardload.planning.schedule import SourceLayout
from shardload.planning.staging import RoundMemory, least_memory, least_staging, plan_memory
from shardload.units import counted, format_nbytes, number_text

_LEAST_READING_NBYTES = 4 << 20
_RUN_NBYTES = 4 << 20  # of a contiguous array


@dataclass(frozen=True)
class CopyPlan:
    """What a copy will do, the same on all ranks.

    Attributes
    ----------
    found : tuple of SourceArray
        The arrays, with their specs in the target as it will be.
    arrays : tuple of SlabLayout
        Their slabs.
    memory : RoundMemory
        How a rank uses its staging memory.
    staging_nbytes : int
        The cap.
    n_ranks, n_rounds : int
        Ranks, and rounds of the rank that has most.
    notes : tuple of str
        What is left out.
    """

    found: tuple[SourceArray, ...]
    arrays: tuple[SlabLayout, ...]
    memory: RoundMemory
    staging_nbytes: int
    n_ranks: int
    n_rounds: int
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all values in memory."""
        return sum(int(np.prod(one.unit.shape, dtype=object)) * one.unit.itemsize for one in self.arrays)

    def describe(self, target: str) -> list[str]:
        """The plan, for people: lines."""
        arrays, ranks = counted(len(self.found), "array"), counted(self.n_ranks, "rank")
        rounds = counted(self.n_rounds, "round")
        lines = [f"copy of {arrays}, {format_nbytes(self.nbytes)}, to '{target}' on {ranks}, {rounds}"]
        for array, one in zip(self.found, self.arrays, strict=True):
            way = "all ranks read a slab together" if one.is_together else "each slab is read by one rank"
            if one.slabs.n_cells == 1 and not one.is_together:
                way = "one rank reads it"
            elif one.slabs.n_cells:
                way += f", {one.slabs.n_cells} slabs of {_text(tuple(map(min, one.slabs.cell, one.slabs.shape)))}"
            spec, chunks = array.spec, f"chunks {_text(array.info.chunks)} -> {_text(array.spec.chunks)}"
            lines.append(f"{array.name}: {_text(spec.shape)} {spec.dtype}, {chunks}; {way}")
            if one.unit.is_decoded and one.factor > 1:
                lines.append(
                    f"  each chunk of the source is decoded {number_text(one.factor, 2)} times: slabs with whole chunks "
                    "of both do not fit. More staging= or more ranks make it less"
                )
            elif one.unit.is_decoded:
                lines.append("  each chunk of the source is decoded once")
        memory = self.memory
        lines.append(
            f"memory of a rank: at most {format_nbytes(memory.nbytes)} of {format_nbytes(self.staging_nbytes)}, "
            f"{format_nbytes(memory.round_nbytes)} a round"
        )
        return [*lines, *self.notes]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON's types."""
        arrays = [
            {
                "name": array.name,
                "source": array.info.dataset,
                "shape": array.spec.shape,
                "dtype": str(array.spec.dtype),
                "chunks_before": array.info.chunks,
                "chunks": array.spec.chunks,
                "shards": array.spec.shards,
                "slab": one.slabs.cell,
                "n_slabs": one.slabs.n_cells,
                "is_together": one.is_together,
                "decoded": one.factor,
            }
            for array, one in zip(self.found, self.arrays, strict=True)
        ]
        sizes = {"nbytes": self.nbytes, "staging_nbytes": self.staging_nbytes, "memory_nbytes": self.memory.nbytes}
        return {"arrays": arrays, **sizes, "n_ranks": self.n_ranks, "n_rounds": self.n_rounds, "notes": self.notes}


def _text(shape: Sequence[int] | None) -> str:
    return "in one piece" if shape is None else " x ".join(map(str, shape)) or "scalar"


def plan_copy(
    request: CopyRequest, found: Sequence[SourceArray], sink: Sink, n_ranks: int, machine: Topology, notes: Sequence[str] = ()
) -> CopyPlan:
    """The plan of a copy. ConfigError if it does not fit into the staging memory."""
    page = PAGE_NBYTES if machine.n_nodes > 1 else 1
    units, reading = [], _LEAST_READING_NBYTES
    arrays = tuple(replace(array, spec=sink.arrays[array.full_name].spec) for array in found)
    for one in arrays:
        spec, layout = one.spec, one.layout()
        if spec.chunks is None:
            unit, fits = plan_rows(spec.shape, layout.dtype.itemsize, _RUN_NBYTES, page)
        else:
            # A file that has chunks at any byte is written by one rank if there are several nodes.
            unit = spec.shards if spec.shards is not None and machine.n_nodes > 1 else spec.chunks
            fits = True
        chunks = layout.chunks if one.info.chunks is not None else _runs(layout)
        units.append(CopiedArray(spec.shape, unit, chunks, one.info.chunks is not None, layout.dtype.itemsize, not fits))
        reading = max(reading, least_staging(layout))
    name, largest = max(((one.name, unit.unit_nbytes) for one, unit in zip(arrays, units, strict=True)), key=itemgetter(1))
    least = least_memory(largest, largest, reading)
    asked = request.options.staging
    staging = max(STAGING_NBYTES, least) if isinstance(asked, str) else asked
    if staging < least:
        raise ConfigError(
            f"staging is {format_nbytes(staging)}, but this copy needs {format_nbytes(least)}: what a rank writes at once of "
            f"'{name}' is {format_nbytes(largest)} (a chunk, a file of chunks, or some rows). Pass "
            f"staging='{-(-least >> 20)}MiB', or smaller chunks="
        )
    memory = plan_memory(staging, largest, largest, reading, machine.n_threads)
    slabs = tuple(plan_array(unit, n_ranks, memory.round_nbytes) for unit in units)
    n_rounds = count_rounds(slabs, n_ranks, memory.round_nbytes)
    return CopyPlan(arrays, slabs, memory, staging, n_ranks, n_rounds, tuple(notes))


def _runs(layout: SourceLayout) -> Grid:
    """Stand-ins for the chunks of an array that has none: runs of at most 64 KiB, which are worth a read."""
    shape = layout.chunks.shape
    cell, _ = plan_rows(shape, layout.file_dtype.itemsize, 64 << 10)
    return Grid(shape, tuple(max(1, n) for n in cell), (0,) * len(shape))
