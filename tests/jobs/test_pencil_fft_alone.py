"""The pencil FFT of the examples as the script that it is, in one process with four devices."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.launch import job_environment
from tests.jobs.preloaded import command_for

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pencil_fft.py"


def test_four_devices_of_one_process() -> None:
    env = {**job_environment(1, devices_per_process=4), "PYTHONPATH": str(EXAMPLE.parents[1])}
    command = command_for(sys.executable, ["-W", "error", str(EXAMPLE)], env)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "(16, 16, 16) float32, shard (16, 8, 8) on each of 4 devices" in done.stdout
    strongest = re.search(r"strongest mode .*\((\d+), (\d+), (\d+)\): (\S+)", done.stdout)
    assert strongest
    assert tuple(map(int, strongest.groups()[:3])) in {(1, 2, 3), (15, 14, 13)}
    assert float(strongest[4]) == pytest.approx(16**3 / 2, rel=1e-5)
