"""How are arrays saved? The steps of one call, from its arguments to its report.

1. Each rank checks its arguments and plans the file (`plan`). All compare both, in the messages with which every call
   begins.
2. Replicas are compared.
3. In rounds, parts travel from the shards to the owners of chunks, by the exchange that loads use (`PiecesToBlocks`). What an
   owner holds itself does not travel.
4. `writing.file.write_file` encodes and writes these rounds, reads the file back, and gives it its name.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardload.arrays.disassemble import ShardSender
from shardload.arrays.local_shards import LocalShards, check_replicas
from shardload.comm.group import Group, Invocation
from shardload.engine.call import begin_call, unforeseen
from shardload.engine.ring import Ring
from shardload.engine.session import Session
from shardload.errors import (
    ConfigError,
    LeftOutWarning,
    PaddingWarning,
    ShardloadWarning,
    SourceError,
    StallError,
)
from shardload.jobs.progress import progress_of
from shardload.jobs.saving.arguments import SaveArguments
from shardload.jobs.saving.like import apply_like, read_like
from shardload.jobs.saving.plan import SavePlan, plan_file
from shardload.jobs.writing.file import Values, Written, write_file
from shardload.options import INDEX, TIMEOUT
from shardload.planning.blocks import aligned
from shardload.planning.region import Region
from shardload.planning.rounds import Item
from shardload.planning.saving import HolderLayout, OwnerLayout, count_buffers, part_nbytes
from shardload.planning.tuning import default_tuning
from shardload.system.caller import warn_once
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.moves import ArrayMove, PiecesToBlocks
from shardload.units import counted, format_nbytes, number_text

__all__ = ["SaveReport", "Saving", "Steps", "plan_save", "planned", "save"]

_log = logging.getLogger("shardload")

Array = np.ndarray[Any, Any]

_NOTHING_SAVED = (
    "Nothing was saved, because nobody knows which of them are right. Was the array made from data that differed from process "
    "to process?"
)


@dataclass(frozen=True)
class SaveReport:
    """What a save did.

    Attributes
    ----------
    path, format : str
        The new file.
    seconds : float
        Seconds on this rank.
    n_arrays, n_chunks : int
        Arrays, and chunks of them (a part of an array in one piece counts as a chunk), in the whole job.
    nbytes, nbytes_stored : int
        Bytes of the values, and of the stored chunks, in the whole job.
    nbytes_sent : int
        Bytes of parts that this rank got from others.
    n_read_back, n_decoded : int
        Chunks of which another rank read the stored bytes back, and of which it decoded the values. All were as written.
    n_rounds : int
        Rounds.
    writers : str
        Who wrote: ``"all"`` ranks that own chunks, or ``"root"``, and why.
    phases : mapping of str to float
        Seconds of this rank: ``"exchange"``; ``"encode"`` and ``"write"``, summed over its threads; ``"sync"``, ``"finish"``,
        ``"read back"``. They overlap.
    """

    path: str
    format: str
    seconds: float
    n_arrays: int
    n_chunks: int
    nbytes: int
    nbytes_stored: int
    nbytes_sent: int
    n_read_back: int
    n_decoded: int
    n_rounds: int
    writers: str
    phases: Mapping[str, float]

    def __str__(self) -> str:
        """For a person: one line."""
        arrays = counted(self.n_arrays, "array")
        phases = "; ".join(f"{name} {number_text(seconds, 3)} s" for name, seconds in self.phases.items() if seconds >= 5e-4)
        read = f"{self.n_read_back:,} read back, {self.n_decoded:,} of them decoded" if self.n_read_back else "none read back"
        writers = "" if self.writers == "all" else f"written by {self.writers}; "
        return (
            f"saved '{self.path}' ({self.format}) in {number_text(self.seconds, 3)} s: {arrays}, "
            f"{counted(self.n_chunks, 'chunk')}, {format_nbytes(self.nbytes)} as "
            f"{format_nbytes(self.nbytes_stored)}; {read}; {writers}on this rank: {phases}"
        )


class Steps:
    """What a call does before it writes. These are those of a save."""

    verb = "save as"

    def arguments(self, path: Any, tree: Any, given: Mapping[str, Any], call: str) -> SaveArguments:
        """The checked arguments."""
        return SaveArguments.of(path, tree, given, call)

    def read(self, asked: SaveArguments) -> str:
        """What must be read from existing files: on rank 0, for all."""
        like = {array.name: array.like for array in asked.arrays if array.like is not None}
        return read_like(like) if like else ""

    def plan(self, asked: SaveArguments, told: str, group: Group) -> tuple[SaveArguments, SavePlan]:
        """The plan, when all ranks know what was read; and the arguments with what comes from there."""
        asked = apply_like(asked, told) if told else asked
        return asked, plan_file(asked, group)


@contextmanager
def planned(
    call: str, path: Any, tree: Any, given: Mapping[str, Any], comm: Any, steps: Steps | None = None
) -> Iterator[tuple[Group, SaveArguments, SavePlan, str]]:
    """Check the arguments, plan, and agree on both. Inside, all ranks are in one call."""
    steps = Steps() if steps is None else steps
    asked: SaveArguments | None = None
    error: BaseException | None = None
    try:
        asked = steps.arguments(path, tree, given, call)
    except (ConfigError, SourceError) as found:  # of the file, if a plan is asked for names of axes
        error = found
    except Exception as found:
        error = unforeseen(found)
    timeout = TIMEOUT if asked is None else asked.options.timeout
    invocation = _invocation(call, f"{steps.verb} {path!r}", asked)
    with begin_call(invocation, error, comm=comm, timeout=timeout, process=jax.process_index) as begun:
        del error  # see `Call.plan`
        group = begun.group

        def known() -> SaveArguments:
            if asked is None:
                raise ValueError("the arguments are wrong, and nobody may ask for them")
            return asked

        def find() -> str:
            return json.dumps([known().names, known().padding_warning(), steps.read(known())])

        def make(told: str) -> tuple[str, SaveArguments, SavePlan]:
            names, padded, read = json.loads(told)
            return (padded, *steps.plan(known().in_order_of(names), read, group))

        padded, settled, plan = begun.plan(find, make, lambda made: made[2].describe())
        for text, kind in ((padded, PaddingWarning), (settled.left_out, LeftOutWarning)):
            if text:
                _warn(text, kind, group)
        yield group, settled, plan, f"{begun.asked.digest:016x}"


def _warn(text: str, kind: type[ShardloadWarning], group: Group) -> None:
    """Warn once in the job, before anything is written. If warnings are errors on any rank, all raise this one. Collective."""
    is_error = False
    try:
        warn_once(text, kind, group.rank)
    except kind:
        is_error = True
    if any(group.sum_ints([is_error])):
        raise kind(text)


def _invocation(call: str, title: str, asked: SaveArguments | None) -> Invocation:
    """What the ranks compare. If the arguments are wrong, the error is what they agree on."""
    if asked is None:
        return Invocation(call, title, {})
    names = sorted(asked.names)  # the order of a dict, or of a Dataset, means nothing
    own = [(f"'{one.name}'", one.describe()) for one in asked.in_order_of(names).arrays]
    return Invocation(call, title, asked.describe(), tuple(names), own)


def plan_save(path: Any, tree: Any, given: Mapping[str, Any], comm: Any) -> SavePlan:
    """See `shardload.plan_save`. Collective."""
    with planned("plan_save", path, tree, given, comm) as (_, _, plan, _):
        return plan


def save(path: Any, tree: Any, given: Mapping[str, Any], comm: Any) -> SaveReport:
    """See `shardload.save`. Collective."""
    started = time.perf_counter()
    with planned("save", path, tree, given, comm) as (group, asked, plan, digest):
        without = [one.name for one in asked.arrays if isinstance(one.x, jax.ShapeDtypeStruct)]
        if without:
            raise ConfigError(f"'{without[0]}' is a jax.ShapeDtypeStruct, which has no values: it can be planned only")
        report = Saving(group, asked, plan, digest).run(started)
        _log.info("%s", report)
        return report


class Saving:
    """One rank's part of one save. Every method is collective."""

    def __init__(self, group: Group, asked: SaveArguments, plan: SavePlan, digest: str) -> None:
        self._group, self._asked, self._plan, self._digest = group, asked, plan, digest
        self._layouts, self._options = plan._layouts, asked.options
        self._seconds = 0.0
        self._shards: list[LocalShards] = []
        self._flows = {k: PiecesToBlocks(one.schedule) for k, one in enumerate(self._layouts) if isinstance(one, OwnerLayout)}
        self._units = {k: one.units_of(group.rank) for k, one in enumerate(self._layouts) if isinstance(one, HolderLayout)}
        self._ring = Ring(0)
        self._session: Session | None = None

    def run(self, started: float) -> SaveReport:
        """Save the arrays."""
        group, plan, verify = self._group, self._plan, self._options.verify
        group.watch.enter("compare replicas")
        replicas = self._get_ready()
        if replicas:
            check_replicas(group, replicas, _NOTHING_SAVED)
        with ExitStack() as opened:
            advance = opened.enter_context(
                progress_of(self._options.progress, f"'{plan.path}'", self._nbytes_written(), group.rank)
            )
            written = write_file(
                group,
                plan._sink,
                self._rounds(),
                verify=verify,
                n_threads=plan.n_threads,
                on_progress=advance,
                writers=self._asked.writers,
                is_single=plan.n_rounds == 1,  # an append may add rounds, of shards, which rank 0 places
            )
        return self._report(written, started)

    def _report(self, written: Written, started: float) -> SaveReport:
        return SaveReport(
            path=self._plan.path,
            format=self._plan.format,
            seconds=time.perf_counter() - started,
            n_arrays=len(self._layouts),
            n_chunks=written.n_chunks,
            nbytes=written.nbytes,
            nbytes_stored=written.nbytes_stored,
            nbytes_sent=self.session.moved.nbytes,
            n_read_back=written.n_read_back,
            n_decoded=written.n_decoded,
            n_rounds=self._plan.n_rounds,
            writers=written.writers,
            phases={"exchange": self._seconds, **written.seconds},
        )

    def _get_ready(self) -> list[tuple[str, Any, list[tuple[int, int]]]]:
        """Find the shards, compute checksums of replicas, and make all buffers. What fails fails on all ranks."""
        group, error = self._group, None
        memory, replicas = self._plan._memory, []
        slot_nbytes = part_nbytes(self._layouts)
        n_slots, n_packs = count_buffers(memory.moving_nbytes, slot_nbytes)
        shares = bool(self._flows) and slot_nbytes >= default_tuning().worth_sharing_nbytes
        shared_nbytes = n_slots * slot_nbytes if shares else None
        self._session = Session(group, self._digest, shared_nbytes=shared_nbytes, checksums=self._options.checksums)
        try:
            for one, layout in zip(self._asked.arrays, self._layouts, strict=True):
                held = LocalShards(one.x, layout.shards, group.rank)
                self._shards.append(held)
                if layout.shards.n_replicas > 1 and (self._options.verify != INDEX or one.is_everywhere):
                    replicas.append((f"'{one.name}'", layout.shards, held.checksums(Region.whole(one.shape))))
            self._session.stage(n_slots, slot_nbytes, n_packs, slot_nbytes)
            self._ring = Ring(max(map(self._nbytes_received, self._plan._rounds), default=0))
        except StallError:
            raise
        except Exception as found:
            let_interruption_pass(found)
            error = found
        try:
            group.agree(error)
        finally:
            del error  # as in `planned`
        return replicas

    @property
    def session(self) -> Session:
        """The rounds in which parts travel."""
        if self._session is None:
            raise ValueError("the rounds have not begun")
        return self._session

    def _flow(self, item: Item) -> PiecesToBlocks:
        return self._flows[item.array].in_round(item.units)

    def _nbytes_received(self, items: Sequence[Item]) -> int:
        """Bytes of memory for the blocks that this rank gets in a round."""
        total = 0
        for flow in (self._flow(item) for item in items if item.array in self._flows):
            blocks, itemsize = flow.schedule.blocks, flow.schedule.itemsize
            total += sum(aligned(blocks.region(block).size * itemsize) for block in flow.blocks_of(self._group.rank))
        return total

    def _nbytes_written(self) -> int:
        """Bytes of values that this rank writes."""
        return sum(layout.size_of(self._group.rank) * layout.itemsize for layout in self._layouts)

    # --- rounds

    def _rounds(self) -> Iterator[list[Values]]:
        """The chunks that this rank writes, round by round. If any of a round travel, all ranks exchange parts."""
        for items in self._plan._rounds:
            found: list[Values] = []
            sent = [item for item in items if item.array in self._flows]
            if sent:  # first: whatever fails on this rank later, the others wait for it here
                found += self._exchange(sent)
            for item in items:
                if item.array in self._units:
                    found += self._held(item)
            yield found

    def _held(self, item: Item) -> Iterator[Values]:
        layout = self._layouts[item.array]
        if not isinstance(layout, HolderLayout):
            raise TypeError("parts of this array travel")
        name, shards = self._asked.arrays[item.array].name, self._shards[item.array]
        for unit, shard in itertools.islice(self._units[item.array], len(item.units)):
            region = layout.units.region(unit)
            if layout.chunks is layout.units:
                yield Values(name, region, shards.view(shard, region))
                continue
            for chunk in layout.chunks.meeting(region):
                one = layout.chunks.region(chunk)
                yield Values(name, one, shards.view(shard, one))

    def _exchange(self, items: Sequence[Item]) -> Iterator[Values]:
        """Move the parts of one round to the owners of its blocks."""
        group, session = self._group, self.session
        session.begin_round()
        self._ring.begin_round()
        moves = []
        for item in items:
            flow, shards = self._flow(item), self._shards[item.array]
            blocks = flow.schedule.blocks
            targets = {block: self._ring.piece(blocks.region(block), shards.dtype) for block in flow.blocks_of(group.rank)}
            producer = ShardSender(shards, group.rank, targets, self._options.checksums)
            name = self._asked.arrays[item.array].name
            moves.append(ArrayMove(flow, producer, targets, shards.dtype, name=f"'{name}'"))
        started = time.perf_counter()
        failed = session.move(moves)
        self._seconds += time.perf_counter() - started
        group.watch.enter("write")
        if failed is not None:
            raise failed
        return self._chunks(items, moves)

    def _chunks(self, items: Sequence[Item], moves: Sequence[ArrayMove]) -> Iterator[Values]:
        for item, move in zip(items, moves, strict=True):
            layout, name = self._layouts[item.array], self._asked.arrays[item.array].name
            for piece in move.targets.values():
                for chunk in layout.chunks.meeting(piece.region):
                    region = layout.chunks.region(chunk)
                    yield Values(name, region, piece.view(region))
