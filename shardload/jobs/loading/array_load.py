"""What does one rank do for one array of a job?

1. An `ArrayLoad` is the array as all ranks know it: its plan, its options, and the path or object that opens it.
2. An `OwnArray` is this rank's share while the job runs: the open source, the pieces, the reader that fills them, and in the
   end the `jax.Array`. Its methods are in the order in which a job calls them.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from shardload.arrays.assemble import EarlyPieces, assemble
from shardload.arrays.padding import remember
from shardload.arrays.verification import Found, Verifier
from shardload.errors import SourceError, StallError, printable
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.dtypes import settle_bools
from shardload.formats.contract.format import OpenFile, Source
from shardload.formats.labels import OnDemand
from shardload.formats.lookup import absolute, file_of, open_file, open_source
from shardload.formats.memory import MemorySource
from shardload.jobs.consistency import State, check_names, check_same_file, check_unchanged, contents_of, is_open
from shardload.jobs.loading.plan import Layout, Plan
from shardload.jobs.loading.report import Phase
from shardload.jobs.trees import in_array, naming_errors
from shardload.options import INDEX, Options, fill_value
from shardload.planning.tuning import Tuning
from shardload.transfer.buffers import Piece
from shardload.transfer.counters import Counters
from shardload.transfer.decode import conversion
from shardload.transfer.local_pieces import LocalPieces
from shardload.transfer.missing import counter_of
from shardload.transfer.moves import ArrayMove, BlocksToPieces
from shardload.transfer.reader import SourceReader
from shardload.transfer.resources import Resources
from shardload.transfer.shard_pieces import ShardPieces

__all__ = ["ArrayLoad", "OpenSources", "OwnArray"]

_UNNAMED = nullcontext()


@dataclass(frozen=True, eq=False)
class ArrayLoad:
    """One array of a job.

    Attributes
    ----------
    kind : Plan
        Its plan, but for `info`: arrays of the same kind share it.
    info : ArrayInfo
        Metadata of the array in its file.
    options : Options
        Its options.
    handle : object
        A path, an open array, or a source in memory (None on the ranks that do not have it).
    origin : object
        The path that opens the file, if `handle` is a source that has the values already.
    where : str
        Which array of a tree it is, for messages: ``"array ['gas']"``; empty if it is the only one.
    """

    kind: Plan
    info: ArrayInfo
    options: Options
    handle: Any
    origin: Any = None
    where: str = ""

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return replace(self.kind, info=self.info)

    @property
    def name(self) -> str:
        """The array as messages name it."""
        return f"{self.where}, {self.info}" if self.where else str(self.info)

    @property
    def layout(self) -> Layout:
        """How it lies in its file and over the ranks."""
        return self.kind._layout

    @property
    def is_open(self) -> bool:
        """True if the caller has the array open or in memory on every rank."""
        return is_open(self.handle)

    @property
    def named_in(self) -> State:
        """The state of the file in which a selection by names was looked up; None if there is no such selection."""
        labels = self.info.labels
        known = labels.brief if isinstance(labels, OnDemand) else labels  # read for a selection by names alone
        return None if known is None else known.read_in

    def named(self, error: BaseException) -> BaseException:
        """An error of this array, which names it if there are others."""
        return in_array(self.where, error, f"'{printable(self.info.dataset)}'")

    def naming_errors(self) -> AbstractContextManager[None]:
        """Let errors that are raised inside name this array."""
        return naming_errors(self.where, f"'{printable(self.info.dataset)}'") if self.where else _UNNAMED

    @property
    def is_here(self) -> bool:
        """True if every rank has all values in memory, as they are to be loaded: they came with the metadata."""
        return self.origin is not None and not self.layout.source.casts

    @property
    def read_in(self) -> State:
        """The state of the file in which values that are in memory already were read; None if that is not known."""
        return self.handle.read_in if self.origin is not None else None

    def with_staging(self, nbytes: int) -> ArrayLoad:
        """The same load under another staging cap."""
        if nbytes == self.options.staging_nbytes:
            return self
        kind = replace(self.kind, staging_nbytes=nbytes, staging_is_raised=True)
        return replace(self, kind=kind, options=replace(self.options, staging=nbytes))

    @property
    def anywhere(self) -> ArrayLoad:
        """The same load, whatever the working folder is when it is done."""
        return replace(self, handle=absolute(self.handle)) if isinstance(self.handle, (str, os.PathLike)) else self

    def contents(self) -> State:
        """A fingerprint of the open array, to compare with those of the other ranks."""
        source_layout = self.layout.source
        with closing(self._open(self.handle)) as source:
            chunks = source_layout.chunks if source_layout.has_chunks else None
            return contents_of(source, self.handle, source_layout.selection, chunks)

    def verifier(self, seed: int = 0, sources: OpenSources | None = None) -> Verifier:
        """The verifier that compares an array with the file of this plan, which `sources` opens again."""
        handle = self.handle if self.origin is None else self.origin

        def open_again() -> Source:
            return self._open(handle) if sources is None else sources.open_again(self, handle)

        layout = self.layout
        return Verifier(self.name, layout.schedule, layout.source, layout.decoding, self.options, seed, open_again)

    def _open(self, handle: Any, access: Access | None = None) -> Source:
        return _as_planned(open_source(handle, self.info.dataset, access or self.options.access, self.info), self)


class OpenSources:
    """The sources that one rank reads in a job. A file with several of the arrays is opened once.

    Parameters
    ----------
    loads : sequence of ArrayLoad
        The arrays that this rank reads.
    opened : ExitStack
        Closes the files and sources that are opened here.
    """

    def __init__(self, loads: Sequence[ArrayLoad], opened: ExitStack) -> None:
        self._opened = opened
        is_many = len(loads) > 1
        self._keys: dict[str, Any] = {}  # of each path as written, because looking it up asks the file system
        self._n = Counter(self._file_of(load, load.handle) for load in loads) if is_many else Counter[Any]()
        if is_many:
            self._n.update(self._file_of(load, load.origin) for load in loads if load.origin is not None)
        self._files: dict[Any, OpenFile] = {}

    def _access(self, load: ArrayLoad) -> Access:
        """What the caller allows, of which all files that are open here have a part."""
        return load.options.access.shared_by(len(self._n))

    def _file_of(self, load: ArrayLoad, handle: Any) -> Any:
        """A key that is equal for arrays of one file; None if the array is not in a file that is opened here."""
        if not isinstance(handle, (str, os.PathLike)) or is_open(handle):
            return None
        path = os.fspath(handle)
        if path not in self._keys:
            self._keys[path] = file_of(path)
        return self._keys[path], load.options.access

    def open(self, load: ArrayLoad) -> Source:
        """Open the source of an array. Raises SourceError if its shape, dtype or chunks differ from the plan's."""
        if isinstance(load.handle, MemorySource):
            return load.handle
        return self.open_again(load, load.handle)

    def open_again(self, load: ArrayLoad, handle: Any) -> Source:
        """Open the source of an array by `handle`, also if its values are in memory already."""
        key = self._file_of(load, handle) if self._n else None
        if key is None or self._n[key] == 1:
            source = load._open(handle, self._access(load))
            self._opened.push(partial(_close, source))
            return source
        file = self._files.get(key)
        if file is None:
            file = self._files[key] = open_file(handle, self._access(load))
            self._opened.push(partial(_close, file))
        return _as_planned(file.open_planned(load.info), load)

    def states(self, paths: Sequence[str], loads: Sequence[ArrayLoad]) -> dict[str, State]:
        """The state of each of some files, by the path in `ArrayInfo`: of those that are open here for several arrays.

        Raises
        ------
        SourceError
            If a file is another one than that from which one rank has read small arrays before it was opened here.
        """
        found: dict[str, State] = {}
        for load in loads if paths else ():
            path = load.info.path
            is_small = isinstance(load.handle, MemorySource)
            file = self._files.get(self._file_of(load, load.origin if is_small else load.handle)) if path in paths else None
            if file is None:
                continue
            if path not in found:
                found[path] = file.state()
            if is_small and load.handle.read_in is not None:
                check_same_file(load.name, load.handle.read_in, found[path], path, load.info.dataset)
        return found


class OwnArray:
    """This rank's share of one array, while the job runs.

    Attributes
    ----------
    shards : dict of int to Piece
        This rank's pieces, by shard number, in the coordinates of the jax.Array.
    contents : State
        The source's state when it was opened, to compare with the other ranks' sources.
    array : jax.Array or None
        The loaded array, at the end.
    device : Phase
        Seconds and bytes for handing the pieces to JAX.
    checked : Found
        What this rank verified.
    """

    def __init__(self, load: ArrayLoad, rank: int) -> None:
        self.load, self.rank = load, rank
        self.shards: dict[int, Piece] = {}
        self.contents: State = None
        self.array: jax.Array | None = None
        self.device = Phase(0.0, 0)
        self.checked = Found()
        self._reader: SourceReader | None = None
        self._filled = Counters()
        self._source: Source | None = None
        self._state: State = None
        self._early: EarlyPieces | None = None
        self._pieces: ShardPieces | None = None

    @property
    def reads(self) -> bool:
        """True if this rank reads any block of it."""
        return self.load.layout.schedule.is_owner(self.rank)

    def open(self, sources: OpenSources) -> None:
        """Open the source, if this rank reads."""
        if self.reads:
            self._source = sources.open(self.load)
            self._state = self._source.opened_in()
            check_names(self.load.name, self.load.named_in, self._state, self.load.info.path, self.load.info.dataset)
        self.contents = self.load.contents() if self.load.is_open else self._state

    def take(self) -> None:
        """Take the source that has the values in memory already (`ArrayLoad.is_here`): there is nothing to open."""
        if isinstance(self.load.handle, MemorySource):
            self._source = self.load.handle

    @property
    def pieces(self) -> dict[int, Piece]:
        """What the exchange fills, by the number of the section (`Shards.sections_of`), in coordinates of the file's array."""
        return {} if self._pieces is None else self._pieces.sections

    @property
    def wanted(self) -> tuple[list[tuple[int, ...]], np.dtype[Any]]:
        """The shapes of the pieces, and their dtype."""
        shards = self.load.layout.schedule.shards
        return [shards.shard_shape] * len(shards.shards_of(self.rank)), self.load.kind.dtype

    def make_room(self, room: list[np.ndarray[Any, Any]]) -> None:
        """Take the pieces from `room`, and fill their padding. The exchange writes the rest."""
        layout, kind = self.load.layout, self.load.kind
        shards = layout.schedule.shards
        for shard, data in zip(shards.shards_of(self.rank), room, strict=True):
            self.shards[shard] = Piece(shards.region(shard), data)
        self._pieces = ShardPieces(shards, kind.shape, self.shards, self.rank)
        self._pieces.fill(partial(fill_value, self.load.options.pad, kind.dtype))
        self._early = EarlyPieces(kind.shape_global, kind.sharding)

    def make_reader(self, opened: ExitStack, resources: Resources, tuning: Tuning) -> None:
        """Make the reader of this rank's blocks. `opened` waits for the reads that it has begun."""
        layout = self.load.layout
        around = layout.schedule.around(self.rank)
        if self._source is not None and around is not None:
            self._source.expect(layout.source.selection.to_file(around))
        if isinstance(self._source, MemorySource) and tuning.inline_nbytes > 0:  # a copy: not worth a thread
            tuning = replace(tuning, inline_nbytes=max(tuning.inline_nbytes, tuning.small_nbytes))
        self._reader = SourceReader(
            self._source or _nothing_to_read(self.load.info),
            layout.source,
            LocalPieces(self.rank, self.pieces, self.load.options.checksums),
            resources,
            tuning=tuning,
            counts=counter_of(layout.schedule, self.rank),
            convert=conversion(layout.decoding),
        )
        opened.enter_context(self._reader)
        if self._source is not None:
            opened.push(partial(_interrupt, self._source))  # runs first: the reader waits for threads that read

    @property
    def reader(self) -> SourceReader:
        """The reader of this rank's blocks."""
        if self._reader is None:
            raise ValueError("the reader has not been made")
        return self._reader

    @property
    def counters(self) -> Counters:
        """What this rank's reader counted: seconds, bytes, chunks."""
        return self._filled if self._reader is None else self._reader.counters

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(piece.data.nbytes for piece in self.shards.values())

    def move(self, is_named: bool) -> ArrayMove:
        """The task of the exchange for this array; `is_named` if errors must name it, because there are other arrays."""
        flow, dtype = BlocksToPieces(self.load.layout.schedule), self.load.kind.dtype
        name = self.load.name if is_named else ""
        return ArrayMove(flow, self.reader, self.pieces, dtype, self._start_early, name=name, named=self.load.named)

    def fill(self) -> None:
        """Fill the pieces from values that this process has in memory: no rank sends any (`ArrayLoad.is_here`)."""
        layout, source = self.load.layout, self._source
        if source is None:
            return
        started = time.perf_counter()
        for section, piece in self.pieces.items():
            region = layout.schedule.true_region(section)
            if region is not None and region.size:
                place, target = layout.source.selection.to_file(region), piece.view(region)
                view = source.view(place)
                values = source.plain(place) if view is None else view
                np.copyto(target, values.reshape(region.shape), casting="no")
                settle_bools(target)
                self._filled.nbytes_read += target.nbytes
                self._filled.chunks_decoded += layout.source.chunks.n_meeting(region) if layout.source.has_chunks else 0
            self._start_early(piece)
        self._filled.read_seconds += time.perf_counter() - started

    def _start_early(self, piece: Piece) -> None:
        """Start to copy a complete piece to its device."""
        shard = None if self._pieces is None else self._pieces.completed(piece)
        if self._early is not None and shard is not None:
            self._early.start(shard.region, shard.data)

    def assemble(self) -> None:
        """Hand the pieces to JAX."""
        started = time.perf_counter()
        if self._pieces is not None:
            self._pieces.finish()
        held = ((p.region, p.data) for p in self.shards.values())
        kind = self.load.kind
        self.array = assemble(kind.shape_global, kind.sharding, kind.dtype, held, self._early)
        is_decoded = self.load.layout.decoding is not None or (False if self.load.info.packing else None)
        remember(self.array, self.load.layout.extent, is_decoded)
        self.device = Phase(time.perf_counter() - started, self.nbytes)

    def check_unchanged(self) -> None:
        """Raise SourceError if the file has changed since it was opened."""
        if self._source is not None:
            info = self.load.info
            check_unchanged(str(info), self._state, self._source.state(), info.path, info.dataset)

    def verify(self, sources: OpenSources | None) -> None:
        """Verify what the devices of this process hold, at the level that the caller asked for. `sources` opens the files."""
        if self.load.options.verify == INDEX:  # `assemble` has compared each shard
            self.checked = Found(n_shards=len(self.load.kind.sharding.addressable_devices))
            return
        held = {piece.region: piece.data for piece in self.shards.values()}
        self.checked = self.load.verifier(sources=sources).check(self.array, self.rank, held)


def _as_planned(source: Source, load: ArrayLoad) -> Source:
    """Return `source` if its shape, dtype and chunks are the plan's; otherwise close it and raise SourceError."""
    found, info = source.info, load.info
    if (found.shape, found.dtype, found.chunks) != (info.shape, info.dtype, info.chunks):
        source.close()
        raise SourceError(
            f"{found} has shape {found.shape}, {found.dtype}, chunks {found.chunks} here, but the plan was made for "
            f"{info.shape}, {info.dtype}, {info.chunks}: the file has changed, or this rank sees another file",
            path=info.path,
            dataset=info.dataset,
        )
    # As text, because NaN is not equal to itself.
    if load.layout.decoding is not None and repr(found.packing) != repr(info.packing):
        source.close()
        raise SourceError(
            f"{found} is packed by {dict(found.packing)} here, but the plan was made for {dict(info.packing)}: the file has "
            "changed, or this rank sees another file",
            path=info.path,
            dataset=info.dataset,
        )
    return source


def _close(source: Source | OpenFile, kind: type[BaseException] | None, *_: object) -> None:
    """Close `source`, but not after a stall: a thread may hang in a read of it, and the library would wait for that thread."""
    if kind is None or not issubclass(kind, StallError):
        source.close()


def _interrupt(source: Source, kind: type[BaseException] | None, *_: object) -> None:
    """After an error, for example a stall or Ctrl-C: nobody waits for values any more."""
    if kind is not None:
        source.interrupt()


def _nothing_to_read(info: ArrayInfo) -> Source:
    """A source for a rank that reads nothing."""
    return MemorySource(np.empty((0,) * len(info.shape), dtype=np.dtype(info.dtype)))
