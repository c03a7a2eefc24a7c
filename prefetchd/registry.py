"""Finds predictors and devices: by the name of their file, by entry point, or by a path.

Decides which class a name means, and says what there is when it means none. Imports a module only
when it is asked for by name; help texts are made from file names and source text alone. A file of
ours comes before an entry point of the same name. Files that begin with `_` are no plug-ins.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
import traceback
import zlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from prefetchd.device import StorageDevice
from prefetchd.gpu import GpuDevice
from prefetchd.predictor import Predictor

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["predictor", "storage device", "GPU device"]

_BASES: dict[Kind, type[Any]] = {
    "predictor": Predictor,
    "storage device": StorageDevice,
    "GPU device": GpuDevice,
}
_FOLDERS: dict[Kind, str] = {
    "predictor": "predictors",
    "storage device": "devices",
    "GPU device": "devices",
}
_Plugin = TypeVar("_Plugin")
PLUGIN_PREFIX = "_prefetchd_"
"""How the names of modules begin that were loaded from a file by its path."""


class RegistryError(Exception):
    """A predictor or device cannot be had: what was asked, what there is and what to do."""


def predictor_class(name: str) -> type[Predictor]:
    """The predictor called `name`, or the one in the file `name`. Raises RegistryError."""
    return _find("predictor", name, Predictor)


def storage_device_class(name: str) -> type[StorageDevice]:
    """The storage device called `name`, or the one in the file `name`. Raises RegistryError."""
    return _find("storage device", name, StorageDevice)


def gpu_device_class(name: str) -> type[GpuDevice]:
    """The GPU device called `name`, or the one in the file `name`. Raises RegistryError."""
    return _find("GPU device", name, GpuDevice)


def names(kind: Kind) -> tuple[str, ...]:
    """All that can be asked for by name, sorted, without importing any of it.

    An entry point does not tell which kind of device it holds, so it is listed for both.
    """
    found = {entry.name for entry in _entries(kind)}
    for path in _folder(kind).glob("*.py"):
        if not path.name.startswith("_") and _mentions(path, _BASES[kind]):
            found.add(path.stem)
    return tuple(sorted(found))


def check_name(kind: Kind, name: str) -> None:
    """Raises RegistryError if nothing is called so. Nothing is imported."""
    if name.endswith(".py") or os.sep in name:
        _check_file(kind, Path(name))
        return
    plain = name.strip().replace("-", "_")
    is_word = plain.isidentifier() and not plain.startswith("_")
    is_ours = is_word and (_folder(kind) / f"{plain}.py").is_file()
    if not is_ours and not any(entry.name in (name, plain) for entry in _entries(kind)):
        raise RegistryError(_unknown(kind, name))


def _find(kind: Kind, name: str, base: type[_Plugin]) -> type[_Plugin]:
    if name.endswith(".py") or os.sep in name:
        return _only_class(kind, _module_of_file(kind, Path(name)), base, name)
    plain = name.strip().replace("-", "_")
    if plain.isidentifier() and not plain.startswith("_"):
        path = _folder(kind) / f"{plain}.py"
        if path.is_file():
            module = _module_of_package(kind, plain, path)
            return _only_class(kind, module, base, name)
    entries = [entry for entry in _entries(kind) if entry.name in (name, plain)]
    if entries:
        return _entry_class(kind, entries, base)
    raise RegistryError(_unknown(kind, name))


def plugin_fault(error: BaseException) -> str | None:
    """If the error arose in a file that was named by its path: which, where and what."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__", "")).startswith(PLUGIN_PREFIX):
            place = f"{frame.f_code.co_filename}, line {line}"
            return f"{place}, in {frame.f_code.co_name}: {type(error).__name__}: {error}"
    return None


# --- where things are ---


def _folder(kind: Kind) -> Path:
    """The folder of our own plug-ins; found through the import system, as links may stand here."""
    package = importlib.import_module(f"prefetchd.{_FOLDERS[kind]}")
    return Path(next(iter(package.__path__)))


def _entries(kind: Kind) -> list[EntryPoint]:
    from importlib.metadata import entry_points  # 20 ms, which most starts need not spend

    group = f"prefetchd.{_FOLDERS[kind]}"
    return sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def _mentions(path: Path, base: type[Any]) -> bool:
    """Whether the file defines a class upon `base`, judged by its text: importing may be dear."""
    source = path.read_text(encoding="utf-8", errors="replace")
    return re.search(rf"^class \w+\([^)]*{base.__name__}\b", source, re.MULTILINE) is not None


def _unknown(kind: Kind, name: str) -> str:
    known = names(kind)
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"there is no {kind} called {name!r}.{meant} There are: {', '.join(known)}. "
        f"A path to a .py file works too, for example ./mine.py"
    )


# --- loading, with errors for people ---


def _module_of_package(kind: Kind, name: str, path: Path) -> ModuleType:
    try:
        return importlib.import_module(f"prefetchd.{_FOLDERS[kind]}.{name}")
    except (Exception, SystemExit) as error:
        raise RegistryError(_broken(kind, path, error)) from error


def _check_file(kind: Kind, path: Path) -> None:
    if path.is_dir():
        raise RegistryError(f"{path} is a folder; name the .py file of your {kind} in it")
    if not path.is_file():
        raise RegistryError(
            f"there is no file {path} (looked in {Path.cwd()}); name the .py file of a {kind}, "
            f"or one of: {', '.join(names(kind))}"
        )


def _module_of_file(kind: Kind, path: Path) -> ModuleType:
    """Run a file as a module of its own, anew each time, since it may have been edited."""
    _check_file(kind, path)
    place = zlib.crc32(os.fsencode(path.resolve()))
    spec = importlib.util.spec_from_file_location(f"{PLUGIN_PREFIX}{path.stem}_{place:08x}", path)
    if spec is None or spec.loader is None:
        raise RegistryError(f"{path} cannot be a {kind}: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise RegistryError(_broken(kind, path, error)) from error
    return module


def _entry_class(kind: Kind, entries: list[EntryPoint], base: type[_Plugin]) -> type[_Plugin]:
    if len({entry.value for entry in entries}) > 1:
        owners = ", ".join(entry.value for entry in entries)
        raise RegistryError(
            f"several installed packages offer a {kind} called {entries[0].name!r}: {owners}. "
            f"Uninstall all but one, or name the file instead"
        )
    entry = entries[0]
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:
        raise RegistryError(
            f"the {kind} {entry.name!r}, installed as {entry.value}, cannot be loaded: "
            f"{type(error).__name__}: {error}. Update or uninstall the package that brings it"
        ) from error
    if isinstance(found, ModuleType):
        return _only_class(kind, found, base, entry.value)
    if isinstance(found, type) and issubclass(found, base):
        return found
    raise RegistryError(
        f"the entry point {entry.name!r} ({entry.value}) holds no {kind}: it must name a class "
        f"derived from {base.__module__}.{base.__name__}, or a module with one such class"
    )


def _only_class(kind: Kind, module: ModuleType, base: type[_Plugin], asked: str) -> type[_Plugin]:
    """The one public class derived from `base` that the module itself defines."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, base)
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")
    ]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(value.__name__ for value in found)
        raise RegistryError(
            f"{asked} defines several {kind}s ({several}), so it is unclear which is meant: keep "
            f"one, or begin the names of the others with an underscore"
        )
    raise RegistryError(
        f"{asked} holds no {kind}: it must define one class derived from "
        f"{base.__module__}.{base.__name__}. {_other_kind(module, base)}"
        f"{kind[0].upper()}{kind[1:]}s there are: {', '.join(names(kind))}"
    )


def _other_kind(module: ModuleType, base: type[Any]) -> str:
    for kind, other in _BASES.items():
        for value in vars(module).values():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and other is not base and issubclass(value, other):
                return f"It defines a {kind}, {value.__name__}. "
    return ""


def _broken(kind: Kind, path: Path, error: BaseException) -> str:
    """What is wrong in the file, and in which line, without a traceback."""
    if isinstance(error, SyntaxError):
        text = (error.text or "").strip()
        place = f"{error.filename or path}, line {error.lineno}"
        return f"the {kind} cannot be read: {place}: {error.msg}" + (f": {text}" if text else "")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    place = f"{path}, line {own[-1].lineno}" if own else f"{path}"
    what = f"the {kind} cannot be loaded: {place}: {type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name and own:
        what += f". Install the package that has {error.name!r}, or choose another {kind}"
    return what
