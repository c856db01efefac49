"""Is anything that is in a file neither in its copy, nor named by what the copy reports?

`SOURCES` is a table of odd files: a row more is a function that writes one. Each is copied to each of `TARGETS`. All that h5py,
or zarr-python, finds in the file is looked up in the copy (`inventory`): groups, arrays with their values, text, links, named
types, names of axes, coordinates, labels, axes that can grow, and every attribute. What is missing there, or differs, must be
named.
"""

from __future__ import annotations

import base64
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import zarr

import shardload

Key = tuple[Any, ...]
TARGETS = {"out.h5": "hdf5", "out.nc": "netcdf4", "out.zarr": "zarr"}
# Arrays that the format of the copy cannot hold, in the order of the errors.
REFUSED = {
    ("types.h5", "netcdf4"): ["complex", "half"],
    ("three.zarr", "netcdf4"): ["complex", "half"],
    ("two.zarr", "netcdf4"): ["complex", "half"],
    ("groups.h5", "netcdf4"): [" leading", "e" * 300],
    ("groups.h5", "zarr"): ["e" * 300],
}
NO_VARIABLE = b"This is a netCDF dimension but not a netCDF variable"
X = np.arange(20.0).reshape(4, 5)


# --- odd files


def scales(path: Path) -> None:
    """As Dedalus and others write: scales in a group of their own, several on an axis, with labels and names of their own."""
    with h5py.File(path, "w") as file:
        for name, values, told in (("t", X[:, 0], "Time [s]"), ("step", np.arange(4), "step"), ("y", np.arange(5), "y")):
            file[f"scales/{name}"] = values
            file[f"scales/{name}"].make_scale(told)
        file["scales/words"] = list("abcde")
        file["scales/words"].make_scale("words")
        file["scales/grid"] = X
        file["scales/grid"].make_scale("grid")
        file["scales/unused"] = 3.5
        file["scales/unused"].make_scale("of nothing")
        for name in ("tasks/b", "tasks/deep/c"):
            one = file.create_dataset(name, data=X)
            one.dims[0].label = "time axis"
            for axis, names in enumerate((("t", "step", "grid"), ("y", "words"))):
                for scale in names:
                    one.dims[axis].attach_scale(file[f"scales/{scale}"])
        other = file.create_dataset("other/longer", data=np.arange(6.0))
        other.dims[0].attach_scale(file["scales/t"])
        file.create_dataset("labelled", data=X).dims[1].label = "y"
        beside = file.create_dataset("y", data=np.arange(5))
        beside.make_scale("y")
        near = file.create_dataset("near", data=X)
        near.dims[1].attach_scale(beside)
        near.dims[1].attach_scale(file["scales/y"])


def texts(path: Path) -> None:
    """Text of each kind, in arrays and attributes."""
    with h5py.File(path, "w") as file:
        file["x"] = X
        file["one"] = "Zürich"
        file["one"].attrs.update({"spatial_ref": "PROJCS[...]", "number": np.float32(2.5), "row": [1, 2]})
        file["fixed"] = np.array([b"ab", b"c"])
        file["utf8"] = np.array("Zürich".encode(), h5py.string_dtype("utf-8", 9))
        file["none"] = np.array([], "S3")
        file.create_dataset("chunked", data=["a", "bb"] * 50, chunks=(7,), compression="gzip", maxshape=(None,))
        file["bytes"] = np.array([b"\xff\xfe"])
        file["long"] = np.full(1 << 19, b"abc")
        attrs = {"empty": "", "rows": ["a", "b"], "bytes": np.bytes_("K"), "null": h5py.Empty("S1"), "raw": np.bytes_(b"\xff")}
        file["x"].attrs.update({**attrs, "many": ["ä", "ö"], "long": "l" * 70_000, "none": np.array([], "f4")})


def links(path: Path) -> None:
    """Everything that has another name."""
    with h5py.File(path, "w") as file:
        file["a/x"] = X
        file["soft"], file["gone"], file["out"] = h5py.SoftLink("/a/x"), h5py.SoftLink("/no"), h5py.ExternalLink("o.h5", "/x")
        file["a/up"] = file["/"]
        file["hard"] = file["a/x"]
        file["b"] = file["a"]


def types(path: Path) -> None:
    """Values and attributes of types that not every format has."""
    with h5py.File(path, "w") as file:
        file["x"] = X
        file["named"] = np.dtype("f4")
        file["of named"] = h5py.Empty("f4")
        file["half"], file["complex"], file["flags"] = X.astype("f2"), X * 1j, X > 3
        file["long"], file["big"] = X.astype("f16"), X.astype(">i4")
        file.create_dataset("kinds", data=[0, 1], dtype=h5py.enum_dtype({"sea": 0, "land": 1}, basetype="i1"))
        file["records"] = np.zeros(3, [("a", "i4"), ("b", "f8")])
        file["opaque"] = np.zeros(3, "V5")
        file.create_dataset("references", data=[file["x"].ref], dtype=h5py.ref_dtype)
        file.create_dataset("lists", shape=(2,), dtype=h5py.vlen_dtype("i4"))
        h5py.h5d.create(file.id, b"three", h5py.h5t.STD_I32LE.copy(), h5py.h5s.create_simple((2,)))
        odd = h5py.h5t.STD_I32LE.copy()
        odd.set_size(3)
        h5py.h5d.create(file.id, b"three bytes", odd, h5py.h5s.create_simple((2,)))
        h5py.h5d.create(file.id, b"bits", h5py.h5t.STD_B16LE, h5py.h5s.create_simple((2,)))
        attrs: dict[str, Any] = {"reference": file["x"].ref, "record": np.zeros(1, [("a", "i4")])[0], "half": np.float16(2)}
        attrs |= {
            "complex": 2 + 3j,
            "flag": True,
            "square": np.eye(2),
            "nan": np.nan,
            "table": np.zeros(8000),
            "i1": np.int8(3),
        }
        attrs |= {"region": file["x"].regionref[0:2], "opaque": np.void(b"abc"), "u8": np.uint64(2**64 - 1)}
        file["x"].attrs.update(attrs)
        file["x"].attrs.create("kind", 1, dtype=h5py.enum_dtype({"dry": 0, "wet": 1}, basetype="i1"))
        file.attrs.update({"reference": file.ref, "square": np.eye(2)})
        file["fill"] = X
        file["fill"].attrs.update({"_FillValue": X[1, 1], "valid_range": np.array([0.0, 9.0])})


def groups(path: Path) -> None:
    """Groups without arrays, and attributes whose names HDF5 has itself (as PyTables has them)."""
    with h5py.File(path, "w") as file:
        file.create_group("empty/deep")
        file.create_group("tagged").attrs.update({"CLASS": "GROUP", "NAME": "mine", "VERSION": "1.0"})
        file["tagged/x"] = X
        file["tagged/x"].attrs.update({"CLASS": "ARRAY", "TITLE": "", "FLAVOR": "numpy"})
        file["a b/ç d"] = X
        file[" leading"] = X
        file["e" * 300] = X
        file.create_group(" blank").attrs["n"] = 1


def climate(path: Path) -> None:
    """netCDF4, with what CF has."""
    with netCDF4.Dataset(path, "w") as file:
        for name, n in (("time", None), ("y", 4), ("x", 5), ("bnds", 2), ("unused", 7), ("strlen", 6), ("station", 3)):
            file.createDimension(name, n)
        file.title = "a file"
        time = file.createVariable("time", "i4", ("time",))
        time.units, time.bounds, time[:] = "days since 2000-01-01", "time_bnds", np.arange(3)
        file.createVariable("time_bnds", "i4", ("time", "bnds"))[:] = np.arange(6).reshape(3, 2)
        crs = file.createVariable("crs", "S1")
        crs.grid_mapping_name, crs.earth_radius = "latitude_longitude", 6.371e6
        file.createVariable("lon2", "f4", ("y", "x"))[:] = X
        names = file.createVariable("names", "S1", ("station", "strlen"))
        names[:] = netCDF4.stringtochar(np.array(["Bern", "Geneva", ""], "S6"))
        names.cf_role = "timeseries_id"
        file.createVariable("station", str, ("station",))[:] = np.array(["a", "b", "cd"], object)
        v = file.createVariable("v", "f4", ("time", "y", "x"), fill_value=-9, chunksizes=(1, 4, 5))
        v.grid_mapping, v.coordinates, v.units, v[:] = "crs", "lon2", "K", np.arange(60.0).reshape(3, 4, 5)
        file.createVariable("y", "f4", ("x",))[:] = np.arange(5)  # has the name of an axis, and is not its coordinate
        below = file.createGroup("below")
        below.institute = "here"
        w = below.createVariable("w", "f8", ("time", "x"))
        w.ancillary, w[:] = np.array([1, 2], "i2"), np.arange(15.0).reshape(3, 5)
        below.createGroup("empty")
        record = file.createCompoundType(np.dtype([("a", "i4")]), "record")
        file.createVariable("records", record, ("x",))
        enum = file.createEnumType("i1", "cloud_t", {"clear": 0, "cloudy": 1})
        file.createVariable("cloud", enum, ("x",))[:] = np.array([0, 1, 0, 1, 1], "i1")
        ragged = file.createVLType("i4", "ragged_t")
        file.createVariable("ragged", ragged, ("x",))


def _store(path: Path, version: int) -> None:
    root = zarr.open_group(path, mode="w", zarr_format=version)
    attrs: dict[str, Any] = {
        "null": None,
        "object": {"a": [1, {}]},
        "ragged": [[1, 2], [3]],
        "mixed": [1, "a"],
        "large": 10**30,
        "rounded": [2**53 + 1, 0.5],
        "words of two": [["a"], ["b", "c"]],
        "cube": [[[1.5]]],
        "words": [["a", "b"], ["c", "d"]],
    }
    attrs |= {"rows": [[1, 2], [3, 4]], "texts": ["a", "b"], "none": [], "flag": True, "flags": [True, False], "text": "Zürich"}
    attrs |= {"many": list(range(9000)), "CLASS": "mine", "_NCProperties": "x", "zero\0byte": 1, "cut": "a\0b", "": 3}
    root.attrs.update({**attrs, "title": "a store"})

    def create(name: str, values: Any, dims: list[str], **more: Any) -> Any:
        named = {"dimension_names": dims} if version == 3 else {}
        one = root.create_array(
            name, shape=np.shape(values), dtype=more.pop("dtype", np.asarray(values).dtype), **named, **more
        )
        one[...] = values
        if version == 2:
            one.attrs["_ARRAY_DIMENSIONS"] = dims
        return one

    create("x", X, ["y", "x"]).attrs.update(attrs)
    create("y", np.arange(4), ["y"])
    create("fill", X, ["y", "x"], fill_value=3.0)
    create("flags", X > 3, ["y", "x"]).attrs["long_name"] = "sea"
    create("complex", X * 1j, ["y", "x"])
    create("half", X.astype("f2"), ["y", "x"])
    create("g/deep/z", X, ["y", "x"]).attrs["coordinates"] = "lon"
    create("g/deep/lon", X, ["y", "x"])
    create("fixed", np.array(["ab", "c", "d", "é"]), ["y"])
    create("bytes", np.array([b"ab", b"c", b"d", b"e"]), ["y"])
    create("words", np.array(["ab", "c", "Zürich", ""], object), ["y"], dtype="str").attrs["standard_name"] = "region"
    create("days", np.zeros(4, "M8[D]"), ["y"])
    create("spans", np.zeros(4, "m8[s]"), ["y"])
    create("records", np.zeros(4, [("a", "i4"), ("b", "f8")]), ["y"])
    create("__x", X, ["y", "x"])
    create("of/\u00e4 b", X, ["a b", "x"])
    root.create_group("empty/deep").attrs["n"] = 1
    root.create_group("bare")


SOURCES: dict[str, Callable[[Path], None]] = {
    "scales.h5": scales,
    "texts.h5": texts,
    "links.h5": links,
    "types.h5": types,
    "groups.h5": groups,
    "climate.nc": climate,
    "three.zarr": lambda path: _store(path, 3),
    "two.zarr": lambda path: _store(path, 2),
}


# --- what is in a file

_OF_HDF5 = {"REFERENCE_LIST", "DIMENSION_LIST", "DIMENSION_LABELS"}
_OF_NETCDF = {"_NCProperties", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_nc3_strict"}
_PREFIX = "_nc4_non_coord_"


def inventory(path: Path) -> dict[Key, Any]:
    """All that is in a file: by kind and name, with its value."""
    if path.suffix == ".zarr":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dict(_of_store(zarr.open_group(path, mode="r", use_consolidated=False)))
    with h5py.File(path) as file:
        return dict(_of_hdf5(file, "_NCProperties" in file.attrs))


def _named(attrs: Any, group: str, there: Callable[[str], bool]) -> Iterator[str]:
    """The arrays that ``coordinates`` names, in this group or above."""
    told = _plain(attrs["coordinates"]) if "coordinates" in attrs else ""
    for word in str(told).split():
        above, place = group, word if word.startswith("/") else f"{group}/{word}"
        while not there(place) and above and not word.startswith("/"):
            above = above.rpartition("/")[0]
            place = f"{above}/{word}"
        yield place


def _of_hdf5(file: h5py.File, is_netcdf: bool) -> Iterator[tuple[Key, Any]]:
    seen: dict[int, str] = {}
    yield from _attributes_of_hdf5(file, "/")

    def walk(group: h5py.Group, above: str) -> Iterator[tuple[Key, Any]]:
        for last in group:
            name = f"{above}/{last}"
            if not isinstance(group.get(last, getlink=True), h5py.HardLink):
                yield ("link", name), "?"
                continue
            one = group[last]
            address = h5py.h5o.get_info(one.id).addr
            if address in seen or one == file:
                yield ("other name", name), seen.get(address, "/")
                continue
            seen[address] = name
            if isinstance(one, h5py.Group):
                yield ("group", name), True
                yield from _attributes_of_hdf5(one, name)
                yield from walk(one, name)
            elif isinstance(one, h5py.Datatype):
                yield ("type", name), True
            else:
                yield from _array_of_hdf5(file, one, name, is_netcdf)

    yield from walk(file, "")


def _is_valueless(one: h5py.Dataset) -> bool:
    return bool(np.asarray(one.attrs.get("NAME", b"")).astype("S").item().startswith(NO_VARIABLE))


def _array_of_hdf5(file: h5py.File, one: h5py.Dataset, name: str, is_netcdf: bool) -> Iterator[tuple[Key, Any]]:
    group, last = name.rpartition("/")[0], name.rpartition("/")[2]
    is_scale = one.is_scale
    if is_scale and _is_valueless(one):
        yield ("dimension", name), True
        return
    name = f"{group}/{last.removeprefix(_PREFIX)}"
    try:
        values: Any = one[()]
    except (OSError, TypeError, ValueError):
        values = "?"
    is_text = h5py.check_string_dtype(one.dtype) is not None if one.id.get_type().get_class() == h5py.h5t.STRING else False
    if is_text and one.dtype == "S1" and one.ndim > 1:  # as netCDF has text
        values = np.ascontiguousarray(values).view(f"S{one.shape[-1]}")[..., 0]
    is_bool = np.asarray(one.attrs.get("dtype", b"")).astype("S").item() == b"bool"
    yield ("array", name), _normal(np.asarray(values).astype(bool) if is_bool else values)
    if h5py.check_enum_dtype(_type(one)) not in (None, {"FALSE": 0, "TRUE": 1}):
        yield ("enumeration", name), True
    scales = [[file[file[ref].name].name for ref in refs] for refs in one.attrs.get("DIMENSION_LIST", [])]
    coordinates = {scale for axis in scales for scale in axis if not _is_valueless(file[scale])}
    coordinates.update(_named(one.attrs, group, lambda place: place in file))
    for scale in coordinates:
        yield ("coordinate", name, scale), True
    for axis in range(one.ndim):
        label = one.dims[axis].label
        if label:
            yield ("label", name, axis), label
        own = [last] * (is_scale and one.ndim == 1)
        if scales and scales[axis]:
            own = [label if label and _is_valueless(file[scales[axis][0]]) else scales[axis][0].rpartition("/")[2]]
        if own or label:
            yield ("axis", name, axis), own[0] if own else label
        if one.maxshape[axis] is None:
            yield ("can grow", name, axis), True
    if is_scale:
        yield ("scale", name), h5py.h5ds.get_scale_name(one.id).decode()
    yield from _attributes_of_hdf5(one, name)


def _type(one: h5py.Dataset) -> Any:
    try:
        return one.dtype
    except TypeError:
        return np.dtype("f8")


def _attributes_of_hdf5(owner: Any, name: str) -> Iterator[tuple[Key, Any]]:
    is_scale = isinstance(owner, h5py.Dataset) and owner.is_scale
    for key in owner.attrs:
        if key in _OF_HDF5 or key in _OF_NETCDF or (is_scale and key in ("CLASS", "NAME")):
            continue
        yield ("attribute", name, key), _normal(owner.attrs[key])


def _of_store(root: zarr.Group) -> Iterator[tuple[Key, Any]]:
    for key, value in root.attrs.items():
        yield ("attribute", "/", key), _normal(value)
    members = dict(root.members(max_depth=None))
    for name, one in members.items():
        name = f"/{name}"
        attrs = dict(one.attrs)
        if isinstance(one, zarr.Group):
            yield ("group", name), True
        else:
            group, is_three = name.rpartition("/")[0], one.metadata.zarr_format == 3
            dims = one.metadata.dimension_names if is_three else attrs.pop("_ARRAY_DIMENSIONS", None)
            yield ("array", name), _normal(one[...])
            for axis, dim in enumerate(dims or ()):
                if dim:
                    yield ("axis", name, axis), dim
                beside = members.get(f"{group}/{dim}".lstrip("/"))
                if f"{group}/{dim}" != name and beside is not None and beside.ndim == 1:
                    yield ("coordinate", name, f"{group}/{dim}"), True
            for place in _named(attrs, group, lambda place: place.lstrip("/") in members):
                yield ("coordinate", name, place), True
            if not is_three and one.metadata.fill_value is not None and one.dtype.kind in "iufc":
                attrs["_FillValue"] = one.metadata.fill_value
            elif isinstance(attrs.get("_FillValue"), str):
                attrs["_FillValue"] = _number(attrs["_FillValue"])
            elif isinstance(attrs.get("_FillValue"), list):
                attrs["_FillValue"] = complex(*map(_number, attrs["_FillValue"]))
        for key, value in attrs.items():
            yield ("attribute", name, key), _normal(value)


def _number(text: str) -> float:
    """As xarray writes a ``_FillValue``."""
    return float(struct.unpack("<d", base64.b64decode(text))[0])


def _plain(value: Any) -> Any:
    """As Python has it: an array of one element is that element, bytes are text if they can be."""
    if isinstance(value, h5py.Empty):
        return "" if value.dtype.kind in "SO" else []
    if isinstance(value, np.ndarray | np.generic) and value.dtype.names is None:
        value = value.tolist()
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], list):
        return _plain(value[0])
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _normal(value: Any) -> Any:
    """Something that is equal to itself in another format."""
    return repr(_plain(value))


# --- the test


def _told(key: Key, notes: str) -> bool:
    """Whether the notes name a thing: by its name, and that of the attribute."""
    kind, name, *rest = key
    shown = f"'{name}'" if name != "/" else ""
    if kind == "attribute" and f"the attributes of group '{name}'" in notes:
        return True
    words = {"attribute": [f"{rest[0]!r}" if rest else ""], "coordinate": [f"'{rest[0]}'" if rest else ""], "label": ["label"]}
    words |= {"scale": ["as a dimension scale"], "enumeration": ["enumeration"], "type": ["named type"], "group": ["group"]}
    lines = [line for line in notes.splitlines() if shown in line]
    return any(all(word in line for word in words.get(kind, [])) for line in lines)


def lost(before: Mapping[Key, Any], after: Mapping[Key, Any], notes: str, kind: str) -> list[str]:
    """What of a file is neither in its copy nor named."""
    found = []
    left_out = {key[1] for key in before if key[0] == "array" and key not in after and _told(key, notes)}
    for key, value in before.items():
        if key[1] in left_out or (key[0] == "coordinate" and key[2] in left_out):
            continue  # with all that belongs to it
        is_there = key in after and (key[0] in ("link", "other name") or after[key] == value)
        if key[0] == "dimension":  # it is there where an axis has its name
            last = key[1].rpartition("/")[2]
            is_there = is_there or any(other[0] == "axis" and after[other] == last for other in after)
        if kind == "netcdf4" and key[0] == "attribute" and key in after:  # which has no booleans there
            is_there = is_there or after[key] == value.replace("True", "1").replace("False", "0")
        if kind != "hdf5":
            if key[0] == "scale":  # they are coordinates there
                is_there = is_there or value in ("", key[1].rpartition("/")[2])
            if key[0] == "label":  # and axes have names
                is_there = is_there or after.get(("axis", *key[1:])) == value
            if key[0] == "can grow" and kind.startswith("zarr"):  # as every axis there
                is_there = True
        if key[0] == "attribute" and key[2] == "coordinates" and key in after:
            is_there = is_there or set(eval(value).split()) <= set(eval(after[key]).split())
        if not (is_there or _told(key, notes)):
            found.append(f"{key}: {str(value)[:60]} -> {str(after.get(key, 'nothing'))[:60]}")
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_nothing_is_left_out_without_a_word(tmp_path: Path, source: str, target: str) -> None:
    """Wrong if something of the file were neither in the copy nor named."""
    (tmp_path / "out").mkdir()
    before, after = tmp_path / source, tmp_path / "out" / target
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr-python's, about types that other programs may not know
        SOURCES[source](before)
    kind = TARGETS[target]
    for name in REFUSED.get((source, kind), ()):
        with pytest.raises(shardload.ConfigError, match=rf"'/{name}'.* with dataset="):
            shardload.copy(str(before), str(after), format=kind)
        with h5py.File(before, "r+") if before.suffix == ".h5" else nullcontext(zarr.open_group(before, mode="r+")) as file:
            del file[name]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("error")
        warnings.simplefilter("always", shardload.LeftOutWarning)
        shardload.copy(str(before), str(after), format=kind, compression=None, verify="full")
    notes = "\n".join(str(warning.message) for warning in said)
    assert lost(inventory(before), inventory(after), notes, kind) == [], notes
