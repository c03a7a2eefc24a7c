"""Changing a runtime while it serves: its predictor, its eviction policy, its bounds.

Decides the order: whatever can be refused is tried first, and then all of it is changed between
two events, so that no request fails and none sees half of it. What can be changed is `changes`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from prefetchd.admission import Admission
from prefetchd.advising import Advising
from prefetchd.changes import Changes, sorted_out
from prefetchd.draining import Drains
from prefetchd.eviction import Eviction
from prefetchd.exchanging import exchange
from prefetchd.growing import OpenBlocks
from prefetchd.options import Options
from prefetchd.policies import eviction_of, predictor_of
from prefetchd.predictor import Predictor
from prefetchd.puts import Puts
from prefetchd.room import blocks_under_cap, blocks_under_quota
from prefetchd.shallow import at_most
from prefetchd.store import StoreError
from prefetchd.tickets import Ticket


class Reconfiguring(Advising):
    options: Options
    slots: int
    _puts: Puts
    _growing: OpenBlocks
    _timeout_ns: int
    _drains: Drains
    demand: Callable[..., Ticket]
    close: Callable[[], None]

    def begin(self) -> None:
        """Go by the options. Raises StoreError, closed again, for a path to drain that is none."""
        self._puts.room.shrink()
        self._drains = Drains(self.engine, self._parts, self._puts, self.demand, self.options)
        if not self.options.drain:
            return
        try:
            numbers = self._drains.numbers(self.options.drain, opening=True)
        except StoreError:
            self.close()
            raise
        with self.engine.lock:
            self._drains.go(numbers)

    def reconfigure(self, **options: Any) -> Changes:
        """Change some of `Options` while everything goes on; what was, and what cannot be.

        At once: `predictor`, `evict`, `planner`, of `core` the depth of prefetches, candidates,
        tries and the time limit of reads; `cap_bytes`, `quota_bytes` (what is too much is evicted),
        `floor_bytes`, `ttl_s` (of what is put from now on), `lease_s`, `admission`,
        `demand_timeout_s`, `drain`, `depth` up to what the device was opened with. The rest, which
        is named, when the store is opened anew.

        Of a policy the new one takes over the order of what is staged; a predictor begins blank.
        Raises TypeError, ValueError, RegistryError, StoreError, PredictorError, and what a
        predictor's `__init__` raises: then nothing is changed. EngineError when stopped.
        """
        with self.engine.lock:  # from the first look at the options on: others change them, too
            asked = replace(self.options, **options)
            options_now, changes = sorted_out(self.options, asked, self._parts.device.depth)
            if options_now == self.options:
                return changes
            shape = self._parts.store.superblock
            blocks_max = blocks_under_cap(shape, options_now.cap_bytes)
            mine_max = blocks_under_quota(shape, options_now.quota_bytes)
            draining = self._drains.numbers(options_now.drain)
            self.engine.check()
            self._exchange(options_now)
            catalog = self._parts.catalog
            catalog.blocks_max, catalog.mine_max = blocks_max, mine_max
            self._bound(options_now)
            self.options = options_now
            self._puts.room.shrink()
            self._drains.go(draining)
        self.engine.wake()
        return changes

    def _exchange(self, options: Options) -> None:
        """The lock is held; making the new ones may fail, and nothing is changed before."""
        core, parts = self._parts.core, self._parts
        eviction: Eviction | None = None
        predictor: Predictor | None = None
        if options.evict != self.options.evict:
            eviction = eviction_of(options.evict, self.geometry, self.slots)
        reads_history = eviction is not None and core.foresight.reads_history
        if options.predictor != self.options.predictor or reads_history:
            predictor, name = predictor_of(options.predictor, self.geometry, self.slots)
        if predictor is None and eviction is None:
            return
        exchange(core, predictor, eviction)
        if predictor is not None:
            parts.predictor_name = name

    def _bound(self, options: Options) -> None:
        core, room, puts = self._parts.core, self._puts.room, self._puts
        self.engine.driver.device = at_most(self._parts.device, options.depth)
        core.planner.limits = options.planner
        core.limits = options.core
        core.foresight.candidates = options.core.candidates
        core.reads.timeout_ns = options.core.read_timeout_ns
        room.bound(options.floor_bytes, int(options.lease_s * 1e9))
        puts.ttl_s = options.ttl_s
        if options.admission != self.options.admission:
            refused = puts.admission.refused
            puts.admission = Admission(options.admission, max(1024, self.geometry.blocks))
            puts.admission.refused = refused
        self._timeout_ns = int(options.demand_timeout_s * 1e9)
        puts.patience.timeout_ns = self._growing.timeout_ns = self._timeout_ns
