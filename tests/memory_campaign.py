"""How much memory a runtime takes beside its staging buffer, by owner, in bytes a page.

`python -m tests.memory_campaign` opens a store of 1,048,576 pages with the default options, fills
its catalog and prints what every class holds. What is counted is exact: the bytes of all arrays,
and of all lists, dictionaries, strings of bytes and numbers in them, that can be reached from the
runtime, each at the innermost object of this package that leads to it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import prefetchd
from prefetchd import Options, Runtime, uniform
from prefetchd.format import page_checksum
from prefetchd.model import Idle
from prefetchd.records import NEVER_NS

BLOCKS, LAYERS, PAGE_BYTES = 32_768, 32, 4096
READ_BLOCKS, STEPS = 64, 3
SHOWN = 0.005
Plain = (bytes, str, int, float)
Containers = (dict, list, tuple, set, frozenset, deque)


def held_by(root: object) -> Counter[str]:
    """Bytes by class, of everything reachable from `root` but memory that is mapped."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[object, str]] = [(root, type(root).__name__)]
    while todo:
        thing, owner = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, np.ndarray):
            found[owner] += thing.nbytes if thing.base is None else 0
        elif isinstance(thing, (*Plain, *Containers)):
            found[owner] += sys.getsizeof(thing)
        elif type(thing).__module__.startswith("prefetchd"):
            owner = type(thing).__name__
        todo += [(inner, owner) for inner in _inside(thing)]
    return found


def _inside(thing: object) -> Iterator[object]:
    if isinstance(thing, np.ndarray):
        yield thing.base  # memory that is mapped, at the end of a chain, is not counted
    elif isinstance(thing, dict):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, Containers):
        yield from thing
    elif type(thing).__module__.startswith("prefetchd"):
        yield from _attributes(thing)
    else:
        yield getattr(thing, "__self__", None)  # a bound method leads to its object


def _attributes(thing: object) -> Iterator[Any]:
    yield from vars(thing).values() if hasattr(thing, "__dict__") else ()
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(thing, name):
                yield getattr(thing, name)


def fill(runtime: Runtime) -> None:
    """Make every block of an empty store known without writing any: all are zeros."""
    catalog, layers = runtime._parts.catalog, runtime.geometry.layers
    zeros = np.zeros(runtime.page_bytes, np.uint8)
    checksums = np.array([page_checksum(zeros, 0, layer) for layer in range(layers)], np.uint64)
    for number in range(runtime.geometry.blocks):
        catalog.record(catalog.reserve(), number.to_bytes(16, "big"), 0, checksums, NEVER_NS)
        catalog.publish(number)


def stir(runtime: Runtime, read: int) -> None:
    """Decode for a few steps, so that every part has taken what it takes with its first use."""
    for step in range(STEPS * runtime.geometry.layers):
        layer = step % runtime.geometry.layers
        with runtime.demand(runtime.pages(np.arange(read), layer)) as ticket:
            assert not ticket.missing.any()
        runtime.engine.handle(Idle())


def bytes_a_page(blocks: int, layers: int, folder: Path | None = None) -> dict[str, float]:
    """By class, largest first, with the default options; in memory if there is no folder."""
    layout = uniform(layers, PAGE_BYTES)
    with prefetchd.open(folder, layout, blocks=blocks, fill=False, options=Options()) as runtime:
        read = min(READ_BLOCKS, blocks // 8)
        fill(runtime)
        stir(runtime, read)
        held = held_by(runtime)
    held.pop("Memory", 0)  # a device that is the medium itself
    return {name: size / (blocks * layers) for name, size in held.most_common()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--layers", type=int, default=LAYERS)
    asked = parser.parse_args()
    tracemalloc.start(1)
    with tempfile.TemporaryDirectory() as folder:
        found = bytes_a_page(asked.blocks, asked.layers, Path(folder))
    print(f"{asked.blocks * asked.layers:,} pages; bytes a page beside the staging buffer:")
    for name, size in found.items():
        if size >= SHOWN:
            print(f"{size:8.2f}  {name}")
    print(f"{sum(found.values()):8.2f}  together")
    print(f"{tracemalloc.get_traced_memory()[1] / asked.blocks / asked.layers:8.2f}  at the peak")


if __name__ == "__main__":
    main()
