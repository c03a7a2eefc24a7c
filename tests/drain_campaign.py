"""A process that drains one path after the other, detaches it and attaches another in its place is
killed at random moments; nothing may be lost.

`python -m tests.drain_campaign --rounds 100` runs as many rounds as it is told.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

import prefetchd
from prefetchd import Runtime, draining, uniform
from tests.crash_campaign import LAYERS, OPTIONS, PAGE_BYTES, is_there, key_of, pages_of, tell

BLOCKS, KEYS = 36, 10


def open_store(path: Path, *, scan: bool = False) -> Runtime:
    options = replace(OPTIONS, device="threads", lease_s=0, scan=scan)
    beside = [path.with_name(path.name + name) for name in ("-2", "-3")]
    return prefetchd.open(
        path, uniform(LAYERS, PAGE_BYTES), blocks=BLOCKS, fill=False, paths=beside, options=options
    )


def work(path: Path) -> None:
    """Have one path and then the other replaced, again and again, until killed."""
    draining.BYTES_S, draining._LOOK_S = 1 << 40, 0.001
    with open_store(path) as runtime:
        pages = np.concatenate([pages_of(number) for number in range(KEYS)])
        runtime.put([key_of(number) for number in range(KEYS)], pages).wait()
        tell("open")
        while True:
            for number in (1, 2):
                old = runtime.folders[number]
                runtime.reconfigure(drain=(str(old),))
                runtime.engine.wait(partial(_is_empty, runtime, number))
                tell("moved")
                runtime.detach(old)
                tell("detached")
                runtime.attach(old, _fresh(path, runtime), fill=False)
                tell("attached")


def _fresh(path: Path, runtime: Runtime) -> Path:
    """A folder that is not there, once those that nobody uses are gone."""
    for folder in path.parent.glob(f"{path.name}-*"):
        if folder not in runtime.folders:
            shutil.rmtree(folder)
    return next(
        one for n in range(2, 9) if not (one := path.with_name(f"{path.name}-{n}")).exists()
    )


def _is_empty(runtime: Runtime, number: int) -> bool:
    return runtime._parts.catalog.taken_on(number) == 0


def killed(path: Path, seed: int) -> int:
    """How many drains a child has ended before it was killed."""
    words = [sys.executable, "-m", "tests.drain_campaign", "--work", str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n", "the child did not come up"
        delay_s = float(np.random.default_rng(seed).random()) * 0.3
        timer = threading.Timer(delay_s, child.kill)
        timer.start()
        moved = len(child.stdout.read().splitlines())
        timer.join()
    assert child.returncode == -9, f"the child ended by itself with {child.returncode}"
    return moved


def campaign(path: Path, rounds: int) -> int:
    """`rounds` children on one store; how many blocks were found afterwards, in all."""
    found = 0
    for seed in range(rounds):
        killed(path, seed)
        for scan in (False, True):
            with open_store(path, scan=scan) as runtime:
                assert all(is_there(runtime, number) for number in range(KEYS))
                stats = runtime.stats()
                assert stats.failures == {}, stats.failures
                assert stats.blocks_visible == stats.store_writes.blocks_used == KEYS
        found += KEYS
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(given.work)
    with tempfile.TemporaryDirectory() as folder:
        print(f"{campaign(Path(folder) / 'kv', given.rounds)} blocks found again, nothing lost")
    return None


if __name__ == "__main__":
    main()
