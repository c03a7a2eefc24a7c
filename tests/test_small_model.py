"""A real small model on a store: it reads through chosen blocks, and finds its prompt again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.small_model import small_model_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    # Of what converts its weights, once.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
campaign = pytest.importorskip("tests.transformers_campaign")


@pytest.fixture(scope="module")
def ids() -> Any:
    campaign.torch.set_num_threads(1)
    small_model_folder()
    return campaign.needle_ids(campaign.small_model()[1], tokens=1300, place=350)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small") / "kv"


@pytest.fixture(scope="module")
def answers(ids: Any, folder: Path) -> dict[str, str]:
    """After this, `folder` is a store with the prompt: nothing here computes it again."""
    told: dict[str, str] = campaign.needle(folder, ids)
    return told


def test_sparse_decoding_finds_the_needle_and_a_window_does_not(answers: dict[str, str]) -> None:
    assert "48213" in answers["dense"]
    assert "48213" in answers["sparse"]
    windows = [answer for name, answer in answers.items() if "recent" in name]
    assert len(windows) == 2
    assert not [answer for answer in windows if "48213" in answer]


@pytest.mark.usefixtures("answers")
def test_four_bit_summaries_recall_what_exact_scores_choose(ids: Any, folder: Path) -> None:
    model, _ = campaign.small_model()
    with campaign.adapter.open(model, folder, blocks=campaign.blocks_of(ids)) as kv:
        assert kv.cache(ids).get_seq_length() == (ids.shape[1] - 1) // 16 * 16
        found = campaign.recall(campaign.builtin_of(kv, ids), ids, 1)
    share = {kind: told["recall"] for kind, told in found.items()}
    assert share["4bit"] >= 0.95
    assert share["4bit"] > share["2bit"] > max(share["mean"], share["minmax"])


@pytest.mark.usefixtures("answers")
def test_hints_spare_most_misses_of_sparse_decoding(ids: Any, folder: Path) -> None:
    told = campaign.hints(folder, ids, 24, warmup_steps=8)
    assert told["none"]["miss %"] > 5
    assert told["misses fewer by (asked: 0.6)"] >= 0.6
