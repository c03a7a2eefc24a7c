"""cross_request: chains need two anchors, paths end in doubt, hints are read once for all."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefetchd.model import Access, ChainHint, DoneHint, Geometry, Ids
from prefetchd.predictors._chains import FLOOR, Chains, Uses
from prefetchd.predictors.cross_request import STREAMS_MAX, CrossRequest


def demand(predictor: CrossRequest, pages: Ids | list[int], request: int) -> None:
    predictor.on_access(Access(np.array(pages, np.int64), np.zeros(len(pages), np.uint8), request))


def guessed(predictor: CrossRequest, limit: int = 1000) -> list[int]:
    pages: list[int] = predictor.predict(0, limit).pages.tolist()
    return pages


# --- chains, without hints ------------------------------------------------------------------------


def test_one_anchor_gives_nothing_and_two_give_the_chain() -> None:
    predictor = CrossRequest(Geometry(1, 100), 50)
    demand(predictor, [0, 10, 11, 12, 13], request=1)
    predictor.on_done_hint(DoneHint(1))
    demand(predictor, [0], request=2)
    assert guessed(predictor) == []
    demand(predictor, [10], request=2)
    # The edge to 13, the end of the chain, is as sure as any until ends have been seen to change.
    assert guessed(predictor) == [11, 12, 13]
    demand(predictor, [11], request=2)
    assert guessed(predictor) == [12, 13]


def test_a_block_after_another_predecessor_starts_no_chain() -> None:
    predictor = CrossRequest(Geometry(1, 100), 50)
    demand(predictor, [0, 10, 11, 12], request=1)
    demand(predictor, [0, 50, 10], request=2)
    assert guessed(predictor) == []


def test_the_last_successor_counts() -> None:
    predictor = CrossRequest(Geometry(1, 100), 50)
    demand(predictor, [0, 10, 11, 12], request=1)
    demand(predictor, [0, 10, 20, 21], request=2)
    demand(predictor, [0, 10], request=3)
    assert guessed(predictor)[:1] == [20]


def test_confidence_is_a_product_along_the_path_and_ends_it_at_the_floor() -> None:
    chains = Chains(1000)
    line = np.arange(200)
    chains.learn(line)
    for fork in range(200, 230):  # at block 5 the way has parted thirty times
        chains.learn(np.array([3, 4, 5, fork]))
    chains.learn(line)
    path, sure = chains.walk(0, 1, 100)
    assert path[:4].tolist() == [2, 3, 4, 5]
    assert (np.diff(sure) < 0).all()
    assert len(path) == 4  # one in thirty is under the floor
    assert sure[-1] > FLOOR


def test_ends_of_chains_are_trusted_less_once_they_have_proved_to_change() -> None:
    predictor = CrossRequest(Geometry(1, 4000), 50)
    for turn in range(0, 120, 2):  # a first turn, then one that replaces its last block
        base = 10 + turn * 10
        demand(predictor, [0, *range(base, base + 8)], turn)
        predictor.on_done_hint(DoneHint(turn))
        demand(predictor, [0, *range(base, base + 7), *range(base + 10, base + 14)], turn + 1)
        predictor.on_done_hint(DoneHint(turn + 1))
    demand(predictor, [0, 10], 1000)
    assert guessed(predictor) == [*range(11, 17), 20, 21, 22]  # without 23, the end


def multi_turn_trace() -> list[Ids]:
    """Interleaved sessions of up to nine turns; each replaces the end of the one before."""
    random = np.random.default_rng(11)
    requests, live, free = [], [np.array([0])] * 40, 1
    for _ in range(1500):
        place = int(random.integers(len(live)))
        new = int(random.integers(2, 14))
        if random.random() < 0.15:
            live[place] = np.array([0])
        keep = max(1, len(live[place]) - 1)
        live[place] = np.concatenate([live[place][:keep], np.arange(free, free + new)])
        free += new
        requests.append(live[place])
    return requests


def test_coverage_and_precision_over_many_sessions() -> None:
    requests = multi_turn_trace()
    blocks = 1 + max(int(request.max()) for request in requests)
    predictor = CrossRequest(Geometry(1, blocks), 500)
    seen = np.zeros(blocks, np.bool_)
    covered = reusable = right = named = 0
    for number, request in enumerate(requests):
        demand(predictor, request[:2], number)
        guess = predictor.predict(0, 256).pages
        rest = request[2:]
        again = rest[seen[rest]]
        reusable += len(again)
        covered += int(np.isin(again, guess).sum())
        named += len(guess)
        right += int(np.isin(guess, rest).sum())
        demand(predictor, rest, number)
        predictor.on_done_hint(DoneHint(number))
        seen[request] = True
    assert reusable > 10_000
    assert covered / reusable > 0.98
    assert right / named > 0.9


def test_an_idle_request_stops_guessing() -> None:
    predictor = CrossRequest(Geometry(2, 100), 50)
    demand(predictor, [2 * block for block in range(10)], request=1)
    demand(predictor, [0, 2, 4], request=2)
    assert guessed(predictor) != []
    for _ in range(5):  # more than two passes over two layers on the blocks it has
        demand(predictor, [1, 3, 5], request=2)
    assert guessed(predictor) == []


# --- hints --------------------------------------------------------------------------------------


def test_a_hinted_chain_is_guessed_in_prefix_order_for_sure_and_in_time() -> None:
    predictor = CrossRequest(Geometry(2, 100), 50)
    predictor.on_chain_hint(ChainHint(1, np.array([0, 7, 5, 7, 999, -3]), start_ns=5000))
    guess = predictor.predict(0, 100)
    assert guess.pages.tolist() == [0, 1, 14, 15, 10, 11]
    assert guess.confidence is not None
    assert guess.confidence.tolist() == [1] * 6
    assert guess.deadline_ns == 5000
    assert predictor.predict(0, 3).pages.tolist() == [0, 1, 14]


def test_a_shared_prefix_is_guessed_once_and_the_sooner_request_first() -> None:
    predictor = CrossRequest(Geometry(1, 100), 50)
    predictor.on_chain_hint(ChainHint(1, np.array([0, 1, 2, 3]), start_ns=9000))
    predictor.on_chain_hint(ChainHint(2, np.array([0, 1, 8, 9]), start_ns=4000))
    guess = predictor.predict(0, 100)
    assert guess.pages.tolist() == [0, 1, 8, 9, 2, 3]
    assert guess.deadline_ns == 4000
    predictor.on_done_hint(DoneHint(2))
    assert guessed(predictor) == [0, 1, 2, 3]
    predictor.on_done_hint(DoneHint(1))
    assert guessed(predictor) == []


def test_a_plan_moves_on_with_its_request() -> None:
    predictor = CrossRequest(Geometry(2, 5000), 50)
    predictor.on_chain_hint(ChainHint(1, np.arange(5000)))
    demand(predictor, list(range(6000)), request=1)
    assert predictor.predict(0, 4).pages.tolist() == [6000, 6001, 6002, 6003]
    demand(predictor, [6001], request=1)
    assert predictor.predict(0, 3).pages.tolist() == [6000, 6002, 6003]


def test_a_plan_ends_when_its_request_decodes() -> None:
    predictor = CrossRequest(Geometry(2, 5000), 50)
    predictor.on_chain_hint(ChainHint(1, np.arange(50)))
    for _ in range(20):  # a sparse decode, over and over the same ten pages
        assert guessed(predictor) != []
        demand(predictor, list(range(0, 20, 2)), request=1)
    demand(predictor, [0], request=1)
    assert guessed(predictor) == []


def test_only_pages_that_earlier_requests_used_are_guessed() -> None:
    predictor = CrossRequest(Geometry(4, 100), 50)
    for request in (1, 2):  # both over blocks 3 and 4; one page of block 4 by one of them only
        demand(predictor, [12, 14, 17] + [18] * (request == 1), request)
    predictor.on_chain_hint(ChainHint(9, np.array([3, 4])))
    assert guessed(predictor) == [12, 13, 14, 15, 16, 17, 18, 19]  # neither has ended
    predictor.on_done_hint(DoneHint(1))
    predictor.on_done_hint(DoneHint(2))
    guess = predictor.predict(0, 100)
    assert guess.pages.tolist() == [12, 14, 17, 18]
    assert guess.confidence is not None
    assert guess.confidence.tolist() == [1, 1, 1, 0.5]


# --- limits -------------------------------------------------------------------------------------


def test_more_requests_than_are_tracked_forget_the_oldest() -> None:
    predictor = CrossRequest(Geometry(1, 1000), 50)
    for request in range(5 * STREAMS_MAX):
        demand(predictor, [0, 3 * request + 1, 3 * request + 2, 3 * request + 3], request)
    demand(predictor, [0, 1], request=10_000)
    assert guessed(predictor) == [2, 3]


@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=8), max_size=20))
def test_uses_agree_with_a_plain_count(requests: list[list[int]]) -> None:
    geometry = Geometry(3, 4)
    uses = Uses(geometry)
    bit = np.uint32(4)
    ended = [0] * geometry.blocks
    used = [0] * geometry.pages
    for request in requests:
        new = uses.touch(np.array(request), bit)
        assert new.tolist() == list(dict.fromkeys(page // 3 for page in request))
        uses.finish(bit, new)
        for page in set(request):
            used[page] += 1
        for block in {page // 3 for page in request}:
            ended[block] += 1
    shares = uses.shares(np.arange(geometry.blocks)).reshape(-1)
    expected = [
        used[page] / ended[page // 3] if ended[page // 3] else 1 for page in range(geometry.pages)
    ]
    np.testing.assert_allclose(shares, expected, rtol=1e-6)
    assert not uses.pages_touched.any()


def test_counts_stay_right_over_many_more_requests_than_a_byte_counts() -> None:
    uses = Uses(Geometry(2, 3))
    for request in range(1000):
        new = uses.touch(np.array([2, 3] if request % 2 else [2]), np.uint32(1))
        uses.finish(np.uint32(1), new)
    np.testing.assert_allclose(uses.shares(np.array([1])), [[1, 0.5]], atol=0.02)


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=6, unique=True), max_size=9))
def test_a_block_alone_teaches_the_same_as_a_sequence_of_three(chains: list[list[int]]) -> None:
    one, several = Chains(10), Chains(10)
    for chain in chains + chains[:1] * 260:  # more often than a byte counts
        for three in zip(chain, chain[1:], chain[2:], strict=False):
            several.learn(np.array(three))
            one.follow(*three)
    for chain in chains:
        for mine, others in zip(
            one.walk(chain[0], chain[1], 9), several.walk(chain[0], chain[1], 9), strict=True
        ):
            np.testing.assert_array_equal(mine, others)


@given(st.lists(st.integers(0, 11), max_size=20))
def test_one_page_at_a_time_touches_the_same_as_all_at_once(pages: list[int]) -> None:
    one, several = Uses(Geometry(3, 4)), Uses(Geometry(3, 4))
    new = several.touch(np.array(pages, np.int64), np.uint32(8))
    assert [page // 3 for page in pages if one.touch_one(page, 8)] == new.tolist()
    np.testing.assert_array_equal(one.pages_touched, several.pages_touched)
    np.testing.assert_array_equal(one.blocks_touched, several.blocks_touched)


def test_whether_one_block_was_read_is_told_as_for_many() -> None:
    uses, bit = Uses(Geometry(1, 4)), np.uint32(2)
    uses.touch_one(0, 1)
    uses.finish(np.uint32(1), np.array([0, 1]))  # of block 1 that request used no page
    uses.touch_one(2, 2)
    expected = ~uses.unread(np.arange(4), bit)[:, 0]
    assert [uses.has_read(block, 2) for block in range(4)] == expected.tolist()
    assert expected.tolist() == [False, True, True, False]
