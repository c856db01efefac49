"""How are some bytes in the middle of a file changed, so that a kill can cost nothing? They are in a file beside it before.

1. `write_changes`: the new bytes go into a file of changes. It is on disk before anything else happens.
2. `make_changes`: the file's first bytes become a mark that names the file of changes; then all new bytes are written, those of
   the file's beginning last, and the file of changes is removed. Between these the system is asked to put all on disk.
3. A kill before the mark leaves the old file, a kill after the new first bytes the new one. A kill between them leaves a file
   that no library opens, and `complete_append` makes the changes again: any number of times, because they do not depend on what
   is there. Whoever loads the file calls it.

The file of changes is locked while they are made, so that two processes never make them at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence

from shardload.errors import SourceError
from shardload.storage.containment import NotAFileError, open_file
from shardload.storage.locks import take_lock, wait_for
from shardload.storage.target import GROWTH_MARK, MARK_NBYTES, put_at

_log = logging.getLogger("shardload")

Change = tuple[int, bytes]
"""An offset, and the bytes that will be there."""

HEAD_NBYTES = 512  # of the first change; one write, which a kill does not cut in two
_BEGINS = b"shardload append\n"
_NAME = re.compile(rb"is in '([^/]+\.[0-9a-f]{16}\.changes)' beside it\.")
_BEFORE_NBYTES = MARK_NBYTES + len(GROWTH_MARK)


def write_changes(path: str, begins: bytes, changes: Sequence[Change]) -> None:
    """Write changes into an existing file, behind its first 64 bytes, and wait until they are on disk."""
    data = b"".join(new for _, new in changes)
    about = {"places": [(offset, len(new)) for offset, new in changes], "crc32": zlib.crc32(data)}
    descriptor = os.open(path, os.O_WRONLY)
    try:
        put_at(descriptor, begins + GROWTH_MARK.encode() + json.dumps(about).encode() + b"\n" + data, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_changes(path: str) -> list[Change]:
    """The changes that were written into a file. SourceError if they are damaged."""
    with open(path, "rb") as file:
        file.seek(_BEFORE_NBYTES)
        line, data = file.readline(), file.read()
    try:
        about = json.loads(line)
        is_whole = zlib.crc32(data) == about["crc32"]
        places = [(int(offset), int(nbytes)) for offset, nbytes in about["places"]]
    except (ValueError, KeyError, TypeError):
        is_whole, places = False, []
    if not (is_whole and places):
        raise SourceError(f"'{path}' is damaged, so that the append that it belongs to cannot be completed", path=path)
    changes, at = [], 0
    for offset, nbytes in places:
        changes.append((offset, data[at : at + nbytes]))
        at += nbytes
    return changes


def make_changes(descriptor: int, path: str) -> None:
    """Make the changes that the file `path` has, in an open file. Then `path` is gone."""
    (_, head), *others = read_changes(path)
    put_at(descriptor, _mark(path, len(head)), 0)
    os.fsync(descriptor)
    for offset, new in others:
        put_at(descriptor, new, offset)
    os.fsync(descriptor)
    put_at(descriptor, head, 0)
    os.fsync(descriptor)
    os.unlink(path)


def _mark(path: str, nbytes: int) -> bytes:
    """The first bytes of a file whose changes are being made. For people, too."""
    told = b"An append to this file was not completed. What is to be done is in '" + os.fsencode(os.path.basename(path))
    return (_BEGINS + told + b"' beside it. Type: shardload info FILE\n")[:nbytes].ljust(nbytes)


def changes_of(path: str) -> str | None:
    """The file of changes that the first bytes of a file name; None if they are no mark. `path` has no links."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            head = file.read(HEAD_NBYTES)
    except (OSError, NotAFileError):
        return None
    named_there = _NAME.search(head) if head.startswith(_BEGINS) else None
    return None if named_there is None else os.path.join(os.path.dirname(path), os.fsdecode(named_there[1]))


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
            if not wait_for(lambda: take_lock(lock, fcntl.LOCK_EX)):
                raise SourceError(
                    f"'{path}' is being changed by an append, or by a process that completes one. Wait for it", path=path
                )
            if changes_of(path) == changes:
                make_changes(file, changes)
                _log.info("'%s': completed an append that was killed at its very end", path)
    except (OSError, NotAFileError) as error:
        if isinstance(error, FileNotFoundError) and changes_of(path) is None:
            return True
        raise SourceError(
            f"'{path}' cannot be read: an append to it was killed at its very end, and what is to be done is in '{changes}', "
            f"which cannot be done here ({error}). {hint}",
            path=path,
        ) from error
    return True


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """A file that may be written."""
    os.close(open_file(path))  # no pipe or device
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
