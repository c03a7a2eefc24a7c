"""What a client says to the daemon; docs/protocol.md tells it in words.

Decides the client's messages and the limits on every length. A message is one msgpack array whose
first item says which message it is; arrays of numbers cross as raw little-endian bytes. What the
daemon answers is `replies`', how messages become frames `wire`'s.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

VERSION = 1
KEY_BYTES = 16

HELLO_BYTES_MAX = 1 << 16
"""Of a frame while nobody knows who is speaking."""
FRAME_BYTES_MAX = 1 << 21
IDS_MAX = KEYS_MAX = 1 << 16
INLINE_BYTES_MAX = 1 << 20
NAME_LENGTH_MAX = 64
USES_MAX = 256
"""Demands in a message that tells of pages read in place."""
TIMEOUT_NS_MAX = 3600 * 10**9

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Signed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
Word = Annotated[str, msgspec.Meta(max_length=256)]
Raw = bytes
"""Numbers: int64 unless the field says otherwise."""


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    pass


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
    in_place: bool = False
    """Whether it would read staged pages without asking."""


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


class Used(Message, tag=20, frozen=True):
    """Pages that were read in place: of one demand after another. Has no answer."""

    pages: Raw
    counts: Raw
    """Of pages, one a demand."""
    requests: Raw
    """One a demand."""
    scores: Raw | None = None
    """float32."""


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
    | Used
)
