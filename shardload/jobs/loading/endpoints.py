"""What is one array of a load, as all ranks know it, and what are the two ends of a load?

An `ArrayLoad` has the array's plan, its options, and what opens it. A `LoadSource` opens the arrays, and a `DeviceTarget` makes
`jax.Array`s of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from shardload.arrays.assemble import assemble, early_devices, put_shard
from shardload.arrays.padding import remember
from shardload.engine.file_source import FileMove, FileSource
from shardload.engine.session import Round, Session
from shardload.errors import printable
from shardload.formats.contract.array import ArrayInfo, OnDemand, settle_bools
from shardload.formats.contract.format import Source
from shardload.jobs.consistency import SINCE_LABELS, ArrayToRead, KeptSources, State, check_same_version, contents_of, is_open
from shardload.jobs.loading.plan import LoadLayout, Plan
from shardload.jobs.trees import naming_errors
from shardload.options import Options, fill_value
from shardload.planning.region import Region
from shardload.system.interruption import FirstError
from shardload.transfer.allocator import empty_pieces
from shardload.transfer.buffers import Piece
from shardload.transfer.counters import Counters
from shardload.transfer.moves import ArrayMove
from shardload.transfer.pieces import ShardPieces

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class ArrayLoad:
    """One array of a job.

    Attributes
    ----------
    plan : Plan
        Its plan. Arrays of the same kind share its layouts.
    asked : Options
        What was asked of it.
    handle : object
        A path, or an open array; None of a `scatter`.
    values : MemorySource or None
        The values, where they are in memory already: of a small array, which came with the metadata, on every rank; of a
        `scatter` on the root.
    where : str
        Which array of a tree it is, for messages: ``"array ['gas']"``; empty if it is the only one.
    """

    plan: Plan
    asked: Options
    handle: Any
    values: Any = None
    where: str = ""

    @property
    def info(self) -> ArrayInfo:
        """Metadata of the array in its file."""
        return self.plan.info

    @property
    def name(self) -> str:
        """The array as messages name it."""
        return f"{self.where}, {self.info}" if self.where else str(self.info)

    @cached_property
    def options(self) -> Options:
        """What was asked of it, with the staging cap that was planned."""
        staging_nbytes = self.plan.staging_nbytes
        return self.asked if self.asked.staging_nbytes == staging_nbytes else replace(self.asked, staging=staging_nbytes)

    @cached_property
    def layout(self) -> LoadLayout:
        """How it lies in its file and over the ranks."""
        return self.plan._layout

    def naming_errors(self) -> AbstractContextManager[None]:
        """Let errors that are raised inside name this array, if there are others."""
        return naming_errors(self.where, f"'{printable(self.info.dataset)}'")

    def contents(self, source: Source) -> State:
        """A fingerprint of the open array, to compare with those of the other ranks. Closes the source."""
        layout = self.layout.source
        with closing(source):
            return contents_of(source, self.handle, layout.selection, layout.chunks if layout.has_chunks else None)

    def to_read(self, n_files: int) -> ArrayToRead:
        """The array for a rank that has `n_files` open at once."""
        labels = self.info.labels.brief if isinstance(self.info.labels, OnDemand) else self.info.labels
        state = None if labels is None else labels.read_in  # in which names of axes were looked up for a selection
        access = self.options.access.shared_by(n_files)
        return ArrayToRead(self.handle, self.info, access, state, self.values, self.naming_errors)


def moves_of(loads: Sequence[ArrayLoad]) -> list[FileMove]:
    """What moves in a load of these arrays."""
    moves = []
    for k, load in enumerate(loads):
        source, name = load.layout.source, load.name if len(loads) > 1 else ""
        flow, naming = load.layout.schedule, load.naming_errors
        moves.append(FileMove(k, flow, source.dtype, name, naming, info=load.info, layout=source))
    return moves


# --- where values come from


class LoadSource(FileSource):
    """The arrays of a load.

    Parameters
    ----------
    loads : sequence of ArrayLoad
        The arrays.
    rank : int
        This rank.

    Attributes
    ----------
    contents : list of State
        The state of each array when it was opened, to compare with the other ranks; None of one that this rank does not read.
    kept : KeptSources
        The open arrays.
    """

    def __init__(self, loads: Sequence[ArrayLoad], rank: int) -> None:
        super().__init__(rank, loads[0].options.checksums)
        self._loads = loads
        self.contents: list[State] = [None] * len(loads)
        self.kept = kept_sources(loads, rank)

    def open(self, moves: Sequence[FileMove], opened: ExitStack) -> list[Source | None]:
        """See `FileSource`."""
        kept = self.kept
        opened.push(kept.close)
        sources: list[Source | None] = []
        for k, load in enumerate(self._loads):
            source = None
            with load.naming_errors():
                if load.layout.schedule.is_owner(self._rank):
                    source = kept.open(k)
                    self.contents[k] = source.opened_in
                if is_open(load.handle):
                    self.contents[k] = load.contents(kept.open_again(k))
            sources.append(source)
        for load in self._loads:  # one rank may have read a small array in another file than the one that is open here
            if load.values is not None and load.info.path in kept.file_states:
                with load.naming_errors():
                    check_same_version(load.name, load.values.read_in, kept.file_states[load.info.path], load.info)
        opened.push(lambda kind, *_: kept.check_unchanged() if kind is None else None)
        return sources


def kept_sources(loads: Sequence[ArrayLoad], rank: int | None = None) -> KeptSources:
    """The arrays of a load, to be opened on a rank that reads its part of them, or (None) any."""
    paths = {load.info.path for load in loads if rank is None or load.layout.schedule.is_owner(rank)}
    return KeptSources([load.to_read(len(paths)) for load in loads], SINCE_LABELS)


# --- where they go


class ShardedArray:
    """What this process holds of one array: pieces first, a `jax.Array` in the end.

    Attributes
    ----------
    needed : tuple
        The shapes of this rank's pieces, and their dtype.
    nbytes : int
        Bytes of this rank's pieces.
    pieces : ShardPieces
        The pieces, when there is memory for them.
    array : jax.Array
        The array, when it is assembled.
    device_seconds : float
        Seconds for handing the pieces to JAX.
    counters : Counters
        What it cost this rank to read its blocks.
    """

    def __init__(self, load: ArrayLoad, rank: int) -> None:
        self.load, self._rank = load, rank
        shards, dtype = load.layout.schedule.shards, load.layout.source.dtype
        self.needed = [shards.shard_shape] * len(shards.shards_of(rank)), dtype
        self.nbytes = len(self.needed[0]) * math.prod(shards.shard_shape) * dtype.itemsize
        self.device_seconds, self.counters = 0.0, Counters()
        self.pieces: ShardPieces
        self._devices: dict[Region, Any]
        self._early: dict[Region, jax.Array]
        self.array: jax.Array

    def make_room(self, room: list[Array]) -> None:
        """Take the pieces from `room`, and fill their padding. What moves writes the rest."""
        plan, shards = self.load.plan, self.load.layout.schedule.shards
        self.pieces = ShardPieces(shards, plan.shape, room, self._rank)
        self.pieces.fill(partial(fill_value, self.load.options.pad, plan.dtype))
        self._devices, self._early = early_devices(plan.sharding, plan.shape_global), {}

    def start_early(self, piece: Piece) -> None:
        """Start to copy a complete piece to its device."""
        shard = self.pieces.completed(piece)
        if shard is not None and (device := self._devices.get(shard.region)) is not None:
            self._early[shard.region] = put_shard(shard.data, device, self.load.plan.sharding)

    def fill(self) -> None:
        """Fill the pieces from values that this process has in memory: no rank sends any (`Loader`)."""
        layout, source, counters = self.load.layout, self.load.values, self.counters
        started = time.perf_counter()
        whole = Region.whole(self.load.plan.shape)
        for piece in self.pieces.sections.values():
            region = piece.region.intersect(whole)  # without padding
            if region is not None:
                target, values = piece.view(region), source.plain(layout.source.selection.to_file(region))
                np.copyto(target, values.reshape(region.shape), casting="no")
                settle_bools(target)
                counters.nbytes_read += target.nbytes
                counters.chunks_decoded += layout.source.chunks.n_meeting(region) if layout.source.has_chunks else 0
                self.start_early(piece)
        counters.read_seconds += time.perf_counter() - started

    def assemble(self) -> None:
        """Hand the pieces to JAX."""
        started = time.perf_counter()
        regions = ((p.region, p.data) for p in self.pieces.shards.values())
        plan = self.load.plan
        self.array = assemble(plan.shape_global, plan.sharding, plan.dtype, regions, self._early)
        remember(self.array, plan.extent, plan.is_decoded if plan.info.packing else None)
        self.device_seconds = time.perf_counter() - started


class DeviceTarget:
    """The `TargetEndpoint` of a load: the devices of this process.

    Parameters
    ----------
    loads : sequence of ArrayLoad
        The arrays.
    rank : int
        This rank.
    errors : FirstError
        Keeps errors until the ranks agree: those of the session.

    Attributes
    ----------
    arrays : list of ShardedArray
        What this process holds of each.
    """

    def __init__(self, loads: Sequence[ArrayLoad], rank: int, errors: FirstError) -> None:
        self.arrays = [ShardedArray(load, rank) for load in loads]
        self._errors = errors

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(array.nbytes for array in self.arrays)

    def make_room(self, moves: Sequence[ArrayMove]) -> None:
        """See `TargetEndpoint`. All pieces are allocated at once: the memory of an earlier load is then used again."""
        rooms = empty_pieces([array.needed for array in self.arrays])
        for array, room in zip(self.arrays, rooms, strict=True):
            with array.load.naming_errors():
                array.make_room(room)
        for move in moves:
            array = self.arrays[move.array]
            move.targets, move.on_complete = array.pieces.sections, array.start_early

    def fill(self, session: Session) -> None:
        """Make the arrays of values that every process has already: nothing moves."""
        self.make_room(())
        for array in self.arrays:
            with array.load.naming_errors():
                array.fill()
                array.assemble()
            if session.on_progress is not None:
                session.on_progress(array.nbytes)

    def take(self, round_: Round) -> None:
        """See `TargetEndpoint`."""
        for array in self.arrays if not self._errors else ():
            with self._errors, array.load.naming_errors():
                array.assemble()
