"""What a decode loses by being served: the same replay embedded and through a daemon, in turns.

`python -m tests.sidecar_decode [--rounds N] [--steps N] [--predictor NAME] TRACE...` prints, for
each trace, the part of `none`'s extra step time that remains, (tpot - resident) / (none -
resident), embedded and through a private daemon, each against its own controls; and through the
daemon against the embedded controls.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from prefetchd.bench.crowd_decode import replay_decode_crowd
from prefetchd.bench.replay import ReplaySettings, Report, prepare_store, replay_decode
from prefetchd.bench.runs import staging_slots
from prefetchd.bench.served import Crowd
from prefetchd.lab.attention import read_attention
from prefetchd.lab.workload import Workload, single
from prefetchd.metrics import Result, extra_share

Tpots = dict[str, list[float]]


def measure(workload: Workload, predictor: str, rounds: int, folder: Path) -> tuple[Tpots, Tpots]:
    """TPOT (ms) of each run, a round each, embedded and through the daemon."""
    settings = ReplaySettings(
        page_bytes=65536,
        staging_slots=staging_slots(workload, 0.25),
        controls=("resident", "none"),
        predictors=(predictor,),
        rounds=1,
    )
    prepare_store(folder, workload, settings, Report())
    embedded: Tpots = defaultdict(list)
    served: Tpots = defaultdict(list)

    def note(result: Result, tpots: Tpots) -> None:
        for run in result.runs:
            assert not run.failures, run.failures
            tpots[run.name].append(run.tpot_ms)
            if not run.control:
                told = f"{run.hit_rate or 0:.2%} hit, {run.late_rate or 0:.2%} late"
                print(f"  {run.name}: {told}, {run.miss_rate or 0:.2%} miss", flush=True)

    for number in range(rounds):
        for way in ("embedded", "served") if number % 2 == 0 else ("served", "embedded"):
            if way == "embedded":
                note(replay_decode(folder, workload, settings), embedded)
            else:
                note(replay_decode_crowd(folder, workload, settings, Crowd()), served)
        print(f"round {number + 1}: {last(embedded)} embedded, {last(served)} served", flush=True)
    return embedded, served


def last(tpots: Tpots) -> str:
    return " ".join(f"{name} {times[-1]:.2f}" for name, times in tpots.items())


def extra(predictor: str, tpots: Tpots, controls: Tpots) -> float:
    """Infinite where there was nothing to hide."""
    middle = {name: statistics.median(times) for name, times in controls.items()}
    share = extra_share(statistics.median(tpots[predictor]), middle["resident"], middle["none"])
    return float("inf") if share is None else share


def main(
    traces: list[Path],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int | None, typer.Option(min=17)] = None,
    predictor: str = "attention",
) -> None:
    for trace in traces:
        workload = single(read_attention(trace), top_k=16, steps=steps)
        print(f"{trace.name}: {workload.steps} steps, TPOT in ms")
        with tempfile.TemporaryDirectory() as name:
            embedded, served = measure(workload, predictor, rounds, Path(name) / "store")
        own = extra(predictor, served, served)
        alone = extra(predictor, embedded, embedded)
        mixed = extra(predictor, served, embedded)
        print(
            f"{trace.name}: extra share {alone:.3f} embedded, {own:.3f} served "
            f"({own - alone:+.3f}); {mixed:.3f} by the embedded controls"
        )


if __name__ == "__main__":
    typer.run(main)
