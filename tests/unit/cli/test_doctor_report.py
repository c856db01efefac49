"""Which facts does the doctor gather, what does it print, and do facts survive a message unchanged?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from shardload.cli.doctor import run as doctor
from shardload.cli.doctor.facts import Facts, before_jax, from_json, to_json, with_jax
from shardload.cli.doctor.rules import ERROR, NOTE, Finding, diagnose
from shardload.cli.doctor.run import Check, as_json, as_text, is_ok
from tests.unit.cli.test_doctor import alone, job, singleton
from tests.unit.copies import run_copy


def table(text: str) -> list[list[str]]:
    """Cells of the rows of the table that a report opens with."""
    lines = text.splitlines()
    return [re.split("  +", line) for line in lines[1 : lines.index("")]]


# --- facts


@pytest.mark.parametrize("row", [Facts(), *job(2, 2), *alone(), *singleton(mpi_problem='é "quoted"\nlines')])
def test_facts_come_through_a_message_as_they_were(row: Facts) -> None:
    assert from_json(to_json(row)) == row
    assert "\n" not in to_json(row)


def test_what_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {6, 4, 5}, raising=False)
    environ = {"PMI_RANK": "2", "PMI_SIZE": "3", "SLURM_JOB_ID": "9", "HOME": "/root", "JAX_PLATFORMS": ""}
    row = with_jax(before_jax(environ))
    assert (row.task, row.launcher, row.n_launched) == (2, "mpiexec", 3)
    assert row.environ == {"SLURM_JOB_ID": "9", "JAX_PLATFORMS": ""}, "set to nothing is not the same as not set"
    assert row.cores == (4, 5, 6)
    assert (row.jax_process, row.jax_processes, row.platform, row.gpus) == (0, 1, "cpu", ())
    assert len(row.devices) == row.n_devices > 0
    assert row.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"shardload", "jax", "numpy", "h5py"} <= set(row.versions)
    assert row.host == os.uname().nodename


def test_whatever_fails_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a system without  affinity or a working JAX ended the examination."""

    def fail(*_: object) -> None:
        raise OSError("no such thing")

    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr("jax.local_devices", fail)
    monkeypatch.setattr("importlib.metadata.version", fail)
    row = with_jax(before_jax({}))
    assert (row.cores, row.jax_problem) == ((), "OSError: no such thing")
    assert row.jax_process is None and row.launcher == ""
    assert set(row.versions) == {"python", "shardload"}


# --- the report

CHECKS = [Check("scatter", True, "1.0 MiB"), Check("all-reduce", None, "not tried")]


def test_a_row_for_each_rank_and_once_what_all_have() -> None:
    text = as_text(job(6, 3), [], CHECKS, 200)
    rows = table(text)
    assert [row[0] for row in rows] == ["n0", "n0", "n0", "n1", "n1", "n1"]
    for rank, row in enumerate(rows):
        first = 3 * (rank // 3)
        assert f"{rank}/6" in row and f"gpu {rank} (1 of 6)" in row and f"{first}-{first + 2}" in row
        assert f"77.0 task {rank}/6 node ? local ?" in row
    assert text.count("MPICH 5.0.2") == 1, "the same on all ranks"
    assert text.count("77.0") == 6
    assert "OK: 6 ranks on 2 nodes, 6 devices" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_what_differs_is_a_column() -> None:
    rows = job()
    rows[2] = replace(rows[2], cores=(3,), environ=rows[2].environ | {"CUDA_VISIBLE_DEVICES": "1,2"})
    text = as_text(rows, [], [], 200)
    assert "CUDA_VISIBLE_DEVICES" in text.splitlines()[0] and "cores" in text.splitlines()[0]
    assert [" 3 " in f"{line} " and "1,2" in line for line in text.splitlines()[1:5]] == [False, False, True, False]


def test_findings_with_where_and_what_to_type() -> None:
    findings = [
        Finding("a", ERROR, "word " * 60, "srun --gpus-per-task=1", (1, 2)),
        Finding("b", NOTE, "all of them", "nothing", (0, 1, 2, 3)),
        Finding("c", NOTE, "ranks 2-3 on n1 do", "nothing", (2, 3)),
    ]
    text = as_text(job(), findings, [Check("scatter", False, "on rank 2 of 4: no"), *CHECKS])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "(ranks 1-2)" in text and "all of them\n" in text and "on n1 do\n" in text, "where, once, unless it is everywhere"
    assert "   ->    srun --gpus-per-task=1" in lines
    assert "FAILED  scatter" in text and "ok      scatter" in text and "-       all-reduce" in text
    assert lines[-1] == "FAILED: 4 ranks on 2 nodes, 4 devices; 1 error, 2 notes, 1 failed check"


def test_the_page_shows_what_is_printed() -> None:
    """Wrong if a finding, the table or the last line were printed otherwise than docs/first-run.md shows them."""
    page = (Path(__file__).parents[3] / "docs" / "first-run.md").read_text()
    one = Facts(host="n1", launcher="srun", n_launched=4, mpi_library="MPICH 5.0.2")
    two = replace(one, host="vm", launcher="mpiexec", n_launched=2, mpi_library="Open MPI v5.0.11")
    rows = [replace(row, host=f"n{1 + row.node[0] // 2}", platform="cpu", gpus=(), n_gpus=2) for row in job(3, 2)]
    rows = [replace(row, devices=(2048 * row.rank,), environ={}) for row in rows]
    for case in ([one], [two], rows):
        findings = [finding for finding in diagnose(case) if finding.level != NOTE]
        *_, found, last = as_text(case, findings, [], 120).split("\n\n")
        assert found in page and last in page
        assert case is rows or as_text(case, findings, [], 120).split("\n\n")[0] in page


@pytest.mark.parametrize(
    ("levels", "checks", "works"),
    [([], [], True), ([NOTE], [True, None], True), ([ERROR], [True], False), ([], [False], False), (["warning"], [], True)],
)
def test_what_ends_with_0_and_what_with_1(levels: list[str], checks: list[bool | None], works: bool) -> None:
    findings = [Finding("a", level, "t", "f", (0,)) for level in levels]
    tried = [Check("c", ok, "") for ok in checks]
    assert is_ok(findings, tried) is works
    assert json.loads(as_json(job(), findings, tried))["ok"] is works
    assert as_text(job(), findings, tried).splitlines()[-1].startswith("OK" if works else "FAILED")


def test_json_has_everything() -> None:
    found = json.loads(as_json(job(), [Finding("a", NOTE, "t", "f", (0, 3))], CHECKS))
    assert [row["rank"] for row in found["ranks"]] == [0, 1, 2, 3]
    assert set(found["ranks"][0]) == {field.name for field in fields(Facts)}
    assert found["findings"] == [{"name": "a", "level": "note", "text": "t", "fix": "f", "ranks": [0, 3]}]
    assert [check["ok"] for check in found["checks"]] == [True, None]


# --- last words


def test_a_process_that_ends_inside_leaves_a_word(tmp_path: Path) -> None:
    """Wrong if a library that ends the process ended the explanation with it, or if one that does not were complained of."""
    read, write = os.pipe()
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom shardload.cli.doctor.run import _last_words\n"
        "ends = os.fork() == 0\n"
        "with _last_words('what to type' if ends else 'of one that does not end'):\n    os._exit(3) if ends else None\n"
        "sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) - 3)\n"
    )
    with os.fdopen(read) as errors:
        done = run_copy([script], stderr=write, check=False)
        os.close(write)
        found = errors.read()  # until the process and whoever speaks for it have ended
    assert done.returncode == 0
    assert found == "what to type\n"


def test_the_first_to_come_speaks_for_its_launcher() -> None:
    """Wrong if nobody spoke when task 0 is ended before it comes, or all tasks of a machine at once."""
    second = ["-c", "from shardload.cli.doctor.run import _first_here\nwith _first_here() as first: print(first)"]
    with doctor._first_here() as one, doctor._first_here() as other:
        assert (one, other) == (True, False)
        child = run_copy(second, stdout=subprocess.PIPE, check=True)
        assert child.stdout == "True\n"  # of another parent
    with doctor._first_here() as again:
        assert again
