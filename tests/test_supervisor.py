"""What systemd is told, and that the files for deployment name what is there."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prefetchd import store_making, uniform
from prefetchd.cli import app
from prefetchd.config import parse_config
from prefetchd.sidecar.server import Server
from prefetchd.sidecar.supervisor import Supervisor
from prefetchd.store_opening import Opening, superblock_of
from tests.replays import run_here
from tests.sidecar_bench import PATIENCE_S, daemon

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


@pytest.fixture
def listening(tmp_path: Path) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(PATIENCE_S)
        yield sock


def heard(listening: socket.socket) -> dict[str, str]:
    lines = listening.recv(4096).decode().split("\n")
    return dict(line.split("=", 1) for line in lines)


def environment(listening: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": listening.getsockname(), **more}


def test_a_daemon_tells_when_it_is_ready_reloads_and_stops(
    listening: socket.socket, tmp_path: Path
) -> None:
    config = tmp_path / "p.toml"
    config.write_text(
        f'[daemon]\nsocket = "{tmp_path}/s.sock"\n[namespaces.a]\nstore = "{tmp_path}/a"\n'
        'layers = 2\npage_bytes = "4KiB"\nblocks = 8\nfill = false\ndevice = "threads"\n'
    )
    command = [sys.executable, "-m", "prefetchd.cli", "serve", "--config", str(config)]
    watched = environment(listening, WATCHDOG_USEC="20000")
    process = subprocess.Popen(
        command, env={**os.environ, **watched}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )

    def next_but(*passed_over: str) -> dict[str, str]:
        while True:
            said = heard(listening)
            if not said.keys() & set(passed_over):
                return said

    ready = next_but("WATCHDOG")
    assert (ready["READY"], ready["STATUS"]) == ("1", f"serving 1 namespaces at {tmp_path}/s.sock")
    assert [heard(listening) for _ in range(3)] == [{"WATCHDOG": "1"}] * 3, "the loop goes round"
    process.send_signal(signal.SIGHUP)
    assert next_but("WATCHDOG").keys() == {"RELOADING", "MONOTONIC_USEC"}
    assert next_but("WATCHDOG")["READY"] == "1"
    process.terminate()
    assert next_but("WATCHDOG")["STOPPING"] == "1"
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


SLOW = """
import os, signal, sys
from prefetchd.sidecar import serve_command
opening = serve_command._open_all
def and_hung_up(namespaces):
    os.kill(os.getpid(), signal.SIGHUP)
    opening(namespaces)
serve_command._open_all = and_hung_up
if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
from prefetchd.cli import main
main(sys.argv[2:])
"""
"""A daemon that gets the signal while it opens its stores."""


@pytest.mark.parametrize("how", ["with a configuration", "without", "nohup"])
def test_a_hangup_while_stores_are_opened_ends_nothing_half_way(
    listening: socket.socket, tmp_path: Path, how: str
) -> None:
    config, key = tmp_path / "p.toml", tmp_path / "a.key"
    config.write_text(
        f'[namespaces.a]\nstore = "{tmp_path}/a"\nlayers = 2\npage_bytes = "4KiB"\nblocks = 8\n'
        f'fill = false\ndevice = "threads"\nkey_file = "{key}"\n'
    )
    if how == "with a configuration":
        store_making.create(tmp_path / "a", uniform(2, 4096), 8, fill=False, key_file=key)
        key.chmod(0o644)
        arguments = ["--config", str(config)]
    else:
        arguments = ["--store", str(tmp_path)]
    command = [sys.executable, "-c", SLOW, how, "serve", "--socket", str(tmp_path / "s")]
    with subprocess.Popen(
        [*command, *arguments],
        env={**os.environ, **environment(listening)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert "READY" in heard(listening)
            if how == "with a configuration":
                assert "RELOADING" in heard(listening)
                assert "READY" in heard(listening)
            if how != "without":
                process.terminate()
            assert "STOPPING" in heard(listening)
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, said
    assert not (tmp_path / "s").exists()
    if how == "with a configuration":
        assert "can be used by others" in said, "what is met before it serves is told"
        assert superblock_of(tmp_path / "a", Opening(read_only=True)).clean


@pytest.mark.parametrize(
    ("key_of_store", "said", "told"),
    [
        ("", "blocks = -10", "line 8, [namespaces.a] blocks"),
        ("", 'drain = ["/nope"]', "has no path /nope"),
        ("", 'drain = ["PLACE/a"]', "its first path cannot be drained"),
        ("", "page_bytes = '8KiB'", "was made for another layout"),
        ("", 'key_file = "PLACE/other"', "is not encrypted, yet key file"),
        ("key", "", "is encrypted; give its key file"),
        ("key", 'key_file = "PLACE/other"', "is of another store"),
    ],
)
def test_what_no_restart_would_mend_ends_in_the_code_that_prevents_one(
    key_of_store: str, said: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, key in ("b", "other"), ("a", key_of_store):
        key_file = tmp_path / key if key else None
        store_making.create(tmp_path / name, uniform(2, 4096), 4, fill=False, key_file=key_file)
    page = "" if "page_bytes" in said else 'page_bytes = "4KiB"'
    config = tmp_path / "p.toml"
    config.write_text(
        f'[daemon]\nsocket = "{tmp_path}/s.sock"\n[namespaces.a]\nstore = "{tmp_path}/a"\n'
        f'layers = 2\ndevice = "threads"\n{page}\n{said.replace("PLACE", str(tmp_path))}\n'
    )
    unit = configparser.RawConfigParser(strict=False)
    unit.read(DEPLOY / "prefetchd.service")
    code = int(unit["Service"]["RestartPreventExitStatus"])
    run_here(capsys, "serve", "--config", config).failed(code, told)


def test_the_end_of_a_daemon_is_told_in_its_own_log(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prefetchd.cli", "serve", "--log-format", "json"]
    command += ["--socket", str(tmp_path / ("s" * 120))]
    done = subprocess.run(
        command,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 3
    assert (lines[-1]["level"], lines[-1]["event"][:7]) == ("critical", "socket ")


def test_a_loop_that_is_stuck_gives_no_sign_of_life(
    listening: socket.socket, tmp_path: Path
) -> None:
    now_ns = 0
    told = Supervisor(environment(listening, WATCHDOG_USEC="2000000"), lambda: now_ns)
    assert told.rest_s == 1.0
    for _ in range(100):
        told.beat()
    now_ns = 10**9
    for _ in range(100):
        told.beat()
    assert heard(listening) == {"WATCHDOG": "1"}, "once in that time, however often it goes round"
    listening.setblocking(False)
    with pytest.raises(BlockingIOError):
        listening.recv(1)


@pytest.mark.parametrize(
    "more", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}]
)
def test_nobody_is_told_who_does_not_watch(listening: socket.socket, more: dict[str, str]) -> None:
    told = Supervisor(environment(listening, **more))
    assert told.rest_s is None
    told.stopping()
    assert "WATCHDOG_USEC" not in heard(listening)


def test_without_a_supervisor_the_loop_sleeps_and_a_deaf_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Supervisor({"WATCHDOG_USEC": "10"}).rest_s is None
    Supervisor({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready("x")
    assert "does not listen" in caplog.text
    with daemon(tmp_path) as served:
        server: Server = served.server
        assert server.supervisor.rest_s is None


def test_an_abstract_socket_is_found() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(b"")  # the kernel chooses a name
        sock.settimeout(PATIENCE_S)
        Supervisor({"NOTIFY_SOCKET": "@" + sock.getsockname()[1:].decode()}).ready("x")
        assert heard(sock)["READY"] == "1"


# --- the files ---


def options_of(arguments: list[str]) -> None:
    """The command takes them."""
    names = [word for word in arguments if not word.startswith("-")]
    shown = CliRunner().invoke(app, [names[0], "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for word in arguments:
        assert not word.startswith("--") or word in shown.output


def test_the_unit_is_one() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "prefetchd.service")
    service = unit["Service"]
    assert service["Type"] == "notify"
    options_of(service["ExecStart"].split()[1:])
    verify = shutil.which("systemd-analyze")
    if verify is None:
        return
    done = subprocess.run(
        [verify, "verify", "--man=no", str(DEPLOY / "prefetchd.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    unknown = [line for line in done.stderr.splitlines() if "prefetchd.service:" in line]
    assert [line for line in unknown if "not executable" not in line] == [], "it is not installed"


def test_the_container_installs_what_there_is() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    extras = re.search(r"^ARG EXTRAS=(.*)$", text, re.M)
    assert extras
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    entry, arguments = re.findall(r"^(?:ENTRYPOINT|CMD) \[(.*)\]$", text, re.M)
    assert entry.strip('"') in project["scripts"]
    options_of([word.strip(' "') for word in arguments.split(",")])
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.M):
        assert (ROOT / source).exists()


def test_the_pod_has_a_configuration_that_is_understood() -> None:
    yaml = pytest.importorskip("yaml")
    config, pod = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    read = parse_config(config["data"]["prefetchd.toml"], "kubernetes.yaml")
    side = pod["spec"]["initContainers"][0]
    options_of(side["args"])
    assert read.namespaces["chat"].users == [pod["spec"]["securityContext"]["runAsUser"]]
    mounts = {mount["name"] for mount in side["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert str(Path(read.daemon.socket).parent) in {m["mountPath"] for m in side["volumeMounts"]}
    assert read.daemon.socket in side["startupProbe"]["exec"]["command"][2]
