"""How much in flight keeps a drive busy, learnt from reads as they end.

Decides one figure, for all who use the drive together; whose the bytes are is `shares`'. Times come
with the calls. Refuses to know what is read.
"""

from __future__ import annotations

UNBOUNDED = 1 << 62
_ALONE_SPAN = 64  # reads
_SPARE_READS_MAX, _SPARE_BYTES_MAX = 4, 1 << 18


class Window:
    """How many bytes in flight keep a drive busy and little more: its rate times how long one read
    alone takes, and one such read. Unbounded until reads were seen that queued in the drive: only
    a drive that has more to do than it can shows its rate. A few reads more while those who ask
    come round so seldom that the drive has nothing left to do by then."""

    def __init__(self, interval_ns: int = 5_000_000) -> None:
        self._interval_ns = interval_ns
        self._alone_bytes = 0.0
        self._shortest_ns = [UNBOUNDED, UNBOUNDED]  # in the last so many reads alone, and of late
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
        """A read ended that had nothing ahead of it when it began. The shortest time of late
        counts: a busy host notices an end late, and never too soon. Reads of less than half the
        usual size may be over sooner than others can be."""
        self._alone_bytes += (size - self._alone_bytes) / (16 if self._alone_bytes else 1)
        if 2 * size < self._alone_bytes:
            return
        self._shortest_ns[1] = min(self._shortest_ns[1], max(1, latency_ns))
        self._alone_reads += 1
        if self._alone_reads % _ALONE_SPAN == 0:
            self._shortest_ns = [self._shortest_ns[1], UNBOUNDED]

    @property
    def _alone_ns(self) -> int:
        """How long a read takes that is alone; 0 while that is not known."""
        return min(self._shortest_ns) % UNBOUNDED

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
                queued = self._waits_ns / self._reads / self._alone_ns
                self._judge(self._moved / spent_ns, queued, limited=limited)
            self._since_ns, self._busy = now_ns, busy
            self._moved = self._reads = self._waits_ns = 0

    def _judge(self, rate: float, queued: float, *, limited: bool) -> None:
        """`queued`: how many times as long as alone reads have taken."""
        if self._rate == 0:
            self._rate = rate if queued > 2 else 0.0
        elif rate > self._rate:
            self._rate = rate
        elif queued > 2:
            self._rate += (rate - self._rate) / 8
        elif limited and queued < 1.15:
            self._rate *= 1.1
