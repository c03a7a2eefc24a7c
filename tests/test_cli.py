"""The command line: exit codes, and that whatever goes wrong is told in one line."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from prefetchd import __version__, cli
from prefetchd.bench.decode import WrongBytes
from prefetchd.engine import EngineError
from prefetchd.gpu import GpuError
from prefetchd.lab.trace_format import TraceError
from prefetchd.store import StoreError
from tests.replays import replay_words, run_child, run_here, write_trace

Capture = pytest.CaptureFixture[str]


def test_version_and_help(capsys: Capture) -> None:
    assert run_here(capsys, "--version").out.strip() == __version__
    for words in (
        ["-h"],
        ["replay", "--help"],
        ["replay", "decode", "-h"],
        ["bench", "ring", "-h"],
    ):
        done = run_here(capsys, *words)
        assert done.code == 0
        assert "Usage" in done.out


@pytest.mark.parametrize(
    "words", [["fetch"], ["replay"], ["replay", "decode", "--stagin", "5%"], ["bench", "ring"]]
)
def test_a_wrong_word_is_bad_input(words: list[str], capsys: Capture) -> None:
    done = run_here(capsys, *words)
    assert done.code == 2
    assert "Traceback" not in done.err


def test_layouts_of_models(tmp_path: Path, capsys: Capture) -> None:
    done = run_here(capsys, "layout", "llama-3-8b", "--context", "131072", "--bandwidth", "14GB")
    assert done.code == 0
    assert "131,072 B a token; 16.00 GiB at 131,072" in done.out
    assert "not" in done.out
    run_here(capsys, "layout", "llama-9").failed(2, "'llama-9' is no preset", "llama-3-8b")
    run_here(capsys, "layout", "llama-3-8b", "--dtype", "fp5").failed(2, "fp5", "bf16")
    run_here(capsys, "layout", "llama-3-8b", "--bandwidth", "fast").failed(2, "'fast' is no size")
    (tmp_path / "config.json").write_text("{")
    run_here(capsys, "layout", tmp_path / "config.json").failed(2, "JSON")


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def app(_: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (TraceError("the trace"), 2, "the trace"),
        (ValueError("the size [b]"), 2, "the size [b]"),
        (StoreError("the store"), 3, "the store"),
        (GpuError("the GPU"), 3, "the GPU"),
        (EngineError("the engine"), 3, "the engine"),
        (WrongBytes("the page"), 4, "the page"),
        (OSError(errno.EROFS, "", "/some/r.json"), 3, "/some/r.json: EROFS"),
    ],
)
def test_every_error_of_ours_has_an_exit_code_and_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, told: str
) -> None:
    fail(monkeypatch, error)
    done = run_here(capsys)
    done.failed(code, told)
    assert len(done.err.splitlines()) == 1


def test_a_fault_that_nobody_foresaw_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, AttributeError("ours"))
    with pytest.raises(AttributeError, match="ours"):
        cli.main([])


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["store", "check", "{}", "--json"], 3, "there is no store"),
        (["store", "check", "--json", "{}", "--fast"], 2, "not understood"),
        (["store", "erase", "--json", "{}"], 3, "there is no store"),
        (["bench", "write", "{}", "--json", "-", "--page-bytes", "much"], 2, "'much' is no size"),
        (["bench", "ring", "{}/f", "--json", "-", "--load", "x"], 2, "'x' is no load"),
        (["replay", "decode", "{}/no.npz", "--json=-"], 2, "no.npz"),
        (["-v", "replay", "restore", "{}/no.jsonl", "--json", "-"], 2, "no.jsonl"),
    ],
)
def test_whoever_asked_for_json_on_stdout_gets_the_error_as_json(
    tmp_path: Path, capsys: Capture, words: list[str], code: int, told: str
) -> None:
    done = run_here(capsys, *(word.format(tmp_path) for word in words))
    answer = json.loads(done.out)
    assert (done.code, answer["exit_code"]) == (code, code)
    assert told in answer["error"]
    assert done.err


def test_json_for_a_file_leaves_stdout_alone(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "r.json"
    done = run_here(capsys, "replay", "decode", tmp_path / "no.npz", "--json", out)
    done.failed(2, "no.npz")
    assert (done.out, out.exists()) == ("", False)


RAISES = """
from prefetchd.predictor import Predictor


class Mine(Predictor):
    def on_access(self, access):
        self.nothing.there
"""


@pytest.mark.parametrize("hints", ["--hints", "--no-hints"])
def test_a_predictor_that_raises_is_named_with_file_and_line(tmp_path: Path, hints: str) -> None:
    (tmp_path / "mine.py").write_text(RAISES)
    trace = write_trace(tmp_path / "tiny.npz")
    words = replay_words(trace, tmp_path / "s", "--controls", "", hints, "--layer-us", "200")
    done = run_child([*words, "--predictor", "./mine.py"], cwd=tmp_path)
    done.failed(2, "mine.py, line 7", "on_access", "AttributeError")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("class Nothing: pass", "holds no predictor"),
        ("import no_such_module", "no_such_module"),
        ("def (:", "line 1"),
    ],
)
def test_a_file_that_is_no_predictor(tmp_path: Path, capsys: Capture, text: str, told: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    trace = write_trace(tmp_path / "tiny.npz")
    words = replay_words(trace, tmp_path / "s", "--predictor", tmp_path / "mine.py")
    run_here(capsys, *words).failed(2, "mine.py", told)
