"""What stands for several files wherever a path is taken? A text with a file that has the arrays of all of them.

That file says which arrays lie in which part, as virtual datasets of HDF5 (`shardload join` writes the same), and is small: so
every rank has its bytes in memory, and reads it as any other file. Of parts at URLs it has the places of all chunks, too, so
that no rank looks them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardload.storage.local import Fence
from shardload.storage.remote import StorageOptions

SCHEME = "concat://"


@dataclass(frozen=True, eq=False, repr=False)
class Concatenation(str):
    """Several files as one. Pass it in the place of a path.

    As text it names the files. The text changes if one of them does.

    Attributes
    ----------
    text : str
        This text.
    image : bytes
        An HDF5 file with their arrays as virtual datasets.
    versions : tuple
        The absolute path of each file, in order, with its size and time when it was looked at.
    fence : Fence
        The folders that they are in.
    fingerprint : str
        The names of the files, with a checksum of the names and of the shapes in them: the same in every folder.
    summary : str
        The arrays that it has, and what was left out, for people.
    in_store : mapping
        Of parts at URLs what ranks that read them must know (`hdf5.tiles.PartMetadata`), by URL and name of the array.
    storage : StorageOptions
        How this rank reaches these stores.
    """

    text: str
    image: bytes
    versions: tuple[tuple[str, tuple[int, ...]], ...]
    fence: Fence
    fingerprint: str
    summary: str
    in_store: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    storage: StorageOptions = field(default_factory=lambda: StorageOptions({}))

    def __new__(cls, text: str, *_: Any, **__: Any) -> Concatenation:
        """The text alone is what a path is."""
        return super().__new__(cls, text)

    @property
    def parts(self) -> tuple[str, ...]:
        """The files, in their order along the axis."""
        return tuple(path for path, _ in self.versions)
