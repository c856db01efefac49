"""Saving without ranks: several writers put the chunks that one catalog places, in rounds, in any order."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from shardload.formats.saving import make_sink
from shardload.formats.sink import ArraySpec, Encoder, Sink, Stored, Writer
from shardload.planning.region import Region, ravel

Array = np.ndarray[Any, Any]


def regions(encoder: Encoder) -> list[Region]:
    """What is written at once: each chunk; the rows of an array in one piece."""
    spec = encoder.spec
    if spec.chunks is not None:
        return [encoder.region(index) for index in itertools.product(*map(range, spec.grid))]
    if not spec.shape or 0 in spec.shape:
        return [Region.whole(spec.shape)]
    rest = spec.shape[1:]
    return [Region((k, *(0 for _ in rest)), (k + 1, *rest)) for k in range(spec.shape[0])]


def write_all(
    sink: Sink,
    catalog: Sink,
    values: Mapping[str, Array],
    *,
    round_size: int = 7,
    seed: int = 0,
) -> None:
    """Write all values by three writers, in rounds over all arrays, in an order of chance."""
    chance = random.Random(seed)
    ticket = pickle.loads(pickle.dumps(catalog.ticket))
    todo = [(name, region) for name, one in sink.arrays.items() for region in regions(one)]
    chance.shuffle(todo)
    writers = [sink.writer(ticket) for _ in range(3)]
    try:
        for at in range(0, len(todo), round_size):
            puts: list[Any] = []
            asked: dict[str, list[tuple[int, Stored]]] = {}
            for name, region in todo[at : at + round_size]:
                one = sink.arrays[name]
                stored = one.encode(region, values[name][region.slices()])
                if one.spec.chunks is None:
                    first = ravel(region.start, one.spec.shape) if region.size else 0
                    at = ticket.offsets[name] + first * one.spec.dtype.itemsize
                    puts += [(name, first, at, stored)] if region.size else []
                elif one.is_placed_by_root:
                    asked.setdefault(name, []).append((one.number(region), stored))
                else:
                    puts.append((name, one.number(region), ticket.offsets[name], stored))
            for name, found in asked.items():
                numbers, sizes, masks = zip(*((n, s.nbytes, s.mask) for n, s in found), strict=True)
                offsets = catalog.allocate(name, numbers, sizes, masks)
                puts += [(name, n, int(offset), s) for (n, s), offset in zip(found, offsets, strict=True)]
            for k, put in enumerate(puts):
                writers[k % 3].put(*put)
        for writer in writers:
            writer.sync()
    finally:
        for writer in writers:
            writer.close()


def save(path: Any, values: Mapping[str, Array], specs: Mapping[str, ArraySpec] | None = None, **options: Any) -> Sink:
    """Save arrays; those without a spec as they are."""
    specs = {name: (specs or {}).get(name) or ArraySpec(one.shape, one.dtype) for name, one in values.items()}
    sink = make_sink(str(path), specs, **options)
    full = {"/" + name.strip("/"): one for name, one in values.items()}
    with sink.create() as catalog:
        write_all(sink, catalog, full)
        catalog.finish()
        catalog.commit()
    return sink


@pytest.fixture
def quick_fsync() -> Iterator[None]:
    """`os.fsync` does nothing: on a busy disk a thousand of them take minutes, and these tests pull no plug."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def forked() -> int:
    """`os.fork`. Python and JAX warn if there are threads: those of zarr and JAX wait, and the child does not use them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def put_whole(sink: Sink, writer: Writer, catalog: Sink, name: str, values: Array, region: Region) -> int:
    """Write one chunk; returns its offset."""
    one = sink.arrays[name]
    stored, number = one.encode(region, values[region.slices()]), one.number(region)
    if not one.is_placed_by_root:
        offset = catalog.ticket.offsets[name]
    else:
        offset = int(catalog.allocate(name, [number], [stored.nbytes], [stored.mask])[0])
    writer.put(name, number, offset, stored)
    return offset
