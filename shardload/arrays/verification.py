"""Do the devices hold the same values as the file, and how do we know?

There are four levels, and each includes those before it (docs/design/verify.md):

1. ``"index"``: every shard has the region, shape and dtype that JAX asks for. Always checked, by `sharding` and `assemble`.
2. ``"checksum"``: every part that was copied or sent still has the CRC-32 that it had when it was read (`exchange`, `reader`).
   Here: each shard on a device has the CRC-32 of its piece on the host, and replicas have the same CRC-32 on all devices and
   processes.
3. ``"file"``: a few regions of each process's own shards, and of their padding, are read again by the format's own library,
   with no other part of shardload, and compared bit by bit with the devices.
4. ``"full"``: the same for every element.

Every process checks its own devices (`Verifier.check`): two copies of the same values (host piece and device, or replicas) are
compared by checksum, a device and the file bit by bit. Then all agree on the result (`agree_all`), for all arrays of a job at
once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.arrays.local_shards import LocalShards, check_replicas
from shardload.comm.group import Group
from shardload.errors import ShardloadError, SourceError, VerifyError
from shardload.formats.contract.array import settle_bools
from shardload.formats.contract.format import Source
from shardload.options import FILE, FULL, INDEX, Options, fill_value
from shardload.planning.region import Array, Region, plan_blocks
from shardload.planning.samples import sample_regions
from shardload.planning.schedule import Schedule, SourceLayout
from shardload.planning.shards import Shards
from shardload.transfer.cast import conversion
from shardload.transfer.checksum import checksum
from shardload.units import PrintedReport, counted, format_nbytes

_MOST_REGIONS = 8  # per process, for "file"
_MOST_CHUNKS = 1 << 14  # chunks to read at once, however small they are
_COPIES = 8  # copies of a region: as stored, as read by the library, cast, from the device, compared; and those of the load
_WHY_NOT = (
    "If the array was changed since it was loaded, or is of another file, that is why. Else load it again; if it differs then, "
    "suspect the memory and the devices of this node, or the storage of the file"
)
COUNTED = ("n_shards", "n_devices", "n_boxes", "n_elements", "n_padding", "nbytes_reread")


@dataclass(frozen=True, repr=False)
class VerifyReport(PrintedReport):
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
    """

    how: str
    n_shards: int = 0
    n_parts: int = 0
    n_devices: int = 0
    n_boxes: int = 0
    n_elements: int = 0
    n_padding: int = 0
    nbytes_reread: int = 0

    def __str__(self) -> str:
        """For a person: one line."""
        parts = [f"verified by {self.how}: {counted(self.n_shards, 'shard')} where JAX asks for them"]
        if self.n_parts or self.n_devices:
            sums = [counted(self.n_parts, "part")] if self.n_parts else []
            sums += [counted(self.n_devices, "device shard")] if self.n_devices else []
            parts.append(f"{' and '.join(sums)} with the right checksum")
        if self.n_boxes or self.n_padding:
            elements, regions = counted(self.n_elements, "element"), counted(self.n_boxes, "region")
            reread = f"{elements} ({format_nbytes(self.nbytes_reread)}) in {regions}"
            parts.append(f"{reread} read again and the same bit by bit, {self.n_padding:,} of padding")
        return "; ".join(parts)


@dataclass
class ShardFindings:
    """What one process found about its own shards.

    It has the counts of a `VerifyReport` by name, and a digest by shard number.
    """

    counted: Counter[str] = field(default_factory=Counter)
    digests: dict[int, int] = field(default_factory=dict)

    @property
    def counts(self) -> list[int]:
        """The counts to sum over the ranks."""
        return [self.counted[name] for name in COUNTED]


@dataclass(frozen=True)
class Verifier:
    """Compares an array with the file that it came from.

    Attributes
    ----------
    name : str
        Name of the array, for messages.
    schedule : Schedule
        Which rank holds which shard.
    layout : SourceLayout
        How the array lies in its file, and how stored numbers become values.
    options : Options
        The level, the fill value of padding, and the cap on memory.
    seed : int
        Seed for the random regions of ``"file"``.
    open_again : callable
        Opens the file again.
    """

    name: str
    schedule: Schedule
    layout: SourceLayout
    options: Options
    seed: int
    open_again: Callable[[], Source]

    def check(self, array: Any, rank: int, pieces: Mapping[Region, Array] | None = None) -> ShardFindings:
        """Check the shards on the devices of this process, beyond what ``"index"`` promises. Not collective.

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
        findings = ShardFindings(Counter(n_shards=len(array.sharding.addressable_devices)))
        local = LocalShards(array, self.schedule.shards, rank)
        self._check_devices(local, pieces or {}, findings)
        if self.options.verify in (FILE, FULL) and local.numbers:
            self._check_file(local, findings)
        return findings

    @property
    def _most_nbytes(self) -> int:
        """Bytes of a region that is compared at a time."""
        return max(1, self.options.staging_nbytes // _COPIES)

    def _check_devices(self, local: LocalShards, pieces: Mapping[Region, Array], findings: ShardFindings) -> None:
        """Compare checksums, if there are two copies of the same values."""
        for number in local.numbers:
            region, devices = local.regions[number], local.devices(number)
            piece = pieces.get(region)
            copies = [k for k in range(len(devices)) if piece is None or not local.uses(piece, number, k)]
            if self.schedule.shards.n_replicas == 1 and (piece is None or not copies):
                continue  # on CPU JAX uses the piece without a copy, so nothing can differ
            digest, source = (None, "") if piece is None else (checksum(piece), "the host's piece")
            findings.counted["n_devices"] += len(devices)
            for k in copies:
                on_device = local.checksum(number, region, k, self._most_nbytes)
                if digest is None:
                    digest, source = on_device, str(devices[k])
                elif on_device != digest:
                    raise VerifyError(
                        f"{devices[k]} on rank {local.rank} does not hold what {source} holds of {region} of {self.name}: its "
                        f"CRC-32 is {on_device:08x}, expected {digest:08x}. Likelier wrong is this device, or the way to it",
                        rank=local.rank,
                    )
            findings.digests[number] = digest or 0

    def _check_file(self, local: LocalShards, findings: ShardFindings) -> None:
        shards, layout = self.schedule.shards, self.layout
        with closing(self.open_again()) as source:
            source.expect(layout.selection.region)
            for number in local.numbers:
                contents = list(shards.contents(number, layout.chunks.shape))
                n_sources = sum(content.source is not None for content in contents)
                for content in contents:
                    if content.source is None:
                        value = fill_value(self.options.pad, layout.dtype, content.fill)
                        parts = content.place.split(max(1, self._most_nbytes // layout.dtype.itemsize))
                        if self.options.verify == FILE:
                            parts = sample_regions(content.place, None, layout.dtype.itemsize, self.seed, 1)
                        for region in parts:
                            padding = np.full(region.shape, value, layout.dtype)
                            self._compare(local, number, region, padding, "the padding")
                            findings.counted["n_padding"] += region.size
                        continue
                    for region in self._regions(content.source, n_sources * len(local.numbers)):
                        expected, places = true_values(source, layout, region), list(content.places(region))
                        for place in places:
                            self._compare(local, number, place, expected, str(source.info))
                        findings.counted["n_boxes"] += 1
                        findings.counted["n_elements"] += region.size * len(places)
                        findings.counted["nbytes_reread"] += region.size * source.dtype.itemsize

    def _compare(self, local: LocalShards, number: int, place: Region, expected: Array, whence: str) -> None:
        """Compare a region of a shard, in the coordinates of the jax.Array, on every device that holds it."""
        for k, device in enumerate(local.devices(number)):
            values = local.view(number, place, k)
            index = first_difference(expected, values)
            if index is None:
                continue
            element = tuple(a + i for a, i in zip(place.start, index, strict=True))
            n = int((words_of(expected) != words_of(values)).any(axis=-1).sum())
            raise VerifyError(
                f"{device} on rank {local.rank}, shard {local.regions[number]} of {self.name}: element {element} is "
                f"{value_text(values[index])}, but {whence} has {value_text(expected[index])} there; {n:,} of the "
                f"{place.size:,} elements of {place} differ, this is the first. {_WHY_NOT}",
                rank=local.rank,
                index=element,
            )

    def _regions(self, true: Region, n_shards: int) -> Iterator[Region]:
        """The regions of one of `n_shards` contents of shards to compare with the file: a few, or together all of it."""
        layout, itemsize = self.layout, self.layout.dtype.itemsize
        if self.options.verify == FILE:
            chunks = layout.chunks if layout.has_chunks else None
            yield from sample_regions(true, chunks, itemsize, self.seed, -(-_MOST_REGIONS // n_shards))
            return
        most_cells = _MOST_CHUNKS if layout.has_chunks else 1 << 62
        blocks = plan_blocks(layout.chunks, itemsize, max_nbytes=self._most_nbytes, within=true.shape, max_cells=most_cells)
        for _, region in blocks.cut(true):
            yield region


def agree_all(
    group: Group,
    level: str,
    arrays: Iterable[tuple[str, Shards]],
    findings: Sequence[ShardFindings],
    sums: Sequence[list[int]],
) -> list[VerifyReport]:
    """Make the reports of all ranks, after each has checked its own shards of some arrays. Collective.

    However many arrays there are, they take one reduction, if there are replicas.

    Parameters
    ----------
    group : Group
        The ranks.
    level : str
        ``"index"``, ``"checksum"``, ``"file"`` or ``"full"``, for all of them.
    arrays : iterable of (str, Shards)
        For each array its name, and which rank holds which shard.
    findings : sequence of ShardFindings
        The results of this rank.
    sums : sequence of list of int
        For each array `ShardFindings.counts`, summed over the ranks.

    Raises
    ------
    VerifyError
        If replicas on different processes differ: on every rank, with the ranks that hold each version.
    """
    pairs = zip(arrays, findings, strict=True)
    replicas = [(name, shards, finding.digests.items()) for (name, shards), finding in pairs if shards.n_replicas > 1]
    if replicas and level != INDEX:
        check_replicas(
            group,
            replicas,
            "Suspect memory, network and device there; load again, and leave that node out if it happens again",
        )
    return [VerifyReport(level, **dict(zip(COUNTED, of_array, strict=True))) for of_array in sums]


# --- which values must an array have, and where does it differ first?


def true_values(source: Source, layout: SourceLayout, region: Region) -> Array:
    """The file's values of a region, read by the format's own library alone, decoded, and cast to the array's dtype."""
    info, place = source.info, layout.selection.to_file(region)
    try:
        raw = np.ascontiguousarray(source.plain(place), dtype=source.dtype).reshape(region.shape)
    except Exception as error:
        raise SourceError(
            f"{info} could not be read again to verify it (elements {place}): {type(error).__name__}: {error}",
            path=info.path,
            dataset=info.dataset,
        ) from error
    if raw.dtype.kind == "b":
        raw = raw.copy()
        settle_bools(raw)
    if not layout.casts:
        return raw
    out = np.empty(region.shape, dtype=layout.dtype)
    conversion(layout.decoding)(raw, out, f"{info}, elements {place},")
    return out


def first_difference(expected: Array, found: Array) -> tuple[int, ...] | None:
    """The first index, in C order, where two arrays of one shape and dtype differ in any bit; None if they are the same.

    >>> first_difference(np.array([0.0, np.nan]), np.array([-0.0, np.nan]))
    (0,)
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise ShardloadError(f"{found.shape} {found.dtype} cannot be compared with {expected.shape} {expected.dtype}")
    differ = (words_of(expected) != words_of(found)).any(axis=-1)
    if not differ.any():
        return None
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), expected.shape))


def words_of(data: Array) -> Array:
    """The bits of each element: shape ``(size, words per element)``."""
    width = math.gcd(data.itemsize, 8)
    flat = np.ascontiguousarray(data).reshape(-1)
    return flat.view(f"u{width}").reshape(data.size, data.itemsize // width)


def value_text(value: Any) -> str:
    """A value and its bytes. The bytes tell values apart that look alike as text, for example NaNs.

    >>> value_text(np.int16(258))
    '258 (bytes 0201)'
    """
    return f"{value} (bytes {np.asarray(value).tobytes().hex()})"
