"""What do the flags of the command line mean? Text to plain values, or a message that says what to type."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import EllipsisType
from typing import IO, Annotated, Any, cast

import typer

from shardload.comm.mpi import is_connected, launched, task
from shardload.errors import ShardloadError, ShardloadWarning, printable
from shardload.options import OPTIONS
from shardload.system.terminal import own_stdout, say_error

_LATER_SECONDS = 2.0
_MOST_DEVICES = 2**24  # JAX makes an object for each; with 2**31 it fails, and before that it takes all memory


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


def parse_spec(text: str) -> Any:
    """What `jax.sharding.PartitionSpec` takes, or a spec by names of axes, from ``--spec``. The library knows which there are.

    >>> parse_spec("-,a,b+c"), parse_spec("lat=a,lon=-"), parse_spec("-")
    ((None, 'a', ('b', 'c')), {'lat': 'a', 'lon': None}, ())
    """
    if text.strip() in ("-", "None"):  # of an array without axes, too
        return ()
    pairs = [part.rpartition("=") for part in text.split(",")]
    dims = [name.strip() for name, _, _ in pairs]
    cuts = [tuple(name.strip() for name in part.split("+")) for _, _, part in pairs]
    if not all(map(all, cuts)) or ("=" in text and (not all(dims) or len(set(dims)) < len(dims))):
        fix = "Type an axis of the mesh, - or a+b for each array axis: --spec -,a,b; or by names, each once: --spec lat=a,lon=b"
        raise wrong("--spec", f"cannot read {text!r}. {fix}")
    parts = [None if cut[0] in ("-", "None") else cut[0] if len(cut) == 1 else cut for cut in cuts]
    return dict(zip(dims, parts, strict=True)) if "=" in text else tuple(parts)


def parse_select(text: str) -> tuple[slice | int | EllipsisType, ...] | dict[str, Any]:
    """A NumPy-style basic index, or positions by names of axes, from ``--select``; what it means is for the library to say.

    By names also values of coordinates: a date or a number with a point is the nearest one, and ``..`` is between two.

    >>> parse_select("0,:,10:20")
    (0, slice(None, None, None), slice(10, 20, None))
    >>> parse_select("time=-1,lat=10:50")
    {'time': -1, 'lat': slice(10, 50, None)}
    >>> parse_select("time=2001-06-15T12,lat=30..60,lon=12.5")
    {'time': near('2001-06-15T12'), 'lat': between(30, 60), 'lon': near(12.5)}
    """
    parts: list[slice | int | EllipsisType] = []
    by_name: dict[str, Any] = {}
    for piece in text.strip("[] ").split(","):
        name, equals, typed = piece.rpartition("=")
        part: Any = _position(typed.strip())
        if part is None and equals:
            part = _coordinate(typed.strip())
        if part is None or bool(equals) != ("=" in text) or (equals and (not name.strip() or part is ...)):
            fix = "Each axis takes an integer, a slice or '...': positions that count from 0"
            advice = f'{fix}. Type for example --select "0,:,10:20"; by names of axes "time=-1,lat=10:50", or by their '
            advice += 'coordinates "time=2001-06..2001-08,lat=52.5"'
            raise wrong("--select", f"cannot read {piece.strip()!r} in {text!r}. {advice}")
        if name.strip() in by_name:
            raise wrong("--select", f"{text!r} has the axis {name.strip()!r} twice; give each axis once")
        if equals and not isinstance(part, EllipsisType):
            by_name[name.strip()] = part
        parts.append(part)
    return by_name or tuple(parts)


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


def _coordinate(text: str) -> Any:
    """A selection by coordinate: `near` a value or `between` two; None if it cannot be read. A month is taken whole."""
    from shardload.planning.selection import between, near

    low, dots, high = text.partition("..")
    ends = [_typed_end(end) for end in (low, high or low)]
    if None in ends:
        return None
    if dots and all(re.fullmatch(r"(1[5-9]|2[0-4])\d\d", end.strip()) for end in (low, high)):
        # On an axis in days they would be days.
        years = f"{low.strip()}-01..{high.strip()}-12"
        raise wrong("--select", f"{text!r} may be years or numbers. Type {years}, or {low.strip()}.0..{high.strip()}.0")
    is_month = not dots and re.fullmatch(r"\d{4}-\d{1,2}", text) is not None
    return between(*ends) if dots or is_month else near(ends[0])


def _typed_end(text: str) -> int | float | str | None:
    if re.fullmatch(r"\d{4}-\d{1,2}(-\d{1,2}([T ]\d{1,2}(:\d{1,2}){0,2})?)?", text):
        return text
    number = _number_or_word(text)
    return None if isinstance(number, str) else number


def parse_plain(text: str) -> Any:
    """Numbers and words: the fill value of ``--pad``, an axis by name or number. Several, or one with a comma, are a tuple.

    >>> [parse_plain(text) for text in ("0", "1e20", "parallel", "none", "(128, 64)", "time,-1", "0,")]
    [0, 1e+20, 'parallel', None, (128, 64), ('time', -1), (0,)]
    """
    parts = [_number_or_word(part.strip()) for part in text.strip("() ").removesuffix(",").split(",")]
    return tuple(parts) if "," in text else parts[0]


def _number_or_word(text: str) -> int | float | str | None:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return None if text.lower() == "none" else text


def parse_storage(text: str) -> tuple[str, str]:
    """An option of a store, from ``--storage``. Its value is in no message: it may be a key.

    >>> parse_storage("region=us-west-2")
    ('region', 'us-west-2')

    A header of requests is ``default_headers.NAME=VALUE``.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise wrong("--storage", "there is no name and '='. Type for example --storage region=us-west-2, once for each option")
    return name.strip(), value


KEEP = "keep"
_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "select": ("TEXT", parse_select),
    "pad": ("NUMBER", parse_plain),
    "readers": ("WAY|N", parse_plain),
    "chunks": ("N,...|none", parse_plain),
    "shards": ("N,...|none", parse_plain),
    "compression": ("NAME[:LEVEL][+shuffle]|none", str),
    "unlimited": ("AXIS,...", parse_plain),
    "along": ("AXIS", parse_plain),
    "window": ("STEP,...", parse_plain),
    "stack": ("NAME", str),
    "storage": ("NAME=VALUE", parse_storage),
}
_SWITCHES = ("decode", "progress")  # which can be switched off, too
# The groups of options in ``--help``.
_PANELS: dict[str, tuple[str, ...]] = {
    "Which values": ("dataset", "along", "select", "dtype", "decode", "pad", "missing"),
    "Batches": ("batch", "window", "shuffle", "pool", "prefetch", "border", "gaps"),
    "The new file": ("stack", "chunks", "shards", "compression", "unlimited", "format", "mode"),
    "How it is done": ("readers", "staging", "verify", "progress", "processes", "ranks_per_node"),
    "Trust, and stores": ("allow_external", "allow_filters", "untrusted", "storage"),
}


def as_typed(message: str) -> str:
    """A message of the library, with flags in the place of the keywords that it names.

    >>> as_typed("axis 1 has 30 elements. Pass pad=np.nan (or another fill value), dtype='float32' or allow_external=True")
    'axis 1 has 30 elements. Pass --pad nan (or another fill value), --dtype float32 or --allow-external'
    >>> as_typed("Pass decode=True to apply that, decode=False if the stored numbers are meant")
    'Pass --decode to apply that, --no-decode if the stored numbers are meant'
    >>> as_typed("only chunks are compressed. Pass chunks=(64, 64)"), as_typed("Pass axis=, one of 'time', 'lat'")
    ('only chunks are compressed. Pass --chunks 64,64', "Pass --axis, one of 'time', 'lat'")
    >>> as_typed("Pass storage={'region': 'us-west-2'}, or storage={'skip_signature': True}")
    'Pass --storage region=us-west-2, or --storage skip_signature=true'
    >>> as_typed("name it, too: dataset=['*', 'g/x'], or 'g/*' for a group")
    "name it, too: --dataset '*' --dataset 'g/x', or 'g/*' for a group"
    >>> as_typed("Pass storage={'default_headers': {'authorization': ...}}")
    'Pass --storage default_headers.authorization=...'
    """
    return _KEYWORD.sub(lambda match: _flag(match[1], match[2]), message)


_FLAGS = {name: f"--{name.replace('_', '-')}" for names in (*_PANELS.values(), ("axis", "resume")) for name in names}
_KEYWORD = re.compile(
    rf"(?<![\w.\"'/-])({'|'.join(_FLAGS)})="
    r"((?:'[^']*'|\"[^\"]*\"|\([\d, ]*\)|\[[^\[\]]*\]|\{(?:[^{}]|\{[^{}]*\})*\}|[\w.]*\w)?)"
)


def _flag(name: str, value: str) -> str:
    bare = value.strip("'\"")
    if bare.startswith("{"):
        bare = re.sub(r"['\"](\w+)['\"]: \{['\"](\w+)['\"]", r"'\1.\2'", bare).replace("}", "")
        pairs = re.findall(r"'([\w.]+)': '?([\w./:-]+)", bare)
        return " ".join(f"{_FLAGS[name]} {key}={'true' if typed == 'True' else typed}" for key, typed in pairs)
    if bare.startswith("["):
        return " ".join(f"{_FLAGS[name]} {typed}" for typed in re.findall("'[^']*'", bare))
    if bare.startswith("("):
        bare = bare.strip("(),").replace(" ", "")
    bare = bare.removeprefix("np.")
    if bare == "False":
        return _FLAGS[name].replace("--", "--no-", 1)
    return _FLAGS[name] if not bare or bare == "True" else f"{_FLAGS[name]} {'none' if bare == 'None' else shlex.quote(bare)}"


def say_note(text: str) -> None:
    """Print on standard error what a person should know beside the result, with flags."""
    print(f"shardload: {printable(as_typed(text))}", file=sys.stderr, flush=True)


def wrong(flag: str, message: str) -> typer.BadParameter:
    """The error of a flag that cannot be read."""
    return typer.BadParameter(message, param_hint=flag)


def takes(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options of the library, as flags with their declared help, in the place of its ``**options``.

    `defaults` are options whose default or help is another one for this command: ``verify=(default, help)``.
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        *parameters, _ = signature.parameters.values()
        as_json = [parameters.pop().replace(kind=inspect.Parameter.KEYWORD_ONLY)] if parameters[-1].name == "as_json" else []
        parameters += [*(_parameter(name, *defaults.get(name, ())) for name in names), *as_json]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return give


def _parameter(name: str, default: Any = ..., help: str = "", *aliases: str) -> inspect.Parameter:
    option = OPTIONS[name]
    kind: Any = str
    metavar = "WORD" if option.choices else "TEXT"
    parser: Callable[[str], Any] | None = None
    if name == "dataset":
        kind, metavar = list[str], "NAME"
    elif isinstance(option.default, bool) or name in _SWITCHES:
        kind, metavar = bool, ""
    elif name in ("processes", "ranks_per_node", "batch", "shuffle", "prefetch"):
        kind, metavar = int, "N"
    elif name in _PARSERS:
        kind, (metavar, parser) = list[Any] if name == "storage" else Any, _PARSERS[name]
    flags = [f"{_FLAGS[name]}/{_FLAGS[name].replace('--', '--no-', 1)}" if name in _SWITCHES else _FLAGS[name], *aliases]
    default = option.default if default is ... else default
    default = ",".join(default) if isinstance(default, tuple) else default
    declared = typer.Option(
        *flags,
        help=help or option.help,
        metavar=metavar,
        parser=parser,
        autocompletion=lambda incomplete: [word for word in option.choices or () if word.startswith(incomplete)],
        rich_help_panel=next(panel for panel, members in _PANELS.items() if name in members),
    )
    annotation: Any = Annotated[kind if default is not None else kind | None, declared]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def says_what_is_wrong() -> bool:
    """Whether this task of a job is to say what is wrong: the first one alone, if there is a way to know that it does.

    Tasks that are apart cannot ask each other. Some launchers (Open MPI's, ``srun -K``) end a job at the first task that fails,
    so the others wait for the first one's message. If they still run then, the first task may be late: they say it too.
    MPICH's launcher waits for all tasks.
    """
    launcher, n = launched(os.environ)
    if n == 1 or task(os.environ) == 0:
        return True
    from shardload.comm.store import jax_processes  # with NumPy: ``--help`` need not wait for it

    if is_connected() or jax_processes()[2] > 1:
        return False
    time.sleep(_LATER_SECONDS)
    return launcher != "mpiexec"


@contextmanager
def one_message(as_json: bool) -> Iterator[IO[str]]:
    """A stream to print on. A `ShardloadError` is its message on stderr, by the first task, and exit code 1: the message says
    what to do, a traceback does not. With `as_json` it is also one JSON document. A `ShardloadWarning` is its message, too.
    """
    show = warnings.showwarning

    def say(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        say_note(str(message)) if issubclass(category, ShardloadWarning) else show(message, category, *where, **more)

    with own_stdout() as out, warnings.catch_warnings():
        warnings.showwarning = cast(Any, say)
        try:
            yield out
        except ShardloadError as error:
            if says_what_is_wrong():
                message = as_typed(str(error))
                try:
                    if as_json:
                        document = {"ok": False, "error": type(error).__name__, "message": message}
                        print(json.dumps(document, indent=2), file=out)
                finally:
                    say_error(message)
            raise typer.Exit(1) from None
