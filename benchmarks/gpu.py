"""What does one GPU give? ``make gpu-check``: one process, one file, no arguments needed.

1. Loads: every layout, type and way of a load, compared on the device with the file and with NumPy; and saves.
2. Host to device: the rate of `jax.device_put` from pageable, page-locked and ``pinned_host`` memory, beside CUDA's own copies.
3. Device to host: the rate of a save's way, region by region, beside the whole array at once.
4. A stream beside a matrix product: how much of the transfer is hidden.

Packages that the machine lacks are taken from the wheels in a folder (``make gpu-wheels``), behind those that it has. Without a
GPU all of it runs on the CPU, as a test of this program.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
WHEELS, RESULT = ROOT / ".gpu-wheels", ROOT / "benchmarks/results/gpu.json"
NEEDED = ("zarr", "numcodecs", "google_crc32c", "deflate", "zstandard", "cftime")
PACKAGES = ("jax", "jaxlib", "numpy", "h5py", "mpi4py", "zarr", "numcodecs", "deflate", "zstandard")
SIZE_OF_GPU, SIZE_OF_CPU = 512, 64  # elements along each of three axes, float32
PIECE_NBYTES = 64 << 20
WIDTH = 80
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind
Array = np.ndarray[Any, Any]


@dataclass
class Record:
    """What was measured, as the JSON file has it."""

    machine: dict[str, Any] = field(default_factory=dict)
    loads: list[dict[str, Any]] = field(default_factory=list)
    host_to_device: list[dict[str, Any]] = field(default_factory=list)
    device_to_host: list[dict[str, Any]] = field(default_factory=list)
    overlap: dict[str, Any] = field(default_factory=dict)
    not_measured: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Go on after an error, which is noted."""
        try:
            yield
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {error}")
            say(f"  {what}: FAILED, see below")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all that was loaded and saved is right."""
    parser = argparse.ArgumentParser(description="Loads, rates and overlap on one GPU; without one, a smoke test on the CPU.")
    parser.add_argument("--size", type=int, help=f"elements along each axis (GPU {SIZE_OF_GPU}, CPU {SIZE_OF_CPU})")
    parser.add_argument("--out", type=Path, help=f"the record (on a GPU {RESULT.relative_to(ROOT)}, else none)")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats, of which the best counts")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="folder of wheels that the machine lacks")
    given = parser.parse_args(arguments)
    began, record = time.perf_counter(), Record()
    with tempfile.TemporaryDirectory(prefix="shardload-gpu-") as packages:
        carry(given.wheels, Path(packages))
        import jax

        device = jax.devices()[0]
        is_gpu = device.platform == "gpu"
        size = given.size or (SIZE_OF_GPU if is_gpu else SIZE_OF_CPU)
        record.machine = machine(device, size)
        if not is_gpu:
            record.not_measured.append("no GPU was found: all of this is the CPU's, and says nothing of a GPU")
        say("\n".join(f"{name}: {value}" for name, value in record.machine.items()))
        values = field_of(size)
        with tempfile.TemporaryDirectory(prefix="shardload-gpu-", dir=fastest_folder(12 * values.nbytes)) as folder:
            check_loads(record, Path(folder), values, device, given.repeats)
            measure_copies(record, values, device, given.repeats)
            with record.attempt("overlap"):
                record.overlap = measure_overlap(Path(folder), values, device, given.repeats)
    show_overlap(record.overlap)
    for title, lines in (("NOT MEASURED", record.not_measured), ("FAILED", record.failures)):
        say("\n".join([f"\n{title}", *(f"  {line}" for line in lines)]) if lines else "")
    record.machine["seconds_of_all"] = round(time.perf_counter() - began, 1)
    out = given.out or (RESULT if is_gpu else None)
    if out is not None:
        out.write_text(json.dumps(vars(record), indent=1) + "\n")
        say(f"written: {out}")
    return 1 if record.failures else 0


def say(text: str) -> None:
    if text:
        print("\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in text.split("\n")), flush=True)


def carry(wheels: Path, into: Path) -> None:
    """Make importable what lies in a folder of wheels, behind what this Python has; and this checkout before it."""
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path not in ("", str(Path(__file__).parent)))]
    found = sorted(wheels.glob("*.whl"))
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking and not found:
        sys.exit(f"this Python has no {', '.join(lacking)}: install them, or bring their wheels (make gpu-wheels) to {wheels}")
    if lacking:
        how = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check", "-q"]
        subprocess.run([sys.executable, "-m", "pip", "install", *how, "--target", str(into), *map(str, found)], check=True)
        sys.path.append(str(into))


def machine(device: Any, size: int) -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    told = {
        "device": device.device_kind,
        "platform": device.platform,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    return {**told, "size": size, "nbytes": 4 * size**3, "packages": versions}


def fastest_folder(nbytes: int) -> str | None:
    """Memory, if it has room: the rate of a disk is not asked for here."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 2 * nbytes else None


def field_of(size: int) -> Array:
    """Waves and noise, which compress to about half; no two planes, rows or columns are alike."""
    wave = np.sin(np.arange(size) * (9.0 / size))
    smooth = wave[:, None, None] + 2 * wave[None, :, None] + 3 * wave[None, None, :]
    noise = np.random.default_rng(41).integers(0, 1 << 10, (size,) * 3, dtype=np.uint16)
    found: Array = ((np.round(smooth * (1 << 14)) + noise) / (1 << 14)).astype(np.float32)
    return found


def timed(call: Callable[[], Any], repeats: int, before: Callable[[], Any] = lambda: None) -> tuple[float, float, Any]:
    """Seconds of the first call and of the best of those after it (of the first, if there is one only), and the last result."""
    seconds, result = [], None
    for _ in range(max(1, repeats)):
        result = None
        prepared = before()
        start = time.perf_counter()
        result = call() if prepared is None else call(prepared)  # type: ignore[call-arg]
        seconds.append(time.perf_counter() - start)
    return seconds[0], min(seconds[1:] or seconds), result


# --- 1. loads and saves


@dataclass(frozen=True)
class Case:
    """A load of one array ``x``: how its file is written, how it is loaded, and what must come of it."""

    name: str
    write: Callable[[Path, Array], None]
    of_values: Callable[[Array], Array] = lambda values: values  # what is written
    spec: tuple[Any, ...] = ("a",)
    how: dict[str, Any] = field(default_factory=dict)
    expected: Callable[[Array], Array] = lambda stored: stored
    memory_kind: str | None = None
    x64: bool = False


def hdf5(chunks: Callable[[int], tuple[int, ...]] | None = None, attrs: dict[str, Any] | None = None, **more: Any) -> Any:
    def write(path: Path, values: Array) -> None:
        import h5py

        with h5py.File(path, "w") as file:
            made = file.create_dataset("x", data=values, chunks=chunks and chunks(len(values)), **more)
            made.attrs.update(attrs or {})

    return write


def zarr(chunks: Callable[[int], tuple[int, ...]], compressor: Callable[[], Any], shards: Any = None, version: int = 3) -> Any:
    def write(path: Path, values: Array) -> None:
        import zarr

        made = zarr.create_array(
            str(path), name="x", shape=values.shape, dtype=values.dtype, chunks=chunks(len(values)),
            shards=shards and shards(len(values)), compressors=compressor(), zarr_format=version,
        )  # fmt: skip
        made[...] = values

    return write


def cubes(parts: int) -> Callable[[int], tuple[int, ...]]:
    return lambda size: (max(1, size // parts),) * 3


def zstd() -> Any:
    import zarr

    return zarr.codecs.ZstdCodec(level=1)


def blosc() -> Any:
    import numcodecs

    return numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE)


def packed(values: Array) -> Array:
    found = np.round(values * 1000).astype(np.int16)
    found[::7, 1] = -32768
    return found


def unpacked(stored: Array) -> Array:
    found = stored.astype(np.float32) * np.float32(0.001) + np.float32(2)
    return np.where(stored == -32768, np.float32(np.nan), found)


def slab(dtype: str) -> Callable[[Array], Array]:
    """A few planes as another type, by their bits: every pattern of NaN and sign, too, but of booleans 0 and 1."""

    def of(values: Array) -> Array:
        wanted, bits = np.dtype(dtype), np.ascontiguousarray(values[: max(1, len(values) // 16)]).view(np.uint8)
        return (bits & 1).astype(bool) if wanted.kind == "b" else bits.view(wanted)

    return of


PACKING = {"scale_factor": np.float32(0.001), "add_offset": np.float32(2), "_FillValue": np.int16(-32768)}
DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "float64", "complex64", ">f4", ">i2")
HALO = 2
CASES = (
    Case("HDF5 contiguous", hdf5()),
    Case("HDF5 gzip, planes", hdf5(lambda n: (1, n, n), compression="gzip", compression_opts=1, shuffle=True)),
    Case("HDF5 gzip, cubes", hdf5(cubes(8), compression="gzip", compression_opts=1, shuffle=True)),
    Case("Zarr zstd, cubes", zarr(cubes(4), zstd)),
    Case("Zarr sharded, zstd", zarr(cubes(8), zstd, cubes(2))),
    Case("Zarr 2 blosc, cubes", zarr(cubes(4), blosc, version=2)),
    Case("contiguous, P(-,b,a)", hdf5(), spec=(None, "b", "a")),
    Case("contiguous, pad=0", hdf5(), how={"pad": 0}),
    Case(
        "contiguous, halo 2", hdf5(), how={"halo": (HALO,), "edge": "wrap"},
        expected=lambda stored: np.pad(stored, ((HALO, HALO), (0, 0), (0, 0)), mode="wrap"),
    ),
    Case("contiguous, select", hdf5(), how={"select": np.s_[1:-1, 2, 3:]}, expected=lambda stored: stored[1:-1, 2, 3:]),
    Case("packed int16, decode", hdf5(attrs=PACKING), packed, how={"decode": True}, expected=unpacked),
    Case("pinned_host", hdf5(), memory_kind="pinned_host"),
    *(Case(f"dtype {name}", hdf5(), slab(name), x64=np.dtype(name).itemsize == 8 and name != "complex64") for name in DTYPES),
)  # fmt: skip


def check_loads(record: Record, folder: Path, values: Array, device: Any, repeats: int) -> None:
    import jax

    row = "{:<24}{:>9}{:>10}{:>10}{:>9}  {}".format
    say("\n" + row("load", "MB", "first s", "best s", "GB/s", "verified"))
    for case in CASES:
        with record.attempt(case.name):
            path = folder / ("x.zarr" if case.name.startswith("Zarr") else "x.h5")
            stored = case.of_values(values)
            case.write(path, stored)
            jax.config.update("jax_enable_x64", case.x64)
            try:
                found = check_load(case, path, stored, device, repeats)
            finally:
                jax.config.update("jax_enable_x64", False)
            record.loads.append({"load": case.name, **found})
            rate = found["nbytes"] / found["best_s"] / 1e9
            seconds = f"{found['first_s']:.3f}", f"{found['best_s']:.3f}"
            say(row(case.name, f"{found['nbytes'] / 1e6:.1f}", *seconds, f"{rate:.2f}", f"{found['verified_elements']:,}"))
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for suffix in ("h5", "zarr"):
        with record.attempt(f"save .{suffix}"):
            found = check_save(folder / f"saved.{suffix}", values, device, repeats)
            record.loads.append({"save": suffix, **found})
            rate = found["nbytes"] / found["best_s"] / 1e9
            seconds = f"{found['first_s']:.3f}", f"{found['best_s']:.3f}"
            say(row(f"save .{suffix}", f"{found['nbytes'] / 1e6:.1f}", *seconds, f"{rate:.2f}", "by its library"))
    record.not_measured.append(
        "padding: one device divides every axis, so pad=0 adds nothing; halo 2 has rows beside the file's"
    )


def check_load(case: Case, path: Path, stored: Array, device: Any, repeats: int) -> dict[str, Any]:
    """Load it as users do, timed; then with all elements verified on the device, and compared with NumPy."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import shardload

    mesh = Mesh(np.array([[device]]), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec(*case.spec), memory_kind=case.memory_kind)

    def load(**more: Any) -> Any:
        return jax.block_until_ready(shardload.load(path, sharding, dataset="x", **case.how, **more))

    first, best, _ = timed(load, repeats)
    plan = shardload.plan(path, sharding, dataset="x", verify="full", **case.how)
    x = jax.block_until_ready(plan.execute())
    expected = case.expected(stored)
    expected = expected.astype(expected.dtype.newbyteorder("="))
    on_host = np.asarray(x)
    same = x.shape == expected.shape and x.dtype == expected.dtype
    if case.how.get("decode"):  # a NaN that was computed may have other bits
        same = same and np.array_equal(on_host, expected, equal_nan=True)
    else:
        same = same and on_host.tobytes() == expected.tobytes()
    if not same:
        raise ValueError(f"{x.dtype}{x.shape} on {x.devices()} is not what NumPy has: {expected.dtype}{expected.shape}")
    if x.devices() != {device} or (case.memory_kind and x.sharding.memory_kind != case.memory_kind):
        raise ValueError(f"it lies on {x.sharding}")
    own = np.asarray(shardload.unpad(x, plan, numpy=True)).size
    if own != int(np.prod(plan.shape)) or int(shardload.mask(x, plan).sum()) != own:
        raise ValueError(f"mask or unpad has {own} elements, the plan {plan.shape}")
    proven = plan.report.proven
    return {
        "nbytes": expected.nbytes, "first_s": first, "best_s": best,
        "verified_elements": proven.n_elements, "dtype": str(x.dtype), "shape": x.shape,
        "phases_s": {name: phase.seconds for name, phase in plan.report.phases.items()},
    }  # fmt: skip


def check_save(path: Path, values: Array, device: Any, repeats: int) -> dict[str, Any]:
    import h5py
    import jax
    import zarr
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import shardload

    x = jax.device_put(values, NamedSharding(Mesh(np.array([device]), ("a",)), PartitionSpec("a")))
    first, best, _ = timed(lambda: shardload.save(path, {"x": x}, mode="w"), repeats)
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            found = file["x"][...]
    else:
        found = zarr.open_group(str(path), mode="r")["x"][...]
    if found.tobytes() != values.tobytes():
        raise ValueError("what its own library reads is not what the device has")
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {"nbytes": values.nbytes, "first_s": first, "best_s": best}


# --- 2. and 3. copies


class Cuda:
    """CUDA's own copies, by its runtime library. OSError if there is none, RuntimeError if a call fails."""

    def __init__(self) -> None:
        places = [f"{path}/nvidia/*/lib/libcudart.so*" for path in sys.path] + ["/usr/local/cuda*/lib64/libcudart.so*"]
        names = ["libcudart.so.13", "libcudart.so.12", "libcudart.so", *(name for place in places for name in glob.glob(place))]
        for name in names:
            try:
                self._library = ctypes.CDLL(name)
                break
            except OSError:
                continue
        else:
            raise OSError("no libcudart was found")
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self("cudaSetDevice", 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self._library.cudaGetErrorString(code).decode()}")

    @contextmanager
    def locked(self, host: Array) -> Iterator[None]:
        """Page-lock an array's memory."""
        self("cudaHostRegister", ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(host.nbytes), 0)
        try:
            yield
        finally:
            self("cudaHostUnregister", ctypes.c_void_p(host.ctypes.data))

    @contextmanager
    def memory(self, nbytes: int) -> Iterator[ctypes.c_void_p]:
        """Memory of the device."""
        found = ctypes.c_void_p()
        self("cudaMalloc", ctypes.byref(found), ctypes.c_size_t(nbytes))
        try:
            yield found
        finally:
            self("cudaFree", found)

    def copy(self, host: Array, there: ctypes.c_void_p, kind: int) -> None:
        ends = (there, ctypes.c_void_p(host.ctypes.data)) if kind == TO_DEVICE else (ctypes.c_void_p(host.ctypes.data), there)
        self("cudaMemcpy", *ends, ctypes.c_size_t(host.nbytes), kind)
        self("cudaDeviceSynchronize")


def measure_copies(record: Record, values: Array, device: Any, repeats: int) -> None:
    cuda = None
    try:
        cuda = Cuda()
    except (OSError, RuntimeError, AttributeError) as error:
        record.not_measured.append(f"CUDA's own copies and page-locked memory: {error}")
    if device.platform == "cpu":
        record.not_measured.append("host to device and back: on a CPU, JAX mostly copies nothing")
    for title, ways, rows in (
        ("host to device", ways_to_device(values, device, cuda), record.host_to_device),
        ("device to host", ways_to_host(values, device, cuda), record.device_to_host),
    ):
        line = "{:<46}{:>10}{:>10}{:>8}{:>6}".format
        say("\n" + line(title, "first s", "best s", "GB/s", "%"))
        for name, before, call, check in ways:
            with record.attempt(f"{title}, {name}"):
                first, best, result = timed(call, repeats + 1, before)
                if check is not None and not check(result):
                    raise ValueError("other values arrived")
                rows.append({"way": name, "nbytes": values.nbytes, "first_s": first, "best_s": best})
                of_best = f"{100 * rows[0]['best_s'] / best:.0f}" if cuda else "-"
                say(line(name, f"{first:.4f}", f"{best:.4f}", f"{values.nbytes / best / 1e9:.2f}", of_best))


Ways = Iterator[tuple[str, Callable[[], Any], Callable[..., Any], Callable[[Any], bool] | None]]


def nothing() -> None:
    return None


def ways_to_device(values: Array, device: Any, cuda: Cuda | None) -> Ways:
    """Name, what comes before, what is timed, whether the result is right. The first is CUDA's own copy, if that is there."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    own = SingleDeviceSharding(device, memory_kind=device.default_memory().kind)  # JAX keeps that of the array otherwise
    n = max(1, PIECE_NBYTES // max(1, values[0].nbytes))
    pieces = [values[k : k + n] for k in range(0, len(values), n)]

    def put(host: Any, to: Any = own) -> Any:
        return jax.block_until_ready(jax.device_put(host, to))

    def whole(x: Any) -> bool:
        return np.array_equal(np.asarray(x), values)

    if cuda is not None:
        for name, lock in (("cudaMemcpy, page-locked", True), ("cudaMemcpy, pageable", False)):
            with cuda.memory(values.nbytes) as there, cuda.locked(values) if lock else cuda.memory(1):
                yield name, nothing, lambda there=there: cuda.copy(values, there, TO_DEVICE), None
        with cuda.locked(values):
            yield "device_put, page-locked", nothing, lambda: put(values), whole
    yield "device_put, pageable (a load today)", nothing, lambda: put(values), whole
    yield (
        f"device_put, pageable, {len(pieces)} pieces, joined", nothing,
        lambda: jax.block_until_ready(jnp.concatenate([jax.device_put(piece, own) for piece in pieces])), whole,
    )  # fmt: skip
    yield "device_put to pinned_host (a host copy)", nothing, lambda: put(values, pinned), whole
    yield "device_put from pinned_host", lambda: put(values, pinned), put, whole
    yield "device_put by pinned_host, both copies", nothing, lambda: put(jax.device_put(values, pinned)), whole
    yield (
        f"... in {len(pieces)} pieces, joined", nothing,
        lambda: jax.block_until_ready(
            jnp.concatenate([jax.device_put(jax.device_put(piece, pinned), own) for piece in pieces])
        ), whole,
    )  # fmt: skip


def ways_to_host(values: Array, device: Any, cuda: Cuda | None) -> Ways:
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from shardload.arrays.assemble import copy_from_device
    from shardload.planning.region import Region

    x, held = jax.device_put(values, device), Region.whole(values.shape)
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    out = np.empty_like(values)

    def fresh() -> Any:  # an array remembers its values on the host
        return jax.block_until_ready(jnp.copy(x))

    def whole(found: Any) -> bool:
        return np.array_equal(found, values)

    def by_regions(n_elements: int) -> Array:
        for region in held.split(n_elements):
            out[region.slices()] = copy_from_device(x, region, held)
        return out

    def ahead() -> Array:
        """Slices of 64 MiB, all on their way before the first is waited for."""
        n = max(1, PIECE_NBYTES // max(1, values[0].nbytes))
        pieces = [x[k : k + n] for k in range(0, len(values), n)]
        for piece in pieces:
            piece.copy_to_host_async()
        np.concatenate([np.asarray(piece) for piece in pieces], out=out)
        return out

    if cuda is not None:
        for name, lock in (("cudaMemcpy, page-locked", True), ("cudaMemcpy, pageable", False)):
            with cuda.memory(values.nbytes) as there, cuda.locked(out) if lock else cuda.memory(1):
                yield name, nothing, lambda there=there: cuda.copy(out, there, TO_HOST), None
    yield "np.asarray of the whole array", fresh, np.asarray, whole
    for size in sorted({min(nbytes, values.nbytes // 3) for nbytes in (PIECE_NBYTES, 4 << 20)}, reverse=True):
        n = sum(1 for _ in held.split(size // 4))
        yield (
            f"regions of {size / 2**20:.3g} MiB, {n} (a save today)",
            nothing,
            lambda s=size: by_regions(s // 4),
            whole,
        )
    yield "slices of 64 MiB, all begun before the first", nothing, ahead, whole
    yield "by pinned_host", fresh, lambda y: np.asarray(jax.device_put(y, pinned)), whole


# --- 4. a stream beside a matrix product


def measure_overlap(folder: Path, values: Array, device: Any, repeats: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, PartitionSpec

    import shardload

    is_gpu, path = device.platform == "gpu", folder / "steps.h5"
    hdf5(lambda n: (max(1, n // 64), n, n))(path, values)
    mesh, batch = Mesh(np.array([device]), ("a",)), max(1, len(values) // 32)
    order = 4096 if is_gpu else 128
    with jax.default_device(device):
        matrix = jnp.full((order, order), 1 / order, jnp.bfloat16 if is_gpu else jnp.float32)
    product = jax.jit(lambda n, a: jax.lax.fori_loop(0, n, lambda _, c: a @ c, a))

    def run(n_products: int, is_streamed: bool) -> float:
        """The sum of what was streamed."""
        total, n_batches = 0.0, 0
        how = {"dataset": "x", "batch": batch, "epochs": 1}
        if not is_streamed:
            for _ in range(len(values) // batch):
                jax.block_until_ready(product(n_products, matrix))
            return total
        with iter(shardload.stream(path, mesh, PartitionSpec(None, "a"), **how)) as batches:
            for one in batches:
                n_batches += 1
                done = product(n_products, matrix) if n_products else one
                jax.block_until_ready((done, one))
        return float(n_batches)

    run(1, True)  # compiles
    _, stream, n_batches = timed(lambda: run(0, True), repeats)
    n, seconds = 1, 0.0
    while seconds < stream / n_batches / 2 and n < 1 << 16:  # as long as a batch takes
        n *= 2
        start = time.perf_counter()
        jax.block_until_ready(product(n, matrix))
        seconds = time.perf_counter() - start
    n = max(1, round(n * stream / n_batches / max(seconds, 1e-9)))
    _, alone, _ = timed(lambda: run(n, False), repeats)
    _, both, _ = timed(lambda: run(n, True), repeats)
    path.unlink()
    hidden = (stream + alone - both) / min(stream, alone)
    told = {"batches": int(n_batches), "batch_nbytes": batch * values[0].nbytes, "products": n, "order": order}
    return {**told, "stream_s": stream, "product_s": alone, "both_s": both, "hidden": hidden}


def show_overlap(found: dict[str, Any]) -> None:
    if found:
        rate = found["batches"] * found["batch_nbytes"] / found["stream_s"] / 1e9
        say(
            f"\nstream of {found['batches']} batches of {found['batch_nbytes'] / 1e6:.1f} MB, each with {found['products']} "
            f"products of order {found['order']}\n  stream alone {found['stream_s']:.3f} s ({rate:.2f} GB/s), products alone "
            f"{found['product_s']:.3f} s, both {found['both_s']:.3f} s\n  hidden of the shorter one: "
            f"{100 * max(0.0, found['hidden']):.0f} %"
        )


if __name__ == "__main__":
    sys.exit(main())
