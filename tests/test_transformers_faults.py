"""When the store fails in mid-generation: the same tokens or a clear error, never a wrong token."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd import Options, transfers
from prefetchd.core import CoreLimits
from prefetchd.devices.faulty import KINDS, Faults, Faulty
from prefetchd.devices.memory import Memory
from prefetchd.places import locate
from tests.tiny_model import GREEDY, LAYERS, prompt, stored, tiny_model, torch, usual

adapter = pytest.importorskip("prefetchd.adapters.transformers")

BLOCKS, NEW = 40, 24
OPTIONS = Options(
    predictor="none",
    staging_bytes=24 * 4096,
    core=CoreLimits(read_timeout_ns=100_000_000),
    demand_timeout_s=1.0,
    put_timeout_s=0.5,
)
PATIENT = replace(OPTIONS, core=CoreLimits(), demand_timeout_s=10.0)


class Spoiled:
    """A store in memory whose device can be broken, and a streamer that breaks it in time."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.device: Faulty
        self._faults = faults or Faults()
        self.options = replace(OPTIONS, device=self._make)

    def _make(self, files: Any, arena: Any, depth: int) -> Faulty:
        self.device = Faulty(Memory(files, arena, depth), self._faults)
        return self.device


class AfterTokens:
    """A streamer: does something once, when so many tokens have come, and keeps all of them."""

    def __init__(self, tokens: int, action: Any) -> None:
        self.said: list[int] = []
        self._tokens = tokens
        self._action = action
        self._prompt = True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self.said += value.reshape(-1).tolist()
            if len(self.said) == self._tokens:
                self._action()
        self._prompt = False

    def end(self) -> None: ...


@pytest.mark.parametrize("kind", ["flip", "eio", "short", "lose"])
def test_faults_now_and_then_cost_a_second_read_or_the_sequence(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the device loses would be waited for at the end.
    monkeypatch.setattr(transfers, "_CLOSE_TIMEOUT_NS", 1_000_000)
    model, ids = tiny_model(), prompt(200)
    expected = usual(model, ids, NEW)
    spoiled, tries, lost = Spoiled(), 0, 0
    with adapter.open(model, None, blocks=BLOCKS, options=spoiled.options) as kv:
        kv.generate(ids, max_new_tokens=1, **GREEDY)
        chance = 0.002 if kind == "lose" else 0.01
        spoiled.device._bounds = np.cumsum([chance * (kind == one) for one in KINDS])
        while not spoiled.device.injected[kind] or lost == tries:
            tries += 1
            try:
                assert stored(kv, ids, NEW) == expected
            except adapter.KvLost:
                lost += 1
            assert lost < 3


def test_a_dead_drive_ends_the_sequence_before_a_wrong_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, ids = tiny_model(), prompt(200)
    expected = usual(model, ids, NEW)
    spoiled = Spoiled()
    seen = AfterTokens(5, lambda: spoiled.device.broken.add(0))
    with (
        pytest.raises(adapter.KvLost, match=r"pages from layer \d on cannot be had"),
        adapter.open(model, None, blocks=BLOCKS, options=spoiled.options) as kv,
    ):
        kv.generate(ids, max_new_tokens=NEW, streamer=seen, **GREEDY)
    assert 5 <= len(seen.said) < NEW
    assert seen.said == expected[: len(seen.said)]
    assert "EIO" in caplog.text


def test_a_bit_flipped_on_disk_is_found_and_computed_again(tmp_path: Path) -> None:
    model, ids = tiny_model(), prompt(200)
    expected = usual(model, ids, NEW)
    with adapter.open(model, tmp_path / "kv", blocks=BLOCKS, options=PATIENT) as kv:
        stored(kv, ids, 1)
        page = kv.cache(ids).sequence.far.blocks[5:6] * LAYERS + 2
        _, (offset,) = locate(kv.runtime._parts.store.superblock, page)
        path = kv.runtime._parts.store.files[0].path
    spoilt = bytearray(Path(path).read_bytes())
    spoilt[offset + 1000] ^= 4
    Path(path).write_bytes(spoilt)
    with adapter.open(model, tmp_path / "kv", blocks=BLOCKS, options=PATIENT) as kv:
        with pytest.raises(adapter.KvLost, match="of tokens 80-95"):
            stored(kv, ids, NEW)
        with suppress(adapter.KvLost):  # it may take a second time to see that it is past help
            assert stored(kv, ids, NEW) == expected
        assert stored(kv, ids, NEW) == expected
        assert kv.runtime.stats().failures["checksum mismatch"] >= 2


def test_a_block_that_was_evicted_is_never_mistaken_for_another() -> None:
    model, ids = tiny_model(), prompt(200)
    options = replace(PATIENT, lease_s=0.0)
    expected = usual(model, ids, NEW)
    with adapter.open(model, None, blocks=16, options=options) as kv, torch.no_grad():
        seen = AfterTokens(5, lambda: stored(kv, prompt(230, seed=2), 1))
        with pytest.raises(adapter.KvLost, match="cannot be had"):
            kv.generate(ids, max_new_tokens=NEW, streamer=seen, **GREEDY)
        assert seen.said == expected[: len(seen.said)]
        assert stored(kv, ids, NEW) == expected  # what is gone is computed anew
