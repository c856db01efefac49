"""The benchmark of streams: its files, its check of what a way gives. Without MPI's other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import zarr

from benchmarks.cases import streams as cases
from benchmarks.cases.streams import (
    MAP,
    NAME,
    STREAM_PEERS,
    STREAM_WAYS,
    StreamCell,
    make_stream_files,
    values_at,
)
from benchmarks.peers import stream_run
from benchmarks.peers.streamers import WAYS, Asked, Feed, missing
from tests.tiers import quick_ones

N_STEPS = 80
ONE = {"data": 1, "lat": 1, "lon": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_stream_files(tmp_path_factory.mktemp("data"), N_STEPS, ["zstd-40", "zstd-1", "gzip-40"])


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(cases.MESHES, "one", ONE)
    monkeypatch.setattr(jax, "devices", lambda *_: jax.local_devices()[:1])
    stream_run.mesh_of.cache_clear()
    yield
    stream_run.mesh_of.cache_clear()


def request(files: dict[str, Any], way: str, layout: str = "zstd-40", **how: Any) -> dict[str, Any]:
    cell = StreamCell("a test", layout, "one", **how)
    return {"way": way, "cell": cell.request(), "file": files[layout].request(), "n": 2, "step": 0.0, "check": True}


def test_values_follow_from_their_place(files: dict[str, Any]) -> None:
    array: Any = zarr.open_array(files["zstd-40"].path / NAME, mode="r")
    assert array.shape == (N_STEPS, *MAP)
    cut = slice(2, 5), slice(10, 12), slice(100, 128)
    np.testing.assert_array_equal(array[(slice(38, 43), *cut)], values_at(np.arange(38, 43), cut))
    step = array[3]
    assert len(np.unique(step)) > 3000
    assert not np.array_equal(step, array[4])


@pytest.mark.parametrize("way", quick_ones([way for way in STREAM_WAYS if way != "mosaic"], "shardload", "slice"))
def test_each_way_gives_the_samples_that_it_names(files: dict[str, Any], way: str) -> None:
    how: dict[str, Any] = {"shuffled": way != "grain", "has_window": way not in ("tensorstore", "memory")}
    if why := missing(way):
        pytest.skip(why)
    told = stream_run.stream(request(files, way, "zstd-1", **how))
    anchors = [anchor for batch in told["given"] for anchor in batch]
    assert len(anchors) == 16
    assert how["shuffled"] == (anchors != sorted(anchors))
    later = stream_run.stream({**request(files, way, "zstd-1", **how), "first": 1, "n": 1})
    if way != "memory":
        assert later["given"] == told["given"][1:], "it goes on where it was"


def test_hdf5_is_sliced(files: dict[str, Any]) -> None:
    assert stream_run.stream(request(files, "slice", "gzip-40", shuffled=False))["decoded"] is None, (
        "HDF5 does not say how often"
    )


@pytest.mark.parametrize("defect", ["samples", "values", "shape"])
def test_a_way_that_gives_something_else_is_found(files: dict[str, Any], defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(asked: Asked) -> Feed:
        def give() -> Iterator[tuple[jax.Array, Any]]:
            for batch, anchors in WAYS["slice"](asked).batches:
                if defect == "samples":
                    yield batch, anchors[::-1]
                elif defect == "values":
                    yield batch.at[7, 12, 63, 127].add(2**-14), anchors
                else:
                    yield batch[:, :, :, ::-1][:7], anchors

        return Feed(give())

    monkeypatch.setitem(stream_run.WAYS, "wrong", wrong)
    with pytest.raises(ValueError, match=r"do not have the values|expected"):
        stream_run.stream(request(files, "wrong", "zstd-1"))


def test_decodes_are_counted(files: dict[str, Any]) -> None:
    asked = {**request(files, "slice"), "n": 1}
    assert stream_run.stream(asked)["decoded"] >= 8, "each of eight samples decodes a chunk, and the thread reads on"
    told = stream_run.stream({**request(files, "shardload", shuffled=False), "n": 10})
    assert told["decoded"] == 2


def test_every_peer_has_a_way() -> None:
    assert set(STREAM_PEERS) < set(WAYS) == set(STREAM_WAYS)
