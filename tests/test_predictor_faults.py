"""A predictor that goes wrong stops the engine, and is named with its hook, file and line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd import ChainHint, DoneHint, EngineError, PageHint, Runtime
from prefetchd.cli import main
from prefetchd.model import Access, Feedback, Hint, Hinted, Idle
from prefetchd.predictor import Guess, Predictor
from tests.runtime_bench import PLAIN, content, keys, open_plain

ONE = np.array([0])


class Bad(Predictor):
    """Raises in the hook `bad`, or says `said`."""

    name = "bad"
    bad = ""
    said: Any = Guess()

    def _do(self, hook: str) -> None:
        if self.bad == hook:
            raise KeyError(hook)

    def on_access(self, access: Access) -> None:
        self._do("on_access")

    def on_page_hint(self, hint: PageHint) -> None:
        self._do("on_page_hint")

    def on_chain_hint(self, hint: ChainHint) -> None:
        self._do("on_chain_hint")

    def on_done_hint(self, hint: DoneHint) -> None:
        self._do("on_done_hint")

    def on_feedback(self, feedback: Feedback) -> None:
        self._do("on_feedback")

    def predict(self, now_ns: int, limit: int) -> Guess:
        self._do("predict")
        guess: Guess = self.said
        return guess


HINTS: dict[str, Hint] = {
    "on_page_hint": PageHint(ONE, np.ones(1, np.float32)),
    "on_chain_hint": ChainHint(1, ONE),
    "on_done_hint": DoneHint(1),
    "predict": DoneHint(1),
}
PLACE = rf"predictor bad, %s: {__file__}, line \d+: "


def use(runtime: Runtime, hook: str) -> None:
    if hook in HINTS:
        runtime.engine.handle(Hinted(HINTS[hook]))
    runtime.demand(ONE)
    for _ in range(10):
        runtime.engine.handle(Idle())


@pytest.mark.parametrize("hook", [*HINTS, "on_access"])
def test_a_hook_that_raises_is_named_to_the_caller(hook: str, monkeypatch: Any) -> None:
    with open_plain(None, replace(PLAIN, predictor=Bad)) as runtime:
        runtime.put(keys(1), content(1)).wait()
        monkeypatch.setattr(Bad, "bad", hook)
        words = f"the engine has stopped: {PLACE % hook}KeyError: '{hook}'"
        with pytest.raises(EngineError, match=words) as caught:
            use(runtime, hook)
        assert isinstance(caught.value.__cause__, KeyError), "whose traceback leads to the line"
        with pytest.raises(EngineError, match=words):
            runtime.demand(ONE)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, "TypeError: it returned None, not a Guess"),
        ([1, 2], r"TypeError: it returned \[1, 2\], not a Guess"),
        (Guess([0, 1]), r"TypeError: pages is a list, .*\(its guess cannot be used\)"),  # type: ignore[arg-type]
        (Guess(np.arange(2) * 0.5), r"TypeError: pages holds float64, such as 0.0: make it int64"),  # type: ignore[arg-type]
        (Guess(np.arange(3), np.ones(1, np.float32)), "GuessError: there are 1 confidences for"),
        (Guess(np.arange(1), np.ones(2, np.float32)), "GuessError: there are 2 confidences for"),
        (Guess(np.arange(2), np.array([0.5, np.nan], np.float32)), "GuessError: .* not nan to nan"),
        (Guess(np.arange(2), np.array([np.inf, 1], np.float32)), "GuessError: .* not 1.0 to inf"),
        (Guess(np.arange(2), np.array([1, -1], np.float32)), "GuessError: .* not -1.0 to 1.0"),
        (Guess(np.arange(2), np.array([1.5, 0])), "GuessError: .* between 0 and 1, not 0.0 to 1.5"),
        (Guess(np.arange(2), np.ones(1)), "GuessError: there are 1 confidences for 2 pages"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("pumped", [True, False])
def test_what_is_no_guess_is_told(said: Any, words: str, pumped: bool, monkeypatch: Any) -> None:
    with open_plain(None, replace(PLAIN, predictor=Bad)) as runtime:
        runtime.put(keys(2), content(2)).wait()
        monkeypatch.setattr(Bad, "said", said)
        with pytest.raises(EngineError, match=(PLACE % "predict") + words):  # noqa: PT012
            if pumped:
                runtime.hint(DoneHint(1))
                runtime.engine._pump.join(30)
                runtime.engine.check()
            else:
                runtime.engine.handle(Hinted(DoneHint(1)))


@pytest.mark.parametrize("hook", ["predict", "on_access", "__init__", "import"])
@pytest.mark.parametrize("command", ["simulate", "check"])
def test_one_that_ends_the_program_is_told(
    hook: str, command: str, tmp_path: Path, capsys: Any
) -> None:
    """sys.exit(0) in a hook would make a run that did nothing look like one that went well."""
    path = tmp_path / "leaving.py"
    signature = {"predict": "now_ns, limit", "on_access": "access", "__init__": "geometry, slots"}
    body = f"    def {hook}(self, {signature.get(hook)}):\n        sys.exit(0)\n"
    if hook == "import":
        body = "    name = sys.exit(0)\n"
    path.write_text(
        "import sys\nfrom prefetchd.predictor import Predictor\n\n"
        f"class Leaving(Predictor):\n{body}"
    )
    words = ["predictor", "check", str(path)]
    if command == "simulate":
        words = ["simulate", "decode", "--predictor", str(path), "--steps", "20", "--controls", ""]
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert ended.value.code == (1 if command == "check" and hook != "import" else 2)
    assert "SystemExit: 0" in said.out + said.err
    if (command, hook) != ("check", "__init__"):
        assert "line " in said.out + said.err
