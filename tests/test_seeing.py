"""What the daemon tells of itself: figures that are right, and health that is the truth."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefetchd.health import State
from prefetchd.model import Ready
from prefetchd.sidecar import patient, watching
from prefetchd.sidecar.http import Http, check_address
from prefetchd.sidecar.namespace import NamespaceSettings
from prefetchd.sidecar.place import PlaceError
from prefetchd.sidecar.watching import Watch
from prefetchd.staging import NO_CODES
from prefetchd.waits import BOUNDS_NS, Waits
from tests.runtime_bench import BLOCKS, LAYERS, PLAIN, content, keys, layout
from tests.sidecar_bench import PATIENCE_S, Daemon, daemon, space

ROOT = Path(__file__).parent.parent


class Seen:
    """A daemon's HTTP, as those who look see it."""

    def __init__(self, served: Daemon, web: Http) -> None:
        self.served = served
        self.url = web.url

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.url.partition("//")[2], timeout=PATIENCE_S)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def told(self, path: str) -> tuple[int, Any]:
        status, text = self.get(path)
        return status, json.loads(text)

    def samples(self) -> dict[tuple[str, ...], float]:
        """By name and label values, the namespace and what is the process's left out."""
        text = self.get("/metrics")[1]
        return {
            (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "namespace")): (
                sample.value
            )
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@contextmanager
def seen(
    folder: Path, spaces: dict[str, NamespaceSettings] | None = None, address: str = "127.0.0.1:0"
) -> Iterator[Seen]:
    with daemon(folder, spaces) as served:
        watch = Watch(served.server.namespaces)
        watch.server = served.server
        web = Http(address, watch)
        try:
            yield Seen(served, web)
        finally:
            web.close()


def test_the_figures_are_those_of_what_was_done(tmp_path: Path) -> None:
    with seen(tmp_path) as look, look.served.connect() as kv:
        blocks = kv.put(keys(4), content(4)).blocks
        for _ in range(2):
            held = kv.demand(kv.pages(blocks[:3], 0)).wait()
        look.served.settle()
        stats = kv.stats()  # what was read in place has been told before it
        told = look.samples()
        outcomes = {k[1]: v for k, v in told.items() if k[0] == "prefetchd_demanded_pages_total"}
        assert outcomes == stats.outcomes
        assert sum(outcomes.values()) == told["prefetchd_demand_wait_seconds_count",] == 6
        assert told["prefetchd_demand_wait_seconds_bucket", "1e-06"] == outcomes["retained"] == 3
        assert told["prefetchd_demand_wait_seconds_bucket", "+Inf"] == 6
        assert told["prefetchd_read_bytes_total", "demand"] == 3 * kv.slot_bytes
        payload = 4 * LAYERS * kv.slot_bytes
        assert told["prefetchd_written_bytes_total", "payload"] == payload
        assert told["prefetchd_write_amplification_ratio",] == stats.bytes_written / payload > 1
        assert (told["prefetchd_clients",], told["prefetchd_tickets_held",]) == (1, 2)
        assert told["prefetchd_staging_pinned_bytes",] == 3 * kv.slot_bytes
        assert told["prefetchd_path_health", "reading", "memory", "healthy"] == 1
        held.release()
        kv.lookup(keys(1))  # which carries the release
        json_told = look.told("/figures.json")[1]["namespaces"][0]
        assert json_told["stats"]["outcomes"] == stats.outcomes
        assert sum(map(sum, json_told["stats"]["waits"]["counts"][1:])) == 0, "of layer 0 only"
        kv.close()
        look.served.until(lambda: not look.served.server.connections)
        assert look.samples()["prefetchd_staging_pinned_bytes",] == 0


def test_ready_once_everything_is_open_and_proved(tmp_path: Path) -> None:
    disk = NamespaceSettings(
        tmp_path / "kv", layout(), BLOCKS, False, replace(PLAIN, device="uring")
    )
    with seen(tmp_path, {"default": disk}) as look:
        status, told = look.told("/readyz")
        assert (status, told["healthy"], told["reasons"]) == (200, True, [])
        [proof] = told["proofs"]["default"].values()
        assert proof == "written, flushed and read back through uring"
        look.served.server.namespaces.configure({"default": disk, "later": space()})
        status, told = look.told("/readyz")
        assert (status, told["healthy"]) == (503, True)
        assert told["reasons"] == ["namespace later: configured, and not open yet"]
        assert look.get("/healthz")[0] == 200


def test_a_stopped_engine_and_failed_paths_are_told(tmp_path: Path) -> None:
    with seen(tmp_path, {"one": space(), "two": space()}) as look:
        paths = look.served.runtime("one")._parts.driver.paths
        paths._reading[0].state = State.FAILED
        status, told = look.told("/healthz")
        assert (status, told["ready"]) == (503, False)
        assert told["reasons"][0].startswith("namespace one: all its paths have failed")
        paths._reading[0].state = State.SUSPECT
        assert look.get("/healthz")[0] == 200
        assert "reading is suspect" in look.told("/healthz")[1]["notes"][0]
        look.served.runtime("two").engine.fail(OSError("the cable is out"))
        status, told = look.told("/healthz")
        assert status == 503
        assert (
            "namespace two: the engine has stopped: OSError('the cable is out')" in told["reasons"]
        )
        assert 'prefetchd_engine_up{namespace="two"} 0.0' in look.get("/metrics")[1]
        look.served.runtime("two").engine._broken = None  # so that it can be closed


def test_a_loop_that_does_not_turn_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_PATIENCE_S", 0.01)
    with seen(tmp_path) as look:
        monkeypatch.setattr(look.served.server, "later", lambda task: None)
        status, told = look.told("/healthz")
        assert (status, told["reasons"]) == (503, ["the daemon's loop has not answered for 0.01 s"])
        monkeypatch.undo()
        assert look.get("/healthz")[0] == 200


def test_only_who_is_meant_to_gets_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seen(tmp_path) as look:
        assert look.get("/healthz", Host="evil.example")[0] == 400
        with pytest.raises(PlaceError, match=r"cannot be served at .*: EADDRINUSE"):
            Http(look.url.partition("//")[2], Watch(look.served.server.namespaces))
    (tmp_path / "second").mkdir()
    with seen(tmp_path / "second", address=f"unix:{tmp_path}/http.sock"):
        assert (tmp_path / "http.sock").stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(f"{tmp_path}/http.sock")
            sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
    assert not (tmp_path / "http.sock").exists()
    caplog.set_level(logging.WARNING, "prefetchd")
    (tmp_path / "third").mkdir()
    with seen(tmp_path / "third", address="0.0.0.0:0"):
        assert "can be reached from other machines" in caplog.text
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(PlaceError, match=r"uvicorn, which is not installed: .*prefetchd\[web\]"):
        Http("127.0.0.1:0", Watch(look.served.server.namespaces))


@pytest.mark.parametrize("address", ["9464", "unix:", "a b:c", "host:99999", "::1:80"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        check_address(address)
    assert check_address(":9464") == ("127.0.0.1", 9464)
    assert check_address("[::1]:9464") == ("::1", 9464)


def test_connections_that_ask_nothing_shut_nobody_out(tmp_path: Path) -> None:
    with seen(tmp_path) as look, ExitStack() as open_ones:
        host, port = look.url.partition("//")[2].split(":")

        def connected(sent: bytes) -> socket.socket:
            one = open_ones.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            one.sendall(sent)
            return one

        crowd = [connected(b"GET /healthz HT" if number % 2 else b"") for number in range(80)]
        assert [look.get("/healthz")[0] for _ in range(3)] == [200] * 3
        assert crowd[0].recv(1) == b"", "the oldest had to go"
        crowd[-1].sendall(b"TP/1.1\r\nHost: localhost\r\n\r\n")
        assert crowd[-1].recv(12) == b"HTTP/1.1 200", "the newest had not"


def test_a_connection_without_a_whole_request_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patient, "REQUEST_S", 0.05)
    with seen(tmp_path) as look:
        host, port = look.url.partition("//")[2].split(":")
        for sent in (b"", b"GET /healthz HTTP/1.1\r\nHost: "):
            with socket.create_connection((host, int(port)), PATIENCE_S) as one:
                one.sendall(sent)
                with suppress(ConnectionResetError):
                    assert one.recv(1) == b""


def test_waits_are_counted_by_layer_and_bucket() -> None:
    random = np.random.default_rng(7)
    waits, layers, all_pages, all_ns = Waits(3), 3, [], []
    for number in range(150):
        pages = random.choice(60, random.integers(0, 9), replace=False)
        waits_ns = random.choice([0, 1, 1000, 1001, 50_000, 10**10, 10**11], len(pages))
        waits.add(
            pages, Ready(number, np.zeros(len(pages), np.int64), np.zeros(0, np.uint8), waits_ns)
        )
        all_pages.append(pages)
        all_ns.append(waits_ns)
    # Given up while it waited: that says nothing of how long a page takes.
    gone = np.array([-1, -1])
    waits.add(np.array([0, 3]), Ready(998, gone, NO_CODES, np.array([0, 5])))
    waits.add(np.array([0, 3]), Ready(999, gone, NO_CODES, np.array([0, 0])))
    pages, ns = np.concatenate([*all_pages, [3]]), np.concatenate([*all_ns, [5]])
    told = waits.snapshot()()
    edges = [0, *BOUNDS_NS.tolist(), 2**62]
    for layer in range(layers):
        mine = ns[pages % layers == layer]
        expected = [int(((mine > low) & (mine <= high)).sum()) for low, high in pairwise(edges)]
        assert told.counts[layer] == expected
        assert told.sums_ns[layer] == mine.sum()
    assert told.here == np.count_nonzero(ns == 0)
    assert sum(told.totals()) == len(pages)


def test_the_dashboard_asks_for_what_there_is(tmp_path: Path) -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "prefetchd.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [one["query"]["query"] for one in board["templating"]["list"][1:]]
    with seen(tmp_path) as look, look.served.connect() as kv:
        kv.demand(kv.pages(kv.put(keys(2), content(2)).blocks, 0)).wait()
        families = list(text_string_to_metric_families(look.get("/metrics")[1]))
    there = {
        sample.name: {name for one in family.samples for name in one.labels}
        for family in families
        for sample in family.samples
    }
    for expression in asked:
        for name, inside in re.findall(r"\b((?:prefetchd|process)_\w+)(?:\{(.*?)\})?", expression):
            assert name in there, name
            labels = set(re.findall(r"(\w+)[=!]~?\"", inside)) - {"job"}  # the scraper's own
            assert labels <= there[name], expression
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    helps = [family.documentation for family in families if family.name.startswith("prefetchd")]
    assert all(text.endswith(".") for text in helps)


def test_a_daemon_without_http_imports_nothing_of_it() -> None:
    code = "import sys, prefetchd.cli, prefetchd.sidecar.serve_command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "prefetchd.sidecar.http" in loaded
    costly = {"uvicorn", "starlette", "prometheus_client", "plotly", "prefetchd.bench.report"}
    assert not costly & loaded
