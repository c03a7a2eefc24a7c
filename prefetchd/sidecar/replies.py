"""What the daemon says to a client; docs/protocol.md tells it in words.

Decides the daemon's messages, the limits that it tells, and the codes of its errors. What a client
says, and what every message is made of, is `protocol`'s.
"""

from __future__ import annotations

from typing import Any

from prefetchd.sidecar.protocol import (
    FRAME_BYTES_MAX,
    IDS_MAX,
    INLINE_BYTES_MAX,
    KEYS_MAX,
    Message,
    Number,
    Raw,
    Signed,
    Word,
)


class Limits(Message, frozen=True):
    """What a client must keep to; more is refused, or ends the connection."""

    frame_bytes: Number = FRAME_BYTES_MAX
    ids: Number = IDS_MAX
    keys: Number = KEYS_MAX
    inline_bytes: Number = INLINE_BYTES_MAX
    tickets: Number = 1024
    puts: Number = 64
    buffers: Number = 64
    buffer_bytes: Number = 1 << 38
    """Of shared buffers, together."""
    pushes: Number = 64


class Welcome(Message, tag=33, frozen=True):
    """The answer to Hello. With it come descriptors: the arena's, those of books and marks if
    `in_place`, the write arena's if `write_bytes` is not 0. Slot s lies at `arena_offset` +
    s x `slot_bytes`."""

    version: Number
    daemon: Word
    pid: Number
    opening: bytes
    """16 bytes, others each time the namespace is opened."""
    layers: Number
    blocks: Number
    page_bytes: Number
    slot_bytes: Number
    slots: Number
    fingerprint: bytes
    arena_offset: Number
    write_bytes: Number
    demand_timeout_ns: Number
    limits: Limits
    notes: list[str]
    medium: tuple[str, str, int, int]
    in_place: bool = False


class Found(Message, tag=34, frozen=True):
    id: Number
    blocks: Raw
    stamps: Raw


class Pages(Message, tag=35, frozen=True):
    """`waits`: of each page, ns; None: all 0."""

    id: Number
    slots: Raw
    outcomes: Raw
    """uint8."""
    waits: Raw | None = None


class PutEnd(Message, tag=36, frozen=True):
    id: Number
    blocks: Raw
    stamps: Raw
    failures: list[str]
    refused: list[int]


class Told(Message, tag=37, frozen=True):
    """Counters, by name."""

    id: Number
    stats: dict[str, Any]


class Pong(Message, tag=38, frozen=True):
    id: Number


class Erased(Message, tag=43, frozen=True):
    """The answer to Erase; the namespace is there again, and empty."""

    blocks: Number
    """That were found in it."""
    size: Number
    """Bytes of the files that are gone."""


class Error(Message, tag=39, frozen=True):
    """`id` 0: of the connection as a whole, which ends. `code`: see CODES."""

    id: Number
    code: str
    words: str


class Advice(Message, tag=40, frozen=True):
    """Load the first `blocks` of `found`. None: never measured."""

    id: Number
    blocks: Number
    found: Number
    load_ns: Number | None
    recompute_ns: Number
    chosen_ns: Number | None
    words: str


class Grown(Message, tag=41, frozen=True):
    """`stamp`: until it is sealed."""

    id: Number
    block: Number
    stamp: Signed


class Sealed(Message, tag=42, frozen=True):
    """When the put has ended. `block`: -1 if it was not stored, another's if that had the key.
    `is_open`: it was not taken, and is open as before."""

    id: Number
    block: Signed
    stamp: Signed
    failures: list[str]
    refused: bool
    is_open: bool


class Shared(Message, tag=44, frozen=True):
    """`engine`: what pushes, in words."""

    id: Number
    engine: Word


class Pushed(Message, tag=45, frozen=True):
    """The pages are in the buffer, whichever stream reads it from now on."""

    id: Number
    pages: Number


Reply = (
    Welcome
    | Found
    | Pages
    | PutEnd
    | Told
    | Pong
    | Erased
    | Error
    | Advice
    | Grown
    | Sealed
    | Shared
    | Pushed
)

CODES = {
    "bad_request": "the request makes no sense; nothing was done",
    "limit": "more than the limits in Welcome; nothing was done",
    "unable": "the daemon cannot do this here, or it failed (the words say why)",
    "denied": "no such namespace, or not this client's",
    "stopped": "the namespace's engine has stopped, or the daemon is stopping",
    "protocol": "what came is no message; the connection ends",
}
