"""README.md is true: its example runs as printed, wherever a reader may be, and prints what is printed under it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardload
from tests.jobs.launch import ROOT, job_environment, run_job
from tests.jobs.preloaded import command_for
from tests.unit.files import write_hdf5

README = ROOT / "README.md"
FIRST_RUN = ROOT / "docs" / "first-run.md"


def block(marker: str, page: Path = README) -> str:
    """The fenced block after an HTML comment that starts with `marker`."""
    found = re.search(rf"<!-- {re.escape(marker)}[^\n]*-->\n```\w*\n(.*?)```", page.read_text(), re.DOTALL)
    if found is None:
        raise AssertionError(f"{page.name} has no block marked {marker!r}")
    return found[1]


def test_the_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block("example"))
    job = run_job([str(script)], 4, cwd=tmp_path, timeout=240).check()
    printed = [line for line in job.stdout.splitlines() if line and not line.startswith("[Gloo]")]
    assert printed == block("output").splitlines()
    with h5py.File(tmp_path / "rho.h5") as file, h5py.File(tmp_path / "delta.h5") as saved:
        rho = file["rho"][...].astype("f8")
        np.testing.assert_allclose(saved["delta"][...], rho / rho.mean() - 1, rtol=1e-4, atol=1e-4)
        assert saved["delta"].compression == "gzip"
    command = re.search(r"`shardload (plan rho.h5 [^`]*)`", README.read_text())
    assert command is not None
    planned = run_job(["-m", "shardload", *command[1].split()], 1, cwd=tmp_path, timeout=240)
    assert planned.returncode == 0 and "a=32, b=2" in planned.stdout, planned.stderr


def test_the_page_is_short() -> None:
    assert len(block("example").splitlines()) <= 20 and len(README.read_text().splitlines()) <= 150


HEAD = block("example").partition("\nif jax")[0] + "\n"  # imports and a mesh: what the reader of another example has


def test_batches_of_a_stream(tmp_path: Path) -> None:
    """The last batch, and the state after it: 98 samples are 12 batches."""
    write_hdf5(tmp_path / "run.h5", {"t2m": np.arange(100 * 8 * 3, dtype="f4").reshape(100, 8, 3)}, chunks=(10, 4, 3))
    shown = "if jax.process_index() == 0: print(len(ds), batch['x'].shape, batch['y'].shape, float(error), state['sample'])\n"
    (tmp_path / "stream.py").write_text(HEAD + block("stream") + shown)
    job = run_job([str(tmp_path / "stream.py")], 2, cwd=tmp_path, timeout=240).check()
    assert "12 (8, 2, 8, 3) (8, 8, 3) 24.0 96" in job.stdout


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """docs/append.md: each run adds three rows to those of the run before."""
    (tmp_path / "run.py").write_text(HEAD + block("restart", ROOT / "docs" / "append.md"))
    for n_ranks, n_devices in ((2, 1), (1, 4)):
        run_job([str(tmp_path / "run.py")], n_ranks, cwd=tmp_path, timeout=240, devices_per_process=n_devices).check()
    with h5py.File(tmp_path / "run.nc") as file:
        np.testing.assert_array_equal(file["time"], 50 * np.arange(7))
        np.testing.assert_array_equal(file["rho"], np.broadcast_to(100 * np.arange(7.0)[:, None, None, None], (7, 16, 12, 10)))


def test_one_array_in_several_files(tmp_path: Path) -> None:
    """docs/many-files.md: the parts in their order, and dates that go across the new year."""
    ids, rows = [np.arange(n, dtype="i8") + 2**40 for n in (5, 3)], np.arange(6, dtype="i2").reshape(2, 1, 3)
    for k in range(3):
        with h5py.File(tmp_path / f"snap_000.{k}.hdf5", "w") as file:
            for name in ("ParticleIDs", "Coordinates") if k != 1 else ():
                file[f"PartType1/{name}"] = ids[k // 2]
            file["PartType0/Density"] = np.zeros(k)
    for k, year in enumerate((2001, 2002)):
        with h5py.File(tmp_path / f"era5_{year}.nc", "w") as file:
            packed = file.create_dataset("t2m", data=rows[k : k + 1], chunks=(1, 1, 3), compression="gzip")
            packed.attrs["scale_factor"] = np.float32(0.5)
            file["time"] = [0]
            file["time"].attrs["units"] = f"days since {year}-01-01"
            file["time"].make_scale("time")
            packed.dims[0].attach_scale(file["time"])
    code = block("join", ROOT / "docs" / "many-files.md")
    with contextlib.chdir(tmp_path):
        exec(code, {})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("a",))
    with jax.enable_x64(True):
        found = shardload.load(tmp_path / "snap_000.hdf5", mesh, P("a"), dataset="PartType1/ParticleIDs")
        np.testing.assert_array_equal(found, np.concatenate(ids))
    second = {"time": shardload.between("2001-06", "2002-05")}
    whole = shardload.load(tmp_path / "era5.nc", mesh, P(), dataset="t2m", decode=True, select=second)
    np.testing.assert_array_equal(whole, rows[1:] / np.float32(2))
    names: dict[str, Any] = {"shardload": shardload, "mesh": mesh, "P": P}
    with contextlib.chdir(tmp_path):
        exec(block("concat", ROOT / "docs" / "many-files.md"), names)
    np.testing.assert_array_equal(names["t2m"], rows / np.float32(2))


@pytest.mark.parametrize("n_devices", [1, 8])
def test_the_scripts_of_the_pages_run_without_mpi(tmp_path: Path, n_devices: int) -> None:
    """Wrong if one of them asked for more devices than there are, or if the line that simulates some did not.

    One process runs them all: README's and first-run's, and the example.
    """
    simulate = block("simulate")
    assert simulate == 'jax.config.update("jax_num_cpu_devices", 8)\n'
    example = block("example")
    if n_devices == 8:
        head, initialize, rest = example.partition("shardload.initialize()")
        example = head + simulate + initialize + rest
    (tmp_path / "example.py").write_text(example)
    (tmp_path / "first.py").write_text(block("first.py", FIRST_RUN))
    write_hdf5(tmp_path / "first.h5", {"density": np.full((96, 64, 32), 0.5, "f4")}, chunks=(1, 64, 32), compression=4)
    run = "import runpy, sys; scripts, sys.argv[1:] = sys.argv[1:], ['first.h5:/density']\n"
    run += "for script in scripts: runpy.run_path(script, run_name='__main__')"
    env = {k: v for k, v in job_environment(1).items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    arguments = ["-W", "error", "-c", run, "example.py", "first.py", str(ROOT / "examples" / "pencil_fft.py")]
    command = command_for(sys.executable, arguments, env)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    shard = {1: (96, 64, 32), 8: (96, 16, 16)}[n_devices]
    said = done.stdout.splitlines()
    assert block("output").strip() in said  # the same on any mesh
    assert said.count(f"I am 0 of 1, I hold {shard} of (96, 64, 32); the mean is 0.50") == n_devices
    assert f"field  (96, 64, 32) float32, shard {shard} on each of {n_devices} devices" in said
