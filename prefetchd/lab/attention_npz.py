"""Reads raw recordings of decode attention (.npz as numpy.savez writes it), some steps at a time.

Decides what such a file must hold. Columns: `block_ids` and `mass` [step, layer, KV head, rank],
the heaviest token blocks by falling attention mass; optionally `hint_ids` and `hint_mass` of the
same shape but for the ranks, what the model can foresee of a layer when the one before it starts,
and `window_mass`; `prompt_tokens` and `block_tokens`. Where a head has fewer blocks than there are
ranks, the rest is padding: -1 (65535 as uint16) without mass.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from prefetchd.lab.npz import opened_zip
from prefetchd.lab.trace_schema import CHUNK_BYTES, Columns, TraceError, TraceHeader

_REQUIRED = ("block_ids", "mass")
_HINTS = ("hint_ids", "hint_mass")
_EXTRA = "window_mass"
_BLOCKS_MAX = 1 << 24  # beyond any context: what holds more is taken for damage, not for memory
_MASS_MAX = float(np.finfo(np.float16).max)

_Form = tuple[tuple[int, ...], np.dtype[np.generic]]


@dataclass(frozen=True, slots=True)
class RawAttention:
    """A recording whose checksums, shapes and numbers have been checked, to be read in chunks."""

    path: Path
    header: TraceHeader
    forms: dict[str, _Form]

    def chunks(self, only: Collection[str] | None = None) -> Iterator[Columns]:
        """As `OpenTrace.chunks`: ids as uint16, or uint32 where they are wider than two bytes, and
        masses as float16 or float32 alike. Raises TraceError: values out of range."""
        forms = {name: form for name, form in self.forms.items() if only is None or name in only}
        step_bytes = sum(math.prod(shape[1:]) * dtype.itemsize for shape, dtype in forms.values())
        rows = max(1, CHUNK_BYTES // step_bytes)
        with opened_zip(self.path) as archive, ExitStack() as stack:
            members = {name: stack.enter_context(_member(archive, name)) for name in forms}
            for first in range(0, self.header.length, rows):
                count = min(rows, self.header.length - first)
                raw = {name: _values(members[name], count, *form) for name, form in forms.items()}
                for ids, mass in (_REQUIRED, _HINTS):
                    if ids in raw:
                        raw[ids] = _checked_ids(self.path, ids, raw[ids], raw.get(mass))
                    if mass in raw:
                        raw[mass] = _checked_mass(self.path, mass, raw[mass])
                if _EXTRA in raw:
                    raw[_EXTRA] = _checked_mass(self.path, _EXTRA, raw[_EXTRA])
                yield raw


def _values(
    member: IO[bytes], rows: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]
) -> NDArray[np.generic]:
    """The next rows of a member."""
    size = rows * math.prod(shape[1:]) * dtype.itemsize
    return np.frombuffer(member.read(size), dtype).reshape(rows, *shape[1:])


def read_recording(path: Path) -> RawAttention:
    """Raises TraceError: missing, cut short, foreign, or lacking columns."""
    with opened_zip(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        lacking = [name for name in _REQUIRED if name not in names]
        if lacking:
            raise TraceError(
                f"{path} lacks {', '.join(lacking)} (it has {', '.join(sorted(names))}); "
                "record it again with attention masses"
            )
        hints = _HINTS if set(names) & set(_HINTS) else ()
        wanted = [name for name in (*_REQUIRED, *hints, _EXTRA) if name in names]
        for name in (*wanted, "prompt_tokens", "block_tokens"):
            if name in names:
                _verify(archive, name)
        forms = {name: _form(path, archive, name) for name in wanted}
        _check_shapes(path, {name: shape for name, (shape, _) in forms.items()})
        shape = forms["block_ids"][0]
        header = TraceHeader(
            kind="decode",
            name=path.stem,
            origin=path.name,
            prompt_tokens=_number(path, archive, "prompt_tokens", 0, at_least=0),
            block_tokens=_number(path, archive, "block_tokens", 16, at_least=1),
            layers=shape[1],
            kv_heads=shape[2],
            rows=(shape[0],),
        )
    return RawAttention(path, header, forms)


def _verify(archive: zipfile.ZipFile, name: str) -> None:
    """Read all of a member, which verifies its checksum before anything in it is believed."""
    with archive.open(f"{name}.npy") as member:
        while member.read(1 << 20):
            pass


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """A member, at the first byte of its values."""
    member = archive.open(f"{name}.npy")
    _head(member)
    return member


def _head(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    read = npy.read_array_header_1_0 if npy.read_magic(member) == (1, 0) else _second
    return read(member)


def _second(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    return npy.read_array_header_2_0(member)


def _form(path: Path, archive: zipfile.ZipFile, name: str) -> _Form:
    with archive.open(f"{name}.npy") as member:
        shape, is_fortran, dtype = _head(member)
        held = archive.getinfo(f"{name}.npy").file_size - member.tell()
    if dtype.hasobject:
        raise TraceError(
            f"{path} cannot be read as an .npz trace: {name} holds pickled Python objects, which "
            "are never read"
        )
    if is_fortran:
        raise TraceError(f"{path}: {name} is stored column by column; save it in C order")
    if held != math.prod(shape) * dtype.itemsize:
        raise TraceError(f"{path} cannot be read as an .npz trace: {name} is not of its shape")
    return shape, dtype


def _check_shapes(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    for ids, mass in (_REQUIRED, _HINTS):
        if shapes.get(ids) != shapes.get(mass):
            raise TraceError(
                f"{path}: {ids} and {mass} differ in shape, {shapes.get(ids)} and "
                f"{shapes.get(mass)}; the trace is incomplete"
            )
    for ids in ("block_ids", "hint_ids"):
        if ids in shapes and (len(shapes[ids]) != 4 or 0 in shapes[ids]):
            raise TraceError(
                f"{path}: {ids} must be [step, layer, KV head, rank], not of shape {shapes[ids]}"
            )
    if "hint_ids" in shapes and shapes["hint_ids"][:3] != shapes["block_ids"][:3]:
        raise TraceError(
            f"{path}: hints are for {shapes['hint_ids'][:3]} steps, layers and heads, demands for "
            f"{shapes['block_ids'][:3]}; the trace is cut short or mixed up"
        )
    window = shapes.get(_EXTRA, shapes["block_ids"])
    if len(window) != 4 or window[:2] != shapes["block_ids"][:2]:
        raise TraceError(f"{path}: {_EXTRA} is not [step, layer, query head, window]")


def _checked_ids(
    path: Path, name: str, ids: NDArray[Any], mass: NDArray[Any] | None
) -> NDArray[np.generic]:
    if not np.issubdtype(ids.dtype, np.integer):
        raise TraceError(f"{path}: {name} must be whole numbers, not {ids.dtype}")
    if mass is not None:
        ids = _without_padding(ids, mass)
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= _BLOCKS_MAX:
        raise TraceError(
            f"{path}: {name} run from {least} to {most}; blocks are numbered 0 to {_BLOCKS_MAX - 1}"
        )
    return ids.astype(np.uint16 if ids.itemsize <= 2 else np.uint32)


def _without_padding(ids: NDArray[Any], mass: NDArray[Any]) -> NDArray[Any]:
    """Padding names the head's heaviest block once more, or block 0 if it has none: no other
    block is needed for it."""
    is_padding = (ids == np.array(-1).astype(ids.dtype)) & (mass == 0)
    if not is_padding.any():
        return ids
    return np.where(is_padding, np.where(is_padding, 0, ids)[..., :1], ids)


def _checked_mass(path: Path, name: str, mass: NDArray[Any]) -> NDArray[np.generic]:
    if not np.issubdtype(mass.dtype, np.floating):
        raise TraceError(f"{path}: {name} must be floating-point numbers, not {mass.dtype}")
    if not (mass.min() >= 0 and mass.max() <= _MASS_MAX):  # nor of what is no number
        raise TraceError(
            f"{path}: {name} must be finite and from 0 to {_MASS_MAX:g}, as shares of attention are"
        )
    return mass.astype(np.float16 if mass.itemsize <= 2 else np.float32)


def _number(path: Path, archive: zipfile.ZipFile, name: str, default: int, *, at_least: int) -> int:
    if f"{name}.npy" not in archive.namelist():
        return default
    shape, dtype = _form(path, archive, name)
    if math.prod(shape) != 1 or not np.issubdtype(dtype, np.integer):
        raise TraceError(f"{path}: {name} must be one whole number, not {shape} of {dtype}")
    with _member(archive, name) as member:
        value = int(np.frombuffer(member.read(), dtype)[0])
    if value < at_least:
        raise TraceError(
            f"{path}: {name} must be one whole number of at least {at_least}, not {value}"
        )
    return value
