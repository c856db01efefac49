"""Where are all chunks of an HDF5 dataset, by the file's own index?

HDF5 tells where its chunks are one by one, each as an object of Python: 1.3 microseconds for each, on every rank that reads.
The index of most files is a version 1 B-tree: nodes of some 60 entries, which NumPy takes as they are, in a twentieth of that
time.

1. Read the object header of the dataset (`on_disk`), and find the message that says where its B-tree is.
2. Read the nodes level by level, down to the leaves. A leaf has an entry for each chunk: size, filter mask, coordinates and
   address.
3. Refuse whatever is not exactly as expected. Then HDF5 lists the chunks (`chunks`), or says what is damaged.

Source: HDF5 File Format Specification, version 3.0, sections III.A.1 (version 1 B-trees) and IV.A.2.i (layout message).
Only what HDF5 has read from the same open file is compared with it: the number of stored bytes (`chunks`).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from shardload.formats.hdf5.chunk_tree import MOST_CHILDREN, entry_of
from shardload.formats.hdf5.on_disk import LAYOUT, Read, read_header

__all__ = ["list_tree"]

_CHUNKED = 2
_MOST_LEVELS = 16
_HEAD = struct.Struct("<4sBBHQQ")  # of a node: mark, type, level, number of entries, siblings


class _OtherError(Exception):
    """The file is not as this module expects."""


def list_tree(read: Read, header: int, ndim: int, most: int) -> np.ndarray[Any, Any] | None:
    """The entries of all chunks; None if the index is of another kind, or anything is unusual.

    Parameters
    ----------
    read : callable
        Reads bytes of the file.
    header : int
        Address of the dataset's object header.
    ndim : int
        Number of axes.
    most : int
        Number of chunks that the dataset can have.

    Returns
    -------
    ndarray
        A record for each stored chunk, as `chunk_tree.entry_of` says; ``child`` is its address.
    """
    try:
        root = _root_of(read, header, ndim)
        return None if root is None else _leaves(read, root, ndim, most)
    except (_OtherError, struct.error, IndexError, OSError, ValueError):
        return None


def _root_of(read: Read, header: int, ndim: int) -> int | None:
    """Address of the B-tree; None if there is none, which a dataset without chunks may have."""
    for message in read_header(read, header, is_checked=False):
        if message.kind == LAYOUT:
            version, layout, n_axes = message.data[:3]
            if message.is_shared or (version, layout, n_axes) != (3, _CHUNKED, ndim + 1):
                return None
            return int.from_bytes(message.data[3:11], "little")
    return None


def _leaves(read: Read, root: int, ndim: int, most: int) -> np.ndarray[Any, Any]:
    """The entries of all leaves below a node, in the order of the tree."""
    entry = entry_of(ndim)
    usual, nodes = _HEAD.size + MOST_CHILDREN * entry.itemsize, [root]
    level = int(_HEAD.unpack_from(read(root, _HEAD.size))[2])
    for _ in range(_MOST_LEVELS):
        parts = []
        for node in nodes:
            data = read(node, usual)
            mark, kind, its_level, n, _, _ = _HEAD.unpack_from(data)
            if (mark, kind, its_level) != (b"TREE", 1, level) or not n:
                raise _OtherError
            stop = _HEAD.size + n * entry.itemsize
            parts.append(data[_HEAD.size : stop] if stop <= usual else read(node + _HEAD.size, n * entry.itemsize))
        found = np.frombuffer(b"".join(parts), dtype=entry)
        if len(found) > most:
            raise _OtherError
        if level == 0:
            return found
        nodes = found["child"].tolist()
        if len(set(nodes)) < len(nodes):
            raise _OtherError
        level -= 1
    raise _OtherError
