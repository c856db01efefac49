"""Do the files of a release say the same as pyproject.toml?"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_conda_recipe_requires_what_the_wheel_requires():
    recipe = (ROOT / "conda/recipe.yaml").read_text()
    listed = recipe.partition("  run:\n")[2].partition("\n\n")[0]
    required = {line.removeprefix("    - ").replace(" ", "") for line in listed.splitlines()}
    assert required == {f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]}


def test_a_check_of_the_release_leaves_no_file_beside_the_sources():
    """Wrong if the stamp of an environment were written in the name of a target that is none: it was committed."""
    done = subprocess.run(["make", "-n", "release-check"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "tests/wheel.py" in done.stdout and "touch release-check" not in done.stdout


def test_all_name_one_version():
    for path in ("CITATION.cff", "conda/recipe.yaml"):
        named = re.search(r'^ *version: "?(\d[\w.]*)"?$', (ROOT / path).read_text(), re.M)
        assert named is not None and named[1] == re.sub(r"\.dev\d+$", "", PROJECT["version"]), path


def test_the_commands_of_the_recipe_are_those_of_the_project():
    recipe = (ROOT / "conda/recipe.yaml").read_text()
    assert all(f"- {name} = {target}\n" in recipe for name, target in PROJECT["scripts"].items())


def test_lower_bounds_are_the_versions_tested_as_oldest():
    asked = [Requirement(text) for text in PROJECT["dependencies"]]
    bounds = {r.name: one.version for r in asked for one in r.specifier if one.operator == ">="}
    lines = (ROOT / "tests" / "oldest-requirements.txt").read_text().splitlines()
    oldest = [
        r
        for line in lines
        if line[:1].isalpha() and ((r := Requirement(line)).marker is None or r.marker.evaluate({"python_version": "3.11"}))
    ]
    pins = {r.name: str(r.specifier).removeprefix("==") for r in oldest}
    assert pins.pop("jaxlib") == pins["jax"]
    # Below 4.1.0 there is no wheel that finds an installed MPI, and building one takes minutes: declared, not tested.
    assert (pins.pop("mpi4py"), bounds.pop("mpi4py")) == ("4.1.0", "4.0.0")
    assert pins == bounds
