"""Are files refused that lead elsewhere, are truncated, would fill the memory, or contain a program?"""

from __future__ import annotations

import base64
import gzip
import json
import pickle
import sys
import time
import traceback
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import zarr

from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access
from shardload.formats.lookup import find_array, list_arrays, open_source
from shardload.planning.region import Region
from shardload.storage.local import Fence
from tests.unit.files import change_json, flat, load_all, python_memory_below, read, read_all, write_hdf5, write_zarr

SHAPE = (6, 5, 4)
DATA = flat(SHAPE)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder for the file, and one outside that has a file of its own. HDF5 looks in the working folder too."""
    monkeypatch.chdir(tmp_path)
    for name in ("home", "home/deeper", "else"):
        (tmp_path / name).mkdir()
    for name in ("home/deeper/in.h5", "else/out.h5"):
        write_hdf5(tmp_path / name, {"x": DATA})
    return tmp_path / "home", tmp_path / "else"


def refused(path: Path | str, name: str, match: str) -> None:
    """Neither found nor opened by default, and both if it is allowed."""
    for attempt in (find_array, open_source):
        with pytest.raises(SourceError, match=match):
            attempt(str(path), name)
    assert find_array(str(path), name, Access(allow_external=True)).shape == SHAPE
    np.testing.assert_array_equal(load_all(str(path), name, Access(allow_external=True)), DATA)


# --- HDF5: links


def test_a_file_that_is_a_link_itself_is_where_both_are(places: tuple[Path, Path]) -> None:
    """What the caller named may lead anywhere; what is in it, only beside the name or beside the file."""
    home, other = places
    with h5py.File(other / "a.h5", "w") as file:
        file["a"] = h5py.ExternalLink("out.h5", "/x")
    (home / "b.h5").symlink_to(other / "a.h5")
    for path in (other / "a.h5", home / "b.h5"):
        np.testing.assert_array_equal(load_all(path, "/a"), DATA)


def test_links_in_a_circle_or_to_no_file(places: tuple[Path, Path]) -> None:
    home, _ = places
    with h5py.File(home / "a.h5", "w") as file:
        file["one"] = h5py.SoftLink("/two")
        file["two"] = h5py.SoftLink("/one")
        file["self"] = h5py.ExternalLink("a.h5", "/self")
        file["device"] = h5py.ExternalLink("/dev/zero", "/x")
        file["folder"] = h5py.ExternalLink("deeper", "/x")
    for name, match in (
        ("/one", "links"),
        ("/self", "links"),
        ("/device", "outside the folder"),
        ("/folder", "a folder, expected a file"),
    ):
        with pytest.raises((SourceError, ConfigError), match=match):
            open_source(home / "a.h5", name)


# --- HDF5: virtual datasets and external storage


def virtual(path: Path, name: str, *sources: tuple[str, str]) -> None:
    layout = h5py.VirtualLayout(shape=SHAPE, dtype="f4")
    n = SHAPE[0] // len(sources)
    for k, (file, inside) in enumerate(sources):
        layout[k * n : (k + 1) * n] = h5py.VirtualSource(file, inside, shape=SHAPE)[k * n : (k + 1) * n]
    with h5py.File(path, "a") as file:
        file.create_virtual_dataset(name, layout)


def test_virtual_datasets(places: tuple[Path, Path]) -> None:
    home, other = places
    inside, path = ("deeper/in.h5", "x"), home / "a.h5"
    virtual(path, "fine", inside, inside)
    virtual(path, "up", inside, ("../else/out.h5", "x"))
    virtual(path, "absolute", inside, (str(other / "out.h5"), "x"))
    virtual(path, "again", (".", "fine"), (".", "up"))
    with h5py.File(home / "middle.h5", "w") as file:
        file["x"] = h5py.ExternalLink("../else/out.h5", "/x")
    virtual(path, "linked", inside, ("middle.h5", "x"))
    virtual(home / "second.h5", "x", inside, ("../else/out.h5", "x"))
    virtual(path, "nested", inside, ("second.h5", "x"))
    np.testing.assert_array_equal(load_all(path, "/fine"), DATA)
    names = ("/up", "/absolute", "/again", "/linked", "/nested")
    for name in names:
        refused(path, name, "outside the folder of this file")
    found = {info.dataset: info.refused for info in list_arrays(str(path))}
    assert found["/fine"] is None and all("outside" in str(found[name]) for name in names)
    with h5py.File(path) as file, pytest.raises(SourceError, match="outside the folder"):
        open_source(file["up"], "/up")


def test_virtual_datasets_whose_parts_cannot_be_had(places: tuple[Path, Path]) -> None:
    """HDF5 delivers fill values for some of these, without a word."""
    home, _ = places
    path, fine = home / "a.h5", ("deeper/in.h5", "x")
    (home / "text.h5").write_text("no HDF5")
    write_hdf5(home / "cut.h5", {"x": DATA})
    (home / "cut.h5").write_bytes((home / "cut.h5").read_bytes()[:-10])
    for name, source in (("gone", "gone.h5"), ("text", "text.h5"), ("cut", "cut.h5"), ("empty", "deeper/in.h5")):
        virtual(path, name, fine, (source, "nothing" if name == "empty" else "x"))
        if name in ("gone", "empty"):
            with h5py.File(path) as file:
                assert (file[name][3:] == 0).all()
        with pytest.raises(SourceError, match=r"values of another file, .* \(HDF5 (would|may) deliver fill values"):
            open_source(path, name)


# --- HDF5: cut while it is open, and bombs


@pytest.mark.parametrize("stored", [{"chunks": None}, {}, {"compression": "gzip"}, {"compression": "lzf"}])
def test_a_file_cut_after_it_was_opened(tmp_path: Path, stored: dict[str, Any]) -> None:
    """HDF5 compares a file with its header when it opens it, and delivers zeros for what is cut off later."""
    rng = np.random.default_rng(1)
    data = rng.integers(1, 100, (64, 50)).astype("f4")
    path = write_hdf5(tmp_path / "a.h5", {"a": data}, **{"chunks": (8, 25), **stored})
    source = open_source(path, "/a")
    with open(path, "r+b") as file:
        file.truncate(Path(path).stat().st_size // 2)
    for read_values in (read_all, lambda source: source.plain(Region.whole(data.shape))):
        with pytest.raises((OSError, ValueError), match=r"cut to|file ends|was cut"):
            read_values(source)
    chunks = source.chunk_reader()
    if chunks is not None:
        with pytest.raises(OSError, match=r"cut to|file ends"):
            for i in range(8):
                for j in range(2):
                    chunks.fetch((range(i, i + 1), range(j, j + 1)))
    source.close()


@pytest.mark.parametrize(
    ("filters", "nbytes", "mask", "told"),
    [
        ({"compression": "gzip"}, 64 << 20, 0, "the gzip stream is damaged, or longer than the chunk"),
        ({"compression": "gzip", "scaleoffset": 0}, 64 << 20, 0, "a stored chunk of"),
        ({}, 1000, 0, "other sizes are stored than the 1024 bytes"),
        ({"compression": "lzf"}, 1000, 1, "a stored chunk of 1000 bytes; expected 1024"),
    ],
)
def test_a_chunk_of_another_length_in_hdf5(tmp_path: Path, filters: dict[str, Any], nbytes: int, mask: int, told: str) -> None:
    """A chunk of 1 KiB, stored as a stream of 64 MiB: HDF5's own filter would make all of it, if it got it.
    Or as too few bytes: HDF5 would deliver whatever was in its memory for the rest of it.
    """
    stored = zlib.compress(bytes(nbytes), 9) if "gzip" in filters.values() else bytes(nbytes)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        made = file.create_dataset("x", data=flat((4, 256), "i4"), chunks=(1, 256), **filters)
        made.id.write_direct_chunk((2, 0), stored, mask)
    with pytest.raises(ValueError, match=told):
        load_all(tmp_path / "x.h5", "x", Access(allow_filters={"scaleoffset"}))


@pytest.mark.parametrize("number", [32015, 32001])
def test_a_frame_that_declares_what_it_likes_in_hdf5(tmp_path: Path, number: int) -> None:
    import hdf5plugin

    with h5py.File(tmp_path / "a.h5", "w") as file:
        options = hdf5plugin.Zstd() if number == 32015 else hdf5plugin.Blosc("zstd")
        made = file.create_dataset("a", (4, 256), "i4", chunks=(1, 256), **options)
        made[...] = flat((4, 256), "i4")
        codec = numcodecs.Zstd() if number == 32015 else numcodecs.Blosc("zstd")
        made.id.write_direct_chunk((2, 0), codec.encode(bytes(64 << 20)))
    with closing(open_source(tmp_path / "a.h5", "/a")) as source:
        np.testing.assert_array_equal(read(source, Region((0, 0), (2, 256))), flat((4, 256), "i4")[:2])
        with python_memory_below(4 << 20), pytest.raises(ValueError, match=r"declares|bytes"):
            read(source, Region((2, 0), (3, 256)))


# --- Zarr


@pytest.mark.each_value
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("what", ["chunk", "folder", "metadata", "array"])
def test_links_out_of_a_store(tmp_path: Path, zarr_format: int, order: str, what: str) -> None:
    """By position, and by zarr-python (arrays in Fortran order)."""
    more: dict[str, Any] = {"order": "F"} if order == "F" else {}
    if order == "F" and zarr_format == 3:
        more = {"filters": [zarr.codecs.TransposeCodec(order=(2, 1, 0))]}
    if zarr_format == 2:
        more["chunk_key_encoding"] = {"name": "v2", "separator": "/"}
    path = Path(write_zarr(tmp_path / "a.zarr", {"a": DATA, "b": DATA}, zarr_format, **more))
    np.testing.assert_array_equal(load_all(path, "a"), DATA)
    key = {2: "a/1/0", 3: "a/c/1/0"}[zarr_format]
    victim = {"chunk": key + "/1", "folder": key, "metadata": "a/.zarray" if zarr_format == 2 else "a/zarr.json", "array": "a"}
    (path / victim[what]).rename(tmp_path / "stolen")
    (path / victim[what]).symlink_to(tmp_path / "stolen")
    with pytest.raises((SourceError, OSError), match=r"outside the store; pass allow_external=True if you trust it"):
        load_all(path, "a")
    listed = {info.dataset: info.refused for info in list_arrays(str(path))}
    assert listed["/b"] is None and (what in ("chunk", "folder") or listed.get("/a", "not followed") is not None)
    np.testing.assert_array_equal(load_all(path, "a", Access(allow_external=True)), DATA)
    if what == "chunk":  # a link inside the store is no business of anybody's
        (path / victim[what]).unlink()
        (tmp_path / "stolen").rename(path / "kept")
        (path / victim[what]).symlink_to(path / "kept")
        np.testing.assert_array_equal(load_all(path, "a"), DATA)
        (path / "kept").unlink()
        with pytest.raises(OSError, match="which is not there"):
            load_all(path, "a")


def test_a_store_that_is_a_link_itself(tmp_path: Path) -> None:
    write_zarr(tmp_path / "far" / "a.zarr", {"a": DATA})
    (tmp_path / "b.zarr").symlink_to(tmp_path / "far" / "a.zarr")
    np.testing.assert_array_equal(load_all(tmp_path / "b.zarr", "a"), DATA)


def test_links_in_a_circle_in_a_store(tmp_path: Path) -> None:
    path = Path(write_zarr(tmp_path / "a.zarr", {"g/a": DATA}))
    (path / "g" / "up").symlink_to(path)
    (path / "g" / "self").symlink_to(path / "g")
    assert [info.dataset for info in list_arrays(str(path))] == ["/g/a"]


def test_keys_that_lead_upwards(tmp_path: Path) -> None:
    """Consolidated metadata may name members anywhere."""
    path = Path(write_zarr(tmp_path / "a.zarr", {"a": DATA}, 2))
    write_zarr(tmp_path / "else.zarr", {"x": DATA}, 2)
    zarr.consolidate_metadata(path, zarr_format=2)
    found = json.loads((path / ".zmetadata").read_text())
    found["metadata"]["../else.zarr/x/.zarray"] = found["metadata"]["a/.zarray"]
    (path / ".zmetadata").write_text(json.dumps(found))
    for name in ("../else.zarr/x", "/../else.zarr/x"):
        with pytest.raises(KeyError, match=r"else\.zarr/x"):
            open_source(path, name)
    assert [info.dataset for info in list_arrays(str(path))] == ["/a"]


class Program:
    """Something that acts when it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("was-unpickled"),))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["<f4", "|O"])
@pytest.mark.parametrize("codec", ["pickle", "json2", "msgpack2"])
@pytest.mark.parametrize("where", ["filters", "compressor"])
def test_nothing_is_unpickled(tmp_path: Path, dtype: str, codec: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(write_zarr(tmp_path / "a.zarr", {"a": DATA}, 2, compressors=None))
    fill = base64.b64encode(pickle.dumps(Program())).decode() if dtype == "|O" else 0
    codecs = {where: [{"id": codec}] if where == "filters" else {"id": codec}}
    change_json(path / "a/.zarray", dtype=dtype, fill_value=fill, **codecs)
    for chunk in (path / "a").glob("[0-9]*"):
        chunk.write_bytes(pickle.dumps(Program()))
    for attempt in (find_array, open_source):
        with pytest.raises(SourceError, match=r"Python objects|metadata"):
            attempt(str(path), "/a")
    assert all(info.refused for info in list_arrays(str(path)))
    assert not (tmp_path / "was-unpickled").exists()


@pytest.mark.parametrize("how", ["gzip", "plain"])
def test_bombs_in_zarr(tmp_path: Path, how: str) -> None:
    """64 MiB in the place of a chunk of 160 bytes: a gzip stream of them, and themselves."""
    path = Path(write_zarr(tmp_path / "a.zarr", {"a": DATA}, 3, compressors=zarr.codecs.GzipCodec()))
    big = bytes(64 << 20)
    (path / "a/c/1/0/1").write_bytes(big if how == "plain" else zlib.compress(big, 9, wbits=31))
    del big
    with closing(open_source(str(path), "a")) as source, python_memory_below(4 << 20):
        with pytest.raises((OSError, ValueError), match=r"longer than|damaged|at most"):
            read_all(source)
        while _is_inflating():  # zarr-python's threads go on with other chunks, and may not while tracing ends
            time.sleep(0.01)


def _is_inflating() -> bool:
    """Whether some thread decodes gzip."""
    for frame in sys._current_frames().values():
        if any(each.f_code.co_filename == gzip.__file__ for each, _ in traceback.walk_stack(frame)):
            return True
    return False


def test_the_fence(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "ab").mkdir()
    fence = Fence.around_store(str(tmp_path / "a"))
    assert fence.holds(str(tmp_path / "a")) and fence.holds(str(tmp_path / "a/x/../y")) and fence.holds(str(tmp_path / "a/./b"))
    assert not fence.holds(str(tmp_path / "ab")) and not fence.holds(str(tmp_path / "a/../ab")) and not fence.holds("/")
    assert Fence().holds("/anywhere") and Fence.around_file("/x/y", True).holds("/")
    assert Fence(("/",)).holds("/etc")
