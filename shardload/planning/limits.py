"""How long do the file system and the network of a known machine take?

Pure, like `cost`, which asks only for machines that have limits. `count_file_reads` counts what is fetched from the file
system, in bytes and in operations. What several ranks of a node read counts once, because the node's page cache has it for the
next one; it is exact where `traffic.count_direct` is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardload.planning.blocks import NEAR_NBYTES, count_runs, run_stride
from shardload.planning.grid import Grid
from shardload.planning.machine import Machine
from shardload.planning.schedule import Schedule
from shardload.planning.source_layout import SourceLayout
from shardload.planning.traffic import count_direct, count_direct_of_nodes

__all__ = ["FileReads", "OnDisk", "count_file_reads", "seconds_of"]

# To open an array a rank opens its file so many times and reads so many pieces of its metadata. As counted with HDF5 (which
# opens a file twice, beside our own look at it; the metadata are read once on a node), and with Zarr.
_OPENS_OF_FILE, _READS_OF_FILE = 3, 5
_OPENS_OF_STORE, _READS_OF_STORE = 2, 1
_REQUEST_NBYTES = 1 << 20  # what one operation fetches at most
# Reading, sending and decoding overlap, but not altogether: so much of the sum is added to the slowest.
_NOT_OVERLAPPED = 0.1


@dataclass(frozen=True, slots=True)
class OnDisk:
    """How the values of a file lie on disk.

    Attributes
    ----------
    share : float
        Bytes stored for each decoded byte; 1.0 if it is not known.
    file_chunks : tuple of int or None
        Chunks of each file along each axis, if there is a file for each of some chunks; None if all chunks are in one file.
    """

    share: float = 1.0
    file_chunks: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        nbytes_stored: int | None,
        nbytes: int,
        chunks: tuple[int, ...] | None = None,
        shards: tuple[int, ...] | None = None,
        is_one_file: bool = True,
    ) -> OnDisk:
        """From an array's metadata.

        >>> OnDisk.of(30, 120, (8, 8), (16, 16), is_one_file=False)
        OnDisk(share=0.25, file_chunks=(2, 2))
        """
        share = nbytes_stored / nbytes if nbytes_stored and nbytes else 1.0
        if is_one_file or chunks is None:
            return cls(share)
        return cls(share, tuple(max(1, s // max(1, c)) for s, c in zip(shards or chunks, chunks, strict=True)))


@dataclass(frozen=True, slots=True)
class FileReads:
    """What is fetched from the file system: bytes and operations (reads and opens) by all nodes together, and the bytes of the
    busiest reader, also those that its node's page cache has.
    """

    nbytes: int
    operations: int
    reader_nbytes: int


def seconds_of(
    core_seconds: float, reads: FileReads, between_nbytes: float, n_ends: int, machine: Machine
) -> tuple[float, str]:
    """Seconds of a load, and the resource that takes longest.

    Parameters
    ----------
    core_seconds : float
        Seconds of the busiest rank, if nothing else limits it.
    reads : FileReads
        What is fetched from the file system.
    between_nbytes : float
        Bytes that go from one node to another.
    n_ends : int
        Nodes that send or receive them, whichever are fewer.
    machine : Machine
        The figures.
    """
    seconds = {
        "cores": core_seconds,
        "reading": reads.reader_nbytes / machine.read_rate,
        "operations": reads.operations / machine.operations_rate,
        "network": between_nbytes / n_ends / machine.network_rate,
    }
    slowest = max(seconds, key=seconds.__getitem__)
    return seconds[slowest] + _NOT_OVERLAPPED * sum(seconds.values()), slowest


def count_file_reads(
    schedule: Schedule, layout: SourceLayout, stored: OnDisk, per_node: int, n_readers: int, reader_nbytes: int
) -> FileReads:
    """What a schedule fetches from the file system. `reader_nbytes` are the decoded bytes of its busiest reader."""
    share = stored.share if layout.has_chunks else 1.0
    files = _by_file(layout, stored)
    n_nodes = min(n_readers, -(-schedule.n_ranks // per_node))
    if schedule.is_direct:
        nbytes, of_reader, request = _of_direct(schedule, layout, stored, per_node)
        n_files = 0 if files is None else count_direct(schedule, files)[0]
    else:  # chunks of a block follow each other in the file: small ones are fetched together
        n_units, unit_nbytes = (
            (layout.chunks.n_cells, layout.chunk_nbytes)
            if layout.has_chunks
            else (math.prod(schedule.blocks.shape), layout.file_dtype.itemsize)
        )
        nbytes, of_reader = n_units * unit_nbytes * share, reader_nbytes * share
        request = _REQUEST_NBYTES if files is None else min(_REQUEST_NBYTES, unit_nbytes * share)
        n_files = 0 if files is None else max(files.chunks.n_cells, n_readers)
    opens, reads = (_OPENS_OF_FILE, _READS_OF_FILE) if files is None else (_OPENS_OF_STORE, _READS_OF_STORE)
    operations = max(n_readers, nbytes / max(1.0, request)) + n_readers * opens + n_nodes * reads
    # A file of several chunks has an index, which is read too.
    operations += n_files * (2 if stored.file_chunks and math.prod(stored.file_chunks) > 1 else 1)
    return FileReads(math.ceil(nbytes), math.ceil(operations), min(math.ceil(nbytes), math.ceil(of_reader)))


def _by_file(layout: SourceLayout, stored: OnDisk) -> SourceLayout | None:
    """The same array with its files in the place of chunks; None if it is in one file."""
    if stored.file_chunks is None or not layout.has_chunks:
        return None
    cell = tuple(c * f for c, f in zip(layout.chunks.cell, stored.file_chunks, strict=True))
    return replace(layout, chunks=Grid(layout.chunks.shape, cell, layout.chunks.phase))


def _of_direct(schedule: Schedule, layout: SourceLayout, stored: OnDisk, per_node: int) -> tuple[float, float, float]:
    """Each rank fetches what it holds, as chunks or, without chunks, as runs with the gaps between near ones.

    Bytes of all nodes, of the busiest rank, and of one operation.
    """
    if layout.has_chunks:
        units, unit_nbytes = layout, layout.chunk_nbytes * stored.share
        n_in_run = 1 if stored.file_chunks else _chunks_in_run(schedule, layout)
        run_nbytes = unit_nbytes * n_in_run
    else:
        units, unit_nbytes, run_nbytes = _spans(schedule, layout)
    total, _ = count_direct_of_nodes(schedule, units, per_node)
    return total * unit_nbytes, count_direct(schedule, units)[1] * unit_nbytes, min(run_nbytes, _REQUEST_NBYTES)


def _chunks_in_run(schedule: Schedule, layout: SourceLayout) -> int:
    """Chunks of a rank that follow each other in the file, so that what comes next is read ahead."""
    counts = layout.chunks.counts
    met = [min(n, -(-e // c)) for n, e, c in zip(counts, schedule.extent, layout.chunks.cell, strict=True)]
    return max(1, math.prod(met) // max(1, count_runs(counts, met)))


def _spans(schedule: Schedule, layout: SourceLayout) -> tuple[SourceLayout, float, float]:
    """What a rank reads of a file without chunks: the units to count it in, the bytes of one, and of a contiguous span."""
    shape, itemsize = schedule.blocks.shape, layout.file_dtype.itemsize
    extent = [min(n, e) for n, e in zip(shape, schedule.extent, strict=True)]
    cell = [1] * len(shape)
    while 0 < run_stride(shape, extent) * itemsize <= NEAR_NBYTES and count_runs(shape, extent) > 1:
        last = max(k for k, (n, e) in enumerate(zip(shape, extent, strict=True)) if e < n)
        extent[last] = cell[last] = shape[last]  # the gaps along this axis are read too
    size = math.prod(extent)
    span_nbytes = max(1.0, size * itemsize / max(1, count_runs(shape, extent)))
    if max(cell, default=1) == 1:
        return layout, float(itemsize), span_nbytes
    units = replace(layout, chunks=Grid(shape, tuple(cell), (0,) * len(cell)), chunk_shape=tuple(cell))
    return units, float(math.prod(cell) * itemsize), span_nbytes
