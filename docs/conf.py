"""How is the site of the documentation made? ``make docs`` runs Sphinx with this file; docs/design/docs-site.md says why."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = "shardload"
author = copyright = "the shardload authors"
version = release = PYPROJECT["version"]

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_templates", "README.md"]  # docs/README.md is for those who look at the folder
root_doc = "index"
templates_path = ["_templates"]

# --- pages
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 4  # [text](page.md#a-heading), as on the pages of a repository
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# --- tutorials: each runs at every build, in a folder of its own, and an exception in one is an error of the build
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Simulated devices wait for each other; on a busy machine for longer than XLA allows them.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_collective_call_terminate_timeout_seconds=600")
os.environ["PYTHONPATH"] = str(ROOT)  # for the kernels

# --- reference
autosummary_generate = True
default_role = "py:obj"  # `load` in a docstring is a link
autodoc_typehints = "none"  # the docstrings say what may be passed
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
nitpicky = True  # but only names of this project can be looked up without a network
nitpick_ignore_regex = [(r"py:.*", r"(?!shardload\b).*")]

# --- looks
html_theme = "pydata_sphinx_theme"
html_title = "shardload"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"index": [], "choose": []}
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 6,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "default",
    "pygments_dark_style": "github-dark",
}


def outside(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links to files of the repository that are no pages lead to the repository, if it has an address; else they are names."""
    repository = PYPROJECT.get("urls", {}).get("Repository")
    here = (DOCS / docname).parent

    def rewritten(link: re.Match[str]) -> str:
        path, _, anchor = link[2].partition("#")
        target = (here / path).resolve()
        if "://" in path or not path or target.is_relative_to(DOCS) or not target.is_relative_to(ROOT):
            return link[0]
        name = target.relative_to(ROOT)
        if repository:
            return f"[{link[1]}]({repository}/blob/main/{name}{'#' + anchor if anchor else ''})"
        return f"`{name}`" if link[1] == str(name) else f"{link[1]} (`{name}`)"

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", rewritten, source[0])


def pages_in_docstrings(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Where a docstring names a page of docs/, the site has a link."""
    lines[:] = [re.sub(r"docs/([\w/-]+)\.md", r":doc:`/\1`", line) for line in lines]


class Help(Directive):
    """What a command prints for ``--help``: ``{help} plan``."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The text as it is in a terminal of 80 columns."""
        from typer.testing import CliRunner

        from shardload.cli.main import app

        made = CliRunner().invoke(app, [*self.arguments, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"})
        if made.exit_code:
            raise self.error(f"shardload {' '.join(self.arguments)} --help: {made.output}")
        text = f"$ shardload {' '.join([*self.arguments, '--help'])}\n" + made.stdout.strip("\n")
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    """What this site has beyond Sphinx."""
    app.connect("source-read", outside)
    app.connect("autodoc-process-docstring", pages_in_docstrings)
    app.add_directive("help", Help)
    return {"parallel_read_safe": True}
