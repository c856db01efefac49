"""Does a stream say what is wrong with its arguments, and what to pass instead? Does it find gaps in the coordinate of steps?

One process with one device; tests/mpi/test_streams.py has the values of batches.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import shardload
from shardload.errors import ConfigError, SourceError
from shardload.jobs.streaming.request import StreamCall
from shardload.units import parse_nbytes
from tests.unit.files import write_hdf5

N_STEPS, N_LEVELS, N_LAT = 24, 3, 4
GAP = 15  # the step before which 30 hours are missing


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Values that are their own flat index, and coordinates: hours with a gap, levels with unequal distances."""
    name = tmp_path_factory.mktemp("streams") / "a.h5"
    shape = (N_STEPS, N_LEVELS, N_LAT)
    hours = np.arange(N_STEPS) * 6.0
    hours[GAP:] += 24
    with h5py.File(name, "w") as file:
        for key, values in {"time": hours, "level": np.array([1000.0, 950, 500]), "lat": np.arange(N_LAT)}.items():
            file[key] = values
            file[key].make_scale(key)
        data = np.arange(np.prod(shape), dtype="f4").reshape(shape)
        file.create_dataset("t", data=data, chunks=(4, N_LEVELS, N_LAT))
        file.create_dataset("u", data=data[:20], chunks=(5, N_LEVELS, N_LAT))
        file.create_dataset("counts", data=data.astype("i4"), chunks=(4, N_LEVELS, N_LAT))
        file.create_dataset("unnamed", data=data, chunks=(4, N_LEVELS, N_LAT))
        file.create_dataset("sparse", shape, "f4", chunks=(4, N_LEVELS, N_LAT), fillvalue=7)[:8] = data[:8]
        for array, axis, key in ((a, k, name) for a in ("t", "counts") for k, name in enumerate(("time", "level", "lat"))):
            file[array].dims[axis].attach_scale(file[key])
        file["number"] = 3.0
    return str(name)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "lat"))


def timed(path: Path, time: Any, **attrs: Any) -> str:
    """A file with "x" along a time."""
    with h5py.File(path, "w") as file:
        file["time"], file["x"] = time, np.arange(len(time), dtype="f4")
        file["time"].attrs.update(attrs)
        file["time"].make_scale("time")
        file["x"].dims[0].attach_scale(file["time"])
    return str(path)


def stream(path: str, dataset: Any = "t", spec: Any = None, **options: Any) -> shardload.Stream:
    return shardload.stream(
        path, mesh(), P("data") if spec is None else spec, dataset=dataset, **{"batch": 4, "prefetch": 0} | options
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch": 0}, "batch is 0; expected how many samples a batch has, 1 or more, or None for single steps"),
        ({"batch": 4.0}, r"batch is 4\.0; expected"),
        ({"shuffle": -1}, "shuffle is -1; expected a seed, an integer from 0 on, or None"),
        ({"shuffle": True}, "shuffle is True; expected a seed"),
        ({"epochs": 0}, "epochs is 0; expected how often all samples are given, 1 or more, or None"),
        ({"prefetch": -1}, "prefetch is -1; expected how many batches are made ahead, 0 or more"),
        ({"prefetch": None}, "prefetch is None; expected"),
        ({"remainder": "keep"}, "remainder is 'keep'; expected 'drop', 'pad' or 'error'"),
        ({"border": "cross"}, "border is 'cross'; expected 'reread' or 'drop'"),
        ({"gaps": "fill"}, "gaps is 'fill'; expected 'error', 'skip' or 'ignore'"),
        ({"pool": "much"}, "pool is 'much'; expected bytes"),
        ({"pool": 0}, "pool is 0; expected more than 0 bytes"),
        ({"along": None}, "along is None; expected the name of an axis in the file, such as 'time', or its number"),
        ({"window": ()}, r"window is \(\); expected steps from the anchor of a sample"),
        ({"window": (0, 0)}, r"window is \(0, 0\); expected .* a tuple of different ones such as \(-1, 0\)"),
        ({"window": 0.5}, r"window is 0\.5; expected"),
        ({"dataset": {"x": "t", "y": "t"}, "scale": {"x": (0.0, 2.0)}}, r"scale does not match the arrays: .*\['y'\]"),
        ({"scale": (0.0,)}, r"scale is \(0\.0,\); expected a mean and a standard deviation"),
        ({"scale": (1.0, 0.0)}, r"scale is \(1\.0, 0\.0\); expected .* that is nowhere 0"),
        ({"stack": 1}, "stack is 1; expected the name of an axis, such as 'channel'"),
        ({"verify": "full"}, "verify is 'full', .* pass verify='index' or 'checksum'"),
        ({"readers": "direct"}, "readers is 'direct', .* readers='auto', 'root' or a number"),
        ({"dataset": "*"}, "a stream needs the names of its arrays"),
        # What does not fit the file, or another option.
        ({"along": 3}, r"along is 3, but '/t' in .* has shape \(24, 3, 4\): pass an axis of it"),
        ({"along": -4}, r"along is -4, but .* has shape \(24, 3, 4\)"),
        (
            {"along": "step"},
            "along is 'step', but '/t' in .* has the axes 'time', 'level', 'lat'; pass one .* along=0",
        ),
        ({"along": "levle"}, r"has the axes 'time', 'level', 'lat'. Did you mean 'level'\?"),
        (
            {"dataset": "unnamed", "along": "time"},
            "along is 'time', but '/unnamed' in .* has no names of axes; pass .* along=0",
        ),
        ({"dataset": "number", "spec": P()}, r"along is 0, but '/number' in .* has shape \(\)"),
        ({"select": 5}, "select takes one index of axis 0 of '/t' in .*, along which the stream goes: pass a slice"),
        (
            {"dataset": ["t", "u"]},
            "steps, but '/t' in .* has 24, '/u' in .* has 20. Pass select= to take the same of each, or, if they are parts",
        ),
        ({"batch": 25}, "^24 steps have 24 samples, which make no batch of 25. .* pass a smaller batch, or remainder='pad'$"),
        (
            {"window": 24, "remainder": "pad", "gaps": "ignore"},
            r"24 steps with a window from \+24 to \+24 have 0 samples, which make no batch of 4. Select more steps",
        ),
        (
            {"window": range(20), "border": "drop", "shuffle": 1, "gaps": "skip"},
            r"have 0 samples, .* over gaps \(1 here\) with gaps='ignore', .* border='reread'",
        ),
        # Not after a whole epoch, also if no axis is padded.
        (
            {"dataset": "counts", "spec": P(), "batch": 5, "remainder": "pad", "pad": np.nan},
            "pad is nan, which an array of int32",
        ),
        ({"batch": 5, "remainder": "error"}, "24 samples are 4 batches of 5, and 4 are left, .* or a batch that divides them$"),
        (
            {"shuffle": 1, "pool": 100},
            r"pool is 100 B, less than a block of 4 steps, 192 B \(a chunk .* Pass pool=576 for 3",
        ),
        (
            {"dataset": "counts", "scale": (1.0, 2.0)},
            "scale is float64 .* does not fit a step of '/counts' .* int32 .* dtype='float32', too",
        ),
        (
            {"scale": (np.zeros(3), np.ones(3))},
            r"scale is float64 of shape \(3,\) and .* does not fit a step of '/t' .*: float32 of shape \(3, 4\)",
        ),
        (
            {"spec": P("data", "lat"), "window": (-1, 0), "gaps": "skip"},
            r"the spec P\('data', 'lat'\) cuts the axis of the window, axis 1 of a batch, .* pass P\('data', None, 'lat'\)",
        ),
        (
            {"spec": {"x": P("data", "lat"), "y": P()}, "window": {"x": (0, 1)}, "dataset": {"x": "t", "y": "t"}},
            r"the spec\['x'\] P\('data', 'lat'\) cuts the axis of the window",
        ),
        ({"spec": P("lat"), "window": (0, 1), "batch": None}, r"cuts the axis of the window, axis 0 of a batch"),
        (
            {"scale": (1j, 1.0)},
            "scale is complex128 .* does not fit a step of '/t' .*: float32 .* complex ones for complex values only",
        ),
        ({"spec": P("time")}, "names mesh axis 'time', but the axes of the mesh are"),
        (
            {"spec": P(None, None, None, "lat")},
            r"P\(None, None, None, 'lat'\) has 4 entries, but the axes of a batch of '/t' in .* are: samples, 2 of a step",
        ),
        (
            {"spec": P("data", None, None, None, "lat"), "window": (0, 1), "gaps": "skip"},
            "has 5 entries, but the axes of a batch of '/t' in .* are: samples, the axis of the window, 2 of a step",
        ),
        (
            {"spec": P(None, None, "lat"), "batch": None},
            "has 3 entries, but the axes of a batch of '/t' in .* are: 2 of a step",
        ),
        ({"window": {"z": 1}, "dataset": {"x": "t"}}, r"window does not match the arrays: only window has \['z'\]"),
        # Arrays that are no stack.
        (
            {"dataset": ["t", "unnamed"], "stack": "lat"},
            "stack is 'lat', an axis that some arrays have, but '/unnamed' .* has not",
        ),
        ({"dataset": ["t", "counts"], "stack": "channel"}, "stack is 'channel', but '/counts' .* and '/t' .* are not alike"),
        ({"dataset": ["t", "t"], "stack": "time"}, "stack is 'time', which is the axis of the stream or one that select drops"),
        ({"dataset": ["t", "t"], "stack": "lat", "spec": P(None, None, "lat")}, r"P\(None, None, 'lat'\) cuts that axis"),
        (
            {"dataset": ["t", "t"], "stack": "new", "spec": P("data", "lat")},
            r"P\('data', 'lat'\) cuts the new axis of stack.*: pass P\('data', None, 'lat'\)",
        ),
        (
            {"dataset": ["t", "t"], "stack": "new", "spec": P(None, None, None, None, "lat")},
            "has 5 entries, but the axes of a batch of '/t' in .* are: samples, the new axis of stack, 2 of a step",
        ),
        ({"dataset": {"a": "t", "b": "t"}, "stack": {"c": "new"}}, "stack does not match the arrays"),
        (
            {"dataset": {"a": ["t", "u"], "b": "t"}, "stack": {"a": "new"}},
            r"stack has no \['b'\]. .* the same keys, with None for \['b'\], in no stack",
        ),
        (
            {"select": {"time": [3, 1, 2]}},
            r"select has \[3, 1, 2\] on axis 0, 'time'.* pass a slice around them, and pick of the result",
        ),
    ],
)
def test_options_that_are_wrong(path: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        stream(path, **options)


def test_parts_of_one_array_that_are_passed_as_two(path: str, tmp_path: Path) -> None:
    """Wrong if it did not say how the parts become one array."""
    write_hdf5(tmp_path / "b.h5", {"t": np.zeros((20, N_LEVELS, N_LAT), "f4")})
    with pytest.raises(ConfigError, match=r"are parts of one array, pass shardload.concat\(PATHS, along=AXIS\)"):
        stream([path, str(tmp_path / "b.h5")])  # type: ignore[arg-type]


def test_arrays_whose_axes_are_in_another_order(tmp_path: Path) -> None:
    """Wrong if lengths alone were compared: of square maps one would be turned in the stack."""
    with h5py.File(tmp_path / "square.h5", "w") as file:
        for name, labels in (("t", ("time", "lat", "lon")), ("u", ("time", "lon", "lat"))):
            file[name] = np.zeros((8, 3, 3), "f4")
            for axis, label in enumerate(labels):
                file[name].dims[axis].label = label
    with pytest.raises(ConfigError, match=r"not alike: steps of {'lon': 3, 'lat': 3} and {'lat': 3, 'lon': 3} beside"):
        stream(str(tmp_path / "square.h5"), ["t", "u"], stack="channel")


def test_a_mesh_without_devices(path: str) -> None:
    with pytest.raises(ConfigError, match="stream needs a mesh of devices, found an AbstractMesh"):
        shardload.stream(path, AbstractMesh((1,), ("data",)), P("data"), dataset="t", batch=4)


def test_samples_that_do_not_divide_over_their_devices(path: str) -> None:
    """Wrong if it were padded, or if the error said nothing of the batch."""
    code = """if True:
        import sys, jax, numpy as np, shardload
        from jax.sharding import Mesh, PartitionSpec as P
        mesh = Mesh(np.array(jax.devices()), ("data",))
        for batch, n, remainder in ((8, 20, "error"), (8, 18, "error"), (6, 24, "drop"), (None, 24, "drop")):
            how = {"batch": batch, "select": slice(n), "remainder": remainder}
            try:
                shardload.stream(sys.argv[1], mesh, P("data"), dataset="t", pad=0.0, **how)
            except shardload.ConfigError as error:
                print(error)
    """
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code, path], env=env, capture_output=True, text=True, timeout=100)
    left, odd, first, *others = done.stdout.splitlines()
    assert left.endswith(
        "and 4 are left, which remainder='error' forbids: pass remainder='drop' or 'pad', or a batch that divides them"
    )
    assert "and 2 are left" in odd
    assert first == ("batch is 6, but P('data') cuts the samples of a batch into 4: pass a multiple of 4, such as batch=8"), (
        done.stderr
    )
    assert len(others) <= 1  # without a batch, the spec is that of the axes of a step: 3 levels over 4 devices are padded


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shuffle": 1, "pool": 16 * 48}, r"this stream takes 768 B for steps, .* and 1 batches of 192 B. Pass pool=672 \("),
        ({"shuffle": 1, "pool": 1 << 20}, r"this stream takes 1\.1 KiB for steps, .* Pass pool="),
        ({"shuffle": 1, "batch": 16}, "this stream takes 576 B .* Start more ranks, cut a batch over more of them"),
        ({"select": slice(0, 20), "batch": 16}, "this stream takes 384 B for steps, .* or write shorter chunks"),
    ],
)
def test_too_little_memory_is_an_error(path: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], text: str) -> None:
    """Wrong if the order were another one where there is less memory. A step has 48 bytes, a chunk four steps."""
    ranks_for = StreamCall.ranks_for
    room = 256 << 20, 900  # staging, and what is left
    monkeypatch.setattr(
        StreamCall, "ranks_for", lambda call, request: replace(ranks_for(call, request), memory_nbytes=sum(room))
    )
    assert len(stream(path, shuffle=1, pool=14 * 48).order()) == len(stream(path).order()) == N_STEPS
    with pytest.raises(ConfigError, match=f"a rank may use 256.0 MiB of memory, but {text}"):
        stream(path, **options)


# --- gaps


def test_a_gap_in_the_coordinate_is_an_error_that_names_it(path: str) -> None:
    """Wrong if a window reached over the gap unseen; also if the axis is given by its number."""
    for along in ("time", 0, -3):
        with pytest.raises(ConfigError) as error:
            stream(path, along=along, window=(-1, 0))
        assert "'time' of '/t' in" in str(error.value)
        assert "between steps 14 and 15 of the selection: it goes from 84 to 114, and by 6 from most steps" in str(error.value)


def test_windows_over_a_gap_are_left_out(path: str) -> None:
    anchors = stream(path, window=(-1, 0, 1), gaps="skip").order().tolist()
    assert anchors == [*range(1, GAP - 1), *range(GAP + 1, N_STEPS - 1)]
    assert stream(path, window=(-1, 0, 1), gaps="ignore").order().tolist() == [*range(1, N_STEPS - 1)]


def test_a_gap_is_counted_from_the_selection(path: str) -> None:
    """Wrong if the gap were looked for in the file's steps."""
    for select in ({"time": slice(10, 20)}, (slice(10, 20), 1)):
        anchors = stream(path, select=select, window=(0, 1), gaps="skip", batch=2).order().tolist()
        assert anchors == [0, 1, 2, 3, 5, 6, 7, 8]
    assert len(stream(path, select={"time": slice(GAP, None)}, window=(0, 1)).order()) == N_STEPS - GAP - 1


def test_a_step_without_a_time_is_a_gap(tmp_path: Path) -> None:
    """Wrong if a missing time, which has no distance to others, made all gaps go unseen."""
    time = np.arange(20.0)
    time[12:] += 30
    time[5] = -999
    name = timed(tmp_path / "a.h5", time, _FillValue=-999.0)
    how = {"dataset": "x", "along": "time", "window": (0, 1), "batch": 1}
    with pytest.raises(ConfigError, match=r"between steps 4 and 5 .* from 4 to nan, and by 1 from most .* and 2 more gaps"):
        stream(name, spec=P(), **how)
    found = stream(name, spec=P(), gaps="skip", **how).order().tolist()
    assert found == [*range(4), *range(6, 11), *range(12, 19)]


def test_other_steps_in_another_file_are_an_error(tmp_path: Path) -> None:
    """Wrong if steps of one year were paired with those of another; or if only the numbers of two units were compared."""
    hours = 6 * np.arange(20)
    one = timed(tmp_path / "one.h5", hours, units="hours since 2001-01-01")
    two = timed(tmp_path / "two.h5", hours, units="hours since 2002-01-01")
    same = timed(tmp_path / "same.h5", hours.astype("f4") / 24 + 31, units="days since 2000-12-01")
    how: dict[str, Any] = {"dataset": {"x": "x", "y": "x"}, "batch": 1}
    told = r"step 0 of the selection is time 2002-01-01 in '/x' .*two\.h5.*, and 2001-01-01 in '/x' .*one\.h5"
    with pytest.raises(ConfigError, match=told):
        stream({"x": one, "y": two}, spec=P(), **how)
    assert len(stream({"x": one, "y": two}, spec=P(), gaps="ignore", **how)) == 20
    assert len(stream({"x": one, "y": same}, spec=P(), **how)) == 20
    assert len(stream({"x": one, "y": same}, spec=P(), window={"x": 0, "y": 1}, **how)) == 19
    with pytest.raises(ConfigError, match="0 steps"):
        stream({"x": one, "y": same}, spec=P(), select={"time": slice(3, 3)}, **how)
    select = {"x": {"time": slice(0, -1)}, "y": {"time": slice(1, None)}}
    with pytest.raises(
        ConfigError, match=r"is time 2001-01-01T06:00:00 in .*, and 2001-01-01 in .* window= for steps that follow others"
    ):
        stream(one, spec=P(), select=select, **how)


def test_minutes_counted_in_seconds_since_1970_are_told_apart(tmp_path: Path) -> None:
    """Wrong if the rounding of a large number (1e-7 of it) were taken for more than the distance to the next step."""
    seconds = 1_600_000_000 + 60 * np.arange(20)
    one, same = (timed(tmp_path / f"{name}.h5", seconds, units="seconds since 1970-01-01") for name in ("one", "same"))
    later = timed(tmp_path / "later.h5", seconds + 60, units="seconds since 1970-01-01")
    how: dict[str, Any] = {"dataset": {"x": "x", "y": "x"}, "batch": 1}
    assert len(stream({"x": one, "y": same}, spec=P(), **how)) == 20
    with pytest.raises(ConfigError, match="step 0 of the selection is time 2020-09-13T12:27:40"):
        stream({"x": one, "y": later}, spec=P(), **how)


def test_a_coordinate_too_long_to_be_searched_is_an_error(tmp_path: Path) -> None:
    """Wrong if windows silently reached over its gaps, which nobody looked for."""
    n = (1 << 21) + 1
    time = np.arange(n)
    time[n // 2 :] += 1000
    path = timed(tmp_path / "long.h5", time, units="s")
    with pytest.raises(ConfigError, match=r"'time' of .* has 2,097,153 values; up to 2,097,152 are searched for gaps"):
        stream(path, "x", spec=P(), window=(0, 1), batch=1)
    stream(path, "x", spec=P(), window=(0, 1), batch=1, gaps="ignore")
    stream(path, "x", spec=P(), batch=1)


def test_leaves_make_one_window(path: str) -> None:
    """Wrong if only the windows of single leaves were looked at: here none has two steps."""
    two = {"x": "t", "y": "t"}
    with pytest.raises(ConfigError, match="has a gap"):
        stream(path, two, window={"x": 0, "y": 1})
    anchors = stream(path, two, window={"y": 1}, gaps="skip").order().tolist()
    assert anchors == [k for k in range(N_STEPS - 1) if k != GAP - 1]


def test_single_steps_and_axes_without_a_coordinate_have_no_gaps(path: str) -> None:
    assert len(stream(path).order()) == N_STEPS
    assert len(stream(path, window=1, batch=1).order()) == N_STEPS - 1
    assert len(stream(path, "unnamed", window=(0, 1)).order()) == N_STEPS - 1


def test_levels_at_unequal_distances(path: str) -> None:
    """1000, 950, 500: the last difference is more than the median."""
    with pytest.raises(ConfigError, match=r"'level' of .* between steps 1 and 2 .* gaps='ignore' if that is no matter"):
        stream(path, along="level", window=(0, 1), batch=1)
    assert len(stream(path, along="level", window=(0, 1), batch=1, gaps="ignore").order()) == 2


# --- what is not stored


def test_missing_chunks(path: str) -> None:
    """Chunks 2 to 5 of "sparse" are not stored. Wrong if a stream filled them in without a word."""
    with pytest.warns(shardload.MissingChunksWarning, match="are not stored in '/sparse'"):
        batches = list(stream(path, "sparse"))
    assert len(batches) == 6 and float(batches[-1].min()) == 7.0
    assert len(list(stream(path, "sparse", missing="fill"))) == 6
    with pytest.raises(SourceError, match="1 of 6 chunks is not stored in '/sparse'"):
        list(stream(path, "sparse", missing="error"))


# --- what a batch is


def test_a_plan_counts_what_the_order_of_many_steps_takes() -> None:
    """Wrong if an order of many steps took memory that no line of the plan names: it was 0.3 GB for a million steps."""
    values = np.zeros((100_000, 1), "f4")
    plan = shardload.stream(values, mesh(), P("data"), along=0, batch=8, window=(-1, 0, 1), shuffle=1, pool="64KiB").plan
    tracemalloc.start()
    text = str(plan)
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (said,) = re.findall(r"to plan an epoch: up to (\S+ MiB) more on each rank", text)
    assert peak_nbytes <= parse_nbytes(said.replace(" ", "")) * 1.05


def test_an_open_array_and_a_path_with_a_name(path: str) -> None:
    with h5py.File(path) as file:
        of_array = shardload.stream(file["u"], mesh(), P(), batch=4, prefetch=0)
        np.testing.assert_array_equal(of_array[1], file["u"][4:8])
    assert len(shardload.stream(Path(f"{path}:/u"), mesh(), P(), batch=4)) == 5


LEFT_OPEN = """
import sys
import jax, numpy, shardload
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(numpy.array(jax.devices()), ("a",))
streams = [shardload.stream(sys.argv[1], mesh, P(), dataset="t", along=0, prefetch=n) for n in (0, 2)]
left = [iter(stream) for stream in streams]
print([next(batches).shape for batches in left])
"""


def test_streams_that_the_program_leaves_open(path: str) -> None:
    """Wrong if every program that takes a number of batches ended with an exception that Python ignores, but prints."""
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN, path], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout and done.stderr == "", done
