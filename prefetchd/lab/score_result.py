"""A scorecard: its cells, what each of their figures means, and its JSON and CSV.

Decides the schema. Refuses to know how a cell is simulated. A figure that cannot be stated is None,
in JSON null and in CSV empty. Shares are 0..1, times in the unit that ends their name.
"""

from __future__ import annotations

import csv
import io
from typing import Literal

import msgspec

from prefetchd import metrics
from prefetchd.lab.watch import EDGES_MS

Schema = Literal["prefetchd.score/1"]
SCHEMA: Schema = "prefetchd.score/1"
Regime = Literal["decode", "restore"]
Kind = Literal["control", "predictor"]

LEGEND: dict[Regime, dict[str, str]] = {
    "decode": {
        "lead": "compute time of a layer; hints come one layer ahead",
        "hit": "pages there when their layer asked for them, of all pages asked for after warm-up",
        "late": "pages whose read was on its way then",
        "miss": "pages that nobody had asked the drive for",
        "stalled": "demands (one layer of one step) that waited at all",
        "time": "mean step time after warm-up",
    },
    "restore": {
        "lead": "from a request's announcement to its start",
        "hit": "blocks that earlier requests had and that were in DRAM when their request, once "
        "started, first needed them, of all such blocks",
        "late": "such blocks whose read was on its way then",
        "miss": "the rest of them, those not put in time included",
        "stalled": "demands of a block that waited at all",
        "time": "mean wait of a demanded block",
    },
}
"""What the columns of a row are that differ between the regimes."""

COMMON = {
    "cover": "of the pages that were not there already, those that a prefetch reached, if late",
    "accuracy": "prefetched pages that were demanded after they had arrived, of all prefetched "
    "(of a decode after warm-up, or before it and undecided then)",
    "timeliness": "prefetched pages by how long before (+) or after (-) their demand they arrived",
    "pollution": "pages that a prefetch had pushed out when they were demanded",
    "wasted": "bytes prefetched and not demanded while they were there; those still there at the "
    "end are undecided and not in it",
    "reads": "pages read from the drive for each page demanded",
    "gap": "of the time between `none` and `oracle`, the part that was closed",
    "decide": "time to guess, plan and learn for each page demanded, measured on this machine: "
    "alone of all figures it differs from run to run",
}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What rows must share to be compared. `lead_ms`: see LEGEND. `staging` as it was asked for."""

    regime: Regime
    trace: str
    staging: str
    lead_ms: float
    hints: bool

    @property
    def lead(self) -> str:
        """In words."""
        if self.regime == "decode":
            return f"{1e3 * self.lead_ms:g} µs a layer"
        return f"{self.lead_ms:g} ms ahead"

    @property
    def condition(self) -> str:
        """What differs between the places of one trace beside staging, in words."""
        return f"{self.lead}, {'hints' if self.hints else 'no hints'}"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation. `predictor` as it was named, of a control the control's name."""

    place: Place
    name: str
    kind: Kind
    predictor: str
    evict: str


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What deciding took on this machine, by page demanded and by demand."""

    us_per_page: float | None = None
    us_per_demand: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A cell and its figures, see LEGEND. `time_ms` is what the gap is measured in; `gap_closed` is
    None where `none` is no slower than `oracle`. `timeliness`: pages by slack, one more than
    `EDGES_MS`. All but `cost` is counted after warm-up, of which a restore has none."""

    cell: Cell
    hit_rate: float | None
    late_rate: float | None
    miss_rate: float | None
    stalled_share: float | None
    time_ms: float
    prefetch: metrics.Prefetch
    timeliness: list[int]
    device_bytes: int
    gap_closed: float | None = None
    cost: Cost = Cost()

    @property
    def waited_rate(self) -> float | None:
        """Late and missing together."""
        if self.late_rate is None or self.miss_rate is None:
            return None
        return self.late_rate + self.miss_rate


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """`staging_slots`: what `place.staging` comes to."""

    place: Place
    staging_slots: int
    bounds: list[metrics.Bound]


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A trace by the name that rows have for it; `path` "" is the one that ships with us. `hints`:
    whether any can be given; of requests they always can. `block_bytes`: 0 where not told."""

    name: str
    regime: Regime
    path: str = ""
    synthetic: bool = False
    hints: bool = True
    block_bytes: int = 0


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """All rows, in the order of the grid, and the bounds of each of their places."""

    device: metrics.Device
    traces: list[TraceFile]
    settings: dict[str, int | float | bool | None]
    rows: list[Row]
    bounds: list[Bounds]
    edges_ms: tuple[float, ...] = EDGES_MS
    notes: list[str] = []
    schema: Schema = SCHEMA

    def places(self, trace: str) -> list[Place]:
        """Of one trace, in order."""
        return [one.place for one in self.bounds if one.place.trace == trace]

    def at(self, place: Place) -> tuple[list[Row], Bounds]:
        """What is compared there."""
        rows = [row for row in self.rows if row.cell.place == place]
        return rows, next(one for one in self.bounds if one.place == place)


def encode(score: Score) -> bytes:
    """JSON without NaN or infinity."""
    return msgspec.json.format(msgspec.json.encode(score), indent=1)


def decode(data: bytes) -> Score:
    """Read what `encode` wrote. Raises ResultError for anything else."""
    try:
        return msgspec.json.decode(data, type=Score)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise metrics.ResultError(
            f"this is not a scorecard ({SCHEMA}): {error}. "
            "Write one with `prefetchd score --json FILE`."
        ) from error


def to_csv(score: Score) -> str:
    """One line a row and one a bound, with the same columns."""
    synthetic = {trace.name: trace.synthetic for trace in score.traces}
    lines = [_row_columns(row, score.edges_ms) for row in score.rows]
    lines += [_bound_columns(one, bound) for one in score.bounds for bound in one.bounds]
    for line in lines:
        line["synthetic"] = int(synthetic[str(line["trace"])])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


_Line = dict[str, object]


def _place_columns(place: Place, name: str, kind: str, evict: str) -> _Line:
    return {
        "regime": place.regime,
        "trace": place.trace,
        "synthetic": 0,
        "name": name,
        "kind": kind,
        "evict": evict,
        "staging": place.staging,
        "lead_ms": place.lead_ms,
        "hints": int(place.hints),
    }


def _row_columns(row: Row, edges_ms: tuple[float, ...]) -> _Line:
    cell, slack = row.cell, [f"slack_from_{edge:g}_ms" for edge in edges_ms]
    return {
        **_place_columns(cell.place, cell.name, cell.kind, cell.evict),
        "hit_rate": row.hit_rate,
        "late_rate": row.late_rate,
        "miss_rate": row.miss_rate,
        "stalled_share": row.stalled_share,
        "time_ms": row.time_ms,
        "gap_closed": row.gap_closed,
        **msgspec.structs.asdict(row.prefetch),
        "device_bytes": row.device_bytes,
        **msgspec.structs.asdict(row.cost),
        **dict(zip(["slack_below", *slack], row.timeliness, strict=True)),
    }


def _bound_columns(one: Bounds, bound: metrics.Bound) -> _Line:
    return {
        **_place_columns(one.place, bound.name, "bound", ""),
        "hit_rate": bound.hit_rate,
        "late_rate": bound.late_rate,
        "miss_rate": bound.miss_rate,
        "stalled_share": bound.stalled_share,
        "time_ms": bound.tpot_ms,
        "reads_per_needed": bound.reads_per_needed,
    }
