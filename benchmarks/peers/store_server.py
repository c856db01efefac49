"""A store of objects on this machine, with the latency and the rate of a far one: nginx, which counts requests and bytes.

Each request is answered after 20 ms, and each connection gives 60 MB/s, as one to S3 does. The files below a folder are
objects: ``/bucket/key``, for whoever asks, by GET and HEAD with ranges and ETags. There is one list, of nothing, which S3's
clients ask for where an object is missing. The server shares the cores with its clients. It sends files by `sendfile`, and
its CPU seconds are told beside theirs.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

LATENCY_MS, CONNECTION_NBYTES = 20, 60_000_000  # a second
MODULES = Path("/usr/lib/nginx/modules")
MODULE = "ngx_http_lua_module.so"
BUCKET = "bench"
# nginx gives what may be sent at once without a limit: small, so that the rate holds for requests of some MiB, too.
BURST = "512k"

_CONFIGURATION = """
load_module {modules}/ndk_http_module.so;
load_module {modules}/ngx_http_lua_module.so;
user root;
worker_processes 2;
daemon off;
pid {folder}/pid;
error_log {folder}/error.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  lua_shared_dict counts 64k;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  sendfile on; tcp_nopush on; tcp_nodelay on; keepalive_timeout 120; keepalive_requests 1000000;
  open_file_cache max=100000; open_file_cache_valid 3600;
  default_type application/octet-stream;
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    root {root};
    log_by_lua_block {{
      ngx.shared.counts:incr("requests", 1, 0)
      ngx.shared.counts:incr("nbytes", tonumber(ngx.var.body_bytes_sent), 0)
    }}
    location = /counts {{
      log_by_lua_block {{ }}
      content_by_lua_block {{
        local counts = ngx.shared.counts
        ngx.say(string.format('{{"requests": %d, "nbytes": %d}}', counts:get("requests") or 0, counts:get("nbytes") or 0))
      }}
    }}
    location /{bucket} {{
      sendfile_max_chunk {burst}; limit_rate {rate};
      error_page 404 = @missing;
      rewrite_by_lua_block {{
        ngx.sleep({seconds})
        if string.find(ngx.var.args or "", "list%-type=2") then
          ngx.header["content-type"] = "application/xml"
          ngx.say("<ListBucketResult><Name>{bucket}</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>"
                  .. "</ListBucketResult>")
          return ngx.exit(200)
        end
      }}
    }}
    location @missing {{
      default_type application/xml;
      return 404 "<Error><Code>NoSuchKey</Code></Error>";
    }}
  }}
}}
"""


class Counts(NamedTuple):
    """Of a server until now: requests, bytes of bodies, and its CPU seconds."""

    requests: int
    nbytes: int
    cpu_seconds: float

    def since(self, before: Counts) -> Counts:
        """What was added."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def missing() -> str:
    """What to install; empty if it can run."""
    if shutil.which("nginx") and (MODULES / MODULE).exists():
        return ""
    return "no nginx with Lua: on Debian and Ubuntu, apt-get install nginx libnginx-mod-http-lua"


class StoreServer:
    """Serves the files below a folder as the bucket `BUCKET`.

    Parameters
    ----------
    root : Path
        A folder that the server's user can read.
    """

    def __init__(self, root: Path) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="shardload-store-")
        folder = Path(self._temporary.name)
        (folder / "root").mkdir()
        (folder / "root" / BUCKET).symlink_to(root.resolve())
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        configuration = folder / "nginx.conf"
        configuration.write_text(
            _CONFIGURATION.format(
                modules=MODULES, folder=folder, root=folder / "root", port=port, bucket=BUCKET, burst=BURST,
                rate=CONNECTION_NBYTES, seconds=LATENCY_MS / 1000,
            )
        )  # fmt: skip
        self._process = subprocess.Popen(["nginx", "-c", str(configuration), "-p", str(folder)], stdin=subprocess.DEVNULL)
        self._log = folder / "error.log"

    def __enter__(self) -> StoreServer:
        deadline = time.monotonic() + 20
        while True:
            try:
                self.counts()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    text = self._log.read_text()[-2000:] if self._log.exists() else ""
                    self.__exit__()
                    raise RuntimeError(f"nginx did not start\n{text}") from None
                time.sleep(0.02)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._temporary.cleanup()

    def counts(self) -> Counts:
        """What was asked of it."""
        with urllib.request.urlopen(f"{self.url}/counts", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        used = [worker.cpu_times() for worker in psutil.Process(self._process.pid).children()]
        return Counts(found["requests"], found["nbytes"], sum(times.user + times.system for times in used))
