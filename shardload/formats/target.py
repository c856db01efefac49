"""How does a new file come into being without harm to an old one? Beside its name, under a name that says what it is.

1. `Target.create` makes a temporary beside the target: ``out.h5.3f9a12c07b5d4e86.unfinished``. No other process has its name.
2. Bytes are put into it at offsets (`put_at`), and what cannot be written is an error that names file, array and chunk.
3. `Target.commit` gives it the target's name: by a rename that replaces (``mode="w"``), or by one that refuses (``"w-"``),
   which decides between two saves at the same time.

Nothing of others is deleted: a temporary that was left behind stays until its owner removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from shardload.errors import ConfigError, SourceError

__all__ = [
    "FOLDER_MARK",
    "GROWTH_MARK",
    "MARK_BEGINS",
    "MARK_NBYTES",
    "MODES",
    "Target",
    "make_below",
    "mark",
    "named",
    "not_undone",
    "put_at",
    "reserve",
    "shortened",
    "sync_folder",
    "sync_name",
    "temporary_of",
]

MODES = ("w-", "w")
MARK_NBYTES = 64
MARK_BEGINS = b"shardload unfinished "  # a temporary file, until its own first bytes are written
GROWTH_MARK = "shardload-append"  # is in a temporary folder that has what will be appended to a store, or in that of a file
FOLDER_MARK = "shardload-unfinished"  # is in a temporary folder, until all of it is written
_NAME = re.compile(r"(?P<name>.+)\.(?P<token>[0-9a-f]{16})\.(?P<what>unfinished|replaced|changes)")
_MOST_NAME_NBYTES = 255
_MOST_BEHIND_NBYTES = len(".0123456789abcdef.unfinished")  # of the names that stand beside a file
_MOST_SUFFIX_NBYTES = 16
_NOREPLACE, _EXCHANGE = 1, 2  # of renameat2
_FIRST_RESERVED, _MOST_RESERVED = 16 << 20, 1 << 30  # bytes that one call reserves
_SLOW_SECONDS, _FAST_NBYTES = 5e-3, 16 << 30  # a call that is slower than this and so many bytes in a second
_AT_FDCWD = -100
_PAUSES = (0.0, 0.01, 0.05, 0.2, 0.5)  # seconds before each attempt to remove a folder
_MOUNTS = "/proc/self/mountinfo"
_IN_MEMORY = {"tmpfs", "ramfs"}
_NO_FSYNC = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_UNKNOWN = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK}

_WHY = {
    errno.ENOSPC: "no space is left on its file system. Free some, or save to another one",
    errno.EDQUOT: "your quota there is used up. Free some of it, or save elsewhere",
    errno.EIO: "the device or the file server failed",
    errno.EFBIG: "it would be larger than its file system or the limit of this process (ulimit -f) allows",
    errno.EROFS: "its file system can only be read",
    errno.ENAMETOOLONG: "its name is too long: most file systems take 255 bytes. Choose a shorter one",
}


def temporary_of(path: str) -> tuple[str, str] | None:
    """The path for which this temporary was made, `shortened`, and ``"unfinished"`` (a save that has not ended),
    ``"replaced"`` (what had the name before) or ``"changes"`` (the end of an append); None for any other name. Decides by the
    name alone.

    >>> temporary_of("d/out.h5.0123456789abcdef.unfinished"), temporary_of("out.h5")
    (('d/out.h5', 'unfinished'), None)
    """
    folder, name = os.path.split(path)
    found = _NAME.fullmatch(name)
    return None if found is None else (os.path.join(folder, found["name"]), found["what"])


def shortened(path: str) -> str:
    """The path that a temporary begins with: a name that is too long for what comes behind it is cut, and told from others by
    a digest.

    >>> shortened("d/out.h5"), shortened("d/" + "n" * 250 + ".zarr")[-20:]
    ('d/out.h5', 'nnnnnn~1a9a7d97.zarr')
    """
    folder, name = os.path.split(path)
    most = _MOST_NAME_NBYTES - _MOST_BEHIND_NBYTES
    if len(os.fsencode(name)) <= most:
        return path
    root, suffix = os.path.splitext(name)
    if len(os.fsencode(suffix)) > _MOST_SUFFIX_NBYTES:
        root, suffix = name, ""
    tail = f"~{blake2b(os.fsencode(name), digest_size=4).hexdigest()}{suffix}"
    while len(os.fsencode(root + tail)) > most:
        root = root[:-1]
    return os.path.join(folder, root + tail)


def mark(token: str, path: str) -> bytes:
    """What the temporary of a file begins with, until its own first bytes are written: 64 bytes of text."""
    return (MARK_BEGINS + os.fsencode(f"{token} {os.path.basename(path)}"))[: MARK_NBYTES - 1].ljust(MARK_NBYTES - 1) + b"\n"


def _unwritten(error: OSError, path: str, dataset: str | None = None, chunk: tuple[int, ...] | None = None) -> SourceError:
    """The error of a file that cannot be written, from the system's."""
    where = (
        f"chunk {chunk} of '{dataset}' in '{path}'"
        if chunk is not None
        else f"'{dataset}' in '{path}'"
        if dataset
        else f"'{path}'"
    )
    why = _WHY.get(error.errno or 0, error.strerror or str(error))
    found = SourceError(
        f"{where} cannot be written: {why} ({errno.errorcode.get(error.errno or 0, type(error).__name__)}). "
        "What had this name before is as it was",
        path=path,
        dataset=dataset,
        chunk=chunk,
    )
    found.errno = error.errno
    return found


def _unconfirmed(error: OSError, path: str) -> SourceError:
    """The error of a file that is whole and has its name, if the file system does not say that the name is on disk."""
    code = errno.errorcode.get(error.errno or 0, type(error).__name__)
    found = SourceError(
        f"'{path}' has its new content, whole, but its file system did not confirm that this is on disk: "
        f"{error.strerror or error} ({code}). If the machine stops now, what was there before may be back",
        path=path,
    )
    found.errno = error.errno
    return found


def not_undone(error: BaseException, path: str, found: OSError) -> SourceError:
    """The error of an append that failed (`error`) as it gave arrays their new length, and could not give back the old one."""
    return SourceError(
        f"the append to '{path}' failed as its arrays got their new length ({_said(error)}), and could not be undone "
        f"({_said(found)}). No value is lost, but some arrays may have the old length and some the new one: look at "
        "their shapes, and append what is missing to those that are shorter",
        path=path,
    )


def _said(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class named:
    """Turns errors of the system inside a ``with`` statement into those of `_unwritten`. A class: generators take longer."""

    __slots__ = ("_chunk", "_dataset", "_path")

    def __init__(
        self, path: str, dataset: str | None = None, chunk: Callable[[], tuple[int, ...] | None] | None = None
    ) -> None:
        self._path, self._dataset, self._chunk = path, dataset, chunk

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, SourceError):
            raise _unwritten(error, self._path, self._dataset, self._chunk() if self._chunk else None) from error


def put_at(descriptor: int, data: Any, offset: int) -> None:
    """Write all bytes of `data` at `offset`. The system may write fewer with one call: 2 GiB at the most."""
    rest = memoryview(data).cast("B")
    while len(rest):
        n = os.pwrite(descriptor, rest, offset)
        if n <= 0:
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        rest, offset = rest[n:], offset + n


def reserve(descriptor: int, start: int, stop: int) -> int:
    """Ask the file system for the space of bytes that will be written, all of it at once. Returns how many it has reserved.

    Several processes that write to one new file then find its blocks there, one after the other, in place of blocks that each
    of their writes asks for (ext4, 8 ranks: two thirds of the time). It is a wish: what a file system refuses is left to the
    writes, and their errors. Where it takes long, the rest is left too. A file system in memory is not asked: it would make
    each page here, on one rank, in place of the writes. Where there is not so much room, nothing is asked for: it would take
    all that other programs have left, and where a file system compresses, what is written into reserved space is not.
    """
    call, at, some = _fallocate(), start, _FIRST_RESERVED
    if stop - start > _room(descriptor) or _is_in_memory(descriptor):
        return 0
    while call is not None and at < stop:
        nbytes, began = min(some, stop - at), time.perf_counter()
        if call(descriptor, 0, at, nbytes) != 0:
            break
        at, some = at + nbytes, min(2 * some, _MOST_RESERVED)
        if time.perf_counter() - began > _SLOW_SECONDS + nbytes / _FAST_NBYTES:
            break
    return at - start


def _room(descriptor: int) -> int:
    """Bytes that are free on a file's file system, as far as it says."""
    try:
        found = os.fstatvfs(descriptor)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _is_in_memory(descriptor: int) -> bool:
    """Whether a file is on a file system without a disk, as far as the kernel's list of mounts says."""
    try:
        device = os.fstat(descriptor).st_dev
        with open(_MOUNTS, encoding="utf-8", errors="replace") as file:
            mounts = [line.partition(" - ") for line in file]
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return any(of.split()[2:3] == [wanted] and kind.partition(" ")[0] in _IN_MEMORY for of, _, kind in mounts)


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


def sync_name(folder: str, path: str) -> None:
    """The same for a folder in which `path` has got its new content: SourceError says that it has."""
    try:
        sync_folder(folder)
    except OSError as error:
        raise _unconfirmed(error, path) from error


class Target:
    """A name that will be given to a new file or folder.

    Parameters
    ----------
    path : str
        The name.
    mode : str
        ``"w-"``: it must not exist. ``"w"``: what has the name is replaced; if that is a link, what it leads to.
    is_folder : bool
        Whether a folder is made.
    known : sequence of str
        Names of which one must be in a folder that is to be replaced: others are not ours to replace.
    """

    def __init__(self, path: str, mode: str, *, is_folder: bool = False, known: Sequence[str] = ()) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}; expected 'w-' (the name must not exist) or 'w' (it is replaced)")
        path = os.fspath(path).rstrip("/") if len(os.fspath(path)) > 1 else os.fspath(path)
        self.path, self.mode, self._is_folder, self._known = path, mode, is_folder, tuple(known)
        self._final = os.path.realpath(path) if mode == "w" else path
        self.folder = os.path.dirname(self._final) or "."
        self.token = ""
        self.temporary: str | None = None

    def create(self) -> str:
        """Make the temporary; returns its path. ConfigError if the name is taken or cannot be made."""
        self._refuse()  # early, for the caller's sake: `commit` is what decides
        self.token = secrets.token_hex(8)
        temporary = f"{shortened(self._final)}.{self.token}.unfinished"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.lstat(self._final)  # a name that is too long would be noticed by `commit` only
            if self._is_folder:
                os.mkdir(temporary)
            else:
                self.temporary = temporary  # from here on `abandon` removes it, also if Ctrl-C comes before the next line
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileNotFoundError as error:
            if os.path.isdir(self.folder):  # /proc, for one, makes no files
                raise _unwritten(error, self.path) from error
            how = f"mkdir -p {shlex.quote(self.folder)}"
            raise ConfigError(f"the folder of '{self.path}' does not exist. Make it first: {how}") from None
        except PermissionError:
            raise ConfigError(f"'{self.path}' cannot be made: no right to write in its folder '{self.folder}'") from None
        except OSError as error:
            if isinstance(error, FileExistsError):  # what has this name is not ours
                self.temporary = None
            self.abandon()
            raise _unwritten(error, self.path) from error
        self.temporary = temporary
        return temporary

    def adopt(self, temporary: str, token: str) -> None:
        """Take a temporary that another job has made for this name in place of a new one. ConfigError as `create`."""
        self._refuse()
        if not os.path.lexists(temporary):
            raise ConfigError(f"'{temporary}' was there a moment ago: another job has ended. Begin again")
        self.temporary, self.token = temporary, token

    def _refuse(self) -> None:
        if self.mode == "w-":
            if os.path.lexists(self._final):
                raise self._taken()
            return
        if not os.path.lexists(self._final):
            return
        is_folder = os.path.isdir(self._final)
        if is_folder != self._is_folder:
            have, want = ("folder", "file") if is_folder else ("file", "folder")
            raise ConfigError(
                f"'{self.path}' is a {have}, and a {want} is to be saved there. Remove it, or choose another name"
            )
        if not is_folder and not os.path.isfile(self._final):
            # A device or a pipe, such as /dev/null: a rename would put a file in its place, for all programs.
            raise ConfigError(f"'{self.path}' is no ordinary file, so it is not replaced. Choose another name")
        if is_folder and not any(os.path.lexists(os.path.join(self._final, name)) for name in self._known):
            raise ConfigError(
                f"'{self.path}' is a folder that holds none of {', '.join(self._known)}, so it is not replaced. "
                "Remove it, or choose another name"
            )

    def _taken(self) -> ConfigError:
        return ConfigError(f"'{self.path}' exists, and mode is 'w-'. Pass mode='w' to replace it, or choose another name")

    def commit(self) -> None:
        """Give the temporary the target's name, for good. If that fails, the temporary stays."""
        if self.temporary is None:
            raise ValueError("there is no temporary to commit")
        old = None
        with named(self.path):
            if self._is_folder:
                old = self._commit_folder(self.temporary)
            elif self.mode == "w":
                os.replace(self.temporary, self._final)
            else:
                old = self._link(self.temporary)
        # From here on the file has its name. No error may say that it has not, nor take anything back.
        self.temporary = None
        try:
            sync_name(self.folder, self.path)
        finally:  # not before: if the machine stops, the name may still be that of the old store
            if old is not None:
                _remove(old)

    def _link(self, temporary: str) -> str | None:
        """Give a file its name. Returns the name that is left over."""
        try:
            os.link(temporary, self._final)
        except FileExistsError:
            # Over NFS the answer to a link that was made can be lost; the second request then finds the name taken.
            if not _is_same(temporary, self._final):
                raise self._taken() from None
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
            if not self._renamed(temporary, _NOREPLACE):
                raise ConfigError(
                    f"the file system of '{self.path}' has no hard links and no rename that refuses an existing name, so "
                    f"mode='w-' cannot be kept there. The whole file is in '{temporary}': rename it, or pass mode='w'"
                ) from None
            return None
        return temporary

    def _commit_folder(self, temporary: str) -> str | None:
        """Give a folder its name. Returns the folder that had it before, by the name that it has now."""
        if self.mode == "w-":
            if self._renamed(temporary, _NOREPLACE):
                return None
            # Without such a rename: an empty folder takes the name, or fails to; then a rename replaces that folder.
            try:
                os.mkdir(self._final)
            except FileExistsError:
                raise self._taken() from None
            try:
                os.rename(temporary, self._final)
            except OSError:
                with contextlib.suppress(OSError):
                    os.rmdir(self._final)
                raise
            return None
        if not os.path.lexists(self._final) and self._renamed(temporary, _NOREPLACE, refuse=False):
            return None
        self._refuse()
        old = f"{shortened(self._final)}.{self.token}.replaced"
        if self._renamed(temporary, _EXCHANGE):
            with contextlib.suppress(OSError):
                os.rename(temporary, old)
                return old
            return temporary
        # For a moment the name is free: the whole old store is at `old`, the whole new one at `temporary`.
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._final, old)
        try:
            os.rename(temporary, self._final)
        except OSError as error:
            try:
                os.rename(old, self._final)
            except FileNotFoundError:  # nothing had the name
                pass
            except OSError:
                raise SourceError(
                    f"'{self.path}' is gone: the new store could not get the name ({error}), nor the old one get it back. "
                    f"That is whole, at '{old}'. Type: mv '{old}' '{self._final}'",
                    path=self.path,
                ) from error
            raise
        return old

    def _renamed(self, temporary: str, flag: int, *, refuse: bool = True) -> bool:
        """Rename with a flag of renameat2. False if this system or file system does not have it (or the name is taken, unless
        `refuse`).
        """
        call = _renameat2()
        if call is None:
            return False
        if call(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(self._final), flag) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EEXIST, errno.ENOTEMPTY) and flag == _NOREPLACE:
            if refuse:
                raise self._taken()
            return False
        if code in _UNKNOWN or (code == errno.ENOENT and flag == _EXCHANGE):
            return False
        raise OSError(code, os.strerror(code))

    def abandon(self) -> None:
        """Remove the temporary, unless it was committed."""
        temporary, self.temporary = self.temporary, None
        if temporary is not None:
            _remove(temporary)


def make_below(root: str, folder: str) -> None:
    """Make a folder, and those between it and `root`. If that is gone it is not made again: who removed it wants it gone."""
    if len(folder) <= len(root):
        return
    try:
        os.mkdir(folder)
    except FileExistsError:
        return
    except FileNotFoundError:
        if len(os.path.dirname(folder)) <= len(root):
            raise
        make_below(root, os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):  # another thread, or rank
            os.mkdir(folder)


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


def _is_same(first: str, second: str) -> bool:
    try:
        return os.path.samestat(os.lstat(first), os.lstat(second))
    except OSError:
        return False


@functools.cache
def _c_function(name: str, *argtypes: Any) -> Any:
    """A function of the C library; None if it has none of that name."""
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    call.argtypes = argtypes
    return call


def _fallocate() -> Any:
    # Not posix_fallocate, which writes to each block if the system cannot do it.
    return _c_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _renameat2() -> Any:
    return _c_function("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
