"""Figures that follow from counters, for everybody who shows them: metrics, page and terminal.

Decides their definitions, those of every report. A figure with nothing behind it is None.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefetchd.stats import Stats


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def coverage(outcomes: Mapping[str, int]) -> float | None:
    """Of the pages that were not retained, those that a prefetch had begun to bring."""
    brought = outcomes["timely"] + outcomes["late"]
    return share(brought, brought + outcomes["miss"])


def accuracy(prefetch: Mapping[str, int]) -> float | None:
    """Useful of all that was prefetched."""
    return share(prefetch["useful"], prefetch["issued"])


def write_amplification(stats: Stats) -> float | None:
    """Bytes written per byte of blocks, by this program: what the drive adds it does not tell."""
    return share(stats.bytes_written, stats.store_writes.payload_bytes)
