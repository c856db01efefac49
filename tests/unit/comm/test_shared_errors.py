"""Is an error that all ranks raise printed once, up to the user's line, and one that only a single rank knows in full?"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardload.comm import shared_errors
from shardload.comm.shared_errors import share, show
from shardload.errors import ConfigError, PeerError, ShardloadError, SourceError


@pytest.fixture(autouse=True)
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delattr(sys, "ps1", raising=False)
    monkeypatch.delenv("SHARDLOAD_TRACEBACKS", raising=False)
    yield


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The same with a traceback, which begins here."""
    try:
        if cause is None:
            raise error
        raise error from cause
    except BaseException as found:
        return found


def agreed(rank: int, error: ShardloadError | None = None, cause: BaseException | None = None) -> BaseException:
    found = raised(error or ConfigError("what is wrong"), cause)
    assert isinstance(found, ShardloadError)
    share(found, rank, 16)
    return found


def printed(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    show(type(error), error, error.__traceback__)
    return capsys.readouterr().err


def test_rank_0_shows_all_and_the_others_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    whole = printed(agreed(0), capsys)
    assert whole.startswith("Traceback") and __file__ in whole and whole.endswith("ConfigError: what is wrong\n")
    line = printed(agreed(3), capsys)
    assert line.startswith("rank 3: ConfigError: what is wrong (") and line.count("\n") == 1
    assert printed(agreed(8), capsys) == "", "a thousand ranks would bury what rank 0 shows"


@pytest.mark.parametrize("rank", [0, 3, 8])
def test_all_of_them_where_that_is_asked_for(
    rank: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLOAD_TRACEBACKS", "all")
    assert __file__ in printed(agreed(rank), capsys)


def test_what_one_rank_alone_knows_is_shown_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong if the calls that led to the first failure, or what another rank met, were seen nowhere."""
    text = "on rank 2 of 16: PermissionError: the disk went away"
    first = agreed(2, PeerError(text, rank=2), raised(PermissionError("the disk went away")))
    assert "PermissionError: the disk" in (shown := printed(first, capsys)) and shown.count("Traceback") == 2
    other = agreed(5, PeerError(text, rank=2), raised(MemoryError("512 GiB")))
    assert "MemoryError: 512 GiB" in printed(other, capsys)
    alike = agreed(6, PeerError(text, rank=2), raised(PermissionError("the disk went away")))
    assert "Traceback" not in printed(alike, capsys)
    assert "Traceback" not in printed(agreed(7, PeerError(text, rank=2)), capsys)


def inside(error: ShardloadError, cause: BaseException | None = None, size: int = 16) -> ShardloadError:
    """Raised by code that lies in the package, as seen by rank 0."""
    names: dict[str, Any] = {}
    exec(compile("def fail(error, cause):\n    raise error from cause", shared_errors.__file__, "exec"), names)
    try:
        names["fail"](error, cause)
    except ShardloadError as found:
        share(found, 0, size)
        return found
    raise RuntimeError("nothing was raised")


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("kind", [ConfigError, SourceError])
def test_a_wrong_call_is_shown_up_to_the_users_line(
    kind: type[ShardloadError], size: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if forty lines of calls inside shardload stood between the user's line and what is wrong with it."""
    error = inside(kind("no array '/rho'"), raised(kind("no array '/rho'")), size)
    assert sys.excepthook is show, "of one process too"
    text = printed(error, capsys)
    assert text.count("Traceback") == 1 and __file__ in text and shared_errors.__file__ not in text
    assert text.endswith("Error: no array '/rho'\nSHARDLOAD_TRACEBACKS=all shows the calls inside shardload\n")
    assert traceback.extract_tb(error.__traceback__)[-1].filename == shared_errors.__file__, "a debugger needs them"
    monkeypatch.setenv("SHARDLOAD_TRACEBACKS", "all")
    assert shared_errors.__file__ in printed(error, capsys)


def test_a_package_that_is_imported_over_a_link(tmp_path: Path) -> None:
    """As from a home directory that is one. Wrong if nothing were cut there: frames have the name of the link."""
    (tmp_path / "link").symlink_to(Path(shared_errors.__file__).parents[1])
    spec: Any = importlib.util.spec_from_file_location("over_a_link", tmp_path / "link" / "comm" / "shared_errors.py")
    linked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(linked)
    names: dict[str, Any] = {}
    exec(compile("def fail(error):\n    raise error", linked.__file__ or "", "exec"), names)
    error = ConfigError("no array '/rho'")
    with pytest.raises(ConfigError):
        names["fail"](error)
    linked.share(error, 0, 1)
    text = linked.printed_text(error)
    assert text is not None and __file__ in text and str(tmp_path) not in text


def test_what_the_text_does_not_say_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong if the cause of a damaged file, or the calls that led to a defect, were seen nowhere."""
    text = printed(inside(SourceError("cannot be read"), raised(OSError("bad magic"))), capsys)
    assert text.count("Traceback") == 2 and "OSError: bad magic" in text and shared_errors.__file__ not in text
    own = printed(inside(ConfigError("elements 0 to 4 do not fit"), raised(ConfigError("elements 8 to 12 do not fit"))), capsys)
    assert own.count("Traceback") == 1 and "8 to 12" in own, "another rank's error, and this rank's own, which says all"
    peer = printed(inside(PeerError("on rank 2: KeyError: 'x'"), raised(KeyError("x"))), capsys)
    assert peer.count("Traceback") == 2 and shared_errors.__file__ in peer and "SHARDLOAD_TRACEBACKS" not in peer
