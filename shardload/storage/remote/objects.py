"""How is an object of a store read? As a file: by ranges, each at most 8 MiB a request; and as one version of it."""

from __future__ import annotations

import errno
import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from shardload.errors import ShardloadWarning
from shardload.storage.objects import Bytes, Content, NoListingError, Ranges
from shardload.storage.remote.address import address_of
from shardload.storage.remote.client import Answer, Client, Pin, RemoteChangedError, RemoteError

PIECE_NBYTES = 8 << 20  # of a request: one connection to S3 gives about 60 MB/s

State = tuple[int, ...]


class Remote:
    """What a URL names, before anything is asked: an object, or what lies above others. No request is sent to make it.

    Parameters
    ----------
    client : Client
        Sends requests.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.name = client.name("")

    def object(self, pin: Pin | tuple[int, str] | None = None) -> RemoteObject:
        """The object, as the version that another rank has seen (`RemoteObject.pin`), or as the one that is there now."""
        return RemoteObject(self._client, "", None if pin is None else Pin(*pin))

    def folder(self) -> RemoteFolder:
        """The objects below it."""
        return RemoteFolder(self._client)


def open_remote(url: str, options: Mapping[str, Any] | None = None) -> Remote:
    """The object or folder of a URL. Sends no request.

    Raises
    ------
    ConfigError
        If an option is not known, the URL names no bucket, a profile is not there, or obstore is not installed.
    """
    return Remote(Client(address_of(url, options or {})))


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

    def __init__(self, client: Client, key: str, pin: Pin | None = None) -> None:
        self._client: Client | None = client
        self._ahead = 0, np.empty(0, dtype=np.uint8)  # where bytes begin that came with the first answer, and these
        self._key, self._pin, self.name = key, pin, client.name(key)

    @property
    def _open(self) -> Client:
        if self._client is None:
            raise OSError("the object was closed")
        return self._client

    @property
    def pin(self) -> Pin:
        """Which version is read, for other ranks. Asks for a byte of it if nothing was read yet."""
        if self._pin is None:
            return self._keep(self._open.run(self._open.get, self._key, (0, 1), None).result().pin)
        return self._pin

    def look(self, ahead: int) -> None:
        """Ask for its first bytes, or for its last ones if `ahead` is negative, and keep them: see `ObjectFolder.open`."""
        client = self._open
        is_cut = ahead < 0 and not client.has_suffixes
        extent = (0, max(1, ahead)) if ahead >= 0 or is_cut else {"suffix": -ahead}
        answer = client.run(client.get, self._key, extent, None).result()
        self._keep(answer.pin)
        self._ahead = (0 if ahead >= 0 or is_cut else answer.pin.nbytes - len(answer.data)), answer.data

    def _keep(self, pin: Pin) -> Pin:
        if not pin.mark or pin.mark.startswith("@"):
            what = "its size and date are compared" if pin.mark else "only its size is compared"
            text = f"'{self.name}' has no ETag: {what}, and an object that is replaced while it is read may go unnoticed"
            warnings.warn(text, ShardloadWarning, stacklevel=2)
        self._pin = pin
        return pin

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
        """The bytes at `offset`: fewer than `nbytes` where the object ends."""
        if self._pin is None and offset == 0 and nbytes <= PIECE_NBYTES:  # what opens a file: no other request before it
            answer = self._open.run(self._open.get, self._key, (0, nbytes), None).result()
            self._keep(answer.pin)
            return bytes(answer.data)
        out = np.empty(max(0, min(nbytes, self.nbytes - offset)), dtype=np.uint8)
        self.read_into(out, offset)
        return out.tobytes()

    def read_into(self, out: Bytes, offset: int) -> None:
        """Fill `out`. RemoteError if the object ends before, or cannot be read."""
        if offset + len(out) > self.nbytes:
            expected = f"but values are stored up to byte {offset + len(out)}"
            raise RemoteError(errno.EIO, f"'{self.name}' ends at byte {self.nbytes}, {expected}")
        begin, kept = self._ahead
        if begin <= offset and offset + len(out) <= begin + len(kept):
            out[...] = kept[offset - begin :][: len(out)]
        else:
            self._get([(0, len(out), offset)], out)

    def read_ranges(self, ranges: Ranges, memory: Bytes) -> list[memoryview]:
        """The pieces, read into `memory`. Errors as for `read_into`."""
        self._get(ranges.requests, memory)
        return ranges.pieces(memory)

    def _get(self, requests: Sequence[tuple[int, int, int]], memory: Bytes) -> None:
        client, pin, under_way = self._open, self.pin, list[Future[Answer]]()
        for begin, length, offset in requests:
            for a in range(0, length, PIECE_NBYTES):
                n = min(PIECE_NBYTES, length - a)
                extent, out = (offset + a, offset + a + n), memory[begin + a : begin + a + n]
                under_way.append(client.run(client.get, self._key, extent, pin, out))
        wait_for(under_way)

    def close(self) -> None:
        """Reads raise from now on."""
        self._client = None


class RemoteFolder:
    """The objects below a URL, by their keys (`ObjectFolder`)."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.name = client.name("")

    def version(self, key: str) -> State | None:
        """See `ObjectFolder`. One request."""
        try:
            return _numbers(self._client.run(self._client.get, key, (0, 1), None).result().pin)
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
        client, extent = self._client, None if most_nbytes <= PIECE_NBYTES else (0, PIECE_NBYTES)
        names = list(keys)
        firsts = [client.run(client.get, key, extent, None, None, most_nbytes) for key in names]
        contents: list[Content | None] = []
        rest = list[Future[Answer]]()
        try:
            for key, first in zip(names, firsts, strict=True):
                try:
                    answer: Answer = first.result()
                except FileNotFoundError:
                    contents.append(None)
                    continue
                content, n = answer.data, len(answer.data)
                if n < answer.pin.nbytes:
                    content = np.empty(answer.pin.nbytes, dtype=np.uint8)
                    content[:n] = answer.data
                    for a in range(n, len(content), PIECE_NBYTES):
                        out = content[a : a + PIECE_NBYTES]
                        rest.append(client.run(client.get, key, (a, a + len(out)), answer.pin, out))
                contents.append(content)
        finally:
            wait_for([*firsts, *rest], but=FileNotFoundError)
        return contents

    def look(self, keys: Iterable[str], most_nbytes: int) -> list[tuple[bytes, State] | OSError | None]:
        """Small objects, each with its version, or why it cannot be read; None of one that is not there. One request each."""
        firsts = [self._client.run(self._client.get, key, None, None, None, most_nbytes) for key in keys]
        wait_for(firsts, but=OSError)
        return [_seen(first) for first in firsts]

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

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        """Keys below a key of this folder, and their bytes. RemoteError on a plain HTTP server, which has no list."""

        def listed(store: Any, key: str) -> list[tuple[str, int]]:
            import obstore

            n = len(key) - len(prefix) if prefix or not key else len(key) + 1  # of the folder's own key
            return [(meta["path"][n:], meta["size"]) for page in obstore.list(store, key or None) for meta in page]

        found: list[tuple[str, int]] = self._client.run(self._client.call, prefix, listed).result()
        return found

    def put(self, key: str, content: Content, *, is_new: bool = False) -> None:
        """Store an object. FileExistsError if there must be none of this key (`is_new`), and there is."""

        def put(store: Any, path: str) -> None:
            import obstore

            obstore.put(store, path, bytes(content), mode="create" if is_new else "overwrite", use_multipart=False)

        try:
            self._client.run(self._client.call, key, put).result()
        except RemoteChangedError:
            exists = f"'{self._client.name(key)}' exists"
        else:
            return
        raise FileExistsError(errno.EEXIST, exists)


def wait_for(under_way: Sequence[Future[Any]], but: type[BaseException] | None = None) -> None:
    """Return when all have ended, so that none writes to memory any more; then raise the first error."""
    errors = [error for future in under_way if (error := future.exception()) is not None]
    for error in errors:
        if but is None or not isinstance(error, but):
            raise error


def _seen(answer: Future[Answer]) -> tuple[bytes, State] | OSError | None:
    """The content and version that an answer has; the error; or None of an object that is not there."""
    error = answer.exception()
    if isinstance(error, FileNotFoundError):
        return None
    return error if isinstance(error, OSError) else (bytes(answer.result().data), _numbers(answer.result().pin))


def _numbers(pin: Pin) -> State:
    return pin.nbytes, int.from_bytes(hashlib.blake2b(pin.mark.encode(), digest_size=7).digest())
