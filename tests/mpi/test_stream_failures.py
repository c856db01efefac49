"""What becomes of a stream when something fails, or when it is left before its end? On any number of ranks."""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.comm.group import Group
from shardload.comm.mpi import load_mpi
from shardload.errors import ConfigError, PeerError, ShardloadError, SourceError
from shardload.jobs.streaming.endpoints import BatchTarget
from shardload.jobs.streaming.plan import EpochRounds
from tests.mpi.support import check, check_shards, damage_chunk, mesh_of, on_root, ramp
from tests.unit.files import write_hdf5

N_STEPS, CHUNK_STEPS, BATCH = 60, 3, 4
DAMAGED = 7  # the column of steps 21 to 23: batch 5 has steps 20 to 23
PREFETCH = pytest.mark.parametrize("prefetch", [0, 2])


def shape() -> tuple[int, int, int]:
    n = len(jax.devices())
    return N_STEPS, 2 * n, 3 * n


def devices_mesh() -> Mesh:
    """Samples over two parts where there are as many devices, which are not in their order."""
    devices = np.array(jax.devices())[::-1]
    n = 2 if devices.size % 2 == 0 else 1
    return Mesh(devices.reshape(n, -1), ("data", "lat"))


def stream(path: Path, **more: Any) -> Any:
    options = {"dataset": "x", "batch": BATCH, "timeout": 30, "prefetch": 0} | more
    return shardload.stream(path, devices_mesh(), P("data", "lat"), **options)


def check_batch(batch: jax.Array, index: Any) -> None:
    check_shards(batch, ramp(shape())[index])


@pytest.fixture
def path(comm: Any, shared_tmp_path: Path) -> Path:
    """A file with `x`, of which each column has two chunks, and with `bad`, the same with a damaged chunk."""
    made = shared_tmp_path / "stream.h5"

    def write() -> None:
        chunks = CHUNK_STEPS, shape()[1], shape()[2] // 2 + 1
        write_hdf5(made, dict.fromkeys(("x", "bad"), ramp(shape())), chunks=chunks, compression="gzip")
        damage_chunk(made, "bad", DAMAGED * CHUNK_STEPS, 0, chunks[2])

    on_root(comm, write)
    return made


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shardload-stream")]


def open_files(path: Path) -> list[str]:
    return [link for link in map(_target, Path("/proc/self/fd").iterdir()) if link == str(path)]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def wait_until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    """For what threads do by themselves."""
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_so()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Group]]:
    """The groups that streams make, and in the end: none of their communicators is left."""
    made: list[Group] = []
    duplicate = Group.duplicate

    def noting(self: Group) -> Group:
        made.append(duplicate(self))
        return made[-1]

    monkeypatch.setattr(Group, "duplicate", noting)
    yield made
    mpi = load_mpi()[0]
    wait_until(lambda: all(group.comm is None or group.comm == mpi.COMM_NULL for group in made))
    assert not threads()


def same_on_all(comm: Any, value: Any) -> bool:
    return len({json.dumps(other) for other in comm.allgather(value)}) == 1


@PREFETCH
@pytest.mark.parametrize("shuffle", [None, 5])
def test_a_damaged_chunk(comm: Any, path: Path, groups: list[Group], prefetch: int, shuffle: int | None) -> None:
    """Wrong if the batches of the same round were lost, or a rank came to another batch or text, or what is open stayed so."""
    data = stream(path, dataset={"good": "x", "bad": "bad"}, prefetch=prefetch, shuffle=shuffle, pool="8KiB")
    columns = data.order() // CHUNK_STEPS
    first = int(np.flatnonzero(columns == DAMAGED)[0])
    n, sample = divmod(first, BATCH)
    given = 0
    with pytest.raises(SourceError) as caught, iter(data) as batches:
        for batch in batches:
            for part in batch.values():
                check_batch(part, data.order()[given * BATCH : (given + 1) * BATCH])
            given += 1
    text = str(caught.value)
    assert given == n > 0
    assert f"sample {sample} of batch {n} (step {data.order()[first]}," in text
    assert caught.value.dataset == "/bad" and caught.value.chunk == (DAMAGED, 0, 1)
    assert same_on_all(comm, [type(caught.value).__name__, text, given])
    assert not open_files(path)
    with iter(stream(path, prefetch=prefetch)) as batches:  # all can go on
        check_batch(next(batches), np.arange(BATCH))


@PREFETCH
def test_a_file_that_is_replaced_before_it_is_opened(comm: Any, path: Path, prefetch: int) -> None:
    """Wrong if a rank that opens the file late took the new one: a batch would be a mixture, without any error.

    Shape, dtype and chunks are the same, and so is each rank's own view of the file from when it opens it to its end.
    """
    data = stream(path, prefetch=prefetch)

    def replace() -> None:
        before, other = path.stat(), path.with_suffix(".new")
        with h5py.File(path) as old, h5py.File(other, "w") as new:
            new.create_dataset("x", data=old["x"][...] + 1, chunks=old["x"].chunks, compression="gzip")
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
        other.replace(path)

    on_root(comm, replace)
    with pytest.raises(SourceError, match="is not what it was when the stream was made") as caught, iter(data) as batches:
        next(batches)
    assert same_on_all(comm, str(caught.value)) and not open_files(path)


def test_a_batch_by_its_number_leaves_nothing_open(path: Path, groups: list[Group]) -> None:
    check_batch(stream(path)[3], np.arange(3 * BATCH, 4 * BATCH))
    assert not open_files(path)


@PREFETCH
@pytest.mark.parametrize("how", ["with", "close", "dropped", "break", "raised"])
def test_leaving_a_stream(comm: Any, path: Path, groups: list[Group], prefetch: int, how: str) -> None:
    """Wrong if a thread, an open file or a communicator were left, or batches that were made ahead."""
    data = stream(path, prefetch=prefetch)
    batches = iter(data)
    if how == "raised":
        with pytest.raises(ZeroDivisionError), batches:
            next(batches)
            _ = 1 / 0
    elif how == "with":
        with batches:
            next(batches)
    elif how == "break":
        for batch in data:
            check_batch(batch, np.arange(BATCH))
            break
    else:
        next(batches)
    if how == "close":
        state = batches.get_state()
        batches.close()
        assert batches.get_state() == state
    if how == "dropped":
        del batches
    elif how != "break":
        with pytest.raises(ConfigError, match="closed"):
            next(batches)
        batches.close()  # once more does nothing
    wait_until(lambda: not open_files(path) and not threads())
    assert len(groups) == 1
    comm.barrier()


@PREFETCH
def test_the_end_is_an_end(path: Path, groups: list[Group], prefetch: int) -> None:
    """Wrong if something stayed open until `close`, or the iterator began anew."""
    batches = iter(stream(path, prefetch=prefetch, epochs=2))
    assert sum(1 for _ in batches) == 2 * (N_STEPS // BATCH)
    assert not open_files(path) and not threads()
    assert next(batches, None) is None
    assert batches.report.chunks_decoded == 2 * 2 * N_STEPS // CHUNK_STEPS
    assert batches.report.nbytes_read == 2 * ramp(shape()).nbytes


@PREFETCH
def test_an_error_keeps_no_steps(path: Path, prefetch: int) -> None:
    """Wrong if the traceback of the error, or a cycle, kept what the stream held."""
    batches = iter(stream(path, dataset={"good": "x", "bad": "bad"}, prefetch=prefetch))
    next(batches)
    inside: Any = batches._batches
    kept = weakref.ref(inside)
    error = None
    gc.collect()
    gc.disable()
    try:
        try:
            del inside
            for _ in batches:
                pass
        except SourceError as caught:
            error = caught
        assert error is not None
        wait_until(lambda: not threads())
        held = kept()
        assert held is None or not any(isinstance(value, (dict, list)) and value for value in vars(held).values())
        steps = [one for one in gc.get_objects() if type(one).__name__ in ("Steps", "RoundReader")]
        assert not steps
    finally:
        gc.enable()


def test_loads_and_saves_beside_a_stream(comm: Any, path: Path, shared_tmp_path: Path, groups: list[Group]) -> None:
    """Wrong if they and the reader took each other's messages, or waited for each other."""
    mesh, n = mesh_of(), 0
    with iter(stream(path, prefetch=2, epochs=2)) as batches:
        for batch in batches:
            k = n % (N_STEPS // BATCH)
            check_batch(batch, np.arange(k * BATCH, (k + 1) * BATCH))
            if n % 5 == 0:
                x = shardload.load(path, mesh, P(None, "a", "b"), dataset="x")
                check(x, ramp(shape()), mesh, P(None, "a", "b"))
                shardload.save(shared_tmp_path / f"{n}.h5", {"batch": batch})
                with h5py.File(shared_tmp_path / f"{n}.h5") as file:
                    assert np.array_equal(file["batch"][...], ramp(shape())[k * BATCH : (k + 1) * BATCH])
            n += 1


def test_two_streams_at_once(path: Path, groups: list[Group]) -> None:
    """Wrong if one took the other's messages, or their threads."""
    pairs = zip(stream(path, prefetch=2), stream(path, prefetch=1, shuffle=3), stream(path), strict=True)
    order = stream(path, shuffle=3).order()
    for k, (a, b, c) in enumerate(pairs):
        check_batch(a, np.arange(k * BATCH, (k + 1) * BATCH))
        check_batch(b, order[k * BATCH : (k + 1) * BATCH])
        check_batch(c, np.arange(k * BATCH, (k + 1) * BATCH))
    assert k == N_STEPS // BATCH - 1


def test_without_prefetch_mpi_is_called_in_next_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a thread read ahead, or a group were held between two batches."""
    with iter(stream(path)) as batches:
        next(batches)
        group = batches._batches._reader._group
        before = group.watch.n_agreed
        assert not group._call_lock.locked()
        assert [name for name in threads() if "stream" in name] == []
        time.sleep(0.05)
        assert group.watch.n_agreed == before


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), AssertionError()], ids=repr)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_rank_leaves(comm: Any, path: Path, groups: list[Group], prefetch: int, error: Exception, tune_rounds: None) -> None:
    """Wrong if the others waited out the timeout, were told another rank, or lost batches that they had; or if an error without
    text, as Ctrl-C and ``assert`` have, were "AssertionError: , but others go on".
    """
    left = 0 if isinstance(error, AssertionError) else comm.size - 1
    batches = iter(stream(path, prefetch=prefetch))
    for k in range(3):
        check_batch(next(batches), np.arange(k * BATCH, (k + 1) * BATCH))
    began = time.monotonic()
    if comm.rank == left:
        with pytest.raises(type(error)), batches:
            raise error
    else:
        with pytest.raises(PeerError) as caught:
            for _ in batches:
                pass
        text = str(caught.value)
        assert caught.value.rank == left and f"on rank {left} of {comm.size}: the program has left the stream after 3" in text
        told = "ZeroDivisionError: division by zero" if str(error) else "AssertionError"
        assert f"batches with {told}, but others go on" in text
    assert time.monotonic() - began < 20
    comm.barrier()
    wait_until(lambda: not threads())
    with iter(stream(path, prefetch=prefetch)) as again:  # all can go on
        check_batch(next(again), np.arange(BATCH))


def fails_at(call: Callable[..., Any], k: int, error: Exception) -> Callable[..., Any]:
    """What does the same as `call`, but for its call number `k`."""
    numbers = itertools.count()

    def fail(*arguments: Any) -> Any:
        if next(numbers) == k:
            raise error
        return call(*arguments)

    return fail


@pytest.mark.mpi(min_size=2)
@PREFETCH
@pytest.mark.parametrize(
    "what", ["keeps its steps", "makes a batch", "plans the second epoch", "starts a thread", "starts the other thread"]
)
def test_one_rank_fails_alone(
    comm: Any, path: Path, prefetch: int, what: str, tune_rounds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if the others did not hear of it, and waited out the timeout for a rank that has left the stream. Or if an error of
    shardload that one rank alone has (where JAX puts a shard of a batch) were taken for one that all have."""
    if comm.rank == comm.size - 1:
        error, names = MemoryError("no room here"), {"starts a thread": "maker", "starts the other thread": "reader"}
        module = "shardload.jobs.streaming.reader"
        if what == "keeps its steps":
            monkeypatch.setattr(BatchTarget, "take", fails_at(BatchTarget.take, 2, error))
        elif what == "makes a batch":
            monkeypatch.setattr(BatchTarget, "batch", fails_at(BatchTarget.batch, 2, ShardloadError("no room here")))
        elif what == "plans the second epoch":
            monkeypatch.setattr(f"{module}.EpochRounds", fails_at(EpochRounds, 1, error))
        elif prefetch:
            start = threading.Thread.start

            def start_one(self: threading.Thread) -> None:
                if self.name == f"shardload-stream-{names[what]}":
                    raise RuntimeError("no room here: can't start new thread")
                start(self)

            monkeypatch.setattr(threading.Thread, "start", start_one)
    n_given = 0
    is_error = prefetch or "thread" not in what
    expected = pytest.raises((MemoryError, RuntimeError, ShardloadError), match="no room here") if is_error else nullcontext()
    with expected, iter(stream(path, prefetch=prefetch, epochs=2)) as batches:
        for batch in batches:
            check_batch(batch, batches.index)
            n_given += 1
    assert n_given >= (N_STEPS // BATCH if "epoch" in what and not prefetch else 0)
    monkeypatch.undo()
    comm.barrier()
    wait_until(lambda: not open_files(path) and not threads())
    with iter(stream(path, prefetch=prefetch)) as again:  # all can go on
        check_batch(next(again), np.arange(BATCH))


@PREFETCH
def test_an_untrusted_file_is_read_again_after_an_error(comm: Any, path: Path, prefetch: int) -> None:
    """Wrong if a rank that could not read one array closed the others' files on all ranks, and their error were the one to see.

    All ranks read `x`, but only one the array in the other file, which has one chunk.
    """
    other = path.with_name("other.h5")

    def write(start: int) -> None:
        write_hdf5(other, {"y": np.arange(start, start + N_STEPS, dtype="f4")}, chunks=(N_STEPS,))
        os.utime(other, (start, start))

    on_root(comm, lambda: write(0))
    places, specs = {"x": path, "y": other}, {"x": P("data", "lat"), "y": P("data")}
    how: dict[str, Any] = {"batch": BATCH, "prefetch": prefetch, "timeout": 30, "untrusted": True}
    data = shardload.stream(places, devices_mesh(), specs, dataset={"x": "x", "y": "y"}, **how)
    comm.barrier()
    on_root(comm, lambda: write(1))
    with pytest.raises(SourceError, match=r"'/y' in .*other.h5.* is not what it was when"), iter(data) as batches:
        next(batches)


@pytest.fixture
def tune_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds as small as they can be: one for each few batches."""
    monkeypatch.setattr("shardload.jobs.streaming.plan._ROUND_NBYTES", 1)


def test_ranks_with_other_states(comm: Any, path: Path) -> None:
    """Wrong if they began: what they would give each other belongs to other batches."""
    batches = iter(stream(path))
    batches.set_state(batches.get_state() | {"sample": 4 * (comm.rank == comm.size - 1)})
    if comm.size == 1:
        check_batch(next(batches), np.arange(4, 4 + BATCH))
        return
    with pytest.raises(PeerError, match="sample"):
        next(batches)
    comm.barrier()


@PREFETCH
def test_what_is_no_state(path: Path, prefetch: int) -> None:
    data = stream(path, prefetch=prefetch)
    good = iter(data).get_state()
    incomplete = [{key: value for key, value in good.items() if key != name} for name in good]
    of_wrong_types = [good | {name: 1.5} for name in good]
    for wrong in (None, {}, good | {"version": 99}, *incomplete, *of_wrong_types):
        with pytest.raises(ConfigError, match="no state of a stream"):
            iter(data).set_state(wrong)
    for sample in (-1, 10**6):
        with pytest.raises(ConfigError, match=f"after sample {sample} of epoch 0, but an epoch has 60"):
            iter(data).set_state(good | {"sample": sample})
    with iter(data) as batches:
        next(batches)
        with pytest.raises(ConfigError, match="no state of a stream"):
            batches.set_state({})
        next(batches)
        batches.set_state(good)  # back to the beginning
        for _ in range(2):
            check_batch(next(batches), batches.index)
        assert batches.index.tolist() == data.order(0)[BATCH : 2 * BATCH].tolist()
