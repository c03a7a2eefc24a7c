"""What a result says of its device: a cache in front of the drive is told, whatever the kind."""

from __future__ import annotations

import pytest

from prefetchd.bench.seen import Seen


@pytest.mark.parametrize(("device", "kind"), [("uring", "CACHED"), ("emulated", "EMULATED")])
def test_reads_from_a_cache_are_told_also_of_an_emulated_drive(device: str, kind: str) -> None:
    seen = Seen("host", device=device, asked_bytes=1 << 30, medium_bytes=1 << 28)
    told = seen.described()
    assert told.kind == kind
    assert len(told.notes) == 1
    assert told.notes[0].startswith("CACHED: the drive moved only 25%")


def test_an_emulated_drive_that_nothing_was_read_from_is_unread() -> None:
    told = Seen("host", device="emulated").described()
    assert told.kind == "UNREAD"
    assert [note.split(":")[0] for note in told.notes] == ["UNREAD"]
