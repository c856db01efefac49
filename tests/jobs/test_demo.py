"""The demo, as a newcomer runs it, on a small field."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.jobs.launch import run_job

DEMO = ["-W", "error", "-m", "shardload", "demo", "--size", "64"]


def rows(out: str) -> list[list[str]]:
    """Cells of all table rows, which have two spaces or more between them where there are columns enough."""
    return [re.split("  +", line.strip()) for line in out.splitlines() if "  " in line.strip()]


@pytest.mark.parametrize("n", [1, 4])
def test_demo(n: int, tmp_path: Path) -> None:
    job = run_job(DEMO, n, timeout=300, env={"TMPDIR": str(tmp_path), "COLUMNS": "200"}).check()
    assert "all 7 loads verified element by element" in job.stdout
    assert "Gloo" not in job.stdout

    table = rows(job.stdout)
    names = [row[0] for row in table]
    assert names.count("hybrid_height.nc:/air_potential_temperature") == 2
    assert names.count("E1_north_america.nc:/air_temperature") == 2
    for file in ("field.h5", "field.zarr"):
        assert names.count(file) == 3  # shardload and the two usual ways
        load = next(row for row in table if row[0] == f"{file}:/density")
        assert (load[1], load[-1]) == ("64 x 64 x 64", "0")
        assert load[3] == {1: "64 x 64 x 64", 4: "64 x 32 x 32"}[n]
        assert float(load[-3]) > 0
    ffts = [row for row in table if "FFT" in row[0]]
    assert len(ffts) == 2
    assert all(0 < float(row[-1]) < 1e-5 for row in ffts)
    if n == 4:
        assert any("15+1 x 100 x 100" in row for row in table)
        slices = [row for row in table if row[1] == "every process slices"]
        assert [row[-1] for row in slices] == ["4.00", "4.00"]  # each decodes all planes
    assert not [name for name in os.listdir(tmp_path) if name.startswith("shardload-demo")]


def test_demo_of_a_size_that_the_mesh_does_not_divide() -> None:
    job = run_job([*DEMO[:-1], "16"], 3, timeout=300).check()
    assert "18 x 18 x 18" in job.stdout
    assert max(map(len, job.stdout.splitlines())) <= 80, "where there is no terminal"
    assert "E1_north_america.nc:/air_temperature" in job.stdout and "rank 0 reads, comm.scatter" in job.stdout


def test_demo_ends_all_ranks_and_leaves_nothing_when_one_fails(tmp_path: Path) -> None:
    program = """
import sys
from shardload import demo

def fail(*args):
    raise RuntimeError("the disk is full")

demo._write_field = fail
sys.exit(demo.run(16))
"""
    job = run_job(["-W", "error", "-c", program], 2, timeout=120, env={"TMPDIR": str(tmp_path)})
    assert job.returncode != 0
    assert "the disk is full" in job.stderr + job.stdout
    assert not [name for name in os.listdir(tmp_path) if name.startswith("shardload-demo")]


def test_demo_without_the_climate_fields_says_what_to_install() -> None:
    program = "import sys; sys.modules['iris_sample_data'] = None; from shardload import demo; sys.exit(demo.run(16))"
    job = run_job(["-W", "error", "-c", program], 2, timeout=120)
    assert job.returncode == 1
    assert (job.stderr + job.stdout).count("pip install 'shardload[demo]'") == 1
