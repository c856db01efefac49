"""What does ``shardload join`` take, and print? One process works: no device, no JAX, no MPI."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardload.cli.arguments import as_typed, reworded, show_error, wrong
from shardload.comm.environment import launched, task
from shardload.errors import ShardloadError, printable
from shardload.jobs.joining.join import join_files
from shardload.jobs.joining.request import JoinReport, JoinRequest
from shardload.system.terminal import Column, fit_table, own_stdout, tell, width_of, wrap
from shardload.units import counted, format_nbytes

__all__ = ["IN_JOIN", "join_as_typed", "run"]

_COLUMNS = [Column("array"), Column("shape"), Column("dtype"), Column("values", lead="")]
# As `copy.IN_COPY`.
IN_JOIN = {
    "sorted(paths, key=lambda p: [int(n) for n in re.findall(r'[0-9]+', p)])": "$(ls -v PART...)",
    "Pass mode='w' to replace it": "Type --mode w to replace it",
    "The new file comes in addition to them. Choose another name for it": "Type the name of the new file behind them",
}
_AXIS = re.compile(r"Pass (?:axis=, )?one of ('[^']+')")
_NUMBER = re.compile(r"Pass its number, such as axis=")
_VALUE = re.compile(r"\b(Pass|pass) (axis|stack)='([^']+)'")
_FLAG = re.compile(r"\b(axis|stack)(?= is )|\b(axis|stack)=")


def join_as_typed(message: str) -> str:
    """A message of the library with the flags of ``join``.

    >>> join_as_typed("no name. Pass axis=, one of 'time', 'lat'")
    "no name. Type --axis with one of 'time', 'lat'"
    >>> join_as_typed("stack is 'x', and there is one. Pass axis='x' in its place")
    "--stack is 'x', and there is one. Type --axis x in its place"
    """
    is_of_flag = message.startswith(("axis is ", "stack is "))
    message = _AXIS.sub(r"Type --axis with one of \1", reworded(message, IN_JOIN))
    message = _NUMBER.sub("Type its number, such as --axis ", message)
    message = _VALUE.sub(lambda found: f"{'Type' if found[1] == 'Pass' else 'type'} --{found[2]} {found[3]}", message)
    if is_of_flag:
        message = _FLAG.sub(lambda found: f"--{found[1] or found[2]}", message).replace(". Pass one:", ". Type one:")
    return as_typed(message)


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
            show_error(error, join_as_typed(str(error)), out, as_json)
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
