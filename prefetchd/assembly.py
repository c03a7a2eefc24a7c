"""How a runtime is put together from a store and a set of options.

Decides order (arena, device, catalog, GPU, core), and what replaces what cannot be had, saying so
in `notes`. Runs nothing.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prefetchd import registry
from prefetchd.catalog import Catalog
from prefetchd.core import Core, CoreLimits
from prefetchd.device import Arena, DeviceError, File, StorageDevice
from prefetchd.driver import SLOTS_MAX, Driver
from prefetchd.eviction import EVICTIONS
from prefetchd.format import Superblock
from prefetchd.gpu import GpuDevice
from prefetchd.model import Geometry, Mask
from prefetchd.planner import Planner, PlannerLimits
from prefetchd.predictor import Predictor
from prefetchd.staging import Staging
from prefetchd.store import Store, StoreError
from prefetchd.writer import Writer

DeviceFactory = Callable[[Sequence[File], Arena, int], StorageDevice]
GpuFactory = Callable[[NDArray[np.uint8], int], GpuDevice]
PredictorFactory = Callable[[Geometry, int], Predictor]

_FALLBACK = "threads"
_CLOSE_TIMEOUT_NS = 10_000_000_000


@dataclass(frozen=True, slots=True)
class Options:
    """How a runtime is built. Names go through the registry; a factory may stand for a name.

    `staging_bytes` None: a quarter of the store. `depth`: operations in flight on the device.
    `write_buffers`: blocks on their way to the store at once. `demand_timeout_s`: after it a
    demand is answered with what is there, the rest as missing. `put_timeout_s`: after it a block
    that the device does not write is given up. Raises ValueError for numbers that make no sense.
    """

    namespace: str = "default"
    staging_bytes: int | None = None
    device: str | DeviceFactory = "uring"
    gpu: str | GpuFactory = "host"
    predictor: str | PredictorFactory = "auto"
    evict: str = "cycle"
    depth: int = 128
    write_buffers: int = 4
    demand_timeout_s: float = 10.0
    put_timeout_s: float = 30.0
    core: CoreLimits = field(default_factory=CoreLimits)
    planner: PlannerLimits = field(default_factory=PlannerLimits)

    def __post_init__(self) -> None:
        for name in ("depth", "write_buffers", "staging_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"option {name} is {value}; it must be at least 1")
        for name in ("demand_timeout_s", "put_timeout_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"option {name} is {value}; it must be a number of seconds, 0 up")


@dataclass(frozen=True, slots=True)
class Parts:
    """A runtime's parts. `staging` is (slots, slot_bytes), `scratch` the arena's rest."""

    store: Store
    geometry: Geometry
    staging: NDArray[np.uint8]
    scratch: Arena
    device: StorageDevice
    gpu: GpuDevice
    catalog: Catalog
    core: Core
    driver: Driver
    predictor_name: str
    notes: tuple[str, ...]

    def close(self, *, clean: bool) -> None:
        """End what is in flight, mark the store clean if asked, let go of everything."""
        self.gpu.close()
        try:
            if clean:
                drain(self.device)
                self.store.mark_clean(self.device, self.scratch)
        finally:
            self.device.close()
            self.store.release()


def assemble(store: Store, options: Options) -> Parts:
    """Raises StoreError, DeviceError, GpuError or RegistryError; the store is then released."""
    shape = store.superblock
    geometry = Geometry(shape.layers, shape.blocks)
    try:
        slots = _slots(shape, geometry, options.staging_bytes)
        visible = np.zeros(shape.blocks, np.bool_)
        core, predictor_name = _core(geometry, slots, options, visible)
        arena, staging, scratch = _memory(shape, slots, options.write_buffers)
        device, notes = _open_device(options, store.files, arena)
    except BaseException:
        store.release()
        raise
    try:
        catalog = store.load(device, scratch, options.namespace, visible)
        gpu = _open_gpu(options, staging)
    except BaseException:
        device.close()
        store.release()
        raise
    end = options.write_buffers * shape.extent_bytes
    buffers = scratch[:end].reshape(options.write_buffers, -1)
    driver = Driver(device, catalog, staging, Writer(catalog, buffers, staging.nbytes))
    notes = (*notes, *device.notes, *gpu.notes)
    return Parts(
        store, geometry, staging, scratch, device, gpu, catalog, core, driver, predictor_name, notes
    )


def _slots(shape: Superblock, geometry: Geometry, staging_bytes: int | None) -> int:
    if staging_bytes is None:
        staging_bytes = geometry.pages * shape.slot_bytes // 4
    slots = min(staging_bytes // shape.slot_bytes, geometry.pages, SLOTS_MAX)
    if slots < 1:
        raise StoreError(
            f"staging of {staging_bytes} bytes holds no page of {shape.slot_bytes} bytes; give it "
            "at least what one layer needs at once"
        )
    return slots


def _memory(
    shape: Superblock, slots: int, write_buffers: int
) -> tuple[Arena, NDArray[np.uint8], Arena]:
    """One arena: staging in front, write buffers (also scratch for opening) behind it."""
    staging_bytes = slots * shape.slot_bytes
    scratch_bytes = max(write_buffers * shape.extent_bytes, shape.superblock_bytes)
    arena = aligned_arena(staging_bytes + scratch_bytes, shape.alignment_bytes)
    staging = arena[:staging_bytes].reshape(slots, shape.slot_bytes)
    return arena, staging, arena[staging_bytes:]


def aligned_arena(size_bytes: int, alignment_bytes: int) -> Arena:
    """Anonymous memory for devices, aligned and touched, so that no read waits for a page fault."""
    spare = max(0, alignment_bytes - mmap.PAGESIZE)
    memory = mmap.mmap(-1, size_bytes + spare)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    skip = -whole.ctypes.data % alignment_bytes
    arena = whole[skip : skip + size_bytes]
    arena[:: mmap.PAGESIZE] = 0
    return arena


def _core(geometry: Geometry, slots: int, options: Options, visible: Mask) -> tuple[Core, str]:
    """`visible` (one a block): what may be guessed at; the catalog fills it later."""
    if options.evict not in EVICTIONS:
        known = ", ".join(EVICTIONS)
        raise registry.RegistryError(f"no eviction policy is {options.evict!r}; there are {known}")
    staging = Staging(slots, geometry, EVICTIONS[options.evict](slots, geometry))
    factory = options.predictor
    if isinstance(factory, str):
        factory = registry.predictor_class(factory)
    predictor = factory(geometry, slots)
    name = predictor.name or type(predictor).__name__.lower()
    planner = Planner(options.planner, lambda pages: visible[pages // geometry.layers])
    return Core(staging, predictor, planner, options.core), name


def _open_device(
    options: Options, files: Sequence[File], arena: Arena
) -> tuple[StorageDevice, tuple[str, ...]]:
    """The device asked for; where io_uring is forbidden `threads`, with the reason as a note."""
    asked = options.device
    factory = registry.storage_device_class(asked) if isinstance(asked, str) else asked
    try:
        return factory(files, arena, options.depth), ()
    except DeviceError as error:
        if asked not in ("uring", "liburing"):
            raise
        fallback = registry.storage_device_class(_FALLBACK)(files, arena, options.depth)
        return fallback, (f"{error}; going on with {_FALLBACK}",)


def _open_gpu(options: Options, staging: NDArray[np.uint8]) -> GpuDevice:
    factory = options.gpu
    if isinstance(factory, str):
        factory = registry.gpu_device_class(factory)
    return factory(staging, len(staging))


def drain(device: StorageDevice) -> None:
    """Let what is in flight end, within a limit, so that the device can be used alone."""
    deadline_ns = time.monotonic_ns() + _CLOSE_TIMEOUT_NS
    while device.in_flight and (patience_ns := deadline_ns - time.monotonic_ns()) > 0:
        device.wait(patience_ns)  # which may return early, with nothing to reap
        device.reap()
