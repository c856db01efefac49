"""What do the programs of slurm/ do that needs no cluster?"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.unit.files import raising

SLURM = Path(__file__).resolve().parents[2] / "slurm"


@pytest.mark.parametrize("arguments", [["run.py"], ["run.py", "-m"], ["field.py"]])
def test_what_is_missing_is_said(arguments: list[str]) -> None:
    """Wrong if a user saw a traceback of these programs instead of what to type."""
    name, *more = arguments
    done = subprocess.run([sys.executable, SLURM / name, *more], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"usage: python slurm/{name} ") and "Traceback" not in done.stderr


def test_a_field_that_was_half_written_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a job that was cancelled meanwhile left a file that the next job takes for the field."""
    main, path = runpy.run_path(str(SLURM / "field.py"))["main"], tmp_path / "field.h5"

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(h5py.File, "create_dataset", raising(KeyboardInterrupt()))
        main(path)
    assert not path.exists()
    main(path)
    with h5py.File(path) as file:
        waves = np.abs(np.fft.fftn(file["density"][...]))
    assert waves.shape == (64, 96, 160) and waves[1, 2, 3] == pytest.approx(waves.size / 2, rel=1e-4)
