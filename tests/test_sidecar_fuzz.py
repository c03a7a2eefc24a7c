"""Whatever comes over the socket: an answer, an error or an end; and the others go on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefetchd import Client, connect
from prefetchd.cuda_sharing import gpu_identity, lend
from prefetchd.sidecar import replies
from prefetchd.sidecar.handshake import hello_for
from prefetchd.sidecar.protocol import (
    Advise,
    AskStats,
    Demand,
    Drop,
    Find,
    Grow,
    Hello,
    HintChain,
    HintDone,
    HintPages,
    Ping,
    Push,
    Put,
    Release,
    Request,
    Seal,
    Share,
    Unshare,
    Used,
    Write,
)
from prefetchd.sidecar.wire import Frames, ProtocolError, frame, reply_of, request_of
from tests.fake_cupy import FakeGpu, asnumpy, faked
from tests.pushes_bench import cuda_on
from tests.runtime_bench import BLOCKS, LAYERS, PAGE_BYTES, content, keys, pinned
from tests.sidecar_bench import PATIENCE_S, Daemon, daemon, in_space

LENDER, LENT_PAGES = FakeGpu(), 3
with faked(LENDER):
    LENT_BUFFER, LENT = lend(LENDER.cupy, LENT_PAGES, PAGE_BYTES)
LENT_NUMBER = 2**61 + 12345  # which no request invents
HANDLE, GPU = LENT.handle, gpu_identity(LENDER.cupy.cuda.runtime, 0)
NUMBERS = st.one_of(st.integers(0, 8), st.integers(0, 2**63 - 1))
IDS = st.lists(
    st.one_of(st.integers(-2, BLOCKS * LAYERS + 2), st.integers(-(2**63), 2**63 - 1)), max_size=9
).map(lambda ids: np.array(ids, np.int64).tobytes())
RAW = st.one_of(IDS, st.binary(max_size=64))
FLOATS = st.lists(st.floats(width=32), max_size=9).map(lambda x: np.array(x, np.float32).tobytes())
KEYS = st.one_of(
    st.lists(st.sampled_from(keys(12)), max_size=4).map(b"".join), st.binary(max_size=40)
)
TIMES = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))
STREAMS = st.integers(-(2**63), 2**63 - 1)
REQUESTS = st.one_of(
    st.builds(Find, NUMBERS, KEYS),
    st.builds(
        Demand,
        NUMBERS,
        RAW,
        st.one_of(st.just(0), st.integers(-1, 10**7)),
        st.one_of(st.none(), RAW),
        st.one_of(st.none(), FLOATS),
        STREAMS,
    ),
    st.builds(Release, IDS),
    st.builds(
        Put,
        NUMBERS,
        KEYS,
        NUMBERS,
        st.one_of(st.none(), st.binary(max_size=50), st.just(content(1).tobytes())),
        st.sampled_from(["durable", "fast", "", "x"]),
        st.one_of(st.none(), st.floats()),
    ),
    st.builds(HintPages, RAW, st.one_of(FLOATS, RAW)),
    st.builds(HintChain, STREAMS, RAW, TIMES),
    st.builds(HintDone, STREAMS, st.text(max_size=9), TIMES, RAW),
    st.builds(AskStats, NUMBERS),
    st.builds(Ping, NUMBERS),
    st.builds(Advise, NUMBERS, RAW, st.floats(), NUMBERS, st.one_of(st.none(), st.floats())),
    st.builds(Grow, NUMBERS, STREAMS),
    st.builds(Write, NUMBERS, st.integers(0, BLOCKS), NUMBERS, NUMBERS, st.binary(max_size=40)),
    st.builds(
        Seal,
        NUMBERS,
        st.integers(0, BLOCKS),
        st.sampled_from(keys(12)),
        st.sampled_from(["durable", "fast", ""]),
        st.one_of(st.none(), st.floats()),
    ),
    st.builds(Drop, st.integers(0, BLOCKS)),
    st.builds(Hello, NUMBERS, st.text(max_size=9)),
    st.builds(
        Share,
        NUMBERS,
        st.one_of(st.just(HANDLE), st.binary(min_size=64, max_size=64)),
        st.one_of(st.integers(0, 3), NUMBERS),
        st.sampled_from([GPU, ""]),
    ),
    st.builds(Push, NUMBERS, NUMBERS, NUMBERS, st.integers(0, 4), st.booleans()),
    st.builds(Unshare, NUMBERS, NUMBERS),
    st.builds(Used, st.one_of(IDS, RAW), RAW, RAW, st.one_of(st.none(), FLOATS)),
)


class Bench:
    """A daemon that is never restarted, a client that has to be served all the while, and a
    socket for the attacker."""

    def __init__(self, served: Daemon, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.served = served
        self.good: Client = served.connect()
        self.pages = content(4)
        self.blocks = self.good.put(keys(4), self.pages).blocks
        self.frame = frame(hello_for("default", "", None, None, 1 << 16))

    def attack(self, data: bytes, *, greeted: bool) -> list[Any]:
        """What is answered until the daemon ends it, or has nothing more to say."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE_S)
        sock.connect(str(self.served.server.place.path))
        frames = Frames(1 << 22)
        try:
            if greeted:
                sock.sendall(self.frame)
                welcome, fds, _, _ = socket.recv_fds(sock, 1 << 16, 4)
                frames.feed(welcome)
                for fd in fds:
                    os.close(fd)
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(1 << 16):
                frames.feed(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the daemon has heard enough
        finally:
            sock.close()
        return [reply_of(body) for body in frames.whole]

    def check(self) -> None:
        """The good client is served, and nothing of the others' is left."""
        self.served.until(lambda: len(self.served.server.connections) == 1)
        self.served.until(lambda: pinned(self.served.runtime()) == 0)
        self.served.until(lambda: self.served.runtime().stats().store_writes.blocks_open == 0)
        self.served.until(lambda: not self.gpu.borrowed)
        assert self.served.server.namespaces.open["default"].waiting == 0
        with self.good.demand(self.good.pages(self.blocks, 1)) as ticket:
            # An attacker's puts may have evicted blocks; what is there is right.
            for place in np.flatnonzero(~ticket.missing).tolist():
                assert np.array_equal(ticket.view(place), self.pages[place, 1])
        assert self.good.away == ""
        self.served.settle()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    gpu = FakeGpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefetchd.cuda_sharing.allocation", FakeGpu.allocation)
        spaces = {"default": in_space(evict_blocks=False, gpu=cuda_on(gpu))}
        with daemon(folder, spaces) as served:
            yield Bench(served, gpu)
    assert gpu.use_after_free == 0


CALM = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@CALM
@given(requests=st.lists(REQUESTS, max_size=8))
def test_any_messages_are_answered_or_refused(bench: Bench, requests: list[Request]) -> None:
    answers = bench.attack(b"".join(map(frame, requests)), greeted=True)
    assert isinstance(answers[0], replies.Welcome)
    asked = {getattr(request, "id", 0) for request in requests} | {0}
    assert {getattr(answer, "id", 0) for answer in answers} <= asked
    bench.check()


@CALM
@given(data=st.binary(max_size=200), greeted=st.booleans())
def test_any_bytes_are_refused(bench: Bench, data: bytes, greeted: bool) -> None:
    bench.attack(data, greeted=greeted)
    bench.check()


def to_an_open_block(block: int) -> st.SearchStrategy[Any]:
    ats = st.one_of(st.integers(0, PAGE_BYTES), NUMBERS)
    levels = st.sampled_from(["durable", "fast", ""])
    return st.one_of(
        st.builds(Write, NUMBERS, st.just(block), st.integers(0, LAYERS), ats, st.binary()),
        st.builds(Seal, NUMBERS, st.just(block), st.sampled_from(keys(12)), levels),
        st.builds(Drop, st.just(block)),
        REQUESTS,
    )


@settings(CALM, max_examples=50)
@given(data=st.data())
def test_an_open_block_takes_any_messages_in_any_order(data: st.DataObject, bench: Bench) -> None:
    with connect(bench.served.address) as bad:
        block = bad.grow().number
        for message in data.draw(st.lists(to_an_open_block(block), max_size=6)):
            if (link := bad._link()) is not None:
                bad._line.send(link, frame(message))
    bench.check()


def with_a_lent_buffer(buffer: int, ticket: int) -> st.SearchStrategy[Any]:
    numbers, starts = st.integers(100, 2**63 - 1), st.integers(0, LENT_PAGES + 1)
    return st.one_of(
        st.builds(Push, numbers, st.just(ticket), st.just(buffer), starts, st.booleans()),
        st.builds(Unshare, numbers, st.just(buffer)),
        st.builds(Release, st.just(np.array([ticket]).tobytes())),
        REQUESTS,
    )


@settings(CALM, max_examples=50)
@given(data=st.data())
def test_a_lent_buffer_takes_any_messages_in_any_order(data: st.DataObject, bench: Bench) -> None:
    with connect(bench.served.address) as bad:
        ticket = bad.demand(bad.pages(bench.blocks[:2], 1)).wait()
        assert bad._line.link is not None
        shared = list[Any]()
        body = frame(Share(LENT_NUMBER, HANDLE, LENT_PAGES, GPU))
        bad._line.ask(bad._line.link, LENT_NUMBER, body, shared.append, 10**10)
        bad._line.wait(lambda: bool(shared))
        assert isinstance(shared[0], replies.Shared)
        messages = with_a_lent_buffer(LENT_NUMBER, ticket.number)
        for message in data.draw(st.lists(messages, min_size=1, max_size=8)):
            if (link := bad._link()) is not None:
                bad._line.send(link, frame(message))
    bench.check()
    lent = asnumpy(LENT_BUFFER)
    rows = {row.tobytes() for row in [*bench.pages[:, 1], np.full(PAGE_BYTES, 0xA5, np.uint8)]}
    assert {row.tobytes() for row in lent} <= rows
    rest = LENDER.allocations[0][lent.size :]
    assert (rest == 0xA5).all()


@CALM
@given(requests=st.lists(REQUESTS, min_size=1, max_size=4), data=st.data())
def test_mutated_frames_do_no_harm(
    bench: Bench, requests: list[Request], data: st.DataObject
) -> None:
    stream = bytearray(b"".join(map(frame, requests)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(stream) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "repeat"]))
        if kind == "flip":
            stream[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "repeat":
            stream[place:place] = stream[place : place + 9]
        elif place:
            del stream[place:]
    bench.attack(bytes(stream), greeted=True)
    bench.check()


def test_no_descriptor_is_left_behind(bench: Bench) -> None:
    def held() -> int:
        bench.check()
        return len(os.listdir("/proc/self/fd"))

    bench.attack(frame(Ping(1)), greeted=True)
    before = held()
    for number in range(40):
        bench.attack(frame(Ping(1)) + bytes([number]) * 99, greeted=number % 4 > 0)
    assert held() == before


def test_deep_nesting_is_no_message() -> None:
    for body in (b"\x91" * 100_000, b"\x93\x02\x01" + b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            request_of(body)


@given(
    bodies=st.lists(st.binary(max_size=30), max_size=8),
    cuts=st.lists(st.integers(1, 9), min_size=1),
)
def test_frames_come_out_whole_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    frames, at, turn = Frames(30), 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        frames.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert list(frames.whole) == bodies
    with pytest.raises(ProtocolError):
        frames.feed((31).to_bytes(4, "little"))


@given(request=REQUESTS)
def test_messages_survive_the_journey(request: Request) -> None:
    body = frame(request)[4:]
    again = request_of(body)
    assert msgspec.msgpack.encode(again) == body
