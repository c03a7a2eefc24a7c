"""kill -9 at random moments, a few times; `python -m tests.crash_campaign` does it often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash_campaign import campaign


@pytest.mark.parametrize("device", ["uring", "threads"])
def test_what_was_acknowledged_survives_kills(device: str, tmp_path: Path) -> None:
    assert campaign(tmp_path / "kv", 3, device) > 0
