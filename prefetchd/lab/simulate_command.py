"""`prefetchd simulate ...`: options, progress and output of simulations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from prefetchd import metrics
from prefetchd.bench import decode_options as options
from prefetchd.bench.output import Outputs, progress_bars
from prefetchd.drive_profile import DEFAULT, SEED, DriveProfile, load_profile, seed_notes
from prefetchd.lab.dpu import NO_DPU, Dpu, read_dpu
from prefetchd.lab.simulate_decode import SimulateSettings, simulate_decode
from prefetchd.lab.workload import Workload

DeviceProfile = Annotated[
    str, typer.Option(help="Drive profile, by name or .toml file; see devices/profiles.")
]
Seed = Annotated[
    int,
    typer.Option(
        min=0,
        max=2**63,
        help="Decides which reads are slow, if the profile has a read_tail or is scattered.",
    ),
]
Rounds = Annotated[
    int,
    typer.Option(min=1, help="Rounds, each with a seed of its own; alike where no read is drawn."),
]
DpuFile = Annotated[
    Path | None,
    typer.Option(
        "--dpu", help="TOML: decision_us, cores, staging_bytes, link_gb_s; default: no cost."
    ),
]

simulate_app = typer.Typer(help="Run recorded traffic under a virtual clock on a modelled drive.")


@simulate_app.command("decode")
def decode(
    trace: options.TracePath = None,
    device_profile: DeviceProfile = DEFAULT,
    dpu: DpuFile = None,
    page_bytes: options.PageBytes = "64KiB",
    staging: Annotated[
        str | None,
        typer.Option(help="Share of all pages, or bytes; default: the DPU's, or 25%."),
    ] = None,
    top_k: options.TopK = 16,
    layer_us: options.LayerUs = 600.0,
    hints: options.Hints = True,
    predictor: options.Predictors = None,
    evict: options.Evict = "cycle",
    controls: options.Controls = options.ALL_CONTROLS,
    steps: options.Steps = None,
    warmup: options.Warmup = 16,
    rounds: Rounds = 1,
    depth: options.Depth = 128,
    requests: options.BatchSize = 1,
    shared: options.Shared = "50%",
    seed: Seed = SEED,
    json: options.Json = None,
    report: options.Html = None,
) -> None:
    """Decode a recorded run as `replay decode` does, on a drive that need not be there."""
    outputs = Outputs(json, report)
    outputs.check()
    profile = load_profile(device_profile)
    processor = read_dpu(dpu) if dpu else NO_DPU
    workload = options.recorded(
        trace, top_k=top_k, steps=steps, warmup=warmup, requests=requests, shared=shared
    )
    size = options.page_size(page_bytes)
    settings = SimulateSettings(
        page_bytes=size,
        staging_slots=options.slots(workload, staging or _staging(processor), size),
        layer_us=layer_us,
        hints=hints,
        top_k=top_k,
        predictors=tuple(predictor or ("auto",)),
        controls=options.names(controls),
        evict=evict,
        depth=depth,
        rounds=rounds,
        warmup_steps=warmup,
        seed=seed,
        dpu=processor,
    )
    console = Console(stderr=True)
    result = _run(workload, settings, profile, console)
    notes = [*result.notes, *seed_notes(profile, seed, rounds)]
    options.show(outputs, console, msgspec.structs.replace(result, notes=notes))


def _staging(dpu: Dpu) -> str:
    return str(dpu.staging_bytes) if dpu.staging_bytes else "25%"


def _run(
    workload: Workload, settings: SimulateSettings, profile: DriveProfile, console: Console
) -> metrics.Result:
    runs = len(settings.controls) + len(settings.predictors)
    with progress_bars(console) as bar:
        simulating = bar("simulating", settings.rounds * runs * workload.steps)
        return simulate_decode(workload, settings, profile, simulating)
