"""A caller's idle time: what is done in it, and that something which never comes stops nothing."""

from __future__ import annotations

from prefetchd.tending import Tending


class Idler:
    """An engine with a clock that only it moves."""

    def __init__(self, *, comes_after_ns: int | None) -> None:
        self.now_ns = 0
        self.comes_after_ns = comes_after_ns
        self.collected: list[int] = []
        self.tending = Tending(
            lambda: self.now_ns,
            lambda: 0,
            lambda: None,
            lambda: self.comes_after_ns is None or not self.collected,
            self.wait,
            self.collect,
        )

    def wait(self, most_ns: int) -> None:
        whole_ns = most_ns if self.comes_after_ns is None else self.comes_after_ns
        self.now_ns += min(most_ns, whole_ns)

    def collect(self) -> None:
        self.collected.append(self.now_ns)
        self.now_ns += 1_000


def test_what_has_come_is_taken_note_of_at_once() -> None:
    idler = Idler(comes_after_ns=200_000)
    idler.tending.until(600_000)
    assert idler.collected == [200_000]


def test_what_never_comes_does_not_keep_the_rest_from_notice() -> None:
    idler = Idler(comes_after_ns=None)
    for turn in range(1, 4):
        idler.now_ns = max(idler.now_ns, 600_000 * (turn - 1))
        idler.tending.until(600_000 * turn)
        assert idler.tending.lately()
    assert 3 <= len(idler.collected) <= 6, "once a turn or twice, and never in a loop"
