"""A rank that may open no more files fails together with the others, whichever of its files it is."""

from __future__ import annotations

from pathlib import Path

from tests.jobs.launch import ROOT, run_job
from tests.tiers import IS_QUICK

SCRIPT = Path(__file__).parent / "scripts" / "descriptors.py"


def test_a_rank_without_descriptors(tmp_path: Path) -> None:
    """Wrong if it fails after the ranks agreed to start: the others would wait for its parts for ever."""
    job = run_job(["-W", "error", SCRIPT, tmp_path], 4, timeout=90, env={"PYTHONPATH": str(ROOT)}).check()
    ranks = job.said()
    assert all(said == ranks[0] for said in ranks), "the ranks raise different errors"
    kinds: dict[tuple[str, str], list[str | None]] = {}
    for said in ranks[0]:
        kinds.setdefault((said["path"], said["readers"]), []).append(said["type"])
        assert said["type"] is None or ("on rank 2 of 4" in said["text"] and "ulimit -n" in said["text"]), said
    assert len(kinds) == (2 if IS_QUICK else 4)
    for found in kinds.values():
        assert None not in found[:2] and None in found[2:], "the limit was not what was tried"
