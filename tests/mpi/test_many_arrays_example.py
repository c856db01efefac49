"""The particles of the examples: their centre of mass without padding, against NumPy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from examples import many_arrays as example
from tests.mpi.support import on_root

pytestmark = [pytest.mark.any_library, pytest.mark.any_number]


@pytest.mark.parametrize("devices", [1, -1], ids=["in order", "reversed"])
def test_the_centre_is_numpys(comm: Any, shared_tmp_path: Path, devices: int) -> None:
    """Wrong if padding were counted, or if its value were added: here it is far away."""
    path = str(shared_tmp_path / "snap.h5")
    n_devices = len(jax.devices())
    n = 40 * n_devices + 1
    on_root(comm, lambda: example.write_example(path, n))
    mesh = Mesh(np.array(jax.devices())[::devices], "n")
    snap = shardload.load(path, mesh, P("n"), dataset=example.NAMES, pad=1 << 20)
    centre, velocity, found = example.centres(snap)
    with h5py.File(path) as file:
        pos, vel = (file[example.NAMES[name]][...] for name in ("pos", "vel"))
    assert found == n and snap["id"].size == (n if n_devices == 1 else 41 * n_devices)
    np.testing.assert_array_equal(centre, pos.sum(axis=0) / np.float32(n))
    np.testing.assert_allclose(velocity, vel.astype("f8").mean(axis=0), rtol=1e-4, atol=1e-3)


def test_the_script_says_so(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], comm: Any
) -> None:
    monkeypatch.chdir(shared_tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example.__file__)])
    example.main()
    printed = capsys.readouterr().out
    comm.Barrier()
    assert not (shared_tmp_path / example.MADE).exists()
    if jax.process_index() == 0:
        padding = -10_007 % len(jax.devices())
        assert f"10007 particles; {padding} of padding" in printed
        assert "NumPy " in printed and printed.splitlines()[-1].endswith("the same")
    else:
        assert not printed
