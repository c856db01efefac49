"""A way that fails, dies or hangs is reported, and nothing of it stays."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.remote import RemoteError, RemoteJob

SERVER = """
import os, signal
from benchmarks.remote import serve

def handle(request):
    if request["do"] == "die":
        os._exit(3)
    if request["do"] == "hang":
        signal.pause()
    return {"found": 10 / request["by"], "pid": os.getpid()}

serve(handle, 0, {"server": "1"})
"""


@pytest.fixture
def job() -> Iterator[RemoteJob]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with RemoteJob("server", [sys.executable, "-c", SERVER], 1, env) as found:
        yield found


def test_it_answers_and_goes_on_after_an_error(job: RemoteJob) -> None:
    assert job.versions == {"server": "1"}
    assert job.ask(60, do="divide", by=4)[0]["found"] == 2.5
    with pytest.raises(RemoteError, match="server, rank 0: ZeroDivisionError"):
        job.ask(60, do="divide", by=0)
    assert job.is_alive
    assert job.ask(60, do="divide", by=5)[0]["found"] == 2.0


@pytest.mark.parametrize(("do", "seconds", "says"), [("die", 60, "a rank ended"), ("hang", 0.2, "no answer from 1 ranks")])
def test_one_that_dies_or_hangs_is_gone(job: RemoteJob, do: str, seconds: float, says: str) -> None:
    pid = job.ask(60, do="divide", by=1)[0]["pid"]
    with pytest.raises(RemoteError, match=says):
        job.ask(seconds, do=do, by=1)
    assert not job.is_alive
    assert not psutil.pid_exists(pid)


def test_one_that_does_not_start_says_why() -> None:
    with pytest.raises(RemoteError, match=r"(?s)server did not start.*no such thing"):
        RemoteJob("server", [sys.executable, "-c", "raise SystemExit('no such thing')"], 1, dict(os.environ))
