"""What will a load do? The caller inspects a `Plan`, prints it and executes it.

A plan has facts only: it is frozen, and holds no group of ranks and no open file. An executor is passed in for `Plan.execute`;
it finds the ranks by their communicator when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardload.arrays.padding import Extent, version_of
from shardload.arrays.sharding import describe_decomposition
from shardload.errors import ConfigError
from shardload.formats.contract.array import ArrayInfo
from shardload.jobs.consistency import Version
from shardload.jobs.loading.describe import describe_plan, describe_plan_in_a_line
from shardload.jobs.loading.report import LoadReport
from shardload.planning.cost import Cost, plan_cost
from shardload.planning.schedule import Schedule
from shardload.planning.source_layout import SourceLayout
from shardload.planning.staging import Staging, plan_staging
from shardload.system.terminal import WIDTH, width_of_prints
from shardload.units import as_html
from shardload.values.decoding import Decoding

NO_DEVICES = "an AbstractMesh has no devices, so there is nothing to execute this plan on: plan over a jax.sharding.Mesh"
Executor = Callable[[], Any]  # returns what was loaded: `arrays`, `report`


@dataclass(frozen=True, eq=False)
class LoadLayout:
    """How an array lies in its file and over the ranks, and how many threads may read it.

    Attributes
    ----------
    source : SourceLayout
        How it lies in the file.
    schedule : Schedule
        Which rank reads which block, and which rank needs which part of it.
    decoding : Decoding or None
        How stored numbers become values; None if they are only cast.
    n_threads : int
        Chunks that a rank may decode at once, if `staging` has room.
    ahead_nbytes : int
        Bytes of stored values that a reader may have fetched from a store, beside `staging`, before it needs them.
    """

    source: SourceLayout
    schedule: Schedule
    n_threads: int = 1
    decoding: Decoding | None = None
    ahead_nbytes: int = 0

    def staging(self, cap_nbytes: int) -> Staging:
        """How the memory under a cap is used if this array is loaded alone."""
        return plan_staging([(self.schedule, self.source)], cap_nbytes, self.n_threads)

    def cost(self, cap_nbytes: int, n_nodes: int = 1) -> Cost:
        """What a load costs; with a cap of 0 there are no staging buffers."""
        n_blocks = self.staging(cap_nbytes).n_blocks if cap_nbytes else 0
        cost = plan_cost(self.schedule, self.source, staging_blocks=n_blocks, is_one_node=n_nodes == 1)
        return replace(cost, peak_nbytes=cost.peak_nbytes + min(self.ahead_nbytes, cost.reader_nbytes))

    @property
    def nbytes(self) -> int:
        """Bytes of the values that are loaded, without padding, each counted once."""
        return math.prod(self.schedule.blocks.shape) * self.source.dtype.itemsize

    @property
    def extent(self) -> Extent:
        """Which elements of the jax.Array are the file's, and which are padding or halo."""
        shards = self.schedule.shards
        return Extent(self.schedule.blocks.shape, shards.shape_global, shards.cuts, shards.halo.widths)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What a load will do: inspect it, print it, `execute` it.

    Attributes
    ----------
    info : ArrayInfo
        The array in the file: name, format, shape, dtype, chunks, codec.
    sharding : NamedSharding
        Sharding of the jax.Array.
    readers : str
        The chosen way of reading: ``"root"``, ``"parallel"`` or ``"direct"``.
    why : str
        The reason for this way.
    staging_nbytes : int
        Cap on each process's host memory beyond its own pieces.
    staging_is_raised : bool
        True if ``staging="auto"`` is more than usual, because the chunks need it.
    is_decoded : bool
        True if the caller asked for values and not for stored numbers. (They may be the same.)
    n_nodes : int
        Number of nodes of the ranks; 1 if nothing is known of them.
    """

    info: ArrayInfo
    sharding: NamedSharding
    readers: str
    why: str
    staging_nbytes: int
    staging_is_raised: bool = field(default=False, kw_only=True)
    is_decoded: bool = field(default=False, kw_only=True)
    n_nodes: int = field(default=1, kw_only=True)
    _layouts: Mapping[str, LoadLayout] = field(kw_only=True)  # for each way of reading
    _executor: Executor | None = field(default=None, kw_only=True)
    # Of the last execution, or nothing. Only this changes in a plan, and each copy has its own.
    _reports: list[LoadReport] = field(default_factory=list, init=False)
    _versions: list[Version | None] = field(default_factory=list, init=False)  # of the file that it read

    @property
    def _layout(self) -> LoadLayout:
        return self._layouts[self.readers]

    @property
    def _version(self) -> Version | None:
        """Which version of the file the last `execute` has read; None before, or if nothing says so."""
        return self._versions[-1] if self._versions else None

    @property
    def report(self) -> LoadReport | None:
        """The report of the last `execute`; None before."""
        return self._reports[-1] if self._reports else None

    @property
    def schedule(self) -> Schedule:
        """Which rank reads which block, and which rank needs which part of it."""
        return self._layout.schedule

    @property
    def costs(self) -> dict[str, Cost]:
        """For each way of reading: chunks decoded, amplification, messages, bytes, memory."""
        return {way: layout.cost(self.staging_nbytes, self.n_nodes) for way, layout in self._layouts.items()}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that is loaded: after `select`, without padding and halos."""
        return self.schedule.blocks.shape

    @property
    def shape_global(self) -> tuple[int, ...]:
        """The shape of the jax.Array, with padding and halos."""
        return self.schedule.shards.shape_global

    @property
    def shape_padded(self) -> tuple[int, ...]:
        """The shape with padding, without halos."""
        return self.extent.shape_without_halo

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of the shard that one device holds."""
        return self.schedule.shards.shard_shape

    @property
    def n_replicas(self) -> int:
        """Number of devices that hold each shard."""
        return self.schedule.shards.n_replicas

    @property
    def n_ranks(self) -> int:
        """Number of ranks that take part."""
        return self.schedule.n_ranks

    @property
    def n_readers(self) -> int:
        """Number of ranks that read."""
        return self.schedule.n_readers

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the jax.Array."""
        return self._layout.source.dtype

    @property
    def decomposition(self) -> str:
        """``"slab"``, ``"pencil"``, ``"block"``, ``"replicated"`` or ``"whole"``."""
        return describe_decomposition(self.schedule.shards)

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The file's chunk shape; None if it has no chunks."""
        return self.info.chunks

    @property
    def decoded_dtype(self) -> np.dtype[Any] | None:
        """Type of the decoded values, before a cast to `dtype`; None if decoding does not change the stored numbers."""
        return None if self._layout.decoding is None else self._layout.decoding.dtype

    @property
    def extent(self) -> Extent:
        """Which elements of the jax.Array are the file's, and which are padding or halo."""
        return self._layout.extent

    @property
    def halo_text(self) -> str:
        """The halo as text: width and edge rule of each axis that has one. Empty without a halo."""
        return str(self.schedule.shards.halo)

    @property
    def nbytes(self) -> int:
        """Bytes of the jax.Array, each counted once."""
        return math.prod(self.shape_global) * self.dtype.itemsize

    @property
    def ahead_nbytes(self) -> int:
        """Bytes that a rank may have fetched from a store before it needs them, beside `staging`; 0 for local files."""
        return self._layout.ahead_nbytes

    @property
    def pieces_nbytes(self) -> int:
        """Bytes of the pieces of the fullest rank."""
        shards = self.schedule.shards
        return math.prod(shards.shard_shape) * self.dtype.itemsize * shards.most_held

    def __str__(self) -> str:
        """Text for a person, as wide as the terminal. Without a terminal it is exactly the same on all ranks."""
        return describe_plan(self, width_of_prints())

    def __repr__(self) -> str:
        """One line."""
        return describe_plan_in_a_line(self)

    def _repr_html_(self) -> str:
        """HTML for a notebook: the text."""
        return as_html(describe_plan(self, WIDTH))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the plan with its present report, in a list of its own."""
        return {**vars(self), "_reports": list(self._reports)}

    def execute(self) -> jax.Array:
        """Load the array. Collective: yes, over the ranks that planned. May be called again.

        Returns
        -------
        jax.Array
            As from `load`.

        Raises
        ------
        SourceError, PeerError, ConfigError
            On every rank.
        """
        if self._executor is None:
            raise ConfigError(NO_DEVICES)
        loaded = self._executor()
        array: jax.Array = loaded.arrays[0]
        self._reports[:] = [loaded.report]
        self._versions[:] = [version_of(array)]
        return array


def staging_of(plans: Sequence[Plan]) -> Staging:
    """How some arrays together use the memory under their cap."""
    layouts = list({id(plan._layout): plan._layout for plan in plans}.values())
    n_threads = max(layout.n_threads for layout in layouts)
    return plan_staging([(layout.schedule, layout.source) for layout in layouts], plans[0].staging_nbytes, n_threads)
