"""Does a program that ends while a save goes on leave the whole file, and does MPI without threads refuse such a save?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.jobs.launch import run_job
from tests.tiers import quick_ones
from tests.unit.files import stored_in

PROGRAM = """
import sys
import jax, numpy as np, shardload
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

shardload.initialize()
sharding = NamedSharding(Mesh(np.array(jax.devices()), "a"), P("a"))
values = np.arange(64 * 1000, dtype="f4").reshape(64, 1000)
x = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
shardload.save(sys.argv[1], {"x": x}, chunks=(1, 1000), compression="gzip", background=True)
"""


@pytest.mark.parametrize("name", quick_ones(["out.h5", "out.zarr"], "out.zarr"))
def test_the_end_of_the_program_waits(tmp_path: Path, name: str) -> None:
    """Also for Zarr, whose library takes threads of a kind that Python closes before it waits for any other."""
    (tmp_path / "end.py").write_text(PROGRAM)
    run_job([str(tmp_path / "end.py"), name], 2, cwd=tmp_path, timeout=120).check()
    np.testing.assert_array_equal(
        stored_in(tmp_path / name, "x"), np.arange(64 * 1000, dtype="f4").reshape(64, 1000), strict=True
    )


def test_mpi_without_threads(tmp_path: Path) -> None:
    """Wrong if a thread called an MPI that allows none."""
    (tmp_path / "end.py").write_text(PROGRAM)
    env = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
    job = run_job([str(tmp_path / "end.py"), "out.h5"], 2, cwd=tmp_path, timeout=120, env=env)
    assert job.returncode != 0 and "THREAD_SERIALIZED" in job.stderr and "background=False" in job.stderr, job.tail()
    assert not (tmp_path / "out.h5").exists()
