"""Do docstrings and pages about the design speak of what there is? Parameters, attributes, and every name in backticks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("shardload", "tests", "benchmarks", "examples")
TREES = {path: ast.parse(path.read_text()) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
IN_PACKAGE = [path for path in TREES if path.is_relative_to(ROOT / "shardload")]
DESIGN = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = ast.Module | ast.ClassDef | FUNCTION
# Names of other libraries and of the system, and one that a contributor shall make.
OTHERS = re.compile(
    r"H5\w+|MPI_\w+|MADV_\w+|RLIMIT_\w+|open_mfdataset|process_vm_readv|use_compression|multi_decompress_to_buffer|codec_pipeline|"
    r"nitpick_ignore_regex|xxh3_64|isal_zlib|visualize_array_sharding|FOLDER_ON_DISK|nbytes_per_second"
)


def documented(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(TREES[path]):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) is not None:
            yield node, text


def section(text: str, title: str) -> list[str]:
    """The names of a section, with the asterisks that they have there."""
    match = re.search(rf"^{title}\n-+\n(.*?)(?=^\w[\w ]*\n---|\Z)", text, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: : .*)?$", match[1] if match else "", re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


def parameters_of(function: FUNCTION) -> list[str]:
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs) if arg.arg not in ("self", "cls")]
    return names + [f"{stars}{arg.arg}" for stars, arg in (("*", args.vararg), ("**", args.kwarg)) if arg is not None]


def own_attributes(node: ast.ClassDef) -> set[str]:
    """Names of methods, fields, and whatever a method sets."""
    fields = [line.target if isinstance(line, ast.AnnAssign) else line for line in node.body]
    names = {getattr(field, "id", getattr(field, "name", "")) for field in fields}
    names |= {
        target.id for line in node.body if isinstance(line, ast.Assign) for target in line.targets if hasattr(target, "id")
    }
    return names | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)}


CLASSES = {node.name: node for path in IN_PACKAGE for node in ast.walk(TREES[path]) if isinstance(node, ast.ClassDef)}


def attributes_of(name: str) -> set[str]:
    if name not in CLASSES:
        return set()
    bases = [getattr(base, "id", "") for base in CLASSES[name].bases]
    return own_attributes(CLASSES[name]).union(*(attributes_of(base) for base in bases if base != name))


def names_in_code() -> set[str]:
    """Every word of the code: not of docstrings and comments."""
    words = {part for path in TREES for part in path.with_suffix("").parts}
    for tree in TREES.values():
        texts = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant):
                words |= set(re.findall(r"\w+", str(node.value))) if id(node) not in texts else set()
            for field in ("id", "attr", "name", "arg", "asname", "module"):
                words |= set(str(getattr(node, field, "")).split("."))
    return words


def test_sections_have_the_parameters_and_attributes_of_the_code() -> None:
    """Wrong if a parameter or a field were added, renamed or taken away, and its docstring not."""
    wrong = []
    for node, text in (entry for path in IN_PACKAGE for entry in documented(path)):
        function, attributes, parameters = node, section(text, "Attributes"), section(text, "Parameters")
        if isinstance(node, ast.ClassDef):
            function = next((line for line in node.body if getattr(line, "name", "") == "__init__"), node)
            fields = {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
            wrong += [f"{node.name}: {name} is no attribute" for name in set(attributes) - attributes_of(node.name)]
            if attributes and function is node:  # a dataclass
                public = {field for field in fields if not field.startswith("_")}
                wrong += [f"{node.name}: {name} is not explained" for name in public - set(attributes)]
        if isinstance(function, FUNCTION) and parameters and "all options" not in text:
            differing = set(parameters) ^ set(parameters_of(function))
            wrong += [f"{getattr(node, 'name', '')}: {name}" for name in differing]
    assert wrong == []


def test_names_in_backticks_are_names_of_the_code() -> None:
    """Wrong if something were renamed or removed, and a docstring or a page about the design still named it."""
    words, stale = names_in_code(), []
    texts = [(path, text, r"\w+") for path in IN_PACKAGE for _, text in documented(path)]
    texts += [(page, page.read_text(), r"\w*[a-z]_[a-z]\w*|[A-Z][a-z]\w*") for page in DESIGN]
    for path, text, pattern in texts:
        for quoted in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
            names = [name for name in re.findall(r"[A-Za-z_]\w*", quoted) if re.fullmatch(pattern, name)]
            stale += [f"{path.name}: {name}" for name in names if name not in words and not OTHERS.fullmatch(name)]
            owner, _, attribute = quoted.partition("(")[0].partition(".")
            if owner in CLASSES and attribute.isidentifier() and attribute not in attributes_of(owner):
                stale.append(f"{path.name}: {quoted}")
    assert stale == []
