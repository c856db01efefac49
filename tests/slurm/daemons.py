"""What makes one machine a Slurm cluster of four nodes with four GPUs each, and what ends it whatever happens?

One munged, one slurmctld and a slurmd for each node. A node has a hostname, an /etc/hosts and a /dev/shm of its own (UTS and
mount namespaces), so the machine's own are not touched, and what a killed MPI job leaves in /dev/shm goes with the node. The
GPUs are device files on which nothing answers: Slurm counts them, hands them out and sets CUDA_VISIBLE_DEVICES as it does
for real ones. Cores are as made up as GPUs, so a script may ask for those of a real node.

As a program this module keeps a cluster: it starts one in a folder, prints ``ready`` or why not, and stops it when its
standard input ends. So a cluster ends with whoever asked for it, even one that was killed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.ports import free_ports

__all__ = ["MARK", "NODES", "client_environment", "marked", "why_not"]

NODES = ("n1", "n2", "n3", "n4")
MARK = "SHARDLOAD_SLURM_CLUSTER"  # in the environment of every process of a cluster: its folder
BOOT_SECONDS = 60.0
STOP_SECONDS = 15.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "unshare", "mount", "hostname")

CONFIGURATION = """\
ClusterName=four
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
AuthInfo=socket={folder}/run/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmdLogFile={folder}/log/slurmd.%n.log
TmpFS={folder}/tmp/%n
SlurmdParameters=config_overrides
MpiDefault=pmi2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
GresTypes=gpu
KillWait=2
MessageTimeout=30
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefMemPerCPU=500 State=UP
"""
NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} Sockets=2 CoresPerSocket=32 ThreadsPerCore=1 "
    "RealMemory=256000 Gres=gpu:4 Feature=gpu State=UNKNOWN"
)
# In its namespaces: the machine's own name, hosts, shared memory and libraries stay as they are.
BECOME_NODE = """
hostname "$0" && mount --bind "$1/hosts" /etc/hosts && mount -t tmpfs -o mode=1777,size=4g tmpfs /dev/shm &&
if [ -n "$2" ]; then mount --bind "$1/pmix" "$2"; fi &&
exec slurmd -D -f "$1/slurm.conf" -N "$0"
"""


def why_not() -> str:
    """Why no cluster can be started here; empty where one can."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if os.geteuid() != 0:
        return "not root: the nodes need namespaces of their own"
    path = _path()
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (.ci/debian-packages.txt names the packages)"
    tried = subprocess.run(
        ["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", "hostname n1 && mount -t tmpfs tmpfs /dev/shm"],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        check=False,
    )
    return f"no mount and UTS namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def client_environment(folder: Path) -> dict[str, str]:
    """What a command needs to reach the cluster of this folder."""
    return {"SLURM_CONF": str(folder / "slurm.conf"), MARK: str(folder), "PATH": _path()}


def marked(folder: Path) -> list[psutil.Process]:
    """Every live process of a cluster but the one that asks: daemons, steps and what the jobs started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_one = process.environ().get(MARK) == str(folder) and process.status() != psutil.STATUS_ZOMBIE
            if is_one and process.pid != os.getpid():
                found.append(process)
    return found


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class Daemons:
    """The processes of one cluster.

    Parameters
    ----------
    folder : Path
        Empty, and the cluster's own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, **client_environment(folder)}
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons and wait until every node is idle; RuntimeError, with the ends of the logs, if that never comes."""
        self._write_files()
        key, socket_path = self.folder / "munge.key", self.folder / "run" / "munge.socket"
        names = ("log", "pid", "seed")
        files = [f"--{name}-file={self.folder / ('log' if name == 'log' else 'run') / ('munged.' + name)}" for name in names]
        self._start("munged", ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}", *files])
        self._wait("munged to listen", socket_path.exists)
        pmix = self._complete_pmix()
        self._start("slurmctld", ["slurmctld", "-D", "-i", "-f", str(self.folder / "slurm.conf")])
        for node in NODES:
            namespaces = ["unshare", "--mount", "--uts", "--propagation", "private"]
            self._start(node, [*namespaces, "sh", "-c", BECOME_NODE, node, str(self.folder), pmix])
        self._wait("four idle nodes", lambda: self._ask("sinfo", "-h", "-o", "%T %D").strip() == f"idle {len(NODES)}")

    def stop(self) -> None:
        """End every process of the cluster, jobs first. Returns when all are gone."""
        if "slurmctld" in self.started and self._ask("squeue", "-h"):
            self._ask("scancel", "--user=root")
            with suppress(RuntimeError):
                self._wait("jobs to end", lambda: not self._ask("squeue", "-h"), STOP_SECONDS)
        for name in (*NODES, "slurmctld", "munged"):
            if name in self.started and self.started[name].poll() is None:
                self.started[name].terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.started.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        while left := marked(self.folder):  # what a job left, and daemons that did not listen
            for one in left:
                with suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(left, timeout=5)
            for process in self.started.values():
                process.poll()

    def _write_files(self) -> None:
        folder = self.folder
        for name in ("run", "log", "state", "dev", *(f"{kind}/{node}" for kind in ("spool", "tmp") for node in NODES)):
            (folder / name).mkdir(parents=True, mode=0o755)
        folder.chmod(0o755)  # munged trusts no folder that others may write
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o400)
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + f"\n127.0.0.1 {' '.join(NODES)}\n")
        for k in range(4):  # Slurm refuses GPUs without a device file: these are /dev/null by another name
            os.mknod(folder / "dev" / f"nvidia{k}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        controller_port, *ports = free_ports(1 + len(NODES))
        nodes = "\n".join(NODE.format(name=name, port=port) for name, port in zip(NODES, ports, strict=True))
        text = CONFIGURATION.format(folder=folder, controller_port=controller_port, nodes=nodes)
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(f"NodeName=n[1-4] Name=gpu File={folder}/dev/nvidia[0-3]\n")

    def _complete_pmix(self) -> str:
        """The folder of PMIx in which a name is missing, after a complete copy of it was made; empty where there is none.

        ``srun --mpi=pmix`` opens libpmix.so; Debian has that name in a package with a compiler's worth of others.
        """
        for found in Path("/usr/lib").glob("*/pmix2/lib"):
            if (found / "libpmix.so.2").exists() and not (found / "libpmix.so").exists():
                shutil.copytree(found, self.folder / "pmix")
                (self.folder / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")
                return str(found)
        return ""

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("wb") as log:
            self.started[name] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )

    def _ask(self, *command: str) -> str:
        with suppress(subprocess.TimeoutExpired):
            return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=20, check=False).stdout
        return ""

    def _wait(self, what: str, is_so: Callable[[], bool], seconds: float = BOOT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            ended = [name for name, process in self.started.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = f"{', '.join(ended)} ended" if ended else f"not after {seconds} s"
                raise RuntimeError(f"waited for {what}: {why}\n{self.logs()}")
            time.sleep(0.05)

    def logs(self) -> str:
        """The last lines of every log."""
        files = sorted((self.folder / "log").glob("*"))
        return "\n".join(f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-8:]) for file in files)


def keep(folder: Path) -> int:
    """Start a cluster, say so, wait for the end of standard input or a signal, and stop it."""
    os.environ.pop(MARK, None)
    daemons = Daemons(folder)

    def end(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        daemons.start()
        print(json.dumps({"state": "ready"}), flush=True)
        while sys.stdin.buffer.read(1 << 16):
            pass
    except RuntimeError as error:
        print(json.dumps({"state": "failed", "why": str(error)}), flush=True)
        return 1
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        daemons.stop()
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1])))
