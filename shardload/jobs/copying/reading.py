"""What does one rank read in a round of a copy, and which chunks of the target are in it?

A round's slabs are arrays of their own for the engine: with blocks, and with pieces on one rank (`plan_direct`: nothing is
sent) or on all (`Parallel`: each chunk is read by one rank, which sends parts to others).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from shardload.comm.group import Group
from shardload.engine.file_source import FileSource, OpenArray
from shardload.engine.file_target import Chunk
from shardload.engine.session import Round
from shardload.errors import StallError
from shardload.formats.contract.format import OpenFile, Source
from shardload.formats.lookup import open_file
from shardload.formats.sink import Sink
from shardload.jobs.consistency import State, as_planned, check_same_file, check_unchanged
from shardload.jobs.copying.plan import CopyPlan
from shardload.jobs.copying.request import CopyRequest
from shardload.planning.copying import plan_copy_rounds
from shardload.planning.grid import Grid
from shardload.planning.region import Region
from shardload.planning.schedule import Owners, Schedule, plan_direct, plan_shared
from shardload.planning.shards import Shards
from shardload.planning.source_layout import SourceLayout
from shardload.planning.staging import plan_staging
from shardload.transfer.moves import ArrayMove

_BLOCKS_IN_CAP = 8
_MOST_OPEN = 64  # sources

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class CopyMove(ArrayMove):
    """One slab of an array in one round."""

    def __init__(self, array: int, slab: Region, layout: SourceLayout, schedule: Schedule, name: str) -> None:
        super().__init__(array, schedule, layout.dtype, name)
        self.slab, self.layout, self.schedule = slab, layout, schedule


class CopySource(FileSource):
    """The source of a copy on one rank, and its rounds. What is open stays so from round to round.

    A context manager, which closes the files.

    Parameters
    ----------
    group : Group
        The ranks.
    request : CopyRequest
        What is asked for.
    plan : CopyPlan
        What is copied.
    done : sequence of ndarray
        Of each array which chunks of the target are there already; empty if none are.

    Attributes
    ----------
    n_decoded : int
        Chunks that this rank has decoded.
    n_missing : list of int
        For each array, those of them that are not stored.
    """

    def __init__(self, group: Group, request: CopyRequest, plan: CopyPlan, done: Sequence[Bools]) -> None:
        super().__init__(group.rank, request.options.checksums)
        self._n_ranks, self._request, self._plan, self._found = group.size, request, plan, plan.found
        self._done = done
        self._file: OpenFile | None = None
        self._sources: dict[int, tuple[Source, State]] = {}
        self.n_decoded = 0
        self.n_missing = [0] * len(self._found)

    def __enter__(self) -> CopySource:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, StallError):
            return  # a thread may hang in a read, and the library would wait for it
        for source, _state in self._sources.values():
            source.close()
        self._sources.clear()
        if self._file is not None:
            self._file.close()

    def open(self, moves: Sequence[Any], opened: ExitStack) -> list[OpenArray]:
        """See `FileSource`."""
        opened.callback(self._close_some)
        opened.callback(self._count, moves)
        return [OpenArray(self._found[move.array].info, self._source(move.array), move.layout, move.schedule) for move in moves]

    def _count(self, moves: Sequence[CopyMove]) -> None:
        for move in moves if all(move.producer for move in moves) else ():
            self.n_decoded += move.producer.counters.chunks_decoded if move.layout.has_chunks else 0
            self.n_missing[move.array] += move.producer.counters.chunks_missing

    def _source(self, array: int) -> Source:
        if array not in self._sources:
            info, state = self._found[array].info, self._found[array].state
            if self._file is None:
                self._file = open_file(self._request.source, self._request.options.access, info)
            source = as_planned(self._file.open(info.dataset, info), info, "rank 0 found")
            self._sources[array] = source, source.opened_in()
            check_same_file(str(info), state, self._sources[array][1], info.path, info.dataset)
        return self._sources[array][0]

    def check_unchanged(self) -> None:
        """Raise SourceError if what is open has changed since it was opened."""
        for array, (source, before) in self._sources.items():
            info = self._found[array].info
            check_unchanged(str(info), before, source.state(), info.path, info.dataset)

    def _close_some(self) -> None:
        """Close sources that have been read, if there are many."""
        if len(self._sources) > _MOST_OPEN:
            self.check_unchanged()
            while len(self._sources) > _MOST_OPEN:
                self._sources.pop(next(iter(self._sources)))[0].close()

    # --- rounds

    def slabs(self) -> Iterator[tuple[list[tuple[int, Region]], bool]]:
        """The slabs of each round, each with the number of its array; and whether all ranks have the same."""
        plan = self._plan
        rounds = plan_copy_rounds(plan.arrays, self._n_ranks, plan.memory.round_nbytes, self._rank)
        for items, is_together in rounds:
            slabs = [(item.array, plan.arrays[item.array].slabs.region(number)) for item in items for number in item.units]
            slabs = [(array, slab) for array, slab in slabs if not self._is_done(array, slab)]
            if slabs:
                yield slabs, is_together

    def totals(self) -> tuple[int, int]:
        """How many rounds there are, and about how many bytes this rank writes in them."""
        n_rounds = total = 0
        for slabs, is_together in self.slabs():
            nbytes = sum(slab.size * self._plan.arrays[array].unit.itemsize for array, slab in slabs)
            total += nbytes // self._n_ranks if is_together else nbytes
            n_rounds += 1
        return n_rounds, total

    def rounds(self) -> Iterator[Round]:
        """The rounds of this rank."""
        memory = self._plan.memory
        for slabs, is_together in self.slabs():
            moves = [self._move(array, slab, is_together) for array, slab in slabs]
            layouts = [(move.schedule, move.layout) for move in moves]
            staging = plan_staging(layouts, memory.moving_nbytes, memory.n_threads)
            yield Round(moves, staging, is_together, partial(self._chunks, moves))

    def _move(self, array: int, slab: Region, is_together: bool) -> CopyMove:
        layout = self._found[array].layout(slab)
        most = self._plan.memory.moving_nbytes // _BLOCKS_IN_CAP
        if is_together:
            shards = self._plan.arrays[array].pieces(slab, self._n_ranks)
            schedule = plan_shared(layout, shards, self._n_ranks, Owners(self._n_ranks), max_nbytes=most)
        else:
            shards = Shards(slab.shape, (1,) * slab.ndim, np.array([[self._rank]], dtype=np.int64))
            schedule = plan_direct(layout, shards, self._n_ranks, max_nbytes=most)
        return CopyMove(array, slab, layout, schedule, str(self._found[array].info))

    def _chunks(self, moves: Sequence[CopyMove]) -> Iterator[Chunk]:
        """The chunks of the target that lie in this rank's pieces."""
        for move in moves:
            for piece in move.targets.values():
                for unit in self._plan.arrays[move.array].units_in(piece.region.moved(move.slab.start)):
                    for region in self._chunks_of(move.array, unit):
                        if not self._is_done(move.array, region):
                            values = piece.view(region.moved(tuple(-start for start in move.slab.start)))
                            yield Chunk(self._found[move.array].full_name, region, values)

    def _chunks_of(self, array: int, unit: Region) -> Iterator[Region]:
        """The chunks of a unit: several if it is a file of chunks."""
        chunks = self._found[array].spec.chunks
        if chunks is None or self._plan.arrays[array].unit.unit == chunks:
            yield unit
            return
        inner = Grid(unit.shape, tuple(map(min, chunks, unit.shape)), (0,) * unit.ndim)
        for number in range(inner.n_cells):
            yield inner.region(number).moved(unit.start)

    def _is_done(self, array: int, region: Region) -> bool:
        """Whether all chunks of the target that meet a region are there already."""
        if not self._done:
            return False
        spec = self._found[array].spec
        grid = Grid(spec.shape, tuple(max(1, n) for n in spec.chunks or spec.shape), (0,) * len(spec.shape))
        box = tuple(slice(axis.start, axis.stop) for axis in grid.meeting_axes(region))
        return bool(self._done[array][box].all())


def find_done(group: Group, sink: Sink, plan: CopyPlan) -> list[Bools]:
    """Which chunks of each array another job has left, that was killed; none if it left nothing. Collective.

    Raises
    ------
    ConfigError
        If what is left is of something else, another job is writing it, or files like this one begin anew.
    """
    group.watch.enter("look at what is there")

    def look() -> bytes:
        is_there = sink.take_up()
        if is_there is None:
            return b""
        return np.packbits(np.concatenate([is_there[array.full_name].reshape(-1) for array in plan.found])).tobytes()

    told = group.tell(look, 0)
    if not len(told):
        return []
    grids = [array.spec.grid for array in plan.found]
    sizes = list(map(math.prod, grids))
    bits = np.unpackbits(np.frombuffer(told, dtype=np.uint8), count=sum(sizes)).astype(bool)
    return [part.reshape(grid) for part, grid in zip(np.split(bits, np.cumsum(sizes)[:-1]), grids, strict=True)]
