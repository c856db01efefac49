"""Are attributes of any type survived, and the names of axes those of the dimension scales that are there?"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import shardload
from shardload.formats.lookup import find_array, open_source
from tests.jobs.launch import ROOT
from tests.tiers import IS_QUICK
from tests.unit.copies import run_copy


def written(path: Path, key: str, value: Any, **how: Any) -> str:
    """A file with two arrays of two axes, of which the first has this attribute; `value` may be made from the open file."""
    with h5py.File(path, "w") as file:
        for name in ("lat", "lon"):
            file[name] = np.arange(4.0)
        for name in ("a", "beside"):
            file[name] = np.arange(16.0).reshape(4, 4)
            file[name].attrs["units"] = "K"
        file["a"].attrs.create(key, value(file) if callable(value) else value, **how)
        file["lat"].make_scale("lat")
        file["beside"].dims[0].attach_scale(file["lat"])
        file["beside"].dims[1].label = "row"
    return str(path)


def one_list(references: list[Any], dtype: Any) -> Any:
    """An array of one list of references."""
    lists = np.empty(1, object)
    lists[0] = np.array(references, dtype)
    return lists


# What HDF5's own functions take for something else: the process would end.
STRANGE: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "references, as h4toh5 writes": (
        "DIMENSION_LIST",
        lambda file: np.array([file["lat"].ref, file["lon"].ref], h5py.ref_dtype),
        {"dtype": h5py.ref_dtype},
    ),
    "one reference": ("DIMENSION_LIST", lambda file: file["lat"].ref, {"dtype": h5py.ref_dtype}),
    "texts": ("DIMENSION_LIST", np.array([b"latitude.", b"longitude"]), {}),
    "one text": ("DIMENSION_LIST", "lat lon", {}),
    "integers": ("DIMENSION_LIST", np.full(2, 1 << 40), {}),
    "of one axis": (
        "DIMENSION_LIST",
        lambda file: one_list([file["lat"].ref], h5py.ref_dtype),
        {"dtype": h5py.vlen_dtype(h5py.ref_dtype)},
    ),
    "labels that are integers": ("DIMENSION_LABELS", np.full(2, 1 << 40), {}),
    "labels of one axis": ("DIMENSION_LABELS", np.array([b"lat"]), {}),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_dimension_scales_of_another_type(tmp_path: Path, kind: str) -> None:
    """Wrong if the process ended, the other array lost its names, or these were lost without a word."""
    key, value, how = STRANGE[kind]
    path = written(tmp_path / "a.h5", key, value, **how)
    found = shardload.open(path)
    assert found["a"].dims == (None, None) and found["a"].attrs["units"] == "K"
    assert key in found["a"].attrs["names of axes"]
    assert found["beside"].dims == ("lat", "row") and dict(found["beside"].attrs) == {"units": "K"}
    assert find_array(path, "a").shape == (4, 4)
    (unread,) = open_source(path, "a").properties().unread
    assert key in unread


def test_labels_of_fixed_length(tmp_path: Path) -> None:
    """HDF5's own function reads them as pointers. They are texts, so they are the names."""
    path = written(tmp_path / "a.h5", "DIMENSION_LABELS", np.array([b"latitude.", b"longitude"]))
    assert shardload.open(path)["a"].dims == ("latitude.", "longitude")


def test_attributes_that_are_lists_of_references(tmp_path: Path) -> None:
    """h5py 3.16 corrupts its memory when it reads such an attribute."""

    def lists(file: h5py.File) -> Any:
        return one_list([file["beside"].regionref[0:2, 1]], h5py.regionref_dtype)

    path = written(tmp_path / "a.h5", "refs", lists, dtype=h5py.vlen_dtype(h5py.regionref_dtype))
    found = shardload.open(path)["a"]
    assert dict(found.attrs) == {"refs": "neither text nor numbers", "units": "K"}
    assert open_source(path, "a").properties().unread == ("attribute 'refs' of '/a' (neither text nor numbers)",)


def test_scales_that_are_gone(tmp_path: Path) -> None:
    """One axis without its scale must not cost the others their names, nor the array its attributes."""
    with h5py.File(tmp_path / "whole.h5", "w") as file:
        for name in ("lat", "lon"):
            file[name] = np.arange(4.0)
            file[name].make_scale(name)
        file["t"] = np.zeros((4, 4, 4), "f4")
        file["t"].attrs.update(units="K", long_name="air temperature", cell_methods="time: mean")
        nameless = file.create_dataset(None, data=np.arange(4.0))
        nameless.make_scale("z")
        for axis, scale in enumerate((file["lat"], nameless, file["lon"])):
            file["t"].dims[axis].attach_scale(scale)
    with h5py.File(tmp_path / "whole.h5") as file, h5py.File(tmp_path / "copied.h5", "w") as target:
        file.copy("t", target)
        author_s = {key: file["t"].attrs[key] for key in ("units", "long_name", "cell_methods")}
    shutil.copy(tmp_path / "whole.h5", tmp_path / "deleted.h5")
    with h5py.File(tmp_path / "deleted.h5", "r+") as file:
        del file["lat"]
    expected = {
        "whole": (("lat", None, "lon"), [1]),
        "copied": ((None,) * 3, [0, 1, 2]),
        "deleted": ((None, None, "lon"), [0, 1]),
    }
    for name, (dims, gone) in expected.items():
        found = shardload.open(tmp_path / f"{name}.h5")["t"]
        why = f"the dimension scales of axes {gone} are not in the file"
        assert found.dims == dims and dict(found.attrs) == {**author_s, "names of axes": why}
        assert list(found.coords) == [dim for dim in dims if dim]
        properties = open_source(str(tmp_path / f"{name}.h5"), "t").properties()
        assert properties.unread == (f"what axes of '/t' are called ({why})",) and properties.dims == dims


def test_damaged_attributes_of_the_file_do_not_hide_its_arrays(tmp_path: Path) -> None:
    """HDF5 refuses to look for any attribute of a group where one has a type that it takes for damage."""
    number = h5py.h5t.STD_I32LE.copy()
    number.set_size(16)
    number.set_precision(7)
    odd = h5py.h5t.array_create(number, (2,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.arange(3.0)
        h5py.h5a.create(file.id, b"odd", odd, h5py.h5s.create(h5py.h5s.SCALAR))
    with h5py.File(tmp_path / "a.h5") as file, pytest.raises(RuntimeError, match="unused bits"):
        h5py.h5a.exists(file.id, b"title")
    found = shardload.open(tmp_path / "a.h5")
    assert list(found) == ["/a"] and found["a"].refused is None and dict(found.attrs) == {}


def test_files_with_attributes_of_any_type() -> None:
    """A few of ``python -m tests.fuzz_attributes``."""
    n_files = 5 if IS_QUICK else 12
    done = run_copy(["-m", "tests.fuzz_attributes", "--files", str(n_files)], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{n_files} files, 6 readers: 0 wrong\n"), done
