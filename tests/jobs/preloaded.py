"""How do ranks start without importing JAX each? As copies of a process that has imported it and waits.

To import JAX, h5py, Zarr and pytest takes a rank four fifths of a second of a core, which is most of what many a test does.
Here one process per run of pytest imports them; ``mpiexec`` starts `rank`, which asks it for a copy (``fork``) with the
rank's files, variables, folder and arguments. MPI is not started before that: each copy does so itself, and initializes JAX's
devices. It ends as any program of Python's does, but leaves the libraries in memory as they are (`keep`).

The project is imported too, a fifth of a second more for each rank. A copy to which the name means another folder forgets it
and imports what it finds.

What a copy is not: a process with its own hash seed (sets of strings have the same order on all ranks), with its own size in
memory, or one whose libraries read their variables as they were loaded. Programs that have those as their subject start as they
would outside the tests: ``run_job(..., preloaded=False)``, and tests/mpi.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib.machinery
import linecache
import os
import pkgutil
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.jobs.rank import LENGTH, read_when_loaded

__all__ = ["Server", "close", "command_for", "prefix", "server_for"]

PROJECT = "shardload"
SITE = str(Path(__file__).with_name("site"))
RANK = Path(__file__).with_name("rank.py")
MAX_FILES = 64
HIGH = 600  # files are moved out of the way to numbers from here on
ROOM = "SHARDLOAD_ROOM"  # a variable that makes room for those of a copy, in what others see of a process's variables
ROOM_BYTES = 32 << 10
LIBRARY = "MPI4PY_LIBMPI"  # the MPI library, where it is not the one beside the interpreter
NAMESPACES = ("uts", "ipc", "net", "mnt")  # this last: what the others are called is found in the first one


@dataclass
class Server:
    """A process that waits."""

    process: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]
    address: str


_servers: dict[tuple[tuple[str, str], ...], Server] = {}  # by the variables they have read
_lock = threading.Lock()  # some tests start jobs in threads


# --- the side of the tests ----------------------------------------------------------------------------------------------


def command_for(interpreter: str, arguments: Sequence[str], env: Mapping[str, str], modules: Sequence[str] = ()) -> list[str]:
    """How to start ``interpreter ARGUMENTS`` as a copy, which has these modules too; as it is, if it is another interpreter."""
    return [*prefix(env, modules), *arguments] if interpreter == sys.executable else [interpreter, *arguments]


def prefix(env: Mapping[str, str], modules: Sequence[str] = ()) -> list[str]:
    """What to write in place of the interpreter, in programs that will have these variables."""
    return [sys.executable, "-I", "-S", str(RANK), server_for(env, modules).address]


def server_for(env: Mapping[str, str], modules: Sequence[str] = ()) -> Server:
    """The process that waits to be a program with these variables."""
    loaded = read_when_loaded(env)
    key = (*sorted(loaded.items()), *((name, "") for name in modules))
    with _lock:
        server = _servers.get(key)
        if server is None or server.process.poll() is not None:
            server = _servers[key] = _start(loaded, env, modules)
    return server


def close() -> None:
    """End the processes that wait."""
    while _servers:
        _, server = _servers.popitem()
        server.process.communicate(timeout=30)  # nobody can ask any more: it ends by itself
        server.folder.cleanup()


def _start(loaded: Mapping[str, str], env: Mapping[str, str], modules: Sequence[str]) -> Server:
    folder = tempfile.TemporaryDirectory(prefix="shardload-ranks-")
    address = str(Path(folder.name, "socket"))
    Path(f"{address}.loaded").write_bytes(b"\0".join(sorted(os.fsencode(f"{k}={v}") for k, v in loaded.items())))
    own = {k: v for k, v in env.items() if k in loaded or k in ("PATH", "HOME", "TMPDIR", "LANG", LIBRARY)}
    own |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": SITE, ROOM: "x" * ROOM_BYTES}
    with Path(folder.name, "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, address, *modules],
            env=own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    if not process.stdout or process.stdout.readline() != b"ready\n":
        raise AssertionError(f"{__file__} did not start\n{Path(folder.name, 'log').read_text()}")
    return Server(process, folder, address)


# --- the process that waits ---------------------------------------------------------------------------------------------


def serve(address: str) -> tuple[str, list[str], dict[str, str]] | None:
    """Hand out copies until nobody can ask any more. Returns in a copy: what to be; in the process itself: None, at the end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    print("ready", flush=True)
    waiting: dict[int, socket.socket] = {}  # who wants to know of a copy's end
    with selectors.DefaultSelector() as selector:
        for file in (listener, ended, sys.stdin):
            selector.register(file, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj == ended:
                    with suppress(BlockingIOError):
                        os.read(ended, 4096)
                    _tell_of_ends(waiting)
                    continue
                connection, _ = listener.accept()
                try:
                    files, parts = _receive(connection)
                except (OSError, ValueError):  # killed while it asked
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:  # what these objects own would be closed later under numbers that are others' by then
                    for owner in (selector, listener, *waiting.values()):
                        owner.close()  # type: ignore[attr-defined]
                    return _become(connection, files, parts)
                for number in files:
                    os.close(number)
                waiting[pid] = connection
                with suppress(OSError):
                    connection.sendall(pid.to_bytes(4, "little"))


def _tell_of_ends(waiting: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        with waiting.pop(pid) as connection, suppress(OSError):
            connection.sendall(status.to_bytes(4, "little"))


def _receive(connection: socket.socket) -> tuple[list[int], list[str]]:
    """The open files, and the words of a request."""
    head, files, _, _ = socket.recv_fds(connection, LENGTH, MAX_FILES)
    n = int.from_bytes(head, "little")
    data = b""
    while len(data) < n:
        more = connection.recv(n - len(data))
        if not more:
            raise ValueError("cut off")
        data += more
    return [*files], [os.fsdecode(part) for part in data.split(b"\0")]


# --- the project --------------------------------------------------------------------------------------------------------


def import_project() -> None:
    """Import all of it: what a program would import sooner or later. Nothing of it starts MPI, devices or threads by that, or
    warns."""
    project = importlib.import_module(PROJECT)
    with warnings.catch_warnings(action="error"):
        for module in pkgutil.walk_packages(project.__path__, f"{PROJECT}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    if "mpi4py.MPI" in sys.modules or threading.active_count() > 1:
        raise RuntimeError(f"a copy cannot have MPI or threads: {PROJECT} must not start them when it is imported")


def forget(package: str) -> None:
    """Have it imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def is_another_project() -> bool:
    """Whether the name means another file here than that which was imported."""
    found = importlib.machinery.PathFinder.find_spec(PROJECT, sys.path)
    return found is None or found.origin != sys.modules[PROJECT].__file__


def map_mpi() -> None:
    """Map the MPI library and what it needs into memory, which takes a rank a tenth of its start. Nobody sees it, and it is not
    initialized: a copy loads MPI as ever, finds the files mapped if it wants this library, and may as well take another one.
    """
    with suppress(OSError):  # it is elsewhere, or there is none
        ctypes.CDLL(os.environ.get(LIBRARY) or str(Path(sys.prefix, "lib", "libmpi.so.12")), ctypes.RTLD_LOCAL)


def keep(libraries: dict[str, types.ModuleType]) -> None:
    """Have them stay as they are when the interpreter ends. It takes all modules apart, which writes to all memory that a copy
    shares: nine tenths of the time of a program that does nothing, a third of one that loads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(libraries))
    for name, module in libraries.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


# --- a copy -------------------------------------------------------------------------------------------------------------


def _become(connection: socket.socket, files: list[int], parts: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """Take over the files; what is left to be: folder, arguments, variables."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder, asker, numbers, n, *words = parts
    _enter_namespaces(int(asker))
    link = fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, HIGH)
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH) for number in files]
    os.closerange(0, HIGH)
    for number, wanted in zip(moved, map(int, numbers.split()), strict=True):
        os.dup2(number, wanted)
        os.close(number)
    # Dies with the one it stands for: its end of the connection closes, whatever ended it.
    fcntl.fcntl(link, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(link, getattr(fcntl, "F_SETSIG", 10), signal.SIGKILL)
    fcntl.fcntl(link, fcntl.F_SETFL, fcntl.fcntl(link, fcntl.F_GETFL) | os.O_ASYNC)
    return folder, words[: int(n)], dict(word.split("=", 1) for word in words[int(n) :])


def _enter_namespaces(asker: int) -> None:
    """Those of the one that asks: a node of a test's cluster has a name and a /dev/shm of its own."""
    theirs = {name: f"/proc/{asker}/ns/{name}" for name in NAMESPACES}
    differ = [name for name, path in theirs.items() if os.readlink(path) != os.readlink(f"/proc/self/ns/{name}")]
    files = [os.open(theirs[name], os.O_RDONLY) for name in differ]
    libc = ctypes.CDLL(None, use_errno=True)
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")


def _set_variables(env: Mapping[str, str]) -> None:
    """Have these variables, also for who looks at this process from outside (``/proc/PID/environ``)."""
    os.environ.clear()
    os.environ.update(env)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = int(fields[47]), int(fields[48])  # env_start, env_end: the 50th and 51st of all
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    if len(block) > last - first:
        raise RuntimeError(f"the variables take {len(block)} bytes; there is room for {last - first}")
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, block, len(block))


def run(arguments: list[str], paths: list[str]) -> None:
    """Run what ``python ARGUMENTS`` would, as ``__main__``."""
    sys.orig_argv = [sys.executable, *arguments]
    options = []
    while arguments[0] == "-W":
        options.append(arguments[1])
        arguments = arguments[2:]
    sys.warnoptions[:] = options
    for option in options:
        action, _, message = option.partition(":")
        warnings.filterwarnings(action, message)  # type: ignore[arg-type]
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    first = {"-m": os.getcwd(), "-c": ""}
    sys.path.insert(0, first[arguments[0]] if arguments[0] in first else str(Path(arguments[0]).resolve().parent))
    if is_another_project():
        forget(PROJECT)
    if arguments[0] == "-m":
        sys.argv[:] = ["-m", *arguments[2:]]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # what the interpreter calls
        return
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        code = compile(arguments[1], "<string>", "exec")
        if sys.version_info >= (3, 13):  # which shows its lines in a traceback
            linecache.cache["<string>"] = len(arguments[1]), None, arguments[1].splitlines(keepends=True), "<string>"
    else:
        sys.argv[:] = arguments
        path = os.path.abspath(arguments[0])
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__file__, main.__loader__ = path, loader
        found = loader.get_code("__main__")
        if found is None:
            raise ImportError(arguments[0])
        code = found
    exec(code, vars(main))


def run_as_interpreter(arguments: list[str], paths: list[str]) -> int:
    """Run it. Tracebacks begin with the program."""
    try:
        run(arguments, paths)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def main(address: str, *modules: str) -> int:
    """Import, wait, and in a copy: run."""
    gc.disable()  # until all is imported: a sixth of the time
    libraries: dict[str, types.ModuleType] = {}
    atexit.register(keep, libraries)  # the first one, so it comes after what they have registered
    import h5py
    import hypothesis
    import jax
    import numpy as np
    import pytest  # some tests are about jobs that run tests
    import zarr

    # JAX imports them as it starts, and as it first compiles; typer, as it first parses a command line: a fifth of a second.
    for late in ("encodings.idna", "jaxlib.mlir.dialects.mhlo", "typer._adapters", *modules):
        with suppress(ImportError):
            importlib.import_module(late)
    paths = [path for path in sys.path if path not in (str(Path(__file__).parent), SITE)]
    import_project()
    forget("tests")  # of which a program may have others
    libraries |= {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] not in (PROJECT, "__main__")}
    map_mpi()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()
    gc.enable()
    request = serve(address)
    if request is None:
        return 0
    folder, arguments, env = request
    _set_variables(env)
    os.chdir(folder)
    np.random.seed()
    for path in reversed(env.get("HDF5_PLUGIN_PATH", "").split(os.pathsep)):
        if path:
            h5py.h5pl.prepend(os.fsencode(path))
    del hypothesis, jax, pytest, zarr
    return run_as_interpreter(arguments, paths)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
