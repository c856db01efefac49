"""Do the other rooms call MPI? The import linter sees imports; this sees calls of what `comm` hands out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardload

ROOT = Path(shardload.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT / "comm")
# Methods of mpi4py's objects, as it names them; those of Python objects that other classes have too are left out.
METHODS = {
    *(
        "Send",
        "Recv",
        "Isend",
        "Irecv",
        "Ssend",
        "Issend",
        "Sendrecv",
        "Probe",
        "Iprobe",
        "Mprobe",
        "Improbe",
        "Cancel",
        "Abort",
    ),
    *(
        "Test",
        "Testall",
        "Testany",
        "Testsome",
        "Wait",
        "Waitall",
        "Waitany",
        "Waitsome",
        "Barrier",
        "Ibarrier",
        "Free",
        "Cancel",
    ),
    *("Allgather", "Iallgather", "Allreduce", "Iallreduce", "Bcast", "Ibcast", "Gather", "Gatherv", "Scatter", "Scatterv"),
    *("Alltoall", "Alltoallv", "Alltoallw", "Split", "Split_type", "Dup", "Idup", "Get_rank", "Get_size", "Get_count"),
    *("Get_source", "Get_tag", "Get_attr", "Set_attr", "Create_keyval", "Create_contiguous", "Create_hvector", "Commit"),
    *("Is_inter", "Is_initialized", "Is_finalized", "Query_thread", "Get_library_version", "fromaddress", "isend", "irecv"),
    *("COMM_WORLD", "COMM_NULL", "COMM_TYPE_SHARED", "ANY_SOURCE", "ANY_TAG", "THREAD_MULTIPLE", "BYTE", "INT64_T"),
}


SUSPECT = re.compile(rf"\b(mpi|comm|mpi4py|{'|'.join(METHODS)})\b")


def calls(code: str) -> Iterator[str]:
    """What of MPI a module uses: a method of its objects, its module (`.mpi`), or anything of a communicator (`.comm.x`)."""
    if not SUSPECT.search(code):  # most modules, and to parse one takes twenty times as long
        return
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            inner = node.value.attr if isinstance(node.value, ast.Attribute) else ""
            is_package = isinstance(node.value, ast.Attribute) and ast.unparse(node.value) == "shardload.comm"
            if isinstance(node.value, ast.Name) and node.value.id == "threading":
                continue  # it has a Barrier, too
            if node.attr in METHODS or node.attr == "mpi" or (inner == "comm" and not is_package):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"line {node.lineno}: import {name}" for name in names if name.partition(".")[0] == "mpi4py")


def test_no_other_room_calls_mpi() -> None:
    assert [(str(path.relative_to(ROOT)), call) for path in FILES for call in calls(path.read_text())] == []


@pytest.mark.parametrize(
    "code",
    [
        "group.comm.Isend(x, dest=1)",
        "group.comm.rank",
        "group.mpi.Request",
        "request.Testsome(these)",
        "from mpi4py import MPI",
        "import mpi4py.util",
        "world().Get_rank()",
        "self.transport._comm.Improbe(mpi.ANY_SOURCE, 3)",
    ],
)
def test_a_call_of_mpi_is_seen(code: str) -> None:
    """Wrong if the search passed whatever there is."""
    assert [*calls(code)]


def test_what_is_searched_is_there() -> None:
    assert len(FILES) > 40 and any(path.parent.name == "transfer" for path in FILES)
    assert [*calls((ROOT / "comm" / "transport.py").read_text())], "comm itself calls MPI"
