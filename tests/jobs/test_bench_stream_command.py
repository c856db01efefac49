"""``shardload bench-stream``: what it prints of a user's own file, on one rank and on two, and what it says of wrong flags."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.jobs.launch import Job, run_job
from tests.servers import ObjectServer
from tests.tiers import quick_ones

N_STEPS, SHAPE = 50, (6, 8)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.h5"
    with h5py.File(path, "w") as opened:
        values = np.arange(N_STEPS * 48, dtype="f8").reshape(N_STEPS, *SHAPE)
        opened.create_dataset("t2m", data=values, chunks=(5, *SHAPE), compression="gzip")
        opened["t2m"].dims[0].label = "time"
    return str(path)


def bench(n: int, *arguments: str) -> Job:
    return run_job(["-m", "shardload", "bench-stream", *arguments], n, timeout=240)


def test_it_says_what_batches_take_and_what_to_change(file: str) -> None:
    """Wrong if both ranks printed, if lines were long, or if the samples were not those of the window; and if small chunks were
    to be made smaller, which costs more.
    """
    how = ["--mesh", "data=2,lat=2", "--spec", "data,-,lat", "--along", "time", "--batch", "4", "--window", "-1,0"]
    job = bench(2, f"{file}:/t2m", *how, "--shuffle", "1", "--steps", "20").check()
    assert max(len(line) for line in job.stdout.splitlines() if file not in line) <= 80
    printed = " ".join(job.stdout.split())
    assert printed.count("batch: float64 [4, 2, 6, 8], P('data', None, 'lat'), window -1, 0") == 1
    assert f"{N_STEPS - 1} samples, 12 batches of 4 an epoch" in printed
    assert "20 batches: the first after" in printed, "more than an epoch"
    assert "CPU of each of 2 ranks" in printed
    assert "chunks:" not in printed
    assert "batch: 3.0 KiB is little for what each batch costs; try --batch 16" in printed
    with h5py.File(file, "r+") as opened:
        values = np.zeros((N_STEPS, 6, 4800))  # in chunks of more than a MiB
        opened.create_dataset("wide", data=values, chunks=(5, 6, 4800), compression="gzip").dims[0].label = "time"
    wide = " ".join(bench(2, f"{file}:/wide", *how, "--steps", "4").check().stdout.split())
    assert "chunks: 2 ranks read 2 x 5 steps at a time, as a step has 1 chunk; cut the other axes into 2 parts" in wide


def test_a_pattern_is_one_array(tmp_path: Path) -> None:
    """Wrong if it was taken for a name, or if samples did not go on from file to file."""
    for k in range(3):
        with h5py.File(tmp_path / f"run.{k}.h5", "w") as file:
            file.create_dataset("t2m", data=np.zeros((5, 6, 8), "f4"), chunks=(5, 6, 8))
            file["mask"] = np.zeros((6, 8), "f4")
    how = ["--mesh", "lat=2", "--spec", "-,-,lat", "--along", "0", "--batch", "4", "--window", "-1,0", "--steps", "3"]
    job = bench(2, f"{tmp_path}/run.*.h5:/t2m", *how).check()
    assert "14 samples, 3 batches of 4 an epoch" in " ".join(job.stdout.split())
    job = bench(1, f"{tmp_path}/run.?.h5", "--dataset", "t2m", *how).check()


def test_json_is_one_document_with_the_figures(file: str) -> None:
    job = bench(
        1, file, "--dataset", "t2m", "--mesh", "lat=2", "--spec", "-,lat", "--steps", "3", "--step-ms", "1", "--json"
    ).check()
    found = json.loads(job.stdout)
    assert (found["ok"], found["n_batches"], found["step"], found["n_ranks"]) == (True, 3, 0.001, 1)
    assert found["decodes_per_chunk"] == 1.0
    assert found["chunks_decoded"] >= 5, "three batches of 8 steps, in chunks of 5"
    assert 0 <= found["stalled"] <= 1
    assert found["first_batch"] > 0 < found["cpu_per_batch"]
    assert found["advice"]


def test_a_file_in_a_store(file: str) -> None:
    """Wrong if how a store is reached could not be said here, as it can to other commands."""
    with ObjectServer({"bucket/run.h5": Path(file).read_bytes()}) as server:
        flags = [word for name, value in server.storage.items() for word in ("--storage", f"{name}={value}")]
        job = bench(1, "s3://bucket/run.h5:/t2m", "--mesh", "lat=1", "--spec", "-,lat", "--steps", "3", *flags).check()
    assert "3 batches: the first after" in " ".join(job.stdout.split())


WRONG: list[tuple[list[str], int, str]] = [
    (["--window", "one"], 1, "window is 'one'; expected steps from the anchor"),
    (["--steps", "1"], 2, "'--steps'"),
    (["--batch", "0"], 1, "batch is 0"),
    (["--batch", "64"], 1, "which make no batch of 64"),
    (["--along", "day"], 1, "day"),
    (["--pool", "some"], 1, "pool"),
    (["--spec", "-,x"], 1, "names mesh axis 'x', but the axes of the mesh are lat=1"),
]


@pytest.mark.parametrize(("arguments", "code", "expected"), quick_ones(WRONG, WRONG[3], WRONG[-1]))
def test_a_wrong_flag_is_an_error_that_says_what_to_type(file: str, arguments: list[str], code: int, expected: str) -> None:
    flags = {"--mesh": "lat=1", "--spec": "-,lat"} | dict(zip(arguments[::2], arguments[1::2], strict=True))
    job = bench(1, file, *(word for pair in flags.items() for word in pair))
    assert job.returncode == code, job.stderr
    said = " ".join(job.stderr.replace("│", " ").split())
    assert expected in said
    assert "Traceback" not in said
