"""Where does an HDF5 file end, and what does an object header say? Read from its bytes, where the library is slow or silent.

1. `end_of`, `with_end`: the end of the file, in its superblock. What lies behind it is nobody's.
2. `read_header`: the messages of an object header, of version 1 or 2, in all its blocks.

References
----------
The HDF Group, "HDF5 File Format Specification Version 3.0", sections II.A (superblock) and IV.A (object headers).
B. Jenkins, "lookup3.c", 2006: the checksum of newer metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

UNDEFINED = 2**64 - 1  # an address that is none
DATASPACE, LAYOUT = 0x01, 0x08
_CONTINUATION = 0x10
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_END_AT = {0: 40, 1: 44, 2: 28, 3: 28}  # by the version of the superblock
SUPERBLOCK_NBYTES = 64  # of a file, which have its end, and the checksum
_CHECKED_NBYTES = 44  # of a superblock of version 2 or 3: its checksum is behind them
_SHARED = 2  # a bit of a message's flags: its content is elsewhere
_MOST_BLOCKS, _MOST_NBYTES = 1024, 1 << 20  # of a header; all of its messages are kept

Read = Callable[[int, int], bytes]
"""``read(offset, nbytes)``: bytes of the file."""


class UnknownStructureError(ValueError):
    """The file has something that is not known here. Its text follows "it has"."""


# --- the checksum


def lookup3(data: bytes) -> int:
    """The checksum that HDF5 stores behind its newer metadata.

    >>> hex(lookup3(b"")), hex(lookup3(b"Four score and seven years ago"))
    ('0xdeadbeef', '0x17770551')
    """
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    if not data:
        return c
    whole: list[int] = np.frombuffer(data + bytes(-len(data) % 12), "<u4").tolist()
    for at in range(0, len(whole) - 3, 3):
        a, b, c = (a + whole[at]) & _ALL, (b + whole[at + 1]) & _ALL, (c + whole[at + 2]) & _ALL
        a = ((a - c) & _ALL) ^ (c << 4 & _ALL | c >> 28)
        c = (c + b) & _ALL
        b = ((b - a) & _ALL) ^ (a << 6 & _ALL | a >> 26)
        a = (a + c) & _ALL
        c = ((c - b) & _ALL) ^ (b << 8 & _ALL | b >> 24)
        b = (b + a) & _ALL
        a = ((a - c) & _ALL) ^ (c << 16 & _ALL | c >> 16)
        c = (c + b) & _ALL
        b = ((b - a) & _ALL) ^ (a << 19 & _ALL | a >> 13)
        a = (a + c) & _ALL
        c = ((c - b) & _ALL) ^ (b << 4 & _ALL | b >> 28)
        b = (b + a) & _ALL
    a, b, c = (a + whole[-3]) & _ALL, (b + whole[-2]) & _ALL, (c + whole[-1]) & _ALL
    for first, second, bits in ((2, 1, 14), (0, 2, 11), (1, 0, 25), (2, 1, 16), (0, 2, 4), (1, 0, 14), (2, 1, 24)):
        state = [a, b, c]
        by = state[second]
        state[first] = ((state[first] ^ by) - (by << bits & _ALL | by >> 32 - bits)) & _ALL
        a, b, c = state
    return c


_ALL = 0xFFFFFFFF


# --- superblock


def end_of(head: bytes) -> int:
    """The end of the file for HDF5, by its first bytes: it may be longer. UnknownStructureError if they are no superblock."""
    if len(head) < SUPERBLOCK_NBYTES or not head.startswith(_SIGNATURE) or head[8] not in _END_AT:
        raise UnknownStructureError(f"no superblock that is known here; it begins with {head[:9]!r}")
    return _int(head, _END_AT[head[8]])


def with_end(head: bytes, end: int) -> bytes:
    """These first bytes with another end."""
    at = _END_AT[head[8]]
    changed = head[:at] + end.to_bytes(8, "little") + head[at + 8 :]
    if head[8] < 2:
        return changed
    checked = changed[:_CHECKED_NBYTES]
    return checked + lookup3(checked).to_bytes(4, "little") + changed[_CHECKED_NBYTES + 4 :]


# --- object headers


@dataclass(frozen=True)
class Message:
    """A message of an object header.

    Attributes
    ----------
    kind, flags : int
        Its type and flags.
    data : bytes
        Its content.
    """

    kind: int
    flags: int
    data: bytes

    @property
    def is_shared(self) -> bool:
        """True if its content is elsewhere."""
        return bool(self.flags & _SHARED)


def read_header(read: Read, address: int) -> list[Message]:
    """The messages of the object header at an address, in order. UnknownStructureError if it is damaged.

    Checksums are not looked at: HDF5 does that when it opens a dataset.
    """
    head = read(address, 16)
    if head.startswith(b"OHDR"):
        return _read_2(read, address, head)
    if head[:1] != b"\1":
        raise UnknownStructureError(f"an object header that begins with {head[:4]!r} at {address}")
    found: list[Message] = []
    todo, total = [(address + 16, _int(head, 8, 4))], 0
    for k, (start, nbytes) in enumerate(todo):  # grows: each continuation is one more block
        total += nbytes
        data, at = _block(read, start, nbytes, k, total), 0
        while at + 8 <= nbytes:
            kind, size, flags = _int(data, at, 2), _int(data, at + 2, 2), data[at + 4]
            found.append(Message(kind, flags, data[at + 8 : at + 8 + size]))
            if kind == _CONTINUATION:
                todo.append((_int(data, at + 8), _int(data, at + 16)))
            at += 8 + size
        if at != nbytes:
            raise UnknownStructureError(f"an object header whose messages have {at} bytes in place of {nbytes}, at {start}")
    return found


def _read_2(read: Read, address: int, head: bytes) -> list[Message]:
    flags = head[5]
    if head[4] != 2:
        raise UnknownStructureError(f"an object header of version {head[4]}")
    at = _size_at(head)
    width = 1 << (flags & 3)
    nbytes = _int(read(address + at, width), 0, width)
    prefix = 4 + (2 if flags & 4 else 0)
    found: list[Message] = []
    # Where a block begins, its first message, its length.
    todo, total = [(address, at + width, at + width + nbytes + 4)], 0
    for k, (start, first, length) in enumerate(todo):
        total += length
        data = _block(read, start, length, k, total)
        end = length - 4
        if k and not data.startswith(b"OCHK"):
            raise UnknownStructureError(f"an object header whose next block begins with {data[:4]!r}, at {start}")
        at = first
        while at + prefix <= end:  # what is left may be a gap that is too short for a message
            kind, size, bits = data[at], _int(data, at + 1, 2), data[at + 3]
            content = data[at + prefix : at + prefix + size]
            if at + prefix + size > end:
                raise UnknownStructureError(f"an object header with a message that is too long, at {start + at}")
            found.append(Message(kind, bits, content))
            if kind == _CONTINUATION:
                todo.append((_int(content, 0), 4, _int(content, 8)))
            at += prefix + size
    return found


def _size_at(header: bytes) -> int:
    """Where a header of version 2 has the size of its first block."""
    return 6 + (16 if header[5] & 32 else 0) + (4 if header[5] & 16 else 0)


def _block(read: Read, start: int, nbytes: int, k: int, total: int) -> bytes:
    if k > _MOST_BLOCKS or total > _MOST_NBYTES:
        raise UnknownStructureError(f"an object header that is too long, at {start}")
    data = read(start, nbytes)
    if len(data) < nbytes:
        raise UnknownStructureError(f"an object header that is cut off, at {start}")
    return data


def _int(data: bytes, at: int, nbytes: int = 8) -> int:
    return int.from_bytes(data[at : at + nbytes], "little")
