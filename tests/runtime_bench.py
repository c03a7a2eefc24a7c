"""Small runtimes for tests: layouts, pages that are all different, devices that fail to order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import prefetchd
from prefetchd import Layout, Options, Runtime, uniform
from prefetchd.core import CoreLimits
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.devices.memory import Memory
from prefetchd.model import Idle, Ids

BLOCKS, LAYERS, PAGE_BYTES = 8, 3, 12_288
OPENING = 3
"""Operations of opening a new store: the superblock written, flushed and read back."""
PLAIN = Options(predictor="none", evict="lru", staging_bytes=1 << 20)
HASTY = replace(PLAIN, core=CoreLimits(read_timeout_ns=100_000_000), demand_timeout_s=0.5)
"""Gives up soon: for devices that lose what they are asked for."""


def layout(page_bytes: int = PAGE_BYTES, layers: int = LAYERS) -> Layout:
    return uniform(layers, page_bytes)


def keys(count: int, first: int = 0) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(first, first + count)]


def content(count: int, page_bytes: int = PAGE_BYTES, seed: int = 1) -> NDArray[np.uint8]:
    """Pages of `count` blocks, (count, LAYERS, page_bytes), no two alike."""
    return np.random.default_rng(seed).integers(0, 256, (count, LAYERS, page_bytes), np.uint8)


def open_plain(
    path: Path | None = None, options: Options = PLAIN, page_bytes: int = PAGE_BYTES
) -> Runtime:
    return prefetchd.open(path, layout(page_bytes), blocks=BLOCKS, fill=False, options=options)


class FaultyRuntime:
    """A runtime in memory whose device goes wrong as `faults` say; `harm` counts after opening."""

    def __init__(
        self,
        harm: Iterable[tuple[int, str]] = (),
        options: Options = HASTY,
        faults: Faults | None = None,
    ) -> None:
        faults = faults or Faults()
        script = tuple((OPENING + number, kind) for number, kind in harm)
        self.faults = replace(faults, script=script)
        self.device: Faulty
        self.runtime = open_plain(None, replace(options, device=self._make))

    def _make(self, files: Any, arena: Any, depth: int) -> Faulty:
        self.device = Faulty(Memory(files, arena, depth), self.faults)
        return self.device

    def __enter__(self) -> Runtime:
        return self.runtime

    def __exit__(self, *_: object) -> None:
        self.runtime.close()


def harm_next(runtime: Runtime, *harm: tuple[int, str]) -> None:
    """Let the device go wrong: (0, fault) with the next operation, once what was put is on it."""
    writer = runtime._parts.driver.writer
    runtime.engine.wait(lambda: writer.idle)
    device: Any = runtime._parts.device
    device._script = {device._accepted + number: fault for number, fault in harm}


def pinned(runtime: Runtime) -> int:
    """Slots that somebody holds, once every release has been acted on."""
    runtime.engine.handle(Idle())
    return runtime.stats().slots_pinned


def read_all(runtime: Runtime, blocks: Ids) -> NDArray[np.uint8]:
    """Every page of these blocks, by one demand a layer: (blocks, LAYERS, page_bytes)."""
    found = []
    for layer in range(LAYERS):
        with runtime.demand(runtime.pages(blocks, layer)) as ticket:
            found.append(np.stack(ticket.views()))
    return np.stack(found, axis=1)
