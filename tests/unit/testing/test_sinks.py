"""Do our own sinks keep the promises that are asked of any, and does the suite find each promise that is broken?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import zarr

from shardload.errors import ConfigError
from shardload.formats.codecs.chains import EncodeChain
from shardload.formats.hdf5 import sink as hdf5_sink
from shardload.formats.saving import make_sink
from shardload.formats.sink import ArraySpec, Compression, Encoder, Sink, Stored
from shardload.storage import target
from shardload.testing import ConformanceError, check_sink
from shardload.testing.conformance import DTYPES, SHAPES
from tests.tiers import some_of
from tests.unit.saving import quick_fsync  # noqa: F401

pytestmark = pytest.mark.usefixtures("quick_fsync")


def read_hdf5(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def note(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            found[f"/{name}"] = node[()]

    with h5py.File(path) as file:
        file.visititems(note)
    return found


def read_netcdf(path: str) -> dict[str, Any]:
    with netCDF4.Dataset(path) as file:
        file.set_auto_mask(False)
        groups = {"": file, **{f"/{name}": group for name, group in file.groups.items()}}
        return {f"{prefix}/{name}": one[...] for prefix, group in groups.items() for name, one in group.variables.items()}


def read_zarr(path: str) -> dict[str, Any]:
    members = zarr.open_group(path, mode="r").members(max_depth=None)
    return {f"/{name}": one[...] for name, one in members if isinstance(one, zarr.Array)}


def gzip(spec: ArraySpec) -> ArraySpec:
    return replace(spec, compression=Compression.of({"name": "gzip", "shuffle": True}))


def sharded(spec: ArraySpec) -> ArraySpec:
    return replace(spec, shards=tuple(2 * n for n in spec.chunks or ()), compression=Compression.of("zstd"))


NETCDF_TYPES = [one for one in DTYPES if np.dtype(one).kind in "iuf" and np.dtype(one) != "f2" and np.dtype(one) != ">f2"]
FORMATS: dict[str, Any] = {  # all types once: their tests of saving have the rest
    "hdf5": (".h5", None, read_hdf5, lambda spec: spec, DTYPES),
    "hdf5 gzip": (".h5", None, read_hdf5, gzip, DTYPES[2::6]),
    "netcdf4": (".nc", None, read_netcdf, gzip, NETCDF_TYPES[::3]),
    "zarr": (".zarr", None, read_zarr, lambda spec: spec, DTYPES[::3]),
    "zarr sharded": (".zarr", None, read_zarr, sharded, DTYPES[::6]),
    "zarr2": (".zarr", "zarr2", read_zarr, gzip, DTYPES[1::6]),
}


def make(path: str, specs: Mapping[str, ArraySpec], mode: str, form: str | None = None) -> Sink:
    return make_sink(path, specs, mode=mode, format=form)


@pytest.mark.parametrize("name", FORMATS)
def test_our_own_sinks_conform(name: str, tmp_path: Path) -> None:
    suffix, form, read, change, dtypes = FORMATS[name]
    check_sink(
        lambda path, specs, mode: make(path, specs, mode, form),
        read,
        folder=tmp_path,
        suffix=suffix,
        dtypes=some_of(dtypes, 3),
        shapes=some_of([shape for shape in SHAPES if 0 not in shape or "sharded" not in name], 2),
        change=change,
    )


# Each defect changes the HDF5 sink, and breaks the promise whose words are given.


def swapped_offsets(patch: pytest.MonkeyPatch) -> None:
    allocate = hdf5_sink.Hdf5Catalog.allocate
    patch.setattr(hdf5_sink.Hdf5Catalog, "allocate", lambda *arguments: allocate(*arguments)[::-1].copy())


def stale_memory(patch: pytest.MonkeyPatch) -> None:
    encode, room = EncodeChain.encode, bytearray(1 << 16)

    def stale(self: EncodeChain, values: Any) -> Any:
        data = bytes(memoryview(encode(self, values)))
        room[: len(data)] = data
        return memoryview(room)[: len(data)]

    patch.setattr(EncodeChain, "encode", stale)


def transposed(patch: pytest.MonkeyPatch) -> None:
    encode = Encoder.encode

    def turned(self: Encoder, region: Any, values: Any) -> Stored:
        is_square = values.ndim > 1 and len(set(values.shape)) == 1
        return encode(self, region, values.T if is_square else values)

    patch.setattr(Encoder, "encode", turned)


def converted(patch: pytest.MonkeyPatch) -> None:
    encode = Encoder.encode
    patch.setattr(Encoder, "encode", lambda self, region, values: encode(self, region, values.astype(self.spec.dtype)))


def early_name(patch: pytest.MonkeyPatch) -> None:
    finish = hdf5_sink.Hdf5Catalog.finish
    patch.setattr(hdf5_sink.Hdf5Catalog, "finish", lambda self: (finish(self), self._target.commit()))
    patch.setattr(hdf5_sink.Hdf5Catalog, "commit", lambda self: None)


def left_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(target.Target, "abandon", lambda self: None)


def looked_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(target.Target, "_is_linked", lambda self, temporary: os.replace(temporary, self._final))


def any_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hdf5_sink, "check_mark", lambda *_: None)


def missing_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hdf5_sink.PlacedChunks, "check_complete", lambda self: None)
    patch.setattr(hdf5_sink.PlacedChunks, "compare", lambda self, dataset: None)


DEFECTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    swapped_offsets: "writes what the format's own library reads",
    stale_memory: "encodes a chunk as the same bytes",
    transposed: "writes what the format's own library reads",
    converted: "says what it will write",
    early_name: "gives the file its name at the end",
    left_behind: "gives the file its name at the end",
    looked_first: "replaces a file as a whole, or refuses to",
    any_token: "shows a writer which temporary is meant",
    missing_chunks: "notices chunks without a place",
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_found_and_named(defect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    with pytest.raises(ConformanceError) as caught, contextlib.suppress(ConfigError):
        check_sink(make, read_hdf5, folder=tmp_path, suffix=".h5", dtypes=["int16"], shapes=[(5, 7), (6, 6)], change=gzip)
    assert f"- It {DEFECTS[defect]}" in str(caught.value), str(caught.value)
