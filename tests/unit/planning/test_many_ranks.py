"""Is a plan over a quarter of a million ranks as quick as one over a few, and does it say how much each rank sends and gets?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.jobs.loading.plan import Plan

SIDE = 512
PER_NODE = 4


@pytest.fixture
def planes(tmp_path: Path) -> str:
    """A file of 512 planes, none of them stored."""
    with h5py.File(tmp_path / "planes.h5", "w") as file:
        file.create_dataset("x", (SIDE,) * 3, "f4", chunks=(1, SIDE, SIDE), compression="gzip")
    return str(tmp_path / "planes.h5")


def planned(path: str, n: int, **options: Any) -> Plan:
    """The plan of a load as pencils on n x n ranks, each with a device."""
    mesh = AbstractMesh((n, n), ("a", "b"))
    return shardload.plan(path, mesh, P(None, "a", "b"), readers="parallel", ranks_per_node=PER_NODE, **options)


def test_planning_takes_as_many_steps_for_262_144_ranks_as_for_64(planes: str) -> None:
    """Wrong if a plan walked over ranks: the functions that it calls are counted."""

    def calls_of(n: int) -> int:
        calls = 0

        def count(_frame: Any, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            planned(planes, n)
        finally:
            sys.setprofile(None)
        return calls

    planned(planes, 8)  # imports, and what is kept from then on
    assert calls_of(512) < 2 * calls_of(8)


def test_a_plan_says_how_many_messages_there_are(planes: str) -> None:
    """Every reader has a plane, which every rank needs a part of. Wrong if what makes such a load slow were not said."""
    plan = planned(planes, 512)
    cost, text = plan.costs["parallel"], " ".join(str(plan).split())
    assert (cost.n_readers, cost.messages, cost.moved_nbytes) == (256, 512**3, 4 * 512**3)
    assert "262144 on 65,536 nodes, 256 of them read" in text and "<= 134,217,728" in text
