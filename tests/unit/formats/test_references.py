"""Are the chunks that a set of references names read from where they are, and nothing else?"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zstandard

from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access
from shardload.formats.lookup import find_array, list_arrays, open_source
from shardload.storage.containment import OutsideError
from shardload.storage.remote import StorageOptions
from tests.servers import ObjectServer
from tests.unit.files import check_source, flat, load_all

DATA = flat((6, 10), "<f4")
ARRAY = {"zarr_format": 2, "shape": [6, 10], "chunks": [2, 5], "dtype": "<f4", "fill_value": 7, "order": "C", "filters": None}
FREE = Access(allow_external=True)


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


@pytest.mark.parametrize("name", ["refs.json", "refs.json.zst"])
def test_chunks_of_a_file_beside(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "x.h5")
    assert [(info.dataset, info.shape) for info in list_arrays(path)] == [("/x", (6, 10))]
    source = open_source(path, "x")
    check_source(source, DATA)
    assert source.labels().dims == ("a", "b") and source.opened_in() == source.state() is not None


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
    (tmp_path / "refs.json").write_text('{"refs": [1]}')
    with pytest.raises(SourceError, match="it is no set of references"):
        list_arrays(str(tmp_path / "refs.json"))
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(SourceError, match="unknown format"):
        list_arrays(str(tmp_path / "other.json"))
    (tmp_path / "parquet").mkdir()
    (tmp_path / "parquet/.zmetadata").write_text('{"metadata": {}, "record_size": 10}')
    with pytest.raises(SourceError, match=r"references in Parquet, which are not read\. Write them as JSON"):
        list_arrays(str(tmp_path / "parquet"))


def test_what_is_outside_needs_to_be_allowed(tmp_path: Path) -> None:
    """Nothing of it is opened before."""
    pytest.importorskip("obstore")
    (tmp_path / "b/in").mkdir(parents=True)
    (tmp_path / "b/out").mkdir()
    write(tmp_path / "b/out/refs.json", "")
    inside = write(tmp_path / "b/in/refs.json", "")
    with ObjectServer(tmp_path) as server:
        storage = StorageOptions(server.storage)
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
                load_all(path, "x", Access(storage=storage))
            assert all(request.key.endswith("refs.json") for request in server.log)
            if ("/in/" in target and ".." not in target and "%" not in target) or target.startswith((str(tmp_path), "file")):
                np.testing.assert_array_equal(load_all(path, "x", Access(True, storage=storage)), DATA)
        for target in ("s3://b/in/x.h5", "x.h5"):
            write(tmp_path / "b/in/refs.json", target)
            server.clear()
            np.testing.assert_array_equal(load_all("s3://b/in/refs.json", "x", Access(storage=storage)), DATA)
            assert len([request for request in server.log if request.key == "b/in/x.h5"]) <= 2  # all chunks in one range
        with pytest.raises((SourceError, ConfigError), match="no array '/y'"):
            find_array("s3://b/in/refs.json", "y", Access(storage=storage))
