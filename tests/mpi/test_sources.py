"""Every kind of file, way of reading, decomposition and verification: each shard is the part of the file that is named."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import hdf5plugin
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardload
from shardload import PeerError, SourceError
from tests.mpi.sources import NAME, SOURCES
from tests.mpi.support import DECOMPOSITIONS, READERS, VERIFY, check, cube, distinct, mesh_of, on_root, ramp, same_error
from tests.unit.files import raising, spoiled, write_hdf5

pytestmark = pytest.mark.any_library

# Both ways of verifying where parts travel; elsewhere the stricter one, and the default one for "auto".
WAYS = (
    *itertools.product(("root", "parallel"), VERIFY),
    ("direct", "checksum"),
    (2, "checksum"),
    ("auto", "index"),
)
# Every decomposition meets every way with chunks: those of two formats take turns. With blocks of a file it meets every second
# one. The other kinds of file meet five decompositions, each in another way. On one process all decompositions are alike, and
# all kinds meet all ways.
TAKE_TURNS = ("gzip_shuffle", "zarr_v3", "contiguous")
DISTINCT = distinct(DECOMPOSITIONS)
PAIRS = [
    (source, name)
    for (i, source), (k, name) in itertools.product(enumerate(SOURCES), enumerate(DISTINCT))
    if source in TAKE_TURNS or len(DISTINCT) < len(WAYS) or (i + k) % 2 == 0
]


@pytest.mark.parametrize(("source", "name"), PAIRS)
def test_each_shard_is_its_part_of_the_file(files: dict[str, str], source: str, name: str) -> None:
    """Wrong in a way of reading, in the cut of this file into blocks, or in the table of this decomposition."""
    mesh, spec, expected = mesh_of(), DECOMPOSITIONS[name], ramp(cube())
    k = 2 * [*DISTINCT].index(name) + [*SOURCES].index(source)
    n = 1 if len(DISTINCT) >= len(WAYS) else 2  # on two ranks, four decompositions for seven ways
    ways: tuple[tuple[str | int, str], ...] = tuple(WAYS[(k + i) % len(WAYS)] for i in range(n))
    if len(DISTINCT) == 1:
        ways = WAYS
    elif source in TAKE_TURNS:
        ways = WAYS[([*DISTINCT].index(name) + TAKE_TURNS.index(source)) % 2 :: 2]
    for readers, verify in ways:
        x = shardload.load(files[source], mesh, spec, dataset=NAME, readers=readers, verify=verify)
        check(x, expected, mesh, spec, f"readers={readers!r} verify={verify!r}")


@pytest.mark.parametrize("source", ["chunked", "gzip_shuffle", "big_endian", "zarr_v2", "zarr_v3", "zarr_v2_fortran"])
def test_each_chunk_is_decoded_once_in_the_job(files: dict[str, str], source: str) -> None:
    """Wrong if two readers share a chunk, or one reads it twice: then the exchange saves nothing."""
    n_chunks = int(np.prod([-(-n // c) for n, c in zip(cube(), (3, 5, 7), strict=True)]))
    nbytes = int(np.prod(cube())) * 4
    for readers in ("root", "parallel", 2):
        for spec in (DECOMPOSITIONS["pencil along axis 0"], DECOMPOSITIONS["replicated"]):
            plan = shardload.plan(files[source], mesh_of(), spec, dataset=NAME, readers=readers)
            plan.execute()
            assert plan.report is not None
            assert (plan.report.chunks_decoded, plan.report.nbytes_read) == (n_chunks, nbytes)
            assert plan.report.chunks_decoded == plan.costs[plan.readers].chunks_decoded


def test_a_file_that_nobody_vouches_for(
    files: dict[str, str], comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if a rank opened the file itself (szip then ends the job by SIGFPE), or were alone with what its helper died of."""
    mesh, spec, expected = mesh_of(), DECOMPOSITIONS["pencil along axis 0"], ramp(cube())
    bad = on_root(comm, lambda: spoiled(shared_tmp_path / "bad.h5", 1, 0, compression="szip"))

    monkeypatch.setattr("shardload.formats.registry.formats", raising(AssertionError("opened in this process")))
    plan = shardload.plan(
        files["gzip_shuffle"], mesh, spec, dataset=NAME, readers="parallel", verify="file", untrusted=True
    )  # fmt: skip
    x = plan.execute()
    check(x, expected, mesh, spec)
    assert plan.report is not None and plan.report.proven.n_boxes
    assert shardload.verify(x, files["gzip_shuffle"], dataset=NAME, untrusted=True).n_elements == x.size
    text = ("chunk (0, 0) of '/x' in", "bad.h5", "HelperError: the helper process that read it was ended by SIGFPE")

    def load() -> Any:
        return shardload.load(bad, mesh, DECOMPOSITIONS["replicated"], readers="root", untrusted=True)

    error = same_error(comm, load, shardload.SourceError, *text)
    assert getattr(error, "dataset", None) == "/x" and "Copy it again" not in str(error)


def test_a_filter_that_needs_a_word_gets_it_on_every_rank(comm: Any, shared_tmp_path: Path) -> None:
    """Wrong if the word did not come to where a file is opened: to find the array, to read it, to compare with it."""
    shape, path, spec = cube(), str(shared_tmp_path / "a.h5"), P("a", "b")

    chunks = tuple(-(-n // 2) for n in shape)
    on_root(comm, lambda: write_hdf5(path, {NAME: ramp(shape)}, chunks=chunks, **hdf5plugin.Bitshuffle()))
    said = ("HDF5 filter 32008 (bitshuffle)", "pass allow_filters='bitshuffle'")
    same_error(comm, lambda: shardload.load(path, mesh_of(), spec, dataset=NAME), SourceError, *said)
    for readers in READERS:
        how: dict[str, Any] = {"readers": readers, "verify": "full", "allow_filters": "bitshuffle"}
        x = shardload.load(path, mesh_of(), spec, dataset=NAME, **how)
        check(x, ramp(shape), mesh_of(), spec, readers)
    same_error(comm, lambda: shardload.verify(x, path, dataset=NAME), SourceError, *said)
    assert shardload.verify(x, path, dataset=NAME, allow_filters=32008)
    words = "bitshuffle" if comm.rank else "all"
    if comm.size > 1:
        same_error(
            comm, lambda: shardload.load(path, mesh_of(), spec, dataset=NAME, allow_filters=words), PeerError, "allow_filters"
        )
