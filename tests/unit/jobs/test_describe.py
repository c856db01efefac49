"""Does the table say what the plan says?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.jobs.loading.plan import describe_plan

MESH, PENCIL = AbstractMesh((2, 2), ("x", "y")), P(None, "x", "y")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Cubes of 1 GiB, of which nothing is stored: in chunks, and in one piece."""
    name = tmp_path_factory.mktemp("described") / "run.h5"
    with h5py.File(name, "w") as file:
        file.create_dataset("rho", (512, 512, 512), "f8", chunks=(1, 512, 512), compression="gzip", shuffle=True)
        file.create_dataset("contiguous", (512, 512, 512), "f8")
        file["number"] = np.float32(3)
    return str(name)


def plan(path: str, dataset: str = "rho", mesh: Any = MESH, spec: P = PENCIL, **options: Any) -> Any:
    made: Any = shardload.plan(path, mesh, spec, dataset=dataset, **options)
    return replace(made, info=replace(made.info, path="run.h5"))


def test_the_whole_text(path: str) -> None:
    assert describe_plan(plan(path)).splitlines() == [
        "load '/rho', HDF5",
        "  file      run.h5",
        "  array     (512, 512, 512), float64, 1.0 GiB; chunks (1, 512, 512),",
        "            gzip+shuffle",
        "  sharding  pencil: P(None, 'x', 'y') on mesh x=2, y=2; shard (512, 256, 256),",
        "            256.0 MiB",
        "  ranks     4, 4 of them read; up to 256.0 MiB of staging memory each",
        "  chosen    parallel: each rank by itself would decode 4x the array in all; once",
        "            in the job, and at most 1.0 GiB sent between ranks, is 768.0 MiB",
        "            less for the busiest rank",
        "",
        "                       root  -> parallel        direct",
        "  readers                 1            4             4",
        "  decoded        512 chunks   512 chunks  2,048 chunks",
        "  times decoded       1.00x        1.00x         4.00x",
        "  per reader        1.0 GiB    256.0 MiB       1.0 GiB",
        "  messages           <= 256       <= 256             0",
        "  between ranks  <= 1.0 GiB   <= 1.0 GiB           0 B",
        "  peak host       480.0 MiB    480.0 MiB     384.0 MiB",
    ]


@pytest.mark.parametrize("width", [40, 50, 59, 60, 80, 119, 200])
def test_it_fits_and_nothing_is_cut(path: str, width: int) -> None:
    """Wrong if a line were longer than the terminal, or a word were cut in two."""
    lines = describe_plan(plan(path), width).splitlines()
    assert max(map(len, lines)) <= width and all(line == line.rstrip() for line in lines)
    if width > 60:
        assert len(lines) < 25, "what fits stands beside each other"
    text = " ".join(" ".join(lines).split())
    for whole in ("(512, 512, 512)", "(1, 512, 512)", "P(None, 'x', 'y')", "gzip+shuffle", "768.0 MiB", "256.0 MiB"):
        assert whole in text
    for number in ("2,048 chunks", "4.00x", "384.0 MiB"):
        assert text.count(number) == 1, number
    assert plan(path).why in text and "4 of them read" in text


def test_a_name_is_no_command_for_the_terminal_and_no_html(path: str) -> None:
    made = plan(path)
    made = replace(made, info=replace(made.info, dataset="/<b>\n\x1b[31m&"))
    assert repr(made) == (
        r"<Plan of '/<b>\n\x1b[31m&' in 'run.h5': (512, 512, 512) float64 as pencil P(None, 'x', 'y') on mesh x=2, y=2; "
        "parallel, 4 of 4 ranks read>"
    )
    assert "\x1b" not in describe_plan(made) and r"'/<b>\n\x1b[31m&'" in describe_plan(made)
    html = made._repr_html_()
    assert r"'/&lt;b&gt;\n\x1b[31m&amp;'".replace("'", "&#x27;") in html and "<b>" not in html
    assert "2,048 chunks" in html and "-&gt; parallel" in html
    ElementTree.fromstring(html)  # every tag is closed


def test_select_pad_cast_and_replicas_are_told(path: str) -> None:
    mesh, select = AbstractMesh((2, 2, 2), ("x", "y", "z")), (slice(511), slice(5), 0)
    text = describe_plan(plan(path, mesh=mesh, spec=P("x", "y"), select=select, pad=0, dtype="f4"), 200)
    assert "array     (511, 5) of (512, 512, 512), padded to (512, 6), float64 cast to float32, 12.0 KiB;" in text
    assert ", 2 replicas; shard (256, 3), 3.0 KiB" in text


def test_without_chunks_bytes_are_counted(path: str) -> None:
    text = describe_plan(plan(path, "contiguous"))
    assert "\n  decoded           1.0 GiB     1.0 GiB    2.0 GiB\n" in text
    assert "no chunks (any part can be read)" in text


def test_0d_and_a_mesh_without_axes(path: str) -> None:
    text = describe_plan(plan(path, "number", Mesh(np.array(jax.devices()[0]), ()), P()))
    assert "array     (), float32, 4 B; no chunks" in text and "whole: P() on mesh (none); shard (), 4 B" in text
