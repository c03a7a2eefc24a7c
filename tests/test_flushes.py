"""One flush serves all who could share it, and nothing that was written goes without one."""

from __future__ import annotations

from prefetchd.commit import GATHER_NS
from prefetchd.devices.memory import Memory
from prefetchd.pipeline import FlushLimits
from tests.tier_bench import SECOND_NS, Tier, new_image

LIMITS = FlushLimits(100, SECOND_NS)


def test_what_was_put_fast_beside_a_durable_put_is_flushed_too() -> None:
    tier = Tier(new_image(1), device=Memory, limits=LIMITS)
    tier.put(0, durable=True)
    tier.reap()  # payload
    tier.put(1, durable=False)  # written while the first is being flushed
    for _ in range(6):
        tier.reap()
    tier.alone.now_ns += 2 * SECOND_NS
    tier.go()
    for _ in range(6):
        tier.reap()
    assert tier.writer.idle
    assert len(tier.stored()) == 2


def test_a_flush_waits_for_payloads_that_are_being_written_but_not_for_long() -> None:
    for wait_ns, flushes in ((0, 0), (GATHER_NS, 1)):
        tier = Tier(new_image(1), device=Memory, limits=LIMITS, depth=1)
        for number in range(3):
            tier.put(number, durable=True)
        tier.reap()  # one payload at a time
        tier.alone.now_ns += wait_ns
        tier.reap()
        assert tier.commit.written.flushes == flushes
        for _ in range(12):
            tier.reap()
        assert tier.writer.idle
        assert tier.commit.written.flushes == 2 + flushes
