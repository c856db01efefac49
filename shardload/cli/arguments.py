"""What do the flags of the command line mean? Text to plain values, or a message that says what to type.

The ``complete`` functions say what a flag may go on with, to shells.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import EllipsisType
from typing import IO

import typer

from shardload.errors import ShardloadError
from shardload.options import OPTIONS
from shardload.system.terminal import say_error, tell

__all__ = [
    "as_typed",
    "complete_mesh",
    "complete_spec",
    "completes",
    "names_of",
    "parse_mesh",
    "parse_pad",
    "parse_readers",
    "parse_select",
    "parse_spec",
    "show_error",
    "wrong",
]

_MOST_DEVICES = 2**24  # JAX makes an object for each; with 2**31 it fails, and before that it takes all memory


def names_of(given: Sequence[str] | None) -> str | list[str] | None:
    """What `dataset` is, from the values of ``--dataset``: one name, or a list of them.

    >>> names_of(["rho"]), names_of(["rho", "gas/*"]), names_of(None)
    ('rho', ['rho', 'gas/*'], None)
    """
    if not given:
        return None
    return given[0] if len(given) == 1 else list(given)


def parse_mesh(text: str) -> dict[str, int]:
    """Mesh axes and their sizes, in order, from ``--mesh``.

    >>> parse_mesh("a=4,b=2")
    {'a': 4, 'b': 2}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not (name.isidentifier() and equals and size.isdecimal() and int(size) > 0):
            raise wrong("--mesh", f"cannot read {part!r} in {text!r}: each axis is NAME=SIZE. Type --mesh a=4,b=2")
        if name in axes:
            raise wrong("--mesh", f"{text!r} has the axis {name!r} twice; give each axis its own name: --mesh a=4,b=2")
        axes[name] = int(size)
    if math.prod(axes.values()) > _MOST_DEVICES:
        many = f"{text!r} is a mesh of {math.prod(axes.values()):,} devices; expected at most {_MOST_DEVICES:,}"
        raise wrong("--mesh", f"{many}. Type smaller sizes: --mesh a=4,b=2")
    return axes


def parse_spec(text: str, axes: Mapping[str, int]) -> tuple[str | tuple[str, ...] | None, ...]:
    """What `jax.sharding.PartitionSpec` takes, from ``--spec``, checked against the mesh axes.

    >>> parse_spec("-,a,b+c", {"a": 2, "b": 2, "c": 2})
    (None, 'a', ('b', 'c'))
    """
    parts: list[str | tuple[str, ...] | None] = []
    seen: set[str] = set()
    for part in text.split(","):
        if part.strip() == "-":
            parts.append(None)
            continue
        names = tuple(name.strip() for name in part.split("+"))
        for name in names:
            if name not in axes:
                fix = "Type an axis of the mesh, - or a+b for each array axis: --spec -," + ",".join(list(axes)[:2])
                raise wrong("--spec", f"{text!r} names {name!r}, but --mesh has the axes {', '.join(axes)}. {fix}")
            if name in seen:
                raise wrong("--spec", f"{text!r} uses the mesh axis {name!r} twice; it can shard one array axis only.")
            seen.add(name)
        parts.append(names[0] if len(names) == 1 else names)
    return tuple(parts)


def parse_select(text: str) -> tuple[slice | int | EllipsisType, ...] | dict[str, slice | int]:
    """A NumPy-style basic index, or positions by names of axes, from ``--select``; what it means is for the library to say.

    >>> parse_select("0,:,10:20")
    (0, slice(None, None, None), slice(10, 20, None))
    >>> parse_select("time=-1,lat=10:50")
    {'time': -1, 'lat': slice(10, 50, None)}
    """
    if "=" in text:
        named: dict[str, slice | int] = {}
        for piece in text.strip("[] ").split(","):
            name, _, typed = (word.strip() for word in piece.partition("="))
            part = _position(typed)
            if not name or part is None or isinstance(part, EllipsisType):
                fix = (
                    "Each is NAME=POSITION or NAME=START:STOP, with positions that count from 0, not the values of coordinates"
                )
                raise wrong(
                    "--select", f'cannot read {piece!r} in {text!r}. {fix}. Type for example --select "time=-1,lat=10:50"'
                )
            if name in named:
                raise wrong("--select", f"{text!r} has the axis {name!r} twice; give each axis once")
            named[name] = part
        return named
    parts: list[slice | int | EllipsisType] = []
    for typed in (piece.strip() for piece in text.strip("[] ").split(",")):
        part = _position(typed)
        if part is None:
            fix = "Each axis takes an integer, a slice or '...'. Type for example --select \"0,:,10:20\", "
            fix += 'or "time=-1,lat=10:50" by names of axes'
            raise wrong("--select", f"cannot read {typed!r} in {text!r}. {fix}")
        parts.append(part)
    return tuple(parts)


def _position(text: str) -> slice | int | EllipsisType | None:
    """An integer, a slice or ``...``, of one axis; None if it cannot be read."""
    if text == "...":
        return ...
    try:
        if ":" not in text:
            return int(text)
        bounds = [int(bound) if bound.strip() else None for bound in text.split(":")]
        return slice(*bounds) if len(bounds) > 2 else slice(bounds[0], bounds[1])
    except (ValueError, TypeError):
        return None


def parse_pad(text: str) -> int | float:
    """A number, from ``--pad``; an integer stays one.

    >>> parse_pad("0"), parse_pad("1e20")
    (0, 1e+20)
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise wrong("--pad", f"{text!r} is not a number. Type for example --pad 0")


def parse_readers(text: str) -> str | int:
    """A way of reading, or how many processes read, from ``--readers``; the library says which ways there are.

    >>> parse_readers("direct"), parse_readers("16")
    ('direct', 16)
    """
    return int(text) if text.isascii() and text.isdecimal() else text


def completes(*words: str) -> Callable[[str], list[str]]:
    """What completes a flag that takes one of `words`.

    >>> completes("warn", "error")("w")
    ['warn']
    """
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def complete_mesh(incomplete: str) -> list[str]:
    """Usual meshes, or sizes for the axis that is being typed.

    >>> complete_mesh("n"), complete_mesh("a=2,b=")[:2]
    (['n=4', 'n=8'], ['a=2,b=1', 'a=2,b=2'])
    """
    _, equals, size = incomplete.rpartition("=")
    if equals and not size:
        return [f"{incomplete}{2**k}" for k in range(7)]
    return [mesh for mesh in ("a=2,b=2", "a=4,b=2", "a=4,b=4", "n=4", "n=8") if mesh.startswith(incomplete)]


def complete_spec(ctx: typer.Context, incomplete: str) -> list[str]:
    """What the next array axis can be cut by: mesh axes of ``--mesh`` that are not used yet, or none."""
    axes = {"a": 0, "b": 0}
    with suppress(typer.BadParameter):
        axes = parse_mesh(ctx.params.get("mesh") or "")
    head = incomplete[: 1 + max(incomplete.rfind(","), incomplete.rfind("+"))]
    used = head.replace("+", ",").split(",")
    names = [name for name in axes if name not in used] + ["-"] * (not head.endswith("+"))
    return [head + name for name in names if (head + name).startswith(incomplete)]


_FLAGS = {name: option.flag for name, option in OPTIONS.items() if option.flag}
_FLAGS |= {
    name: f"--{name}" for name in ("axis", "chunks", "compression", "format", "mode", "resume", "shards", "stack", "unlimited")
}
_KEYWORD = re.compile(rf"(?<![\w.\"'/-])({'|'.join(_FLAGS)})=((?:'[^']*'|\"[^\"]*\"|\([\d, ]*\)|[\w.]*\w)?)")


def as_typed(message: str) -> str:
    """A message of the library, with the flags of the command line in the place of its keywords.

    >>> as_typed("axis 1 has 30 elements. Pass pad=0 (or another fill value), dtype='float32' or allow_external=True")
    'axis 1 has 30 elements. Pass --pad 0 (or another fill value), --dtype float32 or --allow-external'
    >>> as_typed("Pass decode=True to apply that, decode=False if the stored numbers are meant")
    'Pass --decode to apply that, --no-decode if the stored numbers are meant'
    >>> as_typed("only chunks are compressed. Pass chunks=(64, 64)"), as_typed("Pass axis=, one of 'time', 'lat'")
    ('only chunks are compressed. Pass --chunks 64,64', "Pass --axis, one of 'time', 'lat'")
    """
    return _KEYWORD.sub(lambda match: _flag(match[1], match[2]), message)


def _flag(name: str, value: str) -> str:
    bare = value.strip("'\"")
    if bare.startswith("("):
        bare = bare.strip("(),").replace(" ", "")
    if bare == "False":
        return _FLAGS[name].replace("--", "--no-", 1)
    return _FLAGS[name] if not bare or bare == "True" else f"{_FLAGS[name]} {shlex.quote(bare)}"


def wrong(flag: str, message: str) -> typer.BadParameter:
    """The error of a flag that cannot be read."""
    return typer.BadParameter(message, param_hint=flag)


def show_error(error: ShardloadError, message: str, out: IO[str], as_json: bool) -> None:
    """Say on stderr what went wrong, as `message`; with `as_json` also as one JSON document on `out`."""
    try:
        if as_json:
            told = {"ok": False, "error": type(error).__name__, "message": message}
            tell(json.dumps(told, indent=2), out)
    finally:
        say_error(message)
