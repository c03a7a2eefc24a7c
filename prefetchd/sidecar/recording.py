"""Logs of events of a daemon's namespaces, which `prefetchd simulate events` replays.

Decides where they lie and when one ends: it has all events from the opening on or it is of no use,
so it ends where it has reached its size, where its writer cannot follow, or where the core's
policies or limits are changed, which is no event. Events are put aside as
they happen and written by a thread of the log's own. The format is the event log's.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import partial
from pathlib import Path

from prefetchd.core import Core
from prefetchd.hostinfo import errno_name
from prefetchd.lab.event_log import Entry, Header, Known, LogWriter, watch
from prefetchd.model import Command, Event
from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.namespaces import Namespaces

log = logging.getLogger("prefetchd")

_EVERY_S = 0.05
_WAITING_MAX = 1 << 16


class Recorder:
    """Of one namespace, from now until `close`."""

    def __init__(self, core: Core, path: Path, header: Header, limit_bytes: int) -> None:
        """Raises OSError."""
        self._core = core
        self._built = _built(core)
        self._path = path
        self._limit_bytes = limit_bytes
        if path.exists():
            path.replace(f"{path}.1")
        self._file = path.open("wb")
        self._writer = LogWriter(self._file, header)
        self._waiting: deque[Entry] = deque()
        self._ended = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetchd-events", daemon=True)
        self._thread.start()

    def note(self, now_ns: int, event: Event | Known, commands: list[Command]) -> None:
        """Called under the engine's lock."""
        if self._ended:
            return
        if any(new is not old for new, old in zip(_built(self._core), self._built, strict=True)):
            self._end("a policy or a limit was changed while serving")
            return
        self._waiting.append((now_ns, event, commands))
        if len(self._waiting) > _WAITING_MAX:
            self._end(f"{_WAITING_MAX} events wait to be written")

    def _end(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            log.warning("%s: the log of events ends here: %s", self._path, why)

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self._write()

    def _write(self) -> None:
        waiting = self._waiting
        if not waiting:
            return
        try:
            while waiting:
                if not self._writer.put(waiting.popleft(), self._limit_bytes):
                    self._end(f"it has reached its {self._limit_bytes} bytes")
                    waiting.clear()
            self._file.flush()
        except OSError as error:
            self._end(errno_name(error.errno or 0))
            waiting.clear()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._write()
        try:
            self._file.close()
        except OSError as error:
            self._end(errno_name(error.errno or 0))


def _built(core: Core) -> tuple[object, ...]:
    """What a core is made of, as far as it may be given another while it serves."""
    return core.staging.eviction, core.foresight.predictor, core.limits, core.planner.limits


def record_events(namespaces: Namespaces, folder: Path, limit_bytes: int) -> None:
    """Of every namespace that is opened from now on, in a file of its name. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    namespaces.on_open.append(partial(_record, folder, limit_bytes))


def _record(folder: Path, limit_bytes: int, namespace: Namespace) -> None:
    runtime, path = namespace.runtime, folder / f"{namespace.name}.events"
    header = Header(
        layers=runtime.geometry.layers,
        blocks=runtime.geometry.blocks,
        slots=runtime.slots,
        predictor=str(runtime.options.predictor),
        evict=runtime.options.evict,
    )
    try:
        recorder = Recorder(runtime.engine.core, path, header, limit_bytes)
    except OSError as error:
        log.error("%s: no events are logged: %s", path, errno_name(error.errno or 0))
        return
    with runtime.engine.lock:
        watch(runtime.engine.core, recorder.note)
    namespace.closing.append(recorder.close)
