"""What does one rank do for one array of a job?

An `ArrayLoad` is the array as all ranks know it: its plan, and what opens it. An `OwnArray` is what this rank has of it while
the job runs: the open source, the pieces that are filled, what reads into them, and in the end the `jax.Array`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from shardload.arrays.assemble import EarlyPieces, assemble
from shardload.arrays.verification import Checked, Verifier
from shardload.errors import SourceError, StallError
from shardload.formats.base import ArrayInfo, Source
from shardload.formats.lookup import open_source
from shardload.formats.memory import MemorySource
from shardload.formats.untrusted.source import UntrustedSource
from shardload.jobs.consistency import State, check_unchanged, contents_of, is_open
from shardload.jobs.plan import Layout, Plan
from shardload.jobs.report import Phase
from shardload.options import Options, pad_value
from shardload.planning.tuning import Tuning
from shardload.transfer.allocator import empty_pieces
from shardload.transfer.buffers import Piece, fill_padding
from shardload.transfer.counters import Counters
from shardload.transfer.local_pieces import LocalPieces
from shardload.transfer.missing import counter_of
from shardload.transfer.moves import ArrayMove, BlocksToPieces
from shardload.transfer.reader import SourceReader
from shardload.transfer.resources import Resources

__all__ = ["ArrayLoad", "OwnArray"]


@dataclass(frozen=True, eq=False)
class ArrayLoad:
    """One array of a job.

    Attributes
    ----------
    plan : Plan
        What was planned for it.
    options : Options
        How it was asked for.
    handle : object
        A path, an open array, or a source in memory (None on the ranks that do not have it).
    origin : object
        What opens the file, where `handle` holds its values already.
    """

    plan: Plan
    options: Options
    handle: Any
    origin: Any = None

    @property
    def info(self) -> ArrayInfo:
        """The array in its file."""
        return self.plan.info

    @property
    def layout(self) -> Layout:
        """How it lies."""
        return self.plan._layout

    @property
    def is_open(self) -> bool:
        """Whether it is an array that the caller has opened, or has in memory, on every rank."""
        return is_open(self.handle)

    def open(self) -> Source:
        """The source; it must be what the plan was made for."""
        return self.handle if isinstance(self.handle, MemorySource) else _open(self.handle, self.info, self.options)

    def contents(self) -> State:
        """What tells the array that the caller has opened from that of another rank."""
        source_layout = self.layout.source
        with closing(_open(self.handle, self.info, self.options)) as source:
            chunks = source_layout.chunks if source_layout.has_chunks else None
            return contents_of(source, self.handle, source_layout.selection, chunks)

    def verifier(self, seed: int = 0) -> Verifier:
        """What compares an array with the file that the plan is for."""
        source = self.layout.source
        return Verifier(
            self.layout.schedule,
            source.selection,
            source.chunks,
            has_chunks=source.has_chunks,
            dtype=source.dtype,
            how=self.options.verify,
            pad=self.options.pad,
            seed=seed,
            staging_nbytes=self.options.staging_nbytes,
            name=str(self.info),
            open_again=lambda: _open(self.handle if self.origin is None else self.origin, self.info, self.options),
        )


class OwnArray:
    """What this rank has of one array of a job that runs.

    Attributes
    ----------
    pieces : dict of int to Piece
        This rank's pieces, by shard.
    contents : State
        What tells the source, as it was when it was opened, from that of another rank.
    array : jax.Array or None
        In the end.
    device : Phase
        What handing the pieces to JAX took.
    checked : Checked
        What was verified of it.
    """

    def __init__(self, load: ArrayLoad, rank: int) -> None:
        self.load, self.rank = load, rank
        self.pieces: dict[int, Piece] = {}
        self.contents: State = None
        self.array: jax.Array | None = None
        self.device = Phase(0.0, 0)
        self.checked = Checked()
        self._reader: SourceReader | None = None
        self._source: Source | None = None
        self._state: State = None
        self._early: EarlyPieces | None = None

    def open(self, opened: ExitStack) -> None:
        """Open the source, if this rank reads; `opened` closes it."""
        if self.load.layout.schedule.is_owner(self.rank):
            source = self._source = self.load.open()
            self._state = source.state()
            if source is not self.load.handle:
                opened.push(partial(_close, source))
        self.contents = self.load.contents() if self.load.is_open else self._state

    def make_room(self) -> None:
        """Make the pieces: the padded tails are filled, the rest is to be written by the exchange."""
        layout, dtype = self.load.layout, self.load.plan.dtype
        numbers = list(layout.schedule.shards.shards_of(self.rank))
        regions = [layout.schedule.shards.region(shard) for shard in numbers]
        for shard, region, data in zip(numbers, regions, empty_pieces([r.shape for r in regions], dtype), strict=True):
            piece = self.pieces[shard] = Piece(region, data)
            held = layout.schedule.true_region(shard)
            if held != region:
                fill_padding(piece, held, pad_value(self.load.options.pad, dtype) if region.size else 0)
        self._early = EarlyPieces(self.load.plan.shape_global, self.load.plan.sharding)

    def make_reader(self, opened: ExitStack, resources: Resources, tuning: Tuning) -> None:
        """Make what reads this rank's blocks; `opened` waits for what it has begun."""
        layout = self.load.layout
        self._reader = SourceReader(
            self._source or _nothing_to_read(self.load.info),
            layout.source,
            LocalPieces(self.rank, self.pieces, self.load.options.checksums),
            resources,
            tuning=tuning,
            counts=counter_of(layout.schedule, self.rank),
        )
        opened.enter_context(self._reader)
        if isinstance(self._source, UntrustedSource):
            opened.push(partial(_end_helpers, self._source))  # before the reader waits for its threads, which wait for them

    @property
    def reader(self) -> SourceReader:
        """What reads this rank's blocks."""
        if self._reader is None:
            raise ValueError("the reader has not been made")
        return self._reader

    @property
    def counters(self) -> Counters:
        """What reading it took."""
        return Counters() if self._reader is None else self._reader.counters

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return sum(piece.data.nbytes for piece in self.pieces.values())

    def move(self, seed: int, is_named: bool) -> ArrayMove:
        """What the exchange is to do for this array, which errors name where there are others."""
        flow, dtype = BlocksToPieces(self.load.layout.schedule), self.load.plan.dtype
        return ArrayMove(
            flow, self.reader, self.pieces, dtype, self._start_early, seed, str(self.load.info) if is_named else ""
        )

    def _start_early(self, piece: Piece) -> None:
        """A piece is complete: it may go to its device."""
        if self._early is not None:
            self._early.start(piece.region, piece.data)

    def assemble(self) -> None:
        """Hand the pieces to JAX."""
        started = time.perf_counter()
        held = ((p.region, p.data) for p in self.pieces.values())
        plan = self.load.plan
        self.array = assemble(plan.shape_global, plan.sharding, plan.dtype, held, self._early)
        self.device = Phase(time.perf_counter() - started, self.nbytes)

    def check_unchanged(self) -> None:
        """SourceError where the file is not what it was when it was opened."""
        if self._source is not None:
            info = self.load.info
            check_unchanged(str(info), self._state, self._source.state(), info.path, info.dataset)

    def verify(self) -> None:
        """Compare what the devices of this process hold, as far as was asked for."""
        held = {piece.region: piece.data for piece in self.pieces.values()}
        self.checked = self.load.verifier().check(self.array, self.rank, held)


def _open(handle: Any, info: ArrayInfo, options: Options) -> Source:
    """The array of a file, which must be what the plan was made for."""
    source = open_source(handle, info.dataset, options.access)
    found = source.info
    if (found.shape, found.dtype, found.chunks) != (info.shape, info.dtype, info.chunks):
        source.close()
        raise SourceError(
            f"{found} has shape {found.shape}, {found.dtype}, chunks {found.chunks} here, but the plan was made for "
            f"{info.shape}, {info.dtype}, {info.chunks}: the file has changed, or this rank sees another file",
            path=info.path,
            dataset=info.dataset,
        )
    return source


def _close(source: Source, kind: type[BaseException] | None, *_: object) -> None:
    """Close, unless a thread may be held up in a read of it: the library would wait for that thread."""
    if kind is None or not issubclass(kind, StallError):
        source.close()


def _end_helpers(source: UntrustedSource, kind: type[BaseException] | None, *_: object) -> None:
    """Nobody wants their answers any more: after a stall or Ctrl-C, say."""
    if kind is not None:
        source.close()


def _nothing_to_read(info: ArrayInfo) -> Source:
    """A source for a rank that reads nothing."""
    return MemorySource(np.empty((0,) * len(info.shape), dtype=np.dtype(info.dtype)))
