"""What does ``shardload join`` take, and print? One process works: no device, no JAX, no MPI."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardload.cli.arguments import as_typed, show_error, wrong
from shardload.comm.environment import launched, task
from shardload.errors import ShardloadError, printable
from shardload.jobs.joining.join import join_files
from shardload.jobs.joining.request import JoinReport, JoinRequest
from shardload.system.terminal import Column, fit_table, own_stdout, tell, width_of, wrap
from shardload.units import counted, format_nbytes

__all__ = ["run"]

_COLUMNS = [Column("array"), Column("shape"), Column("dtype"), Column("values", lead="")]


def run(files: Sequence[str], *, axis: str | None, as_json: bool, **given: Any) -> int:
    """Join, and print what was done. Of a job, the first task alone works. Returns the exit code."""
    if launched(os.environ)[1] > 1 and task(os.environ) > 0:
        return 0
    if len(files) < 2:
        raise wrong("PART... WHOLE", "type the parts in their order, then the new file: shardload join a.nc b.nc whole.nc")
    *parts, whole = files
    which: Any = int(axis) if axis is not None and axis.isascii() and axis.isdecimal() else axis
    with own_stdout() as out:
        try:
            report = join_files(JoinRequest.check(whole, parts, axis=which, **given))
        except ShardloadError as error:
            show_error(error, as_typed(str(error)), out, as_json)
            return 1
        for note in report.notes if not as_json else ():
            print(f"shardload: {printable(note)}", file=sys.stderr, flush=True)
        tell(json.dumps({"ok": True, **asdict(report)}, indent=2) if as_json else _as_text(report, width_of(out)), out)
    return 0


def _as_text(report: JoinReport, width: int) -> str:
    axis = f"{report.axis!r}" if isinstance(report.axis, str) else f"{report.axis}"
    head = (
        f"{report.path}: {counted(report.n_parts, 'file')} along axis {axis}, {counted(len(report.rows), 'array')}, "
        f"{format_nbytes(report.nbytes)}"
    )
    rows = [[printable(row.name), str(row.shape), row.dtype, row.how] for row in report.rows]
    lines = wrap(printable(head), width, "", "    ")
    lines += fit_table(_COLUMNS, rows, width, [["array", "shape", "dtype"], ["array", "shape"]])
    if report.needs_external:
        lines += wrap(
            "parts are outside the folder of the new file: loads need --allow-external, or allow_external=True",
            width,
            "",
            "    ",
        )
    return "\n".join(lines)
