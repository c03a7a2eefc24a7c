"""Replays by several processes at one daemon: whose blocks, whose figures, whose errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prefetchd import metrics
from prefetchd.bench import restore_result
from prefetchd.bench.crowd import together
from prefetchd.bench.decode import WrongBytes
from prefetchd.bench.runs import ReplayError
from tests.harmed import Harm
from tests.replays import BLOCKS, LAYERS, PAGE_BYTES, QUICK, run_here, write_trace
from tests.runtime_bench import content, keys, layout
from tests.sidecar_bench import daemon

REQUESTS = ["--requests", "12", "--speed", "400", "--idle-s", "0", "--json", "-"]


def needed(run: metrics.Run) -> int:
    return run.outcomes.total


def test_clients_of_private_daemons_have_blocks_of_their_own_and_one_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, store = write_trace(tmp_path / "t.npz"), tmp_path / "store"
    words = [*QUICK, "--staging", "90%", "--controls", "resident,oracle", "--clients", "2"]
    done = run_here(capsys, "replay", "decode", trace, "--store", store, *words)
    done.failed(2, "oracle is not run")
    words = [*QUICK, "--staging", "90%", "--controls", "resident", "--clients", "2", "--json", "-"]
    done = run_here(
        capsys, "replay", "decode", trace, "--store", store, *words, "--predictor", "none"
    )
    result = done.result()
    shared = (BLOCKS - 2) // 2
    assert result.settings.blocks == 2 * BLOCKS - shared
    assert result.settings.more["clients"] == 2
    assert [run.name for run in result.runs] == ["resident", "none"]
    assert [run.name for run in result.clients] == [
        *("resident client 0", "resident client 1"),
        *("none client 0", "none client 1"),
    ]
    for run, first, second in zip(
        result.runs, result.clients[::2], result.clients[1::2], strict=True
    ):
        assert needed(first) == needed(second) == needed(run) / 2
        assert first.verified_pages + second.verified_pages == run.verified_pages > needed(run)
        assert run.failures == {}
    resident, none = result.runs
    assert resident.outcomes.retained == needed(resident), "all was there before the clients came"
    assert 0 < none.device_bytes <= result.settings.blocks * LAYERS * PAGE_BYTES
    assert all(run.device_bytes == 0 for run in result.clients), "which is the daemon's"


def test_a_daemon_that_is_there_is_used_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "t.npz")
    (tmp_path / "made").mkdir()
    with daemon(tmp_path, made_in=tmp_path / "made") as served:
        at = ["--connect", served.address, "--namespace", "replays"]
        with served.connect("replays", layout=layout(PAGE_BYTES, LAYERS), blocks=64) as kv:
            other = np.random.default_rng(1).integers(0, 256, (3, LAYERS, PAGE_BYTES), np.uint8)
            kv.put([bytes([n]) * 16 for n in range(3)], other).wait()  # before the replay's
        words = [*at, "--clients", "1", *QUICK[:-2], "--json", "-"]
        result = run_here(capsys, "replay", "decode", trace, *words).result()
        staging = served.runtime("replays").slots
        done = run_here(capsys, "replay", "decode", trace, *words, "--staging", "10%")
        done.failed(2, "--staging")
        asked = run_here(capsys, "replay", "restore", *REQUESTS, "--connect", served.address)
        asked.failed(3, "another layout")
    (run,) = result.runs
    assert run.verified_pages > 0
    assert run.failures == {}
    assert result.settings.staging_slots == staging
    assert result.clients == []
    assert any("no control was run" in note for note in result.notes)


def test_requests_of_each_client_find_its_own_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made").mkdir()
    with daemon(tmp_path, made_in=tmp_path / "made") as served:
        at = ["--connect", served.address, "--namespace", "chats", "--clients", "2"]
        done = run_here(capsys, "replay", "restore", *REQUESTS, *at)
        assert done.code == 0, done.err
        result = restore_result.decode(done.out.encode())
        again = run_here(capsys, "replay", "restore", *REQUESTS, *at)
        assert again.code == 0, again.err
    for one in (result, restore_result.decode(again.out.encode())):
        (run,) = one.runs
        assert len(one.clients) == 2
        assert run.outcomes.total == sum(client.outcomes.total for client in one.clients)
        assert run.verified_pages == sum(client.verified_pages for client in one.clients) > 0
        assert run.written_bytes > 0, "what an earlier replay put is not found by the next"
        assert run.failures == {}


def test_what_happens_to_one_client_is_told() -> None:
    steps: list[int] = []
    assert together(Harm(""), 2, steps.append) == [0, 1]
    assert steps == [1, 1]
    with pytest.raises(WrongBytes, match="others"):
        together(Harm("raises"), 2, steps.append)
    with pytest.raises(ReplayError, match="client 1 ended before its work, with exit code -9"):
        together(Harm("dies"), 2, steps.append)


def test_a_client_that_only_tends_hears_its_answers(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        blocks = kv.put(keys(2), content(2)).blocks
        ticket = kv.demand(kv.pages(blocks, 0))
        while not ticket.done:
            kv.tend(0)
        assert not ticket.missing.any()
        ticket.release()
