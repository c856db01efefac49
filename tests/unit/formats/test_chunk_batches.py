"""Are chunks that are fetched and decoded many at a time those that the formats' libraries read, and is damage never values?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import tensorstore
import zarr

from shardload.formats.contract.chunk_reader import ChunkReader, copy_rows
from shardload.formats.contract.format import Source
from shardload.formats.lookup import open_source
from tests.unit.batches import check_batches, read_box

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


@pytest.mark.parametrize("dtype", ["u1", "c16"])
def test_rows_that_are_longer_than_an_item_of_numpy(dtype: str) -> None:
    """Of 2 GiB, as a device may have of a large chunk. Wrong if they were moved as items. (There are none, to save memory.)"""
    itemsize = np.dtype(dtype).itemsize
    rows = np.lib.stride_tricks.as_strided(np.empty(1, dtype), (0, (1 << 31) // itemsize), (1 << 31, itemsize))
    copy_rows(rows, rows)


def test_chunks_of_a_folder_that_is_missing(tmp_path: Path) -> None:
    path = write_zarr_3(tmp_path / "a.zarr")
    shutil.rmtree(path / "c" / "1")
    shutil.rmtree(path / "c" / "2" / "3")
    (path / "c" / "0" / "0" / "2").unlink()
    expected = zarr.open_array(path, mode="r")[...]
    assert check_batches(open_of(path), expected, 7) == 48


# --- damage


def a_frame_that_declares_more(data: bytes) -> bytes:
    return data[:5] + (2**16 - 1 - 256).to_bytes(2, "little") + data[7:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-3],
    "empty": lambda data: b"",
    "one byte": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x10]) + data[len(data) // 2 + 1 :],
    "two frames": lambda data: data + data,
    "declares more": a_frame_that_declares_more,
    "another chunk's length": lambda data: numcodecs.Zstd().encode(bytes(4 * 4)),
    "no zstd": lambda data: b"\0" * len(data),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_gives_no_values(tmp_path: Path, damage: str) -> None:
    compressor = zarr.codecs.ZstdCodec(checksum=True)
    data = np.random.default_rng(3).integers(0, 99, (4, 32, 32), dtype="u2")
    zarr.create_array(tmp_path / "a.zarr", data=data, chunks=(1, 16, 16), compressors=compressor)
    bad = tmp_path / "a.zarr" / "c" / "1" / "0" / "1"
    bad.write_bytes(DAMAGE[damage](bad.read_bytes()))
    source = open_of(tmp_path / "a.zarr")
    with pytest.raises((ValueError, OSError)):
        read_box(source, (range(4), range(2), range(2)))
    found = read_box(source, (range(2, 4), range(2), range(2)))
    assert found is not None and (found[1, 1, 0] == data[3:4, 16:, :16]).all(), "the others are as they were"


# --- files that are not what they seem
