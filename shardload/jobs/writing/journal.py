"""What of an unfinished file is there already, if the job that wrote it was killed? A journal beside it says so.

1. Rank 0 writes to ``NAME.TOKEN.unfinished.journal``: first what is being written, of what source; then for each round the
   number, place, stored length and CRC-32 of its chunks. A chunk is noted before it is written, and records have a CRC of
   their own, so that one that was cut off is not taken for whole.
2. A job that resumes reads it (`find_journal`): source, options and software must be the same.
3. All ranks compare the noted chunks with what is on disk (`whole_chunks`). Chunks of which rank 0 was asked for the place are
   trusted as far as all rounds before are whole: places depend on all that came before (`Resumed.of`).
4. The journal is written anew with what is trusted, and goes on. It is removed when the file has its name, or is abandoned.

The journal is locked as long as a job writes it, so that two jobs never resume the same file.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

import deflate
import numpy as np

from shardload.errors import ConfigError
from shardload.formats.base import read_at
from shardload.formats.leftovers import JOURNAL, NEW_JOURNAL
from shardload.formats.sink import Encoder, Placed, Sink, Ticket
from shardload.formats.target import shortened, sync_folder, temporary_of
from shardload.system.scratch import shared_scratch

__all__ = ["Journal", "Left", "Resumed", "find_journal", "placed_in", "trusted", "whole_chunks"]

ARRAY, NUMBER, NBYTES, MASK, CRC, IS_ASKED, OFFSET = range(7)
N_COLUMNS = 7
_MAGIC = b"shardload journal 1\n"
_SYNCED_ROUNDS = 16
_AT_ONCE_NBYTES = 1 << 20

Int64s = np.ndarray[Any, np.dtype[np.int64]]


class Journal:
    """Writes the journal of one file. Ranks other than 0 have one too, which does nothing.

    Parameters
    ----------
    about : mapping of str to str
        What is written, of which source, with which options: a job that resumes must have the same.
    is_writer : bool
        True on rank 0.
    """

    def __init__(self, about: Mapping[str, str], is_writer: bool) -> None:
        self._about, self._is_writer = dict(about), is_writer
        self._file: IO[bytes] | None = None
        self._path = ""
        self._n = 0

    def begin(self, ticket: Ticket, rounds: Sequence[Int64s] = (), left: Left | None = None) -> None:
        """Begin the journal of a temporary; `rounds` are trusted already, if the journal `left` by another job goes on."""
        if not self._is_writer:
            return
        self._path = ticket.temporary + JOURNAL
        new = self._path if left is None else ticket.temporary + NEW_JOURNAL
        file = open(new, "wb")  # noqa: SIM115
        try:
            _lock(file, self._path)
            head = json.dumps({"token": ticket.token, "about": self._about}).encode()
            file.write(_MAGIC + _framed(head))
            for rows in rounds:
                file.write(_framed(rows.astype("<i8").tobytes()))
            _sync(file)
            if left is not None:
                os.replace(new, self._path)
                left.close()
            sync_folder(os.path.dirname(os.path.abspath(self._path)))
        except BaseException:
            _remove(file, new)
            raise
        self._file = file

    def note(self, rows: Int64s) -> None:
        """Note the chunks of a round: a row of `N_COLUMNS` for each."""
        if self._file is None or not len(rows):
            return
        self._file.write(_framed(np.ascontiguousarray(rows, dtype="<i8").tobytes()))
        self._n += 1
        if self._n % _SYNCED_ROUNDS == 0:
            _sync(self._file)
        else:
            self._file.flush()  # a kill of this process loses nothing that the system has

    def close(self) -> None:
        """Leave the journal as it is, for a job that resumes."""
        file, self._file = self._file, None
        if file is not None:
            _close(file)

    def remove(self) -> None:
        """Remove it: the file has its name, or is abandoned."""
        file, self._file = self._file, None
        if file is not None:
            _remove(file, self._path)


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + int(deflate.crc32(data)).to_bytes(4, "little") + data


def _remove(file: IO[bytes], path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
    _close(file)


def _close(file: IO[bytes]) -> None:
    """Close it. What could not be written, and is tried again here, was an error before."""
    with suppress(OSError):
        file.close()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _lock(file: IO[bytes], path: str) -> None:
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy(path) from None
    except OSError:  # a file system without locks
        return


def _busy(path: str) -> ConfigError:
    return ConfigError(f"another job is writing '{path.removesuffix(JOURNAL)}' now. Wait for it, or end it first")


@dataclass(eq=False)
class Left:
    """The journal that a job has left. Locked until it is closed.

    Attributes
    ----------
    temporary, token : str
        The unfinished file.
    rounds : list of ndarray
        Of each round its rows.
    """

    temporary: str
    token: str
    rounds: list[Int64s]
    _file: IO[bytes] | None = field(default=None, repr=False)

    @property
    def rows(self) -> Int64s:
        """The rows of all rounds."""
        return np.concatenate([np.empty((0, N_COLUMNS), np.int64), *self.rounds])

    def close(self) -> None:
        """Give up the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def find_journal(target: str, about: Mapping[str, str]) -> Left | None:
    """The journal of an unfinished file of this name that goes on with `about`; None if no job has left any. On one rank.

    Raises
    ------
    ConfigError
        If there are some, but of something else (it says what differs), or another job is writing it.
    """
    final = os.path.realpath(target)
    folder = os.path.dirname(final)
    why = ""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    for name in names:
        path = os.path.join(folder, name)
        found = temporary_of(path)
        if found is None or found != (shortened(final), "unfinished") or not os.path.isfile(path + JOURNAL):
            continue
        file = open(path + JOURNAL, "r+b")  # noqa: SIM115
        try:
            _lock(file, path + JOURNAL)
            if not _is_named(file, path + JOURNAL):  # a job has written it anew since it was opened, and locks that one
                raise _busy(path)
            head, rounds = _read(file)
            differs = "is no journal" if head is None else _difference(head["about"], about)
            if head is not None and not differs:
                return Left(path, head["token"], rounds, file)
        except BaseException:
            file.close()
            raise
        file.close()
        why = why or f"'{path}' is not of this copy: {differs}"
    if why:
        raise ConfigError(f"{why}. Remove it, with its journal, or begin again without resume=True")
    return None


def _is_named(file: IO[bytes], path: str) -> bool:
    """True if an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs, in words; empty if nothing does."""
    for name in now:
        if before.get(name) != now[name]:
            return f"{name} was {before.get(name, 'nothing')}, and is {now[name]}"
    return ""


def _read(file: IO[bytes]) -> tuple[dict[str, Any] | None, list[Int64s]]:
    """The head, and the rounds up to the first record that is not whole."""
    if file.read(len(_MAGIC)) != _MAGIC:
        return None, []
    records = []
    while True:
        size, crc = file.read(8), file.read(4)
        if len(crc) < 4:
            break
        n = int.from_bytes(size, "little")
        data = file.read(min(n, 1 << 40))
        if len(data) < n or int(deflate.crc32(data)) != int.from_bytes(crc, "little"):
            break
        records.append(data)
    if not records:
        return None, []
    rounds = [np.frombuffer(data, dtype="<i8").astype(np.int64).reshape(-1, N_COLUMNS) for data in records[1:]]
    return json.loads(records[0]), rounds


def whole_chunks(sink: Sink, ticket: Ticket, rows: Int64s) -> list[bool]:
    """Of each noted chunk, whether its stored bytes are on disk. Not collective: each rank looks at some.

    The job that wrote them may not have waited for the disk, and nobody else will: each file is synced, and so are the folders
    down to it.
    """
    names, scratch = list(sink.arrays), shared_scratch()
    found, path, descriptor = [], "", -1
    folders: set[str] = set()
    try:
        for row in rows.tolist():
            encoder = sink.arrays[names[row[ARRAY]]]
            where = sink.file_of(ticket, encoder.name, row[NUMBER] if encoder.spec.chunks else 0)
            try:
                if where != path:
                    if descriptor >= 0:
                        os.close(descriptor)
                    path, descriptor = where, -1
                    descriptor = _opened(where, ticket.temporary, folders)
                found.append(descriptor >= 0 and _is_there(descriptor, row, scratch))
            except OSError:
                found.append(False)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return found


def _opened(path: str, root: str, synced: set[str]) -> int:
    """A file of a temporary, open to read, when it and all folders down to it are on disk: those in `synced` are already."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        folder = os.path.dirname(path)
        while len(folder) >= len(root) and folder not in synced:
            sync_folder(folder)
            synced.add(folder)
            folder = os.path.dirname(folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_there(descriptor: int, row: Sequence[int], scratch: Any) -> bool:
    crc, done = 0, 0
    while done < row[NBYTES]:
        room = scratch.bytes("journal", min(_AT_ONCE_NBYTES, row[NBYTES] - done), _AT_ONCE_NBYTES)
        n = read_at(descriptor, room, row[OFFSET] + done)
        crc, done = int(deflate.crc32(room[:n].data, crc)), done + n
        if n < len(room):
            return False
    return crc == row[CRC]


@dataclass(frozen=True, eq=False)
class Resumed:
    """What of an unfinished file is trusted. Rank 0 has all of it, other ranks what they read back.

    Attributes
    ----------
    temporary, token : str
        The unfinished file.
    rounds : list of ndarray
        Rank 0: the rows that are trusted.
    mine : ndarray
        The rows that this rank reads back at the end.
    left : Left or None
        Rank 0: the journal.
    """

    temporary: str
    token: str
    rounds: list[Int64s]
    mine: Int64s
    left: Left | None = None

    def placed(self, encoders: Sequence[Encoder]) -> list[Placed]:
        """The calls of `Catalog.allocate` to be made again."""
        return [one for rows in self.rounds for one in placed_in(rows[rows[:, IS_ASKED] == 1], encoders)]


def placed_in(rows: Int64s, encoders: Sequence[Encoder]) -> list[Placed]:
    """The calls for the chunks of one round: one for each array, as `writing` makes them."""
    found = []
    for array in np.unique(rows[:, ARRAY]).tolist():
        some = rows[rows[:, ARRAY] == array]
        found.append(Placed(encoders[array].name, some[:, NUMBER], some[:, NBYTES], some[:, MASK], some[:, OFFSET]))
    return found


def trusted(rounds: Sequence[Int64s], is_whole: np.ndarray[Any, np.dtype[np.bool_]]) -> list[Int64s]:
    """The rows to be trusted: whole chunks; those that were placed by rank 0, as long as all before them are whole.

    >>> asked, free = [0, 1, 9, 0, 0, 1, 0], [1, 1, 9, 0, 0, 0, 0]
    >>> rounds = [np.array([asked, free]), np.array([asked, free])]
    >>> [rows[:, 5].tolist() for rows in trusted(rounds, np.array([False, True, True, False]))]
    [[0], []]
    """
    kept, at, goes_on = [], 0, True
    for rows in rounds:
        whole = is_whole[at : at + len(rows)]
        at += len(rows)
        asked = rows[:, IS_ASKED] == 1
        goes_on = goes_on and bool(whole[asked].all())
        kept.append(rows[(whole & ~asked) | (asked & goes_on)])
    return kept
