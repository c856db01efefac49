"""How fast do batches of this file come here, and what would be faster? ``shardload bench-stream``."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

import jax
from jax.sharding import PartitionSpec

from shardload.api import stream
from shardload.cli.copies import source_of
from shardload.cli.info import to_json
from shardload.cli.loads import mesh_of
from shardload.comm.group import Group, group_of
from shardload.jobs.streaming.plan import StreamPlan
from shardload.jobs.streaming.stream import Stream
from shardload.system.terminal import width_of, wrap
from shardload.units import counted, format_nbytes

_LONGEST_SECONDS = 60.0
_STALLED = 0.05  # who waits a smaller part of the time has nothing to gain
_TOO_OFTEN = 1.1  # decodes of a chunk
_SMALL_NBYTES = 1 << 20  # of a chunk: smaller parts of it would cost more than sharing it saves
Figures = dict[str, float]  # times in seconds


def run(
    out: IO[str], file: str, axes: Mapping[str, int], spec: Any, n_batches: int, step: float, as_json: bool, **options: Any
) -> None:
    """Take up to `n_batches`, sleep `step` seconds after each, and print on rank 0 what that took. Collective: yes."""
    options |= {"decode": bool(options["decode"]), "epochs": None}
    with mesh_of(axes) as mesh:
        began = time.perf_counter()
        source, options["dataset"] = source_of(file, options["along"], options["dataset"], options["allow_external"])
        opened = stream(source, mesh, spec if isinstance(spec, dict) else PartitionSpec(*spec), **options)
        plan, group = opened.plan, group_of()
        figures = _measure(opened, group, began, n_batches, step)
    if group.rank == 0:
        advice = [*_advice(plan, figures)]
        lines = [*str(plan).splitlines(), *_lines(plan, figures), *advice]
        text = "\n".join(line for paragraph in lines for line in wrap(paragraph.strip(), width_of(out), "", "  "))
        print(to_json({"ok": True, "plan": str(plan), **figures, "advice": advice}) if as_json else text, file=out)


def _measure(opened: Stream, group: Group, began: float, n: int, step: float) -> Figures:
    """The figures, on all ranks: means over them, and of memory the most."""
    memory, cpu, first, now, waited, n_taken = _most_nbytes(), time.process_time(), 0.0, began, 0.0, 0
    ready = began
    with iter(opened) as batches:
        for batch in batches:
            jax.block_until_ready(batch)
            ready = time.perf_counter()
            n_taken += 1
            waited += ready - now if first else 0.0
            first = first or ready
            del batch
            time.sleep(step)
            now = time.perf_counter()
            with group.call():  # all stop after the same batch
                is_over = max(group.gather_int(int(now - began))) > _LONGEST_SECONDS
            if n_taken == n or (is_over and n_taken > 1):  # one alone has no rate
                break
        report = batches.report
    of_rank = [first - began, ready - first, waited, time.process_time() - cpu, max(0, _most_nbytes() - memory)]
    with group.call():
        rows = group.gather_ints([int(1e6 * value) for value in of_rank]) / 1e6
    first, seconds, waited, cpu, _ = rows.mean(0).tolist()
    return {
        "n_batches": n_taken,
        "first_batch": first,
        "seconds_per_batch": seconds / (n_taken - 1),
        "step": step,
        "stalled": waited / max(seconds, 1e-9),
        "cpu_per_batch": cpu / n_taken,
        "chunks_decoded": report.chunks_decoded,
        "decodes_per_chunk": opened.plan.cost[0],
        "memory_nbytes": int(rows[:, 4].max()),
        "n_ranks": group.size,
        "n_cores": len(os.sched_getaffinity(0)),
    }


def _most_nbytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _lines(plan: StreamPlan, f: Figures) -> list[str]:
    """What was measured."""
    seconds = f["seconds_per_batch"]
    rate = f"{1 / seconds:.1f} a second, {format_nbytes(int(plan.batch_nbytes / seconds))}"
    return [
        f"{f['n_batches']:,} batches: the first after {f['first_batch']:.2f} s, then {rate}",
        f"with a step of {1e3 * f['step']:g} ms the program waited {f['stalled']:.0%} of the time",
        f"{f['chunks_decoded']:,} chunks decoded; in an epoch each {f['decodes_per_chunk']:.2f} times",
        f"CPU of each of {f['n_ranks']:.0f} ranks: {1e3 * f['cpu_per_batch']:.1f} ms a batch",
        f"memory: up to {format_nbytes(int(f['memory_nbytes']))} more on a rank",
    ]


def _advice(plan: StreamPlan, f: Figures) -> Iterator[str]:
    """What to change, with the reason and the number."""
    n_ranks = int(f["n_ranks"])
    work = f["cpu_per_batch"] * n_ranks / min(f["n_cores"], n_ranks)  # of a batch, if all ranks are on this node
    cost = f"a batch takes {1e3 * work:.1f} ms on {f['n_cores']:.0f} cores"
    if f["stalled"] <= _STALLED:
        yield f"nothing to change: {cost}, and the step hides it"
        return
    array = max(plan.arrays, key=lambda array_plan: array_plan.step_nbytes)
    quarter, n_beside = array.n_steps * array.stored_step_nbytes // 4, array.schedule.rest.n_cells
    if f["decodes_per_chunk"] > _TOO_OFTEN and plan.pool_nbytes < quarter:
        larger = format_nbytes(quarter).replace(" ", "")
        yield f"pool: {format_nbytes(plan.pool_nbytes)} decodes chunks {f['decodes_per_chunk']:.2f} times; try --pool {larger}"
    if n_beside < n_ranks and array.chunk_steps * array.step_nbytes > _SMALL_NBYTES * n_beside:
        ahead = f"{n_ranks} ranks read {n_ranks // n_beside} x {array.chunk_steps} steps at a time"
        ahead += f", as a step has {counted(n_beside, 'chunk')}"
        yield f"chunks: {ahead}; cut the other axes into {n_ranks} parts or more (shardload copy --chunks)"
    if plan.batch_nbytes < n_ranks << 20:
        yield f"batch: {format_nbytes(plan.batch_nbytes)} is little for what each batch costs; try --batch {4 * plan.batch}"
    yield f"cores: {cost}; more cores, faster decoding (shardload copy --compression lz4) or a larger --prefetch help"
