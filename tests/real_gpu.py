"""Whether this machine has a GPU for the tests marked `cuda`, and why not."""

from __future__ import annotations

import pytest


def why_no_gpu() -> str:
    """Empty where CuPy and a GPU are there. It asks CuPy, so a faulty `Cuda` cannot skip itself."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "CUDA sees no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no usable GPU: {error}"


NO_GPU = why_no_gpu()
needs_gpu = [pytest.mark.cuda, pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)]
