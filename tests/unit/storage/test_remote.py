from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardload.storage.objects import Ranges
from shardload.storage.remote import RemoteError, counts, expect, open_remote
from shardload.storage.remote.client import ahead
from tests.servers import ObjectServer

pytest.importorskip("obstore")

VALUES = np.arange(5_000_000, dtype="<u4")
DATA = VALUES.tobytes()


@pytest.fixture
def server():
    with ObjectServer({"bucket/run.h5": DATA, "bucket/s/c/0": b"0123", "bucket/s/c/1": DATA}) as server:
        yield server


def read(stored, offset, nbytes):
    out = np.empty(nbytes, dtype=np.uint8)
    stored.read_into(out, offset)
    return out.tobytes()


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_ranges_are_those_of_the_object(server, scheme):
    url = "s3://bucket" if scheme == "s3" else f"{server.url}/bucket"
    stored = open_remote(f"{url}/run.h5", server.storage if scheme == "s3" else {}).object()
    assert stored.read_at_most(0, 100) == DATA[:100]
    assert len(server.log) == 1  # which told its size, too
    assert stored.nbytes == len(DATA) and stored.read_at_most(len(DATA) - 3, 100) == DATA[-3:]
    offsets = np.arange(0, 100) * 200_000
    ranges = Ranges(offsets, np.full(100, 1000))
    memory = np.empty(ranges.nbytes, dtype=np.uint8)
    assert [bytes(piece) for piece in stored.read_ranges(ranges, memory)] == [DATA[k : k + 1000] for k in offsets]
    server.clear()
    assert read(stored, 0, len(DATA)) == DATA
    assert sorted((r.first, r.nbytes) for r in server.gets()) == [
        (0, 8 << 20),
        (8 << 20, 8 << 20),
        (16 << 20, len(DATA) - (16 << 20)),
    ]
    other = open_remote(f"{url}/run.h5", server.storage if scheme == "s3" else {}).object(stored.pin)
    server.clear()
    assert (other.nbytes, other.version) == (stored.nbytes, stored.version) and not server.log
    stored.close()
    with pytest.raises(OSError, match="closed"):
        stored.read_at_most(0, 1)


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_folder(server, scheme):
    url = "s3://bucket/s" if scheme == "s3" else f"{server.url}/bucket/s"
    folder = open_remote(url, server.storage if scheme == "s3" else {}).folder()
    contents = folder.read_many(["c/1", "c/2", "c/0"], 1 << 25)
    assert [None if content is None else bytes(content) for content in contents] == [DATA, None, b"0123"]
    with pytest.raises(ValueError, match=r"'c/1' has 20000000 bytes, what is stored there 1000 at most"):
        folder.read_many(["c/0", "c/1"], 1000)
    assert folder.version("c/2") is None and folder.open("c/2") is None
    stored = folder.open("c/0")
    assert stored.version == folder.version("c/0") and stored.read_at_most(1, 100) == b"123"


def expected(stored, chunks):
    """Tell an object what will be read of it: (offset, bytes) of each chunk."""
    expect((stored, np.array([offset]), np.array([nbytes])) for offset, nbytes in chunks)


def chunks_of(nbytes, size):
    return [(offset, min(size, nbytes - offset)) for offset in range(0, nbytes, size)]


@pytest.mark.parametrize(
    ("order", "size"),
    [
        ("in order", 64 << 10),
        ("in turns", 64 << 10),
        ("at random", 640 << 10),
        ("in turns", (5 << 20) + 1),
        ("in order", 20 << 20),
    ],
)
def test_what_is_expected_is_fetched_once_in_large_pieces(order, size):
    nbytes = 70_000_000
    data = np.arange(nbytes // 4, dtype="<u4").tobytes()
    chunks = chunks_of(nbytes, size)
    if order == "in turns":  # as four threads read
        chunks = [chunk for first in range(0, len(chunks), 8) for k in range(4) for chunk in chunks[first : first + 8][k::4]]
    elif order == "at random":
        chunks = [chunks[k] for k in np.random.default_rng(1).permutation(len(chunks))]
    with ObjectServer({"run.h5": data}) as server:
        stored = open_remote(f"{server.url}/run.h5").object()
        assert stored.nbytes == nbytes
        server.clear()
        before = counts().nbytes
        expected(stored, chunks)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda chunk: read(stored, *chunk) == data[chunk[0] : sum(chunk)], chunks))
        assert all(found)
        gets = server.gets()
        fetched = sum(r.nbytes for r in gets)
        assert fetched == counts().nbytes - before
        assert fetched == nbytes or (order == "at random" and nbytes < fetched < 1.1 * nbytes)  # with gaps
        assert len(gets) <= -(-nbytes // (8 << 20)) + (0 if order == "in order" else len(chunks))
        assert max(r.nbytes for r in gets) <= 8 << 20
        if order != "at random":
            assert len(gets) <= -(-nbytes // (8 << 20)) + 4
        server.clear()
        assert read(stored, *chunks[0]) == data[chunks[0][0] : sum(chunks[0])] and len(server.gets()) >= 1  # nothing was kept
        stored.close()


def test_small_gaps_are_fetched_too_while_they_are_few(server):
    stored = open_remote(f"{server.url}/bucket/run.h5").object()
    chunks = [(0, 400_000), (401_000, 400_000), (900_000, 1_000_000), (15_000_000, 1_000_000)]
    assert stored.nbytes == len(DATA)
    server.clear()
    expected(stored, chunks)
    assert [read(stored, *chunk) == DATA[chunk[0] : sum(chunk)] for chunk in chunks] == [True] * 4
    assert sorted((r.first, r.nbytes) for r in server.gets()) == [(0, 1_900_000), (15_000_000, 1_000_000)]


def test_what_was_not_expected_is_read_too(server):
    stored = open_remote(f"{server.url}/bucket/run.h5").object()
    expected(stored, [(1000, 100), (5_000_000, 1000)])
    assert read(stored, 500, 1000) == DATA[500:1500]
    assert read(stored, 4_999_000, 3000) == DATA[4_999_000:5_002_000]
    assert read(stored, 1000, 100) == DATA[1000:1100]


def test_memory_of_what_is_fetched_ahead_is_bounded():
    data = bytes(80 << 20)
    with ObjectServer({"a": data, "b": data}) as server:
        objects = [open_remote(f"{server.url}/{key}").object() for key in "ab"]
        for stored in objects:
            expected(stored, chunks_of(len(data), 1 << 20))
        n = read(objects[1], 0, 1 << 20)  # whose turn is later
        assert n == data[: 1 << 20]
        fetched = sum(r.nbytes for r in server.gets())
        assert fetched <= 112 << 20
        for stored in objects:
            stored.close()
        assert ahead()._nbytes == 0


def test_an_error_of_what_was_fetched_ahead_is_that_of_its_reader(server):
    stored = open_remote(f"{server.url}/bucket/run.h5").object()
    assert stored.nbytes == len(DATA)
    server.faults.status, server.faults.code = 403, "AccessDenied"
    expected(stored, chunks_of(len(DATA), 1 << 20))
    for offset in (0, 3 << 20):
        with pytest.raises(RemoteError, match=r"run.h5' cannot be read: access is denied"):
            read(stored, offset, 1 << 20)
