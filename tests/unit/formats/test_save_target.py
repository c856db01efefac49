"""Is the old file whole whatever happens, and is an error one that names file, array and chunk?"""

from __future__ import annotations

import errno
import os
import re
import shlex
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardload.errors import ConfigError, SourceError
from shardload.formats.saving import make_sink
from shardload.formats.sink import ArraySpec, Compression, Sink
from shardload.planning.region import Region
from shardload.storage import target
from shardload.storage.objects import RemoteError
from shardload.storage.target import Target, temporary_of
from tests.unit.files import flat, raising, stored_in, system_error
from tests.unit.saving import forked, put_whole, quick_fsync, save, write_all  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_fsync")

KINDS = ["x.h5", "x.nc", "x.zarr", "sharded.zarr"]
VALUES, OLD = flat((9, 4), "f4"), np.arange(3.0)


def a_sink(folder: Path, name: str, mode: str = "w") -> Sink:
    shards = (4, 4) if name.startswith("sharded") else None
    spec = ArraySpec((9, 4), np.dtype("f4"), (2, 4), shards, Compression.of("gzip"))
    return make_sink(str(folder / name), {"rho": spec}, mode=mode)


def old_is_whole(folder: Path, name: str) -> bool:
    return np.array_equal(stored_in(folder / name, "old"), OLD)


def left(folder: Path) -> list[tuple[str, str]]:
    """The temporaries in a folder, as `temporary_of` knows them; any other file than the target is wrong."""
    found = [temporary_of(name) for name in os.listdir(folder) if name not in KINDS]
    assert None not in found
    return [one for one in found if one is not None]


def finish(sink: Sink, catalog: Any) -> None:
    write_all(sink, catalog, {"/rho": VALUES})
    catalog.finish()


def write_it(folder: Path, name: str, mode: str = "w") -> None:
    with a_sink(folder, name, mode).create() as catalog:
        finish(catalog, catalog)
        catalog.commit()


@pytest.mark.each_value
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("name", KINDS)
def test_no_room_for_a_chunk(tmp_path: Path, name: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the chunk was written before. The error names it, and neither harms the old file nor leaves anything."""
    save(tmp_path / name, {"old": OLD})
    sink, pwrite, calls = a_sink(tmp_path, name), os.pwrite, []
    with sink.create() as catalog, closing(sink.writer(catalog.ticket)) as writer:

        def torn(descriptor: int, data: Any, offset: int) -> int:
            calls.append(len(data))
            if len(calls) == 1:
                return pwrite(descriptor, data[: len(data) // 2], offset)
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(target.os, "pwrite", torn)
        with pytest.raises(SourceError) as caught:
            put_whole(sink, writer, catalog, "/rho", VALUES, sink.arrays["/rho"].region((3, 0)))
        monkeypatch.undo()
    words = str(caught.value)
    why = {errno.ENOSPC: "no space is left", errno.EDQUOT: "your quota", errno.EIO: "the device or the file server"}[code]
    assert words.startswith(f"chunk (3, 0) of '/rho' in '{tmp_path / name}' cannot be written: {why}")
    assert errno.errorcode[code] in words
    assert (caught.value.errno, caught.value.chunk, caught.value.dataset) == (code, (3, 0), "/rho")
    assert old_is_whole(tmp_path, name) and os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", KINDS)
def test_an_error_that_the_system_tells_at_fsync(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """File servers tell only then that there is no room."""
    sink = a_sink(tmp_path, name, "w-")
    with sink.create() as catalog:
        monkeypatch.setattr(target.os, "fsync", raising(system_error(errno.ENOSPC)))
        with pytest.raises(SourceError, match="no space is left on its file system"):
            finish(sink, catalog)
        monkeypatch.undo()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_temporary_that_is_there(tmp_path: Path, is_folder: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if what another save makes there were taken for our own, and removed."""
    monkeypatch.setattr(target.secrets, "token_hex", lambda n: "0" * 2 * n)
    first, second = (Target(str(tmp_path / "x"), "w-", marks=["zarr.json"] * is_folder) for _ in range(2))
    made = first.create()
    with pytest.raises(SourceError, match="File exists"):
        second.create()
    second.abandon()
    assert os.path.lexists(made)
    first.abandon()
    assert os.listdir(tmp_path) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(target.os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:13], offset))
    for name in KINDS:
        write_it(tmp_path, name, "w-")
    monkeypatch.undo()
    for name in KINDS:
        np.testing.assert_array_equal(stored_in(tmp_path / name, "rho"), VALUES)


def test_a_system_that_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = a_sink(tmp_path, "x.h5")
    monkeypatch.setattr(target.os, "pwrite", lambda *_: 0)
    with pytest.raises(SourceError, match="EIO"):
        sink.create()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("mode", "has_links"), [("w", True), ("w-", True), ("w-", False)])
@pytest.mark.parametrize("name", KINDS)
def test_two_saves_to_one_name(tmp_path: Path, name: str, mode: str, has_links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both begin while the name is free, or is that of an old file. One wins, whole; the other is told, unless it replaces."""
    if mode == "w":
        save(tmp_path / name, {"old": OLD})
    if not has_links:
        monkeypatch.setattr(target.os, "link", raising(system_error(errno.EPERM)))
    first, second = (a_sink(tmp_path, name, mode).create() for _ in range(2))
    for catalog in (first, second):
        finish(catalog, catalog)
    first.commit()
    told = pytest.raises(ConfigError, match=r"exists, and mode is 'w-'. Pass mode='w' to replace it")
    with told if mode == "w-" else nullcontext(), second:
        second.commit()
    np.testing.assert_array_equal(stored_in(tmp_path / name, "rho"), VALUES)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", KINDS)
def test_chunks_that_come_twice_or_never(tmp_path: Path, name: str) -> None:
    """Wrong if a file could get its name whose chunks are not all there, or two chunks one place."""
    sink = a_sink(tmp_path, name, "w-")
    with sink.create() as catalog:
        if sink.arrays["/rho"].is_placed_by_root:
            catalog.allocate("/rho", [3], [10])
            for numbers in ([3], [1, 1]):
                with pytest.raises(ValueError, match="has a place already"):
                    catalog.allocate("/rho", numbers, [10] * len(numbers))
        with pytest.raises(ValueError, match=r"of '/rho' have no place|'/rho' has 0 files in place of"):
            catalog.finish()
    assert os.listdir(tmp_path) == []


failing = raising(system_error(errno.ESTALE))  # a file server that does not answer


def finished(folder: Path, name: str, mode: str) -> Any:
    """A catalog before its end; with mode 'w' there is an old file."""
    if mode == "w":
        save(folder / name, {"old": OLD})
    sink = a_sink(folder, name, mode)
    catalog = sink.create()
    finish(sink, catalog)
    return catalog


def test_two_saves_that_replace_one_store_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if one failed, or left something, because the other took the name in the moment in which nothing has it."""
    name = "x.zarr"
    first, sink, rename = finished(tmp_path, name, "w"), a_sink(tmp_path, name, "w"), os.rename
    second = sink.create()
    finish(sink, second)

    def meets(source: str, to: str) -> None:
        rename(source, to)
        if to.endswith(".replaced"):
            monkeypatch.setattr(target.os, "rename", rename)
            second.commit()

    monkeypatch.setattr(target.os, "rename", meets)
    first.commit()
    np.testing.assert_array_equal(stored_in(tmp_path / name, "rho"), VALUES)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["w", "w-"])
@pytest.mark.parametrize("name", KINDS)
def test_a_name_that_is_not_confirmed(tmp_path: Path, name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if it were said that the old file is as it was: the new one is there, and a second save with 'w-' is refused."""
    catalog = finished(tmp_path, name, mode)
    monkeypatch.setattr(target, "sync_folder", failing)
    with pytest.raises(SourceError, match=r"has its new content, whole, but .* did not confirm .*ESTALE") as caught:
        catalog.commit()
    monkeypatch.undo()
    catalog.abandon()
    assert "as it was" not in str(caught.value) and caught.value.path == str(tmp_path / name)
    np.testing.assert_array_equal(stored_in(tmp_path / name, "rho"), VALUES)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["x.zarr", "sharded.zarr"])
def test_the_name_is_on_disk_before_what_was_replaced_goes(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a machine that stops could be left with the old name of a store whose files are gone."""
    catalog, seen = finished(tmp_path, name, "w"), []

    def synced(folder: str) -> None:
        seen.extend(stored_in(tmp_path / one, "old").tolist() for one in os.listdir(folder) if one != name)

    monkeypatch.setattr(target, "sync_folder", synced)
    catalog.commit()
    assert seen == [OLD.tolist()] and os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", KINDS)
def test_a_file_system_without_fsync_of_folders(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if nothing could be saved there. Files are still on disk before they have their name."""
    files: list[int] = []

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        files.append(descriptor)

    monkeypatch.setattr(target.os, "fsync", fsync)
    write_it(tmp_path, name)
    monkeypatch.undo()
    np.testing.assert_array_equal(stored_in(tmp_path / name, "rho"), VALUES)
    assert files and os.listdir(tmp_path) == [name]


@pytest.mark.each_value
@pytest.mark.parametrize("call", ["rmtree", "unlink"])
@pytest.mark.parametrize("mode", ["w", "w-"])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_left_over_cannot_be_removed(
    tmp_path: Path, name: str, mode: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file has its name then: it is saved, whatever becomes of the rest."""
    catalog = finished(tmp_path, name, mode)
    monkeypatch.setattr(target.shutil if call == "rmtree" else target.os, call, failing)
    catalog.commit()
    monkeypatch.undo()
    np.testing.assert_array_equal(stored_in(tmp_path / name, "rho"), VALUES)
    is_folder = name.endswith("zarr")
    stays = (is_folder and mode == "w") or (not is_folder and mode == "w-" and call == "unlink")
    assert len(left(tmp_path)) == stays


@pytest.mark.parametrize("mode", ["w", "w-"])
@pytest.mark.parametrize("name", ["x.zarr", "sharded.zarr"])
def test_a_store_that_does_not_get_its_name(tmp_path: Path, name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old store has its name again; or nothing has it, if there was none."""
    catalog, rename = finished(tmp_path, name, mode), os.rename
    monkeypatch.setattr(target.os, "rename", lambda a, b: failing() if a.endswith(".unfinished") else rename(a, b))
    with pytest.raises(SourceError, match="as it was"):
        catalog.commit()
    monkeypatch.undo()
    catalog.abandon()
    assert os.listdir(tmp_path) == ([name] if mode == "w" else [])
    assert mode == "w-" or old_is_whole(tmp_path, name)


@pytest.mark.parametrize("mode", ["w", "w-"])
@pytest.mark.parametrize("name", ["x.h5", "x.zarr"])
def test_a_rename_that_was_made_and_is_an_error(tmp_path: Path, name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: the answer was lost, and the client asked again.

    Wrong if the error said that what had the name is as it was, or if the new file was removed.
    """
    catalog, rename = finished(tmp_path, name, mode), os.rename

    def twice(source: str, new_name: str) -> None:
        rename(source, new_name)
        rename(source, new_name)

    monkeypatch.setattr(target.os, "link", raising(system_error(errno.EOPNOTSUPP)))
    monkeypatch.setattr(target.os, "rename", twice)
    catalog.commit()
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [name]
    np.testing.assert_array_equal(stored_in(tmp_path / name, "rho"), VALUES)


@pytest.mark.parametrize("name", ["x.zarr", "sharded.zarr"])
def test_no_store_gets_the_name(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the error said that the old store was as it was, when it has another name."""
    catalog, rename = finished(tmp_path, name, "w"), os.rename
    monkeypatch.setattr(target.os, "rename", lambda a, b: failing() if b.endswith(name) else rename(a, b))
    with pytest.raises(SourceError, match=f"'.*{name}' is gone: .*Type: mv '.*replaced' '.*{name}'") as raised:
        catalog.commit()
    monkeypatch.undo()
    catalog.abandon()
    (left,) = os.listdir(tmp_path)
    assert f"whole, at '{tmp_path / left}'" in str(raised.value)
    os.rename(tmp_path / left, tmp_path / name)
    assert old_is_whole(tmp_path, name)


@pytest.mark.parametrize("said", [OSError(5, "file read failed: errno = 5"), KeyError("file read failed: errno = 5")])
@pytest.mark.parametrize("name", ["x.h5", "x.nc"])
def test_the_library_cannot_read_what_was_written(
    tmp_path: Path, name: str, said: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if the error named no file."""
    sink = a_sink(tmp_path, name, "w-")
    with sink.create() as catalog:
        monkeypatch.setattr("shardload.formats.hdf5.sink.open_explained", raising(said))
        with pytest.raises(SourceError, match=f"the new file of '.*{name}' cannot be read by HDF5: .*errno = 5"):
            finish(sink, catalog)
        monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_what_a_store_says_stays() -> None:
    """Wrong if the text about a file system stood in the place of what the store says: its number is that of an I/O error."""
    text = r"chunk \(1,\) of '/x' in 's3://b/x' cannot be written: .*answers 500 \(8 times\)"
    with pytest.raises(SourceError, match=text), target.as_write_error("s3://b/x", "/x", lambda: (1,)):
        raise RemoteError(errno.EIO, "'s3://b/x/c/1' cannot be put: the server answers 500 (8 times)")


@pytest.mark.parametrize("name", KINDS)
def test_a_name_that_is_no_utf_8(tmp_path: Path, name: str) -> None:
    """Loads take such a path as the system gives it."""
    save(tmp_path / f"\udcff{name}", {"rho": VALUES})
    assert np.array_equal(stored_in(tmp_path / f"\udcff{name}", "rho"), VALUES)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="its name is too long: of the 255 bytes"):
        Target(str(tmp_path / f"{'n' * 240}.h5"), "w-").create()


def test_a_name_that_is_taken_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "x.h5").write_text("mine")
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / "notes.txt").write_text("mine")
    os.symlink("nowhere", tmp_path / "x.nc")
    for name in ("x.h5", "x.zarr", "x.nc"):
        with pytest.raises(ConfigError, match="exists, and mode is 'w-'"):
            a_sink(tmp_path, name, "w-").create()
    with pytest.raises(ConfigError, match=r"is a folder, and .* no more than a folder with zarr.json or .zgroup"):
        a_sink(tmp_path, "x.zarr").create()
    os.rename(tmp_path / "x.zarr", tmp_path / "y.h5")
    with pytest.raises(ConfigError, match=r"is a folder, and .* no more than a file"):
        a_sink(tmp_path, "y.h5").create()
    with pytest.raises(ConfigError, match=r"Make it first: mkdir -p .*nowhere"):
        a_sink(tmp_path / "nowhere", "x.h5").create()
    with pytest.raises(ConfigError, match="Make it first: ") as caught:
        a_sink(tmp_path / "with a space", "x.h5").create()
    assert shlex.split(str(caught.value).partition("Make it first: ")[2]) == ["mkdir", "-p", str(tmp_path / "with a space")]
    os.mkfifo(tmp_path / "pipe")  # as /dev/null is: a rename would put a file in its place
    with pytest.raises(ConfigError, match=r"is a pipe, and .* no more than a file"):
        make_sink(str(tmp_path / "pipe"), {"rho": ArraySpec((1,), np.dtype("f4"))}, format="hdf5", mode="w").create()
    os.unlink(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="mode is 'a'; expected 'w-'"):
        a_sink(tmp_path, "x.h5", "a")
    assert (tmp_path / "y.h5" / "notes.txt").read_text() == "mine" and (tmp_path / "x.h5").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["x.h5", "x.nc", "y.h5"]


def test_a_link_is_replaced_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    save(tmp_path / "real" / "x.h5", {"old": OLD})
    os.symlink(tmp_path / "real" / "x.h5", tmp_path / "x.h5")
    write_it(tmp_path, "x.h5")
    assert (tmp_path / "x.h5").is_symlink() and os.listdir(tmp_path / "real") == ["x.h5"]
    np.testing.assert_array_equal(stored_in(tmp_path / "real" / "x.h5", "rho"), VALUES)


def test_an_answer_that_was_lost_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS: the link was made, the client asked again and was told that it exists."""
    link = os.link

    def twice(source: str, name: str) -> None:
        link(source, name)
        link(source, name)

    monkeypatch.setattr(target.os, "link", twice)
    write_it(tmp_path, "x.h5", "w-")
    assert os.listdir(tmp_path) == ["x.h5"]


@pytest.mark.parametrize("name", ["x.h5", "x.zarr"])
def test_a_rank_that_sees_another_folder(tmp_path: Path, name: str) -> None:
    sink = a_sink(tmp_path, name)
    with sink.create() as catalog:
        other = re.sub("[0-9a-f]{16}", "0" * 16, catalog.ticket.temporary)
        with pytest.raises(ConfigError, match="Is another file system mounted there"):
            sink.writer(replace(catalog.ticket, temporary=other))


def test_what_is_put_after_the_end(tmp_path: Path) -> None:
    sink = a_sink(tmp_path, "x.h5")
    catalog = sink.create()
    writer = sink.writer(catalog.ticket)
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        put_whole(sink, writer, catalog, "/rho", VALUES, Region((0, 0), (2, 4)))
    catalog.abandon()
    catalog.abandon()
    with pytest.raises(ValueError, match="is finished"):
        catalog.allocate("/rho", [1], [5])


def test_a_file_that_is_larger_than_the_disk_reserves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if it takes all the room there is, from other programs too; a file system that compresses may not need so much."""
    asked, room = list[tuple[int, ...]](), os.statvfs(tmp_path)
    monkeypatch.setattr(target, "_fallocate", lambda: lambda descriptor, mode, *place: asked.append(place) or 0)
    with open(tmp_path / "x", "wb") as file:
        assert target.reserve(file.fileno(), 0, 2 * room.f_blocks * room.f_frsize) == 0 and not asked
        assert target.reserve(file.fileno(), 10, 20) == 10 and asked == [(10, 10)]


def test_a_file_system_that_takes_long_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if rank 0 writes all of a large file's pages in memory, one after the other, while the others wait."""
    sizes = list[int]()  # each GiB takes a quarter of a second
    monkeypatch.setattr(target, "_fallocate", lambda: lambda descriptor, mode, start, nbytes: sizes.append(nbytes) or 0)
    monkeypatch.setattr(target.os, "fstatvfs", lambda descriptor: SimpleNamespace(f_bavail=1 << 62, f_frsize=1))
    monkeypatch.setattr(target.time, "perf_counter", lambda: 0.25 * sum(sizes) / (1 << 30))
    assert target.reserve(3, 0, 1 << 40) == sum(sizes) == 48 << 20
