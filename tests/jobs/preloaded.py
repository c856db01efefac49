"""How do ranks start without importing JAX each? As copies of a process that has imported it and waits.

To import JAX, h5py, Zarr and pytest takes a rank four fifths of a second of a core, which is most of what many a test does.
Here one process per run of pytest imports them; ``mpiexec`` starts `rank`, which asks it for a copy (``fork``) with the
rank's files, variables, folder and arguments. MPI is not started before that: each copy does so itself, and initializes JAX's
devices. At its end it does what Python does for a program (`end`), and leaves the interpreter and the libraries as they are:
to take them apart, object by object, is half of a short job's time. Programs whose end is their subject ask for all of it
(`WHOLE_END`).

The project is imported too, a fifth of a second more for each rank. A copy to which the name means another folder forgets it
and imports what it finds; so does one with options for warnings, if there was any when the project was imported.

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
import sysconfig
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.jobs.rank import LENGTH, read_when_loaded

__all__ = ["Server", "close", "command_for", "is_installed", "prefix", "server_for"]

PROJECT = "shardload"
SITE = str(Path(__file__).with_name("site"))
RANK = Path(__file__).with_name("rank.py")
MAX_FILES = 64
HIGH = 600  # files are moved out of the way to numbers from here on
ROOM = "SHARDLOAD_ROOM"  # a variable that makes room for those of a copy, in what others see of a process's variables
ROOM_BYTES = 32 << 10
WHOLE_END = "SHARDLOAD_WHOLE_END"  # a variable of programs that end as Python itself does
LIBRARY = "MPI4PY_LIBMPI"  # the MPI library, where it is not the one beside the interpreter
# Where modules are installed: not all below the prefixes. That of a system's Python is /usr, and a project may lie there.
INSTALLED = tuple(
    {str(Path(sysconfig.get_path(kind)).resolve()) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)
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


def command_for(interpreter: str, arguments: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """How to start ``interpreter ARGUMENTS`` as a copy; as it is, if it is another interpreter."""
    return [*prefix(env), *arguments] if interpreter == sys.executable else [interpreter, *arguments]


def prefix(env: Mapping[str, str]) -> list[str]:
    """What to write in place of the interpreter, in programs that will have these variables."""
    return [sys.executable, "-I", "-S", str(RANK), server_for(env).address]


def server_for(env: Mapping[str, str]) -> Server:
    """The process that waits to be a program with these variables."""
    loaded = read_when_loaded(env)
    key = tuple(sorted(loaded.items()))
    with _lock:
        server = _servers.get(key)
        if server is None or server.process.poll() is not None:
            server = _servers[key] = _start(loaded, env)
    return server


def close() -> None:
    """End the processes that wait."""
    while _servers:
        _, server = _servers.popitem()
        server.process.communicate(timeout=30)  # nobody can ask any more: it ends by itself
        server.folder.cleanup()


def _start(loaded: Mapping[str, str], env: Mapping[str, str]) -> Server:
    folder = tempfile.TemporaryDirectory(prefix="shardload-ranks-")
    address = str(Path(folder.name, "socket"))
    Path(f"{address}.loaded").write_bytes(b"\0".join(sorted(os.fsencode(f"{k}={v}") for k, v in loaded.items())))
    own = {k: v for k, v in env.items() if k in loaded or k in ("PATH", "HOME", "TMPDIR", "LANG", LIBRARY)}
    own |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": SITE, ROOM: "x" * ROOM_BYTES}
    with Path(folder.name, "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, address],
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


def serve(address: str) -> tuple[list[str], list[str], dict[str, str], int] | None:
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


warned: list[warnings.WarningMessage] = []  # what was said when the project was imported


def import_project() -> None:
    """Import all of it: what a program would import sooner or later. Nothing of it starts MPI, devices or threads by that."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _import_project()
    warned[:] = said


def _import_project() -> None:
    found = importlib.machinery.PathFinder.find_spec(PROJECT, sys.path)
    if found is None or found.origin is None:
        raise ImportError(PROJECT)
    project = importlib.import_module(PROJECT)
    for module in pkgutil.walk_packages(project.__path__, f"{PROJECT}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    n_threads = threading.active_count()
    if "mpi4py.MPI" in sys.modules or n_threads > 1:
        raise RuntimeError(f"a copy cannot have MPI or threads: {PROJECT} must not start them when it is imported")


def forget(package: str) -> None:
    """Have it imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def is_another_project() -> bool:
    """Whether the name means another file here than that which was imported."""
    found = importlib.machinery.PathFinder.find_spec(PROJECT, sys.path)
    return found is None or found.origin != sys.modules[PROJECT].__file__


def is_installed(module: Any) -> bool:
    """Whether a module is a library's, and no file of the project or of a test."""
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())][:2]
    # To resolve the places of all modules takes a tenth of a second; most need not be.
    return all(not place or place.startswith(INSTALLED) or str(Path(place).resolve()).startswith(INSTALLED) for place in places)


def map_mpi() -> None:
    """Map the MPI library and what it needs into memory, which takes a rank a tenth of its start. Nobody sees it, and it is not
    initialized: a copy loads MPI as ever, finds the files mapped if it wants this library, and may as well take another one.
    """
    with suppress(OSError):  # it is elsewhere, or there is none
        ctypes.CDLL(os.environ.get(LIBRARY) or str(Path(sys.prefix, "lib", "libmpi.so.12")), ctypes.RTLD_LOCAL)


# --- a copy -------------------------------------------------------------------------------------------------------------


def _become(connection: socket.socket, files: list[int], parts: list[str]) -> tuple[list[str], list[str], dict[str, str], int]:
    """Take over the files; what is left to be: folder, arguments, variables, and the connection's number."""
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
    arguments, variables = words[: int(n)], words[int(n) :]
    return [folder], arguments, dict(word.split("=", 1) for word in variables), link


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
    if (options and warned) or is_another_project():
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
    """Run it, and end as the interpreter does."""
    try:
        run(arguments, paths)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def status_of(arguments: list[str], paths: list[str]) -> int:
    """Run it, and return the status with which the interpreter would end."""
    try:
        return run_as_interpreter(arguments, paths)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1


def end(status: int, known: frozenset[str]) -> NoReturn:
    """End the process. What a program can tell of Python's end comes before that, in the same order: threads have ended, what
    is registered for the end is called, the program's own objects go, MPI is finalized.
    """
    steps = (threading._shutdown, atexit._run_exitfuncs, lambda: _forget_program(known), _finalize_mpi)  # type: ignore[attr-defined]
    for step in steps:
        try:
            step()
        except BaseException:
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            status = status or 120  # as Python has it
    ctypes.CDLL(None).exit(status)
    raise RuntimeError("unreachable")


def _forget_program(known: frozenset[str]) -> None:
    """Let go of what the program has made and imported itself: files are closed, and objects come to their end."""
    own = [(k, v) for k, v in [*sys.modules.items()] if k == "__main__" or (k not in known and not is_installed(v))]
    for name, module in own:
        del sys.modules[name]
        vars(module).clear()
    gc.collect()


def _finalize_mpi() -> None:
    """As mpi4py does when the interpreter ends."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and sys.modules["mpi4py"].rc.finalize is not False:
        mpi.Finalize()


def _leave(modules: dict[str, types.ModuleType]) -> None:
    """Leave modules as they are when Python ends: to take JAX apart, object by object, means that all pages which a copy shared
    until then are copied."""
    for name, module in modules.items():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
        if sys.modules.get(name) is module:
            del sys.modules[name]


def main(address: str) -> int:
    """Import, wait, and in a copy: run."""
    gc.disable()  # until all is imported: a sixth of the time
    libraries: dict[str, types.ModuleType] = {}
    atexit.register(_leave, libraries)  # the first one: it is called last, when all others have been
    import h5py
    import hypothesis
    import jax
    import numpy as np
    import pytest  # some tests are about jobs that run tests
    import zarr

    # JAX imports them as it starts, and as it first compiles; typer, as it first parses a command line: a fifth of a second.
    for late in ("encodings.idna", "jaxlib.mlir.dialects.mhlo", "typer._adapters"):
        with suppress(ImportError):
            importlib.import_module(late)
    paths = [path for path in sys.path if path not in (str(Path(__file__).parent), SITE)]
    import_project()
    forget("tests")  # of which a program may have others
    map_mpi()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    others = {*sys.stdlib_module_names, "__main__", PROJECT}
    libraries |= {k: v for k, v in sys.modules.items() if k.partition(".")[0] not in others}
    known = frozenset(sys.modules)  # not in each copy, which would have pages of all their names for itself
    gc.collect()
    gc.freeze()
    gc.enable()
    request = serve(address)
    if request is None:
        return 0
    (folder,), arguments, env, _ = request
    _set_variables(env)
    os.chdir(folder)
    np.random.seed()
    for path in reversed(env.get("HDF5_PLUGIN_PATH", "").split(os.pathsep)):
        if path:
            h5py.h5pl.prepend(os.fsencode(path))
    del hypothesis, jax, pytest, zarr
    if WHOLE_END in env or arguments[:2] == ["-m", "mpi4py"]:  # which has an end of its own
        return run_as_interpreter(arguments, paths)
    atexit.unregister(_leave)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # what C libraries register from here on is still called, as by MPICH; what stands by is not
    end(status_of(arguments, paths), known)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
