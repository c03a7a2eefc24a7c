"""What of a predictor's guess is worth fetching: filter, budget, deadlines, bandwidth, feedback.

Decides which pages are prefetched and in which order. Does no I/O, reads no clock (times come with
the calls) and knows slots only through the map it is given.

Device time is the currency. A decayed least-squares fit of read latency against the number of
reads in flight gives a base latency and a service time per page; an allowance of device time
grows with the clock and is spent by every read. Demand always reads; prefetch while the allowance
lasts, and one page a plan beyond, so it is what yields when demand alone fills the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd.masks import every
from prefetchd.model import NO_IDS, Codes, Feedback, Ids, Mask, Scores, Verdict
from prefetchd.predictor import Guess

_SOURCES_MAX = 256
_FIT_DECAY = 0.98
_LEAD_DECAY = 0.9
_FEEDBACK_DECAY = 0.998  # per page: the last 500 count; of 100 the floor could not be reached
_ACTED_ON_NS = 500_000
"""About how long a completion lies there before the next read is begun: reads that take less than
this need one more in flight, or the device would idle meanwhile."""


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """`burst_pages`: most pages prefetched by one plan. `precision_floor`: a source measured
    below it is cut to a trickle. `candidates_max`: guesses looked at per plan; of a restore, those
    planned."""

    burst_pages: int = 8
    precision_floor: float = 0.02
    candidates_max: int = 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """Pages to prefetch, best first, none resident or in flight; each one's source and the
    chance (0..1) that it is wanted."""

    pages: Ids
    sources: Codes
    confidence: Scores

    def only(self, mask: Mask) -> Plan:
        """Those pages for which `mask` holds."""
        return Plan(self.pages[mask], self.sources[mask], self.confidence[mask])

    def split(self, count: int) -> tuple[Plan, Plan]:
        """The first `count` pages, and the rest."""
        head = Plan(self.pages[:count], self.sources[:count], self.confidence[:count])
        return head, Plan(self.pages[count:], self.sources[count:], self.confidence[count:])


NO_PLAN = Plan(NO_IDS, np.empty(0, np.uint8), np.empty(0, np.float32))


class Planner:
    """`known` tells which pages the store has at all; None: every page."""

    def __init__(self, limits: PlannerLimits, known: Callable[[Ids], Mask] | None = None) -> None:
        self.limits = limits
        self.known = known
        # Decayed n, sum x, sum y, sum xx, sum xy (x reads ahead, y ns), and what follows from them.
        self._fit = [0.0] * 5
        self._base_ns = self._service_ns = 0.0
        self._lead_ns = 0.0
        self._allowance_ns = 0.0
        self._allowance_at_ns: int | None = None
        self._verdicts = np.zeros((_SOURCES_MAX, len(Verdict)))
        self._precision = np.ones(_SOURCES_MAX)
        self._probes = np.zeros(_SOURCES_MAX, np.int64)
        self._distrusted = False  # whether any source is below the floor

    # --- what has been measured ---

    def observe_reads(self, ahead: NDArray[np.int32], latency_ns: NDArray[np.int64]) -> None:
        """Reads ended: how many were in flight when each was issued (itself included)."""
        if len(ahead) == 0:
            return
        x, y = ahead.astype(np.float64), latency_ns.astype(np.float64)
        total = np.add.reduce  # `sum()` with less around it
        count, sum_x, sum_y, sum_xx, sum_xy = self._fit
        count = count * _FIT_DECAY + len(x)
        sum_x = sum_x * _FIT_DECAY + float(total(x))
        sum_y = sum_y * _FIT_DECAY + float(total(y))
        sum_xx = sum_xx * _FIT_DECAY + float(x @ x)
        sum_xy = sum_xy * _FIT_DECAY + float(x @ y)
        self._fit = [count, sum_x, sum_y, sum_xx, sum_xy]
        spread = count * sum_xx - sum_x * sum_x
        slope = (count * sum_xy - sum_x * sum_y) / spread if spread > 1e-9 else 0.0
        self._service_ns = max(0.0, slope)
        self._base_ns = max(0.0, (sum_y - self._service_ns * sum_x) / count)

    def observe_lead(self, lead_ns: int) -> None:
        """The time between a hint and the demand that it foretold."""
        old = self._lead_ns
        self._lead_ns = lead_ns if old == 0 else _LEAD_DECAY * old + (1 - _LEAD_DECAY) * lead_ns

    def observe_feedback(self, feedback: Feedback) -> None:
        counts = np.zeros_like(self._verdicts)
        np.add.at(counts, (feedback.sources, feedback.verdicts), 1)
        self._verdicts = self._verdicts * _FEEDBACK_DECAY ** len(feedback.pages) + counts
        wanted = self._verdicts[:, Verdict.USEFUL] + self._verdicts[:, Verdict.LATE]
        self._precision = (wanted + 4) / (self._verdicts.sum(axis=1) + 4)
        self._distrusted = bool(self._precision.min() < self.limits.precision_floor)

    def forget_sources(self) -> None:
        """Another predictor: its sources have proved nothing yet."""
        self._verdicts[:] = 0
        self._precision = np.ones(_SOURCES_MAX)
        self._probes[:] = 0
        self._distrusted = False

    def device_times_ns(self) -> tuple[float, float]:
        """(base latency, service time per page), both 0 until something was read."""
        return self._base_ns, self._service_ns

    @property
    def distrusts(self) -> bool:
        """Whether any source has proved useless, so that plans leave some of a guess out."""
        return self._distrusted

    def precision(self) -> NDArray[np.float64]:
        """Per source: the share of its ended prefetches that were demanded, optimistic at first."""
        return self._precision

    # --- spending ---

    def advance(self, now_ns: int) -> None:
        """Let device time pass: the allowance grows with the clock, up to one burst."""
        if self._allowance_at_ns is not None:
            self._allowance_ns += now_ns - self._allowance_at_ns
        self._allowance_at_ns = now_ns
        most = (self.limits.burst_pages + 1) * max(self._service_ns, 1.0)
        self._allowance_ns = min(max(self._allowance_ns, -most), most)

    def spend(self, pages: int) -> None:
        """Pages were read, for whatever reason."""
        self._allowance_ns -= pages * self._service_ns

    def budget(self, left_ns: int | None = None) -> int:
        """Pages that may be prefetched now: what fits the burst, the allowance and the lead, which
        is `left_ns` if a deadline is known, or else what hints have given so far."""
        base, service = self._base_ns, self._service_ns
        lead_ns = self._lead_ns if left_ns is None else max(left_ns, 1)
        pages = self.limits.burst_pages
        if service > 0:
            pages = min(pages, int(max(0.0, self._allowance_ns) / service) + 1)
            if lead_ns > 0:
                # At least one: a late prefetch still arrives before a miss would.
                pages = min(pages, max(1, int((lead_ns - base) / service)))
        return pages

    def busy_depth(self, *, waiting: bool) -> int:
        """Reads in flight that keep the device busy without a queue that a demand waits behind.

        Little's law with twice the base latency. While nobody is `waiting`, one more of those that
        take no longer than a completion lies about. So beside a demand a prefetch starts only where
        the device would else have nothing to do, and one that serves reads one after another has
        no second prefetch in front of a demand. As good as unbounded until something was measured.
        """
        base, service = self.device_times_ns()
        if service <= 0:
            return self.limits.candidates_max
        spare = not waiting and service < _ACTED_ON_NS
        return 1 + spare + int(2 * base / service)

    def plan(self, guess: Guess, slot_of: NDArray[np.int32], now_ns: int) -> Plan:
        """Choose at most `budget()` absent pages of the guess, best first, each once.

        `slot_of` maps page to slot, -1 where absent. All ids are in range.
        """
        self.advance(now_ns)
        # What is needed in any case is paced by the depth alone: late is better than not at all.
        # It is looked at behind what is here already, however much that is.
        most = self.limits.candidates_max
        pages = guess.pages if guess.restores else guess.pages[:most]
        left_ns = None if guess.deadline_ns is None else guess.deadline_ns - now_ns
        budget = min(len(pages), most) if guess.restores else self.budget(left_ns)
        if len(pages) == 0 or budget <= 0:
            return NO_PLAN
        (places,) = (slot_of.take(pages) < 0).nonzero()
        if self._distrusted:
            places = places[self._allowed(places, guess.sources)]
        places = self._readable(pages, places, budget)
        chosen: Ids = pages[places]
        sources = self._sources(places, guess.sources)
        if guess.confidence is None:
            return Plan(chosen, sources, self.precision()[sources].astype(np.float32))
        return Plan(chosen, sources, guess.confidence[places])

    def _readable(self, pages: Ids, places: Ids, count: int) -> Ids:
        """The first `count` of `places` whose pages differ and can be read."""
        chosen = _distinct(pages, places, count)
        # Nearly always all can be read, so only the few that were chosen are looked at first.
        if self.known is None or every(self.known(pages[chosen])):
            return chosen
        return _distinct(pages, places[self.known(pages[places])], count)

    def _sources(self, places: Ids, sources: Codes | None) -> Codes:
        return np.zeros(len(places), np.uint8) if sources is None else sources[places]

    def _allowed(self, places: Ids, sources: Codes | None) -> Mask:
        """Drop sources that have proved useless, but for one probe in sixteen plans."""
        source = self._sources(places, sources)
        allowed: Mask = self.precision()[source] >= self.limits.precision_floor
        if not allowed.all():
            refused = source[~allowed][0]
            self._probes[refused] += 1
            if self._probes[refused] % 16 == 0:
                allowed[np.flatnonzero(~allowed)[0]] = True
        return allowed


def _distinct(pages: Ids, places: Ids, count: int) -> Ids:
    """The first `count` of `places` whose pages differ; guesses rarely repeat themselves."""
    chosen = places[:count]
    if len(set(pages[chosen].tolist())) == len(chosen):
        return chosen
    _, first = np.unique(pages[places], return_index=True)
    first.sort()
    kept: Ids = places[first[:count]]
    return kept
