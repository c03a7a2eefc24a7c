"""How fast pages are read: measured from the device's busy time, never from its idle time.

Decides what counts as a measurement and what a load of so many pages would take. Holds no clock;
refuses to know what is read and why.

A *period* lasts from the first read on an idle device until nothing is in flight any more, or for
so long under load. Each is one sample (pages, ns) of a decayed least-squares fit
ns = base + pages x service. Periods whose end nobody waited for are no samples: nobody looked when
they ended.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.95  # a period: the last 20 count
_CUT_NS = 100_000_000
_LARGEST_DECAY = 0.99
_BEYOND = 4  # times the largest period is as far as the fit is believed
_GOOD_FOR_NS = 60_000_000_000
_LEAST_SPREAD = 1e-3


@dataclass(frozen=True, slots=True)
class ReadRate:
    """`base_ns` once, `page_ns` a page, believed for loads of at most `pages_max` pages (0: nothing
    was measured, or too long ago)."""

    base_ns: float
    page_ns: float
    pages_max: int


NOTHING_MEASURED = ReadRate(0.0, 0.0, 0)


class ReadMeter:
    def __init__(self) -> None:
        # Decayed n, sum x, sum y, sum xx, sum xy: x pages, y ns.
        self._fit = [0.0] * 5
        self._largest = 0.0
        self._since_ns: int | None = None
        self._pages = 0
        self._measured_ns = 0

    def begin(self, now_ns: int) -> None:
        """The device was idle and has something to read now."""
        self._since_ns, self._pages = now_ns, 0

    def drop(self) -> None:
        """What is in flight was given up."""
        self._since_ns = None

    def moved(self, pages: int, now_ns: int, *, idle: bool, awaited: bool) -> None:
        """So many pages have come. `idle`: nothing is in flight any more."""
        if self._since_ns is None:
            return
        self._pages += pages
        elapsed_ns = now_ns - self._since_ns
        if awaited and self._pages and (idle or elapsed_ns >= _CUT_NS):
            self._sample(float(self._pages), float(max(1, elapsed_ns)), now_ns)
            self.begin(now_ns)
        if idle:
            self.drop()

    def _sample(self, pages: float, ns: float, now_ns: int) -> None:
        new = (1.0, pages, ns, pages * pages, pages * ns)
        self._fit = [old * _DECAY + one for old, one in zip(self._fit, new, strict=True)]
        self._largest = max(self._largest * _LARGEST_DECAY, pages)
        self._measured_ns = now_ns

    def rate(self, now_ns: int) -> ReadRate:
        """What is known now. What was measured more than a minute ago is not: a device that was
        slow once would else never be asked again."""
        count, sum_x, sum_y, sum_xx, sum_xy = self._fit
        if count == 0 or now_ns - self._measured_ns > _GOOD_FOR_NS:
            return NOTHING_MEASURED
        base, service = 0.0, sum_y / sum_x
        spread = count * sum_xx - sum_x * sum_x
        if spread > _LEAST_SPREAD * count * sum_xx:
            slope = max(0.0, (count * sum_xy - sum_x * sum_y) / spread)
            if (rest := (sum_y - slope * sum_x) / count) >= 0:
                base, service = rest, slope
        return ReadRate(base, service, int(_BEYOND * self._largest))
