"""`prefetchd top`: the same figures in a terminal, over HTTP and as a client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from prefetchd.sidecar.rates import percentile_s
from prefetchd.sidecar.top import View, over_http, table, view
from prefetchd.sidecar.watching import Watch
from tests.replays import run_here
from tests.runtime_bench import content, keys
from tests.sidecar_bench import daemon, space
from tests.test_seeing import seen


def test_what_happened_between_two_looks(tmp_path: Path) -> None:
    with seen(tmp_path, {"a": space(), "b": space()}) as look:
        take = over_http(look.url)
        kv = look.served.connect("a")
        blocks = kv.put(keys(4), content(4)).blocks
        kv.demand(kv.pages(blocks, 0)).wait()
        before = take()
        kv.demand(kv.pages(blocks, 0)).wait()
        kv.demand(kv.pages(blocks[:2], 1)).wait()
        now = msgspec.structs.replace(take(), taken_ns=before.taken_ns + 2_000_000_000)
        first, second = view(before, now, judged=True).namespaces
        assert (first.name, first.clients, first.tickets_held, second.clients) == ("a", 1, 3, 0)
        assert first.rates.seconds == 2
        assert first.rates.demanded_pages_s == 3
        assert first.rates.in_time == 4 / 6
        assert first.rates.coverage == 0
        assert first.rates.read_bytes_s == 2 * kv.slot_bytes / 2
        assert first.rates.wait_p50_s is not None
        assert second.rates.in_time is second.rates.wait_p50_s is None
        anew = msgspec.structs.replace(now, process=now.process + 1)
        assert view(before, anew, judged=True).namespaces[0].rates.demanded_pages_s == 0


def looked(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    shown = run_here(capsys, "top", *arguments, "--once", "--json", "--every", "0.01")
    assert shown.code == 0, shown.err
    return json.loads(shown.out)


def test_a_token_can_come_from_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFETCHD_TOKEN", "x")
    with daemon(tmp_path, {"b": space(token="x")}) as served:
        at = ["--connect", served.address]
        assert looked(capsys, *at, "--namespace", "b")["namespaces"][0]["name"] == "b"
        erased = run_here(capsys, "namespace", "erase", "b", *at, "--yes")
        assert erased.code == 0, erased.err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with seen(tmp_path, {"a": space(), "b": space(token="x")}) as look:
        told = looked(capsys, "--http", look.url.removeprefix("http://"))
        assert [row["name"] for row in told["namespaces"]] == ["a", "b"]
        assert told["verdict"]["ready"] is True
        as_client = looked(capsys, "--connect", look.served.address, "--namespace", "a")
        assert [row["name"] for row in as_client["namespaces"]] == ["a"]
        assert as_client["verdict"] is as_client["namespaces"][0]["clients"] is None
        plain = run_here(capsys, "top", "--http", look.url, "--once", "--every", "0.01")
        assert plain.out.startswith("ready")
        both = run_here(capsys, "top", "--http", look.url, "--connect", "unix:x")
        denied = run_here(
            capsys, "top", "--connect", look.served.address, "--namespace", "b", "--once"
        )
        assert "not there, or not for uid" in denied.err
        nonsense = run_here(capsys, "top", "--http", "ftp://x")
    away = run_here(capsys, "top", "--http", look.url, "--once")
    assert "no daemon tells its figures at" in away.err
    assert "ECONNREFUSED" in away.err
    assert [shown.code for shown in (both, nonsense, denied, away)] == [2, 2, 3, 3]


def test_the_table_says_what_is_wrong_and_takes_names_as_they_are(tmp_path: Path) -> None:
    with seen(tmp_path, {"a": space()}) as look:
        watch = Watch(look.served.server.namespaces)
        picture = watch.picture()
    seen_now = view(picture, picture, judged=True)
    row = msgspec.structs.replace(
        seen_now.namespaces[0], paths={"[red]p": "failed/failed"}, fault="gone"
    )
    drawn = table(View(seen_now.verdict, [row]))
    assert "the daemon is starting" in str(drawn.title)
    assert [str(cell) for cell in drawn.columns[-1].cells] == ["gone; [red]p: failed/failed"]


def test_a_percentile_is_the_bound_of_its_bucket() -> None:
    bounds = [1, 10, 100]
    assert percentile_s(np.array([9, 0, 0, 0]), bounds, 0.5) is None
    assert percentile_s(np.array([9, 3, 1, 0]), bounds, 0.5) == 10 / 1e9
    assert percentile_s(np.array([9, 1, 3, 0]), bounds, 0.5) == 100 / 1e9
    assert percentile_s(np.array([0, 0, 0, 2]), bounds, 0.5) == 100 / 1e9
