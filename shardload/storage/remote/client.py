"""How is a store asked for bytes? In threads of their own, again if that failed, and never with a secret in an error.

1. A request is one `get` of a range, with the ETag that is expected. obstore and the library below it are told not to retry.
2. What may pass (503, a stalled or cut body, a refused connection) is tried again, later and later. While a server says that it
   has too much to do, half as many requests are under way.
3. What will not pass is a `RemoteError` with its cause, and what to pass. obstore's errors quote URLs with their signatures, so
   nothing of them is kept: neither their text nor, as `__context__`, themselves.
"""

from __future__ import annotations

import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from shardload.storage.objects import Bytes, RemoteError
from shardload.storage.remote.address import address_of
from shardload.storage.remote.ahead import PIECE_NBYTES, Ahead
from shardload.system.thread_pool import Pool

_MOST_TRIES, _FIRST_TRIES = 8, 3  # of a request; of one to a store that has never answered
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds
_BUSY = {429, 503}
_SMALL_NBYTES = 1 << 16  # up to so many, an answer takes as long as an empty one
_PASSING = {408, 500, 502, 504, *_BUSY}


class Pin(NamedTuple):
    """The one version of an object that is read: its size, and its ETag (else its date, as ``@...``; else nothing).

    An ETag is often that of the bytes: an object that was replaced by the same bytes is the same version, but for its date.
    """

    nbytes: int
    mark: str
    date: float = 0.0

    @property
    def etag(self) -> str | None:
        """The ETag for `If-Match`; None if the server cannot compare it (a weak ETag matches nothing)."""
        return None if not self.mark or self.mark.startswith(("@", "W/")) else self.mark


class RemoteNotFoundError(RemoteError, FileNotFoundError):
    """There is no such object."""


class RemoteChangedError(RemoteError):
    """An object was replaced since the first rank saw it."""


@dataclass
class Counts:
    """The requests of this process to stores: all that were answered or failed, bytes of bodies, repeated requests."""

    requests: int = 0
    nbytes: int = 0
    retries: int = 0

    def since(self, before: Counts) -> Counts:
        """What was counted after `before`."""
        return Counts(self.requests - before.requests, self.nbytes - before.nbytes, self.retries - before.retries)


class _Process:
    """The threads and counts of this process, which a fork does not have."""

    def __init__(self) -> None:
        self.pid, self.lock, self.counts = os.getpid(), threading.Lock(), Counts()
        self.pool = Pool(128, "shardload_fetch")  # each client has fewer under way
        self.ahead = Ahead(Pool(1, "shardload_ahead").submit)


_process: _Process | None = None
_starting = threading.Lock()


def _this_process() -> _Process:
    global _process
    if _process is None:
        with _starting:
            _process = _process or _Process()
    if _process.pid != os.getpid():
        raise RemoteError(
            errno.EINVAL,
            f"process {os.getpid()} was forked from one that had read from a store before: its connections would hang. Start "
            "processes by 'spawn' or 'forkserver', or fork before the first load",
        )
    return _process


def ahead() -> Ahead:
    """What this process fetches ahead."""
    return _this_process().ahead


def counts() -> Counts:
    """The counts of this process until now."""
    return Counts() if _process is None else Counts(**vars(_process.counts))


Answer = tuple[Bytes, Pin]
"""The bytes of a range, and the object's version."""

_Failure = tuple[int, str, bool]
"""What a failed request means: the status of HTTP, or 0; the text for people; whether it may succeed if it is repeated."""


class Client:
    """Requests to one store. Of obstore it calls `get`, `put`, `delete`, `list` and `list_with_delimiter`, and nothing else.

    Parameters
    ----------
    url : str
        What it names is put before the keys of objects.
    options : mapping
        How the store is reached.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._store, self._throttle, self._base, self._name = address_of(url, options)
        import obstore  # here, because only `address_of` says that it is not installed

        self._obstore = obstore

    @property
    def has_suffixes(self) -> bool:
        """Whether the last bytes can be asked for by their number. Azure has no such request."""
        return type(self._store).__name__ != "AzureStore"

    def name(self, key: str) -> str:
        """An object's name for people."""
        return f"{self._name.rstrip('/')}/{key}" if key else self._name

    def get(
        self, key: str, extent: tuple[int, int] | Mapping[str, int] | None, pin: Pin | None = None, most: int | None = None
    ) -> Future[Answer]:
        """Fetch one range of an object, or all of it, in a fetch thread.

        Parameters
        ----------
        key : str
            Its key below that of the URL; empty for the object at the URL itself.
        extent : (int, int), {"suffix": int} or None
            First byte, and the one after the last, which may be beyond the end. Or how many of the last bytes.
        pin : Pin, optional
            The version that it must be.
        most : int, optional
            The most bytes that the object may have.

        Returns
        -------
        Future of Answer
            Its result raises RemoteNotFoundError if there is no such object, RemoteChangedError if it is another version,
            RemoteError if it cannot be read, and ValueError if it has more than `most` bytes, before they are read.
        """
        return _this_process().pool.submit(self._get, key, extent, pin, most)

    def get_whole(self, key: str, most: int) -> Future[list[Future[Answer]]]:
        """Fetch all of an object of at most `most` bytes, in pieces: the others begin as soon as the first one says how many
        there are, also if nobody waits for them yet. Errors as from `get`, of the first piece by this future.
        """

        def fetch() -> list[Future[Answer]]:
            data, pin = self._get(key, None if most <= PIECE_NBYTES else (0, PIECE_NBYTES), None, most)
            first = Future[Answer]()
            first.set_result((data, pin))
            starts = range(len(data), pin.nbytes, PIECE_NBYTES)
            return [first, *(self.get(key, (start, min(start + PIECE_NBYTES, pin.nbytes)), pin) for start in starts)]

        return _this_process().pool.submit(fetch)

    def _get(self, key: str, extent: tuple[int, int] | Mapping[str, int] | None, pin: Pin | None, most: int | None) -> Answer:
        options: dict[str, Any] = {} if extent is None else {"range": extent}
        if pin is not None and pin.etag is not None:
            options["if_match"] = pin.etag

        def get(path: str) -> Answer:
            result = self._obstore.get(self._store, path, options=options)
            answered_pin = _pin_of(result.meta)
            if pin is not None and answered_pin[:2] != pin[:2]:
                raise self._changed(key)
            if most is not None and answered_pin.nbytes > most:
                return np.empty(0, dtype=np.uint8), answered_pin
            data = np.frombuffer(result.bytes(), dtype=np.uint8)
            n_promised = result.range[1] - result.range[0]
            if len(data) != n_promised:
                raise EOFError(f"{len(data)} bytes came, and its head promised {n_promised}")
            return data, answered_pin

        is_small = isinstance(extent, tuple) and extent[1] - extent[0] <= _SMALL_NBYTES
        data, answered_pin = self._call(key, get, is_small=is_small)
        if most is not None and answered_pin.nbytes > most:
            raise ValueError(f"'{key}' has {answered_pin.nbytes} bytes, what is stored there {most} at most")
        with _this_process().lock:
            _this_process().counts.nbytes += len(data)
        return data, answered_pin

    def put(self, key: str, data: Any, mode: Literal["create", "overwrite"]) -> None:
        """Put an object. With ``"create"``, RemoteChangedError if it exists."""
        options = {"mode": mode, "use_multipart": False}
        content = data if isinstance(data, bytes) else memoryview(data).cast("B")  # not a copy of each chunk under way
        self._wait_for(key, lambda path: self._obstore.put(self._store, path, content, **options), "put")

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. No error if one does not exist."""
        keys = list(keys)
        with suppress(FileNotFoundError):
            self._wait_for(
                "", lambda folder: self._obstore.delete(self._store, [_join(folder, key) for key in keys]), "deleted"
            )
            return
        for key in keys if len(keys) > 1 else ():  # one did not exist, at which Google's and Azure's stop
            self.delete([key])

    def keys(self, below: str) -> list[str]:
        """The keys of all objects below a folder: a request for each thousand."""

        def keys(folder: str) -> list[str]:
            n = len(folder) - len(below) if below or not folder else len(folder) + 1  # of the folder's own key
            return [meta["path"][n:] for page in self._obstore.list(self._store, folder or None) for meta in page]

        return list(self._wait_for(below, keys))

    def folders(self, below: str) -> list[str]:
        """The names of the folders directly below a folder, sorted: a request for each thousand."""
        listing = self._wait_for(below, lambda folder: self._obstore.list_with_delimiter(self._store, folder or None))
        return sorted(path.rpartition("/")[2] for path in listing["common_prefixes"])

    def _wait_for(self, key: str, function: Callable[[str], Any], verb: str = "read") -> Any:
        return _this_process().pool.submit(self._call, key, function, verb).result()

    def _call(self, key: str, function: Callable[[str], Any], verb: str = "read", is_small: bool = False) -> Any:
        """`function(path of the object)`, again if that may help. Errors as from `get`.

        `verb` is what is done with the object, for messages; `is_small`: few bytes come back.
        """
        process, n_tries = _this_process(), 0
        while True:
            with self._throttle.slot(is_small):
                began, n_tries = time.monotonic(), n_tries + 1
                result, failure = self._try(key, function)
                with process.lock:
                    process.counts.requests += 1
                    process.counts.retries += n_tries > 1
            if failure is None:
                self._throttle.good()
                return result
            status, text, passes = failure
            self._throttle.has_answered |= status != 0
            if status in _BUSY:
                self._throttle.busy(began)
            if not passes or n_tries >= (_MOST_TRIES if self._throttle.has_answered else _FIRST_TRIES):
                break
            time.sleep(random.uniform(0.5, 1) * min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (n_tries - 1)))
        if status == 412:
            raise self._changed(key)
        if status == 404:
            raise RemoteNotFoundError(errno.ENOENT, f"'{self.name(key)}' is not there: {text}")
        times = f" ({n_tries} times)" if n_tries > 1 else ""
        raise RemoteError(errno.EIO if passes else errno.EACCES, f"'{self.name(key)}' cannot be {verb}: {text}{times}")

    def _try(self, key: str, function: Callable[[str], Any]) -> tuple[Any, _Failure | None]:
        """What a function returns, or why it failed. obstore's error ends here."""
        try:
            return function(_join(self._base, key)), None
        except (RemoteError, MemoryError):
            raise
        except Exception as error:
            return None, _meaning(error)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, and no `Exception`: only this rank would know
                raise
            return None, (0, _PANICS, False)

    def _changed(self, key: str) -> RemoteChangedError:
        return RemoteChangedError(
            errno.ESTALE,
            f"'{self.name(key)}' is another object than it was when the first rank looked at it: it was replaced. Values of "
            "both would be mixed. Load again",
        )


def _join(folder: str, key: str) -> str:
    return "/".join(filter(None, (folder, key)))


def _pin_of(meta: Any) -> Pin:
    date = meta["last_modified"].timestamp()  # the epoch where a server does not say it
    return Pin(meta["size"], meta["e_tag"] or (f"@{date:.0f}" if date else ""), date)


_PUBLIC = "If it is public, pass storage={'skip_signature': True}"
_STATUS = {"FileNotFoundError": 404, "PreconditionError": 412, "AlreadyExistsError": 412}
_CAUSES = {  # by S3's code: the status, and what to say
    "ExpiredToken": (400, "the session token has expired. Get a new one, and load again"),
    "InvalidAccessKeyId": (403, f"the store does not know the access key. {_PUBLIC}"),
    "SignatureDoesNotMatch": (403, "the secret key does not belong to the access key, or a proxy changes requests"),
    "RequestTimeTooSkewed": (403, "the clock of this machine is wrong: the store takes no signature from it"),
    "NoSuchBucket": (404, "there is no such bucket"),
    "BlobAlreadyExists": (412, "it exists"),  # in place of 412, in Azure
}

_PANICS = (
    "obstore gives up (it says why on stderr). Is there a space, a line break or another character that does not belong there "
    "in the bucket, a key, or an option?"
)
_CAUSES_WITHOUT_STATUS = (  # words of obstore's errors, in that order; what to say; whether it may pass
    (
        "Range request not supported|NotPartial",
        "the server does not answer with a range of it, but with all. Download it, and load the file",
        False,
    ),
    (
        "UnexpectedRange|ContentRange|MissingContentLength",
        "the server's answer does not say how long it is, or which range, or it is another range than was asked for. Download "
        "it, and load the file",
        False,
    ),
    ("Could not parse path", "its key has an empty, '.' or '..' part, which is not supported", False),
    (
        "certificate|InvalidMessage|InvalidContentType|AlertReceived|Tls|tls",
        "no TLS connection: the certificate is not trusted, or there is no TLS at that port. For an own authority pass "
        "storage={'root_certificate': text of its PEM file}",
        False,
    ),
    (
        "BadScheme",
        "its address does not begin with https://. If http:// is meant, pass storage={'allow_http': True}",
        False,
    ),
    ("proxy|tunnel", "the proxy cannot be used. Look at HTTPS_PROXY, or pass storage={'proxy_url': ...}", True),
    ("dns error", "the name of its server is not known", True),
    ("kind: Timeout|TimedOut", "nothing came for a long time", True),
    ("IncompleteBody|kind: Interrupted", "the connection ended too early", True),
    ("kind: Connect", "no connection to its server. Is the address right, and a proxy needed?", True),
    ("HttpError", "the connection failed", True),
)


def _meaning(error: Exception) -> _Failure:
    """What an error of obstore means, in words without secrets: by its status, S3's code, or the kind of error below it."""
    if isinstance(error, EOFError):
        return 0, str(error), True
    text = str(error)
    match = re.search(r"status code: (\d{3})", text)
    status = int(match[1]) if match else _STATUS.get(type(error).__name__, 0)
    code = (re.search(r"<Code>(\w{1,60})</Code>", text) or ["", ""])[1]
    region = re.search(r"<Region>([\w-]{1,40})</Region>", text)
    if "169.254.169.254" in text or "metadata.google.internal" in text or "computeMetadata" in text:
        return 0, f"no keys: none in storage=, the environment or a profile, and this machine has no role. {_PUBLIC}", False
    if region is not None or "redirect without LOCATION" in text or code == "PermanentRedirect" or status == 301:
        where = f"'{region[1]}'" if region is not None else "..."
        return status or 301, f"its bucket is in another region: pass storage={{'region': {where}}}", False
    if code in _CAUSES:
        status, reason = _CAUSES[code]
        return status, f"{reason} ({code})", False
    if status == 403:
        why = f"access is denied (403 {code}".rstrip() + (
            f"). {_PUBLIC}. If its requester pays, pass storage={{'request_payer': True}}. Else keys are wrong, may not read "
            "it, or have expired, as signatures in URLs do. (S3 says so of an object that is missing, too, to who may not list "
            "its bucket.)"
        )
        return 403, why, False
    if status == 401:
        why = "the server asks who you are (401): pass keys, or storage={'default_headers': {'authorization': ...}}"
        return 401, why, False
    if status == 416:  # no byte is asked for that is not there, but the first
        return 416, "it is empty (0 bytes)", False
    if status:
        passes = status in _PASSING or code == "ConditionalRequestConflict"  # of S3, while another request puts the same
        return status, f"the server answers {status} {code}".rstrip(), passes
    text = re.sub(r"\w+://\S+", "", text)  # words of a key would be taken for causes
    for words, reason, passes in _CAUSES_WITHOUT_STATUS:
        if re.search(words, text):
            return 0, reason, passes
    return 0, f"its store gives an answer that is not understood ({type(error).__name__})", False
