"""Does "auto" take the right way where a file system and a network limit a load?

All ranks run on this machine, as nodes with a file system and a network of known limits (`benchmarks.throttle`), so slow that
they decide and not its cores. For each file system, network, layout, sharding and number of ranks: each way of reading is timed
with empty caches, and the plan is asked which one it would take. What is asked: "auto" takes the fastest way or one within 25 %
in 90 % of the cells, and never one that takes twice as long.

`replan` puts what plans say now into a record of earlier times: after a change of the rule, without measuring again.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.cases.cells import mesh_shape, spec_text
from benchmarks.cases.layouts import File
from benchmarks.remote import RemoteError, RemoteJob
from benchmarks.runs.environments import ROOT
from benchmarks.runs.measure import median, new_record, without_folders, write_record
from benchmarks.throttle import Cluster, Limits
from benchmarks.throttle.links import Links, check_rate
from shardload.formats.contract.array import ArrayInfo
from shardload.formats.lookup import list_arrays
from shardload.jobs.described import selection_of
from shardload.jobs.loading.planner import PlannedRanks, plan_array
from shardload.jobs.loading.request import Request
from shardload.options import Options
from tests.jobs.launch import job_command, job_environment

LAYOUTS = ("hdf5-contiguous", "hdf5-gzip-planes", "hdf5-gzip-cubes", "zarr-zstd-cubes", "zarr-sharded")
SPECS = ("a,b", "-,a,b")
RANKS = (4, 8, 16)
NODES = {2: 2, 4: 2, 8: 4, 16: 4}  # for a number of ranks
FILE_SYSTEMS = {
    "fast": Limits(60e6, 30e6, 15e6, 1000, 2e-3, 1e-3, 1 << 18),
    "slow": Limits(15e6, 8e6, 4e6, 100, 1e-2, 1e-2, 1 << 18),
}
NETWORKS = {"fast": (100e6, 1e-4), "slow": (6e6, 2e-3)}
WITHIN, NEVER = 1.25, 2.0
LOAD_SECONDS = 300.0
Say = Callable[[str], None]


def ways(n: int) -> dict[str, str | int]:
    """Each way of reading by its name, as the option `readers`.

    >>> ways(8)
    {'root': 'root', 'parallel 1': 1, 'parallel 4': 4, 'parallel 8': 8, 'direct': 'direct'}
    """
    return {"root": "root", **{f"parallel {k}": k for k in (1, n // 2, n)}, "direct": "direct"}


def measure_grid(
    files: dict[str, File],
    folder: Path,
    *,
    specs: Sequence[str] = SPECS,
    ranks: Sequence[int] = RANKS,
    file_systems: Sequence[str] = tuple(FILE_SYSTEMS),
    networks: Sequence[str] = tuple(NETWORKS),
    repeats: int = 1,
    by_links: bool = False,
    out: Path | None = None,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Time all cells, and write the record after each. `folder` holds the files; reads of others are not limited.

    With `by_links`, the kernel limits the network, not this program: each rank is a node with a link of its own.
    """
    record = new_record("grid", files, repeats=repeats, by_links=by_links, limits=limits_of(file_systems, networks))
    record["infos"] = {layout: info_of(file) for layout, file in files.items()}
    if by_links:
        with tempfile.TemporaryDirectory() as scratch:
            check_rate(Path(scratch))
    # The rate of links is that of the whole job.
    for n, some in itertools.product(ranks, [[w] for w in networks] if by_links else [networks]):
        nodes = n if by_links else NODES.get(n, 1)
        limits = [(f, w, with_network(f, w)) for f, w in itertools.product(file_systems, some)]
        with ExitStack() as stack:
            figures = stack.enter_context(tempfile.TemporaryDirectory())
            cluster = stack.enter_context(Cluster(folder, n // nodes, limits[0][2]))
            env = job_environment(n) | {"PYTHONPATH": str(ROOT)} | cluster.env
            command = job_command(["-m", "benchmarks.peers.throttled"], n)
            if by_links:
                links = stack.enter_context(Links(n, limits[0][2].network_rate, Path(figures)))
                command, env = [*command[:3], *links.command(command[3:])], env | links.env
            with RemoteJob("throttled", command, n, env) as job:
                for (fs, network, limit), (layout, file), spec in itertools.product(limits, files.items(), specs):
                    cell = {"file_system": fs, "network": network, "layout": layout, "spec": spec, "ranks": n, "nodes": nodes}
                    request = {"file": file.request(), "spec": spec}
                    cell |= measure_cell(cluster, limit, job, n, request, repeats)
                    record["cells"].append(cell)
                    say(line(cell))
                    if out is not None:
                        write_record(out, record)
                record["versions"] |= job.versions
    return record


def measure_cell(
    cluster: Cluster, limits: Limits, job: RemoteJob, n: int, request: dict[str, Any], repeats: int
) -> dict[str, Any]:
    """Time each way, in turns, and the one that is taken if it is none of these."""
    cluster.reset(limits)
    chosen = job.ask(LOAD_SECONDS, do="ask", **request)[0]
    wanted = ways(n)
    auto = chosen["readers"] if chosen["readers"] != "parallel" else f"parallel {chosen['n_readers']}"
    wanted.setdefault(auto, chosen["n_readers"])
    took: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in wanted}
    for _, (name, readers) in itertools.product(range(repeats), wanted.items()):
        cluster.reset(limits)
        try:
            replies = job.ask(LOAD_SECONDS, do="load", readers=readers, **request)
            counted = cluster.counted()
            job.ask(LOAD_SECONDS, do="check", **request)
        except RemoteError as error:
            took[name]["error"] = without_folders(error)
            if not job.is_alive:
                raise
            continue
        took[name]["seconds"].append(max(r["end"] for r in replies) - min(r["start"] for r in replies))
        cost = replies[0]["cost"]
        took[name] |= {"planned_nbytes": cost["decoded_nbytes"], "nbytes": counted.nbytes, "operations": counted.operations}
        took[name] |= {"opens": counted.opens, "sent_nbytes": counted.sent_nbytes}
    return {"auto": auto, "ways": took}


def info_of(file: File) -> dict[str, Any]:
    """What a plan knows of a file."""
    (info,) = list_arrays(str(file.path))
    return json.loads(json.dumps(replace(info, path=file.path.name).to_dict()))  # type: ignore[no-any-return]


def replan(record: dict[str, Any]) -> dict[str, Any]:
    """The same record with the ways that plans take now.

    A cell whose way was not timed is left out; `record["not timed"]` counts them.
    """
    cells = []
    for cell in record["cells"]:
        n = cell["ranks"]
        info = ArrayInfo.from_dict(record["infos"][cell["layout"]])
        names = [None if name == "-" else name for name in cell["spec"].split(",")]
        sharding = NamedSharding(AbstractMesh(mesh_shape(cell["spec"], n), ("a", "b")), P(*names))
        options = Options.check()
        request, ranks = Request(sharding, options, {}), PlannedRanks(0, n, n_nodes=cell["nodes"])
        plan = plan_array(request, ranks, info, selection_of(options.select, info))
        auto = plan.readers if plan.readers != "parallel" else f"parallel {plan.n_readers}"
        cells.append({**cell, "auto": auto})
    timed = [cell for cell in cells if cell["auto"] in times(cell)]
    return {**record, "cells": timed, "not timed": len(cells) - len(timed)}


def with_network(file_system: str, network: str) -> Limits:
    """The limits of a file system and a network, by their names."""
    rate, latency = NETWORKS[network]
    return replace(FILE_SYSTEMS[file_system], network_rate=rate, network_latency=latency)


def limits_of(file_systems: Sequence[str], networks: Sequence[str]) -> dict[str, Any]:
    """For the record."""
    return {
        "file_systems": {name: vars(FILE_SYSTEMS[name]) for name in file_systems},
        "networks": {name: dict(zip(("rate", "latency"), NETWORKS[name], strict=True)) for name in networks},
    }


def times(cell: dict[str, Any]) -> dict[str, float]:
    """The median seconds of each way."""
    return {name: median(took["seconds"]) for name, took in cell["ways"].items() if took["seconds"]}


def ratio(cell: dict[str, Any]) -> float:
    """How many times longer the way that is taken takes than the fastest one."""
    found = times(cell)
    return found[cell["auto"]] / min(found.values())


def line(cell: dict[str, Any]) -> str:
    """A cell for people: the seconds of each way."""
    shown = [f"{name} {s:.2f}" for name, s in times(cell).items()]
    head = f"{cell['ranks']:2} {cell['file_system']} {cell['network']} {cell['layout']} {cell['spec']}"
    return f"{head}: {', '.join(shown)}; {cell['auto']} {ratio(cell):.2f}"


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What is asked, for some cells: shares, and the worst ratio."""
    ratios = [ratio(cell) for cell in cells]
    return {
        "cells": len(cells),
        "fastest or within 25 %": sum(r <= WITHIN for r in ratios) / len(ratios),
        "worst ratio": max(ratios),
    }


def table(record: dict[str, Any]) -> str:
    """The cells, and what is asked, as Markdown."""
    cells = record["cells"]
    rows = [
        "| ranks, nodes | file system | network | layout | sharding | taken | seconds | fastest | seconds | ratio |",
        "|---|---|---|---|---|---|--:|---|--:|--:|",
    ]
    for cell in cells:
        found = times(cell)
        best = min(found, key=found.__getitem__)
        rows.append(
            f"| {cell['ranks']}, {cell['nodes']} | {cell['file_system']} | {cell['network']} | {cell['layout']} "
            f"| `{spec_text(cell['spec'])}` | {cell['auto']} | {found[cell['auto']]:.2f} "
            f"| {best} | {found[best]:.2f} | {ratio(cell):.2f} |"
        )
    return "\n".join([*rows, "", summary_table(cells)])


def summary_table(cells: Sequence[dict[str, Any]]) -> str:
    """What is asked, for each number of ranks and for all."""
    groups = {f"{n} ranks": [c for c in cells if c["ranks"] == n] for n in dict.fromkeys(c["ranks"] for c in cells)}
    groups["all"] = list(cells)
    found = {name: summary(group) for name, group in groups.items()}
    names = list(found["all"])
    rows = ["| | " + " | ".join(names) + " |", "|---" + "|--:" * len(names) + "|"]
    for name, of in found.items():
        shown = [f"{v:.0f}" if k == "cells" else f"{v:.2f}" if k == "worst ratio" else f"{v:.0%}" for k, v in of.items()]
        rows.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(rows)
