"""Do the files exist that the pages name (every link, and every `path.py` in backticks), and is their output real?"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import h5py
import jax
import numpy as np
import pytest
import xarray
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import shardload
from examples import many_arrays, shuffling
from shardload.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
]
FOLDERS = ("shardload", "tests", "benchmarks", "examples", "slurm", "docs")
MADE_BY_THE_READER = {"anomaly.py", "example.py", "first.py", "spectrum.py"}


@pytest.fixture(scope="module")
def modules() -> list[str]:
    """All Python files, each with a slash before it."""
    return [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def slugs(page: Path) -> set[str]:
    """What a link may have behind its `#`: the headings of a page, as GitHub and Sphinx name them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    texts = [re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path, modules: list[str]) -> None:
    """Wrong if a file or a heading were moved or renamed and a page still sent its reader to the old place."""
    text = page.read_text()
    links = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [path for path, _, _ in links if path and not (page.parent / path).exists()] == []
    within = [(page.parent / path if path else page, anchor) for path, _, anchor in links if anchor]
    assert [f"{to.name}#{anchor}" for to, anchor in within if to.suffix == ".md" and anchor not in slugs(to)] == []
    named = set(re.findall(r"`([\w/.-]+\.py)(?:::\w+)?`", text)) - MADE_BY_THE_READER
    assert [name for name in sorted(named) if not any(module.endswith(f"/{name}") for module in modules)] == []


def pages_below(page: Path) -> set[Path]:
    """A page, and those of its tables of contents."""
    entries = [
        line
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        for line in block.split()
    ]
    names = [entry.strip("<>") for entry in entries if (page.parent / f"{entry.strip('<>')}.md").exists()]
    return {page}.union(*(pages_below((page.parent / f"{name}.md").resolve()) for name in names))


def test_the_table_of_contents_has_every_page() -> None:
    """Wrong if a page were added that no reader would find."""
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert pages - pages_below(ROOT / "docs" / "index.md") == {ROOT / "docs" / "README.md"}


def test_the_reference_has_every_name() -> None:
    pages = "".join((ROOT / "docs" / "reference" / f"{name}.md").read_text() for name in ("api", "errors"))
    named = re.findall(r"^   (\w+)$|^\.\. autoexception:: (\w+)$", pages, re.MULTILINE)
    assert sorted(first or second for first, second in named) == sorted(shardload.__all__)


def test_messages_of_the_page_are_those_of_the_code() -> None:
    """Wrong if a message were put in other words and nobody found it on the page any more."""
    table = (ROOT / "docs" / "reference" / "errors.md").read_text().partition("<!-- messages")[2].partition("\n## ")[0]
    first = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    pieces = [piece for cell in first for piece in re.findall("`([^`]+)`", cell)]
    code = "".join(path.read_text() for path in (ROOT / "shardload").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a message on several lines
    assert len(pieces) > 20 and [piece for piece in pieces if piece not in code] == []


def test_paraview_finds_the_field(tmp_path: Path) -> None:
    """The .xdmf of the page names an array of the file, with its shape and type; times of the netCDF file are dates."""
    page = ROOT / "docs" / "paraview.md"
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("a",))
    rho = jax.device_put(np.arange(24, dtype="f4").reshape(2, 3, 4), NamedSharding(mesh, P("a")))
    names = {"shardload": shardload, "jax": jax, "rho": rho, "t2m": rho}
    names |= {"hours": 6.0 * np.arange(2), "lat": np.linspace(-90, 90, 3), "lon": 90.0 * np.arange(4)}
    with contextlib.chdir(tmp_path):
        exec(block("xdmf", page), names)
        exec(block("cf", page), names)
        grid: Any = ElementTree.parse("rho.xdmf").getroot().find("Domain/Grid")
        item = grid.find("Attribute/DataItem")
        file, _, name = item.text.partition(":/")
        with h5py.File(file) as opened:
            assert tuple(map(int, item.attrib["Dimensions"].split())) == opened[name].shape == (2, 3, 4)
            assert int(item.attrib["Precision"]) == opened[name].dtype.itemsize
        assert [of.text for of in grid.findall("Geometry/DataItem")] == ["0 0 0", "0.5 1.0 2.0"]
        velocity = jax.device_put(np.arange(72, dtype="f4").reshape(2, 3, 4, 3), NamedSharding(mesh, P("a")))
        names["write_xdmf"]("u.h5", "u", velocity, (1, 1, 1))
        attribute: Any = ElementTree.parse("u.xdmf").getroot().find("Domain/Grid/Attribute")
        assert attribute.attrib["AttributeType"] == "Vector"
        assert [of.attrib["Dimensions"] for of in attribute] == ["2 3 4 3"]
        with xarray.open_dataset("t2m.nc", engine="h5netcdf") as dataset:
            assert dataset["time"].values[1] == np.datetime64("2001-01-01T06:00")


def test_the_plan_of_many_arrays_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the page, for the file of the example. Estimated seconds depend on the machine."""
    page = (ROOT / "docs" / "many-arrays.md").read_text()
    shown: Any = re.search(r"    shardload (plan snap[^\n]*)\n\n<!-- plan[^\n]*-->\n```text\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    many_arrays.write_example("snap.h5")
    made = CliRunner().invoke(app, [word.strip('"') for word in shown[1].split()], env={"COLUMNS": "80"})
    assert made.exit_code == 0, made.stderr
    printed, promised = (re.sub(r"about \S+ s", "about ... s", text) for text in (made.stdout, shown[2]))
    assert printed == promised


def block(marker: str, page: Path = ROOT / "docs" / "streams.md") -> str:
    """The fenced block of a page after an HTML comment that starts with `marker`."""
    found = re.search(rf"<!-- {marker}[^\n]*-->\n```\w*\n(.*?)```", page.read_text(), re.DOTALL)
    assert found is not None, marker
    return found[1]


def test_the_stream_of_the_page_is_real(tmp_path: Path) -> None:
    """Its plan is what the page says, and its state goes on."""
    names: dict[str, Any] = {}
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(block("stream"), names)
        exec(block("checkpoint"), names)
        exec(block("mean and deviation"), names)
    assert (names["n"], *np.round([names["mean"], names["deviation"]], 1)) == (2000 * 32 * 64, 280.0, 12.5)
    assert printed.getvalue() == block("plan of the stream")
    assert (names["x"].shape, names["y"].shape) == ((8, 2, 32, 64), (8, 32, 64))
    assert names["batches"].index.tolist() == names["ds"].order(0)[80:88].tolist()


def test_the_table_of_shuffling_is_real(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["shuffling"])
    shuffling.main()
    assert capsys.readouterr().out == block("shuffling")
