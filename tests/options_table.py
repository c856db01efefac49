"""Writes docs/options.md from the declared options: ``python -m tests.options_table > docs/options.md``."""

from __future__ import annotations

from shardload.options import OPTIONS, Option

__all__ = ["document"]

_HEAD = """# Options

Every keyword of `load`, `plan`, `scatter`, `stream`, `verify`, `save`, `plan_save` and `append`, with its default,
and those that `load_dataset` takes of them. For more, see the docstrings: `help(shardload.load)`.
On the command line an option is a flag of its name, such as `--allow-external`: [commands](reference/cli.md).
All ranks must pass the same value, unless the table says otherwise.

| option | default | what it is | functions |
|---|---|---|---|
"""


def _text(value: object) -> str:
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def _row(option: Option) -> str:
    default = _text(option.default)
    for call, other in (option.other_defaults or {}).items():
        if call in ("save", "load_dataset"):
            default += f"; in `{call}` {_text(other)}"
    text = option.help.replace("|", "\\|")
    if option.is_kept and option.text is None:
        text += " May differ from rank to rank."
    return f"| `{option.name}` | {default} | {text} | {', '.join(f'`{call}`' for call in option.calls)} |\n"


def document() -> str:
    """All of the file."""
    return _HEAD + "".join(_row(option) for option in OPTIONS.values())


if __name__ == "__main__":
    print(document(), end="")
