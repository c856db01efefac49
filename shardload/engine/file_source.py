"""How are arrays of files the source of a round? Each is read block by block, by threads, from whatever has it open."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.format import Source
from shardload.formats.memory import MemorySource
from shardload.planning.schedule import Block, Schedule, SourceLayout
from shardload.planning.tuning import Tuning, default_tuning
from shardload.storage.remote import is_remote
from shardload.transfer.buffers import Resources
from shardload.transfer.cast import conversion
from shardload.transfer.counters import counter_of
from shardload.transfer.moves import ArrayMove
from shardload.transfer.pieces import LocalPieces
from shardload.transfer.reader import SourceReader, open_reader
from shardload.values.decoding import Decoding


@dataclass(frozen=True)
class OpenArray:
    """An array that is open, and how it is read.

    Attributes
    ----------
    info : ArrayInfo
        Its metadata.
    source : Source or None
        What reads it; None on a rank that reads nothing of it.
    layout : SourceLayout
        How the selected elements lie in the file.
    schedule : Schedule
        Which rank reads which block.
    decoding : Decoding, optional
        How stored numbers become values.
    library : Lock
        Held while the format's library reads. Where the source stays open, rounds that overlap have the same one.
    """

    info: ArrayInfo
    source: Source | None
    layout: SourceLayout
    schedule: Schedule
    decoding: Decoding | None = None
    library: threading.Lock = field(default_factory=threading.Lock)


class FileSource(ABC):
    """The `SourceEndpoint` of arrays in files, and of arrays in memory. Each kind of call says how it opens them.

    Parameters
    ----------
    rank : int
        This rank.
    checksums : bool
        Whether what stays on this rank is checksummed, too.
    tuning : Tuning, optional
        Sizes at which the way of reading changes.
    """

    def __init__(self, rank: int, checksums: bool, tuning: Tuning | None = None) -> None:
        self._rank, self._checksums, self._tuning = rank, checksums, tuning or default_tuning()

    @abstractmethod
    def open(self, moves: Sequence[ArrayMove], opened: ExitStack) -> list[OpenArray]:
        """Open the arrays of a round. `opened` closes them when all has moved, or they stay open for later rounds."""

    def coming(self, move: ArrayMove) -> Iterable[Block]:
        """The blocks of an array in a store that this rank reads next, in order, as far as nothing was told of them."""
        return move.flow.outgoing(self._rank)

    def stage(self, moves: Sequence[ArrayMove], resources: Resources, opened: ExitStack) -> None:
        """See `SourceEndpoint`."""
        for move, array in zip(moves, self.open(moves, opened), strict=True):
            try:
                move.producer = self._reader(array, move, resources, opened)
            except Exception as error:
                move.fail(error)

    def _reader(self, array: OpenArray, move: ArrayMove, resources: Resources, opened: ExitStack) -> SourceReader:
        source, layout, schedule, tuning = array.source, array.layout, array.schedule, self._tuning
        if source is None:
            source = MemorySource(np.empty((0,) * len(array.info.shape), dtype=np.dtype(array.info.dtype)))
        elif (around := schedule.around(self._rank)) is not None:
            source.expect(layout.selection.to_file(around))
        if isinstance(source, MemorySource) and tuning.inline_nbytes > 0:  # a copy: not worth a thread
            tuning = replace(tuning, inline_nbytes=max(tuning.inline_nbytes, tuning.small_nbytes))
        in_store = array.source is not None and is_remote(array.info.path)
        if in_store:  # also tiny chunks are fetched ahead
            tuning = replace(tuning, min_chunk_nbytes=0)
        reader = open_reader(
            source,
            layout,
            LocalPieces(self._rank, move.targets, self._checksums),
            resources,
            tuning=tuning,
            counts=counter_of(schedule, self._rank),
            convert=conversion(array.decoding),
            library=array.library,
        )
        if in_store:
            reader.expect(self.coming(move))
        opened.enter_context(reader)
        opened.push(partial(_interrupt, source))  # runs first: the reader waits for threads that read
        return reader


def _interrupt(source: Source, kind: type[BaseException] | None, *_: object) -> None:
    """After an error, for example a stall or Ctrl-C: nobody waits for values any more."""
    if kind is not None:
        source.interrupt()
