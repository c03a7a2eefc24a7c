"""What is changed while serving: no request fails, no order is lost, and it is said in words."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd import Options, RegistryError, Runtime, StoreError, reconfiguring
from prefetchd.changes import sorted_out
from prefetchd.config import read_config, settings_of
from prefetchd.core import CoreLimits
from prefetchd.eviction import EVICTIONS
from prefetchd.exchanging import exchange
from prefetchd.model import Geometry, Ids, PageHint
from prefetchd.planner import PlannerLimits
from prefetchd.predictor import Guess, Predictor
from prefetchd.sidecar.reloading import Reloader
from prefetchd.sidecar.supervisor import Supervisor
from prefetchd.sidecar.watching import Watch
from tests.core_bench import Bench, Scripted
from tests.runtime_bench import BLOCKS, LAYERS, PAGE_BYTES, PLAIN, content, keys, open_plain
from tests.sidecar_bench import Daemon, daemon

ALL = sorted(EVICTIONS)


def order(bench: Bench) -> list[int]:
    """Resident pages, the next to go first."""
    staging = bench.staging
    staging.tell()
    here = staging.page_of >= 0
    return staging.page_of[staging.eviction.victims(int(here.sum()), here)].tolist()  # type: ignore[no-any-return]


def finish(bench: Bench) -> list[Any]:
    """All reads end well; what came of it."""
    told: list[Any] = []
    while bench.reads:
        told += bench.end()
    return told


def used(bench: Bench, *pages: int) -> None:
    for ticket, page in enumerate(pages, 1):
        bench.demand(1000 + ticket, page)
        finish(bench)
        bench.release(1000 + ticket)


# --- policies ---


@pytest.mark.parametrize("old", ALL)
def test_a_new_lru_takes_over_the_order_of_any_policy(old: str) -> None:
    bench = Bench(slots=8, evict=old, geometry=Geometry(layers=1, blocks=40))
    used(bench, 1, 2, 3, 4, 5, 2, 3)
    bench.core.foresight.learn_all()
    before = order(bench)
    exchange(bench.core, None, EVICTIONS["lru"](8, bench.staging.eviction.geometry))
    assert bench.staging.eviction.name == "lru"
    assert order(bench) == before


@pytest.mark.parametrize("new", ALL)
def test_any_policy_takes_over_the_order_of_lru(new: str) -> None:
    bench = Bench(slots=8, evict="lru", geometry=Geometry(layers=1, blocks=40))
    used(bench, 1, 2, 3, 4, 5, 2, 3)
    exchange(bench.core, None, EVICTIONS[new](8, bench.staging.eviction.geometry))
    assert order(bench) == [1, 4, 5, 2, 3]


@pytest.mark.parametrize("new", ALL)
def test_a_policy_is_not_asked_for_what_it_was_not_told(new: str) -> None:
    """Pages on their way, read and waited for are handed over as well, and end as they would."""
    bench = Bench(slots=4, evict="lru")
    bench.demand(1, 2, 4)
    finish(bench)
    bench.demand(2, 6)  # on its way
    exchange(bench.core, None, EVICTIONS[new](4, bench.staging.eviction.geometry))
    assert sorted(order(bench)) == [2, 4, 6]
    told = finish(bench)
    assert told[0][0] == "ready"
    bench.release(1)
    bench.release(2)
    used(bench, 8, 10, 12, 14)
    assert sorted(order(bench)) == [8, 10, 12, 14]


# --- predictors ---


def test_a_new_predictor_hears_of_its_own_guesses_only() -> None:
    bench = Bench(slots=8)
    old = bench.predictor
    assert isinstance(old, Scripted)
    bench.guess(*range(0, 8, 2))
    finish(bench)
    bench.predictor = new = Scripted(bench.staging.eviction.geometry, 8)
    exchange(bench.core, new, None)
    bench.guess(20, 22)
    finish(bench)
    for round_ in range(2):
        used(bench, 0, 2, 4, 6, 20, *range(30 + 20 * round_, 48 + 20 * round_, 2))
    bench.core.foresight.learn_all()
    told = [page for feedback in new.feedback for page in feedback.pages.tolist()]
    assert set(told) <= {20, 22}
    assert not old.feedback
    assert bench.counters.verdicts.sum() == 6, "and all are counted"


class ReadsHistory(Predictor):
    name = "reads_history"

    def share(self, history: Any) -> None:
        self.history = history


def test_a_predictor_that_reads_the_policys_history_is_made_anew_with_it() -> None:
    with open_plain(options=replace(PLAIN, predictor=ReadsHistory, evict="cycle")) as kv:
        core = kv._parts.core
        before = core.foresight._predictor._predictor
        assert isinstance(before, ReadsHistory)
        assert before.history is core.staging.eviction.history
        kv.reconfigure(ttl_s=5.0)
        assert core.foresight._predictor._predictor is before
        kv.reconfigure(evict="lru")
        kv.reconfigure(evict="cycle")
        after = core.foresight._predictor._predictor
        assert isinstance(after, ReadsHistory)
        assert after.history is core.staging.eviction.history is not before.history


# --- a runtime ---


@contextmanager
def asking(kv: Runtime, pages: Any, blocks: Ids, among: int = 12) -> Iterator[Callable[[], int]]:
    """Another thread demands, hints and puts (one of so many keys) all the while; any failure ends
    the test. Gives what waits for some more rounds and says how many there were."""
    stop, rounds, wrong = threading.Event(), [0], list[str]()
    turned = threading.Condition()

    def ask() -> None:
        try:
            while not stop.is_set():
                layer = rounds[0] % LAYERS
                kv.hint(PageHint(kv.pages(blocks, layer), np.ones(len(blocks), np.float32)))
                with kv.demand(kv.pages(blocks, layer)) as ticket:
                    assert not ticket.missing.any()
                    assert np.array_equal(np.stack(ticket.views()), pages[:, layer])
                put = kv.put(keys(1, 100 + rounds[0] % among), pages[:1]).wait()
                assert put.failures == []
                with turned:
                    rounds[0] += 1
                    turned.notify_all()
        except BaseException as error:
            wrong.append(repr(error))
            with turned:
                turned.notify_all()
            raise

    def more() -> int:
        with turned:
            goal = rounds[0] + 3
            assert turned.wait_for(lambda: rounds[0] >= goal or wrong, 60)
        assert not wrong
        return rounds[0]

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield more
    finally:
        stop.set()
        thread.join(60)
    assert not wrong


CHANGES: list[dict[str, Any]] = [
    {"predictor": "auto"},
    {"evict": "cycle"},
    {"evict": "arc", "predictor": "sliding_window"},
    {"planner": PlannerLimits(burst_pages=2), "core": CoreLimits(prefetch_depth=4)},
    {"ttl_s": 3600.0, "lease_s": 1.0, "demand_timeout_s": 20.0},
    {"quota_bytes": 6 * LAYERS * PAGE_BYTES, "depth": 1},
    {"quota_bytes": None, "evict": "lru", "predictor": "none", "depth": 128},
]


def test_nothing_fails_while_everything_changes() -> None:
    with open_plain(options=replace(PLAIN, staging_bytes=7 * PAGE_BYTES, lease_s=600)) as kv:
        pages = content(3)
        blocks = kv.put(keys(3), pages).blocks
        with asking(kv, pages, blocks) as more:
            for change in CHANGES * 2:
                rounds = more()
                changes = kv.reconfigure(**change)
                assert changes.later == ()
                assert len(changes.applied) == len(change) or changes.applied == ()
                assert more() > rounds
                stats = kv.stats()
                assert stats.evict == kv.options.evict
                assert stats.predictor == kv.options.predictor
            assert kv.lookup(keys(3)).tolist() == blocks.tolist()


def test_bounds_hold_from_then_on() -> None:
    with open_plain(options=replace(PLAIN, lease_s=0)) as kv:
        extent = kv._parts.store.superblock.extent_bytes
        kv.put(keys(BLOCKS), content(BLOCKS)).wait()
        changes = kv.reconfigure(quota_bytes=3 * extent)
        assert changes.applied == (f"quota_bytes from None to {3 * extent}",)
        assert len(kv.lookup(keys(BLOCKS))) == 3
        kv.reconfigure(admission="second-touch")
        assert kv.put(keys(1, 50), content(1)).wait().refused == [0]
        kv.reconfigure(admission="all", quota_bytes=None, floor_bytes=1 << 60, ttl_s=9.0)
        assert kv.put(keys(1, 60), content(1)).wait().failures == []  # in memory: no file system
        expiries = kv._parts.catalog.next_expiry_ns
        assert expiries < 1 << 62


def test_what_cannot_be_changed_is_named_and_what_is_refused_changes_nothing() -> None:
    with open_plain() as kv:
        changes = kv.reconfigure(depth=700, staging_bytes=1 << 16, ttl_s=5.0)
        assert changes.applied == ("ttl_s from None to 5.0",)
        assert str(changes).startswith("changed: ttl_s from None to 5.0; needs a restart: staging")
        assert len(changes.later) == 2
        limited = kv.reconfigure(core=CoreLimits(tickets_max=5))
        assert limited.applied == ()
        assert limited.later[0].startswith("core beyond attempts_max")
        before = kv.options
        for wrong, error in (
            ({"predictor": "no such"}, RegistryError),
            ({"evict": "no such", "ttl_s": 8.0}, RegistryError),
            ({"cap_bytes": 1}, StoreError),
            ({"ttl_s": -1.0}, ValueError),
            ({"no_such": 1}, TypeError),
        ):
            with pytest.raises(error):
                kv.reconfigure(**wrong)
            assert kv.options == before
        assert str(kv.reconfigure()) == "nothing has changed"


def test_two_that_change_options_at_once_undo_nothing_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_plain() as kv:
        looked = threading.Event()

        def other() -> None:
            if kv.engine.lock.acquire(blocking=False):
                kv.engine.lock.release()
                kv.reconfigure(lease_s=7.0)
                looked.set()
            else:  # it can only come after
                looked.set()
                kv.reconfigure(lease_s=7.0)

        thread = threading.Thread(target=other)

        def beside(*words: Any) -> Any:
            monkeypatch.undo()
            sorted_now = sorted_out(*words)
            thread.start()
            assert looked.wait(60)
            return sorted_now

        monkeypatch.setattr(reconfiguring, "sorted_out", beside)
        kv.reconfigure(ttl_s=5.0)
        thread.join(60)
        assert (kv.options.ttl_s, kv.options.lease_s) == (5.0, 7.0)
        assert kv._puts.room._lease_ns == 7 * 10**9


def raises(geometry: Geometry, slots: int) -> Predictor:
    raise RuntimeError("a mistake in a predictor")


class Shares(Predictor):
    def share(self, history: Any) -> None:
        raise RuntimeError("a mistake in share")

    def predict(self, now_ns: int, limit: int) -> Guess:
        return Guess()


def test_a_predictor_at_fault_does_not_take_over() -> None:
    with open_plain(options=replace(PLAIN, evict="cycle")) as kv:
        for factory in (raises, Shares):
            with pytest.raises(Exception, match="a mistake"):
                kv.reconfigure(predictor=factory, evict="cycle")
        assert kv.stats().predictor == "none"
        blocks = kv.put(keys(1), content(1)).blocks
        with kv.demand(kv.pages(blocks, 0)) as ticket:
            assert not ticket.missing.any()


def test_no_more_is_in_flight_than_the_new_depth_and_all_of_it_ends() -> None:
    with open_plain(options=replace(PLAIN, lease_s=0)) as kv:
        blocks = kv.put(keys(BLOCKS), content(BLOCKS)).blocks
        inner = kv._parts.device
        kv.reconfigure(depth=2)
        driver, most = kv.engine.driver, [0]
        submit = inner.submit

        def watched(ops: Any) -> int:
            taken = submit(ops)
            most[0] = max(most[0], inner.in_flight)
            return taken

        inner.submit = watched  # type: ignore[method-assign]
        for layer in range(LAYERS):
            with kv.demand(kv.pages(blocks, layer)) as ticket:
                assert not ticket.missing.any()
        assert most == [2]
        kv.reconfigure(depth=128)
        assert driver.device is inner


# --- SIGHUP ---


TABLES = """
[daemon]
clients = {clients}
{made}
[namespaces.a]
store = "{store}"
layers = 3
page_bytes = "12KiB"
blocks = 8
fill = false
device = "threads"
staging = "{staging}"
predictor = "{predictor}"
evict = "{evict}"
{more}
"""


def test_a_file_that_is_read_again_is_applied_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "p.toml"
    plain = {
        "clients": 9,
        "made": "",
        "store": tmp_path / "a",
        "staging": "1MiB",
        "predictor": "none",
        "evict": "lru",
        "more": "",
    }

    def write(**values: Any) -> None:
        file.write_text(TABLES.format(**{**plain, **values}))

    write()
    config = read_config(file)
    caplog.set_level(logging.INFO, "prefetchd")
    with daemon(tmp_path, {"a": settings_of(config.namespaces["a"])}) as served:
        reloader = Reloader(file, config, served.server)
        kv = served.connect(namespace="a")
        blocks = kv.put(keys(4), content(4)).blocks

        def reload() -> str:
            caplog.clear()
            served.server.interrupt(reloader.reload)
            served.settle()
            done = threading.Event()
            served.server.aside(done.set)
            assert done.wait(60)
            with kv.demand(kv.pages(blocks, 1)) as ticket:
                assert not ticket.missing.any()
            return caplog.text

        write(clients=7, evict="cycle", predictor="auto", more="ttl_s = 60.0")
        said = reload()
        assert served.server.limits.clients == 7
        for words in ("predictor from none to auto", "evict from lru to cycle", "ttl_s from None"):
            assert f"namespace a: changed {words}" in said
        assert (kv.stats().evict, kv.stats().predictor) == ("cycle", "auto")

        http, salted = "256\nhttp = '127.0.0.1:1'", "token = 'x'\nsalt = 'y'"
        write(clients=http, staging="2MiB", made="[made]\nenabled = true", more=salted)
        said = reload()
        for what in ("[daemon] http", "namespace a: salt", "[made]"):
            assert f"{what}: needs a restart" in said
        assert "staging_bytes from 1048576 to 2097152: needs a restart" in said
        assert "who may use it has changed" in said
        assert "changed evict from cycle to lru" in said

        write(predictor=__file__.replace("reconfigure", "units"))
        assert "namespace a: not changed: " in reload()
        write(store=tmp_path / "elsewhere")
        assert "namespace a: path: needs a restart" in reload()
        write(clients=0.5)
        assert "not reloaded: " in reload()
        file.write_text("[namespaces]\n")
        assert "namespace a: no new clients" in reload()


class Told(Supervisor):
    """Keeps what it would say."""

    def __init__(self) -> None:
        super().__init__({})
        self.said: list[str] = []

    def _say(self, *lines: str) -> None:
        self.said.append(lines[0])


def spaces_in(folder: Path, *names: str) -> str:
    return "".join(
        f'[namespaces.{name}]\nstore = "{folder / name}"\nlayers = 3\npage_bytes = "12KiB"\n'
        'blocks = 8\nfill = false\ndevice = "threads"\n'
        for name in names
    )


@contextmanager
def reloading(folder: Path) -> Iterator[tuple[Daemon, Told, Callable[[str | bytes], None]]]:
    """A daemon with namespace "a", what its supervisor is told, and what gives it another file."""
    file = folder / "p.toml"
    file.write_text(spaces_in(folder, "a"))
    config = read_config(file)
    with daemon(folder, {"a": settings_of(config.namespaces["a"])}) as served:
        told = served.server.supervisor = Told()
        reloader = Reloader(file, config, served.server)

        def reload(text: str | bytes) -> None:
            told.said.clear()
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
            served.server.interrupt(reloader.reload)

        yield served, told, reload


def test_new_namespaces_are_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with reloading(tmp_path) as (served, told, reload):
        watch = Watch(served.server.namespaces)
        watch.server = served.server
        wrong = spaces_in(tmp_path / "no", "wrong")
        reload(spaces_in(tmp_path, "a", "new") + wrong)
        served.until(lambda: "new" in served.server.namespaces.open)
        served.until(lambda: "namespace wrong cannot be opened: " in caplog.text)
        served.until(lambda: told.said == ["RELOADING=1", "READY=1"])
        assert watch.picture().verdict.reasons == ["namespace wrong: configured, and not open yet"]
        (tmp_path / "no").mkdir()
        reload(spaces_in(tmp_path, "a", "new") + wrong)
        served.until(lambda: len(served.server.namespaces.open) == 3)
        assert watch.picture().verdict.ready, "what could not be opened is tried again"


def test_a_reload_ends_whatever_is_met(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a mistake")

    def ended() -> bool:
        return told.said == ["RELOADING=1", "READY=1"]

    text = spaces_in(tmp_path, "a") + "ttl_s = 9.0\nweight = 9\n"
    with reloading(tmp_path) as (served, told, reload):
        reload(text + "cap = '1B'\n")
        served.until(ended)
        assert "namespace a: not changed: " in caplog.text
        opened = served.server.namespaces.open["a"]
        assert opened.weight == 9, "which the runtime has no say in"
        assert opened.runtime.options.ttl_s is None
        reload(b"\xff\xfe")
        served.until(ended)
        assert "p.toml: is not UTF-8" in caplog.text
        for owner, what in ((Runtime, "reconfigure"), (Reloader, "_go_by")):
            with monkeypatch.context() as patched:
                patched.setattr(owner, what, fails)
                reload(text)
                served.until(ended)
        assert caplog.text.count("RuntimeError: a mistake") == 2


def test_options_are_all_sorted_out() -> None:
    """A new option is one or the other on purpose: see `changes.LIVE`."""
    names = set(Options.__dataclass_fields__)
    assert len(names) == 29, "sort the new one out, in `changes.LIVE` and `Runtime.reconfigure`"
