"""Does a stream go on bit by bit in a job of other size, from a state in a file?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.jobs.launch import ROOT, run_job

SCRIPT = Path(__file__).parent / "scripts" / "stream_resume.py"


def run(n: int, folder: Path, n_batches: int, batch: int) -> list[dict[str, Any]]:
    """What each rank of a job of `n` said; they must have said the same."""
    job = run_job([SCRIPT, folder, str(n_batches), str(batch)], n, timeout=90, env={"PYTHONPATH": str(ROOT)}).check()
    said = job.said()
    assert all(of == said[0] for of in said)
    return said[0]


def test_four_ranks_then_two_then_one(tmp_path: Path) -> None:
    """Wrong if the order or the state followed from ranks or mesh, or a sample were lost or given twice between two jobs."""
    *first, end = run(4, tmp_path, 7, 8)
    orders = end["orders"]
    *second, end = run(2, tmp_path, 8, 8)
    assert end["orders"] == orders
    *third, _ = run(1, tmp_path, 99, 4)
    given = [anchor for line in (*first, *second, *third) for anchor in line["index"]]
    # 80 samples: ten batches of 8 an epoch; the third job has batches of 4 from the middle of the second one.
    assert given == [anchor for order in orders for anchor in order]
    assert len(orders[0]) == 80
    assert len({tuple(order) for order in orders}) == 3
