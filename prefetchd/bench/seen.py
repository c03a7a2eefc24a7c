"""What the runtimes of a replay said of themselves, and what their drive says it moved.

Decides what a replay's result calls its device: name, engine, kind, and what was less than asked
for. Runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefetchd import metrics
from prefetchd.bench.disk import cached_share, read_counter
from prefetchd.bench.served import Serving

Mark = tuple[int, int | None]
"""Bytes asked of the device so far, and bytes that the drive says it has read (None: unknown)."""


def mark(runtime: Serving) -> Mark:
    """To be taken before what is measured begins."""
    return runtime.stats().bytes_read, read_counter(runtime.medium)


@dataclass(slots=True)
class Seen:
    """Filled by `note` after every run; the last one names the engine, notes add up."""

    gpu: str
    device: str = ""
    engine: str = ""
    gpu_engine: str = ""
    file_system: str = ""
    is_ram: bool = False
    notes: list[str] = field(default_factory=list)
    asked_bytes: int = 0
    medium_bytes: int | None = 0

    def note(self, runtime: Serving, before: Mark) -> None:
        stats, medium = runtime.stats(), runtime.medium
        asked, moved = mark(runtime)
        self.device, self.engine, self.gpu_engine = stats.device, stats.engine, stats.gpu
        self.file_system = medium.file_system
        self.is_ram = medium.is_ram or medium.file_system == "none"
        self.notes += [note for note in stats.notes if note not in self.notes]
        self.asked_bytes += asked - before[0]
        if moved is None or before[1] is None or self.medium_bytes is None:
            self.medium_bytes = None
        else:
            self.medium_bytes += moved - before[1]

    def described(self) -> metrics.Device:
        notes = list(self.notes)
        kind: metrics.Kind = "RAM" if self.is_ram else "MEASURED"
        share = None if self.is_ram else cached_share(self.asked_bytes, self.medium_bytes)
        if not self.asked_bytes:
            kind = "UNREAD"
            notes.append(
                "UNREAD: no run read anything from the device, since all that was asked for lay in "
                "staging; use less staging"
            )
        elif share is not None:
            kind = "CACHED"
            notes.append(
                f"CACHED: the drive moved only {1 - share:.0%} of the bytes that were read; a "
                "cache stands in front of it"
            )
        if self.asked_bytes and self.device == "emulated":
            kind = "EMULATED"  # whatever the store lies on; what was said of that stays
        return metrics.Device(
            name=self.device,
            engine=self.engine,
            file_system=self.file_system,
            kind=kind,
            gpu=metrics.Gpu(name=self.gpu, engine=self.gpu_engine),
            notes=notes,
        )
