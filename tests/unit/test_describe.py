"""Does the table say what the plan says?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardload.cost import Cost
from shardload.describe import describe_plan
from shardload.sources.base import ArrayInfo

INFO = ArrayInfo("run.h5", "/rho", "HDF5", (512, 512, 512), "float64", (1, 512, 512), "gzip+shuffle")
ROOT = Cost("root", 1, 512, 1 << 30, 1.0, 1536, 3 << 28, True, 1 << 30, 300 << 20, 12.0)
PARALLEL = Cost("parallel", 4, 512, 1 << 30, 1.0, 1234567, 3 << 28, False, 1 << 28, 300 << 20, 3.21, 0.333)
DIRECT = Cost("direct", 4, 2048, 4 << 30, 4.0, 0, 0, True, 1 << 30, 256 << 20, 0.000123)


@dataclass
class Fake:
    info: ArrayInfo = INFO
    shape: tuple[int, ...] = (512, 512, 512)
    shape_global: tuple[int, ...] = (512, 512, 512)
    dtype: Any = field(default_factory=lambda: np.dtype("float64"))
    sharding: Any = field(
        default_factory=lambda: SimpleNamespace(mesh=SimpleNamespace(shape={"x": 2, "y": 2}), spec=P(None, "x", "y"))
    )
    decomposition: str = "pencil"
    shard_shape: tuple[int, ...] = (512, 256, 256)
    n_replicas: int = 1
    n_ranks: int = 4
    readers: str = "parallel"
    n_readers: int = 4
    why: str = "because"
    costs: Mapping[str, Cost] = field(default_factory=lambda: {"root": ROOT, "parallel": PARALLEL, "direct": DIRECT})
    staging_nbytes: int = 256 << 20


def test_the_whole_table() -> None:
    assert describe_plan(Fake()).splitlines() == [
        "load '/rho' in 'run.h5', HDF5",
        "  array     (512, 512, 512), float64, 1.0 GiB; chunks (1, 512, 512), gzip+shuffle",
        "  sharding  pencil: P(None, 'x', 'y') on mesh x=2, y=2; shard (512, 256, 256), 256.0 MiB",
        "  ranks     4, 4 of them read; staging cap 256.0 MiB per rank",
        "  taken     parallel: because",
        "",
        "                readers       decoded  amplif.  per reader      messages  between ranks  in node  peak host   est. s",
        "      root            1    512 chunks    1.00x     1.0 GiB         1,536      768.0 MiB     100%  300.0 MiB       12",
        "  ->  parallel        4    512 chunks    1.00x   256.0 MiB  <= 1,234,567   <= 768.0 MiB     ~33%  300.0 MiB      3.2",
        "      direct          4  2,048 chunks    4.00x     1.0 GiB             0            0 B        -  256.0 MiB  0.00012",
    ]


@pytest.mark.parametrize("readers", ["root", "parallel", "direct"])
def test_one_arrow_at_the_way_that_is_taken(readers: str) -> None:
    arrows = [line for line in describe_plan(Fake(readers=readers)).splitlines() if "->" in line]
    assert len(arrows) == 1 and arrows[0].split()[1] == readers


def test_select_pad_cast_and_replicas_are_told() -> None:
    text = describe_plan(
        Fake(shape=(511, 5), shape_global=(512, 6), dtype=np.dtype("float32"), n_replicas=2, shard_shape=(256, 6))
    )
    assert "array     (511, 5) of (512, 512, 512), padded to (512, 6), float64 cast to float32, 12.0 KiB;" in text
    assert ", 2 replicas; shard (256, 6), 6.0 KiB" in text


def test_without_chunks_bytes_are_counted() -> None:
    costs = {"root": ROOT, "parallel": PARALLEL, "direct": replace(DIRECT, runs=4096)}
    text = describe_plan(Fake(info=replace(INFO, chunks=None, codec="none"), costs=costs))
    assert "1.0 GiB in 4,096 runs" in text.splitlines()[-1] and text.count("runs") == 1
    assert "; no chunks (any part can be read)" in text
    assert [line.split()[2:4] for line in text.splitlines()[-3:-2]] == [["1.0", "GiB"]]
    assert "4.0 GiB" in text.splitlines()[-1]


def test_0d_and_a_mesh_without_axes() -> None:
    sharding = SimpleNamespace(mesh=SimpleNamespace(shape={}), spec=P())
    text = describe_plan(
        Fake(INFO.__class__("a", "/x", "HDF5", (), "float64"), (), (), sharding=sharding, shard_shape=(), decomposition="whole")
    )
    assert "array     (), float64, 8 B; no chunks" in text and "whole: P() on mesh (none); shard (), 8 B" in text


def test_no_line_ends_in_spaces() -> None:
    assert all(line == line.rstrip() for line in describe_plan(Fake()).splitlines())
