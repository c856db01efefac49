"""Objects in stores: what is asked of a server, what is read of it, and what is said if that fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from threading import Barrier, Event
from urllib.parse import quote

import numpy as np
import pytest

from shardload.cli.arguments import parse_storage
from shardload.errors import ConfigError, ShardloadWarning
from shardload.options import Options
from shardload.storage.new_folder import NewRemoteFolder
from shardload.storage.objects import Ranges
from shardload.storage.remote import (
    RemoteChangedError,
    RemoteError,
    StorageOptions,
    client,
    counts,
    expect,
    open_remote,
    with_store,
)
from shardload.storage.remote.client import ahead
from shardload.storage.remote.throttle import Throttle
from tests.servers import Faults, ObjectServer

obstore, stores = pytest.importorskip("obstore"), pytest.importorskip("obstore.store")

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
    folder = open_remote(url, server.storage if scheme == "s3" else {})
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


def test_what_is_read_in_another_order_and_again_leaves_nothing():
    """As a shuffled stream reads it. Wrong if bytes that lie in two pieces, because gaps are closed, or because they are read
    twice, were read of the one and counted in the other: pieces would stay, until nothing is fetched ahead any more.
    """
    data, generator = VALUES.tobytes() * 2, np.random.default_rng(1)
    chunks = chunks_of(len(data), 16 << 10)
    order = [*generator.permutation(len(chunks)), *generator.permutation(len(chunks))]
    again = [k for number in order for k in ([number, number - 1] if number % 5 == 0 else [number])]
    with ObjectServer({"run.h5": data}) as server:
        stored = open_remote(f"{server.url}/run.h5").object()
        assert stored.nbytes == len(data)
        server.clear()
        before = ahead()._nbytes
        expected(stored, [chunks[k] for k in again])
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda k: read(stored, *chunks[k]) == data[chunks[k][0] : sum(chunks[k])], again))
        assert all(found)
        assert ahead()._nbytes == before and not stored._pieces
        assert sum(r.nbytes for r in server.gets()) < 1.1 * sum(chunks[k][1] for k in again)
        stored.close()


def test_an_object_that_is_read_twice_is_fetched_once_while_it_is_here():
    """Wrong if the second request took the place of the first, so that its bytes were counted for ever."""
    objects = {f"s/{k}": bytes([k]) * 1000 for k in range(20)}
    keys = [f"{k}" for k in (*range(20), *range(10), 3, 3)]
    with ObjectServer(dict(objects)) as server:
        folder, before = open_remote(f"{server.url}/s"), ahead()._nbytes
        folder.expect(iter(keys), 1000, 1 << 20)
        for key in keys:
            (content,) = folder.read_many([key], 1000)
            assert bytes(content) == objects[f"s/{key}"]
        assert ahead()._nbytes == before and not folder._ahead


def test_the_rest_of_a_large_object_does_not_wait_for_a_reader(server):
    """Wrong if who reads it had to ask for what is behind the first piece: that is a round trip for each such chunk."""
    number, has_begun = count(1), Event()

    def note(key):
        if next(number) == 3:
            has_begun.set()
        return False

    server.faults.only = note
    folder = open_remote(f"{server.url}/bucket/s")
    folder.expect(iter(["c/1"]), 1 << 25, len(DATA))
    assert has_begun.wait(60)
    assert bytes(folder.read_many(["c/1"], 1 << 25)[0]) == DATA and len(server.gets()) == 3


def test_objects_that_are_smaller_than_they_may_be_leave_room_for_others():
    """As chunks that are compressed well. Wrong if each counted with the bytes of its values until it is read: a rank that
    decodes fast waited for each. Or if they were counted down twice.
    """
    keys, number, have_begun = [f"{k}" for k in range(10)], count(1), Event()

    def note(key):
        if next(number) == len(keys):
            have_begun.set()
        return False

    with ObjectServer({f"s/{key}": key.encode() for key in keys}) as server:
        server.faults.only = note
        folder, before = open_remote(f"{server.url}/s"), ahead()._nbytes
        folder.expect(iter(keys), 1 << 25, 24 << 20)
        assert have_begun.wait(60)
        for key in keys:
            assert bytes(folder.read_many([key], 1 << 25)[0]) == key.encode()
        assert ahead()._nbytes == before and len(server.gets()) == len(keys)


def test_a_large_object_that_is_removed_while_it_is_fetched(server):
    """Wrong if it counted as one that was never there: its chunk would be fill values."""
    number = count(1)

    def remove(key):
        if next(number) == 2:
            server.put("bucket/s/c/1", None)
        return False

    server.faults.only = remove
    with pytest.raises(RemoteError, match=r"'.*/s/c/1' is not there"):
        open_remote(f"{server.url}/bucket/s").read_many(["c/1"], 1 << 25)


def test_what_is_read_is_fetched_ahead_beside_what_waits():
    """As a stream for validation, beside that of the training. Wrong if the one that waits took all room, so that each object
    of the other were asked for when it is read.
    """
    keys = [f"{k}" for k in range(100)]
    with ObjectServer({f"s/{key}": key.encode() for key in keys}) as server:
        waiting, reading, before = open_remote(f"{server.url}/s"), open_remote(f"{server.url}/s"), ahead()._nbytes
        for folder in (waiting, reading):
            folder.expect(iter(keys), 1000, 1 << 20)
            ahead()._pull_all()  # what another thread does, too
        for folder in (reading, waiting):
            for key in keys:
                assert [bytes(content) for content in folder.read_many([key], 1000)] == [key.encode()]
                assert ahead()._nbytes - before <= 96 << 20
            assert not folder._read_early
        assert ahead()._nbytes == before and len(server.gets()) == 200


def test_memory_of_what_is_fetched_ahead_is_bounded():
    data = bytes(80 << 20)
    with ObjectServer({"a": data, "b": data}) as server:
        objects = [open_remote(f"{server.url}/{key}").object() for key in "ab"]
        for stored in objects:
            expected(stored, chunks_of(len(data), 1 << 20))
        n = read(objects[1], 0, 1 << 20)  # whose turn is later
        assert n == data[: 1 << 20]
        ahead()._run(lambda: None).result()  # all that it had to do before has begun
        assert ahead()._nbytes <= 96 << 20  # and 48 where reads come as expected
        for stored in objects:
            stored.close()
        assert ahead()._nbytes == 0


@pytest.mark.parametrize("what", ["a large object", "the end of an object, on Azure", "a byte, while many reads make room"])
def test_who_fetches_ahead_may_read_what_says_where_chunks_are(server, monkeypatch, what):
    """The index of a shard, or a table of references. Wrong if that read waited for whoever fetches ahead, which is itself; or
    if all fetch threads waited for their turn to fetch ahead, so that none was left for a request.
    """
    monkeypatch.setattr(client, "_process", client._Process())  # one that hangs is left behind
    monkeypatch.setattr(client.Client, "has_suffixes", not what.endswith("Azure"))
    folder = open_remote("s3://bucket", server.storage)
    begun, goes_on, ended, contents = Event(), Event(), Event(), list[bytes]()

    def places():
        begun.set()
        goes_on.wait(60)
        if what == "a large object":
            contents.append(bytes(folder.read_many(["s/c/1"], 1 << 26)[0]))
        else:
            contents.append(read(folder.open("s/c/1", -1000), len(DATA) - 1000, 1000))
        ended.set()
        yield from ()

    expect(places())
    begun.wait(60)
    for _ in range(200):
        ahead().add(1)
        ahead().add(-1)
    goes_on.set()
    assert ended.wait(20) and contents in ([DATA], [DATA[-1000:]])


def test_a_folder_that_could_not_be_begun_removes_nothing(server):
    """Wrong if objects of another job were removed after a mark could not be put: there is no `If-None-Match` here."""
    folder = NewRemoteFolder("s3://bucket/s", "w-", server.storage)
    server.faults.status, server.faults.code = 501, "NotImplemented"
    with pytest.raises(RemoteError, match=r"shardload-unfinished' cannot be put: the server answers 501 NotImplemented"):
        folder.create()
    server.faults.status = 0
    folder.discard()
    assert server.names() == ["bucket/run.h5", "bucket/s/c/0", "bucket/s/c/1"]


def test_an_object_that_is_closed_while_it_is_fetched_ahead(server):
    """Wrong if its pieces took the room of others for ever: nobody reads them."""
    stored = open_remote(f"{server.url}/bucket/run.h5").object()
    assert stored.nbytes == len(DATA)
    fetch, requested = stored._fetch, []

    def fetch_and_close(*arguments):
        pieces = fetch(*arguments)
        requested.extend(pieces)
        stored.close()
        return pieces

    stored._fetch = fetch_and_close
    stored.fetch_ahead([(np.array([0]), np.array([1000]))], False)
    assert ahead()._nbytes == 0 and stored._pieces == []
    for piece in requested:  # else it is asked for again when the server has ended, and counted by the next test
        piece.answer.result()


def opened(server, **options):
    return open_remote("s3://bucket/run.h5", {**server.storage, **options}).object()


def test_a_busy_store_is_asked_again_and_that_is_counted(server, monkeypatch):
    monkeypatch.setattr(client, "_process", None)  # requests of earlier tests that have not ended count as before
    busy = list[float]()
    monkeypatch.setattr(Throttle, "busy", lambda _, since: busy.append(since))
    stored, before = opened(server), counts()
    server.faults.busy = 0.2
    out = np.empty(100 * 1000, dtype=np.uint8)
    stored.read_ranges(Ranges.of_rows(7, 150_000, 100, 1000), out)
    assert out.tobytes() == b"".join(DATA[7 + k * 150_000 :][:1000] for k in range(100))
    n_busy = sum(request.status == 503 for request in server.log)
    found = counts().since(before)
    of_others = found.requests - len(server.log)  # what an earlier test closed may be asked for at a server that has ended
    assert 0 < n_busy == len(busy) <= found.retries <= n_busy + of_others and of_others <= 4


@pytest.mark.parametrize("has_etag", [True, False])
@pytest.mark.parametrize("has_short_headers", [True, False])
@pytest.mark.filterwarnings("ignore:.*no ETag")
def test_short_bodies_are_fetched_again(server, has_etag, has_short_headers):
    server.faults = Faults(short=3, short_headers=has_short_headers, has_etag=has_etag)
    stored, before = opened(server), counts()
    assert read(stored, 5, 17_000_000) == DATA[5:17_000_005]
    assert server.faults.short == 0 and counts().since(before).retries >= 3


def test_a_stalled_body_is_fetched_again_and_a_slow_one_is_not_an_error(server):
    stored = opened(server, read_timeout="2 s")
    server.faults.stalled = 1
    assert read(stored, 5, 1000) == DATA[5:1005] and server.faults.stalled == 0
    server.faults.slow = 0.25  # all of the body takes longer than that
    assert read(stored, 5, 1000) == DATA[5:1005]


def test_few_requests_while_a_store_is_busy():
    throttle = Throttle(16)
    for _ in range(5):
        throttle.busy(since=time.monotonic())
        began = time.monotonic()
    assert throttle._limit == 1.0
    throttle.busy(since=0.0)
    for _ in range(40):
        throttle.good()
    assert 8 < throttle._limit < 10
    for _ in range(3):
        throttle.busy(since=began - 10)  # asked before the limit fell
    assert throttle._limit > 8


@pytest.mark.parametrize("change", [lambda data: data[::-1], lambda data: data + b"0", lambda data: data[:-8]])
@pytest.mark.parametrize("has_etag", [True, False])
def test_an_object_that_is_replaced_is_an_error(server, has_etag, change):
    server.faults.has_etag = has_etag
    stored = opened(server)
    with nullcontext() if has_etag else pytest.warns(ShardloadWarning, match="has no ETag: its size and date are compared"):
        pin = stored.pin
    server.objects["bucket/run.h5"], server.dates["bucket/run.h5"] = change(DATA), 1.1e9
    server.clear()
    other = open_remote("s3://bucket/run.h5", server.storage).object(tuple(pin))  # on another rank
    for reader in (stored, other):
        with pytest.raises(RemoteChangedError, match=r"'s3://bucket/run.h5' is another object than"):
            read(reader, 0, 10)
    assert not has_etag or {header.get("if-match") for header in server.headers} == {pin.mark}


def test_threads_that_ask_first_at_once_see_one_version(server, monkeypatch):
    """Each answer is another version here. Wrong if two threads asked without saying which: each would take its own."""
    versions, start = count(), Barrier(8)
    monkeypatch.setattr(server, "content", lambda key: DATA[:1000] + bytes([next(versions)]))
    stored = opened(server)

    def ask(_):
        start.wait()
        try:
            return stored.read_at_most(0, 10)
        except RemoteChangedError:
            return None

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers.count(None) == 7
    assert [header for header in server.headers if "if-match" not in header] == server.headers[:1]


def test_threads_that_want_the_size_at_once_ask_once(server):
    """Wrong if each that has waited for the answer to another one asked again."""
    stored, start = opened(server), Barrier(8)

    def ask(_):
        start.wait()
        return stored.nbytes

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {len(DATA)}
    assert len(server.log) == 1


CAUSES = {
    "access is denied.*skip_signature.*request_payer": {"status": 403, "code": "AccessDenied"},
    "the session token has expired": {"status": 400, "code": "ExpiredToken"},
    "does not know the access key": {"status": 403, "code": "InvalidAccessKeyId"},
    "the clock of this machine": {"status": 403, "code": "RequestTimeTooSkewed"},
    "another region: pass storage={'region': 'eu-west-9'}": {"status": 400, "body": "<Region>eu-west-9</Region>"},
    "another region": {"status": 301},
    "is not there": {"status": 404, "code": "NoSuchKey"},
    "no such bucket": {"status": 404, "code": "NoSuchBucket"},
    "who you are": {"status": 401},
    "does not answer with a range": {"has_ranges": False, "stalled": 1},  # before the body, which never ends
    "does not say how long it is": {"has_length": False},
    "the server answers 418": {"status": 418},
}


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("cause", CAUSES)
def test_an_error_says_its_cause_and_nothing_secret(server, scheme, cause, caplog, capsys):
    server.faults = Faults(**CAUSES[cause])
    options = {} if scheme == "http" else {**server.storage, "session_token": "TOPTOKEN"}
    url = f"{server.url}/bucket/run.h5?X-Amz-Signature=TOPSIGN" if scheme == "http" else "s3://bucket/run.h5"
    remote = open_remote(url, options)
    stored = remote.object()
    with caplog.at_level(0), pytest.raises(OSError, match=re.escape(cause).replace(r"\.\*", ".*")) as caught:
        read(stored, 0, 10)
    said = [caught.value, remote, stored, vars(stored), StorageOptions(options), caplog.text, *capsys.readouterr()]
    said += traceback.format_exception(caught.value)
    assert caught.value.__context__ is None and "run.h5" in str(caught.value)
    assert len(server.log) == 1
    for secret in ("TOP", "AKIATEST", "X-Amz", "Signature"):
        assert secret not in " ".join(f"{part} {part!r}" for part in said)


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("https://{host}/run.h5", {}, "no TLS connection"),
        ("http://127.0.0.1:1/run.h5", {}, "no connection to its server"),
        ("http://{host}/run.h5", {"proxy_url": "http://127.0.0.1:1"}, "no connection to its server.*proxy"),
        ("https://no-such-host.invalid/run.h5", {}, "the name of its server is not known"),
    ],
)
def test_no_connection(server, url, options, said):
    with pytest.raises(RemoteError, match=said):
        open_remote(url.format(host=server.url.partition("//")[2]), options).object().pin  # noqa: B018


def test_a_header_from_a_command_line(server):
    options = Options.check(storage=[parse_storage("default_headers.x-lab=TOP=1")]).storage
    assert open_remote(f"{server.url}/bucket/run.h5", options).object().nbytes == len(DATA)
    assert server.headers[0]["x-lab"] == "TOP=1" and "TOP" not in repr(options)
    both = {"default_headers": {"x-two": "2"}, "default_headers.x-lab": "TOP=1"}
    assert dict(Options.check(storage=both).storage)["default_headers"] == {"x-two": "2", "x-lab": "TOP=1"}
    assert both["default_headers"] == {"x-two": "2"}, "the caller's own dict"


def test_no_keys(server, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    options = {"endpoint": server.url, "region": "x", "metadata_endpoint": "http://127.0.0.1:1/169.254.169.254"}
    with pytest.raises(RemoteError, match="no keys: none in storage=, the environment or a profile"):
        open_remote("s3://bucket/run.h5", options).object().pin  # noqa: B018


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("s3://bucket/a", {"nosuch": "TOP"}, "there is no option nosuch"),
        ("s3://bucket/a", {"skip_signature": "TOP"}, "the value of skip_signature is not valid"),
        ("s3://bucket/a", {"access_key_id": "TOP"}, "SecretAccessKey is missing"),
        ("s3://bucket/a", {"requests": "TOP"}, "from 1 to 64"),
        ("s3:///a", {}, "names no bucket"),
        ("https://me:TOP@host/a", {}, "has a user or password in it"),
        ("https://host/a", {"region": "TOP"}, "which an HTTP server has not"),
        # Not what Rust says, which ends the thread, and is no `Exception`.
        ("s3://bucket/a", {"endpoint": "TOP.example.org:9000"}, "storage's 'endpoint' is no address.* begin with 'https://'"),
        ("s3://bucket/a", {"AWS_ENDPOINT_URL": "https://"}, "storage's 'AWS_ENDPOINT_URL' is no address"),
    ],
)
def test_options_that_are_wrong(url, options, said):
    with pytest.raises(ConfigError, match=said) as caught:
        open_remote(url, options)
    assert "TOP" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("name", ["endpoint", "endpoint_url", "aws_endpoint", "AWS_ENDPOINT_URL"])
def test_an_endpoint_without_tls(server, monkeypatch, tmp_path, name):
    """Wrong if the scheme counted in one spelling of the option alone, or not in the environment: `the connection failed`."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    (tmp_path / "config").write_text("[default]\nendpoint_url = https://nosuch.invalid\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    options = {**server.storage, name: server.url}
    if name != "endpoint":
        del options["endpoint"]
    assert open_remote("s3://bucket/run.h5", options).object().nbytes == len(DATA)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_in_the_environment(server, monkeypatch, name):
    options = {key: value for key, value in server.storage.items() if key != "endpoint"}
    monkeypatch.setenv(name, server.url)
    assert open_remote("s3://bucket/run.h5", options).object().nbytes == len(DATA)
    monkeypatch.setenv(name, "TOP.example.org")
    with pytest.raises(ConfigError, match=f"^{name} is no address of a server") as caught:
        open_remote("s3://bucket/run.h5", options)
    assert "TOP" not in str(caught.value)


@pytest.mark.parametrize(("url", "more"), [("s3://buc ket/a", {}), ("s3://bucket/a", {"access_key_id": "a\n"})])
def test_a_panic_of_obstore_is_an_error_of_this_rank(server, url, more):
    """Wrong if it left as what Rust raises, which no rank agrees on: the others would wait for this one."""
    with pytest.raises(RemoteError, match="cannot be read: obstore gives up"):
        open_remote(url, {**server.storage, **more}).object().pin  # noqa: B018


def test_profiles(server, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    config = (
        f"[default]\nregion = eu-1\nendpoint_url = {server.url}\n[profile lab]\nregion = lab-1\nendpoint_url = {server.url}\n"
    )
    (tmp_path / ".aws/config").write_text(config + "[profile sso]\nsso_start_url = x\n")
    keys = "[{}]\naws_access_key_id = KEY{}\naws_secret_access_key = s\n"
    (tmp_path / ".aws/credentials").write_text(keys.format("default", 1) + keys.format("lab", 2))

    def signed(**options):
        server.clear()
        assert open_remote("s3://bucket/run.h5", options).object().nbytes == len(DATA)
        return server.headers[0].get("authorization", "unsigned").partition(",")[0].rpartition("=")[2].split("/")[::2][:2]

    assert signed() == ["KEY1", "eu-1"]
    assert signed(profile="lab") == ["KEY2", "lab-1"]
    assert signed(profile="lab", region="mine") == ["KEY2", "mine"]
    assert signed(skip_signature=True) == ["unsigned"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY3")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert signed() == ["KEY3", "eu-1"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY4")  # as a job does when its keys expire
    assert signed() == ["KEY4", "eu-1"]
    assert signed(profile="lab") == ["KEY2", "lab-1"]
    for profile, said in (("none", "there is no profile 'none'"), ("sso", "has no keys of its own")):
        with pytest.raises(ConfigError, match=said):
            open_remote("s3://bucket/run.h5", {"profile": profile})


@pytest.mark.parametrize("is_store", [True, False])
def test_keys_are_those_of_their_own_provider(server, is_store):
    """Wrong if a store were that of another provider which says the same of itself: keys are in no text."""

    class Provider:
        def __init__(self, key):
            self.key = key

        def __repr__(self):
            return "Provider()"

        def __call__(self):
            return {"access_key_id": self.key, "secret_access_key": "s", "token": None, "expires_at": None}

    for key in ("KEY1", "KEY2"):
        options = {"endpoint": server.url, "region": "us-east-1", "credential_provider": Provider(key)}
        if is_store:
            options = {"store": stores.S3Store("bucket", **options, client_options={"allow_http": True})}
        server.clear()
        assert open_remote("s3://bucket/run.h5", options).object().nbytes == len(DATA)
        assert f"Credential={key}/" in server.headers[0]["authorization"]


def test_a_store_that_is_handed_in(server):
    memory = stores.MemoryStore()
    obstore.put(memory, "a/run.h5", DATA)
    s3 = stores.S3Store("bucket", **server.storage, client_options={"allow_http": True})
    http = stores.HTTPStore(f"{server.url}/bucket?sign=TOPSIGN", client_options={"allow_http": True})
    names = ("store://a/run.h5", "s3://bucket/run.h5", f"{server.url}/bucket/run.h5")
    for store, name in zip((memory, s3, http), names, strict=True):
        key = "a/run.h5" if store is memory else "run.h5"
        url, options = with_store((store, key), {"requests": 2})
        assert url == name and repr(StorageOptions(options)) == "{requests, store}"
        assert read(open_remote(url, options).object(), 5, 1000) == DATA[5:1005]
    tree, _ = with_store({"x": (memory, "a"), "y": [(memory, "b"), "local.h5"]}, None)
    assert tree == {"x": "store://a", "y": ["store://b", "local.h5"]}
    with pytest.raises(ConfigError, match="was given several"):
        with_store([(memory, "a"), (s3, "b")], None)
    with pytest.raises(ConfigError, match=r"storage has 'region', 'token', but the store .* may have 'requests' alone"):
        with_store((s3, "b"), {"token": "TOPSECRET", "region": "us-east-1", "requests": 2})


@pytest.mark.parametrize("scheme", ["http", "s3", "HTTPStore", "S3Store"])
def test_objects_in_one_folder_share_its_connections(server, scheme, monkeypatch):
    """Wrong if each had its own, as a connection takes some hundred milliseconds to a far store, with its certificates, or a
    limit of requests of its own. Wrong if a name were escaped twice, or asked for below another path: a slash too many is
    another key of S3.
    """
    names = ["bucket/a/x.h5", "bucket/a/y.h5", "bucket/a/..h5", "bucket/z.h5", "bucket/a/a b%41?.h5"]
    server.objects |= {name: name.encode() for name in names}
    accepted, accept = [], server._server.get_request
    monkeypatch.setattr(server._server, "get_request", lambda: accepted.append(None) or accept())
    root, options, n_in_one = f"{server.url}/bucket", {}, 3  # over HTTP a folder is a store
    if scheme == "s3":
        root, options, n_in_one = "s3://bucket", server.storage, 5
    elif scheme == "HTTPStore":
        options, n_in_one = {"store": stores.HTTPStore(root, client_options={"allow_http": True})}, 5
    elif scheme == "S3Store":
        root, n_in_one = "s3://bucket", 5
        options = {"store": stores.S3Store("bucket", **server.storage, client_options={"allow_http": True})}
    throttles = set()
    for k, name in enumerate(names, 1):
        key = name.removeprefix("bucket/")
        folder = open_remote(f"{root}/{quote(key) if scheme == 'http' else key}", options)
        stored = folder.object()
        assert stored.read_at_most(0, 100).decode() == name and stored.name.startswith(root)
        throttles.add(folder._client._throttle)
        assert len(accepted) == len(throttles) == max(1, k + 1 - n_in_one)
    assert [request.key for request in server.log] == names


def test_an_empty_object_that_stands_for_a_folder_is_no_store(server):
    """As consoles make it. Wrong if a save said that there is '', or if what is removed after an error were another object."""
    server.objects |= {"bucket/new.zarr/": b"", "bucket/new.zarr": b"another object"}
    folder = NewRemoteFolder("s3://bucket/new.zarr", "w-", server.storage)
    folder.create()
    assert list(folder.keys("")) == []
    folder.put("x/c/0", b"0123")
    assert list(folder.keys("")) == ["x/c/0"]
    folder.discard()
    assert server.objects["bucket/new.zarr"] == b"another object"
    assert [name for name in server.names() if name.startswith("bucket/new.zarr/")] == ["bucket/new.zarr/"]


def test_a_name_with_a_space_can_be_typed(server):
    """Wrong if the command that removes what is there had two names."""
    server.objects["bucket/my run.zarr/zarr.json"] = b"{}"
    with pytest.raises(ConfigError, match=r"aws s3 rm --recursive 's3://bucket/my run\.zarr', gcloud"):
        NewRemoteFolder("s3://bucket/my run.zarr", "w-", server.storage).create()


def test_metadata_are_removed_first(server, monkeypatch):
    """Wrong if chunks were: a job that is ended as it removes them would leave arrays of fill values."""
    folder, removed = NewRemoteFolder("s3://bucket/new.zarr", "w-", server.storage), []
    folder.create()
    for key in ("c/0", "x/c/0", "x/zarr.json", "zarr.json"):
        folder.put(key, b"0123")
    monkeypatch.setattr(server, "put", lambda key, content: (removed.append(key), server.objects.pop(key)))
    folder.discard()
    documents = ["bucket/new.zarr/x/zarr.json", "bucket/new.zarr/zarr.json"]
    assert sorted(removed[:2]) == documents and len(removed) == 5


def test_what_exists_is_told_in_two_ways(server):
    """409 in Azure. Wrong if that were any other error: a save that finds another store in its place would remove it."""
    for exists in ((412, "PreconditionFailed"), (409, "BlobAlreadyExists")):
        server.objects.clear()
        server.faults.exists = exists
        folder, other = (NewRemoteFolder("s3://bucket/new.zarr", "w-", server.storage) for _ in range(2))
        folder.create()
        with pytest.raises(ConfigError, match="is being saved by another job"):
            other.create()
        folder.finish("zarr.json", b"{}")
        server.objects["bucket/new.zarr/zarr.json"] = b"another"
        with pytest.raises(ConfigError, match="was saved by another program meanwhile"):
            folder.publish()
        folder.discard()
        assert server.objects == {"bucket/new.zarr/zarr.json": b"another"}


def test_a_put_that_meets_another_is_tried_again(server):
    """S3 answers 409 then, and asks for that."""
    puts = []
    server.faults = Faults(status=409, code="ConditionalRequestConflict", only=lambda key: puts.append(key) or len(puts) == 1)
    NewRemoteFolder("s3://bucket/new.zarr", "w-", server.storage).create()
    assert "bucket/new.zarr/shardload-unfinished" in server.objects


def test_what_is_put_is_not_copied(server, monkeypatch):
    """Wrong if each chunk under way were in memory twice, which no plan counts."""
    put, chunk = [], np.arange(5, dtype="f4")
    remote = client.Client("s3://bucket/new.zarr", server.storage)
    right = remote._obstore.put
    monkeypatch.setattr(
        remote._obstore, "put", lambda store, key, data, **how: put.append(data) or right(store, key, data, **how)
    )
    remote.put("x/c/0", chunk, "create")
    assert np.shares_memory(np.frombuffer(put[0], "u1"), chunk)
    assert server.objects["bucket/new.zarr/x/c/0"] == chunk.tobytes()


def test_what_does_not_exist_keeps_nothing_from_being_deleted(tmp_path):
    """In folders, Google and Azure that is an error of obstore. Wrong if the rest stayed: what a failed save has put."""
    url, options = with_store((stores.LocalStore(tmp_path), "new.zarr"), None)
    remote = client.Client(url, options)
    keys = [f"x/c/{k}" for k in range(50)]
    for key in keys:
        remote.put(key, b"0123", "create")
    assert sorted(remote.keys("")) == sorted(keys)
    remote.delete(["gone", *keys])
    assert remote.keys("") == []


def test_what_is_put_after_a_folder_was_discarded_is_removed(server):
    """As by a rank that was trying again as another one failed. Wrong if it stayed: no other save could have this name."""
    folder, of_rank = (NewRemoteFolder("s3://bucket/new.zarr", "w-", server.storage) for _ in range(2))
    folder.create()
    of_rank.join("s3://bucket/new.zarr")
    of_rank.put("x/c/0", b"0123")
    of_rank.sync()
    folder.discard()
    of_rank.put("x/c/1", b"0123")
    of_rank.close()
    assert "bucket/new.zarr/x/c/1" not in server.objects


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX says so, if another test has imported it
def test_after_a_fork_there_is_an_error_at_once(server):
    stored = opened(server)
    assert stored.nbytes == len(DATA)
    child = os.fork()
    if not child:
        status = 1
        try:
            read(stored, 0, 10)
        except RemoteError as error:
            status = 0 if "was forked from one that had read" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_obstore(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'shardload[remote]'")):
        open_remote("s3://bucket/run.h5")


def test_local_files_do_not_need_it():
    code = "import sys, shardload.formats.lookup; sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
