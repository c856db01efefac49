"""What will a save do? The plan of all arrays of one new file, the same on every rank, and its text for a person."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from shardload.arrays.local_shards import shards_of_array
from shardload.comm.group import Group
from shardload.comm.launch import rank_of_process
from shardload.comm.store import RATE, check_sent
from shardload.errors import ConfigError
from shardload.formats.contract.array import ArrayInfo, native_dtype
from shardload.formats.likeness import marked
from shardload.formats.saving import make_sink
from shardload.formats.sink import ArraySpec, Sink, unopened_by_xarray
from shardload.jobs.saving.arguments import SavedArray, SaveRequest
from shardload.jobs.saving.like import Model, apply_like
from shardload.options import AUTO
from shardload.planning.saving import (
    StoredArray,
    WriteLayout,
    least_save_memory,
    page_nbytes,
    plan_chunks,
    plan_save_memory,
    plan_save_rounds,
    plan_write_layout,
)
from shardload.planning.shards import Shards
from shardload.planning.staging import Item, RoundMemory, threads_that_write
from shardload.storage.remote import is_remote
from shardload.system.terminal import width_of_prints, wrap
from shardload.units import PrintedReport, counted, format_nbytes

_CHUNK_OF_COORDINATE = 512  # elements, of an array with one axis, which can grow
_MODES = {"w-": "must not exist", "w": "is replaced if it exists", "a": "exists, and what has it grows"}


@dataclass(frozen=True, eq=False, repr=False)
class SavePlan(PrintedReport):
    """What `save` will do: inspect it, or print it.

    Attributes
    ----------
    path, format, mode : str
        The new file, its format, and whether it may exist.
    arrays : tuple of ArrayInfo
        The arrays as they will be: name, shape without padding, dtype, chunks, codec.
    travels : tuple of bool
        For each array, whether parts of shards are sent to the ranks that write its chunks. If not, each chunk lies in one
        shard, and a rank writes what it holds.
    n_ranks, n_nodes, n_threads : int
        Ranks and nodes of the job, and threads of a rank.
    has_mpi : bool
        Whether ranks send each other values by MPI; if not, through JAX's coordinator.
    n_rounds : int
        In how many rounds values are collected, encoded and written.
    staging_nbytes : int
        Cap on each process's host memory beyond the arrays.
    memory_nbytes : int
        Bytes of it that are planned for.
    verify : str
        How the new file will be verified, as in `save`.
    nbytes : int
        Bytes of the values.
    """

    path: str
    format: str
    mode: str
    arrays: tuple[ArrayInfo, ...]
    travels: tuple[bool, ...]
    n_ranks: int
    n_nodes: int
    n_threads: int
    has_mpi: bool
    staging_nbytes: int
    memory_nbytes: int
    verify: str
    _sink: Sink = field(kw_only=True)
    _layouts: tuple[WriteLayout, ...] = field(kw_only=True)
    _memory: RoundMemory = field(kw_only=True)
    _rounds: Sequence[Sequence[Item]] = field(kw_only=True)

    @property
    def n_rounds(self) -> int:
        """Number of rounds."""
        return len(self._rounds)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in self.arrays)

    @cached_property
    def _lines(self) -> list[tuple[str, str]]:
        lines = [("file", f"{self.format}; the name {_MODES[self.mode]}; {format_nbytes(self.nbytes)} of values")]
        for array, travels, layout in zip(self.arrays, self.travels, self._layouts, strict=True):
            sizes = " x ".join(map(str, array.chunks or ()))
            chunks_text = f"{counted(layout.chunks.n_cells, 'chunk')} of {sizes}" if array.chunks else "in one piece"
            packed = "" if array.codec in ("none", "") else f", {array.codec}"
            slowly = "" if self.has_mpi else f" (between nodes through JAX's coordinator for want of MPI, at {RATE})"
            way = "each rank writes what it holds: nothing travels"
            if travels:
                way = f"parts travel to the ranks that write{slowly}"
            shape = " x ".join(map(str, array.shape)) or "one value"
            lines.append((array.dataset.lstrip("/") or "/", f"{shape} {array.dtype}, {chunks_text}{packed}; {way}"))
        ranks = counted(self.n_ranks, "rank")
        nodes = f" on {self.n_nodes} nodes" if self.n_nodes > 1 else ""
        lines.append(("ranks", f"{ranks}{nodes}, {counted(self.n_threads, 'thread')} each; {counted(self.n_rounds, 'round')}"))
        lines.append(("memory", f"{format_nbytes(self.memory_nbytes)} of {format_nbytes(self.staging_nbytes)} per rank"))
        lines.append(("verify", _VERIFY[self.verify]))
        return lines

    def __str__(self) -> str:
        """Text for a person, as wide as the terminal."""
        width = width_of_prints()
        room = max(len(name) for name, _ in self._lines) + 2
        lines = wrap(f"save {counted(len(self.arrays), 'array')} as '{self.path}'", width, "", "  ")
        for name, text in self._lines:
            lines += wrap(text, width, f"  {name:<{room}}", " " * (room + 2))
        return "\n".join(lines)

    def __repr__(self) -> str:
        """One line."""
        return f"<SavePlan {self.path!r}: {'; '.join(f'{name}: {text}' for name, text in self._lines)}>"

    def describe(self) -> str:
        """What all ranks must have planned alike, as text."""
        rounds = [[(item.array, item.units) for item in items] for items in self._rounds[:4]]
        owners = [
            (layout.units.cell, None if layout.schedule is None else repr(layout.schedule.owners)) for layout in self._layouts
        ]
        return f"{self!r}; {owners}; {self._memory}; {rounds}"


_VERIFY = {
    "index": "the file's places are compared; nothing is read back",
    "checksum": "every chunk is read back by another rank, by checksum; one of each rank is decoded",
    "file": "every chunk is read back by another rank, by checksum; one in 16 is decoded",
    "full": "every chunk is read back by another rank, by checksum, and decoded",
}


def plan_file(request: SaveRequest, likes: Mapping[str, Model], group: Group) -> tuple[SaveRequest, SavePlan]:
    """Plan the save of all arrays, with what is taken from existing ones. Not collective, when `Group.machine` and
    `Group.processes` are known.

    Raises
    ------
    ConfigError
        If the format cannot hold an array, if a chunk does not fit in the staging memory, or if JAX and MPI do not see the same
        processes.
    """
    request = apply_like(request, likes) if likes else request
    shards_of_arrays = shards_of(request, group)
    specs = {}
    dims = {dim for array in request.arrays for dim in array.dims or () if dim}
    for array, shards in zip(request.arrays, shards_of_arrays, strict=True):
        unlimited, cap = _unlimited(array, dims), request.options.staging_nbytes
        specs[array.name] = _spec(array, shards, request.format, cap, unlimited)
    if request.format == "zarr":  # netCDF's sink says so itself; in plain HDF5 two axes of one name are two
        for problem, fix in unopened_by_xarray(specs):
            raise ConfigError(f"{problem}. {fix}")
    sink = make_sink(
        request.path,
        specs,
        group_attrs=request.group_attrs,
        format=request.format,
        mode=request.mode,
        alignment=page_nbytes(group.machine.n_nodes),
        storage=request.options.storage,
    )
    return request, plan_into(sink, request, shards_of_arrays, group)


def shards_of(request: SaveRequest, group: Group) -> list[Shards]:
    """Which rank holds which shard of each array. ConfigError if they cannot be saved by these ranks."""
    processes = rank_of_process(group)
    return [shards_of_array(array.x, processes, group.rank, group.size) for array in request.arrays]


def plan_into(
    sink: Sink,
    request: SaveRequest,
    shards_of_arrays: Sequence[Shards],
    group: Group,
    first: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> SavePlan:
    """Plan how arrays go into a sink. `first` says where appended arrays begin in those of the file, by name."""
    machine = group.machine
    layouts = []
    for array, shards in zip(request.arrays, shards_of_arrays, strict=True):
        spec, cap = sink.arrays[array.name].spec, request.options.staging_nbytes
        is_packed = spec.compression is not None or spec.checksum
        shape = array.shape if array.name in first else spec.shape
        stored = StoredArray(shape, spec.chunks, spec.dtype.itemsize, is_packed, spec.shards)
        layouts.append(plan_write_layout(stored, shards, group.size, machine.n_nodes, cap, first.get(array.name)))
    if not group.has_mpi and machine.n_nodes > 1:
        sent = [layout.array for layout in layouts if layout.schedule is not None]
        check_sent("save", sum(math.prod(array.shape) * array.itemsize for array in sent))
    cap = _staging(request, layouts, machine.memory_nbytes)
    n_threads = threads_that_write(machine.n_threads, cap, is_remote(request.path))
    memory = plan_save_memory(layouts, cap, n_threads)
    return SavePlan(
        path=request.path,
        format=next(iter(sink.arrays.values())).info.format,
        mode="a" if first else request.mode,
        arrays=tuple(replace(sunk.info, dtype=native_dtype(sunk.spec.dtype).name) for sunk in sink.arrays.values()),
        travels=tuple(layout.schedule is not None for layout in layouts),
        n_ranks=group.size,
        n_nodes=machine.n_nodes,
        n_threads=memory.n_threads,
        has_mpi=group.has_mpi,
        staging_nbytes=cap,
        memory_nbytes=min(memory.nbytes, cap),
        verify=request.options.verify,
        _sink=sink,
        _layouts=tuple(layouts),
        _memory=memory,
        _rounds=plan_save_rounds(layouts, memory.round_nbytes),
    )


def _unlimited(array: SavedArray, dims: Collection[str]) -> tuple[int, ...]:
    """The axes of an array that can grow, by number. A name that only other arrays have is none of its axes.

    ConfigError if no array has an axis of that name (`dims`), or this one none of that number.
    """
    axes = set()
    for axis in array.unlimited:
        if isinstance(axis, str):
            if axis not in dims:
                axes_text = f"the axes are called {', '.join(sorted(map(repr, dims)))}"
                raise ConfigError(
                    f"unlimited of '{array.name}' is {axis!r}; {axes_text if dims else 'no axis has a name: pass dims= too'}"
                )
            axes |= {k for k, dim in enumerate(array.dims or ()) if dim == axis}
        elif -len(array.shape) <= axis < len(array.shape):
            axes.add(axis % len(array.shape))
        else:
            raise ConfigError(f"unlimited of '{array.name}' is axis {axis}; expected one of an array of shape {array.shape}")
    return tuple(sorted(axes))


def _spec(array: SavedArray, shards: Shards, kind: str, cap_nbytes: int, unlimited: tuple[int, ...]) -> ArraySpec:
    """How an array is stored."""
    chunks = array.chunks
    if chunks == AUTO:
        chunks = None
        needs_chunks = array.compression is not None or kind == "zarr" or unlimited
        if array.shape and 0 not in array.shape and needs_chunks and array.shards is None:  # (with shards: the sink says so)
            chunks = plan_chunks(array.shape, array.dtype.itemsize, shards, cap_nbytes)
            if unlimited and len(array.shape) == 1:  # a time axis: not a chunk for each element that comes
                chunks = (max(chunks[0], _CHUNK_OF_COORDINATE),)
    if kind == "zarr" and chunks is None:  # every axis can grow there, and one chunk is the whole array
        unlimited = ()
    attrs, fill = marked(kind, array.name, array.attrs, array.dtype)
    return ArraySpec(
        array.shape,
        array.dtype,
        chunks,
        shards=array.shards,
        compression=array.compression,
        dims=array.dims,
        attrs=attrs,
        checksum=array.checksum and chunks is not None,
        fill_value=fill,
        unlimited=unlimited,
    )


def _staging(request: SaveRequest, layouts: Sequence[WriteLayout], memory_nbytes: int) -> int:
    """The staging cap in bytes: what was asked for, or what the chunks need if that is "auto"."""
    needed, k = least_save_memory(layouts), max(range(len(layouts)), key=lambda k: layouts[k].unit_nbytes)
    reason = (
        f"what a rank writes at once of '{request.arrays[k].name}' is {format_nbytes(layouts[k].unit_nbytes)} (a chunk, or a "
        f"file of chunks), and saving it takes {format_nbytes(needed)}"
    )
    return request.options.staging_cap(needed, reason, memory_nbytes=memory_nbytes, fix=", or smaller chunks")
