"""`benchmarks/gpu.py` on a machine without a GPU: it runs, and says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import gpu

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_all_of_it_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "benchmarks/gpu.py", "--size", "16", "--repeats", "1", "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert not record["failures"]
    loads = {row["load"]: row for row in record["loads"] if "load" in row}
    assert list(loads) == [case.name for case in gpu.CASES]
    assert loads["HDF5 contiguous"]["verified_elements"] == 16**3
    assert loads["contiguous, halo 2"]["shape"] == [20, 16, 16]
    assert loads["dtype >i2"]["dtype"] == "int16"
    assert {row["save"] for row in record["loads"] if "save" in row} == {"h5", "zarr"}
    assert all(row["best_s"] > 0 for part in ("host_to_device", "device_to_host") for row in record[part])
    assert record["overlap"]["batches"] == 16
    assert any("no GPU was found" in text for text in record["not_measured"])
    assert max(map(len, done.stdout.splitlines())) <= gpu.WIDTH


@pytest.mark.parametrize("expected", [lambda stored: stored[::-1], lambda stored: stored.astype("f8")])
def test_a_load_that_is_wrong_is_found(tmp_path: Path, expected: Any) -> None:
    values = gpu.field_of(8)
    gpu.hdf5()(tmp_path / "x.h5", values)
    with pytest.raises(ValueError, match="is not what NumPy has"):
        gpu.check_load(gpu.Case("x", gpu.hdf5(), expected=expected), tmp_path / "x.h5", values, jax.devices()[0], 1)


def test_failures_are_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    cases = (gpu.Case("wrong", gpu.hdf5(), expected=lambda stored: stored + 1), gpu.Case("right", gpu.hdf5()))
    monkeypatch.setattr(gpu, "CASES", cases)
    for name in ("carry", "measure_copies", "check_save"):
        monkeypatch.setattr(gpu, name, lambda *_: {"nbytes": 1, "first_s": 1.0, "best_s": 1.0})
    monkeypatch.setattr(gpu, "measure_overlap", lambda *_: {})
    assert gpu.main(["--size", "8", "--repeats", "1", "--out", str(tmp_path / "gpu.json")]) == 1
    assert "wrong: ValueError: float32" in capsys.readouterr().out
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["load"] for row in record["loads"] if "load" in row] == ["right"]
    assert len(record["failures"]) == 1
