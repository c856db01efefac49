"""Do the programs that everybody has open what was saved, and print what it is: `h5dump`, `ncdump`?

Without a line of Python in between: types, shapes, chunks, filters, attributes and names of axes are compared
with what was asked for. (Values: `test_save.py`, by h5py and netCDF4.)
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardload
from tests.mpi.support import cube, mesh_of, on_root, put, ramp

pytestmark = [pytest.mark.any_library, pytest.mark.any_version]

DIMS = ("z", "y", "x")
CHUNKS = (3, 5, 7)  # divide no axis
# Of each name: its type in JAX, in h5dump, and in ncdump (netCDF4 has neither bool nor complex).
TYPES = {
    "f4": ("float32", "H5T_IEEE_F32LE", "float"),
    "i2": ("int16", "H5T_STD_I16LE", "short"),
    "u1": ("uint8", "H5T_STD_U8LE", "ubyte"),
    "i4": ("int32", "H5T_STD_I32LE", "int"),
}
ONLY_HDF5 = {
    "flag": ("bool", '"FALSE"', ""),
    "c8": ("complex64", 'H5T_IEEE_F32LE "i"', ""),
    "f2": ("float16", "16-bit little-endian floating-point", ""),
}
# What is asked for, and what h5dump and ncdump say of it.
FILTERS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "f4": (
        {"name": "gzip", "level": 6, "shuffle": True},
        ["SHUFFLE", "DEFLATE { LEVEL 6 }"],
        ["_Shuffle", "_DeflateLevel = 6"],
    ),
    "i2": ({"name": "zstd"}, ["FILTER_ID 32015"], ["32015"]),
    "u1": ({"name": "gzip", "level": 1}, ["DEFLATE { LEVEL 1 }"], ["_DeflateLevel = 1"]),
}


def told_by(*command: Any) -> str:
    """What a program prints, with all white space as single blanks. An error if it fails, or complains."""
    said = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, timeout=60)
    assert said.stderr == "", said.stderr
    return " ".join(said.stdout.split())


def block(text: str, name: str) -> str:
    """What h5dump says of one dataset: up to the brace that closes it."""
    begin = text.index(f'DATASET "{name}" {{')
    depth = 0
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0 and text[at] == "}":
            return text[begin : at + 1]
    raise ValueError(f"{name} does not end in {text}")


def tree_of(types: dict[str, Any]) -> dict[str, Any]:
    """An array of each type, one in a group, with a coordinate."""
    x = {name: put(ramp(cube(), dtype), mesh_of(), P("a", "b")) for name, (dtype, *_) in types.items()}
    x["g/deep"] = put(ramp(cube()), mesh_of(), P(None, "a", "b"))
    return x | {"z": np.arange(cube()[0], dtype="float64") / 4}


def how_for(tree: dict[str, Any]) -> dict[str, Any]:
    """Chunks, filters, names of axes, attributes."""
    return {
        "chunks": {name: CHUNKS for name in FILTERS},
        "compression": {name: asked for name, (asked, *_) in FILTERS.items()},
        "dims": {name: ("z",) if name == "z" else DIMS for name in tree},
        "attrs": {
            "f4": {"units": "kg m-3", "three": np.arange(3, dtype="int16"), "half": np.float32(0.5)},
            "z": {"units": "m"},
            "/": {"title": "a run"},
        },
    }


@pytest.mark.programs("h5dump")
def test_h5dump(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if an array had another type, shape, layout or filter than was asked for, or another's; or if names were lost."""
    types = TYPES | ONLY_HDF5
    path, tree, shape = shared_tmp_path / "out.h5", tree_of(types), cube()
    shardload.save(path, tree, **how_for(tree))

    def look() -> None:
        said = told_by("h5dump", "-H", "-p", path)
        extent = "{} / {}".format(*[f"( {', '.join(map(str, shape))} )"] * 2)
        for name, (_, kind, _) in types.items():
            one = block(said, name)
            head, layout = one.split("DATASPACE", 1)
            assert kind in head, one
            assert layout.startswith(f" SIMPLE {{ {extent} }}"), one
            _, filters, _ = FILTERS.get(name, ({}, [], []))
            chunked = f"CHUNKED ( {', '.join(map(str, CHUNKS))} )"
            assert (chunked in one) == bool(filters) and ("CONTIGUOUS" in one) != bool(filters), one
            assert all(text in one for text in filters), one
            assert filters or "FILTERS { NONE }" in one, one
            assert one.count("COMPRESSION DEFLATE") == ("gzip" in str(FILTERS.get(name))), one
            assert 'ATTRIBUTE "DIMENSION_LABELS"' not in one and 'ATTRIBUTE "DIMENSION_LIST"' in one, one
        one = block(said, "f4")
        assert re.search(r'ATTRIBUTE "three" \{ DATATYPE H5T_STD_I16LE DATASPACE SIMPLE \{ \( 3 \) / \( 3 \) \}', one), one
        assert re.search(r'ATTRIBUTE "half" \{ DATATYPE H5T_IEEE_F32LE DATASPACE SCALAR', one), one
        assert re.search(r'GROUP "g" \{ DATASET "deep" \{', said) and 'ATTRIBUTE "title"' in said, said

    on_root(comm, look)


@pytest.mark.programs("ncdump")
def test_ncdump(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if netCDF's own library found other dimensions, types, chunks, filters or attributes."""
    path, tree, shape = shared_tmp_path / "out.nc", tree_of(TYPES), cube()
    shardload.save(path, tree, **how_for(tree))

    def look() -> None:
        said = told_by("ncdump", "-h", "-s", path)
        for name, n in zip(DIMS, shape, strict=True):
            assert f" {name} = {n} ;" in said, said
        for name, (_, _, kind) in TYPES.items():
            assert f"{kind} {name}(z, y, x) ;" in said, said
            _, _, filters = FILTERS.get(name, ({}, [], []))
            mine = " ".join(re.findall(rf"(?<= ){name}:[^;]*;", said))
            told = f"{name}:_ChunkSizes = {', '.join(map(str, CHUNKS))} ;" if filters else f'{name}:_Storage = "contiguous" ;'
            assert told in mine, mine
            assert all(text in mine for text in filters), mine
            assert mine.count("_DeflateLevel") == ("gzip" in str(FILTERS.get(name))), mine
        for text in (
            'f4:units = "kg m-3" ;',
            "f4:three = 0s, 1s, 2s ;",
            "f4:half = 0.5f ;",
            "double z(z) ;",
            'z:units = "m" ;',
        ):
            assert text in said, (text, said)
        assert ':title = "a run" ;' in said and '_Format = "netCDF-4" ;' in said, said
        assert re.search(r"group: g \{ variables: float deep\(z, y, x\) ;", said), said

    on_root(comm, look)
