"""Does the simulation of benchmarks.planning count what the plans of the ranks really say?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks import planning
from shardload.planning.schedule import Schedule


def carried_out(plan: Schedule) -> dict[tuple[int, int], list[int]]:
    """Bytes of each message, by its two ends, as the readers send them."""
    found: dict[tuple[int, int], list[int]] = {}
    for rank in range(plan.n_ranks):
        for read in plan.owned_blocks(rank):
            for part in read.parts:
                found.setdefault((rank, part.rank), []).append(part.region.size * plan.itemsize)
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("readers", ["parallel", 3])
@pytest.mark.parametrize("spec", planning.SPECS)
@pytest.mark.parametrize("chunks", [(8, 8, 8), (1, 32, 32)])
def test_simulated_is_carried_out(chunks: Any, spec: str, readers: Any) -> None:
    plan = planning.make_plan(4, 32, chunks, spec, readers)
    sent, got = ({name: Counter[int]() for name in ("nbytes", "messages", "ranks")} for _ in range(2))
    everything, across = 0, Counter[int]()
    for ends, sizes in carried_out(plan).items():
        everything += sum(sizes)
        for per_node in (4, 8):
            across[per_node] += sum(sizes) * (ends[0] // per_node != ends[1] // per_node)
        if ends[0] != ends[1]:
            for rank, counts in zip(ends, (sent, got), strict=True):
                counts["nbytes"][rank] += sum(sizes)
                counts["messages"][rank] += len(sizes)
                counts["ranks"][rank] += 1
    row = planning.simulate(plan)
    readers_ = [r for r in range(plan.n_ranks) if plan.is_owner(r)]
    for end, counts, ranks in (("sent", sent, readers_), ("got", got, list(range(plan.n_ranks)))):
        for name, of_rank in counts.items():
            values = sorted(of_rank[r] for r in ranks)
            assert (row[end][name]["least"], row[end][name]["most"]) == (values[0], values[-1]), (end, name)
    for per_node in (4, 8):
        assert row[f"across_nodes_of_{per_node}"] == pytest.approx(across[per_node] / everything)


def test_a_sample_is_part_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planning.make_plan(4, 32, (1, 32, 32), "P(a,b)", "parallel")
    whole = planning.simulate(plan)
    monkeypatch.setattr(planning, "MAX_PARTS", 0)
    sample = planning.simulate(plan)
    assert (whole["looked_at"], sample["looked_at"]) == ("all", "4 readers, 16 ranks")
    assert sample["got"] == whole["got"] and sample["across_nodes_of_4"] == whole["across_nodes_of_4"]
    for name, spread in sample["sent"].items():
        assert whole["sent"][name]["least"] <= spread["least"] <= spread["most"] <= whole["sent"][name]["most"]
