"""Load and scatter on all ranks; compare with NumPy; say where each rank is and how its parts travelled, in a line of JSON.

``loads.py FOLDER [few]``: an empty folder that all nodes see; ``few``: on one mesh of two.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import shardload
from shardload.comm.group import group_of
from shardload.comm.transport import MpiTransport
from shardload.transfer import channels
from tests.jobs.scripts import ways  # small arrays travel as large ones do
from tests.jobs.scripts.modes import write_files
from tests.mpi.support import check, cube, mesh_of, on_root, ramp

notes: set[int] = set()
messages: set[int] = set()
right_note, right_message = channels.Channels.offer, MpiTransport.send


def note(self: Any, rank: int, *arguments: Any) -> Any:
    notes.add(rank)
    return right_note(self, rank, *arguments)


def message(self: Any, rank: int, *arguments: Any) -> Any:
    messages.add(rank)
    return right_message(self, rank, *arguments)


channels.Channels.offer = note  # type: ignore[method-assign]
MpiTransport.send = message  # type: ignore[method-assign]


def permuted(devices: Sequence[Any]) -> list[Any]:
    """Another order, in which neighbours are of different processes and nodes."""
    return [devices[k] for k in np.random.default_rng(5).permutation(len(devices))]


def main(folder: Path, few: str = "") -> None:
    shardload.initialize()
    group = group_of()
    from mpi4py import MPI

    assert jax.process_count() == group.size
    values = ramp(cube())
    hdf5, zarr = on_root(MPI.COMM_WORLD, lambda: write_files(folder, values))
    n_loads = 0
    kinds = ((hdf5, "parallel"), (zarr, "parallel"), (hdf5, "root"))
    for mesh in (mesh_of(), mesh_of(permuted(jax.devices())))[bool(few) :]:
        for k, spec in enumerate((P("a", "b"), P(None, "a", "b"), P("b"), P(None, None, ("b", "a")))):
            for path, readers in (kinds[k % 3], kinds[(k + 1) % 3]):
                x = shardload.load(path, mesh, spec, dataset="x", readers=readers, verify="checksum")
                check(x, values, mesh, spec, (path, readers))
                n_loads += 1
        x = shardload.scatter(values if group.rank == group.size - 1 else None, mesh, P("b", "a"), root=group.size - 1)
        check(x, values, mesh, P("b", "a"), "scatter")
    line = {
        "rank": group.rank,
        "host": socket.gethostname(),
        "node": group.node.ranks,
        "notes": sorted(notes),
        "messages": sorted(messages),
        "loads": n_loads,
        **ways.counts,
    }
    print("\n" + json.dumps(line) + "\n", end="", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
