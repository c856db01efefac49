"""How is a folder of objects written in a store by many ranks, so that nobody takes it for a whole one before it is?

1. A job puts its mark first, which must not exist: so no two write one folder. It must find nothing else there.
2. Objects have their keys from the beginning. Without the last one, which `publish` puts, and which must not exist, they are no
   store of arrays. Then the mark goes.
3. A job that fails removes what it has put. What one has left that was killed stays: its mark says so to the next.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from shardload.errors import ConfigError
from shardload.storage.remote.address import without_secrets
from shardload.storage.remote.client import Client
from shardload.storage.remote.objects import RemoteFolder
from shardload.storage.target import FOLDER_MARK

_PAUSES = (0.0, 0.5, 2.0)


class NewRemoteFolder(RemoteFolder):
    """A new folder of objects in a store (`WritableFolder`).

    Parameters
    ----------
    url : str
        Its place.
    mode : str
        ``"w-"`` or ``"w"``: neither replaces anything here.
    options : mapping
        How the store is reached.

    Raises
    ------
    ConfigError
        For a plain HTTP server.
    """

    has_parts = False

    def __init__(self, url: str, mode: str, options: Mapping[str, Any]) -> None:
        if url.lower().startswith("http"):
            raise ConfigError(
                f"'{without_secrets(url)}' is on an HTTP server, to which nothing is saved. Save to a folder, and upload it"
            )
        super().__init__(Client(url, options))
        self._mode, self._mark, self._last = mode, b"", ("", b"")

    # --- on one rank

    def create(self) -> str:
        """See `WritableFolder`."""
        self._mark = secrets.token_hex(8).encode()
        how = f"Remove what is there (aws s3 rm --recursive {self.name}, gcloud storage rm -r), or choose another name"
        try:
            self._put_new(FOLDER_MARK, self._mark)
        except FileExistsError:
            self._mark = b""
            raise ConfigError(
                f"'{self.name}' is being saved by another job, or one that was killed: there is '{FOLDER_MARK}'. Wait for "
                f"it. {how}"
            ) from None
        try:
            found = next(iter(self.keys("")), None)
        except BaseException:
            self._end()
            raise
        if found is not None:
            self._end()
            why = (
                ", and mode='w' replaces nothing in a store, whose objects cannot change their names"
                if self._mode == "w"
                else ""
            )
            raise ConfigError(f"'{self.name}' exists: there is '{found}'{why}. {how}")
        return self.name

    def take_up(self) -> set[str] | None:
        """See `WritableFolder`."""
        raise ConfigError(f"what was begun in '{self.name}' cannot go on: leave out resume=True")

    def finish(self, key: str, data: bytes) -> None:
        """See `WritableFolder`."""
        self._last = key, data

    def publish(self) -> None:
        """See `WritableFolder`."""
        try:
            self._put_new(*self._last)
        except FileExistsError:
            raise ConfigError(f"'{self.name}' was saved by somebody else meanwhile. Choose another name") from None
        self._end()

    def _put_new(self, key: str, data: bytes) -> None:
        """FileExistsError if there is another object. One that is the same was put by a request whose answer was lost."""
        try:
            super().put(key, data, is_new=True)
        except FileExistsError:
            stored = self.open(key)
            if stored is None or stored.nbytes != len(data) or stored.read_at_most(0, len(data)) != data:
                raise

    def _end(self) -> None:
        """Remove the mark."""
        self._mark = b""
        with suppress(OSError):
            self._delete([FOLDER_MARK])

    def _delete(self, keys: list[str]) -> None:
        def delete(store: Any, above: str) -> None:
            import obstore

            obstore.delete(store, [f"{above}/{key}".lstrip("/") for key in keys])

        with suppress(FileNotFoundError):
            self._client.run(self._client.call, "", delete).result()

    def discard(self, *, keeps: bool = False) -> None:
        """See `WritableFolder`. Other ranks, which have stopped too, may still put the last object."""
        for pause in _PAUSES if self._mark else ():
            time.sleep(pause)
            with suppress(OSError):
                if not (keys := list(self.keys(""))):
                    break
                self._delete(keys)
        if self._mark:
            self._end()

    # --- on all ranks

    def join(self, address: str) -> None:
        """See `WritableFolder`."""
        if address != self.name:
            raise ConfigError(f"this rank saves to '{self.name}', another one to '{address}'")

    def read_back(self, address: str) -> RemoteFolder:
        """See `WritableFolder`."""
        return RemoteFolder(self._client)

    def keys(self, below: str) -> Iterator[str]:
        """See `WritableFolder`."""
        return (key for key, _ in self.list(below) if key != FOLDER_MARK)

    def put(self, key: str, content: Any, *, is_new: bool = False) -> None:
        """See `WritableFolder`. The mark says that nobody else puts it: so it is no error if a request is repeated."""
        super().put(key, content, is_new=is_new)

    def write_at(self, key: str, data: Any, offset: int) -> None:
        """See `WritableFolder`."""
        raise NotImplementedError(errno.ENOSYS, "an object is put as a whole")

    def sync(self) -> None:
        """See `WritableFolder`. What was put is there when `put` returns."""

    def close(self) -> None:
        """See `WritableFolder`."""
