"""The daemon: pages read in place, tenants kept apart, what a client holds ends with it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefetchd
from prefetchd import Client, SidecarError, uniform
from prefetchd.sidecar import connection, notices
from prefetchd.sidecar.arena import StagingArena, make_for_client
from prefetchd.sidecar.greeting import ServerLimits
from prefetchd.sidecar.handshake import hello_for
from prefetchd.sidecar.namespace import NamespaceSettings
from prefetchd.sidecar.place import Place, PlaceError
from prefetchd.sidecar.protocol import Ping
from prefetchd.sidecar.regions import Regions
from prefetchd.sidecar.replies import Limits, Pong
from prefetchd.sidecar.session import Session
from prefetchd.sidecar.wire import Frames, frame, reply_of
from tests.runtime_bench import BLOCKS, LAYERS, PAGE_BYTES, PLAIN, content, keys, layout, pinned
from tests.sidecar_bench import PATIENCE_S, Daemon, daemon, in_space, space

_libc = ctypes.CDLL(None, use_errno=True)


def staging_of(client: Client) -> Any:
    link = client._line.link
    assert link is not None
    return link.attachment.staging


# --- memory ---


def test_pages_are_read_in_place(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        blocks = kv.put(keys(1), content(1)).blocks
        with kv.demand(kv.pages(blocks, 0)) as ticket:
            view = ticket.view(0)
            assert np.shares_memory(view, staging_of(kv))
            theirs = served.runtime()._parts.staging
            assert not np.shares_memory(view, theirs), "another mapping, of the same memory"
            before = view[0]
            theirs[ticket.slots[0], 0] = before ^ 255
            assert view[0] == before ^ 255


def test_a_client_cannot_write_into_staging(tmp_path: Path) -> None:
    arena = StagingArena("x")
    mine = arena(8192, 4096)
    mine[:] = 7
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, 8192)
    reopened = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR)
    for write in (
        lambda: mmap.mmap(reopened, 8192),
        lambda: os.pwrite(reopened, b"x", 0),
        lambda: os.ftruncate(reopened, 0),
        lambda: os.ftruncate(reopened, 1 << 20),
        lambda: fcntl.fcntl(reopened, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(PermissionError):
            write()
    hole = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    assert _libc.fallocate(reopened, hole, ctypes.c_long(0), ctypes.c_long(4096)) == -1
    assert ctypes.get_errno() == errno.EPERM
    os.close(reopened)
    with mmap.mmap(arena.fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ) as readable:
        address = np.frombuffer(readable, np.uint8).ctypes.data
        both = mmap.PROT_READ | mmap.PROT_WRITE
        assert _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(8192), both) == -1
        assert ctypes.get_errno() == errno.EACCES
        mine[0] = 9
        assert readable[0] == 9, "the daemon goes on writing"
    arena.close()


def test_a_write_arena_cannot_be_pulled_from_under_the_daemon() -> None:
    fd, _ = make_for_client(8192)
    with mmap.mmap(fd, 8192) as memory:
        memory[0] = 1
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    os.close(fd)


def test_direct_reads_go_into_shared_memory(tmp_path: Path) -> None:
    settings = NamespaceSettings(
        tmp_path / "kv", layout(), BLOCKS, False, replace(PLAIN, device="uring")
    )
    pages = content(BLOCKS)
    with daemon(tmp_path, {"default": settings}) as served, served.connect() as kv:
        assert kv.stats().engine == "io_uring, fixed buffers, fixed files"
        blocks = kv.put(keys(BLOCKS), pages).blocks
        for layer in range(LAYERS):
            with kv.demand(kv.pages(blocks, layer)) as ticket:
                assert np.array_equal(np.stack(ticket.views()), pages[:, layer])
        assert kv.stats().bytes_read == BLOCKS * LAYERS * kv.slot_bytes


def test_puts_larger_than_the_write_arena_go_in_pieces(tmp_path: Path) -> None:
    pages, extent = content(BLOCKS), LAYERS * PAGE_BYTES
    with daemon(tmp_path) as served, served.connect(write_bytes=3 * extent) as kv:
        for _ in range(3):
            put = kv.put(keys(BLOCKS), pages)
        assert np.array_equal(put.blocks, kv.lookup(keys(BLOCKS)))
        with kv.demand(kv.pages(put.blocks, 2)) as ticket:
            assert np.array_equal(np.stack(ticket.views()), pages[:, 2])
    with daemon(tmp_path, {"default": in_space(evict_blocks=False)}) as served:
        kv = served.connect(write_bytes=2 * extent)
        put = kv.put(keys(BLOCKS + 2), content(BLOCKS + 2)).wait()
        assert sorted(words.split(":")[0] for words in put.failures) == [
            f"block {place} was not stored" for place in (BLOCKS, BLOCKS + 1)
        ]
        without = served.connect(write_bytes=0).put(keys(1, 50), content(1))
        assert "does not fit into a write arena of 0" in without.failures[0]


def test_regions_never_overlap() -> None:
    random = np.random.default_rng(3)
    regions, given = Regions(100), dict[int, int]()
    for _ in range(3000):
        length = int(random.integers(1, 60))
        place = regions.take(length)
        if place is None:
            assert given, "an empty arena has room"
            gone = int(random.choice(list(given)))
            regions.give_back(gone)
            del given[gone]
            continue
        assert 0 <= place <= 100 - length
        assert all(place + length <= at or at + size <= place for at, size in given.items())
        given[place] = length


# --- tenants ---


def test_tenants_neither_find_nor_read_nor_see_each_other(tmp_path: Path) -> None:
    mine, theirs = content(2), content(2, seed=2)
    with daemon(tmp_path, {"mine": space(), "theirs": space()}) as served:
        one, other = served.connect("mine"), served.connect("theirs")
        blocks = one.put(keys(2), mine).blocks
        assert other.lookup(keys(2)).tolist() == []
        with other.demand(other.pages(blocks, 0)) as ticket:
            assert ticket.missing.all()
        with one.demand(one.pages(blocks, 0)):
            assert not any((staging_of(other) == page).all(1).any() for page in mine[:, 0])
        assert other.put(keys(2), theirs).blocks.tolist() == blocks.tolist()
        with one.demand(one.pages(blocks, 0)) as ticket:
            assert np.array_equal(np.stack(ticket.views()), mine[:, 0])
        assert one.stats().blocks_visible == other.stats().blocks_visible == 2


def test_who_may_not_is_told_the_same_as_who_asks_for_nothing(tmp_path: Path) -> None:
    nobody, root_group = frozenset([12345]), frozenset(os.getgroups() or [os.getgid()])
    spaces = {
        "others": space(uids=nobody),
        "group": space(gids=root_group),
        "secret": space(token="open sesame"),
    }
    with daemon(tmp_path, spaces) as served:
        said = []
        for name in ("others", "absent", "secret"):
            with pytest.raises(SidecarError) as refusal:
                served.connect(name)
            said.append(str(refusal.value).replace(name, "NAME"))
        assert len(set(said)) == 1
        assert "not there, or not for uid" in said[0]
        assert served.connect("group").notes == ()
        assert served.connect("secret", token="open sesame").slots > 0


def test_a_namespace_is_made_when_its_own_user_asks(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    with daemon(tmp_path, made_in=tmp_path / "made", template=PLAIN, bytes_max=1 << 20) as served:
        kv = served.connect("new", layout=layout(), blocks=BLOCKS)
        blocks = kv.put(keys(2), content(2)).blocks
        assert served.connect("new").lookup(keys(2)).tolist() == blocks.tolist()
        for name, words, options in (
            ("../x", "no name for a namespace", {}),
            ("large", "more than the 1048576 bytes", {"layout": layout(), "blocks": 1000}),
            ("absent", "there is no store", {}),
            ("new", "made for another layout", {"layout": uniform(2, 512)}),
        ):
            with pytest.raises(SidecarError, match=words):
                served.connect(name, **options)
    with prefetchd.open(
        tmp_path / "made" / "new", layout(), options=replace(PLAIN, namespace="new")
    ) as again:
        assert len(again.lookup(keys(2))) == 2


# --- leases ---

CLIENT = """
import sys, prefetchd, numpy as np
kv = prefetchd.connect(sys.argv[1])
blocks = kv.lookup([number.to_bytes(16, "big") for number in range(4)])
held = [kv.demand(kv.pages(blocks, layer)) for layer in range(2)]
held[0].wait()
print(len(held[0].views()), flush=True)
sys.stdin.read()
"""


def test_what_a_killed_client_held_is_free_again(tmp_path: Path) -> None:
    options = in_space(staging_bytes=4 * PAGE_BYTES)
    with daemon(tmp_path, {"default": options}) as served, served.connect() as kv:
        blocks = kv.put(keys(4), content(4)).blocks
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, served.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"4\n"
            served.settle()
            assert pinned(served.runtime()) == 4
            waiting = kv.demand(kv.pages(blocks, 2), timeout_s=60)
            process.send_signal(signal.SIGKILL)
        assert not waiting.wait().missing.any()
        waiting.release()
        served.until(lambda: len(served.server.connections) == 1)
        served.until(lambda: pinned(served.runtime()) == 0)
        assert served.server.namespaces.open["default"].waiting == 0


def test_a_client_that_breaks_the_protocol_keeps_its_pages_until_it_is_gone(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        blocks = kv.put(keys(2), content(2)).blocks
        ticket = kv.demand(kv.pages(blocks, 0)).wait()
        link = kv._line.link
        assert link is not None
        link.sock.send(b"\xff\xff\xff\xff")
        served.until(lambda: all(one._refused for one in served.server.connections))
        assert pinned(served.runtime()) == 2, "it may be reading still"
        assert ticket.valid  # type: ignore[attr-defined]
        assert kv.lookup(keys(2)).tolist() == [], "it is told, and comes back"
        assert not ticket.valid  # type: ignore[attr-defined]
        assert ticket.missing.all()
        with pytest.raises(prefetchd.PageMissing, match="at most 2097152 are allowed"):
            ticket.views()
        assert kv.wait_until_back(PATIENCE_S)
        served.until(lambda: len(served.server.connections) == 1)
        served.until(lambda: pinned(served.runtime()) == 0)


def test_closing_lets_go_of_every_descriptor(tmp_path: Path) -> None:
    def held() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    with daemon(tmp_path) as served:
        with served.connect() as kv:
            kv.put(keys(1), content(1)).wait()
        served.clients.clear()
        del kv
        served.until(lambda: not served.server.connections)
        before = held()
        for _ in range(5):
            kv = served.connect()
            kv.demand(np.array([0])).wait()
            kv.close()
            served.clients.clear()
            del kv
        served.until(lambda: not served.server.connections)
        assert held() == before


# --- limits ---


def raw(served: Daemon, hello: bool = True) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE_S)
    sock.connect(str(served.server.place.path))
    if hello:
        sock.sendall(frame(hello_for("default", "", None, None, 0)))
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 4)
        for fd in fds:
            os.close(fd)
        assert data
    return sock


def replies(sock: socket.socket, count: int) -> list[Any]:
    frames = Frames(1 << 22)
    while len(frames.whole) < count and (data := sock.recv(1 << 16)):
        frames.feed(data)
    return [reply_of(body) for body in frames.whole]


def test_open_demands_of_one_client_are_limited(tmp_path: Path) -> None:
    limits = ServerLimits(client=Limits(tickets=2))
    with daemon(tmp_path, limits=limits) as served, served.connect(in_place=False) as kv:
        kv.put(keys(1), content(1)).wait()
        tickets = [kv.demand(np.array([page])) for page in range(2)]
        with pytest.raises(ValueError, match="2 demands are open"):
            kv.demand(np.array([2]))
        tickets[0].release()
        kv._limits = Limits()  # as a client that does not look
        with kv.demand(np.array([0])), kv.demand(np.array([1])) as refused:
            assert refused.missing.all()
            assert "the most allowed" in refused.failure  # type: ignore[attr-defined]


def test_clients_are_limited(tmp_path: Path) -> None:
    limits = ServerLimits(clients=3, clients_per_uid=2)
    with daemon(tmp_path, limits=limits) as served:
        for _ in range(2):
            served.connect()
        with pytest.raises(SidecarError, match="2 clients of uid"):
            served.connect()
        served.clients[0].close()
        served.until(lambda: len(served.server.connections) == 1)
        served.until(lambda: pinned(served.runtime()) == 0)


def test_who_says_nothing_keeps_nobody_out(tmp_path: Path) -> None:
    limits = ServerLimits(clients=2)
    with (
        daemon(tmp_path, limits=limits) as served,
        raw(served, hello=False) as one,
        raw(served, hello=False) as other,
    ):
        served.until(lambda: len(served.server.connections) == 2)
        assert served.connect().slots == 24
        assert one.recv(1) == other.recv(1) == b""


def test_a_client_that_takes_no_answers_is_not_heard_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_OUT_BYTES_MAX", 1 << 14)
    ping = frame(Ping(7))
    with daemon(tmp_path) as served, served.connect() as kv, raw(served) as sock:
        sock.setblocking(False)
        sent = 0

        def full() -> bool:
            nonlocal sent
            with suppress(BlockingIOError):
                sent += sock.send((ping * 1000)[sent % len(ping) :])
            return any(one._choked for one in served.server.connections)

        served.until(full)
        (choked,) = [one for one in served.server.connections if one._choked]
        assert len(choked._out) < 1 << 15
        assert kv.lookup(keys(1)).tolist() == []
        sock.setblocking(True)
        assert replies(sock, sent // len(ping))[-1] == Pong(7)


def test_a_fault_that_one_client_meets_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fault(*_: Any) -> None:
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(Session, "_ping", fault)
    with daemon(tmp_path) as served, served.connect() as kv:
        with raw(served) as sock:
            sock.sendall(frame(Ping(1)))
            (told,) = replies(sock, 1)
            assert (told.id, told.words) == (0, "the daemon has a fault; its log says more")
        served.server.later(fault)
        assert len(kv.put(keys(1), content(1)).blocks) == 1
        served.until(lambda: len(served.server.connections) == 1)
        served.until(lambda: pinned(served.runtime()) == 0)


def test_without_descriptors_nobody_is_taken_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Poor:
        """A listener whose process has no descriptor left, for once."""

        def __init__(self, listener: socket.socket) -> None:
            self._listener = listener
            self.poor = False

        def accept(self) -> Any:
            if self.poor:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return self._listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._listener, name)

    with daemon(tmp_path) as served, served.connect() as kv, served.connect() as other:
        listener = Poor(served.server.place.listener)
        served.server.place.listener = listener  # type: ignore[assignment]
        listener.poor = True
        with pytest.raises(SidecarError, match="no daemon answers"):
            served.connect(timeout_s=0.2)
        assert kv.lookup(keys(1)).tolist() == []
        listener.poor = False
        other.close()
        assert served.connect(timeout_s=PATIENCE_S).slots == 24


# --- the socket ---


def test_a_dead_daemons_socket_is_replaced_and_a_living_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    place = Place(path, 0o660)
    assert path.stat().st_mode & 0o777 == 0o660
    with pytest.raises(PlaceError, match=f"is served by process {os.getpid()}"):
        Place(path)
    place.close()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(PlaceError, match="is there and is no socket"):
        Place(path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(PlaceError, match="another program"):
            Place(path)
    with pytest.raises(PlaceError, match="over 107 bytes"):
        Place(tmp_path / ("x" * 120))


class CountingSocket:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.sent: list[bytes] = []

    def send(self, data: bytes, flags: int = 0) -> int:
        self.sent.append(bytes(data))
        return self._sock.send(data, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_releases_go_with_the_next_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "WAIT_S", 30.0)
    with daemon(tmp_path) as served, served.connect(in_place=False) as kv:
        pages = kv.pages(kv.put(keys(4), content(4)).blocks, 1)
        link = kv._link()
        assert link is not None
        link.sock = counting = CountingSocket(link.sock)  # type: ignore[assignment]
        for _ in range(3):
            kv.demand(pages).wait().release()
        assert len(counting.sent) == 3, "a round is one system call to send, and one to receive"
        assert pinned(served.runtime()) == 4
        kv.stats()
        assert pinned(served.runtime()) == 0
        # Where nothing follows, they go by themselves, and what has gone is not sent again.
        kv.demand(pages).wait().release()
        kv._line._flush()
        assert pinned(served.runtime()) == 4, "the request before it was a moment ago"
        kv._line._flush()
        served.until(lambda: pinned(served.runtime()) == 0)
        sent = len(counting.sent)
        kv._line._flush()
        assert len(counting.sent) == sent
