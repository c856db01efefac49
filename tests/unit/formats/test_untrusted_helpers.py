"""Does a file that crashes, loops or lies affect only its helper process, and is a good file read correctly by it?"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import psutil
import pytest
import zarr

from shardload.errors import ConfigError, SourceError
from shardload.formats import untrusted as untrusted
from shardload.formats.access import Access, Limits
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.format import HelperError, Source, open_alone
from shardload.formats.lookup import Finder, find_array, list_arrays, open_file, open_source
from shardload.formats.untrusted import UntrustedFile, checked, info_of
from shardload.planning.region import Region
from shardload.planning.tuning import default_tuning
from shardload.storage.local import NotAFileError, OutsideError
from tests.jobs.launch import ROOT
from tests.tiers import quick_ones
from tests.unit.fakes import fetch, reader_of, whole
from tests.unit.files import flat, read_all, spoiled, write_hdf5, write_zarr

SHAPE, CHUNKS = (7, 10), (4, 4)
DATA = flat(SHAPE, "int32")
LIMITS = Limits()
ONE = Limits(memory_nbytes=1 << 20)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No helper outlives its test, nor is one left as a zombie."""
    if "quick_helpers" in request.fixturenames:
        request.getfixturevalue("quick_helpers")  # first, since the process that it starts stays
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) == before


# --- good files


def gzip(path: Path) -> str:
    """A chunk was never written."""
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", SHAPE, "i4", chunks=CHUNKS, compression="gzip", fillvalue=-3)
        made[:4] = DATA[:4]
        made[4:, 4:] = DATA[4:, 4:]
    return str(path)


def scale_offset(path: Path) -> str:
    return write_hdf5(path, {"x": DATA}, chunks=CHUNKS, scaleoffset=0)


def virtual(path: Path) -> str:
    write_hdf5(path.with_name("part.h5"), {"x": DATA})
    layout = h5py.VirtualLayout(shape=SHAPE, dtype="i4")
    layout[...] = h5py.VirtualSource("part.h5", "x", shape=SHAPE)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)
    return str(path)


GOOD: dict[str, Callable[[Path], str]] = {
    "contiguous": lambda path: write_hdf5(path, {"x": DATA.astype(">i4")}),
    "gzip with a hole": gzip,
    "scale-offset, by the library": scale_offset,
    "virtual": virtual,
    "Zarr 3 with shards": lambda path: write_zarr(path, {"x": DATA}, chunks=CHUNKS, shards=(8, 8)),
}


@pytest.mark.usefixtures("quick_helpers")
@pytest.mark.parametrize("kind", GOOD)
def test_the_same_as_in_this_process(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a region, a chunk at the edge, a hole, or what is known of the array were another."""
    path = GOOD[kind](tmp_path / "file")
    mine = open_source(path, "x", Access(allow_filters=frozenset({"all"})))
    other = open_source(path, "/x/", access=Access(untrusted=LIMITS))
    assert (other.info, other.dtype, other.state()) == (mine.info, mine.dtype, mine.state())
    regions = (Region.whole(SHAPE), Region((3, 1), (6, 9)), Region((4, 0), (5, 4)), Region((2, 2), (2, 5)))
    for region, nbytes in itertools.product(regions, (1 << 24, 130)):
        monkeypatch.setattr(untrusted, "_PART_NBYTES", nbytes)  # two chunks at a time
        expected, found = np.empty(region.shape, "i4"), np.full(region.shape, -1, "i4")
        missing = mine.read_into(region, expected)
        assert list(other.read_into(region, found)) == list(missing)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(other.plain(region), mine.plain(region))
    if kind != "gzip with a hole":
        np.testing.assert_array_equal(read_all(other), DATA)
    mine.close()
    other.close()


@pytest.mark.usefixtures("quick_helpers")
def test_what_is_in_a_file_is_asked_of_a_helper(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "two.h5", {"a": DATA, "b": DATA})
    assert list_arrays(path, access=Access(untrusted=LIMITS)) == list_arrays(path)
    others = set(psutil.Process().children(recursive=True))
    with Finder(Access(untrusted=LIMITS), default_tuning()) as finder:
        for name in "ab":
            info, values, *_ = finder.find(path, name)
            assert info == find_array(path, name) and bytes(values) == DATA.tobytes()
        assert len(set(psutil.Process().children(recursive=True)) - others) == 1, "one helper for all arrays"
    with pytest.raises(ConfigError) as mine:
        find_array(path, "c")
    with pytest.raises(ConfigError) as other:
        find_array(path, "c", access=Access(untrusted=LIMITS))
    assert str(other.value) == str(mine.value)
    with pytest.raises(SourceError, match="there is no file") as error:
        find_array(str(tmp_path / "none.h5"), access=Access(untrusted=LIMITS))
    assert error.value.path == str(tmp_path / "none.h5")
    with h5py.File(path) as file, pytest.raises(ConfigError, match="Pass the path of the file"):
        find_array(file["a"], access=Access(untrusted=LIMITS))
    store = write_zarr(tmp_path / "bools.zarr", {"x": DATA > 3}, zarr_format=2)  # its fill value, False, means "no value"
    assert list_arrays(store, access=Access(untrusted=LIMITS)) == list_arrays(store)


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    """One after the other, by one helper: values of one answer are copied before the next question."""
    path = write_hdf5(tmp_path / "a.h5", {"x": flat((12, 16), "int32")}, chunks=(2, 4), compression="gzip")
    start = threading.Barrier(3)
    with open_file(path, Access(untrusted=LIMITS)) as file:

        def read(k: int) -> np.ndarray[Any, Any]:
            source = file.open("x")
            start.wait(60)
            found = np.empty((6, 2, 16), "i4")
            for k in range(6):
                source.read_into(Region((2 * k, 0), (2 * k + 2, 16)), found[k])
            return found.reshape(12, 16)

        with ThreadPoolExecutor(3) as pool:
            for found in pool.map(read, range(3)):
                np.testing.assert_array_equal(found, flat((12, 16), "int32"))


# --- files that crash libraries


def cut_bzip2(path: Path) -> str:
    """A chunk that ends before its stream does: the filter waits for the rest."""
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", data=np.arange(64, dtype="i4").reshape(8, 8), chunks=(4, 8), **hdf5plugin.BZip2())
        made.id.write_direct_chunk((4, 0), made.id.read_direct_chunk((4, 0))[1][:20])
    return str(path)


BAD: dict[str, tuple[Callable[[Path], str], str]] = {
    "scale-offset, all memory": (lambda path: spoiled(path, 2, 0xFFFFFFFF, scaleoffset=0), "."),
    "szip, division by zero": (lambda path: spoiled(path, 1, 0, compression="szip"), "ended by SIGFPE"),
    "SZ, exit": (lambda path: spoiled(path, 1, 0xFFFFFFFF, "f4", **hdf5plugin.SZ(absolute=0.1)), "by itself, with status 0"),
    "bzip2, without an end": (cut_bzip2, "loop without an end"),
}


@pytest.mark.usefixtures("quick_helpers")
@pytest.mark.parametrize(
    ("kind", "chunk_by_chunk"),
    quick_ones(
        [*((kind, True) for kind in BAD), ("szip, division by zero", False), ("scale-offset, all memory", False)],
        *((kind, True) for kind in BAD),
    ),
)
def test_a_chunk_that_harms_whoever_decodes_it(
    kind: str, chunk_by_chunk: bool, tmp_path: Path, tune: Callable[..., Any]
) -> None:
    """In this process each of them would be the end of this test, and of all that come after."""
    tune(min_chunk_nbytes=0 if chunk_by_chunk else 1 << 30)
    make, words = BAD[kind]
    path = make(tmp_path / "bad.h5")
    opening = closing(open_source(path, "x", access=Access(untrusted=Limits(cpu_seconds=0.5))))
    with opening as source, reader_of(source) as reader, pytest.raises(SourceError, match=words) as error:  # type: ignore[arg-type]
        fetch(reader, whole(Region((4, 0), (8, 8)), rank=1))
    assert error.value.chunk == (1, 0) and error.value.dataset == "/x" and error.value.path == path
    assert f"chunk (1, 0) of '/x' in '{path}'" in str(error.value)


@pytest.mark.usefixtures("quick_helpers")
def test_a_helper_that_was_lost_is_replaced_a_few_times(tmp_path: Path) -> None:
    path = spoiled(tmp_path / "bad.h5", 1, 0, compression="szip")
    with h5py.File(path, "a") as file:  # the second chunk as it is, without the filter
        file["x"].id.write_direct_chunk((4, 0), bytes(range(128)), 1)
    source = open_source(path, "x", access=Access(untrusted=ONE))
    out = np.empty((4, 8), "i4")
    for _ in range(3):
        with pytest.raises(HelperError, match="SIGFPE"):
            source.read_into(Region((0, 0), (4, 8)), out)
        if _ < 2:
            source.read_into(Region((4, 0), (8, 8)), out)
            assert out.tobytes() == bytes(range(128))
    with pytest.raises(HelperError, match=r"3 helper processes were lost in this file before; of the last: .*SIGFPE"):
        source.read_into(Region((4, 0), (8, 8)), out)
    assert source.state() is None
    source.close()


@pytest.mark.usefixtures("quick_helpers")
def test_an_error_of_a_helper_keeps_no_memory(tmp_path: Path) -> None:
    """A caller that goes on after it had all of the load's buffers until the next collection."""
    file, out = UntrustedFile(write_hdf5(tmp_path / "a.h5", {"x": DATA}), Access(untrusted=LIMITS)), np.empty(SHAPE, "i4")
    kept = weakref.ref(out)
    gc.disable()
    try:
        with suppress(KeyError):
            file.ask(print, "plain", (0, 0), SHAPE, dataset="no", values=out)
        del out
        assert kept() is None
    finally:
        gc.enable()
        file.close()


def test_memory_is_limited(tmp_path: Path) -> None:
    """A chunk of 512 MiB where a helper has 1 MiB and its base: the values do not fit. As many in small chunks do."""
    path, shape = str(tmp_path / "a.zarr"), (512, 1 << 20)
    for name, chunks in (("large", shape), ("small", (1, 1 << 20))):
        zarr.open_group(path).create_array(name, shape=shape, chunks=chunks, dtype="u1", fill_value=3)
    with open_file(path, Access(untrusted=ONE)) as file:
        with pytest.raises(HelperError, match=r"more memory than a helper process may have .1\.0 MiB"):
            file.open("large").read_into(Region.whole(shape), np.empty(shape, "u1"))
        small, out = file.open("small"), np.empty((40, 1 << 20), "u1")
        missing = small.read_into(Region((0, 0), out.shape), out)
        assert (out == 3).all() and len(missing) == 40


def test_a_helper_knows_what_will_be_read(tmp_path: Path) -> None:
    """Wrong if it listed the places of all chunks of a large array, for which it has no memory, and none were read."""
    n = 1 << 15
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.create_dataset("x", (n, n), "u1", chunks=(4, 4), maxshape=(None, n))[:4, :8] = 7
    with closing(open_source(tmp_path / "a.h5", "x", Access(untrusted=LIMITS))) as source:
        region = Region((0, 0), (40, 40))
        source.expect(region)
        found = np.zeros(region.shape, "u1")
        source.read_into(region, found)
    assert found[:4, :8].min() == 7 and found.sum() == 32 * 7


@pytest.mark.usefixtures("quick_helpers")
def test_a_way_out_is_told_as_in_this_process(tmp_path: Path) -> None:
    """Wrong if it came as any OSError, which is called damage."""
    path = write_zarr(tmp_path / "a.zarr", {"x": np.arange(8)}, chunks=(4,))
    chunk = tmp_path / "a.zarr" / "x" / "c" / "1"
    for there, kind in ((tmp_path / "stolen", OutsideError), (tmp_path / "a.zarr" / "x", NotAFileError)):
        chunk.rename(tmp_path / "stolen") if not chunk.is_symlink() else chunk.unlink()
        chunk.symlink_to(there)
        with (
            closing(open_source(path, "x", access=Access(untrusted=ONE))) as source,
            pytest.raises(OSError, match="outside the store" if kind is OutsideError else "expected a file") as error,
        ):
            source.read_into(Region((4,), (8,)), np.empty(4, "i8"))
        assert type(error.value) is kind


# --- helpers that lie

INFO = ArrayInfo("f.h5", "/x", "HDF5", SHAPE, "int32", CHUNKS, "gzip")

FAKE = """
import json, os, socket, struct, sys, time
channel = socket.socket(fileno=0)
requests = channel.makefile("rb")
def receive():
    line = requests.readline()
    return json.loads(line) if line else None
def raw(data, nbytes=None):
    channel.sendall((len(data) if nbytes is None else nbytes).to_bytes(8, "little") + data)
def say(value):
    raw(json.dumps({"value": value}).encode())
def read(*numbers, kind="i"):
    say([]), channel.sendall(struct.pack(f"<{len(numbers)}{kind}", *numbers))
say(None)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Helpers from now on do this, one for each request."""

    def make(*actions: str) -> None:
        steps = "".join(f"request = receive()\n{action}\n" for action in actions)
        (tmp_path / "fake.py").write_text(f"{FAKE}{steps}receive()\n")
        monkeypatch.setattr(untrusted, "SCRIPT", str(tmp_path / "fake.py"))

    return make


def opened(limits: Limits) -> Source:
    """An array whose helper is a fake."""
    return open_alone(UntrustedFile("f.h5", Access(untrusted=limits)), "/x")


def opening(info: ArrayInfo, state: str = "[1, 2]") -> list[str]:
    """What a helper says when an array is opened."""
    return [f"say({json.loads(json.dumps(info.to_dict()))!r})", f"say({state})"]


OPEN = opening(INFO)


@pytest.mark.usefixtures("quick_helpers")
@pytest.mark.parametrize(
    "lie",
    [
        *(f"say({n})" for n in ("7", "True", "None", "'1'", "[1]", "[[1]]", "[[1, 1, 1]]", "[['1', 1]]", "[[1.0, 1]]")),
        "raw(b'{}')",
        "say([[2, 0]])",
        "say([[0, -1]])",
        "say([[0, True]])",
        "say([[0, 2], [0, 2]])",
        "raw(b'[]')",
        "raw(b'{')",
        "raw(bytes([255]))",
        "raw(b'[' * 500_000)",
        "raw(b'', 2**32 - 1)",
        "raw(b'{}', 2**63)",
        "channel.sendall(bytes(3)); os._exit(0)",
        "os._exit(3)",
        """raw(b'{"error": [], "text": ""}')""",
        """raw(b'{"error": "OSError"}')""",
        """raw(b'{"error": "MemoryError", "text": ""}')""",
    ],
)
def test_an_answer_that_cannot_be_right(lie: str, fake: Callable[..., None]) -> None:
    fake(*OPEN, f"{lie}\nchannel.sendall(bytes(4 * 70))")
    source = opened(ONE)
    with pytest.raises(HelperError):
        source.read_into(Region.whole(SHAPE), np.empty(SHAPE, "i4"))
    assert not source._file.is_running, "who lies once is asked no more"
    source.close()


@pytest.mark.usefixtures("quick_helpers")
@pytest.mark.parametrize("state", ["'x'", "[1.5, 2]", "[True]", "[2**80]", "[0] * 9", "{}"])
def test_a_state_that_cannot_be_right(state: str, fake: Callable[..., None]) -> None:
    fake(*opening(INFO, state))
    with pytest.raises(SourceError, match="state"):
        open_source("f.h5", "x", access=Access(untrusted=ONE))


@pytest.mark.usefixtures("quick_helpers")
def test_another_array_than_the_one_that_was_named(fake: Callable[..., None]) -> None:
    fake(*OPEN)
    with pytest.raises(SourceError, match=r"'/y' in 'f.h5' cannot be opened: .*cannot be right: the array '/x'"):
        open_source("f.h5", "y", access=Access(untrusted=ONE))
    fake("say(None)")
    with pytest.raises(SourceError, match=r"cannot be opened: .*cannot be right"):
        find_array("f.h5", "x", access=Access(untrusted=ONE))


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"shape": value}
            for value in (None, 7, [7, -1], [7, 2.0], [7, True], [2**63, 1], [2**40, 2**40], ["7", 1], [1] * 65)
        ),
        *({"chunks": value} for value in ([4], [4, 0], [4, 4, 4], [4, "4"], [2**62, 4], "44")),
        *({"shards": value} for value in ([8], [0, 8])),
        *({"dtype": value} for value in (None, "object", "O", "V8", "S4", ">i4", "datetime64", "i4,i4", "no", "f" * 99, "int")),
        *({"dataset": value} for value in (None, 1, ["/x"])),
        *({"nbytes_stored": value} for value in (-1, 1.5, "1", 2**70)),
        *({"attributes": value} for value in (None, [], "a")),
        *({name: 1} for name in ("format", "codec", "refused")),
    ],
    ids=str,
)
def test_a_description_that_cannot_be_right(wrong: dict[str, Any]) -> None:
    good = json.loads(json.dumps(INFO.to_dict()))
    assert info_of(good, "f.h5") == INFO
    with pytest.raises(HelperError, match="cannot be right"):
        checked(lambda answer: info_of(answer, "f.h5"), good | wrong)
    with pytest.raises(HelperError, match="cannot be right"):
        checked(lambda answer: info_of(answer, "f.h5"), [good])


def test_what_is_printed_cannot_move_a_terminal_and_a_path_is_not_the_helpers_to_say() -> None:
    good = json.loads(json.dumps(INFO.to_dict()))
    found = info_of(good | {"path": "/etc/passwd", "codec": "\x1b[2J", "attributes": {"a\n": ["\x07"]}}, "f.h5")
    assert (found.path, found.codec, found.attributes) == ("f.h5", "\\x1b[2J", {"a\\n": ["\\x07"]})


@pytest.mark.usefixtures("quick_helpers")
def test_truth_that_is_neither(fake: Callable[..., None]) -> None:
    """As in this process: it is 1 where it is not 0, before NumPy or JAX see it."""
    info = json.loads(json.dumps(dataclasses.replace(INFO, shape=(3, 1), chunks=(3, 1), dtype="bool").to_dict()))
    read = "read(0, 2, 255, kind='B')"
    fake(*opening(ArrayInfo.from_dict(info)), read, read)
    with closing(opened(ONE)) as source:
        for values in (read_all(source), source.plain(Region.whole((3, 1)))):
            assert values.view("u1").ravel().tolist() == [0, 1, 1]


@pytest.mark.usefixtures("quick_helpers")
def test_what_a_library_printed_last_is_told(fake: Callable[..., None]) -> None:
    fake("os.write(2, b'one\\n\\x1b[2J two\\n\\n'); os._exit(7)")
    with pytest.raises(SourceError, match=r"with status 7; it had printed '\\x1b\[2J two'"):
        open_source("f.h5", "x", access=Access(untrusted=ONE))


# --- when helpers end


@pytest.mark.usefixtures("quick_helpers")
@pytest.mark.parametrize(
    "action", ["time.sleep(600)", "while True: channel.send(bytes(1)); time.sleep(0.1)"], ids=["none", "slow"]
)
def test_no_answer_in_time(action: str, fake: Callable[..., None]) -> None:
    """Wrong if a byte now and then counted as an answer."""
    fake(*OPEN, f"channel.sendall((1 << 20).to_bytes(8, 'little'))\n{action}")
    with (
        closing(opened(Limits(1 << 20, seconds=5.0))) as source,
        pytest.raises(HelperError, match="no answer for 5 s"),
    ):
        read_all(source)


def test_closing_ends_a_helper_that_is_at_work_for_another_thread(fake: Callable[..., None], tmp_path: Path) -> None:
    """As after a stall, or Ctrl-C in the thread that calls MPI. Wrong if the thread waited on, or the next had a turn."""
    os.mkfifo(tmp_path / "begun")
    fake(*OPEN, f"open({str(tmp_path / 'begun')!r}, 'w').close(); time.sleep(600)")
    source = opened(ONE)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(read_all, source)
        (tmp_path / "begun").read_bytes()  # waits for the helper
        waiting = pool.submit(read_all, source)
        source.close()
        for future in (reading, waiting):
            assert isinstance(future.exception(60), HelperError)
    with pytest.raises(HelperError, match="the file was closed"):
        read_all(source)
    source.close()


def test_ctrl_c(fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fake(*OPEN, "os.kill(os.getppid(), 2); time.sleep(600)")
    source = opened(ONE)
    with pytest.raises(KeyboardInterrupt):
        read_all(source)
    assert not source._file.is_running
    source.close()


def test_a_thread_that_ends_takes_no_helper_with_it() -> None:
    """The system ends a process that asked for it with the thread that started it, not with that thread's process."""
    file = UntrustedFile("none.h5", Access(untrusted=LIMITS))
    with ThreadPoolExecutor(1) as pool, pytest.raises(SourceError, match="there is no file"):
        pool.submit(file.list_arrays).result()
    with pytest.raises(SourceError, match="there is no file"):
        file.open("/x")
    for number in (signal.SIGINT, signal.SIGTERM):  # for all processes of a job, which are the ranks' to answer
        os.kill(file._process.pid, number)
    with pytest.raises(SourceError, match="there is no file"):
        file.open("/x")
    assert file._n_started == 1
    file.close()


def test_a_helper_that_cannot_start(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., None], tmp_path: Path) -> None:
    """The file is not to blame."""
    fake()
    (tmp_path / "fake.py").write_text("raise RuntimeError('no NumPy here')")
    with pytest.raises(ConfigError, match=r"could not be started here.*no NumPy here"):
        find_array("f.h5", access=Access(untrusted=LIMITS))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="could not be started here"):
        find_array("f.h5", access=Access(untrusted=LIMITS))


def test_a_process_without_standard_streams_can_start_helpers(tmp_path: Path) -> None:
    """Whatever it opens has the numbers 0, 1 and 2, which in the helper are those of the streams."""
    script = (
        "import os, sys\nfrom shardload.formats.access import Access, Limits\n"
        "from shardload.formats.lookup import list_arrays\nfor number in range(3):\n    os.close(number)\n"
        f"found = list_arrays({gzip(tmp_path / 'a.h5')!r}, access=Access(untrusted=Limits()))\n"
        f"os._exit(42 if [info.shape for info in found] == [{SHAPE}] else 43)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120, cwd=ROOT, capture_output=True).returncode == 42


def test_a_helper_takes_itself_for_no_rank(fake: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "PMI_RANK",
        "PMIX_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "SLURM_PROCID",
        "MPI_LOCALRANKID",
        "PYTHONPATH",
        "AWS_SECRET_ACCESS_KEY",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/hdf5")
    out = str(tmp_path / "environ")
    fake(f"open({out!r}, 'w').write(json.dumps([dict(os.environ), os.listdir('/proc/self/fd')])); say([])")
    assert list_arrays("f.h5", access=Access(untrusted=LIMITS)) == []
    environ, descriptors = json.loads(Path(out).read_text())
    assert environ["LD_LIBRARY_PATH"] == "/opt/hdf5" and environ["MPI4PY_RC_INITIALIZE"] == "0"
    assert not [name for name in environ if name.startswith(("PMI", "OMPI", "SLURM", "MPI_", "PYTHONPATH", "AWS"))]
    assert len(descriptors) <= 7, "0, 1, 2, the socket again, what is written, and the folder that is listed"


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["exit", "SIGKILL"])
def test_a_process_that_ends_leaves_no_helper(end: str) -> None:
    """Wrong if a rank that dies left one behind, which a batch system then waits for."""
    script = (
        "import os, signal, sys\nfrom shardload.formats.access import Access, Limits\n"
        "from shardload.formats.untrusted import UntrustedFile\n"
        "file = UntrustedFile('f.h5', Access(untrusted=Limits()))\nfile.state()\nprint(file._process.pid, flush=True)\n"
        f"os.kill(file._process.pid, signal.SIGSTOP)  # it notices nothing, as in the loop of a filter\n{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == (0 if end == "pass" else -signal.SIGKILL), done.stderr
    try:
        helper = psutil.Process(int(done.stdout))
    except psutil.NoSuchProcess:
        return
    helper.wait(60)  # the kernel has killed it, if it is still there
