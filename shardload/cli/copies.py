"""What do ``shardload copy`` and ``shardload join`` take, and print? No device, no JAX."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any

from shardload.cli.arguments import as_typed, say_note, wrong
from shardload.comm.mpi import world_rank_and_size
from shardload.errors import LeftOutWarning, printable
from shardload.formats.concatenation import Concatenation
from shardload.formats.lookup import split_path
from shardload.jobs.copying.copy import copy
from shardload.jobs.joining.join import concat, join
from shardload.jobs.joining.request import is_one_file
from shardload.system.terminal import width_of, wrap


def run_copy(
    out: IO[str], source: str, target: str, *, along: str | int | None, only_plan: bool, as_json: bool, **options: Any
) -> None:
    """Copy, and print on rank 0 what was done. Collective: yes.

    Parameters
    ----------
    out : file
        Where to print.
    source, target : str
        The file, with or without the name of an array, or a pattern of files that are one; and the new file.
    along : str or None
        The axis along which the files of a pattern follow each other, by name or number.
    only_plan : bool
        True to print the plan and write nothing.
    as_json : bool
        Print one JSON document in place of text.
    **options
        Keywords of `shardload.copy`.
    """
    rank = world_rank_and_size()[0]
    files, options["dataset"] = source_of(source, along, options["dataset"], options["allow_external"])
    with warnings.catch_warnings(action="ignore", category=LeftOutWarning):  # the report has all notes
        report = copy(files, target, only_plan=only_plan, **options)
    if rank:
        return
    if as_json:
        document: dict[str, Any] = {"ok": True, "plan": report.plan.to_dict()}
        if report.written is not None:
            document |= {"written": asdict(report.written), "seconds": report.seconds, "chunks_decoded": report.n_decoded}
            document |= {"chunks_resumed": report.n_resumed, "notes": report.notes}
        print(json.dumps(document, indent=2), file=out)
        return
    for note in report.notes:
        say_note(note)
    _say(out, str(report) if report.written is None else f"{printable(target)}: {report}")


def _say(out: IO[str], text: str) -> None:
    lines = [part for line in text.splitlines() for part in wrap(printable(as_typed(line)), width_of(out), "", "    ")]
    print("\n".join(lines), file=out)


def source_of(file: str, along: str | int | None, dataset: Any, allow_external: bool) -> tuple[str | Concatenation, Any]:
    """What a call takes for FILE: its path, or the files of a pattern as one; and which arrays of it. Collective: yes."""
    if is_one_file(file):
        return file, dataset
    path, name = split_path(file)
    names = dataset if name is None else name
    return concat(path, along, dataset=names, allow_external=allow_external), names


def run_join(out: IO[str], files: Sequence[str], *, axis: str | int | None, as_json: bool, **options: Any) -> None:
    """Join, and print what was done."""
    if len(files) < 2:
        raise wrong("PART... WHOLE", "type the parts in their order, then the new file: shardload join a.nc b.nc whole.nc")
    *parts, whole = files
    with warnings.catch_warnings(action="ignore", category=LeftOutWarning):  # the report has all notes
        report = join(whole, parts, axis=axis, **options)
    if as_json:
        print(json.dumps({"ok": True, **asdict(report)}, indent=2), file=out)
    else:
        _say(out, str(report))
