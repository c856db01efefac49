"""What is wrong with how this job was started, how bad is it, and what fixes it?

`diagnose` is pure: `Facts` in, one row per rank; a list of `Finding` out. Each known misconfiguration is one function here,
which yields nothing if the job does not have it.

=========  =================================================================================
`ERROR`    Loads would fail, or each process would do the work of all.
`WARNING`  Loads work, but slower than they could, or on fewer devices than there are.
`NOTE`     Good to know; it may be intended.
=========  =================================================================================
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardload.cli.doctor.facts import Facts
from shardload.units import format_nbytes, ranks_text

__all__ = ["ERROR", "NOTE", "WARNING", "Finding", "diagnose"]

ERROR, WARNING, NOTE = "error", "warning", "note"

_OLDEST_JAX = (0, 7, 1)
_LEAST_SHM_NBYTES, _LEAST_FILES = 64 << 20, 1024
# With these a rank that waits yields its core to others.
_YIELDING = ("MPIR_CVAR_ENABLE_HEAVY_YIELD", "OMPI_MCA_mpi_yield_when_idle")
_WEAK_THREADS = ("SINGLE", "FUNNELED")

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
    found = [finding for rule in _RULES for finding in rule(rows)]
    return sorted(found, key=lambda finding: (ERROR, WARNING, NOTE).index(finding.level))


def _ranks(rows: Rows) -> tuple[int, ...]:
    return tuple(row.rank for row in rows)


def _one(name: str, level: str, rows: Rows, text: str, fix: str) -> Iterator[Finding]:
    """A finding about these rows; nothing where there are none."""
    if rows:
        yield Finding(name, level, text, fix, _ranks(rows))


def _nodes(rows: Rows) -> dict[int, list[Facts]]:
    """The rows of each node, by its lowest rank."""
    found: dict[int, list[Facts]] = defaultdict(list)
    for row in rows:
        found[row.node[0]].append(row)
    return found


def _where(rows: Rows) -> str:
    return f"{ranks_text(_ranks(rows))} on {rows[0].host}"


# --- MPI


def _singletons(rows: Rows) -> Iterator[Finding]:
    row = rows[0]
    if row.mpi_problem or row.mpi_size > 1 or row.n_launched < 2:
        return
    library = row.mpi_library or "mpi4py's MPI library"
    if row.launcher == "srun":
        wanted, other = ("pmix", "pmi2") if "Open MPI" in library else ("pmi2", "pmix")
        if "cray" in library.lower():
            wanted, other = "cray_shasta", "pmi2"
        fix = (
            f"srun --mpi={wanted} ... is right for {library} (--mpi={other} for the other kind of MPI); "
            "'srun --mpi=list' shows what this cluster has; SHARDLOAD_MPI=0 runs without MPI: each process reads for itself"
        )
    else:
        start = "Open MPI's mpirun" if row.launcher == "mpirun" else "the mpiexec of MPICH or Intel MPI"
        fix = (
            f"mpi4py uses {library}, the job was started by {start}: use the launcher that comes with {library}, or let "
            "mpi4py use the other library: MPI4PY_LIBMPI=/path/to/lib/libmpi.so"
        )
    text = (
        f"singletons: {row.launcher} started {row.n_launched} tasks, but each is a job of its own (COMM_WORLD has size 1). "
        "Each would load everything and overwrite the results of the others"
    )
    yield from _one("singletons", ERROR, [row], text, fix)


def _no_mpi(rows: Rows) -> Iterator[Finding]:
    row = rows[0]
    if not row.mpi_problem:
        return
    if row.environ.get("SHARDLOAD_MPI") == "0":
        text, fix = "MPI is switched off", "unset SHARDLOAD_MPI"
    elif "mpi4py" in row.versions:
        text = f"mpi4py finds no MPI library ({_short(row.mpi_problem)})"
        fix = (
            "module load the site's MPI, or MPI4PY_LIBMPI=/path/to/lib/libmpi.so; on one machine pip install 'shardload[mpich]'"
        )
    else:
        text = f"mpi4py is not installed ({_short(row.mpi_problem)})"
        fix = "pip install --no-binary=mpi4py mpi4py, with the site's MPI module loaded"
    if row.size > 1:
        text += f": JAX's {row.size} processes can each read for themselves, but cannot send each other data"
        yield from _one("no-mpi", NOTE, rows, text, fix)
    elif row.n_launched > 1:
        text += f", and {row.launcher} started {row.n_launched} tasks: each would load everything by itself"
        yield from _one("no-mpi", ERROR, [row], text, fix)
    else:
        yield from _one("no-mpi", NOTE, [row], text + ": one process can load, several cannot send each other data", fix)


def _threads(rows: Rows) -> Iterator[Finding]:
    weak = [row for row in rows if row.mpi_threads in _WEAK_THREADS]
    text = f"MPI was started at thread level {weak[0].mpi_threads if weak else ''}, while JAX and shardload use threads"
    fix = "MPI4PY_RC_THREAD_LEVEL=multiple, or unset it and MPI4PY_RC_THREADS; else an MPI library built with threads"
    yield from _one("mpi-threads", WARNING, weak, text, fix)


# --- JAX


def _jax_failed(rows: Rows) -> Iterator[Finding]:
    failed = [row for row in rows if row.jax_problem]
    asked = failed[0].environ.get("JAX_PLATFORMS") if failed else None
    text = f"JAX could not be started: {_short(failed[0].jax_problem) if failed else ''}"
    text += f" (JAX_PLATFORMS is {asked!r})" if asked else ""  # without the platform JAX's own text may be AssertionError alone
    fix = (
        "call shardload.initialize() at the top of the script; for GPUs pip install 'shardload[cuda12]', else JAX_PLATFORMS=cpu"
    )
    yield from _one("jax-failed", ERROR, failed, text, fix)


def _jax_alone(rows: Rows) -> Iterator[Finding]:
    n = rows[0].mpi_size
    alone = [row for row in rows if n > 1 and row.jax_processes == 1]
    text = f"MPI has {n} ranks, but JAX sees one process: each rank runs JAX by itself"
    yield from _one("jax-alone", ERROR, alone, text, "call shardload.initialize() first, before anything that uses JAX devices")


def _jax_count(rows: Rows) -> Iterator[Finding]:
    n = rows[0].mpi_size
    other = [row for row in rows if row.jax_processes not in (None, 1, n) and not row.mpi_problem]
    n_processes = other[0].jax_processes if other else 0
    text = f"MPI has {n} ranks, but JAX sees {n_processes} processes"
    fix = "start JAX with shardload.initialize() instead of jax.distributed.initialize(): one JAX process per MPI rank"
    if n == 1 and other:
        fix = "start the job with the mpiexec or srun --mpi=... of mpi4py's MPI library: MPI was started as singletons"
    yield from _one("jax-count", ERROR, other, text, fix)


def _jax_order(rows: Rows) -> Iterator[Finding]:
    if any(row.jax_processes != row.size for row in rows):
        return
    times = Counter(row.jax_process for row in rows)
    twice = [row for row in rows if times[row.jax_process] > 1]
    fix = "start JAX with shardload.initialize()"
    yield from _one("jax-twice", ERROR, twice, "ranks have the same JAX process index", fix)
    if not twice:
        moved = [row for row in rows if row.jax_process != row.rank]
        text = "JAX process indices are not MPI ranks; shardload handles that, but your own scripts may not"
        yield from _one("jax-order", NOTE, moved, text, fix + ", which makes them equal")


def _jax_old(rows: Rows) -> Iterator[Finding]:
    old = [row for row in rows if "jax" in row.versions and _number(row.versions["jax"]) < _OLDEST_JAX]
    least = ".".join(map(str, _OLDEST_JAX))
    text = f"JAX {old[0].versions['jax'] if old else ''} is older than {least}"
    yield from _one(
        "jax-old", ERROR, old, text, f"pip install 'jax>={least}', with the extra of your GPUs: 'jax[cuda12]>={least}'"
    )


# --- devices


def _gpus_shared(rows: Rows) -> Iterator[Finding]:
    for node in _nodes(rows).values():
        users = Counter(gpu for row in node for gpu in set(row.gpus))
        sharing = [row for row in node if any(users[gpu] > 1 for gpu in row.gpus)]
        if not sharing:
            continue
        n_seen = len(users)
        if n_seen > 1 and all(len(set(row.gpus)) == n_seen for row in sharing):
            text = f"{_where(sharing)} each use all {n_seen} GPUs of the node, so that every GPU is shared"
            fix = "srun --gpus-per-task=1; or start JAX with shardload.initialize(), one GPU for each rank; or one rank a node"
            yield from _one("gpus-all-seen", ERROR, sharing, text, fix)
            continue
        seen = sharing[0].environ.get("CUDA_VISIBLE_DEVICES")
        text = f"{_where(sharing)} use the same GPU (CUDA_VISIBLE_DEVICES {'is not set' if seen is None else '= ' + seen})"
        fix = "as many ranks a node as GPUs: srun --ntasks-per-node=4 --gpus-per-task=1; set no CUDA_VISIBLE_DEVICES for all"
        yield from _one("gpu-shared", ERROR, sharing, text, fix)


def _gpus_unused(rows: Rows) -> Iterator[Finding]:
    def n_gpus(row: Facts) -> int:
        given = row.environ.get("SLURM_GPUS_ON_NODE", "")
        visible = [
            v for v in row.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip() not in ("", "-1", "NoDevFiles")
        ]
        return max(row.n_gpus, len(visible), int(given) if given.isdecimal() else 0)

    unused = [row for row in rows if row.platform == "cpu" and n_gpus(row)]
    meant = [row for row in unused if "cpu" in row.environ.get("JAX_PLATFORMS", "")]
    text = "there are {} GPUs on the node, but JAX uses the CPU because JAX_PLATFORMS={}"
    filled = text.format(n_gpus(meant[0]), meant[0].environ["JAX_PLATFORMS"]) if meant else ""
    yield from _one("gpus-off", WARNING, meant, filled, "unset JAX_PLATFORMS")
    rest = [row for row in unused if row not in meant]
    text = f"there are {n_gpus(rest[0]) if rest else 0} GPUs on the node, but JAX finds none and uses the CPU"
    fix = "pip install 'shardload[cuda12]' (or cuda13); nvidia-smi must work on the node; JAX_PLATFORMS=cpu if you want the CPU"
    yield from _one("gpus-unused", ERROR, rest, text, fix)


def _unequal(rows: Rows) -> Iterator[Finding]:
    sizes = {node[0].host: len(node) for node in _nodes(rows).values()}
    nodes = sorted({len(node) for node in _nodes(rows).values()})
    if len(nodes) > 1:
        text = f"nodes have different numbers of ranks: {', '.join(f'{n} on {host}' for host, n in sorted(sizes.items()))}"
        yield from _one("ranks-unequal", WARNING, rows, text, "srun --ntasks-per-node=N, or mpiexec -ppn N")
    if any(row.jax_processes is None for row in rows):
        return
    devices = Counter(len(row.devices) for row in rows)
    if len(devices) > 1:
        least = [row for row in rows if len(row.devices) == min(devices)]
        text = f"processes have different numbers of devices: from {min(devices)} to {max(devices)}"
        fix = "srun --gpus-per-task=N, the same for all; a mesh needs the same number of devices in each process"
        yield from _one("devices-unequal", WARNING, least, text, fix)


# --- the machine


def _cores(rows: Rows) -> Iterator[Finding]:
    for node in _nodes(rows).values():
        together = {core for row in node for core in row.cores}
        if len(node) == 1 or not together:
            continue
        if len(together) == 1:
            text = f"{_where(node)} are all bound to core {next(iter(together))}, so only one of them runs at a time"
            fix = "srun --cpus-per-task=N --cpu-bind=cores; MPICH: mpiexec -bind-to none; Open MPI: mpirun --bind-to none"
            yield from _one("one-core", WARNING, node, text, fix)
        elif len(together) < len(node):
            text = f"{_where(node)} have {len(together)} cores together, fewer than ranks"
            fix = "srun --cpus-per-task=1 or more; fewer ranks a node"
            level = NOTE
            if not all(any(row.environ.get(name) == "1" for name in _YIELDING) for row in node):
                level, text = WARNING, text + ": those that wait for messages slow down the others"
                fix += "; or MPIR_CVAR_ENABLE_HEAVY_YIELD=1 (MPICH), OMPI_MCA_mpi_yield_when_idle=1 (Open MPI)"
            yield from _one("few-cores", level, node, text, fix)


def _memory(rows: Rows) -> Iterator[Finding]:
    small = [row for row in rows if row.shm_nbytes is None or row.shm_nbytes < _LEAST_SHM_NBYTES]
    free = format_nbytes(small[0].shm_nbytes) if small and small[0].shm_nbytes is not None else "nothing"
    text = f"/dev/shm has {free} free: MPI and NCCL keep messages of one node there (shardload does not)"
    yield from _one(
        "small-shm",
        NOTE,
        small,
        text,
        "containers: --shm-size=1g or --ipc=host; otherwise remove files that other jobs left there",
    )
    apart = [row for row in rows if not row.shares_memory]
    off = any(row.environ.get("SHARDLOAD_SHARED_MEMORY") == "0" for row in apart)
    text = f"{_where(apart) if apart else ''} cannot read each other's memory, so they send messages, which is slower"
    fix = (
        "unset SHARDLOAD_SHARED_MEMORY"
        if off
        else "containers: the ranks of a node in one process table (--pid=host), same user"
    )
    yield from _one("memory-apart", WARNING, apart, text, fix)


def _hosts(rows: Rows) -> Iterator[Finding]:
    pretended = any("SHARDLOAD_RANKS_PER_NODE" in row.environ for row in rows)
    for node in _nodes(rows).values():
        hosts = sorted({row.host for row in node})
        text = f"{ranks_text(_ranks(node))} share memory, but their hosts are called {', '.join(hosts)}"
        fix = "fine for containers with host names of their own; otherwise check the host file"
        yield from _one("names-differ", WARNING, node if len(hosts) > 1 else [], text, fix)
    leaders: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        leaders[row.host].add(row.node[0])
    for host, found in leaders.items():
        if len(found) > 1 and not pretended and not rows[0].mpi_problem:
            split = [row for row in rows if row.host == host]
            text = f"{_where(split)} are on one host, but MPI sees {len(found)} nodes there: nothing goes through shared memory"
            yield from _one(
                "host-split", WARNING, split, text, "containers: all ranks of a node with --ipc=host --pid=host, or in one"
            )


def _files(rows: Rows) -> Iterator[Finding]:
    few = [row for row in rows if row.n_files < _LEAST_FILES]
    text = f"a process may open only {few[0].n_files if few else 0} files, few for sharded stores and many ranks per node"
    yield from _one("few-files", WARNING, few, text, "ulimit -n 4096, before the launcher")
    unset = [row for row in rows if "HDF5_USE_FILE_LOCKING" not in row.environ]
    text = "HDF5_USE_FILE_LOCKING is not set: HDF5 locks the files it reads, which some Lustre and NFS mounts refuse"
    fix = "HDF5_USE_FILE_LOCKING=FALSE if opening fails with 'unable to lock file' and no other program writes the file"
    yield from _one("hdf5-locking", NOTE, unset, text, fix)


def _versions(rows: Rows) -> Iterator[Finding]:
    for name in sorted({name for row in rows for name in row.versions}):
        found = [row.versions.get(name, "missing") for row in rows]
        if len(set(found)) > 1:
            other = [row for row in rows if row.versions.get(name, "missing") != found[0]]
            text = f"ranks have different versions of {name}: {', '.join(sorted(set(found)))}"
            fix = "one environment for all ranks: activate it in the job script, before srun; the same image on every node"
            yield from _one("versions-differ", ERROR, other, text, fix)
    libraries = sorted({row.mpi_library for row in rows})
    if len(libraries) > 1:
        text = f"ranks have different MPI libraries: {', '.join(libraries)}"
        fix = "the same modules on every node: load them in the job script, before srun"
        yield from _one("libraries-differ", ERROR, [row for row in rows if row.mpi_library != rows[0].mpi_library], text, fix)


def _slurm(rows: Rows) -> Iterator[Finding]:
    row = rows[0]
    environ = row.environ
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ
    if "SLURM_JOB_ID" not in environ or in_step or row.mpi_size > 1 or row.n_launched > 1:
        return
    n = environ.get("SLURM_NTASKS", "1")
    level = WARNING if n.isdecimal() and int(n) > 1 else NOTE
    text = (
        f"SLURM_JOB_ID is set, but this process is in no step of job {environ['SLURM_JOB_ID']} (of {n} tasks): it was started "
        "by the batch script itself or by a login to the node, as one process"
    )
    yield from _one(
        "no-step", level, [row], text, "start it with srun, inside sbatch or salloc: srun --mpi=pmi2 (or pmix) python ..."
    )


_RULES: tuple[Callable[[Rows], Iterator[Finding]], ...] = (
    _singletons,
    _no_mpi,
    _jax_failed,
    _jax_alone,
    _jax_count,
    _jax_order,
    _jax_old,
    _versions,
    _gpus_shared,
    _gpus_unused,
    _unequal,
    _slurm,
    _threads,
    _hosts,
    _memory,
    _cores,
    _files,
)


def _short(text: str) -> str:
    """The first line, at most 300 characters."""
    line = text.strip().partition("\n")[0].rstrip(":. ")
    return line if len(line) <= 300 else line[:297] + "..."


def _number(version: str) -> tuple[int, ...]:
    """Comparable numbers of a version; other text is left out.

    >>> _number("0.10.2"), _number("0.7.1.dev3") >= (0, 7, 1)
    ((0, 10, 2), True)
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
