"""Is memory reused when it is no longer in use, and never before?"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.transfer import allocator as reuse
from shardload.transfer.allocator import Reserve, empty_pieces
from tests.unit.ranks import in_threads

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_limits_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this process was started with."""
    monkeypatch.setattr(reuse, "keeps_addresses", lambda: False)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again_once_nobody_sees_it() -> None:
    """Wrong if a view, or a view of a view, did not keep its memory: it would change below it."""
    reserve = Reserve()
    (first,) = reserve.take([3 * MIB])
    where = address(first)
    view = first.view(np.float32).reshape(3, -1)[1:, ::2]
    view[...] = 7
    del first
    (second,) = reserve.take([3 * MIB])
    assert address(second) != where
    second[...] = 1
    assert (view == 7).all()
    del view
    (third,) = reserve.take([3 * MIB])
    assert address(third) == where


def test_what_does_not_fit_is_given_up_before_new_memory_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a load of another size had the memory of the last one beside its own."""
    reserve = Reserve()
    reserve.take([4 * MIB])
    assert reserve.nbytes == 4 * MIB
    kept: list[int] = []
    new = reuse._new
    monkeypatch.setattr(reuse, "_new", lambda size: (kept.append(reserve.nbytes), new(size))[1])
    reserve.take([2 * MIB])
    assert kept == [0]
    assert reserve.nbytes == 2 * MIB


def test_no_more_is_kept_than_a_part_of_what_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a process with a low limit kept what it does not need."""
    for left, kept in ((64 * MIB, 8 * MIB), (32 * MIB, 8 * MIB), (16 * MIB, 4 * MIB), (3 * MIB, 0)):
        monkeypatch.setattr(reuse, "limit_nbytes", lambda left=left: left)
        reserve = Reserve()
        pieces = reserve.take([2 * MIB] * 4)
        pieces.clear()
        assert reserve.nbytes == kept, left


def test_an_application_gets_all_that_a_limit_of_addresses_leaves() -> None:
    """Wrong if memory that nobody uses any more were missing where the kernel cannot take it back."""
    script = f"""
import resource, numpy
from pathlib import Path
from shardload.transfer.allocator import empty_pieces
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {1 << 30}, resource.RLIM_INFINITY))
((piece,),) = empty_pieces([([({640 * MIB},)], numpy.dtype("u1"))])
del piece
numpy.empty({640 * MIB}, "u1")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_memory_that_is_kept_is_the_kernels_to_take() -> None:
    """Wrong if it were not marked: it would be lost for everybody."""
    reserve = Reserve()
    (memory,) = reserve.take([8 * MIB])
    memory[...] = 1
    before = lazily_free()
    del memory
    assert lazily_free() - before >= 7 * MIB


def lazily_free() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("LazyFree")).split()[1]) << 10


def test_threads_do_not_get_the_same_memory() -> None:
    reserve, seen = Reserve(), []

    def work(number: int) -> None:
        for _ in range(200):
            (memory,) = reserve.take([4096])
            memory[...] = number
            time.sleep(0)
            seen.append(bool((memory == number).all()))

    in_threads(4, work)
    assert len(seen) == 800 and all(seen)


def test_no_memory_is_an_error() -> None:
    with pytest.raises(MemoryError, match="cannot allocate"):
        Reserve().take([1 << 60])


def test_small_pieces_and_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if small arrays cost a page and a system call each, or the variable did nothing."""
    monkeypatch.setattr(reuse, "_reserve", Reserve())
    empty_pieces([([(100,), (1 << 10, 255)], np.dtype("f4"))])
    assert reuse._reserve.nbytes == 0
    empty_pieces([([(100,), (1 << 10, 256)], np.dtype("f4"))])
    assert reuse._reserve.nbytes == MIB
    monkeypatch.setattr(reuse, "_reserve", Reserve())
    monkeypatch.setenv("SHARDLOAD_KEEP_MEMORY", "0")
    assert empty_pieces([([(1 << 20,)], np.dtype("f4"))])[0][0].shape == (1 << 20,)
    assert reuse._reserve.nbytes == 0


@pytest.mark.parametrize("holder", ["array", "view", "result"])
def test_an_array_keeps_its_memory(monkeypatch: pytest.MonkeyPatch, holder: str) -> None:
    """Wrong if the next load wrote into an array that is still in use, in whatever way."""
    monkeypatch.setattr(reuse, "_reserve", Reserve())
    values = np.arange(1 << 19, dtype="f4").reshape(512, 1024)
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))

    def load(values: np.ndarray) -> jax.Array:
        return shardload.load(values, mesh, P("a"))

    x = load(values)
    held = {"array": lambda: x, "view": lambda: np.asarray(x)[3:], "result": lambda: x.at[0, 0].set(0)[:]}[holder]()
    if holder != "array":
        del x
    others = [load(values + k) for k in range(1, 4)]
    expected = values[3:] if holder == "view" else values
    assert np.array_equal(np.asarray(held).ravel()[1:], expected.ravel()[1:])
    assert [float(other[0, 1]) for other in others] == [2, 3, 4]


def test_the_next_load_has_the_memory_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if JAX still held it, because nobody had called JAX since."""
    monkeypatch.setattr(reuse, "_reserve", Reserve())
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    values = np.ones((512, 1024), "f4")
    new, made = reuse._new, []
    monkeypatch.setattr(reuse, "_new", lambda size: (made.append(size), new(size))[1])
    gc.disable()
    try:
        for _ in range(5):
            x = shardload.load(values, mesh, P("a"))
            del x
        gc.collect(0)
    finally:
        gc.enable()
    assert len(made) == 1
    assert reuse._reserve.nbytes == 2 * MIB
