"""The daemon goes, hangs, comes back: clients see misses in bounded time, and never wrong bytes."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prefetchd import (
    AwayError,
    Client,
    DoneHint,
    PageMissing,
    Runtime,
    SidecarError,
    aconnect,
    connect,
)
from prefetchd.model import Ids, Outcome
from prefetchd.predictor import Guess, Predictor
from prefetchd.sidecar import client as client_module
from tests.runtime_bench import BLOCKS, PAGE_BYTES, PLAIN, content, keys, layout
from tests.sidecar_bench import PATIENCE_S, Process, daemon, in_space, space
from tests.sidecar_campaign import campaign
from tests.test_runtime_waiting import Aside


def test_without_a_daemon_connecting_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(AwayError, match=r"no daemon answers .* `prefetchd serve --socket"):
        connect(f"unix:{tmp_path}/none.sock")


def test_a_killed_daemon_is_a_miss_until_it_is_back(tmp_path: Path) -> None:
    """Killed while a demand waits; started again, its store knows what was acknowledged."""
    pages, stores = content(BLOCKS), str(tmp_path / "stores")
    with Process(tmp_path, "--store", stores) as first:
        kv = connect(first.address, layout=layout(), blocks=BLOCKS)
        blocks = kv.put(keys(4), pages[:4]).blocks
        held = kv.demand(np.arange(6)).wait()
        assert np.array_equal(held.view(0), pages[0, 0])
        first.running.send_signal(signal.SIGSTOP)
        waiting = kv.demand(kv.pages(blocks, 1))
        waiter = Aside(waiting.wait)
        put = kv.put(keys(2, 4), pages[4:6])
        first.kill()
        assert waiter.ended().outcomes.tolist() == [Outcome.MISS] * 4
        assert waiting.missing.all()
        assert held.missing.all()
        with pytest.raises(PageMissing, match="the daemon has gone"):
            held.views()
        assert put.wait().blocks.tolist() == [-1, -1]
        assert put.failures[1].startswith("block 1 was not stored: the daemon has gone")
    check_what_is_left(kv, blocks)
    with Process(tmp_path, "--store", stores):
        assert kv.wait_until_back(PATIENCE_S)
        assert kv.away == ""
        with kv.demand(kv.pages(blocks, 1)) as ticket:
            assert ticket.missing.all(), "these indices may mean other blocks by now"
        found = kv.find(keys(4))
        assert len(found) == 4
        with kv.demand(kv.pages(found.blocks, 1)) as ticket:
            assert np.array_equal(np.stack(ticket.views()), pages[:4, 1])
        with pytest.raises(PageMissing):
            held.views()
        held.release()
        assert kv.stats().slots_pinned <= 4
        kv.close()


def check_what_is_left(kv: Client, blocks: Ids) -> None:
    """Nothing, in words, at once."""
    assert kv.away
    assert len(kv.find(keys(4))) == 0
    with kv.demand(kv.pages(blocks, 1)) as ticket:
        assert ticket.missing.all()
    assert kv.put(keys(1, 7), content(1)).failures
    kv.hint(DoneHint(1))
    assert kv.hints_dropped == 1
    with pytest.raises(AwayError):
        kv.stats()


def test_what_was_acknowledged_survives_kills_of_the_daemon(tmp_path: Path) -> None:
    assert campaign(tmp_path, 2).acknowledged > 0


def test_a_daemon_that_comes_back_with_another_store_is_not_used(tmp_path: Path) -> None:
    with daemon(tmp_path) as served:
        kv = connect(served.address)
    with daemon(tmp_path, {"default": space(page_bytes=1000)}):
        assert kv.lookup(keys(1)).tolist() == [], "it notices when it asks"
        while "another" not in kv.away:
            assert not kv.wait_until_back(0.01)
        assert "the daemon is back with another fingerprint" in kv.away
        assert kv.lookup(keys(1)).tolist() == []
    kv.close()


def test_a_daemon_that_hangs_is_left_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ANSWER_NS", 200_000_000)
    with (
        Process(tmp_path, "--store", str(tmp_path / "stores")) as process,
        connect(process.address, layout=layout(), blocks=BLOCKS) as kv,
    ):
        blocks = kv.put(keys(1), content(1)).blocks
        process.running.send_signal(signal.SIGSTOP)
        assert Aside(lambda: kv.lookup(keys(1))).ended().tolist() == []
        assert "does not answer in time" in kv.away or kv.away
        with kv.demand(kv.pages(blocks, 0)) as ticket:
            assert ticket.missing.all()
        process.running.send_signal(signal.SIGCONT)
        assert kv.wait_until_back(PATIENCE_S)
        assert len(kv.lookup(keys(1))) == 1


def test_a_daemon_stops_cleanly_when_it_is_told_to(tmp_path: Path) -> None:
    stores = str(tmp_path / "stores")
    with Process(tmp_path, "--store", stores) as process:
        with pytest.raises(AssertionError, match="is served by process"):
            Process(tmp_path, "--store", stores).__enter__()
        with connect(process.address, layout=layout(), blocks=BLOCKS) as kv:
            kv.put(keys(3), content(3), durability="fast").wait()
            code, said = process.terminate()
            assert code == 0, said
            assert not process.path.exists()
            assert kv.lookup(keys(1)).tolist() == []
    with Process(tmp_path, "--store", f"{stores}/default") as again, connect(again.address) as kv:
        assert len(kv.lookup(keys(3))) == 3
        assert kv.notes == ()


def test_sighup_has_the_configuration_read_again(tmp_path: Path) -> None:
    config = tmp_path / "prefetchd.toml"
    shape = f"layers = 3\npage_bytes = '{PAGE_BYTES}'\nblocks = 8\nfill = false\n"

    def write(**tokens: str) -> None:
        config.write_text(
            "".join(
                f"[namespaces.{name}]\nstore = '{tmp_path / name}'\ntoken = '{token}'\n{shape}"
                for name, token in tokens.items()
            )
        )

    def connected(name: str, token: str) -> Client:
        """As soon as the daemon has read it."""
        while True:
            with suppress(SidecarError):
                return connect(process.address, namespace=name, token=token)

    write(a="old")
    with Process(tmp_path, "--config", str(config)) as process:
        with connected("a", "old") as kv:
            kv.put(keys(1), content(1)).wait()
            write(a="new", b="other")
            process.running.send_signal(signal.SIGHUP)
            with connected("b", "other") as other, connected("a", "new") as again:
                assert other.lookup(keys(1)).tolist() == []
                assert len(again.lookup(keys(1))) == len(kv.lookup(keys(1))) == 1
            with pytest.raises(SidecarError, match="not there, or not for"):
                connect(process.address, namespace="a", token="old")
            config.write_text("[daemon]\nsocket = 3\n")
            process.running.send_signal(signal.SIGHUP)
            assert len(kv.lookup(keys(1))) == 1
        code, said = process.terminate()
    assert code == 0
    assert "line 2, [daemon] socket" in said or "reloaded" in said


class Raises(Predictor):
    name = "raises"
    armed = False

    def predict(self, now_ns: int, limit: int) -> Guess:
        if self.armed:
            raise RuntimeError("a mistake in a predictor")
        return super().predict(now_ns, limit)


def test_a_namespace_whose_engine_stops_answers_with_misses_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = in_space(predictor=Raises, staging_bytes=4 * PAGE_BYTES)
    with daemon(tmp_path, {"broken": broken, "sound": space()}) as served:
        kv, other = served.connect("broken"), served.connect("sound")
        blocks = kv.put(keys(BLOCKS), content(BLOCKS)).blocks
        other.put(keys(BLOCKS), content(BLOCKS)).wait()
        kv.demand(kv.pages(blocks[:4], 0)).wait()
        waiting = kv.demand(kv.pages(blocks[4:], 0), timeout_s=60)
        monkeypatch.setattr(Raises, "armed", True)
        kv.demand(kv.pages(blocks[4:5], 1), timeout_s=60)
        kv.hint(DoneHint(1))
        assert waiting.wait().missing.all()
        assert kv.demand(kv.pages(blocks, 0)[:1]).wait().missing.all()
        assert "the engine has stopped" in kv.put(keys(1, 20), content(1)).wait().failures[0]
        assert kv.lookup(keys(1)).tolist() == []
        with other.demand(other.pages(blocks, 0)) as ticket:
            assert not ticket.missing.any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"of_tomorrow": 1}, "nothing is known of of_tomorrow"),
        ({"slots": "many"}, r"Expected `int`, got `str` - at `\$\.slots`"),
        ({"waits": None}, "missing required field `waits`"),
        ({"paths": [{}]}, r"missing required field `path` - at `\$\.paths"),
    ],
)
def test_figures_of_another_version_are_told_in_words(
    change: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(address: str) -> None:
        async with await aconnect(address) as kv:
            with pytest.raises(AwayError, match=f"another version's: .*{words}"):
                await kv.stats()

    with daemon(tmp_path) as served, served.connect() as kv:
        told = {**msgspec.to_builtins(kv.stats(), enc_hook=lambda _: []), **change}
        told = {name: value for name, value in told.items() if value is not None}
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "stats", lambda _: told)
            with pytest.raises(AwayError, match=f"another version's: .*{words}"):
                kv.stats()
            asyncio.run(ask(served.address))
        assert kv.stats().slots > 0, "and the client is usable as before"


def test_threads_of_one_client_wait_side_by_side(tmp_path: Path) -> None:
    pages, held_back = content(BLOCKS), in_space(staging_bytes=6 * PAGE_BYTES)
    with daemon(tmp_path, {"default": held_back}) as served, served.connect() as kv:
        blocks = kv.put(keys(BLOCKS), pages).blocks
        held = kv.demand(kv.pages(blocks[:4], 0)).wait()
        long = Aside(kv.demand(kv.pages(blocks[4:7], 0), timeout_s=60).wait)

        def work(seed: int) -> int:
            random = np.random.default_rng(seed)
            for step in range(30):
                chosen, layer = random.choice(4, 1), step % 1
                with kv.demand(kv.pages(blocks[chosen], layer)) as ticket:
                    assert np.array_equal(ticket.view(0), pages[chosen[0], layer])
            return seed

        workers = [Aside(lambda seed=seed: work(seed)) for seed in (1, 2, 3)]  # type: ignore[misc]
        assert [worker.ended() for worker in workers] == [1, 2, 3]
        held.release()
        assert not long.ended().missing.any()


def test_a_namespace_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    def no_memory(*_: Any) -> Any:
        raise OSError(12, os.strerror(12))

    options = replace(PLAIN, gpu=no_memory)
    (tmp_path / "made").mkdir()
    with daemon(tmp_path, made_in=tmp_path / "made", template=options) as served:
        with pytest.raises(SidecarError, match="the daemon's log says why"):
            served.connect("new", layout=layout(), blocks=BLOCKS)
        assert served.connect().slots == 24
