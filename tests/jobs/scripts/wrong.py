"""Break shardload on purpose, one defect at a time, and print what a load then does, one line of JSON per case and rank.

``wrong.py FOLDER [CASE ...]``: these cases, or all but those of `ALONE`. After each case the defect is taken back and a good
load must work.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload
from shardload.planning.region import Region
from tests.jobs.scripts.wires import Numpy, Wire, flip_shared, flipped
from tests.mpi.support import check, mesh_of, on_root, padded, ramp
from tests.tuning import as_large

# Defects that leave a rank waiting for what nobody sends: should one hang, it takes none of the others with it.
ALONE = ("a reader drops its last block", "a receiver expects a block too few", "blocks smaller than their parts")

comm = MPI.COMM_WORLD
LARGE = (16, 128, 128)  # of several blocks, and of more than a few boxes
SPOT = (9, 100, 75)  # an element of the large array that no box of verify="file" meets
SQUARE = (12, 12)  # on a square mesh a transposed layout has shards of the right shape

module = importlib.import_module
layout, plan, execute, prepare, local_pieces, group, staging, channels = (
    module(f"shardload.{name}")
    for name in (
        "arrays.sharding",
        "planning.schedule",
        "jobs.loading.endpoints",
        "jobs.loading.call",
        "transfer.pieces",
        "comm.group",
        "transfer.buffers",
        "transfer.channels",
    )
)
as_large(batched_chunk_nbytes=0)
Defect = Callable[[ExitStack], None]
cases: dict[str, tuple[Defect, dict[str, Any], tuple[str, ...]]] = {}
ON_THE_WAY, ALL = ("index", "checksum"), ("index", "checksum", "file", "full")


def case(name: str, *, levels: tuple[str, ...] = ON_THE_WAY, **call: Any) -> Callable[[Defect], Defect]:
    """Register a defect, the load that meets it and the levels of verifying."""

    def register(defect: Defect) -> Defect:
        cases[name] = (defect, call, levels)
        return defect

    return register


def replaced(stack: ExitStack, holder: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Let a function or method be another one, which gets the right one first."""
    right = getattr(holder, name)
    stack.enter_context(patch.object(holder, name, lambda *given, **more: wrong(right, *given, **more)))


# --- a wrong table of who holds what ----------------------------------------------------------------------------------


@case("transposed layout", spec=P("a", "b"))
def _(stack: ExitStack) -> None:
    replaced(stack, layout, "plan_shards", lambda right, shape, axes, ranks: right(shape, axes[::-1], ranks))


@case("axes in a group exchanged", spec=P(("a", "b")))
def _(stack: ExitStack) -> None:
    replaced(stack, layout, "plan_shards", lambda right, shape, axes, ranks: right(shape, [cut[::-1] for cut in axes], ranks))


@case("replicas forgotten", spec=P("a"))
def _(stack: ExitStack) -> None:
    def wrong(right: Any, *given: Any) -> Any:
        made = right(*given)
        return replace(made, ranks=made.ranks[:, :1])

    replaced(stack, layout, "plan_shards", wrong)


@case("rank taken for process", spec=P("a", "b"), comm="backwards")
def _(stack: ExitStack) -> None:
    replaced(stack, prepare, "rank_of_process", lambda _, group: {k: k for k in range(group.size)})


@case("device id taken for place in the mesh", spec=P("a", "b"), mesh="turned")
def _(stack: ExitStack) -> None:
    def wrong(right: Any, shape: Any, axes: Any, ranks: Any) -> Any:
        return right(shape, axes, np.sort(ranks, axis=None).reshape(ranks.shape))

    replaced(stack, layout, "plan_shards", wrong)


def other_pieces(stack: ExitStack, change: Callable[[Any, Any], Any], after: Any = None) -> None:
    """Hand other pieces to JAX than those that arrived, or do something with them afterwards."""

    def wrong(right: Any, shape: Any, sharding: Any, dtype: Any, pieces: Any, *more: Any) -> Any:
        held = [change(*piece) for piece in pieces]
        array = right(shape, sharding, dtype, held, *more)
        for _, data in held if after else ():
            after(data)
        return array

    replaced(stack, execute, "assemble", wrong)


@case("pieces under another region", spec=P("a", "b"))
def _(stack: ExitStack) -> None:
    other_pieces(stack, lambda region, data: (Region(region.start[::-1], region.stop[::-1]), data))


@case("pieces of another type", spec=P("a", "b"))
def _(stack: ExitStack) -> None:
    other_pieces(stack, lambda region, data: (region, data.astype("int32")))


# --- wrong lists of messages ------------------------------------------------------------------------------------------


def reads_of_rank_0(stack: ExitStack, change: Callable[[Any], Any]) -> None:
    """Let rank 0 send something else than the others expect."""
    if comm.rank == 0:
        replaced(stack, plan.Schedule, "outgoing", lambda right, *given: change(list(right(*given))))


@case("two ranks get each other's part", spec=P("a", "b"), readers="root")
def _(stack: ExitStack) -> None:
    other = {1: 2, 2: 1}

    def change(reads: list[Any]) -> Any:
        for read in reads:
            parts = tuple(replace(part, rank=other.get(part.rank, part.rank)) for part in read.parts)
            yield replace(read, parts=parts)

    reads_of_rank_0(stack, change)


@case("blocks sent in another order", spec=P(None, "b"), readers="root", staging=2048)
def _(stack: ExitStack) -> None:
    reads_of_rank_0(stack, lambda reads: iter(reads[::-1]))


@case("blocks smaller than their parts", spec=P("a", "b"), readers="root")
def _(stack: ExitStack) -> None:
    def smaller(region: Any) -> Any:
        return replace(region, stop=(region.stop[0] - 1, *region.stop[1:]))

    reads_of_rank_0(stack, lambda reads: (replace(read, region=smaller(read.region)) for read in reads))


@case("the last block dropped by all", spec=P("a", "b"), readers="parallel", dataset="chunked")
def _(stack: ExitStack) -> None:
    def last(self: Any) -> Any:
        return self.blocks.region(self.blocks.n_cells - 1)

    def fewer_reads(reads: Any, self: Any, rank: int) -> Any:
        return iter([read for read in reads(self, rank) if read.region != last(self)])

    def fewer_parts(incoming: Any, self: Any, rank: int) -> Any:
        kept = {k: [p for p in parts if not last(self).contains(p.region)] for k, parts in incoming(self, rank).items()}
        return {k: parts for k, parts in kept.items() if parts}

    replaced(stack, plan.Schedule, "outgoing", fewer_reads)
    replaced(stack, plan.Schedule, "incoming", fewer_parts)


@case("a reader drops its last block", spec=P("a", "b"), readers="root", dataset="chunked", staging=8192)
def _(stack: ExitStack) -> None:
    reads_of_rank_0(stack, lambda reads: iter(reads[:-1]))


@case("a receiver expects a block too few", spec=P("a", "b"), readers="root", dataset="chunked", staging=8192)
def _(stack: ExitStack) -> None:
    if comm.rank == 3:
        fewer = lambda right, *given: {k: tuple(parts)[:-1] for k, parts in right(*given).items()}  # noqa: E731
        replaced(stack, plan.Schedule, "incoming", fewer)


# --- what goes wrong on the way ---------------------------------------------------------------------------------------


def wire(stack: ExitStack, change_data: Any = None, change_note: Any = None) -> None:
    """Let what rank 0 sends arrive otherwise."""
    here = group.group_of()
    if comm.rank == 0:
        stack.enter_context(patch.object(here, "comm", Wire(here.comm, change_data, change_note)))


@case("two parts take each other's way", spec=P("a", "b"), readers="root")
def _(stack: ExitStack) -> None:
    other = {2: 3, 3: 2}
    wire(stack, lambda data, dest: (data, other.get(dest, dest)), lambda rows, dest: other.get(dest, dest))


@case("one bit changes on the way", spec=P("a", "b"), readers="root")
def _(stack: ExitStack) -> None:
    def note(rows: Any, dest: int) -> int:
        if dest == 2:
            flip_shared(rows[0])
        return dest

    wire(stack, lambda data, dest: (flipped(data) if dest == 2 else data, dest), note)


@case("one replica of four differs", spec=P(), readers="root")
def _(stack: ExitStack) -> None:
    wire(stack, lambda data, dest: (flipped(data) if dest == 3 else data, dest))
    if comm.rank == 3:
        stack.enter_context(patch.object(channels, "np", Numpy()))  # copies out of shared memory


@case("one bit changes in a copy that stays", spec=P(), readers="root")
def _(stack: ExitStack) -> None:
    if comm.rank == 0:
        stack.enter_context(patch.object(local_pieces, "np", Numpy()))


@case("staging buffer used again too early", spec=P("a"), readers="root", dataset="large", staging="512KiB")
def _(stack: ExitStack) -> None:
    """Rank 0 has one slot and reads the next block into it while the last one is still being sent; the others are late."""
    slots: dict[int, Any] = {}

    def early(take: Any, self: Any) -> Any:
        return slots.setdefault(id(self), take(self) if id(self) not in slots else None)

    def late(expect: Any, self: Any) -> None:
        time.sleep(1)
        expect(self)

    if comm.rank == 0:
        replaced(stack, staging.Slots, "take", early)
        replaced(stack, staging.Slots, "give", lambda *_: None)
        replaced(stack, staging.Slots, "has_room", lambda *_: True)
    else:
        replaced(stack, channels.Channels, "expect", late)


# --- what is wrong before it leaves, or after it has arrived ------------------------------------------------------------


def change_reads(stack: ExitStack, change: Callable[[Any, Any], None]) -> None:
    """Let the source read other values than the file has."""

    def wrong(right: Any, self: Any, region: Any, out: Any) -> None:
        right(self, region, out)
        change(region, out)

    replaced(stack, module("shardload.formats.hdf5.source").Hdf5Source, "read_into", wrong)


@case("a read in the wrong place", spec=P("a", "b"), readers="root", levels=ALL)
def _(stack: ExitStack) -> None:
    def change(region: Any, out: Any) -> None:
        out[...] = out[::-1].copy()

    change_reads(stack, change)


@case("one element read wrongly", spec=P("a", "b"), readers="root", dataset="large", levels=ALL)
def _(stack: ExitStack) -> None:
    def change(region: Any, out: Any) -> None:
        if region.contains(Region(SPOT, tuple(i + 1 for i in SPOT))):
            at = tuple(i - a for i, a in zip(SPOT, region.start, strict=True))
            out[at] = -out[at]

    change_reads(stack, change)


@case("chunks decoded wrongly", spec=P("b", "a"), readers="parallel", dataset="packed", levels=ALL)
def _(stack: ExitStack) -> None:
    def wrong(right: Any, self: Any, encoded: Any, out: Any) -> None:
        right(self, encoded, out)
        out[...] = np.swapaxes(out, -1, -2).copy()

    replaced(stack, module("shardload.formats.stored_chunks").StoredChunks, "decode", wrong)


def negate_one(data: Any) -> Any:
    """In place: one element, which is not 0, where all pieces have one."""
    data[-1, -2] = -data[-1, -2]
    return data


@case("one bit changes on a device", spec=P("a", "b"), levels=ALL)
def _(stack: ExitStack) -> None:
    if comm.rank == 1:
        other_pieces(stack, lambda region, data: (region, negate_one(data.copy())))


@case("replicas differ after they have arrived", spec=P(None, None), levels=ALL)
def _(stack: ExitStack) -> None:
    if comm.rank == 3:
        other_pieces(stack, lambda region, data: (region, negate_one(data)))


@case("a piece is used again", spec=P("b", "a"), levels=ALL)
def _(stack: ExitStack) -> None:
    """On CPU JAX has no copy of it."""
    if comm.rank == 2:
        other_pieces(stack, lambda *piece: piece, after=negate_one)


@case("padding filled wrongly", spec=P("b", "a"), pad=-3, select=slice(0, 11), levels=ALL)
def _(stack: ExitStack) -> None:
    replaced(stack, execute, "fill_value", lambda right, *given: right(*given) + 1)


# --- ------------------------------------------------------------------------------------------------------------------


def prepare_files(folder: str) -> None:
    with h5py.File(Path(folder, "x.h5"), "w") as file:
        file["x"] = ramp(SQUARE)
        file.create_dataset("chunked", data=ramp(SQUARE), chunks=(5, 5))
        file.create_dataset("packed", data=ramp(SQUARE), chunks=(5, 5), compression="gzip")
        file["large"] = ramp(LARGE)


def dirty(wanted: list[tuple[list[tuple[int, ...]], Any]]) -> Any:
    """Memory for pieces as it may well be: not what the load before left there, which was right."""
    made = [[staging.aligned_empty(shape, dtype) for shape in shapes] for shapes, dtype in wanted]
    for piece in itertools.chain(*made):
        piece[...] = -1
    return made


def shape_of(dataset: str) -> tuple[int, ...]:
    return LARGE if dataset == "large" else SQUARE


def main(folder: str, *names: str) -> None:
    shardload.initialize()
    on_root(comm, lambda: prepare_files(folder))
    backwards = comm.Split(0, key=-comm.rank)
    path = str(Path(folder, "x.h5"))
    each = [next(d for d in jax.devices() if d.process_index == k) for k in range(comm.size)]
    meshes = {"usual": each, "turned": each[::-1]}

    def load(spec: Any, dataset: str = "x", verify: str = "checksum", **how: Any) -> bool:
        """Whether the shards of this rank are right."""
        how["comm"] = backwards if how.get("comm") else None
        mesh = mesh_of(meshes[how.pop("mesh", "usual")])
        x = shardload.load(path, mesh, spec, dataset=dataset, verify=verify, **how)
        values = ramp(shape_of(dataset))[how.get("select", ...)]
        try:
            check(x, padded(values, mesh, spec, how["pad"]) if "pad" in how else values, mesh, spec)
        except AssertionError:
            return False
        return True

    for name in names or [name for name in cases if name not in ALONE]:
        defect, call, levels = cases[name]
        for verify in levels:
            said: dict[str, Any] = {"case": name, "verify": verify, "type": None, "text": None, "right": None}
            with ExitStack() as stack:
                stack.enter_context(patch.object(module("shardload.jobs.loading.endpoints"), "empty_pieces", dirty))
                defect(stack)
                try:
                    said["right"] = load(**call, verify=verify)
                except Exception as error:
                    said |= {"type": type(error).__name__, "text": str(error)}
            print(json.dumps(said), flush=True)
        assert load(**call), "the defect is still there"


if __name__ == "__main__":
    main(*sys.argv[1:])
