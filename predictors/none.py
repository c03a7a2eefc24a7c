"""The baseline: guesses nothing, so that everything else can be compared with it."""

from __future__ import annotations

from prefetchd.predictor import Predictor


class NoPrefetch(Predictor):
    name = "none"
