"""A short time of mixed load on a drive that goes wrong; `tests.sidecar_soak` is the long one."""

from __future__ import annotations

from pathlib import Path

from tests.runtime_bench import content, keys
from tests.sidecar_bench import daemon
from tests.sidecar_soak import soak


def test_clients_of_a_drive_that_goes_wrong_get_right_bytes_or_none(tmp_path: Path) -> None:
    found = soak(tmp_path, clients=3, steps=250, seconds=20)
    tallies = found.clients
    assert sum(tally.wrong for tally in tallies) == 0
    assert sum(tally.pages - tally.missing for tally in tallies) > 0
    assert sum(tally.put for tally in tallies) > 0
    assert found.pinned_after == 0
    assert found.extents_lost == 0
    assert found.slots_usable == found.slots
    assert found.descriptors_after == found.descriptors_before
    assert found.injected["eio"] > 0
    assert found.store.clean
    assert found.store.counts == {}


def test_what_was_given_back_is_not_counted_as_held(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, served.connect() as kv:
        blocks = kv.put(keys(4), content(4)).blocks
        with kv.demand(kv.pages(blocks, 0)):
            assert kv.stats().slots_pinned == 4
        assert kv.stats().slots_pinned == 0
