"""Which promises does a format make that can be saved, and how is each of them tested?

1. The format's author passes two functions: one makes a `Sink`, one reads a file with the format's own library.
2. Arrays whose values are their own flat index are written as a save writes them: by several writers, each chunk by one of
   them, in an order of chance, in rounds. What the library reads must be equal.
3. Each other promise has one function here. If it raises, the error is kept with the promise's name, and the next is tried.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardload.errors import ConfigError
from shardload.formats.contract.dtypes import native_dtype
from shardload.formats.sink import ArraySpec, Catalog, Encoder, Sink, Stored, Ticket
from shardload.planning.region import Region
from shardload.testing.conformance import DTYPES, SHAPES, BrokenError, Findings, expect, ramp

_N_WRITERS, _ROUND, _N_THREADS = 3, 5, 4

Array = np.ndarray[Any, Any]
Make = Callable[[str, Mapping[str, ArraySpec], str], Sink]
Read = Callable[[str], Mapping[str, Array]]


def check_sink(
    make: Make,
    read: Read,
    *,
    folder: str | os.PathLike[str],
    suffix: str = "",
    dtypes: Sequence[str] = DTYPES,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    change: Callable[[ArraySpec], ArraySpec] = lambda spec: spec,
) -> None:
    """Raise `ConformanceError` unless a format keeps every promise of `shardload.formats.sink`.

    Collective: no.

    Parameters
    ----------
    make : callable
        ``make(path, specs, mode)`` makes the sink of a new file, as `make_sink` does. Names are such as ``"/a"`` and
        ``"/group/b"``.
    read : callable
        ``read(path)`` reads all arrays of a file with the format's own library: by full name, in the type in which they are
        stored.
    folder : str or PathLike
        Folder for the files. It must exist, and is not emptied.
    suffix : str
        Suffix of the file names: ``".h5"``.
    dtypes : sequence of str
        Types that the format can hold, by NumPy's names, in both byte orders.
    shapes : sequence of tuple of int
        Shapes that the format can hold.
    change : callable
        Makes another spec of each: with a compression, or with shards.

    Raises
    ------
    ConformanceError
        It names each broken promise, with the values found and expected.

    Examples
    --------
    >>> import h5py, tempfile
    >>> from shardload.formats.saving import make_sink
    >>> def read(path):
    ...     with h5py.File(path) as file:
    ...         return {f"/{name}": file[name][()] for name in ("t0", "group/s0", "group/s0p")}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     check_sink(
    ...         lambda path, specs, mode: make_sink(path, specs, mode=mode), read, folder=folder, suffix=".h5",
    ...         dtypes=["float32"], shapes=[(5, 7)],
    ...     )
    """
    arrays = {f"/t{k}": ramp((5, 7), dtype) for k, dtype in enumerate(dtypes)}
    specs = {name: change(ArraySpec(values.shape, values.dtype, (2, 3))) for name, values in arrays.items()}
    for k, shape in enumerate(shapes):
        one = ramp(shape, dtypes[k % len(dtypes)])
        chunks = tuple(max(1, n // 2) for n in shape)  # the last chunk along an axis of odd length is cut
        arrays |= {f"/group/s{k}": one, f"/group/s{k}p": one}
        specs |= {
            f"/group/s{k}": change(ArraySpec(shape, one.dtype, chunks)),
            f"/group/s{k}p": ArraySpec(shape, one.dtype),  # in one piece
        }
    numbers = itertools.count()

    def new(mode: str = "w-", path: str | None = None) -> Sink:
        return make(path or str(Path(folder, f"saved{next(numbers)}{suffix}")), specs, mode)

    found = Findings("the sink")
    for promise, check in _PROMISES.items():
        with found.promise(promise):
            check(new, read, arrays)
    found.raise_all()


New = Callable[..., Sink]
Arrays = Mapping[str, Array]


def _units(array: Encoder) -> Iterator[tuple[int, Region]]:
    """What is encoded at once: each chunk, with its number; the whole of an array in one piece."""
    if array.spec.chunks is None:
        yield 0, Region.whole(array.spec.shape)
        return
    for number, index in enumerate(np.ndindex(*array.spec.grid)):
        yield number, array.region(index)


def _write(sink: Sink, catalog: Catalog, arrays: Arrays, seed: int = 0) -> list[tuple[str, int, int, str]]:
    """Write everything; returns where each chunk is: file, offset, bytes, and the chunk in words."""
    ticket = Ticket.from_json(catalog.ticket.to_json())
    chance, places = random.Random(seed), []
    units = [(name, number, region) for name, array in sink.arrays.items() for number, region in _units(array)]
    chance.shuffle(units)
    with contextlib.ExitStack() as opened:
        writers = [opened.enter_context(sink.writer(ticket)) for _ in range(_N_WRITERS)]
        for begin in range(0, len(units), _ROUND):
            chunks: dict[str, list[tuple[int, Stored]]] = {}
            for name, number, region in units[begin : begin + _ROUND]:
                stored = sink.arrays[name].encode(region, arrays[name][region.slices()])
                if sink.arrays[name].spec.chunks is None:
                    chance.choice(writers).put_region(name, region, stored)
                else:
                    chunks.setdefault(name, []).append((number, stored))
            for name, some in chunks.items():
                numbers, sizes, masks = [n for n, _ in some], [part.nbytes for _, part in some], [part.mask for _, part in some]
                if sink.arrays[name].is_asked:
                    offsets = catalog.allocate(name, numbers, sizes, masks).tolist()
                else:
                    offsets = [ticket.places[name][number] for number in numbers]
                for (number, stored), offset in zip(some, offsets, strict=True):
                    chance.choice(writers).put(name, number, offset, stored)
                    places.append((sink.file_of(ticket, name, number), offset, stored.nbytes, f"chunk {number} of {name}"))
        for writer in writers:
            writer.sync()
    return places


def _save(sink: Sink, arrays: Arrays, seed: int = 0) -> None:
    with sink.create() as catalog:
        _write(sink, catalog, arrays, seed)
        catalog.finish()
        catalog.commit()


def _compare(path: str, read: Read, arrays: Arrays) -> None:
    found = read(path)
    for name, expected in arrays.items():
        expect(name in found, f"the file has no {name}; it has {sorted(found)}")
        values = np.asarray(found[name])
        is_like = values.shape == expected.shape and native_dtype(values.dtype) == native_dtype(expected.dtype)
        expect(is_like, f"{name} is {values.shape} {values.dtype}, expected {expected.shape} {expected.dtype}")
        wrong = np.argwhere(values != expected)
        at = tuple(wrong[0].tolist()) if len(wrong) else ()
        expect(not len(wrong), f"{name} at {at} is {values[at]!r}, expected {expected[at]!r}; {len(wrong)} values differ")


def _expect_error(kind: type[Exception], call: Callable[[], Any], what: str) -> None:
    try:
        call()
    except kind:
        return
    raise BrokenError(what)


# --- the promises


def _check_values(new: New, read: Read, arrays: Arrays) -> None:
    for seed in range(2):
        sink = new()
        _save(sink, arrays, seed)
        _compare(sink.path, read, arrays)


def _check_description(new: New, read: Read, arrays: Arrays) -> None:
    sink = new()
    expect(set(sink.arrays) == set(arrays), f"arrays are {sorted(sink.arrays)}, expected {sorted(arrays)}")
    for name, expected in arrays.items():
        array, info = sink.arrays[name], sink.arrays[name].info
        told = info.shape, info.dtype, info.dataset, info.chunks
        wanted = expected.shape, native_dtype(expected.dtype).name, name, array.spec.chunks
        expect(told == wanted, f"info of {name} has shape, dtype, name and chunks {told}, expected {wanted}")
        count = np.zeros(expected.shape, int)
        for number, region in _units(array):
            count[region.slices()] += 1
            expect(array.number(region) == number, f"{region} of {name} has number {array.number(region)}, expected {number}")
        expect(bool(np.all(count == 1)), f"the chunks of {name} do not cover it once")
        region = Region.whole(expected.shape) if 0 in expected.shape else next(_units(array))[1]
        another = "int8" if native_dtype(expected.dtype) == np.float64 else "float64"
        for wrong in (np.zeros((*region.shape, 1), expected.dtype), np.zeros(region.shape, another)):
            what = f"values of shape {wrong.shape} and type {wrong.dtype} were encoded for {name} of {expected.dtype}"
            _expect_error(ValueError, partial(array.encode, region, wrong), what)


def _check_encoding(new: New, read: Read, arrays: Arrays) -> None:
    """In any strides and byte order, by one thread or several, and whatever was encoded since."""
    sink = new()
    units = [(name, region) for name, array in sink.arrays.items() for _, region in _units(array)]
    turned = {name: values.astype(values.dtype.newbyteorder(), order="F") for name, values in arrays.items()}

    def encode(source: Arrays, unit: tuple[str, Region]) -> Stored:
        return sink.arrays[unit[0]].encode(unit[1], source[unit[0]][unit[1].slices()])

    before = {name: values.copy() for name, values in arrays.items()}
    stored = [encode(before, unit) for unit in units]
    first = [bytes(memoryview(part.data)) for part in stored]
    with ThreadPoolExecutor(_N_THREADS) as pool:
        again = [bytes(memoryview(part.data)) for part in pool.map(partial(encode, turned), units)]
    for unit, part, data, other in zip(units, stored, first, again, strict=True):
        expect(data == other, f"{unit} in other strides, another byte order or another thread is encoded as other bytes")
        expect(bytes(memoryview(part.data)) == data, f"the bytes of {unit} changed as others were encoded")
        expect(part.nbytes == len(data), f"nbytes of {unit} is {part.nbytes}, expected {len(data)}")
    changed = [name for name, values in arrays.items() if values.tobytes() != before[name].tobytes()]
    expect(not changed, f"the values of {changed} were changed")


def _check_places(new: New, read: Read, arrays: Arrays) -> None:
    sink = new()
    with sink.create() as catalog:
        places = sorted(_write(sink, catalog, arrays))
        for (file, at, nbytes, what), (other, start, _, second) in itertools.pairwise(places):
            expect(file != other or at + nbytes <= start, f"{what}, {nbytes} bytes at {at}, lies on {second} at {start}")
        for file, at, nbytes, what in places:
            expect(os.path.getsize(file) >= at + nbytes, f"the file of {what} is shorter than where it ends")


def _check_name(new: New, read: Read, arrays: Arrays) -> None:
    sink = new()
    folder = os.path.dirname(sink.path)
    before = set(os.listdir(folder))
    with sink.create() as catalog:
        _write(sink, catalog, arrays)
        catalog.finish()
        expect(not os.path.lexists(sink.path), "the name exists before `commit`")
    left = set(os.listdir(folder)) - before
    expect(not left, f"a save that was abandoned left {sorted(left)}")
    _save(sink, arrays)
    expect(set(os.listdir(folder)) - before == {os.path.basename(sink.path)}, "a save leaves more than the file of its name")


def _check_modes(new: New, read: Read, arrays: Arrays) -> None:
    first = new()
    other = {name: values[::-1].copy() if values.ndim else values for name, values in arrays.items()}
    second = new(path=first.path)
    with second.create() as late:
        _write(second, late, other)
        late.finish()
        _save(first, arrays)  # it takes the name meanwhile
        _expect_error(ConfigError, late.commit, "mode 'w-' replaced a file that another save had made meanwhile")
    _compare(first.path, read, arrays)
    third = new("w", first.path)
    with third.create() as catalog:
        _write(third, catalog, other)
        catalog.finish()
        _compare(first.path, read, arrays)  # the old file is whole until then
        catalog.commit()
    _compare(first.path, read, other)


def _check_ticket(new: New, read: Read, arrays: Arrays) -> None:
    sink = new()
    with sink.create() as catalog:
        ticket = Ticket.from_json(catalog.ticket.to_json())
        expect(ticket == catalog.ticket, f"the ticket {catalog.ticket} is another after JSON")
        for wrong in (replace(ticket, token="0" * len(ticket.token)), replace(ticket, temporary=f"{ticket.temporary}0")):
            what = "a writer takes a temporary that is not to be seen, or is another save's"
            _expect_error(ConfigError, partial(sink.writer, wrong), what)


def _check_missing(new: New, read: Read, arrays: Arrays) -> None:
    sink = new()
    asked = [name for name, array in sink.arrays.items() if array.is_asked]
    with sink.create() as catalog:
        for name in asked[:1]:
            catalog.allocate(name, [0], [10])
            for wrong in (0, 10**9, -1):
                what = f"chunk {wrong} of {name} got a place; it has one, or is not in the array"
                _expect_error(ValueError, partial(catalog.allocate, name, [wrong], [10]), what)
        if asked:
            _expect_error(ValueError, catalog.finish, "`finish` ends a file whose chunks have no place")


_PROMISES: dict[str, Callable[[New, Read, Arrays], None]] = {
    "says what it will write": _check_description,
    "encodes a chunk as the same bytes, whatever else is encoded": _check_encoding,
    "gives each chunk a place of its own": _check_places,
    "writes what the format's own library reads": _check_values,
    "gives the file its name at the end, and leaves nothing else": _check_name,
    "replaces a file as a whole, or refuses to": _check_modes,
    "shows a writer which temporary is meant": _check_ticket,
    "notices chunks without a place": _check_missing,
}
