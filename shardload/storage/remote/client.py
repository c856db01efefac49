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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardload.storage.objects import Bytes
from shardload.storage.remote.address import address_of
from shardload.storage.remote.ahead import Ahead
from shardload.system.thread_pool import Pool

_MOST_TRIES, _FIRST_TRIES = 8, 3  # of a request; of one to a store that has never answered
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds
_BUSY = {429, 503}
_SMALL_NBYTES, _SMALL_IN_ONE = 1 << 16, 8  # an answer that takes as long however many bytes it has
_PASSING = {408, 500, 502, 504, *_BUSY}


class Pin(NamedTuple):
    """The one version of an object that is read: its bytes, and its ETag (else its date, as ``@...``; else nothing)."""

    nbytes: int
    mark: str

    @property
    def etag(self) -> str | None:
        """What an answer must match; None if that cannot be asked for (a weak ETag matches nothing)."""
        return None if not self.mark or self.mark.startswith(("@", "W/")) else self.mark


class RemoteError(OSError):
    """An object cannot be read from its store. The text says why, and what to pass; no part of it is secret."""

    def __str__(self) -> str:
        return str(self.args[-1])


class RemoteNotFoundError(RemoteError, FileNotFoundError):
    """There is no such object."""


class RemoteChangedError(RemoteError):
    """An object is another than it was when the first rank saw it."""


@dataclass
class Counts:
    """What this process has asked stores for: requests that were answered or failed, bytes of bodies, repeated requests."""

    requests: int = 0
    nbytes: int = 0
    retries: int = 0

    def since(self, before: Counts) -> Counts:
        """What came after."""
        return Counts(self.requests - before.requests, self.nbytes - before.nbytes, self.retries - before.retries)


class _Process:
    """The threads and counts of this process, which a fork does not have."""

    def __init__(self) -> None:
        self.pid, self.lock, self.counts = os.getpid(), threading.Lock(), Counts()
        self.pool = Pool(128, "shardload_fetch")  # each client has fewer under way
        self.ahead = Ahead(self.pool.submit)


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
    """What this process fetches before it is asked for."""
    return _this_process().ahead


def counts() -> Counts:
    """Of this process until now."""
    return Counts() if _process is None else Counts(**vars(_process.counts))


class _Throttle:
    """At most `most` requests at a time, or eight small ones in the place of one; half of it after an answer that says so, one
    more after as many good ones.
    """

    def __init__(self, most: int) -> None:
        self._most, self._limit, self._n = most, float(most), 0
        self._changed, self._halved = threading.Condition(), 0.0

    @contextmanager
    def one(self, is_small: bool = False) -> Iterator[None]:
        n = 1 if is_small else _SMALL_IN_ONE  # counted in small ones
        with self._changed:
            self._changed.wait_for(lambda: self._n + n <= _SMALL_IN_ONE * max(1, int(self._limit)))
            self._n += n
        try:
            yield
        finally:
            with self._changed:
                self._n -= n
                self._changed.notify_all()  # a large one may still have to wait, where a small one need not

    def good(self) -> None:
        with self._changed:
            self._limit = min(self._most, self._limit + 1 / self._limit)

    def busy(self, since: float) -> None:
        """An answer to a request that began at that time. Those that were under way when the limit fell say nothing new."""
        with self._changed:
            if since > self._halved:
                self._limit, self._halved = max(1.0, self._limit / 2), time.monotonic()


Answer = tuple[Bytes, Pin]
"""The bytes of a range, and the object's version."""

_Failure = tuple[int, str, bool]
"""What a failed request means: the status of HTTP, or 0; what to say; whether it may pass by itself."""


class Client:
    """Requests to one store.

    Parameters
    ----------
    url : str
        What it names is put before the keys that are asked for.
    options : mapping
        How the store is reached.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._store, self._base, self._name, most = address_of(url, options)
        self._throttle, self._has_answered = _Throttle(most), False

    def __repr__(self) -> str:
        return f"Client('{self._name}')"

    @property
    def has_suffixes(self) -> bool:
        """Whether the last bytes can be asked for by their number. Azure has no such request."""
        return type(self._store).__name__ != "AzureStore"

    def name(self, below: str) -> str:
        """An object's name for people."""
        return f"{self._name.rstrip('/')}/{below}" if below else self._name

    def run(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call it in a fetch thread. It must not wait for another one there."""
        return _this_process().pool.submit(call, *arguments)

    def get(
        self, below: str, extent: tuple[int, int] | Mapping[str, int] | None, pin: Pin | None, most: int | None = None
    ) -> Answer:
        """One range of an object, or all of it.

        Parameters
        ----------
        below : str
            Its key below that of the address; empty for the address's own.
        extent : (int, int), {"suffix": int} or None
            First byte, and the one after the last, which may be beyond the end. Or how many of the last bytes.
        pin : Pin or None
            What it must be.
        most : int, optional
            ValueError if the object has more bytes, before they are read.

        Raises
        ------
        RemoteNotFoundError
            If there is no such object.
        RemoteChangedError
            If it is another.
        RemoteError
            If it cannot be read.
        """
        options: dict[str, Any] = {} if extent is None else {"range": extent}
        if pin is not None and pin.etag is not None:
            options["if_match"] = pin.etag

        def get(store: Any, key: str) -> Answer:
            import obstore

            result = obstore.get(store, key, options=options)
            found = _pin_of(result.meta)
            if pin is not None and found != pin:
                raise self._changed(below)
            if most is not None and found.nbytes > most:
                return np.empty(0, dtype=np.uint8), found
            data = np.frombuffer(result.bytes(), dtype=np.uint8)
            if len(data) != result.range[1] - result.range[0]:
                raise EOFError("its body was cut short")
            return data, found

        is_small = isinstance(extent, tuple) and extent[1] - extent[0] <= _SMALL_NBYTES
        data, found = self.call(below, get, is_small)
        if most is not None and found.nbytes > most:
            raise ValueError(f"'{below}' has {found.nbytes} bytes, what is stored there {most} at most")
        with _this_process().lock:
            _this_process().counts.nbytes += len(data)
        return data, found

    def call(self, below: str, call: Callable[[Any, str], Any], is_small: bool = False) -> Any:
        """`call(store, key)`, again if that may help. Errors as from `get`. `is_small`: few bytes come back."""
        process, n = _this_process(), 0
        while True:
            with self._throttle.one(is_small):
                began, n = time.monotonic(), n + 1
                found, failure = self._try(below, call)
                with process.lock:
                    process.counts.requests += 1
                    process.counts.retries += n > 1
            if failure is None:
                self._has_answered = True
                self._throttle.good()
                return found
            status, text, passes = failure
            self._has_answered = self._has_answered or status != 0
            if status in _BUSY:
                self._throttle.busy(began)
            if not passes or n >= (_MOST_TRIES if self._has_answered else _FIRST_TRIES):
                break
            time.sleep(random.uniform(0.5, 1) * min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (n - 1)))
        if status == 412:
            raise self._changed(below)
        if status == 404:
            raise RemoteNotFoundError(errno.ENOENT, f"'{self.name(below)}' is not there: {text}")
        times = f" ({n} times)" if n > 1 else ""
        raise RemoteError(errno.EIO if passes else errno.EACCES, f"'{self.name(below)}' cannot be read: {text}{times}")

    def _try(self, below: str, call: Callable[[Any, str], Any]) -> tuple[Any, _Failure | None]:
        """What a call returns, or why it failed. obstore's error ends here."""
        try:
            return call(self._store, "/".join(filter(None, (self._base, below)))), None
        except (RemoteError, MemoryError):
            raise
        except Exception as error:
            return None, _meaning(error)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, and no `Exception`: only this rank would know
                raise
            return None, (0, _PANICS, False)

    def _changed(self, below: str) -> RemoteChangedError:
        return RemoteChangedError(
            errno.ESTALE,
            f"'{self.name(below)}' is another object than it was when the first rank looked at it: it was replaced. Values of "
            "both would be mixed. Load again",
        )


def _pin_of(meta: Any) -> Pin:
    date = meta["last_modified"].timestamp()  # the epoch where a server does not say it
    return Pin(meta["size"], meta["e_tag"] or (f"@{date:.0f}" if date else ""))


_PUBLIC = "If it is public, pass storage={'skip_signature': True}"
_STATUS = {"FileNotFoundError": 404, "PreconditionError": 412, "AlreadyExistsError": 412}
_CAUSES = {  # of S3 by their code, whatever the status
    "ExpiredToken": (400, "the session token has expired. Get a new one, and load again"),
    "InvalidAccessKeyId": (403, f"the store does not know the access key. {_PUBLIC}"),
    "SignatureDoesNotMatch": (403, "the secret key does not belong to the access key, or a proxy changes requests"),
    "RequestTimeTooSkewed": (403, "the clock of this machine is wrong: the store takes no signature from it"),
    "NoSuchBucket": (404, "there is no such bucket"),
}

_PANICS = (
    "obstore gives up (it says why on stderr). Is there a space, a line break or another character that does not belong there "
    "in the bucket, a key, or an option?"
)
_BELOW = (  # words of obstore's errors without a status, in that order: what to say, and whether it may pass
    (
        "Range request not supported|NotPartial",
        "the server does not answer with a range of it, but with all. Download it, and load the file",
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
    """What obstore says, in words that hold nothing secret: a status, a code of S3, or the kind of what went wrong below."""
    if isinstance(error, EOFError):
        return 0, str(error), True
    text = str(error)
    found = re.search(r"status code: (\d{3})", text)
    status = int(found[1]) if found else _STATUS.get(type(error).__name__, 0)
    code = (re.search(r"<Code>(\w{1,60})</Code>", text) or ["", ""])[1]
    region = re.search(r"<Region>([\w-]{1,40})</Region>", text)
    if "169.254.169.254" in text or "metadata.google.internal" in text or "computeMetadata" in text:
        return 0, f"no keys: none in storage=, the environment or a profile, and this machine has no role. {_PUBLIC}", False
    if region is not None or "redirect without LOCATION" in text or code == "PermanentRedirect" or status == 301:
        where = f"'{region[1]}'" if region is not None else "..."
        return status or 301, f"its bucket is in another region: pass storage={{'region': {where}}}", False
    if code in _CAUSES:
        status, said = _CAUSES[code]
        return status, f"{said} ({code})", False
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
        return status, f"the server answers {status} {code}".rstrip(), status in _PASSING
    text = re.sub(r"\w+://\S+", "", text)  # words of a key would be taken for causes
    for words, said, passes in _BELOW:
        if re.search(words, text):
            return 0, said, passes
    return 0, f"its store gives an answer that is not understood ({type(error).__name__})", False
