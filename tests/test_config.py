"""The daemon's configuration: what can be said, and the line and the reason of what cannot."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest

from prefetchd.config import (
    ConfigError,
    limits_of,
    parse_config,
    read_config,
    settings_of,
    socket_mode,
)
from prefetchd.config_tables import EXAMPLE
from tests.replays import run_here

SPACE = '[namespaces.a]\nstore = "x"\nlayers = 2\npage_bytes = "4KiB"\nblocks = 4\n'


def test_the_example_can_be_used() -> None:
    config = parse_config(EXAMPLE, "example")
    settings = settings_of(config.namespaces["chat"])
    assert settings.layout is not None
    assert (settings.layout.layers, settings.blocks) == (32, 100_000)
    assert settings.options.staging_bytes == 4 << 30
    assert socket_mode(config) == 0o660
    commented = "\n".join(
        line.removeprefix("# ") if " = " in line else line for line in EXAMPLE.splitlines()
    )
    everything = parse_config(commented, "with all that is commented out")
    assert settings_of(everything.namespaces["chat"]).options.quota_bytes == 100 << 30
    assert settings_of(everything.namespaces["chat"]).options.key_file == "/etc/prefetchd/chat.key"
    assert limits_of(everything).write_bytes == 64 << 20


def test_a_gpu_is_the_hosts_own_memory_unless_the_file_says_more() -> None:
    spaces = {
        text: parse_config(SPACE + text, "x").namespaces["a"] for text in ("", 'gpu = "cuda"')
    }
    assert [settings_of(space).options.gpu for space in spaces.values()] == ["host", "cuda"]


def test_users_are_names_or_numbers() -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    config = parse_config(SPACE + f'users = ["{me}", 7]\n', "x")
    assert settings_of(config.namespaces["a"]).uids == {os.getuid(), 7}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[daemon]\nsocket = 3\n", 2, "[daemon] socket: Expected `str`, got `int`"),
        ("\n[daemon]\nclients = 1\nsokcet = 'x'\n", 4, "[daemon] sokcet: there is no 'sokcet'"),
        ("[daemon]\nsocket_mode = '999'\n", 2, "socket_mode: '999' is no mode"),
        ("[deamon]\n", 1, "there is no table 'deamon'"),
        ("[daemon\n", 1, "line 1"),
        (SPACE + "staging = '4 pies'\n", 6, "[namespaces.a] staging: '4 pies' is no size"),
        (SPACE + "users = ['nobody knows']\n", 6, "'nobody knows' is not known on this machine"),
        (SPACE + "depth = 0\n", 6, "depth is 0"),
        (SPACE + "admission = 'none'\n", 6, "admission is 'none'"),
        ("[namespaces.a]\nblocks = 4\n", 1, "missing required field `store`"),
        ("[namespaces.a]\nstore = 'x'\nmodel = 'gpt'\n", 3, "'gpt' is no preset"),
        ("[namespaces.'no name/']\nstore = 'x'\n", 1, "is no name for a namespace"),
        (SPACE + SPACE.replace(".a]", ".b]"), 7, "is namespace 'a''s"),
        ("namespaces = 3\n", 1, "namespaces are tables"),
        (SPACE + f"salt = '{'s' * 65}'\n", 6, "salt: it has 65 bytes; at most 64 are taken"),
        (SPACE + "predictor = 'nope'\n", 6, "there is no predictor called 'nope'"),
        (SPACE + "predictor = './nope.py'\n", 6, "there is no file nope.py"),
        (SPACE + "evict = 'nope'\n", 6, "no eviction policy is 'nope'"),
        (SPACE + "device = 'nope'\n", 6, "there is no storage device called 'nope'"),
        (SPACE + "gpu = 'nope'\n", 6, "there is no GPU device called 'nope'"),
        (SPACE + "users = [-1]\n", 6, "-1 is no number of a user or group"),
        (SPACE + "depth = 1000000000\n", 6, "depth: Expected `int` <= 32768"),
        (SPACE + "model = 'llama-3-8b'\n", 6, "either model, or layers and page_bytes"),
        (SPACE + "dtype = 'fp8'\n", 1, "dtype is said of a model"),
        (SPACE.replace("= 4\n", "= -10\n"), 5, "blocks: Expected `int` >= 0"),
        (SPACE.replace("= 4\n", f"= {10**17 - 1}\n"), 5, "blocks: Expected `int` <="),
        (SPACE.replace('"x"', '""'), 2, "store: it is empty"),
        (SPACE + SPACE.replace(".a]", ".b]").replace('"x"', '"y/../x"'), 7, "is namespace 'a''s"),
        ("[daemon]\nclients = 0\n", 2, "clients: Expected `int` >= 1"),
        ("[daemon]\nmemory = '0'\n", 2, "memory: it must be at least 1 byte"),
        (f"[daemon]\nsocket = '/{'s' * 200}'\n", 2, "a path of over 107 bytes"),
        (f"[daemon]\nhttp = 'unix:/{'s' * 200}'\n", 2, "a path of over 107 bytes"),
    ],
)
def test_what_is_wrong_is_told_by_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config(text, "c.toml")
    said = str(refusal.value)
    assert words in said
    assert f"line {line}" in said


def test_secrets_that_everybody_can_read_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.toml"
    for secret, mode, warned in (
        ('token = "t"', 0o644, True),
        ('salt = "s"', 0o604, True),
        ('token = "t"', 0o640, False),
        ("", 0o644, False),
    ):
        path.write_text(SPACE + secret)
        path.chmod(mode)
        caplog.clear()
        read_config(path)
        assert ("can be read by everybody" in caplog.text) == warned
        said = run_here(capsys, "config", "check", path)
        assert said.code == 0
        assert ("can be read by everybody" in said.err) == warned


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prefetchd.toml"
    run_here(capsys, "config", "init", str(path))
    assert path.read_text() == EXAMPLE
    assert path.stat().st_mode & 0o777 == 0o600
    again = run_here(capsys, "config", "init", str(path))
    assert (again.code, again.err[:7]) == (2, "error: ")
    assert "1 namespace, nothing is wrong" in run_here(capsys, "config", "check", str(path)).out
    shown = run_here(capsys, "config", "show", "--config", str(path)).out
    assert parse_config(shown, "shown") == parse_config(EXAMPLE, "example")
    told = json.loads(run_here(capsys, "config", "show", "--json").out)
    assert told["made"]["enabled"] is True
    assert told["daemon"]["socket"].endswith("prefetchd.sock")
    path.write_text(SPACE + 'token = "secret"\n')
    assert "secret" not in run_here(capsys, "config", "show", "--config", str(path)).out
    path.write_text(SPACE.replace("x", str(tmp_path / "none")).replace("blocks = 4", ""))
    run_here(capsys, "config", "check", path).failed(2, "there is no store in", "say blocks")
    path.write_text("[daemon]\nclients = 'x'\n")
    refused = run_here(capsys, "serve", "--config", str(path))
    assert "line 2, [daemon] clients: Expected `int`" in refused.err.replace("\n", " ")
    nothing = run_here(capsys, "serve", "--config", os.devnull)
    assert "no namespace, and none may be made" in nothing.err
    assert refused.code == nothing.code == 2
