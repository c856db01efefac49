"""Does `examples/train_emulator.py`, killed at any time, go on with other ranks as if nothing had been?"""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest

from tests.jobs.launch import ROOT, job_command, job_environment, kill_job, run_job, start_job

EXAMPLE = ROOT / "examples" / "train_emulator.py"
STEP = re.compile(r"step (\d+): loss (\S+), samples (.*)")
ENV = {"PYTHONPATH": str(ROOT)}

Steps = dict[int, tuple[str, str]]


def steps_of(text: str) -> Steps:
    """The loss and the samples of each step that rank 0 has printed."""
    return {int(step): (loss, samples) for step, loss, samples in STEP.findall(text)}


def train(folder: Path, n_ranks: int, n_steps: int) -> Steps:
    command = [EXAMPLE, folder, "--steps", str(n_steps), "--every", "1000"]
    return steps_of(run_job(command, n_ranks, timeout=240, env=ENV).check().stdout)


def train_until_killed(folder: Path, n_ranks: int) -> Steps:
    """Train without end; SIGKILL all ranks when one has said that there is a checkpoint."""
    command = job_command([EXAMPLE, str(folder), "--steps", str(10**9), "--every", "2"], n_ranks)
    job, launcher = start_job(command, {**job_environment(n_ranks), **ENV}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    limit = threading.Timer(240, kill_job, (job, launcher), {"stacks": False})
    limit.start()
    said = ""
    try:
        for line in launcher.stdout or ():
            said += line.decode()
            if "checkpoint" in said:
                break
        for process in psutil.Process(launcher.pid).children(recursive=True):
            if "python" in process.name():
                process.kill()
        said += launcher.communicate()[0].decode()
    finally:
        limit.cancel()
        kill_job(job, launcher, stacks=False)
    assert launcher.returncode, said
    return steps_of(said)


def check_alike(resumed: Steps, whole: Steps) -> None:
    """The same samples, and the same losses but for rounding.

    A mean over other parts of a batch is summed in another order, and what differs is carried on: so losses agree within 1e-4.
    """
    assert {step: samples for step, (_, samples) in resumed.items()} == {step: whole[step][1] for step in resumed}
    losses = [[float(of[step][0]) for step in resumed] for of in (resumed, whole)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.thorough
def test_killed_on_four_ranks_and_resumed_on_two(tmp_path: Path) -> None:
    """Wrong if a checkpoint could be half of one, or the order or the state followed from the ranks."""
    killed = train_until_killed(tmp_path / "run", 4)
    with h5py.File(tmp_path / "run" / "checkpoint.h5") as file:
        n = int(file.attrs["step"])
    resumed = train(tmp_path / "run", 2, n + 6)
    whole = train(tmp_path / "whole", 4, n + 6)
    assert n >= 2 and list(resumed) == list(range(n + 1, n + 7))
    # On as many ranks: to the bit.
    assert {step: whole[step] for step in killed if step <= n} == {step: killed[step] for step in range(1, n + 1)}
    check_alike(resumed, whole)
