"""What is wrong with how a job was started, and what fixes it? `diagnose`, a pure function of what each rank sees.

A row is what one rank sees, as `shardload doctor --json` prints it: `doctor.facts` has its keys. A finding has a ``name`` for
scripts, a ``level``, a ``text`` (what was found, and what it leads to), a ``fix`` (what to type) and the ``ranks`` where it was
found. It is an error if loads would fail, or each process would do the work of all; a warning if loads work, but more slowly
than they could.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardload.comm.mpi import HOW_TO_GET_MPI, launcher_fix
from shardload.units import counted

Row = Mapping[str, Any]
Finding = Mapping[str, Any]
ERROR, WARNING = "error", "warning"

# With these a rank that waits yields its core to others.
_YIELDING = ("MPIR_CVAR_ENABLE_HEAVY_YIELD", "OMPI_MCA_mpi_yield_when_idle")


def diagnose(rows: Sequence[Row]) -> list[Finding]:
    """All findings about a job, from one row per rank; errors before warnings."""
    found = [*_launch(rows), *_jax(rows), *_nodes(rows)]
    return sorted(found, key=lambda finding: str(finding["level"]))  # "error" comes before "warning"


def _finding(name: str, level: str, rows: Sequence[Row], text: str, fix: str) -> Finding:
    return {"name": name, "level": level, "ranks": [row["rank"] for row in rows], "text": text, "fix": fix}


def _launch(rows: Sequence[Row]) -> Iterator[Finding]:
    """What is wrong with how the ranks were started, and with MPI."""
    row, launcher, n_tasks = rows[0], rows[0]["launcher"], rows[0]["n_tasks"]
    is_apart = row["mpi_size"] == len(rows) == 1 < n_tasks
    if row["mpi_problem"]:
        text, fix = f"mpi4py finds no MPI library ({_first_line(row['mpi_problem'])})", HOW_TO_GET_MPI
        if row.get("SHARDLOAD_MPI") == "0":
            text = "MPI is switched off"
            fix = "unset SHARDLOAD_MPI, and start the job as MPI needs it (srun --mpi=pmi2 or pmix)"
        if is_apart:
            text += f", and {launcher} started {n_tasks} tasks: each would load everything by itself"
        else:
            text += ": one process can load, several send each other values slowly, through JAX's coordinator"
        yield _finding("no-mpi", ERROR if is_apart else WARNING, rows, text, fix)
    elif is_apart:
        text = f"singletons: {launcher} started {n_tasks} tasks, but each is a job of its own (COMM_WORLD has size 1). Each "
        text += "would load everything and overwrite the results of the others"
        fix = launcher_fix(launcher, row["mpi_library"])
        fix += "; SHARDLOAD_MPI=0 runs without MPI, more slowly" if launcher == "srun" else ""
        yield _finding("singletons", ERROR, rows, text, fix)
    elif len(rows) == 1 and "SLURM_STEP_ID" not in row and int(row.get("SLURM_NTASKS", 1)) > 1:
        text = f"this process is in no step of its Slurm job of {row['SLURM_NTASKS']} tasks: the batch script itself started it"
        fix = "start it with srun, inside sbatch or salloc: srun --mpi=pmi2 (or pmix) python ..."
        yield _finding("no-step", WARNING, rows, text, fix)
    if weak := [row for row in rows if row["mpi_threads"] in ("SINGLE", "FUNNELED")]:
        text = f"MPI was started at thread level {weak[0]['mpi_threads']}, while JAX and shardload use threads"
        fix = "MPI4PY_RC_THREAD_LEVEL=multiple, or unset it and MPI4PY_RC_THREADS; else an MPI library built with threads"
        yield _finding("mpi-threads", WARNING, weak, text, fix)


def _jax(rows: Sequence[Row]) -> Iterator[Finding]:
    if failed := [row for row in rows if row["jax_problem"]]:
        text = f"JAX could not be started: {_first_line(failed[0]['jax_problem'])}"
        if platforms := failed[0].get("JAX_PLATFORMS"):  # JAX's own text may be AssertionError alone
            text += f" (JAX_PLATFORMS is {platforms!r})"
        yield _finding("jax-failed", ERROR, failed, text, "for GPUs pip install 'shardload[cuda12]', else JAX_PLATFORMS=cpu")
    if differing := [row for row in rows if row["versions"] != rows[0]["versions"]]:
        versions = {*rows[0]["versions"]} ^ {*differing[0]["versions"]}
        text = f"ranks have different versions: {', '.join(sorted(versions))}"
        fix = "one environment, the same modules and image on every node: activate it in the job script, before srun"
        yield _finding("versions-differ", ERROR, differing, text, fix)
    if unused := [row for row in rows if row["platform"] == "cpu" and row["n_gpus"]]:
        level, why = ERROR, "JAX finds none and uses the CPU"
        fix = "pip install 'shardload[cuda12]' (or cuda13); nvidia-smi must work on the node; or JAX_PLATFORMS=cpu"
        if "cpu" in (platforms := unused[0].get("JAX_PLATFORMS", "")):
            level, why, fix = WARNING, f"JAX uses the CPU because JAX_PLATFORMS={platforms}", "unset JAX_PLATFORMS"
        yield _finding("gpus-unused", level, unused, f"there are {unused[0]['n_gpus']} GPUs on the node, but {why}", fix)


def _nodes(rows: Sequence[Row]) -> Iterator[Finding]:
    """What is wrong with how ranks share the GPUs, cores and memory of a node. A node is named by the lowest rank on it."""
    n_ranks = Counter((row["node"][0], gpu) for row in rows for gpu in row["gpus"])
    shared = [node_and_gpu for node_and_gpu, n in n_ranks.items() if n > 1]
    if sharing := [row for row in rows if any((row["node"][0], gpu) in shared for gpu in row["gpus"])]:
        visible = sharing[0].get("CUDA_VISIBLE_DEVICES", "not set")
        text = f"ranks use the same GPUs, such as {shared[0][1]} (CUDA_VISIBLE_DEVICES: {visible})"
        fix = "as many ranks a node as GPUs: srun --ntasks-per-node=4 --gpus-per-task=1; do not set one "
        fix += "CUDA_VISIBLE_DEVICES for all; start JAX with shardload.initialize(), which shares out the GPUs"
        yield _finding("gpu-shared", ERROR, sharing, text, fix)
    nodes = defaultdict(list)
    for row in rows:
        nodes[row["node"][0]].append(row)
    for node in nodes.values():
        n_cores = len({core for row in node for core in row["cores"]})  # 0 if that is not known
        if 0 < n_cores < len(node) and not any(node[0].get(name) == "1" for name in _YIELDING):
            text = f"{counted(len(node), 'rank')} of a node have {counted(n_cores, 'core')}: those that wait for messages slow "
            text += "down the others"
            fix = "srun --cpus-per-task=N --cpu-bind=cores, or fewer ranks a node; mpiexec -bind-to none (mpirun --bind-to); "
            fix += "MPIR_CVAR_ENABLE_HEAVY_YIELD=1 (MPICH), OMPI_MCA_mpi_yield_when_idle=1 (Open MPI)"
            yield _finding("few-cores", WARNING, node, text, fix)
    if without := [row for row in rows if not row["shares_memory"]]:
        text = "ranks of a node cannot read each other's memory, so they send messages, which is slower"
        fix = "containers: all ranks of a node in one, or with --pid=host --ipc=host, as the same user; else unset "
        yield _finding("memory-apart", WARNING, without, text, fix + "SHARDLOAD_SHARED_MEMORY")


def _first_line(text: str) -> str:
    """The first line, at most 300 characters."""
    return text.strip().partition("\n")[0].rstrip(":. ")[:300]
