"""The examples do what they say, with a tiny model."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prefetchd.lab.attention import read_attention
from tests.tiny_model import save_tiny

EXAMPLES = Path(__file__).parent.parent / "examples"
TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea. " * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    save_tiny(folder / "model")
    (folder / "text").write_text(TEXT)
    return folder


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs an example as a program, in this process: loading torch anew takes longer than it."""

    def say(name: str, *words: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return say


def known(told: str) -> int:
    return int(re.findall(r"(\d+) of \d+ tokens were in the store", told)[0])


def test_a_chat_finds_its_document_again_after_a_restart(
    folder: Path, tmp_path: Path, say: Callable[..., str]
) -> None:
    words = (folder / "model", folder / "text", "Who?", "--tokens", "8", "--store", tmp_path / "kv")
    first, second = (say("chat_restart.py", *words) for _ in range(2))
    assert known(first) == 0
    assert known(second) >= len(TEXT) // 16 * 16
    assert first.splitlines()[:-1] == second.splitlines()[:-1]
    sparse = say("chat_restart.py", *words[:2], "Where?", *words[3:], "--sparse", "4")
    assert known(sparse) >= len(TEXT) // 16 * 16


def test_a_session_is_recorded(folder: Path, tmp_path: Path, say: Callable[..., str]) -> None:
    out = tmp_path / "out.trace"
    told = say("record_session.py", folder / "model", folder / "text", out, "--tokens", "12")
    assert re.search(r"\d+ steps; hints foresee \d+% of the needed pages", told)
    assert read_attention(out).prompt_tokens == len(TEXT)
