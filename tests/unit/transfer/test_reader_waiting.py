"""What is a reader asked while a rank waits for it, and can it be left when it never gets on?"""

from __future__ import annotations

import threading

import pytest

from shardload.errors import StallError
from shardload.planning.region import Region
from tests.unit.fakes import TABLE, FakeSource, fetch, piece_of, reader_of, rows, tune, whole


@pytest.mark.parametrize("inline", [-1, 1 << 14], ids=["in threads", "at once"])
def test_what_is_being_read_can_be_asked_for(inline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, inline_nbytes=inline)
    seen: list[tuple[int, str]] = []
    source = FakeSource(TABLE, (2, 4), lambda region: seen.append(reader.activity()))  # type: ignore[arg-type, func-returns-value]
    with reader_of(source, {0: piece_of(rows(0, 8))}) as reader:
        assert reader.activity() == (0, "")
        fetch(reader, whole(rows(2, 4)))
        fetch(reader, whole(rows(2, 6)))
        assert reader.activity() == (2, "")
    assert seen == [(0, "reading chunk (1, 0) of '/rho' in 'f.h5'"), (1, "reading elements [2:6, 0:4] of '/rho' in 'f.h5'")]


def test_after_a_stall_a_read_that_never_ends_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if leaving the reader waited for the thread that is held up: then no rank could raise."""
    tune(monkeypatch, inline_nbytes=-1)
    begun, release = threading.Event(), threading.Event()

    def hold(_: Region) -> None:
        begun.set()
        assert release.wait(60)

    with pytest.raises(StallError), reader_of(FakeSource(TABLE, (2, 4), hold), {0: piece_of(rows(0, 8))}) as reader:
        reading = reader.start(whole(rows(2, 4)))
        assert begun.wait(20)
        raise StallError("nothing has moved")
    assert not reading.done()
    release.set()
    reading.result()
