"""Other libraries: docs/clients.md shows the lines of the scripts, and what is installed here takes what they load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients import CLIENTS, INSTALLED, Client, run_client, write_file
from tests.jobs.launch import ROOT

PAGE = (ROOT / "docs" / "clients.md").read_text()


def lines_of(client: Client) -> str:
    """What the page has to show of the script."""
    found = re.search(r"# what docs/clients\.md shows\n(.*)# check the result\n", client.script.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_the_page_shows_the_script(client: Client) -> None:
    """Wrong if the page said other lines than those that were run."""
    shown = re.search(rf"<!-- {client.script.name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert shown[1] == lines_of(client)
    assert lines_of(client).count("\n") <= 6
    assert f"\n| {client.name} | " in PAGE, "and when it ran, with which versions"


@pytest.mark.thorough
@pytest.mark.parametrize("client", INSTALLED, ids=lambda client: client.name)
def test_a_client_takes_what_was_loaded(tmp_path: Path, client: Client) -> None:
    """Wrong if the page named a spec that the library refuses, or takes for another."""
    write_file(tmp_path)
    assert "on 4 devices" in run_client(client, 4, tmp_path)


def test_jaxdecomp_is_among_them() -> None:
    """It is a requirement of the tests: without it the test above would try nothing."""
    assert "jaxDecomp" in {client.name for client in INSTALLED}
