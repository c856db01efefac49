"""Which bytes of an HDF5 file say where it ends, how long a dataset is, where the index of its chunks is?

They are few, and each can be changed by one small write:

1. `read_superblock`: the end of the file, and how many chunks a node of an index has.
2. `read_header`: the messages of an object header, of version 1 or 2, in all its blocks.
3. `Spot.changed`: the write that changes a number. Version 2 has a checksum behind each block of messages, and behind the
   superblock; then the write goes from the number to the checksum.
4. `Move`: if number and checksum are in two pages, that write could be cut in two by a kill. So the block moves first, to where
   it is in one page. The write that leads there changes nothing that a header says. The first block of a header has no other
   address; it is made so short that it only leads to the next. The address of another block is changed.

What is read here is compared with what the HDF5 library says of the same dataset before anything is written (`growth`).

References
----------
The HDF Group, "HDF5 File Format Specification Version 3.0", sections II.A (superblock) and IV.A (object headers).
B. Jenkins, "lookup3.c", 2006: the checksum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "CONTINUATION",
    "DATASPACE",
    "LAYOUT",
    "PAGE",
    "UNDEFINED",
    "Message",
    "Move",
    "Patch",
    "Read",
    "Spot",
    "Superblock",
    "UnknownError",
    "check_moves",
    "lookup3",
    "nbytes_of_attributes",
    "read_header",
    "read_superblock",
]

UNDEFINED = 2**64 - 1  # an address that is none
PAGE = 4096  # bytes that the system changes at once: a write within one cannot be cut by a kill
DATASPACE, LAYOUT, CONTINUATION = 0x01, 0x08, 0x10
_ATTRIBUTE_INFO = 0x15
_B_TREE_KS, _DRIVER, _FILE_SPACE, _SHARED_TABLE, _CACHE_IMAGE = 0x13, 0x14, 0x17, 0x0F, 0x18
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_MOST_USER_BLOCKS = 24  # lengths that are looked at
_SHARED = 2  # a bit of a message's flags: its content is elsewhere
_MOST_BLOCKS, _MOST_NBYTES = 1024, 1 << 20  # of a header; all of its messages are kept

Read = Callable[[int, int], bytes]
"""``read(offset, nbytes)``: bytes of the file."""


class UnknownError(ValueError):
    """The file has something that is not changed here. Its text follows "it has"."""


# --- the checksum


def lookup3(data: bytes) -> int:
    """The checksum that HDF5 stores behind its newer metadata.

    >>> hex(lookup3(b"")), hex(lookup3(b"Four score and seven years ago"))
    ('0xdeadbeef', '0x17770551')
    """
    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    if not data:
        return c
    words = memoryview(data + bytes(-len(data) % 12)).cast("I" if _IS_LITTLE else "B")
    whole = [int(word) for word in words] if _IS_LITTLE else _words(bytes(words))
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
_IS_LITTLE = memoryview(b"\1\0\0\0").cast("I")[0] == 1


def _words(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]


# --- numbers that can be changed


def _is_in_one_page(offset: int, nbytes: int) -> bool:
    return offset // PAGE == (offset + nbytes - 1) // PAGE


@dataclass(frozen=True)
class Patch:
    """One write: where, what is there, and what will be."""

    offset: int
    old: bytes
    new: bytes


@dataclass(frozen=True)
class Spot:
    """Where a number of 8 bytes is.

    Attributes
    ----------
    offset : int
        Its first byte in the file.
    block : (int, int) or None
        The bytes that a checksum is for, if there is one: it is in the 4 bytes behind them.
    """

    offset: int
    block: tuple[int, int] | None = None

    @property
    def range(self) -> tuple[int, int]:
        """The bytes that change with the number: first, and the one after the last."""
        return self.offset, self.offset + 8 if self.block is None else self.block[1] + 4

    @property
    def is_in_one_page(self) -> bool:
        """True if the write of the number cannot be done by half."""
        start, stop = self.range
        return _is_in_one_page(start, stop - start)

    def changed(self, read: Read, value: int) -> Patch:
        """The write that gives it another value."""
        start, stop = self.range
        number = value.to_bytes(8, "little")
        if self.block is None:
            return Patch(start, read(start, 8), number)
        block = bytearray(read(self.block[0], stop - self.block[0]))
        at = start - self.block[0]
        old = bytes(block[at:])
        block[at : at + 8] = number
        block[-4:] = lookup3(bytes(block[:-4])).to_bytes(4, "little")
        return Patch(start, old, bytes(block[at:]))


# --- superblock


@dataclass(frozen=True)
class Superblock:
    """What is read of a superblock.

    Attributes
    ----------
    version : int
        Of the superblock.
    end : int
        The end of the file, for HDF5. It may be longer.
    end_spot : Spot
        Where that is.
    n_children : int
        Children that a node of an index of chunks has at most.
    """

    version: int
    end: int
    end_spot: Spot
    n_children: int


def read_superblock(read: Read) -> Superblock:
    """Raises UnknownError if the file is of a kind that is not changed here."""
    head = read(0, 128)
    if not head.startswith(_SIGNATURE):
        places = (512 << k for k in range(_MOST_USER_BLOCKS))
        before = next((at for at in places if read(at, len(_SIGNATURE)) == _SIGNATURE), None)
        raise UnknownError("no HDF5 signature" if before is None else f"a user block of {before} bytes")
    version = head[8]
    if version > 3:
        raise UnknownError(f"a superblock of version {version}")
    widths = (head[13], head[14]) if version < 2 else (head[9], head[10])
    if widths != (8, 8):
        raise UnknownError(f"addresses of {widths[0]} and lengths of {widths[1]} bytes in place of 8")
    base = 24 if version == 0 else 28 if version == 1 else 12
    if _int(head, base) != 0:
        raise UnknownError(f"addresses that are counted from byte {_int(head, base)}")
    if version < 2:
        n_children = 64 if version == 0 else 2 * _int(head, 24, 2)
        if _int(head, base + 24) != UNDEFINED:
            raise UnknownError("a driver of its own (a family of files, for instance)")
        return Superblock(version, _int(head, base + 16), Spot(base + 16), n_children)
    if lookup3(head[:44]) != _int(head, 44, 4):
        raise UnknownError("a superblock whose checksum is wrong")
    if head[11]:
        raise UnknownError(
            "the mark of a program that has it open for writing, or was killed (if none does, `h5clear -s` removes the mark)"
        )
    n_children, extension = 64, _int(head, 20)
    if extension != UNDEFINED:
        n_children = _read_extension(read, extension)
    return Superblock(version, _int(head, 28), Spot(28, (0, 44)), n_children)


def _read_extension(read: Read, address: int) -> int:
    """The messages of the superblock: children of a node."""
    n_children = 64
    for one in read_header(read, address):
        if one.kind == _B_TREE_KS:
            n_children = 2 * _int(one.data, 1, 2)
        elif one.kind == _FILE_SPACE:
            version, strategy, persists = one.data[0], one.data[1], one.data[2]
            if version == 0:  # 1 and 2: free space is kept
                strategy, persists = 0, int(one.data[1] in (1, 2))
            if strategy == 1:
                raise UnknownError("its space in pages (`fs_strategy='page'`)")
            if persists:
                raise UnknownError("a list of its free space (`fs_persist=True`)")
        elif one.kind in (_DRIVER, _SHARED_TABLE, _CACHE_IMAGE):
            what = {_DRIVER: "a driver of its own", _SHARED_TABLE: "shared messages", _CACHE_IMAGE: "a cache image"}
            raise UnknownError(what[one.kind])
    return n_children


# --- object headers


@dataclass(frozen=True)
class Message:
    """A message of an object header.

    Attributes
    ----------
    kind, flags : int
        Its type and flags.
    offset : int
        Where its content begins in the file.
    data : bytes
        Its content.
    block : (int, int) or None
        As in `Spot`.
    """

    kind: int
    flags: int
    offset: int
    data: bytes
    block: tuple[int, int] | None

    def spot(self, at: int) -> Spot:
        """A number in its content."""
        return Spot(self.offset + at, self.block)

    @property
    def is_shared(self) -> bool:
        """True if its content is elsewhere."""
        return bool(self.flags & _SHARED)


def read_header(read: Read, address: int, *, is_checked: bool = True) -> list[Message]:
    """The messages of the object header at an address, in order. UnknownError if it is damaged.

    Checksums are looked at unless `is_checked` is False: HDF5 does that too when it opens a dataset.
    """
    head = read(address, 16)
    if head.startswith(b"OHDR"):
        return _read_2(read, address, head, is_checked)
    if head[:1] != b"\1":
        raise UnknownError(f"an object header that begins with {head[:4]!r} at {address}")
    found: list[Message] = []
    todo, total = [(address + 16, _int(head, 8, 4))], 0
    for k, (start, nbytes) in enumerate(todo):  # grows: each continuation is one more block
        total += nbytes
        data, at = _block(read, start, nbytes, k, total), 0
        while at + 8 <= nbytes:
            kind, size, flags = _int(data, at, 2), _int(data, at + 2, 2), data[at + 4]
            found.append(Message(kind, flags, start + at + 8, data[at + 8 : at + 8 + size], None))
            if kind == CONTINUATION:
                todo.append((_int(data, at + 8), _int(data, at + 16)))
            at += 8 + size
        if at != nbytes:
            raise UnknownError(f"an object header whose messages have {at} bytes in place of {nbytes}, at {start}")
    return found


def _read_2(read: Read, address: int, head: bytes, is_checked: bool) -> list[Message]:
    flags = head[5]
    if head[4] != 2:
        raise UnknownError(f"an object header of version {head[4]}")
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
        if is_checked and lookup3(data[:end]) != _int(data, end, 4):
            raise UnknownError(f"an object header whose checksum is wrong, at {start}")
        if k and not data.startswith(b"OCHK"):
            raise UnknownError(f"an object header whose next block begins with {data[:4]!r}, at {start}")
        at = first
        while at + prefix <= end:  # what is left may be a gap that is too short for a message
            kind, size, bits = data[at], _int(data, at + 1, 2), data[at + 3]
            content = data[at + prefix : at + prefix + size]
            if at + prefix + size > end:
                raise UnknownError(f"an object header with a message that is too long, at {start + at}")
            found.append(Message(kind, bits, start + at + prefix, content, (start, start + end)))
            if kind == CONTINUATION:
                todo.append((_int(content, 0), 4, _int(content, 8)))
            at += prefix + size
    return found


def nbytes_of_attributes(read: Read, address: int) -> int:
    """Bytes of an object's attributes that are stored apart from its header, in a heap; 0 if there is none.

    HDF5 says it too, but goes through the index of all chunks of a dataset for it. UnknownError if it cannot be told.
    """
    for message in read_header(read, address, is_checked=False):
        if message.kind == _ATTRIBUTE_INFO:
            place = _int(message.data, 2 + 2 * (message.data[1] & 1))
            if message.is_shared or message.data[0] != 0:
                raise UnknownError("attributes of an unknown kind")
            if place == UNDEFINED:
                return 0
            heap = read(place, 94)
            if len(heap) < 94 or not heap.startswith(b"FRHP\0"):
                raise UnknownError(f"a heap of attributes that begins with {heap[:4]!r} at {place}")
            return _int(heap, 54) + _int(heap, 78)  # of blocks for small attributes, and of large ones
    return 0


@dataclass(frozen=True)
class Move:
    """A block of messages somewhere else.

    Attributes
    ----------
    data : bytes
        The block.
    patch : Patch
        The write that leads to it.
    first : tuple of int or None
        The block that must be moved before, because that write would not be in one page.
    """

    data: bytes
    patch: Patch
    first: tuple[int, int] | None

    @classmethod
    def of(cls, read: Read, address: int, block: tuple[int, int], place: int) -> Move:
        """Move a block of the header at an address (of version 2) to `place`. UnknownError if that cannot be done safely."""
        data = read(block[0], block[1] + 4 - block[0])
        if data.startswith(b"OCHK"):
            leads = (one for one in read_header(read, address) if one.kind == CONTINUATION and _int(one.data, 0) == block[0])
            spot = next(leads).spot(0)
            return cls(data, spot.changed(read, place), None if spot.is_in_one_page else spot.block)
        at = _size_at(data)
        width = 1 << (data[5] & 3)
        moved = b"OCHK" + data[at + width : -4]
        moved += lookup3(moved).to_bytes(4, "little")
        numbers = place.to_bytes(8, "little") + len(moved).to_bytes(8, "little")
        message = bytes([CONTINUATION, len(numbers), 0, 0]) + bytes(2 if data[5] & 4 else 0) + numbers
        short = data[:at] + len(message).to_bytes(width, "little") + message
        short += lookup3(short).to_bytes(4, "little")
        patch = Patch(block[0] + at, data[at : len(short)], short[at:])
        if len(short) > len(data) or len(moved) > PAGE or not _is_in_one_page(patch.offset, len(patch.new)):
            where = f"bytes {block[0]} to {block[1] + 4}"
            raise UnknownError(f"a header, {where}, in two pages of {PAGE} bytes, so that a kill could change half of it")
        return cls(moved, patch, None)


def _size_at(header: bytes) -> int:
    """Where a header of version 2 has the size of its first block."""
    return 6 + (16 if header[5] & 32 else 0) + (4 if header[5] & 16 else 0)


def check_moves(read: Read, address: int, spot: Spot) -> None:
    """UnknownError if a number cannot be changed safely, also if its block is moved."""
    block = None if spot.is_in_one_page else spot.block
    if block is None and not spot.is_in_one_page:
        raise UnknownError(f"a number in two pages of {PAGE} bytes, at {spot.offset}")
    while block is not None:
        if block[1] + 4 - block[0] > PAGE:
            raise UnknownError(
                f"a header with a block of {block[1] + 4 - block[0]} bytes, which a kill could leave half changed"
            )
        block = Move.of(read, address, block, 0).first


def _block(read: Read, start: int, nbytes: int, k: int, total: int) -> bytes:
    if k > _MOST_BLOCKS or total > _MOST_NBYTES:
        raise UnknownError(f"an object header that is too long, at {start}")
    data = read(start, nbytes)
    if len(data) < nbytes:
        raise UnknownError(f"an object header that is cut off, at {start}")
    return data


def _int(data: bytes, at: int, nbytes: int = 8) -> int:
    return int.from_bytes(data[at : at + nbytes], "little")
