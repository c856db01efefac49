"""Does the HDF5 source deliver what was written, decode each chunk once, and say why where it cannot?"""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import iris_sample_data
import ml_dtypes
import netCDF4
import numpy as np
import pytest

from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.format import Source
from shardload.formats.hdf5.opened import OpenDataset
from shardload.formats.lookup import find_array, list_arrays, open_source
from shardload.planning.region import Region
from tests.unit.files import check_source, flat, load_all, missing_in, raw_dataset, read_all, write_hdf5

# Decoded only if the caller says so, or may come to be.
ASKED = {"szip", "nbit", "scaleoffset", "bitshuffle", "blosc2", "lz4", "bzip2"}


def check(path: str, name: str, expected: np.ndarray[Any, Any]) -> ArrayInfo:
    with closing(open_source(path, name, Access(allow_filters=ASKED))) as source:
        check_source(source, expected)
        return source.info


def test_scaleoffset_and_nbit(tmp_path: Path) -> None:
    data = flat((7, 5), "int32")
    path = write_hdf5(tmp_path / "a.h5", {"i": data}, chunks=(3, 2), scaleoffset=0)
    assert check(path, "/i", data).codec == "scaleoffset"
    path = write_hdf5(tmp_path / "b.h5", {"i": data}, chunks=(3, 2), scaleoffset=0, compression="gzip")
    assert check(path, "/i", data).codec == "scaleoffset+gzip"
    path = write_hdf5(tmp_path / "c.h5", {"f": data / 4}, chunks=(3, 2), scaleoffset=2)
    assert check(path, "/f", data / 4).codec == "scaleoffset"
    with h5py.File(tmp_path / "d.h5", "w") as file:
        raw_dataset(file, "n", h5py.h5t.STD_I32LE, (7, 5), data, chunks=(3, 2), filters=[(h5py.h5z.FILTER_NBIT, 0)])
    assert check(str(tmp_path / "d.h5"), "/n", data).codec == "nbit"


@pytest.mark.parametrize("dtype", ["int16", ">f8", "complex64", "bool"])
def test_virtual_datasets(tmp_path: Path, dtype: str) -> None:
    data = flat((6, 5, 7), dtype)
    write_hdf5(tmp_path / "part1.h5", {"x": data[1:]}, chunks=(3, 4, 2), shuffle=True)
    layout = h5py.VirtualLayout(shape=data.shape, dtype=data.dtype)
    layout[1:] = h5py.VirtualSource("part1.h5", "x", shape=data[1:].shape)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("raw", data=data, external=[(str(tmp_path / "a.raw"), 0, data.nbytes)])
    path = str(tmp_path / "a.h5")
    info = check(path, "/virtual", np.concatenate([np.zeros_like(data[:1]), data[1:]]))
    assert info.nbytes_stored is None
    # HDF5 decodes these whole, on each rank that needs a part of one: a plan must know, and a copy has the same.
    assert (info.chunks, info.codec) == ((3, 4, 2), "shuffle")
    (tmp_path / "part1.h5").unlink()
    # HDF5 itself would deliver zeros for the missing part, without a word.
    with pytest.raises(SourceError, match=r"'/virtual' in .* values of another file, 'part1.h5', which is not there"):
        open_source(path, "/virtual")
    with pytest.raises(SourceError, match=r"'/raw' in .* values in raw files .*h5py: new\[name\] = old\[name\]"):
        open_source(path, "/raw")


def test_enums_load_as_integers_and_bfloat16_as_it_is(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        kind = h5py.enum_dtype({"SEA": 0, "LAND": 1, "ICE": 300}, basetype=">i2")
        file.create_dataset("enum", data=np.array([[0, 1, 300], [300, 7, 0]], ">i2"), dtype=kind)
        half = h5py.h5t.IEEE_F32LE.copy()
        half.set_fields(15, 7, 8, 0, 7)
        half.set_precision(16)
        half.set_size(2)
        half.set_ebias(127)
        raw_dataset(file, "bfloat16", half, (3,), np.array([1.5, -3e38, 0.25], "float32"))
        if hasattr(h5py.h5t, "COMPLEX"):  # the complex type of HDF5 2.0, which earlier versions cannot open
            kinds = {"kind": h5py.h5t.COMPLEX_IEEE_F32BE, "memory_kind": h5py.h5t.NATIVE_FLOAT_COMPLEX}
            raw_dataset(file, "complex", shape=(5,), values=flat((5,), "complex64"), **kinds)
        else:
            file["complex"] = flat((5,), "complex64")
    path = str(tmp_path / "a.h5")
    check(path, "/enum", np.array([[0, 1, 300], [300, 7, 0]], "int16"))
    check(path, "/complex", flat((5,), "complex64"))
    check(path, "/bfloat16", np.array([1.5, -3e38, 0.25], ml_dtypes.bfloat16))


@pytest.mark.parametrize("base", ["STD_I16LE", "STD_I16BE", "STD_I32BE", "STD_I64BE", "STD_U16BE"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_integers_of_fewer_bits_than_their_bytes_have(tmp_path: Path, base: str, is_packed: bool) -> None:
    """In the other byte order HDF5 takes the unused bits for bits of the number, if it is to give native ones."""
    kind = getattr(h5py.h5t, base).copy()
    kind.set_precision(8 * kind.get_size() - 4)
    data = np.arange(-17, 18).reshape(5, 7) * 100
    data = np.abs(data) if "U" in base else data
    with h5py.File(tmp_path / "a.h5", "w") as file:
        filters = [(h5py.h5z.FILTER_NBIT, 0)] * is_packed
        raw_dataset(file, "a", kind, data.shape, data.astype(kind.dtype), chunks=(2, 3), filters=filters)
    check(str(tmp_path / "a.h5"), "/a", data.astype(kind.dtype.newbyteorder("=")))


@pytest.mark.parametrize(("base", "bits", "fill"), [("STD_I16BE", 12, -3), ("STD_I32BE", 20, -70000), ("STD_B32BE", None, 9)])
def test_fill_values_that_hdf5_does_not_convert_to_native_ones(tmp_path: Path, base: str, bits: Any, fill: int) -> None:
    """Of what a copy is made. Wrong if -3 of 12 bits were 4093, as HDF5 gives it in the other byte order."""
    kind = getattr(h5py.h5t, base).copy()
    if bits:
        kind.set_precision(bits)
    value = np.asarray(fill, kind.dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        raw_dataset(file, "a", kind, (3,), setting=lambda creation: creation.set_fill_value(value))
    with closing(open_source(str(tmp_path / "a.h5"), "a")) as source:
        assert source.properties().fill_value == fill and source.properties().unread == ()
        np.testing.assert_array_equal(read_all(source), 3 * [fill])


def test_integers_of_fewer_bits_in_the_parts_of_a_virtual_dataset(tmp_path: Path) -> None:
    """They are converted from the type of the part: wrong if only that of the virtual dataset is looked at."""
    kind = h5py.h5t.STD_I16BE.copy()
    kind.set_precision(12)
    data = np.arange(-3, 3, dtype=">i2").reshape(2, 3)
    layout = h5py.VirtualLayout((4, 3), ">i2")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        raw_dataset(file, "part", kind, data.shape, data)
        layout[:2] = h5py.VirtualSource(file["part"])
        file.create_virtual_dataset("virtual", layout, fillvalue=7)
    expected = np.concatenate([data, np.full((2, 3), 7)]).astype("i2")
    check(str(tmp_path / "a.h5"), "/virtual", expected)


def test_what_is_refused_says_what_it_is(tmp_path: Path) -> None:
    space = h5py.h5s.create_simple((3,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["variable string"] = ["a", "bc", "d"]
        file["fixed string"] = np.array([b"ab", b"c"])
        file["object reference"] = np.array([file.ref], dtype=h5py.ref_dtype)
        file.create_dataset("region reference", (2,), dtype=h5py.regionref_dtype)
        file["record"] = np.zeros(3, [("mass", "f4"), ("id", "i8")])
        file["vlen"] = np.array([np.arange(2), np.arange(3)], dtype=h5py.vlen_dtype("i4"))
        file.create_dataset("subarray", shape=(2,), dtype=np.dtype(("S4", (3,))))
        file["date"] = np.array(["2020-01-01"], "M8[s]").astype(h5py.opaque_dtype("M8[s]"))
        file["long double"] = np.zeros(2, "longdouble")
        file["long complex"] = np.zeros(2, "clongdouble")
        file["null"] = h5py.Empty("f4")
        odd = h5py.h5t.STD_I32LE.copy()
        odd.set_precision(24)
        odd.set_size(3)
        bits = h5py.h5t.STD_B32LE.copy()
        bits.set_size(3)
        types = {"bits": bits, "time": h5py.h5t.UNIX_D32BE, "quad": h5py.h5t.IEEE_F128BE, "int24": odd}
        for name, kind in types.items():
            h5py.h5d.create(file.id, name.encode(), kind.copy(), space)
        for name in ("int24", "int32"):
            creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            creation.set_virtual(space, b".", b"/int24", space)
            h5py.h5d.create(file.id, f"virtual {name}".encode(), types.get(name, h5py.h5t.STD_I32LE), space, creation)
        file["good"] = flat((3, 4))
    expected = {
        "virtual int24": ("24-bit number", "NumPy does not have"),
        "virtual int32": ("", "have another shape or type than it says"),
        "variable string": ("string", "strings"),
        "fixed string": ("string", "strings"),
        "object reference": ("reference", "references"),
        "region reference": ("reference", "references"),
        "record": ("compound", "records with fields mass, id"),
        "vlen": ("vlen", "lists of variable length"),
        "subarray": ("array", "small arrays as elements"),
        "date": ("opaque", "opaque bytes"),
        "long double": ("", "extended precision floats"),
        "long complex": ("", "extended precision complex"),
        "null": ("nothing", "its dataspace is null"),
        "bits": ("24-bit number", "NumPy does not have"),
        "time": ("time", "HDF5 times"),
        "quad": ("128-bit number", "NumPy does not have"),
        "int24": ("24-bit number", "NumPy does not have"),
    }
    path = str(tmp_path / "a.h5")
    infos = {info.dataset[1:]: info for info in list_arrays(path)}
    assert set(infos) == {*expected, "good"}
    for name, (kind, why) in expected.items():
        info = infos[name]
        assert info.refused is not None and why in info.refused, name
        assert not kind or info.dtype == kind
        for attempt in (find_array, open_source):
            with pytest.raises(SourceError, match=f"'/{name}' in '.*a.h5' cannot be loaded: it holds .*{why}") as caught:
                attempt(path, name)
            assert (caught.value.path, caught.value.dataset) == (path, "/" + name)
        read = re.search(r"Read this array by (h5py.*\(\)\]); shardload.scatter takes", str(caught.value))
        assert (read is None) == (name in ("null", "bits", "time", "quad", "int24", "virtual int24", "virtual int32")), name
        if read is not None:
            with h5py.File(path) as file:  # references are equal to themselves only
                assert repr(eval(read[1], {"h5py": h5py})) == repr(file[name][()])
    assert find_array(path, None).dataset == "/good"  # the one array left that can be loaded


@pytest.mark.parametrize("kind", ["STD_B8LE", "STD_B8BE", "STD_B16BE", "STD_B32LE", "STD_B64BE"])
@pytest.mark.parametrize(("chunks", "level"), [(None, None), ((2,), None), ((2,), 4)])
@pytest.mark.parametrize("by", ["h5py", "shardload"])
def test_bit_fields(
    tmp_path: Path, kind: str, chunks: tuple[int, ...] | None, level: int | None, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are unsigned integers. PyTables writes booleans so."""
    if by == "h5py":
        monkeypatch.setattr(OpenDataset, "raw", None)  # nothing is read without the HDF5 library
    stored = getattr(h5py.h5t, kind)
    expected = flat((5,), f"u{stored.get_size()}")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        filters = [(1, 0, (level,))] if level else []
        for name, values in (("a", expected), ("missing", None)):
            of_memory = getattr(h5py.h5t, f"NATIVE_B{8 * stored.get_size()}")
            raw_dataset(file, name, stored, (5,), values, chunks=chunks, filters=filters, memory_kind=of_memory)
    for name, values in (("a", expected), ("missing", 0 * expected)):
        with closing(open_source(str(tmp_path / "a.h5"), name)) as source:
            region = Region.whole(values.shape)
            np.testing.assert_array_equal(read_all(source), values, strict=True)
            if kind == "STD_B8LE":  # h5py reads no others
                np.testing.assert_array_equal(source.plain(region), values)
            assert bool(missing_in(source)) == (name == "missing")


def test_attributes_are_plain_and_reported(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("a", data=flat((3,)))
        made.attrs["scale_factor"] = np.float32(0.5)
        made.attrs["add_offset"] = np.array([10], ">i2")
        made.attrs["_FillValue"] = np.array([-1.0], "f8")
        made.attrs["missing_value"] = np.array([-1, -2], "i4")
        made.attrs["units"] = np.bytes_("K")
        made.attrs["calendar"] = h5py.Empty("S1")
        made.attrs["comment"] = "not told"
    attributes = find_array(tmp_path / "a.h5", "a").attributes
    expected = {"scale_factor": 0.5, "add_offset": 10, "_FillValue": -1.0, "missing_value": [-1, -2]}
    assert attributes == {**expected, "units": "K", "calendar": None}
    assert json.loads(json.dumps(attributes)) == attributes


def test_real_files_agree_with_the_netcdf_library() -> None:
    compared = 0
    for path in sorted(Path(iris_sample_data.path).glob("*.nc")):
        if path.read_bytes()[:3] == b"CDF":
            with pytest.raises(SourceError, match=r"netCDF-3 classic.*nccopy -k nc4 in.nc out.nc"):
                list_arrays(str(path))
            continue
        with netCDF4.Dataset(path) as file:
            file.set_auto_maskandscale(False)
            for info in list_arrays(str(path)):
                if info.refused is None and info.dataset[1:] in file.variables:
                    np.testing.assert_array_equal(load_all(path, info.dataset), file[info.dataset][...])
                    compared += 1
    assert compared > 10


def test_a_filter_that_is_missing_is_named(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", {"a": flat((4, 5))}, chunks=(2, 2), **hdf5plugin.BZip2())
    content, number = Path(path).read_bytes(), (307).to_bytes(2, "little")  # in front of its name, in the header
    assert content.count(number) == 1
    Path(path).write_bytes(content.replace(number, (460).to_bytes(2, "little")).replace(b"bzip2\0", b"other\0"))
    zstd = write_hdf5(tmp_path / "z.h5", {"a": flat((4, 5))}, chunks=(2, 2), **hdf5plugin.Zstd())
    code = (
        "import sys\n"
        "sys.modules['hdf5plugin'] = None\n"
        "from shardload.formats.access import Access\nfrom shardload.formats.lookup import open_source, list_arrays\n"
        "for path in sys.argv[1:]:\n"
        "    assert list_arrays(path)[0].shape == (4, 5)\n"
        "    try: open_source(path, 'a', Access(allow_filters={'460'}))\n"
        "    except OSError as error: print(type(error).__name__, error)\n"
    )
    said = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, path, zstd],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"HDF5_PLUGIN_PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    ).stdout.splitlines()
    assert said[0].startswith(f"SourceError '/a' in '{path}' cannot be loaded: it holds chunks encoded with HDF5 filter")
    assert "filter 460 (other)" in said[0] and "filter 32015 (zstd)" in said[1]
    assert all("`pip install hdf5plugin`" in line for line in said)


def test_links(tmp_path: Path) -> None:
    data = flat((3, 4))
    write_hdf5(tmp_path / "other.h5", {"b": data})
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/rho"] = data
        file["hard"] = file["g/rho"]
        file["soft"] = h5py.SoftLink("/g/rho")
        file["outside"] = h5py.ExternalLink("other.h5", "/b")
        file["dangling"] = h5py.SoftLink("/nope")
        file["gone"] = h5py.ExternalLink("nofile.h5", "/x")
        file["loop"] = h5py.SoftLink("/loop")
        file["g/up"] = file["/"]
        file["type"] = np.dtype("f4")
    path = str(tmp_path / "a.h5")
    assert [info.dataset for info in list_arrays(path)] == ["/g/rho", "/hard"]
    for name in ("/g/rho", "/hard", "/soft", "/outside", "/g/up/g/rho"):
        assert check(path, name, data).dataset == name
    for name, target in (("/dangling", "'/nope'"), ("/gone", "'/x' in 'nofile.h5'"), ("/loop", "'/loop'")):
        with pytest.raises(SourceError, match=f"'{name}' in .* is a link to {target}, which cannot be opened"):
            find_array(path, name)
    for name in ("/nope", "/g", "/type", "/g/rho/x", "/g/nope"):
        with pytest.raises(ConfigError, match=r"'/g/rho' \(3, 4\) float32"):
            find_array(path, name)
        with pytest.raises(KeyError, match=name):
            open_source(path, name)


def test_what_the_caller_opened_stays_open_and_the_rest_is_closed(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", {"a": flat((3, 4)), "b": flat((3, 4), first=50)})
    with h5py.File(path) as mine:
        theirs = open_source(path, "/a")  # the same file, open a second time
        handed: Source = open_source(mine["b"], "/b")
        assert handed.info == find_array(mine["b"]) and handed.info.path == path
        check_source(handed, flat((3, 4), first=50))
        theirs.close()
        theirs.close()
        handed.close()
        np.testing.assert_array_equal(mine["b"][...], flat((3, 4), first=50))
        with pytest.raises(RuntimeError):
            read_all(theirs)
        closed = mine["a"]
        with pytest.raises(ConfigError, match=r"from an object of type h5py\..*File\. .*group\['name'\]"):
            find_array(mine)
    with pytest.raises(SourceError, match=r"the h5py.Dataset handed in is closed.*or pass the path"):
        find_array(closed)
    with pytest.raises(SourceError, match="closed"):
        open_source(closed, "/a")
    with h5py.File(path, "r+") as file:  # nothing of ours holds the file any more
        file["c"] = 1


def test_locks_and_writers(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", {"a": flat((3, 4))})
    with open(path, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SourceError, match="HDF5_USE_FILE_LOCKING=FALSE"):
            find_array(path)
    assert find_array(path).shape == (3, 4)
    code = "import h5py, os, sys; f = h5py.File(sys.argv[1], 'w', libver='latest'); f['a'] = 1; f.flush(); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60)  # a writer that died
    with pytest.raises(SourceError, match=r"if it died, run `h5clear -s` on the file"):
        find_array(path)


@pytest.mark.parametrize(
    ("driver", "how", "part"),
    [("family", {"memb_size": 1 << 10}, "a0.h5"), ("split", {}, "a%d.h5-m.h5")],
)
def test_one_of_several_files_that_are_one(tmp_path: Path, driver: str, how: dict[str, Any], part: str) -> None:
    with h5py.File(tmp_path / "a%d.h5", "w", driver=driver, **how) as file:
        file["x"] = flat((30, 40))
    with pytest.raises(SourceError, match=rf"is one of the files of HDF5's .*{driver}.* driver, .* Make one of them: `h5re"):
        open_source(str(tmp_path / part), "x")


@pytest.mark.parametrize("what", ["index of chunks", "group", "header of a group"])
def test_what_can_be_read_is_listed_beside_what_is_damaged(tmp_path: Path, what: str) -> None:
    """Wrong if one damaged object hid all arrays of a file, or were not listed itself."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        file["a"] = np.arange(4.0)
        file.create_dataset("chunked", data=np.arange(6.0), chunks=(2,))
        file["g/inside"] = np.arange(3)
        file["g/same"] = file["a"]
        file["z"] = file["g"]
        header = h5py.h5o.get_info(file["g"].id).addr
    content = bytearray(path.read_bytes())
    groups = [at for at in range(len(content)) if content[at : at + 5] == b"TREE\0"]
    group = next(at for at in groups if at > header)
    at = {"index of chunks": content.index(b"TREE\1"), "group": group, "header of a group": header}[what]
    content[at] = 9
    path.write_bytes(content)
    with h5py.File(path) as file, pytest.raises(RuntimeError):
        file.visit(lambda name: None)
    found = {info.dataset: info for info in list_arrays(str(path))}
    assert found["/a"].shape == (4,) and found["/a"].refused is None
    lost = found.pop("/chunked" if what == "index of chunks" else "/g")
    assert lost.refused is not None and "HDF5 cannot read" in lost.refused
    found.pop("/z", lost)  # the same group
    assert sorted(found) == (["/a", "/g/inside", "/g/same"] if what == "index of chunks" else ["/a", "/chunked"])
    assert all(info.refused is None for info in found.values())
