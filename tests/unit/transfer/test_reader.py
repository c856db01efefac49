"""Does a rank's reader put the right values into few buffers, and complete its messages when a read fails?

Here the format's library reads, block by block; `test_reader_chunks.py` is about chunks one by one.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shardload.errors import ConfigError, SourceError
from shardload.formats.contract.format import HelperError
from shardload.planning.region import Grid, Region
from shardload.planning.schedule import Block, Part
from shardload.storage.local import NotAFileError, OutsideError
from shardload.transfer.buffers import Slots
from tests.tiers import some_of
from tests.unit.fakes import TABLE, FakeSource, failing_at, failure, fetch, piece_of, reader_of, rows, tune, values_of, whole
from tests.unit.files import raising

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True, params=[-1, 1 << 14], ids=["in threads", "at once"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small reads are done at once; all that is true of reads in threads must be true of them."""
    tune(monkeypatch, inline_nbytes=request.param)


# --- where blocks go


@pytest.mark.parametrize("shows", [None, TABLE])
def test_what_lies_between_the_shards_of_a_rank_is_not_read(shows: Any) -> None:
    """Wrong if the block were read as a whole, or a chunk that two shards share by each of them where there is no gap."""
    source = FakeSource(TABLE, (2, 4), shows=shows)
    pieces = {0: piece_of(rows(0, 2)), 1: piece_of(rows(2, 4)), 2: piece_of(Region((6, 1), (8, 3)))}
    with reader_of(source, pieces) as reader:
        parts = [Part(piece.region, shard, 0) for shard, piece in pieces.items()]
        fetch(reader, Block(rows(0, 4), tuple(parts[:2])))
        fetch(reader, Block(rows(0, 8), (parts[0], parts[2])))
    assert shows is not None or source.reads == [rows(0, 4), rows(0, 2), Region((6, 1), (8, 3))]
    for piece in pieces.values():
        np.testing.assert_array_equal(piece.data, TABLE[piece.region.slices()])


def test_values_in_memory_are_shown_not_copied() -> None:
    source = FakeSource(TABLE, shows=TABLE)
    slots = Slots(1, 1 << 10)
    with reader_of(source, {0: piece_of(rows(0, 8))}, slots=slots) as reader:
        blocks = [fetch(reader, whole(rows(k, k + 2), rank=1)) for k in range(6)]
    for k, block in enumerate(blocks):
        assert len(block.tiles) == 1 and block.slot is None and not block.is_shared
        assert np.shares_memory(block.tiles[0].data, TABLE[k : k + 2])
        np.testing.assert_array_equal(block.tiles[0].data, TABLE[k : k + 2])
        block.release()
    assert source.reads == [] and slots.peak_nbytes == 0
    assert np.array_equal(TABLE.ravel(), np.arange(32)), "releasing a view gives nobody a buffer to write into"
    assert reader.counters.nbytes_read == 0


# Small ones, those around the ends and the precision of each type, and what is no number.
NUMBERS = (
    *(0, 1, -1, -3, 3, 6, 7, -8, 10, 127, -128, 256, -256, 257, 1000, 2048, 2049, 65536, 70000, 2**24, -(2**24), 2**24 + 1),
    *(2**24 + 2, 2**31, -(2**31), 2**40 + 1, 2**53 + 1, 2**60, 2**60 + 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1),
    *(0.1, 0.5, -2.7, -2.75, 7.5, 448.0, 65280.0, 1e10, 3.3e38, 3.4e38, 1e300, 1e-60, math.nan, math.inf, -math.inf),
)
STORED = ("i1", "u2", "i4", "u4", "i8", ">i8", "u8", "f2", "f4", "f8", "bfloat16", "int4")
CAST = (
    *("bool", "int8", "int16", "int32", "uint32", "int4", "uint4", "float16", "float32", "float64", "bfloat16"),
    *("complex64", "complex128", "float8_e4m3fn", "float4_e2m1fn"),
)


def numbers_of(kind: np.dtype[Any]) -> Array:
    """The numbers that a type has, and NaN that signals, which NumPy reports, with the value that it should give."""
    if "int" in kind.name:
        ends = ml_dtypes.iinfo(kind)
        return np.array([n for n in NUMBERS if isinstance(n, int) and ends.min <= n <= ends.max], kind)
    with np.errstate(all="ignore"):
        values = np.array(NUMBERS, "f8").astype(kind)
    signals = {"f4": [0x7F800001, 0xFF800001], "f8": [0x7FF0000000000001]}.get(kind.str[1:], [])
    return np.concatenate([values, np.array(signals, f"u{kind.itemsize}").view(kind)])


def holds(value: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a type has a number. One in floating point may be rounded or lose its fraction, an integer may not."""
    if dtype.kind == "b":
        return True
    if "int" in dtype.name:
        return math.isfinite(value) and ml_dtypes.iinfo(dtype).min <= int(value) <= ml_dtypes.iinfo(dtype).max
    with np.errstate(all="ignore"):
        found = complex(np.array(value).astype(dtype).astype("c16")).real
    if isinstance(value, int):  # identifiers would be the same as their neighbours
        return found == value
    return abs(value) <= float(ml_dtypes.finfo(dtype).max) if math.isfinite(value) else repr(found) == repr(value)


@pytest.mark.parametrize("to", CAST)
def test_a_cast_rounds_and_cuts_as_numpy_does_or_is_an_error_and_not_the_files(to: str) -> None:
    """Wrong if a value were wrapped, or named that does fit; the only dtype to name is the one that surely holds all."""
    dtype = np.dtype(to)
    for stored in (numbers_of(np.dtype(name)) for name in STORED):
        fits = np.array([holds((int if "int" in stored.dtype.name else float)(one), dtype) for one in stored])
        good = stored[fits]
        region = Region((0,), good.shape)
        block = fetch(reader_of(FakeSource(good), dtype=dtype), whole(region, rank=1))
        assert [tile.region for tile in block.tiles] == [region], "the library reads all of a block at once"
        found = values_of(block, region, dtype)
        with np.errstate(all="ignore"):
            expected = (good.astype("f4") if stored.dtype.kind == "V" else good).astype(dtype)
        np.testing.assert_array_equal(found.view("u1"), expected.view("u1"))  # NumPy does not see that NaN is NaN in bfloat16
        for bad in some_of(stored[~fits], 3):
            two = FakeSource(np.array([good[0], bad], stored.dtype))
            error = failure(reader_of(two, dtype=dtype), whole(Region((0,), (2,)), rank=1))
            assert isinstance(error, ConfigError)
            assert f"{to} cannot hold, such as {bad!s}." in str(error) and "damaged" not in str(error)
            is_wide = stored.dtype.itemsize == 8
            assert f"to keep {stored.dtype}" in str(error) and ("jax_enable_x64" in str(error)) is is_wide


# --- staging


def test_a_read_without_a_slot_is_refused() -> None:
    """Wrong if a block were read over another, or into memory beyond the staging cap."""
    source = FakeSource(TABLE, (1, 4))
    reader = reader_of(source, slots=Slots(1, 16))
    fetch(reader, whole(rows(0, 1), rank=1))
    assert not reader.has_room(whole(rows(1, 2), rank=1))
    with pytest.raises(ValueError, match="no slot is free"):
        reader.start(whole(rows(1, 2), rank=1))
    assert source.reads == [rows(0, 1)]


def test_a_part_outside_its_block_is_refused() -> None:
    """Wrong if what the block does not hold of a part were left as it was, and counted as delivered."""
    source = FakeSource(TABLE, (1, 4))
    for rank in (0, 1):
        with pytest.raises(ValueError, match="reaches outside its block"):
            reader_of(source, {0: piece_of(rows(0, 8))}).start(Block(rows(0, 2), (Part(rows(1, 3), 0, rank),)))
    assert source.reads == []


# --- threads


def test_a_small_read_waits_for_a_large_one_in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if what is read at once, because it is small, met a read in a thread: `FakeSource` refuses the second."""
    tune(monkeypatch, inline_nbytes=16)
    inside, go_on = threading.Event(), threading.Event()

    def hold(region: Region) -> None:
        inside.set()
        assert go_on.wait(20)

    source = FakeSource(TABLE, (1, 4), hold)  # type: ignore[arg-type]
    with reader_of(source, slots=Slots(3, 128)) as reader:
        large = reader.start(whole(rows(0, 7), rank=1))
        assert inside.wait(20)
        small = reader.start(whole(rows(7, 8), rank=1))
        assert not small.done() and source.reads == [rows(0, 7)]
        go_on.set()
        np.testing.assert_array_equal(values_of(large.result(), rows(0, 7), "f4"), TABLE[:7])
        np.testing.assert_array_equal(values_of(small.result(), rows(7, 8), "f4"), TABLE[7:])
        assert reader.start(whole(rows(2, 3), rank=1)).done(), "nothing is under way: at once"


# --- failures


def test_what_cannot_be_read_in_a_file_that_has_changed_is_not_called_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource(np.zeros((20, 30), "f4"), (4, 10), failing_at((13, 27), OSError("inflate failed")))
    monkeypatch.setattr(source, "opened_in", (2400, 1))
    monkeypatch.setattr(source, "state", lambda: (2400, 2))
    told = str(failure(reader_of(source, chunks=Grid((20, 30), (4, 10), (0, 0))), whole(Region((0, 0), (20, 30)), rank=1)))
    assert "OSError: inflate failed. The file has changed since it was opened" in told
    assert "damaged" not in told


def test_the_damaged_chunk_is_looked_for_while_nothing_else_is_read() -> None:
    """Wrong if the lock of the library were let go before: another thread may begin to read the next block then."""
    library, is_held = threading.Lock(), list[bool]()

    def fail(region: Region) -> Exception | None:
        is_held.append(library.locked())
        return OSError("inflate failed") if region.stop[0] > 3 else None

    error = failure(reader_of(FakeSource(TABLE, (2, 4), fail), library=library), whole(rows(0, 4), rank=1))
    assert isinstance(error, SourceError) and error.chunk == (1, 0)
    assert is_held == [True] * 3, "the block, and its two chunks"


def test_a_failure_that_does_not_come_again_names_no_chunk() -> None:
    errors = iter([OSError("once")])
    source = FakeSource(TABLE, (2, 4), lambda region: next(errors, None))
    error = failure(reader_of(source), whole(rows(0, 4), rank=1))
    assert isinstance(error, SourceError) and error.chunk is None
    assert str(error).startswith("'/rho' in 'f.h5' could not be read (elements [0:4, 0:4]): OSError: once.")


@pytest.mark.parametrize("kind", [OSError, OutsideError, NotAFileError, HelperError])
def test_what_a_new_copy_would_not_mend_is_not_called_damage(kind: type[OSError]) -> None:
    source = FakeSource(TABLE, (2, 4), failing_at((3, 0), kind("why")))
    said = str(failure(reader_of(source), whole(rows(2, 4), rank=1)))
    assert f"could not be read (elements [2:4, 0:4]): {kind.__name__}: why. " in said and "othing was loaded" in said
    assert ("damaged" in said) == ("Copy it again" in said) == (kind is OSError)


def test_a_file_that_cannot_be_looked_at_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of chunks looks at the file as it is made."""
    tune(monkeypatch, min_chunk_nbytes=1)

    monkeypatch.setattr(FakeSource, "chunk_reader", raising(OSError(5, "Input/output error")))
    with pytest.raises(SourceError, match=r"^'/rho' in 'f.h5' could not be read: OSError: \[Errno 5\] Input/output error\."):
        reader_of(FakeSource(TABLE, (2, 4)))


@pytest.mark.parametrize("error", [SourceError("told well already", chunk=(9,)), MemoryError("no memory")])
def test_what_is_no_damage_is_passed_on(error: Exception) -> None:
    reader = reader_of(FakeSource(TABLE, (2, 4), lambda region: error))
    assert failure(reader, whole(rows(0, 2), rank=1)) is error
