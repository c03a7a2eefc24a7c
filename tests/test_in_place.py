"""Pages read by the books: never other bytes, whoever is first; and what the daemon makes of it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import prefetchd
from prefetchd import Client, SidecarError, Ticket
from prefetchd.books import Books, books_bytes, books_in
from prefetchd.core import Core, CoreLimits
from prefetchd.eviction import EVICTIONS
from prefetchd.holds import Holds
from prefetchd.model import (
    Command,
    Completed,
    Demanded,
    Event,
    Forgotten,
    Geometry,
    Idle,
    Ids,
    Mask,
    Offered,
    PlanSoon,
    Read,
    Released,
    Slots,
    Used,
)
from prefetchd.planner import Planner, PlannerLimits
from prefetchd.predictors.none import NoPrefetch
from prefetchd.records import NEVER_NS
from prefetchd.sidecar import handshake, marks, namespace, notices
from prefetchd.sidecar.conversation import used_frames
from prefetchd.sidecar.in_place import InPlace
from prefetchd.sidecar.marks import IN_ORDER, Marks, Readers, marks_bytes
from prefetchd.sidecar.protocol import Used as UsedInPlace
from prefetchd.sidecar.remote import HeldTicket
from prefetchd.sidecar.wire import Frames, frame, request_of
from prefetchd.staging import READY, Staging
from tests.core_bench import Bench
from tests.runtime_bench import BLOCKS, LAYERS, content, keys
from tests.sidecar_bench import daemon, in_space

GEOMETRY = Geometry(layers=1, blocks=5)
SLOTS = 3
FAR_NS = 10**15
PAGES = st.lists(st.integers(0, GEOMETRY.pages - 1), min_size=1, max_size=2, unique=True)

needs_order = pytest.mark.skipif(not IN_ORDER, reason="this processor's stores have no order")


class Cut:
    """The other end does something once, when `reached` has been called so often."""

    def __init__(self) -> None:
        self.left = -1
        self.act: Callable[[], object] = lambda: None

    def reached(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()

    @contextmanager
    def planned(self, count: int, act: Callable[[], object]) -> Iterator[None]:
        self.left, self.act = count, act
        yield
        self.left = -1


class Meddled(Readers):
    """A client can do something just before the core learns who reads, and just after."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.cut = Cut()

    def reading(self, slots: Slots | None) -> Mask:
        self.cut.reached()
        read = super().reading(slots)
        self.cut.reached()
        return read


class Delayed(InPlace):
    """The core can do something between a client's first look and its marks, and between those and
    its second look."""

    def __init__(self, books: Books, marks: Marks, geometry: Geometry) -> None:
        super().__init__(books, marks, geometry)
        self.cut = Cut()

    def _mark(self, slots: Any) -> None:
        self.cut.reached()
        super()._mark(slots)
        self.cut.reached()


class Machine(RuleBasedStateMachine):
    """A core, and a client that reads by the books. `holds[slot]`: which page's bytes are there,
    -1 while somebody writes them."""

    def __init__(self) -> None:
        super().__init__()
        memory = np.zeros(books_bytes(GEOMETRY, SLOTS), np.uint8)
        books = books_in(memory, GEOMETRY, SLOTS)
        books.visible[:], books.serves[0], books.expiry_ns[0] = True, 1, NEVER_NS
        self.staging = Staging(SLOTS, GEOMETRY, EVICTIONS["lru"](SLOTS, GEOMETRY), books)
        self.core = Core(
            self.staging, NoPrefetch(GEOMETRY, SLOTS), Planner(PlannerLimits()), CoreLimits()
        )
        self.readers = Meddled(SLOTS)
        self.staging.readers = self.readers
        own = Marks(np.zeros(marks_bytes(SLOTS), np.uint8), SLOTS)
        self.readers.add(own)
        self.client = Delayed(books, own, GEOMETRY)
        self.holds = np.full(SLOTS, -1)
        self.reads: list[Read] = []
        self.tickets: set[int] = set()
        self.numbers = 0
        self.held: list[tuple[Ids, Slots]] = []

    def handle(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, 1_000)
        for command in commands:
            if isinstance(command, Read):
                self.holds[command.slots] = -1
                self.reads.append(command)
        self.staging.check()
        return commands

    def hold(self, pages: list[int]) -> None:
        if len(self.held) < 3:
            wanted = np.array(pages, np.int64)
            if (held := self.client.hold(wanted, None)) is not None:
                self.held.append((wanted, held[0]))

    @rule(pages=PAGES)
    def warm(self, pages: list[int]) -> None:
        self.demand(pages, [], 0)
        self.end_reads()
        while self.tickets:
            self.release()

    @rule(pages=PAGES, meddled=PAGES, at=st.integers(0, 6))
    def demand(self, pages: list[int], meddled: list[int], at: int) -> None:
        """While room is made, the client tries to get hold of something."""
        if len(self.tickets) == 2:
            return
        self.numbers += 1
        self.tickets.add(self.numbers)
        with self.readers.cut.planned(at, lambda: self.hold(meddled)):
            self.handle(Demanded(self.numbers, np.array(pages, np.int64), FAR_NS))

    @rule(meddled=PAGES, at=st.integers(0, 6))
    def idle(self, meddled: list[int], at: int) -> None:
        with self.readers.cut.planned(at, lambda: self.hold(meddled)):
            self.handle(Idle())

    @rule(pages=PAGES)
    def offer(self, pages: list[int]) -> None:
        wanted = np.array(pages, np.int64)
        if (self.staging.slot_of[wanted] < 0).all():
            for command in self.handle(Offered(wanted)):
                self.holds[getattr(command, "slots", [])] = -1

    @rule()
    def end_reads(self) -> None:
        reads, self.reads = self.reads, []
        for read in reads:
            self.holds[read.slots] = read.pages
            verified = np.ones(len(read.slots), np.bool_)
            self.handle(Completed(read.slots, read.generations, verified))

    @precondition(lambda self: self.tickets)
    @rule()
    def release(self) -> None:
        number = min(self.tickets)
        self.tickets.remove(number)
        self.handle(Released(number))

    @rule(pages=PAGES)
    def forget(self, pages: list[int]) -> None:
        """What nobody is known to read may be forgotten; a client may still begin to read it."""
        wanted = np.array(pages, np.int64)
        slots = self.staging.slot_of[wanted].astype(np.int64)
        here = slots >= 0
        slots = slots[here]
        if not (self.staging.held(slots) | (self.staging.state[slots] != READY)).any():
            with self.readers.cut.planned(1, lambda: self.hold(pages)):
                self.handle(Forgotten(wanted[here]))

    @rule(pages=PAGES, others=PAGES, at=st.integers(0, 2))
    def read(self, pages: list[int], others: list[int], at: int) -> None:
        """While the client gets hold of them, the core makes room for something else, which comes
        at once."""

        def between() -> None:
            self.demand(others, [], 0)
            self.end_reads()

        with self.client.cut.planned(at, between):
            self.hold(pages)

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        pages, slots = self.held.pop(0)
        self.client.let_go(slots)
        self.handle(Used(pages, np.array([len(pages)]), np.array([0])))

    @invariant()
    def never_other_bytes(self) -> None:
        for pages, slots in self.held:
            assert (self.holds[slots] == pages).all()

    def teardown(self) -> None:
        while self.held:
            self.let_go()
        while self.tickets:
            self.release()
        self.end_reads()
        while PlanSoon() in self.handle(Idle()):
            pass
        assert not len(self.staging._parted)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def staged(kv: Client, count: int, layer: int = 0, first: int = 0, **terms: Any) -> Ids:
    """The pages of one layer of new blocks, which are staged."""
    pages = content(count)
    ids: Ids = kv.pages(kv.put(keys(count, first), pages, **terms).blocks, layer)
    with kv.demand(ids) as ticket:
        assert right(ticket, layer, count)
    return ids


def right(ticket: Ticket, layer: int, count: int) -> bool:
    views, pages = ticket.views(), content(count)
    return all(np.array_equal(views[n], pages[n, layer]) for n in range(count))


@needs_order
def test_staged_pages_are_read_without_a_request(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv, served.connect() as other:
        ids = staged(kv, 4, layer=1)
        before = kv.stats()
        for client in (kv, other):
            with client.demand(ids, request=3) as ticket:
                assert isinstance(ticket, HeldTicket)
                assert right(ticket, 1, 4)
                assert served.runtime().stats().slots_pinned == 4
            with pytest.raises(ValueError, match="released"):
                ticket.view(0)
        served.until(lambda: served.runtime().stats().outcomes["retained"] == 8)
        stats = served.runtime().stats()
        assert (stats.slots_pinned, stats.waits.here - before.waits.here) == (0, 8)
        assert stats.pages_read == before.pages_read


@needs_order
def test_a_demand_with_an_absent_page_asks(tmp_path: Path) -> None:
    slots = 4 * 12_288
    with daemon(tmp_path, {"default": in_space(staging_bytes=slots)}) as served:
        kv = served.connect()
        ids = kv.pages(kv.put(keys(6), content(6)).blocks, 0)
        held = kv.demand(ids[:2]).wait()
        with kv.demand(ids[2:4]) as ticket:  # pushes out whatever the client does not hold
            assert not ticket.missing.any()
        for _ in range(3):
            for first in (2, 4):
                with kv.demand(ids[first : first + 2]) as ticket:
                    assert not ticket.missing.any()
            assert right(held, 0, 2)
        held.release()
        with kv.demand(ids[2:]) as ticket:
            assert not ticket.missing.any(), "what was released makes room"


@needs_order
def test_what_is_held_ends_with_the_connection(tmp_path: Path) -> None:
    with daemon(tmp_path) as served:
        kv = served.connect()
        ticket = kv.demand(staged(kv, 4))
        assert isinstance(ticket, HeldTicket)
        assert served.runtime().stats().slots_pinned == 4
        kv.close()
        served.until(lambda: served.runtime().stats().slots_pinned == 0)
        assert ticket.missing.all()
        assert not ticket.valid


@needs_order
def test_stamps_and_time_to_live_hold_as_well(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        ids = staged(kv, 2)
        found = kv.find(keys(2))
        with kv.demand(ids, stamps=found.stamps) as ticket:
            assert isinstance(ticket, HeldTicket)
        with kv.demand(ids, stamps=found.stamps + 1) as ticket:
            assert ticket.missing.all()
        room = served.runtime().room
        short = staged(kv, 1, first=7, ttl_s=60.0)
        with kv.demand(short) as ticket:
            assert isinstance(ticket, HeldTicket)
        served.runtime().books.expiry_ns[0] = time.time_ns()  # as it is a minute later
        room.wall_ns = lambda: time.time_ns() + 61 * 10**9
        with kv.demand(short) as ticket:
            assert ticket.missing.all()
        with kv.demand(ids) as ticket:
            assert isinstance(ticket, HeldTicket), "the others are read as before"


@needs_order
def test_nothing_is_read_in_place_once_the_engine_has_stopped(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        ids = staged(kv, 2)
        served.runtime().engine.fail(RuntimeError("a test"))
        with kv.demand(ids) as ticket:
            assert ticket.missing.all()
        assert "stopped" in getattr(ticket, "failure", "")


@needs_order
def test_an_event_loop_reads_in_place_too(tmp_path: Path) -> None:
    async def read(address: str) -> None:
        async with await prefetchd.aconnect(address) as kv:
            ids = kv.pages((await kv.put(keys(3), content(3))).blocks, 2)
            (await kv.demand(ids)).release()
            ticket = await kv.demand(ids)
            assert isinstance(ticket, HeldTicket)
            assert np.array_equal(ticket.view(1), content(3)[1, 2])
            ticket.release()
            assert (await kv.stats()).outcomes["retained"] == 3

    with daemon(tmp_path) as served:
        asyncio.run(read(served.address))


@pytest.mark.parametrize("end", [handshake, namespace])
def test_where_stores_have_no_order_every_demand_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    monkeypatch.setattr(end, "IN_ORDER", False)
    with daemon(tmp_path) as served, served.connect() as kv:
        ids = staged(kv, 2)
        with kv.demand(ids) as ticket:
            assert not isinstance(ticket, HeldTicket)
            assert not ticket.missing.any()


@needs_order
def test_the_books_cannot_be_written(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        attachment = kv._attachment
        assert attachment is not None
        assert attachment.in_place is not None
        with pytest.raises(ValueError, match="read-only"):
            attachment.in_place._books.slot_of[0] = 1


@needs_order
def test_readers_and_evictions_in_many_threads(tmp_path: Path) -> None:
    """Staging for a third of the pages; every page that is handed over is compared."""
    pages = content(BLOCKS)
    space = in_space(staging_bytes=BLOCKS * LAYERS // 3 * 12_288)
    wrong: list[str] = []

    def use(address: str, seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            with prefetchd.connect(address) as kv:
                for _ in range(150):
                    blocks = random.choice(BLOCKS, 2, replace=False)
                    layer = int(random.integers(LAYERS))
                    with kv.demand(kv.pages(blocks, layer)) as ticket:
                        views = [view.copy() for view in ticket.views()]
                    for block, view in zip(blocks, views, strict=True):
                        if not np.array_equal(view, pages[block, layer]):
                            wrong.append(f"block {block}, layer {layer}")
        except SidecarError as error:
            wrong.append(str(error))

    with daemon(tmp_path, {"default": space}) as served:
        with served.connect() as kv:
            kv.put(keys(BLOCKS), pages).wait()
        threads = [threading.Thread(target=use, args=(served.address, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        served.until(lambda: served.runtime().stats().slots_pinned == 0)
        assert served.runtime().stats().pages_read > 0
        served.runtime()._parts.core.staging.check()


def test_a_ticket_is_held_as_often_as_it_is_demanded(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        ids = staged(kv, 2)
        first, second = kv.demand(ids).wait(), kv.demand(ids).wait()
        first.release()
        first.release()
        assert served.runtime().stats().slots_pinned == 2
        second.release()
        kv.stats()
        assert served.runtime().stats().slots_pinned == 0


@needs_order
@pytest.mark.parametrize("end", ["refused", "parted"])
def test_a_reader_hears_that_its_connection_has_ended(tmp_path: Path, end: str) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        ids = staged(kv, 2)
        [connection] = served.server.connections
        if end == "refused":
            served.server.later(lambda: connection.refuse("protocol", "a test"))
        else:
            space = served.server.namespaces.open["default"]
            served.server.later(lambda: served.server.part(space, "a test"))
        served.settle()
        with kv.demand(ids) as ticket:
            assert end == "refused" or not isinstance(ticket, HeldTicket)
        kv._line._flush()
        kv._line._flush()
        assert kv._line.breaks == 1


@needs_order
def test_marks_of_a_refused_client_stay_until_it_has_gone(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        ticket = kv.demand(staged(kv, 2))
        assert isinstance(ticket, HeldTicket)
        [connection] = served.server.connections
        served.server.later(lambda: connection.refuse("protocol", "a test"))
        served.settle()
        assert served.runtime().stats().slots_pinned == 2
        kv.close()
        served.until(lambda: served.runtime().stats().slots_pinned == 0)


@needs_order
def test_a_busy_daemon_keeps_no_reader_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_PAGES_MAX", 400)
    with daemon(tmp_path) as served, served.connect() as kv:
        ids = staged(kv, 4)
        busy = threading.Event()
        served.server.later(lambda: (busy.wait(30), None)[1])
        for _ in range(2000):
            with kv.demand(ids) as ticket:
                assert isinstance(ticket, HeldTicket)
        busy.set()
        assert kv._line.breaks == 0
        assert kv.uses_dropped > 0
        served.settle()
        kv.stats()
        told = served.runtime().stats().outcomes["retained"] / 4
        assert told + kv.uses_dropped == 2000


@needs_order
def test_an_event_loop_goes_round_while_staged_pages_are_read(tmp_path: Path) -> None:
    async def read(address: str) -> int:
        rounds, reading = 0, True

        async def other() -> None:
            nonlocal rounds
            while reading:
                rounds += 1
                await asyncio.sleep(0)

        async with await prefetchd.aconnect(address) as kv:
            ids = kv.pages((await kv.put(keys(3), content(3))).blocks, 2)
            (await kv.demand(ids)).release()
            beside = asyncio.create_task(other())
            for _ in range(50):
                (await kv.demand(ids)).release()
            reading = False
            await beside
        return rounds

    with daemon(tmp_path) as served:
        assert asyncio.run(read(served.address)) >= 50


@needs_order
def test_what_makes_no_sense_of_pages_read_is_refused(tmp_path: Path) -> None:
    def ints(*numbers: int) -> bytes:
        return np.array(numbers, np.int64).tobytes()

    with daemon(tmp_path) as served, served.connect() as kv:
        staged(kv, 2)
        before = kv.stats().outcomes
        link = kv._link()
        assert link is not None
        for pages, counts, requests in (
            ((0, 0), (2,), (0,)),  # twice in one demand
            ((0, 3), (1,), (0,)),
            ((0, 3), (2, 0), (0, 0)),
            ((0, 3), (3, -1), (0, 0)),
            ((10**6,), (1,), (0,)),
            ((0,) * 257, (1,) * 257, (0,) * 257),
        ):
            kv._line.send(link, frame(UsedInPlace(ints(*pages), ints(*counts), ints(*requests))))
        assert kv.stats().outcomes == before
        kv._line.send(link, frame(UsedInPlace(ints(0, 0, 1), ints(1, 2), ints(5, 6))))
        assert kv.stats().outcomes["retained"] == before["retained"] + 3
        with served.connect(in_place=False) as asking:
            other = asking._link()
            assert other is not None
            asking._line.send(other, frame(UsedInPlace(ints(0), ints(1), ints(5))))
            assert asking.stats().outcomes["retained"] == before["retained"] + 3


def test_uses_are_told_in_order_and_in_bounds() -> None:
    pages, scores = np.arange(3), np.ones(3, np.float32)
    uses = [(pages, None, n) for n in range(300)] + [(pages, scores, 7), (pages, None, 8)]
    frames = Frames(1 << 20)
    frames.feed(used_frames(uses, 600))
    requests, sizes = [], []
    for body in frames.whole:
        message = request_of(body)
        assert isinstance(message, UsedInPlace)
        requests += np.frombuffer(message.requests, np.int64).tolist()
        sizes.append(len(message.counts) // 8)
    assert requests == [*range(300), 7, 8]
    assert sizes == [200, 100, 1, 1]


class _Once:
    """Somebody reads a slot when that is asked for the n-th time."""

    def __init__(self, number: int) -> None:
        self.left = number

    def reading(self, slots: Slots | None) -> Mask:
        self.left -= 1
        count = SLOTS if slots is None else len(slots)
        return np.full(count, self.left == 0)


def test_pages_are_not_offered_room_that_somebody_began_to_read() -> None:
    for number in range(1, 6):
        bench = Bench(SLOTS, geometry=GEOMETRY)
        for page in range(SLOTS):
            bench.stage(page)
        bench.staging.readers = _Once(number)
        told = bench.tell(Offered(np.array([4])))
        assert [kind for kind, *_ in told] in ([], ["fill"])
        bench.staging.readers = None
        bench.settle()
        bench.staging.check()
        assert not len(bench.staging._parted)


@needs_order
def test_a_fork_of_a_reader_can_read() -> None:
    marks._LOCK.acquire()
    child = os.fork()
    if child == 0:
        marks.fence()
        os._exit(0)
    marks._LOCK.release()
    assert os.waitpid(child, 0)[1] == 0


def test_a_block_whose_page_has_gone_while_it_is_read_is_held_no_more() -> None:
    """Nor is any other, for a slot that holds no page."""
    bench = Bench(SLOTS, geometry=GEOMETRY)
    bench.stage(0, 1)
    own = Marks(np.zeros(marks_bytes(SLOTS), np.uint8), SLOTS)
    bench.staging.readers = readers = Readers(SLOTS)
    readers.add(own)
    holds = Holds(bench.staging, GEOMETRY, {}, {})
    slot = bench.staging.slot_of[0]
    bench.tell(Forgotten(np.array([0])))
    own.count[0], own.on[slot] = 1, 1
    assert not holds.blocks().any()
    own.on[bench.staging.slot_of[1]] = 1
    assert np.flatnonzero(holds.blocks()).tolist() == [1]


@needs_order
def test_scores_are_those_of_the_demand_whatever_is_written_afterwards(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        ids = staged(kv, 2)
        seen: list[float] = []
        core = served.runtime()._parts.core
        used = core._observer.used

        def watched(event: Used, now_ns: int) -> None:
            assert event.scores is not None
            seen.extend(event.scores.tolist())
            used(event, now_ns)

        core._observer.used = watched  # type: ignore[method-assign]
        scores = np.array([0.25, 0.5], np.float32)
        with served.runtime().engine.lock:
            kv.demand(ids, scores=scores).release()
            scores[:] = 9
        kv.stats()
        assert seen == [0.25, 0.5]
