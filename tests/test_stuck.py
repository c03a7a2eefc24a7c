"""An extent whose removal could not be said is not lost for a drive that fails now and then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.runtime_bench import BLOCKS, HASTY, FaultyRuntime, content, harm_next, keys

OPTIONS = replace(HASTY, lease_s=0.0, demand_timeout_s=60.0)


@pytest.mark.parametrize(("failures", "visible"), [(1, BLOCKS), (2, BLOCKS), (3, BLOCKS - 1)])
def test_a_removal_is_said_again_a_few_times(failures: int, visible: int) -> None:
    with FaultyRuntime(options=OPTIONS) as runtime:
        assert not runtime.put(keys(BLOCKS), content(BLOCKS)).wait().failures
        # A commit is a header and a page of the journal: every second operation is a header.
        harm_next(runtime, *((2 * number, "eio") for number in range(failures)))
        assert not runtime.put(keys(1, BLOCKS), content(1, seed=2)).wait().failures
        stats = runtime.stats()
        assert stats.failures == {"header: EIO (Input/output error)": failures}
        assert stats.store_writes.blocks_used == BLOCKS
        assert stats.blocks_visible == visible
