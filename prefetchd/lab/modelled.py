"""What the result of a simulation says of the drive and the processor that it modelled."""

from __future__ import annotations

from prefetchd import metrics
from prefetchd.drive_profile import DriveProfile
from prefetchd.lab.dpu import Dpu

AT_DEPTH = "reads {0.read_us:g} us alone, {0.read_gb_s:.3g} GB/s at depth"
IN_TURN = "reads one after another, writes in no time"


def described(drive: DriveProfile, dpu: Dpu, reads: str = AT_DEPTH) -> metrics.Device:
    """`reads`: how the drive serves, in words that may name fields of its profile."""
    return metrics.Device(
        name=drive.name,
        engine=f"drive model under a virtual clock, {reads.format(drive)}",
        file_system="none",
        kind="SIMULATED",
        gpu=metrics.Gpu(
            name="modelled", engine=f"at {dpu.link_gb_s:g} GB/s" if dpu.link_gb_s else "in no time"
        ),
    )


def told_dpu(dpu: Dpu) -> dict[str, str | int | float | bool]:
    return {
        "dpu": dpu.name,
        "decision_us": dpu.decision_us,
        "cores": dpu.cores,
        "link_gb_s": dpu.link_gb_s,
    }
