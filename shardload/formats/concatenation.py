"""What stands for several files wherever a path is taken? A text that has with it the file that they are together.

That file says which arrays lie in which part, as virtual datasets of HDF5 (`shardload join` writes the same), and is small: so
every rank has its bytes in memory, and reads it as any other file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardload.storage.local import Fence

SCHEME = "concat://"


@dataclass(frozen=True, eq=False, repr=False)
class Concatenation(str):
    """Several files as one. Pass it in the place of a path.

    As text it names the files, and is another one if one of them changes.

    Attributes
    ----------
    text : str
        As it is shown.
    image : bytes
        The HDF5 file that they are together.
    versions : tuple
        The absolute path of each file, in order, with its size and time when it was looked at.
    fence : Fence
        The folders that they are in.
    told : str
        The names of the files, and a checksum of these and of the shapes in them: the same wherever they are.
    summary : str
        Which arrays they have together, and what was left out, for people.
    """

    text: str
    image: bytes
    versions: tuple[tuple[str, tuple[int, ...]], ...]
    fence: Fence
    told: str
    summary: str

    def __new__(cls, text: str, *_: Any) -> Concatenation:
        """The text alone is what a path is."""
        return super().__new__(cls, text)

    @property
    def parts(self) -> tuple[str, ...]:
        """The files, in their order along the axis."""
        return tuple(path for path, _ in self.versions)
