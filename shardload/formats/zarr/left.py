"""What of an unfinished Zarr store is there already, if the job that wrote it was killed? The chunks whose files have names.

A file gets its name when all of it is on disk (`PART` before), so no list of them is needed. The mark of the unfinished folder
says what is being written, of what source, and is locked as long as a job writes there: two jobs never go on with one store.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from shardload.errors import ConfigError
from shardload.storage.locks import take_lock
from shardload.storage.target import FOLDER_MARK, MARK_BEGINS, MARK_NBYTES, sync_folder, temporary_of

PART = ".part"  # behind the name of a file until all of it is on disk


@dataclass(eq=False)
class UnfinishedStore:
    """A store that a job has left unfinished.

    Attributes
    ----------
    temporary, token : str
        Its folder.
    mark : file
        Its mark. Locked until it is closed.
    """

    temporary: str
    token: str
    mark: IO[bytes]


def open_locked(path: str) -> IO[bytes]:
    """The mark of an unfinished store, locked. ConfigError if another job has locked it."""
    file = open(path, "r+b")  # noqa: SIM115
    if not take_lock(file.fileno(), fcntl.LOCK_EX):
        file.close()
        raise ConfigError(f"another job is writing '{os.path.dirname(path)}' now. Wait for it, or end it first")
    return file


def find_left(target: str, about: Mapping[str, str]) -> UnfinishedStore | None:
    """The unfinished store of this name that is `about` the same; None if no job has left any. Stores that are whole but for
    their name do not count.

    Raises
    ------
    ConfigError
        If there are some, but of something else (it says what differs), or another job is writing it.
    """
    final = os.path.realpath(target)
    folder, why = os.path.dirname(final), ""
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        path = os.path.join(folder, name)
        if temporary_of(path) != (final, "unfinished") or os.path.islink(path) or not os.path.isdir(path):
            continue
        try:
            file = open_locked(os.path.join(path, FOLDER_MARK))
        except FileNotFoundError:
            continue
        head, text = file.read(MARK_NBYTES), file.read()
        before = json.loads(text or b"{}")
        other = next((key for key in about if before.get(key) != about[key]), None)
        if other is None:
            return UnfinishedStore(path, head.removeprefix(MARK_BEGINS).split(b" ")[0].decode(), file)
        file.close()
        why = why or f"'{path}' is not of this copy: {other} was {before.get(other, 'nothing')}, and is {about[other]}"
    if why:
        raise ConfigError(f"{why}. Remove it, or begin again without resume=True")
    return None


def whole_files(root: str) -> set[str]:
    """The files of an unfinished store that are on disk, whole, relative to `root`; their names are too. What is not whole is
    removed.
    """
    names = set()
    for folder, _, files in os.walk(root):
        for name in files:
            path = os.path.join(folder, name)
            if name.endswith(PART):
                os.unlink(path)
            else:
                names.add(os.path.relpath(path, root))
        sync_folder(folder)
    return names
