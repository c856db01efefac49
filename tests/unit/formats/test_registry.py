"""Is each format found, our own and those of other packages, in its order, and when it is needed alone?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardload.errors import SourceError
from shardload.formats import registry
from shardload.formats.access import Access, Limits
from shardload.formats.lookup import find_array, list_arrays, open_source
from tests.unit.files import flat, write_hdf5, write_zarr

XYZ = """
from shardload.formats import ArrayInfo, Format, OpenFile
{before}
class Xyz(Format):
    name = "{name}"
    def claims_path(self, path):
        {claims}
    def claims_url(self, url):
        return url.startswith("xyz://")
    def open_file(self, path, access=None):
        return File(path)
class File(OpenFile):
    def __init__(self, path):
        self.path = path
    def list_arrays(self):
        return [ArrayInfo(self.path, "/x", "{name}", (3,), "float32")]
    def open(self, dataset, planned=None):
        raise KeyError(dataset)
"""
NAMELESS = """
class Nameless(Format):
    def claims_path(self, path): return True
    def open_file(self, path, access=None): raise OSError(path)
"""
CLAIMS = "return path.endswith('.xyz')"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package with one format, as pip would leave it behind: a module, and metadata with an entry point."""
    place = tmp_path / "packages"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(registry, "_warned", set())
    modules: list[str] = []

    def make(module: str, point: str, name: str = "", before: str = "", claims: str = CLAIMS, target: str = "Xyz") -> None:
        modules.append(module)
        (place / f"{module}.py").write_text(XYZ.format(name=name or module, before=before, claims=claims))
        folder = place / f"{module}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[shardload.formats]\n{point} = {module}:{target}\n")
        registry.installed.cache_clear()
        registry.load.cache_clear()

    registry.installed.cache_clear()
    yield make
    registry.installed.cache_clear()
    registry.load.cache_clear()
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "a.xyz").write_text("data")
    return str(tmp_path / "a.xyz")


def test_a_format_of_another_package_is_found(install: Install, file: str) -> None:
    install("xyz_one", "xyz")
    assert find_array(file).format == "xyz_one" and [info.dataset for info in list_arrays(file)] == ["/x"]
    with pytest.raises(KeyError, match="/y"):
        open_source(file, "y")
    Path(file).with_suffix(".dat").write_text("data")
    with pytest.raises(SourceError, match=r"Formats that can be loaded here: HDF5, Zarr,(.*,)? xyz_one(,.*)?\."):
        find_array(str(Path(file).with_suffix(".dat")))


def test_packages_are_asked_by_name_and_no_other_is_imported(install: Install, file: str) -> None:
    install("xyz_low", "b")
    install("xyz_high", "a")
    assert find_array(file).format == "xyz_high" and "xyz_low" not in sys.modules


def test_what_is_hdf5_or_zarr_is_read_as_before_whatever_is_installed(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if a package could take our files, or a load of them read the list of packages, which takes milliseconds."""
    install("xyz_greedy", "a", claims="return True")
    for path in (write_hdf5(tmp_path / "a.h5", {"x": flat((3,))}), write_zarr(tmp_path / "a.zarr", {"x": flat((3,))})):
        with monkeypatch.context() as patch:
            patch.setattr(registry, "installed", lambda: pytest.fail("the list of packages was read"))
            assert find_array(path).format in ("HDF5", "Zarr v3")
            open_source(path, "x").close()
    assert "xyz_greedy" not in sys.modules


def test_a_url_goes_to_other_packages_first(install: Install) -> None:
    """Zarr takes any."""
    install("xyz_url", "url")
    assert [info.format for info in list_arrays("xyz://somewhere/a")] == ["xyz_url"]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"before": "import a_library_that_is_not_installed"}, "ModuleNotFoundError: No module named 'a_library_that"),
        ({"before": "raise RuntimeError('no licence')"}, "RuntimeError: no licence"),
        ({"target": "Abc"}, "AttributeError: .*Abc"),
        ({"target": "CLAIMS", "before": "CLAIMS = 3"}, "TypeError: xyz_broken:CLAIMS is a int; expected a .*Format"),
        ({"claims": "return 1 / 0"}, "when it was asked: ZeroDivisionError"),
        ({"before": "raise SystemExit(3)"}, "SystemExit: 3"),
        ({"target": "Nameless", "before": NAMELESS}, "TypeError: .* with a name"),
    ],
)
def test_a_package_that_is_broken_is_named_and_breaks_no_other(
    install: Install, file: str, tmp_path: Path, broken: dict[str, str], why: str
) -> None:
    """Wrong, too, if the list of formats in the message on a file that nobody reads failed on one without a name."""
    install("xyz_broken", "a_wrong", **broken)
    path = write_hdf5(tmp_path / "a.h5", {"x": flat((3,))})
    assert find_array(path).format == "HDF5", "nobody asks it for such a file"
    with pytest.raises(SourceError, match=rf"of an unknown format(.|\n)* not to be used: 'a_wrong' of xyz_broken 1\.0 \({why}"):
        find_array(file)
    install("xyz_fine", "fine")
    with pytest.warns(RuntimeWarning, match=rf"may be a file of 'a_wrong' of xyz_broken 1\.0 \({why}"):
        assert find_array(file).format == "xyz_fine"
    assert find_array(file).format == "xyz_fine", "said once"


def test_a_helper_process_finds_it_too(install: Install, file: str) -> None:
    """Wrong if it looked elsewhere for packages than the process that started it."""
    install("xyz_helped", "xyz")
    assert list_arrays(file, Access(untrusted=Limits()))[0].format == "xyz_helped"
    assert find_array(file, access=Access(untrusted=Limits())).format == "xyz_helped"


def test_our_own_are_imported_when_they_are_needed_and_the_list_of_packages_is_not_read(tmp_path: Path) -> None:
    path = write_hdf5(tmp_path / "a.h5", {"a": flat((3,))})
    code = (
        "import sys\nfrom shardload.formats import lookup, registry\n"
        "assert not {'h5py', 'zarr', 'importlib.metadata'} & {*sys.modules}, {*sys.modules}\n"
        "lookup.find_array(sys.argv[1])\n"
        "assert 'h5py' in sys.modules and 'zarr' not in sys.modules and 'jax' not in sys.modules\n"
        "assert registry.installed.cache_info().misses == 0\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, path], check=True, timeout=60, cwd=Path(__file__).parents[3])


def test_what_a_text_would_allow_is_refused() -> None:
    with pytest.raises(TypeError, match="allow_filters is 'all'; expected a collection of names"):
        Access(allow_filters="all")  # type: ignore[arg-type]


def test_a_warning_of_one_package_is_no_failure_of_another(install: Install, file: str) -> None:
    """Wrong where warnings are errors: a format that works would count as one that failed when it was asked."""
    install("xyz_broken", "a_broken", before="import a_library_that_is_not_installed")
    install("xyz_works", "works")
    with pytest.raises(RuntimeWarning, match="xyz_broken"):  # warnings are errors in these tests
        find_array(file)
    assert find_array(file).format == "xyz_works"
