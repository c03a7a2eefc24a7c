"""The thread that reads a layer ahead: what it is asked, told and keeps, and how its work ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prefetchd import Options
from prefetchd.core import CoreLimits
from prefetchd.devices.faulty import KINDS, Faults, Faulty
from prefetchd.devices.memory import Memory
from prefetchd.driver import Driver, RawReads
from prefetchd.engine import EngineError
from prefetchd.model import Completed, Idle
from prefetchd.runtime import Runtime
from prefetchd.tickets import Ticket
from tests.tiny_model import LAYERS, prompt, stored, tiny_model, torch, usual, word

adapter = pytest.importorskip("prefetchd.adapters.transformers")
far = pytest.importorskip("prefetchd.adapters.far")
copying = pytest.importorskip("prefetchd.adapters.copying")

BLOCKS = 40
QUIET = Options(predictor="attention", staging_bytes=1 << 18)  # 64 pages of 160, float32
# 24 pages of some 40 that a pass reads, and answers that are waited for as long as a test lasts.
SMALL = Options(
    predictor="none",
    staging_bytes=24 * 4096,
    core=CoreLimits(read_timeout_ns=10**12),
    demand_timeout_s=1000.0,
)


class LateCopy(copying.Copy):  # type: ignore[misc, name-defined]
    """Work that is done when its end is waited for, and what follows it when there is more to do:
    the latest that a thread beside this one could be."""

    def wait(self) -> None:
        with torch.inference_mode():
            if self._begun.acquire(blocking=False):
                self._make()
        super().wait()

    def finish(self) -> None:
        self.wait()
        with torch.inference_mode():
            if self._then is not None:
                self._follow()
        super().finish()

    def end(self) -> None:
        if self._begun.locked() and self._then is not None:
            self._follow()
        super().end()


def test_pages_stay_where_they_are_until_a_late_copy_has_been_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[LateCopy] = []

    def begin(copier: Any, copy: LateCopy) -> None:
        if copies and not copies[-1].unwanted:
            copies[-1].finish()
        copies.append(copy)

    monkeypatch.setattr(copying.Copier, "begin", begin)
    monkeypatch.setattr(far, "Copy", LateCopy)
    model, first, second = tiny_model(), prompt(200), prompt(180, seed=2)
    options = replace(QUIET, staging_bytes=1 << 16)  # 16 pages: one layer, and half of the next
    with adapter.open(model, None, blocks=BLOCKS, options=options) as kv:
        for ids in (first, second, first):
            assert stored(kv, ids, 20) == usual(model, ids, 20)
        assert len(copies) > 40
        staging = kv.runtime.engine.core.staging
        kv.runtime.engine.handle(Idle())
        assert not staging.pins.any()


def test_a_copy_that_failed_keeps_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    usually, calls = far.Far.gather, 0

    def fail(*given: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == LAYERS + 3:  # after those of the sinks
            raise RuntimeError("no memory for a copy")
        usually(*given)

    model, ids = tiny_model(), prompt(200)
    with adapter.open(model, None, blocks=BLOCKS, options=QUIET) as kv:
        stored(kv, ids, 4)
        with monkeypatch.context() as patch:
            patch.setattr(far.Far, "gather", fail)
            with pytest.raises(RuntimeError, match="no memory"):
                stored(kv, ids, 4)
        assert stored(kv, ids, 4) == usual(model, ids, 4), "another sequence goes on"
        engine = kv.runtime.engine  # what was put is kept until it has been written
        patience_ns = engine.clock() + 20_000_000_000
        assert engine.wait(lambda: not engine.core.staging.pins.any(), patience_ns)


def test_the_thread_that_computes_checks_no_pages_but_the_sinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usually, checked = Driver.verify, Counter[bool]()

    def verify(driver: Driver, reads: RawReads) -> Completed:
        checked[threading.current_thread() is threading.main_thread()] += len(reads.pages)
        return usually(driver, reads)

    monkeypatch.setattr(Driver, "verify", verify)
    model, ids = tiny_model(), prompt(200)
    options = replace(QUIET, staging_bytes=24 * 4096)  # of 40 pages a pass
    with adapter.open(model, None, blocks=BLOCKS, options=options) as kv:
        stored(kv, ids, 1)
        checked.clear()
        assert stored(kv, ids, 4) == usual(model, ids, 4)
        slots = kv.runtime.slots  # so many may have been on their way when it began
        assert checked[True] <= LAYERS + slots
        assert checked[False] > 3 * slots


# --- what is asked ---


@pytest.mark.parametrize("slots", [24, 64, 128])  # one, two and three layers a demand
def test_passes_over_any_number_of_new_tokens_ask_for_each_page_once(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usually, then = Runtime.demand, far.Far.passed
    asked: list[int] = []
    passes: list[tuple[int, int]] = []  # pages that had been asked for, blocks the next one reads

    def demand(runtime: Runtime, pages: Any, **more: Any) -> Ticket:
        asked.append(len(pages))
        return usually(runtime, pages, **more)

    def passed(one: Any, into: Any) -> None:
        one._copies[-1].finish()  # it has asked for all it is going to
        passes.append((sum(asked), one.count))
        then(one, into)

    model, ids = tiny_model(), prompt(400)
    options = replace(SMALL, staging_bytes=slots * 4096)
    with adapter.open(model, None, blocks=BLOCKS, options=options) as kv, torch.no_grad():
        stored(kv, ids[:, :170], 1)
        cache = kv.cache(ids)
        blocks = cache.sequence.far.count
        assert blocks == 9
        monkeypatch.setattr(Runtime, "demand", demand)
        monkeypatch.setattr(far.Far, "passed", passed)
        for part in ids[:, 160:307].split([64, 64, 17, 1, 1], dim=1):
            model(part, **{word(): cache})
        cache.close()
    assert len(passes) == 5
    for pages, following in passes:
        assert pages == blocks * LAYERS
        blocks += following


def test_a_cache_that_has_asked_ahead_leaves_room_for_the_next() -> None:
    model, first, second = tiny_model(), prompt(200), prompt(220, seed=2)
    options = replace(SMALL, staging_bytes=20 * 4096, demand_timeout_s=5.0)
    with adapter.open(model, None, blocks=BLOCKS, options=options) as kv, torch.no_grad():
        stored(kv, second, 1)
        cache = kv.cache()
        kv.prefill(cache, first)  # 18 pages are asked for ahead, and each sink block has 4
        kv.cache(second)
        logits = model(first[:, -1:], **{word(): cache}).logits
    assert [int(logits[:, -1].argmax())] == usual(model, first, 1)


# --- errors and ends ---


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_an_error_after_a_copy_is_told_by_the_next(
    layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usually, going_on = far.Far._pass_on, threading.Event()
    then = far.Far._begin, far.Far.passed

    def pass_on(one: Any, number: int) -> None:
        usually(one, number)
        if number == layer:
            assert going_on.wait(20)
            going_on.clear()
            raise RuntimeError("nobody waits for this")

    def begin(one: Any, number: int, into: Any) -> None:
        then[0](one, number, into)
        if number == layer + 1:
            going_on.set()

    def passed(one: Any, into: Any) -> None:
        if layer == LAYERS - 1 and one._copies:
            going_on.set()
        then[1](one, into)

    model, ids = tiny_model(), prompt(200)
    with adapter.open(model, None, blocks=BLOCKS, options=SMALL) as kv:
        with monkeypatch.context() as patch:
            for name, put in (("_pass_on", pass_on), ("_begin", begin), ("passed", passed)):
                patch.setattr(far.Far, name, put)
            with pytest.raises(RuntimeError, match="nobody waits"):
                stored(kv, ids, 2)
        assert stored(kv, ids, 4) == usual(model, ids, 4)


def test_what_could_not_be_asked_for_ahead_is_asked_for_in_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usually = far.Far._ask_from
    failed = [0]

    def ask_from(one: Any, layer: int) -> None:
        if layer and layer != failed[-1]:  # ahead
            failed.append(layer)
            raise ValueError("64 demands are open")
        usually(one, layer)

    model, ids = tiny_model(), prompt(200)
    with adapter.open(model, None, blocks=BLOCKS, options=SMALL) as kv:
        stored(kv, ids, 1)
        monkeypatch.setattr(far.Far, "_ask_from", ask_from)
        assert stored(kv, ids, 2) == usual(model, ids, 2)
    # The prompt's last part and two tokens; then perhaps what is read ahead.
    assert failed[:10] == [0, *(1, 2, 3) * 3]


class Hanging:
    """A store in memory whose reads can be made to wait."""

    def __init__(self) -> None:
        self.device: Faulty
        self.options = replace(SMALL, device=self._make)

    def _make(self, files: Any, arena: Any, depth: int) -> Faulty:
        self.device = Faulty(Memory(files, arena, depth), Faults())
        return self.device

    def hang(self, runtime: Runtime) -> None:
        """From here on. What is being written has been written before."""
        assert runtime.engine.wait(lambda: runtime.engine.driver.writer.idle)
        self.device._bounds = np.cumsum([float(kind == "stall") for kind in KINDS])

    def go_on(self, runtime: Runtime) -> None:
        with runtime.engine.lock:
            self.device._bounds = np.zeros(len(KINDS))
            self.device.release_stalled()
        runtime.engine.wake()


def reading(runtime: Runtime) -> bool:
    engine = runtime.engine
    return engine.wait(lambda: engine.core.reading > 0, engine.clock() + 20_000_000_000)


def test_an_interrupt_does_not_wait_for_a_read_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usually, unanswered = Ticket.release, []

    def release(ticket: Ticket) -> None:
        unanswered.append(not ticket.done)
        usually(ticket)

    def wait(copy: Any) -> None:
        assert reading(kv.runtime)
        raise KeyboardInterrupt

    model, ids, store = tiny_model(), prompt(200), Hanging()
    with adapter.open(model, None, blocks=BLOCKS, options=store.options) as kv, torch.no_grad():
        stored(kv, ids, 1)
        cache = kv.cache(ids)
        store.hang(kv.runtime)
        with monkeypatch.context() as patch:
            patch.setattr(Ticket, "release", release)
            patch.setattr(copying.Copy, "wait", wait)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, 192:], **{word(): cache})
            assert any(unanswered)
        store.go_on(kv.runtime)
        assert stored(kv, ids, 4) == usual(model, ids, 4)


@pytest.mark.parametrize("queued", [True, False])
def test_an_interrupt_while_work_is_handed_over_leaves_nothing_behind(
    queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usually = copying.Copier.begin

    def begin(copier: Any, copy: Any) -> None:
        if queued:
            usually(copier, copy)
        raise KeyboardInterrupt

    model, ids = tiny_model(), prompt(200)
    with adapter.open(model, None, blocks=BLOCKS, options=SMALL) as kv:
        stored(kv, ids, 1)
        with monkeypatch.context() as patch:
            patch.setattr(copying.Copier, "begin", begin)
            with pytest.raises(KeyboardInterrupt):
                stored(kv, ids, 4)
        engine = kv.runtime.engine
        patience_ns = engine.clock() + 20_000_000_000
        assert engine.wait(lambda: not engine.core.staging.pins.any(), patience_ns)
        assert stored(kv, ids, 4) == usual(model, ids, 4)


def left_open() -> tuple[Any, ...]:
    """A store that nobody closes, its thread waiting for a read that does not come."""
    model, ids, store = tiny_model(), prompt(200), Hanging()
    kv = adapter.open(model, None, blocks=BLOCKS, options=store.options)
    cache = kv.cache()
    kv.prefill(cache, ids)
    cache.close()
    store.hang(kv.runtime)
    cache.sequence._passed(LAYERS - 1)
    assert reading(kv.runtime)
    return kv, cache


def test_an_interpreter_that_ends_without_close_ends_the_thread_first() -> None:
    code = (
        "import atexit, threading\n"
        "def told():\n"
        "    print([t.name for t in threading.enumerate() if t.name == 'prefetchd-copy'])\n"
        "atexit.register(told)\n"  # first, so that it is called last
        "import tests.test_transformers_copies as here\n"
        "left = here.left_open()\n"
        "told()\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "memory: faults are injected on purpose\n"
    assert done.stdout == "['prefetchd-copy']\n[]\n"


def nothing(*_: object) -> None: ...


def test_the_thread_begins_late_and_ends_with_whoever_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    copier = copying.Copier()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            copier.begin(copying.Copy(nothing, nothing, nothing))
    copy = copying.Copy(nothing, nothing, nothing)
    copier.begin(copy)
    copy.finish()
    thread = copier._thread
    del copier
    thread.join()


def test_nothing_begins_after_the_end() -> None:
    copier = copying.Copier()
    copier.close()
    copier.close()
    with pytest.raises(EngineError, match="closed"):
        copier.begin(copying.Copy(nothing, nothing, nothing))


def test_what_was_dropped_is_never_taken_for_done() -> None:
    done: list[object] = []
    for drop in (copying.Copy.drop, copying.Copy.end):  # `end`: also if nobody was to do it
        copy = copying.Copy(done.append, nothing, nothing)
        drop(copy)
        copy.run()
        for wait in (copy.wait, copy.finish):
            with pytest.raises(EngineError, match="closed"):
                wait()
    assert not done


def test_a_thread_that_waits_for_work_keeps_nothing_alive() -> None:
    class Sequence:
        def copy(self, copy: Any) -> None: ...
        def pass_on(self) -> None: ...

    class Queue:
        def get(self) -> Any:
            if work:
                return work.pop()
            kept.extend(ref() for ref in seen)
            return None

    sequence = Sequence()
    copy = copying.Copy(sequence.copy, sequence.pass_on, nothing)
    seen = [weakref.ref(sequence), weakref.ref(copy)]
    work, kept = [copy], list[object]()
    del sequence, copy
    copying._run(Queue())
    assert kept == [None, None]
