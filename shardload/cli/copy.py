"""What does ``shardload copy`` take, and print? A parallel h5repack and rechunker: no device, no JAX."""

from __future__ import annotations

import glob
import json
import os
import sys
from dataclasses import asdict
from typing import IO, Any

from shardload.cli.arguments import as_typed
from shardload.comm.mpi import world_rank_and_size
from shardload.errors import printable
from shardload.formats.lookup import split_path
from shardload.jobs.copying.copy import CopyReport, copy
from shardload.jobs.joining.join import concat
from shardload.system.terminal import tell, width_of, wrap


def run(out: IO[str], source: str, target: str, *, along: str | None, only_plan: bool, as_json: bool, **given: Any) -> None:
    """Copy, and print on rank 0 what was done. Collective: yes.

    Parameters
    ----------
    source, target : str
        The file, with or without the name of an array, or a pattern of files that are one; and the new file.
    along : str or None
        The axis along which the files of a pattern follow each other, by name or number.
    only_plan : bool
        True to print the plan and write nothing.
    as_json : bool
        Print one JSON document in place of text.
    **given
        Keywords of `shardload.copy`.
    """
    rank = world_rank_and_size()[0]
    path, name = split_path(source)
    if glob.has_magic(path) and "://" not in path and not os.path.exists(path):
        given["dataset"] = (name,) if name else given["dataset"]
        names = {"dataset": given["dataset"], "allow_external": given["allow_external"]}
        source = concat(path, int(along) if along is not None and along.isdecimal() else along, **names)
    report = copy(source, target, only_plan=only_plan, **given)
    if rank:
        return
    if as_json:
        tell(_as_json(report), out)
        return
    for note in report.notes:
        print(f"shardload: {printable(note)}", file=sys.stderr, flush=True)
    lines = report.plan.describe(target) if report.written is None else [f"{target}: {report}"]
    tell("\n".join(part for line in lines for part in wrap(printable(as_typed(line)), width_of(out), "", "    ")), out)


def _as_json(report: CopyReport) -> str:
    told: dict[str, Any] = {"ok": True, "plan": report.plan.to_dict()}
    if report.written is not None:
        told |= {"written": asdict(report.written), "seconds": report.seconds, "chunks_decoded": report.n_decoded}
        told |= {"chunks_resumed": report.n_resumed, "notes": report.notes}
    return json.dumps(told, indent=2)
