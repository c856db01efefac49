"""mosaicml-streaming: MDS shards of whole samples, which were written before; each process cuts out its part.

Ranks that have parts of the same samples are told to take the same ones (`replication`). Shards are compressed with zstd; the
first process that needs one decompresses it into a file, which stays for the rest of the run: one decode of each for all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import zarr
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from benchmarks.cases.streams import MAP, NAME, SEED, StreamFile
from benchmarks.peers.streamers import Asked, Feed, Thread
from tests.ports import free_ports


def shards_of(file: StreamFile, comm: Any) -> Path:
    """The folder of the MDS shards; written by the first rank if it is not there."""
    folder = file.path.parent / f"mds-{file.n_steps}"
    if comm.rank == 0 and not (folder / "index.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        array: Any = zarr.open_array(file.path / NAME, mode="r")
        columns = {"x": f"ndarray:float32:{','.join(map(str, MAP))}", "anchor": "int"}
        with MDSWriter(out=str(folder), columns=columns, compression="zstd", size_limit=1 << 25) as writer:
            for first in range(0, file.n_steps, 40):
                for k, values in enumerate(array[first : first + 40]):
                    writer.write({"x": np.ascontiguousarray(values), "anchor": first + k})
    comm.Barrier()
    return folder


def feed(asked: Asked) -> Feed:
    """See `streamers.WAYS`."""
    comm = asked.comm
    folder = shards_of(asked.file, comm)
    if comm.rank == 0:
        for raw in folder.glob("*.mds"):  # what an epoch before has decompressed
            raw.unlink()
        clean_stale_shared_memory()
    where = {"RANK": comm.rank, "WORLD_SIZE": comm.size, "LOCAL_RANK": comm.rank, "LOCAL_WORLD_SIZE": comm.size}
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": comm.bcast(free_ports(1)[0] if comm.rank == 0 else None)}
    os.environ.update({name: str(value) for name, value in where.items()})
    n_slots = asked.slots.stop - asked.slots.start
    n_same = comm.size // asked.n_parts
    dataset = StreamingDataset(
        local=str(folder), shuffle=asked.shuffled, shuffle_seed=SEED, batch_size=n_slots, num_canonical_nodes=1,
        replication=n_same if n_same > 1 else None, keep_zip=True,
    )  # fmt: skip
    if asked.first:
        dataset.load_state_dict(dataset.state_dict(asked.first * asked.batch, False) or {
            "epoch": 0, "sample_in_epoch": asked.first * asked.batch, "num_canonical_nodes": 1, "shuffle_seed": SEED,
            "initial_physical_nodes": 1,
        })  # fmt: skip

    def give() -> Iterator[tuple[jax.Array, Any]]:
        held: list[Any] = []
        for sample in dataset:
            held.append(sample)
            if len(held) == n_slots:
                piece = np.stack([one["x"][asked.tile] for one in held])
                yield asked.put(piece), np.array([one["anchor"] for one in held])
                held = []

    thread = Thread(give())
    return Feed(iter(thread), close=thread.close)
