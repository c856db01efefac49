"""What is wrong with how this job was started, how bad is it, and what fixes it?

`diagnose` is pure: `Facts` in, one row per rank; a list of `Finding` out. Each known misconfiguration is one `_finding`,
which is nothing if no rank has it.

=========  =================================================================================
`ERROR`    Loads would fail, or each process would do the work of all.
`WARNING`  Loads work, but slower than they could, or on fewer devices than there are.
`NOTE`     Good to know; it may be intended.
=========  =================================================================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardload.cli.doctor.facts import Facts
from shardload.comm.mpi import HOW_TO_GET_MPI, launcher_fix
from shardload.system.gpus import visible_gpus
from shardload.units import counted, ranks_text

ERROR, WARNING, NOTE = "error", "warning", "note"

# With these a rank that waits yields its core to others.
_YIELDING = ("MPIR_CVAR_ENABLE_HEAVY_YIELD", "OMPI_MCA_mpi_yield_when_idle")

Rows = Sequence[Facts]


@dataclass(frozen=True)
class Finding:
    """One problem of a job, or one thing that is worth a look.

    Attributes
    ----------
    name : str
        Short, for scripts.
    level : str
        `ERROR`, `WARNING` or `NOTE`.
    text : str
        What was found, and what it leads to.
    fix : str
        What to type.
    ranks : tuple of int
        The ranks where it was found.
    """

    name: str
    level: str
    text: str
    fix: str
    ranks: tuple[int, ...]


def diagnose(rows: Rows) -> list[Finding]:
    """All findings about a job, from one row per rank; the worst first."""
    findings = [finding for rule in (_mpi, _jax, _devices, _machines) for finding in rule(rows)]
    return sorted(findings, key=lambda finding: (ERROR, WARNING, NOTE).index(finding.level))


def _finding(name: str, level: str, rows: Rows, text: str, fix: str) -> Iterator[Finding]:
    """A finding about these rows, with the ranks and their host in the place of ``{who}``; nothing where there are none."""
    if rows:
        ranks = tuple(row.rank for row in rows)
        yield Finding(name, level, text.replace("{who}", f"{ranks_text(ranks)} on {rows[0].host}"), fix, ranks)


def _nodes(rows: Rows) -> list[list[Facts]]:
    """The rows of each node."""
    nodes: dict[int, list[Facts]] = defaultdict(list)
    for row in rows:
        nodes[row.node[0]].append(row)
    return [*nodes.values()]


def _mpi(rows: Rows) -> Iterator[Finding]:
    row, environ = rows[0], rows[0].environ
    if row.mpi_problem:
        yield from _no_mpi(rows)
    elif row.mpi_size == 1 and row.n_launched > 1:
        fix = launcher_fix(row.launcher, row.mpi_library)
        if row.launcher == "srun":
            fix += "; SHARDLOAD_MPI=0 runs without MPI, more slowly"
        text = (
            f"singletons: {row.launcher} started {row.n_launched} tasks, but each is a job of its own (COMM_WORLD has size 1). "
            "Each would load everything and overwrite the results of the others"
        )
        yield from _finding("singletons", ERROR, [row], text, fix)
    elif row.mpi_size == row.n_launched == 1 and "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ:
        n = environ.get("SLURM_NTASKS", "1")
        text = (
            f"SLURM_JOB_ID is set, but this process is in no step of job {environ['SLURM_JOB_ID']} (of {n} tasks): it was "
            "started by the batch script itself or by a login to the node, as one process"
        )
        fix = "start it with srun, inside sbatch or salloc: srun --mpi=pmi2 (or pmix) python ..."
        yield from _finding("no-step", WARNING if n.isdecimal() and int(n) > 1 else NOTE, [row], text, fix)
    weak = [row for row in rows if row.mpi_threads in ("SINGLE", "FUNNELED")]
    text = f"MPI was started at thread level {weak[0].mpi_threads if weak else ''}, while JAX and shardload use threads"
    fix = "MPI4PY_RC_THREAD_LEVEL=multiple, or unset it and MPI4PY_RC_THREADS; else an MPI library built with threads"
    yield from _finding("mpi-threads", WARNING, weak, text, fix)


def _no_mpi(rows: Rows) -> Iterator[Finding]:
    row = rows[0]
    if row.environ.get("SHARDLOAD_MPI") == "0":
        text, fix = "MPI is switched off", "unset SHARDLOAD_MPI, and start the job as MPI needs it (srun --mpi=pmi2 or pmix)"
    else:
        text = f"mpi4py finds no MPI library ({_first_line(row.mpi_problem)})"
        fix = HOW_TO_GET_MPI
    if row.size > 1:
        text += f": JAX's {row.size} processes send each other values slowly, through JAX's coordinator"
        yield from _finding("no-mpi", NOTE, rows, text, fix)
    elif row.n_launched > 1:
        text += f", and {row.launcher} started {row.n_launched} tasks: each would load everything by itself"
        yield from _finding("no-mpi", ERROR, [row], text, fix)
    else:
        yield from _finding("no-mpi", NOTE, [row], text + ": one process can load, several cannot send each other data", fix)


def _jax(rows: Rows) -> Iterator[Finding]:
    failed = [row for row in rows if row.jax_problem]
    if failed:
        text = f"JAX could not be started: {_first_line(failed[0].jax_problem)}"
        if platforms := failed[0].environ.get("JAX_PLATFORMS"):  # JAX's own text may be AssertionError alone
            text += f" (JAX_PLATFORMS is {platforms!r})"
        fix = "call shardload.initialize() at the top of the script; "
        fix += "for GPUs pip install 'shardload[cuda12]', else JAX_PLATFORMS=cpu"
        yield from _finding("jax-failed", ERROR, failed, text, fix)
    n = rows[0].mpi_size
    deviating = [row for row in rows if row.jax_processes not in (None, n) and not row.mpi_problem]
    text = f"MPI has {counted(n, 'rank')}, but JAX's number of processes is {deviating[0].jax_processes if deviating else 0}"
    fix = "call shardload.initialize() first, in place of jax.distributed.initialize(): one JAX process per MPI rank"
    yield from _finding("jax-count", ERROR, deviating, text, fix)
    versions = [row.versions | ({"MPI": row.mpi_library} if row.mpi_library else {}) for row in rows]
    for name in sorted({name for row in versions for name in row}):
        values = [row.get(name, "missing") for row in versions]
        differing = [row for row, value in zip(rows, values, strict=True) if value != values[0]]
        text = f"ranks have different versions of {name}: {', '.join(sorted(set(values)))}"
        fix = "one environment, the same modules and image on every node: activate it in the job script, before srun"
        yield from _finding("versions-differ", ERROR, differing, text, fix)


def _devices(rows: Rows) -> Iterator[Finding]:
    for node in _nodes(rows):
        n_users = Counter(gpu for row in node for gpu in set(row.gpus))
        sharing = [row for row in node if any(n_users[gpu] > 1 for gpu in row.gpus)]
        visible = sharing[0].environ.get("CUDA_VISIBLE_DEVICES", "not set") if sharing else ""
        text = f"{{who}} use the same GPUs ({len(n_users)} in all; CUDA_VISIBLE_DEVICES: {visible})"
        fix = (
            "as many ranks a node as GPUs: srun --ntasks-per-node=4 --gpus-per-task=1; set no CUDA_VISIBLE_DEVICES for all; "
            "start JAX with shardload.initialize(), which shares out the GPUs"
        )
        yield from _finding("gpu-shared", ERROR, sharing, text, fix)

    unused = [row for row in rows if row.platform == "cpu" and _n_gpus(row)]
    platforms = unused[0].environ.get("JAX_PLATFORMS", "") if unused else ""
    n = _n_gpus(unused[0]) if unused else 0
    if "cpu" in platforms:
        text = f"there are {n} GPUs on the node, but JAX uses the CPU because JAX_PLATFORMS={platforms}"
        yield from _finding("gpus-unused", WARNING, unused, text, "unset JAX_PLATFORMS")
    else:
        text = f"there are {n} GPUs on the node, but JAX finds none and uses the CPU"
        fix = "pip install 'shardload[cuda12]' (or cuda13); nvidia-smi must work on the node; "
        yield from _finding("gpus-unused", ERROR, unused, text, fix + "JAX_PLATFORMS=cpu if you want the CPU")

    n_devices = [len(row.devices) for row in rows if row.jax_processes is not None]
    if len(set(n_devices)) > 1:
        fewest = [row for row in rows if len(row.devices) == min(n_devices)]
        text = f"processes have different numbers of devices: from {min(n_devices)} to {max(n_devices)}"
        fix = "srun --gpus-per-task=N, the same for all; a mesh needs the same number of devices in each process"
        yield from _finding("devices-unequal", WARNING, fewest, text, fix)


def _n_gpus(row: Facts) -> int:
    """The GPUs that this process could use, as far as anything says."""
    of_slurm = row.environ.get("SLURM_GPUS_ON_NODE", "")
    return max(row.n_gpus, len(visible_gpus(row.environ) or ()), int(of_slurm) if of_slurm.isdecimal() else 0)


def _machines(rows: Rows) -> Iterator[Finding]:
    for node in _nodes(rows):
        n_cores = len({core for row in node for core in row.cores})
        if not 0 < n_cores < len(node):
            continue
        text = f"{{who}} have {counted(n_cores, 'core')} together, fewer than ranks"
        fix = "srun --cpus-per-task=N --cpu-bind=cores, fewer ranks a node; mpiexec -bind-to none; mpirun --bind-to none"
        level = NOTE
        if not all(any(row.environ.get(name) == "1" for name in _YIELDING) for row in node):
            level, text = WARNING, text + ": those that wait for messages slow down the others"
            fix += "; or MPIR_CVAR_ENABLE_HEAVY_YIELD=1 (MPICH), OMPI_MCA_mpi_yield_when_idle=1 (Open MPI)"
        yield from _finding("few-cores", level, node, text, fix)

    leaders: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        leaders[row.host].add(row.node[0])
    is_meant = rows[0].mpi_problem or "SHARDLOAD_RANKS_PER_NODE" in rows[0].environ
    isolated = [row for row in rows if not row.shares_memory or (len(leaders[row.host]) > 1 and not is_meant)]
    off = any(row.environ.get("SHARDLOAD_SHARED_MEMORY") == "0" for row in isolated)
    fix = "containers: all ranks of a node in one, or with --pid=host --ipc=host, as the same user"
    text = "{who} cannot read each other's memory, so they send messages, which is slower"
    yield from _finding("memory-apart", WARNING, isolated, text, "unset SHARDLOAD_SHARED_MEMORY" if off else fix)


def _first_line(text: str) -> str:
    """The first line, at most 300 characters."""
    line = text.strip().partition("\n")[0].rstrip(":. ")
    return line if len(line) <= 300 else line[:297] + "..."
