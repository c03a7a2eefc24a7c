"""A log of what a core was told and what it said: written as it happens, given to another core.

Decides the format of the file and what counts as the same command: the same fields, and arrays of
the same type, length and bytes. Knows no policy; which core a log is replayed on is the caller's.

A log is a sequence of msgpack messages, each behind its length (4 bytes, little-endian): first the
header, then one [now_ns, event, commands] an event. An object is {its class: [its fields]}; an
array is extension 1: its dtype as text, a zero byte, its bytes. Where the core asked which pages
the store has, or which slots are read, an entry `Known` with the answers stands before the event
for which it did.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np

from prefetchd import model
from prefetchd.core import Core
from prefetchd.model import Command, Event, Ids, Mask, Slots

SCHEMA: Literal["prefetchd.events/1"] = "prefetchd.events/1"
_ARRAY = 1
_LENGTH_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """Which of the pages that the core asked for the store had, and which places among the slots
    that it asked for are read, answer by answer. `reading` None: nobody reads without asking."""

    masks: list[Mask]
    reading: list[Ids] | None = None


Entry = tuple[int, Event | Known, list[Command]]
Record = Callable[[int, Event | Known, list[Command]], None]


class EventLogError(ValueError):
    """A log cannot be read, or a core does not do what it says: which entry, what."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """How the core was built that the events were for."""

    layers: int
    blocks: int
    slots: int
    predictor: str
    evict: str
    schema: Literal["prefetchd.events/1"] = SCHEMA


def watch(core: Core, note: Record) -> None:
    """From now on tell `note` of every event that `core` handles, and of what came of it."""
    handle, known, readers = core.handle, core.planner.known, core.staging.readers
    masks: list[Mask] = []
    places: list[Ids] = []

    def watched(event: Event, now_ns: int) -> list[Command]:
        masks.clear()
        places.clear()
        commands = handle(event, now_ns)
        if masks or places:
            note(now_ns, Known(masks.copy(), None if readers is None else places.copy()), [])
        note(now_ns, event, commands)
        return commands

    def asked(pages: Ids) -> Mask:
        assert known is not None
        masks.append(mask := known(pages))
        return mask

    def reading(slots: Slots | None) -> Mask:
        assert readers is not None
        mask = readers.reading(slots)
        places.append(np.flatnonzero(mask))
        return mask

    core.planner.known = None if known is None else asked
    core.staging.readers = None if readers is None else _Readers(reading)
    core.handle = watched  # type: ignore[method-assign]


def replay(core: Core, entries: Iterable[Entry]) -> int:
    """Give a core all events; how many. Raises EventLogError where it does anything else than the
    core that they were logged from."""
    count = 0
    masks: deque[Mask] = deque()
    places: deque[Ids] = deque()
    for now_ns, event, commands in entries:
        if isinstance(event, Known):
            masks.extend(event.masks)
            core.planner.known = partial(_known, masks)
            if event.reading is not None:
                places.extend(event.reading)
                reading = partial(_reading, places, core.staging.slots)
                core.staging.readers = _Readers(reading)
            continue
        came = core.handle(event, now_ns)
        if masks or places or _ENCODER.encode(_plain(came)) != _ENCODER.encode(_plain(commands)):
            raise EventLogError(f"entry {count}, {event}: logged {commands}, but here came {came}")
        count += 1
    return count


@dataclasses.dataclass(frozen=True, slots=True)
class _Readers:
    reading: Callable[[Slots | None], Mask]


def _known(masks: deque[Mask], pages: Ids) -> Mask:
    if not masks or len(masks[0]) != len(pages):
        raise EventLogError(f"the logged core did not ask for {len(pages)} pages here")
    return masks.popleft()


def _reading(places: deque[Ids], all_slots: int, slots: Slots | None) -> Mask:
    count = all_slots if slots is None else len(slots)
    if not places or places[0].max(initial=-1) >= count:
        raise EventLogError(f"the logged core did not ask who reads {count} slots here")
    mask = np.zeros(count, np.bool_)
    mask[places.popleft()] = True
    return mask


class LogWriter:
    """Writes a log to an open file; `note` is what `watch` and a virtual engine take."""

    def __init__(self, file: BinaryIO, header: Header) -> None:
        self._file = file
        self._bytes = 0
        self._write(_ENCODER.encode(header))

    def note(self, now_ns: int, event: Event | Known, commands: list[Command]) -> None:
        self._write(_ENCODER.encode(_plain([now_ns, event, commands])))

    def put(self, entry: Entry, limit_bytes: int) -> bool:
        """Write an entry unless the log would grow beyond its limit; whether it was written."""
        data = _ENCODER.encode(_plain(list(entry)))
        if self._bytes + _LENGTH_BYTES + len(data) > limit_bytes:
            return False
        self._write(data)
        return True

    def _write(self, data: bytes) -> None:
        self._bytes += _LENGTH_BYTES + len(data)
        self._file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def read_log(path: Path) -> tuple[Header, Iterator[Entry]]:
    """The header, and the entries one by one. A last entry that was cut off is left out.

    Raises EventLogError, also from the iterator.
    """
    with path.open("rb") as file:
        data = _message(file)
        start = file.tell()
    try:
        header = msgspec.msgpack.decode(data, type=Header)
    except msgspec.DecodeError as error:
        raise EventLogError(f"{path} is not a log of events: {error}") from error
    return header, _entries(path, start)


def count_entries(path: Path) -> int:
    """How many a log has, without reading them."""
    count, size = -1, path.stat().st_size  # the header is none
    with path.open("rb") as file:
        while length := int.from_bytes(file.read(_LENGTH_BYTES), "little"):
            count += file.seek(length, 1) <= size
    return max(0, count)


def _entries(path: Path, start: int) -> Iterator[Entry]:
    with path.open("rb") as file:
        file.seek(start)
        while data := _message(file):
            try:
                now_ns, event, commands = _revived(_DECODER.decode(data))
            except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
                raise EventLogError(f"{path} is damaged before {file.tell()}: {error!r}") from error
            yield now_ns, event, commands


def _message(file: BinaryIO) -> bytes:
    """The next message; empty where none is there as a whole."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    data = file.read(length)
    return data if len(data) == length else b""


_CLASSES: dict[str, type[Any]] = {
    name: value
    for name, value in vars(model).items()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
}
_CLASSES["Known"] = Known


def _plain(value: Any) -> Any:
    """What msgpack can write."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, value.dtype.str.encode() + b"\0" + value.tobytes())
    if dataclasses.is_dataclass(value):
        fields = [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {type(value).__name__: fields}
    return int(value) if isinstance(value, (IntEnum, np.integer)) else value


def _revived(value: Any) -> Any:
    if isinstance(value, list):
        return [_revived(item) for item in value]
    if isinstance(value, dict):
        [(name, fields)] = value.items()
        return _CLASSES[name](*_revived(fields))
    return value


def _array(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"extension {code} is none of ours")
    dtype, _, values = bytes(data).partition(b"\0")
    return np.frombuffer(values, np.dtype(dtype.decode()))


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ext_hook=_array)
