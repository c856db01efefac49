"""Was this job started correctly? What ``mpiexec -n 4 python -m shardload doctor`` runs, under the job's own launcher.

1. Each rank gathers its facts (`facts`) and receives those of all other ranks: one row per rank.
2. The rows are checked for every known misconfiguration (`rules`).
3. What every load needs is tried: an all-reduce, a scatter. All ranks run each check together and agree on its outcome: a
   failure on one rank is reported by all, and no rank waits for it.
4. One rank prints a table with one row per rank, the checks, the findings and what to type; all ranks return the same exit
   status.

A rank that hangs inside MPI or JAX is ended by `Deadline`, which says what it was waiting for.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardload.api import scatter
from shardload.cli.doctor.facts import Facts, before_jax, from_json, to_json, with_jax, with_node
from shardload.cli.doctor.rules import ERROR, Finding, diagnose
from shardload.comm.group import Group, group_of
from shardload.comm.launch import initialize
from shardload.comm.mpi import launched
from shardload.errors import ShardloadError, printable
from shardload.system.terminal import WIDTH, Column, fit_table, own_stdout, width_of, wrap
from shardload.units import counted, format_nbytes, ranges, ranks_text

_SCATTER_NBYTES, _WIDTH = 4 << 20, 64  # messages of more than MPI sends without asking the receiver first
# All ranks have the same deadline: let the others print before the launcher ends them because this one exited.
_GRACE_SECONDS = 2.0
_LAST_SECONDS = 10.0
_LINGER_SECONDS = 3.0
_NO_START = (
    "shardload doctor: MPI ended this process while MPI was starting. The usual cause: the launcher belongs to another MPI "
    "library. srun needs --mpi=pmi2 for MPICH and Intel MPI, --mpi=pmix for Open MPI; without srun, use the mpiexec or mpirun "
    "of the library that mpi4py loads. If only some starts fail under --mpi=pmi2: export MPIR_CVAR_CH4_NETMOD=ofi "
    "(docs/slurm.md)"
)


@dataclass(frozen=True)
class Check:
    """The outcome of one check: whether it passed on all ranks (None: not tried), and details."""

    name: str
    ok: bool | None
    text: str


Result = tuple[list[Facts], list[Finding], list[Check]]


def is_ok(findings: Sequence[Finding], checks: Sequence[Check]) -> bool:
    """Whether loads will work: no error, and no check that failed."""
    return not any(finding.level == ERROR for finding in findings) and all(check.ok is not False for check in checks)


def run(timeout: float, is_json: bool = False) -> int:
    """Examine the job and print the report once.

    Collective: yes, over COMM_WORLD. If MPI does not connect the launcher's tasks, each runs it alone and the first one prints.

    Parameters
    ----------
    timeout : float
        Seconds after which a process that is still waiting says what it waits for, and exits with 1.
    is_json : bool
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
        result = _examine(facts, deadline)
        group = group_of()
        try:
            is_first = facts.task == 0 or facts.n_launched == 1  # its number may be left over from a job around it
            if is_first if group.size == 1 else group.rank == 0:
                print(as_json(*result) if is_json else as_text(*result, width_of(out)), file=out)
        finally:  # many launchers end all tasks as soon as one exits with 1: not before the printing rank is done
            deadline.at = "rank 0 to print"
            if group.size > 1:
                group.gather_int(0)
            elif facts.task and facts.n_launched > 1:
                time.sleep(_LINGER_SECONDS)
    return 0 if is_ok(*result[1:]) else 1


def _start_mpi(environ: Mapping[str, str]) -> Facts:
    is_alone = launched(environ)[1] == 1
    with warnings.catch_warnings(), _first_here() as is_first, _last_words(_NO_START if is_first and not is_alone else ""):
        # mpi4py warns of singletons as well, in each of them; the doctor reports them once.
        warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
        return before_jax(environ)


def _examine(facts: Facts, deadline: Deadline) -> Result:
    if not facts.mpi_problem:
        deadline.at = "the ranks of this node"
        facts = with_node(facts, group_of())
    is_apart = facts.mpi_size == 1 and facts.n_launched > 1
    if is_apart and not facts.mpi_problem:  # singletons: nothing to run checks with
        return [facts], diagnose([facts]), []
    deadline.at = "JAX to start on all ranks"
    try:
        initialize()
    except ShardloadError as error:
        if is_apart:  # neither MPI nor JAX connects the tasks
            return [facts], diagnose([facts]), []
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
    rows = [replace(row, node=tuple(neighbour.rank for neighbour in nodes[_node_of(row)])) for row in rows]
    findings = diagnose(rows)
    return rows, findings, run_checks(group, deadline, not is_ok(findings, []))


def _node_of(row: Facts) -> str | tuple[int, ...]:
    """A key of a node, equal for all of its ranks: with MPI the ranks, else the name of the host."""
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


# --- checks


class Deadline:
    """Ends this process with exit code 1 after `seconds`, and says what it was waiting for.

    Attributes
    ----------
    who : str
        What this process is called in the message.
    at : str
        What it waits for.
    """

    def __init__(self, seconds: float) -> None:
        self.who, self.at = "shardload doctor", "MPI to start"
        self._seconds, self._done = seconds, threading.Event()

    @contextmanager
    def watching(self) -> Iterator[Deadline]:
        """End the process if this block takes longer."""
        threading.Thread(target=self._wait, daemon=True).start()
        # A library that hangs while it holds the GIL stops that thread too, but not this one.
        faulthandler.dump_traceback_later(self._seconds + _LAST_SECONDS, exit=True, file=2)
        try:
            yield self
        finally:
            self._done.set()
            faulthandler.cancel_dump_traceback_later()

    def _wait(self) -> None:
        if self._done.wait(self._seconds):
            return
        print(f"{self.who}: after {self._seconds:g} s still waiting for {self.at}", file=sys.stderr, flush=True)
        if not self._done.wait(_GRACE_SECONDS):
            os._exit(1)


def run_checks(group: Group, deadline: Deadline, has_errors: bool) -> list[Check]:
    """Run all checks, in order. Collective. A failed check is returned, not raised.

    `has_errors`: whether the rules found errors; then nothing is tried.
    """
    checks: list[Check] = []
    why_not = "not tried, because of the errors below" if has_errors else ""
    for name, work in (("all-reduce", _all_reduce), ("scatter", _scatter)):
        if why_not:
            checks.append(Check(name, None, why_not))
            continue
        deadline.at = f"the check '{name}'"
        try:
            # A rank that JAX gives no devices would keep the others waiting in the work.
            devices: list[Any] = _agreed(group, deadline, lambda: list(jax.devices()))
            checks.append(Check(name, True, _agreed(group, deadline, partial(work, devices))))
        except ShardloadError as error:
            checks.append(Check(name, False, str(error)))
            why_not = f"not tried, because the {name} failed"
    return checks


def _agreed(group: Group, deadline: Deadline, work: Callable[[], Any]) -> Any:
    """What `work` returns; the same ShardloadError on all ranks if it fails on one."""
    result, error = None, None
    try:
        result = work()
    except Exception as failure:
        error = failure
        deadline.at += f"; here it failed: {type(failure).__name__}: {failure}"
    group.agree(error)
    return result


def _all_reduce(devices: list[Any]) -> str:
    """Do the devices compute the right sum over all devices?"""
    values = np.arange(len(devices), dtype=np.int32) % 1000 + 1
    mesh = Mesh(np.array(devices), ("d",))
    x = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("d")), lambda index: values[index])
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(x)
    expected, over = int(values.sum()), counted(len(devices), "device")
    for shard in total.addressable_shards:
        if (total_here := int(np.asarray(shard.data))) != expected:
            raise ValueError(f"the sum over {over} is {total_here} on device {shard.device.id}, expected {expected}")
    return f"sum over {over} is {expected}, as expected"


def _scatter(devices: list[Any]) -> str:
    """Does each device get its own rows, unchanged?"""
    devices = devices[::-1]  # not in process order, so that mixing up the two orders fails the check
    n_rows = max(1, _SCATTER_NBYTES // (4 * _WIDTH * len(devices)))
    shape = (n_rows * len(devices), _WIDTH)
    mesh = Mesh(np.array(devices), ("d",))
    x = scatter(lambda: np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape), mesh, P("d"), verify="checksum")
    for shard in x.addressable_shards:
        first = devices.index(shard.device) * n_rows
        rows = np.arange(first * _WIDTH, (first + n_rows) * _WIDTH, dtype=np.int32).reshape(n_rows, _WIDTH)
        if not np.array_equal(np.asarray(shard.data), rows):
            raise ValueError(f"device {shard.device.id} holds wrong values, expected rows {first} to {first + n_rows}")
    return f"{format_nbytes(x.nbytes)} from rank 0 to {counted(len(devices), 'device')}, every element as expected"


# --- what is printed


def as_json(rows: Sequence[Facts], findings: Sequence[Finding], checks: Sequence[Check]) -> str:
    """The report as JSON, for scripts."""
    parts: dict[str, Sequence[Any]] = {"ranks": rows, "findings": findings, "checks": checks}
    document = {name: [asdict(entry) for entry in part] for name, part in parts.items()}
    return json.dumps({"ok": is_ok(findings, checks), **document}, indent=2)


def as_text(rows: Sequence[Facts], findings: Sequence[Finding], checks: Sequence[Check], width: int = WIDTH) -> str:
    """The report for people, in `width` columns: a table of what differs between ranks, then what they have in common."""
    cells = {title: [printable(show(row)) for row in rows] for title, show in _COLUMNS.items()}
    common = {title: texts[0] for title, texts in cells.items() if title not in _ALWAYS and len(set(texts)) == 1}
    shown = [title for title in cells if title not in common]
    table = [list(row) for row in zip(*(cells[title] for title in shown), strict=True)]
    lines = [*fit_table([Column(title) for title in shown], table, width), ""]
    lines += _paragraphs([(title, text) for title, text in common.items() if text], width)
    outcomes = {True: "ok    ", False: "FAILED", None: "-     "}
    lines += _paragraphs([(f"{outcomes[check.ok]}  {check.name}", check.text) for check in checks], width)
    for finding in findings:
        where = ranks_text(finding.ranks)
        where = "" if len(finding.ranks) == len(rows) or where in finding.text else f" ({where})"
        lines += _paragraph(f"{finding.level}: ".ljust(9), finding.text + where, width)
        lines += _paragraph("   -> ".ljust(9), finding.fix, width)
    return "\n".join([*lines, *([""] if findings else []), *wrap(_summary(rows, findings, checks), width, "", "  ")])


def _summary(rows: Sequence[Facts], findings: Sequence[Finding], checks: Sequence[Check]) -> str:
    levels = [finding.level for finding in findings]
    levels += ["failed check" for check in checks if check.ok is False]
    totals = ", ".join(counted(levels.count(level), level) for level in dict.fromkeys(levels))
    n_nodes = len({row.node[0] for row in rows})
    job = f"{counted(len(rows), 'rank')} on {counted(n_nodes, 'node')}, {counted(rows[0].n_devices, 'device')}"
    if rows[0].size == 1 and rows[0].n_launched > 1:
        job = f"{rows[0].n_launched} tasks, each a job of its own"
    return f"{'OK' if is_ok(findings, checks) else 'FAILED'}: {job}{'; ' if totals else ''}{totals}"


def _paragraphs(texts: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Titles of one width, with their texts, and an empty line."""
    widest = max((len(title) for title, _ in texts), default=0)
    lines = [line for title, text in texts for line in _paragraph(f"{title.ljust(widest)}  ", text, width)]
    return [*lines, ""] if lines else []


def _paragraph(head: str, text: str, width: int) -> list[str]:
    return wrap(text, width, head, None if len(head) <= width // 2 else "    ")


def _devices(row: Facts) -> str:
    if row.jax_process is None:
        return "-"
    return f"{row.platform} {ranges(row.devices)} ({len(row.devices)} of {row.n_devices})"


def _slurm(row: Facts) -> str:
    if "SLURM_JOB_ID" not in row.environ:
        return ""
    step, n, task, node, local = (
        row.environ.get(f"SLURM_{name}", "?") for name in ("STEP_ID", "STEP_NUM_TASKS", "PROCID", "NODEID", "LOCALID")
    )
    return f"{row.environ['SLURM_JOB_ID']}.{step} task {task}/{n} node {node} local {local}"


_ALWAYS = ("host", "MPI", "JAX", "devices", "same node")  # a column of the table, also if it is the same on all ranks
_COLUMNS: dict[str, Callable[[Facts], str]] = {
    "host": lambda row: row.host,
    "MPI": lambda row: "-" if row.mpi_problem else f"{row.rank}/{row.mpi_size}",
    "JAX": lambda row: "-" if row.jax_process is None else f"{row.jax_process}/{row.jax_processes}",
    "devices": _devices,
    "same node": lambda row: ranges(row.node),
    "Slurm": _slurm,
    "CUDA_VISIBLE_DEVICES": lambda row: row.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
    "JAX_PLATFORMS": lambda row: row.environ.get("JAX_PLATFORMS", ""),
    "SHARDLOAD_MPI": lambda row: row.environ.get("SHARDLOAD_MPI", ""),
    "cores": lambda row: ranges(row.cores),
    "MPI library": lambda row: row.mpi_library or "none",
    "MPI threads": lambda row: row.mpi_threads,
    "GPUs of the node": lambda row: str(row.n_gpus),
    "versions": lambda row: ", ".join(f"{name} {version}" for name, version in row.versions.items()),
}
