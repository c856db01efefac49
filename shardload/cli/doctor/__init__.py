"""Was this job started right? What ``mpiexec -n 4 python -m shardload doctor`` runs, under the launcher of the job itself.

1. Each rank gathers what it sees (`facts`), and all get the rows of all.
2. The rows are compared with every misconfiguration that is known (`findings`).
3. What every load needs is tried: messages, shared memory, an all-reduce, a scatter (`checks`).
4. One rank prints (`report`); all return the same verdict.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from shardload.cli.doctor.checks import Watch, run_checks
from shardload.cli.doctor.facts import Facts, before_jax, from_json, to_json, with_jax, with_node
from shardload.cli.doctor.finding import ERROR
from shardload.cli.doctor.report import Report, as_json, as_text
from shardload.cli.doctor.rules import diagnose
from shardload.comm.environment import launched
from shardload.comm.group import Group, group_of
from shardload.comm.launch import initialize
from shardload.errors import ShardloadError
from shardload.system.terminal import own_stdout, width_of

__all__ = ["run"]

_LINGER_SECONDS = 3.0
_NO_START = (
    "shardload doctor: MPI ended this process while it started. Most often the launcher is not of this MPI library: srun needs "
    "--mpi=pmi2 for MPICH and Intel MPI, --mpi=pmix for Open MPI; else use the mpiexec or mpirun of the library that mpi4py "
    "loads. If it starts at other times, under --mpi=pmi2: export MPIR_CVAR_CH4_NETMOD=ofi (docs/slurm.md)"
)


def run(timeout: float, json: bool = False) -> int:
    """Examine the job and print what was found, once.

    Collective: yes, over COMM_WORLD. Tasks of a launcher that MPI knows nothing of each run it alone, and the first prints.

    Parameters
    ----------
    timeout : float
        Seconds after which a process that still waits says for what, and ends with 1.
    json : bool
        Print JSON instead of a table.

    Returns
    -------
    int
        Exit status, the same on every rank: 0 if loads will work.
    """
    # The checks need next to nothing, and two processes on one GPU should be told so, not run out of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with own_stdout() as out, Watch(timeout, "shardload doctor") as watch:
        facts = _start_mpi(os.environ)
        watch.name(f"rank {facts.rank} on {facts.host}" if facts.size > 1 else f"task {facts.task} on {facts.host}")
        report = _examine(facts, watch)
        group = group_of()
        if facts.task == 0 if group.size == 1 else group.rank == 0:
            print(as_json(report) if json else as_text(report, width_of(out)), file=out, flush=True)
        _let_the_first_print(group, facts, watch)
    return 0 if report.is_well else 1


def _by_machine(rows: list[Facts]) -> list[Facts]:
    """The rows, with what only the ranks of a machine together know."""
    nodes: dict[object, list[Facts]] = defaultdict(list)
    for row in rows:
        nodes[row.host if row.mpi_problem else row.node].append(row)
    found: dict[int, Facts] = {}
    for node in nodes.values():
        ranks = tuple(row.rank for row in node)
        # Each looked at its own time, while others were making or giving back memory: the least is what can be counted on.
        free = [row.shm_nbytes for row in node if row.shm_nbytes is not None]
        least = min(free) if len(free) == len(node) else None
        found |= {row.rank: replace(row, node=ranks, shm_nbytes=least) for row in node}
    return [found[row.rank] for row in rows]


def _let_the_first_print(group: Group, facts: Facts, watch: Watch) -> None:
    """Many launchers end all tasks as soon as one ends with 1: the one that prints must not be among those ended."""
    watch.at = "rank 0 to print"
    if group.size > 1:
        group.gather_int(0)
    elif facts.task and facts.n_launched > 1:
        time.sleep(_LINGER_SECONDS)


def _start_mpi(environ: Mapping[str, str]) -> Facts:
    is_alone = launched(environ)[1] == 1
    with warnings.catch_warnings(), _first_here() as is_first, _last_words(_NO_START if is_first and not is_alone else ""):
        # mpi4py too suspects singletons, on every one of them; here the first says so.
        warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
        return before_jax(environ)


def _examine(facts: Facts, watch: Watch) -> Report:
    if not facts.mpi_problem:
        watch.at = "the ranks of this node"
        facts = with_node(facts, group_of())
        if facts.mpi_size == 1 and facts.n_launched > 1:  # singletons: there is no job to try anything with
            return Report([facts], diagnose([facts]), [])
    watch.at = "JAX to start on all ranks"
    try:
        initialize()
    except ShardloadError as error:
        if facts.mpi_problem and facts.n_launched > 1:  # without MPI, and JAX does not know of the others either
            return Report([facts], diagnose([facts]), [])
        facts = replace(facts, jax_problem=str(error))
    else:
        facts = with_jax(facts)
    watch.at, watch.problem = "what the other ranks found", facts.jax_problem
    group = group_of()
    texts = group.gather_text(to_json(replace(facts, rank=group.rank, size=group.size)))
    rows = _by_machine([from_json(text) for text in texts])
    findings = diagnose(rows)
    has_errors = any(finding.level == ERROR for finding in findings)
    return Report(rows, findings, run_checks(group, rows, watch, has_errors))


@contextmanager
def _first_here() -> Iterator[bool]:
    """Whether this is the first task to come here of those that its launcher started on this machine.

    Not task 0: MPI ends whoever asks it first, and the launcher ends the others, task 0 perhaps before it comes here.
    """
    with socket.socket(socket.AF_UNIX) as mark:
        is_first = True
        try:
            mark.bind(f"\0shardload-doctor-{os.getppid()}")  # a name that goes with the process
        except OSError as error:
            is_first = error.errno != errno.EADDRINUSE  # or there are no such names here: then all may speak
        yield is_first


@contextmanager
def _last_words(text: str) -> Iterator[None]:
    """Have `text` said on stderr if this process ends in here: an MPI library may end it without a word to Python."""
    if not text:
        yield
        return
    # The shell reads a line, or finds that nobody is left to write one. Launchers end sessions: it has one of its own.
    command = ["/bin/sh", "-c", 'read line || echo "$0" >&2', text]
    listener = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        listener.communicate(b"\n")
