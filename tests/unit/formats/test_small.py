"""Which values does rank 0 send with the metadata? Those of small arrays, as far as there is room; a file is opened once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from shardload import ConfigError, SourceError
from shardload.formats import lookup
from shardload.formats.hdf5 import source as hdf5
from shardload.formats.hdf5.chunks import Hdf5Chunks
from shardload.formats.lookup import Finder
from shardload.planning.tuning import Tuning

TINY = np.arange(24, dtype=">i2").reshape(4, 6)
SMALL = np.arange(30_000, dtype="float32").reshape(30, 1000)  # 117 KiB: more than comes without an estimate
SLOW = np.arange(300_000, dtype="float32").reshape(300, 1000)  # 1.1 MiB


@pytest.fixture
def path(tmp_path: Path) -> str:
    with h5py.File(tmp_path / "some.h5", "w") as file:
        file["tiny"], file["small"] = TINY, SMALL
        file.create_dataset("gzip", data=SLOW, chunks=(1, 1000), compression="gzip")
        file.create_dataset("plain", data=SLOW)
        file.create_dataset("large", (600, 1000), "f4")
    return str(tmp_path / "some.h5")


def values_of(path: str, name: str | None, tuning: Tuning | None = None, most: int | None = None) -> bytes | None:
    with Finder(lookup.STRICT, tuning or Tuning(), most) as finder:
        values = finder.find(path, name)[1]
    return None if values is None else bytes(values)


def test_values_that_are_read_sooner_than_a_file_is_opened_everywhere(path: str) -> None:
    """Wrong if a slow array were read by one rank while the others wait, or a fast one by all of them."""
    assert values_of(path, "tiny") == TINY.astype("=i2").tobytes(), "not in native byte order"
    assert values_of(path, "small") == SMALL.tobytes()
    assert values_of(path, "plain") == SLOW.tobytes()
    assert values_of(path, "gzip") is None, "300 chunks of gzip take longer than opening the file everywhere"
    assert values_of(path, "large") is None
    assert values_of(path, "plain", Tuning(small_nbytes=1 << 20)) is None


def test_values_of_all_arrays_together_are_capped(path: str) -> None:
    """Wrong if a thousand small arrays were all held by every rank, whatever `staging` is."""
    names = ["small", "tiny", "small", "small", "tiny"]
    for tuning, most in ((Tuning(small_total_nbytes=250_000), None), (Tuning(), 250_000)):
        with Finder(lookup.STRICT, tuning, most) as finder:
            found = [finder.find(path, name)[1] is not None for name in names]
        assert found == [True, True, True, False, True]


def test_a_file_is_opened_once(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the one array of a file without a name took two opens, or each array of a tree one."""
    opens: list[str] = []
    right = hdf5.open_explained
    monkeypatch.setattr(hdf5, "open_explained", lambda where: (opens.append(where), right(where))[1])
    with h5py.File(tmp_path / "one.h5", "w") as file:
        file["x"] = TINY
    one = str(tmp_path / "one.h5")
    assert values_of(one, None) == TINY.astype("=i2").tobytes()
    assert opens == [one]
    with Finder(lookup.STRICT, Tuning()) as finder:
        infos = [finder.find(path, name)[0].dataset for name in ("tiny", "small", "gzip")]
    assert infos == ["/tiny", "/small", "/gzip"] and opens == [one, path]


def wide(file: Any) -> None:
    file["a"], file["b"] = TINY, TINY


def text(file: Any) -> None:
    file["x"] = "text"


def group(file: Any) -> None:
    file["g/x"] = TINY


def scale(file: Any) -> None:
    file["x"] = TINY[0]
    file["x"].make_scale("x")


@pytest.mark.parametrize(
    ("write", "error", "said"),
    [
        (wide, ConfigError, "holds 2 arrays"),
        (text, SourceError, "holds no array that can be loaded without being named"),
        (scale, SourceError, "a coordinate"),
        (group, None, "/g/x"),
    ],
)
def test_without_a_name(tmp_path: Path, write: Callable[[Any], None], error: Any, said: str) -> None:
    """Wrong if a file were taken for one with one array, or the error named nothing."""
    with h5py.File(tmp_path / "one.h5", "w") as file:
        write(file)
    with Finder(lookup.STRICT, Tuning()) as finder:
        if error is None:
            info, values, _ = finder.find(str(tmp_path / "one.h5"), None)
            assert info.dataset == said and values is not None and bytes(values) == TINY.astype("=i2").tobytes()
            return
        with pytest.raises(error, match=said):
            finder.find(str(tmp_path / "one.h5"), None)


def test_an_archive_that_was_not_read(tmp_path: Path) -> None:
    """Wrong if closing it raised: zarr-python opens an archive when it first reads."""
    with zarr.storage.ZipStore(tmp_path / "a.zarr.zip", mode="w") as store:
        zarr.create_array(store, name="x", data=TINY.astype("i2"))
    with Finder(lookup.STRICT, Tuning()) as finder:
        assert finder._file(str(tmp_path / "a.zarr.zip")).only_name() is None
        assert finder.find(str(tmp_path / "a.zarr.zip"), None)[0].shape == TINY.shape
    with Finder(lookup.STRICT, Tuning()) as finder:
        finder._file(str(tmp_path / "a.zarr.zip"))


# --- chunks that are stored as plain values

STEPS = np.arange(40 * 5 * 7, dtype="float32").reshape(40, 5, 7)


def written(path: Path, order: list[int], **more: Any) -> str:
    """A file whose chunks were written in some order, so that they lie in the file in that order."""
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", STEPS.shape, **{"dtype": "f4", "chunks": (1, 5, 7), **more})
        for k in order:
            data[k : k + data.chunks[0]] = STEPS[k : k + data.chunks[0]]
    return str(path)


class Room:
    """Memory to read into, as the ranks of a machine share it; what is in it is from another call."""

    def __init__(self) -> None:
        self.given: Any = None

    def __call__(self, nbytes: int) -> Any:
        self.given = np.full(nbytes, 255, dtype=np.uint8)
        return self.given


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which reads of the array there were: ``"plain"``, ``"library"``."""
    found: list[str] = []
    plain, library = Hdf5Chunks.read_plain, hdf5.Hdf5Source.read_into

    def read_plain(self: Any, *arguments: Any) -> bool:
        done = plain(self, *arguments)
        found.extend(["plain"] * done)
        return done

    def read_into(self: Any, *arguments: Any) -> None:
        found.append("library")
        library(self, *arguments)

    monkeypatch.setattr(Hdf5Chunks, "read_plain", read_plain)
    monkeypatch.setattr(hdf5.Hdf5Source, "read_into", read_into)
    return found


ASCENDING = list(range(40))


@pytest.mark.parametrize(
    ("order", "more", "how"),
    [
        (ASCENDING, {}, "plain"),
        ([*range(20, 40), *range(20)], {}, "plain"),  # two runs, the second half first
        ([*range(8), *range(16, 40), *range(8, 16)], {"maxshape": (None, 5, 7)}, "plain"),
        (ASCENDING[::2] + ASCENDING[1::2], {}, "library"),  # none follows another: not worth a call for each
        (ASCENDING[::-1], {}, "library"),
        (ASCENDING, {"dtype": ">f4"}, "library"),  # the bytes are not the values
        (ASCENDING, {"fletcher32": True}, "library"),
        (ASCENDING, {"shuffle": True}, "library"),
        (list(range(0, 40, 2)), {"chunks": (2, 5, 7)}, "plain"),
        (list(range(0, 40, 3)), {"chunks": (3, 5, 7)}, "library"),  # the last one reaches over the edge
        (ASCENDING, {"chunks": (1, 5, 4)}, "library"),  # two side by side
    ],
)
def test_plain_chunks_go_straight_to_where_they_are_sent_from(
    tmp_path: Path, reads: list[str], order: list[int], more: dict[str, Any], how: str
) -> None:
    """Wrong if chunks were taken in the order of the file, or bytes for values; h5py says what is right."""
    path, room = written(tmp_path / "x.h5", order, **more), Room()
    with h5py.File(path) as file:
        wanted = file["x"][...].astype("f4")
    np.testing.assert_array_equal(wanted, STEPS)
    with Finder(lookup.STRICT, Tuning(), room=room) as finder:
        values = finder.find(path, "x")[1]
    assert values is not None and bytes(values) == STEPS.tobytes()
    assert np.shares_memory(np.frombuffer(values, np.uint8), room.given)
    if "shuffle" not in more and "fletcher32" not in more:
        assert reads == [how]


def test_plain_chunks_of_which_some_are_missing_are_left_to_the_load(tmp_path: Path, reads: list[str]) -> None:
    """Wrong if what was in memory before were taken for the values of a chunk that was never written."""
    path = written(tmp_path / "x.h5", [k for k in ASCENDING if k != 17])
    with Finder(lookup.STRICT, Tuning(), room=Room()) as finder:
        assert finder.find(path, "x")[1] is None
    assert "plain" not in reads


def test_plain_chunks_that_were_cut_off(tmp_path: Path) -> None:
    """Wrong if the end of the memory were sent as it was."""
    path = written(tmp_path / "x.h5", ASCENDING)
    size = Path(path).stat().st_size
    source = lookup.open_source(path, "/x")
    os.truncate(path, size - 100)
    reader, out = source.chunk_reader(), np.zeros(STEPS.shape, "f4")
    with h5py.File(written(tmp_path / "y.h5", ASCENDING)) as whole:
        ends = max(whole["x"].id.get_chunk_info(k).byte_offset for k in ASCENDING) + 140
    assert ends > size - 100, "the last chunk is at the end of the file"
    assert isinstance(reader, Hdf5Chunks) and not reader.read_plain([range(40), range(1), range(1)], out)
    source.close()
