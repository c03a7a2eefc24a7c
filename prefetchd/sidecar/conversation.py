"""The client's side of the protocol, without a socket: requests out, replies to whoever waits.

Decides what every request looks like and what its answer means, also the answer that nothing will
come: a demand's pages are missing, a lookup finds nothing, a put has failed. Refuses to know how
bytes travel and who waits how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from prefetchd.lookups import Found, Stamps
from prefetchd.model import (
    NO_IDS,
    ChainHint,
    DoneHint,
    Geometry,
    Hint,
    Ids,
    Outcome,
    PageHint,
    Ready,
    Scores,
)
from prefetchd.sidecar import protocol, replies
from prefetchd.sidecar.arena import map_books, map_own, map_staging
from prefetchd.sidecar.in_place import InPlace
from prefetchd.sidecar.marks import Marks, marks_bytes
from prefetchd.sidecar.protocol import (
    USES_MAX,
    Demand,
    Find,
    HintChain,
    HintDone,
    HintPages,
    Message,
    Put,
    Release,
    Used,
)
from prefetchd.sidecar.replies import Error, Reply, Welcome
from prefetchd.sidecar.wire import Frames, ProtocolError, array_of, frame, raw_of, reply_of
from prefetchd.stats import Stats

Answered = Callable[[Reply], None]


class Answers:
    """Who waits for which reply. A reply that nobody waits for is passed over: its demand may have
    been given back meanwhile."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Answered, int]] = {}
        self._frames = Frames(protocol.FRAME_BYTES_MAX)

    def expect(self, number: int, answered: Answered, deadline_ns: int) -> None:
        self._waiting[number] = answered, deadline_ns

    def forget(self, number: int) -> None:
        self._waiting.pop(number, None)

    def overdue(self, now_ns: int) -> bool:
        return any(deadline_ns <= now_ns for _, deadline_ns in self._waiting.values())

    def feed(self, data: bytes) -> None:
        """Raises ProtocolError for nonsense, and for an end of the connection that has a reason."""
        self._frames.feed(data)
        while self._frames.whole:
            reply = reply_of(self._frames.whole.popleft())
            waiting = self._waiting.pop(getattr(reply, "id", 0), None)
            if waiting is not None:
                waiting[0](reply)
            elif isinstance(reply, Error) and reply.id == 0:
                raise ProtocolError(reply.words)

    def lost(self, why: str) -> None:
        """Nothing will come any more."""
        waiting, self._waiting = self._waiting, {}
        for number, (answered, _) in waiting.items():
            answered(Error(number, "stopped", why))


class Attachment:
    """What a Welcome gives: geometry, limits and memory, until the connection ends."""

    def __init__(self, welcome: Welcome, descriptors: list[int]) -> None:
        """Takes the descriptors over. Raises ProtocolError, OSError."""
        self.welcome = welcome
        self.geometry = Geometry(welcome.layers, welcome.blocks)
        staging = map_staging(
            descriptors[0], welcome.arena_offset, welcome.slots, welcome.slot_bytes
        )
        self.staging: NDArray[np.uint8] = staging
        self.staged = staging[:, : welcome.page_bytes]
        self.write_arena: NDArray[np.uint8] | None = None
        if welcome.write_bytes:
            self.write_arena = map_own(descriptors[-1], welcome.write_bytes)
        self.in_place: InPlace | None = None
        if welcome.in_place:
            slots = welcome.slots
            books = map_books(descriptors[1], self.geometry, slots)
            marks = Marks(map_own(descriptors[2], marks_bytes(slots)), slots)
            self.in_place = InPlace(books, marks, self.geometry)
        self.answers = Answers()
        self.lost = ""
        """Why it has ended, in words; empty while it lasts."""

    @property
    def extent_bytes(self) -> int:
        return self.welcome.layers * self.welcome.page_bytes


# --- requests ---


def demand_frame(
    number: int,
    pages: Ids,
    timeout_ns: int,
    stamps: Stamps | None,
    scores: Scores | None,
    request: int,
) -> bytes:
    return frame(
        Demand(
            number,
            raw_of(pages, np.int64),
            timeout_ns,
            None if stamps is None else raw_of(stamps, np.int64),
            None if scores is None else raw_of(scores, np.float32),
            request,
        )
    )


Use = tuple[Ids, Scores | None, int]
"""Pages that were read in place, their scores, and for which request."""


def kept(scores: Scores | None) -> Scores | None:
    """Theirs is told later, and by then the caller may have written others into it."""
    return None if scores is None else np.array(scores, np.float32)


def used_frames(uses: Iterable[Use], most: int) -> bytes:
    """In order; in a message at most so many pages and USES_MAX demands, with scores or without."""
    frames, group, left = [], list[Use](), 0
    for use in uses:
        left -= len(use[0])
        mixed = bool(group) and (group[0][1] is None) != (use[1] is None)
        if group and (left < 0 or mixed or len(group) == USES_MAX):
            frames.append(_used_frame(group))
            group = []
        if not group:
            left = most - len(use[0])
        group.append(use)
    return b"".join([*frames, _used_frame(group)] if group else frames)


def _used_frame(uses: Sequence[Use]) -> bytes:
    pages = b"".join([raw_of(pages, np.int64) for pages, _, _ in uses])
    counts = np.array([len(pages) for pages, _, _ in uses], np.int64)
    requests = np.array([request for _, _, request in uses], np.int64)
    scores = [raw_of(scores, np.float32) for _, scores, _ in uses if scores is not None]
    weights = b"".join(scores) if scores else None
    return frame(Used(pages, raw_of(counts, np.int64), raw_of(requests, np.int64), weights))


def find_frame(number: int, names: Iterable[bytes]) -> bytes:
    return frame(Find(number, b"".join(names)))


def release_frame(numbers: list[int]) -> bytes:
    return frame(Release(raw_of(np.array(numbers), np.int64)))


def put_frame(
    number: int,
    names: list[bytes],
    place: int | bytes,
    durability: str,
    ttl_s: float | None,
) -> bytes:
    """`place`: where in the write arena the blocks are, or their bytes."""
    offset, data = (0, place) if isinstance(place, bytes) else (place, None)
    return frame(Put(number, b"".join(names), offset, data, durability, ttl_s))


def hint_frame(hint: Hint, now_ns: int) -> bytes:
    """`now_ns`: on the clock of the hint's times."""
    message: Message
    if isinstance(hint, PageHint):
        message = HintPages(raw_of(hint.pages, np.int64), raw_of(hint.scores, np.float32))
    elif isinstance(hint, ChainHint):
        message = HintChain(
            hint.request, raw_of(hint.blocks, np.int64), _lead(hint.start_ns, now_ns)
        )
    else:
        assert isinstance(hint, DoneHint)
        message = HintDone(
            hint.request,
            hint.reason,
            _lead(hint.return_ns, now_ns),
            raw_of(hint.blocks, np.int64),
        )
    return frame(message)


def _lead(start_ns: int | None, now_ns: int) -> int | None:
    return None if start_ns is None else start_ns - now_ns


# --- replies ---


def ready_of(reply: Reply, number: int, count: int, slots_most: int) -> Ready:
    """A demand's answer; of one that failed: nothing could be had. Raises ProtocolError for slots
    that there are not."""
    if not isinstance(reply, replies.Pages):
        return nothing(number, count)
    slots = array_of(reply.slots, np.int64, count, "slots", count)
    if count:
        # Read as unsigned and one higher, -1 is 0 and every other negative slot a huge one.
        # numpy finds the place of the largest in a fraction of the time that its value takes.
        places = (slots + 1).view(np.uint64)
        if places[places.argmax()] > slots_most:
            raise ProtocolError(f"a slot that is none of {slots_most}")
    outcomes = array_of(reply.outcomes, np.uint8, count, "outcomes", count)
    if reply.waits is None:
        waits_ns = np.zeros(count, np.int64)
    else:
        waits_ns = array_of(reply.waits, np.int64, count, "waits", count)
    return Ready(number, slots, outcomes, waits_ns)


def nothing(number: int, count: int) -> Ready:
    """The answer of a daemon that is away: every page is missing."""
    slots = np.full(count, -1, np.int64)
    outcomes = np.full(count, Outcome.MISS, np.uint8)
    return Ready(number, slots, outcomes, np.zeros(count, np.int64))


def words_of(reply: Reply) -> str:
    """Why there is no answer of the kind that was asked for."""
    return reply.words if isinstance(reply, Error) else "the daemon's answer makes no sense"


def found_of(reply: Reply) -> Found:
    if not isinstance(reply, replies.Found):
        return Found(NO_IDS, NO_IDS)
    most = protocol.KEYS_MAX
    blocks = array_of(reply.blocks, np.int64, most, "blocks")
    return Found(blocks, array_of(reply.stamps, np.int64, most, "stamps", len(blocks)))


def put_end_of(reply: Reply, count: int) -> tuple[list[int], list[int], list[str], list[int]]:
    """Blocks, stamps, failures and refused positions of a put."""
    if isinstance(reply, replies.PutEnd):
        blocks = array_of(reply.blocks, np.int64, count, "blocks", count)
        stamps = array_of(reply.stamps, np.int64, count, "stamps", count)
        refused = [place for place in reply.refused if 0 <= place < count]
        return blocks.tolist(), stamps.tolist(), list(reply.failures), refused
    failures = [f"block {place} was not stored: {words_of(reply)}" for place in range(count)]
    return [-1] * count, [0] * count, failures, []


def stats_of(reply: Reply, gpu: str) -> Stats:
    """Of what the daemon told, without samples; `gpu` is this process's own. Raises ProtocolError
    for an error, and for figures with other fields than this version's."""
    if not isinstance(reply, replies.Told):
        raise ProtocolError(words_of(reply))
    try:
        stats = msgspec.convert(reply.stats, Stats, dec_hook=lambda *_: np.empty(0, np.int64))
    except msgspec.ValidationError as error:
        raise _other_version(str(error)) from error
    if unknown := sorted(reply.stats.keys() - {field.name for field in fields(Stats)}):
        raise _other_version(f"here nothing is known of {', '.join(unknown)}")
    return replace(stats, gpu=gpu)


def _other_version(why: str) -> ProtocolError:
    return ProtocolError(f"the daemon's figures are another version's: {why}; update the older one")
