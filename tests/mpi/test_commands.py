"""Do the commands run on the oldest versions of typer and click, too? (All else about them is in tests/unit/cli.)"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import pytest

from shardload.cli.main import main
from tests.mpi.support import on_root, ramp
from tests.unit.files import write_hdf5


@pytest.mark.any_library
def test_commands(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong if a declaration of an option were of a kind that only newer versions take: no command would start."""
    path = shared_tmp_path / "in.h5"

    def said_by(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["shardload", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert not ended.value.code, said
        return said.out

    on_root(comm, lambda: write_hdf5(path, {"rho": ramp((4, 6, 8))}))
    said = [
        said_by("--help"),
        said_by("info", str(path)),
        said_by("plan", f"{path}:/rho", "--mesh", "a=2,b=2", "--spec", "-,a,b"),
    ]
    new = str(shared_tmp_path / "out.h5")
    said.append(said_by("copy", str(path), new, "--chunks", "2,3,4", "--compression", "gzip"))
    if comm.rank == 0:
        assert "bench-stream" in said[0] and "4 x 6 x 8" in said[1] and "P(None, 'a', 'b')" in said[2]
        with h5py.File(new) as file:
            assert file["rho"].chunks == (2, 3, 4)
