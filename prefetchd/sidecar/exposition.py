"""The daemon's figures as Prometheus metrics.

Decides their names, labels and meaning: one table. Nothing is counted here; a scrape takes a
picture and lays it out. Counters begin at zero with the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from prefetchd.sidecar.rates import accuracy, coverage, write_amplification
from prefetchd.sidecar.watching import Picture, Space

Rows = Iterable[tuple[tuple[str, ...], float | None]]
"""Label values after the namespace, and a value; None: not known, and so not told."""
_STATES = ("healthy", "suspect", "failed", "detached")


def _one(value: float | None) -> Rows:
    yield (), value


def _reads(space: Space) -> Rows:
    stats, size = space.stats, space.slot_bytes
    demanded = stats.pages_read - stats.pages_prefetched
    yield ("demand",), demanded * size
    yield ("prefetch",), stats.pages_prefetched * size
    yield ("retry",), stats.bytes_read - stats.pages_read * size


def _written(space: Space) -> Rows:
    writes = space.stats.store_writes
    yield ("payload",), writes.payload_bytes
    yield ("header",), writes.header_bytes
    yield ("journal",), writes.journal_bytes


def _verdicts(space: Space) -> Rows:
    for verdict in ("useful", "late", "wasted"):
        yield (verdict,), space.stats.prefetch[verdict]


def _blocks(space: Space) -> Rows:
    writes = space.stats.store_writes
    for event in ("admitted", "refused", "evicted", "expired", "rotten", "lost"):
        yield (event,), getattr(writes, f"blocks_{event}")


def _health(space: Space) -> Rows:
    for path in space.stats.paths:
        for direction, found in (("reading", path.reading), ("writing", path.writing)):
            for state in _STATES:
                yield (path.path, direction, state), found == state


def _path(field: str) -> Callable[[Space], Rows]:
    def rows(space: Space) -> Rows:
        for path in space.stats.paths:
            yield (path.path,), getattr(path, field)

    return rows


def _use(field: str) -> Callable[[Space], Rows]:
    return lambda space: _one(getattr(space.use, field) if space.use else None)


def _named(field: str) -> Callable[[Space], Rows]:
    """Of a field that is a map from names to counts."""

    def rows(space: Space) -> Rows:
        counts: dict[str, int] = getattr(space.stats, field)
        for name, count in counts.items():
            yield (name,), count

    return rows


COUNTERS: dict[str, tuple[str, tuple[str, ...], Callable[[Space], Rows]]] = {
    "read_bytes": (
        "Bytes read from the store, padding included, by I/O class.",
        ("class",),
        _reads,
    ),
    "written_bytes": ("Bytes written to the store, by what they are.", ("kind",), _written),
    "demanded_pages": (
        "Demanded pages by how they were found: retained, timely, late, miss.",
        ("outcome",),
        _named("outcomes"),
    ),
    "prefetch_issued_pages": (
        "Pages read ahead of their demand.",
        (),
        lambda s: _one(s.stats.pages_prefetched),
    ),
    "prefetch_ended_pages": (
        "Prefetched pages by what became of them: useful, late, wasted.",
        ("verdict",),
        _verdicts,
    ),
    "pollution_pages": (
        "Demanded pages that were absent since a prefetch had pushed them out.",
        (),
        lambda s: _one(s.stats.prefetch["pollution"]),
    ),
    "failures": (
        "Operations and pages that failed, by reason.",
        ("reason",),
        _named("failures"),
    ),
    "expired_pages": (
        "Demanded pages answered as missing at their deadline.",
        (),
        lambda s: _one(s.stats.expired),
    ),
    "hints_dropped": ("Hints dropped unread.", (), lambda s: _one(s.stats.hints_dropped)),
    "blocks": ("Blocks by what became of them.", ("event",), _blocks),
    "flushes": ("Flushes of the store.", (), lambda s: _one(s.stats.store_writes.flushes)),
    "path_errors": ("Failed operations, by path.", ("path",), _path("errors")),
    "path_refused": (
        "Operations not tried since their path had failed.",
        ("path",),
        _path("refused"),
    ),
    "path_read_bytes": ("Bytes read, by path.", ("path",), _path("bytes_read")),
    "path_written_bytes": ("Bytes written, by path.", ("path",), _path("bytes_written")),
}

GAUGES: dict[str, tuple[str, tuple[str, ...], Callable[[Space], Rows]]] = {
    "operations_in_flight": (
        "Operations that the device has.",
        (),
        lambda s: _one(s.stats.ops_in_flight),
    ),
    "operations_queued": (
        "Operations that wait for the device to have room.",
        (),
        lambda s: _one(s.stats.ops_queued),
    ),
    "coverage_ratio": (
        "(timely + late) / (timely + late + miss), since the start.",
        (),
        lambda s: _one(coverage(s.stats.outcomes)),
    ),
    "accuracy_ratio": (
        "Useful of all prefetched pages, since the start.",
        (),
        lambda s: _one(accuracy(s.stats.prefetch)),
    ),
    "write_amplification_ratio": (
        "Bytes written per byte of blocks, since the start.",
        (),
        lambda s: _one(write_amplification(s.stats)),
    ),
    "written_per_reused_ratio": (
        "Bytes written per byte demanded and had, since the start.",
        (),
        lambda s: _one(s.stats.store_writes.written_per_reused),
    ),
    "staging_bytes": ("The arena's slots.", (), lambda s: _one(s.stats.slots * s.slot_bytes)),
    "staging_used_bytes": (
        "Slots that hold a page or wait for one.",
        (),
        lambda s: _one(s.stats.slots_used * s.slot_bytes),
    ),
    "staging_pinned_bytes": (
        "Slots that a reader holds, or the writer.",
        (),
        lambda s: _one(s.stats.slots_pinned * s.slot_bytes),
    ),
    "store_blocks": (
        "Blocks that may be in use.",
        (),
        lambda s: _one(s.stats.store_writes.blocks_max),
    ),
    "store_blocks_used": (
        "Blocks that are in use.",
        (),
        lambda s: _one(s.stats.store_writes.blocks_used),
    ),
    "store_blocks_visible": (
        "Blocks of this namespace that are found.",
        (),
        lambda s: _one(s.stats.blocks_visible),
    ),
    "blocks_at_risk": (
        "Blocks that are found and that a crash would take now.",
        (),
        lambda s: _one(s.stats.store_writes.blocks_at_risk),
    ),
    "device_latency_seconds": (
        "Time of a read on an idle device, as measured.",
        (),
        lambda s: _one(s.stats.base_latency_us / 1e6),
    ),
    "clients": ("Clients that are connected.", (), _use("clients")),
    "tickets_held": ("Demands whose pages clients hold.", (), _use("tickets")),
    "demands_waiting": ("Demands that wait for an answer.", (), _use("waiting")),
    "engine_up": ("Whether the engine can be used.", (), lambda s: _one(not s.fault)),
    "path_health": (
        "1 for the state that a path is in, by direction.",
        ("path", "direction", "state"),
        _health,
    ),
}

_WAIT = "Time from demand to readable, page by page; a page that was here waited for nothing."


class Collector:
    """What a registry of prometheus-client asks for figures."""

    def __init__(self, take: Callable[[], Picture]) -> None:
        self._take = take

    def describe(self) -> Iterable[Metric]:
        return ()  # so that registering takes no picture

    def collect(self) -> Iterator[Metric]:
        picture = self._take()
        build = GaugeMetricFamily("prefetchd_build_info", "The version.", labels=["version"])
        build.add_metric([picture.version], 1)
        yield build
        verdict, whole = picture.verdict, "Whether all that is configured is open and proved."
        yield _gauge("healthy", "Whether what is open can be used.", verdict.healthy)
        yield _gauge("ready", whole, verdict.ready)
        yield _gauge("uptime_seconds", "Since the start.", picture.uptime_s)
        for kind, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, (help_text, labels, rows) in table.items():
                family = kind(f"prefetchd_{name}", help_text, labels=["namespace", *labels])
                for space in picture.namespaces:
                    for values, value in rows(space):
                        if value is not None:
                            family.add_metric([space.name, *values], float(value))
                yield family
        yield _waits(picture)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"prefetchd_{name}", help_text, value=float(value))


def _waits(picture: Picture) -> Metric:
    family = HistogramMetricFamily("prefetchd_demand_wait_seconds", _WAIT, labels=["namespace"])
    for space in picture.namespaces:
        waits = space.stats.waits
        bounds = [*(f"{bound_ns / 1e9:g}" for bound_ns in waits.bounds_ns), "+Inf"]
        buckets, sofar = [], 0
        for bound, count in zip(bounds, waits.totals(), strict=True):
            sofar += count
            buckets.append((bound, float(sofar)))
        family.add_metric([space.name], buckets, sum(waits.sums_ns) / 1e9)
    return family


def exposer(take: Callable[[], Picture]) -> Callable[[str], tuple[bytes, str]]:
    """From an Accept header to the text and its type."""
    registry = CollectorRegistry()
    registry.register(Collector(take))
    ProcessCollector(registry=registry)

    def expose(accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    return expose
