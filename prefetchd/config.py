"""The daemon's configuration: a TOML file read, and what is wrong with one, by line.

Decides what the values of its tables mean. Refuses to know how a daemon runs.
"""

from __future__ import annotations

import grp
import logging
import pwd
import re
import stat
import tomllib
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prefetchd.config_tables import Config, Daemon, Made, Space
from prefetchd.layout import Layout, LayoutError, uniform
from prefetchd.layout_command import layout_of
from prefetchd.options import Options
from prefetchd.policies import check_eviction
from prefetchd.registry import RegistryError, check_name
from prefetchd.sidecar.greeting import ServerLimits
from prefetchd.sidecar.http import check_address
from prefetchd.sidecar.namespace import NamespaceSettings
from prefetchd.sidecar.namespace import check_name as check_namespace
from prefetchd.sidecar.place import PlaceError, check_length
from prefetchd.sidecar.shares import check_weight
from prefetchd.store_opening import exists
from prefetchd.units import parse_bytes

Table = TypeVar("Table", bound=msgspec.Struct)


log = logging.getLogger("prefetchd")

_NOBODY = (1 << 32) - 1  # what the kernel says where there is none


class ConfigError(ValueError):
    """A configuration that cannot be used: file, line, what is wrong."""


def read_config(path: Path) -> Config:
    """Raises ConfigError, OSError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 at byte {error.start}") from None
    config = parse_config(text, str(path))
    if words := exposed(path, config):
        log.warning("%s", words)
    return config


def exposed(path: Path, config: Config) -> str:
    """Which secrets others on this machine can read in this file, in words; empty if none."""
    mode = path.stat().st_mode
    named = [name for name, space in config.namespaces.items() if space.token or space.salt]
    if not named or not mode & stat.S_IROTH:
        return ""
    return (
        f"{path} can be read by everybody on this machine, and holds a token or salt of "
        f"{', '.join(named)}; chmod 640 it, its group the daemon's"
    )


def parse_config(text: str, where: str) -> Config:
    """Raises ConfigError: `where`, the line and what is wrong there."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    unknown = sorted(set(tables) - set(Config.__struct_fields__))
    if unknown:
        raise ConfigError(
            f"{where}, line {_line_of(text, unknown[0], '')}: there is no table {unknown[0]!r}; "
            f"there are {', '.join(Config.__struct_fields__)}"
        )
    daemon = _table(text, where, "daemon", tables.get("daemon", {}), Daemon)
    made = _table(text, where, "made", tables.get("made", {}), Made)
    spaces = tables.get("namespaces", {})
    if not isinstance(spaces, dict):
        line = _line_of(text, "", "namespaces")
        raise ConfigError(f"{where}, line {line}: namespaces are tables: [namespaces.NAME]")
    read = {
        name: _table(text, where, f"namespaces.{name}", space, Space)
        for name, space in spaces.items()
    }
    config = Config(daemon, made, read)
    _check(config, text, where)
    return config


def _table(text: str, where: str, name: str, table: object, kind: type[Table]) -> Table:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        words = str(error)
        found = re.search(r"unknown field `(\w+)`|\$\.(\w+)", words)
        key = (found[1] or found[2]) if found else ""
        reason = words.split(" - at ", maxsplit=1)[0]
        if found and found[1]:
            reason = f"there is no {key!r}; there are {', '.join(kind.__struct_fields__)}"
        line = _line_of(text, name, key)
        raise ConfigError(f"{where}, line {line}, [{name}] {key}: {reason}") from error


def _line_of(text: str, table: str, key: str) -> int:
    """Where a key of a table stands; where the table does, if the key does not."""
    header = re.compile(r"\s*\[\s*([^\]]*?)\s*\]")
    inside, place = not table, 1
    for number, line in enumerate(text.splitlines(), 1):
        if match := header.match(line):
            inside = match[1].replace('"', "").replace("'", "") == table
            place = number if inside else place
        elif inside and key and re.match(rf'\s*"?{re.escape(key)}"?\s*=', line):
            return number
    return place


def _check(config: Config, text: str, where: str) -> None:
    """Everything that can be known without opening anything."""

    def sound(table: str, key: str, make: Callable[..., Any], *given: Any) -> None:
        try:
            make(*given)
        except (ValueError, LayoutError, RegistryError, PlaceError) as error:
            if option := re.match(r"option (\w+?)(_bytes)? is", str(error)):
                key = option[1]
            line = _line_of(text, table, key)
            raise ConfigError(f"{where}, line {line}, [{table}] {key}: {error}") from error

    sound("daemon", "socket_mode", socket_mode, config)
    sound("daemon", "write_bytes", parse_bytes, config.daemon.write_bytes)
    sound("daemon", "memory", _some, config.daemon.memory)
    sound("daemon", "socket", check_length, Path(config.daemon.socket))
    sound("daemon", "http", _check_http, config.daemon.http)
    sound("made", "gpu", check_name, "GPU device", config.made.gpu)
    sound("made", "bytes", parse_bytes, config.made.bytes)
    sound("made", "staging", parse_bytes, config.made.staging)
    stores: dict[str, str] = {}
    for name, space in config.namespaces.items():
        table = f"namespaces.{name}"
        sound(table, "", check_namespace, name)
        for key in ("staging", "quota", "cap", "floor"):
            sound(table, key, _size, getattr(space, key))
        sound(table, "users", _users, space.users)
        sound(table, "groups", _groups, space)
        sound(table, "erase_users", _users, space.erase_users)
        sound(table, "weight", check_weight, space.weight)
        sound(table, "salt", _salt, space)
        sound(table, "predictor", check_name, "predictor", space.predictor)
        sound(table, "evict", check_eviction, space.evict)
        sound(table, "device", check_name, "storage device", space.device)
        sound(table, "gpu", check_name, "GPU device", space.gpu)
        sound(table, "model", _layout, space)
        sound(table, "store", settings_of, space)
        other = stores.setdefault(str(Path(space.store).resolve()), name)
        if other != name:
            line = _line_of(text, table, "store")
            raise ConfigError(
                f"{where}, line {line}, [{table}] store: {space.store} is namespace {other!r}'s; "
                "each has a folder of its own"
            )


def check_new_stores(config: Config) -> None:
    """Raises ConfigError, StoreError: a store that is not there yet cannot be made as it is said.
    A daemon that serves need not ask: what it has open is there."""
    for name, space in config.namespaces.items():
        if not exists(Path(space.store)) and (not space.blocks or _layout(space) is None):
            raise ConfigError(
                f"[namespaces.{name}]: there is no store in {space.store}; to have one made, say "
                "blocks, and model or layers and page_bytes"
            )


def socket_mode(config: Config) -> int:
    """Raises ValueError."""
    mode = config.daemon.socket_mode
    if not re.fullmatch(r"0?[0-7]{3}", mode):
        raise ValueError(f'{mode!r} is no mode; write one like "0660"')
    return int(mode, 8)


def limits_of(config: Config) -> ServerLimits:
    daemon = config.daemon
    write_bytes = parse_bytes(daemon.write_bytes)
    return ServerLimits(daemon.clients, daemon.clients_per_uid, write_bytes)


def memory_of(config: Config) -> int | None:
    """Of staging of all namespaces together, if the configuration says."""
    return _size(config.daemon.memory)


def settings_of(space: Space) -> NamespaceSettings:
    """Raises ValueError, LayoutError."""
    if not space.store:
        raise ValueError("it is empty; name a folder")
    options = Options(
        staging_bytes=_size(space.staging),
        device=space.device,
        gpu=space.gpu,
        predictor=space.predictor,
        evict=space.evict,
        depth=space.depth,
        demand_timeout_s=space.demand_timeout_s,
        quota_bytes=_size(space.quota),
        cap_bytes=_size(space.cap),
        floor_bytes=_size(space.floor) or 0,
        ttl_s=space.ttl_s,
        admission=space.admission,
        key_file=space.key_file or None,
        drain=tuple(space.drain),
    )
    return NamespaceSettings(
        Path(space.store),
        _layout(space),
        space.blocks or None,
        space.fill,
        options,
        _users(space.users),
        _groups(space),
        space.token,
        check_weight(space.weight),
        _salt(space),
        _users(space.erase_users),
        tuple(space.detach),
        tuple(space.replace.items()),
    )


def _layout(space: Space) -> Layout | None:
    if space.model and (space.layers or space.page_bytes):
        raise ValueError("say either model, or layers and page_bytes")
    if space.model:
        return layout_of(space.model, space.dtype or None)
    if space.dtype:
        raise ValueError("dtype is said of a model, and none is named")
    if space.layers or space.page_bytes:
        return uniform(space.layers, parse_bytes(space.page_bytes))
    return None


def _size(text: str) -> int | None:
    return parse_bytes(text) if text else None


def _some(text: str) -> int | None:
    if (size := _size(text)) == 0:
        raise ValueError("it must be at least 1 byte")
    return size


def _salt(space: Space) -> bytes:
    salt = space.salt.encode()
    if len(salt) > blake2b.MAX_KEY_SIZE:
        raise ValueError(f"it has {len(salt)} bytes; at most {blake2b.MAX_KEY_SIZE} are taken")
    return salt


def _check_http(address: str) -> None:
    if address and isinstance(where := check_address(address), Path):
        check_length(where)


def _users(users: list[str | int]) -> frozenset[int]:
    return frozenset(_number(one, lambda name: pwd.getpwnam(name).pw_uid) for one in users)


def _groups(space: Space) -> frozenset[int]:
    return frozenset(_number(one, lambda name: grp.getgrnam(name).gr_gid) for one in space.groups)


def _number(name: str | int, look_up: Callable[[str], int]) -> int:
    if isinstance(name, int):
        if not 0 <= name < _NOBODY:
            raise ValueError(f"{name} is no number of a user or group")
        return name
    try:
        return look_up(name)
    except KeyError:
        raise ValueError(f"{name!r} is not known on this machine") from None
