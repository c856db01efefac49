"""Do other people's libraries take what shardload loads? ``make clients``, or ``python -m tests.clients [NAME ...]``.

For each client: an environment of its own (``.venv-clients/NAME``) with versions that work together, and its script in
`examples/clients` on one process and on four, which compares what came out with NumPy or with one device. Prints a row of the
table in docs/clients.md for each. With ``--here``: those that are installed in the environment of this interpreter, in it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from tests.jobs.launch import ROOT, run_job

ENVIRONMENTS = ROOT / ".venv-clients"


@dataclass(frozen=True)
class Client:
    """A library that takes sharded arrays, and what to install beside it."""

    name: str
    module: str
    package: str
    beside: tuple[str, ...] = ()
    is_on_pypi: bool = True
    is_compiled: bool = False  # with the mpicc of the MPICH wheel

    @property
    def script(self) -> Path:
        return ROOT / "examples" / "clients" / f"with_{self.module}.py"


CLIENTS = (
    Client("jaxDecomp", "jaxdecomp", "jaxdecomp", ("packaging",)),
    Client("JaxPM", "jaxpm", "jaxpm", ("jax<0.8",)),
    Client("jax-power", "jaxpower", "jax-power", is_on_pypi=False),
    Client("XLB", "xlb", "xlb", ("warp-lang>=1.10,<1.13",)),
    Client("mpi4jax", "mpi4jax", "mpi4jax", is_compiled=True),
)
INSTALLED = [client for client in CLIENTS if importlib.util.find_spec(client.module)]


def write_file(folder: Path) -> Path:
    """What every script loads from: a density field, and populations of a D3Q19 lattice."""
    path = folder / "clients.h5"
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        density = random.normal(size=(32, 32, 32)).astype("float32")
        file.create_dataset("density", data=density, chunks=(1, 32, 32), compression="gzip")
        populations = (0.05 + 0.01 * random.random((19, 32, 32, 32))).astype("float32")
        file.create_dataset("f", data=populations, chunks=(1, 8, 32, 32), compression="gzip")
    return path


def run_client(client: Client, n: int, folder: Path, python: Path | None = None) -> str:
    """What the script says, on `n` ranks. AssertionError if it fails."""
    job = run_job([client.script, folder / "clients.h5"], n, timeout=300, python=python, env={"JAX_PLATFORMS": "cpu"}).check()
    return next(line for line in job.stdout.splitlines() if line.startswith("OK: "))


def install(client: Client) -> Path:
    """The interpreter of the client's environment, made if it is not there."""
    folder = ENVIRONMENTS / client.module
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([*pip, "-e", f"{ROOT}[mpich]"], check=True)
    env = dict(os.environ)
    if client.is_compiled:  # and not against a CUDA that happens to lie about, perhaps without its headers
        env |= {"MPI4JAX_BUILD_MPICC": str(folder / "bin" / "mpicc"), "CUDA_PATH": str(folder), "CUDA_ROOT": str(folder)}
        env["PATH"] = f"{folder / 'bin'}{os.pathsep}{env['PATH']}"
    subprocess.run([*pip, client.package, *client.beside], check=True, env=env)
    return python


def versions(client: Client, python: Path) -> str:
    """Of the client, JAX and Python, as cells of the table."""
    code = "import sys; from importlib.metadata import version as v; "
    code += "print(v(sys.argv[1]), v('jax'), sys.version.split()[0], sep=' | ')"
    return subprocess.run([python, "-c", code, client.package], check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Try the clients that were named, or all; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(client.name for client in CLIENTS))
    parser.add_argument("--here", action="store_true", help="in this environment, those that are installed in it")
    given = parser.parse_args()
    unknown = set(given.names) - {client.name for client in CLIENTS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(client.name for client in CLIENTS)}")
    chosen = [client for client in (INSTALLED if given.here else CLIENTS) if client.name in (given.names or [client.name])]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="shardload-clients-") as folder:
        write_file(Path(folder))
        for client in chosen:
            if not client.is_on_pypi and not given.here:
                print(f"{client.name}: not on PyPI. Where you have installed it: python -m tests.clients --here", flush=True)
                continue
            try:
                python = Path(sys.executable) if given.here else install(client)
                said = [run_client(client, n, Path(folder), python) for n in (1, 4)]
                print(f"| {client.name} | {versions(client, python)} | {datetime.date.today()} |\n    {said[-1]}", flush=True)
            except (AssertionError, subprocess.CalledProcessError) as error:
                failed += 1
                print(f"| {client.name} | FAILED\n{error}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
