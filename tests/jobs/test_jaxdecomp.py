"""A client that is not ours: jaxDecomp exchanges the halos that a load gives. (Its FFT: `test_clients.py`.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.launch import ROOT, run_job

SCRIPT = Path(__file__).parent / "scripts" / "jaxdecomp_client.py"


@pytest.mark.thorough
def test_halos_are_those_of_an_exchange(tmp_path: Path) -> None:
    """Wrong if `halo` gave other rows than the exchange between devices: of another neighbour, or other corners. Edges: a ring
    along one axis and an end along the other; then both of one kind.
    """
    job = run_job([SCRIPT, tmp_path], 4, timeout=240, env={"PYTHONPATH": str(ROOT)}).check()
    assert [found["halos"] for found, *_ in job.said()] == [2 * 3] * 4
