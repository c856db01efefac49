"""Do the devices hold the same values as the file, and how do we know?

There are four levels, and each includes those before it (docs/design/verify.md):

1. ``"index"``: every shard has the region, shape and dtype that JAX asks for. Always checked, by `sharding` and `assemble`.
2. ``"checksum"``: every part that was copied or sent still has the CRC-32 that it had when it was read (`exchange`, `reader`).
   Here: each shard on a device has the CRC-32 of its piece on the host, and replicas have the same CRC-32 on all devices and
   processes.
3. ``"file"``: a few regions of each process's own shards, and of their padding, are read again by the format's own library,
   with no other part of shardload, and compared bit by bit with the devices.
4. ``"full"``: the same for every element, and one CRC-32 of the whole array.

Every process checks its own devices (`Verifier.check`). Then all agree on the result (`agree_all`), for all arrays
of a job at once.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardload.arrays.compare import Padding, Truth, sample_regions
from shardload.arrays.local_shards import COUNTED, Found, LocalShards
from shardload.comm.group import Group
from shardload.errors import VerifyError
from shardload.formats.contract.format import Source
from shardload.options import FILE, FULL, INDEX, fill_value
from shardload.planning.blocks import plan_blocks
from shardload.planning.region import Region
from shardload.planning.schedule import Schedule
from shardload.planning.source_layout import SourceLayout
from shardload.transfer.checksum import join_sums
from shardload.units import counted, first_ranks, format_nbytes
from shardload.values.decoding import Decoding

__all__ = ["Found", "Verifier", "VerifyHow", "VerifyReport", "agree_all"]

_MOST_REGIONS = 8  # per process, for "file"
_MOST_CHUNKS = 1 << 14  # chunks to read at once, however small they are
_MOST = np.iinfo(np.int64).max
_COPIES = 8  # copies of a region: as stored, as read by the library, cast, from the device, compared; and those of the load

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class VerifyReport:
    """What was proven of an array, in the whole job.

    Attributes
    ----------
    how : str
        ``"index"``, ``"checksum"``, ``"file"`` or ``"full"``: each level includes those before it.
    n_shards : int
        Shards on devices (replicas counted) that have the region, shape and dtype that JAX asks for.
    n_parts : int
        Parts with the same checksum where they were read and where they arrived. A part that was decoded in place has no
        checksum, because it was not copied.
    n_devices : int
        Shards on devices with the checksum of the host's piece, or of the other devices that hold the same region.
    n_boxes, n_elements : int
        Regions that were read again and are the same bit by bit, and the elements in them.
    n_padding : int
        Elements of padding that are the fill value.
    nbytes_reread : int
        Bytes of values read again.
    digest : int or None
        For ``"full"``: CRC-32 of all bytes of the array without padding, in C order and native byte order, as `zlib.crc32`
        gives it for the whole array. It is the same for any number of ranks and any sharding. None for the other levels.
    seconds : float
        Seconds that verifying took on this rank, without the checksums during reading and exchange.
    """

    how: str
    n_shards: int = 0
    n_parts: int = 0
    n_devices: int = 0
    n_boxes: int = 0
    n_elements: int = 0
    n_padding: int = 0
    nbytes_reread: int = 0
    digest: int | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        """For a person: one line."""
        parts = [f"verified by {self.how}: {counted(self.n_shards, 'shard')} where JAX asks for them"]
        if self.n_parts or self.n_devices:
            sums = f"{counted(self.n_parts, 'part')} and {counted(self.n_devices, 'device shard')}"
            parts.append(f"{sums} with the right checksum")
        if self.n_boxes or self.n_padding:
            elements, regions = counted(self.n_elements, "element"), counted(self.n_boxes, "region")
            again = f"{elements} ({format_nbytes(self.nbytes_reread)}) in {regions}"
            parts.append(f"{again} read again and the same bit by bit, {self.n_padding:,} of padding")
        if self.digest is not None:
            parts.append(f"CRC-32 of the array {self.digest:08x}")
        return "; ".join(parts)


@dataclass(frozen=True)
class VerifyHow:
    """How an array is verified.

    Parameters
    ----------
    level : str
        ``"index"``, ``"checksum"``, ``"file"`` or ``"full"``.
    staging_nbytes : int
        Cap on the memory for verifying.
    pad : object
        Fill value of the padding; None without padding.
    seed : int
        Seed for the random regions of ``"file"``.
    decoding : Decoding or None
        How stored numbers become values; None if they are only cast.
    """

    level: str
    staging_nbytes: int
    pad: Any = None
    seed: int = 0
    decoding: Decoding | None = None


class Verifier:
    """Compares an array with the file that it came from.

    Parameters
    ----------
    name : str
        Name of the array, for messages.
    schedule : Schedule
        Which rank holds which shard.
    layout : SourceLayout
        How the array lies in its file, and its dtype.
    how : VerifyHow
        The level, and its limits.
    open_again : callable
        Opens the file again.
    """

    def __init__(
        self, name: str, schedule: Schedule, layout: SourceLayout, how: VerifyHow, open_again: Callable[[], Source]
    ) -> None:
        self._name, self._schedule, self._layout = name, schedule, layout
        self._how, self._open_again = how, open_again
        self._room_nbytes = max(1, how.staging_nbytes // _COPIES)

    def check(self, array: Any, rank: int, pieces: Mapping[Region, Array] | None = None) -> Found:
        """Check the shards on the devices of this process. Not collective.

        Parameters
        ----------
        array : jax.Array
            The array.
        rank : int
            This rank.
        pieces : mapping of Region to ndarray, optional
            The host pieces that were handed to the devices, if they still exist.

        Raises
        ------
        VerifyError
            If values differ. It names the device, the region, the first element that differs and both values.
        SourceError
            If the file cannot be read again, or gives different values each time.
        """
        started = time.perf_counter()
        if self._how.level == INDEX:
            found = Found(n_shards=len(array.addressable_shards))
        else:
            local = LocalShards(self._name, array, self._schedule.shards, rank, pieces or {}, self._room_nbytes)
            local.check_devices()
            if self._how.level in (FILE, FULL) and local.on_devices:
                self._check_file(local)
            found = local.found
        found.seconds = time.perf_counter() - started
        return found

    @property
    def level(self) -> str:
        """``"index"``, ``"checksum"``, ``"file"`` or ``"full"``."""
        return self._how.level

    @property
    def has_replicas(self) -> bool:
        """True if several devices hold the same shard."""
        return self._schedule.shards.n_replicas > 1

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without padding."""
        return math.prod(self._layout.chunks.shape) * self._layout.dtype.itemsize

    def fold(self, digests: Mapping[int, int]) -> Array:
        """The digest of each shard and ``most - digest``, for minima over the ranks; `most` for a shard that is not here."""
        n = self._schedule.shards.n_shards
        least = np.full(2 * n, _MOST, dtype=np.int64)
        for shard, digest in digests.items():
            least[shard], least[n + shard] = digest, _MOST - digest
        return least

    def first_that_differs(self, least: Array) -> int | None:
        """The first shard whose replicas have different digests; None if there is none. `least`: the minima."""
        n = self._schedule.shards.n_shards
        low, high = least[:n], _MOST - least[n:]
        differ = np.flatnonzero((low != _MOST) & (low != high))
        return int(differ[0]) if differ.size else None

    def differing(self, shard: int, held: list[int]) -> VerifyError:
        """The error about replicas that differ. `held`: the digest that each rank has, or -1."""
        by_digest = Counter(d for d in held if d >= 0).most_common()
        ranks = {d: [k for k, found in enumerate(held) if found == d] for d, _ in by_digest}
        told = ", ".join(f"{first_ranks(ranks[d], 8)} {d:08x}" for d, _ in by_digest)
        sure = by_digest[0][1] > by_digest[1][1]
        last = by_digest[-1][0]
        blame = f"likelier wrong: {first_ranks(ranks[last], 8)}" if sure else "either may be wrong"
        return VerifyError(
            f"the replicas of the shard {self._schedule.shards.region(shard)} of {self._name} differ: their CRC-32 is on "
            f"{told}; {blame}. Suspect memory, network and device there; load again, and leave that node out if it "
            "happens again",
            rank=ranks[last][0] if sure else None,
        )

    def _check_file(self, local: LocalShards) -> None:
        shards, layout, found = self._schedule.shards, self._layout, local.found
        with closing(self._open_again()) as source:
            truth = Truth(source, layout.selection, layout.dtype, self._how.decoding)
            for number in local.on_devices:
                contents = list(shards.contents(number, layout.chunks.shape))
                n_sources = sum(content.source is not None for content in contents)
                for content in contents:
                    if content.source is None:
                        value = fill_value(self._how.pad, layout.dtype, content.fill)
                        for region in self._padding_regions(content.place):
                            local.compare(number, region, Padding(value, layout.dtype))
                            found.n_padding += region.size
                        continue
                    for region in self._regions(content.source, n_sources * len(local.on_devices)):
                        places = list(content.places(region))
                        local.compare(number, region, truth, places)
                        found.n_boxes += 1
                        found.n_elements += region.size * len(places)
                        found.nbytes_reread += region.size * source.dtype.itemsize
                if self._how.level == FULL and shards.holders(number)[0] == local.rank:
                    local.add_share(number, layout.chunks.shape)

    def _regions(self, true: Region, n_shards: int) -> Iterator[Region]:
        """The regions of one of `n_shards` contents of shards to compare with the file: a few, or together all of it."""
        layout, itemsize = self._layout, self._layout.dtype.itemsize
        if self._how.level == FILE:
            chunks = layout.chunks if layout.has_chunks else None
            yield from sample_regions(true, chunks, itemsize, self._how.seed, -(-_MOST_REGIONS // n_shards))
            return
        blocks = plan_blocks(
            layout.chunks,
            itemsize,
            max_nbytes=self._room_nbytes,
            within=true.shape,
            max_cells=_MOST_CHUNKS if layout.has_chunks else 1 << 62,
        )
        for number in blocks.meeting(true):
            region = blocks.region(number).intersect(true)
            if region is not None:
                yield region

    def _padding_regions(self, tail: Region) -> Iterator[Region]:
        itemsize = self._layout.dtype.itemsize
        if self._how.level == FILE:
            yield from sample_regions(tail, None, itemsize, self._how.seed, 1)
        else:
            yield from tail.split(max(1, self._room_nbytes // itemsize))


def agree_all(
    group: Group,
    level: str,
    make_verifiers: Callable[[], Sequence[Verifier]],
    found: Sequence[Found],
    sums: Sequence[list[int]],
) -> list[VerifyReport]:
    """Make the reports of all ranks, after each has checked its own shards of some arrays. Collective.

    However many arrays there are, they take one reduction (if there are replicas) and one message of each rank (for "full").

    Parameters
    ----------
    group : Group
        The ranks.
    level : str
        ``"index"``, ``"checksum"``, ``"file"`` or ``"full"``, for all of them.
    make_verifiers : callable
        Makes a `Verifier` of each array; not called for ``"index"``.
    found : sequence of Found
        The results of this rank.
    sums : sequence of list of int
        For each array `Found.counts`, summed over the ranks.

    Raises
    ------
    VerifyError
        If replicas on different processes differ: on every rank, with the ranks that hold each version.
    """
    started = time.perf_counter()
    if level == INDEX:
        return [
            VerifyReport(level, **dict(zip(COUNTED, counts, strict=True)), seconds=mine.seconds)
            for counts, mine in zip(sums, found, strict=True)
        ]
    verifiers = make_verifiers()
    reports = [VerifyReport(level, **dict(zip(COUNTED, counts, strict=True))) for counts in sums]
    pairs = [(one, mine) for one, mine in zip(verifiers, found, strict=True) if one.has_replicas]
    if pairs:
        folded = [one.fold(mine.digests) for one, mine in pairs]
        least = group.least_ints(np.concatenate(folded))
        ends = np.cumsum([len(part) for part in folded])[:-1]
        for (one, mine), part in zip(pairs, np.split(least, ends), strict=True):
            shard = one.first_that_differs(part)
            if shard is not None:
                raise one.differing(shard, group.gather_int(mine.digests.get(shard, -1)).tolist())
    if level == FULL:
        shares = group.gather_ints([mine.share for mine in found])
        digests = [join_sums(shares[:, k].tolist(), one.nbytes) for k, one in enumerate(verifiers)]
        reports = [replace(report, digest=digest) for report, digest in zip(reports, digests, strict=True)]
    seconds = time.perf_counter() - started
    return [replace(report, seconds=mine.seconds + seconds) for report, mine in zip(reports, found, strict=True)]
