"""Whether dense decode straight from a device is possible at all: bytes per step against bandwidth.

Decides nothing and measures nothing: it sets a layout's bytes over the numbers it is given and
says in words what follows. Storage can restore a long context, and it can serve the few blocks
that sparse attention picks; reading a whole long context at every step is another matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefetchd.kv_parts import check_count
from prefetchd.layout import Layout


@dataclass(frozen=True, slots=True)
class Roofline:
    """Whether one decode step of one sequence can read its whole KV cache from a device in time."""

    dense_bytes: int
    dense_read_ns: int
    loaded_bytes: int
    """What attention loads with its own top-k selection; `dense_bytes` where it has none."""
    loaded_read_ns: int
    step_ns: int
    possible: bool
    """Whether the dense read fits the step, every byte of it overlapped with compute."""
    words: str


def roofline(layout: Layout, context_tokens: int, bandwidth_bytes_s: int, step_ns: int) -> Roofline:
    """Set bytes per step over bandwidth against the step time; times are rounded up.

    This is the best case: no latency, no padding, one sequence, all reads hidden. LayoutError.
    """
    check_count(bandwidth_bytes_s, "the bandwidth in bytes per second", 1, 2**60)
    check_count(step_ns, "the step time in ns", 1, 2**60)
    dense = layout.dense_step_bytes(context_tokens)
    loaded = layout.loaded_bytes(context_tokens)
    dense_ns, loaded_ns = (-(-size * 10**9 // bandwidth_bytes_s) for size in (dense, loaded))
    words = (
        f"{layout.name} at {context_tokens:,} tokens: a dense step reads {dense / 2**30:.4g} GiB; "
        f"{_time_words(dense_ns, step_ns)}, so dense decode straight from a device of "
        f"{bandwidth_bytes_s / 1e9:.4g} GB/s is {_possible(dense_ns <= step_ns)}."
    )
    if loaded < dense:
        words += (
            f" With its own top-k selection a step loads {loaded / 2**30:.4g} GiB; "
            f"{_time_words(loaded_ns, step_ns)}: {_possible(loaded_ns <= step_ns)}."
        )
    return Roofline(dense, dense_ns, loaded, loaded_ns, step_ns, dense_ns <= step_ns, words)


def _time_words(read_ns: int, step_ns: int) -> str:
    return (
        f"that takes {read_ns / 1e6:,.4g} ms, {read_ns / step_ns:,.3g} times "
        f"a step of {step_ns / 1e6:.4g} ms"
    )


def _possible(is_possible: bool) -> str:
    return "possible" if is_possible else "not possible"
