"""What fails while a file is written and read back fails on all ranks, and leaves nothing."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardload
from shardload import PeerError, SourceError, VerifyError
from shardload.engine import file_target as writing
from shardload.formats.hdf5 import sink as hdf5_sink
from shardload.formats.sink import Encoder
from tests.mpi.support import on_disk, ramp, same_error

pytestmark = pytest.mark.any_library

VALUES = {"gzip": ramp((11, 7, 5)), "g/plain": ramp((9, 4), "i8"), "g/deep/whole": ramp((13, 3), "c16"), "scalar": ramp(())}
CHUNKS = {"gzip": (4, 3, 2), "g/plain": (2, 3)}


def write(comm: Any, path: Path) -> None:
    """Write arrays that every rank has: the ranks take turns."""
    shardload.save(path, VALUES, chunks=CHUNKS, compression={"gzip": "gzip"}, timeout=60.0, progress=False, comm=comm)


class Stopped(KeyboardInterrupt):
    """As Ctrl-C."""


@pytest.mark.parametrize("kind", ["h5", "zarr"])
@pytest.mark.parametrize("step", [0, 1])  # the temporary is made, and opened
def test_ctrl_c_while_a_thread_is_at_work(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, step: int
) -> None:
    """Wrong if what the thread makes, after the wait for it was given up, were left behind."""
    source = shared_tmp_path / "in.h5"
    write(comm, source)
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
        shardload.copy(f"{source}:/gzip", str(path), shards=(8, 6, 4) if kind == "zarr" else "keep", comm=own, progress=False)
    monkeypatch.undo()
    own.Free()
    assert on_disk(comm, shared_tmp_path) == ["in.h5"]


@pytest.mark.parametrize(
    ("name", "is_met"),
    [
        pytest.param("_put_if_placed", lambda chunk: chunk.name == "/gzip", id="in a thread"),
        pytest.param("_share_out", lambda chunks, steps: len(steps) == 1, id="as threads are given chunks"),
    ],
)
def test_an_unforeseen_error_as_chunks_are_written(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_met: Any
) -> None:
    """Wrong if only the rank that has it raised it: the others would wait for that rank at the next round, or for the disk."""
    right = getattr(writing.FileTarget, name)

    def fails(self: Any, *given: Any) -> Any:
        if comm.rank == comm.size // 2 and is_met(*given):
            raise RuntimeError("the disk is on fire")
        return right(self, *given)

    monkeypatch.setattr(writing.FileTarget, name, fails)
    same_error(comm, lambda: write(comm, shared_tmp_path / "out.h5"), PeerError, "the disk is on fire")
    assert on_disk(comm, shared_tmp_path) == []


def test_a_place_that_rank_0_cannot_give(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a chunk that two ranks write were written twice."""
    answers = writing.FileTarget._answers

    def twice(self: Any, messages: Any) -> Any:
        if len(messages[0]) > 1:
            messages[0] = np.concatenate([messages[0], messages[0][1:5]])  # its first chunk once more
        return answers(self, messages)

    monkeypatch.setattr(writing.FileTarget, "_answers", twice)
    same_error(comm, lambda: write(comm, shared_tmp_path / "out.h5"), PeerError, "has a place already")
    assert on_disk(comm, shared_tmp_path) == []


@pytest.mark.parametrize("what", ["one chunk less", "another mask"])
def test_chunks_that_hdf5_has_otherwise(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Wrong if metadata got the name that lead to fewer chunks than were written, or to some with filters left out."""
    right = hdf5_sink.list_chunks

    def others(dataset: Any, take: Any, few: Any) -> None:
        changed = (lambda *of: take(*(one[1:] for one in of))) if "less" in what else lambda *of: take(*of[:3], of[3] | 1)
        right(dataset, changed, few)

    monkeypatch.setattr(hdf5_sink, "list_chunks", others)
    says = "has 26 chunks for HDF5, but 27 were written" if "less" in what else "chunk (0, 0, 0) of '/gzip' in"
    same_error(comm, lambda: write(comm, shared_tmp_path / "out.h5"), SourceError, says)
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
    error_type = SourceError if (what, kind) == ("short", "zarr") else VerifyError
    error = same_error(comm, lambda: write(comm, shared_tmp_path / f"out.{kind}"), error_type, f"rank {comm.size - 1}")
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
