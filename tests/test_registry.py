"""Predictors and devices are found by name, entry point or file; what is wrong is said plainly."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from prefetchd.device import StorageDevice
from prefetchd.gpu import GpuDevice
from prefetchd.predictor import Predictor
from prefetchd.registry import (
    RegistryError,
    gpu_device_class,
    names,
    predictor_class,
    storage_device_class,
)

ROOT = Path(__file__).resolve().parent.parent
MINE = "from prefetchd.predictor import Predictor\n\nclass Mine(Predictor):\n    name = 'mine'\n"


def plugin_files(folder: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / folder).glob("*.py") if not p.name.startswith("_"))


def refusal(name: str) -> str:
    with pytest.raises(RegistryError) as caught:
        predictor_class(name)
    return str(caught.value)


# --- what is there -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", plugin_files("predictors"))
def test_every_file_in_predictors_is_found_by_its_name(name: str) -> None:
    found = predictor_class(name)
    assert issubclass(found, Predictor)
    assert found.name == name
    assert name in names("predictor")


@pytest.mark.parametrize("name", plugin_files("devices"))
def test_every_file_in_devices_is_a_device_of_one_kind(name: str) -> None:
    is_gpu = name in names("GPU device")
    assert is_gpu != (name in names("storage device"))
    if is_gpu:
        assert issubclass(gpu_device_class(name), GpuDevice)
    else:
        assert issubclass(storage_device_class(name), StorageDevice)


def test_hyphens_and_underscores_are_the_same() -> None:
    assert predictor_class("sliding-window") is predictor_class("sliding_window")


def test_names_imports_nothing() -> None:
    code = (
        "import sys, prefetchd.registry as registry\n"
        "before = set(sys.modules)\n"
        "for kind in ('predictor', 'storage device', 'GPU device'): registry.names(kind)\n"
        "print([m for m in sys.modules if m not in before and m.count('.') == 2\n"
        "       and m.startswith('prefetchd.')])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert told.stdout.strip() == "[]"


# --- files of the user's -------------------------------------------------------------------------


def test_a_file_is_loaded_by_its_path_and_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    assert predictor_class(str(path)).name == "mine"
    path.write_text(MINE.replace("'mine'", "'edited'"))
    assert predictor_class(str(path)).name == "edited"


def test_a_relative_path_and_private_helpers_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE.replace("Mine", "_Base") + "\nclass Own(_Base): ...\n")
    monkeypatch.chdir(tmp_path)
    assert predictor_class("./mine.py").__name__ == "Own"
    assert predictor_class("mine.py").__name__ == "Own"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class Mine(:\n", "line 1: invalid syntax: class Mine(:"),
        ("x = 1\nimport no_such_package\n", "line 2: ModuleNotFoundError"),
        ("\n\nx = 1 / 0\n", "line 3: ZeroDivisionError: division by zero"),
        ("def f():\n    return y\nf()\n", "line 2: NameError"),
        ("x = 1\n", "must define one class derived from prefetchd.predictor.Predictor"),
        (MINE + "class Other(Predictor): ...\n", "several predictors (Mine, Other)"),
        ("from prefetchd.gpu import GpuDevice\nclass G(GpuDevice): ...", "defines a GPU device, G"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_line(
    tmp_path: Path, source: str, said: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    message = refusal(str(path))
    assert said in message
    assert str(path) in message
    assert "Traceback" not in message


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import no_such_package\n")
    assert "Install the package that has 'no_such_package'" in refusal(str(path))


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    assert "there is no file" in refusal(str(tmp_path / "gone.py"))
    assert "is a folder" in refusal(str(tmp_path) + "/")
    text = tmp_path / "mine.txt"
    text.write_text(MINE)
    assert "must end in .py" in refusal(str(text))


# --- names that mean nothing ---------------------------------------------------------------------


def test_an_unknown_name_is_answered_with_what_there_is() -> None:
    message = refusal("slidingwindow")
    assert "there is no predictor called 'slidingwindow'" in message
    assert "Did you mean 'sliding_window'?" in message
    assert ", ".join(names("predictor")) in message
    assert "Did you mean" not in refusal("zzzzzz")


@pytest.mark.parametrize("name", ["", "_chains", "__init__", "..", "model x", "os"])
def test_names_that_are_no_plugins(name: str) -> None:
    assert "there is no predictor" in refusal(name)


def test_a_device_of_the_other_kind_is_not_taken() -> None:
    gpu = names("GPU device")
    assert gpu
    with pytest.raises(RegistryError, match="holds no storage device") as caught:
        storage_device_class(gpu[-1])
    assert "It defines a GPU device" in str(caught.value)


# --- entry points --------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points as if packages had been installed; `elsewhere` is a module that they name."""
    (tmp_path / "elsewhere.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    entries: list[EntryPoint] = []
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [entry for entry in entries if entry.group == group],
    )
    yield entries
    sys.modules.pop("elsewhere", None)


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, "prefetchd.predictors")


def test_entry_points_name_a_class_or_a_module(installed: list[EntryPoint]) -> None:
    installed += [entry("by-class", "elsewhere:Mine"), entry("by_module", "elsewhere")]
    assert predictor_class("by-class") is predictor_class("by_module")
    assert {"by-class", "by_module"} <= set(names("predictor"))
    assert "by-class" not in names("storage device")


def test_entry_points_that_do_not_work_say_whose_they_are(installed: list[EntryPoint]) -> None:
    installed += [
        entry("gone", "no_such_module:Mine"),
        entry("wrong", "elsewhere:__name__"),
        entry("twice", "elsewhere:Mine"),
        entry("twice", "elsewhere:Other"),
    ]
    assert "installed as no_such_module:Mine, cannot be loaded" in refusal("gone")
    assert "(elsewhere:__name__) holds no predictor" in refusal("wrong")
    assert "several installed packages" in refusal("twice")


def test_our_own_file_comes_first(installed: list[EntryPoint]) -> None:
    installed.append(entry("none", "elsewhere:Mine"))
    assert predictor_class("none").__name__ == "NoPrefetch"


# --- the tree ------------------------------------------------------------------------------------


def test_the_package_list_equals_the_folders_on_disk() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = [
        path.parent
        for path in (ROOT / "prefetchd").rglob("__init__.py")
        if path.relative_to(ROOT).parts[1] not in ("predictors", "devices")
    ]
    ours = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(settings["packages"]) == ours | {"prefetchd.predictors", "prefetchd.devices"}
    assert settings["package-dir"] == {
        "prefetchd": "prefetchd",
        "prefetchd.predictors": "predictors",
        "prefetchd.devices": "devices",
    }
    for link in ("predictors", "devices"):
        path = ROOT / "prefetchd" / link
        assert path.is_symlink()
        assert path.readlink() == Path("..") / link


def bare_imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        else:
            continue
        bare = [name for name in modules if name.split(".")[0] in ("predictors", "devices")]
        found += [f"{path.relative_to(ROOT)}:{node.lineno} imports {name}" for name in bare]
    return found


def test_nothing_imports_the_plugin_folders_by_their_bare_names() -> None:
    files = [
        path
        for folder in ("prefetchd", "predictors", "devices", "tests", "scripts", "docs")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert len(files) > 20
    assert [found for path in files for found in bare_imports(path)] == []
