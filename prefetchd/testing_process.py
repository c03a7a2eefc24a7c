"""The same traffic in another process, where strings have other hashes.

Decides how that process finds the predictor and how its guesses come back.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from operator import attrgetter
from typing import Any

from prefetchd.model import Geometry
from prefetchd.registry import predictor_class
from prefetchd.testing_play import Make, Play, Space

_TIMEOUT_S = 300
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
    "from prefetchd.testing_process import tell; tell(sys.argv[2], *map(int, sys.argv[3:]))"
)


def guesses_elsewhere(source: str, space: Space, *, hash_seed: str) -> list[list[Any]] | str:
    """The guesses in `space` of a new process under this PYTHONHASHSEED, or why there are none.

    `source`: `module:path` of a factory, or what the registry knows.
    """
    sizes = space.geometry.layers, space.geometry.blocks, space.slots, space.turns
    command = [sys.executable, "-c", _CODE, json.dumps(sys.path), source, *map(str, sizes)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took over {_TIMEOUT_S} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    guesses: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return guesses


def tell(source: str, layers: int, blocks: int, slots: int, turns: int) -> None:
    """Print the guesses, in the last line; called in the other process."""
    if ":" in source:
        module, path = source.split(":", 1)
        make: Make = attrgetter(path)(importlib.import_module(module))
    else:
        make = predictor_class(source)
    print(json.dumps(Play(make, Space(Geometry(layers, blocks), slots, turns)).run()))
