"""Several predictors at once, each as far as it has proved right. Made to be no worse than none.

Decides whose guesses count, how many of them, and what is worth holding. It guesses nothing
itself. Three measurements hold it back:

* a source's precision, the share of its prefetched pages that spared a miss, ranks its guesses
  against the others'; one far behind the main one is left a rare probe, to recover by;
* a ghost of a plain LRU buffer of the same size tells what no prefetch at all would have missed;
  when more is missed than that, no guesses are passed on for a while;
* what a source asks to hold is held only while it gains more than the room it takes loses;
* where the eviction policy keeps a history, sources that guess by past use alone wait for hints.

Guessing costs time too, wherever the engine runs, and only time can tell whether it pays. So now
and then it falls silent for a few passes over the layers and compares how long they take; what is
no pass over the layers, as in a restore, is not compared. Measures are taken on every fourth layer
where there are many, and a source that has proved useless is not even shown most demands, unless it
follows chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prefetchd.history import UseHistory
from prefetchd.model import (
    Access,
    ChainHint,
    Codes,
    DoneHint,
    Feedback,
    Geometry,
    Ids,
    Mask,
    PageHint,
    Verdict,
)
from prefetchd.predictor import Guess, Predictor
from prefetchd.predictors._merging import SOURCES_MAX, each_once, merged, source_codes
from prefetchd.predictors._pace import Pace
from prefetchd.predictors._restores import Restores
from prefetchd.predictors._restraint import Gains, GhostLru, Guard, Holding, Sample
from prefetchd.predictors._source import Source
from prefetchd.registry import predictor_class

SOURCES = ("attention", "sliding_window", "cross_request")
PROVEN_ENDED = 32
UNPROVEN_SHARE = 0.25  # of the limit, until a source is proven
PRECISION_FLOOR = 0.03  # good hints at a roomy staging have 0.15: most of theirs is there already
RELATIVE_FLOOR = 0.67  # a source must come near the main one, or its reads are only in the way
RECENT_DECAY = 0.9  # per pass over the layers
PASS_ACCESSES_MIN = 16  # with few layers a pass alone is too short to judge by
PROBE_ACCESSES = 32  # a useless source may guess one page in this many accesses
SHOWN_PASSES = 8  # a useless source sees one pass in so many
HINT_ACCESSES = 8  # page hints keep coming while there was one in so many accesses


class Auto(Predictor):
    """Runs the predictors named in `sources` (found by name, at most 16) together.

    Raises RegistryError when one of them cannot be had. The number of a page's source, in
    `Guess.sources`, is its place in `sources` plus 16 x the source's own code.
    """

    name = "auto"

    def __init__(self, geometry: Geometry, slots: int, *, sources: Sequence[str] = SOURCES) -> None:
        super().__init__(geometry, slots)
        if not 1 <= len(sources) <= SOURCES_MAX:
            raise ValueError(f"auto runs 1 to {SOURCES_MAX} predictors, not {len(sources)}")
        sample = self._sample = Sample(geometry)
        ghost = GhostLru(sample.pages, max(1, slots // sample.every))
        self._guard = Guard(ghost)
        self._gains = Gains(sample.pages)
        self._sources = [
            Source(predictor_class(source)(geometry, slots), Holding(sample.pages, ghost))
            for source in sources
        ]
        self._accesses = 0
        self._pass_accesses = max(geometry.layers, PASS_ACCESSES_MIN)
        self._hinted = self._chained = -(1 << 30)  # the access before which the last hint came
        readers = self._readers("on_page_hint")
        self._hint_reader = readers[0] if len(readers) == 1 else None
        self._chain_readers = self._readers("on_chain_hint")
        by_past_use = np.array([source.predictor.by_past_use for source in self._sources])
        self._foreseeing: Sequence[int] = np.flatnonzero(~by_past_use).tolist()
        self._restores = Restores(geometry, slots)
        self._pace = Pace()
        self._informed = False  # whether the eviction policy keeps a history

    def _readers(self, hook: str) -> list[int]:
        """The sources that read such hints."""
        hooks = [getattr(type(source.predictor), hook) for source in self._sources]
        return [n for n, own in enumerate(hooks) if own is not getattr(Predictor, hook)]

    def share(self, history: UseHistory) -> None:
        self._informed = True
        for source in self._sources:
            source.predictor.share(history)

    def on_access(self, access: Access) -> None:
        self._told((access,))

    def on_accesses(self, accesses: Sequence[Access]) -> None:
        self._told(accesses)

    def _told(self, accesses: Sequence[Access]) -> None:
        """In parts, which end where a pass over the layers does."""
        while accesses:
            part = accesses[: self._pass_accesses - self._accesses % self._pass_accesses]
            accesses = accesses[len(part) :]
            self._show(part)
            if self._accesses % self._pass_accesses == 0:
                if self._pace.guessing:
                    self._judge()
                if self._in_one_layer(part[-1].pages):
                    self._pace.passed(part[-1].now_ns)
                else:  # a restore is as quick as requests come
                    self._pace.interrupted(part[-1].now_ns)

    def _in_one_layer(self, pages: Ids) -> bool:
        """Whether a demand is part of a pass over several layers; those of whole blocks are not."""
        layers = self.geometry.layers
        return layers > 1 and not (len(pages) and int(pages[0] - pages[-1]) % layers)

    def _show(self, accesses: Sequence[Access]) -> None:
        told: list[list[Access]] = [[] for _ in self._sources]
        guessing, deaf = self._pace.guessing, self._deaf()
        for access in accesses:
            self._accesses += 1
            if guessing and self._sample.shows(access):
                self._measure(access)
                deaf = self._deaf()
            shown = guessing and self._accesses // self._pass_accesses % SHOWN_PASSES == 0
            for mine, passed_by in zip(told, deaf, strict=True):
                if shown or not passed_by:
                    mine.append(access)
        for source, mine in zip(self._sources, told, strict=True):
            if mine:
                source.predictor.on_accesses(mine)

    def _deaf(self) -> list[bool]:
        """Which sources are passed by; not those that follow chains: a gap would be an edge."""
        silent = not self._pace.guessing
        useless = enumerate(self._useless())
        return [(silent or no_use) and n not in self._chain_readers for n, no_use in useless]

    def _measure(self, access: Access) -> None:
        access = self._sample.of(access)
        ghost_missed = self._guard.observe(access)
        self._count(*self._gains.demanded(access, ghost_missed))
        for source in self._sources:
            source.holding.observe(access, ghost_missed)

    def _judge(self) -> None:
        """A pass over the layers has ended."""
        self._guard.judge()
        for source in self._sources:
            source.recent_gains *= RECENT_DECAY
            keep = source.predictor.predict(0, 0).keep
            if keep is not source.kept:
                source.kept, source.asked = keep, self._sample.numbers(keep[self._sample.has(keep)])
            source.holding.judge(source.asked)

    def on_page_hint(self, hint: PageHint) -> None:
        self._hinted = self._accesses
        if self._pace.guessing:
            for source in self._sources:
                source.predictor.on_page_hint(hint)

    def on_chain_hint(self, hint: ChainHint) -> None:
        self._chained = self._accesses
        self._restores.hinted(hint)
        for source in self._sources:
            source.predictor.on_chain_hint(hint)

    def on_done_hint(self, hint: DoneHint) -> None:
        self._restores.done(hint)
        for source in self._sources:
            source.predictor.on_done_hint(hint)

    def on_feedback(self, feedback: Feedback) -> None:
        numbers = feedback.sources % SOURCES_MAX
        codes = feedback.sources // SOURCES_MAX
        for number, source in enumerate(self._sources):
            if (mine := numbers == number).any():
                told = Feedback(feedback.pages[mine], codes[mine], feedback.verdicts[mine])
                source.predictor.on_feedback(told)
        measured = self._sample.has(feedback.pages)
        wasted = (feedback.verdicts == np.uint8(Verdict.WASTED)) & measured
        met = measured & ~wasted
        self._count(numbers[wasted], np.zeros(np.count_nonzero(wasted), np.bool_))
        pages = self._sample.numbers(feedback.pages[met])
        self._count(*self._gains.judged(pages, numbers[met]))

    def _count(self, numbers: Codes, gains: Mask) -> None:
        """Prefetches of these sources have ended, and some were a gain."""
        if len(numbers):
            ended = np.bincount(numbers, minlength=SOURCES_MAX).tolist()
            gained = np.bincount(numbers[gains], minlength=SOURCES_MAX).tolist()
            for source, *counts in zip(self._sources, ended, gained, strict=False):
                source.count(*counts)

    def predict(self, now_ns: int, limit: int) -> Guess:
        for reader in self._chain_readers if self._restoring() else ():
            guess = self._one(reader, now_ns, limit)
            named = self._restores.named(guess.pages)
            if guess.restores and named.any():
                return self._with_needed(reader, guess, named, limit)
        if not (self._pace.guessing and self._guard.open):
            return Guess()
        if self._hint_reader is not None and self._led_by_hints():
            return self._one(self._hint_reader, now_ns, limit)
        hinted = self._page_hinted() or self._chain_hinted()
        heard = self._foreseeing if self._informed and not hinted else range(len(self._sources))
        rooms = self._rooms(limit)
        sources = [(number, self._sources[number], rooms[number]) for number in heard]
        guesses = [
            source.weighed(number, source.predictor.predict(now_ns, room), room)
            for number, source, room in sources
            if room or source.holding.earned_parts
        ]
        return merged(guesses, limit)

    def _one(self, number: int, now_ns: int, limit: int) -> Guess:
        """What one source says, as it says it."""
        guess = self._sources[number].predictor.predict(now_ns, limit)
        codes, held = source_codes(number, guess.sources, len(guess.pages)), self._held(now_ns)
        return Guess(guess.pages, guess.confidence, guess.deadline_ns, codes, held, guess.restores)

    def _with_needed(self, reader: int, guess: Guess, named: Mask, limit: int) -> Guess:
        """What hints named is needed for certain: there is nothing to weigh. What the source
        guesses beside it has the room that it has earned."""
        silent = not (self._pace.guessing and self._guard.open)
        room = 0 if silent else self._rooms(limit)[reader]
        passed = named | (np.cumsum(~named) <= room)
        sure = guess.confidence
        if sure is not None:
            precision = np.float32(self._sources[reader].precision)
            sure = (sure * np.where(named, np.float32(1), precision))[passed]
        sources = None if guess.sources is None else guess.sources[passed]
        return replace(guess, pages=guess.pages[passed], confidence=sure, sources=sources)

    def _restoring(self) -> bool:
        """Whether a request comes back, and no page hints say that a decode is what goes on."""
        return self._restores.any and self._accesses - self._hinted > HINT_ACCESSES

    def _led_by_hints(self) -> bool:
        """Whether page hints keep coming and nothing else has anything better to say: then the
        source that reads them speaks alone, but for the probes of the others."""
        led = self._page_hinted() and not self._chain_hinted()
        return led and self._accesses % PROBE_ACCESSES >= HINT_ACCESSES

    def _page_hinted(self) -> bool:
        return self._accesses - self._hinted <= HINT_ACCESSES

    def _chain_hinted(self) -> bool:
        return self._accesses - self._chained <= HINT_ACCESSES

    def _held(self, now_ns: int) -> Ids:
        """What the sources have earned to hold."""
        earners = [source for source in self._sources if source.holding.earned_parts]
        kept = [
            source.holding.earned(source.predictor.predict(now_ns, 0).keep) for source in earners
        ]
        return each_once(kept)

    def _rooms(self, limit: int) -> list[int]:
        """How many pages each source may guess, by its precision beside the main one's.

        The main source is the one that gains most, not the most precise: a few safe pages
        do not make up for many likely ones.
        """
        rooms = []
        main = self._main().precision
        for source, useless in zip(self._sources, self._useless(), strict=True):
            share = min(1.0, source.precision / main)
            if source.ended < PROVEN_ENDED:
                share = UNPROVEN_SHARE
            elif useless:
                share = 0.0
            least = 1 if share > 0 or self._accesses % PROBE_ACCESSES == 0 else 0
            rooms.append(min(max(limit, 0), max(int(limit * share), least)))
        return rooms

    def _main(self) -> Source:
        return max(self._sources, key=lambda source: source.recent_gains)

    def _useless(self) -> list[bool]:
        """Which sources have proved too imprecise beside the main one."""
        floor = max(PRECISION_FLOOR, RELATIVE_FLOOR * self._main().precision)
        return [s.ended >= PROVEN_ENDED and s.precision < floor for s in self._sources]
