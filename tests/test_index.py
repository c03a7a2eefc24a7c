"""Which blocks are found by key and by page, with open blocks and paths that come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefetchd.index import Index

BLOCKS, STRIPES, LAYERS = 8, 2, 3
NUMBERS = st.integers(0, BLOCKS - 1)
NO_KEY = bytes(16)


class Found(RuleBasedStateMachine):
    """Against a dictionary of what every block is: open, or published under a key."""

    def __init__(self) -> None:
        super().__init__()
        shape: Any = SimpleNamespace(blocks=BLOCKS, stripes=STRIPES, layers=LAYERS)
        self.keys = np.zeros(BLOCKS, "V16")
        self.index = Index(shape, self.keys, np.zeros(BLOCKS, np.bool_))
        self.names: dict[int, bytes] = {}  # of what is there; NO_KEY: open
        self.away: set[int] = set()

    def _is_away(self, block: int) -> bool:
        return block % STRIPES in self.away

    @rule(block=NUMBERS)
    def open(self, block: int) -> None:
        if block not in self.names:
            self.keys[block] = np.void(NO_KEY)
            assert self.index.open(block) != self._is_away(block)
            self.names[block] = NO_KEY

    @rule(block=NUMBERS, number=st.integers(1, 3))
    def publish(self, block: int, number: int) -> None:
        """As whoever calls it: never under a key that is found."""
        key = bytes(15) + bytes([number])
        if self.names.get(block, NO_KEY) != NO_KEY or self.index.find(key) >= 0:
            return
        older = [other for other, name in self.names.items() if name == key]
        self.keys[block] = np.void(key)
        assert self.index.publish(block) == (older[0] if older else -1)
        for other in older:
            del self.names[other]
        self.names[block] = key

    @rule(block=NUMBERS)
    def hide(self, block: int) -> None:
        self.index.hide(np.array([block]))
        self.names.pop(block, None)

    @rule(path=st.integers(0, STRIPES - 1))
    def turn(self, path: int) -> None:
        if path in self.away:
            self.away.remove(path)
            self.index.resume(path)
        else:
            self.away.add(path)
            self.index.suspend(path)

    @invariant()
    def it_says_what_is_there(self) -> None:
        index, all_blocks = self.index, np.arange(BLOCKS)
        there = np.array([block in self.names for block in range(BLOCKS)])
        away = np.array([self._is_away(block) for block in range(BLOCKS)])
        assert np.array_equal(index.visible, there & ~away)
        assert np.array_equal(index.suspended, there & away)
        assert np.array_equal(index.stored(all_blocks), there)
        named = {b: name for b, name in self.names.items() if name != NO_KEY}
        assert index.block_of == {name: b for b, name in named.items() if not self._is_away(b)}
        assert np.flatnonzero(index.named(all_blocks)).tolist() == sorted(named)
        np.arange(BLOCKS * LAYERS)
        assert index.all_stored(np.flatnonzero(there))
        assert index.all_stored(np.arange(len(there))) == there.all()


TestFound = Found.TestCase
