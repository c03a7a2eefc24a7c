"""The core does the same behind a real device and in a simulation: the same events, whichever of
the two they came from, give the same commands in a core that is built anew."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import prefetchd
from prefetchd.assembly import build_core
from prefetchd.bench.decode import run_decode
from prefetchd.bench.decode_loop import Pace
from prefetchd.bench.runs import Plan
from prefetchd.core import Core, CoreLimits
from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import DEFAULT, load_profile
from prefetchd.lab.event_log import (
    Entry,
    EventLogError,
    Header,
    LogWriter,
    read_log,
    replay,
    watch,
)
from prefetchd.lab.simulate_decode import SimulateSettings, plan_core, run_plan
from prefetchd.lab.workload import Workload
from prefetchd.layout import uniform
from prefetchd.model import Geometry, Hinted, Idle, IoClass, Read
from prefetchd.options import Options
from tests.replays import LAYERS, PAGE_BYTES, workload, write_trace

PREDICTORS = ["none", "auto", "sliding_window"]


@pytest.fixture
def decode(tmp_path: Path) -> Workload:
    return workload(write_trace(tmp_path / "trace.npz"), requests=2, shared=0.5)


def small(decode: Workload) -> int:
    """Slots so few that pages are pushed out."""
    return 2 * decode.widest + 4


def header(decode: Workload, predictor: str, slots: int) -> Header:
    geometry = decode.geometry
    return Header(
        layers=geometry.layers,
        blocks=geometry.blocks,
        slots=slots,
        predictor=predictor,
        evict="cycle",
    )


def built(header: Header) -> Core:
    """A core as the simulator builds it, from nothing but a log's header."""
    geometry = Geometry(header.layers, header.blocks)
    options = Options(predictor=header.predictor, evict=header.evict)
    return build_core(geometry, header.slots, options)[0]


def live_log(decode: Workload, predictor: str, path: Path) -> None:
    """What a runtime's core on the device `memory` was told and said, opening and puts included."""
    slots, blocks = small(decode), decode.geometry.blocks
    options = prefetchd.Options(
        staging_bytes=slots * PAGE_BYTES, device="memory", predictor=predictor
    )
    layout = uniform(LAYERS, PAGE_BYTES)
    with (
        path.open("wb") as file,
        prefetchd.open(None, layout, blocks=blocks, options=options) as runtime,
    ):
        log = LogWriter(file, header(decode, predictor, runtime.slots))
        with runtime.engine.lock:
            watch(runtime.engine.core, log.note)
        keys = np.zeros((blocks, 16), np.uint8)
        keys[:, 0] = np.arange(blocks)
        runtime.put(keys, np.zeros((blocks, LAYERS, PAGE_BYTES), np.uint8)).wait()
        run_decode(runtime, decode, Pace(200_000, hints=True, warmup_steps=0))


def virtual_log(decode: Workload, predictor: str) -> list[Entry]:
    entries: list[Entry] = []
    settings = SimulateSettings(page_bytes=PAGE_BYTES, layer_us=200.0, warmup_steps=0)
    run_plan(
        decode,
        settings,
        Plan("run", False, "cycle", predictor, small(decode), CoreLimits()),
        DriveModel(load_profile(DEFAULT)),
        record=lambda now_ns, event, commands: entries.append((now_ns, event, commands)),
    )
    return entries


def kinds(entries: list[Entry]) -> Counter[str]:
    return Counter(type(event).__name__ for _, event, _ in entries)


def reads(entries: list[Entry], io_class: IoClass) -> int:
    commands = [command for _, _, commands in entries for command in commands]
    return sum(len(c.pages) for c in commands if isinstance(c, Read) and c.io_class == io_class)


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_a_live_log_replays_in_a_simulators_core(
    predictor: str, decode: Workload, tmp_path: Path
) -> None:
    live_log(decode, predictor, tmp_path / "events.log")
    head, entries = read_log(tmp_path / "events.log")
    logged = list(entries)
    demands = decode.steps * decode.geometry.layers
    assert replay(built(head), logged) == len(logged) - kinds(logged)["Known"]
    assert kinds(logged)["Demanded"] == demands
    assert kinds(logged)["Idle"]
    assert reads(logged, IoClass.DEMAND)
    assert bool(reads(logged, IoClass.PREFETCH)) == (predictor != "none")


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_a_simulations_log_replays_in_a_new_core(
    predictor: str, decode: Workload, tmp_path: Path
) -> None:
    logged = virtual_log(decode, predictor)
    with (tmp_path / "events.log").open("wb") as file:
        log = LogWriter(file, header(decode, predictor, small(decode)))
        for now_ns, event, commands in logged:
            log.note(now_ns, event, commands)
    head, entries = read_log(tmp_path / "events.log")
    assert replay(built(head), entries) == len(logged)
    plan = Plan("run", False, "cycle", predictor, small(decode), CoreLimits())
    assert replay(plan_core(decode, plan), logged) == len(logged)
    assert bool(reads(logged, IoClass.PREFETCH)) == (predictor != "none")


def test_a_core_that_does_anything_else_is_found_out(decode: Workload) -> None:
    logged = virtual_log(decode, "auto")
    with pytest.raises(EventLogError, match=r"(?s)entry \d+, .* but here came"):
        replay(built(header(decode, "none", small(decode))), logged)
    late = [(now_ns + 1, *rest) for now_ns, *rest in logged if not isinstance(rest[0], Idle)]
    with pytest.raises(EventLogError):
        replay(built(header(decode, "auto", small(decode))), late)  # type: ignore[arg-type]


def test_a_log_that_is_cut_off_or_none_at_all(decode: Workload, tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    logged = virtual_log(decode, "auto")
    with path.open("wb") as file:
        log = LogWriter(file, header(decode, "auto", small(decode)))
        for entry in logged:
            log.note(*entry)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    head, entries = read_log(path)
    read = list(entries)
    assert len(read) == len(logged) - 1
    assert replay(built(head), read) == len(read)
    hints = [event.hint for _, event, _ in read if isinstance(event, Hinted)]
    assert {type(hint).__name__ for hint in hints} == {"PageHint", "ChainHint"}
    path.write_bytes(b"no log")
    with pytest.raises(EventLogError, match="not a log of events"):
        read_log(path)
