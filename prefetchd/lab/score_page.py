from pathlib import Path

from prefetchd.lab.score_result import Score


def write_score_page(score: Score, path: Path) -> None:
    raise NotImplementedError
