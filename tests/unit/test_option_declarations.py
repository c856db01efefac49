"""Is every option declared once (`shardload.options.OPTIONS`), and do signatures, docstrings, flags and docs say the same?

Where one is missing, or has another default, a test here names it. To change a default, change its declaration, and write
docs/options.md anew with ``python -m tests.options_table``.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import shardload
from shardload.cli import arguments
from shardload.cli.arguments import as_typed
from shardload.cli.main import app
from shardload.options import AUTO, OPTIONS, CallOptions, Options
from shardload.planning.schedule import MODES
from tests.options_table import document

CALLS = ("load", "plan", "scatter", "stream", "verify", "save", "plan_save", "append")
ROOT = Path(__file__).parents[2]


def declared(call: str) -> dict[str, Any]:
    return {name: option.default_in(call) for name, option in OPTIONS.items() if call in option.calls}


@pytest.mark.parametrize("call", CALLS)
def test_a_signature_has_the_options_that_are_declared_and_their_defaults(call: str) -> None:
    """Wrong if a function had an option of its own, lacked one, or had another default."""
    parameters = inspect.signature(getattr(shardload, call)).parameters.values()
    found = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # as those of another call
        with pytest.raises(TypeError, match=rf"{call}\(\) has no option 'pads'; it takes .*{list(declared(call))[-1]}"):
            getattr(shardload, call)("a", None, pads=1)
        return
    assert found == declared(call)
    assert {name: type(value) for name, value in found.items()} == {n: type(v) for n, v in declared(call).items()}


def test_a_dataset_takes_the_options_of_a_load_but_some() -> None:
    """Wrong if an option that means nothing there were ignored, or `load` were named, which nobody called."""
    for option in ("pads", "like", "halo"):
        with pytest.raises(TypeError, match=rf"load_dataset\(\) has no option '{option}'; it takes select, .*storage$"):
            shardload.load_dataset("a.nc", None, **{option: 1})


def test_a_copy_takes_what_its_signature_says() -> None:
    """Wrong if an option that is mistyped were an error of a class that the caller does not know."""
    with pytest.raises(TypeError, match=r"copy\(\) got an unexpected keyword argument 'overwrite'"):
        shardload.copy("a.h5", "b.h5", overwrite=True)  # type: ignore[call-arg]


def parameters_of(docstring: str) -> dict[str, str]:
    """The names in a numpydoc list of parameters, each with the lines that say what it is."""
    block = inspect.cleandoc(docstring).partition("Parameters\n----------\n")[2]
    block = re.split(r"\n\n(?=\w+\n-+\n)", block)[0]
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", block):
        names = entry.partition("\n")[0].partition(" : ")[0]
        found |= dict.fromkeys(names.split(", "), entry)
    return found


@pytest.mark.parametrize("call", CALLS)
def test_a_docstring_lists_the_options_that_are_declared(call: str) -> None:
    """Wrong if an option were not documented, or one that is not there were."""
    function = getattr(shardload, call)
    listed = parameters_of(function.__doc__)
    same = next((name for name in listed if name.endswith("all options")), None)  # "as in load"
    if same is not None:
        other = {"plan": shardload.load, "verify": shardload.load, "plan_save": shardload.save}[call]
        del listed[same]
        listed = {**parameters_of(other.__doc__ or ""), **listed}
        assert set(declared(call)) <= set(listed)
    else:
        assert set(listed) == set(inspect.signature(function).parameters)
    for name, option in OPTIONS.items():
        if call in option.calls and option.choices and not re.search("As in `(load|save)`", listed[name]):
            words = re.search(r"\{(.*?)\}", listed[name])
            assert words is not None and {word.strip(' "') for word in words[1].split(",")} == set(option.choices), name


COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
FLAGS = {
    "plan": "dataset select dtype decode pad readers staging allow_external untrusted storage allow_filters processes "
    "ranks_per_node",
    "verify": "dataset select dtype decode pad readers staging missing allow_external allow_filters untrusted storage verify "
    "progress",
    "info": "allow_external allow_filters untrusted storage",
}


@pytest.mark.parametrize("command", FLAGS)
def test_flags_have_the_help_and_default_that_are_declared(command: str) -> None:
    """Wrong if a flag were missing, had another default, or said something else than the docs."""
    params = {p.opts[0]: p for p in COMMANDS[command].params if p.opts[0].startswith("--")}
    names = FLAGS[command].split()
    assert set(params) - {"--mesh", "--spec", "--json", "--help"} == {arguments._FLAGS[name] for name in names}
    for name in names:
        option, param = OPTIONS[name], params[arguments._FLAGS[name]]
        assert param.help == option.help
        default = OPTIONS["how"].default if name == "verify" else option.default
        assert param.default == ("" if name == "allow_filters" else default), name


def test_every_parser_of_a_flag_has_a_name() -> None:
    """Wrong if every command ended in an AttributeError: click 8.1, which the oldest typer comes with, asks for it."""
    assert [name for name, (_, parse) in arguments._PARSERS.items() if parse and not hasattr(parse, "__name__")] == []


def test_the_table_in_the_docs() -> None:
    """Wrong if a default or an option changed and the docs did not: ``python -m tests.options_table > docs/options.md``."""
    assert (ROOT / "docs/options.md").read_text() == document()


def test_each_default_passes_its_own_check_and_each_option_of_a_load_has_a_field() -> None:
    kept = {option.name for option in OPTIONS.values() if option.is_kept}
    assert kept == set(Options.__dataclass_fields__)
    of_call = {name for name in kept if not OPTIONS[name].is_per_array}
    assert of_call == set(CallOptions.__dataclass_fields__)  # else one array's value would count for all
    assert Options.check() == Options.check(**{n: o.default for n, o in OPTIONS.items() if o.is_kept})
    with pytest.raises(TypeError, match="no such option: stagin"):
        Options.check(stagin=1)


def test_ways_of_reading_are_those_that_are_planned() -> None:
    """Wrong if there were a way of reading that nobody can ask for."""
    assert set(OPTIONS["readers"].choices) == {AUTO, *MODES}


def test_ranks_compare_what_is_declared_to_be_the_same() -> None:
    """Wrong if an option of the values, or of waiting, could differ from rank to rank unseen."""
    told = Options.check().describe()
    assert set(told) == {name for name, option in OPTIONS.items() if option.is_kept} - {"progress"}


def test_messages_name_the_flag() -> None:
    for name, flag in arguments._FLAGS.items():
        assert as_typed(f"Pass {name}='x'") == f"Pass {flag} x"
