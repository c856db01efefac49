"""What is left of a journal if the next one cannot be written?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardload.formats.sink import Ticket
from shardload.jobs.writing import journal
from shardload.jobs.writing.journal import N_COLUMNS, Journal, find_journal


def test_a_journal_that_cannot_go_on_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a resumed copy without room left a second journal beside the first, or took that away."""
    target, token = str(tmp_path / "out.zarr"), "0" * 16
    ticket, about = Ticket(f"{target}.{token}.unfinished", token), {"of": "in.h5"}
    os.mkdir(ticket.temporary)
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
