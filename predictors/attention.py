"""Sparse attention's far pages: what the engine hints, weighed with what was used before."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from prefetchd.hints import HintOdds
from prefetchd.history import UseHistory
from prefetchd.model import Access, Geometry, Ids, PageHint
from prefetchd.predictor import Guess, Predictor


class Attention(Predictor):
    name: ClassVar[str] = "attention"

    def __init__(self, geometry: Geometry, slots: int) -> None:
        super().__init__(geometry, slots)
        self._history = UseHistory(geometry)
        self._hints = HintOdds(geometry, self._history)
        self._guess = Guess()

    def on_access(self, access: Access) -> None:
        layer = int(access.pages[0] % self.geometry.layers)
        if layer != self._history.layer:
            if self._history.layer >= 0:
                self._hints.learn(self._history.layer)
            self._history.turn_to(layer)
        self._history.used(access.pages)
        self._guess = Guess()

    def on_page_hint(self, hint: PageHint) -> None:
        layer = int(hint.pages[0] % self.geometry.layers)
        chance = self._hints.chance(hint.pages, hint.scores, layer)
        order = np.argsort(-chance, kind="stable")
        self._guess = Guess(hint.pages[order], chance[order])

    def predict(self, now_ns: int, limit: int) -> Guess:
        return self._guess
