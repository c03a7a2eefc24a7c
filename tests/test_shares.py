"""Fair shares: nobody starves, nothing idles while somebody waits, long runs follow the weights."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.drive_profile import load_profile
from prefetchd.model import IoClass
from prefetchd.sidecar.loop_turns import LoopTurns
from prefetchd.sidecar.shares import DriveShares, FairOrder
from prefetchd.sidecar.window import UNBOUNDED, Window
from tests.tenants_virtual import course

DEMAND, PREFETCH, WRITE = IoClass.DEMAND, IoClass.PREFETCH, IoClass.WRITE_BACK
PAGE = 1 << 16
weights = st.lists(st.integers(1, 8), min_size=2, max_size=5)


class Fixed(Window):
    """As wide as it is told."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @property
    def bytes(self) -> int:
        return self.size


class Flood:
    """A modelled drive that ends operations in the order of their beginning, and members that
    always have more of one class to begin."""

    def __init__(self, weights: list[int], window: int, sizes: list[int], io_class: int) -> None:
        self.shares = DriveShares(Fixed(window))
        self.sizes, self.classes = sizes, dict.fromkeys(range(len(weights)), io_class)
        self.flying: deque[tuple[int, int]] = deque()
        self.served = [0] * len(weights)
        for member, weight in enumerate(weights):
            self.shares.join(member, weight)
            self.shares.attend(member, True)

    def ask(self, member: int, count: int = 200) -> int:
        lengths = np.full(count, self.sizes[member], np.int64)
        granted = self.shares.grant(member, self.classes[member], lengths)
        self.flying.extend([(member, self.sizes[member])] * granted)
        return granted

    def end_one(self) -> None:
        member, size = self.flying.popleft()
        self.served[member] += size
        self.shares.ended(member, size)
        while self.ask_next():  # whoever may go on is told, as the gates do
            pass

    def ask_next(self) -> int:
        following = self.shares.next()
        return self.ask(following) if isinstance(following, int) else 0


@settings(max_examples=30, deadline=None)
@given(weights, st.lists(st.integers(1, 16), min_size=5, max_size=5), st.sampled_from(IoClass))
def test_long_runs_follow_the_weights_whatever_the_sizes(
    weights: list[int], pages: list[int], io_class: IoClass
) -> None:
    sizes = [count * PAGE for count in pages]
    flood = Flood(weights, 32 * PAGE, sizes, io_class)
    for member in range(len(weights)):
        flood.ask(member)
    for _ in range(500):
        flood.end_one()
        assert flood.shares.in_flight >= 32 * PAGE, "somebody waits, and the drive idles"
        assert flood.shares.in_flight == sum(size for _, size in flood.flying)
    parts = np.array(flood.served) / np.array(weights)
    slack = 8 * max(sizes) + 64 * PAGE
    assert parts.max() - parts.min() <= slack, (flood.served, weights)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_a_demand_of_who_is_below_his_share_begins_at_once(
    pages: int, own: int, others: int
) -> None:
    flood = Flood([others, own], pages * PAGE, [PAGE, PAGE], DEMAND)
    flood.shares.attend(1, False)
    assert flood.ask(0, 128) == 128, "alone, it is not bounded"
    flood.shares.attend(1, True)
    while flood.shares.in_flight > pages * PAGE:
        assert flood.ask(0) == 0
        flood.end_one()
    for _ in range(40):
        for _ in range(2 + 2 * others // own):  # so it asks for less than its share
            flood.end_one()
        assert flood.ask(1, 1) == 1, "it waits for nobody's completion"
        flood.flying.pop()
        flood.shares.ended(1, PAGE)
    assert flood.shares.in_flight <= (pages + 1) * PAGE


def test_prefetches_and_writes_yield_to_others_demands_and_do_not_starve() -> None:
    for yields in (PREFETCH, WRITE):
        flood = Flood([1, 1], 8 * PAGE, [PAGE, PAGE], DEMAND)
        flood.classes[0] = yields
        assert flood.ask(0) == 8
        flood.ask(1)
        for _ in range(16):
            flood.end_one()
        assert flood.served[1] >= flood.served[0], "demands first"
        for _ in range(1000):
            flood.end_one()
        assert abs(flood.served[0] - flood.served[1]) <= 80 * PAGE, "shares in the end"


@settings(max_examples=20, deadline=None)
@given(st.data(), weights)
def test_any_course_keeps_the_books(data: st.DataObject, weights: list[int]) -> None:
    flood = Flood(weights, data.draw(st.integers(1, 40)) * PAGE, [PAGE] * 5, PREFETCH)
    for _ in range(60):
        member = data.draw(st.integers(0, len(weights) - 1))
        act = data.draw(st.sampled_from(["ask", "ask one", "end", "leave", "rest", "come", "go"]))
        flood.classes[member] = data.draw(st.sampled_from(IoClass))
        if act.startswith("ask"):
            flood.ask(member, 1 if act == "ask one" else 16)
        elif act == "end" and flood.flying:
            flood.end_one()
        elif act == "leave":
            flood.shares.leave(member)
            flood.flying = deque(one for one in flood.flying if one[0] != member)
            flood.shares.join(member, weights[member])
        elif act == "rest":
            flood.shares.rest(member)
        else:
            flood.shares.attend(member, act == "come")
        assert flood.shares.in_flight == sum(size for _, size in flood.flying) >= 0
        if not flood.flying and flood.shares.next() is not None:
            assert any(flood.ask_next() for _ in weights), "it idles, and somebody waits"


def test_a_window_finds_what_keeps_a_drive_busy_and_no_more() -> None:
    """A drive that takes 100 us a page, and moves one page a 10 us at depth, later a 5 us."""
    window, now_ns = Window(), 0

    def run(depth: int, page_ns: int) -> None:
        """That many in flight for a while."""
        nonlocal now_ns
        wait_ns = max(100_000, depth * page_ns)
        for _ in range(100_000_000 // wait_ns):
            now_ns += wait_ns
            window.moved(depth * PAGE, depth, depth * wait_ns, now_ns, busy=True, limited=True)

    for _ in range(100):
        now_ns += 1_000_000
        window.alone(PAGE, 100_000)
        window.moved(PAGE, 1, 100_000, now_ns, busy=False, limited=False)
    assert window.bytes == UNBOUNDED, "nobody has seen what it can do"
    run(128, 10_000)
    assert 10 <= window.bytes / PAGE <= 12
    for page_ns, fewest, most in ((10_000, 10, 16), (5_000, 20, 26), (20_000, 5, 12)):
        for _ in range(40):
            run(-(-window.bytes // PAGE), page_ns)
        assert fewest <= window.bytes / PAGE <= most


def test_a_window_is_of_the_drive_and_not_of_a_host_that_notices_late() -> None:
    window, now_ns = Window(), 0

    def learn(noticed_ns: list[int]) -> None:
        for latency_ns in noticed_ns:
            window.alone(PAGE, latency_ns)

    def busy(rounds: int) -> None:
        nonlocal now_ns
        for _ in range(rounds):
            now_ns += 1_000_000
            window.moved(16 * PAGE, 16, 16_000_000, now_ns, busy=True, limited=True)

    learn([100_000])
    busy(100)
    wide = window.bytes
    learn([2_000_000, 100_000, 2_000_000] * 80)
    window.alone(4096, 1000)
    assert 0.97 * wide <= window.bytes <= wide, "neither by late ends nor by reads that move little"
    for _ in range(9):
        window.moved(PAGE, 1, 1_000_000, now_ns, busy=False, limited=True)
    assert wide + 3 * PAGE <= window.bytes <= wide + (1 << 18), "it ran dry, and somebody waited"
    busy(64)
    assert window.bytes <= wide
    learn([1_500_000] * 200)
    assert window.bytes > 9 * wide, "a drive that has become slow"


def test_a_brief_window_is_of_reads_that_were_slept_for_and_is_seen_to_anew() -> None:
    """A drive that takes 100 us a page and moves one a 10 us."""
    window, now_ns = Window(), 0

    def run(milliseconds: int, depth: int, *, limited: bool = True) -> None:
        nonlocal now_ns
        for _ in range(milliseconds):
            now_ns += 1_000_000
            waits_ns, told = depth * 5_000_000, limited and window.brief_bytes < window.bytes
            window.moved(
                depth * PAGE, depth, waits_ns, now_ns, busy=True, limited=limited, brief=told
            )

    for _ in range(7):
        window.alone(PAGE, 100_000, slept_for=True)
    run(80, 100)
    for _ in range(200):
        window.alone(PAGE, 2_000_000)
    assert window.bytes > 150 * PAGE, "what keeps a drive busy whose host notices late"
    assert window.brief_bytes == window.bytes, "too few were slept for"
    window.alone(PAGE, 100_000, slept_for=True)
    assert 5.5 <= window.brief_bytes / PAGE <= 6.5
    run(9_000, 6)
    assert 5.5 <= window.brief_bytes / PAGE <= 6.5, "little in flight, little moved"
    run(1_000, 6)
    assert window.brief_bytes == window.bytes, "what can the drive do by now?"
    run(60, 200)
    assert 10 <= window.brief_bytes / PAGE <= 12, "twice as much"
    run(10_000, 6, limited=False)
    assert window.brief_bytes == window.bytes
    run(60, 6, limited=False)
    assert window.brief_bytes < window.bytes, "nobody asked for more, and that is no reason to wait"


class Both(Fixed):
    @property
    def brief_bytes(self) -> int:
        return self.size // 4


def test_a_window_is_brief_while_others_demand_and_need_not_wait() -> None:
    shares, lengths, second_ns = DriveShares(Both(16 * PAGE)), np.full(64, PAGE), 1_000_000_000
    for member in "ab":
        shares.join(member, 1)
        shares.attend(member, True)
    assert shares.window_for("a") == 16 * PAGE, "nobody has demanded"
    shares.grant("b", PREFETCH, lengths[:2], 100 * second_ns)
    assert shares.window_for("a") == 16 * PAGE
    shares.grant("b", DEMAND, lengths[:2], 101 * second_ns)
    assert shares.window_for("a") == (4 + 4) * PAGE, "beside what b has in flight"
    assert shares.window_for("b") == 16 * PAGE
    shares.ended("b", 4 * PAGE)
    shares.grant("b", DEMAND, lengths, 102 * second_ns)
    assert shares.window_for("a") == 16 * PAGE, "what waits here gains nothing by it"
    shares.rest("b")
    shares.grant("b", PREFETCH, lengths, 102 * second_ns)
    assert shares.brief("a"), "its prefetches wait, and no demand"
    shares.rest("b")
    shares.ended("b", shares.in_flight)
    shares.grant("a", PREFETCH, lengths[:1], int(111.9 * second_ns))
    assert shares.window_for("a") == 4 * PAGE
    shares.grant("a", PREFETCH, lengths[:1], int(112.1 * second_ns))
    assert shares.window_for("a") == 16 * PAGE, "not lately"
    shares.grant("b", DEMAND, lengths[:1], 113 * second_ns)
    shares.ended("b", PAGE)
    shares.attend("b", False)
    assert shares.window_for("a") == 16 * PAGE, "its clients have gone"


def test_who_always_has_demands_in_flight_does_not_starve_a_flood() -> None:
    for steady in (1, 4, 8, 12):
        flood = Flood([1, 1], 16 * PAGE, [PAGE, PAGE], DEMAND)
        flood.shares.window = Both(16 * PAGE)
        flood.ask(1, steady)
        flood.ask(0)
        for _ in range(1000):
            member = flood.flying[0][0]
            flood.end_one()
            if member == 1:
                flood.ask(1, 1)
        assert flood.served[0] >= flood.served[1] / 2, (steady, flood.served)


def _flood(times_ns: Iterator[int], units: int, window: Window | None) -> int:
    """Reads in 0.2 s of a flood, after 2 s of it, on a drive that serves so many at a time; within
    the window or, without one, 64 in flight. Now and then all ends, and the next read is alone."""
    now_ns, ended, late, pauses = 0, 0, 0, False
    flying: list[tuple[int, int]] = []  # end, begin
    free_ns = [0] * units
    while now_ns < 2_200_000_000:
        pauses = bool(flying) and (pauses or ended % 3000 == 0)
        while not pauses and len(flying) < min(64, window.bytes // PAGE if window else 64):
            alone = not flying
            end_ns = max(now_ns, heapq.heappop(free_ns)) + next(times_ns)
            heapq.heappush(free_ns, end_ns)
            heapq.heappush(flying, (end_ns, now_ns))
            if window and alone:
                window.alone(PAGE, end_ns - now_ns)
        now_ns, begun_ns = heapq.heappop(flying)
        ended += 1
        late += now_ns > 2_000_000_000
        if window:
            taken_ns = now_ns - begun_ns
            window.moved(PAGE, 1, taken_ns, now_ns, busy=bool(flying), limited=True)
    return late


@pytest.mark.parametrize("case", ["steady, one in no time", "some from a cache", "wide", "a tail"])
def test_a_window_that_bounds_a_flood_does_not_starve_a_drive(case: str) -> None:
    """That times differ is no queue, and a few short ones are not what a read alone takes."""
    random = np.random.default_rng(5)
    draw: dict[str, Callable[[], float]] = {
        "steady, one in no time": lambda: 100e3,
        "some from a cache": lambda: 10e3 if random.random() < 0.05 else 100e3,
        "wide": lambda: random.uniform(60e3, 300e3),
        "a tail": lambda: 50e3 + random.exponential(100e3),
    }
    times_ns = (int(draw[case]()) for _ in iter(int, 1))
    window, units = Window(), 16
    for time_ns in (*islice(times_ns, 64), *([5000] if case.startswith("steady") else [])):
        window.alone(PAGE, time_ns)
    assert _flood(times_ns, units, window) > 0.75 * _flood(times_ns, units, None)
    assert window.bytes < 2 * units * PAGE


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2000), st.integers(1, 8), st.integers(1, 300))
def test_who_rested_has_a_credit_once_and_its_share_in_the_end(
    credit: int, weight: int, cost: int
) -> None:
    order = FairOrder(credit)
    order.join("flood")
    order.join("quiet", weight)
    for _ in range(100):
        order.wait("flood")
        order.charge("flood", 100)
    order.wait("quiet")
    served = 0
    while order.first() == "quiet":
        order.charge("quiet", cost)
        order.wait("quiet")
        served += cost
    most = weight * (credit + 100)
    assert weight * credit <= served <= most + cost
    both = {"flood": 0, "quiet": 0}
    for _ in range(3000):
        turn = order.first()
        assert isinstance(turn, str)
        spent = cost if turn == "quiet" else 100
        order.charge(turn, spent)
        order.wait(turn)
        both[turn] += spent
    assert abs(both["quiet"] / weight - both["flood"]) <= 200 + cost + 1


@settings(max_examples=20, deadline=None)
@given(weights)
def test_the_order_serves_by_weight_and_who_comes_late_has_no_credit(weights: list[int]) -> None:
    order = FairOrder()
    served = [0] * len(weights)
    for member, weight in enumerate(weights):
        order.join(member, weight)
    for round_ in range(2000):
        if round_ == 1000:
            served = [0] * len(weights)
        for member in range(len(weights)):
            if member or round_ >= 1000:  # the first one has slept until then
                order.wait(member)
        turn = order.first()
        assert isinstance(turn, int)
        cost = 1 + round_ % 7
        order.charge(turn, cost)
        served[turn] += cost
        order.rest(turn)
    parts = np.array(served) / np.array(weights)
    assert parts.max() - parts.min() <= 14


def test_a_flood_of_messages_leaves_others_their_turns() -> None:
    """Ten connections of one member with huge and endless messages, and one of another."""
    turns, log = LoopTurns(), list[str]()

    def flood(connection: int) -> int:
        log.append("flood")
        turns.offer("flood", 1, connection, lambda: flood(connection))
        return 1 << 19

    def quiet() -> int:
        log.append("quiet")
        return 600

    for connection in range(10):
        turns.offer("flood", 1, connection, lambda connection=connection: flood(connection))  # type: ignore[misc]
    for _ in range(50):
        turns.work()
        turns.offer("quiet", 1, "q", quiet)
        before = len(log)
        turns.work()
        assert log[before] == "quiet", "what came last is dealt with first: the flood is in debt"
    turns.withdraw(3)
    assert turns


def test_a_flood_on_one_drive_is_a_window_ahead_of_anothers_demand() -> None:
    """In virtual time on a modelled drive: exact, whatever else this machine does."""
    profile = load_profile("8-pages-per-300us")
    alone = course(profile, None, shared=True, demands=200)
    for flood in (DEMAND, PREFETCH):
        without = course(profile, flood, shared=False, demands=200)
        beside = course(profile, flood, shared=True, demands=200)
        assert without.ahead_pages == 128
        assert without.p99_us > 10 * alone.p99_us
        assert beside.ahead_pages <= 8
        assert beside.p99_us <= 1.5 * alone.p99_us
        assert beside.flood_mb_s >= 0.85 * without.flood_mb_s, "what is left over is the flood's"
        brief = course(profile, flood, shared=True, demands=200, slept=True)
        assert brief.ahead_pages <= 4
        assert brief.p99_us <= 1.15 * alone.p99_us
        assert brief.flood_mb_s >= 0.65 * without.flood_mb_s


def test_a_task_may_withdraw_what_else_its_member_has() -> None:
    turns, log = LoopTurns(), list[str]()

    def task(name: str, *gone: str, again: str = "") -> Callable[[], int]:
        def work() -> int:
            log.append(name)
            for key in gone:
                turns.withdraw(key)
            if again:
                turns.offer("a", 1, again, task(again))
            return 10

        return work

    turns.offer("a", 1, "first", task("first", "second"))
    turns.offer("a", 1, "second", task("second"))
    turns.offer("b", 1, "other", task("other"))
    turns.work()
    assert log == ["first", "other"]
    assert not turns
    turns.offer("a", 1, "first", task("first", "second", again="third"))
    turns.offer("a", 1, "second", task("second"))
    turns.work()
    assert log == ["first", "other", "first", "third"]
    assert not turns
