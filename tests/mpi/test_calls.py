"""One call after another: on open arrays, with a plan, after a failure, beside the user's own messages."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import jax
import numpy as np
import pytest
import zarr
from jax.sharding import PartitionSpec as P

import shardload
from shardload import ConfigError, PeerError, SourceError
from shardload.comm.group import Group, Invocation, group_of
from shardload.formats.codecs import algorithms
from shardload.jobs import consistency
from shardload.jobs.loading import endpoints
from shardload.jobs.loading.call import LoadCall
from shardload.planning.schedule import Schedule
from shardload.planning.tuning import Tuning
from tests.mpi.sources import NAME, SOURCES
from tests.mpi.support import (
    DECOMPOSITIONS,
    READERS,
    check,
    check_shards,
    cube,
    mesh_of,
    on_root,
    padded,
    ramp,
    same_error,
    unit,
)
from tests.ports import catches_sigterm, listeners
from tests.tuning import tuned
from tests.unit.files import raising, write_hdf5

# --- what a path can be -----------------------------------------------------------------------------------------------


class Wordless(float):
    """A number of which Python can print nothing, as of an array that has been deleted."""

    def __repr__(self) -> str:
        raise RuntimeError("there is nothing to print")


def test_an_argument_that_cannot_be_described(comm: Any) -> None:
    """Wrong if a rank failed while it wrote down its arguments, before the others meet it."""
    pad = Wordless(0.0) if comm.rank == comm.size - 1 else 0.0
    call = partial(shardload.load, ramp(cube()), mesh_of(), P("a"), pad=pad)
    same_error(comm, call, ConfigError, "the arguments could not be read: RuntimeError: there is nothing to print")
    check(shardload.load(ramp(cube()), mesh_of(), P("a")), ramp(cube()), mesh_of(), P("a"))


@pytest.mark.parametrize("source", ["contiguous", "gzip_shuffle", "big_endian", "netcdf4", "zarr_v2", "zarr_sharded"])
def test_small_array_comes_with_its_metadata(
    files: dict[str, str], source: str, comm: Any, monkeypatch: pytest.MonkeyPatch, tune: Any
) -> None:
    """Wrong if every rank opened a file of a few bytes, or if its values came in the file's own byte order."""
    values, mesh = ramp(cube()), mesh_of()

    monkeypatch.setattr(consistency, "open_source", raising(PermissionError("nobody but rank 0 opens it")))
    tune(small_nbytes=1 << 20)
    load = partial(shardload.load, files[source], mesh, dataset=NAME)
    check(load(P("b", "a")), values, mesh, P("b", "a"))
    picked = padded(values[1:, 2], mesh, P("a"), 7)
    check(load(P("a"), select=(slice(1, None), 2), pad=7), picked, mesh, P("a"))
    check(load(P(), dtype="float16"), values.astype("float16"), mesh, P())
    same_error(comm, lambda: load(P("b", "a"), readers="direct"), PeerError, "nobody but rank 0 opens it")
    tune(small_nbytes=16)
    same_error(comm, lambda: load(P("b", "a")), PeerError, "nobody but rank 0 opens it")


@pytest.fixture
def as_it_is(tune: Any) -> None:
    """Small arrays travel as small ones do, whatever the other tests here do with them."""
    tune(**asdict(Tuning()))


@pytest.mark.usefixtures("as_it_is")
@pytest.mark.parametrize("verify", ["index", "checksum", "file", "full"])
def test_small_arrays_are_everywhere(shared_tmp_path: Path, comm: Any, verify: str) -> None:
    """Wrong if a rank cut its piece out of the values by another rank's region, or padding were read from them."""
    shape = (2 * unit(), 3 * unit(), 80 * unit())  # more than comes without an estimate
    values = ramp(shape)

    path = on_root(comm, lambda: write_hdf5(shared_tmp_path / "x.h5", {"x": values}, chunks=(3, 5, 80)))
    for mesh in (mesh_of(), mesh_of(jax.devices()[::-1])):
        for spec in DECOMPOSITIONS.values():
            check(shardload.load(path, mesh, spec, verify=verify), values, mesh, spec, spec)
        odd = values[:, 1:, :7]
        x = shardload.load(path, mesh, P(None, "b", "a"), select=(slice(None), slice(1, None), slice(7)), pad=3, verify=verify)
        check(x, padded(odd, mesh, P(None, "b", "a"), 3), mesh, P(None, "b", "a"))


class Counted:
    """The collectives of a group, counted."""

    def __init__(self, right: Any) -> None:
        self.right, self.names = right, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.names[name] += 1
        return getattr(self.right, name)


def test_a_duplicate_knows_the_ranks_of_this_machine(comm: Any) -> None:
    """Wrong if it asked for them anew: the ranks have agreed on them."""
    group = group_of(comm, None)
    duplicated = group.duplicate()
    n_agreed = duplicated.watch.n_agreed
    assert duplicated.node.ranks == group.node.ranks
    assert duplicated.watch.n_agreed == n_agreed
    duplicated.free()


@pytest.mark.mpi(min_size=2)  # one process sends none
@pytest.mark.usefixtures("as_it_is")
def test_messages_of_small_loads(shared_tmp_path: Path, own_comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a load of some bytes took another round, or one of an array that each rank reads by itself took fewer.

    Or if each time step of a series cost the ranks more than that, because the whole array is large.
    """
    series = ramp((600, 2 * unit(), 3 * unit()))

    def write() -> str:
        with h5py.File(shared_tmp_path / "some.h5", "w") as file:
            file["tiny"], file["small"] = ramp((unit(), 2 * unit())), ramp((unit(), 2 * unit(), 1000))
            for k in range(5):
                file[f"tree/{k}"] = ramp((unit(), 2 * unit()), "uint8")
            file.create_dataset("x", data=series, chunks=(1, *series.shape[1:]), compression="gzip")
        return str(shared_tmp_path / "some.h5")

    path, group, mesh = on_root(own_comm, write), group_of(own_comm, None), mesh_of()

    def messages(load: Callable[[], Any]) -> dict[str, int]:
        load()
        counted = Counted(group._collectives)
        with monkeypatch.context() as patch:
            patch.setattr(group, "_collectives", counted)
            load()
        return dict(counted.names)

    load = partial(shardload.load, path, mesh, P("a", "b"), comm=own_comm)
    assert messages(lambda: load(dataset="tiny")) == dict(broadcast=1, reduce=2)
    assert messages(lambda: load(dataset="small")) == dict(broadcast=2, reduce=2)
    tree = [f"tree/{k}" for k in range(5)]
    assert messages(lambda: load(dataset=tree)) == dict(broadcast=1, reduce=2)
    assert messages(lambda: load(dataset="tiny", readers="direct")) == dict(broadcast=1, reduce=2)
    assert messages(lambda: load(dataset="tiny", readers="parallel")) == dict(broadcast=1, reduce=3)
    for k in (3, 500):
        assert messages(lambda k=k: load(dataset="x", select=(k,))) == dict(broadcast=1, reduce=2)
        check(load(dataset="x", select=(k,)), series[k], mesh, P("a", "b"), k)


def test_ranks_that_differ_when_each_reads_by_itself(files: dict[str, str], comm: Any) -> None:
    """Wrong if ranks that do not wait for each other went on with different calls, or were out of step afterwards."""
    values, mesh, last = ramp(cube()), mesh_of(), comm.rank == comm.size - 1
    load = partial(shardload.load, files["contiguous"], mesh, dataset=NAME, readers="direct")
    for theirs in (dict(pad=1), dict(select=slice(0, -1)), dict(verify="checksum"), dict(readers="parallel")):
        if comm.size > 1:
            call = partial(load, spec=P("a"), **(theirs if last else {}))
            same_error(comm, call, PeerError, "all ranks must")
        check(load(spec=P("b", "a")), values, mesh, P("b", "a"), theirs)
        x = shardload.load(files["chunked"], mesh, P("b", "a"), dataset=NAME, readers="parallel")
        check(x, values, mesh, P("b", "a"), theirs)


@pytest.mark.parametrize(
    ("where", "name", "error", "readers", "kind"),
    [
        pytest.param(consistency, "open_source", OSError("no such disk"), "direct", PeerError, id="read its own part"),
        pytest.param(LoadCall, "_describe", MemoryError("no room"), "auto", ConfigError, id="say what it was asked for"),
        pytest.param(Schedule, "incoming", MemoryError("no room"), "parallel", PeerError, id="list the parts that come"),
        pytest.param(Schedule, "outgoing", MemoryError("no room"), "parallel", PeerError, id="list the parts that go"),
    ],
)
def test_one_rank_that_cannot(
    files: dict[str, str], comm: Any, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, error: Exception, readers: str,
    kind: type[Exception],
) -> None:  # fmt: skip
    """Wrong if the others had gone on with their arrays; or if it did not come to the call, did not come to the exchange, or
    left it, while the others wait for it, for its parts and for its answers.
    """
    file = files["contiguous" if readers == "direct" else "chunked"]
    with tuned(small_nbytes=0):
        if comm.rank == comm.size - 1:
            monkeypatch.setattr(where, name, raising(error))
        call = partial(shardload.load, file, mesh_of(), P("a"), dataset=NAME, readers=readers, timeout=30)
        same_error(comm, call, kind, f"on rank {comm.size - 1}" if comm.size > 1 else "", str(error))
        monkeypatch.undo()
        check(call(), ramp(cube()), mesh_of(), P("a"))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["next_tags", "duplicate"])
@pytest.mark.parametrize("error", [MemoryError("no room here"), KeyboardInterrupt()])
def test_one_rank_that_leaves_a_call(
    files: dict[str, str], comm: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, name: str
) -> None:
    """Wrong if the others waited out the timeout, were not told why, or could make no call any more.

    Also before its messages, and as the ranks of a stream make a communicator of their own.
    """
    last = comm.size - 1

    def batch() -> Any:
        return shardload.stream(files["chunked"], mesh_of(), P(), dataset=NAME, batch=2, prefetch=0, timeout=8)[0]

    with tuned(small_nbytes=0):
        if comm.rank == last:
            monkeypatch.setattr(Group, name, raising(error))
        load = partial(shardload.load, files["chunked"], mesh_of(), P("a"), dataset=NAME, readers="parallel", timeout=8)
        with pytest.raises(BaseException) as caught:
            load() if name == "next_tags" else batch()
        if comm.rank == last:
            assert caught.value is error
        else:
            assert isinstance(caught.value, shardload.StallError) and caught.value.rank == last
            assert f"rank {last} has left this call by an error of its own: {type(error).__name__}" in str(caught.value)
        monkeypatch.undo()
        check(load(), ramp(cube()), mesh_of(), P("a"))


@pytest.mark.mpi(min_size=2)
def test_first_calls_of_two_kinds(files: dict[str, str], comm: Any, own_comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if a load gathered the processes of JAX where a copy, which has none, compares the calls: both waited for ever."""
    copy = partial(shardload.copy, files["chunked"], shared_tmp_path / "copy.h5", comm=own_comm, timeout=20)
    load = partial(shardload.load, files["chunked"], mesh_of(), P("a"), dataset=NAME, comm=own_comm, timeout=20)
    same_error(comm, load if comm.rank else copy, PeerError, "called load", "called copy of")
    check(load(), ramp(cube()), mesh_of(), P("a"))


@pytest.mark.usefixtures("as_it_is")
def test_one_rank_that_cannot_make_a_small_array(files: dict[str, str], comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the other ranks had gone on with their arrays: they had all they needed."""
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(endpoints, "assemble", raising(MemoryError("no room here")))
    for names in (NAME, [NAME, NAME]):
        call = partial(shardload.load, files["contiguous"], mesh_of(), P("a"), dataset=names)
        same_error(comm, call, PeerError, f"on rank {comm.size - 1}" if comm.size > 1 else "", "no room here")
    monkeypatch.undo()
    check(shardload.load(files["contiguous"], mesh_of(), P("a"), dataset=NAME), ramp(cube()), mesh_of(), P("a"))


def test_one_message_compares(comm: Any) -> None:
    """Wrong if ranks that differ in some bits only, in whichever, were taken for equal."""
    group, same = group_of(comm, None), Invocation("load", "a load", {"path": "a"})
    assert group.all_same(same, True)
    n = comm.size
    for odd in range(n):
        assert not group.all_same(same, comm.rank != odd)
        for k in range(64) if n > 1 else ():
            asked = SimpleNamespace(digest=same.digest ^ 1 << k if comm.rank == odd else same.digest)
            assert not group.all_same(asked, True), (odd, k)  # type: ignore[arg-type]
    if n > 2:  # the same sum
        asked = SimpleNamespace(digest=5 + (comm.rank == 0) - (comm.rank == 1))
        assert not group.all_same(asked, True)  # type: ignore[arg-type]


@contextmanager
def opened(path: str) -> Any:
    """The array in a file, opened by its own library."""
    if path.endswith(".zarr"):
        yield zarr.open_array(path, path=NAME, mode="r")
        return
    with h5py.File(path, "r") as file:
        yield file[NAME]


@pytest.mark.parametrize("source", ["contiguous", "gzip_shuffle", "big_endian", "virtual", "zarr_v2", "zarr_sharded"])
def test_open_array(files: dict[str, str], source: str) -> None:
    """Wrong if the caller's array were closed, or opened again by a name that is another one here."""
    values, mesh, spec = ramp(cube()), mesh_of(), P(None, "b", "a")
    with opened(files[source]) as array:
        for readers in READERS:
            check(shardload.load(array, mesh, spec, readers=readers), values, mesh, spec, readers)
        x = shardload.load(array, mesh, P(), select=(slice(1, 4), 2), verify="checksum")
        check(x, values[1:4, 2], mesh, P())
        np.testing.assert_array_equal(array[1, 2], values[1, 2])  # still open


def test_open_numpy_array_on_every_rank() -> None:
    """Wrong if a selection of an array in memory were sent with the axes it dropped."""
    values, mesh = ramp(cube()), mesh_of()
    for readers in READERS:
        for select in (None, (1, ..., slice(2, 7)), (1, 2, 3)):
            wanted = np.asarray(values if select is None else values[select])
            check(shardload.load(values, mesh, P(), select=select, readers=readers), wanted, mesh, P(), (readers, select))
    x = shardload.load(values, mesh, P())
    values[...] = -1
    check(x, ramp(cube()), mesh, P())


def test_closed_dataset_and_group(comm: Any, files: dict[str, str]) -> None:
    """Wrong if a closed dataset gave the ranks different errors."""
    with opened(files["chunked"]) as array:
        same_error(comm, lambda: shardload.load(array.parent, mesh_of(), P()), ConfigError, "group['name']")
    same_error(comm, lambda: shardload.load(array, mesh_of(), P()), SourceError, "closed")


# --- one after the other ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readers", READERS)
def test_plan_executed_twice(files: dict[str, str], readers: Any) -> None:
    """Wrong if a second execution wrote into the first one's array, or found its file closed."""
    made = shardload.plan(Path(files["chunked"]), mesh_of(), P("b", "a"), dataset=f"/{NAME}/", readers=readers)
    assert made.report is None
    assert str(made)
    first = made.execute()
    report = made.report
    second = made.execute()
    for x in (first, second):
        check(x, ramp(cube()), mesh_of(), P("b", "a"))
    assert report is not None and made.report is not None
    assert report.chunks_decoded == made.report.chunks_decoded
    own = {s.data.unsafe_buffer_pointer() for s in first.addressable_shards}
    assert not own & {s.data.unsafe_buffer_pointer() for s in second.addressable_shards}


def test_file_that_changes_between_plan_and_execution(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if blocks of the old shape were read from the new file."""
    path = str(shared_tmp_path / "x.h5")

    def write(shape: tuple[int, ...]) -> None:
        write_hdf5(path, {"x": ramp(shape)})

    on_root(comm, lambda: write(cube()))
    made = shardload.plan(path, mesh_of(), P("a"))
    comm.Barrier()
    on_root(comm, lambda: write((*cube()[:2], 7)))
    same_error(comm, made.execute, SourceError, "the file has changed", "'/x' in")
    comm.Barrier()
    if comm.rank == 0:
        Path(path).unlink()
    comm.Barrier()
    same_error(comm, made.execute, SourceError, "there is no file")


@pytest.mark.parametrize("readers", READERS)
def test_a_part_of_a_virtual_dataset_that_changes(comm: Any, shared_tmp_path: Path, readers: Any) -> None:
    """Wrong if old parts were mixed with new ones, or HDF5 put fill values in the place of one that is gone."""
    part, values, spec = shared_tmp_path / "plane-1.h5", ramp(cube()), P("a", "b")
    whole = on_root(comm, lambda: SOURCES["virtual"](shared_tmp_path, cube()))
    stat = part.stat()
    with tuned(small_nbytes=0, tiny_nbytes=0, worth_sharing_nbytes=1):
        made = shardload.plan(whole, mesh_of(), spec, dataset=NAME, readers=readers)
        check(made.execute(), values, mesh_of(), spec)
        comm.Barrier()
        on_root(comm, lambda: os.utime(part, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1)))
        same_error(
            comm,
            made.execute,
            SourceError,
            "plane-1.h5' has changed since it was looked at",
            "make a new plan. Nothing was loaded",
            NAME,
        )
        check(shardload.load(whole, mesh_of(), spec, dataset=NAME, readers=readers), values, mesh_of(), spec)
        comm.Barrier()
        on_root(comm, part.unlink)
        same_error(comm, made.execute, SourceError, "plane-1.h5'", NAME)


def test_plan_executed_in_another_folder(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the file of that name in the new working folder were loaded, which was not planned, or its names were told."""
    values = ramp(cube())

    def make() -> None:
        for k, folder in enumerate(("first", "second")):
            (shared_tmp_path / folder).mkdir()
            with h5py.File(shared_tmp_path / folder / "x.h5", "w") as file:
                file["x"] = values + k
                file["x"].attrs["units"] = folder

    on_root(comm, make)
    monkeypatch.chdir(shared_tmp_path / "first")
    mesh = mesh_of()
    one, tree = shardload.plan("x.h5:/x", mesh, P("a")), shardload.plan(Path("x.h5"), mesh, P("a"), dataset={"a": "x"})
    monkeypatch.chdir(shared_tmp_path / "second")
    for x in (one.execute(), tree.execute()["a"], tree.leaves[0].execute()):
        check_shards(x, values)
    assert one.info.attrs["units"] == tree.leaves[0].info.attrs["units"] == "first"
    assert one.info.path == "x.h5"


def test_progress_is_told_and_may_fail(comm: Any, files: dict[str, str]) -> None:
    """Wrong if a caller's function that raises on one rank left the others waiting."""
    seen: list[tuple[int, int]] = []
    mesh = mesh_of()
    shardload.load(files["chunked"], mesh, P("a", "b"), dataset=NAME, progress=lambda *a: seen.append(a), readers="parallel")
    total = int(np.prod(cube())) * 4 // len(jax.devices()) * len(jax.local_devices())
    if seen:  # on rank 0 at least
        assert seen[-1] == (total, total)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen or comm.rank

    def fails(done: int, total: int) -> None:
        raise RuntimeError("no terminal")

    for readers in ("root", "parallel", "direct"):
        call = lambda r=readers: shardload.load(files["chunked"], mesh, P("a", "b"), dataset=NAME, progress=fails, readers=r)  # noqa: E731
        same_error(comm, call, shardload.PeerError, "no terminal")
    check(shardload.load(files["chunked"], mesh, P(), dataset=NAME), ramp(cube()), mesh, P())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("by", ["finalizer", "signal"])
def test_a_call_in_the_middle_of_another(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Wrong if it waited for a lock of the other one, or decoded into the memory where that has a chunk half decoded."""
    values, others, path = ramp(cube()), -1 - ramp(cube()), str(shared_tmp_path / "x.h5")

    arrays = {"x": values.astype(">f4"), "y": others.astype(">f4")}
    on_root(comm, lambda: write_hdf5(path, arrays, chunks=(2, 3, 5), compression="gzip", shuffle=True))
    own, alone = comm.Split(comm.rank), mesh_of(jax.local_devices())
    right, found, is_inside = algorithms.Chain.__init__, list[Any](), False

    def call() -> None:
        nonlocal is_inside
        is_inside = True
        try:
            found.append(shardload.load(path, alone, P(), dataset="y", comm=own))
        except ConfigError as error:
            found.append(error)

    def interrupted(self: algorithms.Chain, stages: Any, nbytes: int) -> None:
        *first, last = stages

        def undo(data: Any, out: Any) -> Any:
            if not is_inside and threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGUSR1) if by == "signal" else call()
            return last.undo(data, out)

        right(self, [*first, replace(last, undo=undo)], nbytes)

    monkeypatch.setattr(algorithms.Chain, "__init__", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda *_: call())
    try:
        with tuned(inline_nbytes=1 << 30, min_chunk_nbytes=1, batched_chunk_nbytes=0, small_nbytes=0, tiny_nbytes=0):
            x = shardload.load(path, mesh_of(), P("a"), dataset="x", readers="direct")
            signal.raise_signal(signal.SIGUSR1)  # not in the middle of any call
    finally:
        signal.signal(signal.SIGUSR1, before)
    check(x, values, mesh_of(), P("a"))
    refused, loaded = found
    assert "this thread is in a call already" in str(refused)
    check(loaded, others, alone, P())
    own.Free()


# --- beside the user's own messages -----------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("readers", ["root", "parallel"])
def test_the_users_messages_are_left_alone(comm: Any, files: dict[str, str], readers: str) -> None:
    """Wrong if a part were taken by a receive of the user's from anybody, or a message of the user's for a part."""
    from mpi4py import MPI

    mesh, values = mesh_of(), ramp(cube())
    right = (comm.rank + 1) % comm.size
    got = np.full(values.size, -1, "float32")
    waiting = comm.Irecv(got, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)  # from before ...
    check(shardload.load(files["chunked"], mesh, P("b", "a"), dataset=NAME, readers=readers), values, mesh, P("b", "a"))
    check(shardload.scatter(values, mesh, P()), values, mesh, P())
    assert not waiting.Test()
    comm.Barrier()
    mine = np.full(values.size, comm.rank, "float32")
    sends = [comm.Isend(mine, dest=right, tag=tag) for tag in (0, 1, 2, 3)]  # ... and unreceived messages with likely tags
    check(shardload.load(files["chunked"], mesh, P("b", "a"), dataset=NAME, readers=readers), values, mesh, P("b", "a"))
    waiting.Wait()
    assert (got == (comm.rank - 1) % comm.size).all()
    for tag in (1, 2, 3):
        got[...] = -1
        comm.Recv(got, source=MPI.ANY_SOURCE, tag=tag)
        assert (got == (comm.rank - 1) % comm.size).all()
    MPI.Request.Waitall(sends)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("name", "value"), [("SHARDLOAD_SHARED_MEMORY", "0"), ("SHARDLOAD_RANKS_PER_NODE", "1")])
def test_variables_that_differ_between_ranks(
    own_comm: Any, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tune: Any, name: str, value: str
) -> None:
    """A launcher may hand them to one machine alone. Wrong if one rank then waited for what the others do not do."""
    tune(worth_sharing_nbytes=1)  # these parts choose their own way: `tests.jobs.scripts.ways` counts those with 0
    for one in ("SHARDLOAD_SHARED_MEMORY", "SHARDLOAD_RANKS_PER_NODE"):
        monkeypatch.delenv(one, raising=False)
    if own_comm.rank == 1:
        monkeypatch.setenv(name, value)
    for readers in ("root", "parallel"):
        x = shardload.load(files["chunked"], mesh_of(), P("a", "b"), dataset=NAME, comm=own_comm, readers=readers, timeout=30)
        check(x, ramp(cube()), mesh_of(), P("a", "b"))


def test_communicators_that_cannot_be(comm: Any, files: dict[str, str]) -> None:
    """Wrong if a rank that is not in the communicator hung in it."""
    from mpi4py import MPI

    with pytest.raises(ConfigError, match="COMM_NULL"):
        shardload.load(files["chunked"], mesh_of(), P(), dataset=NAME, comm=MPI.COMM_NULL)
    if comm.size > 1:
        half = comm.Split(comm.rank % 2)
        inter = half.Create_intercomm(0, comm, 1 - comm.rank % 2)
        with pytest.raises(ConfigError, match="intercommunicator"):
            shardload.load(files["chunked"], mesh_of(), P(), dataset=NAME, comm=inter)
        inter.Free()
        half.Free()


def test_a_load_keeps_nothing_of_the_callers(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if a plan that is kept for the next load of its kind kept the array, the open file or the communicator."""
    mesh, values = mesh_of(), ramp(cube())
    kept = weakref.ref(values)
    told: list[Any] = [lambda done, total: None]
    heard = weakref.ref(told[0])
    shardload.load(values, mesh, P("a"), readers="parallel", progress=told.pop())
    del values
    gc.collect()
    assert kept() is None and heard() is None
    path = str(shared_tmp_path / f"{comm.rank}.h5")
    write_hdf5(path, {"x": ramp(cube())})
    os.utime(path, ns=(0, 10**18))
    shardload.load(h5py.File(path, "r")["x"], mesh, P("a"))
    gc.collect()
    h5py.File(path, "r+").close()  # which HDF5 refuses while it is open for reading
    mine = comm.Dup()
    shardload.load(ramp(cube()), mesh, P("a"), comm=mine)
    plan = shardload.plan(ramp(cube()), mesh, P("a"), comm=mine)
    check(plan.execute(), ramp(cube()), mesh, P("a"))
    group = weakref.ref(group_of(mine))
    mine.Free()
    gc.collect()
    assert group() is None, "nor does a plan that the caller keeps"
    with pytest.raises(ConfigError, match="COMM_NULL"):
        plan.execute()


# --- what `initialize` leaves behind ----------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_sigterm_ends_a_rank_and_the_coordinator_is_on_loopback() -> None:
    """Wrong if JAX's preemption service were there, which waits with SIGTERM to be asked, or anybody could come to its port."""
    assert not catches_sigterm()
    address = importlib.import_module("jax._src.distributed").global_state.coordinator_address
    assert listeners(int(address.rpartition(":")[2])) == ["127.0.0.1"]
