"""Paths of a namespace's store that the configuration wants detached, or other drives in place of.

Decides what of that is done already, and tells in the log what was done and what cannot be; a path
that stays is no reason not to serve. How it is done is the runtime's (`prefetchd.attaching`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prefetchd.device import DeviceError
from prefetchd.engine import EngineError
from prefetchd.store_opening import peek
from prefetchd.store_place import StoreError, is_raw

if TYPE_CHECKING:
    from prefetchd.runtime import Runtime
    from prefetchd.sidecar.namespace import NamespaceSettings

log = logging.getLogger("prefetchd")

_REFUSED = (StoreError, DeviceError, EngineError)


def still_to_drain(
    settings: NamespaceSettings, folders: Sequence[Path] | None = None
) -> tuple[str, ...]:
    """The paths to drain without those that are replaced. `folders`: what the store has; None:
    it is not open yet."""
    drain, replaced = settings.options.drain, {old for old, _ in settings.replace}
    if not replaced.intersection(drain):
        return drain
    if folders is None:
        folders = _folders(settings.path)
    there = {folder.absolute() for folder in folders}
    return tuple(old for old in drain if old not in replaced or Path(old).absolute() in there)


def _folders(place: Path | None) -> list[Path]:
    try:
        return [] if place is None else [Path(one) for one in peek(place, raw=is_raw(place)).paths]
    except StoreError:
        return []  # which opening it will tell


def apply(name: str, runtime: Runtime, settings: NamespaceSettings) -> None:
    """Do what is not done yet. May take as long as a new part takes to be written."""
    for old, new in settings.replace:
        there = {folder.absolute() for folder in runtime.folders}
        if Path(new).absolute() in there and Path(old).absolute() not in there:
            continue
        try:
            runtime.attach(old, new, fill=settings.fill)
            log.info("namespace %s: %s is in the place of %s", name, new, old)
        except _REFUSED as error:
            log.error("namespace %s: %s is not replaced: %s", name, old, error)
    replaced = {old for old, _ in settings.replace}
    for old in settings.detach:
        if old in replaced:
            continue
        try:
            if runtime.detach(old):
                log.info("namespace %s: %s is detached, its drive may go", name, old)
        except _REFUSED as error:
            log.error("namespace %s: %s is not detached: %s", name, old, error)
