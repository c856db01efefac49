"""How does a new file come into being without harm to an old one? Beside its name, under a name that says what it is.

1. `Target.create` makes a temporary beside the target: ``out.h5.3f9a12c07b5d4e86.unfinished``. No other process has its name.
2. Many ranks write to one file: each puts bytes at offsets (`WritableFile`), and what cannot be written is an error that names
   file, array and chunk. `NewFile` is the file on the rank that makes it.
3. `Target.commit` gives it the target's name: by a rename that replaces (``mode="w"``), or by a call that refuses a name that
   is taken (``"w-"``), which decides between two saves at the same time.

Nothing of others is deleted: a temporary that was left behind stays until its owner removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from shardload.errors import ConfigError, SourceError
from shardload.storage.local import LocalFile, kind_of
from shardload.storage.objects import RemoteError, UnsyncedError
from shardload.system.steps import step_done
from shardload.system.undo import Undo

_log = logging.getLogger("shardload")

MODES = ("w-", "w")
MARK_NBYTES = 64
MARK_BEGINS = b"shardload unfinished "  # a temporary file, until its own first bytes are written
GROWTH_MARK = "shardload-append"  # is in a temporary folder that has what will be appended to a store, or in that of a file
FOLDER_MARK = "shardload-unfinished"  # is in a temporary folder, until all of it is written
_NAME = re.compile(r"(?P<name>.+)\.(?P<token>[0-9a-f]{16})\.(?P<kind>unfinished|replaced|changes)", re.DOTALL)
_FIRST_RESERVED, _MOST_RESERVED = 16 << 20, 1 << 30  # bytes that one call reserves
_SLOW_SECONDS, _FAST_NBYTES = 5e-3, 16 << 30  # a call that is slower than this and so many bytes in a second
_PAUSES = (0.0, 0.01, 0.05, 0.2, 0.5)  # seconds before each attempt to remove a folder
_MOST_MEETINGS = 8  # with other saves that replace the same folder at the same time
_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST}
_NO_FSYNC = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_LINKS = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK}

_CAUSES = {
    errno.ENOSPC: "no space is left on its file system. Free some, or save to another one",
    errno.EDQUOT: "your quota there is used up. Free some of it, or save elsewhere",
    errno.EIO: "the device or the file server failed",
    errno.EFBIG: "it would be larger than its file system or the limit of this process (ulimit -f) allows",
    errno.EROFS: "its file system can only be read",
    errno.ENAMETOOLONG: "its name is too long: of the 255 bytes that most file systems take, a temporary name needs 28",
}


def temporary_of(path: str) -> tuple[str, str] | None:
    """The path for which a temporary was made, and its kind: ``"unfinished"`` (a save that has not ended), ``"replaced"`` (what
    had the name before) or ``"changes"`` (the end of an append). None for any other name. Decides by the name alone.

    >>> temporary_of("d/out.h5.0123456789abcdef.unfinished"), temporary_of("out.h5")
    (('d/out.h5', 'unfinished'), None)
    """
    folder, name = os.path.split(path)
    match = _NAME.fullmatch(name)
    return None if match is None else (os.path.join(folder, match["name"]), match["kind"])


def mark(token: str, path: str) -> bytes:
    """The first 64 bytes of the temporary of a file, until the file's own are written: text."""
    return (MARK_BEGINS + os.fsencode(f"{token} {os.path.basename(path)}"))[: MARK_NBYTES - 1].ljust(MARK_NBYTES - 1) + b"\n"


def check_mark(path: str, temporary: str, target: str) -> None:
    """Raise ConfigError unless a file begins with the `mark` of a temporary that another rank has made."""
    head, name = b"", _NAME.fullmatch(os.path.basename(temporary))
    with as_write_error(target), contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        head = file.read(MARK_NBYTES)
    if name is None or head != mark(name["token"], target):
        raise ConfigError(
            f"'{path}', which another rank made, is not to be seen here. Is another file system mounted there on some node? "
            "Save to one that all nodes share"
        )


def _unwritten(error: OSError, path: str, dataset: str | None = None, chunk: tuple[int, ...] | None = None) -> SourceError:
    """The SourceError about a file that cannot be written, from the error of the system."""
    key = dataset
    if isinstance(error, UnsyncedError):  # which is about another object than that of the call
        key, dataset, chunk = error.key, None, None
    place = f"'{key}' in '{path}'" if key else f"'{path}'"
    place = place if chunk is None else f"chunk {chunk} of {place}"
    cause = _CAUSES.get(error.errno or 0, error.strerror or str(error))
    if isinstance(error, RemoteError):  # whose number stands for many causes
        cause = str(error)
    text = f"{place} cannot be written: {cause} ({_code_of(error)}). What had this name before is as it was"
    unwritten = SourceError(text, path=path, dataset=dataset, chunk=chunk)
    unwritten.errno = error.errno
    return unwritten


def _code_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


@contextlib.contextmanager
def as_write_error(
    path: str, dataset: str | None = None, chunk: Callable[[], tuple[int, ...] | None] = lambda: None
) -> Iterator[None]:
    """Turn errors of the system into SourceErrors that say what cannot be written, and why (`_unwritten`)."""
    try:
        yield
    except SourceError:
        raise
    except OSError as error:
        raise _unwritten(error, path, dataset, chunk()) from error


def reserve(descriptor: int, start: int, stop: int) -> int:
    """Ask the file system for the space of bytes that will be written, all of it at once. Returns how many bytes it reserved.

    Then several processes that write to one new file find its blocks in place, one after the other; else each of their writes
    asks for blocks (ext4, 8 ranks: two thirds of the time). It is a wish: if a file system refuses it, the writes ask for
    space, and raise their errors. It ends early where it takes long (a file system in memory makes each page on this one rank).
    Nothing is asked for where less is free: that would leave no room for other programs, and on file systems that compress,
    what is written into reserved space is not compressed.
    """
    fallocate, offset, step = _fallocate(), start, _FIRST_RESERVED
    status = os.fstatvfs(descriptor)
    if stop - start > status.f_bavail * status.f_frsize:
        return 0
    while offset < stop:  # (posix_fallocate would write to each block where the system cannot do it)
        nbytes, began = min(step, stop - offset), time.perf_counter()
        if fallocate(descriptor, 0, offset, nbytes) != 0:
            break
        offset, step = offset + nbytes, min(2 * step, _MOST_RESERVED)
        if time.perf_counter() - began > _SLOW_SECONDS + nbytes / _FAST_NBYTES:
            break
    return offset - start


@functools.cache
def _fallocate() -> Any:
    """`fallocate` of the C library."""
    function = ctypes.CDLL(None).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def sync_folder(path: str) -> None:
    """Wait until the names in a folder are on disk. Some file systems (VirtualBox's, older CIFS) have no fsync of folders."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise
    finally:
        os.close(descriptor)
    step_done()


def sync_name(folder: str, path: str) -> None:
    """The same for a folder in which `path` has its new content already. SourceError if that fails."""
    try:
        sync_folder(folder)
    except OSError as error:
        raise SourceError(
            f"'{path}' has its new content, whole, but its file system did not confirm that this is on disk: "
            f"{error.strerror or error} ({_code_of(error)}). If the machine stops now, what was there before may be back",
            path=path,
        ) from error


class Target:
    """A name that will be given to a new file or folder.

    Parameters
    ----------
    path : str
        The name.
    mode : str
        ``"w-"``: it must not exist. ``"w"``: what has the name is replaced; if that is a link, what it leads to.
    marks : sequence of str
        If a folder is made: names of which one must be in a folder that is to be replaced. Other folders are not ours to
        replace.
    token : str, optional
        16 hexadecimal digits in the name of the temporary; by default new ones.
    """

    def __init__(self, path: str, mode: str, *, marks: Sequence[str] = (), token: str | None = None) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}; expected 'w-' (the name must not exist) or 'w' (it is replaced)")
        path = os.fspath(path).rstrip("/") if len(os.fspath(path)) > 1 else os.fspath(path)
        self.path, self.mode, self._is_folder, self._marks = path, mode, bool(marks), marks
        self._final = os.path.realpath(path) if mode == "w" else path
        self.folder = os.path.dirname(self._final) or "."
        self.token = token or secrets.token_hex(8)
        self.temporary: str | None = None

    def create(self) -> str:
        """Make the temporary; returns its path. ConfigError if the name is taken or cannot be made."""
        self._refuse()  # early, for the caller's sake: `commit` decides
        # From here on `abandon` removes it, also if Ctrl-C comes before the next line.
        self.temporary = temporary = f"{self._final}.{self.token}.unfinished"
        try:
            if self._is_folder:
                os.mkdir(temporary)
            else:
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except OSError as error:
            if isinstance(error, FileExistsError):  # what has this name is not ours
                self.temporary = None
            self.abandon()
            if isinstance(error, FileNotFoundError):
                command = f"mkdir -p {shlex.quote(self.folder)}"
                raise ConfigError(f"the folder of '{self.path}' does not exist. Make it first: {command}") from None
            if isinstance(error, PermissionError):
                raise ConfigError(f"'{self.path}' cannot be made: no right to write in its folder '{self.folder}'") from None
            raise _unwritten(error, self.path) from error
        return temporary

    def adopt(self, temporary: str) -> None:
        """Take a temporary that another job has made for this name in place of a new one. ConfigError as `create`."""
        self._refuse()
        self.temporary, self.token = temporary, temporary.rsplit(".", 2)[1]

    def _refuse(self) -> None:
        """Raise ConfigError if what has the name may not be replaced."""
        if not os.path.lexists(self._final):
            return
        if self.mode == "w-":
            raise self._name_is_taken()
        expected, is_ours = "file", os.path.isfile(self._final)  # a device, as /dev/null, would be gone for all programs
        if self._is_folder:
            expected = f"folder with {' or '.join(self._marks)}"
            is_ours = any(os.path.lexists(os.path.join(self._final, name)) for name in self._marks)
        if not is_ours:
            kind = kind_of(os.stat(self._final).st_mode)
            raise ConfigError(
                f"'{self.path}' is {kind}, and what is to be saved there replaces no more than a {expected}. Remove it, or "
                "choose another name"
            )

    def _name_is_taken(self) -> ConfigError:
        return ConfigError(f"'{self.path}' exists, and mode is 'w-'. Pass mode='w' to replace it, or choose another name")

    def commit(self) -> None:
        """Give the temporary the target's name, for good. If that fails, the temporary stays."""
        if self.temporary is None:
            raise ValueError("there is no temporary to commit")
        leftover = None
        with as_write_error(self.path):
            if self.mode == "w-":
                leftover = self._take_free_name(self.temporary)
            elif self._is_folder:
                leftover = self._replace_folder(self.temporary)
            else:
                rename(self.temporary, self._final)
        # From here on the file has its name. No error may deny that, or take anything back.
        self.temporary = None
        try:
            sync_name(self.folder, self.path)
        finally:  # not before: if the machine stops, the name may still be that of the old store
            if leftover is not None:
                _remove(leftover)
                if os.path.lexists(leftover):
                    text = "'%s' is saved, but what had this name before cannot be removed. Type, or who may: rm -r %s"
                    _log.warning(text, self.path, shlex.quote(leftover))

    def _take_free_name(self, temporary: str) -> str | None:
        """Give the temporary a name that is free. Returns its old name if it still has that, too.

        Where there are no hard links, an empty file or folder takes the name first, and a rename replaces it.
        """
        try:
            if self._is_folder:
                os.mkdir(self._final)
            elif self._link(temporary):
                return temporary
            else:
                os.close(os.open(self._final, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            raise self._name_is_taken() from None
        try:
            rename(temporary, self._final)
        except OSError:
            with contextlib.suppress(OSError):
                os.rmdir(self._final) if self._is_folder else os.unlink(self._final)
            raise
        return None

    def _link(self, temporary: str) -> bool:
        """Give the file the name, too, by a hard link. False where the file system has no such links."""
        try:
            os.link(temporary, self._final)
        except OSError as error:
            # Over NFS the answer to a link that was made can be lost; the second request then finds the name taken.
            if isinstance(error, FileExistsError) and os.stat(temporary).st_nlink > 1:
                return True
            if error.errno not in _NO_LINKS:
                raise
            return False
        return True

    def _replace_folder(self, temporary: str) -> str:
        """Give a folder its name. Returns the path of what had the name before.

        For a moment the name is free: then the whole old store has that name, and the whole new one that of the temporary.
        """
        old_path = f"{self._final}.{self.token}.replaced"
        for n_more in reversed(range(_MOST_MEETINGS)):
            self._refuse()
            try:
                with contextlib.suppress(FileNotFoundError):
                    rename(self._final, old_path)
                rename(temporary, self._final)
                break
            except OSError as error:
                if not n_more or error.errno not in _NOT_EMPTY:
                    self._give_back_name(old_path, error)
                    raise
            _remove(old_path)  # another save has taken the free name: its store is replaced, too
        return old_path

    def _give_back_name(self, old_path: str, error: OSError) -> None:
        """Give the old store its name back, which the new one could not get. SourceError if that fails, too."""
        try:
            os.rename(old_path, self._final)
        except FileNotFoundError:  # nothing had the name
            pass
        except OSError:
            raise SourceError(
                f"'{self.path}' is gone: the new store could not get the name ({error}), nor the old one get it back. "
                f"That is whole, at '{old_path}'. Type: mv '{old_path}' '{self._final}'",
                path=self.path,
            ) from error

    def abandon(self) -> None:
        """Remove the temporary, unless it was committed."""
        temporary, self.temporary = self.temporary, None
        if temporary is not None:
            _remove(temporary)


def rename(path: str, new_path: str) -> None:
    """Rename a file or folder; a file that has the new name is replaced. No error if it has the new name after all.

    Over NFS the answer to a rename that was made can be lost; the second request then does not find the old name.
    """
    state = os.lstat(path)
    try:
        os.rename(path, new_path)
    except OSError:
        if not (os.path.lexists(new_path) and os.path.samestat(os.lstat(new_path), state)):
            raise


def _remove(path: str) -> None:
    """Remove a file or a folder, or as much of it as can be removed."""
    with contextlib.suppress(OSError):  # `rmtree` itself raises some, whatever it is told
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return
        for pause in _PAUSES:  # other ranks, which have stopped too, may still put the last file into it
            time.sleep(pause)
            shutil.rmtree(path, ignore_errors=True)
            if not os.path.lexists(path):
                return


Change = tuple[int, bytes]
"""An offset, and the bytes that will be there."""


class WritableFile(LocalFile):
    """An open file that is read and written. By default it must exist. Symbolic links are not followed."""

    def __init__(self, path: str, flags: int = os.O_RDWR) -> None:
        super().__init__(os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), path)

    def write_at(self, data: Any, offset: int) -> None:
        """Write all bytes of `data` at `offset`. (The system may write fewer with one call: at most 2 GiB.)"""
        memory = memoryview(data).cast("B")
        while len(memory):
            n_written = os.pwrite(self.descriptor, memory, offset)
            if n_written <= 0:
                raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
            memory, offset = memory[n_written:], offset + n_written
        step_done()

    def resize(self, nbytes: int) -> None:
        """Make it shorter or longer."""
        os.ftruncate(self.descriptor, nbytes)

    def reserve(self, start: int, stop: int) -> int:
        """Ask the file system for the space of these bytes: see `reserve`."""
        return reserve(self.descriptor, start, stop)

    def sync(self) -> None:
        """Wait until it is on disk."""
        os.fsync(self.descriptor)
        step_done()


class NewFile(WritableFile):
    """A new file, open on the rank that makes it. `discard` removes it, unless it was published.

    Parameters
    ----------
    path : str
        The name that it will have.
    mode : str
        See `Target`.

    Attributes
    ----------
    temporary : str
        Its name until then. Other ranks open it, and compare its first bytes (`check_mark`).
    """

    def __init__(self, path: str, mode: str) -> None:
        self._target = Target(path, mode)
        self.temporary = self._target.create()
        with Undo(self.discard), as_write_error(path):
            super().__init__(self.temporary)
            self.write_at(mark(self._target.token, path), 0)

    def finish(self, nbytes: int, changes: Iterable[Change]) -> None:
        """Write what makes the file a file, when all else is there; and close it."""
        self.resize(nbytes)
        self.sync()
        for offset, data in changes:
            self.write_at(data, offset)
        self.sync()
        sync_folder(self._target.folder)
        self.close()

    def publish(self) -> None:
        """Give the finished file its name. ConfigError if the name is taken."""
        self._target.commit()

    def discard(self) -> None:
        """Remove it, unless it was published. May be called again. Never raises OSError."""
        with contextlib.suppress(OSError):
            self.close()
        self._target.abandon()
