"""Another drive in the place of an empty path of a store that nobody uses.

Decides when that is safe: nothing lies on the path, and the new part is whole before the store
names it. Emptying a path is `draining`'s, while the store is used.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prefetchd.assembly import Parts, assemble
from prefetchd.options import Options
from prefetchd.store_making import Progress, create_part
from prefetchd.store_opening import Opening, open_store
from prefetchd.store_place import StoreError


def replace_path(
    directory: Path,
    old: Path,
    new: Path,
    *,
    fill: bool = True,
    raw: bool = False,
    force: bool = False,
    key_file: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Make `new` the path of the store that `old` was, which may be away. `fill`, `raw`, `force`:
    as for a store that is made; `key_file`: of an encrypted one.

    Raises StoreError: `old` is the first path or none of the store's, something lies there, `new`
    is another path of the store, or cannot be made or named. The store is then as it was; so it is
    after a crash, or has the new path.
    """
    store = open_store(directory, None, Opening(allow_missing_paths=True, raw=raw))
    slot_bytes = store.superblock.slot_bytes
    options = Options(
        device="threads", predictor="none", staging_bytes=slot_bytes, key_file=key_file
    )
    parts = assemble(store, options)
    try:
        number = _number(parts, old)
        shape, said = store.superblock, store.named(number, new)
        create_part(
            new, shape.of_stripe(number), fill=fill, raw=raw, force=force, progress=progress
        )
        store.superblocks[0] = msgspec.structs.replace(shape, **said)
        store.missing |= {number}  # nothing is written to the old one any more
    finally:
        parts.close(clean=True)


def _number(parts: Parts, old: Path) -> int:
    store = parts.store
    places = [place.absolute() for place in store.directories]
    if old.absolute() not in places[1:]:
        there = ", ".join(map(str, store.directories[1:])) or "none but its first"
        raise StoreError(
            f"store {store.where} has no further path {old}; it has {there} (the first one holds "
            "the journal and cannot be replaced)"
        )
    number = places.index(old.absolute())
    if count := parts.catalog.taken_on(number):
        raise StoreError(
            f"store {store.where}: {count} blocks lie on {old}; empty it first: open the store "
            f"with Options(drain=({str(old)!r},)), or `drain` in the daemon's configuration"
        )
    return number
