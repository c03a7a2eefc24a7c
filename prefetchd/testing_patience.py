"""How long a check waits for one call of a hook: a loop without end would end no check.

Decides the limit. It is of the process's own time, so a slow or busy machine is no fault; who waits
for something else is not seen. Python runs signal handlers in its main thread only: elsewhere there
is no limit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PATIENCE_S = 20.0


@contextmanager
def in_time() -> Iterator[None]:
    """Raises TimeoutError in the midst of what is done in it, if that takes `PATIENCE_S`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"the call took over {PATIENCE_S:g} s of processor time")
