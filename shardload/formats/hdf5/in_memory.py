"""How is an HDF5 file made and read that is nowhere on disk?

It is made with a name that no other has: two of one name are one file for HDF5. It is read from its bytes.
"""

from __future__ import annotations

import itertools
from hashlib import blake2b
from typing import Any

import h5py

from shardload.formats.hdf5.opened import OpenFacts

_numbers = itertools.count()


def file_in_memory(**how: Any) -> h5py.File:
    """A new file in memory. `how` goes to `h5py.File`."""
    return h5py.File(f"shardload {next(_numbers)}", "w", driver="core", backing_store=False, **how)


class ImageFacts(OpenFacts):
    """A file that is open from its bytes, which never change."""

    name = ""  # HDF5 has another one each time

    def __init__(self, image: bytes) -> None:
        self._state = len(image), int.from_bytes(blake2b(image, digest_size=7).digest(), "little")
        super().__init__(h5py.File(h5py.h5f.open_file_image(image)))

    def state(self) -> tuple[int, ...]:
        """The number of bytes, and a digest of them."""
        return self._state


def image_of(file: h5py.File) -> bytes:
    """The bytes of a file."""
    file.flush()
    return bytes(file.id.get_file_image())


def file_of(image: bytes) -> h5py.File:
    """A file of these bytes, which may be written to."""
    return h5py.File(h5py.h5f.open_file_image(image, flags=h5py.h5f.FILE_IMAGE_OPEN_RW))
