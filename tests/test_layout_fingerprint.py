"""The fingerprint of a layout: the same everywhere and for ever, and other for other bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from prefetchd.kv_parts import DTYPE_BITS, LayerGroup, Part, State, attention, mla
from prefetchd.layout import Layout, uniform
from prefetchd.presets import preset

GOLDEN = {
    "llama-3-8b": "d89e635239a1182ab745fd78a259bd06",
    "deepseek-v4-pro": "a6995d2f1c0438522d6e2d339d4ee983",
    "qwen3-next-80b-a3b": "0233951074ec81cab503689f02c69ee8",
}
"""Stores on disk are bound to these: they may change only together with the encoding's version."""


def test_fingerprints_never_change() -> None:
    assert {name: preset(name).fingerprint().hex() for name in GOLDEN} == GOLDEN
    program = (
        "from prefetchd.presets import preset\n"
        f"print([preset(name).fingerprint().hex() for name in {list(GOLDEN)}])"
    )
    for seed in ("0", "4711"):
        command = [sys.executable, "-c", program]
        ran = subprocess.run(
            command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert ran.stdout.strip() == str(list(GOLDEN.values()))


def test_fingerprints_see_layers_and_not_how_they_are_grouped_or_named() -> None:
    layer = attention(1, 8, 2, 64)
    whole = Layout("a", (replace(layer, layers=4),))
    split = Layout("b", (layer, replace(layer, layers=3)), notes=("a note",))
    assert whole.fingerprint() == split.fingerprint()
    other = attention(2, 8, 1, 64)
    groups = (replace(layer, layers=2), other)
    orders = [(0, 0, 1, 1), (1, 1, 0, 0), (0, 1, 0, 1)]
    prints = {Layout("c", groups, pattern=order).fingerprint() for order in orders}
    assert len(prints) == 3
    assert len(whole.fingerprint()) == 16


def one_group(group: LayerGroup) -> Layout:
    return Layout("test", (group,))


parts = st.builds(
    Part,
    name=st.sampled_from(["kv", "latent"]),
    elements=st.integers(1, 600),
    dtype=st.sampled_from(sorted(DTYPE_BITS)),
    rows=st.integers(1, 16),
    scale_bytes=st.integers(0, 8),
    stride=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([16, 128]),
    sinks=st.integers(0, 4),
    top=st.none() | st.integers(1, 4),
    page_tokens=st.sampled_from([None, 4, 8]),
)
CHANGES = st.sampled_from(
    [
        ("name", "other"),
        ("elements", 601),
        ("rows", 17),
        ("scale_bytes", 9),
        ("stride", 8),
        ("window", 17),
        ("window", None),
        ("sinks", 5),
        ("top", 5),
        ("page_tokens", 16),
    ]
)


@settings(deadline=None)
@given(part=parts, change=CHANGES)
def test_any_change_of_a_part_changes_the_fingerprint(
    part: Part, change: tuple[str, object]
) -> None:
    field, value = change
    values = {field: value} | ({"sinks": 0} if field == "window" and value is None else {})
    values |= {"page_tokens": 8} if field == "stride" and part.page_tokens else {}
    changed = replace(part, **values)  # type: ignore[arg-type]
    before, after = (Layout("x", (LayerGroup("x", 2, (p,)),), 16) for p in (part, changed))
    assert before.fingerprint() != after.fingerprint()


@given(dtypes=st.lists(st.sampled_from(sorted(DTYPE_BITS)), min_size=2, max_size=2, unique=True))
def test_equal_sizes_of_other_meaning_differ(dtypes: list[str]) -> None:
    first, second = (one_group(mla(2, dtype=dtype)) for dtype in dtypes)
    assert first.fingerprint() != second.fingerprint()
    states = [one_group(LayerGroup("s", 1, (), (State("s", 8, dtype),))) for dtype in dtypes]
    assert states[0].fingerprint() != states[1].fingerprint()


def test_opaque_pages_are_told_apart_by_their_content() -> None:
    plain = uniform(30, 65_536)
    assert (plain.layers, plain.page_bytes, plain.block_bytes) == (30, 65_536, 30 * 65_536)
    assert plain.stored_bytes(100) == 6 * 30 * 65_536  # complete blocks only
    assert plain.bytes_per_token == 30 * 4_096
    variants = [
        plain,
        uniform(30, 65_536, content="engine 1.2, backend x"),
        uniform(30, 65_536, 32),
        uniform(31, 65_536),
        uniform(30, 65_535),
        one_group(LayerGroup("GQA", 30, (Part("kv", 4_096, "raw"),))),
    ]
    assert len({layout.fingerprint() for layout in variants}) == len(variants)
