"""Pages in a buffer of the caller's, whoever brings them: one contract, and what a daemon owes."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from prefetchd import Client, PageMissing, Runtime, connect
from prefetchd.devices.host import Host
from prefetchd.gpu import GpuError
from prefetchd.sidecar.conversation import release_frame
from prefetchd.sidecar.greeting import ServerLimits
from prefetchd.sidecar.protocol import Message, Push, Share, Unshare
from prefetchd.sidecar.replies import Error, Limits, Pong, Reply
from prefetchd.sidecar.wire import frame
from tests.fake_cupy import FakeGpu
from tests.pushes_bench import WAYS, Served, opened, served
from tests.real_gpu import needs_gpu
from tests.runtime_bench import BLOCKS, LAYERS, PAGE_BYTES, content, keys, pinned
from tests.sidecar_bench import PATIENCE_S, Process

PAGES = content(BLOCKS)
GPU = "0000:65:00.0 " + b"one".hex()


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of allocations, in whatever thread they are asked for; no GPU's driver is here to tell."""
    monkeypatch.setattr("prefetchd.cuda_sharing.allocation", FakeGpu.allocation)


@pytest.fixture(params=WAYS)
def kv(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runtime | Client]:
    with opened(request.param, tmp_path) as kv:
        kv.put(keys(BLOCKS), PAGES).wait()
        yield kv


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as at:
        yield at


def rows(kv: Runtime | Client, buffer: object, count: int) -> NDArray[np.uint8]:
    return kv.peek(buffer, count, PAGE_BYTES)


class TestContract:
    """For each way alike."""

    def test_pages_come_to_the_rows_that_were_asked_for(self, kv: Runtime | Client) -> None:
        buffer = kv.buffer(6)
        expected = np.zeros((6, PAGE_BYTES), np.uint8)
        assert np.array_equal(rows(kv, buffer, 6), expected)
        blocks = np.array([5, 1, 3])
        with kv.demand(kv.pages(blocks, 1)) as ticket:
            push = ticket.push(buffer, 2)
            push.wait()
            assert push.done()
            assert push.sources_free()
            push.order(None if "host" in kv.stats().gpu else 1)
        expected[2:5] = PAGES[blocks, 1]
        assert np.array_equal(rows(kv, buffer, 6), expected)
        with kv.demand(kv.pages(blocks[:2], 2)) as ticket:
            ticket.push(buffer[1:5], 2).wait()  # part of a buffer is one
        expected[3:5] = PAGES[blocks[:2], 2]
        assert np.array_equal(rows(kv, buffer, 6), expected)

    def test_missing_pages_are_never_written(self, kv: Runtime | Client) -> None:
        found = kv.find(keys(3))
        stamps = found.stamps.copy()
        stamps[1] += 1
        buffer = kv.buffer(3)
        with kv.demand(kv.pages(found.blocks, 0), stamps=stamps) as ticket:
            with pytest.raises(PageMissing, match="1 of 3"):
                ticket.push(buffer)
            assert not rows(kv, buffer, 3).any()
            ticket.push(buffer, 1, skip_missing=True).wait()
        assert np.array_equal(rows(kv, buffer, 3)[1:], PAGES[[0, 2], 0])
        assert not rows(kv, buffer, 3)[0].any()

    def test_what_makes_no_sense_moves_nothing(self, kv: Runtime | Client) -> None:
        buffer = kv.buffer(3)
        ticket = kv.demand(kv.pages(np.arange(2), 0))
        for start in (-1, 2):
            with pytest.raises(ValueError, match="not inside"):
                ticket.push(buffer, start)
        with pytest.raises(ValueError, match="destination"):
            ticket.push(bytearray(3 * PAGE_BYTES))
        ticket.release()
        with pytest.raises(ValueError, match="released"):
            ticket.push(buffer)
        assert not rows(kv, buffer, 3).any()
        with kv.demand(np.empty(0, np.int64)) as ticket:
            ticket.push(kv.buffer(0)).wait()

    def test_many_at_once_end_as_if_one_after_the_other(self, kv: Runtime | Client) -> None:
        random, buffer = np.random.default_rng(5), kv.buffer(12)
        expected = np.zeros((12, PAGE_BYTES), np.uint8)
        for _ in range(100):
            blocks = random.permutation(BLOCKS)[: random.integers(1, 5)]
            layer, start = int(random.integers(LAYERS)), int(random.integers(12 - len(blocks)))
            with kv.demand(kv.pages(blocks, layer)) as ticket:
                ticket.push(buffer, start)
            expected[start : start + len(blocks)] = PAGES[blocks, layer]
        assert np.array_equal(rows(kv, buffer, 12), expected)


class TestWhoPushes:
    def test_the_daemon_where_both_have_the_same_gpu(self, at: Served) -> None:
        kv = filled(at.connect())
        buffer = kv.buffer(1)
        push_one(kv, buffer)
        assert (at.at_daemon.launches, at.at_client.launches) == (1, 0)
        assert kv.notes == tuple(at.daemon.runtime().notes)
        assert "the daemon's Fake GPU" in kv.stats().gpu

    @pytest.mark.parametrize("way", ["sidecar, cuda at the client", "sidecar, host"])
    def test_the_client_where_the_daemon_has_none(self, way: str, tmp_path: Path) -> None:
        with opened(way, tmp_path) as kv:
            push_one(filled(kv), kv.buffer(1))
            told = [note for note in kv.notes if "does not push into GPU buffers" in note]
            assert len(told) == ("client" in way)
            assert all("gpu = 'host'" in note for note in told)
            assert "the daemon's" not in kv.stats().gpu

    def test_the_client_where_its_gpu_is_another(self, tmp_path: Path) -> None:
        with served(tmp_path, uuid=b"two") as at:
            kv = filled(at.connect())
            push_one(kv, kv.buffer(1))
            assert (at.at_daemon.launches, at.at_client.launches) == (0, 1)
            assert b"two".hex() in kv.notes[-1]
            assert at.at_client.flags == [11]  # the arena is registered as read-only

    def test_a_read_only_arena_that_cannot_be_registered_is_said(self, tmp_path: Path) -> None:
        with served(tmp_path, uuid=b"two") as at:
            at.at_client.read_only_status = 801
            kv = filled(at.connect())
            push_one(kv, kv.buffer(1))
            assert any("cudaErrorNotSupported" in note for note in kv.notes)
            assert "one host gather and one copy" in kv.stats().gpu

    def test_the_client_where_its_memory_cannot_be_exported(self, at: Served) -> None:
        at.at_client.handle_status = 801
        kv = filled(at.connect())
        push_one(kv, kv.buffer(1))
        assert (at.at_daemon.launches, at.at_client.launches) == (0, 1)
        assert "cudaErrorNotSupported" in kv.notes[-1]

    def test_the_client_goes_on_when_a_push_of_the_daemon_fails(self, at: Served) -> None:
        kv = filled(at.connect())
        buffer = kv.buffer(2)
        at.at_daemon.launch_error = "CUDA_ERROR_ILLEGAL_ADDRESS"
        with kv.demand(kv.pages(np.arange(1), 0)) as ticket:
            push = ticket.push(buffer)
            with pytest.raises(GpuError, match=r"ILLEGAL_ADDRESS.*recompute"):
                push.wait()
        push_one(kv, buffer)
        assert at.at_client.launches == 1
        assert "ILLEGAL_ADDRESS" in kv.notes[-1]
        at.daemon.until(lambda: pins(at) == 0)


class TestTime:
    def test_a_push_is_done_when_the_pages_are_there(self, at: Served) -> None:
        kv = filled(at.connect())
        buffer = kv.buffer(1)
        at.at_daemon.may_finish.clear()
        with kv.demand(kv.pages(np.arange(1), 0)) as ticket:
            push = ticket.push(buffer)
            assert at.at_daemon.waited_for.wait(PATIENCE_S)
            kv.stats()  # the daemon answers others meanwhile, in its turn
            assert not push.done()
            assert not push.sources_free()
            at.at_daemon.may_finish.set()
            push.order(0)
            assert np.array_equal(rows(kv, buffer, 1), PAGES[:1, 0])

    def test_the_daemon_has_two_under_way_and_goes_on_with_the_rest(self, at: Served) -> None:
        kv = filled(at.connect())
        buffer = kv.buffer(4)
        at.at_daemon.may_finish.clear()
        with kv.demand(kv.pages(np.arange(1), 0)) as ticket:
            pushes = [ticket.push(buffer, start) for start in range(4)]
            at.daemon.until(lambda: at.at_daemon.launches == 2)
            kv.stats()
            assert at.at_daemon.launches == 2
            at.at_daemon.may_finish.set()
            for push in pushes[::-1]:
                push.wait()
        assert np.array_equal(rows(kv, buffer, 4), np.repeat(PAGES[:1, 0], 4, axis=0))

    @pytest.mark.parametrize("ends", ["release", "connection", "unshare"])
    def test_pins_and_mapping_stay_until_a_push_has_ended(self, at: Served, ends: str) -> None:
        """Whatever a client does that does not keep to the rules."""
        kv = filled(at.connect())
        buffer = kv.buffer(2)
        at.at_daemon.may_finish.clear()
        ticket = kv.demand(kv.pages(np.arange(2), 0)).wait()
        ticket.push(buffer)
        assert at.at_daemon.waited_for.wait(PATIENCE_S)
        link = kv._line.link
        assert link is not None
        if ends == "release":
            kv._line.send(link, release_frame([ticket.number]))
        elif ends == "unshare":
            kv._line.send(link, frame(Unshare(1000, kv._buffers._buffers[0].number)))
        else:
            link.hang_up()
        at.daemon.settle()
        assert pins(at) == 2
        assert len(at.at_daemon.borrowed) == 1
        at.at_daemon.may_finish.set()
        if ends == "release":
            at.daemon.until(lambda: pins(at) == 0)
        else:
            at.daemon.until(lambda: not at.at_daemon.borrowed)
        assert kv.wait_until_back(PATIENCE_S)
        assert np.array_equal(at.at_client.cupy.asnumpy(buffer)[:, :PAGE_BYTES], PAGES[:2, 0])

    def test_a_buffer_is_lent_anew_when_the_daemon_is_back(self, at: Served) -> None:
        kv = filled(at.connect())
        buffer = kv.buffer(1)
        for _ in range(3):
            assert kv._line.link is not None
            arena = weakref.ref(kv._line.link.attachment)
            kv._line.link.hang_up()
            assert kv.lookup(keys(1)).tolist() in ([], [0])
            assert kv.wait_until_back(PATIENCE_S)
            # Whoever has a buffer does not keep it; the thread that attached may, for a moment.
            at.daemon.until(lambda seen=arena: gc.collect() >= 0 and seen() is None)
            push_one(kv, buffer)
            at.daemon.until(lambda: len(at.at_daemon.borrowed) == 1)
        assert at.at_client.launches == 0

    def test_whoever_attaches_again_is_on_the_same_gpu(self, at: Served) -> None:
        """Though CUDA's current GPU is a thread's own, and another thread attaches."""
        seen = list[str]()

        class Elsewhere(Host):
            def __init__(self, staging: NDArray[np.uint8], batch_slots: int) -> None:
                super().__init__(staging, batch_slots)
                seen.append("open")

            @contextmanager
            def current(self) -> Iterator[None]:
                seen.append("here")
                yield
                seen.append("left")

        kv = at.daemon.connect(gpu=Elsewhere)
        assert kv._line.link is not None
        kv._line.link.hang_up()
        kv.lookup(keys(1))
        assert kv.wait_until_back(PATIENCE_S)
        assert seen == ["open", "here", "open", "left"]

    def test_buffers_go_back_when_nobody_uses_them(self, at: Served) -> None:
        kv = filled(at.connect())
        buffer, part = kv.buffer(1), kv.buffer(4)[2:]
        gc.collect()
        push_one(kv, part)
        assert len(at.at_daemon.borrowed) == 2  # a part keeps the whole
        del part, buffer
        gc.collect()
        kv.buffer(1)
        kv.buffer(0)
        kv._line.wait(lambda: not kv._buffers._leaving)
        assert len(at.at_daemon.borrowed) <= 1
        kept = kv.buffer(1)
        push_one(kv, kept)
        kv.close()
        assert at.at_daemon.borrowed == []
        assert np.array_equal(at.at_client.cupy.asnumpy(kept)[:, :PAGE_BYTES], PAGES[:1, 0])


class TestBounds:
    def test_a_buffer_is_its_connections_own(self, at: Served) -> None:
        ours, other = filled(at.connect()), at.connect(FakeGpu())
        buffer = ours.buffer(1)
        known = ours._buffers._buffers[0]
        theirs = ask(other, Push(7, 1, known.number, 0, False))
        assert isinstance(theirs, Error)
        assert "not by this client" in theirs.words
        assert not rows(ours, buffer, 1).any()

    def test_another_clients_memory_cannot_be_lent(
        self, at: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As CUDA does, which maps the same memory once a process."""
        ours, other = at.connect(), at.connect(FakeGpu())
        ours.buffer(1)
        lent = (buffer := ours.buffer(2)) and ours._buffers._buffers[-1].lent
        at.daemon.settle()
        address = at.at_daemon.borrowed[-1]
        runtime = at.at_daemon.cupy.cuda.runtime
        monkeypatch.setattr(runtime, "ipcOpenMemHandle", lambda _: address)
        monkeypatch.setattr(runtime, "ipcCloseMemHandle", lambda _: None)
        reply = ask(other, Share(7, lent.handle, 2, GPU))
        assert isinstance(reply, Error)
        assert "another client's" in reply.words
        monkeypatch.undo()
        del buffer

    def test_a_handle_that_cannot_be_opened_is_told_in_words(self, at: Served) -> None:
        kv = at.connect()
        reply = ask(kv, Share(7, bytes(64), 2, GPU))
        assert isinstance(reply, Error)
        assert reply.code == "unable"
        assert "cannot be opened: cudaErrorInvalidValue" in reply.words
        buffer = kv.buffer(1)
        handle = kv._buffers._buffers[0].lent.handle
        reply = ask(kv, Share(8, handle, 1000, GPU))
        assert isinstance(reply, Error)
        assert "do not fit the buffer of 2097152 bytes" in reply.words
        assert len(at.at_daemon.borrowed) == 1
        del buffer

    def test_number_and_size_have_bounds(self, tmp_path: Path) -> None:
        limits = Limits(buffers=2, buffer_bytes=8 * 12_288, pushes=2)
        with served(tmp_path, ServerLimits(client=limits)) as at:
            kv = filled(at.connect())
            buffers = [kv.buffer(4), kv.buffer(5), kv.buffer(4), kv.buffer(1)]
            assert len(at.at_daemon.borrowed) == 2
            assert "at most 98304 can be" in kv.notes[-2]
            assert "2 buffers are shared" in kv.notes[-1]
            for buffer in buffers:
                push_one(kv, buffer)
            assert (at.at_daemon.launches, at.at_client.launches) == (2, 2)
            with kv.demand(kv.pages(np.arange(2), 0)) as ticket:
                pushes = [ticket.push(buffers[0], start) for start in (0, 2, 1, 0, 2)]
                pushes[-1].wait()
            assert at.at_daemon.launches == 7

    def test_nonsense_is_refused_and_nothing_moves(self, at: Served) -> None:
        kv = filled(at.connect())
        buffer = kv.buffer(2)
        number = kv._buffers._buffers[0].number
        ticket = kv.demand(kv.pages(np.arange(2), 0)).wait()
        asked = {
            "not open": Push(1001, 999, number, 0),
            "is not shared": Push(1002, ticket.number, 999, 0),
            "not inside": Push(1003, ticket.number, number, 1),
            "not shared, or not by": Unshare(1004, 999),
            "shared already": Share(number, bytes(64), 1, GPU),
            "no pages": Share(1005, bytes(64), 0, GPU),
            "is on GPU 'other'": Share(1006, bytes(64), 1, "other"),
            "bytes of buffers would": Share(1007, bytes(64), 2**62, GPU),
        }
        for words, message in asked.items():
            reply = ask(kv, message)
            assert isinstance(reply, Error)
            assert words in reply.words
        assert not rows(kv, buffer, 2).any()
        assert isinstance(ask(kv, Unshare(1008, number)), Pong)
        ticket.release()


CLIENT = """
import sys
import numpy as np
import prefetchd
from tests.fake_cupy import FakeGpu
from tests.pushes_bench import cuda_on
gpu = FakeGpu()
with prefetchd.connect(sys.argv[1], gpu=cuda_on(gpu)) as kv:
    buffer = kv.buffer(2)
    with kv.demand(kv.pages(np.array([4, 2]), 1)) as ticket:
        ticket.push(buffer).wait()
    assert gpu.launches == 0, kv.notes
    sys.stdout.buffer.write(gpu.cupy.asnumpy(buffer).tobytes())
"""


def test_into_the_memory_of_another_process(at: Served) -> None:
    kv = filled(at.connect())
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, at.daemon.address], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    found = np.frombuffer(done.stdout, np.uint8).reshape(2, kv.slot_bytes)
    assert np.array_equal(found[:, :PAGE_BYTES], PAGES[[4, 2], 1])
    at.daemon.until(lambda: not at.at_daemon.borrowed)


CONFIG = """
[namespaces.default]
store = "{folder}/store"
layers = {layers}
page_bytes = "12KiB"
blocks = {blocks}
fill = false
gpu = "cuda"
"""


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_a_daemon_writes_this_process_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.undo()  # the driver tells sizes here
        config = tmp_path / "prefetchd.toml"
        config.write_text(CONFIG.format(folder=tmp_path, layers=LAYERS, blocks=BLOCKS))
        with (
            Process(tmp_path, "--config", str(config)) as process,
            connect(process.address, gpu="cuda") as client,
        ):
            kv = filled(client)
            buffer = kv.buffer(4)
            with kv.demand(kv.pages(np.array([4, 2]), 1)) as ticket:
                ticket.push(buffer, 1).wait()
            assert np.array_equal(rows(kv, buffer, 3)[1:], PAGES[[4, 2], 1])
            assert "the daemon's" in kv.stats().gpu, kv.notes


def filled(kv: Client | Runtime) -> Client:
    kv.put(keys(BLOCKS), PAGES).wait()
    assert isinstance(kv, Client)
    return kv


def push_one(kv: Client, buffer: object) -> None:
    with kv.demand(kv.pages(np.arange(1), 0)) as ticket:
        ticket.push(buffer).wait()
    assert np.array_equal(rows(kv, buffer, 1), PAGES[:1, 0])


def pins(at: Served) -> int:
    return pinned(at.daemon.runtime())


def ask(kv: Client, message: Message) -> Reply:
    """What the daemon answers to a message that this client would not send."""
    link, replies, number = kv._line.link, list[Reply](), message.id  # type: ignore[attr-defined]
    assert link is not None
    kv._line.ask(link, number, frame(message), replies.append, 10**10)
    kv._line.wait(lambda: bool(replies))
    return replies[0]
