"""A client process that comes to harm; in a module of its own, since processes import it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from prefetchd.bench.decode import WrongBytes


@dataclass(frozen=True)
class Harm:
    """Number 1 comes to harm, before or after all have begun."""

    kind: str

    def __call__(
        self, number: int, begin: Callable[[], None], progress: Callable[[int], None]
    ) -> int:
        if number == 1 and self.kind == "raises":
            raise WrongBytes("pages were others'")
        begin()
        progress(1)
        if number == 1 and self.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number
