"""Are the few bytes of a file that an append changes the right ones, in every kind of header that others write?"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest

from shardload.formats.hdf5.growable import Facts
from shardload.formats.hdf5.on_disk import PAGE, Spot, UnknownError, lookup3, read_header, read_superblock

# Keywords of h5py.File; what must be in the file: version of its superblock, first byte of a dataset's header.
KINDS: dict[str, tuple[dict[str, Any], int, bytes]] = {
    "as h5py writes": ({"libver": "earliest"}, 0, b"\1"),
    "1.8": ({"libver": ("v108", "v108")}, 2, b"O"),
    "1.8, limits": ({"libver": ("v108", "v108"), "limits": (9, 5)}, 2, b"O"),  # of attributes: two more numbers in a header
    "creation order": ({"libver": "earliest", "track_order": True}, 0, b"O"),
}


def reader(data: bytes) -> Any:
    return lambda offset, nbytes: data[offset : offset + nbytes]


def write(n_attributes: int, how: dict[str, Any]) -> bytes:
    """A file with a dataset; attributes that come later make its header go on elsewhere."""
    room, how = io.BytesIO(), dict(how)
    order, limits = how.get("track_order"), how.pop("limits", None)
    more: dict[str, Any] = {"chunks": (3, 2, 4), "maxshape": (None, 5, 20), "compression": "gzip", "track_order": order}
    with h5py.File(room, "w", **how) as file:
        for name in ("x", "y"):
            if limits is not None:
                more["dcpl"] = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                more["dcpl"].set_attr_phase_change(*limits)
            x = file.create_dataset(name, (7, 5, 9), ">f4", **more)
            x[...] = np.arange(7 * 5 * 9).reshape(7, 5, 9)
        for k in range(n_attributes):
            for name in ("y", "x"):
                file[name].attrs[f"attribute {k}"] = "x" * 37 * k
    return room.getvalue()


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 7])
def test_numbers_of_a_dataset(kind: str, n: int) -> None:
    """Wrong if another axis, the greatest length, or another dataset's header were changed; or a checksum were wrong."""
    how, version, begins = KINDS[kind]
    data = bytearray(write(n, how))
    read = lambda offset, nbytes: bytes(data[offset : offset + nbytes])  # noqa: E731
    superblock = read_superblock(read)
    assert (superblock.version, superblock.end, superblock.n_children) == (version, len(data), 64)
    with h5py.File(io.BytesIO(data), "r") as file:
        spots = Facts.of(file["x"], superblock).spots(read)
        address = h5py.h5o.get_info(file["x"].id).addr
    assert data[address : address + 1] == begins
    messages = read_header(read, address)
    assert sum(one.kind == 12 for one in messages) == (n if n < 8 else 0)
    assert any(one.kind == 16 for one in messages) or n < 7
    for spot, value in ((spots.dims[0], 11), (spots.dims[2], 17), (superblock.end_spot, len(data) + 8)):
        patch = spot.changed(read, value)
        assert read(patch.offset, len(patch.old)) == patch.old and len(patch.new) == len(patch.old)
        data[patch.offset : patch.offset + len(patch.new)] = patch.new
    data += bytes(8)
    with h5py.File(io.BytesIO(data), "r") as file:
        assert file["x"].shape == (11, 5, 17) and file["x"].maxshape == (None, 5, 20) and file["y"].shape == (7, 5, 9)
        np.testing.assert_array_equal(file["x"][:7, :, :9], file["y"][...])
        assert len(file["x"].attrs) == n
    assert read_superblock(read).end == len(data)


def test_a_netcdf_file(tmp_path: Path) -> None:
    """Wrong if headers as the netCDF library writes them (times of creation, order of attributes) were misread."""
    with netCDF4.Dataset(tmp_path / "x.nc", "w") as made:
        made.createDimension("time", None)
        for name in ("time", "rho"):
            one = made.createVariable(name, "f8", ("time",), zlib=True)
            one.setncatts({"units": "days", "long_name": "n" * 60})
            one[:] = np.arange(9)
    data = bytearray((tmp_path / "x.nc").read_bytes())
    read = lambda offset, nbytes: bytes(data[offset : offset + nbytes])  # noqa: E731
    with h5py.File(io.BytesIO(data), "r") as file:
        spots = [Facts.of(file[name], read_superblock(read)).spots(read) for name in ("time", "rho")]
    for one in spots:
        assert one.dims[0].block is not None
        patch = one.dims[0].changed(read, 5)
        data[patch.offset : patch.offset + len(patch.new)] = patch.new
    (tmp_path / "y.nc").write_bytes(data)
    with netCDF4.Dataset(tmp_path / "y.nc") as found:
        assert len(found.dimensions["time"]) == 5
        np.testing.assert_array_equal(found["rho"][:], np.arange(5))


def test_what_crosses_a_page() -> None:
    """Wrong if a write that a kill can cut in two passed for one that it cannot."""
    assert Spot(PAGE - 8).is_in_one_page and not Spot(PAGE - 7).is_in_one_page and Spot(PAGE).is_in_one_page
    assert Spot(100, (0, PAGE - 4)).is_in_one_page and not Spot(100, (0, PAGE - 3)).is_in_one_page
    assert Spot(PAGE + 1, (PAGE - 100, PAGE + 20)).is_in_one_page  # what is before the number does not change


def test_lookup3_is_that_of_hdf5() -> None:
    """Compared with the checksum of a superblock that HDF5 wrote, and its author's examples."""
    data = write(0, {"libver": ("v108", "v108")})
    assert lookup3(data[:44]) == int.from_bytes(data[44:48], "little")
    assert lookup3(b"") == 0xDEADBEEF and lookup3(b"Four score and seven years ago") == 0x17770551
    assert len({lookup3(b"a" * n) for n in range(40)}) == 40


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"userblock_size": 512}, "user block"),
        ({"fs_strategy": "page", "libver": "latest"}, "space in pages"),
        ({"fs_strategy": "fsm", "fs_persist": True, "libver": "latest"}, "free space"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    """Wrong if a file grew that keeps account of its space elsewhere, too."""
    with h5py.File(tmp_path / "x.h5", "w", **how) as file:
        file["x"] = np.arange(9)
    with pytest.raises(UnknownError, match=words):
        read_superblock(reader((tmp_path / "x.h5").read_bytes()))


def test_a_file_that_is_open_for_writing(tmp_path: Path) -> None:
    """Wrong if the mark of HDF5's newest files, which a killed writer leaves, were not seen."""
    with h5py.File(tmp_path / "x.h5", "w", libver="latest") as file:
        file["x"] = np.arange(9)
        file.flush()
        with pytest.raises(UnknownError, match="h5clear"):
            read_superblock(reader((tmp_path / "x.h5").read_bytes()))
    assert read_superblock(reader((tmp_path / "x.h5").read_bytes())).version == 3


def test_damaged_headers() -> None:
    """Wrong if bytes were changed that are not what they seem."""
    data = bytearray(write(3, {"libver": ("v108", "v108")}))
    with h5py.File(io.BytesIO(data), "r") as file:
        address = h5py.h5o.get_info(file["x"].id).addr
    data[address + 30] ^= 1
    with pytest.raises(UnknownError, match="checksum"):
        read_header(reader(data), address)
    data[30] ^= 1
    with pytest.raises(UnknownError, match="superblock whose checksum"):
        read_superblock(reader(data))
    with pytest.raises(UnknownError, match="begins with"):
        read_header(reader(data), 3)
    with pytest.raises(UnknownError, match="signature"):
        read_superblock(reader(b"CDF\1" + bytes(200)))
    with pytest.raises(UnknownError, match="cut off"):
        read_header(reader(write(0, {"libver": "earliest"})[:900]), 800)
