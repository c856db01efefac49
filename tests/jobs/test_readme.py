"""README.md is true: its example runs as printed and prints what is printed under it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.jobs.launch import run_job

README = Path(__file__).parents[2] / "README.md"


def block(marker: str) -> str:
    """The fenced block after an HTML comment that starts with `marker`."""
    found = re.search(rf"<!-- {re.escape(marker)}[^\n]*-->\n```\w*\n(.*?)```", README.read_text(), re.DOTALL)
    if found is None:
        raise AssertionError(f"README.md has no block marked {marker!r}")
    return found[1]


def without_folders(text: str) -> str:
    """Paths differ from machine to machine; files and everything else do not."""
    return re.sub(r"[^' ]*/([^'/ ]+\.nc)", r".../\1", text)


def without_estimates(text: str) -> str:
    """Estimated seconds depend on the cores of the machine: a row of the table, and the ratio in the sentence."""
    text = re.sub(r"(est\. seconds).*", r"\1", text)
    return re.sub(r"about \d+\.\d+x", "about ...x", " ".join(text.split()))


def test_the_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block("example"))
    job = run_job([str(script)], 4, timeout=120)
    assert job.returncode == 0, job.stderr
    printed = [line.rstrip() for line in job.stdout.splitlines() if not line.startswith("[Gloo]")]
    promised = [line.rstrip() for line in block("output").splitlines()]
    shown = [without_estimates(without_folders(line)) for line in printed if line]
    assert shown == [without_estimates(line) for line in promised if line]


def test_the_example_fits_on_fifteen_lines() -> None:
    assert len(block("example").splitlines()) <= 15
