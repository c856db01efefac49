"""Are the chunks that a set of references names read from where they are, and nothing else?"""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
import zstandard
from jax.sharding import Mesh, PartitionSpec

import shardload
from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access
from shardload.formats.lookup import find_array, list_arrays, open_source
from shardload.formats.zarr.nodes import ArrayNode
from shardload.formats.zarr.references import ReferenceFolder
from shardload.formats.zarr.store import open_store
from shardload.planning.region import Region
from shardload.storage.local import OutsideError
from shardload.storage.remote import RemoteChangedError, StorageOptions
from tests.servers import ObjectServer
from tests.unit.files import check_source, flat, load_all, python_memory_below, read_all

DATA = flat((6, 10), "<f4")
ARRAY = {"zarr_format": 2, "shape": [6, 10], "chunks": [2, 5], "dtype": "<f4", "fill_value": 7, "order": "C", "filters": None}


def chunks_of(path: Path) -> dict[str, list[Any]]:
    """Where an HDF5 file has the chunks of `DATA`, as h5py says."""
    with h5py.File(path, "w") as file:
        file["before"] = np.arange(100)
        made = file.create_dataset("x", data=DATA, chunks=(2, 5), compression="gzip")
        infos = [made.id.get_chunk_info(k) for k in range(made.id.get_num_chunks())]
    return {f"x/{c.chunk_offset[0] // 2}.{c.chunk_offset[1] // 5}": ["{{u}}", c.byte_offset, c.size] for c in infos}


def write(path: Path, target: str, more: dict[str, Any] | None = None, compressor: Any = None) -> str:
    """References to a file beside, under that name."""
    metadata = {
        ".zgroup": json.dumps({"zarr_format": 2}),
        "x/.zarray": json.dumps({**ARRAY, "compressor": compressor or {"id": "zlib", "level": 4}}),
        "x/.zattrs": {"_ARRAY_DIMENSIONS": ["a", "b"]},
    }
    refs = {**metadata, **chunks_of(path.parent / "x.h5"), **(more or {})}
    refs = {key: value for key, value in refs.items() if value is not None}
    text = json.dumps({"version": 1, "templates": {"u": target}, "refs": refs}).encode()
    path.write_bytes(zstandard.compress(text) if path.suffix == ".zst" else text)
    return str(path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    """It has the folder ``b``, as a bucket and by HTTP."""
    pytest.importorskip("obstore")
    (tmp_path / "b").mkdir()
    with ObjectServer(tmp_path) as server:
        yield server


def access_to(server: ObjectServer, allow_external: bool = False) -> Access:
    return Access(allow_external, storage=StorageOptions(server.storage))


@pytest.mark.parametrize("name", ["refs.json", "refs.json.zst"])
def test_chunks_of_a_file_beside(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "x.h5")
    assert [(info.dataset, info.shape) for info in list_arrays(path)] == [("/x", (6, 10))]
    source = open_source(path, "x")
    check_source(source, DATA)
    assert source.labels().dims == ("a", "b") and source.opened_in == source.state() is not None


def test_values_in_the_set_and_missing_ones(tmp_path: Path) -> None:
    """The old form, without "refs", too."""
    values, inside = np.arange(60, dtype="<f4").reshape(6, 10), np.arange(10, 20, dtype="<f4")
    text = {"x/.zarray": json.dumps({**ARRAY, "compressor": None}), "x/0.1": "base64:" + base64.b64encode(inside).decode()}
    (tmp_path / "raw.bin").write_bytes(b"head" + values[2:4, 5:].tobytes())
    text["x/1.1"] = ["raw.bin", 4, 40]  # type: ignore[assignment]
    (tmp_path / "whole.bin").write_bytes(values[4:, :5].tobytes())
    text["x/2.0"] = ["whole.bin"]  # type: ignore[assignment]
    (tmp_path / "refs.json").write_text(json.dumps(text))
    expected = np.full((6, 10), 7, "f4")
    expected[:2, 5:], expected[2:4, 5:], expected[4:, :5] = inside.reshape(2, 5), values[2:4, 5:], values[4:, :5]
    np.testing.assert_array_equal(load_all(tmp_path / "refs.json", "x"), expected)


def test_what_is_wrong_with_references(tmp_path: Path) -> None:
    for more, said in (
        ({"x/0.0": ["no-such.h5", 0, 10]}, "no-such.h5"),  # not a missing chunk, whose values would be made up
        ({"x/0.0": ["x.h5", 10**9, 10]}, "the file ends at byte"),
        ({"x/0.0": ["x.h5", 0, 10**9]}, "10..*bytes"),
        ({"x/0.0": ["x.h5", 0]}, r"expected a text, \[URL\], or \[URL, offset, bytes\]"),
        ({"x/0.0": ["{{v}}", 0, 9]}, "the template 'v' of a reference is no plain text"),
        ({"x/0.0": ["hf://a/x.h5", 0, 9]}, "a URL of an unknown kind"),
    ):
        with pytest.raises((OSError, ValueError), match=said):
            load_all(write(tmp_path / "refs.json", "x.h5", more), "x")
    path = Path(write(tmp_path / "refs.json", "x.h5", {"x/0.0": "null"}))
    path.write_text(path.read_text().replace('"null"', "null"))
    with pytest.raises(ValueError, match=r"reference 'x/0\.0' is None, expected a text"):  # fsspec does not read it either
        load_all(str(path), "x")
    (tmp_path / "refs.json").write_text('{"refs": [1]}')
    with pytest.raises(SourceError, match="it is no set of references"):
        list_arrays(str(tmp_path / "refs.json"))
    write(tmp_path / "refs.json", "x.h5", {"g/" * 300 + ".zgroup": "{}"})  # 500,000 of them would take 250 GB
    with pytest.raises(SourceError, match=r"refs.json.*has 300 groups above it; 256 are read at most"):
        list_arrays(str(tmp_path / "refs.json"))
    with open(tmp_path / "refs.json", "ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(
        SourceError, match=r"refs.json.*it has 1099511627776 bytes or more, a set of references 1073741824 at most"
    ):
        list_arrays(str(tmp_path / "refs.json"))
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(SourceError, match="unknown format"):
        list_arrays(str(tmp_path / "other.json"))


def in_parquet(path: Path, n_rows: int = 5, as_text: bool = True) -> str:
    """The references of a set in JSON, written again in Parquet: a folder beside it."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    document = json.loads(path.read_text())
    refs, folder = document["refs"], path.with_suffix(".parq")
    metadata = {
        key: json.loads(value) if isinstance(value, str) else value for key, value in refs.items() if "/.z" in f"/{key}"
    }
    (folder / "x").mkdir(parents=True, exist_ok=True)
    (folder / ".zmetadata").write_text(json.dumps({"metadata": metadata, "record_size": n_rows}))
    rows = [refs.get(f"x/{i}.{j}") for i in range(3) for j in range(2)]
    for number in range(-(-len(rows) // n_rows)):
        part = rows[number * n_rows :][:n_rows]
        part += [None] * (n_rows - len(part))
        places = [row if isinstance(row, list) else [None, 0, 0] for row in part]
        paths = pyarrow.array(
            [url and url.replace("{{u}}", document["templates"]["u"]) for url, *_ in places], pyarrow.string()
        )
        columns = {
            "path": paths if as_text else paths.dictionary_encode(),
            "offset": [row[1] if len(row) > 1 else 0 for row in places],
            "size": [row[2] if len(row) > 1 else 0 for row in places],
            "raw": pyarrow.array([row.encode() if isinstance(row, str) else None for row in part], pyarrow.binary()),
        }
        parquet.write_table(pyarrow.table(columns), folder / f"x/refs.{number}.parq", compression="zstd")
    return str(folder)


@pytest.mark.parametrize(("n_rows", "as_text"), [(1, True), (5, False), (100, True)])
def test_parquet(tmp_path: Path, n_rows: int, as_text: bool) -> None:
    """Ranges, a whole file, content in the table and missing chunks, as fsspec reads them. Wrong if a row were taken for that
    of another chunk, or a table that is not there for anything but missing chunks.
    """
    parts = [DATA[2:4, 5:].tobytes(), np.arange(10, dtype="<f4").tobytes()]
    (tmp_path / "whole.bin").write_bytes(zlib.compress(parts[0]))
    inside = "base64:" + base64.b64encode(zlib.compress(parts[1])).decode()
    write(tmp_path / "refs.json", "x.h5", {"x/1.1": ["whole.bin"], "x/0.0": inside, "x/2.0": None, "x/2.1": None})
    folder = in_parquet(tmp_path / "refs.json", n_rows, as_text)
    if n_rows == 1:
        (Path(folder) / "x/refs.5.parq").unlink()
    expected = load_all(tmp_path / "refs.json", "x")
    assert (expected[4:] == 7).all() and (expected[:2, :5] == np.arange(10).reshape(2, 5)).all()
    assert [(info.dataset, info.shape) for info in list_arrays(folder)] == [("/x", (6, 10))]
    source = open_source(folder, "x")
    check_source(source, expected)
    assert source.labels().dims == ("a", "b") and source.opened_in == source.state() is not None
    theirs = pytest.importorskip("fsspec.implementations.reference").LazyReferenceMapper(folder, engine="pyarrow")
    ours = ReferenceFolder(folder, Access())
    for at in ("0.0", "0.1", "1.0", "1.1"):
        stored, offset, nbytes = ours.place(f"x/{at}") or (None, 0, 0)
        found = theirs[f"x/{at}"]
        assert stored is not None
        if isinstance(found, bytes):
            assert base64.b64decode(found.removeprefix(b"base64:")) == stored.read_at_most(offset, nbytes)
        else:
            assert (tmp_path / found[0]).read_bytes()[offset:][:nbytes] == stored.read_at_most(offset, nbytes)
            assert found[1:] in ([], [offset, nbytes])


def test_parquet_at_a_url(tmp_path: Path, server: ObjectServer) -> None:
    """Only the tables of what is read are fetched, once; and nothing outside of the set's folder, unless it is allowed."""
    for folder in ("b/in", "b/out"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "refs.json", "")
    for target, urls in (("x.h5", ["s3://b/in/refs.parq", f"{server.url}/b/in/refs.parq"]), ("s3://b/out/x.h5", [])):
        write(tmp_path / "b/in/refs.json", target)
        in_parquet(tmp_path / "b/in/refs.json", 2)
        for url in urls:
            server.clear()
            of_url = access_to(server) if url.startswith("s3") else Access()
            with closing(open_source(url, "x", of_url)) as source:
                np.testing.assert_array_equal(source.plain(Region((2, 0), (4, 10))), DATA[2:4])
            asked = [request.key.removeprefix("b/in/") for request in server.log]
            assert asked.count("refs.parq/x/refs.1.parq") == 1 and asked.count("refs.parq/.zmetadata") == 1
            assert set(asked) == {"refs.parq/.zmetadata", "refs.parq/x/refs.1.parq", "x.h5"}
    server.clear()
    with pytest.raises(OutsideError, match="pass allow_external=True"):
        load_all("s3://b/in/refs.parq", "x", access_to(server))
    assert not server.gets("b/out")
    np.testing.assert_array_equal(load_all("s3://b/in/refs.parq", "x", access_to(server, allow_external=True)), DATA)
    with pytest.raises(SourceError, match=r"no \.zmetadata"):
        list_arrays("s3://b/in/none.parq", access_to(server))


@pytest.mark.parametrize("name", ["refs.json", "refs.parq"])
@pytest.mark.parametrize("is_remote", [False, True])
def test_a_set_that_was_replaced_is_noticed(tmp_path: Path, server: ObjectServer, name: str, is_remote: bool) -> None:
    """Wrong if the set told the version that it had read: old references would take bytes of the new targets."""
    write(tmp_path / "b/refs.json", "")
    in_parquet(tmp_path / "b/refs.json")
    path = f"s3://b/{name}" if is_remote else str(tmp_path / "b" / name)
    access = access_to(server)
    with closing(open_source(path, "x", access)) as source:
        assert source.opened_in == source.state() is not None
        document = tmp_path / "b" / name / (".zmetadata" if name.endswith("parq") else "")
        document.write_bytes(document.read_bytes() + b" ")
        assert source.opened_in != source.state()


@pytest.mark.parametrize("name", ["refs.json", "refs.parq"])
def test_a_set_that_is_replaced_before_its_metadata_are_asked_for(tmp_path: Path, name: str) -> None:
    """Wrong if its state were looked at then: a large set takes seconds to parse, and the old references would have the new
    state.
    """
    write(tmp_path / "refs.json", "x.h5")
    in_parquet(tmp_path / "refs.json")
    store = open_store(str(tmp_path / name))
    document = tmp_path / name / (".zmetadata" if name.endswith("parq") else "")
    document.write_bytes(document.read_bytes() + b" ")
    assert isinstance(store.node("x"), ArrayNode)
    assert store.state_before("x/.zarray") != store.state("x/.zarray") is not None


def test_a_range_that_no_object_has_is_not_fetched_ahead(tmp_path: Path, server: ObjectServer) -> None:
    """Wrong if it were cut into requests first: thousands here, and without end for the largest sizes."""
    write(tmp_path / "b/refs.json", "x.h5", {"x/0.0": ["x.h5", 0, 10**11]})
    with closing(open_source("s3://b/refs.json", "x", access_to(server))) as source:
        reader = source.chunk_reader()
        assert reader is not None
        box = [range(0, 1), range(0, 1)]
        reader.expect(iter([box]))
        with pytest.raises(ValueError, match="is declared to be stored in 100000000000 bytes"):
            reader.fetch(box)
    with closing(open_source("s3://b/refs.json", "x", access_to(server))) as source:
        reader = source.chunk_reader()
        assert reader is not None
        reader.expect(iter([[range(1, 2), range(1, 2)]]))
        reader.fetch([range(1, 2), range(1, 2)])
    assert len(server.log) < 20


def test_an_object_that_is_opened_again_is_the_same_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects beyond the last few are not kept. Wrong if one that was replaced meanwhile were read as it is now."""
    pytest.importorskip("obstore")
    monkeypatch.setattr("shardload.formats.zarr.references._MOST_REMOTE", 1)
    refs = {".zgroup": "{}", "x/0": ["a.bin", 0, 4], "x/1": ["b.bin", 0, 4], "x/2": ["a.bin", 4, 4]}
    objects = {"b/refs.json": json.dumps(refs).encode(), "b/a.bin": b"01234567", "b/b.bin": b"89ab"}
    with ObjectServer(objects) as server:
        folder = ReferenceFolder("s3://b/refs.json", access_to(server))
        contents = folder.read_many(["x/0", "x/1"], 10)
        assert [None if content is None else bytes(content) for content in contents] == [b"0123", b"89ab"]
        server.objects["b/a.bin"] = b"cdefghij"
        with pytest.raises(RemoteChangedError, match=r"'s3://b/a\.bin' is another object"):
            folder.read_many(["x/2"], 10)


def test_what_is_wrong_with_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    write(tmp_path / "refs.json", "x.h5")
    folder = in_parquet(tmp_path / "refs.json", 3)
    table, marks = Path(folder) / "x/refs.1.parq", Path(folder) / ".zmetadata"
    whole, metadata = parquet.read_table(table), marks.read_text()
    for changed, said in (
        (whole.slice(0, 2), "has 2 rows, and none for 'x/2.1', which is in row 2: it is cut"),
        (pyarrow.concat_tables([whole, whole]), "has 6 rows of .* expected 3 at most"),
        (whole.set_column(1, "offset", pyarrow.nulls(3)), r"expected a text, \[URL\], or \[URL, offset, bytes\]"),
        (whole.set_column(0, "path", pyarrow.array([1, 2, 3])), r"expected a text, \[URL\], or \[URL, offset, bytes\]"),
    ):
        parquet.write_table(changed, table)
        with pytest.raises(ValueError, match=said):
            load_all(folder, "x")
    table.write_bytes(b"PAR1, but no more")
    with pytest.raises((OSError, ValueError), match=r"[Pp]arquet"):
        load_all(folder, "x")
    marks.write_text('{"record_size": 0}')
    with pytest.raises(SourceError, match="it is no set of references in Parquet"):
        list_arrays(folder)
    marks.write_text(metadata)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="which is not installed: pip install pyarrow"):
        list_arrays(folder)


def test_no_more_memory_than_a_set_has(tmp_path: Path) -> None:
    """Wrong if a set of a few bytes took as much as the largest one may have: 1 GiB, which a job may not have."""
    write(tmp_path / "refs.json.zst", "x.h5")
    paths = [str(tmp_path / "refs.json.zst")]
    if importlib.util.find_spec("pyarrow"):
        paths.append(in_parquet(Path(write(tmp_path / "refs.json", "x.h5")), 3))
    for path in paths:
        assert [info.dataset for info in list_arrays(path)] == ["/x"]
        with python_memory_below(64 << 20):
            list_arrays(path)


def test_a_reference_to_more_than_a_chunk_can_have(tmp_path: Path) -> None:
    """zarr-python decodes it. Wrong if all of the range were read before its length was looked at."""
    nbytes = 64 << 20
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(nbytes)
    array = {**ARRAY, "compressor": None, "filters": [{"id": "delta", "dtype": "<f4"}]}
    refs = {".zgroup": '{"zarr_format": 2}', "x/.zarray": array, "x/0.0": ["x.bin", 0, nbytes]}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    with closing(open_source(str(tmp_path / "refs.json"), "x")) as source:
        assert source.chunk_reader() is None
        said = r"'x/0\.0' has 67108864 bytes, what is stored there 4416 at most"
        with python_memory_below(16 << 20), pytest.raises(ValueError, match=said):
            read_all(source)


def test_rows_of_parquet_that_have_one_long_text(tmp_path: Path) -> None:
    """Wrong if each row had a copy of it: a file of some hundred bytes took a GiB."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    n, nbytes = 1 << 12, 1 << 16
    write(tmp_path / "refs.json", "x.h5")
    folder = Path(in_parquet(tmp_path / "refs.json", n))
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * n, "int32"), pyarrow.array(["base64:" + "A" * nbytes]))
    for name in ("refs.0.parq", "refs.1.parq"):  # as one with a dictionary, and as one with plain text
        table = {"path": pyarrow.nulls(n, "string"), "offset": [0] * n, "size": [0] * n, "raw": texts}
        parquet.write_table(pyarrow.table(table), folder / "x" / name, compression="zstd", store_schema=name == "refs.0.parq")
    tables = ReferenceFolder(str(folder), Access())._tables
    assert tables is not None
    pool, before = pyarrow.default_memory_pool(), pyarrow.default_memory_pool().max_memory()
    for name in ("refs.0.parq", "refs.1.parq"):
        with python_memory_below(16 << 20):
            found = tables._table(f"x/{name}")
        assert found is not None and found[0] == n and len(found[1][3][n - 1]) == nbytes + 7 and found[1][0][0] is None
        assert pool.max_memory() - before < 16 << 20


def test_what_is_outside_needs_to_be_allowed(tmp_path: Path, server: ObjectServer) -> None:
    """Nothing of it is opened before."""
    (tmp_path / "b/in").mkdir()
    (tmp_path / "b/out").mkdir()
    write(tmp_path / "b/out/refs.json", "")
    inside = write(tmp_path / "b/in/refs.json", "")
    for path, target in (
        (inside, "../out/x.h5"),
        (inside, f"{tmp_path}/b/out/x.h5"),
        (inside, f"file://{tmp_path}/b/out/x.h5"),
        (inside, "s3://b/in/x.h5"),
        ("s3://b/in/refs.json", "s3://b/out/x.h5"),
        ("s3://b/in/refs.json", "s3://b/in/../out/x.h5"),
        ("s3://b/in/refs.json", "s3://b/in/%2e%2e/out/x.h5"),
        ("s3://b/in/refs.json", "s3://b/inside/x.h5"),
        ("s3://b/in/refs.json", str(tmp_path / "b/in/x.h5")),
    ):
        write(tmp_path / "b/in/refs.json", target)
        server.clear()
        with pytest.raises(OutsideError, match="pass allow_external=True"):
            load_all(path, "x", access_to(server))
        assert all(request.key.endswith("refs.json") for request in server.log)
        if ("/in/" in target and ".." not in target and "%" not in target) or target.startswith((str(tmp_path), "file")):
            np.testing.assert_array_equal(load_all(path, "x", access_to(server, allow_external=True)), DATA)
    for target in ("s3://b/in/x.h5", "x.h5"):
        write(tmp_path / "b/in/refs.json", target)
        server.clear()
        np.testing.assert_array_equal(load_all("s3://b/in/refs.json", "x", access_to(server)), DATA)
        assert len([request for request in server.log if request.key == "b/in/x.h5"]) <= 2  # all chunks in one range
    with pytest.raises((SourceError, ConfigError), match="no array '/y'"):
        find_array("s3://b/in/refs.json", "y", access_to(server))


def test_an_object_that_the_query_of_a_url_names(tmp_path: Path, server: ObjectServer) -> None:
    """Wrong if the last part of the query were taken for the object's name in a folder."""
    chunks_of(tmp_path / "x.h5")
    (tmp_path / "b/x.h5").write_bytes((tmp_path / "x.h5").read_bytes())
    for url in (f"{server.url}/b/x.h5?token=ab/cd", f"{server.url}/get?file=b/x.h5"):
        access = Access(allow_external=True)
        assert (load_all(write(tmp_path / "refs.json", url), "x", access) == DATA).all()


@pytest.mark.parametrize("step", ["..\\", ".\t./", "%2e.\\"])
@pytest.mark.parametrize("is_whole", [True, False], ids=["URL", "name"])
def test_a_step_up_that_http_alone_sees(tmp_path: Path, server: ObjectServer, step: str, is_whole: bool) -> None:
    """A backslash is a slash there, and a tab is nothing. Wrong if only slashes were looked at."""
    (tmp_path / "b/in").mkdir()
    (tmp_path / "b/out").mkdir()
    write(tmp_path / "b/out/refs.json", "")
    write(tmp_path / "b/in/refs.json", f"{server.url}/b/in/{step}out/x.h5" if is_whole else f"{step}out/x.h5")
    (tmp_path / "b/in/x.h5").unlink()
    np.testing.assert_array_equal(load_all(f"{server.url}/b/in/refs.json", "x", Access(True)), DATA)
    server.clear()
    with pytest.raises(OutsideError, match="pass allow_external=True"):
        load_all(f"{server.url}/b/in/refs.json", "x")
    assert all(request.key.endswith("refs.json") for request in server.log)


def test_many_objects_at_urls_are_asked_for_their_size_and_their_values(tmp_path: Path) -> None:
    """Wrong if objects were let go, as open files have to be, before what was fetched ahead of them was read: it was fetched
    once more.
    """
    pytest.importorskip("obstore")
    array = {**ARRAY, "shape": [200, 10], "chunks": [1, 10], "compressor": None}
    refs = {".zgroup": json.dumps({"zarr_format": 2}), "x/.zarray": json.dumps(array)}
    with ObjectServer({f"b/{k}": np.full(10, k, "<f4").tobytes() for k in range(200)}) as server:
        refs |= {f"x/{k}.0": [f"{server.url}/b/{k}", 0, 40] for k in range(200)}
        (tmp_path / "refs.json").write_text(json.dumps(refs))
        mesh = Mesh(np.array(jax.devices()[:1]), "a")
        x = shardload.load(str(tmp_path / "refs.json"), mesh, PartitionSpec(), dataset="x", allow_external=True)
        assert (np.asarray(x)[:, 0] == np.arange(200)).all()
        assert len(server.log) == 2 * 200
