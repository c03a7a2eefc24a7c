"""How much in flight keeps a drive busy, and how much leaves it quick, learnt as reads end.

Decides two figures, for all who use the drive together; whose the bytes are is `shares`'. Times
come with the calls. Refuses to know what is read.
"""

from __future__ import annotations

from collections import deque

UNBOUNDED = 1 << 62
_ALONE_SPAN, _REVIEWED = 128, 8  # reads; one in so many has all of them looked at
_BRIEF_SHARE = 0.5  # of what a drive moves while a read alone takes
_BRIEF_READS_MIN = 8  # before a brief window is reckoned
_PROBED_EACH_NS, _PROBE_NS = 10_000_000_000, 50_000_000  # as BBR sees anew what a link can do
_TAIL = 4.0  # times as long as usual: beyond it a time tells of the host or of luck
_SPARE_READS_MAX, _SPARE_BYTES_MAX = 4, 1 << 18


class _Alone:
    """How long reads alone took of late: usually, and on average."""

    def __init__(self) -> None:
        self._times_ns: deque[int] = deque(maxlen=_ALONE_SPAN)
        self.usual_ns = self.mean_ns = 0.0
        self.count = 0

    def add(self, latency_ns: int) -> None:
        self._times_ns.append(max(1, latency_ns))
        self.count += 1
        if self.count > _REVIEWED and self.count % _REVIEWED:
            return
        rising = sorted(self._times_ns)
        self.usual_ns = float(rising[len(rising) // 4])
        most = _TAIL * self.usual_ns
        self.mean_ns = sum(min(time_ns, most) for time_ns in rising) / len(rising)


class Window:
    """How many bytes in flight keep a drive busy and little more: its rate times how long one read
    alone takes, and one such read. Unbounded until reads were seen that queued in the drive: only
    a drive that has more to do than it can shows its rate. A few reads more while those who ask
    come round so seldom that the drive has nothing left to do by then.

    How long a read takes is known as it is noticed, and a busy host notices late: `bytes` keep the
    drive busy even so. `brief_bytes` are what the drive moves in half the time that a read alone
    takes, and one such read, reckoned with reads whose end somebody slept for: who comes to them
    waits for about half as long again, and a host that notices late leaves the drive idle."""

    def __init__(self, interval_ns: int = 5_000_000) -> None:
        self._interval_ns = interval_ns
        self._alone_bytes = 0.0
        self._alone, self._slept_for = _Alone(), _Alone()
        self._spare = 0.0  # reads
        self._rate = 0.0  # bytes a ns
        self._probe_ns = self._since_ns = 0
        self._probed_ns = -_PROBED_EACH_NS
        self._busy = self._brief = False
        self._moved = self._reads = self._waits_ns = 0

    @property
    def bytes(self) -> int:
        if self._rate == 0 or self._alone.count == 0:
            return UNBOUNDED
        spare = min(self._spare * self._alone_bytes, _SPARE_BYTES_MAX)
        return int(self._rate * self._alone.usual_ns + self._alone_bytes + spare)

    @property
    def brief_bytes(self) -> int:
        if not self._may_be_brief:
            return self.bytes
        ahead = _BRIEF_SHARE * self._rate * self._slept_for.usual_ns
        return min(self.bytes, int(ahead + self._alone_bytes))

    @property
    def _may_be_brief(self) -> bool:
        """Not before it is known what the drive can do, nor while that is seen to anew."""
        known = self._slept_for.count >= _BRIEF_READS_MIN and self._rate > 0
        return known and self._since_ns - self._probed_ns < _PROBED_EACH_NS

    def alone(self, size: int, latency_ns: int, *, slept_for: bool = False) -> None:
        """A read ended well that had nothing ahead of it when it began. Of late times a quarter may
        be too short, found in the drive's cache, and most too long, as a busy host notices late.
        Reads of less than half the usual size may be over sooner than others can be."""
        self._alone_bytes += (size - self._alone_bytes) / (16 if self._alone_bytes else 1)
        if 2 * size >= self._alone_bytes:
            self._alone.add(latency_ns)
            if slept_for:
                self._slept_for.add(latency_ns)

    def moved(
        self,
        size: int,
        reads: int,
        waits_ns: int,
        now_ns: int,
        *,
        busy: bool,
        limited: bool,
        brief: bool = False,
    ) -> None:
        """Operations of `size` bytes have ended, among them so many reads, which took so long
        together. `busy`: others are in flight still. `limited`: somebody waits for this window.
        `brief`: for the brief one, if there is one."""
        brief = brief and self._may_be_brief
        if limited and not brief:
            self._spare += -1 / 8 if busy else 1
            self._spare = min(max(0.0, self._spare), _SPARE_READS_MAX)
        self._moved += size
        self._reads += reads
        self._waits_ns += waits_ns
        self._busy &= busy
        self._brief |= brief
        spent_ns = now_ns - self._since_ns
        if spent_ns >= self._interval_ns or not busy:
            known = self._busy and self._reads and self._alone.count
            if known and spent_ns < 4 * self._interval_ns and not self._brief:
                queued = self._waits_ns / self._reads / self._alone.mean_ns
                self._judge(self._moved / spent_ns, queued, limited=limited)
            self._look_anew(now_ns)
            self._since_ns, self._busy, self._brief = now_ns, busy, False
            self._moved = self._reads = self._waits_ns = 0

    def _look_anew(self, now_ns: int) -> None:
        """The brief window is let go of when it is time to, for so long from here on."""
        if self._rate == 0 or now_ns - self._probed_ns < _PROBED_EACH_NS:
            return
        self._probe_ns = self._probe_ns or now_ns
        if now_ns - self._probe_ns >= _PROBE_NS:
            self._probed_ns, self._probe_ns = now_ns, 0

    def _judge(self, rate: float, queued: float, *, limited: bool) -> None:
        """`queued`: how many times as long as alone reads have taken, both on average: that they do
        not all take the same is no queue."""
        if self._rate == 0:
            self._rate = rate if queued > 2 else 0.0
        elif rate > self._rate:
            self._rate = rate
        elif queued > 2:
            self._rate += (rate - self._rate) / 8
        elif limited and queued < 1.15:
            self._rate *= 1.1
