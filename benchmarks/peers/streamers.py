"""How does each way give batch after batch? What people use today, as it is usually written, and shardload.

A way is a function ``Asked -> Feed``, which every rank calls. All give the same arrays: global ones, on the mesh, of all
samples of a batch. Peers read what this process's device has; each shuffles as it can, so each says which samples it gave.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import h5py
import jax
import numpy as np
import zarr
from jax.sharding import NamedSharding

import shardload
from benchmarks.cases.streams import DIMS, MEMORY, NAME, SEED, STREAM_PEERS, WINDOW, StreamFile, values_at
from benchmarks.runs.environments import add_peers

Array = np.ndarray[Any, Any]
AHEAD = 2  # batches: what shardload reads ahead by default
CACHE_NBYTES = 128 << 20
GRAIN_THREADS = 4


@dataclass
class Asked:
    """What is asked of a way.

    Attributes
    ----------
    file : StreamFile
        What is read.
    sharding : NamedSharding
        Of a batch.
    batch : int
        Samples.
    shuffled, has_window : bool
        The order of the samples, and whether each is three steps.
    first : int
        The first batch that is given.
    comm : object
        The ranks.
    """

    file: StreamFile
    sharding: NamedSharding
    batch: int
    shuffled: bool
    has_window: bool
    first: int
    comm: Any

    @property
    def window(self) -> tuple[int, ...]:
        return WINDOW if self.has_window else (0,)

    @property
    def anchors(self) -> Array:
        """Of all samples, ascending."""
        return np.arange(-self.window[0], self.file.n_steps - self.window[-1])

    @property
    def order(self) -> Array:
        """All samples as a peer shuffles them."""
        return np.random.default_rng(SEED).permutation(self.anchors) if self.shuffled else self.anchors

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a batch."""
        rest = self.file.shape[1:]
        return (self.batch, len(WINDOW), *rest) if self.has_window else (self.batch, *rest)

    @property
    def cut(self) -> tuple[slice, ...]:
        """What this process's only device has of a batch."""
        (index,) = self.sharding.addressable_devices_indices_map(self.shape).values()
        return tuple(slice(*part.indices(n)[:2]) for part, n in zip(index, self.shape, strict=True))

    @property
    def slots(self) -> slice:
        """Its samples."""
        return self.cut[0]

    @property
    def tile(self) -> tuple[slice, ...]:
        """Its part of a step."""
        return self.cut[-3:]

    @property
    def n_parts(self) -> int:
        """Into how many parts the samples of a batch are cut."""
        return self.batch // (self.slots.stop - self.slots.start)

    @property
    def part(self) -> int:
        """Which of them this process has."""
        return self.slots.start * self.n_parts // self.batch

    def steps_of(self, anchors: Array) -> Array:
        """The steps of samples: (samples, window)."""
        return anchors[:, None] + np.array(self.window)

    def expected(self, anchors: Array) -> Array:
        """This process's part of a batch of these samples."""
        values = values_at(self.steps_of(anchors).reshape(-1), self.tile)
        return values.reshape(len(anchors), *self.shape[1:-3], *values.shape[1:])

    def put(self, piece: Array) -> jax.Array:
        """The global array of which this process has `piece`."""
        (device,) = self.sharding.addressable_devices
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, [jax.device_put(piece, device)])

    def batches(self, read: Callable[[Array], Array]) -> Iterator[tuple[jax.Array, Array]]:
        """This process's samples of each batch, read by `read`."""
        order = self.order
        for k in range(self.first, len(order) // self.batch):
            anchors = order[k * self.batch :][self.slots]
            yield self.put(read(anchors)), anchors


@dataclass
class Feed:
    """What a way gives: batches, each with the anchors of this process's samples, and the number of its decodes until now."""

    batches: Iterator[tuple[jax.Array, Array]]
    n_decoded: Callable[[], int | None] = lambda: None  # of this process; of shardload, of all
    close: Callable[[], None] = lambda: None
    told: dict[str, Any] = field(default_factory=dict)


class Thread:
    """A thread that is two batches ahead: what a training script writes around a slow reader."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(AHEAD)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, args=(batches,), daemon=True)
        self._thread.start()

    def _run(self, batches: Iterator[Any]) -> None:
        try:
            for batch in batches:
                self._queue.put(batch)
                if self._is_closed:
                    return
            self._queue.put(None)
        except BaseException as error:
            self._queue.put(error)

    def __iter__(self) -> Iterator[Any]:
        while (batch := self._queue.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch

    def close(self) -> None:
        """End it."""
        self._is_closed = True
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._queue.get(timeout=0.01)


def threaded(asked: Asked, read: Callable[[Array], Array], n_decoded: Callable[[], int | None] = lambda: None) -> Feed:
    """Batches that a thread reads ahead."""
    thread = Thread(asked.batches(read))
    return Feed(iter(thread), n_decoded, thread.close)


# --- how often zarr-python decodes


class Decodes:
    """How often zarr-python has decoded a chunk in this process."""

    n = 0
    _is_patched = False

    @classmethod
    def count(cls) -> Callable[[], int]:
        """Count from now on."""
        if not cls._is_patched:
            cls._is_patched = True
            for codec in (zarr.codecs.ZstdCodec, zarr.codecs.BloscCodec):
                codec._decode_single = cls._counting(codec._decode_single)  # type: ignore[method-assign]
        before = cls.n
        return lambda: cls.n - before

    @classmethod
    def _counting(cls, decode: Any) -> Any:
        async def counting(codec: Any, *args: Any) -> Any:
            cls.n += 1
            return await decode(codec, *args)

        return counting


def open_array(asked: Asked) -> Any:
    """The array, to be sliced, through the format's own library."""
    if asked.file.is_zarr:
        return zarr.open_array(asked.file.path / NAME, mode="r")
    return h5py.File(asked.file.path)[NAME]


def counter(asked: Asked) -> Callable[[], int | None]:
    """Of the decodes of `open_array`; HDF5 does not tell."""
    return Decodes.count() if asked.file.is_zarr else lambda: None


# --- the ways


def shardload_way(asked: Asked) -> Feed:
    """`shardload.stream`, as it comes."""
    spec = list(asked.sharding.spec)
    opened = shardload.stream(
        str(asked.file.path), asked.sharding.mesh, jax.sharding.PartitionSpec(*spec), dataset=NAME, along=0,
        batch=asked.batch, window=WINDOW if asked.has_window else None, shuffle=SEED if asked.shuffled else None,
    )  # fmt: skip
    iterator = iter(opened)
    if asked.first:
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.set_state({**state, "sample": asked.first * asked.batch})

    def batches() -> Iterator[tuple[jax.Array, Array]]:
        for batch in iterator:
            yield batch, iterator.index[asked.slots]

    return Feed(batches(), lambda: iterator.report.chunks_decoded, iterator.close, {"plan": str(opened.plan)})


def slice_way(asked: Asked) -> Feed:
    """Every process slices its part of each sample; neighbours that follow each other are one slice."""
    array, tile = open_array(asked), asked.tile

    def read(anchors: Array) -> Array:
        if not asked.has_window and np.all(np.diff(anchors) == 1):
            return np.asarray(array[(slice(anchors[0], anchors[-1] + 1), *tile)])
        samples = [array[(slice(a + asked.window[0], a + asked.window[-1] + 1), *tile)] for a in anchors.tolist()]
        return np.stack(samples) if asked.has_window else np.concatenate(samples)

    return threaded(asked, read, counter(asked))


def grain_way(asked: Asked) -> Feed:
    """A MapDataset of samples: each process has its own part of each, and every n-th sample."""
    grain = importlib.import_module("grain")
    array, anchors = open_array(asked), asked.anchors

    class Samples:
        def __len__(self) -> int:
            return len(anchors)

        def __getitem__(self, k: int) -> dict[str, Any]:
            anchor = int(anchors[k])
            steps = slice(anchor + asked.window[0], anchor + asked.window[-1] + 1)
            values = array[(steps, *asked.tile)]
            return {"x": values if asked.has_window else values[0], "anchor": anchor}

    samples = grain.MapDataset.source(Samples())
    samples = samples.shuffle(SEED) if asked.shuffled else samples
    n_slots = asked.slots.stop - asked.slots.start
    options = grain.ReadOptions(num_threads=GRAIN_THREADS, prefetch_buffer_size=AHEAD * n_slots)
    found = iter(samples[asked.part :: asked.n_parts].to_iter_dataset(options).batch(n_slots, drop_remainder=True))
    if asked.first:
        grain.experimental.set_next_index(found, asked.first)
    return _of_grain(asked, found)


def _of_grain(asked: Asked, found: Any) -> Feed:
    thread = Thread((asked.put(np.ascontiguousarray(e["x"])), np.asarray(e["anchor"])) for e in found)

    def close() -> None:
        thread.close()
        getattr(found, "close", lambda: None)()

    return Feed(iter(thread), counter(asked), close)


def grain_blocks_way(asked: Asked) -> Feed:
    """A MapDataset of blocks of a chunk, each read once by those who have a part of it; then samples, shuffled in a window."""
    grain = importlib.import_module("grain")
    array, chunk, n = open_array(asked), max(8, asked.file.chunks[0]), asked.file.n_steps
    before, after = -asked.window[0], asked.window[-1]

    class Blocks:
        def __len__(self) -> int:
            return -(-n // chunk)

        def __getitem__(self, k: int) -> dict[str, Any]:
            first = max(0, k * chunk - before)
            return {"first": first, "block": k, "x": array[(slice(first, min(n, (k + 1) * chunk + after)), *asked.tile)]}

    class Cut(grain.experimental.FlatMapTransform):  # type: ignore[misc]
        max_fan_out = chunk

        def flat_map(self, block: dict[str, Any]) -> list[dict[str, Any]]:
            anchors = np.arange(block["block"] * chunk, min(n, (block["block"] + 1) * chunk))
            anchors = anchors[(anchors >= before) & (anchors < n - after)]
            x = block["x"]
            cut = [x[a - before - block["first"] : a + after + 1 - block["first"]] for a in anchors.tolist()]
            return [{"x": v if asked.has_window else v[0], "anchor": a} for v, a in zip(cut, anchors.tolist(), strict=True)]

    blocks = grain.MapDataset.source(Blocks())
    blocks = (blocks.shuffle(SEED) if asked.shuffled else blocks).repeat()  # some parts have a block more: none ends too early
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
    samples = grain.experimental.FlatMapIterDataset(blocks[asked.part :: asked.n_parts].to_iter_dataset(options), Cut())
    n_slots = asked.slots.stop - asked.slots.start
    if asked.shuffled:
        window = max(2, n // 10 // asked.n_parts)
        samples = grain.experimental.WindowShuffleIterDataset(samples, window_size=window, seed=SEED)
    samples = samples.batch(n_slots, drop_remainder=True)
    found = iter(samples)
    if asked.first:  # no state but one that an iterator has given
        for _ in range(asked.first):
            next(found)
        state, found = found.get_state(), iter(samples)
        found.set_state(state)
    return _of_grain(asked, found)


def tensorstore_way(asked: Asked) -> Feed:
    """TensorStore keeps decoded chunks of this process; the reads of the next batches are under way."""
    import tensorstore

    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE_NBYTES}})
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(asked.file.path / NAME)}, "recheck_cached_data": False}
    store = tensorstore.open(spec, open=True, read=True, context=context).result()
    tile, order = asked.tile, asked.order
    batches = [order[k * asked.batch :][asked.slots] for k in range(asked.first, len(order) // asked.batch)]

    def start(anchors: Array) -> Any:
        if np.all(np.diff(anchors) == 1) and not asked.has_window:
            return store[(slice(int(anchors[0]), int(anchors[-1]) + 1), *tile)].read()
        return store[(asked.steps_of(anchors).reshape(-1), *tile)].read()

    def give() -> Iterator[tuple[jax.Array, Array]]:
        under_way = [start(anchors) for anchors in batches[:AHEAD]]
        for k, anchors in enumerate(batches):
            values = under_way.pop(0).result()
            under_way += [start(more) for more in batches[k + AHEAD : k + AHEAD + 1]]
            yield asked.put(values.reshape(len(anchors), *asked.shape[1:-3], *values.shape[1:])), anchors

    def n_read() -> int:
        found = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/read")
        return sum(int(value.get("value", 0)) for one in found if one["name"].endswith("/read") for value in one["values"])

    before = n_read()
    thread = Thread(give())
    return Feed(iter(thread), lambda: n_read() - before, thread.close)


def xbatcher_way(asked: Asked) -> Feed:
    """xbatcher over the part of this process, which xarray reads when it is asked for."""
    import xarray
    import xbatcher

    opened: Any = xarray.open_zarr(asked.file.path, chunks=None, consolidated=False)
    part = opened.isel(dict(zip(DIMS[1:], asked.tile, strict=True)))
    n_slots = asked.slots.stop - asked.slots.start
    n_window = len(asked.window)
    whole = {dim: cut.stop - cut.start for dim, cut in zip(DIMS[1:], asked.tile, strict=True)}
    n_steps = n_window if asked.shuffled or asked.has_window else n_slots
    overlap = {"time": n_window - 1} if n_window > 1 else {}
    samples = xbatcher.BatchGenerator(part, {"time": n_steps, **whole}, input_overlap=overlap, preload_batch=False)

    def read(anchors: Array) -> Array:
        if n_steps == n_slots and not asked.shuffled:
            return samples[int(anchors[0]) // n_slots][NAME].values
        found = [samples[int(a) + asked.window[0]][NAME].values for a in anchors]
        return np.stack(found) if asked.has_window else np.concatenate(found)

    return threaded(asked, read, Decodes.count())


def mosaic_way(asked: Asked) -> Feed:
    """mosaicml-streaming over MDS shards: whole samples, of which each process keeps its part."""
    add_peers()
    mosaic = importlib.import_module("benchmarks.peers.mosaic")
    feed: Feed = mosaic.feed(asked)
    return feed


def memory_way(asked: Asked) -> Feed:
    """The same few batches again and again."""
    order = asked.order
    held = [order[k * asked.batch :][asked.slots] for k in range(min(3, len(order) // asked.batch))]
    arrays = [(asked.put(asked.expected(anchors)), anchors) for anchors in held]

    def give() -> Iterator[tuple[jax.Array, Array]]:
        while True:
            yield from arrays

    return Feed(give(), lambda: 0)


WAYS: dict[str, Callable[[Asked], Feed]] = {
    "shardload": shardload_way,
    "slice": slice_way,
    "grain": grain_way,
    "grain-blocks": grain_blocks_way,
    "tensorstore": tensorstore_way,
    "xbatcher": xbatcher_way,
    "mosaic": mosaic_way,
    MEMORY: memory_way,
}


def missing(way: str) -> str:
    """Why a way cannot run here, and what to install; empty where it can."""
    add_peers()
    name = {"grain-blocks": "grain", "mosaic": "streaming"}.get(way, way)
    if way not in STREAM_PEERS or way == "slice" or importlib.util.find_spec(name) is not None:
        return ""
    if way == "mosaic":
        return (
            "mosaicml-streaming is not installed: it needs torch and NumPy before 2.2, so it is in no extra; pip install "
            "--target FOLDER --no-deps mosaicml-streaming, with torch, and SHARDLOAD_BENCHMARK_PEERS=FOLDER"
        )
    return f"{name} is not installed: pip install 'shardload[bench]'"
