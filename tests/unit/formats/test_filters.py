"""Which decoders may a file choose, and what is asked of it before they run?"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs
from jax.sharding import AbstractMesh, PartitionSpec
from typer.testing import CliRunner
from zarr.abc.codec import BytesBytesCodec

import shardload
from benchmarks.fuzz.filter_files import FilterKind, hdf5_kinds
from shardload.cli.main import app
from shardload.errors import SourceError
from shardload.formats.access import STRICT, Access
from shardload.formats.contract.format import UndecodedError
from shardload.formats.hdf5 import filters as hdf5_filters
from shardload.formats.lookup import list_arrays, open_source
from shardload.formats.zarr.nodes import checked
from shardload.planning.region import Region
from tests.unit.files import change_json, flat, load_all, raw_dataset, read_all, write_hdf5, write_zarr

ASKED = {
    307: dict(hdf5plugin.BZip2()),
    32008: dict(hdf5plugin.Bitshuffle()),
    32013: dict(hdf5plugin.Zfp(reversible=True)),
    32024: dict(hdf5plugin.SZ3(absolute=1e-9)),
    4: {"compression": "szip"},
    6: {"scaleoffset": 2},
}


@pytest.fixture(scope="module")
def kinds() -> dict[str, FilterKind]:
    with tempfile.TemporaryDirectory() as made:
        return {f"{kind.filter.partition(' (')[0]}: {kind.way}": kind for kind in hdf5_kinds(Path(made))}


def values_of(path: str, allow: Any) -> np.ndarray[Any, Any]:
    return load_all(path, "/a", Access(allow_filters=allow))


# --- which


@pytest.mark.parametrize("number", ASKED)
def test_a_filter_that_does_not_survive_damage_needs_a_word(tmp_path: Path, number: int) -> None:
    data, name = flat((64, 64)), hdf5_filters.filter_of(number).word
    path = write_hdf5(tmp_path / "a.h5", {"a": data}, chunks=(32, 32), **ASKED[number])
    for allow in ((), {"gzip"}, {"shuffle", "32999"}):
        with pytest.raises(
            SourceError, match=rf"'/a' in .* HDF5 filter {number} \({name}\).*damage.*pass allow_filters='{name}'\.$"
        ):
            open_source(path, "/a", Access(allow_filters=allow))
    assert (
        f"allow_filters='{name}'" in (list_arrays(path)[0].refused or "")
        and list_arrays(path, Access(allow_filters={name}))[0].refused is None
    )
    for allow in ({name}, {str(number)}, {"all"}, {"gzip", name}):
        np.testing.assert_allclose(values_of(path, allow), data, rtol=1e-6)


def test_every_call_passes_the_word_on(tmp_path: Path) -> None:
    data = flat((64, 64))
    path = write_hdf5(tmp_path / "a.h5", {"a": data}, chunks=(32, 32), **ASKED[32008])
    mesh, spec = AbstractMesh((2,), ("x",)), PartitionSpec("x")
    with pytest.raises(SourceError, match="allow_filters='bitshuffle'"):
        shardload.plan(path, mesh, spec)
    for word in ("bitshuffle", "BITSHUFFLE, zfp", 32008, ["all"], ("zfp", 32008)):
        assert shardload.plan(path, mesh, spec, allow_filters=word).shape == (64, 64)
    with h5py.File(path) as file, pytest.raises(SourceError, match="allow_filters='bitshuffle'"):
        shardload.plan(file["a"], mesh, spec)  # an open array is no word: its file chose the decoder, too


def test_a_file_cannot_call_its_filter_by_an_allowed_name() -> None:
    kind = h5py.h5t.IEEE_F32LE
    for label in (b"gzip", b"all", b"zfp", b"40000"):
        said = hdf5_filters.refuse_filter(40000, label, (), kind, (4,), Access(allow_filters={"gzip", "zfp", "307"})) or ""
        assert "filter 40000" in said and "allow_filters='40000'" in said
    assert hdf5_filters.refuse_filter(40000, b"\x1b[31m\xff", (), kind, (4,), Access(allow_filters={"40000"})) is None
    assert "\x1b" not in (hdf5_filters.refuse_filter(40000, b"\x1b[31m\xff", (), kind, (4,), STRICT) or "")


def test_a_filter_that_is_refused_is_not_even_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 would load a program from HDF5_PLUGIN_PATH because a file names its number."""
    path = write_hdf5(tmp_path / "a.h5", {"a": flat((64, 64))}, chunks=(32, 32), **ASKED[32008])
    asked: list[int] = []
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: bool(asked.append(number)) or True)
    with pytest.raises(SourceError):
        open_source(path, "/a")
    list_arrays(path)
    assert asked == []
    open_source(path, "/a", Access(allow_filters={"bitshuffle"})).close()
    assert asked and set(asked) == {32008}


def test_hdf5plugin_is_imported_when_one_of_its_filters_may_be_used(tmp_path: Path) -> None:
    kinds = {"gzip": {"compression": "gzip"}, "bitshuffle": ASKED[32008], "zstd": dict(hdf5plugin.Zstd())}
    paths = [write_hdf5(tmp_path / f"{n}.h5", {"a": flat((64, 64))}, chunks=(32, 32), **o) for n, o in kinds.items()]
    code = (
        "import sys\nfrom shardload.formats.lookup import list_arrays\n"
        "for path in sys.argv[1:]:\n    list_arrays(path)\n    print('hdf5plugin' in sys.modules)\n"
    )
    folder = str(Path(importlib.util.find_spec("netCDF4").origin).parent)  # type: ignore[union-attr, arg-type]
    env = {**os.environ, "HDF5_PLUGIN_PATH": f"{folder}/plugins"}  # as netCDF4 sets it: for another copy of HDF5
    command = [sys.executable, "-c", code, *paths]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=env).stdout
    assert said.split() == ["False", "False", "True"]


def test_a_virtual_dataset_does_not_bring_a_filter_in(tmp_path: Path) -> None:
    data = flat((64, 64))
    write_hdf5(tmp_path / "part.h5", {"a": data}, chunks=(32, 32), **ASKED[32008])
    layout = h5py.VirtualLayout((64, 64), "f4")
    layout[...] = h5py.VirtualSource("part.h5", "a", (64, 64))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("a", layout)
    path = str(tmp_path / "all.h5")
    with pytest.raises(SourceError, match=r"'/a' in '.*part.h5', which holds .*\(bitshuffle\).*allow_filters='bitshuffle'"):
        open_source(path, "/a")
    np.testing.assert_array_equal(values_of(path, {"bitshuffle"}), data)


class Mine(numcodecs.abc.Codec):  # type: ignore[misc]
    """A codec of another package."""

    codec_id = "mine"

    def encode(self, buf: Any) -> Any:
        return numcodecs.compat.ensure_bytes(buf)

    def decode(self, buf: Any, out: Any = None) -> Any:
        return numcodecs.compat.ndarray_copy(buf, out)


class Mine3(BytesBytesCodec):
    """The same for format 3."""

    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: Any) -> Mine3:
        return cls()

    def to_dict(self) -> dict[str, Any]:
        return {"name": "mine", "configuration": {}}

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        return chunk_bytes

    async def _encode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        return chunk_bytes

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        return input_byte_length


@pytest.mark.parametrize("where", ["2", "2, a filter", "3", "3, in shards"])
def test_a_codec_of_another_package_needs_a_word(tmp_path: Path, where: str) -> None:
    numcodecs.register_codec(Mine)
    zarr.registry.register_codec("mine", Mine3)
    shards = zarr.codecs.ShardingCodec(chunk_shape=(4, 4), codecs=[zarr.codecs.BytesCodec(), Mine3()])
    options: dict[str, dict[str, Any]] = {
        "2": {"compressors": Mine()},
        "2, a filter": {"filters": [Mine()], "compressors": numcodecs.Zlib()},
        "3": {"compressors": [Mine3()]},
        "3, in shards": {"serializer": shards, "compressors": None},
    }
    data, chunks = flat((8, 8)), (8, 4) if "shards" not in where else (8, 8)
    path = write_zarr(tmp_path / "a.zarr", {"a": data}, int(where[0]), chunks=chunks, **options[where])
    with pytest.raises(SourceError, match=r"codec 'mine', .*not known.*pass allow_filters='mine'\.$"):
        open_source(path, "/a", Access(allow_filters={"zstd"}))
    assert "allow_filters='mine'" in (list_arrays(path)[0].refused or "")
    for allow in ({"mine"}, {"all"}):
        np.testing.assert_array_equal(values_of(path, allow), data)
    with pytest.raises(SourceError, match="allow_filters='mine'"):
        open_source(zarr.open_array(path, path="a"), "/a")


def test_allowing_all_allows_no_program(tmp_path: Path) -> None:
    path = write_zarr(tmp_path / "a.zarr", {"a": flat((4,))}, 2, compressors=numcodecs.Zlib())
    change_json(tmp_path / "a.zarr/a/.zarray", filters=[{"id": "pickle", "protocol": 5}])
    with pytest.raises(SourceError, match="pickle"):
        open_source(path, "/a", Access(allow_filters={"all"}))


# --- parameters

# Part of the name of a kind; which of its numbers (0: how many there are); another value; what is said.
WRONG = [
    ("gzip: float32", 1, 77, r"number 1 should be range\(0, 10\)"),
    ("gzip: float32", 0, 0, "there are 0"),
    ("shuffle: float32", 1, 0, r"number 1 should be \(4,\)"),
    ("shuffle: float32", 1, 2**31, r"number 1 should be \(4,\)"),
    ("lzf: float32", 3, 16, r"number 3 should be \(3840,\)"),
    ("blosc: lz4, shuffle 1", 0, 0, "there are 0"),
    ("blosc2: zstd, filters 3", 4, 2**31 - 1, "number 4 should be"),
    ("blosc2: zstd, filters 3", 8, 9, "number 8 should be"),
]


@pytest.mark.parametrize(("name", "which", "value", "said"), WRONG)
def test_parameters_that_do_not_fit(
    kinds: dict[str, FilterKind], tmp_path: Path, name: str, which: int, value: int, said: str
) -> None:
    """Wrong if they were left to the filter, which would crash, loop or write where it should not."""
    kind = kinds[name]
    data = bytearray(kind.files["f.h5"])
    path = tmp_path / "a.h5"
    path.write_bytes(data)
    open_source(path, "/a", Access(allow_filters={"all"})).close()
    at, width = kind.parameters[which]
    data[at : at + width] = value.to_bytes(width, "little")
    path.write_bytes(data)
    own = rf"HDF5 filter \d+ \({name.partition(':')[0]}\), whose parameters .* do not fit.*{said}"
    with pytest.raises(SourceError, match=rf"{own}|tuple index out of range|Unknown SZIP"):  # h5py 3.12 trips over some
        open_source(path, "/a", Access(allow_filters={"all"}))


def test_parameters_that_fit_in_all_good_files(kinds: dict[str, FilterKind], tmp_path: Path) -> None:
    for k, kind in enumerate(kinds.values()):
        path = tmp_path / f"{k}.h5"
        path.write_bytes(kind.files["f.h5"])
        np.testing.assert_array_equal(values_of(str(path), {"all"}), kind.values, kind.name)


def test_a_copy_of_chunks_with_a_negative_level(tmp_path: Path) -> None:
    """The netCDF library has such levels of Zstandard. Wrong if 4294967291 were taken for one, which no encoder has."""
    data, level = flat((64,)), (2**32 - 5,)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        raw_dataset(file, "a", h5py.h5t.IEEE_F32LE, (64,), data, chunks=(16,), filters=[(32015, 0, level)])
    done = CliRunner().invoke(app, ["copy", str(tmp_path / "a.h5"), str(tmp_path / "b.h5")])
    assert done.exit_code == 0, done.output
    with h5py.File(tmp_path / "b.h5") as file:
        assert file["a"].id.get_create_plist().get_filter(0)[2] == level
        np.testing.assert_array_equal(file["a"], data)


# --- what chunks say of their own length


SHORT = r"""
import sys, h5py, numpy as np
from shardload.planning.region import Region
from shardload.formats.lookup import open_source
for path in sys.argv[1:]:
    for way in ("read_into", "plain"):
        source = open_source(path, "/a")
        whole = Region.whole(source.info.shape)
        try:
            source.plain(whole) if way == "plain" else source.read_into(whole, np.empty(whole.shape, source.dtype))
            print("values")
        except ValueError as error:
            print("refused", error)
"""


def test_chunks_that_are_too_short_do_not_reach_hdf5(tmp_path: Path) -> None:
    """In a process of its own: HDF5's filters read past the end of memory, which may crash it. LZF may never end, if there is
    nothing to decode.
    """
    options: dict[str, dict[str, Any]] = {
        "fletcher32": {"fletcher32": True},
        "shuffle": {"shuffle": True},
        "lz4": dict(hdf5plugin.LZ4()),
        "blosc": dict(hdf5plugin.Blosc()),
        "zstd": dict(hdf5plugin.Zstd()),
        "lzf": {"compression": "lzf"},
        "lzf and fletcher32": {"compression": "lzf", "fletcher32": True},
    }
    lengths = {"fletcher32": 2, "lzf and fletcher32": 4}
    paths = []
    for name, more in options.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            made = file.create_dataset("a", data=flat((64, 64), "i4"), chunks=(32, 64), **more)
            stored = made.id.read_direct_chunk((0, 0))[1]
            made.id.write_direct_chunk((0, 0), stored[: lengths.get(name, 30)])
        paths.append(str(tmp_path / f"{name}.h5"))
    content = bytearray((tmp_path / "lzf.h5").read_bytes())
    length_at = content.index(b"TREE\x01") + 24  # of the first chunk, in its index
    content[length_at : length_at + 4] = bytes(4)
    (tmp_path / "lzf.h5").write_bytes(content)
    found = subprocess.run([sys.executable, "-c", SHORT, *paths], capture_output=True, text=True, timeout=120, check=False)
    said = found.stdout.splitlines()
    assert found.returncode == 0 and len(said) == 2 * len(paths), (found.returncode, said, found.stderr[-300:])
    assert all(line.startswith("refused") for line in said), said


@pytest.mark.parametrize("how", [{"mode": "r+"}, {"driver": "stdio"}])
def test_chunks_that_hdf5_alone_can_read_are_not_left_to_its_decoder(tmp_path: Path, how: dict[str, Any]) -> None:
    """Wrong if HDF5 were given a chunk that declares its own length, or if who allows that did not get the values."""
    data = flat((64, 64))
    path = write_hdf5(tmp_path / "a.h5", {"a": data}, chunks=(32, 64), **hdf5plugin.Zstd())
    with h5py.File(path, **how) as file:
        for read in (read_all, lambda source: source.plain(Region.whole((64, 64)))):
            with pytest.raises(UndecodedError, match=r"encoded by zstd, .* for writing .*pass allow_filters='zstd'$"):
                read(open_source(file["a"], "/a"))
            np.testing.assert_array_equal(read(open_source(file["a"], "/a", Access(allow_filters={"zstd"}))), data)


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
@pytest.mark.parametrize("form", ["2", "3", "3, numcodecs", "3, shards"])
def test_blosc_of_zarr_is_not_believed(tmp_path: Path, form: str) -> None:
    """zarr-python hands numcodecs a chunk that says that it is longer than it is."""
    z, data = zarr.codecs, flat((8, 8))
    make: Any = zarr.registry.get_codec_class("numcodecs.blosc")
    own = make(cname="lz4") if "numcodecs" in form else z.BloscCodec(cname="lz4", typesize=4)
    options: dict[str, Any] = {"compressors": numcodecs.Blosc("lz4") if form == "2" else [own]}
    if "shards" in form:
        options = {"serializer": z.ShardingCodec(chunk_shape=(4, 8), codecs=[z.BytesCodec(), own]), "compressors": None}
    made = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=int(form[0]))  # type: ignore[arg-type]
    made.create_array("a", shape=(8, 8), dtype="f4", chunks=(8, 8), **options)[...] = data
    file = next(
        f for f in (tmp_path / "a.zarr/a").rglob("*") if f.is_file() and f.name not in (".zarray", ".zattrs", "zarr.json")
    )
    source = open_source(tmp_path / "a.zarr", "/a")
    np.testing.assert_array_equal(source.plain(Region.whole((8, 8))), data)
    stored = bytearray(file.read_bytes())
    at = 12  # of the first chunk, in a shard too: bytes of the whole buffer
    stored[at : at + 4] = (int.from_bytes(stored[at : at + 4], "little") + 1).to_bytes(4, "little")
    file.write_bytes(stored)
    with pytest.raises(ValueError, match="the blosc header declares"):
        source.plain(Region.whole((8, 8)))
    source.close()
    assert type(checked(made["a"].metadata)) is type(made["a"].metadata)


def test_blosc_with_snappy(tmp_path: Path) -> None:
    """Wrong if a chunk were called damaged that HDF5's filter reads and numcodecs's build does not. Also with parameters that
    decoding does not need.
    """
    data = np.arange(4096.0)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=data, chunks=(1024,), **hdf5plugin.Blosc(cname="snappy"))
        filters = [(32001, h5py.h5z.FLAG_OPTIONAL, (2, 2, 8, 32768, 5, 1, 1))]
        made = raw_dataset(file, "b", h5py.h5t.IEEE_F64LE, (4096,), chunks=(4096,), filters=filters)
        made.id.write_direct_chunk((0,), bytes(numcodecs.Blosc("lz4").encode(data)))
    content = (tmp_path / "a.h5").read_bytes()
    told = b"".join(n.to_bytes(4, "little") for n in (2, 2, 8, 32768, 5, 1, 1))
    assert content.count(told) == 1
    (tmp_path / "a.h5").write_bytes(content.replace(told, told.replace((32768).to_bytes(4, "little"), bytes(4))))
    with pytest.raises(UndecodedError, match="pass allow_filters='blosc'"):
        load_all(tmp_path / "a.h5", "/a")
    for name in "ab":
        values = load_all(tmp_path / "a.h5", f"/{name}", Access(allow_filters={"blosc"} if name == "a" else set()))
        np.testing.assert_array_equal(values, data)
        with h5py.File(tmp_path / "a.h5") as file:
            np.testing.assert_array_equal(file[name][...], data)
