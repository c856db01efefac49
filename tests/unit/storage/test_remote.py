from __future__ import annotations

import numpy as np
import pytest

from shardload.storage.objects import Ranges
from shardload.storage.remote import open_remote
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
