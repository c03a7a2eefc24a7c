"""A device that goes wrong costs a miss or a retry, is said once, and never gives wrong bytes."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd import Options, Outcome, PageHint, PageMissing, transfers
from prefetchd.core import CoreLimits
from prefetchd.device import READ, Completions, Ops
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.devices.memory import Memory
from prefetchd.devices.uring import Uring
from prefetchd.hostinfo import errno_name
from tests.runtime_bench import (
    BLOCKS,
    HASTY,
    LAYERS,
    PAGE_BYTES,
    PLAIN,
    FaultyRuntime,
    content,
    harm_next,
    keys,
    open_plain,
    pinned,
    read_all,
)

WORDS = {"eio": "EIO (Input/output error)", "short": "short read", "flip": "checksum mismatch"}


@pytest.mark.parametrize("fault", WORDS)
def test_a_page_that_fails_once_is_read_again(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    pages = content(1)
    with FaultyRuntime(options=PLAIN) as runtime:
        runtime.put(keys(1), pages).wait()
        harm_next(runtime, (0, fault))
        assert np.array_equal(read_all(runtime, np.array([0])), pages)
        stats = runtime.stats()
        assert (stats.failures, stats.retried, stats.failed) == ({WORDS[fault]: 1}, 1, 0)
    assert caplog.text.count(WORDS[fault]) == 1


@pytest.mark.parametrize("fault", WORDS)
def test_a_page_that_fails_twice_is_missing_and_leaves_no_trace(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    pages = content(3)
    with FaultyRuntime(options=PLAIN) as runtime:
        blocks = runtime.put(keys(3), pages).blocks
        harm_next(runtime, (1, fault), (3, fault))  # pages of several blocks are several reads
        wanted = runtime.pages(blocks, 0)
        with runtime.demand(wanted) as ticket:
            assert ticket.missing.tolist() == [False, True, False]
            assert np.array_equal(ticket.view(0), pages[0, 0])
            for ask in (lambda: ticket.view(1), ticket.views, lambda: ticket.push(None)):
                with pytest.raises(PageMissing, match="1 of"):
                    ask()
            buffer = runtime.buffer(2)
            ticket.push(buffer, skip_missing=True).wait()
            pushed = runtime.peek(buffer, 2, PAGE_BYTES)
            assert np.array_equal(pushed, pages[[0, 2], 0])
        assert len(runtime.lookup(keys(3))) == (1 if fault == "flip" else 3)
        blocks = runtime.put(keys(3), pages).blocks  # what has rotted is simply put again
        assert np.array_equal(read_all(runtime, blocks), pages)
        stats = runtime.stats()
        assert (stats.retried, stats.failed, stats.failures) == (1, 1, {WORDS[fault]: 2})
        assert stats.store_writes.blocks_rotten == (fault == "flip")
    assert caplog.text.count(WORDS[fault]) == 1, "of a kind the first is said, not each"


@pytest.mark.parametrize("fault", ["lose", "stall"])
def test_a_read_that_does_not_end_is_missing_in_time(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_CLOSE_TIMEOUT_NS", 1_000_000)
    pages = content(2)
    options = replace(HASTY, staging_bytes=2 * PAGE_BYTES, demand_timeout_s=60)
    with FaultyRuntime(options=options) as runtime:
        blocks = runtime.put(keys(2), pages).blocks
        harm_next(runtime, (0, fault))
        with runtime.demand(runtime.pages(blocks[:1], 0)) as ticket:
            assert ticket.missing.all()
        assert runtime.stats().abandoned == 1
        for _ in range(3):  # there is one slot left, and it goes on
            assert np.array_equal(read_all(runtime, blocks[:1]), pages[:1])
        device: Any = runtime._parts.device
        device.release_stalled()
        core = runtime.engine.core
        runtime.engine.wait(lambda: core.reads.given_up == (fault == "lose"), 10**18)
        assert core.reading == 0
        first = runtime.demand(runtime.pages(blocks[1:], 0)).wait()
        assert np.array_equal(first.view(0), pages[1, 0])
        patience_s = 0 if fault == "lose" else 60
        second = runtime.demand(runtime.pages(blocks[1:], 1), timeout_s=patience_s).wait()
        assert second.missing[0] == (fault == "lose"), "what was only late gave its slot back"


def test_a_demand_ends_before_its_read_when_it_must() -> None:
    pages = content(1)
    with FaultyRuntime(options=PLAIN) as runtime:
        runtime.put(keys(1), pages).wait()
        harm_next(runtime, (0, "stall"))
        wanted = np.array([0, 1])
        ticket = runtime.demand(wanted, timeout_s=0).wait()
        assert ticket.missing.all()
        assert ticket.outcomes.tolist() == [Outcome.MISS] * 2
        late = runtime.demand(wanted)
        runtime._parts.device.release_stalled()  # type: ignore[attr-defined]
        assert np.array_equal(np.stack(late.wait().views()), pages[0, :2])
        assert late.outcomes.tolist() == [Outcome.LATE] * 2


@pytest.mark.parametrize(
    ("operation", "fault", "code"),
    [
        (0, "eio", errno.EIO),
        (0, "enospc", errno.ENOSPC),
        (1, "eio", errno.EIO),
        (2, "enospc", errno.ENOSPC),
    ],
)
def test_a_failed_put_leaves_no_trace(operation: int, fault: str, code: int) -> None:
    pages = content(2)
    with FaultyRuntime([(operation, fault)], replace(PLAIN, write_buffers=1)) as runtime:
        put = runtime.put(keys(1), pages[:1]).wait()
        assert put.blocks[0] == -1
        assert put.failures == [f"block 0 was not stored: {errno_name(code)}"]
        assert runtime.lookup(keys(1)).tolist() == []
        failures = runtime.stats().failures
        assert failures.pop(f"write: {errno_name(code)}") == 1
        assert len(failures) == (operation > 0), "the flush or the header that failed"
        blocks = runtime.put(keys(2), pages).blocks
        assert np.array_equal(read_all(runtime, blocks), pages)
        assert runtime.put(keys(BLOCKS - 2, 9), content(BLOCKS - 2)).blocks.min() >= 0


@pytest.mark.parametrize(("inner", "evict"), [(Memory, "lru"), (Uring, "cycle")])
def test_no_fault_at_any_rate_shows_a_wrong_byte(
    inner: Any, evict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_CLOSE_TIMEOUT_NS", 1_000_000)
    pages = content(BLOCKS)
    devices: list[Faulty] = []

    def make(files: Any, arena: Any, depth: int) -> Faulty:
        faults = Faults(seed=len(evict), stall_reaps=3)
        devices.append(Faulty(inner(files, arena, depth), faults))
        return devices[0]

    options = Options(
        device=make,
        predictor="attention",
        evict=evict,
        staging_bytes=14 * PAGE_BYTES,
        core=CoreLimits(read_timeout_ns=1_000_000, prefetch_depth=4),
    )
    with open_plain(tmp_path / "kv" if inner is Uring else None, options) as runtime:
        blocks = runtime.put(keys(BLOCKS), pages).blocks
        random = np.random.default_rng(7)
        missing = 0
        for step in range(120):
            layer = step % LAYERS
            devices[0]._bounds[:] = 0
            blocks = runtime.put(keys(BLOCKS), pages).blocks  # again what was flipped twice
            devices[0]._bounds = np.cumsum([0.1, 0, 0.1, 0.1, 0.05, 0.004])
            chosen = random.choice(BLOCKS, 3, replace=False)
            wanted = runtime.pages(blocks[chosen], layer)
            if random.random() < 0.5:
                runtime.hint(PageHint(wanted, np.ones(3, np.float32)))
            with runtime.demand(wanted, timeout_s=0.003) as ticket:
                for place in range(3):
                    if ticket.missing[place]:
                        missing += 1
                    else:
                        assert np.array_equal(ticket.view(place), pages[chosen[place], layer])
        assert missing > 0
        assert min(devices[0].injected[kind] for kind in ("eio", "short", "flip", "stall")) > 0
        assert pinned(runtime) == 0
        with runtime.engine.lock:  # the pump may still be at work
            runtime._parts.core.staging.check()
        devices[0]._bounds[:] = 0


class Twice(Memory):
    """Gives the first completion of a read once more, with what comes next."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reading: set[int] = set()
        self.again: list[Completions] = []
        self.armed = False

    def submit(self, ops: Ops) -> int:
        self.reading |= set(ops["tag"][ops["kind"] == READ].tolist())
        return super().submit(ops)

    def reap(self) -> Completions:
        done = super().reap()
        if self.armed and len(done):
            again, self.again = self.again, [done]
            done = np.concatenate([*again, done])
        return done


def test_a_completion_given_twice_ends_nothing_else() -> None:
    pages = content(BLOCKS)
    options = replace(PLAIN, device=Twice, staging_bytes=2 * PAGE_BYTES)
    with open_plain(None, options) as runtime:
        blocks = runtime.put(keys(BLOCKS), pages).blocks
        device: Any = runtime._parts.device
        device.armed = True
        for _ in range(3):
            assert np.array_equal(read_all(runtime, blocks[:2]), pages[:2])
        device.armed = False
        assert runtime.stats().failures["completion seen twice"] > 0
        assert runtime.stats().failed == 0


def test_faults_on_purpose_are_in_the_notes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), FaultyRuntime() as runtime:
        assert "faults are injected on purpose" in runtime.stats().notes
    assert "faults are injected on purpose" in caplog.text
