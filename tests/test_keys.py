"""Keys: equal prefixes meet, and nothing else ever does."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefetchd import block_keys, uniform

LAYOUT = uniform(2, 4096, block_tokens=4)
tokens = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)


@given(tokens, tokens)
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(
    mine: list[int], theirs: list[int]
) -> None:
    ours = [block_keys(those, LAYOUT) for those in (mine, theirs)]
    assert [len(keys) for keys in ours] == [len(mine) // 4, len(theirs) // 4]
    for block, (key, other) in enumerate(zip(*ours, strict=False)):
        end = 4 * (block + 1)
        assert (key == other) == (mine[:end] == theirs[:end])


@given(tokens, st.integers(0, 40))
def test_a_prefix_has_the_first_of_the_keys(all_of_them: list[int], cut: int) -> None:
    keys = block_keys(all_of_them, LAYOUT)
    assert all(len(key) == 16 for key in keys)
    assert len(set(keys)) == len(keys)
    assert block_keys(all_of_them[:cut], LAYOUT) == keys[: min(cut, len(all_of_them)) // 4]


@given(tokens, st.integers(1, 9))
def test_a_chain_goes_on_after_any_of_its_keys(all_of_them: list[int], first: int) -> None:
    keys = block_keys(all_of_them, LAYOUT)
    for block in range(first, len(keys), 2):
        rest = block_keys(all_of_them[4 * block :], LAYOUT, after=keys[block - 1])
        assert rest == keys[block:]


def test_the_chain_goes_through_what_came_before() -> None:
    repeated = block_keys([1, 2, 3, 4] * 3, LAYOUT)
    assert len(set(repeated)) == 3, "the same tokens at another place are another block"
    changed = block_keys([9, 2, 3, 4] + [1, 2, 3, 4] * 2, LAYOUT)
    assert not set(repeated) & set(changed)


def test_no_key_of_one_namespace_or_layout_is_one_of_another() -> None:
    chains = [
        block_keys(range(16), LAYOUT),
        block_keys(range(16), LAYOUT, "mine"),
        block_keys(range(16), LAYOUT, "theirs"),
        block_keys(range(16), LAYOUT, ""),
        block_keys(range(16), uniform(3, 4096, block_tokens=4)),
        block_keys(range(16), uniform(2, 8192, block_tokens=4)),
        block_keys(range(16), uniform(2, 4096, block_tokens=4, content="other")),
    ]
    assert len({key for chain in chains for key in chain}) == 4 * len(chains)


def test_tokens_that_fill_no_block_have_no_key() -> None:
    assert block_keys([], LAYOUT) == block_keys([1, 2, 3], LAYOUT) == []
    assert len(block_keys(range(7), LAYOUT)) == 1


def test_the_form_of_the_tokens_does_not_matter() -> None:
    plain = block_keys(list(range(8)), LAYOUT)
    for kind in (np.int32, np.uint16, ">i8", np.int64):
        assert block_keys(np.arange(8).astype(kind), LAYOUT) == plain
    assert block_keys(np.arange(16)[::2] // 2, LAYOUT) == plain


def test_keys_are_the_same_in_every_version() -> None:
    """A store outlives the program that wrote it: these keys are on people's drives."""
    assert block_keys(range(8), LAYOUT, "tenant")[1].hex() == "841c401f756706a1837ecdba77cba96c"
