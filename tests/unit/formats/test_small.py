"""Which values does rank 0 send with the metadata? Those of small arrays, as far as there is room; a file is opened once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from shardload.formats import lookup
from shardload.formats.hdf5 import file as hdf5
from shardload.formats.hdf5.chunks import ChunkTree, Hdf5Chunks
from shardload.formats.lookup import Finder
from shardload.planning.region import Region
from shardload.planning.tuning import Tuning
from tests.unit.files import write_hdf5, write_zarr

TINY = np.arange(24, dtype=">i2").reshape(4, 6)
SMALL = np.arange(30_000, dtype="float32").reshape(30, 1000)  # 117 KiB: more than comes without an estimate


def values_of(path: str, name: str) -> bytes | None:
    with Finder(lookup.STRICT, Tuning()) as finder:
        values = finder.find(path, name)[1]
    return None if values is None else bytes(values)


def test_values_of_all_arrays_together_are_capped(tmp_path: Path) -> None:
    """Wrong if a thousand small arrays were all held by every rank, whatever `staging` is."""
    path = write_hdf5(tmp_path / "some.h5", {"tiny": TINY, "small": SMALL})
    names = ["small", "tiny", "small", "small", "tiny"]
    with Finder(lookup.STRICT, Tuning(small_total_nbytes=250_000)) as finder:
        found = [finder.find(path, name)[1] is not None for name in names]
    assert found == [True, True, True, False, True]


# --- chunks that are stored as plain values

STEPS = np.arange(40 * 5 * 7, dtype="float32").reshape(40, 5, 7)


def written(path: Path, order: list[int], **more: Any) -> str:
    """A file whose chunks were written in some order, so that they lie in the file in that order."""
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", STEPS.shape, **{"dtype": "f4", "chunks": (1, 5, 7), **more})
        for k in order:
            data[k : k + data.chunks[0]] = STEPS[k : k + data.chunks[0]]
    return str(path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which reads of the array there were: ``"plain"``, ``"library"``."""
    found: list[str] = []
    plain, library = Hdf5Chunks.read_plain, hdf5.Hdf5Source._read_by_library

    def read_plain(self: Any, *arguments: Any) -> bool:
        done = plain(self, *arguments)
        found.extend(["plain"] * done)
        return done

    def by_library(self: Any, *arguments: Any) -> None:
        found.append("library")
        library(self, *arguments)

    monkeypatch.setattr(Hdf5Chunks, "read_plain", read_plain)
    monkeypatch.setattr(hdf5.Hdf5Source, "_read_by_library", by_library)
    return found


ASCENDING = list(range(40))


@pytest.mark.parametrize(
    ("order", "more", "is_plain"),
    [
        (ASCENDING, {}, True),
        ([*range(20, 40), *range(20)], {}, False),  # the second half first
        (ASCENDING[::2] + ASCENDING[1::2], {}, False),
        (ASCENDING, {"dtype": ">f4"}, False),  # the bytes are not the values
        (ASCENDING, {"fletcher32": True}, False),
        (list(range(0, 40, 2)), {"chunks": (2, 5, 7)}, True),
        (list(range(0, 40, 3)), {"chunks": (3, 5, 7)}, False),  # the last one reaches over the edge
        (ASCENDING, {"chunks": (1, 5, 4)}, False),  # two side by side
    ],
)
def test_plain_chunks_are_read_at_once(
    tmp_path: Path, reads: list[str], order: list[int], more: dict[str, Any], is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if chunks were taken in the order of the file, or bytes for values; h5py says what is right."""
    monkeypatch.setattr("shardload.formats.stored_chunks._LEAST_NBYTES", 1)
    path = written(tmp_path / "x.h5", order, **more)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["x"][...].astype("f4"), STEPS)
    assert values_of(path, "x") == STEPS.tobytes()
    assert reads == ["plain"] * is_plain


def test_a_missing_or_a_damaged_chunk_is_left_to_the_load(tmp_path: Path, reads: list[str]) -> None:
    """Wrong if what was in memory before were taken for the values of a chunk that was never written, or cannot be decoded."""
    assert values_of(written(tmp_path / "x.h5", [k for k in ASCENDING if k != 17]), "x") is None
    path = written(tmp_path / "y.h5", ASCENDING, compression="gzip")
    with h5py.File(path, "a") as file:
        file["x"].id.write_direct_chunk((4, 0, 0), b"\xff" * 20)
    assert values_of(path, "x") is None
    assert "plain" not in reads


BLOCK = np.arange(36 * 10 * 14, dtype="float32").reshape(36, 10, 14)
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "gzip": {"chunks": (1, 10, 14), "compression": "gzip", "shuffle": True},
    "gzip cubes": {"chunks": (5, 4, 4), "compression": "gzip"},
    "plain": {"chunks": (1, 5, 7)},
    "checksum": {"chunks": (7, 3, 14), "fletcher32": True},
    "big-endian": {"chunks": (4, 10, 3), "dtype": ">f4"},
}
ZARR_LAYOUTS: dict[str, dict[str, Any]] = {
    "zarr": {"chunks": (5, 4, 4)},
    "zarr v2": {"chunks": (1, 10, 14), "zarr_format": 2},
    "zarr shards": {"chunks": (1, 5, 7), "shards": (4, 10, 14)},
}
PARTS = [
    (0, 0, 0, 1, 10, 14),
    (35, 0, 0, 36, 10, 14),
    (3, 0, 0, 11, 10, 14),
    (6, 2, 5, 7, 3, 6),
    (4, 1, 3, 29, 9, 13),
    (0, 9, 0, 36, 10, 1),
]


def part_of(path: str, name: str, region: Region, **more: Any) -> lookup.FoundArray:
    with Finder(lookup.STRICT, Tuning(**more)) as finder:
        return finder.find(path, name, look=lambda info, _: (info, region))


@pytest.mark.parametrize("kind", [*LAYOUTS, *ZARR_LAYOUTS])
def test_values_of_a_part(tmp_path: Path, kind: str, reads: list[str]) -> None:
    """Wrong if a part came from elsewhere in the array, or chunks that it meets in part were not cut; h5py and Zarr say it.
    All of an array of many chunks is read in batches, too.
    """
    path = str(tmp_path / "x.h5")
    if kind in LAYOUTS:
        write_hdf5(path, {"x": BLOCK}, **LAYOUTS[kind])
        opened: Any = h5py.File(path)["x"]
    else:
        path = str(tmp_path / "x.zarr")
        write_zarr(path, {"x": BLOCK}, **ZARR_LAYOUTS[kind])
        opened = zarr.open_group(path, mode="r")["x"]
    for *start, a, b, c in PARTS:
        region = Region(tuple(start), (a, b, c))
        found = part_of(path, "x", region)
        assert found.region == region and found.values is not None and found.info.shape == BLOCK.shape, region
        values = np.frombuffer(found.values, "f4").reshape(region.shape)
        np.testing.assert_array_equal(values, np.asarray(opened[region.slices()]))
    assert values_of(path, "x") == BLOCK.tobytes()
    assert "library" not in reads


def test_only_the_chunks_of_a_part_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if each load of a time step went through the index of all of them."""
    path, listed = str(tmp_path / "x.h5"), []
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (4000, 2, 6), "f4", chunks=(1, 2, 3), compression="gzip")[5:3999] = 1
    right = ChunkTree.chunks_in
    monkeypatch.setattr(ChunkTree, "chunks_in", lambda *a: (listed.append(found := right(*a)), found)[1])
    monkeypatch.setattr("shardload.formats.hdf5.chunks.list_chunks", lambda *_: pytest.fail("the library was asked"))
    monkeypatch.setattr(hdf5.Hdf5Source, "_read_by_library", lambda *_: pytest.fail("read by the library"))
    for region, n, is_there in (
        (Region((3000, 0, 0), (3001, 2, 6)), 2, True),
        (Region((5, 0, 0), (45, 2, 6)), 80, True),
        (Region((4, 0, 0), (6, 2, 6)), 2, False),
    ):
        assert (part_of(path, "x", region).values is not None) == is_there
        assert {len(chunks[0]) for chunks in listed} == {n}
        listed.clear()
