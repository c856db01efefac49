"""Which options can a caller pass? Each option is declared once, here.

An `Option` has a name, a default, a check and a help text, and says if all ranks must pass the same value. Five things are made
from these declarations: the defaults in the signatures (`DEFAULTS`), the checks (`Options.check`), the text that ranks compare
(`Options.describe`), the flags of the command line with their help, and the table in docs/options.md. Signatures and docstrings
are written out in `api`, for editors and type checkers; tests/unit/test_option_declarations.py compares them with this.

The command line imports this module for ``--help``, so it is light: no JAX, no MPI, no files, and NumPy only when an option is
checked.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Integral, Number, Real
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardload.errors import ConfigError
from shardload.units import format_nbytes, parse_nbytes, scalar_of, shown

if TYPE_CHECKING:
    import numpy as np

    from shardload.formats.access import Access
    from shardload.storage.remote.address import StorageOptions

AUTO = "auto"
READERS = (AUTO, "root", "parallel", "direct")
VERIFY = INDEX, CHECKSUM, FILE, FULL = "index", "checksum", "file", "full"  # each level includes those before it
EDGES = ("wrap", "edge")
_OF_DECODE = (
    "True applies scale_factor, add_offset and fill values, and None warns if numbers are packed. A valid range is applied by "
    "jax.numpy.where(x < low, jax.numpy.nan, x)"
)
TIMEOUT = 900.0  # longer than a busy file system pauses (about a minute), much shorter than a night of a stalled job
STAGING_NBYTES = 256 << 20  # what staging="auto" is if the file's chunks need no more
Progress = bool | Callable[[int, int], None] | None


def _is_integer(value: Any) -> bool:
    """True for an integer of Python or NumPy; False for a bool."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def _name(option: str, meaning: str, name: Any) -> str | None:
    """A name, or None. `meaning` says what is expected."""
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f"{option} is {name!r}; expected {meaning}")
    return name


def check_path(name: str, path: Any, expected: str) -> str:
    """The path that argument `name` is, as text. `expected` says what is expected."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} is {shown(path)}; expected {expected}")
    return text


def check_names(dataset: Any) -> tuple[str, ...]:
    """Names of arrays, and patterns: one, several, or none for all."""
    names = (dataset,) if isinstance(dataset, str) else () if dataset is None else dataset
    if not isinstance(names, Collection) or not all(isinstance(name, str) and name.strip("/ ") for name in names):
        raise ConfigError(f"dataset is {shown(dataset)}; expected the name of an array, such as '/rho', '*', or a list")
    return tuple(names)


def _select(select: Any) -> Any:
    """Any selection. Names of axes are put in one order, which may differ from rank to rank."""
    return {name: select[name] for name in sorted(select, key=repr)} if isinstance(select, Mapping) else select


def _per_axis(option_value: Any, is_value: Callable[[Any], bool], expected: str) -> Any:
    """A value for all axes, or one for each of the first axes. The plan checks that the array has them."""
    values = option_value if isinstance(option_value, (tuple, list)) else [option_value]
    if not all(map(is_value, values)):
        raise ConfigError(expected)
    values = [int(value) if _is_integer(value) else value for value in values]
    return tuple(values) if isinstance(option_value, (tuple, list)) else values[0]


def _halo(halo: Any) -> Any:
    expected = (
        f"halo is {halo!r}; expected the number of rows on either side of a shard, 0 or more: halo=2 for every axis that the "
        "spec cuts, halo=(2, 1) for axes 0 and 1, halo=(0, 0, 1) for axis 2"
    )
    return _per_axis(halo, lambda n: _is_integer(n) and n >= 0, expected)


def _edge(edge: Any) -> Any:
    expected = (
        f"edge is {edge!r}; expected what lies beyond the ends of an axis with a halo: 'wrap' (its other end), 'edge' (its "
        "last row again) or a value such as 0; or one of these per axis: ('wrap', 0)"
    )

    def is_rule(rule: Any) -> bool:
        return rule in EDGES if isinstance(rule, str) else isinstance(rule, Number) and not isinstance(rule, bool)

    return _per_axis(edge, is_rule, expected)


def is_plain_tuple(value: Any) -> bool:
    """True for a tuple without names, as NumPy indexes by. A named one has a field for each array: it is a node of a tree."""
    return isinstance(value, tuple) and not hasattr(value, "_fields")


def _is_one_halo(halo: Any) -> bool:
    """True for one halo or edge: a number or word, or a tuple of them."""
    return all(isinstance(value, (str, Number)) for value in (halo if is_plain_tuple(halo) else (halo,)))


def _is_one_selection(select: Any) -> bool:
    """True for one selection: an integer, a slice or ``...``, or a tuple of them."""
    if is_plain_tuple(select):
        return all(_is_one_selection(part) and not isinstance(part, tuple) for part in select)
    return select is None or select is ... or isinstance(select, slice) or _is_integer(select)


def _choice(name: str, words: tuple[Any, ...], value: Any, meaning: str = "") -> Any:
    """One of some words. `meaning` says what they are, in messages."""
    if not any(isinstance(value, type(word)) and value == word for word in words):
        expected = f"{', '.join(map(repr, words[:-1]))} or {words[-1]!r}"
        raise ConfigError(f"{name} is {value!r}; expected {expected}{f' ({meaning})' if meaning else ''}")
    return value


def check_sizes(name: str, words: tuple[Any, ...], sizes: Any) -> Any:
    """A size for each axis, or one of some words."""
    if sizes is None or isinstance(sizes, str):
        return _choice(name, words, sizes, f"or a size for each axis, such as {name}=(64, 64, 64)")
    numbers = (sizes,) if _is_integer(sizes) else sizes
    if not isinstance(numbers, (tuple, list)) or not all(map(_is_integer, numbers)):
        raise ConfigError(f"{name} is {sizes!r}; expected a size for each axis, such as {name}=(64, 64, 64)")
    return tuple(map(int, numbers))


def _dims(dims: Any) -> tuple[str | None, ...] | None:
    names = (dims,) if isinstance(dims, str) else dims
    if names is None:
        return None
    if not isinstance(names, (tuple, list)) or not all(name is None or isinstance(name, str) for name in names):
        raise ConfigError(f"dims is {dims!r}; expected a name for each axis, such as ('z', 'y', 'x')")
    return tuple(names)


def _unlimited(axes: Any) -> tuple[str | int, ...]:
    """Names and numbers of axes. Whether the array has them is for the plan to say."""
    parts = () if axes is None else axes if isinstance(axes, (tuple, list)) else (axes,)
    if not all(isinstance(axis, str) or _is_integer(axis) for axis in parts):
        raise ConfigError(f"unlimited is {axes!r}; expected an axis that can grow, by its name or number: 'time' or 0")
    return tuple(axis if isinstance(axis, str) else int(axis) for axis in parts)


def _compression(compression: Any) -> Any:
    from shardload.formats.sink import Compression

    return Compression.of(compression)


def _like(like: Any) -> str | None:
    return None if like is None else check_path("like", like, "an array in a file, such as 'in.h5:/rho'")


def _attrs(attrs: Any) -> dict[str, Any]:
    """Attributes by name. JSON would make one text of 3 and "3", and of a tuple none."""
    if not isinstance(attrs, Mapping | None):
        raise ConfigError(f"attrs is {attrs!r}; expected a dict, such as {{'units': 'kg/m3'}}")
    for key in attrs or ():
        if not isinstance(key, str) or not key:
            raise ConfigError(f"an attribute is called {key!r}; expected text, such as 'units'")
    return dict(attrs or {})


def _is_no_dict(value: Any) -> bool:
    """True for one value of an option of `save`: whatever it is, dicts are by name."""
    return not isinstance(value, Mapping)


def _axis(name: str, axis: Any) -> str | int:
    if (not isinstance(axis, str) and not _is_integer(axis)) or axis == "":
        raise ConfigError(f"{name} is {axis!r}; expected the name of an axis in the file, such as 'time', or its number")
    return axis if isinstance(axis, str) else int(axis)


def _count(name: str, least: int, meaning: str, number: Any) -> int:
    """An integer. `meaning` says what is expected."""
    if not _is_integer(number) or number < least:
        raise ConfigError(f"{name} is {number!r}; expected {meaning}")
    return int(number)


def _count_or_none(name: str, least: int, meaning: str, number: Any) -> int | None:
    return None if number is None else _count(name, least, meaning, number)


def _window(window: Any) -> int | tuple[int, ...]:
    steps = tuple(window) if isinstance(window, (tuple, range)) else (0,) if window is None else (window,)
    if not steps or not all(map(_is_integer, steps)) or len(set(steps)) < len(steps):
        raise ConfigError(
            f"window is {window!r}; expected steps from the anchor of a sample: an integer such as 1, or a tuple of different "
            "ones such as (-1, 0)"
        )
    return tuple(map(int, steps)) if isinstance(window, (tuple, range)) else int(steps[0])


def _is_one_window(window: Any) -> bool:
    return window is None or isinstance(window, range) or is_plain_tuple(window) or _is_integer(window)


def _scale(scale: Any) -> tuple[Any, Any] | None:
    if scale is None:
        return None
    import numpy as np

    try:
        mean, deviation = map(np.asarray, scale)
        is_right = all(part.dtype.kind in "iufc" for part in (mean, deviation)) and bool(np.all(deviation != 0))
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ConfigError(
            f"scale is {str(scale)[:77]}; expected a mean and a standard deviation that is nowhere 0, such as (280.0, 12.5)"
        )
    return mean, deviation


def _scale_text(scale: Any) -> str:
    """A scale as ranks compare it: all of it, in few letters."""
    if scale is None:
        return "None"
    return ", ".join(f"{part.dtype} {part.shape} {zlib.crc32(part.tobytes()):08x}" for part in scale)


def _readers(readers: Any) -> str | int:
    if _is_integer(readers) and readers >= 1:
        return int(readers)
    return str(_choice("readers", READERS, readers, "or a number of ranks"))


def _memory(name: str, size: Any) -> str | int:
    """A size of memory, or ``"auto"``."""
    return AUTO if isinstance(size, str) and size == AUTO else parse_nbytes(size, name)


def _progress(progress: Any) -> Any:
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise ConfigError(f"progress is {progress!r}; expected True, False, None or a function of what is done and the total")
    return progress


def _seconds(timeout: Any) -> float | None:
    if timeout is None:
        return None
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout < math.inf:
        raise ConfigError(f"timeout is {timeout!r}; expected seconds, such as 900, or None to wait for ever")
    return float(timeout)


def filter_names(filters: Any) -> tuple[str, ...]:
    """Names and numbers of filters as text, each once, sorted.

    >>> filter_names("ZFP, 32008"), filter_names(["bitshuffle", 307]), filter_names(32013)
    (('32008', 'zfp'), ('307', 'bitshuffle'), ('32013',))
    """
    is_several = isinstance(filters, Collection) and not isinstance(filters, (str, bytes))
    names = set()
    for part in filters if is_several else [filters]:
        if not isinstance(part, str) and not (_is_integer(part) and part >= 0):
            raise ConfigError(
                f"allow_filters is {filters!r}; expected names or numbers of filters, such as 'bitshuffle', ['zfp', 32008] "
                "or 'all'"
            )
        names |= {name.strip().lower() for name in str(part).split(",")} - {""}
    return tuple(sorted(names))


_HEADER = "default_headers."


def _storage(storage: Any) -> StorageOptions:
    """Options of a store. Their values may be keys, so that no message has them."""
    from shardload.storage.remote.address import StorageOptions

    try:
        options = dict(storage or {})
        typed = [name for name in options if str(name).startswith(_HEADER)]  # as a command line has them
        if typed:
            headers = {name.removeprefix(_HEADER): options.pop(name) for name in typed}
            options["default_headers"] = {**options.get("default_headers", {}), **headers}
        return StorageOptions(options)
    except (TypeError, ValueError):
        raise ConfigError(
            f"storage is a {type(storage).__name__}; expected a dict of options of the store, such as {{'region': 'us-west-2'}}"
        ) from None


def _dtype(dtype: Any) -> np.dtype[Any] | None:
    if dtype is None:
        return None
    import numpy as np

    from shardload.formats.contract.array import native_dtype, refusal

    try:
        parsed: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        raise ConfigError(f"dtype is {dtype!r}; expected a NumPy dtype such as 'float32'") from None
    refused = refusal(parsed)
    if refused is not None:
        raise ConfigError(f"dtype is {dtype!r}, which holds {refused}; expected a type of numbers such as 'float32'")
    return native_dtype(parsed)


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes
    ----------
    name : str
        The keyword.
    default : object
        The value if the caller passes none.
    help : str
        One line for ``--help`` and docs/options.md.
    calls : tuple of str
        The functions that take it.
    rule : callable, optional
        See `check`. By default an option with `choices` takes one of them, one whose default is a bool takes a bool, and any
        other one takes whatever it is.
    text : callable or None
        Turns the stored value into the text that ranks compare. None: ranks may pass different values.
    is_kept : bool
        True if `Options` has it. If False, the function handles the option itself.
    is_per_array : bool
        True if the caller may pass a prefix tree of values, which `jobs.trees` spreads over the arrays. If False it is of the
        call, and one value for all arrays: a field of `CallOptions`, if any.
    is_one : callable, optional
        For an option of an array: True for a single value. By default whatever JAX takes for a leaf of a tree, or None, is one.
        Needed if a single value may be a tuple, list or dict.
    choices : tuple of str
        The allowed words, if it takes words.
    other_defaults : mapping of str to object, optional
        The defaults of functions in which it is another one.
    """

    name: str
    default: Any
    help: str
    calls: tuple[str, ...]
    rule: Callable[[Any], Any] | None = None
    text: Callable[[Any], str] | None = repr
    is_kept: bool = True
    is_per_array: bool = False
    is_one: Callable[[Any], bool] | None = None
    choices: tuple[str, ...] = ()
    other_defaults: Mapping[str, Any] | None = None

    def check(self, value: Any) -> Any:
        """Turn the caller's value into the value that `Options` stores. ConfigError says what is expected."""
        if self.rule is not None:
            return self.rule(value)
        words = (True, False) if isinstance(self.default, bool) else self.choices
        return _choice(self.name, words, value) if words else value

    def default_in(self, call: str) -> Any:
        """The value in this function if the caller passes none."""
        return (self.other_defaults or {}).get(call, self.default)


_FILE = ("load", "plan", "verify")
_READ = (*_FILE, "stream", "load_dataset")
_LOADS, _ARRAYS = ("load", "plan", "stream", "load_dataset"), ("load", "plan", "scatter", "load_dataset")
_PLANNED = ("load", "plan", "scatter", "verify", "stream", "load_dataset")
_SAVES, _STREAM = ("save", "plan_save"), ("stream",)
_WRITES = (*_SAVES, "append")


def _number_or_date(at: Any) -> Any:
    """What an array without axes holds; all else as it is. ConfigError for NaN, before which there is no row."""
    at = scalar_of(at)
    if isinstance(at, float) and math.isnan(at):
        raise ConfigError("at is nan, so that nothing says which rows stay; expected a number or a date")
    return at


# An option of each array that is saved: the request of the array has it, and no `Options`.
_OF_EACH: Mapping[str, Any] = {"is_per_array": True, "is_kept": False, "is_one": _is_no_dict}


def _in_writes(default: Any) -> Mapping[str, Any]:
    return MappingProxyType(dict.fromkeys(_WRITES, default))


_DECLARED = (
    Option(
        "dataset", None, 'Name of the array, or several names; "group/*" or "*" for all below.', (*_FILE, *_STREAM, *_WRITES),
        partial(_name, "dataset", "a name inside the file such as '/density', or a dict or list of names"),
        is_per_array=True, other_defaults=_in_writes("data"),
    ),
    Option(
        "select", None, 'Load a part, as NumPy would index it: "0,:,10:20"; or by names: "time=-1"', _READ, _select,
        is_per_array=True, is_one=_is_one_selection,
    ),
    Option("dtype", None, "Cast to this type: float32", _PLANNED, _dtype, str, is_per_array=True),
    Option(
        "decode", None, "Apply scale_factor, add_offset and fill values.", _READ,
        partial(_choice, "decode", (None, True, False), meaning=_OF_DECODE), str, is_per_array=True,
        other_defaults={"load_dataset": True},
    ),
    Option("pad", None, "Pad axes that do not divide evenly with this value: 0", _PLANNED, is_per_array=True),
    Option(
        "halo", 0, "Rows of its neighbours that each shard has on either side.", _FILE, _halo, is_per_array=True,
        is_one=_is_one_halo,
    ),
    Option(
        "edge", "wrap", "What a halo has beyond the ends of the array: wrap, edge or a value.", _FILE, _edge, is_per_array=True,
        is_one=_is_one_halo,
    ),
    Option(
        "readers", AUTO, "Who reads: auto, root, parallel or direct, or how many processes.", _LOADS, _readers, choices=READERS,
    ),
    Option(
        "staging", AUTO, "Memory for reading, per process: 1GiB; auto: 256MiB, or what the chunks need.", (*_PLANNED, *_WRITES),
        partial(_memory, "staging"), str,
    ),
    Option(
        "verify", INDEX, "How to verify: index, checksum, file (some regions) or full (all).", (*_ARRAYS, *_WRITES, *_STREAM),
        text=str, choices=VERIFY, other_defaults=_in_writes(CHECKSUM),
    ),
    Option(
        "how", FULL, "What `verify` compares: index, checksum, file (some regions) or full (all).", ("verify",),
        partial(_choice, "how of verify", VERIFY), None, is_kept=False, choices=VERIFY,
    ),
    Option(
        "seed", 0, "Seed for the random regions of how='file'.", ("verify",),
        partial(_count, "seed", 0, "an integer, 0 or more"), is_kept=False,
    ),
    Option("root", 0, "The rank that has the array.", ("scatter",), is_kept=False),
    Option(
        "comm", None, "The ranks that take part: an mpi4py communicator; None: COMM_WORLD.", (*_PLANNED, *_WRITES), text=None,
        is_kept=False,
    ),
    Option(
        "progress", None, "Show a bar on rank 0 (default: for what takes long; without a terminal a line each 30 s).",
        (*_ARRAYS, *_WRITES), _progress, text=None,
    ),
    Option(
        "timeout", TIMEOUT, "Seconds after which a call fails if no rank makes progress; None: never.",
        (*_ARRAYS, *_WRITES, *_STREAM), _seconds,
    ),
    Option(
        "missing", "warn", "Chunks that are not stored: warn, error or fill (with the fill value).", _LOADS, text=str,
        choices=("warn", "error", "fill"),
    ),
    Option("allow_external", False, "Follow links and references out of the file's folder.", _READ, text=str),
    Option("untrusted", False, "Open the file in helper processes, with limits.", _READ, text=str),
    Option("allow_filters", (), "Use these filters too, though damaged data may crash them.", _READ, filter_names, ",".join),
    Option(
        "storage", None, "How a store is reached: region=us-west-2, skip_signature=true, ... (docs/remote.md).",
        (*_READ, *_SAVES), _storage,
    ),
    Option(
        "processes", None, "How many processes to plan for (default: one per device).", ("plan",), text=None, is_kept=False,
    ),
    Option(
        "ranks_per_node", None, "How many processes a node has (default: all are on one).", ("plan",),
        partial(_count_or_none, "ranks_per_node", 1, "how many processes a node has, 1 or more"), text=None, is_kept=False,
    ),
    Option("background", False, "Return when the arrays are copied, and write in a thread.", ("save",), text=str),
    Option(
        "mode", "w-", "w-: the name must not exist. w: what has it is replaced.", _SAVES, is_kept=False, choices=("w-", "w"),
    ),
    Option(
        "format", None, "Format of the new file; None: its suffix tells.", _SAVES, is_kept=False,
        choices=("hdf5", "netcdf4", "zarr"),
    ),
    Option(
        "chunks", AUTO, "Elements of a chunk along each axis; auto; None: one piece. Or a dict by name.", _SAVES,
        partial(check_sizes, "chunks", (AUTO, None)), **_OF_EACH,
    ),
    Option(
        "shards", None, "Zarr: elements of a file along each axis, of several chunks. Or a dict by name.", _SAVES,
        partial(check_sizes, "shards", (None,)), **_OF_EACH,
    ),
    Option(
        "compression", None, "gzip, zstd, blosc, lz4, ... or a dict with level and shuffle. Or a dict by name.", _SAVES,
        _compression, **_OF_EACH,
    ),
    Option("dims", None, "Name of each axis. Or a dict by name.", _SAVES, _dims, **_OF_EACH),
    Option(
        "unlimited", None, "Axes that can grow (append): names in dims, or numbers. Or a dict by name.", _SAVES, _unlimited,
        **_OF_EACH,
    ),
    Option(
        "attrs", None, "Attributes of the array; of several a dict by name: / the file, g/ a group.", _SAVES, _attrs,
        **_OF_EACH,
    ),
    Option("shape", None, "Shape without padding, which is not written. Or a dict by name.", _WRITES, **_OF_EACH),
    Option("plan", None, "The plan that loaded the array, or a dict by name: padding is not written.", _WRITES, **_OF_EACH),
    Option(
        "like", None, 'Save as this array is stored: "in.h5:/rho", or a dict by name. Load: a state of this structure.',
        ("load", *_SAVES), _like,
        **_OF_EACH,
    ),
    Option("dim", "time", "The axis along which arrays grow: its name in the file, or its number.", ("append",),
           partial(_axis, "dim"), is_kept=False),
    Option("at", None, "Replace the rows from this value of dim's coordinate on: a number or a date.", ("append",),
           _number_or_date, is_kept=False),
    Option("along", 0, "The axis of the steps of a stream: its name in the file, or its number.", _STREAM,
           partial(_axis, "along"), is_kept=False),
    Option(
        "batch", None, "Samples of a batch; None: single steps, without an axis for them.", _STREAM,
        partial(_count_or_none, "batch", 1, "how many samples a batch has, 1 or more, or None for single steps"), is_kept=False,
    ),
    Option(
        "window", None, "Steps of a sample, counted from its anchor: 1, or -1 and 0 (default: the anchor alone).", _STREAM,
        _window, is_per_array=True, is_kept=False, is_one=_is_one_window,
    ),
    Option(
        "shuffle", None, "Seed of a random order (default: samples ascend).", _STREAM,
        partial(_count_or_none, "shuffle", 0, "a seed, an integer from 0 on, or None for ascending samples"), is_kept=False,
    ),
    Option(
        "epochs", 1, "How often all samples are given; None: without end.", _STREAM,
        partial(_count_or_none, "epochs", 1, "how often all samples are given, 1 or more, or None for a stream without end"),
        is_kept=False,
    ),
    Option(
        "remainder", "drop", "Samples that do not fill a batch: drop, pad or error.", _STREAM, is_kept=False,
        choices=("drop", "pad", "error"),
    ),
    Option(
        "border", "reread", "Shuffled windows over the border of two blocks: reread chunks for them, or drop them.", _STREAM,
        is_kept=False, choices=("reread", "drop"),
    ),
    Option(
        "gaps", "error", "Gaps in the coordinate of the steps: error, skip (windows that reach over one), ignore.", _STREAM,
        is_kept=False, choices=("error", "skip", "ignore"),
    ),
    Option(
        "pool", AUTO, "Memory of the job for steps of a shuffled stream: 8GiB; auto: a tenth of the selection.", _STREAM,
        partial(_memory, "pool"), is_kept=False,
    ),
    Option(
        "prefetch", 2, "Batches that are made ahead; 0: each is made when it is asked for.", _STREAM,
        partial(_count, "prefetch", 0, "how many batches are made ahead, 0 or more"), is_kept=False,
    ),
    Option(
        "scale", None, "Mean and standard deviation: values become (x - mean) / deviation.", _STREAM, _scale, _scale_text,
        is_per_array=True, is_kept=False, is_one=is_plain_tuple,
    ),
    Option(
        "stack", None, "Make one array of a tree of them, along this axis: a new one, or one that they have.", _STREAM,
        partial(_name, "stack", "the name of an axis, such as 'channel'"), is_per_array=True, is_kept=False,
    ),
)  # fmt: skip

# By name, in the order in which ranks compare them.
OPTIONS: Mapping[str, Option] = MappingProxyType({option.name: option for option in _DECLARED})

# For signatures: ``staging: str | int = DEFAULTS.staging``.
DEFAULTS = SimpleNamespace(**{option.name: option.default for option in _DECLARED})
_KEPT = tuple(option for option in _DECLARED if option.is_kept)
# Of which a caller of `load` may pass prefix trees, and a caller of `save`. (The tree of names is another matter.)
PER_LOADED_ARRAY = tuple(option for option in _KEPT if option.is_per_array and option.name != "dataset")
PER_SAVED_ARRAY = tuple(option for option in _DECLARED if option.is_per_array and not option.is_kept and "save" in option.calls)
PER_SAVE = tuple(option for option in _KEPT if not option.is_per_array and "save" in option.calls)


def defaults_of(call: str) -> SimpleNamespace:
    """For the signature of a function with other defaults than `DEFAULTS`."""
    return SimpleNamespace(**{option.name: option.default_in(call) for option in _DECLARED if call in option.calls})


def keywords_of(call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a function among its arguments."""
    return {option.name: arguments[option.name] for option in _DECLARED if call in option.calls}


def with_defaults(call: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a function, with their defaults where the caller passed nothing."""
    defaults = vars(defaults_of(call))
    for name in keywords:
        if name not in defaults:
            raise TypeError(f"{call}() has no option {name!r}; it takes {', '.join(defaults)}")
    return defaults | dict(keywords)


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """The options of one call, checked: what acts for all of its arrays at once sees these alone.

    Attributes
    ----------
    readers : str or int
        ``"root"``, ``"parallel"``, ``"direct"``, ``"auto"``, or how many ranks read.
    staging : str or int
        Cap on host memory per process beyond its own pieces, in bytes; ``"auto"`` until a plan says what the chunks need.
    verify : str
        ``"index"``, ``"checksum"``, ``"file"`` or ``"full"``.
    progress : bool, callable or None
        As in `load`: show a bar or not, or a function; None: for large loads in a terminal or a notebook.
    timeout : float or None
        Seconds after which a call fails if no rank makes progress; None: never.
    missing : str
        ``"warn"``, ``"error"`` or ``"fill"``: what to do about missing chunks.
    allow_external : bool
        True if the file may refer to data outside its folder.
    untrusted : bool
        True if only helper processes open and decode the file.
    allow_filters : tuple of str
        Names and numbers of filters (codecs) to use although damaged data may crash them, sorted; or ``"all"``.
    storage : StorageOptions
        How stores are reached. Ranks compare the names, not the values.
    background : bool
        True if a save goes on in a thread.
    """

    readers: str | int
    staging: str | int
    verify: str
    progress: Progress
    timeout: float | None = DEFAULTS.timeout
    missing: str = DEFAULTS.missing
    allow_external: bool = DEFAULTS.allow_external
    untrusted: bool = DEFAULTS.untrusted
    allow_filters: tuple[str, ...] = DEFAULTS.allow_filters
    storage: StorageOptions = field(default_factory=lambda: _storage(None))
    background: bool = False

    @property
    def staging_nbytes(self) -> int:
        """The cap in bytes; for ``"auto"``, the one that files with small chunks get."""
        return STAGING_NBYTES if isinstance(self.staging, str) else self.staging

    def staging_cap(self, needed: int, purpose: str, *, memory_nbytes: int = 0, ample: int = 0, fix: str = "") -> int:
        """The cap in bytes for what needs so many: what was asked for; if that is ``"auto"`` and too little, what is needed.

        Parameters
        ----------
        needed, ample : int
            Bytes that are needed, and bytes that are better, for ``"auto"``.
        purpose : str
            What needs them, for the message.
        memory_nbytes : int
            What a process may use: ``"auto"`` is a quarter of it at most.
        fix : str
            What else can be passed, for the message: ``", or smaller chunks"``.

        Raises
        ------
        ConfigError
            If there are too few.
        """
        cap, is_auto, room = self.staging_nbytes, self.staging == AUTO, memory_nbytes // 4
        if needed <= cap:
            return cap
        if is_auto and needed <= room:
            return min(room, max(needed, ample))
        cap_text, verb = format_nbytes(cap), "Pass"
        if is_auto:
            cap_text = f"'auto', at most {format_nbytes(room)}: a quarter of the memory that a process may use here"
            verb = "Start fewer processes on a node, or pass"
        raise ConfigError(f"{purpose}, but staging is {cap_text}. {verb} staging='{-(-needed >> 20)}MiB' or more{fix}")

    @cached_property
    def access(self) -> Access:
        """What the caller allows the formats to do.

        Helper processes get all memory that `staging` allows, and a quarter of `timeout` for one reply. So the error that names
        the chunk comes before the StallError, even if it takes two replies to find out which chunk it is.
        """
        from shardload.formats.access import Access, Limits

        seconds = None if self.timeout is None else self.timeout / 4
        limits = Limits(self.staging_nbytes, seconds) if self.untrusted else None
        return Access(self.allow_external, frozenset(self.allow_filters), limits, storage=self.storage)

    @property
    def checksums(self) -> bool:
        """True if each part is checksummed from block to piece."""
        return self.verify != INDEX

    def describe(self, *names: str) -> dict[str, str]:
        """Those options of these names that every rank must pass alike, as text; without names all."""
        options = [OPTIONS[name] for name in names] or _KEPT
        return {option.name: option.text(getattr(self, option.name)) for option in options if option.text is not None}


@dataclass(frozen=True, kw_only=True)
class Options(CallOptions):
    """The options of one array, checked: its own, and those of its call.

    Attributes
    ----------
    dataset : str or None
        Name of the array in the file.
    select : object
        As the caller passed it; its meaning depends on the array's shape.
    dtype : dtype or None
        The dtype to cast to; None keeps the file's.
    decode : bool or None
        True if stored numbers are decoded by their attributes; None: not, with a warning.
    pad : object
        Fill value for axes that do not divide evenly; None refuses them.
    halo : int or tuple
        Rows of its neighbours that each shard has on either side: on every axis that is cut, or per axis.
    edge : str, number or tuple
        What a halo has beyond the ends of the array: ``"wrap"``, ``"edge"`` or a value; for all axes, or per axis.
    """

    dataset: str | None
    select: Any
    dtype: np.dtype[Any] | None
    pad: Any
    decode: bool | None = DEFAULTS.decode
    halo: int | tuple[int, ...] = DEFAULTS.halo
    edge: Any = DEFAULTS.edge

    @classmethod
    def check(cls, **options: Any) -> Options:
        """Check each option by itself. Options that are not given have their default.

        Raises
        ------
        ConfigError
            It names the option, the value found and the values expected.
        """
        if unknown := options.keys() - {option.name for option in _KEPT}:
            raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
        return cls(**{option.name: option.check(options.get(option.name, option.default)) for option in _KEPT})


def fill_value(pad: Any, dtype: np.dtype[Any], fill: Any) -> Any:
    """The value of elements that are not in the file: `fill` (option `edge`), or if that is None, that of the padding."""
    return pad_value(pad, dtype) if fill is None else pad_value(fill, dtype, "edge")


def pad_value(pad: Any, dtype: np.dtype[Any], name: str = "pad") -> Any:
    """The value of option `name` as an element of `dtype`.

    Raises
    ------
    ConfigError
        If `dtype` cannot hold it: NaN in an integer array, 300 in an int8 array. Or if it is True or False, which say whether
        and not what, and `dtype` is not bool.
    """
    import numpy as np

    if isinstance(pad, (bool, np.bool_)) and dtype.kind != "b":
        raise ConfigError(
            f"{name} is {pad!r}, which is no number of {dtype}; pass the value that fills, such as {name}=0, or leave it out"
        )
    try:
        number = np.asarray(pad)
        if number.ndim or number.dtype.kind not in "biufc":
            raise ValueError("not a number")
        if number.dtype.kind == "c" and dtype.kind != "c":
            if number.imag:
                raise ValueError("not a real number")
            number = number.real
        with np.errstate(all="ignore"):
            value = number.astype(dtype)[()]
            largest = np.asarray(np.inf).astype(dtype)  # finite in types that have neither inf nor NaN
        is_exact = value == number or (number != number and value != value)
        has_fractions = np.asarray(0.5).astype(dtype) == 0.5  # bfloat16 and similar types are not np.inexact
        is_in_range = np.isfinite(number) and np.isfinite(value) and not abs(number) > abs(largest)
        rounded = number.dtype.kind in "fc" and has_fractions and is_in_range
    except (TypeError, ValueError, OverflowError):
        is_exact = rounded = False
        value = None
    if not (is_exact or rounded):
        raise ConfigError(
            f"{name} is {pad!r}, which an array of {dtype} cannot hold; pass a value that it can, such as {name}="
            f"{0 if np.zeros((), dtype) == 0 else 1}"  # float8_e8m0fnu has powers of two alone
        )
    return value
