"""How does a process that has JAX already become a rank? In place of the interpreter, ``mpiexec`` starts this.

``python -I -S rank.py ADDRESS ARGUMENTS...`` asks the process that listens at ADDRESS (`preloaded`) for a copy of itself, which
runs what ``python ARGUMENTS...`` would: with this process's open files, variables, folder and namespaces. Then it stands for
the copy: it passes signals on, ends as the copy ends, and takes the copy along if it is killed. Where a copy would differ from
an interpreter that starts, it becomes the interpreter.

Imports nothing but what Python has loaded anyway: it runs once for each rank.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import os
import sys
from array import array

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

LENGTH = 8  # bytes that say how long a request is
OPTIONS = ("-W",)  # of the interpreter, that a copy understands
# Libraries read these as they are loaded, that of C too. (HDF5 reads some: where its plug-ins are, a copy tells it; whether it
# locks files, no program here rests on.)
READ_WHEN_LOADED = ("BLOSC_", "JAX_", "LD_", "MALLOC_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTHON", "ZARR_")
NOT_OF_PROGRAMS = ("PYTHONPATH",)  # each copy's own
PATHS_OF_LIBRARIES = "LD_LIBRARY_PATH"
PASSED_ON = ["SIGABRT", "SIGALRM", "SIGCONT", "SIGHUP", "SIGINT", "SIGPIPE", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2"]


def read_when_loaded(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that make a difference to libraries that are loaded."""
    read = {name: value for name, value in env.items() if name.startswith(READ_WHEN_LOADED) and name not in NOT_OF_PROGRAMS}
    if PATHS_OF_LIBRARIES in read:  # mpirun puts its own folder in front, several times; only the first one counts
        read[PATHS_OF_LIBRARIES] = ":".join(dict.fromkeys(read[PATHS_OF_LIBRARIES].split(":")))
    return read


def is_like_a_copy(address: str, arguments: list[str]) -> bool:
    """Whether a copy of what waits there is what the interpreter would be."""
    words = arguments[:]
    while words and words[0] in OPTIONS:
        words = words[2:]
    if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
        return False
    try:
        with open(f"{address}.loaded", "rb") as file:
            loaded = file.read()
    except OSError:  # it has ended
        return False
    return loaded == b"\0".join(sorted(os.fsencode(f"{k}={v}") for k, v in read_when_loaded(os.environ).items()))


def main(address: str, arguments: list[str]) -> None:
    """Ask, then wait."""
    if not is_like_a_copy(address, arguments):
        os.execv(sys.executable, [sys.executable, *arguments])
    numbers = [getattr(signal, name) for name in PASSED_ON]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until there is somebody to pass them on to
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = sorted(number for number in files if number <= 2 or os.path.exists(f"/proc/self/fd/{number}"))
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    parts = [os.getcwd(), str(os.getpid()), " ".join(map(str, files)), str(len(arguments)), *arguments, *variables]
    request = b"\0".join(os.fsencode(part) for part in parts)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    head = len(request).to_bytes(LENGTH, "little")
    connection.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))])
    sent = 0
    while sent < len(request):
        sent += connection.send(request[sent:])
    copy = int.from_bytes(connection.recv(4), "little")
    if not copy:
        sys.exit(f"rank.py: no answer from {address}")

    def pass_on(number: int, frame: object) -> None:
        try:  # noqa: SIM105  # contextlib is one more import
            os.kill(copy, number)
        except ProcessLookupError:  # it ends at this moment
            pass

    for number in numbers:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    answer = connection.recv(4)
    status = int.from_bytes(answer, "little") if answer else 1 << 8
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
