"""Do the files of a release say the same as pyproject.toml?"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def next_release() -> str:
    return re.sub(r"\.dev\d+$", "", PROJECT["version"])


def test_the_conda_recipe_requires_what_the_wheel_requires():
    recipe = (ROOT / "conda/recipe.yaml").read_text()
    listed = recipe.partition("  run:\n")[2].partition("\n\n")[0]
    required = {line.removeprefix("    - ").replace(" ", "") for line in listed.splitlines()}
    assert required == {f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]}


def test_all_name_one_version():
    for path in ("CITATION.cff", "conda/recipe.yaml"):
        named = re.search(r'^ *version: "?(\d[\w.]*)"?$', (ROOT / path).read_text(), re.M)
        assert named is not None and named[1] == next_release(), path


def test_the_commands_of_the_recipe_are_those_of_the_project():
    recipe = (ROOT / "conda/recipe.yaml").read_text()
    assert all(f"- {name} = {target}\n" in recipe for name, target in PROJECT["scripts"].items())
