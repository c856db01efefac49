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

# Attaches to the segment whose handle it is given, and answers each line of its input.
CHILD = """
import sys
import threading
import numpy as np
from shardload.comm.shared_memory import Segment

try:
    found = Segment.attach(np.array(sys.argv[1:], dtype=np.int64))
except Exception as error:
    print(type(error).__name__, error, flush=True)
else:
    print("attached", found.data.size, int(found.data.sum()), flush=True)
    for line in sys.stdin:
        if line == "write\\n":
            found.data[::3] += 1
        print("sum", int(found.data.sum(dtype=np.int64)), flush=True)
"""


def child(handle: Any) -> subprocess.Popen[str]:
    """Another process that attaches."""
    command = [sys.executable, "-c", CHILD, *map(str, handle.tolist())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def asked(process: subprocess.Popen[str], what: str) -> str:
    assert process.stdin is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    return said(process)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def counted() -> Any:
    """No descriptor is left open by a test."""
    before = len(descriptors())
    yield
    assert len(descriptors()) == before


@pytest.mark.usefixtures("counted")
def test_another_process_sees_what_is_written_and_writes_what_is_seen() -> None:
    made = Segment.create(10_000)
    assert made.data.shape == (10_000,) and made.data.dtype == np.uint8 and made.data.flags.writeable
    assert made.data.ctypes.data % 4096 == 0, "the data begins on a page"
    made.data[...] = 7
    with child(made.handle) as other:
        assert said(other) == "attached 10000 70000"
        made.seal()
        made.data[...] = np.arange(10_000) % 251
        total = int(made.data.sum(dtype=np.int64))
        assert asked(other, "sum") == f"sum {total}"
        before = made.data.copy()
        assert asked(other, "write") == f"sum {int((made.data).sum(dtype=np.int64))}"
        before[::3] += 1
        np.testing.assert_array_equal(made.data, before)
        assert other.stdin is not None
        other.stdin.close()
        other.wait(20)
    del made


@pytest.mark.usefixtures("counted")
def test_memory_outlives_the_process_that_made_it() -> None:
    """Wrong if a rank that still looks could lose what it looks at: that would be a dead process, not an error."""
    made = Segment.create(5000)
    found = Segment.attach(made.handle)
    assert not np.shares_memory(made.data, found.data), "mapped at another address"
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
    handle = made.handle.copy()
    handle[which] += change
    with pytest.raises(OSError, match=text):
        Segment.attach(handle)
    with child(handle) as other:
        assert text in (answer := said(other)) and answer.startswith("OSError")
    found = Segment.attach(made.handle)
    assert found.data.size == 5000, "the right one is still there"
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
