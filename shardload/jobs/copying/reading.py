"""How does one rank get the values of the chunks that it writes in a round? From the source, by the engine that loads arrays.

A round's slabs are arrays of their own for it: with blocks, and with pieces on one rank (`plan_direct`: nothing is sent) or on
all (`Parallel`: each chunk is read by one rank, which sends parts to others). The pieces are cut from three buffers, which are
used in turn, because `writing.file.write_file` still stores what was read two rounds before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.comm.group import Group
from shardload.engine.ring import Ring
from shardload.engine.session import Session
from shardload.errors import SourceError
from shardload.formats.contract.format import OpenFile, Source
from shardload.formats.lookup import open_file, split_path
from shardload.jobs.consistency import State, check_same_file, check_unchanged
from shardload.jobs.copying.plan import CopyPlan
from shardload.jobs.copying.request import CopyRequest, Found
from shardload.jobs.copying.resume import Done
from shardload.jobs.writing.file import Values
from shardload.options import INDEX
from shardload.planning.copying import plan_copy_rounds
from shardload.planning.grid import Grid
from shardload.planning.region import Region
from shardload.planning.schedule import Owners, Schedule
from shardload.planning.shards import Shards
from shardload.planning.source_layout import SourceLayout
from shardload.planning.staging import plan_staging
from shardload.planning.strategies import plan_direct, plan_shared
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.buffers import Piece
from shardload.transfer.cast import cast_into
from shardload.transfer.local_pieces import LocalPieces
from shardload.transfer.missing import counter_of
from shardload.transfer.moves import ArrayMove, BlocksToPieces
from shardload.transfer.reader import SourceReader
from shardload.transfer.resources import Resources

__all__ = ["CopyReading"]

_BLOCKS_IN_CAP = 8
_MOST_OPEN = 64  # sources

Array = np.ndarray[Any, Any]


@dataclass
class _Own:
    """What this rank reads of one array in one round."""

    array: int
    slab: Region
    layout: SourceLayout
    schedule: Schedule
    pieces: dict[int, Piece] = field(default_factory=dict)


class CopyReading:
    """Reads the rounds of one rank. A context manager, which closes what it has opened. To make one is collective.

    Attributes
    ----------
    n_decoded : int
        Chunks of the source that this rank has decoded.
    n_missing : list of int
        For each array, those of them that are not stored.
    """

    def __init__(
        self,
        group: Group,
        request: CopyRequest,
        found: Sequence[Found],
        planned: CopyPlan,
        digest: str,
        done: Done,
    ) -> None:
        self._done = done
        self._group, self._request, self._found, self._planned = group, request, found, planned
        shared_nbytes = planned.memory.moving_nbytes if any(array.is_together for array in planned.arrays) else None
        self._session = Session(group, digest, shared_nbytes=shared_nbytes, checksums=self._checks)
        self._ring: Ring | None = None
        self._file: OpenFile | None = None
        self._sources: dict[int, tuple[Source, State]] = {}
        self.n_decoded = 0
        self.n_missing = [0] * len(found)

    def __enter__(self) -> CopyReading:
        return self

    def __exit__(self, *_: object) -> None:
        if self._group.watch.is_stalled:
            return  # a thread may hang in a read, and the library would wait for it
        for source, _state in self._sources.values():
            source.close()
        self._sources.clear()
        if self._file is not None:
            self._file.close()

    def rounds(self) -> Iterator[list[Values]]:
        """The chunks of the target, round by round."""
        for number, (slabs, is_together) in enumerate(self._own_rounds()):
            yield self._read(number, slabs, is_together)
        for array in list(self._sources):
            self._check_unchanged(array)

    def own_nbytes(self) -> int:
        """About how many bytes this rank writes, for its progress."""
        total = 0
        for slabs, is_together in self._own_rounds():
            nbytes = sum(slab.size * self._planned.arrays[array].unit.itemsize for array, slab in slabs)
            total += nbytes // self._group.size if is_together else nbytes
        return total

    def _own_rounds(self) -> Iterator[tuple[list[tuple[int, Region]], bool]]:
        """The slabs of each round, each with the number of its array; and whether all ranks have the same."""
        planned = self._planned
        rounds = plan_copy_rounds(planned.arrays, planned.n_ranks, planned.memory.round_nbytes, self._group.rank)
        for items, is_together in rounds:
            slabs = [(item.array, planned.arrays[item.array].slabs.region(number)) for item in items for number in item.units]
            slabs = [(array, slab) for array, slab in slabs if not self._done.holds(array, slab)]
            if slabs:
                yield slabs, is_together

    def _read(self, number: int, slabs: Sequence[tuple[int, Region]], is_together: bool) -> list[Values]:
        own: list[_Own] = []
        error: Exception | None = None
        group, session = self._group, self._session
        if is_together:
            session.begin_round()
        with ExitStack() as opened:
            moves: list[ArrayMove] = []
            readers: list[SourceReader] = []
            try:
                own = [self._lay_out(array, slab, is_together) for array, slab in slabs]
                self._make_room(own)
                staging = plan_staging(
                    [(mine.schedule, mine.layout) for mine in own],
                    self._planned.memory.moving_nbytes,
                    self._planned.memory.n_threads,
                )
                buffers = session.stage(
                    staging.n_slots,
                    staging.slot_nbytes,
                    staging.n_pack,
                    staging.pack_nbytes,
                    is_alone=not is_together,
                )
                resources = Resources(buffers.slots, buffers.bell, staging.n_threads, staging.batch_nbytes)
                opened.enter_context(resources)
                for mine in own:
                    reader = SourceReader(
                        self._source(mine.array),
                        mine.layout,
                        LocalPieces(group.rank, mine.pieces, self._checks),
                        resources,
                        counts=counter_of(mine.schedule, group.rank),
                        convert=cast_into,
                    )
                    readers.append(opened.enter_context(reader))
                    flow, name = BlocksToPieces(mine.schedule), str(self._found[mine.array].info)
                    moves.append(ArrayMove(flow, reader, mine.pieces, mine.layout.dtype, name=name))
            except Exception as raised:
                let_interruption_pass(raised)
                error = raised
            if is_together:
                group.agree(error)  # a rank that cannot read or receive must say so before anything is sent
            elif error is not None:
                raise error
            failed = session.move(moves)
            if failed is not None and not is_together:
                raise failed
        if is_together:
            group.agree(failed)
        for mine, reader in zip(own, readers, strict=True):
            self.n_decoded += reader.counters.chunks_decoded if mine.layout.has_chunks else 0
            self.n_missing[mine.array] += reader.counters.chunks_missing
        found = [values for mine in own for values in self._values(mine)]
        self._close_some()
        return found

    @property
    def _checks(self) -> bool:
        """True if parts are checksummed on their way."""
        return self._request.verify != INDEX

    def _lay_out(self, array: int, slab: Region, is_together: bool) -> _Own:
        group, planned = self._group, self._planned.arrays[array]
        layout = self._found[array].layout(slab)
        most = self._planned.memory.moving_nbytes // _BLOCKS_IN_CAP
        if is_together:
            shards = planned.pieces(slab, group.size)
            schedule = plan_shared(layout, shards, group.size, Owners(group.size), max_nbytes=most)
        else:
            shards = Shards(slab.shape, (1,) * slab.ndim, np.array([[group.rank]], dtype=np.int64))
            schedule = plan_direct(layout, shards, group.size, max_nbytes=most)
        return _Own(array, slab, layout, schedule)

    def _make_room(self, own: Sequence[_Own]) -> None:
        """Cut the pieces from the memory of a round, which was used three rounds before."""
        if self._ring is None:
            self._ring = Ring(self._planned.memory.round_nbytes)
        self._ring.begin_round()
        for mine in own:
            shards = mine.schedule.shards
            for shard in shards.shards_of(self._group.rank):
                true = shards.region(shard).intersect(Region.whole(mine.slab.shape))
                if true is not None:
                    mine.pieces[shard] = self._ring.piece(true, mine.layout.dtype)

    def _values(self, mine: _Own) -> Iterator[Values]:
        """The units of the target that lie in the pieces."""
        name = self._found[mine.array].full_name
        planned = self._planned.arrays[mine.array]
        for piece in mine.pieces.values():
            region = piece.region.moved(mine.slab.start)
            for unit in planned.units_in(region):
                back = unit.moved(tuple(-a for a in mine.slab.start))
                for one in self._chunks(name, mine.array, unit, piece.view(back)):
                    if not self._done.holds(mine.array, one.region):
                        yield one

    def _chunks(self, name: str, array: int, unit: Region, values: Array) -> Iterator[Values]:
        """The chunks of a unit: several if it is a file of chunks."""
        spec = self._planned.specs[array]
        if spec.chunks is None or self._planned.arrays[array].unit.unit == spec.chunks:
            yield Values(name, unit, values)
            return
        cell = tuple(min(c, n) for c, n in zip(spec.chunks, unit.shape, strict=True))
        inner = Grid(unit.shape, cell, (0,) * unit.ndim)
        for number in range(inner.n_cells):
            region = inner.region(number)
            index: Any = (*region.slices(), ...)
            yield Values(name, region.moved(unit.start), values[index])

    # --- sources

    def _source(self, array: int) -> Source:
        if array not in self._sources:
            one = self._found[array]
            path = split_path(self._request.source)[0]
            if self._file is None:
                self._file = open_file(path, self._request.access)
            source = self._file.open_planned(one.info)
            found = source.info
            if (found.shape, found.dtype, found.chunks) != (one.info.shape, one.info.dtype, one.info.chunks):
                source.close()
                raise SourceError(
                    f"{found} has shape {found.shape}, {found.dtype}, chunks {found.chunks} here, but rank 0 found "
                    f"{one.info.shape}, {one.info.dtype}, {one.info.chunks}: the file has changed, or this rank sees "
                    "another file",
                    path=one.info.path,
                    dataset=one.info.dataset,
                )
            self._sources[array] = source, source.opened_in()
            check_same_file(str(one.info), one.state, self._sources[array][1], one.info.path, one.info.dataset)
        return self._sources[array][0]

    def _check_unchanged(self, array: int) -> None:
        source, before = self._sources[array]
        info = self._found[array].info
        check_unchanged(str(info), before, source.state(), info.path, info.dataset)

    def _close_some(self) -> None:
        """Close sources that have been read, if there are many."""
        while len(self._sources) > _MOST_OPEN:
            array = next(iter(self._sources))
            self._check_unchanged(array)
            self._sources.pop(array)[0].close()
