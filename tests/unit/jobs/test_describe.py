"""Does the table say what the plan says?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardload.formats.contract.array import ArrayInfo
from shardload.jobs.loading.plan import Plan, describe_plan
from shardload.planning.cost import Cost
from shardload.units import as_html

INFO = ArrayInfo("run.h5", "/rho", "HDF5", (512, 512, 512), "float64", (1, 512, 512), "gzip+shuffle")
ROOT = Cost(1, 512, 1 << 30, 1.0, 1 << 30, 1536, 3 << 28, 300 << 20)
PARALLEL = Cost(4, 512, 1 << 30, 1.0, 1 << 28, 1234567, 3 << 28, 300 << 20)
DIRECT = Cost(4, 2048, 4 << 30, 4.0, 1 << 30, 0, 0, 256 << 20)


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
    staging_is_raised: bool = False
    halo_text: str = ""
    decoded_dtype: Any = None
    n_nodes: int = 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape_global) * self.dtype.itemsize

    @property
    def shape_padded(self) -> tuple[int, ...]:
        return self.shape_global


WHY = "each rank by itself would decode 4x the array in all; once in the job, and 768.0 KiB sent between ranks, is faster"


def test_the_whole_text() -> None:
    assert describe_plan(Fake()).splitlines() == [
        "load '/rho', HDF5",
        "  file      run.h5",
        "  array     (512, 512, 512), float64, 1.0 GiB;",
        "            chunks (1, 512, 512), gzip+shuffle",
        "  sharding  pencil: P(None, 'x', 'y') on mesh x=2, y=2;",
        "            shard (512, 256, 256), 256.0 MiB",
        "  ranks     4, 4 of them read; up to 256.0 MiB of staging memory each",
        "  chosen    parallel: because",
        "",
        "                         root   -> parallel        direct",
        "  readers                   1             4             4",
        "  decoded          512 chunks    512 chunks  2,048 chunks",
        "  times decoded         1.00x         1.00x         4.00x",
        "  per reader          1.0 GiB     256.0 MiB       1.0 GiB",
        "  messages           <= 1,536  <= 1,234,567             0",
        "  between ranks  <= 768.0 MiB  <= 768.0 MiB           0 B",
        "  peak host         300.0 MiB     300.0 MiB     256.0 MiB",
    ]


def test_parts_of_chunks_are_called_so() -> None:
    """Wrong if 2,048 chunks were said to be decoded, and the values once."""
    direct = replace(DIRECT, decoded_nbytes=1 << 30, amplification=1.0)
    text = describe_plan(Fake(costs={"root": ROOT, "parallel": PARALLEL, "direct": direct}))
    (row,) = (line for line in text.splitlines() if line.startswith("  decoded"))
    assert row.split() == ["decoded", "512", "chunks", "512", "chunks", "parts", "of", "2,048", "chunks"]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [40, 50, 59, 60, 80, 119, 200])
def test_it_fits_and_nothing_is_cut(width: int) -> None:
    """Wrong if a line were longer than the terminal, or a word, a shape, or a number from its unit, were cut in two."""
    lines = describe_plan(Fake(why=WHY), width).splitlines()
    assert max(map(len, lines)) <= width
    if width > 60:
        assert len(lines) < 25, "what fits stands beside each other"
    text = "\n".join(lines)
    for whole in ("(512, 512, 512)", "(1, 512, 512)", "P(None, 'x', 'y')", "gzip+shuffle", "768.0 KiB", "256.0 MiB"):
        assert whole in text
    for number in ("1,536", "<= 1,234,567", "2,048 chunks", "4.00x"):
        assert text.count(number) == 1, number
    said = " ".join(text.split())
    assert WHY in said and "4 of them read" in said


@pytest.mark.parametrize("readers", ["root", "parallel", "direct"])
def test_one_arrow_at_the_way_that_is_taken(readers: str) -> None:
    lines = [line for line in describe_plan(Fake(readers=readers)).splitlines() if "->" in line]
    assert len(lines) == 1 and f"-> {readers}" in lines[0]


def test_in_a_line() -> None:
    line = Plan.__repr__(Fake(info=replace(INFO, dataset="/a\nb\x1b[2J")))
    assert line == (
        r"<Plan of '/a\nb\x1b[2J' in 'run.h5': (512, 512, 512) float64 as pencil P(None, 'x', 'y') on mesh x=2, y=2; "
        "parallel, 4 of 4 ranks read>"
    )


def test_a_name_is_no_command_for_the_terminal_and_no_html() -> None:
    plan = Fake(info=replace(INFO, dataset="/<b>\x1b[31m&"), readers="root")
    assert "\x1b" not in describe_plan(plan) and r"'/<b>\x1b[31m&'" in describe_plan(plan)
    html = as_html(describe_plan(plan))
    assert r"'/&lt;b&gt;\x1b[31m&amp;'".replace("'", "&#x27;") in html and "<b>" not in html
    assert "2,048 chunks" in html and "-&gt; root" in html
    ElementTree.fromstring(html)  # every tag is closed


def test_select_pad_cast_and_replicas_are_told() -> None:
    text = describe_plan(
        Fake(shape=(511, 5), shape_global=(512, 6), dtype=np.dtype("float32"), n_replicas=2, shard_shape=(256, 6)), 200
    )
    assert "array     (511, 5) of (512, 512, 512), padded to (512, 6), float64 cast to float32, 12.0 KiB;" in text
    assert ", 2 replicas; shard (256, 6), 6.0 KiB" in text


def test_without_chunks_bytes_are_counted() -> None:
    text = describe_plan(Fake(info=replace(INFO, chunks=None, codec="none")))
    rows = {line[2:16].strip(): line[16:].split() for line in text.splitlines()[-10:]}
    assert rows["decoded"] == ["1.0", "GiB", "1.0", "GiB", "4.0", "GiB"]
    assert "no chunks (any part can be read)" in text


def test_0d_and_a_mesh_without_axes() -> None:
    sharding = SimpleNamespace(mesh=SimpleNamespace(shape={}), spec=P())
    text = describe_plan(
        Fake(INFO.__class__("a", "/x", "HDF5", (), "float64"), (), (), sharding=sharding, shard_shape=(), decomposition="whole")
    )
    assert "array     (), float64, 8 B; no chunks" in text and "whole: P() on mesh (none); shard (), 8 B" in text


def test_no_line_ends_in_spaces() -> None:
    for width in (40, 80):
        assert all(line == line.rstrip() for line in describe_plan(Fake(), width).splitlines())
