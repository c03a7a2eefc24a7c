"""What a runtime is built with.

Decides what may be chosen, what is meant by default, and which numbers make no sense. Builds
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefetchd.admission import ADMISSIONS
from prefetchd.books import BooksFactory
from prefetchd.device import Arena, File, StorageDevice
from prefetchd.gpu import GpuDevice
from prefetchd.limits import CoreLimits
from prefetchd.model import Geometry
from prefetchd.planner import PlannerLimits
from prefetchd.predictor import Predictor

DeviceFactory = Callable[[Sequence[File], Arena, int], StorageDevice]
GpuFactory = Callable[[NDArray[np.uint8], int], GpuDevice]
PredictorFactory = Callable[[Geometry, int], Predictor]
ArenaFactory = Callable[[int, int], Arena]
"""From bytes and alignment to memory for devices, staging in front, aligned and touched."""

DEPTH_MAX = 1 << 15  # io_uring takes no more
_COUNTS = (
    "depth",
    "write_buffers",
    "put_threads",
    "open_blocks_max",
    "staging_bytes",
    "flush_after_blocks",
    "cap_bytes",
    "quota_bytes",
)
_AMOUNTS = ("demand_timeout_s", "put_timeout_s", "flush_after_s", "lease_s", "floor_bytes")


@dataclass(frozen=True, slots=True)
class Options:
    """How a runtime is built. Names go through the registry; a factory may stand for a name.

    `staging_bytes` None: a quarter of the store. `depth`: operations in flight on the device.
    `write_buffers`: blocks on their way to the store at once. `put_threads`: how many copy a large
    put, the caller's included (None: as the cores allow). `demand_timeout_s`: after it a
    demand is answered with what is there, the rest as missing. `put_timeout_s`: after it a block
    that the device does not write is given up. `open_blocks_max`: blocks that grow at once.

    `flush_after_blocks`, `flush_after_s`: what a crash may take of what was put "fast".
    `cap_bytes`: the store uses no more of its files than that. `quota_bytes`: nor this namespace
    for its own blocks. `lease_s`: so long after it was looked up or demanded a block is not
    evicted, while that concerns at most half the store. `floor_bytes`: when less is free on
    a file system, nothing is written. `ttl_s`: after it a block is found no more. `admission`:
    "all", or "second-touch": only what is put for the second time is written. `evict_blocks`: a
    full store forgets what was not used for longest; if not, it refuses new blocks. `scan`: read
    all headers when opening, whatever the journal says. `arena`: where staging and write buffers
    are made, `books`: what others may look at (None: memory of its own). `key_file`: of an
    encrypted store, made with it. `drain`: paths of the store that take no new blocks; what they
    hold is moved to the others. `checks_unlocked`: pages of 16 to 64 KiB are checked without the
    interpreter's lock, as larger ones are: good where another thread computes meanwhile, bad for
    whoever waits beside threads that are busy in Python. Raises ValueError for numbers that make
    no sense.
    """

    namespace: str = "default"
    staging_bytes: int | None = None
    device: str | DeviceFactory = "uring"
    gpu: str | GpuFactory = "host"
    predictor: str | PredictorFactory = "auto"
    evict: str = "cycle"
    depth: int = 128
    write_buffers: int = 16
    open_blocks_max: int = 64
    put_threads: int | None = None
    demand_timeout_s: float = 10.0
    put_timeout_s: float = 30.0
    flush_after_blocks: int = 64
    flush_after_s: float = 1.0
    cap_bytes: int | None = None
    quota_bytes: int | None = None
    lease_s: float = 30.0
    floor_bytes: int = 0
    ttl_s: float | None = None
    admission: str = "all"
    evict_blocks: bool = True
    scan: bool = False
    checks_unlocked: bool = False
    drain: tuple[str, ...] = ()
    arena: ArenaFactory | None = None
    books: BooksFactory | None = None
    key_file: str | Path | None = None
    core: CoreLimits = field(default_factory=CoreLimits)
    planner: PlannerLimits = field(default_factory=PlannerLimits)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"option {name} is {value}; it must be at least 1")
        if self.depth > DEPTH_MAX:
            raise ValueError(f"option depth is {self.depth}; it must be at most {DEPTH_MAX}")
        for name in _AMOUNTS:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"option {name} is {value}; it must be a number, 0 or above")
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ValueError(f"option ttl_s is {self.ttl_s}; it must be above 0, or None")
        if self.admission not in ADMISSIONS:
            raise ValueError(f"option admission is {self.admission!r}; there are {ADMISSIONS}")
