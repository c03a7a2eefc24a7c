"""`prefetchd.open(...)`: from a path, a layout and options to a runtime.

Decides what is made, what is found and what is only read. What a store and a runtime are is decided
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from prefetchd import store, store_making, store_opening
from prefetchd.assembly import Parts, assemble
from prefetchd.layout import Layout
from prefetchd.options import Options
from prefetchd.runtime import Runtime


def open_runtime(
    path: str | Path | None,
    layout: Layout | None = None,
    *,
    blocks: int | None = None,
    fill: bool = True,
    paths: Sequence[str | Path] = (),
    options: Options | None = None,
    read_only: bool = False,
    allow_missing_paths: bool = False,
    raw: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Runtime:
    """Open the store at `path`, creating it for `blocks` blocks of `layout` if there is none.

    `paths`: further folders for a store that is to be made, best on other drives; its blocks are
    dealt out among them. A store that is there knows its own.

    `read_only`: nothing at all is written, and other readers may have it open as well; puts are
    refused. `allow_missing_paths`: open it without those of its paths that cannot be had (the
    first excepted); their blocks are misses. `raw`: a path may be a block device. `progress`: told
    (blocks, of how many) while headers are read after an unclean close.

    `path` None keeps everything in this process's memory (device `memory`): for tests and tries.
    Raises StoreError, DeviceError, GpuError, RegistryError, each saying what to do.
    """
    options = options or Options()
    if path is None:
        if layout is None or blocks is None:
            raise store.StoreError("a store in memory needs a layout and a number of blocks")
        opened = store.in_memory(layout, blocks)
        if options.device == "uring":
            options = replace(options, device="memory")
        return Runtime(assemble(opened, options), options)
    directory = Path(path)
    further = [Path(p) for p in paths]
    if not read_only and layout is not None and not store_opening.exists(directory, raw=raw):
        if blocks is None:
            raise store.StoreError(
                f"there is no store in {directory}; give blocks= to have one made"
            )
        store_making.create(
            directory,
            layout,
            blocks,
            fill=fill,
            paths=further,
            raw=raw,
            key_file=None if options.key_file is None else Path(options.key_file),
        )
    opening = store_opening.Opening(read_only, allow_missing_paths, raw)
    parts = assemble(store_opening.open_store(directory, layout, opening), options, progress)
    notes = _differences(parts, blocks, further)
    return Runtime(replace(parts, notes=(*notes, *parts.notes)), options)


def _differences(parts: Parts, blocks: int | None, further: Sequence[Path]) -> list[str]:
    """What a store that was there is not as it was asked for."""
    notes = []
    if blocks not in (None, parts.geometry.blocks):
        notes.append(
            f"{blocks} blocks were asked for, but the store was made for {parts.geometry.blocks} "
            "and keeps that size; erase the folder to make it anew"
        )
    own = parts.store.superblock.paths[1:]
    if further and tuple(str(path.absolute()) for path in further) != own:
        notes.append(
            f"paths {', '.join(map(str, further))} were asked for, but the store was made with "
            f"{', '.join(own) or 'no further paths'} and keeps to that; erase it to make it anew"
        )
    return notes
