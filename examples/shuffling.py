"""What does shuffling in blocks do to the diversity of a batch, and how often is a chunk read? No file is needed.

    python -m examples.shuffling --steps 14600 --chunk 40 --batch 16

prints the table of docs/streams.md: ten years of 6-hourly steps, in chunks of 40. For each pool, as a share of the data, and
for samples of one step and of three:

decoded   how often each chunk is decoded in an epoch
chunks    of how many different chunks the samples of a batch are, on average
noise     how far the mean of a batch is from that of the data (of a yearly cycle), compared with batches of independent
          samples: 2 means as far as with a quarter of the samples
"""

from __future__ import annotations

import argparse

import numpy as np

from shardload.planning.sample_order import Readings, SampleOrder, block_steps, spread_in

SHARES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
WINDOWS = {"1 step": (0,), "window (-1, 0, 1)": (-1, 0, 1)}


def row(n_steps: int, chunk: int, batch: int, year: int, offsets: tuple[int, ...], share: float) -> tuple[float, float, float]:
    """How often chunks are decoded, the chunks of a batch, and its noise."""
    first, last = offsets[0], offsets[-1]
    block = block_steps(chunk, first, last)
    pool = max(block, int(share * n_steps))
    order = SampleOrder(n_steps, first, last, block, seed=1, spread=spread_in(pool, block, chunk, n_steps))
    anchors = order.epoch(0)
    anchors = anchors[: len(anchors) // batch * batch]
    readings = Readings(anchors, batch=batch, offsets=offsets, chunk=chunk, horizon=order.horizon(batch, chunk))
    batches = anchors.reshape(-1, batch)
    n_chunks = np.mean([len(set(steps)) for steps in (batches // chunk).tolist()])
    cycle = np.cos(2 * np.pi * batches / year)
    return len(readings) / (n_steps / chunk), float(n_chunks), float(cycle.mean(axis=1).std() / (cycle.std() / batch**0.5))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="what shuffling in blocks does to batches")
    for name, value in (("steps", 14600), ("chunk", 40), ("batch", 16), ("year", 1460)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    print("".rjust(6), *(name.rjust(25) for name in WINDOWS), sep="")
    print("  pool" + "  decoded  chunks    noise" * len(WINDOWS))
    for share in SHARES:
        cells = [row(given.steps, given.chunk, given.batch, given.year, offsets, share) for offsets in WINDOWS.values()]
        print(f"{share:6.0%}" + "".join(f"{decoded:9.2f}{chunks:8.1f}{noise:9.2f}" for decoded, chunks, noise in cells))


if __name__ == "__main__":
    main()
