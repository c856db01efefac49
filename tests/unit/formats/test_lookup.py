"""Is the file, and the one array in it, found that was meant, and does each error say what to do?"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.errors import ConfigError, SourceError
from shardload.formats.access import Access, Limits
from shardload.formats.contract.array import Note, json_value, refusal
from shardload.formats.contract.format import Source
from shardload.formats.diagnosis import no_arrays_below
from shardload.formats.lookup import Finder, find_array, list_arrays, open_source, split_path
from shardload.formats.memory import MemorySource
from shardload.jobs.loading.call import describe_path
from shardload.planning.region import Region
from tests.unit.blocked import run_without
from tests.unit.files import (
    check_source,
    flat,
    raising,
    read_all,
    read_small,
    system_error,
    write_hdf5,
    write_zarr,
)


def test_memory_by_name_and_bounds() -> None:
    data = flat((3, 4))
    info = find_array(data)
    assert str(info) == "'/array' in '<memory>'" and info.nbytes_stored == 48
    check_source(open_source(data, info.dataset), data)
    source = MemorySource(data)
    assert isinstance(source, Source)
    for attempt in (source.view, lambda region: source.read_into(region, np.empty(region.shape, "f4"))):
        with pytest.raises(ValueError, match=r"region \[2:4, 0:4\] reaches outside '/array' in '<memory>'"):
            attempt(Region((2, 0), (4, 4)))


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        ("O", "Python objects"),
        ("S3", "strings"),
        ("U3", "strings"),
        (np.dtypes.StringDType(), "variable-length strings"),
        ("V4", "raw bytes"),
        ([("a", "f4"), ("b", "i8")], "records with fields a, b"),
        ("M8[s]", "dates"),
        ("m8[s]", "time spans"),
        ("longdouble", "extended precision floats"),
        ("clongdouble", "extended precision complex"),
    ],
)
def test_other_types_are_refused(dtype: Any, why: str) -> None:
    assert why in str(refusal(np.dtype(dtype)))
    with pytest.raises(SourceError, match=f"array of shape .2, 3. in memory holds {why}") as caught:
        find_array(np.zeros((2, 3), dtype))
    assert caught.value.path == "<memory>"
    assert refusal(np.dtype(("f4", (3,)))) == "small arrays of shape (3,) as elements"


def test_attribute_values_become_plain() -> None:
    record = np.zeros(1, [("a", "i4")])[0]
    assert json_value(np.array([b"K", b"m"])) == ["K", "m"]
    assert json_value(np.float32(0.5)) == 0.5 and type(json_value(np.float32(0.5))) is float
    assert json_value(np.array([[1, 2]])) == [[1, 2]] and json_value(np.array(3 + 1j)) == "(3+1j)"
    assert json_value(record) == [0] and json_value(np.bool_(True)) is True
    assert json_value(b"\xff") == "\ufffd" and json_value(None) is None
    assert json_value({"a": [1, {"b": np.float32(0.5)}]}) == {"a": [1, {"b": 0.5}]}
    assert isinstance(json_value({"a": "x" * 5000}), Note)


def test_split_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("file.h5", "odd:name.h5", "file.h5:rho2"):
        Path(name).touch()
    Path("store.zarr").mkdir()
    for path, expected in {
        "file.h5": ("file.h5", None),
        "file.h5:/group/rho": ("file.h5", "/group/rho"),
        "file.h5:rho": ("file.h5", "rho"),
        "file.h5:rho2": ("file.h5:rho2", None),  # exists as it stands
        "file.h5:": ("file.h5", None),
        "file.h5:/a:/b": ("file.h5", "/a:/b"),
        "odd:name.h5:/a": ("odd:name.h5", "/a"),
        "odd:name.h5": ("odd:name.h5", None),
        "store.zarr:/a/b": ("store.zarr", "/a/b"),
        f"{tmp_path}/store.zarr:a": (f"{tmp_path}/store.zarr", "a"),
        "gone.h5:/a": ("gone.h5", "/a"),
        "gone.h5:a": ("gone.h5:a", None),
        "s3://bucket/a.zarr": ("s3://bucket/a.zarr", None),
        "s3://bucket/a.zarr:/g/rho": ("s3://bucket/a.zarr", "/g/rho"),
        "http://host:8080/a.zarr": ("http://host:8080/a.zarr", None),
        "http://host:8080/a.zarr:/g": ("http://host:8080/a.zarr", "/g"),
        "simplecache::s3://b/a.zarr:/g": ("simplecache::s3://b/a.zarr", "/g"),
        ":/a": (":/a", None),
        "": ("", None),
    }.items():
        assert split_path(path) == expected, path


@pytest.fixture(params=["h5", "zarr"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    writer = {"h5": write_hdf5, "zarr": write_zarr}[request.param]
    return lambda arrays: writer(tmp_path / f"data.{request.param}", arrays)


Write = Callable[[dict[str, Any]], str]


def test_several_arrays_are_listed_largest_first(write: Write) -> None:
    path = write({f"v{k}": flat((k + 1, 3)) for k in range(10)} | {"w": flat((10, 3), "float64")})
    with pytest.raises(ConfigError) as caught:
        find_array(path)
    named = ", ".join(f"'/v{k}' ({k + 1}, 3) float32" for k in range(9, 2, -1))
    assert str(caught.value) == (
        f"'{path}' holds 11 arrays; name one, as in '{path}:/w' (largest first): '/w' (10, 3) float64, {named} and 3 more."
    )


def test_a_wrong_name_lists_those_near_it(write: Write) -> None:
    path = write({"density": flat((2, 3)), "g/velocity": flat((4,)), "g/pressure": flat((5,))})
    with pytest.raises(ConfigError, match=r"holds no array '/velocty'.*\(nearest first\): '/g/velocity' \(4,\) float32, "):
        find_array(path, "velocty")
    with pytest.raises(ConfigError, match=r"holds no array '/DENSITY'.*nearest first\): '/density'"):
        find_array(path, "DENSITY")
    with pytest.raises(
        ConfigError,
        match=r"'/g' in .* is a group, not an array \('/g/\*' are all in it\): '/g/[pv].*, '/g/[pv][^']*' [^']*\.$",
    ):
        find_array(path, "g")
    with pytest.raises(SourceError, match=r"holds no array '/nope', which was found in it before.*all ranks share") as caught:
        open_source(path, "nope", planned=list_arrays(path)[0])
    assert (caught.value.path, caught.value.dataset) == (path, "/nope")


@pytest.mark.parametrize("form", ["h5", 2, 3])
def test_a_group_says_what_is_in_it(tmp_path: Path, form: Any) -> None:
    """Wrong if the header of a Gadget snapshot, which has attributes alone, were said not to be there."""
    path = str(tmp_path / f"a.{form}")
    root: Any = h5py.File(path, "w") if form == "h5" else zarr.open_group(path, mode="w", zarr_format=form)
    for name, data in (("PartType0/Density", flat((3, 4))), ("PartType0/deep/x", flat((5,)))):
        (root.create_dataset if form == "h5" else root.create_array)(name, data=data)
    root.create_group("Header").attrs.update({"BoxSize": 1.0, "\x1bTime": 0.5})
    root.create_group("Empty")
    if form == "h5":
        root.close()
    said = r"is a group without arrays\. It has attributes \('(BoxSize|\\x1bTime)', '[^']*'\): see .*:/Header'\)\.attrs\. "
    with pytest.raises(ConfigError, match=said):
        find_array(path, "Header")
    with pytest.raises(ConfigError, match=r"'/PartType0' in .* is a group, not an array ") as caught:
        find_array(path, "/PartType0")
    assert re.findall(r"'([^']*)' \(", str(caught.value)) == ["/PartType0/Density", "/PartType0/deep/x"]
    with pytest.raises(ConfigError, match=r"'/Empty' in .* is a group without arrays\. Arrays in the file .*: '/PartType0"):
        find_array(path, "Empty")


@pytest.mark.usefixtures("quick_helpers")
@pytest.mark.parametrize("limits", [None, Limits()], ids=["", "untrusted"])
def test_a_pattern_below_a_link(tmp_path: Path, limits: Limits | None) -> None:
    """As h5py follows links to a group. Wrong if a link out of the folder were followed, too, or one that the pattern meets."""
    (tmp_path / "in").mkdir()
    write_hdf5(tmp_path / "far.h5", {"g/x": flat((2,))})
    write_hdf5(tmp_path / "in" / "other.h5", {"g/far": flat((2,))})
    with h5py.File(tmp_path / "in" / "a.h5", "w") as file:
        file["step/9/rho"], file["step/9/deep/x"], file["alone"] = flat((3, 4)), flat((5,)), flat((2,))
        file["step/9/one"], file["only/one"] = h5py.SoftLink("/alone"), h5py.SoftLink("/alone")
        file["latest"], file["step/last"], file["now"] = map(h5py.SoftLink, ("/step/9", "9", "/latest"))
        file["same"], file["gone"], file["dataset"] = file["step"], h5py.SoftLink("/step/8"), h5py.SoftLink("/alone")
        file["beside"], file["away"] = h5py.ExternalLink("other.h5", "/g"), h5py.ExternalLink("../far.h5", "/g")
    path, access = str(tmp_path / "in" / "a.h5"), Access(untrusted=limits)
    with Finder(access) as finder, h5py.File(path) as file:
        for group in ("latest", "latest/deep", "step/last", "now", "same/9", "same", "beside"):
            expected: list[str] = []
            file[group].visititems(lambda name, one: expected.append(name) if isinstance(one, h5py.Dataset) else None)  # noqa: B023
            found, _ = finder.find_below(path, f"/{group}")
            assert expected and [one.info.dataset for one in found] == [f"/{group}/{name}" for name in expected]
            for one in found if limits is None else found[-1:]:  # a helper process each, which opens the name as this one does
                with closing(open_source(path, one.info.dataset, access)) as source:
                    np.testing.assert_array_equal(read_all(source), file[one.info.dataset][:])
        for group in ("only", "dataset", "no"):
            with pytest.raises(ConfigError, match=f"'/{group}'.*(links below it are not followed|is an array)"):
                finder.find_below(path, f"/{group}")
        with pytest.raises(SourceError, match=r"'/gone' in .* is a link to '/step/8', which cannot be opened"):
            finder.find_below(path, "/gone")
        with pytest.raises(SourceError, match=r"a link to '/g' in '\.\./far\.h5', which is outside the folder"):
            finder.find_below(path, "/away")
    with Finder(replace(access, allow_external=True)) as finder:
        assert [one.info.dataset for one in finder.find_below(path, "/away")[0]] == ["/away/x"]


def test_no_array_to_load(write: Write, tmp_path: Path) -> None:
    path = write({})
    with pytest.raises(SourceError, match=r"holds no array that can be loaded.*It holds none at all"):
        find_array(path)
    with pytest.raises(ConfigError, match=r"holds no array '/a'.*nearest first\): none"):
        find_array(path, "a")
    assert f"'{path}' holds no arrays below '/'" in str(no_arrays_below(path, "", []))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["lat"] = flat((3,))
        file["lat"].make_scale("lat")
        file["text"] = "abc"
    with pytest.raises(SourceError, match=r"It holds '/lat' \(3,\) float32: a coordinate, '/text' \(\) string: strings"):
        find_array(tmp_path / "x.h5")
    assert find_array(tmp_path / "x.h5", "lat").is_coordinate


@pytest.mark.parametrize("kind", ["chunked", "whole"])
def test_reads_that_are_short_or_interrupted(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a file were of an unknown kind because the system gave fewer bytes, or a signal came while HDF5 opened it."""
    path = write_hdf5(tmp_path / "x.h5", {"rho": flat((4, 6), "f4")}, chunks=kind == "chunked" or None)
    preadv, opens, calls = os.preadv, h5py.h5f.open, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) % 2:
            raise InterruptedError(4, "Unable to synchronously open file (unable to lock file, errno = 4)")
        return opens(*arguments, **options)

    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: preadv(descriptor, [buffers[0][:3]], offset))
    monkeypatch.setattr(h5py.h5f, "open", interrupted)
    assert find_array(path).shape == (4, 6) and len(calls) > 1


@pytest.mark.parametrize("call", ["preadv", "read"])
@pytest.mark.parametrize(
    ("code", "why"),
    [(116, "Stale file handle. Its device or file server"), (24, "Too many open files. Not the file, but this")],
)
def test_a_file_that_cannot_be_read_now(
    tmp_path: Path, call: str, code: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if it were said to be of an unknown format, or the error named no file, or blamed it for a limit of the process."""
    path = write_hdf5(tmp_path / "x.h5", {"rho": flat((4, 6), "f4")})
    if call == "read":
        Path(path).write_bytes(b"no array at all")
    monkeypatch.setattr(os, "preadv" if call == "preadv" else "fdopen", raising(system_error(code)))
    with pytest.raises(SourceError, match=rf"'.*x.h5' cannot be read: OSError: .*{why}"):
        find_array(path)


def test_no_such_file_names_those_near_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_hdf5("density.h5", {"a": flat((3,))})
    for attempt in (list_arrays, find_array, lambda path: open_source(path, "a")):
        with pytest.raises(SourceError, match=r"there is no file 'densty.h5' .*Near it: 'density.h5'\.") as caught:
            attempt("densty.h5")
        assert caught.value.path == "densty.h5"
    with pytest.raises(SourceError, match=f"there is no file '{tmp_path}/x/densty.h5', nor a folder '{tmp_path}/x'"):
        find_array(tmp_path / "x" / "densty.h5")
    pattern = r"'dens\*\.h5' is a pattern, which fits 1 file\..* shardload\.concat\('dens\*\.h5', AXIS\) .* `shardload join`"
    with pytest.raises(SourceError, match=pattern):
        find_array("dens*.h5")
    with pytest.raises(SourceError, match=r"'density\.h5' is a file, not a folder\. Pass 'density\.h5:/g/a' if you mean"):
        find_array("density.h5/g/a")
    with pytest.raises(SourceError, match=f"there is no file 'zzz' .in the folder '{tmp_path}'"):
        find_array("zzz")
    with pytest.raises(SourceError, match=r"there is no file 'gone\.h5'"):
        find_array("gone.h5:/rho")
    with pytest.raises(SourceError, match=r"there is no file 'density\.h5/a'"):
        find_array("density.h5/a")
    Path("link.h5").symlink_to("nowhere.h5")
    with pytest.raises(SourceError, match=r"'link\.h5' is a symbolic link to 'nowhere.h5', which does not exist"):
        find_array("link.h5")
    for odd in ("", "a\0b"):
        with pytest.raises(SourceError, match=r"no file|cannot be read"):
            find_array(odd)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            b"CDF\x01" + b"\0" * 40,
            "netCDF-3 classic file, which cannot be loaded. Convert it: `nccopy -k nc4 in.nc out.nc`",
        ),
        (b"CDF\x02" + b"\0" * 40, "netCDF-3 classic"),
        (b"\x93NUMPY\x01\x00", "NumPy .npy file.*numpy.load"),
        (b"SIMPLE  =                    T", "FITS file"),
        (b"GRIB\0\0\0\x02", "GRIB file.*cdo"),
        (b"MATLAB 5.0 MAT-file", "MATLAB file before version 7.3.*-v7.3"),
        (b"\x1f\x8b\x08", "gzip file.*gunzip"),
        (b"\0" * 257 + b"ustar", "tar archive"),
        (b"PK\x03\x04", "zip file, which cannot be loaded. Unpack it: `unzip IN.zip -d OUT.zarr`, or pass an array"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"", r"is empty \(0 bytes\)"),
        (b"what is this", r"unknown format: it starts with b'what is '"),
    ],
)
def test_files_of_other_formats_are_named(tmp_path: Path, content: bytes, text: str) -> None:
    path, formats = tmp_path / "a.dat", "HDF5, Zarr"
    path.write_bytes(content)
    for attempt in (list_arrays, find_array, lambda p: open_source(p, "a")):
        with pytest.raises(SourceError, match=f"{text}(.|\n)* Formats that can be loaded here: {formats}\\.$") as caught:
            attempt(str(path))
        assert caught.value.path == str(path)


def test_a_folder_that_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"is a folder, but not a Zarr store.*Formats"):
        find_array(tmp_path)
    write_zarr(tmp_path / "a.zarr", {"a": flat((3,))})
    with pytest.raises(SourceError, match=rf"is a folder, but not a Zarr store.* In it: '{tmp_path}/a\.zarr'\."):
        find_array(tmp_path)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_part_of_a_store(tmp_path: Path, zarr_format: Any) -> None:
    """Wrong if its metadata, which completion in a shell proposes, were a file of an unknown format and nothing more."""
    store = tmp_path / "a.zarr" / "g" / "x"
    zarr.create_array(store, data=flat((3,)), zarr_format=zarr_format)
    for part in ("zarr.json", "c", "c/0") if zarr_format == 3 else (".zarray", "0"):
        with pytest.raises(SourceError, match=f"It is a part of the Zarr store '{store}': pass that path."):
            find_array(store / part)
    assert find_array(store).shape == (3,)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder, and a user who is not root for the time of the test: root may read everything."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextlib.contextmanager
def _kept_out(*paths: Path) -> Iterator[None]:
    """Files and folders that this user may not read."""
    for path in paths:
        os.chmod(path, 0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        for path in paths:
            os.chmod(path, 0o755)


def test_a_file_that_may_not_be_read(unprivileged: Path) -> None:
    paths = [
        write_hdf5(unprivileged / "a.h5", {"a": flat((3,))}),
        write_zarr(unprivileged / "a.zarr", {"a": flat((3,))}),
    ]
    with _kept_out(*paths):
        for path in paths:
            with pytest.raises(SourceError, match=f"'{path}' may not be read by this user .*Permission denied"):
                find_array(path)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_part_of_a_store_that_may_not_be_read(unprivileged: Path, zarr_format: Any) -> None:
    """Wrong if it were overlooked: what stands for all arrays would be less, and a copy would be without it."""
    store = unprivileged / "a.zarr"
    root = zarr.create_group(store, zarr_format=zarr_format)
    for name in ("a", "b", "g/c"):
        root.create_array(name, data=flat((3,)))
    with _kept_out(store / "b"), Finder(Access()) as finder:
        told = {info.dataset: info.refused for info in list_arrays(str(store))}
        assert list(told) == ["/a", "/b", "/g/c"] and "Permission denied" in str(told.pop("/b"))
        assert set(told.values()) == {None}
        with pytest.raises(SourceError, match=r"'/b' in '.*a\.zarr' cannot be loaded.*Permission denied"):
            finder.find_below(str(store), "")
        assert [one.info.dataset for one in finder.find_below(str(store), "/g")[0]] == ["/g/c"]
    with _kept_out(store / "g"):
        assert [info.dataset for info in list_arrays(str(store)) if info.refused] == ["/g"]
    (store / "g").chmod(0o311)  # its metadata may be read, and the names in it may not
    with _kept_out():
        assert [info.dataset for info in list_arrays(str(store)) if info.refused] == ["/g"]
    (store / "g").chmod(0o755)
    if zarr_format == 3:  # format 2 has a file for what is an array, and one for its attributes
        with _kept_out(store / "zarr.json"), pytest.raises(SourceError, match=r"may not be read by this user .*Ask for access"):
            list_arrays(str(store))


def test_other_objects_are_refused() -> None:
    for odd in (3, [1.0], None, b"a.h5"):
        with pytest.raises(ConfigError, match=re.escape(f"an object of type builtins.{type(odd).__name__}. Pass a path")):
            find_array(odd)


def test_a_path_from_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if ``~`` were read in the one call and not in the other, or in the middle of a name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = str(tmp_path / "a~.h5")
    write_hdf5(path, {"rho": np.arange(4.0)})
    assert split_path("~/a~.h5:/rho") == (path, "/rho")
    assert split_path("~/no.h5:/rho") == (str(tmp_path / "no.h5"), "/rho")
    for given in ("~/a~.h5", "~/a~.h5:/rho", "~/a~.h5:rho", Path("~/a~.h5"), Path("~") / "a~.h5", Path("~/a~.h5:/rho")):
        info = find_array(given)
        assert (info.path, info.dataset) == (path, "/rho")
        assert read_small(given, info) == np.arange(4.0).tobytes()
        with closing(open_source(given, info.dataset)) as source:
            assert source.info == info
    assert find_array("~/a~.h5", "rho").path == path
    with pytest.raises(SourceError, match=f"there is no file '{tmp_path}/b.h5'"):
        find_array("~/b.h5")
    with pytest.raises(SourceError, match=r"no file '~nobody-of-this-name/b\.h5'"):
        find_array("~nobody-of-this-name/b.h5")
    mesh = AbstractMesh((2,), ("a",))
    assert shardload.plan("~/a~.h5:/rho", mesh, P("a")).info.path == path
    assert describe_path(Path("~/a~.h5")) == repr(path), "what ranks compare, whose homes may differ"


def test_what_is_stored_is_counted_in_a_list(tmp_path: Path) -> None:
    """Wrong if a load had HDF5 go through the index of all chunks for it."""
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w") as file:
        made = file.create_dataset("g/x", data=np.zeros((100, 10)), chunks=(1, 10), compression="gzip")
        file["link"], n = h5py.SoftLink("/g/x"), made.id.get_storage_size()
    assert {info.nbytes_stored for info in list_arrays(path)} == {n}
    for name in ("g/x", "link"):
        assert find_array(path, name).nbytes_stored is None, "HDF5 goes through all chunks for it"


def test_a_format_is_imported_when_it_is_needed(tmp_path: Path) -> None:
    """Alone: wrong if each load waited for the libraries of all formats. What the module itself imports: test_rooms.py."""
    path = write_hdf5(tmp_path / "a.h5", {"a": flat((3,))})
    code = f"from shardload.formats import lookup\nassert 'importlib.metadata' not in sys.modules\nlookup.find_array({path!r})"
    assert run_without({"zarr", "jax"}, code, stop='SystemExit(f"{name} is imported")').stderr == ""


def test_what_a_text_would_allow_is_refused() -> None:
    with pytest.raises(TypeError, match="allow_filters is 'all'; expected a collection of names"):
        Access(allow_filters="all")  # type: ignore[arg-type]
