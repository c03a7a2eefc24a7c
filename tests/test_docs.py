"""What the documents say to type works, and what they point to is there.

A `sh` block is run as it stands in a folder of its own, in order, after the Python blocks of the
same document; one with a comment (`<!-- ... -->`) in the line before it, or which calls a script of
ours, is only looked at: its scripts exist and parse, its options are options. A `python` block is
run after the earlier ones of its document; if it begins with `# NAME.py` it becomes that file.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from tests.replays import run_here

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
]
FENCE = re.compile(r"^(?P<before>[^\n]*)\n```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


def identity(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(document: Path, language: str) -> list[tuple[str, bool]]:
    """Its blocks in a language, and whether each is to be run."""
    found = FENCE.finditer("\n\n" + document.read_text())
    return [
        (match["text"], not match["before"].startswith("<!--") and "scripts/" not in match["text"])
        for match in found
        if match["language"] == language
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("document", DOCUMENTS, ids=identity)
def test_every_block_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python, shell = blocks(document, "python"), blocks(document, "sh")
    code: list[str] = []
    for text, _ in python:
        name = re.match(r"# (\w+\.py)\n", text)
        if name:
            (tmp_path / name[1]).write_text(text)
        else:
            code.append(text)
    if code:
        command = [sys.executable, "-W", "error", "-c", "\n".join(code)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)
    for text, is_run in shell:
        if is_run:
            command = ["sh", "-euc", text]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=identity)
def test_what_is_not_run_is_at_least_there(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, is_run in blocks(document, "sh"):
        if is_run:
            continue
        subprocess.run(["sh", "-n", "-c", text], check=True)
        for line in text.splitlines():
            program, *words = shlex.split(line)
            if program.startswith("scripts/"):
                assert os.access(ROOT / program, os.X_OK), program
                subprocess.run(["sh", "-n", ROOT / program], check=True)
            elif program == "prefetchd":
                names = takewhile(lambda word: not word.startswith("-"), words[:2])
                help_text = run_here(capsys, *names, "--help").out
                options = [word for word in words if word.startswith("--")]
                assert not [option for option in options if option not in help_text]


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=identity)
def test_links_and_pictures_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (document.parent / target).exists()]


def test_every_path_in_backticks_is_there() -> None:
    pattern = r"`((?:prefetchd|predictors|devices|tests|scripts|docs)/[\w./-]+)`"
    for document in DOCUMENTS:
        named = re.findall(pattern, document.read_text())
        assert not [path for path in named if not (ROOT / path).exists()], document


@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/*")), ids=lambda path: path.name)
def test_scripts_are_plain_sh(script: Path) -> None:
    shell = shutil.which("dash") or "sh"
    subprocess.run([shell, "-n", script], check=True)
    is_sourced = script.name.startswith("_")
    assert os.access(script, os.X_OK) != is_sourced
    assert len(script.read_text().splitlines()) <= 40


def test_the_shell_setup_tells_of_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] || exit 1\necho Python 3.9.1\n')
    old.chmod(0o755)
    for python, told in ((old, "is Python 3.9.1"), (tmp_path / "none", "is not there")):
        done = subprocess.run(
            ["sh", ROOT / "scripts" / "demo"],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHON": str(python)},
            cwd=tmp_path,
        )
        assert done.returncode == 2
        assert told in done.stderr
