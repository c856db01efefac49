"""Does the Zarr source deliver what was written, decode each chunk once, and say why where it cannot?"""

from __future__ import annotations

import math
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import ml_dtypes
import numcodecs
import numpy as np
import pytest
import tensorstore
import zarr
import zarr.abc.codec
import zarr.codecs
import zarr.registry
import zarr.storage

import shardload
from shardload.errors import ConfigError, SourceError
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.lookup import find_array, list_arrays, open_source
from shardload.formats.zarr.nodes import ArrayNode
from shardload.formats.zarr.source import describe
from shardload.planning.region import Region
from tests.unit.files import change_json, check_source, flat, read_all, write_tensorstore, write_zarr

pytestmark = pytest.mark.filterwarnings(
    "ignore:The data type",
    "ignore:The codec",
    "ignore:Consolidated metadata",
    "ignore:Object at",
)


def check(path: Any, name: str, expected: np.ndarray[Any, Any]) -> ArrayInfo:
    with closing(open_source(path, name)) as source:
        check_source(source, expected)
        return source.info


def test_the_store_is_one_array(tmp_path: Path) -> None:
    path = str(tmp_path / "a.zarr")
    zarr.create_array(path, data=flat((5, 7)), chunks=(2, 3))
    assert find_array(path) == list_arrays(path)[0] == find_array(path, "/")
    assert check(path, "/", flat((5, 7))).dataset == "/"
    with pytest.raises(ConfigError, match=r"holds no array '/rho'.*'/' \(5, 7\) float32"):
        find_array(path, "rho")
    for odd in ("..", "a//b", "./a"):
        with pytest.raises(ConfigError, match="holds no array"):
            find_array(path, odd)


@pytest.mark.each_value
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "stored", "told"),
    [
        ("f4", "E5eYAQAAnkc=", 9.96921e36),  # as xarray writes it: base64 of the bytes of a little-endian float64
        ("f8", "AAAAAAAA+H8=", math.nan),
        ("f2", "AAAAAAAA8P8=", -math.inf),
        ("c8", ["AAAAAAAA8D8=", "AAAAAAAAAMA="], [1.0, -2.0]),
        ("f4", -9.5, -9.5),
        ("f4", "NaN", "NaN"),
        ("f4", "no base64!", "no base64!"),
        ("i2", -9, -9),
        ("i2", "E5eYAQAAnkc=", "E5eYAQAAnkc="),
    ],
)
def test_fill_values_are_numbers(tmp_path: Path, dtype: str, stored: Any, told: Any, zarr_format: Any) -> None:
    """Wrong if people were shown letters, as xarray writes them, or another number."""
    made = zarr.create_array(str(tmp_path / "a.zarr"), shape=(3,), dtype=dtype, zarr_format=zarr_format)
    made.attrs.update({"_FillValue": stored, "missing_value": stored})
    found = find_array(tmp_path / "a.zarr").attributes
    assert repr(found["_FillValue"]) == repr(told) and type(found["_FillValue"]) is type(told)
    assert found["missing_value"] == stored, "which xarray writes as it is"


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_what_is_refused_says_what_it_is(tmp_path: Path, zarr_format: Any) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=zarr_format)
    group.create_array("variable", shape=(3,), dtype=str)
    group.create_array("fixed", shape=(3,), dtype="U4")
    group.create_array("date", shape=(3,), dtype="M8[s]")
    group.create_array("span", shape=(3,), dtype="m8[s]")
    group.create_array("record", shape=(3,), dtype=[("mass", "f4"), ("id", "i8")])
    group.create_array("raw", shape=(3,), dtype="V5")
    group.create_array("good", data=flat((3,)))
    path = str(tmp_path / "a.zarr")
    expected = {
        "variable": "variable-length strings|Python objects",
        "fixed": "strings",
        "date": r"dates\.",  # and not that they are loaded in another way, which is refused too
        "span": r"time spans\.",
        "record": "records with fields mass, id",
        "raw": "raw bytes without a type",
    }
    for name, why in expected.items():
        for attempt in (find_array, open_source):
            with pytest.raises(SourceError, match=f"'/{name}' in '.*' cannot be loaded: it holds .*({why})") as caught:
                attempt(path, name)
            assert (caught.value.path, caught.value.dataset) == (path, "/" + name)
        read = re.search(r"Read this array by (zarr.*\]); shardload.scatter takes", str(caught.value))
        assert read is not None
        np.testing.assert_array_equal(eval(read[1], {"zarr": zarr}), group[name][...])
    assert find_array(path).dataset == "/good"


def test_what_zarr_python_refuses_or_does_not_find(tmp_path: Path) -> None:
    """Wrong if values behind a transformer, which may be anything, were taken for the array's; or if the chunks below a name
    with a backslash counted as missing, because zarr-python looks for them elsewhere.
    """
    data = flat((4, 6))
    path = Path(write_zarr(tmp_path / "a.zarr", {"a": data, "b": data}))
    change_json(path / "a/zarr.json", storage_transformers=[{"name": "x"}])
    (path / "b").rename(path / "b\\c")
    with pytest.raises(ValueError, match="storage transformers"):
        zarr.open_array(path, path="a", mode="r")
    for name, said in (
        ("a", "storage transformers, which are not known here"),
        ("b\\c", "which zarr-python takes for a slash"),
    ):
        with pytest.raises(SourceError, match=said):
            open_source(path, name)
        assert [info.dataset for info in list_arrays(str(path)) if said in str(info.refused)] == [f"/{name}"]


def test_a_grid_that_is_not_regular_is_refused(tmp_path: Path) -> None:
    """Newer versions of zarr-python open such an array, and raise if it is asked for its chunks or shards."""
    array = zarr.open_array(write_zarr(tmp_path / "a.zarr", {"a": flat((6, 4))}), path="a", mode="r")

    grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": [[2, 4], [4]]}}
    node = ArrayNode(ArrayNode.of(array).document | {"chunk_grid": grid})
    vars(node)["metadata"] = array.metadata
    info = describe(node, "a.zarr", "/a")
    assert info.refused == "chunks of a grid that is not regular; only regular grids can be loaded"
    assert (info.shape, info.chunks, info.shards) == ((6, 4), None, None)


def test_broken_metadata_is_a_source_error_and_hides_no_other_array(tmp_path: Path) -> None:
    data = {"a": flat((3, 4)), "b": flat((5,)), "c": flat((6,))}
    path = write_zarr(tmp_path / "a.zarr", data)
    (tmp_path / "a.zarr" / "b" / "zarr.json").write_text('{"zarr_format": 3, "node_')
    grid = {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": [[1, 5]]}}
    change_json(tmp_path / "a.zarr" / "c" / "zarr.json", chunk_grid=grid)
    infos = {info.dataset: info for info in list_arrays(path)}
    assert [name for name, info in infos.items() if info.refused is None] == ["/a"]
    assert "metadata that cannot be read" in str(infos["/b"].refused)
    assert "grid" in str(infos["/c"].refused)
    assert find_array(path).dataset == "/a"
    check(path, "/a", data["a"])
    for name in ("b", "c"):
        for attempt in (find_array, open_source):
            with pytest.raises(SourceError, match=f"'/{name}' in '{path}' c") as caught:
                attempt(path, name)
            assert (caught.value.path, caught.value.dataset) == (path, "/" + name)
    for text in ('{"zarr_format": 3, "node_', "[]", '{"zarr_format": 3, "node_type": "array"}'):
        (tmp_path / "a.zarr" / "zarr.json").write_text(text)
        with pytest.raises(SourceError, match=f"'{path}' cannot be opened: its metadata is damaged") as caught:
            list_arrays(path)
        assert caught.value.path == path


@pytest.mark.parametrize("where", ["2", "3", "3, in shards"])
@pytest.mark.parametrize("name", ["/a", "/"])
def test_a_codec_that_is_not_installed_is_named(tmp_path: Path, where: str, name: str) -> None:
    """Wrong if it were called damage, or the package that has it went unsaid."""
    path, version = str(tmp_path / "s.zarr"), int(where[0])
    if name == "/a":
        zarr.open_group(path, mode="w", zarr_format=version)  # type: ignore[arg-type]
    array = zarr.create_array(
        str(tmp_path / "s.zarr" / name.strip("/")),
        shape=(8,),
        dtype="f4",
        chunks=(2,),
        shards=(4,) if "shards" in where else None,
        zarr_format=version,  # type: ignore[arg-type]
        compressors=numcodecs.Zlib() if where == "2" else zarr.codecs.ZstdCodec(),
    )
    array[...] = 1
    file = tmp_path / "s.zarr" / name.strip("/") / (".zarray" if where == "2" else "zarr.json")
    file.write_text(file.read_text().replace('"zlib"' if where == "2" else '"zstd"', '"my/codec"'))
    said = "metadata that zarr-python does not understand .*my/codec.* of a package that is not installed here: install it"
    for call in (find_array, open_source):
        with pytest.raises(SourceError, match=rf"^'{name}' in '{path}' cannot be loaded: it holds {said}") as error:
            call(path, name)
        assert (error.value.path, error.value.dataset) == (path, name)
    (info,) = list_arrays(path)
    assert info.dataset == name and re.match(said, str(info.refused))


def test_open_arrays_of_any_store(tmp_path: Path) -> None:
    store = zarr.storage.MemoryStore()
    group = zarr.create_group(store)
    array = group.create_array("g/a", data=flat((5, 7)), chunks=(2, 3))
    info = find_array(array)
    assert info == find_array(array, "g/a") and info.dataset == "/g/a" and info.path == "<MemoryStore>"
    assert check(array, info.dataset, flat((5, 7))) == info
    np.testing.assert_array_equal(array[...], flat((5, 7)))
    with pytest.raises(ConfigError, match=r"from an object of type zarr\..*Group\. .*group\['name'\]"):
        find_array(group)
    with pytest.raises(ConfigError, match=r"the array handed in is '/g/a' .* dataset='b' names another"):
        find_array(array, "b")
    path = write_zarr(tmp_path / "a.zarr", {"a": flat((3,))})
    found = find_array(zarr.open_array(path, path="a"))
    assert (found.path, found.dataset) == (path, "/a")
    archive = shutil.make_archive(str(tmp_path / "a"), "zip", path)
    with zarr.storage.ZipStore(archive, read_only=True) as zipped:
        array = zarr.open_array(zipped, path="a", mode="r")
        found = find_array(array)
        assert (found.path, found.dataset) == (archive, "/a")
        np.testing.assert_array_equal(read_all(open_source(array, "a")), flat((3,)))
        np.testing.assert_array_equal(array[...], flat((3,)))  # still open


def test_missing_chunks_of_an_open_array_of_any_store() -> None:
    array = zarr.create_array(store=zarr.storage.MemoryStore(), shape=(6, 4), chunks=(2, 4), dtype="i4", fill_value=9)
    array[2:4] = 1
    source = open_source(array, "/")
    assert list(source.read_into(Region.whole((6, 4)), np.empty((6, 4), "i4"))) == [(0, 0), (2, 0)]


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e3m4", "float4_e2m1fn", "int4"])
def test_types_of_jax_as_tensorstore_writes_them(tmp_path: Path, name: str, driver: str) -> None:
    """Wrong if their bits were others, or a missing chunk had another value than TensorStore gives it."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    values = (np.arange(48) % 2 * 2 - 1).reshape(8, 6).astype(np.float32).astype(dtype)
    form: dict[str, Any] = {"dtype": name, "chunks": [4, 6]}
    if driver == "zarr3":
        grid = {"name": "regular", "configuration": {"chunk_shape": [4, 6]}}
        form = {"data_type": name, "chunk_grid": grid}
    if name != "float4_e2m1fn":  # of which the two have different texts in format 2
        form["fill_value"] = 1 if name == "int4" else "NaN" if name == "bfloat16" else 1.5
    metadata = {"shape": [12, 6], **form}
    kvstore = {"driver": "file", "path": f"{tmp_path}/a.zarr/"}
    store = tensorstore.open({"driver": driver, "kvstore": kvstore, "metadata": metadata}, create=True).result()
    store[:8].write(values).result()
    expected = np.asarray(store.read().result())
    with closing(open_source(str(tmp_path / "a.zarr"), "/")) as source:
        assert source.info.dtype == name and source.dtype == dtype
        assert read_all(source).tobytes() == expected.tobytes() == source.plain(Region.whole((12, 6))).tobytes()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("float6_e2m3fn", "numbers of type float6_e2m3fn, which JAX does not have"),
        ("decimal128", "metadata that zarr-python does not understand"),
    ],
)
def test_types_that_are_not_loaded(tmp_path: Path, name: str, said: str) -> None:
    """Wrong if they hid other arrays, or the error did not name the type."""
    path = write_zarr(tmp_path / "a.zarr", {"a": flat((3,)), "b": flat((3,))})
    change_json(tmp_path / "a.zarr" / "b" / "zarr.json", data_type=name, fill_value=0)
    a, b = list_arrays(path)
    assert a.refused is None and str(b.refused).startswith(said) and name in str(b.refused)
    with pytest.raises(SourceError) as caught:
        open_source(path, "/b")
    assert said in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize("is_whole", [True, False])
def test_blosc_with_snappy(tmp_path: Path, is_whole: bool) -> None:
    """Read here, and by zarr-python. Wrong if the error said that the chunk is damaged, and no more."""
    compressor = {"id": "blosc", "cname": "snappy", "clevel": 5, "shuffle": 1}
    write_tensorstore(tmp_path / "a.zarr", flat((5000,), "i4"), "zarr", chunks=[1000], dtype="<i4", compressor=compressor)
    said = "the blosc data is damaged, or encoded by a compressor"
    with closing(open_source(str(tmp_path / "a.zarr"), "/")) as source, pytest.raises(ValueError, match=said):
        read_all(source) if is_whole else source.plain(Region.whole((5000,)))


@pytest.mark.parametrize("nbytes", ["0", '"0"'], ids=["netCDF 4.10", "netCDF 4.9"])
def test_a_shuffle_of_elements_without_bytes(tmp_path: Path, nbytes: str) -> None:
    """netCDF writes it with ``zlib=True``. Wrong if the values were those of zarr-python, which leaves them shuffled."""
    path, values = tmp_path / "a.zarr", flat((12,), "f4")
    zarr.create_array(path, data=values, zarr_format=2, filters=[numcodecs.Shuffle(4)], compressors=numcodecs.Zlib(1))
    assert list_arrays(str(path))[0].refused is None
    text = (path / ".zarray").read_text()
    (path / ".zarray").write_text(text.replace('"elementsize": 4', f'"elementsize": {nbytes}'))
    opened = zarr.open_array(path, mode="r")
    assert nbytes != "0" or not np.array_equal(opened[...], values)
    for refused in (list_arrays(str(path))[0].refused, describe(ArrayNode.of(opened), "a.zarr", "/").refused):
        assert refused is not None and 'set "elementsize" to 4 in its .zarray' in refused
    with pytest.raises(ConfigError, match=r"the codec 'shuffle' with .*, which append does not write"):
        shardload.append(path, values, dim=0, dataset="/")
