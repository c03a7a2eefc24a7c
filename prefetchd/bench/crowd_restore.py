"""`prefetchd replay restore --clients N`: recorded requests by many processes at one daemon.

Decides that every client replays all requests with blocks of its own, at the same time as the
others, in one namespace; and how what they saw is told as one run. One client's run is
`bench.restore`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from prefetchd.bench.crowd import together
from prefetchd.bench.crowd_decode import NO_CONTROLS
from prefetchd.bench.emulation import Emulation
from prefetchd.bench.restore import Pace, RestoreLog, RestoreRun
from prefetchd.bench.restore_replay import (
    Plan,
    layout_of,
    names_of,
    new_store,
    options_of,
    pace_of,
)
from prefetchd.bench.restore_result import RestoreSettings
from prefetchd.bench.runs import ReplayError
from prefetchd.bench.seen import Seen, mark
from prefetchd.bench.served import Crowd, private_daemon
from prefetchd.lab.requests import Requests
from prefetchd.sidecar.client import Client
from prefetchd.sidecar.connecting import connect
from prefetchd.stats import Stats

_SALTS = 1 << 62


@dataclass(slots=True)
class Crowded:
    """Several clients at one daemon: a private one a run, or the one that is there."""

    directory: Path
    requests: Requests
    settings: RestoreSettings
    device: str | Emulation
    crowd: Crowd
    seen: Seen = field(default_factory=lambda: Seen("host"))
    notes: list[str] = field(default_factory=list)

    def as_it_is(self) -> tuple[list[Plan], RestoreSettings]:
        """The runs of a daemon that is there, one a lead, and the settings that it has."""
        self.notes.append(NO_CONTROLS)
        with self._connect(self.crowd.connect) as kv:
            needed = self.requests.distinct * self.crowd.clients
            if kv.geometry.blocks < needed:
                raise ReplayError(
                    f"the namespace holds {kv.geometry.blocks} blocks, and {self.crowd.clients} "
                    f"clients put {needed}; use fewer --requests or --clients"
                )
            stats, slots = kv.stats(), kv.slots
        settings = msgspec.structs.replace(self.settings, staging_blocks=slots, evict=stats.evict)
        control = stats.predictor == "none"
        leads = settings.leads_ms
        return [Plan(stats.predictor, control, "", lead, slots) for lead in leads], settings

    def run(self, plan: Plan, progress: Callable[[int], None]) -> list[RestoreLog]:
        crowd, settings = self.crowd, self.settings
        with ExitStack() as stack:
            # A daemon that is there knows the keys of earlier runs; none is to be found.
            address, seed = crowd.connect, time.time_ns() % _SALTS
            if not address:
                blocks, seed = self.requests.distinct * crowd.clients, settings.seed
                folder = stack.enter_context(new_store(self.directory, settings, blocks))
                options = options_of(plan, settings, self.device)
                address = stack.enter_context(private_daemon(folder, options, self.notes))
            kv = stack.enter_context(self._connect(address))
            before, stats = mark(kv), kv.stats()
            work = _Restoring(
                replace(crowd, connect=address), self.requests, pace_of(plan, settings), seed
            )
            first, *others = together(work, crowd.clients, progress)
            self.seen.note(kv, before)
            first = replace(first, after=grown(stats, kv.stats()))
        return [first, *(replace(log, after=None) for log in others)]

    def _connect(self, address: str) -> Client:
        """A namespace that is made has room for an earlier replay's blocks, too: what is leased is
        kept from eviction up to half of a store."""
        crowd = self.crowd
        return connect(
            address,
            namespace=crowd.namespace,
            token=crowd.token,
            layout=layout_of(self.settings),
            blocks=2 * self.requests.distinct * crowd.clients,
        )


def grown(before: Stats, after: Stats) -> Stats:
    """What was counted in between."""
    return replace(
        after,
        pages_read=after.pages_read - before.pages_read,
        bytes_read=after.bytes_read - before.bytes_read,
        bytes_written=after.bytes_written - before.bytes_written,
        prefetch={name: n - before.prefetch.get(name, 0) for name, n in after.prefetch.items()},
        failures={name: n - before.failures.get(name, 0) for name, n in after.failures.items()},
    )


@dataclass(frozen=True, slots=True)
class _Restoring:
    """What one client's process does."""

    crowd: Crowd
    requests: Requests
    pace: Pace
    seed: int

    def __call__(
        self, number: int, begin: Callable[[], None], progress: Callable[[int], None]
    ) -> RestoreLog:
        crowd, seed = self.crowd, self.seed + number
        names = names_of(self.requests, seed)
        with connect(crowd.connect, namespace=crowd.namespace, token=crowd.token) as kv:
            run = RestoreRun(kv, self.requests, names, self.pace, seed, progress)
            begin()
            return run.run()
