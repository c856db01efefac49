"""What does ``shardload info`` print? The arrays of a file, one array, or what a save that was killed has left."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import IO, Any

import numpy as np

from shardload.cli.arguments import as_typed
from shardload.errors import ShardloadError, printable
from shardload.formats.access import Access
from shardload.formats.contract.array import ArrayInfo, Coordinate, some
from shardload.formats.labelling import labelling, read_labels
from shardload.formats.lookup import open_file, split_path
from shardload.jobs.contents import arrays_in, groups_of
from shardload.options import Options
from shardload.storage.leftovers import Leftover, find_leftover, leftovers_beside
from shardload.storage.remote import without_secrets
from shardload.system.terminal import Column, fit_table, width_of, wrap
from shardload.units import counted, format_nbytes
from shardload.values.dates import as_dates
from shardload.values.decoding import ATTRIBUTES

_MOST_LABELLED = 256  # arrays whose axes' names are looked up, a millisecond each; of a file with more, no groups' attributes


def run(out: IO[str], file: str, as_json: bool, **trust: Any) -> None:
    """Print what is in a file, a group or an array. `trust` is what the file may do, as in `load`."""
    path, access, width = split_path(file)[0], Options.check(**trust).access, width_of(out)
    if (leftover := find_leftover(path)) is not None:
        arrays = _arrays_in(path, access)[0] if leftover.is_whole else []
        lines = [*_leftover_lines(leftover, width), *(_table(leftover.path, arrays, width) if leftover.is_whole else [])]
        document = {"path": leftover.path, "save_of": leftover.target, "what": leftover.kind, "is_whole": leftover.is_whole}
        document |= {"commands": dict(leftover.commands), "arrays": [_described(array) for array in arrays]}
        print(to_json(document) if as_json else "\n".join(lines), file=out)
        return
    arrays, name, is_one = _arrays_in(file, access)
    if is_one and arrays[0].labels is None and not arrays[0].refused:
        arrays = [replace(arrays[0], labels=read_labels(path, arrays[0], access))]
    if as_json:
        print(to_json([_described(array) for array in arrays]), file=out)
        return
    if is_one:
        lines = _in_two_columns(_rows_of_array(arrays[0]), width)
    elif name:
        groups, unread = groups_of(path, access)
        left_out = [("not shown", text) for text in unread if f"'{name}' (" in text]
        lines = [*_table(path, arrays, width), *_in_two_columns([*_rows_of_attrs(groups.get(name, {})), *left_out], width)]
    else:
        lines = [*_table(path, arrays, width), *_elsewhere(path, arrays, access, width)]
        for leftover in [] if "://" in path else leftovers_beside(path):  # of saves that were killed, or go on now
            lines += _leftover_lines(leftover, width)
    print("\n".join(lines), file=out)


def _arrays_in(path: str, access: Access) -> tuple[list[ArrayInfo], str, bool]:
    """See `arrays_in`."""
    with labelling(access) as labeller:
        return arrays_in(path, labeller, _MOST_LABELLED)


_COLUMNS = (
    *(Column("name"), Column("shape"), Column("dtype"), Column("axes"), Column("chunks"), Column("shards")),
    *(Column("codec"), Column("size", is_number=True), Column("stored", is_number=True), Column("notes")),
)


def _facts(array: ArrayInfo) -> dict[str, str]:
    """The properties of an array that a table of arrays and the description of one array both have."""
    return {
        "shape": _shape_text(array.shape),
        "dtype": array.dtype,
        "axes": ", ".join(name or "-" for name in array.dims) if any(array.dims) else "",
        "chunks": _shape_text(array.chunks),
        "shards": _shape_text(array.shards) if array.shards else "",
        "codec": array.codec,
        "size": _size_text(_nbytes(array)),
        "stored": _size_text(array.nbytes_stored),
    }


def _table(path: str, arrays: Sequence[ArrayInfo], width: int) -> list[str]:
    kind = f"{arrays[0].format}, {counted(len(arrays), 'array')}" if arrays else "no arrays"
    lines = wrap(f"{printable(without_secrets(path))}: {kind}", width)
    rows = [[array.dataset, *_facts(array).values(), _notes(array)] for array in arrays]
    columns = [k for k in range(len(_COLUMNS)) if any(row[k] for row in rows)]  # no title above nothing
    cells = [[printable(row[k]) for k in columns] for row in rows]
    return [*lines, *(fit_table([_COLUMNS[k] for k in columns], cells, width) if arrays else [])]


def _elsewhere(path: str, arrays: Sequence[ArrayInfo], access: Access, width: int) -> list[str]:
    """What the table does not have: links, and attributes of groups."""
    texts: list[str] = []
    with suppress(ShardloadError), open_file(path, access) as opened:
        groups: Mapping[str, Mapping[str, Any]] = opened.groups()[0] if len(arrays) <= _MOST_LABELLED else {}
        names = [f"{array.dataset}/" for array in arrays]
        links = [(link, target) for link, target in opened.links().items() if not any(n.startswith(f"{link}/") for n in names)]
        if links:
            listed = some([f"{link} (to {target})" for link, target in links])
            texts.append(f"links, not listed: {listed}; shardload info {without_secrets(path)}:/NAME shows what one leads to")
        if owners := [f"{name} ({', '.join(attrs)})" for name, attrs in groups.items() if attrs]:
            texts.append(f"attributes of groups: {some(owners)}; shardload info {without_secrets(path)}:/GROUP shows them")
    return [line for text in texts for line in wrap(printable(text), width)]


def _leftover_lines(leftover: Leftover, width: int) -> list[str]:
    """What a save left, and the commands that continue or remove it."""
    lines = wrap(printable(f"{leftover.path} {leftover.description}. {leftover.condition},"), width)
    lines += [printable(f"  {action}:  {command}") for action, command in leftover.commands]  # in one line each, to be copied
    return lines


def _rows_of_array(array: ArrayInfo) -> list[tuple[str, str]]:
    rows = {
        "array": str(array),
        "format": array.format,
        **_facts(array),
        "coords": "; ".join(_coordinate_text(name, coordinate) for name, coordinate in array.coords.items()),
        "coordinate": "" if array.is_dimension or not array.is_coordinate else "of other arrays (a dimension scale)",
        "dimension": "without a variable: it holds no values" if array.is_dimension else "",
        "refused": as_typed(array.refused or ""),
    }
    filled = [(title, text) for title, text in rows.items() if text]  # an attribute may be called shape, too
    return [*filled, *_rows_of_attrs({**array.attributes, **array.attrs}, is_array=True)]


def _rows_of_attrs(attrs: Mapping[str, Any], is_array: bool = False) -> list[tuple[str, str]]:
    notes = {key: "  (reported, not applied)" for key in attrs if is_array and key in ATTRIBUTES}
    return [(key, f"{_plain_text(value)}{notes.get(key, '')}") for key, value in attrs.items()]


def _in_two_columns(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Titles and texts."""
    shown = [(printable(title), printable(text)) for title, text in rows]
    widest = max((len(title) for title, _ in shown), default=0)
    return [line for title, text in shown for line in wrap(text, width, f"{title:<{widest}}  ")]


def _coordinate_text(name: str, coordinate: Coordinate) -> str:
    """The first and last value of the coordinate of an axis, which say its direction; of others, such as the latitudes of a
    curvilinear grid or of stations, the axes. What is not small was not read.
    """
    if coordinate.dims not in ((name,), (None,), ()):
        return f"{name}({', '.join(dim or '-' for dim in coordinate.dims)})"
    if coordinate.values is None:
        return name
    values = coordinate.values.reshape(-1)
    ends = values[[0, -1]] if values.size > 1 else values
    dates = " to ".join(as_dates(ends, coordinate.attrs)) if ends.dtype.kind in "iuf" else ""
    units = _plain_text(coordinate.attrs.get("units", ""))
    return " ".join(filter(None, [name, " to ".join(map(str, ends)), units, f"({dates})" if dates else ""]))


def _notes(array: ArrayInfo) -> str:
    notes = [f"cannot be loaded: {as_typed(array.refused)}"] if array.refused else []
    notes += ["dimension without a variable" if array.is_dimension else "coordinate"] if array.is_coordinate else []
    notes += [f"in {counted(array.n_parts, 'part')}"] if array.n_parts else []
    notes += [f"{key}={_plain_text(value)}" for key, value in array.attributes.items()]
    return ", ".join(notes)


def _described(array: ArrayInfo) -> dict[str, Any]:
    names = [part.name for part in fields(array) if part.name not in ("labels", "packing", "parts")]
    document = {name: getattr(array, name) for name in names}
    packing = {key: {"dtype": kind, "values": values} for key, (kind, values) in array.packing.items()}
    document |= {"packing": packing, "nbytes": _nbytes(array), "dims": array.dims, "attrs": array.attrs}
    document |= {"n_parts": array.n_parts or None}
    return document | {"coords": {name: coordinate.dataset for name, coordinate in array.coords.items()}}


def to_json(value: Any) -> str:
    """An indented document, for scripts."""
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """`value` in JSON's types; NaN and infinities, which JSON does not have, as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def _plain_text(value: Any) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _nbytes(array: ArrayInfo) -> int | None:
    try:
        return math.prod(array.shape) * np.dtype(array.dtype).itemsize
    except (TypeError, ValueError):  # a type that NumPy does not have
        return None


def _shape_text(shape: Sequence[int] | None) -> str:
    return "-" if shape is None else " x ".join(map(str, shape)) or "scalar"


def _size_text(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_nbytes(nbytes)
