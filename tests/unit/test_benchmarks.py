"""The parts of the benchmarks that need no MPI: files, cells, the floor's decoders, the table of goals."""

from __future__ import annotations

import argparse
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import h5py
import jax
import numcodecs.zstd
import numpy as np
import pytest
import zarr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mpi4py.MPI import COMM_WORLD

from benchmarks import planning
from benchmarks.cases import layouts, saves
from benchmarks.cases.cells import LAYOUTS, box
from benchmarks.cases.layouts import boxes, cube, make, plane, reference_of
from benchmarks.peers import floor, save_floor, ways
from benchmarks.reports.saves import copy_section, plot_saves, put_section, save_section, section_of
from benchmarks.reports.stores import stores_section
from benchmarks.reports.streams import plot_streams, streams_section
from benchmarks.reports.tables import read_records
from benchmarks.runs import grid, rechunking

SIZE = 16
RESULTS = Path(grid.__file__).parents[1] / "results"
DOCS = RESULTS.parents[1] / "docs"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make(tmp_path_factory.mktemp("data"), SIZE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_the_same_field(files: dict[str, Any], layout: str) -> None:
    file = files[layout]
    if layout.startswith("zarr"):
        found = zarr.open_array(file.path, mode="r")[...]
    else:
        with h5py.File(file.path) as opened:
            found = opened[file.dataset][...]
    expected = np.stack([plane(SIZE, i) for i in range(SIZE)])
    np.testing.assert_array_equal(found, expected)
    assert file.nbytes == expected.nbytes
    assert len(np.unique(expected)) > SIZE**3 // 2  # so that a misplaced piece differs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_floor_decodes_every_chunk(files: dict[str, Any], layout: str) -> None:
    file = files[layout]
    values = np.load(file.reference)
    job = floor.job_of(str(file.path), file.dataset)
    machine = floor.Floor()
    assert job.nbytes == values.nbytes
    decode, copy = machine.run(job)
    if job.decode is None:
        assert machine.target.tobytes() == values.tobytes()
        return
    assert decode > 0
    assert copy > 0
    chunks = (1, SIZE, SIZE) if layout.endswith("planes") else (cube(SIZE),) * 3
    expected = {values[place].tobytes() for place in boxes(values.shape, chunks)}
    scratch = floor.Scratch()
    scratch.fit(1, job.chunk_nbytes)
    found = set()
    for name, offset, nbytes in job.places:
        job.decode(Path(name).read_bytes()[offset : offset + nbytes], scratch)
        found.add(scratch.out.tobytes())
    assert found == expected
    assert len(job.places) == len(expected) == math.prod(SIZE // c for c in chunks)


@pytest.mark.parametrize("layout", ["hdf5-gzip-planes", "hdf5-contiguous", "zarr-zstd-planes"])
def test_no_way_remembers_what_it_loaded_before(tmp_path: Path, layout: str) -> None:
    """Wrong if a file were left open, or decoded chunks kept, between the runs that are timed: the way would win by that."""
    (file,) = make(tmp_path, SIZE, [layout]).values()
    found = {"path": str(file.path), "dataset": file.dataset}
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), "a"), P("a"))
    for name, way in ways.WAYS.items():
        if name == "tensorstore" and not layout.startswith("zarr"):
            continue
        before = np.asarray(way(found, sharding, COMM_WORLD))
        if layout.startswith("zarr"):
            zarr.open_array(file.path, mode="r+")[...] = before + 1
        else:  # HDF5 does not open for writing what is open for reading
            with h5py.File(file.path, "r+") as opened:
                opened[file.dataset][...] = before + 1
        after = np.asarray(way(found, sharding, COMM_WORLD))
        np.testing.assert_array_equal(after, before + 1, err_msg=name)


def test_the_boxes_of_all_ranks_are_the_array() -> None:
    for spec in ("a", "a,b", "-,a,b", "-,-,a"):
        for n in (2, 4, 8):
            count = np.zeros((8, 16, 24), int)
            for rank in range(n):
                count[box(count.shape, spec, n, rank)] += 1
            assert (count == 1).all(), (spec, n)


def test_a_field_that_was_half_written_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if what an interrupted run left were taken for the values: each way would be said to load wrong ones."""

    def interrupted(file: Any, values: Any) -> None:
        with Path(file if isinstance(file, Path) else file.name).open("wb") as half:
            half.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(layouts.np, "save", interrupted)
        layouts.field(tmp_path)
    file = layouts.field(tmp_path)
    with h5py.File(file.path) as opened:
        np.testing.assert_array_equal(np.load(file.reference), opened[file.dataset][()])


def test_what_planning_costs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a name or a type of plans were changed: nothing else runs this program."""
    monkeypatch.setattr(planning, "REPEATS", 1)
    rows = planning.measure_all(argparse.Namespace(mesh=[2], size=64))
    assert len(rows) == 8 and all(row["plan_ms"] > 0 and row["peak_nbytes"] > 0 for row in rows)


# --- the grid of slowed-down machines


def test_plans_take_the_right_way_in_the_measured_grid() -> None:
    """Times of all ways on slowed-down machines are on record. Wrong if a change of the rule made plans take worse ones."""
    records = [json.loads((RESULTS / f"{name}.json").read_text()) for name in ("grid", "grid-links")]
    found = [grid.replan(record) for record in records]
    cells = [cell for record in found for cell in record["cells"]]
    assert [len(record["cells"]) for record in records] == [120, 40] and len(cells) == 160, "each way that is taken was timed"
    asked = grid.summary(cells)
    assert asked["fastest or within 25 %"] >= 0.9
    # One cell, of which each way was timed once, takes 2.03 times: two nodes over a network of 6 MB/s (docs/design/auto.md).
    assert asked["worst ratio"] <= grid.NEVER + 0.05
    assert '| slow | slow | hdf5-contiguous | `P(None, "a", "b")` |' in (table := grid.table(found[0])) and "| all | " in table


# --- saving


def test_whole_units_for_every_rank_are_the_array() -> None:
    """Wrong if two ranks had the same unit, or one was cut: peers that write from every process would spoil each other's."""
    for shape, unit in (((8, 16, 24), (1, 16, 24)), ((8, 16, 24), (4, 8, 8)), ((7, 9, 5), (2, 4, 5))):
        for n in (1, 2, 4, 6, 8):
            count = np.zeros(shape, int)
            for rank in range(n):
                place = saves.own_box(shape, unit, n, rank)
                count[place] += 1
                assert all(
                    s.start % u == 0 and (s.stop % u == 0 or s.stop == m) for s, u, m in zip(place, unit, shape, strict=True)
                )
            assert (count == 1).all(), (shape, unit, n)
    assert saves.is_aligned((8, 8, 8), (4, 4, 4), "a,b", 4) and not saves.is_aligned((8, 8, 8), (1, 8, 8), "-,a,b", 4)


@pytest.mark.parametrize("layout", saves.SAVE_LAYOUTS)
def test_the_floor_encodes_every_chunk(tmp_path: Path, layout: str) -> None:
    """Wrong if processes or threads wrote over each other, or left chunks out."""
    reference, asked = reference_of(tmp_path, SIZE), saves.save_layout(layout, SIZE)
    values, path = np.load(reference), tmp_path / "out"
    path.touch()
    floors = [save_floor.SaveFloor(2) for _ in range(3)]
    total = 0
    for rank, machine in enumerate(floors):
        machine.prepare(str(reference), asked, rank, 3)
        total += machine.run(str(path), asked.codec)
    data = path.read_bytes()
    if asked.chunks is None:
        assert data == values.tobytes()
        return
    decode = zlib.decompress if asked.codec == "gzip" else numcodecs.zstd.decompress
    chunks = [np.ascontiguousarray(values[place]).tobytes() for place in boxes(values.shape, asked.chunks)]
    expected = [save_floor.encoder(asked.codec)(np.frombuffer(chunk, np.uint8)) for chunk in chunks]
    assert total == sum(map(len, expected))
    assert all(bytes(one) in data for one in expected) and [bytes(decode(one)) for one in expected] == chunks


PAGES: dict[str, tuple[str, Any]] = {
    "save": ("explanation/speed.md", save_section),
    "copy": ("explanation/speed.md", copy_section),
    "streams": ("streams.md", streams_section),
    "stores": ("remote.md", stores_section),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_what_its_record_says(tmp_path: Path, name: str) -> None:
    """Wrong if the table were another run's, if a way stood in another's column, or a missed goal were left out."""
    (page, section), record = PAGES[name], read_records(RESULTS)[name]
    text = (DOCS / page).read_text()
    assert section_of(DOCS / page, name) == section(record)
    copied = tmp_path / "page.md"
    copied.write_text(text.replace(section(record), "old\n"))
    put_section(copied, name, section(record))
    assert copied.read_text() == text
    with pytest.raises(ValueError, match="has no place for other"):
        put_section(copied, "other", "new\n")


def test_records_are_plotted_and_missed_goals_are_told(tmp_path: Path) -> None:
    records = read_records(RESULTS)
    plot_saves(records["save"], tmp_path / "save.svg")
    plot_streams(records["streams"], tmp_path / "streams.svg")
    assert all(way in (tmp_path / "streams.svg").read_text() for way in ("tensorstore", "grain"))
    assert "hdf5-contiguous" in (tmp_path / "save.svg").read_text()
    for cell in records["save"]["cells"]:
        cell["ways"]["shardload"]["seconds"] = [1e3]
    told = save_section(records["save"])
    n_goals, n_met = map(int, re.search(r"Of (\d+) goals (\d+) are met. Not met:", told).groups())  # type: ignore[union-attr]
    assert told.count(", measured ") == n_goals - n_met > n_met
    assert streams_section(None) == "Not measured yet: `python -m benchmarks streams`.\n"


def test_copies_are_compared_and_told(tmp_path: Path) -> None:
    """Wrong if a way that writes wrong values, or fails, were timed; or if the memory were that of another process."""
    (file,) = make(tmp_path / "data", SIZE, ["hdf5-gzip-planes"]).values()
    ways = ["h5py"]  # the others are as slow to start
    record = rechunking.measure_copies(file, tmp_path / "out", ways, ranks=1, staging="8MiB", repeats=1)
    for cell in record["cells"]:
        assert "error" not in cell and len(cell["seconds"]) == 1
        assert 20 << 20 < cell["peaks_nbytes"][0][0] < 1 << 30
    assert list((tmp_path / "out").iterdir()) == []
    assert not rechunking.missing("h5py")
    np.save(file.reference, np.load(file.reference) + 1)
    record = rechunking.measure_copies(file, tmp_path / "out", ways, ranks=1, staging="8MiB", repeats=1)
    assert "does not hold the values" in record["cells"][0]["error"] and not record["cells"][0]["seconds"]
    assert "failed: " in copy_section(record)
