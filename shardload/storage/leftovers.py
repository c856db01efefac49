"""What is this temporary of a save, is it whole, and what should be done with it?

A save that was killed leaves ``NAME.TOKEN.unfinished``, and a Zarr store that was being replaced may stay as
``NAME.TOKEN.replaced`` (see `target`). Nobody but the user removes them: a save may still be at work there.
docs/design/save.md says when which of them is on disk.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from shardload.errors import SourceError
from shardload.storage.changes import changes_of, how_to_remove, locked_path, parts_of
from shardload.storage.local import open_file
from shardload.storage.target import FOLDER_MARK, GROWTH_MARK, MARK_BEGINS, MARK_NBYTES, temporary_of

ROOTS = ("zarr.json", ".zgroup", ".zarray")  # one of them makes a folder a Zarr store
METADATA = {*ROOTS, ".zattrs", ".zmetadata"}


_IS = {
    "appending": "says that '{}' is being appended to; if that was killed, no other append can begin",
    "changes": "is the end of an append to '{}', which cannot be read without it",
    "appended": "belongs to an append to '{}' that has not ended",
    "linked": "is a second name of '{}', which was saved as a whole",
    "replaced": "is what '{}' was before a save replaced it",
    "unfinished": "is what a save to '{}' has written so far: no whole file",
}


@dataclass(frozen=True)
class Leftover:
    """A temporary of a save.

    Attributes
    ----------
    path : str
        The temporary.
    target : str
        The name that was asked for.
    what : str
        ``"unfinished"``: what the save wrote. ``"linked"``: a second name of the target. ``"replaced"``: what had the name
        before. ``"appended"``: new rows of the target, which it may have or not. ``"appending"``: a file that keeps other
        appends away. ``"changes"``: the end of an append, without which the target cannot be read.
    is_whole : bool
        Whether it can be used. Of what was replaced, parts may be removed already if the name exists.
    goes_on : bool
        Whether a copy can go on with it.
    parts : list of str
        What goes with it: of a file that keeps other appends away, the temporary of that append.
    """

    path: str
    target: str
    what: str
    is_whole: bool = False
    goes_on: bool = False
    parts: Sequence[str] = ()

    @property
    def told(self) -> str:
        """What it is, without its path: words that follow it."""
        if self.what == "unfinished" and self.is_whole:
            return f"is a whole file that a save to '{self.target}' wrote and did not name: it may not have been compared"
        part = ", perhaps only a part of it" if self.what == "replaced" and not self.is_whole else ""
        return _IS[self.what].format(self.target) + part

    @property
    def condition(self) -> str:
        """When `commands` may be typed."""
        call = "append" if self.what.startswith(("append", "changes")) else "copy" if self.goes_on else "save"
        return f"If no {call} runs there any more"

    @property
    def commands(self) -> list[tuple[str, str]]:
        """What to do under this `condition`: in words, and what to type."""
        if self.what == "changes":
            return [("complete it", f"shardload info {shlex.quote(self.target)}")]
        remove = "remove what it left" if self.parts else "remove it", how_to_remove([self.path, *self.parts])
        if self.goes_on:
            return [("go on with it", f"shardload copy IN {shlex.quote(self.target)} --resume"), remove]
        if not self.is_whole:
            return [remove]
        target = self.target
        if os.path.lexists(target):
            root, suffix = os.path.splitext(target)
            target = f"{root}-1{suffix}"
        return [("give it a name to use it", f"mv -n {shlex.quote(self.path)} {shlex.quote(target)}"), remove]

    def __str__(self) -> str:
        commands = ", or ".join(f"{what}: `{command}`" for what, command in self.commands)
        return f"'{self.path}' {self.told}. {self.condition}, {commands}."


def find_leftover(path: str) -> Leftover | None:
    """What a temporary of a save is; None for any other path, and for one that does not exist.

    Reads the first bytes, or names in the folder; no values.
    """
    path = path.rstrip("/")
    locked = locked_path(path)
    if locked is not None:
        return Leftover(path, locked, "appending", parts=parts_of(path))
    found = temporary_of(path)
    if found is None or not os.path.exists(path):
        return None
    target, what = found
    if os.path.isdir(path):
        names = set(os.listdir(path))
        if GROWTH_MARK in names:
            return Leftover(path, target, "appended")
        is_whole = FOLDER_MARK not in names and any(root in names for root in ROOTS)
        is_whole = is_whole and (what == "unfinished" or not os.path.lexists(target))
        goes_on = FOLDER_MARK in names and os.path.getsize(os.path.join(path, FOLDER_MARK)) > MARK_NBYTES
        return Leftover(path, target, what, is_whole, goes_on=goes_on)
    if what == "changes":
        is_needed = changes_of(os.path.realpath(target)) == os.path.realpath(path)
        return Leftover(path, target, "changes" if is_needed else "appended")
    try:
        with os.fdopen(open_file(path), "rb") as file:
            head = file.read(len(MARK_BEGINS))
            file.seek(MARK_NBYTES)
            if file.read(len(GROWTH_MARK)) == GROWTH_MARK.encode():
                return Leftover(path, target, "appended")
    except OSError:
        return None
    if os.path.exists(target) and os.path.samefile(path, target):
        return Leftover(path, target, "linked")
    return Leftover(path, target, what, bool(head) and head != MARK_BEGINS)


def leftovers_beside(path: str) -> list[Leftover]:
    """What saves and appends to `path` have left beside it, or are writing now; without what goes with another of them."""
    final = os.path.realpath(path)
    folder, name = os.path.split(final)
    try:
        others = [other for other in sorted(os.listdir(folder)) if other.startswith(f"{name}.")]
    except OSError:  # the folder is not there, or may not be listed
        return []
    there = [left for other in others if (left := find_leftover(os.path.join(folder, other))) and left.target == final]
    parts = {part for left in there for part in left.parts}
    return [left for left in there if left.path not in parts]


def whole_beside(path: str) -> str:
    """Of a name that nothing has: the whole files or stores beside it that a save has left, as sentences for a message."""
    return "".join(f" Beside it: {left}" for left in leftovers_beside(path) if left.is_whole)


def refuse_leftover(path: str) -> None:
    """Raise SourceError if `path` is a temporary of a save: what is loaded from it may go any moment, or was never compared."""
    found = None if "://" in path else find_leftover(path)
    if found is not None:
        raise SourceError(str(found), path=path)
