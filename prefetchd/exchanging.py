"""Another predictor or eviction policy for a core that goes on serving.

Decides what the new ones are told of what is there. No page moves and no read is touched: demands
that wait go on waiting, pins stay. Called between two events, under the lock of whoever drives.

The new policy is told of the resident pages as of a few demands, the least wanted ones, as the old
policy orders them, first; of what was prefetched and never demanded, as that. A new predictor
begins blank, but for the history that the policy shares. Guesses of the old one are counted when
they turn out, and not held against the new one.
"""

from __future__ import annotations

import numpy as np

from prefetchd.core import Core
from prefetchd.eviction import Eviction
from prefetchd.guarded import Guarded
from prefetchd.model import Slots
from prefetchd.predictor import Predictor
from prefetchd.staging import Staging

_STEPS = 16
"""So many demands the resident pages are told as. A policy that learns from turns loses the order
within one."""


def exchange(core: Core, predictor: Predictor | None, eviction: Eviction | None) -> None:
    """None: as it was. Raises PredictorError for a predictor at fault, old or new;
    both are then as they were."""
    core.foresight.learn_all()
    guarded = None if predictor is None else Guarded(predictor)
    history = (eviction or core.staging.eviction).history
    if guarded is not None and history is not None:
        guarded.share(history)
    if eviction is not None:
        _hand_over(core.staging, eviction)
    if guarded is not None:
        core.foresight.exchange(guarded)
        core.planner.forget_sources()


def _hand_over(staging: Staging, new: Eviction) -> None:
    staging.tell()
    here = staging.page_of >= 0
    order = staging.eviction.victims(int(np.count_nonzero(here)), here)
    for slots in np.array_split(order, min(_STEPS, max(1, len(order)))):
        fresh = staging.fresh[slots]
        _insert(staging, new, slots[fresh], prefetched=True)
        demanded = slots[~fresh]
        if len(demanded):
            new.demanded(staging.page_of[demanded], None)
        _insert(staging, new, demanded, prefetched=False)
        if len(demanded):
            new.touched(demanded, staging.page_of[demanded], None)
    staging.eviction = new  # the few victims that are lined up are as good as any


def _insert(staging: Staging, new: Eviction, slots: Slots, *, prefetched: bool) -> None:
    if len(slots):
        new.inserted(slots, staging.page_of[slots], prefetched=prefetched)
