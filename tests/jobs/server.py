"""A rank of a job that runs program after program, so that JAX and MPI are started once for all of them (see `persistent`).

``server.py ADDRESS``: waits for requests there, one line of JSON each, and answers each with the program's exit status. Each
program finds what a process of its own would have: output in files, a folder, arguments, variables, modules of this project
that nobody has imported (and so nobody has patched), communicators that nobody has cached anything on. What is not of this
project stays as it is: MPI, JAX and its devices, h5py, zarr. When the other side hangs up, the job ends.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import resource
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import zarr
from mpi4py import MPI

from tests.jobs.preloaded import is_installed

# A program that patches one of these without taking it back must not be met by the next one.
WATCHED = (MPI, h5py, jax, np, os, socket, threading, time, zarr)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)


def forget_modules(kept: set[str]) -> None:
    """Have the next program import anew what is not installed, and so what may have been patched."""
    ours = [name for name, module in [*sys.modules.items()] if name not in kept and not is_installed(module)]
    for name in ours:
        del sys.modules[name]


@contextmanager
def output_to(out: str, err: str) -> Iterator[None]:
    """What this process prints goes into two files, also what is printed past Python, and by a crash."""
    saved = [os.dup(number) for number in (1, 2)]
    for path, number in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)


@contextmanager
def as_before() -> Iterator[None]:
    """Take back whatever a program changes in this process, so far as it can be."""
    environment, folder, path, arguments = dict(os.environ), os.getcwd(), [*sys.path], [*sys.argv]
    importers = [*sys.meta_path]
    streams = sys.stdin, sys.stdout, sys.stderr
    kept = {*sys.modules}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    options = dict(jax.config.values)
    names = [(module, dict(vars(module))) for module in WATCHED]
    log = logging.getLogger("shardload")
    try:
        with warnings.catch_warnings():
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:], sys.argv[:], sys.meta_path[:] = path, arguments, importers
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
        tempfile.tempdir = None  # TMPDIR may be another
        for module, before in names:
            for name, value in before.items():
                if vars(module).get(name) is not value and not isinstance(value, types.ModuleType):
                    setattr(module, name, value)
        for name, value in options.items():
            if jax.config.values[name] != value:
                jax.config.update(name, value)
        log.handlers.clear()
        log.setLevel(logging.NOTSET)
        forget_modules(kept)
        gc.enable()
        gc.collect()  # files and arrays that nobody holds any more


def run(arguments: list[str]) -> None:
    """Run what ``python ARGUMENTS`` would."""
    sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    while arguments[0] == "-W":
        action, _, message = arguments[1].partition(":")
        warnings.filterwarnings(action, re.escape(message))  # type: ignore[arg-type]
        arguments = arguments[2:]
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.path.insert(0, os.getcwd())
        main = types.ModuleType("__main__")
        before = sys.modules["__main__"]
        sys.modules["__main__"] = main
        try:
            exec(compile(arguments[1], "<string>", "exec"), vars(main))
        finally:
            sys.modules["__main__"] = before
    elif arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def status_of(arguments: list[str]) -> int:
    """Run it, and say how a process of its own would have ended."""
    try:
        run(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def wait_for_all(comm: Any) -> int:
    """All ranks have come here, and no message of the program's is left for the next one's. Else its status is 1."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)
    if MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG):
        print("server: a message over COMM_WORLD was sent and never received", file=sys.stderr)
        return 1
    return 0


def handle(request: dict[str, Any], comm: Any) -> int:
    """One program, from its arguments to its exit status."""
    with ExitStack() as stack:
        stack.enter_context(output_to(request["out"], request["err"]))
        stack.enter_context(as_before())
        os.chdir(request["cwd"])
        for name in request["unset"]:
            os.environ.pop(name, None)
        os.environ.update(request["set"])
        return status_of(request["arguments"]) or wait_for_all(comm)


def main(address: str) -> None:
    import shardload  # forgotten below, as it is after each program

    shardload.initialize()
    jax.devices()
    sys.excepthook = sys.__excepthook__
    forget_modules({"__main__"})
    gc.collect()
    gc.freeze()
    comm = MPI.COMM_WORLD.Dup()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    lines = connection.makefile("rw")
    lines.write(json.dumps({"rank": comm.rank}) + "\n")
    lines.flush()
    for line in lines:
        status = handle(json.loads(line), comm)
        lines.write(json.dumps({"status": status}) + "\n")
        lines.flush()


if __name__ == "__main__":
    main(sys.argv[1])
