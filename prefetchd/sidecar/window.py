"""How much in flight keeps a drive busy, learnt from reads as they end.

Decides one figure, for all who use the drive together; whose the bytes are is `shares`'. Times come
with the calls. Refuses to know what is read.
"""

from __future__ import annotations

from collections import deque

UNBOUNDED = 1 << 62
_ALONE_SPAN, _REVIEWED = 128, 8  # reads; one in so many has all of them looked at
_TAIL = 4.0  # times as long as usual: beyond it a time tells of the host or of luck
_SPARE_READS_MAX, _SPARE_BYTES_MAX = 4, 1 << 18


class Window:
    """How many bytes in flight keep a drive busy and little more: its rate times how long one read
    alone takes, and one such read. Unbounded until reads were seen that queued in the drive: only
    a drive that has more to do than it can shows its rate. A few reads more while those who ask
    come round so seldom that the drive has nothing left to do by then."""

    def __init__(self, interval_ns: int = 5_000_000) -> None:
        self._interval_ns = interval_ns
        self._alone_bytes = 0.0
        self._times_ns: deque[int] = deque(maxlen=_ALONE_SPAN)  # of late, of reads alone
        self._alone_ns = self._mean_ns = 0.0
        self._alone_reads = 0
        self._spare = 0.0  # reads
        self._rate = 0.0  # bytes a ns
        self._since_ns = 0
        self._busy = False
        self._moved = self._reads = self._waits_ns = 0

    @property
    def bytes(self) -> int:
        if self._rate == 0 or self._alone_ns == 0:
            return UNBOUNDED
        spare = min(self._spare * self._alone_bytes, _SPARE_BYTES_MAX)
        return int(self._rate * self._alone_ns + self._alone_bytes + spare)

    def alone(self, size: int, latency_ns: int) -> None:
        """A read ended well that had nothing ahead of it when it began. Of late times a quarter may
        be too short, found in the drive's cache, and most too long, as a busy host notices late.
        Reads of less than half the usual size may be over sooner than others can be."""
        self._alone_bytes += (size - self._alone_bytes) / (16 if self._alone_bytes else 1)
        if 2 * size < self._alone_bytes:
            return
        self._times_ns.append(max(1, latency_ns))
        self._alone_reads += 1
        if self._alone_reads > _REVIEWED and self._alone_reads % _REVIEWED:
            return
        rising = sorted(self._times_ns)
        self._alone_ns = float(rising[len(rising) // 4])
        most = _TAIL * self._alone_ns
        self._mean_ns = sum(min(time_ns, most) for time_ns in rising) / len(rising)

    def moved(
        self, size: int, reads: int, waits_ns: int, now_ns: int, *, busy: bool, limited: bool
    ) -> None:
        """Operations of `size` bytes have ended, among them so many reads, which took so long
        together. `busy`: others are in flight still. `limited`: somebody waits for this window."""
        if limited:
            self._spare += -1 / 8 if busy else 1
            self._spare = min(max(0.0, self._spare), _SPARE_READS_MAX)
        self._moved += size
        self._reads += reads
        self._waits_ns += waits_ns
        self._busy &= busy
        spent_ns = now_ns - self._since_ns
        if spent_ns >= self._interval_ns or not busy:
            if self._busy and self._reads and self._alone_ns and spent_ns < 4 * self._interval_ns:
                queued = self._waits_ns / self._reads / self._mean_ns
                self._judge(self._moved / spent_ns, queued, limited=limited)
            self._since_ns, self._busy = now_ns, busy
            self._moved = self._reads = self._waits_ns = 0

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
