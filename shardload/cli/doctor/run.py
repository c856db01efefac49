"""Was this job started correctly? What ``mpiexec -n 4 python -m shardload doctor`` runs, under the job's own launcher.

1. Each rank gathers its facts (`facts`) and receives those of all other ranks: one row per rank.
2. The rows are checked for every known misconfiguration (`rules`).
3. What every load needs is tried: an all-reduce, a scatter (`checks`).
4. One rank prints the report (`report`); all ranks return the same exit status.
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

from shardload.cli.doctor.checks import Deadline, run_checks
from shardload.cli.doctor.facts import Facts, before_jax, from_json, to_json, with_jax, with_node
from shardload.cli.doctor.report import Report, as_json, as_text
from shardload.cli.doctor.rules import ERROR, diagnose
from shardload.comm.environment import launched
from shardload.comm.group import group_of
from shardload.comm.launch import initialize
from shardload.errors import ShardloadError
from shardload.system.terminal import own_stdout, tell, width_of

_LINGER_SECONDS = 3.0
_NO_START = (
    "shardload doctor: MPI ended this process while MPI was starting. The usual cause: the launcher belongs to another MPI "
    "library. srun needs --mpi=pmi2 for MPICH and Intel MPI, --mpi=pmix for Open MPI; without srun, use the mpiexec or mpirun "
    "of the library that mpi4py loads. If only some starts fail under --mpi=pmi2: export MPIR_CVAR_CH4_NETMOD=ofi "
    "(docs/slurm.md)"
)


def run(timeout: float, json: bool = False) -> int:
    """Examine the job and print the report once.

    Collective: yes, over COMM_WORLD. If MPI does not connect the launcher's tasks, each runs it alone and the first one prints.

    Parameters
    ----------
    timeout : float
        Seconds after which a process that is still waiting says what it waits for, and exits with 1.
    json : bool
        Print JSON instead of a table.

    Returns
    -------
    int
        Exit status, the same on every rank: 0 if loads will work, 1 if not.
    """
    # The checks need little memory, and two processes on one GPU should get a finding about that, not an out-of-memory error.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with own_stdout() as out, Deadline(timeout).watching() as deadline:
        facts = _start_mpi(os.environ)
        deadline.who = f"rank {facts.rank} on {facts.host}" if facts.size > 1 else f"task {facts.task} on {facts.host}"
        report = _examine(facts, deadline)
        group = group_of()
        try:
            if facts.task == 0 if group.size == 1 else group.rank == 0:
                tell(as_json(report) if json else as_text(report, width_of(out)), out)
        finally:  # many launchers end all tasks as soon as one exits with 1: not before the printing rank is done
            deadline.at = "rank 0 to print"
            if group.size > 1:
                group.gather_int(0)
            elif facts.task and facts.n_launched > 1:
                time.sleep(_LINGER_SECONDS)
    return 0 if report.is_ok else 1


def _start_mpi(environ: Mapping[str, str]) -> Facts:
    is_alone = launched(environ)[1] == 1
    with warnings.catch_warnings(), _first_here() as is_first, _last_words(_NO_START if is_first and not is_alone else ""):
        # mpi4py warns of singletons as well, in each of them; the doctor reports them once.
        warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
        return before_jax(environ)


def _examine(facts: Facts, deadline: Deadline) -> Report:
    if not facts.mpi_problem:
        deadline.at = "the ranks of this node"
        facts = with_node(facts, group_of())
    is_apart = facts.mpi_size == 1 and facts.n_launched > 1
    if is_apart and not facts.mpi_problem:  # singletons: nothing to run checks with
        return Report([facts], diagnose([facts]), [])
    deadline.at = "JAX to start on all ranks"
    try:
        initialize()
    except ShardloadError as error:
        if is_apart:  # neither MPI nor JAX connects the tasks
            return Report([facts], diagnose([facts]), [])
        facts = replace(facts, jax_problem=str(error))
    else:
        facts = with_jax(facts)
    deadline.at = f"the facts of the other ranks; here JAX: {facts.jax_problem or 'started'}"
    group = group_of()
    texts = group.gather_text(to_json(replace(facts, rank=group.rank, size=group.size)))
    rows = [from_json(text) for text in texts]
    nodes: dict[object, list[Facts]] = defaultdict(list)
    for row in rows:
        nodes[_node_of(row)].append(row)
    rows = [replace(row, node=tuple(other.rank for other in nodes[_node_of(row)])) for row in rows]
    findings = diagnose(rows)
    return Report(rows, findings, run_checks(group, deadline, any(finding.level == ERROR for finding in findings)))


def _node_of(row: Facts) -> str | tuple[int, ...]:
    """What the ranks of a node have in common: without MPI its name."""
    return row.host if row.mpi_problem else row.node


@contextmanager
def _first_here() -> Iterator[bool]:
    """Whether this is the first task of its launcher on this machine to arrive here.

    Task 0 will not do: MPI may end the task that initializes first, and the launcher then ends the others, perhaps task 0
    before it arrives here.
    """
    with socket.socket(socket.AF_UNIX) as mark:
        is_first = True
        try:
            mark.bind(f"\0shardload-doctor-{os.getppid()}")  # abstract socket: the name vanishes with the process
        except OSError as error:
            is_first = error.errno != errno.EADDRINUSE  # no abstract sockets on this system: then every task may print
        yield is_first


@contextmanager
def _last_words(text: str) -> Iterator[None]:
    """Print `text` on stderr if this process is ended inside the block: an MPI library may end it without telling Python."""
    if not text:
        yield
        return
    # The shell gets a line from this process, or end-of-file if it died. A session of its own, since launchers end sessions.
    command = ["/bin/sh", "-c", 'read line || echo "$0" >&2', text]
    listener = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        listener.communicate(b"\n")
