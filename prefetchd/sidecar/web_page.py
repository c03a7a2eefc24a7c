"""The page that shows the figures live: its files, and what a browser may do with them.

Decides the page's policy: nothing is loaded from anywhere else, and nothing but the files here is
run. Colours and the look of plots are the reports'. What is shown is the page's own business.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from prefetchd.bench.report_page import COLOURS, PAINTING, STYLE

_FOLDER = Path(__file__).parent / "page"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    # Plotly sets styles of its own.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def _plotly_script() -> Path:
    """Found without importing plotly, which takes a second and 40 MB."""
    found = find_spec("plotly")
    if found is None or found.origin is None:
        raise ImportError("plotly is not installed", name="plotly")
    return Path(found.origin).parent / "package_data" / "plotly.min.js"


_PLOTLY = _plotly_script()  # here, so that what is not installed is told when this is imported


def page_routes() -> list[Route]:
    colours = msgspec.json.encode(COLOURS).decode()
    page = (_FOLDER / "index.html").read_text().replace("@colours", colours)
    style = STYLE + (_FOLDER / "page.css").read_text()
    script = (_FOLDER / "page.js").read_text().replace("@painting", PAINTING)

    def chart_script(_: Request) -> Response:
        kept = {**HEADERS, "Cache-Control": "max-age=86400"}
        return FileResponse(_PLOTLY, media_type="text/javascript", headers=kept)

    return [
        Route("/", _text(page, "text/html")),
        Route("/page.css", _text(style, "text/css")),
        Route("/page.js", _text(script, "text/javascript")),
        Route("/plotly.js", chart_script),
    ]


def _text(text: str, media_type: str) -> Callable[[Request], Response]:
    def answer(_: Request) -> Response:
        return Response(text, media_type=media_type, headers=HEADERS)

    return answer
