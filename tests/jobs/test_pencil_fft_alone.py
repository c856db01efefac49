"""The pencil FFT of the examples in one process with four devices, and as the script that it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.launch import job_environment
from tests.jobs.preloaded import command_for
from tests.tiers import IS_QUICK

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pencil_fft.py"
TESTS = str(ROOT / "tests" / "mpi" / "test_pencil_fft.py")


@pytest.fixture
def four_devices() -> dict[str, str]:
    """The environment of a single process with four devices, for all tests, whichever stage this is."""
    env = job_environment(1, devices_per_process=4)
    return {name: value for name, value in env.items() if not name.startswith("TESTS_")}


def test_four_devices_of_one_process(four_devices: dict[str, str]) -> None:
    tests, n_tests = "equals_numpy or explicit or loaded or plane_wave or not_a_pencil", 6
    if IS_QUICK:  # each compiles its own programs, on 4 ranks as well
        tests, n_tests = "(equals_numpy and float32) or loaded or not_a_pencil", 3
    arguments = ["-W", "error", "-m", "pytest", "-q", "--with-mpi", "-p", "no:cacheprovider", TESTS, "-k", tests]
    arguments += ["-W", "ignore:Module already imported"]  # a library in a copy, whose plugin is not used here
    command = command_for(sys.executable, arguments, four_devices)
    done = subprocess.run(command, env=four_devices, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{n_tests} passed" in done.stdout


def test_script_says_what_it_found(four_devices: dict[str, str]) -> None:
    env = {**four_devices, "PYTHONPATH": str(EXAMPLE.parents[1])}
    command = command_for(sys.executable, ["-W", "error", str(EXAMPLE)], env)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "(16, 16, 16) float32, shard (16, 8, 8) on each of 4 devices" in done.stdout
    strongest = re.search(r"strongest mode .*\((\d+), (\d+), (\d+)\): (\S+)", done.stdout)
    assert strongest
    assert tuple(map(int, strongest.groups()[:3])) in {(1, 2, 3), (15, 14, 13)}
    assert float(strongest[4]) == pytest.approx(16**3 / 2, rel=1e-5)
