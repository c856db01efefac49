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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardload.errors import ShardloadWarning
from shardload.storage.objects import Bytes, Content, Ints, NoListingError, Ranges, RemoteError, StoredObject
from shardload.storage.remote.ahead import PIECE_NBYTES, Wanted, plan_pieces
from shardload.storage.remote.client import Answer, Client, Pin, ahead

State = tuple[int, ...]


def expect(wanted: Iterator[tuple[StoredObject, Ints, Ints]]) -> None:
    """Say which ranges (offsets and sizes) of which objects will be read, in about this order. Other threads take them from the
    iterator as memory allows. Ranges of objects that are not in a store are left out.
    """

    def remote() -> Iterator[Wanted]:
        for stored, offsets, sizes in wanted:
            if isinstance(stored, RemoteObject):
                if stored.is_closed:  # after an error
                    return
                yield Wanted(stored, int(sizes.sum()), (offsets, sizes))

    ahead().expect(remote())


def open_remote(url: str, options: Mapping[str, Any] | None = None) -> RemoteFolder:
    """What a URL names: an object (`RemoteFolder.object`), or a folder of objects. No request is sent.

    Raises
    ------
    ConfigError
        If an option is not known, the URL names no bucket, a profile is not there, or obstore is not installed.
    """
    return RemoteFolder(Client(url, options or {}))


@dataclass(slots=True, eq=False)
class _Piece:
    """A range of an object that was requested, and how many of its bytes will still be read. Where several pieces have the same
    bytes, those of the first one, by its number, are read.
    """

    start: int
    stop: int
    n_unread: int
    answer: Future[Answer]
    number: int = field(default_factory=itertools.count().__next__)


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
        self._first_bytes = 0, np.empty(0, dtype=np.uint8)  # what came with the first answer: its offset, its bytes
        self._asking = threading.RLock()  # for the first answer: two threads that ask at once could see two versions
        self._lock = threading.Lock()  # of what was fetched ahead: pieces, and ranges that wait for those that follow
        self._pieces, self._waiting = list[_Piece](), list[tuple[Ints, Ints]]()
        self._longest_nbytes = 0  # no piece is longer

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._client is None

    @property
    def _open_client(self) -> Client:
        if self._client is None:
            raise OSError("the object was closed")
        return self._client

    @property
    def pin(self) -> Pin:
        """Which version is read, for other ranks. Asks for a byte of it if nothing was read yet."""
        if self._pin is None:
            with self._asking:  # another thread may be asking
                return self._pin or self._ask_first((0, 1))[1]
        return self._pin

    def _ask_first(self, extent: tuple[int, int] | Mapping[str, int]) -> Answer:
        """Fetch a range, and note which version it is of."""
        with self._asking:
            data, pin = self._open_client.get(self._key, extent, self._pin).result()
            if self._pin is None and (not pin.mark or pin.mark.startswith("@")):
                comparison = "its size and date are compared" if pin.mark else "only its size is compared"
                text = f"{comparison}, and an object that is replaced while it is read may go unnoticed"
                warnings.warn(f"'{self.name}' has no ETag: {text}", ShardloadWarning, stacklevel=2)
            self._pin = pin
        return data, pin

    def look(self, ahead: int) -> None:
        """Ask for its first bytes, or for its last ones if `ahead` is negative, and keep them: see `ObjectFolder.open`."""
        if ahead < 0 and not self._open_client.has_suffixes:
            offset = max(0, self.nbytes + ahead)
            self._first_bytes = offset, self._ask_first((offset, self.nbytes))[0]
        else:
            data, pin = self._ask_first({"suffix": -ahead} if ahead < 0 else (0, max(1, ahead)))
            self._first_bytes = pin.nbytes - len(data) if ahead < 0 else 0, data

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.pin.nbytes

    @property
    def version(self) -> State | None:
        """Numbers of the version that is read. Each answer was compared with it, so nothing is asked."""
        with suppress(FileNotFoundError):
            return _numbers(self.pin)
        return None

    def read_at_most(self, offset: int, nbytes: int) -> bytes:
        """The bytes at `offset`: fewer than `nbytes` where the object ends. As the first read from its start, one request."""
        if self._pin is None and offset == 0 and nbytes <= PIECE_NBYTES:
            return bytes(self._ask_first((0, nbytes))[0])
        out = np.empty(max(0, min(nbytes, self.nbytes - offset)), dtype=np.uint8)
        self.read_into(out, offset)
        return out.tobytes()

    def read_into(self, out: Bytes, offset: int) -> None:
        """Fill `out`. RemoteError if the object ends before, or cannot be read."""
        if offset + len(out) > self.nbytes:
            expected = f"but values are stored up to byte {offset + len(out)}"
            raise RemoteError(errno.EIO, f"'{self.name}' ends at byte {self.nbytes}, {expected}")
        begin, data = self._first_bytes
        if begin <= offset and offset + len(out) <= begin + len(data):
            out[...] = data[offset - begin :][: len(out)]
        else:
            self._read([(0, len(out), offset)], out)

    def read_ranges(self, ranges: Ranges, memory: Bytes) -> list[memoryview]:
        """The pieces, read into `memory`. Errors as for `read_into`."""
        self._read(ranges.requests, memory)
        return ranges.pieces(memory)

    def _read(self, requests: Sequence[_Request], memory: Bytes) -> None:
        """Fill memory from what was fetched ahead, and fetch the rest."""
        self._open_client, self.pin  # noqa: B018  (both raise)
        parts, lacking = self._fetched_parts(requests)
        if lacking:
            ahead().need(lambda: not self._fetched_parts(lacking)[1])
            more_parts, lacking = self._fetched_parts(lacking)
            parts += more_parts
        if lacking:
            offsets, sizes = (np.array([request[k] for request in lacking], dtype=np.int64) for k in (2, 1))
            parts += _parts_in(self._fetch(offsets, sizes), lacking, PIECE_NBYTES)[0]
        for piece, begin, n, offset in parts:
            data, _ = piece.answer.result()
            memory[begin : begin + n] = data[offset - piece.start : offset - piece.start + n]
        self._forget_read(parts)

    def _fetched_parts(self, requests: Sequence[_Request]) -> tuple[list[_Part], list[_Request]]:
        with self._lock:
            return _parts_in(self._pieces, requests, self._longest_nbytes) if self._pieces else ([], list(requests))

    def _fetch(self, offsets: Ints, sizes: Ints) -> list[_Piece]:
        client, pin = self._open_client, self.pin
        return [
            _Piece(start, stop, nbytes, client.get(self._key, (start, stop), pin))
            for start, stop, nbytes in plan_pieces(offsets, sizes)
        ]

    def fetch_ahead(self, wanted: list[tuple[Ints, Ints]], has_more: bool) -> None:
        """See `ahead.Wanted`: offsets and sizes."""
        with self._lock:
            waited, self._waiting = self._waiting, []
        wanted = [*waited, *wanted]
        if self._client is None or not wanted:
            return
        offsets, sizes = self._not_requested(*map(np.concatenate, zip(*wanted, strict=True)))
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
                if self.is_closed:  # meanwhile, so that nobody would read these pieces, and give their room back
                    return
                self._longest_nbytes = max(self._longest_nbytes, *(piece.stop - piece.start for piece in fetched))
                self._pieces = sorted([*self._pieces, *fetched], key=lambda piece: piece.start)
            ahead().add(sum(piece.stop - piece.start for piece in fetched))

    def _not_requested(self, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """Of ranges that will be read what no piece has. The pieces that have the others will be read once more."""
        requests = [(0, size, offset) for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]
        with self._lock:
            if not self._pieces:
                return offsets, sizes
            parts, lacking = _parts_in(self._pieces, requests, self._longest_nbytes)
            for piece, _, n, _ in parts:
                piece.n_unread += n
        return np.array([offset for _, _, offset in lacking], np.int64), np.array([n for _, n, _ in lacking], np.int64)

    def _forget_read(self, parts: list[_Part]) -> None:
        """Forget the pieces of which all bytes were read."""
        nbytes = 0
        with self._lock:
            for piece, _, n, _ in parts:
                piece.n_unread -= n
                if piece.n_unread <= 0 and piece in self._pieces:
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


_Request = tuple[int, int, int]  # its offset in memory, its bytes, its offset in the object, as in `Ranges.requests`
_Part = tuple[_Piece, int, int, int]  # of a request: the piece that has it, and the same three numbers


def _parts_in(pieces: list[_Piece], requests: Sequence[_Request], longest_nbytes: int) -> tuple[list[_Part], list[_Request]]:
    """The parts of requests that some sorted pieces have, and what they lack."""
    parts, lacking = list[_Part](), list[_Request]()
    starts = [piece.start for piece in pieces]
    for begin, length, offset in requests:
        done = 0
        while done < length:
            at = offset + done
            k = bisect_right(starts, at)
            n = min(length - done, starts[k] - at if k < len(starts) else length)
            first_long_enough = bisect_right(starts, at - longest_nbytes)
            having = [piece for piece in pieces[first_long_enough:k] if piece.stop > at]
            if having:
                piece = min(having, key=lambda piece: piece.number)
                n = min(n, piece.stop - at)
                parts.append((piece, begin + done, n, at))
            else:
                lacking.append((begin + done, n, at))
            done += n
    return parts, lacking


@dataclass
class _WholeObject:
    """A whole object that was requested: about how many bytes it has, and how often it will still be read."""

    pieces: Future[list[Future[Answer]]]
    nbytes: int
    n_reads: int = 1


def _content(fetching: Future[list[Future[Answer]]]) -> Content | None:
    """The bytes of a whole object that was requested; None if it does not exist."""
    try:
        pieces = fetching.result()
    except FileNotFoundError:
        return None
    contents = [piece.result()[0] for piece in pieces]  # if it was removed meanwhile, that is an error
    return contents[0] if len(contents) == 1 else np.concatenate(contents)


class RemoteFolder:
    """The objects below a URL, by their keys (`ObjectFolder`). No request is sent to make it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.name = client.name("")
        self._lock, self._ahead = threading.Lock(), dict[str, _WholeObject]()
        self._is_order_known = False  # `expect` was called
        self._read_early = set[str]()  # keys that were read before their turn: they are not fetched ahead any more

    def object(self, pin: Pin | tuple[int, str, float] | None = None) -> RemoteObject:
        """The object at the URL itself: the version that another rank saw (`RemoteObject.pin`), or the present one."""
        return RemoteObject(self._client, "", None if pin is None else Pin(*pin))

    def version(self, key: str) -> State | None:
        """See `ObjectFolder`. One request."""
        with suppress(FileNotFoundError):
            return _numbers(self._client.get(key, (0, 1)).result()[1])
        return None

    def open(self, key: str, ahead: int = 1) -> RemoteObject | None:
        """See `ObjectFolder`. One request."""
        stored = RemoteObject(self._client, key)
        with suppress(FileNotFoundError):
            stored.look(ahead)
            return stored
        return None

    def read_many(self, keys: Iterable[str], most_nbytes: int) -> list[Content | None]:
        """See `ObjectFolder`. Small objects take one request each, without a range."""
        keys, read, nbytes = list(keys), list[tuple[str, _WholeObject | None]](), 0
        if self._is_order_known:
            ahead().need(lambda: self._ahead.keys() >= set(keys))
        with self._lock:
            for key in keys:
                fetched = self._ahead.get(key)
                read.append((key, fetched))
                if fetched is not None:
                    fetched.n_reads -= 1
                    if not fetched.n_reads:
                        nbytes += self._ahead.pop(key).nbytes
                elif self._is_order_known:
                    self._read_early.add(key)
        fetching = [self._client.get_whole(key, most_nbytes) if fetched is None else fetched.pieces for key, fetched in read]
        ahead().add(-nbytes)
        return [*map(_content, fetching)]

    def expect(self, keys: Iterator[str], most_nbytes: int, nbytes: int) -> None:
        """Say which objects will be read, in about this order, the most bytes of each, and about how many it has. Other threads
        take keys from the iterator as memory allows.
        """
        self._is_order_known = True
        ahead().expect(Wanted(self, nbytes, (key, most_nbytes, nbytes)) for key in keys)

    def forget(self, prefix: str) -> None:
        """Drop what was fetched ahead of keys that begin with `prefix`: nobody will read it."""
        with self._lock:
            dropped = [self._ahead.pop(key) for key in list(self._ahead) if key.startswith(prefix)]
        ahead().add(-sum(fetched.nbytes for fetched in dropped))

    def fetch_ahead(self, wanted: list[tuple[str, int, int]], has_more: bool) -> None:
        """See `ahead.Wanted`: keys, the most bytes of each, and about how many it has."""
        n_more, large = 0, list[tuple[str, _WholeObject]]()
        with self._lock:
            unread = [(key, most_nbytes, nbytes) for key, most_nbytes, nbytes in wanted if key not in self._read_early]
            self._read_early -= {key for key, _, _ in wanted}
            for key, most_nbytes, nbytes in unread:
                if key in self._ahead:  # a stream may need it in two rounds
                    self._ahead[key].n_reads += 1
                else:
                    self._ahead[key] = whole = _WholeObject(self._client.get_whole(key, most_nbytes), nbytes)
                    n_more += nbytes
                    if most_nbytes > PIECE_NBYTES:
                        large.append((key, whole))
        ahead().add(n_more)
        for key, whole in large:  # not with the lock: one that is there already is counted at once
            whole.pieces.add_done_callback(partial(self._count, key, whole))

    def _count(self, key: str, whole: _WholeObject, _: Future[Any]) -> None:
        """Count the bytes that an object has, as its first piece says, in place of those that it may have: a few large chunks,
        if each counts as if it were not compressed, are not enough to be fetched while others are decoded.
        """
        if whole.pieces.exception() is None:
            nbytes = whole.pieces.result()[0].result()[1].nbytes
            with self._lock:
                if self._ahead.get(key) is not whole:
                    return
                n_more, whole.nbytes = nbytes - whole.nbytes, nbytes
            ahead().add(n_more)

    def __del__(self) -> None:
        with suppress(RemoteError):  # after a fork
            if fetched := vars(self).get("_ahead"):  # absent if `__init__` failed
                ahead().add(-sum(whole.nbytes for whole in fetched.values()))

    def look(self, keys: Iterable[str], most_nbytes: int) -> list[tuple[bytes, State] | OSError | None]:
        """Small objects, each with its version, or why it cannot be read; None for one that does not exist. A request each."""
        contents: list[tuple[bytes, State] | OSError | None] = []
        for answer in [self._client.get(key, None, most=most_nbytes) for key in keys]:
            try:
                data, pin = answer.result()
                contents.append((bytes(data), _numbers(pin)))
            except FileNotFoundError:
                contents.append(None)
            except OSError as error:
                contents.append(error)
        return contents

    def folders(self, key: str) -> list[str]:
        """See `ObjectFolder`. One request for each thousand."""
        if self.name.lower().startswith("http"):
            raise NoListingError(f"'{self.name}' is on a plain HTTP server, which does not tell what is in a folder")
        try:
            return self._client.folders(key)
        except FileNotFoundError:
            return []
        except RemoteError as error:
            if error.errno == errno.EACCES:
                raise NoListingError(f"what is in '{self.name}' may not be listed ({error})") from None
            raise


def _numbers(pin: Pin) -> State:
    """A version as numbers: the size, and a hash of ETag and date. A store that was replaced may have the same metadata."""
    return pin.nbytes, int.from_bytes(hashlib.blake2b(f"{pin.mark} {pin.date}".encode(), digest_size=7).digest())
