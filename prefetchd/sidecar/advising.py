"""A client's question whether to load or to recompute, and what the daemon's answer means.

Decides that without a daemon the answer is to recompute: there is nothing to load.
"""

from __future__ import annotations

import numpy as np

from prefetchd.advice import Advice, Prefill
from prefetchd.model import Ids
from prefetchd.sidecar import protocol, replies
from prefetchd.sidecar.conversation import words_of
from prefetchd.sidecar.protocol import IDS_MAX
from prefetchd.sidecar.replies import Reply
from prefetchd.sidecar.wire import frame, raw_of


def advise_frame(number: int, blocks: Ids, prefill: Prefill) -> bytes:
    """At most as many blocks as one message takes: a longer prefix has a beginning, too."""
    raw = raw_of(np.asarray(blocks, np.int64)[:IDS_MAX], np.int64)
    return frame(
        protocol.Advise(number, raw, prefill.tokens_s, prefill.block_tokens, prefill.pairs_s)
    )


def advice_of(reply: Reply, prefill: Prefill, blocks: int) -> Advice:
    """Raises ValueError for what the daemon refused."""
    if isinstance(reply, replies.Advice):
        return Advice(
            reply.blocks,
            reply.found,
            reply.load_ns,
            reply.recompute_ns,
            reply.chosen_ns,
            reply.words,
        )
    words = words_of(reply)
    if isinstance(reply, replies.Error) and reply.code == "bad_request":
        raise ValueError(words)
    return advice_away(words, prefill, blocks)


def advice_away(why: str, prefill: Prefill, blocks: int) -> Advice:
    """While the daemon is away."""
    recompute_ns = int(prefill.ns(blocks)[0])
    return Advice(0, blocks, None, recompute_ns, recompute_ns, f"recompute: {why}")
