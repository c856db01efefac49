"""Can a file lead out of its folder, by any kind of name? And is a pipe opened without waiting?

One file is made anew for each case, with names put together from what HDF5, the system or this package may take for something
else. What is loaded must never have a value of the files outside, nor a fill value in the place of a source that is not there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import event, given
from hypothesis import strategies as st

from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access
from shardload.formats.hdf5 import file as hdf5_module
from shardload.formats.hdf5 import links as hdf5_links
from shardload.formats.lookup import find_array, list_arrays, open_source
from shardload.formats.zarr import store as zarr_store
from shardload.planning.region import Region
from shardload.storage.local import OutsideError
from tests.tiers import examples
from tests.unit.files import flat, load_all, read_all, write_hdf5, write_zarr

N = 4
FILL, SECRET = -5, 0x5EC2E7
GOOD = range(1, 1000)  # what the files inside hold

NAMES = ("x", "x0", "x%", "x%b", "x%%b", "x%0", "%b", "%", "g/x", "g/x%b", "..", "ü")
FILES = ("in.h5", "p0.h5", "p%b.h5", "p%.h5", "p.h5", "%b", "deeper/in.h5", "deeper/p0.h5")


def write_all(folder: Path, value: int, names: tuple[str, ...] = FILES) -> None:
    """Files of all these names, each with datasets of all those, and values of their own."""
    for k, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        with h5py.File(folder / name, "w") as file:
            for j, inside in enumerate(NAMES):
                file[inside] = np.full(N, value if value == SECRET else 1 + k * len(NAMES) + j, "i8")
    for name in ("raw", "raw%b", "deeper/raw"):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(np.full(N, min(value, 999 if value != SECRET else SECRET), "i8").tobytes())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the file; beside it one that must not be read, which is the working folder, too."""
    top = tmp_path_factory.mktemp("links")
    write_all(top / "home", 1)
    write_all(top / "else", SECRET, (*FILES, "s.h5", "broken.h5"))
    (top / "home" / "broken.h5").write_text("no HDF5, unlike the one in the working folder")
    (top / "home" / "door").symlink_to("../else")
    (top / "home" / "door.h5").symlink_to("../else/in.h5")
    (top / "home" / "window.h5").symlink_to("deeper/in.h5")
    os.mkfifo(top / "home" / "pipe.h5")
    before = os.getcwd()
    os.chdir(top / "else")
    yield top / "home"
    os.chdir(before)


def names_of(*known: str) -> st.SearchStrategy[str]:
    """Known names, their relatives with percent signs, and what is put together from parts."""
    parts = (
        *("..", ".", "", "home", "else", "deeper", "door", "x", "in.h5", "s.h5", "\udcff"),
        *("%", "%%", "%b", "%%b", "%%%b", "%d"),
    )
    made = st.lists(st.sampled_from(parts), min_size=1, max_size=4).map("/".join)
    doubled = st.sampled_from(known).map(lambda name: name.replace("%", "%%"))
    return st.one_of(st.sampled_from(known), doubled, made)


file_names = names_of(
    *FILES, "broken.h5", "door.h5", "window.h5", "pipe.h5", "nothing.h5", "../else/in.h5", "../else/p%b.h5", "door/in.h5",
    "s.h5", "../home/in.h5", ".", "evil.h5", "deeper", "/TOP/else/in.h5", "/TOP/home/in.h5", "/TOP/home/broken.h5",
    "/nowhere/s.h5", "p%b.h5", "deeper/p%b.h5",
)  # fmt: skip
inside_names = names_of(*NAMES, "a", "a%b", "a%%b", "b", "b%b", "s\udcff", "l/x", "/x", "x/", "//x", "./x", "nothing")
raw_names = names_of(
    "raw", "raw%b", "deeper/raw", "/TOP/home/raw", "/TOP/else/raw", "../home/raw", "../else/raw", "pipe.h5", "s.h5"
)
kinds = st.sampled_from(["soft", "external", "storage", "virtual", "pattern", "unlimited", "group", "data"])
made_names = ("a", "a%b", "a0", "b", "b%b", "s\udcff", "l", "v")
cases = st.dictionaries(
    st.sampled_from(made_names), st.tuples(kinds, file_names, inside_names, raw_names), min_size=1, max_size=5
)


def make(file: h5py.File, name: str, kind: str, other: str, inside: str, raw: str) -> None:
    """One link or dataset; what h5py does not write is left out."""
    top = os.path.dirname(os.path.dirname(file.filename))
    stored, other, raw = os.fsencode(name), other.replace("/TOP", top), raw.replace("/TOP", top)
    whole = h5py.h5s.create_simple((N,), (h5py.h5s.UNLIMITED,))
    if kind == "soft":
        file.id.links.create_soft(stored, os.fsencode(inside))
    elif kind == "external":
        file.id.links.create_external(stored, os.fsencode(other), os.fsencode(inside))
    elif kind == "group":
        file.create_group(stored).create_dataset("x", data=np.full(N, 999, "i8"))
    elif kind == "data":
        file.create_dataset(stored, data=np.full(N, 998, "i8"))
    else:
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_fill_value(np.array(FILL, "i8"))
        source = h5py.h5s.create_simple((N,))
        if kind == "storage":
            creation.set_external(os.fsencode(raw), 0, 8 * N)
            whole = h5py.h5s.create_simple((N,))
        elif kind == "virtual":
            creation.set_virtual(h5py.h5s.create_simple((N,)), os.fsencode(other), os.fsencode(inside), source)
            whole = h5py.h5s.create_simple((N,))
        elif kind == "pattern":
            selected = whole.copy()
            selected.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (N,), (N,))
            creation.set_virtual(selected, os.fsencode(other), os.fsencode(inside), source)
        else:
            selected, endless = whole.copy(), h5py.h5s.create_simple((N,), (h5py.h5s.UNLIMITED,))
            for space in (selected, endless):
                space.select_hyperslab((0,), (1,), (1,), (h5py.h5s.UNLIMITED,))
            creation.set_virtual(selected, os.fsencode(other), os.fsencode(inside), endless)
        h5py.h5d.create(file.id, stored, h5py.h5t.NATIVE_INT64, whole, creation)


def load(path: Path, name: str) -> np.ndarray[Any, Any] | None:
    """The values; None where there is an error of ours."""
    try:
        source = open_source(path, find_array(path, name).dataset)
    except (SourceError, ConfigError):
        return None
    with contextlib.closing(source), contextlib.suppress(OSError):
        return read_all(source)
    return None


@examples(int(os.environ.get("SHARDLOAD_FUZZ_CASES", "250")), derandomize=True)
@given(cases)
def test_no_name_leads_outside_and_no_fill_value_replaces_a_source(home: Path, case: dict[str, tuple[str, ...]]) -> None:
    path = home / "evil.h5"
    with h5py.File(path, "w", libver="latest") as file:
        for name, more in case.items():
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                make(file, name, *more)
    for name in (*case, "l/x", "l/x0"):
        values = load(path, name)
        if values is not None:
            event(f"{case.get(name, ('below a group',))[0]} loaded")  # shown by --hypothesis-show-statistics
            assert SECRET not in values and FILL not in values and 0 not in values, (name, values)
            assert set(values.tolist()) <= set(GOOD)
    listed = {info.dataset: info.refused for info in list_arrays(str(path))}
    assert set(listed) <= {f"/{name}" for name in (*made_names, "l/x", *(f"{name}/x" for name in made_names))}


# --- HDF5: names that were taken for something else


def refused(path: Path, name: str, match: str) -> None:
    for attempt in (find_array, open_source):
        with pytest.raises(SourceError, match=match):
            attempt(str(path), name)


def virtual(file: h5py.File, name: str, other: str, inside: str) -> None:
    make(file, name, "virtual", other, inside, "")


def test_a_percent_sign_in_the_name_of_a_source(home: Path) -> None:
    """HDF5 reads ``%%b`` as the name ``%b``, not as a pattern."""
    with h5py.File(home / "a.h5", "w", libver="latest") as file:
        file["y%b"] = file["z%"] = np.arange(1, N + 1)
        virtual(file, "gone", "part%%b.h5", "x")
        virtual(file, "good", ".", "y%%b")
        virtual(file, "end", "a.h5", "z%%")
        make(file, "numbers", "pattern", "p%b.h5", "x", "")
        make(file, "inside", "pattern", "in.h5", "x%b", "")
    refused(home / "a.h5", "/gone", r"'part%b.h5', which is not there .* fill values")
    refused(home / "a.h5", "/numbers", r"a pattern of files or datasets, 'p%b.h5', which is not supported.* shardload join")
    refused(home / "a.h5", "/inside", r"a pattern of files or datasets, 'x%b', which is not supported")
    for name in ("/good", "/end"):
        values = load(home / "a.h5", name)
        with h5py.File(home / "a.h5") as file:
            np.testing.assert_array_equal(values, file[name][...])


def test_links_with_names_that_are_no_text(home: Path) -> None:
    with h5py.File(home / "a.h5", "w") as file:
        file.id.links.create_soft(b"out", b"\xff\xfe")
        file.id.links.create_external(b"\xff\xfe", b"../else/in.h5", b"/x")
        file.id.links.create_soft(b"in", b"g\xff/\xfd")
        made = h5py.h5g.create(file.id, b"g\xff")
        h5py.h5d.create(made, b"\xfd", h5py.h5t.NATIVE_INT64, h5py.h5s.create_simple((N,)))
        virtual(file, "over", ".", "out")
    refused(home / "a.h5", "/out", r"'/\\udcff\\udcfe' in .* is a link to '/x' in '../else/in.h5', which is outside")
    refused(home / "a.h5", "/over", "outside the folder")
    assert {info.dataset for info in list_arrays(str(home / "a.h5"))} == {"/g\udcff/\udcfd", "/over"}
    for name in ("/in", "/g\udcff/\udcfd"):
        np.testing.assert_array_equal(load(home / "a.h5", name), np.zeros(N))


def test_where_the_first_place_holds_no_file_that_can_be_opened(home: Path) -> None:
    """Some versions of HDF5 go on to the next place: here the working folder, which is outside."""
    with h5py.File(home / "a.h5", "w") as file:
        file["beside"] = h5py.ExternalLink("broken.h5", "/x")
        file["absolute"] = h5py.ExternalLink(str(home / "broken.h5"), "/x")
        virtual(file, "virtual", "broken.h5", "x")
    for name in ("/beside", "/absolute", "/virtual"):
        refused(home / "a.h5", name, "cannot be opened")


def test_prefixes_lead_nowhere_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(home / "a.h5", "w") as file:
        file["link"] = h5py.ExternalLink("in.h5", "/x")
        virtual(file, "virtual", "in.h5", "x")
    for name, variable in (("/link", "HDF5_EXT_PREFIX"), ("/virtual", "HDF5_VDS_PREFIX")):
        monkeypatch.setenv(variable, f"/nowhere:{home.parent / 'else'}")
        refused(home / "a.h5", name, "outside the folder")
        deeper = 1 + FILES.index("deeper/in.h5") * len(NAMES) + np.zeros(N)
        monkeypatch.setenv(variable, "/nowhere:" + str(home / "deeper"))
        np.testing.assert_array_equal(load(home / "a.h5", name), deeper)
    monkeypatch.setenv("HDF5_VDS_PREFIX", "${ORIGIN}deeper")  # HDF5 puts the slash
    np.testing.assert_array_equal(load(home / "a.h5", "/virtual"), deeper)
    of_h5py = f"import h5py; print(h5py.File({str(home / 'a.h5')!r})['virtual'][0])"  # it reads the variable when it starts
    assert subprocess.check_output([sys.executable, "-c", of_h5py], text=True) == f"{deeper[0]:.0f}\n"


def test_a_file_that_is_exchanged_for_a_link_before_hdf5_opens_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if only the name were looked at, and that before the file is open."""
    with h5py.File(home / "swapped.h5", "w") as file:
        file["x"] = np.full(N, 1, "i8")
    with h5py.File(home / "a.h5", "w") as file:
        file["link"] = h5py.ExternalLink("swapped.h5", "/x")
        virtual(file, "virtual", "swapped.h5", "x")
    for name in ("/link", "/virtual"):
        np.testing.assert_array_equal(load(home / "a.h5", name), np.ones(N))
    open_to_read, kept = hdf5_links.open_to_read, (home / "swapped.h5").read_bytes()

    def swap(path: str) -> Any:
        os.unlink(path)
        os.symlink(home.parent / "else" / "in.h5", path)
        return open_to_read(path)

    monkeypatch.setattr(hdf5_links, "open_to_read", swap)
    for name in ("/link", "/virtual"):
        refused(home / "a.h5", name, "outside the folder")
        (home / "swapped.h5").unlink()
        (home / "swapped.h5").write_bytes(kept)


def test_no_name_of_hdf5_leads_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this package understands a name in another way than HDF5, the library opens nothing all the same."""
    with h5py.File(home / "a.h5", "w", libver="latest") as file:
        virtual(file, "v", "in.h5", "x")
        make(file, "longer", "unlimited", "in.h5", "x", "")
    monkeypatch.setattr(hdf5_links.SearchPath, "of", lambda _, name: str(home / name))
    monkeypatch.setenv("HDF5_VDS_PREFIX", str(home.parent / "else"))
    with contextlib.closing(open_source(home / "a.h5", "/v")) as source:
        for values in (read_all(source), source.plain(Region.whole((N,)))):
            np.testing.assert_array_equal(values, np.ones(N))
    refused(
        home / "a.h5", "/longer", "a virtual dataset that grows with its parts, .*shardload join"
    )  # HDF5 opens them for that


def test_the_working_folder_is_changed_under_an_open_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(home / "a.h5", "w") as file:
        virtual(file, "v", "in.h5", "x")
    monkeypatch.chdir(home)
    with h5py.File("a.h5") as file:
        monkeypatch.chdir(home.parent / "else")
        np.testing.assert_array_equal(read_all(open_source(file["v"], "/v")), np.ones(N))
    monkeypatch.chdir(home)
    with contextlib.closing(open_source("a.h5", "/v")) as source:
        monkeypatch.chdir(home.parent / "else")
        np.testing.assert_array_equal(read_all(source), np.ones(N))


# --- what is no file


KINDS = {"a pipe": "fifo", "a socket": "socket", "a folder": "folder", "a device": "/dev/zero"}


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(path.parent):  # a path may have 107 bytes there
            bound.bind(path.name)
    else:
        path.symlink_to(kind)


@pytest.mark.parametrize("told", KINDS)
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, told: str) -> None:
    kind, expected = KINDS[told], f"{told}, expected a file"
    (tmp_path / "h").mkdir()
    for name in ("f", "f.h5", "f.zip"):
        replace(tmp_path / "h" / name, kind)
        for attempt in (find_array, list_arrays):
            with pytest.raises(SourceError, match=f"is {expected}|is a folder, but not a Zarr store"):
                attempt(str(tmp_path / "h" / name))
    replace(tmp_path / "h/o", kind)
    with h5py.File(tmp_path / "h/a.h5", "w", libver="latest") as file:
        for name in ("external", "virtual"):
            make(file, name, name, "o", "x", str(tmp_path / "h/o"))
    for name in ("/external", "/virtual"):
        with pytest.raises(SourceError, match=expected):
            open_source(tmp_path / "h/a.h5", name, Access(allow_external=True))
    assert all(expected in str(info.refused) for info in list_arrays(str(tmp_path / "h/a.h5"), Access(allow_external=True)))
    for number, keys in ((2, ("a/.zarray", "a/.zattrs", ".zgroup")), (3, ("a/zarr.json", "zarr.json"))):
        for key in keys:
            path = Path(write_zarr(tmp_path / f"{number}{key.replace('/', '-')}.zarr", {"a": flat((4, 4))}, number))
            replace(path / key, kind)
            if "/" in key:
                with pytest.raises(SourceError, match=expected):
                    find_array(str(path), "a", Access(allow_external=True))
                assert expected in str(list_arrays(str(path), Access(allow_external=True))[0].refused)
            else:
                with pytest.raises(SourceError, match=expected):
                    find_array(str(path), "/", Access(allow_external=True))
    for name, more in (("chunk", {}), ("order", {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]})):
        path = Path(write_zarr(tmp_path / f"{name}.zarr", {"a": flat((4, 4))}, 3, **more))
        replace(path / "a/c/1/0", kind)
        with pytest.raises(OSError, match=expected):
            load_all(path, "a", Access(allow_external=True))


# --- Zarr: URLs


def test_urls_of_this_machine_are_paths(tmp_path: Path) -> None:
    """Their symbolic links are looked at as those of any folder; fsspec is not needed."""
    path = Path(write_zarr(tmp_path / "a.zarr", {"a": flat((4, 4))}))
    write_hdf5(tmp_path / "a.h5", {"x": flat((4,))})
    for scheme in ("file", "local", "FILE"):
        assert find_array(f"{scheme}://{tmp_path}/a.h5:/x").path == f"{tmp_path}/a.h5"
        assert list_arrays(f"{scheme}://{path}")[0].dataset == "/a"
        np.testing.assert_array_equal(load_all(f"{scheme}://{path}", "a"), flat((4, 4)))
    (path / "a/c/1/0").rename(tmp_path / "stolen")
    (path / "a/c/1/0").symlink_to(tmp_path / "stolen")
    with pytest.raises(OutsideError, match="outside the store"):
        load_all(f"file://{path}", "a")
    np.testing.assert_array_equal(load_all(f"file://{path}", "a", Access(allow_external=True)), flat((4, 4)))


def test_stores_of_other_libraries() -> None:
    """It is not known where they read: fsspec has folders, references and caches behind any number of layers."""
    array = SimpleNamespace(store=zarr.storage.FsspecStore.__new__(zarr.storage.FsspecStore))
    with pytest.raises(
        SourceError, match=r"a FsspecStore was handed in, which may read files anywhere\. .* allow_external=True"
    ):
        zarr_store.watched(array)


class Elsewhere(zarr.storage.WrapperStore[Any]):
    """In place of stores that keep chunks in another place: of zarr-python's own cache, or a program's."""


@pytest.mark.parametrize("wrap", [zarr.storage.LoggingStore, zarr.storage.WrapperStore, Elsewhere])
def test_links_behind_a_wrapped_store_that_was_handed_in(tmp_path: Path, wrap: Any) -> None:
    data = flat((4,), "int32")
    for name in ("in", "else"):
        write_zarr(tmp_path / f"{name}.zarr", {"a": data}, 2, chunks=(2,), compressors=None)
    chunk = tmp_path / "in.zarr" / "a" / "0"
    chunk.unlink()
    chunk.symlink_to("../../else.zarr/a/0")
    array = zarr.open_array(wrap(zarr.storage.LocalStore(tmp_path / "in.zarr", read_only=True)), path="a", mode="r")
    with pytest.raises((SourceError, OutsideError), match=r"outside the store|may read files anywhere"):
        read_all(open_source(array, "/a"))
    np.testing.assert_array_equal(read_all(open_source(array, "/a", Access(allow_external=True))), data)
    chunk.unlink()
    chunk.write_bytes((tmp_path / "else.zarr" / "a" / "0").read_bytes())
    if wrap is not Elsewhere:
        np.testing.assert_array_equal(read_all(open_source(array, "/a")), data)
    memory = zarr.create_array(zarr.storage.LoggingStore(zarr.storage.MemoryStore()), shape=(4,), chunks=(2,), dtype="i4")
    memory[:] = data
    np.testing.assert_array_equal(read_all(open_source(memory, "/")), data)


# --- names, and many of them


def test_escape_codes_in_names_are_shown_and_not_printed(tmp_path: Path) -> None:
    bad, shown = "rho\x1b[2J\nerror: \u202e", r"rho\x1b[2J\nerror: \u202e"
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file[bad], file["b"] = np.arange(3), np.arange(4)
        file["soft"] = h5py.SoftLink("/\x1b]0;title\x07\n")
        file["out"] = h5py.ExternalLink("../\x1b[1m", "/x")
        virtual(file, "v", "gone\n\x1b[1m.h5", "x")
    path = str(tmp_path / "a.h5")
    messages = [str(find_array(path, bad))]
    for name in (None, "/nothing", "/soft", "/out", "/v"):
        with pytest.raises((ConfigError, SourceError)) as caught:
            find_array(path, name)
        messages.append(str(caught.value))
    assert all(message.isprintable() for message in messages), messages
    assert shown in messages[0] and shown in messages[1] and r"\x1b]0;title\x07" in messages[3]
    assert str(SourceError("a\x1b\nb\tc\x85")) == "a\\x1b\nb\tc\\x85"


def test_a_name_among_many_is_looked_up_and_few_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for k in range(300):
            file.create_dataset(f"g{k // 100}/d{k:03}", (2,), "f4")
        file.create_dataset("z/last", (3,), "f4")
    described: list[str] = []
    plain = hdf5_module.describe
    monkeypatch.setattr(hdf5_module, "describe", lambda *args: described.append(args[2]) or plain(*args))
    for module in ("lookup", "diagnosis"):
        monkeypatch.setattr(f"shardload.formats.{module}.MOST_LISTED", 20)
    path = str(tmp_path / "a.h5")
    assert find_array(path, "/z/last").shape == (3,) and described == ["/z/last"]
    for name, match in (
        (None, r"holds more than 20 arrays; name one, as in .* \(of the first 20, largest first\): .* and many more"),
        ("/z/lost", r"nearest first\): '/z/last' .* and many more"),
        ("/g2", r"'/g2' in .* is a group.*: '/g2/d200'.*'/g2/d207'"),
    ):
        described.clear()
        with pytest.raises(ConfigError, match=match):
            find_array(path, name)
        assert len(described) == 21
    described.clear()
    assert len(list_arrays(path)) == len(described) == 301
