"""Do the devices of this process hold the right values?

Two copies of the same values (host piece and device, or replicas) are compared by checksum. A device and the file are compared
bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.arrays.assemble import device_values
from shardload.arrays.compare import Padding, Truth, first_difference, value_text, words_of
from shardload.errors import VerifyError
from shardload.planning.region import Region
from shardload.planning.shards import Shards
from shardload.transfer.buffers import view_of
from shardload.transfer.checksum import checksum, sum_shard

__all__ = ["COUNTED", "Found", "LocalShards"]

Array = np.ndarray[Any, Any]

COUNTED = ("n_shards", "n_devices", "n_boxes", "n_elements", "n_padding", "nbytes_reread")


@dataclass
class Found:
    """What one process found about its own shards.

    It has counts as in `VerifyReport`, a digest by shard number, and this process's share of the CRC-32 of the whole array.
    """

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
        """The counts to sum over the ranks."""
        return [getattr(self, name) for name in COUNTED]


class LocalShards:
    """The shards of one array on the devices of this process, and what was found about them.

    Parameters
    ----------
    name : str
        Name of the array, for messages.
    array : jax.Array
        The array.
    shards : Shards
        Which rank holds which shard.
    rank : int
        This rank.
    pieces : mapping of Region to ndarray
        The host pieces that were handed to the devices, if they still exist.
    room_nbytes : int
        Most bytes to copy to the host at a time.
    """

    def __init__(
        self, name: str, array: Any, shards: Shards, rank: int, pieces: Mapping[Region, Array], room_nbytes: int
    ) -> None:
        held: dict[Region, list[Any]] = {}
        for shard in array.addressable_shards:
            held.setdefault(Region.from_index(shard.index, array.shape), []).append(shard)
        numbers = {shards.region(number): number for number in shards.shards_of(rank)}
        self.on_devices = {numbers[region]: found for region, found in held.items()}
        self.rank, self.found = rank, Found(n_shards=len(array.addressable_shards))
        self._name, self._shards, self._pieces, self._room_nbytes = name, shards, pieces, room_nbytes

    def check_devices(self) -> None:
        """Compare checksums, if there are two copies of the same values."""
        for number, shards in self.on_devices.items():
            region = self._shards.region(number)
            piece = self._pieces.get(region)
            apart = [shard for shard in shards if piece is None or not _is_same_memory(shard.data, piece)]
            if self._shards.n_replicas == 1 and (piece is None or not apart):
                continue  # on CPU JAX uses the piece without a copy, so nothing can differ
            first = None if piece is None else checksum(piece)
            source = "the host's piece"
            self.found.n_devices += len(shards)
            for shard in apart:
                found = _checksum_on_device(shard.data, self._room_nbytes)
                if first is None:
                    first, source = found, str(shard.device)
                elif found != first:
                    raise VerifyError(
                        f"{shard.device} on rank {self.rank} does not hold what {source} holds of {region} of {self._name}: "
                        f"its CRC-32 is {found:08x}, expected {first:08x}. Likelier wrong is this device, or the way to it",
                        rank=self.rank,
                    )
            self.found.digests[number] = first or 0

    def compare(self, number: int, region: Region, truth: Truth | Padding, places: Iterable[Region] | None = None) -> None:
        """Compare one region on every device that holds it.

        Parameters
        ----------
        number : int
            The shard.
        region : Region
            The region, in the coordinates of the array that `truth` has.
        truth : Truth or Padding
            The values that are expected.
        places : iterable of Region, optional
            Where they lie in the jax.Array; default: at the same coordinates, once.
        """
        expected = truth.values(region)
        for place in (region,) if places is None else places:
            self._compare(number, region, truth, expected, place)

    def _compare(self, number: int, region: Region, truth: Truth | Padding, expected: Array, held: Region) -> None:
        whole = self._shards.region(number)
        for shard in self.on_devices[number]:
            found = device_values(shard.data, held, whole)
            index = first_difference(expected, found)
            if index is None:
                continue
            piece = self._pieces.get(whole)
            why = truth.explain(region, expected, None if piece is None else view_of(piece, held, whole), found)
            place = tuple(a + i for a, i in zip(held.start, index, strict=True))
            n = int((words_of(expected) != words_of(found)).any(axis=-1).sum())
            raise VerifyError(
                f"{shard.device} on rank {self.rank}, shard {whole} of {self._name}: element {place} is "
                f"{value_text(found[index])}, but {truth.name} has {value_text(expected[index])} there; {n:,} of the "
                f"{region.size:,} elements of {region} differ, this is the first. {why}",
                rank=self.rank,
                index=place,
            )

    def add_share(self, number: int, shape: tuple[int, ...]) -> None:
        """Add this shard's share of the CRC-32 of the file's array, computed from the device's values."""
        core = self._shards.core_in(number, shape)
        if core is None:
            return
        (true, place), whole = core, self._shards.region(number)
        steps = [p - t for p, t in zip(place.start, true.start, strict=True)]
        for region in true.split(max(1, self._room_nbytes // self.on_devices[number][0].data.dtype.itemsize)):
            values = np.ascontiguousarray(device_values(self.on_devices[number][0].data, region.moved(steps), whole))
            self.found.share ^= sum_shard(values, region, shape)


def _is_same_memory(data: Any, piece: Array) -> bool:
    """True if JAX uses the piece's own memory (on CPU)."""
    if next(iter(data.devices())).platform != "cpu":
        return False
    return bool(np.asarray(data).ctypes.data == piece.ctypes.data)


def _checksum_on_device(data: Any, room_nbytes: int) -> int:
    """The `checksum` of a shard on a device, computed region by region to stay under `room_nbytes`."""
    whole = Region.whole(data.shape)
    crc = 0
    for region in whole.split(max(1, room_nbytes // data.dtype.itemsize)):
        crc = checksum(device_values(data, region, whole), crc)
    return crc
