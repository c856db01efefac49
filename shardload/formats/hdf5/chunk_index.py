"""Where are all chunks of an HDF5 dataset, by the file's own index?

HDF5 tells where its chunks are one by one, each as an object of Python: 1.3 microseconds for each, on every rank that reads.
The index of most files is a version 1 B-tree: nodes of some 60 entries, which NumPy takes as they are, in a twentieth of that
time.

1. Read the object header of the dataset, and find the message that says where its B-tree is.
2. Read the nodes level by level, down to the leaves. A leaf has an entry for each chunk: size, filter mask, coordinates and
   address.
3. Refuse whatever is not exactly as expected. Then HDF5 lists the chunks (`chunks`), or says what is damaged.

Source: HDF5 File Format Specification, version 3.0, sections III.A.1 (version 1 B-trees) and IV.A (object headers, layout
message). Only what HDF5 has read from the same open file is compared with it: the number of stored bytes (`chunks`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

__all__ = ["list_tree"]

Read = Callable[[int, int], bytes]  # at most so many bytes (second) from an offset in the file (first)

_LAYOUT, _CONTINUED = 8, 16  # types of messages
_MOST_BLOCKS, _MOST_HEADER_NBYTES = 64, 1 << 20  # of an object header
_IS_SHARED = 2
_CHUNKED = 2
_MOST_LEVELS = 16
_HEAD = struct.Struct("<4sBBHQQ")  # of a node: mark, type, level, number of entries, siblings
_USUAL_ENTRIES = 64  # of a node, unless the file's creator chose another number


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
        A record for each stored chunk: ``size``, ``mask``, ``at`` (coordinates of its first element; one more, which is 0),
        ``address``.
    """
    try:
        root = _root_of(read, header, ndim)
        return None if root is None else _leaves(read, root, ndim, most)
    except (_OtherError, struct.error, IndexError, OSError, ValueError):
        return None


def _root_of(read: Read, header: int, ndim: int) -> int | None:
    """Address of the B-tree; None if there is none, which a dataset without chunks may have."""
    for kind, flags, body in _messages(read, header):
        if kind == _LAYOUT:
            version, layout, n_axes = body[:3]
            if flags & _IS_SHARED or (version, layout, n_axes) != (3, _CHUNKED, ndim + 1):
                return None
            return int.from_bytes(body[3:11], "little")
    return None


def _messages(read: Read, header: int) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and content of each message of an object header, of version 1 or 2."""
    start = read(header, 32)
    if start[:4] == b"OHDR":
        flags = start[5]
        if start[4] != 2:
            raise _OtherError
        at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        nbytes = int.from_bytes(start[at : at + width], "little")
        blocks = [(header + at + width, nbytes)]
        head, order, skipped, checked = struct.Struct("<BHB"), 2 if flags & 4 else 0, 4, 4
    else:
        version, _, _, _, nbytes = struct.unpack_from("<BBHII", start)
        if version != 1:
            raise _OtherError
        blocks = [(header + 16, nbytes)]
        head, order, skipped, checked = struct.Struct("<HHB"), 3, 0, 0
    n_blocks = 0
    while blocks:
        place, nbytes = blocks.pop(0)
        n_blocks += 1
        if n_blocks > _MOST_BLOCKS or nbytes > _MOST_HEADER_NBYTES:
            raise _OtherError
        block, at = read(place, nbytes), 0
        while at + head.size + order <= len(block):
            kind, size, flags = head.unpack_from(block, at)
            at += head.size + order
            body = block[at : at + size]
            at += size
            if kind == _CONTINUED:
                other, length = struct.unpack_from("<QQ", body)
                blocks.append((other + skipped, length - skipped - checked))
            yield kind, flags, body


def _leaves(read: Read, root: int, ndim: int, most: int) -> np.ndarray[Any, Any]:
    """The entries of all leaves below a node, in the order of the tree."""
    entry = np.dtype([("size", "<u4"), ("mask", "<u4"), ("at", "<u8", (ndim + 1,)), ("address", "<u8")])
    usual, nodes = _HEAD.size + _USUAL_ENTRIES * entry.itemsize, [root]
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
        nodes = found["address"].tolist()
        if len(set(nodes)) < len(nodes):
            raise _OtherError
        level -= 1
    raise _OtherError
