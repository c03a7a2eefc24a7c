"""What is told over HTTP: metrics, health, the figures as JSON, and the page that shows them.

Decides paths, status codes and headers. Nothing can be changed over HTTP, and nothing that clients
store is told; names of namespaces and paths, and counts, are. Refuses to know how it is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefetchd.sidecar.exposition import exposer
from prefetchd.sidecar.watching import Picture, Verdict, Watch, encode
from prefetchd.sidecar.web_page import HEADERS, page_routes

_JSON = "application/json"


def application(watch: Watch, hosts: Sequence[str]) -> Starlette:
    """`hosts`: by which names it may be called (`*`: any), so that a foreign page's name that
    leads to this machine is no way in."""
    expose = exposer(watch.picture)

    def metrics(request: Request) -> Response:
        text, content_type = expose(request.headers.get("accept", ""))
        return Response(text, media_type=content_type, headers=HEADERS)

    def figures(_: Request) -> Response:
        return Response(encode(watch.picture()), media_type=_JSON, headers=HEADERS)

    routes = [
        *page_routes(),
        Route("/metrics", metrics),
        Route("/figures.json", figures),
        Route("/healthz", _told(watch, lambda verdict: verdict.healthy)),
        Route("/readyz", _told(watch, lambda verdict: verdict.ready)),
    ]
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    return Starlette(routes=routes, middleware=[guard])


def _told(watch: Watch, well: Callable[[Verdict], bool]) -> Callable[[Request], Response]:
    """200 or 503, and why."""

    def answer(_: Request) -> Response:
        picture = watch.picture()
        body = msgspec.json.encode({**msgspec.to_builtins(picture.verdict), **_proofs(picture)})
        status = 200 if well(picture.verdict) else 503
        return Response(body, status, media_type=_JSON, headers=HEADERS)

    return answer


def _proofs(picture: Picture) -> dict[str, dict[str, dict[str, str]]]:
    return {"proofs": {space.name: space.stats.proofs for space in picture.namespaces}}
