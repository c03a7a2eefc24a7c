"""The example package is found by its entry point, passes the check, and so does the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from prefetchd.registry import names, predictor_class
from prefetchd.testing import check_predictor
from tests.replays import run_here

EXAMPLE = Path(__file__).parent.parent / "examples" / "predictor-package"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example in a folder of `sys.path`, with the metadata that an installer would write."""
    settings = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    project = settings["project"]
    metadata = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module in settings["tool"]["setuptools"]["py-modules"]:
        shutil.copy(EXAMPLE / f"{module}.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "last_turn", raising=False)
    return tmp_path


def test_the_registry_finds_the_package_and_the_check_passes_it(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "last_turn" in names("predictor")
    assert predictor_class("last_turn").__name__ == "LastTurn"
    report = check_predictor("last_turn")
    assert (report.predictor, report.notes) == ("last_turn", ())
    assert "last_turn" in run_here(capsys, "predictor", "list").out.splitlines()
    done = run_here(capsys, "predictor", "check", "last_turn", "--quick")
    assert done.code == 0
    assert "last_turn: nothing is wrong, in " in done.out
    monkey_path = os.pathsep.join([str(installed), *sys.path])
    tests = shutil.copytree(EXAMPLE / "tests", installed / "tests")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        env={**os.environ, "PYTHONPATH": monkey_path},
        cwd=installed,
        check=True,
        timeout=120,
    )


def test_the_command_tells_what_is_wrong_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\n"
        "from prefetchd.predictor import Guess, Predictor\n"
        "class Mine(Predictor):\n"
        "    def predict(self, now_ns, limit):\n"
        "        return Guess(np.zeros(limit))\n"
    )
    done = run_here(capsys, "predictor", "check", path)
    assert done.code == 1
    assert "predict: pages holds float64, such as 0.0: make it int64" in done.out
    assert done.out.splitlines()[-1].startswith("mine: 1 fault, in ")
    done = run_here(capsys, "predictor", "check", path, "--quick", "--json")
    assert done.code == 1
    told = json.loads(done.out)
    assert [found["kind"] for found in told["findings"]] == ["type"]
    assert "auto" in json.loads(run_here(capsys, "predictor", "list", "--json").out)
    run_here(capsys, "predictor", "check", tmp_path / "gone.py").failed(2, "there is no file")
