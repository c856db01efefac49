"""How are nodes made that reach each other only through links of a known rate, shaped by the kernel? As root, on Linux.

Each node is a network namespace with one link to a bridge, and ``tc`` limits both directions of it (a token bucket filter). A
node has one rank: MPI then sends TCP through the link, as between machines. The delay of the network is that of this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.jobs.launch import job_command, job_environment

__all__ = ["Links", "check_rate", "why_not"]

_NETWORK = "10.77.0"
_BURST, _QUEUE = "32kb", "200ms"
_BURST_NBYTES, _SENT_NBYTES, _CHECKED_RATE = 32 << 10, 1 << 20, 2e6
# Ranks: a megabyte from one to the other, and an answer.
_SEND = """
import time
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
data = np.arange(1 << 20, dtype=np.uint8) if comm.rank == 0 else np.zeros(1 << 20, np.uint8)
comm.Barrier()
began = time.monotonic()
if comm.rank == 0:
    comm.Send(data, 1)
    comm.Recv(data[:1], 1)
    print(time.monotonic() - began, comm.Split_type(MPI.COMM_TYPE_SHARED).size)
else:
    comm.Recv(data, 0)
    assert data[-1] == 255
    comm.Send(data[:1], 0)
    comm.Split_type(MPI.COMM_TYPE_SHARED)
"""


def why_not() -> str:
    """Why there can be no such links here; empty where there can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name, path=_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2)"
    return "" if os.geteuid() == 0 else "not root: nodes need network namespaces of their own"


class Links:
    """Nodes with links of so many bytes per second in each direction. A context manager.

    Parameters
    ----------
    n : int
        Number of nodes, each with one rank.
    rate : float
        Bytes per second.
    folder : Path
        A folder for a small script.

    Attributes
    ----------
    env : dict of str to str
        The variables to start ranks with.
    """

    def __init__(self, n: int, rate: float, folder: Path) -> None:
        self._mark = f"sl{os.getpid() % 100000}"
        self._n, self._rate, self._shell = n, rate, folder / "on-its-node"
        self._shell.write_text(
            "#!/bin/sh\n# Runs a rank's program on the node of the rank.\n"
            f'exec ip netns exec {self._mark}-$PMI_RANK env FI_TCP_IFACE=eth0 PATH="$PATH" "$@"\n'
        )
        self._shell.chmod(0o755)
        self.env = {
            "MPIR_CVAR_NOLOCAL": "1",  # messages through the link, not through memory
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            "FI_PROVIDER": "tcp",
            "SHARDLOAD_GRID_COORDINATOR": f"{_NETWORK}.1:61999",
            "PATH": _path(),
        }

    def command(self, program: Sequence[str]) -> list[str]:
        """A rank's program, on its node."""
        return [str(self._shell), *program]

    def __enter__(self) -> Links:
        rate = f"{self._rate * 8:.0f}bit"
        shape = f"root tbf rate {rate} burst {_BURST} latency {_QUEUE}"
        try:
            self._run(f"ip link add {self._mark} type bridge", f"ip link set {self._mark} up")
            for k in range(self._n):
                node, link = f"{self._mark}-{k}", f"{self._mark}v{k}"
                self._run(
                    f"ip netns add {node}",
                    f"ip link add {link} type veth peer name eth0 netns {node}",
                    f"ip link set {link} master {self._mark} up",
                    f"ip -n {node} addr add {_NETWORK}.{k + 1}/24 dev eth0",
                    f"ip -n {node} link set eth0 up",
                    f"ip -n {node} link set lo up",
                    f"tc qdisc add dev {link} {shape}",  # into the node
                    f"ip netns exec {node} tc qdisc add dev eth0 {shape}",  # out of it
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for k in range(self._n):
            with suppress(subprocess.CalledProcessError):
                self._run(f"ip netns del {self._mark}-{k}")  # its end of the link goes too
        with suppress(subprocess.CalledProcessError):
            self._run(f"ip link del {self._mark}")

    def _run(self, *commands: str) -> None:
        for command in commands:
            env = {**os.environ, "PATH": _path()}
            subprocess.run(command.split(), check=True, capture_output=True, env=env)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def check_rate(folder: Path) -> None:
    """RuntimeError if a message between two ranks takes less time than its link says: then it went around the link."""
    with Links(2, _CHECKED_RATE, folder) as links:
        command = job_command(["-c", _SEND], 2)
        command = [*command[:3], *links.command(command[3:])]
        env = job_environment(2) | links.env
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"no message passes the links: {done.stderr}")
    seconds, n_here = done.stdout.split()
    least = (_SENT_NBYTES - 2 * _BURST_NBYTES) / _CHECKED_RATE
    if float(seconds) < least or n_here != "1":
        raise RuntimeError(f"a message took {seconds} s, and at least {least:.2f} were expected: it went around the link")
