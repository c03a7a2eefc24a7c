"""Whether a path of a store can be relied on, from what came of its operations.

Decides when a path is given up and when it is tried again; a pure state machine, told of the time.
Refuses to know what an operation was and what follows from a verdict.

    healthy --failure--> suspect --too many--> failed --pause--> (probes) --all well--> suspect
       ^------ as many successes as make up for it ------'            '--one fails--> failed

Failures weigh more than successes, so that a path which loses more than a fifth of its operations
is given up, however many go well in between, while a few bad sectors are not held against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

_FAILURE, _SUCCESS, _LIMIT = 4, 1, 32
_PROBES = 3
_PAUSE_MIN_NS, _PAUSE_MAX_NS = 1_000_000_000, 300_000_000_000
_NEVER_NS = 2**63 - 1


class State(IntEnum):
    HEALTHY = 0
    SUSPECT = 1
    FAILED = 2


@dataclass(slots=True)
class Health:
    """Of one path, for one direction. `errors` counts failures since the start."""

    state: State = State.HEALTHY
    errors: int = 0
    _strikes: int = 0
    _probes: int = 0  # that went well, one after another
    _pause_ns: int = _PAUSE_MIN_NS
    _again_ns: int = 0

    def failed(self, count: int, now_ns: int) -> bool:
        """Take note of `count` failures; whether the path is given up with them."""
        self.errors += count
        if self.state == State.FAILED or count == 0:
            return False
        self._strikes += _FAILURE * count
        self.state = State.SUSPECT
        if self._strikes < _LIMIT:
            return False
        self._give_up(now_ns)
        return True

    def succeeded(self, count: int) -> None:
        if self.state != State.SUSPECT:
            return
        self._strikes = max(0, self._strikes - _SUCCESS * count)
        if self._strikes == 0:
            self.state = State.HEALTHY
            self._pause_ns = _PAUSE_MIN_NS

    def _give_up(self, now_ns: int) -> None:
        self.state = State.FAILED
        self._strikes = self._probes = 0
        self._again_ns = now_ns + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, _PAUSE_MAX_NS)

    def lost(self) -> None:
        """There is no such path, and none will come."""
        self.state, self._again_ns = State.FAILED, _NEVER_NS

    def is_due(self, now_ns: int) -> bool:
        """Whether a path that was given up is to be tried."""
        return self.state == State.FAILED and now_ns >= self._again_ns

    def probed(self, *, well: bool, now_ns: int) -> bool:
        """Take note of a probe; whether the path is taken back with it."""
        if self.state != State.FAILED:
            return False
        if not well:
            self.errors += 1
            self._give_up(now_ns)
            return False
        self._probes += 1
        return self._probes >= _PROBES and self.forgive()

    def forgive(self) -> bool:
        """Take the path back, on probation: the next failure ends it."""
        self.state, self._strikes = State.SUSPECT, _LIMIT - _FAILURE
        return True
