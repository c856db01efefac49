"""Do two processes of one machine map the same memory, only that, and is it freed when both are done?"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardload.comm.collectives import Collectives
from shardload.comm.shared_memory import Bell, Node, Segment
from tests.unit.files import raising

ROOT = Path(__file__).parents[3]

CHILD = """
import sys
import numpy as np
from shardload.comm.shared_memory import Segment

try:
    print(Segment.attach(np.array(sys.argv[1:], dtype=np.int64)).data.sum())
except Exception as error:
    print(type(error).__name__, error)
"""


def said_by_another(handle: Any) -> str:
    """What another process says that attaches."""
    command = [sys.executable, "-c", CHILD, *map(str, handle.tolist())]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True).stdout


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def counted() -> Any:
    """No descriptor is left open by a test."""
    before = len(descriptors())
    yield
    assert len(descriptors()) == before


@pytest.mark.usefixtures("counted")
def test_memory_outlives_the_process_that_made_it() -> None:
    """Wrong if a rank that still looks could lose what it looks at: that would be a dead process, not an error."""
    made = Segment.create(5000)
    found = Segment.attach(made.handle)
    assert not np.shares_memory(made.data, found.data), "mapped at another address"
    assert made.data.ctypes.data % 4096 == 0, "the data begins on a page"
    made.data[...] = 3
    made.seal()
    del made
    assert (found.data == 3).all()
    del found


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("which", "change", "text"),
    [(3, 1, "is another memory here"), (2, 1, "is something else here"), (2, -1, "is something else here")],
    ids=["token", "larger", "smaller"],
)
def test_what_is_not_that_memory_is_not_believed(which: int, change: int, text: str) -> None:
    made = Segment.create(5000)
    made.data[...] = 7
    handle = made.handle.copy()
    handle[which] += change
    with pytest.raises(OSError, match=text):
        Segment.attach(handle)
    assert text in (answer := said_by_another(handle)) and answer.startswith("OSError")
    assert said_by_another(made.handle) == "35000\n", "the right one is still there"
    found = Segment.attach(made.handle)
    assert found.data.size == 5000
    made.seal()
    del made, found


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("step", ["ftruncate", "posix_fallocate"])
def test_no_room_is_an_error_and_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Wrong if a rank without room kept what it had begun, load after load."""

    monkeypatch.setattr(os, step, raising(OSError(28, "No space left on device")))
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            Segment.create(5000)


class Interrupted(Collectives):
    """Ctrl-C comes while the ranks tell each other where their memory is."""

    def reduce(self, values: Any, op: str) -> Any:
        return values

    def gather(self, values: Any) -> Any:
        raise KeyboardInterrupt


def test_an_interrupted_call_leaves_no_descriptor_and_no_memory() -> None:
    """Wrong if only who comes to the end closed the descriptor: it keeps the memory, which nobody can free any more."""
    gc.collect()  # what other tests have left
    before = descriptors(), mapped_nbytes()
    with pytest.raises(KeyboardInterrupt):
        Node(0, (0, 0), Interrupted()).shared_memory(5000)
    gc.collect()  # pytest keeps the error, and with it the call, for a while
    assert (descriptors(), mapped_nbytes()) == before


def mapped_nbytes() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "memfd:shardload" in line]
    return sum(int(stop, 16) - int(start, 16) for start, stop in ends)


@pytest.mark.usefixtures("counted")
def test_many_come_and_go_and_nothing_is_left() -> None:
    """Wrong if a long job that loads again and again ran out of descriptors, or of memory."""
    before = mapped_nbytes()
    for k in range(50):
        made = Segment.create(1 << 20)
        found = Segment.attach(made.handle)
        made.seal()
        found.data[:10] = k % 250
        assert (made.data[:10] == k % 250).all()
        assert mapped_nbytes() - before == 2 * ((1 << 20) + 4096)
        del made, found
    assert mapped_nbytes() == before


@pytest.mark.usefixtures("counted")
def test_a_view_keeps_the_memory() -> None:
    """Wrong if a tile or a message that is still under way were left without what it points to."""
    before = mapped_nbytes()
    made = Segment.create(1 << 16)
    made.seal()
    view = made.data[100:200].view("<f4").reshape(5, 5)
    view[...] = 2
    del made
    assert mapped_nbytes() > before and (view == 2).all()
    del view
    assert mapped_nbytes() == before


@pytest.mark.usefixtures("counted")
def test_a_bell_rung_before_anybody_waits_is_heard_once() -> None:
    """Wrong if a rank slept although a note came just before it lay down."""
    bell = Bell()
    for _ in range(100_000):  # more than a pipe holds
        bell.ring()
    bell.wait(60)  # rung already: a hang here is a failure by the test's timeout
    began = threading.Thread(target=bell.ring)
    began.start()
    bell.wait(60)
    began.join()
    bell.wait(0.001)
    bell.close()


@pytest.mark.usefixtures("counted")
def test_a_segment_rings_its_maker() -> None:
    """Wrong if it rang anybody else: then the maker's wait here does not end."""
    made, other = Segment.create(100), Segment.create(100)
    found = Segment.attach(made.handle)
    found.bell.ring()
    made.bell.wait(60)
    with pytest.raises(ValueError, match="another process"):
        found.bell.wait(0.001)
    made.seal(), other.seal()
    del made, found, other
