"""Do the ranks agree? Exchanges small texts and integers, which are then the same on every rank.

The rule for errors: a rank that fails says so at the next `agree`, and there every rank raises the same error.

The rule for calls: each call begins with the same two messages (`begin`, `all_same`), which say what is called. So ranks that
make different calls, or the same calls in another order, find out before any other message could be taken for one of another
call. A rank sends these messages for every call, also for one that it refuses, so that the ranks stay in step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, NoReturn

import numpy as np

from shardload.comm.collectives import Collectives
from shardload.comm.shared_errors import as_shardload, from_json, share, to_json
from shardload.errors import PeerError, ShardloadError
from shardload.system.interruption import let_interruption_pass
from shardload.units import counted

Int64s = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_HEAD_NBYTES = 4096
_LENGTH_NBYTES = 8  # at the beginning of the head
_TEXT, _BYTES, _FAILED = b"+", b"*", b"-"  # what a rank tells the others


@dataclass(frozen=True)
class Invocation:
    """A call of this package on one rank, as text. It must be the same on all ranks.

    Attributes
    ----------
    kind : str
        The function that was called: ``"load"``, ``"execute"``. It determines the keys of `values`.
    title : str
        The call, for people: ``"load of 'data.h5'"``.
    values : mapping of str to str
        Its arguments, as text.
    names : tuple of str
        The names of its arrays, in their order, if it was given several by name. They too determine the keys of `values`.
    of_arrays : sequence of (str, mapping of str to str)
        The arguments of each of these arrays, after the text that says which array it is: ``"array ['gas']"``.
    """

    kind: str
    title: str
    values: Mapping[str, str]
    names: tuple[str, ...] = ()
    of_arrays: Sequence[tuple[str, Mapping[str, str]]] = ()

    @cached_property
    def digest(self) -> int:
        """64-bit digest of kind, names and values."""
        return digest_of(json.dumps([self.kind, self.names, self.values, self.of_arrays]))

    @property
    def all_values(self) -> dict[str, str]:
        """Names and arguments, those of arrays under keys such as ``"spec of array ['gas']"``."""
        names = {f"array number {k}": name for k, name in enumerate(self.names, 1)}
        of_arrays = {f"{name} of {where}": text for where, values in self.of_arrays for name, text in values.items()}
        return {**names, **self.values, **of_arrays}

    def also(self, **values: str) -> Invocation:
        """A copy with more values."""
        return replace(self, values={**self.values, **values})


class Agreement:
    """Agreement of ranks, over any `Collectives`. All ranks must call every method that is marked as collective.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    """

    rank: int
    size: int
    _collectives: Collectives

    def begin(self, asked: Invocation, find: Callable[[], Any]) -> Any:
        """The first message of every call: the call of rank 0, and the text that `find` returns on rank 0. Collective.

        Returns that text, or those bytes if `find` returns bytes. If `find` raises on rank 0, every rank raises that error.
        Returns None if rank 0 made another call; the next message (`all_same`) tells all ranks.
        """
        return self._tell(find, 0, f"{asked.digest:016x}".encode())

    def gather_int(self, value: int) -> Int64s:
        """Gather one integer from every rank, on every rank. Collective."""
        return self.gather_ints([value])[:, 0]

    def gather_ints(self, values: list[int]) -> Int64s:
        """Gather some integers from every rank, on every rank: a row for each. Collective."""
        return self._collectives.gather(np.array(values, dtype=np.int64))

    def gather_rows(self, mine: Int64s, root: int = 0) -> list[Int64s] | None:
        """On `root`: the integers of every rank, of which each may have another number; None elsewhere. Collective."""
        if self.rank != root:
            self._collectives.exchange_rows({root: mine}, [])
            return None
        others = [rank for rank in range(self.size) if rank != root]
        rows = {root: mine} | (self._collectives.exchange_rows({}, others) if others else {})
        return [rows[rank] for rank in range(self.size)]

    def scatter_rows(self, rows: list[Int64s] | None, root: int = 0) -> Int64s:
        """Return what `root` has for this rank: one row for each rank. Collective."""
        if rows is None:
            return self._collectives.exchange_rows({}, [root])[root]
        if self.size > 1:
            self._collectives.exchange_rows({rank: row for rank, row in enumerate(rows) if rank != root}, [])
        return rows[root]

    def pass_on(self, mine: Int64s, to: int, source: int) -> Int64s:
        """Send integers to a rank, and return those that `source` sends: each rank sends once, receives once. Collective."""
        return mine if to == self.rank else self._collectives.exchange_rows({to: mine}, [source])[source]

    def sum_ints(self, values: list[int]) -> list[int]:
        """Sum each value over the ranks. Collective."""
        total: list[int] = self._collectives.reduce(np.array(values, dtype=np.int64), "sum").tolist()
        return total

    def least_ints(self, values: Int64s) -> Int64s:
        """The minimum of each value over the ranks. Collective."""
        return self._collectives.reduce(values, "min")

    def send_text(self, text: str | None, root: int) -> str:
        """Send a text of `root` to every rank. Collective."""
        return _to_text(self._send_bytes(_to_bytes(text or ""), root))

    def _send_bytes(self, data: bytes, root: int) -> memoryview:
        """Send bytes of `root` to every rank. Collective."""
        # The first message says how many there are; if they fit, it has all: most texts take one broadcast.
        head = np.zeros(_HEAD_NBYTES, dtype=np.uint8)
        length, body = head[:_LENGTH_NBYTES].view("<i8"), head[_LENGTH_NBYTES:]
        if self.rank == root:
            length[0] = len(data)
            if len(data) <= len(body):
                body[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._collectives.broadcast(head, root)
        n = int(length[0])
        if n <= len(body):
            return body[:n].data
        whole = np.empty(n, dtype=np.uint8)
        if self.rank == root:
            whole[:] = np.frombuffer(data, dtype=np.uint8)
        self._collectives.broadcast(whole, root)
        return whole.data

    def gather_text(self, text: str) -> list[str]:
        """Gather a text from every rank, on every rank. Collective."""
        return [self.send_text(text, root) for root in range(self.size)]

    def tell(self, make: Callable[[], Any], root: int) -> Any:
        """Return on every rank what `make` returns on `root`, or raise on every rank what it raises there. Collective."""
        return self._tell(make, root, b"")

    def _tell(self, make: Callable[[], Any], root: int, mark: bytes) -> Any:
        """What `root` made; None if the mark of `root` differs."""
        error: BaseException | None = None
        made: Any = b""
        kind = _FAILED
        try:
            if self.rank == root:
                try:
                    made = make()
                    kind = _TEXT if isinstance(made, str) else _BYTES
                except Exception as failure:
                    let_interruption_pass(failure)
                    error = failure
            if error is not None:
                if self.size == 1:
                    raise _alone(error)
                made = to_json(as_shardload(error, root))
            if self.size == 1:
                return made
            body = _to_bytes(made) if isinstance(made, str) else made
            message, n = self._send_bytes(b"".join([mark, kind, body]), root), len(mark)
            if message[:n] != mark:
                return None
            kind, rest = bytes(message[n : n + 1]), message[n + 1 :]
            if kind != _FAILED:
                return rest if kind == _BYTES else _to_text(rest)
            text = _to_text(rest)
            # Wrong arguments are wrong on every rank, though only `root` has checked them.
            n_failed = self.size if json.loads(text)["kind"] == "ConfigError" else 1
            raise self.shared(_caused(from_json(text, root, n_failed, self.size), error))
        finally:
            del error  # as in `agree`

    def agree(self, error: BaseException | None, counts: list[int] | None = None) -> list[int]:
        """Raise the same error on every rank if any rank has one; else return the sums of `counts` over the ranks. Collective.

        Of several errors, that of the lowest rank is raised. If only some ranks failed, the text says which.
        """
        failed, *sums = self.sum_ints([int(error is not None), *(counts or [])])
        if not failed:
            return sums
        try:
            if self.size == 1:
                raise _alone(error)
            first = int(self.gather_int(self.rank if error is not None else self.size).min())
            text = to_json(as_shardload(error, first)) if self.rank == first else None
            raise self.shared(_caused(from_json(self.send_text(text, first), first, failed, self.size), error))
        finally:
            del error  # a call that has the error which it raises as a variable holds what its callers have: see `let_go`

    def shared(self, error: ShardloadError) -> ShardloadError:
        """Mark an error that all ranks raise now, so that it is shown once if it is not caught. Return it."""
        share(error, self.rank, self.size)
        return error

    def all_same(self, asked: Invocation, is_fine: bool) -> bool:
        """True if no rank has an error and all ranks make the same call. Collective; the second message of every call."""
        all_fine, differs = self._compare([asked.digest], is_fine)
        return all_fine and not differs.size

    def settle(self, asked: Invocation, error: BaseException | None) -> None:
        """Send both messages that every call begins with, if rank 0 has no text to send. Raises as `agree_same`. Collective."""
        is_same = self.begin(asked, str) is not None
        try:
            if not self.all_same(asked, is_same and error is None):
                self.agree_same(asked, error)
        finally:
            del error  # as in `agree`

    def _compare(self, digests: list[int], is_fine: bool) -> tuple[bool, np.ndarray[Any, np.dtype[np.intp]]]:
        """Return whether no rank has an error, and the indices of the digests that differ."""
        digest = np.array(digests, dtype=np.uint64)
        # The minimum of each digest and of its complement: all ranks have the same digest exactly if both equal this rank's.
        sent = np.concatenate([[np.uint64(is_fine)], digest, ~digest])
        least = self._collectives.reduce(sent, "min")
        n = len(digest)
        return bool(least[0]), np.flatnonzero(least[1 : n + 1] != ~least[n + 1 :])

    def agree_same(self, asked: Invocation, error: BaseException | None = None) -> None:
        """Raise on every rank if any rank has an error, or if the ranks make different calls. Collective.

        The messages are the same for all calls until the ranks know whether they differ.

        Raises
        ------
        PeerError
            The text names the first rank that differs from rank 0, and the two calls, or the first array or value that differs.
        """
        try:
            n_names = counted(len(asked.names), "array") if asked.names else "one array alone"
            all_fine, differs = self._compare([digest_of(asked.kind), digest_of(n_names)], error is None)
            if not all_fine:
                self.agree(error)
        finally:
            del error  # as in `agree`
        if 0 in differs:
            self._blame(asked.kind, f"called {asked.title}")
        if differs.size:
            self._blame(n_names, f"called {asked.title} with {n_names}")
        _, differs = self._compare([digest_of(text) for text in asked.all_values.values()], True)
        if differs.size:
            name, value = list(asked.all_values.items())[int(differs[0])]
            self._blame(value, f"was called with {name} = {value}")

    def _blame(self, mine: str, told: str) -> NoReturn:
        """Raise that the first rank whose value differs from that of rank 0 made another call. Collective."""
        reference = self.send_text(mine, 0)
        other = int(self.gather_int(self.rank if mine != reference else self.size).min())
        theirs, of_0 = self.send_text(told, other), self.send_text(told, 0)
        raise PeerError(
            f"rank {other} {theirs}, rank 0 {of_0}: all ranks must make the same calls in the same order, and all ranks must "
            "pass the same path, sharding and options. Nothing was done",
            rank=other,
        )


def _alone(error: BaseException | None) -> ShardloadError:
    """The error that the only rank raises."""
    made = as_shardload(error, None)
    return made if made is error else _caused(made, error)


def _caused(error: ShardloadError, cause: BaseException | None) -> ShardloadError:
    error.__cause__ = cause
    return error


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _to_text(data: memoryview) -> str:
    return bytes(data).decode("utf-8", "surrogatepass")


def digest_of(text: str) -> int:
    """64-bit digest of a text."""
    return int.from_bytes(blake2b(_to_bytes(text), digest_size=8).digest(), "little")
