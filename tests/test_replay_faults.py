"""Replays that cannot go as asked: a clear message and an exit code, or a counted miss, never a
traceback and never another page's bytes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefetchd import driver, places, store_making, store_opening, transfers
from prefetchd.bench.decode import WrongBytes
from prefetchd.bench.replay import ReplaySettings
from prefetchd.catalog import Catalog
from prefetchd.core import CoreLimits
from prefetchd.device import Arena, File, StorageDevice
from prefetchd.devices.faulty import Faults, Faulty
from prefetchd.devices.threads import Threads
from prefetchd.format import (
    FORMAT_VERSION,
    Superblock,
    encode_superblock,
    newest_superblock,
    superblock_place,
)
from prefetchd.hostinfo import Medium, medium_of
from prefetchd.metrics import Result, Run
from prefetchd.model import Ids
from tests.forbidden import FORBID_URING
from tests.replays import (
    BLOCKS,
    LAYERS,
    PAGE_BYTES,
    replay_with,
    replay_words,
    run_child,
    run_here,
    workload,
    write_trace,
)

Capture = pytest.CaptureFixture[str]
SHM = Path("/dev/shm")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "tiny.npz")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def made(trace: Path, folder: Path, capsys: Capture) -> list[str | Path]:
    """The words of a replay whose store is there already."""
    words = replay_words(trace, folder, "--controls", "none", "--predictor", "attention")
    run_here(capsys, *words).result()
    return words


# --- where the store lies ---


@pytest.mark.parametrize("page_bytes", ["5000", "18432"])
def test_a_page_that_is_no_multiple_of_the_alignment_runs_padded(
    trace: Path, folder: Path, capsys: Capture, page_bytes: str
) -> None:
    words = replay_words(trace, folder, "--page-bytes", page_bytes, "--controls", "none")
    result = run_here(capsys, *words).result()
    padded = -(-int(page_bytes) // 4096) * 4096
    assert result.settings.page_bytes == int(page_bytes)
    assert all(run.device_bytes % padded == 0 and run.verified_pages for run in result.runs)


def test_a_device_that_wants_more_alignment_than_a_page_has(
    made: list[str | Path],
    trace: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def coarse(fd: int, path: str) -> Medium:
        return replace(
            medium_of(fd, path), memory_alignment_bytes=512, offset_alignment_bytes=16384
        )

    monkeypatch.setattr(store_opening, "medium_of", coarse)
    monkeypatch.setattr(store_making, "medium_of", coarse)
    run_here(capsys, *made).failed(3, "aligned to 4096", "16384", "create the store anew")
    result = run_here(capsys, *replay_words(trace, tmp_path / "new")).result()
    slots = result.settings.staging_slots
    assert slots == BLOCKS * LAYERS // 2
    for run in result.runs:
        assert run.device_bytes % 16384 == 0
        assert run.failures == {}
    cold = next(run for run in result.runs if run.name == "cold")
    assert cold.device_bytes == cold.outcomes.miss * 16384


@pytest.mark.skipif(
    not SHM.is_dir() or not os.access(SHM, os.W_OK), reason="/dev/shm is not there or not writable"
)
def test_a_store_on_tmpfs_runs_and_is_marked_ram(trace: Path, capsys: Capture) -> None:
    fd = os.open(SHM, os.O_RDONLY)
    is_ram = medium_of(fd, str(SHM)).is_ram
    os.close(fd)
    if not is_ram:
        pytest.skip("/dev/shm is no tmpfs here")
    folder = SHM / f"prefetchd-test-{os.getpid()}"
    try:
        done = run_here(capsys, *replay_words(trace, folder, "--controls", "none"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if "EINVAL" in done.err:
        pytest.skip("this kernel's tmpfs refuses O_DIRECT")
    device = done.result().device
    assert (device.kind, device.file_system) == ("RAM", "tmpfs")


DROP_CAPABILITIES = """
import ctypes, resource
libc = ctypes.CDLL(None, use_errno=True)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: low words, then high ones
assert libc.capget(header, data) == 0
for word in (0, 1, 2):
    data[word] &= ~{mask}
assert libc.capset(header, data) == 0
"""
WITHOUT_OVERRIDE = DROP_CAPABILITIES.format(mask=0b110)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
LOCKED_BYTES = 1 << 20  # enough for a ring, too little for staging
WITHOUT_MEMLOCK = (
    DROP_CAPABILITIES.format(mask=1 << 14)  # CAP_IPC_LOCK
    + f"resource.setrlimit(resource.RLIMIT_MEMLOCK, ({LOCKED_BYTES}, {LOCKED_BYTES}))\n"
)


def test_a_folder_that_may_not_be_written(trace: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    words = replay_words(trace, closed / "store")
    run_child(words, prelude=WITHOUT_OVERRIDE).failed(3, str(closed), "EACCES", "permission")


def test_a_read_only_file_system(
    trace: Path, folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    words = replay_words(trace, folder)
    run_here(capsys, *words).failed(3, str(folder), "EROFS", "mounted read-only")


def test_a_missing_parent(trace: Path, tmp_path: Path, capsys: Capture) -> None:
    words = replay_words(trace, tmp_path / "not" / "there")
    run_here(capsys, *words).failed(3, "ENOENT", "create its parent folder first")


def test_a_store_that_another_process_owns(
    made: list[str | Path], folder: Path, capsys: Capture
) -> None:
    with (folder / "owner.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        child = run_child(made)
    child.failed(3, f"in use by process {os.getpid()}", "another folder")
    run_here(capsys, *made).result()


def test_a_store_of_another_layout(made: list[str | Path], folder: Path, capsys: Capture) -> None:
    words = [*made, "--page-bytes", "8KiB"]
    run_here(capsys, *words).failed(3, str(folder), "made for another layout", "4096", "8192")


@pytest.mark.parametrize("words", [("--seed", "2"), ("--requests", "2")])
def test_a_store_that_is_full_of_another_trace(
    made: list[str | Path], folder: Path, capsys: Capture, words: Sequence[str]
) -> None:
    run_here(capsys, *made, *words).failed(2, str(folder), "in use", "name a new folder")


def rewrite_superblock(folder: Path, **changes: int) -> None:
    with (folder / "extents.dat").open("r+b") as file:
        shape = newest_superblock(np.frombuffer(file.read(1 << 16), np.uint8))
        fields = {name: getattr(shape, name) for name in shape.__struct_fields__}
        new = Superblock(**{**fields, **changes})
        file.seek(0)
        file.write(bytes(new.superblock_bytes))
        file.seek(superblock_place(new))
        file.write(encode_superblock(new).tobytes())


def test_a_store_of_a_newer_version(made: list[str | Path], folder: Path, capsys: Capture) -> None:
    rewrite_superblock(folder, version=FORMAT_VERSION + 1)
    run_here(capsys, *made).failed(3, str(folder), "format version 4", "reads 3")


def test_a_damaged_and_a_shortened_store(
    made: list[str | Path], folder: Path, capsys: Capture
) -> None:
    path = folder / "extents.dat"
    os.truncate(path, path.stat().st_size // 2)
    run_here(capsys, *made).failed(3, str(folder), "cut short")
    with path.open("r+b") as file:
        for place in (0, 4096):
            file.seek(place + 20)
            file.write(b"\0\0\0")
    run_here(capsys, *made).failed(3, str(folder), "superblock is damaged")
    path.write_bytes(b"")
    run_here(capsys, *made).failed(3, str(folder), "is not a prefetchd store")


# --- what the machine allows ---


def test_too_little_locked_memory_runs_unregistered_and_says_so(trace: Path, folder: Path) -> None:
    words = replay_words(trace, folder, "--controls", "none", "--page-bytes", "64KiB")
    done = run_child(words, prelude=WITHOUT_MEMLOCK)
    device = done.result().device
    if device.name != "uring":
        pytest.skip(f"no io_uring here: {device.notes}")
    assert "fixed buffers" not in device.engine
    assert [note for note in device.notes if str(LOCKED_BYTES) in note or "memlock" in note.lower()]


@pytest.mark.parametrize("device", ["uring", "liburing"])
def test_where_io_uring_is_forbidden_threads_go_on_and_the_result_says_so(
    trace: Path, folder: Path, device: str
) -> None:
    words = replay_words(trace, folder, "--controls", "none", "--device", device)
    done = run_child(words, prelude=FORBID_URING)
    if done.code == 77:
        pytest.skip("no seccomp filter can be set here")
    result = done.result()
    assert result.device.name == "threads"
    assert "aiofiles" in result.device.engine
    assert [note for note in result.device.notes if "seccomp" in note and "threads" in note]
    assert all(run.verified_pages and not run.failures for run in result.runs)


REFUSES_WRITES = """
import errno
from prefetchd.device import WRITE
from prefetchd.devices.threads import Threads


class RefusesWrites(Threads):
    def _carry_out(self, op):
        return -errno.EINVAL if op[5] == WRITE else super()._carry_out(op)
"""


def test_o_direct_that_is_accepted_at_open_and_refused_at_the_first_write(
    trace: Path, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "refuses.py"
    path.write_text(REFUSES_WRITES)
    words = replay_words(trace, folder, "--device", path)
    told = ("writing the first page", "EINVAL", "O_DIRECT was accepted at open", "another path")
    run_here(capsys, *words).failed(3, str(folder), *told)


def test_a_device_that_cannot_be_had_is_not_replaced_in_silence(
    trace: Path, folder: Path, capsys: Capture
) -> None:
    words = replay_words(trace, folder, "--gpu", "no_such_gpu")
    run_here(capsys, *words).failed(2, "no_such_gpu", "host")
    for name in ("memory", "faulty"):
        run_here(capsys, *replay_words(trace, folder, "--device", name)).failed(2, name, "tests")


# --- what was asked for ---


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--staging", "5%"), ("staging of 4 pages is too small", "at least")),
        (("--staging", "16KiB"), ("staging of 4 pages is too small", "at least")),
        (("--staging", "lots"), ("'lots' is no size",)),
        (("--staging", "120%"), ("at most 100 %",)),
        (("--page-bytes", "8"), ("too small to be stamped",)),
        (("--steps", "1"), ("1 steps leave none to measure", "--warmup")),
        (("--top-k", "5"), ("4 heaviest blocks", "at most 4")),
        (("--predictor", "atention"), ("Did you mean 'attention'?",)),
        (("--predictor", "auto", "--predictor", "auto"), ("named twice",)),
        (("--evict", "fifo"), ("no eviction is called 'fifo'", "cycle")),
        (("--controls", "warm"), ("no control is called 'warm'", "resident")),
        (("--requests", "2", "--shared", "half"), ("half", "percentage")),
        (("--json", "/no/such/folder/r.json"), ("/no/such/folder/r.json", "--json")),
        (("--report", "/no/such/folder/r.html"), ("/no/such/folder/r.html", "--report")),
    ],
)
def test_an_option_that_cannot_be_followed_is_told_before_anything_is_run(
    trace: Path, folder: Path, capsys: Capture, words: Sequence[str], told: Sequence[str]
) -> None:
    run_here(capsys, *replay_words(trace, folder), *words).failed(2, *told)
    assert capsys.readouterr().out == ""


def test_more_memory_than_there_is(trace: Path, folder: Path, capsys: Capture) -> None:
    words = replay_words(trace, folder, "--page-bytes", "2000MiB")
    run_here(capsys, *words).failed(2, "GiB of memory are free", "--controls")
    assert not folder.exists()


# --- what goes wrong on the way ---

FIRST_READ = 4  # after the superblock's write, flush and read, and the journal
HURRIED = {"demand_timeout_s": 0.2, "core": CoreLimits(read_timeout_ns=20_000_000)}
"""Limits for reads that never end; under a loaded machine others may be given up too."""


def replay_faulty(
    folder: Path, trace: Path, faults: Faults, limits: dict[str, Any] | None = None
) -> tuple[Result, list[Faulty]]:
    opened: list[Faulty] = []

    def device(files: Sequence[File], arena: Arena, depth: int) -> StorageDevice:
        opened.append(LateAfterCancel(Threads(files, arena, depth), faults))
        return opened[-1]

    settings = ReplaySettings(
        page_bytes=PAGE_BYTES,
        staging_slots=BLOCKS * LAYERS // 2,
        layer_us=0,
        top_k=2,
        predictors=("attention",),
        controls=("none",),  # `cold` has no slot to spare for those that are lost
        device=device,
        rounds=1,
        warmup_steps=0,
        idle_s=0,
        **limits or {},
    )
    return replay_with(folder, trace, settings), opened


class LateAfterCancel(Faulty):
    """What stalls ends as soon as it has been given up: as late as it can and be dangerous."""

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        super().cancel(tags)
        self.release_stalled()


def script(kind: str, first: int, count: int) -> tuple[tuple[int, str], ...]:
    return tuple((FIRST_READ + number, kind) for number in range(first, first + count))


def counted(run: Run, words: str) -> int:
    return sum(count for name, count in run.failures.items() if words in name)


@pytest.mark.parametrize(
    ("kind", "words"), [("short", "short read"), ("flip", "checksum mismatch"), ("eio", "EIO")]
)
def test_a_read_that_fails_once_is_counted_and_tried_again(
    folder: Path, trace: Path, kind: str, words: str
) -> None:
    result, opened = replay_faulty(folder, trace, Faults(script=script(kind, 0, 1)))
    pages = sum(len(pages) for pages in workload(trace).future())
    for run, device in zip(result.runs, opened, strict=True):
        assert device.injected[kind] == 1
        assert counted(run, words) >= 1
        assert counted(run, "could not be had") == 0
        assert run.outcomes.total == run.verified_pages == pages
        assert run.outcomes.miss > 0


@pytest.mark.parametrize(
    ("kind", "words"), [("short", "short read"), ("flip", "checksum mismatch"), ("eio", "EIO")]
)
def test_reads_that_keep_failing_are_misses_and_the_replay_goes_on(
    folder: Path, trace: Path, kind: str, words: str
) -> None:
    result, opened = replay_faulty(folder, trace, Faults(script=script(kind, 0, 40)))
    pages = sum(len(pages) for pages in workload(trace).future())
    for run, device in zip(result.runs, opened, strict=True):
        missing = counted(run, "could not be had")
        assert device.injected[kind] == 40
        assert counted(run, words) >= 40
        assert missing > 0
        assert run.outcomes.total == pages
        assert run.verified_pages == pages - missing
        assert run.outcomes.miss + run.outcomes.late >= missing
    assert "faults are injected on purpose" in result.device.notes


@pytest.mark.parametrize("kind", ["stall", "lose"])
def test_a_completion_that_comes_late_or_never_is_given_up_and_its_slot_is_not_reused(
    folder: Path, trace: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_CLOSE_TIMEOUT_NS", 1_000_000)
    faults = Faults(script=script(kind, 2, 2))
    result, opened = replay_faulty(folder, trace, faults, HURRIED)
    pages = sum(len(pages) for pages in workload(trace).future())
    for run, device in zip(result.runs, opened, strict=True):
        assert device.injected[kind] == 2
        assert counted(run, "did not end in time") >= 1
        assert run.outcomes.total == pages
        assert run.verified_pages == pages - counted(run, "could not be had")


def test_faults_of_every_kind_together_never_hand_over_wrong_bytes(
    folder: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_CLOSE_TIMEOUT_NS", 1_000_000)
    kinds = ("eio", "short", "flip", "eio", "stall", "flip", "short", "lose", "flip") * 2
    places = range(FIRST_READ, FIRST_READ + 2 * len(kinds), 2)
    faults = Faults(script=tuple(zip(places, kinds, strict=True)))
    result, _ = replay_faulty(folder, trace, faults, HURRIED)
    for run in result.runs:
        assert run.verified_pages == run.outcomes.total - counted(run, "could not be had")
        assert run.failures


def test_the_replay_itself_would_notice_another_pages_bytes(
    folder: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_another_block(shape: Superblock, pages: Ids) -> Any:
        return places.locate(shape, (pages + LAYERS) % (BLOCKS * LAYERS))

    monkeypatch.setattr(driver, "locate", of_another_block)
    monkeypatch.setattr(Catalog, "verify", lambda _, pages, *__: np.ones(len(pages), np.bool_))
    with pytest.raises(WrongBytes, match="other pages' bytes"):
        replay_faulty(folder, trace, Faults())
