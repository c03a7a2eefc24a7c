"""What a predictor must do is tested by prefetchd; only what it should guess is left to say."""

from last_turn import LastTurn

from prefetchd.testing import check_predictor


def test_it_keeps_to_the_contract():
    check_predictor(LastTurn)
