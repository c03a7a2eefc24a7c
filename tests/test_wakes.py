"""Whoever waits for room goes on as soon as there is some, and sleeps through no wake-up."""

from __future__ import annotations

import select
from types import SimpleNamespace

import pytest

from prefetchd import foreground
from tests.runtime_bench import BLOCKS, content, keys, open_plain

ROUNDS = 100


class Poller:
    """Counts the waits that ended because their time was over."""

    overslept = 0

    def __init__(self) -> None:
        self._poller = select.poll()
        self.register = self._poller.register

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        found = self._poller.poll(timeout_ms)
        Poller.overslept += not found
        return found


def test_a_put_that_waits_for_an_extent_goes_on_when_it_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flush after which an extent is free ends no put; it was slept through for 100 ms."""
    monkeypatch.setattr(foreground, "select", SimpleNamespace(poll=Poller, POLLIN=select.POLLIN))
    monkeypatch.setattr(Poller, "overslept", 0)
    pages = content(1)
    with open_plain(None) as runtime:
        for number in range(BLOCKS + ROUNDS):
            put = runtime.put(keys(1, number), pages, durability="fast")
            assert put.wait().failures == []
        assert runtime.stats().store_writes.blocks_evicted >= ROUNDS
    assert Poller.overslept <= 2, "a loaded machine may do that now and then"
