"""The small print of the report: its second table, the settings, and what the words mean.

Decides which further figures are shown and how each word is defined. Refuses to compute.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from prefetchd.bench.tables import DASH, Column, figures, number, share, size
from prefetchd.metrics import Result, Run


def _failures(run: Run) -> str:
    found = [f"{count:,} {kind}" for kind, count in run.failures.items() if count]
    return ", ".join(found) or "0"


def _wasted_bytes(run: Run) -> str:
    return size(run.prefetch.wasted_bytes) if run.prefetch.issued else DASH


def _pollution(run: Run) -> str:
    return f"{run.prefetch.pollution:,}" if run.prefetch.issued else DASH


DETAILS = (
    Column(
        "stall p50", "us", "half of all demands waited no longer", lambda r: figures(r.stall_us.p50)
    ),
    Column("stall p99", "us", "99 of 100 waited no longer", lambda r: figures(r.stall_us.p99)),
    Column(
        "stall p99.9", "us", "999 of 1,000 waited no longer", lambda r: figures(r.stall_us.p999)
    ),
    Column("stall max", "us", "the longest wait", lambda r: figures(r.stall_us.max)),
    Column("demands", "", "how many the stalls are taken from", lambda r: f"{r.stall_us.n:,}"),
    Column(
        "latency vs",
        "resident",
        "effective latency per page over that of resident",
        lambda r: figures(r.effective_latency_ratio),
    ),
    Column(
        "far pages",
        "missed %",
        "of demanded pages that are neither the sink nor in the last 64 blocks",
        lambda r: share(r.far.miss_rate),
    ),
    Column(
        "coverage",
        "%",
        "of pages not yet there, the part that prefetching went for",
        lambda r: share(r.prefetch.coverage),
    ),
    Column("wasted", "reads", "bytes prefetched that nobody asked for", _wasted_bytes),
    Column("pollution", "pages", "pushed out by a prefetch and demanded afterwards", _pollution),
    Column("read from", "device", "bytes, over all rounds", lambda r: size(r.device_bytes)),
    Column(
        "achieved",
        "depth",
        "reads in flight while there were any, weighted by time",
        lambda r: number(r.achieved_depth, 1),
    ),
    Column(
        "read rate",
        "GB/s",
        "bytes read over the time when reads were in flight",
        lambda r: number(r.device_gb_s, 2),
    ),
    Column(
        "decision p50",
        "us",
        "time to decide what to fetch next",
        lambda r: figures(r.decision_us.p50),
    ),
    Column(
        "CPU time",
        "us/page",
        "processor time of prefetchd per page demanded",
        lambda r: figures(r.cpu_us_per_page),
    ),
    Column(
        "verified",
        "pages",
        "checked against what had been written",
        lambda r: f"{r.verified_pages:,}" if r.verified_pages else DASH,
    ),
    Column("failed", "reads", "by kind; each of them became a miss", _failures),
)

WORDS = (
    (
        "sparse decode",
        "At each step every layer attends to a few blocks of the context: the first ones (sinks), "
        "the latest ones (window) and some far ones that change. Which far ones is what a "
        "predictor has to guess.",
    ),
    (
        "page",
        "One token block of one layer; the unit that is read, staged and handed over. "
        "All latencies per page are for one page of the size given.",
    ),
    ("staging", "The DRAM buffer of page-sized slots between device and GPU."),
    ("demand", "The pages that one layer needs at one step, asked for together."),
    ("retained", "A demanded page that was still there from an earlier demand."),
    ("timely", "A demanded page that was there because it had been prefetched."),
    (
        "late",
        "A demanded page that was being read; or a prefetch demanded before its end.",
    ),
    ("miss", "A demanded page that had yet to be read, or could not be."),
    ("useful, wasted", "A prefetched page that was demanded after it had arrived; or never was."),
    ("undecided", "A prefetched page still staged at the end, not demanded yet."),
    ("pollution", "A page that a prefetch pushed out and that was demanded afterwards."),
    (
        "stall",
        "The time by which a demand's slowest page came after the demand: computing stood still.",
    ),
    ("effective latency", "Mean time per page from demand until handed over, zero waits included."),
    ("TPOT", "Time per output token: one step through all layers."),
    (
        "extra left",
        "(step time - resident) / (none - resident): 0 % is as fast as DRAM, 100 % no better than "
        "plain staging.",
    ),
    ("resident", "Control: all pages in DRAM. The best that can be had."),
    ("none", "Control: the staging buffer alone, nothing prefetched."),
    ("cold", "Control: every page from the device, each time."),
    ("oracle", "Control: a predictor that knows the future, held back by the same bandwidth."),
    ("hints", "What the engine says one layer ahead about the pages that it will need."),
    (
        "MEASURED, EMULATED, SIMULATED, RAM, CACHED, UNREAD",
        "A real device; a model of one; one under a virtual clock, where nothing is read or timed; "
        "a store in memory, which says nothing about a drive; a drive with a cache before it that "
        "answered some reads; a device that was never read.",
    ),
)


def what(result: Result) -> str:
    """What was done, in sentences: a simulation reads nothing and takes no time of its own."""
    device, settings = result.device, result.settings
    staging = settings.staging_slots * settings.page_bytes
    simulated = device.kind == "SIMULATED"
    rounds = "one round" if settings.rounds == 1 else f"{settings.rounds} interleaved rounds"
    done, counted = "was replayed in real time", "measured"
    reads = f"were read with {device.name} ({device.engine}) from {device.file_system}"
    gpu = f"handed to GPU device {device.gpu.name} ({device.gpu.engine})"
    if simulated:
        rounds = rounds.replace(" interleaved", "")
        done, counted = "was simulated, not run", "counted"
        reads = f"came from {device.name} ({device.engine})"
        gpu = f"handed to a GPU {device.gpu.engine}"
    return (
        f"The decode in {settings.trace} {done}:"
        f" {settings.steps} steps of {settings.layers} layers, {settings.layer_us:,.0f} µs of"
        f" computing each, the {settings.top_k} heaviest blocks per head;"
        f" {rounds}, {counted} after {settings.warmup_steps} steps."
        f" Pages of {size(settings.page_bytes)} {reads} into a staging buffer for"
        f" {100 * settings.staging_share:g} % of all pages ({size(staging)}), and were {gpu}."
        f" The engine gave {'hints one layer ahead' if settings.hints else 'no hints'}."
    )


def settings_in_words(result: Result) -> Iterator[tuple[str, str]]:
    device, settings = result.device, result.settings
    yield "regime", result.regime
    where = "" if device.kind == "SIMULATED" else f"{device.file_system}; "
    yield "device", f"{device.name}: {device.engine}; {where}{device.kind}"
    yield "GPU device", f"{device.gpu.name}: {device.gpu.engine}"
    for name, value in msgspec.structs.asdict(settings).items():
        if name != "more":
            yield _setting(name, value)
    for name, value in settings.more.items():
        yield _setting(name, value)


def _setting(name: str, value: str | int | float | bool) -> tuple[str, str]:
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return words, "on" if value else "off"
    if name.endswith("_bytes") and isinstance(value, int):
        return words.removesuffix(" bytes") + " size", f"{size(value)} ({value:,} bytes)"
    if name.endswith("_us"):
        return words.removesuffix(" us") + " time", f"{value:,} µs"
    if name.endswith("_share") and isinstance(value, float):
        return words.removesuffix(" share"), f"{100 * value:g} % of pages"
    return words, f"{value:,}" if isinstance(value, (int, float)) else value
