"""How is the result printed? A table with one row per rank, the checks, the findings and what to type; or all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from shardload.cli.doctor.checks import Check
from shardload.cli.doctor.facts import Facts
from shardload.cli.doctor.rules import ERROR, NOTE, WARNING, Finding
from shardload.errors import printable
from shardload.system.terminal import WIDTH, fit_table, wrap
from shardload.system.terminal import Column as TextColumn
from shardload.units import format_nbytes, ranges, ranks_text

__all__ = ["Report", "as_json", "as_text"]


@dataclass(frozen=True)
class Report:
    """Facts, findings and checks of a job; the same on every rank."""

    rows: Sequence[Facts]
    findings: Sequence[Finding]
    checks: Sequence[Check]

    @property
    def is_ok(self) -> bool:
        """Whether loads will work: no error, and no check that failed."""
        return not self.n(ERROR) and not any(check.ok is False for check in self.checks)

    def n(self, level: str) -> int:
        """How many findings there are of a level."""
        return sum(finding.level == level for finding in self.findings)


def as_json(report: Report) -> str:
    """For scripts."""
    what = {
        "ok": report.is_ok,
        "ranks": [asdict(row) for row in report.rows],
        "findings": [asdict(finding) for finding in report.findings],
        "checks": [asdict(check) for check in report.checks],
    }
    return json.dumps(what, indent=2)


def as_text(report: Report, width: int = WIDTH) -> str:
    """For people, in `width` columns: a table of what differs between ranks, then what all ranks have in common."""
    common, columns = _split(report.rows)
    titles = [title for title, _ in columns]
    rows = [[printable(show(row)) for _, show in columns] for row in report.rows]
    always = [title for title, _ in _ALWAYS]
    narrow = [always, always[:4], always[:3]]
    lines = [*fit_table([TextColumn(title) for title in titles], rows, width, narrow, rule=True), ""]
    widest = max((len(title) for title, _ in common), default=0)
    for title, text in common:
        lines += _wrapped(f"{title.ljust(widest)}  ", printable(text), width)
    lines += [""]
    widest = max((len(check.name) for check in report.checks), default=0)
    for check in report.checks:
        said = {True: "ok    ", False: "FAILED", None: "-     "}[check.ok]
        lines += _wrapped(f"{said}  {check.name.ljust(widest)}  ", check.text, width)
    lines += [""] if report.checks else []
    for finding in report.findings:
        where = ranks_text(finding.ranks)
        where = "" if len(finding.ranks) == len(report.rows) or where in finding.text else f" ({where})"
        lines += _wrapped(f"{finding.level}: ".ljust(9), finding.text + where, width)
        lines += _wrapped("   -> ".ljust(9), finding.fix, width)
    return "\n".join([*lines, *([""] if report.findings else []), *wrap(_summary(report), width, "", "  ")])


def _summary(report: Report) -> str:
    rows = report.rows
    counted = [(report.n(level), level) for level in (ERROR, WARNING, NOTE)]
    counted.append((sum(check.ok is False for check in report.checks), "failed check"))
    said = ", ".join(f"{n} {what}{'' if n == 1 else 's'}" for n, what in counted if n)
    n_nodes = len({row.node[0] for row in rows})
    job = f"{_count(len(rows), 'rank')} on {_count(n_nodes, 'node')}, {_count(rows[0].n_devices, 'device')}"
    if rows[0].size == 1 and rows[0].n_launched > 1:
        job = f"{rows[0].n_launched} tasks, each a job of its own"
    return f"{'OK' if report.is_ok else 'FAILED'}: {job}{'; ' + said if said else ''}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _wrapped(head: str, text: str, width: int) -> list[str]:
    # Flags and paths are not broken, so that they can be copied.
    return wrap(text, width, head, None if len(head) <= width // 2 else "    ")


Column = tuple[str, Callable[[Facts], str]]


def _split(rows: Sequence[Facts]) -> tuple[list[tuple[str, str]], list[Column]]:
    """What is equal in all rows, and the table's columns: the fixed ones, and what differs."""
    common: list[tuple[str, str]] = []
    columns = list(_ALWAYS)
    for title, show in _WHERE_DIFFERENT:
        texts = {show(row) for row in rows}
        if len(texts) > 1:
            columns.append((title, show))
        elif text := texts.pop():
            common.append((title, text))
    return common, columns


def _variable(name: str, missing: str = "not set") -> Column:
    return name, lambda row: row.environ.get(name, missing)


def _devices(row: Facts) -> str:
    if row.jax_process is None:
        return "-"
    return f"{row.platform} {ranges(row.devices)} ({len(row.devices)} of {row.n_devices})"


def _jax(row: Facts) -> str:
    return "-" if row.jax_process is None else f"{row.jax_process}/{row.jax_processes}"


def _slurm_job(row: Facts) -> str:
    job, step = (row.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return job and (f"{job}.{step}" if step else f"{job}, no step")


def _slurm_task(row: Facts) -> str:
    if "SLURM_JOB_ID" not in row.environ:
        return ""
    n = row.environ.get("SLURM_STEP_NUM_TASKS", row.environ.get("SLURM_NTASKS", "?"))
    task, node, local = (row.environ.get(f"SLURM_{name}", "?") for name in ("PROCID", "NODEID", "LOCALID"))
    return f"{task}/{n} node {node} local {local}"


def _memory(row: Facts) -> str:
    return "none" if row.shm_nbytes is None else format_nbytes(row.shm_nbytes)


def _software(row: Facts) -> str:
    return ", ".join(f"{name} {version}" for name, version in row.versions.items())


_ALWAYS: tuple[Column, ...] = (
    ("host", lambda row: row.host),
    ("MPI", lambda row: "-" if row.mpi_problem else f"{row.rank}/{row.mpi_size}"),
    ("JAX", _jax),
    ("devices", _devices),
    ("same node", lambda row: ranges(row.node)),
)
_WHERE_DIFFERENT: tuple[Column, ...] = (
    ("Slurm job", _slurm_job),
    ("Slurm task", _slurm_task),
    _variable("CUDA_VISIBLE_DEVICES"),
    ("cores", lambda row: ranges(row.cores)),
    ("/dev/shm free", _memory),
    ("MPI library", lambda row: row.mpi_library or "none"),
    ("MPI threads", lambda row: row.mpi_threads),
    _variable("HDF5_USE_FILE_LOCKING"),
    _variable("JAX_PLATFORMS", ""),
    _variable("SHARDLOAD_MPI", ""),
    ("open files", lambda row: str(row.n_files)),
    ("GPUs of the node", lambda row: str(row.n_gpus)),
    ("versions", _software),
)
