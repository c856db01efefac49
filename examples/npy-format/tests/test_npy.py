"""Does the format conform, and does it refuse what NumPy's own reader should not be given?"""

from __future__ import annotations

import os
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shardload_npy import FORMAT

from shardload.errors import ConfigError, SourceError
from shardload.formats import Access, Region
from shardload.formats.access import Limits
from shardload.formats.lookup import find_array, list_arrays, open_source
from shardload.testing import check_format


def write(path: str, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    (values,) = arrays.values()
    with open(path, "wb") as file:
        np.save(file, values)


def write_fortran(path: str, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    (values,) = arrays.values()
    with open(path, "wb") as file:
        np.save(file, values.copy(order="F"))


@pytest.mark.parametrize("write", [write, write_fortran])
def test_it_conforms(tmp_path: Path, write: Any) -> None:
    check_format(FORMAT, write, folder=tmp_path, suffix=".npy", several=False)


def header(text: str, version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    data = text.encode()
    size = len(data) if length is None else length
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H" if version == (1, 0) else "<I", size) + data


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}"


def test_every_version_of_the_format_is_read(tmp_path: Path) -> None:
    values = np.arange(4, dtype="<f4")
    for version in ((1, 0), (2, 0), (3, 0)):
        path = tmp_path / "a.npy"
        path.write_bytes(header(GOOD, version) + values.tobytes())
        source = open_source(path, "/")
        out = np.empty(4, "f4")
        source.read_into(Region((0,), (4,)), out)
        source.close()
        assert out.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (header(GOOD) + bytes(15), "the file has .* bytes, expected"),
        (header(GOOD) + bytes(17), "the file has .* bytes, expected"),
        (header(GOOD, (4, 0)), "version 4.0"),
        (header(GOOD, length=5000), "ends in its header"),
        (header(GOOD, (2, 0), 1 << 30), "a header of 1073741824 bytes"),
        (header("{'descr': '<f4', 'shape': (4,)}"), "KeyError: 'fortran_order'"),
        (header("{'descr': '<f4', 'fortran_order': 0, 'shape': (4,)}"), "fortran_order is 0"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}"), "the shape is .-4,."),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}"), "the shape is"),
        (header("{'descr': '<q9', 'fortran_order': False, 'shape': (4,)}"), "cannot be understood"),
        (header("__import__('os')._exit(3)"), "cannot be understood"),
        (header("(" * 5000), "cannot be understood"),
        (header("[" * 90 + "]" * 90), "cannot be understood"),
        (b"\x93NUMPY\x01", "it starts with"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    for attempt in (list_arrays, find_array, lambda path: open_source(path, "/")):
        with pytest.raises(SourceError, match=f"(?s)cannot be opened: .*{said}"):
            attempt(str(path))


def test_objects_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    np.save(tmp_path / "a.npy", np.array([Trap(), 1], dtype=object), allow_pickle=True)
    np.save(tmp_path / "b.npy", np.zeros(3, [("x", "f4"), ("y", "i4")]))
    np.save(tmp_path / "c.npy", np.zeros(3, "M8[s]"))
    for name, said in (("a", "Python objects"), ("b", "records with fields x, y"), ("c", "dates")):
        path = str(tmp_path / f"{name}.npy")
        assert said in str(list_arrays(path)[0].refused)
        for attempt in (lambda path: find_array(path, "/"), lambda path: open_source(path, "/")):
            with pytest.raises(SourceError, match=f"cannot be loaded: it holds {said}"):
                attempt(path)
    assert not (tmp_path / "sprung").exists()


def test_a_file_that_is_cut_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    """To look at a map of what is gone would end the process by a signal."""
    path = tmp_path / "a.npy"
    np.save(path, np.arange(1 << 16))
    source = open_source(path, "/")
    os.truncate(path, 4096)
    with pytest.raises(OSError, match="was cut since it was opened"):
        source.read_into(Region((0,), (1 << 16,)), np.empty(1 << 16, "i8"))
    source.close()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npy")
    found: list[BaseException] = []

    def attempt() -> None:
        try:
            FORMAT.open_file(str(tmp_path / "pipe.npy")).open("/")
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(60)
    assert found and "a pipe, expected a file" in str(found[0])


def test_names(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    path = str(tmp_path / "a.npy")
    assert find_array(path).dataset == find_array(path, "/").dataset == "/"
    with pytest.raises(ConfigError, match=r"holds no array '/x'.* '/' \(3,\) int64"):
        find_array(path, "x")


def test_a_helper_process_reads_it_too(tmp_path: Path) -> None:
    values = np.arange(3 * 4 * 5, dtype=">f8").reshape(3, 4, 5).copy(order="F")
    np.save(tmp_path / "a.npy", values)
    source = open_source(tmp_path / "a.npy", "/", Access(untrusted=Limits()))
    out = np.empty((2, 4, 1))
    source.read_into(Region((1, 0, 2), (3, 4, 3)), out)
    source.close()
    np.testing.assert_array_equal(out, values[1:3, :, 2:3])
