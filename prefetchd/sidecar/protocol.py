"""What client and daemon say to each other; docs/protocol.md tells it in words.

Decides messages and the limits on every length. A message is one msgpack array whose first item
says which message it is; arrays of numbers cross as raw little-endian bytes. How messages become
frames is `wire`'s.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

VERSION = 1
KEY_BYTES = 16

HELLO_BYTES_MAX = 1 << 16
"""Of a frame while nobody knows who is speaking."""
FRAME_BYTES_MAX = 1 << 21
IDS_MAX = KEYS_MAX = 1 << 16
INLINE_BYTES_MAX = 1 << 20
NAME_LENGTH_MAX = 64
TIMEOUT_NS_MAX = 3600 * 10**9

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Signed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
Word = Annotated[str, msgspec.Meta(max_length=256)]
Raw = bytes
"""Numbers: int64 unless the field says otherwise."""


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    pass


# --- from the client ---


class Shape(Message, frozen=True):
    """Of a store that is to be made, or must be the one that is there."""

    name: Word
    layers: Number
    page_bytes: Number
    fingerprint: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Hello(Message, tag=1, frozen=True):
    """The first message. `shape`, `blocks`: for a namespace that is made when it is asked for."""

    version: Number
    namespace: Name
    token: Word = ""
    shape: Shape | None = None
    blocks: Number = 0
    write_bytes: Number = 0
    """Wanted of a write arena; 0: none."""


class Find(Message, tag=2, frozen=True):
    id: Number
    keys: Raw
    """16 bytes each."""


class Demand(Message, tag=3, frozen=True):
    """`id` names the ticket, too: the client chooses it and must not use it twice."""

    id: Number
    pages: Raw
    timeout_ns: Signed = -1
    """-1: the daemon's own."""
    stamps: Raw | None = None
    scores: Raw | None = None
    """float32."""
    request: Signed = 0


class Release(Message, tag=4, frozen=True):
    """Has no answer."""

    tickets: Raw


class Put(Message, tag=5, frozen=True):
    """The blocks' bytes, one block after another: in `data`, or in the write arena at `offset`."""

    id: Number
    keys: Raw
    offset: Number = 0
    data: bytes | None = None
    durability: Word = "durable"
    ttl_s: float | None = None


class HintPages(Message, tag=6, frozen=True):
    """No hint has an answer."""

    pages: Raw
    scores: Raw
    """float32."""


class HintChain(Message, tag=7, frozen=True):
    request: Signed
    blocks: Raw
    lead_ns: Signed | None = None
    """From now until it is expected."""


class HintDone(Message, tag=8, frozen=True):
    request: Signed
    reason: Word = ""
    lead_ns: Signed | None = None
    blocks: Raw = b""


class AskStats(Message, tag=9, frozen=True):
    id: Number


class Ping(Message, tag=10, frozen=True):
    id: Number


class Advise(Message, tag=11, frozen=True):
    """`pairs_s`: of attention; None: too little to count."""

    id: Number
    blocks: Raw
    prefill_tokens_s: float
    block_tokens: Number = 16
    pairs_s: float | None = None


class Grow(Message, tag=12, frozen=True):
    """Open a block for tokens to come."""

    id: Number
    request: Signed = 0


class Write(Message, tag=13, frozen=True):
    """Into the page of one layer of an open block of this client's, from byte `at` on."""

    id: Number
    block: Number
    layer: Number
    at: Number
    data: bytes


class Seal(Message, tag=14, frozen=True):
    id: Number
    block: Number
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    durability: Word = "durable"
    ttl_s: float | None = None


class Drop(Message, tag=15, frozen=True):
    """Has no answer."""

    block: Number


class Erase(Message, tag=16, frozen=True):
    """Instead of Hello: nothing of the namespace's content is to be left."""

    version: Number
    namespace: Name
    token: Word = ""
    overwrite: bool = False
    """Write zeros over its files before they go."""


class Share(Message, tag=17, frozen=True):
    """Lend a GPU buffer to the daemon. `id` names the buffer, too, until it is given back."""

    id: Number
    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    """cudaIpcMemHandle_t."""
    pages: Number
    gpu: Word
    """Which one: PCI bus id, a space, UUID in hexadecimal."""


class Push(Message, tag=18, frozen=True):
    """Gather a ticket's pages into rows of a shared buffer."""

    id: Number
    ticket: Number
    buffer: Number
    start: Number = 0
    skip_missing: bool = False


class Unshare(Message, tag=19, frozen=True):
    id: Number
    buffer: Number


Request = (
    Hello
    | Find
    | Demand
    | Release
    | Put
    | HintPages
    | HintChain
    | HintDone
    | AskStats
    | Ping
    | Advise
    | Grow
    | Write
    | Seal
    | Drop
    | Erase
    | Share
    | Push
    | Unshare
)


# --- from the daemon ---


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
    """The answer to Hello. With it come descriptors: the arena's, then the write arena's if
    `write_bytes` is not 0. Slot s lies at `arena_offset` + s x `slot_bytes`."""

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
