"""Was this job started correctly? What ``mpiexec -n 4 python -m shardload doctor`` runs, under the job's own launcher.

1. Each rank gathers what it sees (`facts`) and receives that of all other ranks: one row per rank, of plain values, which are
   what ``--json`` prints.
2. The rows are checked for every known misconfiguration (`findings`).
3. What every load needs is tried: a scatter, an all-reduce. All ranks run each check together and agree on its outcome: a
   failure on one rank is reported by all, and no rank waits for it.
4. One rank prints a table with one row per rank, the checks, the findings and what to type; all ranks return the same exit
   status.

A rank that hangs inside MPI or JAX is ended by `Deadline`, which says what it was waiting for.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardload.api import scatter
from shardload.cli.findings import ERROR, Finding, Row, diagnose
from shardload.comm.group import Group, group_of
from shardload.comm.launch import initialize
from shardload.comm.mpi import launched, library_name, mpi_problem, task, thread_level, world_rank_and_size
from shardload.errors import ShardloadError, printable
from shardload.system.gpus import gpu_files, visible_gpus
from shardload.system.terminal import WIDTH, Column, fit_table, own_stdout, width_of, wrap
from shardload.units import counted, first_ranks, format_nbytes

# Variables that show how the job was started, or that change its behaviour.
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "SHARDLOAD_MPI", "SHARDLOAD_RANKS_PER_NODE", "SHARDLOAD_SHARED_MEMORY"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "MPIR_CVAR_ENABLE_HEAVY_YIELD", "OMPI_MCA_mpi_yield_when_idle"),
)
_PACKAGES = ("jax", "jaxlib", "numpy", "mpi4py", "h5py", "zarr")
_SHARED_NBYTES = 1 << 20  # shared between the ranks of a node, to see whether that works
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

Check = Mapping[str, Any]  # its name, whether it is ok on all ranks, and a text


def is_ok(findings: Sequence[Finding], checks: Sequence[Check]) -> bool:
    """Whether loads will work: no error, and no check that failed."""
    return not any(finding["level"] == ERROR for finding in findings) and all(check["ok"] for check in checks)


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
    is_alone = launched(os.environ)[1] == 1
    with own_stdout() as out, Deadline(timeout).watching() as deadline:
        with warnings.catch_warnings(), nullcontext() if is_alone else _last_words(_NO_START):
            # mpi4py warns of singletons as well, in each of them; the doctor reports them once.
            warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
            row = facts(os.environ)
        deadline.who = f"rank {row['rank']} on {row['host']}"
        rows, findings, checks = _examine(row, deadline)
        group = group_of()
        try:
            if (group.rank if group.size > 1 or is_alone else row["rank"]) == 0:
                text = as_json(rows, findings, checks) if is_json else as_text(rows, findings, checks, width_of(out))
                print(text, file=out)
        finally:  # many launchers end all tasks as soon as one exits with 1: not before the printing rank is done
            deadline.at = "rank 0 to print"
            if group.size > 1:
                group.gather_int(0)
            elif row["rank"] and not is_alone:
                time.sleep(_LINGER_SECONDS)
    return 0 if is_ok(findings, checks) else 1


# --- what a rank sees


def facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """What this process sees of its job before JAX starts: plain values. Starts MPI.

    ``rank`` is the launcher's number of this task if MPI connects it to no other. ``gpus`` are names of the GPUs that this
    process uses, equal on ranks that use the same one; ``n_gpus`` those that there are on the node, as far as anything says.
    ``node`` has the ranks on the same node, and ``shares_memory`` says if this one could read the memory of the others.
    Environment variables are those that are set.
    """
    from shardload import __version__  # a folder on PYTHONPATH has no metadata

    launcher, n_tasks = launched(environ)
    rank, size = world_rank_and_size()
    versions = [f"python {platform.python_version()}", f"shardload {__version__}", *filter(None, [library_name()])]
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    n_gpus = max(len(gpu_files()), len(visible_gpus(environ) or ()))
    row = {"host": socket.gethostname(), "rank": rank if size > 1 else task(environ), "launcher": launcher, "n_tasks": n_tasks}
    row |= {"mpi_size": size, "mpi_library": library_name(), "mpi_threads": thread_level(), "mpi_problem": mpi_problem()}
    row |= {"jax_process": None, "jax_processes": None, "jax_problem": "", "platform": "", "devices": [], "n_devices": 0}
    row |= {"node": [0], "shares_memory": True, "cores": cores, "gpus": [], "n_gpus": n_gpus, "versions": versions}
    return row | {name: environ[name] for name in _VARIABLES if name in environ}


def facts_of_jax() -> dict[str, Any]:
    """What this process sees of JAX. The first call starts JAX's devices, and so waits for the other processes."""
    try:
        devices = jax.local_devices()
        return {
            "jax_process": jax.process_index(),
            "jax_processes": jax.process_count(),
            "platform": devices[0].platform if devices else jax.default_backend(),
            "devices": [int(device.id) for device in devices],
            "n_devices": jax.device_count(),
            "gpus": [_uuid(device.local_hardware_id) for device in devices if device.platform in ("gpu", "cuda")],
        }
    except Exception as error:  # JAX, its plugins or its drivers: report whatever they raise
        return {"jax_problem": f"{type(error).__name__}: {error}"}


def _uuid(ordinal: int) -> str:
    """A name of a GPU of this process, the same in every process: its UUID, or its number where the driver says no more.

    From the driver, which JAX has started. CUDA_VISIBLE_DEVICES is not enough: under Slurm each task of a node may see its own
    GPU as number 0.
    """
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    with suppress(OSError, AttributeError):  # no such library
        driver = ctypes.CDLL("libcuda.so.1")
        found = driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0
        if found and driver.cuDeviceGetUuid(ctypes.byref(uuid), device) == 0:
            return f"GPU-{bytes(uuid).hex()}"
    return f"number {ordinal}"


def _examine(row: dict[str, Any], deadline: Deadline) -> tuple[list[Row], list[Finding], list[Check]]:
    deadline.at = "JAX to start on all ranks"
    try:
        initialize()
    except ShardloadError as error:
        if row["mpi_size"] == 1 < row["n_tasks"]:  # neither MPI nor JAX connects the tasks
            return [row], diagnose([row]), []
        row["jax_problem"] = str(error)
    else:
        row |= facts_of_jax()
    deadline.at = f"the facts of the other ranks; here JAX: {row['jax_problem'] or 'started'}"
    group = group_of()
    row |= {"rank": group.rank, "node": list(group.node.ranks)}
    row["shares_memory"] = bool(group.node.shared_memory(_SHARED_NBYTES)) or len(row["node"]) == 1
    rows = [json.loads(text) for text in group.gather_text(json.dumps(row))]
    findings = diagnose(rows)
    return rows, findings, run_checks(group, deadline) if is_ok(findings, []) else []


@contextmanager
def _last_words(text: str) -> Iterator[None]:
    """Print `text` on stderr if this process is ended inside the block: an MPI library may end it without telling Python.

    Only the first task of its launcher on this machine to arrive here does. Task 0 will not do: MPI may end the task that
    initializes first, and the launcher then ends the others, perhaps task 0 before it arrives here.
    """
    with socket.socket(socket.AF_UNIX) as mark:
        try:
            mark.bind(f"\0shardload-doctor-{os.getppid()}")  # abstract socket: the name vanishes with the process
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # else there are no abstract sockets: then every task may print
                yield
                return
        # The shell gets a line from this process, or end-of-file if it died. Its session is its own: launchers end sessions.
        command = ["/bin/sh", "-c", 'read line || echo "$0" >&2', text]
        listener = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            yield
        finally:
            listener.communicate(b"\n")


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


# --- what is tried


def run_checks(group: Group, deadline: Deadline) -> list[Check]:
    """Try what every load needs, up to what fails: that is returned, not raised. Collective."""
    checks: list[Check] = []
    result: Any = None
    # A rank that JAX gives no devices would keep the others waiting in the scatter.
    for name, work in (("devices", _devices), ("scatter", _scatter), ("all-reduce", _all_reduce)):
        deadline.at = f"the check '{name}'"
        try:
            result, text = _agreed(group, deadline, partial(work, result))
        except ShardloadError as error:
            return [*checks, {"name": name, "ok": False, "text": str(error)}]
        checks.append({"name": name, "ok": True, "text": text})
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


def _devices(_: None) -> tuple[list[jax.Device], str]:
    devices = jax.devices()
    return devices, f"{len(devices)} in all"


def _scatter(devices: list[Any]) -> tuple[Any, str]:
    """Does each device get its own rows, unchanged?"""
    devices = devices[::-1]  # not in process order, so that mixing up the two orders fails the check
    n_rows = max(1, _SCATTER_NBYTES // (4 * _WIDTH * len(devices)))
    x = scatter(lambda: _rows(0, n_rows * len(devices)), Mesh(np.array(devices), ("d",)), P("d"), verify="checksum")
    for shard in x.addressable_shards:
        if not np.array_equal(np.asarray(shard.data), _rows(devices.index(shard.device) * n_rows, n_rows)):
            raise ValueError(f"device {shard.device.id} holds wrong values")
    return x, f"{format_nbytes(x.nbytes)} from rank 0 to {counted(len(devices), 'device')}, every element as expected"


def _rows(first: int, n_rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    numbers = np.arange(first * _WIDTH, (first + n_rows) * _WIDTH, dtype=np.int32)
    return numbers.reshape(n_rows, _WIDTH) % 1000  # so that their sum is an int32, too


def _all_reduce(x: Any) -> tuple[None, str]:
    """Do the devices compute the right sum over all devices?"""
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(x.sharding.mesh, P()))(x)
    expected, over = int(_rows(0, len(x)).sum()), counted(x.sharding.num_devices, "device")
    for shard in total.addressable_shards:
        if int(shard.data) != expected:
            raise ValueError(f"the sum over {over} is {int(shard.data)} on device {shard.device.id}, expected {expected}")
    return None, f"the sum over {over} is {expected}, as expected"


# --- what is printed


def as_json(rows: Sequence[Row], findings: Sequence[Finding], checks: Sequence[Check]) -> str:
    """The report as JSON, for scripts."""
    return json.dumps({"ok": is_ok(findings, checks), "ranks": rows, "findings": findings, "checks": checks}, indent=2)


def as_text(rows: Sequence[Row], findings: Sequence[Finding], checks: Sequence[Check], width: int = WIDTH) -> str:
    """The report for people, in `width` columns: a table of what differs between ranks, then what they have in common."""
    names = dict.fromkeys(name for row in rows for name in row)
    cells = {name: [printable(_shown(row.get(name))) for row in rows] for name in names}
    columns = [name for name, texts in cells.items() if name in _ALWAYS or len(set(texts)) > 1]
    common = [f"{name} {texts[0]}" for name, texts in cells.items() if name not in columns and texts[0].strip("-")]
    lines = fit_table([*map(Column, columns)], [*zip(*(cells[name] for name in columns), strict=True)], width)
    lines += ["", *wrap("; ".join(common), width), ""]
    for check in checks:
        lines += wrap(f"{'ok' if check['ok'] else 'FAILED'}: {check['name']}: {check['text']}", width, "", "  ")
    for finding in findings:
        where = "" if len(finding["ranks"]) == len(rows) else f" ({first_ranks(finding['ranks'])})"
        lines += wrap(f"{finding['level']}: {finding['text']}{where}", width, "", "  ")
        lines += wrap(finding["fix"], width, "  -> ")
    job = f"{counted(len(rows), 'rank')} on {counted(len({row['node'][0] for row in rows}), 'node')}, "
    job += counted(rows[0]["n_devices"], "device")
    if len(rows) == 1 < rows[0]["n_tasks"]:
        job = f"{rows[0]['n_tasks']} tasks, each a job of its own"
    return "\n".join([*lines, "", f"{'OK' if is_ok(findings, checks) else 'FAILED'}: {job}"])


_ALWAYS = ("host", "rank", "jax_process", "devices", "node")  # columns of the table, also if all ranks have the same


def _shown(value: Any) -> str:
    """A value in the table: numbers as ranges, as those of cores are long.

    >>> _shown([0, 1, 2, 5, 64, 65]), _shown([]), _shown(["a", "b"]), _shown(None)
    ('0-2,5,64-65', '', 'a, b', '-')
    """
    if isinstance(value, list) and any(isinstance(part, str) for part in value):
        return ", ".join(value)
    if isinstance(value, list):
        runs = np.split(value, np.flatnonzero(np.diff(value) != 1) + 1) if value else []
        return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return "-" if value is None else str(value)
