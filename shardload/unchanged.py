"""Did all ranks read the same file, and did it stay as it was?

A file that is replaced while ranks open it, or written while they read, would give an array of which one part is old and
another new, without any error. So each rank that reads looks at the file's size and time of last change (`Source.state`) when
it has opened it and again when it has read, and the ranks compare what they saw in the sums that they agree on in the end
anyway: three more integers, no further message.

The comparison: with a number `h` of each of `n` ranks, ``n * sum(h * h) == sum(h) ** 2`` holds exactly when all are equal.
`h` has 20 bits, so that the sums over a million ranks fit into 64; two states look alike once in a million times.
"""

from __future__ import annotations

from hashlib import blake2b

from shardload.errors import SourceError

__all__ = ["N_SUMS", "State", "check_same", "check_unchanged", "to_sums"]

State = tuple[int, ...] | None
N_SUMS = 3
_N_COMPARED = 2  # size and time: what follows tells files apart on one machine only
_BITS = 20
_FIX = "Load it again when nothing writes to it any more; write a new version beside the old one and rename it"


def to_sums(state: State) -> list[int]:
    """What to add up over the ranks; a rank that read nothing, or something without a state, adds nothing.

    >>> to_sums(None)
    [0, 0, 0]
    """
    if state is None:
        return [0] * N_SUMS
    digest = blake2b(repr(state[:_N_COMPARED]).encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little") & ((1 << _BITS) - 1)
    return [1, number, number * number]


def check_same(name: str, sums: list[int], path: str, dataset: str) -> None:
    """SourceError where not all ranks read the same file, from the sums over all ranks. The same answer on every rank."""
    n, first, second = sums
    if n * second != first * first:
        raise SourceError(
            f"{name}: the {n} ranks that read it did not see the same file (its size, or the time of its last change). It was "
            "replaced or written while they opened it, or a machine still sees an older version, or each machine has a copy of "
            "its own: then copy it with its time (cp -p, sbcast -p, rsync -t). Nothing was loaded, because it could have been "
            f"a mixture. {_FIX}",
            path=path,
            dataset=dataset,
        )


def check_unchanged(name: str, before: State, after: State, path: str, dataset: str) -> None:
    """SourceError where the file is not what it was before it was read."""
    if before is not None and after != before:
        was = "is gone" if after is None else f"had {before[0]} bytes and has {after[0]}" if after[0] != before[0] else ""
        raise SourceError(
            f"{name} changed while it was read{f' (it {was})' if was else ''}. Nothing was loaded, because it could have been "
            f"a mixture of old and new. {_FIX}",
            path=path,
            dataset=dataset,
        )
