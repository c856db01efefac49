"""How is an object of a store read? As a file: by ranges, each at most 8 MiB a request; and as one version of it."""

from __future__ import annotations

import errno
import hashlib
import itertools
import threading
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.errors import ShardloadWarning
from shardload.storage.objects import Bytes, Content, Ints, NoListingError, Ranges, StoredObject
from shardload.storage.remote.ahead import PIECE_NBYTES, Wanted, plan_pieces
from shardload.storage.remote.client import Answer, Client, Pin, RemoteError, ahead

State = tuple[int, ...]


def expect(wanted: Iterator[tuple[StoredObject, Ints, Ints]]) -> None:
    """Told which ranges of which objects will be read, in about this order: offsets and sizes. The iterator is followed slowly,
    by other threads. Objects that are not in a store are read when they are.
    """

    def found() -> Iterator[Wanted]:
        for stored, offsets, sizes in wanted:
            if isinstance(stored, RemoteObject):
                if stored.is_closed:  # after an error
                    return
                yield Wanted(stored, int(sizes.sum()), (offsets, sizes))

    ahead().expect(found())


def open_remote(url: str, options: Mapping[str, Any] | None = None) -> RemoteFolder:
    """What a URL names, before anything is asked: an object (`RemoteFolder.object`), or what lies above others.

    Raises
    ------
    ConfigError
        If an option is not known, the URL names no bucket, a profile is not there, or obstore is not installed.
    """
    return RemoteFolder(Client(url, options or {}))


class _Piece:
    """A part of an object that was asked for: where it is, and how many of its bytes will still be read. Where several have the
    same bytes, those of the first one, by its number, are read.
    """

    _numbers = itertools.count()

    def __init__(self, start: int, stop: int, left: int, answer: Future[Answer]) -> None:
        self.start, self.stop, self.left, self.answer, self.number = start, stop, left, answer, next(self._numbers)


class RemoteObject:
    """One object of a store (`StoredObject`): the version that was seen first.

    Parameters
    ----------
    client : Client
        Sends requests.
    key : str
        Below the client's own.
    pin : Pin or None
        The version; None: that of the first answer.
    """

    most_gap_nbytes = 0  # `plan_pieces` closes gaps

    def __init__(self, client: Client, key: str, pin: Pin | None = None) -> None:
        self._client: Client | None = client
        self._key, self._pin, self.name = key, pin, client.name(key)
        self._kept = 0, np.empty(0, dtype=np.uint8)  # where bytes begin that came with the first answer, and these
        self._lock = threading.Lock()  # of what was fetched ahead: pieces, and ranges that wait for those that follow
        self._pieces, self._waiting = list[_Piece](), list[tuple[Ints, Ints]]()
        self._longest_nbytes = 0  # no piece is longer

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._client is None

    @property
    def _open(self) -> Client:
        if self._client is None:
            raise OSError("the object was closed")
        return self._client

    @property
    def pin(self) -> Pin:
        """Which version is read, for other ranks. Asks for a byte of it if nothing was read yet."""
        if self._pin is None:
            return self._first((0, 1))[1]
        return self._pin

    def _first(self, extent: tuple[int, int] | Mapping[str, int]) -> Answer:
        """An answer that tells the version, too."""
        data, pin = self._open.run(self._open.get, self._key, extent, self._pin).result()
        if self._pin is None and (not pin.mark or pin.mark.startswith("@")):
            what = "its size and date are compared" if pin.mark else "only its size is compared"
            text = f"'{self.name}' has no ETag: {what}, and an object that is replaced while it is read may go unnoticed"
            warnings.warn(text, ShardloadWarning, stacklevel=2)
        self._pin = pin
        return data, pin

    def look(self, ahead: int) -> None:
        """Ask for its first bytes, or for its last ones if `ahead` is negative, and keep them: see `ObjectFolder.open`."""
        is_cut = ahead < 0 and not self._open.has_suffixes
        data, pin = self._first((0, max(1, ahead)) if ahead >= 0 or is_cut else {"suffix": -ahead})
        self._kept = (0 if ahead >= 0 or is_cut else pin.nbytes - len(data)), data

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.pin.nbytes

    @property
    def version(self) -> State | None:
        """Numbers of the version that is read. Each answer was compared with it, so nothing is asked."""
        try:
            return _numbers(self.pin)
        except FileNotFoundError:
            return None

    def read_at_most(self, offset: int, nbytes: int) -> bytes:
        """The bytes at `offset`: fewer than `nbytes` where the object ends. As the first read from its start, one request."""
        if self._pin is None and offset == 0 and nbytes <= PIECE_NBYTES:
            return bytes(self._first((0, nbytes))[0])
        out = np.empty(max(0, min(nbytes, self.nbytes - offset)), dtype=np.uint8)
        self.read_into(out, offset)
        return out.tobytes()

    def read_into(self, out: Bytes, offset: int) -> None:
        """Fill `out`. RemoteError if the object ends before, or cannot be read."""
        if offset + len(out) > self.nbytes:
            expected = f"but values are stored up to byte {offset + len(out)}"
            raise RemoteError(errno.EIO, f"'{self.name}' ends at byte {self.nbytes}, {expected}")
        begin, kept = self._kept
        if begin <= offset and offset + len(out) <= begin + len(kept):
            out[...] = kept[offset - begin :][: len(out)]
        else:
            self._read([(0, len(out), offset)], out)

    def read_ranges(self, ranges: Ranges, memory: Bytes) -> list[memoryview]:
        """The pieces, read into `memory`. Errors as for `read_into`."""
        self._read(ranges.requests, memory)
        return ranges.pieces(memory)

    def _read(self, requests: Sequence[tuple[int, int, int]], memory: Bytes) -> None:
        """Fill memory from what was fetched ahead, and fetch the rest."""
        self._open, self.pin  # noqa: B018
        found, lacking = self._found(requests)
        if lacking:
            ahead().need(lambda: not self._found(lacking)[1])
            more, lacking = self._found(lacking)
            found += more
        if lacking:
            offsets, sizes = (np.array([request[k] for request in lacking], dtype=np.int64) for k in (2, 1))
            pieces = self._fetch(offsets, sizes)
            found += _in_pieces(pieces, lacking, PIECE_NBYTES)[0]
        for piece, begin, n, offset in found:
            data, _ = piece.answer.result()
            memory[begin : begin + n] = data[offset - piece.start : offset - piece.start + n]
        self._let_go(found)

    def _found(self, requests: Sequence[tuple[int, int, int]]) -> tuple[list[_Part], list[tuple[int, int, int]]]:
        with self._lock:
            return _in_pieces(self._pieces, requests, self._longest_nbytes) if self._pieces else ([], list(requests))

    def _fetch(self, offsets: Ints, sizes: Ints) -> list[_Piece]:
        client, pin = self._open, self.pin
        return [
            _Piece(start, stop, left, client.run(client.get, self._key, (start, stop), pin))
            for start, stop, left in plan_pieces(offsets, sizes)
        ]

    def fetch_ahead(self, wanted: list[tuple[Ints, Ints]], has_more: bool) -> None:
        """See `ahead.Wanted`: offsets and sizes."""
        with self._lock:
            waited, self._waiting = self._waiting, []
        wanted = [*waited, *wanted]
        if self._client is None or not wanted:
            return
        offsets, sizes = self._not_held(*map(np.concatenate, zip(*wanted, strict=True)))
        if not len(offsets):
            return
        pieces = plan_pieces(offsets, sizes)
        start, stop, _ = pieces[-1]
        if has_more and stop - start < PIECE_NBYTES and not any((offsets == start).any() for offsets, _ in waited):  # once
            begin, end = np.maximum(offsets, start), np.minimum(offsets + sizes, stop)
            with self._lock:
                self._waiting.append((begin[begin < end], (end - begin)[begin < end]))
            begin, end = np.minimum(offsets, start), np.minimum(offsets + sizes, start)
            offsets, sizes = begin[begin < end], (end - begin)[begin < end]
        if len(offsets):
            fetched = self._fetch(offsets, sizes)
            with self._lock:
                self._longest_nbytes = max(self._longest_nbytes, *(piece.stop - piece.start for piece in fetched))
                self._pieces = sorted([*self._pieces, *fetched], key=lambda piece: piece.start)
            ahead().add(sum(piece.stop - piece.start for piece in fetched))

    def _not_held(self, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """Of ranges that will be read what no piece has. The pieces that have the others will be read once more."""
        requests = [(0, size, offset) for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
        with self._lock:
            if not self._pieces:
                return offsets, sizes
            held, lacking = _in_pieces(self._pieces, requests, self._longest_nbytes)
            for piece, _, n, _ in held:
                piece.left += n
        return np.array([offset for _, _, offset in lacking], np.int64), np.array([n for _, n, _ in lacking], np.int64)

    def _let_go(self, found: list[_Part]) -> None:
        """Of pieces that were fetched ahead, count what was read, and forget those of which all was."""
        nbytes = 0
        with self._lock:
            for piece, _, n, _ in found:
                piece.left -= n
                if piece.left <= 0 and piece in self._pieces:
                    self._pieces.remove(piece)
                    nbytes += piece.stop - piece.start
        if nbytes and self._client is not None:
            ahead().add(-nbytes)

    def close(self) -> None:
        """Reads raise from now on."""
        client, self._client = self._client, None
        with self._lock:
            pieces, self._pieces, self._waiting = self._pieces, [], []
        with suppress(RemoteError):  # after a fork
            if client is not None and pieces:
                ahead().add(-sum(piece.stop - piece.start for piece in pieces))

    __del__ = close


_Part = tuple[_Piece, int, int, int]  # where in memory, how many bytes, from which offset of the object


def _in_pieces(
    pieces: list[_Piece], requests: Sequence[tuple[int, int, int]], longest_nbytes: int
) -> tuple[list[_Part], list[tuple[int, int, int]]]:
    """What pieces, which are sorted, have of some requests (where in memory, bytes, offset), and what they lack."""
    found, lacking = list[_Part](), list[tuple[int, int, int]]()
    starts = [piece.start for piece in pieces]
    for begin, length, offset in requests:
        done = 0
        while done < length:
            at = offset + done
            k = bisect_right(starts, at)
            n = min(length - done, starts[k] - at if k < len(starts) else length)
            first_that_may = bisect_right(starts, at - longest_nbytes)
            having = [piece for piece in pieces[first_that_may:k] if piece.stop > at]
            if having:
                piece = min(having, key=lambda piece: piece.number)
                n = min(n, piece.stop - at)
                found.append((piece, begin + done, n, at))
            else:
                lacking.append((begin + done, n, at))
            done += n
    return found, lacking


@dataclass
class _Fetched:
    """A whole object that was asked for: about how many bytes it has, and how often it will still be read."""

    answer: Future[Answer]
    nbytes: int
    left: int = 1


class RemoteFolder:
    """The objects below a URL, by their keys (`ObjectFolder`). No request is sent to make it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.name = client.name("")
        self._lock, self._ahead = threading.Lock(), dict[str, _Fetched]()
        self._is_told, self._early = False, set[str]()  # what was read before it was fetched ahead is not fetched again

    def object(self, pin: Pin | tuple[int, str] | None = None) -> RemoteObject:
        """That at the URL itself: as the version that another rank has seen (`RemoteObject.pin`), or as it is now."""
        return RemoteObject(self._client, "", None if pin is None else Pin(*pin))

    def version(self, key: str) -> State | None:
        """See `ObjectFolder`. One request."""
        try:
            return _numbers(self._client.run(self._client.get, key, (0, 1), None).result()[1])
        except FileNotFoundError:
            return None

    def open(self, key: str, ahead: int = 1) -> RemoteObject | None:
        """See `ObjectFolder`. One request."""
        stored = RemoteObject(self._client, key)
        try:
            stored.look(ahead)
        except FileNotFoundError:
            return None
        return stored

    def read_many(self, keys: Iterable[str], most_nbytes: int) -> list[Content | None]:
        """See `ObjectFolder`. Small objects take one request each, without a range."""
        read, nbytes = list[tuple[str, _Fetched | None]](), 0
        with self._lock:
            for key in keys:
                fetched = self._ahead.get(key)
                read.append((key, fetched))
                if fetched is not None:
                    fetched.left -= 1
                    if not fetched.left:
                        nbytes += self._ahead.pop(key).nbytes
                elif self._is_told:
                    self._early.add(key)
        asked = [(key, self._ask(key, most_nbytes) if fetched is None else fetched.answer) for key, fetched in read]
        ahead().add(-nbytes)
        return [self._content(key, answer) for key, answer in asked]

    def expect(self, keys: Iterator[str], most_nbytes: int, nbytes: int) -> None:
        """Told which objects will be read, in about this order: the most bytes of each, and about how many it has. The iterator
        is followed slowly, by other threads.
        """
        self._is_told = True
        ahead().expect(Wanted(self, nbytes, (key, most_nbytes, nbytes)) for key in keys)

    def forget(self, prefix: str) -> None:
        """Nobody will read what was fetched ahead of keys that begin so."""
        with self._lock:
            held = [self._ahead.pop(key) for key in list(self._ahead) if key.startswith(prefix)]
        ahead().add(-sum(fetched.nbytes for fetched in held))

    def fetch_ahead(self, wanted: list[tuple[str, int, int]], has_more: bool) -> None:
        """See `ahead.Wanted`: keys, the most bytes of each, and about how many it has."""
        n_more = 0
        with self._lock:
            wanted, told = [what for what in wanted if what[0] not in self._early], {key for key, _, _ in wanted}
            self._early -= told
            for key, most_nbytes, nbytes in wanted:
                if key in self._ahead:  # a stream may need it in two rounds
                    self._ahead[key].left += 1
                else:
                    self._ahead[key] = _Fetched(self._ask(key, most_nbytes), nbytes)
                    n_more += nbytes
        ahead().add(n_more)

    def _ask(self, key: str, most_nbytes: int) -> Future[Answer]:
        """All of an object, or of one that may be large its first piece."""
        extent = None if most_nbytes <= PIECE_NBYTES else (0, PIECE_NBYTES)
        return self._client.run(self._client.get, key, extent, None, most_nbytes)

    def _content(self, key: str, asked: Future[Answer]) -> Content | None:
        try:
            data, pin = asked.result()
        except FileNotFoundError:
            return None
        if len(data) == pin.nbytes:
            return data
        content = np.empty(pin.nbytes, dtype=np.uint8)
        content[: len(data)] = data
        RemoteObject(self._client, key, pin).read_into(content[len(data) :], len(data))
        return content

    def __del__(self) -> None:
        with suppress(RemoteError):  # after a fork
            if held := vars(self).get("_ahead"):  # else it was never made, or has nothing
                ahead().add(-sum(fetched.nbytes for fetched in held.values()))

    def look(self, keys: Iterable[str], most_nbytes: int) -> list[tuple[bytes, State] | OSError | None]:
        """Small objects, each with its version, or why it cannot be read; None of one that is not there. One request each."""
        seen: list[tuple[bytes, State] | OSError | None] = []
        for answer in [self._client.run(self._client.get, key, None, None, most_nbytes) for key in keys]:
            try:
                data, pin = answer.result()
                seen.append((bytes(data), _numbers(pin)))
            except FileNotFoundError:
                seen.append(None)
            except OSError as error:
                seen.append(error)
        return seen

    def folders(self, key: str) -> list[str]:
        """See `ObjectFolder`. One request for each thousand."""

        def listed(store: Any, path: str) -> list[str]:
            import obstore

            return [name.rpartition("/")[2] for name in obstore.list_with_delimiter(store, path or None)["common_prefixes"]]

        if self.name.lower().startswith("http"):
            raise NoListingError(f"'{self.name}' is on a plain HTTP server, which does not tell what is in a folder")
        try:
            names: list[str] = self._client.run(self._client.call, key, listed).result()
            return sorted(names)
        except FileNotFoundError:
            return []
        except RemoteError as error:
            if error.errno == errno.EACCES:
                raise NoListingError(f"what is in '{self.name}' may not be listed ({error})") from None
            raise


def _numbers(pin: Pin) -> State:
    return pin.nbytes, int.from_bytes(hashlib.blake2b(pin.mark.encode(), digest_size=7).digest())
