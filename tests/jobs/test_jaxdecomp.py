"""A client that is not ours: jaxDecomp takes the pencils that shardload makes, and its FFT is NumPy's; its halos are ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.launch import ROOT, run_job

SCRIPT = Path(__file__).parent / "scripts" / "jaxdecomp_client.py"


@pytest.mark.thorough
@pytest.mark.parametrize("n", [1, 4])
def test_fft_of_loaded_pencils_is_numpys(tmp_path: Path, n: int) -> None:
    """Wrong if what we call the sharding P('x', 'y') of a mesh were not what another library takes it to be, or if `halo` gave
    other rows than the exchange between devices: of another neighbour, or other corners. (One process has no neighbour.)
    """
    n_edges = 3  # a ring along one axis and an end along the other; then both of one kind
    job = run_job([SCRIPT, tmp_path, f"{n_edges}"], n, timeout=240, env={"PYTHONPATH": str(ROOT)}).check()
    for found, *_ in job.said():
        assert found["shards"] == 4
        assert found["error"] < 3e-5
        assert found["halos"] == (2 * n_edges if n > 1 else 0)
