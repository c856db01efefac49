"""The benchmarks run, compare what every way loads with the file, and write records, tables and a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cases.cells import FLOOR, LAYOUTS, OURS, Cell
from benchmarks.cases.layouts import make
from benchmarks.cases.saves import SAVE_LAYOUTS, SAVE_SPECS
from benchmarks.remote import RemoteJob
from benchmarks.reports.tables import read_records, write_report
from benchmarks.runs import environments
from benchmarks.runs.measure import measure
from tests.jobs.launch import job_command, job_environment
from tests.tiers import IS_QUICK

HERE = Path(__file__).parent
WAYS = (OURS, "slice", "scatter", "jax-power", "tensorstore", FLOOR)  # those that need no other environment


@pytest.fixture(autouse=True, scope="module")
def _shared_jobs() -> Iterator[None]:
    """The jobs start as those of other tests do, and stay for the next command that asks for one like it: to start each was
    most of what these tests took, and no figure is looked at here."""
    jobs: dict[Any, RemoteJob] = {}

    def command(program: Any, n: int, **options: Any) -> list[str]:
        return job_command(program, n, env=job_environment(n), **options)

    def shared(name: str, n: int, program: Sequence[str] | None = None, devices: int = 1) -> Any:
        if program:  # one that does wrong
            return environments.start(name, n, program, devices)
        key = name, n, devices
        if key not in jobs or not jobs[key].is_alive:
            jobs[key] = environments.start(name, n, None, devices)
        return nullcontext(jobs[key])  # which does not end it

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(environments, "job_command", command)
        patched.setattr("benchmarks.runs.measure.start", shared)
        try:
            yield
        finally:
            for job in jobs.values():
                job.close()


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_every_layout_and_way_is_verified_and_reported(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "results"
    ways = tuple(way for way in WAYS if not IS_QUICK or way in (OURS, "slice", FLOOR))
    layouts = [LAYOUTS[0], *LAYOUTS[3::3]] if IS_QUICK else [*LAYOUTS]  # in one piece, of chunks, of shards
    command(
        "run", "--size", "16", "--ranks", "2", "--specs", "-,a,b", "--ways", ",".join(ways), "--repeats", "1",
        "--layouts", ",".join(layouts),
        "--data", str(data), "--out", str(out / "run.json"), "--cold",
    )  # fmt: skip
    record = json.loads((out / "run.json").read_text())
    assert [cell["layout"] for cell in record["cells"]] == layouts
    for cell in record["cells"]:
        expected = [way for way in ways if way != "tensorstore" or cell["layout"].startswith("zarr")]
        assert sorted(cell["ways"]) == sorted(expected)
        for way, took in cell["ways"].items():
            assert "error" not in took, (cell["layout"], way, took)
            assert took["verified"] == (way != FLOOR)
            assert len(took["seconds"]) == 1
            assert all(seconds > 0 for seconds in took["seconds"])
    assert {"jax", "floor"} <= set(record["versions"])
    assert str(tmp_path) not in (out / "run.json").read_text()

    table = command("report", "--results", str(out))
    for layout in layouts:
        assert f'| {layout} | `P(None, "a", "b")` | 2 |' in table
    assert (out / "table.md").read_text() in table
    assert (out / "ratios.svg").stat().st_size > 10_000


@pytest.mark.thorough  # the test above runs the one that all results come from
def test_the_other_commands(tmp_path: Path) -> None:
    places = ["--data", str(tmp_path / "data"), "--results", str(tmp_path)]
    command("memory", "--size", "64", "--ranks", "2", "--layouts", "hdf5-gzip-planes", *places)
    command("scatter", "--size", "16", "--ranks", "2", "--repeats", "1", "--results", str(tmp_path))
    command("small", "--ranks", "2", "--repeats", "2", *places)
    command("many", "--ranks", "2", "--series", "2", "--tiny", "5", "--repeats", "1", *places)
    command("verify", "--sizes", "32", "--ranks", "2", "--specs", "a,b", "--repeats", "1", *places)
    options = ["--size", "32", "--layouts", "hdf5-gzip-planes", "--specs", "-,a,b", "--jobs", "1x2", "--repeats", "1"]
    command("devices", *options, *places)
    table = command("report", "--results", str(tmp_path))
    assert '| 1 x 2 | hdf5-gzip-planes | `P(None, "a", "b")` |' in table
    assert "| scatter of 0 MiB, 2 ranks" in table
    assert '| hdf5-gzip-planes, 32^3 | `P("a", "b")` |' in table
    for cell in json.loads((tmp_path / "verify.json").read_text())["cells"]:
        assert [took["proven"]["how"] for took in cell["levels"].values()] == ["index", "checksum", "file", "full"]
        assert cell["levels"]["full"]["proven"]["n_elements"] == 32**3
    memory = json.loads((tmp_path / "memory.json").read_text())
    assert [cell["readers"] for cell in memory["cells"]] == ["auto", "root", "parallel", "direct"]
    for cell in memory["cells"]:
        assert [rank["pieces_nbytes"] for rank in cell["ranks"]] == [64**3 * 4 // 2] * 2
        assert all(rank["peak_nbytes"] >= 0 for rank in cell["ranks"])
    assert all(rank["peak_nbytes"] > 0 for rank in memory["cells"][0]["ranks"]), "the first loads of this size in their job"
    many = json.loads((tmp_path / "many.json").read_text())["cells"]
    assert [(cell["layout"], cell["n_arrays"]) for cell in many] == [
        ("series-of-40", 2), ("many-tiny", 5), ("real-field", 1), ("one-kib", 1)
    ]  # fmt: skip
    for cell in many:
        assert all(took["verified"] and len(took["seconds"]) == 1 for took in cell["ways"].values()), cell
    assert "| many-tiny: 5, 0.0195 MiB |" in table
    assert len(json.loads((tmp_path / "small.json").read_text())["cells"]) == 2


def test_a_way_that_loads_wrong_values_is_found_and_left_out(tmp_path: Path) -> None:
    files = make(tmp_path, 16, ["hdf5-gzip-cubes"])
    cells = [Cell("hdf5-gzip-cubes", "a,b", 2)]
    program = [str(HERE / "scripts" / "wrong_way.py")]
    record = measure(cells, files, [OURS, "slice"], repeats=1, out=tmp_path / "run.json", program=program)
    took = record["cells"][0]["ways"]
    assert "values of shard" in took["slice"]["error"]
    assert not took["slice"]["seconds"]
    assert len(took[OURS]["seconds"]) == 1
    table = write_report(tmp_path, read_records(tmp_path)).read_text()
    assert "## Failed" in table
    assert "values of shard" in table.partition("## Failed")[2]


SAVES = (OURS, "shardload-unread", "gather", "zarr-python", "tensorstore", FLOOR)


def test_every_way_of_saving_is_verified_and_reported(tmp_path: Path) -> None:
    """Pieces that are whole chunks, and planes and shards cut between ranks: what is written is read by h5py and zarr."""
    ways = tuple(way for way in SAVES if not IS_QUICK or way in (OURS, "gather", FLOOR))
    options = ["--ways", ",".join(ways), "--repeats", "1", "--data", str(tmp_path / "data"), "--ranks", "2"]
    options += ["--folder", str(tmp_path / "saves"), "--out", str(tmp_path / "save.json")]
    specs = SAVE_SPECS[: 1 if IS_QUICK else None]
    command("save", "--size", "16", "--specs", ";".join(specs), *options)
    record = json.loads((tmp_path / "save.json").read_text())
    assert [(cell["layout"], cell["spec"]) for cell in record["cells"]] == [(n, s) for n in SAVE_LAYOUTS for s in specs]
    for cell in record["cells"]:
        expected = [way for way in ways if way not in ("zarr-python", "tensorstore") or cell["layout"].startswith("zarr")]
        assert sorted(cell["ways"]) == sorted(expected)
        for way, took in cell["ways"].items():
            assert "error" not in took, (cell["layout"], way, took)
            assert took.get("verified", False) == (way != FLOOR) and len(took["seconds"]) == 1
            assert took["stored_nbytes"] > 0 and len(took["peaks_nbytes"]) == (0 if way == FLOOR else 2)
    assert os.listdir(tmp_path / "saves") == [] and str(tmp_path) not in (tmp_path / "save.json").read_text()
    table = command("report", "--results", str(tmp_path))
    where = "into memory" if str(tmp_path).startswith("/dev/shm") else "to a disk"
    assert f"## Saving 16 x 16 x 16 float32 {where}, 1 repeats" in table
    assert '| zarr-sharded | `P(None, "a", "b")` | 2 |' in table
