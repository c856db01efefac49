"""Run a program so that an error in one process ends the whole job at once, with its traceback.

::

    srun --mpi=pmix python slurm/run.py program.py arguments
    srun --mpi=pmix python slurm/run.py -m module arguments

A process that ends with an exception first waits in JAX's shutdown for all others, for five minutes, while they wait for its
messages. (``python -m mpi4py`` ends the job only after that.) This script prints the traceback and tells MPI to end the job
before Python begins to shut down. Under MPI ``shardload.initialize()`` does so too, for exceptions after that call; this script
also does without MPI, before that call, and after ``sys.exit(1)``.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from pathlib import Path


def main(program: str, *arguments: str) -> None:
    """Run `program` as ``python program arguments`` would, or a module as ``python -m module arguments``."""
    try:
        if program == "-m":
            sys.argv = [*arguments]
            sys.path[0] = os.getcwd()
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [program, *arguments]
            sys.path[0] = str(Path(program).resolve().parent)
            runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            end_job()
        raise
    except BaseException:
        end_job()


def end_job() -> None:
    """End all processes of the job, after saying why."""
    shown = getattr(sys.modules.get("shardload.comm.shared_errors"), "printed_text", lambda _: None)
    text = shown(sys.exc_info()[1])  # None: there is nothing that another process shows already
    sys.stderr.write(traceback.format_exc() if text is None else text)  # at once, not line by line
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(1)  # srun passes on what it was given, and drops what comes after the end
    mpi = getattr(sys.modules.get("mpi4py"), "MPI", None)  # none where the program did without
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)  # without the shutdown of JAX; srun then ends the others (SLURM_KILL_BAD_EXIT)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1:] == ["-m"]:
        sys.exit("usage: python slurm/run.py PROGRAM [ARGUMENT ...], or python slurm/run.py -m MODULE [ARGUMENT ...]")
    main(*sys.argv[1:])
