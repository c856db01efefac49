"""One file of chunks that the ranks have: in rounds of their own, of all formats; what fails fails on all."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from shardload import PeerError, SourceError, VerifyError
from shardload.comm.group import group_of
from shardload.engine import file_target as writing
from shardload.engine.file_target import Chunk, FileTarget, WriteCounts
from shardload.engine.session import Round
from shardload.formats.saving import make_sink
from shardload.formats.sink import ArraySpec, Compression, Encoder, Sink
from shardload.planning.region import Region
from shardload.planning.rounds import KEPT_ROUNDS
from shardload.planning.staging import Staging
from shardload.system.first_error import FirstError
from tests.mpi.support import on_disk, ramp, same_error

pytestmark = pytest.mark.any_library

Array = np.ndarray[Any, Any]
GZIP = Compression.of("gzip")
SPECS = {
    "gzip": ArraySpec((11, 7, 5), np.dtype("f4"), (4, 3, 2), compression=GZIP),
    "g/plain": ArraySpec((9, 4), np.dtype(">i8"), (2, 3)),
    "g/deep/whole": ArraySpec((13, 3), np.dtype("c16")),
    "scalar": ArraySpec((), np.dtype("i4")),
    "empty": ArraySpec((0, 3), np.dtype("i4")),
}
SHARDED = {"sharded": ArraySpec((11, 7), np.dtype("i2"), (2, 3), shards=(4, 6), compression=GZIP)}


N_ROUNDS = 60  # of one rank, in rounds of two chunks
NO_STAGING = Staging(n_threads=1, n_slots=0, n_pack=0, slot_nbytes=0)


def regions(encoder: Encoder) -> list[Region]:
    """What is written at once: chunks; two rows of an array in one piece."""
    spec = encoder.spec
    if spec.chunks is not None:
        return [encoder.region(index) for index in itertools.product(*map(range, spec.grid))]
    if len(spec.shape) == 0:
        return [Region((), ())]
    n, *rest = spec.shape
    return [Region((a, *(0 for _ in rest)), (min(a + 2, n), *rest)) for a in range(0, n, 2)]


def rounds_of(
    comm: Any, sink: Sink, values: dict[str, Array], change: Callable[[int], None] = lambda k: None
) -> Iterator[list[Chunk]]:
    """The chunks of this rank, in rounds: each rank has another number of them, of chunks by chance. The memory of a round is
    overwritten as soon as it may be: its values must be stored by then.
    """
    todo = [(name, region) for name, one in sink.arrays.items() for region in regions(one)]
    random.Random(7).shuffle(todo)
    mine = todo[comm.rank :: comm.size]
    size = 2 + comm.rank
    given: list[list[Array]] = []
    for k, at in enumerate(range(0, len(mine), size)):
        change(k)
        if k >= KEPT_ROUNDS:
            for old in given[k - KEPT_ROUNDS]:
                old[...] = 99
        copies = [(name, region, np.array(values[name][region.slices()])) for name, region in mine[at : at + size]]
        given.append([one for *_, one in copies])
        yield [Chunk(name, region, one.reshape(region.shape)) for name, region, one in copies]


def write(comm: Any, path: Path, *, change: Callable[[int], None] = lambda k: None, **options: Any) -> WriteCounts:
    """Write the arrays of this format."""
    kind = options.pop("format", None)
    specs = SPECS | (SHARDED if path.suffix == ".zarr" and kind != "zarr2" else {})
    sink = make_sink(str(path), specs, format=kind)
    group = group_of(comm, 60.0)
    with group.call(60.0):
        group.watch.begin("a test", 60.0)
        try:
            with FileTarget(group, sink, FirstError(), **options) as target:
                target.begin()
                chunks = rounds_of(comm, sink, VALUES, change)
                for _ in range(N_ROUNDS):
                    target.make_room(())
                    target.take(Round((), NO_STAGING, False, lambda: next(chunks, [])))
                return target.end()
        finally:
            group.watch.close()


VALUES = {"/" + name: ramp(one.shape, one.dtype.newbyteorder("=")) for name, one in {**SPECS, **SHARDED}.items()}


@pytest.mark.parametrize("verify", ["checksum", "full", "index"])
@pytest.mark.parametrize("kind", ["h5", "zarr", "zarr2"])
def test_ranks_write_one_file_in_rounds_of_their_own(comm: Any, shared_tmp_path: Path, kind: str, verify: str) -> None:
    """Wrong if a chunk went to another's place, was stored after its memory changed, or was not read back."""
    path = shared_tmp_path / f"out{'.h5' if kind == 'h5' else '.zarr'}"
    done: list[int] = []
    written = write(comm, path, format=None if kind == "h5" else kind, verify=verify, on_progress=done.append)
    names = [name for name in VALUES if name != "/sharded" or kind == "zarr"]
    nbytes = sum(VALUES[name].nbytes for name in names)
    assert written.nbytes == nbytes
    assert comm.allreduce(sum(done)) == nbytes
    assert written.n_read_back == (0 if verify == "index" else written.n_chunks)
    assert written.n_decoded == {"index": 0, "full": written.n_chunks}.get(verify, written.n_decoded)
    assert verify != "checksum" or comm.size <= written.n_decoded < written.n_chunks
    assert on_disk(comm, shared_tmp_path) == [path.name]
    if comm.rank == 0:
        found: Any = h5py.File(path) if kind == "h5" else zarr.open_group(str(path), mode="r")
        for name in names:
            stored = np.asarray(found[name.lstrip("/")][...])
            np.testing.assert_array_equal(stored, VALUES[name], err_msg=name)
            assert stored.dtype.newbyteorder("=") == VALUES[name].dtype, name
        if kind == "h5":
            assert found["gzip"].compression == "gzip"
            found.close()


@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_a_rank_whose_values_cannot_be_made(comm: Any, shared_tmp_path: Path, kind: str) -> None:
    """Wrong if the others waited for it, or if something stayed."""

    def change(k: int) -> None:
        if comm.rank == comm.size - 1 and k == 1:
            raise SourceError("no more values", path="in.h5")

    same_error(comm, lambda: write(comm, shared_tmp_path / f"out.{kind}", change=change), SourceError, "no more values")
    assert on_disk(comm, shared_tmp_path) == []


class Stopped(KeyboardInterrupt):
    """As Ctrl-C."""


@pytest.mark.parametrize("kind", ["h5", "zarr"])
@pytest.mark.parametrize("step", [0, 1])  # the temporary is made, and opened
def test_ctrl_c_while_a_thread_is_at_work(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, step: int
) -> None:
    """Wrong if what the thread makes, after the wait for it was given up, were left behind."""
    own = comm.Split(comm.rank)  # each rank alone
    path, is_given_up = shared_tmp_path / f"out-{comm.rank}.{kind}", threading.Event()
    submits, waits = itertools.count(), itertools.count()
    right_submit, right_wait, right_close = writing.Pool.submit, writing.FileTarget._wait, writing.Pool.close

    def submit(self: Any, call: Any, *arguments: Any) -> Any:
        def late() -> Any:
            assert is_given_up.wait(60.0)
            return call(*arguments)

        return right_submit(self, late) if next(submits) == step else right_submit(self, call, *arguments)

    def wait(self: Any, futures: Any) -> None:
        if next(waits) == step:
            raise Stopped
        right_wait(self, futures)

    def close(self: Any, *arguments: Any, **options: Any) -> Any:
        is_given_up.set()
        return right_close(self, *arguments, **options)

    monkeypatch.setattr(writing.Pool, "submit", submit)
    monkeypatch.setattr(writing.Pool, "close", close)
    monkeypatch.setattr(writing.FileTarget, "_wait", wait)
    with pytest.raises(Stopped):
        write(own, path)
    own.Free()
    assert on_disk(comm, shared_tmp_path) == []


def test_an_unforeseen_error_in_a_thread(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if only the rank that has it raised it."""
    whole = writing.FileTarget._put_one

    def put_one(self: Any, one: Any) -> None:
        if comm.rank == comm.size // 2 and one.name == "/gzip":
            raise RuntimeError("the disk is on fire")
        whole(self, one)

    monkeypatch.setattr(writing.FileTarget, "_put_one", put_one)
    same_error(comm, lambda: write(comm, shared_tmp_path / "out.h5"), PeerError, "the disk is on fire")
    assert on_disk(comm, shared_tmp_path) == []


def test_a_place_that_rank_0_cannot_give(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a chunk that two ranks write were written twice."""
    gather = type(group_of(comm)).gather_rows

    def gather_rows(self: Any, mine: Any, root: int = 0) -> Any:
        told = gather(self, mine, root)
        if told is not None and len(told[0]) > 1:
            told[0] = np.concatenate([told[0], told[0][1:5]])  # its first chunk once more
        return told

    monkeypatch.setattr(type(group_of(comm)), "gather_rows", gather_rows)
    same_error(comm, lambda: write(comm, shared_tmp_path / "out.h5"), PeerError, "has a place already")
    assert on_disk(comm, shared_tmp_path) == []


@pytest.mark.parametrize("kind", ["h5", "zarr"])
@pytest.mark.parametrize("what", ["flipped", "short", "elsewhere"])
def test_bytes_that_are_not_on_disk(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    """Wrong if a write that went well, but stored something else, were found by its reader only."""
    put_at = os.pwrite
    n_put = 0

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        nonlocal n_put
        n_put += 1
        whole = bytes(data)
        if comm.rank == comm.size - 1 and n_put == 5:
            spoiled = {
                "flipped": (whole[:-1] + bytes([whole[-1] ^ 1]), offset),
                "short": (b"", offset),
                "elsewhere": (whole, offset + 1),
            }
            put_at(descriptor, *spoiled[what])
            return len(whole)
        return put_at(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    error = same_error(comm, lambda: write(comm, shared_tmp_path / f"out.{kind}"), VerifyError, f"by rank {comm.size - 1}")
    monkeypatch.undo()
    assert comm.size == 1 or error.rank != comm.size - 1  # type: ignore[attr-defined]
    assert on_disk(comm, shared_tmp_path) == []


@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_values_that_are_encoded_wrongly(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Wrong if the stored bytes were right, and stood for other values: only a decoder finds that."""
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, region, values: encode(self, region, np.flip(values)))
    same_error(comm, lambda: write(comm, shared_tmp_path / f"out.{kind}"), VerifyError, "is decoded by the format's library")
    assert on_disk(comm, shared_tmp_path) == []
