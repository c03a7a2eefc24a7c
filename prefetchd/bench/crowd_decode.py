"""`prefetchd replay decode --clients N`: one recorded decode by many processes at one daemon.

Decides which blocks are whose, which daemons there are, and how what the clients saw becomes one
result. One client's run is `bench.decode`'s, and figures are those of any replay.

The first part of the prompt is common to all clients, the rest each one's own; all are in one
namespace, whose staging is sized by them together. Private daemons take turns, one a run, as
runtimes do where a replay has no daemon; one that is there is used as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prefetchd import metrics
from prefetchd.bench.content import block_names
from prefetchd.bench.crowd import together
from prefetchd.bench.crowd_figures import Round, bound, crowd_figures
from prefetchd.bench.decode import check_stamps, run_decode
from prefetchd.bench.decode_loop import Log, Pace
from prefetchd.bench.replay import (
    ReplaySettings,
    fill,
    layout_of,
    options_of,
    pace_of,
    preload,
)
from prefetchd.bench.runs import Plan, ReplayError, Report, plans, told_settings, trace_notes
from prefetchd.bench.seen import Seen, mark
from prefetchd.bench.served import Crowd, cpu_s, private_daemon
from prefetchd.core import CoreLimits
from prefetchd.lab.workload import Workload, block_map
from prefetchd.model import NO_IDS, Geometry
from prefetchd.sidecar.client import Client
from prefetchd.sidecar.connecting import connect

ORDER_UNKNOWN = "oracle is not run: nobody knows in which order several clients will ask"
NO_CONTROLS = (
    "no control was run: each needs a daemon with other settings; --clients without --connect "
    "starts private ones"
)


def whole(workload: Workload, crowd: Crowd) -> Workload:
    """The workload with room for the blocks of all clients."""
    blocks = workload.geometry.blocks
    total = blocks + (crowd.clients - 1) * (blocks - _common(workload, crowd))
    return replace(workload, geometry=Geometry(workload.geometry.layers, total))


def _common(workload: Workload, crowd: Crowd) -> int:
    return int(crowd.shared * workload.prompt_blocks)


def check_staging(workload: Workload, slots: int, clients: int) -> None:
    """Raises ReplayError where the layers that clients hold at once do not fit."""
    if slots < 2 * workload.widest * clients:
        raise ReplayError(
            f"staging of {slots} pages is too small: each of {clients} clients needs up to "
            f"{workload.widest} for a layer, and holds the layer before it still; give it at least "
            f"{2 * workload.widest * clients}"
        )


def replay_decode_crowd(
    directory: Path,
    workload: Workload,
    settings: ReplaySettings,
    crowd: Crowd,
    report: Report | None = None,
) -> metrics.Result:
    """Run everything and say how it went; `directory` holds the store of private daemons. Raises
    ReplayError, StoreError, SidecarError, WrongBytes ..."""
    report = report or Report()
    notes = trace_notes(workload, hints=settings.hints)
    seen = Seen(str(settings.gpu))
    runner = _Runner(directory, workload, settings, crowd, report, seen, notes)
    if crowd.connect:
        notes.append(NO_CONTROLS)
        planned, settings = runner.as_it_is()
    else:
        planned = crowd_plans(workload, settings, crowd)
    rounds: dict[str, list[Round]] = {plan.name: [] for plan in planned}
    for number in range(settings.rounds):
        for plan in planned if number % 2 == 0 else reversed(planned):
            report.say(f"round {number + 1}: {plan.name}")
            time.sleep(settings.idle_s)
            rounds[plan.name].append(runner.one(plan))
    runs, clients = [], []
    for plan in planned:
        one, each = crowd_figures(plan, rounds[plan.name], settings)
        runs.append(one)
        clients += each
        notes += bound(plan.name, rounds[plan.name])
    more: dict[str, str | int | float | bool] = {"idle_s": settings.idle_s, "tend": settings.tend}
    more |= {"clients": crowd.clients, "shared": crowd.shared, "connect": crowd.connect}
    return metrics.Result(
        device=runner.seen.described(),
        settings=told_settings(whole(workload, crowd), settings, more),
        runs=metrics.relate(runs),
        clients=clients,
        notes=notes,
    )


def crowd_plans(workload: Workload, settings: ReplaySettings, crowd: Crowd) -> list[Plan]:
    """Those that private daemons can make. Raises ReplayError, RegistryError."""
    check_staging(workload, settings.staging_slots, crowd.clients)
    if crowd.clients > 1:
        kept = tuple(name for name in settings.controls if name != "oracle")
        settings = replace(settings, controls=kept)
    return [
        replace(plan, slots=plan.slots * crowd.clients) if plan.name == "cold" else plan
        for plan in plans(whole(workload, crowd), settings)
    ]


@dataclass(slots=True)
class _Runner:
    directory: Path
    workload: Workload
    settings: ReplaySettings
    crowd: Crowd
    report: Report
    seen: Seen
    notes: list[str]

    def as_it_is(self) -> tuple[list[Plan], ReplaySettings]:
        """Fill the daemon's namespace; its one run, and the settings that it has."""
        with self._connect(self.crowd.connect) as kv:
            geometry = whole(self.workload, self.crowd).geometry
            if failed := fill(kv, geometry, self.settings.seed, self.report):
                raise ReplayError(f"the daemon did not store this trace's blocks: {failed}")
            check_staging(self.workload, kv.slots, self.crowd.clients)
            stats = kv.stats()
            control = stats.predictor == "none"
            plan = Plan(stats.predictor, control, stats.evict, "", kv.slots, CoreLimits())
            return [plan], replace(self.settings, staging_slots=kv.slots, evict=stats.evict)

    def one(self, plan: Plan) -> Round:
        crowd, everything = self.crowd, whole(self.workload, self.crowd)
        with ExitStack() as stack:
            address = crowd.connect
            if not address:
                options = options_of(self.directory, everything, self.settings, plan)
                # The daemon's own device for a GPU: clients have one of theirs.
                options = replace(options, gpu="host")
                address = stack.enter_context(private_daemon(self.directory, options, self.notes))
            kv = stack.enter_context(self._connect(address))
            if plan.name == "resident":
                preload(kv, everything.geometry.pages)
            before, started_s = mark(kv), cpu_s(kv.daemon_pid)
            logs = together(self._client(address), crowd.clients, self.report.steps)
            spent_s = cpu_s(kv.daemon_pid) - started_s
            self.seen.note(kv, before)
        took_ns = max(sum(log.step_ns) for log in logs)
        return Round(logs, spent_s * 1e9 / took_ns)

    def _connect(self, address: str) -> Client:
        geometry = whole(self.workload, self.crowd).geometry
        return connect(
            address,
            namespace=self.crowd.namespace,
            token=self.crowd.token,
            layout=layout_of(self.workload, self.settings),
            blocks=geometry.blocks,
            gpu=self.settings.gpu,
        )

    def _client(self, address: str) -> _Decoding:
        crowd, settings = self.crowd, self.settings
        common = _common(self.workload, crowd)
        names = block_names(whole(self.workload, crowd).geometry.blocks, settings.seed)
        assert isinstance(settings.gpu, str)
        pace = pace_of(settings)
        return _Decoding(
            replace(crowd, connect=address),
            self.workload,
            common,
            names,
            pace,
            settings.gpu,
            settings.seed,
        )


@dataclass(frozen=True, slots=True)
class _Decoding:
    """What one client's process does; `names` are the keys of all clients' blocks."""

    crowd: Crowd
    workload: Workload
    common: int
    names: list[bytes]
    pace: Pace
    gpu: str
    seed: int

    def __call__(
        self, number: int, begin: Callable[[], None], progress: Callable[[int], None]
    ) -> Log:
        crowd, layers = self.crowd, self.workload.geometry.layers
        own = block_map(self.workload.geometry.blocks, self.common, number)
        with connect(
            crowd.connect, namespace=crowd.namespace, token=crowd.token, gpu=self.gpu
        ) as kv:
            places = kv.lookup(self.names)
            if len(places) < len(self.names):
                raise ReplayError("the daemon does not hold this trace's blocks any more")
            workload = self.workload.moved(places[own], kv.geometry)
            begin()
            log = run_decode(kv, workload, self.pace, progress)
            stamped_as = np.full(kv.geometry.pages, -1, np.int64)
        stamped_as[kv.geometry.all_pages(places)] = np.arange(len(places) * layers)
        log.verified = check_stamps(log, self.seed, stamped_as)
        return _slim(log)


def _slim(log: Log) -> Log:
    """Without what has been checked: logs go from process to process."""
    none = np.empty(0, np.float32)
    log.served = [
        replace(one, demand=replace(one.demand, pages=NO_IDS, scores=none), stamps=None)
        for one in log.served
    ]
    return log
