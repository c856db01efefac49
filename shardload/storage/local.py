"""How are local files read, by ranges and by their keys in a folder, and to which other files may a file refer?

Files are read by position, so that threads share no file offset. A `Fence` is the folder that a file or store may refer to:

1. Paths are compared after symbolic links and ``..`` are resolved.
2. The file that the caller named is always inside, also if it is reached by links.
3. Nothing outside the fence is opened to find that out.
4. Only regular files are opened: a pipe would wait for its writer, and a device may act or never end.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from shardload.storage.objects import Bytes, Content, Ranges, read_content
from shardload.system.steps import step_done
from shardload.system.undo import Undo

_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a named pipe would wait for its writer
TARGET_HINT = "pass allow_external=True if you trust it"


class OutsideError(OSError):
    """A file refers to a path outside its folder."""


class NotAFileError(OSError):
    """The path is not a regular file but, for example, a pipe or a folder."""


@dataclass(frozen=True)
class Fence:
    """The folders that a file may refer to.

    Attributes
    ----------
    folders : tuple of str
        Resolved paths. Empty: everything is inside.
    """

    folders: tuple[str, ...] = ()

    @classmethod
    def around_file(cls, path: str, allow_external: bool = False) -> Fence:
        """The folder of `path`, and the folder of the file itself if `path` is a symbolic link."""
        if allow_external:
            return cls()
        return cls(tuple({os.path.realpath(os.path.dirname(path) or "."), os.path.dirname(os.path.realpath(path))}))

    @classmethod
    def around_store(cls, path: str, allow_external: bool = False) -> Fence:
        """The folder `path` itself."""
        return cls() if allow_external else cls((os.path.realpath(path),))

    def holds(self, path: str) -> bool:
        """True if `path`, resolved, is inside. It need not exist."""
        return self.holds_real(os.path.realpath(path))

    def holds_real(self, path: str) -> bool:
        """The same for a path without symbolic links."""
        is_inside = (path == folder or path.startswith(folder.rstrip("/") + "/") for folder in self.folders)
        return not self.folders or any(is_inside)

    def holds_open(self, descriptor: int, path: str) -> bool:
        """The same for an open file: by where it really is, even if its name has changed since."""
        return not self.folders or self.holds_real(real_path_of(descriptor, path))

    def open(self, path: str, named_by: str) -> int:
        """Open a file for reading to which another one, `named_by`, leads; returns its descriptor.

        Raises
        ------
        OutsideError
            If `path`, with symbolic links resolved, is outside.
        NotAFileError
            If it is not a regular file. A pipe, a device or a folder is not opened, and nothing waits for it.
        OSError
            If it does not exist or cannot be opened.
        """
        if self.holds(path):
            descriptor = open_file(path)
            if self.holds_open(descriptor, path):
                return descriptor
            os.close(descriptor)  # a link that was put there in between
        text = f"'{named_by}' leads to '{os.path.realpath(path)}', outside the folder of that file; {TARGET_HINT}"
        raise OutsideError(text)


def real_path_of(descriptor: int, path: str) -> str:
    """Where an open file really is, also if it was renamed; where `path` leads if the system does not say."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # no /proc here
        return os.path.realpath(path)


_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_of(mode: int) -> str:
    """The kind of a file by its mode from `os.stat`: ``"a file"``, ``"a pipe"``."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "of an unknown kind")


def why_not_a_file(path: str) -> str | None:
    """What `path` is if it is not a file, in words that follow "which is"; None for a file. Does not open it."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"not there ({error.strerror})"
    return None if stat.S_ISREG(mode) else f"{kind_of(mode)}, expected a file"


def open_file(path: str) -> int:
    """Open a regular file for reading and return its descriptor.

    Anything else is not opened. If the file is replaced by a pipe or device meanwhile, the open does not wait.

    Raises
    ------
    NotAFileError
        If it is not a regular file.
    OSError
        If it does not exist or cannot be opened.
    """
    _check_is_file(os.stat(path).st_mode, path)
    descriptor = os.open(path, _TO_READ)
    with Undo(lambda: os.close(descriptor)):
        _check_is_file(os.fstat(descriptor).st_mode, path)
    return descriptor


def _check_is_file(mode: int, path: str) -> None:
    if not stat.S_ISREG(mode):
        raise NotAFileError(f"'{path}' is {kind_of(mode)}, expected a file")


def head_of(path: str, nbytes: int = 4096) -> bytes:
    """The first bytes of a file; none if it is gone, or cannot be read."""
    with suppress(OSError), os.fdopen(open_file(path), "rb") as file:
        return file.read(nbytes)
    return b""


def state_of(file: int | str) -> tuple[int, ...] | None:
    """Size and time of last change of a file; None if the file does not exist.

    For a descriptor, inode and device follow. For a path they do not, because some network file systems give a new inode each
    time.
    """
    try:
        status = os.stat(file)
    except OSError:
        return None
    step_done()
    state = status.st_size, status.st_mtime_ns
    return (*state, status.st_ino, status.st_dev) if isinstance(file, int) else state


def read_at(descriptor: int, out: Bytes, offset: int) -> int:
    """Fill `out`, a C-contiguous array of bytes, from an open file at `offset`; returns the number of bytes read."""
    memory, n_read = out.data, 0
    while n_read < len(memory):  # one call reads at most 2 GiB, and less on some file systems
        n_more = os.preadv(descriptor, [memory[n_read:]], offset + n_read)
        if n_more == 0:
            break
        n_read += n_more
    return n_read


class LocalFile:
    """An open file (`StoredObject`). It is closed with its last reference, so that no thread loses it while it reads.

    Parameters
    ----------
    descriptor : int
        Open for reading; it belongs to this object from now on.
    path : str
        For messages.
    """

    most_gap_nbytes = 1 << 12
    _descriptor: int | None = None  # for `close`, which is called of an object whose file could not be opened, too

    def __init__(self, descriptor: int, path: str = "the file") -> None:
        self._descriptor = descriptor
        self._path = path

    @property
    def descriptor(self) -> int:
        """The descriptor of the open file. OSError after `close`."""
        if self._descriptor is None:
            raise OSError("the file was closed")  # its number may mean another file by now
        return self._descriptor

    @property
    def nbytes(self) -> int:
        """Size of the file now."""
        return os.fstat(self.descriptor).st_size

    @property
    def version(self) -> tuple[int, ...] | None:
        """`state_of` the open file."""
        return state_of(self.descriptor)

    def read_into(self, out: Bytes, offset: int) -> None:
        """Fill `out`, C-contiguous bytes. OSError if the file ends before, or cannot be read."""
        n_read = read_at(self.descriptor, out, offset)
        if n_read < len(out):
            expected = f"but values are stored up to byte {offset + len(out)}"
            raise OSError(errno.EIO, f"the file ends at byte {offset + n_read}, {expected}", self._path)

    def read_at_most(self, offset: int, nbytes: int) -> bytes:
        """The bytes at `offset`: fewer than `nbytes` where the file ends."""
        memory = np.empty(nbytes, dtype=np.uint8)
        return memory[: read_at(self.descriptor, memory, offset)].tobytes()

    def read_ranges(self, ranges: Ranges, memory: Bytes) -> list[memoryview]:
        """The pieces, read into `memory`. OSError as for `read_into`."""
        descriptor, whole = self.descriptor, memory.data
        for begin, length, offset in ranges.requests:
            if os.preadv(descriptor, [whole[begin : begin + length]], offset) < length:  # it may give less than was asked for
                self.read_into(memory[begin : begin + length], offset)
        return ranges.pieces(memory)

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = close


class LocalFolder:
    """The files in a folder, by their paths below it (`ObjectFolder`).

    Parameters
    ----------
    path : str
        The folder.
    fence : Fence
        Where the files may be. Links that lead out of it are not followed.
    """

    def __init__(self, path: str, fence: Fence) -> None:
        self.path, self.fence = path, fence

    def version(self, key: str) -> tuple[int, ...] | None:
        """See `ObjectFolder`."""
        return state_of(os.path.join(self.path, key))

    def open(self, key: str, ahead: int = 1) -> LocalFile | None:
        """See `ObjectFolder`."""
        path = os.path.join(self.path, key)
        try:
            file = LocalFile(open_file(path), path)  # closed with its last reference
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(path):  # the link's target is lost, so the value is not simply missing
                raise OSError(errno.ENOENT, f"a link to '{os.readlink(path)}', which is not there", path) from None
            return None
        if not self.fence.holds_open(file.descriptor, path):
            raise OutsideError(f"'{path}' is a link to '{os.path.realpath(path)}', outside the store; {TARGET_HINT}")
        return file

    def read_many(self, keys: Iterable[str], most_nbytes: int) -> list[Content | None]:
        """See `ObjectFolder`. The folder of neighbours is opened, and compared with the fence, once."""
        contents: list[Content | None] = []
        above, folder = None, -1
        try:
            for key in keys:
                if above != (above := key.rpartition("/")[0]):
                    _close(folder)
                    folder = self._open_folder(above)
                contents.append(self._read(key, folder, most_nbytes))
        finally:
            _close(folder)
        return contents

    def folders(self, key: str) -> list[str]:
        """See `ObjectFolder`. Links that lead out, or to a folder above, are left out."""
        path = os.path.join(self.path, key)
        with os.scandir(path) as entries:
            folders = [(entry.name, entry.is_symlink()) for entry in entries if _may_be_folder(entry)]
        above = set[str]()
        if any(is_link for _, is_link in folders):
            parts = key.split("/")
            above = {os.path.realpath(os.path.join(self.path, *parts[:k])) for k in range(len(parts) + 1)}

        def is_below(name: str) -> bool:
            real = os.path.realpath(os.path.join(path, name))
            return real not in above and self.fence.holds_real(real)

        return sorted(name for name, is_link in folders if not is_link or is_below(name))

    def _open_folder(self, key: str) -> int:
        """The descriptor of a folder; -1 if it cannot be opened, or is outside the fence."""
        path = os.path.join(self.path, key)
        with suppress(OSError):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if self.fence.holds_open(folder, path):
                return folder
            os.close(folder)
        return -1

    def _read(self, key: str, folder: int, most_nbytes: int) -> Content | None:
        """The content of a file in an open folder. `open` raises the error about what is no file, or too long."""
        try:
            descriptor = os.open(key.rpartition("/")[2], _TO_READ | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError:
            pass
        else:
            try:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode) and status.st_size <= most_nbytes:
                    content = os.pread(descriptor, status.st_size, 0)
                    if len(content) == status.st_size:
                        return content
            finally:
                os.close(descriptor)
        file = self.open(key)
        return None if file is None else read_content(file, key, most_nbytes)


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to where this user may not look: an array may not be overlooked
        return True


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
