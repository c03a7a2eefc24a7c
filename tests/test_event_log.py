"""What a daemon recorded can be simulated: the same events give the same commands, demands and
outcomes; and its log for machines."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prefetchd import PageHint, connect
from prefetchd.lab.event_log import Known, read_log
from prefetchd.model import Demanded, IoClass, Read, Used
from prefetchd.planner import PlannerLimits
from prefetchd.sidecar import recording
from prefetchd.sidecar.logs import JsonLines
from prefetchd.sidecar.namespace import NamespaceSettings, open_namespace
from prefetchd.sidecar.namespaces import Namespaces
from prefetchd.sidecar.recording import record_events
from tests.replays import run_here
from tests.runtime_bench import BLOCKS, LAYERS, PAGE_BYTES, PLAIN, content, keys, layout
from tests.sidecar_bench import Daemon, Process, daemon, space


def used(served: Daemon, steps: int = 30) -> dict[str, int]:
    """A short decode with hints, in which blocks come and go meanwhile; its outcomes."""
    random = np.random.default_rng(5)
    with served.connect() as kv:
        blocks = kv.put(keys(BLOCKS // 2), content(BLOCKS // 2)).blocks
        for step in range(steps):
            for layer in range(LAYERS):
                pages = kv.pages(random.choice(BLOCKS, 3, replace=False), (layer + 1) % LAYERS)
                kv.hint(PageHint(pages, np.linspace(1, 0.1, 3, dtype=np.float32)))
                kv.demand(kv.pages(random.choice(blocks, 3, replace=False), layer)).wait().release()
            if step % 8 == 0:
                kv.put(keys(2, 100 + step), content(2), durability="fast").wait()
        served.settle()
        return kv.stats().outcomes


@contextmanager
def recorded(folder: Path, limit_bytes: int = 1 << 24) -> Iterator[Daemon]:
    options = replace(PLAIN, predictor="auto", staging_bytes=8 * PAGE_BYTES)
    with daemon(folder, {}) as served:
        namespaces = served.server.namespaces
        record_events(namespaces, folder / "events", limit_bytes)
        settings = space(options)
        namespaces.settings["default"] = settings
        namespaces.admit(open_namespace("default", settings))
        yield served


def test_a_session_simulates_to_the_same_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorded(tmp_path) as served:
        outcomes = used(served)
        counters = served.runtime()._parts.core.counters
    path = tmp_path / "events" / "default.events"
    entries = list(read_log(path)[1])
    commands = [command for _, _, commands in entries for command in commands]
    ahead = [c for c in commands if isinstance(c, Read) and c.io_class == IoClass.PREFETCH]
    assert ahead, "it is worth nothing unless something was guessed"
    known = [mask for _, event, _ in entries if isinstance(event, Known) for mask in event.masks]
    assert not np.concatenate(known).all(), "nor unless some guess was of what is not there"
    shown = run_here(capsys, "simulate", "events", str(path), "--json")
    assert shown.code == 0, shown.err
    told = json.loads(shown.out)
    assert told["outcomes"] == outcomes
    assert told["prefetch"] == counters.prefetches()
    assert told["prefetch"]["issued"] == sum(len(c.pages) for c in ahead)
    assert told["demands"] == sum(isinstance(event, Demanded | Used) for _, event, _ in entries)
    assert "every command the same" in run_here(capsys, "simulate", "events", str(path)).out
    path.write_bytes(path.read_bytes().replace(b"Demanded", b"Released", 1))
    assert run_here(capsys, "simulate", "events", str(path)).code == 2


def test_a_log_ends_where_it_is_full_and_what_it_has_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "prefetchd")
    for _ in range(2):
        with recorded(tmp_path, limit_bytes=8_000) as served:
            used(served, 10)
    files = sorted((tmp_path / "events").iterdir())
    assert [file.name for file in files] == ["default.events", "default.events.1"]
    assert all(4_000 < file.stat().st_size <= 8_000 for file in files)
    ended = [record.getMessage() for record in caplog.records]
    assert [text.partition(": ")[2] for text in ended] == [
        "the log of events ends here: it has reached its 8000 bytes"
    ] * 2
    assert run_here(capsys, "simulate", "events", str(files[0])).code == 0


def test_a_log_whose_writer_cannot_follow_ends_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "_WAITING_MAX", 3)
    monkeypatch.setattr(recording, "_EVERY_S", 60.0)
    with recorded(tmp_path) as served:
        assert sum(used(served, 3).values()) == 3 * 3 * LAYERS
    assert "the log of events ends here: 3 events wait to be written" in caplog.text
    assert caplog.text.count("ends here") == 1


def test_a_log_ends_where_the_core_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with recorded(tmp_path) as served:
        used(served, 2)
        served.runtime().engine.core.planner.limits = PlannerLimits(candidates_max=1)
        used(served, 2)
    assert "ends here: a policy or a limit was changed while serving" in caplog.text
    path = str(tmp_path / "events" / "default.events")
    told = json.loads(run_here(capsys, "simulate", "events", path, "--json").out)
    assert told["demands"] == 2 * LAYERS


def test_lines_for_machines_say_whose_where_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefetchd")
    settings = NamespaceSettings(tmp_path / "kv", layout(), BLOCKS, False, PLAIN)
    namespaces = Namespaces({"chat": settings}, os.geteuid())
    formatter = JsonLines(namespaces)
    namespaces.admit(open_namespace("chat", settings))
    paths = namespaces.open["chat"].runtime._parts.driver.paths

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(formatter.format(record)))

    lines: list[dict[str, str]] = []
    log, kept = logging.getLogger("prefetchd"), Kept()
    log.addHandler(kept)
    try:
        for _ in range(3):
            paths.say("EIO (Input/output error)", 0, "what it was for is a miss")
        log.error("store %s: its journal is gone", tmp_path / "kv")
        log.info("namespace %s: a hint was refused: %s", "chat", 'with "quotes" and\nlines')
        try:
            os.stat(tmp_path / "none")
        except OSError:
            log.exception("a fault of the daemon's")
    finally:
        log.removeHandler(kept)
        assert namespaces.close() == []
    path = str(tmp_path / "kv" / "extents.dat")
    first, second, third, fourth = lines
    told = [first.pop(name) for name in ("level", "namespace", "path", "errno")]
    assert told == ["warning", "chat", path, "EIO"]
    assert first["time"].endswith("+00:00")
    assert (second["namespace"], second["path"]) == ("chat", str(tmp_path / "kv"))
    assert third["namespace"] == "chat"
    assert third["event"].endswith('"quotes" and\nlines')
    assert fourth["errno"] == "ENOENT"
    assert "os.stat" in fourth["traceback"]


def test_a_daemon_tells_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own: the options, and that each line of its log is JSON."""
    arguments = ["--store", str(tmp_path / "stores"), "--http", f"unix:{tmp_path}/http.sock"]
    arguments += ["--log-format", "json", "--event-log", str(tmp_path / "events")]
    with Process(tmp_path, *arguments) as process:
        with connect(process.address, layout=layout(), blocks=BLOCKS) as kv:
            kv.put(keys(2), content(2)).wait()
        shown = run_here(
            capsys, "top", "--http", f"unix:{tmp_path}/http.sock", "--once", "--every", "0.01"
        )
        assert "default" in shown.out
        code, said = process.terminate()
    assert code == 0
    lines = [json.loads(line) for line in said.splitlines()]
    assert any("has gone" in line["event"] for line in lines)
    log = str(tmp_path / "events" / "default.events")
    assert run_here(capsys, "simulate", "events", log, "--json").code == 0
