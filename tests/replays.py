"""Small replays for tests: a trace of a few steps, the command line in this process or in another.

A test helper; holds no tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefetchd import metrics
from prefetchd.bench.replay import ReplaySettings, prepare_store, replay_decode
from prefetchd.bench.replay import Report as Progress
from prefetchd.cli import main
from prefetchd.lab.attention import read_attention
from prefetchd.lab.workload import Workload, batched

STEPS, LAYERS, HEADS, BLOCKS, RANKS = 6, 4, 2, 20, 4
BLOCK_TOKENS = 16
PAGE_BYTES = 4096
QUICK = [
    *("--layer-us", "0", "--idle-s", "0", "--page-bytes", "4KiB", "--top-k", "2"),
    *("--warmup", "1", "--rounds", "1", "--staging", "50%"),
]


def trace_columns() -> dict[str, Any]:
    """A decode that keeps to its sink and its newest block and looks at two others now and then."""
    random = np.random.default_rng(7)
    shape = (STEPS, LAYERS, HEADS)
    ids = np.zeros((*shape, RANKS), np.uint16)
    ids[..., 1] = BLOCKS - 1
    for place in np.ndindex(shape):
        ids[(*place, slice(2, RANKS))] = random.permutation(BLOCKS - 2)[: RANKS - 2] + 1
    ids = random.permuted(ids, axis=-1)
    mass = np.sort(random.random(ids.shape), axis=-1)[..., ::-1].astype(np.float16)
    return {
        "block_ids": ids,
        "mass": mass,
        "hint_ids": ids,
        "hint_mass": mass,
        "prompt_tokens": np.int64((BLOCKS - 2) * BLOCK_TOKENS),
        "block_tokens": np.int64(BLOCK_TOKENS),
    }


def write_trace(path: Path, **changes: Any) -> Path:
    """A trace of these columns; None leaves one out."""
    columns = {**trace_columns(), **changes}
    np.savez(path, **{name: value for name, value in columns.items() if value is not None})
    return path


def workload(
    path: Path,
    *,
    requests: int = 1,
    shared: float = 0.0,
    top_k: int = 2,
    steps: int | None = None,
) -> Workload:
    trace = read_attention(path)
    return batched(trace, top_k=top_k, steps=steps, requests=requests, shared_share=shared)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    def failed(self, code: int, *words: str) -> None:
        """It ended with this code, saying all of these words in one line and nothing worse."""
        assert self.code == code, self.err
        assert "Traceback" not in self.err
        told = self.err.strip().splitlines()[-1]
        assert told.startswith("error: ")
        assert not [word for word in words if word not in told], told

    def result(self) -> metrics.Result:
        assert self.code == 0, self.err
        return metrics.decode(self.out.encode())


def run_here(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Done:
    """The command line in this process."""
    capsys.readouterr()
    code: Any = 0
    try:
        main([str(word) for word in words])
    except SystemExit as end:
        code = end.code or 0
    captured = capsys.readouterr()
    return Done(int(code), captured.out, captured.err)


def run_child(words: Sequence[str | Path], *, prelude: str = "", cwd: Path | None = None) -> Done:
    """The command line in a process of its own, after `prelude` (Python) has changed it."""
    code = f"{prelude}\nfrom prefetchd.cli import main\nmain()"
    command = [sys.executable, "-c", code, *(str(word) for word in words)]
    child = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, cwd=cwd
    )
    return Done(child.returncode, child.stdout, child.stderr)


def replay_words(trace: Path, folder: Path, *words: str | Path) -> list[str | Path]:
    """A quick replay of `trace` on a store in `folder`, its JSON on stdout, with these options."""
    return ["replay", "decode", trace, "--store", folder, *QUICK, "--json", "-", *words]


def replay_with(
    folder: Path, trace: Path, settings: ReplaySettings, *, prepared_by: str = "threads"
) -> metrics.Result:
    """A replay through Python, for devices and limits the command line does not offer.

    The store is written through `prepared_by` first, so that the device under test only reads.
    """
    load = workload(trace)
    prepare_store(
        folder, load, ReplaySettings(page_bytes=PAGE_BYTES, device=prepared_by), Progress()
    )
    return replay_decode(folder, load, settings)
