"""What every predictor must do: `check_predictor` tries one and tells in words what is wrong.

Decides how a predictor is named, and what is told of it. Nothing is judged by time but a call that
does not come back: what a call costs is measured and reported. Refuses to say whether guesses are
any good: a replay does.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prefetchd.predictor import Predictor
from prefetchd.registry import PLUGIN_PREFIX, predictor_class
from prefetchd.testing_play import Make
from prefetchd.testing_tries import QUICK_SPACES, SPACES, Finding, Tries

Progress = Callable[[int, int], None]
Wanted = str | Path | Make | type[Predictor]
"""A class, a factory called with (geometry, slots), a registered name, or a path to a .py file."""


@dataclass(frozen=True, slots=True)
class PredictorReport:
    """`notes`: what could not be tried, and why. `call_us`: the median time of a call, by hook."""

    predictor: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    calls: int
    call_us: dict[str, float]

    @property
    def ok(self) -> bool:
        return not self.findings

    def words(self) -> str:
        """Findings one a line, then notes, then what a call costs."""
        lines = []
        for finding in self.findings:
            more = f" ({finding.times} times)" if finding.times > 1 else ""
            lines.append(f"{finding.hook}: {finding.words}{more}")
        lines += [f"note: {note}" for note in self.notes]
        costs = ", ".join(f"{hook} {taken:.0f} us" for hook, taken in self.call_us.items())
        if costs:
            lines.append(f"a call takes (median, over {SPACES[-1]}): {costs}")
        found = len(self.findings)
        count = f"{found} fault{'s' if found > 1 else ''}" if found else "nothing is wrong"
        lines.append(f"{self.predictor}: {count}, in {self.calls} calls")
        return "\n".join(lines)


class PredictorFaults(AssertionError):  # noqa: N818 - the plural says it
    """A predictor does what it must not; `report` has the findings."""

    def __init__(self, report: PredictorReport) -> None:
        super().__init__(report.words())
        self.report = report


def check_predictor(predictor: Wanted, *, thorough: bool = True) -> PredictorReport:
    """`examine_predictor` for tests. Raises PredictorFaults when anything is found."""
    report = examine_predictor(predictor, thorough=thorough)
    if not report.ok:
        raise PredictorFaults(report)
    return report


def examine_predictor(
    predictor: Wanted,
    *,
    thorough: bool = True,
    progress: Progress = lambda done, whole: None,
) -> PredictorReport:
    """Try a predictor with invented traffic: a class, a factory, a name, or a path to a .py file.

    A factory takes (geometry, slots). Takes seconds; if not `thorough`, it is tried in two small
    page spaces only, in no other process, and its memory is not watched. Raises RegistryError when
    there is no such predictor.
    """
    make, source = _resolved(predictor)
    tries = Tries(make)
    spaces = SPACES if thorough else QUICK_SPACES
    parts: list[Callable[[], None]] = [partial(tries.space, space) for space in spaces]
    if thorough:
        parts += [partial(tries.processes, source), tries.memory]
    for number, part in enumerate(parts):
        progress(number, len(parts))
        if tries.is_stuck:
            tries.notes.append("nothing more was tried")
            break
        if number >= len(spaces) and tries.found:
            tries.notes.append("other processes and memory are tried when the rest is right")
            break
        part()
    progress(len(parts), len(parts))
    return PredictorReport(
        tries.name, tuple(tries.found.values()), tuple(tries.notes), tries.calls, tries.call_us
    )


def _resolved(predictor: Wanted) -> tuple[Make, str]:
    """What makes it, and how another process finds it; empty if it cannot."""
    if isinstance(predictor, str | Path):
        name = str(predictor)
        return predictor_class(name), os.path.abspath(name) if name.endswith(".py") else name
    module = getattr(predictor, "__module__", None) or ""
    path: str = getattr(predictor, "__qualname__", "")
    if module.startswith(PLUGIN_PREFIX):
        return predictor, inspect.getfile(predictor)
    if not path or module in ("", "__main__") or "<" in path:
        return predictor, ""
    return predictor, f"{module}:{path}"
