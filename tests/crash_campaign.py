"""A process that puts, reads and evicts is killed at random moments; what it was told must hold.

`python -m tests.crash_campaign --rounds 200` runs as many rounds as it is told. The child tells
through a pipe which keys are durable (`+n`, after the acknowledgement) and which it no longer keeps
from being evicted (`-n`, before it stops using them). The parent kills it, opens the store twice,
believing the journal and not, and compares.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import prefetchd
from prefetchd import Options, Runtime, uniform
from tests.runtime_bench import PLAIN

BLOCKS, LAYERS, PAGE_BYTES = 24, 2, 4096
KEYS, KEPT = 60, 8
OPTIONS: Options = replace(PLAIN, staging_bytes=20 * PAGE_BYTES, flush_after_s=0.05)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def pages_of(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (1, LAYERS, PAGE_BYTES), np.uint8)


def open_store(path: Path, device: str, *, scan: bool = False) -> Runtime:
    options = replace(OPTIONS, device=device, scan=scan)
    layout = uniform(LAYERS, PAGE_BYTES)
    beside = [path.with_name(path.name + "-2")]
    return prefetchd.open(path, layout, blocks=BLOCKS, fill=False, paths=beside, options=options)


def is_there(runtime: Runtime, number: int) -> bool:
    """Whether a key is found; what is then read must be what was put under it."""
    blocks = runtime.lookup([key_of(number)])
    for layer in range(LAYERS if len(blocks) else 0):
        with runtime.demand(runtime.pages(blocks, layer)) as ticket:
            assert not ticket.missing.any(), f"a page of key {number} does not verify"
            assert np.array_equal(ticket.view(0), pages_of(number)[0, layer]), "wrong bytes"
    return len(blocks) > 0


def tell(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def work(path: Path, device: str, seed: int) -> None:
    """Put, read and evict until killed."""
    random = np.random.default_rng(seed)
    kept: list[int] = []
    with open_store(path, device) as runtime:
        tell("open")
        while True:
            for number in kept:  # used all the time, so never the first to be evicted
                runtime.lookup([key_of(number)])
            chosen = random.choice(KEYS, int(random.integers(1, 4)), replace=False).tolist()
            durable = bool(random.random() < 0.6)
            pages = np.concatenate([pages_of(number) for number in chosen])
            level = "durable" if durable else "fast"
            put = runtime.put([key_of(n) for n in chosen], pages, durability=level).wait()
            assert put.blocks.min() >= 0, put.failures
            for number in chosen if durable else []:
                if number not in kept:
                    kept.append(number)
                    tell(f"+{number}")
                if len(kept) > KEPT:
                    tell(f"-{kept.pop(0)}")
            is_there(runtime, int(random.integers(KEYS)))


def killed(path: Path, device: str, seed: int) -> set[int]:
    """Run a child, kill it at a random moment; the keys it was promised."""
    words = [sys.executable, "-m", "tests.crash_campaign", "--work", str(path), device, str(seed)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n", "the child did not come up"
        delay_s = float(np.random.default_rng(seed).random()) * 0.3
        timer = threading.Timer(delay_s, child.kill)
        timer.start()
        promised: set[int] = set()
        for line in child.stdout.read().splitlines():  # short writes to a pipe are whole
            number = int(line[1:])
            (promised.add if line[0] == "+" else promised.discard)(number)
        timer.join()
    assert child.returncode == -9, f"the child ended by itself with {child.returncode}"
    return promised


def check(path: Path, device: str, promised: set[int]) -> int:
    """What a killed child left behind; how many keys were found."""
    seen = []
    for scan in (False, True):
        with open_store(path, device, scan=scan) as runtime:
            found = {number for number in range(KEYS) if is_there(runtime, number)}
            stats = runtime.stats()
            assert promised <= found, f"durable keys are gone: {promised - found}"
            assert stats.failures == {}, stats.failures
            assert stats.blocks_visible == stats.store_writes.blocks_used == len(found)
            seen.append(found)
    assert seen[0] == seen[1], "journal and headers do not agree"
    return len(seen[0])


def campaign(
    path: Path, rounds: int, device: str, done: Callable[[int], object] = lambda number: None
) -> int:
    """`rounds` children on one store; how many promises were kept."""
    kept = 0
    open_store(path, device).close()
    for number in range(rounds):
        promised = killed(path, device, number)
        check(path, device, promised)
        kept += len(promised)
        done(number)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", default="uring")
    parser.add_argument("--folder", type=Path, help="on the drive to use")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(Path(given.work[0]), given.work[1], int(given.work[2]))
        return
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        kept = campaign(folder / "kv", given.rounds, given.device)
    finally:
        shutil.rmtree(folder)
    print(f"{given.rounds} kills, {kept} durable blocks read back, nothing lost, nothing wrong")


if __name__ == "__main__":
    main()
