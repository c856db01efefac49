"""Do HDF5 files with attributes and arrays of any type crash a reader, or hang it? Are all their arrays listed?

    python -m tests.fuzz_attributes --files 5000            # half an hour of one core; --first 1234 --files 1 is one of them

Each file is made from its number, and read in a process of its own: if that dies or hangs, the file and the reader are named.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

Random = np.random.Generator
SECONDS = 120  # of a file
# Those that HDF5, netCDF and CF give a meaning, an author's, and one that is no UTF-8.
NAMES = (
    b"DIMENSION_LIST DIMENSION_LIST DIMENSION_LABELS DIMENSION_LABELS REFERENCE_LIST CLASS NAME _Netcdf4Dimid "
    b"_Netcdf4Coordinates _NCProperties _nc3_strict units calendar scale_factor add_offset _FillValue missing_value "
    b"valid_range _Unsigned coordinates bounds climatology mine \xff\xfe"
).split()
SHAPES: tuple[tuple[int, ...] | None, ...] = ((), (), (1,), (2,), (2,), (3,), (0,), (2, 3), None)
NUMBERS = ("STD_I8LE", "STD_U8BE", "STD_I16BE", "STD_U32LE", "STD_I64BE", "IEEE_F16LE", "IEEE_F32BE", "IEEE_F64LE")
BITS = ("STD_B8LE", "STD_B8BE", "STD_B16BE", "STD_B32LE", "STD_B64LE")
REFERENCES = ("STD_REF_OBJ", "STD_REF_DSETREG")


def plain_type(random: Random, depth: int = 0) -> Any:
    """A type without references and lists: its values may have any bits."""
    kind = random.integers(11 if depth < 3 else 8)
    if kind < 2:
        return getattr(h5py.h5t, random.choice(NUMBERS))
    if kind == 2:
        return getattr(h5py.h5t, random.choice(BITS))
    if kind == 3:  # integers that NumPy does not have
        made = h5py.h5t.STD_I32LE.copy()
        made.set_size(int(random.choice([3, 4, 5, 7, 16])))
        made.set_precision(int(random.integers(4 * made.get_size(), 8 * made.get_size() + 1)))  # with less, HDF5 says: damaged
        return made
    if kind == 4:  # such floats
        made = h5py.h5t.IEEE_F64LE.copy()
        made.set_fields(*[(31, 20, 11, 0, 20), (15, 7, 8, 0, 7), (23, 16, 7, 0, 16)][random.integers(3)])
        made.set_size(4)
        return made
    if kind == 5:
        made = h5py.h5t.C_S1.copy()
        made.set_size(int(random.choice([1, 4, 15, 16])))
        made.set_strpad(int(random.integers(3)))
        made.set_cset(int(random.integers(2)))
        return made
    if kind == 6:
        return h5py.h5t.create(h5py.h5t.OPAQUE, int(random.integers(1, 20)))
    if kind == 7:
        made = h5py.h5t.enum_create(getattr(h5py.h5t, random.choice(["STD_I8LE", "STD_U16BE", "STD_I64LE"])))
        for k, name in enumerate((b"FALSE", b"TRUE", b"OTHER")[: random.integers(1, 4)]):
            made.enum_insert(name, k)
        return made
    if kind == 8:
        axes = tuple(map(int, random.integers(1, 4, random.integers(1, 3))))
        return h5py.h5t.array_create(plain_type(random, depth + 1), axes)
    if kind == 9:
        return h5py.h5t.py_create(np.dtype(random.choice(["<c8", ">c16"])))
    return record(random, [plain_type(random, depth + 1) for _ in range(random.integers(1, 4))])


def record(random: Random, members: list[Any]) -> Any:
    made = h5py.h5t.create(h5py.h5t.COMPOUND, sum(one.get_size() for one in members) + int(random.integers(3)))
    at = 0
    for k, one in enumerate(members):
        made.insert(f"f{k}".encode(), at, one)
        at += one.get_size()
    return made


def any_type(random: Random, depth: int = 0) -> tuple[Any, bool]:
    """A type, and whether its values may have any bits."""
    kind = random.integers(8 if depth < 3 else 5)
    if kind < 3:
        return plain_type(random, depth), True
    if kind == 3:
        return getattr(h5py.h5t, random.choice(REFERENCES)), False
    if kind == 4:
        made = h5py.h5t.C_S1.copy()
        made.set_size(h5py.h5t.VARIABLE)
        return made, False
    inner, is_plain = any_type(random, depth + 1)
    if kind == 5:
        return h5py.h5t.array_create(inner, (int(random.integers(1, 4)),)), is_plain
    if kind == 6:
        return h5py.h5t.vlen_create(inner), False
    return record(random, [inner, plain_type(random, depth + 1)]), is_plain


def written(random: Random, file: h5py.File, owner: Any, name: bytes) -> None:
    """One attribute of any type. References, lists and texts are as h5py writes them; of other values the bits are random."""
    shape = SHAPES[random.integers(len(SHAPES))]
    if random.integers(3) == 0 and shape is not None:
        kinds: list[tuple[Any, Any]] = [
            (h5py.ref_dtype, file["x"].ref),
            (h5py.regionref_dtype, file["y"].regionref[0:2]),
            (h5py.string_dtype(), "x"),
            (np.dtype("i2"), 3),
            (np.dtype("f8"), 0.5),
        ]
        base, value = kinds[random.integers(len(kinds))]
        values = np.empty(shape, dtype=object)
        is_list = random.integers(2)
        for at in np.ndindex(*shape):
            one = [value] * int(random.integers(4))
            values[at] = np.array(one, dtype=base) if is_list else value
        dtype = h5py.vlen_dtype(base) if is_list else base
        owner.attrs.create(name.decode("utf-8", "surrogateescape") if name.isascii() else "mine", values[()], shape, dtype)
        return
    kind, is_plain = any_type(random)
    space = h5py.h5s.create(h5py.h5s.NULL) if shape is None else h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(0)
    made = h5py.h5a.create(owner.id, name, kind, space)
    if shape is not None and is_plain and 0 not in shape:
        n = int(np.prod(shape)) * kind.get_size()
        made.write(np.frombuffer(random.bytes(n), "u1").copy(), kind)


def make(path: str, number: int) -> None:
    """The file of this number."""
    random = np.random.default_rng(number)
    with h5py.File(path, "w", libver=("latest" if random.integers(2) else "earliest")) as file:
        file["x"] = np.arange(3.0)
        file["y"] = np.arange(2.0)
        file["group/a"] = np.arange(6, dtype=">i2").reshape(2, 3)
        kind, _ = any_type(random)
        h5py.h5d.create(file["group"].id, b"odd", kind, h5py.h5s.create_simple((2,)))
        if random.integers(2):
            file["x"].make_scale("x")
            file["group/a"].dims[1].attach_scale(file["x"])
        if random.integers(2):
            file["group/a"].dims[0].label = "why"
        if random.integers(4) == 0:
            del file["x"]
            file["x"] = np.arange(3)
        if random.integers(4) == 0:
            file["second"] = file["group" if random.integers(2) else "group/a"]
        if random.integers(8) == 0:
            file["group/up"] = file["/"]
        owners = [file["/"], file["group"], file["x"], file["group/a"], file["group/a"], file["group/odd"]]
        for _ in range(random.integers(1, 6)):
            owner, name = owners[random.integers(len(owners))], NAMES[random.integers(len(NAMES))]
            if h5py.h5a.exists(owner.id, name):
                h5py.h5a.delete(owner.id, name)
            with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):  # h5py does not write it
                written(random, file, owner, name)


def listed(path: str) -> None:
    """All arrays that h5py finds are listed; attributes that are plain numbers are as h5py has them."""
    import shardload

    found = shardload.open(path)
    repr(found)
    with h5py.File(path) as file:
        names = [f"/{name}" for group in ("/", "/group") for name in below(file, group)]
        missing = [name for name in names if name not in found]
        if missing:
            raise ValueError(f"not listed: {missing}")
        for name in found:
            for key in ("mine", "valid_range"):
                if h5py.h5a.exists(file[name].id, key.encode()):
                    attribute = h5py.h5a.open(file[name].id, key.encode())
                    kind = attribute.get_type()
                    if kind.get_class() != h5py.h5t.INTEGER or kind.get_size() > 8 or kind.get_size() in (3, 5, 7):
                        continue
                    if attribute.shape is not None and found[name].refused is None:
                        mine = np.asarray(found[name].attrs[key]).reshape(attribute.shape)
                        np.testing.assert_array_equal(mine, file[name].attrs[key])
    found.attrs  # noqa: B018


def below(file: h5py.File, group: str) -> list[str]:
    """The arrays in one group, as h5py has them."""
    if not isinstance(file.get(group), h5py.Group):
        return []
    inside = file[group]
    return [f"{group}/{name}".lstrip("/") for name in inside if inside.get(name, getclass=True) is h5py.Dataset]


@functools.cache
def commands() -> Any:
    """The commands, which take longer to make than to run."""
    import typer.main

    from shardload.cli.main import app

    return typer.main.get_command(app)


def typed(*words: str) -> None:
    """A command, which may end with a message, but not with a traceback."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        commands()([*words], prog_name="shardload")


SUFFIXES = itertools.cycle(("h5", "zarr"))
READERS: dict[str, Callable[[str], None]] = {
    "open": listed,
    "info": lambda path: typed("info", path),
    "info of an array": lambda path: typed("info", f"{path}:/group/a"),
    "info of a group": lambda path: typed("info", f"{path}:/group"),
    "info --json": lambda path: typed("info", path, "--json"),
    "copy": lambda path: typed("copy", path, f"{path}.copy.{next(SUFFIXES)}", "--mode", "w"),
}


def read(number: int, progress: int) -> None:
    """Make a file and read it in each way; say before each what comes, and what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a.h5")
        make(path, number)
        for name, reader in READERS.items():
            os.write(progress, f"\n{name}".encode())
            try:
                reader(path)
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{os.path.basename(where.filename)}:{where.lineno}"
                os.write(progress, f": {type(error).__name__}: {error!r:.300} ({place})".encode())


def wrong_with(number: int) -> list[str]:
    """What was wrong with the file of this number, read in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        read(number, writing)
        os._exit(0)
    os.close(writing)
    with open(reading) as told:
        _, *readers = told.read().split("\n")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    bad = [f"file {number}, {text}" for text in readers if ": " in text]
    return [*bad, f"file {number}, {readers[-1:]}: ended with {code}"] if code else bad


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    n_bad = 0
    for number in range(asked.first, asked.first + asked.files):
        for text in wrong_with(number):
            n_bad += 1
            print(text, flush=True)
    print(f"{asked.files} files, {len(READERS)} readers: {n_bad} wrong")
    sys.exit(n_bad > 0)


if __name__ == "__main__":
    main()
