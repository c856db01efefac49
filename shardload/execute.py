"""What will a load do, and how is it done?

A `Plan` is what the caller inspects, prints and executes. Executing it is one line: open and make room, agree, read and
exchange, assemble, agree.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardload.assemble import assemble
from shardload.cost import Cost
from shardload.describe import describe_plan
from shardload.errors import ConfigError, SourceError
from shardload.exchange import Piece, exchange
from shardload.group import Group
from shardload.options import Options, pad_value
from shardload.plan import Grid, ReadPlan
from shardload.progress import progress_of
from shardload.reader import SourceReader, aligned_empty
from shardload.region import Region, Selection
from shardload.sources import open_source
from shardload.sources.base import ArrayInfo, Source
from shardload.sources.memory import MemorySource

__all__ = ["Job", "LoadReport", "Plan"]


@dataclass(frozen=True)
class LoadReport:
    """What an executed plan did.

    Attributes
    ----------
    seconds : float
        On this rank, from the start of `execute` to the assembled array.
    chunks_decoded : int
        Chunk decodes in the whole job, counted as they happened (0 where the file has no chunks).
    nbytes_read : int
        Bytes of values read from the file in the whole job.
    """

    seconds: float
    chunks_decoded: int
    nbytes_read: int


@dataclass(eq=False)
class Plan:
    """What a load will do: inspect it, print it, `execute` it.

    Attributes
    ----------
    info : ArrayInfo
        The array in the file: name, format, shape, dtype, chunks, codec.
    shape, shape_global : tuple of int
        The true shape that is loaded (after `select`), and the shape of the jax.Array (padded, where it was padded).
    dtype : dtype
        Of the jax.Array.
    sharding : NamedSharding
        Of the jax.Array.
    decomposition : str
        ``"slab"``, ``"pencil"``, ``"block"``, ``"replicated"`` or ``"whole"``.
    shard_shape : tuple of int
        What one device holds.
    n_replicas : int
        Devices that hold each shard.
    n_ranks : int
        Ranks that take part.
    readers : str
        The way of reading that is taken: ``"root"``, ``"parallel"`` or ``"direct"``.
    n_readers : int
        Ranks that read.
    why : str
        Why this way.
    costs : mapping of str to Cost
        For each way of reading: chunks decoded, amplification, messages, bytes, memory, estimated seconds.
    staging_nbytes : int
        The cap on host memory beyond the pieces.
    report : LoadReport or None
        What happened, after `execute`.
    """

    info: ArrayInfo
    shape: tuple[int, ...]
    shape_global: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: NamedSharding
    decomposition: str
    shard_shape: tuple[int, ...]
    n_replicas: int
    n_ranks: int
    readers: str
    n_readers: int
    why: str
    costs: Mapping[str, Cost]
    staging_nbytes: int
    report: LoadReport | None = field(default=None, init=False)
    _job: Job = field(repr=False, kw_only=True)

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The file's chunk shape; None where it has no chunks."""
        return self.info.chunks

    @property
    def read_plan(self) -> ReadPlan:
        """Who reads what, and who needs which part of it: region by region."""
        return self._job.read_plan

    def __str__(self) -> str:
        """For a person."""
        return describe_plan(self)

    def execute(self) -> jax.Array:
        """Do it. Collective: yes, over the ranks that planned. May be called again.

        Returns
        -------
        jax.Array
            See `load`.

        Raises
        ------
        SourceError, PeerError, ConfigError
            On every rank.
        """
        started = time.perf_counter()
        array, (chunks_decoded, nbytes_read) = self._job.run(self)
        self.report = LoadReport(time.perf_counter() - started, chunks_decoded, nbytes_read)
        return array


@dataclass(eq=False)
class Job:
    """What `Plan.execute` needs and nobody looks at.

    Attributes
    ----------
    group : Group or None
        The ranks; None for an abstract mesh, which cannot be executed.
    handle : object
        A path, an open array, or a source in memory (None on the ranks that do not have it).
    n_buffers, pack_nbytes : int
        Staging buffers to read into, and as many of `pack_nbytes` to pack parts into.
    """

    group: Group | None
    options: Options
    read_plan: ReadPlan
    selection: Selection
    chunks: Grid
    has_chunks: bool
    dtype: np.dtype[Any]
    handle: Any
    n_buffers: int
    pack_nbytes: int

    def run(self, made: Plan) -> tuple[jax.Array, tuple[int, int]]:
        """Open and make room, agree, read and exchange, assemble, agree. Collective."""
        group = self.group
        if group is None:
            raise ConfigError(
                "this plan is over an AbstractMesh, which has no devices: plan over a jax.sharding.Mesh to execute"
            )
        source: Source | None = None
        array, counts = None, [0, 0]
        pieces: dict[int, Piece] = {}
        error: BaseException | None = None
        try:
            try:
                source = self._open(made.info, group.rank)
                pieces = self._make_pieces(group.rank)
            except Exception as found:
                error = found
            group.agree(error)  # a rank that cannot read or receive must say so before anything is sent
            try:
                array, counts, error = self._fill(made, source, pieces, group)
            except Exception as found:
                error = found
        finally:
            if source is not None and source is not self.handle:
                source.close()
        sums = group.agree(error, counts)
        if array is None:
            raise ConfigError("nothing was loaded")
        return array, (sums[0], sums[1])

    def _open(self, info: ArrayInfo, rank: int) -> Source | None:
        """The source, on the ranks that read; it must be what the plan was made for."""
        if not self.read_plan.is_reader(rank):
            return None
        if isinstance(self.handle, MemorySource):
            return self.handle
        source = open_source(self.handle, info.dataset)
        found = source.info
        if (found.shape, found.dtype, found.chunks) != (info.shape, info.dtype, info.chunks):
            source.close()
            raise SourceError(
                f"{found} has shape {found.shape}, {found.dtype}, chunks {found.chunks} here, but the plan was made for "
                f"{info.shape}, {info.dtype}, {info.chunks}: the file has changed, or this rank sees another file",
                path=info.path,
                dataset=info.dataset,
            )
        return source

    def _fill(
        self, made: Plan, source: Source | None, pieces: dict[int, Piece], group: Group
    ) -> tuple[jax.Array | None, list[int], BaseException | None]:
        """Read, exchange, assemble. What goes wrong is returned: the ranks still have to agree on it."""
        reader = SourceReader(
            source or _nothing_to_read(made.info),
            self.selection,
            self.chunks,
            has_chunks=self.has_chunks,
            block_size=self.read_plan.max_read_size,
            n_buffers=self.n_buffers,
            dtype=self.dtype,
            pieces=pieces,
            rank=group.rank,
        )
        total = sum(p.data.nbytes for p in pieces.values())
        with progress_of(self.options.progress, str(made.info), total, group.rank) as advance:
            failed = exchange(
                group,
                self.read_plan,
                reader,
                pieces,
                pack_nbytes=self.pack_nbytes,
                n_pack=self.n_buffers,
                checksums=self.options.checksums,
                on_progress=advance,
            )
        counts = [reader.chunks_decoded, reader.nbytes_read]
        if failed is not None:
            return None, counts, failed
        held = ((p.region, p.data) for p in pieces.values())
        return assemble(made.shape_global, made.sharding, self.dtype, held), counts, None

    def _make_pieces(self, rank: int) -> dict[int, Piece]:
        """Buffers for this rank's shards; the padded tails are filled, the rest is to be written by the exchange."""
        pieces = {}
        for shard in self.read_plan.shards.shards_of(rank):
            region = self.read_plan.shards.region(shard)
            piece = Piece(region, aligned_empty(region.shape, self.dtype))
            held = self.read_plan.true_region(shard)
            if held != region:
                self._fill_tails(piece, held)
            pieces[shard] = piece
        return pieces

    def _fill_tails(self, piece: Piece, held: Region | None) -> None:
        value = pad_value(self.options.pad, self.dtype) if piece.region.size else 0
        if held is None:
            piece.data[...] = value
            return
        for axis, (end, stop) in enumerate(zip(held.stop, piece.region.stop, strict=True)):
            if end < stop:
                tail = [slice(None)] * piece.data.ndim
                tail[axis] = slice(end - piece.region.start[axis], None)
                piece.data[tuple(tail)] = value


def _nothing_to_read(info: ArrayInfo) -> Source:
    """A source for a rank that reads nothing."""
    return MemorySource(np.empty((0,) * len(info.shape), dtype=np.dtype(info.dtype)))
