"""Tenants of one daemon: fair turns, bounds, nothing to be had of another, and erasing one."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from prefetchd import Options, SidecarError, uniform
from prefetchd.cli import app
from prefetchd.model import ChainHint, DoneHint
from prefetchd.sidecar.greeting import ServerLimits
from prefetchd.sidecar.handshake import hello_for
from prefetchd.sidecar.memory import Memory
from prefetchd.sidecar.namespace import NamespaceSettings
from prefetchd.sidecar.namespaces import DeniedError, Namespaces
from prefetchd.sidecar.peers import Peer
from prefetchd.sidecar.protocol import Demand, Find, Ping, Release
from prefetchd.sidecar.replies import Pong
from prefetchd.sidecar.session import Session
from prefetchd.sidecar.window import Window
from prefetchd.sidecar.wire import Frames, frame, raw_of, reply_of
from prefetchd.store import StoreError
from tests.runtime_bench import BLOCKS, LAYERS, PLAIN, content, keys, layout, pinned
from tests.sidecar_bench import PATIENCE_S, Daemon, daemon, in_space, space

EXTENT = LAYERS * 12_288


def on_disk(path: Path, options: Options = PLAIN, **more: Any) -> NamespaceSettings:
    return NamespaceSettings(path, layout(), BLOCKS, False, options, **more)


class Raw:
    """A client that says what it likes."""

    def __init__(self, served: Daemon, namespace: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(served.server.place.path))
        self.sock.sendall(frame(hello_for(namespace, "", None, None, 0)))
        _, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 4)
        for fd in fds:
            os.close(fd)
        self._frames = Frames(1 << 22)
        served.clients.append(self)  # type: ignore[arg-type]

    def close(self) -> None:
        self.sock.close()

    def say(self, *messages: Any) -> None:
        self.sock.sendall(b"".join(frame(message) for message in messages))

    def hear(self) -> Any:
        while not self._frames.whole:
            self._frames.feed(self.sock.recv(1 << 16))
        return reply_of(self._frames.whole.popleft())


# --- shares ---


def test_a_flood_of_messages_does_not_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[str] = []
    plain = Session.handle

    def handle(self: Session, request: Any) -> None:
        handled.append(self.namespace.name)
        plain(self, request)

    monkeypatch.setattr(Session, "handle", handle)
    spaces = {"flood": space(), "quiet": space(), "heavy": space(weight=8)}
    with daemon(tmp_path, spaces) as served:
        flooders = [Raw(served, "flood") for _ in range(4)]
        quiet, heavy = Raw(served, "quiet"), Raw(served, "heavy")
        go = threading.Event()

        def hold() -> None:
            assert go.wait(PATIENCE_S)

        served.server.later(hold)
        finds = [Find(number, bytes(16 * 500)) for number in range(1, 9)]
        for flooder in flooders:
            flooder.say(*finds, *(Ping(number) for number in range(9, 30)))
        heavy.say(*finds)
        quiet.say(Ping(1), Ping(2))
        handled.clear()
        go.set()
        assert quiet.hear() == Pong(1)
        assert quiet.hear() == Pong(2)
        for flooder in flooders:
            for _ in range(29):
                flooder.hear()
        first = handled.index("quiet")
        assert handled[:first].count("flood") <= 5, "what had come before it was looked at"
        assert handled[first:].index("quiet", 1) <= 4
        served.until(lambda: handled.count("heavy") == 8)
        last = len(handled) - handled[::-1].index("heavy")
        assert handled[:last].count("flood") <= 6, "eight of its messages for one of the others'"


def test_everything_is_read_however_narrow_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who was told to wait for a drive is forgotten."""
    monkeypatch.setattr(Window, "bytes", property(lambda _: 4096))
    narrow = replace(PLAIN, staging_bytes=12 * 12_288)
    names = ("one", "two", "three")
    with daemon(tmp_path, {name: on_disk(tmp_path / name, narrow) for name in names}) as served:
        failures: list[str] = []

        def work(name: str, seed: int) -> None:
            pages, kv = content(BLOCKS, seed=seed), served.connect(name)
            blocks = kv.put(keys(BLOCKS), pages, durability="fast").wait().blocks
            kv.hint(ChainHint(1, blocks))
            for turn in range(12):
                with kv.demand(kv.pages(blocks, turn % LAYERS)) as ticket:
                    if not np.array_equal(np.stack(ticket.views()), pages[:, turn % LAYERS]):
                        failures.append(name)

        threads = [
            threading.Thread(target=work, args=(name, seed)) for seed, name in enumerate(names)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert failures == []
        gates = [served.server.namespaces.open[name].gate for name in names]
        drives = {id(gate.drives[0]): gate.drives[0] for gate in gates if gate is not None}
        assert len(drives) == 1, "their stores are on one file system"
        (drive,) = drives.values()
        assert drive.shares.refused > 0
        namespaces = served.server.namespaces
        heavier = replace(namespaces.settings["one"], weight=5)
        served.server.later(lambda: namespaces.configure({**namespaces.settings, "one": heavier}))
        served.settle()
        weights = [drive.shares._flows[gate].weight for gate in gates if gate is not None]
        assert weights == [5, 1, 1], "as soon as the configuration says so"
        served.until(lambda: drive.shares.in_flight == 0)


def test_a_long_find_is_looked_up_in_turns(tmp_path: Path) -> None:
    small = replace(PLAIN, staging_bytes=1 << 16)
    settings = NamespaceSettings(None, uniform(1, 512), 4096, options=small)
    with daemon(tmp_path, {"long": settings, "quiet": space()}) as served:
        kv = served.connect("long")
        kv.put(keys(4096), np.zeros((4096, 1, 512), np.uint8)).wait()
        turns: list[int] = []
        plain = served.runtime("long").find
        served.runtime("long").find = lambda keys: (turns.append(len(keys)), plain(keys))[1]  # type: ignore[method-assign,func-returns-value]
        found = kv.find(keys(4096))
        assert found.blocks.tolist() == kv.find(keys(4096)).blocks.tolist()
        assert len(np.unique(found.blocks)) == 4096
        assert turns == [1024] * 8
        turns.clear()
        broken = [*keys(1500), *keys(1, 1 << 40), *keys(2000)]
        assert len(kv.find(broken)) == 1500
        assert turns == [1024, 1024], "what follows an unknown key is not looked up"


# --- bounds ---


def test_staging_of_all_namespaces_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    memory = Memory(8_000_000)
    with daemon(
        tmp_path, made_in=tmp_path / "made", template=PLAIN, staging_max=50_000, memory=memory
    ) as served:
        assert served.connect("default").slots == 24
        before = memory.taken_bytes
        small = served.connect("small", layout=layout(), blocks=BLOCKS)
        assert small.slots == 4, "50,000 bytes hold so many"
        assert before < memory.taken_bytes < memory.most_bytes
        memory.most_bytes = memory.taken_bytes + 1000
        with pytest.raises(SidecarError, match=r"takes \d+ .* taken, by 2 namespaces: lower"):
            served.connect("third", layout=layout(), blocks=BLOCKS)
        memory.most_bytes = 8_000_000
        assert served.connect("third", layout=layout(), blocks=BLOCKS).slots == 4
    assert memory.taken_bytes == 0


def test_write_arenas_of_one_namespace_are_bounded(tmp_path: Path) -> None:
    limits = ServerLimits(write_bytes=4 * EXTENT)
    with daemon(tmp_path, {"one": space(), "other": space()}, limits) as served:
        sizes = [served.connect("one", write_bytes=1 << 30)._line.link for _ in range(18)]
        given = [link.attachment.welcome.write_bytes for link in sizes if link is not None]
        assert given == [4 * EXTENT] * 16 + [2 * EXTENT] * 2
        link = served.connect("other", write_bytes=1 << 30)._line.link
        assert link is not None
        assert link.attachment.welcome.write_bytes == 4 * EXTENT
        for client in served.clients:
            client.close()
        served.until(lambda: served.server.namespaces.open["one"].write_bytes == 0)


# --- nothing to be had of another ---


def test_numbers_of_another_lead_nowhere(tmp_path: Path) -> None:
    with daemon(tmp_path, {"mine": space(), "theirs": space()}) as served:
        kv, mate = served.connect("mine"), served.connect("mine")
        mine = kv.put(keys(2), content(2)).wait()
        ticket = kv.demand(kv.pages(mine.blocks, 0), request=7).wait()
        pages = raw_of(kv.pages(mine.blocks, 0), np.int64)
        stamps = raw_of(kv.find(keys(2)).stamps, np.int64)
        tickets = raw_of(np.arange(64), np.int64)
        for name in ("theirs", "mine"):
            other = Raw(served, name)
            other.say(Release(tickets), Ping(1))
            assert other.hear() == Pong(1)
        mate.hint(DoneHint(7, "", None, mine.blocks))
        assert pinned(served.runtime("mine")) == 2, "its tickets are not others' to release"
        thief = Raw(served, "theirs")
        thief.say(Demand(1, pages), Demand(2, pages, stamps=stamps), Find(3, b"".join(keys(2))))
        replies = {reply.id: reply for reply in (thief.hear() for _ in range(3))}
        for place in (1, 2):
            assert (np.frombuffer(replies[place].slots, np.int64) == -1).all()
        assert replies[3].blocks == b""
        assert np.array_equal(np.stack(ticket.views()), content(2)[:, 0])
        assert served.runtime("theirs").stats().bytes_read == 0, "nothing was looked for"


def test_keys_are_salted_and_stores_are_their_namespaces(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with daemon(tmp_path, {"a": on_disk(path, salt=b"one")}) as served:
        kv = served.connect("a")
        kv.put(keys(2, 1), content(2)).wait()
        assert not kv.grow().seal(keys(1, 3)[0]).wait().failures
        assert len(kv.lookup(keys(3, 1))) == 3
        table = served.runtime("a")._parts.catalog.table["key"]
        stored = {bytes(key) for key in table}
        assert not stored & set(keys(3, 1))
        assert {blake2b(key, digest_size=16, key=b"one").digest() for key in keys(3, 1)} <= stored
    for name, salt, found in (("a", b"two", 0), ("a", b"", 0), ("b", b"one", 0), ("a", b"one", 3)):
        with daemon(tmp_path, {name: on_disk(path, salt=salt)}) as served:
            kv = served.connect(name)
            blocks = kv.lookup(keys(3, 1))
            assert len(blocks) == found, (name, salt)
            with kv.demand(kv.pages(np.arange(3), 0)) as ticket:
                assert ticket.missing.all() == (name == "b")


# --- erasing ---


def test_a_namespace_is_erased_while_others_are_served(tmp_path: Path) -> None:
    spaces = {name: on_disk(tmp_path / name) for name in ("gone", "stays")}
    pages = content(BLOCKS)
    with daemon(tmp_path, spaces) as served:
        kv, other = served.connect("gone"), served.connect("stays")
        theirs = other.put(keys(2), content(2, seed=9)).wait().blocks
        gone, stays = (served.server.namespaces.open[name].gate for name in ("gone", "stays"))
        held = other.demand(other.pages(theirs, 0)).wait()
        blocks = kv.put(keys(BLOCKS), pages).wait().blocks
        found = kv.find(keys(BLOCKS))
        ticket = kv.demand(kv.pages(blocks, 0)).wait()
        (file,) = [one for one in (tmp_path / "gone").iterdir() if one.stat().st_size > 1 << 17]
        os.link(file, tmp_path / "kept")
        assert pages[0, 0].tobytes() in file.read_bytes()
        arguments = ["namespace", "erase", "gone", "--connect", served.address, "--overwrite"]
        assert CliRunner().invoke(app, arguments).exit_code != 0, "not without --yes"
        said = CliRunner().invoke(app, [*arguments, "--yes", "--json"])
        assert said.exit_code == 0, said.output
        told = json.loads(said.stdout)
        assert told == {
            "erased": "gone",
            "blocks": BLOCKS,
            "bytes": file.stat().st_size,
            "overwritten": True,
        }
        assert not np.frombuffer((tmp_path / "kept").read_bytes(), np.uint8).any()
        assert pages[0, 0].tobytes() not in file.read_bytes()
        kv.lookup(keys(1))
        assert kv.wait_until_back(PATIENCE_S)
        assert kv.lookup(keys(BLOCKS)).tolist() == []
        assert not ticket.valid  # type: ignore[attr-defined]
        with kv.demand(kv.pages(blocks, 0), stamps=found.stamps) as again:
            assert again.missing.all()
        fresh = kv.put(keys(1), content(1, seed=3)).wait().blocks
        with kv.demand(kv.pages(fresh, 1)) as new:
            assert np.array_equal(new.view(0), content(1, seed=3)[0, 1])
        assert held.valid, "the other tenant has noticed nothing"  # type: ignore[attr-defined]
        assert np.array_equal(held.view(0), content(2, seed=9)[0, 0])
        assert other.away is None or other.away == ""
        assert stays is not None
        assert gone not in stays.drives[0].gates, "the drive has one store less, then the new one"
        assert len(stays.drives[0].gates) == 2
        with pytest.raises(SidecarError, match="not there, or not for uid"):
            CliRunner().invoke(
                app,
                ["namespace", "erase", "absent", "--yes", "--connect", served.address],
                catch_exceptions=False,
            )


def test_who_may_erase() -> None:
    settings = space(uids=frozenset([7, 8]), erasers=frozenset([8]), token="t")
    namespaces = Namespaces({"a": settings}, own_uid=5)

    def may(uid: int, token: str = "", name: str = "a") -> str:
        hello = hello_for(name, token, None, None, 0)
        try:
            namespaces.settings_to_erase(hello, Peer(1, uid, frozenset()))
        except DeniedError as error:
            return str(error).replace(f"uid {uid}", "UID").replace(repr(name), "NAME")
        return ""

    assert may(5) == may(0) == may(8, "t") == ""
    refusals = {may(7, "t"), may(8), may(9), may(5, name="absent"), may(0, name="absent")}
    assert len(refusals) == 1, "whoever may not is not told whether it is there"
    assert "" not in refusals


def test_a_namespace_that_cannot_be_erased_says_why_and_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from prefetchd.sidecar import erasure

    def fails(*_: Any, **__: Any) -> int:
        raise StoreError("the drive is gone")

    monkeypatch.setattr(erasure, "_anew", fails)
    with daemon(tmp_path, {"a": on_disk(tmp_path / "a"), "b": in_space()}) as served:
        with pytest.raises(SidecarError, match="could not be erased: the drive is gone"):
            CliRunner().invoke(
                app,
                ["namespace", "erase", "a", "--yes", "--connect", served.address],
                catch_exceptions=False,
            )
        assert "namespace a cannot be erased: the drive is gone" in caplog.text
        assert "Traceback" not in caplog.text
        assert served.connect("b").lookup(keys(1)).tolist() == []
        assert served.connect("a").slots == 24, "it is opened again when it is asked for"


def erase(served: Daemon, name: str) -> None:
    arguments = ["namespace", "erase", name, "--yes", "--connect", served.address]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0


def test_what_is_erased_is_what_is_open_whatever_the_configuration_says_by_now(
    tmp_path: Path,
) -> None:
    """Another path and another key need a restart."""
    pages = content(2)
    with daemon(tmp_path, {"b": on_disk(tmp_path / "other")}) as served:
        served.connect("b").put(keys(2), pages).wait()
    with daemon(tmp_path, {"a": on_disk(tmp_path / "a")}) as served:
        served.connect("a").put(keys(2), pages).wait()
        hidden = replace(PLAIN, key_file=tmp_path / "no.key", drain=(str(tmp_path / "x"),))
        moved = on_disk(tmp_path / "other", hidden, salt=b"s", token="t")
        served.server.later(lambda: served.server.namespaces.configure({"a": moved}))
        served.settle()
        erase(served, "a")
        assert served.connect("a", token="t").lookup(keys(2)).tolist() == []
        again = served.server.namespaces.open["a"].settings
        assert (again.path, again.salt, again.options.key_file) == (tmp_path / "a", b"", None)
    with daemon(tmp_path, {"b": on_disk(tmp_path / "other")}) as served:
        assert len(served.connect("b").lookup(keys(2))) == 2
    for file in (tmp_path / "a").iterdir():
        assert pages[0, 0].tobytes() not in file.read_bytes()


def test_a_namespace_that_was_taken_out_is_nobodys_to_make_or_erase(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    options: dict[str, Any] = {"made_in": tmp_path / "made", "template": PLAIN}
    with daemon(tmp_path, {"a": space(token="t")}, **options) as served:
        served.connect("a", token="t")
        served.server.later(lambda: served.server.namespaces.configure({}))
        served.settle()
        for token in ("", "t"):
            with pytest.raises(SidecarError, match="is not there, or not for uid"):
                served.connect("a", token=token)
        with pytest.raises(SidecarError, match="is not there, or not for uid"):
            erase(served, "a")
        made = served.connect("made", layout=layout(), blocks=BLOCKS)
        assert made.lookup(keys(1)).tolist() == []
        assert list(served.server.namespaces.settings) == ["made"]
