"""An HTTP server that sleeps while nobody asks.

Decides how it is ended. uvicorn's own loop wakes ten times a second to look whether it is to end
and what time it is; this one is told, and its answers bear no date.
"""

from __future__ import annotations

import asyncio

import uvicorn


class QuietServer(uvicorn.Server):
    """`serve` in one thread until `end`, which any thread may call, once, before or after."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        if not self.should_exit:
            await self._told.wait()

    def end(self) -> None:
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._told.set)
