"""Is there a warning if a job under Slurm runs without MPI, although MPI may have been intended?"""

from __future__ import annotations

import importlib

import pytest

launch = importlib.import_module("shardload.comm.launch")

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4"}


@pytest.mark.parametrize(("task", "switched_off", "said"), [(0, False, True), (1, False, False), (0, True, False)])
def test_without_mpi_under_slurm(
    task: int, switched_off: bool, said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong if a library that is not found made all loads slow in silence, every task said so, or who meant it was told."""
    for name, value in {**STEP, "SLURM_PROCID": str(task)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHARDLOAD_MPI", "0" if switched_off else "1")
    monkeypatch.setattr(launch, "world", lambda: None)
    monkeypatch.setattr(launch, "mpi_problem", lambda: "libmpi.so.40: cannot open shared object file")
    monkeypatch.setattr(launch.jax.distributed, "is_initialized", lambda: False)
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(launch, "_start", lambda *how: started.append(how))
    launch.initialize()
    assert [how[1:3] for how in started] == [(4, task)]
    assert [how[0] if how[5] is None else how[5] for how in started] == ["127.0.0.1:61554"], "not on loopback"
    assert ["libmpi.so.40" in text and "SHARDLOAD_MPI=0" in text for text in caplog.messages] == [True] * said
