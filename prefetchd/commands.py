"""Which commands there are, and where each is defined: read when it is called, not before.

Decides their names. A daemon, which is to be ready at once, need not wait for what draws reports.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

PLACES = {
    "replay": "prefetchd.bench.replay_command:replay_app",
    "simulate": "prefetchd.lab.simulate_command:simulate_app",
    "simulate restore": "prefetchd.lab.simulate_restore_command:restore",
    "simulate events": "prefetchd.lab.simulate_events_command:events",
    "score": "prefetchd.lab.score_command:score_command",
    "bench": "prefetchd.bench.commands:bench_app",
    "store": "prefetchd.store_command:store_app",
    "trace": "prefetchd.lab.trace_command:trace_app",
    "trace record": "prefetchd.lab.record_command:record",
    "predictor": "prefetchd.predictor_command:predictor_app",
    "config": "prefetchd.sidecar.serve_command:config_app",
    "namespace": "prefetchd.sidecar.namespace_command:namespace_app",
    "layout": "prefetchd.layout_command:show_layout",
    "serve": "prefetchd.sidecar.serve_command:serve",
    "top": "prefetchd.sidecar.top_command:top",
}
"""An application of typer's, which then is a group, or a function."""


class Commands(TyperGroup):
    """All of them, by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in PLACES if " " not in name]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _load(cmd_name) if cmd_name in self.list_commands(ctx) else None


def _load(name: str) -> Any:
    module, _, attribute = PLACES[name].partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(name.rpartition(" ")[2])(found)
        return typer.main.get_command(alone)
    group: Any = typer.main.get_group(found)
    group.name = name
    for member in PLACES:
        if member.startswith(f"{name} "):
            group.add_command(_load(member), member.rpartition(" ")[2])
    return group
