"""The result of a replay: its parts, what each figure means, and its JSON.

Decides the schema. Refuses to know how a figure is computed (`prefetchd.metrics`), how a replay
runs and how its result is shown. A figure that cannot be stated (too few samples, a zero to divide
by, a control that was not run) is None, in JSON null.

Figures count the measured steps only, those after the warm-up. Counts, and everything that is
drawn from single samples (stalls, decisions), are taken over all rounds together; times that a
round has one of (`tpot_ms`, `effective_latency_us`) are the median over rounds. Shares are 0..1.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

Schema = Literal["prefetchd.replay.decode/1", "prefetchd.simulate.decode/1"]
SCHEMA: Schema = "prefetchd.replay.decode/1"

Kind = Literal["MEASURED", "EMULATED", "SIMULATED", "RAM", "CACHED", "UNREAD"]
"""What stood behind the reads: a drive, a model of one in real time, a model of one under a virtual
clock, memory, a cache in front of a drive, or nothing since nothing was read."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    engine: str
    notes: list[str] = []


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """`notes` say everything that is less than what was asked for."""

    name: str
    engine: str
    file_system: str
    kind: Kind
    gpu: Gpu
    notes: list[str] = []


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`steps` are those replayed in a round, of which the first `warmup_steps` are not measured.

    `more` holds whatever else a reader needs to repeat the run.
    """

    trace: str
    steps: int
    warmup_steps: int
    rounds: int
    layers: int
    blocks: int
    page_bytes: int
    staging_share: float
    staging_slots: int
    top_k: int
    layer_us: float
    hints: bool
    evict: str
    depth: int
    seed: int
    more: dict[str, str | int | float | bool] = {}


class Outcomes(msgspec.Struct, frozen=True, kw_only=True):
    """Demanded pages by how they were found."""

    retained: int = 0
    timely: int = 0
    late: int = 0
    miss: int = 0

    @property
    def total(self) -> int:
        return self.retained + self.timely + self.late + self.miss


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles (microseconds) of `n` samples; None where n is too small for one."""

    p50: float | None = None
    p99: float | None = None
    p999: float | None = None
    max: float | None = None
    n: int = 0


class Prefetch(msgspec.Struct, frozen=True, kw_only=True):
    """Prefetched pages by what became of them in the measured steps; the rest of `issued` was
    undecided at the end.

    `issued` holds those that the warm-up fetched and left undecided, for they may be used after it.
    `reads_per_needed`: pages read from the device, demand and prefetch, per page demanded.
    `coverage`: pages that a prefetch had fetched or was fetching when they were demanded, of those
    that were not there already; a page on its way for another demand is not covered.
    """

    issued: int = 0
    useful: int = 0
    late: int = 0
    wasted: int = 0
    pollution: int = 0
    accuracy: float | None = None
    coverage: float | None = None
    wasted_bytes: int = 0
    reads_per_needed: float | None = None


class Ccdf(msgspec.Struct, frozen=True, kw_only=True):
    """`share[i]` of the samples took at least `us[i]`; `us` rises and holds no zeros."""

    us: list[float] = []
    share: list[float] = []


class PerLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Pages by layer, summed over rounds and measured steps."""

    miss: list[int] = []
    late: list[int] = []


class Far(msgspec.Struct, frozen=True, kw_only=True):
    """Demanded pages that are neither the sink nor in the last 64 blocks, and their misses."""

    pages: int = 0
    miss_rate: float | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One control or predictor. The unit of a stall is one demand: one layer of one step.

    `stalled_share`: demands that waited at all. `effective_latency_us`: wait + hand-over, a page.
    `step_ms`: every step of the median round, the last ones being the measured ones.
    `extra_share`: the part of `none`'s extra step time that remains (see `extra_share`).
    """

    name: str
    control: bool
    evict: str
    outcomes: Outcomes
    tpot_ms: float
    tpot_ms_rounds: list[float] = []
    hit_rate: float | None = None
    miss_rate: float | None = None
    late_rate: float | None = None
    stalled_share: float | None = None
    tpot_ratio: float | None = None
    extra_share: float | None = None
    effective_latency_us: float | None = None
    effective_latency_ratio: float | None = None
    stall_us: Distribution = Distribution()
    prefetch: Prefetch = Prefetch()
    device_bytes: int = 0
    achieved_depth: float | None = None
    device_gb_s: float | None = None
    decision_us: Distribution = Distribution()
    cpu_us_per_page: float | None = None
    step_ms: list[float] = []
    stall_ccdf: Ccdf = Ccdf()
    per_layer: PerLayer = PerLayer()
    far: Far = Far()
    failures: dict[str, int] = {}
    verified_pages: int = 0
    notes: list[str] = []


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What nothing of its kind can beat, computed and not run: figures as in a `Run`, None where
    the bound says nothing of them."""

    name: str
    meaning: str
    tpot_ms: float | None = None
    tpot_ratio: float | None = None
    hit_rate: float | None = None
    late_rate: float | None = None
    miss_rate: float | None = None
    stalled_share: float | None = None
    reads_per_needed: float | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay or a simulation says; in the latter, figures that only a real clock has are
    None. A note that starts with a WORD in capitals and a colon is a verdict.

    `clients`: of a replay by several processes, what each of them saw of each run; `runs` are then
    of all of them together, and counters of the device are told there only."""

    device: Device
    settings: Settings
    runs: list[Run]
    regime: Literal["sparse decode"] = "sparse decode"
    schema: Schema = SCHEMA
    bounds: list[Bound] = []
    notes: list[str] = []
    clients: list[Run] = []


class ResultError(ValueError):
    """A result cannot be written or read: what is wrong with it, and where."""


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"a result cannot hold a {type(value).__name__}")


def encode(result: Result) -> bytes:
    """The result as JSON without NaN or infinity. Raises ResultError, naming the field.

    A figure that is not finite becomes null where null is allowed; numpy values are taken as the
    numbers they are. The reading back is what finds the rest: a wrong type, a NaN step time.
    """
    data = msgspec.json.encode(result, enc_hook=_plain)
    decode(data)
    return msgspec.json.format(data, indent=1)


def decode(data: bytes) -> Result:
    """Read what `encode` wrote. Raises ResultError for anything else."""
    try:
        return msgspec.json.decode(data, type=Result)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ResultError(
            f"this is not a decode's result ({SCHEMA}, or simulate's): {error}. "
            "Write one with `prefetchd replay decode` or `simulate decode`, TRACE --json FILE."
        ) from error
