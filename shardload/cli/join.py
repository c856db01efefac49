"""What does ``shardload join`` take, and print? One process works: no device, no JAX, no MPI."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any

from shardload.cli.arguments import wrong
from shardload.errors import LeftOutWarning, printable
from shardload.jobs.joining.join import join
from shardload.system.terminal import Column, fit_table, tell, width_of, wrap
from shardload.units import counted, format_nbytes

_COLUMNS = [Column("array"), Column("shape"), Column("dtype"), Column("values", lead="")]


def run(out: IO[str], files: Sequence[str], *, axis: str | None, as_json: bool, **given: Any) -> None:
    """Join, and print what was done."""
    if len(files) < 2:
        raise wrong("PART... WHOLE", "type the parts in their order, then the new file: shardload join a.nc b.nc whole.nc")
    *parts, whole = files
    which: Any = int(axis) if axis is not None and axis.isascii() and axis.isdecimal() else axis
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeftOutWarning)  # all notes are printed below
        report = join(whole, parts, axis=which, **given)
    if as_json:
        tell(json.dumps({"ok": True, **asdict(report)}, indent=2), out)
        return
    for note in report.notes:
        print(f"shardload: {printable(note)}", file=sys.stderr, flush=True)
    width = width_of(out)
    head = f"{report.path}: {counted(report.n_parts, 'file')} along axis {report.axis!r}, "
    head += f"{counted(len(report.rows), 'array')}, {format_nbytes(report.nbytes)}"
    rows = [[printable(row.name), str(row.shape), row.dtype, row.how] for row in report.rows]
    lines = [*wrap(printable(head), width, "", "    "), *fit_table(_COLUMNS, rows, width)]
    if report.needs_external:
        text = "parts are outside the folder of the new file: loads need --allow-external, or allow_external=True"
        lines += wrap(text, width, "", "    ")
    tell("\n".join(lines), out)
