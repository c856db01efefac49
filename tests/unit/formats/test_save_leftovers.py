"""Is what a save that was killed left recognised, is it said whether it is whole, and is it never loaded by accident?"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

import shardload
from shardload.cli.main import app
from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access, Limits
from shardload.formats.hdf5.growth import Hdf5Growth, read_file
from shardload.formats.lookup import Finder, find_array, list_arrays
from shardload.formats.saving import make_sink
from shardload.formats.sink import ArraySpec, Compression
from shardload.formats.zarr.growth import GrowthSink, read_store
from shardload.storage import target
from shardload.storage.changes import AppendLock
from shardload.storage.leftovers import find_leftover
from tests.unit.files import change_json, flat, raising, system_error, write_hdf5
from tests.unit.saving import quick_fsync, save, write_all  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_fsync")

KINDS = ["x.h5", "x.nc", "x.zarr", "one.zarr"]
VALUES = flat((6, 4), "f4")


def catalog_of(folder: Path, kind: str) -> tuple[Any, Any]:
    """A sink and its catalog, which nobody ends: as after a kill."""
    spec = ArraySpec(VALUES.shape, VALUES.dtype, (2, 4), compression=Compression.of("gzip"))
    name = "/" if kind == "one.zarr" else "rho"
    sink = make_sink(str(folder / kind), {name: spec}, mode="w")
    return sink, sink.create()


def left_after(folder: Path, kind: str, phase: str) -> str:
    """The temporary that a save leaves that is killed in a phase."""
    sink, catalog = catalog_of(folder, kind)
    if phase != "create":
        write_all(sink, catalog, dict.fromkeys(sink.arrays, VALUES))
    if phase == "finish":
        catalog.finish()
    (catalog.folder if hasattr(catalog, "folder") else catalog._file)._target.temporary = None  # so that nothing removes it
    return str(catalog.ticket.temporary)


def info(path: str, *more: str) -> str:
    done = CliRunner().invoke(app, ["info", path, *more], env={"COLUMNS": "80"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


LOADS: dict[str, Callable[[str], Any]] = {
    "find_array": find_array,
    "with a name": lambda path: find_array(f"{path}:/rho"),
    "untrusted": lambda path: find_array(path, None, Access(untrusted=Limits())),
    "a tree": lambda path: Finder(Access()).find_below(path, ""),
    "of many": lambda path: Finder(Access()).find(path, "rho"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("phase", ["create", "put"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_whole(tmp_path: Path, kind: str, phase: str) -> None:
    path = left_after(tmp_path, kind, phase)
    found = find_leftover(path)
    assert found is not None and (found.target, found.kind, found.is_whole) == (str(tmp_path / kind), "unfinished", False)
    told = info(path)
    assert "no whole file" in " ".join(told.split()) and "mv -n" not in told
    answer = json.loads(info(path, "--json"))
    assert (answer["save_of"], answer["what"], answer["is_whole"], answer["arrays"]) == (found.target, "unfinished", False, [])
    assert list(answer["commands"]) == ["remove it"]
    for how in ("find_array", "a tree"):
        with pytest.raises(SourceError, match=f"is what a save to '{tmp_path / kind}' has written so far: no whole file"):
            LOADS[how](path)
    with pytest.raises(SourceError, match="no whole file"):
        list_arrays(path)
    subprocess.run(shlex.split(answer["commands"]["remove it"]), check=True)  # what is advised works
    assert not os.listdir(tmp_path) and find_leftover(path) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_whole(tmp_path: Path, kind: str) -> None:
    """It can be listed, and is given its name by what is advised; not loaded by its temporary name."""
    path = left_after(tmp_path, kind, "finish")
    told = info(path)
    assert "is a whole file that a save to" in " ".join(told.split()) and "6 x 4" in told
    for how, load in LOADS.items():
        with pytest.raises(SourceError, match="and did not name: it may not have been compared"):
            load(path)
            pytest.fail(how)
    answer = json.loads(info(path, "--json"))
    assert [6, 4] in [array["shape"] for array in answer["arrays"]] and answer["is_whole"]
    subprocess.run(shlex.split(answer["commands"]["give it a name to use it"]), check=True)
    assert os.listdir(tmp_path) == [kind] and find_array(str(tmp_path / kind)).shape == (6, 4)
    other = left_after(tmp_path, kind, "finish")
    stem, _, suffix = kind.partition(".")
    assert f"{stem}-1.{suffix}" in info(other)  # the name is taken now


def test_an_empty_file_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.h5.0123456789abcdef.unfinished"
    path.touch()
    assert not find_leftover(str(path)).is_whole  # type: ignore[union-attr]
    with pytest.raises(SourceError, match="no whole file"):
        find_array(str(path))


def test_a_second_name_of_a_file_that_was_saved(tmp_path: Path) -> None:
    """Killed between link and unlink: to rename it would be of no use."""
    save(tmp_path / "x.h5", {"rho": VALUES})
    path = tmp_path / "x.h5.0123456789abcdef.unfinished"
    os.link(tmp_path / "x.h5", path)
    told = " ".join(info(str(path)).split())
    assert f"is a second name of '{tmp_path}/x.h5'" in told and "mv -n" not in told
    with pytest.raises(SourceError, match="is a second name of"):
        find_array(str(path))


@pytest.mark.parametrize("phase", ["both", "new", "parts"])
def test_a_store_that_was_being_replaced(
    tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed while the name was free for a moment, after it was given to the new store, and while the old one was removed."""
    save(tmp_path / "x.zarr", {"old": np.arange(3)})
    sink, catalog = catalog_of(tmp_path, "x.zarr")
    write_all(sink, catalog, {"/rho": VALUES})
    catalog.finish()
    rename, calls = os.rename, []

    def renames(source: str, name: str) -> None:
        calls.append(name)
        if phase == "both" and len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, name)

    rmtree = shutil.rmtree

    def removes(path: str, **_: Any) -> None:
        if phase == "parts":
            rmtree(os.path.join(path, "old"))

    monkeypatch.setattr(target.os, "rename", renames)
    monkeypatch.setattr(target.shutil, "rmtree", removes)
    if phase == "both":
        with pytest.raises(KeyboardInterrupt):
            catalog.commit()
    else:
        catalog.commit()
        (warning,) = caplog.messages  # wrong if the old store, which may be large, stayed without a word
        assert "is saved" in warning and warning.endswith(f"rm -r {next(tmp_path.glob('*.replaced'))}")
    monkeypatch.undo()
    (old,) = tmp_path.glob("*.replaced")
    found = find_leftover(str(old))
    assert found is not None and (found.kind, found.is_whole) == ("replaced", phase == "both")
    told = " ".join(info(str(old)).split())
    assert ("perhaps only a part" in told) == (phase != "both")
    if phase == "both":
        assert "/old" in told
        for call in (find_array, lambda path: shardload.append(path, {"rho": VALUES}, dim=0)):
            with pytest.raises(SourceError, match=r"Beside it: .* before a save replaced it") as gone:
                call(str(tmp_path / "x.zarr"))  # wrong if the old store were gone for all that is said, or should be made anew
            assert f"`{dict(found.commands)['give it a name to use it']}`" in str(gone.value)
            assert "shardload.save" not in str(gone.value)
        subprocess.run(shlex.split(dict(found.commands)["give it a name to use it"]), check=True)
        assert zarr.open_group(tmp_path / "x.zarr", mode="r")["old"][...].tolist() == [0, 1, 2]
    else:
        with pytest.raises(SourceError, match="before a save replaced it, perhaps only a part of it"):
            find_array(str(old))


@pytest.mark.parametrize("kind", ["x.zarr", "one.zarr"])
def test_a_store_that_was_being_abandoned_is_not_whole(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All was written, but the comparison failed, and the process was killed as it removed the store."""
    sink, catalog = catalog_of(tmp_path, kind)
    write_all(sink, catalog, dict.fromkeys(sink.arrays, VALUES))
    catalog.finish()
    assert find_leftover(catalog.ticket.temporary).is_whole  # type: ignore[union-attr]
    monkeypatch.setattr(target.shutil, "rmtree", lambda path, **_: None)
    catalog.abandon()
    assert not find_leftover(catalog.ticket.temporary).is_whole  # type: ignore[union-attr]


def test_other_names_are_left_alone(tmp_path: Path) -> None:
    for name in ("x.h5.unfinished", "x.0123456789abcdef.h5", "x.h5.0123456789ABCDEF.unfinished"):
        write_hdf5(tmp_path / name, {"rho": VALUES})
        assert find_leftover(str(tmp_path / name)) is None and find_array(str(tmp_path / name)).shape == (6, 4)
    with pytest.raises(SourceError, match="there is no file"):
        find_array(str(tmp_path / "x.h5.0123456789abcdef.unfinished"))


def test_who_must_not_run_there_any_more(tmp_path: Path) -> None:
    """Wrong if what an append left, or a copy, told to look for a save."""
    path = left_after(tmp_path, "out.h5", "put")
    assert "If no save runs there any more" in " ".join(info(path).split())
    lock = tmp_path / "out.zarr.appending"
    (tmp_path / "out.zarr.").mkdir()  # what a path through it would need
    lock.touch()
    with pytest.raises(SourceError, match=r"is being appended to.* If no append runs there any more, remove it: `rm "):
        find_array(str(lock))
    assert "If no append runs there any more" in " ".join(info(str(lock)).split())
    assert f"remove it:  rm {lock}\n" in info(str(lock))


@pytest.mark.parametrize("kind", ["x.h5", "x.zarr"])
def test_commands_remove_what_a_killed_append_left(tmp_path: Path, kind: str) -> None:
    """Wrong if the next append, or `info` of the file, said nothing of its temporary; or removed that of another save."""
    path = tmp_path / kind
    if kind == "x.h5":
        write_hdf5(path, {"rho": VALUES}, maxshape=(None, 4), chunks=(2, 4))
        sink: Any = Hdf5Growth(str(path), read_file(str(path), ["/rho"]), {"/rho": 0}, {"/rho": 2})
    else:
        zarr.create_array(path / "rho", data=VALUES, chunks=(2, 4))
        zarr.open_group(path, mode="a")
        sink = GrowthSink(str(path), read_store(str(path), ["/rho"]), {"/rho": 0}, {"/rho": 2})
    sink.create()  # nobody ends it, as after a kill
    other = left_after(tmp_path, kind, "create")
    with pytest.raises(ConfigError, match="is being appended to") as found:
        AppendLock(str(path))
    command = f"rm {path}.appending"
    assert f"type: {command} (`shardload info` names what else it left)" in str(found.value)
    told = info(str(path))
    commands = [line.partition(":")[2].strip() for line in told.split("\n") if line.startswith("  remove it:")]
    remove_other = f"rm {'-r ' if kind == 'x.zarr' else ''}{other}"
    assert "6 x 4" in told and len(commands) == 3 and {command, remove_other} < {*commands}
    commands.remove(remove_other)
    for command in commands:
        subprocess.run(shlex.split(command), check=True)  # what is advised works
    assert sorted(os.listdir(tmp_path)) == sorted([kind, os.path.basename(other)])
    AppendLock(str(path)).release()
    told = info(str(path))
    assert told.count("\n  remove") == 1 and other in told
    sink.abandon()


def test_a_store_that_was_changed_since_the_append_was_planned(tmp_path: Path) -> None:
    """Wrong if rows were written as metadata said that are no longer those of the store."""
    path = str(tmp_path / "x.zarr")
    save(path, {"rho": VALUES})
    sink = GrowthSink(path, read_store(path, ["/rho"]), {"/rho": 0}, {"/rho": 2})
    change_json(tmp_path / "x.zarr/rho/zarr.json", fill_value=7.0)
    with pytest.raises(ConfigError, match="was changed by somebody else"):
        sink.create()
    assert os.listdir(tmp_path) == ["x.zarr"]


def test_the_lock_of_another_append_stays(tmp_path: Path) -> None:
    """Wrong if an append whose lock was removed, as that of one that is dead, took away the lock of the next one."""
    path = str(tmp_path / "out \udcff.zarr")  # any name that a file can have
    first = AppendLock(path)
    os.unlink(first.path)
    second = AppendLock(path)
    first.release()
    assert os.listdir(tmp_path) == ["out \udcff.zarr.appending"]
    with pytest.raises(ConfigError, match="is being appended to"):
        AppendLock(path)
    second.release()
    second.release()
    assert os.listdir(tmp_path) == []


def test_a_lock_for_which_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if it stayed, and kept all appends away."""
    monkeypatch.setattr(os, "pwrite", raising(system_error(errno.ENOSPC)))
    with pytest.raises(SourceError, match="no space is left"):
        AppendLock(str(tmp_path / "out.zarr"))
    assert os.listdir(tmp_path) == []
