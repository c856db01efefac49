"""Do several arrays of different types, shapes and shardings move in one exchange over MPI, each element to its place?

The internal function itself, on a permuted mesh: values are their own flat index, with an offset for each array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardload.comm.group import group_of
from shardload.planning.region import Grid, aligned
from shardload.planning.schedule import Owners, Schedule, SourceLayout
from shardload.planning.selection import select_axes
from shardload.planning.shards import plan_shards
from shardload.transfer.buffers import Piece, Resources, Slots
from shardload.transfer.exchange import Outgoing, exchange
from shardload.transfer.moves import ArrayMove
from shardload.transfer.pieces import LocalPieces
from tests.mpi.support import grid_shape
from tests.unit.fakes import FakeSource, reader_as_planned

Array = np.ndarray[Any, Any]


def cut(shape: tuple[int, ...], block: tuple[int, ...], axes: Any, mesh: Array, n_readers: int, dtype: Any) -> Schedule:
    return Schedule(
        Grid(shape, block, (0,) * len(shape)),
        plan_shards(shape, axes, mesh),
        np.dtype(dtype).itemsize,
        mesh.size,
        Owners(n_readers),
    )


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("is_shared", [False, True], ids=["messages", "shared memory"])
def test_many_arrays_in_one_exchange(comm: Any, is_shared: bool, checksums: bool) -> None:
    """Wrong if parts of two arrays with equal regions (the first and the last) were confused, or if a type were."""
    group = group_of(comm)
    n = group.size
    mesh = np.random.default_rng(3).permutation(n).reshape(grid_shape(n))
    given = [
        (np.arange(24 * n * n, dtype="f4").reshape(4 * n, 6 * n), (2, 6 * n), [(0,), (1,)], n),
        (np.arange(1 << 40, (1 << 40) + 12 * n, dtype="i8").reshape(2 * n, 3, 2), (n, 3, 2), [(1,), (), ()], max(1, n // 2)),
        (np.arange(16 * n, dtype="u1"), (16 * n,), [(1, 0)], 1),
        (np.arange(7000, 7000 + 24 * n * n, dtype="f4").reshape(4 * n, 6 * n), (2, 6 * n), [(0,), (1,)], n),
    ]
    nbytes = max(int(np.prod(block)) * values.itemsize for values, block, *_ in given)
    segments = group.node.shared_memory(4 * aligned(nbytes)) if is_shared else {}
    own = segments.get(group.rank)
    slots = Slots(2, nbytes, None if own is None else own.data)
    packs = Slots(2, nbytes, None if own is None else own.data[2 * aligned(nbytes) :])
    resources = Resources(slots, None if own is None else own.bell, pack_slots=packs, segments=segments)
    arrays, readers, complete = [], [], []
    for values, block, axes, n_readers in given:
        schedule = cut(values.shape, block, axes, mesh, n_readers, values.dtype)
        regions = {shard: schedule.shards.region(shard) for shard in schedule.shards.shards_of(group.rank)}
        pieces = {shard: Piece(region, np.full(region.shape, 99, values.dtype)) for shard, region in regions.items()}
        source = FakeSource(values, block)
        layout = SourceLayout(select_axes(None, values.shape), schedule.blocks, None, values.dtype, values.dtype)
        reader = reader_as_planned(source, layout, LocalPieces(group.rank, pieces), resources)
        readers.append(reader)
        move = ArrayMove(len(arrays), schedule, values.dtype, seed=11)
        move.producer, move.targets, move.on_complete = reader, pieces, complete.append
        arrays.append(move)
    with group.call():
        outgoing = Outgoing(arrays, group.rank)
        failed, counters = exchange(group, arrays, resources, outgoing, tags=group.next_tags(), checksums=checksums)
        group.agree(failed)
    for reader in readers:
        reader.__exit__(None)
    resources.__exit__(None)
    for (values, *_), array in zip(given, arrays, strict=True):
        for piece in array.targets.values():
            np.testing.assert_array_equal(piece.data, values[piece.region.slices()])
    assert len(complete) == sum(len(array.targets) for array in arrays)
    assert n == 1 or counters.nbytes_received > 0
