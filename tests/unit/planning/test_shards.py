"""What can the table of ranks and shards tell?"""

from __future__ import annotations

import numpy as np
from hypothesis import given

from shardload.planning.shards import plan_shards
from tests.tiers import examples
from tests.unit.brute_force import Case, cases


@examples(150)
@given(cases())
def test_the_table_against_each_rank(case: Case) -> None:
    shards = plan_shards(case.shape_global, case.axes, case.ranks)
    held = [shards.shards_of(rank) for rank in range(case.n_ranks)]
    holders = [shards.holders(shard) for shard in range(shards.n_shards)]
    assert [tuple(s for s, ranks in enumerate(holders) if rank in ranks) for rank in range(case.n_ranks)] == held
    assert (shards.n_holding, shards.most_held) == (sum(map(bool, held)), max(map(len, held)))
    assert shards.most_holders == max(map(len, holders))
    assert shards.n_holders == (len(holders[0]) if len(set(map(len, holders))) == 1 else None)
    assert shards.shards_of(-1) == shards.shards_of(case.n_ranks) == ()
    for axis, span in enumerate(shards.spans):
        places = [[int(np.unravel_index(s, shards.cuts)[axis]) for s in mine] for mine in held if mine]
        assert span == max(max(mine) - min(mine) + 1 for mine in places)


@given(cases())
def test_tables_are_told_apart(case: Case) -> None:
    shards, again, other = (plan_shards(case.shape_global, case.axes, case.ranks + k) for k in (0, 0, 1))
    assert shards.describe_ranks() == again.describe_ranks() != other.describe_ranks()
