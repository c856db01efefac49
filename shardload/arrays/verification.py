"""Is what the devices hold what the file holds, and how is that known?

Four levels, each with all that those before it prove (docs/design/verify.md):

1. ``"index"``: every shard is the region, shape and dtype that JAX asks for. Always, by `layout` and `assemble`.
2. ``"checksum"``: every part that was copied or sent has the CRC-32 that it was read with (`exchange`, `reader`). Here: what a
   device holds has that of the piece that was handed to it, and replicas have the same on all devices and processes.
3. ``"file"``: a few boxes of each process's own shards are read again, by the format's own library and no other part of
   shardload, and compared with what its devices hold, bit by bit. Padding too.
4. ``"full"``: the same of every element; and one CRC-32 of the whole array.

Every process checks what its own devices hold (`Verifier.check`), then all agree on it (`Verifier.agree`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardload.arrays.assemble import device_values
from shardload.arrays.compare import Padding, Truth, first_difference, sample_boxes, tails_of, value_text, words_of
from shardload.comm.group import Group
from shardload.errors import VerifyError
from shardload.formats.base import Source
from shardload.options import FILE, FULL, INDEX, pad_value
from shardload.planning.region import Region, Selection
from shardload.planning.schedule import Grid, Schedule, plan_blocks
from shardload.system.interruption import let_interruption_pass
from shardload.transfer.buffers import box
from shardload.transfer.checksum import checksum, join_sums, sum_shard
from shardload.units import first_ranks, format_nbytes

__all__ = ["Checked", "Verifier", "VerifyReport"]

_MOST_BOXES = 8  # of each process, for "file"
_MOST_CHUNKS = 1 << 14  # that are read at once, however small they are
_COPIES = 8  # of a box: as stored, as the library reads it, cast, from the device, compared; and what the load still holds

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class VerifyReport:
    """What was proven of an array, in the whole job.

    Attributes
    ----------
    how : str
        ``"index"``, ``"checksum"``, ``"file"`` or ``"full"``: each with what those before it prove.
    n_shards : int
        Shards on devices (replicas counted) that are the region, shape and dtype that JAX asks for.
    n_parts : int
        Parts whose checksum was the same where they were read and where they arrived. Parts that were decoded in place have
        none: they were not copied.
    n_devices : int
        Shards on devices whose checksum is that of the host's piece or of the other devices that hold the same.
    n_boxes, n_elements : int
        Regions, and elements in them, that were read again and are the same bit by bit.
    n_padding : int
        Elements of padding that are the fill value.
    nbytes_reread : int
        Bytes of values read again.
    digest : int or None
        For ``"full"``: CRC-32 of all bytes of the array without padding, in C order and native byte order, as `zlib.crc32`
        has it of all in one piece. The same for any number of ranks and any sharding. Else None.
    seconds : float
        That verifying took on this rank, beside what reading and exchange did for it.
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
        parts = [f"verified by {self.how}: {self.n_shards:,} shards where JAX asks for them"]
        if self.n_parts or self.n_devices:
            parts.append(f"{self.n_parts:,} parts and {self.n_devices:,} device shards with the right checksum")
        if self.n_boxes or self.n_padding:
            again = f"{self.n_elements:,} elements ({format_nbytes(self.nbytes_reread)}) in {self.n_boxes:,} regions"
            parts.append(f"{again} read again and the same bit by bit, {self.n_padding:,} of padding")
        if self.digest is not None:
            parts.append(f"CRC-32 of the array {self.digest:08x}")
        return "; ".join(parts)


_COUNTED = ("n_shards", "n_devices", "n_boxes", "n_elements", "n_padding", "nbytes_reread")


@dataclass
class Checked:
    """What one process found of its own shards: counts as in `VerifyReport`, digests by shard, and its share of the CRC-32."""

    n_shards: int = 0
    n_devices: int = 0
    n_boxes: int = 0
    n_elements: int = 0
    n_padding: int = 0
    nbytes_reread: int = 0
    digests: dict[int, int] = field(default_factory=dict)
    share: int = 0
    seconds: float = 0.0

    @property
    def counts(self) -> list[int]:
        """To be summed over the ranks."""
        return [getattr(self, name) for name in _COUNTED]


class Verifier:
    """Compares an array with the file that it came from.

    Parameters
    ----------
    plan : Schedule
        Who holds what.
    selection : Selection
        Which elements of the file make up the array.
    chunks : Grid
        The array cut into the file's chunks.
    has_chunks : bool
        Whether these are real.
    dtype : dtype
        Of the array.
    how : str
        The level.
    pad : object
        Fill value of the padding.
    seed : int
        Of the boxes that ``"file"`` looks at.
    staging_nbytes : int
        Cap on the memory that this takes.
    name : str
        Of the array, for messages.
    open_again : callable
        Opens the file anew, as nothing but its own library does.
    """

    def __init__(
        self,
        plan: Schedule,
        selection: Selection,
        chunks: Grid,
        *,
        has_chunks: bool,
        dtype: np.dtype[Any],
        how: str,
        pad: Any,
        seed: int,
        staging_nbytes: int,
        name: str,
        open_again: Callable[[], Source],
    ) -> None:
        self._plan, self._selection, self._chunks, self._dtype = plan, selection, chunks, dtype
        self._has_chunks, self._how, self._pad, self._seed = has_chunks, how, pad, seed
        self._room_nbytes = max(1, staging_nbytes // _COPIES)
        self._name, self._open_again = name, open_again

    def run(self, group: Group, array: Any) -> VerifyReport:
        """Check an array that is there. Collective.

        Raises
        ------
        VerifyError, SourceError, PeerError
            On every rank.
        """
        checked, error = Checked(), None
        try:
            checked = self.check(array, group.rank)
        except Exception as found:
            let_interruption_pass(found)
            error = found
        return self.agree(group, checked, group.agree(error, checked.counts))

    def agree(self, group: Group, checked: Checked, sums: list[int], n_parts: int = 0) -> VerifyReport:
        """What all ranks have proven together, after each has checked its own. Collective.

        Parameters
        ----------
        group : Group
            The ranks.
        checked : Checked
            What this one found.
        sums : list of int
            `Checked.counts`, summed over the ranks.
        n_parts : int
            Parts with a checksum, in the whole job.

        Raises
        ------
        VerifyError
            If replicas on different processes differ: on every rank, naming those that hold another.
        """
        started = time.perf_counter()
        report = VerifyReport(self._how, n_parts=n_parts, **dict(zip(_COUNTED, sums, strict=True)))
        if self._how != INDEX and self._plan.shards.n_replicas > 1:
            self._compare_replicas(group, checked.digests)
        if self._how == FULL:
            shares = group.gather_int(checked.share).tolist()
            nbytes = math.prod(self._chunks.shape) * self._dtype.itemsize
            report = replace(report, digest=join_sums(shares, nbytes))
        return replace(report, seconds=checked.seconds + time.perf_counter() - started)

    def _compare_replicas(self, group: Group, digests: Mapping[int, int]) -> None:
        shards = self._plan.shards
        most = np.iinfo(np.int64).max
        least = np.full(2 * shards.n_shards, most, dtype=np.int64)  # of each digest, and of what is missing to the most
        for shard, digest in digests.items():
            least[shard], least[shards.n_shards + shard] = digest, most - digest
        least = group.least_ints(least)
        low, high = least[: shards.n_shards], most - least[shards.n_shards :]
        differ = np.flatnonzero((low != most) & (low != high))
        if not differ.size:
            return
        shard = int(differ[0])
        held = group.gather_int(digests.get(shard, -1)).tolist()
        by_digest = Counter(d for d in held if d >= 0).most_common()
        ranks = {d: [k for k, found in enumerate(held) if found == d] for d, _ in by_digest}
        told = ", ".join(f"{first_ranks(ranks[d], 8)} {d:08x}" for d, _ in by_digest)
        sure = by_digest[0][1] > by_digest[1][1]
        last = by_digest[-1][0]
        blame = f"likelier wrong: {first_ranks(ranks[last], 8)}" if sure else "either may be wrong"
        raise VerifyError(
            f"the replicas of the shard {shards.region(shard)} of {self._name} differ: their CRC-32 is on {told}; {blame}. "
            "Suspect memory, network and device there; load again, and leave that node out if it happens again",
            rank=ranks[last][0] if sure else None,
        )

    def check(self, array: Any, rank: int, pieces: Mapping[Region, Array] | None = None) -> Checked:
        """Compare what the devices of this process hold. Not collective.

        Parameters
        ----------
        array : jax.Array
            The array.
        rank : int
            This rank.
        pieces : mapping of Region to ndarray, optional
            What was handed to the devices, where it is still there.

        Raises
        ------
        VerifyError
            With device, region, first element that differs and both values.
        SourceError
            If the file cannot be read again, or gives other values each time.
        """
        started = time.perf_counter()
        checked = Checked(n_shards=len(array.addressable_shards))
        if self._how != INDEX:
            held: dict[Region, list[Any]] = {}
            for shard in array.addressable_shards:
                held.setdefault(Region.from_index(shard.index, array.shape), []).append(shard)
            numbers = {self._plan.shards.region(s): s for s in self._plan.shards.shards_of(rank)}
            own = {numbers[region]: shards for region, shards in held.items()}
            found = _Own(self._name, rank, own, pieces or {}, self._plan, checked, self._room_nbytes)
            found.check_devices()
            if self._how in (FILE, FULL) and own:
                self._check_file(found)
        checked.seconds = time.perf_counter() - started
        return checked

    def _check_file(self, own: _Own) -> None:
        with closing(self._open_again()) as source:
            truth = Truth(source, self._selection, self._dtype)
            for shard in own.shards:
                true = self._plan.true_region(shard)
                for region in () if true is None else self._boxes(true, len(own.shards)):
                    own.compare(shard, region, truth)
                    own.checked.n_boxes += 1
                    own.checked.n_elements += region.size
                    own.checked.nbytes_reread += region.size * source.dtype.itemsize
                for tail in tails_of(self._plan.shards.region(shard), true):
                    for region in self._pad_boxes(tail):
                        own.compare(shard, region, Padding(pad_value(self._pad, self._dtype), self._dtype))
                        own.checked.n_padding += region.size
                if self._how == FULL and true is not None and self._plan.shards.holders(shard)[0] == own.rank:
                    own.add_share(shard, true, self._chunks.shape)

    def _boxes(self, true: Region, n_shards: int) -> Iterator[Region]:
        itemsize = self._dtype.itemsize
        if self._how == FILE:
            chunks = self._chunks if self._has_chunks else None
            yield from sample_boxes(true, chunks, itemsize, self._seed, -(-_MOST_BOXES // n_shards))
            return
        blocks = plan_blocks(
            self._chunks,
            itemsize,
            max_nbytes=self._room_nbytes,
            n_readers=0,
            within=true.shape,
            max_cells=_MOST_CHUNKS if self._has_chunks else 1 << 62,
        )
        for number in blocks.meeting(true):
            region = blocks.region(number).intersect(true)
            if region is not None:
                yield region

    def _pad_boxes(self, tail: Region) -> Iterator[Region]:
        itemsize = self._dtype.itemsize
        if self._how == FILE:
            yield from sample_boxes(tail, None, itemsize, self._seed, 1)
        else:
            yield from tail.split(max(1, self._room_nbytes // itemsize))


class _Own:
    """The shards of this process, on its devices."""

    def __init__(
        self,
        name: str,
        rank: int,
        shards: dict[int, list[Any]],
        pieces: Mapping[Region, Array],
        plan: Schedule,
        checked: Checked,
        most_nbytes: int,
    ) -> None:
        self.rank, self.shards, self.checked = rank, shards, checked
        self._name, self._pieces, self._plan, self._most_nbytes = name, pieces, plan, most_nbytes

    def check_devices(self) -> None:
        """Compare checksums, where there are two copies of the same values."""
        for number, shards in self.shards.items():
            region = self._plan.shards.region(number)
            piece = self._pieces.get(region)
            apart = [shard for shard in shards if piece is None or not _is_same_memory(shard.data, piece)]
            if self._plan.shards.n_replicas == 1 and (piece is None or not apart):
                continue  # on CPU JAX uses the piece where it is: there is no copy that could differ
            first = None if piece is None else checksum(piece)
            source = "the host's piece"
            self.checked.n_devices += len(shards)
            for shard in apart:
                found = _checksum_on_device(shard.data, self._most_nbytes)
                if first is None:
                    first, source = found, str(shard.device)
                elif found != first:
                    raise VerifyError(
                        f"{shard.device} on rank {self.rank} does not hold what {source} holds of {region} of {self._name}: "
                        f"its CRC-32 is {found:08x}, expected {first:08x}. Likelier wrong is this device, or the way to it",
                        rank=self.rank,
                    )
            self.checked.digests[number] = first or 0

    def compare(self, number: int, region: Region, truth: Truth | Padding) -> None:
        """Compare one box on every device that holds it."""
        whole = self._plan.shards.region(number)
        expected = truth.values(region)
        for shard in self.shards[number]:
            found = device_values(shard.data, region, whole)
            index = first_difference(expected, found)
            if index is None:
                continue
            piece = self._pieces.get(whole)
            why = truth.explain(region, expected, None if piece is None else box(piece, region, whole), found)
            place = tuple(a + i for a, i in zip(region.start, index, strict=True))
            n = int((words_of(expected) != words_of(found)).any(axis=-1).sum())
            raise VerifyError(
                f"{shard.device} on rank {self.rank}, shard {whole} of {self._name}: element {place} is "
                f"{value_text(found[index])}, but {truth.name} has {value_text(expected[index])} there; {n:,} of the "
                f"{region.size:,} elements of {region} differ, this is the first. {why}",
                rank=self.rank,
                index=place,
            )

    def add_share(self, number: int, true: Region, shape: tuple[int, ...]) -> None:
        """This shard's part of the array's CRC-32, from the device."""
        whole = self._plan.shards.region(number)
        for region in true.split(max(1, self._most_nbytes // self.shards[number][0].data.dtype.itemsize)):
            values = np.ascontiguousarray(device_values(self.shards[number][0].data, region, whole))
            self.checked.share ^= sum_shard(values, region, shape)


def _is_same_memory(data: Any, piece: Array) -> bool:
    """Whether JAX uses the piece where it is."""
    if next(iter(data.devices())).platform != "cpu":
        return False
    return bool(np.asarray(data).ctypes.data == piece.ctypes.data)


def _checksum_on_device(data: Any, most_nbytes: int) -> int:
    """Of all of it, as `checksum` has it, in parts that host memory has room for."""
    whole = Region.whole(data.shape)
    crc = 0
    for region in whole.split(max(1, most_nbytes // data.dtype.itemsize)):
        crc = checksum(device_values(data, region, whole), crc)
    return crc
