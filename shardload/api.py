"""What can a caller do with arrays in files? `load`, `plan`, `scatter`, `stream`, `verify`, `save`, `append`; and more.

1. `load` opens the file, agrees with the other ranks, plans, reads and exchanges, assembles, and verifies. A small array takes
   a shorter way: only rank 0 opens the file, and sends the values to all ranks together with the metadata.
2. `plan` stops after planning. `Plan.execute` does the rest.
3. `scatter` is a load from the memory of one rank instead of a file.
4. `verify` plans the load that would give the array, then compares the array with the file instead of loading it again.
5. `save` writes arrays into one new file; `plan_save` says what it would do.
6. `append` adds rows to arrays of a Zarr store, or of an HDF5 or netCDF4 file.
7. `stream` gives an array in batches, the next ones under way.
8. `mask` says which elements of a loaded array are the file's; `unpad` returns these alone.

Names, and what belongs to a single array (mesh, spec, select, dtype, pad, halo, edge), may be trees: docs/many-arrays.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from shardload.arrays.padding import Extent, cut_out, extent_of, make_mask, to_numpy
from shardload.arrays.sharding import refuse_unreduced
from shardload.errors import ConfigError
from shardload.jobs.loading.call import LoadCall
from shardload.jobs.loading.given_arrays import ScatterCall, VerifyCall, load_state
from shardload.jobs.loading.plan import Plan, TreePlan
from shardload.jobs.streaming.request import StreamCall
from shardload.jobs.streaming.stream import Stream
from shardload.options import DEFAULTS, Progress, defaults_of, keywords_of, with_defaults

if TYPE_CHECKING:
    from shardload.jobs.saving.append import AppendReport
    from shardload.jobs.saving.plan import SavePlan

_SAVE = defaults_of("save")
_APPEND = defaults_of("append")

# Type checkers cannot know whether a call returns an array or a tree of them. Tell them: ``x: jax.Array = load(...)``.


def load(
    path: Any,
    mesh: Any = None,
    spec: Any = None,
    *,
    like: Any = DEFAULTS.like,
    dataset: Any = DEFAULTS.dataset,
    select: Any = DEFAULTS.select,
    dtype: Any = DEFAULTS.dtype,
    decode: bool | str | None = DEFAULTS.decode,
    pad: Any = DEFAULTS.pad,
    halo: Any = DEFAULTS.halo,
    edge: Any = DEFAULTS.edge,
    readers: str | int = DEFAULTS.readers,
    staging: str | int = DEFAULTS.staging,
    verify: str = DEFAULTS.verify,
    comm: Any = DEFAULTS.comm,
    progress: Progress = DEFAULTS.progress,
    timeout: float | None = DEFAULTS.timeout,
    missing: str = DEFAULTS.missing,
    allow_external: bool = DEFAULTS.allow_external,
    untrusted: bool = DEFAULTS.untrusted,
    allow_filters: Any = DEFAULTS.allow_filters,
    storage: Mapping[str, Any] | None = DEFAULTS.storage,
) -> Any:
    """Load arrays of HDF5, netCDF4 or Zarr files into sharded `jax.Array` objects; check that each shard is where it belongs.

    One array, or a tree of them in one job: see `dataset`. For a tree, `mesh`, `spec`, `select`, `dtype`, `decode`, `pad`,
    `halo` and `edge` are single values or prefix trees, as `jax.jit` takes for ``in_shardings``: docs/many-arrays.md.

    Collective: yes, over `comm`. Every rank passes the same arguments, and all return or all raise the same error.

    Call it outside of `jax.jit`, and pass the array in as an argument. Inside, the file is read once, while the function is
    traced: the values are a constant of the compiled function, also if the file changes. With several processes that is an
    error of JAX.

    Parameters
    ----------
    path : str, PathLike, (obstore store, str), h5py.Dataset, zarr.Array or tree of them
        The file (``"data.h5"``), the file and the array's name in it (``"data.h5:/group/rho"``), or an open array. A URL, or a
        store of obstore and a key in it, is an object in a store: ``"s3://bucket/run.h5:/rho"``. Several files that are one:
        what `concat` returns.
    mesh : jax.sharding.Mesh or NamedSharding
        The mesh of devices. Or a NamedSharding, which has both the mesh and the spec.
    like : pytree, optional
        In place of `mesh`, `spec` and `dataset`: a state as it was saved (dicts, NamedTuples, dataclasses, an optimizer's
        state), or of `jax.ShapeDtypeStruct`. What is returned has its structure, shardings and kinds of numbers.
    spec : PartitionSpec or dict, optional
        Which mesh axes cut which array axis: ``P("a", "b")``. Or by names of the file's axes, ``{"lat": "a", "lon": "b"}``: the
        others are whole. Leave it out with a NamedSharding.
    dataset : str or tree of str, optional
        Name of the array in the file. Optional if the file has exactly one array. A dict, list or other tree of names gives the
        same tree of arrays; ``"group/*"`` and ``"*"`` give nested dicts of all arrays below.
    select : slice, int or tuple of them, or dict, optional
        The region of the array to load, as NumPy would index it, with step 1. An integer drops its axis. Or by names of axes,
        ``{"time": -1, "lat": slice(10, 50)}``; `near` and `between` select by coordinate: ``{"lat": between(30, 60)}``,
        ``{"time": between("2001-06", "2002-05")}``.
    dtype : dtype, optional
        Cast the values to this dtype. By default the file's dtype is kept exactly; if JAX cannot hold it, that is an error. So
        is a value that this dtype cannot hold, and an integer that it would round: identifiers may not become others.
        With `decode`, decoded values are cast.
    decode : bool or None
        True turns stored numbers into values by their attributes, as xarray does: ``_Unsigned``, fill values (NaN),
        ``scale_factor``, ``add_offset``. Times stay numbers.
        False loads the stored numbers. None, too, and a `PackedWarning` on rank 0 says if those are packed.
    pad : number, optional
        Fill value. Axes that do not divide evenly over the mesh are padded at their end with it; `Plan.shape` is then the
        shape without padding. By default such an axis is an error.
    halo : int or tuple of int
        Rows of its neighbours that each shard has on either side: ``2`` on each axis that the spec cuts, ``(2, 1)`` on axes 0
        and 1, ``(0, 0, 1)`` on axis 2. The array has the shards side by side: an axis of N elements in n shards becomes
        ``N + 2 * halo * n`` long, as after padding each shard and `jaxdecomp.halo_exchange`. Not wider than a shard.
    edge : {"wrap", "edge"} or number, or a tuple of them
        What a halo has beyond the ends of the array: the rows of its other end (``"wrap"``), its last row again (``"edge"``),
        or this value. One for all axes, or one per axis as for `halo`.
    readers : {"auto", "root", "parallel", "direct"} or int
        Who reads. ``"root"``: rank 0 alone. ``"parallel"``: all ranks, on several nodes fewer for small arrays, and each chunk
        is decoded once in the job. ``"direct"``: each process reads what its own devices hold. An int: at most so many ranks.
        ``"auto"``: the cheapest way by the plan.
    staging : str or int
        Cap on each process's host memory beyond its own pieces: bytes, or text such as ``"1GiB"``. ``"auto"`` is 256 MiB, or
        what the file's chunks need if that is more, within a quarter of the memory that a process may use (its share of the
        node's, or of a control group's limit). `Plan.staging_nbytes` says how much.
    verify : {"index", "checksum", "file", "full"}
        How to verify; each level includes those before it. ``"index"``: match every shard to the region that JAX asks for.
        ``"checksum"``: also checksum every part from the reader's block to the host piece, and the shards on the devices, with
        replicas on other processes. ``"file"``: each process also reads a few random regions of its shards again, with the
        format's own library, and compares them bit by bit with its devices. ``"full"``: the same for all elements.
        ``Plan.report.proven`` has the result.
    comm : mpi4py.MPI.Comm, optional
        The ranks that take part: at least every process of the mesh. Default: COMM_WORLD.
    progress : bool or callable, optional
        True shows a progress bar on rank 0; None shows it for large loads in a terminal (also under mpiexec and srun on this
        machine) or a notebook, and elsewhere prints a line each 30 s. Or a function ``(done_nbytes, total_nbytes)``, called on
        every rank.
    timeout : float or None
        Seconds. If nothing moves on any rank for this long, every rank raises `StallError`, which names the late ranks. None:
        wait for ever.
    missing : {"warn", "error", "fill"}
        What to do about missing chunks (not stored in the file): one `MissingChunksWarning` on rank 0, a SourceError on every
        rank, or nothing. Their values are the file's fill value, and `LoadReport.chunks_missing` counts them.
    allow_external : bool
        True allows the file to refer to data outside its folder (a Zarr store: outside itself), by external links, virtual
        datasets or symbolic links. By default such a file is refused.
    untrusted : bool
        True opens and decodes the file in helper processes only, with limits on memory (`staging`) and time. A file that
        crashes a library, makes it loop or take too much memory is then a SourceError. Slower; needs a path. Helpers may use
        all filters, so `allow_filters` is not needed.
    allow_filters : str, int or list of them
        Filters (Zarr: codecs), by name or number, to use although damaged data can crash or hang their decoders:
        ``"bitshuffle"``, ``["zfp", 32024]``, ``"all"``. By default an array that needs such a filter is refused, and the error
        names the filter. Filters that withstand damage (gzip, Zstandard, Blosc, LZF and others: docs/trust-files.md) are
        always allowed.
    storage : dict, optional
        How the store of a URL is reached, in obstore's words: ``{"region": "us-west-2", "skip_signature": True}``. Keys are
        better in the environment or in a profile: ``{"profile": "name"}``. Its values are never printed. See docs/remote.md.

    Returns
    -------
    jax.Array or tree of jax.Array
        The array, with the selected shape (with padding and halos), the file's dtype (or `dtype`) and the given sharding. Of a
        tree, all arrays or none.

    Raises
    ------
    ConfigError
        The arguments or the launch are wrong.
    SourceError
        The file does not exist, is damaged or cannot be loaded.
    PeerError
        Ranks disagree, or one rank failed for a reason of its own.
    StallError
        Nothing moved for `timeout` seconds. After it the ranks can make no further call together, and the job ends when the
        first of them ends.

    Examples
    --------
    >>> import h5py, jax, numpy as np, shardload
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> shardload.initialize()
    >>> if jax.process_index() == 0:
    ...     with h5py.File("data.h5", "w") as file:
    ...         file["density"] = np.ones((8, 8, 4), "float32")
    >>> b = 2 if jax.device_count() % 2 == 0 else 1
    >>> mesh = Mesh(np.array(jax.devices()).reshape(-1, b), ("a", "b"))  # of the devices there are
    >>> x = shardload.load("data.h5", mesh, P("a", "b"))
    >>> x.shape, float(x.sum())
    ((8, 8, 4), 256.0)
    """
    options = keywords_of("load", locals())
    if options.pop("like") is not None:
        if (mesh, spec, dataset) != (None, None, None):
            raise ConfigError("like is a state, which says what to load and where: leave out mesh, spec and dataset")
        return load_state(path, like, options)
    with LoadCall("load", path, mesh, spec, options).begin() as call:
        return call.load()


def plan(path: Any, mesh: Any, spec: Any = None, *, dataset: Any = DEFAULTS.dataset, **options: Any) -> Any:
    """Plan what `load` with the same arguments would do, without doing it. ``print(plan)`` shows it.

    It reads the file's metadata, but no values. With a `jax.sharding.AbstractMesh` it needs no devices and no MPI.

    Collective: yes, over `comm`; no with an AbstractMesh.

    Parameters
    ----------
    path, mesh, spec and all options
        As in `load`.
    processes : int, optional
        Only with an AbstractMesh: how many processes to plan for. Each gets the same number of devices, in the order of the
        mesh. By default each device is a process of its own.
    ranks_per_node : int, optional
        Only with an AbstractMesh: how many processes share a node, in order. By default all.

    Returns
    -------
    Plan or TreePlan
        Plain fields to inspect, and ``execute()`` to do it. A TreePlan for a tree of arrays.

    Raises
    ------
    ConfigError, SourceError, PeerError, StallError
        As `load` does.
    """
    keywords = with_defaults("plan", {"dataset": dataset, **options})
    with LoadCall("plan", path, mesh, spec, keywords).begin() as call:
        return call.hand_out(call.plan())


def stream(
    path: Any,
    mesh: Any,
    spec: Any = None,
    *,
    dataset: Any = DEFAULTS.dataset,
    along: str | int = DEFAULTS.along,
    batch: int | None = DEFAULTS.batch,
    window: Any = DEFAULTS.window,
    shuffle: int | None = DEFAULTS.shuffle,
    epochs: int | None = DEFAULTS.epochs,
    remainder: str = DEFAULTS.remainder,
    border: str = DEFAULTS.border,
    gaps: str = DEFAULTS.gaps,
    pool: str | int = DEFAULTS.pool,
    prefetch: int = DEFAULTS.prefetch,
    scale: Any = DEFAULTS.scale,
    stack: Any = DEFAULTS.stack,
    select: Any = DEFAULTS.select,
    dtype: Any = DEFAULTS.dtype,
    decode: bool | str | None = DEFAULTS.decode,
    pad: Any = DEFAULTS.pad,
    missing: str = DEFAULTS.missing,
    readers: str | int = DEFAULTS.readers,
    staging: str | int = DEFAULTS.staging,
    verify: str = DEFAULTS.verify,
    comm: Any = DEFAULTS.comm,
    timeout: float | None = DEFAULTS.timeout,
    allow_external: bool = DEFAULTS.allow_external,
    untrusted: bool = DEFAULTS.untrusted,
    allow_filters: Any = DEFAULTS.allow_filters,
    storage: Mapping[str, Any] | None = DEFAULTS.storage,
) -> Stream:
    """Give arrays of HDF5, netCDF4 or Zarr files in batches, in an order that depends neither on the mesh nor on the ranks.

    A sample is a step along an axis of the array (a time), or a window of steps. Its other axes may be cut over devices like
    those of any array. Each chunk is decoded by one rank, which sends every rank what its devices need; the next batches are
    read and sent while the program computes. Which chunks and which `pool`, and how much memory: docs/streams.md.

    Collective: yes, over `comm`. So are ``iter(ds)``, each ``next``, and ``ds[k]``: every rank takes the same batches.

    Parameters
    ----------
    path, mesh, dataset
        As in `load`. With a tree of names each batch is such a tree; two leaves may name the same array, which is read once.
    spec : PartitionSpec or dict, optional
        Which mesh axes cut which axis of a *batch*: samples first, then the axis of the window if it has one (never cut), then
        the other axes of the array. ``P("data", None, "lat")``. By names of axes, ``{"time": "data", "lat": "lat"}``: that of
        the steps stands for the samples. A spec for several arrays has the window's axis if one of them
        has it; it is passed over where an array has none.
    along : str or int
        The axis of the steps, by its name in the file or its number there.
    batch : int, optional
        Samples of a batch. None: single steps, without an axis for them.
    window : int, tuple of int or range, or tree of them
        The steps of a sample, counted from its anchor. A tuple gives an axis behind that of the samples, ``(-1, 0)``; an
        integer none: ``{"x": (-1, 0), "y": 1}`` has two steps for input, and the next one to be predicted. None: 0.
    shuffle : int, optional
        Seed of a random order, another one in each epoch. None: samples ascend.
    epochs : int, optional
        How often all samples are given. None: without end.
    remainder : {"drop", "pad", "error"}
        Samples at the end of an epoch that do not fill a batch: they are left out, or the batch is filled up with `pad` (0 if
        that is None), and `StreamIterator.mask` says which samples are real; or they are an error.
    border : {"reread", "drop"}
        Shuffled windows that reach over the border of two blocks: the chunks behind it are read for them too, or such samples
        are left out.
    gaps : {"error", "skip", "ignore"}
        What to do if windows of several steps would reach over a gap: a place where the coordinate of the axis (the array of
        its name in the file, if it is numbers) goes on by more than 1.5 times the median, or back. An error that names the
        first gap, or such samples are left out, or the coordinate is not looked at (pressure levels have no equal distances).
        Unless it is "ignore", arrays whose coordinates have different steps are an error, too.
    pool : str or int
        How many bytes of steps the whole job may hold for a shuffled order: the more, the better samples are mixed, and the
        less often chunks are read again. ``"auto"``: a tenth of the selection, at least three blocks, at most 64 GiB. The order
        follows from it; so that it does not follow from `dtype` and `decode`, bytes are those of the file's dtype.
    prefetch : int
        Batches that are made ahead, by two threads. 0: each is made inside ``next``, and no thread calls MPI.
    scale : tuple of 2 arrays or numbers, or tree of them
        Mean and standard deviation. Values become ``(x - mean) / deviation``, in their dtype, as NumPy computes it. Arrays must
        fit the axes of a step, without that of the stream: shape ``(13, 1, 1)`` for 13 levels. A dict names each array of a
        batch, with None for one that stays as it is.
    stack : str, optional, or tree of str
        Make one array of a tree of arrays, in the order of the tree (dicts by sorted key), along this axis. If the arrays have
        an axis of this name, they are put one behind the other along it; else it is a new one, behind that of the window. It is
        an axis of the spec, and not cut. ``stack={"x": "channel", "y": None}`` counts for the arrays below ``"x"``.
    select, dtype, decode
        As in `load`. Steps and anchors are counted from the first selected one.
    pad : number, optional
        As in `load`, for the axes of a step. The samples of a batch are not padded: `batch` must be a multiple of their shards.
    missing : {"warn", "error", "fill"}
        What to do about missing chunks (not stored in the file): a `MissingChunksWarning` on the rank that reads the first one
        of an array, a SourceError on every rank, or nothing. Their values are the file's fill value.
    readers : {"auto", "root", "parallel", "direct"} or int
        As in `load`: ``"auto"`` and ``"parallel"`` are all ranks. Not ``"direct"``.
    staging : str or int
        As in `load`: buffers for reading and sending, in addition to steps and batches.
    verify : {"index", "checksum", "file", "full"}
        As in `load`, for each batch. Not ``"file"`` and ``"full"``.
    comm, timeout, allow_external, untrusted, allow_filters, storage
        As in `load`.

    Returns
    -------
    Stream
        ``len(ds)``, ``ds[k]``, ``ds.order(epoch)``, ``ds.plan``; and ``iter(ds)``, with ``get_state`` and ``set_state``.

    Raises
    ------
    ConfigError
        The arguments or the launch are wrong.
    SourceError
        The file does not exist, is damaged or cannot be loaded. A damaged chunk is an error when its batch is asked for, after
        all batches before it.
    PeerError
        Ranks disagree, or one rank failed for a reason of its own.
    StallError
        Nothing moved for `timeout` seconds while a rank waited for a batch.

    Examples
    --------
    >>> import h5py, jax, numpy as np, shardload
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> shardload.initialize()
    >>> if jax.process_index() == 0:
    ...     with h5py.File("steps.h5", "w") as file:
    ...         _ = file.create_dataset("t2m", data=np.arange(40, dtype="f4").reshape(10, 4), chunks=(5, 4))
    >>> mesh = Mesh(np.array(jax.devices()), ("data",))
    >>> names = {"x": "t2m", "y": "t2m"}
    >>> ds = shardload.stream("steps.h5", mesh, P(), dataset=names, batch=4, window={"x": (-1, 0), "y": 1})
    >>> len(ds), ds.order().tolist()
    (2, [1, 2, 3, 4, 5, 6, 7, 8])
    >>> with iter(ds) as batches:
    ...     for batch in batches:
    ...         print(batch["x"].shape, batch["y"].shape, batches.index.tolist())
    (4, 2, 4) (4, 4) [1, 2, 3, 4]
    (4, 2, 4) (4, 4) [5, 6, 7, 8]
    """
    with StreamCall(path, mesh, spec, keywords_of("stream", locals())).begin() as call:
        return call.open()


def scatter(
    array: Any,
    mesh: Any,
    spec: Any = None,
    *,
    root: int = DEFAULTS.root,
    dtype: Any = DEFAULTS.dtype,
    pad: Any = DEFAULTS.pad,
    staging: str | int = DEFAULTS.staging,
    verify: str = DEFAULTS.verify,
    comm: Any = DEFAULTS.comm,
    progress: Progress = DEFAULTS.progress,
    timeout: float | None = DEFAULTS.timeout,
) -> jax.Array:
    """Give every process its shards of an array that one rank has or makes.

    The root sends parts of its array from views: no pickle, and no second copy of the array. What the other ranks pass as
    `array` is ignored.

    Collective: yes, over `comm`.

    Parameters
    ----------
    array : array_like or callable
        On `root`: the array, or a function without arguments that returns it (called on `root` alone). Elsewhere: anything,
        usually None.
    mesh, spec, dtype, pad, staging, verify, comm, progress, timeout
        As in `load`.
    root : int
        The rank that has the array.

    Returns
    -------
    jax.Array
        The array, with its (padded) shape, its dtype and the given sharding.

    Raises
    ------
    ConfigError, SourceError, PeerError, StallError
        As `load` does, on every rank. If `array()` raises on the root, every rank raises a PeerError with that text, and on the
        root the original error is its cause.
    """
    with ScatterCall(array, mesh, spec, keywords_of("scatter", locals())).begin() as call:
        x: jax.Array = call.scatter()
    return x


def verify(
    x: Any, path: Any, *, dataset: Any = DEFAULTS.dataset, how: str = DEFAULTS.how, seed: int = DEFAULTS.seed, **options: Any
) -> Any:
    """Compare an array, wherever it comes from, with the file that it should match.

    Each process reads the regions that its own devices hold, with the format's own library, and compares them bit by bit.

    Collective: yes, over `comm`. Every rank passes the same arguments, and all return or all raise the same error.

    Parameters
    ----------
    x : jax.Array or tree of jax.Array
        The array. It has a NamedSharding, or is on one device. It is not changed. A tree is compared with the arrays that
        `dataset` has at the same keys.
    path, dataset and all options
        As for the `load` that would give `x`: `select`, `pad` if it has padding, `dtype` if it was cast, `decode`, `halo`,
        `edge`, `staging`, `comm`, `storage`, `allow_external`, `allow_filters`, `untrusted`.
    how : {"full", "file", "checksum", "index"}
        What to compare: all elements; some random regions; replicas with each other; or only shape and dtype.
    seed : int
        Seed for the random regions of ``"file"``.

    Returns
    -------
    VerifyReport or tree of VerifyReport
        What was proven. ``print`` shows it.

    Raises
    ------
    VerifyError
        If an element differs. The error names the device, the element and both values. On every rank.
    ConfigError
        If `x` cannot be that array, because its shape or dtype differs.
    SourceError, PeerError, StallError
        As `load` does. (Ranks wait for 15 minutes.)

    Examples
    --------
    >>> import h5py, jax, numpy as np, shardload
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> shardload.initialize()
    >>> if jax.process_index() == 0:
    ...     with h5py.File("data.h5", "w") as file:
    ...         file["density"] = np.ones((8, 8, 4), "float32")
    >>> mesh = Mesh(np.array(jax.devices()), "a")
    >>> x = shardload.load("data.h5", mesh, P("a"))
    >>> print(shardload.verify(x, "data.h5"))  # doctest: +ELLIPSIS
    verified by full: 1 shard where JAX asks for ...; 256 elements ...
    """
    keywords = with_defaults("verify", {"dataset": dataset, "how": how, "seed": seed, **options})
    with VerifyCall(x, path, keywords).begin() as call:
        return call.verify()


def save(
    path: Any,
    tree: Any,
    *,
    dataset: str = _SAVE.dataset,
    mode: str = _SAVE.mode,
    format: str | None = _SAVE.format,
    chunks: Any = _SAVE.chunks,
    shards: Any = _SAVE.shards,
    compression: Any = _SAVE.compression,
    dims: Any = _SAVE.dims,
    unlimited: Any = _SAVE.unlimited,
    attrs: Any = _SAVE.attrs,
    shape: Any = _SAVE.shape,
    plan: Any = _SAVE.plan,
    like: Any = _SAVE.like,
    verify: str = _SAVE.verify,
    staging: str | int = _SAVE.staging,
    timeout: float | None = _SAVE.timeout,
    progress: Progress = _SAVE.progress,
    storage: Mapping[str, Any] | None = _SAVE.storage,
    background: bool = _SAVE.background,
    comm: Any = _SAVE.comm,
) -> Any:
    """Save sharded arrays as one ordinary HDF5, netCDF4 or Zarr file, which all ranks write together, without parallel HDF5.

    The file has its name only when it is whole, on disk, and read back. Until then what had the name is as it was.

    Collective: yes, over `comm`. Every rank passes the same arguments, and all return or all raise the same error.

    Parameters
    ----------
    path : str or PathLike
        The new file: ``"out.h5"``, ``"out.nc"`` or ``"out.zarr"``, in a folder that all nodes see; or ``"s3://bucket/out.zarr"``,
        where nothing is yet.
    tree : jax.Array, dict of them, any pytree, xarray.Dataset or xarray.DataArray
        The arrays by their names in the file, groups included: ``{"rho": rho, "g/vel": vel}``; nested dicts are groups, and so
        are other nodes of a pytree: the array of ``state.opt[0].mu`` is ``"opt/0/mu"``. Each has a NamedSharding; or it is a
        number, a NumPy array, or an array on one device of each process, the same on all ranks. None stands for no array, as
        in JAX. An object of xarray also says names of axes, attributes and coordinates; what is passed beside it wins
        (docs/values.md).
    dataset : str
        The name of an array that is passed by itself.
    mode : {"w-", "w"}
        ``"w-"``: the name must not exist. ``"w"``: what has the name is replaced, at once, when all is written.
    format : {"hdf5", "netcdf4", "zarr"}, optional
        By default the suffix tells: ``.h5``, ``.hdf5``, ``.he5``, ``.hdf``, ``.nc``, ``.nc4``, ``.zarr``.
    chunks : tuple of int, "auto" or None, or dict of them by name
        Elements of a chunk along each axis. ``"auto"``: in HDF5 without compression one piece; otherwise chunks of up to 4 MiB
        which follow the shards. None: in one piece.
    shards : tuple of int, optional, or dict by name
        Zarr: elements of a file along each axis, a multiple of `chunks`.
    compression : str or dict, optional, or dict by name
        ``"gzip"``, ``"zstd"``, ``"blosc"``, ``"lz4"``, ...; ``"gzip:6+shuffle"`` is short for ``{"name": "gzip", "level": 6,
        "shuffle": True}``. The same name means the same in HDF5 and Zarr.
    dims : tuple of str, optional, or dict by name
        Name of each axis. In netCDF4 these are dimensions; an array of one axis that has its name is its coordinate.
    unlimited : str, int or tuple of them, optional, or dict by name
        Axes that can grow, for `append`: names in `dims`, such as ``"time"``, or numbers. In Zarr every axis can; chunks may be
        longer than the array along these only.
    attrs : dict, optional
        Attributes of the array. For a dict of arrays, a dict by name: ``{"rho": {"units": "kg/m3"}, "/": {"title": "run 7"}}``,
        where ``"/"`` is the file, and ``"Header/"`` a group, which is made if it has no arrays.
    shape : tuple of int, optional, or dict by name
        The shape without padding: padding is not written. Not needed for an array that `load` returned. For an array that is
        as long as such a one with its padding, and of which nothing says if it has some, there is a `PaddingWarning`.
    plan : Plan or TreePlan, optional, or dict by name
        The same, by the plan with which the array was loaded from which this one was computed. For an object of xarray, axes
        are matched by their names.
    like : str, optional, or dict by name
        An array in a file, ``"in.h5:/rho"``, of which chunks, compression, checksums, names of axes and attributes are taken,
        where they are not passed. Its coordinates, and what its attributes name, are not saved unless they are passed, too: a
        `LeftOutWarning` names them.
    verify : {"checksum", "file", "full", "index"}
        ``"checksum"``: replicas are compared before; parts are checksummed on their way; then another rank, on another node
        where there is one, reads every chunk back and compares its stored bytes, and decodes one chunk of each rank with the
        format's own library. ``"file"``: it decodes one in 16. ``"full"``: all. ``"index"``: nothing is read back.
    staging : str or int
        Cap on each process's host memory beyond the arrays: bytes, or text such as ``"1GiB"``. ``"auto"`` is 256 MiB, or what
        the chunks need if that is more.
    timeout : float or None
        As in `load`.
    progress : bool or callable, optional
        As in `load`.
    storage : dict, optional
        As in `load`, if `path` is a URL.
    background : bool
        True: return when this rank's shards are copied into host memory, which takes that much memory, and write in a thread.
        The arrays may then be donated or deleted. All ranks pass the same. The next save or append, and the end of the
        program, wait for it.
    comm : mpi4py.MPI.Comm, optional
        As in `load`.

    Returns
    -------
    SaveReport
        What was done. ``print`` shows it. With `background`, a `BackgroundSave`: its ``wait()`` returns the report or raises
        the error of the save; without it, the next save does.

    Raises
    ------
    ConfigError
        The arguments are wrong, the name is taken, or the format cannot hold an array exactly.
    SourceError
        The file cannot be written: no space, quota, no right, a failing device.
    VerifyError
        Replicas differ, or what is read back is not what was written.
    PeerError, StallError
        As `load` does.

    Examples
    --------
    >>> import h5py, jax, jax.numpy as jnp, numpy as np, shardload
    >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    >>> shardload.initialize()
    >>> mesh = Mesh(np.array(jax.devices()), "a")
    >>> rho = jax.device_put(jnp.ones((8, 6), "float32"), NamedSharding(mesh, P("a")))
    >>> report = shardload.save("out.h5", {"rho": rho}, compression="gzip", attrs={"rho": {"units": "kg/m3"}})
    >>> with h5py.File("out.h5") as file:
    ...     file["rho"].compression, file["rho"].attrs["units"], float(file["rho"][...].sum())
    ('gzip', 'kg/m3', 48.0)
    """
    options = keywords_of("save", locals())
    from shardload.jobs.saving.save import save as write  # here, because most jobs only load

    return write(path, tree, options, comm)


def plan_save(path: Any, tree: Any, **options: Any) -> SavePlan:
    """Plan what `save` with the same arguments would do, without doing it. ``print(plan)`` shows it.

    Nothing is written, nor looked for where the new file will be; of `like` the metadata are read.

    Collective: yes, over `comm`.

    Parameters
    ----------
    path and all options
        As in `save`.
    tree : jax.Array, jax.ShapeDtypeStruct, dict of them, xarray.Dataset or xarray.DataArray
        As in `save`. A ShapeDtypeStruct with a sharding stands for an array that does not exist yet.

    Returns
    -------
    SavePlan
        Plain fields to inspect.

    Raises
    ------
    ConfigError, SourceError, PeerError, StallError
        As `save` does, as far as that is known before anything is written.
    """
    keywords = with_defaults("plan_save", options)
    from shardload.jobs.saving.save import plan_save as describe

    return describe(path, tree, keywords, keywords["comm"])


def append(
    path: Any,
    tree: Any,
    *,
    dim: str | int = _APPEND.dim,
    at: Any = _APPEND.at,
    dataset: str = _APPEND.dataset,
    shape: Any = _APPEND.shape,
    plan: Any = _APPEND.plan,
    verify: str = _APPEND.verify,
    staging: str | int = _APPEND.staging,
    timeout: float | None = _APPEND.timeout,
    progress: Progress = _APPEND.progress,
    comm: Any = _APPEND.comm,
) -> AppendReport:
    """Append sharded arrays to those of a Zarr store, an HDF5 or a netCDF4 file along one axis, by all ranks.

    Chunks, compression, types and names are those of the store. The new rows are written and read back where no reader looks:
    beside a store, behind the end of a file. At last the arrays get their new lengths. A failed or killed append leaves the old
    values, and each array its old length (or, if the kill came among the last few writes, its new one).

    Collective: yes, over `comm`. Every rank passes the same arguments, and all return or all raise the same error.

    Parameters
    ----------
    path : str or PathLike
        A Zarr store (format 3 or 2), an HDF5 or a netCDF4 file in a folder that all nodes see. In a file the axis must be one
        that can grow: ``unlimited=`` in `save`, ``maxshape=(None, ...)`` in h5py, an unlimited dimension in netCDF4,
        ``unlimited_dims=`` in xarray.
    tree : jax.Array, dict of them, xarray.Dataset or xarray.DataArray
        The rows to append by the names of their arrays in the store, as in `save`. Each has the shape and type of the stored
        array (values as stored: not decoded), but any length along `dim`, the same for all. Pass all arrays that share the axis
        `dim`, its coordinate too. Of an object of xarray, the variables with the axis `dim` are taken.
    dim : str or int
        The axis: its name in the store, or its number if the axes have no names. By its name, its coordinate must go on in the
        direction that it has: time does not go backwards.
    at : float or date, optional
        Replace the rows from this value of the coordinate of `dim` on, as after a restart from an older checkpoint. A date is
        as in `near`. In Zarr a kill among the last writes leaves the rows before `at` alone.
    dataset : str
        The name of an array that is passed by itself.
    shape : tuple of int, optional, or dict by name
        The shape of what is appended without padding, as in `save`.
    plan : Plan or TreePlan, optional, or dict by name
        As in `save`.
    verify, staging, timeout, progress, comm
        As in `save`.

    Returns
    -------
    AppendReport
        As that of `save`, and by how much each array grew.

    Raises
    ------
    ConfigError
        The arguments are wrong or do not fit the store, its chunks are stored in a way that append does not write, another
        append has it, or another program has the file open.
    SourceError, VerifyError, PeerError, StallError
        As `save` does.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numpy as np, shardload, zarr
    >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    >>> shardload.initialize()
    >>> mesh = Mesh(np.array(jax.devices()), "a")
    >>> rho = jax.device_put(jnp.ones((3, 8), "float32"), NamedSharding(mesh, P(None, "a")))
    >>> report = shardload.save("run.zarr", {"rho": rho}, dims={"rho": ("time", "x")})
    >>> shardload.append("run.zarr", {"rho": 2 * rho}, dim="time").grown
    {'/rho': (3, 6)}
    """
    options = keywords_of("append", locals())
    from shardload.jobs.saving.append import append as write

    return write(path, tree, options, comm)


def mask(x: Any, plan: Any = None) -> Any:
    """Say which elements of a loaded array are the file's: a boolean array with the same shape and sharding.

    True where an element is the file's; False in the padding (`pad`) and in the rows of neighbours (`halo`). So each element of
    the file is counted exactly once: ``(x * mask).sum()`` is the sum over the file.

    Collective: no, and nothing is sent, but every process of the mesh calls it.

    Parameters
    ----------
    x : jax.Array
        An array that `load`, `scatter` or `Plan.execute` returned. Or a tree of them (lists, dicts, any pytree).
    plan : Plan, TreePlan or tuple of int, optional
        For an array that was computed from a loaded one: the plan that it was loaded by, or its shape without padding. For a
        tree: the same tree of these, or the TreePlan.

    Returns
    -------
    jax.Array
        Bool, with the shape and the sharding of `x`. For a tree: the same tree.

    Raises
    ------
    ConfigError
        If nothing says which elements of `x` are the file's, or if `plan` is of another array.

    Examples
    --------
    >>> import h5py, jax, jax.numpy as jnp, numpy as np, shardload
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> shardload.initialize()
    >>> if jax.process_index() == 0:
    ...     with h5py.File("snap.h5", "w") as file:
    ...         file["mass"] = np.arange(1001, dtype="float32")
    >>> mesh = Mesh(np.array(jax.devices()), "a")
    >>> x = shardload.load("snap.h5", mesh, P("a"), pad=-1)
    >>> float(jnp.mean(x, where=shardload.mask(x)))
    500.0
    """
    return _each(lambda name, x, plan: make_mask(_extent(name, x, plan), x.sharding), x, plan)


def unpad(x: Any, plan: Any = None, *, sharding: Any = None, numpy: bool = False) -> Any:
    """Return the file's elements of a loaded array alone, in their own shape: without padding and without halos.

    Collective: yes, over the processes of the mesh of `x`. (No if it has neither padding nor halos,
    and neither `numpy` nor `sharding` is passed.)

    Parameters
    ----------
    x : jax.Array, xarray.Dataset or xarray.DataArray
        An array that `load`, `scatter` or `Plan.execute` returned, or one that was computed from it and has its shape. Or a
        tree of them (lists, dicts, any pytree). What `load_dataset` returned, and what was computed from it, needs no `plan`.
    plan : Plan, TreePlan or tuple of int, optional
        For an array that was computed from a loaded one: the plan that it was loaded by, or its shape without padding. For a
        tree: the same tree of these, or the TreePlan.
    sharding : NamedSharding, optional
        The sharding of the result, over the devices of `x` in the same order. By default that of `x`.
    numpy : bool
        True returns a NumPy array, whole on every process. If several processes have shards, each of their devices needs memory
        for the whole array.

    Returns
    -------
    jax.Array or ndarray
        Shape `Plan.shape`, dtype of `x`. For a tree: the same tree. For an object of xarray: one without padding.

    Raises
    ------
    ConfigError
        If the shape without padding does not divide over the mesh, so that no jax.Array with this sharding can hold it; if
        nothing says which elements of `x` are the file's; or if `plan` is of another array.

    Examples
    --------
    >>> import h5py, jax, numpy as np, shardload
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> shardload.initialize()
    >>> if jax.process_index() == 0:
    ...     with h5py.File("snap.h5", "w") as file:
    ...         file["mass"] = np.arange(1001, dtype="float32")
    >>> mesh = Mesh(np.array(jax.devices()), "a")
    >>> plan = shardload.plan("snap.h5", mesh, P("a"), pad=-1)
    >>> x = plan.execute()
    >>> shardload.unpad(2 * x, plan, numpy=True)[-2:]
    array([1998., 2000.], dtype=float32)
    """
    if not isinstance(numpy, bool):
        raise ConfigError(f"numpy is {numpy!r}; expected True or False")
    if numpy and sharding is not None:
        raise ConfigError("numpy=True and a sharding were given; a NumPy array has no sharding: pass one of them")

    def unpad_one(name: str, x: Any, plan: Any) -> Any:
        if hasattr(x, "xindexes"):  # an object of xarray
            from shardload.jobs.dataset.loading import unpad_labelled

            return unpad_labelled(x, plan, unpad_one)
        extent = _extent(name, x, plan)
        if x.is_deleted():
            raise ConfigError(
                f"{name} was deleted (donated to a jitted function?), so it has no values. Call unpad before that"
            )
        return to_numpy(x, extent, name) if numpy else cut_out(x, extent, sharding, name)

    return _each(unpad_one, x, plan)


def _each(function: Callable[[str, Any, Any], Any], x: Any, plan: Any) -> Any:
    """Call a function with the name of each array of a tree, the array, and its plan or shape, if there is one."""
    tree: Any
    if isinstance(plan, TreePlan) and not hasattr(x, "xindexes"):
        plan = plan.plans
    leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    if not leaves:
        raise ConfigError(f"x is {x!r}, which has no arrays; expected a jax.Array, or a tree of them")
    names = [f"x{jax.tree_util.keystr(path)}" for path, _ in leaves]
    plans = [None] * len(leaves)
    if plan is not None:
        try:
            plans = tree.flatten_up_to(plan)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"x and plan are trees that do not match: {error} Pass the plan that loaded x") from None
    return tree.unflatten([function(name, leaf, plan) for name, (_, leaf), plan in zip(names, leaves, plans, strict=True)])


def _extent(name: str, x: Any, plan: Any) -> Extent:
    if isinstance(x, jax.core.Tracer):
        raise ConfigError(f"{name} is traced: nothing says which of its elements are the file's. Call this outside of jax.jit")
    if not isinstance(x, jax.Array):
        raise ConfigError(f"{name} is a {type(x).__name__}; expected a jax.Array, or a tree of them")
    refuse_unreduced(getattr(x.sharding, "spec", None), f"{name}: ")
    return extent_of(x, plan.extent if isinstance(plan, Plan) else plan, name)
