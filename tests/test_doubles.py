"""Two headers that claim one key: the older one is wrong, and the store's books are right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.devices.threads import Threads
from tests.runtime_bench import BLOCKS, PLAIN, content, harm_next, keys, open_plain, read_all


def test_of_two_blocks_with_one_key_the_older_one_goes(tmp_path: Path) -> None:
    """The header that says that a block is gone cannot be written, and the key is put anew; then
    the journal, which knew, is not believed."""
    make = lambda *opened: Faulty(Threads(*opened), Faults())  # noqa: E731
    options = replace(PLAIN, device=make)
    pages = content(2)
    with open_plain(tmp_path / "kv", options) as runtime:
        old = runtime.put(keys(1), pages[:1]).blocks
        harm_next(runtime, (0, "eio"), (2, "eio"), (4, "eio"))  # between them, the journal
        with runtime.engine.lock:
            assert runtime.room._evict(mine=False)
        writer = runtime._parts.driver.writer
        runtime.engine.wait(lambda: writer.idle)
        assert runtime.stats().failures == {"header: EIO (Input/output error)": 3}
        new = runtime.put(keys(1), pages[1:]).blocks
        assert new.tolist() != old.tolist()
    for scan in (True, False):
        with open_plain(tmp_path / "kv", replace(options, scan=scan)) as runtime:
            found = runtime.lookup(keys(1))
            assert found.tolist() == new.tolist()
            assert np.array_equal(read_all(runtime, found), pages[1:])
            writes = runtime.stats().store_writes
            assert (runtime.stats().blocks_visible, writes.blocks_used) == (1, 1)
            assert len(runtime._parts.catalog.free) == BLOCKS - 1
