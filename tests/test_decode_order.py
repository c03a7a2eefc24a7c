"""When a hint is given: at the start of a layer, and not after a copy that needs no processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefetchd
from prefetchd.bench.decode import run_decode
from prefetchd.bench.decode_loop import Pace
from prefetchd.devices.host import Done, Host
from prefetchd.gpu import Push
from prefetchd.layout import uniform
from prefetchd.model import Slots
from tests.replays import LAYERS, PAGE_BYTES, STEPS, workload, write_trace


@pytest.mark.parametrize(
    ("copies_itself", "expected"), [(True, ["hint", "copied"]), (False, ["copied", "hint"])]
)
def test_a_hint_is_given_while_the_gpu_copies(
    copies_itself: bool, expected: list[str], tmp_path: Path
) -> None:
    happened: list[str] = []

    class Copying(Done):
        def done(self) -> bool:
            return not copies_itself

        def wait(self) -> None:
            happened.append("copied")

    class Gpu(Host):
        def push(self, slots: Slots, buffer: Any, start: int = 0, *, after: Any = None) -> Push:
            super().push(slots, buffer, start, after=after)
            return Copying()

    replayed = workload(write_trace(tmp_path / "trace.npz"))
    options = prefetchd.Options(gpu=Gpu, predictor="none")
    blocks = replayed.geometry.blocks
    layout = uniform(LAYERS, PAGE_BYTES)
    with prefetchd.open(None, layout, blocks=blocks, options=options) as runtime:
        keys = np.arange(blocks * 16, dtype=np.int64).astype(np.uint8).reshape(blocks, 16)
        keys[:, 0] = np.arange(blocks)
        runtime.put(keys, np.zeros((blocks, LAYERS, PAGE_BYTES), np.uint8)).wait()
        runtime.hint = lambda hint: happened.append("hint")  # type: ignore[method-assign]
        run_decode(runtime, replayed, Pace(0, hints=True, warmup_steps=0))
    without = ["copied"]  # nothing is hinted for a step's first layer, nor after the last
    step = expected * (LAYERS - 1) + without
    assert happened == step * STEPS
