"""What a replay's result says in words: names of runs, the verdict sentence, the notes.

Decides the sentences that the terminal and the report share. Refuses to compute figures of its own
and to know how the words are drawn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from prefetchd.metrics import Result, Run, find

KINDS = {
    "MEASURED": "a real device, read past the page cache",
    "EMULATED": "a model of a device, not a device",
    "SIMULATED": "a modelled drive under a virtual clock: nothing was read and nothing timed",
    "RAM": "what was read lies in memory (tmpfs), all of it or in part: these are figures of the "
    "software, not of a drive",
    "CACHED": "bytes came from a cache as well as from the drive: faster than the drive alone",
    "UNREAD": "no run read anything from the device: these figures say nothing about it",
}
SETTING = {
    "EMULATED": "On an emulated device, ",
    "SIMULATED": "Simulated, ",
    "RAM": "In RAM, not on a drive, ",
    "CACHED": "With a cache before the drive, ",
    "UNREAD": "With nothing read from the device, ",
}
ROUND_RANGE_MAX = 0.2  # of the median; the rule of steady state in storage benchmarks


class Note(NamedTuple):
    """Something a reader must know: a word for it (maybe empty) and the sentence."""

    word: str
    text: str


def order(result: Result) -> list[Run]:
    """Controls first, then predictors, each as they were run."""
    return sorted(result.runs, key=lambda run: not run.control)


def labels(runs: list[Run]) -> list[str]:
    """A name for each run, printable and distinct: the eviction is added where names repeat."""
    printable = ["".join(c for c in run.name if c.isprintable()) or "unnamed" for run in runs]
    repeated = Counter(printable)
    names = [
        f"{name} ({run.evict})" if repeated[name] > 1 else name
        for name, run in zip(printable, runs, strict=True)
    ]
    seen: Counter[str] = Counter()
    for position, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[position] = f"{name} #{seen[name]}"
    return names


def best(result: Result) -> Run | None:
    """The predictor with the shortest step; None when only controls were run."""
    predictors = [run for run in result.runs if not run.control]
    return min(predictors, key=lambda run: run.tpot_ms, default=None)


def name_of(run: Run, result: Result) -> str:
    runs = order(result)
    return labels(runs)[next(i for i, other in enumerate(runs) if other is run)]


def percent(share: float) -> str:
    """Three digits at most, and no rounding of something to nothing: "0.06 %", "37.4 %"."""
    value = 100 * share
    if not value:
        return "0 %"
    if abs(value) < 0.01:
        return f"{value:.1g} %"
    digits = 2 if abs(value) < 1 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} %"


def verdict(result: Result) -> str:
    """The result in one or two sentences, as good or as bad as it is."""
    run = best(result)
    none = find(result.runs, "none")
    if run is None:
        return "Only controls were run: no predictor to judge. " + _cost_of_none(none)
    name = name_of(run, result)
    said = [clause for clause in (_hidden(run, none, name), _pace(run), _found(run)) if clause]
    sentence = "; ".join(said) + "."
    setting = SETTING.get(result.device.kind, "")
    # A predictor's name is written as it is; a sentence that starts with a word is not.
    if setting or sentence.startswith(name):
        return setting + sentence
    return sentence[0].upper() + sentence[1:]


def _cost_of_none(none: Run | None) -> str:
    if none is None or none.tpot_ratio is None:
        return "Run resident and none too, to see what staging costs."
    return f"A step with {_plain(none)} took {none.tpot_ratio:.2f} times that with all in DRAM."


def _plain(none: Run) -> str:
    evict = none.evict.upper() if len(none.evict) <= 3 else none.evict
    return f"plain {evict} staging"


def _hidden(run: Run, none: Run | None, name: str) -> str:
    if none is None:
        return f"{name} was the fastest predictor"
    plain = _plain(none)
    if run.extra_share is None:  # nobody knows what there was to lose
        return f"{name} took {run.tpot_ms / none.tpot_ms:.2f} times as long as {plain}"
    lost = (none.tpot_ratio or 1) - 1
    if lost < 0.01:
        return f"{plain} lost only {percent(lost)} of a step, too little to judge {name} by"
    hidden = 1 - run.extra_share
    if hidden >= 0.01:
        return f"{name} hid {hidden:.0%} of the time that {plain} lost".replace("%", " %")
    if hidden > -0.01:
        return f"{name} hid none of the time that {plain} lost"
    return f"{name} lost {run.extra_share:.2f} times the time that {plain} lost: it made it worse"


def _pace(run: Run) -> str:
    step = f"a step took {run.tpot_ms:.2f} ms"
    if run.tpot_ratio is None:
        return step
    return f"{step}, {run.tpot_ratio:.2f} times that with all in DRAM"


def _found(run: Run) -> str:
    if run.late_rate is None or run.miss_rate is None:
        return ""
    waited = f"{percent(run.late_rate + run.miss_rate)} of demanded pages were late or missing"
    if run.stalled_share is None:
        return waited
    return f"{waited}, and {percent(run.stalled_share)} of layer demands had to wait"


def notes(result: Result) -> list[Note]:
    """Verdicts and downgrades first, then what the runs say of themselves; each once."""
    found = [_split(text) for text in _written(result)]
    kind = result.device.kind
    if kind != "MEASURED":
        found.insert(0, Note(kind, KINDS[kind]))
    found.extend(_about_rounds(result))
    found.extend(_about_failures(result))
    found.extend(_about_samples(result))
    return list(dict.fromkeys(found))


def _written(result: Result) -> Iterator[str]:
    yield from result.notes
    for text in result.device.notes:
        yield f"device {result.device.name}: {text}"
    for text in result.device.gpu.notes:
        yield f"GPU device {result.device.gpu.name}: {text}"
    for bound in result.bounds:
        yield f"{bound.name} is a bound, computed: {bound.meaning}"
    for run in result.runs:
        for text in run.notes:
            note = _split(text)
            yield f"{note.word}: {name_of(run, result)}: {note.text}".removeprefix(": ")


def _split(text: str) -> Note:
    match = re.fullmatch(r"([A-Z][A-Z-]+): (.+)", text, re.DOTALL)
    return Note(match[1], match[2]) if match else Note("", text)


def _about_rounds(result: Result) -> Iterator[Note]:
    if result.settings.rounds == 1 and result.device.kind != "SIMULATED":
        yield Note("", "one round only: nothing says how much a second would differ")
    for run in result.runs:
        spread = max(run.tpot_ms_rounds, default=0) - min(run.tpot_ms_rounds, default=0)
        if spread > ROUND_RANGE_MAX * run.tpot_ms:
            yield Note(
                "UNSTEADY",
                f"{name_of(run, result)}: step times of its rounds differ by "
                f"{percent(spread / run.tpot_ms)} of their median",
            )


def _about_failures(result: Result) -> Iterator[Note]:
    for run in result.runs:
        parts = [f"{count:,} {kind}" for kind, count in run.failures.items() if count]
        if parts:
            yield Note(
                "FAILED READS",
                f"{name_of(run, result)}: {', '.join(parts)}; each became a miss, none was served",
            )


def _about_samples(result: Result) -> Iterator[Note]:
    fewest = min((run.stall_us.n for run in result.runs if run.stall_us.n), default=10_000)
    if fewest < 10_000:
        yield Note(
            "",
            f"a percentile needs 10 samples beyond it, so p99 is stated from 1,000 stalls and p99.9"
            f" from 10,000; the run with the fewest has {fewest:,}",
        )
