"""How long do the resources take that ranks share: the memory and network of a node, and the file system of the job?

Pure, like `cost`, which asks only for machines that have limits.

1. `count_file_reads`: what the ranks fetch from the file system, in bytes and in operations. What several ranks of a node read
   counts once if the node's page cache can hold it, and is exact where `traffic.count_direct` is.
2. `seconds_of`: the seconds of each resource. A load takes as long as the slowest, so no estimate beats any of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from shardload.planning.blocks import NEAR_NBYTES, count_runs, run_stride
from shardload.planning.grid import Grid
from shardload.planning.machine import Machine
from shardload.planning.schedule import Schedule
from shardload.planning.source_layout import SourceLayout
from shardload.planning.traffic import count_direct, count_direct_of_nodes

__all__ = ["FileReads", "Load", "Stored", "count_file_reads", "seconds_of"]

_OPEN_OPERATIONS = 8  # an open of a file, and the small reads of its metadata
_MOST_COUNTED = 1 << 14  # blocks whose owners are counted one by one
_PAGE_NBYTES = 4096  # the least that a file system with a page cache fetches


@dataclass(frozen=True, slots=True)
class Stored:
    """How the values of a file lie on disk.

    Attributes
    ----------
    share : float
        Bytes stored for each decoded byte; 1.0 if it is not known.
    files_per_chunk : float
        Files to open for each chunk: 0 if all chunks are in one file, 1 for a Zarr store without shards.
    """

    share: float = 1.0
    files_per_chunk: float = 0.0

    @classmethod
    def of(
        cls,
        nbytes_stored: int | None,
        nbytes: int,
        chunks: tuple[int, ...] | None = None,
        shards: tuple[int, ...] | None = None,
        is_one_file: bool = True,
    ) -> Stored:
        """From an array's metadata.

        >>> Stored.of(30, 120, (8, 8), (16, 16), is_one_file=False)
        Stored(share=0.25, files_per_chunk=0.25)
        """
        share = nbytes_stored / nbytes if nbytes_stored and nbytes else 1.0
        if is_one_file or chunks is None:
            return cls(share)
        return cls(share, math.prod(chunks) / max(1, math.prod(shards or chunks)))


@dataclass(frozen=True, slots=True)
class FileReads:
    """What is fetched from the file system.

    Attributes
    ----------
    nbytes, operations : int
        By all nodes together; operations are reads, and opens with the reads of metadata.
    node_nbytes, readers_on_node : int
        By the busiest node, and how many ranks read there.
    reader_nbytes, reader_operations, reader_opens : int
        By the busiest reader, also from what its node's page cache has; opens after the first.
    is_in_order : bool
        True if readers read on and on, so that what comes next is fetched while they work.
    """

    nbytes: int
    operations: int
    node_nbytes: int
    reader_nbytes: int
    reader_operations: int
    reader_opens: int
    is_in_order: bool
    readers_on_node: int


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

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return -(-self.n_ranks // self.per_node)


def seconds_of(load: Load, reads: FileReads, machine: Machine, file_nbytes: float) -> tuple[float, str]:
    """Seconds of a load, and the resource that takes longest. `file_nbytes` is the size of the file; infinity for many files.

    The resources are the busiest rank's cores and its stream of reads; a node's memory, network, and link to the file system;
    and for all nodes together the file system's bytes and its operations.
    """
    of: dict[str, float] = {"cores": load.core_seconds}
    # Threads of a rank wait for the file system at the same time.
    wait = reads.reader_opens * machine.open_seconds
    wait += 0.0 if reads.is_in_order else reads.reader_operations * machine.read_seconds
    of["stream"] = (reads.reader_nbytes / machine.stream_rate + wait) / load.n_threads
    of["memory"] = (
        reads.readers_on_node * (2 * reads.reader_nbytes + load.decoded_nbytes) + 2 * load.per_node * load.piece_nbytes
    ) / machine.memory_rate
    n_ends = min(load.n_nodes, load.n_readers), min(load.n_nodes, load.n_holders)
    of["network"] = load.between_nbytes / max(1, min(n_ends)) / machine.network_rate
    of["node's link"] = reads.node_nbytes / machine.node_rate
    of["file system"] = reads.nbytes / machine.file_rate(file_nbytes)
    of["operations"] = reads.operations / machine.operations_rate
    slowest = max(of, key=of.__getitem__)
    start = 0.0
    if machine.has_file_system:
        start = machine.open_seconds + _OPEN_OPERATIONS * machine.read_seconds
    return start + machine.network_latency * (load.between_nbytes > 0) + of[slowest], slowest


def count_file_reads(
    schedule: Schedule,
    layout: SourceLayout,
    machine: Machine,
    stored: Stored,
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
    opens = math.ceil(n_units * stored.files_per_chunk)
    return FileReads(
        nbytes=nbytes,
        operations=max(n_readers, math.ceil(nbytes / request)) + opens + _OPEN_OPERATIONS * n_readers,
        node_nbytes=min(nbytes, readers_on_node * of_reader),
        reader_nbytes=of_reader,
        reader_operations=math.ceil(of_reader / request),
        reader_opens=math.ceil(opens / n_readers) if stored.files_per_chunk else 0,
        is_in_order=is_ahead,
        readers_on_node=readers_on_node,
    )


def _readers_on_node(schedule: Schedule, per_node: int, n_readers: int) -> int:
    """Readers of the node that has most, if each block has an owner. The owners are spread evenly over the ranks."""
    n_blocks, n_ranks = schedule.blocks.n_cells, schedule.n_ranks
    if n_blocks >= schedule.strategy.n_owners_of(n_ranks):  # each owner has a block
        return min(per_node, -(-n_readers * per_node // n_ranks))
    if n_blocks > _MOST_COUNTED:
        return min(per_node, 1 + -(-n_readers * per_node // n_ranks))
    return int(np.bincount(schedule.owners(np.arange(n_blocks)) // per_node).max(initial=1))


def _of_direct(
    schedule: Schedule, layout: SourceLayout, machine: Machine, stored: Stored, per_node: int, n_readers: int
) -> FileReads:
    """Each rank fetches what it holds, as chunks or, without chunks, as runs with the gaps between near ones."""
    if layout.has_chunks:
        units, unit_nbytes = layout, layout.chunk_nbytes * stored.share
        request = min(unit_nbytes, machine.read_ahead_nbytes)
    else:
        units, unit_nbytes, span_nbytes = _spans(schedule, layout)
        request = min(span_nbytes, machine.read_ahead_nbytes)
        if machine.page_cache_nbytes and machine.has_file_system:
            unit_nbytes *= max(1.0, _PAGE_NBYTES / span_nbytes)  # of a short run its page is fetched
            request = max(request, _PAGE_NBYTES)
    met, busiest = count_direct(schedule, units)
    total, of_node = count_direct_of_nodes(schedule, units, per_node)
    if of_node * unit_nbytes > machine.page_cache_nbytes:  # what one rank has read is gone when the next one asks
        total, of_node = met, min(met, busiest * per_node)
    nbytes, reader_nbytes = math.ceil(total * unit_nbytes), math.ceil(busiest * unit_nbytes)
    opens = stored.files_per_chunk if layout.has_chunks else 0.0
    request = max(1.0, request)
    return FileReads(
        nbytes=nbytes,
        operations=math.ceil(nbytes / request) + math.ceil(total * opens) + _OPEN_OPERATIONS * n_readers,
        node_nbytes=math.ceil(of_node * unit_nbytes),
        reader_nbytes=reader_nbytes,
        reader_operations=math.ceil(reader_nbytes / request),
        reader_opens=math.ceil(busiest * opens),
        is_in_order=False,
        readers_on_node=min(per_node, n_readers),
    )


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
