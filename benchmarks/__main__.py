"""``python -m benchmarks``: run, and turn what was measured into tables and a plot."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cases import cells as c
from benchmarks.cases import saves as s
from benchmarks.cases import stores as o
from benchmarks.cases import streams as st
from benchmarks.cases.layouts import check_size, default_folder, field, make, many, reference_of
from benchmarks.fuzz.filters import fuzz_filters
from benchmarks.fuzz.loads import fuzz
from benchmarks.peers import store_server
from benchmarks.reports.plot import plot
from benchmarks.reports.saves import copy_section, plot_saves, put_section, save_section
from benchmarks.reports.stores import plot_stores, stores_page, stores_section
from benchmarks.reports.streams import plot_streams, streams_section
from benchmarks.reports.tables import read_records, write_report
from benchmarks.runs import grid as g
from benchmarks.runs import rechunking, saves
from benchmarks.runs.devices import JOBS, SPECS, measure_devices
from benchmarks.runs.devices import LAYOUTS as LAYOUTS_OF_DEVICES
from benchmarks.runs.environments import make_heat
from benchmarks.runs.extras import measure_many, measure_memory, measure_scatter, measure_small, profile_chunks
from benchmarks.runs.measure import default_ways, measure, write_record
from benchmarks.runs.stores import measure_stores
from benchmarks.runs.streams import measure_streams
from benchmarks.runs.verification import measure_verification
from benchmarks.throttle.links import why_not
from shardload.errors import ConfigError
from shardload.units import parse_nbytes

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="How fast is shardload, compared with what people use today and with what the machine could do?",
)
ALL_LAYOUTS = ",".join(c.LAYOUTS)
MEMORY_LAYOUTS = "hdf5-contiguous,hdf5-gzip-planes,zarr-sharded"  # in `all`, for time
SMALL_CHUNKS = ",".join(c.SMALL_CHUNK_LAYOUTS)
SAVE_LAYOUTS = ",".join(s.SAVE_LAYOUTS)
STORE_LAYOUTS, STORE_SPECS = ",".join(o.STORE_LAYOUTS), ";".join(o.STORE_SPECS)
DEVICES_LAYOUTS = ",".join(LAYOUTS_OF_DEVICES)
GRID_LAYOUTS = ",".join(g.LAYOUTS)
VERIFY_LAYOUTS = "hdf5-contiguous,hdf5-gzip-planes,hdf5-gzip-cubes"
RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
FIELD_RANKS = 4
DATA_FOLDER = default_folder()


def _size(size: int) -> int:
    """The same, if files of it can be written."""
    try:
        check_size(size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return size


Data = Annotated[Path, typer.Option(help="Folder for the files that are read. They are written once and kept.")]
Results = Annotated[Path, typer.Option(help="Folder for the records, tables and the plot.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed loads of each way.")]
Size = Annotated[int, typer.Option(callback=_size, help="Elements along each of three axes (float32).")]
Ranks = Annotated[int, typer.Option(min=1, help="Ranks of the job.")]
Layouts = Annotated[str, typer.Option(help="Names, separated by commas.")]


def say(text: str) -> None:
    """Progress."""
    typer.echo(text, err=True)


@app.command()
def run(
    size: Size = 512,
    layouts: Layouts = ALL_LAYOUTS,
    specs: Annotated[str, typer.Option(help="Separated by ';': 'a;-,a,b' is P('a') and P(None, 'a', 'b').")] = ";".join(
        c.SPECS
    ),
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = ",".join(map(str, c.RANKS)),
    ways: Annotated[
        str, typer.Option(help=f"Separated by commas, or all that are installed: {', '.join((*c.WAYS, *c.MODES))}.")
    ] = "all",
    repeats: Repeats = 5,
    cells: Annotated[str, typer.Option(help="all, or must: the cells for which there are goals.")] = "all",
    small: Annotated[
        bool, typer.Option("--small/--no-small", help="With all layouts and cells: also those of `small-chunks` and `many`.")
    ] = True,
    cold: Annotated[bool, typer.Option(help="Drop the files from the page cache before each load.")] = False,
    data: Data = DATA_FOLDER,
    out: Annotated[
        Path | None, typer.Option(help="The record of all samples.  [default: results/run.json or cold.json]")
    ] = None,
) -> None:
    """Time every way in every cell, in turns, and write all samples as JSON."""
    if cells not in ("all", "must"):
        raise typer.BadParameter(f"{cells!r}: expected all or must", param_hint="--cells")
    wanted = c.all_cells(
        _known(layouts.split(","), c.LAYOUTS), _known(specs.split(";"), c.SPECS), _numbers(ranks),
        only_must=cells == "must",
    )  # fmt: skip
    chosen = default_ways(say) if ways == "all" else _known(ways.split(","), (*c.WAYS, *c.MODES))
    files = make(data, size, sorted({cell.layout for cell in wanted}), say)
    target = out or RESULTS / ("cold.json" if cold else "run.json")
    measure(wanted, files, chosen, repeats=repeats, cold=cold, out=target, say=say)
    if small and (layouts, cells, cold) == (ALL_LAYOUTS, "all", False):
        small_chunks(repeats=repeats, data=data, out=target.with_name("chunks.json"))
        many_command(repeats=repeats, data=data, results=target.parent)
    typer.echo(target)


@app.command("field")
def field_command(repeats: Repeats = 5, data: Data = DATA_FOLDER, results: Results = RESULTS) -> None:
    """Time a real field: 240 years of air temperature on a map, as slabs on four ranks."""
    file = field(data)
    wanted = [c.Cell(file.layout, "a", FIELD_RANKS)]
    measure(wanted, {file.layout: file}, default_ways(say), repeats=repeats, out=results / "field.json", say=say, kind="field")


@app.command("small-chunks")
def small_chunks(
    size: Size = 384,
    layouts: Layouts = SMALL_CHUNKS,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "1,4",
    ways: Annotated[str, typer.Option(help="As for `run`.")] = "shardload,slice,tensorstore,floor",
    repeats: Repeats = 5,
    data: Data = DATA_FOLDER,
    out: Annotated[Path, typer.Option(help="The record.")] = RESULTS / "chunks.json",
    profile: Annotated[
        bool, typer.Option("--profile", help="Say where the CPU time of a chunk goes, and write no record.")
    ] = False,
) -> None:
    """Time files in chunks of 16^3 and 32^3, of which there are so many that what is done for each of them counts."""
    wanted = c.small_chunk_cells(_known(layouts.split(","), c.SMALL_CHUNK_LAYOUTS), _numbers(ranks))
    chosen = _known(ways.split(","), (*c.WAYS, *c.MODES))
    files = make(data, size, sorted({cell.layout for cell in wanted}), say)
    if profile:
        profile_chunks(files, sorted({cell.ranks for cell in wanted}), wanted[0].spec, repeats, typer.echo)
        return
    measure(wanted, files, chosen, repeats=repeats, out=out, say=say, kind="chunks")


@app.command("many")
def many_command(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "4,8",
    cells: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(c.MANY),
    ways: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(c.MANY_WAYS),
    series: Annotated[int, typer.Option(min=1, help="Arrays of 6 MiB.")] = 40,
    tiny: Annotated[int, typer.Option(min=1, help="Arrays of 4 KiB.")] = 1000,
    repeats: Repeats = 5,
    data: Data = DATA_FOLDER,
    results: Results = RESULTS,
) -> None:
    """Time many arrays in one call (40 of 6 MiB, 1,000 of 4 KiB), and small ones: a real field of 1.7 MB, and 1 KiB."""
    names, numbers, chosen = _known(cells.split(","), tuple(c.MANY)), _numbers(ranks), _known(ways.split(","), c.MANY_WAYS)
    files = many(data, series, tiny)
    record = measure_many({name: files[name] for name in names}, numbers, chosen, repeats, say)
    write_record(results / "many.json", record)


@app.command()
def scatter(size: Size = 512, ranks: Ranks = 4, repeats: Repeats = 5, results: Results = RESULTS) -> None:
    """Time scatters from rank 0's memory: shardload.scatter, comm.scatter, comm.Scatterv."""
    write_record(results / "scatter.json", measure_scatter(size, ranks, repeats, say))


@app.command()
def small(ranks: Ranks = 4, repeats: Repeats = 20, data: Data = DATA_FOLDER, results: Results = RESULTS) -> None:
    """Time loads of 1 KiB: the first call, and later calls."""
    write_record(results / "small.json", measure_small(data, ranks, repeats, say))


@app.command()
def memory(
    size: Size = 512,
    layouts: Layouts = ALL_LAYOUTS,
    ranks: Ranks = 4,
    spec: str = "-,a,b",
    staging: Annotated[
        str, typer.Option(help="The memory limit: small compared with the array, so that exceeding it shows.")
    ] = "64MiB",
    data: Data = DATA_FOLDER,
    results: Results = RESULTS,
) -> None:
    """Measure the peak host memory of every rank, in every way of reading and layout. Exit code 1 if it exceeds the limit."""
    record = measure_memory(data, size, _known(layouts.split(","), c.LAYOUTS), ranks, spec, _nbytes(staging), say)
    write_record(results / "memory.json", record)
    if not all(cell.get("ok") for cell in record["cells"]):
        raise typer.Exit(1)


@app.command("fuzz")
def fuzz_command(
    cases: Annotated[int, typer.Option(min=1, help="Damaged files that are loaded.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the mutations; the same seed makes the same files.")] = 1,
    first: Annotated[int, typer.Option(min=0, help="Number of the first case: to repeat one.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    out: Annotated[Path, typer.Option(help="The record.")] = RESULTS / "fuzz.json",
) -> None:
    """Load damaged files: right values or an error, never a crash, a hang or wrong values. Exit code 1 if there is one."""
    found = fuzz(seed, cases, first=first, n_workers=workers, say=say)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found.record(), indent=1) + "\n")
    typer.echo(found.table())
    if found.bad:
        raise typer.Exit(1)


@app.command("fuzz-filters")
def fuzz_filters_command(
    cases: Annotated[int, typer.Option(min=1, help="Damaged files that are read.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Of the mutations; the same seed makes the same files.")] = 1,
    first: Annotated[int, typer.Option(min=0, help="Number of the first case.")] = 0,
    minutes: Annotated[float, typer.Option(min=0, help="No more cases after this time; 0: no limit.")] = 0,
    only: Annotated[str, typer.Option(help="Part of the names of kinds: 'szip', 'zarr3'.")] = "",
    out: Annotated[Path, typer.Option(help="The record.")] = RESULTS / "fuzz-filters.json",
) -> None:
    """Read damaged data with every filter of HDF5, hdf5plugin and numcodecs. Exit code 1 if an allowed one fails."""
    seconds = minutes * 60 or float("inf")
    found = fuzz_filters(seed, cases, first=first, seconds=seconds, only=only, say=say)
    write_record(out, found.record())
    typer.echo(found.table())
    if found.broken_promises():
        typer.echo(f"allowed by default, but failed: {', '.join(found.broken_promises())}")
        raise typer.Exit(1)


@app.command()
def verify(
    sizes: Annotated[str, typer.Option(help="Elements along each of three axes, separated by commas.")] = "256,512",
    layouts: Layouts = VERIFY_LAYOUTS,
    specs: Annotated[str, typer.Option(help="Separated by ';'.")] = "a,b;-,a,b",
    ranks: Ranks = 4,
    repeats: Repeats = 5,
    data: Data = DATA_FOLDER,
    results: Results = RESULTS,
) -> None:
    """Measure what each level of verify= costs: index, checksum, file, full."""
    chosen = _known(layouts.split(","), c.LAYOUTS)
    numbers = [_size(size) for size in _numbers(sizes)]
    record = measure_verification(data, numbers, chosen, ranks, _known(specs.split(";"), c.SPECS), repeats, say)
    write_record(results / "verify.json", record)


@app.command()
def devices(
    size: Size = 256,
    layouts: Layouts = DEVICES_LAYOUTS,
    specs: Annotated[str, typer.Option(help="Separated by ';'.")] = ";".join(SPECS),
    jobs: Annotated[str, typer.Option(help="Processes x devices of each, separated by commas.")] = ",".join(JOBS),
    repeats: Repeats = 5,
    data: Data = DATA_FOLDER,
    results: Results = RESULTS,
) -> None:
    """Time several devices in a process: every way of reading, and reading everything with device_put."""
    chosen = _known(layouts.split(","), c.LAYOUTS)
    for job in jobs.split(","):
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", job):
            raise typer.BadParameter(f"{job!r}: expected such as {JOBS[-1]}", param_hint="--jobs")
    record = measure_devices(data, size, chosen, _known(specs.split(";"), c.SPECS), jobs.split(","), repeats, say)
    write_record(results / "devices.json", record)


@app.command()
def grid(
    size: Size = 160,
    layouts: Layouts = GRID_LAYOUTS,
    specs: Annotated[str, typer.Option(help="Separated by ';'.")] = ";".join(g.SPECS),
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = ",".join(map(str, g.RANKS)),
    file_systems: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(g.FILE_SYSTEMS),
    networks: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(g.NETWORKS),
    repeats: Repeats = 1,
    by_links: Annotated[
        bool, typer.Option("--links", help="Let the kernel limit the network: as root, with tc; each rank is a node.")
    ] = False,
    data: Data = DATA_FOLDER,
    out: Annotated[Path, typer.Option(help="The record.")] = RESULTS / "grid.json",
) -> None:
    """Time every way of reading on nodes whose file system and network are slowed down, beside what plans say of it."""
    if by_links and (why := why_not()):
        raise typer.BadParameter(why, param_hint="--links")
    asked: dict[str, Any] = {
        "specs": _known(specs.split(";"), c.SPECS),
        "ranks": _numbers(ranks),
        "file_systems": _known(file_systems.split(","), tuple(g.FILE_SYSTEMS)),
        "networks": _known(networks.split(","), tuple(g.NETWORKS)),
    }
    files = make(data, size, _known(layouts.split(","), g.LAYOUTS), say)
    record = g.measure_grid(
        files,
        data,
        **asked,
        repeats=repeats,
        by_links=by_links,
        out=out,
        say=say,
    )
    typer.echo(g.table(record))


@app.command("save")
def save_command(
    size: Size = 512,
    layouts: Layouts = SAVE_LAYOUTS,
    specs: Annotated[str, typer.Option(help="Separated by ';'.")] = ";".join(s.SAVE_SPECS),
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = ",".join(map(str, s.SAVE_RANKS)),
    ways: Annotated[
        str, typer.Option(help=f"Separated by commas, or all that are installed: {', '.join(s.SAVE_WAYS)}.")
    ] = "all",
    repeats: Annotated[int, typer.Option(min=1, help="Timed saves of each way; of a peer that takes long, one.")] = 5,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out the cells that the record has already.")] = False,
    minutes: Annotated[float, typer.Option(min=0, help="Begin no cell that would end later; 0: no limit.")] = 0,
    memory: Annotated[bool, typer.Option("--memory", help="Measure memory, not time. Exit code 1 if it is too much.")] = False,
    staging: Annotated[str, typer.Option(help="With --memory: the limit.")] = "64MiB",
    data: Data = DATA_FOLDER,
    folder: Annotated[
        Path | None, typer.Option(help="Where files are written, and removed again.  [default: in memory, /dev/shm]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The record.  [default: results/save.json; with --memory results/save-memory.json]")
    ] = None,
) -> None:
    """Time saves: shardload, gathering on rank 0, parallel HDF5, zarr-python, TensorStore, Orbax, and the floor."""
    wanted = s.save_cells(_known(layouts.split(","), s.SAVE_LAYOUTS), _known(specs.split(";"), c.SPECS), _numbers(ranks))
    reference = reference_of(data, size, say)
    target = folder or saves.default_folder(data, 4 * size**3)
    if memory:
        record = saves.measure_save_memory(wanted, reference, target, staging_nbytes=_nbytes(staging), say=say)
        write_record(out or RESULTS / "save-memory.json", record)
        typer.echo("\n".join(saves.save_memory_table(record)))
        if not all(cell["ok"] for cell in record["cells"] if cell["way"] == c.OURS):
            raise typer.Exit(1)
        return
    chosen = saves.default_ways(say) if ways == "all" else _known(ways.split(","), s.SAVE_WAYS)
    out = out or RESULTS / "save.json"
    saves.measure_saves(wanted, reference, target, chosen, repeats=repeats, out=out, say=say, resume=resume, minutes=minutes)
    typer.echo(out)


@app.command("copy")
def copy_command(
    size: Size = 512,
    ways: Annotated[str, typer.Option(help=f"Separated by commas, or all: {', '.join(rechunking.COPY_WAYS)}.")] = "all",
    ranks: Ranks = 4,
    staging: Annotated[str, typer.Option(help="Of each rank of shardload.")] = "128MiB",
    repeats: Repeats = 3,
    data: Data = DATA_FOLDER,
    folder: Annotated[
        Path | None, typer.Option(help="Where files are written, and removed again.  [default: in memory, /dev/shm]")
    ] = None,
    out: Annotated[Path, typer.Option(help="The record.")] = RESULTS / "copy.json",
) -> None:
    """Time copies of gzip planes to cubes: shardload, h5repack, nccopy, dask, and loops; and their memory."""
    chosen = _known(list(rechunking.COPY_WAYS) if ways == "all" else ways.split(","), tuple(rechunking.COPY_WAYS))
    for way in chosen:
        if why := rechunking.missing(way):
            say(f"without {way}: {why}")
    (file,) = make(data, size, ["hdf5-gzip-planes"], say).values()
    target = folder or saves.default_folder(data, 4 * size**3)
    there = [way for way in chosen if not rechunking.missing(way)]
    record = rechunking.measure_copies(file, target, there, ranks=ranks, staging=staging, repeats=repeats, out=out, say=say)
    write_record(out, record)
    typer.echo("\n".join(rechunking.copy_table(record)))


@app.command("streams")
def streams_command(
    size: Annotated[int, typer.Option(min=80, help="Steps of the array, each of 416 KiB.")] = st.N_STEPS,
    cells: Annotated[str, typer.Option(help="Separated by ';': each cell whose name begins so.  [default: all]")] = "",
    ways: Annotated[str, typer.Option(help=f"Separated by commas, or all: {', '.join(st.STREAM_WAYS)}.")] = "all",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each way; of one that takes long, one.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of a run that is no whole epoch.")] = 3.0,
    data: Data = DATA_FOLDER,
    out: Annotated[Path, typer.Option(help="The record; the plot lies beside it.")] = RESULTS / "streams.json",
) -> None:
    """Time streams of batches: shardload, slicing, Grain, TensorStore, xbatcher, mosaicml-streaming. About 12 minutes."""
    begins = [name.strip() for name in cells.split(";") if name.strip()]
    wanted = [cell for cell in st.STREAM_CELLS if not begins or cell.name.startswith(tuple(begins))]
    if not wanted:
        raise typer.BadParameter(
            f"{cells!r}: expected some of {'; '.join(c.name for c in st.STREAM_CELLS)}", param_hint="--cells"
        )
    chosen = _known(list(st.STREAM_WAYS) if ways == "all" else ways.split(","), st.STREAM_WAYS)
    files = st.make_stream_files(data, size, sorted({cell.layout for cell in wanted}), say)
    record = measure_streams(wanted, files, chosen, repeats=repeats, seconds=seconds, out=out, say=say)
    plot_streams(record, out.with_suffix(".svg"))
    typer.echo(streams_section(record))


@app.command("stores")
def stores_command(
    size: Size = 512,
    layouts: Layouts = STORE_LAYOUTS,
    specs: Annotated[str, typer.Option(help="Separated by ';'.")] = STORE_SPECS,
    ways: Annotated[str, typer.Option(help=f"Separated by commas, or all: {', '.join(o.STORE_WAYS)}.")] = "all",
    ranks: Ranks = o.STORE_RANKS,
    steps: Annotated[int, typer.Option(min=0, help="Of the array that is streamed, each of 416 KiB; 0: no stream.")] = 4800,
    repeats: Annotated[int, typer.Option(min=1, help="Timed loads of each way; of one that takes long, one.")] = 3,
    data: Data = DATA_FOLDER,
    out: Annotated[Path, typer.Option(help="The record; table and plot lie beside it.")] = RESULTS / "stores.json",
) -> None:
    """Time loads from a store of 20 ms and 60 MB/s a connection: shardload, s3fs, obstore, TensorStore, VirtualiZarr. About 8
    minutes.
    """
    if why := store_server.missing():
        raise typer.BadParameter(why, param_hint="stores")
    if steps and ranks != o.STORE_RANKS:
        raise typer.BadParameter(f"the stream needs {o.STORE_RANKS}: pass --steps 0 for loads alone", param_hint="--ranks")
    chosen, data = _known(layouts.split(","), o.STORE_LAYOUTS), data.resolve()
    cells = o.store_cells(chosen, _known(specs.split(";"), c.SPECS))
    wanted = _known(list(o.STORE_WAYS) if ways == "all" else ways.split(","), o.STORE_WAYS)
    files = make(data, size, [layout for layout in chosen if layout != o.SMALL], say)
    if o.SMALL in chosen:
        files |= make(data, size * 3 // 4, [o.SMALL], say)
    stream = st.make_stream_files(data, steps, [o.STREAM_LAYOUT], say)[o.STREAM_LAYOUT] if steps else None
    with store_server.StoreServer(data) as server:
        record = measure_stores(
            cells, files, wanted, server, data, repeats=repeats, ranks=ranks, stream=stream, out=out, say=say
        )
    show_stores(record, out)
    typer.echo(stores_section(record))


def show_stores(record: dict[str, Any], out: Path) -> None:
    """Table and plot, beside the record."""
    out.with_suffix(".md").write_text(stores_page(record))
    plot_stores(record, out.with_suffix(".svg"))


@app.command()
def heat() -> None:
    """Install Heat (with PyTorch, a large download) into .venv-heat, once."""
    make_heat()


@app.command()
def report(results: Results = RESULTS) -> None:
    """Make tables and plots from the records: table.md, ratios.svg, docs/explanation/speed.md. Measuring changes none."""
    records = read_records(results)
    if not records:
        raise typer.BadParameter(f"{results} has no records", param_hint="--results")
    for kind, name in (("run", "ratios.svg"), ("cold", "ratios-cold.svg")):
        if kind in records and records[kind]["cells"]:
            plot(records[kind], results / name)
    if results == RESULTS:
        _show_saves(records)
    typer.echo(write_report(results, records).read_text())


def _show_saves(records: dict[str, Any]) -> None:
    """The tables and the figures of the pages for users."""
    if records.get("streams", {}).get("cells"):
        put_section(DOCS / "streams.md", "streams", streams_section(records["streams"]))
        plot_streams(records["streams"], RESULTS / "streams.svg")
    if records.get("stores", {}).get("cells"):
        put_section(DOCS / "remote.md", "stores", stores_section(records["stores"]))
        show_stores(records["stores"], RESULTS / "stores.json")
    if records.get("save", {}).get("cells"):
        put_section(DOCS / "explanation" / "speed.md", "save", save_section(records["save"]))
        plot_saves(records["save"], DOCS / "figures" / "save.svg")
    if records.get("copy", {}).get("cells"):
        put_section(DOCS / "explanation" / "speed.md", "copy", copy_section(records["copy"]))


@app.command("all")
def everything(
    size: Size = 256,
    large: Annotated[int, typer.Option(callback=_size, help="The same, for scatter and memory, which are quick.")] = 512,
    repeats: Repeats = 3,
    data: Data = DATA_FOLDER,
    results: Results = RESULTS,
) -> None:
    """Do all of the above. At the default sizes it takes about a quarter of an hour on 2 cores."""
    steps: list[tuple[Any, dict[str, Any]]] = [
        (heat, {}),
        (run, {"size": size, "repeats": repeats, "data": data, "out": results / "run.json"}),
        (scatter, {"size": large, "repeats": repeats, "results": results}),
        (small, {"data": data, "results": results}),
        (verify, {"sizes": str(size), "repeats": repeats, "data": data, "results": results}),
        (devices, {"size": size, "repeats": repeats, "data": data, "results": results}),
        (save_command, {"size": size, "specs": "-,a,b", "repeats": repeats, "data": data, "out": results / "save.json"}),
        (memory, {"size": large, "layouts": MEMORY_LAYOUTS, "data": data, "results": results}),
        (field_command, {"repeats": repeats, "data": data, "results": results}),
        (report, {"results": results}),
    ]
    for step, options in steps:
        say(f"--- {step.__name__}")
        try:
            step(**options)
        except Exception as error:  # one part that cannot be had here must not cost the others
            say(f"{step.__name__} failed: {error}")
        except typer.Exit:
            say(f"{step.__name__}: not all is as promised")


def _numbers(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise typer.BadParameter(f"{text!r}: expected numbers from 1 on, separated by commas")
    return [int(number) for number in numbers]


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--staging") from None


def _known(names: list[str], known: tuple[str, ...]) -> list[str]:
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r}: expected one of {', '.join(known)}")
    return names


if __name__ == "__main__":
    app()
