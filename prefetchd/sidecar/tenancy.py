"""What makes an open namespace one among others: its gate to the drives, its turns in the loop.

Decides how the daemon's loop carries a namespace on, and what that counts for. Refuses to know
sockets and messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from prefetchd.device import DeviceError
from prefetchd.engine import EngineError
from prefetchd.gpu import GpuError
from prefetchd.layout import LayoutError
from prefetchd.registry import RegistryError
from prefetchd.sidecar.drives import Drives
from prefetchd.sidecar.loop_turns import BEGINS_COST, STEP_COST, LoopTurns
from prefetchd.sidecar.memory import Memory
from prefetchd.sidecar.namespace import Namespace, NamespaceSettings, open_namespace
from prefetchd.sidecar.session_puts import Later
from prefetchd.store import StoreError

log = logging.getLogger("prefetchd")

CANNOT_OPEN = (StoreError, DeviceError, GpuError, RegistryError, LayoutError, ValueError)


def use_drives(namespace: Namespace, drives: Drives, turns: LoopTurns, later: Later) -> None:
    """Have what it reads and writes share the drives with what others do."""
    engine = namespace.runtime.engine
    files = engine.driver.device.files
    if all(file.fd < 0 for file in files):
        return  # a store in memory
    task = partial(guarded, namespace, partial(_go_on, namespace))

    def offer() -> None:
        turns.offer(namespace.name, namespace.weight, ("go on", namespace), task)

    gate = drives.gate(files, namespace.weight, partial(later, offer), engine.clock)
    with engine.lock:
        engine.driver.gate = namespace.gate = gate


def guarded(namespace: Namespace, task: Callable[[], int]) -> int:
    """Do something for it; what that has cost. A fault ends this namespace and no other."""
    try:
        return task()
    except EngineError as error:
        log.info("namespace %s: %s", namespace.name, error)
    except Exception as error:
        log.exception("namespace %s: a fault of the daemon's", namespace.name)
        namespace.runtime.engine.fail(error)  # which tells its clients
    namespace.let_go_of_drives()
    return 0


def _go_on(namespace: Namespace) -> int:
    """It had to wait for others' use of a drive, and may begin something now."""
    engine = namespace.runtime.engine
    with engine.lock:
        engine.check()
        engine.driver.start(engine.clock())
    return BEGINS_COST


def offer_step(namespace: Namespace, turns: LoopTurns) -> None:
    """Have it learn and plan in its turn, if it wants to."""
    if namespace.runtime.engine.step_due:
        task = partial(guarded, namespace, partial(_step, namespace))
        turns.offer(namespace.name, namespace.weight, ("step", namespace), task)


def _step(namespace: Namespace) -> int:
    namespace.runtime.engine.step()
    namespace.runtime.engine.wake()  # the pump goes on if that took long
    return STEP_COST


def why_stopped(namespace: Namespace) -> str:
    try:
        namespace.runtime.engine.check()
    except EngineError as error:
        return str(error)
    return "the engine has stopped"


def opened_or_why(name: str, settings: NamespaceSettings, memory: Memory) -> Namespace | str:
    """An open namespace, or in words why not."""
    try:
        return open_namespace(name, settings, memory=memory)
    except CANNOT_OPEN as error:
        return str(error)
    except Exception as error:
        log.error("namespace %s cannot be opened", name, exc_info=error)
        return f"namespace {name!r} cannot be opened; the daemon's log says why"
