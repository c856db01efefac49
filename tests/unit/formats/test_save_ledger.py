"""Is metadata that is put into the file early read back as it was, and does it never touch a chunk?"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shardload.errors import SourceError
from shardload.formats.hdf5 import ledger as ledger_module
from shardload.formats.hdf5 import ledger_file
from shardload.formats.hdf5 import sink as sink_module
from shardload.formats.hdf5.ledger import HEAD_NBYTES, Ledger
from shardload.formats.saving import make_sink
from shardload.formats.sink import ArraySpec, Compression, Sink
from shardload.formats.target import Target
from tests.jobs.launch import ROOT
from tests.tiers import quick_ones
from tests.unit.copies import run_copy
from tests.unit.saving import quick_fsync, ramp, write_all  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_fsync")

CHUNK = 0xCC  # the bytes of chunks, which other ranks write
NBYTES = 40_000


class Memory:
    """A file in memory, and how often it was used."""

    def __init__(self) -> None:
        self.data, self.n_puts, self.n_gets = bytearray(NBYTES), 0, 0

    def put(self, data: bytes, offset: int) -> None:
        self.n_puts += 1
        self.data[offset : offset + len(data)] = data

    def get(self, nbytes: int, offset: int) -> bytes:
        self.n_gets += 1
        return bytes(self.data[offset : offset + nbytes])


@pytest.mark.parametrize("seed", quick_ones(range(20), *range(5)))
def test_it_is_read_back_and_never_touches_a_chunk(seed: int) -> None:
    """Against one buffer that remembers who wrote each byte. Wrong if what is newer in memory were read from the file, if a
    page were put as a whole, if freed metadata were put over a chunk, or if the last write before a put were cut.
    """
    chance, store = random.Random(seed), Memory()
    ledger = Ledger(store, most_nbytes=3 * 1024)
    data, owner = bytearray(NBYTES), np.zeros(NBYTES, dtype=int)  # 0 nobody, 1 metadata, 2 a chunk
    for step in range(400):
        at, n = chance.randrange(NBYTES - 3000), chance.choice((1, 7, 200, 1024, 3000))
        what = chance.random()
        if what < 0.55:  # HDF5 writes metadata where it was, or where nothing is
            if np.any(owner[at : at + n] == 2):
                continue
            found = bytes([step % 251 + 1]) * n
            ledger.seek(at)
            ledger.write(found)
            data[at : at + n], owner[at : at + n] = found, 1
        elif what < 0.7 and at > 1024:  # it gives what was metadata to a chunk, or a place of its own
            if np.any(owner[at : at + n] == 2):
                continue
            assert ledger.place(lambda blank, at=at: (ledger.seek(at), ledger.write(blank)), n) == at  # type: ignore[misc]
            store.data[at : at + n] = bytes([CHUNK]) * n
            owner[at : at + n] = 2
        else:
            room = bytearray(n)
            ledger.seek(at)
            assert ledger.readinto(room) == n
            mine = owner[at : at + n] == 1
            assert np.array_equal(np.frombuffer(room, "u1")[mine], np.frombuffer(data[at : at + n], "u1")[mine])
            assert not np.any(np.frombuffer(room, "u1")[~mine])  # nothing of a chunk
        assert ledger.kept_nbytes <= 5 * 1024 and not any(store.data[:HEAD_NBYTES])
    assert store.n_puts > 20 and store.n_gets > 20
    end = ledger.nbytes
    stops = np.flatnonzero(np.diff(np.concatenate([[0], owner == 2, [0]]))).reshape(-1, 2)
    assert ledger.overlap(stops[:, 0], stops[:, 1] - stops[:, 0]) is None
    ledger.write_to(store.put, lambda n: None, lambda: None)
    found, expected = np.frombuffer(store.data, "u1"), np.frombuffer(data, "u1")
    assert np.array_equal(found[:end][owner[:end] == 1], expected[:end][owner[:end] == 1])
    assert np.all(found[owner == 2] == CHUNK)
    assert not np.any(found[owner == 0])


def test_overlaps_with_what_was_put_early() -> None:
    ledger = Ledger(Memory(), most_nbytes=1024)
    for at in (2000, 9000, 20_000):
        ledger.seek(at)
        ledger.write(bytes(100))
    assert [at for at, _ in ledger.metadata()] == []  # all was put
    places = np.array([2100, 8000, 30_000])
    assert ledger.overlap(places, np.array([6000, 1000, 10])) == (2100, 8000)
    assert ledger.overlap(places, np.array([5900, 1001, 10])) == (8000, 9000)
    assert ledger.overlap(places - 1, np.array([5900, 1001, 10])) == (2000, 2099)
    assert ledger.overlap(places, np.array([5900, 1000, 10])) is None


N_CHUNKS = 2500


def many(folder: Path, alignment: int = 1) -> tuple[Sink, Any]:
    """A sink of many chunks, of which the index takes a hundred times as much as the ledger keeps."""
    values = ramp((N_CHUNKS, 3), "<i4")
    spec = ArraySpec(values.shape, values.dtype, (1, 3), compression=Compression.of("gzip"))
    plain = ArraySpec(values.shape, values.dtype, (1, 3))
    return make_sink(str(folder / "x.h5"), {"x": spec, "y": plain}, alignment=alignment), values


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger and HDF5 keep little, and the file is renewed often."""
    monkeypatch.setattr(ledger_file, "_CACHE_NBYTES", 8192)
    monkeypatch.setattr(ledger_file, "_RENEWED_AFTER", 500)
    monkeypatch.setattr(sink_module, "MOST_NBYTES", 4096)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("alignment", quick_ones([1, 512], 512))
def test_a_file_whose_index_was_put_early(tmp_path: Path, alignment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks in an order of chance, and other ranks put theirs between: wrong if a node of the index came over a chunk."""
    sink, values = many(tmp_path, alignment)
    kept = []
    put_pages = Ledger._put_pages
    monkeypatch.setattr(Ledger, "_put_pages", lambda self, store: (put_pages(self, store), kept.append(self.kept_nbytes)))
    with sink.create() as catalog:
        early = len(kept)
        assert early > 20  # of the chunks without a filter, which get their places at once
        write_all(sink, catalog, {"/x": values, "/y": values}, round_size=200)
        with open(catalog.ticket.temporary, "rb") as file:
            assert file.read(20) == b"shardload unfinished"
        assert len(kept) > early + 20 and max(kept) <= 1024
        catalog.finish()
        catalog.commit()
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["x"][...], values)
        np.testing.assert_array_equal(file["y"][...], values)
        assert file["x"].id.get_chunk_info(17).byte_offset % alignment == 0
    assert os.listdir(tmp_path) == ["x.h5"]


def fail_in(folder: str, call: str, when: int, code: int) -> None:
    """What `test_metadata_that_cannot_be_put_early` runs in a process of its own: HDF5 that is left in disorder ends it with a
    signal.
    """
    ledger_file._CACHE_NBYTES, sink_module.MOST_NBYTES = 8192, 4096
    sink, _ = many(Path(folder))
    was, calls = getattr(os, call), []

    def fails(*arguments: Any) -> Any:
        calls.append(call)
        if len(calls) < when:
            return was(*arguments)
        if len(calls) == when and call == "pwrite":  # half of it, first
            return was(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
        raise OSError(code, os.strerror(code))

    try:
        if when < 100:
            setattr(os, call, fails)
        catalog = sink.create()
        setattr(os, call, fails)
        order = np.random.default_rng(1).permutation(N_CHUNKS)
        for at in range(0, N_CHUNKS, 100):
            catalog.allocate("/x", order[at : at + 100], [30] * 100)
    except SourceError as error:
        setattr(os, call, was)
        if when >= 100:
            catalog.abandon()
            catalog.abandon()
        print(error.errno, error.path == sink.path, os.listdir(folder), str(error), len(calls))


@pytest.mark.parametrize(
    ("call", "when", "code"),
    quick_ones(
        [("pwrite", 5, errno.ENOSPC), ("pwrite", 100, errno.EDQUOT), ("pread", 100, errno.EIO), ("pread", 9, errno.EIO)],
        ("pwrite", 5, errno.ENOSPC),
        ("pread", 100, errno.EIO),
    ),
)
def test_metadata_that_cannot_be_put_early(tmp_path: Path, call: str, when: int, code: int) -> None:
    """In `create` and in `allocate`. The error names the file and says why, nothing is left, and the process ends as it should:
    after an error in a write of HDF5's own it would crash.
    """
    script = f"from {__name__} import fail_in; fail_in({str(tmp_path)!r}, {call!r}, {when}, {code})"
    done = run_copy(["-c", script], is_end_whole=True, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{code} True [] '{tmp_path}/x.h5' cannot be written: "), done.stdout
    assert errno.errorcode[code] in done.stdout and not done.stderr


@pytest.mark.parametrize("where", ["allocate", "finish"])
def test_an_error_is_told_by_the_call_in_which_it_happened(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if HDF5 never reads what could not be put, and the next write succeeds: what the system lost before is not known."""
    monkeypatch.setattr(sink_module, "MOST_NBYTES", 4096)
    monkeypatch.setattr(ledger_file, "_CACHE_NBYTES", 8192 if where == "allocate" else 1 << 20)
    sink = make_sink(str(tmp_path / "x.h5"), {"x": ArraySpec((900,), np.dtype("u1"), (1,), compression=Compression.of("gzip"))})
    with sink.create() as catalog:
        pwrite, failed = os.pwrite, []

        def fails_once(*arguments: Any) -> int:
            if failed:
                return pwrite(*arguments)
            failed.append(1)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "pwrite", fails_once)
        if where == "finish":
            catalog.allocate("/x", range(900), [50] * 900)
            assert not failed
        with pytest.raises(SourceError, match="no space is left"):
            if where == "finish":
                catalog.finish()
            else:
                catalog.allocate("/x", range(900), [50] * 900)
    assert not os.listdir(tmp_path)


def test_what_a_store_can_not_read_is_zeros_and_an_error_to_be_looked_for() -> None:
    store = Memory()
    ledger = Ledger(store, most_nbytes=1024)
    ledger.seek(5000)
    ledger.write(b"x" * 2000)

    def fails(*_: Any) -> bytes:
        raise OSError(errno.EIO, "")

    store.get = fails  # type: ignore[method-assign]
    ledger.seek(5000)
    assert ledger.read(4) == bytes(4) and ledger.failed is not None and ledger.failed.errno == errno.EIO


def test_the_temporary_is_read_as_long_as_it_was_written(tmp_path: Path) -> None:
    target = Target(str(tmp_path / "x.h5"), "w-")
    store = ledger_file.FileStore(os.open(target.create(), os.O_RDWR))
    store.put(b"abc", 10)
    assert store.get(3, 10) == b"abc"
    with pytest.raises(OSError, match="shorter than what was written"):
        store.get(4, 10)
    os.close(store.descriptor)


@pytest.mark.thorough  # test_a_file_whose_index_was_put_early sees the same with smaller limits
def test_little_is_kept_of_many_chunks(tmp_path: Path) -> None:
    """With the usual limits. In one piece the index of a million chunks would be 122 MiB."""
    n = 100_000
    sink = make_sink(str(tmp_path / "x.h5"), {"x": ArraySpec((n,), np.dtype("u1"), (1,), compression=Compression.of("gzip"))})
    with sink.create() as catalog:
        for at in range(0, n, 4096):
            numbers = np.arange(at, min(n, at + 4096))
            catalog.allocate("/x", numbers, np.full(len(numbers), 50))
        assert catalog.kept_nbytes <= ledger_module.MOST_NBYTES + 1024
        put = np.diff(np.stack([catalog._ledger._put_early.starts, catalog._ledger._put_early.stops]), axis=0).sum()
        assert put > 2 << 20
        catalog.finish(allow_missing=True)
