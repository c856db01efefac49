"""Virtual datasets that are read part by part: compared with what h5py reads through HDF5's own virtual layer."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shardload.errors import SourceError
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.contract.chunk_reader import read_by_chunks
from shardload.formats.hdf5 import links, tiles
from shardload.formats.hdf5 import opened as opened_module
from shardload.formats.hdf5.opened import cached
from shardload.formats.hdf5.source import Hdf5Source
from shardload.formats.lookup import format_of, open_source
from shardload.planning.region import Region
from tests.tiers import some_of
from tests.unit.files import missing_in, python_memory_below, raw_dataset, read, read_all, write_hdf5
from tests.unit.formats.conformance import check_source

Place = tuple[slice, ...]


def write(folder: Path, name: str, values: np.ndarray[Any, Any], **how: Any) -> h5py.VirtualSource:
    write_hdf5(folder / name, {"g/x": values}, **how)
    return h5py.VirtualSource(name, "g/x", values.shape, values.dtype)


def whole(
    folder: Path,
    shape: tuple[int, ...],
    placed: Sequence[tuple[Place, Any]],
    dtype: Any = "f4",
    fill: Any = 7,
    name: str = "whole.h5",
) -> str:
    layout = h5py.VirtualLayout(shape, np.dtype(dtype))
    for place, source in placed:
        layout[place] = source
    with h5py.File(folder / name, "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=fill)
    return str(folder / name)


def numbered(shape: tuple[int, ...], dtype: Any = "f4") -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def rows(folder: Path, lengths: Sequence[int], rest: tuple[int, ...] = (6, 5), dtype: Any = "f4", **how: Any) -> str:
    """Parts one after the other along the first axis."""
    values, placed, first = numbered((sum(lengths), *rest), dtype), [], 0
    for k, n in enumerate(lengths):
        placed.append(((slice(first, first + n),), write(folder, f"p{k}.h5", values[first : first + n], **how)))
        first += n
    return whole(folder, values.shape, placed, dtype)


def check(path: str, has_reader: bool | None = None) -> Hdf5Source:
    """Every box of a few cuts along each axis, by all ways of reading, against h5py."""
    with h5py.File(path) as file:
        expected = file["x"][...]
    source = open_source(path, "/x")
    assert isinstance(source, Hdf5Source) and source._tiles is not None
    reader = source.chunk_reader()
    assert has_reader is None or (reader is not None) == has_reader
    cuts = [
        sorted(({0, 1, n // 2, n - 1, n} if k == 0 else {0, n - 1, n}) & set(range(n + 1)))
        for k, n in enumerate(expected.shape)
    ]
    for bounds in some_of(itertools.product(*(itertools.combinations(cut, 2) for cut in cuts))):
        region = Region(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
        np.testing.assert_array_equal(read(source, region), expected[region.slices()], err_msg=str(region))
        if reader is not None:
            chunks = source.info.chunks or ()
            out = np.full(region.shape, 99, source.dtype)
            read_by_chunks(reader, chunks, region, out)
            np.testing.assert_array_equal(out, expected[region.slices()], err_msg=str(region))
    np.testing.assert_array_equal(source.plain(Region.whole(expected.shape)), expected)
    source.close()
    with pytest.raises((OSError, ValueError, RuntimeError)):
        read_all(source)
    return source


@pytest.mark.parametrize(
    ("lengths", "how", "has_reader"),
    [
        ((4, 2, 6, 3), {"chunks": (2, 4, 5), "compression": "gzip", "shuffle": True}, True),
        ((4, 3, 6), {"chunks": (2, 4, 5), "compression": "gzip"}, False),  # the second part ends inside of a chunk
        ((3, 4), {}, False),
        ((2, 0, 1), {"chunks": (1, 2, 3), "maxshape": (None, 6, 5)}, True),
        ((4, 4), {"chunks": (2, 3, 4), "fletcher32": True, "dtype": ">f4"}, True),
        ((1, 1, 1), {"chunks": (1, 6, 5), "compression": "gzip"}, True),
    ],
)
def test_parts_one_after_the_other(
    tmp_path: Path, lengths: Sequence[int], how: dict[str, Any], has_reader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_MOST_OPEN", 1)
    dtype = how.pop("dtype", "f4")
    check(rows(tmp_path, lengths, dtype=dtype, **how), has_reader=has_reader)


def test_one_part_for_each_step(tmp_path: Path) -> None:
    """Parts have an axis less than the whole."""
    values = numbered((3, 4, 6))
    how = {"chunks": (2, 3), "compression": "gzip"}
    placed = [((k, slice(None), slice(None)), write(tmp_path, f"p{k}.h5", values[k], **how)) for k in range(3)]
    source = check(whole(tmp_path, values.shape, placed), has_reader=True)
    assert source.info.chunks == (1, 2, 3)


def test_a_part_of_a_part(tmp_path: Path) -> None:
    """What is mapped begins inside of its dataset, at a border of chunks and not."""
    values = numbered((8, 6))
    how = {"chunks": (2, 3), "compression": "gzip"}
    first, second = (write(tmp_path, name, values, **how) for name in ("p0.h5", "p1.h5"))
    placed = [((slice(0, 4),), first[2:6]), ((slice(4, 8),), second[4:8])]
    check(whole(tmp_path, (8, 6), placed), has_reader=True)
    check(whole(tmp_path, (7, 6), [((slice(0, 4),), first[1:5]), ((slice(4, 7),), second[5:8])]), has_reader=False)
    check(whole(tmp_path, (8, 6), [((slice(0, 4),), first[0:4]), ((slice(4, 8),), first[0:4])]), has_reader=True)  # twice
    column = [((slice(0, 8), 0), first[:, 2]), ((slice(0, 8), 1), second[:, 5])]
    check(whole(tmp_path, (8, 2), column))
    row = write(tmp_path, "row.h5", numbered((8,)), chunks=(4,))
    check(whole(tmp_path, (8, 1), [((slice(0, 8), 0), row)]), has_reader=False)  # chunks along another axis


def test_what_no_part_covers_is_the_fill_value(tmp_path: Path) -> None:
    values = numbered((4, 6))
    how = {"chunks": (2, 3), "compression": "gzip", "fillvalue": 7}
    placed = [
        ((slice(0, 4),), write(tmp_path, "p0.h5", values, **how)),
        ((slice(6, 10),), write(tmp_path, "p1.h5", values, **how)),
    ]
    path = whole(tmp_path, (12, 6), placed)
    check(path, has_reader=True)
    with contextlib.closing(open_source(path, "/x")) as source:
        assert sorted(missing_in(source, Region((3, 0), (12, 6)))) == [(2, 0), (2, 1), (5, 0), (5, 1)]
        assert missing_in(source, Region((0, 0), (4, 6))) == []
    check(whole(tmp_path, (12, 6), placed, fill=8), has_reader=False)  # other than in the parts
    check(whole(tmp_path, (12, 6), [((slice(1, 5),), placed[0][1]), ((slice(5, 9),), placed[1][1])]))  # within chunks
    placed = [((slice(1, 3),), write(tmp_path, "p2.h5", values[:2]))]
    path = whole(tmp_path, (4, 6), placed)
    check(path)
    with contextlib.closing(open_source(path, "/x")) as source:
        assert missing_in(source, Region((1, 0), (3, 6))) == [] and missing_in(source, Region((0, 0), (3, 6))) == [()]


def test_what_is_not_supported(tmp_path: Path) -> None:
    """Overlaps, every other row of a part, a type that loses digits, another order of elements."""
    first, second = write(tmp_path, "p0.h5", numbered((8, 6))), write(tmp_path, "p1.h5", -numbered((8, 6)))
    for shape, placed, dtype in (
        ((10, 6), [((slice(0, 8),), first), ((slice(2, 10),), second)], "f4"),
        ((4, 6), [((slice(0, 4),), first[::2])], "f4"),
        ((8, 6), [((slice(0, 8),), first)], "f2"),
        ((6, 8), [((slice(0, 6),), first)], "f4"),
    ):
        with pytest.raises(SourceError, match=r"virtual dataset whose parts overlap, .* not supported. .* old\[name\]\[...\]"):
            open_source(whole(tmp_path, shape, placed, dtype), "/x")
    inner = h5py.VirtualSource("whole.h5", "x", (6, 8), "f4")
    with pytest.raises(SourceError, match="a virtual dataset whose parts overlap"):
        open_source(whole(tmp_path, (6, 8), [((slice(0, 6),), inner)], name="outer.h5"), "/x")


@pytest.mark.parametrize(("dtype", "wider"), [("f4", "f8"), (">f4", "<f4"), ("bool", "i1"), ("u2", "i4")])
def test_parts_of_another_type(tmp_path: Path, dtype: str, wider: str) -> None:
    """Wrong if the threads of a reader decoded them as the type that is loaded."""
    part = write(tmp_path, "p0.h5", numbered((8, 6), "i4").astype(dtype), chunks=(2, 6), compression="gzip")
    check(whole(tmp_path, (8, 6), [((slice(0, 8),), part)], dtype=wider))


@pytest.mark.parametrize("how", [{}, {"chunks": (1, 3), "compression": "gzip"}, {"chunks": (4, 6), "compression": "gzip"}])
def test_parts_that_take_turns(tmp_path: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of detectors: one each, some each, with a gap, and along both axes. Each part is opened once."""
    monkeypatch.setattr(tiles, "_MOST_OPEN", 2)
    opened, right = list[tuple[str, ...]](), tiles.Tiles._opened
    monkeypatch.setattr(tiles.Tiles, "_opened", lambda self, names: opened.append(names) or right(self, names))
    first, second = write(tmp_path, "p0.h5", numbered((8, 6)), **how), write(tmp_path, "p1.h5", -numbered((8, 6)), **how)
    check(whole(tmp_path, (16, 6), [((slice(0, 16, 2),), first), ((slice(1, 16, 2),), second)]))
    assert len(opened) == 2
    check(whole(tmp_path, (9, 6), [((slice(1, 8, 3),), first[2:5]), ((slice(0, 8, 3),), second[:3])]))
    check(whole(tmp_path, (8, 12), [((slice(0, 8), slice(0, 12, 2)), first), ((slice(0, 8), slice(1, 12, 2)), second)]))
    check(whole(tmp_path, (16, 12), [((slice(0, 16, 2), slice(1, 12, 2)), first)]))
    frame = write(tmp_path, "p2.h5", numbered((3, 2, 4)), **({"chunks": (1, 2, 4)} if how else {}))
    check(whole(tmp_path, (6, 2, 4), [((slice(0, 6, 2),), frame)]), has_reader=None if how else False)

    def blocks(creation: Any) -> None:
        space = h5py.h5s.create_simple((13, 6))
        space.select_hyperslab((1, 0), (2, 1), (6, 6), (4, 6))  # 1 to 5 and 7 to 11
        creation.set_virtual(space, b"p0.h5", b"g/x", h5py.h5s.create_simple((8, 6)))

    with h5py.File(tmp_path / "blocks.h5", "w") as file:
        raw_dataset(file, "x", h5py.h5t.IEEE_F32LE, (13, 6), setting=blocks)
    check(str(tmp_path / "blocks.h5"))


@pytest.mark.parametrize("dtype", ["c8", "bool"])
def test_types_that_a_new_version_of_hdf5_encodes_in_another_way(tmp_path: Path, dtype: str) -> None:
    """Wrong if the bytes that encode two types were compared: those of a file of `libver` "latest" differ for the same type."""
    placed, values = [], numbered((8, 6), "i4").astype(dtype)
    for k, libver in enumerate(("earliest", "latest")):
        with h5py.File(tmp_path / f"p{k}.h5", "w", libver=libver) as file:
            file.create_dataset("g/x", data=values[4 * k : 4 * k + 4], chunks=(2, 6), compression="gzip")
        placed.append(((slice(4 * k, 4 * k + 4),), h5py.VirtualSource(f"p{k}.h5", "g/x", (4, 6), values.dtype)))
    check(whole(tmp_path, (8, 6), placed, dtype, fill=values.dtype.type(0)), has_reader=True)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_part_of_which_hardly_a_chunk_is_stored(tmp_path: Path, libver: str) -> None:
    """Wrong if each chunk that it might have took memory when it is looked at."""
    n = 1 << 23
    with h5py.File(tmp_path / "p.h5", "w", libver=libver) as file:
        part = file.create_dataset("g/x", (n,), "u1", chunks=(1,), maxshape=(None,), fletcher32=True)
        part[[3, n - 1]] = [1, 2]
    path = whole(tmp_path, (10,), [((slice(0, 10),), h5py.VirtualSource("p.h5", "g/x", (n,))[:10])], "u1", 0)
    with python_memory_below(16 << 20), contextlib.closing(open_source(path, "/x")) as source:
        source.expect(Region((0,), (10,)))
        assert read_all(source).tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]


def test_plain_chunks_of_one_part_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardload.formats.stored_chunks._LEAST_NBYTES", 1)
    with contextlib.closing(open_source(rows(tmp_path, (4, 4), chunks=(1, 6, 5)), "/x")) as source:
        reader, out = source.chunk_reader(), np.zeros((4, 6, 5), "f4")
        assert reader is not None and reader.read_plain((range(4, 8), range(1), range(1)), out)
        np.testing.assert_array_equal(out, numbered((8, 6, 5))[4:])
        assert not reader.read_plain((range(3, 7), range(1), range(1)), out)


def test_parts_that_are_gone_or_others(tmp_path: Path) -> None:
    path = rows(tmp_path, (2, 2))
    with contextlib.closing(open_source(path, "/x")) as source:
        os.remove(tmp_path / "p1.h5")
        with pytest.raises(OSError, match=r"p1\.h5"):
            read_all(source)
        write(tmp_path, "p1.h5", numbered((3, 6, 5)))
        with pytest.raises(OSError, match=r"p1\.h5' has changed since it was looked at \(had \d+ bytes and has"):
            read_all(source)
    os.remove(tmp_path / "p1.h5")
    with pytest.raises(SourceError, match=r"p1\.h5"):
        open_source(path, "/x")


def test_one_rank_looks_at_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others open only those that they read, and take no other version of them, nor of the file that leads to them."""
    path = rows(tmp_path, (2, 2, 2), chunks=(1, 6, 5), compression="gzip")
    with contextlib.closing(open_source(path, "/x")) as source:
        told = ArrayInfo.from_dict(json.loads(json.dumps(source.info.to_dict())))
    opened: list[str] = []
    right = links._open_checked
    monkeypatch.setattr(links, "_open_checked", lambda path, *more: opened.append(path) or right(path, *more))
    source = open_source(path, "/x", planned=told)
    assert source.info == told and opened == []
    region = Region((2, 0, 0), (4, 6, 5))
    source.expect(region)
    reader, out = source.chunk_reader(), np.empty((2, 6, 5), "f4")
    assert reader is not None
    read_by_chunks(reader, (1, 6, 5), region, out)
    np.testing.assert_array_equal(out, numbered((6, 6, 5))[2:4])
    assert opened == [str(tmp_path / "p1.h5")]
    source.close()
    write(tmp_path, "p1.h5", -numbered((2, 6, 5)), chunks=(1, 6, 5), compression="gzip")
    with (
        contextlib.closing(open_source(path, "/x", planned=told)) as source,
        pytest.raises(OSError, match=r"p1\.h5' has changed since it was looked at"),
    ):
        read(source, region)
    rows(tmp_path, (3, 3), chunks=(1, 6, 5), compression="gzip")
    with (
        contextlib.closing(open_source(path, "/x", planned=told)) as source,
        pytest.raises(OSError, match="has other parts than when it was looked at"),
    ):
        read(source, region)


def test_few_parts_are_open_at_a_time(tmp_path: Path) -> None:
    n = tiles._MOST_OPEN + 5
    path = rows(tmp_path, (1,) * n, (2,), chunks=(1, 2))
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(open_source(path, "/x")) as source:
        reader, out = source.chunk_reader(), read_all(source)
        np.testing.assert_array_equal(out, numbered((n, 2)))
        assert reader is not None
        read_by_chunks(reader, (1, 2), Region((0, 0), (n, 2)), out)
        assert len(source._tiles._open) <= tiles._MOST_OPEN + 1  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("lengths", "how"),
    [((4, 2, 5), {"chunks": (2, 4, 5), "compression": "gzip"}), ((4, 3, 4), {"chunks": (2, 4, 5)}), ((4, 2, 5), {})],
    ids=["one grid", "no grid", "runs"],
)
def test_it_behaves_as_every_format_must(tmp_path: Path, lengths: Sequence[int], how: dict[str, Any]) -> None:
    path = rows(tmp_path, lengths, **how)
    check_source(lambda: open_source(path, "/x"), numbered((11, 6, 5)))


def two(folder: Path, first: Any, second: Any) -> str:
    return whole(folder, (8, 6), [((slice(0, 4),), first), ((slice(4, 8),), second)])


def by_rows(folder: Path, name: str, source: h5py.VirtualSource) -> h5py.VirtualSource:
    """A virtual dataset: the rows of a source in another order."""
    whole(folder, (4, 6), [((slice(0, 4, 2),), source[2:]), ((slice(1, 4, 2),), source[:2])], name=name)
    return h5py.VirtualSource(name, "x", (4, 6), "f4")


def test_parts_that_are_reached_or_stored_in_another_way(tmp_path: Path) -> None:
    """By a link into a file beside it; behind a user block; a virtual dataset; with an axis less; with other filters."""
    values, how = numbered((4, 6)), {"chunks": (2, 3), "compression": "gzip"}
    first = write(tmp_path, "p0.h5", values, **how)

    def part(name: str) -> h5py.VirtualSource:
        return h5py.VirtualSource(name, "x", (4, 6), "f4")

    with h5py.File(tmp_path / "linked.h5", "w") as file:
        file["x"] = h5py.ExternalLink("p0.h5", "/g/x")
    check(two(tmp_path, first, part("linked.h5")), has_reader=True)
    with h5py.File(tmp_path / "block.h5", "w", userblock_size=512) as file:
        file.create_dataset("x", data=-values, **how)
    check(two(tmp_path, first, part("block.h5")), has_reader=False)
    for filters in ({"shuffle": True}, {"compression": "lzf"}, {"compression": None}):
        check(two(tmp_path, first, write(tmp_path, "other.h5", -values, **(how | filters))), has_reader=False)
    check(two(tmp_path, first, by_rows(tmp_path, "mixed.h5", first)))
    row = write(tmp_path, "row.h5", numbered((6,)), chunks=(3,), compression="gzip")
    check(whole(tmp_path, (5, 6), [((slice(0, 4),), first), ((4, slice(0, 6)), row)]), has_reader=False)


@pytest.mark.parametrize("behind", ["p0.h5", "p1.h5"])
def test_a_change_of_a_file_behind_a_part_is_seen(tmp_path: Path, behind: str) -> None:
    _, second = (write(tmp_path, name, numbered((4, 6))) for name in ("p0.h5", "p1.h5"))
    with h5py.File(tmp_path / "linked.h5", "w") as file:
        file["x"] = h5py.ExternalLink("p0.h5", "/g/x")
    path = two(tmp_path, h5py.VirtualSource("linked.h5", "x", (4, 6), "f4"), by_rows(tmp_path, "mixed.h5", second))
    used, fresh = open_source(path, "/x"), open_source(path, "/x")
    read_all(used)
    before = used.state()
    os.utime(tmp_path / behind, ns=(1, 1))
    assert used.state() != before
    with pytest.raises(OSError, match="has changed since it was looked at"):
        read_all(fresh)
    used.close()
    fresh.close()
    check(path)


def test_what_consists_of_itself_is_refused(tmp_path: Path) -> None:
    for name, other in (("a.h5", "b.h5"), ("b.h5", "a.h5"), ("c.h5", ".")):
        whole(tmp_path, (4,), [((slice(0, 4),), h5py.VirtualSource(other, "x", (4,)))], name=name)
    for name in ("a.h5", "c.h5"):
        with pytest.raises(SourceError, match="whose 'x' consists of itself"):
            open_source(str(tmp_path / name), "/x")


def test_missing_chunks_are_those_that_meet_the_region(tmp_path: Path) -> None:
    """Chunks of a part are not those that are told: they begin elsewhere, are larger, or the part has none."""
    with h5py.File(tmp_path / "p1.h5", "w") as file:
        file.create_dataset("chunked", (4, 6), "f4", chunks=(4, 6))
        file.create_dataset("plain", (4, 6), "f4")
    first = write(tmp_path, "p0.h5", numbered((4, 6)), chunks=(2, 3))
    for name in ("chunked", "plain"):
        path = whole(
            tmp_path,
            (9, 6),
            [((slice(0, 4),), first), ((slice(5, 9),), h5py.VirtualSource("p1.h5", name, (4, 6), "f4"))],
            fill=0,
        )
        with contextlib.closing(open_source(path, "/x")) as source:
            assert source.info.chunks == (2, 3)
            assert missing_in(source, Region((2, 0), (4, 6))) == []
            assert sorted(missing_in(source, Region((6, 3), (9, 6)))) == [(3, 1), (4, 1)]
            assert sorted(missing_in(source, Region((4, 0), (6, 2)))) == [(2, 0)]


def test_missing_complex_numbers_are_the_fill_values_of_their_parts(tmp_path: Path) -> None:
    """HDF5 2.0 has a type of its own for them."""
    kind = getattr(h5py.h5t, "COMPLEX_IEEE_F32LE", None) or h5py.h5t.py_create("c8")
    for k in range(2):
        fill = np.array(k + 3j, "c8")
        with h5py.File(tmp_path / f"p{k}.h5", "w") as file:
            raw_dataset(file, "x", kind, (4,), chunks=(2,), setting=lambda made, fill=fill: made.set_fill_value(fill))[:2] = 5

    def parts(creation: Any) -> None:
        for k in range(2):
            space = h5py.h5s.create_simple((8,))
            space.select_hyperslab((4 * k,), (1,), block=(4,))
            creation.set_virtual(space, f"p{k}.h5".encode(), b"x", h5py.h5s.create_simple((4,)))

    with h5py.File(tmp_path / "whole.h5", "w") as file:
        raw_dataset(file, "x", kind, (8,), setting=parts)
    check(str(tmp_path / "whole.h5"), has_reader=False)


def test_no_thread_waits_for_what_another_one_asks_of_hdf5() -> None:
    """It may have h5py's lock, for which the other one waits."""
    asked, go_on = threading.Event(), threading.Event()

    class Asker:
        def __init__(self, is_slow: bool) -> None:
            self.is_slow = is_slow

        @cached
        def answer(self) -> int:
            if self.is_slow:
                asked.set()
                assert go_on.wait(60)
            return 1

    slow, found = Asker(True), list[int]()
    threads = [threading.Thread(target=lambda one=one: found.append(one.answer)) for one in (slow, Asker(False))]
    threads[0].start()
    assert asked.wait(60)
    threads[1].start()
    threads[1].join(10)
    assert found == [1]
    go_on.set()
    for thread in threads:
        thread.join()
    assert found == [1, 1] and slow.answer == 1


def two_arrays(folder: Path) -> str:
    """Two arrays that both go on through the same three parts."""
    layouts = {name: h5py.VirtualLayout((6, 4), dtype) for name, dtype in (("x", "f4"), ("y", "i8"))}
    for k in range(3):
        with h5py.File(folder / f"p{k}.h5", "w") as file:
            for name, layout in layouts.items():
                file[f"g/{name}"] = numbered((2, 4), layout.dtype) + 8 * k
                layout[2 * k : 2 * k + 2] = h5py.VirtualSource(f"p{k}.h5", f"g/{name}", (2, 4), layout.dtype)
    with h5py.File(folder / "whole.h5", "w") as file:
        for name, layout in layouts.items():
            file.create_virtual_dataset(name, layout)
    return str(folder / "whole.h5")


@pytest.mark.parametrize("most", [3, 2, 0])
def test_files_stay_open_from_one_array_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Wrong if each array opened all files again, those that are too many to keep stayed open, or one did after the end."""
    path, opened, right = two_arrays(tmp_path), list[str](), links.open_to_read
    monkeypatch.setattr(links, "open_to_read", lambda path: (opened.append(path), right(path))[1])
    monkeypatch.setattr(opened_module, "_MOST_PARTS", most)
    with format_of(path).open_file(path) as file:
        for name, dtype in (("x", "f4"), ("y", "i8")):
            with contextlib.closing(file.open(f"/{name}")) as source:
                np.testing.assert_array_equal(read_all(source), numbered((6, 4), dtype), strict=True)
    # Without keeping: each is opened to look at it, and to read it, for both arrays.
    assert len(opened) == {3: 3, 2: 2 + 4, 0: 12}[most]
    assert not [one for one in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if one.startswith(str(tmp_path))]


def test_files_of_files_stay_open_within_one_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if each part kept as many parts of its own: a thousand descriptors for a thousand files."""
    path = whole(
        tmp_path, (6,), [((slice(2 * k, 2 * k + 2),), h5py.VirtualSource(f"m{k}.h5", "x", (2,), "f4")) for k in range(3)]
    )
    for k in range(3):
        parts = [((slice(i, i + 1),), write(tmp_path, f"p{2 * k + i}.h5", np.full(1, 2 * k + i, "f4"))) for i in range(2)]
        whole(tmp_path, (2,), parts, name=f"m{k}.h5")
    monkeypatch.setattr(opened_module, "_MOST_PARTS", 2)
    monkeypatch.setattr(tiles, "_MOST_OPEN", 0)

    def others() -> set[str]:
        found = map(os.path.realpath, Path("/proc/self/fd").iterdir())
        return {one for one in found if one.startswith(str(tmp_path)) and one != os.path.realpath(path)}

    with format_of(path).open_file(path) as file:
        with contextlib.closing(file.open("/x")) as source:
            np.testing.assert_array_equal(read_all(source), np.arange(6, dtype="f4"))
        assert len(others()) == 2
    assert not others()


@pytest.mark.parametrize("is_renamed", [True, False])
def test_a_file_that_changes_while_it_is_open(tmp_path: Path, is_renamed: bool) -> None:
    """Another one of the same size and time gets its name; or it is written anew, in the same place on disk.

    Wrong if the second array were read from the file that was replaced, or if HDF5's old metadata told where it is.
    """
    path, old, new = two_arrays(tmp_path), tmp_path / "p1.h5", tmp_path / "new.h5"
    before = os.stat(old)
    with format_of(path).open_file(path) as file:
        file.open("/x").close()
        with h5py.File(new, "w") as other:
            if not is_renamed:
                other["first"] = np.zeros(1000)
            for name, dtype in (("x", "f4"), ("y", "i8"))[:: 1 if is_renamed else -1]:
                other[f"g/{name}"] = np.full((2, 4), -1, dtype)
        if is_renamed:
            assert os.stat(new).st_size == before.st_size
            os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
            new.replace(old)
        else:
            with old.open("r+b") as other:
                other.write(new.read_bytes())
        with contextlib.closing(file.open("/y")) as source:
            out = read_all(source)
    assert (out[2:4] == -1).all() and (out[[0, 1, 4, 5]] == numbered((6, 4), "i8")[[0, 1, 4, 5]]).all()
