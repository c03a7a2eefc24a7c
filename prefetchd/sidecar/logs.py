"""The daemon's log for machines: one JSON object a line.

Decides the fields. What is logged, and that trouble of a kind is said once a path, is decided where
it is met; which namespace, path and error a line concerns is read from its arguments, so that no
line need say it twice.
"""

from __future__ import annotations

import errno
import logging
import re
from datetime import UTC, datetime
from typing import Any

import msgspec

from prefetchd.sidecar.namespace import Namespace
from prefetchd.sidecar.namespaces import Namespaces

_ERROR = re.compile(r"\bE[A-Z][A-Z0-9]+\b")
_SPACE = re.compile(r"\bnamespace '?([A-Za-z0-9._-]*[A-Za-z0-9])")
_NUMBERS = {name: code for code, name in errno.errorcode.items()}


class JsonLines(logging.Formatter):
    """`time` (UTC), `level`, `event`; where known `namespace`, `path`, `errno` (its name) and
    `traceback`."""

    for_machines = True
    """`cli` tells by it that what ends a command is to be said in the log."""

    def __init__(self, namespaces: Namespaces) -> None:
        super().__init__()
        self._namespaces = namespaces
        self._paths: dict[str, str] = {}
        namespaces.on_open.append(self._learn)

    def _learn(self, namespace: Namespace) -> None:
        paths = namespace.runtime.stats().paths
        self._paths.update({path.path: namespace.name for path in paths})

    def format(self, record: logging.LogRecord) -> str:
        event = record.getMessage()
        path, owner = self._path(record)
        named = _SPACE.search(event)
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": event,
            "namespace": named[1] if named else owner,
            "path": path,
            "errno": _errno(event, record),
            "traceback": self.formatException(record.exc_info) if record.exc_info else "",
        }
        return msgspec.json.encode({k: v for k, v in fields.items() if v}).decode()

    def _path(self, record: logging.LogRecord) -> tuple[str, str]:
        """The first argument that is a place of a store's, and whose it is."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        for said in map(str, arguments):
            if said in self._paths:
                return said, self._paths[said]
            for name, settings in list(self._namespaces.settings.items()):
                place = str(settings.path or "in memory")
                if said == place or said.startswith(f"{place}/"):
                    return said, name
        return "", ""


def _errno(event: str, record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error.errno))
    return next((word for word in _ERROR.findall(event) if word in _NUMBERS), "")


def log_as_json(namespaces: Namespaces) -> None:
    """From here on, in this process; all that is worth knowing, from before stores are opened."""
    formatter = JsonLines(namespaces)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
    logging.getLogger("prefetchd").setLevel(logging.INFO)
