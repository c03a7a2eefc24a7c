"""`prefetchd store ...`: making, showing, checking, repairing and erasing stores.

Decides options, words and exit codes: 1 means that a check found something. All work is done
elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from prefetchd import checking, store_info, store_making
from prefetchd import key_file as key_files
from prefetchd.erasing import erase as erase_store
from prefetchd.erasing import parts_of, parts_with_key
from prefetchd.layout import Layout, LayoutError, uniform
from prefetchd.layout_command import layout_of
from prefetchd.replacing import replace_path
from prefetchd.store_opening import Opening, is_unfinished, peek
from prefetchd.store_options import (
    DeviceName,
    ForceFlag,
    JsonFlag,
    KeyFile,
    MissingFlag,
    RawFlag,
    StorePath,
    bars,
    out,
    print_json,
)
from prefetchd.units import parse_bytes

store_app = typer.Typer(help="Make, show, check, repair and erase stores.", no_args_is_help=True)

_UNREADABLE = "what the store held can no longer be read"
_SHOWN = 20  # problems; --json has more


@store_app.callback()
def _group() -> None:
    """Stores that nobody uses at the moment."""


@store_app.command("create")
def create(
    folder: StorePath,
    model: Annotated[
        str | None, typer.Option(help="A preset, or a Hugging Face config.json.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of a model's cache: bf16, fp8 ...")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Pages a block, without model.")] = None,
    page_bytes: Annotated[str | None, typer.Option(help="Bytes of one of those pages.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Blocks it can hold.")] = None,
    size: Annotated[
        str | None, typer.Option("--bytes", help="Or bytes it may take, as in 100GiB.")
    ] = None,
    path: Annotated[
        list[Path] | None,
        typer.Option(readable=False, help="A further folder, on another drive; repeatable."),
    ] = None,
    fill: Annotated[
        bool, typer.Option("--fill/--no-fill", help="Write it once, so that reads touch the drive.")
    ] = True,
    key_file: Annotated[
        Path | None,
        typer.Option(readable=False, help="Encrypt it; the key is kept there, in a new file."),
    ] = None,
    raw: RawFlag = False,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Make a store: its files preallocated, and filled unless told otherwise."""
    layout = _layout(model, dtype, layers, page_bytes)
    if (blocks is None) == (size is None):
        raise ValueError("say how large the store is to be: either --blocks or --bytes")
    with bars() as bar:
        store_making.create(
            folder,
            layout,
            blocks,
            size=None if size is None else parse_bytes(size),
            fill=fill,
            paths=path or [],
            raw=raw,
            force=force,
            key_file=key_file,
            progress=bar("filling"),
        )
    _show(store_info.look(folder, Opening(read_only=True, raw=raw)), json=json)


def _layout(
    model: str | None, dtype: str | None, layers: int | None, page_bytes: str | None
) -> Layout:
    if model is not None and layers is None and page_bytes is None:
        return layout_of(model, dtype)
    if model is None and dtype is None and layers is not None and page_bytes is not None:
        if (length := parse_bytes(page_bytes)) < 1:
            raise ValueError(f"--page-bytes is {page_bytes}; a page has at least one byte")
        return uniform(layers, length)
    raise LayoutError("say what is stored: either --model, or --layers and --page-bytes")


@store_app.command("replace")
def replace(
    folder: StorePath,
    old: Annotated[Path, typer.Argument(readable=False, help="One of its further paths, empty.")],
    new: Annotated[Path, typer.Argument(readable=False, help="A folder on another drive.")],
    fill: Annotated[bool, typer.Option("--fill/--no-fill", help="Write the new part once.")] = True,
    raw: RawFlag = False,
    force: ForceFlag = False,
    key_file: KeyFile = None,
    json: JsonFlag = False,
) -> None:
    """Put another drive in the place of a path that was drained; the old one may be away."""
    with bars() as bar:
        told = bar("filling")
        replace_path(
            folder, old, new, fill=fill, raw=raw, force=force, key_file=key_file, progress=told
        )
    _show(store_info.look(folder, Opening(read_only=True, raw=raw)), json=json)


@store_app.command("info")
def info(
    folder: StorePath,
    raw: RawFlag = False,
    allow_missing_paths: MissingFlag = False,
    device: DeviceName = "uring",
    json: JsonFlag = False,
) -> None:
    """Show a store's layout, paths, state, and how long its blocks have to live."""
    opening = Opening(True, allow_missing_paths, raw)
    with bars() as bar:
        found = store_info.look(folder, opening, device=device, progress=bar("reading headers"))
    _show(found, json=json)


def _show(found: store_info.Info, *, json: bool) -> None:
    if json:
        print_json(found)
        return
    console = out()
    for name, words in store_info.rows(found):
        console.print(f"{name:<14} {words}", markup=False)
    for note in found.notes:
        console.print(f"note: {note}", markup=False)


@store_app.command("check")
def check(
    folder: StorePath,
    raw: RawFlag = False,
    allow_missing_paths: MissingFlag = False,
    key_file: KeyFile = None,
    device: DeviceName = "uring",
    json: JsonFlag = False,
) -> None:
    """Read every page, verify every checksum and the accounting. Exit code 1: something is wrong.

    Nothing is written.
    """
    opening = Opening(True, allow_missing_paths, raw, key_file)
    with bars() as bar:
        report = checking.check(
            folder,
            opening,
            device=device,
            scanning=bar("reading headers"),
            progress=bar("checking"),
        )
    if json:
        print_json(report)
    else:
        _tell(report)
    if report.counts:
        raise typer.Exit(1)


def _tell(report: checking.Report) -> None:
    console = out()
    for problem in report.problems[:_SHOWN]:
        console.print(f"{problem.path}: {problem.words}", markup=False)
    total = sum(report.counts.values())
    if total > _SHOWN:
        console.print(f"... and {total - _SHOWN} more; --json names up to {checking.PROBLEMS_MAX}")
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    rate = report.bytes_read / report.seconds / 1e9 if report.seconds else 0.0
    console.print(
        f"{report.blocks_stored:,} blocks, {report.pages_right:,} pages right; "
        f"{report.bytes_read:,} bytes in {report.seconds:.2f} s ({rate:.2f} GB/s)"
    )
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.counts.items()))
    repair = "`prefetchd store repair` removes what fails"
    problems = "1 problem" if total == 1 else f"{total} problems"
    console.print(f"{problems} ({kinds}); {repair}" if total else "nothing is wrong")


@store_app.command("repair")
def repair(
    folder: StorePath,
    raw: RawFlag = False,
    key_file: KeyFile = None,
    device: DeviceName = "uring",
    json: JsonFlag = False,
) -> None:
    """Remove what fails its checks, make journal and headers agree, free what belongs to nothing.

    Exit code 1: something is left that could not be helped.
    """
    with bars() as bar:
        done = checking.repair(
            folder,
            Opening(raw=raw, key_file=key_file),
            device=device,
            scanning=bar("reading headers"),
            progress=bar("checking"),
        )
    if json:
        print_json(done)
    else:
        console = out()
        for words in done.left[:_SHOWN]:
            console.print(words, markup=False)
        console.print(
            f"blocks removed: {done.removed}; headers written: {done.headers_written}, and the "
            f"journal; blocks stored: {done.blocks_stored}"
        )
    if done.left:
        raise typer.Exit(1)


@store_app.command("erase")
def erase(
    folder: StorePath,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    lone: Annotated[
        bool, typer.Option("--lone", help="What can be, if parts are away or in use.")
    ] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(readable=False, help="Destroy the key of an encrypted one first."),
    ] = None,
    raw: RawFlag = False,
    json: JsonFlag = False,
) -> None:
    """Remove a store: its own files on all its paths, and nothing else that lies there.

    Exit code 3: a part of it is in use, and is left. Its key is destroyed all the same.
    """
    if key_file is None:
        parts = parts_of(folder, raw=raw, lone=lone)
    else:
        parts = parts_with_key(folder, key_file, raw=raw, lone=lone)
    keyed = not is_unfinished(folder) and bool(peek(folder, raw=raw).key_check)
    words = ", ".join(map(str, [*parts.places, *([] if key_file is None else [key_file])]))
    if not yes and not sys.stdin.isatty():
        raise ValueError(f"{words} would be erased; say --yes")
    if not yes and not typer.confirm(f"Erase the store on {words}?", err=True):
        raise ValueError("nothing was erased")
    if key_file is not None:
        key_files.destroy(key_file)
        if not json:
            out().print(f"destroyed {key_file}: {_UNREADABLE}", markup=False)
    gone = erase_store(parts.places, raw=raw)
    if json:
        left = {"away": parts.away, "in_use": parts.in_use}
        found = {name: {str(path): why for path, why in of.items()} for name, of in left.items()}
        key = None if key_file is None else str(key_file)
        print_json({"key_destroyed": key, "erased": [str(path) for path in gone], **found})
    else:
        told = [f"erased {path}" for path in gone]
        if keyed and key_file is None:
            told.append("its key file was not named and is left; destroy it, too")
        told += [f"not erased: {why}" for why in (parts.away | parts.in_use).values()]
        out().print("\n".join(told), markup=False)
    if parts.in_use:
        raise typer.Exit(3)
