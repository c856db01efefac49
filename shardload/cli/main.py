"""Which commands are there, and what do they take? info, plan, verify, bench-stream, copy, join, doctor.

Each command imports what it needs when it runs, so that ``--help`` does not wait for JAX. An option that cannot be read ends
with exit code 2 and says what to type. A `ShardloadError` ends with exit code 1 and its message alone, without a traceback.

Output for people fits the terminal's width, or 80 columns where there is no terminal (a log, a pipe). Narrow output takes more
lines; nothing is left out or cut. The line that begins with an array's name also has its shape and dtype where they fit, for
grep. ``COLUMNS=1000`` prints one line per array, and ``--json`` is for programs.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shardload.cli.arguments import KEEP, one_message, parse_mesh, parse_plain, parse_spec, says_what_is_wrong, takes
from shardload.comm.mpi import launched, task
from shardload.options import OPTIONS

File = Annotated[str, typer.Argument(metavar="FILE[:/DATASET]", help="HDF5, netCDF4 or Zarr.")]
_MESH = "Mesh axes in order: a=4,b=2 is 8 devices."
Axes = Annotated[Any, typer.Option(parser=parse_mesh, metavar="NAME=SIZE,...", help=_MESH)]
_SPEC = "Mesh axis of each array axis; - for none, a+b for two. By names: lat=a,lon=b."
Spec = Annotated[Any, typer.Option(parser=parse_spec, metavar="NAME,...", help=_SPEC)]
_AXIS = "The axis along which they follow each other, by name, or number (default: the one that can grow)."
Axis = Annotated[Any, typer.Option(parser=parse_plain, metavar="AXIS", help=_AXIS)]
_RESUME = "Go on with what a copy to Zarr that was killed has left; begin if there is nothing."
Resume = Annotated[bool, typer.Option("--resume", metavar="", help=_RESUME)]
DryRun = Annotated[bool, typer.Option("--dry-run", metavar="", help="Print what would be done, and write nothing.")]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON instead of text, also of what went wrong.")]
_SECONDS = "After so many seconds a waiting rank says for what, and exits."
Seconds = Annotated[float, typer.Option(min=1, max=86_400, metavar="SECONDS", help=_SECONDS)]
_MODE = ("w-", "w-: the new file must not exist; w: it is replaced, when all is written.")
_STACK = (None, "In place of --axis: a new axis, of which each part is one step.")
_ALL_ARRAYS = (None, 'Names of arrays; "group/*" for all below (default: all of the file).')

_UsageError: Any = typer.BadParameter.__base__  # of which are all wrong options; typer does not export it
_HOW_TO_SHARD = "Type for example --mesh a=4,b=2 --spec -,a,b: the mesh of devices, and which of its axes cuts each array axis"
_HOW_TO_NAME_FILES = (
    ". Of several files that are one, type the pattern in quotes, so that the shell does not replace it by their names: "
    'shardload copy "era5_*.nc" era5.zarr --along time'
)


class _Commands(TyperGroup):
    """The commands. What is wrong with the options of a job is said once, by its first task."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if type(error).__name__ == "MissingParameter" and error.param is not None and error.param.name in ("mesh", "spec"):
                error.message = _HOW_TO_SHARD
            if ctx.invoked_subcommand == "copy" and "unexpected extra argument" in error.message:
                error.message += _HOW_TO_NAME_FILES
            if not says_what_is_wrong():
                raise typer.Exit(error.exit_code) from error
            raise


app = typer.Typer(
    name="shardload",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from shardload import __version__

        print(f"shardload {__version__}")
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Load HDF5, netCDF4 and Zarr arrays into sharded jax.Arrays on many processes.

    [bold]Before you load[/bold] (on a login node; needs neither MPI nor devices):

      shardload info run.h5

      shardload plan run.h5:/density --mesh a=4,b=2 --spec a,b

    [bold]Load and compare every element with the file:[/bold]

      mpiexec -n 8 shardload verify run.h5:/density --mesh a=4,b=2 --spec a,b

    [bold]Copy into other chunks, or another format:[/bold]

      mpiexec -n 8 shardload copy run.h5 run.zarr --chunks 128,128,128

    [bold]Make one file of several[/bold] (without a copy of the values):

      shardload join era5_2001.nc era5_2002.nc era5.nc --axis time

    [bold]Check how a job is started[/bold] (with the job's own launcher and flags):

      srun --mpi=pmi2 -n 4 shardload doctor

    [bold]Complete commands and options with the tab key:[/bold]

      shardload --install-completion
    """


def main() -> None:
    """Entry point of the ``shardload`` command and of ``python -m shardload``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # errors come where it is printed
    command = typer.main.get_command(app)
    command()  # not `app()`, which sets an exception hook of its own: `initialize` has one that ends the job


@app.command()
@takes("allow_external", "allow_filters", "untrusted", "storage")
def info(
    file: Annotated[str, typer.Argument(metavar="FILE[:/DATASET]", help="HDF5, netCDF4 or Zarr: all, a group, or one array.")],
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """List the arrays in a file: shape, names of axes, dtype, chunks, codec, sizes.

    Attributes such as scale_factor or _FillValue are shown because they change
    the meaning of the values. A load applies them with --decode only. Of one
    array or group all attributes are shown; / is the group of all.

    For example:

      shardload info run.h5

      shardload info run.h5:/fields/density

      shardload info run.h5:/fields

      shardload info run.zarr --json

    Of what a save that was killed left (NAME.TOKEN.unfinished), it says whether
    it is whole and what to do with it.
    """
    if _is_a_later_task():
        return
    with one_message(as_json) as out:
        from shardload.cli.info import run

        run(out, file, as_json, **options)


@app.command()
@takes(
    *("dataset", "select", "dtype", "decode", "pad", "readers", "staging", "allow_external", "allow_filters", "untrusted"),
    *("storage", "processes", "ranks_per_node"),
)
def plan(file: File, mesh: Axes, spec: Spec, as_json: AsJson = False, **options: Any) -> None:
    """Show what a load would do and cost, without loading anything.

    Needs neither MPI nor devices: you can plan for a mesh of any size on a
    laptop. One process per device is assumed, unless --processes says otherwise,
    and all on one node, unless --ranks-per-node says otherwise.

    For example:

      shardload plan run.h5 --mesh a=4,b=2 --spec a,b

      shardload plan run.h5:/density --mesh a=256,b=256 --spec -,a,b

      shardload plan run.zarr:/u --mesh n=8 --spec n --select "-1,..." --pad 0

      shardload plan era5.nc:/t2m --mesh a=4 --spec lat=a --select "time=2001-06"

      shardload plan run.h5 --mesh a=2,b=2 --spec a+b --json

      shardload plan run.h5 --mesh a=4,b=2 --spec a,b --processes 1

      shardload plan run.h5 --dataset rho --dataset "gas/*" --mesh n=8 --spec n

      shardload plan run.h5 --mesh a=128,b=128 --spec -,a,b --ranks-per-node 4
    """
    if _is_a_later_task():
        return
    with one_message(as_json) as out:
        from shardload.cli.loads import run_plan

        run_plan(out, file, mesh, spec, as_json, **_with_names(options))


@app.command()
@takes(
    *("dataset", "select", "dtype", "decode", "pad", "readers", "staging", "missing", "allow_external", "allow_filters"),
    *("untrusted", "storage", "verify", "progress"),
    verify=(OPTIONS["how"].default, OPTIONS["verify"].help, "--how"),
)
def verify(file: File, mesh: Axes, spec: Spec, as_json: AsJson = False, **options: Any) -> None:
    """Load a file, compare every element with the file, and print what was checked. Exit code 1 if anything differs.

    The mesh takes the devices of all processes. On CPU each process simulates
    as many devices as it needs, so one process is enough.

    For example:

      mpiexec -n 4 shardload verify run.h5:/density --mesh a=2,b=2 --spec a,b

      shardload verify run.zarr --mesh n=4 --spec n --verify file --json

      shardload verify run.h5 --dataset "*" --mesh n=4 --spec n --pad 0
    """
    with one_message(as_json) as out:
        from shardload.cli.loads import run_verify

        run_verify(out, file, mesh, spec, as_json, **_with_names(options))


@app.command("bench-stream")
@takes(
    *("dataset", "along", "batch", "window", "shuffle", "pool", "prefetch", "border", "gaps", "select", "dtype", "decode"),
    *("pad", "readers", "staging", "missing", "allow_external", "allow_filters", "untrusted", "storage"),
    along=("0", "The axis of the steps: its name in the file, or its number."),
    batch=(8, "Samples of a batch."),
)
def bench_stream(
    file: File,
    mesh: Axes,
    spec: Spec,
    steps: Annotated[int, typer.Option(min=2, metavar="N", help="Batches to take; after a minute no more.")] = 20,
    step_ms: Annotated[
        float, typer.Option(min=0, max=60_000, metavar="MS", help="How long your program computes with a batch.")
    ] = 0,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    r"""Measure how fast batches of a file come, for at most a minute, and say what would be faster: chunks, pool, batch.

    Takes what shardload.stream takes; a pattern, "era5_*.nc", of files that
    follow each other. The spec is that of a batch: samples, the window if there
    is one, the other axes. For example:

      mpiexec -n 4 shardload bench-stream era5.zarr:/t2m --mesh data=2,lat=2 \
        --spec data,-,-,lat --along time --batch 8 --window -1,0 --shuffle 1 \
        --step-ms 50
    """
    with one_message(as_json) as out:
        from shardload.cli.bench_stream import run

        run(out, file, mesh, spec, steps, step_ms / 1e3, as_json, **_with_names(options))


@app.command()
@takes(
    *("dataset", "select", "dtype", "chunks", "shards", "compression", "unlimited", "format", "mode", "staging", "verify"),
    *("allow_external", "allow_filters", "untrusted", "storage", "progress", "along"),
    along=(None, "Of a pattern: the axis along which the files follow each other (default: the one that can grow)."),
    dataset=_ALL_ARRAYS,
    chunks=(KEEP, "New chunks: a size for each axis (keep: as in IN)."),
    shards=(KEEP, "Zarr: files of so many elements, a multiple of the chunks."),
    compression=(KEEP, "zstd, gzip:6+shuffle, 'blosc(lz4)'."),
    unlimited=(None, "Axes that can grow (append), by name or number: time (default: as in IN)."),
    format=(None, "hdf5, netcdf4 or zarr (default: by the suffix of OUT)."),
    mode=_MODE,
    staging=("auto", "Memory of each process: 1GiB; auto: 512MiB, or what the chunks need."),
    verify=("checksum", "Of what was written: checksum (stored bytes), full (values too) or index (nothing)."),
)
def copy(
    source: Annotated[str, typer.Argument(metavar="IN[:/DATASET]", help="HDF5, netCDF4 or Zarr; or a pattern of files.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="The new file: .h5, .nc or .zarr.")],
    resume: Resume = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    r"""Copy a file into other chunks, another compression, another format: on all processes, whatever its size.

    Needs neither devices nor JAX, and not even mpiexec. Names of axes, attributes
    and coordinates are carried over. OUT has its name only when it is whole.

    For example:

      mpiexec -n 8 shardload copy run.h5 run.zarr --chunks 128,128,128 \
        --compression zstd

      shardload copy run.nc rho.h5 --dataset rho --select "time=-1"

      shardload copy run.h5 run.zarr --chunks 64,64,64 --shards 512,512,512

      mpiexec -n 8 shardload copy "era5_*.nc" era5.zarr --along time \
        --chunks 24,90,180
    """
    with one_message(as_json) as out:
        from shardload.cli.copies import run_copy

        options |= {"dataset": tuple(options["dataset"] or ()), "resume": resume}
        run_copy(out, source, target, only_plan=dry_run, as_json=as_json, **options)


@app.command()
@takes("stack", "dataset", "mode", "allow_external", "progress", stack=_STACK, dataset=_ALL_ARRAYS, mode=_MODE)
def join(
    files: Annotated[list[str], typer.Argument(metavar="PART... WHOLE", help="HDF5 or netCDF4; the new file: .h5 or .nc.")],
    axis: Axis = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Join the arrays of several files, without a copy of their values: the new file says where they are.

    An ordinary HDF5 or netCDF4 file with virtual datasets, which every program
    reads. The parts stay where they are. Needs neither devices nor JAX nor MPI.

    For example:

      shardload join era5_2001.nc era5_2002.nc era5.nc --axis time

      shardload join $(ls -v snap_000.*.hdf5) snap_000.hdf5

      shardload join step_000.h5 step_001.h5 steps.h5 --stack time
    """
    if _is_a_later_task():
        return
    with one_message(as_json) as out:
        from shardload.cli.copies import run_join

        run_join(out, files, axis=axis, as_json=as_json, **options)


@app.command()
def doctor(
    timeout: Seconds = 60,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check how this job was started: what each rank sees, what is wrong, and the option that fixes it.

    Run it in place of your script, with the same launcher and options.
    Exit code 0: loads will work; 1: they will not.

    For example:

      mpiexec -n 4 python -m shardload doctor --json
    """
    from shardload.cli.doctor import run

    raise typer.Exit(run(timeout, as_json))


def _is_a_later_task() -> bool:
    """Whether this is not the first task of a job: of commands that need no job, the first one does all, and prints once."""
    return launched(os.environ)[1] > 1 and task(os.environ) > 0


def _with_names(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with one name of an array as a text, as `load` takes it."""
    names = options["dataset"]
    return {**options, "dataset": names[0] if names and len(names) == 1 else names or None}
