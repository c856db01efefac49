"""How does a folder of objects come into being, or grow? On a file system under a temporary name, until all of it is there.

1. An object is a file. It stays open until its fsync, because some file systems tell only then that there was no room.
2. In a folder that another job may go on with (`take_up`), a file has `_PART` behind its name until all of it is on disk. So
   the names say which files are whole. The mark of the folder says what is being written, of which source. A job locks it while
   it writes: two jobs never go on with one folder.
3. `AddedFolder` has what comes into an old folder: its files are moved there.

In a store (`NewRemoteFolder`) names cannot be changed. Nobody must take the folder for a whole one before it is:

1. A job first puts a mark, which must not exist: so no two jobs write one folder. Nothing else may be there.
2. Objects have their keys from the beginning. They are no store of arrays without the last one, which `publish` puts, and which
   must not exist. Then the mark is removed.
3. A job that fails removes what it has put. The objects of a job that was killed stay: its mark tells the next job.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shlex
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

from shardload.errors import ConfigError, SourceError
from shardload.storage.changes import AppendLock, take_lock
from shardload.storage.leftovers import METADATA, ROOTS, leftovers_beside
from shardload.storage.local import Fence, LocalFolder
from shardload.storage.objects import UnsyncedError
from shardload.storage.remote import RemoteChangedError, RemoteFolder, without_secrets
from shardload.storage.remote.client import Client
from shardload.storage.target import (
    FOLDER_MARK,
    GROWTH_MARK,
    MARK_NBYTES,
    Target,
    WritableFile,
    check_mark,
    mark,
    rename,
    sync_folder,
)
from shardload.system.steps import steps_of
from shardload.system.undo import Undo

_PART = ".part"
_REMOTE_PAUSES = (0.0, 0.5, 2.0)  # seconds before each attempt to remove what other ranks may still put
_MOST_OPEN = 64  # files that wait for their fsync
_MOST_UNSYNCED = 4096  # writes into them
_MOST_UNSYNCED_NBYTES = 64 << 20  # if another job may go on: about what a kill costs a rank


class NewFolder(LocalFolder):
    """A new folder of files (`WritableFolder`).

    Parameters
    ----------
    path : str
        The name that it will have.
    mode : str
        See `Target`.
    about : mapping of str to str, optional
        What is written, of which source, if another job may go on with it after a kill.
    """

    def __init__(self, path: str, mode: str, about: Mapping[str, str] | None = None) -> None:
        super().__init__("", Fence())  # `create` and `join` say where it is
        self._name, self._about = path, about
        self._target = Target(path, mode, marks=ROOTS)
        self._mark: IO[bytes] | None = None  # locked while another job could go on
        self._lock = threading.Lock()
        # A file is closed with its last reference, so that no thread loses it while it writes. No weak references here: while a
        # file closes, they would still give it to another thread.
        self._shared: dict[str, WritableFile] = {}  # the files of `write_at`, by key: one fsync for the writes of all threads
        self._unsynced: dict[WritableFile, str] = {}  # with their keys
        self._n_unsynced = self._nbytes_unsynced = 0  # writes, and their bytes
        self._folders = set[str]()  # which exist
        self._unsynced_folders = set[str]()  # with new names in them

    # --- on one rank

    def create(self) -> str:
        """See `WritableFolder`."""
        if self._mark is not None:
            self._target.adopt(self.path)
            return self.path
        self.path = self._target.create()
        self._folders.add(self.path)
        with Undo(self.discard):
            text = b"" if self._about is None else json.dumps(dict(self._about)).encode()
            self._write_small(FOLDER_MARK, mark(self._target.token, self._name) + text)
            self._mark = None if self._about is None else _locked(os.path.join(self.path, FOLDER_MARK))
        return self.path

    def _write_small(self, name: str, content: bytes) -> None:
        """A small new file, on disk."""
        file = WritableFile(os.path.join(self.path, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        file.write_at(content, 0)
        file.sync()

    def take_up(self) -> set[str] | None:
        """Take up what a job that was killed has left of this folder, for `create`. Returns the keys of all whole objects in it
        but metadata (`METADATA`); None if nothing was left. Files that are not whole are removed.

        A folder without a mark is whole, and does not count, nor does one of a save, which nothing can go on with. ConfigError
        if what was left is of another source, or if another job is writing it.
        """
        difference = ""
        for path in [leftover.path for leftover in leftovers_beside(self._name) if leftover.goes_on]:
            if os.path.islink(path):
                continue
            try:
                file = _locked(os.path.join(path, FOLDER_MARK))
            except FileNotFoundError:
                continue
            file.seek(MARK_NBYTES)
            try:
                old, about = json.loads(file.read()), self._about or {}
            except ValueError:  # the machine stopped as it was written, before anything else was
                file.close()
                continue
            key = next((key for key in {**about, **old} if old.get(key) != about.get(key)), None)
            if key is None:
                self.path, self._mark = path, file
                self._folders.add(path)
                return self._whole_keys()
            file.close()
            values = f"{key} was {old.get(key, 'nothing')}, and is {about.get(key, 'nothing')}"
            difference = difference or f"'{path}' is not of this copy: {values}"
        if difference:
            raise ConfigError(f"{difference}. Remove it, or begin again without resume=True")
        return None

    def _whole_keys(self) -> set[str]:
        """The keys of the files that are whole. All others are removed, and metadata: the root's first."""
        for folder, _, files in os.walk(self.path):
            for name in files:
                if name.endswith(_PART) or name in METADATA:
                    os.unlink(os.path.join(folder, name))
            sync_folder(folder)
        return set(self.keys(""))

    def finish(self, key: str, data: bytes) -> None:
        """See `WritableFolder`."""
        self.sync()
        self.put(key, data)
        self.sync()
        os.unlink(os.path.join(self.path, FOLDER_MARK))
        sync_folder(self.path)

    def publish(self) -> None:
        """See `WritableFolder`."""
        self._target.commit()
        self._unlock()

    def discard(self, *, keeps: bool = False) -> None:
        """See `WritableFolder`."""
        if keeps and self._mark is not None:
            self._target.temporary = None
        if self._target.temporary is not None:  # first: a part of a store must not look like a whole one
            _unlink(os.path.join(self._target.temporary, name) for name in ROOTS)
        self._target.abandon()
        self._unlock()

    def _unlock(self) -> None:
        if self._mark is not None:
            self._mark.close()

    # --- on all ranks

    def join(self, address: str) -> None:
        """See `WritableFolder`."""
        check_mark(os.path.join(address, FOLDER_MARK), address, self._name)
        self.path = address
        self._folders.add(address)

    def read_back(self, address: str) -> LocalFolder:
        """See `WritableFolder`."""
        return LocalFolder(address, Fence())

    def keys(self, below: str) -> Iterator[str]:
        """See `WritableFolder`."""
        for folder, _, files in os.walk(os.path.join(self.path, below)):
            above = os.path.relpath(folder, self.path)
            for name in files:
                if name not in (FOLDER_MARK, GROWTH_MARK):
                    yield name if above == "." else f"{above}/{name}"

    def put(self, key: str, data: Any) -> None:
        """See `WritableFolder`."""
        self._write(key, self._open_new(key, os.O_EXCL), data, 0)

    def write_at(self, key: str, data: Any, offset: int) -> None:
        """See `WritableFolder`."""
        with self._lock:
            file = self._shared.get(key)
        if file is None:
            file = self._open_new(key)  # without the lock: a file server may be slow
            with self._lock:
                file = self._shared.setdefault(key, file)
        self._write(key, file, data, offset)

    def _open_new(self, key: str, flags: int = 0) -> WritableFile:
        path = os.path.join(self.path, key)
        folder = os.path.dirname(path)
        self._make_folder(folder)
        file = WritableFile(path if self._about is None else path + _PART, os.O_CREAT | os.O_WRONLY | flags)
        with self._lock:  # after the file is made: a sync of another thread before that would not count
            while len(folder) > len(self.path) and folder not in self._unsynced_folders:
                self._unsynced_folders.add(folder)
                folder = os.path.dirname(folder)
        return file

    def _make_folder(self, folder: str) -> None:
        """Make a folder, and those above it; not the store itself: whoever has removed that wants it gone."""
        if folder not in self._folders:
            self._make_folder(os.path.dirname(folder))
            with contextlib.suppress(FileExistsError):  # another thread, or rank
                os.mkdir(folder)
            self._folders.add(folder)

    def _write(self, key: str, file: WritableFile, data: Any, offset: int) -> None:
        file.write_at(data, offset)
        with self._lock:
            self._unsynced[file] = key  # after the write: a sync of another thread before that would not count
            self._n_unsynced += 1
            self._nbytes_unsynced += memoryview(data).nbytes
            has_many_bytes = self._about is not None and self._nbytes_unsynced >= _MOST_UNSYNCED_NBYTES
            is_due = len(self._unsynced) >= _MOST_OPEN or self._n_unsynced >= _MOST_UNSYNCED or has_many_bytes
            files = self._take_unsynced() if is_due else {}
        self._sync_files(files)

    def _take_unsynced(self) -> dict[WritableFile, str]:
        """The files that wait for their fsync, for the caller to sync. Call it with the lock."""
        files, self._unsynced, self._shared = self._unsynced, {}, {}
        self._n_unsynced = self._nbytes_unsynced = 0
        return files

    def _sync_files(self, files: Mapping[WritableFile, str]) -> None:
        """Wait until files are on disk, and give them their names."""
        for file, key in files.items():
            path = os.path.join(self.path, key)
            try:
                file.sync()
                if self._about is not None:
                    rename(path + _PART, path)
            except OSError as error:
                raise UnsyncedError(error, key) from error

    def sync(self) -> None:
        """See `WritableFolder`."""
        with self._lock:
            files, folders, self._unsynced_folders = self._take_unsynced(), sorted(self._unsynced_folders, reverse=True), set()
        self._sync_files(files)
        for folder in [*folders, self.path]:
            sync_folder(folder)

    def close(self) -> None:
        """See `WritableFolder`. If another job may go on, whole files get their names."""
        with self._lock:
            files = self._take_unsynced()
        if self._about is not None:
            with contextlib.suppress(OSError):
                self._sync_files(files)


def _unlink(paths: Iterable[str]) -> None:
    """Remove files, as many as can be removed."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _locked(path: str) -> IO[bytes]:
    """The mark of an unfinished folder, locked. ConfigError if another job has locked it."""
    file = open(path, "r+b")  # noqa: SIM115
    if not take_lock(file.fileno(), fcntl.LOCK_EX):
        file.close()
        raise ConfigError(f"another job is writing '{os.path.dirname(path)}' now. Wait for it, or end it first")
    return file


class AddedFolder(NewFolder):
    """What comes into an old folder: new objects, and objects in place of old ones.

    `create` takes the `AppendLock` of the old folder, `discard` gives it back.

    Parameters
    ----------
    path : str
        The old folder.
    """

    def __init__(self, path: str) -> None:
        self.old = os.path.realpath(path)
        super().__init__(path, "w")
        self._append_lock: AppendLock | None = None

    def create(self) -> str:
        """See `WritableFolder`."""
        self._append_lock = AppendLock(self.old)
        self._target.token = self._append_lock.token
        with Undo(self.discard):
            super().create()
            self._write_small(GROWTH_MARK, b"")
        return self.path

    def add(self, new: Iterable[tuple[str, str]], changed: Iterable[tuple[str, str]]) -> None:
        """Move objects into the old folder: first new ones, which nobody reads yet, and which are removed if a move fails.

        Each is given by its key here, and its key in the old folder.
        """
        moved: list[str] = []
        with Undo(lambda: _unlink(moved)):
            for pairs in (new, changed):
                folders = set[str]()
                for key, old_key in steps_of(pairs):
                    path = os.path.join(self.old, old_key)
                    folder = os.path.dirname(path)
                    if folder not in folders:
                        os.makedirs(folder, exist_ok=True)
                        while folder not in folders and len(folder) >= len(self.old):
                            folders.add(folder)
                            folder = os.path.dirname(folder)
                    rename(os.path.join(self.path, key), path)
                    if pairs is new:
                        moved.append(path)
                for folder in sorted(folders, reverse=True):
                    sync_folder(folder)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects that nobody reads any more from the old folder."""
        for key in steps_of(keys):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.old, key))

    def replace(self, keys: Mapping[str, str], before: Mapping[str, bytes]) -> None:
        """Put small objects in the place of old ones, one after the other. If one fails, those before it are put back.

        Parameters
        ----------
        keys : mapping of str to str
            From the key of each in the old folder to its key here.
        before : mapping of str to bytes
            The old contents.
        """
        replaced: list[str] = []
        try:
            for old_key, key in steps_of(keys.items()):
                replaced.append(old_key)  # first, also if the rename is interrupted
                rename(os.path.join(self.path, key), os.path.join(self.old, old_key))
        except BaseException as error:
            try:
                for old_key in reversed(replaced):
                    self._write_small(f"{GROWTH_MARK}-back", before[old_key])
                    rename(os.path.join(self.path, f"{GROWTH_MARK}-back"), os.path.join(self.old, old_key))
            except OSError as second_error:
                errors = error, second_error
                texts = [getattr(cause, "strerror", None) or str(cause) or type(cause).__name__ for cause in errors]
                raise SourceError(
                    f"the append to '{self._name}' failed as its arrays got their new length ({texts[0]}), and could not be "
                    f"undone ({texts[1]}). No value is lost, but some arrays may have the old length and some the new one: "
                    "look at their shapes, and append what is missing to those that are shorter",
                    path=self._name,
                ) from error
            raise

    def folders_of(self, keys: Iterable[str]) -> list[str]:
        """Those in the old folder that have objects with these keys: their names are on disk when each is synced."""
        return sorted({os.path.dirname(os.path.join(self.old, key)) for key in keys})

    def discard(self, *, keeps: bool = False) -> None:
        """See `WritableFolder`."""
        super().discard(keeps=keeps)
        if self._append_lock is not None:
            self._append_lock.release()


class NewRemoteFolder(RemoteFolder):
    """A new folder of objects in a store (`WritableFolder`).

    Parameters
    ----------
    url : str
        Where it will be.
    mode : str
        ``"w-"`` or ``"w"``: neither replaces anything here.
    options : mapping
        How the store is reached.

    Raises
    ------
    ConfigError
        For a plain HTTP server.
    """

    def __init__(self, url: str, mode: str, options: Mapping[str, Any]) -> None:
        if url.lower().startswith("http"):
            raise ConfigError(
                f"'{without_secrets(url)}' is on an HTTP server, to which nothing is saved. Save to a folder, and upload it"
            )
        super().__init__(Client(url, options))
        self._mode, self._mark, self._last_object = mode, b"", ("", b"")
        self._unsynced = list[str]()  # keys

    # --- on one rank

    def create(self) -> str:
        """See `WritableFolder`."""
        token = secrets.token_hex(8).encode()
        remove = f"aws s3 rm --recursive {shlex.quote(self.name)}, gcloud storage rm -r"
        fix = f"Remove what is there ({remove}), or choose another name"
        try:
            self._put_new(FOLDER_MARK, token)
        except FileExistsError:
            raise ConfigError(
                f"'{self.name}' is being saved by another job, or one that was killed: there is '{FOLDER_MARK}'. Wait for "
                f"it. {fix}"
            ) from None
        self._mark = token  # not before: `discard` removes all that is there
        with Undo(self._remove_mark):
            if (key := next(iter(self.keys("")), None)) is not None:
                reason = ", and mode='w' replaces nothing in a store, whose objects cannot change their names"
                raise ConfigError(f"'{self.name}' exists: there is '{key}'{reason if self._mode == 'w' else ''}. {fix}")
        return self.name

    def finish(self, key: str, data: bytes) -> None:
        """See `WritableFolder`."""
        self._last_object = key, data

    def publish(self) -> None:
        """See `WritableFolder`."""
        try:
            self._put_new(*self._last_object)
        except FileExistsError:
            self._remove_mark()  # `discard` would remove what the other job has put
            raise ConfigError(
                f"'{self.name}' was saved by another program meanwhile, and has chunks of both. Save to another name, and that "
                "program, too"
            ) from None
        self._remove_mark()

    def _put_new(self, key: str, data: bytes) -> None:
        """Put an object. FileExistsError if it exists, unless it is the same: a request put it whose answer was lost."""
        try:
            self._client.put(key, data, "create")
        except RemoteChangedError:
            stored = self.open(key)
        else:
            return
        if stored is None or stored.nbytes != len(data) or stored.read_at_most(0, len(data)) != data:
            raise FileExistsError(errno.EEXIST, f"'{self._client.name(key)}' exists")

    def _remove_mark(self) -> None:
        self._mark = b""
        with contextlib.suppress(OSError):
            self._client.delete([FOLDER_MARK])

    def discard(self, *, keeps: bool = False) -> None:
        """See `WritableFolder`. Other ranks, which have stopped too, may still put the last object."""
        for pause in _REMOTE_PAUSES if self._mark else ():
            time.sleep(pause)
            with contextlib.suppress(OSError):
                if not (keys := list(self.keys(""))):
                    break
                for are_metadata in (True, False):  # metadata first: a part of a store must not look like a whole one
                    self._client.delete([key for key in keys if (key.rpartition("/")[2] in METADATA) == are_metadata])
        if self._mark:
            self._remove_mark()

    # --- on all ranks

    def join(self, address: str) -> None:
        """See `WritableFolder`. All ranks have the URL."""

    def read_back(self, address: str) -> RemoteFolder:
        """See `WritableFolder`."""
        return RemoteFolder(self._client)

    def keys(self, below: str) -> Iterator[str]:
        """See `WritableFolder`."""
        keys = self._client.keys(below)
        return (key for key in keys if key not in ("", FOLDER_MARK))  # "": an empty object that stands for the folder

    def put(self, key: str, data: Any) -> None:
        """See `WritableFolder`. The mark says that nobody else puts it: so it is no error if a request is repeated."""
        self._unsynced.append(key)  # before: the answer may be lost
        self._client.put(key, data, "overwrite")

    def write_at(self, key: str, data: Any, offset: int) -> None:
        """See `WritableFolder`."""
        raise NotImplementedError(errno.ENOSYS, "an object is put as a whole")

    def sync(self) -> None:
        """See `WritableFolder`. What was put is there when `put` returns."""
        self._unsynced = []

    def close(self) -> None:
        """See `WritableFolder`. What was put and not synced is removed: it may have come after another rank's `discard`."""
        keys, self._unsynced = self._unsynced, []
        if keys:
            self._client.delete(keys)
