"""Is what is read of superblocks and headers what HDF5 reads, in every kind that others write?"""

from __future__ import annotations

import io
from typing import Any

import h5py
import numpy as np
import pytest

from shardload.formats.hdf5.on_disk import SUPERBLOCK_NBYTES, UnknownStructureError, end_of, lookup3, read_header, with_end

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


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_file(kind: str) -> None:
    """Wrong if the number were another one, or its checksum wrong: HDF5 opens a file as long as it says, and no shorter one."""
    how, version, _ = KINDS[kind]
    data = write(1, how)
    head = data[:SUPERBLOCK_NBYTES]
    assert head[8] == version and end_of(head) == len(data) and with_end(head, len(data)) == head
    for end, opens in ((len(data) + 100, False), (len(data), True)):
        longer = io.BytesIO(with_end(head, end) + data[SUPERBLOCK_NBYTES:])
        try:
            h5py.File(longer, "r").close()
        except OSError as error:
            assert not opens and "truncated" in str(error)
        else:
            assert opens
    for wrong in (b"", data[:20], b"x" * SUPERBLOCK_NBYTES, head[:8] + b"\x09" + head[9:]):
        with pytest.raises(UnknownStructureError, match="no superblock"):
            end_of(wrong)


def test_lookup3_is_that_of_hdf5() -> None:
    """Compared with the checksum of a superblock that HDF5 wrote, and its author's examples."""
    data = write(0, {"libver": ("v108", "v108")})
    assert lookup3(data[:44]) == int.from_bytes(data[44:48], "little")
    assert lookup3(b"") == 0xDEADBEEF and lookup3(b"Four score and seven years ago") == 0x17770551
    assert len({lookup3(b"a" * n) for n in range(40)}) == 40


def test_damaged_headers() -> None:
    """Wrong if bytes were taken for what they are not."""
    data = bytearray(write(7, {"libver": ("v108", "v108")}))
    with h5py.File(io.BytesIO(data), "r") as file:
        address = h5py.h5o.get_info(file["x"].id).addr
    assert len(read_header(reader(bytes(data)), address)) > 9
    data = data.replace(b"OCHK", b"OCHX")
    with pytest.raises(UnknownStructureError, match="next block begins with"):
        read_header(reader(bytes(data)), address)
    with pytest.raises(UnknownStructureError, match="that begins with"):
        read_header(reader(bytes(data)), address + 4)
    with pytest.raises(UnknownStructureError, match="cut off"):
        read_header(reader(bytes(data[: address + 40])), address)
