"""What makes an open namespace one among others: its gate to the drives, its turns in the loop.

Decides how the daemon's loop carries a namespace on, and what that counts for. Refuses to know
sockets and messages.
"""

from __future__ import annotations

import logging
from functools import partial

from prefetchd.engine import EngineError
from prefetchd.sidecar.drives import Drives
from prefetchd.sidecar.loop_turns import FRAME_COST
from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.session_puts import Later

log = logging.getLogger("prefetchd")

_PAGE_COST, _BYTES_A_COST = 64, 256
"""Of a page that has come from a drive and is checked, beside a message of as many bytes."""


def use_drives(namespace: Namespace, drives: Drives, later: Later) -> None:
    """Have what it reads and writes share the drives with what others do."""
    engine = namespace.runtime.engine
    files = engine.driver.device.files
    if any(file.fd < 0 for file in files):
        return  # a store in memory
    gate = drives.gate(files, namespace.weight, partial(later, partial(go_on, namespace)))
    with engine.lock:
        engine.driver.gate = namespace.gate = gate


def go_on(namespace: Namespace) -> None:
    """It had to wait for others' use of a drive, and may begin something now."""
    engine = namespace.runtime.engine
    try:
        with engine.lock:
            engine.check()
            engine.driver.start(engine.clock())
    except EngineError as error:
        log.info("namespace %s: %s", namespace.name, error)
        namespace.let_go_of_drives()


def collect(namespace: Namespace) -> int:
    """Take note of what its device has finished; what that has cost the loop. Raises
    EngineError."""
    runtime = namespace.runtime
    before = runtime.engine.core.reading
    runtime.engine.collect()
    pages = max(0, before - runtime.engine.core.reading)
    return FRAME_COST + pages * (_PAGE_COST + runtime.page_bytes // _BYTES_A_COST)
