"""A call under way that somebody else can end."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from edit.errors import EditError

__all__ = ["OpenCall"]


class OpenCall:
    """A context of the task that enters it. `end` raises an error inside at once, wherever the task waits."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._error: EditError | None = None

    @property
    def open(self) -> bool:
        """Whether a task is inside."""
        return self._task is not None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        return self

    def end(self, error: EditError) -> None:
        """End the call with this error. Has no effect after the first time, nor after the call."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        task, self._task = self._task, None
        if self._error is None:  # a cancellation of somebody else: the caller went away, or the coordinator stops
            return
        if task is not None:
            task.uncancel()
        if isinstance(error, asyncio.CancelledError):
            raise self._error from None
