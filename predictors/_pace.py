"""Whether guessing pays, in time: passes with it and without it, taken in turn and compared.

Decides from the durations of whole passes over the layers alone, as the events' own times give
them. Knows nothing of pages, hits or what a guess costs, which is why it cannot be fooled by them.
"""

from __future__ import annotations

START_PASSES = 8  # not compared with anything: the buffer is filling
TRIAL_PASSES = 3  # of one kind before the other; the first, while things settle, is not counted
TRIALS_AT_START = 5  # turn and turn about, the filling included
STAY_PASSES_MIN, STAY_PASSES_MAX = 24, 96  # of the better kind before the other is tried again
CLEAR_RATIO = 1.03  # a difference beyond which the next trial can wait twice as long
MEMORY = 0.6  # of a kind's earlier passes, per pass
OUTLIER = 2.0  # a pass longer than so many usual ones says nothing about its kind


class Pace:
    """`guessing` says which kind of pass is on. Without times it stays on."""

    def __init__(self) -> None:
        self.guessing = True
        self._usual_ns = {True: 0.0, False: 0.0}
        self._since_ns = 0
        self._uncounted = START_PASSES
        self._left = START_PASSES
        self._trials = 0
        self._trying = True
        self._stay = STAY_PASSES_MIN

    def passed(self, now_ns: int) -> None:
        """A pass has ended at `now_ns` (0 = the time is not known)."""
        taken_ns, self._since_ns = now_ns - self._since_ns, now_ns
        if now_ns == 0:
            return
        if self._uncounted:
            self._uncounted -= 1
        else:
            self._count(taken_ns)
        self._left -= 1
        if self._left <= 0:
            self._turn()

    def interrupted(self, now_ns: int) -> None:
        """What has ended was no pass: its time tells nothing, and is no reason for silence."""
        self._since_ns = now_ns
        if not self.guessing:
            self._trying = False
            self._switch(True, STAY_PASSES_MIN)
        self._uncounted = max(self._uncounted, 1)

    def _count(self, taken_ns: int) -> None:
        usual = self._usual_ns[self.guessing]
        if usual == 0:
            self._usual_ns[self.guessing] = float(taken_ns)
        else:
            taken = min(float(taken_ns), OUTLIER * usual)
            self._usual_ns[self.guessing] = MEMORY * usual + (1 - MEMORY) * taken

    def _turn(self) -> None:
        """Choose the kind of the passes to come."""
        self._trials += 1
        without, with_guesses = self._usual_ns[False], self._usual_ns[True]
        better = with_guesses <= without
        self._trying = self._trials < TRIALS_AT_START or not self._trying
        if self._trying:
            self._switch(not self.guessing, TRIAL_PASSES)  # how does the other kind do now?
            return
        clear = max(without, with_guesses) > CLEAR_RATIO * min(without, with_guesses)
        self._stay = min(2 * self._stay, STAY_PASSES_MAX) if clear else STAY_PASSES_MIN
        self._switch(better, self._stay)

    def _switch(self, guessing: bool, passes: int) -> None:
        self._uncounted = int(guessing != self.guessing)
        self.guessing = guessing
        self._left = passes
