"""What a modelled drive does: alone, at depth, behind writes, on a link, with a tail of slow reads;
and which profiles are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prefetchd.drive_model import DriveModel
from prefetchd.drive_profile import (
    DEFAULT,
    DriveProfile,
    ProfileError,
    load_profile,
    profile_names,
)

PLAIN = DriveProfile(name="plain", read_gb_s=2.0, write_gb_s=1.0, read_us=100, write_us=20)


def altered(**changes: object) -> DriveProfile:
    return msgspec.structs.replace(PLAIN, **changes)


def ends(drive: DriveModel, *sizes: int, write: bool = False, now_ns: int = 0) -> list[int]:
    times: list[int] = drive.submit(np.array(sizes, np.int64), write=write, now_ns=now_ns).tolist()
    return times


def closed_loop(drive: DriveModel, size: int, depth: int, count: int) -> NDArray[np.int64]:
    """Latencies (ns) of `count` reads, `depth` in flight at all times."""
    given = np.zeros(count, np.int64)
    latencies = np.zeros(count, np.int64)
    flying: list[tuple[int, int]] = []
    for number in range(count):
        now_ns = 0
        if len(flying) == depth:
            flying.sort()
            now_ns = flying.pop(0)[0]
        given[number] = now_ns
        end_ns = ends(drive, size, now_ns=now_ns)[0]
        latencies[number] = end_ns - now_ns
        flying.append((end_ns, number))
    return latencies


def gb_s(profile: DriveProfile, size: int, depth: int, count: int = 4000) -> float:
    """Bytes moved over time with `depth` reads in flight, past the beginning."""
    latencies = closed_loop(DriveModel(profile), size, depth, count)
    return float(size * depth / latencies[count // 2 :].mean())  # Little's law


# --- the model ---


def test_alone_an_operation_takes_latency_and_transfer() -> None:
    drive = DriveModel(PLAIN)
    assert ends(drive, 65536) == [100_000 + 32_768]
    assert ends(drive, 65536, now_ns=1_000_000) == [1_000_000 + 100_000 + 32_768]
    assert ends(drive, 65536, write=True, now_ns=2_000_000) == [2_000_000 + 20_000 + 65_536]


def test_at_depth_the_channel_sets_the_pace_in_order_of_submission() -> None:
    assert ends(DriveModel(PLAIN), 20_000, 20_000, 40_000) == [110_000, 120_000, 140_000]
    assert gb_s(PLAIN, 65536, 32) == pytest.approx(2.0, rel=0.01)


def test_reads_and_writes_have_a_channel_each() -> None:
    drive = DriveModel(PLAIN)
    assert ends(drive, 100_000, write=True) == [120_000]
    assert ends(drive, 20_000) == [110_000]


@pytest.mark.parametrize("units", [1, 4, 16])
def test_units_limit_the_rate_of_small_reads(units: int) -> None:
    """`units` / `read_us` operations a second, however many are in flight."""
    iops = gb_s(altered(units=units), 512, 64) * 1e9 / 512
    assert iops == pytest.approx(units / 100e-6, rel=0.01)


def test_the_default_reads_eight_pages_in_300_us_and_one_in_125() -> None:
    profile = load_profile(DEFAULT)
    assert ends(DriveModel(profile), *[65536] * 8)[-1] == 300_000
    assert ends(DriveModel(profile), 65536) == [125_000]


def test_a_read_behind_a_write_takes_longer() -> None:
    drive = DriveModel(altered(behind_write_us=50.0))
    assert ends(drive, 2_000) == [101_000]
    write_ends = ends(drive, 200_000, write=True, now_ns=200_000)[0]
    assert ends(drive, 2_000, now_ns=300_000) == [300_000 + 151_000]
    assert ends(drive, 2_000, now_ns=write_ends) == [write_ends + 101_000]


def test_the_link_is_a_ceiling_each_way() -> None:
    drive = DriveModel(altered(link_gb_s=0.5))
    assert ends(drive, 50_000) == [200_000]
    assert ends(drive, 50_000, write=True) == [120_000]


def test_the_tail_has_the_profiles_quantiles() -> None:
    tail = ((0.5, 102.0), (0.99, 150.0), (1.0, 1_000.0))
    drive = DriveModel(altered(read_tail=tail, read_gb_s=1e5), seed=3)
    took = np.concatenate(
        [
            drive.submit(np.full(10, 1), write=False, now_ns=t * 10**9) - t * 10**9
            for t in range(2000)
        ]
    )
    p50, p99, p999 = np.quantile(took / 1e3, [0.5, 0.99, 0.999])
    assert p50 == pytest.approx(102, abs=0.5)
    assert p99 == pytest.approx(150, rel=0.1)
    assert 700 < p999 < 1_000
    assert took.min() >= 100_000
    assert took.max() <= 1_000_000 + 1


def test_a_slow_read_does_not_hold_up_the_others() -> None:
    drive = DriveModel(altered(read_tail=((0.5, 100.0), (0.5001, 10_000.0), (1.0, 10_000.0))), 1)
    took = drive.submit(np.full(64, 2_000), write=False, now_ns=0)
    fast = took[took < 10_000_000]
    assert 0 < len(fast) < 64
    assert fast.max() <= 100_000 + 64 * 1_000


def test_the_same_seed_gives_the_same_times_and_another_others() -> None:
    profile = altered(read_tail=((0.9, 110.0), (1.0, 500.0)))
    one, same, other = (closed_loop(DriveModel(profile, seed), 4096, 8, 500) for seed in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()


sizes = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=12)
calls = st.lists(st.tuples(st.integers(0, 500_000), sizes, st.booleans()), min_size=1, max_size=12)
profiles = st.builds(
    lambda rate, us, units, behind, link, extra: altered(
        read_gb_s=rate,
        write_gb_s=rate / 2,
        read_us=us,
        units=units,
        behind_write_us=behind,
        link_gb_s=link,
        read_tail=((0.9, us + extra), (1.0, us + 3 * extra)) if extra else (),
    ),
    st.floats(0.1, 30),
    st.integers(0, 200),
    st.integers(1, 16),
    st.sampled_from([0.0, 40.0]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 25.0]),
)


@settings(max_examples=60, deadline=None)
@given(profiles, calls, st.integers(0, 3))
def test_no_operation_is_faster_than_the_drive(
    profile: DriveProfile, given: list[tuple[int, list[int], bool]], seed: int
) -> None:
    """None ends before its latency and its bytes allow, and no channel moves more than its rate."""
    drive, again, now_ns = DriveModel(profile, seed), DriveModel(profile, seed), 0
    moved = {False: 0, True: 0}
    for after_ns, lengths, write in given:
        now_ns += after_ns
        batch = np.array(lengths, np.int64)
        times = drive.submit(batch, write=write, now_ns=now_ns)
        assert (times == again.submit(batch, write=write, now_ns=now_ns)).all()
        latency_ns = int((profile.write_us if write else profile.read_us) * 1e3)
        rate = profile.write_gb_s if write else profile.read_gb_s
        rate = min(rate, profile.link_gb_s or rate)
        assert (times >= now_ns + latency_ns + np.floor(batch / rate)).all()
        moved[write] += int(batch.sum())
        assert int(times.max()) >= moved[write] / rate - 1
        if write or not (profile.read_tail or profile.behind_write_us):
            assert (np.diff(times) >= 0).all()


# --- profiles ---


def test_every_profile_that_ships_loads() -> None:
    assert DEFAULT in profile_names()
    for name in profile_names():
        profile = load_profile(name)
        assert (profile.name, bool(profile.source)) == (name, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("read_gb_s = 1", "missing required field"),
        ('name = "x"\nread_gb_s = 0\nwrite_gb_s = 1\nread_us = 1', "read_gb_s is 0"),
        ('name = "x"\nread_gb_s = 1\nwrite_gb_s = 1\nread_us = -1', "read_us is -1"),
        ('name = "x"\nread_gb_s = 1\nwrite_gb_s = 1\nread_us = 1\nunits = 0', "units is 0"),
        ('name = "x"\nread_gb_s = 1\nwrite_gb_s = 1\nread_us = 1\nspeed = 2', "speed"),
        (
            'name = "x"\nread_gb_s = 1\nwrite_gb_s = 1\nread_us = 9\nread_tail = [[0.5, 8.0]]',
            "must rise",
        ),
        ("= nonsense", "cannot be used"),
    ],
)
def test_a_profile_that_makes_no_sense(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "drive.toml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=said) as caught:
        load_profile(str(path))
    assert str(path) in str(caught.value)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="Did you mean '8-pages-per-300us'"):
        load_profile("8-pages-per-30us")
    with pytest.raises(ProfileError, match="ENOENT"):
        load_profile(str(tmp_path / "none.toml"))
