"""How are arrays of files the source of a round? Each is read block by block, by threads, from whatever has it open."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.format import Source
from shardload.formats.memory import MemorySource
from shardload.planning.schedule import Block, SourceLayout
from shardload.planning.tuning import Tuning, default_tuning
from shardload.transfer.buffers import Resources
from shardload.transfer.counters import counter_of
from shardload.transfer.moves import ArrayMove
from shardload.transfer.pieces import LocalPieces
from shardload.transfer.reader import SourceReader, open_reader


@dataclass(eq=False)
class FileMove(ArrayMove):
    """What moves of an array that is read from a file, or from memory.

    Attributes
    ----------
    flow : Schedule or BatchFlow
        It also says what a rank ever reads.
    producer : SourceReader
        It also counts.
    info : ArrayInfo
        The array's metadata.
    layout : SourceLayout
        How the selected elements lie in the file.
    is_cut : sequence of bool
        See `counter_of`.
    """

    flow: Any
    producer: Any = field(default=None, init=False)
    info: ArrayInfo = field(kw_only=True)
    layout: SourceLayout = field(kw_only=True)
    is_cut: Sequence[bool] = field(default=(), kw_only=True)


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
        # Of each array: held while the format's library reads it. Blocks of two rounds may be read at the same time.
        self._libraries = defaultdict[int, threading.Lock](threading.Lock)

    @abstractmethod
    def open(self, moves: Sequence[Any], opened: ExitStack) -> list[Source | None]:
        """Open the arrays of a round: None for one that this rank does not read. `opened` closes them when all has moved, or
        they stay open for later rounds.
        """

    def coming(self, move: Any) -> Iterable[Block]:
        """The blocks of an array in a store that this rank reads next, in order, without those that were announced before."""
        blocks: Iterable[Block] = move.flow.outgoing(self._rank)
        return blocks

    def stage(self, moves: Sequence[Any], resources: Resources, opened: ExitStack) -> None:
        """See `SourceEndpoint`."""
        for move, source in zip(moves, self.open(moves, opened), strict=True):
            with move.naming_errors():
                move.producer = self._reader(move, source, resources, opened)

    def _reader(self, move: FileMove, source: Source | None, resources: Resources, opened: ExitStack) -> SourceReader:
        info, layout, flow, tuning = move.info, move.layout, move.flow, self._tuning
        in_store = source is not None and info.is_in_store
        if source is None:
            source = MemorySource(np.empty((0,) * len(info.shape), dtype=np.dtype(info.dtype)))
        elif (around := flow.around(self._rank)) is not None:
            source.expect(layout.selection.to_file(around))
        if isinstance(source, MemorySource) and tuning.inline_nbytes > 0:  # a copy: not worth a thread
            tuning = replace(tuning, inline_nbytes=max(tuning.inline_nbytes, tuning.small_nbytes))
        if in_store:  # also tiny chunks are fetched ahead
            tuning = replace(tuning, min_chunk_nbytes=0)
        reader = open_reader(
            source,
            layout,
            LocalPieces(self._rank, move.targets, self._checksums),
            resources,
            tuning=tuning,
            counts=counter_of(flow, self._rank, move.is_cut),
            library=self._libraries[move.array],
        )
        if in_store:
            reader.expect(self.coming(move))
        opened.enter_context(reader)
        # After an error, a stall or Ctrl-C nobody waits for values any more. It runs first: the reader waits for its threads.
        opened.push(lambda kind, *_: None if kind is None else source.interrupt())
        return reader
