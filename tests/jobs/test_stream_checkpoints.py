"""Do other libraries give a stream's batches, and keep its state, as it does itself?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.launch import ROOT, Job, run_job

SCRIPT = Path(__file__).parent / "scripts" / "stream_checkpoints.py"


def run(folder: Path, case: str) -> Job:
    job = run_job([SCRIPT, folder, case], 2, timeout=120, env={"PYTHONPATH": str(ROOT)}).check()
    assert [said[-1] for said in job.said()] == [{"done": case}] * 2
    return job


def test_grain(tmp_path: Path) -> None:
    """Wrong if Grain gave other batches, lost one where a state is taken, or started processes that read."""
    pytest.importorskip("grain")
    for said in run(tmp_path, "grain").said():
        assert "leave mp_prefetch out" in said[0]["refused"]


def test_orbax(tmp_path: Path) -> None:
    """Wrong if the state were not JSON, differed from rank to rank, or were that of a later batch."""
    pytest.importorskip("orbax.checkpoint")
    run(tmp_path, "orbax")
