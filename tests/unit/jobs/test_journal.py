"""What is left of a journal if the next one cannot be written?"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardload.errors import ConfigError
from shardload.formats.sink import Ticket
from shardload.jobs.writing import journal
from shardload.jobs.writing.journal import N_COLUMNS, Journal, find_journal


def begun(folder: Path) -> tuple[str, Ticket, dict[str, str]]:
    """The name of a copy, where it is written, and what its journal is about."""
    target, token = str(folder / "out.zarr"), "0" * 16
    ticket = Ticket(f"{target}.{token}.unfinished", token)
    os.mkdir(ticket.temporary)
    return target, ticket, {"of": "in.h5"}


def test_a_journal_that_cannot_go_on_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a resumed copy without room left a second journal beside the first, or took that away."""
    target, ticket, about = begun(tmp_path)
    first = Journal(about, True)
    first.begin(ticket)
    first.note(np.arange(N_COLUMNS, dtype=np.int64)[None])
    first.close()
    names = sorted(os.listdir(tmp_path))

    def fails(file: Any) -> None:
        raise OSError(122, os.strerror(122))

    left = find_journal(target, about)
    assert left is not None and len(left.rounds) == 1
    with monkeypatch.context() as patch, pytest.raises(OSError, match="quota"):
        patch.setattr(journal, "_sync", fails)
        Journal(about, True).begin(ticket, left.rounds, left)
    left.close()
    assert sorted(os.listdir(tmp_path)) == names
    again = find_journal(target, about)
    assert again is not None and len(again.rounds) == 1
    again.close()


def test_two_jobs_that_resume_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the second took the journal that it had opened before the first wrote it anew: both would write one file."""
    target, ticket, about = begun(tmp_path)
    killed = Journal(about, True)
    killed.begin(ticket)
    killed.close()
    first, flock, n = Journal(about, True), fcntl.flock, 0

    def locked(descriptor: int, kind: int) -> None:
        nonlocal n
        n += 1
        if n == 1:  # the second job has opened the journal: now the first one takes it
            left = find_journal(target, about)
            assert left is not None
            first.begin(ticket, left.rounds, left)
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", locked)
    with pytest.raises(ConfigError, match="another job is writing"):
        find_journal(target, about)
    first.remove()


def test_rounds_behind_a_damaged_record_do_not_count(tmp_path: Path) -> None:
    """Wrong if a record with a flipped bit were taken, or one that was cut short: both would name chunks that nobody wrote."""
    target, ticket, about = begun(tmp_path)
    first = Journal(about, True)
    first.begin(ticket)
    rounds = [np.arange(N_COLUMNS, dtype=np.int64)[None] + k for k in range(3)]
    for rows in rounds:
        first.note(rows)
    first.close()
    path = Path(f"{ticket.temporary}.journal")
    whole, nbytes = path.read_bytes(), 12 + rounds[0].nbytes  # of a record: its size and checksum come first
    flipped = bytearray(whole)
    flipped[-nbytes - 1] ^= 1
    damaged = {3: whole, 2: whole[:-1], 1: bytes(flipped)}
    for n, data in damaged.items():
        path.write_bytes(data)
        left = find_journal(target, about)
        assert left is not None
        np.testing.assert_array_equal(left.rows, np.concatenate(rounds[:n]))
        left.close()
