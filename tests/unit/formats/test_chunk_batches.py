"""Are chunks that are fetched and decoded many at a time those that the formats' libraries read, and is damage never values?"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr

from shardload.formats.contract.chunk_reader import ChunkReader
from shardload.formats.contract.format import Source
from shardload.formats.lookup import open_source
from tests.unit.batches import check_batches

SHAPE, CHUNKS = (5, 14, 11), (2, 4, 3)  # edge chunks along every axis; no two axes are alike
DATA = np.arange(np.prod(SHAPE), dtype="f4").reshape(SHAPE)


def write_zarr_3(path: Path, codec: Any = "zstd", shards: tuple[int, ...] | None = None) -> Path:
    compressors = zarr.codecs.ZstdCodec() if codec == "zstd" else codec
    array = zarr.create_array(path, shape=SHAPE, dtype="f4", chunks=CHUNKS, shards=shards, compressors=compressors)
    array[...] = DATA
    return path


def open_of(path: Path, dataset: str = "/") -> Source:
    source = open_source(str(path), dataset)
    assert isinstance(source.chunk_reader(), ChunkReader)
    return source


# --- which bytes are read


@pytest.mark.each_value
@pytest.mark.parametrize("most", [1, 3, 1000])
@pytest.mark.parametrize("shards", [(4, 4, 6), (2, 8, 12), (6, 16, 12)])
def test_batches_across_shards_some_of_which_are_missing(tmp_path: Path, shards: tuple[int, ...], most: int) -> None:
    """Compared with TensorStore. Wrong if chunks of two shards changed places, or if a value of another batch stayed."""
    path = tmp_path / "a.zarr"
    array = zarr.create_array(
        path, shape=SHAPE, dtype="f4", chunks=CHUNKS, shards=shards, fill_value=7, compressors=zarr.codecs.ZstdCodec()
    )
    array[:, :9, 2:] = DATA[:, :9, 2:]
    array[4, 12, 10] = -3
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    expected = tensorstore.open(spec).result().read().result()
    assert (expected == 7).any() and (expected == -3).any()
    assert check_batches(open_of(path), expected, most) == 3 * 4 * 4


def test_chunks_of_a_folder_that_is_missing(tmp_path: Path) -> None:
    path = write_zarr_3(tmp_path / "a.zarr")
    shutil.rmtree(path / "c" / "1")
    shutil.rmtree(path / "c" / "2" / "3")
    (path / "c" / "0" / "0" / "2").unlink()
    expected = zarr.open_array(path, mode="r")[...]
    assert check_batches(open_of(path), expected, 7) == 48


# --- damage


# --- files that are not what they seem
