"""`with` and `async with` for what is closed at the end, in a thread where a loop must not wait.

Decides that the error of the body is the one that is told. Refuses to know what is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

log = logging.getLogger("prefetchd")


class Closing:
    close: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as closing:
            if error is None:
                raise
            log.error("%s", closing)
            error.add_note(f"afterwards, while closing: {closing}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, traceback)
