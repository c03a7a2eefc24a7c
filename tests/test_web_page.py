"""The daemon's page in a browser: it shows what is so, loads nothing from elsewhere, and what comes
from outside is text."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from prefetchd.bench.report_page import COLOURS
from tests.runtime_bench import PLAIN, content, keys
from tests.sidecar_bench import PATIENCE_S, space
from tests.test_seeing import Seen, seen

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def in_browser(url: str, profile: Path) -> tuple[str, str]:
    """The page's markup after five polls, and what the browser had to complain of."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={profile}", "--virtual-time-budget=5500", "--dump-dom", url]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=4 * PATIENCE_S
    )
    return done.stdout, "\n".join(re.findall(r".*CONSOLE.*", done.stderr))


def words(page: str, name: str) -> str:
    """What an element says."""
    found = re.search(rf'id="{name}"[^>]*>(.*?)</(?:h1|tbody|span|section|b)>', page, re.S)
    assert found, name
    return html.unescape(re.sub(r"<[^>]+>", " ", found[1]))


def used(look: Seen) -> None:
    kv = look.served.connect("chat")
    blocks = kv.put(keys(4), content(4)).blocks
    kv.demand(kv.pages(blocks, 1)).wait()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_shows_the_daemon_live(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=console.error('run')>"
    with seen(tmp_path, {"chat": space(), "jobs": space(replace(PLAIN, depth=4))}) as look:
        used(look)
        runtime = look.served.runtime("chat")
        object.__setattr__(runtime._parts, "notes", (hostile,))
        page, complaints = in_browser(look.url, tmp_path / "profile")
    assert complaints == ""
    assert 'data-state="live"' in page
    assert int(re.search(r'data-pictures="(\d+)"', page)[1]) >= 3  # type: ignore[index]
    assert words(page, "state") == "READY"
    assert hostile in words(page, "notes")
    assert "<img" not in page
    assert re.findall(r"chat|jobs", words(page, "spaces")) == ["chat", "jobs"]
    assert "1 client, 1 ticket held" in words(page, "engines")
    assert "heatmaplayer" in page, "plotly has drawn"


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    with seen(tmp_path) as look:
        status, page = look.get("/")
        assert status == 200
        assert COLOURS["dark"]["@miss"] in page
        for path in re.findall(r'(?:src|href)="([^"]+)"', page):
            assert path == "data:," or look.get(f"/{path}")[0] == 200, path
        script, style = look.get("/page.js")[1], look.get("/page.css")[1]
        assert not re.search(r"https?://|@import|innerHTML", page + script + style)
        assert "@painting" not in script
