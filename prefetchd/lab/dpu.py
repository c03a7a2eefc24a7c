"""The processor that runs the engine, as a simulation models it: a few numbers from a TOML file.

Decides which numbers describe it and what makes no sense. Refuses to know how they are used.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prefetchd.hostinfo import errno_name
from prefetchd.toml_errors import what_is_wrong


class DpuError(ValueError):
    """A DPU's file cannot be used: which, what is wrong with it."""


class Dpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`decision_us`: what one decision takes on one of its `cores`. `staging_bytes`: of its memory
    (0: as the command says). `link_gb_s`: from staging to the GPU, 1e9 bytes/s (0: takes no time).
    The numbers that are there without a file cost nothing."""

    name: str = "none"
    decision_us: float = 0.0
    cores: int = 1
    staging_bytes: int = 0
    link_gb_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("decision_us", "staging_bytes", "link_gb_s"):
            if not 0 <= getattr(self, name) < 1e15:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.cores < 1:
            raise ValueError(f"cores is {self.cores}; somebody must decide")

    def handover_ns(self, size_bytes: int) -> int:
        """How long so many bytes take to the GPU."""
        return round(size_bytes / self.link_gb_s) if self.link_gb_s else 0


NO_DPU = Dpu()


def read_dpu(path: Path) -> Dpu:
    """Raises DpuError."""
    text = ""
    try:
        text = path.read_bytes().decode()
        return msgspec.toml.decode(text, type=Dpu)
    except OSError as error:
        reason = errno_name(error.errno) if error.errno else str(error)
        raise DpuError(f"DPU file {path} cannot be read: {reason}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        wrong = what_is_wrong(text, error, Dpu)
        raise DpuError(f"DPU file {path} cannot be used: {wrong}") from error
