"""How is the result printed? A table with one row per rank, the checks, the findings and what to type; or all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from shardload.cli.doctor.checks import Check
from shardload.cli.doctor.facts import Facts
from shardload.cli.doctor.rules import ERROR, Finding
from shardload.errors import printable
from shardload.system.terminal import WIDTH, Column, fit_table, wrap
from shardload.units import counted, ranges, ranks_text


@dataclass(frozen=True)
class Report:
    """Facts, findings and checks of a job; the same on every rank."""

    rows: Sequence[Facts]
    findings: Sequence[Finding]
    checks: Sequence[Check]

    @property
    def is_ok(self) -> bool:
        """Whether loads will work: no error, and no check that failed."""
        return not any(finding.level == ERROR for finding in self.findings) and all(c.ok is not False for c in self.checks)


def as_json(report: Report) -> str:
    """For scripts."""
    parts = asdict(report)
    return json.dumps({"ok": report.is_ok, "ranks": parts.pop("rows"), **parts}, indent=2)


def as_text(report: Report, width: int = WIDTH) -> str:
    """For people, in `width` columns: a table of what differs between ranks, then what all ranks have in common."""
    cells = {title: [printable(show(row)) for row in report.rows] for title, show in _COLUMNS.items()}
    common = {title: texts[0] for title, texts in cells.items() if title not in _ALWAYS and len(set(texts)) == 1}
    shown = [title for title in cells if title not in common]
    rows = [list(row) for row in zip(*(cells[title] for title in shown), strict=True)]
    lines = [*fit_table([Column(title) for title in shown], rows, width), ""]
    lines += _paragraphs([(title, text) for title, text in common.items() if text], width)
    said = {True: "ok    ", False: "FAILED", None: "-     "}
    lines += _paragraphs([(f"{said[check.ok]}  {check.name}", check.text) for check in report.checks], width)
    for finding in report.findings:
        where = ranks_text(finding.ranks)
        where = "" if len(finding.ranks) == len(report.rows) or where in finding.text else f" ({where})"
        lines += _paragraph(f"{finding.level}: ".ljust(9), finding.text + where, width)
        lines += _paragraph("   -> ".ljust(9), finding.fix, width)
    return "\n".join([*lines, *([""] if report.findings else []), *wrap(_summary(report), width, "", "  ")])


def _summary(report: Report) -> str:
    rows, levels = report.rows, [finding.level for finding in report.findings]
    levels += ["failed check" for check in report.checks if check.ok is False]
    said = ", ".join(counted(levels.count(level), level) for level in dict.fromkeys(levels))
    n_nodes = len({row.node[0] for row in rows})
    job = f"{counted(len(rows), 'rank')} on {counted(n_nodes, 'node')}, {counted(rows[0].n_devices, 'device')}"
    if rows[0].size == 1 and rows[0].n_launched > 1:
        job = f"{rows[0].n_launched} tasks, each a job of its own"
    return f"{'OK' if report.is_ok else 'FAILED'}: {job}{'; ' if said else ''}{said}"


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
