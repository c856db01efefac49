"""Are chunks that are fetched and decoded many at a time those that the formats' libraries read, and is damage never values?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import tensorstore
import zarr

from shardload.formats.access import Access
from shardload.formats.contract.chunk_reader import ChunkReader
from shardload.formats.contract.format import Source
from shardload.formats.lookup import open_source
from shardload.storage.containment import NotAFileError, OutsideError
from tests.unit.batches import check_batches, read_box

Array = np.ndarray[Any, Any]

SHAPE, CHUNKS = (5, 14, 11), (2, 4, 3)  # edge chunks along every axis; no two axes are alike
DATA = np.arange(np.prod(SHAPE), dtype="f4").reshape(SHAPE)
GRID = tuple(range(-(-n // c)) for n, c in zip(SHAPE, CHUNKS, strict=True))


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


@pytest.mark.parametrize("codec", ["zstd", None, zarr.codecs.GzipCodec(), zarr.codecs.BloscCodec(cname="lz4")])
def test_decoders_of_small_frames(tmp_path: Path, codec: Any) -> None:
    assert check_batches(open_of(write_zarr_3(tmp_path / "a.zarr", codec)), DATA, 20) == 48


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{"checksum": True}, {"level": 19}, {"level": -5}])
@pytest.mark.parametrize("edge", [1, 7, 8, 20, 32])  # frames declare their size in 1, 2 or 4 bytes
def test_zstd_frames_of_every_size(tmp_path: Path, options: dict[str, Any], edge: int) -> None:
    data = np.arange(edge**3 * 2, dtype="u2").reshape(2 * edge, edge, edge)
    compressor = zarr.codecs.ZstdCodec(**options)
    array = zarr.create_array(tmp_path / "a.zarr", data=data, chunks=(edge,) * 3, compressors=compressor)
    assert array.nchunks == 2 and check_batches(open_of(tmp_path / "a.zarr"), data, 2) == 2


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


@pytest.mark.parametrize(("offset", "nbytes"), [(10**6, 4), (0, 10**6), (2**63, 4), (5, 2**64 - 1), (2**64 - 1, 3)])
def test_an_index_of_a_shard_that_points_outside_is_an_error(tmp_path: Path, offset: int, nbytes: int) -> None:
    path = tmp_path / "a.zarr"
    spec: Any = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path)},
        "create": True,
        "metadata": {
            "shape": [8],
            "data_type": "uint16",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8]}},
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [2],
                        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}],
                        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                    },
                }
            ],
        },
    }
    tensorstore.open(spec).result().write(np.arange(1, 9, dtype="u2")).result()
    shard = path / "c" / "0"
    content = shard.read_bytes()
    entry = len(content) - 4 * 16 + 16
    pair = offset.to_bytes(8, "little") + nbytes.to_bytes(8, "little")
    shard.write_bytes(content[:entry] + pair + content[entry + 16 :])
    source = open_of(path)
    with pytest.raises((OSError, ValueError), match=r"index|ends at"):
        read_box(source, (range(4),))
    found = read_box(source, (range(2, 4),))
    assert found is not None and found.tolist() == [[5, 6], [7, 8]]


# --- files that are not what they seem


def link_inside(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def link_outside(path: Path) -> None:
    outside = path.parents[3].parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def folder_outside(path: Path) -> None:
    outside = path.parents[3].parent / "outside"
    path.parent.rename(outside)
    path.parent.symlink_to(outside)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def lost_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def long(path: Path) -> None:
    path.write_bytes(bytes(1 << 20))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (link_inside, None),
        (link_outside, OutsideError),
        (folder_outside, OutsideError),
        (pipe, NotAFileError),
        (folder, NotAFileError),
        (lost_link, OSError),
        (long, ValueError),
    ],
    ids=lambda one: getattr(one, "__name__", "values"),
)
def test_only_files_of_the_store_are_read(tmp_path: Path, make: Callable[[Path], None], error: type[Exception] | None) -> None:
    """The same as one by one: no pipe is waited for, nothing outside is opened for its values."""
    path = write_zarr_3(tmp_path / "a.zarr")
    make(path / "c" / "1" / "2" / "3")
    if error is None:
        assert check_batches(open_of(path), DATA, 48) == 48
        return
    with pytest.raises(error):
        read_box(open_of(path), GRID)
    allowed = open_source(str(path), "/", Access(allow_external=True))
    if error is OutsideError:
        assert check_batches(allowed, DATA, 48) == 48


@pytest.mark.parametrize("box", [(range(4), range(4), range(4)), (range(-1, 2), range(4), range(4)), (range(1),)])
def test_a_box_outside_of_the_grid_is_refused(tmp_path: Path, box: tuple[range, ...]) -> None:
    source = open_of(write_zarr_3(tmp_path / "a.zarr"))
    with pytest.raises(ValueError):
        source.chunk_reader().fetch(box)  # type: ignore[union-attr]
