"""Does loading damaged files end in the right values or in an error? A few of the cases of ``python -m benchmarks fuzz``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.fuzz.files import Case, Kind, make_kinds
from benchmarks.fuzz.loads import GOOD, fuzz
from benchmarks.fuzz.worker import by_library, judge
from tests.tiers import IS_QUICK

N_CASES = 45 if IS_QUICK else 150
N_OF_A_FILTER = 1 if IS_QUICK else 3


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Kind]:
    return make_kinds(tmp_path_factory.mktemp("good"))


def test_damaged_files_give_the_right_values_or_an_error() -> None:
    found = fuzz(seed=7, n_cases=N_CASES)
    assert found.n_cases == N_CASES and found.bad == [], found.bad
    total = found.total()
    assert (
        set(total) <= set(GOOD) and min(total["right"], total["refused"]) > N_CASES // 5 and total["value"] > N_CASES // 30
    ), total


def test_good_files_are_as_their_libraries_read_them(kinds: list[Kind], tmp_path: Path) -> None:
    for kind in kinds:
        folder = tmp_path / kind.name
        path = Case(0, kind, "nothing", kind.files, set()).write(folder)
        expected = kind.values.astype(kind.values.dtype.newbyteorder("="))
        np.testing.assert_array_equal(by_library(path), expected, strict=True)
        assert len({index for *_, index in kind.payload}) == len(kind.payload)


def test_bytes_that_were_changed_are_told_from_the_rest(kinds: list[Kind]) -> None:
    """Wrong if damage to metadata counted as damage to one chunk: then wrong values there would pass."""
    named = {kind.name: kind for kind in kinds}
    module: Any = __import__("benchmarks.fuzz.files", fromlist=["_touched"])
    kind = named["hdf5-latest-chunks"]
    (name, data), (_, first, end, index) = next(iter(kind.files.items())), kind.payload[0]
    for at, expected in ((first, {index}), (end - 1, {index}), (8, None)):
        changed = bytearray(data)
        changed[at] ^= 1
        assert module._touched(kind, name, data, bytes(changed)) == expected
    assert module._touched(kind, name, data, data[:-1]) is None and module._touched(kind, name, data, data) == set()


@pytest.mark.parametrize(
    ("what", "touched", "change", "n_missing", "came"),
    [
        ("flip", {(1, 1, 0)}, lambda v: v, 0, "right"),
        ("flip", {(1, 1, 0)}, lambda v: v[5, 8, 0], 0, "value"),
        ("flip", {(1, 1, 0)}, lambda v: v[4, 8, 0], 0, "WRONG"),
        ("lost", {(1, 1, 0)}, lambda v: v[5, 8, 0], 0, "WRONG"),
        ("lost", {(1, 1, 0)}, lambda v: v[5, 8, 0], 1, "missing"),
        ("number", None, lambda v: v[5, 8, 0], 0, "WRONG"),
    ],
)
def test_wrong_values_are_found(
    kinds: list[Kind], tmp_path: Path, what: str, touched: Any, change: Callable[[Any], Any], n_missing: int, came: str
) -> None:
    """The judge itself: it must be able to say that values are wrong."""
    kind = next(kind for kind in kinds if kind.name == "hdf5-latest-chunks")
    case = Case(0, kind, what, kind.files, touched)
    path, found = case.write(tmp_path), kind.values.copy()
    view = change(found)
    if view is not found:
        at = np.argwhere(found == view)[0]
        found[tuple(at)] += 1
    assert judge(case, path, found, n_missing)[0] == came


def test_a_checksum_lets_nothing_through(kinds: list[Kind], tmp_path: Path) -> None:
    kind = next(kind for kind in kinds if kind.name == "hdf5-latest-fletcher32")
    case = Case(0, kind, "flip", kind.files, {(0, 0, 0)})
    assert judge(case, case.write(tmp_path), kind.values + 1, 0)[0] == "WRONG"


# --- filters


FILTERS = """
import json, sys
from benchmarks.fuzz import filters as f
kinds = f.good_kinds()
found = f.fuzz_filters(7, int(sys.argv[1]) * len(kinds), kinds=kinds)
record = found.record() | {"promises": found.broken_promises(), "table": found.table(), "n_kinds": len(kinds)}
print(json.dumps(record))
"""


@pytest.fixture(scope="module")
def filters() -> dict[str, Any]:
    """In a process of its own: this one has threads, and forks."""
    env = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}  # netCDF4 here may have set it
    command = [sys.executable, "-W", "ignore", "-c", FILTERS, str(N_OF_A_FILTER)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_filters_that_are_used_unasked_survive_damage(filters: dict[str, Any]) -> None:
    """A few of the cases of ``python -m benchmarks fuzz-filters``; of what is not on the list, some do not survive."""
    assert filters["promises"] == [] and filters["cases"] == N_OF_A_FILTER * filters["n_kinds"], filters["bad"]
    counts = filters["outcomes"]
    assert min(counts["right"], counts["refused"], counts["value"]) > 7 * N_OF_A_FILTER, counts
    assert counts.get("CRASH", 0) + counts.get("EXIT", 0) > N_OF_A_FILTER, counts
    assert not {"sz3 (HDF5 32024)", "bzip2 (HDF5 307)"} & set(filters["listed"]) and len(filters["listed"]) > 40
    assert filters["table"].splitlines()[-1].startswith("| all |")
