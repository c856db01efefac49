"""How does a rank read a dataset that is in a store, without opening the file there? By what another rank tells it.

1. `StoreSource.tell` runs on a rank that has the file open. It tells which version of the object that is; where the chunks of a
   region are, or where the dataset begins; and all else as a *skeleton*: an HDF5 file in memory with a dataset of that type,
   shape, filters and fill value, but without values.
2. `SkeletonSource` reads as `Hdf5Source` does, but asks the skeleton in place of the file, and reads bytes of the object.
3. If only the HDF5 library undoes the filters, stored chunks are put into a copy of the skeleton, from which HDF5 reads.

Where this is not possible, nothing is told, and each rank opens the file.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import h5py
import numpy as np

from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo, Labels, Properties
from shardload.formats.contract.chunk_reader import chunks_met
from shardload.formats.contract.format import Source, UndecodedError
from shardload.formats.hdf5.chunks import ChunkPlaces, ChunkTable, open_chunks
from shardload.formats.hdf5.filters import filter_of, missing_filter
from shardload.formats.hdf5.links import OtherFiles
from shardload.formats.hdf5.opened import OpenDataset, OpenFacts, cached, file_in_memory, file_of, image_of
from shardload.formats.hdf5.source import Hdf5Source
from shardload.planning.region import Region
from shardload.storage.block_cache import BlockCache
from shardload.storage.objects import Ints, Ranges, StoredObject
from shardload.storage.remote import RemoteObject, expect

_NAME = b"values"  # of the dataset in a skeleton
_MOST_TOLD = 1 << 22  # chunks, some 6 bytes for each

Json = dict[str, Any]


class StoreSource(Hdf5Source):
    """A dataset of a file in a store that is open here."""

    def tell(self, region: Region) -> Json | None:
        """What ranks that read `region` must know (`ArrayInfo.parts`); None if they have to open the file."""
        dataset, cache, places = self.dataset, self.dataset.raw, self.places
        if not isinstance(cache, BlockCache) or not isinstance(cache.below, RemoteObject) or self.info.refused is not None:
            return None
        image, has_filters = _skeleton_of(dataset)
        filters = [[number, flags, list(values), name.hex()] for number, flags, values, name in dataset.stored_filters]
        parts: Json = {"pin": list(cache.below.pin), "skeleton": base64.b64encode(image).decode(), "filters": filters}
        if places is not None:
            box = chunks_met(region, places.chunk) if region.size else [range(0)] * region.ndim
            if math.prod(map(len, box)) > _MOST_TOLD:
                return None
            if not has_filters and open_chunks(dataset, self.dtype, places) is None:
                return None
            table = places.of(box).copy()
            table[0, table[0] >= 0] += cache.start
            n_stored, is_whole = int((table[0] >= 0).sum()), tuple(map(len, box)) == places.counts
            parts |= {"box": [[axis.start, axis.stop] for axis in box], "chunks": _packed(table)}
            parts["n_stored"] = n_stored if is_whole else max(n_stored, 1)  # to count all, HDF5 goes through their index
        elif dataset.creation.get_layout() == h5py.h5d.CONTIGUOUS and dataset.extent is not None:
            if self._contiguous is None:
                return None
            parts["extent"] = [dataset.extent[0] + cache.start, dataset.extent[1]]
        return parts


def _skeleton_of(dataset: OpenDataset) -> tuple[bytes, bool]:
    """The bytes of a file with such a dataset, and whether it has the same filters: not if one is missing here, or if it adds
    parameters of its own that are not known (`Codec.of_caller`).
    """
    for has_filters in (True, False):
        creation, layout = dataset.creation.copy(), dataset.creation.get_layout()
        if dataset.stored_filters:
            creation.remove_filter(h5py.h5z.FILTER_ALL)
        for number, flags, values, _ in dataset.stored_filters if has_filters else ():
            creation.set_filter(number, flags, values[slice(*filter_of(number).of_caller)])
        if layout != h5py.h5d.COMPACT:
            creation.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR if layout == h5py.h5d.CHUNKED else h5py.h5d.ALLOC_TIME_LATE)
        with file_in_memory() as file:
            try:
                copy = h5py.h5d.create(file.id, _NAME, dataset.kind.copy(), dataset.id.get_space(), creation)
            except (RuntimeError, TypeError, ValueError):
                if not has_filters:
                    raise
                continue
            if layout == h5py.h5d.COMPACT:  # its values are in its header
                values = np.empty(int(dataset.id.get_storage_size()), dtype=np.uint8)
                dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, values, dataset.kind)
                copy.write(h5py.h5s.ALL, h5py.h5s.ALL, values, dataset.kind)
            if has_filters and OpenDataset(copy, dataset.facts).stored_filters != dataset.stored_filters:
                continue
            return image_of(file), has_filters
    raise ValueError("HDF5 cannot make a dataset of that type")


class SkeletonSource(Hdf5Source):
    """A dataset that is open by the skeleton that another rank told.

    Parameters
    ----------
    info : ArrayInfo
        Its description, with `parts`.
    stored : StoredObject
        The object, in the version of the skeleton. `close` closes it.
    access : Access
        What the caller allows.
    open_whole : callable
        Opens the dataset in the file, for what the skeleton does not have.
    """

    def __init__(self, info: ArrayInfo, stored: StoredObject, access: Access, open_whole: Callable[[], Source]) -> None:
        parts: Mapping[str, Any] = info.parts or {}
        self._image = base64.b64decode(parts["skeleton"])
        facts = OpenFacts(file_of(self._image), stored=stored)
        dataset = OpenDataset(h5py.h5d.open(facts.file.id, _NAME), facts)
        dataset.__dict__.update(  # what the skeleton does not have as the file has it
            raw=stored,
            extent=tuple(parts["extent"]) if "extent" in parts else None,
            n_stored=parts.get("n_stored", 0),
            stored_filters=[
                (number, flags, tuple(values), bytes.fromhex(name)) for number, flags, values, name in parts["filters"]
            ],
        )
        super().__init__(dataset, info, OtherFiles(access=access), close=facts.close)
        self._open_whole = open_whole

    @cached
    def places(self) -> ChunkPlaces | None:
        """Where the chunks are; None for a dataset without chunks."""
        parts = self.info.parts or {}
        if "box" not in parts:
            return None
        box = tuple(range(*ends) for ends in parts["box"])
        table = ChunkTable(box, _unpacked(parts["chunks"]).reshape(3, *map(len, box)))
        return ChunkPlaces(self.dataset, table=table)

    def expect_in_order(self, regions: Iterator[Region]) -> None:
        """See `Source`: runs of values, or chunks for HDF5 to decode, are fetched ahead."""
        stored = self.dataset.raw
        if stored is not None:
            expect((stored, *extent) for region in regions if region.size for extent in self._extents(region))

    def _extents(self, region: Region) -> Iterator[tuple[Ints, Ints]]:
        if self._contiguous is not None:
            yield from self._contiguous.extents(region, self.dtype)
        elif self.places is not None:
            for part in self._parts(region):
                self.places.check(part)  # before it is cut into requests, which may be billions
                offsets, sizes, _ = self.places.of(chunks_met(part, self.places.chunk))
                yield offsets[offsets >= 0], sizes[offsets >= 0]

    @contextlib.contextmanager
    def _with_values(self, part: Region) -> Iterator[Any]:
        """A copy of the skeleton's dataset, with the stored chunks that meet a part."""
        places, stored = self.places, self.dataset.raw
        if places is None or stored is None:
            yield self.dataset.id
            return
        for number, _, _, name in self.dataset.stored_filters:
            if (why := missing_filter(number, name)) is not None:  # here: the rank that told has it
                raise UndecodedError(f"{self.info} holds {why}")
        box = chunks_met(part, places.chunk)
        offsets, sizes, masks = places.of(box)
        is_stored = offsets >= 0
        ranges = Ranges(offsets[is_stored], sizes[is_stored], stored.most_gap_nbytes)
        chunks = iter(stored.read_ranges(ranges, np.empty(ranges.nbytes, dtype=np.uint8)))
        with file_of(self._image) as file:
            copy = h5py.h5d.open(file.id, _NAME)
            for index, offset, mask in zip(itertools.product(*box), offsets.tolist(), masks.tolist(), strict=True):
                if offset >= 0:
                    start = tuple(k * c for k, c in zip(index, places.chunk, strict=True))
                    copy.write_direct_chunk(start, bytes(next(chunks)), mask)
            del copy  # HDF5 would undo all filters of the chunk that was written last: it forgets the mask (seen in 2.0.0)
            yield h5py.h5d.open(file.id, _NAME)

    def _check_whole(self) -> None:
        """Nothing to do: an object of one version is never cut."""

    # --- what the skeleton does not have

    @cached
    def _whole(self) -> Source:
        return self._open_whole()

    def plain(self, region: Region) -> np.ndarray[Any, Any]:
        """The values as h5py gives them, from the file itself."""
        return self._whole.plain(region)

    def labels(self) -> Labels:
        """See `Source`."""
        return self._whole.labels()

    def group_attrs(self) -> Mapping[str, Any]:
        """See `Source`."""
        return self._whole.group_attrs()

    def properties(self) -> Properties:
        """See `Source`."""
        return self._whole.properties()

    def close(self) -> None:
        """Close the object, and the file if it was opened."""
        if (whole := self.__dict__.get("_whole")) is not None:
            whole.close()
        super().close()


# --- arrays and bytes in JSON


def _packed(table: np.ndarray[Any, Any]) -> str:
    """Offsets, sizes and masks as text. Bytes of the same weight stand together: most are zero, and compress well."""
    planes = np.ascontiguousarray(table.astype("<i8")).view(np.uint8).reshape(-1, 8).T
    return base64.b64encode(zlib.compress(planes.tobytes(), level=1)).decode()


def _unpacked(text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The inverse of `_packed`.

    >>> _unpacked(_packed(np.array([[-1, 1 << 40], [0, 300], [0, 1]]))).tolist()
    [[-1, 1099511627776], [0, 300], [0, 1]]
    """
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8).reshape(8, -1)
    return np.ascontiguousarray(planes.T).view("<i8").reshape(3, -1).astype(np.int64)
