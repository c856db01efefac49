"""Is metadata that the library writes read back as it was, does it never touch a chunk, and does the head come last?"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shardload.errors import SourceError
from shardload.formats.hdf5 import ledger as ledger_module
from shardload.formats.hdf5.ledger import HEAD_NBYTES, Ledger
from shardload.formats.saving import make_sink
from shardload.formats.sink import ArraySpec, Compression, Sink
from shardload.storage.target import WritableFile
from tests.jobs.launch import ROOT
from tests.tiers import quick_ones
from tests.unit.copies import run_copy
from tests.unit.files import flat
from tests.unit.saving import quick_fsync, write_all  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_fsync")

CHUNK = 0xCC  # the bytes of chunks, which other ranks write
NBYTES = 40_000


class Library:
    """In place of a dataset of HDF5: writes what it is given to a ledger, at an offset, some times."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.n_times, self.is_copied = ledger, 1, False

    def write_direct_chunk(self, start: tuple[int], blank: Any, mask: int) -> None:
        for _ in range(self.n_times):
            self.ledger.seek(start[0])
            self.ledger.write(bytes(blank) if self.is_copied else blank)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[WritableFile]:
    """An empty file."""
    (tmp_path / "real").touch()
    with contextlib.closing(WritableFile(str(tmp_path / "real"))) as opened:
        yield opened


@pytest.mark.parametrize("old_nbytes", [0, 5000, 20_000])
@pytest.mark.parametrize("seed", quick_ones(range(10), *range(3)))
def test_it_is_read_back_and_never_touches_a_chunk(file: WritableFile, seed: int, old_nbytes: int) -> None:
    """Against one buffer that remembers who wrote each byte. Wrong if a page were put as a whole, if what is kept were read
    from the file, or an old byte or the head changed in it.
    """
    chance, real = random.Random(seed), file.descriptor
    old = chance.randbytes(old_nbytes)
    os.pwrite(real, old, 0)
    ledger = Ledger(file, old_nbytes)
    library: Any = Library(ledger)
    data, owner = bytearray(NBYTES), np.zeros(NBYTES, dtype=int)  # 0 nobody, 1 metadata, 2 a chunk
    data[:old_nbytes], owner[:old_nbytes] = old, 1
    for step in range(400):
        at, n = chance.randrange(NBYTES - 3000), chance.choice((1, 7, 200, 1024, 3000))
        what = chance.random()
        if step == 100 and old_nbytes:  # until now nothing was put
            assert os.fstat(real).st_size == old_nbytes
            ledger.put_from(old_nbytes)
        if what < 0.55:  # HDF5 writes metadata where it was, or where nothing is
            if np.any(owner[at : at + n] == 2):
                continue
            ledger.seek(at)
            ledger.write(bytes([step % 251 + 1]) * n)
            data[at : at + n], owner[at : at + n] = bytes([step % 251 + 1]) * n, 1
        elif what < 0.7:  # it gives what was metadata to a chunk, or a place of its own
            if np.any(owner[at : at + n] == 2) or at < max(1024, old_nbytes) or step < 100:
                continue
            assert ledger.place(library, (at,), n, 0) == at
            os.pwrite(real, bytes([CHUNK]) * n, at)
            owner[at : at + n] = 2
        else:
            ledger.seek(at)
            found, mine = np.frombuffer(ledger.read(n), "u1"), owner[at : at + n] == 1
            assert np.array_equal(found[mine], np.frombuffer(data[at : at + n], "u1")[mine])
    kept = max(old_nbytes, HEAD_NBYTES)
    assert os.pread(real, kept, 0).ljust(kept, b"\0")[:old_nbytes] == old and ledger.is_as_before()
    assert old or not any(os.pread(real, kept, 0))
    changes = ledger.changes()
    assert changes[0][0] == 0 and len(changes[0][1]) == HEAD_NBYTES
    assert all(offset >= HEAD_NBYTES and offset + len(part) <= kept for offset, part in changes[1:])
    for offset, part in changes:
        os.pwrite(real, part, offset)
    found = np.frombuffer(os.pread(real, ledger.nbytes, 0).ljust(ledger.nbytes, b"\0"), "u1")
    is_mine = owner[: len(found)] == 1
    assert np.array_equal(found[is_mine], np.frombuffer(data[: len(found)], "u1")[is_mine])
    assert np.all(found[owner[: len(found)] == 2] == CHUNK)


def test_a_library_that_copies_a_chunk_first_is_noticed(file: WritableFile) -> None:
    ledger = Ledger(file)
    library: Any = Library(ledger)
    library.n_times = 2
    with pytest.raises(RuntimeError, match="a chunk of 30 bytes 2 times"):
        ledger.place(library, (600,), 30, 0)
    library.is_copied = True
    with pytest.raises(RuntimeError, match="a chunk of 30 bytes 0 times"):
        ledger.place(library, (600,), 30, 0)


N_CHUNKS = 2500


def many(folder: Path, alignment: int = 1, n_more: int = 0) -> tuple[Sink, Any]:
    """A sink of many chunks, of which HDF5 holds few back; and of more arrays."""
    values = flat((N_CHUNKS, 3), "<i4")
    spec = ArraySpec(values.shape, values.dtype, (1, 3), compression=Compression.of("gzip"))
    plain = ArraySpec(values.shape, values.dtype, (1, 3))
    more = {f"z{k}": ArraySpec((1,), values.dtype) for k in range(n_more)}
    return make_sink(str(folder / "x.h5"), {"x": spec, "y": plain} | more, alignment=alignment), values


@pytest.mark.parametrize("alignment", quick_ones([1, 512], 512))
def test_a_file_whose_index_is_put_and_read_back(tmp_path: Path, alignment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks in an order of chance, and others put theirs between: wrong if a node of the index came over a chunk."""
    monkeypatch.setattr(ledger_module, "_CACHE_NBYTES", 8192)
    monkeypatch.setattr("shardload.formats.hdf5.sink._RENEWED_AFTER", 500)
    sink, values = many(tmp_path, alignment)
    with sink.create() as catalog:
        write_all(sink, catalog, {"/x": values, "/y": values}, round_size=200)
        with open(catalog.ticket.temporary, "rb") as file:
            assert file.read(20) == b"shardload unfinished"
        assert len(catalog.ledger._pages) == 1  # type: ignore[attr-defined]
        catalog.finish()
        catalog.commit()
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["x"][...], values)
        np.testing.assert_array_equal(file["y"][...], values)
        assert file["x"].id.get_chunk_info(17).byte_offset % alignment == 0
    assert os.listdir(tmp_path) == ["x.h5"]


def fail_in(folder: str, call: str, when: int, code: int) -> None:
    """What `test_metadata_that_cannot_be_put` runs in a process of its own: HDF5 in disorder ends it with a signal."""
    ledger_module._CACHE_NBYTES = 8192
    sink, _ = many(Path(folder), n_more=200)
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
        [("pwrite", 5, errno.ENOSPC), ("pwrite", 100, errno.EDQUOT), ("preadv", 100, errno.EIO), ("preadv", 9, errno.EIO)],
        ("pwrite", 5, errno.ENOSPC),
        ("preadv", 100, errno.EIO),
    ),
)
def test_metadata_that_cannot_be_put(tmp_path: Path, call: str, when: int, code: int) -> None:
    """In `create` and in `allocate`. The error names the file and says why, nothing is left, and the process ends as it should:
    after an error in a write of HDF5's own it would crash.
    """
    script = f"from {__name__} import fail_in; fail_in({str(tmp_path)!r}, {call!r}, {when}, {code})"
    done = run_copy(["-c", script], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{code} True [] '{tmp_path}/x.h5' cannot be written: "), done.stdout
    assert errno.errorcode[code] in done.stdout and not done.stderr


@pytest.mark.parametrize("where", ["allocate", "finish"])
def test_an_error_is_told_by_the_call_in_which_it_happened(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if HDF5 never reads what could not be put, and the next write succeeds: what the system lost before is not known."""
    monkeypatch.setattr(ledger_module, "_CACHE_NBYTES", 8192 if where == "allocate" else 1 << 20)
    sink = make_sink(str(tmp_path / "x.h5"), {"x": ArraySpec((900,), np.dtype("u1"), (1,), compression=Compression.of("gzip"))})
    with sink.create() as catalog:
        pwrite, failed = os.pwrite, []

        def fails_once(*arguments: Any) -> int:
            if failed:
                return pwrite(*arguments)
            failed.append(1)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if where == "finish":
            catalog.allocate("/x", range(900), [50] * 900)
        monkeypatch.setattr(os, "pwrite", fails_once)
        with pytest.raises(SourceError, match="no space is left"):
            if where == "finish":
                catalog.finish()
            else:
                catalog.allocate("/x", range(900), [50] * 900)
    assert not os.listdir(tmp_path)
