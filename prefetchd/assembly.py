"""How a runtime is put together from a store and a set of options.

Decides order (arena, device, catalog, GPU, core), and what replaces what cannot be had, saying so
in `notes`. Runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefetchd import registry
from prefetchd.admission import ADMISSIONS
from prefetchd.arena import aligned_arena
from prefetchd.books import Books, BooksFactory, private_books
from prefetchd.catalog import Catalog
from prefetchd.commit import Commit
from prefetchd.core import Core, CoreLimits
from prefetchd.device import Arena, DeviceError, File, StorageDevice
from prefetchd.driver import SLOTS_MAX, Driver
from prefetchd.format import Superblock, namespace_id
from prefetchd.gpu import GpuDevice
from prefetchd.journal import Journal
from prefetchd.key_file import cipher_of
from prefetchd.model import Geometry, Ids, Mask
from prefetchd.paths import Paths
from prefetchd.pipeline import FlushLimits
from prefetchd.planner import Planner, PlannerLimits
from prefetchd.policies import eviction_of, predictor_of
from prefetchd.predictor import Predictor
from prefetchd.recovery import Progress, recover
from prefetchd.restating import CHUNK_BYTES
from prefetchd.room import blocks_under_cap, blocks_under_quota
from prefetchd.staging import Staging
from prefetchd.store import Store, StoreError
from prefetchd.transfers import drain
from prefetchd.write_hints import hint_lifetime
from prefetchd.writer import Writer

DeviceFactory = Callable[[Sequence[File], Arena, int], StorageDevice]
GpuFactory = Callable[[NDArray[np.uint8], int], GpuDevice]
PredictorFactory = Callable[[Geometry, int], Predictor]
ArenaFactory = Callable[[int, int], Arena]
"""From bytes and alignment to memory for devices, staging in front, aligned and touched."""

_FALLBACK = "threads"
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
    hold is moved to the others. Raises ValueError for numbers that make no sense.
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
        for name in _AMOUNTS:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"option {name} is {value}; it must be a number, 0 or above")
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise ValueError(f"option ttl_s is {self.ttl_s}; it must be above 0, or None")
        if self.admission not in ADMISSIONS:
            raise ValueError(f"option admission is {self.admission!r}; there are {ADMISSIONS}")


@dataclass(slots=True)
class Parts:
    """A runtime's parts. `staging` is (slots, slot_bytes), `scratch` the arena's rest."""

    store: Store
    geometry: Geometry
    books: Books
    staging: NDArray[np.uint8]
    scratch: Arena
    device: StorageDevice
    gpu: GpuDevice
    catalog: Catalog
    core: Core
    driver: Driver
    predictor_name: str
    write_hint: str
    notes: tuple[str, ...]

    def close(self, *, clean: bool) -> None:
        """End what is in flight, mark the store clean if asked, let go of everything."""
        self.gpu.close()
        try:
            if clean and not self.store.read_only:
                drain(self.device)
                journal = self.driver.writer.commit.journal
                without = np.flatnonzero(self.driver.paths.unwritable[1:]) + 1
                self.store.mark_clean(self.device, self.scratch, journal, without.tolist())
        finally:
            self.device.close()
            self.store.release()


def assemble(store: Store, options: Options, progress: Progress | None = None) -> Parts:
    """`progress`: of reading headers. Raises StoreError, DeviceError, GpuError or RegistryError;
    the store is then released."""
    shape = store.superblock
    geometry = Geometry(shape.layers, shape.blocks)
    try:
        cipher = cipher_of(shape, store.where, options.key_file, namespace_id(options.namespace))
        slots = _slots(shape, geometry, options.staging_bytes)
        books = (options.books or private_books)(geometry, slots)
        visible = books.visible
        core, predictor_name = build_core(
            geometry, slots, options, lambda pages: visible[pages // geometry.layers], books
        )
        arena, staging, scratch = _memory(shape, slots, options)
        device, notes = open_device(options, store.files, arena)
    except BaseException:
        store.release()
        raise
    try:
        # Staging is nobody's yet; with it, thousands of headers are read at once.
        catalog, journal = recover(
            store,
            device,
            arena,
            options.namespace,
            visible,
            scan=options.scan,
            cipher=cipher,
            progress=progress,
        )
        catalog.show(books)
        arena[:CHUNK_BYTES] = 0  # whoever may look at staging is not to see what was read
        catalog.blocks_max = blocks_under_cap(shape, options.cap_bytes)
        catalog.mine_max = blocks_under_quota(shape, options.quota_bytes)
        gpu = _open_gpu(options, staging)
    except BaseException:
        device.close()
        store.release()
        raise
    driver = _driver(options, store, device, catalog, journal, staging, scratch)
    notes = (*store.notes, *notes, *device.notes, *gpu.notes)
    hint = "none" if store.read_only else hint_lifetime(store.files, options.ttl_s)
    return Parts(
        store,
        geometry,
        books,
        staging,
        scratch,
        device,
        gpu,
        catalog,
        core,
        driver,
        predictor_name,
        hint,
        notes,
    )


def _driver(
    options: Options,
    store: Store,
    device: StorageDevice,
    catalog: Catalog,
    journal: Journal,
    staging: NDArray[np.uint8],
    scratch: Arena,
) -> Driver:
    """The driver with all that writes, each with its part of the scratch memory."""
    shape = store.superblock
    end = options.write_buffers * shape.extent_bytes
    probes = len(scratch) - shape.stripes * shape.superblock_bytes
    buffers = scratch[:end].reshape(options.write_buffers, -1)
    limits = FlushLimits(options.flush_after_blocks, int(options.flush_after_s * 1e9))
    commit = Commit(catalog, journal, scratch[end:probes], staging.nbytes + end, limits)
    names = [file.path for file in store.files]
    paths = Paths(names, catalog, commit, scratch[probes:], staging.nbytes + probes)
    for path in sorted(store.missing):
        paths.lose(path)
    paths.detached.update(shape.detached)
    writer = Writer(catalog, buffers, staging.nbytes, commit)
    return Driver(device, catalog, staging, writer, paths)


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
    shape: Superblock, slots: int, options: Options
) -> tuple[Arena, NDArray[np.uint8], Arena]:
    """One arena: staging in front, behind it write buffers and what commits write (before there
    are any: scratch for opening)."""
    staging_bytes = slots * shape.slot_bytes
    scratch_bytes = options.write_buffers * shape.extent_bytes + Commit.region_bytes(
        shape.header_bytes
    )
    scratch_bytes += shape.stripes * shape.superblock_bytes  # for probes of the paths
    make = options.arena or aligned_arena
    arena = make(staging_bytes + scratch_bytes, shape.alignment_bytes)
    staging = arena[:staging_bytes].reshape(slots, shape.slot_bytes)
    return arena, staging, arena[staging_bytes:]


def build_core(
    geometry: Geometry,
    slots: int,
    options: Options,
    known: Callable[[Ids], Mask] | None = None,
    books: Books | None = None,
) -> tuple[Core, str]:
    """A core and its predictor's name. `known`: which pages may be guessed at (None: all)."""
    eviction = eviction_of(options.evict, geometry, slots)
    staging = Staging(slots, geometry, eviction, books)
    predictor, name = predictor_of(options.predictor, geometry, slots)
    return Core(staging, predictor, Planner(options.planner, known), options.core), name


def open_device(
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
