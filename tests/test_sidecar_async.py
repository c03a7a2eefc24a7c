"""The client for one event loop: the same answers, and the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefetchd import AsyncClient, AwayError, DoneHint, SidecarError, aconnect
from prefetchd.sidecar.conversation import Answers
from prefetchd.sidecar.handshake import hello_for
from prefetchd.sidecar.link import Link
from prefetchd.sidecar.loop_line import LoopLine
from tests.runtime_bench import BLOCKS, LAYERS, PAGE_BYTES, content, keys, pinned
from tests.sidecar_bench import PATIENCE_S, Daemon, daemon, in_space


def run(served: Daemon, work: Callable[[AsyncClient], Awaitable[None]], **options: int) -> None:
    async def main() -> None:
        async with await aconnect(served.address, **options) as kv:  # type: ignore[arg-type]
            await asyncio.wait_for(work(kv), PATIENCE_S)

    asyncio.run(main())


def test_what_was_put_is_read_back_by_many_at_once(tmp_path: Path) -> None:
    pages = content(BLOCKS)

    async def read(kv: AsyncClient, blocks: np.ndarray, layer: int) -> None:
        with await kv.demand(kv.pages(blocks, layer)) as ticket:
            assert np.array_equal(np.stack(ticket.views()), pages[:, layer])

    async def work(kv: AsyncClient) -> None:
        put = await kv.put(keys(BLOCKS), pages)
        found = await kv.find(keys(BLOCKS))
        assert np.array_equal(found.blocks, put.blocks)
        assert np.array_equal(found.stamps, put.stamps)
        await asyncio.gather(*(read(kv, found.blocks, layer % LAYERS) for layer in range(12)))
        kv.hint(DoneHint(1))
        assert sum((await kv.stats()).outcomes.values()) == 12 * BLOCKS

    with daemon(tmp_path) as served:
        run(served, work, write_bytes=3 * LAYERS * PAGE_BYTES)
        served.until(lambda: not served.server.connections)
        assert pinned(served.runtime()) == 0


def test_a_cancelled_demand_is_given_back(tmp_path: Path) -> None:
    async def work(kv: AsyncClient) -> None:
        blocks = (await kv.put(keys(BLOCKS), content(BLOCKS))).blocks
        held = await kv.demand(kv.pages(blocks[:4], 0))
        waiting = asyncio.create_task(kv.demand(kv.pages(blocks[4:], 0), timeout_s=60))
        other = await kv.find(keys(1))  # the loop goes on
        assert len(other) == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        held.release()
        with await kv.demand(kv.pages(blocks[4:], 1)) as ticket:
            assert not ticket.missing.any()

    with daemon(tmp_path, {"default": in_space(staging_bytes=4 * PAGE_BYTES)}) as served:
        run(served, work)
        served.until(lambda: not served.server.connections)
        assert pinned(served.runtime()) == 0


def test_releases_go_by_themselves_where_nothing_follows(tmp_path: Path) -> None:
    with daemon(tmp_path) as served:

        async def work(kv: AsyncClient) -> None:
            pages = kv.pages((await kv.put(keys(4), content(4))).blocks, 0)
            (await kv.demand(pages)).release()
            assert pinned(served.runtime()) == 4
            await asyncio.to_thread(served.until, lambda: pinned(served.runtime()) == 0)
            (await kv.demand(pages)).release()
            await kv.stats()  # which takes them along
            assert pinned(served.runtime()) == 0

        run(served, work)


def test_what_the_daemon_does_not_take_at_once_is_sent_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the loop is asked to tell of room once, not with every message."""
    parts = [bytes([number]) * (1 << 20) for number in range(5)]

    async def main() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        line = LoopLine(tmp_path, hello_for("default", "", None, None, 0), lambda _: None)
        attachment: Any = SimpleNamespace(answers=Answers())
        line._link = Link(ours, attachment)
        ours.setblocking(False)
        loop, asked = asyncio.get_running_loop(), list[str]()

        def noting(name: str, really: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*those: Any) -> Any:
                asked.append(name)
                return really(*those)

            return noted

        for name in ("add_writer", "remove_writer"):
            monkeypatch.setattr(loop, name, noting(name, getattr(loop, name)))
        with ours, theirs:
            for part in parts:
                line.send(part)
            came = bytearray()
            while len(came) < len(parts) << 20:
                came += await loop.sock_recv(theirs, 1 << 20)
            while line._writing:
                await asyncio.sleep(0)
            assert came == b"".join(parts)
            line.send(b"more")
            assert theirs.recv(8) == b"more"
        assert asked == ["add_writer", "remove_writer"]

    asyncio.run(main())


def test_while_the_daemon_is_away_everything_is_missing(tmp_path: Path) -> None:
    async def main() -> None:
        with daemon(tmp_path, {"default": in_space(staging_bytes=4 * PAGE_BYTES)}) as served:
            kv = await aconnect(served.address)
            blocks = (await kv.put(keys(BLOCKS), content(BLOCKS))).blocks
            held = await kv.demand(kv.pages(blocks[:4], 0))
            waiting = asyncio.create_task(kv.demand(kv.pages(blocks[4:], 0), timeout_s=60))
            await kv.find(keys(1))
        assert (await waiting).missing.all()
        assert held.missing.all()
        assert kv.away
        assert len(await kv.find(keys(1))) == 0
        assert (await kv.demand(kv.pages(blocks, 0)[:2])).missing.all()
        assert (await kv.put(keys(1, 9), content(1))).failures
        with pytest.raises(AwayError):
            await kv.stats()
        with daemon(tmp_path, {"default": in_space(staging_bytes=4 * PAGE_BYTES)}):
            await asyncio.wait_for(kv.until_back(), PATIENCE_S)
            assert (await kv.put(keys(1), content(1))).blocks.min() >= 0
            held.release()
            await kv.close()
        with pytest.raises(SidecarError, match="closed"):
            await kv.find(keys(1))

    asyncio.run(main())
