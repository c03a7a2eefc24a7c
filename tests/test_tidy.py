"""The shape of the tree: sizes, docstrings, imports, and words that do not belong here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = sorted(
    path
    for folder in ("prefetchd", "predictors", "devices")
    for path in (ROOT / folder).rglob("*.py")
    if not {"predictors", "devices"} & set(path.relative_to(ROOT).parts[1:])
)
SOURCES = [*PACKAGE, *sorted((ROOT / "tests").rglob("*.py"))]
FILE_LINES, FUNCTION_LINES, COLUMNS = 300, 70, 100


def at(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def nodes(paths: list[Path]) -> Iterator[tuple[Path, ast.AST]]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


def imported(node: ast.AST) -> list[str]:
    """The modules that a statement names in full."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module or ""]
    return []


def test_the_package_was_found_once() -> None:
    assert len(PACKAGE) > 50
    assert len({path.resolve() for path in PACKAGE}) == len(PACKAGE)


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE}
    assert [at(path, count) for path, count in lengths.items() if count > FILE_LINES] == []


def test_every_module_says_what_it_decides() -> None:
    texts = {path: path.read_text() for path in PACKAGE}
    silent = [
        path for path, text in texts.items() if text and not ast.get_docstring(ast.parse(text))
    ]
    assert [at(path, 1) for path in silent] == []


def test_lines_are_short() -> None:
    lines = [
        (path, number, line)
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
    ]
    pragma = re.compile(r"  # (type: ignore|noqa).*$")  # which ruff does not count either
    long = [at(path, number) for path, number, line in lines if len(pragma.sub("", line)) > COLUMNS]
    assert long == []


def test_functions_are_short() -> None:
    long: list[str] = []
    for path, node in nodes(SOURCES):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        # A signature is a table of options; what is counted is what is done with them.
        if (node.end_lineno or 0) - node.body[0].lineno + 1 > FUNCTION_LINES:
            long.append(at(path, node.lineno))
    assert long == []


def test_the_linked_folders_are_imported_through_the_package() -> None:
    bare = [
        at(path, getattr(node, "lineno", 0))
        for path, node in nodes(SOURCES)
        if {name.split(".")[0] for name in imported(node)} & {"predictors", "devices"}
    ]
    assert bare == []


def test_nothing_in_the_package_names_one_machine() -> None:
    named = [
        at(path, node.lineno)
        for path, node in nodes(PACKAGE)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.match(r"/(work|tmp|home|root|Users)\b", node.value)
    ]
    assert named == []


def test_what_decides_touches_no_clock_file_or_thread() -> None:
    banned = {"time", "os", "io", "threading", "asyncio", "random", "logging", "select", "socket"}
    deciding = (
        "core",
        "demands",
        "observer",
        "planner",
        "staging",
        "eviction",
        "model",
        "policy",
        "reads",
        "guarded",
        "foresight",
        "health",
        "extents",
    )
    paths = [ROOT / "prefetchd" / f"{name}.py" for name in deciding]
    used = [
        at(path, getattr(node, "lineno", 0))
        for path, node in nodes([*paths, *sorted((ROOT / "predictors").glob("*.py"))])
        if banned & {name.split(".")[0] for name in imported(node)}
    ]
    assert used == []


def test_tests_do_not_sleep() -> None:
    sleepy = re.compile(r"\btime\.sleep\(|\basyncio\.sleep\([^0)]")
    tests = [path for path in sorted((ROOT / "tests").glob("*.py")) if path != Path(__file__)]
    assert [at(path, 1) for path in tests if sleepy.search(path.read_text())] == []


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n")
    assert "END OF TERMS AND CONDITIONS" in text
    assert all(f"\n   {number}. " in text for number in range(1, 10))
