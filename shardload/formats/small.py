"""Which values are so few that they travel with the metadata, and how are they read?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardload.formats.contract.array import ArrayInfo, nbytes_of
from shardload.formats.contract.chunk_reader import chunks_met, read_by_chunks
from shardload.formats.contract.format import Source
from shardload.planning.region import Region, count_runs
from shardload.planning.tuning import START_SECONDS, Tuning, one_reader_seconds

_WORTH_BATCHES = 8  # chunks of a small array from which they are read in batches, not by the format's library


def is_small(info: ArrayInfo, tuning: Tuning, region: Region | None = None) -> bool:
    """True if the array, or a region of it, is small, and so are the chunks that are decoded for it, in so much time."""
    wanted = Region.whole(info.shape) if region is None else region
    nbytes, unit = nbytes_of(info, wanted.shape), info.shards or info.chunks
    if not 0 < nbytes <= tuning.small_nbytes or nbytes_of(info, unit or ()) > tuning.small_chunk_nbytes:
        return False
    if nbytes <= tuning.tiny_nbytes and wanted.shape == info.shape:
        return True
    if info.chunks is None:
        return one_reader_seconds(nbytes, 0, info.codec, count_runs(info.shape, wanted.shape)) <= START_SECONDS
    n_chunks = math.prod(map(len, chunks_met(wanted, info.chunks)))
    decoded = nbytes if wanted.shape == info.shape else n_chunks * nbytes_of(info, info.chunks)
    if decoded > tuning.small_nbytes:  # perhaps at once
        return False
    return one_reader_seconds(decoded, n_chunks, info.codec) <= START_SECONDS


def values_of(source: Source, region: Region | None = None) -> memoryview | None:
    """All values of an open array, or those of a region; None if chunks are missing, or the file changes meanwhile.

    Raises what reading raises.
    """
    before, info = source.opened_in(), source.info
    whole = Region.whole(info.shape)
    wanted = whole if region is None else region
    values = np.empty(wanted.shape, source.dtype)
    if wanted != whole:
        source.expect(wanted)
    is_whole = _read(source, wanted, values) and source.state() == before
    return values.reshape(-1).view(np.uint8).data if is_whole else None


def _read(source: Source, region: Region, out: np.ndarray[Any, Any]) -> bool:
    """Read a region in the way that is fastest for few bytes. False if chunks of it are missing."""
    info = source.info
    has_many = info.chunks is not None and math.prod(map(len, chunks_met(region, info.chunks))) >= _WORTH_BATCHES
    is_part = region.shape != info.shape
    reader = source.chunk_reader() if has_many or is_part else None
    if reader is not None and info.chunks is not None:  # before HDF5 decodes any chunk, it is asked about all of the array
        return not read_by_chunks(reader, info.chunks, region, out)
    source.read_into(region, out)
    return not source.missing(region)
