"""How a runtime is put together from a store and a set of options.

Decides order (arena, device, catalog, GPU, core), and what replaces what cannot be had, saying so
in `notes`. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prefetchd import registry
from prefetchd.arena import aligned_arena
from prefetchd.books import Books, private_books
from prefetchd.catalog import Catalog
from prefetchd.commit import Commit
from prefetchd.core import Core
from prefetchd.device import Arena, DeviceError, File, StorageDevice
from prefetchd.driver import SLOTS_MAX, Driver
from prefetchd.format import Superblock, namespace_id
from prefetchd.gpu import GpuDevice
from prefetchd.journal import Journal
from prefetchd.key_file import cipher_of
from prefetchd.model import Geometry, Ids, Mask
from prefetchd.options import Options
from prefetchd.paths import Paths
from prefetchd.pipeline import FlushLimits
from prefetchd.planner import Planner
from prefetchd.policies import eviction_of, predictor_of
from prefetchd.recovery import Progress, recover
from prefetchd.restating import CHUNK_BYTES
from prefetchd.room import blocks_under_cap, blocks_under_quota
from prefetchd.staging import Staging
from prefetchd.store import Store, StoreError
from prefetchd.transfers import drain
from prefetchd.write_hints import hint_lifetime
from prefetchd.writer import Writer

_FALLBACK = "threads"


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
        catalog.checks_unlocked = options.checks_unlocked
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
