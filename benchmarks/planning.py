"""What does planning cost one rank, and what would the planned loads do? No file, no MPI, no devices: meshes are abstract.

    python -m benchmarks.planning                     # seconds and memory of planning, meshes of 64 to a million devices
    python -m benchmarks.planning --mesh 32 --size 4096

For float32 arrays of 16384^3 elements in chunks of 256^3 and of one plane, cut by P("a", "b") and
P(None, "a", "b"), with a rank per device. Times are medians of one process, memory is the peak that tracemalloc sees; neither
counts imports.

Columns of the first table: `plan` is everything up to a finished plan (the cost of every way of reading, and the choice);
`ready` is what a rank computes before the first byte moves (what comes from whom, and its first block; the largest of a few
ranks); `part` is computing one part when it is needed. `permuted` is a mesh of devices in random order, with a table as long as
the mesh.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from shardload.formats.contract.array import ArrayInfo
from shardload.formats.lookup import FoundArray
from shardload.jobs.loading.call import LoadCall
from shardload.planning.cost import choose_mode, plan_cost
from shardload.planning.schedule import DIRECT, PARALLEL, Owners, Schedule, SourceLayout, plan_direct, plan_shared
from shardload.planning.selection import select_axes
from shardload.planning.shards import plan_shards
from shardload.units import format_nbytes

MESHES = (8, 32, 128, 256, 512, 1024)
SPECS = {"P(a,b)": P("a", "b"), "P(-,a,b)": P(None, "a", "b")}
AXES = {"P(a,b)": ((0,), (1,), ()), "P(-,a,b)": ((), (0,), (1,))}
STAGING = "16GiB"  # a plane of 16384^2 float32 is a chunk of 1 GiB, of which a reader holds several
REPEATS = 15
MAX_WALK = 20_000


def chunk_shapes(size: int) -> dict[str, tuple[int, int, int]]:
    side = min(256, size)
    return {f"{side}^3": (side, side, side), "plane": (1, size, size)}


def cells(options: argparse.Namespace) -> Iterator[tuple[int, str, tuple[int, int, int], str]]:
    """Each mesh, kind of chunks and spec."""
    chunks = chunk_shapes(options.size)
    for n, kind, spec in itertools.product(options.mesh, chunks, SPECS):
        yield n, kind, chunks[kind], spec


# --- what planning costs


def make_plan(n: int, size: int, chunks: tuple[int, ...], spec: str, readers: str | int) -> Schedule:
    """The plan that `shardload.plan` makes after the metadata are known."""
    info = ArrayInfo("abstract.h5", "/x", "HDF5", (size,) * 3, "float32", chunks, "gzip+shuffle")
    mesh, options = AbstractMesh((n, n), ("a", "b")), {"readers": readers, "staging": STAGING}
    with LoadCall("plan", info.path, mesh, SPECS[spec], options).begin() as call:
        return call.plan_file(call.requests[0], call.tree.places[0], "", FoundArray(info)).plan.schedule


def make_layout(size: int, chunks: tuple[int, ...]) -> SourceLayout:
    """How a cube of float32 lies in a file."""
    shape, f4 = (size,) * 3, np.dtype("f4")
    return SourceLayout.cut(select_axes(None, shape), chunks, f4, f4, "gzip+shuffle")


def make_permuted_plan(ranks: np.ndarray[Any, Any], size: int, chunks: tuple[int, ...], spec: str, readers: str) -> Schedule:
    """The same for devices in another order: JAX cannot make so many, so the table that they would give is given."""
    shards = plan_shards((size,) * 3, AXES[spec], ranks)
    layout = make_layout(size, chunks)
    plans = {
        PARALLEL: plan_shared(layout, shards, ranks.size, Owners(ranks.size), max_nbytes=16 << 20),
        DIRECT: plan_direct(layout, shards, ranks.size, max_nbytes=16 << 20),
    }
    costs = {mode: plan_cost(plan, layout) for mode, plan in plans.items()}
    shards.describe_ranks()  # by which ranks agree that they planned the same
    return plans[choose_mode(costs, ranks.size)[0] if readers == "auto" else readers]


def milliseconds(work: Callable[[], Any]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def get_ready(plan: Schedule, rank: int) -> None:
    plan.incoming(rank)
    for read in plan.outgoing(rank):
        next(iter(read.parts), None)
        break


def walk(plan: Schedule, rank: int) -> float:
    """Microseconds for each part that a rank sends or gets (of the first so many)."""
    start = time.perf_counter()
    sent = (part for read in plan.outgoing(rank) for part in read.parts)
    n = sum(1 for _ in itertools.islice(sent, MAX_WALK))
    n += sum(1 for _ in itertools.islice(itertools.chain.from_iterable(plan.incoming(rank).values()), MAX_WALK))
    return 1e6 * (time.perf_counter() - start) / n if n else 0.0


def peak_nbytes(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    kept = work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    return peak


def some_ranks(plan: Schedule) -> list[int]:
    """The first, the last, one in the middle, and readers (of few large blocks not every rank reads)."""
    n = plan.n_ranks
    readers = [] if plan.is_direct else [plan.owner(plan.blocks.n_cells // 2), plan.owner(plan.blocks.n_cells - 1)]
    return sorted({0, n // 2 + 1, n - 1, *readers})


def measure(make: Callable[[str], Schedule]) -> dict[str, Any]:
    row: dict[str, Any] = {"plan_ms": milliseconds(lambda: make("auto"))}
    peaks = []
    for mode in (PARALLEL, DIRECT):
        plan = make(mode)
        ranks = some_ranks(plan)
        row[f"{mode}_ready_ms"] = max(milliseconds(lambda p=plan, r=rank: get_ready(p, r)) for rank in ranks)
        row[f"{mode}_walk_us"] = max(walk(plan, rank) for rank in ranks)
        peaks += [peak_nbytes(lambda m=mode, r=rank: get_ready(make(m), r)) for rank in ranks]
    row["peak_nbytes"] = max(peaks)
    row["most_ms"] = row["plan_ms"] + max(row[f"{mode}_ready_ms"] for mode in (PARALLEL, DIRECT))
    return row


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    print(
        f"{'mesh':>20} {'chunks':>6} {'spec':>9} {'plan':>9} {'ready: parallel':>15} {'direct':>8} {'in all':>8} {'peak':>9}"
        "  part",
        flush=True,
    )
    for n, kind, chunks, spec in cells(options):
        ways: dict[str, Callable[[str], Schedule]] = {
            "": lambda r, n=n, c=chunks, s=spec: make_plan(n, options.size, c, s, r)  # type: ignore[misc]
        }
        if n == max(options.mesh):
            ranks = np.random.default_rng(0).permutation(n * n).reshape(n, n)
            ways[" permuted"] = lambda r, t=ranks, c=chunks, s=spec: make_permuted_plan(t, options.size, c, s, r)  # type: ignore[misc]
        for name, make in ways.items():
            row = {"mesh": f"{n}x{n}{name}", "chunks": kind, "spec": spec} | measure(make)
            rows.append(row)
            print(
                f"{row['mesh']:>20} {kind:>6} {spec:>9} {row['plan_ms']:6.2f} ms {row['parallel_ready_ms']:12.2f} ms "
                f"{row['direct_ready_ms']:5.2f} ms {row['most_ms']:5.2f} ms {format_nbytes(row['peak_nbytes']):>9}  "
                f"{row['parallel_walk_us']:.1f} us",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=int, nargs="+", help="devices along each of the two mesh axes")
    parser.add_argument("--size", type=int, default=16384, help="elements along each axis (default 16384)")
    parser.add_argument("--out", type=Path, help="also write JSON")
    options = parser.parse_args()
    options.mesh = options.mesh or MESHES
    rows = measure_all(options)
    print(f"most: {max(row['most_ms'] for row in rows if 'permuted' not in row['mesh']):.1f} ms without permuted meshes")
    if options.out:
        result = {"size": options.size, "python": platform.python_version(), "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
