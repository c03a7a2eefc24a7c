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
AGAIN_S = 1.0
"""So much later it is said again, to who caught it and went on."""


class TooLong(BaseException):
    """No Exception, which a hook may catch without meaning this one."""


@contextmanager
def in_time() -> Iterator[None]:
    """Raises TooLong in the midst of what is done in it, if that takes `PATIENCE_S`; and at its
    end, if it was caught there, or else every call would take as long."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    said: list[TooLong] = []

    def too_long(_number: int, _frame: FrameType | None) -> None:
        said.append(TooLong(f"the call took over {PATIENCE_S:g} s of processor time"))
        raise said[-1]

    before = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE_S, AGAIN_S)
    try:
        yield
    except Exception:
        if not said:
            raise
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    if said:
        raise said[0]
