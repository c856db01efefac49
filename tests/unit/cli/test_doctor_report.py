"""Which facts does the doctor gather, what does it print, and do facts survive a message unchanged?"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from shardload.cli.doctor import as_json, as_text, facts, facts_of_jax, is_ok
from shardload.cli.findings import ERROR, WARNING, diagnose
from tests.unit.cli.test_doctor import job, singleton
from tests.unit.copies import run_copy
from tests.unit.files import raising


def table(text: str) -> list[list[str]]:
    """Cells of the rows of the table that a report opens with."""
    lines = text.splitlines()
    return [re.split("  +", line) for line in lines[1 : lines.index("")]]


# --- facts


def test_what_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {6, 4, 5}, raising=False)
    environ = {"PMI_RANK": "2", "PMI_SIZE": "3", "SLURM_JOB_ID": "9", "HOME": "/root", "JAX_PLATFORMS": ""}
    row = facts(environ) | facts_of_jax()
    assert json.loads(json.dumps(row)) == row
    assert (row["rank"], row["launcher"], row["n_tasks"]) == (2, "mpiexec", 3)
    variables = {name: value for name, value in row.items() if name.isupper()}
    assert variables == {"SLURM_JOB_ID": "9", "JAX_PLATFORMS": ""}, "set to nothing is not the same as not set"
    assert row["cores"] == [4, 5, 6]
    assert (row["jax_process"], row["jax_processes"], row["platform"], row["gpus"]) == (0, 1, "cpu", [])
    assert len(row["devices"]) == row["n_devices"] > 0
    assert f"python {'.'.join(map(str, sys.version_info[:3]))}" in row["versions"]
    assert {"shardload", "jax", "numpy", "h5py"} <= {version.split()[0] for version in row["versions"]}
    assert row["host"] == os.uname().nodename


def test_what_a_system_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a system without affinity, or without a package, ended the examination."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr("importlib.metadata.version", raising(metadata.PackageNotFoundError("x")))
    row = facts({})
    assert (row["cores"], row["launcher"], row["jax_process"]) == ([], "", None)
    assert {version.split()[0] for version in row["versions"]} >= {"python", "shardload"}


# --- the report

CHECKS = [{"name": "scatter", "ok": True, "text": "1.0 MiB"}]


def finding(name: str, level: str, text: str, fix: str, ranks: list[int]) -> dict[str, Any]:
    return {"name": name, "level": level, "ranks": ranks, "text": text, "fix": fix}


def test_a_row_for_each_rank_and_once_what_all_have() -> None:
    text = as_text(job(6, 3), [], CHECKS, 200)
    rows = table(text)
    assert [row[0] for row in rows] == ["n0", "n0", "n0", "n1", "n1", "n1"]
    for rank, row in enumerate(rows):
        first = 3 * (rank // 3)
        assert row[1:4] == [str(rank)] * 3 and f"{first}-{first + 2}" in row and f"GPU-{rank}" in row
    assert text.count("mpi_library MPICH 5.0.2") == 1, "the same on all ranks"
    assert text.splitlines()[-1] == "OK: 6 ranks on 2 nodes, 6 devices"
    assert all(line == line.rstrip() for line in text.splitlines())


def test_what_differs_is_a_column() -> None:
    rows = job()
    rows[2] |= {"mpi_threads": "SINGLE", "CUDA_VISIBLE_DEVICES": "1,2"}
    text = as_text(rows, [], [], 200)
    assert "CUDA_VISIBLE_DEVICES" in text.splitlines()[0] and "mpi_threads" in text.splitlines()[0]
    assert [" SINGLE " in f"{line} " and "1,2" in line for line in text.splitlines()[1:5]] == [False, False, True, False]


def test_findings_with_where_and_what_to_type() -> None:
    findings = [
        finding("a", ERROR, "word " * 60, "srun --gpus-per-task=1", [1, 2]),
        finding("b", WARNING, "all of them", "nothing", [0, 1, 2, 3]),
    ]
    failed = {"name": "all-reduce", "ok": False, "text": "on rank 2 of 4: no"}
    text = as_text(job(), findings, [*CHECKS, failed])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "(ranks 1, 2)" in text and "all of them\n" in text, "where, unless it is everywhere"
    assert "  -> srun --gpus-per-task=1" in lines
    assert "ok: scatter: 1.0 MiB" in lines and "FAILED: all-reduce: on rank 2 of 4: no" in lines
    assert lines[-1] == "FAILED: 4 ranks on 2 nodes, 4 devices"


def test_the_page_shows_what_is_printed() -> None:
    """Wrong if a finding, the table or the last line were printed otherwise than docs/first-run.md shows them."""
    page = (Path(__file__).parents[3] / "docs" / "first-run.md").read_text()
    (one,) = singleton(host="n1", launcher="srun", n_tasks=4)
    (two,) = singleton(host="vm", launcher="mpiexec", n_tasks=2, mpi_library="Open MPI v5.0.11")
    rows = [row | {"host": f"n{1 + row['node'][0] // 2}", "platform": "cpu", "gpus": [], "n_gpus": 2} for row in job(3, 2)]
    for case in ([one], [two], rows):
        head, _, found, last = as_text(case, diagnose(case), [], 120).split("\n\n")
        assert found in page and last in page
        assert case is rows or head in page


@pytest.mark.parametrize(
    ("levels", "checks", "works"),
    [([], [], True), ([WARNING], [True], True), ([ERROR], [], False), ([], [True, False], False)],
)
def test_what_ends_with_0_and_what_with_1(levels: list[str], checks: list[bool], works: bool) -> None:
    findings = [finding("a", level, "t", "f", [0]) for level in levels]
    tried = [{"name": "c", "ok": ok, "text": ""} for ok in checks]
    assert is_ok(findings, tried) is works
    assert json.loads(as_json(job(), findings, tried))["ok"] is works
    assert as_text(job(), findings, tried).splitlines()[-1].startswith("OK" if works else "FAILED")


def test_json_has_everything() -> None:
    findings = [finding("a", WARNING, "t", "f", [0, 3])]
    found = json.loads(as_json(job(), findings, CHECKS))
    assert found == {"ok": True, "ranks": job(), "findings": findings, "checks": CHECKS}


# --- last words


def test_a_process_that_ends_inside_leaves_a_word(tmp_path: Path) -> None:
    """Wrong if a library that ends the process ended the explanation with it, or if one that does not were complained of."""
    read, write = os.pipe()
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nfrom shardload.cli.doctor import _last_words\n"
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


def test_the_first_to_come_speaks_for_its_launcher(tmp_path: Path) -> None:
    """Wrong if nobody spoke when task 0 is ended before it comes, or all tasks of a machine at once."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom shardload.cli.doctor import _last_words\n"
        "def ended(text):\n"
        "    if os.fork() == 0:\n        with _last_words(text): os._exit(3)\n"
        "    os.wait()\n"
        "come, comes = os.pipe()\ngo, goes = os.pipe()\n"
        "if os.fork() == 0:\n    with _last_words('the first, which does not end'): os.write(comes, b'+'), os.read(go, 1)\n"
        "    os._exit(0)\n"
        "os.read(come, 1)\nended('the second')\nos.write(goes, b'+')\nos.wait()\nended('the next')\n"
    )
    read, write = os.pipe()
    with os.fdopen(read) as errors:
        run_copy([script], stderr=write, check=True)
        os.close(write)
        assert errors.read() == "the next\n"
