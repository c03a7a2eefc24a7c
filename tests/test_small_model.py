"""A real small model on a store: it reads through chosen blocks, and finds its prompt again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_model import small_model_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    # Of what converts its weights, once.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
campaign = pytest.importorskip("tests.transformers_campaign")


@pytest.fixture(autouse=True)
def _there() -> None:
    campaign.torch.set_num_threads(1)
    small_model_folder()


def test_sparse_decoding_finds_the_needle_and_a_window_does_not(tmp_path: Path) -> None:
    answers = campaign.needle(tmp_path)
    assert "48213" in answers["dense"]
    assert "48213" in answers["sparse"]
    windows = [answer for name, answer in answers.items() if "recent" in name]
    assert windows
    assert not [answer for answer in windows if "48213" in answer]


def test_a_prompt_is_found_again_in_another_process(tmp_path: Path) -> None:
    told = campaign.restore(tmp_path, 400)
    assert told["same token"]


def test_four_bit_summaries_recall_what_exact_scores_choose() -> None:
    found = campaign.recall(1200, 4)
    assert found["4bit"]["recall"] >= 0.95 > found["2bit"]["recall"]
    assert found["2bit"]["recall"] > max(found["mean"]["recall"], found["minmax"]["recall"])


def test_hints_spare_most_misses_of_sparse_decoding(tmp_path: Path) -> None:
    told = campaign.hints(tmp_path, 1000, 40)
    assert told["none"]["miss %"] > 5
    assert told["misses fewer by (asked: 0.6)"] >= 0.6
