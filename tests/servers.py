"""A server of objects on this machine: HTTP with ranges and ETags, as much of S3 as `get`, `put` and `list` need, and faults.

    with ObjectServer({"bucket/run.h5": data}) as server:
        server.faults.busy = 0.2                                # every fifth request: 503
        open_remote(f"s3://bucket/run.h5", server.storage)      # or f"{server.url}/bucket/run.h5"
        server.log                                              # what was asked: (client, method, key, bytes, status) of each

A client is what a request says in its header `user-agent`: ranks differ by ``storage={"user_agent": f"rank {rank}"}``.
The server runs in threads of the process that makes it: in a job one rank has it, and tells the others its `url`.
"""

from __future__ import annotations

import hashlib
import http.server
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

__all__ = ["Faults", "ObjectServer", "Request"]


class Request(NamedTuple):
    """What was asked, and what of it was sent: bytes of the body."""

    client: str
    method: str
    key: str
    nbytes: int
    status: int
    first: int


@dataclass
class Faults:
    """What goes wrong. `only` says for which keys; `first` how many requests of each kind of fault (None: all)."""

    busy: float = 0.0  # 503 SlowDown, at random, by `seed`
    short: int = 0  # so many bodies end in the middle
    short_headers: bool = False  # ... and their length says so
    stalled: int = 0  # so many bodies stop in the middle, for as long as `stalls` is not set
    slow: float = 0.0  # seconds between the tenths of a body
    latency: float = 0.0  # seconds before each answer
    has_etag: bool = True
    has_ranges: bool = True
    has_length: bool = True  # else the connection's end is that of the body
    has_date: bool = True
    status: int = 0  # this status for each request, with `code` of S3
    code: str = ""
    body: str = ""
    exists: tuple[int, str] = (412, "PreconditionFailed")  # the answer to a put of what must not exist, and does
    seed: int = 1
    only: Callable[[str], bool] = field(default=lambda key: True)


class ObjectServer:
    """Serves objects from memory, or the files below a folder.

    Parameters
    ----------
    objects : dict or Path
        Content by key (``"bucket/key"``), or the folder.
    """

    def __init__(self, objects: dict[str, bytes] | Path | None = None) -> None:
        self.objects: dict[str, bytes] = {} if objects is None or isinstance(objects, Path) else objects
        self._folder = objects if isinstance(objects, Path) else None
        self.faults, self.log, self.lists = Faults(), list[Request](), True
        self._etags: deque[tuple[bytes, str]] = deque(maxlen=8)
        self.dates: dict[str, float] = {}
        self.headers: list[dict[str, str]] = []  # of each request
        self.ends, self.lock = threading.Event(), threading.Lock()
        self.random = random.Random(1)
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> ObjectServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def storage(self) -> dict[str, Any]:
        """``storage=`` for s3:// URLs."""
        return {"endpoint": self.url, "region": "us-east-1", "access_key_id": "AKIATEST", "secret_access_key": "TOPSECRET"}

    def content(self, key: str) -> bytes | None:
        if self._folder is None:
            return self.objects.get(key)
        path = self._folder / key
        return path.read_bytes() if path.is_file() else None

    def etag(self, content: bytes) -> str:
        """From the bytes. Those of the last objects are kept: a hash of all for each range would take long."""
        with self.lock:
            known = next((etag for other, etag in self._etags if other is content), None)
        if known is None:
            known = f'"{hashlib.md5(content).hexdigest()}"'
            with self.lock:
                self._etags.append((content, known))
        return known

    def names(self) -> list[str]:
        if self._folder is None:
            return sorted(self.objects)
        return sorted(str(path.relative_to(self._folder)) for path in self._folder.rglob("*") if path.is_file())

    def put(self, key: str, content: bytes | None) -> None:
        """Keep an object; None: remove it."""
        if self._folder is None:
            self.objects.pop(key, None) if content is None else self.objects.update({key: content})
            return
        path = self._folder / key
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def gets(self, key: str = "", client: str | None = None) -> list[Request]:
        """Requests for bytes whose key contains `key`, those that were answered well."""
        with self.lock:
            found = [r for r in self.log if r.method == "GET" and key in r.key and r.status in (200, 206)]
        return [r for r in found if client is None or r.client == client]

    def clear(self) -> None:
        with self.lock:
            self.log.clear()
            self.headers.clear()


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256  # else the system drops some of many connections made at once


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: ObjectServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        url, faults = urlsplit(self.path), self.owner.faults
        key = unquote(url.path).strip("/")
        query = parse_qs(url.query)
        key = query.get("file", [key])[0]  # as some archives name it
        with self.owner.lock:
            self.owner.headers.append({name.lower(): value for name, value in self.headers.items()})
        if "list-type" in query and not self.owner.lists:
            self._say(key, 403, "AccessDenied")
            return
        if "list-type" in query:
            self._list(key, query.get("prefix", [""])[0], "delimiter" in query)
            return
        if self._fails(key):
            return
        content = self.owner.content(key)
        if content is None:
            self._say(key, 404, "NoSuchKey")
            return
        etag = self.owner.etag(content)
        if faults.has_etag and self.headers.get("If-Match", etag) != etag:
            self._say(key, 412, "PreconditionFailed")
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last, status = 0, len(content) - 1, 200
        last_bytes = re.fullmatch(r"bytes=-(\d+)", self.headers.get("Range", ""))
        if last_bytes is not None and faults.has_ranges:
            first, status = max(0, len(content) - int(last_bytes[1])), 206
        if asked is not None and faults.has_ranges:
            first, last, status = int(asked[1]), min(last, int(asked[2] or last)), 206
            if first > last:
                self._say(key, 416, "InvalidRange")
                return
        body = content[first : last + 1]
        headers = {"Content-Length": str(len(body))} if faults.has_length else {"Connection": "close"}
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        if faults.has_etag:
            headers["ETag"] = etag
        if faults.has_date:
            headers["Last-Modified"] = formatdate(self.owner.dates.get(key, 1e9), usegmt=True)
        self._send(key, status, headers, body, first)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        key, owner = unquote(urlsplit(self.path).path).strip("/"), self.owner
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._fails(key):
            return
        with owner.lock:
            exists = owner.content(key) is not None
            if not (exists and self.headers.get("If-None-Match") == "*"):
                owner.put(key, body)
        if exists and self.headers.get("If-None-Match") == "*":
            self._say(key, *owner.faults.exists)
            return
        self._send(key, 200, {"Content-Length": "0", "ETag": owner.etag(body)}, b"", 0)

    def do_POST(self) -> None:
        """Of S3: remove some objects."""
        bucket, body = urlsplit(self.path).path.strip("/"), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        keys = re.findall(r"<Key>.*?</Key>", body.decode())
        for key in keys:
            self.owner.put(f"{bucket}/{unescape(key[5:-6])}", None)
        answer = f"<DeleteResult>{''.join(f'<Deleted>{key}</Deleted>' for key in keys)}</DeleteResult>".encode()
        self._send(bucket, 200, {"Content-Length": str(len(answer)), "Content-Type": "application/xml"}, answer, 0)

    def do_DELETE(self) -> None:
        key = unquote(urlsplit(self.path).path).strip("/")
        if not self._fails(key):
            self.owner.put(key, None)
            self._send(key, 204, {}, b"", 0)

    def _fails(self, key: str) -> bool:
        owner, faults = self.owner, self.owner.faults
        if faults.latency:
            time.sleep(faults.latency)
        if not faults.only(key):
            return False
        if faults.status:
            self._say(key, faults.status, faults.code)
            return True
        with owner.lock:
            is_busy = faults.busy and owner.random.random() < faults.busy
        if is_busy:
            self._say(key, 503, "SlowDown")
        return bool(is_busy)

    def _say(self, key: str, status: int, code: str) -> None:
        more = self.owner.faults.body
        body = f"<Error><Code>{code}</Code><Message>{escape(self.path)}</Message>{more}</Error>".encode()
        self._send(key, status, {"Content-Length": str(len(body))}, body, 0)

    def _list(self, bucket: str, prefix: str, is_flat: bool) -> None:
        above = f"{bucket}/{prefix}"
        found = [key for key in self.owner.names() if key.startswith(above)]
        folders = sorted({f"{prefix}{key[len(above) :].partition('/')[0]}/" for key in found if "/" in key[len(above) :]})
        if is_flat:
            found = [key for key in found if "/" not in key[len(above) :]]
        rows = "".join(
            f"<Contents><Key>{escape(key.partition('/')[2])}</Key><Size>{len(self.owner.content(key) or b'')}</Size>"
            '<LastModified>2001-01-01T00:00:00.000Z</LastModified><ETag>"x"</ETag></Contents>'
            for key in found
        )
        if is_flat:
            rows += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()
        self._send(bucket, 200, {"Content-Length": str(len(body)), "Content-Type": "application/xml"}, body, 0)

    def _send(self, key: str, status: int, headers: dict[str, str], body: bytes, first: int) -> None:
        owner, faults, sent = self.owner, self.owner.faults, body
        stalls = False
        if status in (200, 206) and self.command == "GET" and len(body) > 1 and faults.only(key):
            with owner.lock:
                if faults.short > 0:
                    faults.short -= 1
                    sent, self.close_connection = body[: len(body) // 2], True
                    if faults.short_headers:
                        headers = {**headers, "Content-Length": str(len(sent))}
                elif faults.stalled > 0:
                    faults.stalled -= 1
                    stalls, self.close_connection = True, True
        with owner.lock:
            client = self.headers.get("User-Agent", "")
            owner.log.append(Request(client, self.command, key, len(sent) if self.command == "GET" else 0, status, first))
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if stalls:
                self.wfile.write(sent[: len(sent) // 2])
                owner.ends.wait()
            elif faults.slow and status in (200, 206) and faults.only(key):
                step = max(1, len(sent) // 10)
                for begin in range(0, len(sent), step):
                    self.wfile.write(sent[begin : begin + step])
                    time.sleep(faults.slow)
            else:
                self.wfile.write(sent)
        except OSError:  # the client has gone
            self.close_connection = True
