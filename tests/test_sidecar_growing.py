"""Blocks that grow in a daemon: read all the while, the store's once sealed, else gone with their
client."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from prefetchd import Client, GrowError, connect
from prefetchd.sidecar.protocol import Drop, Message, Write
from prefetchd.sidecar.remote_growing import RemoteGrowing
from prefetchd.sidecar.replies import Error
from prefetchd.sidecar.wire import frame
from tests.runtime_bench import LAYERS, PAGE_BYTES, content, keys, layout, pinned
from tests.sidecar_bench import Daemon, Process, daemon, in_space

IMPATIENT = {"demand_timeout_s": 0.2}


def fill(block: RemoteGrowing, pages: NDArray[np.uint8]) -> None:
    for layer in range(LAYERS):
        block.write(layer, pages[layer], 0)


def read(kv: Client, number: int) -> NDArray[np.uint8]:
    found = []
    for layer in range(LAYERS):
        with kv.demand(kv.pages(np.array([number]), layer)) as ticket:
            found.append(ticket.view(0).copy())
    return np.stack(found)


def refused(kv: Client, make: Callable[[int], Message]) -> None:
    link = kv._link()
    assert link is not None
    reply = kv._line.answer(link, lambda number: frame(make(number)), 10**9)
    assert isinstance(reply, Error)
    assert reply.code == "bad_request"


def nothing_is_left(served: Daemon) -> None:
    """No slot, extent or buffer is held for anything but blocks that are found."""
    runtime = served.runtime()

    def all_gone() -> bool:
        runtime.lookup([])
        stats = runtime.stats()
        writes = stats.store_writes
        return (writes.blocks_open, writes.blocks_used) == (0, stats.blocks_visible)

    served.until(all_gone)
    served.until(lambda: pinned(runtime) == 0)
    served.until(lambda: runtime._parts.core.fills.kept == 0)
    runtime._parts.core.staging.check()


@pytest.mark.parametrize("level", ["durable", "fast"])
def test_it_is_read_while_it_grows_and_found_once_it_is_sealed(level: str, tmp_path: Path) -> None:
    pages = content(1)[0]
    with daemon(tmp_path) as served, served.connect() as kv, served.connect() as other:
        block = kv.grow(request=3)
        with kv.demand(block.pages(1)) as ticket, other.demand(block.pages(1)) as theirs:
            assert not ticket.view(0).any()
            block.write(1, pages[1][:100], 0)
            assert np.array_equal(ticket.view(0)[:100], pages[1][:100])
            assert np.array_equal(theirs.view(0)[:100], pages[1][:100]), "on return, by all"
        assert len(kv.lookup(keys(1))) == 0
        fill(block, pages)
        sealed = block.seal(keys(1)[0], durability=level).wait()
        assert (sealed.blocks.tolist(), sealed.failures) == ([block.number], [])
        assert not block.is_open
        for client in (kv, other):
            found = client.find(keys(1))
            assert found.blocks.tolist() == [block.number]
            assert np.array_equal(read(client, block.number), pages)
        assert found.stamps.tolist() == sealed.stamps.tolist()
        with pytest.raises(ValueError, match="sealed or dropped"):
            block.write(0, pages[0], 0)
        nothing_is_left(served)


def test_what_is_open_goes_with_its_client_and_what_is_sealed_stays(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as other:
        with served.connect() as kv:
            fill(sealed := kv.grow(), content(1)[0])
            sealed.seal(keys(1)[0]).wait()
            number = kv.grow().number
            kv.grow().drop()
            with kv.grow() as dropped:
                pages = dropped.pages(0)
            with kv.demand(pages) as ticket:
                assert ticket.missing.all()
            assert other.stats().store_writes.blocks_open == 1
        nothing_is_left(served)
        with other.demand(other.pages(np.array([number]), 0)) as ticket:
            assert ticket.missing.all()
        assert np.array_equal(read(other, int(other.lookup(keys(1))[0])), content(1)[0])


def test_nobody_else_writes_or_drops_it(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv, served.connect() as other:
        block = kv.grow()
        link = other._link()
        assert link is not None
        other._line.send(link, frame(Drop(block.number)))
        refused(other, partial(Write, block=block.number, layer=0, at=0, data=b"x"))
        assert not read(kv, block.number).any()
        for layer, at in ((-1, 0), (LAYERS, 0), (0, -1), (0, PAGE_BYTES)):
            with pytest.raises(ValueError, match="of layer"):
                block.write(layer, np.ones(1), at)
        for layer, at in ((LAYERS, 0), (0, PAGE_BYTES), (2**63 - 1, 2**63 - 1)):
            refused(kv, partial(Write, block=block.number, layer=layer, at=at, data=b"x"))


def test_bounds_are_told(tmp_path: Path) -> None:
    with (
        daemon(tmp_path, {"default": in_space(open_blocks_max=2, **IMPATIENT)}) as served,
        served.connect() as kv,
    ):
        first, _ = kv.grow(), kv.grow()
        with pytest.raises(GrowError, match="2 blocks are open, the most allowed"):
            kv.grow()
        first.drop()
        kv.grow().drop()


def test_a_key_that_is_there_keeps_its_block_and_what_is_refused_stays_open(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        known = int(kv.put(keys(1), content(1)).blocks[0])
        block = kv.grow()
        own = block.number
        assert block.seal(keys(1)[0]).wait().blocks.tolist() == [known]
        assert (block.number, block.is_open) == (known, False)
        assert own != known
        nothing_is_left(served)
    with (
        daemon(tmp_path, {"default": in_space(admission="second-touch")}) as served,
        served.connect() as kv,
    ):
        fill(block := kv.grow(), content(1)[0])
        assert block.seal(keys(1)[0]).wait().refused == [0]
        assert block.is_open
        assert block.seal(keys(1)[0]).wait().blocks.tolist() == [block.number]
        nothing_is_left(served)


def test_a_daemon_that_goes_takes_open_blocks_along(tmp_path: Path) -> None:
    (tmp_path / "stores").mkdir()
    with Process(tmp_path, "--store", str(tmp_path / "stores")) as process:
        kv = connect(process.address, namespace="a", layout=layout(), blocks=8)
        block = kv.grow()
        process.kill()
        with pytest.raises(ValueError, match="went with the daemon"):
            block.write(0, np.ones(8, np.uint8), 0)
        assert not block.is_open
        with pytest.raises(GrowError, match="no block can be opened"):
            kv.grow()
        block.drop()
        kv.close()
