"""How are some bytes in the middle of a file changed, so that a kill costs nothing? They are written to a file beside it first.

1. `GrowingFile.finish`: the new bytes go into a file of changes. It is on disk before anything else happens.
2. `make_changes`: the file's first bytes become a mark that names the file of changes; then all new bytes are written, those of
   the file's beginning last, and the file of changes is removed. Between these the system is asked to put all on disk.
3. A kill before the mark leaves the old file, a kill after the new first bytes the new one. A kill between them leaves a file
   that no library opens, and `complete_append` makes the changes again: any number of times, because they do not depend on what
   is there. Whoever loads the file calls it.

The file of changes is locked while they are made, so that two processes never make them at once.

Who appends to a file or store? One at a time: ``NAME.appending``, a small file beside it, is made with O_EXCL, so that of two
appends at once one finds it (`AppendLock`). A killed append leaves it behind; then the next one says so, and what to type when
nothing is at work there any more. Nothing of others is deleted. Programs that know nothing of that file are kept away from an
HDF5 file as HDF5 itself does it: see `GrowingFile`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shlex
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial

from shardload.errors import ConfigError, SourceError
from shardload.storage.local import LocalFile, head_of, open_file
from shardload.storage.target import (
    GROWTH_MARK,
    MARK_NBYTES,
    Change,
    Target,
    WritableFile,
    as_write_error,
    mark,
    rename,
    sync_folder,
)
from shardload.system.undo import Undo

_log = logging.getLogger("shardload")

HEAD_NBYTES = 512  # of the first change; one write, which a kill does not cut in two
_BEGINS = b"shardload append\n"
_NAME = re.compile(rb"is in '([^/]+\.[0-9a-f]{16}\.changes)' beside it\.")
_BEFORE_NBYTES = MARK_NBYTES + len(GROWTH_MARK)


def read_changes(path: str) -> list[Change]:
    """The changes that were written into a file. SourceError if they are damaged."""
    with open(path, "rb") as file:
        file.seek(_BEFORE_NBYTES)
        line, data = file.readline(), file.read()
    try:
        header = json.loads(line)
        places = [(int(offset), int(nbytes)) for offset, nbytes in header["places"]]
        is_whole = zlib.crc32(data) == header["crc32"] and sum(nbytes for _, nbytes in places) == len(data)
        is_whole = is_whole and all(offset >= 0 and nbytes > 0 for offset, nbytes in places)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        is_whole, places = False, []
    if not (is_whole and places):
        raise SourceError(f"'{path}' is damaged, so that the append that it belongs to cannot be completed", path=path)
    changes, begin = [], 0
    for offset, nbytes in places:
        changes.append((offset, data[begin : begin + nbytes]))
        begin += nbytes
    return changes


def make_changes(file: WritableFile, path: str) -> None:
    """Make the changes of the file of changes at `path` in an open file, and remove `path`. SourceError if the file is shorter
    than it was: what was appended is lost.
    """
    (_, head), *changes = read_changes(path)
    end = max((offset + len(new_bytes) for offset, new_bytes in changes), default=0)
    if end > file.nbytes:
        raise SourceError(
            f"the file of '{path}' has {file.nbytes} bytes, and its changes end at byte {end}: it was cut", path=path
        )
    file.write_at(_mark(path, len(head)), 0)
    file.sync()
    for offset, new_bytes in changes:
        file.write_at(new_bytes, offset)
    file.sync()
    file.write_at(head, 0)
    file.sync()
    with contextlib.suppress(OSError):  # nothing is to be done any more; `shardload info` names what stays
        os.unlink(path)


def _mark(path: str, nbytes: int) -> bytes:
    """The first bytes of a file whose changes are being made. For people, too."""
    text = b"An append to this file was not completed. What is to be done is in '" + os.fsencode(os.path.basename(path))
    return (_BEGINS + text + b"' beside it. Type: shardload info FILE\n")[:nbytes].ljust(nbytes)


def changes_of(path: str) -> str | None:
    """The path of the file of changes that the mark of a file names; None for a file without a mark. `path` has no links."""
    head = head_of(path, HEAD_NBYTES)
    match = _NAME.search(head) if head.startswith(_BEGINS) else None
    return None if match is None else os.path.join(os.path.dirname(path), os.fsdecode(match[1]))


def complete_append(path: str) -> bool:
    """Complete an append to a file that was killed as it changed the file's bytes. False if there is none.

    Collective: no. One rank does it for all; any number of processes may try.

    Raises
    ------
    SourceError
        If the changes are not there, or this process may not make them.
    """
    path = os.path.realpath(path)
    changes = changes_of(path)
    if changes is None:
        return False
    hint = f"Who may write to both types: shardload info {shlex.quote(path)}"
    try:
        with _opened(path) as file, _opened(changes) as lock:
            if not wait_for(lambda: take_lock(lock.descriptor, fcntl.LOCK_EX)):
                raise SourceError(
                    f"'{path}' is being changed by an append, or by a process that completes one. Wait for it", path=path
                )
            if changes_of(path) == changes:
                make_changes(file, changes)
                _log.info("'%s': completed an append that was killed at its very end", path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and changes_of(path) is None:
            return True
        raise SourceError(
            f"'{path}' cannot be read: an append to it was killed at its very end, and what is to be done is in '{changes}', "
            f"which cannot be done here ({error}). {hint}",
            path=path,
        ) from error
    return True


def _opened(path: str) -> contextlib.closing[WritableFile]:
    """A file, open for writing. NotAFileError for a pipe or a device."""
    os.close(open_file(path))
    return contextlib.closing(WritableFile(path))


class GrowingFile(WritableFile):
    """A file that grows: others put bytes behind its end, and `publish` changes some before it, so that a kill costs nothing.

    While it is open nobody else writes to it: `AppendLock` keeps other appends away, the lock that HDF5 itself takes others:
    shared to read, alone to write. File systems without such locks have none here either, nor if HDF5 is told to take none.

    Parameters
    ----------
    path : str
        Its path, without links.
    name : str
        The path as the caller gave it, for messages.
    state : sequence of int
        Its size and time of last change when the append was planned (`state_of_file`).

    Attributes
    ----------
    temporary : str
        A small file beside it: what will be changed.
    is_as_before : callable
        Whether the bytes that `publish` will change are what they were when the append was planned.

    Raises
    ------
    ConfigError
        If somebody else has the file open, appends to it, or has changed it.
    """

    def __init__(self, path: str, name: str, state: Sequence[int]) -> None:
        self.is_as_before: Callable[[], bool] = lambda: False
        self._name, self._old_nbytes, self._is_begun = name, state[0], False
        self._append_lock = AppendLock(path)
        self._target = Target(path, "w", token=self._append_lock.token)
        with Undo(self.discard):
            with as_write_error(name):
                super().__init__(path)
            if not self._take_hdf5_lock(fcntl.LOCK_EX):
                raise ConfigError(
                    f"'{path}' is open in another program, or in this one (a file of h5py, netCDF4 or xarray that was not "
                    "closed): it holds HDF5's lock. Close it there, and append again"
                )
            self._let_others_read()  # others may read meanwhile, and ranks of this job do
            if state_of_file(self) != list(state):  # now that nobody changes it
                raise changed_meanwhile(name)
            self.temporary = self._target.create()
            with as_write_error(name):
                self._write_changes([])

    def _take_hdf5_lock(self, kind: int) -> bool:
        """Take HDF5's lock of this kind (`fcntl.LOCK_EX`, `LOCK_SH`). False if another program has it."""
        are_locks_used = os.environ.get("HDF5_USE_FILE_LOCKING", "").upper() not in ("FALSE", "0")
        return not are_locks_used or take_lock(self.descriptor, kind)

    def _let_others_read(self) -> None:
        """Take the shared lock in place of the other. Between the two the file has no lock: compare its state after this."""
        if not self._take_hdf5_lock(fcntl.LOCK_SH):
            raise ConfigError(
                f"'{self._path}' was opened for writing by another program during this append. Nothing was appended; run it "
                "again"
            )

    def _take_back_lock(self) -> bool:
        """Take the lock that keeps readers away, too. False if a program reads the file."""
        if not self._take_hdf5_lock(fcntl.LOCK_EX):
            self._let_others_read()
            return False
        return True

    def _write_changes(self, changes: Sequence[Change]) -> None:
        """Write changes into the file of changes, behind its first 64 bytes, and wait until they are on disk."""
        begins = mark(self._target.token, self._name) + GROWTH_MARK.encode()
        data = b"".join(new_bytes for _, new_bytes in changes)
        header = {"places": [(offset, len(new_bytes)) for offset, new_bytes in changes], "crc32": zlib.crc32(data)}
        with contextlib.closing(WritableFile(self.temporary)) as file:
            file.write_at(begins + json.dumps(header).encode() + b"\n" + data, 0)
            file.sync()

    def finish(self, nbytes: int, changes: Sequence[Change]) -> None:
        """Note what is to be changed, when all else is there, and the file's new length."""
        self._new_nbytes = nbytes
        self.resize(nbytes)
        self.sync()
        self._write_changes(changes)
        sync_folder(self._target.folder)

    def publish(self) -> None:
        """Make the changes. ConfigError if somebody has changed the file meanwhile, or put another one in its place."""
        with as_write_error(self._name):
            if not wait_for(self._take_back_lock):
                raise ConfigError(
                    f"'{self._path}' was opened by another program during this append, and is still open there: it would read "
                    "old and new metadata. Nothing was appended: close it there, and append again"
                )
            status = os.fstat(self.descriptor)
            is_same_file = os.path.samestat(status, os.stat(self._path))
            if not is_same_file or status.st_size < self._new_nbytes or not self.is_as_before():
                raise changed_meanwhile(self._name)
            changes = f"{self.temporary.removesuffix('.unfinished')}.changes"
            rename(self.temporary, changes)
            self._target.temporary = changes
            sync_folder(self._target.folder)
            lock = WritableFile(changes)
        with contextlib.closing(lock), as_write_error(self._name):
            take_lock(lock.descriptor, fcntl.LOCK_EX)
            self._is_begun, self._target.temporary = True, None
            try:
                make_changes(self, changes)
            except OSError as error:
                if self.is_as_before():  # not even the mark: nobody would make the changes later
                    self._is_begun, self._target.temporary = False, changes
                    raise
                raise SourceError(
                    f"the append to '{self._name}' failed as its last bytes were written ({error.strerror or error}). All "
                    f"values are on disk. What is to be done is in '{changes}': the next load or append does it, or: "
                    f"shardload info {shlex.quote(self._name)}",
                    path=self._name,
                ) from error

    def discard(self) -> None:
        """End the append, also after `publish`. Without that the file gets its old length, unless somebody else has changed it:
        what is behind the old end may be theirs. May be called again. Never raises OSError.
        """
        with contextlib.suppress(OSError):
            if not self._is_begun and self.nbytes > self._old_nbytes and self.is_as_before():
                self.resize(self._old_nbytes)
        with contextlib.suppress(OSError):
            self.close()  # gives the file's lock back
        self._target.abandon()
        self._append_lock.release()


def state_of_file(file: LocalFile) -> list[int]:
    """Size and time of last change of an open file."""
    return list((file.version or ())[:2])


# --- one append at a time

_LOCK_SUFFIX = ".appending"
_LOCK_BEGINS = b"shardload append "


def locked_path(path: str) -> str | None:
    """The path for which the file `path` is an `AppendLock`; None if it is none, by its name and its first bytes."""
    if not path.endswith(_LOCK_SUFFIX) or not os.path.isfile(path):
        return None
    head = head_of(path)
    return path[: -len(_LOCK_SUFFIX)] if head.startswith(_LOCK_BEGINS) or not head else None


class AppendLock:
    """The right to append to `path`, a path without links.

    Attributes
    ----------
    path : str
        The lock: a small file beside the one that grows.
    token : str
        A random number of this append. The name of its temporary has it, too.

    Raises
    ------
    ConfigError
        If another append has it, or it cannot be made.
    """

    def __init__(self, path: str) -> None:
        self.path, self.token = path + _LOCK_SUFFIX, secrets.token_hex(8)
        owner = f"{self.token} {os.path.basename(path)} {socket.gethostname()} {os.getpid()}\n"
        self._text = _LOCK_BEGINS + os.fsencode(owner)
        try:
            file = WritableFile(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            words = head_of(self.path).decode(errors="replace").split()
            process = f" (process {words[-1]} of {words[-2]})" if len(words) >= 6 else ""
            raise ConfigError(
                f"'{path}' is being appended to, or such an append was killed: there is '{self.path}'{process}. "
                f"Wait for it; if none runs there any more, type: rm {shlex.quote(self.path)} "
                "(`shardload info` names what else it left)"
            ) from None
        except PermissionError:
            raise ConfigError(f"'{path}' cannot grow: no right to write in its folder '{os.path.dirname(path)}'") from None
        with Undo(partial(os.unlink, self.path)), as_write_error(path), contextlib.closing(file):
            file.write_at(self._text, 0)

    def release(self) -> None:
        """Remove the lock. May be called again. If somebody has removed it meanwhile, the lock of another append stays."""
        if head_of(self.path) == self._text:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def changed_meanwhile(path: str) -> ConfigError:
    """The error about a file or store that has changed since the append was planned."""
    return ConfigError(f"'{path}' was changed by somebody else during this append. Nothing was appended; run it again")


_WAIT_SECONDS, _PAUSE_SECONDS = 10.0, 0.05
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}  # of a file system


def take_lock(descriptor: int, kind: int) -> bool:
    """Take the system's lock of an open file, without waiting. False if another has it; True if the file system has none."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def wait_for(take: Callable[[], bool]) -> bool:
    """Try to take a lock until that succeeds. False if it takes longer than a program that does not keep it."""
    stop = time.monotonic() + _WAIT_SECONDS
    while not take():
        if time.monotonic() > stop:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True
