"""Which commands are there, what do they take, and what do they print? info, plan, verify, copy, join, demo, doctor.

Each command imports what it needs when it runs, so that ``--help`` and ``info`` do not wait for JAX. A wrong option ends with
exit code 2 and says what to type. A `ShardloadError` ends with exit code 1 and its message alone, without a traceback.

Output for people fits the terminal's width, or 80 columns where there is no terminal (a log, a pipe). Narrow output takes more
lines; nothing is left out or cut. The line that begins with an array's name also has its shape and dtype where they fit, for
grep. ``COLUMNS=1000`` prints one line per array, and ``--json`` is for programs.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from shardload.cli.arguments import (
    as_typed,
    complete_mesh,
    complete_spec,
    completes,
    info_as_typed,
    names_of,
    parse_mesh,
    parse_pad,
    parse_readers,
    parse_select,
    parse_spec,
    show_error,
)
from shardload.comm.environment import launched, task
from shardload.errors import ConfigError, ShardloadError, printable
from shardload.options import DEFAULTS, OPTIONS
from shardload.system.terminal import (
    Column,
    OutputError,
    fit_table,
    say_error,
    stdout_of_a_command,
    tell,
    width_of,
    wrap,
)
from shardload.units import counted, format_nbytes

if TYPE_CHECKING:
    from shardload.formats.access import Access
    from shardload.formats.contract.array import ArrayInfo
    from shardload.formats.labels import Coordinate
    from shardload.formats.leftovers import Leftover
    from shardload.jobs.loading.tree_plan import TreePlan

__all__ = ["app", "main"]

_MOST_LABELLED = 256  # arrays whose axes' names are looked up, a millisecond each; of a file with more, no groups' attributes
_PLAN_NAMES = ["shape", "shape_global", "dtype", "chunks", "decomposition", "shard_shape", "n_ranks", "readers"]
_PLAN_NAMES += ["n_readers", "why"]

File = Annotated[str, typer.Argument(metavar="FILE[:/DATASET]", help="HDF5, netCDF4 or Zarr.")]
MeshText = Annotated[
    str,
    typer.Option(metavar="NAME=SIZE,...", help="Mesh axes in order: a=4,b=2 is 8 devices.", autocompletion=complete_mesh),
]
SpecText = Annotated[
    str,
    typer.Option(
        metavar="NAME,...", help="Mesh axis of each array axis; - for none, a+b for two.", autocompletion=complete_spec
    ),
]
_HELP = {name: option.help for name, option in OPTIONS.items()}
Dataset = Annotated[list[str] | None, typer.Option(help=_HELP["dataset"])]
Select = Annotated[str | None, typer.Option(help=_HELP["select"])]
Dtype = Annotated[str | None, typer.Option(help=_HELP["dtype"])]
Decode = Annotated[bool | None, typer.Option("--decode/--no-decode", help=_HELP["decode"])]
Pad = Annotated[str | None, typer.Option(help=_HELP["pad"])]
Readers = Annotated[str, typer.Option(help=_HELP["readers"], autocompletion=completes(*OPTIONS["readers"].choices))]
AllowExternal = Annotated[bool, typer.Option("--allow-external", help=_HELP["allow_external"])]
Missing = Annotated[str, typer.Option(help=_HELP["missing"], autocompletion=completes(*OPTIONS["missing"].choices))]
How = Annotated[str, typer.Option(help=_HELP["verify"], autocompletion=completes(*OPTIONS["verify"].choices))]
Untrusted = Annotated[bool, typer.Option("--untrusted", help=_HELP["untrusted"])]
AllowFilters = Annotated[str, typer.Option("--allow-filters", metavar="NAME,...", help=_HELP["allow_filters"])]
StagingText = Annotated[str, typer.Option(help=_HELP["staging"])]
MachineText = Annotated[str | None, typer.Option(metavar="NAME=RATE,...", help=_HELP["machine"])]
RanksPerNode = Annotated[int | None, typer.Option(help=_HELP["ranks_per_node"])]
Processes = Annotated[int | None, typer.Option(help=_HELP["processes"])]

_UsageError: Any = typer.BadParameter.__base__  # of which are all wrong options; typer does not export it
_LATER_SECONDS = 2.0
_HOW_TO_SHARD = "Type for example --mesh a=4,b=2 --spec -,a,b: the mesh of devices, and which of its axes cuts each array axis"


class _Commands(TyperGroup):
    """The commands. What is wrong with the options of a job is said once, by its first task.

    Tasks cannot ask each other: MPI has not been started. Some launchers (Open MPI's, ``srun -K``) end a job at the first task
    that fails, so the others wait for the first one's message. If they still run then, the first task may be late: they say it
    too. MPICH's launcher waits for all tasks.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if type(error).__name__ == "MissingParameter" and error.param is not None and error.param.name in ("mesh", "spec"):
                error.message = _HOW_TO_SHARD
            launcher, n = launched(os.environ)
            if n > 1 and task(os.environ) > 0:
                time.sleep(_LATER_SECONDS)
                if launcher == "mpiexec":
                    raise typer.Exit(error.exit_code) from error
            raise


app = typer.Typer(
    name="shardload",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Load HDF5, netCDF4 and Zarr arrays into sharded jax.Arrays on many processes.

    [bold]Before you load[/bold] (on a login node; needs neither MPI nor devices):

      shardload info run.h5

      shardload plan run.h5:/density --mesh a=4,b=2 --spec a,b

    [bold]Load and compare every element with the file:[/bold]

      mpiexec -n 8 shardload verify run.h5:/density --mesh a=4,b=2 --spec a,b

    [bold]Copy into other chunks, or another format:[/bold]

      mpiexec -n 8 shardload copy run.h5 run.zarr --chunks 128,128,128

    [bold]Make one file of several[/bold] (without a copy of the values):

      shardload join era5_2001.nc era5_2002.nc era5.nc --axis time

    [bold]Try it on example data:[/bold]

      mpiexec -n 4 python -m shardload demo

    [bold]Check how a job is started[/bold] (with the job's own launcher and flags):

      srun --mpi=pmi2 -n 4 shardload doctor
    """,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from shardload import __version__

        tell(f"shardload {__version__}")
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the ``shardload`` command and of ``python -m shardload``."""
    try:
        sys.stdout = stdout_of_a_command()  # also for what typer prints: --help, the completion of a shell
        app()
    except OutputError as error:
        say_error(str(error))
        sys.exit(1)


@app.command()
def info(
    file: Annotated[str, typer.Argument(metavar="FILE[:/DATASET]", help="HDF5, netCDF4 or Zarr: all, a group, or one array.")],
    allow_external: AllowExternal = DEFAULTS.allow_external,
    allow_filters: AllowFilters = "",
    untrusted: Untrusted = DEFAULTS.untrusted,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table, also of what went wrong.")] = False,
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
    with _one_message(info_as_typed, as_json):
        from shardload.formats.access import Access, Limits
        from shardload.formats.labelling import labelled_below, list_labelled, read_labels
        from shardload.formats.leftovers import find_leftover
        from shardload.formats.lookup import find_array, open_file, split_path
        from shardload.options import filter_names

        path, dataset = split_path(file)
        access = Access(allow_external, frozenset(filter_names(allow_filters)), Limits() if untrusted else None)
        left = find_leftover(path)
        if left is not None:
            arrays = list_labelled(path, access, _MOST_LABELLED) if left.is_whole else []
            _print_leftover(left, arrays, as_json)
            return
        arrays = list_labelled(path, access, _MOST_LABELLED)
        is_group = dataset is not None and (dataset == "*" or dataset.endswith("/*"))
        of_group: Sequence[tuple[str, str]] = []
        if dataset is not None and is_group:
            group = f"/{dataset[:-1].strip('/')}".rstrip("/")
            arrays = labelled_below(arrays, path, access, _MOST_LABELLED, group) or [find_array(path, dataset, access)]
        elif dataset is not None and (below := _below_group(path, dataset, arrays, access)) is not None:
            arrays, of_group = below
            is_group = True
        elif dataset is not None:  # list_arrays also has what find_array refuses, and find_array what is behind links
            named = [array for array in arrays if array.dataset == "/" + dataset.strip("/")]
            arrays = named or [find_array(path, dataset, access, is_counted=True)]
            if arrays[0].labels is None and not arrays[0].refused:
                arrays = [replace(arrays[0], labels=read_labels(path, arrays[0], access))]
        links: Mapping[str, str] = {}
        groups: Mapping[str, Mapping[str, Any]] = {}
        if dataset is None and not as_json:
            with suppress(ShardloadError), open_file(path, access) as opened:
                links = opened.links()
                groups = opened.groups() if len(arrays) <= _MOST_LABELLED else {}
    if as_json:
        tell(_to_json([_describe(array) for array in arrays]))
    elif dataset is None or is_group:
        _print_arrays(path, arrays, links, groups)
        if of_group:
            tell("\n".join(_rows_of(of_group)))
    else:
        _print_array(arrays[0])


@app.command()
def plan(
    file: File,
    mesh: MeshText,
    spec: SpecText,
    dataset: Dataset = DEFAULTS.dataset,
    select: Select = DEFAULTS.select,
    dtype: Dtype = DEFAULTS.dtype,
    decode: Decode = DEFAULTS.decode,
    pad: Pad = DEFAULTS.pad,
    readers: Readers = DEFAULTS.readers,
    staging: StagingText = DEFAULTS.staging,
    allow_external: AllowExternal = DEFAULTS.allow_external,
    untrusted: Untrusted = DEFAULTS.untrusted,
    processes: Processes = DEFAULTS.processes,
    ranks_per_node: RanksPerNode = DEFAULTS.ranks_per_node,
    machine: MachineText = DEFAULTS.machine,
    allow_filters: AllowFilters = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text, also of what went wrong.")] = False,
) -> None:
    """Show what a load would do and cost, without loading anything.

    Needs neither MPI nor devices: you can plan for a mesh of any size on a
    laptop. One process per device is assumed, unless --processes says otherwise,
    and files in the page cache of one node, unless --machine says otherwise.

    For example:

      shardload plan run.h5 --mesh a=4,b=2 --spec a,b

      shardload plan run.h5:/density --mesh a=256,b=256 --spec -,a,b

      shardload plan run.zarr:/u --mesh n=8 --spec n --select "-1,..." --pad 0

      shardload plan run.h5 --mesh a=2,b=2 --spec a+b --json

      shardload plan run.h5 --mesh a=4,b=2 --spec a,b --processes 1

      shardload plan run.h5 --dataset rho --dataset "gas/*" --mesh n=8 --spec n

      shardload plan run.h5 --mesh a=128,b=128 --spec -,a,b --ranks-per-node 4 --machine read_rate=2e9,network_rate=25e9
    """
    axes = parse_mesh(mesh)
    partition = parse_spec(spec, axes)
    index = None if select is None else parse_select(select)
    value = None if pad is None else parse_pad(pad)
    who = parse_readers(readers)
    with _one_message(as_json=as_json):
        import shardload
        from shardload.jobs.loading.describe import describe_plan
        from shardload.jobs.loading.tree_plan import TreePlan

        how: dict[str, Any] = {
            "dtype": dtype,
            "decode": decode,
            "pad": value,
            "readers": who,
            "staging": staging,
            "allow_external": allow_external,
        }
        how |= {"allow_filters": allow_filters, "untrusted": untrusted, "processes": processes}
        how |= {"machine": machine, "ranks_per_node": ranks_per_node}
        found = shardload.plan(file, *_target(axes, partition), dataset=names_of(dataset), select=index, **how)
        if isinstance(found, TreePlan):
            tell(_to_json(_describe_tree(found)) if as_json else found.describe(width_of()))
        else:
            tell(_to_json(_describe_plan(found)) if as_json else describe_plan(found, width_of()))


@app.command()
def verify(
    file: File,
    mesh: MeshText,
    spec: SpecText,
    dataset: Dataset = DEFAULTS.dataset,
    select: Select = DEFAULTS.select,
    dtype: Dtype = DEFAULTS.dtype,
    decode: Decode = DEFAULTS.decode,
    pad: Pad = DEFAULTS.pad,
    readers: Readers = DEFAULTS.readers,
    staging: StagingText = DEFAULTS.staging,
    missing: Missing = DEFAULTS.missing,
    allow_external: AllowExternal = DEFAULTS.allow_external,
    allow_filters: AllowFilters = "",
    untrusted: Untrusted = DEFAULTS.untrusted,
    how: How = DEFAULTS.how,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text, also of what went wrong.")] = False,
) -> None:
    """Load a file, compare every element with the file, and print what was checked. Exit code 1 if anything differs.

    The mesh takes the devices of all processes. On CPU each process simulates
    as many devices as it needs, so one process is enough.

    For example:

      mpiexec -n 4 shardload verify run.h5:/density --mesh a=2,b=2 --spec a,b

      shardload verify run.zarr --mesh n=4 --spec n --how file --json

      shardload verify run.h5 --dataset "*" --mesh n=4 --spec n --pad 0
    """
    axes = parse_mesh(mesh)
    partition = parse_spec(spec, axes)
    more: dict[str, Any] = {"select": None if select is None else parse_select(select)}
    more |= {"pad": None if pad is None else parse_pad(pad), "dataset": names_of(dataset), "dtype": dtype}
    more |= {"decode": bool(decode)}  # None would warn of packed numbers, which nobody gets here
    more |= {"missing": missing, "allow_external": allow_external, "untrusted": untrusted, "allow_filters": allow_filters}
    who = parse_readers(readers)
    from shardload.cli.verify import run

    raise typer.Exit(run(file, axes, partition, as_json, readers=who, staging=staging, verify=how, **more))


@app.command()
def copy(
    source: Annotated[str, typer.Argument(metavar="IN[:/DATASET]", help="HDF5, netCDF4 or Zarr.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="The new file: .h5, .nc or .zarr.")],
    dataset: Annotated[
        list[str] | None, typer.Option(help='Names of arrays; "group/*" for all below (default: all of the file).')
    ] = None,
    select: Select = None,
    dtype: Dtype = None,
    chunks: Annotated[
        str | None, typer.Option(metavar="N,...|none", help="New chunks: a size for each axis (default: as in IN).")
    ] = None,
    shards: Annotated[
        str | None, typer.Option(metavar="N,...|none", help="Zarr: files of so many elements, a multiple of the chunks.")
    ] = None,
    compression: Annotated[
        str | None,
        typer.Option(metavar="NAME[:LEVEL][+shuffle]|none", help="zstd, gzip:6+shuffle, blosc(lz4) (default: as in IN)."),
    ] = None,
    unlimited: Annotated[
        str | None,
        typer.Option(metavar="AXIS,...", help="Axes that can grow (append), by name or number: time (default: as in IN)."),
    ] = None,
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="hdf5, netcdf4, zarr or zarr2 (default: by the suffix of OUT).",
            autocompletion=completes("hdf5", "netcdf4", "zarr", "zarr2"),
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="w-: OUT must not exist; w: it is replaced, when all is written.", autocompletion=completes("w-", "w")
        ),
    ] = "w-",
    staging: Annotated[str, typer.Option(help="Memory of each process: 1GiB; auto: 512MiB, or what the chunks need.")] = "auto",
    how: Annotated[
        str,
        typer.Option(
            "--verify",
            help="Of what was written: checksum (stored bytes), full (values too) or index (nothing).",
            autocompletion=completes("checksum", "full", "index"),
        ),
    ] = "checksum",
    allow_external: AllowExternal = DEFAULTS.allow_external,
    allow_filters: AllowFilters = "",
    untrusted: Untrusted = DEFAULTS.untrusted,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with what a copy to Zarr that was killed has left; begin if there is nothing."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text, also of what went wrong.")] = False,
) -> None:
    """Copy a file into other chunks, another compression, another format: on all processes, whatever its size.

    Needs neither devices nor JAX, and not even mpiexec. Names of axes, attributes
    and coordinates are carried over. OUT has its name only when it is whole.

    For example:

      mpiexec -n 8 shardload copy run.h5 run.zarr --chunks 128,128,128 --compression zstd

      shardload copy run.nc rho.h5 --dataset rho --select "time=-1" --dtype float32

      shardload copy run.h5 run.zarr --chunks 64,64,64 --shards 512,512,512 --dry-run
    """
    from shardload.cli.copy import parse_axes, parse_compression, parse_sizes, run

    names = tuple(dataset or ())
    index = None if select is None else parse_select(select)
    sizes = {"chunks": parse_sizes(chunks, "--chunks"), "shards": parse_sizes(shards, "--shards")}
    packing = parse_compression(compression)
    more: dict[str, Any] = {"format": file_format, "mode": mode, "staging": staging, "verify": how, "dtype": dtype}
    more |= {"allow_external": allow_external, "allow_filters": allow_filters, "untrusted": untrusted}
    more |= {"resume": resume, "dataset": names, "select": index, "compression": packing, **sizes}
    more["unlimited"] = parse_axes(unlimited)
    raise typer.Exit(run(source, target, only_plan=dry_run, as_json=as_json, **more))


@app.command()
def join(
    files: Annotated[list[str], typer.Argument(metavar="PART... WHOLE", help="HDF5 or netCDF4; the new file: .h5 or .nc.")],
    axis: Annotated[
        str | None,
        typer.Option(help="The axis along which they follow each other, by name, or number (default: the one that can grow)."),
    ] = None,
    stack: Annotated[
        str | None, typer.Option(metavar="NAME", help="In place of --axis: a new axis, of which each part is one step.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help='Names of arrays; "group/*" for all below (default: all of the files).')
    ] = None,
    mode: Annotated[
        str,
        typer.Option(help="w-: WHOLE must not exist; w: it is replaced.", autocompletion=completes("w-", "w")),
    ] = "w-",
    allow_external: AllowExternal = DEFAULTS.allow_external,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text, also of what went wrong.")] = False,
) -> None:
    """Join the arrays of several files, without a copy of their values: the new file says where they are.

    An ordinary HDF5 or netCDF4 file with virtual datasets, which every program
    reads. The parts stay where they are. Needs neither devices nor JAX nor MPI.

    For example:

      shardload join era5_2001.nc era5_2002.nc era5.nc --axis time

      shardload join $(ls -v snap_000.*.hdf5) snap_000.hdf5

      shardload join step_000.h5 step_001.h5 steps.h5 --stack time
    """
    from shardload.cli.join import run

    raise typer.Exit(
        run(files, axis=axis, stack=stack, dataset=dataset, mode=mode, allow_external=allow_external, as_json=as_json)
    )


@app.command()
def demo(size: Annotated[int, typer.Option(min=8, help="Elements along each axis of the FFT field.")] = 256) -> None:
    r"""Load climate data and a SIZE^3 field, check every element, do an FFT, and compare times with other ways to load.

    Needs pip install 'shardload\[demo]'. Writes the SIZE^3 field twice into a
    temporary folder and removes it.

    For example:

      mpiexec -n 4 python -m shardload demo

      mpiexec -n 2 python -m shardload demo --size 128
    """
    with _one_message():
        try:
            from shardload.cli.demo import run
        except ModuleNotFoundError as error:
            raise ConfigError(f"the demo needs {error.name}. Type: pip install 'shardload[demo]'") from None
        raise typer.Exit(run(size))


@app.command()
def doctor(
    timeout: Annotated[float, typer.Option(min=1, help="After so many seconds a waiting rank says for what, and exits.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check how this job was started: what each rank sees, what is wrong, and the option that fixes it.

    Run it in place of your script, with the same launcher and options.
    Exit code 0: loads will work; 1: they will not.

    For example:

      mpiexec -n 4 python -m shardload doctor --json
    """
    with _one_message():
        from shardload.cli.doctor.run import run

        raise typer.Exit(run(timeout, as_json))


def _target(axes: Mapping[str, int], parts: Sequence[str | tuple[str, ...] | None]) -> tuple[Any, Any]:
    """A mesh without devices, and the spec. The arguments of AbstractMesh changed in JAX 0.6."""
    from jax.sharding import AbstractMesh, PartitionSpec

    make: Any = AbstractMesh
    try:
        mesh = make(tuple(axes.values()), tuple(axes))
    except (TypeError, ValueError):
        mesh = make(tuple(axes.items()))
    return mesh, PartitionSpec(*parts)


@contextmanager
def _one_message(typed: Callable[[str], str] = as_typed, as_json: bool = False) -> Iterator[None]:
    """Turn a `ShardloadError` into its message on stderr and exit code 1: the message says what to do, a traceback does not."""
    try:
        yield
    except ShardloadError as error:
        from shardload.comm.tracebacks import is_shown_elsewhere

        if not is_shown_elsewhere(error):
            show_error(error, typed(str(error)), sys.stdout, as_json)
        raise typer.Exit(1) from None


def _below_group(
    path: str, name: str, arrays: Sequence[ArrayInfo], access: Access
) -> tuple[list[ArrayInfo], Sequence[tuple[str, str]]] | None:
    """The arrays below a group, and what is told of its attributes; None if nothing is called so, or an array."""
    from shardload.formats.labelling import labelled_below
    from shardload.jobs.contents import groups_of

    full = "/" + name.strip("/")
    if any(array.dataset == full for array in arrays):
        return None
    below = labelled_below(arrays, path, access, _MOST_LABELLED, full.rstrip("/"))
    groups, unread = groups_of(path, access)
    if not below and full not in groups:
        return None
    left_out = [("not shown", printable(text)) for text in unread if f"'{full}' (" in text]
    return below, [*_attrs_told(groups.get(full, {})), *left_out]


def _print_arrays(
    path: str,
    arrays: Sequence[ArrayInfo],
    links: Mapping[str, str] | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    said = f"{arrays[0].format}, {counted(len(arrays), 'array')}" if arrays else "no arrays"
    lines = wrap(f"{printable(path)}: {said}", width_of())
    sharded = any(array.shards for array in arrays)
    named = any(any(array.dims) for array in arrays)
    columns = [Column("name"), Column("shape", lead=""), Column("dtype", lead="")]
    columns += [Column("axes")] if named else []
    columns += [Column("chunks")]
    columns += [Column("shards")] if sharded else []
    columns += [
        Column("codec"),
        Column("size", is_number=True),
        Column("stored", is_number=True),
        Column("notes", lead=""),
    ]
    rows = []
    for array in arrays:
        row = [
            array.dataset,
            _shape_text(array.shape),
            array.dtype,
            *([_axes_text(array)] if named else []),
            _shape_text(array.chunks),
            *([_shape_text(array.shards)] if sharded else []),
        ]
        row += [array.codec, human_size(_nbytes(array)), human_size(array.nbytes_stored), _notes(array)]
        rows.append([printable(cell) for cell in row])
    narrow = [[column.title for column in columns[:-1]], ["name", "shape", "dtype", "size"], ["name", "shape", "dtype"]]
    if not any(row[-1] for row in rows):  # no notes, nor a title above nothing
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    lines += fit_table(columns, rows, width_of(), narrow) if arrays else []
    links = {
        name: to for name, to in (links or {}).items() if not any(f"{one.dataset}/".startswith(f"{name}/") for one in arrays)
    }
    if links:
        from shardload.formats.contract.array import some as few

        told = printable(few([f"{name} (to {to})" for name, to in links.items()]))
        how = f"shardload info {printable(path)}:/NAME shows what one leads to"
        lines += wrap(f"links, not listed: {told}; {how}", width_of())
    owners = [f"{name} ({', '.join(attrs)})" for name, attrs in (groups or {}).items() if attrs]
    if owners:
        from shardload.formats.contract.array import some as few

        how = f"shardload info {printable(path)}:/GROUP shows them"
        lines += wrap(f"attributes of groups: {printable(few(owners))}; {how}", width_of())
    tell("\n".join(lines))


def _print_leftover(left: Leftover, arrays: Sequence[ArrayInfo], as_json: bool) -> None:
    """What a save left, and what is in it if it is whole."""
    if as_json:
        about = {"path": left.path, "save_of": left.target, "what": left.what, "is_whole": left.is_whole}
        about |= {"commands": dict(left.commands), "arrays": [_describe(array) for array in arrays]}
        tell(_to_json(about))
        return
    lines = wrap(printable(f"{left.path} {left.told}. {left.condition},"), width_of())
    lines += [printable(f"  {what}:  {command}") for what, command in left.commands]  # in one line each, to be copied
    tell("\n".join(lines))
    if left.is_whole:
        _print_arrays(left.path, arrays)


def _print_array(array: ArrayInfo) -> None:
    rows = {
        "array": str(array),
        "format": array.format,
        "shape": _shape_text(array.shape),
        "dtype": array.dtype,
        "axes": _axes_text(array),
        "coords": "; ".join(_coordinate_text(name, one) for name, one in array.coords.items()),
        "packing": _packing_text(array),
        "chunks": _shape_text(array.chunks),
        "shards": _shape_text(array.shards) if array.shards else "",
        "codec": array.codec,
        "size": human_size(_nbytes(array)),
        "stored": human_size(array.nbytes_stored),
        "coordinate": "" if array.is_dimension or not array.is_coordinate else "of other arrays (a dimension scale)",
        "dimension": "without a variable: it holds no values" if array.is_dimension else "",
        "refused": as_typed(array.refused or ""),
    }
    told = [(title, text) for title, text in rows.items() if text]  # an attribute may be called shape, too
    tell("\n".join(_rows_of([*told, *_attrs_told({**array.attributes, **array.attrs}, is_array=True)])))


def _attrs_told(attrs: Mapping[str, Any], is_array: bool = False) -> list[tuple[str, str]]:
    """Names and values of attributes, for a person."""
    from shardload.values.decoding import ATTRIBUTES

    notes = {key: "  (reported, not applied)" for key in attrs if is_array and key in ATTRIBUTES}
    return [(printable(key), f"{_plain_text(value)}{notes.get(key, '')}") for key, value in attrs.items()]


def _rows_of(told: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of titles and texts."""
    widest = max(len(title) for title, _ in told)
    return [line for title, text in told for line in wrap(printable(text), width_of(), f"{title:<{widest}}  ")]


def _axes_text(array: ArrayInfo) -> str:
    """The names of the axes; nothing if none has one."""
    return ", ".join(name or "-" for name in array.dims) if any(array.dims) else ""


def _coordinate_text(name: str, one: Coordinate) -> str:
    """The first and last value of the coordinate of an axis, which say its direction; of others, such as the latitudes of a
    curvilinear grid or of stations, the axes, and the least and greatest value. What is not small was not read.
    """
    is_of_axis = one.dims in ((name,), (None,))
    axes = "" if is_of_axis or not one.dims else f"({', '.join(dim or '-' for dim in one.dims)})"
    if one.values is None:
        return f"{name}{axes}"
    values = one.values.reshape(-1)
    if not is_of_axis and values.dtype.kind != "c":  # complex numbers have no order
        there = values[values == values]  # what is missing is NaN
        if values.size and not there.size:
            return f"{name}{axes} all missing"
        values = there if there.size < 2 else there.take([there.argmin(), there.argmax()])
    from shardload.values.dates import as_dates

    ends = values[[0, -1]] if values.size > 1 else values
    dates = " to ".join(as_dates(ends, one.attrs)) if ends.dtype.kind in "iuf" else ""
    units = one.attrs.get("units")
    told = [name + axes, " to ".join(map(str, ends)), _plain_text(units) if units else "", f"({dates})" if dates else ""]
    return " ".join(filter(None, told))


def _packing_text(array: ArrayInfo) -> str:
    """What a load with ``decode`` makes of the stored numbers; nothing if that is the stored numbers."""
    if array.refused or not array.packing:
        return ""
    import numpy as np

    from shardload.values.decoding import decoding_of, packed_by

    dtype = np.dtype(array.dtype)
    try:
        rule = decoding_of(dtype, array.packing, str(array))
    except ConfigError as error:
        return as_typed(str(error))
    how = packed_by(dtype, array.packing)
    is_packed = f"packed ({', '.join(how)}), " if how else ""
    return "" if rule is None else f"{is_packed}{rule.dtype} with --decode"


def _notes(array: ArrayInfo) -> str:
    notes = [f"cannot be loaded: {as_typed(array.refused)}"] if array.refused else []
    notes += ["dimension without a variable" if array.is_dimension else "coordinate"] if array.is_coordinate else []
    notes += [f"in {counted(array.n_parts, 'part')}"] if array.n_parts else []
    notes += [f"{key}={_plain_text(value)}" for key, value in array.attributes.items()]
    return ", ".join(notes)


def _describe(array: ArrayInfo) -> dict[str, Any]:
    told = {part.name: getattr(array, part.name) for part in fields(array) if part.name not in ("labels", "packing", "parts")}
    packing = {key: {"dtype": kind, "values": values} for key, (kind, values) in array.packing.items()}
    more: dict[str, Any] = {"packing": packing, "nbytes": _nbytes(array), "dims": array.dims, "attrs": array.attrs}
    more["n_parts"] = array.n_parts or None
    return {**told, **more, "coords": {name: one.dataset for name, one in array.coords.items()}}


def _describe_plan(found: Any) -> dict[str, Any]:
    plan = {name: getattr(found, name) for name in _PLAN_NAMES}
    costs = {mode: asdict(cost) for mode, cost in found.costs.items()}
    return {"path": found.info.path, "dataset": found.info.dataset, **plan, "costs": costs}


def _describe_tree(found: TreePlan) -> dict[str, Any]:
    totals = {name: getattr(found, name) for name in ("nbytes", "peak_nbytes", "staging_nbytes", "seconds")}
    arrays = [{"where": where, **_describe_plan(one)} for where, one in zip(found.where, found.leaves, strict=True)]
    return {"arrays": arrays, **totals, "left_out": [one.dataset for one in found.left_out]}


def _to_json(value: Any) -> str:
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """`value` in JSON's types; NaN and infinities, which JSON does not have, as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def _plain_text(value: Any) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _nbytes(array: ArrayInfo) -> int | None:
    import numpy as np

    try:
        return math.prod(array.shape) * np.dtype(array.dtype).itemsize
    except (TypeError, ValueError):  # a type that NumPy does not have
        return None


def _shape_text(shape: Sequence[int] | None) -> str:
    if shape is None:
        return "-"
    return " x ".join(map(str, shape)) or "scalar"


def human_size(nbytes: int | None) -> str:
    """Bytes for people, in powers of 1024.

    >>> human_size(512), human_size(64 * 2**20), human_size(None)
    ('512 B', '64.0 MiB', '-')
    """
    return "-" if nbytes is None else format_nbytes(nbytes)
