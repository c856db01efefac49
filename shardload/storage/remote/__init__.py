"""How are objects in stores read: in S3, Google, Azure, on an HTTP server?

    folder = open_remote("s3://bucket/run.h5", {"region": "us-west-2", "skip_signature": True})
    with closing(folder.object()) as stored: ...     # a `StoredObject`; `folder` has the keys below that URL (`ObjectFolder`)

``(obstore store, key)`` becomes, where a call begins, a URL and ``{"store": store}`` (`with_store`): below, all are URLs.

address  what a URL names, options and profiles; nothing of it is printed with its values (`StorageOptions`)
client   one request: threads, retries, time-outs, what an answer means; the only module that calls obstore
ahead    what is fetched before it is asked for, and in which requests
throttle  the limit of requests to one store
objects  `RemoteObject`, `RemoteFolder`

obstore is imported by `open_remote`, so never for local files.
"""

from shardload.storage.objects import RemoteError
from shardload.storage.remote.address import StorageOptions, is_remote, with_store, without_secrets
from shardload.storage.remote.ahead import MOST_AHEAD_NBYTES, PIECE_NBYTES
from shardload.storage.remote.client import Counts, Pin, RemoteChangedError, counts
from shardload.storage.remote.objects import RemoteFolder, RemoteObject, expect, open_remote

__all__ = [
    "MOST_AHEAD_NBYTES",
    "PIECE_NBYTES",
    "Counts",
    "Pin",
    "RemoteChangedError",
    "RemoteError",
    "RemoteFolder",
    "RemoteObject",
    "StorageOptions",
    "counts",
    "expect",
    "is_remote",
    "open_remote",
    "with_store",
    "without_secrets",
]
