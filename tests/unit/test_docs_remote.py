"""Does what docs/remote.md shows do what it says? Against a server on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
import zarr
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import shardload
from shardload.cli.main import app
from tests.servers import ObjectServer
from tests.unit.formats import test_references

pytest.importorskip("obstore")
pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata")

PAGE = (Path(__file__).parents[2] / "docs" / "remote.md").read_text()
RUNS = re.findall(r"<!-- runs -->\n```python\n(.*?)```", PAGE, re.DOTALL)
VALUES = np.arange(24 * 90 * 180, dtype="f4").reshape(24, 90, 180)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    for name in ("era", "plain"):
        group = zarr.open_group(tmp_path / f"bucket/{name}.zarr", mode="w")
        for key, values, units in (("t2m", VALUES, "K"), ("time", VALUES[0, 0, :24], "hours")):
            axes = ("time", "lat", "lon")[: values.ndim]
            chunks = (6, 90, 180)[: values.ndim] if values.ndim > 1 else values.shape
            made = group.create_array(key, shape=values.shape, chunks=chunks, dtype="f4", dimension_names=axes)
            made[...] = values
            made.attrs["units"] = units
    zarr.consolidate_metadata(str(tmp_path / "bucket/era.zarr"))
    for k in range(2):
        with h5py.File(tmp_path / f"bucket/era_{2001 + k}.nc", "w") as file:
            file["t2m"], file["time"] = VALUES[12 * k : 12 * k + 12], np.arange(12.0) + 12 * k
            file["time"].make_scale("time")
            file["t2m"].dims[0].attach_scale(file["time"])
    with ObjectServer(tmp_path) as server:
        yield server


@pytest.mark.parametrize("command", ["info", "plan"])
def test_what_a_command_prints(server: ObjectServer, command: str) -> None:
    shown = re.search(rf"<!-- {command} -->\n```text\n\$ shardload (.*?)\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    made = CliRunner().invoke(app, [*shown[1].split(), "--storage", f"endpoint={server.url}"], env={"COLUMNS": "80"})
    assert made.exit_code == 0, made.stderr
    assert [line.rstrip() for line in made.stdout.splitlines() if line.strip()] == shown[2].splitlines()


def test_the_cookbook(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"shardload": shardload, "mesh": Mesh(np.array(jax.devices()), "a"), "spec": P(None, "a")}
    assert len(RUNS) == 5
    for text in RUNS:
        text = text.replace('"skip_signature": True}', f'"skip_signature": True, "endpoint": "{server.url}"}}')
        text = text.replace("https://example.org", server.url)
        if "refs.json" in text:
            (tmp_path / "bucket/refs").mkdir()
            test_references.write(tmp_path / "bucket/refs/refs.json", "s3://bucket/refs/x.h5")
            (tmp_path / "bucket/refs/refs.json").rename("refs.json")
            lines, loaded = text.replace("/t2m", "/x").splitlines(), names["y"]
            if find_spec("pyarrow") is not None:
                test_references.in_parquet(tmp_path / "refs.json")
            for line in lines if find_spec("pyarrow") is not None else lines[:1]:
                exec(line, names)
                np.testing.assert_array_equal(names[line[0]], test_references.DATA)
            names["x"] = loaded
            continue
        exec(text, names)
        if "save" not in text:
            np.testing.assert_array_equal(names["x"], VALUES)
    np.testing.assert_array_equal(names["z"], VALUES)
    np.testing.assert_array_equal(zarr.open_array("bucket/new.zarr/t2m", mode="r")[...], VALUES)
