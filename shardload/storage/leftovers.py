"""What has a save or an append that was killed left behind, is it whole, and what should be done with it?

A save that was killed leaves ``NAME.TOKEN.unfinished``, and a Zarr store that was being replaced may stay as
``NAME.TOKEN.replaced`` (see `target`). Nobody but the user removes them: a save may still be at work there.
docs/design/save.md says when which of them is on disk.
"""

from __future__ import annotations

import glob
import os
import shlex
from dataclasses import dataclass

from shardload.errors import SourceError
from shardload.storage.changes import changes_of, locked_path
from shardload.storage.local import head_of
from shardload.storage.target import FOLDER_MARK, GROWTH_MARK, MARK_BEGINS, MARK_NBYTES, temporary_of

ROOTS = ("zarr.json", ".zgroup", ".zarray")  # one of them makes a folder a Zarr store
NODE_FILES = (*ROOTS, ".zattrs")  # the metadata of one array or group
METADATA = {*NODE_FILES, ".zmetadata"}

_TEXTS = {
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
    kind : str
        ``"unfinished"``: what the save wrote. ``"linked"``: a second name of the target. ``"replaced"``: what had the name
        before. ``"appended"``: new rows of the target, which it may have or not. ``"appending"``: a file that keeps other
        appends away. ``"changes"``: the end of an append, without which the target cannot be read.
    is_whole : bool
        Whether it can be used. Of what was replaced, parts may be removed already if the name exists.
    goes_on : bool
        Whether a copy can go on with it.
    """

    path: str
    target: str
    kind: str
    is_whole: bool = False
    goes_on: bool = False

    @property
    def description(self) -> str:
        """What it is, in words that follow its path."""
        if self.kind == "unfinished" and self.is_whole:
            return f"is a whole file that a save to '{self.target}' wrote and did not name: it may not have been compared"
        part = ", perhaps only a part of it" if self.kind == "replaced" and not self.is_whole else ""
        return _TEXTS[self.kind].format(self.target) + part

    @property
    def condition(self) -> str:
        """When `commands` may be typed."""
        call = "append" if self.kind.startswith(("append", "changes")) else "copy" if self.goes_on else "save"
        return f"If no {call} runs there any more"

    @property
    def commands(self) -> list[tuple[str, str]]:
        """What to do under this `condition`: in words, and what to type."""
        if self.kind == "changes":
            return [("complete it", f"shardload info {shlex.quote(self.target)}")]
        remove = "remove it", shlex.join(["rm", *(["-r"] if os.path.isdir(self.path) else []), self.path])
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
        commands = ", or ".join(f"{purpose}: `{command}`" for purpose, command in self.commands)
        return f"'{self.path}' {self.description}. {self.condition}, {commands}."


def find_leftover(path: str) -> Leftover | None:
    """What a temporary of a save is; None for any other path, and for one that does not exist.

    Reads the first bytes, or names in the folder; no values.
    """
    path = path.rstrip("/")
    locked = locked_path(path)
    if locked is not None:
        return Leftover(path, locked, "appending")
    parsed = temporary_of(path)
    if parsed is None or not os.path.exists(path):
        return None
    target, kind = parsed
    if os.path.isdir(path):
        names = set(os.listdir(path))
        if GROWTH_MARK in names:
            return Leftover(path, target, "appended")
        is_whole = FOLDER_MARK not in names and any(root in names for root in ROOTS)
        is_whole = is_whole and (kind == "unfinished" or not os.path.lexists(target))
        goes_on = FOLDER_MARK in names and os.path.getsize(os.path.join(path, FOLDER_MARK)) > MARK_NBYTES
        return Leftover(path, target, kind, is_whole, goes_on=goes_on)
    if kind == "changes":
        is_needed = changes_of(os.path.realpath(target)) == os.path.realpath(path)
        return Leftover(path, target, "changes" if is_needed else "appended")
    head = head_of(path)
    if head[MARK_NBYTES:].startswith(GROWTH_MARK.encode()):
        return Leftover(path, target, "appended")
    if os.path.exists(target) and os.path.samefile(path, target):
        return Leftover(path, target, "linked")
    return Leftover(path, target, kind, bool(head) and not head.startswith(MARK_BEGINS))


def leftovers_beside(path: str) -> list[Leftover]:
    """What saves and appends to `path` have left beside it, or are writing now."""
    final = os.path.realpath(path)
    folder, name = os.path.split(final)
    names = glob.glob(f"{glob.escape(name)}.*", root_dir=folder, include_hidden=True)
    leftovers = (find_leftover(os.path.join(folder, beside)) for beside in sorted(names))
    return [leftover for leftover in leftovers if leftover is not None and leftover.target == final]


def whole_beside(path: str) -> str:
    """Sentences about the whole files or stores that a save has left beside a path that does not exist, for a message."""
    return "".join(f" Beside it: {leftover}" for leftover in leftovers_beside(path) if leftover.is_whole)


def refuse_leftover(path: str) -> None:
    """Raise SourceError if `path` is a temporary of a save: it may be removed any moment, and was perhaps never read back."""
    leftover = None if "://" in path else find_leftover(path)
    if leftover is not None:
        raise SourceError(str(leftover), path=path)
