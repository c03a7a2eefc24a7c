"""What a modelled drive can do: a few published or measured numbers, read from a TOML file.

Decides which numbers describe a drive and what makes no sense. Refuses to know how they become
completion times (`prefetchd.drive_model` does) and whether time is real or virtual.
"""

from __future__ import annotations

import difflib
import importlib
from itertools import pairwise
from pathlib import Path

import msgspec

from prefetchd.hostinfo import errno_name
from prefetchd.toml_errors import what_is_wrong

DEFAULT = "8-pages-per-300us"
SEED = 1
"""Unless another is asked for."""
_SUFFIX = ".toml"
LEAST_GB_S, MOST_GB_S = 1e-6, 1_000_000
"""Slower, and the times of a run do not fit into 64 bits of nanoseconds."""
_MOST_US, _MOST_UNITS = 1_000_000_000, 1 << 20


class ProfileError(ValueError):
    """A drive profile cannot be used: which, what is wrong with it, what to do."""


class DriveProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One drive. Rates in 1e9 bytes/s, times in microseconds.

    `read_gb_s`, `write_gb_s`: what it moves at depth. `read_us`, `write_us`: how long one operation
    takes alone, without its transfer. `units`: operations that its medium serves at once, so that
    its highest rate of small reads is `units / read_us`. `scattered`: each operation is for a unit
    drawn at random, as pages lie on flash dies, and waits for that one; else for the first that is
    free. `read_tail`: (share, us) points above `read_us`: that share of reads takes no longer.
    `behind_write_us`: what a read takes longer while a write is under way. `link_gb_s`: ceiling of
    the link, each way (0: none). `source`: where the numbers come from. `missing`: what has to be
    filled in before the profile can be used, since nobody has published it.
    """

    name: str
    read_gb_s: float
    write_gb_s: float
    read_us: float
    write_us: float = 0.0
    units: int = 64
    scattered: bool = False
    read_tail: tuple[tuple[float, float], ...] = ()
    behind_write_us: float = 0.0
    link_gb_s: float = 0.0
    source: str = ""
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("read_gb_s", "write_gb_s"):
            if not LEAST_GB_S <= getattr(self, name) <= MOST_GB_S:
                raise ValueError(
                    f"{name} is {getattr(self, name):g}; give what the drive moves, in 1e9 bytes "
                    f"a second, from {LEAST_GB_S:f} to {MOST_GB_S:,}"
                )
        if self.link_gb_s and not LEAST_GB_S <= self.link_gb_s <= MOST_GB_S:
            raise ValueError(
                f"link_gb_s is {self.link_gb_s:g}; give what the link moves, or 0 for no bound"
            )
        for name in ("read_us", "write_us", "behind_write_us"):
            if not 0 <= getattr(self, name) <= _MOST_US:
                raise ValueError(f"{name} is {getattr(self, name):g}; give 0 to {_MOST_US:,}")
        if not 1 <= self.units <= _MOST_UNITS:
            raise ValueError(
                f"units is {self.units}; a medium serves 1 to {_MOST_UNITS:,} operations at once"
            )
        points = ((0.0, self.read_us), *self.read_tail)
        for (share, us), (next_share, next_us) in pairwise(points):
            if not (share < next_share <= 1 and us <= next_us <= _MOST_US):
                raise ValueError(
                    f"read_tail must rise from (0, {self.read_us:g}) to at most (1, {_MOST_US:,})"
                )


def seed_notes(drive: DriveProfile, seed: int, rounds: int) -> list[str]:
    """A note for whoever asked for another seed or several rounds, where chance plays no part."""
    if drive.read_tail or drive.scattered or (seed == SEED and rounds == 1):
        return []
    alike = ", and all rounds are alike" if rounds > 1 else ""
    return [
        f"the seed changes nothing with {drive.name}, which has no read_tail and is not "
        f"scattered{alike}"
    ]


def profile_names() -> tuple[str, ...]:
    """All profiles that ship with the package, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob(f"*{_SUFFIX}")))


def load_profile(name: str) -> DriveProfile:
    """The profile called `name`, or the one in the TOML file `name`. Raises ProfileError."""
    path = Path(name)
    if path.suffix != _SUFFIX:
        path = _folder() / f"{name}{_SUFFIX}"
        if not path.is_file():
            close = difflib.get_close_matches(name, profile_names(), n=1, cutoff=0.5)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise ProfileError(
                f"there is no drive profile called {name!r}.{meant} There are: "
                f"{', '.join(profile_names())}. A path to a {_SUFFIX} file works too"
            )
    text = ""
    try:
        text = path.read_bytes().decode()
        given = msgspec.toml.decode(text)
        missing = given.get("missing")
        named = [one for one in missing if isinstance(one, str)] if type(missing) is list else []
        if lacking := [field for field in named if field not in given]:
            raise ProfileError(
                f"drive profile {path.stem} is a template: nobody has published "
                f"{', '.join(lacking)}; copy {path}, fill in what you know or measured, and name "
                "the copy"
            )
        return msgspec.convert(given, DriveProfile)
    except OSError as error:
        reason = errno_name(error.errno) if error.errno else str(error)
        raise ProfileError(f"drive profile {path} cannot be read: {reason}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        wrong = what_is_wrong(text, error, DriveProfile)
        raise ProfileError(f"drive profile {path} cannot be used: {wrong}") from error


def _folder() -> Path:
    """Found through the import system, as links may stand here."""
    package = importlib.import_module("prefetchd.devices")
    return Path(next(iter(package.__path__))) / "profiles"
