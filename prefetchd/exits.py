"""What an error means to whoever typed the command: its exit code, and what is said of it.

Decides which errors are bad input and which are this machine's or this store's. Imported when
something has failed, since all the errors' modules together take a while.
"""

from __future__ import annotations

import errno

from prefetchd.bench.decode import WrongBytes
from prefetchd.bench.replay import ReplayError
from prefetchd.bench.report import ReportError
from prefetchd.bench.ring import BenchError
from prefetchd.device import DeviceError
from prefetchd.engine import EngineError
from prefetchd.gpu import GpuError
from prefetchd.guarded import PredictorError
from prefetchd.hostinfo import errno_name
from prefetchd.lab.score_workers import WorkersError
from prefetchd.lab.trace_format import TraceError
from prefetchd.layout import LayoutError
from prefetchd.registry import RegistryError, plugin_fault
from prefetchd.sidecar.place import PlaceError
from prefetchd.store import StoreError

_BAD_INPUT = (
    ReplayError,
    TraceError,
    LayoutError,
    RegistryError,
    PredictorError,
    ReportError,
    ValueError,
)
_REMEDIES = {
    errno.EMFILE: "; raise the limit of open files (ulimit -n)",
    errno.ENFILE: "; this machine has no more open files to give: see sysctl fs.file-max",
    errno.ENOMEM: "; ask for less (staging, depth, block size), or raise the limit (ulimit -v, or "
    "the container's)",
    errno.ENOSPC: "; free space, or name a place on another file system",
}
_CANNOT = (StoreError, DeviceError, GpuError, EngineError, BenchError, WorkersError, PlaceError)


def judged(error: Exception) -> tuple[int | None, object]:
    """The exit code, or None for what nobody foresaw, and what to say."""
    if isinstance(error, WrongBytes):
        return 4, error
    cause = error.__cause__ if isinstance(error, EngineError) and error.__cause__ else error
    if fault := plugin_fault(cause):
        return 2, fault
    if isinstance(error, (*_CANNOT, *_BAD_INPUT)):
        return 3 if isinstance(error, _CANNOT) else 2, error
    if isinstance(error, MemoryError | OverflowError):
        return 3, f"a number that was given is too large for this machine: {error or 'memory'}"
    if isinstance(error, OSError) and error.errno:
        where = f"{error.filename}: " if error.filename else ""
        return 3, f"{where}{errno_name(error.errno)}{_REMEDIES.get(error.errno, '')}"
    return None, error
