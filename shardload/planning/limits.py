"""How long do the resources take that ranks share: the memory and network of a node, and the file system of the job?

Pure, like `cost`, which asks only for machines that have limits.

1. `count_file_reads`: what the ranks fetch from the file system, in bytes and in operations. What several ranks of a node read
   counts once if the node's page cache can hold it, and is exact where `traffic.count_direct` is.
2. `seconds_of`: the seconds of each resource. A load takes as long as the slowest, so no estimate beats any of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardload.planning.blocks import NEAR_NBYTES, count_runs, run_stride
from shardload.planning.grid import Grid
from shardload.planning.machine import Machine
from shardload.planning.schedule import Schedule
from shardload.planning.source_layout import SourceLayout
from shardload.planning.strategies import Parallel
from shardload.planning.traffic import count_direct, count_direct_of_nodes

__all__ = ["FileReads", "Load", "OnDisk", "count_file_reads", "seconds_of"]

# To open an array a rank opens its file so many times, and the first one on a node reads so many pieces of its metadata. As
# counted with HDF5 (which opens a file twice, beside our own look at it), and with Zarr.
_OPENS_OF_FILE, _READS_OF_FILE = 3, 5
_OPENS_OF_STORE, _READS_OF_STORE = 2, 1
# After several reads in order the system reads ahead so many times as much as they were: in vain, if a gap follows.
_AHEAD_PER_RUN = 2
_MOST_COUNTED = 1 << 14  # blocks whose owners are counted one by one
_PAGE_NBYTES = 4096  # the least that a file system with a page cache fetches


@dataclass(frozen=True, slots=True)
class OnDisk:
    """How the values of a file lie on disk.

    Attributes
    ----------
    share : float
        Bytes stored for each decoded byte; 1.0 if it is not known.
    files_per_chunk : float
        Files to open for each chunk: 0 if all chunks are in one file, 1 for a Zarr store without shards.
    file_chunks : tuple of int
        Chunks of each such file along each axis; empty if each chunk has its own.
    """

    share: float = 1.0
    files_per_chunk: float = 0.0
    file_chunks: tuple[int, ...] = ()

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
        OnDisk(share=0.25, files_per_chunk=0.25, file_chunks=(2, 2))
        """
        share = nbytes_stored / nbytes if nbytes_stored and nbytes else 1.0
        if is_one_file or chunks is None:
            return cls(share)
        if shards is None:
            return cls(share, 1.0)
        per_file = tuple(max(1, outer // max(1, inner)) for outer, inner in zip(shards, chunks, strict=True))
        return cls(share, 1 / math.prod(per_file), per_file)

    @property
    def opens(self) -> int:
        """How many times a rank opens a file before it reads a value."""
        return _OPENS_OF_STORE if self.files_per_chunk else _OPENS_OF_FILE

    @property
    def metadata_reads(self) -> int:
        """Reads of metadata by the first rank of a node that does."""
        return _READS_OF_STORE if self.files_per_chunk else _READS_OF_FILE


@dataclass(frozen=True, slots=True)
class FileReads:
    """What is fetched from the file system.

    Attributes
    ----------
    nbytes, operations : int
        By all nodes together; operations are reads, and opens with the reads of metadata.
    node_nbytes, readers_on_node : int
        By the busiest node, and how many ranks read there.
    reader_nbytes, reader_waits, reader_opens : int
        By the busiest reader, also from what its node's page cache has; the reads whose latency it waits for (while it reads on
        and on, what comes next is fetched already); opens after those of the array.
    in_vain : float
        What is read ahead and not wanted, for each byte that is. It is not in `nbytes`; it is in `operations`.
    """

    nbytes: int
    operations: int
    node_nbytes: int
    reader_nbytes: int
    reader_waits: int
    reader_opens: int
    readers_on_node: int
    in_vain: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What else a way of reading asks of the nodes.

    Attributes
    ----------
    core_seconds : float
        Seconds of the busiest rank, if nothing else limits it.
    n_readers, n_holders, n_ranks, per_node, n_threads : int
        Ranks that read, that hold shards, all of them, those of a node; threads of one that read chunks.
    decoded_nbytes, piece_nbytes : int
        Bytes decoded by the busiest reader, and of the fullest rank's pieces.
    between_nbytes : float
        Bytes that go from one node to another.
    n_blocks : int
        Blocks of the busiest reader: one is sent while the next is read.
    """

    core_seconds: float
    n_readers: int
    n_holders: int
    n_ranks: int
    per_node: int
    n_threads: int
    decoded_nbytes: int
    piece_nbytes: int
    between_nbytes: float
    n_blocks: int

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return -(-self.n_ranks // self.per_node)


def seconds_of(load: Load, reads: FileReads, machine: Machine, stored: OnDisk, file_nbytes: float) -> tuple[float, str]:
    """Seconds of a load, and the resource that takes longest. `file_nbytes` is the size of the file; infinity for many files.

    The resources are the busiest rank's cores and its stream of reads; a node's memory, network, and link to the file system;
    and for all nodes together the file system's bytes and its operations. Before that rank 0 opens the array, and then the
    readers do. The first block is read before anything can be sent, and the last one is sent when all are read.
    """
    of: dict[str, float] = {"cores": load.core_seconds}
    # Threads of a rank wait for the file system at the same time.
    wait = reads.reader_opens * machine.open_seconds + reads.reader_waits * machine.read_seconds
    with_ahead = 1 + reads.in_vain
    of["stream"] = (with_ahead * reads.reader_nbytes / machine.stream_rate + wait) / load.n_threads
    of["memory"] = (
        reads.readers_on_node * (2 * reads.reader_nbytes + load.decoded_nbytes) + 2 * load.per_node * load.piece_nbytes
    ) / machine.memory_rate
    n_ends = -(-load.n_readers // reads.readers_on_node), min(load.n_nodes, load.n_holders)
    of["network"] = load.between_nbytes / max(1, min(n_ends)) / machine.network_rate
    of["node's link"] = with_ahead * reads.node_nbytes / machine.node_rate
    of["file system"] = with_ahead * reads.nbytes / machine.file_rate(file_nbytes)
    of["operations"] = reads.operations / machine.operations_rate
    slowest = max(of, key=of.__getitem__)
    start = machine.network_latency * (load.between_nbytes > 0)
    if machine.has_file_system:
        start += 2 * stored.opens * machine.open_seconds + stored.metadata_reads * machine.read_seconds
        reading = max(of[name] for name in ("stream", "node's link", "file system", "operations"))
        start += min(reading, of["network"]) / max(1, load.n_blocks)
    return start + of[slowest], slowest


def count_file_reads(
    schedule: Schedule,
    layout: SourceLayout,
    machine: Machine,
    stored: OnDisk,
    per_node: int,
    n_readers: int,
    reader_nbytes: int,
) -> FileReads:
    """What a schedule fetches from the file system. `reader_nbytes` are the decoded bytes of its busiest reader."""
    if schedule.is_direct:
        return _of_direct(schedule, layout, machine, stored, per_node, n_readers)
    readers_on_node = _readers_on_node(schedule, per_node, n_readers)
    if layout.has_chunks:
        n_units, unit_nbytes = layout.chunks.n_cells, layout.chunk_nbytes * stored.share
    else:
        n_units, unit_nbytes = 1, math.prod(schedule.blocks.shape) * layout.file_dtype.itemsize
    nbytes = math.ceil(n_units * unit_nbytes)
    of_reader = min(nbytes, math.ceil(reader_nbytes * (stored.share if layout.has_chunks else 1.0)))
    # Chunks of a block follow each other in the file: small ones are fetched together, if there is a cache to keep them.
    is_ahead = not stored.files_per_chunk and machine.page_cache_nbytes > 0
    request = machine.read_ahead_nbytes if is_ahead else min(machine.read_ahead_nbytes, max(1, math.ceil(unit_nbytes)))
    of_each = _files_of_range(layout.chunks.counts, stored, -(-n_units // n_readers))
    opens = max(math.ceil(n_units * stored.files_per_chunk), n_readers * of_each if stored.file_chunks else 0)
    return FileReads(
        nbytes=nbytes,
        operations=max(n_readers, math.ceil(nbytes / request))
        + opens * _per_file(stored)
        + _opening(stored, machine, n_readers, -(-n_readers // readers_on_node)),
        node_nbytes=min(nbytes, readers_on_node * of_reader),
        reader_nbytes=of_reader,
        reader_waits=(1 if is_ahead else math.ceil(of_reader / request)) + (of_each if stored.file_chunks else 0),
        reader_opens=of_each if stored.files_per_chunk else 0,
        readers_on_node=readers_on_node,
    )


def _opening(stored: OnDisk, machine: Machine, n_readers: int, n_nodes: int) -> int:
    """Operations by which readers on so many nodes open the array: what one has read of the metadata is there for its node."""
    return n_readers * stored.opens + (n_nodes if machine.page_cache_nbytes else n_readers) * stored.metadata_reads


def _per_file(stored: OnDisk) -> int:
    """Operations for a file beside the reads of its chunks: an open, and for several chunks a read of where they are."""
    return 2 if stored.file_chunks else 1


def _files_of_range(counts: Sequence[int], stored: OnDisk, n: int) -> int:
    """The files that a reader opens which has `n` chunks, one after the other in C order.

    >>> of = OnDisk(1.0, 1 / 8, (2, 2, 2))
    >>> [_files_of_range((4, 4, 4), of, n) for n in (1, 4, 8, 16, 32, 64)]
    [1, 2, 2, 4, 4, 8]
    """
    if not stored.file_chunks:
        return math.ceil(n * stored.files_per_chunk)
    per_file = stored.file_chunks
    axis = next((k for k in range(len(counts) - 1) if n >= math.prod(counts[k + 1 :])), len(counts) - 1)
    thick = min(counts[axis], -(-n // math.prod(counts[axis + 1 :])))
    is_aligned = thick >= counts[axis] or thick % per_file[axis] == 0 or per_file[axis] % thick == 0
    met = -(-thick // per_file[axis]) + (not is_aligned)
    return int(met * math.prod(-(-c // f) for c, f in zip(counts[axis + 1 :], per_file[axis + 1 :], strict=True)))


def _readers_on_node(schedule: Schedule, per_node: int, n_readers: int) -> int:
    """Readers of the node that has most, if each block has an owner. The owners are spread evenly over the ranks."""
    n_blocks, n_ranks = schedule.blocks.n_cells, schedule.n_ranks
    if n_blocks >= schedule.strategy.n_owners_of(n_ranks):  # each owner has a block
        of = schedule.strategy
        return of.most_on_node(n_ranks, per_node) if isinstance(of, Parallel) else 1
    if n_blocks > _MOST_COUNTED:
        return min(per_node, 1 + -(-n_readers * per_node // n_ranks))
    return int(np.bincount(schedule.owners(np.arange(n_blocks)) // per_node).max(initial=1))


def _of_direct(
    schedule: Schedule, layout: SourceLayout, machine: Machine, stored: OnDisk, per_node: int, n_readers: int
) -> FileReads:
    """Each rank fetches what it holds, as chunks or, without chunks, as runs with the gaps between near ones."""
    is_ahead = machine.has_file_system and machine.page_cache_nbytes > 0 and not stored.files_per_chunk
    vain = 0.0
    if layout.has_chunks:
        units, unit_nbytes = layout, layout.chunk_nbytes * stored.share
        n_in_run, n_in_gap = _chunks_in_run(schedule, layout) if is_ahead else (1, 0)
        run_nbytes = unit_nbytes * n_in_run
        if n_in_run > 1:
            vain = min(n_in_gap * unit_nbytes, machine.read_ahead_nbytes, _AHEAD_PER_RUN * run_nbytes) / run_nbytes
    else:
        units, unit_nbytes, run_nbytes = _spans(schedule, layout)
    request = min(run_nbytes, machine.read_ahead_nbytes)
    if not layout.has_chunks and machine.page_cache_nbytes and machine.has_file_system:
        unit_nbytes *= max(1.0, _PAGE_NBYTES / run_nbytes)  # of a short run its page is fetched
        request = max(request, _PAGE_NBYTES)
    met, busiest = count_direct(schedule, units)
    total, of_node = count_direct_of_nodes(schedule, units, per_node)
    if of_node * unit_nbytes > machine.page_cache_nbytes:  # what one rank has read is gone when the next one asks
        total, of_node = met, min(met, busiest * per_node)
    nbytes, reader_nbytes = math.ceil(total * unit_nbytes), math.ceil(busiest * unit_nbytes)
    opens = of_reader = 0
    if layout.has_chunks and stored.files_per_chunk:
        opens, of_reader = count_direct(schedule, _by_file(layout, stored)) if stored.file_chunks else (total, busiest)
    request, n_nodes = max(1.0, request), min(n_readers, -(-schedule.n_ranks // per_node))
    waits = math.ceil(reader_nbytes / max(1.0, run_nbytes if is_ahead and layout.has_chunks else request))
    return FileReads(
        nbytes=nbytes,
        operations=math.ceil((1 + vain) * nbytes / request)
        + opens * _per_file(stored)
        + _opening(stored, machine, n_readers, n_nodes),
        node_nbytes=math.ceil(of_node * unit_nbytes),
        reader_nbytes=reader_nbytes,
        reader_waits=waits + (of_reader if stored.file_chunks else 0),
        reader_opens=of_reader,
        readers_on_node=min(per_node, n_readers),
        in_vain=vain,
    )


def _chunks_in_run(schedule: Schedule, layout: SourceLayout) -> tuple[int, int]:
    """Chunks of a rank that follow each other in the file, so that what comes next is read ahead; and those up to its next."""
    counts = layout.chunks.counts
    met = [min(n, -(-e // c)) for n, e, c in zip(counts, schedule.extent, layout.chunks.cell, strict=True)]
    n_runs = count_runs(counts, met)
    in_run = max(1, math.prod(met) // max(1, n_runs))
    return in_run, max(0, run_stride(counts, met) - in_run) if n_runs > 1 else 0


def _by_file(layout: SourceLayout, stored: OnDisk) -> SourceLayout:
    """The same array with its files in the place of chunks."""
    cell = tuple(c * f for c, f in zip(layout.chunks.cell, stored.file_chunks, strict=True))
    return replace(layout, chunks=Grid(layout.chunks.shape, cell, layout.chunks.phase))


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
