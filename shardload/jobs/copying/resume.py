"""What of a copy was done by a job that was killed? All ranks look at what its journal notes, and agree on what is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.comm.group import Group
from shardload.formats.sink import ArraySpec, Sink, Ticket
from shardload.jobs.copying.plan import CopyPlan
from shardload.jobs.copying.request import Found
from shardload.jobs.writing.journal import ARRAY, NBYTES, NUMBER, Left, Resumed, find_journal, trusted, whole_chunks
from shardload.planning.grid import Grid
from shardload.planning.region import Region

__all__ = ["Done", "resume"]

_AT_ONCE = 256  # chunks, between two looks at the other ranks

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Done:
    """Which chunks of the target are there; of an array in one piece, which units.

    Attributes
    ----------
    cells : sequence of Grid
        Of each array its chunks.
    flags : list of ndarray
        Of each whether they are there.
    """

    cells: Sequence[Grid]
    flags: list[Bools]

    @classmethod
    def none(cls, planned: CopyPlan) -> Done:
        """Nothing is there."""
        cells = [_cells(spec, one.unit.unit) for spec, one in zip(planned.specs, planned.arrays, strict=True)]
        return cls(cells, [np.zeros(one.counts, dtype=bool) for one in cells])

    def holds(self, array: int, region: Region) -> bool:
        """True if all chunks that meet a region are there."""
        flags = self.flags[array]
        box = tuple(slice(axis.start, axis.stop) for axis in self.cells[array].meeting_axes(region))
        return bool(flags[box].all()) if flags.any() else False

    @property
    def n(self) -> int:
        """How many."""
        return sum(int(one.sum()) for one in self.flags)

    @property
    def n_all(self) -> int:
        """Of how many."""
        return sum(one.size for one in self.flags)


def _cells(spec: ArraySpec, unit: tuple[int, ...]) -> Grid:
    cell = tuple(max(1, n) for n in (spec.chunks or unit))
    return Grid(spec.shape, cell, (0,) * len(spec.shape))


def resume(
    group: Group, target: str, about: Mapping[str, str], found: Sequence[Found], sink: Sink, planned: CopyPlan
) -> tuple[Resumed | None, Done]:
    """What another job has left of this copy; None and nothing if it left none. Collective.

    Raises
    ------
    ConfigError
        If what is left is of something else, or another job is writing it.
    """
    lefts: list[Left] = []

    def look() -> str:
        left = find_journal(target, about)
        if left is None:
            return "null"
        lefts.append(left)
        return json.dumps([left.temporary, left.token])

    told, done = json.loads(group.tell(look, 0)), Done.none(planned)
    if told is None:
        return None, done
    group.watch.enter("look at what is there")
    ticket = Ticket(told[0], told[1], {}, True)
    rows = lefts[0].rows if lefts else np.empty((0, 7), np.int64)
    parts = None
    if group.rank == 0:
        ends = np.cumsum(rows[:, NBYTES])
        cuts = np.searchsorted(ends, [int(ends[-1]) * k // group.size for k in range(1, group.size)] if len(ends) else [])
        parts = [np.ascontiguousarray(part).reshape(-1) for part in np.split(rows, cuts)]
        parts += [np.empty(0, np.int64)] * (group.size - len(parts))
    mine = group.scatter_rows(parts).reshape(-1, rows.shape[1])
    flags: list[bool] = []
    for at in range(0, len(mine), _AT_ONCE):
        flags += whole_chunks(sink, ticket, mine[at : at + _AT_ONCE])
        group.watch.moved()
        group.watch.look()
    gathered = group.gather_rows(np.array(flags, dtype=np.int64))
    rounds: list[Int64s] = []
    places = {name: k for k, name in enumerate(one.full_name for one in found)}
    numbers = [places[name] for name in sink.arrays]  # of the arrays of the journal

    def settle() -> list[bytes]:
        rounds.extend(trusted(lefts[0].rounds, np.concatenate(gathered or []).astype(bool)))
        for part in rounds:
            _mark(done, numbers, part, planned)
        return [np.packbits(one.reshape(-1)).tobytes() for one in done.flags]

    bits = np.frombuffer(group.tell(settle, 0), dtype=np.uint8)
    at = 0
    for k, one in enumerate(done.flags):
        n = -(-one.size // 8)
        done.flags[k] = np.unpackbits(bits[at : at + n], count=one.size).astype(bool).reshape(one.shape)
        at += n
    is_mine = np.array([_is_marked(done, numbers, row, planned) for row in mine.tolist()], dtype=bool)
    left = lefts[0] if lefts else None
    return Resumed(told[0], told[1], rounds, mine[is_mine & np.array(flags, dtype=bool)], left), done


def _place(numbers: Sequence[int], row: Sequence[int], done: Done, planned: CopyPlan) -> tuple[int, tuple[int, ...]] | None:
    """The array and the chunk of a row; None if it is another unit than this job would write."""
    array = numbers[row[ARRAY]]
    spec, cells = planned.specs[array], done.cells[array]
    if spec.chunks is not None:
        return array, tuple(int(k) for k in np.unravel_index(row[NUMBER], spec.grid))
    at = np.unravel_index(row[NUMBER], spec.shape) if spec.shape else ()
    index = tuple(int(k) // c for k, c in zip(at, cells.cell, strict=True))
    number = int(np.ravel_multi_index(index, cells.counts)) if index else 0
    region = cells.region(number)
    is_same = tuple(int(k) for k in at) == region.start and region.size * spec.dtype.itemsize == row[NBYTES]
    return (array, index) if is_same else None


def _mark(done: Done, numbers: Sequence[int], rows: Int64s, planned: CopyPlan) -> None:
    for row in rows.tolist():
        place = _place(numbers, row, done, planned)
        if place is not None:
            done.flags[place[0]][place[1]] = True


def _is_marked(done: Done, numbers: Sequence[int], row: Sequence[int], planned: CopyPlan) -> bool:
    place = _place(numbers, row, done, planned)
    return place is not None and bool(done.flags[place[0]][place[1]])
