"""Do many writers and one catalog make the HDF5 file that h5py and the netCDF library read?"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import ml_dtypes
import netCDF4
import numpy as np
import pytest
import xarray as xr
from h5py._objects import phil

from shardload.errors import ConfigError, SourceError
from shardload.formats.codecs.table import HDF5_CODECS
from shardload.formats.hdf5.growth import read_file
from shardload.formats.lookup import open_source
from shardload.formats.saving import make_sink
from shardload.formats.sink import ArraySpec, Compression, Encoder
from shardload.planning.region import Region
from shardload.storage import target
from tests.tiers import some_of
from tests.unit.files import flat, missing_in, read_all
from tests.unit.saving import quick_fsync, save  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_fsync")

SHAPE, CHUNKS = (3, 4, 5), (2, 3, 4)
DTYPES = ("?", "i1", "u1", ">i2", "<u2", "<i4", ">u4", "<i8", "<u8", "<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "<c8", ">c16")
BLOSC_ZSTD = {"name": "blosc", "level": 1, "shuffle": False, "options": {"cname": "zstd", "bitshuffle": True}}
COMPRESSIONS: dict[str, Any] = {
    "none": None,
    "gzip": "gzip",
    "gzip9+shuffle": {"name": "gzip", "level": 9, "shuffle": True},
    "gzip0": {"name": "gzip", "level": 0},
    "shuffle": {"name": "none", "shuffle": True},
    "zstd": "zstd",
    "zstd+shuffle": {"name": "zstd", "level": 7, "shuffle": True},
    "blosc": "blosc",
    "blosc-zstd-bits": BLOSC_ZSTD,
    "lz4": "lz4",
}
BY_LIBRARY: dict[str, Any] = {
    "lzf": "lzf",
    "lzf+shuffle": {"name": "lzf", "shuffle": True},
    "blosc2": "blosc2",
    "bitshuffle": "bitshuffle",
    "bzip2": "bzip2",
    "number": {"name": "32015", "options": {"cd_values": (5,)}},
}


def spec(dtype: Any, compression: Any = None, chunks: Any = CHUNKS, shape: Any = SHAPE, **more: Any) -> ArraySpec:
    return ArraySpec(shape, np.dtype(dtype), chunks, compression=Compression.of(compression), **more)


def grid_of(compression: Any) -> tuple[dict[str, Any], dict[str, ArraySpec]]:
    """An array of each type; in `make test` one of each size, if they are compressed."""
    types = DTYPES if compression is None else some_of(DTYPES, 4)
    names = {f"/g{k % 3}/x{k}": dtype for k, dtype in enumerate(types)}
    values = {name: flat(SHAPE, dtype) for name, dtype in names.items()}
    return values, {name: spec(one.dtype, compression, checksum=k % 2 == 1) for k, (name, one) in enumerate(values.items())}


@pytest.mark.parametrize("name", [*COMPRESSIONS, *BY_LIBRARY])
def test_every_type_is_read_back_by_h5py(tmp_path: Path, name: str) -> None:
    """Wrong if offsets were swapped, edge chunks cut, byte orders mixed up, or a filter's bytes not as the library has them."""
    compression = (COMPRESSIONS | BY_LIBRARY)[name]
    values, specs = grid_of(compression)
    sink = save(tmp_path / "x.h5", values, specs)
    with h5py.File(tmp_path / "x.h5") as file:
        for key, expected in values.items():
            found = file[key]
            assert found.dtype == expected.dtype and found.chunks == CHUNKS and found.fletcher32 == specs[key].checksum
            np.testing.assert_array_equal(found[...], expected)
            chunks = [found.id.get_chunk_info(k) for k in range(found.id.get_num_chunks())]
            assert len(chunks) == 8
            if name in COMPRESSIONS:
                assert {one.filter_mask for one in chunks} == {0}
            head = found.id.read_direct_chunk((0, 0, 0))[1][:4]
            if name.startswith("blosc") and name in COMPRESSIONS:
                assert head[3] == expected.itemsize, "by which it shuffles"
            if name.startswith("gzip"):
                assert head[1] >> 6 == {"gzip": 1, "gzip9+shuffle": 3, "gzip0": 0}[name], "how well, by the stream's own words"
    for key, expected in [*values.items()][:2] if name not in ("bzip2", "bitshuffle") else ():
        # Our own reader, and what the encoder said of the array: of one without a checksum, and one with. The types are alike.
        with closing(open_source(str(tmp_path / "x.h5"), key)) as source:
            np.testing.assert_array_equal(read_all(source), expected)
            told = attrgetter("shape", "dtype", "chunks", "codec")
            assert told(sink.arrays[key].info) == told(source.info) and not missing_in(source)


def test_space_is_reserved_for_what_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if an array is left out, if space is taken for chunks of which nobody knows the size yet, or if it changes the
    file: its length, or the values of another array."""
    asked = []

    def reserve(descriptor: int, start: int, stop: int) -> int:
        asked.append((os.readlink(f"/proc/self/fd/{descriptor}"), start, stop))
        return target_reserve(descriptor, start, stop)

    target_reserve = target.reserve
    values = {"z": flat((30, 40, 50), "f4"), "plain": flat((40, 50, 60), "f8"), "run": flat((50, 60, 70), "i2")}
    specs = {"z": spec("f4", "gzip", (7, 8, 9), (30, 40, 50)), "plain": spec("f8", None, None, (40, 50, 60))}
    specs["run"] = spec("i2", None, None, (50, 60, 70))
    save(tmp_path / "without.h5", values, specs)
    monkeypatch.setattr(target, "reserve", reserve)
    save(tmp_path / "x.h5", values, specs)
    ((where, start, stop),) = asked
    assert os.path.basename(where).startswith("x.h5.")
    with h5py.File(tmp_path / "x.h5") as file:
        for name, expected in values.items():
            np.testing.assert_array_equal(file[name][...], expected)
        runs = [(file[name].id.get_offset(), values[name].nbytes) for name in ("plain", "run")]
        assert start == min(offset for offset, _ in runs)
        assert stop == max(offset + nbytes for offset, nbytes in runs)
    assert (tmp_path / "x.h5").stat().st_size == (tmp_path / "without.h5").stat().st_size
    asked.clear()
    save(tmp_path / "gzip.h5", {"z": values["z"]}, {"z": specs["z"]})
    save(tmp_path / "empty.h5", {"none": flat((0, 3), "f4")})
    assert not asked


def test_the_file_has_the_oldest_version(tmp_path: Path) -> None:
    """Superblock 0: HDF5 1.6 reads it."""
    save(tmp_path / "x.h5", {"x": flat(SHAPE, "f4")}, {"x": spec("f4", "gzip")})
    head = (tmp_path / "x.h5").read_bytes()[:9]
    assert head == b"\x89HDF\r\n\x1a\n\0"
    if shutil.which("h5dump"):
        told = subprocess.run(["h5dump", "-H", "-p", tmp_path / "x.h5"], capture_output=True, text=True, check=True).stdout
        assert "DEFLATE { LEVEL 4 }" in told and "( 3, 4, 5 )" in told


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_alignment(tmp_path: Path, compression: Any) -> None:
    values = flat((40, 31), "f8")
    specs = {"x": spec("f8", compression, (4, 31), values.shape), "y": spec("f8", None, None, values.shape)}
    save(tmp_path / "x.h5", {"x": values, "y": values}, specs, alignment=4096)
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["x"][...], values)
        np.testing.assert_array_equal(file["y"][...], values)
        found = [file["x"].id.get_chunk_info(k).byte_offset % 4096 for k in range(10)]
        assert found == [0] * 10 and file["y"].id.get_offset() % 4096 == 0


def test_a_chunk_at_the_edge_is_padded_with_the_fill_value(tmp_path: Path) -> None:
    """Wrong if the scratch buffer of the chunk before showed through."""
    save(tmp_path / "x.h5", {"x": flat((3, 4), "<i2")}, {"x": spec("<i2", "gzip", (2, 3), (3, 4), fill_value=-7)})
    with h5py.File(tmp_path / "x.h5") as file:
        raw = zlib.decompress(file["x"].id.read_direct_chunk((2, 3))[1])
        assert np.frombuffer(raw, "<i2").tolist() == [11, -7, -7, -7, -7, -7] and file["x"].fillvalue == -7


def test_values_of_any_strides_and_byte_order_are_encoded_alike() -> None:
    values = flat((4, 5, 6), "<f4")
    shape, whole = (4, 5, 6), Region.whole((4, 5, 6))
    encoder = Encoder("x.h5", "/x", ArraySpec(shape, np.dtype(">f4"), shape), "HDF5", "none")
    expected = bytes(encoder.encode(whole, values).data)
    assert expected == values.astype(">f4").tobytes()
    for one in (
        np.asfortranarray(values),
        values[::-1][::-1],
        values.astype(">f4"),
        values.transpose(2, 0, 1).copy().transpose(1, 2, 0),
    ):
        assert bytes(encoder.encode(whole, one).data) == expected
    with pytest.raises(ValueError, match="nothing is converted silently"):
        encoder.encode(whole, values.astype("f8"))
    with pytest.raises(ValueError, match=r"values of shape \(5,\) for region"):
        encoder.encode(whole, np.zeros(5, "f4"))


def test_a_chunk_that_is_not_asked_for_by_its_bounds(tmp_path: Path) -> None:
    sink = make_sink(str(tmp_path / "x.h5"), {"x": spec("i4", "gzip", (2, 8), (11, 8))})
    one = sink.arrays["/x"]
    assert one.number(Region((10, 0), (11, 8))) == 5
    for start, stop in (((10, 0), (12, 8)), ((1, 0), (3, 8)), ((0, 0), (2, 4))):
        with pytest.raises(ValueError, match="is no chunk"):
            one.number(Region(start, stop))
    with pytest.raises(ValueError, match="values of shape"):
        one.encode(Region((0, 0), (2, 8)), np.zeros((8, 2), "i4"))


@pytest.mark.parametrize("name", BY_LIBRARY)
def test_the_library_encodes_in_several_threads(tmp_path: Path, name: str) -> None:
    """Wrong if the files in memory in which it does so were one: HDF5 takes those of the same name for the same."""
    values = flat((8, 40, 32), "i4")
    sink = make_sink(str(tmp_path / "x.h5"), {"x": spec("i4", BY_LIBRARY[name], (1, 40, 32), values.shape)})
    encoder = sink.arrays["/x"]
    ready = threading.Barrier(4)

    def encode(k: int) -> list[Any]:
        ready.wait(60)
        return [encoder.encode(encoder.region((m, 0, 0)), values[m : m + 1]) for m in (k, k + 4)]

    with ThreadPoolExecutor(4) as pool:
        found = dict(enumerate(pool.map(encode, range(4))))
    for k, both in found.items():
        for m, one in zip((k, k + 4), both, strict=True):
            alone = encoder.encode(encoder.region((m, 0, 0)), values[m : m + 1])
            assert (bytes(one.data), one.mask) == (bytes(alone.data), alone.mask)


@pytest.mark.parametrize("name", ["x.h5", "x.nc"])
def test_scales_have_room_for_long_lists(tmp_path: Path, name: str) -> None:
    """A scale lists the arrays that have its axis in an attribute, with 16 bytes each. Wrong if it ended at 64 KiB."""
    values = {"rho": flat((3, 4), "f4"), "time": flat((3,), "i4")}
    dims = {"rho": ("time", "x"), "time": ("time",)}
    save(tmp_path / name, values, {n: spec(v.dtype, None, None, v.shape, dims=dims[n]) for n, v in values.items()})
    with h5py.File(tmp_path / name, "r+") as file:
        for scale in ("time", "x"):
            assert file[scale].is_scale
            file[scale].attrs["list"] = np.arange(9000)
    with netCDF4.Dataset(tmp_path / name) as found:
        np.testing.assert_array_equal(found["rho"][...], values["rho"])
        assert len(found["time"].list) == 9000


def test_the_library_is_locked_where_it_encodes(tmp_path: Path) -> None:
    """Wrong if another thread could be in HDF5 meanwhile: h5py before 3.16 took no lock there, and the process ended."""
    values, held = flat((1, 4, 4), "i4"), list[bool]()
    encoder = make_sink(str(tmp_path / "x.h5"), {"x": spec("i4", "lzf", (1, 4, 4), values.shape)}).arrays["/x"]
    first = encoder.encode(encoder.region((0, 0, 0)), values)
    mine: Any = encoder._local  # type: ignore[attr-defined]
    real = mine.dataset

    def read(at: tuple[int, ...]) -> Any:
        held.append(phil._is_owned())
        return real.read_direct_chunk(at)

    mine.dataset = SimpleNamespace(write=real.write, flush=real.flush, read_direct_chunk=read)
    assert bytes(encoder.encode(encoder.region((0, 0, 0)), values).data) == bytes(first.data)
    assert held == [True]


def test_bfloat16_is_a_float_of_16_bits(tmp_path: Path) -> None:
    values = np.array([1, -2.5, 3e38, 1e-40, np.inf, np.nan, 0.1], dtype=ml_dtypes.bfloat16)
    ways: dict[str, Any] = {"x": ("gzip", (3,)), "y": (None, None), "z": ("lzf", (3,))}
    values.view("u2")[0] = 0xFF81  # a NaN that float32 has not in h5py
    save(tmp_path / "x.h5", dict.fromkeys(ways, values), {name: spec(values.dtype, *way, (7,)) for name, way in ways.items()})
    for name in "xyz":
        with closing(open_source(str(tmp_path / "x.h5"), f"/{name}")) as source:
            assert source.dtype == values.dtype and read_all(source).tobytes() == values.tobytes()
            assert source.plain(Region.whole((7,))).tobytes() == values.tobytes()
    with h5py.File(tmp_path / "x.h5") as file:
        for name in "xyz":
            assert file[name].id.get_type().get_size() == 2
            np.testing.assert_array_equal(file[name][...], values.astype("f4"))


def test_plain_hdf5_of_which_some_axes_have_coordinates(tmp_path: Path) -> None:
    """Wrong if an axis lost its name, or had none for xarray, which opens no array with scales on some axes only. And if what
    xarray saves of it had other names: a label beside a scale is an attribute for xarray, which keeps it as it is.
    """
    values, dims = {"a": flat((3, 4, 5), "f4"), "z": flat((3,), "f8")}, {"a": ("z", "y", "x"), "z": ("z",)}
    save(tmp_path / "x.h5", values, {n: spec(v.dtype, None, None, v.shape, dims=dims[n]) for n, v in values.items()})
    with h5py.File(tmp_path / "x.h5") as file:
        assert list(file) == ["a", "x", "y", "z"] and [dim[0].name for dim in file["a"].dims] == ["/z", "/y", "/x"]
    for engine in ("netcdf4", "h5netcdf"):
        with xr.open_dataset(tmp_path / "x.h5", engine=engine) as found:
            assert dict(found.sizes) == {"z": 3, "y": 4, "x": 5} and set(found.coords) == {"z"} and not found["a"].attrs
            np.testing.assert_array_equal(found["a"].values, values["a"])
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["a"].dims[1].label = "y"
    with xr.open_dataset(tmp_path / "x.h5") as found:
        found.transpose("z", "x", "y").to_netcdf(tmp_path / "x.nc")
    for name, expected in (("x.h5", ("z", "y", "x")), ("x.nc", ("z", "x", "y"))):
        with closing(open_source(str(tmp_path / name), "/a")) as source:
            assert source.labels().dims == expected and set(source.labels().coords) == {"z"}


NAMED_AS_AXES: list[tuple[str, tuple[int, ...], tuple[str, ...]]] = [
    ("lat", (2, 3), ("lat", "lon")),
    ("lat", (3, 2), ("lon", "lat")),
    ("lat", (4, 5), ("y", "x")),
    ("lat", (5,), ("x",)),
    ("lat", (2,), ("n",)),
    ("g/lat", (2, 3), ("lat", "lon")),
]


@pytest.mark.each_value
@pytest.mark.parametrize("suffix", ["h5", "nc"])
@pytest.mark.parametrize(("name", "shape", "dims"), NAMED_AS_AXES)
def test_an_array_with_the_name_of_an_axis(
    tmp_path: Path, suffix: str, name: str, shape: tuple[int, ...], dims: tuple[str, ...]
) -> None:
    """Wrong if it were taken for the coordinate, or if xarray did not open a netCDF4 file with it."""
    path = tmp_path / f"out.{suffix}"
    values = {"v": flat((2, 3), "f4"), "lon": flat((3,), "f8"), name: flat(shape, "i4"), "g/w": flat((2,), "i2")}
    of = {"v": ("lat", "lon"), "lon": ("lon",), name: dims, "g/w": ("lat",)}
    specs = {key: spec(one.dtype, "gzip", one.shape, one.shape, dims=of[key]) for key, one in values.items()}
    save(path, values, specs)
    for engine in ("netcdf4", "h5netcdf") if suffix == "nc" else ():
        for key, expected in values.items():
            above, _, last = key.rpartition("/")
            how: dict[str, Any] = {"phony_dims": "sort"} if engine == "h5netcdf" else {}
            with xr.open_dataset(path, engine=engine, group=above or None, **how) as found:
                np.testing.assert_array_equal(found[last].values, expected)
                assert found[last].dims == of[key] and (above or "lon" in found.indexes)
    if suffix == "nc":
        with netCDF4.Dataset(path) as file:
            assert file[name].dimensions == dims and file["v"].dimensions == of["v"]
            np.testing.assert_array_equal(file[name][...], values[name])
    with closing(open_source(str(path), "/v")) as source:
        assert source.labels().dims == ("lat", "lon")
    assert read_file(str(path), [])["arrays"]["/v"]["dims"] == ["lat", "lon"], "an append asks for the axis by its name"


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["x.h5", "x.nc"])
@pytest.mark.parametrize("grows", [("a", "b", "lat"), ("a",), ("b",), ("lat",)])
def test_an_axis_of_several_arrays_is_one(tmp_path: Path, name: str, grows: tuple[str, ...]) -> None:
    """Wrong if xarray found one axis under several names: because not all of its arrays can grow, or one of them has no
    coordinate at all (a track's latitudes).
    """
    values = {"a": flat((3, 4), "f4"), "b": flat((4, 3), "f4"), "lat": flat((3,), "f8"), "x": flat((4,), "f8")}
    dims: dict[str, tuple[str, ...]] = {"a": ("time", "x"), "b": ("x", "time"), "lat": ("time",), "x": ("x",)}
    specs = {}
    for one, value in values.items():
        unlimited = (dims[one].index("time"),) if one in grows else ()
        chunks = value.shape if unlimited else None
        specs[one] = spec(value.dtype, None, chunks, value.shape, dims=dims[one], unlimited=unlimited)
    save(tmp_path / name, values, specs)
    with xr.open_dataset(tmp_path / name, engine="netcdf4") as found:
        for one in dims:
            assert found[one].dims == dims[one]
            np.testing.assert_array_equal(found[one].values, values[one])
        assert found.encoding["unlimited_dims"] == {"time"}


@pytest.mark.parametrize("name", ["x.h5", "x.nc"])
def test_text_of_numpy_and_long_text_are_attributes(tmp_path: Path, name: str) -> None:
    """Wrong if text of NumPy were refused, or text of more than 64 KiB, of which HDF5 has room elsewhere in the file only."""
    attrs = {"one": np.str_("ü"), "row": np.array(["a", "bü"]), "list": [np.str_("c")], "none": np.array("d")}
    attrs |= {"long": "l" * 70000, "bytes": np.bytes_(b"b" * 70000), "most": "m" * 64000}
    save(
        tmp_path / name,
        {"x": flat((3,), "f4")},
        {"x": spec("f4", None, None, (3,), attrs=attrs)},
        group_attrs={"/": {"history": "h" * 70000}},
    )
    expected = {key: np.asarray(value).tolist() for key, value in attrs.items()} | {"bytes": "b" * 70000}
    with h5py.File(tmp_path / name) as file:
        found = {key: file["x"].attrs[key] for key in attrs}
        assert file.attrs["history"] == "h" * 70000
    texts = {key: value.decode() if isinstance(value, bytes) else np.asarray(value).tolist() for key, value in found.items()}
    assert texts == expected
    if name.endswith(".nc"):
        with netCDF4.Dataset(tmp_path / name) as file:
            shown = {key: file["x"].getncattr(key) for key in attrs}
        assert shown == {**expected, "list": "c"}


# --- netCDF4


def test_the_netcdf_library_writes_to_groups(tmp_path: Path) -> None:
    """Wrong if a group did not keep the order of its members: the library opens a file with such a group to read only."""
    path, values = tmp_path / "x.nc", flat((3, 4), "f4")
    specs = {name: spec("f4", None, (1, 4), (3, 4), dims=("t", "x"), unlimited=(0,)) for name in ("a/b/v", "a/w", "u")}
    save(path, dict.fromkeys(specs, values), specs, group_attrs={"/a/c/d": {"n": 1}, "/a": {"n": 2}})
    with netCDF4.Dataset(path, "a") as file:
        for name in specs:
            file[name][3] = values[0]
        file["a/c/d"].m = 3
    with netCDF4.Dataset(path) as file:
        assert file["a/c/d"].ncattrs() == ["n", "m"]
        for name in specs:
            np.testing.assert_array_equal(file[name][3], values[0])


def test_netcdf_shows_all_attributes_that_are_taken(tmp_path: Path) -> None:
    long = "n" * 255
    attrs = {
        "b": True,
        "bs": np.array([True, False]),
        "i": np.uint64(2**64 - 1),
        "row": [1.5, 2.5],
        "texts": ["a", "ü"],
        "text": np.bytes_(b"ab"),
        "none": h5py.Empty("f4"),
        "no": np.zeros(0),
        long: 3,
    }
    save(tmp_path / "x.nc", {f"{long}/{long}": flat((3,), "f4")}, {f"{long}/{long}": spec("f4", None, None, (3,), attrs=attrs)})
    with netCDF4.Dataset(tmp_path / "x.nc") as file:
        one = file[f"{long}/{long}"]
        found = {name: one.getncattr(name) for name in one.ncattrs()}
    assert {key: np.asarray(value).tolist() for key, value in found.items()} == {
        **{key: np.asarray(value).tolist() for key, value in attrs.items()},
        **{"b": 1, "bs": [1, 0], "text": "ab", "none": []},
    }


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ({"x": spec("?")}, r"'/x' holds bool, which netCDF4 does not have. Save it as int8 .*suffix \.h5"),
        ({"x": spec("c8")}, "holds complex64, which netCDF4 does not have. .*complex numbers as two arrays"),
        ({"x": spec(ml_dtypes.bfloat16)}, r"holds bfloat16, which netCDF4 does not have. .* float32"),
        (
            {"x": spec("f4", dims=("a", "b", "c")), "y": spec("f4", None, None, (6,), dims=("b",))},
            "axis 'b' has 6 elements in '/y', but 4",
        ),
        (
            {"a": spec("f4", None, None, ()), "x": spec("f4", dims=("a", None, None))},
            "'/a' has the name of an axis of '/x', and is a single number: xarray opens no such file. Call one",
        ),
        (
            {"a": spec("f4", None, None, (6,)), "_nc4_non_coord_a": spec("f4"), "x": spec("f4", dims=("a", None, None))},
            "nor is '/_nc4_non_coord_a' free, as netCDF would call it. Call one",
        ),
        ({"x": spec("f4", "lzf")}, "is 'lzf', which is h5py's own: the netCDF library does not read it. Pa"),
        # HDF5 holds all of these, but the netCDF library does not open such a file, or does not show the attribute.
        ({"x": spec("f4", attrs={"box": np.eye(3)})}, "attribute 'box' of '/x' is an array of 2 axes; in netCDF4"),
        (
            {"x": spec("f4", attrs={"box": [[1], [1, 2]]})},
            "attribute 'box' of '/x' is no array: its rows have different lengths",
        ),
        ({"x": spec("f4", attrs={"a": {"b": 1}})}, "attribute 'a' of '/x' is a dict, which HDF5 does not have: json.dumps"),
        ({"x": spec("f4", attrs={"a": 1j})}, "is complex128, which netCDF4 does not have"),
        ({"x": spec("f4", attrs={"a": np.float16(1)})}, "is float16, which netCDF4 does not have"),
        ({"x": spec("f4", attrs={"a" * 256: 1})}, "one with a name of 256 bytes"),
        ({"x": spec("f4", attrs={" a": 1})}, "one with a name that begins with a space"),
        ({"ü" * 128: spec("f4")}, "of 256 bytes, which netCDF programs do not read"),
        ({f"{'g' * 256}/x": spec("f4")}, "of 256 bytes, which netCDF programs do not read"),
        ({"x": spec("f4", dims=("a" * 256, "b", "c"))}, "of 256 bytes, which netCDF programs do not read"),
        ({"\nx": spec("f4")}, "has a name that begins with a space or control character, which netCDF programs do not read"),
    ],
)
def test_what_netcdf_cannot_hold(tmp_path: Path, specs: dict[str, ArraySpec], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_sink(str(tmp_path / "x.nc"), specs)
    assert not os.listdir(tmp_path)


# --- what goes wrong


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (spec("S3"), "'/x' holds strings, which cannot be saved"),
        (spec(ml_dtypes.int4), "holds int4, for which HDF5 has no type that others read. Save it as float32 or int8"),
        (spec(ml_dtypes.float8_e5m2), "holds float8_e5m2, for which HDF5 has no type that others read"),
        (spec("f4", "gzip", None), r"has compression but no chunks; only chunks are compressed\. Pass chunks=\(3, 4, 5\)"),
        (spec("f4", chunks=(1, 2)), r"chunks of '/x' are \(1, 2\); expected a size of 1 or more for each axis"),
        (spec("f4", chunks=(1, 2, 0)), "expected a size of 1 or more"),
        (spec("f4", "snappy"), "compression of '/x' is 'snappy'; expected one of .*gzip.*zstd"),
        (spec("f4", {"name": "gzip", "level": 10}), "'/x': the level of gzip is 10; expected a number from 0 to 9"),
        (spec("f4", {"name": "gzip", "options": {"speed": 1}}), "gzip has no option 'speed' in HDF5"),
        (
            spec("f4", {"name": "blosc", "options": {"cname": "x"}}),
            "Blosc's compressor for '/x' is 'x'; expected one of blosclz",
        ),
        (
            spec("f4", "12345"),
            "which the HDF5 library here does not have: `pip install hdf5plugin`, or pass compression='gzip'",
        ),
        (spec("f4", dims=("a", "b")), r"dims of '/x' are \('a', 'b'\); expected 3 names"),
        (spec("i2", fill_value=1.5), "the fill value of '/x' is 1.5; expected one value of type int16"),
        (spec("i2", fill_value=70000), "the fill value of '/x' is 70000"),
        (spec("f4", shards=(4, 6, 8)), "'/x' has shards, which HDF5 does not have"),
        (
            spec("f4", chunks=(3, 5, 7), shards=(4, 6, 8)),
            "'/x' has shards, which HDF5 does not have",
        ),  # also if they do not fit
        (spec("f4", attrs={"a": object()}), "the attribute 'a' of '/x' is <object .*which HDF5 cannot hold"),
        (
            spec("f4", attrs={"a": np.ma.masked}),
            "the attribute 'a' of '/x' is masked in part, which HDF5 does not have. Leave it out",
        ),
        (spec("f4", attrs={"a": np.ma.array([1, 2], mask=[0, 1])}), "masked in part, which HDF5 does not have"),
        (spec("f4", dims=("y", "z\0a", "x")), r"axis 1 of '/x' is called 'z\\x00a'; expected a name without '/' or zero bytes"),
        (spec("f4", attrs={"a": [1, "b"]}), "the attribute 'a' of '/x' is .*which HDF5 cannot hold"),
        (spec("f4", attrs={"a": np.zeros(9000)}), "of 72,001 bytes; .* less than 64 KiB"),
        (spec("f4", attrs={"CLASS": "x"}), "keep for themselves"),
        (spec("f4", attrs={"a\0b": 1}), "zero byte"),
        (spec("f4", attrs={"a": [ml_dtypes.bfloat16(1)]}), "is bfloat16, which HDF5 would hold as bytes .*float32"),
        (spec("f4", attrs={"a": ml_dtypes.bfloat16(1)}), "is bfloat16, which HDF5 would hold as bytes .*float32"),
        (spec("f4", "zfp"), "compression of '/x' is 'zfp', which changes values unless it is told how not to"),
        (spec("f4", "sz"), "which changes values"),  # without parameters it ends the process
        (spec("f4", "32024"), "which changes values"),
        (spec("f4", "scaleoffset"), "which changes values"),
        (spec("f8", None, (1 << 30,), (1 << 31,)), "in HDF5 a chunk has less than 4 GiB"),
    ],
)
def test_what_cannot_be_saved_is_an_error_before_anything_is_on_disk(tmp_path: Path, asked: ArraySpec, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_sink(str(tmp_path / "x.h5"), {"x": asked})
    assert not os.listdir(tmp_path)


def test_the_name_of_an_axis_beside_a_coordinate(tmp_path: Path) -> None:
    """Wrong if it were looked at only after HDF5 was asked for it, which it is where there are coordinates."""
    specs = {"x": spec("f4", dims=("y", "\0", "z")), "y": ArraySpec((3,), np.dtype("f4"), dims=("y",))}
    with pytest.raises(ConfigError, match=r"axis 1 of '/x' is called '\\x00'; expected a name without"):
        make_sink(str(tmp_path / "x.h5"), specs)


def test_compression_is_checked() -> None:
    """Wrong if what Python takes for true were a shuffle, or numbers of NumPy were no levels."""
    blosc = {"name": "blosc", "shuffle": "bitshuffle"}, {"name": "blosc", "options": ("zstd",)}
    for wrong in (7, {"level": 3}, {"name": "gzip", "speed": 1}, {"name": "gzip", "shuffle": "no"}, *blosc):
        with pytest.raises(ConfigError, match="expected a name such as compression='gzip'"):
            Compression.of(wrong)
    assert HDF5_CODECS[1].checked_level(np.int64(3)) == 3


def test_the_catalog_compares_the_written_file_with_its_notes(tmp_path: Path) -> None:
    """Wrong if metadata of another allocation were taken for that of this one."""
    sink = make_sink(str(tmp_path / "x.h5"), {"x": spec("i4", "gzip", (2, 8), (12, 8))})
    with sink.create() as catalog:
        catalog.allocate("/x", range(6), [10, 11, 12, 13, 14, 15])
        noted = catalog.chunks["/x"]  # type: ignore[attr-defined]
        noted.offsets[[1, 4]] = noted.offsets[[4, 1]]
        noted.sizes[[1, 4]] = 11  # so that nothing overlaps
        with pytest.raises(SourceError, match=r"chunk \(1, 0\) of '/x' .* but was written at byte"):
            catalog.finish()
