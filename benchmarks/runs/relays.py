"""Do parts travel over as many messages as the plan counts? A real load on as many ranks as there are, in each way.

    SHARDLOAD_RANKS_PER_NODE=4 mpiexec -n 16 python -m benchmarks.runs.relays

Every few ranks are treated as a node of their own. The array is small, its values are their own flat index, and the mesh is
permuted; each rank compares its shards with NumPy's slices. Rank 0 prints a line for each way: what was sent between nodes, and
what the plan said.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import shardload
from shardload.comm.group import group_of
from shardload.comm.transport import Transport
from shardload.planning.hops import WAYS, node_map
from shardload.planning.traffic import count_traffic
from shardload.planning.tuning import tuned

SHAPE, CHUNKS = (64, 64, 96), (1, 64, 96)
sent: Counter[tuple[str, int]] = Counter()


def counted(method: str) -> None:
    """Count what is sent, by kind and receiver."""
    right = getattr(Transport, method)

    def call(self: Transport, rank: int, *what: Any) -> Any:
        sent[f"hop {what[0]}" if method == "send_bundle" else "part", rank] += 1
        return right(self, rank, *what)

    setattr(Transport, method, call)


def main() -> None:
    comm = MPI.COMM_WORLD
    shardload.initialize()
    counted("send")
    counted("send_bundle")
    values = np.arange(np.prod(SHAPE), dtype="f4").reshape(SHAPE)
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    path = str(Path(folder, "x.h5"))
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=values, chunks=CHUNKS, compression="gzip")
    comm.barrier()
    devices = np.random.default_rng(1).permutation(np.array(jax.devices(), dtype=object))
    rows = max(k for k in range(1, comm.size + 1) if comm.size % k == 0 and k * k <= comm.size)
    mesh = Mesh(devices.reshape(rows, -1), ("a", "b"))
    nodes = node_map(group_of().machine.leaders)
    for way in WAYS:
        for verify in ("index", "checksum"):
            with tuned(way=way, small_nbytes=0, tiny_nbytes=0, worth_sharing_nbytes=0):
                plan = shardload.plan(path, mesh, P(None, "a", "b"), readers="parallel", verify=verify)
                sent.clear()
                comm.barrier()
                started = time.perf_counter()
                x = plan.execute()
                seconds = time.perf_counter() - started
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index], strict=True)
            here = nodes.node(comm.rank)
            far = Counter({key: n for key, n in sent.items() if key[0] != "part" or nodes.node(key[1]) != here})
            kinds = Counter[str]()
            for (kind, _), n in far.items():
                kinds[kind] += n
            per_kind = {kind: len({rank for one, rank in far if one == kind} - {comm.rank}) for kind in kinds}
            everyone = comm.gather((kinds, max(per_kind.values(), default=0), seconds))
            if comm.rank == 0 and everyone is not None:
                total = sum((one for one, _, _ in everyone), Counter[str]())
                per_node = nodes.n_members(0)
                cost = plan.costs["parallel"]
                planned = cost.messages - count_traffic(plan.schedule, per_node).handovers
                by_hop = ", ".join(f"{n} of {kind}" for kind, n in sorted(total.items()))
                cells = [comm.size, nodes.n_nodes, plan.way, verify, f"{sum(total.values())} ({by_hop})", planned]
                cells += [max(n for _, n, _ in everyone), cost.partners, f"{max(t for _, _, t in everyone):.2f} s"]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
