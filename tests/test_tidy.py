"""The shape of the tree: sizes, docstrings, imports and words that do not belong into the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = sorted(
    path
    for folder in ("prefetchd", "predictors", "devices")
    for path in (ROOT / folder).rglob("*.py")
    if not {"predictors", "devices"} & set(path.relative_to(ROOT).parts[1:])
)
SOURCES = [*PACKAGE, *sorted((ROOT / "tests").rglob("*.py"))]
FILE_LINES, FUNCTION_LINES, COLUMNS = 300, 70, 100


def identity(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_the_package_was_found() -> None:
    assert len(PACKAGE) > 50
    assert len({path.resolve() for path in PACKAGE}) == len(PACKAGE)


@pytest.mark.parametrize("path", PACKAGE, ids=identity)
def test_files_are_short_and_say_what_they_decide(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= FILE_LINES
    if lines:
        assert ast.get_docstring(ast.parse(text)), "a module docstring is missing"


@pytest.mark.parametrize("path", SOURCES, ids=identity)
def test_functions_and_lines_are_short(path: Path) -> None:
    text = path.read_text()
    assert max(map(len, text.splitlines()), default=0) <= COLUMNS
    for function in functions(ast.parse(text)):
        # A signature is a table of options; what is counted is what is done with them.
        length = (function.end_lineno or 0) - function.body[0].lineno + 1
        assert length <= FUNCTION_LINES, f"{function.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=identity)
def test_the_linked_folders_are_imported_through_the_package(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        bare = [name for name in names if name.split(".")[0] in ("predictors", "devices")]
        assert not bare, f"{bare[0]} must be imported as prefetchd.{bare[0]}"


@pytest.mark.parametrize("path", PACKAGE, ids=identity)
def test_nothing_in_the_package_names_one_machine(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not re.match(r"/(work|tmp|home|root|Users)\b", node.value), node.lineno


def test_the_core_touches_no_clock_file_or_thread() -> None:
    banned = {"time", "os", "io", "threading", "asyncio", "random", "logging", "select", "socket"}
    for name in (
        "core",
        "demands",
        "observer",
        "planner",
        "staging",
        "eviction",
        "model",
        "policy",
    ):
        tree = ast.parse((ROOT / "prefetchd" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not banned & {alias.name.split(".")[0] for alias in node.names}, name
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in banned, name


def test_tests_do_not_sleep() -> None:
    sleepy = re.compile(r"\btime\.sleep\(|\basyncio\.sleep\([^0)]")
    for path in sorted((ROOT / "tests").glob("*.py")):
        if path != Path(__file__):
            assert not sleepy.search(path.read_text()), identity(path)


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n")
    assert "END OF TERMS AND CONDITIONS" in text
    assert all(f"\n   {number}. " in text for number in range(1, 10))
